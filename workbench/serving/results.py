"""What an engine says of a step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

from workbench.decoding.sequence import Finished, NewToken
from workbench.serving.scheduler import Plan


@dataclass(frozen=True)
class StepReport:
    """What a step did, and how the pool was after it."""

    step: int
    at_s: float  # when it began
    seconds: float
    plan: Plan
    emitted: dict[Hashable, tuple[NewToken, ...]]  # generated, by sequence
    finished: tuple[Finished, ...]
    running: int
    waiting: int
    rows: int  # through the model, drafted and padding ones too
    padding_rows: int
    blocks_used: int
    blocks_idle: int
    useful_tokens: int  # places that hold a token of a running sequence, shared ones once
    schedule_s: float  # of `seconds`: the scheduler's own, before and after the model,
    planned_s: float  # and before it alone
    drafted: int
    accepted: int
    # drafted and accepted tokens, by sequence, of those that were drafted for
    drafts: dict[Hashable, tuple[int, int]] = field(default_factory=dict)
    load_s: float = 0.0  # of `seconds`: blocks from the tiers below the pool
    draft_errors: tuple[str, ...] = ()  # each turned drafts off, for one sequence or for all; it says which

    @cached_property
    def tokens(self) -> dict[Hashable, tuple[int, ...]]:
        """`emitted`, the ids alone."""
        return {name: tuple(token.token_id for token in new) for name, new in self.emitted.items()}
