"""Quantized weights as the Triton kernels multiply them: `workbench.quantization.inference` asks here for CUDA devices.

    form          codes                    lies as
    TritonInt4    integers of 2 to 4 bits  words of 8 codes, interleaved once (`workbench.kernels.matvec_int4`)
    TritonInt8    integers of 5 to 8 bits  words of 4 codes, interleaved once (`workbench.kernels.matvec_int8`)

Up to 32 rows are one kernel that reads each code once. More rows go through `StoredWeight.multiply`: there arithmetic
counts, and the numbers are written down once for all of them; the stored codes are kept for that.

Nothing of this module loads Triton until a form is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from workbench.errors import WorkbenchError
from workbench.quantization.formats import Format, IntegerFormat, unpack
from workbench.quantization.stored import Grouped

TYPES = (torch.float16, torch.bfloat16, torch.float32)  # of activations
MAX_ROWS = 32


def lowest_of(format: Format) -> int:
    """What a stored code of 0 stands for."""
    return format.lowest if isinstance(format, IntegerFormat) else 0


class _TritonForm(ABC):
    """Scales and zeros lie group after group, as a tile of outputs reads them; both of a group in one word, where there
    are both."""

    _multiply: Callable[..., torch.Tensor]

    def __init__(self, stored: Grouped) -> None:
        self.stored, self.group = stored, stored.group
        scale, zero = stored.scale[..., 0], None if stored.zero is None else stored.zero[..., 0]
        self.scale, self.zero = _group_after_group(scale, zero)  # [out, in/group]
        self.words, self.added = self._arranged()
        self._arrivals = _counters(self.words.device)
        self.weight_bytes = sum(one.nbytes for one in (self.words, self.scale, self.zero) if one is not None)

    @abstractmethod
    def _arranged(self) -> tuple[torch.Tensor, int]:
        """The codes as the kernel reads them, and what it adds to each."""

    def _codes(self) -> torch.Tensor:
        """[out, in] as stored, a byte each."""
        format = self.stored.format
        codes = unpack(self.stored.codes, -1, format.bits) if format.is_packed else self.stored.codes
        return codes.reshape(self.stored.out_features, self.stored.in_features)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > MAX_ROWS:
            return self.stored.multiply(x)
        besides = {"group": self.group, "added": self.added, "arrivals": self._arrivals}
        return self._multiply(x, self.words, self.scale, self.zero, **besides)


def _group_after_group(scale: torch.Tensor, zero: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    from workbench.kernels.matvec_codes import packed

    if zero is not None and scale.dtype == zero.dtype == torch.float16:
        return packed(scale, zero), None
    return scale.T.contiguous().T, None if zero is None else zero.T.contiguous().T


def _counters(device: torch.device) -> torch.Tensor:
    """For one product at a time: the last of the programs that divide `in` adds their parts up."""
    from workbench.kernels.arrivals import counters

    return counters(device)


class TritonInt4(_TritonForm):
    form = "Triton kernel for 4 bits"

    def _arranged(self) -> tuple[torch.Tensor, int]:
        from workbench.kernels.matvec_int4 import interleaved, matvec_int4

        self._multiply = matvec_int4
        return interleaved(self._codes()), lowest_of(self.stored.format)


class TritonInt8(_TritonForm):
    form = "Triton kernel for 8 bits"

    def _arranged(self) -> tuple[torch.Tensor, int]:
        """Bytes of 0 to 255 are stored less 128, which is added again."""
        from workbench.kernels.matvec_int8 import interleaved, matvec_int8

        self._multiply, codes, format = matvec_int8, self._codes(), self.stored.format
        if codes.dtype == torch.int8:
            return interleaved(codes), 0
        return interleaved((codes.to(torch.int16) - 128).to(torch.int8)), 128 + (
            lowest_of(format) if format.is_packed else 0
        )


def why_not_triton(stored: Grouped, dtype: torch.dtype) -> str:
    """Why this weight has no kernel for activations of this type where it lies; "" where it has."""
    if stored.kind != "grouped" or not isinstance(stored.format, IntegerFormat):
        return "the kernels are for integer codes in groups"
    if stored.group != stored.in_features and stored.group % 32:
        return f"the kernels take groups of a multiple of 32 inputs, or whole rows; these have {stored.group}"
    if dtype not in TYPES:
        return f"the kernels take activations in float16, bfloat16 or float32, not {str(dtype).removeprefix('torch.')}"
    try:
        from workbench.kernels import launch
    except ImportError as error:
        return f"Triton is not installed here ({error})"
    return launch.why_not(stored.codes.device)


def triton_form(stored: Grouped, dtype: torch.dtype) -> TritonInt4 | TritonInt8:
    """The weight for the kernel of its bits, wherever kernels run: on a CPU that is Triton's interpreter, for tests.

    Raises WorkbenchError for a weight that has no kernel, with the reason.
    """
    reason = why_not_triton(stored, dtype)
    if reason:
        raise WorkbenchError(f"this weight cannot go through a Triton kernel: {reason}")
    return TritonInt4(stored) if stored.format.bits <= 4 else TritonInt8(stored)


def maker(stored: Grouped, dtype: torch.dtype) -> TritonInt4 | TritonInt8 | None:
    """For the list of forms: None where there is no kernel."""
    return None if why_not_triton(stored, dtype) else triton_form(stored, dtype)
