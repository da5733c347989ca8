"""One request by rounds of speculation, as what a `decoding.loop.Stream` reads; and what became of the rounds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from workbench.decoding.sequence import NewToken
from workbench.decoding.sequence import Sequence as DecodedSequence
from workbench.speculation.engine import Round, Speculator


@dataclass(frozen=True)
class SpeculationStats:
    """What speculation did for one request."""

    rounds: int  # forwards of the target after the prompt's own
    plain_rounds: int  # of them without a draft
    # [depth] tokens proposed at each position of the first branch and deeper, by depth
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]  # [depth] of those rounds, how many accepted a token at this position
    reached: tuple[int, ...]  # [depth] how many rounds proposed a token there and accepted all before it
    tokens_per_round: tuple[int, ...]  # the histogram's raw numbers, one each round
    lengths: tuple[int, ...]  # depth of the proposal of each round
    rows_per_round: tuple[int, ...]  # that the target processed
    calls_saved: int  # tokens after the prompt's first, less target calls
    draft_calls: int
    draft_rows: int
    draft_s: float
    verify_s: float
    kinds: dict[str, int]  # tokens by kind: draft, correction, bonus, plain, jump

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Of the rounds that came to a position, the share that accepted there; as far as any came."""
        return tuple(a / r for a, r in zip(self.accepted, self.reached) if r)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over tried tokens, all positions; None when nothing was tried."""
        return sum(self.accepted) / sum(self.reached) if sum(self.reached) else None


@dataclass
class SpeculativeRunner:
    """Stands where a `ModelRunner` stands in a Stream: owns one sequence, counts, knows each token's
    log-probability."""

    speculator: Speculator
    sequence: DecodedSequence
    rounds: list[Round] = field(default_factory=list)
    emitted: list[NewToken] = field(default_factory=list)

    def __post_init__(self) -> None:
        draft = self.speculator.draft
        self._calls_before = (draft.model_calls, draft.rows_processed) if draft is not None else (0, 0)

    @property
    def vocab_size(self) -> int:
        return self.speculator.model.config.vocab_size

    @property
    def rows_processed(self) -> int:
        return self.speculator.rows_processed

    @property
    def model_calls(self) -> int:
        return self.speculator.model_calls

    def tokens(self) -> Iterator[int]:
        """Token by token; a round is run when its first token is asked for."""
        while self.sequence.end_reason() is None or not self.rounds:
            [done] = self.speculator.run([self.sequence])
            self.rounds.append(done)
            for token in done.emitted:
                self.emitted.append(token)
                yield token.token_id

    def log_prob(self, token_id: int) -> float | None:
        """Of the token that came last."""
        assert self.emitted[-1].token_id == token_id
        return self.emitted[-1].log_prob

    def origin(self) -> tuple[str, str]:
        """Who wrote the token that came last, and its kind."""
        return self.emitted[-1].origin, self.emitted[-1].kind

    def release(self) -> None:
        self.speculator.release(self.sequence.id)

    def clock(self) -> float:
        """Seconds, when all work handed to the device so far is done."""
        if self.speculator.model.device.type == "cuda":
            torch.cuda.synchronize(self.speculator.model.device)
        return time.perf_counter()

    def stats(self) -> SpeculationStats:
        draft, (calls, rows) = self.speculator.draft, self._calls_before
        used = (0, 0) if draft is None else (draft.model_calls - calls, draft.rows_processed - rows)
        return stats_of(self.rounds[1:], self.emitted, *used)


def stats_of(
    rounds: Sequence[Round], emitted: Sequence[NewToken], draft_calls: int, draft_rows: int
) -> SpeculationStats:
    """rounds: without the prompt's own."""
    deepest = max((done.proposal.depth for done in rounds), default=0)
    drafted, accepted, reached = ([0] * deepest for _ in range(3))
    for done in rounds:
        for depth in done.proposal.depths:
            drafted[depth - 1] += 1
        for at in range(min(done.accepted + 1, done.proposal.depth)):
            reached[at] += 1
            accepted[at] += at < done.accepted
    tokens = tuple(len(done.emitted) for done in rounds)
    return SpeculationStats(
        rounds=len(rounds),
        plain_rounds=sum(not len(done.proposal) for done in rounds),
        drafted=tuple(drafted),
        accepted=tuple(accepted),
        reached=tuple(reached),
        tokens_per_round=tokens,
        lengths=tuple(done.proposal.depth for done in rounds),
        rows_per_round=tuple(done.rows for done in rounds),
        calls_saved=sum(tokens) - len(rounds),
        draft_calls=draft_calls,
        draft_rows=draft_rows,
        draft_s=sum(done.draft_s for done in rounds),
        verify_s=sum(done.verify_s for done in rounds),
        kinds=dict(Counter(token.kind for token in emitted)),
    )
