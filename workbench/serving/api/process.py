"""The engine in a process of its own, behind two ZeroMQ sockets: what does the interpreter's lock cost?

    server                                      engine process
    EngineProcess.add, abort ── PUSH ▶ PULL ──▶ main thread: Engine.add, aborts
    reader thread: deliver   ◀─ PULL ◀ PUSH ─── engine's thread: the news of every step

With the engine in a thread, tokenizing, JSON and sending wait for the interpreter's lock between the model's products,
and the engine waits for them; here they share nothing but memory bandwidth. The price: each step's news is written as
JSON and read again. vLLM and SGLang split alike. Messages are JSON, never pickles; the sockets lie in a folder that
this user alone can enter.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import tokenizers

from workbench.decoding.sampling import SamplingSettings
from workbench.decoding.sequence import LogProb, NewToken, Request
from workbench.errors import WorkbenchError
from workbench.models.tokenizer import Tokenizer
from workbench.serving.api.guides import Grammar, Guides
from workbench.serving.api.link import Deliver, Died, EngineThread, StepNews, Update
from workbench.serving.api.served import ModelFacts
from workbench.serving.engine import Engine
from workbench.serving.offloading import MoveTotals, OffloadTotals, TierTotals

LOOKS_EVERY_MS = 500  # whether the other process is still there
STOPS_WITHIN_S = 10


# -- what goes over the sockets ------------------------------------------------------------------------


def request_to_json(request: Request) -> dict[str, Any]:
    plain = {field.name: getattr(request, field.name) for field in fields(request)}
    if request.sampling is not None:
        plain["sampling"] = asdict(request.sampling)
    if request.guide is not None:
        plain["guide"] = [request.guide.kind, request.guide.source]
    return plain


def request_from_json(plain: dict[str, Any], guides: Guides) -> Request:
    given = dict(plain, id=tuple(plain["id"]))
    if given["sampling"] is not None:
        given["sampling"] = SamplingSettings(**given["sampling"])
    if given["guide"] is not None:
        given["guide"] = guides.make(Grammar(given["guide"][0], given["guide"][1], "guide"))
    return Request(**given)


def news_to_json(news: StepNews) -> list[Any]:
    return [*news]


def news_from_json(plain: Sequence[Any]) -> StepNews:
    news = StepNews(*plain)
    updates = []
    for name, sample, tokens, end, error, prompt in news.updates:
        new = tuple(NewToken(i, lp, origin, kind, _pairs(top)) for i, lp, origin, kind, top in tokens)
        rows = None if prompt is None else tuple(one and LogProb(one[0], one[1], _pairs(one[2])) for one in prompt)
        updates.append(Update(tuple(name), sample, new, end, error, rows))  # type: ignore[arg-type]
    return news._replace(
        updates=tuple(updates),
        begun=tuple((tuple(name), hits) for name, hits in news.begun),  # type: ignore[arg-type]
        new_tokens=tuple(news.new_tokens),
        contexts=tuple(news.contexts),
        drafts=_pairs(news.drafts),
        running=_pairs(news.running),
        names=tuple(tuple(name) for name in news.names),  # type: ignore[arg-type]
        failures=tuple(news.failures),
        offload=_offload_from_json(news.offload),
    )


def _offload_from_json(plain: Sequence[Any] | None) -> OffloadTotals | None:
    if plain is None:
        return None
    queries, hits, tiers, moves = plain
    return OffloadTotals(
        queries, hits, tuple(TierTotals(*one) for one in tiers), tuple(MoveTotals(*one) for one in moves)
    )


def _pairs(given: Sequence[Sequence[Any]]) -> tuple[tuple[Any, Any], ...]:
    return tuple((a, b) for a, b in given)


# -- the server's side ---------------------------------------------------------------------------------


class EngineProcess:
    """A `Link` to an engine that another process makes. command: what starts it; it is given the folder of the sockets
    as its last argument. Raises WorkbenchError, with the words of the process, where it ends before it is ready."""

    def __init__(self, command: Sequence[str]) -> None:
        import zmq

        self._folder = tempfile.TemporaryDirectory(prefix="workbench-engine-")  # for this user alone, 0700
        self._context = zmq.Context()
        self._commands, self._news = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket, name in ((self._commands, "commands"), (self._news, "news")):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(_address(self._folder.name, name))
        self._words = Path(self._folder.name) / "stderr"
        with self._words.open("w") as stderr:
            self._process = subprocess.Popen([*command, self._folder.name], stderr=stderr)
        self._stopping = False
        try:
            hello = self._first_message()
        except BaseException:
            self.stop()
            raise
        self.facts = ModelFacts(**{**hello["facts"], "eos_token_ids": tuple(hello["facts"]["eos_token_ids"])})
        self.tokenizer = None
        if hello["tokenizer"] is not None:
            backend = tokenizers.Tokenizer.from_str(hello["tokenizer"])
            self.tokenizer = Tokenizer(backend, end_of_text=hello["end_of_text"])
        self.max_running, self.token_budget = hello["max_running"], hello["token_budget"]
        self.num_blocks, self.block_size = hello["num_blocks"], hello["block_size"]
        self._zero = hello["zero"]

    def _first_message(self) -> dict[str, Any]:
        while not self._news.poll(100):
            if self._process.poll() is not None:
                words = self._words.read_text("utf-8", "replace").strip().splitlines()
                raise WorkbenchError(
                    words[-1].removeprefix("workbench: error: ") if words else "the engine's process ended"
                )
        hello: dict[str, Any] = json.loads(self._news.recv())
        return hello

    @property
    def now_s(self) -> float:
        """The engine's clock: one clock for all processes of a machine (CLOCK_MONOTONIC)."""
        return time.perf_counter() - self._zero

    def start(self, deliver: Deliver, died: Died) -> None:
        """deliver, died: called on the reader's thread."""
        self._thread = threading.Thread(target=self._read, args=(deliver, died), name="engine news", daemon=True)
        self._thread.start()

    def _read(self, deliver: Deliver, died: Died) -> None:
        while not self._stopping:
            if self._news.poll(LOOKS_EVERY_MS):
                message = json.loads(self._news.recv())
                if isinstance(message, str):
                    died(RuntimeError(message))
                    return
                deliver(news_from_json(message))
            elif self._process.poll() is not None and not self._stopping:
                died(RuntimeError(f"its process ended with code {self._process.returncode}"))
                return

    def add(self, request: Request) -> None:
        self._send(["add", request_to_json(request)])

    def abort(self, request_id: Hashable, sample: int | None = None) -> None:
        self._send(["abort", request_id, sample])

    def _send(self, message: list[Any]) -> None:
        self._commands.send(json.dumps(message).encode())

    def stop(self) -> None:
        """End the process, after the step under way."""
        self._stopping = True
        if self._process.poll() is None:
            self._send(["stop"])
            try:
                self._process.wait(STOPS_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if hasattr(self, "_thread"):
            self._thread.join()
        self._context.destroy(linger=0)
        self._folder.cleanup()


# -- the engine's side ---------------------------------------------------------------------------------


def serve_engine(make: Callable[[], Engine], folder: str | Path) -> int:
    """Make an engine and do what comes over the sockets of this folder, until it is to stop or the server is
    gone; the exit code."""
    import zmq

    context = zmq.Context()
    commands, news = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    parent, lock = os.getppid(), threading.Lock()
    with contextlib.ExitStack() as at_end:
        at_end.callback(context.destroy, linger=0)
        commands.connect(_address(folder, "commands"))
        news.connect(_address(folder, "news"))
        engine = make()
        link, model = EngineThread(engine), engine.model
        guides = Guides(model.tokenizer, model.config.vocab_size)

        def tell(message: Any) -> None:
            with lock:
                news.send(json.dumps(message).encode())

        tell(
            {
                "facts": asdict(ModelFacts.of(model)),
                "tokenizer": None if model.tokenizer is None else model.tokenizer.backend.to_str(),
                "end_of_text": None if model.tokenizer is None else model.tokenizer.end_of_text,
                "max_running": link.max_running,
                "token_budget": link.token_budget,
                "num_blocks": link.num_blocks,
                "block_size": link.block_size,
                "zero": time.perf_counter() - link.now_s,
            }
        )
        link.start(lambda one: tell(news_to_json(one)), lambda error: tell(f"{type(error).__name__}: {error}"))
        at_end.callback(link.stop)
        while True:
            if not commands.poll(LOOKS_EVERY_MS):
                if os.getppid() != parent:
                    return 1
                continue
            kind, *what = json.loads(commands.recv())
            if kind == "stop":
                return 0
            if kind == "abort":
                name, sample = what
                link.abort(tuple(name), sample)
                continue
            [plain] = what
            try:
                link.add(request_from_json(plain, guides))
            except Exception as error:  # the one request is refused, whatever it is
                link.refuse(tuple(plain["id"]), plain["n"], str(error))


def _address(folder: str | Path, name: str) -> str:
    return f"ipc://{folder}/{name}"
