"""Lab 12, a teacher: cases and judges of pruning-distill.

What is right is added up token by token in float64.
"""

from __future__ import annotations

import math
import random

import torch

from workbench.checks.arithmetic import log_softmax
from workbench.checks.tensors import exactly, missing_message, read
from workbench.labs.lab12_pruning_and_distillation.checks.probes import logits_inputs

CLOSE = 2e-4  # of the number, or of the largest one of a gradient
LEAST = 1e-5


# --- Cases ---


def distill_case(
    draw: random.Random,
    part: str,
    temperature: float,
    mask: list[list[bool]],
    *,
    vocabulary: int = 6,
    scale: float = 2.0,
    dtype: str = "float32",
    never: int = 0,
    alike: bool = False,
    besides: str = "numbers",
    trained: bool = False,
) -> dict:
    return {
        "part": part,
        "temperature": temperature,
        "seed": draw.randrange(10**6),
        "mask": mask,
        "vocabulary": vocabulary,
        "scale": scale,
        "dtype": dtype,
        "never": never,
        "alike": alike,
        "besides": besides,
        "trained": trained,
    }


def everywhere(sequences: int, tokens: int) -> list[list[bool]]:
    return [[True] * tokens for _ in range(sequences)]


def somewhere(draw: random.Random, sequences: int, tokens: int) -> list[list[bool]]:
    """Different numbers of positions in each sequence, one at least in all, and not all."""
    while True:
        mask = [[draw.random() < 0.6 for _ in range(tokens)] for _ in range(sequences)]
        if sequences * tokens > sum(map(sum, mask)) > 0 and (sequences == 1 or len(set(map(sum, mask))) > 1):
            return mask


def loss_cases(draw: random.Random) -> list[dict]:
    """All positions count, at temperature 1; the same logits on both sides: 0."""
    return [
        distill_case(draw, "loss", 1.0, everywhere(1, 1)),
        distill_case(draw, "loss", 1.0, everywhere(2, 3)),
        distill_case(draw, "loss", 1.0, everywhere(3, 4), vocabulary=9),
        distill_case(draw, "loss", 1.0, everywhere(2, 5), alike=True),
    ]


def temperature_cases(draw: random.Random) -> list[dict]:
    return [
        distill_case(draw, "loss", 2.0, everywhere(2, 3)),
        distill_case(draw, "loss", 0.5, everywhere(2, 4)),
        distill_case(draw, "loss", draw.choice([3.0, 5.0]), everywhere(1, 6), vocabulary=8),
    ]


def gradient_cases(draw: random.Random) -> list[dict]:
    return [
        distill_case(draw, "gradient", 1.0, everywhere(2, 3)),
        distill_case(draw, "gradient", 2.0, everywhere(2, 3)),
        distill_case(draw, "gradient", 0.5, everywhere(3, 2), vocabulary=5),
        distill_case(draw, "gradient", draw.choice([3.0, 5.0]), everywhere(1, 4)),
    ]


def masked_cases(draw: random.Random) -> list[dict]:
    """Some positions do not count, and have numbers of their own, or nan, or infinity."""
    cases = []
    for part in ("loss", "gradient"):
        for besides, temperature in (("numbers", 1.0), ("nan", 2.0), ("inf", 1.0)):
            cases.append(distill_case(draw, part, temperature, somewhere(draw, 3, 4), besides=besides))
    return cases


def nothing_cases(draw: random.Random) -> list[dict]:
    """No position counts."""
    nothing = [[False] * 3, [False] * 3]
    return [
        distill_case(draw, part, 2.0, nothing, besides=besides)
        for part in ("loss", "gradient")
        for besides in ("numbers", "nan")
    ]


def large_cases(draw: random.Random) -> list[dict]:
    """Logits in the hundreds, of either sign."""
    return [
        distill_case(draw, part, temperature, somewhere(draw, 2, 4), scale=200.0)
        for part in ("loss", "gradient")
        for temperature in (1.0, 8.0)
    ]


def half_cases(draw: random.Random) -> list[dict]:
    """float16 and bfloat16."""
    return [
        distill_case(draw, part, temperature, everywhere(2, 4), scale=scale, dtype=dtype, vocabulary=12)
        for part, temperature, scale, dtype in (
            ("loss", 1.0, 3.0, "float16"),
            ("loss", 2.0, 3.0, "bfloat16"),
            ("gradient", 1.0, 2.0, "float16"),
            ("gradient", 4.0, 3.0, "bfloat16"),
        )
    ]


def never_cases(draw: random.Random) -> list[dict]:
    """Tokens that the teacher never predicts."""
    return [
        distill_case(draw, "loss", 1.0, everywhere(2, 3), never=1),
        distill_case(draw, "loss", 2.0, somewhere(draw, 2, 4), never=2, besides="nan"),
        distill_case(draw, "gradient", 2.0, everywhere(2, 3), never=2),
        distill_case(draw, "loss", 2.0, everywhere(1, 3), vocabulary=7, never=6),
        distill_case(draw, "gradient", 1.0, everywhere(1, 3), vocabulary=7, never=6),
    ]


def teacher_cases(draw: random.Random) -> list[dict]:
    """The teacher's logits have `requires_grad`."""
    return [
        distill_case(draw, "loss", 2.0, everywhere(2, 3), trained=True),
        distill_case(draw, "gradient", 2.0, somewhere(draw, 2, 3), trained=True),
        distill_case(draw, "loss", 1.0, somewhere(draw, 2, 4), trained=True, dtype="bfloat16", besides="nan"),
    ]


def other_losses(draw: random.Random) -> list[dict]:
    return _others(draw, "loss")


def other_gradients(draw: random.Random) -> list[dict]:
    return _others(draw, "gradient")


def _others(draw: random.Random, part: str) -> list[dict]:
    """Sizes, temperatures and masks by chance."""
    cases = []
    for number in range(6):
        mask = somewhere(draw, draw.randint(1, 4), draw.randint(3, 7))
        temperature = draw.choice([0.25, 0.75, 1.5, 2.5, 4.0])
        cases.append(
            distill_case(
                draw,
                part,
                temperature,
                mask,
                vocabulary=draw.randint(3, 14),
                scale=draw.uniform(1.0, 4.0),
                besides=("numbers", "nan", "inf")[number % 3],
                trained=number % 2 == 1,
            )
        )
    return cases


def extreme_cases(draw: random.Random) -> list[dict]:
    """Large logits, half precision, tokens that are never predicted, nothing that counts, together."""
    nothing = [[False] * 4]
    return [
        distill_case(draw, "loss", 1.0, somewhere(draw, 2, 4), scale=300.0, never=1, besides="nan"),
        distill_case(draw, "gradient", 2.0, somewhere(draw, 2, 4), scale=300.0, never=1, besides="inf"),
        distill_case(draw, "loss", 4.0, somewhere(draw, 2, 5), scale=60.0, dtype="float16", vocabulary=10),
        distill_case(draw, "gradient", 8.0, somewhere(draw, 2, 5), scale=60.0, dtype="bfloat16", vocabulary=10),
        distill_case(draw, "loss", 1.0, nothing, besides="inf"),
        distill_case(draw, "gradient", 1.0, nothing, besides="inf"),
        distill_case(draw, "loss", 3.0, everywhere(2, 2), alike=True, scale=100.0),
    ]


# --- What is right ---


def positions(case: dict) -> list[tuple[int, int]]:
    """Those that count."""
    return [(b, t) for b, row in enumerate(case["mask"]) for t, counts in enumerate(row) if counts]


def log_probabilities(case: dict) -> dict[tuple[int, int], tuple[list[float], list[float]]]:
    """Position -> (log q, log p)."""
    given = logits_inputs(
        **{name: value for name, value in case.items() if name not in ("part", "temperature", "trained")}
    )
    student, teacher, tau = given["student"].double().tolist(), given["teacher"].double().tolist(), case["temperature"]
    return {
        (b, t): (log_softmax([x / tau for x in student[b][t]]), log_softmax([x / tau for x in teacher[b][t]]))
        for b, t in positions(case)
    }


def exact_loss(case: dict) -> float:
    divergences = []
    for log_q, log_p in log_probabilities(case).values():
        divergences.append(math.fsum(math.exp(p) * (p - q) for q, p in zip(log_q, log_p) if p > -math.inf))
    if not divergences:
        return 0.0
    return case["temperature"] ** 2 * math.fsum(divergences) / len(divergences)


def exact_gradient(case: dict) -> torch.Tensor:
    """[B, T, V]."""
    known = log_probabilities(case)
    gradient = torch.zeros(len(case["mask"]), len(case["mask"][0]), case["vocabulary"], dtype=torch.float64)
    for (b, t), (log_q, log_p) in known.items():
        for v, (q, p) in enumerate(zip(log_q, log_p)):
            gradient[b, t, v] = case["temperature"] * (math.exp(q) - math.exp(p)) / len(known)
    return gradient


# --- Judging ---


def judge_distill(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    mask = case["mask"]
    where = (
        f"{case['part']} of logits [{len(mask)}, {len(mask[0])}, {case['vocabulary']}] in {case['dtype']}, τ = "
        f"{case['temperature']:g}, {len(positions(case))} positions count"
    )
    where += f", {case['besides']} at the others" if case["besides"] != "numbers" else ""
    where += f", {case['never']} logits of the teacher are −∞" if case["never"] else ""
    where += ", both the same" if case["alike"] else ""
    where += ", the teacher's have requires_grad" if case["trained"] else ""
    where += ": "
    if seen["changed"]:
        return f"{where}what was given was changed"
    if case["part"] == "gradient":
        return _judge_gradient(case, seen, where) or _judge_teacher(seen, where)
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where one number was expected"
    came, right = seen["loss"], exact_loss(case)
    other = seen["dtype"] not in ("", "float32")
    odd = f"the loss came back in {seen['dtype']}, expected float32 or a Python float" if other else ""
    if not abs(came - right) <= LEAST + CLOSE * abs(right):
        return f"{where}{came:.6g}, expected {right:.6g}" + (f"; {odd}" if odd else "")
    return where + odd if odd else _judge_teacher(seen, where)


def _judge_teacher(seen: dict, where: str) -> str | None:
    """Whether the teacher would be trained, too."""
    if seen["to_teacher"]:
        return f"{where}what came back leads to the teacher's logits, which would get a gradient; expected none"
    return None


def _judge_gradient(case: dict, seen: dict, where: str) -> str | None:
    right = exact_gradient(case)
    came = read(seen["gradient"], "the gradient", right.shape, "", "[B, T, V]")
    if isinstance(came, str):
        return where + came
    far = ~((came - right).abs() <= CLOSE * max(LEAST, float(right.abs().max())))
    dtype = seen["gradient"]["dtype"]
    odd = "" if dtype == "float32" else f"the gradient came back in {dtype}, expected float32"
    if not far.any():
        return where + odd if odd else None
    at = tuple(far.nonzero()[0].tolist())
    counts = "" if case["mask"][at[0]][at[1]] else ", a position that does not count"
    said = f"at {list(at)}{counts}: {exactly(came[at])[:9]}, expected {exactly(right[at])[:9]}"
    return where + said + (f"; {odd}" if odd else "")
