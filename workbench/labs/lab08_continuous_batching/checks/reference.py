"""Lab 08: the scheduler that answers to batching-scheduler are compared with. It counts blocks and has no pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from workbench.labs.lab08_continuous_batching.checks.probes import token_after


@dataclass(eq=False)
class Text:
    name: str
    ids: list[int]
    end: int  # tokens at its end
    stop: list[int]
    computed: int = 0
    blocks: int = 0

    @property
    def unsent(self) -> int:
        return len(self.ids) - self.computed


@dataclass
class Step:
    """What a step computes: [name, start, count]; who is done with it: name -> (reason, token ids)."""

    work: list[list] = field(default_factory=list)
    done: dict[str, list] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    refused: list[bool] = field(default_factory=list)  # of each add and abort before it


class Reference:
    def __init__(self, case: dict) -> None:
        self.case = case
        self.free = case["num_blocks"]
        self.waiting: list[Text] = []
        self.running: list[Text] = []
        self.names: set[str] = set()

    def blocks_for(self, length: int) -> int:
        return -(-length // self.case["block_size"])

    def add(self, request: dict) -> bool:
        longest = len(request["prompt"]) + request["max_new_tokens"]
        if request["id"] in self.names or self.blocks_for(longest) > self.case["num_blocks"]:
            return False
        self.names.add(request["id"])
        ids = list(request["prompt"])
        self.waiting.append(Text(request["id"], ids, longest, request["stop"]))
        return True

    def abort(self, name: str) -> bool:
        found = [t for t in (*self.waiting, *self.running) if t.name == name]
        for text in found:
            self.leave(text)
        return bool(found)

    def leave(self, text: Text) -> None:
        self.free += text.blocks
        text.blocks = 0
        for queue in (self.waiting, self.running):
            if text in queue:
                queue.remove(text)

    def step(self) -> Step:
        step, budget = Step(), self.case["token_budget"]
        for text in [t for t in self.running if t.unsent == 1]:
            if text in self.running and self._room(text, step):
                step.work.append([text.name, text.computed, 1])
                budget -= 1
        self._admit(step, self._read(step, budget))
        for name, start, count in step.work:
            text = next(t for t in self.running if t.name == name)
            text.computed = start + count
            if text.unsent == 0:
                text.ids.append(token_after(self.case["salt"], text.ids))
                if text.ids[-1] in text.stop or len(text.ids) == text.end:
                    step.done[name] = ["stop" if text.ids[-1] in text.stop else "length", text.ids]
                    self.leave(text)
        return step

    def _room(self, text: Text, step: Step) -> bool:
        while self.blocks_for(len(text.ids)) - text.blocks > self.free:
            victim = self.running[-1]
            self.leave(victim)
            victim.computed = 0
            self.waiting.insert(0, victim)
            step.preempted.append(victim.name)
            if victim is text:
                return False
        self._take(text)
        return True

    def _take(self, text: Text) -> None:
        needed = self.blocks_for(len(text.ids))
        self.free, text.blocks = self.free - (needed - text.blocks), needed

    def _read(self, step: Step, budget: int) -> int:
        for text in self.running:
            count = min(text.unsent, budget)
            if text.unsent > 1 and count:
                step.work.append([text.name, text.computed, count])
                budget -= count
        return budget

    def _admit(self, step: Step, budget: int) -> None:
        for text in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.case["max_running"]:
                return
            spare = self.case["watermark"] if self.running else 0
            if self.blocks_for(len(text.ids)) + spare > self.free:
                return
            self.waiting.remove(text)
            self.running.append(text)
            self._take(text)
            count = min(text.unsent, budget)
            step.work.append([text.name, 0, count])
            budget -= count


def exact_steps(case: dict) -> Iterator[Step]:
    """All steps until nothing is left and nothing more comes."""
    reference, events = Reference(case), list(case["events"])
    for number in range(case["limit"]):
        refused = []
        while events and events[0]["step"] <= number:
            event = events.pop(0)
            taken = reference.add(event["add"]) if "add" in event else reference.abort(event["abort"])
            refused.append(not taken)
        step = reference.step()
        step.refused = refused
        yield step
        if not events and not reference.waiting and not reference.running:
            return
