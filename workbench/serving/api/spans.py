"""OpenTelemetry spans, one for each text, where its SDK is installed and somebody has set it up.

Names and attributes: OpenTelemetry's conventions for generative AI, as vLLM sends them (gen_ai.…, status: development).
Times are of the engine's clock, moved to the time of day.
"""

from __future__ import annotations

import time
from typing import Any

from workbench.serving.api.metrics import TextTimes

SPAN = "llm_request"


class Spans:
    """tracer: of opentelemetry.trace; propagator: reads a client's traceparent header."""

    def __init__(self, tracer: Any, propagator: Any) -> None:
        self._tracer, self._propagator = tracer, propagator

    @classmethod
    def if_installed(cls) -> Spans | None:
        """None where the SDK is not installed. Spans go where the process's tracer provider sends them: the
        environment's (OTEL_EXPORTER_OTLP_ENDPOINT …, with opentelemetry-instrument), or one that a program has set."""
        try:
            import opentelemetry.sdk  # noqa: F401
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as missing:
            if not (missing.name or "").startswith("opentelemetry"):
                raise
            return None
        return cls(trace.get_tracer("workbench.serving"), TraceContextTextMapPropagator())

    def text(
        self,
        times: TextTimes,
        now_s: float,
        *,
        model: str,
        request_id: str,
        prompt_tokens: int,
        tokens: int,
        finish_reason: str,
        traceparent: str | None,
    ) -> None:
        """A text that ended. now_s: the engine's clock now."""
        epoch = time.time() - now_s
        parent = self._propagator.extract({"traceparent": traceparent}) if traceparent else None
        span = self._tracer.start_span(SPAN, context=parent, start_time=_nanoseconds(epoch + times.arrival_s))
        for name, value in {
            "gen_ai.response.model": model,
            "gen_ai.request.id": request_id,
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.output_tokens": tokens,
            "gen_ai.response.finish_reasons": [finish_reason],
            "gen_ai.latency.time_in_queue": times.begun_s - times.arrival_s,
            "gen_ai.latency.time_to_first_token": times.first_s - times.arrival_s,
            "gen_ai.latency.e2e": times.last_s - times.arrival_s,
        }.items():
            span.set_attribute(name, value)
        span.end(_nanoseconds(epoch + times.last_s))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
