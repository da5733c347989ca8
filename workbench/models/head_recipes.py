"""How the draft heads were trained: `workbench train stdlib-10m-medusa`, `workbench train stdlib-10m-eagle`.

The target is frozen and stands still: a step reads its features and asks the heads for the features, and so the laws, of
tokens further on. What is learned is the target's law there, not the one token that came: a draft is accepted as often
as the two laws overlap. Only the rows of text come from the corpus.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from workbench.errors import WorkbenchError, unknown
from workbench.models.checkpoints import load
from workbench.models.config import ModelConfig
from workbench.models.corpus import held_out_files, token_stream
from workbench.models.decoder import Decoder
from workbench.models.head_losses import LOSSES, acceptance_by_depth, rank_shares
from workbench.models.heads import KINDS, Heads, MedusaConfig, MedusaHeads, save_heads
from workbench.models.recipes import (
    EpochSampler,
    Recipe,
    TrainingAttention,
    begin_or_resume,
    device_words,
    rows_batch,
    run_steps,
)


@dataclass(frozen=True)
class HeadRecipe(Recipe):
    """A training run of heads. `config` is theirs; `sequence_length` is that of the target's rows."""

    config: ModelConfig | MedusaConfig
    kind: str = "medusa"
    target: str = "stdlib-10m"
    text_share: float = 0.0  # of the token that came in the law that is learned; the rest is the target's
    unrolled: int = 1  # EAGLE: steps from its own guesses, each with a loss
    feature_loss: float = 0.0  # EAGLE: weight of the smooth L1 of the feature itself
    feature_noise: float = 0.0  # EAGLE: uniform noise, ±, on the features it reads (arXiv 2401.15077)
    cycles: tuple[int, ...] = ()  # steps of each, where the schedule is gone through more than once

    def __post_init__(self) -> None:
        assert sum(self.cycles) == self.steps or not self.cycles, f"{self.cycles} are not {self.steps} steps"

    def learning_rate(self, step: int) -> float:
        """As a recipe's; the next cycle begins anew from the weights of the last (warm restart, arXiv 1608.03983)."""
        for steps in self.cycles:
            if step < steps:
                return dataclasses.replace(self, steps=steps, cycles=()).learning_rate(step)
            step -= steps
        return super().learning_rate(step)


_EAGLE_LAYER = ModelConfig(
    family="llama",
    vocab_size=4096,
    hidden_size=384,
    num_layers=1,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=704,
    context_length=1024,
    tie_embeddings=True,
    bos_token_id=0,
    eos_token_ids=(0,),
)

HEAD_RECIPES: dict[str, HeadRecipe] = {
    recipe.name: recipe
    for recipe in (
        HeadRecipe(
            "stdlib-10m-medusa",
            "heads",
            MedusaConfig(hidden_size=384, vocab_size=4096, num_heads=4),
            steps=750,
            sequences_per_step=2,
            peak_learning_rate=6e-3,
            warmup_steps=15,
            kind="medusa",
        ),
        HeadRecipe(
            "stdlib-10m-eagle",
            "heads",
            _EAGLE_LAYER,
            steps=1300,
            cycles=(750, 550),
            sequences_per_step=2,
            peak_learning_rate=1e-2,
            warmup_steps=15,
            kind="eagle",
            unrolled=2,
            feature_loss=1.0,
            feature_noise=0.1,
        ),
    )
}


# -- the run -------------------------------------------------------------------------------------------------------


class FeatureStore:
    """Features of the rows of each step of a pass, computed once: the target is frozen. A file a step, in bfloat16."""

    def __init__(self, folder: Path, target: Decoder, sampler: EpochSampler) -> None:
        self._folder, self._target, self._sampler = folder, target, sampler
        folder.mkdir(parents=True, exist_ok=True)

    def step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """rows [B, T] int64, features [B, T, d] float32. Every pass has the rows of the first one, in its order."""
        step %= self._sampler.steps_per_pass
        rows = self._sampler.rows(step).to(self._target.device)
        file = self._folder / f"{step:06d}.safetensors"
        stored = self._read(file, rows)
        if stored is None:
            kv = TrainingAttention(self._target.config)
            with torch.no_grad(), torch.autocast(rows.device.type, torch.bfloat16):
                stored = self._target.hidden(rows_batch(rows), kv).unflatten(0, rows.shape).bfloat16()
            fresh = file.with_suffix(f".new-{os.getpid()}")
            save_file({"features": stored.cpu(), "tokens": rows.short().cpu()}, fresh)
            os.rename(fresh, file)
        return rows, stored.to(rows.device).float()

    @staticmethod
    def _read(file: Path, rows: torch.Tensor) -> torch.Tensor | None:
        if not file.is_file():
            return None
        try:
            tensors = load_file(file)
            if torch.equal(tensors["tokens"].to(rows.device, torch.int64), rows):
                return tensors["features"]
        except (OSError, KeyError, SafetensorError) as error:
            raise WorkbenchError(f"{file} cannot be read ({error}); delete it, it is made again") from error
        raise WorkbenchError(
            f"{file} holds the features of other text; delete {file.parent}, it is made again"
        )


def make_optimizers(heads: Heads) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for norms and biases, as for the models."""
    matrices = [p for p in heads.parameters() if p.dim() == 2]
    rest = [p for p in heads.parameters() if p.dim() != 2]
    return [
        torch.optim.Muon(matrices, lr=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", momentum=0.95),
        torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train_heads(
    name: str,
    out: Path,
    *,
    device: str = "cpu",
    recipe: HeadRecipe | None = None,
    target: Decoder | None = None,
    features: Path | None = None,
    seed: int | None = None,
    stop_at_step: int | None = None,
    report: Callable[[str], None] = print,
) -> Heads:
    """Run a recipe to its end, or on from where it was interrupted, and write heads and card into `out`.

    target: default the recipe's own. features: a folder to keep the target's features in, for another run on the same
    rows; default one inside `out`, gone when the run ends (2 GB for the whole corpus).
    seed, stop_at_step: as in `recipes.train`.
    Raises WorkbenchError for an unknown name and for a folder that holds another recipe's run.
    """
    if recipe is None:
        if name not in HEAD_RECIPES:
            raise unknown("recipe of heads", name, HEAD_RECIPES)
        recipe = HEAD_RECIPES[name]
    if seed is not None:
        recipe = dataclasses.replace(recipe, seed=seed)
    target = (target or load(recipe.target)).to(device)
    heads = KINDS[recipe.kind][0](recipe.config, target=recipe.target, name=name)
    heads.initialize(target, recipe.seed)
    heads.check_target(target)
    heads.to(device)
    optimizers = make_optimizers(heads)
    out.mkdir(parents=True, exist_ok=True)
    progress = begin_or_resume(name, out, recipe, heads, optimizers, report)
    sampler = EpochSampler(recipe, target.tokenizer)
    store = FeatureStore(features or out / "features", target, sampler)

    def loss_of(step: int) -> torch.Tensor:
        rows, of_rows = store.step(step)
        torch.manual_seed(recipe.seed * 1_000_003 + step)  # noise, the same after an interruption
        return LOSSES[recipe.kind](heads, rows, of_rows, target, recipe)

    generator_state = torch.random.get_rng_state()
    try:
        step = run_steps(name, out, recipe, heads, optimizers, progress, loss_of, stop_at_step, report)
    finally:
        torch.random.set_rng_state(generator_state)
    if step < recipe.steps:
        return heads

    heads.to(torch.bfloat16).to(torch.float32).eval().requires_grad_(False)  # judge the weights that ship
    if isinstance(heads, MedusaHeads):
        some = torch.cat([sampler.rows(step) for step in range(min(8, sampler.steps_per_pass))])
        heads.shares = rank_shares(heads, target, some.to(device))
    card = heads_card(recipe, heads, target, sampler, progress, device)
    if features is not None:
        card["features"] = (
            "kept in a folder beside the run; time to compute them counted where they were not there"
        )
    save_heads(heads, out)
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    (out / "README.md").write_text(heads_card_text(card))
    for leftover in ("state", "features"):
        shutil.rmtree(out / leftover, ignore_errors=True)
    report(f"{name}: held-out acceptance by depth {_rounded(card['held_out']['overlap'])}; written to {out}")
    return heads


def held_out_rows(target: Decoder, length: int, count: int = 64) -> torch.Tensor:
    """[rows, length] of the held-out modules, at most `count`, spread evenly over them."""
    stream = token_stream(held_out_files(), target.tokenizer).to(target.device)
    rows = stream[: len(stream) // length * length].view(-1, length)
    count = min(count, len(rows))
    return rows[[i * len(rows) // count for i in range(count)]]


def heads_card(
    recipe: HeadRecipe, heads: Heads, target: Decoder, sampler: EpochSampler, progress: dict, device: str
) -> dict:
    """What was trained, on what, for how long, how good: as data."""
    depth = heads.config.num_heads if isinstance(heads, MedusaHeads) else 4
    rows = held_out_rows(target, min(512, recipe.sequence_length))
    return {
        "name": recipe.name,
        "role": recipe.role,
        "kind": recipe.kind,
        "target": recipe.target,
        "parameters": heads.num_parameters(),
        "config": recipe.config.to_dict(),
        "corpus": f"source of the Python {platform.python_version()} standard library, less the held-out modules",
        "corpus_tokens": sampler.tokens_per_pass,
        "tokens_seen": recipe.tokens,
        "passes": round(recipe.tokens / sampler.tokens_per_pass, 2),
        "steps": recipe.steps,
        "tokens_per_step": recipe.sequences_per_step * recipe.sequence_length,
        "optimizer": f"Muon (matrices) and AdamW (norms, biases), peak rate {recipe.peak_learning_rate}",
        "schedule": _schedule(recipe),
        "seed": recipe.seed,
        "learned": _learned(recipe),
        "precision": "float32 weights, bfloat16 matrix products; shipped in bfloat16",
        "held_out": acceptance_by_depth(heads, target, rows, depth),
        "training_loss_by_step": [[step, round(loss, 4)] for step, loss in progress["losses"]],
        "hardware": device_words(device),
        "hours": round(progress["seconds"] / 3600, 3),
        "torch": torch.__version__,
    }


def _schedule(recipe: HeadRecipe) -> str:
    once = f"{recipe.warmup_steps} steps up, hold, last {recipe.decay_share:.0%} linearly to 0"
    return once if not recipe.cycles else f"{once}; cycles of {', '.join(map(str, recipe.cycles))} steps"


def _learned(recipe: HeadRecipe) -> str:
    law = f"the law of {recipe.target}"
    if recipe.text_share:
        law = f"{1 - recipe.text_share:.0%} {law}, {recipe.text_share:.0%} the text"
    if recipe.kind == "medusa":
        return law
    return (
        f"{law} over {recipe.unrolled} steps from its own guesses, and {recipe.feature_loss:g} × smooth L1 of the "
        f"features, read with noise of ±{recipe.feature_noise:g}"
    )


def _rounded(shares: list[float]) -> str:
    return ", ".join(f"{share:.3f}" for share in shares)


KIND_WORDS = {"medusa": "Medusa heads", "eagle": "An EAGLE head"}


def heads_card_text(card: dict) -> str:
    """The card as Markdown."""
    held_out = card["held_out"]
    lines = [
        "---",
        "license: mit",
        "---",
        f"# {card['name']}",
        "",
        f"{KIND_WORDS[card['kind']]} of {card['parameters']:,} parameters, to draft for {card['target']}, whose "
        "embedding and output head are shared.",
        f"Make it again: `workbench train {card['name']}`.",
        "",
        "| | |",
        "|---|---|",
        f"| Corpus | {card['corpus']}: {card['corpus_tokens']:,} tokens |",
        f"| Seen | {card['tokens_seen']:,} tokens, {card['passes']} passes, {card['steps']:,} steps of {card['tokens_per_step']:,} |",
        f"| Learned | {card['learned']} |",
        f"| Optimizer | {card['optimizer']}; {card['schedule']}; seed {card['seed']} |",
        f"| Precision | {card['precision']} |",
        f"| Held-out acceptance by depth, Σ min(p, q) | {_rounded(held_out['overlap'])}, over {held_out['positions']:,} places |",
        f"| Held-out agreement by depth, same best token | {_rounded(held_out['agreement'])} |",
        f"| Hardware, time | {card['hardware']}; {card['hours']} hours |",
        *([f"| Features of the target | {card['features']} |"] if "features" in card else []),
        "",
        f"It reads the features of {card['target']} and is of no use to any other model.",
        "The corpus is the Python Software Foundation's, under the PSF License; the weights are ours.",
        "",
    ]
    return "\n".join(lines)
