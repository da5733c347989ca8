"""Sixty requests that were put to vLLM 0.32 with the same weights (`tests/tools/record_vllm.py`)."""

from __future__ import annotations

from typing import Any

MODEL = "stdlib-1m"
PROMPT = "def read_lines(path):\n    "
USER = [{"role": "user", "content": "How do I open a file?"}]
C, H = "/v1/completions", "/v1/chat/completions"
GREEDY = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def asked() -> list[tuple[str, dict[str, Any]]]:
    """(path, body)"""
    good = [
        {},
        {"max_tokens": 1},
        {"max_tokens": 24},
        {"prompt": "import "},
        {"prompt": [5, 6, 7, 8]},
        {"prompt": ["import ", "class A"]},
        {"prompt": [[5, 6], [7, 8, 9]]},
        {"stop": "\n"},
        {"stop": ["(", ")"]},
        {"stop": ["zzz"]},
        {"stop": [":", "\n"], "max_tokens": 30},
        {"n": 2},
        {"n": 3, "temperature": 1.0, "seed": 1, "max_tokens": 3},
        {"logprobs": 0},
        {"logprobs": 1},
        {"logprobs": 5},
        {"echo": True},
        {"echo": True, "logprobs": 1, "max_tokens": 1},
        {"echo": True, "logprobs": 3},
        {"frequency_penalty": 2.0, "max_tokens": 16},
        {"presence_penalty": 2.0, "max_tokens": 16},
        {"repetition_penalty": 1.5, "max_tokens": 16},
        {"logit_bias": {"7": 100}, "max_tokens": 3},
        {"ignore_eos": True, "max_tokens": 16},
        {"top_k": 1, "temperature": 1.0, "seed": 3},
        {"top_p": 0.0001, "temperature": 1.0, "seed": 3},
        {"min_p": 1.0, "temperature": 1.0, "seed": 3},
        {"stop_token_ids": [10, 199]},
        {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 10},
        {"structured_outputs": {"regex": "[ab]{3}"}, "max_tokens": 10},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, "max_tokens": 30},
        {"user": "somebody"},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stop": "\n", "logprobs": 1},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ]
    wrong = [
        {"temperature": -1},
        {"top_p": 2},
        {"n": 0},
        {"max_tokens": 100_000},
        {"max_tokens": -1},
        {"model": "gpt-4"},
        {"prompt": []},
        {"prompt": "word " * 2_000},
        {"logprobs": 100},
        {"foo": 1},
        {"stop": 3},
        {"stream_options": {"include_usage": True}},
        {"frequency_penalty": 3},
        {"logit_bias": {"99999": 1}},
        {"response_format": {"type": "xml"}},
        {"best_of": 3},
        {"suffix": "end"},
    ]
    chats: list[dict[str, Any]] = [
        {},
        {"n": 2},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"logprobs": True, "top_logprobs": 2},
        {"max_completion_tokens": 3},
        {"messages": []},
        {"messages": [{"role": "wizard", "content": "x"}]},
    ]
    start = {"model": MODEL, "messages": USER, "max_tokens": 8, "temperature": 0}
    return [(C, GREEDY | change) for change in good + wrong] + [(H, start | change) for change in chats]
