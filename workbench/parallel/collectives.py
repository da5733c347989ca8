"""Collectives: what ranks do together, as objects that count their calls and bytes.

    all_reduce   every rank has x, every rank gets the sum          two in a layer of tensor parallelism
    all_gather   every rank gets what every rank has
    gather       one rank gets what every rank has                  the parts of the logits
    all_to_all   every rank has something else for each other one   rows to their experts and back
    broadcast    every rank gets what one rank has                  shards of the weights
    send, receive   from one rank to another                        hidden states between stages of a pipeline
    tell, hear      bytes from the first rank to all others         a step's batch

Three kinds do the same: `gloo` (sockets), `nccl` (GPUs), and `shm` here, shared memory of one machine. `counts` has for
each operation how often this rank called it, and the bytes of the tensors that it brought (received, for `receive` and
`hear`). What goes over a wire is more or less than that, by the algorithm (`alpha_beta`). A rank alone calls nothing:
what takes no other rank is not counted.

`clock` counts steps of a pipeline (`pipeline`): what is sent carries it, so that a receiver knows how late it is
(Lamport, CACM 21(7), 1978). `spans`, where it is a list, gets the beginning and the end of every operation.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from workbench.errors import WorkbenchError
from workbench.parallel.ranks import LONG, LOOPBACK, Rank, proof

OPERATIONS = ("all_reduce", "all_gather", "gather", "all_to_all", "broadcast", "send", "receive", "tell", "hear")
DATA, CONTROL = 0, 1  # tags of messages over sockets


@dataclass(frozen=True)
class Count:
    """How often, and bytes of the tensors in all."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.calls + other.calls, self.bytes + other.bytes)


class Span(NamedTuple):
    """An operation of one rank, in seconds of a clock that all processes of this machine share."""

    operation: str
    begin_s: float
    end_s: float


Given = ParamSpec("Given")
Made = TypeVar("Made")


def _noted(method: Callable[Concatenate[Collectives, Given], Made]) -> Callable[Concatenate[Collectives, Given], Made]:
    """The operation, its beginning and end noted where somebody asked for spans."""

    @functools.wraps(method)
    def operation(self: Collectives, *args: Given.args, **kwargs: Given.kwargs) -> Made:
        if self.spans is None:
            return method(self, *args, **kwargs)
        began = time.perf_counter()
        made = method(self, *args, **kwargs)
        self.spans.append(Span(method.__name__, began, time.perf_counter()))
        return made

    return operation


class Collectives(ABC):
    """Some ranks of a run, the members, in an order. All call the same operations in the same order.

    index: of this rank among the members; `size` of them. Every operation raises RankLost when a member ended, and
    after `rank.timeout_s` without it. Not for several threads.
    """

    backend = ""

    def __init__(self, rank: Rank, members: Sequence[int]) -> None:
        self.rank, self.members = rank, tuple(members)
        self.index, self.size = self.members.index(rank.rank), len(self.members)
        self.counts: dict[str, Count] = dict.fromkeys(OPERATIONS, Count())
        self.clock = 0
        self.spans: list[Span] | None = None

    @_noted
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all members, in their order of addition where the backend has one; x may hold it afterwards."""
        if self.size == 1:
            return x
        self._count("all_reduce", x.nbytes)
        return self._all_reduce(x.contiguous())

    @_noted
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[members, *x.shape], in the members' order."""
        if self.size == 1:
            return x[None].clone()
        self._count("all_gather", x.nbytes)
        return self._all_gather(x.contiguous())

    @_noted
    def gather(self, x: torch.Tensor, root: int = 0) -> torch.Tensor | None:
        """The same for the member of that index; None for all others."""
        if self.size == 1:
            return x[None].clone()
        self._count("gather", x.nbytes)
        return self._gather(x.contiguous(), root)

    @_noted
    def all_to_all(self, parts: Sequence[torch.Tensor], rows: Sequence[int]) -> list[torch.Tensor]:
        """parts[i] goes to member i, and from each member comes a part of rows[i] rows, of the same width and type.

        Counted are the bytes that leave this rank. All know how many rows come, by an `all_gather` before.
        """
        assert len(parts) == len(rows) == self.size, "a part for each member"
        come = [part.new_empty(count, *part.shape[1:]) for part, count in zip(parts, rows)]
        come[self.index] = parts[self.index]
        if self.size == 1:
            return come
        others = [i for i in range(self.size) if i != self.index]
        self._count("all_to_all", sum(parts[i].nbytes for i in others))
        for i in others:
            if len(parts[i]):
                self._send(parts[i].contiguous(), i)
        for i in others:
            if rows[i]:
                self._receive(come[i], i)
        return come

    @_noted
    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        """x as the member of that index has it, written into x, which is contiguous."""
        assert x.is_contiguous(), "broadcast writes into x"
        if self.size > 1:
            self._count("broadcast", x.nbytes)
            self._broadcast(x, root)
        return x

    @_noted
    def send(self, x: torch.Tensor, to: int) -> None:
        """x to the member of that index. Does not wait for it; x is not to be changed afterwards."""
        self._count("send", x.nbytes)
        self._send(x.contiguous(), to)

    @_noted
    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """What that member sent next, of the shape and type of x, in x. `clock` is at least its sender's afterwards."""
        self._count("receive", x.nbytes)
        self.clock = max(self.clock, self._receive(x, source))
        return x

    @_noted
    def tell(self, message: bytes) -> None:
        """From the first member to all others, who `hear` it. Does not wait for them."""
        assert self.index == 0, "the first member tells"
        if self.size > 1:
            self._count("tell", len(message))
            self._tell(message)

    @_noted
    def hear(self) -> bytes:
        """The next message of the first member, however long it takes to come."""
        assert self.index > 0, "the first member tells"
        message = self._hear()
        self._count("hear", len(message))
        return message

    def barrier(self) -> None:
        """Wait until every member is here."""
        if self.size > 1:
            self._all_reduce(torch.zeros(1, device=self.device))

    def reset_counts(self) -> None:
        self.counts = dict.fromkeys(OPERATIONS, Count())

    @property
    def device(self) -> torch.device:
        """Where tensors have to be."""
        return torch.device("cpu")

    @abstractmethod
    def close(self) -> None:
        """Give up memory and connections; may be called twice."""

    def _count(self, operation: str, nbytes: int) -> None:
        self.counts[operation] += Count(1, nbytes)

    @abstractmethod
    def _all_reduce(self, x: torch.Tensor) -> torch.Tensor: ...
    @abstractmethod
    def _all_gather(self, x: torch.Tensor) -> torch.Tensor: ...
    @abstractmethod
    def _gather(self, x: torch.Tensor, root: int) -> torch.Tensor | None: ...
    @abstractmethod
    def _broadcast(self, x: torch.Tensor, root: int) -> None: ...
    @abstractmethod
    def _send(self, x: torch.Tensor, to: int) -> None: ...
    @abstractmethod
    def _receive(self, x: torch.Tensor, source: int) -> int: ...
    @abstractmethod
    def _tell(self, message: bytes) -> None: ...
    @abstractmethod
    def _hear(self) -> bytes: ...


# -- torch's own process groups ------------------------------------------------------------------------------


class TorchCollectives(Collectives):
    """Over a process group of torch.distributed, held as an object: there is no default group."""

    def __init__(self, rank: Rank, members: Sequence[int], name: str) -> None:
        super().__init__(rank, members)
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()  # sends, with what they send
        with self._lost():
            self._group: Any = self._make_group(dist.PrefixStore(name, rank.store))
            if self.size > 1:
                self._check_peers(name)

    @abstractmethod
    def _make_group(self, store: dist.Store) -> Any: ...

    def _check_peers(self, name: str) -> None:
        """Challenge and proof over the connections themselves: a member that does not know the token is refused."""
        nonces = self._all_gather(torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8))
        challenge = bytes(nonces.flatten().tolist()).hex()
        mine = torch.frombuffer(bytearray(proof(self.rank, name, challenge, str(self.index))), dtype=torch.uint8)
        for index, came in enumerate(self._all_gather(mine)):
            if not hmac.compare_digest(bytes(came.tolist()), proof(self.rank, name, challenge, str(index))):
                raise WorkbenchError(
                    f"who connected as rank {self.members[index]} does not know the token of this run; nothing was "
                    "sent to it. Is a program of somebody else on this machine? Start the ranks again"
                )

    @contextlib.contextmanager
    def _lost(self) -> Iterator[None]:
        """A broken connection is the end of a rank, and the error says whose."""
        try:
            yield
        except WorkbenchError:
            raise
        except RuntimeError as error:  # torch has several classes for it
            raise self.rank.lost(error) from error

    def _all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        with self._lost():
            self._group.allreduce([x]).wait()
        return x

    def _all_gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in self.members]
        with self._lost():
            self._group.allgather([parts], [x]).wait()
        return torch.stack(parts)

    def _gather(self, x: torch.Tensor, root: int) -> torch.Tensor | None:
        parts = [torch.empty_like(x) for _ in self.members] if self.index == root else []
        with self._lost():
            self._group.gather(parts, x, root).wait()
        return torch.stack(parts) if parts else None

    def _broadcast(self, x: torch.Tensor, root: int) -> None:
        with self._lost():
            self._group.broadcast(x, root).wait()

    def _send(self, x: torch.Tensor, to: int) -> None:
        self._start(torch.tensor([self.clock], device=self.device), to, DATA)
        self._start(x, to, DATA)

    def _receive(self, x: torch.Tensor, source: int) -> int:
        clock = torch.zeros(1, dtype=torch.int64, device=self.device)
        with self._lost():
            self._group.recv([clock], source, DATA).wait()
            self._group.recv([x], source, DATA).wait()
        return int(clock.item())

    def _tell(self, message: bytes) -> None:
        size = torch.tensor([len(message)], device=self.device)
        content = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self.device)
        for index in range(1, self.size):
            self._start(size, index, CONTROL)
            self._start(content, index, CONTROL)

    def _hear(self) -> bytes:
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        with self._lost():
            self._group.recv([size], 0, CONTROL).wait(LONG)
            content = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
            self._group.recv([content], 0, CONTROL).wait()
        return bytes(content.cpu().numpy())

    def _start(self, x: torch.Tensor, to: int, tag: int) -> None:
        with self._lost():
            self._under_way.append((self._group.send([x], to, tag), x))
            while self._under_way and self._under_way[0][0].is_completed():
                self._under_way.popleft()

    def close(self) -> None:
        self._group = None
        self._under_way.clear()


class GlooCollectives(TorchCollectives):
    """Over sockets on loopback (https://github.com/pytorch/gloo)."""

    backend = "gloo"

    def _make_group(self, store: dist.Store) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=self.rank.timeout_s)
        return gloo(store, self.index, self.size, options)


class NcclCollectives(TorchCollectives):
    """Over NVLink or PCIe, a GPU a rank: rank r computes on cuda:r. NCCL does not say in which order it adds."""

    backend = "nccl"

    def _make_group(self, store: dist.Store) -> Any:
        if not torch.cuda.is_available() or not dist.is_nccl_available():
            raise WorkbenchError("backend 'nccl' needs CUDA devices and a torch with NCCL; use 'shm' or 'gloo' here")
        if torch.cuda.device_count() < max(self.members) + 1:
            raise WorkbenchError(
                f"backend 'nccl' takes a GPU a rank: ranks {list(self.members)} need {max(self.members) + 1}, and this "
                f"machine has {torch.cuda.device_count()}; use 'gloo', or fewer ranks"
            )
        torch.cuda.set_device(self.device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self.rank.timeout_s)
        return dist.ProcessGroupNCCL(store, self.index, self.size, options)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.rank.rank)

    def _check_peers(self, name: str) -> None:
        """NCCL's connections are made from an id that stands in the run's store, under a key that the token makes."""
        self.barrier()
