"""Parts of the engine that ask own.py: a policy, a scheduler, a draft. They check what it says; what they do not use
changes nothing.

    order(requests, now_s) -> [a number for each request: the smallest goes first]
    plan(step) -> {"rows": {id: tokens to compute now}, "preempt": [ids]}
    propose(texts) -> [a list of token ids for each text, what may come next]

A request is a dict: id, prompt_tokens, tokens, computed, remaining, arrival_s, waited_s, running. A step has requests,
now_s, token_budget, max_running, free_blocks and block_size. A text is a dict: id, new_tokens (all at first, later
those since the last time) and limit, how many may be proposed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from workbench.capstone.own_parts import OwnPartFailed, OwnParts
from workbench.decoding.sequence import Request, Status
from workbench.decoding.sequence import Sequence as Text
from workbench.errors import is_number, is_whole, shown
from workbench.models.fast import Model
from workbench.serving.scheduler import Plan, Work, Written
from workbench.serving.settings import SchedulerSettings
from workbench.speculation.drafts.contract import Ask, Draft
from workbench.speculation.drafts.picked import picked_chain
from workbench.speculation.proposal import Proposal


def facts(sequence: Text, now_s: float) -> dict[str, Any]:
    """What own.py learns of a request: lengths and times, no tokens."""
    return {
        "id": str(sequence.request.id),
        "prompt_tokens": sequence.prompt_tokens,
        "tokens": sequence.num_tokens,
        "computed": sequence.computed,
        "remaining": sequence.remaining,
        "arrival_s": sequence.arrival_s,
        "waited_s": now_s - sequence.arrival_s,
        "running": sequence.status is Status.RUNNING,
    }


class AdvisedPolicy:
    """A policy of the course's scheduler by `order`, asked once a step for all requests. `sequences`: gives those that
    are alive; set when the engine is made."""

    def __init__(self, own: OwnParts) -> None:
        self._own = own
        self._keys: dict[Hashable, float] = {}
        self._now: float | None = None
        self.sequences: Any = list

    def __call__(self, sequence: Text, now_s: float) -> Any:
        if now_s != self._now or sequence.id not in self._keys:
            self._ask(now_s)
        return (self._keys[sequence.id], sequence.arrival_s, sequence.number)

    def _ask(self, now_s: float) -> None:
        alive = list(self.sequences())
        keys = self._own.call("order", [facts(one, now_s) for one in alive], now_s)
        if not isinstance(keys, list) or len(keys) != len(alive) or not all(map(is_number, keys)):
            words = f"order must give {len(alive)} numbers, one a request; it gave {shown(keys)}"
            raise self._own.refuse(OwnPartFailed("advice", words))
        self._keys, self._now = {one.id: key for one, key in zip(alive, keys)}, now_s


class AdvisedDraft(Draft):
    """A draft by `propose`. Its tokens are picked, not drawn, so that drawn texts keep their distribution exactly."""

    name = "own"

    def __init__(self, own: OwnParts, target: Model) -> None:
        super().__init__()
        self._own, self._vocab_size = own, target.config.vocab_size
        self._sent: dict[Hashable, int] = {}  # tokens of each sequence that own.py was shown

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        texts = [self._shown(ask) for ask in asks]
        given = self._own.call("propose", texts)
        if not isinstance(given, list) or len(given) != len(asks) or not all(isinstance(one, list) for one in given):
            words = f"propose must give {len(asks)} lists of tokens, one a text; it gave {shown(given)}"
            raise self._own.refuse(OwnPartFailed("advice", words))
        for one in given:
            wrong = next((t for t in one if not is_whole(t) or not 0 <= t < self._vocab_size), None)
            if wrong is not None:
                words = f"propose gave the token {shown(wrong)}; ids are whole numbers in 0 … {self._vocab_size - 1}"
                raise self._own.refuse(OwnPartFailed("advice", words))
        return [picked_chain(ask, one, self._vocab_size) for ask, one in zip(asks, given)]

    def _shown(self, ask: Ask) -> dict[str, Any]:
        known = self._sent.get(ask.sequence, 0)
        self._sent[ask.sequence] = len(ask.token_ids)
        new = [int(token) for token in ask.token_ids[known:]]
        name = ask.sequence[0] if isinstance(ask.sequence, tuple) else ask.sequence
        return {"id": str(name), "new_tokens": new, "limit": min(ask.limit, ask.nodes)}

    def release(self, sequence: Hashable) -> None:
        self._sent.pop(sequence, None)


class AdvisedScheduler:
    """A scheduler by `plan`, behind the engine's own contract, which checks every step
    (`serving.contract.CheckedScheduler`): rows beyond the budget, blocks that are not there, lost requests."""

    def __init__(self, own: OwnParts, memory: Any, settings: SchedulerSettings) -> None:
        self._own, self._memory, self._settings = own, memory, settings
        self.waiting: list[Text] = []
        self.running: list[Text] = []
        self._numbers = 0

    def add(self, request: Request) -> Text:
        self._numbers += 1
        sequence = Text.of(request, 0, self._numbers, list(request.prompt_ids))
        self.waiting.append(sequence)
        return sequence

    def check(self, request: Request) -> None:
        if request.n != 1:
            raise OwnPartFailed("advice", "a scheduler by own.py serves one text a request")

    def abort(self, request_id: Hashable, now_s: float) -> list[Text]:
        ended = [one for one in (*self.waiting, *self.running) if one.request.id == request_id]
        for sequence in ended:
            self._end(sequence, "abort", now_s)
        return ended

    def schedule(self, now_s: float) -> Plan:
        plan, alive = Plan(), [*self.running, *self.waiting]
        if not alive:
            return plan
        advice = self._own.call("plan", self._shown(alive, now_s))
        try:
            rows, preempt = self._checked(advice, {str(one.request.id): one for one in alive})
        except OwnPartFailed as failed:
            raise self._own.refuse(failed) from None
        for sequence in preempt:
            if sequence.id in self._memory.lengths:
                self._memory.release(sequence.id)
            self.running.remove(sequence)
            self.waiting.append(sequence)
            sequence.status, sequence.computed = Status.WAITING, 0
            sequence.preemptions += 1
            plan.preempted.append(sequence)
        for sequence, count in rows.items():
            if sequence.status is Status.WAITING:
                if self._settings.remember and sequence.id not in self._memory.lengths:
                    sequence.computed = self._memory.open(sequence.id, sequence.token_ids, sequence.request.tenant)
                    sequence.hit_tokens = sequence.computed
                self.waiting.remove(sequence)
                self.running.append(sequence)
                sequence.status = Status.RUNNING
                plan.admitted.append(sequence)
            plan.work.append(Work(sequence, sequence.computed, min(count, sequence.unsent)))
        return plan

    def _shown(self, alive: list[Text], now_s: float) -> dict[str, Any]:
        return {
            "requests": [facts(one, now_s) for one in alive],
            "now_s": now_s,
            "token_budget": self._settings.token_budget,
            "max_running": self._settings.max_running,
            "free_blocks": self._memory.num_available,
            "block_size": self._memory.block_size,
        }

    @staticmethod
    def _checked(advice: Any, alive: Mapping[str, Text]) -> tuple[dict[Text, int], list[Text]]:
        if not isinstance(advice, dict) or not isinstance(advice.get("rows"), dict):
            words = f'plan must give {{"rows": {{id: tokens}}, "preempt": [ids]}}; it gave {shown(advice)}'
            raise OwnPartFailed("advice", words)
        rows, preempt = advice["rows"], advice.get("preempt", [])
        names = isinstance(preempt, list) and all(isinstance(name, str) for name in preempt)
        if not names or len(set(preempt)) != len(preempt):
            raise OwnPartFailed("advice", f"preempt must be a list of different ids, got {shown(preempt)}")
        for name in (*rows, *preempt):
            if name not in alive:
                raise OwnPartFailed("advice", f"plan names {shown(name)}, which is no request that waits or runs")
        for name in preempt:
            if alive[name].status is not Status.RUNNING or name in rows:
                raise OwnPartFailed("advice", f"plan preempts {name!r}, which does not run, or is to compute, too")
        for name, count in rows.items():
            if not is_whole(count) or count < 1:
                raise OwnPartFailed("advice", f"plan gives {name!r} {shown(count)} tokens; at least 1, or leave it out")
        return {alive[name]: count for name, count in rows.items()}, [alive[name] for name in preempt]

    def postprocess(self, plan: Plan, written: Mapping[Hashable, Written], now_s: float) -> list[Text]:
        ended = []
        for work in plan.work:
            sequence, new = work.sequence, written.get(work.sequence.id)
            start, sequence.computed = sequence.computed, self._memory.lengths.get(sequence.id, 0)
            size = self._memory.block_size
            if self._settings.remember and sequence.computed // size > start // size:
                known = sequence.token_ids[: sequence.computed]
                self._memory.remember(sequence.id, known, sequence.request.tenant)
            if new is not None and new.finish_reason is not None:
                ended.append(sequence)
                self._end(sequence, new.finish_reason, now_s)
        return ended

    def _end(self, sequence: Text, reason: str, now_s: float) -> None:
        (self.running if sequence.status is Status.RUNNING else self.waiting).remove(sequence)
        if sequence.id in self._memory.lengths:
            self._memory.release(sequence.id)
        sequence.status, sequence.finish_reason, sequence.finished_s = Status.FINISHED, reason, now_s
