"""Workloads: who asks for how much, and when. Open loop, closed loop, shared beginnings, conversations. No torch.

    open loop      requests come when they come, whether or not the last ones are done: `Workload.draw`
    closed loop    U users, each sends his next request a think time after the last one was finished: `ClosedLoop`

In a closed loop a slow server is asked less, and its queue is never longer than U. So latency under load is measured
with an open loop (Schroeder, Wierman and Harchol-Balter, "Open versus closed: a cautionary tale", NSDI 2006).

The same seed gives the same requests on every platform and in every version of Python: of `random.Random` only
`random()` is used, which is promised not to change, and times are whole microseconds, so that the last bit of a
logarithm does not show. Lengths, times and tenants have their own random numbers: another rate asks for the same texts
at other times.

What is known of the Azure LLM inference trace 2023 (Patel et al., Splitwise, arXiv 2311.18677 §III; the files are
released in github.com/Azure/AzurePublicDataset), in tokens:

                    requests  a second   prompt: median  mean   p99    largest   output: median  mean  p99
    conversation    19,366    5.53               1,020   1,155  4,142  14,050            129     211   601
    code             8,819    2.57               1,469   2,048  7,436                     13      28   249

The paper gives the medians (1,500 for the code's prompts), all else is counted in the files. Our choice is: the shape
between these numbers (`Fitted`); the ends that the table leaves open; Poisson arrivals for the conversations; Gamma
gaps with a coefficient of variation of 8 for the code, which is about that of the file's last five minutes, bursts of a
hundred requests and pauses of up to 78 s; and that prompt and output are independent. The outputs of the conversations
are almost bimodal, says the paper; the third quartile that the mean demands is 369, nearly three times the median.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError, check_above, check_between, check_whole, is_number, unknown
from workbench.serving.arrivals import Arrival, Text, prompt_ids, text_ids
from workbench.serving.gaps import AtOnce, Bursty, Gaps, Poisson, exponential
from workbench.serving.lengths import Fitted, HeavyTail, Lengths, Uniform, stratified

__all__ = [
    "WORKLOADS",
    "Arrival",
    "ClosedLoop",
    "SystemPrompts",
    "Turns",
    "Workload",
    "prompt_ids",
    "text_ids",
    "with_deadlines",
    "with_priorities",
    "workload",
]


@dataclass(frozen=True)
class SystemPrompts:
    """A share of all requests (of all conversations) begins with one of these, each as often as any other."""

    lengths: tuple[int, ...]
    share: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.lengths, tuple) or not self.lengths:
            raise WorkbenchError(f"lengths must be a tuple of the system prompts' tokens, got {self.lengths!r}")
        for length in self.lengths:
            check_whole("the length of a system prompt", length, 1)
        check_between("share", self.share, 0, 1)


@dataclass(frozen=True)
class Turns:
    """Conversations: each prompt is all that was said before, and something new.

    count: turns of a conversation. pause_s: mean of the exponential time between the turns; in an open loop from one
    arrival to the next, as the end of the answer is not known. context: a turn that would grow beyond so many tokens,
    answer included, is not sent, and the conversation is over.
    """

    count: Lengths
    pause_s: float
    context: int

    def __post_init__(self) -> None:
        _check_lengths("count", self.count)
        check_above("pause_s", self.pause_s, 0)
        check_whole("context", self.context, 2)


@dataclass(frozen=True)
class Workload:
    """Lengths, times, and what requests have in common.

    prompts: tokens of a prompt; with system prompts or turns, of what is new in it. stratified: draw the lengths of an
    open loop so that a few requests already have the shape of the whole. source: where the numbers come from.
    """

    prompts: Lengths
    outputs: Lengths
    gaps: Gaps = field(default_factory=AtOnce)
    tenants: tuple[str, ...] = ("",)
    system: SystemPrompts | None = None
    turns: Turns | None = None
    stratified: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        _check_lengths("prompts", self.prompts)
        _check_lengths("outputs", self.outputs)
        if not isinstance(self.gaps, Gaps):
            raise WorkbenchError(f"gaps must be Poisson, Bursty, Constant or AtOnce, got {self.gaps!r}")
        if not isinstance(self.tenants, tuple) or not self.tenants or not all(isinstance(t, str) for t in self.tenants):
            raise WorkbenchError(f"tenants must be a tuple of names, got {self.tenants!r}")
        if self.turns is not None and self.stratified:
            raise WorkbenchError("the lengths of conversations cannot be stratified: how many turns there are is drawn")
        if self.turns is not None and isinstance(self.gaps, AtOnce):
            raise WorkbenchError("conversations that all begin at once never come to a second turn; give them a rate")
        if self.turns is not None and self._first_longest > self.turns.context:
            raise WorkbenchError(
                f"a first turn may need {self._first_longest:,} tokens, and the conversations' context is "
                f"{self.turns.context:,}; make the turns shorter or the context longer"
            )

    @property
    def _system_longest(self) -> int:
        return max(self.system.lengths) if self.system else 0

    @property
    def _first_longest(self) -> int:
        return self._system_longest + self.prompts.high + self.outputs.high

    @property
    def longest(self) -> int:
        """Tokens of the longest request that can be drawn, prompt and output."""
        return self.turns.context if self.turns else self._first_longest

    def at_rate(self, rate_per_s: float) -> Workload:
        """The same requests at another rate. Where all came at once, they come as a Poisson process."""
        return replace(self, gaps=self.gaps.at_rate(rate_per_s))

    def scaled(self, longest: int) -> Workload:
        """The same shape for a model of this context: no request is longer than `longest` tokens.

        All lengths are multiplied by one factor, with which a request whose parts are at their 99th percentiles (a
        conversation: its whole context) is just as long; what is beyond is cut to that. One that fits already is kept.
        """
        if self.longest <= check_whole("longest", longest, 2):
            return self
        prompt, output = self.prompts.at(0.99), self.outputs.at(0.99)
        factor = longest / (self.turns.context if self.turns else self._system_longest + prompt + output)
        system = self.system and replace(
            self.system, lengths=tuple(max(1, int(factor * n)) for n in self.system.lengths)
        )
        max_output = max(1, int(factor * output))
        max_prompt = longest - max_output - (max(system.lengths) if system else 0)
        if self.turns:
            max_prompt = min(max_prompt, max(1, int(factor * prompt)))
        if max_prompt < 1:
            raise WorkbenchError(f"{longest} tokens are too few for a prompt and an output of this workload")
        return replace(
            self,
            prompts=self.prompts.scaled(factor, max_prompt),
            outputs=self.outputs.scaled(factor, max_output),
            system=system,
            turns=self.turns and replace(self.turns, context=longest),
        )

    def draw(self, num_requests: int, *, seed: int = 0, context: int | None = None) -> tuple[Arrival, ...]:
        """The first `num_requests` of an open loop, in order of time. context: refuse what could be longer."""
        check_whole("num_requests", num_requests, 1)
        _check_context(self, context)
        times = _stream(seed, "times")
        shares = None
        if self.stratified:
            parts = (stratified(num_requests, _stream(seed, part)) for part in ("prompts", "outputs"))
            shares = list(zip(*parts, strict=True))
        events = [(_microseconds(self.gaps.gap_s(times)), 0)]  # when, and which conversation
        talks: dict[int, _Talk] = {}
        arrivals: list[Arrival] = []
        while len(arrivals) < num_requests:
            at, number = heapq.heappop(events)
            if number not in talks:
                talks[number] = _Talk(self, seed, str(number))
                heapq.heappush(events, (at + _microseconds(self.gaps.gap_s(times)), number + 1))
            arrival = talks[number].ask(at / 1e6, shares[len(arrivals)] if shares else None)
            if arrival is not None:
                arrivals.append(arrival)
                if talks[number].turns_left:
                    heapq.heappush(events, (at + _microseconds(talks[number].pause_s()), number))
        return tuple(arrivals)


class _Talk:
    """A conversation, or a single request: what was said, and random numbers of its own."""

    def __init__(self, workload: Workload, seed: int, name: str) -> None:
        self._workload, self._name = workload, name
        self._random = _stream(seed, f"talk {name}")
        tenants, system = workload.tenants, workload.system
        self._tenant = tenants[int(self._random.random() * len(tenants))]
        self._said: tuple[Text, ...] = ()
        if system is not None and self._random.random() < system.share:
            which = int(self._random.random() * len(system.lengths))
            self._said = ((f"system prompt {which}", system.lengths[which]),)
        self.turns_left = workload.turns.count.draw(self._random) if workload.turns else 1
        self._asked = 0

    def ask(self, at_s: float, shares: tuple[float, float] | None = None) -> Arrival | None:
        """The next turn; None where it would be longer than the context, and the conversation is over."""
        workload = self._workload
        first, second = shares or (self._random.random(), self._random.random())
        own, new = workload.prompts.at(first), workload.outputs.at(second)
        before = sum(count for _, count in self._said)
        if workload.turns and before + own + new > workload.turns.context:
            self.turns_left = 0
            return None
        self.turns_left -= 1
        self._asked += 1
        name = f"conversation {self._name} turn {self._asked}" if workload.turns else f"request {self._name}"
        texts = (*self._said, (name, own))
        arrival = Arrival(at_s, before + own, new, self._tenant, before, texts=texts)
        self._said = (*texts, (arrival.answer, new))
        return arrival

    def pause_s(self) -> float:
        assert self._workload.turns is not None
        return exponential(self._random) * self._workload.turns.pause_s


class ClosedLoop:
    """Users who wait for their answer: each sends his next request a think time after his last one was finished.

    users: U. requests_each: so many of each user, so that what is asked does not depend on how fast it is answered.
    think_s: mean of the exponential think time; 0 for none. With N requests done in a time T, U = N/T · (mean latency +
    mean think time) up to the beginning and the end (Little's law over the whole circle): U users cannot ask more than
    U / think_s requests a second, however fast they are served.
    """

    def __init__(
        self,
        workload: Workload,
        users: int,
        requests_each: int,
        *,
        think_s: float,
        seed: int = 0,
        context: int | None = None,
    ) -> None:
        self.workload, self.users = workload, check_whole("users", users, 1)
        self.requests_each = check_whole("requests_each", requests_each, 1)
        if not is_number(think_s) or think_s < 0:
            raise WorkbenchError(f"think_s must be a time in seconds, 0 or more, got {think_s!r}")
        _check_context(workload, context)
        self.think_s, self._seed = float(think_s), seed
        self._left = [requests_each] * users
        self._thinking = [_stream(seed, f"think {user}") for user in range(users)]
        self._talks: list[tuple[int, _Talk]] = [(0, self._talk(user, 0)) for user in range(users)]
        self._waiting: dict[str, int] = {}  # a request's name -> who waits for it

    def start(self) -> tuple[Arrival, ...]:
        """The first request of each user, all at time 0. Once."""
        if self._waiting or self._left != [self.requests_each] * self.users:
            raise WorkbenchError("this closed loop has started; make another one to start again")
        return tuple(self._ask(user, 0.0) for user in range(self.users))

    def finished(self, arrival: Arrival, at_s: float) -> Arrival | None:
        """Tell that a request was finished; returns the user's next one, or None after his last."""
        if arrival.name not in self._waiting:
            raise WorkbenchError(f"nobody waits for {arrival.name!r}: it was not sent here, or finished before")
        if not is_number(at_s) or at_s < arrival.at_s:
            raise WorkbenchError(f"{arrival.name!r} came at {arrival.at_s} s and cannot be finished at {at_s!r}")
        user = self._waiting.pop(arrival.name)
        if not self._left[user]:
            return None
        think = _microseconds(exponential(self._thinking[user]) * self.think_s)
        return self._ask(user, (_microseconds(at_s) + think) / 1e6)

    @property
    def done(self) -> bool:
        """All requests of all users were sent and finished."""
        return not self._waiting and not any(self._left)

    def _talk(self, user: int, number: int) -> _Talk:
        return _Talk(self.workload, self._seed, f"{number} of user {user}")

    def _ask(self, user: int, at_s: float) -> Arrival:
        number, talk = self._talks[user]
        arrival = talk.ask(at_s) if talk.turns_left else None
        if arrival is None:
            self._talks[user] = (number + 1, self._talk(user, number + 1))
            arrival = self._talks[user][1].ask(at_s)
        assert arrival is not None, "a first turn fits: the workload was checked"
        self._left[user] -= 1
        self._waiting[arrival.name] = user
        return arrival


def with_deadlines(arrivals: Sequence[Arrival], first_s: float, per_token_s: float) -> tuple[Arrival, ...]:
    """Each is to be finished `first_s` after it came, and `per_token_s` more for each token after the first."""
    check_above("first_s", first_s, 0)
    check_between("per_token_s", per_token_s, 0, math.inf)
    return tuple(replace(a, deadline_s=first_s + per_token_s * (a.new_tokens - 1)) for a in arrivals)


def with_priorities(arrivals: Sequence[Arrival], weights: Mapping[int, float], *, seed: int = 0) -> tuple[Arrival, ...]:
    """Priorities drawn with these weights, which need not add up to 1."""
    for weight in weights.values():
        check_above("the weight of a priority", weight, 0)
    if not weights:
        raise WorkbenchError("weights must name at least one priority")
    random, whole = _stream(seed, "priorities"), sum(weights.values())
    priorities = []
    for _ in arrivals:
        rest = random.random() * whole
        for priority, weight in weights.items():  # noqa: B007
            rest -= weight
            if rest < 0:
                break
        priorities.append(priority)
    return tuple(replace(a, priority=p) for a, p in zip(arrivals, priorities, strict=True))


def _stream(seed: int, purpose: str) -> Random:
    """Random numbers for one purpose: each has its own, so that drawing more for one leaves the others as they are."""
    key = hashlib.sha256(f"{check_whole('seed', seed, 0)}/{purpose}".encode()).digest()
    return Random(int.from_bytes(key[:8], "big"))


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _check_lengths(name: str, lengths: object) -> None:
    if not isinstance(lengths, Lengths):
        raise WorkbenchError(f"{name} must be lengths, such as Uniform(16, 64), got {lengths!r}")


def _check_context(workload: Workload, context: int | None) -> None:
    if context is not None and workload.longest > check_whole("context", context, 2):
        raise WorkbenchError(
            f"a request of this workload may need {workload.longest:,} tokens, and the context is {context:,}; "
            f"use scaled(longest={context})"
        )


# -- by name ---------------------------------------------------------------------------------------------------

AZURE = "Azure LLM inference trace 2023, Patel et al., arXiv 2311.18677 §III"
WORKLOADS: dict[str, Workload] = {
    "conversation": Workload(
        Fitted(2, 1020, 4142, 14050, 1155), Fitted(1, 129, 601, 1000, 211), Poisson(5.53), source=AZURE
    ),
    "code": Workload(
        Fitted(2, 1469, 7436, 7450, 2048), Fitted(1, 13, 249, 2000, 28, share=0.9), Bursty(2.57, 8), source=AZURE
    ),
    "ragged": Workload(
        Uniform(16, 64), HeavyTail(8, 256, 0.5), stratified=True, source="ours: heavy-tailed outputs, all at once"
    ),
    "uniform": Workload(Uniform(16, 256), Uniform(16, 256), source="ours"),
    "shared_prefix": Workload(
        Uniform(16, 128), Uniform(16, 128), Poisson(8), system=SystemPrompts((256, 512), 0.5), source="ours"
    ),
    "multi_turn": Workload(
        HeavyTail(16, 256),
        HeavyTail(32, 512),
        Poisson(1),
        system=SystemPrompts((256,)),
        turns=Turns(HeavyTail(1, 16), 10.0, 4096),
        source="ours: prompts that contain the earlier turns",
    ),
}


def workload(name: str) -> Workload:
    """One of WORKLOADS by its name."""
    if name not in WORKLOADS:
        raise unknown("workload", name, WORKLOADS)
    return WORKLOADS[name]


def requests_of(
    prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], **settings: Any
) -> list[Request]:
    """A request for each prompt, named 0, 1, …, with so many new tokens each: no end-of-text token ends it sooner."""
    each = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    settings = {"stop_token_ids": (), **settings}
    return [Request(i, tuple(p), n, **settings) for i, (p, n) in enumerate(zip(prompts, each, strict=True))]
