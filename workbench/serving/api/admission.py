"""Who is let in. Limits on what waits, and a deadline that can still be kept.

    place taken ─ tokens counted ─ added to the engine ─ first step        its place in the queue is free again
       │ 429 full      │ 429 full, 429 too late                            an answer under way takes no place

The place is taken before the prompt is tokenized, so that a burst is refused while it costs nothing. A refusal says
when to come back: the predicted time until the queue has drained.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from workbench.serving.api.errors import ApiError
from workbench.serving.api.forecast import Forecast
from workbench.serving.api.settings import ServerSettings

UNKNOWN_RETRY_S = 1.0  # before any step was measured
RETRY_KEPT_S = 0.5


@dataclass(eq=False)
class Place:
    """One HTTP request in the queue: its prompts that have not begun. name: None until the engine knows it."""

    prompts: int
    waiting: dict[Hashable, tuple[int, int]] = field(default_factory=dict)  # id: prompt tokens, tokens asked for

    @property
    def requests(self) -> int:
        return len(self.waiting) or self.prompts

    @property
    def tokens(self) -> int:
        return sum(prompt for prompt, _ in self.waiting.values())


class Admission:
    """On the event loop alone. refused: called with a reason's name for each refusal."""

    def __init__(self, settings: ServerSettings, forecast: Forecast, refused: Callable[[str], None]) -> None:
        self._settings, self._forecast, self._refused = settings, forecast, refused
        self._places: dict[Place, None] = {}  # in order of arrival
        self.draining = False
        self._retry_s, self._retry_at_s = UNKNOWN_RETRY_S, -math.inf

    @property
    def queued_requests(self) -> int:
        return sum(place.requests for place in self._places)

    @property
    def queued_tokens(self) -> int:
        return sum(place.tokens for place in self._places)

    @contextlib.contextmanager
    def place(self, prompts: int) -> Iterator[Place]:
        """A place for so many prompts. Raises ApiError, 503 while draining and 429 when full."""
        if self.draining:
            self._refused("draining")
            raise ApiError("the server is shutting down and takes no new requests", status=503, code="draining")
        limit = self._settings.max_queued_requests
        if (queued := self.queued_requests) + prompts > limit:
            raise self._full("queued_requests", f"{queued:,} requests wait already, and at most {limit:,} may")
        place = Place(prompts)
        self._places[place] = None
        try:
            yield place
        finally:
            self.leave(place)

    def weigh(self, place: Place, waiting: dict[Hashable, tuple[int, int]], deadline_s: float | None) -> None:
        """Its prompts have been tokenized. deadline_s: what is left until its first token is due. Raises ApiError,
        429, where too many tokens wait or the deadline cannot be kept."""
        limit, queued = self._settings.max_queued_tokens, self.queued_tokens
        tokens = sum(prompt for prompt, _ in waiting.values())
        if tokens > limit:
            self._refused("queued_tokens")
            raise ApiError(f"the prompts have {tokens:,} tokens, and at most {limit:,} may wait at all", param="prompt")
        if queued + tokens > limit:
            raise self._full("queued_tokens", f"{queued:,} prompt tokens wait already, and at most {limit:,} may")
        if deadline_s is not None and self._settings.early_rejection:
            expected = self._forecast.first_token_s([*self._queue(before=place), *waiting.values()])
            if expected is not None and expected > deadline_s:
                self._refused("deadline")
                raise ApiError(
                    f"the first token would come in about {expected * 1e3:,.0f} ms, and the deadline is in"
                    f" {max(0.0, deadline_s) * 1e3:,.0f} ms",
                    status=429,
                    code="deadline_unreachable",
                    retry_s=expected - deadline_s,
                )
        place.waiting = dict(waiting)

    def begun(self, request_id: Hashable) -> None:
        """The engine has scheduled its first tokens."""
        for place in self._places:
            if request_id in place.waiting:
                del place.waiting[request_id]
                if not place.waiting:
                    self.leave(place)
                return

    def leave(self, place: Place) -> None:
        self._places.pop(place, None)

    def _queue(self, before: Place | None = None) -> Iterator[tuple[int, int]]:
        for place in self._places:
            if place is before:
                return
            yield from place.waiting.values()

    def drain_s(self) -> float:
        """Predicted seconds until what waits now has begun."""
        seconds = self._forecast.first_token_s([*self._queue()])
        return UNKNOWN_RETRY_S if seconds is None else seconds

    def _full(self, reason: str, words: str) -> ApiError:
        self._refused(reason)
        return ApiError(f"the server is busy: {words}; try again later", status=429, code=reason, retry_s=self._retry())

    def _retry(self) -> float:
        """`drain_s`, of this moment or a little before: a simulation for each refusal would hold up the others."""
        if (now_s := time.monotonic()) - self._retry_at_s > RETRY_KEPT_S:
            self._retry_s, self._retry_at_s = self.drain_s(), now_s
        return self._retry_s
