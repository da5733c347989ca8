"""Judges in a process of their own: what an answer gave is data from outside, and judging it costs time and memory.

A `JudgeProcess` is a copy of this process, forked when the first check is judged. It has limits of its own, so that
what was made to be expensive to judge fails its check, with a sentence, and costs the grader no more than that. Its
time is that of the processor: a machine with much else to do takes no points from anybody.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

from workbench.grading import confine
from workbench.grading.check import MAX_MESSAGE_CHARS, Check, decode, encode, judge_check
from workbench.grading.mistakes import Noted

JUDGE_SECONDS = 5.0  # of the processor
WAITS = 20  # times as long by the clock, in case the copy stands still
JUDGE_BYTES = 1 << 30
MAX_REPLY_BYTES = 8 << 20
TOO_MUCH = "what the answer gave could not be judged within"


class JudgeProcess:
    """Judges the checks of an exercise, one at a time. Where there is no fork it judges here."""

    def __init__(self, checks: Sequence[Check], *, seconds: float = JUDGE_SECONDS, memory: int = JUDGE_BYTES) -> None:
        self.checks, self.seconds, self.memory = tuple(checks), seconds, memory
        self._pid: int | None = None

    def judge(self, check: Check, cases: list[dict], observations: Sequence[dict]) -> str | None:
        """What `judge_check` says, or that judging took too much."""
        if all("value" not in seen for seen in observations) or not hasattr(os, "fork"):
            return judge_check(check, cases, observations)  # there is nothing but sentences of ours
        if self._pid is None:
            self._start()
        question = {"check": self.checks.index(check), "cases": encode(cases), "seen": list(observations)}
        question["seconds"] = self.seconds
        reply = self._ask(json.dumps(question).encode() + b"\n")
        if reply is None:
            self.close()
            limits = f"{self.seconds:g} s of the processor and {self.memory / 2**30:g} GiB"
            return f"{TOO_MUCH} {limits}: no right answer is that large"
        if isinstance(check.known, Noted):
            check.known.shown = reply["shown"]
        return reply["message"]

    def close(self) -> None:
        if self._pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        for fd in (self._questions, self._replies):
            os.close(fd)
        self._pid = None

    def _start(self) -> None:
        asked, self._questions = os.pipe()
        self._replies, replied = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of other threads: the copy needs none of them
            pid = os.fork()
        if pid == 0:
            self._judge_for_ever(asked, replied)
        self._pid = pid
        os.close(asked)
        os.close(replied)
        os.set_blocking(self._questions, False)
        os.set_blocking(self._replies, False)

    def _ask(self, question: bytes) -> dict | None:
        """None when the process ended, or its time is up."""
        until, unsent, reply = time.monotonic() + WAITS * self.seconds, memoryview(question), b""
        while not reply.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or len(reply) > MAX_REPLY_BYTES:
                return None
            readable, writable, _ = select.select([self._replies], [self._questions] if unsent else [], [], left)
            try:
                if writable:
                    unsent = unsent[os.write(self._questions, unsent) :]
                if readable:
                    piece = os.read(self._replies, 1 << 16)
                    if not piece:
                        return None
                    reply += piece
            except (BrokenPipeError, BlockingIOError):
                return None
        return json.loads(reply)

    def _judge_for_ever(self, asked: int, replied: int) -> None:
        """In the copy. Never returns."""
        try:
            confine.end_with_parent()
            lower, upper = sorted((asked, replied))  # and nothing else of the grader's: sockets, sessions' pipes
            for first, last in ((3, lower), (lower + 1, upper), (upper + 1, 1 << 12)):
                os.closerange(first, last)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            null = os.open(os.devnull, os.O_RDWR)
            for standard in (0, 1, 2):
                os.dup2(null, standard)
            sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, m) for n, m in ((0, "r"), (1, "w"), (2, "w")))
            confine.limit_memory(self.memory)
            if (torch := sys.modules.get("torch")) is not None:
                torch.set_num_threads(1)  # its other threads are not in the copy, and would be waited for
            with os.fdopen(asked, "rb") as questions:
                for line in questions:
                    question = json.loads(line)
                    confine.limit_processor(question["seconds"])
                    check = self.checks[question["check"]]
                    if isinstance(check.known, Noted):
                        check.known.shown = None
                    message = judge_check(check, decode(question["cases"]), question["seen"])
                    answer: dict[str, Any] = {"message": message and message[:MAX_MESSAGE_CHARS]}
                    answer["shown"] = check.known.shown if isinstance(check.known, Noted) else None
                    data = memoryview(json.dumps(answer).encode() + b"\n")
                    while data:
                        data = data[os.write(replied, data) :]
        finally:
            os._exit(0)
