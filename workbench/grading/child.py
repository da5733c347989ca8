"""The process in which students' code runs: a small server that has imported libraries and nothing of ours, and forks.

Started as a script by `runner`, with a socket to it as file descriptor argv[1]. For every session it forks one child,
which loads what of ours its exercise hands over (`handed`), gives up its rights (`confine`), then executes the prelude
and one answer and answers questions: one line of JSON in (which probe, which case), one line out (what was seen). The
server itself never runs a student's code, and no process here ever holds an expected value, a judge, what answers are
timed against, or the part that is to be written: this file and `confine.py` are all of the workbench that it has read.

What this guards and what it does not: a line printed to stdout is output, not a result. Code in the same process could
find the result pipe and its nonce by walking stack frames and write an observation of its own; to profit it would have
to write the right one, which is what a right answer does anyway.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import importlib
import importlib.abc
import importlib.util
import io
import json
import linecache
import marshal
import os
import random
import select
import signal
import socket
import sys
import types
from collections.abc import Sequence
from typing import Any

RESULT_FD, COMMAND_FD = 3, 4
WITHIN = "WORKBENCH_GRADING_WITHIN"  # in the environment: what this process was started in
HELLO, READY, LOADED = -2, -1, 0  # numbers of the first lines; cases count from 1


def serve(control: socket.socket, preload: list[str], hidden: list[str]) -> None:
    """Import the libraries, report that we are ready, then fork one session after the other until the runner closes the
    socket. hidden: folders that no session may read, wherever they lie."""
    from workbench.grading import confine

    apart = confine.leave_network()
    for name in preload:
        importlib.import_module(name)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    files = confine.landlock_version() > 0 or os.environ.get(WITHIN) == "bubblewrap"
    calls = confine.can_refuse_calls()
    held = apart | {"network": apart["network"] or calls, "files": files, "calls": calls}
    if not apart["processes"]:
        confine.adopt_orphans()
    tell(control, {"ready": held, "resident_bytes": _resident_bytes()})
    while True:
        text, fds, _, _ = socket.recv_fds(control, 1 << 16, 3)
        if not text:
            return
        request = json.loads(text)
        if os.getuid() == 0:  # a user for this session, who owns nothing but the working folder
            try:
                os.chown(request["folder"], request["user"], request["user"])
            except OSError:  # a container without that right
                request["user"] = 0
        pid, waited_for, report = _fork(apart["processes"])
        if pid == 0:
            _become_session(control, fds, request | {"alone": apart["processes"]}, hidden)
        for fd in fds:
            os.close(fd)
        tell(control, {"pid": pid})
        status = _wait(waited_for, pid, control, wake_read)
        if not apart["processes"] and sys.platform == "linux":
            confine.end_children()
        if status is None:
            return
        with report:
            status = int(report.readline() or status)
        tell(control, {"exit": os.waitstatus_to_exitcode(status)})


def _fork(apart: bool) -> tuple[int, int, io.TextIOBase]:
    """(pid of the session, pid to wait for, where its status can be read if not there); pid 0 in the session.

    apart: between us and the session stands a keeper, whose only child is the first of its own process namespace.
    """
    from workbench.grading import confine

    if not apart:
        pid = os.fork()
        return pid, pid, io.StringIO()
    read, write = os.pipe()
    keeper = os.fork()
    if keeper:
        os.close(write)
        report = os.fdopen(read)
        return int(report.readline()), keeper, report
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    confine.end_with_parent()
    confine.new_process_namespace()
    pid = os.fork()
    if pid:
        _keep(pid, write)
    return 0, 0, io.StringIO()


def _keep(pid: int, write: int) -> None:
    """In the keeper: tell the session's pid and, in the end, its status. Never returns."""
    try:
        os.closerange(3, write)
        os.closerange(write + 1, 1 << 12)
        os.write(write, f"{pid}\n".encode())
        os.write(write, f"{os.waitpid(pid, 0)[1]}\n".encode())
    finally:
        os._exit(0)


def tell(control: socket.socket, message: dict) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


def _wait(child: int, session: int, control: socket.socket, wake_read: int) -> int | None:
    """The child's status; None when the runner went away, after killing the session."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        watched: list[Any] = [control, wake_read]
        ready, _, _ = select.select(watched, [], [], 5.0)
        if wake_read in ready:
            os.read(wake_read, 4096)
        if control in ready and not control.recv(1, socket.MSG_PEEK):
            os.kill(session, signal.SIGKILL)
            return None


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _become_session(control: socket.socket, fds: list[int], request: dict, hidden: list[str]) -> None:
    """In the forked child: move the pipes to their places, give up every right, run the session, end. Never returns."""
    from workbench.grading import confine

    begun = False
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        commands, results, output = (_above(fd, 16) for fd in fds)
        null = _above(os.open(os.devnull, os.O_RDWR), 16)
        control.detach()
        for source, target in ((null, 0), (output, 1), (output, 2), (results, RESULT_FD), (commands, COMMAND_FD)):
            os.dup2(source, target, inheritable=target < 3)
        os.closerange(5, 1 << 12)
        os.setsid()
        if request["cores"]:
            with contextlib.suppress(OSError):  # cores that were taken from this process meanwhile
                os.sched_setaffinity(0, request["cores"])
        os.chdir(request["folder"])
        os.environ |= {"HOME": request["folder"], "TMPDIR": request["folder"]}
        limits = confine.Limits(**request["limits"])
        readable, listed = confine.without(confine.readable_paths(), hidden)
        confine.limit_resources(limits, request["cpu_seconds"])
        confine.confine_files(readable, [request["folder"], "/dev/null"], listed)
        confine.become_nobody(request["user"], [*readable, *listed, os.path.dirname(request["folder"])])
        confine.refuse_calls(alone=request["alone"])
        begun = True
        session()
    except BaseException as error:
        told = "the answer's process lost its way to the grader" if begun else "the session could not start"
        os.write(2, f"{told}: {type(error).__name__}: {error}\n".encode())
        os._exit(70)
    os._exit(0)


def _above(fd: int, lowest: int) -> int:
    """A copy of `fd` with a number of at least `lowest`."""
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD, lowest)


class _Given(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports what was handed over, from code that crossed as text; then it is empty."""

    def __init__(self, modules: Sequence[tuple[str, bool, str]]) -> None:
        self._modules = {name: (package, code) for name, package, code in modules}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._modules:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=self._modules[name][0])

    def exec_module(self, module: types.ModuleType) -> None:
        module.__file__ = "<workbench>"  # some of ours look for data beside them, which are not there either
        exec(marshal.loads(base64.b64decode(self._modules[module.__name__][1])), module.__dict__)

    def load(self) -> None:
        """Load all, and leave no way to load one of them again, or anything else of ours."""
        for name in [name for name in sys.modules if name.partition(".")[0] in ("workbench", "_workbench")]:
            del sys.modules[name]  # what this process was started with
        sys.meta_path.insert(0, self)
        try:
            for name in self._modules:
                importlib.import_module(name)
        finally:
            sys.meta_path.remove(self)
            self._modules = {}


def session() -> None:
    """Load what is handed over, execute prelude and answer, then run one probe on one case a line, until there are no
    more lines."""
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.stdout = os.fdopen(1, "w", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    commands, me = os.fdopen(COMMAND_FD, "rb"), os.getpid()
    setup = json.loads(commands.readline())
    linecache.clearcache()
    given = setup.pop("modules")
    _Given(given).load()
    from workbench.grading.cell import fresh_main, load_answer
    from workbench.grading.check import decode, describe_error, observe
    from workbench.grading.watching import Watch

    # before anybody patches them
    nonce, answer, to_text, from_text = (setup["nonce"], None, json.dumps, json.loads)

    def send(number: int, message: dict) -> None:
        if os.getpid() != me:  # a copy that the answer forked comes back out of the probe, too
            os._exit(0)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                continue
        line = memoryview((to_text({"nonce": nonce, "number": number} | message) + "\n").encode())
        while line:
            line = line[os.write(RESULT_FD, line) :]

    send(HELLO, {})
    _seed()
    try:
        module = fresh_main(setup["prelude"])
    except BaseException as error:
        send(READY, {"broken": describe_error(error)})
        return
    watch = Watch(tuple({name.partition(".")[0] for name, _, _ in given}))
    send(READY, {})
    source = from_text(commands.readline())

    def noted() -> dict:
        return {"suspect": "the answer " + ", ".join(watch.notes)} if watch.notes else {}

    try:
        answer = load_answer(module, source, setup["entry"])
        send(LOADED, noted())
    except BaseException as error:
        stub = isinstance(error, NotImplementedError) and str(error).startswith(setup["grade_id"])
        send(LOADED, {"not_attempted" if stub else "reason": describe_error(error)} | noted())
        return
    for text in commands:
        command = from_text(text)
        module, _, name = command["probe"].partition(":")
        _seed()
        try:
            probe = getattr(importlib.import_module(module), name)
            seen = observe(setup["grade_id"], probe, answer, decode(command["case"]))
        except BaseException as error:  # KeyboardInterrupt and the like, raised by the answer
            seen = {"error": describe_error(error)}
        if name := watch.replaced():
            said = f"the answer replaced {name}; what a check sees by it is not believed"
            seen = {"error": said, "suspect": said}
        send(command["number"], noted() | seen)


def _seed() -> None:
    """The same draws in every run, so that the same answer earns the same mark."""
    random.seed(0)
    for name, seed in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if name in sys.modules:
            function: Any = sys.modules[name]
            for part in seed.split("."):
                function = getattr(function, part)
            function(0)


def serve_orders(orders: socket.socket) -> None:
    """In the bare process of `warm`: fork a server for every order, until nobody orders any more.

    An order has three files: a pipe that hears the server's id, and then its end; the socket to its runner.
    """
    from workbench.grading import confine

    confine.end_with_parent()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a server; its runner sees its socket close
    while True:
        text, fds, _, _ = socket.recv_fds(orders, 1 << 16, 8)
        if not text:
            return
        if os.fork() == 0:
            try:
                orders.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                confine.end_with_parent()
                os.write(fds[0], f"{os.getpid()}\n".encode())
                null = os.open(os.devnull, os.O_RDWR)
                for target in (0, 1, 2):
                    os.dup2(null, target)
                order = json.loads(text)
                serve(socket.socket(fileno=fds[1]), order["preload"], order["hidden"])
            finally:
                os._exit(0)
        for fd in fds:
            os.close(fd)


def stand_alone(own: str) -> types.ModuleType:
    """This file as `workbench.grading.child`, with `confine` beside it and nothing else of ours: no package around it
    is run, none of its other modules can be imported."""
    folder = os.path.dirname(own)
    parent = None
    for name in ("workbench", "workbench.grading"):
        module = types.ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
        if parent is not None:
            parent.grading = module  # type: ignore[attr-defined]
        parent = module
    for name in ("confine", "child"):
        spec = importlib.util.spec_from_file_location(f"workbench.grading.{name}", os.path.join(folder, f"{name}.py"))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        setattr(parent, name, module)
    # an editable installation's way to our source, which no session may read
    for finder in [one for one in sys.meta_path if getattr(one, "__module__", "").startswith("__editable__")]:
        if any("workbench" in name for name in vars(sys.modules[finder.__module__]).get("MAPPING", ())):
            sys.meta_path.remove(finder)
            del sys.modules[finder.__module__]
    return sys.modules["workbench.grading.child"]


if __name__ == "__main__":
    settings = json.loads(sys.argv[2])
    # a confined process reaches no GPU: kernels are graded in the interpreter
    os.environ["TRITON_INTERPRET"] = "1"
    server: Any = stand_alone(os.path.abspath(__file__))
    server.serve(socket.socket(fileno=int(sys.argv[1])), settings["preload"], settings["hidden"])
    os._exit(0)  # without torch's slow good-byes
