"""server.breakdown: where the time of one request goes, from the client's first byte to its last.

    client   │connect and send│                                                            │write and network│
    server                    │read, parse│tokenize│queue│                   │detokenize, format│
    engine                                             │prefill│decode … decode│
                                                              (between steps)

Every boundary is read on one clock, the machine's: in the client, in the server's event loop (when the request was
read, when its place was taken, when it was weighed, when the last bytes were sent) and in the engine's thread, which
reports the seconds of each step. What is left of the client's time when all parts are taken away is not explained: it
is the way from the engine's thread to the event loop.

Of a stream all texts but the last are made and sent while the next step runs; only the last is in the sum.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain, text_ids, within_context
from workbench.instruments.timing import exclusive
from workbench.labs.lab11_serving.loads import BLOCK, counted_step
from workbench.labs.lab11_serving.loopback import Answer, ask, body_for, loopback, note_requests, on_a_loop
from workbench.serving.engine import Engine
from workbench.serving.settings import SchedulerSettings
from workbench.serving.step_time import StepSeconds, StepShape

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.serving.api.app import Server
    from workbench.serving.api.link import StepNews

KINDS = ("whole", "streamed")
MODEL_PARTS = ("prefill", "decode")
PARTS = (
    "connect and send",
    "read and parse",
    "tokenize",
    "queue",
    *MODEL_PARTS,
    "between steps",
    "detokenize and format",
    "write and network",
)
REST = "not explained"
TOKEN = "a token outside the model"


@dataclass
class Marks:
    """When what happened to the one request that is under way, on `time.perf_counter`."""

    at: dict[str, float] = field(default_factory=dict)
    news: list[StepNews] = field(default_factory=list)

    def begin(self) -> None:
        self.at, self.news = {}, []

    def around(self, app: Server) -> Any:
        """The app, with the time of every `send` noted: the last stays."""

        async def marked(scope: Any, receive: Any, send: Any) -> None:
            async def noted(message: Any) -> None:
                self.at["send"] = time.perf_counter()
                await send(message)

            await app(scope, receive, noted if scope["type"] == "http" else send)

        return marked

    def watch(self, news: StepNews) -> None:
        if news.new_tokens:
            self.news.append(news)
            self.at["delivered"] = time.perf_counter()

    def note_calls(self, owner: Any, **names: str) -> None:
        """From now on `at` has the time of the last call of each of these methods, by name."""
        for method_name, mark in names.items():
            setattr(owner, method_name, self._noted(getattr(owner, method_name), mark))

    def _noted(self, method: Any, mark: str) -> Any:
        def noted(*given: Any, **named: Any) -> Any:
            self.at[mark] = time.perf_counter()
            return method(*given, **named)

        return noted

    def parts(self, answer: Answer, zero_s: float, arrival_s: float) -> dict[str, float]:
        """Seconds of the whole, of each part, and of the rest. zero_s: of the engine's clock. arrival_s: on it."""
        first = next((at for at, one in enumerate(self.news) if any(u.tokens for u in one.updates)), None)
        if first is None:
            raise WorkbenchError("no step of the server wrote a token of the request that was asked")
        seconds = [one.seconds for one in self.news]
        begun, ended = self.news[0].at_s + zero_s, self.news[-1].at_s + self.news[-1].seconds + zero_s
        arrival = arrival_s + zero_s
        taken = (
            arrival - answer.begun_s,
            self.at["place"] - arrival,
            self.at["weigh"] - self.at["place"],
            begun - self.at["weigh"],
            sum(seconds[: first + 1]),
            sum(seconds[first + 1 :]),
            ended - begun - sum(seconds),
            self.at["send"] - self.at["delivered"],
            answer.end_s - self.at["send"],
        )
        parts = dict(zip(PARTS, taken, strict=True))
        return {"all": answer.seconds, **parts, REST: answer.seconds - sum(taken)}

    def predicted(self, counted: StepSeconds) -> dict[str, float]:
        """Seconds of the model's parts by the cost model, of the steps as they were."""
        first = next(at for at, one in enumerate(self.news) if any(u.tokens for u in one.updates))
        steps = [counted.counted_s(StepShape(one.new_tokens, one.contexts, one.decodes)) for one in self.news]
        return {"prefill": sum(steps[: first + 1]), "decode": sum(steps[first + 1 :])}


def run_breakdown(bench: Bench, *, model, prompt_tokens: int, new_tokens: int, repeats: int) -> Iterator[Measurement]:
    """For each kind of answer ("measured") the seconds of the whole request as the client sees it, of each "part", of
    what is not explained, and of a token outside the model; a sample a request. Whole and streamed in turns."""
    decoder = bench.model(model, arrangement="fast")
    ids = text_ids(decoder, prompt_tokens)
    prompt = ids if decoder.tokenizer is None else decoder.tokenizer.decode(ids)
    counted = counted_step(bench.ceilings(), model)
    settings = plain({"model": model, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens})
    length = decoder.config.context_length
    engine = Engine(
        decoder, SchedulerSettings(max_running=1, remember=False), num_blocks=-(-length // BLOCK), prefix=None
    )
    marks, arrivals = Marks(), list[Request]()
    taken: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    expected: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    texts: dict[str, set[str]] = {kind: set() for kind in KINDS}
    with loopback(engine, watch=[marks.watch], around=marks.around, check_stop=bench.check_stop) as server:
        marks.note_calls(server.front.admission, place="place", weigh="weigh")
        note_requests(server, arrivals.append)
        for turn in range(-1, repeats):
            for kind in KINDS:
                bench.report(f"{kind}: {turn + 1} of {repeats}" if turn >= 0 else "warming up")
                marks.begin()
                body = body_for(prompt, new_tokens, stream=kind == "streamed")
                with exclusive(bench.check_stop):
                    answer = on_a_loop(bench, functools.partial(ask, server, body))
                if answer.tokens() != new_tokens:
                    raise WorkbenchError(f"{new_tokens} tokens were asked for, and {answer.tokens()} came")
                if turn >= 0:
                    texts[kind].add(answer.text())
                    taken[kind].append(marks.parts(answer, server.zero_s, arrivals[-1].arrival_s))
                    expected[kind].append(marks.predicted(counted))
    if texts["whole"] != texts["streamed"] or len(texts["whole"]) != 1:
        raise WorkbenchError("the same greedy request was answered with different texts")
    steps = len(marks.news)
    check = f"{new_tokens} tokens in each answer, the same text whole and streamed"
    for kind in KINDS:
        wholes = [parts["all"] for parts in taken[kind]]
        predicted = {part: sum(one[part] for one in expected[kind]) / repeats for part in MODEL_PARTS}
        rest_share = [parts[REST] / whole for parts, whole in zip(taken[kind], wholes, strict=True)]
        outside = [
            (whole - parts["prefill"] - parts["decode"]) / new_tokens
            for parts, whole in zip(taken[kind], wholes, strict=True)
        ]
        rows: list[tuple[str, list[float], str, float | None]] = [("all", wholes, "s", None)]
        rows += [(part, [parts[part] for parts in taken[kind]], "s", predicted.get(part)) for part in (*PARTS, REST)]
        rows.append((TOKEN, outside, "s/token", None))
        for part, samples, unit, expected_s in rows:
            yield bench.measurement(
                name="server.breakdown",
                settings={**settings, "measured": kind, "part": part},
                samples=samples,
                unit=unit,
                counts={
                    "prompt_tokens": len(arrivals[-1].prompt_ids),
                    "tokens": new_tokens,
                    "steps": steps,
                    "not_explained_share": sorted(rest_share)[len(rest_share) // 2],
                },
                predicted=expected_s,
                check=check,
            )


EXPERIMENT = Experiment(
    name="server.breakdown",
    lab=11,
    question="Where does the time of one request go, from the client's first byte to its last?",
    how=(
        "one greedy request at a time over a loopback socket, whole and streamed in turns; the boundaries of the parts"
        " are read on one clock in the client, the server's event loop and the engine's thread. Predicted: the cost"
        " model's time of the same steps."
    ),
    settings=(
        MODEL,
        Setting("prompt_tokens", 64, "int", 4, 4096, unit="tokens", help="sent as text"),
        Setting("new_tokens", 48, "int", 2, 1024, unit="tokens", brief=24, help="of the answer, exactly"),
        Setting("repeats", 9, "int", 1, 100, brief=3, help="requests of each kind"),
    ),
    run=run_breakdown,
    predict=no_times,
    limits=within_context("new_tokens", "prompt_tokens", more=8),
    record={"cuda": ()},
)
