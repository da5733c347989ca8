"""A request, and what the scheduler knows of each text that is written for it. No torch.

WAITING ──admitted──► RUNNING ──last token──► FINISHED  "stop", "length"
   ▲                   │   ▲                            "abort" and "error" from anywhere
   └──── preempted ────┘   └── SWAPPED (its keys and values lie on the host)
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workbench.errors import WorkbenchError, check_above, check_whole, is_whole

if TYPE_CHECKING:
    from workbench.decoding.sampling import SamplingSettings

FINISH_REASONS = ("stop", "length", "abort", "error")


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(frozen=True)
class Request:
    """What is asked for. Checked when it is made; what depends on the model and the pool, when it is added.

    id: any name, used once. n: so many texts from the same prompt, each with its own random numbers. priority: smaller is
    more urgent. deadline_s: after arrival. tenant: prompts are found again only under the same name. arrival_s: on the
    engine's clock. sampling: default greedy; its stages, and a seed for its random numbers.
    """

    id: Hashable
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingSettings | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    priority: int = 0
    deadline_s: float | None = None
    tenant: str = ""
    arrival_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "prompt_ids", _token_ids(f"the prompt of request {self.id!r}", self.prompt_ids)
        )
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if not self.prompt_ids:
            raise WorkbenchError(
                f"the prompt of request {self.id!r} is empty; a model needs a token to continue"
            )
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        check_whole("n", self.n, 1)
        if not is_whole(self.priority):
            raise WorkbenchError(f"priority must be a whole number, got {self.priority!r}")
        if self.seed is not None:
            check_whole("seed", self.seed, 0)
        if self.deadline_s is not None:
            check_above("deadline_s", self.deadline_s, 0)
        if not isinstance(self.tenant, str):
            raise WorkbenchError(f"tenant must be a text, got {self.tenant!r}")

    @property
    def longest(self) -> int:
        """Tokens of one text at its end, at most."""
        return len(self.prompt_ids) + self.max_new_tokens


def _token_ids(what: str, given: Sequence[int]) -> tuple[int, ...]:
    try:
        ids = tuple(given)
    except TypeError:
        raise WorkbenchError(f"{what} must be a list of token ids, got {given!r}") from None
    for token_id in ids:
        if not is_whole(token_id) or token_id < 0:
            raise WorkbenchError(f"{what} must be token ids, whole numbers of at least 0, got {token_id!r}")
    return ids


@dataclass(eq=False, slots=True)
class Track:
    """One text of a request, as the scheduler and the engine see it. The engine appends to `token_ids`."""

    request: Request
    sample: int
    number: int  # in the order of arrival
    token_ids: list[int]
    status: Status = Status.WAITING
    computed: int = 0  # tokens that are in the kv
    finish_reason: str | None = None
    error: Exception | None = None
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)  # of each written token
    preemptions: int = 0
    hit_tokens: int = 0  # found in the pool when it was admitted, last time
    forked: bool = False  # the other texts of its request have begun, and may have ended
    sequence: Hashable = field(init=False)  # its name in the kv

    def __post_init__(self) -> None:
        self.sequence = (self.request.id, self.sample)

    @property
    def arrival_s(self) -> float:
        return self.request.arrival_s

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and what is written."""
        return len(self.token_ids)

    @property
    def written(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def remaining(self) -> int:
        """Tokens still to be written, at most."""
        return self.request.max_new_tokens - self.written

    @property
    def unsent(self) -> int:
        """Tokens that are not in the kv; 1 for a text that is being written."""
        return len(self.token_ids) - self.computed

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED
