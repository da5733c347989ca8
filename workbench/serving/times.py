"""What is recorded of a run: the times of each request, and of each step how the batch and the pool were. No torch.

Latencies of a request, all in seconds:

    arrival ──queue──► first scheduled ─────► first token ── TPOT a token ──► last token, finished
       └────────────── TTFT ─────────────────────┘
       └────────────────────────── latency ────────────────────────────────────────┘

    TTFT   time to first token, the wait in the queue included
    TPOT   time per output token after the first: (last − first) / (n − 1); a request of one token has none
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import pairwise

from workbench.decoding.sequence import FINISH_REASONS, Finished
from workbench.errors import WorkbenchError, check_whole, unknown
from workbench.serving.results import StepReport

Time = int | float | Fraction
COMPLETED = ("stop", "length")  # finish reasons of a request that got what it asked for


@dataclass(frozen=True)
class RequestTimes:
    """The times of one request, on one clock, in seconds.

    token_times_s: of each written token, in order; may be left out, then first_token_s and finished_s say what is
    known. first_scheduled_s, first_token_s: None where it never came to that.
    """

    arrival_s: Time
    finished_s: Time
    first_scheduled_s: Time | None = None
    first_token_s: Time | None = None
    prompt_tokens: int = 1
    new_tokens: int = 0
    finish_reason: str = "length"
    token_times_s: tuple[Time, ...] = ()

    def __post_init__(self) -> None:
        check_whole("prompt_tokens", self.prompt_tokens, 1)
        check_whole("new_tokens", self.new_tokens, 0)
        if self.finish_reason not in FINISH_REASONS:
            raise unknown("finish reason", self.finish_reason, FINISH_REASONS)
        if self.token_times_s:
            if len(self.token_times_s) != self.new_tokens:
                raise WorkbenchError(f"{self.new_tokens} new tokens have {len(self.token_times_s)} times")
            if self.first_token_s is None:
                object.__setattr__(self, "first_token_s", self.token_times_s[0])
            if self.first_token_s != self.token_times_s[0]:
                raise WorkbenchError(
                    f"first_token_s is {self.first_token_s} s, the first of the tokens' times {self.token_times_s[0]} s"
                )
        if (self.first_token_s is None) != (self.new_tokens == 0):
            raise WorkbenchError(f"first_token_s is {self.first_token_s!r}, with {self.new_tokens} new tokens")
        maybe = [("first_scheduled_s", self.first_scheduled_s), ("first_token_s", self.first_token_s)]
        named = [("arrival_s", self.arrival_s), *((name, at) for name, at in maybe if at is not None)]
        named += [("a token's time", at) for at in self.token_times_s] + [("finished_s", self.finished_s)]
        for name, at in named:
            check_time(name, at)
        for (before, t1), (after, t2) in pairwise(named):
            if t2 < t1:
                raise WorkbenchError(f"{after} is {t2} s, before {before}, {t1} s; give all times on one clock")

    @classmethod
    def of(cls, finished: Finished) -> RequestTimes:
        """Of a text that the engine or the simulation has finished (`Finished`)."""
        return cls(
            finished.arrival_s,
            finished.finished_s,
            finished.first_scheduled_s,
            finished.first_token_s,
            finished.prompt_tokens,
            len(finished.token_times_s),
            finished.finish_reason,
            tuple(finished.token_times_s),
        )

    @property
    def completed(self) -> bool:
        """Ended by itself: by a stop token, or by the length that was asked for."""
        return self.finish_reason in COMPLETED

    @property
    def queue_s(self) -> Time | None:
        return None if self.first_scheduled_s is None else self.first_scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> Time | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> Time | None:
        if self.new_tokens < 2:
            return None
        last = self.token_times_s[-1] if self.token_times_s else self.finished_s
        assert self.first_token_s is not None
        return (last - self.first_token_s) / (self.new_tokens - 1)

    @property
    def latency_s(self) -> Time:
        return self.finished_s - self.arrival_s

    @property
    def longest_gap_s(self) -> Time | None:
        """Between two tokens of the request: what a reader sees as a stall. None without the times of two."""
        gaps = [b - a for a, b in pairwise(self.token_times_s)]
        return max(gaps) if gaps else None


@dataclass(frozen=True)
class StepTimes:
    """One step of a run, and how the pool was in it.

    rows: through the model, padding included. blocks_reserved: held by texts; blocks_used: of these, those with a token
    in them (where a text reserves its maximum, fewer). kv_tokens: tokens whose keys and values lie there, shared ones
    once.
    """

    at_s: Time
    duration_s: Time
    running: int
    waiting: int = 0
    rows: int = 0
    padding_rows: int = 0
    blocks_used: int = 0
    blocks_reserved: int = 0
    blocks_total: int = 0
    block_size: int = 1
    kv_tokens: int = 0
    preemptions: int = 0

    def __post_init__(self) -> None:
        check_time("at_s", self.at_s)
        if check_time("duration_s", self.duration_s) < 0:
            raise WorkbenchError(f"duration_s must be 0 or more, got {self.duration_s}")
        for one in fields(self):
            if one.name not in ("at_s", "duration_s"):
                check_whole(one.name, getattr(self, one.name), 1 if one.name == "block_size" else 0)
        for less, more in (
            ("padding_rows", "rows"),
            ("blocks_used", "blocks_reserved"),
            ("blocks_reserved", "blocks_total"),
        ):
            if getattr(self, less) > getattr(self, more):
                raise WorkbenchError(f"{less} is {getattr(self, less)}, more than {more}, {getattr(self, more)}")
        if self.kv_tokens > self.blocks_used * self.block_size:
            raise WorkbenchError(
                f"{self.blocks_used} used blocks of {self.block_size} hold no {self.kv_tokens} tokens; were shared ones"
                " counted more than once?"
            )

    @classmethod
    def of(cls, report: StepReport, blocks_total: int, block_size: int) -> StepTimes:
        """Of a step that the engine or the simulation reports (`StepReport`)."""
        return cls(
            report.at_s,
            report.seconds,
            report.running,
            report.waiting,
            report.rows,
            report.padding_rows,
            report.blocks_used,
            report.blocks_used,
            blocks_total,
            block_size,
            report.useful_tokens,
            len(report.plan.preempted) + len(report.plan.swapped_out),
        )


def check_time(name: str, value: object) -> Time:
    if isinstance(value, int | Fraction) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise WorkbenchError(f"{name} must be a time in seconds, a finite number, got {value!r}")
