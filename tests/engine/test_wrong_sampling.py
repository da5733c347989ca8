"""Wrong settings of sampling, filters, beams, stops, seeds and guides: each gets its error and changes nothing."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from workbench.decoding import Guide, SamplingSettings, filters
from workbench.decoding.beam import beam_search, generate_beam
from workbench.decoding.draws import choose
from workbench.decoding.filters import filter_stages
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kv import make_kv

NO_NUMBER = (math.nan, math.inf, -math.inf, "1", None, True, 1j, [1.0], 10**400)
NO_WHOLE = (0, -1, 1.5, True, "1", math.nan, [1])
SETTINGS = {
    "temperature": (-1, -5e-324, *NO_NUMBER),
    "top_k": NO_WHOLE,
    "top_p": (0, -0.1, 1.01, *NO_NUMBER),
    "min_p": (-0.1, 1.01, *NO_NUMBER),
    "repetition_penalty": (0, -1, *NO_NUMBER),
    "presence_penalty": NO_NUMBER,
    "frequency_penalty": NO_NUMBER,
}
GENERATE = {
    "stop": (3, "", ["a", ""], [1], [None], "\ud800", {"a": 1}, b"a"),
    "stop_token_ids": (3, "3", [-1], [4096], [True], [1.0], [None], {3: 4}, [10**30]),
    "seed": (-1, 2**63, 1.0, True, "7", math.nan, [1]),
    "max_new_tokens": (*NO_WHOLE, None, 10**9),
    "guide": ("a", 3, {"type": "object"}),
    "filters": ({"top_q": abs}, {"top_k": abs}, {"top_p": 3}, 3, "top_p"),
    "cancel": (True, 3),
    "temprature": (1.0,),
}
BEAM = {
    "num_beams": (*NO_WHOLE, None),
    "max_new_tokens": (*NO_WHOLE, None, 10**9),
    "length_penalty": (11, -11, *NO_NUMBER),
    "early_stopping": (None, 1, "always", math.nan),
    "num_return": (*NO_WHOLE, 3, None),
    "stop_token_ids": (3, "3", [-1], [4096], [True], [1.0], {3: 4}),
    "cancel": (True, 3),
}
LOGITS = torch.tensor([1.0, 2.0, 3.0])
NAN, NONE_LEFT, INF = (torch.tensor([x, x, x]) for x in (math.nan, -math.inf, math.inf))
FUNCTIONS = {
    "penalty of a batch": partial(filters.penalize_presence, LOGITS[None], [1], 1.0),
    "penalty of an id beyond": partial(filters.penalize_presence, LOGITS, [3], 1.0),
    "penalty of a negative id": partial(filters.penalize_frequency, LOGITS, [-1], 1.0),
    "penalty that overflows": partial(
        filter_stages, SamplingSettings(repetition_penalty=1e-6), LOGITS * 1e35, [0, 1, 2], []
    ),
    "choose from NaN": partial(choose, NAN),
    "choose from nothing": partial(choose, NONE_LEFT),
    "choose from inf": partial(choose, INF),
    "stages of NaN": partial(filter_stages, SamplingSettings(), NAN, [], []),
    "stages of a batch": partial(filter_stages, SamplingSettings(), LOGITS[None], [], []),
    "stages with an unknown filter": partial(filter_stages, SamplingSettings(), LOGITS, [], [], {"top_q": abs}),
    "stages with a filter that returns too little": partial(
        filter_stages, SamplingSettings(1.0, top_k=2), LOGITS, [], [], {"top_k": lambda x, k: x[:k]}
    ),
    "stages with a filter that returns nothing": partial(
        filter_stages, SamplingSettings(1.0, top_k=2), LOGITS, [], [], {"top_k": lambda x, k: None}
    ),
    "beams of NaN": partial(beam_search, lambda texts: NAN[None], [0], num_beams=2, max_new_tokens=2),
    "beams of nothing": partial(beam_search, lambda texts: NONE_LEFT[None], [0], num_beams=2, max_new_tokens=2),
}
GUIDES = {
    "regex": ("(", "a{1000000}", "(?=a)", 3, None, b"a", "a" * 20_000),
    "json_schema": (3, None, "{", {"type": "nothing"}, {"minimum": 1, "not": {}}, [], {"pattern": "("}),
    "grammar": ("", "start", "start: b", 3, None, 'start: %json {"type": "string"}', "a" * 70_000),
}


def cases(table: dict) -> list:
    return [pytest.param(name, value, id=f"{name}={value!r:.20}") for name in table for value in table[name]]


@pytest.fixture(scope="module")
def kv(tiny_model):
    return make_kv("contiguous", tiny_model.config, max_sequences=4, max_tokens=64)


@pytest.mark.parametrize("name, value", cases(SETTINGS))
def test_settings(name, value, tiny_model, kv):
    if value is None and name == "top_k":
        return
    with pytest.raises(WorkbenchError, match=name):
        SamplingSettings(**{name: value})
    with pytest.raises(WorkbenchError, match=name):
        generate(tiny_model, [1, 2], kv=kv, **{name: value})
    if not name.endswith("penalty"):
        before = LOGITS.clone()
        with pytest.raises(WorkbenchError, match=name):
            filters.FILTERS[name](LOGITS, value)
        assert torch.equal(LOGITS, before)
    assert not kv.lengths and not kv.bytes_in_use


@pytest.mark.parametrize("name, value", cases(GENERATE))
def test_generate(name, value, tiny_model, kv):
    rows = torch.random.get_rng_state()
    with pytest.raises(WorkbenchError):
        generate(tiny_model, [1, 2], kv=kv, **{"max_new_tokens": 4, "temperature": 1.0, name: value})
    assert not kv.lengths and not kv.bytes_in_use and torch.equal(rows, torch.random.get_rng_state())


@pytest.mark.parametrize("name, value", cases(BEAM))
def test_beams(name, value, tiny_model, kv):
    with pytest.raises(WorkbenchError):
        generate_beam(tiny_model, [1, 2], kv=kv, **{"max_new_tokens": 4, "num_beams": 2, name: value})
    assert not kv.lengths and not kv.bytes_in_use


@pytest.mark.parametrize("call", FUNCTIONS)
def test_functions(call):
    with pytest.raises(WorkbenchError):
        FUNCTIONS[call]()
    assert LOGITS.tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind, source", cases(GUIDES))
def test_guides(kind, source, tiny_model):
    with pytest.raises(WorkbenchError):
        getattr(Guide, kind)(source, tiny_model.tokenizer)
