"""parallel.messages: what a message between two processes takes, by its bytes: over sockets and through shared memory.

A message of n bytes takes α + β·n seconds. Both are fitted to the medians of ping-pongs; with them an all-reduce is
predicted by its algorithm, and measured. A median leaves out the calls that wait until the operating system finds a
core for a process; a step of a model waits for the sum of its messages, those included, so that means stand beside.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.parallel import Rank, make_collectives, start_ranks
from workbench.parallel.alpha_beta import MEASURED, AlphaBeta, fit, time_operation

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.parallel import Collectives

NAME = "parallel.messages"
BACKENDS = ("shm", "gloo")
SIZES = (8, 1_536, 20_480, 327_680, 2_621_440)  # bytes; 1,536 are a row of hidden states of stdlib-10m in float32


def answer(rank: Rank, backend: str, sizes: tuple[int, ...], repeats: int) -> None:
    """The work of rank 1: the same operations as rank 0, in the same order."""
    torch.set_num_threads(1)
    group = make_collectives(rank, backend=backend)
    verify(group)
    for operation in MEASURED:
        for nbytes in sizes:
            time_operation(group, operation, nbytes, repeats)


def verify(group: Collectives) -> None:
    """Raise WorkbenchError where the sum of 1 and 2 is not 3 on this rank."""
    summed = group.all_reduce(torch.full((1000,), 1.0 + group.index))
    if not torch.equal(summed, torch.full((1000,), 3.0)):
        raise WorkbenchError(f"{group.backend}: an all-reduce of 1 and 2 gave {float(summed[0])}; nothing was timed")


def run_messages(bench: Bench, *, repeats: int) -> Iterator[Measurement]:
    """For each `backend` and `operation` (send, half of there and back; all_reduce) and number of `bytes`: seconds of
    each call, predicted by α and β of this backend's ping-pongs."""
    for backend in BACKENDS:
        bench.check_stop()
        bench.report(f"starting two processes, {backend}")
        with start_ranks(2, answer, backend, SIZES, repeats) as ranks:
            group = make_collectives(ranks.rank, backend=backend)
            verify(group)
            link: AlphaBeta | None = None
            for operation in MEASURED:
                bench.report(f"{operation}, {backend}")
                times = {}
                for nbytes in SIZES:
                    bench.check_stop()
                    times[nbytes] = time_operation(group, operation, nbytes, repeats)
                medians = [(nbytes, statistics.median(samples)) for nbytes, samples in times.items()]
                link = link or fit(medians, "direct" if backend == "shm" else "ring")
                for nbytes, samples in times.items():
                    yield bench.measurement(
                        name=NAME,
                        settings={"backend": backend, "operation": operation, "bytes": nbytes, "ranks": 2},
                        samples=samples,
                        unit="s",
                        counts={
                            "mean_s": statistics.mean(samples),
                            "alpha_s": link.alpha_s,
                            "beta_s_per_byte": link.beta_s_per_byte,
                        },
                        predicted=link.predict(operation, nbytes, 2),
                        limit="launch" if nbytes < link.half_bytes else "bandwidth",
                        check="the sum of 1 and 2 was 3 on both ranks",
                    )
            group.close()


EXPERIMENT = Experiment(
    name=NAME,
    lab=13,
    question="How long does a message between two processes of this machine take?",
    how=(
        "two processes, one thread each; a send is half of there and back, an all-reduce is timed whole. α and β are"
        " fitted to the medians of the sends, and predict the all-reduces too, by their algorithm"
    ),
    settings=(Setting("repeats", 200, "int", 2, 5000, brief=5, help="calls of each size"),),
    run=run_messages,
    predict=no_times,
    record={"cpu": ({},), "cuda": ()},
)
