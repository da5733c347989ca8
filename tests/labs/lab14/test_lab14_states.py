"""Lab 14: a state remembers as well as the best polynomial does, forms of a scan are equal and cost what is counted,
real caches say what the formulas say, and published sizes are judged by them."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from experiment_claims import DataSheetBench, ExperimentClaims, brief_runs
from panel_claims import PanelClaims, shown

from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.kv import make_kv
from workbench.labs.lab14_beyond_transformers import cache_table, forms, hippo, state_memory
from workbench.models.mixers import make_mixer, mamba2
from workbench.models.recipes import STATE_VARIANTS

SMALL = {
    "beyond.hippo": {"signal": "sines", "samples": 256, "size": 16},
    "beyond.forms": {"kind": "mamba", "length": 64, "chunk": 16, "repeats": 2},
    "beyond.state_memory": {"model": "stdlib-3m-linear", "longest": 512, "repeats": 1},
    "beyond.cache_table": {"context": 262_144},
}
MOVED = {
    "hippo": {"size": 64},
    "forms": {"chunk": 32},
    "state_memory": {"longest": 1024},
    "cache_table": {"context": 1024},
}
ONE = {"stdlib-3m-linear": "linear_attention", "stdlib-3m-jamba4": "mamba2", state_memory.TWIN: "attention"}


@pytest.fixture(scope="module", autouse=True)
def small_variants():
    """Of two layers and few tokens, so that nothing here takes long."""
    small = {}
    for name, kind in ONE.items():
        mixers = () if kind == "attention" else ("attention" if "jamba" in name else kind, kind)
        small[name] = dataclasses.replace(STATE_VARIANTS[name], vocab_size=64, num_layers=2, mixers=mixers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_memory, "STATE_VARIANTS", STATE_VARIANTS | small)
        yield small


@pytest.fixture(scope="module")
def model():
    """None of these runs one that is handed over."""


@pytest.fixture(scope="module")
def runs(model, small_variants):
    return brief_runs(SMALL, model)


class TestExperiments(ExperimentClaims):
    lab, small = 14, SMALL


class TestPanels(PanelClaims):
    small, moved = SMALL, MOVED


# -- hippo -------------------------------------------------------------------------------------------------------------


def test_a_state_is_never_better_than_the_best_polynomial_and_nearly_as_good_while_it_is_small(runs):
    states = [m for m in runs["beyond.hippo"] if m.settings["measured"] == "state"]
    assert [m.counts["numbers"] for m in states] == list(hippo.SIZES)
    assert all(m.median >= m.predicted * (1 - 1e-12) for m in states)
    assert all(m.median < 1.005 * m.predicted for m in states if m.counts["numbers"] <= 8)


def test_last_samples_leave_what_is_older(runs):
    last = [m for m in runs["beyond.hippo"] if m.settings["measured"] == "last samples"]
    assert all(m.median == pytest.approx(m.predicted, rel=1e-12) for m in last)
    assert [m.median for m in last] == sorted((m.median for m in last), reverse=True)


@pytest.mark.parametrize("signal", hippo.SIGNALS)
def test_the_bound_is_the_least_squares_fit_of_powers(signal):
    """Solved for in another basis, with nothing of Legendre in it."""
    values, at = hippo.signal_of(signal, 256), 2 * hippo.points_of(256) - 1
    assert values.mean().abs() < 1e-12 and values.square().mean() == pytest.approx(1)
    powers = torch.stack([at**n for n in range(8)], dim=1)
    fit = powers @ torch.linalg.lstsq(powers, values[:, None], driver="gelsd").solution[:, 0]
    assert hippo.bound(signal, 256, 8) == pytest.approx(hippo.error_of(fit, values), rel=1e-9)


def test_what_a_state_adds_to_the_bound_falls_with_more_samples():
    """So it is the recurrence's steps that add it, as the panel says."""
    above = [
        hippo.error_of(hippo.from_state("sines", samples, 32), hippo.signal_of("sines", samples))
        for samples in (256, 512, 1024)
    ]
    assert above[0] > 1.3 * above[1] > 1.3**2 * above[2] > 1e3 * hippo.bound("sines", 1024, 32)


def test_a_signal_that_is_none_is_answered_with_the_nearest():
    with pytest.raises(WorkbenchError, match="did you mean 'chirp'"):
        hippo.signal_of("chirps", 256)


# -- forms -------------------------------------------------------------------------------------------------------------

ANEW = {"s4": 1.9, "s4d": 2.6}  # a recurrence that makes its discrete system at every token
every_kind = pytest.mark.parametrize("kind", forms.SHAPES)


@every_kind
def test_flops_by_formula_are_those_that_torch_computes(kind):
    """What the formula leaves out is some hundredths."""
    length, chunk = 64, 16
    for name, run in forms.runs_of(kind, length, chunk, torch.float32).items():
        expected = next(form.flops for form in forms.forms_of(kind, length, chunk) if form.name == name)
        above = ANEW.get(kind, 1.06) if name == forms.RECURRENT else 1.1
        assert expected * (1 - 1e-9) <= forms.counted(run).flops <= above * expected, name


@every_kind
def test_forms_are_equal_and_their_chains_grow_as_their_steps_do(kind):
    """Of an FFT, whose stages are one operation, only equal."""
    assert max(forms.differences(kind, 64, 16).values()) < 1e-12
    rows: dict[str, list[tuple[int, int]]] = {}
    for length in (32, 64, 128):
        steps = {form.name: form.steps for form in forms.forms_of(kind, length, 16)}
        for name, run in forms.runs_of(kind, length, 16, torch.float32).items():
            rows.setdefault(name, []).append((steps[name], forms.counted(run).chain))
    for name in rows.keys() - {forms.CONVOLUTION, forms.DIRECT}:
        (s0, c0), (s1, c1), (s2, c2) = rows[name]
        assert (c1 - c0) * (s2 - s1) == (c2 - c1) * (s1 - s0), f"{name}: {rows[name]}"
        assert name == forms.QUADRATIC or c2 > c1 > c0


def test_counting_follows_views_and_copies():
    x = torch.ones(4, 3)
    with forms.Counted() as count:
        y = (x * 2).T[0]
        joined = torch.empty(4)
        joined[:] = y + 1
        joined.sum()
    assert (count.flops, count.chain) == (12 + 4 + 4, 4), "mul, add, copy and sum wait for each other"


def test_forms_that_differ_are_not_timed(monkeypatch):
    monkeypatch.setattr(mamba2, "chunked", lambda q, k, v, decay, s, chunk: mamba2.recurrent(q, 2 * k, v, decay, s))
    small = {"kind": "mamba2", "length": 64, "chunk": 16, "repeats": 1}
    with pytest.raises(WorkbenchError, match="forms of mamba2 differ"):
        run_experiment("beyond.forms", small, DataSheetBench())


def test_a_definition_that_would_fill_the_memory_is_counted_and_not_run():
    far = 2 * forms.LONGEST_DIRECT
    assert forms.DIRECT in [form.name for form in forms.forms_of("s4d", far, 64)]
    assert forms.DIRECT not in forms.runs_of("s4d", far, 64, torch.float32)
    with pytest.raises(WorkbenchError, match="multiple of the chunk"):
        forms.forms_of("s4d", 100, 64)


# -- state and cache ---------------------------------------------------------------------------------------------------


def test_the_twins_cache_outgrows_the_states_where_the_bytes_say():
    """Asked of real caches, one text after the other."""
    for name in ("stdlib-3m-mamba2", "stdlib-3m-jamba4"):
        shape, twin = STATE_VARIANTS[name], STATE_VARIANTS[state_memory.TWIN]
        predicted = state_memory.predicted_crossover(shape, twin)
        assert state_memory.counted_crossover(shape, twin, 200) == math.floor(predicted) + 1
        assert state_memory.counted_crossover(shape, twin, int(predicted)) is None


def test_state_and_cache_are_measured_by_context(runs, small_variants):
    seen = runs["beyond.state_memory"]
    kinds = [m.settings["measured"] for m in seen]
    assert kinds == ["prompt", "bytes", "step"] * 4 + ["crossover", "slope"]
    sizes = [m for m in seen if m.settings["measured"] == "bytes"]
    assert all(m.median == m.predicted for m in sizes)
    assert [m.median for m in sizes[:2]] == [small_variants["stdlib-3m-linear"].state_bytes()] * 2, "it does not grow"
    assert sizes[3].median == 2 * sizes[2].median, "a cache does"
    assert seen[-2].median == math.floor(seen[-2].predicted) + 1


def test_one_context_has_no_slope_and_a_crossover_beyond_it_is_not_reported(small_variants, monkeypatch):
    small = {"model": "stdlib-3m-linear", "longest": 64, "repeats": 1}
    short = run_experiment("beyond.state_memory", small, DataSheetBench())
    assert [m.settings["measured"] for m in short][-1] == "crossover"
    linear = small_variants["stdlib-3m-linear"]
    large = dataclasses.replace(linear, state_shape=dataclasses.replace(linear.state_shape, state_size=128))
    monkeypatch.setitem(state_memory.STATE_VARIANTS, "stdlib-3m-linear", large)
    short = run_experiment("beyond.state_memory", small, DataSheetBench())
    assert [m.settings["measured"] for m in short][-1] == "step"


def test_predicted_steps_are_flat_with_states_and_grow_with_keys():
    times = {
        name: state_memory.predicted_times(DataSheetBench().ceilings(), name, 65_536)
        for name in ("stdlib-3m-mamba2", state_memory.TWIN)
    }
    steps = {name: [seconds for _, seconds, _ in rows["step"]] for name, rows in times.items()}
    assert len(set(steps["stdlib-3m-mamba2"])) == 1 and steps[state_memory.TWIN][-1] > steps[state_memory.TWIN][0]
    prompts = [(tokens, seconds) for tokens, seconds, _ in times["stdlib-3m-mamba2"]["prompt"] if tokens >= 512]
    rates = [(s1 - s0) / (n1 - n0) for (n0, s0), (n1, s1) in itertools.pairwise(prompts)]
    assert rates == pytest.approx([rates[0]] * len(rates)), "every chunk of 512 tokens takes as long"


# -- the table of caches -----------------------------------------------------------------------------------------------


def test_real_caches_say_what_the_formulas_say(runs):
    made = runs["beyond.cache_table"]
    assert len(made) == len(cache_table.shapes()) + len(cache_table.CLAIMS)
    assert all(m.median == m.predicted > 0 for m in made)


@pytest.mark.parametrize(
    ("name", "gib"), [("mixtral-8x7b", 32), ("llama-2-7b", 128), ("llama-2-70b", 80), ("llama-3.1-405b", 126)]
)
def test_keys_and_values_of_256k_tokens_in_16_bits(name, gib):
    assert cache_table.by_formula(name, 16).at(1 << 18) == gib * 2**30


def test_jamba_keeps_4_gib_of_keys_and_its_states():
    kept = cache_table.by_formula(cache_table.JAMBA, 16)
    assert kept.per_token * (1 << 18) == 4 * 2**30
    assert kept.states == 28 * (8192 * 16 + 3 * 8192) * 4


@pytest.mark.parametrize("name", ["mamba-130m", "mamba2-130m"])
def test_a_states_bytes_are_those_of_the_tensors_of_every_layer(name):
    config = cache_table.shape_called(name)
    state = make_mixer(config, 0).initial_state(torch.zeros(1, config.hidden_size))
    assert cache_table.by_formula(name, 16) == cache_table.Kept(24 * sum(t.nbytes for t in state.values()), 0)


def test_a_cache_reserves_what_the_formula_says():
    kv = make_kv("contiguous", cache_table.shape_called("gpt2"), max_tokens=64, dtype=torch.float16)
    assert kv.bytes_reserved == cache_table.by_formula("gpt2", 16).at(64)


def test_published_numbers_are_right_rounded_or_wrong():
    verdicts = [
        cache_table.judged(claim, cache_table.by_formula(claim.model, 16).at(claim.context))
        for claim in cache_table.CLAIMS
    ]
    assert [(v.word, v.unit) for v in verdicts] == [
        ("right", "GiB"),
        ("right", "GiB"),
        ("right", "GiB"),
        ("right", "GiB"),
        ("wrong", "GB"),
        ("rounded", "MB"),
        ("right", "MB"),
    ]
    twice = next(c for c in cache_table.CLAIMS if c.model == "llama-3.1-405b")
    assert cache_table.judged(twice, 2 * cache_table.by_formula(twice.model, 16).at(twice.context)).word == "right"
    claim = cache_table.Claim("gpt2", 1, "100", "MB", "")
    sizes = {
        100.4e6: ("right", "MB"),
        100.4 * 2**20: ("right", "MiB"),
        103e6: ("rounded", "MiB"),
        92e6: ("wrong", "MB"),
    }
    for size, expected in sizes.items():
        verdict = cache_table.judged(claim, size)
        assert (verdict.word, verdict.unit) == expected


def test_the_panel_says_of_each_claim_what_it_is(runs):
    panel = shown("cache_table", bench=DataSheetBench())
    panel.measurements = runs["beyond.cache_table"]
    said = panel.view(panel.settings).extra
    assert all(claim.published in said and claim.source in said for claim in cache_table.CLAIMS)
    assert said.count(">right, in GiB<") == 4 and said.count(">wrong<") == 1
    with pytest.raises(WorkbenchError, match=r"did you mean 'jamba-v0\.1'"):
        cache_table.shape_called("jamba-v0.2")
