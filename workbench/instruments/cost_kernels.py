"""What every row passes through where the model is arranged with our kernels, as on a GPU (`workbench.models.fused`).

    operation       up to 32 rows, weights as they are         more rows, or weights in few bits
    norm            in the product that reads it               a launch, which adds what came before
    rotary          a launch: norms of q and k a head, and with a paged cache the write of k and v
    activation      in up's product                            a launch
    residual        in the products of o and down              in the next norm

Norms after attention and feed-forward (Gemma) are launches, and so are those before, which add what those give.
`tests/engine/test_step_launches.py` holds the launches to those of the real model.
"""

from __future__ import annotations

from dataclasses import replace

from workbench.errors import WorkbenchError
from workbench.instruments.cost_layers import LayerCounter
from workbench.instruments.cost_operations import OperationCosts, together
from workbench.models.config import ModelConfig

MAX_ROWS = 32  # that our products take; `models.linear.TritonMatvec`
RECORDED = 9  # launches of `models.graphs.GraphedSteps._step` beside the model's


def why_no_kernels(config: ModelConfig) -> str:
    """Why a shape is not counted as arranged with kernels; "" where it is."""
    if config.is_gpt2:
        return "GPT-2's block has no kernels"
    if config.experts is not None:
        return "experts are run with torch's operations"
    if config.latent_attention is not None:
        return "latent attention is counted with torch's operations only"
    return ""


class KernelCounter(LayerCounter):
    """`LayerCounter` for the arrangement "kernels". paged: k and v are written to their blocks as they turn."""

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        weight: float,
        wide: float,
        linear: float | None,
        head: float | None,
        *,
        paged: bool,
    ) -> None:
        super().__init__(config, rows, weight, wide, linear, head)
        reason = why_no_kernels(config)
        if reason:
            raise WorkbenchError(f"arrangement 'kernels' does not go with this shape ({reason}); count 'fast'")
        self.paged, self.values = paged, rows * config.hidden_size
        self.in_products = rows <= MAX_ROWS and self.linear == self.weight
        self.adds_in_products = self.in_products and not config.post_norms

    def start(self, arrangement: str) -> list[OperationCosts]:
        lookup = OperationCosts(
            "embedding",
            "other",
            1,
            launches=1,
            weight_bytes=self.values * self.weight,
            activation_bytes=self.values * self.wide,
            bytes_written=self.values * self.wide,
        )
        scale = self.elementwise("embedding scale", 1, 1, self.values, self.values)
        return [lookup, scale] if self.config.embedding_scale != 1 else [lookup]

    def end(self, logit_rows: int, arrangement: str) -> list[OperationCosts]:
        _, *others = super().end(logit_rows, arrangement)
        return [together(self._norms()), *others]

    def _norms(self) -> list[OperationCosts]:
        """Those of all layers, and the last one."""
        d, n, within = self.config.hidden_size, self.values, 2 * self.layers
        if self.adds_in_products:
            return [self.elementwise("norm", within, 0, 0, 0, d), self.elementwise("norm", 1, 1, n, n, d)]
        adding = [self.elementwise("norm", 1, 1, n, n, d), self.elementwise("norm", within, 1, 2 * n, 2 * n, d)]
        return adding + ([self.elementwise("norm", within, 1, n, n, d)] if self.config.post_norms else [])

    def around_attention(self, arrangement: str) -> list[OperationCosts]:
        q, kv, rows = self.q, self.kv, self.rows
        table, head_norms = rows * 2 * self.config.rotary_head_dim, (q + kv if self.config.qk_norm else 0)
        read, written = (q + 2 * kv, q) if self.paged else (q + kv, q + kv)
        turns = [self.elementwise("rotary", self.owners, 1, rows * read + table, rows * written, head_norms)]
        if self.sharers:
            alone = q if self.config.qk_norm else 0
            turns.append(self.elementwise("rotary", self.sharers, 1, rows * q + table, rows * q, alone))
        products = [one for one in self._fast_attention() if one.name not in ("qk norm", "rotary")]
        return [*products, together(turns)]

    def feed_forward(self, arrangement: str) -> list[OperationCosts]:
        c, rows, wide = self.config, self.rows, self.config.intermediate_size
        up = self.product("gate_up", "mlp", c.hidden_size, 2 * wide, bias=c.mlp_bias)
        down = self.product("down", "mlp", wide, c.hidden_size, bias=c.mlp_bias)
        if not self.in_products:
            return [up, self.elementwise("activation", self.layers, 1, rows * 2 * wide, rows * wide), down]
        halved = self.layers * rows * wide * self.wide  # what the gate takes in is not written
        up = replace(up, activation_bytes=up.activation_bytes - halved, bytes_written=up.bytes_written - halved)
        if not self.adds_in_products:
            return [up, down]
        return [up, down, self.elementwise("residual", self.layers, 0, 2 * self.values, 0)]


def recorded_operation(config: ModelConfig, logit_rows: int, wide: float) -> OperationCosts:
    """What a recorded step does beside the model: the tokens of the step before, the logits in float32, the best token
    and its logit, the positions of the next step."""
    logits = logit_rows * config.vocab_size
    return OperationCosts(
        "recorded step",
        "other",
        1,
        launches=RECORDED,
        elementwise_bytes=logits * (wide + 3 * 4),
        bytes_written=logits * 4,
    )
