"""What a step costs, counted from the model's shape: FLOPs, bytes, launches. And the time they predict.

FLOPs are those of the matrix products, 2 for a multiply and its add: 2·N·in·out for a linear layer over N rows,
4·H_q·D for each (query, key) pair of attention. Norms, rotary embedding, activations and softmax are not
counted: at usual sizes a few percent of the FLOPs.

Attention is counted over *causal pairs*, the pairs that a kernel has to visit: a query at position p sees p + 1
keys (fewer in a window). `attention_rectangle_flops` is the n × S rectangle that eager attention computes and
then masks away, about twice as much when a whole text is processed at once; with it the FLOPs equal what torch's
FlopCounterMode counts in the real module.

Bytes are those that must cross the memory bus when nothing is fused and nothing stays in a cache between two
matrix products: each weight read once a step, whatever N is (of the embedding only the rows looked up), and
each matrix product's inputs read and outputs written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.errors import WorkbenchError, unknown
from workbench.instruments.device import Ceilings
from workbench.models.config import ModelConfig

COUNTED_KVS = ("recompute",)


@dataclass(frozen=True)
class StepCosts:
    """One forward pass, counted. All counts are exact for the formulas above."""

    flops_by_part: dict[str, int]  # "projections" (q, k, v, o), "attention", "mlp", "head"
    bytes_by_part: dict[str, float]  # "weights", "kv", "activations"
    bytes_written: float  # of `bytes`; the others are read
    attention_rectangle_flops: int  # in place of "attention", for attention that masks instead of skipping
    launches: int  # operations that make a new tensor: one kernel each on a GPU, one call each on a CPU
    rows: int  # N

    @property
    def flops(self) -> int:
        return sum(self.flops_by_part.values())

    @property
    def bytes(self) -> float:
        return sum(self.bytes_by_part.values())

    @property
    def bytes_read(self) -> float:
        return self.bytes - self.bytes_written

    @property
    def rectangle_flops(self) -> int:
        """FLOPs in all when attention computes the whole rectangle, as `eager` does."""
        return self.flops - self.flops_by_part["attention"] + self.attention_rectangle_flops

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes

    def counts(self) -> dict[str, float]:
        """As a Measurement's counts."""
        return {
            "flops": self.flops,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "launches": self.launches,
            "rows": self.rows,
        }


def step_costs(
    config: ModelConfig,
    *,
    new_tokens: Sequence[int],
    contexts: Sequence[int],
    logit_rows: int,
    weight_bytes_per_element: float,
    activation_bytes_per_element: float | None = None,
    kv: str = "recompute",
) -> StepCosts:
    """Count one forward pass over B sequences.

    new_tokens: [B] tokens that each sequence brings; N is their sum.
    contexts: [B] tokens of each sequence that the kv remembers already (`kv.lengths`, `Batch.first_positions`).
        Recompute remembers none and is sent every text whole, so there they are all 0.
    logit_rows: rows for which the output head is computed; at 0 it is not read either.
    activation_bytes_per_element: default the weights', but at least 2: quantized weights still multiply 16-bit
        activations.
    Raises WorkbenchError for numbers that do not fit together, shapes that are not runnable, an unknown kv.
    """
    _check(config, new_tokens, contexts, logit_rows, weight_bytes_per_element, kv)
    wide = activation_bytes_per_element or max(2.0, weight_bytes_per_element)
    rows, layers = sum(new_tokens), config.num_layers
    pairs = sum(causal_pairs(n, past, config.sliding_window) for n, past in zip(new_tokens, contexts))
    rectangle = sum(n * (past + n) for n, past in zip(new_tokens, contexts))
    d, vocabulary, wide_mlp = config.hidden_size, config.vocab_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    mlp_matrices = 2 if config.is_gpt2 else 3

    projections = [(d, q_width), (d, kv_width), (d, kv_width), (q_width, d)]
    mlp = [(d, wide_mlp)] * (mlp_matrices - 1) + [(wide_mlp, d)]
    flops = {
        "projections": layers * sum(2 * rows * i * o for i, o in projections),
        "attention": layers * 4 * q_width * pairs,
        "mlp": layers * sum(2 * rows * i * o for i, o in mlp),
        "head": 2 * logit_rows * d * vocabulary,
    }
    read = layers * rows * (sum(i for i, _ in projections + mlp) + q_width + 2 * kv_width) + logit_rows * d
    written = (
        layers * rows * (sum(o for _, o in projections + mlp) + q_width) + rows * d + logit_rows * vocabulary
    )
    return StepCosts(
        flops_by_part=flops,
        bytes_by_part={
            "weights": weights_read(config, rows, logit_rows) * weight_bytes_per_element,
            "kv": 0,  # recompute keeps nothing from one step to the next
            "activations": (read + written) * wide,
        },
        bytes_written=written * wide,
        attention_rectangle_flops=layers * 4 * q_width * rectangle,
        launches=launches(config, len(new_tokens), logits_chosen=True, narrow=wide < 4),
        rows=rows,
    )


def causal_pairs(new_tokens: int, context: int, window: int | None = None) -> int:
    """(query, key) pairs of `new_tokens` after `context` others: Σ min(position + 1, window)."""
    limit = context + new_tokens if window is None else window
    growing = min(new_tokens, max(0, limit - context))  # queries that still see everything before them
    return growing * (2 * context + growing + 1) // 2 + (new_tokens - growing) * limit


def weights_read(config: ModelConfig, rows: int, logit_rows: int) -> int:
    """Weights that a step over `rows` tokens reads: every layer's once, and one embedding row for each token."""
    d = config.hidden_size
    tables = config.vocab_size * d * (1 if config.tie_embeddings else 2)
    tables += config.context_length * d if config.is_gpt2 else 0
    embedded = rows * d * (2 if config.is_gpt2 else 1)  # GPT-2 looks up a position's row as well
    head = config.vocab_size * d if logit_rows else 0
    return config.num_parameters() - tables + embedded + head


def launches(config: ModelConfig, num_sequences: int, *, logits_chosen: bool, narrow: bool) -> int:
    """Operations of one forward pass that make a new tensor, as `Decoder` is written.

    logits_chosen: the batch names its logit rows (one gather more). narrow: weights in 16 bits, where norms and
    rotary embedding convert to float32 and back.
    """
    attention = num_sequences + (num_sequences > 1)  # one each, and one to join the parts
    linear = 4 + (2 if config.is_gpt2 else 3)
    if config.is_gpt2:
        norm, once = 1, 3  # two lookups and their sum
        layer = 2 * norm + linear + attention + 3  # gelu, two residual sums
    else:
        norm = 6 + (2 if narrow else 0)  # square, mean, + eps, rsqrt, two products; to float32 and back
        once = 5 + (2 if narrow else 0)  # lookup, positions to float, angles, cos, sin; to 16 bits
        rotary = 2 * 7  # q and k: four products, difference, sum, concatenation
        layer = 2 * norm + linear + attention + rotary + 4  # silu, gate·up, two residual sums
        layer += 2 * norm if config.qk_norm else 0
    return once + config.num_layers * layer + norm + (1 if logits_chosen else 0) + 1


def _check(config, new_tokens, contexts, logit_rows, weight_bytes_per_element, kv) -> None:
    if kv not in COUNTED_KVS:
        raise unknown("kv kind to count", kv, COUNTED_KVS)
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
    if any(contexts):
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
    """The time of a step as the slowest of three: what must be launched, moved and computed."""

    seconds: float
    limit: str  # "launch", "bandwidth" or "compute": the term that is the largest
    terms: dict[str, float]  # seconds of each, as if it were alone


def predict(costs: StepCosts, ceilings: Ceilings, dtype: str) -> Prediction:
    """max(launches · launch cost, bytes / bandwidth, FLOPs / FLOP rate): a bound from below (the roofline).

    dtype: "float32", "bfloat16" or "float16" (or the torch dtype): in what the matrix products are computed.
    A real step is slower, because the three overlap only in part; a model that fits in the processor's cache can
    be faster than its bandwidth term. Raises WorkbenchError where the ceilings lack this dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ceilings.flop_per_s:
        raise unknown(f"dtype for the ceilings of {ceilings.name}", name, ceilings.flop_per_s)
    terms = {
        "launch": costs.launches * ceilings.launch_s,
        "bandwidth": costs.bytes / ceilings.read_bytes_per_s,
        "compute": costs.flops / ceilings.flop_per_s[name],
    }
    limit = max(terms, key=terms.__getitem__)
    return Prediction(terms[limit], limit, terms)
