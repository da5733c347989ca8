"""One step ahead: while the device computes a step, the host schedules and sends the next one.

    host      schedule 1  send 1  schedule 2  send 2  tokens of 1 → texts  schedule 3  send 3  tokens of 2 → texts
    device                └────── step 1 ──────┘└────── step 2 ──────┘└────── step 3 ──────┘

Step 2 needs the tokens of step 1 as its inputs, and the host does not have them yet. The device does: it takes them from where
step 1 left them. On the host a place is kept for each (`PENDING`), so that lengths and blocks are right.

What cannot be known ahead is whether a token ends its text. A text's last token by count is foreseen: it is sent no further,
and its blocks are given back at once, because the device works in order. A stop token is seen one step late: the text has a
row too many in the step under way, whose token is dropped and whose place goes back with the text's blocks.

A token is chosen on the device as on the host: the highest logit, or the same filters and the same random number, drawn
before the step. What needs the text itself (penalties), a draft's proposals or a group padded together waits for the tokens:
such a step is an ordinary one, and is counted.
NanoFlow, Zhu et al., arXiv 2408.12757 §4.3 (asynchronous scheduling).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from workbench.decoding.law import SamplingLaw
from workbench.decoding.sampling import FILTERS, SamplingSettings
from workbench.models.batch import Batch
from workbench.models.graphs import Decoded, GraphedSteps
from workbench.serving.request import Track
from workbench.serving.scheduler import Memory, Plan, Scheduler, SchedulerSettings, Work, Written
from workbench.speculation.engine import Writing

PENDING = -1  # in a text: a token that is under way


# -- the scheduler's view --------------------------------------------------------------------------------------------


class AheadScheduler(Scheduler):
    """A scheduler that can go on before the tokens of the last step are known: `expect`, and later `arrived`."""

    def __init__(self, memory: Memory, settings: SchedulerSettings | None = None) -> None:
        super().__init__(memory, settings)
        # their last token is under way: not among the running, and without blocks
        self._leaving: set[Track] = set()

    def expect(self, plan: Plan, writers: Sequence[Track]) -> None:
        """The plan is under way, and each of the writers will have one token more. All tokens before are known."""
        size, remember = self.memory.block_size, self.settings.remember
        for work in plan.work:
            track = work.track
            if track.finished:
                continue  # the token before this one ended it
            computed = track.computed = self.memory.lengths[track.sequence]
            if remember and computed // size > work.start // size:
                self.memory.remember(track.sequence, track.token_ids[:computed], track.request.tenant)
        for track in writers:
            if track.finished:
                continue
            track.token_ids.append(PENDING)
            if not track.remaining:
                # that was the last by count: its blocks serve others from the next step on
                self.running.remove(track)
                self._leaving.add(track)
                self.memory.release(track.sequence)

    def arrived(
        self, tracks: Sequence[Track], written: Mapping[Hashable, Written], now_s: float
    ) -> list[Track]:
        """The tokens of these texts are in `token_ids`. Returns who is done."""
        done = []
        for track in tracks:
            result = written[track.sequence]
            if result.tokens:
                if track.first_token_s is None:
                    track.first_token_s = now_s
                track.token_times_s.append(now_s)
            if result.finish_reason is not None:
                track.error = result.error
                self._end(track, result.finish_reason, now_s)
                done.append(track)
        return done

    def abort(self, request_id: Hashable, now_s: float) -> list[Track]:
        tracks = super().abort(request_id, now_s)
        for track in tracks:
            if track.token_ids[-1] == PENDING:
                track.token_ids.pop()
        return tracks

    def _end(self, track: Track, reason: str, now_s: float) -> None:
        if track in self._leaving:
            self._leaving.remove(track)
            self.running.append(track)
        super()._end(track, reason, now_s)


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
    """The device of a model. CUDA queues what it is told to do by itself; a CPU does it at once, so nothing overlaps."""

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


def why_not_ahead(law: object) -> str:
    """Why the token of this law cannot be chosen before the text is known; "" where it can."""
    if type(law) is not SamplingLaw or type(law.settings) is not SamplingSettings:
        return "a law of its own"
    if any(name.endswith("penalty") for name in law.settings.active()):
        return "penalties read the text"
    return ""


def chosen(
    decoded: Decoded, settings: Sequence[SamplingSettings], uniforms: Sequence[float | None]
) -> torch.Tensor:
    """[n] tokens: what `SamplingLaw.rows` and `RandomDraws.choose` take, and no value is looked at.

    uniforms: the random number of each row, None where the best token is taken.
    """
    tokens, logits = decoded.best, decoded.logits
    alike: dict[SamplingSettings, list[int]] = {}
    for row, (setting, uniform) in enumerate(zip(settings, uniforms)):
        if uniform is not None:
            alike.setdefault(setting, []).append(row)
    for setting, rows in alike.items():
        at = torch.tensor(rows, device=logits.device)
        cumulative = _filtered(logits[at], setting).double().softmax(dim=-1).cumsum(dim=-1)
        drawn = torch.tensor([uniforms[row] for row in rows], dtype=torch.float64, device=logits.device)
        found = torch.searchsorted(cumulative, drawn[:, None], right=True)[:, 0]
        found = torch.where(found < logits.shape[-1], found, cumulative.argmax(dim=-1))
        tokens = tokens.index_copy(0, at, found)
    return tokens


def _filtered(logits: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    for name in settings.active():
        value = getattr(settings, name)
        if name == "temperature":  # as in `apply_temperature`, with both ways computed
            scaled = logits / value
            overflows = (scaled == torch.inf).any(dim=-1, keepdim=True)
            shifted = (logits - logits.amax(dim=-1, keepdim=True)) / value
            logits = torch.where(overflows, shifted, scaled)
        else:
            logits = FILTERS[name](logits, value)
    return logits


# -- a step under way ------------------------------------------------------------------------------------------------


@dataclass
class Flight:
    """A step that the device has been given. `tracks`: those that get a token, in the order of the answer's columns."""

    plan: Plan
    tracks: list[Track]
    answer: Answer  # [2, n]: tokens, and the highest logit of each

    def land(self) -> list[tuple[Track, int, float]]:
        """Wait; (text, token, highest logit) of each that still wants its token."""
        tokens, tops = self.answer.ready()
        return [
            (track, int(token), top)
            for track, token, top in zip(self.tracks, tokens, tops)
            if not track.finished
        ]


class Launcher:
    """Sends plans to the device. steps: the model, or the `GraphedSteps` that stand for it."""

    def __init__(self, steps, kv, most_texts: int, device: Device | None = None) -> None:
        self._steps, self._kv = steps, kv
        self._graphs = steps if isinstance(steps, GraphedSteps) else None
        self.device = device or InOrder(steps.device)
        self._previous = (
            self._graphs.previous
            if self._graphs is not None
            else torch.zeros(most_texts, dtype=torch.int64, device=steps.device)
        )

    def launch(
        self, plan: Plan, writings: Mapping[Hashable, Writing], before: Flight | None
    ) -> Flight | None:
        """Start a step; None where there is nothing to do. before: the one under way, whose tokens it may need."""
        if not plan.work:
            return None
        works = sorted(plan.work, key=lambda work: not work.writes)  # writers first, else as they were
        tracks = [work.track for work in works if work.writes]
        batch, sources = self._batch(works, len(tracks), before)
        writing = [writings[track.sequence] for track in tracks]
        laws = [one.law.settings for one in writing]
        uniforms = [None if one.law.greedy else one.draws.uniform() for one in writing]
        if self._graphs is not None and not self._graphs.why_eager(batch):
            step = self._graphs.prepare(batch, sources)
        else:
            step = self._eager(batch, sources)

        def work() -> torch.Tensor:
            with torch.inference_mode():
                decoded = step()
                tokens = chosen(decoded, laws, uniforms)
                self._previous[: len(tracks)].copy_(tokens[: len(tracks)])
                return torch.stack((tokens.double(), decoded.top.double()))

        return Flight(plan, tracks, self.device.run(work))

    def _batch(self, works: list[Work], writers: int, before: Flight | None) -> tuple[Batch, list[int]]:
        """The batch, and for each of its lists the row of the tokens under way that it begins with, −1 for none."""
        under_way = {} if before is None else {track: row for row, track in enumerate(before.tracks)}
        lists = [work.track.token_ids[work.start : work.start + work.count] for work in works]
        sources = [under_way[work.track] if ids == [PENDING] else -1 for work, ids in zip(works, lists)]
        batch = Batch.of(
            [[0] if source >= 0 else ids for source, ids in zip(sources, lists)],
            first_positions=[work.start for work in works],
            sequences=[work.track.sequence for work in works],
            logits=[1] * writers + [0] * (len(works) - writers) if writers else [1] + [0] * (len(works) - 1),
        )
        return batch, sources

    def _eager(self, batch: Batch, sources: list[int]) -> Callable[[], Decoded]:
        """Through the model itself. Its attention asks the kv as it goes, so the step before has to be done with it."""
        self.device.finish()
        device = self._steps.device
        rows = None if batch.logit_rows is None else batch.logit_rows.to(device)
        token_ids = batch.token_ids.to(device)
        taken = [i for i, source in enumerate(sources) if source >= 0]
        if taken:
            at = torch.tensor([batch.query_starts[i] for i in taken], device=device)
            token_ids[at] = self._previous[torch.tensor([sources[i] for i in taken], device=device)]
        batch = replace(batch, token_ids=token_ids, positions=batch.positions.to(device), logit_rows=rows)
        with torch.inference_mode():
            logits = self._steps(batch, self._kv)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            decoded = Decoded(logits, logits.argmax(dim=-1), logits.amax(dim=-1))
        return lambda: decoded
