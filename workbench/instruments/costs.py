"""What a step costs, counted from the model's shape: FLOPs, bytes, launches. And the time they predict.

A step is a list of operations, one after the other (`StepCosts.operations`); everything else is a sum over it.

FLOPs are those of the matrix products, 2 for a multiply and its add: 2·N·in·out for a linear layer over N rows,
4·H_q·D for each (query, key) pair of attention. Norms, rotary embedding, activations and softmax are not
counted: at usual sizes a few percent of the FLOPs.

Attention is counted over *causal pairs*, the pairs that a kernel has to visit: a query at position p sees p + 1
keys (fewer in a window). `attention_rectangle_flops` is the n × S rectangle that eager attention computes and
then masks away, about twice as much when a whole text is processed at once; with it the FLOPs equal what torch's
FlopCounterMode counts in the real module.

Bytes are those that must cross the memory bus when no two operations are fused and nothing stays in a cache
between them: each weight read once a step, whatever N is (of the embedding only the rows looked up); the keys and
values that are remembered, read once a sequence, and the new ones written; each product's inputs read and outputs
written once; and what the operations without a product (norms, rotary embedding, sums, activations) read and
write, counted in whole rows: the few single numbers a row are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.errors import WorkbenchError, unknown
from workbench.instruments.device import Ceilings
from workbench.instruments.records import LIMITS
from workbench.models.config import ModelConfig

COUNTED_KVS = ("recompute", "contiguous")
ARRANGEMENTS = ("plain", "fast")  # models.decoder.Decoder, models.fast.FastDecoder
PARTS = ("projections", "attention", "mlp", "head")
BYTE_PARTS = ("weights", "kv", "activations", "elementwise")


@dataclass(frozen=True)
class OperationCosts:
    """One kind of operation in a step, all of its `count` occurrences together (usually one a layer)."""

    name: str  # "qkv", "attention", "down", …
    part: str  # one of PARTS, or "other"
    count: int
    launches: int = 0
    kernels: int = 0  # of the launches those that are a matrix product or an attention
    flops: int = 0
    weight_bytes: float = 0
    kv_bytes: float = 0
    activation_bytes: float = 0  # into and out of matrix products and attention
    elementwise_bytes: float = 0
    bytes_written: float = 0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes + self.elementwise_bytes

    @property
    def intensity(self) -> float:
        """FLOPs a byte; 0 for an operation that computes no product."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class StepCosts:
    """One forward pass, counted. All counts are exact for the formulas above."""

    operations: tuple[OperationCosts, ...]
    attention_rectangle_flops: int  # in place of "attention", for attention that masks instead of skipping
    rows: int  # N

    @property
    def flops_by_part(self) -> dict[str, int]:
        """ "projections" (q, k, v, o), "attention", "mlp", "head"."""
        return {part: sum(o.flops for o in self.operations if o.part == part) for part in PARTS}

    @property
    def bytes_by_part(self) -> dict[str, float]:
        """ "weights", "kv", "activations" (of products and attention), "elementwise" (of all else)."""
        return {
            "weights": self._sum("weight_bytes"),
            "kv": self._sum("kv_bytes"),
            "activations": self._sum("activation_bytes"),
            "elementwise": self._sum("elementwise_bytes"),
        }

    @property
    def flops(self) -> int:
        return self._sum("flops")

    @property
    def bytes(self) -> float:
        return self._sum("bytes")

    @property
    def bytes_written(self) -> float:
        return self._sum("bytes_written")

    @property
    def bytes_read(self) -> float:
        return self.bytes - self.bytes_written

    @property
    def launches(self) -> int:
        """Operations that make or change a tensor: one kernel each on a GPU, one call each on a CPU."""
        return self._sum("launches")

    @property
    def rectangle_flops(self) -> int:
        """FLOPs in all when attention computes the whole rectangle, as `eager` does."""
        return self.flops - self.flops_by_part["attention"] + self.attention_rectangle_flops

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes

    def operation(self, name: str) -> OperationCosts:
        """The operation of that name. Raises WorkbenchError naming the nearest."""
        for one in self.operations:
            if one.name == name:
                return one
        raise unknown("operation of this step", name, [o.name for o in self.operations])

    def counts(self) -> dict[str, float]:
        """As a Measurement's counts."""
        return {
            "flops": self.flops,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "launches": self.launches,
            "rows": self.rows,
        }

    def _sum(self, field: str):
        return sum(getattr(o, field) for o in self.operations)


def step_costs(
    config: ModelConfig,
    *,
    new_tokens: Sequence[int],
    contexts: Sequence[int],
    logit_rows: int,
    weight_bytes_per_element: float,
    activation_bytes_per_element: float | None = None,
    kv: str = "recompute",
    kv_bytes_per_element: float | None = None,
    arrangement: str = "plain",
) -> StepCosts:
    """Count one forward pass over B sequences.

    new_tokens: [B] tokens that each sequence brings; N is their sum.
    contexts: [B] tokens of each sequence that the kv remembers already (`kv.lengths`, `Batch.first_positions`).
        Recompute remembers none and is sent every text whole, so there they are all 0.
    logit_rows: rows for which the output head is computed; at 0 it is not read either.
    activation_bytes_per_element: default the weights', but at least 2: quantized weights still multiply 16-bit
        activations. kv_bytes_per_element: as stored; default that of the activations.
    arrangement: "plain" (`Decoder`) or "fast" (`FastDecoder`): the same products, joined, and fewer launches.
    Raises WorkbenchError for numbers that do not fit together, shapes that are not runnable, an unknown kv.
    """
    _check(config, new_tokens, contexts, logit_rows, weight_bytes_per_element, kv, arrangement)
    wide = activation_bytes_per_element or max(2.0, weight_bytes_per_element)
    stored = wide if kv_bytes_per_element is None else kv_bytes_per_element
    if not stored > 0:
        raise WorkbenchError(f"kv_bytes_per_element must be above 0, got {stored}")
    count = _Counter(config, sum(new_tokens), weight_bytes_per_element, wide)
    rectangle = sum(n * (past + n) for n, past in zip(new_tokens, contexts))
    operations = [
        *count.start(arrangement),
        *(count.fast_layers() if arrangement == "fast" else count.plain_layers()),
        count.attention(new_tokens, contexts, kv, stored),
        *count.end(logit_rows, arrangement),
    ]
    order = _ORDER if not config.is_gpt2 else ("positions", *_ORDER)
    operations.sort(key=lambda o: order.index(o.name))
    width = config.num_heads * config.head_dim
    return StepCosts(tuple(operations), config.num_layers * 4 * width * rectangle, sum(new_tokens))


def with_rectangle(costs: StepCosts) -> StepCosts:
    """The same step with attention that computes the masked half as well, as `eager` does."""
    whole = costs.attention_rectangle_flops
    operations = (replace(o, flops=whole) if o.name == "attention" else o for o in costs.operations)
    return replace(costs, operations=tuple(operations))


_ORDER = (
    "embedding", "rotary table", "norm", "qkv", "q", "k", "v", "qk norm", "rotary", "attention", "o", "gate_up",
    "gate", "up", "activation", "down", "residual", "logit rows", "head",
)  # fmt: skip


class _Counter:
    """The operations of one step over N rows, each with its formula."""

    def __init__(self, config: ModelConfig, rows: int, weight: float, wide: float) -> None:
        self.config, self.rows, self.weight, self.wide = config, rows, weight, wide
        self.layers, self.narrow = config.num_layers, wide < 4
        self.q, self.kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def product(self, name, part, wide_in, wide_out, *, bias=False, rows=None, count=None) -> OperationCosts:
        """y = x·Wᵀ over `rows` rows: 2·rows·in·out FLOPs; x and W read, y written."""
        rows, count = self.rows if rows is None else rows, self.layers if count is None else count
        written = count * rows * wide_out * self.wide
        weights = wide_in * wide_out + (wide_out if bias else 0)
        return OperationCosts(
            name,
            part,
            count,
            launches=count,
            kernels=count,
            flops=count * 2 * rows * wide_in * wide_out,
            weight_bytes=count * weights * self.weight,
            activation_bytes=count * rows * wide_in * self.wide + written,
            bytes_written=written,
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
        if c.is_gpt2:  # the row of the position as well, and their sum
            return [lookup, self.elementwise("positions", 1, 2, 2 * values, 2 * values, weights=values)]
        table = self.rows * c.head_dim
        if arrangement == "fast":
            return [lookup, self.elementwise("rotary table", 1, 1, 2 * table, 2 * table)]
        return [lookup, self.elementwise("rotary table", 1, 4 + 2 * self.narrow, 2 * table, 2 * table)]

    def plain_layers(self) -> list[OperationCosts]:
        c, d, wide_mlp = self.config, self.config.hidden_size, self.config.intermediate_size
        bias = {"bias": c.qkv_bias}
        return [
            self.product("q", "projections", d, self.q, **bias),
            self.product("k", "projections", d, self.kv, **bias),
            self.product("v", "projections", d, self.kv, **bias),
            *self._qk_norm(joined=False),
            *self._rotary(launches=14, read=5, written=4),
            self.product("o", "projections", self.q, d, bias=c.attention_output_bias),
            *([] if c.is_gpt2 else [self.product("gate", "mlp", d, wide_mlp, bias=c.mlp_bias)]),
            self.product("up", "mlp", d, wide_mlp, bias=c.mlp_bias),
            self._activation(),
            self.product("down", "mlp", wide_mlp, d, bias=c.mlp_bias),
            self._residual(),
        ]

    def fast_layers(self) -> list[OperationCosts]:
        c, d, wide_mlp = self.config, self.config.hidden_size, self.config.intermediate_size
        up = ("up", wide_mlp) if c.is_gpt2 else ("gate_up", 2 * wide_mlp)
        return [
            self.product("qkv", "projections", d, self.q + 2 * self.kv, bias=c.qkv_bias),
            *self._qk_norm(joined=True),
            *self._rotary(launches=3, read=5, written=3),
            self.product("o", "projections", self.q, d, bias=c.attention_output_bias),
            self.product(up[0], "mlp", d, up[1], bias=c.mlp_bias),
            self._activation(),
            self.product("down", "mlp", wide_mlp, d, bias=c.mlp_bias),
            self._residual(),
        ]

    def attention(self, new_tokens, contexts, kv: str, stored: float) -> OperationCosts:
        """Over all sequences: q read and the result written; the keys and values as the kv holds them."""
        c, sequences = self.config, len(new_tokens)
        pairs = sum(causal_pairs(n, past, c.sliding_window) for n, past in zip(new_tokens, contexts))
        fresh, out = (
            self.rows * 2 * self.kv,
            self.rows * self.q,
        )  # values of new keys and values, of the result
        launches, calls, kv_read, kv_written = sequences + (sequences > 1), sequences, 0.0, 0.0
        if kv == "contiguous":
            seen = sum(_keys_seen(n, past, c.sliding_window) for n, past in zip(new_tokens, contexts))
            kv_read, kv_written = seen * 2 * self.kv * stored, fresh * stored
            together = sequences == self.rows  # single tokens: one call for all, see kv.contiguous
            launches, calls = (3, 1) if together else (3 * sequences + (sequences > 1), sequences)
            launches += 2 if stored != self.wide else 0  # q to the stored type, the result back
        return OperationCosts(
            "attention",
            "attention",
            self.layers,
            launches=self.layers * launches,
            kernels=self.layers * calls,
            flops=self.layers * 4 * self.q * pairs,
            kv_bytes=self.layers * (kv_read + kv_written),
            activation_bytes=self.layers * (out + fresh + out) * self.wide,
            bytes_written=self.layers * (out * self.wide + kv_written),
        )

    def end(self, logit_rows: int, arrangement: str) -> list[OperationCosts]:
        """The norms of all layers and the last one, the choice of rows, the head."""
        c, d = self.config, self.config.hidden_size
        count, values = 2 * self.layers + 1, self.rows * d
        if c.is_gpt2:
            back = self.narrow if arrangement == "fast" else 0
            norm = self.elementwise("norm", count, 1 + back, (1 + back) * values, (1 + back) * values, 2 * d)
        elif arrangement == "fast":  # length, hypot, division, product; back to 16 bits
            norm = self.elementwise(
                "norm", count, 4 + self.narrow, (3 + self.narrow) * values, (2 + self.narrow) * values, d
            )
        else:  # square, mean, + eps, rsqrt, two products; to float32 and back
            extra = 2 * self.narrow
            norm = self.elementwise("norm", count, 6 + extra, (4 + extra) * values, (3 + extra) * values, d)
        chosen = logit_rows if logit_rows != self.rows else 0
        found = [norm]
        if chosen:
            found.append(self.elementwise("logit rows", 1, 1, chosen * d, chosen * d))
        head = self.product("head", "head", d, c.vocab_size, rows=logit_rows, count=1)
        return [*found, head] if logit_rows else found

    def _qk_norm(self, *, joined: bool) -> list[OperationCosts]:
        """Norms of q and k a head (Qwen3); `joined`: put together again for one rotary embedding."""
        if not self.config.qk_norm:
            return []
        values, head = self.rows * (self.q + self.kv), self.config.head_dim
        if joined:
            launches, moved = 2 * (4 + self.narrow) + 1, 4 + self.narrow
        else:
            launches, moved = 2 * (6 + 2 * self.narrow), 4 + 2 * self.narrow
        return [self.elementwise("qk norm", self.layers, launches, moved * values, moved * values, 2 * head)]

    def _rotary(self, launches: int, read: float, written: float) -> list[OperationCosts]:
        values = self.rows * (self.q + self.kv)
        if self.config.is_gpt2:
            return []
        return [self.elementwise("rotary", self.layers, launches, read * values, written * values)]

    def _activation(self) -> OperationCosts:
        values = self.rows * self.config.intermediate_size
        if self.config.is_gpt2:
            return self.elementwise("activation", self.layers, 1, values, values)
        return self.elementwise("activation", self.layers, 2, 3 * values, 2 * values)

    def _residual(self) -> OperationCosts:
        values = self.rows * self.config.hidden_size
        return self.elementwise("residual", self.layers, 2, 4 * values, 2 * values)


def decode_costs(
    config: ModelConfig,
    *,
    batch: int,
    context: int,
    weight_bytes_per_element: float,
    kv: str = "contiguous",
    arrangement: str = "fast",
    **bytes_per_element: float | None,
) -> StepCosts:
    """One new token for each of `batch` sequences that have `context` tokens each, by `step_costs`."""
    return step_costs(
        config,
        new_tokens=[1] * batch,
        contexts=[context] * batch,
        logit_rows=batch,
        weight_bytes_per_element=weight_bytes_per_element,
        kv=kv,
        arrangement=arrangement,
        **bytes_per_element,
    )


def prefill_costs(
    config: ModelConfig,
    *,
    batch: int,
    prompt: int,
    weight_bytes_per_element: float,
    kv: str = "contiguous",
    arrangement: str = "fast",
    **bytes_per_element: float | None,
) -> StepCosts:
    """The whole prompts of `batch` sequences in one pass, logits for the last row of each, by `step_costs`."""
    return step_costs(
        config,
        new_tokens=[prompt] * batch,
        contexts=[0] * batch,
        logit_rows=batch,
        weight_bytes_per_element=weight_bytes_per_element,
        kv=kv,
        arrangement=arrangement,
        **bytes_per_element,
    )


def causal_pairs(new_tokens: int, context: int, window: int | None = None) -> int:
    """(query, key) pairs of `new_tokens` after `context` others: Σ min(position + 1, window)."""
    limit = context + new_tokens if window is None else window
    growing = min(new_tokens, max(0, limit - context))  # queries that still see everything before them
    return growing * (2 * context + growing + 1) // 2 + (new_tokens - growing) * limit


def _keys_seen(new_tokens: int, context: int, window: int | None) -> int:
    """Keys that at least one of the new tokens sees."""
    every = context + new_tokens
    return every if window is None else min(every, window + new_tokens - 1)


def weights_read(config: ModelConfig, rows: int, logit_rows: int) -> int:
    """Weights that a step over `rows` tokens reads: every layer's once, and one embedding row for each token."""
    d = config.hidden_size
    tables = config.vocab_size * d * (1 if config.tie_embeddings else 2)
    tables += config.context_length * d if config.is_gpt2 else 0
    embedded = rows * d * (2 if config.is_gpt2 else 1)  # GPT-2 looks up a position's row as well
    head = config.vocab_size * d if logit_rows else 0
    return config.num_parameters() - tables + embedded + head


def _check(config, new_tokens, contexts, logit_rows, weight_bytes_per_element, kv, arrangement) -> None:
    if kv not in COUNTED_KVS:
        raise unknown("kv kind to count", kv, COUNTED_KVS)
    if arrangement not in ARRANGEMENTS:
        raise unknown("arrangement", arrangement, ARRANGEMENTS)
    if not config.runnable:
        raise WorkbenchError(
            f"a step of latent attention or experts ({config.family}) is not counted here, only its parameters "
            "and its cache; see ModelConfig.num_active_parameters and kv_values_per_token"
        )
    if not new_tokens or len(new_tokens) != len(contexts):
        raise WorkbenchError(
            f"new_tokens and contexts need one number for each sequence, got {len(new_tokens)} and {len(contexts)}"
        )
    if min(new_tokens) < 1 or min(contexts) < 0:
        raise WorkbenchError(
            f"a sequence brings at least 1 token and has at least 0; got {list(new_tokens)}, {list(contexts)}"
        )
    if kv == "recompute" and any(contexts):
        raise WorkbenchError(
            f"kv 'recompute' remembers nothing and is sent every text whole: contexts must be 0, got {list(contexts)}"
        )
    if not 0 <= logit_rows <= sum(new_tokens):
        raise WorkbenchError(
            f"logit_rows must be from 0 to {sum(new_tokens)}, the rows there are; got {logit_rows}"
        )
    if not weight_bytes_per_element > 0:
        raise WorkbenchError(f"weight_bytes_per_element must be above 0, got {weight_bytes_per_element}")


# -- prediction --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """The time of a step, and what it is spent on."""

    seconds: float
    limit: str  # "launch", "bandwidth" or "compute": what binds for most of the seconds
    terms: dict[str, float]  # seconds of each over the whole step, as if it were alone
    operations: tuple[tuple[str, float, str], ...] = ()  # (name, seconds, limit) of each, in order


def predict(costs: StepCosts, ceilings: Ceilings, dtype: str) -> Prediction:
    """The roofline, operation by operation: Σ max(launch, bytes / bandwidth, FLOPs / FLOP rate).

    Operations run one after the other, so their times add. Within one, bytes and FLOPs go on at the same time, so
    the slower counts. So does the launch where another processor does the starting (a GPU, `launch_overlaps`);
    where the same cores first start an operation and then work on it, the launch comes on top:
    Σ launch + max(bytes / bandwidth, FLOPs / FLOP rate).
    Where the ceilings have them, weights pass at the speed measured for weights in matrix products
    (`weight_bytes_per_s`), remembered keys and values at that measured in attention (`kv_bytes_per_s`), and a
    matrix product or an attention starts in the time measured for one (`kernel_launch_s`); all other bytes pass at
    the read bandwidth, all other operations start in `launch_s`.
    dtype: "float32", "bfloat16" or "float16" (or the torch dtype): in what the matrix products are computed.
    Raises WorkbenchError where the ceilings lack this dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ceilings.flop_per_s:
        raise unknown(f"dtype for the ceilings of {ceilings.name}", name, ceilings.flop_per_s)
    read, flop_rate = ceilings.read_bytes_per_s, ceilings.flop_per_s[name]
    weights, kept = ceilings.weight_bytes_per_s.get(name, read), ceilings.kv_bytes_per_s or read
    terms, spent, found = dict.fromkeys(LIMITS, 0.0), dict.fromkeys(LIMITS, 0.0), []
    for o in costs.operations:
        kind = "attention" if o.part == "attention" else "product"
        kernel_s = ceilings.kernel_launch_s.get(kind, ceilings.launch_s)
        seconds = {
            "launch": (o.launches - o.kernels) * ceilings.launch_s + o.kernels * kernel_s,
            "bandwidth": o.weight_bytes / weights
            + o.kv_bytes / kept
            + (o.activation_bytes + o.elementwise_bytes) / read,
            "compute": o.flops / flop_rate,
        }
        limit = max(seconds, key=seconds.__getitem__)
        work = max(seconds["bandwidth"], seconds["compute"])
        takes = seconds[limit] if ceilings.launch_overlaps else seconds["launch"] + work
        found.append((o.name, takes, limit))
        for term, value in seconds.items():
            terms[term] += value
        if ceilings.launch_overlaps:
            spent[limit] += takes
        else:
            spent["launch"] += seconds["launch"]
            spent["bandwidth" if seconds["bandwidth"] >= seconds["compute"] else "compute"] += work
    return Prediction(sum(spent.values()), max(spent, key=spent.__getitem__), terms, tuple(found))


# -- memory and money ----------------------------------------------------------------------------------------


def kv_bytes(config: ModelConfig, tokens: int, bytes_per_element: float = 2) -> float:
    """Bytes of the cache of one sequence of `tokens` tokens over all layers, for any shape there is.

    2·L·H_kv·D·S·b, or L·(kv_rank + rotary)·S·b for latent attention.
    """
    return config.kv_values_per_token() * tokens * bytes_per_element


def largest_batch(
    config: ModelConfig,
    *,
    memory_bytes: float,
    tokens: int,
    weight_bytes_per_element: float = 2,
    kv_bytes_per_element: float = 2,
) -> int:
    """Sequences of `tokens` tokens whose caches fit beside the weights; 0 when not even one, or not the weights."""
    free = memory_bytes - config.num_parameters() * weight_bytes_per_element
    return max(0, int(free // kv_bytes(config, tokens, kv_bytes_per_element)))


def dollars_per_million_tokens(tokens_per_s: float, dollars_per_hour: float) -> float:
    """What a million tokens cost on a machine of that price that makes so many a second, never idle."""
    if not tokens_per_s > 0:
        raise WorkbenchError(f"tokens_per_s must be above 0, got {tokens_per_s}")
    return dollars_per_hour / 3600 / tokens_per_s * 1e6
