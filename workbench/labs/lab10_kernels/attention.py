"""kernels.attention: the attention kernels over texts few and long, many and short, against their bounds and torch's
SDPA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from workbench.experiments.contract import Experiment, Setting
from workbench.labs.lab10_kernels.bounds import type_of
from workbench.labs.lab10_kernels.cases import (
    CALLS,
    FULL,
    Case,
    Maker,
    Sizes,
    bound,
    case,
    compiles,
    rounds,
    run_case,
    work_of,
)

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement

ALL = "all"
DECODES = ("flash_decode", "paged_decode", "paged_decode_quantized", "latent_decode")
PREFILLS = ("flash_attention", "paged_prefill")
# (texts, tokens of each): the keys and values of an 8B layer are 0.5 GB in each, or more
OVER_KEYS = ((64, 2048), (8, 16_384), (1, 131_072))
OVER_PROMPTS = ((16, 1024), (4, 4096), (1, 16_384))


def grid(kernel: str) -> list[Sizes]:
    """The sizes on a GPU. Latents and codes are smaller: more tokens of them, to be beyond the cache as well."""
    full = case(kernel).sizes[FULL]
    if kernel == "paged_prefill":
        return [{**full, "texts": b, "tokens": s, "new": min(256, s)} for b, s in OVER_KEYS]
    if kernel == "flash_attention":
        return [{**full, "texts": b, "tokens": s} for b, s in OVER_PROMPTS]
    times = {"latent_decode": 4, "paged_decode_quantized": 2}.get(kernel, 1)
    return [{**full, "texts": b, "tokens": times * s} for b, s in OVER_KEYS]


def names_of(kernels: str) -> tuple[str, ...]:
    return (*DECODES, *PREFILLS) if kernels == ALL else (kernels,)


def predict_attention(ceilings: Ceilings, *, kernels: str, **_: Any) -> Sequence[tuple[float, float, str]]:
    """(tokens of a text, the least seconds, what binds) at the sizes for a GPU."""
    dtype = "bfloat16" if "bfloat16" in ceilings.flop_per_s else "float32"
    found = []
    for name in names_of(kernels):
        for sizes in grid(name):
            work = work_of(case(name), sizes, getattr(torch, dtype))
            found.append((sizes["tokens"], *bound(work, ceilings, dtype)))
    return found


def run_attention(bench: Bench, *, kernels: str, repeats: int) -> Iterator[Measurement]:
    """On a GPU `run_case` at each size of the grid, and the paged kernel over the contiguous one on the same numbers
    (unit "ratio"); elsewhere each kernel once in the interpreter, at its tiny size."""
    how: dict[str, Any] = {"name": "kernels.attention", "repeats": repeats, "settings": {}}
    for name in names_of(kernels):

        def run(sizes: Sizes, name: str = name) -> Iterator[Measurement]:
            one = case(name)
            yield from run_case(bench, one, {**one.sizes, FULL: sizes}, twin=False, **how)

        sizes = grid(name) if compiles(bench.device) else [case(name).sizes[FULL]]
        yield from bench.each(sizes, run, f"{name}, {{0[texts]}} × {{0[tokens]}}".format)

    def beside(sizes: Sizes) -> Iterator[Measurement]:
        yield _beside_contiguous(bench, case("paged_decode"), case("flash_decode"), sizes, repeats)

    if compiles(bench.device) and "paged_decode" in names_of(kernels):
        yield from bench.each(grid("paged_decode"), beside, "contiguous ÷ paged, {0[texts]} × {0[tokens]}".format)


@torch.inference_mode()
def _beside_contiguous(bench: Bench, paged: Case, flat: Case, sizes: Sizes, repeats: int) -> Measurement:
    """Keys and values in blocks anywhere, and in one piece: the same bytes, the same texts."""
    kind = getattr(torch, type_of(paged))
    apart = [[one.make(Maker(bench.device, kind, seed), sizes) for seed in range(2)] for one in (paged, flat)]
    pair = bench.measure_pair(rounds(paged.run, apart[0]), rounds(flat.run, apart[1]), repeats=repeats, warmup=3)
    return bench.measurement(
        name="kernels.attention",
        settings={"kernel": "paged_decode", "by": "contiguous ÷ paged", **sizes},
        samples=[b / a for a, b in zip(pair.a_s, pair.b_s)],
        unit="ratio",
        check=f"both timed in alternation, {CALLS} calls a run; each was held to float64 at this size before",
    )


EXPERIMENT = Experiment(
    name="kernels.attention",
    lab=10,
    question="Do the attention kernels reach the memory's pace, for few long texts as for many short ones?",
    how=(
        "an 8B model's heads (32 over 8 of 128; latents 512 + 64), block tables in random order, 0.5 GB of keys and"
        " values or more, inputs in turns, kernel and torch's scaled_dot_product_attention in alternation, medians"
        " of runs of ten calls; outputs held to float64 first. Without a GPU each kernel runs once in the"
        " interpreter, and no time is taken."
    ),
    settings=(
        Setting("kernels", ALL, "choice", choices=(ALL, *DECODES, *PREFILLS), help="which of them"),
        Setting("repeats", 20, "int", 1, 200, brief=1, help="timed runs of each, on a GPU"),
    ),
    run=run_attention,
    predict=predict_attention,
    record={"cpu": (), "cuda": tuple({"kernels": name} for name in (*DECODES, *PREFILLS))},
)
