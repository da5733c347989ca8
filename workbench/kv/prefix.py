"""Which blocks hold which beginnings of texts: a chain of hashes, and a radix tree. Two structures, one answer.

    block size 2, texts  a b c d e f   and  a b c d x y          |  the same as a tree
    key of a block: H(tenant), H(that, "a b"), H(that, "c d")    |  a b c d ─┬─ e f
    equal keys, equal text from the first token on               |  (0, 1)   └─ x y

A key says everything before a block as well, because it contains the key of the block before: keys and values depend on the
whole text so far, not on the block's own tokens. The tenant is part of the first key, so that nobody can find out, by the
time his prompt takes, what others have asked. The hash is SHA-256: with one that can be forged a prompt could be answered
from another's blocks.

The chain looks up block after block, a hash each, and is what vLLM does. The tree compares tokens, joins blocks that were
never told apart into one edge, and is what SGLang does (RadixAttention, Zheng et al., arXiv 2312.07104 §3).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from workbench.errors import WorkbenchError, check_whole, unknown


class HashChain:
    """One key a block; see the module. `PrefixIndex` of `workbench.kv.blocks`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = check_whole("block_size", block_size, 1)
        self._blocks: dict[bytes, int] = {}  # key -> block
        self._keys: dict[int, bytes] = {}  # block -> key

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def match(self, token_ids: Sequence[int], tenant: str) -> list[int]:
        found = []
        for key in self._keys_of(token_ids, tenant):
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int], tenant: str) -> None:
        _check_full(token_ids, blocks, self.block_size)
        known = next((at for at, block in enumerate(blocks) if block not in self._keys), len(blocks))
        before = self._keys[blocks[known - 1]] if known else None  # what is known need not be hashed again
        new = list(self._keys_of(token_ids[known * self.block_size :], tenant, before))
        for key, block in zip(new, blocks[known:]):
            if key not in self._blocks and block not in self._keys:
                self._blocks[key], self._keys[block] = block, key

    def forget(self, block: int) -> list[int]:
        """What follows stays: it is found again when the same beginning is remembered in another block."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]
        return []

    def _keys_of(self, token_ids: Sequence[int], tenant: str, key: bytes | None = None):
        """The keys of all whole blocks, one after the other. key: of the block before them, if there is one."""
        if key is None:
            key = hashlib.sha256(tenant.encode()).digest()
        size = self.block_size
        for start in range(0, len(token_ids) - size + 1, size):
            key = hashlib.sha256(key + array("q", token_ids[start : start + size]).tobytes()).digest()
            yield key


@dataclass(eq=False)
class _Node:
    """An edge and what comes after it: `chunks` are blocks' tokens, `blocks` the blocks that hold them."""

    chunks: list[tuple[int, ...]]
    blocks: list[int]
    parent: _Node | None
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)  # by the first chunk


class RadixTree:
    """A tree of beginnings, a root each tenant; see the module. `PrefixIndex` of `workbench.kv.blocks`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = check_whole("block_size", block_size, 1)
        self._roots: dict[str, _Node] = {}
        self._home: dict[int, _Node] = {}  # block -> the node that has it

    def __contains__(self, block: int) -> bool:
        return block in self._home

    def __len__(self) -> int:
        return len(self._home)

    def match(self, token_ids: Sequence[int], tenant: str) -> list[int]:
        found: list[int] = []
        for node, count in self._walk(self._chunks(token_ids), self._roots.get(tenant)):
            found += node.blocks[:count]
        return found

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int], tenant: str) -> None:
        _check_full(token_ids, blocks, self.block_size)
        start, done = self._roots.setdefault(tenant, _Node([], [], None)), 0
        known = _last_known(blocks, self._home)
        if known >= 0 and self._home[blocks[known]].blocks[-1] == blocks[known]:
            start, done = self._home[blocks[known]], known + 1  # the end of an edge: go on from there
        chunks, node = self._chunks(token_ids[done * self.block_size :]), start
        for below, count in self._walk(chunks, start):
            node, done, chunks = below, done + count, chunks[count:]
            if count < len(below.chunks):
                self._split(below, count)
        blocks = list(blocks[done:])
        if chunks:
            if node.parent is not None and not node.children:
                node.chunks += chunks
                node.blocks += blocks
            else:
                child = _Node(list(chunks), blocks, node)
                node.children[chunks[0]] = child
                node = child
            self._home.update(dict.fromkeys(blocks, node))

    def forget(self, block: int) -> list[int]:
        """With it goes what follows it, which hangs on it."""
        node = self._home.get(block)
        if node is None:
            return []
        at = node.blocks.index(block)
        below, todo = list(node.blocks[at:]), list(node.children.values())
        while todo:
            one = todo.pop()
            below += one.blocks
            todo += one.children.values()
        for gone in below:
            del self._home[gone]
        first = node.chunks[0]
        del node.chunks[at:], node.blocks[at:]
        node.children.clear()
        if not at:
            del node.parent.children[first]
            if node.parent.parent is None and not node.parent.children:  # nothing is left of this tenant
                self._roots = {
                    tenant: root for tenant, root in self._roots.items() if root is not node.parent
                }
        return [gone for gone in below if gone != block]

    def _chunks(self, token_ids: Sequence[int]) -> list[tuple[int, ...]]:
        size = self.block_size
        return [tuple(token_ids[a : a + size]) for a in range(0, len(token_ids) - size + 1, size)]

    @staticmethod
    def _walk(chunks: list[tuple[int, ...]], node: _Node | None):
        """The nodes below one along a text, and how many of each one's blocks belong to it; at least one of each."""
        at = 0
        while node is not None and at < len(chunks) and (node := node.children.get(chunks[at])) is not None:
            same = 0
            while (
                same < len(node.chunks) and at + same < len(chunks) and node.chunks[same] == chunks[at + same]
            ):
                same += 1
            yield node, same
            at += same
            if same < len(node.chunks):
                return

    def _split(self, node: _Node, count: int) -> None:
        """The first `count` blocks stay; the others become a child."""
        rest = _Node(node.chunks[count:], node.blocks[count:], node, node.children)
        for child in rest.children.values():
            child.parent = rest
        for block in rest.blocks:
            self._home[block] = rest
        del node.chunks[count:], node.blocks[count:]
        node.children = {rest.chunks[0]: rest}


def _last_known(blocks: Sequence[int], known: dict) -> int:
    """Place of the last block that is known already, −1 for none. All before it need not be looked at again."""
    return next((at for at in range(len(blocks) - 1, -1, -1) if blocks[at] in known), -1)


def _check_full(token_ids: Sequence[int], blocks: Sequence[int], block_size: int) -> None:
    if len(token_ids) != len(blocks) * block_size:
        raise WorkbenchError(
            f"{len(blocks)} full blocks of {block_size} hold {len(blocks) * block_size} tokens, got {len(token_ids)}"
        )


PREFIX_INDEXES = {"hash": HashChain, "radix": RadixTree}


def prefix_index(kind: str | None, block_size: int):
    """An empty index by its name; None for none."""
    if kind is None:
        return None
    if kind not in PREFIX_INDEXES:
        raise unknown("prefix index", kind, PREFIX_INDEXES)
    return PREFIX_INDEXES[kind](block_size)
