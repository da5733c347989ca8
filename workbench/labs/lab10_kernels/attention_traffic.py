"""kernels.attention_traffic: the bytes that causal attention over a whole text moves, by algorithm, and what that means
measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting
from workbench.instruments.memory import peak_memory, require_bytes
from workbench.models.attention import eager_attention, sdpa_attention

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
STANDARD, TILES, LEAST = "whole matrices", "tiles", "the least there is"
ALGORITHMS = (STANDARD, TILES, LEAST)
# what is measured, and which algorithm it is
CONTENDERS = {"eager": STANDARD, "sdpa": TILES, "kernel": TILES}
BLOCK_QUERIES = (16, 32, 64, 128, 256)
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the largest output: eager and fused may differ by


@dataclass(frozen=True)
class Shape:
    """Attention of one text of S tokens over itself, in one layer. bytes: of a number."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    bytes: int

    @property
    def queries(self) -> int:
        """Bytes of q, and of the output."""
        return self.tokens * self.heads * self.head_dim * self.bytes

    @property
    def keys(self) -> int:
        """Bytes of k, and of v."""
        return self.tokens * self.kv_heads * self.head_dim * self.bytes

    @property
    def square(self) -> int:
        """Numbers in the score matrices of all heads."""
        return self.heads * self.tokens**2


@dataclass(frozen=True)
class Pass:
    """One operation that goes over memory: what it reads and writes, and its FLOPs."""

    name: str
    bytes_read: int
    bytes_written: int
    flops: int = 0

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written


def passes(algorithm: str, s: Shape, block_queries: int = 128) -> tuple[Pass, ...]:
    """What each operation reads and writes, exactly.

    whole matrices: operation by operation as `models.attention.eager_attention` does it, scores in float32: the
    product, the scale, the mask, the softmax and the second product each go over S² numbers per head.
    tiles: FlashAttention with tiles of `block_queries` queries. Keys and values up to the diagonal pass once for each
    of them; a sum a row is written beside the output. Of keys and values that the query heads of a group share, each
    head reads its own.
    the least there is: q, k, v once, the output once.
    """
    if algorithm == LEAST:
        return (Pass("attention", s.queries + 2 * s.keys, s.queries, causal_flops(s)),)
    if algorithm == TILES:
        from workbench.kernels import traffic as counted

        shape = counted.Shape(1, s.tokens, s.tokens, s.heads, s.kv_heads, s.head_dim, element=s.bytes)
        moved = counted.tiled(shape, query_tile=block_queries, key_tile=min(64, block_queries), with_lse=True)
        return (Pass("attention", moved.bytes_read, moved.bytes_written, causal_flops(s)),)
    scores, product = 4 * s.square, 2 * s.square * s.head_dim
    found = []
    if s.heads != s.kv_heads:
        found.append(Pass("a copy of k and v for each head", 2 * s.keys, 2 * s.queries))
    if s.bytes < 4:
        found.append(Pass("q, k and v in float32", 3 * s.queries, 3 * s.queries * 4 // s.bytes))
    wide = s.queries * 4 // s.bytes  # q, k, v and the output in float32
    found += [
        Pass("scores = q·kᵀ", 2 * wide, scores, product),
        Pass("· scale", scores, scores),
        Pass("mask", scores + s.tokens**2, scores),
        Pass("softmax", scores, scores),
        Pass("· v", scores + wide, wide, product),
    ]
    return tuple(found)


def causal_flops(s: Shape) -> int:
    """Both products over the pairs of a query and a key that it sees: what an algorithm that skips has to compute."""
    return 4 * s.heads * s.head_dim * (s.tokens * (s.tokens + 1) // 2)


def traffic(algorithm: str, s: Shape, block_queries: int = 128) -> int:
    """Bytes that are moved in all."""
    return sum(p.bytes for p in passes(algorithm, s, block_queries))


def tiles_for(sram_bytes: int, s: Shape) -> tuple[int, int]:
    """(queries, keys) of a tile, as FlashAttention's algorithm 1 has them for M numbers of memory on the chip: M / 4D
    for q, k, v and the output, a quarter each; of the scores' other side no more than D, so that they fit as well."""
    queries = sram_bytes // s.bytes // (4 * s.head_dim)
    if queries < 1:
        raise WorkbenchError(f"{sram_bytes:,} bytes hold no tile of one query of {s.head_dim} numbers; take more")
    return min(queries, s.tokens), min(queries, s.head_dim, s.tokens)


def traffic_with(sram_bytes: int, s: Shape) -> int:
    """Bytes that the loop over tiles moves with so much memory on the chip for each program, without a causal mask:
    counted tile by tile. Each head reads its own keys and values."""
    from workbench.kernels import traffic as counted

    shape = counted.Shape(1, s.tokens, s.tokens, s.heads, s.kv_heads, s.head_dim, element=s.bytes)
    queries, keys = tiles_for(sram_bytes, s)
    return counted.tiled(shape, query_tile=queries, key_tile=keys, causal=False).bytes


def order_of_traffic(sram_bytes: int, s: Shape) -> float:
    """S²D²/M numbers per head, in bytes: what FlashAttention's accesses grow like (Dao et al., arXiv 2205.14135,
    theorem 2: Θ(N²d²/M) of them, and of standard attention Θ(Nd + N²))."""
    return s.heads * s.tokens**2 * s.head_dim**2 * s.bytes / (sram_bytes / s.bytes)


def predicted_peak(algorithm: str, s: Shape) -> int:
    """Bytes that are allocated at the worst moment, beyond q, k and v: two whole matrices of scores in float32, or
    none."""
    return 2 * 4 * s.square if algorithm == STANDARD else s.queries


def predict_passes(
    ceilings: Ceilings, algorithm: str, s: Shape, dtype: str, block_queries: int = 128
) -> tuple[float, str]:
    """(seconds, limit): for each pass the longer of its bytes and its FLOPs, all added.

    Tiles: keys and values that pass again come from a cache where they fit one, so they are taken once here.
    """
    chosen = LEAST if algorithm == TILES else algorithm
    moved = computed = total = 0.0
    for p in passes(chosen, s, block_queries):
        bytes_s = p.bytes / ceilings.read_bytes_per_s
        flops_s = p.flops / ceilings.flop_per_s["float32" if algorithm == STANDARD else dtype]
        total += max(bytes_s, flops_s)
        moved, computed = moved + bytes_s, computed + flops_s
    return total, "bandwidth" if moved >= computed else "compute"


def lengths(largest: int) -> tuple[int, ...]:
    return tuple(s for s in LENGTHS if s <= largest)


def shape_at(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> Shape:
    if heads % kv_heads:
        raise WorkbenchError(f"{heads} query heads do not share {kv_heads} key-value heads evenly; choose a divisor")
    return Shape(tokens, heads, kv_heads, head_dim, getattr(torch, dtype).itemsize)


def predict_traffic(
    ceilings: Ceilings, *, heads: int, kv_heads: int, head_dim: int, dtype: str, largest: int, **_: Any
) -> Sequence[tuple[float, float, str]]:
    """(tokens, seconds, limit): every length with whole matrices, then every length in tiles."""
    found = []
    for algorithm in (STANDARD, TILES):
        for tokens in lengths(largest):
            s = shape_at(tokens, heads, kv_heads, head_dim, dtype)
            found.append((tokens, *predict_passes(ceilings, algorithm, s, dtype)))
    return found


# -- measured ----------------------------------------------------------------------------------------------------


def _inputs(s: Shape, dtype: str, device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v = (
        torch.randn(s.tokens, heads, s.head_dim, generator=generator, device=device).to(getattr(torch, dtype))
        for heads in (s.heads, s.kv_heads, s.kv_heads)
    )
    return q, k, v


def contenders(device: str) -> dict[str, Callable]:
    """The functions that are timed here, by name: torch's two, and our kernel where it is compiled."""
    found: dict[str, Callable] = {"eager": eager_attention, "sdpa": sdpa_attention}
    if not device.startswith("cuda"):
        return found
    from workbench.kernels.flash_attention import flash_attention

    starts: dict[int, torch.Tensor] = {}  # made in the first, untimed call of each length

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
        if len(q) not in starts:
            starts[len(q)] = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
        at = starts[len(q)]
        output = flash_attention(q, k, v, at, at, max_queries=len(q), scale=scale)
        assert isinstance(output, torch.Tensor)
        return output

    return {**found, "kernel": kernel}


@torch.inference_mode()
def run_traffic(
    bench: Bench,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    block_queries: int,
    largest: int,
    repeats: int,
) -> Iterator[Measurement]:
    """For each length: seconds of each function, timed in turns on inputs that change (unit "s"), the bytes it
    allocated at its worst (unit "bytes"), and eager over SDPA turn by turn (unit "ratio")."""
    ceilings, kinds = bench.ceilings(), contenders(bench.device)
    for tokens in lengths(largest):
        s = shape_at(tokens, heads, kv_heads, head_dim, dtype)
        require_bytes(3 * predicted_peak(STANDARD, s), bench.device, f"eager attention over {tokens:,} tokens")
        bench.report(f"{tokens:,} of {largest} tokens")
        shared = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype, "tokens": tokens}
        sets = [_inputs(s, dtype, bench.device, seed) for seed in range(2)]
        check = _agree(kinds, sets[0], head_dim, dtype)
        samples: dict[str, list[float]] = {name: [] for name in kinds}
        for run in range(-1, repeats):
            for name, function in kinds.items():
                q, k, v = sets[run % len(sets)]
                attend = lambda function=function, q=q, k=k, v=v: function(q, k, v, scale=head_dim**-0.5)  # noqa: E731
                seconds = bench.measure(attend, repeats=1, warmup=0)
                samples[name] += seconds if run >= 0 else []
        for name, function in kinds.items():
            algorithm = CONTENDERS[name]
            expected, limit = predict_passes(ceilings, algorithm, s, dtype)
            moved = passes(algorithm, s, block_queries)
            yield bench.measurement(
                name="kernels.attention_traffic",
                settings={**shared, "by": name, "measured": "time"},
                samples=samples[name],
                unit="s",
                counts={
                    "bytes_read": sum(p.bytes_read for p in moved),
                    "bytes_written": sum(p.bytes_written for p in moved),
                    "flops": sum(p.flops for p in moved),
                    "passes": len(moved),
                },
                predicted=expected,
                limit=limit,
                check=check,
            )
            bench.check_stop()
            with peak_memory(bench.device) as peak:
                function(*sets[0], scale=head_dim**-0.5)
            yield bench.measurement(
                name="kernels.attention_traffic",
                settings={**shared, "by": name, "measured": "peak"},
                samples=[peak.bytes],
                unit="bytes",
                predicted=predicted_peak(algorithm, s),
                check="allocated at once beyond q, k and v, counted",
            )
        yield bench.measurement(
            name="kernels.attention_traffic",
            settings={**shared, "by": "eager ÷ sdpa", "measured": "ratio"},
            samples=[a / b for a, b in zip(samples["eager"], samples["sdpa"])],
            unit="ratio",
            predicted=predict_passes(ceilings, STANDARD, s, dtype)[0] / predict_passes(ceilings, TILES, s, dtype)[0],
            check="both timed in alternation, on the same inputs",
        )


def _agree(kinds: dict[str, Callable], qkv: tuple, head_dim: int, dtype: str) -> str:
    """In words, how far all are from eager attention. Raises WorkbenchError where one computes something else."""
    truth = eager_attention(*qkv, scale=head_dim**-0.5).double()
    worst = 0.0
    for name, function in kinds.items():
        apart = float((function(*qkv, scale=head_dim**-0.5).double() - truth).abs().max() / truth.abs().max())
        if not apart <= ROUNDING[getattr(torch, dtype)]:
            raise WorkbenchError(f"{name} differs from eager attention by {apart:.2g} of the largest output")
        worst = max(worst, apart)
    return f"outputs of {', '.join(kinds)} agree within {worst:.1g} of the largest"


EXPERIMENT = Experiment(
    name="kernels.attention_traffic",
    lab=10,
    question="What does attention move, and what does it have to move?",
    how=(
        "bytes are counted operation by operation. Measured: causal attention of one text over itself, eager and"
        " fused, in alternation on two sets of inputs; outputs compared first. Predicted: for each operation the"
        " longer of its bytes at this machine's read bandwidth and its FLOPs. Allocations are counted by torch in a"
        " run of their own."
    ),
    settings=(
        Setting("heads", 8, "choice", choices=(1, 2, 4, 8, 16, 32), help="H, query heads"),
        Setting("kv_heads", 8, "choice", choices=(1, 2, 4, 8), help="G, key-value heads"),
        Setting("head_dim", 64, "choice", choices=(32, 64, 128), help="D, of a head"),
        Setting("dtype", "float32", "choice", choices=("float32", "bfloat16"), help="of q, k, v and the output"),
        Setting("block_queries", 128, "choice", choices=BLOCK_QUERIES, unit="queries", help="of a tile, for the count"),
        Setting("largest", 1024, "choice", choices=LENGTHS, unit="tokens", help="S, of the longest text measured"),
        Setting("repeats", 7, "int", 1, 100, brief=2, help="timed turns at each length"),
    ),
    run=run_traffic,
    limits=lambda *, heads, **_: {"kv_heads": lambda shared: heads % shared == 0},
    predict=predict_traffic,
    record={
        "cpu": ({"largest": 2048},),
        "cuda": ({"dtype": "bfloat16", "heads": 16, "head_dim": 128, "largest": 4096, "repeats": 20},),
    },
)
