"""How many tokens to draft: a fixed number, a moving threshold of confidence, or what measured best. 0 is a plain step.

A policy may look at all that has happened and at what it drafted itself, and what was drafted stays in the proposal: that
keeps the output's law (see `rule.grow`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from workbench.errors import WorkbenchError, check_between, check_whole, unknown
from workbench.speculation.theory import expected_tokens_by_position


class Outcome(NamedTuple):
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

    It keeps the acceptance by position (newer rounds count more) and what drafts and verifications took, in plain steps of
    the same moment, and takes the K of the most tokens a step's time. When no K beats plain steps by `margin` the draft is
    switched off, and what is spent on it from then on is at most `allowance` of all the time so far. For that the draft is
    heard: it reads what was written without it, in one pass, and says which of the tokens it would have guessed, which is
    some thirty answers for the price of one drafted token. It is also tried, for two rounds of one token: in the first it
    reads what it has missed, so that round's draft time says nothing about the next. A trial is paid by what it is expected
    to cost; nothing is expected to be kept of a draft that cannot be heard. The first round of every depth, a warm-up, is
    not charged.
    Times are of the machine and the pair, and are shared by all copies; acceptance is of the text, and a new text begins
    with what the others had.
    """

    def __init__(
        self, *, most: int = 8, memory: float = 0.95, margin: float = 0.05, allowance: float = 0.006
    ) -> None:
        self.most = check_whole("most", most, 1)
        self.memory = check_between("memory", memory, 0, 1)
        self.margin = check_between("margin", margin, 0, 1)
        self.allowance = check_between("allowance", allowance, 0, 1)
        self._half = self.allowance / 2  # for listening, and as much for losing rounds
        self.shared = Experience()
        self._counts = [(0.0, 0.0)] * most  # discounted: tokens at this position that were kept, and tried
        self.chosen: list[int] = []  # K of each round
        self._caught_up = False  # the draft has read the text so far
        self._trial = 0  # rounds of a trial still to come
        self._rest = 0  # plain rounds before it is thought about again, which takes time too
        self._unheard = 0  # tokens that were written without the draft
        # of this text, or heard; K is at most one more: a text unlike the others costs little
        self._accepted = 0

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
        """Tokens in the time of a plain step at K, by what was measured; None while a time is missing."""
        steps = self.shared.steps_of_round(K)
        return None if steps is None else expected_tokens_by_position(self.rates()[:K]) / steps

    def limit(self) -> int:
        self.chosen.append(self._limit())
        return self.chosen[-1]

    def _limit(self) -> int:
        if self.shared.elapsed <= LISTEN_EVERY and self.shared.can_be_heard is None:
            return 0  # heard first, which costs less than being tried
        if not self.shared.knows_plain:
            return 0
        if self._trial:
            self._trial -= 1
            return 1
        if self._rest:
            self._rest -= 1
            return 0
        rounds = FIRST_TRIAL
        if self.shared.measured:
            best = max(range(1, self.most + 1), key=self.predict)
            if self.predict(best) >= 1 + self.margin:
                if self.shared.since_plain >= REFRESH:
                    return 0  # what a plain step takes now
                return min(best, 1 + self._accepted)
            rounds = TRIAL
            # of a token that is tried: what was heard, at worst none is kept
            kept = self.rates()[0] if self.shared.can_be_heard else 0.0
            cost = rounds * (self.shared.steps_of_round(1) - (1 + kept))
            missing = self.shared.lost + max(cost, 0) - self._half * self.shared.elapsed
            if missing > 0:  # each plain round earns its share
                self._rest = min(LONGEST_REST, int(missing / self._half)) if self._half else LONGEST_REST
                return 0
        self._trial = rounds - 1
        return 1

    def listens(self) -> int:
        if self._unheard < LISTEN_EVERY or self.shared.can_be_heard is False or not self.shared.knows_plain:
            return 0
        if self.shared.listened + self.shared.hearing > self._half * self.shared.elapsed:
            return 0
        return min(self._unheard, LISTEN_TO)

    def heard(self, right: Sequence[bool] | None, seconds: float) -> None:
        self._unheard, self._rest = 0, 0
        self.shared.add_hearing(right is not None, seconds)
        self._accepted += sum(right or ())
        for hit in right or ():
            self._counts = _fading(self._counts, [hit], self.memory)
            self.shared.tried([hit])

    def learn(self, outcome: Outcome) -> None:
        if outcome.plain:
            self._caught_up = False
            self._unheard += 1
            self.shared.add_plain(outcome.verify_s)
            return
        self._unheard = 0
        self._accepted += outcome.accepted
        self.shared.add_round(outcome, caught_up=self._caught_up, least=-self._half)
        self._caught_up = True
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
FIRST_TRIAL, TRIAL = 3, 2  # rounds; the first of all is a warm-up
PRIOR = 2.0  # what other texts had counts as two tries
DEEPER = 4.0  # and what the position before had as four: few rounds come so far, and who stops early never learns more
LONG_MEMORY = 0.995
LONGEST_REST = 16
REFRESH = 48  # rounds with a draft after which a plain step is timed again: the machine may be another by now
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
    """What copies of a policy share: what plain steps take, and drafted tokens and verifications against the plain steps
    of the same moment (a machine may be twice as slow a second later); the acceptance by position over all texts; and the
    account. Of the last times the lower quartile counts: of few that is the least, and what disturbs a time
    makes it longer; of many it is what they usually are.

    Times are in plain steps, but for `plain_s`, the seconds of one.
    """

    def __init__(self) -> None:
        self.lost = self.elapsed = 0.0  # against plain steps, and in all
        self.listened = 0.0
        self.can_be_heard: bool | None = None  # None: not known yet
        self.since_plain = 0  # rounds with a draft
        self._counts: list[tuple[float, float]] = []
        self._plain: deque[float] = deque(maxlen=KEPT_TIMES)  # seconds
        self._draft: deque[float] = deque(maxlen=KEPT_TIMES)  # a token
        self._hearing: deque[float] = deque(maxlen=KEPT_TIMES)
        self._verify: dict[int, deque[float]] = {}  # by the depth of the proposal: a tree grows with it

    def add_plain(self, seconds: float) -> None:
        """A plain round."""
        if self.since_plain >= REFRESH:
            self._plain.clear()
        self._plain.append(seconds)
        self.since_plain = 0
        self.elapsed += 1

    @property
    def plain_s(self) -> float | None:
        """Seconds of a plain step now; None before the first."""
        return _usual(self._plain) if self._plain else None

    def add_round(self, outcome: Outcome, *, caught_up: bool, least: float) -> None:
        """A round with a draft. caught_up: the draft had read the text but for the last round's tokens, so its time is that
        of drafting. least: share of all time that gains of long ago may pay for new losses.

        The first round of a depth is a warm-up: it is no measure, and it is not charged. Others are charged with what
        they usually take: what disturbed one of them would have disturbed plain steps too.
        """
        self.since_plain += 1
        plain_s = self.plain_s
        if plain_s is None:  # nothing to hold it against
            return
        draft, verify = outcome.draft_s / plain_s, outcome.verify_s / plain_s
        warm = outcome.drafted in self._verify
        if not warm:
            self._verify[outcome.drafted] = deque(maxlen=KEPT_TIMES)
        elif outcome.drafted:
            self._verify[outcome.drafted].append(verify)
            if caught_up:
                self._draft.append(draft / outcome.drafted)
        usual = self.steps_of_round(outcome.drafted) if outcome.drafted else None
        self.elapsed += draft + verify
        if warm:
            self.lost += (draft + verify if usual is None else usual) - (outcome.accepted + 1)
            self.lost = max(self.lost, least * self.elapsed)

    def add_hearing(self, can_be_heard: bool, seconds: float) -> None:
        """The first one is a warm-up too."""
        steps = seconds / self.plain_s
        if self.can_be_heard is not None:
            self._hearing.append(steps)
            self.listened += self.hearing
        self.elapsed += steps
        self.can_be_heard = can_be_heard

    def tried(self, trials: list[bool]) -> None:
        """[positions that a round came to] whether the token there was kept."""
        missing = len(trials) - len(self._counts)
        self._counts = _fading(self._counts + [(0.0, 0.0)] * missing, trials, LONG_MEMORY)

    def counts(self, most: int) -> list[tuple[float, float]]:
        """[most] (kept, tried) by position, discounted."""
        return (self._counts + [(0.0, 0.0)] * most)[:most]

    @property
    def hearing(self) -> float:
        """What one takes; 0 before it is known."""
        return _usual(self._hearing) if self._hearing else 0.0

    @property
    def knows_plain(self) -> bool:
        return bool(self._plain)

    @property
    def measured(self) -> bool:
        return bool(self._draft) and any(self._verify.values())

    def steps_of_round(self, K: int) -> float | None:
        """Plain steps that a round of K drafted tokens takes; None before the first. K = 0: 1. A verification of a depth
        that was never sent is taken to be that of the nearest."""
        if K == 0:
            return 1.0 if self.knows_plain else None
        if not self.measured:
            return None
        nearest = min(
            (d for d, times in self._verify.items() if times), key=lambda depth: (abs(depth - K), depth)
        )
        return K * _usual(self._draft) + _usual(self._verify[nearest])


def _usual(times: deque[float]) -> float:
    """The lower quartile."""
    return sorted(times)[(len(times) - 1) // 4]


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
