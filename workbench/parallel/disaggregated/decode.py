"""The engine that decodes: prompts are prefilled elsewhere, or here where that fails.

    add(request) ─▶ `prefill` over the link ─▶ offer ─▶ reserve ─▶ layers ─▶ arrived ─▶ waits with its blocks ─▶ decoded
                        └────── refused, dropped, too late, link lost ──────▶ blocks freed ─▶ waits, recomputed here

Whatever happens on the other side, every accepted request is answered; `problems` says what happened, how often.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Hashable
from typing import Any, NamedTuple

from workbench.decoding.request_checks import Accepted
from workbench.errors import check_above, check_whole
from workbench.models.digest import model_digest
from workbench.models.fast import Model
from workbench.parallel.disaggregated.connector import Incoming, Receiver
from workbench.parallel.disaggregated.links import Link, LinkLost
from workbench.parallel.disaggregated.messages import MAX_NUMBER, BadMessage, Message
from workbench.parallel.disaggregated.prefill import STEPS_KEPT, check_sends, note
from workbench.serving.engine import Engine
from workbench.serving.results import StepReport
from workbench.serving.settings import SchedulerSettings
from workbench.serving.step_time import StepShape

KEPT = 10_000  # transfers that are remembered
IDLE_S = 0.0005  # of waiting for the link where nothing can be computed


class Transfer(NamedTuple):
    """One that arrived. tokens: S, `found` of them in the prefix cache here; bytes: of the others' rows. Times are of
    the engine's clock."""

    request_id: Hashable
    tokens: int
    found: int
    bytes: int
    asked_s: float
    arrived_s: float


class DecodeEngine(Engine):
    """An `Engine` whose prompts are prefilled by the one at the other end of the link.

    patience_s: a prompt that did not arrive in so long after it was asked for is computed here. min_tokens: prompts of
    which fewer tokens would have to be sent are, too. Other settings as of `Engine`, drafts and asynchronous steps
    among them. `transfers` has those that arrived; `why_alone` says why nothing is asked for any more, "" while the
    link is good.
    """

    def __init__(
        self,
        model: Model,
        settings: SchedulerSettings | None = None,
        *,
        link: Link,
        patience_s: float = 60.0,
        min_tokens: int = 1,
        **pool: Any,
    ) -> None:
        settings = settings or SchedulerSettings()
        check_sends(model, settings, {name: pool.get(name) for name in ("scheduler", "tiers")})
        self.patience_s = check_above("patience_s", patience_s, 0)
        self.min_tokens = check_whole("min_tokens", min_tokens, 1)
        super().__init__(model, settings, **pool)
        self.settings = settings
        self.receiver = Receiver(link, self.kv, model_digest(model))
        self.transfers: deque[Transfer] = deque(maxlen=KEPT)
        self.problems: Counter[str] = Counter()  # why requests were computed here instead, and how many
        self.why_alone = ""
        self._waits: dict[int, tuple[Accepted, float]] = {}  # by transfer: who waits for it, since when
        self.steps: deque[tuple[StepShape, float]] = deque(maxlen=STEPS_KEPT)
        self._steps: list[tuple[StepShape, float]] | None = None  # an answer
        self._spare = int(settings.watermark * self.kv.num_blocks)

    @property
    def link(self) -> Link:
        return self.receiver.link

    @property
    def idle(self) -> bool:
        return super().idle and not self._waits

    def close(self) -> None:
        """End the link: the prefill engine ends too. What is under way is computed here. May be called twice."""
        self.link.close()

    # -- requests --------------------------------------------------------------------------------------------------

    def _let_in(self, accepted: Accepted) -> None:
        """Ask for its prompt, or let it wait here. A request whose prompt was asked for comes a second time when it is
        aborted."""
        if not self._is_coming(accepted):
            return
        for transfer, (waiting, _) in self._waits.items():
            if waiting is accepted:
                self._compute_here(transfer, "", "the request was aborted")
                return
        if self._is_worth_asking(accepted):
            request = accepted.request
            try:
                one = self.receiver.want((request.id, 0), request.prompt_ids, request.tenant, request.priority)
            except LinkLost as error:
                self._go_on_alone(error)
            else:
                self._waits[one.transfer] = accepted, self.now_s
                return
        super()._let_in(accepted)

    def _is_worth_asking(self, accepted: Accepted) -> bool:
        request = accepted.request
        if self.why_alone or request.prompt_log_probs is not None:
            return False
        known = len(self.kv.tables.find(request.prompt_ids, request.tenant)) * self.kv.block_size
        return len(request.prompt_ids) - 1 - known >= self.min_tokens

    def step(self) -> StepReport:
        if self._waits and self.scheduler.idle:
            self.link.wait(IDLE_S)
        began_s = self.now_s
        report = super().step()
        note(self.steps, report, self.now_s - began_s)
        return report

    # -- what comes ------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Before and after a step: calls of other threads, then what came over the link."""
        super()._take()
        if self.why_alone:
            return
        try:
            while (message := self.link.poll()) is not None:
                self._take_message(message)
            self._reserve()
        except (LinkLost, BadMessage) as error:
            self._go_on_alone(error)

    def prefill_steps(self, timeout_s: float = 10.0) -> list[tuple[StepShape, float]]:
        """Shapes and seconds of the prefill engine's steps since it was last asked. Raises LinkLost where it does not
        answer."""
        self._steps, deadline_s = None, time.monotonic() + timeout_s
        self.link.post(Message("report"))
        while self._steps is None:
            if self.why_alone or time.monotonic() > deadline_s:
                raise LinkLost(self.why_alone or f"the prefill engine did not answer within {timeout_s:g} s")
            self.link.wait(IDLE_S)
            self.step()
        return self._steps

    def _take_message(self, message: Message) -> None:
        if message.kind == "steps":
            try:
                steps = json.loads(bytes(message.payload))
                self._steps = [(StepShape(tuple(new), tuple(old), rows), float(s)) for new, old, rows, s in steps]
            except (ValueError, TypeError) as error:
                raise BadMessage(f"steps are lists of new tokens, contexts, rows and seconds ({error})") from error
            return
        transfer = message.fields.get("transfer", MAX_NUMBER)
        if message.kind not in ("offer", "layer", "drop") or not self.receiver.was_asked(transfer):
            raise BadMessage(f"a decode engine that did not ask for it takes no message {message.kind!r} {transfer}")
        if transfer not in self._waits:
            return  # sent before the other side heard that it is over
        try:
            if message.kind == "offer":
                self.receiver.check_offer(message)
            elif message.kind == "layer":
                self.receiver.put(message)
                if self.receiver.arrived(transfer):
                    self._arrived(transfer)
            else:
                self._compute_here(transfer, message.reason)
        except BadMessage as error:
            self._compute_here(transfer, str(error), "what was sent does not fit what was asked for")

    def _reserve(self) -> None:
        """Blocks for what was offered, in the order of the requests. Not while a sequence waits here that has none: it
        was preempted, or is to be recomputed, and would wait for ever. Who waits too long is computed here."""
        for transfer, (_, since_s) in list(self._waits.items()):
            one = self.receiver.incoming[transfer]
            if one.offer is not None and one.start is None and self._has_room():
                self.receiver.reserve(transfer, spare=self._spare if self.scheduler.running else 0)
                if self.receiver.arrived(transfer):  # all of it was found in the prefix cache
                    self._arrived(transfer)
                    self.link.post(Message("drop", {"transfer": transfer, "reason": "not needed any more"}))
                    continue
            if self.now_s - since_s > self.patience_s:
                late = f"not prefilled and sent within {self.patience_s:g} s"
                self._compute_here(transfer, late, late)

    def _has_room(self) -> bool:
        held, scheduler = self.kv.lengths, self.scheduler
        if len(held) - len(scheduler.running) >= scheduler.settings.max_running:
            return False  # so many places of the kv are for sequences that do not run yet
        return not scheduler.swapped and all(sequence.id in held for sequence in scheduler.waiting)

    def _arrived(self, transfer: int) -> None:
        accepted, since_s = self._waits.pop(transfer)
        one: Incoming = self.receiver.finish(transfer)
        assert one.start is not None
        self.transfers.append(Transfer(accepted.request.id, one.tokens, one.start, one.bytes, since_s, self.now_s))
        super()._let_in(accepted)

    def _compute_here(self, transfer: int, problem: str, reason: str = "") -> None:
        """Free the blocks of a transfer and let its request wait as any other. reason: for the other side."""
        accepted, _ = self._waits.pop(transfer)
        if problem:
            self.problems[problem] += 1
        try:
            self.receiver.drop(transfer, reason)
        finally:
            super()._let_in(accepted)

    def _go_on_alone(self, error: Exception) -> None:
        """The link is of no use any more. Said once: the requests under way are computed here."""
        self.why_alone = self.why_alone or str(error)
        self.link.lose(self.why_alone)
        for transfer in list(self._waits):
            self._compute_here(transfer, self.why_alone)
