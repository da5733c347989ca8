"""Every kernel as a case, held to its definition first and measured then: compiled on a GPU, checked in the
interpreter."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError, unknown
from workbench.labs.lab10_kernels import cases_attention, cases_rows
from workbench.labs.lab10_kernels.case import (
    FULL,
    HERE,
    TINY,
    Case,
    Inputs,
    Maker,
    Outputs,
    Sizes,
    bound,
    wide,
    work_of,
)

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # of the largest output
MIN_SETS_BYTES = 256 << 20  # inputs go round over so many bytes at least: of most machines several times the last cache
CALLS = 10  # in one timed run on a GPU: the first call's way through Python is a tenth of one
MAKERS: dict[str, Callable[[], Case]] = {**cases_rows.MAKERS, **cases_attention.MAKERS}


def case(kernel: str) -> Case:
    """The case of that name. Raises WorkbenchError naming the nearest."""
    if kernel not in MAKERS:
        raise unknown("kernel", kernel, MAKERS)
    return MAKERS[kernel]()


def compiles(device: str) -> bool:
    """Whether kernels are compiled for this device; else they are interpreted, or do not run."""
    from workbench.kernels import launch

    return device.startswith("cuda") and not launch.INTERPRETED and not launch.why_not(device)


def difference(one: Case, inputs: Inputs, outputs: Outputs) -> float:
    """How far from the truth in float64: of the largest output, or of tokens the share that are others. Of several
    outputs that of the one that is farthest."""
    given, truths = parts(outputs), parts(one.truth(wide(inputs)))
    shapes, wanted = ([list(part.shape) for part in several] for several in (given, truths))
    if shapes != wanted:
        raise WorkbenchError(f"{one.kernel} gives {shapes} where the definition gives {wanted}")
    return max(_apart(one, part, truth) for part, truth in zip(given, truths))


def parts(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    """All outputs of a kernel, of one as well."""
    return (outputs,) if isinstance(outputs, torch.Tensor) else outputs


def _apart(one: Case, given: torch.Tensor, truth: torch.Tensor) -> float:
    if one.chosen:
        return float((given != truth).double().mean())
    return float((given.double() - truth.double()).abs().max() / truth.double().abs().max())


def verified(one: Case, inputs: Inputs, dtype: torch.dtype) -> tuple[float, int]:
    """(difference, launches) of one call. Raises WorkbenchError where the kernel computes something else."""
    from workbench.kernels import launch

    with launch.launches() as counted:
        outputs = one.run(inputs)
    apart = difference(one, inputs, outputs)
    allowed = 0.01 if one.chosen else TOLERANCE[dtype]
    if not apart <= allowed:
        what = "of its tokens are others" if one.chosen else "of the largest output"
        raise WorkbenchError(
            f"{one.kernel} differs from its definition in float64 by {apart:.3g} {what}; {allowed:.3g} is allowed"
        )
    return apart, counted.total()


def run_case(
    bench: Bench,
    one: Case,
    sizes: dict[str, Sizes],
    *,
    name: str,
    repeats: int,
    settings: dict[str, Any],
    twin: bool = True,
) -> Iterator[Measurement]:
    """What can be measured of a case here.

    Where kernels are compiled, at FULL size: seconds of the kernel and of torch in turns (unit "s"), and torch over
    kernel pair by pair (unit "ratio"). Else its difference in the interpreter at TINY size (unit "of the largest"),
    with the launches that were counted and no time; and with `twin` seconds of torch's own operations at HERE size.
    """
    shared = {**settings, "kernel": one.kernel}
    if compiles(bench.device):
        yield from _on_gpu(bench, one, sizes[FULL], name, repeats, shared)
        return
    from workbench.kernels import launch

    if not launch.why_not(bench.device):
        dtype = torch.float32 if one.chosen else torch.float16
        inputs = one.make(Maker(bench.device, dtype, 0), sizes[TINY])
        bench.check_stop()
        bench.report(f"{one.kernel} in the interpreter")
        apart, launches = verified(one, inputs, dtype)
        work = one.work(inputs)
        unit = "of the tokens" if one.chosen else "of the largest"
        yield bench.measurement(
            name=name,
            settings={**shared, "by": "kernel", "ran": "interpreted", **sizes[TINY]},
            samples=[apart],
            unit=unit,
            counts={"launches": launches, "bytes": work.bytes, "flops": work.flops},
            check=f"in the interpreter within {apart:.1g} {unit} of float64; its time means nothing and was not taken",
        )
    if twin:
        bench.check_stop()
        yield _twin(bench, one, sizes[HERE], name, repeats, shared)


def _twin(bench: Bench, one: Case, sizes: Sizes, name: str, repeats: int, shared: dict[str, Any]) -> Measurement:
    """torch's own operations on this machine, in float32, against the bound of the same work. Inputs go round, so that
    no cache of up to half of them holds them: what is above its bound then is above a ceiling."""
    bench.report(f"{one.torch_name} in PyTorch")
    maker = Maker(bench.device, torch.float32, 1)
    sets = [one.make(maker, sizes)]
    work = one.work(sets[0])
    add_sets(sets, one, maker, sizes)
    expected, limit = bound(work, bench.ceilings(), "float32")
    with torch.inference_mode():
        samples = bench.measure(rounds(one.torch, sets, calls=1), repeats=repeats)
    seconds = statistics.median(samples)
    return bench.measurement(
        name=name,
        settings={**shared, "by": "torch", "what": one.torch_name, **sizes},
        samples=samples,
        unit="s",
        counts={
            "bytes": work.bytes,
            "flops": work.flops,
            "share_of_bound": expected / seconds,
            "bytes_per_s": work.bytes / seconds,
            "flop_per_s": work.flops / seconds,
        },
        predicted=expected,
        limit=limit,
        check=(
            f"PyTorch's operations as they are, {len(sets)} sets of inputs in turns; the kernel was held to its"
            " definition in the interpreter"
        ),
    )


@torch.inference_mode()
def _on_gpu(
    bench: Bench, one: Case, sizes: Sizes, name: str, repeats: int, shared: dict[str, Any]
) -> Iterator[Measurement]:
    dtype = torch.float32 if one.chosen else torch.bfloat16 if bench.device.startswith("cuda") else torch.float16
    maker = Maker(bench.device, dtype, 0)
    bench.report(f"{one.kernel}: {one.words(sizes)}")
    sets = [one.make(maker, sizes)]
    work = one.work(sets[0])
    if one.tune is not None and bench.device.startswith("cuda"):
        bench.report(f"{one.kernel}: block sizes")
        one.tune(sets[0])  # before anything is timed
    add_sets(sets, one, maker, sizes)
    held = held_to_float64(bench, one, sets[0], dtype)
    pair = bench.measure_pair(rounds(one.run, sets), rounds(one.torch, sets), repeats=repeats, warmup=3)
    expected, limit = bound(work, bench.ceilings(), "float32" if one.chosen else "bfloat16")
    check = f"{held}; {len(sets)} sets of inputs in turns, {CALLS} calls a run"
    for by, seconds in (("kernel", pair.a_s), ("torch", pair.b_s)):
        samples = [s / CALLS for s in seconds]
        yield bench.measurement(
            name=name,
            settings={**shared, "by": by, "ran": "compiled", "what": one.torch_name if by == "torch" else "", **sizes},
            samples=samples,
            unit="s",
            counts={
                "bytes": work.bytes,
                "flops": work.flops,
                "share_of_bound": expected / statistics.median(samples),
                "bytes_per_s": work.bytes / statistics.median(samples),
                "flop_per_s": work.flops / statistics.median(samples),
            },
            predicted=expected,
            limit=limit,
            check=check,
        )
    yield bench.measurement(
        name=name,
        settings={**shared, "by": "torch ÷ kernel", **sizes},
        samples=[b / a for a, b in zip(pair.a_s, pair.b_s)],
        unit="ratio",
        check="both timed in alternation, on the same inputs",
    )


def held_to_float64(bench: Bench, one: Case, inputs: Inputs, dtype: torch.dtype) -> str:
    """In words, how far one call is from the truth. Where float64 does not fit at this size, that of a smaller one.
    Raises WorkbenchError where it is too far."""
    try:
        return f"within {verified(one, inputs, dtype)[0]:.1g} of float64 before it was timed"
    except torch.cuda.OutOfMemoryError:
        pass  # what the error's frames hold is let go of here
    torch.cuda.empty_cache()
    small = one.make(Maker(bench.device, dtype, 2), one.sizes[HERE])
    return (
        f"within {verified(one, small, dtype)[0]:.1g} of float64, at {one.words(one.sizes[HERE])}, before it was timed"
    )


def add_sets(sets: list[Inputs], one: Case, maker: Maker, sizes: Sizes) -> None:
    """More inputs to the first, until no cache holds them all."""
    num_bytes = one.work(sets[0]).bytes
    while len(sets) < 2 or (len(sets) * num_bytes < MIN_SETS_BYTES and len(sets) < 64):
        sets.append(one.make(maker, sizes))


def rounds(function: Callable[[Inputs], object], sets: Sequence[Inputs], *, calls: int = CALLS) -> Callable[[], None]:
    """A function of so many calls, each on the next set of inputs, so that none finds its own in the cache."""
    state = {"at": 0}

    def run() -> None:
        for _ in range(calls):
            function(sets[state["at"] % len(sets)])
            state["at"] += 1

    return run


__all__ = [
    "FULL",
    "HERE",
    "MAKERS",
    "MIN_SETS_BYTES",
    "TINY",
    "Case",
    "Maker",
    "Sizes",
    "bound",
    "case",
    "compiles",
    "parts",
    "rounds",
    "run_case",
    "wide",
    "work_of",
]
