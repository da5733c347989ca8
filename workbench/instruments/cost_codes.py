"""What the loop over codes of `kv.quantized` does in one layer: attention="codes", on a CPU.

One call takes a new token, or a few, of every sequence and all heads at once. Of the cache it reads each byte that they
see once: codes, scales and zeros, and the recent part in float32. No number is written for a code, so nothing lies in
memory in between. Sequences with more new tokens are dequantized, as `cost_quantized` counts it.

    bytes of a piece, t tokens of a group   H_kv · (rows·(D + D_v) + 2·(D + t)), and 2·(D + t) more for zeros
    rows                                    t; of int4 a row has a token of either half of the group: min(t, group/2)
    FLOPs that make numbers of it           H_kv · (t·(D + D_v)·⌈Q/4⌉ + Q·(D + t)), and 2·Q·(D + t) more for zeros

Q = queries of a key-value head: new tokens times the query heads that share it. A code becomes a number once for four
of them (1 FLOP). A key's scale is multiplied into each query and a value's into each weight (1), a zero is multiplied
and added (2). Sums of a whole tile, and the constant in the scales of fp8, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from workbench.instruments.cost_quantized import SCALE_BYTES, CodeFormat, Groups

ATTENTIONS = ("sdpa", "codes")  # of kv.quantized those that are counted
STORED = 4  # bytes of an element of the recent part, which the loop reads in float32 only
FEW_TOKENS = 8  # new ones of a sequence, so many at most go through the loop
TOGETHER = 4  # queries that a code is multiplied with while it is in a register


@dataclass(frozen=True)
class CodedLayer:
    """One sequence in one layer, as the loop takes it."""

    groups: Groups
    codes: CodeFormat
    heads: int  # key-value heads
    shared: int  # query heads of each
    key: int  # numbers of a key, and of a value
    value: int

    def bytes_read(self, past: int) -> int:
        """Bytes of the cache that new tokens after `past` others read; what lies there is read once for all."""
        in_codes = sum(count * self._piece_bytes(tokens) for tokens, count in self._pieces(past))
        recent = sum(end - max(start, self._whole(past)) for start, end in self._recent(past))
        return self.heads * (in_codes + recent * (self.key + self.value) * STORED)

    def flops(self, new: int, past: int) -> int:
        """What makes numbers of codes, beside the multiply-adds of attention."""
        queries, scaled = new * self.shared, 1 + 2 * self.codes.has_zero
        passes = -(-queries // TOGETHER)
        return self.heads * sum(
            count * (tokens * (self.key + self.value) * passes + queries * (self.key + tokens) * scaled)
            for tokens, count in self._pieces(past)
        )

    def seen(self, new: int, past: int) -> int:
        """Keys that are multiplied with each query, seen or masked."""
        return sum(end - start for start, end in self._spans(past)) + new

    def stores(self, new: int, past: int) -> bool:
        """Whether the call stores the new tokens: no group leaves the recent part."""
        return self.groups.count(past) == self.groups.count(past + new)

    def _piece_bytes(self, tokens: int) -> int:
        packed = self.codes.bits < 8
        rows = min(tokens, self.groups.group // 2) if packed else tokens
        of_scales = SCALE_BYTES * (1 + self.codes.has_zero)
        return rows * (self.key + self.value) + of_scales * (self.key + tokens)

    def _whole(self, past: int) -> int:
        """Tokens in groups, those that are forgotten included."""
        return self.groups.count(past) * self.groups.group

    def _spans(self, past: int) -> list[tuple[int, int]]:
        """Positions that are seen: the sinks, then all from the first one in the window on."""
        window, sinks = self.groups.window, self.groups.sinks
        first = 0 if window is None else max(0, past - window + 1)
        return [(0, min(first, sinks)), (first, past)]

    def _recent(self, past: int) -> list[tuple[int, int]]:
        return [(start, end) for start, end in self._spans(past) if end > max(start, self._whole(past))]

    def _pieces(self, past: int) -> Iterator[tuple[int, int]]:
        """(tokens of a piece, how many there are): whole groups, and those of which only a part is seen."""
        group, whole = self.groups.group, self._whole(past)
        for start, end in self._spans(past):
            end = min(end, whole)
            first, last = -(-start // group), end // group  # whole groups first … last − 1
            if start >= end:
                continue
            if first > last:
                yield end - start, 1
                continue
            yield group, last - first
            yield from ((cut, 1) for cut in (first * group - start, end - last * group) if cut)
