"""Lab 01, beam search: cases and judge of beam-search.

Good implementations differ on two points of detail; a case is only used where all of them find the same best
hypothesis.
"""

from __future__ import annotations

import itertools
import math
import random

from workbench.checks.arithmetic import close, log_softmax, shown
from workbench.labs.lab01_naive_generation.checks import probes
from workbench.labs.lab01_naive_generation.checks.loop import greedy_path

MAX_DRAWS = 5_000  # to find a case; the rarest kind takes about a hundred


def beam_reference(
    case: dict, *, only_top_finish: bool = True, stop_early: bool = False
) -> tuple[list[tuple[float, list[int]]], float]:
    """(finished hypotheses as (score, tokens), best first; the narrowest margin by which one was kept or dropped).

    The two options are points on which good implementations differ: whether a candidate that ends outside the best
    num_beams still counts, and whether the search stops once no live hypothesis looks able to win.
    """
    beams, penalty, eos = case["num_beams"], case["length_penalty"], case["eos_token_ids"]
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    margin = math.inf
    for length in range(1, case["max_new_tokens"] + 1):
        candidates = []
        for total, tokens in live:
            row = probes.table_row(case["prompt_ids"] + tokens, case["vocabulary"], case["salt"])
            candidates += [(total + x, [*tokens, token]) for token, x in enumerate(log_softmax(row))]
        candidates.sort(reverse=True)
        near = candidates[: 2 * beams + 1]
        margin = min([margin, *(a[0] - b[0] for a, b in itertools.pairwise(near))])
        live = []
        for rank, (total, tokens) in enumerate(candidates):
            if len(live) == beams:
                break
            if tokens[-1] not in eos:
                live.append((total, tokens))
            elif rank < beams or not only_top_finish:
                done.append((total / length**penalty, tokens))
        done.sort(reverse=True)
        if stop_early and len(done) >= beams and live[0][0] / length**penalty <= done[beams - 1][0]:
            return done, margin
    done += [(total / case["max_new_tokens"] ** penalty, tokens) for total, tokens in live]
    return sorted(done, reverse=True), margin


def beam_case(
    draw: random.Random,
    wanted,
    *,
    beams: int = 3,
    steps: int = 5,
    vocabulary: int = 6,
    penalty: float = 1.0,
    eos: tuple[int, ...] = (),
) -> dict:
    """A case for which wanted(case, best tokens) holds, every good implementation agrees, and rounding decides
    nothing."""
    for _ in range(MAX_DRAWS):
        case = {
            "prompt_ids": [draw.randrange(vocabulary) for _ in range(3)],
            "num_beams": beams,
            "max_new_tokens": steps,
            "length_penalty": penalty,
            "eos_token_ids": list(eos),
            "vocabulary": vocabulary,
            "salt": f"beam{draw.randrange(10**6)}",
        }
        found, margin = beam_reference(case)
        if margin < 1e-3 or (len(found) > 1 and found[0][0] - found[1][0] < 1e-3):
            continue
        best = found[0]
        others = [
            beam_reference(case, only_top_finish=top, stop_early=early)[0][0]
            for top in (True, False)
            for early in (True, False)
        ]
        if all(other == best for other in others) and wanted(case, best[1]):
            return case
    raise AssertionError(f"no such case in {MAX_DRAWS:,} draws: what is wanted hardly ever happens")


def beam_greedy(case: dict) -> list[int]:
    return greedy_path(case | {"stop_token_ids": case["eos_token_ids"]})


def several_greedy(case: dict) -> list[int]:
    """The best of num_beams greedy paths from the best first tokens: what beams find that are not ranked together."""
    prompt = case["prompt_ids"]
    row = probes.table_row(prompt, case["vocabulary"], case["salt"])
    starts = sorted(range(len(row)), key=lambda t: -row[t])[: case["num_beams"]]
    rest = case["max_new_tokens"] - 1
    paths = [[start, *beam_greedy(case | {"prompt_ids": [*prompt, start], "max_new_tokens": rest})] for start in starts]
    return max(paths, key=lambda tokens: log_probability(case, tokens))


def not_greedy(case: dict, best: list[int]) -> bool:
    return best not in (beam_greedy(case), several_greedy(case))


def one_beam_cases(draw: random.Random) -> list[dict]:
    return [beam_case(draw, lambda case, best: True, beams=1, steps=n) for n in (4, 6)]


def better_path_cases(draw: random.Random) -> list[dict]:
    return [beam_case(draw, not_greedy, beams=b, penalty=0.0) for b in (2, 3, 4)]


def changes_with(penalty: float):
    """The best hypothesis is another one under `penalty` than under the case's own, or when the prompt counts."""

    def wanted(case: dict, best: list[int]) -> bool:
        return beam_reference(case | {"length_penalty": penalty})[0][0][1] != best

    return wanted


def length_cases(draw: random.Random) -> list[dict]:
    kinds = ((1.0, 0.0), (2.0, 0.0), (0.0, 1.0), (1.0, 2.0))
    return [beam_case(draw, changes_with(other), penalty=own, eos=(1,)) for own, other in kinds]


def log_probability(case: dict, tokens: list[int]) -> float:
    """log p(tokens | prompt) under the case's table model."""
    total, text = 0.0, list(case["prompt_ids"])
    for token in tokens:
        total += log_softmax(list(probes.table_row(text, case["vocabulary"], case["salt"])))[token]
        text.append(token)
    return total


def judge_beam(case: dict, seen: dict) -> str | None:
    """The first hypothesis is the best one, with its score; the others follow in order."""
    if "returned" in seen or seen["best"] is None:
        return f"a list of (tokens, score), best first, was expected; got {seen.get('returned', 'an empty list')}"
    score, tokens = beam_reference(case)[0][0]
    first, penalty = seen["best"], case["length_penalty"]
    if first["tokens"] != tokens:
        return (
            f"the first hypothesis was {first['tokens']} with score {first['score']:.4f}; "
            f"expected {tokens} with {score:.4f}: rank all extensions by their summed log-probabilities, put the "
            "finished aside, go on with the best num_beams unfinished ones; a score is log-probability / "
            f"len(tokens) ** {penalty}"
        )
    if not close(first["score"], score, 1e-3):
        return (
            f"{tokens} came first, with score {first['score']:.4f}; expected {score:.4f}: the sum of log_softmax of "
            f"each chosen token is {log_probability(case, tokens):.4f}, divided by len(tokens) ** length_penalty = "
            f"{len(tokens)} ** {penalty}"
        )
    scores = [h["score"] for h in (first, *seen["others"])]
    if scores != sorted(scores, reverse=True):
        return f"the scores came as {shown(scores)}: best first was expected"
    return None
