"""The index of the prefix cache: which blocks hold which prefixes. A chain of hashes and a radix tree, same answers.

    block size 2, sequences  a b c d e f  and  a b c d x y       |  the same as a tree
    key of a block: H(tenant), H(that, "a b"), H(that, "c d")    |  a b c d ─┬─ e f
    equal keys: equal tokens from the first one on               |  (0, 1)   └─ x y

A block's key contains the key of the block before it, so it identifies all tokens from the start of the sequence: keys
and values depend on the whole prefix, not on the block's own tokens alone. The tenant is part of the first key, so that
no tenant can find out from the latency of a prompt what another tenant has sent. The hash is SHA-256: with one that can
be forged, a prompt could be answered from another prompt's blocks.

The chain looks up one hash per block, as vLLM does. The tree compares tokens and keeps blocks between two branching
points on one edge, as SGLang does (RadixAttention, Zheng et al., arXiv 2312.07104 §3).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

from workbench.errors import WorkbenchError, check_whole, unknown


class HashChain:
    """One key per block; see the module. `PrefixIndex` of `workbench.kv.blocks`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = check_whole("block_size", block_size, 1)
        self._blocks: dict[bytes, int] = {}  # key -> block
        self._keys: dict[int, bytes] = {}  # block -> key

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def match(self, token_ids: Sequence[int], tenant: str) -> list[int]:
        blocks = []
        for key in self._keys_of(token_ids, tenant):
            block = self._blocks.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int], tenant: str) -> None:
        _check_full(token_ids, blocks, self.block_size)
        known = next((at for at, block in enumerate(blocks) if block not in self._keys), len(blocks))
        before = self._keys[blocks[known - 1]] if known else None  # indexed blocks are not hashed again
        new = list(self._keys_of(token_ids[known * self.block_size :], tenant, before))
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

    def _keys_of(self, token_ids: Sequence[int], tenant: str, key: bytes | None = None) -> Iterator[bytes]:
        """The keys of all whole blocks, one after the other. key: of the block before them, if there is one."""
        if key is None:
            key = hashlib.sha256(tenant.encode()).digest()
        size = self.block_size
        for start in range(0, len(token_ids) - size + 1, size):
            key = hashlib.sha256(key + array("q", token_ids[start : start + size]).tobytes()).digest()
            yield key


@dataclass(eq=False)
class _Node:
    """A node with the edge that leads to it: `chunks` are the tokens of its blocks, `blocks` their numbers."""

    chunks: list[tuple[int, ...]]
    blocks: list[int]
    parent: _Node | None
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)  # by the first chunk


class RadixTree:
    """A tree of prefixes, one root per tenant; see the module. `PrefixIndex` of `workbench.kv.blocks`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = check_whole("block_size", block_size, 1)
        self._roots: dict[str, _Node] = {}
        self._home: dict[int, _Node] = {}  # block -> the node that has it

    def __contains__(self, block: int) -> bool:
        return block in self._home

    def __len__(self) -> int:
        return len(self._home)

    def match(self, token_ids: Sequence[int], tenant: str) -> list[int]:
        blocks: list[int] = []
        for node, count in self._walk(self._chunks(token_ids), self._roots.get(tenant)):
            blocks += node.blocks[:count]
        return blocks

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
        """The whole subtree below the block is removed with it."""
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
            assert node.parent is not None, "a root has no blocks"
            del node.parent.children[first]
            if node.parent.parent is None and not node.parent.children:  # nothing is left of this tenant
                self._roots = {tenant: root for tenant, root in self._roots.items() if root is not node.parent}
        return [gone for gone in below if gone != block]

    def _chunks(self, token_ids: Sequence[int]) -> list[tuple[int, ...]]:
        size = self.block_size
        return [tuple(token_ids[a : a + size]) for a in range(0, len(token_ids) - size + 1, size)]

    @staticmethod
    def _walk(chunks: list[tuple[int, ...]], node: _Node | None) -> Iterator[tuple[_Node, int]]:
        """The nodes below `node` that these chunks pass, and how many blocks of each they match, at least one."""
        at = 0
        while node is not None and at < len(chunks) and (node := node.children.get(chunks[at])) is not None:
            same = 0
            while same < len(node.chunks) and at + same < len(chunks) and node.chunks[same] == chunks[at + same]:
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


def _last_known(blocks: Sequence[int], known: Container[int]) -> int:
    """Index of the last block that is in the tree already, −1 for none. Those before it are in it, too."""
    return next((at for at in range(len(blocks) - 1, -1, -1) if blocks[at] in known), -1)


def _check_full(token_ids: Sequence[int], blocks: Sequence[int], block_size: int) -> None:
    if len(token_ids) != len(blocks) * block_size:
        raise WorkbenchError(
            f"{len(blocks)} full blocks of {block_size} hold {len(blocks) * block_size} tokens, got {len(token_ids)}"
        )


PREFIX_INDEXES: dict[str, type[HashChain | RadixTree]] = {"hash": HashChain, "radix": RadixTree}


def prefix_index(kind: str | None, block_size: int) -> HashChain | RadixTree | None:
    """An empty index by its name; None for none."""
    if kind is None:
        return None
    if kind not in PREFIX_INDEXES:
        raise unknown("prefix index", kind, PREFIX_INDEXES)
    return PREFIX_INDEXES[kind](block_size)
