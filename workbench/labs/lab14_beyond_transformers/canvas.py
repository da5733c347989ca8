"""beyond.canvas: one text written by diffusion, pass by pass: what is masked, written, and masked again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.diffusion.costs import pass_costs
from workbench.diffusion.denoise import CanvasStep, Diffusion, diffuse
from workbench.diffusion.model import DiffusionModel
from workbench.diffusion.samplers import SAMPLERS, Sampler, Scheduled, make_sampler
from workbench.experiments.contract import Experiment, Limits, Setting, no_times
from workbench.experiments.inputs import plain
from workbench.labs.lab14_beyond_transformers.diffusion_runs import (
    MODEL,
    CanvasShape,
    canvas_shape,
    diffusion_model,
    is_diffusion,
)

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

HEADER = "def insort_right(a, x, lo=0, hi=None, *, key=None):\n"  # of a held-out module, bisect
MAX_TOKENS = 96
HIDDEN = "▒"  # a masked token, in texts


class Planned(NamedTuple):
    """A pass, as settings alone foretell it."""

    block: tuple[int, int]  # positions, first and end
    rows: int
    cached: int
    masked: int  # positions without a token before it
    written: int  # positions more that have a token after it


def plan(prompt: int, max_tokens: int, block_size: int, sampler: Sampler) -> list[Planned] | None:
    """The passes of a canvas of `prompt` + `max_tokens` positions, none of whose texts ends early.

    None for a sampler that writes as many tokens as its distributions allow: that depends on the text.
    """
    if not isinstance(sampler, Scheduled):
        return None
    passes, cached = [], 0
    for first in range(prompt // block_size * block_size, prompt + max_tokens, block_size):
        end = min(first + block_size, prompt + max_tokens)
        to_write = end - max(first, prompt)
        needed = min(to_write, sampler.passes)
        for number in range(needed):
            done, then = (to_write * n // needed for n in (number, number + 1))
            passes.append(Planned((first, end), end - cached, cached, to_write - done, then - done))
            cached = first
    return passes


def planned_flops(shape: CanvasShape, passes: Sequence[Planned]) -> int:
    return sum(pass_costs(shape.config, rows=p.rows, cached=p.cached, logit_rows=p.masked).flops for p in passes)


def canvas_texts(model: DiffusionModel, step: CanvasStep, hidden: str = HIDDEN) -> list[str]:
    """The canvas after a pass as texts, one for each position; `hidden` for a masked one."""
    decode = (lambda t: f"#{t}") if model.tokenizer is None else model.tokenizer.token_text
    return [hidden if token == model.mask_token else decode(token) for token in step.token_ids]


def left_first(steps: Sequence[CanvasStep]) -> tuple[int, int]:
    """Of two positions of a block that got their last token in different passes: (pairs whose left one was first, all
    pairs). Half of them is chance, all of them is the order of an autoregressive model."""
    written = {at: step for step in steps for at in step.revealed}
    pairs = [
        written[a].number < written[b].number
        for a, b in itertools.combinations(sorted(written), 2)
        if written[a].block == written[b].block and written[a].number != written[b].number
    ]
    return sum(pairs), len(pairs)


def sampler_of(settings: dict[str, Any]) -> Sampler:
    return make_sampler(
        settings["sampler"], passes=settings["passes"], bound=settings["bound"], share=settings["share"]
    )


def run_canvas(bench: Bench, *, shown_pass: int, **settings: Any) -> Iterator[Measurement]:
    """A Measurement a pass, in seconds: which positions got a token, how sure the model was, and the canvas then. The
    last one, in FLOP, has the counts of all passes beside what settings alone foretell."""
    diffusion = diffusion_model(bench, settings["model"])
    sampler, shape = sampler_of(settings), canvas_shape(diffusion)
    how: dict[str, Any] = {name: settings[name] for name in ("max_tokens", "temperature", "seed")}
    how |= {"block_size": settings["block_size"] if diffusion.kind == "block" else None, "sampler": sampler}
    bench.report("the canvas is written")
    one = diffuse(diffusion, settings["prompt"], check_stop=bench.check_stop, **how)
    bench.report("and once more without a cache")
    again = diffuse(diffusion, settings["prompt"], check_stop=bench.check_stop, cached=False, **how)
    check = _compared(one, again)
    knobs = {**plain(settings), "prompt_tokens": len(one.prompt_ids), "size": one.block_size}
    for step in one.history:
        yield bench.measurement(
            name="beyond.canvas",
            settings={
                **knobs,
                "measured": "pass",
                "step": step.number,
                "block": list(step.block),
                "canvas": canvas_texts(diffusion, step),
                "revealed": list(step.revealed),
                "probability": [round(p, 4) for p in step.probability],
                "remasked": list(step.remasked),
            },
            samples=[step.seconds],
            unit="s",
            counts={
                "rows": step.rows,
                "cached": step.cached,
                "logit_rows": step.logit_rows,
                "tokens": len(step.revealed) - len(step.remasked),
            },
            check=check,
        )
    planned = plan(len(one.prompt_ids), settings["max_tokens"], one.block_size, sampler)
    left, pairs = left_first(one.history)
    yield bench.measurement(
        name="beyond.canvas",
        settings={**knobs, "measured": "whole", "text": one.text, "finish_reason": one.finish_reason},
        samples=[float(one.flops)],
        unit="FLOP",
        counts={
            "passes": one.passes,
            "rows": one.rows,
            "tokens": one.tokens,
            "tokens_per_pass": one.tokens_per_pass,
            "remasked": sum(len(step.remasked) for step in one.history),
            "left_first": left,
            "pairs": pairs,
            "seconds": one.seconds,
            "rows_without_cache": again.rows,
        },
        predicted=None if planned is None else float(planned_flops(shape, planned)),
        check=check,
    )


def _compared(one: Diffusion, again: Diffusion) -> str:
    """With the same canvas whose every pass sends all positions: the oracle of the cache."""
    pairs = list(zip(one.history[-1].token_ids, again.history[-1].token_ids, strict=True))
    others = sum(a != b for a, b in pairs)
    if not others:
        return "without a cache, every position sent in every pass, the same tokens are written"
    return (
        f"without a cache {others} of {len(pairs)} tokens are others: rounding decided between two that are as likely"
    )


def canvas_limits(
    *, model: str | DiffusionModel, prompt: str, max_tokens: int, block_size: int, sampler: str, passes: int, **_: Any
) -> Limits:
    shape = canvas_shape(model)
    begin = len(shape.tokenizer.encode(prompt)) if shape.tokenizer else 0
    size = shape.block_size(block_size, begin + max_tokens)
    planned = plan(begin, max_tokens, size, make_sampler(sampler, passes=passes))
    return {
        "model": is_diffusion,
        "max_tokens": shape.config.context_length - begin,
        "block_size": lambda size: size <= shape.largest_block,
        "passes": min(size, max_tokens),
        "shown_pass": max_tokens if planned is None else len(planned),
    }


EXPERIMENT = Experiment(
    name="beyond.canvas",
    lab=14,
    question="In which order does diffusion write a text, and how many tokens come in a pass?",
    how=(
        "a canvas of masks stands behind the prompt. Each pass is one forward over the block at hand; the sampler"
        " chooses at which masked positions a token is drawn, and perhaps which are masked again. The same is written"
        " once more without a cache and compared. What is planned follows from the settings alone; FLOPs are counted"
        " over the rows that were sent."
    ),
    settings=(
        MODEL,
        Setting("prompt", HEADER, "text", help="what the canvas stands behind; by default a held-out header"),
        Setting("max_tokens", 32, "int", 4, MAX_TOKENS, unit="tokens", help="positions of the canvas"),
        Setting("block_size", 8, "choice", choices=(1, 2, 4, 8, 16), unit="tokens", help="positions of a block"),
        Setting("sampler", "confidence", "choice", choices=SAMPLERS, help="which positions get a token in a pass"),
        Setting("passes", 4, "int", 1, MAX_TOKENS, help="of a block; entropy-bound takes as many as it needs"),
        Setting("bound", 1.0, "float", 0.0, 4.0, unit="nats", step=0.1, help="of entropy-bound: what a pass may lose"),
        Setting("share", 0.25, "float", 0.0, 1.0, step=0.05, help="of remasking: of the written tokens, each pass"),
        Setting("temperature", 0.0, "float", 0.0, 2.0, step=0.1, help="0 takes the most likely token"),
        Setting("seed", 0, "int", 0, 10_000, help="of all draws"),
        Setting("shown_pass", 4, "int", 0, MAX_TOKENS, help="the canvas after so many passes"),
    ),
    run=run_canvas,
    predict=no_times,
    limits=canvas_limits,
    record={"cpu": (), "cuda": ()},  # a text to look at
)
