"""Lab 02: counts are exact, what is timed is right, the knee is where brute force finds it, panels answer at once."""

from __future__ import annotations

import itertools
import math
import re
import statistics
import time

import pytest
import torch
from conftest import random_decoder, tiny_config
from experiment_claims import DataSheetBench, ExperimentClaims, brief_runs
from panel_claims import PanelClaims, shown

from workbench.errors import WorkbenchError
from workbench.experiments import experiment, run_experiment
from workbench.experiments import steps as steps_module
from workbench.experiments.inputs import shape_of
from workbench.experiments.steps import decode_step
from workbench.instruments.costs import decode_costs, predict, prepared_on
from workbench.instruments.device import PUBLISHED, Ceilings
from workbench.kv import Contiguous
from workbench.labs.lab02_where_time_goes import (
    batch_sweep,
    compile_step,
    launch,
    phases,
    prediction,
    price,
    trace,
    waterfall,
)
from workbench.labs.lab02_where_time_goes import roofline as roofline_module
from workbench.labs.lab02_where_time_goes.calls import record_calls
from workbench.labs.lab02_where_time_goes.panels import launch as launch_panel
from workbench.models.fast import FastDecoder
from workbench.models.linear import Plain
from workbench.panels.plots import matching

NAMES = ("time.roofline", "time.phases", "time.batch_sweep", "time.launch", "time.compile_step", "time.price")
PANELS = ("roofline", "phases", "batch_sweep", "launch", "compile_step", "price")
SMALL = {
    "time.roofline": {"context": 16, "repeats": 2},
    "time.phases": {"max_tokens": 32, "points": 2, "repeats": 2},
    "time.batch_sweep": {"context": 16, "largest_batch": 4, "repeats": 2},
    "time.launch": {"largest": "stdlib-1m", "context": 16, "repeats": 2},
    "time.waterfall": {"context": 16, "repeats": 2},
    "time.trace": {"context": 16, "repeats": 2},
    "time.compile_step": {"context": 16, "repeats": 2},
    "time.price": {"prompt_tokens": 32, "output_tokens": 16, "batch": 2, "repeats": 2},
}


MOVED = {
    "roofline": {"batch": 16},
    "phases": {"max_tokens": 128},
    "batch_sweep": {"card": "h200"},
    "launch": {"card": "a100-80gb"},
    "waterfall": {"batch": 4},
    "compile_step": {"model": "stdlib-10m"},
    "price": {"batch": 8},
}


@pytest.fixture
def bench() -> DataSheetBench:
    return DataSheetBench()


def hide_compiler(patch: pytest.MonkeyPatch) -> None:
    for module in (compile_step.__name__, "workbench.labs.lab02_where_time_goes.panels.compile_step"):
        patch.setattr(f"{module}.why_no_compiler", lambda device="cpu": compile_step.INSTALL)


@pytest.fixture
def no_compiler(monkeypatch):
    hide_compiler(monkeypatch)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model


@pytest.fixture(scope="module")
def runs(model):
    with pytest.MonkeyPatch.context() as patch:
        hide_compiler(patch)
        return brief_runs(SMALL, model)


@pytest.fixture
def make(tiny_model):
    def made(name: str, **given):
        return shown(name, **{**small(dict(zip(PANELS, NAMES))[name], tiny_model), **given})

    return made


@pytest.mark.usefixtures("no_compiler")
class TestExperiments(ExperimentClaims):
    lab, small = 2, SMALL

    def test_every_step_has_its_rows_counted(self, runs, name):
        whole = [m for m in runs[name] if m.settings.get("part", "step") == "step" and "kind" not in m.settings]
        assert whole and all(s > 0 for m in whole for s in m.samples)
        for m in matching(whole, unit="s"):
            assert m.counts["rows"] >= 1 and m.counts["flops"] > 0 and m.counts["launches"] > 0


class TestPanels(PanelClaims):
    small, moved = SMALL, MOVED


def small(name: str, model, **other) -> dict:
    """Settings that take next to no time; `launch` has its own models."""
    return {**({} if name == "time.launch" else {"model": model}), **SMALL[name], **other}


def ceilings(read: float, rate: float, launch_s: float = 1e-12) -> Ceilings:
    rates = {"float32": rate, "bfloat16": rate, "float16": rate}
    return Ceilings(read, read, rates, launch_s, measured=False, source="made up")


# -- all six -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_prediction_loads_no_model(name, monkeypatch):
    monkeypatch.setattr("workbench.models.checkpoints.load", lambda *a, **k: pytest.fail("a model was loaded"))
    one = experiment(name)
    for x, seconds, limit in one.predict(PUBLISHED["h200"], **one.complete()):
        assert x > 0 and 0 < seconds < 60 and limit in ("launch", "bandwidth", "compute")


WRONG = ["time.phases", "time.batch_sweep", "time.waterfall", "time.trace", "time.compile_step", "time.price"]


@pytest.mark.parametrize("name", WRONG)
def test_a_step_whose_output_is_wrong_is_never_reported(name, tiny_model, bench, monkeypatch, no_compiler):
    honest = FastDecoder.__call__
    monkeypatch.setattr(FastDecoder, "__call__", lambda self, batch, kv: -honest(self, batch, kv))
    with pytest.raises(WorkbenchError, match="its output is wrong, so its time was thrown away"):
        run_experiment(name, small(name, tiny_model), bench)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("time.roofline", {"context": 256}),
        ("time.phases", {"max_tokens": 512}),
        ("time.batch_sweep", {"context": 256}),
        ("time.compile_step", {"context": 256}),
    ],
)
def test_a_context_beyond_the_models_is_refused_with_numbers(name, asked, tiny_model, bench):
    with pytest.raises(WorkbenchError, match=r"25[67]|512.* tokens of context .* at most 256"):
        run_experiment(name, small(name, tiny_model, **asked), bench)


def test_a_model_is_measured_in_the_type_that_is_asked_for(tiny_model, bench):
    half = steps_module.loaded(bench, tiny_model, "bfloat16")
    assert half.dtype == torch.bfloat16 and tiny_model.dtype == torch.float32
    assert steps_module.loaded(bench, tiny_model, "float32") is tiny_model
    random = steps_module.loaded(bench, "random-110m", "bfloat16")
    assert random.dtype == torch.bfloat16 and random.num_parameters() == 109_529_856


# -- time.roofline ---------------------------------------------------------------------------------------------


def test_ridges_are_those_of_the_data_sheets():
    found = [roofline_module.ridge(c, "bfloat16") for c in PUBLISHED.values()]
    assert [round(r) for r in found] == [153, 295, 206]


def point(points, name):
    return next(p for p in points if p.operation == name)


@pytest.mark.parametrize("batch", [1, 7])
def test_intensities_of_a_decode_step_equal_hand_counts(tiny_model, batch):
    """down: 64 → 32. Attention: 4 query heads and 2 key-value heads of size 8 over 16 + 1 keys, one of them new."""
    step = {"model": tiny_model, "phase": "decode", "batch": batch, "context": 16, "weights": "float32"}
    found = roofline_module.roofline_points(PUBLISHED["h200"], **step)
    assert [p.operation for p in found] == ["qkv", "attention", "o", "gate_up", "down", "head"]
    flops, moved = 2 * batch * 64 * 32, 4 * (batch * 64 + 64 * 32 + batch * 32)
    assert point(found, "down").intensity == flops / moved
    attention = point(found, "attention")
    # keys and values read, new ones written, q, k, v and result
    values = 17 * 2 * 16 + 2 * 16 + (32 + 2 * 16 + 32)
    assert attention.intensity == pytest.approx(4 * 32 * 17 / (4 * values), rel=1e-12)


def test_only_the_last_row_of_a_prompt_goes_through_the_head(tiny_model):
    step = {"model": tiny_model, "phase": "prefill", "batch": 3, "context": 10, "weights": "float32"}
    found = roofline_module.roofline_points(PUBLISHED["h200"], **step)
    assert point(found, "head").flops == 2 * 3 * 32 * 4096
    assert point(found, "down").flops == 2 * 2 * 30 * 64 * 32


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_every_operation_of_the_step_is_timed_in_its_real_shape(tiny_model, bench, phase, weights):
    asked = small("time.roofline", tiny_model, phase=phase, weights=weights, batch=4)
    found = run_experiment("time.roofline", asked, bench)
    assert [m.settings["operation"] for m in found] == ["qkv", "attention", "o", "gate_up", "down", "head"]
    for m in found:
        assert m.unit == "FLOP/s" and m.counts["intensity"] == m.counts["flops"] / m.counts["bytes"]
        assert "equals F.linear" in m.check or "equals eager attention" in m.check


def test_gpt2s_products_are_measured_too(bench):
    model = random_decoder(
        tiny_config(family="gpt2", num_kv_heads=4, qkv_bias=True, attention_output_bias=True, mlp_bias=True)
    )
    found = run_experiment("time.roofline", small("time.roofline", model), bench)
    assert [m.settings["operation"] for m in found] == ["qkv", "attention", "o", "up", "down", "head"]


def test_a_product_that_differs_from_f_linear_is_never_reported(tiny_model, bench, monkeypatch):
    class Wrong(Plain):
        def __call__(self, x):
            return 1.01 * super().__call__(x)

    monkeypatch.setattr(roofline_module, "linear_class", lambda *a: Wrong)
    with pytest.raises(WorkbenchError, match=r"differs from F\.linear by 0\.01"):
        run_experiment("time.roofline", small("time.roofline", tiny_model), bench)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_attention_that_is_wrong_is_never_reported(tiny_model, bench, monkeypatch, phase):
    honest = Contiguous.attend
    monkeypatch.setattr(Contiguous, "attend", lambda self, *a: honest(self, *a).flip(0) * 1.1)
    with pytest.raises(WorkbenchError, match="differs from eager attention"):
        run_experiment("time.roofline", small("time.roofline", tiny_model, phase=phase), bench)


def my_layers(calls):
    (call,) = calls
    values = sum(math.prod(shape) for shape in [*call["read"], call["written"]])
    q, keys = call["read"][0], call["read"][1][-2]
    flops = 2 * math.prod(call["written"]) * q[-1]
    if call["op"] == "attention":
        flops = 4 * q[0] * q[1] * q[3] * sum(keys - q[2] + 1 + i for i in range(q[2]))
    return flops, call["bytes_per_element"] * values, flops / (call["bytes_per_element"] * values)


def test_a_learners_intensities_stand_beside_ours(tiny_model, bench):
    asked = small("time.roofline", tiny_model, batch=4, phase="prefill")
    for m in run_experiment("time.roofline", asked, bench, {"layers": my_layers}):
        yours, ours = m.counts["intensity_yours"], m.counts["intensity"]
        if m.settings["operation"] == "attention":  # ours also writes the new keys and values to the cache
            assert ours < yours < 2 * ours
        else:
            assert yours == pytest.approx(ours, rel=1e-12)
    with pytest.raises(WorkbenchError, match=r"must return \(FLOPs, bytes, FLOPs per byte\), got 3"):
        run_experiment("time.roofline", asked, bench, {"layers": lambda calls: 3})


def test_calls_are_those_that_torch_makes_and_views_are_none():
    x, w = torch.randn(2, 3, 8), torch.randn(8, 6)
    calls = record_calls(lambda x, w: torch.softmax((x @ w).transpose(1, 2), -1), x, w)
    assert calls == [
        {"op": "product", "read": [[6, 8], [8, 6]], "written": [6, 6], "bytes_per_element": 4},
        {"op": "softmax", "read": [[2, 6, 3]], "written": [2, 6, 3], "bytes_per_element": 4},
    ]
    q, kv = torch.randn(1, 4, 5, 8), torch.randn(1, 4, 9, 8)
    assert record_calls(torch.nn.functional.scaled_dot_product_attention, q, kv, kv) == [
        {"op": "attention", "read": [[1, 4, 5, 8], [1, 4, 9, 8], [1, 4, 9, 8]], "written": [1, 4, 5, 8]}
        | {"bytes_per_element": 4}
    ]


# -- time.phases -------------------------------------------------------------------------------------------------


def test_both_phases_process_the_same_rows_in_one_call_or_in_many(tiny_model, bench):
    found = run_experiment("time.phases", small("time.phases", tiny_model), bench)
    assert [(m.settings["tokens"], m.settings["phase"]) for m in found] == [
        (16, "prefill"),
        (16, "decode"),
        (32, "prefill"),
        (32, "decode"),
    ]
    for m in found:
        n, one = m.settings["tokens"], m.settings["phase"] == "prefill"
        assert m.counts["rows"] == n and m.counts["model_calls"] == (1 if one else n)
        assert m.unit == "s/token" and len(m.samples) == 2
    prefill, decode = found[2:]
    assert prefill.counts["intensity"] > 2.5 * decode.counts["intensity"]
    assert decode.counts["bytes_read"] > 20 * prefill.counts["bytes_read"]
    # the same products and causal pairs; the head once for the prompt, once for each step
    assert decode.counts["flops"] - prefill.counts["flops"] == 31 * 2 * 32 * 4096
    predicted = experiment("time.phases").predict(
        bench.ceilings(), **experiment("time.phases").complete(small("time.phases", tiny_model))
    )
    assert [(x, s) for x, s, _ in predicted] == [
        (m.settings["tokens"], m.predicted) for m in sorted(found, key=lambda m: m.settings["phase"] == "decode")
    ]


def test_the_predicted_decode_is_the_mean_over_every_step():
    """Guards the interpolation: nine of the steps are predicted, the others lie between."""
    here = ceilings(3e9, 4e9, 1e-7)
    found = phases.predicted_phases(here, "stdlib-1m", 200, "float32")["decode"]
    steps = [steps_module.decode_step(here, "stdlib-1m", batch=1, context=c, weights="float32") for c in range(200)]
    assert found.seconds_per_token == pytest.approx(statistics.mean(p.seconds for _, p in steps), rel=1e-3)
    total = sum(c.flops for c, _ in steps) / sum(c.bytes for c, _ in steps)
    assert found.intensity == pytest.approx(total, rel=1e-9)


# -- time.batch_sweep --------------------------------------------------------------------------------------------


def test_batches_are_powers_of_two_up_to_the_largest():
    assert steps_module.powers_of_two(1) == [1]
    assert steps_module.powers_of_two(8) == [1, 2, 4, 8]
    assert steps_module.powers_of_two(6) == [1, 2, 4, 6]


def test_a_sweep_counts_each_batch_and_agrees_with_its_prediction(tiny_model, bench):
    found = run_experiment("time.batch_sweep", small("time.batch_sweep", tiny_model), bench)
    assert [m.settings["batch"] for m in found] == [1, 2, 4]
    for m in found:
        batch = m.settings["batch"]
        costs = decode_costs(
            tiny_model.config,
            batch=batch,
            context=16,
            weight_bytes_per_element=4,
            kv_bytes_per_element=4,
            arrangement=prepared_on(bench.ceilings(), tiny_model.config),
        )
        assert m.counts["rows"] == batch and m.counts["flops"] == costs.flops
        assert m.predicted == predict(costs, bench.ceilings(), "float32").seconds
        assert m.counts["tokens_per_s"] == pytest.approx(batch / m.median)
        assert m.counts["tokens_per_s_per_user"] == pytest.approx(1 / m.median)


def test_steps_leave_the_cache_as_it_was_and_take_other_tokens_each_time(tiny_model, bench):
    sequences = steps_module.Sequences(bench, tiny_model, "float32", context=16, max_sequences=3)
    seen, honest = [], sequences.run
    sequences.run = lambda model, step, **k: (seen.append(tuple(step.token_ids.tolist())), honest(model, step, **k))[1]
    sequences.time(3, 4)
    assert dict(sequences.kv.lengths) == {0: 16, 1: 16, 2: 16}
    assert len(set(seen)) == len(seen) == 5


def test_a_fork_that_lost_its_keys_is_found(tiny_model, bench, monkeypatch):
    honest = Contiguous.fork

    def lost(self, sequence, new):
        honest(self, sequence, new)
        self._keys[:, self._slots[new]] = 0
        self._values[:, self._slots[new]] = 0

    monkeypatch.setattr(Contiguous, "fork", lost)
    with pytest.raises(WorkbenchError, match="its output is wrong"):
        run_experiment("time.batch_sweep", small("time.batch_sweep", tiny_model), bench)


def plain_knee(shape, context: int, here: Ceilings, b: int) -> int | None:
    """The smallest batch at which FLOPs take as long as bytes, by trying every one."""
    d, q, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    weights = shape.num_layers * (2 * d * q + 2 * d * kv + 3 * d * shape.intermediate_size) + d * shape.vocab_size
    seen = context + 1
    for batch in range(1, 5000):
        flops = batch * (2 * weights + 4 * shape.num_layers * q * seen)
        moved = b * (weights + batch * 2 * shape.num_layers * kv * seen)
        if flops / here.flop_per_s["float32"] >= moved / here.read_bytes_per_s:
            return batch
    return None


@pytest.mark.parametrize("context", [0, 16, 250, 4000])
def test_the_knee_of_the_step_is_where_brute_force_finds_it(context):
    here, shape = ceilings(1e9, 30e9), tiny_config()
    knee = batch_sweep.knee_of(here, shape, context=context, weights="float32", memory_bytes=1e9)
    assert knee.step == plain_knee(shape, context, here, 4)
    assert (knee.step is None) == (context >= 250)


def test_the_knee_of_the_products_is_the_first_batch_that_computes():
    here, shape = PUBLISHED["h100-sxm"], shape_of("llama-3.1-8b")
    knee = batch_sweep.knee_of(here, shape, context=256, weights="bfloat16", memory_bytes=80e9)
    assert 295 <= knee.products < 350  # a little beyond the ridge, because rows are moved as well
    assert batch_sweep.products_compute_bound(here, shape, knee.products, "bfloat16")
    assert not batch_sweep.products_compute_bound(here, shape, knee.products - 1, "bfloat16")
    assert knee.memory == int((80e9 - 2 * shape.num_parameters()) // (2 * shape.kv_values_per_token() * 257))


def batch_limits(measure, max_batch):
    assert measure(1)[0] > 0 and len(measure(2)) > 1
    with pytest.raises(MemoryError):
        measure(10**9)
    return 4, 7


def test_a_learners_knee_and_tpot_stand_beside_ours(tiny_model, bench):
    def predict_tpot(config, *, batch, context, bytes_per_element, launches, ceilings, dtype):
        assert context == 16 and bytes_per_element == 4 and launches > 10 and dtype == "float32"
        return "bandwidth", 0.001 * batch

    parts = {"knee": batch_limits, "tpot": predict_tpot}
    found = run_experiment("time.batch_sweep", small("time.batch_sweep", tiny_model), bench, parts)
    assert [m.counts["predicted_yours"] for m in found] == [0.001, 0.002, 0.004]
    assert all((m.counts["knee_yours"], m.counts["largest_batch_yours"]) == (4, 7) for m in found)
    for wrong, said in (
        ({"knee": lambda *a: 12}, r"must return \(knee or None, largest batch\), got 12"),
        ({"knee": lambda *a: (0, 3)}, "at least 1, or None; got 0"),
        ({"tpot": lambda *a, **k: ("bandwidth", float("nan"))}, r"must return \(limit, seconds\)"),
    ):
        with pytest.raises(WorkbenchError, match=said):
            run_experiment("time.batch_sweep", small("time.batch_sweep", tiny_model), bench, wrong)


# -- time.launch -------------------------------------------------------------------------------------------------


def test_halving_the_bytes_is_timed_in_pairs(bench):
    single, half, ratio = run_experiment("time.launch", SMALL["time.launch"], bench)
    assert [m.settings["weights"] for m in (single, half, ratio)] == ["float32", "bfloat16", "float32 ÷ bfloat16"]
    assert ratio.samples == [a / b for a, b in zip(single.samples, half.samples)]
    assert ratio.predicted == single.predicted / half.predicted
    assert half.counts["launch_s"] == pytest.approx(half.counts["launches"] * bench.ceilings().launch_s)


def test_a_small_model_is_launch_bound_on_a_fast_card_and_a_large_one_is_not():
    found = launch.predict_launch(PUBLISHED["h200"], largest="random-110m", context=64)
    assert [x for x, _, _ in found[:3]] == [918_144, 11_015_040, 109_529_856] == [x for x, _, _ in found[3:]]
    assert [limit for _, _, limit in found] == ["launch", "launch", "bandwidth", "launch", "launch", "launch"]
    _, eight = steps_module.decode_step(PUBLISHED["h200"], "llama-3.1-8b", batch=1, context=64, weights="bfloat16")
    assert eight.limit == "bandwidth"


@pytest.mark.parametrize(
    ("gained", "low", "high", "limit", "said"),
    [
        (1.02, 0.95, 1.1, "launch", "No gain: launch-bound"),
        (1.02, 0.95, 1.1, "compute", "No gain: the arithmetic binds"),
        (1.9, 1.8, 2.0, "bandwidth", "The bytes bind: bandwidth-bound"),
        (1.4, 1.3, 1.5, "bandwidth", "The bytes bind in part"),
        (0.7, 0.6, 2.8, "bandwidth", "differ too much to say"),
    ],
)
def test_the_regime_is_named_from_what_was_measured(gained, low, high, limit, said):
    assert said in launch_panel._regime(gained, low, high, limit)


# -- a step taken apart ---------------------------------------------------------------------------------------


def test_the_parts_of_a_step_add_up_to_what_was_measured(runs, tiny_model):
    step, *parts = runs["time.waterfall"]
    assert [m.settings["part"] for m in parts] == list(waterfall.PARTS)
    assert sum(m.median for m in parts) == pytest.approx(step.median, rel=1e-9)
    _, expected = decode_step(PUBLISHED["h100-sxm"], tiny_model, batch=1, context=16, weights="float32")
    promised = waterfall.parts_of(expected)
    assert sum(promised.values()) == pytest.approx(expected.seconds) == pytest.approx(step.predicted)
    assert all(m.median == promised[m.settings["part"]] for m in parts[:3])


def test_no_part_but_the_unexplained_is_below_nothing(tiny_model, bench, monkeypatch):
    """On a busy machine the bare calls took longer than the step, and Python -170 µs."""
    times = itertools.cycle([(0.010, 0.009), (0.020, 0.019)])  # of the step, then of its calls alone
    monkeypatch.setattr(waterfall, "_clocked", lambda function: (function(), next(times))[1])
    step, *parts = run_experiment("time.waterfall", small("time.waterfall", tiny_model), bench)
    assert all(m.median >= 0 for m in parts if m.settings["part"] != "not explained")
    assert sum(m.median for m in parts) == pytest.approx(step.median, rel=1e-9)


def test_waiting_and_python_are_separated_from_the_calls_of_torch(tiny_model, bench, monkeypatch):
    """A step whose code counts for 30 ms and sleeps for 20, around the same calls."""
    honest = FastDecoder.__call__

    def slow(self, batch, kv):
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass
        time.sleep(0.02)
        return honest(self, batch, kv)

    monkeypatch.setattr(FastDecoder, "__call__", slow)
    made = run_experiment("time.waterfall", small("time.waterfall", tiny_model), bench)
    parts = {m.settings["part"]: m.median for m in made}
    assert 0.028 < parts["Python"] < 0.05 and parts["idle"] > 0.018 and parts["not explained"] < 0.02


def test_the_calls_of_a_step_are_made_again_with_the_same_result(tiny_model):
    x, calls = torch.ones(2, 4), waterfall.Calls()
    with calls:
        y = (x * 2).view(8)
        y.add_(1)
        assert x.shape == (2, 4)
    assert [call[0].__name__ for call in calls.calls] == ["mul", "view", "add_"]
    calls.again()
    assert y.tolist() == [4.0] * 8  # added once more, in place


def test_a_step_on_a_gpu_is_not_taken_apart(tiny_model, bench):
    bench.device = "cuda:0"
    with pytest.raises(WorkbenchError, match=r"two processors at once.*time\.trace"):
        run_experiment("time.waterfall", small("time.waterfall", tiny_model), bench)


def test_a_trace_counts_the_calls_of_one_step_and_says_what_the_profiler_costs(runs, tiny_model):
    *operations, price = runs["time.trace"]
    calls = {m.settings["operation"]: m.counts["calls"] for m in operations}
    layers = tiny_model.config.num_layers
    assert calls["aten::scaled_dot_product_attention"] == layers
    products = [m for m in operations if m.settings["kind"] == "linear"]
    assert max(m.counts["calls"] for m in products) == 4 * layers + 1  # qkv, o, gate_up, down, and the head
    assert [m.median for m in operations] == sorted((m.median for m in operations), reverse=True)
    assert price.unit == "ratio" and price.median > 0
    shares = trace.shares_by_kind(runs["time.trace"])
    assert sum(share for _, share, _ in shares.values()) == pytest.approx(1) and "attention" in shares


def test_a_trace_is_written_for_a_viewer_or_refused_before_anything_runs(tiny_model, bench, tmp_path, capfd):
    file = tmp_path / "step.json"
    run_experiment("time.trace", small("time.trace", tiny_model, file=str(file)), bench)
    assert "traceEvents" in file.read_text()
    assert capfd.readouterr().err == "", "the profiler's library says nothing in between"
    with pytest.raises(WorkbenchError, match="cannot write a trace"):
        run_experiment("time.trace", small("time.trace", tiny_model, file=str(tmp_path / "none" / "step.json")), bench)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mkldnn::_linear_pointwise", "linear"),
        ("aten::mm", "linear"),
        ("aten::add_", "elementwise"),
        ("aten::linalg_vector_norm", "norm"),
        ("aten::unbind", "view"),
        ("aten::copy_", "index"),
    ],
)
def test_the_kind_of_an_operation_follows_from_its_name(name, kind):
    assert trace.kind_of(name) == kind


def test_the_grid_ends_with_how_far_off_its_predictions_were(tiny_model, bench, monkeypatch):
    monkeypatch.setattr(prediction, "measure_ceilings", lambda device, stop: PUBLISHED["h200"])
    monkeypatch.setattr(prediction, "SMALLER", ("stdlib-1m",))
    asked = {"model": tiny_model, "smaller": True, "max_batch": 2, "max_context": 64, "repeats": 1}
    *points, last = run_experiment("time.prediction", asked, bench)
    where = [(m.settings["model"], m.settings["batch"], m.settings["context"]) for m in points]
    assert where == [(model, batch, 64) for model in ("stdlib-1m", tiny_model.name) for batch in (1, 2)]
    assert last.samples == [abs(m.median / m.predicted - 1) for m in points] and last.unit == "share"


# -- time.compile ------------------------------------------------------------------------------------------------


def test_graphs_are_counted_the_same_every_time():
    """torch keeps what it learnt of a function's shapes; a second count must begin from nothing."""
    high, low = compile_step.row(60.0), compile_step.row(15.0)
    rows = [compile_step.row(60.0, n) for n in compile_step.VOCABULARIES]
    for _ in range(3):
        assert compile_step.count_graphs(compile_step.cap_with_if, [high])[0] == 2
        assert compile_step.count_graphs(compile_step.cap_with_if, [low])[0] == 1
        assert compile_step.count_graphs(compile_step.cap_with_where, [high, low])[0] == 1
        shapes = [
            compile_step.count_graphs(compile_step.cap_with_where, rows, dynamic=d)[0] for d in (False, None, True)
        ]
        assert shapes == [5, 2, 1]


def test_without_a_compiler_graphs_are_counted_and_the_message_says_what_to_install(tiny_model, bench, no_compiler):
    found = run_experiment("time.compile_step", small("time.compile_step", tiny_model), bench)
    assert [m.unit for m in found] == ["graphs"] * 5 + ["s"]
    assert found[0].counts["breaks"] == 1 and found[1].counts["breaks"] == 0
    assert "apt install g++" in found[-1].check and found[-1].settings["by"] == "eager"


def test_a_compiler_is_looked_for_where_torch_looks(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "apt install g++" in compile_step.why_no_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(compile_step.shutil, "which", lambda name: "/bin/x" if name == "clang++" else None)
    assert compile_step.why_no_compiler() == ""


def test_eager_and_compiled_are_timed_in_pairs_and_both_checked(tiny_model, bench, monkeypatch):
    """With a stand-in for the compiled model, so that this needs no compiler."""
    asked, honest = [], compile_step.prepare
    monkeypatch.setattr(compile_step, "why_no_compiler", lambda device: "")
    monkeypatch.setattr(compile_step, "prepare", lambda m, compile, say: (asked.append(compile), honest(m))[1])
    *_, eager, compiled, ratio = run_experiment("time.compile_step", small("time.compile_step", tiny_model), bench)
    assert asked == [True]
    assert (eager.settings["by"], compiled.settings["by"]) == ("eager", "compiled")
    assert ratio.samples == [a / b for a, b in zip(eager.samples, compiled.samples)]
    assert "greedy next token" in eager.check and "greedy next token" in compiled.check


def test_a_learners_function_is_counted_beside_ours_and_must_give_the_same(tiny_model, bench, no_compiler):
    def cap_logits(logits, limit):
        top = logits.max(dim=-1, keepdim=True).values
        return logits * torch.where(top > limit, limit / top, torch.ones_like(top))

    asked = small("time.compile_step", tiny_model)
    found = run_experiment("time.compile_step", asked, bench, {"one_graph": cap_logits})
    assert [m.settings["by"] for m in found[:3]] == ["if", "torch.where", "yours"]
    assert found[2].counts["graphs"] == 1
    with pytest.raises(WorkbenchError, match="the function with yours does not give"):
        run_experiment("time.compile_step", asked, bench, {"one_graph": lambda logits, limit: logits})


GENERATED = """\
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0)
{
    std::atomic<int> inductor_cpu_integer_div_error{0};
    {
        #pragma GCC ivdep
        for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(64L); x0+=static_cast<int64_t>(8L))
        {
            {
                if(C10_LIKELY(x0 >= static_cast<int64_t>(0) && x0 < static_cast<int64_t>(64L)))
                {
                    auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + static_cast<int64_t>(x0), 8);
                    auto tmp1 = static_cast<float>(1.0);
                    auto tmp2 = tmp0 + at::vec::Vectorized<float>(tmp1);
                    tmp2.store(out_ptr0 + static_cast<int64_t>(x0));
                }
            }
        }
    }
}
"""


def test_a_generated_kernel_is_shortened_to_its_loop():
    assert compile_step.shortened(GENERATED).splitlines() == [
        'extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0) {',
        "    for (int x0 = 0; x0<64; x0+=8) {",
        "        auto tmp0 = Vec::loadu(in_ptr0 + x0, 8);",
        "        auto tmp1 = 1.0;",
        "        auto tmp2 = tmp0 + Vec(tmp1);",
        "        tmp2.store(out_ptr0 + x0);",
        "    }",
        "}",
    ]


def test_without_a_compiler_no_loop_is_shown_and_it_is_said(no_compiler):
    assert compile_step.generated_loop(torch.relu, torch.ones(8)) == (None, compile_step.INSTALL)


@pytest.mark.skipif(bool(compile_step.why_no_compiler()), reason="no C++ compiler")
def test_two_small_operations_become_one_loop_that_loads_each_input_once():
    gate, up = torch.randn(2, 16, 64)
    compiled, loop = compile_step.generated_loop(lambda g, u: torch.nn.functional.silu(g) * u, gate, up)
    assert torch.allclose(compiled(gate, up), torch.nn.functional.silu(gate) * up, atol=1e-6)
    assert loop.count("for (") == 1 and loop.count("loadu(") == 2 and loop.count(".store(") == 1


# -- time.price --------------------------------------------------------------------------------------------------


def price_of(**changes) -> price.Quote:
    one = experiment("time.price")
    settings = one.complete(changes)
    return price.quotes(PUBLISHED["h100-sxm"], [settings["batch"]], **settings)[0]


def test_a_price_is_dollars_an_hour_over_tokens_an_hour():
    q = price_of(batch=16, dollars_per_hour=3.6)
    assert q.dollars_per_million_output == pytest.approx(1e6 * 3.6 / (3600 * 16 / q.tpot_s))
    assert q.dollars_per_million_prompt == pytest.approx(1e6 * 3.6 / (3600 * 512 / q.ttft_s))
    assert q.dollars_per_request == pytest.approx(
        (512 * q.dollars_per_million_prompt + 128 * q.dollars_per_million_output) / 1e6
    )
    assert price_of(batch=16, dollars_per_hour=7.2).dollars_per_million_output == pytest.approx(
        2 * q.dollars_per_million_output
    )


def test_prompt_tokens_are_cheaper_and_batches_make_written_ones_cheaper():
    one, many = price_of(batch=1), price_of(batch=64)
    assert one.dollars_per_million_prompt < one.dollars_per_million_output / 100
    assert many.dollars_per_million_output < one.dollars_per_million_output / 30
    assert many.tpot_s > one.tpot_s and many.ttft_s == one.ttft_s


def test_what_does_not_fit_is_said_with_both_numbers():
    q = price_of(shape="llama-3.1-70b", card="h100-sxm")
    assert not q.fits and q.largest_batch == 0 and q.needed_bytes > 141e9 > q.memory_bytes == 80e9
    assert price_of(shape="llama-3.1-70b", card="h200", weight_bytes=1, batch=1).fits
    q = price_of(batch=1024)
    assert q.fits == (q.largest_batch >= 1024)


def test_run_prices_this_machine_and_says_where_the_lengths_were_cut(tiny_model, bench):
    asked = small("time.price", tiny_model, prompt_tokens=512, dollars_per_hour=7.2)
    ttft, tpot, prompt, output = run_experiment("time.price", asked, bench)
    assert (ttft.settings["prompt_tokens"], ttft.settings["what"]) == (128, "TTFT")
    assert "prompt 128 of 512" in ttft.check
    assert output.median == pytest.approx(1e6 * 7.2 / 3600 * tpot.median / 2)
    assert prompt.median == pytest.approx(1e6 * 7.2 / 3600 * ttft.median / 128)
    assert prompt.unit == output.unit == "$/M tokens"


# -- panels ------------------------------------------------------------------------------------------------------


def test_a_learners_parts_are_shown_as_theirs(make, no_compiler):
    sweep = make("batch_sweep", knee=batch_limits)
    assert "Your knee: " in sweep.said and "Your largest batch: 7" in sweep.said
    roofline = make("roofline", layers=my_layers)
    assert "yours, FLOPs per byte" in roofline.table.value
    priced = make("price", price=lambda steps, **k: (0.5, 2.0, len(steps) / 4, 0.4))
    # 2 prompts one by one, then 15 steps
    assert "$0.5, $2, $4.25" in priced.table.value
    with pytest.raises(WorkbenchError, match="setting 'knees'"):
        make("batch_sweep", knees=batch_limits)


def test_the_regime_and_what_does_not_fit_are_said_in_words(make):
    panel = make("price", shape="llama-3.1-70b", card="h100-sxm")
    assert "does NOT fit" in panel.said and "141 GB" in panel.said
    panel.configure(shape="llama-3.1-8b", batch=1)
    assert panel.wait(30) and "It fits" in panel.said and "bandwidth-bound" in panel.said
    sweep = make("batch_sweep", card="h200", model="llama-3.1-8b", weights="bfloat16", context=4096, largest_batch=64)
    words = re.sub(r"<[^>]+>", "", sweep.said)
    assert "weigh as much as the weights at batch 28" in words and "no batch" in words
    assert "Left of the ridge with every operation: A100" in make("roofline").said


def test_the_sweep_marks_where_memory_is_full_and_says_it():
    shown_for = {"model": "llama-2-13b", "weights": "bfloat16", "context": 1024, "largest_batch": 256}
    for card, full in (("a100-80gb", 64), ("h200", 136)):  # of 1,025 tokens each
        panel = shown("batch_sweep", card=card, **shown_for)
        assert f"Memory is full at batch {full}" in panel.said
        assert f"memory full (line) at {full}" in panel.view(dict(panel.settings)).alt


def test_stop_ends_a_long_run_within_a_second(make, tiny_model):
    panel = make("batch_sweep", largest_batch=1024, repeats=50)
    best = 9.0
    for _ in range(3):
        panel.run_button.click()
        while "running: " not in panel.status.value:
            assert panel._worker.is_alive()
            time.sleep(0.005)
        started = time.monotonic()
        panel.stop_button.click()
        panel._worker.join(30)
        best = min(best, time.monotonic() - started)
        assert panel.wait(30)
    assert best < 1.0
