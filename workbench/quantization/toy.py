"""The smallest case in which rounding to nearest fails: two weights, one of them with a large input.

    x = (100, 1)    w = (0.03, 0.03)    levels 0, ±0.1, ±0.2, …    x · w = 3.03

    round to nearest     0.03 -> 0                                              0
    mixed precision      the weight of the large input stays as it is           3.0    what is lost is 1 · 0.03
    AWQ, s = 4           0.03 · 4 = 0.12 -> 0.1, and its input is 100 / 4       2.5    the other weight is still 0

Other s are better or worse than 4: s = 10/3 puts 0.03·s on a level and gives 3.0, s = 2 puts it beyond the middle of
two and gives 5.0. That is why AWQ searches s on real inputs and does not take the largest.
The step of 0.1 is another's doing: some weight of the same group is 0.7, and int4 has seven levels beside 0 for it. By
themselves (0.03, 0.03) would have a step of 0.03/7 and be exact. `Toy.in_a_group` does the same with that third weight
and the scale as it is really stored, in float16.

AWQ: Lin et al., arXiv 2306.00978 §3. LLM.int8 (mixed precision): Dettmers et al., arXiv 2208.07339.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.errors import WorkbenchError
from workbench.quantization.formats import IntegerFormat, decode, encode, quantize_tensor

INT4 = IntegerFormat(4, symmetric=True)


@dataclass(frozen=True)
class Toy:
    """One output of a linear with an input that matters more than the others. Results are x · ŵ, plain numbers.

    inputs, weights: as many of either. step: between two levels of int4, symmetric.
    outlier: which input is the large one.
    """

    inputs: tuple[float, ...] = (100.0, 1.0)
    weights: tuple[float, ...] = (0.03, 0.03)
    step: float = 0.1
    outlier: int = 0

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.weights) or not 0 <= self.outlier < len(self.inputs):
            raise WorkbenchError(
                f"the toy has a weight for each input and one outlier among them, got {len(self.inputs)} inputs, "
                f"{len(self.weights)} weights and outlier {self.outlier}"
            )
        if not self.step > 0:
            raise WorkbenchError(f"step must be above 0, got {self.step}")

    def exact(self) -> float:
        return self._product(self._w)

    def rounded(self) -> float:
        """Every weight to the nearest level."""
        return self._product(self._round(self._w))

    def mixed(self) -> float:
        """The outlier's weight stays as it is, the others are rounded."""
        kept = self._round(self._w)
        kept[self.outlier] = self._w[self.outlier]
        return self._product(kept)

    def scaled(self, scale: float) -> float:
        """The outlier's weight times `scale` before rounding, its input divided by it: AWQ, with the step held."""
        up = self._up(scale)
        return self._product(self._round(self._w * up) / up)

    def in_a_group(self, scale: float = 1.0, largest: float = 0.7) -> float:
        """The same through int4 as it is stored: `largest` is one more weight of the group, with no input, and the
        group's scale is made for all of them after the scaling."""
        together = torch.cat((self._w * self._up(scale), torch.tensor([largest]))).float()
        pad = torch.zeros(len(together) % 2)  # codes of 4 bits go in pairs
        back = quantize_tensor(torch.cat((together, pad)), INT4).dequantize()
        return self._product(back[: len(self._w)].double() / self._up(scale))

    @property
    def _w(self) -> torch.Tensor:
        return torch.tensor(self.weights, dtype=torch.float64)

    def _up(self, scale: float) -> torch.Tensor:
        if not scale > 0:
            raise WorkbenchError(f"a scale must be above 0, got {scale}")
        up = torch.ones(len(self.weights), dtype=torch.float64)
        up[self.outlier] = scale
        return up

    def _round(self, weights: torch.Tensor) -> torch.Tensor:
        step = torch.tensor(self.step, dtype=torch.float64)
        together = torch.cat((weights, weights.new_zeros(len(weights) % 2)))
        levels = decode(encode(together, step, None, INT4), torch.ones(()), None, INT4)[: len(weights)]
        return levels.double() * step

    def _product(self, weights: torch.Tensor) -> float:
        return float(torch.tensor(self.inputs, dtype=torch.float64) @ weights)
