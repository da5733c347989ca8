"""Lab 10: what the checks do with an answer, and what they see. Probes run beside the answer and hold no expected
value.

Every tensor is made up from a seed, the same in every process, so that a judge elsewhere can work out by itself what is
right. On a machine with a GPU the answers are compiled and get their tensors there; what a kernel loads is counted in
the interpreter alone (`loaded`, `largest` are None elsewhere). Triton is imported when an answer is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from workbench.checks.tensors import shown


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Functions of torch that the way to a kernel may need: none of them computes. FREE has those of any tensor.
_EMPTY = "empty empty_like empty_strided new_empty new_empty_strided"
_MADE = (
    "zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full new_tensor tensor arange scalar_tensor"
    " fill_ zero_"
)
_SHAPES = (
    "__get__ __set__ __len__ __getitem__ size stride dim ndimension numel nelement element_size storage_offset"
    " is_contiguous is_floating_point is_complex view view_as reshape reshape_as flatten unflatten ravel squeeze"
    " unsqueeze t transpose permute movedim swapaxes narrow select split chunk unbind expand expand_as contiguous"
    " clone detach to type type_as float half double bfloat16 int long cpu cuda get_device stack cat concat"
)
EMPTY = frozenset(_EMPTY.split())
FREE = frozenset((*_MADE.split(), *_SHAPES.split()))
OF_WHOLE_NUMBERS = frozenset(("max", "min", "amax", "amin", "item", "__int__", "__index__", "__bool__", "tolist"))
INTERPRETER = frozenset(("data_ptr", "untyped_storage", "set_", "copy_"))  # by which it moves tensors


class PoisonedMemory(TorchFunctionMode):
    """While it lasts torch.empty and its kin give NaN: what a kernel leaves out shows, and never holds by chance what
    an earlier one wrote.

    computed: which functions of torch were called that the way to a kernel does not need: those that compute, and those
    by which numbers leave torch. traffic: says whether a kernel is running, in the interpreter, which moves tensors.
    """

    def __init__(self, traffic: Any = None) -> None:
        super().__init__()
        self._traffic = traffic
        self.computed: dict[str, None] = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", str(function))
        if name in EMPTY:
            if made.is_floating_point():
                made.fill_(torch.nan)
        elif not self._is_free(name, args):
            self.computed[name.strip("_")] = None
        return made

    def _is_free(self, name: str, args: Sequence[Any]) -> bool:
        if self._traffic is not None and self._traffic.launching and name in INTERPRETER:
            return True
        of = args[0] if args else None
        whole = isinstance(of, torch.Tensor) and of.dtype in (torch.int32, torch.int64, torch.bool)
        return name in FREE or (whole and name in OF_WHOLE_NUMBERS)


def _watched(call: Callable[..., Any], inputs: dict[str, torch.Tensor]) -> tuple[Any, dict]:
    """(what call(**inputs on the device) gave, {"changed", "launches", "loaded", "largest", …}).

    without_kernel: it gives the same where the kernel is launched and does nothing (in the interpreter). beside: which
    functions of torch it called that compute. made_elsewhere: numbers came back that no kernel had stored.
    """
    from workbench.kernels.launch import launches
    from workbench.labs.lab10_kernels.checks import parts

    given = {name: tensor.to(parts.DEVICE) for name, tensor in inputs.items()}
    fresh = {name: tensor.clone() for name, tensor in given.items()}
    with launches() as counted, parts.traffic() as traffic, PoisonedMemory(traffic) as torchs:
        gave = _plain(call(**given))
    changed = [name for name in given if not _same_bits(given[name], fresh[name])]
    seen = {"changed": changed, "launches": counted.total(), "loaded": None, "largest": None, "without_kernel": False}
    seen |= {"beside": [], "made_elsewhere": False}
    if parts.INTERPRETED:
        seen["beside"] = list(torchs.computed)[:5]
        seen["made_elsewhere"] = not _all_stored(gave, traffic.left)
        seen["without_kernel"] = not changed and _same(gave, _idle(call, fresh))
        seen["loaded"] = {name: traffic.loaded[tensor.data_ptr()] for name, tensor in given.items()}
        seen["largest"] = traffic.largest
    return gave, seen


def _plain(gave: Any) -> Any:
    """A tensor, or the tensors of a pair, as they are now: not of a class that says later what it holds."""
    if isinstance(gave, torch.Tensor) and type(gave) is not torch.Tensor:
        return type(gave).__name__
    return type(gave)(map(_plain, gave)) if type(gave) in (tuple, list) else gave


def _all_stored(gave: Any, left: list[torch.Tensor]) -> bool:
    """Whether each number of a tensor, or of the tensors of a pair, is one that a kernel stored. NaN is what nobody
    wrote."""
    if type(gave) in (tuple, list):
        return all(_all_stored(one, left) for one in gave)
    if not isinstance(gave, torch.Tensor) or gave.is_meta or gave.layout is not torch.strided:
        return True  # the judge says what it is
    stored = [tensor.to(gave.dtype).flatten() for tensor in left]
    numbers = gave.flatten()
    return bool((torch.isin(numbers, torch.cat(stored or [numbers[:0]])) | (numbers != numbers)).all())


def _idle(call: Callable[..., Any], given: dict[str, torch.Tensor]) -> Any:
    """What comes back where kernels do nothing; None where that ends in an error."""
    from workbench.labs.lab10_kernels.checks import parts

    try:
        with PoisonedMemory(), parts.traffic(idle=True):
            return _plain(call(**given))
    except Exception:
        return None


def _same(gave: Any, other: Any) -> bool:
    """Whether a tensor, or all tensors of a pair, are the same numbers; NaN is what nobody wrote."""
    if isinstance(gave, torch.Tensor) and isinstance(other, torch.Tensor):
        return gave.shape == other.shape and gave.dtype == other.dtype and torch.equal(gave, other)
    pairs = isinstance(gave, tuple | list) and isinstance(other, tuple | list) and len(gave) == len(other) > 0
    return pairs and all(map(_same, gave, other))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) if a.is_floating_point() else torch.equal(a, b)


def _both(gave: Any, first: str, second: str) -> dict:
    """A pair of tensors by name, or what else it was."""
    if not isinstance(gave, tuple | list) or len(gave) != 2:
        return {"pair": type(gave).__name__}
    return {first: shown(gave[0]), second: shown(gave[1])}


# --- kernels-softmax ---


def softmax_rows(
    seed: int,
    rows: int,
    columns: int,
    tile: int,
    size: float,
    blank: Sequence[int] = (),
    rise: float = 0.0,
    dtype: str = "float32",
) -> torch.Tensor:
    """x [rows, columns], of about ±size; `blank` tiles are all −inf; each tile lies `rise` above the last."""
    x = size * torch.randn(rows, columns, generator=_generator(seed), dtype=torch.float64)
    x += rise * (torch.arange(columns) // tile)
    for number in blank:
        x[:, number * tile : (number + 1) * tile] = -torch.inf
    return x.to(getattr(torch, dtype))


def run_softmax(answer: Any, tile: int, **case: Any) -> dict:
    """answer(x, tile=tile)."""
    gave, seen = _watched(lambda x: answer(x, tile=tile), {"x": softmax_rows(tile=tile, **case)})
    return {"out": shown(gave), **seen}


# --- kernels-merge ---


def split_parts(
    seed: int, splits: int, texts: int, heads: int, size: int, spread: float, offset: float = 0.0, empty: Sequence = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """(parts [splits, texts, heads, size], lse [splits, texts, heads]) in float32.

    spread: how far the log-sum-exps lie from each other, around `offset`. empty: [split, text] without a key, its lse
    −inf and its part, which nobody wrote, NaN.
    """
    generator = _generator(seed)
    parts = torch.randn(splits, texts, heads, size, generator=generator)
    lse = offset + spread * torch.randn(splits, texts, heads, generator=generator)
    for split, text in empty:
        parts[split, text], lse[split, text] = torch.nan, -torch.inf
    return parts, lse


def run_merge(answer: Any, **case: Any) -> dict:
    """answer(parts, lse)."""
    parts, lse = split_parts(**case)
    gave, seen = _watched(answer, {"parts": parts, "lse": lse})
    return {**_both(gave, "out", "lse"), **seen}


def run_merge_twice(answer: Any, first: int, **case: Any) -> dict:
    """The first so many splits, then the others, then both results."""
    parts, lse = split_parts(**case)

    def in_two_steps(parts, lse):
        halves = [answer(parts[:first], lse[:first]), answer(parts[first:], lse[first:])]
        return answer(*(torch.stack([half[i].float() for half in halves]) for i in (0, 1)))

    gave, seen = _watched(in_two_steps, {"parts": parts, "lse": lse})
    return {**_both(gave, "out", "lse"), **seen}


# --- kernels-paged ---


def paged_pool(
    seed: int,
    places: int,
    heads: Sequence[int],
    size: int,
    tables: list,
    lengths: list,
    block_size: int,
    junk: int = -1,
    garbage: str = "numbers",
    dtype: str = "float32",
) -> dict[str, torch.Tensor]:
    """q [B, H, D], k and v [places, G, D], tables [B, blocks] int32, lengths [B] int32.

    tables: the blocks of each text; rows are filled up with `junk`. garbage: what lies where no text does, "numbers" or
    "nan".
    """
    generator, wide = _generator(seed), getattr(torch, dtype)
    query_heads, kv_heads = heads
    q = 1.5 * torch.randn(len(tables), query_heads, size, generator=generator, dtype=torch.float64)
    pool = torch.randn(places, 2, kv_heads, size, generator=generator, dtype=torch.float64)
    live = torch.zeros(places, dtype=torch.bool)
    for table, length in zip(tables, lengths):
        for t in range(length):
            live[table[t // block_size] * block_size + t % block_size] = True
    pool[~live] = torch.nan if garbage == "nan" else 1.5 * pool[~live] + 1.0
    most = max(1, *map(len, tables))
    padded = [[*table, *[junk] * (most - len(table))] for table in tables]
    return {
        "q": q.to(wide),
        "k": pool[:, 0].to(wide).contiguous(),
        "v": pool[:, 1].to(wide).contiguous(),
        "tables": torch.tensor(padded, dtype=torch.int32),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
    }


def run_paged(answer: Any, tile: int, side_by_side: bool = False, **case: Any) -> dict:
    """answer(q, k, v, tables, lengths, block_size=…, scale=1/√D, tile=tile).

    side_by_side: k and v are views of one tensor [places, 2, G, D], as they are in the engine.
    """
    inputs = paged_pool(**case)
    scale = inputs["q"].shape[-1] ** -0.5
    if side_by_side:
        inputs["kv"] = torch.stack((inputs.pop("k"), inputs.pop("v")), dim=1)

    def call(q, tables, lengths, kv=None, k=None, v=None):
        k, v = (k, v) if kv is None else (kv[:, 0], kv[:, 1])
        return answer(q, k, v, tables, lengths, block_size=case["block_size"], scale=scale, tile=tile)

    gave, seen = _watched(call, inputs)
    return {"out": shown(gave), **seen}


# --- kernels-int4 ---


def int4_weight(
    seed: int,
    rows: int,
    outs: int,
    width: int,
    group: int,
    plain: bool = False,
    cancel: bool = False,
    dtype: str = "float32",
) -> dict[str, torch.Tensor]:
    """x [rows, width], codes [outs, width/2] uint8, scale and zero [outs, width/group] float16.

    plain: scales 1 and zeros 0. cancel: the first half of x is about +100, the second about −100.
    """
    generator = _generator(seed)
    x = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    codes = torch.randint(0, 256, (outs, width // 2), generator=generator, dtype=torch.uint8)
    scale = 0.1 + torch.rand(outs, width // group, generator=generator)
    zero = torch.randn(outs, width // group, generator=generator) - 2.0
    if plain:
        scale, zero = torch.ones_like(scale), torch.zeros_like(zero)
    if cancel:
        x[:, : width // 2] += 100.0
        x[:, width // 2 :] = -x[:, : width // 2] + 0.1 * x[:, width // 2 :]
        codes = codes[:, :1].expand(-1, width // 2).contiguous() & 0x0F | 0x0C  # 12 … 15
        codes |= codes << 4
        scale, zero = torch.ones_like(scale), torch.zeros_like(zero)
    return {
        "x": x.to(getattr(torch, dtype)),
        "codes": codes,
        "scale": scale.to(torch.float16),
        "zero": zero.to(torch.float16),
    }


def run_int4(answer: Any, group: int, **case: Any) -> dict:
    """answer(x, codes, scale, zero, group=group)."""

    def call(x, codes, scale, zero):
        return answer(x, codes, scale, zero, group=group)

    gave, seen = _watched(call, int4_weight(group=group, **case))
    return {"out": shown(gave), **seen}


# --- kernels-norm ---


def norm_rows(
    seed: int,
    rows: int,
    width: int,
    with_residual: bool,
    size: float = 1.0,
    zero_row: bool = False,
    dtype: str = "float32",
) -> dict[str, torch.Tensor]:
    """x and, with it, residual [rows, width], weight [width]; the rows' mean is not 0. zero_row: the first row is 0."""
    generator, wide = _generator(seed), getattr(torch, dtype)
    made = {"x": size * (torch.randn(rows, width, generator=generator, dtype=torch.float64) + 0.4)}
    made["weight"] = 1.0 + 0.5 * torch.randn(width, generator=generator, dtype=torch.float64)
    if with_residual:
        made["residual"] = size * 2.0 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    if zero_row:
        for name in ("x", "residual")[: 1 + with_residual]:
            made[name][0] = 0.0
    return {name: tensor.to(wide) for name, tensor in made.items()}


def run_norm(answer: Any, eps: float, **case: Any) -> dict:
    """answer(x, weight, eps), or answer(x, weight, eps, residual=residual)."""
    gave, seen = _watched(lambda x, weight, **residual: answer(x, weight, eps, **residual), norm_rows(**case))
    return {**(_both(gave, "out", "total") if case["with_residual"] else {"out": shown(gave)}), **seen}


def run_demand(answer: Any, probe: str, given: dict, demand: str) -> Any:
    """Another probe of this module, by its name."""
    return globals()[probe](answer, **given)
