"""A link over the collectives of two ranks (gloo): two tensors a message, its size and its bytes.

`receive` waits, and an engine must not: so a thread of this link waits in it, and puts what came into a queue.
"""

from __future__ import annotations

import queue
import threading
from contextlib import suppress

import torch

from workbench.errors import WorkbenchError
from workbench.parallel.backends import make_collectives
from workbench.parallel.collectives import Collectives
from workbench.parallel.disaggregated.links import Link
from workbench.parallel.disaggregated.messages import HEAD, MAX_HEADER, MAX_PAYLOAD, BadMessage, Message, Parser
from workbench.parallel.ranks import GRACE_S, Rank

LARGEST = HEAD.size + MAX_HEADER + MAX_PAYLOAD


class CollectiveLink(Link):
    """group: collectives of two members, of nobody else."""

    kind = "gloo"

    def __init__(self, group: Collectives) -> None:
        super().__init__()
        self.group, self._other = group, 1 - group.index
        self._came: queue.SimpleQueue[Message | str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._receive, name="link", daemon=True)
        self._thread.start()

    def _post(self, message: Message) -> None:
        data = bytearray(message.encoded()) + message.payload
        try:
            self._send(data)
        except WorkbenchError as error:
            raise self.lose(f"the other end of the link is gone ({error})") from error

    def _send(self, data: bytearray) -> None:
        self.group.send(torch.tensor([len(data)]), self._other)
        if data:
            self.group.send(torch.frombuffer(data, dtype=torch.uint8), self._other)

    def _receive(self) -> None:
        """On the thread, until the other end says that it ends (a size of 0), or is gone."""
        try:
            while size := int(self.group.receive(torch.zeros(1, dtype=torch.int64), self._other).item()):
                if not 0 < size <= LARGEST:
                    raise BadMessage(f"a message has at most {LARGEST:,} bytes, and one of {size:,} is announced")
                data = self.group.receive(torch.empty(size, dtype=torch.uint8), self._other)
                parser = Parser()
                for message in parser.feed(bytes(data.numpy())):
                    self._came.put(message)
                parser.check_end()
            self._came.put("the other end of the link was closed")
        except Exception as error:
            self._came.put(f"the other end of the link is gone ({error})")

    def _poll(self) -> Message | None:
        try:
            came = self._came.get_nowait()
        except queue.Empty:
            return None
        if isinstance(came, str):
            raise self.lose(came)
        return came

    def wait(self, timeout_s: float) -> None:
        """The queue is looked at without taking anything out of it."""
        if self._came.empty():
            super().wait(timeout_s)

    def _close(self) -> None:
        with suppress(WorkbenchError):
            self._send(bytearray())
        self._thread.join(GRACE_S)
        self.group.close()


def collective_link(rank: Rank, *, backend: str = "gloo", name: str = "link") -> CollectiveLink:
    """Of the ranks 0 and 1 of a run, to be made by both."""
    return CollectiveLink(make_collectives(rank, [0, 1], backend=backend, name=name))
