"""Expert parallelism: every rank has some of the experts, whole, and rows travel to them and back.

    x [N, d], the same on all ranks      each rank takes its N/p rows and routes them
    all-to-all of counts, then of rows   every row goes to the ranks of its k experts
    experts                              each rank runs its own, over the rows of all ranks
    all-to-all of rows                   results go back to where the row came from, and are summed with their weights
    all-gather                           of the N/p sums

What is exchanged grows with the rows and not with the experts, and each rank reads only its own experts' weights. With
tensor parallelism the attention before it is divided by heads. In training and in large deployments attention is data
parallel, and the all-gather falls away (DeepSeek-V3, arXiv 2412.19437 §3.4). GShard, arXiv 2006.16668; an expert's rows
are neither capped nor dropped here.
"""

from __future__ import annotations

import torch
from torch import nn

from workbench.errors import WorkbenchError
from workbench.models.config import ModelConfig
from workbench.models.experts import Router, routed
from workbench.models.layers import SwiGLU
from workbench.parallel.collectives import Collectives


def check_experts_divide(config: ModelConfig, size: int, name: str) -> None:
    """Raise WorkbenchError where so many ranks cannot have equally many experts."""
    if config.experts is not None and config.experts.num_experts % size:
        raise WorkbenchError(
            f"{name} has {config.experts.num_experts} experts, which {size} ranks cannot share equally; take a number"
            f" of"
            f" ranks that divides {config.experts.num_experts}"
        )


def own_experts(config: ModelConfig, index: int, size: int) -> range:
    """The experts of the index-th of `size` ranks: neighbours."""
    each = config.experts_shape.num_experts // size
    return range(index * each, (index + 1) * each)


class ExpertParallel(nn.Module):
    """A layer's mixture of experts of which this rank has some. Router and shared experts are whole on each rank."""

    def __init__(self, config: ModelConfig, collectives: Collectives) -> None:
        super().__init__()
        self.shape, self._collectives = config.experts_shape, collectives
        self.own = own_experts(config, collectives.index, collectives.size)
        self.router = Router(config.hidden_size, self.shape)
        self.experts = nn.ModuleList(SwiGLU(config, self.shape.intermediate_size) for _ in self.own)
        self.shared: SwiGLU | None = None
        if self.shape.shared_experts:
            self.shared = SwiGLU(config, self.shape.shared_experts * self.shape.intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, d], the same on all ranks -> [N, d], the same on all ranks."""
        ranks, index = self._collectives.size, self._collectives.index
        each = -(-len(x) // ranks)  # rows of a rank; the last ones may have fewer
        mine = x[index * each : (index + 1) * each]
        sums = self._sums(mine)
        if self.shared is not None:
            sums = sums + self.shared(mine)
        if len(mine) < each:  # an all-gather is of equal parts
            sums = torch.cat((sums, sums.new_zeros(each - len(mine), x.shape[1])))
        return self._collectives.all_gather(sums).flatten(0, 1)[: len(x)]

    def _sums(self, x: torch.Tensor) -> torch.Tensor:
        """[n, d]: Σ of weight · expert(row) for this rank's rows x [n, d], wherever the experts are."""
        weights, chosen = self.router(x)
        ranks, k = self._collectives.size, self.shape.experts_per_token
        places = chosen.flatten().argsort(stable=True)  # by expert, and so by rank
        at = chosen.flatten()[places] // len(self.own)  # the rank of each place
        sent = torch.bincount(at, minlength=ranks)
        counts = self._collectives.all_gather(sent)  # [from, to]
        coming = counts[:, self._collectives.index].tolist()
        rows = x.index_select(0, places // k)
        of_experts = chosen.flatten()[places]
        here = self._collectives.all_to_all(list(rows.split(sent.tolist())), coming)
        which = self._collectives.all_to_all(list(of_experts.split(sent.tolist())), coming)
        done = self._run(torch.cat(here), torch.cat(which) - self.own.start)
        back = self._collectives.all_to_all(list(done.split(coming)), sent.tolist())
        made = torch.cat(back) * weights.flatten()[places][:, None]
        return torch.zeros_like(x).index_add_(0, places // k, made)

    def _run(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """[n, d]: each row through the one expert of this rank that it came for."""
        ones = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
        return routed(rows, ones, experts[:, None], self.experts)
