"""What went over each link between the tiers, in bytes and seconds; and the same bytes by formula.

    in every step      weights       host → device   what of the matrices is not on the device
                                     disk → host     what of them is on disk
                       hidden        both ways       rows · d, before and after every layer, of batches whose hidden
                                                     states lie in the host
    in the prompts'    cache         device → host   keys and values of what does not lie on the device
                                     host → disk     … of what lies on disk
    in a decode step   cache         device → host   the new query, key and value of such a sequence
                                     host → device   what attention in the host gives
                                     disk → host     all its keys and values so far
                                     host → disk     the new ones

What lies on disk passes through the host. Padding to whole blocks of the disk is not counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from workbench.models.config import ModelConfig

UP, DOWN, READ, WRITE = "host → device", "device → host", "disk → host", "host → disk"
LINKS = (UP, DOWN, READ, WRITE)


class Traffic:
    """Counted by the thread that moves; several threads may count at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes: dict[str, int] = dict.fromkeys(LINKS, 0)
        self.seconds: dict[str, float] = dict.fromkeys(LINKS, 0.0)

    @contextmanager
    def over(self, link: str, num_bytes: int) -> Iterator[None]:
        """So many bytes are moved within the block."""
        began = time.perf_counter()
        yield
        took = time.perf_counter() - began
        with self._lock:
            self.bytes[link] += num_bytes
            self.seconds[link] += took

    def clear(self) -> None:
        with self._lock:
            self.bytes, self.seconds = dict.fromkeys(LINKS, 0), dict.fromkeys(LINKS, 0.0)

    def taken(self) -> tuple[dict[str, int], dict[str, float]]:
        """(bytes, seconds) of each link since the last `clear`."""
        with self._lock:
            return dict(self.bytes), dict(self.seconds)


@dataclass(frozen=True)
class Moved:
    """What decides the bytes of a run. cache: sequences of the block on device, host and disk; hidden_in_host: rows of
    a token, those sequences whose hidden states lie in the host; value_bytes: of weights; cache_bytes: of a stored
    value."""

    config: ModelConfig
    host_bytes: int
    disk_bytes: int
    cache: tuple[int, int, int]
    hidden_in_host: int
    prompt_tokens: int
    new_tokens: int
    value_bytes: int
    cache_bytes: int

    def by_link(self) -> dict[str, int]:
        """Bytes over each link, of a whole run: the prompts' step and new_tokens − 1 decode steps."""
        c, steps = self.config, self.new_tokens
        layers, query, pair = c.num_layers, c.num_heads * c.head_dim, 2 * c.num_kv_heads * c.head_dim
        rows = self.prompt_tokens + steps - 1  # tokens of a sequence that go through the model
        away, on_disk = self.cache[1] + self.cache[2], self.cache[2]
        hidden = (layers + 1) * self.hidden_in_host * rows * c.hidden_size * self.value_bytes
        of_decode = (steps - 1) * layers * away * self.value_bytes
        read = sum(range(self.prompt_tokens, self.prompt_tokens + steps - 1))  # tokens that decode steps look back on
        return {
            UP: steps * (self.host_bytes + self.disk_bytes) + hidden + of_decode * query,
            DOWN: hidden + layers * away * rows * pair * self.value_bytes + of_decode * query,
            READ: steps * self.disk_bytes + layers * on_disk * read * pair * self.cache_bytes,
            WRITE: layers * on_disk * rows * pair * self.cache_bytes,
        }
