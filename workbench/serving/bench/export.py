"""A recording in the JSON keys of `vllm bench serve`, by vLLM's definitions, for tools that read such files. No torch.

The keys are those of vllm-project/vllm `benchmarks/serve.py` (009e6d4). Percentiles are numpy's, as there; a failed
request is in the lists with zeros, and in no statistic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.serving.bench.definitions import (
    vllm_bench_gaps_s,
    vllm_bench_good,
    vllm_bench_latency_s,
    vllm_bench_success,
    vllm_bench_tpot_s,
    vllm_bench_ttft_s,
)
from workbench.serving.bench.recording import Recording, Result
from workbench.serving.metrics import Objectives

PERCENTS = (99,)


def vllm_json(recording: Recording, objectives: Objectives | None = None) -> dict[str, Any]:
    """All requests that have a result, in the order of the schedule; nothing is cut."""
    results = sorted(recording.results, key=lambda result: result.index)
    done = [result for result in results if vllm_bench_success(result)]
    duration = max((r.end_s for r in results), default=0.0) - min((r.send_s for r in results), default=0.0)
    outputs, inputs = sum(r.output_tokens for r in done), sum(map(_prompt_tokens(recording), done))
    good = None if objectives is None else sum(vllm_bench_good(r, objectives) for r in results)
    rate = recording.about.settings.get("rate_per_s")
    made: dict[str, Any] = {
        "date": recording.about.settings.get("date"),
        "endpoint_type": "openai-chat" if recording.about.endpoint == "chat" else "openai",
        "backend": "openai-chat" if recording.about.endpoint == "chat" else "openai",
        "label": None,
        "model_id": recording.about.model,
        "tokenizer_id": None,
        "num_prompts": len(recording.schedule),
        "request_rate": "inf" if rate is None else rate,
        "burstiness": recording.about.settings.get("burstiness"),
        "max_concurrency": recording.about.settings.get("concurrency"),
        "duration": duration,
        "completed": len(done),
        "failed": len(results) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": _over(len(done), duration),
        "request_goodput": None if good is None else _over(good, duration),
        "output_throughput": _over(outputs, duration),
        "total_token_throughput": _over(inputs + outputs, duration),
        "input_lens": [_prompt_tokens(recording)(r) for r in results],
        "output_lens": [r.output_tokens if vllm_bench_success(r) else 0 for r in results],
        "ttfts": [vllm_bench_ttft_s(r) or 0.0 for r in results],
        "itls": [[gap for gap, _ in vllm_bench_gaps_s(r)] for r in results],
        "latencies": [vllm_bench_latency_s(r) or 0.0 for r in results],
        "start_times": [r.send_s for r in results],
        "queue_times": [r.waited_s for r in results],
        "generated_texts": [r.text for r in results],
        "errors": ["" if vllm_bench_success(r) else f"{r.outcome}: {r.reason}" for r in results],
        "max_output_tokens_per_s": _peak_tokens(done),
        "max_concurrent_requests": _peak_requests(done),
        "rtfx": 0.0,
    }
    made |= _statistics("ttft", [vllm_bench_ttft_s(r) for r in done])
    made |= _statistics("tpot", [vllm_bench_tpot_s(r) for r in done])
    made |= _statistics("itl", [gap for r in done for gap, _ in vllm_bench_gaps_s(r)])
    made |= _statistics("e2el", [vllm_bench_latency_s(r) for r in done])
    return made


def _prompt_tokens(recording: Recording) -> Any:
    """As usage says, else as planned."""
    return lambda r: recording.schedule[r.index].prompt_tokens if r.prompt_tokens is None else r.prompt_tokens


def _over(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _statistics(name: str, values: Sequence[float | None]) -> dict[str, float]:
    """In milliseconds; 0 where no request has it, as there."""
    known = 1000 * np.array([value for value in values if value is not None] or [0.0])
    made = {
        f"mean_{name}_ms": float(known.mean()),
        f"median_{name}_ms": float(np.median(known)),
        f"std_{name}_ms": float(known.std()),
    }
    return made | {f"p{percent}_{name}_ms": float(np.percentile(known, percent)) for percent in PERCENTS}


def _peak_tokens(done: Sequence[Result]) -> float:
    """Chunks in the fullest of the seconds from the first send on."""
    if not done:
        return 0.0
    start = min(r.send_s for r in done)
    counts: dict[int, int] = {}
    for result in done:
        for chunk in result.chunks:
            second = int(chunk.at_s - start)
            counts[second] = counts.get(second, 0) + 1
    return float(max(counts.values(), default=0))


def _peak_requests(done: Sequence[Result]) -> int:
    """The largest number at a time, from the send to the last chunk; who ends when another begins is not there."""
    ends = [(r.send_s, 1) for r in done] + [(r.send_s + (vllm_bench_latency_s(r) or 0.0), -1) for r in done]
    running = peak = 0
    for _, change in sorted(ends):
        running += change
        peak = max(peak, running)
    return peak
