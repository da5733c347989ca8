"""Lab 01, the model opened: counts are exact, attention is causal and divides 1, and the lecture's forward is ours."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import random_decoder, tiny_config
from experiment_claims import DataSheetBench
from panel_claims import shown

from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.kv import make_kv
from workbench.labs.lab01_naive_generation import decoder as opened
from workbench.models import load, prepare
from workbench.models.attention import causal_mask
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.notebook_source import Source, read_source
from workbench.panels.plots import matching

ROOT = Path(__file__).parents[3]
IDS = [5, 900, 17, 17, 3000, 44, 2, 1234, 77]


@cache
def shipped() -> Decoder:
    return load("stdlib-10m")


def measured(model: Decoder, text: str = opened.TEXT, **settings) -> list:
    return run_experiment(opened.NAME, {"model": model, "text": text, **settings}, DataSheetBench())


# -- counts ----------------------------------------------------------------------------------------------------


def test_parameters_of_each_part_are_those_of_the_shapes():
    made, c = measured(shipped()), shipped().config
    (parameters,) = matching(made, unit="parameters")
    L, d, D, F, V = c.num_layers, c.hidden_size, c.head_dim, c.intermediate_size, c.vocab_size
    expected = {
        "embedding": V * d,
        "attention": L * 2 * d * D * (c.num_heads + c.num_kv_heads),
        "MLP": L * 3 * d * F,
        "norms": (2 * L + 1) * d,
        "head": 0,
    }
    assert {part: parameters.counts[part] for part in opened.PARTS} == expected
    assert parameters.median == parameters.predicted == sum(expected.values()) == 11_015_040
    assert parameters.counts["bytes"] == 4 * 11_015_040


def test_a_head_that_is_not_the_embedding_and_norms_of_queries_are_counted_in_their_parts():
    config = tiny_config(tie_embeddings=False, qk_norm=True, family="qwen3")
    parts = {w.name: w.part for w in opened.weights_of(random_decoder(config))}
    assert parts["head.weight"] == "head" and parts["layers.0.attention.q_norm.weight"] == "norms"
    (parameters,) = matching(measured(random_decoder(config)), unit="parameters")
    assert parameters.counts["head"] == parameters.counts["embedding"] == 4096 * 32
    assert parameters.median == config.num_parameters()


def test_flops_are_the_matrix_products_and_little_more_than_two_per_parameter_and_token():
    made, c = measured(shipped()), shipped().config
    (flops,) = matching(made, unit="FLOP")
    tokens = flops.counts["tokens"]
    norms = (2 * c.num_layers + 1) * c.hidden_size
    products = 2 * (c.num_parameters() - norms) * tokens
    attention = 4 * c.num_layers * c.num_heads * c.head_dim * tokens**2
    assert tokens == 12 and flops.median == flops.predicted == products + attention
    assert flops.counts["two_per_parameter"] == 2 * 11_015_040 * 12
    assert 1 < flops.median / flops.counts["two_per_parameter"] < 1.01


# -- attention -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_row_of_attention_sums_to_one_and_nothing_lies_above_the_diagonal(kv_heads):
    look = opened.look_at(random_decoder(tiny_config(num_kv_heads=kv_heads)), IDS)
    assert len(look.probabilities) == 2
    for heads in look.probabilities:
        assert heads.shape == (4, len(IDS), len(IDS)) and bool((heads >= 0).all())
        torch.testing.assert_close(heads.sum(-1), torch.ones(4, len(IDS)))
        assert not heads.triu(1).any() and bool((heads[:, 0, 0] == 1).all())


def test_a_window_bounds_what_is_looked_at():
    model = random_decoder(tiny_config(family="mistral", sliding_window=3))
    for heads in opened.look_at(model, IDS).probabilities:
        seen = causal_mask(len(IDS), len(IDS), 3, "cpu")
        assert bool(((heads > 0) == seen).all())


def test_shares_are_those_of_a_head_by_hand():
    pattern = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0.5, 0.25, 0], [0.125, 0.25, 0.125, 0.5]])
    assert opened.shares(pattern) == {"first": [0.25, 0.125], "previous": [0.5, 0.125], "itself": [0.25, 0.5]}


def test_a_measurement_of_a_head_is_that_head(tiny_model):
    made = matching(measured(tiny_model), unit="share")
    look = opened.look_at(tiny_model, opened.tokens_to_look_at(tiny_model, opened.TEXT))
    assert [(m.settings["layer"], m.settings["head"]) for m in made] == [(i, h) for i in range(2) for h in range(4)]
    for m in made:
        given = opened.shares(look.probabilities[m.settings["layer"]][m.settings["head"]])
        assert m.samples == given["first"] and len(m.samples) == len(look.ids) - 2
        assert m.counts == {name: sum(values) / len(values) for name, values in given.items()}


def test_what_is_watched_gives_the_logits_of_the_engine(tiny_model):
    batch = Batch.of([IDS], logits="all")
    kv = make_kv("recompute", tiny_model.config)
    torch.testing.assert_close(opened.look_at(tiny_model, IDS).logits, tiny_model(batch, kv), rtol=1e-4, atol=1e-4)


def test_attention_that_looks_ahead_is_thrown_away(tiny_model, monkeypatch):
    def ahead(q, k, v, *, scale, **_):
        shares = torch.full((q.shape[1], len(q), len(k)), 1 / len(k))
        return torch.einsum("hns,shd->nhd", shares, v.repeat_interleave(q.shape[1] // v.shape[1], dim=1))

    monkeypatch.setattr(opened, "eager_attention", ahead)
    with pytest.raises(WorkbenchError, match=r"looked at .* tokens to come"):
        measured(tiny_model)


# -- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"text": "def"}, "the text has 1 tokens, and 3 to 48 are shown"),
        ({"text": "x = 1\n" * 40}, r"the text has \d+ tokens, and 3 to 48 are shown.*shorten it"),
        ({"text": ""}, "the prompt is empty"),
        ({"layer": 2}, "layer must be from 0 to 1 for this model, which has 2; got 2"),
        ({"head": 4}, "head must be from 0 to 3 for this model, which has 4; got 4"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_numbers_by_run_and_panel(tiny_model, settings, words):
    with pytest.raises(WorkbenchError, match=words):
        measured(tiny_model, **settings)
    panel = shown("decoder", model=tiny_model, **settings)
    with pytest.raises(WorkbenchError, match=words):
        panel.view(panel.settings)
    assert "error: " in panel.status.value


def test_a_model_that_is_no_longer_as_it_was_loaded_is_refused(tiny_model):
    with pytest.raises(WorkbenchError, match="arranged for inference or quantized"):
        measured(prepare(tiny_model))


# -- the panel -------------------------------------------------------------------------------------------------


def test_the_panel_runs_the_model_again_for_another_text_and_not_for_another_head(tiny_model, monkeypatch):
    runs = []
    look_at = opened.look_at
    monkeypatch.setattr(
        "workbench.labs.lab01_naive_generation.panels.decoder.look_at",
        lambda model, ids: runs.append(ids) or look_at(model, ids),
    )
    panel = shown("decoder", model=tiny_model)
    before = len(runs)
    panel.view({**panel.settings, "head": 3, "layer": 1})
    assert len(runs) == before == 1
    panel.view({**panel.settings, "text": "import os, sys"})
    assert len(runs) == 2


def test_the_panel_says_which_weights_a_layer_reads_and_which_heads_share_keys(tiny_model):
    panel = shown("decoder", model=tiny_model, layer=1, head=3)
    view = panel.view(panel.settings)
    for words in ("What layer 1 reads", "attention.k.weight", "[16, 32]", "mlp.down.weight", "[32, 64]"):
        assert words in view.extra
    bytes_of_layer = sum(w.bytes for w in opened.weights_of_layer(tiny_model, 1))
    assert bytes_of_layer == 4 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64 + 2 * 32)
    assert "Query heads 2 and 3 share the keys and values of key-value head 1." in view.words


def test_what_was_measured_of_another_text_is_not_shown(tiny_model):
    panel = shown("decoder", model=tiny_model)
    panel.run()
    assert "Counted: " in panel.view(panel.settings).words
    assert "Counted: " not in panel.view({**panel.settings, "text": "import os, sys"}).words


# -- the forward of lecture 00 ---------------------------------------------------------------------------------


def forward_by_hand(model: Decoder, ids: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What the lecture's own cells compute."""
    cells = read_source(Source(ROOT / "notebooks" / "source" / "00_start_here.py", ROOT, graded=False)).cells
    code = [cell.source for cell in cells if "def forward_by_hand(" in cell.source or "def rotate(" in cell.source]
    assert len(code) == 2
    names = {"model": model, "shape": model.config, "torch": torch}
    exec("\n".join(code), names)
    return names["forward_by_hand"](ids)


SHAPES = {
    "as shipped": tiny_config(),
    "a key and value for every head": tiny_config(num_kv_heads=4),
    "one for all heads": tiny_config(num_kv_heads=1),
    "a head of its own": tiny_config(tie_embeddings=False),
    "heads wider than d": tiny_config(head_dim=16, rope_theta=500.0, norm_eps=1e-2),
}


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_the_forward_by_hand_of_the_lecture_gives_the_engines_logits(config: ModelConfig):
    model = random_decoder(config)
    logits, stream = forward_by_hand(model, IDS)
    engine = model(Batch.of([IDS], logits="all"), make_kv("recompute", config))
    torch.testing.assert_close(logits, engine, rtol=1e-4, atol=1e-4)
    assert len(stream) == config.num_layers + 1 and all(x.shape == (len(IDS), config.hidden_size) for x in stream)
    assert math.isfinite(float(logits.sum())) and not torch.allclose(stream[0], stream[1])
