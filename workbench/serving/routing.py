"""Which of several engines gets a request: data parallelism. Policy alone, no torch, no clock.

    round_robin     one after the other
    least_loaded    the one with the fewest tokens waiting and running
    prefix          the one that was sent the longest beginning of this prompt, unless it has too much to do already

Engines (replicas) have caches of their own, so that a prompt whose beginning another one computed is computed again.
`prefix` keeps the hashes of the prompts' leading blocks, as the engines' prefix caches do, with the replica that each
was sent to last: what was sent is known, whether it is still cached is not. The bound is that of consistent hashing
with bounded loads (Mirrokni, Thorup and Zadimoghaddam, arXiv 1608.01350): no replica is given more than `balance` times
the average load, so that one popular prompt does not make one replica do all the work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from workbench.errors import WorkbenchError, check_whole, is_number, shown, unknown
from workbench.kv.prefix import HashChain

ROUTING = ("round_robin", "least_loaded", "prefix")
KEYS_KEPT = 100_000  # hashes of blocks, 32 bytes each


@dataclass(frozen=True)
class Routed:
    """Where a request went. tokens: its load, prompt and output together. known: of its prompt, whole blocks that the
    replica was sent before."""

    replica: int
    tokens: int
    known: int


class Router:
    """Chooses among `replicas` engines. `route` a request, `ended` when it is over, `lost` when a replica is.

    block_size: of the engines' prefix caches. max_blocks: of a prompt's beginning that are compared. balance: of
    "prefix", at least 1. `loads` are the tokens of each replica that wait or run; `requests`, `known_tokens` and
    `prompt_tokens` count all that was routed.
    """

    def __init__(
        self,
        replicas: int,
        policy: str = "prefix",
        *,
        block_size: int = 16,
        max_blocks: int = 64,
        balance: float = 1.25,
    ) -> None:
        self.replicas = check_whole("replicas", replicas, 1)
        if policy not in ROUTING:
            raise unknown("routing policy", policy, ROUTING)
        self.policy = policy
        self.block_size = check_whole("block_size", block_size, 1)
        self.max_blocks = check_whole("max_blocks", max_blocks, 1)
        if not is_number(balance) or balance < 1:
            raise WorkbenchError(f"balance must be a number of at least 1, the average load, got {shown(balance)}")
        self.balance = float(balance)
        self.loads = [0] * replicas
        self.alive = [True] * replicas
        self.requests = [0] * replicas
        self.known_tokens = self.prompt_tokens = 0
        self._routed: dict[Hashable, Routed] = {}
        self._last: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(replicas)]  # keys, oldest first
        self._chain = HashChain(block_size)  # for its keys alone
        self._next = 0

    def route(
        self, request_id: Hashable, prompt_ids: Sequence[int], max_new_tokens: int, tenant: str | bytes = ""
    ) -> Routed:
        """Choose a replica, and count the request as its load. Raises WorkbenchError for a name that is routed already,
        and where no replica is left."""
        if request_id in self._routed:
            raise WorkbenchError(f"request {request_id!r} was routed before and has not ended; give another name")
        if not any(self.alive):
            raise WorkbenchError("no replica is left to serve a request; start new ones")
        tokens = len(prompt_ids) + max_new_tokens
        keys = list(islice(self._chain.keys_of(prompt_ids, tenant), self.max_blocks))
        known = [self._known(replica, keys) for replica in range(self.replicas)]
        replica = self._choose(tokens, known)
        routed = Routed(replica, tokens, known[replica] * self.block_size)
        self._routed[request_id] = routed
        self.loads[replica] += tokens
        self.requests[replica] += 1
        self.prompt_tokens += len(prompt_ids)
        self.known_tokens += routed.known
        last = self._last[replica]
        for key in keys:
            last[key] = None
            last.move_to_end(key)
        while len(last) > KEYS_KEPT:
            last.popitem(last=False)
        return routed

    def ended(self, request_id: Hashable) -> None:
        """A request is over, or is taken back."""
        if request_id not in self._routed:
            raise WorkbenchError(f"request {request_id!r} is not routed; it has ended already, or never came")
        routed = self._routed.pop(request_id)
        self.loads[routed.replica] -= routed.tokens

    def lost(self, replica: int) -> list[Hashable]:
        """A replica is gone: nothing is routed to it any more. Returns the requests it had, which stay its load until
        they `ended`."""
        if replica not in range(self.replicas):
            raise WorkbenchError(f"replicas are 0 … {self.replicas - 1}, got {shown(replica)}")
        self.alive[replica] = False
        self._last[replica].clear()
        return [name for name, routed in self._routed.items() if routed.replica == replica]

    # -- policies ------------------------------------------------------------------------------------------------

    def _choose(self, tokens: int, known: Sequence[int]) -> int:
        if self.policy == "round_robin":
            return self._turn()
        if self.policy == "prefix":
            # capacity ⌈c · average⌉, the request itself in the average; alone it fits anywhere
            alive = [load for load, alive in zip(self.loads, self.alive) if alive]
            capacity = max(tokens, self.balance * (sum(alive) + tokens) / len(alive))
            allowed = [one for one in self._alive() if known[one] and self.loads[one] + tokens <= capacity]
            if allowed:
                return max(allowed, key=lambda one: (known[one], -self.loads[one], -one))
        least = min(self.loads[one] for one in self._alive())
        return self._turn(least)  # in turns among equals, so that an idle system is not served by the first alone

    def _turn(self, load: int | None = None) -> int:
        while True:
            one, self._next = self._next, (self._next + 1) % self.replicas
            if self.alive[one] and (load is None or self.loads[one] == load):
                return one

    def _alive(self) -> Iterator[int]:
        return (one for one in range(self.replicas) if self.alive[one])

    def _known(self, replica: int, keys: Sequence[bytes]) -> int:
        last = self._last[replica]
        return next((at for at, key in enumerate(keys) if key not in last), len(keys))
