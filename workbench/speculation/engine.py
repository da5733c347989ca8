"""Rounds of speculation on a real model: propose, verify all sequences in one flat batch, keep what was accepted.

    tokens    … a b c            all but c is in the cache
    proposal        d e f        drafted
    batch         c d e f        one forward: K + 1 rows, a distribution after each
    accepted        d e          by the rows of c and d; f is rejected, and the row of e gives the next token, x
    tokens    … a b c d e x      the cache keeps … c d e; the entry of f is cut

It wraps a `decoding.step.Step`; a round without drafted tokens is exactly that step.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch

from workbench.decoding.guide import forced_tokens
from workbench.decoding.sequence import NewToken, Sequence
from workbench.decoding.step import Chunk, Step, best_of_all
from workbench.errors import WorkbenchError
from workbench.kv.contract import DraftingKV
from workbench.models.batch import Batch
from workbench.speculation.drafts.contract import Ask, Draft
from workbench.speculation.lengths import LengthPolicy, Outcome
from workbench.speculation.proposal import NOTHING, Proposal
from workbench.speculation.rule import Verdict, verify, verify_greedy

MAX_NODES = 64  # of a tree, in one round


@dataclass
class Drafting:
    """The state of speculation for one sequence, as `Sequence.drafting`."""

    lengths: LengthPolicy
    begun: bool = False  # the prompt went through the target
    max_tokens: int | None = None  # that a round may draft, where a scheduler counts them; None: as many as fit
    hidden_states: list[torch.Tensor] = field(default_factory=list)  # of cached tokens, not yet given to the draft
    num_hidden: int = 0  # tokens whose hidden states were collected so far

    def forget(self) -> None:
        """To be called when the keys and values of the sequence are gone: the draft starts from its beginning again."""
        self.hidden_states.clear()
        self.num_hidden = 0


class Round(NamedTuple):
    """What one round did for one sequence."""

    emitted: tuple[NewToken, ...]
    proposal: Proposal
    verdict: Verdict | None  # None with an error
    p: torch.Tensor | None  # [nodes + 1, V] the target's distributions, where they were asked for
    draft_s: float  # `Draft.observe` included; the time of the whole batch, for each of its sequences
    verify_s: float
    rows: int  # tokens of this sequence that the target processed
    error: Exception | None = None  # then nothing was generated

    @property
    def accepted(self) -> int:
        return 0 if self.verdict is None else len(self.verdict.path)

    def outcome(self, *, plain: bool) -> Outcome:
        """For a length policy. plain: the draft was not asked."""
        first = tuple(map(float, self.proposal.first_branch().confidences)) if self.proposal.confidences else ()
        return Outcome(self.proposal.depth, self.accepted, first, self.draft_s, self.verify_s, self.rows, plain)


class Speculator:
    """A step of the target, and a draft (None: every round is a plain step). Its sequences have a `Drafting`. The
    caller owns them and calls `release`.

    keep_distributions: each Round has the target's in `p`.
    Raises WorkbenchError where the draft does not fit the target, and for a kv that cannot verify drafts.
    """

    def __init__(self, step: Step, draft: Draft | None, *, keep_distributions: bool = False) -> None:
        if draft is not None:
            target: Any = step.model  # a decoder, or what stands for one
            draft.check_fits(target)
            if not isinstance(step.kv, DraftingKV):
                raise WorkbenchError(
                    f"drafts are verified through a kv with draft_room, keep and holds_trees, and"
                    f" {type(step.kv).__name__} has them not all (see workbench.kv.contract.DraftingKV); use"
                    " kv='contiguous'"
                )
        self.step, self.draft, self.keep_distributions = step, draft, keep_distributions
        self.model, self.kv = step.model, cast(DraftingKV, step.kv)  # without a draft any KV
        self._wants_hidden = draft is not None and draft.wants_hidden_states

    @property
    def rows_processed(self) -> int:
        return self.step.rows_processed

    @property
    def model_calls(self) -> int:
        return self.step.model_calls

    def run(
        self, sequences: abc.Sequence[Sequence], chunks: abc.Sequence[Chunk] = (), *, isolate: bool = False
    ) -> list[Round]:
        """One round for each sequence, which appends at least one token. Sent tokens that stay are in the cache.

        chunks, isolate: see `Step.run`.
        """
        limits = [self._limit(sequence) for sequence in sequences]
        for sequence, limit in zip(sequences, limits):
            if not limit and sequence.drafting.begun and (count := sequence.drafting.lengths.listens()):
                self._listen(sequence, count)
        if any(limits) or self._wants_hidden or self.keep_distributions:
            rounds = self._round(sequences, limits, chunks, isolate)
        else:
            rounds = self._plain_round(sequences, chunks, isolate)
        for sequence, limit, done in zip(sequences, limits, rounds):
            if sequence.drafting.begun and done.error is None:
                sequence.drafting.lengths.learn(done.outcome(plain=not limit))
            sequence.drafting.begun = True
        return rounds

    @property
    def _asked(self) -> Draft:
        """The draft, where there is one to ask."""
        assert self.draft is not None
        return self.draft

    def release(self, sequence_id: Hashable) -> None:
        """Forget a sequence in both caches."""
        self.step.release(sequence_id)
        if self.draft is not None:
            self.draft.release(sequence_id)

    def _plain_round(
        self, sequences: abc.Sequence[Sequence], chunks: abc.Sequence[Chunk], isolate: bool
    ) -> list[Round]:
        started = time.perf_counter()
        outputs = self.step.run(sequences, chunks, isolate=isolate)
        seconds = time.perf_counter() - started
        return [
            Round(
                output.emitted,
                NOTHING,
                None if output.error else Verdict((), output.emitted[0].token_id, bonus=True),
                None,
                0.0,
                seconds,
                output.rows,
                output.error,
            )
            for output in outputs
        ]

    def _round(
        self, sequences: abc.Sequence[Sequence], limits: list[int], chunks: abc.Sequence[Chunk], isolate: bool
    ) -> list[Round]:
        started = time.perf_counter()
        proposals = self._propose(sequences, limits, isolate)
        drafted = time.perf_counter()
        starts = [self.step.start(sequence) for sequence in sequences]
        batch = self._batch(sequences, proposals, starts, chunks)
        if self._wants_hidden:
            logits, hidden = self.step.forward_with_hidden(batch)
        else:
            logits, hidden = self.step.forward(batch), None
        best = best_of_all(sequences, logits)
        results: list[tuple[tuple[NewToken, ...], Proposal, Verdict | None, torch.Tensor | None, Exception | None]] = []
        first, observed_s = 0, 0.0
        for index, (sequence, proposal) in enumerate(zip(sequences, proposals)):
            end = first + len(proposal) + 1
            rows, best_rows, first = logits[first:end], None if best is None else best[first:end], end
            try:
                verdict, distributions = self._decide(sequence, proposal, rows, best_rows)
            except Exception as error:  # of a filter, a grammar, a learner's part
                if not isolate:
                    raise
                results.append(((), NOTHING, None, None, error))
                continue
            if len(proposal):
                observing = time.perf_counter()
                self._asked.observe(sequence.id, proposal, rows)
                observed_s += time.perf_counter() - observing
            if hidden is not None:
                self._keep_hidden(sequence, verdict, hidden[index], starts[index])
            if len(proposal):
                self._keep_accepted(sequence, proposal, verdict)
            results.append((self._emit(sequence, proposal, verdict, rows), proposal, verdict, distributions, None))
        if hidden is not None:
            for chunk, rows in zip(chunks, hidden[len(sequences) :]):
                self._keep_hidden_of_chunk(chunk, rows)
        verified = time.perf_counter()
        draft_s, verify_s = drafted - started + observed_s, verified - drafted - observed_s
        return [
            Round(emitted, proposal, verdict, p, draft_s, verify_s, b - a, error)
            for (a, b), (emitted, proposal, verdict, p, error) in zip(pairwise(batch.query_starts), results)
        ]

    # -- the parts of a round ------------------------------------------------------------------------------------

    def _limit(self, sequence: Sequence) -> int:
        """Depth to draft. Nothing in a prompt's own round, and nothing for the last token wanted."""
        drafting = sequence.drafting
        if self.draft is None or not drafting.begun:
            return 0
        room = min(sequence.remaining - 1, self._room(sequence))
        if self._wants_hidden and drafting.num_hidden < len(sequence.token_ids) - 1:
            room = 0  # hidden states are missing: of tokens that a grammar forced, or of a prefix from the cache
        return 0 if room < 1 else min(drafting.lengths.limit(), room)

    def _room(self, sequence: Sequence) -> int:
        """Nodes for which the kv has room, after the tokens that are sent anyway."""
        not_cached = len(sequence.token_ids) - self.step.start(sequence)
        room = self.kv.draft_room(sequence.id) - max(0, not_cached - 1)
        max_tokens = sequence.drafting.max_tokens
        return room if max_tokens is None else min(room, max_tokens)

    def _ask(self, sequence: Sequence, limit: int, hidden_states: torch.Tensor | None) -> Ask:
        return Ask(
            sequence.id,
            sequence.token_ids,
            limit,
            min(MAX_NODES, self._room(sequence)),
            sequence.sampler.distribution,
            sequence.sampler.draws,
            sequence.drafting.lengths.go_on,
            hidden_states,
        )

    def _hidden_since_last_ask(self, sequence: Sequence) -> torch.Tensor | None:
        return torch.cat(sequence.drafting.hidden_states) if self._wants_hidden else None

    def _listen(self, sequence: Sequence, count: int) -> None:
        """`Draft.listen` for the last `count` tokens, which were generated without the draft."""
        drafting = sequence.drafting
        if self._wants_hidden and (drafting.num_hidden < len(sequence.token_ids) - 1 or not drafting.hidden_states):
            return
        started = time.perf_counter()
        hidden_states = self._hidden_since_last_ask(sequence)
        drafting.hidden_states.clear()
        right = self._asked.listen(self._ask(sequence, 1, hidden_states), count)
        drafting.lengths.heard(right, time.perf_counter() - started)

    def _propose(self, sequences: abc.Sequence[Sequence], limits: list[int], isolate: bool) -> list[Proposal]:
        if not any(limits):
            return [NOTHING] * len(sequences)
        asks = [
            self._ask(sequence, limit, self._hidden_since_last_ask(sequence))
            for sequence, limit in zip(sequences, limits)
            if limit
        ]
        try:
            answers = iter(self._asked.propose(asks))
        except Exception:  # a distribution that raises will raise again in `_decide`, for its sequence alone
            if not isolate:
                raise
            for ask in asks:
                self._asked.release(ask.sequence)
            answers = iter([NOTHING] * len(asks))
        proposals = []
        for sequence, limit in zip(sequences, limits):
            if not limit:
                proposals.append(NOTHING)
                continue
            proposal = next(answers)
            sequence.drafting.hidden_states.clear()
            if not (proposal.is_chain or self.kv.holds_trees):
                proposal = proposal.first_branch()
            proposals.append(proposal.cut(min(MAX_NODES, self._room(sequence)), limit))
        return proposals

    def _batch(
        self,
        sequences: abc.Sequence[Sequence],
        proposals: list[Proposal],
        starts: list[int],
        chunks: abc.Sequence[Chunk],
    ) -> Batch:
        sent, parents = [], []
        for sequence, proposal, start in zip(sequences, proposals, starts):
            new = sequence.token_ids[start:]
            sent.append([*new, *proposal.tokens])
            tree = [*range(-1, len(new) - 1), *(len(new) + parent for parent in proposal.parents)]
            parents.append(None if proposal.is_chain else tree)
        return self.step.batch(
            sequences,
            sent,
            starts,
            chunks,
            parents=None if all(tree is None for tree in parents) else parents,
            logits=[len(proposal) + 1 for proposal in proposals],
        )

    def _decide(
        self, sequence: Sequence, proposal: Proposal, rows: torch.Tensor, best: list[int] | None
    ) -> tuple[Verdict, torch.Tensor | None]:
        """(Verdict, the target's distributions where they are kept). best: the argmax of each row, where all
        sequences take it."""
        if best is not None:
            return verify_greedy(proposal, best), None
        token_ids, sampler = sequence.token_ids, sequence.sampler

        def text_of(row: int) -> list[int]:
            return [*token_ids, *(proposal.tokens[n] for n in proposal.path_to(row - 1))]

        if sampler.distribution.greedy:
            return verify_greedy(proposal, sampler.distribution.best(rows, text_of)), None
        distributions = sampler.distribution.probabilities(rows, text_of)
        return verify(proposal, distributions, sampler.draws), distributions if self.keep_distributions else None

    def _emit(
        self, sequence: Sequence, proposal: Proposal, verdict: Verdict, rows: torch.Tensor
    ) -> tuple[NewToken, ...]:
        """Append accepted tokens, the one after them, and those that a grammar forces, until the sequence ends."""
        if not len(proposal):
            return self.step.emit(sequence, verdict.token, rows[0])
        tokens = [*(proposal.tokens[node] for node in verdict.path), verdict.token]
        log_probs: list[float | None] = [None] * len(tokens)
        if self.step.log_probs:  # of each token, from the row of the one before it
            judged = rows[[0, *(node + 1 for node in verdict.path)]]
            log_probs = judged.log_softmax(dim=-1)[range(len(tokens)), tokens].tolist()
        emitted = []
        for token, log_prob, node in zip(tokens, log_probs, (*verdict.path, None)):
            if node is None:
                emitted.append(NewToken(token, log_prob, "target", "bonus" if verdict.bonus else "correction"))
            else:
                origin = proposal.origins[node] if proposal.origins else self._asked.name
                emitted.append(NewToken(token, log_prob, origin, "draft"))
            if sequence.append(token):
                return tuple(emitted)
        return (*emitted, *(forced_tokens(sequence) if sequence.guide is not None else ()))

    def _keep_accepted(self, sequence: Sequence, proposal: Proposal, verdict: Verdict) -> None:
        """Cut all but the accepted nodes from the cache. To be called before tokens are appended."""
        length = len(sequence.token_ids)
        if self.kv.lengths[sequence.id] <= length:
            return  # a kv without a cache
        if proposal.is_chain:
            self.kv.truncate(sequence.id, length + len(verdict.path))
        else:
            self.kv.keep(sequence.id, length, [length + node for node in verdict.path])

    @staticmethod
    def _keep_hidden(sequence: Sequence, verdict: Verdict, hidden: torch.Tensor, start: int) -> None:
        """hidden [n, d]: of this sequence's tokens from position `start` on, then of its drafted ones."""
        drafting = sequence.drafting
        if drafting.num_hidden < start:
            return  # a prefix from the cache has no hidden states: nothing is drafted
        new = len(sequence.token_ids) - start
        rows = [*range(drafting.num_hidden - start, new), *(new + node for node in verdict.path)]
        drafting.hidden_states.append(hidden[rows])
        drafting.num_hidden += len(rows)

    def _keep_hidden_of_chunk(self, chunk: Chunk, hidden: torch.Tensor) -> None:
        """hidden [n, d]: of a part of a prompt."""
        if chunk.sequence is None:
            return
        drafting = chunk.sequence.drafting
        if self.kv.lengths[chunk.id] - len(hidden) == drafting.num_hidden:
            drafting.hidden_states.append(hidden)
            drafting.num_hidden += len(hidden)
