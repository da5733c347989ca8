"""A trace of steps and requests adds up, and every text is a span where OpenTelemetry is there."""

from __future__ import annotations

import io
import json
from itertools import pairwise

import httpx
import pytest
from serving_claims import engine_of, serving

from workbench.serving.api.trace import Trace, trace_to

MODEL = "stdlib-1m"
BODY = {"model": MODEL, "prompt": "def f(x):\n", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def traced(small_model):
    """(events, usage) of a server that answered three requests, one of them of two samples."""
    file = io.StringIO()
    trace = Trace(file)
    with serving(engine_of(small_model), name=MODEL, trace=trace) as running:
        tokens = [
            running.post("/v1/completions", BODY | {"n": 1 + at % 2}).json()["usage"]["completion_tokens"]
            for at in range(3)
        ]
    trace.close()
    return json.loads(file.getvalue()), tokens


def test_the_parts_of_a_step_are_the_step(traced):
    spans = [one for one in traced[0] if one["ph"] == "X" and one["pid"] == 1]
    steps = [one for one in spans if one["name"].startswith("step ")]
    assert len(steps) >= 36
    for step in steps:
        parts = [one for one in spans if one is not step and step["ts"] <= one["ts"] < step["ts"] + step["dur"]]
        assert [one["name"] for one in parts] == ["schedule", "run", "postprocess"]
        assert sum(one["dur"] for one in parts) == pytest.approx(step["dur"], rel=1e-6)
    for step, following in pairwise(steps):
        assert step["ts"] + step["dur"] <= following["ts"] + 1e-3  # one step at a time


def test_the_parts_of_a_request_are_the_request_and_lanes_do_not_overlap(traced):
    spans = [one for one in traced[0] if one["ph"] == "X" and one["pid"] == 2]
    texts = [one for one in spans if one["name"].startswith("request ")]
    assert sum(one["args"]["tokens"] for one in texts) == sum(traced[1]) and len(texts) == 4
    for text in texts:
        parts = [one for one in spans if one["tid"] == text["tid"] and one["name"] in ("queue", "prefill", "decode")]
        parts = [one for one in parts if text["ts"] <= one["ts"] <= text["ts"] + text["dur"]][:3]
        assert sum(one["dur"] for one in parts) == pytest.approx(text["dur"], rel=1e-6)
    for lane in {one["tid"] for one in texts}:
        mine = sorted((one["ts"], one["ts"] + one["dur"]) for one in texts if one["tid"] == lane)
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(mine))


def test_counters_are_there_and_a_full_trace_says_so(traced):
    assert {one["name"] for one in traced[0] if one["ph"] == "C"} == {"running", "waiting", "blocks", "tokens/s"}
    file = io.StringIO()
    trace = Trace(file, max_events=5)
    for _ in range(9):
        trace._write({"ph": "C"})
    assert file.getvalue().count("\n") == 6 and "the trace is full" in file.getvalue()


def test_a_trace_in_a_file_is_whole_after_an_error(tmp_path):
    with pytest.raises(KeyError), trace_to(tmp_path / "trace.json"):
        raise KeyError
    assert json.loads((tmp_path / "trace.json").read_text())


def test_a_text_is_a_span_below_the_clients(small_model):
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with serving(engine_of(small_model), name=MODEL) as running:
        answer = httpx.post(running.url + "/v1/completions", json=BODY, headers={"traceparent": parent})
    [span] = kept.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == parent.split("-")[1]
    assert span.attributes["gen_ai.usage.output_tokens"] == answer.json()["usage"]["completion_tokens"] == 12
    assert span.attributes["gen_ai.latency.e2e"] == pytest.approx((span.end_time - span.start_time) / 1e9, abs=1e-4)
