"""torch's Muon where the processor multiplies bfloat16; where it does not, the same steps with float32 products."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from workbench.models.autocast import product_dtype


class Muon(torch.optim.Muon):
    """Muon (Jordan et al., 2024) with `match_rms_adamw` (arXiv 2502.16982). The state is torch's, so a run that was
    begun with one precision of products goes on with the other."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "training computes its gradients first"
        if product_dtype(self.param_groups[0]["params"][0].device.type) is torch.bfloat16:
            super().step()  # type: ignore[no-untyped-call]
            return
        for group in self.param_groups:
            assert group["adjust_lr_fn"] == "match_rms_adamw" and group["nesterov"]
            alike: dict[tuple[int, ...], list[torch.nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[tuple(p.shape)].append(p)
            for shape, parameters in alike.items():
                updates = []
                for p in parameters:
                    state, gradient = self.state[p], p.grad
                    assert gradient is not None
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(gradient)
                    momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
                    updates.append(gradient.lerp(momentum, group["momentum"]))
                steps = orthogonal(torch.stack(updates), group["ns_coefficients"], group["ns_steps"], group["eps"])
                rate = 0.2 * math.sqrt(max(shape)) * group["lr"]
                for p, update in zip(parameters, steps):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)


def orthogonal(
    matrices: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """matrices [n, rows, columns] with singular values brought near 1 by Newton–Schulz iterations of degree 5."""
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
