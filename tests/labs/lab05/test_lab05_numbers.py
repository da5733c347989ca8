"""Lab 05, numbers: what the row experiment says of a weight row is exact and held to its bounds, an outlier spoils its
own group and no other, the toy's numbers are those of the real formats, and the two panels show them."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
import torch
from conftest import random_decoder, tiny_config
from experiment_claims import ExperimentClaims, brief_runs
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.patches import StepPatch
from panel_claims import PanelClaims

from workbench import panels
from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.instruments.records import Measurement
from workbench.labs.lab05_quantization import numbers
from workbench.labs.lab05_quantization import weight_row as rows
from workbench.models import load
from workbench.models.checkpoints import shipped_tokenizer
from workbench.quantization.bits import BIT_FORMATS, bit_fields
from workbench.quantization.formats import FORMATS, quantize_tensor
from workbench.quantization.toy import Toy

ROW = {"linear": "mlp.down", "group": 16, "shown_group": 1, "outlier_at": 20}  # of the tiny model: 64 inputs


SMALL = {"quantize.weight_row": ROW, "quantize.numbers": {}}
MOVED = {"numbers": {"format": "bf16"}, "weight_row": {"bits": 3}}


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model


@pytest.fixture(scope="module")
def runs(model):
    return brief_runs(SMALL, model)


class TestExperiments(ExperimentClaims):
    lab, small = 5, SMALL


class TestPanels(PanelClaims):
    small, moved = SMALL, MOVED


@pytest.fixture
def make(tiny_model):
    """make(panel, **settings): that panel, drawn; the row's on the tiny model."""

    def made(name: str, **given):
        small = {"model": tiny_model, **ROW} if name == "weight_row" else {}
        panel = getattr(panels, name)(**{**small, **given})
        assert panel.wait(30)
        return panel

    return made


def a_row(size: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


# -- quantize.row: the row -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["layers.0.mlp.gate", "layers.5.attention.k"])
def test_a_row_of_a_shipped_model_is_the_models_own(name):
    model = load("stdlib-10m")
    layer, linear = int(name.split(".")[1]), name.split(".", 2)[2]
    weight = model.get_parameter(f"{name}.weight")
    for row in (0, 7, len(weight) - 1):
        assert torch.equal(rows.weight_row("stdlib-10m", layer, linear, row), weight[row].float())
        assert torch.equal(rows.weight_row(model, layer, linear, row), weight[row].float())


@pytest.mark.parametrize("model", ["stdlib-10m", "tiny"])
def test_what_is_not_there_is_refused_with_what_is(tiny_model, model):
    model = tiny_model if model == "tiny" else model
    with pytest.raises(WorkbenchError, match=r"unknown linear 'layers\.9\.mlp\.gate'.*layers\.1\.mlp\.up"):
        rows.weight_row(model, 9, "mlp.gate", 0)
    with pytest.raises(WorkbenchError, match=r"row must be one of the \d+ outputs of attention\.k, 0 to \d+, got 999"):
        rows.weight_row(model, 0, "attention.k", 999)


def test_an_outlier_is_planted_in_a_copy_and_keeps_its_sign():
    row = a_row()
    size = float(row.square().mean().sqrt())
    for at in (0, 1, 2, 3):
        planted = rows.with_outlier(row, 12.0, at)
        assert float(planted[at]) == pytest.approx(math.copysign(12 * size, float(row[at])))
        assert torch.equal(planted[at + 1 :], row[at + 1 :]) and torch.equal(planted[:at], row[:at])
    assert torch.equal(row, a_row()) and rows.with_outlier(row, 0.0, 10**6) is row
    with pytest.raises(WorkbenchError, match="outlier_at must be one of the 64 elements of this row, got 64"):
        rows.with_outlier(row, 1.0, 64)


# -- quantize.row: rounded -----------------------------------------------------------------------------------------


@given(
    st.sampled_from(rows.KINDS),
    st.integers(2, 8),
    st.sampled_from([0, 16, 32]),
    st.integers(0, 10**6),
    st.sampled_from([1e-4, 1.0, 300.0]),
    st.sampled_from([0.0, 40.0]),
)
@settings(max_examples=120, deadline=None)
def test_a_rounded_row_is_scale_times_level_within_its_bound(kind, bits, group, seed, size, outlier):
    found = rows.round_row(rows.with_outlier(size * a_row(seed=seed), outlier, 5), kind, bits, group)
    zero = 0.0 if found.zero is None else found.zero.repeat_interleave(found.group)
    again = found.codes * found.scale.repeat_interleave(found.group) + zero
    assert torch.allclose(found.rounded, again, rtol=1e-6, atol=1e-6 * size)
    assert set(found.codes.tolist()) <= set(found.unit_levels.tolist())
    for index in range(len(found.scale)):
        levels, part = found.levels(index), found.of_group(index)
        off = (found.row[part][:, None] - levels).abs().amin(1)  # of the nearest level
        assert torch.allclose(found.error[part], off, rtol=1e-3, atol=1e-5 * float(found.scale[index]))
        assert found.codes_used(index) <= min(len(levels), found.group)
    rows.check_row(found)


@pytest.mark.parametrize(
    ("kind", "bits", "group", "wanted"),
    [
        ("affine", 4, 64, 4 + 32 / 64),
        ("symmetric", 4, 128, 4 + 16 / 128),
        ("affine", 3, 32, 4.0),
        ("symmetric", 8, 0, 8 + 16 / 384),
        ("fp8_e4m3", 4, 128, 8 + 16 / 128),
        ("nf4", 8, 64, 4 + 32 / 64),
    ],
)
def test_bits_a_weight_count_scales_and_zeros(kind, bits, group, wanted):
    found = rows.round_row(a_row(384), kind, bits, group)
    assert found.bits_per_weight == pytest.approx(wanted) and found.nbytes == pytest.approx(384 * wanted / 8)


@pytest.mark.parametrize("kind", [k for k in rows.KINDS if k != "nf4"])
def test_a_row_is_rounded_as_the_formats_round_it(kind):
    row = a_row(128)
    name = kind if kind in FORMATS else {"affine": "int4", "symmetric": "int4_symmetric"}[kind]
    assert torch.equal(
        rows.round_row(row, kind, 4, 32).rounded, quantize_tensor(row[None], name, over=1, group=32).dequantize()[0]
    )


@pytest.mark.parametrize("kind", rows.KINDS)
def test_what_is_promised_without_codes_is_what_the_codes_have(kind):
    row = a_row(384)
    found = {choice: rows.round_row(row, kind, *choice) for choice in rows.choices(row, kind)}
    assert len(found) == (35 if kind in rows.WHOLE else 5)
    for choice, one in found.items():
        assert rows.promised(row, kind, *choice) == pytest.approx((one.bits_per_weight, one.predicted_rms_error))
        assert 0.6 < one.rms_error / one.predicted_rms_error < 1.3


def test_steps_are_the_widths_of_what_rounds_to_a_level():
    assert rows.unit_widths(torch.tensor([-1.0, 0.0, 1.0])).tolist() == [1.0, 1.0, 1.0]
    assert rows.unit_widths(torch.tensor([0.0, 1.0, 3.0])).tolist() == [1.0, 1.5, 2.0]
    e4m3 = rows.round_row(torch.tensor([448.0, 1.0, 0.0, 18.0]), "fp8_e4m3", 8, 0)
    assert e4m3.steps.tolist() == [32.0, (1 / 8 + 1 / 16) / 2, 2.0**-9, 2.0]


@pytest.mark.parametrize("kind", rows.KINDS)
def test_an_outlier_spoils_its_own_group_and_no_other(kind):
    row = a_row(256)
    before, after = (rows.round_row(rows.with_outlier(row, o, 70), kind, 4, 64) for o in (0.0, 40.0))
    spoiled = [i for i in range(64, 128) if i != 70]
    others = [*range(64), *range(128, 256)]
    assert torch.equal(before.rounded[others], after.rounded[others])
    worse = rows.rms(after.error[spoiled]) / rows.rms(before.error[spoiled])
    assert worse > (2.5 if kind not in ("fp8_e4m3", "fp8_e5m2") else 0.8)
    assert (worse < 1.5) == kind.startswith("fp8")  # steps of a float are small where numbers are small


def test_an_error_beyond_its_bound_and_bytes_beyond_the_formula_would_be_found_out():
    found = rows.round_row(a_row(), "affine", 4, 16)
    wrong = found.rounded.clone()
    wrong[3] += float(found.scale[0])
    with pytest.raises(WorkbenchError, match="element 3 is off by"):
        rows.check_row(rows.RoundedRow(**{**found.__dict__, "rounded": wrong}))
    with pytest.raises(WorkbenchError, match="49 bytes are stored, and the formula says 48"):
        rows.check_row(rows.RoundedRow(**{**found.__dict__, "code_bytes": found.code_bytes + 1}))


# -- quantize.row: the run -----------------------------------------------------------------------------------------


def test_the_run_gives_every_part_of_the_row_and_every_way_to_round_it(tiny_model):
    found = run_experiment("quantize.weight_row", {"model": tiny_model, **ROW, "format": "symmetric", "bits": 3})
    parts = {m.settings["measured"]: m for m in found if m.settings["measured"] != "rms"}
    assert {name: len(m.samples) for name, m in parts.items()} == {
        "weights": 64,
        "codes": 64,
        "rounded": 64,
        "errors": 64,
        "scales": 4,
    }
    weights, rounded, errors = (parts[n].samples for n in ("weights", "rounded", "errors"))
    assert all(abs(w - r) == pytest.approx(e, abs=1e-6) for w, r, e in zip(weights, rounded, errors))
    assert parts["rounded"].counts["bytes"] == 64 * 3 / 8 + 4 * 2
    swept = [m for m in found if m.settings["measured"] == "rms"]
    assert [(m.settings["bits"], m.settings["group"]) for m in swept] == rows.choices(torch.zeros(64), "symmetric")
    chosen = next(m for m in swept if (m.settings["bits"], m.settings["group"]) == (3, 16))
    assert chosen.median == pytest.approx(rows.rms(torch.tensor(errors))) and chosen.predicted
    assert all(m.check.startswith("every element is within its bound") for m in found)
    assert all(Measurement.from_dict(m.to_dict()) == m for m in found)


def test_affine_rows_have_zeros_too(tiny_model):
    found = run_experiment("quantize.weight_row", {"model": tiny_model, **ROW})
    assert [len(m.samples) for m in found if m.settings["measured"] == "zeros"] == [4]


def test_a_group_that_does_not_divide_the_row_is_refused(tiny_model):
    with pytest.raises(WorkbenchError, match="group must be a whole number that divides the 64 elements"):
        run_experiment("quantize.weight_row", {"model": tiny_model, **ROW, "group": 128})
    with pytest.raises(WorkbenchError, match="divides the 64 inputs, got 128"):
        run_experiment("quantize.weight_row", {"model": tiny_model, **ROW, "group": 128, "format": "nf4"})


# -- quantize.numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", numbers.FORMAT_NAMES)
def test_the_text_of_a_number_gives_its_bits_back(format):
    width = BIT_FORMATS[format].width
    for pattern in range(2**width) if width <= 8 else range(0, 2**width, 2**width // 509):
        view = bit_fields(pattern, format)
        back = numbers.view_of(numbers.text_of(view), format)
        assert back.pattern == pattern
        text = numbers.text_of(view)
        assert numbers.is_pattern(text) == math.isnan(view.value)
        if math.isfinite(view.value):
            assert float(text) == view.value  # exactly, not to a few digits


def test_a_text_is_a_decimal_or_bits():
    for text in ("1.5", " 1.5 ", "+1.5e0", "0b0 01111 1000000000", "0x3e00", "0b0_01111_1000000000"):
        assert numbers.view_of(text, "fp16").value == 1.5
    assert numbers.view_of("−2", "int4").value == -2.0  # a minus sign as it is printed
    assert numbers.view_of("3", "int8").value == 3.0 and numbers.view_of("0x3", "fp8_e4m3").value == 3 / 512
    assert math.isnan(numbers.view_of("nan", "fp8_e4m3").value) and numbers.view_of("-inf", "bf16").value == -math.inf
    for wrong in ("", "one", "0b12", "0x", "1,5", "1e", "9" * 300):
        with pytest.raises(WorkbenchError, match=r"number must be a decimal such as 0\.1, or bits"):
            numbers.view_of(wrong, "fp32")
    with pytest.raises(WorkbenchError, match="a pattern of int4 is a whole number from 0 to 15, got 16"):
        numbers.view_of("0x10", "int4")


def test_neighbours_on_both_sides_and_none_beyond_the_ends():
    assert numbers.around(numbers.view_of("1", "fp8_e4m3"), 2) == [0.875, 0.9375, 1.0, 1.125, 1.25]
    assert numbers.around(numbers.view_of("1", "int4"), 2) == [-1.0, 0.0, 1.0, 2.0, 3.0]
    assert numbers.around(numbers.view_of("127", "int8"), 2) == [125.0, 126.0, 127.0]
    assert numbers.around(numbers.view_of("inf", "fp16"), 2) == [65472.0, 65504.0]
    assert numbers.around(numbers.view_of("-0", "fp8_e5m2"), 1) == [-(2.0**-16), 0.0, 2.0**-16]
    assert numbers.around(numbers.view_of("nan", "fp32"), 3) == []


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
    ],
)
def test_reach_is_what_torch_says_of_its_types(format, dtype):
    reach, info = numbers.reach_of(format), torch.finfo(dtype)
    assert (reach.largest, reach.lowest, reach.least_normal) == (info.max, info.min, info.smallest_normal)
    assert reach.least == info.smallest_normal * info.eps and reach.largest_error == info.eps / 2


def test_numbers_of_small_formats_are_counted():
    count = {name: len(numbers.all_values(name)) for name in BIT_FORMATS if BIT_FORMATS[name].width <= 8}
    assert count == {"fp8_e4m3": 253, "fp8_e5m2": 247, "int8": 256, "uint8": 256, "int4": 16, "uint4": 16, "nf4": 16}
    assert all(numbers.reach_of(name).finite_values == many for name, many in count.items())
    assert numbers.reach_of("bf16").finite_values == 2 * (2**15 - 2**7) - 1


def test_every_format_rounds_within_its_bound_and_comes_near_it():
    found = run_experiment("quantize.numbers", {"number": "0.1", "format": "bf16"})
    first, *rounding = found
    assert first.samples == [0.10009765625] and first.counts["error"] == pytest.approx(9.765625e-5)
    assert [m.settings["format"] for m in rounding] == list(numbers.FORMAT_NAMES)
    for m in rounding:
        assert 0.8 * m.predicted < m.median <= m.predicted and m.check
        assert m.counts["patterns_checked"] == (2 ** m.counts["bits"] if m.counts["bits"] <= 16 else 1000)
    assert all(Measurement.from_dict(m.to_dict()) == m for m in found)


def test_a_number_that_is_none_leaves_the_rest():
    found = run_experiment("quantize.numbers", {"number": "nan", "format": "fp16"})
    assert [m.settings["measured"] for m in found] == ["rounding"] * len(numbers.FORMAT_NAMES)


def test_bits_read_or_rounded_otherwise_than_torch_would_be_found_out(monkeypatch):
    monkeypatch.setattr(numbers, "from_bits", lambda format, pattern: 2 * bit_fields(pattern, format).value)
    with pytest.raises(WorkbenchError, match=r"pattern 0x[0-9a-f]+ of fp8_e4m3 is"):
        numbers._check_decoding("fp8_e4m3", list(range(256)))
    with pytest.raises(WorkbenchError, match=r"rounds to 1\.0 in bf16 here and to 3\.0 there"):
        numbers._check_rounding("bf16", [3.0], [1.0])


# -- the toy ---------------------------------------------------------------------------------------------------------


def test_the_numbers_of_the_toy():
    toy = Toy()
    assert toy.exact() == pytest.approx(3.03)
    assert toy.rounded() == 0.0
    assert toy.mixed() == pytest.approx(3.0)
    assert toy.scaled(4) == pytest.approx(2.5)
    assert toy.scaled(1) == toy.rounded()


def test_how_good_a_scale_is_goes_up_and_down():
    toy = Toy()
    assert toy.scaled(10 / 3) == pytest.approx(3.0) and toy.scaled(2) == pytest.approx(5.0)
    assert abs(toy.scaled(2) - 3.03) > abs(toy.scaled(4) - 3.03) > abs(toy.scaled(10 / 3) - 3.03)


def test_the_toy_comes_out_the_same_with_a_third_weight_and_a_stored_scale():
    toy = Toy()
    assert toy.in_a_group() == 0.0
    assert toy.in_a_group(4) == pytest.approx(2.5, rel=1e-3)
    assert toy.in_a_group(40) == pytest.approx(3.0, rel=1e-3)  # the scaled weight now sets the step itself
    # nobody else's step: nothing is lost
    assert toy.in_a_group(largest=0.03) == pytest.approx(3.03, rel=1e-3)


def test_a_toy_that_makes_no_sense_is_refused():
    with pytest.raises(WorkbenchError, match="a weight for each input"):
        Toy(inputs=(1.0,))
    with pytest.raises(WorkbenchError, match="step must be above 0"):
        Toy(step=0.0)
    with pytest.raises(WorkbenchError, match="a scale must be above 0"):
        Toy().scaled(0)


# -- both panels -----------------------------------------------------------------------------------------------------


def test_hostile_names_are_shown_inert(make):
    hostile = random_decoder(tiny_config(), tokenizer=shipped_tokenizer(), name="<img src=x>$\\frac$")
    panel = make("weight_row", model=hostile)
    panel.run()
    shown = panel.said + panel.extra.value + panel.table.value + panel.status.value
    assert "<img" not in shown and "error" not in panel.status.value


# -- the row's panel -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", rows.KINDS)
def test_the_row_is_drawn_in_every_kind_of_format(make, kind):
    panel = make("weight_row", format=kind)
    assert "error" not in panel.status.value
    found = rows.round_row(rows.weight_row(panel.settings["model"], 0, "mlp.down", 0), kind, 4, 16)
    assert f"{found.bits_per_weight:.4g} bits per weight" in panel.said
    view = panel.view(panel.settings)
    assert [row[5] for row in view.rows] == [f"{rows.rms(found.error[found.of_group(i)]):.3g}" for i in range(4)]
    assert view.rows[1][0] == "1 (shown)" and panel.controls["bits"].disabled == (kind not in rows.WHOLE)


def test_levels_weights_and_bounds_stand_in_the_picture(make):
    panel = make("weight_row", bits=3)
    found = rows.round_row(rows.weight_row(panel.settings["model"], 0, "mlp.down", 0), "affine", 3, 16)
    _, levels, _, errors = panel.view(panel.settings).figure.axes
    drawn = {line.get_label(): line.get_ydata().tolist() for line in levels.lines}
    part = found.of_group(1)
    assert drawn["weight"] == found.row[part].tolist() and drawn["stored"] == found.rounded[part].tolist()
    assert sorted(
        s[0][1] for c in levels.collections for s in c.get_segments() if s[0][1] == s[1][1] and s[1][0] - s[0][0] == 16
    ) == pytest.approx(found.levels(1).tolist())
    (bounds,) = (patch for patch in errors.patches if isinstance(patch, StepPatch))
    assert bounds.get_data().values == pytest.approx(found.bound.numpy())


def test_a_planted_outlier_is_told_of_and_drawn(make):
    panel = make("weight_row")
    assert "outlier" not in panel.said
    panel.configure(outlier=30.0, outlier_at=20)
    assert panel.wait(30)
    found = re.search(
        r"step of its group is ([\d.]+) × .* the rms error of the 15 weights beside it ([\d.]+) ×", panel.said
    )
    assert found and float(found[1]) > 3 and float(found[2]) > 3
    assert "The other 3 groups are as they were" in panel.said
    panel.configure(group=0)
    assert panel.wait(30) and "choose a group" in panel.said


def test_a_setting_that_makes_no_row_is_said_in_the_status_line(make):
    panel = make("weight_row")
    panel.configure(row=500)
    assert panel.wait(30) and "row must be one of the 32 outputs" in panel.status.value
    panel.configure(row=2)
    assert panel.wait(30) and "error" not in panel.status.value


def test_a_run_lays_what_it_measured_over_the_formula(make):
    panel = make("weight_row")
    dashed = len(panel.view(panel.settings).figure.axes[2].lines)
    panel.run()
    assert len(panel.view(panel.settings).figure.axes[2].lines) == dashed + 4  # the row, 16, 32 and 64
    assert "every error within its bound" in panel.said
    panel.configure(row=3)
    assert panel.wait(30) and "every error within its bound" not in panel.said  # of another row


# -- the panel of numbers --------------------------------------------------------------------------------------------


def shown_bits(panel) -> str:
    """As the buttons that are to be seen say, in the order they stand."""
    rows = [panel._rows[role] for role in ("sign", "exponent", "fraction", "code")]
    buttons = [button for row in rows for button in row.children]
    assert all(button.description == str(int(button.value)) for button in buttons)
    return "".join(button.description for button in buttons)


@pytest.mark.parametrize("format", numbers.FORMAT_NAMES)
def test_every_bit_flipped_shows_the_number_of_the_new_bits(make, format):
    panel = make("numbers", format=format, number="1")
    pattern = bit_fields(1.0, format).pattern
    width = BIT_FORMATS[format].width
    for place in range(width):
        button = [b for role in ("sign", "exponent", "fraction", "code") for b in panel._rows[role].children][place]
        button.value = not button.value
        pattern ^= 1 << (width - 1 - place)
        assert shown_bits(panel) == f"{pattern:0{width}b}"
        assert numbers.view_of(panel.settings["number"], format).pattern == pattern
    assert panel.wait(30) and "error" not in panel.status.value
    assert bit_fields(pattern, format).formula.replace("−", "-") in panel.image.value.replace("−", "-")


def test_the_bits_have_roles_labels_and_colours(make):
    panel = make("numbers", format="fp8_e4m3", number="0.1")
    assert {role: len(row.children) for role, row in panel._rows.items()} == {
        "sign": 1,
        "exponent": 4,
        "fraction": 3,
        "code": 0,
    }
    highest = panel._rows["exponent"].children[0]
    assert highest.tooltip == "exponent bit, place 6, is 0: press to flip it"
    looks = {role: {b.button_style for b in row.children} for role, row in panel._rows.items() if row.children}
    assert len(set().union(*looks.values())) == 3 and all(len(look) == 1 for look in looks.values())
    assert panel._fields["code"].layout.display == "none" and panel._fields["sign"].layout.display == ""
    panel.configure(format="nf4")
    assert {role: len(row.children) for role, row in panel._rows.items()} == {
        "sign": 0,
        "exponent": 0,
        "fraction": 0,
        "code": 4,
    }
    assert panel._fields["sign"].layout.display == "none"


def test_another_format_keeps_the_number_and_rounds_it_anew(make):
    panel = make("numbers", format="fp32", number="3.14159")
    panel.configure(format="bf16")
    assert panel.wait(30) and panel.settings["number"] == "3.14159" and "= 3.140625." in panel.said
    panel.configure(number="0b0100000001001001")  # the same as bits, which another format cannot have
    panel.configure(format="int8")
    assert panel.wait(30) and panel.settings["number"] == "3.140625" and shown_bits(panel) == "00000011"
    assert "error" not in panel.status.value


def test_a_text_that_is_no_number_is_said_and_leaves_the_bits(make):
    panel = make("numbers", format="int4", number="5")
    panel.configure(number="five <b>")
    assert panel.wait(30) and "number must be a decimal" in panel.status.value and "<b>" not in panel.status.value
    assert shown_bits(panel) == "0101"
    panel.configure(number="-6")
    assert panel.wait(30) and shown_bits(panel) == "1010" and "error" not in panel.status.value


@pytest.mark.parametrize(
    ("format", "number", "words"),
    [
        (
            "fp32",
            "0.1",
            "(−1)^0 · 2^(123 − 127) · 1.10011001100110011001101 in base 2 = 0.100000001490116119384765625.",
        ),
        ("fp16", "-1e-6", "(−1)^1 · 2^(1 − 15) · 0.0000010001 in base 2 = -0.000001013278961181640625."),
        ("fp8_e4m3", "1e4", "10000 is outside -448 to 448, so it stops at the end."),
        ("fp16", "1e6", "1000000 is beyond the largest number, 65504: fp16 has + infinity for it."),
        ("int8", "300", "300 is outside -128 to 127, so it stops at the end."),
        ("nf4", "0.5", "0.5 was asked for: off by 0.0593, 0.12 of it."),
    ],
)
def test_what_a_number_is_and_what_was_asked_for(make, format, number, words):
    assert words in make("numbers", format=format, number=number).said


def test_the_table_has_the_number_in_every_format(make):
    panel = make("numbers", format="fp16", number="0.1")
    rows = {row[0].split()[0]: row for row in panel.view(panel.settings).rows}
    assert list(rows) == list(numbers.FORMAT_NAMES) and rows["fp16"][0] == "fp16 (shown)"
    assert rows["fp32"][2:4] == ["0.100000001", "1.49e-09"] and rows["int8"][2:4] == ["0", "0.1"]
    assert {row[8] for row in rows.values()} == {""}
    panel.run()
    assert all(float(row[8]) > 0 for row in panel.view(panel.settings).rows)
    panel.configure(number="nan")
    assert panel.wait(30) and panel.view(panel.settings).rows[5][2] == "none"  # int8 has no NaN


@pytest.mark.parametrize("format", [name for name in BIT_FORMATS if BIT_FORMATS[name].width <= 8])
@pytest.mark.parametrize("axis", ["linear", "log"])
def test_all_numbers_of_a_small_format_are_drawn(make, format, axis):
    panel = make("numbers", format=format, axis=axis)
    axes = panel.view(panel.settings).figure.axes[2]
    drawn = [segment[0][0] for segment in axes.collections[0].get_segments()]
    assert drawn == [v for v in numbers.all_values(format) if axis == "linear" or v > 0]
    low, high = axes.get_xlim()
    assert low < min(drawn) and max(drawn) < high


def test_levels_of_nf4_are_widest_apart_at_the_lowest():
    levels = numbers.all_values("nf4")
    gaps = [b - a for a, b in pairwise(levels)]
    assert max(gaps) == gaps[0]  # as the panel says
