"""Lab 05, outliers: the experiment measures both models by every method, and its panel shows what was measured."""

from __future__ import annotations

import dataclasses

import pytest
from conftest import random_decoder, tiny_config
from panel_claims import PanelClaims

from workbench import panels
from workbench.errors import WorkbenchError
from workbench.experiments import experiment, run_experiment
from workbench.instruments.bench import Bench
from workbench.instruments.records import Measurement
from workbench.instruments.timing import Stopped
from workbench.labs.lab05_quantization import outliers
from workbench.models import corpus
from workbench.models.checkpoints import shipped_tokenizer
from workbench.models.corpus import held_out_files
from workbench.models.evaluation import held_out_passages
from workbench.panels.base import Panel
from workbench.quantization import QuantizationRecipe, quantize

NAME = "quantize.outliers"
SMALL = {
    "group": 8,
    "sequences": 2,
    "length": 16,
    "context": 32,
    "passages": 2,
    "channels": 2,
    "factor": 64.0,
    "threshold": 5.0,
}


@pytest.fixture(scope="module")
def held_out():
    """Reading the library takes a while, so it is read once."""
    return held_out_files()


@pytest.fixture(scope="module", autouse=True)
def small_library(held_out):
    """Two training modules, so that nothing is tokenized for seconds; the held-out ones stay."""
    some = [corpus.SourceFile(f"{n}.py", f"def f{n}(x):\n    return x + {n}\n" * 60) for n in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "standard_library", lambda root=None: [*held_out, *some])
        yield


@pytest.fixture(scope="module")
def found(tiny_model, small_library) -> list[Measurement]:
    return run_experiment(NAME, {"model": tiny_model, **SMALL})


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model


@pytest.fixture(scope="module")
def runs(found):
    return {NAME: found}


class TestPanels(PanelClaims):
    small, moved = {NAME: SMALL}, {"outliers": {"methods": "8 bits"}}


def losses(found) -> dict[tuple[str, str], Measurement]:
    return {(m.settings["method"], m.settings["weights"]): m for m in found if m.settings["measured"] == "loss"}


# -- the experiment ------------------------------------------------------------------------------------------------


def test_both_models_are_measured_by_every_method_and_all_goes_through_json(found):
    assert all(m.name == NAME and m.check for m in found)
    assert all(Measurement.from_dict(m.to_dict()) == m for m in found)
    assert list(losses(found)) == [
        (method, weights) for method in ("float32", *outliers.TITLES) for weights in ("original", "planted")
    ]
    assert [m.settings["weights"] for m in found if m.settings["measured"] == "channels"] == [
        "original",
        "planted",
        "planted, smoothed",
    ]


def test_the_planted_model_computes_the_same_and_has_the_channels_asked_for(found):
    channels = {m.settings["weights"]: m for m in found if m.settings["measured"] == "channels"}
    ratios = [b / a for a, b in zip(channels["original"].samples, channels["planted"].samples)]
    assert sorted(round(r) for r in ratios) == [1] * 30 + [64] * 2
    smoothed = channels["planted, smoothed"].counts["largest_to_median"]
    assert smoothed < channels["planted"].counts["largest_to_median"] / 5
    float32 = losses(found)
    same = float32["float32", "planted"]
    assert same.median == pytest.approx(float32["float32", "original"].median, abs=1e-6)
    assert "computes the same" in same.check


def test_losses_are_those_of_models_quantized_by_these_recipes(found, tiny_model):
    recipe = QuantizationRecipe("rtn", 4, 8)
    rows = held_out_passages(tiny_model.tokenizer, 32, 2)
    again = outliers.loss_without_kv(Bench(), quantize(tiny_model, recipe), rows, "")
    m = losses(found)["rtn 4", "original"]
    assert m.median == again.nats_per_token and m.counts["tokens"] == 2 * 31
    reference = losses(found)["float32", "original"].median
    assert m.counts["excess"] == pytest.approx(m.median - reference, abs=1e-6)
    assert m.counts["bits_per_weight"] == 4 + 2 * 16 / 8


def test_bits_are_counted_and_columns_in_16_bits_are_said(found):
    by = losses(found)
    kept = by["llm_int8", "planted"].counts
    assert 0 < kept["share_in_16_bits"] < 1
    assert kept["bits_per_weight"] > 8 + 8 * kept["share_in_16_bits"]  # and their scales, and which they are
    for name in ("int8", "llm_int8 live"):
        assert 8 < by[name, "original"].counts["bits_per_weight"] < 9


def test_outliers_break_what_they_break_and_the_remedies_rescue_on_a_trained_model(held_out):
    """stdlib-1m, a few passages. In float32 nothing changes; int8 and RTN at 4 bits lose far more once planted."""
    asked = {
        "model": "stdlib-1m",
        "methods": "8 bits",
        "sequences": 2,
        "length": 64,
        "context": 128,
        "passages": 2,
        "factor": 256.0,
    }
    by = losses(run_experiment(NAME, asked))
    lost = {name: by[name, "planted"].counts["excess"] for name in outliers.EIGHT}
    assert lost["int8"] > 0.1
    for name in ("llm_int8", "llm_int8 live", "smoothquant"):
        assert lost[name] < lost["int8"] / 3, name
    assert abs(by["int8", "original"].counts["excess"]) < 0.02


def test_methods_can_be_chosen_by_their_bits():
    assert set(outliers.SELECTIONS["8 bits"]) | set(outliers.SELECTIONS["4 bits"]) == set(outliers.SELECTIONS["all"])
    for name in outliers.TITLES:
        recipe = outliers.recipe_of(name, group=64, threshold=7.0, alpha=0.25)
        assert (recipe.bits or 8) in (4, 8)
    assert outliers.recipe_of("llm_int8 live", group=64, threshold=7.0, alpha=0.5).options == {
        "threshold": 7.0,
        "columns": "live",
    }


def test_a_product_that_is_wrong_gives_no_loss(tiny_model, monkeypatch):
    new = quantize(tiny_model, QuantizationRecipe("int8"))
    assert "within its bound" in outliers.check_products(new)
    stored = new.layers[1].mlp.up.stored
    right = stored.multiply
    monkeypatch.setattr(stored, "multiply", lambda x: 1.05 * right(x))
    with pytest.raises(WorkbenchError, match=r"1\.mlp\.up: a product is off by"):
        outliers.check_products(new)


def test_a_planted_model_that_computed_something_else_would_be_thrown_away(tiny_model, monkeypatch):
    wrong = random_decoder(tiny_config(), seed=5, tokenizer=shipped_tokenizer())
    monkeypatch.setattr(outliers, "plant_outliers", lambda model, **given: wrong)
    with pytest.raises(WorkbenchError, match="computes something else"):
        run_experiment(NAME, {"model": tiny_model, **SMALL, "methods": "4 bits"})


def test_it_stops_when_told_and_refuses_what_makes_no_sense(tiny_model):
    bench = Bench()
    bench.stop.set()
    with pytest.raises(Stopped):
        run_experiment(NAME, {"model": tiny_model, **SMALL}, bench)
    for changed, message in (
        ({"channels": 40}, "from 1 to the 32"),
        ({"factor": 1.0}, "factor"),
        ({"alpha": 1.5}, "alpha must be a number from 0 to 1"),
        ({"threshold": 0.0}, "threshold must be"),
        ({"context": 512}, "beyond the 256"),
        ({"group": 64, "methods": "4 bits"}, "group must"),
        ({"metods": "all"}, "did you mean 'methods'"),
    ):
        with pytest.raises(WorkbenchError, match=message):
            run_experiment(NAME, {"model": tiny_model, **SMALL, **changed})


def test_the_archive_gets_a_larger_run_on_a_cpu_and_none_on_a_gpu():
    e = experiment(NAME)
    assert e.lab == 5 and e.record_settings("cuda") == ()
    assert all(e.complete(dict(given)) for given in e.record_settings("cpu"))


# -- the panel -----------------------------------------------------------------------------------------------------


def shown(found, tiny_model, **given) -> Panel:
    """A panel that looks as after a run, without one."""
    panel = panels.outliers(model=tiny_model, **SMALL, **given)
    assert panel.wait(30)
    panel.measurements = list(found)
    panel.paint()
    return panel


def test_before_a_run_it_says_what_will_be_planted(tiny_model):
    panel = panels.outliers(model=tiny_model, **SMALL)
    assert panel.wait(30)
    view = panel.view(panel.settings)
    assert "2 channels behind every norm are made 64 times larger" in view.words
    assert "no outliers of its own" in view.words and "Nothing measured yet" in view.alt and not view.rows


def test_it_shows_every_method_on_both_models_with_the_numbers_measured(found, tiny_model):
    panel = shown(found, tiny_model)
    view = panel.view(panel.settings)
    by = losses(found)
    assert [row[0] for row in view.rows] == list(outliers.TITLES.values())
    for row, name in zip(view.rows, outliers.TITLES):
        assert row[1] == f"{by[name, 'planted'].counts['bits_per_weight']:.2f}"
        assert row[2].startswith(f"{by[name, 'original'].counts['excess']:+.4f} ±")
        assert row[3].startswith(f"{by[name, 'planted'].counts['excess']:+.4f} ±")
    _, dots = view.figure.axes
    assert [t.get_text() for t in dots.get_yticklabels()] == list(outliers.TITLES.values())
    assert panel.snapshot().data.startswith(b"\x89PNG")


def test_its_words_say_which_methods_break(found, tiny_model):
    """Built from the counts: one broken, all others not."""
    made = [
        dataclasses.replace(
            m,
            counts=m.counts
            | {"excess": 0.4 if m.settings.get("method") == "rtn 4" and m.settings["weights"] == "planted" else 0.001},
        )
        if m.settings["measured"] == "loss"
        else m
        for m in found
    ]
    panel = shown(made, tiny_model)
    words = panel.view(panel.settings).words
    broken, held = words.split("Broken by the outliers: ")[1].split("Not broken")
    assert broken.startswith("RTN 4 bits (+0.399 nats).")
    assert all(title in held for title in outliers.TITLES.values() if title != "RTN 4 bits")


def test_a_recorded_run_is_drawn_hollow_and_named(found, tiny_model):
    panel = panels.outliers(model=tiny_model, **SMALL, record=found)
    assert panel.wait(30)
    view = panel.view(panel.settings)
    assert view.words.count("recorded on") == 1 and "Recorded, nats per token" in view.alt
    assert "recorded" in view.caption and len(view.rows) == len(outliers.TITLES)
    hollow = [line for line in view.figure.axes[1].get_lines() if line.get_markerfacecolor() == "none"]
    assert len(hollow) >= 2 * len(outliers.TITLES)


def test_measurements_of_other_settings_are_not_shown(found, tiny_model):
    panel = shown(found, tiny_model)
    panel.configure(factor=8.0)
    assert panel.wait(30)
    assert not panel.view(panel.settings).rows


def test_it_runs_headless(tiny_model):
    made = panels.outliers(model=tiny_model, **SMALL, methods="8 bits").run()
    assert {m.settings["method"] for m in made if m.settings["measured"] == "loss"} == {"float32", *outliers.EIGHT}
