"""The labs of the course: a folder each, found by number, name or the name of anything in it.

    labNN_name/__init__.py     one page: the lab in reading order
    labNN_name/STEM.py         an experiment, `EXPERIMENT`, named PREFIX.STEM
    labNN_name/panels/STEM.py  its panel, the one class of the file that is a `Panel`; shown by `panels.STEM()`
    labNN_name/checks/         exercises.py has the `EXERCISES`; probes, judges and given parts stand beside it

A lab imports the engine, the kits and earlier labs. Nothing here is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from workbench.errors import unknown
from workbench.grading.mistakes import Known

if TYPE_CHECKING:
    from workbench.experiments.contract import Experiment
    from workbench.grading.check import ExerciseSet
    from workbench.panels.base import Panel

LABS = (
    "lab00_start_here",
    "lab01_naive_generation",
    "lab02_where_time_goes",
    "lab03_kv_cache",
    "lab04_smaller_caches",
    "lab05_quantization",
    "lab06_speculative_sampling",
    "lab07_better_drafts",
    "lab08_continuous_batching",
    "lab09_paged_attention",
    "lab10_kernels",
    "lab11_serving",
    "lab12_pruning_and_distillation",
    "lab13_parallelism_and_experts",
    "lab14_beyond_transformers",
    "lab15_capstone",
)
FORMER_NAMES = {  # of experiments, in records that were made before they were renamed
    "time.compile": "time.compile_step",
    "cache.decode": "cache.token_times",
    "cache.batch": "cache.cache_batch",
    "decode.peers": "cache.peers",
    "smaller.decode": "smaller.variants",
    "smaller.forms": "smaller.latent",
    "quantize.row": "quantize.weight_row",
    "quantize.table": "quantize.quantizers",
    "quantize.decode": "quantize.stored_formats",
    "speculate.lengths": "speculate.draft_lengths",
    "drafts.origin": "drafts.draft_origin",
    "drafts.threshold": "drafts.draft_threshold",
    "drafts.tree": "drafts.draft_tree",
    "drafts.grammar": "drafts.draft_grammar",
    "drafts.speed": "drafts.draft_speed",
    "serving.steps": "serving.scheduler_steps",
    "serving.load": "serving.load_curve",
    "paging.blocks": "paging.block_pool",
    "paging.prefixes": "paging.prefix_hits",
    "kernels.traffic": "kernels.attention_traffic",
    "kernels.decode": "kernels.graphs",
}


def number_of(lab: str) -> int:
    """3 of "lab03_kv_cache"."""
    return int(lab[3:5])


def page(lab: str) -> ModuleType:
    """The package of a lab: its docstring, PREFIX, EXPERIMENTS and PANELS."""
    return importlib.import_module(f"{__name__}.{lab}")


def experiment_names(lab: int | None = None) -> list[str]:
    """Names of all experiments, or of those of one lab, in the order of the course."""
    return [
        f"{page(name).PREFIX}.{stem}"
        for name in LABS
        if lab is None or number_of(name) == lab
        for stem in page(name).EXPERIMENTS
    ]


def current_name(name: str) -> str:
    """The name that an experiment has today; a former name is read as that."""
    return FORMER_NAMES.get(name, name)


def experiment(name: str) -> Experiment:
    """The experiment of that name, or formerly of that name. Raises WorkbenchError that names the nearest."""
    prefix, _, stem = current_name(name).partition(".")
    for lab in LABS:
        if prefix == page(lab).PREFIX and stem in page(lab).EXPERIMENTS:
            return importlib.import_module(f"{__name__}.{lab}.{stem}").EXPERIMENT
    raise unknown("experiment", name, experiment_names())


def experiments(lab: int | None = None) -> list[Experiment]:
    """All experiments, or those of one lab, in the order of the course."""
    return [experiment(name) for name in experiment_names(lab)]


def panel_names() -> list[str]:
    """Names of all panels, in the order of the course."""
    return [stem for lab in LABS for stem in page(lab).PANELS]


def panel(name: str) -> type[Panel]:
    """The class of the panel of that name. Raises WorkbenchError that names the nearest."""
    for lab in LABS:
        if name in page(lab).PANELS:
            from workbench.panels.base import Panel

            module = importlib.import_module(f"{__name__}.{lab}.panels.{name}")
            [found] = [
                value
                for value in vars(module).values()
                if isinstance(value, type) and issubclass(value, Panel) and value.__module__ == module.__name__
            ]
            return found
    raise unknown("panel", name, panel_names())


def exercise_sets() -> dict[str, ExerciseSet]:
    """The exercises of every lab by the name of their notebook, with their visible checks only."""
    sets = [_exercises(lab) for lab in LABS if number_of(lab)]
    return {exercises.name: exercises for exercises in sets}


def hints() -> dict[str, tuple[str, ...]]:
    """The hints of every exercise, by its grade_id."""
    every: dict[str, tuple[str, ...]] = {}
    for lab in LABS:
        file = Path(__file__).parent / lab / "checks" / "hints.json"
        if file.is_file():
            every |= {name: tuple(texts) for name, texts in json.loads(file.read_text(encoding="utf-8")).items()}
    return every


def _exercises(lab: str) -> ExerciseSet:
    """With the words for its known mistakes, where there is a table of them."""
    module = importlib.import_module(f"{__name__}.{lab}.checks.exercises")
    assert module.__file__ is not None
    table = Path(module.__file__).with_name("mistakes.json")
    if not table.is_file():
        return module.EXERCISES
    return module.EXERCISES.with_known(Known(json.loads(table.read_text(encoding="utf-8"))))
