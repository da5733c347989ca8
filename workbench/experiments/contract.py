"""Setting and Experiment: what an experiment is, so that a panel, the record and a test can all run it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import WorkbenchError, check_settings, unknown

KINDS = ("int", "float", "choice", "text", "flag", "model")
LONGEST_TEXT = 100_000  # characters; more than any model here can read, little enough to show
BRIEF = "WORKBENCH_BRIEF"  # the environment variable
_FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def brief_mode() -> bool:
    """Whether measurements are cut short (few repeats, little training): WORKBENCH_BRIEF=1 in the environment.

    A measurement says in its settings what it was really taken with; panels say "brief" in their status line.
    """
    return os.environ.get(BRIEF, "") not in ("", "0")


@dataclass(frozen=True)
class Setting:
    """One knob: a name, a default, and which values it takes.

    kind: "int" and "float" have bounds low … high, both allowed; "choice" is one of `choices`; "text" is any
    text; "flag" is True or False; "model" is a model's name or one already loaded, and `choices` are the names that
    its control offers (none: those of all trained models).
    `step` is how far one key press moves a slider; nothing else depends on it.
    `brief` is the most that a number may be in brief mode, where the tests see that every cell of every lecture runs:
    it is for how often, how long and on how long a text a thing is measured, never for what is measured.
    """

    name: str
    default: Any
    kind: str
    low: float | None = None
    high: float | None = None
    choices: tuple = ()
    unit: str = ""
    help: str = ""
    step: float | None = None
    brief: float | None = None

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        assert self.brief is None or self.kind in ("int", "float") or self.brief in self.choices, self.name
        assert self.kind != "choice" or self.choices, f"{self.name} needs choices"

    def parse(self, text: str) -> Any:
        """The value that a text on a command line means. Raises WorkbenchError for one that means none."""
        if self.kind == "flag":
            if text.strip().lower() not in _FLAGS:
                raise self._wrong("true or false", text)
            return _FLAGS[text.strip().lower()]
        if self.kind in ("int", "float"):
            try:
                return self.check((int if self.kind == "int" else float)(text))
            except ValueError as error:
                raise (error if isinstance(error, WorkbenchError) else self._wrong(self._wanted(), text)) from None
        if self.kind == "choice":
            return self.check(next((c for c in self.choices if str(c) == text), text))
        return self.check(text)

    def check(self, value: Any) -> Any:
        """The value, as the kind's own type. Raises WorkbenchError for one outside the kind or its bounds."""
        if self.kind in ("int", "float"):
            return self._check_number(value)
        if self.kind == "choice":
            if value not in self.choices:
                raise unknown(f"{self.name}", value, map(str, self.choices))
        elif self.kind == "flag":
            if not isinstance(value, bool):
                raise self._wrong("True or False", value)
        elif self.kind == "text":
            if not isinstance(value, str):
                raise self._wrong("a text", value)
            if len(value) > LONGEST_TEXT:
                raise WorkbenchError(f"{self.name} has {len(value):,} characters; at most {LONGEST_TEXT:,} are taken")
        elif not ((isinstance(value, str) and value) or hasattr(value, "config")):
            raise self._wrong("a model's name or a Decoder", value)
        return value

    def _check_number(self, value: Any) -> int | float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or (self.kind == "int" and value != int(value)):
            raise self._wrong(self._wanted(), value)
        value = int(value) if self.kind == "int" else float(value)
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            raise self._wrong(self._wanted(), value)
        return value

    def _wanted(self) -> str:
        noun = "a whole number" if self.kind == "int" else "a number"
        unit = f" {self.unit}" if self.unit else ""
        if self.low is not None and self.high is not None:
            return f"{noun} from {self.low:g} to {self.high:g}{unit}"
        return noun + (f" of at least {self.low:g}{unit}" if self.low is not None else unit)

    def _wrong(self, wanted: str, value: Any) -> WorkbenchError:
        shown = repr(value)
        return WorkbenchError(f"{self.name} must be {wanted}, got {shown if len(shown) < 80 else shown[:77] + '…'}")


Limit = float | Callable[[Any], bool]  # the largest number, or which values
Limits = Mapping[str, Limit]  # by setting


@dataclass(frozen=True)
class Experiment:
    """A question, its knobs, and a generator of Measurements that answers it.

    run(bench, **settings, **learner) yields Measurements one by one, as soon as each is taken, and raises
        `Stopped` soon after the bench's stop event is set. Settings arrive whole and checked.
    predict(ceilings, **settings) -> [(x, seconds, limit)]: what the cost model expects, without running a
        model; x is what the panel draws along (a text length, a token's number). Empty when there is none.
    learner: names of the parts for which a learner's own code may be handed in; each defaults to None.
    how: one line on how it is measured.
    limits(**settings) -> {setting: its largest number, or which of its values} that a run takes beside the others: a
        control offers no more. {} where each setting goes with all others; what a run refuses, it refuses itself.
    record: the settings to run for the archive, by kind of device: {"cpu": ({...},), "cuda": ({...}, {...})};
        one run each, defaults for what they do not name. A kind that is not there runs once with the defaults;
        an empty tuple says that the experiment is not recorded on that kind.
    """

    name: str
    lab: int
    question: str
    how: str
    settings: tuple[Setting, ...]
    run: Callable[..., Iterator]
    predict: Callable[..., Sequence[tuple[float, float, str]]]
    learner: tuple[str, ...] = ()
    record: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict, hash=False)
    limits: Callable[..., Limits] = lambda **settings: {}

    def __post_init__(self) -> None:
        assert set(self.record) <= {"cpu", "cuda"}, f"{self.name}: record settings for {sorted(self.record)}"

    def record_settings(self, device: str) -> tuple[Mapping[str, Any], ...]:
        """Settings of each run for the archive on a device ("cuda:1" is of kind "cuda")."""
        return tuple(self.record.get(device.partition(":")[0], ({},)))

    def setting(self, name: str) -> Setting:
        check_settings(self.name, [name], [s.name for s in self.settings])
        return next(s for s in self.settings if s.name == name)

    def complete(self, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """All settings: those given, checked, and the defaults of the others; in brief mode cut short. A text is parsed
        where the kind is not text. Raises WorkbenchError, naming the nearest known setting, before anything runs."""
        given = dict(given or {})
        check_settings(self.name, given, [s.name for s in self.settings])
        values = {}
        for setting in self.settings:
            value = given.get(setting.name, setting.default)
            value = setting.parse(value) if isinstance(value, str) else setting.check(value)
            cut = setting.brief is not None and brief_mode()
            values[setting.name] = min(value, setting.brief) if cut else value
        return values

    def check_learner(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The learner's parts that are not None. Raises WorkbenchError for a part this experiment has not."""
        given = {name: part for name, part in (given or {}).items() if part is not None}
        for name in given:
            if name not in self.learner:
                raise unknown(f"part of {self.name} to replace", name, self.learner)
        return given


def no_times(ceilings: Any, **settings: Any) -> list[tuple[float, float, str]]:
    """The prediction of an experiment that counts bytes."""
    return []
