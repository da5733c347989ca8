"""paging.allocators: one workload through three ways to hand out the memory, and what each of them wastes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.kv.allocators import Allocator, Buddy, ContiguousMaximum, Demand, PagedBlocks, Served, serve
from workbench.serving.load import workload

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

CONTIGUOUS, BUDDY, PAGED = "contiguous maximum", "power-of-two buddy", "paged"
BLOCK_SIZES = (1, 4, 16, 64, 256)
WORKLOADS = ("conversation", "code", "uniform", "ragged")
PARTS = ("used", "reserved", "internal", "external", "free")
MOMENTS = 160  # points of a run that are kept for the picture, each the mean of the steps around it


def paged_name(block_size: int) -> str:
    return f"{PAGED}, {block_size}"


NAMES = (CONTIGUOUS, BUDDY, *map(paged_name, BLOCK_SIZES))


@lru_cache(maxsize=16)
def demands_of(load: str, requests: int, rate: float, seed: int) -> tuple[tuple[Demand, ...], int]:
    """The requests of a workload, `rate` of them a step as a Poisson process, and the longest that it can have."""
    chosen = workload(load)
    chosen = chosen.at_rate(rate)  # a second of the workload is a step
    arrivals = chosen.draw(requests, seed=seed)
    return tuple(Demand(int(a.at_s), a.prompt_tokens, a.new_tokens) for a in arrivals), chosen.longest


def expected_shares(demands: Sequence[Demand], longest: int) -> dict[str, float]:
    """The useful share of each allocator from the lengths of the requests alone: no allocator runs.

    In each of its output_tokens steps a request holds prompt + 1 … prompt + output tokens. What it holds then is
    `longest` places (contiguous maximum), the next power of two (buddy), or, where the end of a text lies anywhere in
    its last block, (block_size − 1) / 2 places more than its tokens (paged). External fragmentation is left out.
    """
    lengths = np.concatenate([np.arange(d.prompt_tokens + 1, d.end + 1) for d in demands])
    used = lengths.sum()
    held = {
        CONTIGUOUS: longest * len(lengths),
        BUDDY: (2 ** np.ceil(np.log2(lengths))).sum(),
        **{paged_name(size): used + (size - 1) / 2 * len(lengths) for size in BLOCK_SIZES},
    }
    return {name: float(used / places) for name, places in held.items()}


def makers(capacity: int, longest: int) -> dict[str, Callable[[], Allocator]]:
    """Each allocator with the same memory, by its name."""
    return {
        CONTIGUOUS: lambda: ContiguousMaximum(capacity, longest),
        BUDDY: lambda: Buddy(capacity),
        **{paged_name(size): partial(PagedBlocks, capacity, size) for size in BLOCK_SIZES},
    }


def run_allocators(
    bench: Bench, *, load: str, requests: int, rate: float, capacity: int, seed: int
) -> Iterator[Measurement]:
    """A Measurement for each allocator (unit "share"): the useful share, tokens over places that nobody else could
    have.

    Settings hold the course of it: `over_time`, the shares of the memory that were used, reserved, …, at MOMENTS
    moments, and the `steps` they were taken at. Raises WorkbenchError where an account does not add up.
    """
    settings = {"load": load, "requests": requests, "rate": rate, "capacity": capacity, "seed": seed}
    demands, longest = demands_of(load, requests, rate, seed)
    expected = expected_shares(demands, longest)
    made = makers(capacity, longest)
    for number, (name, make) in enumerate(made.items()):
        bench.check_stop()
        bench.report(f"{number + 1} of {len(made)} allocators")
        served = serve(_watched(make(), bench.check_stop), demands)
        yield bench.measurement(
            name="paging.allocators",
            settings={**settings, "allocator": name, "longest": longest, **over_time(served)},
            samples=[served.useful_share],
            unit="share",
            counts=_counts(served),
            predicted=expected[name],
            check=_check(name, served, demands, capacity),
        )


def _watched(allocator: Allocator, check_stop: Callable[[], None]) -> Allocator:
    """The same, and `check_stop` is called whenever a sequence grows, so that a long run can be ended."""
    grow = allocator.grow

    def growing(sequence: Hashable) -> bool:
        check_stop()
        return grow(sequence)

    vars(allocator)["grow"] = growing
    return allocator


def _counts(served: Served) -> dict[str, float]:
    tokens = sum(account.used for account in served.accounts)
    taken = sum(account.taken for account in served.accounts)
    return {
        **{part: served.share(part) for part in PARTS},
        "steps": len(served.accounts),
        "sequence_steps": sum(served.running),
        "mean_running": served.mean_running,
        "most_running": max(served.running),
        "used_token_steps": tokens,
        "taken_place_steps": taken,
        "places_per_sequence": taken / sum(served.running),
        "tokens_per_sequence": tokens / sum(served.running),
        "preemptions": served.preemptions,
        "moved_tokens": served.moved,
        "finished": served.finished,
    }


def over_time(served: Served) -> dict[str, Any]:
    """The accounts of a run in at most MOMENTS groups of steps that follow each other, as shares of the memory."""
    edges = np.unique(np.linspace(0, len(served.accounts), MOMENTS + 1).astype(int))
    whole = served.accounts[0].capacity
    means = {
        part: np.add.reduceat([getattr(a, part) for a in served.accounts], edges[:-1]) / np.diff(edges) / whole
        for part in PARTS
    }
    return {
        "steps": [float(step) for step in (edges[:-1] + edges[1:]) / 2],
        "over_time": {part: [round(float(share), 6) for share in shares] for part, shares in means.items()},
    }


def _check(name: str, served: Served, demands: Sequence[Demand], capacity: int) -> str:
    """Raises WorkbenchError where an account does not add up, or a token was not there in a step in which it had to
    be."""
    assert not served.refused, "the longest request of each workload fits into the smallest memory there is"
    for step, account in enumerate(served.accounts):
        if account.capacity != capacity or min(account.used, account.reserved, account.internal) < 0:
            raise WorkbenchError(f"the account of {name!r} in step {step} does not add up: {account}")
    wanted = sum(d.output_tokens * d.prompt_tokens + d.output_tokens * (d.output_tokens + 1) // 2 for d in demands)
    used = sum(account.used for account in served.accounts)
    if used != wanted or sum(served.running) != sum(d.output_tokens for d in demands):
        raise WorkbenchError(
            f"{name!r} held {used:,} tokens over all steps where the requests have {wanted:,}: steps were lost"
        )
    return (
        f"in each of {len(served.accounts):,} steps the five parts add up to {capacity:,} places; all {served.finished}"
        f" requests ran to their end, {wanted:,} token-steps as their lengths say"
    )


def sequences_that_fit(capacity: int, counts: Mapping[str, float]) -> float:
    """Of the mean request: the memory over the places that one held on average, of its own and lost beside it."""
    return capacity / counts["places_per_sequence"]


EXPERIMENT = Experiment(
    name="paging.allocators",
    lab=9,
    question="How much of the memory holds tokens, and how many requests fit into it?",
    how=(
        "the same requests, lengths and arrivals through each allocator, first come first served, a token a step"
        " for each that runs; counted in every step, nothing is timed. The useful share is tokens over places that"
        " nobody else could have. Predicted: from the requests' lengths alone; paged wastes half a block a"
        " sequence."
    ),
    settings=(
        Setting("load", "conversation", "choice", choices=WORKLOADS, help="whose lengths"),
        Setting("requests", 200, "int", 10, 1000, step=10, unit="requests", help="of the workload"),
        Setting("rate", 0.3, "float", 0.01, 4.0, step=0.01, unit="requests per step", help="that arrive on average"),
        Setting(
            "capacity",
            65_536,
            "choice",
            choices=tuple(2**i for i in range(14, 19)),
            unit="tokens",
            help="of the whole memory",
        ),
        Setting("seed", 0, "int", 0, 10_000, help="of the lengths and arrivals"),
    ),
    run=run_allocators,
    predict=no_times,
    record={"cpu": (), "cuda": ()},  # counts are the same everywhere
)
