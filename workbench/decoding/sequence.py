"""A request, and the `Sequence` type that decoding, speculation and serving share. No torch.

WAITING ──admitted──► RUNNING ──last token──► FINISHED  "stop", "length"
   ▲                   │   ▲                            "abort" and "error" from anywhere
   └──── preempted ────┘   └── SWAPPED (its keys and values lie on the host)
"""

from __future__ import annotations

import enum
from collections import abc
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from workbench.decoding.request_checks import check_id, check_request, check_token_ids, own_sampling
from workbench.errors import plain_number

if TYPE_CHECKING:
    from workbench.decoding.guide import Guide
    from workbench.decoding.sampling import Sampler, SamplingSettings

FINISH_REASONS = ("stop", "length", "abort", "error")


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(frozen=True)
class Request:
    """What is asked for. Checked when it is made; what depends on the model and the pool, when it is added. An engine
    keeps a copy.

    id: any hashable name, used once. n: so many sequences from the same prompt, each with its own random numbers.
    stop_token_ids: tokens that end it; None means the model's own end-of-text tokens, as in `generate`, () none.
    sampling, seed: default greedy, a fresh seed. priority: smaller is more urgent. arrival_s: on the engine's clock.
    deadline_s: after arrival. tenant: text or bytes; prompts are found again only under the same name.
    log_probs: of each generated token under the model itself, before any filter, and of so many top tokens (0 … 20);
    tokens of a jump have none, because no logits were computed for them. prompt_log_probs: the same of the prompt's
    tokens, all of which are then computed, none found in the prefix cache. guide, jump: as in `generate`.
    """

    id: Hashable
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingSettings | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    n: int = 1
    priority: float = 0
    deadline_s: float | None = None
    tenant: str | bytes = ""
    arrival_s: float = 0.0
    log_probs: int | None = None
    prompt_log_probs: int | None = None
    guide: Guide | None = None
    jump: str | None = None

    def __post_init__(self) -> None:
        check_id(self.id)
        prompt_ids = check_token_ids(f"the prompt of request {self.id!r}", self.prompt_ids, empty=False)
        object.__setattr__(self, "prompt_ids", prompt_ids)
        if self.stop_token_ids is not None:
            object.__setattr__(self, "stop_token_ids", check_token_ids("stop_token_ids", self.stop_token_ids))
        check_request(self)
        plain: dict[str, Any] = {
            "priority": plain_number(self.priority),
            "arrival_s": float(plain_number(self.arrival_s)),
        }
        if self.deadline_s is not None:
            plain["deadline_s"] = float(plain_number(self.deadline_s))
        if self.sampling is not None:
            plain["sampling"] = own_sampling(self.sampling)
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    @property
    def longest(self) -> int:
        """Maximum length of one sequence: prompt and generated tokens."""
        return len(self.prompt_ids) + self.max_new_tokens


NOT_SET: Any = None  # of a sequence that no scheduler knows, or that is not sampled yet


class LogProb(NamedTuple):
    """A token's log-probability under the model itself, and the top tokens there with theirs, the best first."""

    token_id: int
    log_prob: float | None  # None for a token of a jump
    top: tuple[tuple[int, float], ...] = ()


class NewToken(NamedTuple):
    """A token that was appended to a sequence."""

    token_id: int
    log_prob: float | None  # under the target itself, before any filter; None where it was not asked
    origin: str  # the draft that wrote it, "target", or "grammar"
    kind: str  # "plain" where nothing was drafted, "draft", "correction", "bonus", or "jump"
    top: tuple[tuple[int, float], ...] = ()  # as of a `LogProb`


class Forces(Protocol):
    """A grammar that can tell the only legal continuation."""

    def forced(self, generated_ids: abc.Sequence[int]) -> list[int]: ...


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence of tokens: how they are sampled, its state, its counters and its times.

    Whoever decodes it adds tokens by `append`. The fields from `request` on belong to the scheduler.
    """

    id: Hashable  # its name in the kv
    token_ids: list[int]  # prompt, then what was generated
    prompt_tokens: int  # how many of them are the prompt
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    sampler: Sampler = NOT_SET
    guide: Forces | None = None
    drafting: Any = NOT_SET  # a `speculation.engine.Drafting` where a draft guesses ahead
    log_probs: int | None = 0  # top tokens wanted beside each new token's log-probability; None: not even that

    request: Request = NOT_SET
    sample: int = 0  # which of the request's n
    number: int = 0  # in order of arrival
    status: Status = Status.WAITING
    computed: int = 0  # tokens that are in the kv
    finish_reason: str | None = None
    error: Exception | None = None
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)  # of each generated token
    preemptions: int = 0
    hit_tokens: int = 0  # found in the prefix cache at its last admission
    forked: bool = False  # the other sequences of its request were started
    # the prompt's as far as they are known, None for the others, and always for the first; [] where nobody asked
    prompt_log_probs: list[LogProb | None] = field(default_factory=list)
    token_log_probs: list[LogProb] = field(default_factory=list)  # of generated tokens, where its request asks

    @classmethod
    def of(cls, request: Request, sample: int, number: int, token_ids: list[int]) -> Sequence:
        """The sample-th sequence of a request. A request that names no stop tokens has none: no model is known here."""
        return cls(
            (request.id, sample),
            token_ids,
            len(request.prompt_ids),
            request.max_new_tokens,
            request.stop_token_ids or (),
            log_probs=request.log_probs,
            request=request,
            sample=sample,
            number=number,
            prompt_log_probs=[] if request.prompt_log_probs is None else [None] * len(request.prompt_ids),
        )

    def append(self, token_id: int) -> bool:
        """Add a token; True when the sequence ends with it."""
        self.token_ids.append(token_id)
        return self.end_reason() is not None

    def end_reason(self) -> str | None:
        """Why the sequence ends with its last token: "stop" or "length"; None while it goes on."""
        if self.token_ids[-1] in self.stop_token_ids:
            return "stop"
        return None if self.remaining > 0 else "length"

    @property
    def arrival_s(self) -> float:
        return self.request.arrival_s

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def generated_ids(self) -> list[int]:
        return self.token_ids[self.prompt_tokens :]

    @property
    def written(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens still to be generated, at most."""
        return self.prompt_tokens + self.max_new_tokens - len(self.token_ids)

    @property
    def unsent(self) -> int:
        """Tokens that are not yet in the kv; 1 for a sequence that decodes."""
        return len(self.token_ids) - self.computed

    @property
    def reads_prompt(self) -> bool:
        """Its prompt has to be computed, because log-probabilities of it are wanted that are not known yet."""
        return self.prompt_log_probs.count(None) > 1

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED


@dataclass(frozen=True)
class Finished:
    """One sequence of a request, at its end. Times are of the engine's clock."""

    request_id: Hashable
    sample: int
    token_ids: tuple[int, ...]  # what was generated
    finish_reason: str  # "stop", "length", "abort" or "error"
    error: Exception | None
    prompt_tokens: int
    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
    token_times_s: tuple[float, ...]
    preemptions: int
    hit_tokens: int
    drafted: int = 0  # tokens, in all rounds, and how many of them were accepted
    accepted: int = 0
    draft_error: Exception | None = None  # why it went on without drafts
    log_probs: tuple[LogProb, ...] | None = None  # of what was generated; None where the request did not ask
    prompt_log_probs: tuple[LogProb | None, ...] | None = None  # first None; all that an early end left out, too

    @classmethod
    def of(cls, sequence: Sequence) -> Finished:
        """Of a sequence that ended."""
        assert sequence.finish_reason is not None and sequence.finished_s is not None
        d, request = sequence.drafting, sequence.request
        end = cls(
            request.id,
            sequence.sample,
            tuple(sequence.generated_ids),
            sequence.finish_reason,
            sequence.error,
            sequence.prompt_tokens,
            sequence.arrival_s,
            sequence.first_scheduled_s,
            sequence.first_token_s,
            sequence.finished_s,
            tuple(sequence.token_times_s),
            sequence.preemptions,
            sequence.hit_tokens,
            *((d.drafted, d.accepted, d.error) if d is not None else ()),
        )
        if request.log_probs is not None:
            end = replace(end, log_probs=tuple(sequence.token_log_probs))
        if request.prompt_log_probs is not None:
            end = replace(end, prompt_log_probs=tuple(sequence.prompt_log_probs))
        return end
