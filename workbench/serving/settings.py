"""The switches of the scheduler, and of the tiers below the pool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workbench.errors import WorkbenchError, check_between, check_flag, check_path, check_whole, unknown
from workbench.serving.policies import Policy, policy_named

BATCHING = ("continuous", "static", "prefill_first")
PREEMPTION = ("recompute", "swap")
LOAD = ("break_even", "always")


@dataclass(frozen=True)
class SchedulerSettings:
    """The switches. token_budget: rows of a step at most. chunk: of one prompt in a step at most; None: the budget
    alone.

    max_running: sequences at a time. draft_tokens: rows beyond the next token that each may bring, drafted.
    watermark: share of the blocks that stays free at an admission, so that running sequences can grow.
    policy: a name, or a function (sequence, now_s) -> key, see `serving.policies`.
    preemption: "recompute" or "swap". aging_s: see `policies.aged`. remember: blocks are kept for equal beginnings.
    batching: "prefill_first" computes waiting prompts whole, in steps of their own, before any next token: no chunks,
    swaps or drafts. "static", the baseline, admits a group whole and pads it. Its steps are as large as the group, and
    its blocks are there: token_budget and watermark mean nothing to it, and chunk, preemption and draft_tokens are
    refused.
    Raises WorkbenchError for a value outside its range, and for a setting that static batching would ignore.
    """

    max_running: int = 16
    token_budget: int = 512
    chunk: int | None = None
    policy: str | Policy = "first_come"
    aging_s: float | None = None
    preemption: str = "recompute"
    watermark: float = 0.01
    batching: str = "continuous"
    draft_tokens: int = 0
    remember: bool = True

    def __post_init__(self) -> None:
        check_whole("max_running", self.max_running, 1)
        check_whole("token_budget", self.token_budget, 1)
        if self.chunk is not None:
            check_whole("chunk", self.chunk, 1)
        check_whole("draft_tokens", self.draft_tokens, 0)
        check_flag("remember", self.remember)
        object.__setattr__(self, "watermark", check_between("watermark", self.watermark, 0, 1))
        for name, known in (("preemption", PREEMPTION), ("batching", BATCHING)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        policy_named(self.policy, self.aging_s)
        if self.batching == "static":
            for name in ("chunk", "preemption", "draft_tokens"):
                if getattr(self, name) != getattr(SchedulerSettings, name):
                    raise WorkbenchError(
                        f"{name}={getattr(self, name)!r} has no effect with batching='static', whose groups are"
                        " admitted whole and padded; leave it out, or use batching='continuous'"
                    )
        if self.batching == "prefill_first":
            for name in ("chunk", "preemption", "draft_tokens"):
                if getattr(self, name) != getattr(SchedulerSettings, name):
                    raise WorkbenchError(
                        f"{name}={getattr(self, name)!r} goes with batching='continuous'; 'prefill_first' is a"
                        " baseline of whole prompts, without drafts, that recomputes who is preempted"
                    )
        if self.batching != "static" and self.token_budget < self.max_running:
            raise WorkbenchError(
                f"token_budget={self.token_budget} is less than a token for each of max_running={self.max_running}"
                " sequences; raise the budget or run fewer"
            )


@dataclass(frozen=True)
class TierSettings:
    """Where blocks of the prefix cache go that the pool evicts. host_bytes: of host memory for them, 0 for none.
    disk_path, disk_bytes: a file of that size, None and 0 for none.

    load: "break_even" loads where that is predicted to be faster than computing (`serving.load_costs`), "always"
    wherever there is a hit. prefetch: blocks that are read from disk to host memory at a time for requests that wait;
    0: none.
    Raises WorkbenchError for values outside their range, and for no tier at all.
    """

    host_bytes: int = 0
    disk_path: Path | str | None = None
    disk_bytes: int = 0
    load: str = "break_even"
    prefetch: int = 32

    def __post_init__(self) -> None:
        for name in ("host_bytes", "disk_bytes", "prefetch"):
            check_whole(name, getattr(self, name), 0)
        if self.load not in LOAD:
            raise unknown("load", self.load, LOAD)
        if self.disk_path is not None:
            check_path("disk_path", self.disk_path)
            if not str(self.disk_path):
                raise WorkbenchError("disk_path must be a path of a file, got ''")
        if (self.disk_path is None) != (self.disk_bytes == 0):
            raise WorkbenchError(
                "a disk tier has a file and a size: give disk_path and disk_bytes, or neither; got"
                f" disk_path={str(self.disk_path)!r:.80} and disk_bytes={self.disk_bytes}"
            )
        if not self.host_bytes and not self.disk_bytes:
            raise WorkbenchError("tiers need host_bytes, or disk_path and disk_bytes; leave the settings out for none")
