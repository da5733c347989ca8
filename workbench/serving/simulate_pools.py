"""Several engines, simulated: replicas behind a router, or a pool that prefills and a pool that decodes.

    arrivals ─▶ router ─▶ prefill workers ─── rows over a link ───▶ decode workers ─▶ tokens
                              P twins         bytes / bandwidth,        D twins
                                              and latency
    with P = 0                            D replicas, each doing both

Every worker is a `Twin` with a clock of its own; the simulation always goes on with what happens first. What a decode
worker is asked for, and when, is as in `parallel.disaggregated`: it reserves blocks when the prefill begins, or as soon
as it has some; rows are sent layer by layer; it computes the prompt's last token itself and so writes the first one.

Not simulated: messages (a request waits for none), and blocks that a prefill worker holds until all is sent.
DistServe (Zhong et al., arXiv 2401.09670) and Splitwise (Patel et al., arXiv 2311.18677) simulate the same two pools.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from workbench.decoding.sequence import Finished, Request
from workbench.errors import WorkbenchError, check_above, check_between, check_whole
from workbench.serving.arrivals import Arrival
from workbench.serving.results import StepReport
from workbench.serving.routing import Router
from workbench.serving.settings import SchedulerSettings
from workbench.serving.simulate import StepTime, Twin

STALLED = 2  # steps without work: whoever waits here waits for blocks of rows that are on their way


@dataclass(frozen=True)
class RowsLink:
    """The link of one prefill worker: kv bytes of a token, bytes a second, seconds of latency a prompt.

    layers: in so many pieces rows are sent while later layers compute; 1: after the step.
    """

    bytes_per_token: float
    bytes_per_s: float
    latency_s: float = 0.0
    layers: int = 1

    def __post_init__(self) -> None:
        check_above("bytes_per_token", self.bytes_per_token, 0)
        check_above("bytes_per_s", self.bytes_per_s, 0)
        check_between("latency_s", self.latency_s, 0, float("inf"))
        check_whole("layers", self.layers, 1)

    def sent_s(self, began_s: float, ended_s: float, free_s: float, tokens: int) -> float:
        """When the rows of a step are through. free_s: when the link has sent what came before.

        Layer l of L is done at began + (l + 1)/L · (ended − began) and takes T/L of the time T of all: either the link
        waits for the last layer, or it has been busy since the first.
        """
        whole, layer = tokens * self.bytes_per_token / self.bytes_per_s, 1 / self.layers
        first = began_s + layer * (ended_s - began_s)
        return max(ended_s + layer * whole, max(first, free_s) + whole)


@dataclass
class _Way:
    """A prompt between the pools. pieces: began, ended, tokens of each step that computed a part of it."""

    request: Request
    prefill: int
    decode: int
    start: int | None = None
    reserved_s: float = 0.0
    pieces: list[tuple[float, float, int]] = field(default_factory=list)
    done: bool = False  # all computed


class Pools:
    """P prefill workers and D decode workers, or with prefill=0 D replicas that do both. `run` a workload once.

    step_s: seconds of a step of one worker; prefill_step_s: of one that prefills, the same by default.
    prefill_settings, settings: of the schedulers. link: needed with prefill workers. num_blocks, and other settings of
    a `Twin`: of each worker. policy: of the router to the replicas or to the prefill workers; decode workers are chosen
    by their load. Raises WorkbenchError for pools that make no sense.
    """

    def __init__(
        self,
        *,
        prefill: int = 0,
        decode: int = 1,
        step_s: StepTime,
        prefill_step_s: StepTime | None = None,
        settings: SchedulerSettings | None = None,
        prefill_settings: SchedulerSettings | None = None,
        link: RowsLink | None = None,
        policy: str = "least_loaded",
        block_size: int = 16,
        **twin: Any,
    ) -> None:
        check_whole("prefill", prefill, 0)
        check_whole("decode", decode, 1)
        if (link is None) != (prefill == 0):
            raise WorkbenchError(
                f"rows go over a link=RowsLink(…) from prefill workers, got {prefill} of them and {link}"
            )
        settings = settings or SchedulerSettings()
        twin |= {"block_size": block_size}
        prefill_settings, prefill_step_s = prefill_settings or SchedulerSettings(), prefill_step_s or step_s
        self.decode = [Twin(settings, step_s=step_s, **twin) for _ in range(decode)]
        self.prefill = [Twin(prefill_settings, step_s=prefill_step_s, **twin) for _ in range(prefill)]
        self.link = link
        self.router = Router(prefill or decode, policy, block_size=block_size)
        self.decode_router = Router(decode, "least_loaded", block_size=block_size) if prefill else self.router
        self.sent_bytes = 0.0
        self.hit_tokens = self.prompt_tokens = 0  # of prompts, where they were computed
        self._spare = int(settings.watermark * self.decode[0].tables.num_blocks)
        self._ways: dict[Hashable, _Way] = {}
        self._unreserved: list[_Way] = []
        self._free_s = [0.0] * prefill  # of each link
        self._left: dict[Hashable, int] = {}
        self._empty: Counter[int] = Counter()  # steps without work in a row, of a worker
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    @property
    def workers(self) -> int:
        return len(self.prefill) + len(self.decode)

    def run(self, workload: Iterable[Request | Arrival]) -> list[Finished]:
        """Serve all, in the order of their end."""
        for one in workload:
            request = self.decode[0].request(one) if isinstance(one, Arrival) else one
            self._at(request.arrival_s, self._arrive, request)
        finished: list[Finished] = []
        while True:
            busy = [t for t in (*self.prefill, *self.decode) if not t.idle and self._empty[id(t)] < STALLED]
            first = min(busy, key=lambda twin: twin.now_s, default=None)
            if self._coming and (first is None or self._coming[0][0] <= first.now_s):
                heapq.heappop(self._coming)[2]()
            elif first is None:
                break
            else:
                finished += self._step(first)
        assert not self._ways and not self._left, "every request ends"
        return finished

    def _at(self, at_s: float, call: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._coming, (at_s, next(self._numbers), lambda: call(*arguments)))

    # -- events ----------------------------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        routed = self.router.route(request.id, request.prompt_ids, request.max_new_tokens, request.tenant)
        self._left[request.id] = request.n
        if not self.prefill:
            self._add(self.decode[routed.replica], request, request.arrival_s)
            return
        decode = self.decode_router.route(request.id, request.prompt_ids, request.max_new_tokens).replica
        if len(request.prompt_ids) == 1:  # nothing to prefill
            self.router.ended(request.id)
            self._add(self.decode[decode], request, request.arrival_s)
            return
        way = self._ways[request.id] = _Way(request, routed.replica, decode)
        self._unreserved.append(way)
        prompt = Request(request.id, request.prompt_ids[:-1], 1, tenant=request.tenant, arrival_s=request.arrival_s)
        self._add(self.prefill[routed.replica], prompt, request.arrival_s)

    def _add(self, twin: Twin, request: Request, now_s: float) -> None:
        if twin.idle or self._empty[id(twin)]:
            twin.now_s = max(twin.now_s, now_s)
        self._empty[id(twin)] = 0
        if (request.id, 0) in twin.tables.lengths:  # its rows are here: full blocks serve other prompts too
            twin.tables.remember((request.id, 0), request.prompt_ids, request.tenant)
        twin.add(request)

    def _step(self, twin: Twin) -> list[Finished]:
        began_s = twin.now_s
        report = twin.step()
        self._empty[id(twin)] = 0 if report.rows else self._empty[id(twin)] + 1
        for sequence in report.plan.admitted:
            self.prompt_tokens += len(sequence.request.prompt_ids)
            self.hit_tokens += sequence.hit_tokens
        if twin in self.prefill:
            self._prefilled(report, began_s, twin.now_s)
            over: list[Finished] = []
        else:
            over = list(report.finished)
            for one in over:
                self._left[one.request_id] -= 1
                if not self._left[one.request_id]:
                    del self._left[one.request_id]
                    self.decode_router.ended(one.request_id)
        self._reserve(began_s)
        return over

    def _prefilled(self, report: StepReport, began_s: float, ended_s: float) -> None:
        for work in report.plan.work:
            way = self._ways[work.sequence.request.id]
            if not way.pieces and work.start:
                way.pieces.append((began_s, began_s, work.start))  # in the prefix cache here; to be sent all the same
            way.pieces.append((began_s, ended_s, work.count))
        for one in report.finished:
            self.router.ended(one.request_id)
            way = self._ways[one.request_id]
            way.done = True
            if way.start is not None:
                self._send(way)

    def _reserve(self, now_s: float) -> None:
        """Blocks for prompts whose prefill has begun, in the order of their arrival."""
        for way in list(self._unreserved):
            if not way.pieces:
                continue
            twin = self.decode[way.decode]
            spare = self._spare if twin.scheduler.running else 0
            if (start := twin.reserve(way.request, spare=spare)) is not None:
                self._unreserved.remove(way)
                way.start, way.reserved_s = start, now_s if twin.idle else max(now_s, twin.now_s)
                if way.done:
                    self._send(way)

    def _send(self, way: _Way) -> None:
        """All is computed, and there is room for it: when is it there?"""
        assert self.link is not None and way.start is not None
        at_s, skipped = way.reserved_s, way.start
        for began_s, ended_s, tokens in way.pieces:
            new = max(0, tokens - skipped)
            skipped -= tokens - new
            began, ended = max(began_s, way.reserved_s), max(ended_s, way.reserved_s)
            if new:
                at_s = self.link.sent_s(began, ended, self._free_s[way.prefill], new)
                self._free_s[way.prefill] = at_s
                self.sent_bytes += new * self.link.bytes_per_token
        at_s = max(at_s, way.pieces[-1][1]) + self.link.latency_s
        del self._ways[way.request.id]
        self._at(at_s, self._add, self.decode[way.decode], way.request, at_s)
