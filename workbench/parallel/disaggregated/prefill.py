"""The engine that prefills: it computes prompts, sends their keys and values, and generates nothing that is kept."""

from __future__ import annotations

import contextlib
import json
from array import array
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

from workbench.decoding.sequence import Finished, Request, Sequence
from workbench.errors import WorkbenchError, shown
from workbench.kv.paged_rows import watch_layers
from workbench.models.batch import Batch
from workbench.models.digest import model_digest
from workbench.models.fast import Model
from workbench.parallel.disaggregated.connector import Sender, prompt_digest
from workbench.parallel.disaggregated.links import Link, LinkLost
from workbench.parallel.disaggregated.messages import MAX_NUMBER, MAX_TEXT, BadMessage, Message
from workbench.serving.engine import Engine, Output
from workbench.serving.results import StepReport
from workbench.serving.scheduler import Plan, Work
from workbench.serving.settings import SchedulerSettings
from workbench.serving.step_time import StepShape

STEPS_KEPT = 10_000
IDLE_S = 0.002  # between two looks at the link while nothing is to be computed


def check_sends(model: Model, settings: SchedulerSettings, refused: dict[str, Any]) -> None:
    """Raise WorkbenchError for what keys and values cannot be sent of, or for settings that say otherwise."""
    if model.config.state_layers:
        raise WorkbenchError(f"{model.name} keeps states, which are not sent; disaggregate a model whose layers attend")
    if hasattr(model, "make_kv"):
        raise WorkbenchError(f"{model.name} lies on several ranks, and its keys and values too; use the whole model")
    if settings.batching == "static":
        raise WorkbenchError(
            "static batching takes whole groups and pads them; disaggregate with batching='continuous'"
        )
    for name, value in refused.items():
        if value:
            raise WorkbenchError(f"{name}={value!r} is not for this engine of the two; leave it out")


def note(steps: deque[tuple[StepShape, float]], report: StepReport, seconds: float) -> None:
    """What a step took with the messages before and after it; of the steps whose shape a report says."""
    plan = report.plan
    if report.rows and not (plan.padding or plan.swapped_out or plan.swapped_in or report.drafted):
        steps.append((StepShape.of_report(report), seconds))


class PrefillEngine(Engine):
    """Serves prompts that come over the link: `step` until the link is lost, or `serve`.

    layerwise: rows of a layer are sent as soon as it is done; False: all after the step. Other settings as of `Engine`.
    Raises WorkbenchError for a draft, asynchronous steps, static batching and models with states.
    """

    def __init__(
        self,
        model: Model,
        settings: SchedulerSettings | None = None,
        *,
        link: Link,
        layerwise: bool = True,
        **pool: Any,
    ) -> None:
        settings = settings or SchedulerSettings()
        refused = {name: pool.get(name) for name in ("draft", "draft_length", "asynchronous", "scheduler", "tiers")}
        check_sends(model, settings, refused)
        super().__init__(
            model, settings, **{"graphs": False} | pool
        )  # rows of a replayed step are not seen layer by layer
        self.sender = Sender(link, self.kv, model_digest(model))
        self._settings = settings
        self.layerwise = layerwise
        self.steps: deque[tuple[StepShape, float]] = deque(maxlen=STEPS_KEPT)  # that were not reported yet
        self.errors: list[str] = []  # of steps, while it served
        self._alive: set[int] = set()  # transfers whose sequence waits or runs
        self._offered: set[int] = set()  # of these
        self._given_up: list[int] = []
        self._later: deque[Message] = deque()  # what came in the middle of a step
        if layerwise:
            watch_layers(self.kv, self._send_layer)

    @property
    def link(self) -> Link:
        return self.sender.link

    def serve(self) -> None:
        """Until the link is lost: the other engine has ended, or this one's `link.close`."""
        while not self.link.why_lost:
            try:
                self.step()
            except Exception as error:
                if self.why_broken:
                    raise
                self.errors.append(f"{type(error).__name__}: {error}")  # its prompts are dropped, and computed there
            if self.idle:
                self.link.wait(IDLE_S)
        self.step()  # gives up what is left

    def step(self) -> StepReport:
        """What came over the link, what can be sent of prompts that are done, then a step."""
        began_s = self.now_s
        self._hear()
        self._end_given_up()
        with self._unless_lost():
            for one in list(self.sender.outgoing.values()):
                if one.held is not None:
                    self.sender.send_all(one.transfer, one.tokens)
        self._end_given_up()
        report = super().step()
        note(self.steps, report, self.now_s - began_s)
        return report

    # -- what comes ------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        try:
            while self._later:
                self._take_message(self._later.popleft())
            while (message := self.link.poll()) is not None:
                self._take_message(message)
        except LinkLost:
            self._give_up()
        except BadMessage as error:
            self.link.lose(str(error))
            self._give_up()

    def _take_message(self, message: Message) -> None:
        if message.kind == "report":
            steps = [[shape.new_tokens, shape.contexts, shape.logit_rows, seconds] for shape, seconds in self.steps]
            self.steps.clear()
            self.link.post(Message("steps", {}, json.dumps(steps).encode()))
            return
        transfer = message.fields.get("transfer", MAX_NUMBER)
        if message.kind == "prefill":
            try:
                self.add(self._request(message))
                self._alive.add(transfer)
            except LinkLost:
                raise
            except WorkbenchError as error:
                self.link.post(Message("drop", {"transfer": transfer, "reason": f"not prefilled: {error}"[:MAX_TEXT]}))
        elif message.kind == "reserved":
            if transfer in self.sender.outgoing:
                self.sender.reserved(transfer, message.start)
        elif message.kind == "drop":
            self._given_up.append(transfer)
        else:
            raise BadMessage(f"a prefill engine takes no message {message.kind!r}; are both ends of the link the same?")

    @staticmethod
    def _request(message: Message) -> Request:
        """The one token that it generates is not used."""
        if len(message.payload) % 8 or not message.payload:
            raise BadMessage(f"a prompt is tokens of 8 bytes, at least one, and {len(message.payload)} bytes came")
        try:
            tenant = bytes.fromhex(message.tenant)
        except ValueError as error:
            raise BadMessage(f"a tenant is hexadecimal digits, got {shown(message.tenant)}") from error
        ids = tuple(array("q", bytes(message.payload)))
        return Request(message.transfer, ids, 1, stop_token_ids=(), tenant=tenant, priority=message.priority)

    # -- a step ----------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> Plan:
        """Running prompts and those that are held until they are sent: at most max_running together."""
        left = self._settings.max_running - self.sender.num_held
        if left == 0:
            return Plan()
        if left != self.scheduler.settings.max_running:
            self.scheduler.settings = replace(self._settings, max_running=left)
        return super().schedule(now_s)

    def compute(self, plan: Plan) -> dict[Hashable, Output]:
        """Offer what begins, compute, send what can be sent; what ends keeps its blocks until all is sent."""
        for work in plan.work:
            request, transfer = work.sequence.request, _transfer_of(work)
            if transfer not in self._offered:
                self._offered.add(transfer)
                prompt = prompt_digest(request.prompt_ids, request.tenant)
                with self._unless_lost():
                    self.sender.offer(transfer, work.sequence.id, len(request.prompt_ids), prompt)
        last = [work.writes for work in plan.work]  # before its token is appended
        try:
            outputs = super().compute(plan)
        except BaseException as error:  # the step is undone, and its rows would be sent a second time
            self._give_up(f"the prefill engine's step failed: {type(error).__name__}: {error}"[:MAX_TEXT])
            raise
        for work, ends in zip(plan.work, last):
            with self._unless_lost():
                self._after(work, outputs.get(work.sequence.id), ends)
        return outputs

    def _after(self, work: Work, output: Output | None, ends: bool) -> None:
        transfer = _transfer_of(work)
        if output is not None and output.error is not None and transfer in self.sender.outgoing:
            self.sender.drop(transfer, f"not prefilled: {output.error}"[:MAX_TEXT])
            return
        if transfer not in self.sender.outgoing:
            return  # all of it is there already, or it was given up
        self.sender.send_all(transfer, work.start + work.count)
        if ends and transfer in self.sender.outgoing:
            self.sender.hold(transfer)

    def _send_layer(self, layer: int, batch: Batch) -> None:
        """While the model computes: this layer's rows of all texts of the batch, where there are blocks for them."""
        with self._unless_lost():
            while (message := self.link.poll()) is not None:
                if message.kind == "reserved":
                    self._take_message(message)
                else:
                    self._later.append(message)
            for name in batch.sequences:
                if isinstance(name, tuple) and name[0] in self.sender.outgoing:
                    self.sender.send(name[0], layer, self.kv.lengths[name])

    # -- endings ---------------------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence) -> Finished:
        self._alive.discard(sequence.request.id)
        self._offered.discard(sequence.request.id)
        return super().finish(sequence)

    @contextlib.contextmanager
    def _unless_lost(self) -> Iterator[None]:
        """A lost link ends no step: its prompts are given up after it."""
        try:
            yield
        except LinkLost:
            self._give_up()
        except BadMessage as error:
            self.link.lose(str(error))
            self._give_up()

    def _give_up(self, reason: str = "") -> None:
        """All of them. reason: for the other side."""
        for transfer in {*self.sender.outgoing, *self._alive}:
            self._given_up.append(transfer)
            if reason and not self.link.why_lost:
                self.link.post(Message("drop", {"transfer": transfer, "reason": reason}))

    def _end_given_up(self) -> None:
        for transfer in self._given_up:
            if transfer in self.sender.outgoing:
                self.sender.drop(transfer)
            if transfer in self._alive:
                self.abort(transfer)
        self._given_up.clear()


def _transfer_of(work: Work) -> int:
    """The name of a prefill engine's request is its transfer."""
    transfer = work.sequence.request.id
    assert isinstance(transfer, int)
    return transfer
