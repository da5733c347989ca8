"""A draft for the draft: a cheap draft proposes to a middle model, which proposes to the target.

    cheap    d e x         prompt lookup or an n-gram table, at almost no cost
    middle   d e f         verifies them in one forward and adds a token: an ordinary round of speculation
    target   d e f …       verifies the middle model's tokens

Tokens from rounds of speculation have the distribution of the verifying model, whatever the draft. So these tokens are
draws from the middle model, and the proposal's distributions are the middle model's rows; the cheap draft does not
enter the outer rule (staged speculative decoding: Spector and Ré, arXiv 2308.04623; cascades: arXiv 2312.11462).
"""

from __future__ import annotations

import functools
import math
from collections import abc
from collections.abc import Callable, Hashable
from typing import Any, cast

from workbench.decoding.sampling import Sampler
from workbench.decoding.sequence import Sequence
from workbench.decoding.step import Step
from workbench.errors import WorkbenchError
from workbench.kv import KV, DraftingKV, caching_kind, kv_for
from workbench.models.fast import Model
from workbench.speculation.drafts.contract import Ask, Draft, check_vocabulary, cut_back, with_room
from workbench.speculation.drafts.model import common_prefix
from workbench.speculation.engine import Drafting, Round, Speculator
from workbench.speculation.lengths import LengthPolicy, length_policy
from workbench.speculation.proposal import Proposal
from workbench.speculation.rule import Row


class StagedDraft(Draft):
    """`model`, accelerated by `draft`. origins: who wrote a token, the cheap draft or the middle model.

    draft_length: of the inner rounds (a number or a policy). kv, max_sequences, max_tokens: of the middle model's
    cache.
    """

    def __init__(
        self,
        model: Model,
        draft: Draft,
        *,
        draft_length: int | str | LengthPolicy = 4,
        kv: str | Callable[..., KV] | None = None,
        max_sequences: int = 1,
        max_tokens: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(draft, Draft):
            raise WorkbenchError(f"a staged draft takes a model and a Draft for it, got {type(draft).__name__}")
        if draft.wants_hidden_states:
            raise WorkbenchError(
                f"{draft.name} reads the hidden states of a growing sequence, and that of a middle model is cut again;"
                " take a draft that reads tokens, such as prompt lookup or an n-gram table"
            )
        self.model, self.draft, self.name = model, draft, name or f"{draft.name}+{model.name}"
        self.max_tokens = max_tokens or model.config.context_length
        self._lengths = length_policy(draft_length)
        self._make_kv = functools.partial(kv_for, kv or caching_kind(model.config), model, max_tokens=max_tokens)
        memory = self._make_kv(max_sequences=max_sequences)
        self._inner = Speculator(Step(model, memory), draft, keep_distributions=True)
        self._sequences: dict[Hashable, Sequence] = {}  # of the middle model, by the outer sequence's id

    def check_fits(self, target: Model) -> None:
        check_vocabulary(target, self.name, self.model.config.vocab_size, self.model.tokenizer)
        self.draft.check_fits(self.model)

    def make_room(self, sequences: int) -> None:
        kv = with_room(self._inner.kv, self._make_kv, sequences, self.name)
        self.draft.make_room(sequences)
        self._inner.step.kv = kv
        self._inner.kv = cast(DraftingKV, kv)

    def propose(self, asks: abc.Sequence[Ask]) -> list[Proposal]:
        drafted = [_Drafted(self.model.name) for _ in asks]
        open_ = [(ask, to) for ask, to in zip(asks, drafted) if self._room(ask) > 0]
        for ask, _ in open_:
            self._begin(ask)
        while open_:
            rounds = self._inner.run([self._sequences[ask.sequence] for ask, _ in open_])
            open_ = [
                (ask, to)
                for (ask, to), done in zip(open_, rounds)
                if to.take(done, ask) and self._sequences[ask.sequence].remaining
            ]
        self.model_calls = self._inner.model_calls + self.draft.model_calls
        self.rows_processed = self._inner.rows_processed + self.draft.rows_processed
        return [to.proposal(greedy=ask.distribution.greedy) for ask, to in zip(asks, drafted)]

    def release(self, sequence: Hashable) -> None:
        if self._sequences.pop(sequence, None) is not None:
            self._inner.release(sequence)

    def _room(self, ask: Ask) -> int:
        return min(ask.limit, ask.nodes, self.max_tokens - len(ask.token_ids))

    def _begin(self, ask: Ask) -> None:
        """Set the middle model's sequence to the ask's tokens; tokens rejected by the target are cut from its cache."""
        last = self._sequences.get(ask.sequence)
        if last is not None:
            cached = self._inner.kv.lengths.get(ask.sequence, 0)
            same = min(common_prefix(last.token_ids, ask.token_ids), len(ask.token_ids) - 1)
            if same < cached:
                cut_back(self._inner.kv, ask.sequence, same)
        self._sequences[ask.sequence] = Sequence(
            ask.sequence,
            list(ask.token_ids),
            prompt_tokens=len(ask.token_ids),
            max_new_tokens=self._room(ask),
            sampler=Sampler(ask.distribution, ask.draws),
            # a new one starts with a plain round, for the prompt
            drafting=Drafting(self._lengths.copy()) if last is None else last.drafting,
        )


class _Drafted:
    """The tokens of the inner rounds for one ask."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.tokens: list[int] = []
        self.distributions: list[Row | None] = []
        self.origins: list[str] = []
        self.confidences: list[Any] = []  # numbers

    def take(self, done: Round, ask: Ask) -> bool:
        """Add the tokens of a round until `ask.go_on` says stop; False then. It is called after each token, before the
        next one is read, so dropped tokens do not influence it."""
        assert done.verdict is not None
        nodes = (-1, *done.verdict.path)  # the row of each token is that of the one before it
        for token, node in zip(done.emitted, nodes):
            distribution: Row | None = None if done.p is None else done.p[node + 1]
            if distribution is not None:
                confidence = distribution[token.token_id]
            else:  # greedy: unfiltered
                assert token.log_prob is not None
                confidence = math.exp(token.log_prob)
            self.tokens.append(token.token_id)
            self.distributions.append(distribution)
            self.origins.append(self._model_name if token.kind != "draft" else token.origin)
            self.confidences.append(confidence)
            if not ask.go_on(confidence):
                return False
        return True

    def proposal(self, *, greedy: bool) -> Proposal:
        return Proposal.chain(
            self.tokens,
            () if greedy else tuple(self.distributions),
            origins=tuple(self.origins),
            confidences=tuple(self.confidences),
        )
