"""Rounds of speculation on a real model: propose, verify all sequences in one flat batch, keep what was accepted.

    tokens    … a b c            all but c is in the cache
    proposal        d e f        drafted
    batch         c d e f        one forward: K + 1 rows, a distribution after each
    accepted        d e          by the rows of c and d; f is rejected, and the row of e gives the next token, x
    tokens    … a b c d e x      the cache keeps … c d e; the entry of f is cut

It wraps a `decoding.step.Step`; a round without drafted tokens is exactly that step.

With `isolate` (an engine's way) no error of a draft stops a step. What raises when a draft filters its logits for one
sequence (NaN, a filter) ends the drafting for that sequence. Whatever else a draft or a length policy raises turns
drafts off: `why_off` says why, `errors` counts, and `new_errors` gives what came since it was last asked.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple, TypeVar, cast

import torch

from workbench.decoding.jump import forced_tokens
from workbench.decoding.log_probs import log_probs_of
from workbench.decoding.sampling import TextOf, TokenDistribution
from workbench.decoding.sequence import LogProb, NewToken, Sequence
from workbench.decoding.step import Chunk, Step, best_of_all
from workbench.errors import WorkbenchError, check_whole, shown
from workbench.kv.contract import DraftingKV
from workbench.models.batch import Batch
from workbench.speculation.drafts.contract import Ask, Draft
from workbench.speculation.lengths import Fixed, LengthPolicy, Outcome
from workbench.speculation.proposal import NOTHING, Proposal
from workbench.speculation.rule import Rows, Verdict, verify, verify_greedy

MAX_NODES = 64  # of a tree, in one round
Result = TypeVar("Result")


@dataclass
class Drafting:
    """The state of speculation for one sequence, as `Sequence.drafting`."""

    lengths: LengthPolicy
    begun: bool = False  # the prompt went through the target
    max_tokens: int | None = None  # that a round may draft, where a scheduler counts them; None: as many as fit
    hidden_states: list[torch.Tensor] = field(default_factory=list)  # of cached tokens, not yet given to the draft
    num_hidden: int = 0  # of the tokens before this one the hidden states were collected, or are not to be had
    drafted: int = 0  # tokens, in all rounds
    accepted: int = 0
    error: Exception | None = None  # of drafting for this sequence, which goes on without

    @classmethod
    def after(cls, first: Drafting | None, lengths: LengthPolicy) -> Drafting:
        """Of a new sequence. first: of the one that it was forked from, whose prompt it shares."""
        if first is None:
            return cls(lengths)
        return cls(lengths, hidden_states=list(first.hidden_states), num_hidden=first.num_hidden)

    def forget(self) -> None:
        """To be called when the keys and values of the sequence are gone: the draft starts from its beginning again."""
        self.hidden_states.clear()
        self.num_hidden = 0


class Round(NamedTuple):
    """What one round did for one sequence."""

    emitted: tuple[NewToken, ...]
    proposal: Proposal
    verdict: Verdict | None  # None with an error
    p: Any  # None or [nodes + 1, V] the target's distributions, where they were asked for
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
        self.why_off, self.errors = "", 0
        self._new_errors: list[str] = []
        self._name = "" if draft is None else draft.name

    @property
    def _wants_hidden(self) -> bool:
        return self.draft is not None and self.draft.wants_hidden_states

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
        limits = self._guarded(isolate, self._limits, sequences) or [0] * len(sequences)
        if any(limits) or self._wants_hidden or self.keep_distributions:
            rounds = self._round(sequences, limits, chunks, isolate)
        else:
            rounds = self._plain_round(sequences, chunks, isolate)
        for sequence, limit, done in zip(sequences, limits, rounds):
            drafting = sequence.drafting
            if drafting.begun and done.error is None:
                self._guarded(isolate, self._learn, drafting.lengths, done, not limit)
            drafting.begun = True
            drafting.drafted += len(done.proposal)
            drafting.accepted += done.accepted
        return rounds

    @property
    def _asked(self) -> Draft:
        """The draft, where there is one to ask."""
        assert self.draft is not None
        return self.draft

    def own_lengths(self, policy: LengthPolicy) -> LengthPolicy:
        """A sequence's own copy of a policy. Where it cannot be copied drafts are off, and any policy will do."""

        def copied() -> LengthPolicy:
            if not isinstance(own := policy.copy(), LengthPolicy):
                raise WorkbenchError(f"`copy` of a length policy must give a LengthPolicy, got {shown(own)}")
            return own

        return self._guarded(True, copied) or Fixed()

    def release(self, sequence_id: Hashable) -> None:
        """Forget a sequence in both caches."""
        self.step.release(sequence_id)
        if self.draft is not None:
            self.draft.release(sequence_id)

    def forget(self, sequence: Sequence) -> None:
        """The draft drops what it keeps of a sequence, whose keys and values are gone."""
        sequence.drafting.forget()
        if self.draft is not None:
            self._guarded(True, self.draft.release, sequence.id)

    def new_errors(self) -> tuple[str, ...]:
        """What was isolated since the last call, each error with whose it was."""
        new, self._new_errors = tuple(self._new_errors), []
        return new

    def _guarded(self, isolate: bool, call: Callable[..., Result], *given: Any) -> Result | None:
        """What a part of the draft answers. isolate: None where it raises, and drafts are off from then on."""
        try:
            return call(*given)
        except Exception as error:
            if not isolate:
                raise
            self.why_off = self._note(f"draft {self._name} is off", error)
            self.draft = None
            return None

    def _note(self, what: str, error: Exception) -> str:
        self.errors += 1
        self._new_errors.append(f"{what}: {type(error).__name__}: {error}")
        return self._new_errors[-1]

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
        proposals = self._propose(sequences, limits, isolate) if any(limits) else [NOTHING] * len(sequences)
        drafted = time.perf_counter()
        starts = [self.step.start(sequence) for sequence in sequences]
        batch = self._batch(sequences, proposals, starts, chunks)
        logits, hidden = self._forward(batch)
        best = best_of_all(sequences, logits)
        rows_of = [logits[b - len(one) - 1 : b] for one, b in zip(proposals, accumulate(len(p) + 1 for p in proposals))]
        sent = [b - a for a, b in pairwise(batch.query_starts)]
        if best is None:
            self._send_again(sequences, proposals, starts, rows_of, hidden, sent)
        results: list[tuple[tuple[NewToken, ...], Proposal, Verdict | None, Rows | None, Exception | None]] = []
        observed_s, taken = 0.0, iter(best or ())
        for index, (sequence, proposal, rows) in enumerate(zip(sequences, proposals, rows_of)):
            length = len(sequence.token_ids)
            try:
                best_rows = None if best is None else list(islice(taken, len(rows)))
                verdict, distributions = self._decide(sequence, proposal, rows, best_rows)
                if len(proposal) and self.draft is not None:
                    observing = time.perf_counter()
                    self._guarded(isolate, self.draft.observe, sequence.id, proposal, rows)
                    observed_s += time.perf_counter() - observing
                if hidden is not None:
                    self._keep_hidden(sequence, verdict, hidden[index], starts[index])
                if len(proposal):
                    self._keep_accepted(sequence, proposal, verdict)
                emitted = self._emit(sequence, proposal, verdict, rows)
            except Exception as error:  # of a filter, a grammar, a learner's part: it ends the sequence
                if not isolate:
                    raise
                del sequence.token_ids[length:]
                results.append(((), NOTHING, None, None, error))
                continue
            results.append((emitted, proposal, verdict, distributions, None))
        if hidden is not None:
            for chunk, rows in zip(chunks, hidden[len(sequences) :]):
                self._keep_hidden_of_chunk(chunk, rows)
        verified = time.perf_counter()
        draft_s, verify_s = drafted - started + observed_s, verified - drafted - observed_s
        return [
            Round(emitted, proposal, verdict, p, draft_s, verify_s, rows, error)
            for rows, (emitted, proposal, verdict, p, error) in zip(sent, results)
        ]

    # -- the parts of a round ------------------------------------------------------------------------------------

    def _limits(self, sequences: abc.Sequence[Sequence]) -> list[int]:
        limits = [self._limit(sequence) for sequence in sequences]
        for sequence, limit in zip(sequences, limits):
            drafting = sequence.drafting
            listens = not limit and self.draft is not None and drafting.begun and drafting.error is None
            if listens and (count := drafting.lengths.listens()):
                self._listen(sequence, count)
        return limits

    def _limit(self, sequence: Sequence) -> int:
        """Depth to draft. Nothing in a prompt's own round, and nothing for the last token wanted."""
        drafting = sequence.drafting
        if self.draft is None or not drafting.begun or drafting.error is not None:
            return 0
        room = min(sequence.remaining - 1, self._room(sequence))
        if self._wants_hidden and drafting.num_hidden < len(sequence.token_ids) - 1:
            room = 0  # hidden states of this round are missing: of tokens that a grammar forced, or after a swap
        return 0 if room < 1 else min(check_whole("`limit` of a length policy", drafting.lengths.limit(), 0), room)

    @staticmethod
    def _learn(lengths: LengthPolicy, done: Round, plain: bool) -> None:
        lengths.learn(done.outcome(plain=plain))

    def _room(self, sequence: Sequence) -> int:
        """Nodes for which the kv has room, after the tokens that are sent anyway."""
        not_cached = len(sequence.token_ids) - self.step.start(sequence)
        room = self.kv.draft_room(sequence.id) - max(0, not_cached - 1)
        max_tokens = sequence.drafting.max_tokens
        return room if max_tokens is None else min(room, max_tokens)

    def _ask(self, sequence: Sequence, limit: int, hidden_states: torch.Tensor | None, isolate: bool = False) -> Ask:
        distribution = sequence.sampler.distribution
        return Ask(
            sequence.id,
            sequence.token_ids,
            limit,
            min(MAX_NODES, self._room(sequence)),
            _Isolated(distribution, sequence.drafting) if isolate else distribution,
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
        asks = [
            self._ask(sequence, limit, self._hidden_since_last_ask(sequence), isolate)
            for sequence, limit in zip(sequences, limits)
            if limit
        ]
        answers = iter(self._guarded(isolate, self._answers, asks) or [NOTHING] * len(asks))
        proposals = []
        for sequence, limit in zip(sequences, limits):
            if not limit:
                proposals.append(NOTHING)
                continue
            proposal = next(answers)
            sequence.drafting.hidden_states.clear()
            if error := sequence.drafting.error:
                proposal = NOTHING
                self._note(f"draft {self._name} is off for request {sequence.id!r}", error)
                self.forget(sequence)
            if not (proposal.is_chain or self.kv.holds_trees):
                proposal = proposal.first_branch()
            proposals.append(proposal.cut(min(MAX_NODES, self._room(sequence)), limit))
        return proposals

    def _answers(self, asks: list[Ask]) -> list[Proposal]:
        """What the draft proposes. Raises WorkbenchError for what cannot be verified."""
        proposals, vocab_size = self._asked.propose(asks), self.model.config.vocab_size
        if not isinstance(proposals, abc.Sequence) or not all(isinstance(one, Proposal) for one in proposals):
            raise WorkbenchError(f"it must answer with a list of Proposals, got {proposals!r:.80}")
        if len(proposals) != len(asks):
            raise WorkbenchError(f"it gave {len(proposals)} proposals for {len(asks)} sequences")
        for ask, proposal in zip(asks, proposals):
            proposal.check(vocab_size, drawn=not ask.distribution.greedy)
        return list(proposals)

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        return self.step.forward_with_hidden(batch) if self._wants_hidden else (self.step.forward(batch), None)

    def _send_again(
        self,
        sequences: abc.Sequence[Sequence],
        proposals: list[Proposal],
        starts: list[int],
        rows_of: list[torch.Tensor],
        hidden: list[torch.Tensor] | None,
        sent: list[int],
    ) -> None:
        """A plain round for each sequence that has a NaN in its rows. A drafted token may have brought it, which would
        never have been sent otherwise, and its values reach the rows beside it (0 · NaN). Changes the lists."""
        spoiled = [n for n, one in enumerate(proposals) if len(one) and not rows_of[n].amax(dim=-1).isfinite().all()]
        if not spoiled:
            return
        for n in spoiled:
            proposals[n] = NOTHING
            if self.step.start(sequences[n]) > starts[n]:
                self.kv.truncate(sequences[n].id, starts[n])
        again = [sequences[n] for n in spoiled]
        batch = self._batch(again, [NOTHING] * len(again), [starts[n] for n in spoiled], ())
        logits, new_hidden = self._forward(batch)
        for at, (n, (a, b)) in enumerate(zip(spoiled, pairwise(batch.query_starts))):
            rows_of[n] = logits[at : at + 1]
            sent[n] += b - a
            if hidden is not None and new_hidden is not None:
                hidden[n] = new_hidden[at]

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
    ) -> tuple[Verdict, Rows | None]:
        """(Verdict, the target's distributions where they are kept). best: the argmax of each row, where all
        sequences take it. Where filters go row by row, those behind a rejected token are never asked for."""
        if best is not None:
            return verify_greedy(proposal, best), None
        token_ids, distribution, draws = sequence.token_ids, sequence.sampler.distribution, sequence.sampler.draws
        decide = distribution.best if distribution.greedy else distribution.probabilities

        def text_of(row: int) -> list[int]:
            return [*token_ids, *(proposal.tokens[n] for n in proposal.path_to(row - 1))]

        decided: Any
        if distribution.row_by_row:
            decided = _WhenAsked(lambda row: decide(rows[row : row + 1], lambda _: text_of(row))[0])
        else:
            decided = decide(rows, text_of)
        if distribution.greedy:
            return verify_greedy(proposal, decided), None
        return verify(proposal, decided, draws), decided if self.keep_distributions else None

    def _emit(
        self, sequence: Sequence, proposal: Proposal, verdict: Verdict, rows: torch.Tensor
    ) -> tuple[NewToken, ...]:
        """Append accepted tokens, the one after them, and those that a grammar forces, until the sequence ends."""
        if not len(proposal):
            return self.step.emit(sequence, verdict.token, rows[0])
        tokens = [*(proposal.tokens[node] for node in verdict.path), verdict.token]
        said = [LogProb(token, None) for token in tokens]
        if sequence.log_probs is not None:  # of each token, from the row of the one before it
            judged = rows[[0, *(node + 1 for node in verdict.path)]]
            said = log_probs_of(judged, tokens, sequence.log_probs)
        emitted = []
        for (token, log_prob, top), node in zip(said, (*verdict.path, None)):
            if node is None:
                emitted.append(NewToken(token, log_prob, "target", "bonus" if verdict.bonus else "correction", top))
            else:
                origin = proposal.origins[node] if proposal.origins else self._name
                emitted.append(NewToken(token, log_prob, origin, "draft", top))
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

    def _keep_hidden(self, sequence: Sequence, verdict: Verdict, hidden: torch.Tensor, start: int) -> None:
        """hidden [n, d]: of this sequence's tokens from position `start` on, then of its drafted ones."""
        drafting = sequence.drafting
        self._begin_hidden(sequence, start)
        new = len(sequence.token_ids) - start
        rows = [*range(drafting.num_hidden - start, new), *(new + node for node in verdict.path)]
        drafting.hidden_states.append(hidden[rows])
        drafting.num_hidden += len(rows)

    def _keep_hidden_of_chunk(self, chunk: Chunk, hidden: torch.Tensor) -> None:
        """hidden [n, d]: of a part of a prompt."""
        if chunk.sequence is None:
            return
        drafting, start = chunk.sequence.drafting, self.kv.lengths[chunk.id] - len(hidden)
        self._begin_hidden(chunk.sequence, start)
        if start == drafting.num_hidden:
            drafting.hidden_states.append(hidden)
            drafting.num_hidden += len(hidden)

    def _begin_hidden(self, sequence: Sequence, start: int) -> None:
        """Tokens that came from the prefix cache, or back from the host, have no hidden states: what the draft reads
        begins after them."""
        if sequence.drafting.num_hidden < start:
            if sequence.drafting.num_hidden:
                self.forget(sequence)
            sequence.drafting.num_hidden = start


class _WhenAsked:
    """Rows that are computed when they are first asked for."""

    def __init__(self, compute: Callable[[int], Any]) -> None:
        self._compute, self._rows = compute, dict[int, Any]()

    def __getitem__(self, row: int) -> Any:
        if row not in self._rows:
            self._rows[row] = self._compute(row)
        return self._rows[row]


class _Isolated(TokenDistribution):
    """A sequence's distribution as its draft sees it. What it raises is noted in the `Drafting`, so that the draft can
    go on with the other sequences; of this one the proposal is dropped, and what is answered here does not matter."""

    def __init__(self, inner: TokenDistribution, drafting: Drafting) -> None:
        vars(self).update(vars(inner))
        self._inner, self._drafting = inner, drafting

    def probabilities(self, logits: torch.Tensor, text_of: TextOf) -> torch.Tensor:
        return self._tried(self._inner.probabilities, logits, text_of, uniform(logits))

    def confidences(self, logits: torch.Tensor, text_of: TextOf) -> torch.Tensor:
        return self._tried(self._inner.confidences, logits, text_of, uniform(logits))

    def best(self, logits: torch.Tensor, text_of: TextOf) -> list[int]:
        return self._tried(self._inner.best, logits, text_of, [0] * len(logits))

    def _tried(self, call: Callable[..., Result], logits: torch.Tensor, text_of: TextOf, otherwise: Result) -> Result:
        try:
            return call(logits, text_of)
        except Exception as error:
            self._drafting.error = self._drafting.error or error
            return otherwise


def uniform(logits: torch.Tensor) -> torch.Tensor:
    """[n, V] float64 on the CPU: every token as probable as the others."""
    return torch.full(logits.shape, 1 / logits.shape[-1], dtype=torch.float64)
