"""Draft heads arranged for inference, as `workbench.models.fast` does it with models: few and large operations.

Medusa: the blocks of all heads are one matrix. EAGLE: what fc makes of a token's embedding depends on the token alone,
so for all V tokens it is a table, made once, and what is left of fc is the half for the hidden state. Where the steps
of its target are one function in C++ (`workbench.models.native_steps`), so are those of an EAGLE head, the target's
output head with them.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Attends
from workbench.models.fast import FastDecoder, Model
from workbench.models.fast_layers import FastLayer, RotaryTable, joined, small_norm
from workbench.models.heads import EagleHead, MedusaHeads
from workbench.models.linear import linear_class
from workbench.models.native_steps import NativeSteps, why_not_native_head


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


class Guesses(NamedTuple):
    """What an EAGLE head makes of a batch."""

    hidden_states: torch.Tensor  # [N, d] guesses of the next ones
    logits: torch.Tensor  # [M, V] of the rows that want them
    said: torch.Tensor | None
    """[M, 3] float64: the token of the highest logit, the natural log of its probability, and its logit, no finite
    number where the row is no distribution. None where it was not one function in C++."""


class FastEagle(_FastHeads):
    """Stands for a model of one layer where a kv is made: it has a config, a dtype and a device.

    why_not_native: why it is not one function in C++; "" where batches of few rows are.
    """

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
            its = target.native if isinstance(target, FastDecoder) else None
            self._native: NativeSteps | None = None
            self.why_not_native = why_not_native_head(head, self.dtype, its)
            if its is not None and not self.why_not_native:
                self._native = NativeSteps.of_eagle(head, self._table, its)

    def __call__(self, batch: Batch, hidden_states: torch.Tensor, kv: Attends) -> torch.Tensor:
        """Rows of token i + 1 (the batch's) and hidden state i, [N, d] -> guesses of hidden state i + 1, [N, d].

        A token's position in the batch is i. `kv.begin` may refuse the batch whole.
        """
        kv.begin(batch)
        x = F.embedding(batch.token_ids, self._table) + self._fc(hidden_states.to(self.dtype)).to(self._wide)
        turns = (self._turns.turn(batch), None)
        mixed = kv.attend(0, *self._layer.before(x, turns), batch)
        return self._norm(self._layer.after(x, mixed.reshape(len(x), -1)))

    def guesses(self, batch: Batch, hidden_states: torch.Tensor, kv: Attends) -> Guesses:
        """The same with logits of the rows that want them; of few rows in one call where that can be."""
        if self._native is not None:
            made = self._native.rows(batch, kv, self._tables_for, hidden_states.float(), states=True)
            if made is not None:
                assert made.states is not None, "they were asked for"
                return Guesses(made.states, made.logits, made.said)
        guesses = self(batch, hidden_states, kv)
        return Guesses(
            guesses, self.logits_of(guesses if batch.logit_rows is None else guesses[batch.logit_rows]), None
        )

    def step(
        self, token: int, position: int, sequence: Hashable, hidden_state: torch.Tensor, kv: Attends
    ) -> Guesses | None:
        """Of one row, hidden_state [d], without a batch; None where it has to come in one, and nothing has changed."""
        if self._native is None:
            return None
        given = hidden_state[None].float()
        made = self._native.one_row(token, position, sequence, kv, self._tables_for, given)
        if made is None:
            return None
        assert made.states is not None, "a model that is given hidden states gives them"
        return Guesses(made.states, made.logits, made.said)

    @property
    def native_reason(self) -> str:
        """What the last batch was: one function, or why not, in words."""
        return self.why_not_native if self._native is None else self._native.reason

    def _tables_for(self, positions: int) -> list[torch.Tensor]:
        return [self._turns.reach_length(positions)]
