"""No memory at all: every step brings the whole text. The naive way, and the oracle of all others."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.models.attention import attention_function
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.latent import UpProjections
from workbench.models.mixers.contract import StateMixer


class Recompute:
    """A kv that caches nothing: `lengths` is always 0, so the caller sends the whole sequence in every step.

    attention: "sdpa" (fused) or "eager" (the definition, for proofs). A step over a text of S tokens costs
    S rows of the model, so generating n tokens after P costs P + (P+1) + … + (P+n−1) rows.
    Trees come with their text: the parents of a whole text are −1, 0, 1, …, and then those of the tree.
    """

    def __init__(self, config: ModelConfig, *, attention: str = "sdpa") -> None:
        self.config = config
        self.holds_trees = not config.state_layers
        self.scale = config.attention_scale
        self._attention = attention_function(attention)
        self._shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of this batch, layers that others attend over
        self._live: dict[Hashable, int] = {}  # always 0; kept so that release of an unknown name is an error

    @property
    def lengths(self) -> Mapping[Hashable, int]:
        return MappingProxyType(self._live)

    def begin(self, batch: Batch) -> None:
        for name, first in zip(batch.sequences, batch.first_positions):
            if first != 0:
                raise WorkbenchError(
                    f"kv 'recompute' remembers nothing, so sequence {name!r} must be sent whole, from position 0; "
                    f"this batch starts it at position {first}"
                )
        if batch.parents is not None and not self.holds_trees:
            raise WorkbenchError(
                f"a tree of drafted tokens needs attention in every layer; layers {list(self.config.state_layers)} of "
                "this model keep a state, which follows one branch. Draft a chain"
            )
        for name in batch.sequences:
            self._live[name] = 0
        self._shared.clear()

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: Batch,
        up: UpProjections | None = None,
    ) -> torch.Tensor:
        if up is not None:
            assert k is not None, "latents come as keys"
            k, v = up.expand(k)
        if self.config.kv_sources is not None:
            if k is not None and v is not None:
                self._shared[layer] = (k, v)
            k, v = self._shared[self.config.kv_source(layer)]
            if layer == self.config.num_layers - 1:
                self._shared.clear()
        look: dict[str, Any] = {
            "scale": self.scale,
            "window": self.config.window_of(layer),
            "sinks": self.config.attention_sinks,
        }
        trees = batch.parents or (None,) * len(batch.sequences)
        assert k is not None and v is not None, "a layer without keys has those of another"
        parts = [
            self._attention(q[a:b], k[a:b], v[a:b], **look, parents=tree)
            for tree, (a, b) in zip(trees, pairwise(batch.query_starts))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def advance(self, layer: int, mixer: StateMixer, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Every sequence from an empty state."""
        rows = [x[a:b] for a, b in pairwise(batch.query_starts)]
        parts = [mixer.chunk(row, mixer.initial_state(row))[0] for row in rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def truncate(self, sequence: Hashable, length: int) -> None:
        self._check_live(sequence)
        if length != 0:
            raise WorkbenchError(
                f"kv 'recompute' remembers 0 tokens of sequence {sequence!r}, it cannot be cut to {length}; "
                "send fewer tokens in the next batch instead"
            )

    def keep(self, sequence: Hashable, length: int, places: Sequence[int]) -> None:
        """Nothing is cached, so only keep(sequence, 0, ()) is valid."""
        if list(places):
            self._check_live(sequence)
            raise WorkbenchError(
                f"kv 'recompute' remembers 0 tokens of sequence {sequence!r}, it cannot keep those at {list(places)}; "
                "send the branch that stays as the text of the next batch"
            )
        self.truncate(sequence, length)

    def draft_room(self, sequence: Hashable) -> int:
        """The context length less the next token. This kv does not know how long a sequence is, as it is sent anew in
        every batch; the caller must see to it that sequence and draft fit the context together."""
        return self.config.context_length - 1

    def fork(self, sequence: Hashable, new_sequence: Hashable) -> None:
        self._check_live(sequence)
        if new_sequence in self._live:
            raise WorkbenchError(f"sequence {new_sequence!r} already exists; release it first or choose another name")
        self._live[new_sequence] = 0

    def release(self, sequence: Hashable) -> None:
        self._check_live(sequence)
        del self._live[sequence]

    def _check_live(self, sequence: Hashable) -> None:
        if sequence not in self._live:
            raise WorkbenchError(f"sequence {sequence!r} is not live here; live: {sorted(map(repr, self._live))}")

    @property
    def bytes_in_use(self) -> int:
        return 0

    @property
    def bytes_reserved(self) -> int:
        return 0
