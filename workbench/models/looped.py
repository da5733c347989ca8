"""What a FastDecoder does between its matrices on a CPU, in loops of our own (`kernels/cpu/step.cpp`): kernels="c++".

    torch                                               loops
    add, then norm (5 operations)                       one call: the norm adds what came before on the way
    norms of q and k, turns, cache, attention           one call over the joined q, k and v, which reads and writes
    (11 operations and more)                            keys and values where they lie
    activation, product (3 operations)                  one call

Steps stay eager: Python calls one product and one loop after the other, 8 calls a layer (10 with norms after attention
and feed-forward). They are the parts of a native step (`workbench.models.native_steps`), which is all of them as one
call. Between the matrices numbers stay float32, in 16 bits too, as there.

Attention runs so for batches of up to MAX_ROWS rows over every kv that says where keys and values lie (`place_batch`);
others attend as they do for torch's operations.
"""

from __future__ import annotations

from typing import Any

import torch

from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Attends, Decoder, Turns
from workbench.models.fast_layers import FastLayer, MakeNorm, Stream, small_norm
from workbench.models.latent import UpProjections
from workbench.models.linear import Join
from workbench.models.native_steps import (
    FloatTables,
    Tables,
    attention_parts,
    norm_of,
    rows_of,
    why_not_model,
    why_not_placing,
)

MAX_ROWS = 96  # of a batch whose attention is a loop; it goes row by row, and torch's is ahead for more


def why_not_loops(model: Decoder) -> str:
    """Why there are no loops for a model; "" where there are. Compiles them, once a machine."""
    from workbench.kernels.cpu import step as loop

    if model.config.is_gpt2:
        return "GPT-2's block has LayerNorm and one matrix before its GELU; the loops are for RMSNorm and gates"
    return why_not_model(model) or loop.why_not_here()


class LoopedNorm:
    """An RMSNorm in one call. Of a Stream, it adds what is to be added first, to the stream in place."""

    def __init__(self, module: Any, stream: torch.dtype) -> None:
        from workbench.kernels.cpu.step import RowNorm

        assert stream == torch.float32, "a stream on a CPU, in a type that loops are for"
        self._norm = RowNorm(norm_of(module))

    def __call__(self, x: torch.Tensor | Stream) -> torch.Tensor:
        """[N, d] float32."""
        x, added = (x, None) if isinstance(x, torch.Tensor) else x
        return self._norm(x, added, torch.get_num_threads())


class LoopedLayer(FastLayer):
    """One layer over a Stream: what its product gives is added by the next norm."""

    def _prepare_attention(self, a: Any, join: Join, norm: MakeNorm, config: ModelConfig) -> None:
        from workbench.kernels.cpu.step import RowGate

        super()._prepare_attention(a, join, small_norm, config)  # of q and k, where torch attends
        self._gate = RowGate(gelu=config.activation == "gelu_tanh")

    def attend(self, index: int, x: Stream, turns: Turns, batch: Batch, kv: Attends) -> torch.Tensor:
        projected = self.qkv(self.attention_norm(x))
        if isinstance(kv, LoopedAttention) and kv.attends:
            return kv.attend_projected(index, projected)
        q, k, v = (None if one is None else one.to(self._dtype) for one in self._ready(projected, turns))
        assert q is not None
        return kv.attend(index, q, k, v, batch).float()

    def after(self, x: Stream, mixed: torch.Tensor) -> Stream:
        """The stream of the next layer, with what the feed-forward gave still to be added."""
        x = self._added(x, self.o(mixed), 0)
        wide = self.up(self.mlp_norm(x))
        return self._added(x, self.down(self._gate(wide, torch.get_num_threads())), 1)

    def _added(self, x: Stream, added: torch.Tensor, which: int) -> Stream:
        return Stream(x.x, added if self.post_norms is None else self.post_norms[which](added))


class Loops:
    """What the layers of one model need to attend in loops."""

    def __init__(self, model: Decoder) -> None:
        self.config, self.parts = model.config, attention_parts(model)
        self._in_floats = FloatTables()

    def over(self, kv: Attends, tables: Tables) -> LoopedAttention:
        """The kv for one batch."""
        return LoopedAttention(self, kv, tables)

    def attention(self, batch: Batch, kv: Any, tables: Tables) -> Any:
        """A `kernels.cpu.step.Attention` of the batch, and the kv has begun it; None, and it has not."""
        from workbench.kernels.cpu.step import Attention

        if batch.num_tokens > MAX_ROWS or why_not_placing(batch, kv, self.config):
            return None
        placed = kv.place_batch(batch)
        if placed is None:
            return None
        turns = self._in_floats(tables(max(batch.lengths_after())))
        return Attention(self.parts, placed.where, rows_of(batch, placed, []), turns)


class LoopedAttention:
    """A kv for one batch, over which layers attend in loops where that can be."""

    def __init__(self, loops: Loops, kv: Attends, tables: Tables) -> None:
        self._loops, self._kv, self._tables, self._attention = loops, kv, tables, None

    @property
    def attends(self) -> bool:
        return self._attention is not None

    def begin(self, batch: Batch) -> None:
        self._attention = self._loops.attention(batch, self._kv, self._tables)
        if self._attention is None:
            self._kv.begin(batch)

    def attend_projected(self, layer: int, projected: torch.Tensor) -> torch.Tensor:
        """[N, H_q, D] of q, k and v as their product gives them, before norms and turns."""
        assert self._attention is not None
        return self._attention(layer, projected, torch.get_num_threads())

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: Batch,
        up: UpProjections | None = None,
    ) -> torch.Tensor:
        return self._kv.attend(layer, q, k, v, batch, **({} if up is None else {"up": up}))

    def end(self, batch: Batch) -> None:
        """All layers have attended."""
        if self._attention is not None:
            self._attention.end()
            kv: Any = self._kv
            kv.note_batch(batch)
