"""Lab 08, continuous batching: its exercises and their visible checks. Expected values are worked out beside the
judges."""

from __future__ import annotations

from workbench.grading.check import Exercise, ExerciseSet, claim, demands
from workbench.labs.lab08_continuous_batching.checks import chunks, deadline, probes, scheduler, turn, waste

PRELUDE = """\
import workbench as wb
from workbench import checks
from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.kv.blocks import BlockTables, NoRoom
from workbench.labs.lab08_continuous_batching.checks import parts
from workbench.labs.lab08_continuous_batching.checks.parts import SchedulerState
from workbench.serving.scheduler import Work"""


EXERCISES = ExerciseSet(
    name="08_continuous_batching",
    lab=8,
    prelude=PRELUDE,
    exercises=(
        Exercise(
            "batching-waste",
            "Padding",
            "waste",
            (
                claim("static", probes.run_counts, waste.judge_counts, waste.static_cases, points=3),
                claim("share", probes.run_counts, waste.judge_share, waste.share_cases),
                claim("continuous", probes.run_counts, waste.judge_counts, waste.continuous_cases, points=2),
                demands(
                    probes.run_demand,
                    claim("uneven", probes.run_counts, waste.judge_all, waste.uneven_cases),
                    claim("nothing", probes.run_counts, waste.judge_all, waste.edge_cases),
                    claim("refused", probes.run_counts_refused, waste.judge_refused, waste.refused_cases),
                ),
            ),
            given=("WorkbenchError",),
        ),
        Exercise(
            "batching-turn",
            "Iteration-level scheduling",
            "turn",
            (
                claim("finished", probes.run_turn, turn.judge_turn, turn.finish_cases, points=2),
                claim("slots", probes.run_turn, turn.judge_turn, turn.order_cases, points=2),
                claim("blocks", probes.run_turn, turn.judge_turn, turn.room_cases, points=2),
                demands(probes.run_demand, claim("edges", probes.run_turn, turn.judge_turn, turn.edge_cases)),
            ),
            given=("WorkbenchError",),
        ),
        Exercise(
            "batching-chunks",
            "Prompts in chunks",
            "chunks",
            (
                claim("decodes-first", probes.run_plan, chunks.judge_plan, chunks.decode_cases, points=2),
                claim("chunks", probes.run_plan, chunks.judge_plan, chunks.chunk_cases, points=2),
                claim(
                    "postprocess", probes.run_postprocess, chunks.judge_postprocess, chunks.postprocess_cases, points=2
                ),
                demands(probes.run_demand, claim("tight", probes.run_plan, chunks.judge_plan, chunks.tight_cases)),
            ),
            given=("Work", "WorkbenchError"),
        ),
        Exercise(
            "batching-deadline",
            "Whose turn?",
            "by_slack",
            (
                claim("slack", probes.run_order, deadline.judge_order, deadline.slack_cases, points=3),
                claim("ties", probes.run_order, deadline.judge_order, deadline.tie_cases),
                claim("patience", probes.run_order, deadline.judge_order, deadline.patience_cases, points=2),
                demands(
                    probes.run_demand, claim("later", probes.run_order, deadline.judge_order, deadline.later_cases)
                ),
            ),
            given=("WorkbenchError",),
        ),
        Exercise(
            "batching-scheduler",
            "The scheduler",
            "MyScheduler",
            (
                claim("budget", probes.run_scheduler, scheduler.judge_run, scheduler.budget_cases, points=2),
                claim("admission", probes.run_scheduler, scheduler.judge_run, scheduler.admission_cases, points=2),
                claim("preemption", probes.run_scheduler, scheduler.judge_run, scheduler.preemption_cases, points=2),
                demands(
                    probes.run_demand, claim("door", probes.run_scheduler, scheduler.judge_run, scheduler.door_cases)
                ),
            ),
            given=("NoRoom", "SchedulerState", "Work", "WorkbenchError"),
        ),
    ),
)
