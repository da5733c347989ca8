"""What the capstone's tests share: small traces, and engines whose processes stay from one submission to the next."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

from workbench.capstone import judge as judging
from workbench.capstone.served import Engine, Run
from workbench.capstone.submission import Submission
from workbench.capstone.tracks import TRACKS, TraceShape, Track
from workbench.models import load
from workbench.serving.lengths import Uniform

SHAPE = TraceShape(8, 0.0, Uniform(12, 32), Uniform(6, 12), openings=2, opening_tokens=16)
SMALL = {name: replace(track, shape=SHAPE) for name, track in TRACKS.items()}
SEED = 7
Judge = Callable[..., dict[str, Any]]


class Kept(Engine):
    """A process that stays: each submission is made in it anew, as a new one would make it."""

    def __init__(self) -> None:
        self._started = False
        self.closed = True

    def make(self, submission: Submission, budget: int) -> Kept:
        assert self.closed, "the engine before it was not closed"
        if self._started and self._child.running:
            self._events.clear()
            given = {"submission": submission.plain(), "budget": budget}
            self.facts = self._do("make", "made", 60.0, **given)
        else:
            self.end()
            self._started = True
            super().__init__(submission, budget)
        self.closed = False
        return self

    def close(self) -> None:
        self.closed = True

    def end(self) -> None:
        """The process too; another make starts one."""
        if self._started:
            super().close()
        self._started, self.closed = False, True


class Shared:
    """The baseline's engine: it counts a trace once."""

    counted: ClassVar[dict[Any, Run]] = {}

    def __init__(self, submission: Submission, budget: int, engine: Kept) -> None:
        self._made, self._engine = (submission, budget), engine

    def count(self, trace: Any, rates: Any) -> Run:
        key = (trace, self._made)
        if key not in self.counted:
            try:
                self.counted[key] = self._engine.make(*self._made).count(trace, rates)
            finally:
                self._engine.close()
        return self.counted[key]

    @property
    def facts(self) -> dict[str, Any]:
        return {"pool_bytes": 0}

    def time(self, trace: Any) -> Run:
        try:
            return self._engine.make(*self._made).time(trace)
        finally:
            self._engine.close()

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Kept, Kept]]:
    made = Kept(), Kept()
    yield made
    for engine in made:
        engine.end()


@pytest.fixture
def judge(tmp_path: Path, engines: Any, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Judge a folder with these switches and this own.py. behave: with the gates "drawn" and "api". starts: whether an
    engine is to be started for it, None for either."""
    started: list[Submission] = []

    def engine(submission: Submission, budget: int) -> Any:
        if submission.digest == "baseline":
            return Shared(submission, budget, engines[1])
        started.append(submission)
        return engines[0].make(submission, budget)

    def judged(
        given: dict[str, Any] | str,
        own: str | None = None,
        *,
        behave: bool = False,
        starts: bool | None = True,
        prepare: Callable[[Path], None] = lambda folder: None,
        track: Track | None = None,
        pairs: int = 0,
    ) -> dict[str, Any]:
        folder = tmp_path / "submission"
        folder.mkdir(exist_ok=True)
        name = given.get("track", "cost") if isinstance(given, dict) else "cost"
        text = given if isinstance(given, str) else json.dumps({"track": "cost", **given})
        (folder / "submission.json").write_text(text)
        if own is not None:
            (folder / "own.py").write_text(own)
        prepare(folder)
        started.clear()
        with monkeypatch.context() as patched:
            if not behave:
                patched.setattr(judging.Judging, "_behave", lambda *_: None)
            record = judging.judge(folder, seed=SEED, pairs=pairs, track=track or SMALL[name])
        assert starts is None or bool(started) == starts
        return record

    monkeypatch.setattr(judging, "Engine", engine)
    monkeypatch.setattr(judging, "load", cache(load))
    return judged
