"""Planted cheats, each a folder that is judged for real: 0 points, by the gate that is meant for it.

Two processes serve all of them, the baseline's and theirs. What no gate can see, because it breaks no rule, gains
nothing: on a fresh trace its ratio is 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from capstone_kit import SHAPE, SMALL, Judge, Shared
from safetensors.torch import load_file, save_file

from workbench.capstone import judge as judging
from workbench.capstone.served import Run
from workbench.capstone.submission import Submission
from workbench.capstone.traces import draw_trace
from workbench.capstone.tracks import TRACKS
from workbench.models.checkpoints import ZOO
from workbench.serving.lengths import Uniform

pytest_plugins = ["capstone_kit"]


def failed(record: dict[str, Any]) -> list[str]:
    """The gates that were not passed. A cheat gets nothing at all."""
    assert record["points"] == 0 and record["total"] == 0, record["counts"]
    return [gate["gate"] for gate in record["gates"] if not gate["passed"]]


def words(record: dict[str, Any]) -> str:
    return " ".join(gate["words"] for gate in record["gates"] if not gate["passed"])


# --- at the reading: nothing is started ---


def linked(name: str) -> Callable[[Path], None]:
    """Another's file in place of one's own."""

    def prepare(folder: Path) -> None:
        other = folder.parent / "another"
        other.write_text('{"track": "cost"}' if name.endswith("json") else "def propose(texts): return []")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(other)

    return prepare


def pipe(folder: Path) -> None:
    (folder / "own.py").unlink()
    os.mkfifo(folder / "own.py")


def weights_of(name: str, *, files: dict[str, bytes] | None = None) -> Callable[[Path], None]:
    """A folder weights/ with a shipped model, and other files."""

    def prepare(folder: Path) -> None:
        (folder / "weights").mkdir()
        for file in (ZOO / name).iterdir() if name else ():
            if file.suffix in (".json", ".safetensors"):
                (folder / "weights" / file.name).write_bytes(file.read_bytes())
        for file_name, content in (files or {}).items():
            (folder / "weights" / file_name).write_bytes(content)

    return prepare


OWN = "def propose(texts): return [[] for _ in texts]\ndef order(requests, now_s): return [0 for _ in requests]\n"
UNREAD: dict[str, tuple[Any, str | None, Any, str]] = {
    "points that it gives itself": ({"points": 100}, None, None, "points"),
    "a budget of its own": ({"pool_bytes": 1 << 40}, None, None, "pool_bytes"),
    "a digest of its own": ({"digest": "baseline"}, None, None, "digest"),
    "source beside own.py": ({"own_source": "import os"}, None, None, "own_source"),
    "another model": ({"model": "stdlib-1m"}, None, None, "serves"),
    "a path as a model": ({"model": "/tmp/x"}, None, None, "serves"),
    "its own weights": ({"model": "weights"}, None, weights_of("stdlib-1m"), "serves"),
    "a draft that is never asked": ({"scheduler": "own", "draft": "own"}, OWN, None, "no drafted tokens"),
    "a prediction that is no number": ('{"track": "cost", "predicted_tokens_per_s": NaN}', None, None, "NaN"),
    "a track twice": ('{"track": "open", "track": "cost"}', None, None, "twice"),
    "another's switches": ({}, None, linked("submission.json"), "plain file"),
    "another's own.py": ({"draft": "own"}, None, linked("own.py"), "plain file"),
    "a pipe": ({"draft": "own"}, OWN, pipe, "plain file"),
    "a pickle": ({"track": "open", "model": "weights"}, None, weights_of("", files={"a.bin": b"x"}), "pickles"),
}


@pytest.mark.parametrize(("given", "own", "prepare", "said"), UNREAD.values(), ids=UNREAD)
def test_what_is_no_submission_fails_to_start(judge: Judge, given: Any, own: Any, prepare: Any, said: str) -> None:
    record = judge(given, own, starts=False, prepare=prepare or (lambda folder: None))
    assert failed(record) == ["start"] and said in words(record)


# --- by conduct: nothing is loaded ---

CONDUCT = {
    "a patched clock": "import time\ntime.perf_counter = lambda: 0.0",
    "patched statistics": "import math\nmath.fsum = lambda x: 0.0",
    "patched medians": "import statistics\nstatistics.median = max",
    "the reference's memory": "x = open('/proc/self/mem')",
    "the judge's frames": "x = (y for y in ()).gi_frame.f_back.f_back",
    "the judge's objects": "import gc\nx = gc.get_objects()",
    "the judge's end": "import os, signal\nos.kill(os.getppid(), 9)",
    "another process": "import subprocess\nsubprocess.Popen('true')",
    "a thread that computes between the calls": "import threading\nthreading.Thread(target=print).start()",
    "answers from the network": "import urllib.request",
    "the model itself": "from workbench.models import load",
    "texts as code": "x = eval('1')",
    "texts as attributes": "import operator\nx = operator.attrgetter('__class__')(1)",
    "texts as types": "import typing\nx = typing.get_type_hints(print)",
    "a pattern's attributes": "match print:\n    case object(__self__=x): pass",
    "a module in a module": "import random\nx = random._os",
    "the process's end": "raise_ = exit\nexit(0)",
}


@pytest.mark.parametrize("source", CONDUCT.values(), ids=CONDUCT)
def test_what_reaches_out_fails_by_conduct(judge: Judge, source: str) -> None:
    assert failed(judge({"draft": "own"}, f"{source}\n{OWN}", starts=False)) == ["conduct"]


def test_work_moved_before_the_run_is_cut_off(judge: Judge) -> None:
    """Loading own.py has a time of its own, and it is short."""
    record = judge({"draft": "own"}, f"x = 0\nwhile True: x += 1\n{OWN}", starts=False)
    assert failed(record) == ["start"] and "longer than 2 s" in words(record)


def test_memory_taken_before_the_run_is_over_budget(judge: Judge) -> None:
    record = judge({"draft": "own"}, f"x = bytearray(600 << 20)\n{OWN}", starts=False)
    assert failed(record) == ["budget"] and "256 MiB" in words(record)


# --- by the budget ---

POOL = TRACKS["cost"].pool_bytes
BLOCK = 16 * 6144  # bytes of a block of stdlib-10m in float32
BUDGET = {
    "one block too many": {"blocks": POOL // BLOCK + 1},
    "a pool without end": {"blocks": 10**9},
    "a block without end": {"block_size": 10**9},
    "a pool below the pool": {"host_cache_bytes": POOL, "blocks": 64},
    "tiers of all memory": {"host_cache_bytes": 10**15},
    "a draft's cache beside it": {"draft": "stdlib-1m-pruned", "blocks": POOL // BLOCK},
    "places without end": {"max_running": 10**8, "token_budget": 10**8, "draft": "stdlib-1m-pruned"},
}


@pytest.mark.parametrize("given", BUDGET.values(), ids=BUDGET)
def test_what_is_outside_the_budget_fails_by_it(judge: Judge, given: dict[str, Any]) -> None:
    assert failed(judge(given)) == ["budget"]


def test_the_budget_to_the_block_is_within_it(judge: Judge) -> None:
    record = judge({"blocks": POOL // BLOCK})
    assert failed(record) == []


# --- by the answers ---

ANSWERS = {
    "weights of four bits": {"weights": "int4"},
    "weights of eight bits": {"weights": "int8"},
    "keys and values of four bits": {"kv": "int4"},
    "four bits where a few nats are allowed": {"track": "memory", "weights": "int4", "kv": "int4"},
}


@pytest.mark.parametrize("given", ANSWERS.values(), ids=ANSWERS)
def test_cut_precision_fails_by_the_answers(judge: Judge, given: dict[str, Any]) -> None:
    track = SMALL[given.get("track", "cost")]
    longer = replace(track, shape=replace(SHAPE, num_requests=10, outputs=Uniform(24, 32)))
    assert failed(judge(given, track=longer)) == ["answers"]


def test_a_worse_model_fails_by_its_nats(judge: Judge) -> None:
    assert failed(judge({"track": "open", "model": "stdlib-1m"})) == ["nats"]


# --- by advice: what it gives is no use, and nothing was served ---

ADVICE = {
    "lazy outputs": ("draft", "def propose(texts): return ([] for _ in texts)"),
    "lazy lists": (
        "draft",
        "class L(list):\n    def __len__(self): return 10 ** 9\n    def __getitem__(self, i): return [1]\n"
        "def propose(texts): return L([1])",
    ),
    "a dict that computes": (
        "policy",
        "class D(dict):\n    def items(self): return 1 / 0\ndef order(requests, now_s): return D(a=1)",
    ),
    "lines of the protocol": ("policy", 'def order(requests, now_s): return {"result": [0], "conduct": ""}'),
    "a number that is none": ("policy", "def order(requests, now_s): return [float('nan') for _ in requests]"),
    "more than was asked": ("policy", "def order(requests, now_s): return [0] * (len(requests) + 1)"),
    "tokens that there are not": ("draft", "def propose(texts): return [[10 ** 9] for _ in texts]"),
    "an answer without end": ("policy", "def order(requests, now_s): return [0] * 10_000_000"),
    "more rows than a step has": (
        "scheduler",
        "def plan(step): return {'rows': {one['id']: 10 ** 9 for one in step['requests']}}",
    ),
    "requests that there are not": ("scheduler", "def plan(step): return {'rows': {'x': 1}}"),
    "ids that are none": ("scheduler", "def plan(step): return {'rows': {}, 'preempt': [[1]]}"),
    "never a step": ("scheduler", "def plan(step): return {'rows': {}}"),
}


@pytest.mark.parametrize(("part", "source"), ADVICE.values(), ids=ADVICE)
def test_useless_advice_ends_the_run(judge: Judge, part: str, source: str) -> None:
    shape = replace(SHAPE, num_requests=6)
    record = judge({part: "own", "token_budget": 64}, source, track=replace(SMALL["cost"], shape=shape))
    assert failed(record) == ["advice", "answers"], words(record)
    assert "0 of 6 requests" in words(record)


def test_memory_taken_in_a_run_is_over_budget(judge: Judge) -> None:
    source = (
        "kept = []\ndef order(requests, now_s):\n    kept.append(bytearray(400 << 20))\n    return [0] * len(requests)"
    )
    assert failed(judge({"policy": "own"}, source)) == ["budget"]


def test_late_advice_ends_the_run(judge: Judge) -> None:
    record = judge({"policy": "own"}, "def order(requests, now_s):\n    while True: pass")
    assert failed(record) == ["advice", "answers"] and "longer than 2 s" in words(record)


# --- another face for each asker ---


def test_advice_that_ends_when_texts_are_drawn_fails_there(judge: Judge) -> None:
    source = "def propose(texts):\n    return [[] if one['id'][0] == 'r' else 1 / 0 for one in texts]"
    assert failed(judge({"draft": "own"}, source, behave=True)) == ["drawn"]


def test_advice_that_ends_when_clients_ask_fails_there(judge: Judge) -> None:
    source = "def order(requests, now_s):\n    return [0 if one['id'][0] in 'rd' else 1 / 0 for one in requests]"
    assert failed(judge({"policy": "own"}, source, behave=True)) == ["api"]


def test_advice_that_ends_when_it_is_timed_gets_nothing(judge: Judge) -> None:
    """A counted run begins at 0, and a timed one a moment after: own.py can tell them apart."""
    source = "calls = []\ndef order(requests, now_s):\n    calls.append(now_s)\n"
    source += "    return [0 if calls[0] == 0 else 1 / 0 for _ in requests]"
    record = judge({"policy": "own"}, source, pairs=1)
    assert failed(record) == ["advice"] and "in a timed run" in words(record)


# --- what breaks no rule, and gains nothing ---


def ratios(record: dict[str, Any]) -> dict[str, float]:
    assert not [gate for gate in record["gates"] if not gate["passed"]], words(record)
    return {one["name"]: one["ratio"] for one in record["counts"]}


@pytest.fixture(scope="module")
def practised(engines: Any) -> Run:
    """A practice trace's texts, as anybody can have them."""
    submission = Submission(track="cost", max_running=32)
    return Shared(submission, POOL, engines[1]).count(draw_trace(SHAPE, "practice/0"), judging.COURSE_RATES)


def replaying(practised: Run) -> str:
    """own.py with all answers of the practice trace, by request."""
    return (
        f"answers = {practised.texts!r}\n"
        "done = {}\n"
        "def propose(texts):\n"
        "    for one in texts:\n"
        "        done[one['id']] = done.get(one['id'], 0) + len(one['new_tokens'])\n"
        "    return [answers.get(one['id'], [])[: one['limit']] for one in texts]\n"
    )


def test_precomputed_answers_are_of_another_trace(judge: Judge, practised: Run) -> None:
    record = judge({"draft": "own", "draft_length": 4}, replaying(practised))
    assert ratios(record)["weight_bytes"] <= 1.05 and failed(record) == []


def test_what_was_kept_by_pointer_is_not_believed(judge: Judge) -> None:
    """The answer to the last call, by the address of its argument."""
    source = (
        "kept = {}\n"
        "def propose(texts):\n"
        "    return kept.setdefault(id(texts) % 2, [[0, 1, 2] for _ in texts])[: len(texts)]"
        " + [[0]] * (len(texts) - len(kept[id(texts) % 2]))\n"
    )
    record = judge({"draft": "own", "draft_length": 3}, source)
    assert ratios(record)["weight_bytes"] <= 1.0 and failed(record) == []


def test_knowing_the_judge_brings_nothing(judge: Judge) -> None:
    """Its requests are r0, r1 …; what an engine does for them, it does for all."""
    source = "def order(requests, now_s):\n    return [0 if one['id'][0] == 'r' else 9 for one in requests]"
    record = judge({"policy": "own"}, source)
    assert ratios(record)["weight_bytes"] == 1.0 and failed(record) == []


def test_state_of_one_run_is_gone_in_the_next(judge: Judge) -> None:
    source = "runs = []\ndef order(requests, now_s):\n    runs.append(now_s)\n    assert runs[0] == min(runs)\n" + (
        "    return [-one['arrival_s'] for one in requests]"
    )
    record = judge({"policy": "own"}, source)
    assert ratios(record)["weight_bytes"] == 1.0 and failed(record) == []


KEEPS_NOTHING = {"no prefix cache": {"prefix": "none"}, "blocks that are never full": {"block_size": 192}}


@pytest.mark.parametrize("given", KEEPS_NOTHING.values(), ids=KEEPS_NOTHING)
def test_what_is_never_kept_is_given_up(judge: Judge, given: dict[str, Any]) -> None:
    """A cache that keeps nothing evicts nothing, and wins nothing by it."""
    shape = replace(SHAPE, num_requests=10, prompts=Uniform(48, 96), shared=0.0)
    track = replace(SMALL["memory"], shape=shape, pool_bytes=24 * BLOCK, counts={"evicted_or_preempted": 1.0})
    record = judge({"track": "memory", "max_running": 1, **given}, track=track)
    assert ratios(record)["evicted_or_preempted"] <= 1.0 and failed(record) == []


# --- weights of one's own, in the open track ---


def changed(**values: Any) -> Callable[[Path], None]:
    """A folder weights/ of a shipped model whose config says something else."""

    def prepare(folder: Path) -> None:
        weights_of("stdlib-1m")(folder)
        file = folder / "weights" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return prepare


def cut_off(folder: Path) -> None:
    weights_of("stdlib-1m")(folder)
    for file in (folder / "weights").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1000])


def with_weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        weights_of("stdlib-1m")(folder)
        for file in (folder / "weights").glob("*.safetensors"):
            save_file({name: change(tensor) for name, tensor in load_file(file).items()}, file)

    return prepare


def of_another_vocabulary(folder: Path) -> None:
    weights_of("stdlib-1m")(folder)
    config = folder / "weights" / "config.json"
    values = json.loads(config.read_text())
    size = values["vocab_size"]
    config.write_text(json.dumps(values | {"vocab_size": size + 64}))
    for file in (folder / "weights").glob("*.safetensors"):
        more = {
            name: torch.cat([tensor, tensor[:64]]) if tensor.shape[0] == size else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(more, file)


WEIGHTS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no folder": (lambda folder: None, ("start",)),
    "an empty folder": (weights_of(""), ("start",)),
    "a header without end": (weights_of("stdlib-1m", files={"model.safetensors": b"\xff" * 64}), ("start",)),
    "cut off": (cut_off, ("start",)),
    "no JSON": (weights_of("stdlib-1m", files={"config.json": b"{"}), ("start",)),
    "layers without end": (changed(num_hidden_layers=10**9), ("start", "budget")),
    "a width without end": (changed(hidden_size=10**9), ("start", "budget")),
    "a width below zero": (changed(hidden_size=-1), ("start",)),
    "a vocabulary without end": (changed(vocab_size=10**12), ("start", "budget")),
    "a context of one": (changed(max_position_embeddings=1), ("start",)),
    "no number": (with_weights(lambda tensor: tensor * float("nan")), ("start", "answers", "nats")),
    "infinite": (with_weights(lambda tensor: tensor * float("inf")), ("start", "answers", "nats")),
    "nothing": (with_weights(torch.zeros_like), ("nats",)),
    "another vocabulary": (of_another_vocabulary, ("nats",)),
}


@pytest.mark.parametrize(("prepare", "expected"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_that_are_none_are_refused(judge: Judge, prepare: Any, expected: tuple[str, ...]) -> None:
    record = judge({"track": "open", "model": "weights"}, prepare=prepare, starts=None)
    assert failed(record)[0] in expected, words(record)


def test_weights_are_limited_in_bytes(judge: Judge) -> None:
    def prepare(folder: Path) -> None:
        (folder / "weights").mkdir()
        with (folder / "weights" / "model.safetensors").open("wb") as file:
            file.truncate(129 << 20)

    record = judge({"track": "open", "model": "weights"}, prepare=prepare, starts=False)
    assert failed(record) == ["start"] and "are allowed" in words(record)
