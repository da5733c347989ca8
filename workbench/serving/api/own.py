"""Parts of the server that may be your own: `build_app(engine, own=OwnParts(stops=MyStops))`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from workbench.decoding.request_checks import check_callable
from workbench.decoding.text import StopStrings
from workbench.serving.api.choices import StopFinder
from workbench.serving.api.events import EventWriter
from workbench.serving.api.forecast import FirstToken, first_token_s


@dataclass(frozen=True)
class OwnParts:
    """stops: called as stops(stop strings) for each text, see `decoding.text.StopStrings`.

    events: called as events(head, include_usage=…) for each stream of a chat that asks for no log-probabilities, see
    `api.events.EventWriter`. head: what all its chunks have: id, created, model, system_fingerprint. None: the server's
    own.
    first_token_s: predicts when the last of a queue has its first token, see `api.forecast.first_token_s`.
    """

    stops: Callable[[Sequence[str]], StopFinder] = StopStrings
    events: Callable[..., EventWriter] | None = None
    first_token_s: FirstToken = first_token_s

    def __post_init__(self) -> None:
        for one in fields(self):
            check_callable(one.name, getattr(self, one.name), or_none=one.name == "events")
