"""server.ordering: requests in the order of what the prefix cache has of them, against first come.

Users ask about a few documents, in turns: neighbours in the queue have different ones. The pool holds the requests in
work and little more, so under first come a document has been evicted when the next question about it comes. Under the
longest match the waiting request of whose prompt most is in the cache goes first (SGLang: Zheng et al., arXiv
2312.07104 §3), and questions about a document are answered one after another.

All requests are there at the start, so the twin makes the same plans as the engine, and its hits are exact.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain, shape_of
from workbench.instruments.records import quantile
from workbench.instruments.timing import exclusive
from workbench.labs.lab11_serving.loads import BLOCK, counted_step
from workbench.serving.arrivals import Arrival, prompt_ids
from workbench.serving.engine import Engine
from workbench.serving.settings import SchedulerSettings
from workbench.serving.simulate import Twin
from workbench.serving.step_time import Calibration, StepShape
from workbench.serving.times import RequestTimes

if TYPE_CHECKING:
    from workbench.decoding.sequence import Sequence as Text
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.kv.blocks import BlockTables
    from workbench.serving.results import StepReport

ORDERS = ("first_come", "longest_match")
SLOTS, NEW_TOKENS, QUESTION = 4, 8, 16  # requests in work, tokens of an answer and of a question
SPARE = 2  # documents that fit into the pool beside the requests in work
BUDGET = 512


class LongestMatch:
    """A policy: who has most of his prompt in the prefix cache goes first, then who came first. It asks the index for
    every waiting request in every step, which costs time, too. tables: set before the first step."""

    def __init__(self) -> None:
        self.tables: BlockTables | None = None

    def __call__(self, sequence: Text, now_s: float) -> tuple[int, float, int]:
        assert self.tables is not None and self.tables.prefix is not None
        cached = self.tables.prefix.match(sequence.token_ids, sequence.request.tenant)
        return (-len(cached), sequence.arrival_s, sequence.number)


def questions(documents: int, asked: int, document_tokens: int) -> tuple[Arrival, ...]:
    """Question after question, each about the next document."""
    prompt = document_tokens + QUESTION
    return tuple(
        Arrival(
            0.0,
            prompt,
            NEW_TOKENS,
            prefix_tokens=document_tokens,
            texts=((f"document {document}", document_tokens), (f"question {question} on {document}", QUESTION)),
        )
        for question in range(asked)
        for document in range(documents)
    )


def pool(document_tokens: int) -> int:
    whole = -(-(document_tokens + QUESTION + NEW_TOKENS) // BLOCK)
    return SLOTS * (whole + 1) + SPARE * (document_tokens // BLOCK)


def _settings(order: str) -> tuple[SchedulerSettings, LongestMatch]:
    match = LongestMatch()
    policy: Any = match if order == "longest_match" else order
    return SchedulerSettings(max_running=SLOTS, token_budget=BUDGET, policy=policy), match


def run_ordering(
    bench: Bench, *, model, documents: int, asked: int, document_tokens: int, repeats: int
) -> Iterator[Measurement]:
    """A Measurement an order ("measured"): times to first token in s, a sample a request of the last turn; hits and
    steps in the counts, equal to the twin's."""
    decoder = bench.model(model, arrangement="fast")
    arrivals, blocks = questions(documents, asked, document_tokens), pool(document_tokens)
    longest = document_tokens + QUESTION + NEW_TOKENS
    if longest > decoder.config.context_length:
        raise WorkbenchError(
            f"a document, a question and an answer are {longest:,} tokens, and the model reads at most"
            f" {decoder.config.context_length:,}; shorten the documents"
        )
    requests = [
        Request(at, tuple(prompt_ids(one, decoder.config.vocab_size)), one.new_tokens, stop_token_ids=())
        for at, one in enumerate(arrivals)
    ]
    counted = counted_step(bench.ceilings(), model)
    seconds: dict[str, list[float]] = {order: [] for order in ORDERS}
    runs: dict[str, tuple[list[RequestTimes], list[StepReport], int]] = {}
    texts: dict[str, dict[Any, tuple[int, ...]]] = {}
    for turn in range(-1, repeats):
        for order in ORDERS:
            bench.report(f"{order}: turn {turn + 1} of {repeats}" if turn >= 0 else f"{order}: warming up")
            bench.check_stop()
            settings, match = _settings(order)
            engine = Engine(decoder, settings, num_blocks=blocks, block_size=BLOCK)
            reports: list[StepReport] = []
            match.tables = engine.kv.tables

            def watch(report: StepReport, reports: list[StepReport] = reports) -> None:
                bench.check_stop()
                reports.append(report)

            with exclusive(bench.check_stop):
                results = engine.run(requests, watch=watch)
            texts[order] = {one.request_id: one.token_ids for one in results}
            runs[order] = ([RequestTimes.of(one) for one in results], reports, engine.scheduler.hit_tokens)
            if turn >= 0:
                seconds[order].append(max(one.finished_s for one in results))
    if texts[ORDERS[0]] != texts[ORDERS[1]]:
        raise WorkbenchError("the order of the requests has changed their texts")
    steps = [(StepShape.of_report(one), one.seconds) for _, reports, _ in runs.values() for one in reports if one.rows]
    calibration = Calibration.fit(steps, counted.counted_s)
    for order in ORDERS:
        times, reports, hits = runs[order]
        simulated = _twin(order, arrivals, blocks, lambda shape: calibration(counted.counted_s(shape), shape))
        if simulated[1] != hits:
            raise WorkbenchError(f"the engine had {hits} tokens from the prefix cache, and its twin {simulated[1]}")
        ttft = [float(one.ttft_s) for one in times if one.ttft_s is not None]
        ratios = [a / b for a, b in zip(seconds[ORDERS[0]], seconds[order], strict=True)]
        yield bench.measurement(
            name="server.ordering",
            settings={
                **plain({"model": model, "documents": documents, "asked": asked}),
                **{"document_tokens": document_tokens, "measured": order},
            },
            samples=ttft,
            unit="s",
            counts={
                "requests": len(arrivals),
                "prompt_tokens": sum(one.prompt_tokens for one in arrivals),
                "hit_tokens": hits,
                "steps": sum(one.rows > 0 for one in reports),
                "rows": sum(one.rows for one in reports),
                "all_done_s": statistics.median(seconds[order]),
                "as_fast_as_first_come": statistics.median(ratios),
                "ttft_mean_s": statistics.mean(ttft),
                "ttft_p99_s": quantile(ttft, 0.99),
            },
            predicted=statistics.median(simulated[0]),
            check=f"the same {len(arrivals)} texts in both orders; hits are the twin's, token for token",
        )


def _twin(order: str, arrivals: Sequence[Arrival], blocks: int, step_s: Any) -> tuple[list[float], int]:
    """Times to first token, and tokens from the prefix cache."""
    settings, match = _settings(order)
    twin = Twin(settings, num_blocks=blocks, block_size=BLOCK, step_s=step_s)
    match.tables = twin.tables
    done = twin.run(arrivals)
    times = [RequestTimes.of(one).ttft_s for one in done]
    return [float(one) for one in times if one is not None], twin.scheduler.hit_tokens


EXPERIMENT = Experiment(
    name="server.ordering",
    lab=11,
    question="What is gained by answering questions about one document one after another?",
    how=(
        "all questions are there at once, four in work at a time, in a pool that holds two documents beside them; the"
        " engine serves them in both orders, in turns. Predicted: the twin with step times fitted to these runs."
    ),
    settings=(
        MODEL,
        Setting("documents", 8, "int", 1, 64, help="that are asked about, in turns"),
        Setting("asked", 4, "int", 1, 32, help="questions about each"),
        Setting("document_tokens", 256, "int", 16, 4096, unit="tokens", step=16, brief=128, help="of a document"),
        Setting("repeats", 3, "int", 1, 50, brief=1, help="timed turns"),
    ),
    run=run_ordering,
    predict=no_times,
    limits=lambda *, model, **_: {"document_tokens": shape_of(model).context_length - QUESTION - NEW_TOKENS},
    record={"cuda": ()},
)
