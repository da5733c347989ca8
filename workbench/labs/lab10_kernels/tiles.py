"""kernels.tiles: FlashAttention's loop over the tiles of a causal S × S grid, tile by tile, with the numbers of one
row.

The loop is written down here once more, in plain tensors, so that every number of it can be shown. It is held to
softmax as it is defined, and the Triton kernel is held to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

STORED = 2  # bytes of a number of q, k, v and the output: 16 bits
SUM = 4  # bytes of a log-sum-exp: float32
FULL, MASKED, SKIPPED = "full", "masked", "skipped"
EXACT = 1e-5  # by which an output of the loop, in float32, may differ from softmax in float64, of the largest
NARROW = 2e-3  # and the kernel, on float16, from the loop on the same numbers
NO_WINDOW = 0


@dataclass(frozen=True)
class Row:
    """The followed row after a tile: the maximum so far, the factor on what was summed before, the sum, the output.

    seen: the scores of this tile that the row may look at.
    """

    seen: tuple[float, ...]
    maximum: float
    factor: float
    sum: float
    output: tuple[float, ...]


@dataclass(frozen=True)
class Step:
    """A tile of the loop: which, whether all of it counts, and what has crossed the memory's bus when it is done."""

    query_block: int
    key_block: int
    kind: str  # FULL or MASKED
    bytes_read: int
    bytes_written: int
    row: Row | None  # None while the followed row's block has not been reached

    @property
    def followed(self) -> Row:
        """`row`, of a step in the followed row's block or after it."""
        assert self.row is not None
        return self.row


@dataclass(frozen=True)
class Loop:
    """All of it. steps: the tiles that are loaded, in order. kinds[i][j]: of query block i and key block j."""

    steps: tuple[Step, ...]
    kinds: tuple[tuple[str, ...], ...]
    output: torch.Tensor  # [S, D] float32
    lse: torch.Tensor  # [S] float32: log of the sum of exp(score)

    def count(self, kind: str) -> int:
        return sum(row.count(kind) for row in self.kinds)

    @property
    def bytes(self) -> int:
        return self.steps[-1].bytes_read + self.steps[-1].bytes_written


def inputs(tokens: int, head_dim: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v [S, D] of one head, float32, every number one that float16 can hold."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(3, tokens, head_dim, generator=generator).half().float())


def kind_of(i: int, j: int, block_queries: int, block_keys: int, window: int) -> str:
    """Whether tile (i, j) is not looked at, looked at in part, or whole."""
    first_query, last_query = i * block_queries, (i + 1) * block_queries - 1
    first_key, last_key = j * block_keys, (j + 1) * block_keys - 1
    if first_key > last_query or (window and last_key <= first_query - window):
        return SKIPPED
    whole = last_key <= first_query and (not window or first_key > last_query - window)
    return FULL if whole else MASKED


@lru_cache(maxsize=32)
def loop(
    *, tokens: int, head_dim: int, block_queries: int, block_keys: int, window: int, seed: int, shown_row: int
) -> Loop:
    """FlashAttention's forward pass (Dao, arXiv 2307.08691, algorithm 1) over one head."""
    q, k, v = inputs(tokens, head_dim, seed)
    scale, followed = head_dim**-0.5, min(shown_row, tokens - 1)
    output, lse = torch.empty(tokens, head_dim), torch.empty(tokens)
    steps: list[Step] = []
    kinds, read, written, row = [], 0, 0, None
    for i in range(tokens // block_queries):
        kinds.append(tuple(kind_of(i, j, block_queries, block_keys, window) for j in range(tokens // block_keys)))
        rows = torch.arange(i * block_queries, (i + 1) * block_queries)
        m = torch.full((block_queries,), -math.inf)
        total, acc = torch.zeros(block_queries), torch.zeros(block_queries, head_dim)
        read += block_queries * head_dim * STORED
        loaded = [j for j, kind in enumerate(kinds[i]) if kind != SKIPPED]
        for j in loaded:
            columns = torch.arange(j * block_keys, (j + 1) * block_keys)
            read += 2 * block_keys * head_dim * STORED
            scores = q[rows] @ k[columns].T * scale
            allowed = columns[None] <= rows[:, None]
            if window:
                allowed &= columns[None] > rows[:, None] - window
            scores = scores.masked_fill(~allowed, -math.inf)
            new_m = torch.maximum(m, scores.amax(1))
            shift = torch.where(new_m == -math.inf, 0.0, new_m)  # of a row that has seen nothing yet
            factor, weights = (m - shift).exp(), (scores - shift[:, None]).exp()
            total, acc, m = (total * factor + weights.sum(1), acc * factor[:, None] + weights @ v[columns], new_m)
            at = followed - i * block_queries
            if 0 <= at < block_queries:
                seen = scores[at][allowed[at]].tolist()
                divided = (acc[at] / total[at]).tolist() if total[at] else [0.0] * head_dim
                row = Row(tuple(seen), float(m[at]), float(factor[at]), float(total[at]), tuple(divided))
            if j == loaded[-1]:
                written += block_queries * (head_dim * STORED + SUM)
                output[rows], lse[rows] = acc / total[:, None], m + total.log()
            steps.append(Step(i, j, kinds[i][j], read, written, row))
    return Loop(tuple(steps), tuple(kinds), output, lse)


def reference(tokens: int, head_dim: int, window: int, seed: int) -> torch.Tensor:
    """[S, D] float64: softmax as it is defined, over a whole S × S matrix."""
    q, k, v = (x.double() for x in inputs(tokens, head_dim, seed))
    at = torch.arange(tokens)
    allowed = at[None] <= at[:, None]
    if window:
        allowed &= at[None] > at[:, None] - window
    return (q @ k.T * head_dim**-0.5).masked_fill(~allowed, -math.inf).softmax(-1) @ v


def predicted_tiles(tokens: int, block_queries: int, block_keys: int, window: int) -> int:
    """Tiles that are loaded, without looping over them: from the first key that a block's first query sees to its last
    query's own."""
    count = 0
    for i in range(tokens // block_queries):
        first = max(0, i * block_queries - window + 1) if window else 0
        count += ((i + 1) * block_queries - 1) // block_keys - first // block_keys + 1
    return count


def predicted_bytes(tokens: int, head_dim: int, block_queries: int, block_keys: int, window: int) -> int:
    """Queries and outputs once, a tile's keys and values whenever it is loaded, a sum a row."""
    tiles = predicted_tiles(tokens, block_queries, block_keys, window)
    return 2 * tokens * head_dim * STORED + tokens * SUM + tiles * 2 * block_keys * head_dim * STORED


def standard_bytes(tokens: int, head_dim: int) -> int:
    """The same without tiles, one operation after the other: scores written, masked and scaled in place, softmax,
    product.

    q and k read, S² scores written; read and written; read and written; read, with v, and the output written. All in 16
    bits, the whole square: what is masked is computed too.
    """
    return 4 * tokens * head_dim * STORED + 6 * tokens * tokens * STORED


def run_tiles(
    bench: Bench,
    *,
    tokens: int,
    head_dim: int,
    block_queries: int,
    block_keys: int,
    window: int,
    seed: int,
    shown_row: int,
    shown_step: int,
) -> Iterator[Measurement]:
    """A Measurement of the tiles that were loaded (unit "tiles"), one of the bytes (unit "bytes"), and where kernels
    run, one of the kernel's difference (unit "of the largest"). Raises WorkbenchError where an output is not that of
    softmax."""
    shape = {"tokens": tokens, "head_dim": head_dim, "window": window, "seed": seed}
    blocks = {"block_queries": block_queries, "block_keys": block_keys}
    bench.check_stop()
    found = loop(**shape, **blocks, shown_row=shown_row)
    truth = reference(tokens, head_dim, window, seed)
    apart = _apart(found.output, truth)
    if not apart <= EXACT:
        raise WorkbenchError(f"the loop over tiles differs from softmax by {apart:.2g} of the largest output")
    check = f"all {tokens} outputs as softmax in float64 gives them, within {apart:.1g} of the largest"
    measured = {"name": "kernels.tiles", "check": check}
    kinds = {kind: found.count(kind) for kind in (FULL, MASKED, SKIPPED)}
    yield bench.measurement(
        **measured,
        settings={**shape, **blocks, "counted": "tiles"},
        samples=[len(found.steps)],
        unit="tiles",
        counts=kinds,
        predicted=predicted_tiles(tokens, block_queries, block_keys, window),
    )
    last = found.steps[-1]
    yield bench.measurement(
        **measured,
        settings={**shape, **blocks, "counted": "bytes"},
        samples=[found.bytes],
        unit="bytes",
        counts={
            "bytes_read": last.bytes_read,
            "bytes_written": last.bytes_written,
            "standard_bytes": standard_bytes(tokens, head_dim),
        },
        predicted=predicted_bytes(tokens, head_dim, block_queries, block_keys, window),
    )
    bench.check_stop()
    yield from _kernel(bench, found, shape)


def _kernel(bench: Bench, found: Loop, shape: dict[str, int]) -> Iterator[Measurement]:
    """The real kernel on the same numbers in float16, held to the loop. Nothing where kernels do not run."""
    from workbench.kernels import launch
    from workbench.kernels.flash_attention import flash_attention

    if launch.why_not(bench.device):
        return
    bench.report("the kernel on the same numbers")
    tokens, head_dim = shape["tokens"], shape["head_dim"]
    q, k, v = (x.half().to(bench.device)[:, None] for x in inputs(tokens, head_dim, shape["seed"]))
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=bench.device)
    with launch.launches() as counted:
        output, lse = flash_attention(
            q,
            k,
            v,
            starts,
            starts,
            max_queries=tokens,
            scale=head_dim**-0.5,
            window=shape["window"] or None,
            with_lse=True,
        )
    apart, sums = _apart(output[:, 0].cpu(), found.output), _apart(lse[:, 0].cpu(), found.lse)
    if not max(apart, sums) <= NARROW:
        raise WorkbenchError(
            f"the kernel differs from the loop by {apart:.2g} of the largest output, and its log-sum-exp by {sums:.2g}"
        )
    how = "in the interpreter" if launch.INTERPRETED else "compiled"
    yield bench.measurement(
        name="kernels.tiles",
        settings={**shape, "counted": "kernel", "ran": how},
        samples=[apart],
        unit="of the largest",
        counts={"launches": counted.total()},
        check=f"the kernel {how}, on float16, within {apart:.1g} of the loop; its log-sum-exp within {sums:.1g}",
    )


def _apart(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours.double() - truth.double()).abs().max() / truth.double().abs().max())


EXPERIMENT = Experiment(
    name="kernels.tiles",
    lab=10,
    question="Which tiles does attention load, and what does it keep of a row?",
    how=(
        "FlashAttention's loop over one head, written out in tensors: maximum, sum and output of the followed row"
        " are those of the real run. Bytes are counted tile by tile, in 16 bits. Run holds every output to softmax"
        " in float64, and the Triton kernel to the loop."
    ),
    settings=(
        Setting("tokens", 128, "choice", choices=(32, 64, 128, 256), unit="tokens", help="S, of the text"),
        Setting("head_dim", 64, "choice", choices=(16, 32, 64, 128), help="D, of the head"),
        Setting("block_queries", 16, "choice", choices=(16, 32), unit="queries", help="of a tile"),
        Setting("block_keys", 16, "choice", choices=(16, 32), unit="keys", help="of a tile"),
        Setting(
            "window",
            NO_WINDOW,
            "choice",
            choices=(NO_WINDOW, 24, 48, 96),
            unit="tokens",
            help="that a query sees at most; 0: all before it",
        ),
        Setting("seed", 0, "int", 0, 10_000, help="of the numbers"),
        Setting("shown_row", 90, "int", 0, 255, help="the query that is followed"),
        Setting("shown_step", 20, "int", 0, 135, help="which tile is under way"),
    ),
    run=run_tiles,
    predict=no_times,
    record={"cpu": ()},  # counts are the same everywhere; on a GPU the kernel is held to the loop
)
