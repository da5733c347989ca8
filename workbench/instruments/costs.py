"""What a step costs, counted from the model's shape: FLOPs, bytes, launches.

A step is a list of operations, one after the other (`StepCosts.operations`); everything else is a sum over it. What
every row passes through is counted in `cost_layers`, what the kv does in `cost_attention` (which kv, and how many
bytes it holds: `cost_memory`; in few bits: `cost_quantized`, and `cost_codes` where a loop reads them as they lie), and
the time of it all in `cost_prediction`.

FLOPs are those of the matrix products, 2 for a multiply and its add: 2·N·in·out for a linear layer over N rows,
2·H_q·(D + D_v) for each (query, key) pair of attention; where attention reads codes, with what makes numbers of them.
Norms, rotary embedding, activations and softmax are not counted: at usual sizes a few percent of the FLOPs.

Attention is counted over *causal pairs*, the pairs that a kernel has to visit: a query at position p sees p + 1
keys (fewer in a window). `attention_rectangle_flops` is the n × S rectangle that eager attention computes and
then masks away, about twice as much when a whole text is processed at once; with it the FLOPs equal what torch's
FlopCounterMode counts in the real module.

Bytes are those that must cross the memory bus when no two operations are fused and nothing stays in a cache
between them: each weight read once a step, whatever N is (of the embedding only the rows looked up); the keys and
values that are remembered, read once a sequence, and the new ones written; each product's inputs read and outputs
written once; and what the operations without a product (norms, rotary embedding, sums, activations) read and
write, counted in whole rows: the few single numbers per row are left out.

Launches are those of the layers and of the step around them. What a kv prepares once a step for all of its layers
(masks, places) is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from workbench.errors import WorkbenchError, unknown
from workbench.instruments.cost_attention import attend_operations, causal_pairs
from workbench.instruments.cost_experts import different_experts as experts_read
from workbench.instruments.cost_experts import expert_operations, unread_weights
from workbench.instruments.cost_kernels import KernelCounter, recorded_operation, why_no_kernels
from workbench.instruments.cost_layers import ORDER, LayerCounter
from workbench.instruments.cost_memory import COUNTED_KVS, Memory
from workbench.instruments.cost_operations import BYTE_PARTS, PARTS, OperationCosts, StepCosts, with_rectangle
from workbench.instruments.cost_prediction import Prediction, predict
from workbench.instruments.cost_quantized import quantized_bytes_per_element
from workbench.instruments.cost_states import state_operations
from workbench.instruments.device import Ceilings
from workbench.models.config import ModelConfig

# models.decoder.Decoder; models.fast.FastDecoder with torch's operations, and with our kernels
ARRANGEMENTS = ("plain", "fast", "kernels")


def step_costs(
    config: ModelConfig,
    *,
    new_tokens: Sequence[int],
    contexts: Sequence[int],
    logit_rows: int,
    weight_bytes_per_element: float,
    linear_bytes_per_element: float | None = None,
    head_bytes_per_element: float | None = None,
    activation_bytes_per_element: float | None = None,
    kv: str = "recompute",
    kv_bytes_per_element: float | None = None,
    kv_settings: Mapping[str, object] | None = None,
    latent_form: str = "auto",
    arrangement: str = "plain",
    recorded: bool = False,
    different_experts: float | None = None,
) -> StepCosts:
    """Count one forward pass over B sequences.

    new_tokens: [B] tokens that each sequence brings; N is their sum.
    contexts: [B] cached tokens of each sequence (`kv.lengths`, `Batch.first_positions`).
        With recompute they are all 0: it caches nothing and gets every sequence whole.
    logit_rows: rows for which the output head is computed; at 0 it is not read either.
    linear_bytes_per_element: of the matrices of the layers alone, scales and all, where they are stored in fewer bits:
        nbytes / weights of `QuantizedLinear`s. Each is read once a step, so a step reads that many bytes of them.
    head_bytes_per_element: the same of the head.
    activation_bytes_per_element: default the weights', but at least 2: quantized weights still multiply 16-bit
        activations.
    kv, kv_settings: the kind, one of COUNTED_KVS, and what it is made with, as for `kv_for`: form= (latent), window=,
        sinks=, rewind= (window), format=, group=, attention= (quantized: "sdpa", the default, counts it as dequantized,
        "codes" as the loop over codes reads it). latent_form: the form alone.
    kv_bytes_per_element: as stored; default that of the activations. Of a quantized kv, of the tokens that it keeps as
        they came; what its codes take follows from the format.
    arrangement: "plain" (`Decoder`) or "fast" (`FastDecoder`): the same products, joined, and fewer launches; "kernels"
        (`FastDecoder` on a GPU): fewer still, and with kv "paged" one launch of attention a layer. See `prepared_on`.
    recorded: with what a recorded step does beside the model (`models.graphs`).
    different_experts: that the rows chose, in the mean of the layers with experts, where it was counted; default what
        rows choose that choose evenly. What is read and started depends on it, and not on the rows alone.
    Raises WorkbenchError for numbers that do not fit together, shapes that are not counted, an unknown kv.
    """
    _check_fields(config)
    rows, wide = _check_step(new_tokens, contexts, weight_bytes_per_element, activation_bytes_per_element)
    if arrangement not in ARRANGEMENTS:
        raise unknown("arrangement", arrangement, ARRANGEMENTS)
    if config.mixers and arrangement != "plain":
        raise WorkbenchError(
            f"a shape with layers of {', '.join(dict.fromkeys(config.mixers))} runs as it was loaded; count "
            f"arrangement 'plain', not {arrangement!r}"
        )
    if not 0 <= logit_rows <= rows:
        raise WorkbenchError(f"logit_rows must be from 0 to {rows}, the rows there are; got {logit_rows}")
    memory = _memory(config, contexts, wide, kv, kv_bytes_per_element, kv_settings, latent_form)
    in_few_bits = {
        "linear_bytes_per_element": linear_bytes_per_element,
        "head_bytes_per_element": head_bytes_per_element,
    }
    for name, size in in_few_bits.items():
        if size is not None and not size > 0:
            raise WorkbenchError(f"{name} must be above 0, got {size}")
    elements = weight_bytes_per_element, wide, linear_bytes_per_element, head_bytes_per_element
    by_kernel = arrangement == "kernels" and kv == "paged"
    count = (
        KernelCounter(config, rows, *elements, paged=by_kernel)
        if arrangement == "kernels"
        else LayerCounter(config, rows, *elements)
    )
    attend, rectangle = attend_operations(
        config, new_tokens, contexts, memory, weight_bytes_per_element, wide, by_kernel=by_kernel
    )
    operations = [
        *count.start(arrangement),
        *count.around_attention(arrangement),
        *attend,
        *state_operations(config, new_tokens, weight_bytes_per_element, wide, count.linear, kept=kv != "recompute"),
        *count.feed_forward(arrangement),
        *expert_operations(count, experts_read(config, rows, different_experts), arrangement),
        *count.end(logit_rows, arrangement),
        *([recorded_operation(config, logit_rows, wide)] if recorded else []),
    ]
    return _in_order(operations, rectangle, rows)


def attention_costs(
    config: ModelConfig,
    *,
    new_tokens: Sequence[int],
    contexts: Sequence[int],
    weight_bytes_per_element: float,
    activation_bytes_per_element: float | None = None,
    kv: str = "contiguous",
    kv_bytes_per_element: float | None = None,
    kv_settings: Mapping[str, object] | None = None,
    latent_form: str = "auto",
    arrangement: str = "plain",
    projections: bool = False,
) -> StepCosts:
    """The same for the attention of all layers alone, of any shape there is, mixtures of experts too.

    That is what `kv.attend` does: with keys and values it stores and attends; with latents it expands or absorbs as
    well. projections: with the projections before and after it, the norms of q, k and latents, and the rotary
    embedding.
    """
    _check_fields(config)
    rows, wide = _check_step(new_tokens, contexts, weight_bytes_per_element, activation_bytes_per_element)
    if arrangement not in ARRANGEMENTS[:2]:
        raise unknown("arrangement", arrangement, ARRANGEMENTS[:2])
    memory = _memory(config, contexts, wide, kv, kv_bytes_per_element, kv_settings, latent_form)
    operations, rectangle = attend_operations(config, new_tokens, contexts, memory, weight_bytes_per_element, wide)
    if projections:
        count = LayerCounter(config, rows, weight_bytes_per_element, wide)
        operations = [*operations, *count.around_attention(arrangement)]
    return _in_order(operations, rectangle, rows)


def _in_order(operations: list[OperationCosts], rectangle: int, rows: int) -> StepCosts:
    return StepCosts(tuple(sorted(operations, key=lambda o: ORDER.index(o.name))), rectangle, rows)


def prepared_on(ceilings: Ceilings, config: ModelConfig) -> str:
    """The arrangement of a prepared model on a machine with these ceilings: "kernels" on a GPU, where the shape has
    them, else "fast"; "plain" for a shape with state layers, which is not prepared."""
    if config.mixers:
        return "plain"
    return "kernels" if ceilings.of_gpu and not why_no_kernels(config) else "fast"


def decode_costs(
    config: ModelConfig,
    *,
    batch: int,
    context: int,
    weight_bytes_per_element: float,
    kv: str = "contiguous",
    arrangement: str = "fast",
    **settings,
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
        **settings,
    )


def prefill_costs(
    config: ModelConfig,
    *,
    batch: int,
    prompt: int,
    weight_bytes_per_element: float,
    kv: str = "contiguous",
    arrangement: str = "fast",
    **settings,
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
        **settings,
    )


def weights_read(config: ModelConfig, rows: int, logit_rows: int, *, different_experts: float | None = None) -> float:
    """Weights that a step over `rows` tokens reads: every layer's once, and one embedding row for each token; of"
    " experts
    those that are chosen (see `step_costs`)."""
    d = config.hidden_size
    tables = config.vocab_size * d * (1 if config.tie_embeddings else 2)
    tables += config.context_length * d if config.is_gpt2 else 0
    embedded = rows * d * (2 if config.is_gpt2 else 1)  # GPT-2 looks up a position's row as well
    head = config.vocab_size * d if logit_rows else 0
    unread = unread_weights(config, experts_read(config, rows, different_experts))
    return config.num_parameters() - tables + embedded + head - unread


def _memory(config, contexts, wide: float, kv: str, stored: float | None, kv_settings, latent_form: str) -> Memory:
    stored = wide if stored is None else stored
    memory = Memory.of(config, kv, stored, kv_settings=kv_settings, latent_form=latent_form)
    memory.check_contexts(contexts)
    return memory


def _check_fields(config: ModelConfig) -> None:
    """Refuse a shape with a part that no formula here knows, rather than count it without."""
    for field in dataclasses.fields(config):
        if field.name not in COUNTED_FIELDS and getattr(config, field.name) != field.default:
            raise WorkbenchError(
                f"a shape with {field.name} = {getattr(config, field.name)!r} is not counted here: the cost model "
                "does not know what it adds to a step"
            )


def _check_step(new_tokens, contexts, weight: float, activation: float | None) -> tuple[int, float]:
    """N, and the bytes of an element of the activations."""
    if not new_tokens or len(new_tokens) != len(contexts):
        raise WorkbenchError(
            f"new_tokens and contexts need one number for each sequence, got {len(new_tokens)} and {len(contexts)}"
        )
    if min(new_tokens) < 1 or min(contexts) < 0:
        raise WorkbenchError(
            f"a sequence brings at least 1 token and has at least 0; got {list(new_tokens)}, {list(contexts)}"
        )
    if not weight > 0:
        raise WorkbenchError(f"weight_bytes_per_element must be above 0, got {weight}")
    return sum(new_tokens), activation or max(2.0, weight)


# What the formulas take from a shape, and what changes no count.
COUNTED_FIELDS = (
    "family",
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "context_length",
    "norm_eps",
    "rope_theta",
    "rope_scaling",
    "local_rope_theta",
    "qkv_bias",
    "attention_output_bias",
    "mlp_bias",
    "qk_norm",
    "post_norms",
    "zero_centered_norms",
    "activation",
    "embedding_scale",
    "query_pre_attn_scalar",
    "tie_embeddings",
    "sliding_window",
    "global_layers",
    "attention_sinks",
    "kv_sources",
    "bos_token_id",
    "eos_token_ids",
    "latent_attention",
    "experts",
    "mixers",
    "state_shape",
)


# -- memory and money ----------------------------------------------------------------------------------------


def kv_bytes(
    config: ModelConfig,
    tokens: int,
    bytes_per_element: float = 2,
    *,
    kv: str | None = None,
    kv_settings: Mapping[str, object] | None = None,
) -> float:
    """Bytes of the cache of one sequence of `tokens` tokens over all layers, for any shape there is.

    2·L·H_kv·D·S·b, or L·(kv_rank + rotary)·S·b for latent attention; L counts the layers with keys of their own.
    kv, kv_settings: what a kv of that kind holds of it (its `bytes_in_use`): expanded for "contiguous", no more places
    than its rolling buffers have for "window", codes and scales for "quantized". By default what the shape itself asks
    for: latents where there are some, and every token.
    """
    if kv is None:
        return config.kv_values_per_token() * tokens * bytes_per_element
    return Memory.of(config, kv, bytes_per_element, kv_settings=kv_settings).bytes_kept(config, tokens)


def largest_batch(
    config: ModelConfig,
    *,
    memory_bytes: float,
    tokens: int,
    weight_bytes_per_element: float = 2,
    kv_bytes_per_element: float = 2,
    kv: str | None = None,
    kv_settings: Mapping[str, object] | None = None,
) -> int:
    """Sequences of `tokens` tokens whose caches fit beside the weights; 0 when not even one, or not the weights.

    kv, kv_settings: see `kv_bytes`. Raises WorkbenchError for a kv that keeps nothing: any number would fit.
    """
    one = kv_bytes(config, tokens, kv_bytes_per_element, kv=kv, kv_settings=kv_settings)
    if not one:
        raise WorkbenchError(f"kv {kv!r} keeps nothing of {tokens} tokens, so no number of sequences fills the memory")
    free = memory_bytes - config.num_parameters() * weight_bytes_per_element
    return max(0, int(free // one))


def dollars_per_million_tokens(tokens_per_s: float, dollars_per_hour: float) -> float:
    """What a million tokens cost on a machine of that price that makes so many a second, never idle."""
    if not tokens_per_s > 0:
        raise WorkbenchError(f"tokens_per_s must be above 0, got {tokens_per_s}")
    return dollars_per_hour / 3600 / tokens_per_s * 1e6


__all__ = [
    "ARRANGEMENTS",
    "BYTE_PARTS",
    "COUNTED_KVS",
    "PARTS",
    "Memory",
    "OperationCosts",
    "Prediction",
    "StepCosts",
    "attention_costs",
    "causal_pairs",
    "decode_costs",
    "dollars_per_million_tokens",
    "kv_bytes",
    "largest_batch",
    "predict",
    "prefill_costs",
    "prepared_on",
    "quantized_bytes_per_element",
    "step_costs",
    "weights_read",
    "with_rectangle",
]
