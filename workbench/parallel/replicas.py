"""Data parallelism: several engines with the same model behind a router (`serving.routing`), in this process or in
processes of their own.

    Replicas.add ─▶ Router.route ─▶ replica 0   Engine        waiting │ running
                                 ─▶ replica 1   Engine        waiting │ running      a cache of its own each

A replica that dies ends what it was running, with an error: tokens may have been read already. What it had accepted and
not started goes to the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from workbench.decoding.request_checks import check_requests
from workbench.decoding.sampling import SamplingSettings
from workbench.decoding.sequence import Finished, LogProb, Request
from workbench.errors import WorkbenchError, check_above, check_whole
from workbench.models.checkpoints import load
from workbench.models.fast import prepare as prepared
from workbench.parallel.disaggregated.links import LinkLost
from workbench.parallel.disaggregated.messages import MAX_TEXT, BadMessage, Message
from workbench.parallel.disaggregated.pair import WAIT_S, make_link
from workbench.parallel.ranks import Rank, start_ranks
from workbench.serving.engine import Engine
from workbench.serving.routing import Router
from workbench.serving.settings import SchedulerSettings

IDLE_S = 0.002
ALIVE_S = 1.0  # a replica's process that computes says so as often


class ReplicaLost(WorkbenchError):
    """A replica ended, or its engine broke."""


class News(NamedTuple):
    """What a replica did since it was last asked."""

    started: tuple[Hashable, ...] = ()
    ended: tuple[Finished, ...] = ()


class Replica(ABC):
    """One engine, as `Replicas` uses it. Times are of the clock that `begin` gives."""

    block_size: int

    @abstractmethod
    def begin(self, now_s: Callable[[], float]) -> None:
        """Called once, before anything else."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Raises WorkbenchError for what can never be served, and ReplicaLost."""

    @abstractmethod
    def turn(self) -> News:
        """Go on, without waiting long. Raises ReplicaLost."""

    @abstractmethod
    def close(self) -> None: ...


class LocalReplica(Replica):
    """An engine of this process; a turn is a step."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.block_size = engine, engine.kv.block_size
        self._later_s = 0.0  # its clock reads 0 so much after the other's

    def begin(self, now_s: Callable[[], float]) -> None:
        self._later_s = now_s() - self.engine.now_s

    def add(self, request: Request) -> None:
        self.engine.add(replace(request, arrival_s=max(0.0, request.arrival_s - self._later_s)))

    def turn(self) -> News:
        if self.engine.idle:
            return News()
        try:
            report = self.engine.step()
        except Exception as error:
            raise ReplicaLost(f"its engine failed: {type(error).__name__}: {error}") from error
        started = tuple(sequence.request.id for sequence in report.plan.admitted)
        return News(started, tuple(later(one, self._later_s) for one in report.finished))

    def close(self) -> None:
        return None


class ProcessReplica(Replica):
    """An engine in a process of its own, which reads the model for itself (a shipped name, or a folder).

    pool: settings of `Engine` (num_blocks, block_size, prefix, …). Its run has two ranks, this process and that one, so
    that the end of one replica is not the end of the others. silent_s: one that has something to do and says nothing
    for so long is lost, and its process is killed; longer than a step, and than reading the model takes.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        settings: SchedulerSettings | None = None,
        *,
        transport: str = "tcp",
        threads: int = 1,
        prepare: bool = False,
        start_s: float = 120.0,
        silent_s: float = 60.0,
        **pool: Any,
    ) -> None:
        self.silent_s = check_above("silent_s", silent_s, 0)
        self.block_size = check_whole("block_size", pool.get("block_size", 16), 1)
        args = (transport, os.fspath(model), prepare, settings or SchedulerSettings(), pool)
        self._ranks = start_ranks(2, _serve, *args, threads=threads, timeout_s=WAIT_S, start_s=start_s)
        try:
            self._link = make_link(self._ranks.rank, transport, timeout_s=start_s)
        except BaseException:
            self._ranks.stop(within_s=0)
            raise
        self._next = 0
        self._asked: dict[int, Request] = {}  # by number, until all of its sequences have ended
        self._left: dict[int, int] = {}  # sequences to come
        self._heard_s = time.monotonic()
        self._hangs = False
        self._now_s: Callable[[], float] = time.perf_counter

    @property
    def pid(self) -> int:
        return self._ranks.pid_of(1)

    def begin(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s

    def add(self, request: Request) -> None:
        if request.guide is not None:
            raise WorkbenchError(
                f"request {request.id!r} has a grammar, and those are not sent to other processes; use LocalReplica"
            )
        plain = {one.name: getattr(request, one.name) for one in fields(request) if one.name not in ("id", "guide")}
        plain["sampling"] = None if request.sampling is None else asdict(request.sampling)
        if isinstance(request.tenant, bytes):
            plain["tenant"] = {"bytes": request.tenant.hex()}
        plain["arrival_s"] = time.perf_counter() - (self._now_s() - request.arrival_s)  # the machine's clock
        self._post(Message("add", {"request": self._next}, json.dumps(plain).encode()))
        if not self._left:
            self._heard_s = time.monotonic()
        self._asked[self._next], self._left[self._next] = request, request.n
        self._next += 1

    def turn(self) -> News:
        started: list[Hashable] = []
        ended: list[Finished] = []
        try:
            while (message := self._link.poll()) is not None:
                self._heard_s = time.monotonic()
                if message.kind == "alive":
                    continue
                request = self._named(message)
                if message.kind == "started":
                    started.append(request.id)
                elif message.kind == "refused":
                    ended += [
                        failed(request, WorkbenchError(message.reason), self._now_s(), i) for i in range(request.n)
                    ]
                    self._over(message.request, request.n)
                else:
                    ended.append(self._finished(request, message))
                    self._over(message.request, 1)
        except (LinkLost, BadMessage) as error:
            raise ReplicaLost(self._ranks.rank.failed or str(error)) from error
        if self._left and time.monotonic() - self._heard_s > self.silent_s:
            self._hangs = True
            raise ReplicaLost(f"its process {self.pid} has work and said nothing for {self.silent_s:g} s")
        return News(tuple(started), tuple(ended))

    def wait(self, timeout_s: float) -> None:
        """Until there may be news."""
        if not self._link.why_lost:
            self._link.wait(timeout_s)

    def close(self) -> None:
        self._link.close()
        self._ranks.stop(within_s=0.0 if self._hangs else 5.0)

    def _over(self, number: int, sequences: int) -> None:
        self._left[number] -= sequences
        if self._left[number] <= 0:
            del self._left[number], self._asked[number]

    def _post(self, message: Message) -> None:
        try:
            self._link.post(message)
        except LinkLost as error:
            raise ReplicaLost(self._ranks.rank.failed or str(error)) from error

    def _named(self, message: Message) -> Request:
        if message.kind not in ("started", "refused", "ended") or message.request not in self._asked:
            raise BadMessage(f"a message {message.kind!r} came from a replica that was not asked for it")
        return self._asked[message.request]

    def _finished(self, request: Request, message: Message) -> Finished:
        try:
            plain = json.loads(bytes(message.payload))
            for name in ("token_ids", "token_times_s"):
                plain[name] = tuple(plain[name])
            for name in ("log_probs", "prompt_log_probs"):
                if plain[name] is not None:
                    plain[name] = tuple(
                        None if p is None else LogProb(p[0], p[1], tuple(map(tuple, p[2]))) for p in plain[name]
                    )
            for name in ("error", "draft_error"):
                plain[name] = None if plain[name] is None else WorkbenchError(plain[name])
            return later(Finished(request.id, **plain), self._now_s() - time.perf_counter())
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise BadMessage(f"what came of request {request.id!r} is no result: {error!r:.200}") from error


def later(finished: Finished, seconds: float) -> Finished:
    """The same on a clock that reads `seconds` more."""

    def moved(at: float | None) -> float | None:
        return None if at is None else at + seconds

    return replace(
        finished,
        arrival_s=finished.arrival_s + seconds,
        first_scheduled_s=moved(finished.first_scheduled_s),
        first_token_s=moved(finished.first_token_s),
        finished_s=finished.finished_s + seconds,
        token_times_s=tuple(at + seconds for at in finished.token_times_s),
    )


def failed(request: Request, error: Exception, now_s: float, sample: int = 0) -> Finished:
    """Of a sequence of which nothing is known any more."""
    now_s = max(now_s, request.arrival_s)
    return Finished(
        request.id, sample, (), "error", error, len(request.prompt_ids), request.arrival_s, None, None, now_s, (), 0, 0
    )


# -- the group ---------------------------------------------------------------------------------------------------------


class Replicas:
    """Several replicas behind a router: `add`, `step` until `idle`, or `run`. A context that closes them.

    policy, balance: of the `Router`. `router` has loads and counts; `lost` says which replicas died, and why.
    Raises WorkbenchError for no replica, and for block sizes that differ: prompts are compared in blocks.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        policy: str = "prefix",
        *,
        balance: float = 1.25,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        sizes = {one.block_size for one in replicas}
        if len(sizes) != 1:
            raise WorkbenchError(f"replicas need one block size, and there must be some; got {sorted(sizes)}")
        self.replicas = list(replicas)
        self.router = Router(len(self.replicas), policy, block_size=sizes.pop(), balance=balance)
        self.lost: dict[int, str] = {}
        self._clock, self._zero = clock, clock()
        self._requests: dict[Hashable, Request] = {}
        self._where: dict[Hashable, int] = {}
        self._ended: dict[Hashable, set[int]] = {}  # samples
        self._started: set[Hashable] = set()
        self._over: deque[Finished] = deque()  # to be handed out with the next step
        for one in self.replicas:
            one.begin(lambda: self.now_s)

    @property
    def now_s(self) -> float:
        return self._clock() - self._zero

    @property
    def idle(self) -> bool:
        return not self._requests and not self._over

    def add(self, request: Request) -> int:
        """Route a request; returns its replica. Raises WorkbenchError for what can never be served, and where no
        replica is left."""
        check_requests([request], Request)
        while True:
            routed = self.router.route(
                request.id, request.prompt_ids, request.max_new_tokens * request.n, request.tenant
            )
            try:
                self.replicas[routed.replica].add(request)
            except ReplicaLost as error:
                self.router.ended(request.id)
                self._lose(routed.replica, error)
                continue
            except BaseException:
                self.router.ended(request.id)
                raise
            self._requests[request.id], self._where[request.id] = request, routed.replica
            self._ended[request.id] = set()
            return routed.replica

    def step(self) -> list[Finished]:
        """A turn of each replica; what ended."""
        for number, replica in enumerate(self.replicas):
            if number in self.lost:
                continue
            try:
                news = replica.turn()
            except ReplicaLost as error:
                self._lose(number, error)
                continue
            self._started.update(news.started)
            for one in news.ended:
                self._over.extend(self._note(one))  # kept, should the next one's turn be interrupted
        over = list(self._over)
        self._over.clear()
        return over

    def run(self, requests: Iterable[Request] = ()) -> list[Finished]:
        """Serve requests as they arrive until all are done, in the order of their end."""
        coming = deque(sorted(check_requests(requests, Request), key=lambda request: request.arrival_s))
        over: list[Finished] = []
        while coming or not self.idle:
            while coming and coming[0].arrival_s <= self.now_s:
                self.add(coming.popleft())
            ended = self.step()
            over += ended
            if not ended:
                self._wait(coming[0].arrival_s - self.now_s if coming else IDLE_S)
        return over

    def close(self) -> None:
        """May be called twice. One that cannot be closed keeps no other open."""
        with contextlib.ExitStack() as stack:
            for one in self.replicas:
                stack.callback(one.close)

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, seconds: float) -> None:
        """Only where no engine of this process has something to do."""
        if all(isinstance(one, ProcessReplica) for one in self.replicas):
            time.sleep(max(0.0, min(seconds, 0.0005)))

    def _note(self, one: Finished) -> list[Finished]:
        if (request := self._requests.get(one.request_id)) is None:
            return []  # of a request that ended with its replica
        self._ended[request.id].add(one.sample)
        if len(self._ended[request.id]) == request.n:
            self._forget(request.id)
        return [one]

    def _forget(self, name: Hashable) -> None:
        self.router.ended(name)
        del self._requests[name], self._where[name], self._ended[name]
        self._started.discard(name)

    def _lose(self, number: int, error: ReplicaLost) -> None:
        """What it ran ends with the error; what it had not started goes to the others, in the order it came."""
        self.lost[number] = str(error)
        self.replicas[number].close()
        for name in self.router.lost(number):
            request, ended = self._requests[name], self._ended[name]
            started = name in self._started or bool(ended)
            self._forget(name)
            why: WorkbenchError = ReplicaLost(f"replica {number} was lost while it served request {name!r}: {error}")
            if not started and any(self.router.alive):
                try:
                    self.add(request)
                    continue
                except WorkbenchError as refused:  # its pool is smaller, say; the others still find a place
                    why = refused
            left = [sample for sample in range(request.n) if sample not in ended]
            self._over.extend(failed(request, why, self.now_s, sample) for sample in left)


# -- a replica's process -----------------------------------------------------------------------------------------------


def _serve(
    rank: Rank, transport: str, model: str, prepare: bool, settings: SchedulerSettings, pool: dict[str, Any]
) -> None:
    """The work of rank 1: serve what comes until the link ends."""
    link = make_link(rank, transport)
    made = load(model)
    engine = Engine(prepared(made) if prepare else made, settings, **pool)
    zero_s = time.perf_counter() - engine.now_s  # what this machine's clock read at the engine's 0
    said_s = time.monotonic()
    try:
        while not link.why_lost:
            while (message := link.poll()) is not None:
                try:
                    engine.add(_request_of(message, zero_s))
                except WorkbenchError as error:
                    fields_ = {"request": message.request, "reason": str(error)[:MAX_TEXT]}
                    link.post(Message("refused", fields_))
            if engine.idle:
                link.wait(IDLE_S)
                continue
            report = engine.step()
            if time.monotonic() - said_s > ALIVE_S:
                said_s = time.monotonic()
                link.post(Message("alive"))
            for sequence in report.plan.admitted:
                link.post(Message("started", {"request": sequence.request.id}))
            for one in report.finished:
                link.post(Message("ended", {"request": one.request_id}, _plain(later(one, zero_s))))
    except LinkLost as error:
        link.lose(str(error))  # who asked is gone, and so is the use of this process
    finally:
        link.close()


def _request_of(message: Message, zero_s: float) -> Request:
    if message.kind != "add":
        raise BadMessage(f"a replica takes no message {message.kind!r}")
    plain = json.loads(bytes(message.payload))
    plain["arrival_s"] = max(0.0, plain["arrival_s"] - zero_s)
    if plain["sampling"] is not None:
        plain["sampling"] = SamplingSettings(**plain["sampling"])
    if isinstance(plain["tenant"], dict):
        plain["tenant"] = bytes.fromhex(plain["tenant"]["bytes"])
    return Request(message.request, **plain)


def _plain(one: Finished) -> bytes:
    plain = {f.name: getattr(one, f.name) for f in fields(one) if f.name != "request_id"}
    for name in ("error", "draft_error"):
        plain[name] = None if plain[name] is None else str(plain[name])
    return json.dumps(plain).encode()


# -- two engines, or one twice as wide? --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Width:
    """A run of a workload. hit_tokens: of all prompts, found in a prefix cache."""

    name: str
    finished: tuple[Finished, ...]
    seconds: float
    hit_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return sum(len(one.token_ids) for one in self.finished) / self.seconds


def two_or_one_wide(
    model: str | os.PathLike[str],
    requests: Sequence[Request],
    *,
    settings: SchedulerSettings | None = None,
    num_blocks: int = 512,
    threads: int = 1,
    replicas: int = 2,
    policy: str = "prefix",
    prepare: bool = True,
    transport: str = "tcp",
) -> tuple[Width, Width]:
    """The same requests on `replicas` engines of `threads` threads each, and on one with as many times the threads,
    blocks and running sequences. Both in processes of their own, over the same links.

    The one engine reads the weights once a step for all sequences, and has one prefix cache; the several have less to
    wait for inside a step. Which is faster depends on how well a step uses more threads: measure. Requests that arrive
    at 0 start when the engines have been warmed up by one short request each.
    """
    check_whole("replicas", replicas, 2)
    each = settings or SchedulerSettings()
    wide = replace(each, max_running=each.max_running * replicas, token_budget=each.token_budget * replicas)
    runs: list[Width] = []
    for name, count, times, chosen in (("replicas", replicas, 1, each), ("one wide", 1, replicas, wide)):
        common: dict[str, Any] = {"transport": transport, "prepare": prepare, "num_blocks": num_blocks * times}
        made: list[Replica] = []
        try:
            for _ in range(count):
                made.append(ProcessReplica(model, chosen, threads=threads * times, **common))
            _warm_up(made)
            group = Replicas(made, policy)
            finished = group.run(requests)
            seconds = group.now_s
        finally:
            for one in made:
                one.close()
        runs.append(Width(name, tuple(finished), seconds, sum(one.hit_tokens for one in finished)))
    return runs[0], runs[1]


def _warm_up(replicas: Sequence[Replica]) -> None:
    group = Replicas(replicas, "round_robin")
    group.run([Request(("warm up", i), (0, 1, 2, 3), 2, stop_token_ids=()) for i in range(len(replicas))])
