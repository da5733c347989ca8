"""server.definitions: one recorded run by the definitions of six tools, and what coordinated omission hides.

Two runs of the same kind of requests, at a rate beyond what the server can do:

    failures    a short queue: who finds it full is refused. One tool counts such a request, the others leave it out.
                With drafts, several tokens come in one chunk: the gap between tokens is not the gap between chunks.
    omission    no more than so many at a time are sent, as many load generators do it: a slow server is asked later.
                Latency from the send leaves out how late; latency from when the request was due has it.

The definitions are `serving.bench.definitions`. Tokens of a chunk are known from its log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain
from workbench.instruments.timing import exclusive
from workbench.labs.lab11_serving.loads import TEST, capacity, engine_for, requests_at, send, served_tokens, span_s
from workbench.labs.lab11_serving.loopback import loopback
from workbench.serving.api.settings import ServerSettings
from workbench.serving.bench.definitions import DEFINITIONS, truth
from workbench.serving.bench.search import coordinated_omission
from workbench.serving.metrics import Objectives

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

TOOLS = tuple(one.tool for one in DEFINITIONS)
DUE, SENT = "from when it was due", "from the send"
DRAFTS = ("prompt_lookup", "none")
PERCENTS = (50, 90, 99)
TOKENS_OF_A_CHUNK = {"logprobs": 0}


def run_definitions(
    bench: Bench, *, model, draft: str, requests: int, max_running: int, load: float, ttft_slo: float, tpot_slo: float
) -> Iterator[Measurement]:
    """For each tool ("measured") the times to first token that it counts, in s, its other means in the counts; then the
    latencies of the run under a cap, from due and from send. A mean that is infinite is left out of the counts."""
    decoder = bench.model(model, arrangement="fast")
    objectives = Objectives(ttft_s=ttft_slo, tpot_s=tpot_slo)
    settings = {
        **plain({"model": model, "draft": draft, "requests": requests, "max_running": max_running, "load": load}),
        **{"ttft_slo": ttft_slo, "tpot_slo": tpot_slo},
    }
    drafted: dict[str, Any] = {} if draft == "none" else {"draft": draft, "draft_tokens": 4}
    engine = engine_for(decoder, max_running=max_running, **drafted)
    full = ServerSettings(max_queued_requests=max_running, drain_seconds=0.0)
    bench.report("what this machine can serve")
    with exclusive(bench.check_stop), loopback(engine, check_stop=bench.check_stop) as server:
        rate = load * capacity(bench, server, 2 * max_running)
        arrivals = requests_at(rate, requests, TEST)
        bench.report("a run under a cap")
        capped = send(bench, server, arrivals, concurrency=max_running, fields=TOKENS_OF_A_CHUNK)
    bench.report("a run with a short queue")
    engine = engine_for(decoder, max_running=max_running, **drafted)
    with exclusive(bench.check_stop), loopback(engine, full, check_stop=bench.check_stop) as server:
        refusing = send(bench, server, arrivals, fields=TOKENS_OF_A_CHUNK)
    served_tokens(capped, arrivals)
    tokens = served_tokens(refusing, arrivals)
    refused, seconds = sum(not one.ok for one in refusing.results), span_s(refusing)
    if refused == requests:
        raise WorkbenchError("every request of the run was refused; lower the load")
    chunks = sum(len(one.chunks) for one in refusing.results)
    for definition in DEFINITIONS:
        said = truth(definition, refusing.results, objectives)
        done = [one for one in refusing.results if definition.success(one)]
        times = [at for one in done if (at := definition.ttft_s(one)) is not None]
        means = {"ttft_s": said.ttft_s, "tpot_s": said.tpot_s, "itl_s": said.itl_s, "latency_s": said.latency_s}
        counts = {name: mean for name, mean in means.items() if mean is not None and math.isfinite(mean)}
        counts |= {"requests": said.requests, "failed": said.failed, "output_tokens": said.output_tokens}
        counts |= {"chunks": chunks, "rate_per_s": rate}
        if said.good is not None:
            counts |= {"good": said.good, "good_per_s": said.good / seconds}
        yield bench.measurement(
            name="server.definitions",
            settings={**settings, "measured": definition.tool, "failures_count": definition.failures_count},
            samples=times,
            unit="s",
            counts=counts,
            check=f"one run: {requests - refused} answers of {tokens:,} tokens, {refused} refused",
        )
    omission = coordinated_omission(capped.results)
    for name, row in ((DUE, omission.from_due), (SENT, omission.from_send)):
        percentiles = {f"p{percent}_s": row.at(percent) for percent in PERCENTS}
        yield bench.measurement(
            name="server.definitions",
            settings={**settings, "measured": name, "failures_count": True},
            samples=list(row.values),
            unit="s",
            counts={
                "requests": len(row.values) + row.failures,
                "rate_per_s": rate,
                **{key: value for key, value in percentiles.items() if value is not None and math.isfinite(value)},
            },
            check=f"one run, {max_running} at a time; the two latencies differ by the wait for a place alone",
        )


EXPERIMENT = Experiment(
    name="server.definitions",
    lab=11,
    question="One run, six truths: what do tools call TTFT, TPOT, ITL and goodput?",
    how=(
        "requests come as a Poisson process, faster than the server can answer, and every chunk is recorded with its"
        " time. Each tool's definition is applied to this one recording. A second run, under a cap on requests at a"
        " time, has its latencies counted from the send and from when each request was due."
    ),
    settings=(
        MODEL,
        Setting("draft", DRAFTS[0], "choice", choices=DRAFTS, help="with one, several tokens may come in a chunk"),
        Setting("requests", 80, "int", 8, 2000, brief=32, help="in each run"),
        Setting("max_running", 8, "int", 1, 64, unit="texts", help="at a time; so many more may wait"),
        Setting("load", 1.6, "float", 0.2, 10.0, step=0.2, help="arrivals, of what the server can answer"),
        Setting("ttft_slo", 0.4, "float", 0.05, 10.0, unit="s", step=0.05, help="to the first token"),
        Setting("tpot_slo", 0.03, "float", 0.005, 0.5, unit="s", step=0.005, help="for each token after it"),
    ),
    run=run_definitions,
    predict=no_times,
    record={"cuda": ()},
)
