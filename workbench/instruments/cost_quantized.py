"""What `kv.quantized` does in one layer: groups of tokens back to numbers, attention over them, and new groups.

A text of S tokens has ceil(S / group) − 2 groups in codes, at least 0, and the rest as they came. Reading writes every
number that is attended over once more, in full precision: fewer bytes are kept, and more are moved. A step in which
tokens leave the recent part quantizes their groups; most steps of one token do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from workbench.errors import WorkbenchError, unknown
from workbench.instruments.cost_operations import OperationCosts
from workbench.models.config import ModelConfig

SCALE_BYTES = 2  # of a scale and of a zero
GROUP = 32  # tokens that share a key's scale, unless asked otherwise


@dataclass(frozen=True)
class CodeFormat:
    """One of kv.quantized's formats: what is stored, and what reading and writing numbers in it takes.

    Launches are for one tensor; bytes for one number, read and written by the operations between the codes and the
    numbers in float32, the codes themselves apart.
    """

    bits: int
    has_zero: bool  # each block has its zero beside its scale
    read_launches: int
    read_bytes: tuple[float, float]
    write_launches: int
    write_bytes: tuple[float, float]

    def group_bytes(self, group: int, key: int, value: int) -> float:
        """Of one key-value head: codes, a scale for each channel of the keys and for each token of the values."""
        scales = (key + group) * SCALE_BYTES * (1 + self.has_zero)
        return group * (key + value) * self.bits / 8 + scales


CODE_FORMATS = {
    "int8": CodeFormat(8, True, 5, (8, 12), 43, (33, 21)),
    "fp8": CodeFormat(8, False, 7, (10, 14), 25, (25, 17)),
    "int4": CodeFormat(4, True, 8, (9.5, 13), 46, (38, 26)),
}


def quantized_bytes_per_element(config: ModelConfig, format: str = "int8", group: int = GROUP) -> float:
    """Bytes that a quantized number takes, its share of scales and zeros included: what a long text comes to.

    1.19 for int8 and 0.69 for int4 at a head of 64 and groups of 32, against 2 in 16 bits.
    """
    check_format(format, group)
    key, value = config.head_dim, config.value_head_dim
    return CODE_FORMATS[format].group_bytes(group, key, value) / (group * (key + value))


def check_format(format: str, group: int) -> None:
    if not isinstance(format, str) or format not in CODE_FORMATS:
        raise unknown("format of a KV cache", format, CODE_FORMATS)
    even = CODE_FORMATS[format].bits < 8
    if not isinstance(group, int) or isinstance(group, bool) or group < 2 or (even and group % 2):
        raise WorkbenchError(
            f"group must be a whole number of at least 2{', and even for two codes a byte' * even}, got {group!r}"
        )


@dataclass(frozen=True)
class Groups:
    """How a layer of this window keeps a text. Groups before `pinned` stay for their sinks, the others go round."""

    group: int
    window: int | None
    sinks: int

    @property
    def pinned(self) -> int:
        return 0 if self.window is None else -(-self.sinks // self.group)

    @property
    def ring(self) -> float:
        return math.inf if self.window is None else max(1, -(-(self.window - 1) // self.group))

    def count(self, tokens: int) -> int:
        """Groups that so many tokens have in codes, those that are forgotten included."""
        return max(0, -(-tokens // self.group) - 2)

    def recent(self, tokens: int) -> int:
        return tokens - self.count(tokens) * self.group

    def runs(self, first: int, last: int) -> list[tuple[int, int]]:
        """Groups first … last − 1, cut where they do not lie in one piece: after the pinned, and where the ring
        ends."""
        runs = []
        while first < last:
            end = last
            if first < self.pinned:
                end = min(last, self.pinned)
            elif self.window is not None:
                end = min(last, first + int(self.ring) - (first - self.pinned) % int(self.ring))
            runs.append((first, end))
            first = end
        return runs

    def held(self, tokens: int) -> int:
        """Groups that are kept."""
        count = self.count(tokens)
        return int(min(count, self.pinned) + min(max(0, count - self.pinned), self.ring))

    def look(self, past: int) -> tuple[int, int, int]:
        """(first position read, its group, sinks that are read apart) for new tokens after `past` others."""
        first = 0 if self.window is None else max(0, past - self.window + 1)
        group = min(first // self.group, self.count(past))
        if first and self.sinks:
            if first > self.sinks and group * self.group >= self.sinks:
                return first, group, self.sinks
            return 0, 0, 0  # they lie among what is read anyway
        return first, group, 0

    def seen(self, new: int, past: int) -> int:
        """Keys that attention reads."""
        first, _, sinks = self.look(past)
        return sinks + past - first + new


@dataclass(frozen=True)
class QuantizedLayer:
    """One sequence in one layer. a_token: numbers that one token leaves here. stored: bytes of those kept as they
    came."""

    groups: Groups
    codes: CodeFormat
    group_bytes: float  # of all heads
    a_token: int
    stored: float
    wide: float
    converts: bool

    def read(self, new: int, past: int) -> OperationCosts:
        """Groups to numbers, laid before the recent part and the new tokens."""
        g = self.groups
        _, group, sinks = g.look(past)
        runs = g.runs(group, g.count(past)) + (g.runs(0, g.pinned) if sinks else [])
        numbers = sum(b - a for a, b in runs) * g.group * self.a_token
        recent, fresh = g.recent(past) * self.a_token, new * self.a_token
        joined = sinks * self.a_token
        narrow = self.stored != 4
        read, written = (numbers * moved for moved in self.codes.read_bytes)
        read += numbers * 4 * narrow + (fresh * self.wide + joined * self.stored)
        written += (numbers * narrow + recent + fresh + joined) * self.stored
        return OperationCosts(
            "dequantize",
            "other",
            1,
            launches=2 * len(runs) * (self.codes.read_launches + narrow) + 4 + 2 * (sinks > 0),
            kv_bytes=sum(b - a for a, b in runs) * self.group_bytes + recent * self.stored,
            elementwise_bytes=read + written,
            bytes_written=written,
        )

    def write(self, new: int, past: int) -> OperationCosts:
        """The new tokens to the recent part, and the groups that leave it to codes."""
        g = self.groups
        before, after = g.count(past), g.count(past + new)
        fresh = new * self.a_token
        if before == after:
            return OperationCosts(
                "store",
                "other",
                1,
                launches=2 + 2 * self.converts,
                kv_bytes=fresh * self.stored,
                elementwise_bytes=fresh * self.wide,
                bytes_written=fresh * self.stored,
            )
        runs = self._written(before, after)
        numbers = sum(b - a for a, b in runs) * g.group * self.a_token
        recent, stay = g.recent(past) * self.a_token, g.recent(past + new) * self.a_token
        narrow = self.stored != 4
        read, written = (numbers * moved for moved in self.codes.write_bytes)
        read += fresh * self.wide + stay * self.stored
        written += (recent + fresh) * self.stored
        kept = sum(b - a for a, b in runs) * self.group_bytes + 2 * g.group * self.a_token * self.stored
        return OperationCosts(
            "store",
            "other",
            1,
            launches=2 * len(runs) * (self.codes.write_launches + 2 * narrow) + 6 + 2 * self.converts,
            kv_bytes=recent * self.stored + kept,
            elementwise_bytes=read + written,
            bytes_written=written + kept,
        )

    def _written(self, before: int, after: int) -> list[tuple[int, int]]:
        """Runs of the new groups; of more than a ring holds those that stay."""
        g = self.groups
        if after - before <= g.ring:
            return g.runs(before, after)
        start = max(before, int(after - g.ring), g.pinned)
        return g.runs(before, min(after, g.pinned)) + g.runs(start, after)
