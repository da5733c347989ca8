"""The switches of the server."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.errors import WorkbenchError, check_above, check_flag, check_whole


@dataclass(frozen=True)
class ServerSettings:
    """Limits are on by default.

    max_tokens: of one text; None: what the context leaves. max_total_tokens: n × prompts × max_tokens of a request.
    max_queued_requests, max_queued_tokens: of prompts whose first step has not come. early_rejection: a request whose
    deadline the predicted time to its first token exceeds is refused at once.
    ttft_slo_s: such a deadline for every request that brings none.
    drain_seconds: what running requests have after SIGTERM. Times in seconds.
    """

    max_body_bytes: int = 4 * 2**20
    max_prompts: int = 128
    max_tokens: int | None = None
    max_total_tokens: int = 262_144
    max_queued_requests: int = 256
    max_queued_tokens: int = 262_144
    early_rejection: bool = True
    ttft_slo_s: float | None = None
    max_connections: int = 1_024
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    send_seconds: float = 30.0
    ping_seconds: float = 15.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_prompts", "max_total_tokens", "max_queued_requests", "max_queued_tokens"):
            check_whole(name, getattr(self, name), 1)
        check_whole("max_connections", self.max_connections, 1)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1)
        check_flag("early_rejection", self.early_rejection)
        if self.ttft_slo_s is not None:
            check_above("ttft_slo_s", self.ttft_slo_s, 0)
        for name in ("header_seconds", "body_seconds", "send_seconds", "ping_seconds"):
            check_above(name, getattr(self, name), 0)
        if not isinstance(self.drain_seconds, int | float) or not 0 <= self.drain_seconds < float("inf"):
            raise WorkbenchError(f"drain_seconds must be a number of at least 0, got {self.drain_seconds!r:.40}")
