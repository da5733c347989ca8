"""The trained models that ship: they are there, they are what their cards say, transformers agrees."""

from __future__ import annotations

import json
import platform

import pytest
import torch
from safetensors import safe_open

from workbench.kv import Recompute
from workbench.models import Batch, list_models, load
from workbench.models.checkpoints import ZOO, shipped_tokenizer
from workbench.models.recipes import NOT_SHIPPED, RECIPES, STATE_VARIANTS, TOKENIZER_NAME
from workbench.models.training import held_out_loss
from workbench.pruning import recipes as pruned

ALL = {**RECIPES, **pruned.HEALING_RECIPES}
NOT_HERE = NOT_SHIPPED | pruned.NOT_SHIPPED
NAMES = sorted(ALL.keys() - NOT_HERE)
PROMPT = "import os\n\n\ndef read_lines(path):\n"


@pytest.fixture(scope="module", params=NAMES)
def name(request) -> str:
    return request.param


def card(name: str) -> dict:
    return json.loads((ZOO / name / "card.json").read_text())


def known_elsewhere(name: str) -> bool:
    """Whether a family of transformers has this shape; shared layers have none."""
    return json.loads((ZOO / name / "config.json").read_text())["model_type"] != "workbench"


def test_all_but_shared_layers_and_states_are_written_so_that_transformers_reads_them():
    """A layer with a state and a feed-forward beside it is in no family that has no others."""
    states = {name for name in NAMES if name in STATE_VARIANTS and STATE_VARIANTS[name].state_layers}
    assert {name for name in NAMES if not known_elsewhere(name)} == {"stdlib-3m-shared"} | states


def test_what_is_said_not_to_ship_does_not():
    assert not [name for name in NOT_HERE if (ZOO / name).exists()]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if known_elsewhere(name)])
def test_greedy_tokens_are_the_same_in_transformers(name):
    """One pass of theirs over our text: at every place it would have chosen the token that we chose."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = load(name)
    prompt = model.tokenizer.encode(PROMPT)
    own = ZOO / name if (ZOO / name / "tokenizer.json").is_file() else ZOO / TOKENIZER_NAME
    assert AutoTokenizer.from_pretrained(own)(PROMPT)["input_ids"] == prompt
    ids, kv = list(prompt), Recompute(model.config)
    for _ in range(48):
        ids.append(int(model(Batch.of([ids]), kv)[-1].argmax()))
    theirs = AutoModelForCausalLM.from_pretrained(ZOO / name, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0]
    ours = model(Batch.of([ids], logits="all"), kv)
    assert (ours - logits).abs().max() <= 1e-5 * logits.abs().max()
    assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == ids[len(prompt) :]


def test_a_zoo_model_is_what_its_recipe_says(name):
    model = load(name)
    assert model.config == ALL[name].config
    assert model.dtype == torch.float32
    assert model.name == name
    assert model.tokenizer.encode(PROMPT) == shipped_tokenizer().encode(PROMPT)
    with safe_open(ZOO / name / "model.safetensors", framework="pt") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}  # noqa: SIM118


def test_the_card_is_filled_in(name):
    facts, recipe = card(name), ALL[name]
    assert facts["name"] == name
    assert facts["role"] == recipe.role
    assert facts["parameters"] == recipe.config.num_parameters()
    assert facts["steps"] == recipe.steps
    assert facts["tokens_seen"] == recipe.tokens
    assert facts["seed"] == recipe.seed
    variant = recipe.role in ("variant", "state variant")
    passes = {"variant": 0.5, "state variant": 0.5, "pruned": 0.4}  # what was cut has its parent's passes behind it
    assert facts["passes"] >= passes.get(recipe.role, 2)
    assert facts["held_out"]["tokens"] > 50_000
    assert 0 < facts["held_out"]["nats_per_token"] < (4.5 if variant else 4)
    assert 0 < facts["held_out"]["bits_per_byte"] < 3
    assert facts["hours"] > 0
    for key in ("corpus", "optimizer", "schedule", "precision", "hardware", "torch"):
        assert facts[key]
    page = (ZOO / name / "README.md").read_text()
    assert f"{facts['held_out']['nats_per_token']:.4f} nats per token" in page


def test_the_target_clearly_beats_the_draft_on_held_out_text():
    target, draft = (card(n)["held_out"]["nats_per_token"] for n in ("stdlib-10m", "stdlib-1m"))
    assert target < draft - 0.2


@pytest.mark.slow
def test_the_drafts_card_has_the_loss_of_the_file_that_ships():
    """Measured again here; the text is this Python's, so another version may move it a little."""
    model, found = load("stdlib-1m"), card("stdlib-1m")
    judged = held_out_loss(model, model.tokenizer)["nats_per_token"]
    same_text = f"Python {platform.python_version()} " in found["corpus"]
    assert abs(judged - found["held_out"]["nats_per_token"]) < (0.005 if same_text else 0.3)


def test_the_list_of_models_shows_what_the_cards_say(name):
    row = next(r for r in list_models() if r["name"] == name)
    assert row["trained"]
    assert row["held_out_nats_per_token"] == card(name)["held_out"]["nats_per_token"]
    assert row["on_disk_bytes"] == (ZOO / name / "model.safetensors").stat().st_size


def test_a_pruned_card_names_its_parent_and_has_a_curve():
    for name in sorted(pruned.HEALING_RECIPES.keys() - pruned.NOT_SHIPPED):
        facts, recipe = card(name), pruned.HEALING_RECIPES[name]
        assert (facts["parent"], facts["teacher"], facts["objective"]) == ("stdlib-10m", "stdlib-10m", "kl")
        assert len(facts["kept_layers"]) == recipe.config.num_layers
        steps = [step for step, *_ in facts["held_out_by_step"]]
        assert steps == [*range(0, recipe.steps + 1, recipe.held_out_every)]


def test_the_zoo_is_small_enough_to_ship():
    assert sum(f.stat().st_size for f in ZOO.rglob("*") if f.is_file()) <= 128e6
    assert not list(ZOO.rglob("state*"))


def test_what_counts_keys_alone_and_any_panel_is_offered_models_that_attend():
    from workbench.models.checkpoints import shipped_names
    from workbench.panels.base import known_models

    with_states = {name for name in NAMES if ALL[name].config.state_layers}
    shipped = {f"stdlib-3m-{name}" for name in ("s4d", "mamba2", "delta", "rwkv7", "jamba4")}
    assert with_states == shipped <= set(shipped_names())
    attending = {name for name in shipped_names() if name not in with_states}
    assert set(shipped_names(states=False)) == set(known_models()) == attending
