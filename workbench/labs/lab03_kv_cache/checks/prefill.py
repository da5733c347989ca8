"""Lab 03, chunked prefill: cases and judges of kv-chunks."""

from __future__ import annotations

import random

import torch

from workbench.labs.lab01_naive_generation.checks.loop import counted
from workbench.labs.lab03_kv_cache.checks.cache import VOCABULARY, reference_logits, shape


def prefill_case(
    draw: random.Random, prompt: int, chunk_size: int, *, remembered: int = 0, sequence: str | int = 0
) -> dict:
    def text(length: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(length)]

    return {
        "config": shape(heads=4, kv_heads=2, layers=2, size=8),
        "seed": draw.randrange(10**6),
        "prompt_ids": text(prompt),
        "chunk_size": chunk_size,
        "sequence": sequence,
        "remembered": text(remembered),
    }


def prefill_cases(*sizes: tuple[int, int], **more):
    """Cases of (tokens of the prompt, chunk size)."""
    return lambda draw: [prefill_case(draw, prompt, chunk, **more) for prompt, chunk in sizes]


def expected_sizes(case: dict) -> list[int]:
    """[chunk, chunk, …, what is left]"""
    prompt, chunk = len(case["prompt_ids"]), case["chunk_size"]
    return [min(chunk, prompt - start) for start in range(0, prompt, chunk)]


def _told(case: dict) -> str:
    before = f" after {len(case['remembered'])} remembered tokens" if case["remembered"] else ""
    return f"a prompt of {counted(case['prompt_ids'])} in chunks of {case['chunk_size']}{before}"


def judge_calls(case: dict, seen: dict) -> str | None:
    """Every token once, in order, at its own position, in chunks of the size asked for; one row of logits a call."""
    calls, sizes = seen["calls"], expected_sizes(case)
    came = [len(call["tokens"]) for call in calls]
    told = f"{_told(case)}: the model was called with {came} tokens, expected {sizes}"
    if "error" in seen:
        return f"{told}; then came {seen['error']}"
    name = str(case["sequence"])
    if any(call["sequences"] != [name] for call in calls):
        first = next(call["sequences"] for call in calls if call["sequences"] != [name])
        return (
            f"{_told(case)}: a batch came for the sequences {first}, expected [{name!r}]: "
            "Batch.of(…, sequences=[sequence])"
        )
    if came != sizes:
        return f"{told}: every token once, full chunks first, then what is left"
    sent = [token for call in calls for token in call["tokens"]]
    if sent != case["prompt_ids"]:
        return f"{_told(case)}: the tokens sent were {sent}, expected {case['prompt_ids']}"
    first = len(case["remembered"])
    at = [position for call in calls for position in call["positions"]]
    if at != list(range(first, first + len(sent))):
        return f"{_told(case)}: they were sent as positions {at}, expected {first} … {first + len(sent) - 1}"
    rows = [call["logit_rows"] for call in calls]
    if max(rows) > 1:
        return f"{_told(case)}: logits of {rows} rows were asked for; the last row of a chunk is enough (the default)"
    if seen["prompt_after"] != case["prompt_ids"]:
        return f"the prompt's list was changed to {seen['prompt_after']}: leave the caller's list as it is"
    return None


def judge_prefill(case: dict, seen: dict) -> str | None:
    """The logits after the prompt's last token, those of one shot without a cache; all of it remembered."""
    if "error" in seen:
        sent = [len(call["tokens"]) for call in seen["calls"]]
        return f"{_told(case)}: after calls with {sent} tokens: {seen['error']}"
    text = case["remembered"] + case["prompt_ids"]
    if "returned" in seen:
        return f"{_told(case)}: {seen['returned']} came back, expected logits [1, V]: what the last call gave"
    if seen["shape"] != [1, VOCABULARY]:
        return (
            f"{_told(case)}: logits of shape {seen['shape']} came back, expected [1, V] = [1, {VOCABULARY}], "
            "those after the prompt's last token"
        )
    right = reference_logits(case["config"], case["seed"], text)
    came = torch.tensor(seen["logits"])[0]
    far = (came - right).abs().amax(dim=-1) / right.abs().max()  # [S] from each row of the one shot
    if not far[-1] < 1e-4:
        near = [int(i) for i in (far < 1e-4).nonzero()]
        return (
            f"{_told(case)}: the logits that came back are those after position {near[0] if near else 'none'} of one"
            f" shot, expected those after the prompt's last token, at position {len(text) - 1}"
        )
    expected = [[str(case["sequence"]), len(text)]]
    if seen["lengths"] != expected:
        return f"{_told(case)}: afterwards the kv remembers {seen['lengths']}, expected {expected}"
    return None
