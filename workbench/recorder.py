"""The recorder: the experiments of a lab, or of all labs within so many minutes, run for the archive.

A machine with a GPU may be at hand for one call only. So every run has its share of the time that is left, and what it
measured until then is kept; a lab's file is written as soon as the lab is done; and whatever a run cannot do is
reported, not raised. The lab of the kernels comes first: it is what only a GPU can show.

A rehearsal runs the same list on this CPU: the settings meant for the GPU, a tiny model in the place of each large one.
It shows that every run goes through, and keeps nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from workbench import experiments
from workbench.errors import WorkbenchError, is_number
from workbench.instruments.bench import Bench
from workbench.instruments.timing import Stopped

if TYPE_CHECKING:
    from workbench.experiments import Experiment
    from workbench.instruments.records import Measurement
    from workbench.models.config import ModelConfig

FIRST_LAB = 10
MIN_SHARE_S, MAX_SHARES = 20.0, 3.0  # a run may take as long as three of those that are left, if it must
Report = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """One experiment with the settings that the archive has it with."""

    experiment: Experiment
    settings: Mapping[str, Any]

    @property
    def words(self) -> str:
        return " ".join([self.experiment.name, *(f"{k}={_shown(v)}" for k, v in self.settings.items())])


@dataclass(frozen=True)
class Taken:
    """What a run gave. trouble: why it is not all that it would have been; "" where it is."""

    run: Run
    measurements: tuple[Measurement, ...]
    trouble: str
    seconds: float


def runs_of(lab: int, device: str) -> list[Run]:
    """What is run for the record of a lab on a device. Every setting is checked. Raises WorkbenchError."""
    chosen = experiments.list_experiments(lab)
    if not chosen:
        labs = sorted({e.lab for e in experiments.list_experiments()})
        raise WorkbenchError(f"lab {lab} has no experiments; these have: {', '.join(map(str, labs))}")
    runs = [Run(e, dict(s)) for e in chosen for s in e.record_settings(device)]
    for run in runs:
        run.experiment.complete(run.settings)
    return runs


def all_runs(device: str) -> dict[int, list[Run]]:
    """The runs of every lab that has any on this kind of device, in the order in which they are to be run."""
    labs = sorted({e.lab for e in experiments.list_experiments()}, key=lambda lab: (lab != FIRST_LAB, lab))
    found = {lab: runs_of(lab, device) for lab in labs}
    return {lab: runs for lab, runs in found.items() if runs}


def take(run: Run, bench: Bench, within_s: float | None = None) -> Taken:
    """Run it to its end, or for `within_s` seconds; what it measured until then is kept, and nothing of a run that
    failed. Nothing but an interruption from outside is raised."""
    found: list[Measurement] = []
    trouble, began = "", time.perf_counter()
    clock = None if within_s is None else threading.Timer(within_s, bench.stop.set)
    if clock is not None:
        clock.daemon = True
        clock.start()
    try:
        for measurement in run.experiment.run(bench, **run.experiment.complete(run.settings)):
            found.append(measurement)
    except Stopped:
        trouble = f"stopped after {within_s:.0f} s, its share of the time"
    except Exception as error:
        has_message = isinstance(error, WorkbenchError) and str(error)
        trouble = str(error) if has_message else f"{type(error).__name__}: {error}"
        found.clear()  # what failed may be the check of all of it
    finally:
        if clock is not None:
            clock.cancel()
            bench.stop.clear()
    return Taken(run, tuple(found), trouble, time.perf_counter() - began)


class Budget:
    """Seconds for a number of runs."""

    def __init__(self, seconds: float, runs: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._ends, self._left, self._clock = clock() + seconds, runs, clock

    def share(self) -> float:
        """Seconds that the next run may take; 0 where none are left. Counts that run as begun."""
        remaining = self._ends - self._clock()
        share = max(MIN_SHARE_S, MAX_SHARES * remaining / max(1, self._left))
        self._left -= 1
        return max(0.0, min(share, remaining))


def take_all(
    runs: Mapping[int, list[Run]],
    bench_for: Callable[[], Bench],
    within_s: float,
    report: Report,
    done: Callable[[int, list[Taken]], None] = lambda lab, taken: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Taken]:
    """All runs, each for its share of `within_s`. done(lab, taken) is called after each lab. A bench for each lab:
    models that a lab loads it loads once."""
    total = sum(map(len, runs.values()))
    budget = Budget(within_s, total, clock)
    taken: list[Taken] = []
    for lab, some in runs.items():
        bench, of_lab = bench_for(), []
        for run in some:
            share = budget.share()
            report(f"{len(taken) + 1}/{total} lab {lab:02d}, up to {share:.0f} s: {run.words}")
            found = take(run, bench, share) if share > 0 else Taken(run, (), "no time was left", 0.0)
            of_lab.append(found)
            taken.append(found)
        del bench
        _free_memory()
        done(lab, of_lab)
    return taken


def _free_memory() -> None:
    """Of the models of a lab that is done."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- rehearsing ------------------------------------------------------------------------------------------------------


SMALL = 16  # in a rehearsal: the most of anything that is counted


def in_small(run: Run) -> Run:
    """The same run with small numbers: of whole numbers SMALL at most, of numbers to choose from the least."""
    settings = dict(run.settings)
    for setting in run.experiment.settings:
        value = settings.get(setting.name, setting.default)
        if setting.kind == "int":
            settings[setting.name] = max(int(setting.low or 0), min(value, SMALL))
        elif setting.kind == "choice" and is_number(value):
            settings[setting.name] = min(one for one in setting.choices if is_number(one))
    return replace(run, settings=settings)


class RehearsalBench(Bench):
    """A bench on the CPU that gives a tiny model of the same kind for the shape of a public one."""

    def model(self, name, *, arrangement: str = "plain", **settings):
        from workbench.models import prepare
        from workbench.models.shapes import public_name

        if not isinstance(name, str) or public_name(name) is None:
            return super().model(name, arrangement=arrangement, **settings)
        key = ("rehearsal", name, arrangement, str(settings.get("dtype")))
        if key not in self._models:
            self.check_stop()
            if arrangement == "plain":
                self._models[key] = stand_in(name, settings.get("dtype"))
            else:
                self._models[key] = prepare(self.model(name, **settings), compile=arrangement == "compiled")
        return self._models[key]


def stand_in(name: str, dtype=None):
    """A Decoder like the public model of that name, but tiny: 2 layers of 64."""
    import torch

    from workbench.models.assembly import fill, hollow_decoder, random_tensors
    from workbench.models.shapes import public_shape

    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.bfloat16
    config = tiny_shape(public_shape(name))
    model = hollow_decoder(config, name=name, tokenizer=None)
    device = torch.device("cpu")
    return fill(model, random_tensors(model, dtype, device, 0), device)


def tiny_shape(config: ModelConfig) -> ModelConfig:
    """The same kind of model with 2 layers of width 64 and 4 heads."""
    latent = config.latent_attention
    if latent is not None:
        latent = replace(
            latent,
            kv_rank=32,
            query_rank=latent.query_rank and 32,
            content_head_dim=16,
            rotary_head_dim=16,
            value_head_dim=16,
        )
    return replace(
        config,
        vocab_size=512,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=max(1, 4 * config.num_kv_heads // config.num_heads),
        head_dim=16 if latent is None else latent.key_head_dim,
        intermediate_size=128,
        latent_attention=latent,
        bos_token_id=0,
        eos_token_ids=(0,),
    )


def _shown(value: object) -> str:
    name = value if isinstance(value, str) else getattr(value, "name", None)
    return str(name or value)[:60]
