"""The tier in host memory: one tensor of slots, each with the bytes of one block."""

from __future__ import annotations

import torch

from workbench.instruments.memory import require_bytes


class HostTier:
    """`capacity` slots of `block_bytes` bytes. pinned: in page-locked memory, which a GPU copies from and to directly.

    Raises WorkbenchError, before anything is allocated, for more bytes than are free.
    """

    name = "host"

    def __init__(self, capacity: int, block_bytes: int, *, pinned: bool = False) -> None:
        require_bytes(capacity * block_bytes, "cpu", f"a host tier of {capacity:,} blocks × {block_bytes:,} bytes")
        self.capacity, self.block_bytes = capacity, block_bytes
        self._slots = torch.empty((capacity, block_bytes), dtype=torch.uint8, pin_memory=pinned)

    def slot(self, slot: int) -> torch.Tensor:
        """[block_bytes] uint8, a view to read and write."""
        return self._slots[slot]
