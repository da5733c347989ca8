"""LLM.int8() (Dettmers et al., arXiv 2208.07339 §3.2): the few columns with outlying inputs stay in 16 bits.

    y = Σ over outlier columns x_j·w_j   +   (scale_x ⊗ scale_w)·(q_x·q_wᵀ) over all others

An outlier column is one in which some input is above the threshold, 6.0 in the paper. Without them the scale of a token
is that of its ordinary channels. Which columns these are can be decided at two times, and each has its price:

    "calibrated"   on calibration text, once. Their weights are kept in fp16 and are no longer among the codes: exact to
                   2⁻¹¹, and they widen no scale. A column that passes for one token of the text takes 16 bits for good;
                   one that passes only later is rounded like the others. This is not the paper's rule.
    "live"         from the inputs at hand: the paper's rule. Nothing need be known beforehand. The paper multiplies
                   with fp16 weights, so it has all of them beside the codes. Here, as in bitsandbytes where a model is
                   stored in int8, the weights of such a column are its codes turned back into numbers: 8 bits per
                   weight, and as coarse as any other. A token's result depends on which others are in the same step.

Inputs of outlier columns are multiplied in float32 here; the paper has them in fp16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError, check_above, check_settings, unknown
from workbench.quantization.calibration import Inputs
from workbench.quantization.int8_product import Int8Product, int8_product, rounded_weight, taken_codes
from workbench.quantization.methods import Method, method
from workbench.quantization.stored import StoredWeight, check_finite, expect, register, take

THRESHOLD = 6.0  # the paper's, §3.2
COLUMNS = ("calibrated", "live")


@register
class LiveOutliers(Int8Product):
    """An int8 product from which columns are taken out when their inputs come. codes and scale as there."""

    kind = "int8_live_outliers"

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, threshold: float) -> None:
        super().__init__(codes, scale)
        self.threshold = check_above("threshold", threshold, 0)

    def outlier_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Those in which some input of x [N, in] is above the threshold: their numbers, ascending."""
        return (x.abs() > self.threshold).any(0).nonzero()[:, 0]

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        at = self.outlier_columns(wide)
        ordinary = int8_product(wide.index_fill(1, at, 0.0), self.codes, self.scale)
        weights = self.codes[:, at].float() * self.scale.float()
        return (ordinary + F.linear(wide[:, at], weights)).to(x.dtype)

    def settings(self) -> dict[str, Any]:
        return {"threshold": self.threshold}

    @classmethod
    def from_parts(cls, tensors: dict[str, torch.Tensor], settings: dict) -> LiveOutliers:
        check_settings(f"an {cls.kind} weight", settings, ("threshold",))
        return cls(
            *taken_codes(take(tensors, cls.kind, ("codes", "scale"))),
            check_above("threshold", settings.get("threshold"), 0),
        )


@register
class KeptOutliers(StoredWeight):
    """An int8 product of some columns, and a product with fp16 weights of the others.

    codes [out, in − n] int8 with scale [out, 1] float16; outliers [out, n] float16, n from 0 to in;
    order [in] int32: the columns among the codes, ascending, then those among the outliers.
    """

    kind = "int8_kept_outliers"

    codes: torch.Tensor
    scale: torch.Tensor
    outliers: torch.Tensor
    order: torch.Tensor

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, outliers: torch.Tensor, order: torch.Tensor) -> None:
        super().__init__(codes.shape[0], len(order))
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("outliers", outliers)
        self.register_buffer("order", order)

    @classmethod
    def rounded(cls, weight: torch.Tensor, is_outlier: torch.Tensor) -> KeptOutliers:
        """weight [out, in], is_outlier [in] bool. Raises WorkbenchError for weights that are not finite, in fp16
        too."""
        check_finite(weight)
        order = is_outlier.to(torch.int32).argsort(stable=True)
        ordinary, outlying = (
            weight.detach().float()[:, order].split([int((~is_outlier).sum()), int(is_outlier.sum())], 1)
        )
        outliers = outlying.to(torch.float16)
        check_finite(outliers, "the weight of an outlier column in float16")
        if ordinary.shape[1]:
            codes, scale = rounded_weight(ordinary)
        else:
            codes = torch.empty(len(weight), 0, dtype=torch.int8, device=weight.device)
            scale = torch.ones(len(weight), 1, dtype=torch.float16, device=weight.device)
        return cls(codes, scale, outliers, order.to(torch.int32))

    @property
    def num_outliers(self) -> int:
        return self.outliers.shape[1]

    def dequantize_rows(self, start: int, end: int) -> torch.Tensor:
        ordinary = self.codes[start:end].float() * self.scale[start:end].float()
        together = torch.cat((ordinary, self.outliers[start:end].float()), 1)
        return torch.empty_like(together).index_copy_(1, self.order.long(), together)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        ordinary, outlying = x.float().index_select(1, self.order).split([self.codes.shape[1], self.num_outliers], 1)
        y = F.linear(outlying, self.outliers.float())
        if ordinary.shape[1]:
            y = y + int8_product(ordinary, self.codes, self.scale)
        return y.to(x.dtype)

    def settings(self) -> dict[str, int | str | bool | None]:
        return {}

    @classmethod
    def from_parts(cls, tensors: dict[str, torch.Tensor], settings: dict) -> KeptOutliers:
        check_settings(f"an {cls.kind} weight", settings, ())
        codes, scale, outliers, order = take(tensors, cls.kind, ("codes", "scale", "outliers", "order"))
        expect(order, "order", (None,), (torch.int32,))
        for name, part, dtype in (("codes", codes, torch.int8), ("outliers", outliers, torch.float16)):
            if part.dim() != 2 or part.shape[1] or part.dtype != dtype:  # one of them may be empty
                expect(part, name, (None, None), (dtype,))
        if not len(codes) or len(outliers) != len(codes) or codes.shape[1] + outliers.shape[1] != len(order):
            raise WorkbenchError(
                f"codes {list(codes.shape)} and outliers {list(outliers.shape)} must have the same outputs, and "
                f"{len(order)} columns together, as order has"
            )
        if not torch.equal(order.long().sort().values, torch.arange(len(order), device=order.device)):
            raise WorkbenchError(f"order must hold every column from 0 to {len(order) - 1} once")
        expect(scale, "scale", (len(codes), 1), (torch.float16,))
        check_finite(scale, "scale of an int8 weight")
        check_finite(outliers, "outliers of an int8 weight")
        return cls(codes, scale, outliers, order)


@method(
    "llm_int8",
    "weights and inputs in 8 bits, but for columns with outlying inputs, which stay in 16",
    options=("threshold", "columns"),
)
class LLMInt8(Method):
    """threshold: of |input|, above which a column is an outlier. columns: "calibrated" or "live", see the module."""

    def __init__(self, threshold: float = THRESHOLD, columns: str = "calibrated") -> None:
        self.threshold = check_above("threshold", threshold, 0)
        if columns not in COLUMNS:
            raise unknown("time to decide on outlier columns", columns, COLUMNS)
        self.columns, self.needs_inputs = columns, columns == "calibrated"

    def store(self, weight: torch.Tensor, inputs: Inputs | None) -> LiveOutliers | KeptOutliers:
        if self.columns == "live":
            return LiveOutliers(*rounded_weight(weight), self.threshold)
        assert inputs is not None
        return KeptOutliers.rounded(weight, inputs.max_abs > self.threshold)
