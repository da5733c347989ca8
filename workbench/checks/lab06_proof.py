"""Lab 06, the proof: cases and judges of spec-proof."""

from __future__ import annotations

import functools
import random
from fractions import Fraction

from workbench.checks import lab06_rules as rules
from workbench.checks.lab05_tensors import told_missing
from workbench.checks.lab06_fractions import law_of, read_law, same, tables, told
from workbench.speculation import theory


def proof_tables(draw: random.Random, size: int, K: int, least: int = 1) -> dict:
    """Laws of a target and a draft that differ after every token, each token likelier with one and with the other."""
    while True:
        target, draft = tables(draw, size + 1, size, least=least), tables(draw, size + 1, size, least=least)
        rows = zip(
            map(law_of(target), [(i,) for i in range(size)]), map(law_of(draft), [(i,) for i in range(size)])
        )
        if all(theory.total_variation(a, b) > Fraction(1, 10) for a, b in rows):
            return {"target": target, "draft": draft, "K": K}


def round_cases(*sizes: tuple[int, int]):
    """Cases of (vocabulary, K)."""
    return lambda draw: [proof_tables(draw, *one) for one in sizes]


def impossible_cases(draw: random.Random) -> list[dict]:
    """Rows with zeros, a draft that is the target, and K = 0."""
    case, alike = proof_tables(draw, 3, 2, least=0), proof_tables(draw, 3, 2)
    case["target"][-1][draw.randrange(3)] = case["draft"][-1][0] = case["draft"][0][1] = 0
    case["draft"][-1][1] = case["draft"][0][2] = case["target"][-1][0] = 4
    alike["draft"] = alike["target"]
    return [case, alike, proof_tables(draw, 3, 0)]


def broken_case(draw: random.Random, kinds: list[str], given: dict) -> dict:
    kinds = list(kinds)
    draw.shuffle(kinds)
    return {
        "names": [f"rule {letter}" for letter in "ABCDEFGHIJKLMNOP"[: len(kinds)]],
        "kinds": kinds,
        **given,
    }


def broken_cases(draw: random.Random) -> list[dict]:
    """Rules that are right and half of the others; then the other half. At two tokens p without the rejected one is right."""
    wrong = list(rules.WRONG)
    draw.shuffle(wrong)
    half = len(wrong) // 2
    return [
        broken_case(draw, [*rules.RIGHT, *wrong[:half]], proof_tables(draw, 2, 2)),
        broken_case(draw, ["the rule", *wrong[half:]], proof_tables(draw, 3, 1)),
    ]


def shy_cases(draw: random.Random) -> list[dict]:
    """Each mistake alone, at K = 1: none hides behind another, and the wrong bonus shows only after a whole round."""
    return [
        broken_case(draw, [kind, "the rule"], proof_tables(draw, 2, 1))
        for kind in (
            "the bonus is drawn from the row before",
            "the residual is not renormalized",
            "the correction is drawn from p",
        )
    ] + [broken_case(draw, list(rules.RIGHT), proof_tables(draw, 2, 2))]


def alike_cases(draw: random.Random) -> list[dict]:
    """A draft that is the target: nothing is ever rejected, and most mistakes cannot be seen."""
    given = proof_tables(draw, 3, 1)
    given["draft"] = given["target"]
    return [broken_case(draw, list(rules.ALL), given)]


# --- Judging ---


def _fixed(case: dict) -> tuple:
    """The tables of a case and K, as keys of a cache: a class of answers is judged on the same cases."""
    return (*(tuple(map(tuple, case[name])) for name in ("target", "draft")), case["K"])


def exact_round(case: dict, kind: str = "the rule") -> dict[tuple, Fraction]:
    return _round_law(*_fixed(case), kind)


@functools.lru_cache(maxsize=256)
def _round_law(target: tuple, draft: tuple, K: int, kind: str) -> dict[tuple, Fraction]:
    if not K:
        return {(token,): share for token, share in enumerate(law_of(target)(())) if share}
    run = functools.partial(
        theory.write_round, (), law_of(target), law_of(draft), (1,) * K, verify=rules.ALL[kind]
    )
    return theory.enumerate_outcomes(run)


@functools.lru_cache(maxsize=256)
def _text_law(target: tuple, draft: tuple, K: int, kind: str) -> dict[tuple, Fraction]:
    """Of texts of K + 1 tokens."""
    return theory.law_of_texts(law_of(target), law_of(draft), K + 1, (1,) * K, verify=rules.ALL[kind])


def _same_law(a: dict, b: dict) -> bool:
    return all(same(a.get(key, Fraction(0)), b.get(key, Fraction(0))) for key in a.keys() | b.keys())


def judge_round_law(case: dict, seen: dict) -> str | None:
    """{emitted tokens: probability} of one round."""
    if lacking := told_missing(seen):
        return lacking
    size, K = len(case["target"][0]), case["K"]
    where = f"law_of_round with {size} tokens, K = {K}: "
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where a dict {{(token, …): Fraction}} was expected"
    if "key" in seen:
        return f"{where}a key is {seen['key']}, where a tuple of tokens was expected"
    for key, probability in seen["law"]:
        if isinstance(probability, dict | float):
            came = probability["returned"] if isinstance(probability, dict) else "float"
            return f"{where}the probability of {tuple(key)} is a {came}; with Fractions it stays exact, and is a proof"
    came, right = read_law(seen["law"]), exact_round(case)
    if _same_law(came, right):
        return None
    hint = next(
        (kind for kind in rules.ALL if kind != "the rule" and _same_law(came, exact_round(case, kind))), None
    )
    if hint:
        return f"{where}that is the law of a round in which {_of(hint)}"
    if sum(came.values()) != 1:
        lost = min(
            (key for key in right if not same(came.get(key, Fraction(0)), right[key])),
            key=lambda k: (len(k), k),
        )
        return (
            f"{where}the probabilities sum to {told(sum(came.values()))}; the first outcome that differs is {lost}: "
            f"{told(came.get(lost, Fraction(0)))}, expected {told(right[lost])}. Several ways may lead to the same tokens: "
            "their probabilities are added"
        )
    wrong = min(
        (
            key
            for key in came.keys() | right.keys()
            if not same(came.get(key, Fraction(0)), right.get(key, Fraction(0)))
        ),
        key=lambda k: (len(k), k),
    )
    return (
        f"{where}a round emits {wrong} with {told(came.get(wrong, Fraction(0)))}, expected "
        f"{told(right.get(wrong, Fraction(0)))}: the sum over all drafts, of q of what was drafted, times what the rule does "
        "with it"
    )


def _of(kind: str) -> str:
    return kind.replace("the rule", "all is right")


def judge_broken(case: dict, seen: dict) -> str | None:
    """The names of the rules whose texts have another law."""
    if lacking := told_missing(seen):
        return lacking
    if "returned" in seen:
        return f"broken gave a {seen['returned']}, where a list of the rules' names was expected"
    K = case["K"]
    alike = case["target"] == case["draft"]
    where = f"broken with K = {K}" + (", the draft being the target itself: " if alike else ": ")
    right = theory.law_of_target(law_of(case["target"]), K + 1)
    for name, kind in zip(case["names"], case["kinds"]):
        law = _text_law(*_fixed(case), kind)
        text = next((t for t in sorted(law.keys() | right.keys()) if law.get(t, 0) != right.get(t, 0)), None)
        if text is None and name in seen["found"]:
            return f"{where}{name} was named ({kind}); it writes every text of {K + 1} tokens with the target's probability"
        if text is not None and name not in seen["found"]:
            return (
                f"{where}{name} was not named ({kind}); it writes {list(text)} with {told(law.get(text, 0))}, the target "
                f"alone with {told(right.get(text, 0))}"
            )
    extra = sorted(set(seen["found"]) - set(case["names"]))
    return f"{where}{extra[0]!r} was named, and is no rule that was given" if extra else None
