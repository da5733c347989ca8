"""What every row passes through, operation by operation: projections, norms, rotary embedding, feed-forward, head.

What lies between the projections to q, k, v and the one back, `kv.attend`, is counted in `cost_attention`.
"""

from __future__ import annotations

from dataclasses import replace

from workbench.instruments.cost_operations import OperationCosts, together
from workbench.models.config import ModelConfig

ORDER = (
    "positions",
    "embedding",
    "embedding scale",
    "rotary table",
    "norm",
    "qkv",
    "q_kv_down",
    "q_down",
    "q",
    "k",
    "v",
    "kv_down",
    "latent norm",
    "q_up",
    "qk norm",
    "rotary",
    "mixer",
    "scan",
    "absorb",
    "dequantize",
    "expand",
    "mask",
    "attention",
    "store",
    "restore",
    "o",
    "gate_up",
    "gate",
    "up",
    "activation",
    "down",
    "router",
    "routing",
    "expert gate_up",
    "expert gate",
    "expert up",
    "expert activation",
    "expert down",
    "expert sum",
    "shared gate_up",
    "shared gate",
    "shared up",
    "shared activation",
    "shared down",
    "shared sum",
    "residual",
    "logit rows",
    "head",
    "recorded step",
)


class LayerCounter:
    """The operations of one step over N rows, each with its formula; those of all layers together.

    weight, wide: bytes of an element of the weights, and of what the rows hold. linear, head: of the matrices of the
    layers, and of the head, where they are stored in another format; embedding, norms and biases stay at `weight`.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        weight: float,
        wide: float,
        linear: float | None = None,
        head: float | None = None,
    ) -> None:
        self.config, self.rows, self.weight, self.wide = config, rows, weight, wide
        self.linear = weight if linear is None else linear
        self.head = weight if head is None else head
        self.layers, self.narrow = config.num_layers, wide < 4
        self.attending = len(config.attention_layers)
        self.owners = len(config.kv_layers)  # layers with keys of their own; the others project a query only
        self.sharers = self.attending - self.owners
        self.feeding = self.layers if config.intermediate_size else 0  # layers with a feed-forward
        self.dense = self.feeding - len(config.expert_layers)  # those without experts in its place
        self.q, self.kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.mixed = config.num_heads * config.value_head_dim  # what attention gives

    def product(self, name, part, wide_in, wide_out, *, bias=False, rows=None, count=None) -> OperationCosts:
        """y = x·Wᵀ over `rows` rows: 2·rows·in·out FLOPs; x and W read, y written."""
        rows, count = self.rows if rows is None else rows, self.layers if count is None else count
        written = count * rows * wide_out * self.wide
        matrix = wide_in * wide_out * (self.head if part == "head" else self.linear)
        return OperationCosts(
            name,
            part,
            count,
            launches=count,
            kernels=count,
            flops=count * 2 * rows * wide_in * wide_out,
            weight_bytes=count * (matrix + (wide_out * self.weight if bias else 0)),
            activation_bytes=count * rows * wide_in * self.wide + written,
            bytes_written=written,
            rows=rows,
        )

    def elementwise(self, name, count, launches, read, written, weights=0) -> OperationCosts:
        """`launches` operations an occurrence, that read and write so many values an occurrence in all."""
        return OperationCosts(
            name,
            "other",
            count,
            launches=count * launches,
            weight_bytes=count * weights * self.weight,
            elementwise_bytes=count * (read + written) * self.wide,
            bytes_written=count * written * self.wide,
        )

    # -- before the first layer, and after the last ---------------------------------------------------------

    def start(self, arrangement: str) -> list[OperationCosts]:
        c, values = self.config, self.rows * self.config.hidden_size
        lookup = OperationCosts(
            "embedding",
            "other",
            1,
            launches=1,
            weight_bytes=values * self.weight,
            activation_bytes=values * self.wide,
            bytes_written=values * self.wide,
        )
        if arrangement == "fast" and self.narrow:  # the residual stream is float32
            lookup = replace(lookup, launches=2)
        found = [lookup]
        if c.is_gpt2:  # the row of the position as well, and their sum
            return [lookup, self.elementwise("positions", 1, 2, 2 * values, 2 * values, weights=values)]
        if c.embedding_scale != 1:  # the factor, rounded as the weights are, and the product
            launches = 1 if arrangement == "fast" else 2 + self.narrow
            found.append(self.elementwise("embedding scale", 1, launches, values, values))
        if not c.uses_rotary:
            return found
        table = self.rows * c.rotary_head_dim
        tables = 1 if c.local_rope_theta is None else 2
        launches = tables * (1 if arrangement == "fast" else 4 + 2 * self.narrow)
        if arrangement == "plain" and c.rotary_amplitude != 1:
            launches += 2
        return [*found, self.elementwise("rotary table", 1, launches, tables * 2 * table, tables * 2 * table)]

    def end(self, logit_rows: int, arrangement: str) -> list[OperationCosts]:
        """The norms of all layers and the last one, the choice of rows, the head."""
        c, d = self.config, self.config.hidden_size
        norms = (4 if c.post_norms else 2 if self.feeding else 1) * self.layers + 1
        norm = self._norm("norm", norms, d, arrangement, zero_centered=c.zero_centered_norms)
        chosen = logit_rows if logit_rows != self.rows else 0
        found = [norm]
        if chosen:
            found.append(self.elementwise("logit rows", 1, 1, chosen * d, chosen * d))
        head = self.product("head", "head", d, c.vocab_size, rows=logit_rows, count=1)
        return [*found, head] if logit_rows else found

    def _norm(self, name, count, size, arrangement, *, zero_centered=False) -> OperationCosts:
        """`count` norms over rows of `size` values."""
        values = self.rows * size
        if self.config.is_gpt2:
            back = self.narrow if arrangement == "fast" else 0
            moved = (1 + back) * values
            return self.elementwise(name, count, 1 + back, moved, moved, 2 * size)
        if arrangement == "fast":  # length, hypot, division, product; back to 16 bits
            read, written = (3 + self.narrow) * values, (2 + self.narrow) * values
            return self.elementwise(name, count, 4 + self.narrow, read, written, size)
        extra = 2 * self.narrow  # square, mean, + eps, rsqrt, two products; to float32 and back
        launches = self._norm_launches(zero_centered)
        return self.elementwise(name, count, launches, (4 + extra) * values, (3 + extra) * values, size)

    def _norm_launches(self, zero_centered: bool) -> int:
        """Of the plain RMSNorm; zero-centered, 1 + weight is one more, and the weight goes to float32 as well."""
        return 6 + 2 * self.narrow + (1 + self.narrow) * zero_centered

    # -- the layers ------------------------------------------------------------------------------------------

    def around_attention(self, arrangement: str) -> list[OperationCosts]:
        """The projections to q, k and v (or the latents), what is done to them, and the projection back."""
        if not self.attending:
            return []
        if self.config.latent_attention is not None:
            return self._latent(arrangement)
        return self._fast_attention() if arrangement == "fast" else self._plain_attention()

    def _plain_attention(self) -> list[OperationCosts]:
        c, d = self.config, self.config.hidden_size
        return [
            self.product("q", "projections", d, self.q, bias=c.qkv_bias, count=self.attending),
            self.product("k", "projections", d, self.kv, bias=c.qkv_bias, count=self.owners),
            self.product("v", "projections", d, self.kv, bias=c.qkv_bias, count=self.owners),
            *self._qk_norm(joined=False),
            *self._rotary(launches=7, read=5, written=4, apart=True),
            self.product("o", "projections", self.mixed, d, bias=c.attention_output_bias, count=self.attending),
        ]

    def _fast_attention(self) -> list[OperationCosts]:
        c, d = self.config, self.config.hidden_size
        alone = [self.product("q", "projections", d, self.q, bias=c.qkv_bias, count=self.sharers)]
        return [
            self.product("qkv", "projections", d, self.q + 2 * self.kv, bias=c.qkv_bias, count=self.owners),
            *(alone if self.sharers else []),
            *self._qk_norm(joined=True),
            *self._rotary(launches=3, read=5, written=3, apart=False),
            self.product("o", "projections", self.mixed, d, bias=c.attention_output_bias, count=self.attending),
        ]

    def _latent(self, arrangement: str) -> list[OperationCosts]:
        """Multi-head latent attention: to the latent and its rotary key, to q through a latent of its own or not."""
        c, shape, d = self.config, self.config.latent_shape, self.config.hidden_size
        norms = [self._norm("latent norm", self.layers, shape.kv_rank, arrangement)]
        down = ("q", self.q) if shape.query_rank is None else ("q_down", shape.query_rank)
        if arrangement == "fast":
            products = [self.product("q_kv_down", "projections", d, down[1] + shape.cached_dim)]
        else:
            products = [
                self.product(down[0], "projections", d, down[1]),
                self.product("kv_down", "projections", d, shape.cached_dim),
            ]
        if shape.query_rank is not None:
            norms.append(self._norm("latent norm", self.layers, shape.query_rank, arrangement))
            products.append(self.product("q_up", "projections", shape.query_rank, self.q))
        rotary_values = self.rows * (c.num_heads + 1) * shape.rotary_head_dim
        joined = self.rows * (self.q + shape.cached_dim)  # each put together again with what was not rotated
        if arrangement == "fast":  # q's and k's parts are joined, rotated as one, and joined with the rest
            rotary = self.elementwise("rotary", self.layers, 6, 6 * rotary_values + joined, 4 * rotary_values + joined)
        else:
            rotary = self.elementwise(
                "rotary", self.layers, 2 * 7 + 2, 5 * rotary_values + joined, 4 * rotary_values + joined
            )
        return [*products, together(norms), rotary, self.product("o", "projections", self.mixed, d)]

    def feed_forward(self, arrangement: str) -> list[OperationCosts]:
        """The feed-forward of all layers that have no experts in its place, and the residual stream's sums."""
        c, d, wide = self.config, self.config.hidden_size, self.config.intermediate_size
        if not self.dense:
            return [self._residual()]
        up = [("up", wide)] if c.is_gpt2 else [("gate", wide), ("up", wide)]
        if arrangement == "fast" and not c.is_gpt2:
            up = [("gate_up", 2 * wide)]
        return [
            *(self.product(name, "mlp", d, size, bias=c.mlp_bias, count=self.dense) for name, size in up),
            self._activation(),
            self.product("down", "mlp", wide, d, bias=c.mlp_bias, count=self.dense),
            self._residual(),
        ]

    def _qk_norm(self, *, joined: bool) -> list[OperationCosts]:
        """Norms of q and k a head (Qwen3); `joined`: put together again for one rotary embedding."""
        if not self.config.qk_norm:
            return []
        head = self.config.head_dim
        each = 4 + self.narrow if joined else self._norm_launches(self.config.zero_centered_norms)
        moved = 4 + (1 if joined else 2) * self.narrow
        both = self.rows * (self.q + self.kv)
        found = [self.elementwise("qk norm", self.owners, 2 * each + joined, moved * both, moved * both, 2 * head)]
        if self.sharers:
            moved -= joined  # nothing to put together
            alone = moved * self.rows * self.q
            found.append(self.elementwise("qk norm", self.sharers, each, alone, alone, head))
        return [together(found)]

    def _rotary(self, launches: int, read: float, written: float, *, apart: bool) -> list[OperationCosts]:
        """apart: q and k turn one after the other, not as one."""
        if self.config.is_gpt2:
            return []
        both, alone = self.rows * (self.q + self.kv), self.rows * self.q
        found = [
            self.elementwise("rotary", self.owners, (1 + apart) * launches, read * both, written * both),
            self.elementwise("rotary", self.sharers, launches, read * alone, written * alone),
        ]
        return [together(found)]

    def _activation(self) -> OperationCosts:
        values = self.rows * self.config.intermediate_size
        if self.config.is_gpt2:
            return self.elementwise("activation", self.dense, 1, values, values)
        return self.elementwise("activation", self.dense, 2, 3 * values, 2 * values)

    def _residual(self) -> OperationCosts:
        values = self.rows * self.config.hidden_size
        if not self.feeding:  # a mixer alone
            return self.elementwise("residual", self.layers, 1, 2 * values, values)
        return self.elementwise("residual", self.layers, 2, 4 * values, 2 * values)
