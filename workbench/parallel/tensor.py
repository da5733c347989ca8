"""Tensor parallelism: every rank computes a part of every layer, and two all-reduces a layer put the parts together.

    x ──▶ norm ──▶ q, k, v: rows of own heads ──▶ attention ──▶ o: columns of own heads ──▶ all-reduce ──▶ + x
    x ──▶ norm ──▶ gate, up: rows of own neurons ──▶ act · ──▶ down: columns of own neurons ──▶ all-reduce ──▶ + x
    last x ──▶ norm ──▶ head: rows of own tokens ──▶ gather, or one number a rank

A product whose rows are split (Megatron: column parallel, for its weights are transposed) gives each rank a part of the
outputs; one whose columns are split takes exactly that part and gives each rank a summand of the whole output. So
between the two nothing is exchanged, and one all-reduce comes after the pair.

What a rank has is an ordinary decoder with fewer heads and neurons (`part_config`), and an ordinary kv of these heads.

    attention       divided by                    refused
    MHA, GQA        query heads, key-value heads  ranks that divide neither H_kv nor are a multiple of it
    MQA, few H_kv   query heads; H_kv replicated: the ranks of a group hold the same head, for each needs it whole;
                    its cache is then no smaller per rank
    latent (MLA)    query heads; the latent is one for all heads, so each rank caches it whole

With attention="whole" every rank computes all of attention and caches all of it, so heads need not divide and one
all-reduce a layer falls away: what deployments with many small experts do, each rank then for sequences of its own.

Experts are not cut: each rank has some of them, whole (`expert`).

Embedding, norms and biases of o and down are whole on each rank. The embedding is not divided: a look-up reads one row
a token, and to put divided ones together takes a third all-reduce; where it is the head too (tied), the head's part
is a view of it. Megatron-LM, Shoeybi et al., arXiv 1909.08053 §3.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from workbench.errors import WorkbenchError, check_whole, unknown
from workbench.models.config import ModelConfig
from workbench.models.linear import Linear, chosen_linear
from workbench.parallel.collectives import Collectives
from workbench.parallel.expert import check_experts_divide, own_experts

# of a parameter of a layer, the dimension that is divided, and into what; a name that is missing is whole on each rank
DIVIDED = {
    "attention.q.weight": (0, "queries"),
    "attention.q.bias": (0, "queries"),
    "attention.k.weight": (0, "keys"),
    "attention.k.bias": (0, "keys"),
    "attention.v.weight": (0, "keys"),
    "attention.v.bias": (0, "keys"),
    "attention.o.weight": (1, "values"),
    "attention.q_up.weight": (0, "queries"),
    "attention.k_up.weight": (0, "contents"),
    "attention.v_up.weight": (0, "values"),
    "mlp.gate.weight": (0, "neurons"),
    "mlp.gate.bias": (0, "neurons"),
    "mlp.up.weight": (0, "neurons"),
    "mlp.up.bias": (0, "neurons"),
    "mlp.down.weight": (1, "neurons"),
}


ATTENTION = ("heads", "whole")  # how attention is divided: by heads, or not


def check_divides(config: ModelConfig, size: int, name: str = "the model", attention: str = "heads") -> None:
    """Raise WorkbenchError, with the numbers, where this shape cannot be divided among `size` ranks."""
    check_whole("the number of ranks of tensor parallelism", size, 1)
    if attention not in ATTENTION:
        raise unknown("attention on several ranks", attention, ATTENTION)
    if size == 1:
        return
    if config.state_layers:
        raise WorkbenchError(
            f"{name} has layers that keep a state ({config.mixer_of(config.state_layers[0])}), which are not divided "
            "here; take a model with attention alone, or tensor=1"
        )
    check_experts_divide(config, size, name)
    by_heads, kv_heads = attention == "heads", config.num_kv_heads
    if by_heads and config.num_heads % size:
        raise WorkbenchError(
            f"{name} has {config.num_heads} query heads, which {size} ranks cannot share equally; take a number of "
            f"ranks that divides {config.num_heads}, or attention='whole' on each"
        )
    if by_heads and config.latent_attention is None and kv_heads % size and size % kv_heads:
        raise WorkbenchError(
            f"{name} has {kv_heads} key-value heads, and {size} ranks neither divide them nor are a multiple of them, "
            f"so heads would be cut; take a number of ranks that divides {kv_heads}, or a multiple of it"
        )
    if config.has_experts(0):
        pass  # no layer has a feed-forward of its own
    elif config.intermediate_size % size:
        raise WorkbenchError(
            f"{name} has {config.intermediate_size} neurons in its feed-forward, which {size} ranks cannot share "
            "equally; take another number of ranks"
        )
    if config.vocab_size < size:
        raise WorkbenchError(f"{name} has {config.vocab_size} tokens, fewer than the {size} ranks")


def kv_replicas(config: ModelConfig, size: int) -> int:
    """Ranks that hold the same key-value head: 1 where H_kv suffices. Of a latent, all."""
    return size if config.latent_attention is not None else max(1, size // config.num_kv_heads)


def part_config(config: ModelConfig, size: int, attention: str = "heads") -> ModelConfig:
    """The shape of what one of `size` ranks has: fewer heads and neurons; width and vocabulary as they were."""
    if size == 1:
        return config
    wide = config.intermediate_size if config.has_experts(0) else config.intermediate_size // size
    if attention == "whole":
        return dataclasses.replace(config, intermediate_size=wide)
    heads = config.num_heads // size
    kv_heads = heads if config.latent_attention is not None else max(1, config.num_kv_heads // size)
    return dataclasses.replace(config, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=wide)


NO_TOKEN = -1


@dataclass(frozen=True)
class Part:
    """One rank's part of a model of this shape: the index-th of `size`."""

    config: ModelConfig  # of the whole model
    index: int
    size: int
    attention: str = "heads"

    def span(self, unit: str) -> tuple[int, int]:
        """First and last row or column (exclusive) of this part, in a dimension divided by `unit`."""
        config, own = self.config, part_config(self.config, self.size, self.attention)
        if unit == "neurons":
            return self._stretch(own.intermediate_size, self.index)
        if unit == "tokens":
            rows = self.vocabulary_rows
            return min(self.index * rows, config.vocab_size), min((self.index + 1) * rows, config.vocab_size)
        if unit == "keys":  # ranks that share a head come one after the other
            return self._stretch(own.num_kv_heads * config.head_dim, self.index // kv_replicas(config, self.size))
        if config.latent_attention is None:
            return self._stretch(own.num_heads * config.head_dim, self.index)
        shape = config.latent_shape
        sizes = {"queries": shape.key_head_dim, "contents": shape.content_head_dim, "values": shape.value_head_dim}
        return self._stretch(own.num_heads * sizes[unit], self.index)

    @staticmethod
    def _stretch(length: int, place: int) -> tuple[int, int]:
        return place * length, (place + 1) * length

    @property
    def vocabulary_rows(self) -> int:
        """⌈V / size⌉: rows of the head that a rank has; the last one may have fewer."""
        return -(-self.config.vocab_size // self.size)

    def cut(self, within: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter of a layer, named as in the layer, in memory of its own."""
        is_whole = self.attention == "whole" and within.startswith("attention.")
        if self.size == 1 or within not in DIVIDED or is_whole:
            return tensor.clone(memory_format=torch.contiguous_format)
        dimension, unit = DIVIDED[within]
        start, end = self.span(unit)
        return tensor.narrow(dimension, start, end - start).clone(memory_format=torch.contiguous_format)

    def expert(self, within: str) -> str | None:
        """The name in this rank's layer of a parameter of an expert, named as in the whole layer; None where another
        rank has it. Names of other parameters stay."""
        if not within.startswith("mlp.experts."):
            return within
        number, _, leaf = within.removeprefix("mlp.experts.").partition(".")
        own = own_experts(self.config, self.index, self.size)
        return f"mlp.experts.{int(number) - own.start}.{leaf}" if int(number) in own else None

    def cut_head(self, weight: torch.Tensor) -> torch.Tensor:
        """The rows of the head [V, d] that are this rank's; a view."""
        start, end = self.span("tokens")
        return weight[start:end]


class RowParallel(nn.Linear):
    """A product whose columns are divided, as Megatron's class of this name: each rank has a summand of the output, an
    all-reduce makes the sum, and the bias is added once."""

    def __init__(self, part: nn.Linear, collectives: Collectives) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = part.in_features, part.out_features
        self.weight, self.bias = part.weight, part.bias
        self._collectives = collectives

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed = self._collectives.all_reduce(F.linear(x, self.weight))
        return summed if self.bias is None else summed + self.bias

    def for_inference(self, dtype: torch.dtype, *, one_row: bool = False) -> Reduced:
        """The same, its weight as `prepare` would hold it (`models.fast_layers.joined` asks for it)."""
        make, _ = chosen_linear(dtype, self.weight.device)
        bias = None if self.bias is None else self.bias.detach()
        return Reduced(make(self.weight.detach(), None), bias, self._collectives)


class Reduced:
    """A Linear of inference whose outputs are summed over the ranks; see `RowParallel`."""

    def __init__(self, own: Linear, bias: torch.Tensor | None, collectives: Collectives) -> None:
        self._own, self._bias, self._collectives = own, bias, collectives
        self.in_features, self.out_features = own.in_features, own.out_features
        self.weight_bytes = own.weight_bytes + (0 if bias is None else bias.nbytes)
        self.form = f"{own.form}, summed over {collectives.size} ranks"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        summed = self._collectives.all_reduce(self._own(x))
        return summed if self._bias is None else summed + self._bias


class VocabularyHead(nn.Module):
    """The head, divided by tokens: rank r has the logits of ⌈V/p⌉ of them. Every method is called by all ranks, with
    the same hidden states [M, d]; the first of them gets the answer, the others None.

    `logits` gathers V numbers per row. To choose a token takes far fewer: `best` and `draw` need one number a rank
    (greedy: its highest logit, with its token; drawn: the log of its summed exponentials), and are exact. Where a
    row is not of finite numbers they answer NO_TOKEN.
    """

    def __init__(self, part: Part, weight: nn.Parameter, collectives: Collectives) -> None:
        super().__init__()
        self.part, self._collectives = part, collectives
        self.weight = weight
        self._product: Linear | None = None

    def prepare(self) -> None:
        """Hold the weight as `models.fast.prepare` does."""
        make, _ = chosen_linear(self.weight.dtype, self.weight.device)
        self._product = make(self.weight.detach(), None)

    def _own(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight) if self._product is None else self._product(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[M, V]."""
        own, rows = self._own(hidden), self.part.vocabulary_rows
        if own.shape[-1] < rows:
            own = F.pad(own, (0, rows - own.shape[-1]))
        parts = self._collectives.gather(own)  # [p, M, ⌈V/p⌉]
        if parts is None:
            return None
        return parts.transpose(0, 1).flatten(1)[:, : self.part.config.vocab_size]

    def best(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[M] the tokens of the highest logits, of equals the one with the smallest id, as `argmax` chooses."""
        value, place = self._own(hidden).double().max(dim=-1)
        parts = self._collectives.gather(torch.stack((value, place + self.part.span("tokens")[0]), dim=-1))
        if parts is None:
            return None
        values = parts[..., 0]
        winner = values.argmax(dim=0)  # the first of equals, which has the smaller tokens
        token = parts[winner, torch.arange(len(hidden)), 1].long()
        return token.where(values.isfinite().all(dim=0), NO_TOKEN)

    def draw(self, hidden: torch.Tensor, temperature: float, uniforms: torch.Tensor) -> torch.Tensor | None:
        """[M] tokens drawn from softmax(logits / temperature), one uniform number of [0, 1) for each row, float64: the
        token that `decoding.draws.draw` takes from the whole row with the same number.

        Two exchanges: the mass of each rank, from which all know whose token it is; then that token.
        """
        scaled = (self._own(hidden).float() / temperature).double()
        masses = self._collectives.all_gather(scaled.logsumexp(dim=-1))  # [p, M]
        shares = masses.softmax(dim=0)
        reached = shares.cumsum(dim=0)
        owner = (reached <= uniforms).sum(dim=0).clamp(max=self.part.size - 1)
        before = torch.cat((torch.zeros_like(reached[:1]), reached))[owner, torch.arange(len(hidden))]
        cumulative = (scaled - masses.logsumexp(dim=0)[:, None]).exp().cumsum(dim=-1) + before[:, None]
        within = torch.searchsorted(cumulative, uniforms[:, None], right=True)[:, 0]
        within = torch.where(within < scaled.shape[-1], within, cumulative.argmax(dim=-1))
        token = torch.where(owner == self.part.index, within + self.part.span("tokens")[0], NO_TOKEN)
        parts = self._collectives.gather(token)
        return None if parts is None else parts.amax(dim=0).where(masses.isfinite().all(dim=0), NO_TOKEN)
