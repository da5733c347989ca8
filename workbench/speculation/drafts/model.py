"""A smaller model as the draft: the classic (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

It writes K tokens with a cache of its own, one forward a token, or a tree level by level. What of it was rejected is
cut from its cache when the next text comes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence

import torch

from workbench.errors import WorkbenchError
from workbench.kv import KV, caching_kind, kv_for
from workbench.models.batch import Batch
from workbench.models.fast import FastDecoder, Model
from workbench.speculation.drafts.contract import Ask, Draft, check_vocabulary, cut_back, with_room
from workbench.speculation.drafts.growing import (
    Distributions,
    Paths,
    check_branching,
    grow_together,
    levels_that_fit,
    tree_of,
)
from workbench.speculation.proposal import Proposal

# tokens that a chain continues with: the last drafted, where all were accepted, and the target's. All get logits, since
# that is what a compiled model takes as one call.
FEW = 2


class ModelDraft(Draft):
    """Any model with the target's vocabulary.

    branching: children a node has, level by level, instead of a chain as long as the ask allows: (3, 2, 1) draws three
    tokens, two after each, one after each of those. kv: kind of its cache; trees need one that holds trees.
    max_sequences, max_tokens: how many sequences it drafts for at a time (see `make_room`), and their length (default:
    its context).
    """

    def __init__(
        self,
        model: Model,
        *,
        branching: Sequence[int] | None = None,
        kv: str | Callable[..., KV] | None = None,
        max_sequences: int = 1,
        max_tokens: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if not hasattr(model, "config") or not callable(model):
            raise WorkbenchError(f"a model draft takes a loaded model, got {type(model).__name__}")
        self.model, self.branching, self.name = model, check_branching(branching), name or model.name
        self._make_kv = functools.partial(kv_for, kv or caching_kind(model.config), model, max_tokens=max_tokens)
        self._kv = self._make_kv(max_sequences=max_sequences)
        self.max_tokens = max_tokens or model.config.context_length
        self._remembered: dict[Hashable, list[int]] = {}  # token ids in the cache

    def check_fits(self, target: Model) -> None:
        check_vocabulary(target, self.name, self.model.config.vocab_size, self.model.tokenizer)
        if self.branching and max(self.branching) > 1 and not getattr(self._kv, "holds_trees", False):
            raise WorkbenchError(f"the draft's kv, {type(self._kv).__name__}, holds no trees; use kv='contiguous'")

    def make_room(self, sequences: int) -> None:
        self._kv = with_room(self._kv, self._make_kv, sequences, self.name)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        levels = [levels_that_fit(self.branching, ask, self.max_tokens - len(ask.token_ids)) for ask in asks]
        if len(asks) == 1 and self._may_step(asks[0], levels[0]):
            return [self._chain_of_steps(asks[0], len(levels[0]))]
        return grow_together(asks, levels, functools.partial(self._distributions, asks))

    def listen(self, ask: Ask, count: int) -> list[bool]:
        text, known = ask.token_ids, self._remembered.setdefault(ask.sequence, [])
        self._cut_to(ask.sequence, min(common_prefix(known, text), len(text) - 1))
        count = min(count, len(text) - 1 - len(known))  # tokens that it reads in this call
        if count < 1 or len(text) > self.max_tokens:
            return []
        batch = Batch.of(
            [text[len(known) : -1]],
            first_positions=[len(known)],
            sequences=[ask.sequence],
            logits=[count],
            device=self.model.device,
        )
        best = self._forward(batch).argmax(dim=-1).tolist()
        known += text[len(known) : -1]
        return [guess == token for guess, token in zip(best, text[-count:])]

    def release(self, sequence: Hashable) -> None:
        if self._remembered.pop(sequence, None) is not None and sequence in self._kv.lengths:
            self._kv.release(sequence)

    # -- a chain by compiled steps ---------------------------------------------------------------------------------

    def _may_step(self, ask: Ask, levels: Sequence[int]) -> bool:
        """Whether each drafted token is the one that a compiled step says: the highest logit, nothing else having a
        say."""
        chain = ask.distribution.is_argmax and set(levels) == {1}
        return chain and isinstance(self.model, FastDecoder) and self.model.may_step(self._kv)

    def _chain_of_steps(self, ask: Ask, limit: int) -> Proposal:
        """The chain that `grow_together` draws greedily, without distributions, which greedy decoding reads none of."""
        tokens: list[int] = []
        confidences: list[float] = []
        while len(tokens) < limit:
            token, confidence = self._best_after(ask, [*ask.token_ids, *tokens])
            tokens.append(token)
            confidences.append(confidence)
            if not ask.go_on(confidence):
                break
        return Proposal.chain(tokens, confidences=tuple(confidences))

    def _best_after(self, ask: Ask, text: list[int]) -> tuple[int, float]:
        """The most probable token after this text, and its probability."""
        start = self._know(ask.sequence, text)
        new = text[start:]
        if len(new) == 1 and isinstance(self.model, FastDecoder):
            stepped = self.model.step(new[0], start, ask.sequence, self._kv)
            if stepped is not None:
                logits, said = stepped
                self.model_calls += 1
                self.rows_processed += 1
                token, log_prob, top = said.tolist() if said is not None else (0, 0, math.nan)
                return (int(token), math.exp(log_prob)) if math.isfinite(top) else self._best_of(ask, logits, text)
        batch = Batch.of(
            [new],
            first_positions=[start],
            sequences=[ask.sequence],
            logits=[len(new) if len(new) <= FEW else 1],
            device=self.model.device,
        )
        return self._best_of(ask, self._forward(batch)[-1:], text)

    @staticmethod
    def _best_of(ask: Ask, logits: torch.Tensor, text: list[int]) -> tuple[int, float]:
        """Of logits [1, V], which may be no distribution: the error is the sequence's."""
        [token] = ask.distribution.best(logits, lambda _: text)
        return token, float(logits[0].double().softmax(dim=-1)[token])

    # -- distributions, of chains and trees ------------------------------------------------------------------------

    def _distributions(self, asks: Sequence[Ask], paths: Paths) -> Distributions:
        """The next distribution after each path, all sequences in one forward."""
        lists, parents, counts, first, pending = [], [], [], [], {}
        for index, of_ask in paths.items():
            ask = asks[index]
            tokens, of_tree, rows = self._to_send(ask, of_ask)
            first.append(self._kv.lengths.get(ask.sequence, 0))
            lists.append(tokens)
            parents.append(of_tree)
            counts.append(len(tokens) if of_tree is not None or (first[-1] and len(tokens) <= FEW) else len(rows))
            pending[index] = rows if of_tree is not None else [counts[-1] - 1]
        batch = Batch.of(
            lists,
            first_positions=first,
            sequences=[asks[index].sequence for index in paths],
            parents=parents,
            logits=counts,
            device=self.model.device,
        )
        logits = self._forward(batch)
        found, start = {}, 0
        for (index, of_ask), of_tree, count in zip(paths.items(), parents, counts):
            ask, rows = asks[index], pending[index]
            here = logits[start : start + count]
            start += count
            texts = [[*ask.token_ids, *path] for path in of_ask]
            found[index] = list(ask.distribution.confidences(here[rows], texts.__getitem__))
            if of_tree is not None:
                self._kv.truncate(ask.sequence, len(ask.token_ids))
        return found

    def _to_send(self, ask: Ask, paths: list[list[int]]) -> tuple[list[int], list[int] | None, list[int]]:
        """Tokens, the parents of a tree or None, and which of the tree's rows end the paths.

        A chain continues from the cache. A tree is sent whole at each level, since it has few nodes.
        """
        if len(paths) == 1:
            text = [*ask.token_ids, *paths[0]]
            return text[self._know(ask.sequence, text) :], None, [0]
        self._remembered.setdefault(ask.sequence, [])
        self._cut_to(ask.sequence, len(ask.token_ids))  # an earlier level may have been sent as a chain
        nodes, parents = tree_of(paths)
        return [node[-1] for node in nodes], parents, [nodes.index(tuple(path)) for path in paths]

    def _know(self, sequence: Hashable, text: list[int]) -> int:
        """How many tokens of this text are in the cache, one less than all at most. The rest is to be sent now."""
        known = self._remembered.setdefault(sequence, [])
        self._cut_to(sequence, min(common_prefix(known, text), len(text) - 1))
        start = len(known)
        known += text[start:]
        return start

    def _forward(self, batch: Batch) -> torch.Tensor:
        """[rows asked for, V] logits."""
        with torch.inference_mode():
            logits = self.model(batch, self._kv)
        self.model_calls += 1
        self.rows_processed += batch.num_tokens
        return logits

    def _cut_to(self, sequence: Hashable, length: int) -> None:
        """Cut rejected tokens of the last proposal from the cache."""
        known = self._remembered[sequence]
        if length < len(known):
            del known[cut_back(self._kv, sequence, length) :]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:  # nearly always
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])
