"""Healing: a pruned model is trained on, by its parent's distributions or by the text: `workbench train NAME`.

The loop, its checkpoints and its optimizers are those of `models.training`; what is new is where the model begins and
what it learns. Every `held_out_every` steps the loss on some held-out passages is noted, with the FLOPs spent so far:
3 forwards of the student per token (forward and backward), 1 of the teacher, and the forwards that made the scores.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workbench.errors import WorkbenchError, unknown
from workbench.files import read_json_object, write_text
from workbench.instruments.costs import step_costs
from workbench.models.autocast import training_products
from workbench.models.checkpoints import load, save_checkpoint
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.evaluation import held_out_passages
from workbench.models.tokenizer import Tokenizer
from workbench.models.training import (
    EpochSampler,
    TrainingAttention,
    begin_or_resume,
    begun,
    card_text,
    held_out_loss,
    initialize,
    make_optimizers,
    model_card,
    remove_state,
    rows_batch,
    run_steps,
)
from workbench.pruning.cut import prune
from workbench.pruning.importance import (
    SIDE_BY_SIDE,
    Cut,
    Importance,
    by_chance,
    by_magnitude,
    importance,
    loss_without,
)
from workbench.pruning.losses import hidden_state_loss, objective_loss
from workbench.pruning.plans import Plan, plan_by_counts
from workbench.pruning.recipes import HEALING_RECIPES, HealingRecipe
from workbench.quantization.calibration import Calibration

PASSAGES, PASSAGE = 16, 512  # held-out text of a point of the curve
CALIBRATION = (32, 256)  # sequences, tokens: what importance reads
PLAN = "plan.json"  # beside the state of a run: what of the parent stays
TRAINED, FORWARD = 3, 1  # forwards per token, of the student and of the teacher


def heal(
    name: str,
    out: Path,
    *,
    device: str = "cpu",
    recipe: HealingRecipe | None = None,
    parent: Decoder | None = None,
    tokenizer: Tokenizer | None = None,
    calibration: Calibration | None = None,
    seed: int | None = None,
    stop_at_step: int | None = None,
    report: Callable[[str], None] = print,
    check_stop: Callable[[], None] | None = None,
    bar_shown: bool = True,
) -> Decoder:
    """Cut and heal by a recipe, to its end or on from where it was interrupted; write model, plan and card into `out`.

    parent: default the recipe's own, by name. calibration: default 32 × 256 tokens of the training modules.
    seed, stop_at_step: as in `models.training.train`; a seed draws random scores anew as well. check_stop: called
    before every step; what it raises ends the run at the last checkpoint.
    Raises WorkbenchError for an unknown name, a parent with another vocabulary, and a folder that holds a run of
    another recipe or parent, or a finished model. The parent is left as it is.
    """
    if recipe is None:
        if name not in HEALING_RECIPES:
            raise unknown("recipe of healing", name, HEALING_RECIPES)
        recipe = HEALING_RECIPES[name]
    if seed is not None:
        recipe = dataclasses.replace(recipe, seed=seed)
    parent = (parent or load(recipe.parent)).to(device)
    if parent.config.vocab_size != recipe.config.vocab_size:
        raise WorkbenchError(
            f"{parent.name} has {parent.config.vocab_size:,} tokens and {recipe.name} {recipe.config.vocab_size:,}:"
            " a teacher's distribution is over its own tokens"
        )
    tokenizer = tokenizer or parent.tokenizer
    resumed = begun(out, recipe) is not None
    plan = plan_in(out, recipe, parent) if resumed else plan_of(recipe, parent, calibration, check_stop)
    model = student_of(recipe, parent, plan, tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    if plan is not None and not resumed:
        write_text(out / PLAN, json.dumps({**_made_for(recipe, parent), **plan.as_dict()}) + "\n")
    model.to(device).train().requires_grad_(True)
    optimizers = make_optimizers(model, recipe)
    progress = begin_or_resume(name, out, recipe, model, optimizers, report)
    progress.setdefault("held_out", [])
    sampler = EpochSampler(recipe, tokenizer)
    passages = held_out_passages(tokenizer, min(PASSAGE, recipe.config.context_length), PASSAGES)
    channels = None if plan is None else torch.tensor(plan.channels, device=device)

    def loss_of(step: int) -> torch.Tensor:
        if check_stop is not None:
            check_stop()
        if step % recipe.held_out_every == 0:
            note_held_out(model, passages, progress, step, flops_at(recipe, parent.config, step))
        return _loss(recipe, model, parent, sampler.rows(step).to(device), channels)

    step = run_steps(name, out, recipe, model, optimizers, progress, loss_of, stop_at_step, report, bar_shown)
    if step < recipe.steps:
        return model

    model.to(torch.bfloat16).to(torch.float32).eval().requires_grad_(False)  # judge the weights that ship
    note_held_out(model, passages, progress, step, flops_at(recipe, parent.config, step))
    card = model_card(recipe, model, sampler, held_out_loss(model, tokenizer), progress, device, False)
    card |= healing_facts(recipe, parent.config, progress, plan)
    save_checkpoint(model, out, dtype=torch.bfloat16)
    write_text(out / "card.json", json.dumps(card, indent=2) + "\n")
    write_text(out / "README.md", card_text(card))
    remove_state(out)
    report(f"{name}: held-out loss {card['held_out']['nats_per_token']:.3f} nats/token; written to {out}")
    return model


# -- where it begins ---------------------------------------------------------------------------------------------------


def plan_of(
    recipe: HealingRecipe,
    parent: Decoder,
    calibration: Calibration | None = None,
    check_stop: Callable[[], None] | None = None,
) -> Plan | None:
    """What of the parent stays; None for a run from nothing."""
    if recipe.scores is None:
        return None
    config = recipe.config
    return plan_by_counts(
        scores_of(recipe, parent, calibration, check_stop),
        parent.config,
        layers=config.num_layers,
        channels=config.hidden_size,
        neurons=config.intermediate_size,
        kv_groups=config.num_kv_heads,
    )


def plan_in(out: Path, recipe: HealingRecipe, parent: Decoder) -> Plan | None:
    """That of the run that was begun in `out`. Raises WorkbenchError where it was made for another recipe or parent."""
    if recipe.scores is None:
        return None
    file = out / PLAN
    try:
        data = read_json_object(file)
        made_for = {key: data.pop(key, None) for key in ("recipe", "parent")}
        plan = Plan.from_dict(data, parent.config)
    except WorkbenchError as error:
        raise WorkbenchError(f"{file} is no plan ({error}); delete the folder to start again") from error
    for what, wanted in _made_for(recipe, parent).items():
        if made_for[what] != wanted:
            raise WorkbenchError(
                f"{file} was made for another {what} ({made_for[what]}, this is {wanted}); choose another --out, or"
                " delete the folder to start again"
            )
    return plan


def _made_for(recipe: HealingRecipe, parent: Decoder) -> dict[str, str]:
    """Which recipe, and which weights: the name of the parent may be that of others as well."""
    digest = hashlib.sha256(json.dumps(parent.config.to_dict(), sort_keys=True).encode())
    for tensor in parent.parameters():
        digest.update(tensor.detach().float().cpu().numpy().tobytes())
    return {"recipe": recipe.digest(), "parent": f"{parent.name} {digest.hexdigest()[:16]}"}


def scores_of(
    recipe: HealingRecipe,
    parent: Decoder,
    calibration: Calibration | None = None,
    check_stop: Callable[[], None] | None = None,
) -> Importance:
    """The scores by which a recipe cuts."""
    if recipe.scores == "magnitude":
        return by_magnitude(parent)
    if recipe.scores == "random":
        return by_chance(parent.config, recipe.seed)
    calibration = calibration or Calibration.of(parent.tokenizer, sequences=CALIBRATION[0], length=CALIBRATION[1])
    return importance(parent, calibration, check_stop=check_stop)


def student_of(recipe: HealingRecipe, parent: Decoder, plan: Plan | None, tokenizer: Tokenizer | None) -> Decoder:
    """The model before the first step: cut from the parent, or with first weights of its own."""
    model = Decoder(recipe.config, tokenizer=tokenizer, name=recipe.name)
    if plan is None:
        initialize(model, recipe.seed)
        return model
    small = prune(parent, plan, name=recipe.name)
    if small.config != recipe.config:
        raise WorkbenchError(f"{recipe.name}: the plan leaves another shape of {parent.name} than the recipe's")
    model.load_state_dict(small.state_dict())
    return model


# -- what it learns ----------------------------------------------------------------------------------------------------


def _loss(
    recipe: HealingRecipe, model: Decoder, parent: Decoder, rows: torch.Tensor, channels: torch.Tensor | None
) -> torch.Tensor:
    """Of rows [B, T]: every token but the first of a row is predicted."""
    batch, wanted, teacher = rows_batch(rows), rows[:, 1:].flatten(), None
    with training_products(rows.device.type):
        if recipe.needs_teacher:
            with torch.no_grad():
                of_teacher = parent.hidden(batch, TrainingAttention(parent.config))
                teacher = _predicting(parent.logits_of(of_teacher), rows)
        hidden = model.hidden(batch, TrainingAttention(model.config))
        student = _predicting(model.logits_of(hidden), rows)
        loss = objective_loss(
            recipe.objective, student, teacher, wanted, temperature=recipe.temperature, top_k=recipe.top_k
        )
        if recipe.hidden_weight:
            assert channels is not None
            loss = loss + recipe.hidden_weight * hidden_state_loss(hidden, of_teacher, channels)
    return loss


def _predicting(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[B·(T − 1), V] of logits [B·T, V]: those that predict a token of their row."""
    return logits.view(*rows.shape, -1)[:, :-1].flatten(0, 1)


def note_held_out(model: Decoder, passages: torch.Tensor, progress: dict[str, Any], step: int, flops: float) -> None:
    """A point of the curve: [step, nats per token, FLOPs so far], once a step."""
    if progress["held_out"] and progress["held_out"][-1][0] >= step:
        return
    with torch.no_grad():
        loss = loss_without(model, passages, Cut())
    progress["held_out"].append([step, round(loss, 5), flops])


# -- what it costs -----------------------------------------------------------------------------------------------------


def forward_flops(config: ModelConfig, rows: int, length: int) -> float:
    """FLOPs of one forward over `rows` sequences of `length` tokens, with logits of every token."""
    costs = step_costs(
        config, new_tokens=[length] * rows, contexts=[0] * rows, logit_rows=rows * length, weight_bytes_per_element=4
    )
    return costs.flops


def flops_at(recipe: HealingRecipe, parent: ModelConfig, step: int) -> float:
    """FLOPs of a run up to a step: scores, student, teacher. What the parent itself cost is not in it."""
    shape = recipe.sequences_per_step, recipe.sequence_length
    each = TRAINED * forward_flops(recipe.config, *shape)
    each += FORWARD * forward_flops(parent, *shape) if recipe.needs_teacher else 0
    return step * each + (scoring_flops(parent) if recipe.scores == "importance" else 0)


def scoring_flops(parent: ModelConfig) -> float:
    """Of `importance` with drop-one losses: one forward for the sums, one for the whole, one without each layer."""
    sequences, length = CALIBRATION
    count, rest = divmod(sequences, SIDE_BY_SIDE)
    assert not rest
    return (2 + parent.num_layers) * count * forward_flops(parent, SIDE_BY_SIDE, length)


def healing_facts(
    recipe: HealingRecipe, parent: ModelConfig, progress: dict[str, Any], plan: Plan | None
) -> dict[str, Any]:
    """What a card says beyond that of a model trained from nothing."""
    return {
        "parent": recipe.parent if plan is not None else None,
        "teacher": recipe.parent if recipe.needs_teacher else None,
        "scores": recipe.scores,
        "objective": recipe.objective,
        "kept_layers": list(plan.layers) if plan is not None else None,
        "flops": flops_at(recipe, parent, recipe.steps),
        "held_out_by_step": progress["held_out"],  # [step, nats per token on 16 passages, FLOPs so far]
    }
