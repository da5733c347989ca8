"""One recording, six truths: TTFT, TPOT, ITL and goodput as six tools define them. Small pure functions.

All of a request, in seconds. "chunk": an event with a choice; n: output tokens. "each equal": the mean over requests
weighs each request with 1.

    tool          TTFT                 TPOT                         ITL                                n
    ours          due → first token    (last − first) / (n − 1)     gaps between tokens, pooled        usage or chunks
    vllm_bench    send → first chunk   (latency − TTFT) / (n − 1)   gaps between chunks, pooled        usage or text
    guidellm      send → first text    (last − send) / n,           (last − first) / (n − 1),          usage or chunks
                                       weight n                     weight n − 1
    aiperf        send → first text    –                            (latency − TTFT) / (n − tokens     usage
                                                                    of the first chunk), each equal
    llmperf       send → first text    –                            (last − send) / n, each equal:     text
                                                                    the first token's wait is in it
    vllm_metrics  send → first token   (last − first) / (n − 1),    gaps between outputs, pooled       engine
                                       a single token counts as 0

Where they differ on purpose:
- An empty first chunk, such as a chat's role, starts TTFT for `vllm_bench` and for no other.
- ours starts when the request was due, the others when it was sent. In a closed loop the two are the same.
- ours counts tokens of one chunk as gaps of 0; `vllm_bench` sees one gap a chunk. With drafted tokens ITL and TPOT then
  differ by the tokens of a step (vllm-project/vllm #19776).
- A request that failed is infinitely slow for ours, and left out of latencies by the others. A stream that ended with
  an error event, or early, is a success for `vllm_bench`, which looks at the status and at whether a chunk came.
- goodput: ours and `aiperf` count a request only where all that is asked for was measured (`aiperf`: one token has no
  ITL, so it fails; ours: it has no TPOT and meets that limit), `vllm_bench` takes the TPOT of one token as 0. The
  others have none.

What a client cannot see is taken from what it can: `vllm_metrics` are times of the engine, without the network, and
begin when the request arrived there; here the send stands for that. n of `vllm_bench` without usage, and of `llmperf`,
is counted by a tokenizer over the text; here the chunks stand for that. All of vLLM's per-request `metrics` begin when
the request was scheduled by the engine: no client can know that time, so they are left out.

Read in the code: vllm-project/vllm `benchmarks/serve.py` (009e6d4), `benchmarks/lib/endpoint_request_func.py` (02cfb53)
and `v1/metrics/stats.py`; vllm-project/guidellm `schemas/base/request_stats.py` (31c74ea) and the weights where it
compiles metrics; ai-dynamo/aiperf `metrics/types/` (58dd5de); ray-project/llmperf `openai_chat_completions_client.py`
(0451d33) and `token_benchmark_ray.py` (004d3af).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from workbench.serving.bench.recording import Chunk, Result
from workbench.serving.metrics import Objectives

Weighted = tuple[float, float]  # a value and its weight

# -- parts of a result -------------------------------------------------------------------------------------------


def texts(result: Result) -> list[Chunk]:
    """Chunks that have text."""
    return [chunk for chunk in result.chunks if chunk.text]


def outputs(result: Result) -> list[Chunk]:
    """Chunks that carry tokens: where the server does not say how many, those with text."""
    return [chunk for chunk in result.chunks if chunk.counted]


def _from(start_s: float, chunks: Sequence[Chunk]) -> float | None:
    return chunks[0].at_s - start_s if chunks else None


def _after_first(chunks: Sequence[Chunk], tokens: int) -> float | None:
    """(last − first) / tokens"""
    return (chunks[-1].at_s - chunks[0].at_s) / tokens if chunks and tokens > 0 else None


def _gaps(chunks: Sequence[Chunk]) -> list[Weighted]:
    return [(after.at_s - before.at_s, 1.0) for before, after in pairwise(chunks)]


def _one(value: float | None, weight: float = 1.0) -> list[Weighted]:
    return [] if value is None or weight <= 0 else [(value, weight)]


# -- ours --------------------------------------------------------------------------------------------------------


def due_s(result: Result) -> float:
    """When it should have been sent; in a closed loop, when it was."""
    return result.send_s if result.scheduled_s is None else result.scheduled_s


def our_ttft_s(result: Result) -> float | None:
    return _from(due_s(result), outputs(result))


def our_tpot_s(result: Result) -> float | None:
    return _after_first(outputs(result), result.output_tokens - 1)


def our_gaps_s(result: Result) -> list[Weighted]:
    """Between tokens: those of one chunk came together."""
    times = [chunk.at_s for chunk in outputs(result) for _ in range(chunk.counted)]
    return [(after - before, 1.0) for before, after in pairwise(times)]


def our_latency_s(result: Result) -> float | None:
    """Up to the last token."""
    chunks = outputs(result)
    return chunks[-1].at_s - due_s(result) if chunks else None


# -- vllm bench serve --------------------------------------------------------------------------------------------


def vllm_bench_success(result: Result) -> bool:
    """Status 200 and a chunk, and no exception: an error event has no choices and is passed over."""
    no_exception = result.outcome in ("ok", "error_event", "incomplete")
    return no_exception and result.status == 200 and bool(result.chunks)


def vllm_bench_ttft_s(result: Result) -> float | None:
    """Up to the first chunk, also one without text."""
    return _from(result.send_s, result.chunks)


def vllm_bench_latency_s(result: Result) -> float | None:
    return result.chunks[-1].at_s - result.send_s if result.chunks else None


def vllm_bench_tpot_s(result: Result) -> float | None:
    return _after_first(result.chunks, result.output_tokens - 1)


def vllm_bench_gaps_s(result: Result) -> list[Weighted]:
    return _gaps(result.chunks)


# -- guidellm ----------------------------------------------------------------------------------------------------


def text_ttft_s(result: Result) -> float | None:
    """guidellm, aiperf and llmperf: up to the first chunk with text."""
    return _from(result.send_s, texts(result))


def guidellm_tokens(result: Result) -> int:
    return len(texts(result)) if result.completion_tokens is None else result.completion_tokens


def guidellm_tpot_s(result: Result) -> list[Weighted]:
    """With the first token, and its wait."""
    chunks, tokens = texts(result), guidellm_tokens(result)
    return _one((chunks[-1].at_s - result.send_s) / tokens, tokens) if chunks and tokens else []


def guidellm_itl_s(result: Result) -> list[Weighted]:
    tokens = guidellm_tokens(result)
    return _one(_after_first(texts(result), tokens - 1), tokens - 1)


def request_latency_s(result: Result) -> float | None:
    """guidellm and llmperf: up to the end of the answer."""
    return result.end_s - result.send_s if result.chunks else None


# -- aiperf ------------------------------------------------------------------------------------------------------


def aiperf_latency_s(result: Result) -> float | None:
    """Up to the last chunk with text."""
    chunks = texts(result)
    return chunks[-1].at_s - result.send_s if chunks else None


def aiperf_itl_s(result: Result) -> float | None:
    """Over the tokens after the first chunk; where that leaves none, or its tokens are not known, over n − 1."""
    chunks, tokens = texts(result), result.completion_tokens
    if not chunks or tokens is None or tokens < 2:
        return None
    first = chunks[0].tokens
    known = first is not None and first > 0 and tokens - first >= 1
    return _after_first(chunks, tokens - first if known and first is not None else tokens - 1)


# -- llmperf -----------------------------------------------------------------------------------------------------


def llmperf_itl_s(result: Result) -> float | None:
    """The sum of all gaps, the first being TTFT, over n."""
    chunks = texts(result)
    return (chunks[-1].at_s - result.send_s) / result.output_tokens if chunks and result.output_tokens else None


# -- vLLM's /metrics ---------------------------------------------------------------------------------------------


def vllm_metrics_ttft_s(result: Result) -> float | None:
    return _from(result.send_s, outputs(result))


def vllm_metrics_tpot_s(result: Result) -> float | None:
    """vllm:request_time_per_output_token_seconds: one token counts as 0."""
    if not outputs(result):
        return None
    return _after_first(outputs(result), result.output_tokens - 1) or 0.0


def vllm_metrics_gaps_s(result: Result) -> list[Weighted]:
    """vllm:inter_token_latency_seconds: between outputs of the engine, whatever number of tokens each has."""
    return _gaps(outputs(result))


# -- goodput -----------------------------------------------------------------------------------------------------


def _within(limit_s: float | None, value_s: float | None, missing: bool) -> bool:
    """missing: what to say where there is a limit and no value."""
    return limit_s is None or (missing if value_s is None else value_s <= limit_s)


def our_good(result: Result, objectives: Objectives) -> bool:
    return (
        result.ok
        and _within(objectives.ttft_s, our_ttft_s(result), False)
        and _within(objectives.tpot_s, our_tpot_s(result), True)
        and _within(objectives.latency_s, our_latency_s(result), False)
    )


def vllm_bench_good(result: Result, objectives: Objectives) -> bool:
    return (
        vllm_bench_success(result)
        and _within(objectives.ttft_s, vllm_bench_ttft_s(result), False)
        and _within(objectives.tpot_s, vllm_bench_tpot_s(result) or 0.0, True)
        and _within(objectives.latency_s, vllm_bench_latency_s(result), False)
    )


def aiperf_good(result: Result, objectives: Objectives) -> bool:
    """aiperf has no TPOT; a limit on it is taken as one on its ITL."""
    return (
        result.ok
        and _within(objectives.ttft_s, text_ttft_s(result), False)
        and _within(objectives.tpot_s, aiperf_itl_s(result), False)
        and _within(objectives.latency_s, aiperf_latency_s(result), False)
    )


# -- all of them -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Definition:
    """success: what the tool counts as one. failures_count: they are infinitely slow in its latencies."""

    tool: str
    success: Callable[[Result], bool]
    ttft_s: Callable[[Result], float | None]
    tpot_s: Callable[[Result], list[Weighted]] | None
    itl_s: Callable[[Result], list[Weighted]]
    latency_s: Callable[[Result], float | None]
    tokens: Callable[[Result], int]
    good: Callable[[Result, Objectives], bool] | None = None
    failures_count: bool = False


def _ok(result: Result) -> bool:
    return result.ok


def _tokens(result: Result) -> int:
    return result.output_tokens


def _equal(measure: Callable[[Result], float | None]) -> Callable[[Result], list[Weighted]]:
    """Each request with weight 1."""
    return lambda result: _one(measure(result))


DEFINITIONS = (
    Definition("ours", _ok, our_ttft_s, _equal(our_tpot_s), our_gaps_s, our_latency_s, _tokens, our_good, True),
    Definition(
        "vllm_bench",
        vllm_bench_success,
        vllm_bench_ttft_s,
        _equal(vllm_bench_tpot_s),
        vllm_bench_gaps_s,
        vllm_bench_latency_s,
        _tokens,
        vllm_bench_good,
    ),
    Definition("guidellm", _ok, text_ttft_s, guidellm_tpot_s, guidellm_itl_s, request_latency_s, guidellm_tokens),
    Definition("aiperf", _ok, text_ttft_s, None, _equal(aiperf_itl_s), aiperf_latency_s, _tokens, aiperf_good),
    Definition("llmperf", _ok, text_ttft_s, None, _equal(llmperf_itl_s), request_latency_s, _tokens),
    Definition(
        "vllm_metrics",
        _ok,
        vllm_metrics_ttft_s,
        _equal(vllm_metrics_tpot_s),
        vllm_metrics_gaps_s,
        request_latency_s,
        _tokens,
    ),
)


@dataclass(frozen=True)
class Truth:
    """Of a run, by one tool. Means in seconds, weighted as the tool does; None where the tool has no such metric, or no
    request has it. With failures that count, a mean of the times to first token is infinite."""

    tool: str
    requests: int  # in its latencies
    failed: int
    ttft_s: float | None
    tpot_s: float | None
    itl_s: float | None
    latency_s: float | None
    output_tokens: int
    good: int | None  # requests that met the objectives


def truth(definition: Definition, results: Sequence[Result], objectives: Objectives | None = None) -> Truth:
    done = [result for result in results if definition.success(result)]
    failed = len(results) - len(done)
    lost = [(math.inf, 1.0)] * failed if definition.failures_count else []

    def mean(measure: Callable[[Result], list[Weighted]], *, lost: Sequence[Weighted] = ()) -> float | None:
        values = [pair for result in done for pair in measure(result)] + list(lost)
        weight = sum(weight for _, weight in values)
        return sum(value * weight for value, weight in values) / weight if weight else None

    good = definition.good
    return Truth(
        tool=definition.tool,
        requests=len(done) + len(lost),
        failed=failed,
        ttft_s=mean(_equal(definition.ttft_s), lost=lost),
        tpot_s=None if definition.tpot_s is None else mean(definition.tpot_s),
        itl_s=mean(definition.itl_s),
        latency_s=mean(_equal(definition.latency_s), lost=lost),
        output_tokens=sum(map(definition.tokens, done)),
        good=None if good is None or objectives is None else sum(good(result, objectives) for result in results),
    )


def truths(results: Sequence[Result], objectives: Objectives | None = None) -> list[Truth]:
    """The same requests, by each of the six."""
    return [truth(definition, results, objectives) for definition in DEFINITIONS]
