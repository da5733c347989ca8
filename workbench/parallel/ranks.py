"""Ranks: N processes of one run that know each other, start together and end together.

    rank 0, the caller                          ranks 1 … N−1, started by torch.multiprocessing
    a store on loopback, a token  ───────────▶  claim the rank, say hello: versions, code, a proof of the token
    compares every hello          ───────────▶  go on, or end with the difference
    a thread that waits for the end of each     a thread that waits for word of a failure, or for the store's end

A rank that ends in the middle of a run ends the run: rank 0 hears of it from the operating system, names it in
`failed`, tells the others, and kills who has not ended after `GRACE_S`. Whoever waits in a collective looks at `check`.

Who may take part: the token (256 random bits) goes to the processes through multiprocessing's own pipe. The names of
all keys in the store are made with it, every hello and the answer carry an HMAC of it, and collectives over sockets
prove it again over their own connections (`collectives`). The store listens on 127.0.0.1 alone. What this does not
guard: another user of this machine can keep the port busy, and nothing is encrypted.
Rendezvous through a store, then groups: torch.distributed (https://pytorch.org/docs/stable/distributed.html).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from workbench.errors import WorkbenchError, check_above, check_whole, is_whole, shown

LOOPBACK = "127.0.0.1"
MAX_RANKS = 64
GRACE_S = 1.5  # for the others to say what they saw, after one has failed
TOKEN_VARIABLE = "WORKBENCH_RUN_TOKEN"
LONG = timedelta(days=365)
Work = Callable[..., None]


class RankLost(WorkbenchError):
    """Another rank ended, or cannot be reached. The run is over: start the ranks again."""


class Rank:
    """The place of this process in a run. Made by `start_ranks` (rank 0), and given to the work of all others.

    store: torch's key-value store of the run; its keys are the run's own. `failed` says which rank ended the run, ""
    while all is well.
    """

    def __init__(self, rank: int, size: int, token: str, store: dist.Store, *, timeout_s: float) -> None:
        self.rank, self.size, self.token, self.timeout_s = rank, size, token, timeout_s
        self.store = dist.PrefixStore(_keyed(token, "keys"), store)
        self.failed = ""
        self.gone: set[int] = set()  # ranks that ended in good order, as rank 0 knows

    def check(self, members: Iterable[int] = ()) -> None:
        """Raise RankLost when the run has failed, or when one of these ranks has ended."""
        if self.failed:
            raise RankLost(f"{self.failed}; this run is over, start the ranks again")
        if self.gone and (ended := sorted(self.gone & {*members})):
            raise RankLost(f"rank {ended[0]} of {self.size} has ended its work, and rank {self.rank} waits for it")

    def lost(self, error: Exception) -> RankLost:
        """What to raise when a connection broke: whose end it was, as soon as rank 0 knows."""
        deadline = time.monotonic() + 2 * GRACE_S
        while not self.failed and time.monotonic() < deadline:
            time.sleep(0.01)
        reason = self.failed or f"a connection of rank {self.rank} broke ({str(error).splitlines()[0]})"
        return RankLost(f"{reason}; this run is over, start the ranks again")

    def wait_for(self, key: str, who: str) -> bytes:
        """What `who` puts into the store. Raises RankLost where it ends, or takes longer than timeout_s."""
        deadline = time.monotonic() + self.timeout_s
        try:
            while not self.store.check([key]):
                self.check()
                if time.monotonic() > deadline:
                    raise RankLost(
                        f"rank {self.rank} of {self.size} waited {self.timeout_s:g} s for {who}; see that it was "
                        "started, with the same number of ranks"
                    )
                time.sleep(0.002)
            return self.store.get(key)
        except dist.DistError as error:
            raise self.lost(error) from error


# -- starting ------------------------------------------------------------------------------------------------


class Ranks:
    """A run as rank 0 sees it: a context. `rank` is rank 0's place; at the end every process has ended.

    `processes` are those of ranks 1 … N−1.
    """

    def __init__(self, rank: Rank, processes: list[Any]) -> None:
        self.rank, self.processes = rank, processes
        self._stopping = False
        self._process = os.getpid()
        self._monitor = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._monitor.start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop(within_s=0.0 if kind else 5.0)

    def pid_of(self, rank: int) -> int:
        return self.processes[rank - 1].pid

    def stop(self, within_s: float = 5.0) -> None:
        """Wait for the work of the others to end, then end those that have not. May be called twice."""
        if os.getpid() != self._process:
            return  # a fork of rank 0: the run is not its own
        self._stopping = True
        deadline = time.monotonic() + within_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        if any(process.is_alive() for process in self.processes):
            self.fail("rank 0 stopped the run")
            self._end_all()
        self._monitor.join()

    def fail(self, reason: str) -> None:
        """End the run: the first reason stays, and the others are given it. A fork of rank 0's process ends nothing."""
        if not self.rank.failed and os.getpid() == self._process:
            self.rank.failed = reason
            self.rank.store.set("failed", reason)

    def _watch(self) -> None:
        """On a thread: the end of each process, as it comes."""
        left = {process.sentinel: number for number, process in enumerate(self.processes, 1)}
        while left:
            ended = [left.pop(sentinel) for sentinel in multiprocessing.connection.wait(list(left))]
            for number in sorted(ended, key=lambda number: self._code(number) >= 0):  # a kill comes before its echoes
                if self._code(number) == 0:
                    self.rank.gone.add(number)
                elif not self._stopping:
                    self.fail(self._why_ended(number))
            if self.rank.failed:
                self._end_all(GRACE_S)

    def _code(self, number: int) -> int:
        process = self.processes[number - 1]
        process.join()
        return process.exitcode or 0

    def _why_ended(self, number: int) -> str:
        code, who = self._code(number), f"rank {number} of {self.rank.size} (process {self.pid_of(number)})"
        if self.rank.store.check([f"error/{number}"]):
            return f"{who} ended: {self.rank.store.get(f'error/{number}').decode()}"
        if code < 0:
            return f"{who} was killed by {signal.Signals(-code).name}"
        return f"{who} ended with code {code}"

    def _end_all(self, grace_s: float = 0.0) -> None:
        deadline = time.monotonic() + grace_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def start_ranks(
    size: int, work: Work, *args: Any, port: int = 0, threads: int = 1, timeout_s: float = 300.0, start_s: float = 120.0
) -> Ranks:
    """Start ranks 1 … size−1, each of which calls work(rank, *args); the caller is rank 0.

    work: a function of a module, which multiprocessing finds by its name, and not of the script that is run; args:
    plain values. port: of the store, on
    loopback; 0 is any free one. threads: of torch in each started process. timeout_s: the longest wait for another rank
    in a collective; start_s: until all have said hello.
    Raises WorkbenchError for a size below 1 or above 64, a port that is in use, and ranks that differ in the versions
    of Python, torch or the workbench; then no process is left.
    """
    check_size_of_run(size)
    if getattr(work, "__module__", "") == "__main__":
        raise WorkbenchError(
            f"the work of started ranks is found by its module, and {getattr(work, '__name__', work)!r} is of"
            " the script or notebook that is run; put it into a file and import it"
        )
    check_whole("threads", threads, 1)
    check_above("timeout_s", timeout_s, 0)
    token = secrets.token_hex(32)
    store, port = _serve_store(port, size)
    rank = Rank(0, size, token, store, timeout_s=timeout_s)
    store.set("run", _keyed(token, "run"))
    _claim(rank)
    processes: list[Any] = []
    if size > 1:
        with _without_main():
            context = torch.multiprocessing.start_processes(
                _enter,
                (size, port, token, threads, timeout_s, work, args),
                nprocs=size - 1,
                join=False,
                daemon=True,
                start_method=_start_method(),
            )
        assert context is not None
        processes = context.processes
    ranks = Ranks(rank, processes)
    try:
        rank.timeout_s = start_s
        _compare_hellos(rank)
    except BaseException:
        ranks.stop(within_s=GRACE_S)
        raise
    finally:
        rank.timeout_s = timeout_s
    return ranks


def join_ranks(
    rank: int, size: int, port: int, token: str, *, timeout_s: float = 300.0, start_s: float = 120.0
) -> Rank:
    """Take a place in a run whose rank 0 has its store at this port of loopback, and has the same token.

    Raises WorkbenchError for a rank out of range, one that was started before, another run's port or token, nobody
    there, and versions that differ from rank 0's.
    """
    check_size_of_run(size)
    if not is_whole(rank) or not 0 <= rank < size:
        raise WorkbenchError(f"a run of {size} ranks has ranks 0 … {size - 1}, got {shown(rank)}")
    try:
        store = _reach_store(port, start_s)
        run = store.get("run").decode()
    except dist.DistError as error:
        raise WorkbenchError(
            f"rank {rank}: no rank 0 answers at {LOOPBACK}:{port} ({str(error).splitlines()[0]}); start rank 0 first, "
            "and give the port that it names"
        ) from error
    if not hmac.compare_digest(run, _keyed(token, "run")):
        raise WorkbenchError(
            f"rank {rank}: the run at {LOOPBACK}:{port} has another token; give the token of this run, or the port of "
            "the run that the token belongs to"
        )
    place = Rank(rank, size, token, store, timeout_s=start_s)
    _claim(place)
    _say_hello(place)
    answer = json.loads(place.wait_for("answer", "rank 0's answer"))
    if not hmac.compare_digest(answer["proof"], _keyed(token, "answer", answer["problem"])):
        raise WorkbenchError(f"rank {rank}: the answer at {LOOPBACK}:{port} is not of this run; start the ranks again")
    if answer["problem"]:
        raise WorkbenchError(answer["problem"])
    place.timeout_s = timeout_s
    return place


def ranks_of_environment(*, timeout_s: float = 300.0, start_s: float = 120.0) -> Rank:
    """The place that `python -m torch.distributed.run` gave this process (RANK, WORLD_SIZE, MASTER_PORT).

    All ranks need the same WORKBENCH_RUN_TOKEN, at least 32 characters, in their environment. The launcher has the
    store, and ends all ranks when one ends. Raises WorkbenchError for what is missing, and as `join_ranks`.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT", TOKEN_VARIABLE)
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise WorkbenchError(
            f"{', '.join(missing)} not set: start this with `python -m torch.distributed.run --standalone "
            f"--nproc-per-node N FILE`, and set {TOKEN_VARIABLE} to a random text of your own"
        )
    token = os.environ[TOKEN_VARIABLE]
    if len(token) < 32:
        raise WorkbenchError(f"{TOKEN_VARIABLE} must have at least 32 characters, got {len(token)}; use random ones")
    rank, size, port = (int(os.environ[name]) for name in names[:3])
    if rank == 0:
        store = _reach_store(port, start_s)
        place = Rank(0, size, token, store, timeout_s=start_s)
        store.set("run", _keyed(token, "run"))
        _claim(place)
        _compare_hellos(place)
        place.timeout_s = timeout_s
        return place
    return join_ranks(rank, size, port, token, timeout_s=timeout_s, start_s=start_s)


def check_size_of_run(size: object) -> int:
    if not is_whole(size) or not 1 <= size <= MAX_RANKS:
        raise WorkbenchError(f"the number of ranks must be a whole number from 1 to {MAX_RANKS}, got {shown(size)}")
    return size


def _serve_store(port: int, size: int) -> tuple[dist.TCPStore, int]:
    """The store of a run, and its port. Only loopback hears of it: torch's own would listen on every interface."""
    if not is_whole(port) or not 0 <= port < 2**16:
        raise WorkbenchError(f"port must be a whole number from 0 (any free one) to 65535, got {shown(port)}")
    listening = socket.socket()
    try:
        listening.bind((LOOPBACK, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise WorkbenchError(
            f"port {port} of {LOOPBACK} cannot be used ({error.strerror}); is another run there? Give another port, or "
            "port=0 for any free one"
        ) from error
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(), timeout=LONG
    )
    return store, port


def _reach_store(port: int, within_s: float) -> dist.TCPStore:
    wait = timedelta(seconds=within_s)
    return dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=wait)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Started processes do not run the caller's script again: `work` is found in its own module."""
    main = sys.modules["__main__"]
    kept: dict[str, Any] = {name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(kept)


def _start_method() -> str:
    """A fork server, which imports torch once for all ranks; where there is none, a new interpreter for each."""
    if "forkserver" not in torch.multiprocessing.get_all_start_methods():
        return "spawn"
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(["workbench.parallel"])
    return "forkserver"


# -- in a started process ------------------------------------------------------------------------------------


def _enter(
    index: int, size: int, port: int, token: str, threads: int, timeout_s: float, work: Work, args: tuple[Any, ...]
) -> None:
    """A started process from beginning to end. It leaves by os._exit: what it shares with others is gone by then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for rank 0, which decides
    torch.set_num_threads(threads)
    _end_with_parent(index + 1)
    rank: Rank | None = None
    code = 1
    try:
        rank = join_ranks(index + 1, size, port, token, timeout_s=timeout_s)
        _watch_run(rank, port)
        work(rank, *args)
        code = 0
    except WorkbenchError as error:
        _say_last(rank, index + 1, str(error))
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        _say_last(rank, index + 1, f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say_last(rank: Rank | None, number: int, words: str) -> None:
    """To rank 0, and to standard error: both, for either may be gone."""
    print(f"workbench: rank {number}: {words}", file=sys.stderr)
    if rank is not None and not rank.failed:
        try:
            rank.store.set(f"error/{number}", words)
        except dist.DistError as error:
            print(f"workbench: rank {number}: rank 0 could not be reached: {error}", file=sys.stderr)


def _end_with_parent(number: int) -> None:
    """A thread that ends this process after rank 0's, also where it still tries to reach the store of the run."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "ranks are started by rank 0"

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        time.sleep(2 * GRACE_S)  # `_watch_run` says more, if it has begun
        print(f"workbench: rank {number}: the process of rank 0 ended", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _watch_run(rank: Rank, port: int) -> None:
    """A thread that waits for word of a failure, with a connection of its own."""
    own = dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
    keys = dist.PrefixStore(_keyed(rank.token, "keys"), own)

    def watch() -> None:
        try:
            keys.wait(["failed"], LONG)
            rank.failed = keys.get("failed").decode()
        except dist.DistError as error:
            rank.failed = f"rank 0 of {rank.size} ended ({str(error).splitlines()[0][:80]})"
        time.sleep(GRACE_S)  # the work raises by itself, unless it computes or waits in a socket
        print(f"workbench: rank {rank.rank}: {rank.failed}", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, name="run", daemon=True).start()


# -- who takes part ------------------------------------------------------------------------------------------


def _keyed(token: str, *parts: str) -> str:
    """HMAC-SHA256 of the parts: who has no token can neither make nor guess it."""
    return hmac.new(token.encode(), "\0".join(parts).encode(), hashlib.sha256).hexdigest()


def proof(rank: Rank, *parts: str) -> bytes:
    """32 bytes that only a rank of this run can make, for these parts."""
    return bytes.fromhex(_keyed(rank.token, "proof", *parts))


@functools.cache
def code_digest() -> str:
    """Of the source of this package: ranks that run different code do not run together."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    return {"Python": platform.python_version(), "torch": torch.__version__, "the workbench": code_digest()[:16]}


def _claim(rank: Rank) -> None:
    if rank.store.add(f"claim/{rank.rank}", 1) > 1:
        raise WorkbenchError(
            f"rank {rank.rank} of this run was started before; start each of the ranks 0 … {rank.size - 1} once"
        )


def _say_hello(rank: Rank) -> None:
    hello = json.dumps({"size": rank.size, "versions": _versions()})
    text = json.dumps({"hello": hello, "proof": _keyed(rank.token, "hello", str(rank.rank), hello)})
    rank.store.set(f"hello/{rank.rank}", text)


def _compare_hellos(rank: Rank) -> None:
    """Of rank 0: every other rank is heard, then all get the same answer. Raises WorkbenchError for a difference."""
    problem = ""
    for number in range(1, rank.size):
        came = json.loads(rank.wait_for(f"hello/{number}", f"rank {number}"))
        if not hmac.compare_digest(came["proof"], _keyed(rank.token, "hello", str(number), came["hello"])):
            problem = problem or f"rank {number} has not the token of this run; start it with the token of rank 0"
            continue
        hello = json.loads(came["hello"])
        problem = problem or _difference(rank, number, hello)
    rank.store.set("answer", json.dumps({"problem": problem, "proof": _keyed(rank.token, "answer", problem)}))
    if problem:
        raise WorkbenchError(problem)


def _difference(rank: Rank, number: int, hello: dict[str, Any]) -> str:
    if hello["size"] != rank.size:
        return f"rank 0 was started for {rank.size} ranks and rank {number} for {hello['size']}; start all for the same"
    for name, ours in _versions().items():
        if (theirs := hello["versions"].get(name)) != ours:
            return (
                f"rank 0 has {name} {ours} and rank {number} has {theirs}; ranks compute parts of one sum, so all need "
                "the same code: install the same version everywhere"
            )
    return ""
