"""Masks: single weights become 0. The matrices stay as large, so nothing is faster unless a kernel skips the zeros.

    magnitude    |W_ij|
    wanda        |W_ij| · ‖X_j‖₂, compared within each output row        (Sun et al., arXiv 2306.11695)
    sparsegpt    W_ij² / [H⁻¹]_jj, and the columns to come make up for what goes: GPTQ with 0 in the place of rounding
                                                                        (Frantar and Alistarh, arXiv 2301.00774)

A pattern says which weights are compared: a share of each row, or n of every m in a row ("2:4"), which sparse tensor
cores can skip. Of the inputs X only H = XᵀX is needed, as for quantization (`quantization.calibration`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from workbench.errors import WorkbenchError, check_between, unknown
from workbench.models.decoder import Decoder
from workbench.pruning.importance import calibration_for, check_plain
from workbench.quantization.calibration import Calibration, Inputs, Reading
from workbench.quantization.gptq import inverse_factor
from workbench.quantization.pipeline import copy_of
from workbench.quantization.stored import check_finite

METHODS = ("magnitude", "wanda", "sparsegpt")
BLOCK = 128  # columns of one choice of SparseGPT, and of one update
DAMPING = 0.01  # share of the mean diagonal that is added to H


@dataclass(frozen=True)
class Pattern:
    """Zeros: a share of each row, rounded down, or `zeros` of every `of` neighbours in a row."""

    share: float = 0.5
    zeros: int | None = None
    of: int | None = None

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """ "2:4", or a share such as "0.5". Raises WorkbenchError for anything else."""
        zeros, colon, of = text.partition(":")
        try:
            return cls(int(zeros) / int(of), int(zeros), int(of)) if colon else cls(float(text))
        except (ValueError, ZeroDivisionError) as error:
            raise WorkbenchError(
                f'a pattern is a share from 0 to 1 or "2:4", two zeros in four; got {text!r}'
            ) from error

    def __post_init__(self) -> None:
        if self.zeros is None or self.of is None:
            check_between("share", self.share, 0, 1)
        elif not 0 <= self.zeros <= self.of or self.of < 1:
            raise WorkbenchError(f"a pattern has from 0 to m zeros in every m weights, got {self.zeros}:{self.of}")

    def zeroed(self, scores: torch.Tensor) -> torch.Tensor:
        """[out, in] bool: the lowest scores of each row or group are True; of equal ones the higher column goes."""
        out, wide = scores.shape
        if self.zeros is None or self.of is None:
            return _lowest(
                scores, int(round(self.share * wide, 6))
            )  # 0.29 of 100 is 29, and 28.999999999999996 in floats
        if wide % self.of:
            raise WorkbenchError(
                f"{self.zeros}:{self.of} needs rows that {self.of} divides, this weight has {wide} inputs"
            )
        return _lowest(scores.view(-1, self.of), self.zeros).view(out, wide)


def _lowest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` lowest of each row."""
    order = scores.flip(-1).argsort(dim=-1, stable=True)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[:, :count], True)
    return chosen.flip(-1)


def masked(weight: torch.Tensor, inputs: Inputs | None, pattern: Pattern, method: str = "wanda") -> torch.Tensor:
    """A copy of the weight [out, in] with zeros; by SparseGPT the weights that stay have moved.

    inputs: what reaches the layer; magnitude needs none. Raises WorkbenchError for an unknown method, weights or inputs
    that are not finite, and rows that the pattern does not divide.
    """
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    check_finite(weight)
    if method == "magnitude":
        return weight.detach().masked_fill(pattern.zeroed(weight.detach().abs().double()), 0)
    if inputs is None:
        raise WorkbenchError(f"{method} looks at the inputs of a layer; give Inputs, or take magnitude")
    if not bool(inputs.second_moments.isfinite().all()):
        raise WorkbenchError(
            f"the inputs of this layer are not finite, and {method} weighs by them; calibrate with other text, or take"
            " magnitude"
        )
    if method == "wanda":
        norms = inputs.second_moments.diagonal().double().clamp(min=0).sqrt()  # ‖X_j‖₂
        return weight.detach().masked_fill(pattern.zeroed(weight.detach().abs().double() * norms), 0)
    return sparsegpt(weight, inputs.second_moments, pattern)


def sparsegpt(
    weight: torch.Tensor,
    second_moments: torch.Tensor,
    pattern: Pattern,
    *,
    block: int = BLOCK,
    damping: float = DAMPING,
) -> torch.Tensor:
    """weight [out, in], H [in, in] -> weights of which the pattern's are 0.

    Which of a block go is decided when its turn comes (of n:m, group by group), since columns before it have moved
    it. A share is kept in every block; a group of n:m lies within one.
    """
    w = weight.detach().double().clone()
    h = second_moments.double().clone()
    unreached = h.diagonal() == 0
    h.diagonal()[unreached] = 1
    w[:, unreached] = 0
    upper = inverse_factor(h, damping)
    wide, group = w.shape[1], pattern.of
    if group is not None and wide % group:
        pattern.zeroed(w)  # raises, with the numbers
    if group is not None:
        block = max(group, block // group * group)
    for start in range(0, wide, block):
        end = min(start + block, wide)
        errors = torch.zeros(len(w), end - start, dtype=torch.float64)
        goes = torch.zeros(len(w), end - start, dtype=torch.bool)
        step = end - start if group is None else group
        for j in range(start, end):
            if (j - start) % step == 0:
                stretch = slice(j, j + step)
                scores = (w[:, stretch] / upper.diagonal()[stretch]).square()
                goes[:, j - start : j - start + step] = pattern.zeroed(scores)
            kept = w[:, j].masked_fill(goes[:, j - start], 0)
            errors[:, j - start] = (w[:, j] - kept) / upper[j, j]
            w[:, j:end] -= errors[:, j - start, None] * upper[j, j:end]
            w[:, j] = kept
        w[:, end:] -= errors @ upper[start:end, end:]
    return w.to(weight.dtype)


@torch.no_grad()
def masked_model(
    model: Decoder,
    pattern: Pattern,
    method: str = "wanda",
    *,
    calibration: Calibration | None = None,
    check_stop: Callable[[], None] | None = None,
) -> tuple[Decoder, dict[str, float]]:
    """(a new model whose linear layers are masked, what each lost); head, embedding and norms are shared with the old
    one, which stays as it was.

    A layer is looked at with the inputs that it has behind the layers masked before it. Of each linear layer, by its
    name, the share of its outputs' energy that is lost. Raises WorkbenchError as `masked` does.
    """
    check_plain(model)
    new = copy_of(model)
    reading = Reading(new, calibration_for(model, calibration, least=1))
    lost: dict[str, float] = {}
    for index, layer in enumerate(new.layers):
        if check_stop is not None:
            check_stop()
        linears = {name: part for name, part in layer.named_modules() if isinstance(part, torch.nn.Linear)}
        inputs = reading.inputs(linears)
        for name, linear in linears.items():
            weight = masked(linear.weight, inputs[name], pattern, method)
            lost[f"layers.{index}.{name}"] = inputs[name].output_error(linear.weight, weight)
            linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        reading.step()
    return new, lost
