"""How many tokens to draft: a fixed number, a moving threshold of confidence, or what measured best. 0: a plain step.

A policy may depend on everything so far, drafted tokens included, as long as drafted tokens stay in the proposal: this
keeps the output's distribution (see `rule.grow`).
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
    """What a policy learns from: one round of one sequence."""

    drafted: int  # depth of the proposal
    accepted: int
    confidences: tuple[float, ...]  # of the drafted tokens along the first branch; may be empty
    draft_s: float
    verify_s: float
    rows: int  # that the target processed
    plain: bool  # the draft was not asked


class LengthPolicy(ABC):
    """The state of one sequence: each needs its own `copy`."""

    @abstractmethod
    def limit(self) -> int:
        """The depth to draft in this round, at most. 0: a plain step."""
        ...

    def go_on(self, confidence: float) -> bool:
        """After a drafted token of this probability: draft another?"""
        return True

    def learn(self, outcome: Outcome) -> None:
        """Called after each round with its outcome."""
        return None

    def listens(self) -> int:
        """After a `limit` of 0: for how many of the last tokens `Draft.listen` shall tell whether the draft would have
        guessed them; 0: none."""
        return 0

    def heard(self, right: Sequence[bool] | None, seconds: float) -> None:
        """Called with the answer of `Draft.listen` (None: the draft cannot tell) and the seconds it took."""
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
    """Draft until the draft's own probability of all drafted tokens together falls below a moving threshold.

    After a rejection it moves toward the probability up to the rejected token (the draft was too confident); when all
    was accepted it falls by `step` (a longer draft might have been). It stays within [low, high]. max_tokens: drafted
    per round at most.
    """

    def __init__(
        self,
        threshold: float = 0.4,
        *,
        max_tokens: int = 16,
        step: float = 0.05,
        pull: float = 0.3,
        low: float = 0.02,
        high: float = 0.95,
    ) -> None:
        self.low, self.high = check_between("low", low, 0, 1), check_between("high", high, low, 1)
        self.threshold = self._first = check_between("threshold", threshold, low, high)
        self.max_tokens, self.step = check_whole("max_tokens", max_tokens, 1), check_between("step", step, 0, 1)
        self.pull = check_between("pull", pull, 0, 1)
        self._held = 1.0
        self.history: list[float] = []  # the threshold of each round

    def limit(self) -> int:
        self._held = 1.0
        self.history.append(self.threshold)
        return self.max_tokens

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
            self._first, max_tokens=self.max_tokens, step=self.step, pull=self.pull, low=self.low, high=self.high
        )


class Dynamic(LengthPolicy):
    """The K of the highest measured speed-up, and no draft where every K loses.

    It measures acceptance by position (newer rounds count more) and the times of drafting and verification, in units of
    plain steps of the same moment, and takes the K with the most tokens per plain step's time. When no K beats plain
    steps by `margin` the draft is switched off, and from then on at most `allowance` of all the time so far is spent on
    testing it, in two ways. `Draft.listen`: in one pass it reads the tokens generated without it and tells which it
    would have guessed, about thirty answers for the time of one drafted token. A trial: two rounds of one drafted
    token; in the first the draft reads what it has missed, so that round's draft time does not count. A trial is
    charged with its expected cost; of a draft that cannot listen, no token is expected to be accepted. The first round
    of each depth is a warm-up and is not charged.
    Times belong to the machine and the pair of models and are shared by all copies; acceptance belongs to the sequence,
    and a new sequence starts from that of the others.
    """

    def __init__(
        self, *, max_tokens: int = 8, memory: float = 0.95, margin: float = 0.05, allowance: float = 0.006
    ) -> None:
        self.max_tokens = check_whole("max_tokens", max_tokens, 1)
        self.memory = check_between("memory", memory, 0, 1)
        self.margin = check_between("margin", margin, 0, 1)
        self.allowance = check_between("allowance", allowance, 0, 1)
        self._half = self.allowance / 2  # for listening, and as much for losing rounds
        self.shared = Experience()
        self._counts = [(0.0, 0.0)] * max_tokens  # discounted: tokens at this position that were kept, and tried
        self.chosen: list[int] = []  # K of each round
        self._caught_up = False  # the draft has read the sequence so far
        self._trial = 0  # rounds of a trial still to come
        self._rest = 0  # plain rounds until the choice is computed again, which takes time too
        self._unheard = 0  # tokens generated since the draft last ran
        # of this sequence, listened ones included; K is at most one more, so a sequence unlike the others costs little
        self._accepted = 0

    def rates(self) -> list[float]:
        """[max_tokens] acceptance at each position, given that all before it were accepted: of this sequence, with
        that of the others as prior, and that of the position before where nothing was tried."""
        rates, last, weight = [], FIRST_GUESS, PRIOR
        for (hits, tries), (others_hits, others_tries) in zip(self._counts, self.shared.counts(self.max_tokens)):
            last = (others_hits + weight * last) / (others_tries + weight)
            last = (hits + weight * last) / (tries + weight)
            rates.append(last)
            weight = DEEPER
        return rates

    def predict(self, K: int) -> float | None:
        """Tokens per plain step's time at K, from measured values; None while a time is missing."""
        steps = self.shared.steps_of_round(K)
        return None if steps is None else expected_tokens_by_position(self.rates()[:K]) / steps

    def limit(self) -> int:
        self.chosen.append(self._limit())
        return self.chosen[-1]

    def _limit(self) -> int:
        if self.shared.elapsed <= LISTEN_EVERY and self.shared.can_be_heard is None:
            return 0  # `listen` first: it costs less than a trial
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
            tokens = {K: gained for K in range(1, self.max_tokens + 1) if (gained := self.predict(K)) is not None}
            best = max(tokens, key=tokens.__getitem__)
            if tokens[best] >= 1 + self.margin:
                if self.shared.since_plain >= REFRESH:
                    return 0  # what a plain step takes now
                return min(best, 1 + self._accepted)
            rounds = TRIAL
            # expected acceptance of the trial's token
            kept = self.rates()[0] if self.shared.can_be_heard else 0.0
            steps = self.shared.steps_of_round(1)
            assert steps is not None
            cost = rounds * (steps - (1 + kept))
            missing = self.shared.lost + max(cost, 0) - self._half * self.shared.elapsed
            if missing > 0:  # each plain round adds to the allowance
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
        self.shared.add_round(outcome, caught_up=self._caught_up, floor=-self._half)
        self._caught_up = True
        trials = [at < outcome.accepted for at in range(min(outcome.drafted, outcome.accepted + 1, self.max_tokens))]
        self._counts = _fading(self._counts, trials, self.memory)
        self.shared.tried(trials)

    def copy(self) -> Dynamic:
        new = Dynamic(max_tokens=self.max_tokens, memory=self.memory, margin=self.margin, allowance=self.allowance)
        new.shared = self.shared
        return new


FIRST_GUESS = 0.7  # acceptance before anything was tried: high enough for all depths to be tried
KEPT_TIMES = 16
FIRST_TRIAL, TRIAL = 3, 2  # rounds; the first of all is a warm-up
PRIOR = 2.0  # other sequences' acceptance counts as two tries
DEEPER = 4.0  # and the position before as four: few rounds come so far, and none does after stopping early
LONG_MEMORY = 0.995
LONGEST_REST = 16
REFRESH = 48  # rounds with a draft after which a plain step is timed again: the machine's speed may have changed
LISTEN_EVERY, LISTEN_TO = 16, 32  # plain rounds between two calls of `listen`, at least; tokens per call, at most


def _fading(counts: list[tuple[float, float]], trials: list[bool], memory: float) -> list[tuple[float, float]]:
    """(accepted, tried) by position, one round later. Old rounds fade, so a position not tried for long is tried
    again."""
    older = [(memory * kept, memory * tried) for kept, tried in counts]
    return [
        (kept + trials[at], tried + 1) if at < len(trials) else (kept, tried) for at, (kept, tried) in enumerate(older)
    ]


class Experience:
    """What copies of a policy share: the times of plain steps, of drafted tokens and of verifications; the acceptance
    by position over all sequences; and the time lost so far.

    Times are in units of plain steps of the same moment (a machine may be twice as slow a second later), but `plain_s`.
    Of the last times the lower quartile is used, because disturbances only make a time longer.
    """

    def __init__(self) -> None:
        self.lost = self.elapsed = 0.0  # compared with plain steps; in total
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

    def add_round(self, outcome: Outcome, *, caught_up: bool, floor: float) -> None:
        """A round with a draft. caught_up: the draft had read all but the last round's tokens, so its time is that of
        drafting. floor: of `lost`, as a share of `elapsed`, so that old gains cannot pay for many new losses.

        The first round of a depth is a warm-up, neither measured nor charged. Others are charged with the usual time:
        a disturbance would have hit plain steps, too.
        """
        self.since_plain += 1
        plain_s = self.plain_s
        if plain_s is None:  # nothing to compare with
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
            self.lost = max(self.lost, floor * self.elapsed)

    def add_hearing(self, can_be_heard: bool, seconds: float) -> None:
        """A call of `Draft.listen`; the first one is a warm-up, too."""
        plain_s = self.plain_s
        assert plain_s is not None, "heard before the first plain round"
        steps = seconds / plain_s
        if self.can_be_heard is not None:
            self._hearing.append(steps)
            self.listened += self.hearing
        self.elapsed += steps
        self.can_be_heard = can_be_heard

    def tried(self, trials: list[bool]) -> None:
        """trials: whether the token was accepted, for each position that a round reached."""
        missing = len(trials) - len(self._counts)
        self._counts = _fading(self._counts + [(0.0, 0.0)] * missing, trials, LONG_MEMORY)

    def counts(self, positions: int) -> list[tuple[float, float]]:
        """[positions] (accepted, tried), discounted."""
        return (self._counts + [(0.0, 0.0)] * positions)[:positions]

    @property
    def hearing(self) -> float:
        """Plain steps that a call of `listen` takes; 0 before it is known."""
        return _usual(self._hearing) if self._hearing else 0.0

    @property
    def knows_plain(self) -> bool:
        return bool(self._plain)

    @property
    def measured(self) -> bool:
        return bool(self._draft) and any(self._verify.values())

    def steps_of_round(self, K: int) -> float | None:
        """Plain steps that a round of K drafted tokens takes; 1 for K = 0, None before anything was measured. The
        verification time of a depth that was never sent is that of the nearest one."""
        if K == 0:
            return 1.0 if self.knows_plain else None
        if not self.measured:
            return None
        nearest = min((d for d, times in self._verify.items() if times), key=lambda depth: (abs(depth - K), depth))
        return K * _usual(self._draft) + _usual(self._verify[nearest])


def _usual(times: deque[float]) -> float:
    """The lower quartile."""
    return sorted(times)[(len(times) - 1) // 4]


POLICIES: dict[str, Callable[[], LengthPolicy]] = {"threshold": Threshold, "dynamic": Dynamic}


def length_policy(given: int | str | LengthPolicy) -> LengthPolicy:
    """A fresh policy: K, "threshold", "dynamic", or one of your own, copied. Raises WorkbenchError for anything
    else."""
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


def check_fits_context(lengths: LengthPolicy, context_length: int, model_name: str) -> None:
    """Raise WorkbenchError for a fixed K that no round could draft."""
    if isinstance(lengths, Fixed) and context_length - 1 < lengths.K:
        raise WorkbenchError(
            f"draft_length={lengths.K} is beyond the context of model {model_name!r}, {context_length} tokens; a round"
            " drafts a few tokens, 2 to 16"
        )
