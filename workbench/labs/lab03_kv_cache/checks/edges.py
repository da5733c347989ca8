"""Lab 03, the edges of its exercises: cases that the statements name and that are no ordinary ones."""

from __future__ import annotations

import random

from workbench.labs.lab03_kv_cache.checks import cache, prefill


def both(*makers):
    """The cases of several makers, one after the other."""
    return lambda draw: [case for maker in makers for case in maker(draw)]


def second_turn_cases(draw: random.Random) -> list[dict]:
    """Some tokens are remembered already: the positions go on behind them."""
    return [
        prefill.prefill_case(draw, 7, 3, remembered=5),
        prefill.prefill_case(draw, 4, 8, remembered=1, sequence="chat"),
    ]


def grouped_and_ragged_cases(draw: random.Random) -> list[dict]:
    return [cache.ragged_script(draw, heads=4, kv_heads=2).case(), *cache.multi_query_cases(draw)]
