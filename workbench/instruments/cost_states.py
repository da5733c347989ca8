"""What a layer that keeps a state costs in a step: its weights, its scan, and the states that are read and written.

A state is read and written once a step and sequence, however many tokens come: within a step it stays where it is
used. That is the whole difference to keys and values: nothing here depends on how long a text is (but for Hyena, whose
state is its past). The scan is counted in its recurrent form, whatever form runs; a chunk computes more in fewer steps.
Projections count as matrix products of the module; the other parameters of a mixer (convolutions, decays, norms) are
read once a step as every weight is. Launches are those of the products, and one for a scan, which is what a fused
kernel would need: torch's own operations between the products are many more and are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from workbench.instruments.cost_operations import OperationCosts, together
from workbench.models.config import ModelConfig
from workbench.models.state_shape import STATE_BYTES, mixer_matrices, mixer_parameters, scan_flops


def state_operations(
    config: ModelConfig, new_tokens: Sequence[int], weight: float, wide: float, linear: float, *, kept: bool
) -> list[OperationCosts]:
    """The operations of `kv.advance` in all state layers. kept: False where the kv keeps no state between steps."""
    operations = []
    for kind, layers in Counter(config.mixer_of(layer) for layer in config.state_layers).items():
        operations.append(_projections(config, kind, layers, sum(new_tokens), weight, wide, linear))
        operations.append(_scan(config, kind, layers, new_tokens, kept=kept))
    if not operations:
        return []
    names = dict.fromkeys(one.name for one in operations)
    return [together(one for one in operations if one.name == name) for name in names]


def _projections(
    config: ModelConfig, kind: str, layers: int, rows: int, weight: float, wide: float, linear: float
) -> OperationCosts:
    """All matrices of the mixers, and what else they have of parameters."""
    assert config.state_shape is not None, "state layers have sizes"
    matrices = mixer_matrices(kind, config.state_shape, config.hidden_size)
    products = sum(inputs * outputs for inputs, outputs in matrices)
    others = mixer_parameters(kind, config.state_shape, config.hidden_size) - products
    written = rows * sum(outputs for _, outputs in matrices) * wide
    return OperationCosts(
        "mixer",
        "projections",
        layers,
        launches=layers * len(matrices),
        kernels=layers * len(matrices),
        flops=layers * 2 * rows * products,
        weight_bytes=layers * (products * linear + others * weight),
        activation_bytes=layers * (rows * sum(inputs for inputs, _ in matrices) * wide + written),
        bytes_written=layers * written,
        rows=rows,
    )


def _scan(config: ModelConfig, kind: str, layers: int, new_tokens: Sequence[int], *, kept: bool) -> OperationCosts:
    """The scan of all sequences, whose states are read and written."""
    assert config.state_shape is not None, "state layers have sizes"
    layer = next(i for i in config.state_layers if config.mixer_of(i) == kind)
    one = sum(prod(shape) for shape in config.state_shapes(layer).values()) * STATE_BYTES
    states = layers * len(new_tokens) * one if kept else 0
    a_token = scan_flops(kind, config.state_shape, config.hidden_size, config.context_length)
    return OperationCosts(
        "scan",
        "attention",
        layers,
        launches=layers * (1 if set(new_tokens) == {1} else len(new_tokens)),
        flops=layers * sum(new_tokens) * a_token,
        kv_bytes=2 * states,
        bytes_written=states,
        kv_element_bytes=STATE_BYTES,
    )
