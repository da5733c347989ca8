"""native="auto": steps native or eager, as measured, by a clock that says what the test wants."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_fast import SHAPES, needs_compiler
from test_parity import TOLERANCE, relative_difference

from workbench.cli_serving import add_options, engine_maker
from workbench.errors import WorkbenchError
from workbench.experiments.cached_steps import said_of_steps
from workbench.generation import generate
from workbench.instruments import doctor
from workbench.kernels.cpu import step as loop
from workbench.kv import Contiguous
from workbench.models import Batch, fast, measured_steps, native_steps, prepare
from workbench.models.form_times import threads
from workbench.models.measured_steps import ROWS, choose, kept_choices, name_of
from workbench.models.native_steps import MAX_ROWS, NativeSteps
from workbench.native import build
from workbench.native.compiler import OFF
from workbench.quantization import QuantizationRecipe, quantize

CONFIG = tiny_config(vocab_size=64)
BUSY = "other programs kept the cores busy"


class Clock:
    """Runs a step, and says the seconds that were given for its form and rows; counts how often it was asked.

    faster: how many times as fast as an eager step a native one is, by rows; 2.0 for what is not named. None stands for
    runs that were disturbed."""

    def __init__(self) -> None:
        self.faster: dict[int, float | None] = {}
        self.asked: list[tuple[str, int]] = []
        self.logits: dict[tuple[str, int], torch.Tensor] = {}

    def __call__(self, run) -> float | None:
        form = "native" if isinstance(run.func.__self__, NativeSteps) else "eager"
        rows = run.args[0].num_tokens
        self.asked.append((form, rows))
        made = run()
        self.logits[form, rows] = made.logits if form == "native" else made
        gain = self.faster.get(rows, 2.0)
        return 1.0 if form == "eager" or gain is None else 1.0 / gain

    def rows(self) -> list[int]:
        return sorted({rows for _, rows in self.asked})


class Disturbed(Clock):
    def __call__(self, run) -> None:
        super().__call__(run)


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "cache" / "steps.json"


@pytest.fixture
def clock(monkeypatch, file):
    """native="auto" measures, by a clock that one may set, and keeps what it finds in `file`."""
    monkeypatch.setenv("WORKBENCH_MEASURE", "on")
    monkeypatch.setattr(measured_steps, "cache_folder", lambda: file.parent)  # the loop itself is kept where it was
    monkeypatch.setattr(measured_steps, "ALLOWED_S", 120.0)
    made = Clock()
    given_by(monkeypatch, made)
    return made


def given_by(monkeypatch, clock) -> None:
    monkeypatch.setattr(choose, "__kwdefaults__", {**choose.__kwdefaults__, "clock": clock})


def auto(model, **settings):
    """linear: as asked, so that matrices are not measured."""
    said: list[str] = []
    made = prepare(model, native="auto", linear=settings.pop("linear", "plain"), say=said.append, **settings)
    assert not said
    return made


def eight_bits():
    config = tiny_config(vocab_size=64, hidden_size=64, intermediate_size=128, head_dim=16)
    return quantize(random_decoder(config), QuantizationRecipe("rtn", 8, 32, {"symmetric": True}))


# -- the choice --------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    "faster, rows, asked",
    [
        ({}, MAX_ROWS, [1, 4, 16, 64]),  # more the rule does not take
        ({64: 1.04}, 16, [1, 4, 16, 64]),
        ({64: 1.06}, MAX_ROWS, [1, 4, 16, 64]),
        ({16: 0.9, 64: 3.0}, 4, [1, 4, 16]),  # what lies beyond a loss is not asked
        ({4: 0.5}, 1, [1, 4]),
        ({1: 1.04}, 0, [1]),
        ({1: 0.5, 4: 9.0}, 0, [1]),
    ],
)
def test_steps_are_native_up_to_the_rows_with_which_they_are_faster(clock, faster, rows, asked):
    clock.faster = faster
    made = auto(random_decoder(CONFIG))
    assert clock.rows() == asked
    if rows:
        assert made.steps == "native" and made._native.max_rows == rows and not made.why_not_native
    else:
        assert made.steps == "eager" and made._native is None
        assert made.why_not_native.startswith("measured: eager is faster here, native ")


@needs_compiler
def test_codes_are_measured_with_more_rows_and_what_no_rule_limits_with_all(clock, monkeypatch):
    assert auto(eight_bits())._native.max_rows == 64 and clock.rows() == list(ROWS)
    monkeypatch.setattr(native_steps, "torch_multiplies", lambda dtype: False)
    narrow = random_decoder(CONFIG).bfloat16()
    made = auto(narrow)
    assert made._native.max_rows is None
    assert made.native_reason.startswith("no step was taken yet; measured: any number of rows, 2.00 times as fast")


@needs_compiler
@pytest.mark.parametrize("name", [name for name in SHAPES if not name.startswith("latent")])
def test_both_forms_that_are_timed_are_the_same_step(clock, name):
    """Native and eager ones, of every shape, over a cache that is as simple as can be."""
    clock.faster = {4: 0.5}
    auto(random_decoder(SHAPES[name]))
    for rows in (1, 4):
        native, eager = clock.logits["native", rows], clock.logits["eager", rows]
        assert native.shape == (rows, SHAPES[name].vocab_size)
        assert relative_difference(native, eager) < TOLERANCE


@needs_compiler
@torch.inference_mode()
def test_larger_batches_run_eagerly_and_all_give_the_decoders_logits(clock):
    clock.faster = {16: 0.5}
    model = random_decoder(CONFIG)
    made, kvs = auto(model), [Contiguous(CONFIG, max_sequences=8) for _ in "ab"]
    for rows, words in ((4, "4 rows are one function in C++"), (5, "5 rows run as they are: up to 4 are one function")):
        batch = Batch.of([list(range(rows))], sequences=[rows])
        got, expected = made(batch, kvs[0]), model(batch, kvs[1])
        assert relative_difference(got, expected) < TOLERANCE
        assert made.native_reason.startswith(f"{words}; measured: up to 4 rows, ")


# -- what is said and kept ---------------------------------------------------------------------------------------------


@needs_compiler
def test_the_reason_names_rows_gains_the_day_the_threads_and_the_file(clock, file):
    clock.faster = {1: 2.7, 16: 1.25, 64: 1.0}
    made = auto(random_decoder(CONFIG))
    (times,) = json.loads(file.read_text())["entries"].values()
    measured = "measured: up to 16 rows, 2.70 times as fast as eager with one row, 1.25 times with 16"
    assert (
        made.native_reason
        == made.steps_reason
        == (f"no step was taken yet; {measured} ({times['day']}, {threads()}, kept in steps.json)")
    )
    assert said_of_steps(made) == "no step was taken yet; measured: up to 16 rows"
    clock.faster = {1: 0.8}
    slower = auto(random_decoder(tiny_config(vocab_size=48)))
    lost = f"measured: eager is faster here, native 0.80 times as fast with one row ({times['day']}, {threads()}, "
    assert slower.why_not_native == slower.native_reason == slower.steps_reason == f"{lost}kept in steps.json)"
    assert slower.why_not_steps == said_of_steps(slower) == ""


@needs_compiler
def test_what_was_measured_holds_for_the_next_process_and_for_other_weights_of_the_shape(clock, file):
    clock.faster = {16: 0.5}
    first = auto(random_decoder(CONFIG))
    measured_steps.table_in.cache_clear()
    kept, clock.faster, clock.asked = file.read_bytes(), {1: 0.1}, []
    again = auto(random_decoder(CONFIG, seed=1))
    assert again.native_reason == first.native_reason and not clock.asked and file.read_bytes() == kept


@needs_compiler
def test_shapes_types_forms_inputs_and_threads_are_measured_each_for_itself(clock, monkeypatch):
    model, quantized = random_decoder(CONFIG), eight_bits()
    plain = random_decoder(quantized.config)
    cases = [
        lambda: auto(model),
        lambda: auto(copy.deepcopy(model).bfloat16()),
        lambda: auto(random_decoder(tiny_config(vocab_size=64, sliding_window=8))),
        lambda: auto(plain),
        lambda: auto(quantized),
        lambda: auto(quantized, inputs="q8"),
    ]
    for case in cases:
        clock.asked = []
        case()
        assert clock.asked
    clock.asked = []
    [case() for case in cases]
    assert not clock.asked
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 3)
        auto(model)
    assert clock.asked


@needs_compiler
def test_how_matrices_are_held_is_part_of_an_entrys_name():
    steps = NativeSteps.of(random_decoder(CONFIG))
    names = {name_of(steps, held, "exact") for held in (["plain"], ["packed"], ["packed", "plain"])}
    assert len(names) == 3 and all(name.endswith(f", {threads()}") and "2 layers of 32" in name for name in names)


@needs_compiler
@pytest.mark.parametrize("reason", [BUSY, "measuring took too long here"])
def test_where_it_cannot_be_measured_the_rule_decides_and_says_so(clock, file, monkeypatch, reason):
    if reason == BUSY:
        given_by(monkeypatch, disturbed := Disturbed())
    else:
        monkeypatch.setattr(measured_steps, "ALLOWED_S", 0.0)
        disturbed = clock
    model = random_decoder(CONFIG)
    made = auto(model)
    assert made.steps == "native" and made._native.max_rows == MAX_ROWS and not file.exists()
    assert made.native_reason == f"no step was taken yet; by rule: up to {MAX_ROWS} rows, since {reason}"
    disturbed.asked = []
    assert auto(model).native_reason == made.native_reason and not disturbed.asked  # once a process
    measured_steps.table_in.cache_clear()


@needs_compiler
def test_a_large_model_that_takes_too_long_leaves_others_to_be_measured(clock, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(measured_steps, "ALLOWED_S", 0.0)
        assert "too long" in auto(random_decoder(CONFIG)).native_reason
    assert f"measured: up to {MAX_ROWS} rows" in auto(random_decoder(tiny_config(vocab_size=48))).native_reason


@needs_compiler
def test_a_table_of_another_loop_is_measured_again(clock, file):
    auto(random_decoder(CONFIG))
    file.write_text(json.dumps({**json.loads(file.read_text()), "version of native steps": "older"}))
    measured_steps.table_in.cache_clear()
    clock.asked = []
    reason = auto(random_decoder(CONFIG)).native_reason
    assert clock.asked and "measured again, since the kept steps.json is for another version of native steps" in reason


@needs_compiler
def test_measuring_leaves_no_trace(clock):
    """Neither in the random numbers, nor in what is said of steps, nor in the texts."""
    model, state = random_decoder(CONFIG), torch.get_rng_state()
    made = auto(model)
    assert torch.equal(torch.get_rng_state(), state) and clock.asked
    assert made.native_reason.startswith("no step was taken yet; ")
    settings = {"max_new_tokens": 30, "kv": "contiguous"}
    assert generate(made, [1, 2, 3], **settings).tokens == generate(model, [1, 2, 3], **settings).tokens
    assert made.native_reason.startswith(f"a step is one function in C++; measured: up to {MAX_ROWS} rows")


@needs_compiler
def test_an_error_of_a_step_is_not_kept_as_a_time(clock, file, monkeypatch):
    monkeypatch.setattr(loop, "run", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        auto(random_decoder(CONFIG))
    assert not file.exists()


# -- where nothing is measured -----------------------------------------------------------------------------------------


@pytest.fixture
def nothing_compiled(monkeypatch):
    """Asking for the loop is an error."""
    monkeypatch.setattr(fast, "why_not_native", lambda model: pytest.fail("the loop was asked for"))


def test_with_measuring_off_steps_are_eager_and_nothing_is_compiled_read_or_kept(clock, file, monkeypatch, request):
    monkeypatch.setenv("WORKBENCH_MEASURE", "off")
    request.getfixturevalue("nothing_compiled")
    made = auto(random_decoder(CONFIG))
    assert made.steps == "eager" and not clock.asked and not file.exists()
    assert made.native_reason == "WORKBENCH_MEASURE is off: steps are native only where native=True asks for them"


@needs_compiler
def test_with_measuring_off_native_true_is_native(monkeypatch):
    monkeypatch.setenv("WORKBENCH_MEASURE", "off")
    made = prepare(random_decoder(CONFIG), native=True)
    assert made.steps == "native" and made._native.max_rows == MAX_ROWS


def test_another_setting_is_refused(clock, monkeypatch):
    monkeypatch.setenv("WORKBENCH_MEASURE", "of")
    with pytest.raises(WorkbenchError, match="setting of WORKBENCH_MEASURE 'of'; did you mean 'off'"):
        auto(random_decoder(CONFIG))


def test_models_without_native_steps_are_eager_and_nothing_is_said_unasked(clock, nothing_compiled):
    latent = next(name for name in SHAPES if name.startswith("latent"))
    for config, words in ((SHAPES[latent], "latents"), (tiny_config(vocab_size=64, head_dim=6), "multiple of 8")):
        made = auto(random_decoder(config))
        assert words in made.why_not_native and made.steps == "eager" and words in made.steps_reason


@needs_compiler
def test_weights_without_a_loop_are_eager_and_nothing_is_said_unasked(clock):
    config = tiny_config(vocab_size=64, hidden_size=64, head_dim=16, intermediate_size=128)
    made = auto(quantize(random_decoder(config), QuantizationRecipe("nf4")))
    assert "no form for steps as one function" in made.steps_reason and not clock.asked


def test_without_a_compiler_steps_are_eager_and_one_sentence_says_so(clock, monkeypatch):
    monkeypatch.setenv(OFF, "1")
    for one in (build.library, loop.why_not_here):
        one.cache_clear()
    try:
        said: list[str] = []
        made = prepare(random_decoder(CONFIG), native="auto", linear="plain", say=said.append)
        assert said == [f"steps of tiny are not one function in C++ and run as they are: {OFF} is set"]
        assert made.steps == "eager" and made.steps_reason == f"{OFF} is set" and not clock.asked
    finally:
        for one in (build.library, loop.why_not_here):
            one.cache_clear()


def test_what_was_asked_for_by_name_is_not_chosen_against(clock, nothing_compiled, monkeypatch):
    made = auto(random_decoder(CONFIG), compile=True)
    assert made.steps == "compiled" and made.native_reason == "compile=True was asked for"
    pytest.importorskip("triton")
    monkeypatch.setattr(fast.fused, "why_not_here", lambda model: "")  # nothing is run
    made = auto(random_decoder(CONFIG), kernels="triton")
    assert made.steps == "eager" and made.steps_reason == 'kernels="triton" was asked for'


@pytest.mark.parametrize("native", ["yes", None, 1, "True"])
def test_other_values_are_refused(native):
    with pytest.raises(WorkbenchError, match='native must be True, False or "auto", got'):
        prepare(random_decoder(CONFIG), native=native)


def test_prepare_alone_stays_eager(clock, nothing_compiled):
    made = prepare(random_decoder(CONFIG), linear="plain")
    assert made.steps == "eager" and made.steps_reason == "" and made.native_reason == "native=False"


# -- who asks for it ---------------------------------------------------------------------------------------------------


def served(*options: str):
    parser = argparse.ArgumentParser()
    add_options(parser)
    return engine_maker(parser.parse_args(["stdlib-1m", "--blocks", "8", "--linear", "plain", *options]))()


@needs_compiler
def test_the_server_and_its_draft_measure_unless_told_otherwise(clock, monkeypatch):
    asked = []
    monkeypatch.setattr(fast, "choose", lambda native, *given: asked.append(native.config) or choose(native, *given))
    engine = served("--draft", "stdlib-1m")
    assert asked == [engine.model.config] * 2 and engine.model.steps == "native"
    assert f"measured: up to {MAX_ROWS} rows" in engine.model.steps_reason
    for option, steps in (("--native", "native"), ("--no-native", "eager")):
        assert served(option, "--draft", "stdlib-1m").model.steps == steps and len(asked) == 2


def test_a_server_whose_draft_keeps_a_state_takes_it_as_it_is(clock, nothing_compiled):
    assert served("--no-native", "--draft", "stdlib-3m-mamba2").model.steps == "eager"


@needs_compiler
def test_the_doctor_says_what_was_measured_and_what_is_missing(clock, monkeypatch):
    assert kept_choices() == f"no model measured yet, with {threads()}"
    auto(random_decoder(CONFIG))
    clock.faster = {1: 0.5}
    auto(random_decoder(tiny_config(vocab_size=48)))
    (finding,) = doctor._native()
    assert finding.ok and finding.found.endswith(f": native steps faster for 1 of 2 models, with {threads()}")
    monkeypatch.setenv("WORKBENCH_MEASURE", "off")
    assert "; not in use: WORKBENCH_MEASURE is off" in kept_choices()
    monkeypatch.setenv(OFF, "1")
    (finding,) = doctor._native()
    assert finding.ok is None and finding.found == f"{OFF} is set" and finding.fix == f"unset {OFF}"
