"""The two real processes beside their simulation: how far off are its mean TTFT and TPOT?

One run calibrates: the steps of both engines as they were timed. Another, of other requests, is predicted and timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from workbench.decoding.sequence import Finished, Request
from workbench.errors import WorkbenchError, check_whole
from workbench.instruments.device import Ceilings
from workbench.kv.paged_rows import stored_layers
from workbench.parallel.disaggregated.pair import PrefillDecode
from workbench.serving.arrivals import prompt_ids
from workbench.serving.load import Workload
from workbench.serving.results import StepReport
from workbench.serving.simulate_pools import Pools, RowsLink
from workbench.serving.step_time import Calibration, StepShape, step_seconds
from workbench.serving.times import RequestTimes

LINK_BYTES_PER_S = 1e9  # of the links here: a copy in, a copy out, and Python between


@dataclass(frozen=True)
class Means:
    """Over the requests of a run."""

    ttft_s: float
    tpot_s: float

    @classmethod
    def of(cls, finished: Sequence[Finished]) -> Means:
        times = [RequestTimes.of(one) for one in finished]
        return cls(
            fmean(float(one.ttft_s) for one in times if one.ttft_s is not None),
            fmean(float(one.tpot_s) for one in times if one.tpot_s is not None),
        )


@dataclass(frozen=True)
class BesideTwin:
    """One run and two simulations of it. predicted: with step times of the run before, as one would predict; where the
    machine has other work they may be other ones. replayed: with its own, which leaves the simulation's error alone."""

    real: Means
    predicted: Means
    replayed: Means
    finished: tuple[Finished, ...]

    def differences(self) -> dict[str, float]:
        """(simulated − real) / real"""
        return {
            "predicted ttft": self.predicted.ttft_s / self.real.ttft_s - 1,
            "predicted tpot": self.predicted.tpot_s / self.real.tpot_s - 1,
            "replayed ttft": self.replayed.ttft_s / self.real.ttft_s - 1,
            "replayed tpot": self.replayed.tpot_s / self.real.tpot_s - 1,
        }


def beside_twin(
    pair: PrefillDecode,
    workload: Workload,
    num_requests: int,
    ceilings: Ceilings,
    *,
    seed: int = 0,
    link_bytes_per_s: float = LINK_BYTES_PER_S,
    watch: Callable[[StepReport], None] | None = None,
) -> BesideTwin:
    """Serve two draws of a workload on the pair, and simulate the second with step times fitted to each.

    workload: with arrivals in time (`at_rate`). ceilings: of this machine. watch: as of `Engine.run`. Raises
    WorkbenchError where a request was not prefilled by the other process: then the two were not what is simulated.
    """
    check_whole("num_requests", num_requests, 8)
    engine = pair.engine
    if engine.settings.draft_tokens:
        raise WorkbenchError("the twin does not simulate speculation; compare a pair without a draft")
    config, dtype = engine.model.config, engine.model.dtype
    steps = step_seconds(config, ceilings, str(dtype).split(".")[1], weight_bytes_per_element=dtype.itemsize)

    def requests(which: int) -> list[Request]:
        now_s = engine.now_s + 0.05
        drawn = workload.draw(num_requests, seed=seed + which, context=config.context_length)
        return [
            Request(
                (seed, which, one.name),
                tuple(prompt_ids(one, config.vocab_size, seed=seed + which)),
                one.new_tokens,
                stop_token_ids=(),
                arrival_s=one.at_s + now_s,
                tenant=f"{seed} {which}",
            )
            for one in drawn
        ]

    def served(asked: Sequence[Request]) -> tuple[list[Finished], Calibration, Calibration]:
        engine.prefill_steps()
        engine.steps.clear()
        finished = pair.run(asked, watch=watch)
        prefill = Calibration.fit(engine.prefill_steps(), steps.counted_s)
        return finished, prefill, Calibration.fit(list(engine.steps), steps.counted_s)

    def seconds(calibration: Calibration) -> Callable[[StepShape], float]:
        return lambda shape: calibration(steps.counted_s(shape), shape)

    def simulated(asked: Sequence[Request], prefill: Calibration, decode: Calibration) -> Means:
        pools = Pools(
            prefill=1,
            decode=1,
            step_s=seconds(decode),
            prefill_step_s=seconds(prefill),
            settings=engine.settings,
            prefill_settings=pair.prefill_settings,
            link=RowsLink(engine.kv.bytes_per_token, link_bytes_per_s, layers=stored_layers(engine.kv)),
            block_size=engine.kv.block_size,
            num_blocks=engine.kv.num_blocks,
        )
        return Means.of(pools.run(asked))

    _, *before = served(requests(0))
    asked = requests(1)
    real, *own = served(asked)
    if engine.problems or engine.why_alone:
        raise WorkbenchError(f"the prefill engine did not serve all: {engine.why_alone or dict(engine.problems)}")
    return BesideTwin(Means.of(real), simulated(asked, *before), simulated(asked, *own), tuple(real))
