"""GPTQ (Frantar et al., arXiv 2210.17323): column by column, each rounding error spread over the columns to come.

Rounding column j of a row w to q leaves an error of (w_j − q)² / [H⁻¹]_jj in the outputs if the later columns move by

    δ = −(w_j − q) / [H⁻¹]_jj · [H⁻¹]_j,j+1…          (optimal brain surgeon, with j done and gone)

The inverses without the columns that are done are all in one factor: U upper triangular with UᵀU = H⁻¹, whose row j is
what is needed at column j. Columns go in blocks: inside a block at once, for those behind it one product a block.

    damping     H + λ·mean(diag H)·I, so that it can be inverted; columns no input ever reached are set to 0
    order       columns with the largest diagonal first ("act order"): they matter most and find the most columns left
    groups      scales are those of the weights before anything moved where columns change order ("static groups"), so
                that a group stays a stretch of columns; in order they are taken when a group's turn comes
"""

from __future__ import annotations

import torch

from workbench.errors import WorkbenchError, check_above, check_whole
from workbench.quantization.calibration import Inputs
from workbench.quantization.formats import IntegerFormat, QuantizedTensor, fit, pack
from workbench.quantization.methods import Method, method
from workbench.quantization.stored import Grouped, check_finite


@method(
    "gptq",
    "rounding errors are spread over the columns to come, by the inverse of the inputs' second moments",
    numbers=("bits", "group"),
    options=("symmetric", "order", "damping", "block"),
)
class GPTQ(Method):
    """order: "largest" (act order) or "given". damping: share of the mean diagonal. block: columns at a time."""

    needs_inputs = True

    def __init__(
        self,
        bits: int = 4,
        group: int = 128,
        symmetric: bool = False,
        order: str = "largest",
        damping: float = 0.01,
        block: int = 128,
    ) -> None:
        self.format, self.group = IntegerFormat(bits, symmetric), group
        if order not in ("largest", "given"):
            raise WorkbenchError(f'order must be "largest" or "given", got {order!r}')
        self.order = order
        self.damping, self.block = check_above("damping", damping, 0), check_whole("block", block, 1)

    def store(self, weight: torch.Tensor, inputs: Inputs | None) -> Grouped:
        assert inputs is not None
        check_finite(weight)
        return Grouped(
            gptq(
                weight,
                inputs.second_moments,
                self.format,
                self.group,
                largest_first=self.order == "largest",
                damping=self.damping,
                block=self.block,
            )
        )


def gptq(
    weight: torch.Tensor,
    second_moments: torch.Tensor,
    format: IntegerFormat,
    group: int,
    *,
    largest_first: bool = True,
    damping: float = 0.01,
    block: int = 128,
) -> QuantizedTensor:
    """weight [out, in], H [in, in] -> its codes, with scales of groups of `group` inputs."""
    out, wide = weight.shape
    if wide % group:
        raise WorkbenchError(f"group must divide the {wide} inputs of this weight, got {group}")
    w = weight.detach().double().clone()
    h = second_moments.double().clone()
    unreached = h.diagonal() == 0
    h.diagonal()[unreached] = 1
    w[:, unreached] = 0
    scale, zero = fit(w.float().view(out, -1, group), format, -1)  # [out, groups, 1], before anything moves
    order = h.diagonal().argsort(descending=True, stable=True) if largest_first else torch.arange(wide)
    upper = inverse_factor(h[order][:, order], damping)
    codes = torch.empty(out, wide, dtype=torch.float64)
    w = w[:, order]
    for start in range(0, wide, block):
        end = min(start + block, wide)
        errors = torch.zeros(out, end - start, dtype=torch.float64)
        for j in range(start, end):
            column = int(order[j])
            at = column // group
            if not largest_first and column % group == 0:
                fresh = _ahead(w, errors, upper, start, j, end, group)
                scale[:, at : at + 1], new_zero = fit(fresh.float()[:, None], format, -1)
                if zero is not None and new_zero is not None:
                    zero[:, at : at + 1] = new_zero
            step = scale[:, at, 0].double()
            offset = 0.0 if zero is None else zero[:, at, 0].double()
            code = ((w[:, j] - offset) / step.where(step != 0, 1)).round().clamp(format.lowest, format.highest)
            codes[:, column] = code
            errors[:, j - start] = (w[:, j] - (code * step + offset)) / upper[j, j]
            w[:, j + 1 : end] -= errors[:, j - start, None] * upper[j, j + 1 : end]
        w[:, end:] -= errors @ upper[start:end, end:]
    whole = (codes - format.lowest).to(torch.uint8) if format.is_packed else codes.to(format.code_dtype)
    whole = whole.view(out, -1, group)
    packed = pack(whole, -1, format.bits) if format.is_packed else whole
    return QuantizedTensor(format, packed, scale, zero, (out, wide), weight.dtype, -1)


def _ahead(w, errors, upper, start: int, j: int, end: int, group: int) -> torch.Tensor:
    """Columns j … j + group − 1 as they would be now: those behind the block have not had this block's errors yet."""
    fresh = w[:, j : j + group].clone()
    beyond = max(0, j + group - end)
    if beyond and j > start:
        fresh[:, group - beyond :] -= errors[:, : j - start] @ upper[start:j, end : end + beyond]
    return fresh


def inverse_factor(second_moments: torch.Tensor, damping: float) -> torch.Tensor:
    """U upper triangular with UᵀU = (H + damping·mean(diag H)·I)⁻¹, float64."""
    h = second_moments.double().clone()
    h.diagonal().add_(damping * h.diagonal().mean())
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
