"""server.overhead: the same requests by `Engine.run` and over HTTP: whole, streamed, by an engine in another process.

    Engine.run                  no server
    whole, streamed             the engine in a thread of the server's process: one interpreter, one lock
    whole and streamed, process the engine behind ZeroMQ (`workbench serve --engine-process`): two interpreters

All in turns: A B C … A B C …; what is reported of a pair is the median of the ratios within a turn. The clients are in
the server's process, too: where the engine is in a thread the three share the interpreter's lock, and a client on
another machine would take nothing of it.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain
from workbench.instruments.timing import exclusive
from workbench.labs.lab08_continuous_batching.peers import requests_for
from workbench.labs.lab11_serving.loopback import Loopback, ask_all, body_for, loopback, on_a_loop, text_of
from workbench.serving.api.process import EngineProcess
from workbench.serving.engine import Engine
from workbench.serving.load import requests_of
from workbench.serving.settings import SchedulerSettings

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.labs.lab08_continuous_batching.contenders import Asked

ENGINE = "Engine.run"
KINDS = ("whole", "streamed")
WHERE = ("thread", "thread and process")
BUDGET = 512

Served = tuple[float, list[str]]  # seconds of all requests, and their texts


@dataclass
class Way:
    """One way to have the requests answered."""

    name: str
    run: Callable[[], Served]
    samples: list[float] = field(default_factory=list)
    equal: int = 0  # texts that are those of Engine.run


def run_overhead(
    bench: Bench, *, model, engine: str, requests: int, slots: int, max_new_tokens: int, repeats: int
) -> Iterator[Measurement]:
    """A Measurement a way ("measured"): seconds of all requests, a sample a turn, its ratio to Engine.run in the
    counts. Every way must write the same texts."""
    if engine == WHERE[1] and not isinstance(model, str):
        raise WorkbenchError("the engine's process loads its model by name; give a name, or engine='thread'")
    decoder = bench.model(model, arrangement="fast")
    asked = requests_for(bench.model(model), requests, max_new_tokens, 0)
    settings = {**plain({"model": model}), **{"requests": requests, "slots": slots, "max_new_tokens": max_new_tokens}}
    with contextlib.ExitStack() as stack:
        ways = [Way(ENGINE, lambda: _by_engine(_engine(decoder, slots), asked))]
        at = stack.enter_context(loopback(_engine(decoder, slots), check_stop=bench.check_stop))
        ways += [Way(kind, _over(bench, at, asked, kind)) for kind in KINDS]
        if engine == WHERE[1]:
            bench.report("starting the engine's process")
            made = stack.enter_context(loopback(lambda: _process(model, slots), check_stop=bench.check_stop))
            ways += [Way(f"{kind}, process", _over(bench, made, asked, kind)) for kind in KINDS]
        for turn in range(-1, repeats):
            texts: list[str] = []
            for way in ways:
                bench.report(f"{way.name}: turn {turn + 1} of {repeats}" if turn >= 0 else f"{way.name}: warming up")
                bench.check_stop()
                with exclusive(bench.check_stop):
                    seconds, written = way.run()
                texts = texts or written
                way.equal = sum(a == b for a, b in zip(texts, written, strict=True))
                if way.equal != len(texts):
                    raise WorkbenchError(f"{way.name}: {len(texts) - way.equal} texts are not those of Engine.run")
                if turn >= 0:
                    way.samples.append(seconds)
    base, tokens = ways[0].samples, sum(asked.new_tokens)
    for way in ways:
        ratios = [a / b for a, b in zip(base, way.samples, strict=True)]
        yield bench.measurement(
            name="server.overhead",
            settings={**settings, "measured": way.name},
            samples=way.samples,
            unit="s",
            counts={
                "requests": requests,
                "tokens": tokens,
                "texts_equal": way.equal,
                "tokens_per_s": tokens / statistics.median(way.samples),
                "as_fast_as_engine": statistics.median(ratios),
                "least_ratio": min(ratios),
                "largest_ratio": max(ratios),
            },
            check=f"all {requests} texts, {tokens:,} tokens, are those of Engine.run",
        )


def _engine(decoder, slots: int) -> Engine:
    """A prefix cache would find the prompts of the turn before."""
    settings = SchedulerSettings(max_running=slots, token_budget=BUDGET, remember=False)
    return Engine(decoder, settings, prefix=None)


def _process(model: str, slots: int) -> EngineProcess:
    options = ["--max-running", str(slots), "--token-budget", str(BUDGET), "--prefix", "none"]
    return EngineProcess([sys.executable, "-m", "workbench.cli", "serve", model, *options, "--engine-at"])


def _by_engine(engine: Engine, asked: Asked) -> Served:
    requests = requests_of(asked.prompts, asked.new_tokens)
    began = time.perf_counter()
    results = engine.run(requests)
    seconds = time.perf_counter() - began
    written = {one.request_id: one.token_ids for one in results}
    tokenizer = engine.model.tokenizer
    return seconds, [text_of(written[at], prompt, tokenizer) for at, prompt in enumerate(asked.prompts)]


def _over(bench: Bench, server: Loopback, asked: Asked, kind: str) -> Callable[[], Served]:
    bodies = [
        body_for(prompt, count, stream=kind == "streamed")
        for prompt, count in zip(asked.prompts, asked.new_tokens, strict=True)
    ]

    def run() -> Served:
        answers = on_a_loop(bench, lambda: ask_all(server, bodies))
        seconds = max(one.end_s for one in answers) - min(one.begun_s for one in answers)
        _check_lengths([one.tokens() for one in answers], asked.new_tokens)
        return seconds, [one.text() for one in answers]

    return run


def _check_lengths(written: Sequence[int], wanted: Sequence[int]) -> None:
    if list(written) != list(wanted):
        raise WorkbenchError(f"the server gave {sum(written)} tokens where {sum(wanted)} were asked for")


EXPERIMENT = Experiment(
    name="server.overhead",
    lab=11,
    question="What do HTTP, streaming and the interpreter's lock cost, beside the engine alone?",
    how=(
        "the ragged requests of lab 08, all there at once, in turns by Engine.run and over a loopback socket; ratios"
        " are medians within a turn. Clients run in the server's process, and parse their answers when the clock has"
        " stopped."
    ),
    settings=(
        MODEL,
        Setting("engine", WHERE[1], "choice", choices=WHERE, help="where the engine's steps run"),
        Setting("requests", 64, "int", 2, 256, brief=24, help="all there at once"),
        Setting("slots", 16, "int", 1, 64, help="requests in work at a time"),
        Setting("max_new_tokens", 96, "int", 8, 900, brief=48, help="the longest output; most are short"),
        Setting("repeats", 3, "int", 1, 50, brief=2, help="timed turns"),
    ),
    run=run_overhead,
    predict=no_times,
    record={"cpu": ({"max_new_tokens": 256},), "cuda": ()},
)
