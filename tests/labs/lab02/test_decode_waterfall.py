"""Claims about time.decode_waterfall: bars add up, counts are exact, a reason for what is left out, no wrong token.

The clock is ours, so that every time is known; one call is a stand-in, since compiling takes half a minute (that the
compiled step gives the tokens of the Decoder is claimed in tests/engine/test_one_call.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from conftest import random_decoder, tiny_config
from experiment_claims import DataSheetBench, ExperimentClaims, brief_runs
from panel_claims import PanelClaims, elsewhere, shown

from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.generation import generate
from workbench.instruments.bench import Bench
from workbench.instruments.costs import decode_costs
from workbench.instruments.device import PUBLISHED
from workbench.instruments.records import Measurement
from workbench.labs.lab02_where_time_goes import decode_waterfall, ways
from workbench.labs.lab02_where_time_goes.decode_waterfall import CEILING, LEFT, TIMED, cached_tokens, falls, new_tokens
from workbench.labs.lab02_where_time_goes.panels import decode_waterfall as panel_module
from workbench.labs.lab02_where_time_goes.ways import (
    DECODER,
    LOOPED,
    NATIVE,
    ONE_CALL,
    PACKED,
    PREPARED,
    THEIRS,
    WAYS,
    Way,
    operations_of,
    python_calls_of,
)
from workbench.models.linear import Packed, Plain
from workbench.native.compiler import why_no_compiler

NAME = "time.decode_waterfall"
SMALL = {NAME: {"context": 16, "repeats": 2}}
TICK = 2.0**-12  # seconds: sums of such times are exact
TAKES = dict(zip(WAYS, (40, 28, 16, 19, 10, 6, 5)))  # ticks of a step: packed weights are slower here


READ_TICKS = 5


class OurClock(DataSheetBench):
    """A step of a way takes its ticks, and one more in every second round; a plain read always as many."""

    def measure(self, function, *, repeats, warmup=1):
        function()
        if not isinstance(function, partial):
            return [READ_TICKS * TICK]
        one = function.func.__self__
        return [TIMED * TICK * (TAKES[one.way.name] + len(one.samples) % 2)]


def stand_in(bench, decoder) -> Way:
    """In place of the compiled step: tokens that were generated beforehand."""

    def begin(prompt: list[int], count: int) -> Iterator[int]:
        return iter(generate(decoder, prompt, max_new_tokens=count, stop_token_ids=(), kv="contiguous").tokens)

    return Way(ONE_CALL, begin, torch.float32, lambda: "a step is one call, loaded")


def replace_one_call(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ways, "why_not_one_call", lambda decoder: "")
    patch.setattr(ways, "_one_call", stand_in)


def without_transformers(patch: pytest.MonkeyPatch) -> None:
    """As where it is not installed; importing it takes most of this file's time, so one run has it."""
    patch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.fixture
def quick(monkeypatch):
    replace_one_call(monkeypatch)
    without_transformers(monkeypatch)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model


@pytest.fixture(scope="module")
def runs(model):
    with pytest.MonkeyPatch.context() as patch:
        replace_one_call(patch)
        return brief_runs(SMALL, model, OurClock)


@pytest.fixture
def steps(runs) -> dict[str, Measurement]:
    return {m.settings["way"]: m for m in runs[NAME] if m.settings["part"] == "step"}


@pytest.mark.parametrize(
    ("form", "ways_predicted"), [(Packed, {PACKED}), (Plain, {PREPARED}), (lambda weight, bias=None: None, set())]
)
def test_a_prepared_step_is_predicted_for_the_way_in_the_form_that_is_chosen_here(
    model, monkeypatch, form, ways_predicted
):
    monkeypatch.setattr(decode_waterfall, "maker_of", lambda *matrix: form)
    _, by_way = decode_waterfall.expected(PUBLISHED["h100-sxm"], model=model, weights="float32", context=16, repeats=2)
    assert set(by_way) == {DECODER, LOOPED, NATIVE} | ways_predicted
    launch = {way: one.terms["launch"] for way, one in by_way.items()}
    assert launch[NATIVE] == 0 < launch[LOOPED] < launch[DECODER], "one function starts nothing"


@pytest.mark.usefixtures("quick")
class TestExperiments(ExperimentClaims):
    lab, small = 2, SMALL


class TestPanels(PanelClaims):
    small, moved = SMALL, {"decode_waterfall": {"context": 64}}


def run(model, bench=None, **settings) -> list[Measurement]:
    return run_experiment(NAME, {"model": model, **SMALL[NAME], **settings}, bench or OurClock())


# -- bars --------------------------------------------------------------------------------------------------------


def test_the_bars_and_the_ceiling_add_up_to_the_first_step_exactly(runs, steps):
    assert tuple(steps) == WAYS
    levels = {way: m.median for way, m in steps.items()}
    assert levels == {way: (ticks + 0.5) * TICK for way, ticks in TAKES.items()}
    ceiling_s = 4 * TICK
    bars = falls(levels, ceiling_s)
    assert [bar.to for bar in bars] == [*WAYS[1:], CEILING] and bars[-1].cause == LEFT
    assert ceiling_s + sum(bar.seconds for bar in bars) == levels[THEIRS]
    assert {bar.to: bar.seconds / TICK for bar in bars} == {
        DECODER: 12,
        PREPARED: 12,
        PACKED: -3,  # it goes up
        LOOPED: 9,
        ONE_CALL: 4,
        NATIVE: 1,
        CEILING: 1.5,
    }


def test_a_bar_lies_between_neighbours_whichever_are_left_out():
    assert [bar.to for bar in falls({THEIRS: 3.0, ONE_CALL: 1.0}, 0.5)] == [ONE_CALL, CEILING]
    assert [bar.seconds for bar in falls({PREPARED: 3.0}, 0.5)] == [2.5] and falls({}, 0.5) == []


def test_a_bar_over_a_way_that_was_left_out_has_its_cause_too():
    bars = falls({PACKED: 3.0, NATIVE: 1.0}, 0.5)
    assert [bar.cause for bar in bars] == ["small kernels and Python and dispatch and generated loops", LEFT]
    assert panel_module._signed(bars[0]) == "−2 s small kernels\nand Python and dispatch\nand generated loops"


def test_differences_are_of_the_same_round_and_the_last_is_above_the_ceiling(runs):
    causes = {m.settings["to"]: m for m in runs[NAME] if m.settings["part"] == "cause"}
    assert list(causes) == [*WAYS[1:], CEILING]
    assert causes[PREPARED].samples == [12 * TICK] * 2 and causes[PACKED].samples == [-3 * TICK] * 2
    [ceiling] = [m for m in runs[NAME] if m.settings["part"] == "ceiling"]
    assert ceiling.median == ceiling.counts["bytes"] / PUBLISHED["h100-sxm"].read_bytes_per_s
    assert causes[CEILING].samples == [(5 + odd) * TICK - ceiling.median for odd in (0, 1)]


@pytest.mark.parametrize("repeats", [1, 2, 7])
def test_the_cached_tokens_are_the_mean_over_the_timed_steps(model, repeats, monkeypatch, quick):
    """Of a way that notes how many tokens are in front of each token it gives."""
    seen: list[int] = []

    class Noting(OurClock):
        def measure(self, function, *, repeats, warmup=1):
            if not isinstance(function, partial):
                return super().measure(function, repeats=repeats, warmup=warmup)
            first = len(function.func.__self__.tokens)
            taken = super().measure(function, repeats=repeats, warmup=warmup)
            after = len(function.func.__self__.tokens)
            seen.extend(16 + token - 1 for token in range(first, after))  # the last token is not cached yet
            return taken

    counts = [m.settings["cached_tokens"] for m in run(model, Noting(), repeats=repeats)]
    assert set(counts) == {sum(seen) / len(seen)} == {cached_tokens(16, repeats)}
    assert len(seen) == TIMED * repeats * (len(WAYS) - 1)


# -- counts ------------------------------------------------------------------------------------------------------


def test_operations_are_those_that_torch_dispatches_and_python_calls_those_of_functions():
    x = torch.ones(2, 3)
    assert operations_of(lambda: (x + 1).relu().view(6)) == 3 and operations_of(lambda: None) == 0

    def twice():
        return len([one() for one in (partial(float, "1"), lambda: 2.0)])

    def generator():
        yield twice()

    assert python_calls_of(partial(max, 1, 2)) == 0
    inside = python_calls_of(twice)
    assert python_calls_of(partial(next, generator())) == 1 + inside >= 3


def test_calls_fall_from_way_to_way_and_are_the_same_each_time(steps, model, quick):
    operations = {way: m.counts["operations"] for way, m in steps.items()}
    calls = {way: m.counts["python_calls"] for way, m in steps.items()}
    assert (
        operations[DECODER]
        > operations[PREPARED]
        == operations[PACKED]
        > operations[LOOPED]
        > operations[NATIVE]
        > operations[ONE_CALL]
        == 0
    )
    assert operations[THEIRS] > operations[PREPARED]
    assert calls[THEIRS] > calls[DECODER] > calls[PREPARED] > calls[NATIVE] > calls[ONE_CALL]
    again = {m.settings["way"]: m for m in run(model) if m.settings["part"] == "step"}
    for way, m in again.items():
        assert (m.counts["operations"], m.counts["python_calls"]) == (operations[way], calls[way])


def test_bytes_are_those_of_the_shape(runs, steps, model):
    config, cached = model.config, cached_tokens(16, 2)
    d, size, heads, kv_heads = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
    layer = d * size * (2 * heads + 2 * kv_heads) + 3 * d * config.intermediate_size + 2 * d
    head_and_row = d * config.vocab_size + d + d  # with the last norm, and one row of the embedding
    weights = 4 * (config.num_layers * layer + head_and_row)
    kv = (
        4 * 2 * config.num_layers * kv_heads * size * (cached + 1 + 1)
    )  # the new token's are written, then read with all
    counted = decode_costs(config, batch=1, context=cached, weight_bytes_per_element=4, arrangement="kernels")
    assert counted.bytes_by_part["weights"] == weights and counted.bytes_by_part["kv"] == kv
    assert {m.counts["weight_bytes"] for m in steps.values()} == {weights}
    [ceiling] = [m for m in runs[NAME] if m.settings["part"] == "ceiling"]
    assert ceiling.counts["bytes"] == weights + kv


# -- what is left out, and what is refused ------------------------------------------------------------------------


def left_out(made: list[Measurement]) -> dict[str, str]:
    [ceiling] = [m for m in made if m.settings["part"] == "ceiling"]
    kept = {m.settings["way"] for m in made if m.settings["part"] == "step"}
    assert kept | set(ceiling.settings["left_out"]) == set(WAYS) and not kept & set(ceiling.settings["left_out"])
    return ceiling.settings["left_out"]


def test_what_cannot_be_had_is_left_out_with_the_reason(model, monkeypatch):
    without_transformers(monkeypatch)
    monkeypatch.setenv("WORKBENCH_NO_COMPILER", "1")
    monkeypatch.setattr(ways, "why_not_packed", lambda dtype, device: "this build of torch comes without oneDNN")
    for why_not in ("why_not_loops", "why_not_native"):  # they may be loaded in this process
        monkeypatch.setattr(ways, why_not, lambda decoder: why_no_compiler())
    assert left_out(run(model)) == {
        THEIRS: "transformers is not installed (pip install transformers)",
        PACKED: "this build of torch comes without oneDNN",
        LOOPED: "WORKBENCH_NO_COMPILER is set",
        ONE_CALL: "WORKBENCH_NO_COMPILER is set",
        NATIVE: "WORKBENCH_NO_COMPILER is set",
    }
    monkeypatch.setenv("WORKBENCH_BRIEF", "1")
    assert left_out(run(model))[ONE_CALL] == "brief mode: compiling takes half a minute"


def test_a_step_that_could_not_be_compiled_is_left_out_with_what_the_compiler_said(model, monkeypatch):
    without_transformers(monkeypatch)
    monkeypatch.setattr(ways, "why_not_one_call", lambda decoder: "")
    honest = stand_in
    failed = lambda bench, decoder: Way(ONE_CALL, honest(bench, decoder).begin, torch.float32, str, lambda: "error: x")  # noqa: E731
    monkeypatch.setattr(ways, "_one_call", failed)
    assert left_out(run(model))[ONE_CALL] == "error: x"


@pytest.mark.parametrize("wrong", [DECODER, PACKED])
def test_a_wrong_token_is_refused_by_the_name_of_its_way(model, wrong, monkeypatch, quick):
    honest = ways._ours

    def planted(name, one):
        way = honest(name, one)
        if name != wrong:
            return way

        def begin(prompt, count):
            for index, token in enumerate(way.begin(prompt, count)):
                yield (token + 1) % one.config.vocab_size if index == count - 1 else token

        return Way(name, begin, way.kept)

    monkeypatch.setattr(ways, "_ours", planted)
    with pytest.raises(WorkbenchError, match=f"{wrong}: an engine's tokens are not greedy"):
        run(model)


def test_the_tokens_of_every_way_are_those_of_the_decoder(steps):
    for m in steps.values():
        assert m.check.startswith("the tokens of our Decoder; ") and f"of {new_tokens(2)} tokens are" in m.check
    assert steps[ONE_CALL].check.endswith("a step is one call, loaded")


def test_a_gpu_and_a_text_beyond_the_context_are_refused_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr(decode_waterfall, "loaded", lambda *a: pytest.fail("a model was loaded"))
    bench = OurClock()
    bench.device = "cuda"
    with pytest.raises(WorkbenchError, match="are those of a CPU"):
        run("stdlib-1m", bench)
    with pytest.raises(WorkbenchError, match="tokens of context and the model reads at most 1,024"):
        run("stdlib-1m", context=1024)


def test_a_profiler_at_work_is_said():
    sys.setprofile(lambda *a: None)
    try:
        with pytest.raises(WorkbenchError, match="one is at work already"):
            python_calls_of(partial(max, 1, 2))
    finally:
        sys.setprofile(None)


def test_16_bits_keep_their_cache_as_each_way_does(monkeypatch, quick):
    """Ours keeps float32 on a CPU, transformers what the weights are."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: "found")
    monkeypatch.setattr(ways, "_theirs", lambda decoder: Way(THEIRS, stand_in(None, decoder).begin, torch.bfloat16))
    made = run(random_decoder(tiny_config()), Bench(), weights="bfloat16")
    steps = {m.settings["way"]: m for m in made if m.settings["part"] == "step"}
    assert steps[DECODER].counts["kv_bytes"] == 2 * steps[THEIRS].counts["kv_bytes"]
    assert len({m.counts["weight_bytes"] for m in steps.values()}) == 1


# -- in words ----------------------------------------------------------------------------------------------------


def words(made: list[Measurement], model) -> str:
    panel = shown("decode_waterfall", model=model, **SMALL[NAME])
    panel.measurements = made
    return panel.view(panel.settings).words


def test_a_bar_that_goes_up_is_said_to_and_one_that_goes_down_is_not(runs, model):
    said = words(runs[NAME], model)
    assert "Packed weights is slower here than what stands before it, by 732 µs" in said
    assert "its bar first takes back the 732 µs of the packed ones" in said
    assert "Prepared is slower" not in said and "The largest cause is general code, 2.93 ms." in said
    assert "Counted in a step: " in said and "Left out" not in said


def test_a_bar_that_rounds_do_not_agree_on_is_no_cause(runs, model):
    """The largest fall, in one of two rounds only."""
    noisy = [
        dataclasses.replace(m, samples=[-27 * TICK, 27 * TICK]) if m.settings.get("to") == DECODER else m
        for m in runs[NAME]
    ]
    said = words(noisy, model)
    assert "Within what rounds differ by: general code." in said
    assert "The largest cause is small operations, 2.93 ms." in said
    every = [dataclasses.replace(m, samples=[-1.0, 1.0]) if "to" in m.settings else m for m in runs[NAME]]
    assert "No bar falls by more than rounds differ." in words(every, model)


def test_a_step_below_the_ceiling_is_said_to_come_from_a_cache(runs, model):
    slow = [dataclasses.replace(m, samples=[1.0]) if m.settings["part"] == "ceiling" else m for m in runs[NAME]]
    assert "below the ceiling: some of its bytes came from a cache" in words(slow, model)
    assert "Left unexplained: " in words(runs[NAME], model)


@pytest.mark.parametrize(
    ("read_s", "said"),
    [
        (1.0, "1 × the ceiling: about as fast"),
        (2.0, "2 × the ceiling: slower than when"),
        (0.5, "0.5 × the ceiling: faster than memory"),
    ],
)
def test_a_plain_read_in_the_same_rounds_says_whether_the_ceiling_holds_now(runs, model, read_s, said):
    own = {"ceiling": 1.0, "read": read_s}
    made = [
        dataclasses.replace(m, samples=[own[m.settings["part"]]]) if m.settings["part"] in own else m
        for m in runs[NAME]
    ]
    assert said in words(made, model)
    [read] = [m for m in runs[NAME] if m.settings["part"] == "read"]
    assert read.samples == [READ_TICKS * TICK] * 2


def test_reasons_are_under_the_picture_and_each_cause_has_a_colour_and_a_meaning(model, monkeypatch, quick):
    assert "Left out: transformers, because transformers is not installed" in words(run(model), model)
    causes = [*decode_waterfall.CAUSES.values(), LEFT]
    assert list(panel_module.COLOURS) == list(panel_module.MEANS) == causes
    assert len(set(panel_module.COLOURS.values())) == len(causes)


def test_what_was_recorded_stands_in_the_table(runs, model):
    panel = shown("decode_waterfall", model=model, **SMALL[NAME])
    panel.measurements, panel.record = runs[NAME], elsewhere(runs[NAME])
    view = panel.view(panel.settings)
    column = view.header.index("recorded")
    assert list(itertools.islice((row[column] for row in view.rows), 2)) == ["9.89 ms", "6.96 ms"]
