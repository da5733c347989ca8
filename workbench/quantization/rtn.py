"""RTN, round to nearest: every weight for itself, with a scale a group. The baseline of all methods."""

from __future__ import annotations

import torch

from workbench.errors import WorkbenchError, check_flag
from workbench.quantization.calibration import Inputs
from workbench.quantization.formats import IntegerFormat
from workbench.quantization.methods import Method, method
from workbench.quantization.stored import Grouped


@method(
    "rtn",
    "each weight is rounded to the nearest code of its group",
    numbers=("bits", "group"),
    options=("symmetric", "whole_rows"),
)
class RTN(Method):
    """bits 2 to 8; group inputs share a scale (default 128), or with whole_rows all inputs of an output do."""

    def __init__(
        self, bits: int = 4, group: int | None = None, symmetric: bool = False, whole_rows: bool = False
    ) -> None:
        self.format = IntegerFormat(bits, symmetric)
        if check_flag("whole_rows", whole_rows) and group is not None:
            raise WorkbenchError(f"whole_rows=True has no group, got group={group}; leave one out")
        self.group = None if whole_rows else 128 if group is None else group

    def store(self, weight: torch.Tensor, inputs: Inputs | None) -> Grouped:
        return Grouped.rounded(weight, self.format, self.group)
