"""Launches of a decode step of Llama 3 8B's shape as a GPU would make them, counted without one."""

from __future__ import annotations

import sys
from functools import cache

import pytest

from workbench.recorder import step_launches

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")
LAYERS = 32
ROWS = (1, 8)  # up to 2 rows are multiplied and added, more go through tensor cores


@cache
def counted() -> dict[int, dict[str, dict[str, int]]]:
    return step_launches.table("llama-3-8b", ROWS, 4096)


def a_layer(rows: int) -> dict[str, int]:
    """What every layer launches: what comes as often as there are layers, or a whole number of times as often."""
    ours = {kernel: count // LAYERS for kernel, count in counted()[rows]["triton"].items() if count >= LAYERS}
    torchs = {kernel: count // LAYERS for kernel, count in counted()[rows]["torch"].items() if count >= LAYERS}
    return ours | torchs


def test_a_layer_of_one_row():
    assert a_layer(1) == {"matvec_few_rows": 4, "_turn": 1, "_paged_decode_kernel": 1}


def test_a_layer_of_eight_rows():
    assert a_layer(8) == {"matvec_many_rows": 4, "_turn": 1, "_paged_decode_kernel": 1}


def test_a_step_has_the_launches_of_its_layers_and_few_besides():
    """The last norm, the head; for torch the tokens of the step before, the embedding, the best token."""
    for rows in ROWS:
        ours, torchs = (sum(counted()[rows][kind].values()) for kind in ("triton", "torch"))
        both = sum(a_layer(rows).values()) * LAYERS
        assert ours + torchs == both + 2 + 9
