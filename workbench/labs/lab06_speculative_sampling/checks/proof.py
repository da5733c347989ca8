"""Lab 06, the proof: cases and judges of spec-proof."""

from __future__ import annotations

import functools
import random
from fractions import Fraction

from workbench.checks.tensors import missing_message
from workbench.labs.lab06_speculative_sampling.checks import rules
from workbench.labs.lab06_speculative_sampling.checks.fractions import (
    distribution_of,
    read_distribution,
    same,
    tables,
    told,
)
from workbench.speculation import theory


def proof_tables(draw: random.Random, size: int, K: int, smallest: int = 1) -> dict:
    """Distributions of a target and a draft that differ after every token; each token is likelier in one of them."""
    while True:
        target, draft = tables(draw, size + 1, size, smallest=smallest), tables(draw, size + 1, size, smallest=smallest)
        rows = zip(
            map(distribution_of(target), [(i,) for i in range(size)]),
            map(distribution_of(draft), [(i,) for i in range(size)]),
        )
        if all(theory.total_variation(a, b) > Fraction(1, 10) for a, b in rows):
            return {"target": target, "draft": draft, "K": K}


def round_cases(*sizes: tuple[int, int]):
    """Cases of (vocabulary, K)."""
    return lambda draw: [proof_tables(draw, *one) for one in sizes]


def impossible_cases(draw: random.Random) -> list[dict]:
    """Rows with zeros, a draft that is the target, and K = 0."""
    case, alike = proof_tables(draw, 3, 2, smallest=0), proof_tables(draw, 3, 2)
    case["target"][-1][draw.randrange(3)] = case["draft"][-1][0] = case["draft"][0][1] = 0
    case["draft"][-1][1] = case["draft"][0][2] = case["target"][-1][0] = 4
    alike["draft"] = alike["target"]
    return [case, alike, proof_tables(draw, 3, 0)]


def broken_case(draw: random.Random, kinds: list[str], given: dict) -> dict:
    kinds = list(kinds)
    draw.shuffle(kinds)
    return {"names": [f"rule {letter}" for letter in "ABCDEFGHIJKLMNOP"[: len(kinds)]], "kinds": kinds, **given}


def broken_cases(draw: random.Random) -> list[dict]:
    """Rules that are right and half of the others; then the other half. At two tokens p without the rejected one is
    right."""
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
    """A draft that is the target: nothing is ever rejected, and most mistakes cannot be seen. And another draft."""
    given = proof_tables(draw, 3, 1)
    alike = given | {"draft": given["target"]}
    return [broken_case(draw, list(rules.ALL), alike), broken_case(draw, list(rules.ALL), given)]


# --- Judging ---


def _fixed(case: dict) -> tuple:
    """The tables of a case and K, as keys of a cache: a class of answers is judged on the same cases."""
    return (*(tuple(map(tuple, case[name])) for name in ("target", "draft")), case["K"])


def exact_round(case: dict) -> dict[tuple, Fraction]:
    return _round_distribution(*_fixed(case))


@functools.lru_cache(maxsize=256)
def _round_distribution(target: tuple, draft: tuple, K: int) -> dict[tuple, Fraction]:
    if not K:
        return {(token,): share for token, share in enumerate(distribution_of(target)(())) if share}
    return theory.enumerate_outcomes(
        functools.partial(theory.write_round, (), distribution_of(target), distribution_of(draft), (1,) * K)
    )


@functools.lru_cache(maxsize=256)
def _text_distribution(target: tuple, draft: tuple, K: int, kind: str) -> dict[tuple, Fraction]:
    """Of texts of K + 1 tokens."""
    return theory.distribution_of_texts(
        distribution_of(target), distribution_of(draft), K + 1, (1,) * K, verify=rules.ALL[kind]
    )


def _same_distribution(a: dict, b: dict) -> bool:
    return all(same(a.get(key, Fraction(0)), b.get(key, Fraction(0))) for key in a.keys() | b.keys())


def judge_round_distribution(case: dict, seen: dict) -> str | None:
    """{emitted tokens: probability} of one round."""
    if lacking := missing_message(seen):
        return lacking
    size, K = len(case["target"][0]), case["K"]
    where = f"distribution_of_round with {size} tokens, K = {K}: "
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where a dict {{(token, …): Fraction}} was expected"
    if "key" in seen:
        return f"{where}a key is {seen['key']}, where a tuple of tokens was expected"
    for key, probability in seen["distribution"]:
        if isinstance(probability, dict | float):
            came = probability["returned"] if isinstance(probability, dict) else "float"
            return f"{where}the probability of {tuple(key)} is a {came}; with Fractions it stays exact, and is a proof"
    came, right = read_distribution(seen["distribution"]), exact_round(case)
    if _same_distribution(came, right):
        return None
    differs = [k for k in came.keys() | right.keys() if not same(came.get(k, Fraction(0)), right.get(k, Fraction(0)))]
    first = min(differs, key=lambda tokens: (len(tokens), tokens))
    return (
        f"{where}a round emits {first} with {told(came.get(first, Fraction(0)))}, expected"
        f" {told(right.get(first, Fraction(0)))}; all outcomes sum to {told(sum(came.values()))}: the sum over all"
        " drafts, of q of what was drafted, times what the rule does with it"
    )


def judge_broken(case: dict, seen: dict) -> str | None:
    """The names of the rules whose texts have another distribution."""
    if lacking := missing_message(seen):
        return lacking
    if "returned" in seen:
        return f"broken gave a {seen['returned']}, where a list of the rules' names was expected"
    K = case["K"]
    alike = case["target"] == case["draft"]
    where = f"broken with K = {K}" + (", the draft being the target itself: " if alike else ": ")
    right = theory.distribution_of_target(distribution_of(case["target"]), K + 1)
    for name, kind in zip(case["names"], case["kinds"]):
        distribution = _text_distribution(*_fixed(case), kind)
        text = next(
            (t for t in sorted(distribution.keys() | right.keys()) if distribution.get(t, 0) != right.get(t, 0)), None
        )
        if text is None and name in seen["found"]:
            return (
                f"{where}{name} was named ({kind}); it writes every text of {K + 1} tokens with the target's"
                " probability"
            )
        if text is not None and name not in seen["found"]:
            return (
                f"{where}{name} was not named ({kind}); it writes {list(text)} with"
                f" {told(distribution.get(text, 0))}, the target alone with {told(right.get(text, 0))}"
            )
    extra = sorted(set(seen["found"]) - set(case["names"]))
    return f"{where}{extra[0]!r} was named, and is no rule that was given" if extra else None
