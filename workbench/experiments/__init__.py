"""Experiments: each a plain generator of Measurements, with three callers (a panel, the record, a test).

>>> from workbench.experiments import run_experiment
>>> run_experiment("naive.step_time", {"max_length": 64})  # doctest: +SKIP
[Measurement(name='naive.step_time', ...), ...]

This is the kit that experiments are made with; they themselves stand in their labs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workbench import registry
from workbench.experiments.contract import Experiment, Setting

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement


def list_experiments(lab: int | None = None) -> list[Experiment]:
    """All experiments, or those of one lab, in the order of the course."""
    return registry.labs().experiments(lab)


def experiment(name: str) -> Experiment:
    """The experiment of that name. Raises WorkbenchError that names the nearest."""
    return registry.labs().experiment(name)


def run_experiment(
    name: str,
    settings: Mapping[str, Any] | None = None,
    bench: Bench | None = None,
    learner: Mapping[str, Any] | None = None,
) -> list[Measurement]:
    """Run one to its end. Every setting is checked before anything runs; texts are parsed as on a command line.

    learner: your own code for a part of it, as {"loop": my_loop}; it is measured beside ours.
    """
    chosen = experiment(name)
    values, parts = chosen.complete(settings), chosen.check_learner(learner)
    if bench is None:
        from workbench.instruments.bench import Bench

        bench = Bench()
    return list(chosen.run(bench, **values, **parts))


__all__ = ["Experiment", "Setting", "experiment", "list_experiments", "run_experiment"]
