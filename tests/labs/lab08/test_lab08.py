"""Lab 08: the scheduler is shown as it decides, the engine's plans and texts are held to it, and the timelines are
those that the lengths say."""

from __future__ import annotations

import dataclasses
import random
import re

import numpy as np
import pytest
from conftest import random_decoder, tiny_config
from experiment_claims import DataSheetBench, ExperimentClaims, brief_runs
from panel_claims import PanelClaims, shown

from workbench import panels
from workbench.errors import WorkbenchError
from workbench.experiments import experiment, run_experiment
from workbench.instruments.bench import Bench
from workbench.instruments.device import PUBLISHED
from workbench.instruments.records import Measurement
from workbench.instruments.timing import Stopped
from workbench.labs.lab08_continuous_batching import load_curve as loading
from workbench.labs.lab08_continuous_batching import scheduler_steps as stepping
from workbench.labs.lab08_continuous_batching import timelines
from workbench.labs.lab08_continuous_batching.inputs import TAILS, ragged, requests_for
from workbench.labs.lab08_continuous_batching.panels import scheduler_steps as stepping_panel
from workbench.models.checkpoints import shipped_tokenizer
from workbench.panels.base import Panel
from workbench.serving.bounds import greedy_steps, static_batches
from workbench.serving.metrics import LoadPoint, Objectives, goodput, summarize
from workbench.serving.policies import POLICIES
from workbench.serving.times import RequestTimes

SMALL = {
    "serving.timelines": {
        "requests": 7,
        "slots": 3,
        "longest_output": 9,
        "tail": "uniform",
        "longest_prompt": 8,
        "repeats": 1,
    },
    "serving.scheduler_steps": {"requests": 5, "blocks": 12, "slots": 3},
    "serving.load_curve": {"load": "ragged", "requests": 12, "max_running": 4, "token_budget": 512},
}
PANELS = {"timelines": "serving.timelines", "scheduler_steps": "serving.scheduler_steps"}


MOVED = {
    "timelines": {"shown_step": 4},
    "scheduler_steps": {"shown_step": 9},
    "load_curve": {"ttft_limit": 10.0, "tpot_limit": 0.5},
}
OTHERWISE = {  # settings that are answered by what follows from lengths
    "timelines": [{"tail": "heavy tail", "longest_output": 64}, {"slots": 1}, {"requests": 2}],
    "scheduler_steps": [{"blocks": 40, "slots": 8}, {"batching": "static"}, {"gap": 6.0, "blocks": 60}],
}
KNOBS = {k: v for k, v in SMALL["serving.timelines"].items() if k not in ("slots", "repeats")} | {"seed": 0}
STEPS = {
    s.name: s.default for s in experiment("serving.scheduler_steps").settings if s.name not in ("model", "shown_step")
}


@pytest.fixture(scope="module")
def model():
    return random_decoder(tiny_config(), tokenizer=shipped_tokenizer(), name="tiny")


@pytest.fixture(scope="module")
def runs(model):
    return brief_runs(SMALL, model)


def run(name: str, model, bench=None, **given) -> list[Measurement]:
    return run_experiment(name, {"model": model, **SMALL[name], **given}, bench or DataSheetBench())


@pytest.fixture
def make(model):
    def made(name: str, **given) -> Panel:
        return shown(name, **{"model": model, **SMALL[PANELS[name]], **given})

    return made


class TestExperiments(ExperimentClaims):
    lab, small = 8, SMALL


class TestPanels(PanelClaims):
    small, moved = SMALL, MOVED


# -- all of them -------------------------------------------------------------------------------------------------


# -- lengths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", TAILS)
def test_lengths_are_seeded_and_within_what_was_asked_for(tail):
    given = {"longest_prompt": 40, "longest_output": 96, "tail": tail}
    asked = ragged(200, **given, seed=3)
    assert asked == ragged(200, **given, seed=3) != ragged(200, **given, seed=4)
    outputs = sorted(a.new_tokens for a in asked)
    assert outputs[0] >= 3 and 60 < outputs[-1] <= 96 and all(10 <= a.prompt_tokens <= 40 for a in asked)
    mean, median = sum(outputs) / 200, outputs[100]
    assert mean > 1.5 * median if tail == TAILS[0] else 0.9 < mean / median < 1.1


def test_prompts_of_requests_differ_and_have_their_lengths(model):
    asked = ragged(12, longest_prompt=30, longest_output=4, tail="uniform", seed=0)
    prompts = [request.prompt_ids for request in requests_for(asked, model, seed=1)]
    assert [len(one) for one in prompts] == [a.prompt_tokens for a in asked]
    assert len({one[:7] for one in prompts}) == 12


# -- serving.timelines -----------------------------------------------------------------------------------------------


def test_steps_rows_and_padding_are_those_of_the_lengths(runs):
    asked = ragged(**KNOBS)
    static, continuous, ratio = runs["serving.timelines"]
    expected = static_batches(asked, 3)
    useful = sum(a.prompt_tokens + a.new_tokens - 1 for a in asked)
    assert (static.counts["steps"], static.counts["rows"]) == (expected.steps, expected.rows)
    assert static.counts["padding_rows"] == expected.rows - useful > 0
    assert (continuous.counts["steps"], continuous.counts["rows"]) == (greedy_steps(asked, 3), useful)
    assert continuous.counts["padding_rows"] == 0
    assert ratio.predicted == expected.steps / greedy_steps(asked, 3) > 1
    assert ratio.samples == [static.samples[0] / continuous.samples[0]]
    for m in (static, continuous):
        assert m.counts["tokens"] == sum(a.new_tokens for a in asked)
        assert m.counts["tokens_per_s"] == pytest.approx(m.counts["tokens"] / m.median, rel=0.05)
        assert 0 < m.counts["ttft_mean_s"] <= m.counts["latency_mean_s"] <= m.median
        assert "7 of 7 texts compared with the request alone" in m.check


@pytest.mark.parametrize("how", timelines.BATCHING)
@pytest.mark.parametrize("slots", [1, 3, 9])
def test_a_timeline_has_every_request_once_in_one_slot_and_a_slot_one_request_at_a_time(how, slots):
    asked = ragged(**KNOBS)
    expected = timelines.expected(asked, how, slots)
    places: dict[int, set[int]] = {}
    steps = np.zeros((slots, expected.steps))
    for slot, request, _, begin, end in expected.segments:
        places.setdefault(request, set()).add(slot)
        for step in range(int(begin), int(np.ceil(end))):
            steps[slot, step] += min(end, step + 1) - max(begin, step)
    assert sorted(places) == list(range(len(asked))) and all(len(one) == 1 for one in places.values())
    assert steps.max() <= 1 + 1e-9
    decoded = sum(end - begin for *_, kind, begin, end in expected.segments if kind == "decode")
    assert decoded == sum(a.new_tokens - 1 for a in asked)
    if how == "continuous":
        assert steps.sum() == sum(a.new_tokens for a in asked)  # a step for each token, nothing else
    else:
        group = [asked[i : i + slots] for i in range(0, len(asked), slots)]
        assert steps.sum() == pytest.approx(sum(len(g) * max(a.new_tokens for a in g) for g in group))
        for request, one in enumerate(asked):
            longest = max(a.prompt_tokens for a in group[request // slots])
            [read] = [e - b for _, r, kind, b, e in expected.segments if r == request and kind == "prompt"]
            assert read == pytest.approx(one.prompt_tokens / longest)  # the rest of the step is padding


def test_static_groups_are_those_of_the_order_of_arrival():
    asked = ragged(**KNOBS)
    begins = {}
    for _, request, _, begin, _ in timelines.expected(asked, "static", 3).segments:
        begins.setdefault(request, begin)
    assert [begins[i] for i in range(7)] == sorted(begins.values()) and len(set(begins.values())) == 3


def test_seconds_are_predicted_step_by_step():
    given = {name: value for name, value in SMALL["serving.timelines"].items() if name != "repeats"} | {"seed": 0}
    ceilings = PUBLISHED["h100-sxm"]
    (_, static, _), (_, continuous, _) = timelines.predict_timelines(ceilings, model="stdlib-1m", **given)
    assert 0 < continuous < static
    ratio = static / continuous  # each step is a few launches: it takes as long whatever is in it
    asked = ragged(**KNOBS)
    assert ratio == pytest.approx(static_batches(asked, 3).steps / greedy_steps(asked, 3), rel=0.15)


def test_other_tokens_than_alone_are_not_timed(model, monkeypatch):
    honest = timelines._alone

    def wrong(decoder, request):
        made = honest(decoder, request)
        return [*made[:-1], made[-1] ^ 1]

    monkeypatch.setattr(timelines, "_alone", wrong)
    with pytest.raises(WorkbenchError, match="the output is wrong"):
        run("serving.timelines", model)


SPOILED = {"the output is wrong": lambda ids: (ids[0] ^ 1, *ids[1:]), "tokens of": lambda ids: ids[:-1]}


@pytest.mark.parametrize("message", SPOILED)
@pytest.mark.parametrize("how", timelines.BATCHING)
def test_a_batching_that_writes_something_else_is_not_timed(model, monkeypatch, how, message):
    served = timelines._serve

    def spoiled(bench, model, given, asked, batching, *rest):
        made = served(bench, model, given, asked, batching, *rest)
        first = made.results[0]
        altered = dataclasses.replace(first, token_ids=SPOILED[message](first.token_ids))
        return made if batching != how else dataclasses.replace(made, results=[altered, *made.results[1:]])

    monkeypatch.setattr(timelines, "_serve", spoiled)
    with pytest.raises(WorkbenchError, match=message):
        run("serving.timelines", model)


def test_a_run_of_other_steps_is_thrown_away(model, monkeypatch):
    honest = timelines.settings_for
    timelines.frames_of.cache_clear()
    asked = tuple(ragged(**KNOBS))
    for how in timelines.BATCHING:
        timelines.frames_of(asked, how, 3)  # known before the engine gets another budget
    others = {"static": {}, "continuous": {"chunk": 5}}
    monkeypatch.setattr(
        timelines, "settings_for", lambda how, *given: dataclasses.replace(honest(how, *given), **others[how])
    )
    with pytest.raises(WorkbenchError, match="continuous batching took other steps"):
        run("serving.timelines", model)
    timelines.frames_of.cache_clear()


# -- serving.steps ---------------------------------------------------------------------------------------------------


def test_what_is_shown_keeps_every_limit_and_says_truly_who_is_held_back():
    """Sixty settings at random: budget, slots, pool, and everyone gets all tokens."""
    draw = random.Random(5)
    reasons = set()
    for _ in range(60):
        given = {
            "requests": draw.randint(1, 12),
            "gap": draw.choice([0.0, 1.5, 4.0]),
            "seed": draw.randint(0, 99),
            "policy": draw.choice(list(POLICIES)),
            "aging": draw.choice([0, 3]),
            "batching": draw.choice(["continuous", "continuous", "static"]),
            "preemption": draw.choice(["recompute", "swap"]),
            "slots": draw.randint(1, 8),
            "token_budget": draw.randint(8, 40),
            "chunk": draw.choice([0, 3, 8]),
            "blocks": draw.randint(10, 40),
            "watermark": draw.choice([0.0, 0.2]),
        }
        frames = stepping.frames_for(**given)
        asked = stepping.workload(given["requests"], given["gap"], given["seed"])
        written = [request for frame in frames for request in frame.written]
        assert [written.count(r) for r in range(len(asked))] == [a.new_tokens for a in asked]
        assert sorted(r for frame in frames for r in frame.finished) == list(range(len(asked)))
        # there the group goes in the step after
        assert frames[-1].used_after == 0 or given["batching"] == "static"
        for frame in frames:
            texts = {r for r, *_ in frame.work} | {r for r, _ in frame.padding}
            assert len(texts) <= given["slots"] and sum(frame.blocks.values()) <= given["blocks"]
            if given["batching"] == "continuous":
                assert frame.rows <= given["token_budget"] and not frame.padding
            assert bool(frame.held_back) == bool(frame.waiting or frame.swapped)
            if "needs" in frame.held_back:
                needs, left, spared = map(
                    int, re.search(r"needs (\d+) blocks?, (\d+) left(?:, (\d+))?", frame.held_back).groups("0")
                )
                assert needs > left - spared
            reasons |= {key for key in stepping_panel.HELD_BACK if key in frame.held_back}
    assert reasons == set(stepping_panel.HELD_BACK)


TRIED = {
    "computed again": {"blocks": 11},
    "moved to the host": {"blocks": 11, "preemption": "swap"},
    "static": {"batching": "static", "gap": 0.0},
    "chunks, aged": {"policy": "shortest_remaining", "aging": 3, "chunk": 3, "watermark": 0.2},
    "deadlines": {"policy": "deadline", "token_budget": 5},
}


@pytest.mark.parametrize("tried", TRIED)
def test_the_engine_plans_what_is_shown_and_writes_what_each_request_writes_alone(model, tried):
    given = {**STEPS, "requests": 6, **TRIED[tried]}
    [m] = run_experiment("serving.scheduler_steps", {"model": model, **given}, DataSheetBench())
    frames = stepping.frames_for(**given)
    assert m.samples == [float(frame.rows + frame.padding_rows) for frame in frames]
    assert f"in each of {len(frames)} steps; each of 6 texts is that of its request alone" in m.check
    if tried in ("computed again", "moved to the host"):
        assert m.counts["preemptions"] > 0
    assert (m.counts["recomputed_rows"] > 0) == (m.counts["preemptions"] > 0 and given["preemption"] == "recompute")
    assert (m.counts["padding_rows"] > 0) == (tried == "static")


def test_a_plan_that_is_not_the_one_shown_is_refused(model, monkeypatch):
    other = stepping.frames_for(**{**STEPS, **SMALL["serving.scheduler_steps"], "policy": "deadline", "chunk": 4})
    monkeypatch.setattr(stepping, "frames_for", lambda **settings: other)
    with pytest.raises(WorkbenchError, match="is not that of the scheduler alone"):
        run("serving.scheduler_steps", model)


def test_a_grid_of_states_tells_what_each_request_did():
    given = {**STEPS, "blocks": 12}
    frames = stepping.frames_for(**given)
    asked = stepping.workload(given["requests"], given["gap"], given["seed"])
    states = stepping_panel.states_of(frames, asked)
    count = {name: int((states == at).sum()) for at, name in enumerate(stepping_panel.STATES)}
    assert count["padding"] == count["on the host"] == 0 < count["computed again"]
    waits = sum(len(frame.waiting) for frame in frames)
    assert count["waits"] == waits
    worked = sum(len(frame.work) for frame in frames)
    assert worked == count["prompt"] + count["decode"] + count["computed again"]
    for request, one in enumerate(asked):
        here = np.flatnonzero(states[request])
        assert frames[here[0]].at == one.at_s and (np.diff(here) == 1).all()  # from its arrival …
        assert request in frames[here[-1]].finished  # … to its end


# -- the panels ------------------------------------------------------------------------------------------------------


def _right_ends(panel: Panel, axes: int) -> list[float]:
    drawn = panel.view(panel.settings).figure.axes[axes]
    return [bar.get_x() + bar.get_width() for bars in drawn.containers for bar in bars]


@pytest.mark.parametrize("name", PANELS)
def test_other_settings_are_answered_without_a_model(make, name, monkeypatch):
    panel = make(name)
    monkeypatch.setattr(Bench, "model", lambda *a, **k: pytest.fail("a model was loaded for a drawing"))
    for settings in OTHERWISE[name]:
        before = panel.snapshot().data
        panel.configure(**settings)
        assert panel.wait(30) and panel.snapshot().data != before and "error" not in panel.status.value


def test_play_uncovers_both_timelines_by_time(make, runs):
    """By step the faster one, whose steps are shorter, looked behind: at step 5 its picture ended earlier."""
    panel = make("timelines")
    slow, fast = [0.1 * step for step in range(1, 21)], [0.02 * step for step in range(1, 11)]
    static, continuous, ratio = runs["serving.timelines"]
    panel.measurements = [
        dataclasses.replace(m, settings={**m.settings, "ends_s": ends, "segments": [[0, 0, "decode", 0, len(ends)]]})
        for m, ends in ((static, slow), (continuous, fast))
    ] + [ratio]
    for step in (0, 1, 2, 5, 1000):
        panel.configure(shown_step=step)
        now = slow[min(step, 20) - 1] if step else 0.0
        shown = [max(_right_ends(panel, axes)) for axes in (0, 1)]
        assert shown == pytest.approx([now, min(now, fast[-1])])
    panel.configure(shown_step=1)
    assert "step 1 of static and step 5 of continuous" in panel.view(panel.settings).alt
    panel.configure(shown_step=2)
    titles = [axes.get_title(loc="left") for axes in panel.view(panel.settings).figure.axes[:2]]
    assert "step 2 of 20" in titles[0] and "all 10 steps" in titles[1], "the faster one is seen to be done"


def test_the_table_of_the_timelines_has_the_numbers_of_the_run(make, runs):
    panel = make("timelines")
    panel.measurements = runs["serving.timelines"]
    for row, m in zip(panel.view(panel.settings).rows, runs["serving.timelines"]):
        assert row[:3] == [m.settings["measured"], f"{m.counts['steps']:.0f}", f"{m.counts['rows']:,.0f}"]
        assert row[3] == f"{m.counts['padding_rows'] / m.counts['rows']:.0%}"
        # there a padded prompt is part of a step
        assert row[4] == f"{m.counts['busy_share']:.0%}" or row[0] == "static"
        assert row[7] == f"{m.counts['tokens_per_s']:,.0f}"
    ratio = runs["serving.timelines"][2]
    assert f"{ratio.median:.2f} times as fast" in panel.view(panel.settings).words
    panel.configure(seed=5)  # what was measured is of other lengths: it is not shown
    assert panel.wait(30) and "no model was run" in panel.view(panel.settings).caption


def test_words_say_where_nothing_can_be_gained(make):
    assert "a slot for everyone" in make("timelines", requests=3).said
    assert "no more slots would make it faster" in make("timelines", slots=6).said
    assert "no model" in make("timelines", slots=6).table.value


def test_a_record_is_drawn_hollow_and_named(make, runs):
    elsewhere = [
        Measurement.from_dict({**m.to_dict(), "device": {"name": "A far machine"}, "date": "2030-01-02T00:00:00"})
        for m in runs["serving.timelines"]
    ]
    panel = make("timelines", record=elsewhere)
    panel.measurements = runs["serving.timelines"]
    hollow = [line for line in panel.view(panel.settings).figure.axes[2].lines if line.get_marker() == "o"]
    assert sorted(line.get_xdata()[0] for line in hollow) == sorted(m.median for m in elsewhere[:2])
    assert "recorded on A far machine, 2030-01-02" in panel.said


def test_what_is_refused_is_said_in_the_status_line_and_the_next_setting_is_drawn(make):
    panel = make("scheduler_steps")
    panel.configure(token_budget=2, slots=4)
    assert panel.wait(30) and "error" in panel.status.value and "less than a token for each" in panel.status.value
    panel.configure(token_budget=16)
    assert panel.wait(30) and "error" not in panel.status.value


def test_the_stepper_tells_every_request_at_the_step_shown(make):
    panel = make("scheduler_steps", requests=8, blocks=20, slots=4)
    frames = stepping.frames_for(**{**STEPS})
    assert STEPS["requests"] == 8 and STEPS["blocks"] == 20 and STEPS["slots"] == 4
    gone = next(x for x, frame in enumerate(frames) if frame.preempted)
    panel.configure(shown_step=gone)
    assert panel.wait(30)
    view = panel.view(panel.settings)
    [victim] = frames[gone].preempted
    row = view.rows[victim]
    assert row[0] == f"{victim}" and row[6:8] == ["waits", "is preempted"]
    assert f"request {victim}: no block was left" in panel.said.lower()
    held = sum(int(r[9]) for r in view.rows if r[9] != "–")
    assert held == sum(frames[gone].blocks.values()) and f"{held} of 20 blocks held" in view.caption


# -- serving.load ------------------------------------------------------------------------------------------------------

LOAD = {"load": "ragged", "requests": 80, "max_running": 8, "token_budget": 512, "shape": "llama-3.2-1b"}


@pytest.fixture(scope="module")
def curve():
    return run_experiment("serving.load_curve", LOAD, Bench())


def test_a_load_curve_has_both_batchings_at_the_same_rates_and_littles_law_at_each(curve):
    rates = {}
    for m in curve:
        rates.setdefault(m.settings["batching"], []).append(m.settings["rate_per_s"])
        assert {len(m.settings[name]) for name in ("arrival_s", "ttft_s", "tpot_s")} == {len(m.samples)} == {80}
        assert m.counts["in_system"] == pytest.approx(m.counts["requests_per_s"] * np.mean(m.samples))
        assert all(ttft <= latency for ttft, latency in zip(m.settings["ttft_s"], m.samples))
        assert Measurement.from_dict(m.to_dict()).to_dict() == m.to_dict() and "Little's law holds" in m.check
    assert rates["static"] == rates["continuous"] == sorted(rates["static"]) and len(rates["static"]) == len(
        loading.SHARES
    )


def test_beyond_what_it_can_do_latency_grows_and_static_batching_does_less(curve):
    found = {how: [m for m in curve if m.settings["batching"] == how] for how in loading.KINDS}
    for made in found.values():
        assert made[-1].counts["latency_mean_s"] > 1.5 * made[0].counts["latency_mean_s"]
    done = {how: max(m.counts["done_per_s"] for m in made) for how, made in found.items()}
    assert done["continuous"] > 1.2 * done["static"]
    assert all(m.counts["padding_share"] == 0 for m in found["continuous"])
    assert found["static"][-1].counts["padding_share"] > 0.2


def test_a_window_counts_what_came_and_was_done_in_the_later_three_quarters_of_the_arrivals():
    times = [RequestTimes(float(a), a + 1.5, float(a), a + 1.0, new_tokens=1) for a in range(1, 9)]
    assert loading.in_window(times) == (pytest.approx(6 / 6), pytest.approx(6 / 6))
    slow = [RequestTimes(float(a), 100.0 + a, float(a), a + 1.0, new_tokens=1) for a in range(1, 9)]
    assert loading.in_window(slow) == (pytest.approx(1.0), 0.0)


def test_a_request_that_is_lost_is_seen(monkeypatch):
    honest = loading._serve
    monkeypatch.setattr(loading, "_serve", lambda *a: (lambda found, steps: (found[:-1], steps))(*honest(*a)))
    with pytest.raises(WorkbenchError, match="79 of 80 requests were completed"):
        run_experiment("serving.load_curve", LOAD, Bench())


def test_a_simulation_that_is_told_to_stop_stops():
    bench = Bench()
    bench.stop.set()
    with pytest.raises(Stopped):
        run_experiment("serving.load_curve", LOAD, bench)


def test_a_request_without_a_token_has_no_time_to_first_token_and_is_not_in_time(curve):
    panel = panels.load_curve(**LOAD, ttft_limit=10.0, tpot_limit=0.5)
    ttft = [None] * 20 + curve[0].settings["ttft_s"][20:]
    panel.measurements = [dataclasses.replace(m, settings={**m.settings, "ttft_s": ttft}) for m in curve[:2]]
    for row, m in zip(panel.view(panel.settings).rows, panel.measurements):
        begin, end = loading.window_of(m.settings["arrival_s"])
        came = [first for at, first in zip(m.settings["arrival_s"], ttft) if begin < at <= end]
        assert row[-1] == f"{1 - came.count(None) / len(came):.0%}" != "100%"


def test_a_value_that_is_not_there_is_not_recorded_and_is_a_dash_in_the_table(curve):
    """Nothing done in the window, and no second token: no throughput, no TPOT, and nowhere 0."""
    late = [RequestTimes(float(at), 100.0, 99.0, 100.0, new_tokens=1) for at in range(8)]
    steps = [loading.StepTimes(at_s=99.0, duration_s=1.0, rows=8, running=8)]
    counts = loading._counts(late, loading.summarize(late), steps)
    assert not {"done_per_s", "tpot_p90_s"} & set(counts) and counts["came_per_s"] > 0
    trace = {"arrival_s": list(range(8)), "ttft_s": [1.0] * 8, "tpot_s": [None] * 8}
    silent = dataclasses.replace(curve[0], settings={**curve[0].settings, **trace}, counts=counts)
    panel = panels.load_curve(**LOAD)
    panel.measurements = [silent]
    view = panel.view(panel.settings)
    row = dict(zip(view.header, view.rows[0]))
    assert row["done/s"] == row["TPOT p90"] == row["in time"] == "–" and "no request was done" in view.words
    panel.measurements = [silent, *curve[1:]]
    assert "the knee is at" in panel.view(panel.settings).words


def test_one_token_keeps_the_limit_of_later_tokens(curve):
    """As it does in `Objectives.met`."""
    one = dataclasses.replace(curve[0], settings={**curve[0].settings, "tpot_s": [None] * 80})
    assert loading.load_point(one, ttft_limit=10.0, tpot_limit=0.005).attainment == 1.0


@pytest.mark.parametrize("seed", range(20))
def test_goodput_never_exceeds_the_throughput_of_the_same_window(seed):
    """Of random traces: in a run, and along a curve of rates, however loose the limits."""
    rng = random.Random(seed)
    limits = Objectives(ttft_s=rng.choice((0.01, 1.0, 1e6)), tpot_s=rng.choice((0.001, 0.1, 1e6)))
    points = []
    for rate in sorted(rng.uniform(0.1, 50.0) for _ in range(6)):
        at, free, served = 0.0, 0.0, []
        for _ in range(rng.randint(2, 40)):
            at += rng.expovariate(rate)
            begun = max(at, free)
            free = begun + rng.expovariate(8.0)
            many = rng.randint(1, 5)
            first = free if many == 1 else begun + 0.1 * (free - begun)
            served.append(RequestTimes(at, free, begun, first, new_tokens=many))
        whole = summarize(served, limits)
        assert whole.good_requests_per_s <= whole.requests_per_s
        if done := loading.in_window(served)[1]:
            points.append(LoadPoint(rate, done, whole.latency_s.mean, whole.attainment))
    if points:
        for share in (0.0, 0.5, 0.9):
            assert goodput(points, share) <= max(p.throughput_per_s for p in points)


def test_goodput_in_the_words_never_exceeds_the_peak(curve):
    panel = panels.load_curve(**LOAD, ttft_limit=10.0, tpot_limit=0.5)
    panel.measurements = curve
    words = panel.view(panel.settings).words
    good = re.findall(r"in time: up to ([\d.,]+) a second", words)
    most = re.search(r"At most ([\d.,]+) requests a second against ([\d.,]+)", words).groups()
    good, most = ([float(text.replace(",", "")) for text in each] for each in (good, most))
    assert len(good) == 2 and all(a <= b for a, b in zip(good, most))
    assert "nobody can be late there" in words


def test_the_curve_rings_its_knee_and_limits_are_set_without_another_run(curve, monkeypatch):
    panel = panels.load_curve(**LOAD)
    assert panel.wait(30) and "Nothing measured yet" in panel.snapshot().alt
    panel.measurements = curve
    monkeypatch.setattr(loading, "_serve", lambda *a: pytest.fail("a drawing simulates"))
    ttft = sorted(t for m in curve for t in m.settings["ttft_s"])
    shares = []
    for limit in (10.0, max(0.05, ttft[len(ttft) // 2])):
        panel.configure(ttft_limit=limit, tpot_limit=0.5)
        assert panel.wait(30) and "error" not in panel.status.value
        view = panel.view(panel.settings)
        assert len(view.rows) == len(curve) and all(len(row) == len(view.header) for row in view.rows)
        shares.append([row[-1] for row in view.rows])
    assert set(shares[0]) == {"100%"}
    in_order = [m for how in loading.KINDS for m in curve if m.settings["batching"] == how]
    for share, m in zip(shares[1], in_order):
        begin, end = loading.window_of(m.settings["arrival_s"])
        came = [t for at, t in zip(m.settings["arrival_s"], m.settings["ttft_s"]) if begin < at <= end]
        assert share == f"{sum(t <= limit for t in came) / len(came):.0%}"
    ringed = [line for line in panel.view(panel.settings).figure.axes[0].lines if line.get_markersize() == 15]
    best = [
        max(
            (m for m in curve if m.settings["batching"] == how),
            key=lambda m: m.counts["done_per_s"] / m.counts["latency_mean_s"],
        )
        for how in loading.KINDS
    ]
    assert [line.get_xdata()[0] for line in ringed] == [m.counts["done_per_s"] for m in best]
    assert len(panel.snapshot().alt) > 60 and "the knee is at" in panel.said
