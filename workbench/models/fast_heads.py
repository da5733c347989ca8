"""Draft heads arranged for inference, as `workbench.models.fast` does it with models: few and large operations.

Medusa: the blocks of all heads are one matrix. EAGLE: what fc makes of a token's embedding depends on the token alone,
so for all V tokens it is a table, made once, and what is left of fc is the half for the hidden state.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Attends
from workbench.models.fast import Model
from workbench.models.fast_layers import FastLayer, RotaryTable, joined, small_norm
from workbench.models.heads import EagleHead, MedusaHeads
from workbench.models.linear import linear_class


class _FastHeads:
    """What both have in common: the target's output head, in the target's dtype."""

    def __init__(self, heads: MedusaHeads | EagleHead, target: Model) -> None:
        heads.check_target(target)
        parameter = next(heads.parameters())
        self.config, self.name = heads.config, heads.name
        self.dtype, self.device = parameter.dtype, parameter.device
        self._target = target

    def logits_of(self, guesses: torch.Tensor) -> torch.Tensor:
        """[n, V] through the target's head."""
        return self._target.logits_of(guesses.to(self._target.dtype))


class FastMedusa(_FastHeads):
    def __init__(self, heads: MedusaHeads, target: Model) -> None:
        super().__init__(heads, target)
        make = linear_class("auto", self.dtype, self.device)
        with torch.no_grad():
            self._blocks = joined(make, self.dtype, *[head.block for head in heads.heads])
            self._outs = [joined(make, self.dtype, head.out) for head in heads.heads]

    def __call__(self, hidden_states: torch.Tensor, depth: int) -> torch.Tensor:
        """hidden_states [n, d] -> guesses of the first `depth` heads, [depth, n, d]."""
        x = hidden_states.to(self.dtype)
        wide = F.silu(self._blocks(x)).view(len(x), len(self._outs), -1)
        return torch.stack([out(x + wide[:, k]) for k, out in enumerate(self._outs[:depth])])


class FastEagle(_FastHeads):
    """Stands for a model of one layer where a kv is made: it has a config, a dtype and a device."""

    config: ModelConfig

    def __init__(self, head: EagleHead, target: Model) -> None:
        super().__init__(head, target)
        make, d = linear_class("auto", self.dtype, self.device), self.config.hidden_size
        self._wide = torch.promote_types(self.dtype, torch.float32) if self.device.type == "cpu" else self.dtype
        with torch.no_grad():
            of_tokens, of_hidden_states = head.fc.weight[:, :d], head.fc.weight[:, d:]
            every = torch.arange(self.config.vocab_size, device=self.device)
            embeddings = target.embed(every).to(self.dtype)
            self._table = F.linear(head.token_norm(embeddings), of_tokens).to(self._wide)  # [V, d]
            self._fc = make(of_hidden_states.contiguous(), None)
            self._layer = FastLayer(
                head.layer,
                functools.partial(joined, make, self.dtype),
                small_norm,
                self._wide,
                self.config,
                local=False,
            )
            self._norm = small_norm(head.norm, self._wide)
            self._turns = RotaryTable(self)

    def __call__(self, batch: Batch, hidden_states: torch.Tensor, kv: Attends) -> torch.Tensor:
        """Rows of token i + 1 (the batch's) and hidden state i, [N, d] -> guesses of hidden state i + 1, [N, d].

        A token's position in the batch is i. `kv.begin` may refuse the batch whole.
        """
        kv.begin(batch)
        x = F.embedding(batch.token_ids, self._table) + self._fc(hidden_states.to(self.dtype)).to(self._wide)
        turns = (self._turns.turn(batch), None)
        mixed = kv.attend(0, *self._layer.before(x, turns), batch)
        return self._norm(self._layer.after(x, mixed.reshape(len(x), -1)))
