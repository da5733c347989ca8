"""A mixture of experts in place of a layer's feed-forward: every row goes through a few of many small ones.

    x [N, d] ──▶ router: scores of E experts ──▶ the k best of each row, and their weights
             ──▶ rows grouped by expert: one product for each expert that any row chose ──▶ weighted sum [N, d]
             ──▶ + shared experts, through which every row goes (DeepSeekMoE, arXiv 2401.06066)

    family        scores     chosen by                                  weights of the chosen
    mixtral       softmax    score                                      score / Σ of the chosen           (2401.04088)
    qwen3_moe     softmax    score                                      the same, or the scores as they are
    deepseek_v2   softmax    score, within the best groups (maximum)    scaling · score                   (2405.04434)
    deepseek_v3   sigmoid    score + bias, within the best groups       scaling · score / Σ of the chosen (2412.19437)
                             (sum of the two best)

The bias of DeepSeek-V3 steers the choice alone: it balances the load without a loss (arXiv 2408.15664). Scores are
float32 whatever the weights are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from workbench.errors import WorkbenchError
from workbench.models.config import ExpertsShape, ModelConfig
from workbench.models.layers import SwiGLU


class Router(nn.Module):
    """The expert router: which experts a row goes through, and with which weights."""

    def __init__(self, hidden_size: int, shape: ExpertsShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.num_experts, hidden_size))
        nn.init.normal_(self.weight, std=0.02)
        self.selection_bias = nn.Parameter(torch.zeros(shape.num_experts)) if shape.router_bias else None

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """[N, E] float32 of rows x [N, d]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))
        return logits.sigmoid() if self.shape.scoring == "sigmoid" else logits.softmax(dim=-1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights [N, k], experts [N, k] int64) of rows x [N, d]; among equal scores torch.topk chooses."""
        shape, scores = self.shape, self.scores(x)
        by = scores if self.selection_bias is None else scores + self.selection_bias.to(scores.dtype)
        if shape.groups_per_token < shape.num_groups:
            by = by.masked_fill(~self._in_best_groups(by), -torch.inf)
        chosen = by.topk(shape.experts_per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if shape.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-20)
        if shape.scaling != 1:
            weights = weights * shape.scaling
        return weights.to(x.dtype), chosen

    def _in_best_groups(self, by: torch.Tensor) -> torch.Tensor:
        """[N, E] bool: which experts lie in the groups with the highest scores of each row."""
        shape = self.shape
        grouped = by.unflatten(-1, (shape.num_groups, -1))  # [N, groups, E / groups]
        best = grouped.topk(2, dim=-1).values.sum(-1) if shape.scoring == "sigmoid" else grouped.amax(dim=-1)
        chosen = best.topk(shape.groups_per_token, dim=-1).indices
        inside = torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True)
        return inside[..., None].expand_as(grouped).flatten(-2)


class MixtureOfExperts(nn.Module):
    """See the module. `experts` are ordinary feed-forwards, so that all that knows linear layers knows these."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = config.experts_shape
        self.shape = shape
        self.router = Router(config.hidden_size, shape)
        self.experts = nn.ModuleList(SwiGLU(config, shape.intermediate_size) for _ in range(shape.num_experts))
        self.shared: SwiGLU | None = None
        if shape.shared_experts:
            self.shared = SwiGLU(config, shape.shared_experts * shape.intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, d] -> [N, d]."""
        weights, chosen = self.router(x)
        added = routed(x, weights, chosen, self.experts)
        return added if self.shared is None else added + self.shared(x)


def routed(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: Any) -> torch.Tensor:
    """[N, d]: Σ over its k experts of weight · expert(row), for rows x [N, d]. Each expert that was chosen runs once,
    over all of its rows. experts: callables [n, d] -> [n, d]."""
    rows, starts = grouped(chosen, len(experts))
    flat, k = weights.flatten(), chosen.shape[1]
    added = torch.zeros_like(x)
    for expert, (start, end) in enumerate(pairwise(starts)):
        if start < end:
            places = rows[start:end]
            of_token = places // k
            made = experts[expert](x.index_select(0, of_token))
            added.index_add_(0, of_token, made * flat.index_select(0, places)[:, None])
    return added


def grouped(chosen: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, list[int]]:
    """(places [N·k], starts [E + 1]) of chosen [N, k]: the places of its flat form in the order of their experts, and
    where each expert's begin. Within an expert rows keep their order."""
    flat = chosen.flatten()
    ends = torch.bincount(flat, minlength=num_experts).cumsum(0).tolist()
    return flat.argsort(stable=True), [0, *ends]


def routed_row_by_row(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: Any) -> torch.Tensor:
    """The same, one row and one expert after the other: the oracle."""
    added = torch.zeros_like(x)
    for row in range(len(x)):
        for weight, expert in zip(weights[row], chosen[row].tolist()):
            added[row] += weight * experts[expert](x[row : row + 1])[0]
    return added


# -- what was chosen -----------------------------------------------------------------------------------------


def routers(model: Any) -> dict[int, Router]:
    """{layer: its router} of a model as it was loaded or arranged for inference. Raises WorkbenchError without any."""
    if hasattr(model, "routers"):
        there = model.routers
    else:
        each = (getattr(getattr(layer, "mlp", None), "router", None) for layer in getattr(model, "layers", ()))
        there = {index: router for index, router in enumerate(each) if isinstance(router, Router)}
    if not there:
        raise WorkbenchError(f"{getattr(model, 'name', type(model).__name__)} has no experts to watch")
    return there


@contextlib.contextmanager
def watching(model: Any) -> Iterator[dict[int, list[torch.Tensor]]]:
    """{layer: [experts [N, k] of each forward]} of what is chosen inside; nothing stays in the model. Of a drafted or
    served text, all rows that a step sends. Raises WorkbenchError for a model without experts."""
    seen: dict[int, list[torch.Tensor]] = {}
    handles = []
    for index, router in routers(model).items():
        chosen = seen.setdefault(index, [])
        note = lambda _, args, made, chosen=chosen: chosen.append(made[1].detach().cpu())  # noqa: E731
        handles.append(router.register_forward_hook(note))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def routing(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """The load-balancing losses of the forwards inside, one for each layer with experts, with their gradients."""
    losses: list[torch.Tensor] = []

    def note(router: nn.Module, args: tuple[torch.Tensor], made: tuple[torch.Tensor, torch.Tensor]) -> None:
        assert isinstance(router, Router)
        losses.append(load_balancing_loss(router.scores(args[0]), made[1]))

    handles = [one.register_forward_hook(note) for one in model.modules() if isinstance(one, Router)]
    try:
        yield losses
    finally:
        for handle in handles:
            handle.remove()


def tokens_per_expert(chosen: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[E] rows that each expert got, of chosen [N, k]."""
    return torch.bincount(chosen.flatten(), minlength=num_experts)


def counted_different(seen: dict[int, list[torch.Tensor]], step: int = -1) -> float:
    """How many different experts the rows of a step chose, in the mean of the layers; of `watching`, by default the
    last step."""
    counts = [len(torch.unique(chosen[step])) for chosen in seen.values()]
    return sum(counts) / len(counts)


def expected_different(num_experts: int, experts_per_token: int, rows: float) -> float:
    """How many different experts `rows` tokens choose in the mean, E·(1 − (1 − k/E)^N), each choosing k of E evenly and
    independently of the others. Less when the load is not even."""
    return num_experts * (1 - (1 - experts_per_token / num_experts) ** rows)


def load_balancing_loss(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """E · Σ_i f_i · P_i of scores [N, E] and chosen [N, k]: f_i the share of the N·k places that expert i got, P_i its
    mean score as a share of all; 1 where both are even (Switch Transformer, arXiv 2101.03961, equations 4 to 6)."""
    experts = scores.shape[-1]
    share = tokens_per_expert(chosen, experts).to(scores.dtype) / max(1, chosen.numel())
    mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
    return experts * (share * mean).sum()
