"""A fork server: a process that has imported everything once, and forks what grading a submission needs (nbval, its
kernel, the server of the answers).

Importing pytest, Jupyter, torch and the probes takes seconds, three times a submission; a copy of a process that has
them takes milliseconds. So each process that grades keeps one of these:

    grader ── Warm ── pytest with nbval ── the notebook's kernel
                └──── Bare ── the server (`child`) ── sessions with answers

All but the sessions are forked by Warm, each on request of the process to its left, over a socket that this process
received when it was started. The server of the answers is forked by Bare, a process that Warm forked when it had
imported libraries and nothing of ours: neither a server nor a session inherits a check, a judge or any other part of
the workbench. Warm knows no submission, no hidden check and no seed. When a process ends, Warm sees its socket close
and kills what was forked for it; when Warm ends, the operating system kills them, and a server ends with its socket.

Where this is not possible (no SEQPACKET sockets: macOS), `Warm.start` gives None and every process is started from
nothing.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

MAX_ORDER_BYTES = 1 << 16
JUPYTER = ("pytest", "nbval.plugin", "ipykernel.kernelapp", "ipykernel.zmqshell", "jupyter_client.manager")


# --- On the side of those who order ---


class Forked:
    """A process that Warm forked for us, in the form that subprocess.Popen has; it says its id first, then nothing."""

    stdin = stdout = stderr = None

    def __init__(self, life: int) -> None:
        self._life = life
        self.returncode: int | None = None
        ready, _, _ = select.select([life], [], [], 60.0)
        reply = os.read(life, 64) if ready else b""
        if not reply.strip().isdigit():
            os.close(life)
            raise OSError("the warm process did not fork")
        self.pid = int(reply)

    def poll(self) -> int | None:
        """None while it runs; 0 when it is over. How it ended is in what it wrote."""
        if self.returncode is None and select.select([self._life], [], [], 0)[0]:
            os.close(self._life)
            self.returncode = 0
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; subprocess.TimeoutExpired after `timeout` seconds."""
        if self.returncode is None and not select.select([self._life], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        self.poll()
        return 0

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def order(warm: socket.socket, job: str, details: dict, fds: Sequence[int] = ()) -> Forked:
    """Have the warm process fork `job` (a name in JOBS), which gets copies of `fds`. OSError when it cannot."""
    life, theirs = os.pipe()
    try:
        text = json.dumps({"job": job} | details).encode()
        if len(text) > MAX_ORDER_BYTES:
            raise OSError(f"an order of {len(text):,} bytes")
        socket.send_fds(warm, [text], [theirs, *fds])
    except OSError:
        os.close(life)
        raise
    finally:
        os.close(theirs)
    return Forked(life)


class Warm:
    """The warm process as its grader holds it. It ends when `close` is called, or when the grader ends."""

    def __init__(self, process: subprocess.Popen, control: socket.socket) -> None:
        self.process, self.control = process, control

    @classmethod
    def start(
        cls, sets: str, libraries: Sequence[str], all_asked: list, import_paths: Sequence[str], environment: dict
    ) -> Warm | None:
        """A warm process that has all for the exercises of `sets` (`module:function`); None where there can be none.

        libraries: that answers and probes import. all_asked: of `handed.asked`, made ready for every session.
        """
        if sys.platform != "linux":
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {"sets": sets, "import_paths": list(import_paths), "libraries": list(libraries), "asked": all_asked}
        command = [sys.executable, "-s", "-P", str(Path(__file__).resolve()), str(theirs.fileno())]
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=tempfile.gettempdir(),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError:
            ours.close()
            return None
        finally:
            theirs.close()
        ours.settimeout(120.0)
        try:
            assert process.stdin is not None
            with process.stdin:
                process.stdin.write(json.dumps(settings).encode())
            ready = ours.recv(64) == b"ready"
        except OSError:
            ready = False
        warm = cls(process, ours)
        if not ready:
            warm.close()
        return warm if ready else None

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        self.process.wait()


# --- In the warm process ---


def serve(control: socket.socket, bare: socket.socket) -> None:
    """Fork what is ordered, kill what was ordered by one that is gone, end with the grader. bare: orders of servers go
    there."""
    gc.collect()
    gc.freeze()  # no collection in a forked process looks at, and so copies, what was imported here
    control.send(b"ready")
    ordered: dict[int, socket.socket] = {}  # process -> the socket over which it was ordered
    sockets = {control: 0}  # socket -> the process at its other end
    while True:
        ready, _, _ = select.select(list(sockets), [], [], 1.0)
        for one in ready:
            try:
                text, fds, _, _ = socket.recv_fds(one, MAX_ORDER_BYTES, 8)
            except OSError:
                text, fds = b"", []
            if not text:
                _end(one, ordered)
                if one is control:
                    return
                one.close()
                del sockets[one]
                continue
            try:
                if json.loads(text)["job"] == "server":
                    with contextlib.suppress(OSError):  # Bare is gone: the pipe to who ordered it closes
                        socket.send_fds(bare, [text], fds)
                    continue
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                pid = os.fork()
                if pid == 0:
                    ours.close()
                    for other in sockets:
                        other.close()
                    _become(json.loads(text), fds, theirs)
                theirs.close()
                ordered[pid], sockets[ours] = one, pid
            finally:
                for fd in fds:
                    os.close(fd)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                ordered.pop(ended, None)


def _end(one: socket.socket, ordered: dict[int, socket.socket]) -> None:
    for pid, owner in ordered.items():
        if owner is one:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _become(wanted: dict, fds: list[int], warm: socket.socket) -> None:
    """In the forked process: say our id, run the job, end. Never returns."""
    from workbench.grading import confine

    code = 70
    try:
        os.setsid()
        confine.end_with_parent()
        tempfile.tempdir = None
        os.write(fds[0], f"{os.getpid()}\n".encode())
        code = JOBS[wanted.pop("job")](warm, *fds[1:], **wanted)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code or 0)


def _environment(env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


def run_pytest(warm: socket.socket, log: int, *, arguments: list[str], cwd: str, env: dict) -> int:
    """pytest, whose notebooks get kernels that are forked, too."""
    for target in (1, 2):
        os.dup2(log, target)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    _environment(env)
    os.chdir(cwd)
    import pytest
    from jupyter_client.provisioning import local_provisioner

    def launch(command: list[str], **options) -> Forked:
        details = {
            "arguments": command[3:],  # after: python -m ipykernel_launcher
            "cwd": str(options.get("cwd") or cwd),
            "env": dict(options.get("env") or env),
        }
        return order(warm, "kernel", details)

    if hasattr(local_provisioner, "launch_kernel"):  # else it starts a kernel from nothing
        vars(local_provisioner)["launch_kernel"] = launch
    return int(pytest.main(arguments))


def run_kernel(warm: socket.socket, *, arguments: list[str], cwd: str, env: dict) -> int:
    """A notebook's kernel. What it may order (a server for answers) is known by the number of the socket."""
    _environment(env | {ORDERS: str(warm.fileno())})
    os.chdir(cwd)
    null = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(null, target)
    from ipykernel.kernelapp import IPKernelApp

    sys.argv = ["ipykernel_launcher", *arguments]
    IPKernelApp.launch_instance(argv=arguments)
    return 0


JOBS: dict[str, Callable[..., int]] = {"pytest": run_pytest, "kernel": run_kernel}
ORDERS = "WORKBENCH_GRADING_ORDERS"


def orders() -> socket.socket | None:
    """In a forked kernel: the socket to the warm process."""
    number = os.environ.get(ORDERS, "")
    return socket.socket(fileno=os.dup(int(number))) if number.isdigit() else None


# --- In the bare process, and before there is one ---


def fork_bare(own: str, libraries: Sequence[str], control: socket.socket) -> socket.socket:
    """Import libraries and fork the process that forks servers; the socket that takes the orders. Called when nothing
    of ours is imported yet, by this file alone as a script."""
    import importlib
    import importlib.util

    for name in libraries:
        with contextlib.suppress(ImportError):  # said where an exercise needs it
            importlib.import_module(name)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return ours
    try:
        ours.close()
        control.close()
        spec = importlib.util.spec_from_file_location("_workbench_child", own)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.stand_alone(own).serve_orders(theirs)
    finally:
        os._exit(0)


if __name__ == "__main__":
    settings = json.loads(sys.stdin.read())
    folder = os.path.dirname(os.path.abspath(__file__))
    os.environ["TRITON_INTERPRET"] = "1"  # as in `child`
    own_control = socket.socket(fileno=int(sys.argv[1]))
    bare_control = fork_bare(os.path.join(folder, "child.py"), settings["libraries"], own_control)
    sys.path += [
        path for path in (*settings["import_paths"], os.path.dirname(os.path.dirname(folder))) if path not in sys.path
    ]
    import importlib

    for module_name in JUPYTER:
        importlib.import_module(module_name)
    importlib.import_module(settings["sets"].partition(":")[0])
    importlib.import_module("workbench.grading.handed").prepare(settings["asked"])
    importlib.import_module("workbench.grading.warm").serve(own_control, bare_control)
    os._exit(0)
