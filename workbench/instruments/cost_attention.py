"""What a kv does between the projections: store the new keys and values, read the remembered ones, attend.

One layer at a time, since layers differ: in their window, and in whether they have keys of their own. What a kv
makes once a step for all layers together (masks, places) is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from workbench.instruments.cost_codes import FEW_TOKENS, STORED, CodedLayer
from workbench.instruments.cost_memory import Memory
from workbench.instruments.cost_operations import OperationCosts, times, together
from workbench.instruments.cost_quantized import CODE_FORMATS, Groups, QuantizedLayer
from workbench.models.config import ModelConfig
from workbench.models.latent import absorbing_pays


def attend_operations(
    config: ModelConfig,
    new_tokens: Sequence[int],
    contexts: Sequence[int],
    memory: Memory,
    weight: float,
    wide: float,
    *,
    by_kernel: bool = False,
) -> tuple[list[OperationCosts], int]:
    """The operations of `kv.attend` in all layers, and the FLOPs of attention that computes the whole rectangle.

    by_kernel: over blocks through our kernel, one launch a layer, and nothing is put or converted around it.
    """
    alike = Counter((memory.look(config, i), config.kv_source(i) == i) for i in config.attention_layers)
    found: dict[str, list[OperationCosts]] = {}
    rectangle = 0
    for (look, owns), layers in alike.items():
        one = _Layer(config, new_tokens, contexts, memory, look, owns, weight, wide)
        for operation in one.operations():
            if by_kernel:
                operation = replace(operation, launches=1, kernels=1)
            found.setdefault(operation.name, []).append(times(operation, layers))
        rectangle += layers * one.rectangle_flops
    return [together(same) for same in found.values()], rectangle


def causal_pairs(new_tokens: int, context: int, window: int | None = None, sinks: int = 0) -> int:
    """(query, key) pairs of `new_tokens` after `context` others: Σ min(position + 1, window + sinks)."""
    limit = context + new_tokens if window is None else window + sinks
    growing = min(new_tokens, max(0, limit - context))  # queries that still see everything before them
    return growing * (2 * context + growing + 1) // 2 + (new_tokens - growing) * limit


def keys_seen(new_tokens: int, context: int, window: int | None, sinks: int = 0) -> int:
    """Keys that at least one of the new tokens sees."""
    every = context + new_tokens
    return every if window is None else min(every, window + new_tokens - 1 + sinks)


class _Layer:
    """One layer's `kv.attend`. `operations()` gives what it does, `rectangle_flops` those of eager attention."""

    def __init__(self, config, new_tokens, contexts, memory: Memory, look, owns: bool, weight, wide) -> None:
        self.config, self.memory, self.owns = config, memory, owns
        self.window, self.sinks = look
        self.places = memory.places(*look)
        self.weight, self.wide, self.stored = weight, wide, memory.stored
        self.converts = memory.kind != "recompute" and self.stored != wide  # to the stored type and back
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        self.key, self.value, self.latent = config.head_dim, config.value_head_dim, config.latent_attention
        self.texts = list(zip(new_tokens, contexts))
        self.rows, self.sequences = sum(new_tokens), len(new_tokens)

    @property
    def rectangle_flops(self) -> int:
        rectangle = sum(self._flops_a_pair(n) * n * self._given(n, past) for n, past in self.texts)
        return rectangle + sum(self._coded.flops(*text) for text in self._in_loop)

    @property
    def _pairs_flops(self) -> int:
        return self._flops_of_pairs(self.texts)

    def _flops_of_pairs(self, texts: Sequence[tuple[int, int]]) -> int:
        pairs = ((n, causal_pairs(n, past, self.window, self.sinks)) for n, past in texts)
        return sum(self._flops_a_pair(n) * count for n, count in pairs)

    def _flops_a_pair(self, new: int) -> int:
        """2 for each value of a key, and 2 for each of a value, in every query head."""
        if self._absorbs(new):
            return 2 * self.heads * (self.latent.cached_dim + self.latent.kv_rank)
        return 2 * self.heads * (self.key + self.value)

    def _absorbs(self, new: int) -> bool:
        """Whether a sequence with so many new tokens is attended to in the absorbed form."""
        if self.memory.kind != "latent" or self.memory.form == "expanded":
            return False
        return self.memory.form == "absorbed" or absorbing_pays(self.latent, new)

    def operations(self) -> list[OperationCosts]:
        if self.memory.kind == "recompute":
            return [*self._expand(self.rows), *self._masks(), self._attention()]
        if self.memory.kind == "latent":
            return self._over_latents()
        if self.memory.kind == "quantized":
            return [*self._expand(self.rows), *self._over_codes()]
        return [*self._expand(self.rows), self._attention()]

    # -- over keys and values of every head ------------------------------------------------------------------

    def _attention(self) -> OperationCosts:
        """q read and the result written; the keys and values as the kv holds them.

        Two puts and one call of attention a sequence, and joining them; single tokens need one call for all.
        """
        one_call = self.sequences == self.rows and self.memory.kind != "recompute"  # see kv.contiguous
        calls = 1 if one_call else self.sequences
        rolled = [text for text in self.texts if self._rolls(*text)]
        plain = [text for text in self.texts if not self._rolls(*text)]
        new = sum(n for n, _ in plain)
        launches, read, kept = calls + (calls > 1), 0, 0
        if self.memory.kind != "recompute":
            read = sum(self._keys_read(*text) for text in plain)
            if self.owns:
                kept, launches = new, launches + 2 * (calls - len(rolled))
            launches += 2 * self.converts  # q to the stored type, the result back
        fresh = new if self.owns or self.memory.kind == "recompute" else 0
        a_token = self.kv_heads * (self.key + self.value)
        queries, result = self.rows * self.heads * self.key, self.rows * self.heads * self.value
        # heads of unlike key and value: torch's attention leaves them apart, and one more copy brings them together
        gathered = self.key != self.value and self.sequences == 1 and self.rows > 1
        attention = OperationCosts(
            "attention",
            "attention",
            1,
            launches=launches + gathered,
            kernels=calls,
            heads=self.sequences * self.kv_heads,
            flops=self._pairs_flops,
            kv_bytes=(read + kept) * a_token * self.stored,
            activation_bytes=(queries + fresh * a_token + result) * self.wide,
            elementwise_bytes=gathered * 2 * result * self.wide,
            bytes_written=(1 + gathered) * result * self.wide + kept * a_token * self.stored,
            kv_element_bytes=self.stored,
        )
        return together([attention, *(self._rolled(*text, a_token) for text in rolled)])

    def _rolls(self, new: int, past: int) -> bool:
        """A chunk that does not fit into a rolling buffer."""
        return new > 1 and past + new > self.places

    def _rolled(self, new: int, past: int, a_token: int) -> OperationCosts:
        """What such a chunk has beside its call of attention: what is still seen is copied out of the buffer and joined
        with the new keys, the attention is over that, and what stays of the new ones is written over the old."""
        before, seen = self._given(new, past) - new, self._given(new, past)
        sinks_left = max(0, min(past + new, self.sinks) - past)
        stay = sinks_left + min(new - sinks_left, int(self.places) - self.sinks)
        moved_read, moved_written = (seen + 2 * stay, before + seen + stay) if self.owns else (0, 0)
        read, kept = (before, stay) if self.owns else (0, 0)
        return OperationCosts(
            "attention",
            "attention",
            0,
            # for keys and for values: convert, take out (where there is something), join, choose, write
            launches=2 * self.owns * (3 + (before > 0) + self.converts),
            kv_bytes=(read + kept) * a_token * self.stored,
            activation_bytes=seen * a_token * self.wide,
            elementwise_bytes=(moved_read + moved_written) * a_token * self.wide,
            bytes_written=kept * a_token * self.stored + moved_written * a_token * self.wide,
        )

    def _keys_read(self, new: int, past: int) -> int:
        """Keys that are read: of a rolling buffer all that it holds, of a cache with sinks all from the first on."""
        if self.memory.kind == "window":
            return int(min(past + new, self.places))
        return keys_seen(new, past, None if self.sinks else self.window)

    def _given(self, new: int, past: int) -> int:
        """Keys that attention is given, seen or masked."""
        if self._loops(new):
            return self._coded.seen(new, past)
        if self.memory.kind == "quantized":
            return self._groups.seen(new, past)
        if self.memory.kind != "window" or past + new <= self.places:
            return past + new
        return min(past, self.sinks + self.window - 1) + new

    def _masks(self) -> list[OperationCosts]:
        """Of a window, in every layer anew: one byte for each pair of the rectangle, made in steps, then read."""
        hidden = [n for n, _ in self.texts if self._hides(n)]
        if not hidden:
            return []
        squares = sum(n * n for n in hidden)
        return [
            OperationCosts(
                "mask", "other", 1, launches=8 * len(hidden), elementwise_bytes=8 * squares, bytes_written=4 * squares
            )
        ]

    # -- over codes ------------------------------------------------------------------------------------------

    @property
    def _groups(self) -> Groups:
        return Groups(self.memory.group, self.window, self.sinks)

    @property
    def _coded(self) -> CodedLayer:
        shared = self.heads // self.kv_heads
        return CodedLayer(self._groups, CODE_FORMATS[self.memory.format], self.kv_heads, shared, self.key, self.value)

    def _loops(self, new: int) -> bool:
        """Whether the loop over codes takes a sequence with so many new tokens."""
        return self.memory.kind == "quantized" and self.memory.attention == "codes" and new <= FEW_TOKENS

    @property
    def _in_loop(self) -> list[tuple[int, int]]:
        return [text for text in self.texts if self._loops(text[0])]

    def _over_codes(self) -> list[OperationCosts]:
        """kv.quantized: the sequences that the loop takes in one call, the others one after the other."""
        in_loop, others = self._in_loop, [text for text in self.texts if not self._loops(text[0])]
        read = [self._quantized(False).read(*text) for text in others] if self.owns else []
        write = [self._quantized(False).write(*text) for text in others] if self.owns else []
        attend = [self._over_numbers(others)] if others else []
        if in_loop:
            attend.append(self._by_loop(in_loop, beside=len(others)))
            coming = [text for text in in_loop if self.owns and not self._coded.stores(*text)]
            write += [self._quantized(True).write(*text) for text in coming]
        return [together(same) for same in (read, attend, write) if same]

    def _quantized(self, by_loop: bool) -> QuantizedLayer:
        """by_loop: the new tokens come in the stored type, since the loop has read them so."""
        a_token, codes = self.kv_heads * (self.key + self.value), CODE_FORMATS[self.memory.format]
        group_bytes = self.kv_heads * codes.group_bytes(self.memory.group, self.key, self.value)
        wide, converts = (self.stored, False) if by_loop else (self.wide, self.converts)
        return QuantizedLayer(self._groups, codes, group_bytes, a_token, self.stored, wide, converts)

    def _over_numbers(self, texts: list[tuple[int, int]]) -> OperationCosts:
        """Attention over keys and values as numbers again, a result put in its place."""
        rows, a_token = sum(n for n, _ in texts), self.kv_heads * (self.key + self.value)
        seen = sum(self._given(*text) for text in texts)
        queries, result = rows * self.heads * self.key, rows * self.heads * self.value
        return OperationCosts(
            "attention",
            "attention",
            1,
            launches=2 * len(texts) + 2 * self.converts,
            kernels=len(texts),
            heads=len(texts) * self.kv_heads,
            flops=self._flops_of_pairs(texts),
            activation_bytes=seen * a_token * self.stored + (queries + result) * self.wide,
            elementwise_bytes=2 * result * self.wide,
            bytes_written=2 * result * self.wide,
        )

    def _by_loop(self, texts: list[tuple[int, int]], *, beside: int) -> OperationCosts:
        """One call, which also stores the new tokens where no group leaves the recent part, in layers without keys of
        their own once more. beside: sequences of the batch that are dequantized."""
        coded, a_token = self._coded, self.kv_heads * (self.key + self.value)
        rows = sum(n for n, _ in texts)
        kept = sum(n for n, past in texts if coded.stores(n, past)) * a_token * self.stored
        queries, result = rows * self.heads * self.key, rows * self.heads * self.value
        turned = self.converts * self.owns * self.rows * a_token  # new keys and values to the stored type
        return OperationCosts(
            "attention",
            "attention",
            0 if beside else 1,
            launches=1 + 2 * self.converts * (self.owns + (not beside)),
            kernels=1,
            heads=len(texts) * self.kv_heads,
            flops=self._flops_of_pairs(texts) + sum(coded.flops(*text) for text in texts),
            kv_bytes=sum(coded.bytes_read(past) for _, past in texts) + kept,
            activation_bytes=(queries + result) * self.wide + rows * a_token * self.stored,
            elementwise_bytes=turned * (self.wide + self.stored),
            bytes_written=result * self.wide + turned * self.stored + kept,
            kv_element_bytes=STORED,
        )

    # -- over latents ----------------------------------------------------------------------------------------

    def _expand(self, rows: int, *, remembered: int = 0) -> list[OperationCosts]:
        """Latents to the keys and values of every head: two products, and each key joined with the rotary one.

        remembered: the sequences whose latents come from the cache; 0: they are new and lie there as activations. The
        second product reads them once more.
        """
        if self.latent is None:
            return []
        shape, heads = self.latent, self.heads
        ups = heads * (shape.content_head_dim + shape.value_head_dim)
        read = rows * shape.kv_rank * (1 if remembered else 2)
        join_read = rows * (heads * shape.content_head_dim + shape.rotary_head_dim)
        join_written = rows * heads * self.key
        calls, back = remembered or 1, 0
        launches = 3 * calls
        if remembered and self.converts:  # both parts of a latent, keys and values
            launches, back = launches + 4 * calls, rows * heads * (self.key + self.value)
        return [
            OperationCosts(
                "expand",
                "projections",
                1,
                launches=launches,
                kernels=2 * calls,
                flops=2 * rows * shape.kv_rank * ups,
                weight_bytes=shape.kv_rank * ups * self.weight,
                kv_bytes=rows * shape.cached_dim * self.stored if remembered else 0,
                activation_bytes=(read + rows * ups) * self.wide,
                elementwise_bytes=(join_read + join_written + back) * self.wide + back * self.stored,
                bytes_written=(rows * ups + join_written) * self.wide + back * self.stored,
            )
        ]

    def _over_latents(self) -> list[OperationCosts]:
        """kv.latent: a sequence is attended to in one form or the other."""
        absorbed = [text for text in self.texts if self._absorbs(text[0])]
        expanded = [text for text in self.texts if not self._absorbs(text[0])]
        expand = self._expand(sum(map(sum, expanded)), remembered=len(expanded)) if expanded else []
        if not absorbed:
            return [*expand, self._latent_attention(absorbed, expanded)]
        return [self._absorb(), *expand, self._latent_attention(absorbed, expanded), self._restore(absorbed)]

    def _absorb(self) -> OperationCosts:
        """The map from latents to keys, folded into the queries of all rows: q [H, content] -> [H, kv_rank]."""
        shape, a_row = self.latent, self.rows * self.heads
        weights = shape.kv_rank * self.heads * shape.content_head_dim
        moved = a_row * shape.cached_dim  # joined with the rotary part
        return OperationCosts(
            "absorb",
            "projections",
            1,
            launches=2 + self.converts,
            kernels=1,
            flops=2 * self.rows * weights,
            weight_bytes=weights * self.weight,
            activation_bytes=a_row * (shape.content_head_dim + shape.kv_rank) * self.wide,
            elementwise_bytes=2 * moved * self.wide,
            bytes_written=(a_row * shape.kv_rank + moved) * self.wide,
        )

    def _restore(self, absorbed) -> OperationCosts:
        """The map from latents to values, applied to what attention over the latents gave."""
        shape, rows = self.latent, sum(n for n, _ in absorbed)
        weights = shape.kv_rank * self.heads * shape.value_head_dim
        calls = 1 if self._in_one_call(absorbed) else len(absorbed)
        result = rows * self.heads * shape.value_head_dim
        # the heads lie apart, and one more copy brings them together; joining the sequences does that as well
        gathered = rows > 1 and (self.sequences == 1 or self._in_one_call(absorbed))
        return OperationCosts(
            "restore",
            "projections",
            1,
            launches=calls * (1 + self.converts) + gathered,
            kernels=calls,
            flops=2 * rows * weights,
            weight_bytes=weights * self.weight,
            activation_bytes=(rows * self.heads * shape.kv_rank + result) * self.wide,
            elementwise_bytes=gathered * 2 * result * self.wide,
            bytes_written=(1 + gathered) * result * self.wide,
        )

    def _in_one_call(self, absorbed) -> bool:
        """Single tokens, all of them absorbed."""
        return len(absorbed) == self.sequences == self.rows

    def _latent_attention(self, absorbed, expanded) -> OperationCosts:
        """Absorbed: two products and a softmax between, with the scores [n, H, S] in memory, over the latents as they
        are stored; one key-value head for all. Expanded: the fused kernel over the keys and values of every head."""
        shape, heads = self.latent, self.heads
        one_call, singles = self._in_one_call(absorbed), self.sequences == self.rows
        read = [keys_seen(n, past, self._window_read(one_call)) for n, past in absorbed]
        scores = heads * sum(n * keys for (n, _), keys in zip(absorbed, read))
        calls = 1 if one_call else len(absorbed)
        masked = sum(n > 1 or self._hides(n + past) for n, past in absorbed)
        if one_call:  # none where all have the same length and the window is cut out
            masked = int(len(set(absorbed)) > 1 or (self.sinks > 0 and masked > 0))
        narrow = self.stored < 4  # the scores go to float32 and back
        launches = (1 + self.converts if singles else self.sequences) + calls * (4 + 2 * narrow) + masked
        launches += len(expanded) * (1 + 2 * self.converts) + (self.sequences > 1 and not one_call)
        gathered = bool(expanded) and self.key != self.value and self.sequences == 1 and self.rows > 1

        rows, others = sum(n for n, _ in absorbed), sum(n for n, _ in expanded)
        queries = rows * heads * shape.cached_dim + others * heads * self.key
        expanded_read = sum(map(sum, expanded)) * heads * (self.key + self.value)
        result = rows * heads * shape.kv_rank + others * heads * self.value
        fresh = self.rows * shape.cached_dim
        # scale, softmax, mask: read and written
        steps = 8 + 8 + (8 if masked else 0) + narrow * 2 * (4 + self.stored)
        half = 4 + 4 + (4 if masked else 0) + narrow * (4 + self.stored)
        return OperationCosts(
            "attention",
            "attention",
            1,
            launches=launches + gathered,
            kernels=2 * calls + len(expanded),
            flops=self._pairs_flops,
            kv_bytes=(sum(read) + self.rows) * shape.cached_dim * self.stored,
            activation_bytes=(queries + fresh + expanded_read + result) * self.wide + 2 * scores * self.stored,
            elementwise_bytes=scores * steps + gathered * 2 * result * self.wide,
            bytes_written=(1 + gathered) * result * self.wide + fresh * self.stored + scores * (self.stored + half),
        )

    def _window_read(self, one_call: bool) -> int | None:
        """One call for single tokens begins where the window does; without it, or with sinks, all is read."""
        return self.window if one_call and not self.sinks else None

    def _hides(self, keys: int) -> bool:
        return self.window is not None and self.window < keys
