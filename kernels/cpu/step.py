"""A decode step of a few rows on a CPU as one function in C++ (`step.cpp`): what goes in, and where it lies.

    ModelParts   a model's matrices and norms, in any mix of float32, bfloat16, float16 and codes of 8 or 4 bits
    Rows         tokens of one or several sequences, texts or trees
    run          these -> logits, of each row the token that it says, and hidden states where they are wanted

Numbers are float32 between the matrices, whatever type these have; keys and values are rounded to the cache's type when
they are stored. Each row attends over what its sequence has cached and the tokens of the batch before it, so a row of
every sequence, a prompt's chunk and a chain of drafted tokens are the same thing. In a tree (`Batch.parents`) a row
sees of these its own branch. A draft head (EAGLE) is such a model too, of one layer, that is given hidden states with
its tokens.

The loop is handed addresses: whoever calls it has seen that shapes fit, tokens and positions exist, and there is room.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from workbench.kernels.cpu import coded_attention
from workbench.kernels.cpu.codes import CodeProduct, WeightArguments
from workbench.native.build import functions, why_no_library

SOURCE = Path(__file__).with_name("step.cpp")
TYPES = (torch.float32, torch.bfloat16, torch.float16)  # of numbers, as the loop counts them
LANES = 8  # a head's size is a multiple of this
RMS_NORM, LAYER_NORM = 1, 2
CODES, CODES_Q8 = 3, 4  # kinds of matrices behind TYPES
NO_MATRIX = -1
Pointer, Whole, Real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def _fields(kind: type, *names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


class MatrixArguments(ctypes.Structure):
    """`struct Matrix`."""

    _fields_ = [
        *_fields(Whole, "kind"),
        *_fields(Pointer, "numbers"),
        ("codes", WeightArguments),
        *_fields(Whole, "out", "in"),
        *_fields(Pointer, "bias", "divisor"),
    ]


class NormArguments(ctypes.Structure):
    """`struct Norm`. Kind 0: there is none."""

    _fields_ = [*_fields(Whole, "kind"), *_fields(Pointer, "weight", "bias"), *_fields(Real, "eps")]


NORMS = ("before_attention", "of_q", "of_k", "after_attention", "before_mlp", "after_mlp")
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


class LayerArguments(ctypes.Structure):
    """`struct Layer`."""

    _fields_ = [
        *_fields(NormArguments, *NORMS),
        *_fields(MatrixArguments, *MATRICES),
        *_fields(Whole, "owns_keys", "place", "window", "table"),
    ]


class ModelArguments(ctypes.Structure):
    """`struct Model`."""

    _fields_ = [
        *_fields(
            Whole, "width", "heads", "kv_heads", "size", "hidden", "vocabulary", "layers", "sinks", "gated", "gelu"
        ),
        *_fields(Real, "attention_scale", "embedding_scale"),
        *_fields(Whole, "type"),
        *_fields(Pointer, "embedding", "positions", "layer"),
        ("last", NormArguments),
        *_fields(MatrixArguments, "head", "of_given"),
    ]


class StoredArguments(ctypes.Structure):
    """`struct Stored`."""

    _fields_ = [*_fields(Pointer, "start"), *_fields(Whole, "layer", "block", "token", "head")]


class CodesArguments(ctypes.Structure):
    """`struct coded::Cache`."""

    _fields_ = [
        *_fields(Pointer, "layers", "sequences", "sequences_in_window", "runs", "runs_in_window", "keys", "values"),
        *_fields(Whole, "rows", "bytes"),
    ]


class RoundedArguments(ctypes.Structure):
    """`struct coded::Rounded`."""

    _fields_ = _fields(Pointer, "codes", "scale", "zero")


class BlocksArguments(ctypes.Structure):
    """`struct coded::Blocks`."""

    _fields_ = [
        *_fields(RoundedArguments, "keys", "values"),
        *_fields(Whole, "format", "places", "block_size", "bytes"),
    ]


class CacheArguments(ctypes.Structure):
    """`struct Cache`."""

    _fields_ = [
        *_fields(StoredArguments, "keys", "values"),
        *_fields(Whole, "type", "block_size"),
        *_fields(Pointer, "codes", "blocks"),
    ]


class TokenArguments(ctypes.Structure):
    """`struct Tokens`."""

    _fields_ = [
        *_fields(Whole, "rows", "sequences", "blocks"),
        *_fields(Pointer, "ids", "positions", "starts", "tables", "turns", "other_turns"),
        *_fields(Whole, "wanted"),
        *_fields(Pointer, "wanted_rows", "parents", "trunks", "given", "states"),
    ]


@functools.cache
def why_not_here() -> str:
    """Why there is no such loop on this machine; "" where there is. Compiles it, once a machine."""
    return why_no_library(SOURCE)


def opened(made: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with the types of its functions."""
    made.step.restype = None
    made.step.argtypes = [Pointer, Pointer, Pointer, Whole, Pointer, Pointer]
    made.attend_rows.restype = made.norm_rows.restype = made.gate_rows.restype = None
    made.attend_rows.argtypes = [Pointer, Whole, Pointer, Pointer, Whole, Pointer, Pointer]
    made.norm_rows.argtypes = [Pointer, Whole, Pointer, Pointer, Whole, Whole, Pointer]
    made.gate_rows.argtypes = [Pointer, Whole, Whole, Whole, Whole]
    return made


_functions = functools.partial(functions, SOURCE, opened)


# -- the model -------------------------------------------------------------------------------------------------------


class Matrix:
    """A matrix [out, in] as the loop reads it: numbers of one of TYPES, or the codes of a `CodeProduct`.

    bias [out], divisor [in]: y = (x / divisor) · Wᵀ + bias.
    """

    def __init__(
        self, weight: torch.Tensor | CodeProduct, bias: torch.Tensor | None = None, divisor: torch.Tensor | None = None
    ) -> None:
        self.bias, self.divisor = _floats(bias), _floats(divisor)
        besides = _address(self.bias), _address(self.divisor)
        if isinstance(weight, CodeProduct):
            self.weight: torch.Tensor | CodeProduct = weight
            self.shape = weight.out_features, weight.in_features
            kind = CODES_Q8 if weight.q8 else CODES
            self.arguments = MatrixArguments(kind, None, weight.arguments, *self.shape, *besides)
        else:
            self.weight = weight.detach().contiguous()
            self.shape = weight.shape[0], weight.shape[1]
            kind = TYPES.index(weight.dtype)
            self.arguments = MatrixArguments(kind, self.weight.data_ptr(), WeightArguments(), *self.shape, *besides)

    @property
    def nbytes(self) -> int:
        """What one product reads, the inputs not counted."""
        return sum(one.nbytes for one in self.tensors)

    @property
    def tensors(self) -> list[torch.Tensor]:
        numbers = self.weight.tensors if isinstance(self.weight, CodeProduct) else [self.weight]
        return numbers + [one for one in (self.bias, self.divisor) if one is not None]


class Norm:
    """weight, bias [n]; without a bias an RMSNorm, with one a LayerNorm."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        self.weight, self.bias = _floats(weight), _floats(bias)
        kind = RMS_NORM if bias is None else LAYER_NORM
        self.arguments = NormArguments(kind, _address(self.weight), _address(self.bias), eps)


@dataclass
class LayerParts:
    """norms, matrices: by the names of NORMS and MATRICES; those that are left out are not there.

    place: of its keys and values in the cache; it writes them where it owns them. window: None where it sees
    everything. table: of cos and sin, 0 or 1; None where nothing turns.
    """

    norms: dict[str, Norm]
    matrices: dict[str, Matrix]
    owns_keys: bool
    place: int
    window: int | None
    table: int | None

    @property
    def arguments(self) -> LayerArguments:
        made = LayerArguments(
            owns_keys=self.owns_keys,
            place=self.place,
            window=self.window or 0,
            table=-1 if self.table is None else self.table,
        )
        for name, part in (self.norms | self.matrices).items():
            setattr(made, name, part.arguments)
        return made


@dataclass
class ModelParts:
    """What a step is made of. embedding [V, d] and position_embedding [positions, d], of one of TYPES.

    size: of a head. hidden: units of the feed-forward. sinks: tokens that every windowed one sees as well.
    of_given: [d, d], for a model whose rows come with hidden states, which it multiplies and adds to the embeddings.
    """

    heads: int
    kv_heads: int
    size: int
    hidden: int
    sinks: int
    gated: bool
    gelu: bool
    attention_scale: float
    embedding: torch.Tensor
    embedding_scale: float
    position_embedding: torch.Tensor | None
    layers: list[LayerParts]
    norm: Norm
    head: Matrix | None  # None of a model of which only attention is run
    of_given: Matrix | None = None

    def __post_init__(self) -> None:
        assert self.size % LANES == 0 and self.embedding.is_contiguous()
        table = self.position_embedding
        assert table is None or (table.is_contiguous() and table.dtype == self.embedding.dtype)
        self.vocabulary, self.width = self.embedding.shape
        self._layers = (LayerArguments * len(self.layers))(*(layer.arguments for layer in self.layers))
        self.arguments = ModelArguments(
            self.width,
            self.heads,
            self.kv_heads,
            self.size,
            self.hidden,
            self.vocabulary,
            len(self.layers),
            self.sinks,
            self.gated,
            self.gelu,
            self.attention_scale,
            self.embedding_scale,
            TYPES.index(self.embedding.dtype),
            self.embedding.data_ptr(),
            _address(table),
            ctypes.addressof(self._layers),
            self.norm.arguments,
            _matrix_arguments(self.head),
            _matrix_arguments(self.of_given),
        )

    @property
    def nbytes(self) -> int:
        """Of the matrices, which every step reads once."""
        return sum(matrix.nbytes for matrix in self.matrices)

    @property
    def output(self) -> Matrix:
        """The head of a model whose steps are run."""
        assert self.head is not None
        return self.head

    @property
    def matrices(self) -> list[Matrix]:
        every = [matrix for layer in self.layers for matrix in layer.matrices.values()] + [self.head, self.of_given]
        return [matrix for matrix in every if matrix is not None]


def _matrix_arguments(matrix: Matrix | None) -> MatrixArguments:
    return MatrixArguments(NO_MATRIX) if matrix is None else matrix.arguments


def _floats(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().float().contiguous()


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


# -- a step ----------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """What a step is given. Of each sequence the rows lie side by side, in their order."""

    token_ids: Sequence[int]  # [N]
    positions: Sequence[int]  # [N]
    starts: Sequence[int]  # [sequences + 1] the first row of each
    tables: Sequence[Sequence[int]]  # of each sequence the blocks of all its tokens, new ones included
    wanted: Sequence[int]  # rows that get logits
    trees: tuple[Sequence[int], Sequence[int]] | None = None
    """None where all sequences are texts; else for each row the row of its sequence that it follows, −1 for none, [N],
    and of each sequence how many of its first rows are a text."""
    given: torch.Tensor | None = None  # [N, d] float32 hidden states, for a model that takes them
    first: tuple[int, int] = (0, 0)  # row and sequence of the placed batch that these begin with


class Made(NamedTuple):
    """What a step gives."""

    logits: torch.Tensor  # [wanted, V] float32
    said: torch.Tensor
    """[wanted, 3] float64: the token of the highest logit, the natural log of its probability, and its logit, which is
    NaN where the row is no distribution."""
    states: torch.Tensor | None  # [N, d] float32 hidden states after the last norm, where they were asked for


def run(
    model: ModelParts, where: Any, rows: Rows, turns: Sequence[torch.Tensor], threads: int, states: bool = False
) -> Made:
    """Logits of the rows that want them, and with `states` hidden states of all. The cache has the new keys and values
    then.

    where: a `workbench.models.placed.Keys`, of one of TYPES, or an `InCodes` or `InCodedBlocks`, whose counter of
    bytes goes on. turns: tables [positions, 2, D] float32 of cos and signed sin.
    """
    count, wanted, given = len(rows.token_ids), len(rows.wanted), rows.given
    logits = torch.empty(wanted, model.vocabulary)
    said = torch.empty(wanted, 3, dtype=torch.float64)
    hidden = torch.empty(count, model.width) if states else None
    assert (given is None) == (model.of_given is None)
    if given is not None:
        assert given.shape == (count, model.width) and given.dtype == torch.float32
        given = given.contiguous()
    cache, codes = _cache(where, *rows.first)
    tokens = _Tokens(rows, turns, given, hidden)
    arguments = (ctypes.byref(one) for one in (model.arguments, cache, tokens.arguments))
    _functions().step(*arguments, threads, logits.data_ptr(), said.data_ptr())
    if codes is not None:
        where.bytes_read += codes.bytes
    return Made(logits, said, hidden)


class _Tokens:
    """`struct Tokens` of these rows, and what it points to."""

    def __init__(
        self,
        rows: Rows,
        turns: Sequence[torch.Tensor],
        given: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
    ) -> None:
        token_ids, positions, starts, tables, wanted, trees, *_ = rows
        count, sequences, width = len(token_ids), len(tables), max(map(len, tables))
        parents, trunks = trees or ((), ())
        whole = [*token_ids, *positions, *starts, *wanted, *parents, *trunks]
        numbers = (Whole * len(whole))(*whole)
        at, size = ctypes.addressof(numbers), ctypes.sizeof(Whole)
        padded = [block for table in tables for block in (*table, *[0] * (width - len(table)))]
        blocks = (ctypes.c_int32 * len(padded))(*padded)
        behind = at + size * (2 * count + sequences + 1 + len(wanted))  # the parents
        self._kept = numbers, blocks, turns, given, hidden
        self.arguments = TokenArguments(
            count,
            sequences,
            width,
            at,
            at + size * count,
            at + size * 2 * count,
            ctypes.addressof(blocks),
            *[table.data_ptr() for table in turns] + [None] * (2 - len(turns)),
            len(wanted),
            at + size * (2 * count + sequences + 1),
            behind if trees else None,
            behind + size * count if trees else None,
            _address(given),
            _address(hidden),
        )


def _cache(
    where: Any, first_row: int, first_sequence: int
) -> tuple[CacheArguments, CodesArguments | BlocksArguments | None]:
    """What the loop is handed, and the part of it that counts bytes, which has to live as long."""
    if hasattr(where, "seen"):
        codes = _in_codes(where, first_row, first_sequence)
        return CacheArguments(codes=ctypes.addressof(codes)), codes
    if hasattr(where, "format"):
        blocks = _in_blocks(where)
        return CacheArguments(block_size=where.block_size, blocks=ctypes.addressof(blocks)), blocks
    keys = StoredArguments(where.keys.data_ptr(), *where.key_strides)
    values = StoredArguments(where.values.data_ptr(), *where.value_strides)
    return CacheArguments(keys, values, TYPES.index(where.keys.dtype), where.block_size), None


def _in_codes(where: Any, first_row: int, first_sequence: int) -> CodesArguments:
    skipped = first_sequence * ctypes.sizeof(coded_attention.Sequence)
    sequences = [None if seen is None else ctypes.addressof(seen.sequences) + skipped for seen in where.seen]
    runs = [None if seen is None else ctypes.addressof(seen.runs) for seen in where.seen]
    _, rows, heads, size = where.keys.shape
    new = [one.data_ptr() + first_row * heads * size * one.itemsize for one in (where.keys, where.values)]
    return CodesArguments(ctypes.addressof(where.layers), *sequences, *runs, *new, rows)


def _in_blocks(where: Any) -> BlocksArguments:
    keys, values = (
        RoundedArguments(*(None if one is None else one.data_ptr() for one in (codes, scale, zero)))
        for codes, scale, zero in (where.keys, where.values)
    )
    places = where.keys[0].shape[1]
    return BlocksArguments(keys, values, coded_attention.FORMATS.index(where.format), places, where.block_size)


# -- parts of a step, each a call of its own -------------------------------------------------------------------------


class Attention:
    """Attention of one batch over a cache, a layer at a time. model: its matrices may be left out. where, rows, turns:
    as for `run`."""

    def __init__(self, model: ModelParts, where: Any, rows: Rows, turns: Sequence[torch.Tensor]) -> None:
        self._where, self._rows, self._size = where, len(rows.token_ids), (model.heads, model.size)
        self._wide = [(model.heads + 2 * model.kv_heads * layer.owns_keys) * model.size for layer in model.layers]
        self._cache, self._codes = _cache(where, *rows.first)
        self._tokens = _Tokens(rows, turns)
        self._given = [ctypes.byref(one) for one in (model.arguments, self._cache, self._tokens.arguments)]
        self._kept = model
        self._attend = _functions().attend_rows

    def __call__(self, layer: int, heads: torch.Tensor, threads: int) -> torch.Tensor:
        """heads [N, (H_q + 2·H_kv)·D] float32: q, k and v as the product gives them, q alone where the layer has no
        keys of its own -> [N, H_q, D] float32. The cache has its new keys and values then."""
        assert heads.shape == (self._rows, self._wide[layer]) and heads.dtype == torch.float32
        heads = heads.contiguous()
        model, cache, tokens = self._given
        mixed = torch.empty(self._rows, *self._size)
        self._attend(model, layer, cache, tokens, threads, heads.data_ptr(), mixed.data_ptr())
        return mixed

    def end(self) -> None:
        """Every layer has attended: what was read of codes is counted."""
        if self._codes is not None:
            self._where.bytes_read += self._codes.bytes


class RowNorm:
    """The norm of a few rows, in one call."""

    def __init__(self, norm: Norm) -> None:
        self._norm, self._call = ctypes.byref(norm.arguments), _functions().norm_rows
        self._kept = norm

    def __call__(self, x: torch.Tensor, added: torch.Tensor | None, threads: int) -> torch.Tensor:
        """x [N, d] -> [N, d]. added [N, d], where there is any, is added to x first, in place. All are float32 and
        contiguous."""
        made, (rows, size) = torch.empty_like(x), x.shape
        given = x.data_ptr(), None if added is None else added.data_ptr()
        self._call(self._norm, size, *given, rows, threads, made.data_ptr())
        return made


class RowGate:
    """act(gate) · up of a few rows, in one call."""

    def __init__(self, *, gelu: bool) -> None:
        self._gelu, self._call = gelu, _functions().gate_rows

    def __call__(self, wide: torch.Tensor, threads: int) -> torch.Tensor:
        """wide [N, 2·F] float32, contiguous, gate and up side by side -> [N, F], in the gate's place."""
        rows, both = wide.shape
        self._call(wide.data_ptr(), both // 2, self._gelu, rows, threads)
        return wide[:, : both // 2]
