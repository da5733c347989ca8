"""Messages between engines of several processes, as bytes. No pickle: a header of JSON, checked field by field, and a
payload.

    b"WBKV" | 4 bytes, size of the header | 8 bytes, size of the payload | header, JSON | payload        big-endian

    to the prefill engine       prefill   this prompt's keys and values are wanted; payload: its tokens, int64
                                reserved  there are blocks for it, send from token `start` on
                                drop      they are not wanted any more
                                report    what did the last steps take?
    to the decode engine        offer     they will come: so many tokens, of this model, of this prompt
                                layer     payload: some tokens' keys and values of one layer, as they lie in the store
                                drop      they will not come, or no more of them
                                steps     shapes and seconds of steps; payload: JSON
    to a replica                add       serve this request; payload: JSON
    of a replica                started   it was admitted
                                refused   it can never be served
                                ended     one of its sequences; payload: JSON
                                alive     it computes
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import WorkbenchError, is_whole, shown

MAGIC = b"WBKV"
HEAD = struct.Struct("!4sIQ")
MAX_HEADER, MAX_PAYLOAD, MAX_TEXT = 4096, 64 << 20, 2000  # bytes, bytes, characters of a field
MAX_NUMBER = 2**53

KINDS: dict[str, dict[str, type]] = {
    "prefill": {"transfer": int, "tenant": str, "priority": float},
    "reserved": {"transfer": int, "start": int},
    "offer": {"transfer": int, "tokens": int, "model": str, "prompt": str},
    "layer": {"transfer": int, "layer": int, "start": int, "tokens": int},
    "drop": {"transfer": int, "reason": str},
    "report": {},
    "steps": {},
    "add": {"request": int},
    "started": {"request": int},
    "refused": {"request": int, "reason": str},
    "ended": {"request": int},
    "alive": {},
}


class BadMessage(WorkbenchError):
    """What came is no message of ours, or makes no sense where it came. Nothing was changed by it."""


@dataclass(frozen=True)
class Message:
    """One message. Its fields are exactly those of its kind. payload: bytes, or a memoryview of such."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    payload: bytes | memoryview = b""

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise BadMessage(f"a message is one of {', '.join(KINDS)}, got {shown(self.kind)}")
        wanted = KINDS[self.kind]
        if not isinstance(self.fields, dict) or self.fields.keys() != wanted.keys():
            raise BadMessage(f"a message {self.kind!r} has the fields {', '.join(wanted)}, got {shown(self.fields)}")
        for name, kind in wanted.items():
            if not _is(kind, value := self.fields[name]):
                raise BadMessage(f"{name} of a message {self.kind!r} must be {_WORDS[kind]}, got {shown(value)}")
        if len(self.payload) > MAX_PAYLOAD:
            raise BadMessage(
                f"a payload has at most {MAX_PAYLOAD:,} bytes, got {len(self.payload):,}; send it in parts"
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(f"a message {self.__dict__.get('kind')!r} has no {name}") from None

    def encoded(self) -> bytes:
        """Head and header; the payload follows."""
        header = json.dumps({"kind": self.kind, **self.fields}, separators=(",", ":")).encode()
        return HEAD.pack(MAGIC, len(header), len(self.payload)) + header


_WORDS = {
    int: f"a whole number from 0 to {MAX_NUMBER}",
    float: "a number",
    str: f"a text of at most {MAX_TEXT} characters",
}


def _is(kind: type, value: object) -> bool:
    if kind is int:
        return is_whole(value) and 0 <= value <= MAX_NUMBER
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, str) and len(value) <= MAX_TEXT


def read_head(head: bytes) -> tuple[int, int]:
    """Sizes of header and payload. Raises BadMessage before anything of such a size is taken."""
    magic, header, payload = HEAD.unpack(head)
    if magic != MAGIC:
        raise BadMessage(f"a message begins with {MAGIC!r}, got {magic!r}; who sends here does not speak this protocol")
    if header > MAX_HEADER or payload > MAX_PAYLOAD:
        raise BadMessage(
            f"a message has a header of at most {MAX_HEADER:,} bytes and a payload of at most {MAX_PAYLOAD:,}, and one "
            f"of {header:,} and {payload:,} is announced"
        )
    return header, payload


def decoded(header: bytes, payload: bytes | memoryview) -> Message:
    try:
        fields = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"the header of a message is no JSON ({str(error)[:80]}), got {shown(header)}") from error
    if not isinstance(fields, dict) or "kind" not in fields:
        raise BadMessage(f"the header of a message is an object with its kind, got {shown(fields)}")
    return Message(fields.pop("kind"), fields, payload)


class Parser:
    """Messages out of a stream of bytes that comes in pieces of any size."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._sizes: tuple[int, int] | None = None

    def feed(self, piece: bytes | memoryview) -> list[Message]:
        """Those that are whole with this piece, in order."""
        self._bytes += piece
        whole: list[Message] = []
        while True:
            if self._sizes is None:
                if len(self._bytes) < HEAD.size:
                    return whole
                self._sizes = read_head(bytes(self._bytes[: HEAD.size]))
            header, payload = self._sizes
            start, end = HEAD.size + header, HEAD.size + header + payload
            if len(self._bytes) < end:
                return whole
            whole.append(decoded(bytes(self._bytes[HEAD.size : start]), bytes(memoryview(self._bytes)[start:end])))
            del self._bytes[:end]
            self._sizes = None

    def check_end(self) -> None:
        """The stream is over. Raises BadMessage where it ends in the middle of a message."""
        if self._bytes:
            size = "" if self._sizes is None else f" of {HEAD.size + sum(self._sizes):,}"
            raise BadMessage(f"the connection ended in the middle of a message, after {len(self._bytes):,}{size} bytes")
