"""beyond.forms: the forms of each scan, which give the same numbers for other FLOPs in other numbers of steps.

    recurrent        one token after the other: the definition, and what decode runs
    convolution      a kernel as long as the text, by FFT or by the definition (S4 and S4D, whose system never changes)
    quadratic        all pairs of tokens at once, attention's own order
    chunked          side by side within a chunk, one after the other from chunk to chunk
    parallel scan    a tree of pairs (Blelloch)

FLOPs of a form are a formula of the sizes: products, sums and quotients, 2 for a multiply and its add; a complex
product is 6, a complex sum 2, a complex quotient 8, an FFT of n complex numbers 5 n log₂ n and of real ones half of
that. Exponentials, and what is done once per token and not for each value of a state, are left out. A run counts what
torch really computes, in the operations as they are dispatched. Left out are Hyena, whose past has no recurrence, and
recurrent memory, whose forms are attention's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.errors import WorkbenchError, unknown
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.models.config import ModelConfig
from workbench.models.mixers import gated_delta, linear_attention, make_mixer, mamba, mamba2, rwkv7, scan
from workbench.models.mixers.s4 import S4D, direct_convolution
from workbench.models.state_shape import StateShape, scan_flops

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

NAME = "beyond.forms"
WIDTH = 64  # d, of the one layer that is run
SHAPES = {
    "s4": StateShape(inner_size=WIDTH, state_size=16),
    "s4d": StateShape(inner_size=WIDTH, state_size=16),
    "linear_attention": StateShape(inner_size=128, state_size=32, num_heads=4),
    "mamba": StateShape(inner_size=128, state_size=16, rank=4),
    "mamba2": StateShape(inner_size=128, state_size=32, num_heads=4, num_groups=4),
    "gated_delta": StateShape(inner_size=128, state_size=32, num_heads=4, num_groups=4),
    "rwkv7": StateShape(inner_size=128, num_heads=4, rank=8),
}
LENGTHS = (64, 128, 256, 512, 1024, 2048)
CHUNKS = (16, 32, 64)
LONGEST_DIRECT = 512  # tokens up to which a convolution by its definition is run: it writes T × T numbers a channel
EQUAL = 1e-9  # of the largest value, in float64
RECURRENT, CONVOLUTION, DIRECT = "recurrent", "convolution (FFT)", "convolution (definition)"
QUADRATIC, CHUNKED, TREE = "quadratic", "chunked", "parallel scan"


@dataclass(frozen=True)
class Form:
    """One form of a scan. steps: operations on a state or a whole chunk that wait for each other; of an FFT its stages,
    of a triangular system its rows."""

    name: str
    flops: int
    steps: int
    longest: int | None = None  # tokens up to which it is run

    def runs(self, length: int) -> bool:
        return self.longest is None or length <= self.longest


# -- by formula --------------------------------------------------------------------------------------------------------


def forms_of(kind: str, length: int, chunk: int) -> list[Form]:
    """The forms of a kind for `length` tokens of one sequence in chunks of `chunk`, the recurrence first.

    Raises WorkbenchError for a kind that is none of SHAPES, and for a length that is no multiple of the chunk.
    """
    if kind not in SHAPES:
        raise unknown("kind of mixer", kind, SHAPES)
    if length % chunk:
        raise WorkbenchError(f"length {length:,} must be a multiple of the chunk, {chunk}; got {length % chunk} more")
    shape = SHAPES[kind]
    once = scan_flops(kind, dataclasses.replace(shape, conv_width=0), WIDTH, length)
    recurrent = Form(RECURRENT, length * once, length)
    chunks = length // chunk
    match kind:
        case "s4" | "s4d":
            kernel = _kernel_flops(kind, shape, length)
            stages = 2 * int(math.log2(2 * length))
            fft = Form(CONVOLUTION, kernel + _fft_flops(length), stages)
            direct = Form(DIRECT, kernel + 2 * WIDTH * length**2, 1, LONGEST_DIRECT)
            if kind == "s4":  # its chunks are the recurrence
                return [recurrent, fft, direct]
            # a chunk's powers, its kernel, what the state before adds, and what it adds to the state
            half = shape.state_size // 2
            a_chunk = WIDTH * half * (2 + 3 * 8) * chunk + _fft_flops(chunk)
            return [recurrent, Form(CHUNKED, chunks * a_chunk, chunks), fft, direct]
        case "mamba":
            values = shape.inner_size * shape.state_size
            around = 4 * values * length  # Δ A, Δ u B; and 2 to read
            a_chunk = values * (3 * (chunk - 1) + 2 * chunk + 2)
            steps = chunk + chunks
            tree = around + values * (2 + _tree_flops(length))
            return [
                recurrent,
                Form(CHUNKED, around + chunks * a_chunk, steps),
                Form(TREE, tree, 2 * int(math.log2(length))),
            ]
        case "linear_attention" | "mamba2":
            return [
                recurrent,
                Form(CHUNKED, chunks * _pairs_flops(kind, shape, chunk), chunks),
                Form(QUADRATIC, _pairs_flops(kind, shape, length), 1),
            ]
    heads, size = shape.num_heads, shape.head_dim
    keys = shape.state_size if kind == "gated_delta" else size
    a_chunk = heads * _delta_flops(kind, keys, size, chunk)
    return [recurrent, Form(CHUNKED, chunks * a_chunk, chunks + chunk)]


def _fft_flops(length: int) -> int:
    """Of u and of the kernel and back, 2T real numbers of each channel, and their products between."""
    return WIDTH * (3 * int(5 * length * math.log2(2 * length)) + 6 * (length + 1))


def _kernel_flops(kind: str, shape: StateShape, length: int) -> int:
    n = shape.state_size
    if kind == "s4d":  # a Vandermonde product, 8 for a complex multiply and its add
        return WIDTH * (n // 2) * 8 * math.isqrt(length) * -(-length // math.isqrt(length))
    # Ā (a system of N equations with N right sides), its power by squaring, and four Cauchy sums at T roots of unity
    dense = 8 * n**3 // 3 + 8 * n**3 + 8 * n**3 * int(math.log2(length))
    return WIDTH * (dense + n * length * (8 + 4 * (8 + 2)))


def _tree_flops(length: int) -> int:
    """Of each value: 3 to join two tokens, 2 to fill in what lies between two pairs."""
    if length == 1:
        return 0
    pairs = length // 2
    return 3 * pairs + _tree_flops(pairs) + 2 * ((length - 1) // 2)


def _pairs_flops(kind: str, shape: StateShape, length: int) -> int:
    """Of all heads: scores and what they weigh, the state read and added to; of Mamba-2 decays of pairs and of the
    state, too, where it goes from chunk to chunk."""
    keys, size = shape.state_size, shape.head_dim
    pairs = 2 * keys + 2 * size + (2 if kind == "mamba2" else 0)
    return shape.num_heads * (
        length**2 * pairs + length * 4 * keys * size + (2 if kind == "mamba2" else 0) * keys * size
    )


def _delta_flops(kind: str, keys: int, size: int, chunk: int) -> int:
    """Of one chunk and head: the triangular system and its right side, then what the state gives and gets."""
    solve = chunk**2 * (keys + size)
    if kind == "gated_delta":
        pairs = chunk**2 * (4 * keys + 2 * size + 4)  # kkᵀ, qkᵀ, and their use on u; decays of pairs
        return pairs + solve + chunk * 6 * keys * size + 2 * keys * size
    pairs = chunk**2 * 2 * (4 * keys + 3 * size)
    return pairs + solve + chunk * 8 * keys * size + 3 * keys * size


# -- run ---------------------------------------------------------------------------------------------------------------


def runs_of(kind: str, length: int, chunk: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Callable]:
    """{form: a function without arguments that gives y [1, T, …]}, all on the same random inputs, from an empty
    state."""
    names = [form.name for form in forms_of(kind, length, chunk) if form.runs(length)]
    draw = torch.Generator().manual_seed(length)
    shape = dataclasses.replace(SHAPES[kind], chunk_size=chunk)

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=torch.float64, generator=draw).to(device, dtype)

    every = _s4_runs(kind, shape, length, rand) if kind in ("s4", "s4d") else _scan_runs(kind, shape, length, rand)
    return {name: every[name] for name in names}


def _scan_runs(kind: str, shape: StateShape, length: int, rand: Callable) -> dict[str, Callable]:
    chunk, heads, size = shape.chunk_size, shape.num_heads, shape.head_dim
    if kind == "mamba":
        u, step, b, c = (
            rand(1, length, shape.inner_size),
            rand(1, length, shape.inner_size),
            *(rand(1, length, shape.state_size) for _ in range(2)),
        )
        a, h = -rand(shape.inner_size, shape.state_size).exp(), rand(1, shape.inner_size, shape.state_size) * 0

        def of(order: Callable) -> Callable:
            def run() -> torch.Tensor:
                decays, inputs = mamba.selective(u, F.softplus(step), a, b)
                return torch.einsum("bten,btn->bte", order(decays, inputs), c)

            return run

        return {
            RECURRENT: of(lambda x, y: scan.sequential(x, y, h)),
            CHUNKED: of(lambda x, y: scan.chunked(x, y, h, chunk)),
            TREE: of(lambda x, y: scan.blelloch(x, y, h)),
        }
    keys = size if kind == "rwkv7" else shape.state_size
    q, k, v = (rand(1, length, heads, n) for n in (keys, keys, size))
    s, decay = rand(1, heads, keys, size) * 0, -F.softplus(rand(1, length, heads))
    match kind:
        case "linear_attention":
            q, k, memory = linear_attention.phi(q), linear_attention.phi(k), (s, s[..., 0])
            return {
                RECURRENT: lambda: linear_attention.recurrent(q, k, v, memory)[0],
                CHUNKED: lambda: linear_attention.chunked(q, k, v, memory, chunk)[0],
                QUADRATIC: lambda: linear_attention.quadratic(q, k, v, memory)[0],
            }
        case "mamba2":
            return {
                RECURRENT: lambda: mamba2.recurrent(q, k, v, decay, s)[0],
                CHUNKED: lambda: mamba2.chunked(q, k, v, decay, s, chunk)[0],
                QUADRATIC: lambda: mamba2.quadratic(q, k, v, decay, s)[0],
            }
        case "gated_delta":
            given = q, gated_delta.unit(k), v, decay, rand(1, length, heads).sigmoid(), s
            return {
                RECURRENT: lambda: gated_delta.recurrent(*given)[0],
                CHUNKED: lambda: gated_delta.chunked(*given, chunk)[0],
            }
    assert kind == "rwkv7", kind
    log_w = -rwkv7.LARGEST_DECAY * rand(1, length, heads, keys).sigmoid()
    removed, rate = F.normalize(rand(1, length, heads, keys), dim=-1), rand(1, length, heads, keys).sigmoid()
    of_rwkv = q, log_w, k, v, removed, rate, s
    return {RECURRENT: lambda: rwkv7.recurrent(*of_rwkv)[0], CHUNKED: lambda: rwkv7.chunked(*of_rwkv, chunk)[0]}


def _s4_runs(kind: str, shape: StateShape, length: int, rand: Callable) -> dict[str, Callable]:
    """Of an untrained mixer."""
    u = rand(1, length, WIDTH)
    mixer = make_mixer(_config(kind, shape, length), 0)
    assert isinstance(mixer, S4D)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            start = mixer.initial_value(name, parameter.shape, generator)
            if start is not None:
                parameter.copy_(start)
    system = mixer.to(u.device, u.dtype).requires_grad_(False)
    x = torch.zeros(1, WIDTH, shape.state_size // 2, dtype=u.dtype.to_complex(), device=u.device)
    return {
        RECURRENT: lambda: system.recurrent(u, x)[0],
        CHUNKED: lambda: system.continued(u, x)[0],
        CONVOLUTION: lambda: system.convolved(u),
        DIRECT: lambda: direct_convolution(u, system.kernel(length)),
    }


def _config(kind: str, shape: StateShape, length: int) -> ModelConfig:
    """A model of one layer of this kind."""
    return ModelConfig(
        family="qwen3",
        vocab_size=8,
        hidden_size=WIDTH,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=0,
        context_length=length,
        mixers=(kind,),
        state_shape=shape,
    )


class Counted(TorchDispatchMode):
    """What torch computes inside the block: `flops` by the rules of the module, `operations` that are no views, and
    `chain`, the longest row of operations that wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.operations, self.chain = 0.0, 0, 0
        self._depth: dict[int, int] = {}  # of what each storage holds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        given = [x for x in _tensors(args) if x.numel()]
        places = {x.untyped_storage().data_ptr() for x in given}
        made = [x for x in _tensors((out,)) if x.numel()]
        name = func.overloadpacket.__name__
        inside = name.endswith("_") or name == "copy"
        if not inside and all(x.untyped_storage().data_ptr() in places for x in made):
            return out  # a view
        depth = 1 + max((self._depth.get(place, 0) for place in places), default=0)
        for x in made:
            self._depth[x.untyped_storage().data_ptr()] = depth
        self.operations += 1
        self.chain = max(self.chain, depth)
        self.flops += _flops(name, args, given, made)
        return out


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _flops(name: str, args: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> float:
    if not made:
        return 0
    out, wide = made[0], [x.is_complex() for x in given]
    both = len(wide) > 1 and all(wide[:2])
    match name:
        case "bmm" | "mm":
            return (8 if out.is_complex() else 2) * out.numel() * given[0].shape[-1]
        case "mul":
            return out.numel() * (6 if both else 2 if out.is_complex() else 1)
        case "div":
            return out.numel() * (8 if both else 2 if out.is_complex() else 1)
        case "add" | "sub" | "rsub":
            return out.numel() * (2 if out.is_complex() else 1)
        case "sum" | "cumsum":
            return given[0].numel() * (2 if wide[0] else 1)
        case "_fft_r2c" | "_fft_c2r":
            size = max(given[0].shape[d] if name == "_fft_r2c" else out.shape[d] for d in args[1])
            return 2.5 * max(given[0].numel() if name == "_fft_r2c" else out.numel(), 1) * math.log2(size)
        case "_fft_c2c":
            return 5 * out.numel() * math.log2(math.prod(out.shape[d] for d in args[1]))
        case "linalg_solve_triangular":
            return out.numel() * out.shape[-2]
        case "_linalg_solve_ex":
            n, batch = given[0].shape[-1], math.prod(given[0].shape[:-2])
            return batch * (4 if out.is_complex() else 1) * (2 * n**3 / 3 + 2 * n**2 * given[1].shape[-1])
    return 0


def counted(run: Callable[[], torch.Tensor]) -> Counted:
    """What one run of a form does."""
    with torch.no_grad(), Counted() as count:
        run()
    return count


def differences(kind: str, length: int, chunk: int) -> Mapping[str, float]:
    """{form: largest difference to the recurrence in float64, of its largest value}."""
    with torch.inference_mode():
        outputs = {name: run() for name, run in runs_of(kind, length, chunk, torch.float64).items()}
    expected = outputs[RECURRENT]
    return {name: float((y - expected).abs().max() / expected.abs().max()) for name, y in outputs.items()}


def run_forms(bench: Bench, *, kind: str, length: int, chunk: int, repeats: int) -> Iterator[Measurement]:
    """For each form that is run two Measurements: FLOPs as torch computes them beside the formula, and seconds in
    float32. Raises WorkbenchError where two forms differ in float64: their costs would be those of different things."""
    forms = {form.name: form for form in forms_of(kind, length, chunk)}
    bench.check_stop()
    bench.report("comparing the forms in float64")
    differ = differences(kind, length, chunk)
    if max(differ.values()) > EQUAL:
        raise WorkbenchError(
            f"forms of {kind} differ by {max(differ.values()):.2g} of the largest value, more than {EQUAL:g}: "
            f"{', '.join(f'{name} {value:.1g}' for name, value in differ.items())}"
        )
    runs = runs_of(kind, length, chunk, torch.float32, str(bench.device))
    for at, (name, run) in enumerate(runs.items()):
        bench.check_stop()
        bench.report(f"{at + 1} of {len(runs)} forms: {name}")
        settings = {"kind": kind, "length": length, "chunk": chunk, "form": name}
        check = f"equals the recurrence within {differ[name]:.1g} of the largest value, in float64"
        count = counted(run)
        counts = {
            "flops": count.flops,
            "steps": forms[name].steps,
            "operations": count.operations,
            "chain": count.chain,
            "difference": differ[name],
        }
        yield bench.measurement(
            name=NAME,
            settings={**settings, "measured": "flops"},
            samples=[count.flops],
            unit="FLOP",
            counts=counts,
            predicted=float(forms[name].flops),
            check=check,
        )
        with torch.inference_mode():
            samples = bench.measure(run, repeats=repeats)
        yield bench.measurement(
            name=NAME, settings={**settings, "measured": "time"}, samples=samples, unit="s", counts=counts, check=check
        )


EXPERIMENT = Experiment(
    name=NAME,
    lab=14,
    question="The same scan as recurrence, in chunks, as a tree or as a convolution: what does each form cost?",
    how=(
        "one layer's scan over random inputs, without the projections around it; forms are compared in float64, FLOPs"
        " and operations counted as torch dispatches them, times taken in float32"
    ),
    settings=(
        Setting("kind", "mamba2", "choice", choices=tuple(SHAPES), help="of the mixer"),
        Setting("length", 1024, "choice", choices=LENGTHS, unit="tokens", brief=128, help="of the one sequence"),
        Setting("chunk", 64, "choice", choices=CHUNKS, unit="tokens", help="of the chunked form"),
        Setting("repeats", 9, "int", 1, 50, brief=1, help="timed runs of each form"),
    ),
    run=run_forms,
    predict=no_times,
)
