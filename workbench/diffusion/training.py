"""Runs a recipe of `recipes`: masks are drawn, and a Decoder learns what stands under them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workbench.diffusion.attention import TrainingCanvas
from workbench.diffusion.model import DiffusionModel, save_diffusion
from workbench.diffusion.objective import diffusion_loss, mask_token_of
from workbench.diffusion.recipes import DIFFUSION_RECIPES, DiffusionRecipe
from workbench.errors import unknown
from workbench.files import write_text
from workbench.models.checkpoints import load, shipped_tokenizer
from workbench.models.decoder import Decoder
from workbench.models.tokenizer import Tokenizer
from workbench.models.training import (
    EpochSampler,
    begin_or_resume,
    initialize,
    make_optimizers,
    remove_state,
    run_facts,
    run_steps,
)

CARD_PASSAGES = 64  # of the 111 held-out ones of 1,024 tokens


def train_diffusion(
    name: str,
    out: Path,
    *,
    device: str = "cpu",
    tokenizer: Tokenizer | None = None,
    recipe: DiffusionRecipe | None = None,
    seed: int | None = None,
    stop_at_step: int | None = None,
    report: Callable[[str], None] = print,
) -> DiffusionModel:
    """Run a recipe to its end, or on from where it was interrupted, and write model and card into `out`.

    seed, stop_at_step: as in `models.training.train`. Raises WorkbenchError for an unknown name and for a folder that
    holds another recipe's run.
    """
    if recipe is None:
        if name not in DIFFUSION_RECIPES:
            raise unknown("recipe of diffusion", name, DIFFUSION_RECIPES)
        recipe = DIFFUSION_RECIPES[name]
    if seed is not None:
        recipe = dataclasses.replace(recipe, seed=seed)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or shipped_tokenizer()
    decoder = Decoder(recipe.config, tokenizer=tokenizer, name=name)
    initialize(decoder, recipe.seed)
    if recipe.start is not None:
        decoder.load_state_dict(load(recipe.start).state_dict())
    decoder.to(device)
    model = DiffusionModel(decoder, recipe.kind, mask_token_of(tokenizer), recipe.block_sizes)
    optimizers = make_optimizers(decoder, recipe)
    progress = begin_or_resume(name, out, recipe, decoder, optimizers, report)
    sampler = EpochSampler(recipe, tokenizer)
    canvases = [
        TrainingCanvas(recipe.config, size, size if recipe.kind == "masked" else recipe.text_length)
        for size in recipe.block_sizes
    ]

    def loss_of(step: int) -> torch.Tensor:
        canvas = canvases[step % len(canvases)]
        rows = sampler.rows(recipe.first_step + step).reshape(-1, canvas.length).to(device)
        # the same masks after an interruption
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        return diffusion_loss(decoder, rows, canvas, model.mask_token, generator)

    step = run_steps(name, out, recipe, decoder, optimizers, progress, loss_of, stop_at_step, report)
    if step < recipe.steps:
        return model

    decoder.to(torch.bfloat16).to(torch.float32).eval().requires_grad_(False)  # judge the weights that ship
    card = diffusion_card(recipe, model, sampler, progress, device)
    save_diffusion(model, out)
    write_text(out / "card.json", json.dumps(card, indent=2) + "\n")
    write_text(out / "README.md", diffusion_card_text(card))
    remove_state(out)
    bounds = ", ".join(f"{size}: {one['nats_per_token']:.3f}" for size, one in card["held_out"].items())
    report(f"{name}: held-out bound in nats per token by block size: {bounds}; written to {out}")
    return model


def diffusion_card(
    recipe: DiffusionRecipe, model: DiffusionModel, sampler: EpochSampler, progress: dict[str, Any], device: str
) -> dict[str, Any]:
    """What was trained, on what, for how long, how good: as data."""
    from workbench.diffusion.bound import held_out_bound

    if recipe.kind == "block":
        bounds = {size: held_out_bound(model, size, passages=CARD_PASSAGES, draws=1) for size in recipe.block_sizes}
    else:  # a whole text is one draw of k, so the mean takes more of them
        bounds = {recipe.sequence_length: held_out_bound(model, recipe.sequence_length, draws=2)}
    return run_facts(recipe, sampler, progress, device) | {
        "kind": recipe.kind,
        "start": recipe.start,
        "parameters": model.decoder.num_parameters(),
        "block_sizes": list(recipe.block_sizes),
        "mask_token": model.mask_token,
        "held_out": {str(size): bound.as_dict() for size, bound in bounds.items()},
    }


def diffusion_card_text(card: dict[str, Any]) -> str:
    """The card as Markdown."""
    blocks = {"block": "blocks of {} tokens, step by step", "masked": "one canvas of {} tokens, step by step"}
    sizes = ", ".join(map(str, card["block_sizes"]))
    bounds = ", ".join(
        f"{size}: {one['nats_per_token']:.4f} ± {one['standard_error']:.4f}" for size, one in card["held_out"].items()
    )
    lines = [
        "---",
        "license: mit",
        "---",
        f"# {card['name']}",
        "",
        (
            f"A {card['parameters']:,}-parameter decoder that writes by diffusion ({card['kind']}): it predicts the "
            "tokens under masks, in any order."
        ),
        f"Make it again: `workbench train {card['name']}`.",
        "",
        "| | |",
        "|---|---|",
        f"| Begins with | {card['start'] or 'nothing'} |",
        f"| Corpus | {card['corpus']}: {card['corpus_tokens']:,} tokens |",
        (
            f"| Seen here | {card['tokens_seen']:,} tokens, {card['passes']} passes, {card['steps']:,} steps of"
            f" {card['tokens_per_step']:,} |"
        ),
        f"| Trained on | {blocks[card['kind']].format(sizes)} |",
        f"| Mask | token {card['mask_token']}, byte 0xFF, which no text in UTF-8 has |",
        f"| Optimizer | {card['optimizer']}; {card['schedule']}; seed {card['seed']} |",
        f"| Precision | {card['precision']} |",
        f"| Held-out bound (NELBO), nats per token, by block size | {bounds} |",
        f"| Hardware, time | {card['hardware']}; {card['hours']} hours |",
        "",
        "`workbench.diffusion.load_diffusion` reads it, `workbench.diffusion.diffuse` writes with it. It predicts what"
        " stands under a mask, and not the next token.",
        "It has seen nothing but this one library's source: it writes plausible Python and knows no facts.",
        "The corpus is the Python Software Foundation's, under the PSF License; the weights are ours.",
        "",
    ]
    return "\n".join(lines)
