"""Claims about the engine on several ranks: continuous batching, preemption, prefix hits, drafts, as in one process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import random_decoder, tiny_config

from workbench.decoding.sampling import SamplingSettings
from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.kv import kv_for
from workbench.models.batch import Batch
from workbench.parallel import Cluster
from workbench.parallel.costs import step_counts
from workbench.serving.engine import Engine
from workbench.serving.settings import SchedulerSettings

SHARED = tuple(3 + 7 * i % 89 for i in range(24))  # the beginning of every prompt: three blocks


@pytest.fixture(scope="module")
def model():
    return random_decoder(tiny_config())


@pytest.fixture(scope="module")
def draft():
    """The target without its second layer: it guesses some tokens right, and not all."""
    small = random_decoder(tiny_config(num_layers=1))
    target = dict(random_decoder(tiny_config()).named_parameters())
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            parameter.copy_(target[name])
    return small


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with Cluster(2) as cluster:
        yield cluster


def requests(count: int = 6, new: int = 20) -> list[Request]:
    drawn = SamplingSettings(temperature=0.8, top_p=0.9)
    return [
        Request(
            id=("request", i),
            prompt_ids=(*SHARED, *([i + 5] * (1 + 3 * i))),
            max_new_tokens=new,
            sampling=drawn if i % 3 == 2 else None,
            seed=i,
            tenant=b"a" if i == 4 else "",
        )
        for i in range(count)
    ]


def served(model, work, **settings):
    """What came of each request, and the engine."""
    drafted = settings.get("draft") is not None
    scheduling = {name: settings.pop(name) for name in ("max_running", "swap", "preemption") if name in settings}
    engine = Engine(
        model,
        SchedulerSettings(**{"max_running": 4, "token_budget": 32, "draft_tokens": 3 if drafted else 0} | scheduling),
        **{"num_blocks": 14, "block_size": 8} | settings,
    )
    ended = engine.run(work)
    return {
        one.request_id: (one.token_ids, one.finish_reason, one.preemptions, one.hit_tokens, one.drafted, one.accepted)
        for one in ended
    }, engine


WAYS = {
    "plain": {},
    "drafts": {"draft_length": 3},
    "asynchronous": {"asynchronous": True},
    "radix": {"prefix": "radix", "num_blocks": 12},
    "int8 keys": {"format": "int8"},
}


@pytest.mark.parametrize("how", [{"tensor": 2}, {"pipeline": 2, "groups": 2}], ids=["tensor", "pipeline"])
@pytest.mark.parametrize("way", WAYS)
def test_the_engine_serves_the_same_on_two_ranks(pair, model, draft, how, way):
    settings = dict(WAYS[way], **({"draft": draft} if way == "drafts" else {}))
    expected, single = served(model, requests(), **settings)
    shard = pair.load(model, **how)
    came, engine = served(shard, requests(), **settings)
    assert came == expected
    assert engine.scheduler.steps == single.scheduler.steps and engine.kv.tables.num_available == engine.kv.num_blocks
    preemptions, hits, drafted, accepted = (sum(one[place] for one in came.values()) for place in (2, 3, 4, 5))
    assert preemptions > 0 and hits > 0, "what is claimed about them would be empty"
    assert (drafted > accepted > 0) == (way == "drafts")
    pair.unload(shard)


def test_swapped_out_sequences_come_back_on_every_rank(pair, model):
    expected, _ = served(model, requests(), preemption="swap")
    shard = pair.load(model, tensor=2)
    came, _ = served(shard, requests(), preemption="swap")
    assert came == expected and sum(one[2] for one in came.values()) > 0
    pair.unload(shard)


def test_samples_of_one_request_share_their_prompt_on_every_rank(pair, model):
    work = [Request(id=1, prompt_ids=SHARED, max_new_tokens=6, n=3, seed=5, sampling=SamplingSettings(temperature=1.0))]
    shard = pair.load(model, tensor=2)
    tokens = []
    for one in (model, shard):
        engine = Engine(one, SchedulerSettings(max_running=4), num_blocks=32, block_size=8)
        tokens.append(sorted(ended.token_ids for ended in engine.run(work)))
    assert tokens[0] == tokens[1] and len(set(tokens[0])) > 1
    pair.unload(shard)


@pytest.mark.parametrize("how", [{"tensor": 2}, {"pipeline": 2, "groups": 2}], ids=["tensor", "pipeline"])
def test_log_probabilities_are_those_of_one_process(pair, model, how):
    work = [
        Request(id=i, prompt_ids=SHARED[: 9 + i], max_new_tokens=4, log_probs=2, prompt_log_probs=1) for i in range(3)
    ]
    shard = pair.load(model, **how)
    ended = [
        sorted(Engine(one, SchedulerSettings(token_budget=16), num_blocks=32).run(work), key=lambda one: one.request_id)
        for one in (model, shard)
    ]
    for single, ours in zip(*ended):
        assert ours.token_ids == single.token_ids
        for a, b in zip(
            (*ours.log_probs, *ours.prompt_log_probs[1:]), (*single.log_probs, *single.prompt_log_probs[1:])
        ):
            assert a.token_id == b.token_id and a.log_prob == pytest.approx(b.log_prob, abs=1e-4)
    pair.unload(shard)


def test_each_step_of_the_engine_exchanges_what_the_formula_says(pair, model):
    shard = pair.load(model, tensor=2)
    engine = Engine(shard, SchedulerSettings(max_running=4, token_budget=32), num_blocks=32, block_size=8)
    for request in requests():
        engine.add(request)
    pair.report(shard)
    steps = 0
    while not engine.idle:
        done = engine.step()
        rows = len(done.emitted) or 1  # a step of chunks alone asks for one row, and does not use it
        for rank, report in enumerate(pair.report(shard)):
            expected = step_counts(shard.layout, rank, [(done.rows, rows)])
            for operation in ("all_reduce", "gather"):
                assert report.counts[operation] == expected[operation], (steps, rank, operation)
        steps += 1
    assert steps > 10
    pair.unload(shard)


def test_two_engines_on_one_cluster_do_not_meet(pair, model):
    shard, other = pair.load(model, tensor=2), pair.load(random_decoder(tiny_config(), seed=9), pipeline=2)
    engines = [Engine(one, SchedulerSettings(max_running=4), num_blocks=32, block_size=8) for one in (shard, other)]
    for engine in engines:
        for request in requests(3, 6):
            engine.add(request)
    ended: list[list] = [[], []]
    while not all(engine.idle for engine in engines):
        for engine, list_of_ended in zip(engines, ended):
            list_of_ended += engine.step().finished
    expected, _ = served(model, requests(3, 6), num_blocks=32)
    assert {one.request_id: one.token_ids for one in ended[0]} == {name: one[0] for name, one in expected.items()}
    assert {one.request_id: one.token_ids for one in ended[1]} != {name: one[0] for name, one in expected.items()}


def test_a_kv_that_is_dropped_is_dropped_by_all(pair, model):
    shard = pair.load(model, tensor=2)
    for _ in range(2):
        kv = kv_for("paged", shard, num_blocks=4)
        shard(Batch.of([[1, 2, 3]]), kv)
        del kv
        gc.collect()
    assert [note[1] for note in shard.link.notes.take()] == ["drop"]


def test_an_error_in_the_middle_of_a_step_ends_the_run_and_says_so(model):
    with Cluster(2) as cluster:
        shard = cluster.load(model, tensor=2)
        kv = kv_for("contiguous", shard)

        class Interrupted(KeyboardInterrupt):
            pass

        def interrupt(x):
            raise Interrupted("now")

        shard.layers[1].mlp.forward = interrupt
        with pytest.raises(Interrupted):
            shard(Batch.of([[1, 2, 3]]), kv)
        with pytest.raises(WorkbenchError, match=r"rank 0 stopped in the middle of a step \(Interrupted: now\)"):
            shard(Batch.of([[1]], first_positions=[3]), kv)


@pytest.mark.parametrize("what", ["loading a model", "a measurement"])
def test_an_interrupt_while_a_model_is_loaded_or_messages_are_measured_ends_the_run_and_says_so(
    model, what, monkeypatch
):
    """Or the next command would meet ranks that still wait for the rest of this one."""
    with Cluster(2) as cluster:
        sends, send = [], cluster.world.send

        def interrupted(x, to):
            sends.append(to)
            if len(sends) == 3:
                raise KeyboardInterrupt
            send(x, to)

        monkeypatch.setattr(cluster.world, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            if what == "a measurement":
                cluster.measure(sizes=[64, 1024], repeats=3)
            else:
                cluster.load(model, tensor=2)
        with pytest.raises(WorkbenchError, match=f"rank 0 stopped in the middle of {what} "):
            cluster.load(model, tensor=2)


def test_a_cluster_that_nobody_refers_to_ends_its_processes():
    cluster = Cluster(2)
    ranks = cluster.ranks
    assert ranks.processes[0].is_alive()
    del cluster
    gc.collect()
    assert "was forgotten" in ranks.rank.failed
    ranks.processes[0].join(15)
    assert not ranks.processes[0].is_alive()


def test_a_fork_can_neither_use_nor_close_nor_forget_the_cluster_of_its_parent(model):
    with Cluster(2) as cluster:
        shard = cluster.load(model, tensor=2)
        child = os.fork()
        if child == 0:
            refused = 1
            try:
                shard(Batch.of([[1, 2]]), kv_for("contiguous", shard))
            except WorkbenchError as error:
                refused = "is a fork of" not in str(error)
            cluster.close()
            del cluster, shard
            gc.collect()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not cluster.ranks.rank.failed
        shard(Batch.of([[1, 2]]), kv_for("contiguous", shard))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"tensor": 4}, {"tensor": 2, "pipeline": 2, "groups": 2}], ids=["tensor", "both"])
def test_the_engine_serves_the_same_on_four_ranks(model, draft, how):
    expected, _ = served(model, requests(), draft=draft, draft_length=3)
    with Cluster(4) as cluster:
        came, _ = served(cluster.load(model, **how), requests(), draft=draft, draft_length=3)
    assert came == expected


SCRIPT = """
import torch
from workbench.parallel import make_collectives, ranks_of_environment
rank = ranks_of_environment()
group = make_collectives(rank)
print(f"{rank.rank}: {group.all_reduce(torch.ones(2)).tolist()}", flush=True)
"""


@pytest.mark.slow
def test_torchs_launcher_starts_ranks_too(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "WORKBENCH_RUN_TOKEN": "t" * 40}
    run = subprocess.run(
        [*command, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert sorted(run.stdout.split("\n")[:2]) == ["0: [2.0, 2.0]", "1: [2.0, 2.0]"], run.stderr


def test_a_launchers_environment_is_asked_for_by_name(monkeypatch):
    from workbench.parallel import ranks_of_environment

    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "WORKBENCH_RUN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(WorkbenchError, match=r"RANK, WORLD_SIZE, MASTER_PORT, WORKBENCH_RUN_TOKEN not set"):
        ranks_of_environment()
