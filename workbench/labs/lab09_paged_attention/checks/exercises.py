"""Lab 09, PagedAttention: its exercises and their visible checks. What is right is worked out from the definitions."""

from __future__ import annotations

from workbench.grading.check import Exercise, ExerciseSet, claim, demands
from workbench.labs.lab09_paged_attention.checks import attention, cow, pool, prefix, probes, waste

PRELUDE = """\
import hashlib

import torch

import workbench as wb
from workbench import checks
from workbench.errors import WorkbenchError
from workbench.kv.blocks import NoRoom
from workbench.labs.lab09_paged_attention.checks import parts
from workbench.labs.lab09_paged_attention.checks.parts import Blocks, Request, Tables"""


EXERCISES = ExerciseSet(
    name="09_paged_attention",
    lab=9,
    prelude=PRELUDE,
    exercises=(
        Exercise(
            "paged-pool",
            "Who holds a block?",
            "MyPool",
            (
                claim("one-holder", probes.run_pool, pool.judge_pool, pool.alone_cases),
                claim("shared", probes.run_pool, pool.judge_pool, pool.shared_cases, points=3),
                demands(
                    probes.run_demand,
                    claim("whole", probes.run_pool, pool.judge_pool, pool.refused_cases),
                    claim("edges", probes.run_pool, pool.judge_pool, pool.edge_cases),
                ),
                claim("large", probes.run_large_pool, pool.judge_large, pool.large_cases, speedup=pool.OVER_SEARCHING),
            ),
            given=("Blocks", "NoRoom", "WorkbenchError"),
        ),
        Exercise(
            "paged-cow",
            "Copy on write",
            "MyTables",
            (
                claim("forks", probes.run_tables, cow.judge_tables, cow.fork_cases, points=3),
                claim("full-blocks", probes.run_tables, cow.judge_tables, cow.full_cases, points=2),
                claim("together", probes.run_tables, cow.judge_tables, cow.together_cases),
                demands(
                    probes.run_demand,
                    claim("room", probes.run_tables, cow.judge_tables, cow.room_cases),
                    claim("refused", probes.run_tables, cow.judge_tables, cow.refused_cases),
                ),
            ),
            given=("NoRoom", "Tables", "WorkbenchError"),
        ),
        Exercise(
            "paged-attention",
            "Attention through a table",
            "paged_attention",
            (
                claim(
                    "scattered", probes.run_attention, attention.judge_attention, attention.scattered_cases, points=3
                ),
                claim("grouped-heads", probes.run_attention, attention.judge_attention, attention.grouped_cases),
                claim(
                    "half-full", probes.run_attention, attention.judge_attention, attention.half_full_cases, points=2
                ),
                demands(
                    probes.run_demand,
                    claim("several", probes.run_attention, attention.judge_attention, attention.several_cases),
                    claim("other-sizes", probes.run_attention, attention.judge_attention, attention.size_cases),
                ),
                claim(
                    "block-by-block",
                    probes.run_attention_steps,
                    attention.judge_steps,
                    attention.step_cases,
                    speedup=attention.OVER_TOKENS,
                ),
            ),
            given=("WorkbenchError",),
        ),
        Exercise(
            "paged-prefix",
            "Equal beginnings",
            "MyPrefixCache",
            (
                claim("longest", probes.run_prefix, prefix.judge_prefix, prefix.chain_cases, points=3),
                claim("what-stands-before", probes.run_prefix, prefix.judge_prefix, prefix.before_cases, points=2),
                claim("evict", probes.run_prefix, prefix.judge_prefix, prefix.evict_cases, points=2),
                demands(
                    probes.run_demand,
                    claim("keys", probes.run_prefix, prefix.judge_prefix, prefix.key_cases),
                    claim("used", probes.run_prefix, prefix.judge_prefix, prefix.use_cases),
                ),
            ),
            given=("WorkbenchError",),
        ),
        Exercise(
            "paged-waste",
            "What is wasted",
            "waste",
            (
                claim("held", probes.run_slots, waste.judge_slots, waste.held_cases),
                claim("published", probes.run_account, waste.judge_account, waste.published_cases, points=2),
                demands(
                    probes.run_demand,
                    claim("gaps", probes.run_account, waste.judge_account, waste.gap_cases),
                    claim("edges", probes.run_account, waste.judge_account, waste.edge_cases),
                    claim("refused", probes.run_waste_refused, waste.judge_refused, waste.refused_cases),
                ),
            ),
            given=("Request", "WorkbenchError"),
        ),
    ),
)
