"""What layers with experts do in place of a feed-forward (`models.experts`), operation by operation.

N rows choose k of E experts each, so D of them are read, D = E·(1 − (1 − k/E)^N) in the mean where all are chosen
alike. FLOPs grow with N·k, bytes with D: one row reads k experts, a batch soon all of them, and from then on a row more
reads nothing more. Launches are for each expert that is read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workbench.errors import WorkbenchError
from workbench.instruments.cost_operations import OperationCosts
from workbench.models.config import ModelConfig
from workbench.models.experts import expected_different

if TYPE_CHECKING:
    from workbench.instruments.cost_layers import LayerCounter

AROUND = 5  # launches for each expert beside its feed-forward: two selections of rows, places, product, sum


def different_experts(config: ModelConfig, rows: int, given: float | None = None) -> float:
    """D of a step over N rows, in the mean of the layers with experts; `given` where it was counted. 0 without experts.

    Raises WorkbenchError for a given number that cannot be."""
    if config.experts is None:
        if given is not None:
            raise WorkbenchError("different_experts goes with a shape that has experts")
        return 0.0
    e = config.experts
    if given is None:
        return expected_different(e.num_experts, e.experts_per_token, rows)
    if not e.experts_per_token <= given <= min(e.num_experts, rows * e.experts_per_token):
        raise WorkbenchError(
            f"{rows} rows choose from {e.experts_per_token} to {min(e.num_experts, rows * e.experts_per_token)}"
            f" different"
            f" experts, got {given}"
        )
    return given


def unread_weights(config: ModelConfig, different: float) -> float:
    """Weights of experts that a step does not read."""
    if config.experts is None:
        return 0.0
    e = config.experts
    return len(config.expert_layers) * (e.num_experts - different) * 3 * config.hidden_size * e.intermediate_size


def expert_operations(count: LayerCounter, different: float, arrangement: str) -> list[OperationCosts]:
    """Router, experts, shared experts, of all layers that have them."""
    config, layers = count.config, len(count.config.expert_layers)
    if not layers:
        return []
    e, d, rows = config.experts_shape, config.hidden_size, count.rows
    wide, chosen = e.intermediate_size, rows * e.experts_per_token
    scores = rows * e.num_experts
    routing = 7 + 3 * e.normalize + e.router_bias + (e.scaling != 1)  # scores, choice, weights, order by expert
    if e.groups_per_token < e.num_groups:
        routing += 7 + (e.scoring == "sigmoid")
    if count.narrow:  # scores are float32: rows, and as loaded the router's own weights, there; weights back
        routing += 2 if arrangement == "fast" else 3 + e.router_bias
    operations = [
        count.product("router", "mlp", d, e.num_experts, bias=e.router_bias, count=layers),
        count.elementwise("routing", layers, routing, 4 * scores, 2 * scores),
    ]
    for name, size_in, size_out in _products("expert", d, wide, arrangement):
        operations.append(_of_experts(count, name, size_in, size_out, different))
    values = chosen * wide
    operations.append(_many(count.elementwise("expert activation", layers, 2, 3 * values, 2 * values), different))
    operations.append(_many(count.elementwise("expert sum", layers, AROUND, 4 * chosen * d, 3 * chosen * d), different))
    if e.shared_experts:
        inner = e.shared_experts * wide
        for name, size_in, size_out in _products("shared", d, inner, arrangement):
            operations.append(count.product(name, "mlp", size_in, size_out, count=layers))
        values = rows * inner
        operations.append(count.elementwise("shared activation", layers, 2, 3 * values, 2 * values))
        operations.append(count.elementwise("shared sum", layers, 1, 2 * rows * d, rows * d))
    return operations


def _products(what: str, d: int, wide: int, arrangement: str) -> list[tuple[str, int, int]]:
    up = (
        [(f"{what} gate_up", d, 2 * wide)]
        if arrangement == "fast"
        else [(f"{what} gate", d, wide), (f"{what} up", d, wide)]
    )
    return [*up, (f"{what} down", wide, d)]


def _of_experts(count: LayerCounter, name: str, size_in: int, size_out: int, different: float) -> OperationCosts:
    """A product of every expert that is read, over all N·k rows together."""
    layers, chosen = len(count.config.expert_layers), count.rows * count.config.experts_shape.experts_per_token
    one = count.product(name, "mlp", size_in, size_out, rows=chosen, count=layers)
    each = max(1, round(chosen / different))  # rows that an expert's weights meet
    weights = one.weight_bytes * different
    return replace(_many(one, different), weight_bytes=weights, rows=each)


def _many(one: OperationCosts, different: float) -> OperationCosts:
    """Launched for each expert that is read; what it moves and computes is counted already."""
    return replace(one, launches=round(one.launches * different), kernels=round(one.kernels * different))
