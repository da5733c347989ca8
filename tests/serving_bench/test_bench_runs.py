"""Claims about runs and their reports, on a server whose times are known and on virtual time: every number is computed
by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from fake_openai import ABORT, FakeServer
from virtual_time import connect_to, run

from workbench.errors import WorkbenchError
from workbench.serving.arrivals import Arrival
from workbench.serving.bench import runner
from workbench.serving.bench.client import Client, Target, body_of
from workbench.serving.bench.export import vllm_json
from workbench.serving.bench.recording import About, Chunk, Planned, Recorder, Recording, Result
from workbench.serving.bench.report import (
    ITL,
    LAG,
    LATENCY_DUE,
    LATENCY_SENT,
    TPOT,
    TTFT_DUE,
    TTFT_SENT,
    WAITED,
    in_words,
    percentile_of,
    report_on,
)
from workbench.serving.bench.schedule import Schedule, closed_loop, open_loop
from workbench.serving.bench.search import Search, Trial, coordinated_omission, highest_rate
from workbench.serving.bench.search import in_words as search_in_words
from workbench.serving.gaps import Constant, Poisson
from workbench.serving.lengths import Uniform
from workbench.serving.load import Workload
from workbench.serving.metrics import Objectives, percentile

FOUR = Workload(Uniform(8, 8), Uniform(4, 4))


@pytest.fixture(autouse=True)
def garbage_is_left(monkeypatch):
    """Time is virtual here; to collect garbage before each run would only take long."""
    monkeypatch.setattr(runner, "_no_collection", contextlib.nullcontext)


async def played(schedule: Schedule, fake: FakeServer, *, stop_at_s: float | None = None, **settings) -> Recording:
    """The recording of a run against a fake server."""
    client = Client(Target("http", "fake", 80), connect=connect_to(fake.handle), **settings)
    about = About("http://fake:80", "fake", "completions", schedule.mode, {"schedule": schedule.words})
    recorder = Recorder(None, about, schedule.planned)
    fields = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}

    def bodies(index: int) -> bytes:
        arrival = schedule.arrivals[index]
        return body_of("fake", [1] * arrival.prompt_tokens, arrival.new_tokens, chat=False, fields=fields)

    stop = asyncio.Event()
    if stop_at_s is not None:
        asyncio.get_running_loop().call_later(stop_at_s, stop.set)
    return await runner.run(schedule, client, recorder, bodies, stop=stop)


def play(schedule, fake=None, **settings) -> Recording:
    return run(played(schedule, fake or FakeServer(), **settings))


def every(rate, count, **settings):
    return open_loop(FOUR, count, gaps=Constant(rate), **settings)


# -- runs --------------------------------------------------------------------------------------------------------


def test_an_open_loop_sends_when_requests_are_due_whatever_became_of_the_others():
    slow = FakeServer(ttft_s=100.0, gap_s=0.0)
    made = play(every(4, 6), slow)
    assert [r.send_s for r in made.results] == [0.25 * n for n in range(1, 7)] and all(r.ok for r in made.results)
    assert [r.chunks[0].at_s for r in made.results] == [100 + 0.25 * n for n in range(1, 7)]


def test_a_closed_loop_sends_when_one_before_has_ended():
    made = play(closed_loop(FOUR, 5, 2), FakeServer(ttft_s=1.0, gap_s=1.0))  # each takes 4 s
    assert [r.send_s for r in made.results] == [0.0, 0.0, 4.0, 4.0, 8.0] and made.ended_s == 12.0
    assert all(r.scheduled_s is None and r.lag_s is None for r in made.results)


def test_one_seed_asks_for_the_same_at_the_same_times():
    fakes = [FakeServer(), FakeServer(), FakeServer()]
    schedules = [open_loop(FOUR, 20, gaps=Poisson(3), seed=seed) for seed in (5, 5, 6)]
    made = [play(schedule, fake) for schedule, fake in zip(schedules, fakes, strict=True)]
    assert made[0] == made[1] != made[2] and fakes[0].asked == fakes[1].asked
    assert fakes[0].starts_s == fakes[1].starts_s != fakes[2].starts_s


def test_a_cap_makes_requests_wait_and_the_wait_is_not_the_clients_lag():
    made = play(every(1, 4, concurrency=1), FakeServer(ttft_s=1.0, gap_s=1 / 3))  # 2 s each, one a second
    assert [round(r.send_s, 6) for r in made.results] == [1.0, 3.0, 5.0, 7.0]
    assert [round(r.waited_s, 6) for r in made.results] == [0.0, 1.0, 2.0, 3.0]
    assert max(r.lag_s for r in made.results) < 1e-5


def test_a_stopped_run_sends_no_more_and_keeps_what_there_is():
    made = play(every(1, 10), FakeServer(ttft_s=0.5, gap_s=0.25), stop_at_s=3.3)  # 1.25 s each
    assert made.interrupted and made.unsent == 7 and made.ended_s == pytest.approx(3.25)
    assert {r.index: r.outcome for r in made.results} == {0: "ok", 1: "cancelled", 2: "cancelled"}


def test_no_failure_of_one_request_ends_the_run():
    fake = FakeServer(script=lambda number, body: [ABORT] if number % 2 else None)
    assert [r.outcome for r in sorted(play(every(4, 6), fake).results, key=lambda r: r.index)] == [
        "ok",
        "connection",
    ] * 3


def test_a_recording_that_cannot_be_written_ends_the_run_at_once(monkeypatch):
    """What a server or a network does is an outcome; a full disk is not."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Recorder, "add", full)
    fake = FakeServer()
    with pytest.raises(OSError, match="No space left"):
        play(every(1, 30), fake)
    assert len(fake.asked) == 1


def test_refusals_are_recorded_with_when_to_come_again():
    made = play(every(8, 8), FakeServer(ttft_s=1.0, gap_s=1.0, max_running=1, max_queued=2))
    refused = [r for r in made.results if r.outcome == "refused"]
    assert len(refused) == 5 and {r.retry_after_s for r in refused} == {2.0} and {r.status for r in refused} == {429}


# -- reports -----------------------------------------------------------------------------------------------------


def test_every_number_of_a_run_is_as_the_server_made_it():
    report = report_on(play(every(4, 40), FakeServer(ttft_s=0.5, gap_s=0.125)), Objectives(0.5, 0.125, 0.875))
    for name, value in ((TTFT_DUE, 0.5), (TTFT_SENT, 0.5), (TPOT, 0.125), (ITL, 0.125), (LATENCY_DUE, 0.875)):
        assert {report.row(name).at(p) for p in (0, 50, 99, 100)} == {value}, name
    assert report.row(LAG).at(100) == 0.0 and report.valid and report.cut == 8 and len(report.requests) == 32
    assert [(one.good, one.of) for one in report.attained] == [(32, 32)] * 4
    assert report.completed_per_s == pytest.approx(4, rel=0.05) and report.tokens_per_s == pytest.approx(16, rel=0.05)
    little = report.little
    assert little.difference == little.explained and float(little.in_system) == pytest.approx(4 * 0.875, rel=0.05)


def test_failed_requests_stay_in_the_denominator_and_are_slower_than_all():
    fake = FakeServer(script=lambda number, body: [ABORT] if number % 4 == 3 else None)
    report = report_on(play(every(4, 20), fake), Objectives(ttft_s=10.0))
    assert (report.attained[0].good, report.attained[0].of, report.completed) == (15, 20, 15)
    row = report.row(TTFT_DUE)
    assert row.at(50) == 0.25 and row.at(80) == math.inf and row.mean == 0.25
    assert "∞" in in_words(report) and "met by" in in_words(report)


def test_what_ctrl_c_cancelled_stays_in_the_denominator_and_what_was_never_sent_does_not():
    report = report_on(play(every(1, 10), FakeServer(ttft_s=0.5, gap_s=0.25), stop_at_s=3.3), Objectives(ttft_s=1.0))
    assert (report.attained[0].good, report.attained[0].of) == (1, 3)
    words = in_words(report)
    assert "interrupted" in words and "7 without a result" in words and "2 cancelled" in words


def late(lag_s, count=30):
    """A recording of a client that was late."""
    planned = tuple(Planned(i, float(i), 4, 1) for i in range(count))
    results = tuple(
        Result(i, "ok", i + lag_s, i + lag_s + 0.5, scheduled_s=float(i), status=200, finish_reason="length",
               chunks=(Chunk(i + lag_s + 0.5, " a", 1),))
        for i in range(count)
    )  # fmt: skip
    return Recording(About("http://fake:80", "fake", "completions", "open"), planned, results, count + 2.0)


def test_a_run_that_measured_a_late_client_is_invalid_and_says_why():
    objectives = Objectives(ttft_s=1.0)
    assert report_on(late(0.046875), objectives).valid
    report = report_on(late(0.0625), objectives)
    assert not report.valid and "p99 of the send lag is 62.50 ms, more than 50.00 ms" in report.reasons[0]
    assert "INVALID: the client was late" in in_words(report)
    assert report_on(late(0.0625), Objectives(latency_s=1.0)).valid and report_on(late(9.0)).valid


def test_a_run_without_an_answer_is_invalid_and_one_without_requests_is_none():
    report = report_on(play(every(4, 3), FakeServer(script=lambda number, body: [ABORT])))
    assert report.reasons == ("no request was answered",)
    with pytest.raises(WorkbenchError, match="nothing to report"):
        report_on(replace(late(0.0), results=()))


def test_a_closed_loop_is_never_called_latency_under_load():
    closed = in_words(report_on(play(closed_loop(FOUR, 30, 3))))
    opened = in_words(report_on(play(every(4, 30))))
    assert "latency under load" in opened and "latency under load" not in closed
    assert (
        "say nothing of waiting times at a rate" in closed and "due" not in closed.split("Little")[0].split("\n\n")[2]
    )


def test_a_short_run_says_which_percentiles_it_cannot_claim():
    words = in_words(report_on(play(every(4, 40))))
    assert "* too few to claim p99 with 99% confidence: 459 are needed." in words
    assert "claim p50" not in words


def test_the_steady_window_is_cut_by_rule():
    report = report_on(late(0.0, 31))  # due at 0 … 30: from 3 up to 27
    assert [r.index for r in report.requests] == list(range(3, 27)) and (report.start_s, report.end_s) == (3.0, 27.0)
    assert report_on(late(0.0, 24)).cut == 0  # 18 would be left


@pytest.mark.parametrize("percent", (0, 37, 50, 90, 99, 100))
def test_percentiles_are_those_of_the_engines_metrics_and_failures_come_last(percent):
    values = [0.5, 3.0, 1.0, 2.0, 8.0]
    assert percentile_of(values, 0, percent) == pytest.approx(float(percentile(values, percent)))
    with_failures = percentile_of(values, 2, percent)
    assert with_failures == pytest.approx(np.percentile([*values, 1e9, 1e9], percent)) or with_failures == math.inf
    assert percentile_of([], 3, percent) == math.inf and percentile_of([], 0, percent) is None


# -- vllm's keys -------------------------------------------------------------------------------------------------


def test_the_export_has_vllms_keys_and_numbers():
    fake = FakeServer(ttft_s=0.5, gap_s=0.125, script=lambda number, body: [ABORT] if number == 1 else None)
    made = json.loads(json.dumps(vllm_json(play(every(2, 4), fake), Objectives(ttft_s=0.5))))
    assert (made["completed"], made["failed"], made["total_input_tokens"], made["total_output_tokens"]) == (
        3,
        1,
        24,
        12,
    )
    assert made["duration"] == 2.375 and made["request_throughput"] == 3 / 2.375 == made["request_goodput"]
    assert made["ttfts"] == [0.5, 0.0, 0.5, 0.5] and made["itls"][0] == [0.125] * 3 and made["itls"][1] == []
    assert (made["mean_ttft_ms"], made["p99_tpot_ms"], made["median_itl_ms"]) == (500.0, 125.0, 125.0)
    assert (
        made["mean_e2el_ms"] == 875.0 and made["max_concurrent_requests"] == 2 and made["errors"][1].startswith("conn")
    )
    assert made["input_lens"] == [8] * 4 and made["output_lens"] == [4, 0, 4, 4] and made["std_ttft_ms"] == 0.0
    assert {"date", "backend", "model_id", "num_prompts", "request_rate", "max_concurrency", "queue_times"} <= set(made)


# -- search ------------------------------------------------------------------------------------------------------


def searched(holds, first=1.0, **settings):
    async def measure(rate):
        return holds(rate)

    return run(highest_rate(measure, first, **settings))


@pytest.mark.parametrize("capacity", (0.3, 1.0, 7.5, 40.0))
def test_a_search_comes_as_close_to_the_capacity_as_wanted(capacity):
    made = searched(lambda rate: Trial(rate, 100 if rate <= capacity else 50, 100))
    assert made.sure and capacity / 1.1 <= made.best.rate_per_s <= capacity
    assert f"Goodput: {made.best.rate_per_s:.4g} requests/s" in search_in_words(made)


def test_a_search_ends_where_it_cannot_go_on_and_says_so():
    nothing = searched(lambda rate: Trial(rate, 0, 10), max_trials=5)
    assert nothing.best is None and not nothing.sure and "No rate that was tried" in search_in_words(nothing)
    everything = searched(lambda rate: Trial(rate, 10, 10), max_trials=5)
    assert everything.best.rate_per_s == 16.0 and not everything.sure and "at least 16" in search_in_words(everything)
    stopped = searched(lambda rate: Trial(rate, 10, 10) if rate < 4 else None)
    assert [t.rate_per_s for t in stopped.trials] == [1.0, 2.0] and stopped.best.rate_per_s == 2.0 and not stopped.sure
    client = searched(lambda rate: Trial(rate, 10, 10, ("the client was late",) if rate > 2 else ()))
    assert client.sure and 2 / 1.1 <= client.best.rate_per_s <= 2
    assert "INVALID: the client was late" in search_in_words(client)
    lucky = Search((Trial(1.0, 10, 10), Trial(4.0, 10, 10), Trial(2.0, 0, 10)), 0.9, False)
    assert lucky.best.rate_per_s == 1.0, "no rate above one that was missed"


def test_the_search_finds_what_the_server_can_serve():
    """One at a time, 0.5 s each: 2 requests/s at most, with TTFT up to 2 s less often than that."""

    async def main():
        async def measure(rate):
            fake = FakeServer(ttft_s=0.125, gap_s=0.125, max_running=1)
            recording = await played(open_loop(FOUR, 60, gaps=Poisson(rate), seed=1), fake)
            return Trial.of_report(rate, report_on(recording, Objectives(ttft_s=2.0)))

        return await highest_rate(measure, 0.5)

    made = run(main())
    assert made.sure and 1.0 < made.best.rate_per_s < 2.5 and made.best.share >= 0.9


# -- coordinated omission ----------------------------------------------------------------------------------------


def test_a_cap_hides_the_queue_from_a_clock_that_starts_with_the_send():
    """Two a second are due, one a second is served: the queue grows by a request a second, and a client with one place
    that starts its clock when the place is free sees 1 s for ever."""
    fake = FakeServer(ttft_s=0.25, gap_s=0.25, max_running=1)
    made = coordinated_omission(play(every(2, 40, concurrency=1), fake).results)
    assert made.from_send.at(99) == pytest.approx(1.0, abs=1e-4)
    assert made.from_due.at(100) == pytest.approx(1 + 39 * 0.5, abs=1e-4) and made.from_due.at(50) > 10
    report = report_on(play(every(2, 40, concurrency=1), replace(fake)))
    assert report.row(TTFT_SENT).at(90) < 0.3 < 10 < report.row(TTFT_DUE).at(90)
    assert report.row(LATENCY_SENT).at(90) == pytest.approx(1.0, abs=1e-4)
    assert report.row(WAITED).at(100) > 10 and report.row(LAG).at(99) < 1e-4, "the cap's wait is not the client's lag"
    with pytest.raises(WorkbenchError, match="open loop with a cap"):
        coordinated_omission(play(closed_loop(FOUR, 4, 1)).results)


# -- prompts -----------------------------------------------------------------------------------------------------


def test_prompts_that_share_a_beginning_share_it_as_ids_and_as_text():
    arrivals = [Arrival(0.0, 30, 1, texts=(("system", 20), (name, 10))) for name in "ab"]
    for as_text in (False, True):
        first, second = (runner.prompt_of(a, as_text=as_text, vocab_size=500, reserved=100, seed=0) for a in arrivals)
        if as_text:
            first, second = first.split(), second.split()
        else:
            assert min(first) >= 100 and max(first) < 500
        assert len(first) == 30 and first[:20] == second[:20] and first[20:] != second[20:]
