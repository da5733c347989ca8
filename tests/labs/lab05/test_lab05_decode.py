"""Lab 05, decode: the cost model counts what a stored format really takes, steps are held to the dequantized weights,
and the panel says why time falls less than bytes."""

from __future__ import annotations

import pytest
import torch
from conftest import random_decoder, tiny_config
from experiment_claims import DataSheetBench
from panel_claims import PanelClaims

from workbench import panels
from workbench.errors import WorkbenchError
from workbench.experiments import experiment, run_experiment
from workbench.instruments.costs import decode_costs
from workbench.instruments.device import PUBLISHED
from workbench.instruments.records import Measurement
from workbench.instruments.timing import Stopped
from workbench.labs.lab05_quantization import stored_formats as decoding
from workbench.labs.lab05_quantization.panels.stored_formats import _reason
from workbench.models.shapes import public_shape
from workbench.native.compiler import why_no_compiler
from workbench.panels.base import Panel
from workbench.quantization import QuantizedLinear, quantize

SMALL = {"beside": "nothing", "context": 16, "group": 32, "repeats": 2}


@pytest.fixture(scope="module")
def model():
    return random_decoder(tiny_config(vocab_size=64, qkv_bias=True))


@pytest.fixture(scope="module")
def found(model):
    return run_experiment("quantize.stored_formats", {**SMALL, "model": model}, DataSheetBench())


@pytest.fixture(scope="module")
def runs(found):
    return {"quantize.stored_formats": found}


class TestPanels(PanelClaims):
    small, moved = {"quantize.stored_formats": SMALL}, {"stored_formats": {"context": 32}}


def test_every_format_is_measured_verified_and_compared(found):
    steps = [m for m in found if m.unit == "s"]
    assert [m.settings["format"] for m in steps] == list(decoding.FORMATS)
    assert all("plain model with these weights" in m.check and len(m.samples) == 2 for m in steps)
    ratios = {m.settings["format"]: m for m in found if m.unit == "ratio"}
    by_format = {m.settings["format"]: m for m in steps}
    for a, b in decoding.PAIRS:
        pairs = zip(by_format[a].samples, by_format[b].samples)
        assert ratios[f"{a} ÷ {b}"].samples == [x / y for x, y in pairs]
    assert all(Measurement.from_dict(m.to_dict()) == m for m in found)


def test_it_stops_when_told_and_refuses_groups_that_do_not_divide(model):
    bench = DataSheetBench()
    with pytest.raises(WorkbenchError, match="groups of 128 do not divide the 32 inputs"):
        run_experiment("quantize.stored_formats", {**SMALL, "model": model, "group": 128}, bench)
    bench.stop.set()
    with pytest.raises(Stopped):
        run_experiment("quantize.stored_formats", {**SMALL, "model": model}, bench)


def test_settings_for_the_archive_are_settings_of_the_experiment():
    e = experiment("quantize.stored_formats")
    assert [e.complete(run)["arrangement"] for run in e.record_settings("cpu")] == ["fast", "compiled"]


def test_arrangements_without_steps_for_a_model_are_not_offered(model):
    def offered(**settings):
        limit = decoding.group_limits(**{"model": model, "beside": "nothing", **settings})["arrangement"]
        return [name for name in decoding.ARRANGEMENTS if limit(name)]

    assert offered() == ["fast", "compiled", "native"]
    assert offered(model="stdlib-1m-experts") == ["fast"]
    assert offered(model="stdlib-3m-mla") == ["fast", "compiled"]


@pytest.mark.skipif(bool(why_no_compiler()), reason=f"native steps: {why_no_compiler()}")
def test_native_steps_say_what_they_read_and_not_what_larger_batches_would(model):
    found = run_experiment(
        "quantize.stored_formats", {**SMALL, "model": model, "arrangement": "native"}, DataSheetBench()
    )
    held = {m.settings["format"]: m.check.rpartition("held as: ")[2] for m in found if m.unit == "s"}
    assert held == {f: f"codes of {one.bits} bits" if one.bits else "plain" for f, one in decoding.FORMATS.items()}


@pytest.mark.parametrize("format", [f for f, one in decoding.FORMATS.items() if one.bits])
def test_bytes_by_formula_are_those_that_are_stored(model, format):
    made = quantize(model, decoding.FORMATS[format].recipe(32))
    stored = sum(m.stored.nbytes for m in made.modules() if isinstance(m, QuantizedLinear))
    assert decoding.linear_bytes(model.config, format, 32) == stored


def test_the_cost_model_changes_the_matrices_of_the_layers_alone():
    config = public_shape("random-110m")
    wide = decode_costs(config, batch=1, context=64, weight_bytes_per_element=2)
    narrow = decode_costs(config, batch=1, context=64, weight_bytes_per_element=2, linear_bytes_per_element=0.5)
    products = {"qkv", "o", "gate_up", "down"}
    for a, b in zip(wide.operations, narrow.operations):
        assert a.name == b.name and b.weight_bytes == a.weight_bytes * (0.25 if a.name in products else 1)
        assert a.activation_bytes == b.activation_bytes and a.flops == b.flops
    layers = 12 * (4 * 768 * 768 + 3 * 768 * 2048)
    saved = wide.bytes_by_part["weights"] - narrow.bytes_by_part["weights"]
    assert saved == 1.5 * layers
    with pytest.raises(WorkbenchError, match="linear_bytes_per_element must be above 0"):
        decode_costs(config, batch=1, context=64, weight_bytes_per_element=2, linear_bytes_per_element=0)


def test_where_bytes_bind_the_predicted_times_are_in_the_order_of_the_bytes():
    config = public_shape("llama-3.2-1b")
    step = {
        f: decoding.predicted_step(PUBLISHED["h100-sxm"], config, f, context=64, group=64, arrangement="compiled")
        for f in decoding.FORMATS
    }
    seconds = {f: expected.seconds for f, (_, expected) in step.items()}
    assert all(expected.limit == "bandwidth" for _, expected in step.values())
    assert seconds["int4"] < seconds["int8"] < seconds["bfloat16"] < seconds["float32"]
    # the head stays in 16 bits: int8 is more than half of bfloat16, and less than all of it
    weights = [step[f][0].bytes_by_part["weights"] for f in ("int8", "bfloat16")]
    assert seconds["int8"] / seconds["bfloat16"] == pytest.approx(weights[0] / weights[1], rel=0.02)
    assert all(costs.launches == 0 for costs, _ in step.values())


def test_a_wrong_product_is_not_timed(model, monkeypatch):
    class Wrong(decoding._Steps):
        def _next(self):
            super()._next()
            if self.format == "int8, float32 inputs":
                self.logits = self.logits + 0.1 * torch.randn_like(self.logits) * self.logits.abs().max()

    monkeypatch.setattr(decoding, "_Steps", Wrong)
    with pytest.raises(WorkbenchError, match="int8, float32 inputs: logits differ by"):
        run_experiment("quantize.stored_formats", {**SMALL, "model": model}, DataSheetBench())


# -- the panel ---------------------------------------------------------------------------------------------------


@pytest.fixture
def panel(model):
    made = panels.stored_formats(bench=DataSheetBench(), model=model, **SMALL)
    assert made.wait(60)
    yield made
    for one in list(Panel.open_panels.values()):
        one.close()


def test_the_panel_shows_every_format_before_and_after_a_run(panel, found):
    view = panel.view(panel.settings)
    assert [row[1] for row in view.rows] == list(decoding.FORMATS) and "Run measures" in view.caption
    panel.measurements = found
    view = panel.view(panel.settings)
    assert all(row[5] and row[6] for row in view.rows)
    assert view.words.count("turn by turn") == 3 and "predicted beside bfloat16" in view.words
    assert "measured" in view.alt and "nan" not in view.words


def test_the_words_name_the_reason(model, found):
    step = next(m for m in found if m.settings["format"] == "int8")
    weights = sum(out * inside for out, inside in decoding.linear_shapes(model.config))

    def with_rate(rate, limit="bandwidth"):
        return Measurement.from_dict(
            {**step.to_dict(), "limit": limit, "counts": {**step.counts, "weights_per_s_in_cache": rate}}
        )

    assert "arithmetic binds" in _reason(model, with_rate(weights / step.median))
    assert "the rest is memory" in _reason(model, with_rate(100 * weights / step.median))
    assert "operations to start" in _reason(model, with_rate(1.0, limit="launch"))
