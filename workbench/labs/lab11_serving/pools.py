"""server.pools: the goodput of six devices, by how they share prefill and decode, simulated.

An 8B model on data-sheet H200s, requests as a Poisson process. For every arrangement the highest rate is searched at
which nine requests in ten meet both objectives (DistServe: Zhong et al., arXiv 2401.09670). No model runs, and a run
takes the same on every machine.

How many requests the devices that prefill could compute if they did nothing else, a prompt at a time, is known without
a search: the share of the devices that may prefill, divided by the mean time of a prompt. It is the predicted rate, and
above it is not searched: there a queue grows as long as requests come, however few of them are simulated.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.instruments.costs import kv_bytes
from workbench.instruments.device import PUBLISHED
from workbench.models.shapes import public_shape
from workbench.serving.lengths import HeavyTail
from workbench.serving.load import Workload, workload
from workbench.serving.metrics import Objectives
from workbench.serving.pool_goodput import Arrangement, arrangements, compare_arrangements
from workbench.serving.simulate_pools import RowsLink
from workbench.serving.step_time import StepSeconds, StepShape, blocks_that_fit, step_seconds

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

NAME = "server.pools"
MODEL, MACHINE, MEMORY_BYTES = "llama-3.1-8b", "h200", 141e9
DEVICES = 6  # whole groups of every ratio
CHUNKS = (128, 256, 512, 2048)  # token budgets
RATIOS = ((1, 2), (1, 1), (2, 1), (5, 1))  # workers that prefill, for so many that decode
KINDS = ("prefill first", "chunked", "disaggregated")
SHARE, WITHIN = 0.9, 0.1  # of the requests; of the rate
LINKS = {"NVLink, 450 GB/s": 450e9, "400 Gb/s": 50e9, "25 Gb/s": 3.125e9}  # bytes a second, one way
LATENCY_S = 20e-6
WORKLOADS = {
    "code": workload("code"),
    "conversation": workload("conversation"),
    "summarization": Workload(HeavyTail(1024, 8192), HeavyTail(32, 256), source="ours: long prompts, short answers"),
}


def kind_of(arrangement: Arrangement) -> str:
    if arrangement.prefill:
        return KINDS[2]
    return KINDS[0] if arrangement.settings.batching == "prefill_first" else KINDS[1]


def prefill_share(arrangement: Arrangement) -> float:
    """Of the devices that may prefill."""
    return arrangement.prefill / (arrangement.prefill + arrangement.decode) if arrangement.prefill else 1.0


def mean_prefill_s(asked: Workload, requests: int, step_s: StepSeconds) -> float:
    """Of a prompt by itself."""
    prompts = [one.prompt_tokens for one in asked.draw(requests, seed=0)]
    return statistics.mean(step_s(StepShape((n,), (0,), 1)) for n in prompts)


def run_pools(
    bench: Bench, *, workload: str, ttft_slo: float, tpot_slo: float, link: str, requests: int
) -> Iterator[Measurement]:
    """A Measurement for each arrangement: its goodput, requests per second and device."""
    bench.check_stop()
    config = public_shape(MODEL)
    counted = step_seconds(config, PUBLISHED[MACHINE], "bfloat16", weight_bytes_per_element=2)
    asked = replace(WORKLOADS[workload], stratified=True)
    alone_s = mean_prefill_s(asked, requests, counted)
    rows = RowsLink(kv_bytes(config, 1, 2), LINKS[link], LATENCY_S, layers=config.num_layers)

    def step_s(shape: StepShape) -> float:
        bench.check_stop()
        return counted(shape)

    every = arrangements(chunks=CHUNKS, ratios=RATIOS)
    for at, one in enumerate(every, 1):
        bench.report(f"{one.name}: {at} of {len(every)}")
        [best] = compare_arrangements(
            [one],
            asked,
            Objectives(ttft_slo, tpot_slo),
            devices=DEVICES,
            num_requests=requests,
            step_s=step_s,
            link=rows,
            share=SHARE,
            within=WITHIN,
            low=prefill_share(one) / alone_s / 8,
            high=0.99 * prefill_share(one) / alone_s,
            num_blocks=blocks_that_fit(config, memory_bytes=MEMORY_BYTES),
            prefix=None,
        )
        met = f"{best.attainment:.1%} meet both objectives" if best.per_device else "too few met both at any"
        yield bench.measurement(
            name=NAME,
            settings={
                **{"workload": workload, "ttft_slo": ttft_slo, "tpot_slo": tpot_slo, "link": link},
                **{"requests": requests, "measured": kind_of(one), "arrangement": one.name},
            },
            samples=[best.per_device],
            unit="requests/s",
            counts={
                "prefill_share": prefill_share(one),
                "token_budget": one.settings.token_budget,
                "attainment": best.attainment,
                "runs": best.runs,
            },
            predicted=prefill_share(one) / alone_s,
            check=f"{best.runs} rates simulated, every request served at each; at the highest good one {met}",
        )


EXPERIMENT = Experiment(
    name=NAME,
    lab=11,
    question="Six devices: should each do both, or some prefill and the others decode?",
    how=(
        f"simulated: {MODEL} on {DEVICES} H200s of the data sheet; the highest Poisson rate at which {SHARE:.0%} of the"
        " requests meet both objectives, found by bisection. A device does both (prompts first, or in chunks), or"
        " prefills, or decodes; keys and values go over the link layer by layer. No prompt has a beginning in common"
        " with another."
    ),
    settings=(
        Setting("workload", "code", "choice", choices=tuple(WORKLOADS), help="lengths of prompts and answers"),
        Setting("ttft_slo", 0.4, "float", 0.1, 5.0, unit="s", step=0.1, help="to the first token"),
        Setting("tpot_slo", 0.006, "float", 0.004, 0.1, unit="s", step=0.001, help="for each token after it"),
        Setting("link", "400 Gb/s", "choice", choices=tuple(LINKS), help="of each worker that prefills"),
        Setting("requests", 600, "int", 6, 10_000, brief=6, help="at each rate"),
    ),
    run=run_pools,
    predict=no_times,
    record={"cpu": (), "cuda": ()},  # the same everywhere
)
