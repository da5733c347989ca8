"""Wrong calls at the door of models: each is refused with a WorkbenchError that says why, and changes nothing.

Loading, preparing, quantizing, saving, tokenizers, and kv, by a table: what is called, and what wrong values it gets.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import random_decoder, tiny_config

from workbench.errors import WorkbenchError
from workbench.kv import make_kv
from workbench.models import load, save_checkpoint
from workbench.models.checkpoints import shipped_tokenizer
from workbench.models.fast import prepare as arrange
from workbench.models.tokenizer import Tokenizer
from workbench.quantization import QuantizationRecipe, load_quantized, quantize, save_quantized
from workbench.quantization.prepared import prepare

NO_PATH = (None, 3, 2.5, b"x", ["a"], {"a": 1}, "a\0b")
NO_NAME = (3, 2.5, b"x", ["a"], {"a": 1}, "nonsense")
NO_MODEL = (None, 3, "stdlib-10m", ["a"], {"a": 1})
NO_SEED = (None, 2.5, True, "1", [1], 2**64, -(2**63) - 1)
NO_IDS = (None, 3, "12", b"12", ["a"], {"a": 1}, [-1], [2**40], [1.5])
NO_RECIPE = (None, 4, "rtn", {"method": "rtn"}, ["rtn"])
NO_SETTINGS = (3, "bits", ["bits"], {"bitz": 4})


def recipe(**changes) -> QuantizationRecipe:
    return QuantizationRecipe(**({"method": "rtn", "bits": 4, "group": 16} | changes))


# name of the call: what it does with a value, the wrong values, words of the message
CALLS = {
    "load": (lambda s, v: load(v), NO_PATH, "name_or_path must be a path"),
    "load, an unknown name": (lambda s, v: load(v), ("stdlib-10n", "stdlib10m", "gtp2"), "did you mean"),
    "load, weights": (lambda s, v: load(s.folder, weights=v), NO_NAME, "unknown weights"),
    "load, dtype": (lambda s, v: load(s.folder, dtype=v), (*NO_NAME, torch.int8), "unknown dtype"),
    "load, device": (lambda s, v: load(s.folder, device=v), (2.5, b"x", ["a"], "gpu", "cuda:99", ""), "cannot be used"),
    "load, seed": (lambda s, v: load(s.folder, seed=v), NO_SEED, "seed must be a whole number of 64 bits"),
    "prepare": (lambda s, v: prepare(v), NO_MODEL, "prepare takes a Decoder"),
    "prepare, weights of no model": (lambda s, v: prepare(v, weights="int8"), NO_MODEL, "quantize takes a Decoder"),
    "prepare, weights": (lambda s, v: prepare(s.model, weights=v), NO_NAME, "unknown weights"),
    "prepare, linear": (lambda s, v: prepare(s.model, linear=v), NO_NAME, "unknown linear"),
    "prepare, kernels": (lambda s, v: prepare(s.model, kernels=v), NO_NAME, "kernels"),
    "prepare, compile": (lambda s, v: prepare(s.model, compile=v), (None, 1, "yes", [True]), "compile must be True or"),
    "prepare, graphs": (lambda s, v: prepare(s.model, graphs=v), (None, 3, "yes", [True]), "graphs must be True"),
    "prepare, a setting": (lambda s, v: prepare(s.model, **{v: 1}), ("lineer", "kernel"), "did you mean"),
    "prepare twice": (lambda s, v: prepare(v(s.model)), (arrange,), "prepared already"),
    "quantize": (lambda s, v: quantize(v, recipe()), NO_MODEL, "quantize takes a Decoder"),
    "quantize, recipe": (lambda s, v: quantize(s.model, v), NO_RECIPE, "must be a QuantizationRecipe"),
    "quantize, calibration": (lambda s, v: quantize(s.model, recipe(), v), (3, "text", ["text"]), "be a Calibration"),
    "quantize twice": (lambda s, v: quantize(s.quantized, v), (recipe(),), "quantized already"),
    "recipe, method": (lambda s, v: recipe(method=v), (None, *NO_NAME), "unknown method of quantization"),
    "recipe, near a method": (lambda s, v: recipe(method=v), ("rnt", "agw", "gptk"), "did you mean"),
    "recipe, bits": (lambda s, v: recipe(bits=v), (0, -1, 2.5, "4", [4], True), "bits must be a whole number"),
    "recipe, group": (lambda s, v: recipe(group=v), (0, -1, 2.5, "16", [16], True), "group must be a whole number"),
    "recipe, options": (lambda s, v: recipe(options=v), (None, 3, "a", ["a"]), "options of a recipe must be a dict"),
    "recipe, unknown option": (lambda s, v: recipe(options={v: 1}), ("symmetrik", "block", "damping"), "method rtn"),
    "recipe, skip": (lambda s, v: recipe(skip=v), (None, 3, "q", ["q"], (3,), ("",)), "skip must be a tuple"),
    "recipe, of two ways": (lambda s, v: recipe(options={v: True}), ("whole_rows",), "leave one out"),
    "recipe, numbers of other methods": (lambda s, v: recipe(method=v, group=None), ("nf4",), "has no bits"),
    "recipe, skips nothing": (lambda s, v: quantize(s.model, recipe(skip=(v,))), ("qq", "dwn"), "linear to skip"),
    "recipe from": (lambda s, v: QuantizationRecipe.from_dict(v), (None, 3, "rtn", ["method"]), "must be a dict"),
    "recipe from, a name": (
        lambda s, v: QuantizationRecipe.from_dict(v),
        ({"method": "rtn", "bit": 4}, {"metod": "rtn"}),
        "did you mean",
    ),
    "recipe from, skip": (
        lambda s, v: QuantizationRecipe.from_dict({"method": "rtn", "skip": v}),
        ("down", 3, {"down": 1}),
        "skip is a list",
    ),
    "save_checkpoint": (lambda s, v: save_checkpoint(v, s.folder), NO_MODEL, "writes a Decoder"),
    "save_checkpoint, folder": (lambda s, v: save_checkpoint(s.model, v), NO_PATH, "folder must be a path"),
    "save_checkpoint, dtype": (lambda s, v: save_checkpoint(s.model, s.folder, dtype=v), NO_NAME, "unknown dtype"),
    "save_quantized": (lambda s, v: save_quantized(v, s.folder / "q"), NO_MODEL, "takes the model that `quantize`"),
    "save_quantized, folder": (lambda s, v: save_quantized(s.quantized, v), NO_PATH, "folder must be a path"),
    "save_quantized, not empty": (lambda s, v: save_quantized(s.quantized, s.folder / v), (".",), "is not empty"),
    "save_quantized, a file": (lambda s, v: save_quantized(s.quantized, s.folder / v), ("config.json",), "is a file"),
    "load_quantized": (lambda s, v: load_quantized(v), NO_PATH, "folder must be a path"),
    "load_quantized, a plain one": (lambda s, v: load_quantized(s.folder / v), (".", "config.json"), "cannot be read"),
    "encode": (lambda s, v: s.tokenizer.encode(v), (None, 3, b"x", ["a"], {"a": 1}), "must be a str"),
    "encode, half a pair": (lambda s, v: s.tokenizer.encode(v), ("a\ud800", "\udfff"), "surrogate"),
    "encode_prompt": (lambda s, v: s.tokenizer.encode_prompt(v), (None, 3, b"x", ["a"], "\ud800"), "text"),
    "decode": (lambda s, v: s.tokenizer.decode(v), NO_IDS, "token ids must be a list"),
    "token_text": (lambda s, v: s.tokenizer.token_text(v), (None, "a", b"x", [1], -1), "token ids must be a list"),
    "a tokenizer's folder": (lambda s, v: Tokenizer.from_folder(v), NO_PATH, "folder must be a path"),
    "make_kv": (lambda s, v: make_kv(v, s.model.config), (None, *NO_NAME), "unknown kv kind"),
    "make_kv, near a kind": (lambda s, v: make_kv(v, s.model.config), ("recompte", "page"), "did you mean"),
    "make_kv, config": (lambda s, v: make_kv("contiguous", v), NO_MODEL, "must be a ModelConfig"),
    "make_kv, dtype": (
        lambda s, v: make_kv("contiguous", s.model.config, dtype=v),
        (None, 3, "float32", ["a"]),
        "dtype of a kv must be",
    ),
    "make_kv, device": (
        lambda s, v: make_kv("contiguous", s.model.config, device=v),
        (2.5, b"x", ["a"], "", "gpu"),
        "is none",
    ),
    "make_kv, a setting": (
        lambda s, v: make_kv("contiguous", s.model.config, **{v: 1}),
        ("max_token", "block_size", "capacity"),
        "contiguous kv setting",
    ),
}
WRONG = [(name, value) for name, (_, values, _) in CALLS.items() for value in values]


@pytest.fixture(scope="module")
def stand(tmp_path_factory) -> SimpleNamespace:
    model = random_decoder(tiny_config(vocab_size=64))
    folder = tmp_path_factory.mktemp("wrong") / "good"
    save_checkpoint(model, folder)
    return SimpleNamespace(
        model=model, folder=folder, quantized=quantize(model, recipe()), tokenizer=shipped_tokenizer()
    )


def state(stand: SimpleNamespace) -> tuple[dict, dict]:
    """The model's parameters and each file, by name."""
    parameters = {name: value.clone() for name, value in stand.model.state_dict().items()}
    files = {str(f): f.read_bytes() for f in stand.folder.parent.rglob("*") if f.is_file()}
    return parameters, files


@pytest.mark.parametrize(
    "name, value", WRONG, ids=[f"{name}: {value!r:.24}".partition(" at 0x")[0] for name, value in WRONG]
)
def test_a_wrong_call_is_refused_and_changes_nothing(stand, name, value, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    call, _, words = CALLS[name]
    parameters, files = state(stand)
    with pytest.raises(WorkbenchError) as refused:
        call(stand, value)
    assert words in str(refused.value)
    after, files_after = state(stand)
    assert files_after == files
    assert after.keys() == parameters.keys()
    assert all(torch.equal(after[one], parameters[one]) for one in parameters)


def test_there_are_hundreds_of_wrong_calls():
    assert len(WRONG) >= 200
