"""Rounds of speculation on a real model: propose, verify all texts in one flat batch, keep what was accepted.

    text      … a b c            all but c is in the cache
    proposal        d e f        drafted
    batch         c d e f        one forward: K + 1 rows, a law after each
    accepted        d e          the rows of c, d, e were right; the row of e gives the next token, x
    text      … a b c d e x      the cache keeps … c d e; what it had of f is cut

A round in which nothing is drafted is a plain decode step, and is sent as one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from workbench.errors import WorkbenchError
from workbench.kv.contract import KV, DraftingKV
from workbench.models.batch import Batch
from workbench.models.decoder import Decoder
from workbench.speculation.drafts.contract import Ask, Draft, Law
from workbench.speculation.lengths import LengthPolicy, Outcome
from workbench.speculation.proposal import NOTHING, Proposal
from workbench.speculation.rule import Draws, Verdict, verify, verify_greedy

MOST_NODES = 64  # of a tree, in one round


class Forces(Protocol):
    """A grammar that knows where only one continuation is legal."""

    def forced(self, generated_ids: Sequence[int]) -> list[int]: ...


@dataclass
class Writing:
    """One text that is being written. The engine appends to `token_ids`."""

    sequence: Hashable
    token_ids: list[int]
    law: Law
    draws: Draws
    lengths: LengthPolicy
    wanted: int  # tokens still to come, at least 1
    stop_token_ids: tuple[int, ...] = ()
    guide: Forces | None = None
    prompt_tokens: int = 0
    begun: bool = False  # the prompt went through the target
    # of cached tokens, that the draft has not seen
    features: list[torch.Tensor] = field(default_factory=list)
    featured: int = 0  # how many tokens had their features taken
    most_drafted: int | None = (
        None  # tokens that a round may draft, where someone else counts them; None: as many as fit
    )

    @property
    def generated_ids(self) -> list[int]:
        return self.token_ids[self.prompt_tokens :]


class Emitted(NamedTuple):
    """One token that is certain now."""

    token_id: int
    log_prob: float | None  # under the target itself, before any filter; None where it was not asked
    origin: str  # the draft that wrote it, "target", or "grammar"
    kind: str  # "draft", "correction", "bonus", "plain" where nothing had been drafted, or "jump"


@dataclass(frozen=True)
class Chunk:
    """Tokens that go through the target beside a round, and for which no logits are wanted: a part of a prompt, padding."""

    sequence: Hashable
    token_ids: Sequence[int]
    writing: Writing | None = None  # whose prompt it is, so that its features are kept


class Round(NamedTuple):
    """What one round did for one text."""

    emitted: tuple[Emitted, ...]
    proposal: Proposal
    verdict: Verdict
    p: torch.Tensor | None  # [nodes + 1, V] the target's laws, where they were asked for
    draft_s: float  # learning from the target's answer included; a batch's time is counted whole for each of its texts
    verify_s: float
    rows: int  # of this text that the target processed
    error: Exception | None = None  # then nothing was written

    @property
    def accepted(self) -> int:
        return len(self.verdict.path)

    def outcome(self, *, plain: bool) -> Outcome:
        """For a length policy. plain: the draft was not asked."""
        first = (
            tuple(map(float, self.proposal.first_branch().confidences)) if self.proposal.confidences else ()
        )
        return Outcome(
            self.proposal.depth, self.accepted, first, self.draft_s, self.verify_s, self.rows, plain
        )


class Speculator:
    """A target, its kv and a draft (None: plain decoding, the same code). Owns no sequences: release them yourself."""

    def __init__(
        self, model: Decoder, kv: KV, draft: Draft | None, *, keep_laws: bool = False, log_probs: bool = True
    ) -> None:
        if draft is not None:
            draft.check_fits(model)
            if not isinstance(kv, DraftingKV):
                raise WorkbenchError(
                    f"drafts are verified through a kv with draft_room, keep and holds_trees, and {type(kv).__name__} has "
                    "them not all (see workbench.kv.contract.DraftingKV); use kv='contiguous'"
                )
        self.model, self.kv, self.draft, self.keep_laws = model, kv, draft, keep_laws
        self.log_probs = log_probs  # of every written token
        self._wants_features = draft is not None and draft.wants_features
        self.rows_processed = self.model_calls = 0

    def round(
        self, writings: Sequence[Writing], chunks: Sequence[Chunk] = (), *, isolate: bool = False
    ) -> list[Round]:
        """One round for each text: afterwards it has at least one token more. What was sent and stays is cached.

        chunks: what else goes through the target in the same batch. isolate: where the law of one text raises (its
        filters, its grammar), that text's Round has the error, and the others go on.
        """
        limits = [self._limit(writing) for writing in writings]
        for writing, limit in zip(writings, limits):
            if not limit and writing.begun and (count := writing.lengths.listens()):
                self._listen(writing, count)
        if len(writings) == 1 and not limits[0] and not chunks and not isolate:
            return [self._plain_round(writings[0])]
        started = time.perf_counter()
        proposals = self._propose(writings, limits, isolate)
        drafted = time.perf_counter()
        starts = [self.kv.lengths.get(writing.sequence, 0) for writing in writings]
        batch = self._batch(writings, proposals, starts, chunks)
        logits, hidden = self._forward(batch)
        best = self._best_of_all(writings, logits)
        results, at, observed_s = [], 0, 0.0
        for index, (writing, proposal) in enumerate(zip(writings, proposals)):
            first, at = at, at + len(proposal) + 1
            rows = logits[first:at]
            try:
                if best is None:
                    verdict, laws = self._decide(writing, proposal, rows)
                elif proposal is NOTHING:
                    verdict, laws = Verdict((), best[first], bonus=True), None
                else:
                    verdict, laws = verify_greedy(proposal, best[first:at]), None
            except Exception as error:  # of a filter, a grammar, a learner's part
                if not isolate:
                    raise
                results.append(((), NOTHING, None, None, error))
                continue
            if len(proposal):
                observing = time.perf_counter()
                self.draft.observe(writing.sequence, proposal, rows)
                observed_s += time.perf_counter() - observing
            if hidden is not None:
                self._keep_features(writing, verdict, hidden[index], starts[index])
            if len(proposal):
                self._settle(writing, proposal, verdict)
            emitted = self._emit(writing, proposal, verdict, rows)
            results.append((emitted, proposal, verdict, laws, None))
        if hidden is not None:
            for chunk, rows in zip(chunks, hidden[len(writings) :]):
                self._keep_chunk_features(chunk, rows)
        verified = time.perf_counter()
        draft_s, verify_s = drafted - started + observed_s, verified - drafted - observed_s
        rounds = []
        for writing, limit, (a, b), (*told, error) in zip(
            writings, limits, pairwise(batch.query_starts), results
        ):
            told = Round(*told, draft_s, verify_s, rows=b - a, error=error)
            if writing.begun and error is None:
                writing.lengths.learn(told.outcome(plain=not limit))
            writing.begun = True
            rounds.append(told)
        return rounds

    def release(self, sequence: Hashable) -> None:
        """Forget a text in both caches."""
        if sequence in self.kv.lengths:
            self.kv.release(sequence)
        if self.draft is not None:
            self.draft.release(sequence)

    def _plain_round(self, writing: Writing) -> Round:
        """`round` for one text of which nothing is drafted: the same, with as little around the model as can be."""
        started = time.perf_counter()
        start = self.kv.lengths.get(writing.sequence, 0)
        batch = Batch.of(
            [writing.token_ids[start:]],
            first_positions=(start,),
            sequences=(writing.sequence,),
            device=self.model.device,
        )
        logits, hidden = self._forward(batch)
        if writing.guide is None and self.log_probs:
            verdict, laws, emitted = self._next_token(writing, logits)
        else:
            verdict, laws = self._decide(writing, NOTHING, logits)
            emitted = self._emit(writing, NOTHING, verdict, logits)
        if hidden is not None and writing.featured >= start:
            writing.features.append(hidden[0][writing.featured - start :])
            writing.featured = start + batch.num_tokens
        seconds = time.perf_counter() - started
        if writing.begun:
            writing.lengths.learn(Outcome(0, 0, (), 0.0, seconds, batch.num_tokens, plain=True))
        writing.begun = True
        return Round(emitted, NOTHING, verdict, laws, 0.0, seconds, batch.num_tokens)

    def _next_token(self, writing: Writing, logits: torch.Tensor):
        """`_decide` and `_emit` where nothing was drafted, and no grammar goes on by itself: a token of one law."""
        row, law, laws = logits[0], writing.law, None
        if law.is_argmax:
            token = int(row.argmax())
        elif law.greedy:
            [token] = law.best(logits, lambda _: writing.token_ids)
        else:
            laws = law.rows(logits, lambda _: writing.token_ids)
            token = writing.draws.choose(laws[0])
        log_prob = row.log_softmax(dim=-1)[token].item()
        if law.is_argmax and not math.isfinite(log_prob):
            law.best(logits, lambda _: writing.token_ids)  # says what is wrong with these logits
        self._append(writing, token)
        verdict, emitted = Verdict((), token, bonus=True), Emitted(token, log_prob, "target", "plain")
        return verdict, laws if self.keep_laws else None, (emitted,)

    def _listen(self, writing: Writing, count: int) -> None:
        """Ask the draft what it would have guessed of the tokens that came without it."""
        if self._wants_features and (writing.featured < len(writing.token_ids) - 1 or not writing.features):
            return
        started = time.perf_counter()
        features = torch.cat(writing.features) if self._wants_features else None
        writing.features.clear()
        heard = self.draft.listen(self._ask(writing, 1, features), count)
        writing.lengths.heard(heard, time.perf_counter() - started)

    def _ask(self, writing: Writing, limit: int, features: torch.Tensor | None) -> Ask:
        return Ask(
            writing.sequence,
            writing.token_ids,
            limit,
            min(MOST_NODES, self._room(writing)),
            writing.law,
            writing.draws,
            writing.lengths.go_on,
            features,
        )

    # -- the parts of a round ------------------------------------------------------------------------------------

    def _limit(self, writing: Writing) -> int:
        """Tokens to draft. The prompt goes alone, and the last token wanted needs no draft."""
        if self.draft is None or not writing.begun:
            return 0
        room = min(writing.wanted - 1, self._room(writing))
        if self._wants_features and writing.featured < len(writing.token_ids) - 1:
            room = 0  # a grammar appended tokens that the target has not seen, or its beginning was found in the cache
        return 0 if room < 1 else min(writing.lengths.limit(), room)

    def _room(self, writing: Writing) -> int:
        """Nodes for which there is room behind the tokens that are to be sent anyway."""
        unsent = len(writing.token_ids) - self.kv.lengths.get(writing.sequence, 0)
        room = self.kv.draft_room(writing.sequence) - max(0, unsent - 1)
        return room if writing.most_drafted is None else min(room, writing.most_drafted)

    def _propose(
        self, writings: Sequence[Writing], limits: list[int], isolate: bool = False
    ) -> list[Proposal]:
        if not any(limits):
            return [NOTHING] * len(writings)
        asks = [
            self._ask(writing, limit, torch.cat(writing.features) if self._wants_features else None)
            for writing, limit in zip(writings, limits)
            if limit
        ]
        try:
            found = iter(self.draft.propose(asks) if asks else [])
        except Exception:  # a law that raises will do so again where it is judged, alone
            if not isolate:
                raise
            for ask in asks:
                self.draft.release(ask.sequence)
            found = iter([NOTHING] * len(asks))
        proposals = []
        for writing, limit in zip(writings, limits):
            proposal = next(found) if limit else NOTHING
            if limit:
                writing.features.clear()
            if not (proposal.is_chain or self.kv.holds_trees):
                proposal = proposal.first_branch()
            proposals.append(proposal.cut(min(MOST_NODES, self._room(writing)), limit) if limit else NOTHING)
        return proposals

    def _batch(
        self, writings, proposals: list[Proposal], starts: list[int], chunks: Sequence[Chunk] = ()
    ) -> Batch:
        lists, parents = [], []
        for writing, proposal, start in zip(writings, proposals, starts):
            new = writing.token_ids[start:]
            lists.append([*new, *proposal.tokens])
            parents.append(
                None if proposal.is_chain
                else [*range(-1, len(new) - 1), *(len(new) + parent for parent in proposal.parents)]
            )  # fmt: skip
        lists += [list(chunk.token_ids) for chunk in chunks]
        parents += [None] * len(chunks)
        wanted = [len(proposal) + 1 for proposal in proposals] + [0] * len(chunks)
        if not writings:
            wanted[0] = 1  # a batch has a row of logits; nobody looks at this one
        return Batch.of(
            lists,
            first_positions=[*starts, *(self.kv.lengths.get(chunk.sequence, 0) for chunk in chunks)],
            sequences=[*(writing.sequence for writing in writings), *(chunk.sequence for chunk in chunks)],
            parents=None if all(one is None for one in parents) else parents,
            logits=wanted,
            device=self.model.device,
        )

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, Sequence[torch.Tensor] | None]:
        """[Σ (nodes + 1), V] logits after each text's last token and each drafted one; the hidden rows, where wanted."""
        hidden = None
        with torch.inference_mode():
            if self._wants_features:
                rows = self.model.hidden(batch, self.kv)
                hidden = rows.split([b - a for a, b in pairwise(batch.query_starts)])
                logits = self.model.logits_of(rows if batch.logit_rows is None else rows[batch.logit_rows])
            else:
                logits = self.model(batch, self.kv)
        self.rows_processed += batch.num_tokens
        self.model_calls += 1
        return logits.to(torch.promote_types(logits.dtype, torch.float32)), hidden

    @staticmethod
    def _best_of_all(writings: Sequence[Writing], logits: torch.Tensor) -> list[int] | None:
        """Where every text takes the highest logit: those of all rows at once. None: text by text, also where a row is
        no distribution, so that the one it belongs to is told."""
        if not writings or not all(writing.law.is_argmax for writing in writings):
            return None
        if not logits.amax(dim=-1).isfinite().all():
            return None
        return logits.argmax(dim=-1).tolist()

    def _decide(self, writing: Writing, proposal: Proposal, rows: torch.Tensor):
        text = writing.token_ids

        def text_of(row: int) -> list[int]:
            return [*text, *(proposal.tokens[n] for n in proposal.path_to(row - 1))]

        if writing.law.greedy:
            return verify_greedy(proposal, writing.law.best(rows, text_of)), None
        laws = writing.law.rows(rows, text_of)
        return verify(proposal, laws, writing.draws), laws if self.keep_laws else None

    def _emit(self, writing: Writing, proposal: Proposal, verdict: Verdict, rows) -> tuple[Emitted, ...]:
        """Append to the text: accepted tokens, the one after them, and what a grammar forces; up to a stop token."""
        if proposal is NOTHING and writing.guide is None and not self.log_probs:
            self._append(writing, verdict.token)
            return (Emitted(verdict.token, None, "target", "plain"),)
        tokens = [*(proposal.tokens[node] for node in verdict.path), verdict.token]
        if not self.log_probs:
            log_probs = [None] * len(tokens)
        elif len(rows) == 1:
            log_probs = [rows[0].log_softmax(dim=-1)[verdict.token].item()]
        else:
            # each token by the row of the one before it
            judged = rows[[0, *(node + 1 for node in verdict.path)]]
            log_probs = judged.log_softmax(dim=-1)[range(len(tokens)), tokens].tolist()
        last = "plain" if not len(proposal) else "bonus" if verdict.bonus else "correction"
        emitted = []
        for token, log_prob, node in zip(tokens, log_probs, (*verdict.path, None)):
            if node is None:
                emitted.append(Emitted(token, log_prob, "target", last))
            else:
                emitted.append(Emitted(token, log_prob, self._origin(proposal, node), "draft"))
            if self._append(writing, token):
                return tuple(emitted)
        if writing.guide is not None:
            for token in writing.guide.forced(writing.generated_ids):
                emitted.append(Emitted(token, None, "grammar", "jump"))
                if self._append(writing, token):
                    break
        return tuple(emitted)

    def _origin(self, proposal: Proposal, node: int) -> str:
        return proposal.origins[node] if proposal.origins else self.draft.name

    @staticmethod
    def _append(writing: Writing, token: int) -> bool:
        """True when the text ends here."""
        writing.token_ids.append(token)
        writing.wanted -= 1
        return writing.wanted == 0 or token in writing.stop_token_ids

    def _settle(self, writing: Writing, proposal: Proposal, verdict: Verdict) -> None:
        """The cache keeps what was accepted, and nothing else of the proposal."""
        text, sequence = len(writing.token_ids), writing.sequence
        if self.kv.lengths[sequence] <= text:
            return  # this kv remembers nothing
        if proposal.is_chain:
            self.kv.truncate(sequence, text + len(verdict.path))
        else:
            self.kv.keep(sequence, text, [text + node for node in verdict.path])

    @staticmethod
    def _keep_features(writing: Writing, verdict: Verdict, hidden: torch.Tensor, start: int) -> None:
        """hidden [n, d]: rows of this text's tokens from position `start` on, then of the drafted ones."""
        if writing.featured < start:
            return  # the beginning was found in the cache, and has no features: this text is not drafted for
        new = len(writing.token_ids) - start
        rows = [*range(writing.featured - start, new), *(new + node for node in verdict.path)]
        writing.features.append(hidden[rows])
        writing.featured += len(rows)

    def _keep_chunk_features(self, chunk: Chunk, hidden: torch.Tensor) -> None:
        """hidden [n, d]: rows of a part of a prompt."""
        writing = chunk.writing
        if writing is not None and self.kv.lengths[chunk.sequence] - len(hidden) == writing.featured:
            writing.features.append(hidden)
            writing.featured += len(hidden)
