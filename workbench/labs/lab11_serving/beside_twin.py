"""server.beside_twin: a process that prefills and one that decodes, beside their simulation.

    run 1      requests of one draw           its steps, as both engines timed them, calibrate the step times
    run 2      requests of another draw       measured: mean TTFT and TPOT
    twin       the same requests, no model    with the step times of run 1: predicted; with those of run 2: replayed

The difference of the predicted has two causes: what the simulation leaves out, and a machine that was faster or slower
in run 1 than in run 2. The replayed has the first of them alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain
from workbench.instruments.timing import exclusive
from workbench.labs.lab11_serving.processes import for_processes, one_thread
from workbench.parallel.disaggregated import PrefillDecode
from workbench.parallel.disaggregated.beside_twin import BesideTwin, beside_twin
from workbench.serving.gaps import Poisson
from workbench.serving.lengths import Uniform
from workbench.serving.load import Workload
from workbench.serving.settings import SchedulerSettings

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

NAME = "server.beside_twin"
LINKS = ("shm", "tcp", "gloo")
TIMES = ("ttft", "tpot")
PROMPTS, OUTPUTS = Uniform(32, 192), Uniform(8, 32)  # tokens
PREFILL = SchedulerSettings(max_running=8, token_budget=64, remember=False)  # small steps: there are enough to fit to
DECODE = SchedulerSettings(max_running=8, token_budget=256, remember=False)
POOL = {"num_blocks": 8 * (-(-(PROMPTS.high + OUTPUTS.high) // 16) + 1), "block_size": 16, "prefix": None}


def run_beside_twin(
    bench: Bench, *, model: Any, link: str, rate: float, requests: int, repeats: int
) -> Iterator[Measurement]:
    """Mean TTFT and mean TPOT of the requests in s, a sample a repeat. predicted: the mean of what the twin says with
    step times of the run before; "replayed_s" in the counts, with those of the run itself."""
    bench.check_stop()
    ceilings = bench.ceilings()
    asked = Workload(PROMPTS, OUTPUTS, Poisson(rate), stratified=True)
    runs: list[BesideTwin] = []
    with for_processes(bench, model) as (name, _), one_thread():
        bench.report("starting a process that prefills")
        pair = PrefillDecode(
            name, transport=link, prepare=True, prefill=PREFILL, decode=DECODE, prefill_pool=POOL, decode_pool=POOL
        )
        with pair:
            for at in range(repeats):
                bench.report(f"run {at + 1} of {repeats}")
                with exclusive(bench.check_stop):
                    runs.append(
                        beside_twin(
                            pair, asked, requests, ceilings, seed=2 * at, watch=lambda report: bench.check_stop()
                        )
                    )
                if (served := len(runs[-1].finished)) != requests:
                    raise WorkbenchError(f"{served} of {requests} requests came back")
    for what in TIMES:
        real, predicted, replayed = (
            [getattr(getattr(run, side), f"{what}_s") for run in runs] for side in ("real", "predicted", "replayed")
        )
        yield bench.measurement(
            name=NAME,
            settings={
                **plain({"model": model, "link": link}),
                **{"rate": rate, "requests": requests, "measured": what},
            },
            samples=real,
            unit="s",
            counts={"replayed_s": statistics.mean(replayed), "real_s": statistics.mean(real)},
            predicted=statistics.mean(predicted),
            check=f"all {requests} requests of every run were prefilled by the other process",
        )


EXPERIMENT = Experiment(
    name=NAME,
    lab=11,
    question="Two processes that prefill and decode, and their simulation: how far apart are they?",
    how=(
        "a process prefills and this one decodes, a thread each; requests come as a Poisson process. The steps of a"
        " first run calibrate the step times of both engines, and the twin then gets the requests of a second run at"
        " their times. Means over the requests of a run; a sample is a run."
    ),
    settings=(
        MODEL,
        Setting("link", "shm", "choice", choices=LINKS, help="between the two"),
        Setting("rate", 3.0, "float", 0.5, 100.0, unit="requests/s", step=0.5, help="of a Poisson process"),
        Setting("requests", 40, "int", 8, 1000, brief=8, help="in each run"),
        Setting("repeats", 3, "int", 1, 20, brief=1, help="pairs of runs"),
    ),
    run=run_beside_twin,
    predict=no_times,
    record={"cuda": ()},
)
