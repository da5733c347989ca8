"""The index of the prefix cache as a radix tree: what `workbench.kv.prefix` answers, by comparing tokens.

Blocks between two branching points lie on one edge, as in SGLang (RadixAttention, Zheng et al., arXiv 2312.07104 §3).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

from workbench.errors import check_whole
from workbench.kv.blocks import check_full


@dataclass(eq=False)
class _Node:
    """A node with the edge that leads to it: `chunks` are the tokens of its blocks, `blocks` their numbers."""

    chunks: list[tuple[int, ...]]
    blocks: list[int]
    parent: _Node | None
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)  # by the first chunk


class RadixTree:
    """A tree of prefixes, one root per tenant; see the module. `PrefixIndex` of `workbench.kv.contract`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = check_whole("block_size", block_size, 1)
        self._roots: dict[str | bytes, _Node] = {}
        self._home: dict[int, _Node] = {}  # block -> the node that has it

    def __contains__(self, block: int) -> bool:
        return block in self._home

    def __len__(self) -> int:
        return len(self._home)

    def match(self, token_ids: Sequence[int], tenant: str | bytes) -> list[int]:
        blocks: list[int] = []
        for node, count in self._walk(self._chunks(token_ids), self._roots.get(tenant)):
            blocks += node.blocks[:count]
        return blocks

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int], tenant: str | bytes) -> None:
        check_full(token_ids, blocks, self.block_size)
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
