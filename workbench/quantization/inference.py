"""Quantized weights for inference: the forms in which codes are multiplied, and the list of who makes them.

    form             where                          codes                     a product
    CodeKernel       CPU with a C++ compiler        integers, groups of 32·n  C++ loops (`cpu_forms`); inputs as they
                                                    (8 bits: whole rows too)  are, or by name ("q8") rounded to 8 bits
    NibbleKernel     other CPUs, bfloat16           integers, groups of 32·n  torch's kernel for 4 bits; 8 bits are two
    ScaledRows       other CPUs, any type           5 to 8 bits, whole rows   codes as numbers, scaled afterwards
    CodeMatvec       few rows, in torch.compile     integers, any group       sums of codes times inputs
    TritonInt4, -8   CUDA, 16 bits or float32       integers, groups of 32·n  Triton's kernels (`triton_forms`)
    AsStored         everywhere                     every kind                `StoredWeight.multiply`, the oracle

A decode step reads every weight once, so fewer bytes are less time, but only where a code becomes a number on the way
from memory to the product. `AsStored` writes the numbers down first: it reads fewer bytes, moves more, and is slower
than a plain product with one row; with many rows that writing hardly counts.

Which form a weight gets is a rule, and not measured on each machine as for plain matrices (`models.measured_linear`),
because one form is ahead of all that give the same numbers. With AVX2, one thread and the shapes of models of 10M to
110M, `CodeKernel` took 0.36 to 0.56 of the time of `ScaledRows` with one row, 0.41 to 0.6 with four and 0.8 to 1.1 with
16, and with one row a third of that of `AsStored` or less. `NibbleKernel`, whose scales are rounded, was faster once: 4
bits in bfloat16 at 384 x 384, in four fifths of the time.

The list is open. Whoever has a kernel for a kind of stored weight on a kind of device puts its maker there:

    @fast_form("grouped", "cuda")
    def triton_int4(stored, dtype):
        return TritonInt4(stored) if stored.group == 128 and stored.format.bits == 4 else None

The newest maker is asked first, and the first that does not answer None is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError
from workbench.models.linear import in_memory
from workbench.quantization import cpu_forms
from workbench.quantization.formats import IntegerFormat, QuantizedTensor, unpack
from workbench.quantization.stored import Grouped, StoredWeight


class Product(Protocol):
    """x [N, in] -> x·Ŵᵀ [N, out] in x's type. Holds the weight in the form it is read in; a call changes nothing."""

    form: str  # in a few words, for reports
    weight_bytes: int  # what one call reads

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


Maker = Callable[[StoredWeight, torch.dtype], Product | None]
FORMS: dict[tuple[str, str], list[Maker]] = {}  # (kind of stored weight, kind of device)
ONE_ROW_FORMS: dict[tuple[str, str], list[Maker]] = {}  # for steps of one row inside torch.compile
ROUNDED_FORMS: dict[tuple[str, str], list[Maker]] = {}  # inputs="q8": those that round their inputs to 8 bits


def fast_form(kind: str, device: str, *, one_row: bool = False, inputs: str = "exact") -> Callable[[Maker], Maker]:
    """Decorator: a maker for stored weights of this kind on this kind of device ("cpu", "cuda").

    maker(stored, dtype) gives a Product for activations of that type, or None where it has none. one_row: the Product
    is only called with one row and from inside a graph of torch.compile. inputs="q8": it rounds its inputs to 8 bits,
    and is only made for who asks for that.
    """
    forms = ROUNDED_FORMS if inputs == "q8" else ONE_ROW_FORMS if one_row else FORMS

    def put(maker: Maker) -> Maker:
        forms.setdefault((kind, device), []).insert(0, maker)
        return maker

    return put


def product_for(stored: StoredWeight, dtype: torch.dtype, inputs: str = "exact") -> Product:
    """The fastest form this weight has here; `AsStored` where it has none.

    inputs="q8": one that rounds its inputs to 8 bits. Raises WorkbenchError where there is none.
    """
    if inputs == "exact":
        return _first(FORMS, stored, dtype) or AsStored(stored)
    made = _first(ROUNDED_FORMS, stored, dtype)
    if made is None:
        raise WorkbenchError(
            f'a {stored.kind} weight has no form for inputs="{inputs}" here:'
            f' {cpu_forms.why_not_compiled(stored, dtype)}; leave inputs="exact"'
        )
    return made


def reason_for(product: Product, stored: StoredWeight, dtype: torch.dtype) -> str:
    """Why the weight has that form, of the forms for codes on a CPU; "" elsewhere."""
    if isinstance(product, cpu_forms.CodeKernel):
        return f"{product.form}: each code is read once ({product.instructions})"
    if stored.kind != "grouped" or next(stored.buffers()).device.type != "cpu":
        return ""
    why_not = cpu_forms.why_not_compiled(stored, dtype)
    return why_not and f"{product.form}: {why_not}"


def one_row_product_for(stored: StoredWeight, dtype: torch.dtype) -> Product | None:
    """A form for steps of one row inside torch.compile; None where this kind has none."""
    return _first(ONE_ROW_FORMS, stored, dtype)


def _first(forms: dict, stored: StoredWeight, dtype: torch.dtype) -> Product | None:
    device = next(stored.buffers()).device.type
    for maker in forms.get((stored.kind, device), ()):
        made = maker(stored, dtype)
        if made is not None:
            return made
    return None


class InferenceLinear:
    """A quantized linear as a `models.linear.Linear`: y = (x / divisor)·Ŵᵀ + bias, the product in its form."""

    def __init__(
        self,
        product: Product,
        shape: tuple[int, int],
        bias: torch.Tensor | None,
        divisor: torch.Tensor | None,
        dtype: torch.dtype,
        reason: str = "",
    ) -> None:
        self.out_features, self.in_features = shape
        self.product, self.form, self.reason = product, product.form, reason
        self.bias = None if bias is None else bias.to(dtype)
        self.divisor = None if divisor is None else divisor.to(dtype)
        self.weight_bytes = product.weight_bytes + sum(
            one.nbytes for one in (self.bias, self.divisor) if one is not None
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What loops of ours read of it where it lies; [] of other forms."""
        return list(getattr(self.product, "tensors", ()))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.product(x if self.divisor is None else x / self.divisor)
        return y if self.bias is None else y + self.bias


class AsStored:
    """Blocks of rows are dequantized and multiplied, as the stored weight itself does it."""

    form = "numbers again, block by block"

    def __init__(self, stored: StoredWeight) -> None:
        self.stored, self.weight_bytes = stored, stored.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.stored.multiply(x)


# -- integers in groups ------------------------------------------------------------------------------------------


def plain_codes(stored: Grouped) -> tuple[torch.Tensor, int]:
    """(codes [out, in/group, group] uint8, or int8 where they are stored so; what to add to them).

    x̂ = scale · (code + added) + zero.
    """
    format = stored.format
    if isinstance(format, IntegerFormat) and format.is_packed:
        return unpack(stored.codes, -1, format.bits), format.lowest
    return stored.codes, 0


def _has_integers(stored: StoredWeight) -> TypeGuard[Grouped]:
    return isinstance(getattr(stored, "format", None), IntegerFormat)


class ScaledRows:
    """Whole rows of codes of a byte: y = scale · (x·codesᵀ) + zero · Σx.

    A block of codes becomes numbers in the cache and is multiplied there; the scale waits for the sum, so each weight
    is converted and no more. Exact but for the order of additions.
    """

    form = "codes as numbers, block by block, scaled afterwards"
    BLOCK_BYTES = 1 << 20  # of numbers: what stays in a CPU's cache

    def __init__(self, stored: Grouped) -> None:
        codes, added = plain_codes(stored)
        self.codes = codes.reshape(stored.out_features, stored.in_features)
        self.scale = stored.scale.float().view(1, -1)  # [1, out]
        offset = added * self.scale
        self.offset = offset if stored.zero is None else offset + stored.zero.float().view(1, -1)
        self._has_offset = bool(self.offset.any())
        self.weight_bytes = self.codes.nbytes + self.scale.nbytes + self.offset.nbytes * self._has_offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rows = max(1, self.BLOCK_BYTES // (4 * self.codes.shape[1]))
        y = torch.cat([F.linear(wide, block.to(wide.dtype)) for block in self.codes.split(rows)], -1)
        y = y.mul_(self.scale)
        if self._has_offset:
            y = y.addcmul_(wide.sum(-1, keepdim=True), self.offset.to(wide.dtype))
        return y.to(x.dtype)


class NibbleKernel:
    """torch's CPU kernel for weights of 4 bits in groups, which turns codes into numbers in registers.

    The kernel computes with S·(nibble − 8) + Z as the weight, S and Z in bfloat16. Up to 4 bits are one product. A
    code of 5 to 8 bits is 16·high + low: two products, S = 16·scale and S = scale. What it computes with is
    `dequantize()`; the rounding of S and Z moves a number by at most 2⁻⁸ · (|S·(nibble − 8)| + |Z|), added over its
    products (`error_bound`): about what rounding the numbers themselves to bfloat16 does.
    Many rows go through `StoredWeight.multiply`: there the arithmetic counts, and this kernel is slow at it.
    """

    GROUPS = (256, 128, 64, 32)
    MAX_ROWS = 48  # of all products together, that the kernel is faster with (measured)

    def __init__(self, stored: Grouped) -> None:
        self.stored = stored
        self.group = self.group_for(stored)
        codes, added = self._centred()
        scale = stored.scale.float()
        zero = torch.zeros_like(scale) if stored.zero is None else stored.zero.float()
        if stored.format.bits <= 4:
            self.products = [self._packed(codes, scale, zero + (added + 8) * scale)]
        else:
            self.products = [
                self._packed(codes >> 4, 16 * scale, zero + (added + 128) * scale),
                self._packed(codes & 15, scale, 8 * scale),
            ]
        self.form = "kernel for 4 bits" + ", twice" * (len(self.products) == 2)
        self.weight_bytes = sum(codes.nbytes + scales.nbytes for codes, scales in self.products)

    @classmethod
    def group_for(cls, stored: Grouped) -> int | None:
        """The largest group size of the kernel that divides the weight's group size."""
        return next((size for size in cls.GROUPS if stored.group % size == 0), None)

    def _centred(self) -> tuple[torch.Tensor, int]:
        """(codes [out, in] int32 around 8 or 128, what to add to them): so S·(nibble − 8) is small where x̂ is."""
        codes, added = plain_codes(self.stored)
        bits, is_signed = self.stored.format.bits, codes.dtype == torch.int8
        shift = (8 if bits <= 4 else 128) - (0 if is_signed else 2 ** (bits - 1))
        return codes.reshape(self.stored.out_features, -1).to(torch.int32) + shift, added - shift

    def _packed(self, nibbles: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor):
        """As the kernel wants them: its own order of nibbles, and S, Z as [in/group, out, 2]."""
        assert self.group is not None, "made for groups that the kernel knows"
        both = torch.cat((scale, zero), dim=-1).repeat_interleave(self.stored.group // self.group, dim=1)
        both = both.transpose(0, 1).to(torch.bfloat16).contiguous()
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 1), both

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] * len(self.products) > self.MAX_ROWS:
            return self.stored.multiply(x)
        x = x.contiguous()
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        y, *others = (multiply(x, codes, self.group, scales) for codes, scales in self.products)
        return y if not others else y.add_(others[0])

    def dequantize(self) -> torch.Tensor:
        """[out, in] float32: the weights that the kernel computes with."""
        first, *others = (steps + zero for steps, zero in self._terms())
        return sum(others, first)

    def error_bound(self) -> torch.Tensor:
        """[out, in]: an upper bound of their distance from the stored weights."""
        first, *others = (2.0**-8 * (steps.abs() + zero.abs()) for steps, zero in self._terms())
        return sum(others, first)

    def _terms(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """S·(nibble − 8) and Z of each product, [out, in] each."""
        codes, _ = self._centred()
        nibbles = [codes] if len(self.products) == 1 else [codes >> 4, codes & 15]
        scales = [both.float().repeat_interleave(self.group, dim=0).permute(2, 1, 0) for _, both in self.products]
        return [(s * (one - 8), z) for one, (s, z) in zip(nibbles, scales)]


class CodeMatvec:
    """A few rows, as sums of codes times inputs. For torch.compile, which makes one loop of it.

    y = Σ over groups of scale · Σ (code + added)·x + zero · Σx, in float32: a code is read, made a number and
    multiplied in registers.

    Codes lie in words of 32 bits, 4 bytes or 8 nibbles each. A group is cut into as many parts, and a word has one code
    of each: that of part p in its bits from p·bits on. Masked there, the code is a whole number 2^(p·bits) times too
    large, and the part's sum is divided by that, which is exact. A vector register of words becomes numbers with two
    instructions a part. Single bytes the compiler does not load into vectors on AVX2, and a step took 3 to 4 times as
    long with them.

    LANES outputs lie side by side, so that the sums of a vector register belong to different outputs and are never
    added up among themselves; groups then cost nothing.
    Exact but for the order of additions. Run eagerly it would write all products.
    """

    LANES, WORD = 16, 32
    form = "sums of codes, compiled"

    def __init__(self, stored: Grouped, dtype: torch.dtype = torch.float32) -> None:
        """dtype: of the inputs. Beside bfloat16 the scales are held in float32: the compiler gives up vectors where
        the two 16-bit types meet."""
        codes, added = plain_codes(stored)
        self.out_features, _, self.group = codes.shape
        self.bits = 4 if stored.format.bits <= 4 else 8
        self.half, is_signed = 2 ** (self.bits - 1), codes.dtype == torch.int8
        self.added = added - self.half * is_signed
        self.words = self._in_lanes(self._as_words(codes.to(torch.int64) + self.half * is_signed))
        held = torch.float32 if dtype == torch.bfloat16 else stored.scale.dtype
        self.scale = self._in_lanes(stored.scale.to(held))[:, :, 0]  # [out/16, in/group, 16]
        self.zero = None if stored.zero is None else self._in_lanes(stored.zero.to(held))[:, :, 0]
        self.weight_bytes = sum(one.nbytes for one in (self.words, self.scale, self.zero) if one is not None)

    @property
    def parts(self) -> int:
        return self.WORD // self.bits

    def _as_words(self, codes: torch.Tensor) -> torch.Tensor:
        """[out, groups, group] of 0 … 2^bits − 1 -> [out, groups, words], their bits as float32.

        A word is signed, so in its last part a code c is kept as c − half. As float32, because the compiler loads
        vectors of int32 by way of memory.
        """
        codes = F.pad(codes, (0, -self.group % self.parts)).unflatten(2, (self.parts, -1))
        last = codes[:, :, -1:] - self.half
        places = 2 ** (self.bits * torch.arange(self.parts, device=codes.device))
        words = (torch.cat([codes[:, :, :-1], last], 2) * places[:, None]).sum(2)
        return words.to(torch.int32).view(torch.float32)

    def _in_lanes(self, tensor: torch.Tensor) -> torch.Tensor:
        """[out, groups, n] -> [out/16, groups, n, 16]; outputs that are missing are 0."""
        tensor = F.pad(tensor, (0, 0, 0, 0, 0, -len(tensor) % self.LANES))
        return tensor.unflatten(0, (-1, self.LANES)).permute(0, 2, 3, 1).contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        grouped = x.to(torch.float32).view(len(x), 1, -1, self.group)
        wide = in_memory(F.pad(grouped, (0, -self.group % self.parts)))[
            ..., None
        ]  # [N, 1, in/group, group, 1], filled up to whole words
        return torch.stack([self._sums(row) for row in wide.unbind(0)]).to(x.dtype)

    def _sums(self, wide: torch.Tensor) -> torch.Tensor:
        """[1, in/group, group, 1] -> [out], of one row."""
        total, parts = wide.sum(2), wide.chunk(self.parts, dim=2)
        sums = self.added * total + self.half * parts[-1].sum(2)  # the same for all outputs
        for part, some in enumerate(parts):
            first = part * self.bits
            codes = self.words.view(torch.int32) & _signed((2**self.bits - 1) << first)
            sums = sums + (codes * some).sum(2) * 2.0**-first  # [out/16, in/group, 16]
        sums = sums * self.scale
        if self.zero is not None:
            sums = sums + self.zero * total
        return sums.sum(1).flatten()[: self.out_features]


def _signed(word: int) -> int:
    """The same 32 bits as a signed number."""
    return word - 2**32 if word >= 2**31 else word


@fast_form("grouped", "cpu")
def _grouped_on_a_cpu(stored: StoredWeight, dtype: torch.dtype) -> Product | None:
    if not _has_integers(stored):
        return None
    if not cpu_forms.why_not_compiled(stored, dtype):
        return cpu_forms.CodeKernel(stored, _many_rows(stored))
    fits = stored.out_features % 16 == 0 and NibbleKernel.group_for(stored) is not None
    if dtype == torch.bfloat16 and fits and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return NibbleKernel(stored)
    if stored.group == stored.in_features and stored.format.bits > 4:
        return ScaledRows(stored)
    return None


@fast_form("grouped", "cpu", inputs="q8")
def _grouped_with_rounded_inputs(stored: StoredWeight, dtype: torch.dtype) -> Product | None:
    if not _has_integers(stored) or cpu_forms.why_not_compiled(stored, dtype):
        return None
    return cpu_forms.CodeKernel(stored, _many_rows(stored), "q8")


def _many_rows(stored: Grouped) -> Product:
    """What `CodeKernel` leaves many rows to: a form that keeps no copy of the codes."""
    rows = stored.group == stored.in_features and stored.format.bits == 8
    return ScaledRows(stored) if rows else AsStored(stored)


@fast_form("grouped", "cuda")
def _grouped_on_a_gpu(stored: Any, dtype: torch.dtype) -> Product | None:
    from workbench.quantization import triton_forms  # Triton is loaded by who has a GPU

    return triton_forms.maker(stored, dtype)


@fast_form("grouped", "cpu", one_row=True)
def _grouped_in_a_graph(stored: StoredWeight, dtype: torch.dtype) -> Product | None:
    return CodeMatvec(stored, dtype) if _has_integers(stored) and dtype != torch.float64 else None


# -- several as one ----------------------------------------------------------------------------------------------


def stacked(weights: list[StoredWeight]) -> StoredWeight | None:
    """One weight with the rows of all; None where their layouts differ."""
    first: Any = weights[0]
    if first.kind != "grouped" or any(_layout(one) != _layout(first) for one in weights):
        return None
    parts = {name: torch.cat([getattr(one, name) for one in weights]) for name in first.tensors()}
    shape = (len(parts["codes"]), first.in_features)
    return type(first)(
        QuantizedTensor(first.format, parts["codes"], parts["scale"], parts.get("zero"), shape, torch.float32, -1)
    )


def _layout(stored: StoredWeight) -> tuple:
    """What must be equal for rows to lie one below the other."""
    if stored.kind != "grouped":
        return (stored.kind,)
    tensors = [(name, t.dtype, t.device, t.shape[1:]) for name, t in stored.tensors().items()]
    return (stored.kind, stored.format, *tensors)
