"""Launches of a decode step as a GPU would make them, counted without one, and those that are predicted."""

from __future__ import annotations

import sys
from functools import cache

import pytest

from workbench.instruments.costs import decode_costs, prepared_on
from workbench.instruments.device import PUBLISHED
from workbench.models.shapes import public_shape
from workbench.recorder import step_launches

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")
LAYERS = 32
ROWS = (1, 8)  # up to 2 rows are multiplied and added, more go through tensor cores


@cache
def counted(name: str = "llama-3-8b") -> dict[int, dict[str, dict[str, int]]]:
    return step_launches.table(name, (*ROWS, 40) if name == "llama-3-8b" else ROWS[-1:], 4096)


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
    """The last norm, the head; for torch the tokens of the step before, the embedding, the best token, the next
    positions."""
    for rows in ROWS:
        ours, torchs = (sum(counted()[rows][kind].values()) for kind in ("triton", "torch"))
        both = sum(a_layer(rows).values()) * LAYERS
        assert ours + torchs == both + 2 + 10


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-0.6b", "qwen2.5-0.5b", "gemma-3-1b"])
def test_as_many_launches_are_predicted_as_are_counted(name):
    """Norms a head, biases, norms after the parts; with 40 rows no product takes anything in."""
    for rows, kinds in counted(name).items():
        costs = decode_costs(
            public_shape(name),
            batch=rows,
            context=1000,
            weight_bytes_per_element=2,
            kv="paged",
            arrangement="kernels",
            recorded=True,
        )
        launches = sum(sum(kind.values()) for kind in kinds.values())
        assert costs.launches == launches, (rows, kinds, [(o.name, o.launches) for o in costs.operations])


def test_an_8b_step_is_predicted_with_what_it_launches_and_as_arranged_for_a_cpu_with_four_times_as_many():
    shape = public_shape("llama-3-8b")
    look = {"batch": 1, "context": 1000, "weight_bytes_per_element": 2}
    assert prepared_on(PUBLISHED["h200"], shape) == "kernels"
    assert decode_costs(shape, **look, kv="paged", arrangement="kernels", recorded=True).launches == 204
    assert decode_costs(shape, **look).launches == 777
