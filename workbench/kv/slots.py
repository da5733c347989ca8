"""What every kv that keeps something has in common: which sequences live, how long they are, where they lie.

A cache has `max_sequences` slots of `max_tokens` tokens. `Slots` hands them out, refuses what does not fit before
anything changes, and undoes a batch that never reached the last layer. What a slot holds is the affair of the
class on top, which fills in these:

    _take_room(batch, slots, after)  room beyond the slots that a batch needs, or raise; nothing for most kinds
    _open(batch, places)           a batch was accepted: make what its layers share   (may not fail)
    _forget(slot, start, end)      these positions are gone
    _copy(source, target, length)  a sequence begins with all that another remembers
    _why_not_cut(sequence, length)  a length that cannot be gone back to (a rolling buffer); "" for most kinds
    _move(slot, to, places)        tokens at these places move together, from `to` on: a branch of a tree was accepted
    _why_no_tree(slot, length, count)  a tree that cannot be taken; "" for most kinds

The tokens of a batch lie in the order they came, also those of a tree; which of them are a text is known once one
branch was chosen, by `keep`. Until then the sequence takes no further batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from workbench.errors import WorkbenchError, is_whole
from workbench.instruments.memory import require_bytes
from workbench.models.attention import attention_function, eager_attention
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig

BOOK_BYTES = 120  # of a sequence or block in Python's lists and dicts, at most
LARGEST_SIZE = 2**50


@dataclass(frozen=True)
class Places:
    """Where the sequences of one batch lie, in the batch's order."""

    slots: list[int]
    lengths: tuple[int, ...]  # with the new tokens
    before: dict[Hashable, int | None]  # length of each when the batch came; None for a new one


@dataclass(frozen=True)
class _Tree:
    """What came last of a sequence."""

    before: int  # tokens until then
    parents: tuple[int, ...]

    def follows(self, place: int) -> int:
        """The place of the token that the one at this place follows, −1 for the first of all."""
        return place - 1 if place < self.before else self.before + self.parents[place - self.before]


class Slots(ABC):
    """Bookkeeping of a kv of `max_sequences` slots of `max_tokens` tokens each; see the module.

    `scale`, `dtype` (as stored) and `_eager` (attention by the definition) are what every kind attends with.
    """

    holds_trees = True
    holds_states = False  # True: has an `advance` for layers that keep a state

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_sequences: int,
        max_tokens: int | None,
        dtype: torch.dtype,
        device: torch.device | str,
        attention: str,
    ) -> None:
        if config.state_layers and not self.holds_states:
            layers = ", ".join(map(str, config.state_layers))
            raise WorkbenchError(
                f"layers {layers} of this model keep a state ({config.mixer_of(config.state_layers[0])}), and kv "
                f"{type(self).__name__!r} keeps keys and values alone; use kv='state', which keeps both"
            )
        max_tokens = config.context_length if max_tokens is None else max_tokens
        check_size("max_sequences", max_sequences, None)
        require_books(max_sequences, "sequences")
        check_size("max_tokens", max_tokens, config.context_length)
        self.config = config
        self.max_sequences, self.max_tokens = max_sequences, max_tokens
        self.scale = config.attention_scale
        self.dtype = stored_dtype(dtype, device)
        self._eager = attention_function(attention) is eager_attention
        self._lengths: dict[Hashable, int] = {}
        self._slots: dict[Hashable, int] = {}
        self._free = list(range(max_sequences))  # ascending, so that a batch's slots tend to lie side by side
        of_keys, of_values = (config.num_kv_heads, config.head_dim), (config.num_kv_heads, config.value_head_dim)
        self._heads = ((config.num_heads, config.head_dim), of_keys, of_values)  # [heads, size] of q, k, v
        self._batch: Batch | None = None  # the one that `begin` accepted
        self._places: Places | None = None
        self._layers_done = 0
        self._trees: dict[Hashable, _Tree] = {}  # sequences that end in one, until put in order

    # -- for the class on top ------------------------------------------------------------------------------

    def _take_room(self, batch: Batch, slots: list[int], after: tuple[int, ...]) -> None:
        """Take what a batch needs beyond its slots, or raise WorkbenchError and change nothing."""
        return None

    @abstractmethod
    def _open(self, batch: Batch, places: Places) -> None: ...

    @abstractmethod
    def _forget(self, slot: int, start: int, end: int) -> None: ...

    @abstractmethod
    def _copy(self, source: int, target: int, length: int) -> None: ...

    @abstractmethod
    def _move(self, slot: int, to: int, places: list[int]) -> None: ...

    def _why_no_tree(self, slot: int | None, length: int, count: int) -> str:
        """Why a slot (None: a new one) with `length` tokens cannot take a tree of `count`; "" where nothing hinders."""
        return ""

    def _why_not_cut(self, sequence: Hashable, length: int) -> str:
        """Why this sequence cannot go back to `length`, a length it had; "" where nothing is forgotten."""
        return ""

    # -- the contract ----------------------------------------------------------------------------------------

    @property
    def lengths(self) -> Mapping[Hashable, int]:
        return MappingProxyType(self._lengths)

    def begin(self, batch: Batch) -> None:
        reached = self._drop_unfinished()
        if reached:
            raise WorkbenchError(
                f"the batch before this one reached {reached} of the {self.config.num_layers} layers of this KV "
                "cache and was undone; was the cache made with another model's config, or the forward interrupted?"
            )
        after = batch.lengths_after()
        if self._trees or batch.parents is not None:
            self._check_trees(batch, after)
        new = []
        for name, first, length in zip(batch.sequences, batch.first_positions, after):
            known = self._lengths.get(name, 0)
            if first != known:
                raise WorkbenchError(
                    f"the next token of sequence {name!r} stands at position {known} ({known} tokens are remembered); "
                    f"this batch starts it at position {first}"
                )
            if length > self.max_tokens:
                raise WorkbenchError(
                    f"sequence {name!r} would grow to {length:,} tokens, and its slot in the KV cache holds "
                    f"{self.max_tokens:,}; make the cache with a larger max_tokens, or truncate the text"
                )
            if name not in self._lengths:
                new.append(name)
        if len(new) > len(self._free):
            raise WorkbenchError(
                f"the KV cache has {self.max_sequences} slots, {len(self._free)} of them free, and this batch brings "
                f"{len(new)} new sequences; release some, or make the cache with more max_sequences"
            )
        taken = dict(zip(new, self._free))
        slots = [taken[name] if name in taken else self._slots[name] for name in batch.sequences]
        places = Places(slots, after, {name: self._lengths.get(name) for name in batch.sequences})
        self._take_room(batch, slots, after)
        self._open(batch, places)
        self._slots.update(taken)  # from here on nothing can fail
        self._free = self._free[len(taken) :]
        self._lengths.update(zip(batch.sequences, after))
        self._batch, self._places, self._layers_done = batch, places, 0
        if batch.parents is not None:
            for name, first, tree in zip(batch.sequences, batch.first_positions, batch.parents):
                if tree is not None:
                    self._trees[name] = _Tree(first, tree)

    def truncate(self, sequence: Hashable, length: int) -> None:
        self.keep(sequence, length, ())

    def keep(self, sequence: Hashable, length: int, places: Sequence[int]) -> None:
        self._drop_unfinished()
        known = self._length_of(sequence)
        if not is_whole(length) or not 0 <= length <= known:
            raise WorkbenchError(
                f"sequence {sequence!r} has {known} tokens; it can be cut to 0 … {known} of them, got {length!r}"
            )
        places = list(places)
        self._check_one_text(sequence, length, places)
        kept = length + len(places)
        reason = self._why_not_cut(sequence, kept)
        if reason:
            raise WorkbenchError(reason)
        while places and places[0] == length:  # they lie where they belong
            length, places = length + 1, places[1:]
        slot = self._slots[sequence]
        if places:
            self._move(slot, length, places)
        self._forget(slot, kept, known)
        self._lengths[sequence] = kept
        self._trees.pop(sequence, None)
        self._batch = None

    def draft_room(self, sequence: Hashable) -> int:
        return max(0, self.max_tokens - self._lengths.get(sequence, 0) - 1)

    def fork(self, sequence: Hashable, new_sequence: Hashable) -> None:
        self._drop_unfinished()
        length = self._length_of(sequence)
        if sequence in self._trees:
            raise WorkbenchError(self._out_of_order(sequence, "be forked"))
        if new_sequence in self._lengths:
            raise WorkbenchError(f"sequence {new_sequence!r} already exists; release it first or choose another name")
        if not self._free:
            raise WorkbenchError(
                f"all {self.max_sequences} slots of the KV cache are taken; release a sequence before this fork, "
                "or make the cache with more max_sequences"
            )
        source, target = self._slots[sequence], self._free.pop(0)
        self._copy(source, target, length)
        self._slots[new_sequence], self._lengths[new_sequence] = target, length
        self._batch = None

    def release(self, sequence: Hashable) -> None:
        self._length_of(sequence)
        self._drop_unfinished()
        if sequence not in self._lengths:
            return  # it came with a batch that never reached the last layer
        self._forget(self._slots[sequence], 0, self._lengths[sequence])
        insort(self._free, self._slots.pop(sequence))
        del self._lengths[sequence]
        self._trees.pop(sequence, None)
        self._batch = None

    # -- one batch ---------------------------------------------------------------------------------------------

    def _enter(self, layer: int, batch: Batch, problem: str = "") -> None:
        """Call first in `attend`. problem: why q, k, v do not belong here; then the batch is undone."""
        assert self._batch is batch, "attend belongs to the batch that begin accepted"
        if not 0 <= layer < self.config.num_layers:
            problem = f"this KV cache is for a model of {self.config.num_layers} layers, got keys of layer {layer}"
        if problem:
            self._undo()
            raise WorkbenchError(problem)
        self._layers_done = layer + 1

    def _drop_unfinished(self) -> int:
        """A batch that reached some layers only (interrupted, or of a model with fewer) never came: undo it.

        Returns how many layers it reached; 0 also where there is nothing to undo.
        """
        if self._batch is None or self._layers_done == self.config.num_layers:
            return 0
        self._undo()
        return self._layers_done

    def _undo(self) -> None:
        """Back to before `begin`."""
        assert self._places is not None
        self._batch = None
        for name, length in self._places.before.items():
            self._trees.pop(name, None)
            if length is None:
                self.release(name)
            else:
                self._forget(self._slots[name], length, self._lengths[name])
                self._lengths[name] = length

    # -- trees -------------------------------------------------------------------------------------------------

    def _check_trees(self, batch: Batch, after: tuple[int, ...]) -> None:
        """Refuse more tokens for a tree that is not in order yet, and a tree that this kind cannot take."""
        for index, name in enumerate(batch.sequences):
            if name in self._trees:
                raise WorkbenchError(self._out_of_order(name, "take the next batch"))
            if batch.parents is None or batch.parents[index] is None:
                continue
            first = batch.first_positions[index]
            reason = self._why_no_tree(self._slots.get(name), first, after[index] - first)
            if reason:
                raise WorkbenchError(f"sequence {name!r} cannot take a tree: {reason}")

    def _out_of_order(self, sequence: Hashable, what: str) -> str:
        tree = self._trees[sequence]
        return (
            f"sequence {sequence!r} ends in a tree of {len(tree.parents)} tokens, and before it can {what} one branch "
            f"has to be chosen: keep(sequence, length, places), or truncate(sequence, {tree.before}) for none"
        )

    def _check_one_text(self, sequence: Hashable, length: int, places: list[int]) -> None:
        """Raise unless the first `length` tokens and those at `places` are one text, each token after the one
        before."""
        known = self._lengths[sequence]
        if not all(map(is_whole, places)) or any(a >= b for a, b in zip([length - 1, *places], [*places, known])):
            raise WorkbenchError(
                f"after the first {length} of its {known} tokens sequence {sequence!r} can keep some of those at places"
                f" {length} … {known - 1}, ascending, got {places}"
            )
        tree = self._trees.get(sequence, _Tree(known, ()))
        start = min(tree.before, length)
        kept = [*range(start, length), *places]
        for previous, place in zip([start - 1, *kept], kept):
            if tree.follows(place) != previous:
                raise WorkbenchError(
                    f"what sequence {sequence!r} keeps has to be one text: the token at place {place} follows the one"
                    f" at {tree.follows(place)}, and the one kept before it is at {previous}; keep one branch, or cut"
                    f" it to 0 … {tree.before} tokens"
                )

    def _length_of(self, sequence: Hashable) -> int:
        if sequence not in self._lengths:
            raise WorkbenchError(f"sequence {sequence!r} is not live here; live: {sorted(map(repr, self._lengths))}")
        return self._lengths[sequence]

    def _misfit(self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> str:
        """Why q, k, v of a layer do not belong here, or "". For kinds that keep keys and values of every head.

        Asked in every layer, as loops in C++ are handed where q, k, v lie and would read beyond what is too small.
        """
        c, rows = self.config, q.shape[0] if self._batch is None else self._batch.query_starts[-1]
        if 0 < layer < c.num_layers and (k is None) != (c.kv_source(layer) != layer):
            came = "came without keys" if k is None else "came with keys of its own"
            return f"layer {layer} {came}; was the cache made with another model's config?"
        heads, key_heads, value_heads = self._heads
        queries, keys, values = (rows, *heads), (rows, *key_heads), (rows, *value_heads)
        if k is None and v is None and layer:
            return "" if q.shape == queries else misfit(q, k, v, queries, None, None)
        fits = k is not None and v is not None and k.shape == keys and v.shape == values and q.shape == queries
        return "" if fits else misfit(q, k, v, queries, keys, values)


def misfit(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    queries: tuple[Any, ...],
    keys: tuple[Any, ...] | None,
    values: tuple[Any, ...] | None,
) -> str:
    """Why q, k, v of one layer do not have these shapes, or "". keys, values None: they are not handed over (layers
    with the keys of another; latents)."""
    expected = (queries, keys, values)
    came = tuple(None if t is None else tuple(t.shape) for t in (q, k, v))
    if came == expected:
        return ""
    words = [
        f"{name} {None if shape is None else list(shape)}"
        for shapes in (expected, came)
        for name, shape in zip("qkv", shapes)
    ]
    return (
        f"this KV cache takes {', '.join(words[:3])} [tokens, heads, head size], got {', '.join(words[3:])}; "
        "was it made with another model's config?"
    )


def stored_dtype(dtype: torch.dtype, device: torch.device | str) -> torch.dtype:
    """What keys and values of a model in `dtype` are stored as on `device`.

    bfloat16 is stored as float32 on a CPU, where torch's attention over bfloat16 takes several times as long.
    """
    return torch.float32 if str(device).startswith("cpu") and dtype == torch.bfloat16 else dtype


def places_in_use(tables: Mapping[Hashable, Sequence[int]], lengths: Mapping[Hashable, int], block_size: int) -> int:
    """Places that hold a token of a live sequence; a shared place counts once."""
    full, partly = set[int](), dict[int, int]()
    for sequence, table in tables.items():
        blocks, rest = divmod(lengths[sequence], block_size)
        full.update(table[:blocks])
        if rest:
            partly[table[blocks]] = max(rest, partly.get(table[blocks], 0))
    return len(full) * block_size + sum(rest for block, rest in partly.items() if block not in full)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def require_room(
    kind: str, needed: int, max_sequences: int, max_tokens: int, stored: str, device: torch.device | str
) -> None:
    """Raise WorkbenchError with bytes needed and available, before anything is allocated."""
    require_bytes(needed, str(device), f"a {kind} of {max_sequences:,} sequences × {max_tokens:,} tokens in {stored}")


def require_books(count: int, what: str) -> None:
    """The same for Python's own lists of so many sequences or blocks."""
    require_bytes(BOOK_BYTES * count, "cpu", f"bookkeeping of {count:,} {what} in a KV cache")


def check_size(name: str, value: int, maximum: int | None, minimum: int = 1) -> int:
    if not is_whole(value) or value < minimum or (maximum and value > maximum):
        wanted = f"from {minimum} to the model's context of {maximum:,}" if maximum else f"of at least {minimum}"
        raise WorkbenchError(f"{name} must be a whole number {wanted}, got {value!r:.80}")
    if value > LARGEST_SIZE:
        raise WorkbenchError(f"{name} must be at most 2**50, and even that is more than any machine holds")
    return value
