"""How many tokens to draft: a fixed number, a moving threshold of confidence, or the best by counts. 0: a plain step.

A policy may depend on everything so far, drafted tokens included, as long as drafted tokens stay in the proposal: this
keeps the output's distribution (see `rule.grow`).
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from workbench.errors import WorkbenchError, check_between, check_whole, unknown
from workbench.speculation.costs import ENOUGH_PAIRS, RoundCosts
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
    """The K of the most expected tokens per time, and no draft where every K loses.

    Tokens are counted: acceptance by position, newer rounds more than older ones. Times are measured a few times only,
    and in pairs, a round with a draft right after a plain step (`RoundCosts`). K grows from 1 as tokens are accepted;
    the first rounds are pairs; after that the best K is drafted, now and then another K, to know what a row costs, and
    now and then a pair is measured again.

    When no K beats plain steps the draft is switched off, and from then on at most `allowance` of all the time is spent
    on asking whether it would pay, in two ways. `Draft.listen`: in one pass it reads the tokens generated without it
    and tells which it would have guessed, about thirty answers for the time of one drafted token. A trial: two rounds
    of one drafted token; in the first the draft reads what it has missed, so that round's draft time does not count.
    A trial is charged with what it is expected to lose; of a draft that cannot listen, no token is expected to be
    accepted.

    Costs belong to the machine and the pair of models and are shared by all copies; acceptance belongs to the sequence,
    and a new sequence starts from that of the others.
    """

    def __init__(
        self, *, max_tokens: int = 8, memory: float = 0.95, margin: float = 0.04, allowance: float = 0.012
    ) -> None:
        self.max_tokens = check_whole("max_tokens", max_tokens, 1)
        self.memory = check_between("memory", memory, 0, 1)
        self.margin = check_between("margin", margin, 0, 1)
        self.allowance = check_between("allowance", allowance, 0, 1)
        self._half = self.allowance / 2  # for listening, and as much for trials
        self.shared = Experience()
        self._counts = [(0.0, 0.0)] * max_tokens  # discounted: tokens at this position that were accepted, and tried
        self.chosen: list[int] = []  # K of each round
        self._after_plain = False  # the round before was a plain step
        self._second = False  # of a trial's two rounds comes next
        self._rest = 0  # plain rounds until the choice is computed again, which takes time too
        self._unheard = 0  # tokens generated since the draft last ran

    def rates(self) -> list[float]:
        """[max_tokens] acceptance at each position, given that all before it were accepted: of this sequence, with
        that of the others as prior, and that of the position before where little was tried."""
        rates, last, weight = [], FIRST_GUESS, GUESS_WEIGHT
        for (hits, tries), (others_hits, others_tries) in zip(self._counts, self.shared.counts(self.max_tokens)):
            last = (others_hits + weight * last) / (others_tries + weight)
            last = (hits + OTHERS * last) / (tries + OTHERS)
            rates.append(last)
            weight = DEEPER
        return rates

    def predict(self, K: int) -> float | None:
        """Tokens per plain step's time at K, from counted acceptance and measured costs; None while a time is
        missing."""
        if K and not self.shared.costs.num_pairs:
            return None
        return expected_tokens_by_position(self.rates()[:K]) / self.shared.costs.steps(K)

    def limit(self) -> int:
        self.chosen.append(self._limit())
        return self.chosen[-1]

    def _limit(self) -> int:
        shared, costs = self.shared, self.shared.costs
        if self._second:
            self._second = False
            return 1
        if self._rest:
            self._rest -= 1
            return 0
        longest = min(self.max_tokens, 1 + shared.accepted)
        best, gain = self._best()
        if not costs.num_pairs:
            return self._paired(min(longest, best))
        # switched on by a gain of more than the margin, off by a loss
        shared.on = gain >= (1 if shared.on else 1 + self.margin)
        if shared.on:
            return self._drafted(min(best, longest), gain)
        if self._should_measure():
            return self._paired(1)
        return self._tried()

    def _drafted(self, K: int, gain: float) -> int:
        """While drafting pays: K, another depth, or a plain step before it."""
        costs, first = self.shared.costs, self.shared.costs.num_pairs < FIRST_PAIRS
        if first and costs.num_pairs % 2:
            K = (K + 1) // 2  # two depths tell what a row costs
        if not self.shared.is_warm(K):
            return K
        if not first and self.shared.another_is_due():
            return 2 * K if self.max_tokens >= 2 * K else (K + 1) // 2
        unsure = costs.num_pairs < ENOUGH_PAIRS and gain < costs.high
        return self._paired(K) if first or costs.since_pair >= (SOON if unsure else REFRESH) else K

    def _should_measure(self) -> bool:
        """Every K loses by what is known: whether too little is known, or costs so uncertain that one might win."""
        shared = self.shared
        if shared.lost > FIRST_LOSS + self._half / 2 * shared.elapsed:
            return False
        return shared.costs.num_pairs < FIRST_PAIRS or self._best(at_least=True)[1] >= 1 + self.margin

    def _tried(self) -> int:
        """While drafting does not pay: 0, or the first round of a trial."""
        shared = self.shared
        accepted = self.rates()[0] if shared.can_be_heard else 0.0
        cost = TRIAL * max(0.0, shared.costs.steps(1, at_least=True) - (1 + accepted))
        missing = shared.lost + cost - self._half * shared.elapsed
        if missing > 0:  # each plain round adds to the allowance
            self._rest = min(LONGEST_REST, int(missing / self._half)) if self._half else LONGEST_REST
            return 0
        self._second = self._after_plain and self._unheard > CAUGHT_UP
        return int(self._after_plain)

    def _paired(self, K: int) -> int:
        """K after a plain step, or where it is its depth's first; else that plain step."""
        return K if self._after_plain or not self.shared.is_warm(K) else 0

    def _best(self, *, at_least: bool = False) -> tuple[int, float]:
        """The K > 0 of the most tokens per plain step's time, and how many. at_least: at the least plausible costs."""
        tokens = accepted = 1.0
        best, gain = 1, 0.0
        for K, rate in enumerate(self.rates(), 1):
            accepted *= rate
            tokens += accepted
            here = tokens / self.shared.costs.steps(K, at_least=at_least)
            if here > gain:
                best, gain = K, here
        return best, gain

    def listens(self) -> int:
        shared = self.shared
        if self._unheard < LISTEN_EVERY or shared.can_be_heard is False or shared.plain_s is None:
            return 0
        if shared.listened + shared.hearing > self._half * shared.elapsed:
            return 0
        return min(self._unheard, LISTEN_TO)

    def heard(self, right: Sequence[bool] | None, seconds: float) -> None:
        self._unheard, self._rest = 0, 0
        self.shared.add_hearing(right is not None, seconds)
        for hit in right or ():
            self._counts = _fading(self._counts, [hit], self.memory)
            self.shared.tried([hit])

    def learn(self, outcome: Outcome) -> None:
        shared = self.shared
        if outcome.plain or not outcome.drafted:  # a draft that proposes nothing leaves a plain step
            self._after_plain = shared.add_plain(outcome.verify_s)
            self._unheard = self._unheard + 1 if outcome.plain else 0
            return
        shared.add_round(outcome, after_plain=self._after_plain, caught_up=self._unheard <= CAUGHT_UP)
        self._unheard, self._after_plain = 0, False
        trials = [at < outcome.accepted for at in range(min(outcome.drafted, outcome.accepted + 1, self.max_tokens))]
        self._counts = _fading(self._counts, trials, self.memory)
        shared.tried(trials)

    def copy(self) -> Dynamic:
        new = Dynamic(max_tokens=self.max_tokens, memory=self.memory, margin=self.margin, allowance=self.allowance)
        new.shared = self.shared
        return new


FIRST_GUESS, GUESS_WEIGHT = 0.7, 2.0  # acceptance before anything was tried: high enough for all depths to be tried
OTHERS = 6.0  # other sequences' acceptance counts as so many tries
DEEPER = 10.0  # and the position before as so many: few rounds come so far, and none does after stopping early
LONG_MEMORY = 0.995
FIRST_PAIRS = 4  # before a draft is switched off, unless it has lost too much
FIRST_LOSS = 2.0  # plain steps
SOON, REFRESH = 6, 64  # rounds with a draft after which a pair is measured again: while on or off is unsure, and later
ANOTHER_FIRST, ANOTHER_LATER = 4, 20  # rounds between two of another depth
TRIAL = 2  # rounds
CAUGHT_UP = 2  # tokens: a draft that has missed so few reads them with the next
LONGEST_REST = 16
LISTEN_EVERY, LISTEN_TO = 16, 32  # plain rounds between two calls of `listen`, at least; tokens per call, at most
KEPT_TIMES = 9


def _fading(counts: list[tuple[float, float]], trials: list[bool], memory: float) -> list[tuple[float, float]]:
    """(accepted, tried) by position, one round later. Old rounds fade, so a position not tried for long is tried
    again."""
    older = [(memory * kept, memory * tried) for kept, tried in counts]
    return [
        (kept + trials[at], tried + 1) if at < len(trials) else (kept, tried) for at, (kept, tried) in enumerate(older)
    ]


class Experience:
    """What copies of a policy share: costs, acceptance by position over all sequences, and what was spent on drafts
    that do not pay, in plain steps."""

    def __init__(self) -> None:
        self.costs = RoundCosts()
        self.on = True  # drafting pays
        self.accepted = 0  # tokens
        self.elapsed = 0.0
        self.listened = 0.0
        self.can_be_heard: bool | None = None  # None: not known yet
        self._plain: deque[float] = deque(maxlen=KEPT_TIMES)  # seconds
        self._hearing: deque[float] = deque(maxlen=KEPT_TIMES)
        self._counts: list[tuple[float, float]] = []
        self._warm: set[int] = set()  # depths that were sent
        self._off_rounds: Counter[int] = Counter()  # drafted while drafting did not pay, by depth
        self._off_tokens = 0
        self._since_another, self._another_after = 0, ANOTHER_FIRST

    def add_plain(self, seconds: float) -> bool:
        """A plain step. False for the first one, a warm-up that is not measured."""
        self.elapsed += 1
        measured = self.is_warm(0)
        self._warm.add(0)
        if measured:
            self._plain.append(seconds)
            self.costs.add_plain(seconds)
        return measured

    def add_round(self, outcome: Outcome, *, after_plain: bool, caught_up: bool) -> None:
        """A round with drafted tokens. The first of a depth is a warm-up and is not measured."""
        depth = outcome.drafted
        if self.is_warm(depth):
            self.costs.add_round(depth, outcome.draft_s, outcome.verify_s, after_plain=after_plain, caught_up=caught_up)
        else:
            self.costs.add_warm_up()
            self._warm.add(depth)
        self.accepted += outcome.accepted
        self.elapsed += self.costs.steps(depth)
        self._since_another += 1
        if not self.on:
            self._off_rounds[depth] += 1
            self._off_tokens += outcome.accepted + 1

    @property
    def lost(self) -> float:
        """Against plain steps, in rounds of a draft that did not pay, at the costs as they are known now."""
        spent = sum(count * self.costs.steps(K, at_least=True) for K, count in self._off_rounds.items())
        return max(0.0, spent - self._off_tokens)

    def is_warm(self, depth: int) -> bool:
        """Whether there was a round of this depth; the first of a size is slow."""
        return depth in self._warm

    def another_is_due(self) -> bool:
        """Whether a round of another depth is due; it is asked for once then."""
        if self._since_another < self._another_after:
            return False
        self._since_another, self._another_after = 0, min(ANOTHER_LATER, 2 * self._another_after)
        return True

    @property
    def plain_s(self) -> float | None:
        """Seconds of a plain step now; None before the first."""
        return statistics.median(self._plain) if self._plain else None

    def add_hearing(self, can_be_heard: bool, seconds: float) -> None:
        """A call of `Draft.listen`; the first one is a warm-up, too."""
        plain_s = self.plain_s
        assert plain_s is not None, "heard before the first plain round"
        if self.can_be_heard is not None and plain_s > 0:
            self._hearing.append(seconds / plain_s)
        self.listened += self.hearing
        self.elapsed += self.hearing
        self.can_be_heard = can_be_heard

    @property
    def hearing(self) -> float:
        """Plain steps that a call of `listen` takes; 0 before it is known."""
        return statistics.median(self._hearing) if self._hearing else 0.0

    def tried(self, trials: list[bool]) -> None:
        """trials: whether the token was accepted, for each position that a round reached."""
        missing = len(trials) - len(self._counts)
        self._counts = _fading(self._counts + [(0.0, 0.0)] * missing, trials, LONG_MEMORY)

    def counts(self, positions: int) -> list[tuple[float, float]]:
        """[positions] (accepted, tried), discounted."""
        return (self._counts + [(0.0, 0.0)] * positions)[:positions]


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
