"""A weight matrix in few bits: the one face that every method's result has.

    stored.dequantize()     [out, in] float32: the numbers it is taken for. The oracle of everything else
    stored.multiply(x)      x [N, in] -> x·Wᵀ [N, out]; as written here, blocks of rows are turned back into numbers
                            and multiplied, so that the whole matrix never stands in memory
    stored.nbytes           codes, scales, codebooks: all that is kept, and all that goes to disk

A class of this kind holds its tensors as buffers. They follow a model from device to device and never change their
type: half of a scale's bits is another scale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from workbench.errors import WorkbenchError, check_settings, is_whole, unknown
from workbench.quantization.formats import FloatFormat, Format, QuantizedTensor, decode, format_named, quantize_tensor

ROW_BLOCK_BYTES = 1 << 20  # of float32 that `multiply` makes at a time: what stays in a CPU's cache


class StoredWeight(nn.Module, ABC):
    """See the module. A class fills in `dequantize_rows`, `settings` and `from_parts`."""

    kind: ClassVar[str]  # its name in a file

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features

    @abstractmethod
    def dequantize_rows(self, start: int, end: int) -> torch.Tensor:
        """Rows start … end − 1, float32 [end − start, in]."""

    @abstractmethod
    def settings(self) -> dict[str, int | str | bool | None]:
        """What `from_parts` needs beside the tensors; plain data."""

    @classmethod
    @abstractmethod
    def from_parts(cls, tensors: dict[str, torch.Tensor], settings: dict) -> StoredWeight:
        """The inverse of `tensors` and `settings`; from a file, so both are checked. Raises WorkbenchError."""

    def dequantize(self) -> torch.Tensor:
        return self.dequantize_rows(0, self.out_features)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, in] -> [N, out] in x's type."""
        rows = max(1, ROW_BLOCK_BYTES // (4 * self.in_features))
        parts = [
            F.linear(x, self.dequantize_rows(at, min(at + rows, self.out_features)).to(x.dtype))
            for at in range(0, self.out_features, rows)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.named_buffers())

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.buffers())

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / (self.out_features * self.in_features)

    def _apply(self, fn: Callable, recurse: bool = True) -> StoredWeight:
        """Follows to another device; keeps its types whatever the model is converted to."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                device = fn(torch.empty(0, device=buffer.device)).device
                self._buffers[name] = buffer.to(device)
        return self


class Grouped(StoredWeight):
    """Integer or fp8 codes with a scale (and zero) for each group of inputs of each output: what RTN, AWQ and GPTQ
    make.

    codes [out, in/group, group·bits/8] uint8 (int8 for 8 symmetric bits, or float8), scale and zero
    [out, in/group, 1]. x̂ = scale · code + zero, see `formats`.
    """

    kind = "grouped"

    format: Format
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None

    def __init__(self, weight: QuantizedTensor) -> None:
        out_features, in_features = weight.shape
        super().__init__(out_features, in_features)
        self.format = weight.format
        self.group = in_features // weight.scale.shape[1] if weight.scale.dim() == 3 else in_features
        shape = (out_features, in_features // self.group)
        self.register_buffer("codes", weight.codes.reshape(*shape, -1))
        self.register_buffer("scale", weight.scale.reshape(*shape, 1))
        self.register_buffer("zero", None if weight.zero is None else weight.zero.reshape(*shape, 1))

    @classmethod
    def rounded(cls, weight: torch.Tensor, format: str | Format, group: int | None) -> Grouped:
        """Each group of `group` inputs (None: the whole row) rounded to the nearest. Raises WorkbenchError for a group
        that does not divide, and for weights that are not finite."""
        check_finite(weight)
        return cls(quantize_tensor(weight.detach().float(), format, over=1, group=group))

    def dequantize_rows(self, start: int, end: int) -> torch.Tensor:
        zero = None if self.zero is None else self.zero[start:end]
        wide = decode(self.codes[start:end], self.scale[start:end], zero, self.format)
        return wide.reshape(end - start, self.in_features)

    def settings(self) -> dict[str, int | str | bool | None]:
        return {"format": self.format.name, "group": self.group}

    @classmethod
    def from_parts(cls, tensors: dict[str, torch.Tensor], settings: dict) -> Grouped:
        check_settings("a grouped weight", settings, ("format", "group"))
        format, group = format_named(settings.get("format", "")), settings.get("group")
        named = ("codes", "scale", *(["zero"] if format.has_zero else []))
        codes, scale, *zero = take(tensors, cls.kind, named)
        if not is_whole(group) or group < 1 or group % format.multiple:
            raise WorkbenchError(f"a grouped weight's group must fill whole bytes of {format.name}, got {group!r}")
        expect(codes, "codes", (None, None, format.code_bytes(group)), (format.code_dtype,))
        shape = (codes.shape[0], codes.shape[1], 1)
        for name, tensor in (("scale", scale), *(("zero", z) for z in zero)):
            expect(tensor, name, shape, (torch.float16, torch.bfloat16, torch.float32))
            check_finite(tensor, f"{name} of a grouped weight")
        if isinstance(format, FloatFormat):
            check_finite(codes.float(), "codes of a grouped weight")
        of = QuantizedTensor(
            format, codes, scale, zero[0] if zero else None, (shape[0], shape[1] * group), torch.float32, -1
        )
        return cls(of)


KINDS: dict[str, type[StoredWeight]] = {Grouped.kind: Grouped}


def register(kind: type[StoredWeight]) -> type[StoredWeight]:
    """For the methods' own classes: a file may name them."""
    KINDS[kind.kind] = kind
    return kind


def stored_kind(name: str) -> type[StoredWeight]:
    if name not in KINDS:
        raise unknown("kind of stored weight", name, KINDS)
    return KINDS[name]


# -- checking what comes from outside ----------------------------------------------------------------------------


def check_finite(tensor: torch.Tensor, what: str = "the weight") -> None:
    """Raise WorkbenchError naming the first place that holds no number."""
    bad = ~torch.isfinite(tensor)
    if bad.any():
        at = tuple(int(i) for i in bad.nonzero()[0])
        raise WorkbenchError(f"{what} is {tensor[at].item()} at {list(at)}, and only finite numbers are quantized")


def take(tensors: dict[str, torch.Tensor], kind: str, names: tuple[str, ...]) -> list[torch.Tensor]:
    """Exactly the tensors of these names. Raises WorkbenchError for one that is missing, or one too many."""
    missing, more = [n for n in names if n not in tensors], [n for n in tensors if n not in names]
    if missing:
        raise WorkbenchError(
            f"a {kind} weight needs its {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} missing"
        )
    if more:
        raise WorkbenchError(f"a {kind} weight has no {', '.join(more)}; it has {', '.join(names)}")
    return [tensors[name] for name in names]


def expect(tensor: torch.Tensor, name: str, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise WorkbenchError unless the tensor has this shape (None: any size above 0) and one of these types."""
    fits = tensor.dim() == len(shape) and all(
        size > 0 and (wanted is None or size == wanted) for size, wanted in zip(tensor.shape, shape)
    )
    if not fits or tensor.dtype not in dtypes:
        wanted = ", ".join("·" if size is None else str(size) for size in shape)
        types = " or ".join(str(t).removeprefix("torch.") for t in dtypes)
        raise WorkbenchError(
            f"{name} must be [{wanted}] in {types}, got {list(tensor.shape)} in"
            f" {str(tensor.dtype).removeprefix('torch.')}"
        )
