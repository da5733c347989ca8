"""Steps of a few rows as one function in C++ (`kernels/cpu/step.cpp`): a model's parts for it, and batches through it.

    a decode step of one sequence       one row                        1
    of B sequences                      one row each                   B
    a verification of K drafted tokens  a chain, or a tree         K + 1
    a prompt, or a chunk of one         a chain, one row of logits     n
    a level of an EAGLE head's draft    a row, its hidden state        1

Nothing is compiled for a shape: one library serves every model, in float32, bfloat16, float16 and codes of 8 or 4 bits,
and is made once a machine in some seconds. No Python and no allocation runs between its products, and torch sees none
of them; threads meet at barriers, five a layer (seven where what is added is normed once more). So a step takes what
its bytes take, and little more.

It reads keys and values where they lie, in slots or blocks, as numbers or codes, of every kv that says where
(`step_storage`, `place_step`, `place_batch`). What it does not take runs as it did: larger batches (`rows_limit`),
other kvs, trees over codes (`NativeSteps.reason` says why). A tree stays in one piece, and each of its rows comes with
the one that it follows.

Between the matrices numbers stay float32, where a model in 16 bits run by torch rounds after each operation: logits
differ from torch's by such roundings, and are closer to those of the same weights in float32.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.errors import WorkbenchError
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder, DecoderLayer
from workbench.models.fast_layers import RMS_NORMS, detached, norm_weight
from workbench.models.linear import torch_multiplies
from workbench.models.placed import InCodedBlocks, InCodes, Keys, Placed, slots_of

if TYPE_CHECKING:
    from workbench.kernels.cpu.step import LayerParts, Made, Matrix, ModelParts, Norm, Rows
    from workbench.models.heads import EagleHead

Tables = Callable[[int], list[torch.Tensor]]  # of cos and sin, for so many positions
TYPES = (torch.float32, torch.bfloat16, torch.float16)  # of weights, and of keys and values
LANES = 8  # a head has a multiple of so many values
MAX_ROWS = 96  # of float32: with more a product of matrices as large as a processor's caches like them is ahead
MAX_ROWS_OF_CODES = 64  # with more they become numbers first, once for all rows
MAX_ROWS_OF_Q8 = 512  # of codes whose inputs are rounded too
PIECE = 64  # rows that go through the layers together; more come one piece after the other
Said = torch.Tensor  # [3] float64: the best token, the log of its probability, its logit


def why_not_native(model: Decoder) -> str:
    """Why steps of this model do not run as one function; "" where they do. Compiles the loop, once a machine."""
    from workbench.kernels.cpu import step as loop

    return why_not_model(model) or loop.why_not_here()


def why_not_model(model: Decoder) -> str:
    """Why steps of this model do not, whatever the machine's compiler; "" where they may."""
    config = model.config
    if model.device.type != "cpu":
        return f"it is for CPUs, and {model.name} is on {model.device}"
    if reason := why_not_shape(config):
        return reason
    if model.dtype not in TYPES:
        return f"it computes in float32, and {model.name} is in {str(model.dtype).removeprefix('torch.')}"
    return ""


def why_not_steps_of(config: ModelConfig, device: torch.device | str) -> str:
    """The same, of any model of this shape in a type that is taken."""
    from workbench.kernels.cpu import step as loop

    if torch.device(device).type != "cpu":
        return f"native steps are for CPUs, and this is on {device}"
    return why_not_shape(config) or loop.why_not_here()


def why_not_shape(config: ModelConfig) -> str:
    """Why a model of this shape has no such steps; "" where it has."""
    if config.mixers:
        return "it knows layers that attend, and none that keep a state"
    if config.latent_attention is not None:
        return "it knows keys and values of every head, and no latents"
    if config.experts is not None:
        return "it knows one feed-forward a layer, and no experts"
    if config.head_dim % LANES:
        return f"it takes heads of a multiple of {LANES} values; these have {config.head_dim}"
    return ""


def why_not_native_head(head: EagleHead, dtype: torch.dtype, target: NativeSteps | None) -> str:
    """Why the steps of an EAGLE head in this type do not run as one function; "" where they do. target: those of its
    target."""
    if target is None:
        return "those of its target do not"
    if head.device.type != "cpu":
        return f"it is for CPUs, and {head.name} is on {head.device}"
    if reason := why_not_shape(head.config):
        return reason
    return (
        "" if dtype in TYPES else f"it computes in float32, and {head.name} is in {str(dtype).removeprefix('torch.')}"
    )


class NativeSteps:
    """The steps of one model. reason: what became of the last batch, in words."""

    def __init__(self, config: ModelConfig, parts: ModelParts, max_rows: int | None) -> None:
        """max_rows: see `rows_limit`; whoever has measured how many are faster sets fewer."""
        self.config, self.parts, self.max_rows = config, parts, max_rows
        self.reason = "no step was taken yet"
        self._in_floats = FloatTables()

    @classmethod
    def of(cls, model: Decoder, inputs: str = "exact") -> NativeSteps:
        """inputs: of quantized linears, see `prepare`. Raises WorkbenchError where a matrix has no form for it."""
        return cls(model.config, _parts_of(model, inputs), rows_limit(model, inputs))

    @classmethod
    def of_eagle(cls, head: EagleHead, table: torch.Tensor, target: NativeSteps) -> NativeSteps:
        """Of an EAGLE head, which has its target's output head. table [V, d]: what its fc makes of each token."""
        return cls(
            head.config,
            _parts_of_eagle(head, table, target.parts.output),
            limit_of(head.fc.weight.dtype, in_codes=False),
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads, of one row or of several."""
        return self.parts.nbytes

    # -- one row -----------------------------------------------------------------------------------------------------

    def may_call(self, kv: Any) -> bool:
        """Whether steps of one row with this kv are taken without a batch, from its first token on. Where it is empty
        yet the first token is a prompt, and comes in a batch."""
        return any(hasattr(kv, name) for name in ("step_storage", "place_step")) and _is_of(self.config, kv)

    def one_call(
        self, token: int, position: int, sequence: Hashable, kv: Any, tables: Tables
    ) -> tuple[torch.Tensor, Said] | None:
        """(logits [1, V] float32, said), and the kv has the token. None where it has to come in a batch, and nothing
        has changed."""
        made = self.one_row(token, position, sequence, kv, tables)
        return None if made is None else (made.logits, made.said[0])

    def one_row(
        self, token: int, position: int, sequence: Hashable, kv: Any, tables: Tables, given: torch.Tensor | None = None
    ) -> Made | None:
        """The same, and for a model that takes hidden states, given [1, d], the ones that it gives."""
        from workbench.kernels.cpu.step import Rows

        if not self.may_call(kv) or kv.lengths.get(sequence) != position or not 0 <= token < self.config.vocab_size:
            return None  # whoever takes the step the ordinary way says what is wrong
        placed = kv.place_step(sequence) if hasattr(kv, "place_step") else _in_slots(kv, sequence)
        if placed is None:
            return None
        turns = tables(position + 1)
        rows = Rows([token], [position], [0, 1], placed.tables, [0], given=given)
        made = self._run(placed.where, rows, turns, states=given is not None)
        kv.note_step(sequence)
        self.reason = "a step is one function in C++"
        return made

    # -- batches -----------------------------------------------------------------------------------------------------

    def rows(
        self, batch: Batch, kv: Any, tables: Tables, given: torch.Tensor | None = None, states: bool = False
    ) -> Made | None:
        """Logits [M, V] float32 of the rows that want them, with `states` the hidden states [N, d] of all, and the kv
        has the tokens. None where the batch goes the ordinary way, and nothing has changed; `reason` says why.

        given [N, d]: hidden states, for a model that takes them.
        """
        if reason := self._why_not(batch, kv):
            self.reason = reason
            return None
        wanted = list(range(batch.num_tokens)) if batch.logit_rows is None else batch.logit_rows.tolist()
        if wanted and not 0 <= min(wanted) <= max(wanted) < batch.num_tokens:
            raise WorkbenchError(f"a batch of {batch.num_tokens} rows wants logits of rows {wanted}")
        placed = kv.place_batch(batch)
        if placed is None:
            self.reason = _why_not_placed(kv, batch)
            return None
        turns, rows = tables(max(batch.lengths_after())), rows_of(batch, placed, wanted, given)
        made = self._run(placed.where, rows, turns, states)
        kv.note_batch(batch)
        self.reason = f"{batch.num_tokens} rows are one function in C++"
        return made

    def _why_not(self, batch: Batch, kv: Any) -> str:
        if self.max_rows is not None and batch.num_tokens > self.max_rows:
            return f"{batch.num_tokens} rows run as they are: up to {self.max_rows} are one function"
        if reason := why_not_placing(batch, kv, self.config):
            return reason
        if not 0 <= int(batch.token_ids.min()) <= int(batch.token_ids.max()) < self.config.vocab_size:
            return "there is no such token"
        return ""

    def _run(self, where: Keys | InCodes | InCodedBlocks, rows: Rows, turns: list[torch.Tensor], states: bool) -> Made:
        """As `kernels.cpu.step.run`; of many rows a piece after the other, each over the keys of those before it."""
        from workbench.kernels.cpu import step as loop

        threads, tables = torch.get_num_threads(), self._in_floats(turns)
        pieces = [
            loop.run(self.parts, where, piece, tables, threads, states)
            for piece in ([rows] if len(rows.token_ids) <= PIECE else _cut(rows))
        ]
        if len(pieces) == 1:
            return pieces[0]
        logits, said, hidden = zip(*pieces)
        return loop.Made(torch.cat(logits), torch.cat(said), torch.cat(hidden) if states else None)


class FloatTables:
    """Tables [positions, 2, D] of cos and signed sin in float32, converted when one comes that is longer."""

    def __init__(self) -> None:
        self._known: list[tuple[torch.Tensor, torch.Tensor]] = []  # as they came, and in float32

    def __call__(self, turns: list[torch.Tensor]) -> list[torch.Tensor]:
        known = self._known  # other threads may put longer ones in its place
        if len(turns) != len(known) or any(one is not before for one, (before, _) in zip(turns, known)):
            known = self._known = [(one, one.float().contiguous()) for one in turns]
        return [floats for _, floats in known]


def _is_of(config: ModelConfig, kv: Any) -> bool:
    """Whether it keeps keys and values of a model of this shape."""
    return kv.config is config or bool(kv.config == config)  # comparing takes longer than the rest of it


def why_not_placing(batch: Batch, kv: Any, config: ModelConfig) -> str:
    """Why a loop cannot read and write the kv for this batch, as far as that is known before it is placed."""
    if type(batch) is not Batch or batch.token_ids.device.type != "cpu":
        return "this kind of batch runs as it is"
    if not hasattr(kv, "place_batch") or not _is_of(config, kv):
        return f"a {type(kv).__name__} does not say where keys and values lie"
    if kv.dtype not in TYPES:
        return f"keys and values in {str(kv.dtype).removeprefix('torch.')} run as they are"
    return ""


def rows_of(batch: Batch, placed: Placed, wanted: Sequence[int], given: torch.Tensor | None = None) -> Rows:
    """The batch as the loop takes it."""
    from workbench.kernels.cpu.step import Rows

    token_ids, positions = batch.token_ids.tolist(), batch.positions.tolist()
    return Rows(token_ids, positions, batch.query_starts, placed.tables, wanted, _trees_of(batch), given)


def _in_slots(kv: Any, sequence: Hashable) -> Placed | None:
    """Of a kv that shows its storage: where the next token of a sequence belongs."""
    storage = kv.step_storage(sequence)
    if storage is None or storage.keys.dtype not in TYPES or storage.keys.device.type != "cpu":
        return None
    return Placed(slots_of(storage.keys, storage.values), [[storage.slot]])


def _why_not_placed(kv: Any, batch: Batch) -> str:
    reason = kv.why_not_placed(batch) if hasattr(kv, "why_not_placed") else ""
    return reason or f"this {type(kv).__name__} keeps keys and values in another form or place"


def _trees_of(batch: Batch) -> tuple[list[int], list[int]] | None:
    """See `kernels.cpu.step.Rows`."""
    if batch.parents is None:
        return None
    sizes = [b - a for a, b in pairwise(batch.query_starts)]
    parents = [range(-1, size - 1) if tree is None else tree for tree, size in zip(batch.parents, sizes)]
    return [row for one in parents for row in one], [_trunk(one) for one in parents]


def _trunk(parents: Sequence[int]) -> int:
    """How many of the first tokens of a tree follow each the one before it."""
    return next((at for at, parent in enumerate(parents) if parent != at - 1), len(parents))


def _cut(rows: Rows) -> Iterator[Rows]:
    """Pieces of PIECE rows, or more where a tree would be cut."""
    from workbench.kernels.cpu.step import Rows

    starts, first = rows.starts, 0
    while first < starts[-1]:
        end = min(first + PIECE, starts[-1])
        if rows.trees is not None:
            last = bisect_right(starts, end - 1)  # the sequence after the one of the piece's last row
            is_tree = rows.trees[1][last - 1] < starts[last] - starts[last - 1]
            end = starts[last] if is_tree else end
        here = [index for index, (a, b) in enumerate(pairwise(starts)) if a < end and b > first]
        parents, trunks = rows.trees or ((), ())
        yield Rows(
            rows.token_ids[first:end],
            rows.positions[first:end],
            [0, *(min(starts[index + 1], end) - first for index in here)],
            [rows.tables[index] for index in here],
            [row - first for row in rows.wanted if first <= row < end],
            None if rows.trees is None else (parents[first:end], [trunks[index] for index in here]),
            None if rows.given is None else rows.given[first:end],
            (first, here[0]),
        )
        first = end


def rows_limit(model: Decoder, inputs: str = "exact") -> int | None:
    """`limit_of` for this model."""
    return limit_of(model.dtype, in_codes=any(hasattr(one, "for_loop") for one in model.modules()), inputs=inputs)


def limit_of(dtype: torch.dtype, *, in_codes: bool, inputs: str = "exact") -> int | None:
    """Rows up to which this is the faster way, None: always; by rule, from what was measured with two threads and AVX2.
    native="auto" measures how many of them are faster on a machine (`measured_steps`). in_codes: some matrices.

    Numbers of 16 bits that the processor cannot multiply take torch four times as long as this loop, whatever the rows.
    """
    if not torch_multiplies(dtype):
        return None
    if not in_codes:
        return MAX_ROWS
    return MAX_ROWS_OF_Q8 if inputs == "q8" else MAX_ROWS_OF_CODES


# -- a model's parts ---------------------------------------------------------------------------------------------------


def attention_parts(model: Decoder) -> ModelParts:
    """Of a model whose matrices are multiplied elsewhere: what its attention takes."""
    return _parts_of(model, None)


def _parts_of(model: Decoder, inputs: str | None) -> ModelParts:
    """inputs: None leaves the matrices out."""
    from workbench.kernels.cpu.step import ModelParts

    config = model.config
    place = {layer: index for index, layer in enumerate(config.kv_layers)}
    positions = model.embed_positions
    if positions is not None and positions.weight.dtype != model.dtype:
        raise WorkbenchError(f"positions are embedded in {_type_of(positions)}, and tokens in {_type_of(model.embed)}")
    return ModelParts(
        **_shape(config),
        embedding=model.embed.weight.detach().contiguous(),
        embedding_scale=model.embedding_scale,
        position_embedding=None if positions is None else positions.weight.detach().contiguous(),
        layers=[
            _layer(layer, config, index, place[config.kv_source(index)], inputs)
            for index, layer in enumerate(model.layers)
        ],
        norm=norm_of(model.norm),
        head=None if inputs is None else _matrix(model.head, inputs),
    )


def _parts_of_eagle(head: EagleHead, table: torch.Tensor, output: Matrix) -> ModelParts:
    from workbench.kernels.cpu.step import Matrix, ModelParts

    config = head.config
    return ModelParts(
        **_shape(config),
        embedding=table.contiguous(),
        embedding_scale=1.0,
        position_embedding=None,
        layers=[replace(_layer(head.layer, config, 0, 0, "exact"), table=0)],  # a head has one table, window or not
        norm=norm_of(head.norm),
        head=output,
        of_given=Matrix(head.fc.weight[:, config.hidden_size :]),
    )


def _shape(config: ModelConfig) -> dict[str, Any]:
    return {
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "size": config.head_dim,
        "hidden": config.intermediate_size,
        "sinks": config.attention_sinks,
        "gated": not config.is_gpt2,
        "gelu": config.is_gpt2 or config.activation == "gelu_tanh",
        "attention_scale": config.attention_scale,
    }


def _layer(layer: DecoderLayer, config: ModelConfig, index: int, place: int, inputs: str | None) -> LayerParts:
    from workbench.kernels.cpu.step import LayerParts

    a: Any = layer.attention
    mlp: Any = layer.mlp
    owns = config.kv_source(index) == index
    linears = {"q": a.q, "o": a.o, "up": mlp.up, "down": mlp.down}
    norms: dict[str, Any] = {"before_attention": layer.attention_norm, "before_mlp": layer.mlp_norm}
    if owns:
        linears |= {"k": a.k, "v": a.v}
    if hasattr(mlp, "gate"):
        linears["gate"] = mlp.gate
    if config.qk_norm:
        norms |= {"of_q": a.q_norm} | ({"of_k": a.k_norm} if owns else {})
    if config.post_norms:
        norms |= {"after_attention": layer.attention_post_norm, "after_mlp": layer.mlp_post_norm}
    return LayerParts(
        norms={name: norm_of(norm) for name, norm in norms.items()},
        matrices={} if inputs is None else {name: _matrix(linear, inputs) for name, linear in linears.items()},
        owns_keys=owns,
        place=place,
        window=config.window_of(index),
        table=int(config.turns_locally(index)) if config.uses_rotary else None,
    )


def norm_of(module: Any) -> Norm:
    from workbench.kernels.cpu.step import Norm

    bias = None if isinstance(module, RMS_NORMS) else module.bias
    return Norm(norm_weight(module, torch.float32), bias, module.eps)


def _matrix(linear: Any, inputs: str) -> Matrix:
    from workbench.kernels.cpu.step import Matrix

    if hasattr(linear, "for_loop"):
        return linear.for_loop(inputs)
    if not isinstance(linear, nn.Linear) or linear.weight.dtype not in TYPES:
        raise WorkbenchError(
            f"a {type(linear).__name__} in {_type_of(linear)} has no form for steps as one function in C++"
        )
    return Matrix(linear.weight, detached(linear.bias))


def _type_of(module: Any) -> str:
    return str(module.weight.dtype).removeprefix("torch.") if hasattr(module, "weight") else "a form of its own"
