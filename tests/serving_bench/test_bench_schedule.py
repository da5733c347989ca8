"""Claims about schedules: one seed gives one, gaps are left as drawn, and traces are read or refused by line."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from workbench.errors import WorkbenchError
from workbench.serving.arrivals import prompt_ids
from workbench.serving.bench.schedule import closed_loop, from_trace, gaps_of, open_loop, read_trace
from workbench.serving.gaps import Bursty, Poisson
from workbench.serving.load import workload

RAGGED = workload("ragged")


def test_one_seed_gives_one_schedule_and_another_seed_another():
    made = [open_loop(RAGGED, 50, gaps=Poisson(5), seed=seed) for seed in (3, 3, 4)]
    assert made[0] == made[1] and made[0].arrivals != made[2].arrivals
    closed = [closed_loop(RAGGED, 50, 4, seed=seed) for seed in (3, 3, 4)]
    assert closed[0] == closed[1] and closed[0].arrivals != closed[2].arrivals


def test_another_rate_asks_for_the_same_lengths_at_other_times():
    slow, fast = (open_loop(RAGGED, 50, gaps=Poisson(rate), seed=1) for rate in (1, 2))
    assert [(a.prompt_tokens, a.new_tokens) for a in slow.arrivals] == [
        (a.prompt_tokens, a.new_tokens) for a in fast.arrivals
    ]
    assert [a.at_s for a in slow.arrivals] == pytest.approx([2 * a.at_s for a in fast.arrivals], abs=1e-3)


def test_the_last_arrival_is_not_moved_to_where_the_rate_would_have_it():
    """`vllm bench serve` rescales the gaps so that their sum is N / rate; ours differ from seed to seed."""
    lasts = {open_loop(RAGGED, 40, gaps=Poisson(4), seed=seed).arrivals[-1].at_s for seed in range(8)}
    assert len(lasts) == 8 and all(abs(last - 40 / 4) > 1e-3 for last in lasts)


def test_arrivals_by_name():
    constant = open_loop(RAGGED, 5, gaps=gaps_of("constant", 4))
    assert [b.at_s - a.at_s for a, b in pairwise(constant.arrivals)] == [0.25] * 4 and constant.rate_per_s == 4
    bursts = open_loop(RAGGED, 5, gaps=gaps_of("gamma", 3, 2.0))
    assert (bursts.rate_per_s, bursts.burstiness, constant.burstiness) == (3, 0.25, None)
    assert gaps_of("gamma", 3, 2.5) == Bursty(3, 2.5) and gaps_of("poisson", 3) == Poisson(3)
    with pytest.raises(WorkbenchError, match="did you mean 'poisson'"):
        gaps_of("poison", 3)


def test_a_closed_loop_has_no_times_and_no_rate():
    closed = closed_loop(RAGGED, 6, 2)
    assert [planned.at_s for planned in closed.planned] == [None] * 6 and closed.rate_per_s is None
    opened = open_loop(RAGGED, 6, gaps=Poisson(1))
    assert all(planned.at_s is not None for planned in opened.planned)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: open_loop(RAGGED, 5), "has no rate of its own"),
        (lambda: closed_loop(RAGGED, 5, 0), "concurrency must be"),
        (lambda: closed_loop(workload("multi_turn"), 5, 2), "ask for them in an open loop"),
        (lambda: open_loop(RAGGED, 5, gaps=Poisson(1), concurrency=0), "concurrency must be"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(wrong, words):
    with pytest.raises(WorkbenchError, match=words):
        wrong()


# -- traces ------------------------------------------------------------------------------------------------------

MOONCAKE = [
    {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 6000, "input_length": 600, "output_length": 5, "hash_ids": [0, 9]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:16:01.1805900,396,109
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
SYNTHETIC = [
    {"timestamp": 0.5, "input_length": 10, "output_length": 2},
    {"timestamp": 0.75, "input_length": 20, "output_length": 4},
]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("text", "kind", "rows", "skipped"),
    [
        (lines(MOONCAKE), "mooncake", [(0.0, 1100, 7), (3.0, 600, 5)], 0),
        (AZURE, "azure", [(0.0, 374, 44), (14.5, 396, 109)], 0),
        (BURSTGPT, "burstgpt", [(0.0, 472, 18), (113.0, 417, 276)], 1),
        (lines(SYNTHETIC), "trace_synthetic", [(0.0, 10, 2), (0.25, 20, 4)], 0),
    ],
)
def test_each_kind_of_trace_is_known_by_its_first_line(tmp_path, text, kind, rows, skipped):
    file = tmp_path / "trace"
    file.write_text(text)
    for given in (None, kind):
        arrivals, left_out = read_trace(file, given)
        assert [(a.at_s, a.prompt_tokens, a.new_tokens) for a in arrivals] == rows and left_out == skipped
    assert len(read_trace(file, None, 1)[0]) == 1


def test_equal_hashes_become_equal_tokens(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text(lines(MOONCAKE))
    first, second = (prompt_ids(arrival, 1000) for arrival in read_trace(file)[0])
    assert first[:512] == second[:512] and first[512:600] != second[512:600] and len(first) == 1100


def test_times_are_scaled_to_a_rate_and_long_rows_to_the_model(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(AZURE)
    made = from_trace(file, rate_per_s=2.0, max_length=100)
    assert [a.at_s for a in made.arrivals] == [0.0, 0.5] and made.rate_per_s == 2.0
    assert [a.prompt_tokens + a.new_tokens for a in made.arrivals] == [100, 100]
    assert [a.new_tokens for a in made.arrivals] == [10, 21]  # 44 of 418, and 109 of 505


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("hello\n", "begins like no trace"),
        (AZURE.splitlines()[0], "has no request"),
        (AZURE + "2023-11-16 18:16:02,1\n", "line 4: 2 cells, and the header names 3"),
        (AZURE + "2023-13-16 18:16:02.1,1,1\n", "line 4: TIMESTAMP is no time"),
        (AZURE + "yesterday,1,1\n", "line 4: TIMESTAMP must be like"),
        (AZURE + "2023-11-16 18:16:02.1,0,1\n", "line 4: ContextTokens must be a whole number of at least 1, got '0'"),
        (AZURE + "2023-11-16 18:16:02.1,1,many\n", "line 4: GeneratedTokens must be a number"),
        (AZURE + "2023-11-16 18:00:00.1,1,1\n", "line 4: its time is before that of the row above"),
        (BURSTGPT + "nan,GPT-4,1,1,2,x\n", "line 5: Timestamp must be a finite number"),
        (BURSTGPT + "200,GPT-4,1,-1,2,x\n", "line 5: Response tokens must be a whole number of at least 0"),
        (lines(MOONCAKE) + "{nonsense}\n", "line 3: not JSON"),
        (lines(MOONCAKE) + "[1]\n", "line 3: expected a JSON object"),
        (lines([*MOONCAKE, {**MOONCAKE[0], "timestamp": 9000, "hash_ids": [1]}]), "line 3: 1100 tokens are 3 blocks"),
        (lines([*MOONCAKE, {**MOONCAKE[0], "timestamp": 9000, "hash_ids": "1"}]), "line 3: hash_ids must be a list"),
        (lines([{"timestamp": 1, "input_length": 2}]), "line 1: no 'output_length'; it has timestamp, input_length"),
        (lines([{**SYNTHETIC[0], "input_length": 1.5}]), "line 1: input_length must be a whole number"),
        (lines([{**SYNTHETIC[0], "input_length": True}]), "line 1: input_length must be a finite number"),
    ],
)
def test_a_wrong_row_is_refused_with_its_line(tmp_path, text, words):
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(WorkbenchError, match=words):
        from_trace(file)
