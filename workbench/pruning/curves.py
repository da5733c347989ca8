"""Curves of healing runs: held-out loss against tokens and against FLOPs, of the runs that made the shipped models
and of those beside them.

`zoo/healing.json` holds one entry a run, taken from the card that `workbench train NAME` writes: {"name", "seed",
"tokens_per_step", "nats_per_token" (of all the held-out text, at its end), "held_out_by_step" ([step, nats per token on
16 passages, FLOPs so far])}. FLOPs are those of `healing.flops_at`: student, teacher and scores, and not the parent.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.models.checkpoints import ZOO

HEALING = ZOO / "healing.json"


@dataclass(frozen=True)
class Point:
    """Of a curve: what was trained so far, and the loss on some held-out passages."""

    step: int
    tokens: int
    flops: float
    nats_per_token: float


@dataclass(frozen=True)
class Curve:
    """One run, whole: its learning rate has come down at its end, and nowhere before."""

    name: str
    seed: int
    points: tuple[Point, ...]
    nats_per_token: float  # of all the held-out text, at the end

    @property
    def last(self) -> Point:
        return self.points[-1]

    def reaches(self, nats: float) -> Point | None:
        """The first point with at most this loss, between two points by a straight line; None where none has."""
        for before, after in itertools.pairwise(self.points):
            if after.nats_per_token <= nats < before.nats_per_token:
                share = (before.nats_per_token - nats) / (before.nats_per_token - after.nats_per_token)
                return Point(
                    round(before.step + share * (after.step - before.step)),
                    round(before.tokens + share * (after.tokens - before.tokens)),
                    before.flops + share * (after.flops - before.flops),
                    nats,
                )
        return self.points[0] if self.points[0].nats_per_token <= nats else None


def curve_of(run: Mapping[str, Any]) -> Curve:
    """Of an entry of the file, or of a card."""
    size = run["tokens_per_step"]
    points = tuple(Point(step, step * size, flops, nats) for step, nats, flops in run["held_out_by_step"])
    return Curve(run["name"], run["seed"], points, run["nats_per_token"])


def healing_curves() -> list[Curve]:
    """All runs that were kept, in the order of the file."""
    return [curve_of(run) for run in json.loads(HEALING.read_text(encoding="utf-8"))]


def entry_of(card: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of the file that a run's card gives."""
    return {
        "name": card["name"],
        "seed": card["seed"],
        "tokens_per_step": card["tokens_per_step"],
        "nats_per_token": card["held_out"]["nats_per_token"],
        "held_out_by_step": card["held_out_by_step"],
    }
