"""Sizes of layers that mix tokens through a state, and what follows from them: parameters, states, FLOPs. No torch.

What each kind computes is in its file in `workbench/models/mixers/`; here is only how much of it there is, so that
the calculators need no model. d is the model's width, E `inner_size`, N `state_size`, H `num_heads`, G `num_groups`,
W `conv_width`, R `rank`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from workbench.errors import WorkbenchError, is_whole

ATTENTION = "attention"
STATE_BYTES = 4  # of a value of a state: float32, whatever the dtype of the weights


@dataclass(frozen=True)
class StateShape:
    """Sizes of the state layers of one model. A kind reads those that it has; its file says which."""

    inner_size: int  # E, channels that are mixed; a head has E/H of them
    state_size: int = 16  # N, values of state for each channel; where the state is a matrix, size of a key
    num_heads: int = 1  # H
    num_groups: int = 1  # G, heads that share keys (B and C of Mamba-2), G of them; a divisor of H
    conv_width: int = 4  # W of the short convolution, the token itself included
    rank: int = 1  # R: of Mamba's step size, of RWKV's small maps, width of Hyena's filter network
    order: int = 2  # Hyena: how many gates
    chunk_size: int = 64  # tokens that the parallel form takes at once
    conv_bias: bool = False
    bias: bool = False  # of the projections in and out
    inner_norms: bool = False  # Jamba norms Mamba's step size, B and C

    @property
    def head_dim(self) -> int:
        """Channels of a head (values; keys have `state_size`)."""
        return self.inner_size // self.num_heads


@dataclass(frozen=True)
class _Kind:
    """What is counted of a kind of mixer."""

    reads: tuple[str, ...]  # the sizes it has; all others must be left as they are
    parameters: Callable[[StateShape, int], int]  # of the sizes and d
    states: Callable[[StateShape, int, int], dict[str, tuple[int, ...]]]  # of the sizes, d and the context length
    # FLOPs of the recurrence a token beside its matrices: products and sums over the state, 2 of a short convolution's
    flops: Callable[[StateShape, int, int], int]
    why_not: Callable[[StateShape, int], str] = lambda shape, d: ""  # what of the sizes does not fit, in words


def _projected(shape: StateShape, d: int, width_in: int) -> int:
    """Parameters of a map d -> width_in and one E -> d, with their biases."""
    weights = d * width_in + shape.inner_size * d
    return weights + (width_in + d if shape.bias else 0)


def _conv_parameters(shape: StateShape, channels: int) -> int:
    return channels * (shape.conv_width + shape.conv_bias)


def _linear_attention_channels(shape: StateShape) -> int:
    """q, k and v of all heads."""
    return 2 * shape.num_heads * shape.state_size + shape.inner_size


def _linear_attention_parameters(shape: StateShape, d: int) -> int:
    channels = _linear_attention_channels(shape)
    return _projected(shape, d, channels) + _conv_parameters(shape, channels)


def _linear_attention_states(shape: StateShape, d: int, context: int) -> dict[str, tuple[int, ...]]:
    heads, keys = shape.num_heads, shape.state_size
    return {
        "conv": (shape.conv_width - 1, _linear_attention_channels(shape)),
        "kv": (heads, keys, shape.head_dim),
        "keys": (heads, keys),
    }


def _mamba_parameters(shape: StateShape, d: int) -> int:
    inner, n, rank = shape.inner_size, shape.state_size, shape.rank
    selects = inner * (rank + 2 * n) + rank * inner + inner  # to the step's rank, B and C; from it to each channel
    norms = rank + 2 * n if shape.inner_norms else 0
    return _projected(shape, d, 2 * inner) + _conv_parameters(shape, inner) + selects + norms + inner * n + inner


def _mamba_states(shape: StateShape, d: int, context: int) -> dict[str, tuple[int, ...]]:
    return {"conv": (shape.conv_width - 1, shape.inner_size), "ssm": (shape.inner_size, shape.state_size)}


def _mamba2_channels(shape: StateShape) -> int:
    """x, B and C, which pass the convolution."""
    return shape.inner_size + 2 * shape.num_groups * shape.state_size


def _mamba2_parameters(shape: StateShape, d: int) -> int:
    channels = _mamba2_channels(shape)
    projected = _projected(shape, d, shape.inner_size + channels + shape.num_heads)
    return projected + _conv_parameters(shape, channels) + 3 * shape.num_heads + shape.inner_size


def _mamba2_states(shape: StateShape, d: int, context: int) -> dict[str, tuple[int, ...]]:
    return {
        "conv": (shape.conv_width - 1, _mamba2_channels(shape)),
        "ssm": (shape.num_heads, shape.state_size, shape.head_dim),
    }


def _gated_delta_parameters(shape: StateShape, d: int) -> int:
    channels = _mamba2_channels(shape)  # q and k of all key heads, and v
    projected = d * (channels + shape.inner_size + 2 * shape.num_heads) + shape.inner_size * d
    return projected + _conv_parameters(shape, channels) + 2 * shape.num_heads + shape.head_dim


def _gated_delta_states(shape: StateShape, d: int, context: int) -> dict[str, tuple[int, ...]]:
    return {
        "conv": (shape.conv_width - 1, _mamba2_channels(shape)),
        "delta": (shape.num_heads, shape.state_size, shape.head_dim),
    }


def _rwkv7_parameters(shape: StateShape, d: int) -> int:
    inner, small = shape.inner_size, 3 * (d * shape.rank + shape.rank * shape.inner_size)
    vectors = 6 * d + 2 * inner + 3 * inner + 2 * inner  # shares, two biases, removal replacement bonus, norm
    return 4 * d * inner + small + vectors


def _rwkv7_states(shape: StateShape, d: int, context: int) -> dict[str, tuple[int, ...]]:
    return {"shift": (d,), "wkv": (shape.num_heads, shape.head_dim, shape.head_dim)}


def _s4d_parameters(shape: StateShape, d: int) -> int:
    out = 2 * d * d + (2 * d if shape.bias else 0)
    return d * (2 * shape.state_size + 2) + out  # decay, frequency and C; step and skip


def _s4_parameters(shape: StateShape, d: int) -> int:
    return _s4d_parameters(shape, d) + d * 2 * shape.state_size  # P and B


def _s4_states(shape: StateShape, d: int, context: int) -> dict[str, tuple[int, ...]]:
    return {"x": (d, shape.state_size // 2, 2)}


def _hyena_parameters(shape: StateShape, d: int) -> int:
    channels = (shape.order + 1) * shape.inner_size
    network = 5 * shape.rank + shape.rank + shape.rank**2 + shape.rank  # of a distance: 5 numbers, two layers
    filters = network + shape.rank * shape.order * shape.inner_size
    return _projected(shape, d, channels) + _conv_parameters(shape, channels) + filters + shape.order * shape.inner_size


def _hyena_states(shape: StateShape, d: int, context: int) -> dict[str, tuple[int, ...]]:
    return {
        "conv": (shape.conv_width - 1, (shape.order + 1) * shape.inner_size),
        "inputs": (shape.order, context, shape.inner_size),
    }


def _recurrent_memory_parameters(shape: StateShape, d: int) -> int:
    return shape.state_size * d + 6 * d * shape.inner_size


def _recurrent_memory_states(shape: StateShape, d: int, context: int) -> dict[str, tuple[int, ...]]:
    return {"memory": (shape.state_size, d), "segment": (shape.chunk_size, d), "filled": (1,)}


# -- FLOPs of one token in the recurrent form, less exponentials, norms, gates and what is said once a token ----------


def _conv_flops(shape: StateShape, channels: int) -> int:
    return 2 * shape.conv_width * channels


def _a_value(times: int, *, conv: Callable[[StateShape], int] | None = None) -> Callable[[StateShape, int, int], int]:
    """So many FLOPs for each value of a state of E × N (a matrix a head, or N values a channel)."""

    def count(shape: StateShape, d: int, context: int) -> int:
        passed = 0 if conv is None else _conv_flops(shape, conv(shape))
        return times * shape.inner_size * shape.state_size + passed

    return count


def _rwkv7_flops(shape: StateShape, d: int, context: int) -> int:
    return 9 * shape.inner_size * shape.head_dim


def _hyena_flops(shape: StateShape, d: int, context: int) -> int:
    channels = (shape.order + 1) * shape.inner_size
    return 2 * shape.order * context * shape.inner_size + _conv_flops(shape, channels)


def _recurrent_memory_flops(shape: StateShape, d: int, context: int) -> int:
    """Keys and values of all rows anew, and attention over them; the memory's own, once a segment, is left out."""
    rows = shape.state_size + shape.chunk_size
    return (rows - 1) * 4 * d * shape.inner_size + rows * 4 * shape.inner_size


def _why_not_s4(shape: StateShape, d: int) -> str:
    if shape.inner_size != d:
        return f"inner_size {shape.inner_size} must be the model's width {d}: each of its channels has a system"
    if shape.state_size % 2:
        return f"state_size {shape.state_size} must be even: eigenvalues come in conjugate pairs"
    return ""


def _why_not_rwkv7(shape: StateShape, d: int) -> str:
    if shape.chunk_size > 64:
        return f"chunk_size {shape.chunk_size} must be at most 64: a chunk's decay is divided by, and would underflow"
    return ""


_HEADS = ("inner_size", "state_size", "num_heads", "conv_width", "conv_bias", "bias", "chunk_size")
_GROUPS = ("inner_size", "state_size", "num_heads", "num_groups", "conv_width", "conv_bias", "chunk_size")
_S4 = ("inner_size", "state_size", "chunk_size", "bias")
_MAMBA = ("inner_size", "state_size", "rank", "conv_width", "conv_bias", "bias", "inner_norms", "chunk_size")
_RWKV7 = ("inner_size", "num_heads", "rank", "chunk_size")
_HYENA = ("inner_size", "conv_width", "conv_bias", "bias", "order", "rank")
_MEMORY = ("inner_size", "state_size", "num_heads", "chunk_size")
KINDS: dict[str, _Kind] = {
    "linear_attention": _Kind(
        _HEADS,
        _linear_attention_parameters,
        _linear_attention_states,
        _a_value(4, conv=_linear_attention_channels),  # outer product, sum, and 2 to read
    ),
    # complex numbers, two values each: decay 3 a value, input 2, reading 2; the low-rank part of S4 comes on top
    "s4": _Kind(_S4, _s4_parameters, _s4_states, _a_value(22), _why_not_s4),
    "s4d": _Kind(_S4, _s4d_parameters, _s4_states, _a_value(7), _why_not_s4),
    # Δ A, Δ u B, decay, sum, and 2 to read
    "mamba": _Kind(_MAMBA, _mamba_parameters, _mamba_states, _a_value(6, conv=lambda s: s.inner_size)),
    # decay, outer product, sum, and 2 to read
    "mamba2": _Kind((*_GROUPS, "bias"), _mamba2_parameters, _mamba2_states, _a_value(5, conv=_mamba2_channels)),
    # the same, and 2 to read what stands under the key
    "gated_delta": _Kind(_GROUPS, _gated_delta_parameters, _gated_delta_states, _a_value(7, conv=_mamba2_channels)),
    # the same, and 2 for the removal beside the writing
    "rwkv7": _Kind(_RWKV7, _rwkv7_parameters, _rwkv7_states, _rwkv7_flops, _why_not_rwkv7),
    "hyena": _Kind(_HYENA, _hyena_parameters, _hyena_states, _hyena_flops),
    "recurrent_memory": _Kind(_MEMORY, _recurrent_memory_parameters, _recurrent_memory_states, _recurrent_memory_flops),
}
MIXERS = (ATTENTION, *KINDS)


def mixer_parameters(kind: str, shape: StateShape, d: int) -> int:
    """Parameters of one mixer of this kind in a model of width d, exactly."""
    return KINDS[kind].parameters(shape, d)


def state_shapes(kind: str, shape: StateShape, d: int, context: int) -> dict[str, tuple[int, ...]]:
    """What one sequence keeps in a layer of this kind: name -> shape, without the sequence."""
    return KINDS[kind].states(shape, d, context)


def mixer_matrices(kind: str, shape: StateShape, d: int) -> list[tuple[int, int]]:
    """Inputs and outputs of every matrix of a mixer, biases left out."""
    inner, heads, keys = shape.inner_size, shape.num_heads, shape.num_groups * shape.state_size
    out, small = (inner, d), [(d, shape.rank), (shape.rank, inner)]
    match kind:
        case "linear_attention":
            return [(d, _linear_attention_channels(shape)), out]
        case "s4" | "s4d":
            return [(d, 2 * d)]
        case "mamba":
            select = inner, shape.rank + 2 * shape.state_size
            return [(d, 2 * inner), select, (shape.rank, inner), out]
        case "mamba2":
            return [(d, 2 * inner + 2 * keys + heads), out]
        case "gated_delta":
            return [(d, 2 * keys + inner), (d, inner), (d, heads), (d, heads), out]
        case "rwkv7":
            return [*[(d, inner)] * 3, *small * 3, out]
        case "hyena":  # the filter's own network, once a step, is no product over the rows
            return [(d, (shape.order + 1) * inner), out]
        case "recurrent_memory":
            return [*[(d, inner)] * 3, out]
    raise AssertionError(f"a kind that is not counted: {kind}")


def scan_flops(kind: str, shape: StateShape, d: int, context: int) -> int:
    """FLOPs of one token in the recurrent form of a mixer, beside those of its matrices."""
    return KINDS[kind].flops(shape, d, context)


def check_state_shape(shape: StateShape, kinds: tuple[str, ...], d: int) -> None:
    """Raise WorkbenchError for sizes that are none, do not divide, or that no layer of these kinds reads."""
    for field in dataclasses.fields(shape):
        value, name = getattr(shape, field.name), f"state_shape.{field.name}"
        if field.type == "bool":
            if not isinstance(value, bool):
                raise WorkbenchError(f"{name} must be True or False, got {value!r:.80}")
        elif not is_whole(value) or value < 1:
            raise WorkbenchError(f"{name} must be a whole number of at least 1, got {value!r:.80}")
        if value != field.default and not any(field.name in KINDS[kind].reads for kind in kinds):
            read = sorted({size for kind in kinds for size in KINDS[kind].reads})
            raise WorkbenchError(
                f"{name} = {value!r:.80}, and no layer of this model reads it; sizes of {', '.join(kinds)}: "
                f"{', '.join(read)}"
            )
    if shape.inner_size % shape.num_heads:
        raise WorkbenchError(
            f"state_shape.inner_size {shape.inner_size} does not divide into num_heads {shape.num_heads}"
        )
    if shape.num_heads % shape.num_groups:
        raise WorkbenchError(
            f"state_shape.num_heads {shape.num_heads} must be a multiple of num_groups {shape.num_groups}"
        )
    for kind in kinds:
        if reason := KINDS[kind].why_not(shape, d):
            raise WorkbenchError(f"state_shape of {kind}: {reason}")
