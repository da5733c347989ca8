"""A draft for the draft: a cheap draft guesses for a middle model, which guesses for the target.

    cheap    d e x         prompt lookup, an n-gram table: next to nothing
    middle   d e f         verifies them in one forward of its own, and writes on: a round of speculation as any other
    target   d e f …       verifies what the middle model stands for

What rounds of speculation write has the law of the model that verifies, whatever the draft. So the tokens are the middle
model's draws, and the proposal's laws are the middle model's rows: nothing of the cheap draft enters the outer rule
(staged speculative decoding: Spector and Ré, arXiv 2308.04623; cascades: arXiv 2312.11462).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

from workbench.errors import WorkbenchError
from workbench.kv import KV, kv_for
from workbench.models.decoder import Decoder
from workbench.speculation.drafts.contract import Ask, Draft, check_vocabulary
from workbench.speculation.drafts.model import common_prefix
from workbench.speculation.engine import Round, Speculator, Writing
from workbench.speculation.lengths import LengthPolicy, length_policy
from workbench.speculation.proposal import Proposal


class StagedDraft(Draft):
    """`model`, accelerated by `draft`. origins: who wrote a token, the cheap draft or the middle model.

    draft_length: of the inner rounds (a number or a policy). kv, max_sequences, max_tokens: of the middle model's cache.
    """

    def __init__(
        self,
        model: Decoder,
        draft: Draft,
        *,
        draft_length: int | str | LengthPolicy = 4,
        kv: str | Callable[..., KV] = "contiguous",
        max_sequences: int = 1,
        max_tokens: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(draft, Draft):
            raise WorkbenchError(
                f"a staged draft takes a model and a Draft for it, got {type(draft).__name__}"
            )
        if draft.wants_features:
            raise WorkbenchError(
                f"{draft.name} reads the hidden rows of a text that only grows, and a middle model's text is cut again; "
                "take a draft that reads tokens, such as prompt lookup or an n-gram table"
            )
        self.model, self.draft, self.name = model, draft, name or f"{draft.name}+{model.name}"
        self.max_tokens = max_tokens or model.config.context_length
        self._lengths = length_policy(draft_length)
        memory = kv_for(kv, model, max_sequences=max_sequences, max_tokens=max_tokens)
        self._inner = Speculator(model, memory, draft, keep_laws=True)
        self._writings: dict[Hashable, Writing] = {}

    def check_fits(self, target: Decoder) -> None:
        check_vocabulary(target, self.name, self.model.config.vocab_size, self.model.tokenizer)
        self.draft.check_fits(self.model)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        drafted = [_Drafted(self.model.name) for _ in asks]
        open_ = [(ask, to) for ask, to in zip(asks, drafted) if self._room(ask) > 0]
        for ask, _ in open_:
            self._begin(ask)
        while open_:
            rounds = self._inner.round([self._writings[ask.sequence] for ask, _ in open_])
            open_ = [
                (ask, to)
                for (ask, to), done in zip(open_, rounds)
                if to.take(done, ask) and self._writings[ask.sequence].wanted
            ]
        self.model_calls = self._inner.model_calls + self.draft.model_calls
        self.rows_processed = self._inner.rows_processed + self.draft.rows_processed
        return [to.proposal(greedy=ask.law.greedy) for ask, to in zip(asks, drafted)]

    def release(self, sequence: Hashable) -> None:
        if self._writings.pop(sequence, None) is not None:
            self._inner.release(sequence)

    def _room(self, ask: Ask) -> int:
        return min(ask.limit, ask.nodes, self.max_tokens - len(ask.token_ids))

    def _begin(self, ask: Ask) -> None:
        """The writing of this text, brought to where the ask stands: what the target rejected is cut from the cache."""
        last = self._writings.get(ask.sequence)
        if last is not None:
            cached = self._inner.kv.lengths.get(ask.sequence, 0)
            same = min(common_prefix(last.token_ids, ask.token_ids), len(ask.token_ids) - 1)
            if same < cached:
                self._inner.kv.truncate(ask.sequence, same)
        self._writings[ask.sequence] = Writing(
            ask.sequence,
            list(ask.token_ids),
            ask.law,
            ask.draws,
            self._lengths.copy() if last is None else last.lengths,
            wanted=self._room(ask),
            begun=last is not None,  # else the prompt goes alone
        )


class _Drafted:
    """What inner rounds wrote for one ask."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.tokens, self.laws, self.origins, self.confidences = [], [], [], []

    def take(self, done: Round, ask: Ask) -> bool:
        """The tokens of a round, as far as the ask goes on; False where it does not. It is asked token by token, each time
        before the next is looked at: what is dropped then had no say in it."""
        nodes = (-1, *done.verdict.path)  # the row of each token is that of the one before it
        for token, node in zip(done.emitted, nodes):
            law = None if done.p is None else done.p[node + 1]
            # greedy: unfiltered
            confidence = math.exp(token.log_prob) if law is None else law[token.token_id]
            self.tokens.append(token.token_id)
            self.laws.append(law)
            self.origins.append(self._model_name if token.kind != "draft" else token.origin)
            self.confidences.append(confidence)
            if not ask.go_on(confidence):
                return False
        return True

    def proposal(self, *, greedy: bool) -> Proposal:
        return Proposal.chain(
            self.tokens,
            () if greedy else tuple(self.laws),
            origins=tuple(self.origins),
            confidences=tuple(self.confidences),
        )
