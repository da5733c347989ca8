"""The index of the prefix cache: which blocks hold which prefixes. A chain of hashes and a radix tree, same answers.

    block size 2, sequences  a b c d e f  and  a b c d x y       |  the same as a tree
    key of a block: H(tenant), H(that, "a b"), H(that, "c d")    |  a b c d ─┬─ e f
    equal keys: equal tokens from the first one on               |  (0, 1)   └─ x y

A block's key contains the key of the block before it, so it identifies all tokens from the start of the sequence: keys
and values depend on the whole prefix, not on the block's own tokens alone. The tenant is part of the first key, so that
no tenant can find out from the latency of a prompt what another tenant has sent. The hash is SHA-256: with one that can
be forged, a prompt could be answered from another prompt's blocks.

The chain, here, looks up one hash per block, as vLLM does. The tree is `workbench.kv.radix`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

from workbench.errors import check_whole, unknown
from workbench.kv.blocks import check_full
from workbench.kv.radix import RadixTree


class HashChain:
    """One key per block; see the module. `PrefixIndex` of `workbench.kv.contract`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = check_whole("block_size", block_size, 1)
        self._blocks: dict[bytes, int] = {}  # key -> block
        self._keys: dict[int, bytes] = {}  # block -> key

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def match(self, token_ids: Sequence[int], tenant: str | bytes) -> list[int]:
        blocks = []
        for key in self.keys_of(token_ids, tenant):
            block = self._blocks.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int], tenant: str | bytes) -> None:
        check_full(token_ids, blocks, self.block_size)
        known = next((at for at, block in enumerate(blocks) if block not in self._keys), len(blocks))
        before = self._keys[blocks[known - 1]] if known else None  # indexed blocks are not hashed again
        new = list(self.keys_of(token_ids[known * self.block_size :], tenant, before))
        for key, block in zip(new, blocks[known:]):
            if key not in self._blocks and block not in self._keys:
                self._blocks[key], self._keys[block] = block, key

    def forget(self, block: int) -> list[int]:
        """Later blocks of the chain stay indexed: they match again once the same prefix is remembered in another
        block."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]
        return []

    def keys_of(self, token_ids: Sequence[int], tenant: str | bytes, key: bytes | None = None) -> Iterator[bytes]:
        """The keys of all whole blocks, one after the other. key: of the block before them, if there is one."""
        if key is None:
            key = hashlib.sha256(tenant_bytes(tenant)).digest()
        size = self.block_size
        for start in range(0, len(token_ids) - size + 1, size):
            key = hashlib.sha256(key + array("q", token_ids[start : start + size]).tobytes()).digest()
            yield key


def tenant_bytes(tenant: str | bytes) -> bytes:
    """Another for each text (lone surrogates too) and each bytes: no UTF-8 begins with FF."""
    return b"\xff" + tenant if isinstance(tenant, bytes) else tenant.encode("utf-8", "surrogatepass")


PREFIX_INDEXES: dict[str, type[HashChain | RadixTree]] = {"hash": HashChain, "radix": RadixTree}


def prefix_index(kind: str | None, block_size: int) -> HashChain | RadixTree | None:
    """An empty index by its name; None for none."""
    if kind is None:
        return None
    if kind not in PREFIX_INDEXES:
        raise unknown("prefix index", kind, PREFIX_INDEXES)
    return PREFIX_INDEXES[kind](block_size)
