"""Claims about ranks and their collectives: who may take part, how a run ends, and what is counted."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import parallel_work
import pytest
import torch
from conftest import random_decoder, tiny_config
from kernel_claims import GPU_ALONE
from parallel_work import is_running, shared_memory

from workbench.errors import WorkbenchError
from workbench.models.batch import Batch
from workbench.models.checkpoints import save_checkpoint
from workbench.parallel import Cluster, Count, RankLost, collectives, join_ranks, make_collectives, ranks, start_ranks
from workbench.parallel import shared_memory as shared_memory_module
from workbench.parallel.alpha_beta import AlphaBeta, fit, of_operation
from workbench.parallel.pipeline import bubble
from workbench.serving.engine import Engine
from workbench.serving.settings import SchedulerSettings

END_S = 5.0  # a run ends within it
ROOM_S = 15.0  # what a busy machine may need for the same


# -- starting ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 65, 2.0, True, None, "2"])
def test_a_number_of_ranks_that_makes_no_sense_is_refused(size):
    with pytest.raises(WorkbenchError, match="number of ranks must be a whole number from 1 to 64"):
        start_ranks(size, parallel_work.end_at_once)


def test_a_port_in_use_is_refused_by_its_number():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(WorkbenchError, match=rf"port {port} of 127.0.0.1 cannot be used .*port=0"):
            start_ranks(2, parallel_work.end_at_once, port=port)


def test_one_rank_is_a_run_of_its_own_and_waits_for_nobody():
    with start_ranks(1, parallel_work.end_at_once) as run:
        group = make_collectives(run.rank)
        x = torch.arange(3.0)
        assert torch.equal(group.all_reduce(x.clone()), x) and group.all_gather(x).shape == (1, 3)
        group.tell(b"nobody hears")
        assert set(group.counts.values()) == {Count()}
        group.close()


def test_a_rank_joins_once_with_the_token_of_its_run():
    with start_ranks(1, parallel_work.end_at_once) as run:
        port, token = free_port_of(run), run.rank.token
        with pytest.raises(WorkbenchError, match="rank 0 of this run was started before"):
            join_ranks(0, 1, port, token, start_s=5)
        with pytest.raises(WorkbenchError, match="has another token"):
            join_ranks(0, 1, port, "0" * 64, start_s=5)
        with pytest.raises(WorkbenchError, match=r"ranks 0 … 0, got 1"):
            join_ranks(1, 1, port, token, start_s=5)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = closed.getsockname()[1]
    with pytest.raises(WorkbenchError, match=rf"rank 1: no rank 0 answers at 127.0.0.1:{nobody}"):
        join_ranks(1, 2, nobody, token, start_s=0.5)


def free_port_of(run) -> int:
    return run.rank.store.underlying_store.port


def test_ranks_of_other_code_do_not_run_together(monkeypatch):
    monkeypatch.setattr(ranks, "code_digest", lambda: "f" * 64)
    with pytest.raises(WorkbenchError, match=r"rank 0 has the workbench f{16} and rank 1 has .* the same version"):
        start_ranks(2, parallel_work.end_at_once)


def test_an_answer_of_somebody_without_the_token_is_not_believed():
    with start_ranks(1, parallel_work.end_at_once) as run:
        run.rank.size = 2  # as if another were to come
        run.rank.store.set("answer", json.dumps({"problem": "", "proof": "0" * 64}))
        with pytest.raises(WorkbenchError, match="is not of this run"):
            join_ranks(1, 2, free_port_of(run), run.rank.token, start_s=5)
        run.rank.store.set("hello/1", json.dumps({"hello": "{}", "proof": "0" * 64}))
        with pytest.raises(WorkbenchError, match="rank 1 has not the token of this run"):
            ranks._compare_hellos(run.rank)


def test_a_peer_that_cannot_prove_the_token_is_refused(monkeypatch):
    monkeypatch.setattr(collectives, "proof", lambda *parts: bytes(32))
    with start_ranks(2, parallel_work.collect, "gloo") as run:
        with pytest.raises(WorkbenchError, match="who connected as rank 1 does not know the token of this run"):
            make_collectives(run.rank, backend="gloo")
        run.fail("the test is over")


# -- ending --------------------------------------------------------------------------------------------------


def test_an_error_on_another_rank_comes_with_its_words():
    words = r"rank 1 of 2 \(process \d+\) ended: KeyError: 'a part is missing'"
    with pytest.raises(RankLost, match=words), start_ranks(2, parallel_work.break_down) as run:
        run.rank.wait_for("never", "rank 1")


def test_a_rank_that_ended_in_good_order_is_not_waited_for():
    with start_ranks(2, parallel_work.end_at_once) as run:
        while not run.rank.gone:
            time.sleep(0.01)
        with pytest.raises(RankLost, match="rank 1 of 2 has ended its work"):
            run.rank.check([1])


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_killed_in_the_middle_of_a_step_ends_the_run_by_its_name(backend):
    """Rank 1 is stopped first, so that the step has surely begun: rank 0 waits for it, in a collective."""
    before = shared_memory()
    with Cluster(3, backend=backend) as cluster:
        model = cluster.load(random_decoder(tiny_config(num_layers=3)), pipeline=3)
        engine = Engine(model, SchedulerSettings(max_running=2), num_blocks=32)
        engine.add(request("a", 8))
        engine.step()
        assert shared_memory() == before, "the memory has no name any more"
        pids = [cluster.ranks.pid_of(rank) for rank in (1, 2)]
        os.kill(pids[0], signal.SIGSTOP)
        killed = []
        timer = threading.Timer(0.3, lambda: (killed.append(time.monotonic()), os.kill(pids[0], signal.SIGKILL)))
        timer.start()
        with pytest.raises(
            RankLost, match=rf"rank 1 of 3 \(process {pids[0]}\) was killed by SIGKILL; this run is over"
        ):
            engine.step()
        while any(map(is_running, pids)) and time.monotonic() < killed[0] + ROOM_S:
            time.sleep(0.01)
        took = time.monotonic() - killed[0]
        assert not any(map(is_running, pids)) and took < ROOM_S, f"{took:.1f} s; {END_S} on a machine of its own"
        with pytest.raises(WorkbenchError, match="rank 1 of 3"):
            model(Batch.of([[1]]), engine.kv)
    assert shared_memory() == before


def request(name: str, new: int):
    from workbench.decoding.sequence import Request

    return Request(id=name, prompt_ids=(3, 4, 5), max_new_tokens=new)


STARTED = "print(ranks.start_ranks(2, parallel_work.wait_for_the_end).pid_of(1), flush=True)"
STARTING = """
def compare(rank):
    print(torch.multiprocessing.active_children()[0].pid, flush=True)
    time.sleep(60)
ranks._compare_hellos = compare
ranks.start_ranks(2, parallel_work.wait_for_the_end)
"""


@pytest.mark.parametrize("begin", [STARTED, STARTING], ids=["in its work", "while it starts"])
def test_when_rank_0_is_killed_the_others_end(begin):
    code = "import time, torch.multiprocessing, parallel_work\nfrom workbench.parallel import ranks\n" + begin
    folder = Path(parallel_work.__file__).parent
    with subprocess.Popen(
        [sys.executable, "-c", code + "\ntime.sleep(60)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=folder,
    ) as leader:
        assert leader.stdout is not None
        pid = int(leader.stdout.readline())
        assert is_running(pid)
        leader.kill()
        killed = time.monotonic()
        while is_running(pid) and time.monotonic() < killed + ROOM_S:
            time.sleep(0.01)
        assert not is_running(pid)


def test_a_rank_that_does_not_come_is_named_after_the_timeout():
    with start_ranks(2, parallel_work.collect, "shm") as run:
        group = make_collectives(run.rank)
        run.rank.timeout_s = 1.0  # only now: on a busy machine the other rank needs longer to come here
        with pytest.raises(RankLost, match="rank 0 waited 1 s for rank 1 in a collective"):
            group.receive(torch.zeros(1), 1)  # rank 1 is in an all-reduce
        run.fail("the test is over")


# -- collectives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_all_collectives_give_what_they_should_on_two_ranks(backend):
    with start_ranks(2, parallel_work.collect, backend) as run:
        counts, sent, heard = parallel_work.collect(run.rank, backend)
        sizes = parallel_work.SIZES
        assert counts["all_reduce"] == Count(len(sizes), 4 * sum(sizes))
        assert counts["all_gather"] == Count(len(sizes) + 1, 4 * sum(sizes) + 66)
        assert counts["send"] == counts["receive"] == Count(3 * len(sizes), 3 * 4 * sum(sizes))
        assert sent == Count(20 * len(sizes), 20 * sum(sizes)) and heard == Count()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_all_collectives_give_what_they_should_on_four_ranks(backend):
    with start_ranks(4, parallel_work.collect, backend) as run:
        parallel_work.collect(run.rank, backend)


def test_what_cannot_be_a_group_is_refused():
    with start_ranks(1, parallel_work.end_at_once) as run:
        for members in ([1], [0, 0], [], [-1], ["0"]):
            with pytest.raises(WorkbenchError, match=r"members of collectives must be different ranks of 0 … 0"):
                make_collectives(run.rank, members)
        with pytest.raises(WorkbenchError, match=r"unknown backend of collectives 'glo'; did you mean 'gloo'"):
            make_collectives(run.rank, backend="glo")
        if not torch.cuda.is_available():
            with pytest.raises(WorkbenchError, match="'nccl' needs CUDA devices"):
                make_collectives(run.rank, backend="nccl")


def test_shared_memory_is_refused_where_stores_have_no_order(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with start_ranks(1, parallel_work.end_at_once) as run, pytest.raises(WorkbenchError, match="this is aarch64"):
        make_collectives(run.rank)


def test_shared_memory_that_has_no_room_is_refused_and_no_process_is_left(monkeypatch):
    """Mapped it could be, and a write that finds no room would kill the process by SIGBUS."""
    monkeypatch.setattr(shared_memory_module, "free_shared_memory", lambda: 1e6)
    with pytest.raises(WorkbenchError, match=r"no room for 3.* MB of shared memory .*use backend='gloo'"):
        Cluster(2)
    assert not torch.multiprocessing.active_children()


def test_pytorchs_own_tensor_parallelism_gives_the_same():
    with start_ranks(2, parallel_work.twin) as run:
        beside_twin, beside_one_process = parallel_work.twin(run.rank)
    assert beside_twin < 1e-6 and beside_one_process < 1e-6


@pytest.mark.parametrize("device", [GPU_ALONE])
def test_nccl_takes_a_gpu_a_rank(device):
    with start_ranks(1, parallel_work.end_at_once) as run:
        group = make_collectives(run.rank, backend="nccl")
        assert group.all_reduce(torch.ones(4, device=group.device)).tolist() == [1.0] * 4
        group.close()


def test_a_script_without_a_guard_is_not_run_again_by_the_ranks(tmp_path):
    """Its ranks ran it from the top, started ranks of their own, and ended with a code."""
    script = tmp_path / "once.py"
    script.write_text(
        "print('begun', flush=True)\n"
        "from workbench.parallel import Cluster\n"
        "with Cluster(2) as cluster:\n"
        "    print('ranks', cluster.size, __file__.endswith('once.py'), flush=True)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:2] == ["begun", "ranks 2 True"] and done.stdout.count("begun") == 1, done.stderr
    work = types.FunctionType(parallel_work.end_at_once.__code__, {"__name__": "__main__"})
    with pytest.raises(WorkbenchError, match="put it into a file and import it"):
        start_ranks(2, work)


# -- the α–β model -------------------------------------------------------------------------------------------


def test_alpha_and_beta_come_back_from_the_times_they_make():
    true = AlphaBeta(2e-4, 1e-9)
    link = fit([(n, true.message_s(n)) for n in (8, 1_000, 100_000, 10_000_000)])
    assert link.alpha_s == pytest.approx(2e-4) and link.beta_s_per_byte == pytest.approx(1e-9)
    assert link.half_bytes == pytest.approx(2e5) and link.bytes_per_s == pytest.approx(1e9)


@pytest.mark.parametrize("samples", [[(8, 2.0), (1000, 1.0)], [(8, 1e-9), (1000, 1.0), (2000, 2.0)]])
def test_neither_is_negative_whatever_was_measured(samples):
    link = fit(samples)
    assert link.alpha_s >= 0 and link.beta_s_per_byte >= 0 and link.message_s(1500) > 0


@pytest.mark.parametrize("kind", ["ring", "direct"])
@pytest.mark.parametrize("size", [2, 4])
def test_alpha_and_beta_found_from_an_operation_give_its_time_back(kind, size):
    line = AlphaBeta(3.0, 0.01, kind)
    assert of_operation(line, "all_reduce", size).predict("all_reduce", 500, size) == pytest.approx(8.0)


def test_a_collective_takes_what_its_algorithm_says():
    ring, direct = AlphaBeta(1.0, 0.001, "ring"), AlphaBeta(1.0, 0.001, "direct")
    assert ring.predict("all_reduce", 1000, 4) == pytest.approx(6 + 1.5)
    assert ring.predict("broadcast", 1000, 4) == pytest.approx(2 * 2.0)
    assert direct.predict("all_reduce", 1000, 3) == pytest.approx(1 + 2.0)
    assert ring.predict("all_reduce", 1000, 1) == 0
    assert ring.predict_counts({"all_reduce": Count(2, 2000), "receive": Count(9, 9)}, 2) == pytest.approx(2 * 3.0)
    with pytest.raises(WorkbenchError, match="unknown collective with a predicted time 'scatter'"):
        ring.predict("scatter", 1, 2)
    with pytest.raises(WorkbenchError, match="at least two sizes"):
        fit([(8, 1.0), (8, 1.1)])


def test_the_bubble_is_what_the_paper_says():
    assert bubble(4, 1) == 0.75 and bubble(2, 1) == 0.5 and bubble(1, 5) == 0
    assert math.isclose(bubble(4, 12), 3 / 15)


def test_different_weights_are_refused_by_the_rank_that_has_them(tmp_path, monkeypatch):
    save_checkpoint(random_decoder(tiny_config(vocab_size=64)), tmp_path / "tiny")
    monkeypatch.setattr("workbench.parallel.cluster._digest_of", lambda folder: torch.zeros(32, dtype=torch.uint8))
    with Cluster(2) as cluster, pytest.raises(WorkbenchError, match=r"rank 1 has other weights in .*tiny than rank 0"):
        cluster.load(tmp_path / "tiny", tensor=2)
