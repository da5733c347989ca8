"""Lab 04: what the time and form experiments count is exact, what they time is held to an oracle, and the panels of the
lab show what was measured."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch
from conftest import random_decoder, tiny_config
from experiment_claims import ExperimentClaims, brief_runs, on_model
from panel_claims import PanelClaims, shown
from picture_claims import cut_or_small

from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.instruments.bench import Bench, steps_of
from workbench.instruments.costs import causal_pairs, kv_bytes
from workbench.instruments.device import PUBLISHED
from workbench.instruments.records import Measurement
from workbench.kv import KINDS, Contiguous, Latent, Window
from workbench.labs.lab04_smaller_caches import larger_batch as filling
from workbench.labs.lab04_smaller_caches import latent as forms
from workbench.labs.lab04_smaller_caches import longer, rolling
from workbench.labs.lab04_smaller_caches import variants as decoding
from workbench.labs.lab04_smaller_caches.inputs import VARIANTS, kind_for
from workbench.labs.lab04_smaller_caches.panels import quality as quality_panel
from workbench.labs.lab04_smaller_caches.panels.plots import COLOURS, MARKS, apart
from workbench.labs.lab04_smaller_caches.panels.quality import design
from workbench.models import PUBLIC_SHAPES, corpus, public_shape, seeds
from workbench.models.checkpoints import shipped_tokenizer
from workbench.models.decoder import Decoder
from workbench.models.latent import UpProjections, absorbing_pays
from workbench.models.recipes import CACHE_VARIANTS
from workbench.models.training import initialize
from workbench.notebook_source import find_sources, read_source
from workbench.panels import style
from workbench.panels.plots import flop_words
from workbench.panels.words import listed

SMALL = {  # settings under which each experiment runs in a second
    "smaller.variants": {"largest_context": 64, "repeats": 2},
    "smaller.larger_batch": {"memory": 16, "context": 125, "repeats": 2},
    "smaller.latent": {"shape": "stdlib-3m-mla", "context": 64, "repeats": 1},
    "smaller.rolling": {"window": 5, "sinks": 2, "global_every": 2, "tokens": 12},
    "smaller.quality": {"models": "stdlib-3m-gqa", "context": 128, "passages": 2},
    "smaller.windows": {"window": 8, "sinks": 2, "variants": False, "context": 64, "passages": 2},
    "smaller.kv_formats": {"context": 128, "layer": 1, "passages": 2, "group": 32},
    "smaller.convert": {
        "num_kv_heads": 1,
        "steps": 2,
        "sequences_per_step": 1,
        "sequence_length": 32,
        "context": 32,
        "passages": 2,
        "evaluations": 2,
    },
}
ROOT = Path(__file__).parents[3]
MOVED = {
    "variants": {"largest_context": 125},
    "larger_batch": {"memory": 32},
    "latent": {"new_tokens": 256},
    "rolling": {"shown_tokens": 4},
    "quality": {"users": 1024},
    "windows": {"window": 16},
    "kv_formats": {"context": 256},
    "convert": {"num_kv_heads": 2},
}
RUNS_ON_A_MODEL = ("rolling", "windows", "kv_formats", "convert")


class VariantBench(Bench):
    """A bench whose variants have random weights, and whose ceilings are a data sheet's: nothing is measured for
    them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, Decoder] = {}

    def ceilings(self):
        return PUBLISHED["h100-sxm"]

    def model(self, name, *, arrangement="plain", **settings):
        if not isinstance(name, str) or name not in CACHE_VARIANTS:
            return super().model(name, arrangement=arrangement, **settings)
        if name not in self.made:
            self.made[name] = Decoder(CACHE_VARIANTS[name], tokenizer=shipped_tokenizer(), name=name)
            initialize(self.made[name], 0)
            self.made[name].eval().requires_grad_(False)
        made = self.made[name]
        return made if arrangement == "plain" else decoding.prepare(made, **steps_of(arrangement), say=self.report)


@pytest.fixture
def bench() -> VariantBench:
    return VariantBench()


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model


@pytest.fixture(scope="module")
def runs(model, small_library):
    return brief_runs(SMALL, model, VariantBench)


@pytest.fixture
def make(model):
    """make(panel, **settings): that panel, drawn, on the smallest settings; on the tiny model where it takes one."""

    def made(name: str, **given):
        experiment_name = f"smaller.{name}"
        return shown(
            name, **{"bench": VariantBench(), **on_model(experiment_name, SMALL[experiment_name], model), **given}
        )

    return made


class TestExperiments(ExperimentClaims):
    lab, small, bench = 4, SMALL, VariantBench


class TestPanels(PanelClaims):
    small, moved, bench = SMALL, MOVED, VariantBench


@pytest.fixture(scope="module", autouse=True)
def small_library():
    """Two training modules, so that nothing is tokenized for seconds; the held-out ones stay."""
    held_out = corpus.held_out_files()
    some = [corpus.SourceFile(f"{n}.py", f"def f{n}(x):\n    return x + {n}\n" * 60) for n in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "standard_library", lambda root=None: [*held_out, *some])
        yield


# -- all of them -----------------------------------------------------------------------------------------------


# -- smaller.decode: shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", list(decoding.VARIANTS))
def test_the_small_size_is_the_shipped_variant(variant):
    assert decoding.variant_config("stdlib-3m", variant) == CACHE_VARIANTS[f"stdlib-3m-{variant}"]


@pytest.mark.parametrize("size", ["random-110m", "random-1b"])
def test_the_larger_shapes_have_the_same_attention_in_proportion(size):
    token = {v: decoding.variant_config(size, v).kv_values_per_token() for v in decoding.VARIANTS}
    base = decoding.variant_config(size, "mha")
    assert base.num_kv_heads == base.num_heads and token["mha"] == 2 * base.num_layers * base.num_heads * base.head_dim
    assert token["mha"] == base.num_heads * token["mqa"] == 2 * token["shared"] == token["hybrid"]
    assert token["mha"] >= 3 * token["gqa"] and token["mla"] == token["mqa"]
    hybrid = decoding.variant_config(size, "hybrid")
    assert hybrid.global_layers == tuple(range(2, base.num_layers, 3)) and hybrid.sliding_window == 512


def test_ways_belong_to_variants_and_kinds_that_exist():
    for way in decoding.WAYS.values():
        assert way.variant in decoding.VARIANTS and way.kv in KINDS
        assert way.name in COLOURS and way.name in MARKS
    assert {n for names in decoding.COMPARISONS.values() for n in names} == set(decoding.WAYS)
    # what the others are compared with
    assert all(names[0] == "mha" for names in decoding.COMPARISONS.values())


def test_contexts_end_with_the_largest():
    assert decoding.contexts_of(1000) == [125, 250, 500, 1000]
    assert decoding.contexts_of(64) == [8, 16, 32, 64]


# -- smaller.decode: what is counted and timed -----------------------------------------------------------------


@pytest.mark.parametrize("compare", list(decoding.COMPARISONS))
def test_every_way_is_measured_at_every_context_and_takes_its_turn(bench, compare):
    found = run_experiment("smaller.variants", {**SMALL["smaller.variants"], "compare": compare}, bench)
    names, left_out = decoding.ways_here(compare, "stdlib-3m", "cpu")
    assert [*names, *left_out] == list(decoding.COMPARISONS[compare])
    assert [(m.settings["context"], m.settings["way"]) for m in found] == [
        (c, way) for c in (8, 16, 32, 64) for way in names
    ]
    assert all(len(m.samples) == m.counts["rows"] == 2 for m in found)


@pytest.mark.parametrize("arrangement", ["plain", "fast"])
@pytest.mark.parametrize("compare", list(decoding.COMPARISONS))
def test_bytes_reserved_equal_the_formula_and_exact_ways_equal_the_oracle(bench, compare, arrangement):
    asked = {**SMALL["smaller.variants"], "compare": compare, "arrangement": arrangement}
    for m in run_experiment("smaller.variants", asked, bench):
        way = decoding.WAYS[m.settings["way"]]
        config = decoding.variant_config("stdlib-3m", way.variant)
        assert m.counts["bytes_reserved"] == decoding.reserved_bytes(way, config, 65, torch.float32)
        assert m.counts["bytes_in_use"] <= m.counts["bytes_reserved"]
        if way.exact:
            assert m.check.startswith("the next token equals") and m.counts["largest_difference"] < 1e-5
        else:
            assert m.check.startswith("lossy: logits differ by")
        if way.reads_codes:
            assert m.counts["cache_bytes_read_a_step"] == m.counts["bytes_in_use"]
            if (context := m.settings["context"]) < 64:  # after 64 the warm-up has made a group
                held = kv_bytes(config, context, 4, kv="quantized", kv_settings=way.settings)
                assert m.counts["cache_bytes_read_a_step"] == held
    last = {
        m.settings["way"]: m.counts["bytes_in_use"]
        for m in run_experiment("smaller.variants", asked, bench)
        if m.settings["context"] == 64
    }
    assert last["mha"] == kv_bytes(CACHE_VARIANTS["stdlib-3m-mha"], 64, 4)
    if compare == "variants":
        assert last["mqa"] == last["mla"] == last["mha"] / 6 and last["shared"] == last["mha"] / 2


def test_a_lossy_cache_loses_something_once_it_has_quantized_something(bench):
    asked = {"compare": "formats", "largest_context": 250, "repeats": 1}
    last = {m.settings["way"]: m for m in run_experiment("smaller.variants", asked, bench)}
    lost = {way: m.counts["largest_difference"] for way, m in last.items()}
    assert lost["mha"] < 1e-5 < lost["int8"] < lost["fp8"] < lost["int4"] < decoding.GIVEN_UP
    assert (
        last["int4"].counts["bytes_in_use"] < last["int8"].counts["bytes_in_use"] < last["mha"].counts["bytes_in_use"]
    )
    for name in set(decoding.ways_here("formats", "stdlib-3m", "cpu")[0]) - {"mha", "int8", "fp8", "int4"}:
        numbers, codes = last[decoding.WAYS[name].settings["format"]], last[name]
        assert codes.counts["bytes_in_use"] == numbers.counts["bytes_in_use"]
        assert lost[name] == pytest.approx(lost[numbers.settings["way"]], abs=1e-4)  # another order of additions
        assert codes.check.partition(";")[2] == numbers.check.partition(";")[2]  # the next token


def test_what_is_read_as_codes_is_predicted_without_numbers_in_between(bench):
    for name in ("int8", "fp8", "int4"):
        numbers, codes = (
            decoding.predicted_way(bench.ceilings(), decoding.WAYS[way], "stdlib-3m", 1000, "fast")[0]
            for way in (name, f"{name} as codes")
        )
        parts = [{o.name for o in costs.operations} for costs in (numbers, codes)]
        assert parts[0] - parts[1] == {"dequantize", "store"} and parts[1] < parts[0]
        assert codes.bytes_by_part["kv"] == numbers.bytes_by_part["kv"] and codes.bytes < numbers.bytes
        read = codes.bytes_by_part["kv"] - 6 * 6 * 64 * 4  # L·H_kv·(D + D_v)·b of the new token, which is stored
        config, how = CACHE_VARIANTS["stdlib-3m-mha"], decoding.WAYS[name].settings
        assert read == kv_bytes(config, 1000, 4, kv="quantized", kv_settings=how)


def test_a_way_that_cannot_be_had_is_left_out_by_name_with_the_reason(make, monkeypatch):
    codes = {n: decoding.WAYS[n] for n in decoding.COMPARISONS["formats"] if decoding.WAYS[n].reads_codes}
    here, left_out = decoding.ways_here("formats", "random-1b", "cuda")
    assert list(here) == ["mha", "int8", "fp8", "int4"] and set(left_out) == set(codes)
    assert all("is for CPUs, and this cache is on cuda" in reason for reason in left_out.values())
    predicted = {"size": "random-1b", "compare": "formats", "largest_context": 64, "arrangement": "fast"}
    assert set(decoding.predict_ways(PUBLISHED["h100-sxm"], **predicted)) == set(here)

    monkeypatch.setattr(decoding, "why_not_codes", lambda dtype, device: "no compiler was found")
    panel, reports = make("variants", compare="formats"), []
    monkeypatch.setattr(panel.bench, "report", reports.append)
    made = run_experiment("smaller.variants", {"compare": "formats", "largest_context": 64, "repeats": 1}, panel.bench)
    assert {m.settings["way"] for m in made} == set(here)
    words = f"Left out here: {'; '.join(way.title for way in codes.values())}. The reason: no compiler was found."
    assert words in reports and words in panel.said and len(panel.view(panel.settings).rows) == len(here)


def test_native_steps_stand_beside_the_loop_over_codes_and_say_what_they_were(bench):
    asked = {"compare": "native steps", "largest_context": 250, "repeats": 1}
    last = {m.settings["way"]: m for m in run_experiment("smaller.variants", asked, bench)}
    here, left_out = decoding.ways_here("native steps", "stdlib-3m", "cpu")
    assert list(last) == list(here)
    for name, m in last.items():
        assert decoding.WAYS[name].native == m.check.endswith("one function in C++")
        config = decoding.variant_config("stdlib-3m", decoding.WAYS[name].variant)
        costs, _ = decoding.predicted_step(PUBLISHED["h100-sxm"], decoding.WAYS[name], config, torch.float32, context=9)
        assert (costs.launches == 0) == decoding.WAYS[name].native, "one function starts no operations"
    for name in {"int8 native", "int4 native"} - set(left_out):
        eager, native = last[name.replace("native", "as codes")], last[name]
        # what is read, and with which codes: those of a chunk's keys may differ in the last place
        assert native.counts["cache_bytes_read_a_step"] == eager.counts["cache_bytes_read_a_step"]
        lost = [m.counts["largest_difference"] for m in (native, eager)]
        assert lost[0] == pytest.approx(lost[1], rel=0.5)
    on_gpu, why = decoding.ways_here("native steps", "random-1b", "cuda")
    assert list(on_gpu) == ["mha"] and "native steps are for CPUs" in why["mha native"]


def test_formats_are_drawn_each_in_its_colour_and_no_label_is_cut(make):
    panel = make("variants", compare="formats", repeats=1)
    panel.run()
    names, view = decoding.ways_here("formats", "stdlib-3m", "cpu")[0], panel.view(panel.settings)
    assert [row[0] for row in view.rows] == [decoding.WAYS[name].title for name in names]
    assert set(lines_of(view.figure.axes[0])) == {COLOURS[name] for name in names}
    assert cut_or_small(view.figure) == []
    assert "Left out" not in panel.said or len(names) == 4


def test_every_way_has_a_colour_and_a_mark_of_its_own():
    assert len(set(COLOURS.values())) == len(COLOURS) and len(set(MARKS.values())) == len(MARKS)


def test_the_prediction_of_a_run_is_the_one_that_is_drawn(bench):
    asked = {"size": "stdlib-3m", "compare": "forms of MLA", "largest_context": 64, "arrangement": "fast"}
    drawn = decoding.predict_ways(bench.ceilings(), **asked)
    for m in run_experiment("smaller.variants", {**asked, "repeats": 1}, bench):
        assert (m.settings["context"], m.predicted, m.limit) in drawn[m.settings["way"]]
    assert decoding.predict_decode(bench.ceilings(), **asked) == drawn["mha"]


def test_the_settings_of_a_way_reach_the_cost_model(bench):
    flops, kept = {}, {}
    for name, way in decoding.WAYS.items():
        costs, _ = decoding.predicted_way(bench.ceilings(), way, "random-110m", 2000, "fast")
        flops[name], kept[name] = costs.flops, costs.bytes_by_part["kv"]
    assert flops["mla re-expanded"] > 2 * flops["mla"] and kept["mla kept expanded"] > 10 * kept["mla"]
    assert kept["mha"] > kept["int8"] > kept["int4"]
    # both read; the shared store half as often
    assert kept["mha"] == kept["shared"] + (kept["mha"] - kept["shared"])
    assert kept["hybrid"] < 0.7 * kept["mha"] and kept["mqa"] == pytest.approx(kept["mha"] / 12)


def test_a_context_beyond_the_model_is_refused_with_numbers(bench):
    with pytest.raises(WorkbenchError, match=r"makes 2,001 tokens, and stdlib-3m reads at most 1,024"):
        run_experiment("smaller.variants", {"largest_context": 2000}, bench)


def test_what_would_not_fit_is_refused_before_a_model_is_made(bench, monkeypatch):
    monkeypatch.setattr("workbench.instruments.memory.available_bytes", lambda device: 10**9)
    monkeypatch.setattr(decoding, "model_of", lambda *a: pytest.fail("a model was made"))
    with pytest.raises(WorkbenchError, match=r"comparing 6 variants of random-1b at 1,000 tokens needs [\d.]+ GB"):
        run_experiment("smaller.variants", {"size": "random-1b"}, bench)


class LosesKeys(Contiguous):
    """A cache with a mistake: keys of all but the first step are lost."""

    def attend(self, layer, q, k, v, batch, up=None):
        return super().attend(layer, q, 0 * k if batch.first_positions[0] else k, v, batch, up)


class LosesLatents(Latent):
    def attend(self, layer, q, k, v, batch, up=None):
        return super().attend(layer, q, 0 * k if batch.first_positions[0] else k, v, batch, up)


@pytest.mark.parametrize(
    ("kind", "broken", "compare", "title"),
    [
        ("contiguous", LosesKeys, "variants", "MHA"),
        ("latent", LosesLatents, "variants", "MLA, absorbed"),
        ("contiguous", LosesKeys, "formats", "MHA"),
    ],
)
def test_a_cache_of_ours_that_were_wrong_would_never_be_timed(bench, monkeypatch, kind, broken, compare, title):
    monkeypatch.setitem(KINDS, kind, broken)
    asked = {**SMALL["smaller.variants"], "compare": compare, "arrangement": "plain"}
    with pytest.raises(WorkbenchError, match=rf"^{title}: .* thrown away"):
        run_experiment("smaller.variants", asked, bench)


def test_a_quantized_cache_that_holds_rubbish_is_no_lossy_one(bench, monkeypatch):
    honest = decoding._Runner._send

    def send(self, start, end):
        logits = honest(self, start, end)
        return logits.flip(-1) if self.way.name == "int4" else logits

    monkeypatch.setattr(decoding._Runner, "_send", send)
    with pytest.raises(WorkbenchError, match=r"^MHA in int4: logits differ by .* no rounding: .* thrown away"):
        run_experiment("smaller.variants", {**SMALL["smaller.variants"], "compare": "formats"}, bench)


def test_a_learners_cache_drives_the_variant_of_its_choice_and_is_told_how_it_does(bench):
    asked = {**SMALL["smaller.variants"], "yours_on": "gqa", "arrangement": "plain"}
    found = run_experiment("smaller.variants", asked, bench, {"kv": lambda config: Contiguous(config)})
    yours = [m for m in found if m.settings["way"] == "yours"]
    assert len(yours) == 4 and yours[-1].settings["variant"] == "gqa" and yours[-1].predicted is None
    assert yours[-1].check.startswith("equal within rounding to one pass without a cache")
    found = run_experiment("smaller.variants", asked, bench, {"kv": LosesKeys})
    assert [m for m in found if m.settings["way"] == "yours"][-1].check.startswith("not those of one pass")


# -- smaller.larger_batch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", filling.COMPARED)
@pytest.mark.parametrize(("memory", "context"), [(16, 125), (64, 1000), (512, 500)])
def test_the_largest_batch_is_the_largest_of_which_a_cache_is_within_the_memory(name, memory, context):
    fit = filling.fits_of("stdlib-3m", memory, context, "cpu")[name]
    way, config = fit.way, CACHE_VARIANTS[f"stdlib-3m-{fit.way.variant}"]
    settings = {key: value for key, value in way.settings.items() if key != "form"}
    reserved = [
        KINDS[way.kv](config, max_sequences=count, max_tokens=context + 1, **settings).bytes_reserved
        for count in (fit.sequences, fit.sequences + 1)
    ]
    assert reserved == [fit.bytes_reserved, fit.bytes_with_one_more]
    assert reserved[0] <= memory * 10**6 < reserved[1]


def test_a_sixth_of_the_bytes_is_six_times_the_sequences_but_for_the_last_one():
    fits = {name: f.sequences for name, f in filling.fits_of("stdlib-3m", 1024, 1000, "cpu").items()}
    mha = 1024 * 10**6 / (2 * 6 * 6 * 32 * 4 * 1001)
    assert fits["mha"] == int(mha) and fits["gqa"] == int(3 * mha) and fits["shared"] == int(2 * mha)
    assert fits["mqa"] == fits["mla"] == int(6 * mha)
    assert int(2 * mha) < fits["hybrid"] < int(3 * mha)  # two layers keep all, four the window and room to rewind


def test_every_way_fills_its_memory_and_refuses_one_more(runs):
    made = runs["smaller.larger_batch"]
    assert [m.settings["way"] for m in made] == list(filling.COMPARED)
    for m in made:
        c, asked = m.counts, SMALL["smaller.larger_batch"]
        assert len(m.samples) == asked["repeats"] and c["rows"] == c["sequences"] * asked["repeats"]
        assert c["bytes_reserved"] <= c["bytes_for_kv"] == asked["memory"] * 10**6 < c["bytes_with_one_more"]
        assert 0 < c["bytes_in_use"] <= c["bytes_reserved"]
        if m.settings["kv"] == "contiguous":  # a new token's place was freed again
            assert c["bytes_in_use"] * 126 == c["bytes_reserved"] * 125
        assert f"one more was refused: all {c['sequences']:.0f} slots of the KV cache are taken" in m.check
        if m.settings["way"] != "int8":
            assert f"the next tokens of all {c['sequences']:.0f} equal those of one pass" in m.check
            assert c["largest_difference"] < 1e-3
    assert "lossy" in made[-1].check


def test_the_batch_that_is_predicted_is_the_one_that_is_measured(bench, runs):
    asked = {"size": "stdlib-3m", "repeats": 1} | SMALL["smaller.larger_batch"]
    expected = filling.predict_larger_batch(bench.ceilings(), **asked)
    made = runs["smaller.larger_batch"]
    assert [(m.counts["sequences"], m.predicted, m.limit) for m in made] == expected


def test_gains_are_tokens_a_second_turn_by_turn(runs):
    made = runs["smaller.larger_batch"]
    base, other = (dataclasses.replace(m, samples=s) for m, s in zip(made, ([2.0, 4.0], [1.0, 8.0])))
    times = other.counts["sequences"] / base.counts["sequences"]
    assert filling.gains([base, other]) == {"gqa": [times * 0.5, times * 2]}
    assert filling.gains([other]) == {} == filling.gains([])


class LosesKeysOfTheLast(Contiguous):
    """A cache with a mistake that only the last of several sequences shows."""

    def attend(self, layer, q, k, v, batch, up=None):
        out = super().attend(layer, q, k, v, batch, up)
        return torch.cat([out[:-1], 0 * out[-1:]]) if len(batch.sequences) > 1 else out


def test_a_row_that_were_wrong_would_never_be_timed(bench, monkeypatch):
    monkeypatch.setitem(KINDS, "contiguous", LosesKeysOfTheLast)
    with pytest.raises(WorkbenchError, match=r"MHA: logits of 13 sequences differ by .* its time was thrown away"):
        run_experiment("smaller.larger_batch", {"memory": 16, "context": 125, "repeats": 1}, bench)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory": 16, "context": 2000}, "makes 2,001 tokens, and stdlib-3m reads at most 1,024; choose a smaller"),
        ({"memory": 16_384, "context": 125}, "a step takes at most 4,096; choose less memory, or a longer context"),
        (
            {"size": "random-110m", "memory": 16, "context": 1000},
            "MHA: one sequence of 1,001 tokens reserves 73.8 MB, and there are 16.0 MB for keys and values",
        ),
    ],
)
def test_a_memory_that_takes_no_sequence_or_too_many_is_refused_before_a_model_is_made(bench, given, message):
    with pytest.raises(WorkbenchError, match=message):
        run_experiment("smaller.larger_batch", given, bench)
    assert bench.made == {}


def test_memories_that_would_not_fit_beside_each_other_are_refused(bench, monkeypatch):
    monkeypatch.setattr("workbench.instruments.memory.available_bytes", lambda device: 10**8)
    with pytest.raises(WorkbenchError, match="7 full memories of stdlib-3m beside each other needs"):
        run_experiment("smaller.larger_batch", {}, bench)
    assert bench.made == {}


def test_a_published_shape_fills_a_card_by_its_formula():
    gigabytes, context = 80 * 10**9, 4000
    forms_of = filling.published_forms("llama-2-7b")
    values = {"mha": 2 * 32 * 128, "gqa": 2 * 8 * 128, "mqa": 2 * 128, "mla": 512 + 64}
    for one in filling.on_card("llama-2-7b", "h100-sxm", context):
        config = forms_of[one.name]
        assert config.kv_values_per_token() == 32 * values[one.name]
        left = gigabytes - 2 * config.num_parameters()
        assert one.fit.sequences == left // (2 * 32 * values[one.name] * (context + 1))
        assert one.tokens_per_s == one.fit.sequences / one.prediction.seconds
    with pytest.raises(WorkbenchError, match="llama-2-70b has no key and value for every head"):
        filling.published_forms("llama-2-70b")
    with pytest.raises(WorkbenchError, match="one sequence of 4,000,001 tokens reserves"):
        filling.on_card("llama-2-7b", "h100-sxm", 4_000_000)


# -- smaller.forms ---------------------------------------------------------------------------------------------


def test_the_crossover_of_deepseeks_shape_is_171_new_tokens():
    latent = public_shape("deepseek-v3").latent_attention
    assert forms.crossover(latent) == 512 * 256 / (1024 - 256) == pytest.approx(170.67, abs=0.01)
    assert forms.crossover(dataclasses.replace(latent, kv_rank=128)) == float("inf")
    assert absorbing_pays(latent, 170) and not absorbing_pays(latent, 171)


@pytest.mark.parametrize("shape", forms.SHAPES)
def test_the_counted_crossover_is_where_flops_cross_and_nears_the_formula(shape):
    latent = forms.layer_config(shape).latent_attention
    for context in (64, 1024, 65_536):
        where = forms.counted_crossover(shape, context)
        for new, dearer in ((where - 1, False), (where, True)):
            absorbed, expanded = (forms.form_costs(shape, form, new, context, 4).flops for form in forms.FORMS)
            assert (absorbed >= expanded) == dearer, (context, new)
        assert where <= forms.crossover(latent) + 1
    assert where == pytest.approx(forms.crossover(latent), rel=0.01)


@pytest.mark.parametrize("new", [1, 16, 512])
@pytest.mark.parametrize("shape", forms.SHAPES)
def test_flops_of_both_forms_are_those_of_the_formula(shape, new):
    config, context = forms.layer_config(shape), 1000
    a, heads, pairs = config.latent_attention, config.num_heads, causal_pairs(new, context)
    ups = a.kv_rank * (a.content_head_dim + a.value_head_dim)
    absorbed = 2 * heads * (new * ups + pairs * (2 * a.kv_rank + a.rotary_head_dim))
    expanded = 2 * heads * ((context + new) * ups + pairs * (a.key_head_dim + a.value_head_dim))
    costs = {form: forms.form_costs(shape, form, new, context, 4) for form in forms.FORMS}
    assert (costs["absorbed"].flops, costs["expanded"].flops) == (absorbed, expanded)
    for c in costs.values():
        assert c.cache_bytes + c.weight_bytes + c.other_bytes == pytest.approx(c.bytes)
        assert c.weight_bytes == 4 * heads * ups
    assert costs["expanded"].other_bytes > 4 * (context + new) * heads * (a.key_head_dim + a.value_head_dim)


def test_where_two_lines_cross():
    assert forms.crossing([(1, 1.0), (100, 100.0)], [(1, 10.0), (100, 10.0)]) == pytest.approx(10.0)
    assert forms.crossing([(1, 1.0), (2, 1.0)], [(1, 2.0), (2, 2.0)]) is None
    assert forms.crossing([(1, 3.0), (2, 3.0)], [(1, 2.0), (2, 2.0)]) is None


def test_both_forms_are_measured_in_turns_and_give_the_same(bench):
    found = run_experiment("smaller.latent", SMALL["smaller.latent"], bench)
    assert [(m.settings["new_tokens"], m.settings["form"]) for m in found] == [
        (n, form) for n in forms.NEW_TOKENS for form in forms.FORMS
    ]
    for m in found:
        assert m.counts["largest_difference"] < 1e-4 and m.counts["bytes_in_use"] == 64 * 64 * 4
        costs, expected = forms.predicted_form(
            bench.ceilings(), "stdlib-3m-mla", m.settings["form"], m.settings["new_tokens"], 64, "float32"
        )
        assert (m.counts["flops"], m.predicted) == (costs.flops, expected.seconds)


def test_forms_that_differed_would_never_be_timed(bench, monkeypatch):
    honest = UpProjections.restore
    monkeypatch.setattr(UpProjections, "restore", lambda self, mixed: 1.01 * honest(self, mixed))
    with pytest.raises(WorkbenchError, match=r"the two forms differ by 0\.01 of the largest value, more than 0\.0001"):
        run_experiment("smaller.latent", SMALL["smaller.latent"], bench)


def test_a_run_of_minutes_is_refused_and_says_what_else_to_do(bench, monkeypatch):
    slow = dataclasses.replace(PUBLISHED["h100-sxm"], flop_per_s={"float32": 1e9})
    monkeypatch.setattr(bench, "ceilings", lambda: slow)
    with pytest.raises(WorkbenchError, match=r"would take about [\d,]+ minutes here; .* Choose a smaller context"):
        run_experiment("smaller.latent", {"shape": "deepseek-v3"}, bench)


# -- smaller.rolling -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "sinks", "rewind"), [(4, 0, 1), (4, 2, 1), (1, 0, 1), (5, 3, 4), (12, 2, 16)])
def test_the_places_of_a_buffer_hold_what_its_window_may_still_need(window, sinks, rewind):
    buffer = rolling.Buffer(window, sinks, rewind)
    for tokens in range(1, 60):
        held = buffer.held(tokens)
        live = {p for p in held if p is not None}
        newest = set(range(max(0, tokens - window - rewind + 1), tokens))
        assert live == newest | set(range(min(sinks, tokens))) or len(live) == buffer.places
        assert buffer.seen(tokens) <= live and tokens - 1 in live
        for back in range(rewind):  # so many tokens can be taken back
            if tokens - back > 0:
                assert buffer.seen(tokens - back) <= live
        assert all(buffer.place_of(p) == place for place, p in enumerate(held) if p is not None)


def test_the_kv_says_what_the_formula_says_and_attends_as_the_mask_would(tiny_model, bench):
    config = rolling.rolling_config(tiny_model.config, window=5, sinks=2, global_every=2)
    assert config.global_layers == (1,)
    found = run_experiment("smaller.rolling", {"model": tiny_model, **SMALL["smaller.rolling"]}, bench)
    a_token = 2 * 2 * 8 * 4  # 2·H_kv·D·b, one layer of the tiny model
    assert [m.median for m in found] == [a_token * (min(n, 7) + n) for n in range(1, 13)]
    assert all(m.median == m.predicted and m.counts["bytes_full"] == 2 * a_token * n for n, m in enumerate(found, 1))
    assert all(m.counts["largest_difference"] < 1e-5 for m in found)


def test_a_buffer_that_forgot_its_sinks_would_be_found_out(tiny_model, bench, monkeypatch):
    def forgetful(kind, config, **settings):
        if kind == "window":
            return Window(dataclasses.replace(config, attention_sinks=0), **settings)
        return KINDS[kind](config, **settings)

    monkeypatch.setattr(rolling, "make_kv", forgetful)
    with pytest.raises(WorkbenchError, match=r"after \d+ tokens the logits differ by .* something else than it should"):
        run_experiment("smaller.rolling", {"model": tiny_model, **SMALL["smaller.rolling"]}, bench)


def test_a_window_in_no_layer_is_refused(tiny_model):
    with pytest.raises(WorkbenchError, match="global_every=1 leaves no layer with a window"):
        rolling.rolling_config(tiny_model.config, window=4, sinks=0, global_every=1)
    with pytest.raises(WorkbenchError, match="plain keys and values"):
        rolling.rolling_config(CACHE_VARIANTS["stdlib-3m-mla"], window=4, sinks=0, global_every=0)


# -- all panels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["variants", "latent"])
def test_stop_ends_a_run_within_a_second(make, name):
    """The best of three, because a machine that runs ten other things takes a second to do nothing at all."""
    long = {"variants": {"largest_context": 250, "repeats": 100}, "latent": {"context": 512, "repeats": 50}}
    panel = make(name, **long[name])
    taken = []
    for _ in range(3):
        panel.run_button.click()
        while "running: " not in panel.status.value:
            assert panel._worker.is_alive()
            time.sleep(0.005)
        started = time.monotonic()
        panel.stop_button.click()
        panel._worker.join(30)
        taken.append(time.monotonic() - started)
        assert panel.wait(30) and "stopped" in panel.status.value
    assert min(taken) < 1.0


def test_hostile_names_are_shown_inert(make):
    hostile = random_decoder(tiny_config(context_length=256), tokenizer=shipped_tokenizer(), name="<img src=x>$\\frac$")
    for name in ("rolling", "windows", "kv_formats"):
        panel = make(name, model=hostile)
        panel.run()
        shown = panel.said + panel.extra.value + panel.table.value + panel.status.value
        assert "<img" not in shown and "error" not in panel.status.value


# -- each panel ------------------------------------------------------------------------------------------------


def lines_of(axes) -> dict[str, list[float]]:
    """{colour: y values} of the measured lines in a plot."""
    return {line.get_color(): list(line.get_ydata()) for line in axes.lines if line.get_linestyle() == "-"}


def test_the_table_of_variants_says_what_the_plot_draws(make):
    panel = make("variants")
    panel.run()
    view = panel.view(panel.settings)
    drawn = lines_of(view.figure.axes[0])
    for way, row in zip(decoding.COMPARISONS["variants"], view.rows):
        m = next(m for m in reversed(panel.measurements) if m.settings["way"] == way)
        assert drawn[COLOURS[way]][-1] == pytest.approx(m.median)
        assert row[0] == decoding.WAYS[way].title and row[4].startswith(style.milliseconds(m.median))
        assert row[1] == row[2] == f"{m.counts['bytes_reserved']:,.0f}"


def test_regimes_are_named_in_words(make):
    # a small model on an H100's data sheet
    assert "No gain in time to speak of" in make("variants").said
    assert "launch-bound" in make("latent").said
    panel = make("variants", size="random-1b", largest_context=32_000)
    assert "bandwidth-bound" in panel.said and "No gain" not in panel.said


def test_a_learners_cache_is_drawn_and_judged_in_words(make):
    panel = make("variants", arrangement="plain", yours_on="gqa")
    panel.run(kv=lambda config: Contiguous(config))
    assert "with your kv" in panel.status.value and "Yours: equal within rounding" in panel.said
    assert ">yours<" in panel.table.value
    panel.run(kv=LosesKeys)
    assert "Yours: not those of one pass" in panel.said


@pytest.mark.parametrize("shape", forms.SHAPES)
def test_the_picture_of_mla_names_what_is_cached_and_who_wins(make, shape):
    panel = make("latent", shape=shape, new_tokens=1, context=1024)
    a = forms.layer_config(shape).latent_attention
    assert f"{a.kv_rank} + {a.rotary_head_dim} = {a.cached_dim} values a token" in panel.said
    texts = [t.get_text() for t in panel.view(panel.settings).figure.axes[0].texts]
    assert any(t.startswith("absorbed") and "fewer FLOPs" in t for t in texts)
    panel.configure(new_tokens=512)
    texts = [t.get_text() for t in panel.view(panel.settings).figure.axes[0].texts]
    assert any(t.startswith("expanded") and "fewer FLOPs" in t for t in texts)


def test_the_words_of_mla_give_28_and_57_times(make):
    words = make("latent", shape="deepseek-v3", context=1024).said
    assert "16,384 (28.4 ×)" in words and "32,768 (56.9 ×)" in words and "170.7" in words


def test_play_moves_the_slider_and_the_slider_play(make):
    panel = make("rolling")
    panel.play.value = 9
    assert panel.wait(30) and panel.settings["shown_tokens"] == 9 and "Token 8 stands at place" in panel.said
    panel.configure(shown_tokens=3)
    assert panel.wait(30) and panel.play.value == 3


def test_the_rolling_picture_shows_positions_in_their_places(make):
    panel = make("rolling", shown_tokens=12)
    ring = panel.view(panel.settings).figure.axes[1]
    buffer = rolling.Buffer(5, 2, 1)
    assert [t.get_text() for t in ring.texts] == [str(p) for p in buffer.held(12)]
    assert "holds 0 to 1, 7 to 11" in panel.said


def test_a_design_fits_when_its_weights_and_all_caches_do():
    for model in VARIANTS:
        config = CACHE_VARIANTS[model]
        one = KINDS[kind_for(config)].reserved_bytes_for(config, max_sequences=1, max_tokens=512, dtype=torch.float32)
        needed = 4 * config.num_parameters() + 16 * one
        for memory in (needed // 10**6, needed // 10**6 + 1):
            found = design(model, memory=memory, users=16, tokens=512)
            assert found.cache_bytes == 16 * one and found.fits == (needed <= memory * 10**6)


def loss_of(model: str, loss: float) -> Measurement:
    return Bench().measurement(
        name="smaller.quality",
        settings={"model": model, "measured": "loss", "context": 1024},
        samples=[loss],
        unit="nats/token",
        counts={"above_first": loss - 2.8, "above_first_standard_error": 0.01},
    )


def test_the_best_of_what_fits_is_named_and_what_does_not_fit_is_not(make):
    losses = {"stdlib-3m-mha": 2.8, "stdlib-3m-gqa": 2.83, "stdlib-3m-mqa": 2.9, "stdlib-3m-mla": 2.81}
    panel = make("quality", models="all", users=64, tokens=1024, memory=512)
    panel.measurements = [loss_of(model, loss) for model, loss in losses.items()]
    panel.refresh()
    assert panel.wait(30)
    # MHA is better and does not fit
    assert "the lowest held-out loss is that of MLA, 2.8100" in panel.said
    panel.configure(memory=1024)
    assert panel.wait(30) and "the lowest held-out loss is that of MHA, 2.8000" in panel.said
    panel.configure(memory=16)
    assert panel.wait(30) and "none of these designs fits" in panel.said


@pytest.mark.parametrize(
    ("shipped", "beside"),
    [
        (1_843_200, ""),
        (3_072_000, " for 1.8 million tokens, shorter than these models"),
        (921_600, " for 1.8 million tokens, longer than these models"),
    ],
)
def test_the_words_of_quality_say_when_the_runs_with_other_seeds_were_of_another_length(
    make, monkeypatch, shipped, beside
):
    monkeypatch.setattr(quality_panel, "shipped_tokens_seen", lambda model: shipped)
    monkeypatch.setattr(quality_panel, "tokens_seen", lambda: 1_843_200)
    panel = make("quality", models="all")
    panel.measurements = [loss_of("stdlib-3m-mha", 3.9)]
    assert f"with the seeds 0 and 1{beside}; from one to another" in panel.view(panel.settings).words


# -- trained longer --------------------------------------------------------------------------------------------

SHORT = {"mha": (4.0, 4.0), "gqa": (4.01, 4.0), "mqa": (4.05, 4.06), "mla": (4.2, 4.19), "hybrid": (3.9, 3.91)}
SHORT["shared"] = (4.02, 4.03)  # seeds 0 and 1; every difference from MHA moves by 0.01, so its spread is 0.00707
HELD = dict(zip(SHORT, (3.5, 3.52, 3.56, 3.65, 3.41, 3.53)))
SWAPPED = HELD | {"gqa": 3.54, "hybrid": 3.51}


@pytest.fixture
def on_file(tmp_path, monkeypatch):
    """Runs of 2,048 tokens with two seeds, and longer ones with seed 0 (and 1), in the place of those on file."""

    def put(*longer: dict[str, float]) -> None:
        by_run = {(2048, seed): {name: both[seed] for name, both in SHORT.items()} for seed in (0, 1)}
        by_run |= {(4096, seed): losses for seed, losses in enumerate(longer)}
        runs = [
            {"model": f"stdlib-3m-{name}", "seed": seed, "nats_per_token": loss, "tokens": 9, "tokens_seen": seen}
            for (seen, seed), losses in by_run.items()
            for name, loss in losses.items()
        ]
        (tmp_path / "seeds.json").write_text(json.dumps(runs))
        monkeypatch.setattr(seeds, "SEEDS", tmp_path / "seeds.json")

    return put


def test_with_runs_of_one_length_nothing_is_said_of_longer_ones(on_file):
    on_file()
    words = longer.in_words()
    assert words.startswith("All runs with seed 0 that are on file are of one length, 2,048 tokens, so whether")
    assert words.count(". ") == 0 and "order held" not in words and longer.in_a_sentence() == ""
    header, rows, _ = longer.as_table()
    assert header == ["", "2,048 tokens"] and all(len(row) == 2 for row in rows)
    assert rows[:2] == [["MHA's own loss", "4.0000"], ["GQA", "+0.0100"]]


def test_an_order_that_held_and_what_moved_beside_the_spread(on_file):
    on_file(HELD)
    header, rows, _ = longer.as_table()
    assert header == ["", "2,048 tokens", "4,096 tokens", "moved by", "in spreads"]
    assert rows[0] == ["MHA's own loss", "4.0000", "3.5000", "-0.5000", ""]
    assert [row[0] for row in rows[1:]] == ["GQA", "MQA", "MLA", "hybrid windows", "shared layers"]
    assert rows[3] == ["MLA", "+0.2000", "+0.1500", "-0.0500", "-7.1"]
    words = longer.in_words()
    assert words.startswith("From 2,048 to 4,096 tokens MHA's loss goes from 4.000 to 3.500. ")
    assert "**The order held**: hybrid windows, MHA, GQA, shared layers, MQA and MLA, the lowest loss first." in words
    assert "moved by 0.010 to 0.050 nats; the spread of one from seed to seed is 0.007" in words
    assert "Those of MLA (+0.200 to +0.150) moved by more than 2 spreads." in words
    assert "At 4,096 tokens there is one run of each variant, with one seed" in words


def test_an_order_that_did_not_hold_names_the_pairs_and_whether_they_were_apart(on_file):
    on_file(SWAPPED)
    words = longer.in_words()
    assert "**The order did not hold** for 2 of 15 pairs: " in words
    assert "hybrid windows was ahead of MHA by 0.100 and is behind by 0.010; " in words
    assert "GQA was ahead of shared layers by 0.010 and is behind by 0.010. " in words
    assert "Before, 1 of these was more than 2 spreads apart." in words
    sentence = longer.in_a_sentence()
    assert "hybrid windows with MHA and GQA with shared layers change places, and" in sentence
    assert "the differences of GQA (+0.010 to +0.040), MLA (" in sentence and "hybrid windows (-0.100 to" in sentence


def test_differences_that_stay_are_said_to_stay_and_a_second_seed_is_no_single_run(on_file):
    first, second = ({name: both[seed] - 0.5 for name, both in SHORT.items()} for seed in (0, 1))
    on_file(first, second)
    words = longer.in_words()
    assert "None moved by more than 2 spreads." in words and "one run of each variant" not in words
    assert "runs of 2,048 tokens" in words  # of two lengths with as many seeds the shorter has the spread
    assert longer.in_a_sentence().endswith(
        "the variants keep their order, and no difference moved by more than 2 of those standard deviations."
    )


def test_the_words_of_quality_say_how_differences_moved_where_longer_runs_are_on_file(make, on_file):
    panel = make("quality", models="all")
    panel.measurements = [loss_of("stdlib-3m-mha", 3.9)]
    on_file()
    before = panel.view(panel.settings)
    assert "Trained on" not in before.words
    on_file(HELD)
    after = panel.view(panel.settings)
    assert f" {longer.in_a_sentence()} What models as small" in after.words
    assert after.words.replace(f" {longer.in_a_sentence()}", "") == before.words
    assert (after.rows, after.alt) == (before.rows, before.alt)


@pytest.mark.parametrize("long", [(), (HELD,), (SWAPPED,)], ids=["one length", "order held", "order changed"])
def test_the_lecture_shows_the_table_and_the_words(on_file, long):
    on_file(*long)
    source = next(one for one in find_sources(ROOT) if one.relative_name == "notebooks/04_smaller_caches")
    cells = [c.source for c in read_source(source).cells if c.cell_type == "code" and "longer." in c.source]
    shown: list[object] = []
    lecture = {"table": lambda *given: shown.append(given), "say": shown.append}
    for cell in cells:
        exec(cell, lecture)
    assert shown == [longer.as_table(), longer.in_words()]


def test_knobs_are_checked_like_settings_and_refused_whole(make):
    panel = make("quality")
    with pytest.raises(WorkbenchError, match="did you mean 'users'"):
        panel.configure(user=3)
    with pytest.raises(WorkbenchError, match="users"):
        panel.configure(passages=4, users=3)
    assert panel.controls["passages"].value == 2  # refused whole
    with pytest.raises(WorkbenchError, match="memory"):
        make("quality", memory=3)
    panel.configure(users=256)
    assert panel.knob_settings["users"] == 256


def test_quality_points_stand_where_the_table_says(make):
    panel = make("quality", tokens=128)
    panel.run()
    view = panel.view(panel.settings)
    m = next(m for m in panel.measurements if m.settings["measured"] == "loss")
    [point] = [line for line in view.figure.axes[0].lines if len(line.get_xdata()) == 1 and line.get_marker() == "s"]
    assert list(point.get_ydata()) == [m.median] and view.rows[0][3].startswith(f"{m.median:.4f}")
    assert view.rows[0][2] == f"{point.get_xdata()[0]:,.0f}"


def test_losses_by_position_are_drawn_and_listed_for_every_way(make):
    panel = make("windows")
    panel.run()
    view = panel.view(panel.settings)
    assert view.header == ["positions", "full", "window", "window and sinks"]
    drawn = {
        line.get_label(): list(line.get_ydata()) for line in view.figure.axes[0].lines if len(line.get_xdata()) > 2
    }
    for column, way in enumerate(view.header[1:], 1):
        assert [row[column] for row in view.rows[:-1]] == [f"{y:.3f}" for y in drawn[way]]
    assert "draw" in view.words and "of the attention" in view.words


def test_a_learners_window_is_listed_beside_ours(make):
    panel = make("windows")
    panel.run(kv=lambda config: Window(config, window=8))
    assert ">yours<" in panel.table.value and "Yours, against the whole text" in panel.said


def test_every_format_is_drawn_with_its_excess(make):
    panel = make("kv_formats")
    panel.run()
    view = panel.view(panel.settings)
    bars = [p.get_height() for p in view.figure.axes[2].patches]
    excess = [
        100 * m.counts["excess"]
        for m in panel.measurements
        if m.settings["measured"] in ("kv", "scheme") and m.settings["format"] != "full precision"
    ]
    assert bars == pytest.approx(excess) and len(view.rows) == len(bars) + 1
    assert "Keys: the largest channel" in view.words and "int8" in view.words


def test_the_stages_of_a_conversion_are_told_in_order(make):
    panel = make("convert")
    panel.run()
    view = panel.view(panel.settings)
    assert [row[0] for row in view.rows][:2] == ["before", "heads averaged"] and view.rows[-1][0] == "trained on"
    assert "2 key-value heads become 1" in view.words and "averaging alone" in view.words


# -- small parts -----------------------------------------------------------------------------------------------


def test_labels_of_near_points_are_kept_apart_and_far_ones_stay():
    heights = apart([(0.1, 0.5), (0.15, 0.51), (0.9, 0.5)], near=0.3, gap=0.1)
    assert heights[0] == 0.5 and heights[1] == pytest.approx(0.6) and heights[2] == 0.5


@pytest.mark.parametrize(
    ("flops", "words"), [(999, "999 FLOP"), (4.31e9, "4.31 GFLOP"), (1.5e12, "1.5 TFLOP"), (3.99e7, "39.9 MFLOP")]
)
def test_flops_are_written_with_their_unit(flops, words):
    assert flop_words(flops) == words


def test_lists_read_as_sentences():
    assert (listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])) == ("a", "a and b", "a, b and c")


def test_the_public_shapes_of_the_lecture_are_there():
    assert {"llama-2-7b", "llama-2-70b", "deepseek-v3", "gemma-3-1b", "mistral-7b"} <= set(PUBLIC_SHAPES)
