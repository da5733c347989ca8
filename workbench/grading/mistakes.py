"""Which known mistake an answer made, told by what its probe saw: no wrong answer is held or run to tell it.

A table is plain data. For each case of a check it has what every listed mistake that fails there shows, as fingerprints
of the parts of the observation in which it differs from the reference answer, beside the words for a student:

    {"words": [words, …], "cases": {key of the case: [[index into words, {part: fingerprint}], …]}}

What is discrete (structure, text, whole numbers, where a nan or an inf stands) counts exactly, as a digest. The floats
of a part count as a vector, by its length and its products with fixed random directions (Johnson-Lindenstrauss), which
agree within `TOLERANCE` of the length for whoever computes the same in another order.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import WorkbenchError
from workbench.grading.cell import run_cell
from workbench.grading.check import Check, Exercise, ExerciseSet, cases_of, judge_check, observe

DIRECTIONS = 3
TOLERANCE = 1e-4  # of a vector's length; float32 in another order differs by a hundredth of that
MAX_PARTS, MAX_NAME_CHARS = 100, 100  # of an observation; no probe of ours gives as many, an answer may
_PLACE = re.compile(r" \(line \d+ of the answer's cell\)")

Fingerprint = list  # [digest] or [digest, product with each direction …, length]


@dataclass(frozen=True)
class Mistake:
    """A plausible wrong answer: the source of its cell, the check that must catch it, the words for a student."""

    name: str
    source: str
    caught_by: str
    says: str = ""


def fingerprint(part: Any) -> Fingerprint:
    """Of encoded data, such as a part of what a probe saw."""
    floats: list[float] = []

    def discrete(value: Any) -> Any:
        if isinstance(value, float):
            floats.append(value)
            return 0.5  # stands for any float
        if isinstance(value, list):
            return [discrete(item) for item in value]
        if isinstance(value, dict):
            return {name: discrete(item) for name, item in value.items()}
        return _PLACE.sub("", value) if isinstance(value, str) else value

    digest = _digest(discrete(part))
    if not floats:
        return [digest]
    products = []
    for direction in range(DIRECTIONS):
        draw = random.Random(direction).random
        products.append(sum((2 * draw() - 1) * x for x in floats))
    return [digest, *(float(f"{x:.6g}") for x in (*products, math.sqrt(sum(x * x for x in floats))))]


def agree(one: Fingerprint, other: Fingerprint) -> bool:
    if one[0] != other[0] or len(one) != len(other):
        return False
    slack = TOLERANCE * max(one[-1], other[-1]) if len(one) > 1 else 0.0
    return math.isfinite(slack) and all(abs(a - b) <= slack for a, b in zip(one[1:], other[1:]))


def parts_of(observation: Mapping[str, Any]) -> dict[str, Fingerprint]:
    """Of a dict each entry by itself: an answer with two mistakes shows each of them in a part of its own.

    None of a dict with more or longer names than any probe gives.
    """
    value = observation.get("value", dict(observation))
    parts = value if isinstance(value, dict) and "$float" not in value else {"": value}
    if len(parts) > MAX_PARTS or any(len(name) > MAX_NAME_CHARS for name in parts):
        return {}
    return {name: fingerprint(part) for name, part in parts.items()}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


def _key(check: Check, case: dict) -> str:
    return _digest([check.name, check.probe_name, case])


class Noted:
    """In place of `Known` where the mistakes are not: keeps what the last failing check saw, for words to be found
    elsewhere."""

    def __init__(self) -> None:
        self.shown: dict[str, Any] | None = None

    def explain(self, check: Check, cases: Sequence[dict], observations: Sequence[dict], failed: int) -> str:
        """No words. `shown` becomes {"failed": index of a case, "cases": [[its key, what parts it showed], …]}."""
        cases_shown = [[_key(check, case), parts_of(seen)] for case, seen in zip(cases, observations)]
        self.shown = {"failed": failed, "cases": cases_shown}
        return ""


class Known:
    """The mistakes of a table."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.words: list[str] = table["words"]
        self.cases: dict[str, list] = table["cases"]

    def explain(self, check: Check, cases: Sequence[dict], observations: Sequence[dict], failed: int) -> str:
        """The words for what was seen on the case at index `failed`; "" where no known mistake shows anything of it."""
        if _key(check, cases[failed]) not in self.cases:
            return ""
        noted = Noted()
        noted.explain(check, cases, observations, failed)
        return "" if noted.shown is None else self.find(noted.shown)

    def find(self, shown: Mapping[str, Any]) -> str:
        """The words for what `Noted` has kept.

        Of several mistakes that show something of it, the one that most of the other cases agree with; where they are
        alike in all of this check, one that it is there to catch, and of these the first listed.
        """
        fits = [
            {index: [agree(seen.get(name, [""]), part) for name, part in parts.items()] for index, parts in rows}
            for rows, seen in ((self.cases.get(key, ()), seen) for key, seen in shown["cases"])
        ]
        shows = [index for index, parts in fits[shown["failed"]].items() if any(parts)]
        scores = {index: sum(1 if all(of[index]) else -1 for of in fits if index in of) for index in shows}
        return self.words[max(scores, key=scores.__getitem__)] if scores else ""


KnownFor = Callable[[ExerciseSet, Exercise, Check, int | str], Known]  # for the cases of a check, by a seed


def tabulate(
    exercises: ExerciseSet,
    reference: Mapping[str, str],
    mistakes: Mapping[str, Sequence[Mistake]],
    *,
    seed: int | str = 0,
) -> dict[str, Any]:
    """The table of these exercises' checks for the cases of a seed. reference: grade_id -> source of the right answer.

    Runs the mistakes in this process, which is for our own: what a student wrote is never run here. Timed checks are
    left out.
    """
    words: dict[tuple[str, str], str] = {}
    rows: dict[str, list] = {}
    for exercise in exercises.exercises:
        grade_id, listed = exercise.grade_id, mistakes.get(exercise.grade_id, ())
        sources = [reference[grade_id], *(mistake.source for mistake in listed)]
        right, *wrong = (_defined(exercises, exercise.entry, source) for source in sources)
        for check in exercise.checks:
            for case in cases_of(exercise, check, seed) if check.speedup is None else ():
                expected = parts_of(observe(grade_id, check.probe, right, case))
                meant_first = sorted(zip(listed, wrong), key=lambda pair: pair[0].caught_by != check.name)
                for mistake, answer in meant_first:
                    seen = observe(grade_id, check.probe, answer, case)
                    if judge_check(check, [case], [seen]) is None:
                        continue
                    parts = {n: p for n, p in parts_of(seen).items() if not agree(p, expected.get(n, [""]))}
                    if parts:
                        words.setdefault((grade_id, mistake.name), mistake.says)
                        index = list(words).index((grade_id, mistake.name))
                        rows.setdefault(_key(check, case), []).append([index, parts])
    return {"words": list(words.values()), "cases": rows}


def _defined(exercises: ExerciseSet, entry: str, source: str) -> Any:
    """What an answer of ours defines after the setup cell."""
    names: dict[str, Any] = {"__name__": "__main__"}
    run_cell(exercises.prelude, names)
    run_cell(source, names)
    if entry not in names:
        raise WorkbenchError(f"a listed answer defines no {entry!r}")
    return names[entry]
