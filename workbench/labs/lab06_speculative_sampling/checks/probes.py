"""Lab 06: what the checks do with an answer, and what they see. Probes run beside the answer and hold no expected
value.

Nothing is left to chance: an answer that decides by chance is taken through everything that can happen, by
`theory.enumerate_outcomes`, and what is seen is the distribution of what it does.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from workbench.checks.inputs import random_model
from workbench.checks.tensors import kind_of, missing
from workbench.checks.tensors import shown as shown_tensor
from workbench.decoding.draws import Draws
from workbench.errors import WorkbenchError
from workbench.grading.check import refused_or_not
from workbench.kv import Contiguous
from workbench.labs.lab06_speculative_sampling.checks import rules
from workbench.labs.lab06_speculative_sampling.checks.fractions import (
    distribution_of,
    rows_of,
    shown,
    shown_distribution,
)
from workbench.models.batch import Batch
from workbench.models.decoder import Decoder
from workbench.speculation import Proposal, Verdict, theory


class _Odd(Exception):
    """An answer gave something of another form; its one argument is what is told of it."""


class _Exactly:
    """Draws that take every number as a Fraction, so that tensors are enumerated like tables."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def accept(self, probability: Any) -> bool:
        return self._draws.accept(_exact(probability))

    def choose(self, row: Any) -> int:
        return self._draws.choose(np.array([_exact(x) for x in row], dtype=object))


def _exact(number: Any) -> Fraction:
    return number if isinstance(number, Fraction) else Fraction(float(number))


def _whole(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer | torch.Tensor):
        raise _Odd(f"{what} was a {type(value).__name__}, where a whole number was expected")
    return int(value)


# --- spec-rule ---


def run_rule(answer: Any, drafted: list[int], p: list[list[int]], q: list[list[int]], tensors: bool = False) -> dict:
    """answer(proposal, p, draws) through everything that can happen: the distribution of (accepted, token, bonus)."""
    proposal = Proposal.chain(drafted, rows_of(q, tensors))
    rows = rows_of(p, tensors)
    fresh = [list(row) for row in (*rows_of(q, tensors), *rows_of(p, tensors))]

    def once(draws):
        verdict = answer(proposal, rows, _Exactly(draws))
        if not isinstance(verdict, Verdict):
            raise _Odd(f"a {type(verdict).__name__} came back, where a Verdict(path, token, bonus) was expected")
        path = tuple(_whole(node, "a node of the path") for node in verdict.path)
        return path, _whole(verdict.token, "the token"), bool(verdict.bonus)

    try:
        distribution = theory.enumerate_outcomes(once)
    except _Odd as odd:
        return {"odd": str(odd)}
    now = [list(row) for row in (*proposal.distributions, *rows)]
    changed = any(abs(a - b) > 1e-12 for row, was in zip(now, fresh) for a, b in zip(row, was))
    return {
        "distribution": [[list(k[0]), k[1], k[2], shown(v)] for k, v in sorted(distribution.items())],
        "changed": changed,
    }


def run_texts(answer: Any, target: list[list[int]], draft: list[list[int]], K: int, length: int) -> dict:
    """The distribution of whole texts, written in rounds of K with the answer as the rule."""
    distribution = theory.distribution_of_texts(
        distribution_of(target), distribution_of(draft), length, (1,) * K, verify=answer
    )
    return {"distribution": shown_distribution(distribution)}


# --- spec-residual ---


def left_rows(p: list, q: list, kind: str) -> tuple[Any, Any]:
    """Two rows from weights: of Fractions, of float64, or float64 that sum to 1 but for the last bits ("nearly")."""
    if kind == "nearly":
        row = rows_of([p], tensors=True)[0]
        return row, row * (1 + 2.0**-50)
    return tuple(rows_of([p, q], tensors=kind == "tensors"))


def run_left_over(answer: Any, p: list[int], q: list[int], kind: str) -> dict:
    """answer(p, q)."""
    rows, fresh = left_rows(p, q, kind), left_rows(p, q, kind)
    row = answer(*rows)
    seen = {"changed": any(list(a) != list(b) for a, b in zip(rows, fresh)), "returned": type(row).__name__}
    if isinstance(row, torch.Tensor):
        seen |= {"kind": f"a tensor of {str(row.dtype).removeprefix('torch.')}", "shape": list(row.shape)}
    elif isinstance(row, np.ndarray):
        seen |= {"kind": f"an array of {row.dtype}", "shape": list(row.shape)}
    else:
        return seen
    return seen | {"row": [shown(x if kind == "fractions" else float(x)) for x in row.flatten()]}


# --- spec-proof ---


def run_round_distribution(answer: Any, target: list[list[int]], draft: list[list[int]], K: int) -> dict:
    """distribution_of_round(target, draft, K)."""
    if lacking := missing(answer, "distribution_of_round"):
        return lacking
    distribution = answer["distribution_of_round"](distribution_of(target), distribution_of(draft), K)
    if not isinstance(distribution, dict):
        return {"returned": type(distribution).__name__}
    for key in distribution:
        if not isinstance(key, tuple):
            return {"key": f"a {type(key).__name__}"}
    return {"distribution": shown_distribution(distribution)}


def run_broken(
    answer: Any, names: list[str], kinds: list[str], target: list[list[int]], draft: list[list[int]], K: int
) -> dict:
    """broken(rules, target, draft, K), with these kinds of rules under these names."""
    if lacking := missing(answer, "broken"):
        return lacking
    given = {name: rules.ALL[kind] for name, kind in zip(names, kinds)}
    found = answer["broken"](given, distribution_of(target), distribution_of(draft), K)
    if not isinstance(found, list | tuple | set) or not all(isinstance(name, str) for name in found):
        return {"returned": type(found).__name__}
    return {"found": sorted(found)}


# --- spec-length ---


def verify_time(free: int, slope: float, rows: int) -> float:
    """Time of a pass over so many rows, in plain steps: 1 for up to `free` rows, then `slope` more for each."""
    return 1.0 + slope * max(0, rows - free)


def run_length(answer: Any, part: str, **given: Any) -> dict:
    """expected_tokens(alpha, K), expected_by_position(rates), speedup(alpha, K, c, verify) or
    best_length(alpha, c, verify, max_K)."""
    if lacking := missing(answer, part):
        return lacking
    value = answer[part](**_with_time(given))
    kind = kind_of(value)
    return {"value": value} if kind == "float" or type(value) is int else {"value": value, "returned": kind}


def _with_time(given: dict) -> dict:
    """The two numbers of a verification's time become the function that the answer gets."""
    given = dict(given)
    if "free" in given:
        given["verify"] = functools.partial(verify_time, given.pop("free"), given.pop("slope"))
    return given


def run_length_refused(answer: Any, part: str, **given: Any) -> dict:
    """The same with settings that make no sense."""
    if lacking := missing(answer, part):
        return lacking
    return refused_or_not(lambda: answer[part](**_with_time(given)))


# --- spec-rollback ---

CONFIG: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "context_length": 48,
}


@functools.lru_cache(maxsize=8)
def small_model(seed: int) -> Decoder:
    """With random weights, the same for the same seed in every process. Never changed."""
    return random_model(CONFIG, seed)


def _send(model: Decoder, kv: Contiguous, sequence: str, tokens: list[int]) -> torch.Tensor:
    """[n, V] logits after each of these tokens, sent behind what is remembered."""
    first = kv.lengths.get(sequence, 0)
    batch = Batch.of([tokens], first_positions=[first], sequences=[sequence], logits="all")
    with torch.inference_mode():
        return model(batch, kv)


def run_rollback(
    answer: Any,
    seed: int,
    text: list[int],
    drafted: list[int],
    accepted: int,
    token: int,
    draft_saw: int,
    others: bool = False,
) -> dict:
    """A round on two small models, up to the verdict; then roll_back(…), next_tokens(…), and the models answer these.

    draft_saw: how many tokens of text + drafted the draft's cache holds. others: both caches hold another text, too.
    """
    if lacking := missing(answer, "roll_back", "next_tokens"):
        return lacking
    models = small_model(seed), small_model(seed + 1)
    kvs = [Contiguous(model.config, max_sequences=2) for model in models]
    if others:
        for model, kv in zip(models, kvs):
            _send(model, kv, "another", [*drafted, *text])
    whole = [*text, *drafted]
    _send(models[0], kvs[0], "text", whole)
    if draft_saw:
        _send(models[1], kvs[1], "text", whole[:draft_saw])
    given = list(text)
    verdict = Verdict(tuple(range(accepted)), token, bonus=accepted == len(drafted))
    try:
        after = answer["roll_back"]("text", given, list(drafted), verdict, *kvs)
    except WorkbenchError as error:
        return {"refused": str(error)}
    if not isinstance(after, list | tuple):
        return {"returned": type(after).__name__}
    after = [int(one) for one in after]
    seen: dict = {"text": after, "given": given, "lengths": [kv.lengths.get("text", 0) for kv in kvs]}
    seen["others"] = [kv.lengths.get("another", 0) for kv in kvs]
    seen["next"], seen["logits"] = [], []
    for model, kv in zip(models, kvs):
        following = answer["next_tokens"]("text", after, kv)
        if not isinstance(following, list | tuple):
            return {"returned": type(following).__name__, "next_is": True}
        following = [int(one) for one in following]
        seen["next"].append(following)
        room = bool(following) and kv.lengths.get("text", 0) + len(following) <= CONFIG["context_length"]
        seen["logits"].append(shown_tensor(_send(model, kv, "text", following)[-1]) if room else None)
    return seen


def run_demand(answer: Any, probe: str, given: dict, demand: str) -> Any:
    """Another probe of this module, by its name."""
    return globals()[probe](answer, **given)
