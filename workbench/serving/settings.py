"""The switches of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.errors import WorkbenchError, check_between, check_flag, check_whole, unknown
from workbench.serving.policies import Policy, policy_named

BATCHING = ("continuous", "static")
PREEMPTION = ("recompute", "swap")


@dataclass(frozen=True)
class SchedulerSettings:
    """The switches. token_budget: rows of a step at most. chunk: of one prompt in a step at most; None: the budget
    alone.

    max_running: sequences at a time. draft_tokens: rows beyond the next token that each may bring, drafted.
    watermark: share of the blocks that stays free at an admission, so that running sequences can grow.
    policy: a name, or a function (sequence, now_s) -> key, see `serving.policies`.
    preemption: "recompute" or "swap". aging_s: see `policies.aged`. remember: blocks are kept for equal beginnings.
    batching: "static", the baseline, admits a group whole and pads it. Its steps are as large as the group, and its
    blocks are there: token_budget and watermark mean nothing to it, and chunk, preemption and draft_tokens are refused.
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
        if self.batching == "continuous" and self.token_budget < self.max_running:
            raise WorkbenchError(
                f"token_budget={self.token_budget} is less than a token for each of max_running={self.max_running}"
                " sequences; raise the budget or run fewer"
            )
