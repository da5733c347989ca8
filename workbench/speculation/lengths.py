"""How many tokens to draft: a fixed number, a moving threshold of confidence, or what measured best. 0 is a plain step.

A policy may look at all that has happened and at what it drafted itself, and what was drafted stays in the proposal: that
keeps the output's law (see `rule.grow`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.errors import WorkbenchError, check_between, check_whole, unknown
from workbench.speculation.theory import expected_tokens_by_position


@dataclass(frozen=True)
class Outcome:
    """What a policy learns from: one round of one text."""

    drafted: int  # depth of the proposal
    accepted: int
    confidences: tuple[float, ...]  # of the drafted tokens along the first branch; may be empty
    draft_s: float
    verify_s: float
    rows: int  # that the target processed
    plain: bool  # nothing was asked of the draft


class LengthPolicy(ABC):
    """State of one text: make a fresh one for each (`copy`)."""

    @abstractmethod
    def limit(self) -> int:
        """How many tokens deep to draft now, at most. 0: a plain step."""
        ...

    def go_on(self, confidence: float) -> bool:
        """After a drafted token of this probability: draft another?"""
        return True

    def learn(self, outcome: Outcome) -> None:
        """What came of the round."""
        return None

    def listens(self) -> int:
        """After a `limit` of 0: of how many of the last tokens the policy would like to hear whether the draft would have
        guessed them; 0: none."""
        return 0

    def heard(self, right: Sequence[bool] | None, seconds: float) -> None:
        """Whether the draft would have guessed each of the last tokens (None: it cannot say), and how long it took to find
        out."""
        return None

    @abstractmethod
    def copy(self) -> LengthPolicy:
        """The same policy that has learned nothing yet."""
        ...


class Fixed(LengthPolicy):
    """K tokens in every round."""

    def __init__(self, K: int = 4) -> None:
        self.K = check_whole("K", K, 1)

    def limit(self) -> int:
        return self.K

    def copy(self) -> Fixed:
        return Fixed(self.K)


class Threshold(LengthPolicy):
    """Draft until the probability of all that was drafted, by the draft itself, falls under a threshold that moves.

    After a rejection the threshold moves toward the probability the draft had given up to there (it was too sure of
    itself); where all was accepted it falls by `step` (there was room for more); it stays within [low, high].
    """

    def __init__(
        self,
        threshold: float = 0.4,
        *,
        most: int = 16,
        step: float = 0.05,
        pull: float = 0.3,
        low: float = 0.02,
        high: float = 0.95,
    ) -> None:
        self.low, self.high = check_between("low", low, 0, 1), check_between("high", high, low, 1)
        self.threshold = self._first = check_between("threshold", threshold, low, high)
        self.most, self.step = check_whole("most", most, 1), check_between("step", step, 0, 1)
        self.pull = check_between("pull", pull, 0, 1)
        self._held = 1.0
        self.history: list[float] = []  # the threshold of each round

    def limit(self) -> int:
        self._held = 1.0
        self.history.append(self.threshold)
        return self.most

    def go_on(self, confidence: float) -> bool:
        self._held *= float(confidence)
        return self._held >= self.threshold

    def learn(self, outcome: Outcome) -> None:
        if outcome.plain or not outcome.drafted:
            return
        if outcome.accepted == outcome.drafted:
            moved = self.threshold - self.step
        else:
            reached = math.prod(outcome.confidences[: outcome.accepted + 1])
            moved = self.threshold + self.pull * (reached - self.threshold)
        self.threshold = min(self.high, max(self.low, moved))

    def copy(self) -> Threshold:
        return Threshold(
            self._first, most=self.most, step=self.step, pull=self.pull, low=self.low, high=self.high
        )


class Dynamic(LengthPolicy):
    """The K that measured best, and none where every K loses.

    It keeps the acceptance by position (newer rounds count more) and the time of plain steps, drafts and verifications,
    and takes the K of the most tokens a second. When no K beats plain steps by `margin` the draft is switched off, and what
    is spent on it from then on is at most `allowance` of all the time so far. For that the draft is heard: it reads what was
    written without it, in one pass, and says which of the tokens it would have guessed, which is some thirty answers for the
    price of one drafted token. It is also tried, for two rounds of one token: in the first it reads what it has missed, so that
    round's draft time says nothing about the next. A trial is paid by what it is expected to cost; nothing is expected to be
    kept of a draft that cannot be heard.
    Times are of the machine and the pair, and are shared by all copies; acceptance is of the text, and a new text begins
    with what the others had.
    """

    def __init__(
        self, *, most: int = 8, memory: float = 0.9, margin: float = 0.05, allowance: float = 0.01
    ) -> None:
        self.most = check_whole("most", most, 1)
        self.memory = check_between("memory", memory, 0, 1)
        self.margin = check_between("margin", margin, 0, 1)
        self.allowance = check_between("allowance", allowance, 0, 1)
        self.shared = Experience()
        self._counts = [(0.0, 0.0)] * most  # discounted: tokens at this position that were kept, and tried
        self.chosen: list[int] = []  # K of each round
        self._caught_up = False  # the draft has read the text so far
        self._trial = 0  # rounds of a trial still to come
        self._rest = 0  # plain rounds before it is thought about again, which takes time too
        self._unheard = 0  # tokens that were written without the draft
        self._accepted = 0  # of this text; K is at most one more: a text unlike the others costs little

    def rates(self) -> list[float]:
        """Acceptance at each position, given that all before it were accepted: of this text, beginning with what other
        texts had, and where nothing was tried with that of the position before."""
        found, last, weight = [], FIRST_GUESS, PRIOR
        for (hits, tries), (others_hits, others_tries) in zip(self._counts, self.shared.counts(self.most)):
            last = (others_hits + weight * last) / (others_tries + weight)
            last = (hits + weight * last) / (tries + weight)
            found.append(last)
            weight = DEEPER
        return found

    def predict(self, K: int) -> float | None:
        """Tokens a second at K, by what was measured; None while a time is missing. 0: plain steps."""
        if K == 0:
            plain = self.shared.plain
            return None if plain is None else 1 / plain
        seconds = self.shared.of_round(K)
        return None if seconds is None else expected_tokens_by_position(self.rates()[:K]) / seconds

    def limit(self) -> int:
        self.chosen.append(self._limit())
        return self.chosen[-1]

    def _limit(self) -> int:
        if self.shared.plain is None:
            return 0
        plain = 1 / self.shared.plain
        if self._trial:
            self._trial -= 1
            return 1
        if self._rest:
            self._rest -= 1
            return 0
        rounds = FIRST_TRIAL
        if self.shared.parts is not None:
            best, speed = self._best()
            if speed >= (1 + self.margin) * plain:
                return min(best, 1 + self._accepted)
            rounds = TRIAL
            # of a token that is tried: what was heard, at worst none is kept
            kept = self.rates()[0] if self.shared.can_be_heard else 0.0
            cost = rounds * (self.shared.of_round(1) - (1 + kept) * self.shared.plain)
            missing = self.shared.lost_s + max(cost, 0) - self.allowance * self.shared.elapsed_s
            if missing > 0:  # each plain round earns its share
                earned = self.allowance * self.shared.plain
                self._rest = min(LONGEST_REST, int(missing / earned)) if earned else LONGEST_REST
                return 0
        self._trial = rounds - 1
        return 1

    def listens(self) -> int:
        if self.shared.plain is None or self.shared.can_be_heard is False or self._unheard < LISTEN_EVERY:
            return 0
        expected = self.shared.hearing_s or 0.0
        if (
            self.shared.lost_s + expected > self.allowance * self.shared.elapsed_s
            and self.shared.can_be_heard
        ):
            return 0
        return min(self._unheard, LISTEN_TO)

    def heard(self, right: Sequence[bool] | None, seconds: float) -> None:
        self.shared.can_be_heard = right is not None
        self.shared.hearing_s, self._unheard, self._rest = seconds, 0, 0
        self.shared.elapsed_s += seconds
        self.shared.lost_s += seconds
        for hit in right or ():
            self._counts = _fading(self._counts, [hit], self.memory)
            self.shared.tried([hit])

    def _best(self) -> tuple[int, float]:
        """The K of the most tokens a second, and how many that are: `predict` of every K, in one go."""
        draft_s, verify_s = self.shared.parts
        tokens = kept = 1.0
        best = (0, 0.0)
        for K, rate in enumerate(self.rates(), start=1):
            kept *= rate
            tokens += kept
            best = max(best, (K, tokens / (K * draft_s + verify_s)), key=lambda one: one[1])
        return best

    def learn(self, outcome: Outcome) -> None:
        seconds = outcome.draft_s + outcome.verify_s
        self.shared.add(outcome, caught_up=self._caught_up)
        self._caught_up = not outcome.plain
        self.shared.elapsed_s += seconds
        if outcome.plain:
            self._unheard += 1
            return
        self._unheard = 0
        self._accepted += outcome.accepted
        if self.shared.plain is not None:
            self.shared.lost_s += seconds - (outcome.accepted + 1) * self.shared.plain
            # gains of long ago pay for no new losses
            self.shared.lost_s = max(self.shared.lost_s, -self.allowance * self.shared.elapsed_s)
        trials = [
            at < outcome.accepted for at in range(min(outcome.drafted, outcome.accepted + 1, self.most))
        ]
        self._counts = _fading(self._counts, trials, self.memory)
        self.shared.tried(trials)

    def copy(self) -> Dynamic:
        new = Dynamic(most=self.most, memory=self.memory, margin=self.margin, allowance=self.allowance)
        new.shared = self.shared
        return new


FIRST_GUESS = 0.7  # acceptance before anything was tried: high enough that everything is
KEPT_TIMES = 16
FIRST_TRIAL, TRIAL = 3, 2  # rounds: the first passes of a size take longer than those that follow
PRIOR = 1.0  # what other texts had counts as one try
DEEPER = 4.0  # and what the position before had as four: few rounds come so far, and who stops early never learns more
LONG_MEMORY = 0.995
LONGEST_REST = 16
LISTEN_EVERY, LISTEN_TO = 16, 32  # plain rounds between two hearings at least; tokens of one


def _fading(
    counts: list[tuple[float, float]], trials: list[bool], memory: float
) -> list[tuple[float, float]]:
    """(kept, tried) by position, one round later. What was not tried for long is forgotten, and so tried again."""
    older = [(memory * kept, memory * tried) for kept, tried in counts]
    return [
        (kept + trials[at], tried + 1) if at < len(trials) else (kept, tried)
        for at, (kept, tried) in enumerate(older)
    ]


class Experience:
    """What copies of a policy share: the least of the last times of plain steps, of a drafted token and of a verification,
    and the acceptance by position over all texts."""

    def __init__(self) -> None:
        self.lost_s = self.elapsed_s = 0.0  # against plain steps, and in all
        self.can_be_heard: bool | None = None  # None: not known yet
        self.hearing_s: float | None = None  # what it took last time
        self._counts: list[tuple[float, float]] = []
        self._plain: deque[float] = deque(maxlen=KEPT_TIMES)
        self._draft: deque[float] = deque(maxlen=KEPT_TIMES)  # a token
        self._verify: deque[float] = deque(maxlen=KEPT_TIMES)

    def add(self, outcome: Outcome, *, caught_up: bool) -> None:
        """caught_up: the draft had read the text but for the last round's tokens, so its time is that of drafting."""
        if outcome.plain:
            self._plain.append(outcome.verify_s)
        elif outcome.drafted:
            self._verify.append(outcome.verify_s)
            if caught_up:
                self._draft.append(outcome.draft_s / outcome.drafted)

    def tried(self, trials: list[bool]) -> None:
        """[positions that a round came to] whether the token there was kept."""
        missing = len(trials) - len(self._counts)
        self._counts = _fading(self._counts + [(0.0, 0.0)] * missing, trials, LONG_MEMORY)

    def counts(self, most: int) -> list[tuple[float, float]]:
        """[most] (kept, tried) by position, discounted."""
        return (self._counts + [(0.0, 0.0)] * most)[:most]

    @property
    def plain(self) -> float | None:
        """Seconds of a step without a draft; None before the first."""
        return _typical(self._plain)

    @property
    def parts(self) -> tuple[float, float] | None:
        """Seconds of a drafted token, and of a verification, which counts the same for every K; None before the first."""
        if not self._draft or not self._verify:
            return None
        return _typical(self._draft), _typical(self._verify)

    def of_round(self, K: int) -> float | None:
        """Seconds of a round of K drafted tokens."""
        return None if self.parts is None else K * self.parts[0] + self.parts[1]


def _typical(values: deque[float]) -> float | None:
    """The least: what disturbs a time only ever makes it longer, and the first pass of a new size is no measure."""
    return min(values, default=None)


POLICIES: dict[str, Callable[[], LengthPolicy]] = {"threshold": Threshold, "dynamic": Dynamic}


def length_policy(given: int | str | LengthPolicy) -> LengthPolicy:
    """A fresh policy: K, "threshold", "dynamic", or one of your own, copied. Raises WorkbenchError for anything else."""
    if isinstance(given, LengthPolicy):
        return given.copy()
    if isinstance(given, str):
        if given not in POLICIES:
            raise unknown("draft length policy", given, POLICIES)
        return POLICIES[given]()
    if isinstance(given, int) and not isinstance(given, bool):
        return Fixed(given)
    raise WorkbenchError(
        f"draft_length is a whole number, {', '.join(map(repr, POLICIES))} or a LengthPolicy, got {given!r}"
    )
