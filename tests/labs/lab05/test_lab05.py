"""Lab 05: every recipe is judged on the same text and held to what it must show, AWQ's search and GPTQ's steps are
those of the methods, and the panels show what was measured."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch
from conftest import random_decoder, tiny_config
from experiment_claims import ExperimentClaims, brief_runs
from panel_claims import PanelClaims

from workbench import panels
from workbench.errors import WorkbenchError
from workbench.experiments import experiment, run_experiment
from workbench.experiments.inputs import shape_of
from workbench.instruments.bench import Bench
from workbench.instruments.records import Measurement
from workbench.kv import make_kv
from workbench.labs.lab05_quantization import awq_search as searching
from workbench.labs.lab05_quantization import gptq_steps as stepping
from workbench.labs.lab05_quantization import inputs as shared
from workbench.labs.lab05_quantization import quantizers as table
from workbench.labs.lab05_quantization import recipes
from workbench.labs.lab05_quantization.panels.plots import COLOURS, MARKS
from workbench.labs.lab05_quantization.panels.quantizers import Point, best_within, edge, linear_weights, points_of
from workbench.models import corpus
from workbench.models.checkpoints import shipped_tokenizer
from workbench.models.corpus import held_out_files
from workbench.models.evaluation import held_out_passages, loss_through
from workbench.panels import style
from workbench.quantization import METHODS, Calibration, Grouped, IntegerFormat, QuantizationRecipe, quantize
from workbench.quantization.awq import scale_for, search

TEXT = {"sequences": 2, "length": 64}
SMALL = {
    "quantize.quantizers": {"recipes": "lab", **TEXT, "context": 64, "passages": 3, "repeats": 1},
    "quantize.awq_search": {"layer": 1, "group": 64, "grid": 8, **TEXT},
    "quantize.gptq_steps": {"layer": 1, "columns": 8, "rows": 3, **TEXT},
}
MOVED = {"quantizers": {"budget": 3.0}, "awq_search": {"channels": 6}, "gptq_steps": {"shown_columns": 5}}
MINE = {"quantizers": "quantize.quantizers", "awq_search": "quantize.awq_search", "gptq_steps": "quantize.gptq_steps"}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}  # groups of 128 divide it


@pytest.fixture(scope="module")
def model():
    return random_decoder(tiny_config(**WIDE), tokenizer=shipped_tokenizer())


@pytest.fixture(scope="module")
def held_out():
    """Reading the library takes a while, so it is read once."""
    return held_out_files()


def cut(patch: pytest.MonkeyPatch, held_out: list) -> None:
    """Two training modules, so that nothing is tokenized for seconds; the held-out ones stay."""
    some = [corpus.SourceFile(f"{n}.py", f"def f{n}(x):\n    return x + {n}\n" * 60) for n in range(2)]
    patch.setattr(corpus, "standard_library", lambda root=None: [*held_out, *some])


@pytest.fixture(autouse=True)
def small_library(held_out, monkeypatch, request):
    if "trained" not in request.fixturenames:
        cut(monkeypatch, held_out)


FEW = (recipes.INT8, recipes.listed("rtn", 3, 128), recipes.listed("awq", 3, 128))


@pytest.fixture
def few(monkeypatch):
    """few(*recipes): these are what the table compares."""

    def put(*chosen):
        monkeypatch.setitem(recipes.SELECTIONS, "lab", list(chosen))

    put(*FEW)
    return put


@pytest.fixture(scope="module")
def runs(model, held_out):
    with pytest.MonkeyPatch.context() as patch:
        cut(patch, held_out)
        patch.setitem(recipes.SELECTIONS, "lab", list(FEW))
        return brief_runs(SMALL, model, Bench)


@pytest.mark.usefixtures("few")
class TestExperiments(ExperimentClaims):
    lab, small = 5, SMALL


@pytest.mark.usefixtures("few")
class TestPanels(PanelClaims):
    small, moved = SMALL, MOVED


@pytest.fixture
def make(model, few):
    """make(panel, **settings): that panel, drawn, on the small model and the smallest settings."""

    def made(name: str, **given):
        panel = getattr(panels, name)(**{"model": model, **SMALL[MINE[name]], **given})
        assert panel.wait(30)
        return panel

    return made


def run(name: str, model, **given) -> list[Measurement]:
    return run_experiment(name, {"model": model, **SMALL[name], **given}, Bench())


def measured(found: list[Measurement], what: str) -> list[Measurement]:
    return [m for m in found if m.settings["measured"] == what]


# -- all of them -----------------------------------------------------------------------------------------------


def test_settings_for_the_archive_are_settings_of_the_experiment():
    e = experiment("quantize.quantizers")
    [asked] = [e.complete(run) for device in ("cpu", "cuda") for run in e.record_settings(device)]
    assert asked["recipes"] == "all"


@pytest.mark.parametrize("name", SMALL)
def test_calibration_longer_than_the_model_reads_is_refused(model, name):
    with pytest.raises(WorkbenchError, match="512 tokens are beyond the context of tiny, 256"):
        run(name, model, sequences=1, length=512)


@pytest.mark.parametrize("name", ["quantize.awq_search", "quantize.gptq_steps"])
def test_a_layer_that_is_not_there_is_refused(model, name):
    with pytest.raises(WorkbenchError, match="one of the 2 of tiny, 0 to 1, got 2"):
        run(name, model, layer=2)


# -- quantize.table: what is compared --------------------------------------------------------------------------


def test_all_has_every_method_at_four_and_three_bits_in_groups_of_128_and_64():
    entries = [(one["method"], one["bits"], one["group"]) for one in recipes.SELECTIONS["all"]]
    for method in ("rtn", "gptq", "awq"):
        assert {(b, g) for m, b, g in entries if m == method} >= {(4, 128), (4, 64), (3, 128), (3, 64), (2, 64)}
    for method in METHODS:
        assert method in {m for m, _, _ in entries}, f"{method} is compared nowhere"
    for bits in (4, 3):  # those it is measured against come first
        for group in (128, 64):
            assert entries.index(("rtn", bits, group)) < entries.index(("gptq", bits, group))


@pytest.mark.parametrize("selection", recipes.SELECTIONS)
def test_every_recipe_of_a_selection_has_a_name_a_colour_and_a_mark(selection):
    found = recipes.recipes_of(selection)
    names = [recipes.title(recipes.about(one)) for one in found]
    assert len(set(names)) == len(found) == len(recipes.SELECTIONS[selection])
    assert {one.method for one in found} <= set(COLOURS) & set(MARKS) & set(recipes.NAMES)
    assert len(set(MARKS.values())) == len(set(COLOURS.values())) == len(MARKS)


def test_each_method_stands_once_in_the_lab_beside_its_int8():
    methods = [one["method"] for one in recipes.SELECTIONS["lab"] if one != recipes.INT8]
    assert len(set(methods)) == len(methods) and {"rtn", "gptq", "awq"} <= set(methods)


def test_every_recipe_gives_its_quality_and_its_time_in_the_order_of_the_list(model):
    found = run("quantize.quantizers", model)
    chosen = [recipes.title(recipes.about(one)) for one in recipes.recipes_of("lab")]
    assert [recipes.title(m.settings) for m in measured(found, "quality")] == ["float32", "fp16", *chosen]
    assert [recipes.title(m.settings) for m in measured(found, "decode")] == ["fp16", *chosen]
    for m in measured(found, "decode"):
        assert m.unit == "s" and m.counts["ratio"] > 0 and m.check.startswith("logits of a step as in the plain")
    assert {m.settings["passages"] for m in found} == {3}


def test_a_recipe_is_judged_on_the_same_passages_as_float32_and_paired_with_it(model, few):
    few(recipes.listed("rtn", 3, 128))
    full, _, rtn = measured(run("quantize.quantizers", model), "quality")
    new = quantize(model, QuantizationRecipe("rtn", 3, 128))
    rows = held_out_passages(model.tokenizer, 64, 3)
    ours, theirs = (
        loss_through(m, make_kv("recompute", m.config), rows, chunk=64).losses.double().mean(1) for m in (new, model)
    )
    above = ours - theirs
    assert rtn.median == pytest.approx(math.exp(ours.mean()), rel=1e-6)
    assert rtn.counts["excess_nats"] == pytest.approx(float(above.mean()), abs=1e-6)
    assert rtn.counts["excess_standard_error"] == pytest.approx(float(above.std()) / math.sqrt(3), rel=1e-4)
    assert full.counts["excess_nats"] == full.counts["excess_standard_error"] == 0
    assert rtn.counts["tokens"] == full.counts["tokens"] == 3 * 63


def test_bytes_are_those_of_the_codes_and_of_a_file_that_was_written(model, few):
    few(recipes.listed("rtn", 3, 128), recipes.listed("rtn", 4, 64))
    full, half, three, four = measured(run("quantize.quantizers", model), "quality")
    weights = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 256)
    assert (full.counts["linear_bytes"], half.counts["linear_bytes"]) == (4 * weights, 2 * weights)
    assert half.counts["saved_bytes"] == 2 * model.num_parameters()
    assert three.counts["bits_per_weight"] == 3 + 32 / 128 and four.counts["bits_per_weight"] == 4 + 32 / 64
    for m in (three, four):
        rest = 2 * (model.num_parameters() - weights)
        header = m.counts["saved_bytes"] - m.counts["linear_bytes"] - rest
        assert 1000 < header < 20_000 and f"a header of {header:,.0f}" in m.check


def test_a_file_that_is_larger_than_its_count_is_found_out(model, monkeypatch):
    honest = shared.save_quantized

    def padded(model, folder):
        path = honest(model, folder) / shared.TENSORS
        path.write_bytes(path.read_bytes() + b"\0")
        return folder

    monkeypatch.setattr(shared, "save_quantized", padded)
    with pytest.raises(WorkbenchError, match="bytes were counted and a header of"):
        shared.saved(quantize(model, QuantizationRecipe("rtn", 4, 64)))


def test_saving_leaves_the_model_that_is_judged_in_its_type(model):
    new = quantize(model, QuantizationRecipe("rtn", 4, 64))
    shared.saved(new)
    assert {p.dtype for p in new.parameters()} == {torch.float32} == {p.dtype for p in model.parameters()}
    assert new.tokenizer is model.tokenizer


def test_calibration_is_one_and_the_same_and_only_for_those_that_need_it(model, few, monkeypatch):
    few(recipes.listed("rtn", 3, 128), recipes.listed("gptq", 3, 128), recipes.listed("awq", 3, 128))
    asked = []

    def seen(decoder, recipe, calibration, **given):
        asked.append((recipe.method, calibration))
        return quantize(decoder, recipe, calibration, **given)

    monkeypatch.setattr(table, "quantize", seen)
    run("quantize.quantizers", model)
    (_, none), (_, first), (_, second) = asked
    assert none is None and first is second
    assert torch.equal(first.rows, Calibration.of(model.tokenizer, sequences=2, length=64).rows)


def test_the_model_is_what_it_was_afterwards(model, few):
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    run("quantize.quantizers", model)
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())


def test_groups_that_do_not_divide_are_left_out_and_counted(few):
    narrow = random_decoder(tiny_config(), tokenizer=shipped_tokenizer())  # 32 and 64 inputs
    few(recipes.INT8, recipes.listed("rtn", 3, 128), recipes.listed("rtn", 3, 32))
    full, _, *others = measured(run("quantize.quantizers", narrow), "quality")
    assert full.counts["recipes_left_out"] == 1
    assert [recipes.title(m.settings) for m in others] == ["int8", "RTN 3 bits g32"]


def test_an_arrangement_that_computes_something_else_is_not_timed(model, few, monkeypatch):
    honest = table.prepare

    def broken(decoder):
        fast = honest(decoder)
        if not hasattr(decoder, "quantization"):
            return fast
        fast._head = lambda x, head=fast._head: head(x).flip(-1)
        return fast

    monkeypatch.setattr(table, "prepare", broken)
    with pytest.raises(WorkbenchError, match=r"int8: arranged for inference its logits differ by .* thrown away"):
        run("quantize.quantizers", model)


# -- quantize.table: layers and halves -------------------------------------------------------------------------


def test_a_layers_error_is_its_own(model):
    rows = held_out_passages(model.tokenizer, 32, 2)
    outputs = shared.LayerOutputs(model, rows)
    assert outputs.errors(model) == [0.0, 0.0]
    spoiled = quantize(
        model,
        QuantizationRecipe(
            "rtn",
            2,
            64,
            skip=tuple(
                f"layers.0.{name}"
                for name in (
                    "attention.q",
                    "attention.k",
                    "attention.v",
                    "attention.o",
                    "mlp.gate",
                    "mlp.up",
                    "mlp.down",
                )
            ),
        ),
    )
    first, second = outputs.errors(spoiled)
    assert first == 0 and second > 0.01


def test_scales_that_are_folded_are_no_error(model):
    scaled = shared.copy_of(model)
    parts = shared.LayerParts(scaled.layers[0], scaled.config)
    assert parts.scale_inputs(("mlp.down",), torch.rand(256) + 0.5)
    assert max(shared.LayerOutputs(model, held_out_passages(model.tokenizer, 32, 2)).errors(scaled)) < 1e-8


def test_in_half_precision_only_the_linears_are_rounded(model):
    half = shared.in_half_precision(model)
    for name, linear in shared.linears_of(half).items():
        before = shared.linears_of(model)[name].weight
        assert torch.equal(linear.weight, before.half().float()) and not torch.equal(linear.weight, before)
    assert half.embed.weight is model.embed.weight


# -- what a recipe must show -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "bits", "share", "holds"),
    [
        ("gptq", 3, 0.74, True),
        ("gptq", 3, 0.76, False),
        ("awq", 4, 0.99, True),
        ("awq", 4, 1.01, False),
        ("awq", 3, -0.1, True),
        ("gptq", 2, 0.5, None),
        ("squeezellm", 3, 2.0, None),
    ],
)
def test_gptq_and_awq_are_held_to_a_share_of_rtns_excess(method, bits, share, holds):
    rtn = torch.tensor([0.1, 0.2, 0.3])
    words, found = recipes.claim(recipes.listed(method, bits, 128), share * rtn, rtn, 0.0)
    assert found is holds and (holds is None or f"{share:.2f} of RTN's" in words)
    assert ("does not hold" in words) == (holds is False)


def test_int8_is_held_to_half_a_percent():
    nothing = torch.zeros(2)
    assert recipes.claim(recipes.INT8, nothing, None, 0.0049) == (
        "perplexity +0.490%, at most ±0.5% asked: holds",
        True,
    )
    assert recipes.claim(recipes.INT8, nothing, None, -0.0051)[1] is False
    assert recipes.claim(recipes.listed("rtn", 8, 64), nothing, None, 0.1) == ("", None)


def test_where_rtn_lost_nothing_there_is_no_share():
    rtn = torch.tensor([-0.1, 0.05])
    words, holds = recipes.claim(recipes.listed("gptq", 3, 128), rtn, rtn, 0.0)
    assert holds is None and "RTN lost nothing" in words


@pytest.fixture
def trained(few):
    from workbench.models import load

    few(recipes.INT8, *(recipes.listed(method, bits, 128) for bits in (4, 3) for method in ("rtn", "gptq", "awq")))
    return load("stdlib-1m")


def test_on_the_shipped_model_every_claim_holds(trained):
    asked = {"sequences": 8, "length": 256, "context": 256, "passages": 10}
    found = measured(run("quantize.quantizers", trained, **asked), "quality")
    held = {recipes.title(m.settings): m for m in found if "claim_holds" in m.counts}
    assert list(held) == ["int8", "GPTQ 4 bits g128", "AWQ 4 bits g128", "GPTQ 3 bits g128", "AWQ 3 bits g128"]
    for name, m in held.items():
        assert m.counts["claim_holds"] == 1 and ": holds" in m.check, (name, m.check)
    excess = {recipes.title(m.settings): m.counts["excess_nats"] for m in found}
    assert excess["RTN 3 bits g128"] > 3 * excess["RTN 4 bits g128"] > 0
    error = {recipes.title(m.settings): m.counts["layer_output_error"] for m in found}
    assert error["RTN 3 bits g128"] > error["RTN 4 bits g128"] > error["int8"] > 0


# -- quantize.awq_search ---------------------------------------------------------------------------------------


def outlier_model(channel: int, factor: float):
    """One input of the first layer's gate and up is so much larger."""
    spiked = random_decoder(tiny_config(**WIDE), tokenizer=shipped_tokenizer())
    spiked.layers[0].mlp_norm.weight[channel] *= factor
    return spiked


def test_every_group_of_linears_is_searched_in_the_order_they_run(model):
    found = run("quantize.awq_search", model)
    assert [m.settings["linears"] for m in measured(found, "search")] == ["q, k, v", "o", "gate, up", "down"]
    for m in measured(found, "search"):
        c = m.counts
        assert len(m.samples) == 8 and c["error_rtn"] == m.samples[0] and c["error"] == min(m.samples)
        assert m.samples[round(8 * c["alpha"])] == c["error"]
        assert c["error_clipped"] < c["error"] and c["share_of_rtn"] == c["error"] / c["error_rtn"]
        assert c["is_folded"] == (m.settings["linears"] != "o")  # two query heads share each value
    for m in measured(found, "channel"):
        assert len(m.samples) == (256 if m.settings["linears"] == "down" else 128)
        assert m.unit == searching.CHANNEL_VALUES[m.settings["what"]]


def test_the_search_is_that_of_the_method(model):
    calibration = Calibration.of(model.tokenizer, sequences=2, length=64)
    parts, inputs = shared.inputs_of_layer(Bench(), model, calibration, 1)
    weights = [parts.linear(name).weight for name in ("mlp.gate", "mlp.up")]
    wanted = search(weights, inputs["mlp.gate"], IntegerFormat(3), 64, 8)
    found = run("quantize.awq_search", model)
    m = next(m for m in measured(found, "search") if m.settings["linears"] == "gate, up")
    assert m.samples == pytest.approx([error for _, error in wanted], rel=1e-5)
    scale = next(
        c for c in measured(found, "channel") if c.settings["linears"] == "gate, up" and c.settings["what"] == "scale"
    )
    assert torch.tensor(scale.samples) == pytest.approx(scale_for(inputs["mlp.gate"], m.counts["alpha"]), rel=1e-5)


def test_a_channel_with_a_large_input_is_scaled_up_and_loses_less():
    found = run("quantize.awq_search", outlier_model(37, 40.0), layer=0)
    channels = {
        m.settings["what"]: torch.tensor(m.samples)
        for m in measured(found, "channel")
        if m.settings["linears"] == "gate, up"
    }
    assert channels["input"].argmax() == channels["scale"].argmax() == channels["lost"].argmax() == 37
    assert channels["lost_scaled"][37] < 0.3 * channels["lost"][37]
    m = next(m for m in measured(found, "search") if m.settings["linears"] == "gate, up")
    assert m.counts["alpha"] > 0.2 and m.counts["share_of_rtn"] < 0.5


def test_a_search_that_did_not_begin_with_rtn_is_thrown_away(model, monkeypatch):
    monkeypatch.setattr(searching.awq, "search", lambda *given: search(*given)[1:])
    with pytest.raises(WorkbenchError, match=r"begins with an error of .* and RTN has .* thrown away"):
        run("quantize.awq_search", model)


def test_groups_that_do_not_divide_are_refused_before_anything_is_searched(monkeypatch):
    narrow = random_decoder(tiny_config(), tokenizer=shipped_tokenizer())
    monkeypatch.setattr(searching.awq, "search", lambda *given: pytest.fail("searched"))
    with pytest.raises(WorkbenchError, match="must divide the 32 inputs of q, k, v, got 64"):
        run("quantize.awq_search", narrow)


def test_planted_outliers_are_found_and_the_search_rescues_them(model):
    as_it_is, planted = (
        next(
            m
            for m in measured(run("quantize.awq_search", model, layer=0, planted=planted), "search")
            if m.settings["linears"] == "gate, up"
        )
        for planted in (False, True)
    )
    assert planted.counts["error_rtn"] > as_it_is.counts["error_rtn"]
    assert planted.counts["share_of_rtn"] < as_it_is.counts["share_of_rtn"]
    assert planted.counts["largest_scale"] > 2 * as_it_is.counts["largest_scale"]


def learner_run(name: str, model, **parts) -> list[Measurement]:
    return run_experiment(name, {"model": model, **SMALL[name]}, Bench(), parts)


def test_a_learners_search_is_laid_beside_ours_and_judged(model):
    right = measured(learner_run("quantize.awq_search", model, search=search), "yours")
    assert len(right) == 4 and all(m.check == "your search: every point as ours" for m in right)

    def forgets_to_scale_back(weights, inputs, format, group, grid):
        together, found = torch.cat(list(weights)), []
        for index in range(grid):
            rounded = Grouped.rounded(together * scale_for(inputs, index / grid), format, group).dequantize()
            found.append((index / grid, inputs.output_error(together, rounded)))
        return found

    wrong = measured(learner_run("quantize.awq_search", model, search=forgets_to_scale_back), "yours")
    assert all("off from ours by up to" in m.check for m in wrong)
    with pytest.raises(WorkbenchError, match=r"your search gave .* expected \[\(α, output error\)\] for 8 α"):
        learner_run("quantize.awq_search", model, search=lambda *given: [0.1, 0.2])


# -- quantize.gptq_steps ---------------------------------------------------------------------------------------


def test_there_is_a_state_before_the_first_column_and_one_after_each(model):
    found = run("quantize.gptq_steps", model)
    assert [m.settings["done"] for m in found] == list(range(9))
    states = [torch.tensor(m.samples).view(3, 8) for m in found]
    channels = found[0].settings["channels"]
    assert torch.equal(states[0], model.layers[1].mlp.gate.weight[:3][:, channels])
    for done, (before, after) in enumerate(itertools.pairwise(states)):
        assert torch.equal(before[:, :done], after[:, :done])  # what is rounded stays
        assert not torch.equal(before[:, done:], after[:, done:])
    assert all(len(row.unique()) <= 4 for row in states[-1])  # two bits
    errors = [m.counts["error"] for m in found]
    assert errors[0] == 0 and errors == sorted(errors)
    assert errors[-1] < found[-1].counts["error_without"]
    assert found[-1].check.endswith("the rows are now those that `gptq` gives")


def test_the_inputs_are_those_with_the_largest_moments(model):
    calibration = Calibration.of(model.tokenizer, sequences=2, length=64)
    _, inputs = shared.inputs_of_layer(Bench(), model, calibration, 1)
    sizes = inputs["mlp.gate"].second_moments.diagonal()
    channels = run("quantize.gptq_steps", model)[0].settings["channels"]
    assert sizes[channels].tolist() == sorted(sizes.tolist(), reverse=True)[:8]


def problem(moments: torch.Tensor) -> stepping.Problem:
    weight = torch.randn(50, len(moments), generator=torch.Generator().manual_seed(1)).double()
    return stepping.Problem(weight, moments.double(), list(range(len(moments))))


def test_rounding_for_itself_is_rtn_and_nothing_is_spread_where_inputs_have_nothing_in_common():
    alone = problem(torch.diag(torch.arange(8.0, 0, -1)))
    last = list(stepping.states(alone, IntegerFormat(3), 0.01))[-1]
    rtn = Grouped.rounded(alone.weight.float(), IntegerFormat(3), 8).dequantize()
    assert torch.allclose(last.weight.float(), rtn, atol=1e-6) and torch.equal(last.weight, last.without)
    generator = torch.Generator().manual_seed(2)
    mixed = torch.randn(200, 8, generator=generator) @ (torch.eye(8) + torch.randn(8, 8, generator=generator) / 4)
    other = problem(mixed.T @ mixed)
    last = list(stepping.states(other, IntegerFormat(3), 0.01))[-1]
    assert torch.allclose(last.without.float(), rtn, atol=1e-6)
    assert other.error(last.weight) < 0.9 * other.error(last.without)


@pytest.mark.parametrize(
    ("part", "wrong", "words"),
    [
        ("inverse_factor", lambda h, damping: torch.eye(len(h)).double(), "the steps have paid"),
        ("gptq", lambda w, h, format, group, **_: Grouped.rounded(w.float(), format, group), "from what `gptq` gives"),
    ],
)
def test_steps_that_were_not_the_methods_are_thrown_away(model, monkeypatch, part, wrong, words):
    monkeypatch.setattr(stepping, part, wrong)
    with pytest.raises(WorkbenchError, match=f"{words}.*thrown away"):
        run("quantize.gptq_steps", model)


def test_more_columns_or_rows_than_there_are_are_refused():
    narrow = random_decoder(
        tiny_config(hidden_size=16, num_heads=2, num_kv_heads=1, intermediate_size=24), tokenizer=shipped_tokenizer()
    )
    with pytest.raises(WorkbenchError, match=r"attention\.q has 16 columns, not 24"):
        run("quantize.gptq_steps", narrow, linear="attention.q", columns=24)


def columns_alone(weight, factor, scale, zero, highest):
    return ((weight - zero) / scale).round().clamp(0, highest).to(torch.uint8)


def columns_spread(weight, factor, scale, zero, highest):
    w, codes = weight.clone(), []
    for j in range(w.shape[1]):
        codes.append(((w[:, j] - zero[:, 0].double()) / scale[:, 0].double()).round().clamp(0, highest))
        lost = (w[:, j] - (codes[-1] * scale[:, 0].double() + zero[:, 0].double())) / factor[j, j]
        w[:, j + 1 :] -= lost[:, None] * factor[j, j + 1 :]
    return torch.stack(codes, 1).to(torch.uint8)


def test_a_learners_columns_are_laid_beside_ours_and_judged(model):
    for mine, words in ((columns_spread, "the codes that `gptq` gives"), (columns_alone, "codes are not those of")):
        *ours, yours = learner_run("quantize.gptq_steps", model, quantize_columns=mine)
        assert yours.settings["measured"] == "yours" and words in yours.check
    assert yours.counts["error"] == pytest.approx(ours[-1].counts["error_without"], rel=1e-5)
    with pytest.raises(WorkbenchError, match=r"must give codes \[256, 8\] from 0 to 3, got \[256, 1\]"):
        learner_run("quantize.gptq_steps", model, quantize_columns=lambda w, *rest: torch.zeros(len(w), 1))


# -- all panels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MINE)
def test_hostile_names_are_shown_inert(make, name):
    hostile = random_decoder(tiny_config(**WIDE), tokenizer=shipped_tokenizer(), name="<img src=x>$\\frac$")
    panel = make(name, model=hostile)
    panel.run()
    shown = panel.said + panel.extra.value + panel.table.value + panel.status.value
    assert "<img" not in shown and "error" not in panel.status.value


def test_stop_ends_a_run_and_keeps_what_was_measured(make):
    panel = make("quantizers", passages=20, repeats=50)
    panel.run_button.click()
    while not panel.measurements:
        assert panel._worker.is_alive()
        time.sleep(0.005)
    panel.stop_button.click()
    assert panel.wait(30) and "stopped" in panel.status.value and "kept" in panel.status.value


# -- each panel ------------------------------------------------------------------------------------------------


def dots(axes) -> set[tuple[float, float]]:
    """Places of the marks in a plot."""
    return {
        (round(float(x), 9), round(float(y), 9))
        for line in axes.lines
        if line.get_linestyle() == "None" and line.get_marker() in MARKS.values() and line.get_markersize() < 10
        for x, y in zip(line.get_xdata(), line.get_ydata())
    }


def test_recipes_stand_where_the_table_says(make):
    panel = make("quantizers")
    panel.run()
    view = panel.view(panel.settings)
    points = points_of(panel.measurements)
    assert [row[0] for row in view.rows] == ["float32", "fp16", "int8", "RTN 3 bits g128", "AWQ 3 bits g128"]
    quality, steps = view.figure.axes
    assert dots(quality) == {(p.linear_bytes, round(p.excess, 9)) for p in points[1:]}
    assert dots(steps) == {(p.linear_bytes, round(p.decode.counts["ratio"], 9)) for p in points[1:]}
    for p, row in zip(points[1:], view.rows[1:]):
        assert row[1] == f"{p.bits:.2f}" and row[4] == f"{p.quality.median:.3f}"
        assert row[8] == style.milliseconds(p.decode.median) and row[9] == f"{p.decode.counts['ratio']:.2f}"


def test_a_record_is_drawn_hollow_and_named(make):
    record = make("quantizers").run()
    plain = make("quantizers", key="x").snapshot()
    panel = make("quantizers", record=record)
    assert panel.snapshot().data != plain.data and "recorded on" in panel.snapshot().alt
    assert "recorded on" not in plain.alt and "What is drawn was recorded" in panel.said
    marks = [line for line in panel.view(panel.settings).figure.axes[0].lines if line.get_marker() in MARKS.values()]
    assert marks and all(line.get_markerfacecolor() == "none" for line in marks)
    panel.run()
    filled = [
        line
        for line in panel.view(panel.settings).figure.axes[0].lines
        if line.get_marker() in MARKS.values() and line.get_markerfacecolor() != "none"
    ]
    assert len(filled) == 4


def test_the_best_within_a_budget_is_named(make):
    panel = make("quantizers", budget=3.5)
    panel.run()
    points = points_of(panel.measurements)
    best = best_within(points, 3.5)
    assert best.title in ("RTN 3 bits g128", "AWQ 3 bits g128")
    assert f"Within 3.5 bits per weight ({best.title}, {best.bits:.2f}) the lowest perplexity is" in panel.said
    panel.configure(budget=2.0)
    assert panel.wait(30) and "No recipe here stays within 2 bits per weight" in panel.said
    assert best_within(points, 2.0) is None and best_within(points, 32).quality.median == min(
        p.quality.median for p in points
    )


def point(linear_bytes: float, perplexity: float, method: str = "rtn") -> Point:
    m = Bench().measurement(
        name="quantize.quantizers",
        settings={**recipes.listed(method, 3, 128), "measured": "quality"},
        samples=[perplexity],
        unit="perplexity",
        counts={"linear_bytes": linear_bytes, "bits_per_weight": 3.25},
    )
    return Point(m, None)


def test_the_edge_holds_what_nothing_else_is_smaller_and_better_than():
    points = [point(5, 20), point(3, 30), point(4, 31), point(5, 19), point(8, 19.5), point(9, 18)]
    assert [(p.linear_bytes, p.quality.median) for p in edge(points)] == [(3, 30), (5, 19), (9, 18)]


def test_a_claim_that_does_not_hold_is_told(make):
    panel = make("quantizers")
    found = panel.run()
    assert ("does not hold" in panel.said) == any(m.counts.get("claim_holds") == 0 for m in found)
    wrong = next(m for m in found if m.settings["method"] == "awq" and m.settings["measured"] == "quality")
    wrong.counts["claim_holds"] = 0
    assert wrong.check.partition(";")[0] in panel.view(panel.settings).words


def test_weights_of_the_layers_are_counted_without_a_model():
    weights = 6 * (2 * 384 * 384 + 2 * 128 * 384 + 3 * 384 * 1024)
    assert linear_weights(shape_of("stdlib-10m")) == weights


def test_the_curves_of_the_search_are_shares_of_rtns_error(make):
    panel = make("awq_search")
    panel.run()
    view = panel.view(panel.settings)
    curves = {
        line.get_label(): list(line.get_ydata()) for line in view.figure.axes[0].lines if len(line.get_xdata()) == 8
    }
    for m in measured(panel.measurements, "search"):
        assert curves[m.settings["linears"]] == pytest.approx([e / m.samples[0] for e in m.samples])
    assert [row[0] for row in view.rows] == list(curves)
    assert "For o nothing before it can be divided by s" in view.words


def test_the_channels_shown_are_those_with_the_largest_inputs(make):
    panel = make("awq_search", linears="down", channels=6)
    panel.run()
    inputs = next(
        m for m in panel.measurements if m.settings.get("what") == "input" and m.settings["linears"] == "down"
    )
    wanted = sorted(range(256), key=lambda c: -inputs.samples[c])[:6]
    scales = panel.view(panel.settings).figure.axes[1]
    assert [t.get_text() for t in scales.get_xticklabels()] == [str(c) for c in wanted]
    assert len(scales.patches) == 6


def test_a_learners_part_is_drawn_and_judged_in_words(make):
    panel = make("awq_search")
    panel.run(search=search)
    assert "with your search" in panel.status.value and "Yours, down: α" in panel.said
    assert "every point as ours" in panel.said
    panel = make("gptq_steps")
    panel.run(quantize_columns=columns_alone)
    stars = [line for line in panel.view(panel.settings).figure.axes[2].lines if line.get_marker() == "*"]
    yours = next(m for m in panel.measurements if m.settings["measured"] == "yours")
    assert [list(line.get_ydata()) for line in stars] == [[yours.counts["error"]]]
    assert f"Yours loses {yours.counts['error']:.3e}" in panel.said


def test_play_moves_the_slider_and_the_slider_play(make):
    panel = make("gptq_steps")
    panel.run()
    panel.play.value = 7
    assert panel.wait(30) and panel.settings["shown_columns"] == 7 and "Column 7 (input" in panel.said
    panel.configure(shown_columns=0)
    assert panel.wait(30) and panel.play.value == 0 and "Nothing is rounded yet" in panel.said
    panel.configure(shown_columns=32)  # beyond the last
    assert panel.wait(30) and "Column 8 (input" in panel.said and "No column is left" in panel.said


def test_what_is_added_goes_to_the_columns_to_come(make):
    panel = make("gptq_steps", shown_columns=3)
    panel.run()
    rows, added, _ = panel.view(panel.settings).figure.axes
    states = [torch.tensor(m.samples).view(3, 8) for m in panel.measurements]
    assert torch.allclose(torch.tensor(rows.images[0].get_array()).float(), states[3])
    shown = torch.tensor(added.images[0].get_array()).float()
    assert not shown[:, :3].any() and torch.allclose(shown[:, 3:], (states[3] - states[2])[:, 3:], atol=1e-6)
