"""Plain or packed, as measured: by a clock that says what the test wants, so that nothing here depends on a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_parity import TOLERANCE, relative_difference

from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.instruments import device, doctor, passing
from workbench.kv import Contiguous
from workbench.models import Batch, form_times, measured_linear, prepare
from workbench.models.form_times import TimesTable
from workbench.models.linear import Looped, Packed, Plain, chosen_linear, why_not_looped, why_not_packed
from workbench.models.measured_linear import (
    LINEARS,
    MeasuredLinear,
    Shape,
    for_many_rows,
    kept_forms,
    maker_of,
    why_not_measured,
)

ONE_FORM = why_not_packed(torch.float32, "cpu")
pytestmark = pytest.mark.skipif(bool(ONE_FORM), reason=f"nothing to choose between: {ONE_FORM}")
CONFIG = tiny_config(vocab_size=64, context_length=64)
LARGE = (1100, 1024)  # out, in: beyond 4 MiB


class Clock:
    """Runs a product, and says the seconds that were given for its form and rows; counts how often it was asked.

    seconds: by form, or by (form, rows); 1.0 for what is not named. None stands for a run that was disturbed."""

    def __init__(self, seconds: dict | None = None) -> None:
        self.seconds, self.asked = seconds or {}, 0

    def __call__(self, run) -> float | None:
        self.asked += 1
        form, rows = run.func.form, len(run.args[0])
        run()
        return self.seconds.get((form, rows), self.seconds.get(form, 1.0))


PLAIN_FASTER = {"plain": 0.5}
LOOP = not why_not_looped(torch.float32, "cpu")


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "cache" / "linear.json"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """As few products as the rules allow, and as long as a busy machine wants for them."""
    monkeypatch.setattr(measured_linear, "PASSED_BYTES", 1 << 20)
    monkeypatch.setattr(measured_linear, "ROUNDS", form_times.LEAST)
    monkeypatch.setattr(measured_linear, "ALLOWED_S", 120.0)


@pytest.fixture
def measuring(monkeypatch, file):
    """prepare measures, by a clock that one may set, and keeps what it finds in `file`."""
    monkeypatch.setenv("WORKBENCH_MEASURE", "on")
    monkeypatch.setenv("WORKBENCH_CACHE", str(file.parent))
    clock = Clock(dict(PLAIN_FASTER))
    monkeypatch.setattr(
        MeasuredLinear.__init__, "__kwdefaults__", {**MeasuredLinear.__init__.__kwdefaults__, "clock": clock}
    )
    return clock


def maker(file: Path, seconds: dict | None = None, **given) -> MeasuredLinear:
    """As in a process of its own."""
    return MeasuredLinear(1 << 20, clock=Clock(seconds), table=TimesTable(file, LINEARS), **given)


def form_of(make: MeasuredLinear, shape: tuple[int, int] = (48, 32)) -> str:
    return make(torch.zeros(shape)).form


# -- the choice ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seconds, shape, form",
    [
        ({}, (48, 32), "packed"),
        (PLAIN_FASTER, (48, 32), "plain"),
        ({"plain": 0.98}, (48, 32), "packed"),  # 0.98 three times: 4 % in all, too little
        ({"plain": 0.97}, (48, 32), "plain"),
        *([({"plain": 0.6, "C++ loop": 0.5}, (48, 32), "C++ loop")] if LOOP else []),
        ({("plain", 1): 0.5, ("plain", 4): 2.0, ("plain", 16): 2.0}, (48, 32), "packed"),  # as much lost as gained
        ({("plain", 1): 0.5, ("plain", 4): 1.0, ("plain", 16): 2.0}, (48, 32), "plain"),  # a few count once, not twice
        ({"packed, rows unpadded": 0.7}, LARGE, "packed, rows unpadded"),
        ({"packed, rows unpadded": 0.7, "plain": 0.8}, LARGE, "plain"),  # 0.7 once, 0.8 with one row and with a few
        ({"packed, rows unpadded": 0.98}, LARGE, "packed"),
        ({"packed, rows unpadded": 0.1}, (48, 32), "packed"),  # a small one is never padded
    ],
)
def test_the_form_that_gains_most_is_chosen_where_that_is_five_percent(file, seconds, shape, form):
    assert form_of(maker(file, seconds), shape) == form


def test_a_disturbed_run_does_not_count_and_too_few_others_leave_it_to_the_rule(file):
    make = maker(file, {"plain": None})
    assert form_of(make) == "packed" and not file.exists()
    assert make.reason == "packed for all, by rule: other programs kept the cores busy"
    asked = make._clock.asked
    assert form_of(make) == form_of(make, (64, 32)) == "packed" and make._clock.asked == asked  # once a process


def test_the_time_allowed_for_a_model_is_not_exceeded(file, monkeypatch):
    monkeypatch.setattr(measured_linear, "ALLOWED_S", 0.0)
    make = maker(file, PLAIN_FASTER)
    assert form_of(make) == "packed" and make._clock.asked == 0 and not file.exists()
    assert make.reason == "packed for all, by rule: measuring took too long here"


def test_larger_matrices_with_the_same_inputs_are_one_entry_and_small_ones_their_own():
    of = Shape.of
    assert of(2304, 768, torch.float32, 1 << 30) == of(32_000, 768, torch.float32, 1 << 30)
    assert of(2304, 768, torch.float32, 1 << 30).out_features * 768 * 4 >= Packed.LARGE_BYTES
    assert of(768, 768, torch.float32, 1 << 30) != of(784, 768, torch.float32, 1 << 30)
    names = [of(*LARGE, dtype, size).name for dtype in (torch.float32, torch.bfloat16) for size in (1, 1 << 30)]
    assert len(set(names)) == 2 + len({of(*LARGE, torch.float32, size).count for size in (1, 1 << 30)}) - 1
    assert of(1, 10**9, torch.float32, 1).count == 1


# -- what is kept ----------------------------------------------------------------------------------------------


def test_what_was_measured_is_kept_and_the_next_process_only_reads_it(file):
    first = maker(file, PLAIN_FASTER)
    assert form_of(first) == "plain" and first._clock.asked > 0
    kept = file.read_bytes()
    second = maker(file, {"plain": 2.0})
    assert form_of(second) == "plain" and second._clock.asked == 0
    assert file.read_bytes() == kept and second.reason == first.reason
    assert form_of(second, (80, 32)) == "packed" and second._clock.asked > 0  # another shape is measured
    assert len(json.loads(file.read_text())["entries"]) == 2


def test_the_reason_names_forms_matrices_gains_the_day_and_the_file(file):
    make = maker(file, {("plain", 1): 0.5, ("plain", 4): 0.8, ("plain", 16): 0.8})
    assert form_of(make) == "plain"
    assert make.reason.startswith(
        "plain for 32 to 48: 2.00 times as fast as packed with one row, 1.25 times with a few; "
    )
    day = next(iter(make._table.entries.values())).day
    assert f"measured {day} with {measured_linear.threads()}, kept in linear.json" in make.reason
    assert str(file) not in make.reason


def test_a_table_of_another_torch_is_measured_again_and_the_reason_says_so(file):
    form_of(maker(file, PLAIN_FASTER))
    file.write_text(json.dumps({**json.loads(file.read_text()), "torch": "other"}))
    make = maker(file)
    assert form_of(make) == "packed" and make._clock.asked > 0
    assert "measured again, since the kept linear.json is for another torch" in make.reason


def test_another_number_of_threads_is_measured_for_itself_and_both_are_kept(file, monkeypatch):
    assert form_of(maker(file, PLAIN_FASTER)) == "plain"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert form_of(maker(file)) == "packed"
    monkeypatch.undo()
    again = maker(file)
    assert form_of(again) == "plain" and again._clock.asked == 0


def test_the_reason_is_of_the_threads_with_which_it_was_chosen(file, monkeypatch):
    make = maker(file, PLAIN_FASTER)
    form_of(make)
    said = make.reason
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert make.reason == said and "64 threads" not in said


# -- prepare ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    kv = Contiguous(CONFIG)
    steps = [Batch.of([[at % 64]], first_positions=[at]) for at in range(9, 14)]
    return torch.cat([model(batch, kv) for batch in (Batch.of([list(range(9))], logits="all"), *steps)])


@pytest.mark.parametrize("faster", ["plain", "packed"])
def test_prepare_takes_what_was_measured_and_the_numbers_are_the_same(measuring, file, faster):
    measuring.seconds = {faster: 0.5}
    model = random_decoder(CONFIG)
    fast = prepare(model)
    assert set(fast.forms.values()) == {faster} and measuring.asked > 0
    assert fast.linear_reason.startswith(f"{faster} for ") and "kept in linear.json" in fast.linear_reason
    assert relative_difference(logits_of(fast), logits_of(model)) < TOLERANCE
    asked = {"max_new_tokens": 16, "temperature": 0.0, "stop_token_ids": ()}
    assert generate(fast, [1, 2, 3], **asked).tokens == generate(model, [1, 2, 3], **asked).tokens
    again = measuring.asked
    assert prepare(model).linear_reason == fast.linear_reason and measuring.asked == again


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 17])
def test_the_forms_give_the_same_product(rows):
    weight, x = torch.randn(LARGE), torch.randn(rows, LARGE[1])
    expected = x.double() @ weight.double().T
    for make in measured_linear.MAKERS.values():
        got = make(weight)(x).double()
        assert got.shape == expected.shape and (rows == 0 or relative_difference(got, expected) < TOLERANCE)


@pytest.mark.parametrize("form, rows", [("packed", 4), ("unpadded", 1)])
def test_one_row_is_multiplied_as_so_many(form, rows):
    linear, seen = measured_linear.MAKERS[form](torch.randn(LARGE)), []
    real = linear._multiply
    linear._multiply = lambda x, *others: seen.append(len(x)) or real(x, *others)
    linear(torch.randn(1, LARGE[1]))
    assert seen == [rows] == [linear.least_rows]


def test_measuring_takes_no_random_numbers(measuring):
    model, state = random_decoder(CONFIG), torch.get_rng_state()
    prepare(model)
    assert torch.equal(torch.get_rng_state(), state) and measuring.asked > 0


def test_with_measuring_off_the_rule_decides_and_nothing_is_read_or_kept(measuring, file, monkeypatch):
    model = random_decoder(CONFIG)
    prepare(model)
    file.unlink()
    asked = measuring.asked
    monkeypatch.setenv("WORKBENCH_MEASURE", "off")
    fast = prepare(model)
    assert set(fast.forms.values()) == {"packed"} and fast.linear_reason == chosen_linear(torch.float32, "cpu")[1]
    assert measuring.asked == asked and not file.exists()
    assert why_not_measured(torch.float32, "cpu") == "WORKBENCH_MEASURE is off"


def test_another_setting_is_refused(measuring, monkeypatch):
    monkeypatch.setenv("WORKBENCH_MEASURE", "of")
    with pytest.raises(WorkbenchError, match=r"setting of WORKBENCH_MEASURE 'of'; did you mean 'off'\? Known: off, on"):
        prepare(random_decoder(CONFIG))


@pytest.mark.parametrize("linear", ["plain", "packed"])
def test_what_is_asked_by_name_is_not_measured(measuring, linear):
    assert set(prepare(random_decoder(CONFIG), linear=linear).forms.values()) == {linear} and measuring.asked == 0


def test_what_has_one_form_alone_is_not_measured(measuring):
    assert prepare(random_decoder(CONFIG).double()).linear_reason.startswith("plain: packing is for")
    assert measuring.asked == 0


# -- others that hold matrices as prepare does -----------------------------------------------------------------


@pytest.mark.parametrize("faster, large_rows", [("packed", 4), ("packed, rows unpadded", 1), ("plain", 1)])
def test_the_speed_of_weights_is_measured_in_the_form_that_was_chosen(measuring, monkeypatch, faster, large_rows):
    monkeypatch.setattr(passing, "ROUNDS", 1)
    measuring.seconds = {faster: 0.5}
    held = maker_of((32, 48), torch.float32, "cpu", 1 << 20)(torch.zeros(32, 48))
    assert held.form == ("packed" if large_rows == 1 and faster != "plain" else faster)
    speeds, _ = passing.measure_weights(torch.float32, 1 << 20, None)
    assert speeds.large_rows == large_rows


def test_ceilings_are_kept_apart_by_how_forms_are_chosen(measuring, monkeypatch):
    measured = device._cache_path("cpu")
    monkeypatch.setenv("WORKBENCH_MEASURE", "off")
    assert device._cache_path("cpu") != measured


def test_products_are_measured_as_layers_multiply(monkeypatch):
    """By rows of both: by the columns of the second, torch is ten times slower in 16 bits on some processors."""
    timed = []
    monkeypatch.setattr(device, "BUDGET_S", 0)
    monkeypatch.setattr(device, "_timed", lambda product, *others: timed.append(product()) or [1.0])
    monkeypatch.setattr(torch, "randn", lambda *shape, device: torch.arange(float(shape[0] * shape[1])).view(shape))
    assert device._matmul_rates(torch.float32, "cpu", None) == [2.0 * 256**3]
    rows = torch.arange(256.0**2).view(256, 256)
    assert torch.equal(timed[0], rows @ rows.T)


def test_the_doctor_says_what_was_measured(measuring, monkeypatch):
    assert "no shape measured yet" in kept_forms()
    prepare(random_decoder(CONFIG))
    assert kept_forms().endswith(f" plain, with {measured_linear.threads()}")
    assert [one.ok for one in doctor._linear()] == [True]
    monkeypatch.setenv("WORKBENCH_MEASURE", "off")
    assert kept_forms().endswith("; not in use: WORKBENCH_MEASURE is off")


@pytest.mark.skipif(not LOOP, reason="there is no loop in C++ here")
def test_types_that_the_processor_does_not_multiply_go_through_the_loop_without_measuring(measuring, monkeypatch):
    model = random_decoder(CONFIG).bfloat16()
    for has in (False, True):
        monkeypatch.setattr(measured_linear, "torch_multiplies", lambda dtype, has=has: has)
        monkeypatch.setattr(measured_linear, "why_not_packed", lambda dtype, device: "not here")
        fast = prepare(model)
        assert set(fast.forms.values()) == ({"plain"} if has else {"C++ loop"})
        assert for_many_rows(torch.bfloat16, "cpu") is (Plain if has else Looped)  # as ceilings are measured
    assert measuring.asked == 0
    monkeypatch.setenv("WORKBENCH_MEASURE", "off")
    monkeypatch.setattr(measured_linear, "torch_multiplies", lambda dtype: False)
    assert "C++ loop" not in prepare(model).forms.values()
