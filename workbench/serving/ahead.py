"""One step ahead: while the device computes a step, the host schedules and sends the next one.

    host      schedule 1  send 1  schedule 2  send 2  tokens of 1 arrive  schedule 3  send 3  tokens of 2 arrive
    device                └────── step 1 ──────┘└────── step 2 ──────┘└────── step 3 ──────┘

Step 2 needs the tokens of step 1 as its inputs, and the host does not have them yet. The device does: it takes them
from where step 1 left them. On the host a placeholder (`PENDING`) is appended for each, so that lengths and blocks are
right.

What cannot be known ahead is whether a token ends its sequence. A sequence's last token by count is foreseen: it is
sent no further, and its blocks are freed at once, because the device works in order. A stop token is seen one step
late: the sequence has a row too many in the step under way, whose token is dropped and whose place is freed with the
sequence's blocks.

A token is chosen on the device as on the host: the highest logit, or the same filters and the same random number, drawn
before the step. What needs the token ids themselves (penalties), a draft's proposals or a group padded together waits
for the tokens: such a step is an ordinary one, and is counted.
NanoFlow, Zhu et al., arXiv 2408.12757 §4.3 (asynchronous scheduling).
"""

from __future__ import annotations

from collections import Counter, abc
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch

from workbench.decoding.device_sampling import KernelSampler, drawn, why_not_kernel
from workbench.decoding.draws import RandomDraws, draw
from workbench.decoding.filters import check_filtered, check_logits, filter_rows
from workbench.decoding.sampling import Sampler, SamplingSettings, TokenDistribution
from workbench.decoding.sequence import Finished, NewToken, Sequence
from workbench.errors import WorkbenchError
from workbench.kv.contract import KV, BlockManager
from workbench.kv.paged import Paged
from workbench.models.batch import Batch
from workbench.models.fast import Model
from workbench.models.graphs import Decoded, GraphedSteps
from workbench.models.transfers import sent
from workbench.serving.results import StepReport
from workbench.serving.scheduler import Plan, Scheduler, Work, Written
from workbench.serving.settings import SchedulerSettings

PENDING = -1  # among a sequence's tokens: one that is under way


# -- the scheduler's view --------------------------------------------------------------------------------------------


class AheadScheduler(Scheduler):
    """A scheduler that can go on before the tokens of the last step are known: `expect`, and later `arrived`."""

    def __init__(self, memory: BlockManager, settings: SchedulerSettings | None = None) -> None:
        super().__init__(memory, settings)
        # their last token is under way: not among the running, and without blocks
        self._leaving: set[Sequence] = set()

    def expect(self, plan: Plan, decodes: abc.Sequence[Sequence], now_s: float) -> None:
        """The plan is under way, and each of the decodes will have one token more. All tokens before are known."""
        for work in plan.work:
            sequence = work.sequence
            if sequence.finished:
                continue  # the token before this one ended it
            computed = sequence.computed = self.memory.lengths[sequence.id]
            if (error := self._remember(sequence, work.start, computed)) is not None:
                self._fail(sequence, error, plan, now_s)
        for sequence in decodes:
            if sequence.finished:
                continue
            sequence.token_ids.append(PENDING)
            if not sequence.remaining:
                # that was the last by count: its blocks serve others from the next step on
                self.running.remove(sequence)
                self._leaving.add(sequence)
                self.memory.release(sequence.id)

    def arrived(
        self, sequences: abc.Sequence[Sequence], written: Mapping[Hashable, Written], now_s: float
    ) -> list[Sequence]:
        """The tokens of these sequences are in `token_ids`. Returns those that ended."""
        done = []
        for sequence in sequences:
            result = written[sequence.id]
            if result.tokens:
                if sequence.first_token_s is None:
                    sequence.first_token_s = now_s
                sequence.token_times_s.append(now_s)
            if result.finish_reason is not None:
                sequence.error = result.error
                if result.error is not None:
                    self._remember(sequence, 0, 0, result.error)
                self._end(sequence, result.finish_reason, now_s)
                done.append(sequence)
        return done

    def _end(self, sequence: Sequence, reason: str, now_s: float) -> None:
        if sequence.token_ids[-1] == PENDING:  # it ends before its token has come
            sequence.token_ids.pop()
        if sequence in self._leaving:
            self._leaving.remove(sequence)
            self.running.append(sequence)
        super()._end(sequence, reason, now_s)


# -- the device ------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """Numbers that the device will have written. `ready` waits for them."""

    numbers: torch.Tensor  # on the host
    wait: Callable[[], object]

    def ready(self) -> list[list[float]]:
        self.wait()
        return self.numbers.tolist()


class Device(Protocol):
    """Does what it is given in order, while the caller goes on."""

    def run(self, work: Callable[[], torch.Tensor]) -> Answer: ...

    def finish(self) -> None:
        """Wait for all of it."""
        ...


class InOrder:
    """The device of a model. CUDA queues what it is told to do by itself; a CPU does it at once, so nothing
    overlaps."""

    def __init__(self, device: torch.device) -> None:
        self._queues = device.type == "cuda"

    def run(self, work: Callable[[], torch.Tensor]) -> Answer:
        numbers = work()
        if not self._queues:
            return Answer(numbers, lambda: None)
        on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        on_host.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Answer(on_host, event.synchronize)

    def finish(self) -> None:
        return None  # what comes next is queued behind it


# -- choosing a token without looking at it ---------------------------------------------------------------------------


def why_not_ahead(sampler: Sampler) -> str:
    """Why a token cannot be chosen before the ones before it are known; "" where it can."""
    distribution = sampler.distribution
    if type(distribution) is not TokenDistribution or type(distribution.settings) is not SamplingSettings:
        return "a token distribution of its own"
    if any(name.endswith("penalty") for name in distribution.settings.active()):
        return "penalties read the tokens"
    if not distribution.filters_alone:
        return "a grammar reads the tokens"
    return ""


def _asked(plan: Plan) -> str:
    """Why the host reads logits of this plan; "" where it does not."""
    if any(work.sequence.log_probs is not None for work in plan.work if work.writes):
        return "log-probabilities are read on the host"
    return "log-probabilities of a prompt" if any(work.sequence.reads_prompt for work in plan.work) else ""


def chosen(
    decoded: Decoded,
    settings: abc.Sequence[SamplingSettings],
    uniforms: abc.Sequence[float | None],
    kernels: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n] tokens: what `Sampler.choose` takes, and no value is looked at. [n] the highest logit of each row after the
    filters: not finite where there is nothing to choose from.

    uniforms: the random number of each row, None where the best token is taken. All rows and numbers go to the device
    in one copy, for which the host does not wait. kernels: by our kernel where it can, as `decoding.device_sampling`.
    """
    tokens, tops, logits = decoded.best, decoded.top.double(), decoded.logits
    alike: dict[SamplingSettings, list[int]] = {}
    together: dict[int, float] = {}
    for row, (setting, uniform) in enumerate(zip(settings, uniforms)):
        if uniform is None:
            continue
        if kernels and not why_not_kernel(setting, logits):
            together[row] = uniform
        else:
            alike.setdefault(setting, []).append(row)
    if together:
        rows = [*together]
        at, ours = drawn(logits, [settings[row] for row in rows], [*together.values()], rows)
        tokens = tokens.index_copy(0, at, ours.clamp(min=0))
        tops = tops.index_copy(0, at, torch.where(ours < 0, torch.nan, tops[at]))
    if not alike:
        return tokens, tops
    numbers = [uniform for rows in alike.values() for row in rows if (uniform := uniforms[row]) is not None]
    order, there = sent([[*chain(*alike.values())], numbers], dtype=torch.float64, device=logits.device)
    sizes = [len(rows) for rows in alike.values()]
    for setting, at, uniform in zip(alike, order.long().split(sizes), there.split(sizes)):
        filtered = filter_rows(logits[at], setting)
        tokens = tokens.index_copy(0, at, draw(filtered.double().softmax(dim=-1), uniform))
        tops = tops.index_copy(0, at, filtered.amax(dim=-1).double())
    return tokens, tops


# -- a step under way ------------------------------------------------------------------------------------------------


class Landed(NamedTuple):
    """A token of a step that is done. Not finite: `top`, the model's highest logit, or `left`, the highest after the
    filters, where there was nothing to choose from."""

    sequence: Sequence
    token: int
    top: float
    left: float


@dataclass
class Flight:
    """A step that the device has been given. `sequences`: those that decode, in the order of the columns."""

    plan: Plan
    sequences: list[Sequence]
    answer: Answer  # [3, n]: tokens, and the highest logit of each, of the model and after the filters

    def land(self) -> list[Landed]:
        """Wait; what came of each sequence that has not ended."""
        return [
            Landed(sequence, int(token), top, left)
            for sequence, token, top, left in zip(self.sequences, *self.answer.ready())
            if not sequence.finished
        ]


def _uniform(sequence: Sequence) -> float | None:
    """The sequence's next random number; None where the model's best token is taken, any where filters leave one."""
    if sequence.sampler.distribution.is_argmax:
        return None
    draws = sequence.sampler.draws
    if sequence.sampler.distribution.greedy:
        return 0.0
    assert isinstance(draws, RandomDraws)
    return draws.uniform()


class Launcher:
    """Sends plans to the device. steps: the model, or the `GraphedSteps` that stand for it."""

    def __init__(self, steps: Model | GraphedSteps, kv: KV, max_sequences: int, device: Device | None = None) -> None:
        self._steps, self._kv = steps, kv
        self._graphs = steps if isinstance(steps, GraphedSteps) else None
        self.device = device or InOrder(steps.device)
        self._previous = (
            self._graphs.previous
            if self._graphs is not None
            else torch.zeros(max_sequences, dtype=torch.int64, device=steps.device)
        )

    def launch(self, plan: Plan, before: Flight | None) -> Flight | None:
        """Start a step; None where there is nothing to do. before: the one under way, whose tokens it may need."""
        if not plan.work:
            return None
        works = sorted(plan.work, key=lambda work: not work.writes)  # decodes first, else as they were
        sequences = [work.sequence for work in works if work.writes]
        batch, sources = self._batch(works, len(sequences), before)
        settings = [sequence.sampler.distribution.settings for sequence in sequences]
        kernels = all(isinstance(sequence.sampler, KernelSampler) for sequence in sequences)
        if self._graphs is not None and not self._graphs.why_eager(batch):
            step = self._graphs.prepare(batch, sources)
        else:
            step = self._eager(batch, sources)
        # after the model, whose errors undo the step: a number that was drawn is not drawn again
        uniforms = [_uniform(sequence) for sequence in sequences]

        def work() -> torch.Tensor:
            with torch.inference_mode():
                decoded = step()
                tokens, tops = chosen(decoded, settings, uniforms, kernels)
                self._previous[: len(sequences)].copy_(tokens[: len(sequences)])
                return torch.stack((tokens.double(), decoded.top.double(), tops))

        return Flight(plan, sequences, self.device.run(work))

    def _batch(self, works: list[Work], decodes: int, before: Flight | None) -> tuple[Batch, list[int]]:
        """The batch, and for each of its lists the row of the tokens under way that it begins with, −1 for none."""
        under_way = {} if before is None else {sequence: row for row, sequence in enumerate(before.sequences)}
        lists = [work.sequence.token_ids[work.start : work.start + work.count] for work in works]
        sources = [under_way[work.sequence] if ids == [PENDING] else -1 for work, ids in zip(works, lists)]
        batch = Batch.of(
            [[0] if source >= 0 else ids for source, ids in zip(sources, lists)],
            first_positions=[work.start for work in works],
            sequences=[work.sequence.id for work in works],
            logits=[1] * decodes + [0] * (len(works) - decodes) if decodes else [1] + [0] * (len(works) - 1),
        )
        return batch, sources

    def _eager(self, batch: Batch, sources: list[int]) -> Callable[[], Decoded]:
        """Through the model itself. Its attention asks the kv as it goes, so the step before has to be done with it."""
        self.device.finish()
        device = self._steps.device
        batch = batch.to(device)
        taken = [i for i, source in enumerate(sources) if source >= 0]
        if taken:
            numbers = [batch.query_starts[i] for i in taken], [sources[i] for i in taken]
            at, under_way = sent(numbers, dtype=torch.int64, device=device)
            token_ids = batch.token_ids.index_copy(0, at, self._previous[under_way])
            batch = replace(batch, token_ids=token_ids)
        with torch.inference_mode():
            logits = self._steps(batch, self._kv)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            decoded = Decoded(logits, logits.argmax(dim=-1), logits.amax(dim=-1))
        return lambda: decoded


# -- the engine's view -----------------------------------------------------------------------------------------------


class Steps(Protocol):
    """What running ahead needs of an engine, see `serving.engine.Engine`."""

    scheduler: Scheduler
    kv: Paged

    @property
    def now_s(self) -> float: ...
    def undoing(self, plan: Plan) -> AbstractContextManager[None]: ...
    def compute(self, plan: Plan) -> dict[Hashable, Any]: ...
    def postprocess(self, plan: Plan, outputs: Mapping[Hashable, Any]) -> list[Finished]: ...
    def finish(self, sequence: Sequence) -> Finished: ...
    def report(
        self,
        plan: Plan,
        outputs: Mapping[Hashable, Any],
        emitted: dict[Hashable, tuple[NewToken, ...]],
        finished: list[Finished],
        at_s: float,
        seconds: float,
        schedule_s: float,
        planned_s: float,
    ) -> StepReport: ...


class OneStepAhead:
    """Runs an engine's plans one step ahead. `ran_ahead` counts steps that were sent before the tokens of the one
    before were known, `waited` those that could not be, by the reason."""

    def __init__(self, engine: Steps, steps: Model | GraphedSteps) -> None:
        self._engine, self._scheduler = engine, engine.scheduler
        self.launcher = Launcher(steps, engine.kv, engine.scheduler.settings.max_running)
        self._flight: Flight | None = None  # the step under way
        self.ran_ahead = 0
        self.waited: Counter[str] = Counter()

    def step(self, plan: Plan, began_s: float, planned_s: float) -> StepReport:
        """Send the plan, then postprocess the step before. What cannot be sent before that is computed after it."""
        engine, outputs = self._engine, {}
        reason = self._wait_reason(plan)
        with engine.undoing(plan):
            sent = None if reason else self.launcher.launch(plan, self._flight)
        before, self._flight = self._flight, sent
        arrived = [] if before is None else before.land()
        ran_s = engine.now_s
        emitted, finished = self._land(arrived)
        if reason:
            self.waited[reason] += 1
            plan.work = [work for work in plan.work if not work.sequence.finished]
            outputs = engine.compute(plan)
            ran_s = engine.now_s
            finished += engine.postprocess(plan, outputs)
            for sequence_id, output in outputs.items():
                emitted[sequence_id] = emitted.get(sequence_id, ()) + output.emitted
        elif sent is not None:
            self.ran_ahead += before is not None
            assert isinstance(self._scheduler, AheadScheduler)
            self._scheduler.expect(plan, sent.sequences, ran_s)
        ended_s = engine.now_s
        schedule_s = planned_s - began_s + ended_s - ran_s
        seconds, planned = ended_s - began_s, planned_s - began_s
        return engine.report(plan, outputs, emitted, finished, began_s, seconds, schedule_s, planned)

    def _wait_reason(self, plan: Plan) -> str:
        """Why this plan needs the tokens that are under way; "" where it does not."""
        if self._scheduler.settings.draft_tokens:
            return "a draft"
        if self._scheduler.settings.batching == "static":
            return "a group padded together"
        if self._scheduler.settings.batching == "prefill_first":
            return "prompts in steps of their own"
        if not isinstance(self._scheduler, AheadScheduler):
            return "a scheduler of one's own"
        reasons = (why_not_ahead(work.sequence.sampler) for work in plan.work if work.writes)
        return next(filter(None, reasons), "") or _asked(plan)

    def _land(self, arrived: list[Landed]) -> tuple[dict[Hashable, tuple[NewToken, ...]], list[Finished]]:
        """The tokens of a step take their places; (tokens by sequence, results of those that ended)."""
        written = {landed.sequence.id: _put(landed) for landed in arrived}
        emitted: dict[Hashable, tuple[NewToken, ...]] = {
            landed.sequence.id: (NewToken(landed.token, None, "target", "plain"),)
            for landed in arrived
            if written[landed.sequence.id].tokens
        }
        if not arrived:
            return emitted, []
        assert isinstance(self._scheduler, AheadScheduler)
        ended = self._scheduler.arrived([landed.sequence for landed in arrived], written, self._engine.now_s)
        return emitted, [self._engine.finish(sequence) for sequence in ended]


def _put(landed: Landed) -> Written:
    """The token takes its placeholder's place."""
    sequence = landed.sequence
    assert sequence.token_ids[-1] == PENDING
    try:
        check_logits(torch.tensor([landed.top], dtype=torch.float64), "the model")
        check_filtered(torch.tensor([[landed.left]], dtype=torch.float64), sequence.sampler.distribution.settings)
    except WorkbenchError as error:
        sequence.token_ids.pop()
        return Written(0, "error", error)
    sequence.token_ids[-1] = landed.token
    return Written(1, sequence.end_reason())
