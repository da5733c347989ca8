"""What the checks do with an answer, and what they see. Probes run beside the answer and hold no expected value.

Each returns plain numbers, lists and dicts. The models in here are tables: made up from a text and a salt, the same
in every process, so that a judge elsewhere can work out by itself what a right answer does with them.
"""

from __future__ import annotations

import itertools
import random
from functools import lru_cache
from typing import Any

import torch

from workbench.checks.tensors import as_tensor, kind_of


def table_row(text: tuple[int, ...] | list[int], vocabulary: int, salt: str) -> tuple[float, ...]:
    """The `vocabulary` logits, between -3 and 3, which the made-up model of that salt predicts after `text`."""
    return _table_row(tuple(text), vocabulary, salt)


@lru_cache(maxsize=20_000)
def _table_row(text: tuple[int, ...], vocabulary: int, salt: str) -> tuple[float, ...]:
    draw = random.Random(f"{salt}/{text}")
    return tuple(round(draw.uniform(-3.0, 3.0), 3) for _ in range(vocabulary))


class Runaway(RuntimeError):
    """The answer went on calling the model long after it should have stopped."""


def run_loop(
    answer: Any,
    prompt_ids: list[int],
    max_new_tokens: int,
    stop_token_ids: list[int],
    vocabulary: int,
    salt: str,
    rows: str = "all",
    take: int | None = None,
) -> dict:
    """Run a token loop over a table model, choosing greedily, and record every call.

    rows: "all" has forward return a row for each token [M = len(text), V], "last" only the last [1, V].
    take: stop asking after that many tokens.
    """
    texts: list[Any]
    prompt, texts, choices = list(prompt_ids), [], []
    limit = max_new_tokens + 8

    def forward(token_ids):
        if len(texts) >= limit:
            raise Runaway(f"forward was called more than {limit} times for max_new_tokens={max_new_tokens}")
        text = [int(token) for token in token_ids]
        texts.append(text)
        ends = range(1 if rows == "all" else max(len(text), 1), len(text) + 1)
        table = [table_row(text[:end], vocabulary, salt) for end in ends]
        return torch.tensor(table).reshape(-1, vocabulary)

    def choose(logits, token_ids):
        shape, row = list(logits.shape), logits.reshape(-1, vocabulary)[-1].tolist()
        token = max(range(vocabulary), key=row.__getitem__)
        choices.append({"shape": shape, "logits": row, "token_ids": [int(t) for t in token_ids], "chose": token})
        return token

    made = answer(forward, prompt, choose, max_new_tokens, stop_token_ids=tuple(stop_token_ids))
    calls_when_made = len(texts)
    if not hasattr(made, "__iter__"):
        return {"returned": type(made).__name__}
    tokens = [int(token) for token in itertools.islice(iter(made), limit if take is None else take)]
    return {
        "tokens": tokens,
        "texts": texts,
        "choices": choices,
        "calls_when_made": calls_when_made,
        "prompt_after": prompt,
    }


def _tensor_seen(given: torch.Tensor, came: Any) -> dict:
    came = as_tensor(came)
    if not isinstance(came, torch.Tensor):
        return {"returned": type(came).__name__}
    return {
        "logits": came,
        "shape": list(came.shape),
        "dtype": str(came.dtype).removeprefix("torch."),
        "input_after": given,
    }


def run_filter(answer: Any, stage: str, logits: list, setting: float, dtype: str = "float32") -> dict:
    """Call the function named `stage` in a dict of filters, as `filter(logits [..., V], setting)`."""
    if not hasattr(answer, "keys") or stage not in answer:
        return {"missing": stage, "returned": type(answer).__name__}
    given = torch.tensor(logits, dtype=getattr(torch, dtype))
    return _tensor_seen(given, answer[stage](given, setting))


def run_penalty(answer: Any, logits: list[float], token_ids: list[int], penalty: float, dtype: str = "float32") -> dict:
    """Call `penalize(logits [V], token_ids, penalty)`."""
    given = torch.tensor(logits, dtype=getattr(torch, dtype))
    return _tensor_seen(given, answer(given, list(token_ids), penalty))


def run_beam(
    answer: Any,
    prompt_ids: list[int],
    num_beams: int,
    max_new_tokens: int,
    length_penalty: float,
    eos_token_ids: list[int],
    vocabulary: int,
    salt: str,
) -> dict:
    """Run a beam search over a table model and record the texts of every call and the hypotheses in their order."""
    calls: list[Any]
    prompt, calls = list(prompt_ids), []

    def forward_many(texts):
        if len(calls) >= max_new_tokens + 8:
            raise Runaway(f"forward_many was called more than {len(calls)} times for {max_new_tokens=}")
        calls.append([[int(token) for token in text] for text in texts])
        table = [table_row(text, vocabulary, salt) for text in calls[-1]]
        return torch.tensor(table).reshape(-1, vocabulary)

    found = answer(
        forward_many,
        prompt,
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        length_penalty=length_penalty,
        eos_token_ids=tuple(eos_token_ids),
    )
    if not isinstance(found, list | tuple):
        return {"returned": type(found).__name__}
    hypotheses = [_hypothesis(item) for item in found]
    best, others = (hypotheses[0], hypotheses[1:]) if hypotheses else (None, [])
    return {"best": best, "others": others, "calls": calls, "prompt_after": prompt}


def _hypothesis(item: Any) -> dict:
    tokens, score = (item.tokens, item.score) if hasattr(item, "tokens") else item
    return {"tokens": [int(token) for token in tokens], "score": float(score)}


def run_count(answer: Any, prompt_tokens: int, new_tokens: int) -> dict:
    """Call `count_rows(prompt_tokens, new_tokens)`."""
    rows = answer(prompt_tokens, new_tokens)
    return {"rows": rows, "returned": kind_of(rows)}


def run_demand(answer: Any, probe: str, given: dict, demand: str) -> Any:
    """Another probe of this module, by its name."""
    return globals()[probe](answer, **given)
