"""Which loop computes the matrix products of a step, by how the model was prepared: what a prediction has to know
beside the counts.

    steps      rows                               products                          starts operations
    eager      few                                of codes: loops of C++            each
               more                               torch's, of codes as numbers      each
    looped     few                                loops of C++, of every format     each; norms, gates and attention
               more                               as eager                          are a call of C++ each
    compiled   one                                generated loops                   none
    native     up to `rows_limit`                 loops of C++, of every format     none
               more                               as eager

The rate of generated loops is not measured, since compiling one takes longer than a prediction may: codes in compiled
steps count at the rate of our loop with inputs as they are, which is faster. So that is the least they take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from workbench.errors import unknown
from workbench.models import looped
from workbench.models.fast import FastDecoder
from workbench.models.linear import Looped, torch_multiplies
from workbench.models.native_steps import limit_of
from workbench.quantization import cpu_forms

if TYPE_CHECKING:
    from workbench.instruments.costs import StepCosts
    from workbench.models.fast import Model

STEPS = ("eager", "looped", "compiled", "native")  # as `FastDecoder.steps` has it; looped: eager, kernels="c++"


def steps_taken(model: Model) -> str:
    """Which of STEPS a model takes: eager ones, too, where it has no form for what was asked for."""
    if not isinstance(model, FastDecoder):
        return "eager"
    steps = "eager" if model.why_not_steps else model.steps
    return "looped" if steps == "eager" and model.kernels == "c++" else steps


@dataclass(frozen=True)
class Loops:
    """How a model on a CPU takes its steps. dtype: that it was loaded in. bits: of the codes of its layers, and of its
    head; None where they are of that type. inputs: as `prepare` takes it. chain: rows of a verification that is one
    compiled call.

    Raises WorkbenchError for an unknown kind of step.
    """

    steps: str
    dtype: torch.dtype
    bits: int | None = None
    head_bits: int | None = None
    inputs: str = "exact"
    chain: int = 1

    def __post_init__(self) -> None:
        if self.steps not in STEPS:
            raise unknown("kind of step", self.steps, STEPS)

    def counted(self, costs: StepCosts) -> StepCosts:
        """The step as it is taken: in one call or not, and by which loops."""
        rows = costs.rows
        if self.steps == "native" and (self.native_limit is None or rows <= self.native_limit):
            return costs.in_one_call().in_loops(self._loop(self.bits), self._loop(self.head_bits))
        if self.steps == "compiled" and rows <= self.chain:
            costs = costs.in_one_call()
            return costs.in_loops(self._codes(self.bits, "exact"), self._codes(self.head_bits, "exact"))
        if self.steps == "looped":
            costs = costs.in_calls(attention=rows <= looped.MAX_ROWS)
            if rows <= Looped.MAX_ROWS or not torch_multiplies(self.dtype):
                costs = costs.in_loops(
                    "" if self.bits else self._loop(None), "" if self.head_bits else self._loop(None)
                )
        of_codes = cpu_forms.max_rows(self.dtype, self.inputs)
        return costs.in_loops(self._codes(self.bits, self.inputs), self._codes(self.head_bits, self.inputs), of_codes)

    @property
    def native_limit(self) -> int | None:
        """Rows of a native step at most."""
        in_codes = self.bits is not None or self.head_bits is not None
        return limit_of(self.dtype, in_codes=in_codes, inputs=self.inputs)

    def _loop(self, bits: int | None) -> str:
        return str(self.dtype).removeprefix("torch.") if bits is None else self._codes(bits, self.inputs)

    @staticmethod
    def _codes(bits: int | None, inputs: str) -> str:
        """Codes of 5 to 8 bits are bytes, of fewer two a byte."""
        if bits is None:
            return ""
        return f"{8 if bits > 4 else 4} bits" + ", q8" * (inputs == "q8")
