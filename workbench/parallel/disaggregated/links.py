"""Links: ordered connections for messages between two engines, one end each. Five kinds, the same two calls.

    in_process      two engines of one process         a queue each way
    shared memory   two processes of a machine         a ring of bytes each way       `shared_ring`
    tcp             over loopback                      a socket                       `tcp`
    gloo            over torch's process groups        collectives' send, receive     `over_collectives`
    nixl            one-sided writes, where installed  a ring of bytes each way       `over_nixl`

`post` never waits: what there is no room for stays in an outbox, and goes with later calls. Two engines that waited for
each other's room would wait for ever.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque

from workbench.errors import WorkbenchError
from workbench.parallel.collectives import Count
from workbench.parallel.disaggregated.messages import BadMessage, Message, Parser

PIECE = 1 << 20  # bytes that are read at once


class LinkLost(WorkbenchError):
    """The other end is gone, or what it sent was no message: nothing more comes or goes over this link."""


class Link(ABC):
    """One end. `sent` and `received` count messages, and the bytes of their payloads. Not for several threads."""

    kind = ""

    def __init__(self) -> None:
        self.sent = self.received = Count()
        self.why_lost = ""

    def post(self, message: Message) -> None:
        """Send, without waiting. Raises LinkLost."""
        self._check()
        self._post(message)
        self.sent += Count(1, len(message.payload))

    def poll(self) -> Message | None:
        """The next message, or None where none is here yet. Raises LinkLost; what came before the end comes first."""
        self._check()
        message = self._poll()
        if message is not None:
            self.received += Count(1, len(message.payload))
        return message

    def wait(self, timeout_s: float) -> None:
        """At most so long, until there may be something to poll."""
        time.sleep(min(timeout_s, 0.0002))

    def lose(self, reason: str) -> LinkLost:
        """Close this end, for a reason; the error to raise. The first reason stays."""
        if not self.why_lost:
            self.why_lost = reason
            self._close()
        return LinkLost(self.why_lost)

    def close(self) -> None:
        """May be called twice. The other end loses the link."""
        self.lose("this end of the link was closed")

    def _check(self) -> None:
        if self.why_lost:
            raise LinkLost(self.why_lost)

    @abstractmethod
    def _post(self, message: Message) -> None: ...
    @abstractmethod
    def _poll(self) -> Message | None: ...
    @abstractmethod
    def _close(self) -> None: ...


# -- one process -------------------------------------------------------------------------------------------------


class InProcess(Link):
    """Both ends in one process: what is posted is what is polled, without a copy."""

    kind = "in_process"

    def __init__(self) -> None:
        super().__init__()
        self._inbox: deque[Message] = deque()
        self._peer: InProcess = self
        self._ended = False  # by the other end

    @classmethod
    def pair(cls) -> tuple[InProcess, InProcess]:
        one, other = cls(), cls()
        one._peer, other._peer = other, one
        return one, other

    def _post(self, message: Message) -> None:
        if self._ended:
            raise self.lose("the other end of the link was closed")
        self._peer._inbox.append(message)

    def _poll(self) -> Message | None:
        if self._inbox:
            return self._inbox.popleft()
        if self._ended:
            raise self.lose("the other end of the link was closed")
        return None

    def _close(self) -> None:
        self._peer._ended = True


# -- streams of bytes --------------------------------------------------------------------------------------------


class Ended(Exception):
    """The other end of a stream ended it, as its words say."""


class StreamLink(Link):
    """Over anything that takes and gives some bytes at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._outbox: deque[memoryview] = deque()
        self._parser, self._whole = Parser(), deque[Message]()
        self._broken: Exception | None = None  # why nothing more can be sent

    @abstractmethod
    def _put(self, data: memoryview) -> int:
        """Take the first bytes of `data`, as many as there is room for. Raises Ended, or OSError."""

    @abstractmethod
    def _get(self) -> bytes | memoryview:
        """What has come, PIECE bytes at most; empty for nothing. Raises Ended, or OSError."""

    def _post(self, message: Message) -> None:
        self._outbox.append(memoryview(message.encoded()))
        if len(message.payload):
            self._outbox.append(memoryview(message.payload).cast("B"))
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                count = self._put(self._outbox[0])
                if count < len(self._outbox[0]):
                    self._outbox[0] = self._outbox[0][count:]
                    return
                self._outbox.popleft()
        except (Ended, OSError) as error:
            raise self.lose(f"the other end of the link is gone ({error})") from error

    def _poll(self) -> Message | None:
        if self._whole:
            return self._whole.popleft()
        try:
            self._flush_quietly()
            if len(piece := self._get()):
                self._whole.extend(self._parser.feed(piece))
        except BadMessage as error:  # where the next message begins is not known any more
            raise self.lose(str(error)) from error
        except (Ended, OSError) as error:
            try:
                self._parser.check_end()
            except BadMessage as truncated:
                raise self.lose(str(truncated)) from error
            raise self.lose(f"the other end of the link is gone ({self._broken or error})") from error
        return self._whole.popleft() if self._whole else None

    def _flush_quietly(self) -> None:
        """Room for what is in the outbox may have come. Where the other end is gone, what it sent before is read
        first."""
        try:
            while self._outbox and (count := self._put(self._outbox[0])):
                left = self._outbox.popleft()[count:]
                if len(left):
                    self._outbox.appendleft(left)
        except (Ended, OSError) as error:
            self._outbox.clear()
            self._broken = error  # reading says so next
