"""Lab 12: what each experiment says follows from shapes and losses, panels show every state, published factors are
computed again."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from conftest import random_decoder, tiny_config
from experiment_claims import DataSheetBench, ExperimentClaims, brief_runs, on_model
from panel_claims import PanelClaims, shown

from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.experiments.held_out import passages_for
from workbench.labs.lab12_pruning_and_distillation import (
    cheaper,
    drop_layer,
    healing,
    importance,
    masks,
    pruned_draft,
    shapes,
)
from workbench.models import load, training
from workbench.models.checkpoints import ZOO, shipped_tokenizer
from workbench.models.evaluation import acceptance_rate, held_out_passages
from workbench.models.recipes import RECIPES
from workbench.panels.plots import matching
from workbench.pruning import Cut, Importance, by_magnitude, loss_without
from workbench.pruning.curves import Curve, Point, curve_of, entry_of, healing_curves
from workbench.pruning.healing import heal
from workbench.pruning.recipes import HEALING_RECIPES, NOT_SHIPPED, HealingRecipe
from workbench.speculation.theory import speedup

TEXT = {"context": 32, "passages": 2}
CALIBRATED = {"sequences": 2, "length": 16}
SMALL = {
    "pruning.drop_layer": {"several": 3, **TEXT},
    "pruning.importance": {"groups": 4, **CALIBRATED, **TEXT},
    "pruning.shapes": {"cached": 16, "repeats": 2, **CALIBRATED, **TEXT},
    "pruning.masks": {"group": 16, "size": 64, "repeats": 2, **CALIBRATED, **TEXT},
    "pruning.healing": {"steps": 2, "every": 1},
    "pruning.cheaper": {},
    "pruning.pruned_draft": {
        "drafts": "stdlib-1m",
        "tokens": 512,
        "cached": 16,
        "prompts": 1,
        "new_tokens": 8,
        "repeats": 2,
    },
}
MOVED = {
    "drop_layer": {"context": 64},
    "importance": {"part": "layers"},
    "shapes": {"cached": 32},
    "masks": {"pattern": "2:4"},
    "healing": {"against": "FLOPs"},
    "cheaper": {"child_billions": 4},
    "pruned_draft": {"draft_length": 5},
}


@pytest.fixture(scope="module")
def model():
    """A llama of four layers with the tokenizer of the shipped models, large enough to be cut to a third."""
    config = tiny_config(
        vocab_size=4096, hidden_size=128, intermediate_size=512, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32
    )
    made = random_decoder(config, seed=3, tokenizer=shipped_tokenizer())
    return {"model": made}


@pytest.fixture(scope="module", autouse=True)
def tiny_recipe():
    """A healing of the small draft on a little text, under the name of a real one."""
    config = dataclasses.replace(RECIPES["stdlib-1m"].config, num_layers=1)
    small = {"sequences_per_step": 2, "sequence_length": 16, "parent": "stdlib-1m"}
    recipe = HealingRecipe(healing.DRAFT, "draft", config, 6, **small)
    few = training.training_files()[:3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(healing, "HEALING_RECIPES", {**HEALING_RECIPES, healing.DRAFT: recipe})
        patch.setattr(training, "training_files", lambda: few)
        patch.setattr(healing, "PASSAGES", 2)
        patch.setattr(healing, "PASSAGE", 32)
        yield recipe


@pytest.fixture(scope="module")
def runs(model, tiny_recipe):
    return brief_runs(SMALL, model)


class TestExperiments(ExperimentClaims):
    lab, small = 12, SMALL


class TestPanels(PanelClaims):
    small, moved = SMALL, MOVED


def run(name: str, model: dict, **changes):
    return run_experiment(name, {**on_model(name, SMALL[name], model), **changes}, DataSheetBench())


# -- layers
# --------------------------------------------------------------------------------------------------------------


def test_every_layer_is_left_out_once_and_several_in_both_ways(runs):
    made = runs["pruning.drop_layer"]
    [whole] = matching(made, measured="whole")
    single = matching(made, measured="one layer")
    assert [m.settings["layer"] for m in single] == [0, 1, 2, 3]
    assert all(m.median == pytest.approx(whole.median + m.counts["increase"]) for m in single)
    prices = {m.settings["layer"]: m.counts["increase"] for m in single}
    cheapest = sorted(prices, key=prices.get)
    for m in matching(made, measured="several", way=drop_layer.TOGETHER):
        assert m.settings["dropped"] == sorted(cheapest[: int(m.counts["layers"])])
    for m in matching(made, measured="several"):
        assert m.predicted == pytest.approx(whole.median + sum(prices[layer] for layer in m.settings["dropped"]))
    assert [m.counts["layers"] for m in matching(made, way=drop_layer.ONE_BY_ONE)] == [2, 3]


def test_one_by_one_takes_what_is_cheapest_after_each_cut(model):
    decoder, rows = model["model"], passages_for(model["model"], 32, 2)
    dropped: list[int] = []
    for m in [None, *matching(run("pruning.drop_layer", model), way=drop_layer.ONE_BY_ONE)]:
        left = [n for n in range(4) if n not in dropped]
        dropped.append(min(left, key=lambda n: loss_without(decoder, rows, Cut(layers=[*dropped, n]))))
        if m is not None:
            assert m.settings["dropped"] == sorted(dropped)


def test_a_model_whose_loss_is_no_number_is_refused(model):
    broken = random_decoder(tiny_config(vocab_size=4096), tokenizer=shipped_tokenizer())
    with torch.no_grad():
        broken.norm.weight[0] = torch.nan
    with pytest.raises(WorkbenchError, match=r"the loss of .* is nan; look at its weights"):
        run("pruning.drop_layer", {"model": broken})


# -- importance
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", importance.PARTS)
@pytest.mark.parametrize("layer", [importance.EVERY, 2])
def test_pieces_are_all_of_a_part_once(model, part, layer):
    config, scores = model["model"].config, by_magnitude(model["model"])
    pieces = importance.pieces_of(part, scores, config, layer=layer, groups=5)
    cuts = [piece.cut for piece in pieces]
    if part == "layers":
        assert [list(cut.layers) for cut in cuts] == [[0], [1], [2], [3]]
    elif part == "kv_groups":
        assert [dict(cut.kv_groups) for cut in cuts] == [{n: [g]} for n in range(4) for g in range(2)]
    elif part == "channels":
        assert sorted(c for cut in cuts for c in cut.channels) == list(range(128))
    else:
        for n in range(4) if layer < 0 else [layer]:
            assert sorted(i for cut in cuts for i in cut.neurons[n]) == list(range(512))
    if part in importance.GROUPED:  # in the order of their scores
        assert [piece.score for piece in pieces] == sorted(piece.score for piece in pieces)


def test_a_rank_is_that_of_the_pieces(runs):
    made = runs["pruning.importance"]
    ranks = matching(made, measured="rank")
    assert [m.settings["score"] for m in ranks] == list(importance.SCORES)
    for rank in ranks:
        pieces = matching(made, measured="piece", score=rank.settings["score"])
        assert len(pieces) == 4
        order = sorted(pieces, key=lambda m: m.counts["score"])
        places = [sorted(pieces, key=lambda m: m.median).index(m) for m in order]
        squares = sum((a - b) ** 2 for a, b in enumerate(places))
        assert rank.median == pytest.approx(1 - 6 * squares / (4 * 15))


def test_each_score_makes_groups_of_its_own_and_single_pieces_are_measured_once(model):
    """Groups by one score, ranked by the other, said less of the other than it knows."""
    made = run("pruning.importance", model)
    names = {kind: matching(made, measured="piece", score=kind) for kind in importance.SCORES}
    first, second = ([m.median for m in of_kind] for of_kind in names.values())
    assert first != second
    made = run("pruning.importance", model, part="layers")
    first, second = ([m.median for m in matching(made, measured="piece", score=kind)] for kind in importance.SCORES)
    assert first == second


def test_groups_of_heads_are_those_of_layers_that_attend():
    hybrid = load("stdlib-3m-jamba4")
    made = run("pruning.importance", {"model": hybrid}, part="kv_groups")
    pieces = [m.settings["piece"] for m in matching(made, measured="piece", score="activations")]
    assert pieces == [f"layer {n}, group {g}" for n in (2, 6) for g in range(5)]


def test_scores_that_are_all_alike_have_no_rank(model):
    """Every piece of the same score: nothing is in an order, and no rank is said."""
    config = model["model"].config
    alike = Importance(
        *(torch.ones(n).double() for n in (4, 128)), torch.ones(4, 512).double(), torch.ones(4, 2).double()
    )
    pieces = importance.pieces_of("layers", alike, config, layer=-1, groups=3)
    assert {piece.score for piece in pieces} == {1.0}


@pytest.mark.parametrize(
    ("settings", "words"), [({"layer": 4}, "layer may be at most 3"), ({"groups": 150}, "groups may be at most 128")]
)
def test_a_layer_or_group_that_is_not_there_is_refused(model, settings, words):
    with pytest.raises(WorkbenchError, match=words):
        run("pruning.importance", model, **settings)


# -- shapes
# --------------------------------------------------------------------------------------------------------------


def test_sizes_follow_from_the_shape_and_predictions_are_of_the_same_models(model, runs):
    made = runs["pruning.shapes"]
    losses, steps = matching(made, measured="loss"), matching(made, measured="step")
    whole = model["model"].config.num_parameters()
    assert [(m.settings["kind"], m.settings["share"]) for m in losses] == [
        (m.settings["kind"], m.settings["share"]) for m in steps
    ]
    for m in losses:
        assert m.counts["parameters"] <= m.settings["share"] * whole
        assert m.counts["weight_bytes"] == 4 * m.counts["parameters"]
    half = {m.settings["kind"]: m for m in matching(losses, share=0.5)}
    assert half["depth"].counts["layers"] < 4 and half["depth"].counts["channels"] == 128
    assert half["width"].counts["layers"] == 4 and half["width"].counts["channels"] < 128
    by_experiment = shapes.predict_shapes(DataSheetBench().ceilings(), model=model["model"], cached=16)
    assert [seconds for _, seconds, _ in by_experiment] == pytest.approx([m.predicted for m in steps])
    assert [count for count, *_ in by_experiment] == [m.counts["parameters"] for m in steps]
    assert all(m.check.startswith("greedy next token") for m in steps)


def test_a_healed_model_is_shown_with_the_loss_of_its_own_shape_before(model):
    """Beside another shape of as many parameters a star said something of the shapes, too."""
    config = dataclasses.replace(model["model"].config, num_layers=2, hidden_size=96, intermediate_size=80)
    assert shapes.cut_to(config, model["model"], by_magnitude(model["model"])).config == config


def test_a_step_that_starts_fewer_operations_is_predicted_to_be_faster_at_equal_bytes(runs):
    half = {m.settings["kind"]: m for m in matching(runs["pruning.shapes"], measured="step", share=0.5)}
    assert half["depth"].counts["launches"] < half["width"].counts["launches"]


# -- masks
# ---------------------------------------------------------------------------------------------------------------


def test_masks_have_the_zeros_that_are_asked_for_and_the_model_stays_as_it_was(model):
    before = {name: tensor.clone() for name, tensor in model["model"].state_dict().items()}
    made = run("pruning.masks", model, pattern="2:4")
    assert all(m.counts["zeros"] == 0.5 for m in matching(made, measured="masked"))
    orders = {m.settings["order"]: m for m in matching(made, measured="order")}
    assert orders[masks.MASK_FIRST].counts["zeros"] >= 0.5 <= orders[masks.ROUND_FIRST].counts["zeros"]
    assert orders[masks.ROUNDED].counts["zeros"] < 0.5
    assert all(torch.equal(before[name], tensor) for name, tensor in model["model"].state_dict().items())


def test_differences_are_taken_passage_by_passage(runs):
    made = runs["pruning.masks"]
    losses = {m.settings.get("method", m.settings.get("order")): m for m in made if m.unit == "nats/token"}
    between = matching(made, measured="between")
    assert [(m.settings["one"], m.settings["other"]) for m in between] == list(masks.BETWEEN)
    for m in between:
        assert m.median == pytest.approx(losses[m.settings["other"]].median - losses[m.settings["one"]].median)


def test_forms_of_a_matrix_take_the_bytes_that_are_said(runs):
    for m in matching(runs["pruning.masks"], measured="time", stored=masks.COMPRESSED):
        left = 64 * (64 - int(m.settings["zeros"] * 64))
        assert m.counts["bytes"] == 8 * left + 4 * 65 and m.predicted == 4 * 64 * 64 / m.counts["bytes"]
    dense = matching(runs["pruning.masks"], measured="time", stored=masks.DENSE)
    assert [m.predicted for m in dense] == [1.0] * len(masks.SHARES)


def test_two_of_four_is_half_of_the_values_and_two_bits_for_each(monkeypatch):
    """By the bytes that torch's own form keeps on a card: metadata of 4,096 bytes for 128 × 256."""
    weight = torch.zeros(128, 256, dtype=torch.float16)
    monkeypatch.setattr(masks, "on_a_card", lambda tensor: True)
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda tensor: tensor)
    form = masks.stored_forms(weight, 0.5)[masks.TENSOR_CORES]
    assert form.bytes == 128 * 256 * 2 // 2 + 4096


def test_a_product_that_is_wrong_is_not_timed(model, monkeypatch):
    monkeypatch.setattr(masks, "compressed_rows", lambda weight: (2 * weight).to_sparse_csr())
    with pytest.raises(WorkbenchError, match="compressed rows: the product is"):
        run("pruning.masks", model)


def test_groups_that_do_not_divide_are_refused(model):
    with pytest.raises(WorkbenchError, match="groups of 16 do not divide"):
        run("pruning.masks", {"model": random_decoder(tiny_config(hidden_size=24), tokenizer=shipped_tokenizer())})


# -- healing
# -------------------------------------------------------------------------------------------------------------


def curve(name: str, *nats: float, seed: int = 0, flops: float = 2.0) -> Curve:
    points = tuple(Point(100 * n, 1000 * n, flops * n, value) for n, value in enumerate(nats))
    return Curve(name, seed, points, nats[-1])


def test_what_is_saved_is_read_off_the_baselines_curve():
    healed, baseline = curve("a", 5.0, 3.0, flops=6.0), curve("b", 8.0, 4.0, 3.5, 2.5)
    saving = healing.saved(healed, baseline)
    assert saving == healing.Saved(pytest.approx(2.5), pytest.approx(5 / 6), True)
    assert healing.saved(healed, curve("b", 8.0, 4.0, 3.5)) == healing.Saved(2.0, pytest.approx(4 / 6), False)
    assert healing.saved(healed, curve("b", 8.0, 4.0, 3.004)) == healing.Saved(2.0, pytest.approx(4 / 6), True)
    assert curve("b", 3.0, 2.0).reaches(3.5).tokens == 0


def test_seeds_compare_with_the_same_seed():
    curves = [curve("a", 3.0), curve("a", 2.5, seed=1), curve("b", 3.5), curve("b", 4.0, seed=2)]
    assert healing.ahead(curves, "a", "b") == {0: 0.5}


def test_kept_curves_are_those_of_the_cards_and_of_known_recipes():
    curves = {(one.name, one.seed): one for one in healing_curves()}
    assert {name for name, _ in curves} <= set(HEALING_RECIPES)
    for name in set(HEALING_RECIPES) - NOT_SHIPPED:
        card = json.loads((ZOO / name / "card.json").read_text(encoding="utf-8"))
        assert curve_of(entry_of(card)) == curves[name, 0]
    for one in curves.values():
        recipe = HEALING_RECIPES[one.name]
        assert one.last.step == recipe.steps and one.points[0].step == 0
        assert one.last.tokens == recipe.steps * recipe.sequences_per_step * recipe.sequence_length
        assert all(a.flops < b.flops for a, b in zip(one.points, one.points[1:]))


def test_a_run_that_is_begun_here_is_interrupted_for_every_point_and_ends_where_one_run_would(
    runs, tiny_recipe, tmp_path
):
    live = matching(runs["pruning.healing"], measured="live")
    assert [m.settings["step"] for m in live] == [1, 2]
    assert [m.counts["tokens"] for m in live] == [32, 64]
    whole = heal("x", tmp_path, recipe=tiny_recipe, stop_at_step=2, report=lambda words: None)
    passages = held_out_passages(whole.tokenizer, 32, 2)
    assert live[-1].median == pytest.approx(loss_without(whole.eval(), passages, Cut()), rel=1e-6)


def test_a_curve_is_read_between_its_points_and_not_beyond():
    curves = [curve("a", 8.0, 4.0, 3.0)]
    assert healing.recorded_at(curves, "a", 150) == pytest.approx(3.5)
    assert math.isnan(healing.recorded_at(curves, "a", 201)) and math.isnan(healing.recorded_at(curves, "b", 1))


# -- cheaper
# -------------------------------------------------------------------------------------------------------------


def test_published_factors_are_computed_again(runs):
    computed = {m.settings["claim"]: m.median for m in matching(runs["pruning.cheaper"], measured="claim")}
    eight, four, family = (
        next(v for k, v in computed.items() if k.startswith(word)) for word in ("8 B: ", "4 B: ", "tr")
    )
    assert next(iter(computed.values())) == pytest.approx(3.8e12 / 94e9)
    assert eight == pytest.approx(3800 / 94 * 48 / 78) and f"{eight:.1f}" == "24.9"
    assert four == pytest.approx(3800 / 94 * 24 / 54) and f"{four:.1f}" == "18.0"
    assert 1.75 < family < 1.85


def test_sliders_stand_on_the_published_numbers():
    """A slider's places count from its lower end: 15 with steps of 0.5 from 0.001 was 15.001."""
    for setting in cheaper.EXPERIMENT.settings:
        steps = (setting.default - setting.low) / (setting.step or 1)
        assert steps == round(steps), setting.name


def test_with_the_parents_training_it_takes_more_flops_unless_many_share_it():
    alone = cheaper.Family(15e9, 8e9, 3.8e12, 94e9, 8e12, 1)
    assert alone.ratio_with_parent() < 1 < dataclasses.replace(alone, children=1000).ratio_with_parent()
    assert alone.ratio_with_parent() < alone.flops_ratio() < alone.token_ratio()


# -- the draft
# -----------------------------------------------------------------------------------------------------------


def test_a_draft_is_judged_by_acceptance_cost_and_a_real_text(runs, model):
    [alpha] = matching(runs["pruning.pruned_draft"], measured="alpha")
    assert alpha.median == acceptance_rate(model["model"], load("stdlib-1m"), max_tokens=512)["alpha"]
    for length in pruned_draft.LENGTHS:
        assert alpha.counts[f"speedup_{length}"] == pytest.approx(
            speedup(alpha.median, length, alpha.counts["step_cost"])
        )
    [speed] = matching(runs["pruning.pruned_draft"], measured="speed")
    assert len(speed.samples) == 1 and speed.check == "greedy texts are those of plain decoding"


def test_the_panel_says_which_draft_is_better_by_what(runs, model):
    panel = shown(
        "pruned_draft", bench=DataSheetBench(), **on_model("pruning.pruned_draft", SMALL["pruning.pruned_draft"], model)
    )
    panel.measurements = runs["pruning.pruned_draft"]
    words = panel.view(panel.settings).words
    assert "stdlib-1m: 0.92 M parameters, α = " in words and "Theorem 3.8" in words


def test_recipes_of_one_comparison_differ_in_one_thing():
    base = HEALING_RECIPES[healing.WIDTH]
    assert dataclasses.replace(HEALING_RECIPES[healing.BY_CHANCE], name=base.name, scores=base.scores) == base
    assert dataclasses.replace(HEALING_RECIPES[healing.BY_TEXT], name=base.name, objective=base.objective) == base
    for name, other in ((healing.WIDTH, healing.TAUGHT), (healing.DRAFT, healing.DRAFT_TAUGHT)):
        cut, without = HEALING_RECIPES[name], HEALING_RECIPES[other]
        beside = {"name": cut.name, "role": cut.role, "scores": cut.scores}
        assert dataclasses.replace(without, **beside, peak_learning_rate=cut.peak_learning_rate) == cut
    assert HEALING_RECIPES[healing.NOTHING].config == base.config
    assert base.config.num_parameters() <= RECIPES["stdlib-10m"].config.num_parameters() / 2
    assert HEALING_RECIPES["stdlib-1m-pruned"].config.num_parameters() <= 1_500_000
