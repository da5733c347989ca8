"""A small performance exercise: count the pairs of equal numbers; comparing all of them is right and slow."""

from __future__ import annotations

from workbench.grading.check import Check, Exercise, ExerciseSet, Speedup

RIGHT = """
def pairs(numbers):
    seen, found = {}, 0
    for number in numbers:
        found += seen.get(number, 0)
        seen[number] = seen.get(number, 0) + 1
    return found
"""
SLOW = """
def pairs(numbers):
    return sum(numbers[i] == numbers[j] for i in range(len(numbers)) for j in range(i))
"""
SPEEDUP = Speedup(SLOW, "comparing all of them", at_least=3.0, plausible=2_000.0)


def probe(answer, numbers):
    return answer(numbers)


def cases(length: int, count: int):
    return lambda draw: [{"numbers": [draw.randrange(length) for _ in range(length)]} for _ in range(count)]


def judge(case, observation):
    numbers = case["numbers"]
    right = sum(numbers.count(number) - 1 for number in numbers) // 2
    return None if observation == right else f"{observation} pairs, expected {right}"


def exercise(speedup: Speedup = SPEEDUP, hidden: bool = False) -> Exercise:
    checks = (
        Check("small", 1, cases(10, 3), probe, judge),
        Check("fast", 1, cases(700, 16), probe, judge, speedup=speedup, hidden=hidden),
        Check("after", 1, cases(12, 2), probe, judge, hidden=True),
    )
    return Exercise("toy-pairs", "Equal pairs", "pairs", checks)


def exercise_sets() -> dict[str, ExerciseSet]:
    """ "92_speed": as it is; "93_marked": where anything above 1.5 times is implausible."""
    low = Speedup(SLOW, "comparing all of them", at_least=1.2, plausible=1.5)
    return {
        "92_speed": ExerciseSet("92_speed", 92, "import random", (exercise(),)),
        "93_marked": ExerciseSet("93_marked", 93, "import random", (exercise(low),)),
    }
