"""Lab 11, serving: its exercises and their visible checks. Expected values are worked out beside the judges."""

from __future__ import annotations

from workbench.grading.check import Exercise, ExerciseSet, claim, demands
from workbench.labs.lab11_serving.checks import admission, events, goodput, policy, probes, stops

PRELUDE = """\
import functools
import json
import math

import workbench as wb
from workbench import checks
from workbench.decoding.sequence import Request
from workbench.labs.lab11_serving.checks import parts
from workbench.labs.lab11_serving.checks.parts import Timed
from workbench.serving.api.choices import Piece
from workbench.serving.metrics import Objectives"""


EXERCISES = ExerciseSet(
    name="11_serving",
    lab=11,
    prelude=PRELUDE,
    exercises=(
        Exercise(
            "server-stops",
            "Stop strings in a stream",
            "MyStops",
            (
                claim("held-back", probes.run_stops, stops.judge_stops, stops.hold_cases, points=2),
                claim("first", probes.run_stops, stops.judge_stops, stops.first_cases, points=2),
                claim("any-pieces", probes.run_stops, stops.judge_stops, stops.chunk_cases, points=2),
                demands(
                    probes.run_demand, claim("nothing-lost", probes.run_stops, stops.judge_stops, stops.lost_cases)
                ),
            ),
            given=(),
            withheld=("workbench.decoding.text:StopStrings",),
        ),
        Exercise(
            "server-events",
            "Server-sent events",
            "MyEvents",
            (
                claim("chunks", probes.run_events, events.judge_events, events.chunk_cases, points=2),
                claim("one-line", probes.run_events, events.judge_events, events.line_cases, points=2),
                claim("ends", probes.run_events, events.judge_events, events.end_cases, points=2),
                demands(
                    probes.run_demand,
                    claim("several", probes.run_events, events.judge_events, events.several_cases),
                    claim("silence", probes.run_events, events.judge_events, events.ping_cases),
                ),
            ),
            given=("Piece",),
        ),
        Exercise(
            "server-admission",
            "When will its first token come?",
            "admission",
            (
                claim("places", probes.run_wait, admission.judge_wait, admission.place_cases, points=2),
                claim("rows", probes.run_wait, admission.judge_wait, admission.budget_cases, points=2),
                claim("costs", probes.run_wait, admission.judge_wait, admission.cost_cases),
                claim("retry-after", probes.run_retry, admission.judge_retry, admission.retry_cases),
                demands(
                    probes.run_demand,
                    claim("edges", probes.run_wait, admission.judge_wait, admission.edge_cases),
                    claim("deadline", probes.run_retry, admission.judge_retry, admission.deadline_cases),
                ),
            ),
            given=(),
        ),
        Exercise(
            "server-goodput",
            "Goodput",
            "counting",
            (
                claim("tpot", probes.run_goodput, goodput.judge_rates, goodput.rate_cases),
                claim("limits", probes.run_goodput, goodput.judge_good, goodput.limit_cases, points=2),
                claim("window", probes.run_goodput, goodput.judge_goodput, goodput.window_cases, points=2),
                claim("vllm-bench", probes.run_goodput, goodput.judge_vllm, goodput.vllm_cases),
                demands(probes.run_demand, claim("edges", probes.run_goodput, goodput.judge_all, goodput.edge_cases)),
            ),
            given=("Objectives", "Timed"),
        ),
        Exercise(
            "server-policy",
            "A policy that knows the cache",
            "by_prefix",
            (
                claim("cached", probes.run_order, policy.judge_order, policy.cached_cases, points=2),
                claim("patience", probes.run_order, policy.judge_order, policy.patience_cases, points=2),
                claim("hits", probes.run_policy, policy.judge_hits, policy.hit_cases, points=2),
            ),
            given=("Request",),
            # of the engine that runs with the answer's policy, what it needs no draft and no GPU for
            withheld=(
                "workbench.speculation.drafts:draft_for",
                "workbench.speculation.engine:Speculator",
                "workbench.models.graphs:GraphedSteps",
                "workbench.kv.paged_static:StaticPaged",
                "workbench.kv.paged_triton:Kernels",
                "workbench.decoding.device_sampling:drawn",
                "workbench.serving.ahead:OneStepAhead",
                "workbench.decoding.guide:check_guide",
            ),
        ),
    ),
)
