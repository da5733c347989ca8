"""Experiments: each a plain generator of Measurements, with three callers (a panel, the record, a test).

>>> from workbench.experiments import run_experiment
>>> run_experiment("naive.step_time", {"max_length": 64})  # doctest: +SKIP
[Measurement(name='naive.step_time', ...), ...]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workbench.errors import unknown
from workbench.experiments.contract import Experiment, Setting

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement


def list_experiments(lab: int | None = None) -> list[Experiment]:
    """All experiments, or those of one lab, in the order of the course."""
    from workbench.experiments import (
        draft_grammar,
        draft_heads,
        draft_origins,
        draft_peers,
        draft_speed,
        draft_thresholds,
        draft_trees,
        kernel_attention,
        kernel_bounds,
        kernel_crossover,
        kernel_decode,
        kernel_matvec,
        kernel_tiles,
        kernel_traffic,
        kv_cache,
        naive_generation,
        paging_allocators,
        paging_blocks,
        paging_prefixes,
        peers,
        prediction,
        quantize_awq_search,
        quantize_decode,
        quantize_gptq_steps,
        quantize_numbers,
        quantize_outliers,
        quantize_row,
        quantize_table,
        serve_load,
        serve_overhead,
        serve_peers,
        serve_steps,
        serve_timelines,
        serve_twin,
        smaller_convert,
        smaller_decode,
        smaller_kv_formats,
        smaller_quality,
        smaller_windows,
        speculate_batches,
        speculate_exactness,
        speculate_lengths,
        speculate_stepper,
        where_time_goes,
        zoo,
    )

    found = [
        *zoo.EXPERIMENTS,
        *naive_generation.EXPERIMENTS,
        *where_time_goes.EXPERIMENTS,
        *prediction.EXPERIMENTS,
        *kv_cache.EXPERIMENTS,
        *smaller_quality.EXPERIMENTS,
        *smaller_kv_formats.EXPERIMENTS,
        *smaller_windows.EXPERIMENTS,
        *smaller_convert.EXPERIMENTS,
        *smaller_decode.EXPERIMENTS,
        *quantize_numbers.EXPERIMENTS,
        *quantize_row.EXPERIMENTS,
        *quantize_table.EXPERIMENTS,
        *quantize_decode.EXPERIMENTS,
        *quantize_outliers.EXPERIMENTS,
        *quantize_awq_search.EXPERIMENTS,
        *quantize_gptq_steps.EXPERIMENTS,
        *speculate_stepper.EXPERIMENTS,
        *speculate_exactness.EXPERIMENTS,
        *speculate_lengths.EXPERIMENTS,
        *speculate_batches.EXPERIMENTS,
        *peers.EXPERIMENTS,
        *draft_origins.EXPERIMENTS,
        *draft_thresholds.EXPERIMENTS,
        *draft_trees.EXPERIMENTS,
        *draft_heads.EXPERIMENTS,
        *draft_grammar.EXPERIMENTS,
        *draft_speed.EXPERIMENTS,
        *draft_peers.EXPERIMENTS,
        *serve_timelines.EXPERIMENTS,
        *serve_steps.EXPERIMENTS,
        *serve_load.EXPERIMENTS,
        *serve_overhead.EXPERIMENTS,
        *serve_peers.EXPERIMENTS,
        *serve_twin.EXPERIMENTS,
        *paging_blocks.EXPERIMENTS,
        *paging_allocators.EXPERIMENTS,
        *paging_prefixes.EXPERIMENTS,
        *kernel_traffic.EXPERIMENTS,
        *kernel_tiles.EXPERIMENTS,
        *kernel_bounds.EXPERIMENTS,
        *kernel_matvec.EXPERIMENTS,
        *kernel_attention.EXPERIMENTS,
        *kernel_crossover.EXPERIMENTS,
        *kernel_decode.EXPERIMENTS,
    ]
    return [e for e in found if lab is None or e.lab == lab]


def experiment(name: str) -> Experiment:
    """The experiment of that name. Raises WorkbenchError that names the nearest."""
    known = {e.name: e for e in list_experiments()}
    if name not in known:
        raise unknown("experiment", name, known)
    return known[name]


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
