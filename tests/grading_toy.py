"""A small exercise set with its probes: what `test_grading` grades. Imported by name in the child, too."""

from __future__ import annotations

import random

from workbench.grading import Check, Exercise, ExerciseSet

CANARY = 739_391  # the input of the hidden check; it may appear in no feedback
PRELUDE = "import torch\n\nSCALE = 2\n"
STARTER = 'def double(x):\n    raise NotImplementedError("toy-double: write me")\n'


def call(answer, **arguments):
    return answer(**arguments)


def call_with_tensor(answer, values):
    import torch

    return answer(torch.tensor(values))


def _twice(case: dict, seen: object) -> str | None:
    return None if seen == 2 * case["x"] else f"double({case['x']}) gave {seen}, expected {2 * case['x']}"


def _sum(case: dict, seen: object) -> str | None:
    return None if seen == sum(case["values"]) else f"gave {seen}, expected {sum(case['values'])}: add every value"


def _small(rng: random.Random) -> list[dict]:
    return [{"x": rng.randrange(1, 50)} for _ in range(3)]


DOUBLE = Exercise(
    "toy-double",
    "Double a number",
    "double",
    (
        Check("small numbers", 2, _small, call, _twice),
        Check("negative numbers", 1, lambda rng: [{"x": -rng.randrange(1, 50)}], call, _twice),
    ),
)
TOTAL = Exercise(
    "toy-total",
    "Add up a tensor",
    "total",
    (Check("three values", 2, lambda rng: [{"values": [1.0, 2.0, 4.0]}], call_with_tensor, _sum),),
)
HIDDEN = {"toy-double": (Check("a large number", 3, lambda rng: [{"x": CANARY}], call, _twice, hidden=True),)}


def exercise_sets() -> dict[str, ExerciseSet]:
    return {"90_toy": ExerciseSet("90_toy", 90, PRELUDE, (DOUBLE, TOTAL), {"toy-double": STARTER})}
