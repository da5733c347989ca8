"""Lab 14, one pass of a confidence sampler: cases and judges of beyond-unmask.

What is right is worked out place by place in float64: the token, its probability, and how many tokens a pass writes, by
dealing the masked places out to the passes one at a time.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

from workbench.checks.arithmetic import softmax

STEP = 8  # logits and noise are multiples of 1/8, which float32 holds exactly
APART = 1e-3  # confidences of different rows lie at least so far apart, and a chosen token as far above the next


# --- Cases ---


def row(draw: random.Random, vocabulary: int) -> list[float]:
    """Logits of one place, all different."""
    return [number / STEP for number in draw.sample(range(-4 * STEP, 4 * STEP), vocabulary)]


def gumbel(draw: random.Random, vocabulary: int) -> list[float]:
    """−log(−log u), rounded to multiples of 1/8."""
    return [round(-math.log(-math.log(draw.uniform(0.001, 0.999))) * STEP) / STEP for _ in range(vocabulary)]


def pass_case(
    draw: random.Random,
    places: int,
    passes: int,
    *,
    written: Sequence[int] = (),
    noisy: bool = False,
    mask_token: int | None = None,
    vocabulary: int = 8,
    such_that: Callable[[dict], bool] = lambda case: True,
) -> dict:
    """One call: a canvas of so many places, the written ones among them, whose confidences are clearly apart."""
    mask = draw.randrange(vocabulary) if mask_token is None else mask_token
    others = [token for token in range(vocabulary) if token != mask]
    while True:
        case = {
            "tokens": [draw.choice(others) if place in written else mask for place in range(places)],
            "logits": [row(draw, vocabulary) for _ in range(places)],
            "passes": passes,
            "mask_token": mask,
            "noise": [gumbel(draw, vocabulary) for _ in range(places)] if noisy else None,
        }
        if is_clear(case) and such_that(case):
            return case


def is_clear(case: dict) -> bool:
    """No choice hangs on rounding: not of a token, and not of which place comes first, unless rows are the same."""
    known: list[tuple[float, list[float]]] = []
    for place in masked_places(case):
        scores = sorted(noisy_logits(case, place).values())
        if len(scores) > 1 and scores[-1] - scores[-2] < 1 / STEP:
            return False
        known.append((chosen(case, place)[1], case["logits"][place]))
    known.sort()
    return all(b[0] - a[0] > APART or a[1] == b[1] for a, b in itertools.pairwise(known))


def differs(score: Callable[[dict, int], float]) -> Callable[[dict], bool]:
    """Whether another score than the confidence would write other places of a case, or in another order."""

    def holds(case: dict) -> bool:
        places = exact_pass(case)[0]
        other = sorted(masked_places(case), key=lambda place: (-score(case, place), place))
        return other[: len(places)] != places

    return holds


def top_probability(case: dict, place: int) -> float:
    return max(probabilities(case, place).values())


def with_mask(case: dict, place: int) -> float:
    """The probability of the chosen token among all tokens, the mask among them."""
    return softmax(case["logits"][place])[chosen(case, place)[0]]


def likely_cases(draw: random.Random) -> list[dict]:
    """Nothing is written yet, and every place takes its most likely token: in one pass, and the first of two and of
    four."""
    largest_logit = differs(lambda case, place: max(noisy_logits(case, place).values()))
    return [
        pass_case(draw, 8, 4, such_that=largest_logit),
        pass_case(draw, 6, 1, such_that=largest_logit),
        pass_case(draw, 8, 2, vocabulary=5),
        pass_case(draw, 12, 3),
    ]


def drawn_cases(draw: random.Random) -> list[dict]:
    """With noise, so that some places take another token than the most likely one, whose probability counts."""
    return [
        pass_case(draw, 8, 2, noisy=True, such_that=differs(top_probability)),
        pass_case(draw, 8, 4, noisy=True, such_that=differs(top_probability)),
        pass_case(draw, 6, 1, noisy=True, such_that=differs(noisy_probability)),
        pass_case(draw, 9, 3, noisy=True, vocabulary=5, such_that=differs(noisy_probability)),
    ]


def kept_cases(draw: random.Random) -> list[dict]:
    """Half-written canvases, whose written places are the surest, each clearly more than the one before it, so that a
    mistake which takes them shows the same on every machine; and logits that have the mask itself on top, in the last
    case all of them below 0."""
    cases = []
    for written, passes in (((0, 1, 5), 2), ((2, 3, 6), 3), ((0, 1, 3, 4, 6, 8), 3)):
        case = pass_case(draw, 9, passes, written=written)
        for place in written:
            sure = 12.0 - 0.875 * place  # apart: which of two equal ones is first would hang on rounding
            case["logits"][place] = [sure if token == case["tokens"][place] else 0.0 for token in range(8)]
        cases.append(case)
    cases += [mask_on_top(draw, 8, 2), mask_on_top(draw, 6, 3)]
    for logits in cases[-1]["logits"]:  # all below 0, and the distribution is the same
        logits[:] = [x - 12 for x in logits]
    return cases


def mask_on_top(draw: random.Random, places: int, passes: int) -> dict:
    """Everywhere the mask has a large share of the probability, and not the same one."""
    mask = draw.randrange(8)
    while True:
        case = pass_case(draw, places, passes, mask_token=mask)
        for logits in case["logits"]:
            logits[mask] = max(logits) + draw.randint(1, 2 * STEP) / STEP
        if differs(with_mask)(case):
            return case


def schedule_cases(draw: random.Random) -> list[dict]:
    """n places in k passes that do and do not divide them, in one pass, and in more passes than there are places."""
    n = draw.randint(11, 19)
    pairs = [(8, 4), (10, 4), (8, 3), (7, 5), (n, draw.randint(6, 8)), (n, 1), (3, draw.randint(5, 8)), (17, 6)]
    return [{"places": places, "passes": passes, "seed": draw.randrange(2**31)} for places, passes in pairs]


def tie_cases(draw: random.Random) -> list[dict]:
    """Places with the same logits, of which a pass writes some: the lower ones."""
    settings = ((8, 4, (1, 3, 4, 6), ()), (6, 2, (0, 1, 2, 3, 4, 5), ()), (9, 2, (2, 4, 7), (0, 5, 8)))
    return [tie_case(draw, *one) for one in settings]


def tie_case(draw: random.Random, places: int, passes: int, alike: Sequence[int], written: Sequence[int]) -> dict:
    """The places `alike` have the same logits, and are the surest."""
    while True:
        case = pass_case(draw, places, passes, written=written)
        surest = [token / STEP for token in range(8)]
        surest[(case["mask_token"] + draw.randint(1, 7)) % 8] = 8.0
        for place in alike:
            case["logits"][place] = list(surest)
        if is_clear(case) and set(exact_pass(case)[0]) <= set(alike):
            return case


def end_cases(draw: random.Random) -> list[dict]:
    """More passes than masked places: one place. Nothing is masked: nothing to write. One pass: all that is left."""
    return [
        pass_case(draw, 6, 5, written=(0, 2, 3, 4)),
        pass_case(draw, 5, 3, written=(0, 1, 2, 3, 4)),
        pass_case(draw, 7, 1, written=(1, 2, 6)),
        pass_case(draw, 5, 1, written=(0, 1, 2, 3, 4), noisy=True),
    ]


def large_cases(draw: random.Random) -> list[dict]:
    """Logits in the hundreds, of either sign, where e^logit is no float any more."""
    cases = [pass_case(draw, 6, 2), pass_case(draw, 6, 3, noisy=True)]
    for case in cases:
        for shift, logits in zip((300, -300, 200, -200, 400, 0), case["logits"]):
            logits[:] = [x + shift for x in logits]
    return cases


def other_cases(draw: random.Random) -> list[dict]:
    """Half-written canvases by chance, with noise and without, and counts that do not divide."""
    cases = []
    for number in range(6):
        places = draw.randint(6, 11)
        written = draw.sample(range(places), draw.randint(1, places // 2))
        noisy = number % 2 == 1
        such_that = differs(top_probability if noisy else with_mask)
        cases.append(pass_case(draw, places, draw.randint(1, 3), written=written, noisy=noisy, such_that=such_that))
    return cases


def block_cases(draw: random.Random) -> list[dict]:
    """Whole blocks, pass by pass, with other logits in each pass."""
    cases = []
    for places, passes, written, noisy in (
        (8, 3, (), False),
        (9, 4, (0, 1), True),
        (5, 7, (2,), False),
        (7, 2, (), True),
    ):
        case = pass_case(draw, places, passes, written=written, noisy=noisy)
        tables, noises, tokens = [], [], list(case["tokens"])
        for left in range(passes, 0, -1):
            now = pass_case(draw, places, left, noisy=noisy, mask_token=case["mask_token"])
            while not is_clear(now | {"tokens": tokens}):
                now = pass_case(draw, places, left, noisy=noisy, mask_token=case["mask_token"])
            for place, token in zip(*exact_pass(now | {"tokens": tokens})):
                tokens[place] = token
            tables.append(now["logits"])
            noises.append(now["noise"])
        cases.append({"tokens": case["tokens"], "logits": tables, "mask_token": case["mask_token"], "noise": noises})
    return cases


# --- What is right ---


def masked_places(case: dict) -> list[int]:
    return [place for place, token in enumerate(case["tokens"]) if token == case["mask_token"]]


def noisy_logits(case: dict, place: int) -> dict[int, float]:
    """token -> its logit and the noise on it; the mask is no token that could be written."""
    noise = case["noise"][place] if case["noise"] else [0.0] * len(case["logits"][place])
    scores = dict(enumerate(x + y for x, y in zip(case["logits"][place], noise)))
    del scores[case["mask_token"]]
    return scores


def probabilities(case: dict, place: int) -> dict[int, float]:
    """token -> its probability by the model, the mask left out."""
    tokens = [token for token in range(len(case["logits"][place])) if token != case["mask_token"]]
    return dict(zip(tokens, softmax([case["logits"][place][token] for token in tokens])))


def noisy_probability(case: dict, place: int) -> float:
    """What the noise would make of the chosen token's probability; no confidence of the model."""
    return max(softmax(list(noisy_logits(case, place).values())))


def chosen(case: dict, place: int) -> tuple[int, float]:
    """(token, its probability by the model)."""
    scores = noisy_logits(case, place)
    token = max(scores, key=lambda one: scores[one])
    return token, probabilities(case, place)[token]


def exact_counts(masked: int, passes: int) -> list[int]:
    """How many places each pass writes: dealt out to the passes one at a time, the first one first."""
    counts = [0] * passes
    for number in range(masked):
        counts[number % passes] += 1
    return counts


def exact_pass(case: dict) -> tuple[list[int], list[int]]:
    """(places, ids) of one pass, most confident first."""
    places = masked_places(case)
    count = exact_counts(len(places), case["passes"])[0]
    surest = sorted(places, key=lambda place: (-chosen(case, place)[1], place))[:count]
    return surest, [chosen(case, place)[0] for place in surest]


# --- Judging ---


def wrong_form(seen: dict) -> str | None:
    """What is wrong with the type of what came back, or with what was done to the arguments."""
    if "returned" in seen:
        return f"{seen['returned']} came back, where two lists of whole numbers, (places, ids), were expected"
    if seen["changed"]:
        return f"`{seen['changed']}` was changed; it belongs to the caller"
    return None


def compared(case: dict, seen: dict) -> str | None:
    places, ids = exact_pass(case)
    masked = masked_places(case)
    if seen["places"] == places and seen["ids"] == ids:
        return None
    came = seen["places"]
    if len(came) != len(places):
        return (
            f"{len(came)} places came back, expected {len(places)}: {len(masked)} are masked, and {case['passes']} "
            f"pass{'es' * (case['passes'] != 1)} left"
        )
    if came != places:
        kept = sorted(set(came) - set(masked))
        also = f" (written already, or not there: {kept})" if kept else ""
        sure = ", ".join(f"{place}: {chosen(case, place)[1]:.3f}" for place in masked)
        return f"places {came} came back{also}, expected {places}; confidence by place: {sure}"
    return f"places {came}: token ids {seen['ids']} came back, expected {ids}; the mask is {case['mask_token']}"


def judge_pass(case: dict, seen: dict) -> str | None:
    """One pass: the places, their order, and the token ids."""
    where = f"canvas {case['tokens']}, mask {case['mask_token']}, passes {case['passes']}"
    where += ", with noise: " if case["noise"] else ": "
    problem = wrong_form(seen) or compared(case, seen)
    return None if problem is None else where + problem


def judge_counts(case: dict, seen: dict) -> str | None:
    """How many places each pass writes, until no place is masked."""
    where = f"{case['places']} places in {case['passes']} pass{'es' * (case['passes'] != 1)}: "
    for number, one in enumerate(seen["steps"]):
        if problem := wrong_form(one):
            return f"{where}pass {number}: {problem}"
        if one["refused"]:
            return f"{where}pass {number} wrote {one['refused']}"
    came, right = [len(one["places"]) for one in seen["steps"]], exact_counts(case["places"], case["passes"])
    if came == right:
        return None
    left = case["places"] - sum(came)
    return f"{where}the passes wrote {came} tokens ({left} places are still masked), expected {right}"


def judge_block(case: dict, seen: dict) -> str | None:
    """Pass by pass, the same canvas on both sides."""
    tokens, mask = list(case["tokens"]), case["mask_token"]
    passes = len(case["logits"])
    for number, (logits, noise) in enumerate(zip(case["logits"], case["noise"])):
        now = {"tokens": tokens, "logits": logits, "noise": noise, "mask_token": mask, "passes": passes - number}
        if number >= len(seen["steps"]):
            return f"pass {number} of {passes} never came"
        if (problem := judge_pass(now, seen["steps"][number])) is not None:
            return f"pass {number} of {passes}: {problem}"
        for place, token in zip(*exact_pass(now)):
            tokens[place] = token
    assert mask not in tokens, "the schedule leaves no place masked"
    return None
