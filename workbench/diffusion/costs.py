"""What a denoising pass costs: rows, FLOPs, bytes, and the time that `instruments` predicts from them."""

from __future__ import annotations

from workbench.errors import WorkbenchError
from workbench.instruments.costs import StepCosts, step_costs, with_rectangle
from workbench.models.config import ModelConfig


def pass_costs(
    config: ModelConfig,
    *,
    rows: int,
    cached: int = 0,
    logit_rows: int | None = None,
    batch: int = 1,
    weight_bytes_per_element: float = 2,
    arrangement: str = "plain",
) -> StepCosts:
    """One pass over `rows` rows of each of `batch` canvases behind `cached` finished ones, logits of `logit_rows` each.

    A step like any other, but that its rows see each other both ways: attention is the whole rectangle of
    rows × (cached + rows) pairs, where a causal step visits about half of the new ones. Where a pass also sends a block
    that was just finished, that block does not see the next one; the rectangle is computed there too, and masked.
    logit_rows: default all rows.
    """
    logit_rows = rows if logit_rows is None else logit_rows
    if not 0 <= logit_rows <= rows:
        raise WorkbenchError(f"logit_rows must be from 0 to {rows}, the rows of a canvas; got {logit_rows}")
    return with_rectangle(
        step_costs(
            config,
            new_tokens=[rows] * batch,
            contexts=[cached] * batch,
            logit_rows=logit_rows * batch,
            weight_bytes_per_element=weight_bytes_per_element,
            kv="contiguous",
            arrangement=arrangement,
        )
    )
