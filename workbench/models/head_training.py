"""How the draft heads were trained: `workbench train stdlib-10m-medusa`, `workbench train stdlib-10m-eagle`.

The target is frozen and stands still: a step reads its hidden states and asks the heads for the hidden states, and so
the distributions, of tokens further on. What is learned is the target's distribution there, not the one token that
came: a draft is accepted as often as the two distributions overlap. Only the rows of text come from the corpus.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from workbench.errors import WorkbenchError, unknown
from workbench.files import write_tensors, write_text
from workbench.models.autocast import training_products
from workbench.models.checkpoints import load
from workbench.models.corpus import held_out_files, token_stream
from workbench.models.decoder import Decoder
from workbench.models.head_losses import LOSSES, acceptance_by_depth, rank_shares
from workbench.models.head_recipes import HEAD_RECIPES, HeadRecipe
from workbench.models.heads import KINDS, EagleHead, Heads, MedusaHeads, save_heads
from workbench.models.muon import Muon
from workbench.models.training import (
    EpochSampler,
    TrainingAttention,
    begin_or_resume,
    remove_state,
    rows_batch,
    run_facts,
    run_steps,
)

# -- the run -------------------------------------------------------------------------------------------------------


class HiddenStateStore:
    """Hidden states of the rows of each step of a pass, computed once: the target is frozen. A file a step, in
    bfloat16."""

    def __init__(self, folder: Path, target: Decoder, sampler: EpochSampler) -> None:
        self._folder, self._target, self._sampler = folder, target, sampler
        folder.mkdir(parents=True, exist_ok=True)

    def step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """rows [B, T] int64, hidden_states [B, T, d] float32. Every pass has the rows of the first one, in its
        order."""
        step %= self._sampler.steps_per_pass
        rows = self._sampler.rows(step).to(self._target.device)
        file = self._folder / f"{step:06d}.safetensors"
        stored = self._read(file, rows)
        if stored is None:
            kv = TrainingAttention(self._target.config)
            with torch.no_grad(), training_products(rows.device.type):
                stored = self._target.hidden(rows_batch(rows), kv).unflatten(0, rows.shape).bfloat16()
            write_tensors(file, {"features": stored.cpu(), "tokens": rows.short().cpu()})
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
        raise WorkbenchError(f"{file} holds the hidden states of other text; delete {file.parent}, it is made again")


def make_optimizers(heads: Heads) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for norms and biases, as for the models."""
    matrices = [p for p in heads.parameters() if p.dim() == 2]
    rest = [p for p in heads.parameters() if p.dim() != 2]
    return [
        Muon(matrices, lr=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", momentum=0.95),
        torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train_heads(
    name: str,
    out: Path,
    *,
    device: str = "cpu",
    recipe: HeadRecipe | None = None,
    target: Decoder | None = None,
    hidden_states: Path | None = None,
    seed: int | None = None,
    stop_at_step: int | None = None,
    report: Callable[[str], None] = print,
) -> Heads:
    """Run a recipe to its end, or on from where it was interrupted, and write heads and card into `out`.

    target: default the recipe's own. hidden_states: a folder to keep the target's hidden states in, for another run on
    the same rows; default one inside `out`, gone when the run ends (2 GB for the whole corpus).
    seed, stop_at_step: as in `training.train`.
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
    store = HiddenStateStore(hidden_states or out / "features", target, sampler)

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
    if hidden_states is not None:
        card["features"] = "kept in a folder beside the run; time to compute them counted where they were not there"
    save_heads(heads, out)
    write_text(out / "card.json", json.dumps(card, indent=2) + "\n")
    write_text(out / "README.md", heads_card_text(card))
    remove_state(out)
    shutil.rmtree(out / "features", ignore_errors=True)
    report(f"{name}: held-out acceptance by depth {_rounded(card['held_out']['overlap'])}; written to {out}")
    return heads


def held_out_rows(target: Decoder, length: int, count: int = 64) -> torch.Tensor:
    """[rows, length] of the held-out modules, at most `count`, spread evenly over them."""
    stream = token_stream(held_out_files(), target.tokenizer).to(target.device)
    rows = stream[: len(stream) // length * length].view(-1, length)
    count = min(count, len(rows))
    return rows[[i * len(rows) // count for i in range(count)]]


def heads_card(
    recipe: HeadRecipe,
    heads: MedusaHeads | EagleHead,
    target: Decoder,
    sampler: EpochSampler,
    progress: dict[str, Any],
    device: str,
) -> dict[str, Any]:
    """What was trained, on what, for how long, how good: as data."""
    depth = heads.config.num_heads if isinstance(heads, MedusaHeads) else 4
    rows = held_out_rows(target, min(512, recipe.sequence_length))
    return run_facts(recipe, sampler, progress, device) | {
        "kind": recipe.kind,
        "target": recipe.target,
        "parameters": heads.num_parameters(),
        "optimizer": f"Muon (matrices) and AdamW (norms, biases), peak rate {recipe.peak_learning_rate}",
        "schedule": _schedule(recipe),
        "learned": _learned(recipe),
        "held_out": acceptance_by_depth(heads, target, rows, depth),
    }


def _schedule(recipe: HeadRecipe) -> str:
    once = f"{recipe.warmup_steps} steps up, hold, last {recipe.decay_share:.0%} linearly to 0"
    return once if not recipe.cycles else f"{once}; cycles of {', '.join(map(str, recipe.cycles))} steps"


def _learned(recipe: HeadRecipe) -> str:
    distribution = f"the distribution of {recipe.target}"
    if recipe.text_share:
        distribution = f"{1 - recipe.text_share:.0%} {distribution}, {recipe.text_share:.0%} the text"
    if recipe.kind == "medusa":
        return distribution
    return (
        f"{distribution} over {recipe.unrolled} steps from its own guesses, and {recipe.hidden_state_loss:g} × "
        f"smooth L1 of the hidden states, read with noise of ±{recipe.hidden_state_noise:g}"
    )


def _rounded(shares: list[float]) -> str:
    return ", ".join(f"{share:.3f}" for share in shares)


KIND_WORDS = {"medusa": "Medusa heads", "eagle": "An EAGLE head"}


def heads_card_text(card: dict[str, Any]) -> str:
    """The card as Markdown."""
    held_out = card["held_out"]
    lines = [
        "---",
        "license: mit",
        "---",
        f"# {card['name']}",
        "",
        (
            f"{KIND_WORDS[card['kind']]} of {card['parameters']:,} parameters, to draft for {card['target']}, whose "
            "embedding and output head are shared."
        ),
        f"Make it again: `workbench train {card['name']}`.",
        "",
        "| | |",
        "|---|---|",
        f"| Corpus | {card['corpus']}: {card['corpus_tokens']:,} tokens |",
        (
            f"| Seen | {card['tokens_seen']:,} tokens, {card['passes']} passes, {card['steps']:,} steps of"
            f" {card['tokens_per_step']:,} |"
        ),
        f"| Learned | {card['learned']} |",
        f"| Optimizer | {card['optimizer']}; {card['schedule']}; seed {card['seed']} |",
        f"| Precision | {card['precision']} |",
        (
            f"| Held-out acceptance by depth, Σ min(p, q) | {_rounded(held_out['overlap'])}, over"
            f" {held_out['positions']:,} places |"
        ),
        f"| Held-out agreement by depth, same best token | {_rounded(held_out['agreement'])} |",
        f"| Hardware, time | {card['hardware']}; {card['hours']} hours |",
        *([f"| Hidden states of the target | {card['features']} |"] if "features" in card else []),
        "",
        f"It reads the hidden states of {card['target']} and is of no use to any other model.",
        "The corpus is the Python Software Foundation's, under the PSF License; the weights are ours.",
        "",
    ]
    return "\n".join(lines)
