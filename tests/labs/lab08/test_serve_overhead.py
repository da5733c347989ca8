"""Claims about serving.overhead: every step has all places taken, the calls it counts grow with the texts, the time is
a sum."""

from __future__ import annotations

import threading

import pytest

from workbench.experiments import run_experiment
from workbench.instruments.bench import Bench
from workbench.instruments.timing import Stopped
from workbench.kv.blocks import BlockTables
from workbench.labs.lab08_continuous_batching.overhead import OVER, PARTS, Counted, count, measure

STEPS = 12


def test_a_counted_memory_is_the_memory_and_counts_calls_alone():
    tables = BlockTables(4, 2)
    memory = Counted(tables)
    assert memory.open("a") == 0
    assert memory.missing({"a": 3}) == memory.missing({"a": 4}) == 2
    assert memory.block_size == 2 and memory.num_available == 4 and dict(memory.lengths) == {"a": 0}
    assert memory.calls == {"open": 1, "missing": 2}
    assert "a" in tables.lengths


@pytest.mark.parametrize("running", [1, 16, 64])
def test_what_a_step_costs_in_calls_grows_with_the_texts_and_with_nothing_else(running):
    counts = count(running, 8, STEPS, "hash", 0)
    assert counts["texts"] == running
    assert counts["rows"] >= running
    # a text may cost a question of its own for its blocks, and one more when it is admitted
    asked = counts["calls of missing"]
    assert 0 < asked <= running + counts.get("admitted", 0) + 1
    # what is remembered: blocks that got full, one in 16 tokens, and prompts
    assert counts.get("calls of remember", 0) <= running / 16 + counts.get("admitted", 0) + 0.25 * running
    assert counts.get("calls of open", 0) <= counts.get("admitted", 0) + 1
    assert counts.get("calls of release", 0) <= counts.get("admitted", 0) + 1
    assert "calls of swap_out" not in counts, "nobody is preempted: there is room for all"


def test_the_same_steps_are_counted_however_often():
    assert count(16, 8, STEPS, "hash", 3) == count(16, 8, STEPS, "hash", 3)
    assert count(16, 8, STEPS, "hash", 3) != count(16, 8, STEPS, "hash", 4)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("prefix", [None, "radix"])
def test_every_step_that_is_timed_has_each_part(over, prefix):
    seconds = measure(over, 4, 3, 5, prefix, 0)
    assert set(seconds) == {*PARTS, *(["places"] if over == "paged kv" else [])}
    assert all(len(taken) == 5 and min(taken) > 0 for taken in seconds.values())


def test_the_experiment_measures_each_size_over_both_and_a_sample_is_the_sum_of_its_parts(monkeypatch):
    from workbench.labs.lab08_continuous_batching import overhead

    def measured(*given):
        return {"schedule": [1.0, 2.0], "grow": [0.5, 0.5], "postprocess": [0.25, 0.5], "places": [9.0, 9.0]}

    monkeypatch.setattr(overhead, "measure", measured)
    found = run_experiment("serving.overhead", {"repeats": 2})
    assert [(m.settings["over"], m.settings["running"]) for m in found] == [
        (over, running) for over in OVER for running in (1, 16, 64, 256)
    ]
    for m in found:
        assert m.unit == "s" and m.samples == [1.75, 3.0]
        assert m.counts["schedule_s"] == 1.5 and m.counts["places_s"] == 9.0
        assert m.counts["texts"] == m.settings["running"]
        assert m.counts["s_a_text"] == 2.375 / m.settings["running"]


def test_it_stops_when_it_is_told_to():
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        run_experiment("serving.overhead", {"over": "block tables"}, Bench(stop=stop))
