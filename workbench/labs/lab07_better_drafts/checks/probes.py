"""Lab 07: what the checks do with an answer, and what they see. Probes run beside the answer and hold no expected
value."""

from __future__ import annotations

import random
from typing import Any

import torch

from workbench.checks.tensors import as_list, kind_of, missing, shown
from workbench.grading.check import refused_or_not
from workbench.labs.lab07_better_drafts.checks.parts import Grammar
from workbench.speculation import Outcome

# --- drafts-lookup ---


def run_lookup(answer: Any, text: list[int], K: int, min_ngram: int, max_ngram: int) -> dict:
    """answer(token_ids, K, min_ngram, max_ngram)."""
    given = list(text)
    found = answer(given, K, min_ngram, max_ngram)
    copied = as_list(found)
    if copied is None:
        return {"returned": type(found).__name__}
    return {"copied": copied, "changed": given != text}


# --- drafts-threshold ---


def run_rounds(answer: Any, settings: dict, rounds: list[dict]) -> dict:
    """A controller through rounds of {"confidences", "accepted"} or {"plain": True}: tokens drafted, threshold after
    it.

    A round drafts until `go_on` says no, `limit()` is reached, or there are no more confidences.
    """
    policy, seen = answer(**settings), []
    for told in rounds:
        limit = policy.limit()
        if kind_of(limit) != "int":
            return {"limit": type(limit).__name__}
        limit = int(limit)
        drafted: list[float] = []
        for confidence in [] if "plain" in told else told["confidences"][:limit]:
            drafted.append(confidence)
            if not policy.go_on(confidence):
                break
        accepted = 0 if "plain" in told else min(told["accepted"], len(drafted))
        policy.learn(Outcome(len(drafted), accepted, tuple(drafted), 0.0, 0.0, 1 + len(drafted), "plain" in told))
        seen.append({"limit": limit, "drafted": len(drafted), "threshold": float(policy.threshold)})
    fresh = policy.copy()
    return {"rounds": seen, "copied": float(fresh.threshold), "shared": fresh is policy}


# --- drafts-tree-mask ---


def run_tree(answer: Any, parents: list[int], cached: int) -> dict:
    """answer(parents, cached): (positions, mask)."""
    given = list(parents)
    found = answer(given, cached)
    if not isinstance(found, tuple | list) or len(found) != 2:
        return {"returned": type(found).__name__}
    return {"positions": shown(found[0]), "mask": shown(found[1]), "changed": given != parents}


def run_tree_refused(answer: Any, parents: list[int], cached: int) -> dict:
    return refused_or_not(lambda: answer(list(parents), cached))


# --- drafts-medusa ---


def head_logits(seed: int, heads: int, vocab: int) -> torch.Tensor:
    """[heads, V], no two equal in a row."""
    draw = random.Random(f"heads/{seed}")
    rows = [draw.sample(range(-40, 40), vocab) for _ in range(heads)]
    return torch.tensor(rows, dtype=torch.float32) / 8


def run_cross(answer: Any, widths: list[int]) -> dict:
    """all_paths(widths)."""
    if lacking := missing(answer, "all_paths"):
        return lacking
    found = answer["all_paths"](list(widths))
    paths = None if as_list(found) is None else [as_list(path) for path in found]
    return {"returned": type(found).__name__} if paths is None or None in paths else {"paths": paths}


def run_candidates(answer: Any, seed: int, heads: int, vocab: int, paths: list[list[int]]) -> dict:
    """candidates(logits, paths): (tokens, parents)."""
    if lacking := missing(answer, "candidates"):
        return lacking
    logits = head_logits(seed, heads, vocab)
    found = answer["candidates"](logits, [tuple(path) for path in paths])
    if not isinstance(found, tuple | list) or len(found) != 2 or None in map(as_list, found):
        return {"returned": type(found).__name__}
    changed = not torch.equal(logits, head_logits(seed, heads, vocab))
    return {"tokens": as_list(found[0]), "parents": as_list(found[1]), "changed": changed}


def run_acceptance(answer: Any, tokens: list[int], parents: list[int], best: list[int]) -> dict:
    """accept(tokens, parents, best): (path, token)."""
    if lacking := missing(answer, "accept"):
        return lacking
    found = answer["accept"](list(tokens), list(parents), list(best))
    if not isinstance(found, tuple | list) or len(found) != 2 or as_list(found[0]) is None:
        return {"returned": type(found).__name__}
    return {"path": as_list(found[0]), "token": int(found[1])}


# --- drafts-jump ---


def run_jump(answer: Any, part: str, pieces: list, vocabulary: list[str], before: str = "", salt: int = 0) -> dict:
    """allowed or forced at the state after the text `before`; forced_text there; or write from the beginning to the
    end."""
    if lacking := missing(answer, "allowed", "forced_text", "forced", "write"):
        return lacking
    grammar = Grammar.of(*pieces)
    if part == "write":
        return _write(answer["write"], grammar, vocabulary, salt)
    state = grammar.after(0, before)
    if part == "forced_text":
        text = answer[part](grammar, state)
        return {"text": text} if isinstance(text, str) else {"returned": type(text).__name__}
    found = answer[part](grammar, state, list(vocabulary))
    tokens = sorted(found) if part == "allowed" and isinstance(found, set) else as_list(found)
    return {"returned": type(found).__name__} if tokens is None else {"tokens": [int(t) for t in tokens]}


def chosen(tokens: list[int], allowed: list[int], salt: int) -> int:
    """What the model would write after these tokens: any allowed one, always the same."""
    return random.Random(f"{salt}/{tokens}").choice(sorted(allowed))


def _write(write: Any, grammar: Grammar, vocabulary: list[str], salt: int) -> dict:
    asked: list[list[list[int]]] = []

    def choose(tokens, allowed):
        asked.append([list(tokens), sorted(allowed)])
        if len(asked) > 200:
            raise RuntimeError("write asked the model more than 200 times")
        return chosen(list(tokens), allowed, salt)

    found = write(grammar, list(vocabulary), choose)
    tokens = as_list(found[0]) if isinstance(found, tuple | list) and len(found) == 2 else None
    if tokens is None:
        return {"returned": type(found).__name__}
    return {"tokens": [int(t) for t in tokens], "calls": found[1], "asked": asked}


def run_demand(answer: Any, probe: str, given: dict, demand: str) -> Any:
    """Another probe of this module, by its name."""
    return globals()[probe](answer, **given)
