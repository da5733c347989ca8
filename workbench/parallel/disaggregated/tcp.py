"""A link over a socket on loopback. Both ends prove that they know the token of the run before a message passes.

    who connects                                  who listens
    16 random bytes a                 ─────▶
                                      ◀─────      16 random bytes b, HMAC(token, "listens", a, b)
    HMAC(token, "connects", a, b)     ─────▶      compares, or closes

Random bytes of both are in both proofs, so that none can be used a second time. What this does not guard: nothing is
encrypted, and another user of this machine can keep the port busy.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable

from workbench.errors import WorkbenchError
from workbench.parallel.disaggregated.links import PIECE, Ended, LinkLost, StreamLink
from workbench.parallel.ranks import LOOPBACK

NONCE, PROOF = 16, 32  # bytes
HANDSHAKE_S = 5.0  # for one who connects
LOOK_EVERY_S = 0.1  # whether there is still use in waiting
MAX_UNPROVED = 32  # who connected and proved nothing yet


class TcpLink(StreamLink):
    """Made by `connect` and `accept`, which have proved the token."""

    kind = "tcp"

    def __init__(self, connected: socket.socket) -> None:
        super().__init__()
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected

    def _put(self, data: memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    def _get(self) -> bytes:
        try:
            piece = self._socket.recv(PIECE)
        except BlockingIOError:
            return b""
        if not piece:
            raise Ended("it closed the connection")
        return piece

    def wait(self, timeout_s: float) -> None:
        if not self.why_lost and not self._whole:
            select.select([self._socket], [self._socket] if self._outbox else [], [], timeout_s)

    def _close(self) -> None:
        self._socket.close()


def listen(port: int = 0) -> socket.socket:
    """A socket that listens on loopback alone; port 0 is any free one."""
    listening = socket.socket()
    try:
        listening.bind((LOOPBACK, port))
        listening.listen(8)
    except OSError as error:
        listening.close()
        raise WorkbenchError(
            f"port {port} of {LOOPBACK} cannot be used ({error.strerror}); give another, or 0"
        ) from error
    return listening


def accept(
    listening: socket.socket, token: str, *, timeout_s: float = 60.0, check: Callable[[], None] = lambda: None
) -> TcpLink:
    """The link to the first who connects and knows the token; all others are sent away, and one that is silent keeps
    nobody waiting. check: raises when there is no use in waiting any more. Raises LinkLost when none came in time."""
    deadline, strangers, under_way = time.monotonic() + timeout_s, 0, 0
    heard: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()

    def hear(connected: socket.socket, within_s: float) -> None:
        known = _proved(connected, token, within_s)
        if not known:
            connected.close()
        heard.put(connected if known else None)

    while (left := deadline - time.monotonic()) > 0:
        check()
        if not heard.empty():
            known = heard.get_nowait()
            if known is not None:
                return TcpLink(known)
            strangers, under_way = strangers + 1, under_way - 1
        if not select.select([listening], [], [], min(left, 0.002 if under_way else LOOK_EVERY_S))[0]:
            continue
        connected, _ = listening.accept()
        if under_way == MAX_UNPROVED:
            strangers += 1
            connected.close()
            continue
        under_way += 1
        threading.Thread(target=hear, args=(connected, min(left, HANDSHAKE_S)), name="handshake", daemon=True).start()
    strangers += under_way
    came = f"; {strangers} came that did not know the token of this run" if strangers else ""
    raise LinkLost(f"the other engine did not connect within {timeout_s:g} s{came}")


def connect(port: int, token: str, *, timeout_s: float = 60.0) -> TcpLink:
    """The link to who listens at this port of loopback. Raises LinkLost where nobody does, and where it does not prove
    the token; then no message was sent to it."""
    try:
        connected = socket.create_connection((LOOPBACK, port), timeout=timeout_s)
    except OSError as error:
        raise LinkLost(f"no engine listens at {LOOPBACK}:{port} ({error})") from error
    try:
        mine, until_s = secrets.token_bytes(NONCE), time.monotonic() + timeout_s
        connected.sendall(mine)
        theirs = _read(connected, NONCE, until_s)
        if not hmac.compare_digest(_read(connected, PROOF, until_s), _proof(token, b"listens", mine, theirs)):
            raise LinkLost(f"who listens at {LOOPBACK}:{port} does not know the token of this run; give its own port")
        connected.sendall(_proof(token, b"connects", mine, theirs))
    except (OSError, Ended) as error:
        connected.close()
        raise LinkLost(f"who listens at {LOOPBACK}:{port} ended the handshake ({error}); is it of this run?") from error
    except LinkLost:
        connected.close()
        raise
    return TcpLink(connected)


def _proved(connected: socket.socket, token: str, within_s: float) -> bool:
    connected.settimeout(within_s)
    until_s = time.monotonic() + within_s
    with contextlib.suppress(OSError, Ended):
        theirs, mine = _read(connected, NONCE, until_s), secrets.token_bytes(NONCE)
        connected.sendall(mine + _proof(token, b"listens", theirs, mine))
        return hmac.compare_digest(_read(connected, PROOF, until_s), _proof(token, b"connects", theirs, mine))
    return False


def _proof(token: str, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(token.encode(), who + b"\0" + first + second, hashlib.sha256).digest()


def _read(connected: socket.socket, count: int, until_s: float) -> bytes:
    """Exactly so many bytes; byte by byte, they do not take longer than in one piece."""
    data = b""
    while len(data) < count:
        if (left := until_s - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        connected.settimeout(left)
        piece = connected.recv(count - len(data))
        if not piece:
            raise Ended("it closed the connection")
        data += piece
    return data
