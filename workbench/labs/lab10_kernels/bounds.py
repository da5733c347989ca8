"""kernels.bounds: every kernel against the least time it can take, and what of that can be measured here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from workbench.experiments.contract import Experiment, Setting
from workbench.instruments.device import PUBLISHED
from workbench.labs.lab10_kernels.cases import FULL, HERE, MAKERS, Case, bound, case, run_case, work_of

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.kernels.launch import Work

ALL = "all"


def names_of(kernels: str) -> tuple[str, ...]:
    return tuple(MAKERS) if kernels == ALL else (kernels,)


def type_of(one: Case) -> str:
    """In what a case is computed on a card: 16 bits, but for logits."""
    return "float32" if one.chosen else "bfloat16"


def on_card(kernel: str, card: str) -> tuple[str, Work, float, str]:
    """(size in words, Work, the least seconds on the card, what binds) of a kernel at its full size."""
    one = case(kernel)
    dtype = type_of(one)
    work = work_of(one, one.sizes[FULL], getattr(torch, dtype))
    return one.words(one.sizes[FULL]), work, *bound(work, PUBLISHED[card], dtype)


def predict_bounds(ceilings: Ceilings, *, kernels: str, **_: Any) -> Sequence[tuple[float, float, str]]:
    """(number of the kernel, the least seconds here, what binds) of torch's operations at the size that is timed
    here."""
    found = []
    for number, name in enumerate(names_of(kernels)):
        one = case(name)
        found.append((number, *bound(work_of(one, one.sizes[HERE], torch.float32), ceilings, "float32")))
    return found


def run_bounds(bench: Bench, *, kernels: str, card: str, repeats: int) -> Iterator[Measurement]:
    """What `run_case` measures of each kernel: on a GPU its share of the bound, else its difference from the definition
    and its launches, in the interpreter, and the time of torch's operations. The card is for the panel."""
    names = names_of(kernels)

    def run(name: str) -> Iterator[Measurement]:
        number = names.index(name) + 1
        bench.report(f"kernel {number} of {len(names)}: {name}")
        one, settings = case(name), {"number": 1 + tuple(MAKERS).index(name)}
        yield from run_case(bench, one, one.sizes, name="kernels.bounds", repeats=repeats, settings=settings)

    yield from bench.each(names, run)


EXPERIMENT = Experiment(
    name="kernels.bounds",
    lab=10,
    question="How near to the least possible time does each kernel come?",
    how=(
        "the bound: bytes that must move at the bandwidth, FLOPs at the FLOP rate, launches at their cost, the"
        " longest of them. On a GPU: medians of runs of ten calls, inputs in turns so that none is in the cache,"
        " kernel and PyTorch in alternation, outputs held to float64 first. Elsewhere kernels run in Triton's"
        " interpreter: results and launches count, times mean nothing and are not taken; what is timed is PyTorch's"
        " own operations."
    ),
    settings=(
        Setting("kernels", ALL, "choice", choices=(ALL, *MAKERS), help="which of them"),
        Setting("card", "h200", "choice", choices=tuple(PUBLISHED), help="of the prediction"),
        Setting("repeats", 5, "int", 1, 200, brief=1, help="timed runs of each"),
    ),
    run=run_bounds,
    predict=predict_bounds,
    record={"cpu": ({},), "cuda": tuple({"kernels": name, "repeats": 30} for name in MAKERS)},
)
