"""How the shipped models were trained, and how anyone trains them again: `workbench train NAME`.

One run is a folder. `state/` holds the last checkpoint (safetensors and JSON, written whole or not at all)
until the run ends; then the folder holds a checkpoint in Hugging Face layout with a model card. A run that
was interrupted goes on where it stopped; given seed, device and library versions it ends the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from workbench.errors import WorkbenchError, unknown
from workbench.files import read_json_object, write_tensors, write_text, writing
from workbench.models.assembly import BACK, mixer_initial_value
from workbench.models.attention import causal_mask
from workbench.models.autocast import precision_words, training_products
from workbench.models.batch import Batch
from workbench.models.checkpoints import load, save_checkpoint, shipped_tokenizer
from workbench.models.config import ModelConfig
from workbench.models.corpus import held_out_files, token_stream, training_files
from workbench.models.decoder import Decoder
from workbench.models.experts import routing, tokens_per_expert, watching
from workbench.models.latent import UpProjections
from workbench.models.mixers.contract import StateMixer
from workbench.models.muon import Muon
from workbench.models.recipes import RECIPES, TOKENIZER_NAME, VOCAB_SIZE, ExpertsRecipe, Recipe
from workbench.models.tokenizer import Tokenizer, train_tokenizer


class TrainingAttention:
    """The attention of training: whole sequences of one length, nothing remembered between steps."""

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.scale = config, config.attention_scale
        self._shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def begin(self, batch: Batch) -> None:
        lengths = {b - a for a, b in zip(batch.query_starts, batch.query_starts[1:])}
        assert len(lengths) == 1 and not any(batch.first_positions), "training sends whole sequences of one length"

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: Batch,
        up: UpProjections | None = None,
    ) -> torch.Tensor:
        if up is not None:
            assert k is not None, "latents"
            k, v = up.expand(k)
        if self.config.kv_sources is not None:
            if k is not None and v is not None:
                self._shared[layer] = (k, v)
            k, v = self._shared[self.config.kv_source(layer)]
        assert k is not None and v is not None, "a layer without keys has those of another"
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        num_sequences = len(batch.sequences)
        q4, k4, v4 = (t.unflatten(0, (num_sequences, -1)).transpose(1, 2) for t in (q, k, v))  # [B, H, S, D]
        mask = self._mask(q4.shape[2], self.config.window_of(layer), q.device)
        width = v4.shape[-1]
        v4 = F.pad(v4, (0, q4.shape[-1] - width))  # latent attention: the fused kernel wants one size for all
        out = F.scaled_dot_product_attention(q4, k4, v4, attn_mask=mask, is_causal=mask is None, scale=self.scale)
        return out[..., :width].transpose(1, 2).flatten(0, 1)

    def advance(self, layer: int, mixer: StateMixer, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return mixer.whole(x.unflatten(0, (len(batch.sequences), -1))).flatten(0, 1)

    def _mask(self, length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        if window is None or window >= length:
            return None
        if (length, window) not in self._masks:
            mask = causal_mask(length, length, window, device, self.config.attention_sinks)
            self._masks[length, window] = mask
        return self._masks[length, window]


class EpochSampler:
    """Step -> token rows. Each pass shuffles the files, so the n-th step of a seed is always the same rows."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        files = training_files()
        self._files = [torch.tensor([*tokenizer.encode(f.text), tokenizer.end_of_text]) for f in files]
        self._recipe = recipe
        self._pass = -1
        self._rows = torch.empty(0)
        self.tokens_per_pass = sum(len(f) for f in self._files)
        self.steps_per_pass = self.tokens_per_pass // (recipe.sequences_per_step * recipe.sequence_length)
        if self.steps_per_pass == 0:
            raise WorkbenchError(f"the corpus has {self.tokens_per_pass} tokens, less than one step of {recipe.name}")

    def rows(self, step: int) -> torch.Tensor:
        """[sequences_per_step, sequence_length] int64."""
        number, within = divmod(step, self.steps_per_pass)
        if number != self._pass:
            generator = torch.Generator().manual_seed(self._recipe.seed * 10_007 + number)
            order = torch.randperm(len(self._files), generator=generator).tolist()
            stream = torch.cat([self._files[i] for i in order])
            usable = len(stream) // self._recipe.sequence_length * self._recipe.sequence_length
            rows = stream[:usable].view(-1, self._recipe.sequence_length)
            self._rows = rows[torch.randperm(len(rows), generator=generator)]
            self._pass = number
        size = self._recipe.sequences_per_step
        return self._rows[within * size : (within + 1) * size]


def initialize(model: Decoder, seed: int) -> None:
    """GPT-2's initialization: normal 0.02, the projections back into the residual stream scaled by 1/√(2L).

    A mixer says itself what its other parameters start with.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        own = mixer_initial_value(model, name, generator)
        if own is not None:
            with torch.no_grad():
                parameter.copy_(own)
            continue
        if parameter.dim() < 2:
            continue
        back = name.endswith(BACK)
        std = 0.02 / math.sqrt(2 * model.config.num_layers) if back else 0.02
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def next_token_loss(
    model: Callable[..., Any], rows: torch.Tensor, kv: TrainingAttention, teacher: Decoder | None = None
) -> torch.Tensor:
    """Mean over rows [B, T] of the cross-entropy in nats of predicting rows[:, 1:] from what stands before.

    With a teacher p the draft q is trained on −Σ p·log q, all of p instead of the one token that came: a draft
    is accepted as often as the two distributions overlap (DistillSpec, arXiv 2310.08461).
    """
    batch = rows_batch(rows)
    with training_products(rows.device.type):
        logits = model(batch, kv).view(*rows.shape, -1)[:, :-1].flatten(0, 1)  # [B·(T−1), V]
        if teacher is None:
            return F.cross_entropy(logits.float(), rows[:, 1:].flatten())
        with torch.no_grad():
            wanted = teacher(batch, TrainingAttention(teacher.config)).view(*rows.shape, -1)[:, :-1].flatten(0, 1)
            wanted = wanted.float().softmax(dim=-1)
    return F.cross_entropy(logits.float(), wanted)


def rows_batch(rows: torch.Tensor) -> Batch:
    count, length = rows.shape
    return Batch(
        token_ids=rows.flatten(),
        positions=torch.arange(length, device=rows.device).repeat(count),
        sequences=tuple(range(count)),
        query_starts=tuple(range(0, (count + 1) * length, length)),
        first_positions=(0,) * count,
        logit_rows=None,
    )


@torch.no_grad()
def held_out_loss(
    model: Decoder, tokenizer: Tokenizer, context: int | None = None, check_stop: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Loss on the held-out modules, in float32: {"nats_per_token", "bits_per_byte", "tokens", "bytes"}.

    The stream of files is cut into windows of `context` tokens; the first token of a window is not scored.
    """
    context = context or model.config.context_length
    files = held_out_files()
    stream = token_stream(files, tokenizer).to(model.device)
    stream = stream[: len(stream) // context * context].view(-1, context)
    kv, total = TrainingAttention(model.config), 0.0
    for rows in stream.split(4):
        if check_stop is not None:
            check_stop()
        logits = model(rows_batch(rows), kv).view(*rows.shape, -1)[:, :-1].flatten(0, 1)
        total += F.cross_entropy(logits.float(), rows[:, 1:].flatten(), reduction="sum").item()
    scored = stream.numel() - len(stream)
    num_bytes = sum(len(tokenizer.decode(row[1:].tolist()).encode()) for row in stream)
    return {
        "nats_per_token": total / scored,
        "bits_per_byte": total / math.log(2) / num_bytes,
        "tokens": scored,
        "bytes": num_bytes,
    }


def make_optimizers(model: Decoder, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers (Jordan et al., 2024), AdamW for embeddings, norms and the rates of scans."""
    linear = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not model.head}
    matrices = [p for p in model.parameters() if id(p) in linear]
    rest = [p for p in model.parameters() if id(p) not in linear]
    return [
        Muon(matrices, lr=0.0, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw", momentum=0.95),
        torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0),
    ]


# -- checkpoints of a run: safetensors and JSON, so that nothing is ever unpickled --------------------------


def save_state(
    folder: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], progress: dict[str, Any]
) -> None:
    tensors = {f"model.{n}": p.detach().contiguous() for n, p in model.named_parameters()}
    for index, optimizer in enumerate(optimizers):
        for parameter, values in optimizer.state_dict()["state"].items():
            for key, value in values.items():
                tensors[f"optimizer.{index}.{parameter}.{key}"] = torch.as_tensor(value).detach().clone()
    fresh, state, old = folder / "state.new", folder / "state", folder / "state.old"
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        with writing(state):
            write_tensors(fresh / "tensors.safetensors", tensors)
            write_text(fresh / "progress.json", json.dumps(progress))
            shutil.rmtree(old, ignore_errors=True)
            if state.exists():
                os.rename(state, old)
            os.rename(fresh, state)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def remove_state(folder: Path) -> None:
    """Of a run that has ended; the older state first, and what makes a folder a state before the rest of it."""
    for state in (folder / "state.old", folder / "state"):
        (state / "progress.json").unlink(missing_ok=True)
        shutil.rmtree(state, ignore_errors=True)


FINISHED = ("card.json", "model.safetensors", "heads.safetensors")  # written when a run has ended


def begun(folder: Path, recipe: Recipe) -> tuple[Path, dict[str, Any]] | None:
    """(state, progress) of the unfinished run of this recipe in a folder; None where a new one can begin.

    Raises WorkbenchError for the run of another recipe, for a model that is finished, and for what cannot be read.
    """
    state = next((p for p in (folder / "state", folder / "state.old") if (p / "progress.json").exists()), None)
    if state is None:
        if there := [name for name in FINISHED if (folder / name).exists()]:
            raise WorkbenchError(
                f"{folder} holds a finished model ({', '.join(there)}), which would be overwritten; choose another"
                " --out, or delete it to start again"
            )
        return None
    try:
        progress = read_json_object(state / "progress.json")
        if not {"recipe", "step", "seconds", "losses"} <= progress.keys():
            raise WorkbenchError("progress.json does not say how far the run was")
    except WorkbenchError as error:
        raise WorkbenchError(
            f"the checkpoint in {state} cannot be read ({error}); delete the folder to start again"
        ) from error
    if progress["recipe"] != recipe.digest():
        raise WorkbenchError(
            f"{folder} holds a run of another recipe ({progress['recipe']}, this is {recipe.digest()}); "
            "choose another --out, or delete it to start again"
        )
    return state, progress


def load_state(
    folder: Path, recipe: Recipe, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
) -> dict[str, Any] | None:
    if (run := begun(folder, recipe)) is None:
        return None
    state, progress = run
    try:
        tensors = load_file(state / "tensors.safetensors", device=str(next(model.parameters()).device))
        _restore(tensors, progress["step"], model, optimizers)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise WorkbenchError(
            f"the checkpoint in {state} cannot be read ({error}); delete the folder to start again"
        ) from error
    return progress


def _restore(
    tensors: dict[str, torch.Tensor], step: int, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
) -> None:
    """Weights and optimizer state into place. Raises KeyError for a tensor that is not there."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    for index, optimizer in enumerate(optimizers):
        loaded: dict[int, dict[str, Any]] = {}
        for key, value in tensors.items():
            if key.startswith(f"optimizer.{index}."):
                _, _, number, field = key.split(".", 3)
                loaded.setdefault(int(number), {})[field] = value
        expected = sum(len(group["params"]) for group in optimizer.param_groups) if step > 0 else 0
        if len(loaded) != expected:
            raise KeyError(f"optimizer.{index}: state of {len(loaded)} parameters, expected {expected}")
        optimizer.load_state_dict({"state": loaded, "param_groups": optimizer.state_dict()["param_groups"]})


# -- the run -----------------------------------------------------------------------------------------------


def train_stdlib_tokenizer(out: Path) -> Tokenizer:
    """Train the 4,096-token BPE on the training modules and write it to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer((f.text for f in training_files()), VOCAB_SIZE)
    tokenizer.save(out)
    return tokenizer


def begin_or_resume(
    name: str,
    out: Path,
    recipe: Recipe,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    report: Callable[[str], None],
) -> dict[str, Any]:
    """The progress of a run: of the one in `out`, whose state is put into model and optimizers, or of a new one.

    Raises WorkbenchError as `begun` does."""
    progress = load_state(out, recipe, model, optimizers)
    if progress is None:
        return {"recipe": recipe.digest(), "step": 0, "seconds": 0.0, "losses": []}
    if progress["step"]:
        report(f"{name}: going on from step {progress['step']} of {recipe.steps}")
    return progress


def run_steps(
    name: str,
    out: Path,
    recipe: Recipe,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    progress: dict[str, Any],
    loss_of: Callable[[int], torch.Tensor],
    stop_at_step: int | None,
    report: Callable[[str], None],
    bar_shown: bool = True,
) -> int:
    """Train from progress["step"] to the recipe's end, or to stop_at_step, with checkpoints; returns the step reached.

    An interruption keeps a checkpoint and is raised on. Raises WorkbenchError for a loss that is no number.
    """
    from tqdm.auto import tqdm

    started = time.perf_counter()
    recent: list[float] = []

    def checkpoint(step: int) -> None:
        nonlocal started
        now = time.perf_counter()
        progress["seconds"] += now - started
        started = now
        progress["step"] = step
        if recent:
            progress["losses"].append([step, sum(recent) / len(recent)])
            recent.clear()
        save_state(out, model, optimizers, progress)

    step = progress["step"]
    last = recipe.steps if stop_at_step is None else min(recipe.steps, stop_at_step)
    shown = {"desc": name, "unit": "step", "mininterval": 2.0, "disable": not bar_shown}
    with tqdm(total=recipe.steps, initial=step, **shown) as bar:
        try:
            while step < last:
                loss = loss_of(step)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = recipe.learning_rate(step)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                value = loss.item()
                if not math.isfinite(value):
                    raise WorkbenchError(
                        f"{name}: the loss became {value} at step {step}; the last checkpoint is in {out / 'state'}"
                    )
                recent.append(value)
                step += 1
                bar.update(1)
                bar.set_postfix(loss=f"{value:.3f}", refresh=False)
                if step % recipe.checkpoint_every == 0:
                    checkpoint(step)
        except KeyboardInterrupt:
            checkpoint(step)
            report(f"{name}: interrupted at step {step}; run the same command to go on")
            raise
    if step % recipe.checkpoint_every:
        checkpoint(step)
    return step


def train(
    name: str,
    out: Path,
    *,
    device: str = "cpu",
    compile_model: bool = False,
    tokenizer: Tokenizer | None = None,
    recipe: Recipe | None = None,
    seed: int | None = None,
    steps: int | None = None,
    stop_at_step: int | None = None,
    report: Callable[[str], None] = print,
) -> Decoder:
    """Run a recipe to its end, or on from where it was interrupted, and write model and card into `out`.

    seed: in place of the recipe's own: another initialization and another order of the data.
    steps: in place of the recipe's own; the rate falls to 0 at their end.
    stop_at_step: checkpoint and return early there, as an interruption would (the run can be resumed).
    compile_model: torch.compile the forward; faster, and rounding differs a little from the plain run.
    Raises WorkbenchError for an unknown name, for a folder that holds another recipe's run, and for experts that are
    to be compiled.
    """
    if recipe is None:
        if name not in RECIPES:
            raise unknown("recipe", name, [*RECIPES, TOKENIZER_NAME])
        recipe = RECIPES[name]
    if seed is not None:
        recipe = dataclasses.replace(recipe, seed=seed)
    if steps is not None:
        recipe = dataclasses.replace(recipe, steps=steps)
    if compile_model and recipe.config.experts is not None:
        raise WorkbenchError(f"{name} has experts, whose products differ in every step; train it without torch.compile")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or shipped_tokenizer()
    model = Decoder(recipe.config, tokenizer=tokenizer, name=name)
    initialize(model, recipe.seed)
    model.to(device)
    optimizers = make_optimizers(model, recipe)
    progress = begin_or_resume(name, out, recipe, model, optimizers, report)
    sampler = EpochSampler(recipe, tokenizer)
    kv = TrainingAttention(recipe.config)
    teacher = load(recipe.teacher, device=device) if recipe.teacher else None
    forward = torch.compile(model) if compile_model else model

    balance = recipe.balance if isinstance(recipe, ExpertsRecipe) else 0.0

    def loss_of(step: int) -> torch.Tensor:
        if not balance:
            return next_token_loss(forward, sampler.rows(step).to(device), kv, teacher)
        with routing(model) as losses:
            loss = next_token_loss(forward, sampler.rows(step).to(device), kv, teacher)
        return loss + balance * torch.stack(losses).mean()

    step = run_steps(name, out, recipe, model, optimizers, progress, loss_of, stop_at_step, report)
    if step < recipe.steps:
        return model

    model.to(torch.bfloat16).to(torch.float32)  # judge the weights that ship
    held_out = held_out_loss(model, tokenizer)
    card = model_card(recipe, model, sampler, held_out, progress, device, compile_model)
    if model.config.experts is not None:
        card["load"] = held_out_load(model, tokenizer)
    save_checkpoint(model, out, dtype=torch.bfloat16)
    write_text(out / "card.json", json.dumps(card, indent=2) + "\n")
    write_text(out / "README.md", card_text(card))
    remove_state(out)
    report(f"{name}: held-out loss {held_out['nats_per_token']:.3f} nats/token; written to {out}")
    return model


def device_words(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads of {_cpu_name()}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def model_card(
    recipe: Recipe,
    model: Decoder,
    sampler: EpochSampler,
    held_out: dict[str, Any],
    progress: dict[str, Any],
    device: str,
    compiled: bool,
) -> dict[str, Any]:
    """What was trained, on what, for how long, how good: as data."""
    own = {"parameters": model.num_parameters(), "teacher": recipe.teacher, "held_out": held_out, "compiled": compiled}
    return run_facts(recipe, sampler, progress, device) | own


def run_facts(recipe: Recipe, sampler: EpochSampler, progress: dict[str, Any], device: str) -> dict[str, Any]:
    """What the cards of all kinds of model say of the run."""
    return {
        "name": recipe.name,
        "role": recipe.role,
        "config": recipe.config.to_dict(),
        "corpus": f"source of the Python {platform.python_version()} standard library, less the held-out modules",
        "corpus_tokens": sampler.tokens_per_pass,
        "tokens_seen": recipe.tokens,
        "passes": round(recipe.tokens / sampler.tokens_per_pass, 2),
        "steps": recipe.steps,
        "tokens_per_step": recipe.sequences_per_step * recipe.sequence_length,
        "optimizer": f"Muon (layer matrices) and AdamW (embeddings, norms), peak rate {recipe.peak_learning_rate}",
        "schedule": f"{recipe.warmup_steps} steps up, hold, last {recipe.decay_share:.0%} linearly to 0",
        "seed": recipe.seed,
        "precision": precision_words(torch.device(device).type),
        "training_loss_by_step": [[step, round(loss, 4)] for step, loss in progress["losses"]],
        "hardware": device_words(device),
        "hours": round(progress["seconds"] / 3600, 3),
        "torch": torch.__version__,
    }


LOAD_FILES, LOAD_ROWS = 4, 64  # of held-out text, of which the load of the experts is counted


@torch.no_grad()
def held_out_load(model: Decoder, tokenizer: Tokenizer) -> dict[str, list[float]]:
    """{layer: share of the places that each expert got} on some held-out text; evenly it would be 1/E each."""
    stream, length = token_stream(held_out_files()[:LOAD_FILES], tokenizer), min(256, model.config.context_length)
    rows = stream[: len(stream) // length * length].view(-1, length)
    with watching(model) as seen:
        model.hidden(rows_batch(rows[:LOAD_ROWS].to(model.device)), TrainingAttention(model.config))
    experts = model.config.experts_shape.num_experts
    shares = {layer: tokens_per_expert(chosen[0], experts) / chosen[0].numel() for layer, chosen in seen.items()}
    return {str(layer): [round(share, 4) for share in of_layer.tolist()] for layer, of_layer in shares.items()}


ROLES = {
    "experts": "a mixture of experts, lab 13",
    "dense twin": "as many active parameters as the mixture of experts has, lab 13",
    "target": "target of the pair",
    "draft": "draft of the pair",
    "variant": "one of six that differ in what they remember, lab 04",
    "pruned": "cut from its parent and healed, lab 12",
    "pruned draft": "cut from the target of the pair, to draft for it, lab 12",
    "from nothing": "the shape of a pruned model, trained from nothing, lab 12",
    "state variant": "one of eight that differ in how they mix tokens, lab 14",
}


def _load_line(load: dict[str, list[float]]) -> str:
    """The fullest expert of each layer, as a share of the places and beside the mean."""
    highest = [max(shares) for shares in load.values()]
    beside = ", ".join(f"{share * len(shares):.2f}" for share, shares in zip(highest, load.values()))
    return (
        f"| Load of the experts | the largest share of the places in {len(load)} layers is {max(highest):.0%}; the"
        f" fullest expert over the mean, layer by layer: {beside} |"
    )


def _arguments(card: dict[str, Any]) -> str:
    """The name, and what of the run was not the recipe's own."""
    recipe, words = RECIPES.get(card["name"]), [card["name"]]
    for key in ("seed", "steps"):
        if recipe is not None and card[key] != getattr(recipe, key):
            words.append(f"--{key} {card[key]}")
    return " ".join(words)


def card_text(card: dict[str, Any]) -> str:
    """The card as Markdown, with the front matter Hugging Face's hub reads."""
    held_out = card["held_out"]
    lines = [
        "---",
        "license: mit",
        "library_name: transformers",
        "---",
        f"# {card['name']}",
        "",
        (
            f"A {card['parameters']:,}-parameter decoder ({ROLES.get(card['role'], card['role'])}), trained"
            f" {'on from a part of ' + card['parent'] if card.get('parent') else 'from nothing'} for teaching."
        ),
        f"Make it again: `workbench train {_arguments(card)}`.",
        "",
        "| | |",
        "|---|---|",
        f"| Corpus | {card['corpus']}: {card['corpus_tokens']:,} tokens |",
        (
            f"| Seen | {card['tokens_seen']:,} tokens, {card['passes']} passes, {card['steps']:,} steps of"
            f" {card['tokens_per_step']:,} |"
        ),
        f"| Optimizer | {card['optimizer']}; {card['schedule']}; seed {card['seed']} |",
        *([f"| Teacher | {card['teacher']} (distillation) |"] if card.get("teacher") else []),
        f"| Precision | {card['precision']} |",
        (
            f"| Held-out loss | {held_out['nats_per_token']:.4f} nats per token, {held_out['bits_per_byte']:.4f} bits a"
            f" byte, over {held_out['tokens']:,} tokens |"
        ),
        *([_load_line(card["load"])] if card.get("load") else []),
        (
            f"| Hardware, time | {card['hardware']}; {card['hours']}"
            f" hours{'; torch.compile' if card['compiled'] else ''} |"
        ),
        "",
        "It has seen nothing but this one library's source: it writes plausible Python and knows no facts.",
        "The corpus is the Python Software Foundation's, under the PSF License; the weights are ours.",
        "",
    ]
    return "\n".join(lines)
