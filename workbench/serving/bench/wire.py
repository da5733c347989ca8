"""HTTP/1.1 answers and server-sent events, read from bytes as they come. No sockets, no clock, no torch.

Bytes are read raw and the time is taken before they are parsed: no buffer of a library decides when an event is seen (a
client whose buffer held 64 KiB reported 44 tokens/s where the server sent 486, vllm-project/vllm #39963).

HTTP: RFC 9112. Events: the HTML standard, section 9.2 "Server-sent events".
"""

from __future__ import annotations

import re

MAX_HEAD_BYTES = 65_536
MAX_LINE_BYTES = 8 * 2**20  # of an event; a prompt that is echoed with its log-probabilities is large


class WireError(Exception):
    """What came is not HTTP, not a stream of events, or is not all of it."""


class ChunkedBody:
    """A body in chunks: each is its size in hexadecimal, a line end, so many bytes and a line end; size 0 ends it."""

    def __init__(self) -> None:
        self.finished = False
        self._buffer = bytearray()
        self._part = "size"
        self._left = 0

    def feed(self, data: bytes) -> bytes:
        self._buffer += data
        body = bytearray()
        while not self.finished:
            if self._part == "data":
                piece = self._buffer[: self._left]
                del self._buffer[: len(piece)]
                body += piece
                self._left -= len(piece)
                if self._left:
                    break
                self._part = "end of data"
                continue
            line = self._line()
            if line is None:
                break
            if self._part == "size":
                size = line.partition(b";")[0].strip()
                if not re.fullmatch(rb"[0-9A-Fa-f]{1,8}", size):
                    raise WireError(f"a chunk's size must be a hexadecimal number, got {line[:40]!r}")
                self._left = int(size, 16)
                self._part = "data" if self._left else "trailers"
            elif self._part == "end of data":
                if line:
                    raise WireError(f"a chunk is longer than its size says: {line[:40]!r} follows")
                self._part = "size"
            else:
                self.finished = not line
        return bytes(body)

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise WireError("a line between chunks has no end")
            return None
        line = bytes(self._buffer[:end]).removesuffix(b"\r")
        del self._buffer[: end + 1]
        return line


class SizedBody:
    """A body of so many bytes. size: None where it ends with the connection."""

    def __init__(self, size: int | None) -> None:
        self._left = size
        self.finished = size == 0

    def feed(self, data: bytes) -> bytes:
        if self._left is None:
            return data
        body = data[: self._left]
        self._left -= len(body)
        self.finished = not self._left
        return body

    @property
    def ends_with_connection(self) -> bool:
        return self._left is None


class HttpAnswer:
    """An answer, from its bytes. status and headers (names in lower case) are there once the head is complete."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self._head = bytearray()
        self._body: ChunkedBody | SizedBody | None = None

    @property
    def finished(self) -> bool:
        return self._body is not None and self._body.finished

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body that have come with it. Raises WireError."""
        while self._body is None:
            self._head += data
            head, blank, data = bytes(self._head).partition(b"\r\n\r\n")
            if not blank:
                if len(self._head) > MAX_HEAD_BYTES or not b"HTTP/1.".startswith(head[:7]):
                    raise WireError(f"the answer is no HTTP/1.1: it begins with {head[:40]!r}")
                return b""
            self._head.clear()
            self._read_head(head)
        return self._body.feed(data)

    def feed_end(self) -> None:
        """The connection was closed. Raises WireError unless that ends the answer."""
        if self._body is None:
            raise WireError("the connection was closed before an answer" + (" was complete" if self._head else ""))
        closes = isinstance(self._body, SizedBody) and self._body.ends_with_connection
        if not closes and not self._body.finished:
            raise WireError("the connection was closed in the middle of the answer")

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        status = re.fullmatch(r"HTTP/1\.[01] ([1-5]\d\d)(?: .*)?", first)
        if not status:
            raise WireError(f"the answer is no HTTP/1.1: it begins with {first[:40]!r}")
        if status[1].startswith("1"):
            return
        self.status = int(status[1])
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise WireError(f"a header is NAME: VALUE, got {line[:40]!r}")
            self.headers[name.strip().lower()] = value.strip()
        size = self.headers.get("content-length")
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._body = ChunkedBody()
        elif self.status in (204, 304):
            self._body = SizedBody(0)
        elif size is not None and not size.isdecimal():
            raise WireError(f"content-length must be a number, got {size[:40]!r}")
        else:
            self._body = SizedBody(None if size is None else int(size))


class EventStream:
    """Server-sent events: lines that begin with `data:` up to an empty line. Comments and other fields are skipped."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._data: list[bytes] = []
        self._first = True

    def feed(self, body: bytes) -> list[str]:
        """The data of the events that are now complete. Raises WireError for what is not UTF-8."""
        self._buffer += body
        events: list[str] = []
        while (line := self._line()) is not None:
            if not line:
                if self._data:
                    events.append(_decode(b"\n".join(self._data)))
                    self._data.clear()
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
        return events

    @property
    def rest(self) -> bytes:
        """What has come of an event that is not complete: the standard says to drop it."""
        return b"\n".join([*self._data, bytes(self._buffer)]).strip()

    def _line(self) -> bytes | None:
        end = re.search(rb"\r\n|\n|\r(?!\Z)", self._buffer)
        if end is None:
            if len(self._buffer) > MAX_LINE_BYTES:
                raise WireError(f"a line of the stream is longer than {MAX_LINE_BYTES:,} bytes")
            return None
        line = bytes(self._buffer[: end.start()])
        del self._buffer[: end.end()]
        if self._first:
            line, self._first = line.removeprefix(b"\xef\xbb\xbf"), False
        return line


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WireError(f"an event is not UTF-8: {data[:40]!r}") from error
