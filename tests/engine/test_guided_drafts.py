"""Claims about grammars, sampling and drafts together: what is written is legal, and a draft changes nothing."""

from __future__ import annotations

import json
import re

import pytest

from workbench.decoding import Guide
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kv import Contiguous
from workbench.models import load, prepare
from workbench.speculation import ModelDraft, draft_for

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer"},
        "open": {"type": "boolean"},
    },
    "required": ["name", "size", "open"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def pair():
    return prepare(load("stdlib-10m")), prepare(load("stdlib-1m"))


@pytest.fixture(scope="module")
def guide(pair):
    return Guide.json_schema(SCHEMA, pair[0].tokenizer)


def write(pair, guide, **how):
    return generate(pair[0], "config = ", max_new_tokens=80, guide=guide, **how)


@pytest.mark.parametrize("draft", ["model", "tree", "prompt_lookup"])
@pytest.mark.parametrize("jump", ["never", "tokens"])
def test_greedy_under_a_grammar_is_the_same_with_a_draft(pair, guide, draft, jump):
    """And jumping over tokens that are the only legal one changes no token, only who wrote it."""
    alone = write(pair, guide, jump="never")
    made = {
        "model": lambda: ModelDraft(pair[1]),
        "tree": lambda: ModelDraft(pair[1], branching=(2, 2, 1)),
        "prompt_lookup": lambda: draft_for("prompt_lookup", pair[0]),
    }[draft]()
    got = write(pair, guide, draft=made, draft_length=3, jump=jump)
    assert got.tokens == alone.tokens and got.text == alone.text
    assert got.model_calls <= alone.model_calls
    assert ("jump" in got.kinds) == (jump == "tokens")
    assert all((value is None) == (kind == "jump") for value, kind in zip(got.log_probs, got.kinds))


@pytest.mark.slow
@pytest.mark.parametrize("jump", ["never", "tokens", "text"])
@pytest.mark.parametrize("draft", [None, "model"])
def test_drawn_texts_are_legal(pair, guide, jump, draft):
    made = ModelDraft(pair[1]) if draft else None
    for seed in range(3):
        got = write(pair, guide, draft=made, jump=jump, temperature=1.0, top_p=0.95, seed=seed)
        if got.finish_reason == "stop_token":
            value = json.loads(got.text)
            assert set(value) == {"name", "size", "open"} and isinstance(value["open"], bool)
            assert len(value["name"]) <= 12


def test_text_jumps_ask_the_model_least(pair, guide):
    calls = {jump: write(pair, guide, jump=jump) for jump in ("never", "tokens", "text")}
    asked = {jump: got.model_calls for jump, got in calls.items()}
    assert asked["text"] < asked["tokens"] < asked["never"]
    assert calls["never"].speculation.kinds == {"plain": len(calls["never"].tokens)}


def test_a_draft_that_proposes_illegal_tokens_is_corrected(pair):
    """The prompt is full of what the grammar forbids, and prompt lookup copies it."""
    guide = Guide.regex("[0-9]{12}", pair[0].tokenizer)
    prompt = "x = 1234 abcd 1234 abcd 1234 abcd 12"
    lookup = draft_for("prompt_lookup", pair[0])
    alone = generate(pair[0], prompt, max_new_tokens=20, guide=guide)
    got = generate(pair[0], prompt, max_new_tokens=20, guide=guide, draft=lookup, draft_length=6)
    assert got.tokens == alone.tokens and re.fullmatch("[0-9]{12}", got.text)


def test_a_guide_of_another_vocabulary_and_a_wrong_jump_are_refused(pair, guide):
    kv = Contiguous(pair[0].config)
    for given, message in (
        ({"guide": "json"}, "guide takes a workbench.decoding.Guide"),
        ({"guide": guide, "jump": "far"}, "unknown jump 'far'"),
    ):
        with pytest.raises(WorkbenchError, match=message):
            generate(pair[0], "x", max_new_tokens=4, kv=kv, **given)
    assert not kv.lengths
