"""The mixture of experts of a prepared model: one product for each expert, or one for all.

loop     a product for each expert that a row of the step chose. The host asks how many rows each got, so on a
         GPU it waits once a layer.
grouped  two launches of workbench.kernels.grouped_matmul a layer, whatever the router chose; the host never asks.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from workbench.models.experts import MixtureOfExperts, routed

if TYPE_CHECKING:
    from workbench.models.linear import Join, Linear


class FastExperts:
    """gate and up of each expert are one product, and the router's weights float32."""

    def __init__(self, mixture: MixtureOfExperts, join: Join) -> None:
        self.router = copy.deepcopy(mixture.router).float().requires_grad_(False)
        self.shared = None if mixture.shared is None else FastExpert(mixture.shared, join)
        self._arrange(mixture, join)

    def _arrange(self, mixture: MixtureOfExperts, join: Join) -> None:
        self.experts = [FastExpert(expert, join) for expert in mixture.experts]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, d], normed -> [N, d]."""
        weights, chosen = self.router(x)
        added = self._routed(x, weights, chosen)
        return added if self.shared is None else added.add_(self.shared(x))

    def _routed(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return routed(x, weights, chosen, self.experts)

    @property
    def linears(self) -> dict[str, Linear]:
        every = {f"experts.{number}": expert for number, expert in enumerate(self.experts)}
        every |= {} if self.shared is None else {"shared": self.shared}
        return {f"{name}.{part}": getattr(one, part) for name, one in every.items() for part in ("up", "down")}

    @property
    def weight_bytes(self) -> int:
        """Of all experts and of the router."""
        return self.router.weight.nbytes + sum(linear.weight_bytes for linear in self.linears.values())


class FastExpert:
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, mlp: Any, join: Join) -> None:
        self.up, self.down = join(mlp.gate, mlp.up), join(mlp.down)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))


class GroupedExperts(FastExperts):
    """The matrices of all experts are stacked: up [E, 2·F, d], down [E, d, F]."""

    def _arrange(self, mixture: MixtureOfExperts, join: Join) -> None:
        from workbench.kernels.grouped_matmul import grouped_matmul

        self.experts, self._product = [], grouped_matmul
        experts: list[Any] = list(mixture.experts)
        self.up = torch.stack([torch.cat((one.gate.weight, one.up.weight)).detach() for one in experts])
        self.down = torch.stack([one.down.weight.detach() for one in experts])

    def _routed(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        per_row = chosen.shape[1]
        of_place, places = chosen.flatten().sort(stable=True)
        bounds = torch.arange(len(self.up) + 1, device=x.device)
        starts = torch.searchsorted(of_place, bounds, out_int32=True)
        gate, up = self._product(x, self.up, starts, rows=(places // per_row).int()).chunk(2, dim=-1)
        made = self._product(F.silu(gate).mul_(up), self.down, starts)
        in_order = torch.empty_like(made).index_copy_(0, places, made).view(len(x), per_row, -1)
        return (in_order * weights[..., None].to(made.dtype)).sum(1)

    @property
    def weight_bytes(self) -> int:
        return super().weight_bytes + self.up.nbytes + self.down.nbytes


EXPERTS = {"loop": FastExperts, "grouped": GroupedExperts}
