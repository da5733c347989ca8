"""The judge's own arithmetic, its gates against what they are to catch, the board, and the command."""

from __future__ import annotations

import json
import math
import os
import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from capstone_kit import SHAPE, SMALL, Judge, Shared

from workbench import cli
from workbench.capstone import api_gate, board, gates, practice, predict, score, served, traces
from workbench.capstone import judge as judging
from workbench.capstone.course_clock import COURSE_RATES, ClockRates, StepCounts
from workbench.capstone.gates import log_probs
from workbench.capstone.served import Refused, Run
from workbench.capstone.submission import SWITCHES, Submission, baseline, read_submission
from workbench.capstone.traces import Asked, draw_trace
from workbench.capstone.tracks import TRACKS, Objectives
from workbench.errors import WorkbenchError
from workbench.models import load
from workbench.models.fast import Model

pytest_plugins = ["capstone_kit"]


@pytest.fixture(scope="module")
def reference() -> Model:
    return load("stdlib-1m")


# --- score ---


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.0, 0),
        (1.0, 0),
        (1.125, 0.5),
        (1.25, 1),
        (1.6, 2),
        (1.8, 2.5),
        (2.0, 3),
        (1e9, 3),
        (math.inf, 3),
        (math.nan, 0),
    ],
)
def test_a_level_is_straight_between_thresholds_and_capped(ratio: float, expected: float) -> None:
    assert score.level(ratio, (1.0, 1.25, 1.6, 2.0)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("n", "k", "confidence"),  # tables of the sign test: the k-th smallest and largest of n
    [
        (5, 1, 0.9375),
        (6, 1, 0.96875),
        (8, 2, 0.9297),
        (9, 2, 0.9609),
        (10, 2, 0.9785),
        (11, 3, 0.9346),
        (20, 6, 0.9586),
    ],
)
def test_the_interval_of_the_median_is_the_sign_test_s(n: int, k: int, confidence: float) -> None:
    made = score.ratios_of([float(i + 1) for i in range(n)], [1.0] * n)
    assert (made.low, made.high) == (k, n + 1 - k)
    assert made.confidence == pytest.approx(confidence, abs=1e-4)


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    chance, covered = random.Random(0), 0
    for _ in range(2000):
        made = score.ratios_of([math.exp(chance.gauss(0, 1)) for _ in range(5)], [1.0] * 5)
        covered += made.low <= 1.0 <= made.high
    assert abs(covered / 2000 - 0.9375) < 0.02


def test_few_pairs_have_an_interval_that_says_how_little_it_covers() -> None:
    assert score.ratios_of([2.0, 3.0], [1.0, 1.0]).confidence == 0.5
    assert score.ratios_of([2.0], [0.0]).median == 0.0


@pytest.mark.parametrize(
    ("predicted", "expected"), [(100.0, 1), (200.0, 0), (50.0, 0), (1e9, 0), (None, 0), (100 * math.sqrt(2), 0.5)]
)
def test_a_prediction_is_worth_its_ratio(predicted: float | None, expected: float) -> None:
    assert score.prediction_score(predicted, 100.0) == pytest.approx(expected)
    assert score.prediction_score(predicted, 0.0) == 0


def run_of(texts: dict[str, list[int]], times: dict[str, list[float]], **more: Any) -> Run:
    return Run(texts, times, max((one[-1] for one in times.values() if one), default=0.0), **more)


def test_good_requests_are_whole_and_in_time() -> None:
    asked = [Asked(name, (1, 2), 3, 1.0) for name in "abcd"]
    times = {"a": [1.1, 1.2, 1.3], "b": [1.6, 1.7, 1.8], "c": [1.1, 1.6, 2.1], "d": [1.1]}
    run = run_of({name: [1, 2, 3] for name in "abc"}, times)
    assert score.good(run, asked, Objectives(ttft_s=0.25, tpot_s=0.15)) == ["a"]
    assert score.good(run, asked, Objectives(ttft_s=0.25, tpot_s=0.15), slowdown=4.0) == ["a", "b", "c"]


def test_points_are_a_weighted_sum_times_the_share_served() -> None:
    counts = [score.Counted("x", 1, 1, 1, 3.0, 0.25), score.Counted("y", 1, 1, 1, 1.5, 0.75)]
    assert score.points(counts, 1.0) == pytest.approx(62.5)
    assert score.points(counts, 0.5) == pytest.approx(31.25)
    assert score.points([], 1.0) == 0


def test_every_track_counts_what_there_is_and_its_weights_are_one() -> None:
    for track in TRACKS.values():
        assert sum(track.counts.values()) == pytest.approx(1.0) and set(track.counts) <= set(score.COUNTS)


# --- traces and the clock ---


def test_a_trace_is_its_shape_and_its_seed() -> None:
    for track in TRACKS.values():
        assert draw_trace(track.shape, "7/count") == draw_trace(track.shape, "7/count")
        assert draw_trace(track.shape, "7/count") != draw_trace(track.shape, "8/count")
        asked = draw_trace(track.shape, "7/pair0")
        assert len({one.id for one in asked}) == track.shape.num_requests
        assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(asked))
        assert all(one.prompt_ids and one.max_new_tokens >= 1 for one in asked)


def test_a_request_fits_the_model_s_context() -> None:
    context = load("stdlib-10m").config.context_length
    for track in TRACKS.values():
        for seed in range(5):
            asked = draw_trace(track.shape, str(seed))
            assert max(len(one.prompt_ids) + one.max_new_tokens for one in asked) <= context


def test_the_clock_is_linear_in_counts_and_a_fit_finds_its_rates() -> None:
    chance = random.Random(1)
    rates = ClockRates(1e-3, 2e-5, 1e-5, 1e-10, 1e-11, 5e-4, 1e-4)
    names = StepCounts.__dataclass_fields__
    scales = [1, 40, 10, 10**7, 10**6, 10**9, 3, 9, 10**6, 10**8, 2]
    steps = [
        StepCounts(**{name: chance.randrange(scale + 1) for name, scale in zip(names, scales)}) for _ in range(200)
    ]
    made = ClockRates.fit([(counts, rates(counts)) for counts in steps])
    assert all(made(counts) == pytest.approx(rates(counts), rel=1e-6) for counts in steps)
    with pytest.raises(WorkbenchError, match="too few"):
        ClockRates.fit([(StepCounts(passes=1), 1.0)] * 3)


# --- gates ---


def chosen(model: Model, asked: list[Asked], chance: random.Random | None, temperature: float = 1.0) -> Run:
    """Texts of this model: greedy without chance, else drawn at a temperature. Computed a token at a time."""
    texts: dict[str, list[int]] = {one.id: [] for one in asked}
    for _ in range(asked[0].max_new_tokens):
        whole = [[*one.prompt_ids, *texts[one.id], 0] for one in asked]
        unique: dict[tuple, torch.Tensor] = {}
        fresh = list({tuple(text): text for text in whole}.values())
        for text, rows in zip(fresh, log_probs(model, fresh, [1] * len(fresh))):
            unique[tuple(text)] = rows[0]
        for one, text in zip(asked, whole):
            row = unique[tuple(text)]
            if chance is None:
                texts[one.id].append(int(row.argmax()))
            else:
                cumulated = (row / temperature).softmax(0).cumsum(0)
                texts[one.id].append(min(int((cumulated < chance.random()).sum()), len(row) - 1))
    return run_of(texts, {one.id: [1.0] for one in asked})


PROMPTS = [tuple(one.prompt_ids[:16]) for one in draw_trace(SHAPE, "prompts")[:2]]


def test_one_wrong_token_fails_and_a_regret_is_allowed_where_the_track_allows_one(reference: Model) -> None:
    asked = [Asked(f"r{i}", prompt, 8) for i, prompt in enumerate(PROMPTS)]
    right = chosen(reference, asked, None)
    trace = tuple(asked)
    assert gates.answers(TRACKS["cost"], reference, trace, right).passed
    wrong = {name: list(text) for name, text in right.texts.items()}
    wrong["r1"][5] = (wrong["r1"][5] + 1) % reference.config.vocab_size
    for name in ("cost", "memory"):
        made = gates.answers(TRACKS[name], reference, trace, replace(right, texts=wrong))
        assert not made.passed
    assert "token 5 of request r1" in gates.answers(TRACKS["cost"], reference, trace, replace(right, texts=wrong)).words
    assert not gates.answers(TRACKS["cost"], reference, trace, replace(right, texts={})).passed
    assert not gates.answers(TRACKS["cost"], reference, trace, replace(right, facts={"errors": {"r0": "x"}})).passed


def test_drawn_texts_pass_over_many_seeds_and_rarely_fail(reference: Model) -> None:
    least = []
    for seed in range(12):
        trace = gates.drawn_trace(PROMPTS, seed)
        made = gates.drawn(reference, trace, chosen(reference, list(trace), random.Random(seed)))
        assert made.passed, made.words
        least.append(float(made.words.partition("p = ")[2].split()[0]))
    assert min(least) > 1e-5 and max(least) > 1e-2


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_another_temperature_is_caught(reference: Model, temperature: float) -> None:
    trace = gates.drawn_trace(PROMPTS, 1)
    for seed in range(3):
        made = gates.drawn(reference, trace, chosen(reference, list(trace), random.Random(seed), temperature))
        assert not made.passed, made.words


def test_another_model_s_and_greedy_texts_are_caught(reference: Model) -> None:
    trace = gates.drawn_trace(PROMPTS, 1)
    other = chosen(load("stdlib-3m-mha"), list(trace), random.Random(1))
    assert not gates.drawn(reference, trace, other).passed
    assert not gates.drawn(reference, trace, chosen(reference, list(trace), None)).passed
    missing = replace(other, texts={name: text for name, text in other.texts.items() if name != "d3"})
    assert "1 of 192 texts were not drawn" in gates.drawn(reference, trace, missing).words


def test_the_chi_square_is_the_textbook_s() -> None:
    from collections import Counter

    expected = torch.tensor([30.0, 20.0, 10.0, 2.0, 1.0])
    statistic, freedom = gates.chi_square(expected, Counter({0: 25, 1: 25, 2: 8, 3: 4, 4: 1}))
    assert freedom == 2 and statistic == pytest.approx(25 / 30 + 25 / 20 + 0 / 13)
    assert gates.chi_square(torch.tensor([60.0, 0.1]), Counter({0: 60})) == (0.0, 0)


def test_the_bound_is_each_different_beginning_once(reference: Model) -> None:
    trace = (Asked("a", (1, 2, 3), 2), Asked("b", (1, 2, 4), 2, arrival_s=1.0))
    texts, times = {"a": [5, 6], "b": [5, 6]}, {"a": [0.5, 0.6], "b": [1.5, 1.6]}
    steps = ((StepCounts(rows=6), 0.1),)
    run = run_of(texts, times, steps=steps)
    assert gates.least_rows(trace, run) == 6
    least = gates.least_flops(reference, trace, run)
    assert 0.4 < least / (2 * 6 * reference.num_parameters()) < 1
    assert gates.bound(trace, run, [(trace, run)], reference, least / 1.5).passed
    assert not gates.bound(trace, run, [(trace, run)], reference, least / 1.7).passed  # it took 1.6 s
    few = replace(run, steps=((StepCounts(rows=5), 0.1),))
    assert "void" in gates.bound(trace, few, [], reference, least).words
    early = replace(run, times_s={**times, "b": [0.9, 1.6]})
    assert "before it arrived" in gates.bound(trace, run, [(trace, early)], reference, least).words


def test_a_timed_run_is_bound_by_its_own_requests(reference: Model) -> None:
    """A pair has a trace of its own: the same names, other arrivals."""
    counted, timed = (Asked("a", (1, 2, 3), 2, arrival_s=9.0),), (Asked("a", (1, 2, 3), 2, arrival_s=0.1),)
    run = run_of({"a": [5, 6]}, {"a": [9.5, 9.6]}, steps=((StepCounts(rows=4), 0.1),))
    soon = run_of({"a": [5, 6]}, {"a": [0.5, 0.6]})
    assert gates.bound(counted, run, [(timed, soon)], reference, 1e12).passed


def test_one_block_beyond_the_budget_is_beyond_it() -> None:
    track = TRACKS["memory"]
    assert gates.budget(track, {"pool_bytes": track.pool_bytes}).passed
    assert not gates.budget(track, {"pool_bytes": track.pool_bytes + 1}).passed
    run = Run({}, {}, 0.0, facts={"pool_bytes": track.pool_bytes + 1})
    assert not gates.budget(track, {"pool_bytes": 1}, run).passed


# --- judging ---


def test_judged_twice_the_counts_are_the_same(judge: Judge) -> None:
    first, second = (judge({"draft": "prompt_lookup", "token_budget": 64}) for _ in range(2))
    assert first["counts"] == second["counts"] and first["points"] == second["points"]


def test_one_seed_counts_the_same_in_every_process_and_clock(engines: Any) -> None:
    submission, trace = Submission(track="cost", asynchronous=True, host_cache_bytes=1 << 20), draw_trace(SHAPE, "1")
    runs = []
    for _ in range(2):
        runs.append(engines[0].make(submission, TRACKS["cost"].pool_bytes).count(trace, COURSE_RATES))
        engines[0].close()
    assert runs[0].texts == runs[1].texts and runs[0].times_s == runs[1].times_s
    assert [counts for counts, _ in runs[0].steps] == [counts for counts, _ in runs[1].steps]


def test_advice_that_dies_in_mid_trace_has_the_share_that_was_served(judge: Judge) -> None:
    source = "calls = []\ndef order(requests, now_s):\n    calls.append(1)\n"
    source += "    return [0 / (len(calls) < 12)] * len(requests)"
    track = replace(SMALL["cost"], levels=(1e-9, 2e-9, 3e-9, 4e-9))
    record = judge({"policy": "own", "max_running": 2, "token_budget": 64}, source, track=track)
    assert [one["gate"] for one in record["gates"] if not one["passed"]] == ["advice"]
    assert 0 < record["share_served"] < 1 and "were served before, and count" in record["gates"][-2]["words"]
    assert record["points"] == pytest.approx(100 * record["share_served"])


CEILINGS = SimpleNamespace(flop_per_s={"float32": 1e11})  # to measure them takes a minute


def test_two_judgements_have_intervals_that_meet(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging.devices, "ceilings", lambda kind: CEILINGS)
    shape = replace(SHAPE, num_requests=6)
    records = [
        judge({"predicted_tokens_per_s": 100}, pairs=5, track=replace(SMALL["cost"], shape=shape)) for _ in range(2)
    ]
    first, second = (record["timed"] for record in records)
    assert records[0]["counts"] == records[1]["counts"]
    for timed in (first, second):
        assert timed["low"] <= timed["median"] <= timed["high"] and len(timed["each"]) == 5
        assert timed["confidence"] == 0.9375
    assert max(first["low"], second["low"]) <= min(first["high"], second["high"])
    assert records[0]["prediction"]["predicted"] == 100 and records[0]["points"] == 0


def test_an_engine_that_is_killed_fails_and_the_next_is_judged(judge: Judge, engines: Any, monkeypatch: Any) -> None:
    count = served.Engine.count

    def killed(self: Any, *arguments: Any) -> Run:
        if self is engines[0]:
            os.kill(self._child._process.pid, 9)
        return count(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(served.Engine, "count", killed)
        record = judge({})
    assert [one["gate"] for one in record["gates"] if not one["passed"]] == ["budget"] and record["points"] == 0
    assert "SIGKILL" in record["gates"][-1]["words"]
    assert all(one["passed"] for one in judge({})["gates"])


def test_lines_of_a_timed_run_that_has_failed_do_not_end_the_engine(engines: Any) -> None:
    """The judge sends requests and the end of a trace until it hears of the failure, which may be a moment later."""
    source = "def order(requests, now_s):\n    return [1 / 0 for _ in requests]"
    own, trace = Submission(track="cost", policy="own", own_source=source), draw_trace(SHAPE, "late")
    engine = engines[0].make(own, TRACKS["cost"].pool_bytes)
    failed = engine.time(trace).failed
    assert failed is not None and failed[0] == "advice"
    engine._send("add", requests=[trace[0].plain()])
    engine._send("last")
    engine.again(Submission(track="cost"), TRACKS["cost"].pool_bytes)
    assert sorted(engine.time(trace).texts) == sorted(one.id for one in trace)
    engine.close()


PLAN = """
preempted = []

def plan(step):
    rows, left, preempt = {}, step["token_budget"], []
    running = [one for one in step["requests"] if one["running"]]
    waiting = [one for one in step["requests"] if not one["running"]]
    if len(running) == step["max_running"] and len(preempted) < 3:
        preempt = [running.pop()["id"]]
        preempted.extend(preempt)
    for one in running + waiting[: step["max_running"] - len(running) - len(preempt)]:
        count = min(left, one["tokens"] - one["computed"])
        if count > 0:
            rows[one["id"]] = count
            left -= count
    return {"rows": rows, "preempt": preempt}
"""


def test_a_scheduler_of_its_own_serves_all_and_its_preemptions_count(engines: Any) -> None:
    asked = Submission(track="cost", scheduler="own", own_source=PLAN, max_running=3, token_budget=64)
    run = engines[0].make(asked, TRACKS["cost"].pool_bytes).count(draw_trace(SHAPE, "1"), COURSE_RATES)
    engines[0].close()
    assert run.failed is None and len(run.texts) == SHAPE.num_requests
    assert run.facts["preemptions"] == 3


def test_an_engine_s_memory_is_limited() -> None:
    with pytest.raises(Refused) as caught:
        served.Engine(Submission(track="cost"), TRACKS["cost"].pool_bytes, memory_bytes=32 << 20)
    assert caught.value.gate == "budget"


def test_an_engine_that_does_not_answer_fails_by_the_time(judge: Judge, engines: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(served, "RUN_SECONDS", 0.0)
    record = judge({"draft": "prompt_lookup"})
    assert [one["gate"] for one in record["gates"] if not one["passed"]] == ["time"]
    engines[0].end()


# --- what is read ---


def write(folder: Path, text: str | bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "submission.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_random_json_is_a_submission_or_a_clear_refusal(tmp_path: Path) -> None:
    chance = random.Random(5)
    values: list[Any] = [
        None,
        True,
        False,
        0,
        1,
        -1,
        7,
        10**30,
        10**400,
        0.5,
        -1e308,
        "",
        "x",
        "own",
        "int8",
        "\ud800",
        "weights",
    ]
    values += [[], [1], {}, {"a": 1}, "first_come", "adaptive", "x" * 5000, "../..", "stdlib-1m", "ngram", 2**63]
    for round_ in range(600):
        names = chance.sample(SWITCHES, chance.choice((1, 1, 1, 2, 5)))
        given = {"track": chance.choice(list(TRACKS)), **{name: chance.choice(values) for name in names}}
        folder = write(tmp_path / "s", json.dumps(given))
        try:
            made = read_submission(folder)
        except WorkbenchError as error:
            str(error).encode()
            assert len(str(error)) < 2000, round_
        else:
            json.dumps(made.plain())


NO_SUBMISSIONS = {
    "empty": b"",
    "a list": b"[]",
    "a number": b"3",
    "no UTF-8": b"\xff\xfe",
    "two tracks": b'{"track": "cost", "track": "open"}',
    "NaN": b'{"track": "cost", "aging_s": NaN}',
    "infinity": b'{"track": "cost", "aging_s": 1e999}',
    "deep": b'{"track": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "digits": b'{"track": "cost", "max_running": ' + b"9" * 10_000 + b"}",
    "huge": b" " * (10 << 20),
    "no track": b"{}",
    "no such track": b'{"track": "fame"}',
    "a list as track": b'{"track": ["cost"]}',
    "cut off": b'{"track": "cost"',
}


@pytest.mark.parametrize("content", NO_SUBMISSIONS.values(), ids=NO_SUBMISSIONS)
def test_what_is_no_submission_says_so(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path / "s", content)
    with pytest.raises(WorkbenchError):
        read_submission(folder)
    record = judging.judge(folder, seed=1, pairs=0)
    assert record["points"] == 0 and record["gates"][0]["gate"] == "start" and not record["gates"][0]["passed"]


def test_folders_that_are_none(tmp_path: Path) -> None:
    for folder in (tmp_path / "none", write(tmp_path / "s", "{}") / "submission.json"):
        with pytest.raises(WorkbenchError, match="no folder"):
            judging.judge(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(WorkbenchError, match="has no submission"):
        read_submission(tmp_path / "empty")
    (tmp_path / "empty" / "submission.json").mkdir()
    with pytest.raises(WorkbenchError, match="plain file"):
        read_submission(tmp_path / "empty")
    fifo = tmp_path / "fifo"
    fifo.mkdir()
    os.mkfifo(fifo / "submission.json")
    with pytest.raises(WorkbenchError, match="plain file"):
        read_submission(fifo)


def test_the_digest_is_of_what_was_handed_in(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", '{"track": "cost", "draft": "own"}')
    (folder / "own.py").write_text("x = 1")
    first = read_submission(folder).digest
    (folder / "own.py").write_text("x = 2")
    assert read_submission(folder).digest != first
    (folder / "notes.txt").write_text("not read")
    assert read_submission(folder).digest != first


# --- the board ---


def record_of(name: str, **more: Any) -> dict[str, Any]:
    plain = judging._not_read(name, "x") | {
        "track": "cost",
        "seed_drawn": True,
        "gates": [{"gate": "start", "passed": True, "words": ""}],
    }
    return plain | {"points": 50.0, "total": 45.0} | more


def timed_of(median: float, pairs: int = 5) -> dict[str, Any]:
    return {"each": [median] * pairs, "median": median, "low": median, "high": median}


def test_a_board_ranks_and_goes_on_past_what_is_broken(tmp_path: Path) -> None:
    board.save(record_of("b", points=60.0), tmp_path)
    board.save(record_of("a", timed=timed_of(2.0)), tmp_path)
    board.save(record_of("c", timed=timed_of(3.0)), tmp_path)
    board.save(record_of("d", points=99.0, gates=[{"gate": "api", "passed": False, "words": ""}]), tmp_path)
    edited = board.save(record_of("e"), tmp_path)
    edited.write_text(edited.read_text().replace("50.0", "99.0"))
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "no.json").write_bytes(b"\xff{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "huge.json").write_bytes(b" " * (5 << 20))
    (tmp_path / "link.json").symlink_to(edited)
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "note.txt").write_text("x")
    made = board.read_board(tmp_path)
    assert [row.name for row in made.rows] == ["b", "c", "a", "d"]
    broken = dict(made.broken)
    assert len(broken) == 8 and "was edited" in broken[edited.name]
    said = board.in_words(made)
    assert "left out" in said and "api" in said
    assert [row[2] for row in board.cells(made)] == ["1", "2", "3", "–"]


def signed(folder: Path, name: str, record: dict[str, Any]) -> None:
    """A record with a right hash, whatever is in it."""
    (folder / name).write_text(json.dumps(record | {board.HASH: board.digest_of(record)}))


WRONG = {
    "no points": {"points": None},
    "points as text": {"points": "99"},
    "NaN": {"points": math.nan},
    "beyond all": {"total": math.inf},
    "another track": {"track": "fame"},
    "a list as track": {"track": ["cost"]},
    "gates of a wrong kind": {"gates": 3},
    "gates without names": {"gates": [{}]},
    "gates of no objects": {"gates": ["x"]},
    "a device of a wrong kind": {"device": "x"},
    "times of a wrong kind": {"timed": [1]},
    "a median that is none": {"timed": timed_of(1.0) | {"median": "x"}},
    "pairs that are none": {"timed": timed_of(1.0) | {"each": 7}},
    "no date": {"date": None},
    "another version": {"version": 99},
    "more points than there are": {"points": 1e6, "total": 1e6},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_signed_record_of_nonsense_is_left_out(tmp_path: Path, wrong: dict[str, Any]) -> None:
    board.save(record_of("good"), tmp_path)
    signed(tmp_path, "bad.json", record_of("bad") | wrong)
    made = board.read_board(tmp_path)
    assert [row.name for row in made.rows] == ["good"] and len(made.broken) == 1
    board.in_words(made)


def test_names_cannot_forge_a_board(tmp_path: Path) -> None:
    for name in ("../../x", "a/b", "", "\ud800", "x" * 500, "a\n  1   b  99.0", "\x1b[2J", "."):
        file = board.save(record_of(name), tmp_path)
        assert file.parent == tmp_path and file.is_file()
    made = board.read_board(tmp_path)
    said = board.in_words(made)
    said.encode()
    assert all(line.isprintable() for line in said.splitlines())
    assert len(said.splitlines()) == 1 + len(made.rows)


def test_other_machines_and_tracks_are_never_ranked_together(tmp_path: Path) -> None:
    board.save(record_of("a"), tmp_path)
    board.save(record_of("b", device={"name": "another", "threads": 2, "system": "x"}), tmp_path)
    board.save(record_of("c", track="open"), tmp_path)
    made = board.read_board(tmp_path)
    assert len(made.groups) == 3 and [row[2] for row in board.cells(made)] == ["1"] * 3


def test_the_latest_of_a_name_counts(tmp_path: Path) -> None:
    board.save(record_of("a", points=90.0, date="2026-01-01T00:00:00+00:00"), tmp_path)
    board.save(record_of("a", points=10.0, date="2026-01-02T00:00:00+00:00"), tmp_path)
    assert [row.points for row in board.read_board(tmp_path).rows] == [10.0]


def test_a_record_of_a_chosen_seed_has_no_rank(tmp_path: Path) -> None:
    """Whoever knows the trace can hand in its answers."""
    board.save(record_of("a", points=100.0, seed_drawn=False), tmp_path)
    board.save(record_of("b"), tmp_path)
    made = board.read_board(tmp_path)
    assert [(row[2], row[3], row[7]) for row in board.cells(made)] == [("1", "b", ""), ("–", "a", board.CHOSEN_SEED)]


def test_a_board_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="no folder"):
        board.read_board(tmp_path / "none")
    assert board.in_words(board.read_board(tmp_path)) == "no records"


# --- the command ---


@pytest.fixture
def small(judge: Judge, engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracks with small traces, and engines that stay."""

    def engine(submission: Submission, budget: int) -> Any:
        if submission.digest == "baseline":
            return Shared(submission, budget, engines[1])
        return engines[0].make(submission, budget)

    for name, track in SMALL.items():
        monkeypatch.setitem(TRACKS, name, track)
    monkeypatch.setattr(practice, "Engine", engine)
    monkeypatch.setattr(predict, "Engine", engine)
    monkeypatch.setattr(judging.Judging, "_behave", lambda *_: None)
    monkeypatch.setattr(judging.devices, "ceilings", lambda kind: CEILINGS)


def test_the_command_from_a_new_folder_to_the_board(tmp_path: Path, small: None, capsys: pytest.CaptureFixture) -> None:
    folder, records = str(tmp_path / "mine"), str(tmp_path / "board")
    assert cli.main(["capstone", "new", "cost", folder]) == 0
    assert read_submission(Path(folder)).plain() | {"digest": "baseline"} == baseline(TRACKS["cost"]).plain()
    assert cli.main(["capstone", "run", folder]) == 0
    assert "level 0.00 of 3" in capsys.readouterr().out
    assert cli.main(["capstone", "run", folder, "--json", "--seed", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["share_served"] == 1.0
    assert cli.main(["capstone", "predict", folder]) == 0
    said = capsys.readouterr().out
    rehearsed = int(re.search(r"rehearsed as the judge times it: (\d+) tokens/s, the median of 5 practice", said)[1])
    assert rehearsed > 0 and f'"predicted_tokens_per_s": {rehearsed}' in said
    bad = write(tmp_path / "bad", '{"track": "cost", "points": 100}')
    none = tmp_path / "none"
    arguments = ["capstone", "judge", str(none), str(bad), folder, "--pairs", "1", "--board", records, "--seed", "4"]
    assert cli.main(arguments) == 1
    said = capsys.readouterr()
    assert "not judged" in said.out and "FAILED start" in said.out and "mine: " in said.out
    assert "fewer than the 5" in said.err
    assert cli.main(["capstone", "board", records]) == 0
    assert "mine" in capsys.readouterr().out
    Path(records, "x.json").write_text("{}")
    assert cli.main(["capstone", "board", records, "--json"]) == 1
    said = capsys.readouterr()
    assert "x.json" in said.err and {row["name"] for row in json.loads(said.out)} == {"mine", "bad"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["new", "fame", "FOLDER/new"],
        ["new", "cost", "FOLDER"],
        ["run", "FOLDER/none"],
        ["run", "FOLDER/bad"],
        ["predict", "FOLDER/bad"],
        ["judge", "FOLDER/none"],
        ["judge", "FOLDER/bad", "--pairs", "-1"],
        ["board", "FOLDER/none"],
    ],
)
def test_the_command_s_errors_are_lines(tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    write(tmp_path / "bad", "{")
    assert cli.main(["capstone", *(one.replace("FOLDER", str(tmp_path)) for one in arguments)]) != 0
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err and (said.out + said.err).strip()


def test_words_of_a_submission_can_be_printed_and_saved(tmp_path: Path, judge: Judge) -> None:
    record = judge({"draft": "own"}, "raise ValueError('\\ud800\\x1b[2J\\n')", starts=False)
    assert all(gate["words"].isprintable() for gate in record["gates"])
    assert board.read_board(board.save(record, tmp_path).parent).rows[0].name == "submission"


def test_a_refusal_carries_its_gate() -> None:
    assert gates.refused(Refused("time", "x")) == gates.GateResult("time", False, "x")
    assert traces.held_out_ids() and set(gates.GATES) >= {"start", "conduct", "budget", "answers", "advice"}


@pytest.mark.parametrize(("learn", "asked"), [(False, 2), (True, 1)])
def test_a_seed_is_asked_for_one_text_unless_drafts_learn_from_others(monkeypatch, learn: bool, asked: int) -> None:
    """An accepted draft and a token drawn directly use other random numbers: equal distributions, not equal texts."""

    def holds(client: api_gate.Client) -> None:
        assert client.port == 1

    def seeded(client: api_gate.Client) -> None:
        assert not learn

    monkeypatch.setattr(api_gate, "draws_the_same_with_the_same_seed", seeded)
    monkeypatch.setattr(api_gate, "CLAIMS", (holds, seeded))
    assert api_gate.api(1, "any", drafts_learn=learn).words == f"{asked} of {asked} claims hold"


def test_a_record_has_none_of_the_switches(tmp_path) -> None:
    """Who reads a board should not find the solutions of others there."""
    record = judging.judge(tmp_path / ".." / tmp_path.name, track=SMALL["cost"], pairs=0)  # no submission.json
    assert not set(record) & set(SWITCHES) - {"track"} and "submission" not in record
    for file in (Path(judging.__file__).parent / "board").glob("*.json"):
        kept = json.loads(file.read_text(encoding="utf-8"))
        assert set(kept) == {*record, board.HASH}
