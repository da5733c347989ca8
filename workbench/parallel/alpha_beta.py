"""The α–β model: a message of n bytes takes α + β·n seconds, α for being sent at all, β for every byte.

    α    from a ping-pong: half of what a few bytes take there and back
    β    from large messages, whose α hardly counts
    n½   = α/β, the bytes at which both are equal: below, messages are better joined; above, bandwidth limits

From the two follows what a collective over p ranks takes, by its algorithm:

    operation    ring or tree, over sockets and links         direct, in shared memory
    all_reduce   2(p−1)·α + 2(p−1)/p · n·β                    α + (1+p)/2 · n·β     each rank writes n and reads p·n
    all_gather   (p−1)·(α + n·β)                              α + (1+p)/2 · n·β
    gather       (p−1)·(α + n·β)                              α + (1+p)/2 · n·β     at the root
    all_to_all   (p−1)·α + n·β, n the bytes that leave        the same, in messages
    broadcast    ⌈log₂ p⌉·(α + n·β)                           α + n·β
    send         α + n·β                                      α + n·β

n is what one rank brings. A message through shared memory is written once and read once, so a pass over its bytes is
half of β. What a step waits for is a sum of many messages, so times are means: a median leaves out the messages that
wait until a process is woken, and over sockets these make up most of the sum.
Hockney, Parallel Computing 20(3), 1994; Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from workbench.errors import WorkbenchError, check_above, check_whole, shown, unknown
from workbench.parallel.collectives import Collectives, Count

SIZES = (8, 1_280, 20_480, 327_680, 2_621_440)  # bytes
KINDS = ("ring", "direct")


@dataclass(frozen=True)
class AlphaBeta:
    """Of one kind of connection. kind: of the collectives' algorithms, "ring" or "direct"."""

    alpha_s: float
    beta_s_per_byte: float
    kind: str = "ring"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind of collectives", self.kind, KINDS)

    @property
    def bytes_per_s(self) -> float:
        return 1 / self.beta_s_per_byte if self.beta_s_per_byte else math.inf

    @property
    def half_bytes(self) -> float:
        """n½: of a message that takes twice α."""
        return self.alpha_s / self.beta_s_per_byte if self.beta_s_per_byte else math.inf

    def message_s(self, nbytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * nbytes

    def predict(self, operation: str, nbytes: float, size: int) -> float:
        """Seconds of one call over `size` ranks, each of which brings so many bytes. 0 for a rank alone."""
        check_whole("size", size, 1)
        alpha, beta = self.alpha_s, self.beta_s_per_byte
        others = size - 1
        if not others:
            return 0.0
        reads = alpha + (1 + size) / 2 * nbytes * beta
        ring = {
            "all_reduce": 2 * others * alpha + 2 * others / size * nbytes * beta,
            "all_gather": others * (alpha + nbytes * beta),
            "gather": others * (alpha + nbytes * beta),
            "all_to_all": others * alpha + nbytes * beta,
            "broadcast": math.ceil(math.log2(size)) * (alpha + nbytes * beta),
            "send": alpha + nbytes * beta,
        }
        direct = dict.fromkeys(ring, reads) | dict.fromkeys(("broadcast", "send"), alpha + nbytes * beta)
        direct["all_to_all"] = ring["all_to_all"]  # messages in both
        by_operation = ring if self.kind == "ring" else direct
        if operation not in by_operation:
            raise unknown("collective with a predicted time", operation, by_operation)
        return by_operation[operation]

    def predict_counts(self, counts: Mapping[str, Count], size: int) -> float:
        """Seconds of all counted calls, one after the other, each of its operation's mean size; `receive` and `hear`
        are the other end of what was counted elsewhere, and `tell` is left out."""
        return sum(
            count.calls * self.predict(operation, count.bytes / count.calls, size)
            for operation, count in counts.items()
            if count.calls and operation not in ("receive", "hear", "tell")
        )


def fit(samples: Iterable[tuple[float, float]], kind: str = "ring") -> AlphaBeta:
    """α and β from (bytes, seconds) of single messages: the line with the least squared relative error, so that a
    microsecond of a small message counts as a millisecond of a large one. Neither is negative.

    Raises WorkbenchError for fewer than two different sizes, and for times that are not above 0.
    """
    points = [(float(nbytes), float(seconds)) for nbytes, seconds in samples]
    if len({nbytes for nbytes, _ in points}) < 2:
        raise WorkbenchError(
            f"α and β take times of at least two sizes of messages, got {shown(points)}; measure a small "
            "and a large one"
        )
    for _, seconds in points:
        check_above("the seconds of a message", seconds, 0)
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_n = sum(w * n for w, (n, _) in zip(weights, points)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, points)) / total
    spread = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, points))
    beta = sum(w * (n - mean_n) * (t - mean_t) for w, (n, t) in zip(weights, points)) / spread
    alpha = mean_t - beta * mean_n
    if beta < 0:
        alpha, beta = mean_t, 0.0
    elif alpha < 0:
        squares = sum(w * n * n for w, (n, _) in zip(weights, points))
        alpha, beta = 0.0, sum(w * n * t for w, (n, t) in zip(weights, points)) / squares
    return AlphaBeta(alpha, beta, kind)


MEASURED = ("send", "all_reduce")


def check_measures(group: Collectives, operation: str, sizes: Sequence[int], repeats: int) -> None:
    check_whole("repeats", repeats, 1)
    for nbytes in sizes:
        check_whole("bytes of a message", nbytes, 1)
    if operation not in MEASURED:
        raise unknown("operation to measure", operation, MEASURED)
    if group.size < 2:
        raise WorkbenchError("a message takes two ranks, and this run has one; start the ranks with 2 or more")


def time_operation(
    group: Collectives, operation: str, nbytes: int, repeats: int, between_s: float = 0.0
) -> list[float]:
    """Seconds of each of `repeats` operations, called by all members. send: half of there and back between the first
    two members, [] for the others. between_s: for so long every member computes before each, as in a step; over
    sockets, where a thread has to be woken on a busy core, that makes a call several times as long. Nothing of it stays
    in `counts`."""
    counts, clock, times = dict(group.counts), group.clock, []
    x = torch.zeros(-(-nbytes // 4), dtype=torch.float32, device=group.device)
    back = 1 - group.index
    group.barrier()
    for _ in range(repeats if operation == "all_reduce" or group.index < 2 else 0):
        _compute(between_s)
        began = time.perf_counter()
        if operation == "all_reduce":
            group.all_reduce(x)
            times.append(time.perf_counter() - began)
            continue
        if group.index == 0:
            group.send(x, back)
        group.receive(x, back)
        if group.index == 1:
            group.send(x, back)
        times.append((time.perf_counter() - began) / 2)
    group.counts, group.clock = counts, clock
    return times


def _compute(seconds: float) -> None:
    """Products on the CPU, for about so long. Small ones: torch divides larger ones among threads, which then spin for
    a while on the cores that the other ranks need."""
    if not seconds:
        return
    until, x = time.perf_counter() + seconds, torch.zeros(64, 64)
    while time.perf_counter() < until:
        x @ x[0]


def measure(
    group: Collectives,
    operation: str = "send",
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 50,
    between_s: float = 0.0,
) -> AlphaBeta:
    """α and β, called by all members, and all get the result. By messages, ping-pongs of the first two members; or by
    all-reduces of all, from whose times α and β are found by their formula. Each time is the mean of `repeats`.

    between_s: see `time_operation`. Raises WorkbenchError for another operation, and for a rank alone.
    """
    check_measures(group, operation, sizes, repeats)
    samples = []
    for nbytes in sizes:
        times = time_operation(group, operation, nbytes, repeats, between_s)
        samples.append((nbytes, statistics.mean(times) if times else 1.0))
    kind = "direct" if group.backend == "shm" else "ring"
    fitted = of_operation(fit(samples, kind), operation, group.size)
    counts = dict(group.counts)
    shared = torch.tensor([fitted.alpha_s, fitted.beta_s_per_byte], dtype=torch.float64, device=group.device)
    alpha, beta = group.broadcast(shared).tolist()
    group.counts = counts
    return AlphaBeta(alpha, beta, kind)


def of_operation(line: AlphaBeta, operation: str, size: int) -> AlphaBeta:
    """The α and β with which an operation over `size` ranks takes what this line says."""
    one_call = AlphaBeta(1.0, 0.0, line.kind).predict(operation, 1, size)
    one_byte = AlphaBeta(0.0, 1.0, line.kind).predict(operation, 1, size)
    return AlphaBeta(line.alpha_s / one_call, line.beta_s_per_byte / one_byte, line.kind)
