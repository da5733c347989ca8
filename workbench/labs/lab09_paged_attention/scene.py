"""A small scene over a pool of blocks, written down step by step by bookkeeping alone: what paging.blocks draws and
runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from workbench.kv.blocks import BlockTables
from workbench.kv.prefix import prefix_index
from workbench.serving.load import text_ids

NEXT_TURN = 3  # tokens that the last request asks on top of what was said


@dataclass(frozen=True)
class Step:
    """What was done in one step, and the pool after it.

    acts: what a kv is to do for it, in order: ("open", name, text), ("send", {name: token ids}), ("fork", name, new
    name), ("remember", name, text) and ("release", name). found: tokens that an opened text found. fill: tokens in each
    block, an idle one is full. copies: (from, to). evicted: idle blocks that were taken for something else;
    evictions: all so far, also of blocks that had become idle in the same step.
    """

    words: str
    acts: tuple[tuple, ...]
    tables: dict[str, tuple[int, ...]]
    lengths: dict[str, int]
    references: tuple[int, ...]
    idle: frozenset[int]
    fill: tuple[int, ...]
    copies: tuple[tuple[int, int], ...] = ()
    evicted: tuple[int, ...] = ()
    evictions: int = 0
    found: dict[str, int] = field(default_factory=dict)

    @property
    def held(self) -> int:
        return sum(count > 0 for count in self.references)

    @property
    def shared(self) -> int:
        return sum(count > 1 for count in self.references)

    @property
    def unshared(self) -> int:
        """Blocks that the same texts would hold if nobody shared: as many as their tables name."""
        return sum(self.references)

    @property
    def free(self) -> int:
        return len(self.references) - self.held - len(self.idle)


class _Player:
    """Plays on real block tables and writes every step down. `texts` are the tokens of each sequence so far."""

    def __init__(self, num_blocks: int, block_size: int, prefix: str) -> None:
        index = prefix_index(None if prefix == "none" else prefix, block_size)
        self.tables = BlockTables(num_blocks, block_size, index)
        self.texts: dict[str, list[int]] = {}
        self.steps: list[Step] = []
        self._acts: list[tuple] = []
        self._idle: frozenset[int] = frozenset()

    def arrive(self, name: str, text: Sequence[int]) -> None:
        """A text comes with a prompt, and is computed from where it is not known; it waits for ever if it does not
        fit."""
        text, size = list(text), self.tables.block_size
        self._do("open", name, tuple(text))
        found = self.tables.open(name, text)
        kept = set(self.tables.tables[name])
        needed, available = self.tables.missing({name: len(text)}), self.tables.num_available
        if needed > available:
            self._release(name)
            return self._note(
                f"{name} arrives with {len(text)} tokens and needs {_blocks(needed)} more; {available} are free or"
                " idle. It has to wait."
            )
        self.texts[name] = text
        self._send({name: text[found:]})
        words = f"{name} arrives with {len(text)} tokens"
        if found:
            words += f" and finds {found} of them in {_blocks(found // size)}: only {len(text) - found} are computed."
        else:
            words += ", and nothing of them is known: all are computed."
        return self._note(words, kept=kept, found={name: found})

    def fork(self, name: str, others: Sequence[str]) -> None:
        if name not in self.texts or not others:
            return
        for other in others:
            self._do("fork", name, other)
            self.tables.fork(name, other)
            self.texts[other] = list(self.texts[name])
        held = _blocks(len(self.tables.tables[name]))
        self._note(
            f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} forked from {name} and"
            f" hold{'s' * (len(others) == 1)} its {held} too. Nothing is copied yet."
        )

    def write(self, new: dict[str, int]) -> None:
        """A token more for each of these that are there; the youngest is preempted where there is no room."""
        gone = []
        while True:
            new = {name: token for name, token in new.items() if name in self.texts}
            if self._fits(new):
                break
            gone.append(list(self.texts)[-1])
            self._release(gone[-1])
        for name, token in new.items():
            self.texts[name].append(token)
        copies = self._send({name: [token] for name, token in new.items()}) if new else ()
        words = f"{', '.join(gone)} was preempted, because blocks were needed. " if gone else ""
        words += f"{', '.join(new)} {'writes' if len(new) == 1 else 'write'} a token." if new else ""
        for source, target in copies:
            writer = next(name for name, table in self.tables.tables.items() if target in table)
            words += (
                f" {writer} would write into block {source}, which others hold, so it writes into a copy, {target}."
            )
        if new or gone:
            self._note(words, copies=copies)

    def finish(self, name: str) -> None:
        if name not in self.texts:
            return
        held = list(self.tables.tables[name])
        self._release(name)
        left = [block for block in held if self.tables.references[block]]
        idle = [block for block in held if self._is_idle(block)]
        parts = [
            f"{len(left)} still held by others" if left else "",
            f"{len(idle)} known, which stay as they are, idle" if idle else "",
            f"{len(held) - len(left) - len(idle)} free now" if len(held) > len(left) + len(idle) else "",
        ]
        self._note(f"{name} is done and gives {_blocks(len(held))} back: {', '.join(filter(None, parts))}.")

    def _fits(self, new: dict[str, int]) -> bool:
        lengths = {name: len(self.texts[name]) + 1 for name in new}
        return self.tables.missing(lengths) <= self.tables.num_available

    def _send(self, new: dict[str, list[int]]) -> tuple[tuple[int, int], ...]:
        """Room for what is sent; blocks that it fills become known."""
        self._do("send", {name: tuple(tokens) for name, tokens in new.items()})
        before = {name: len(self.texts[name]) - len(tokens) for name, tokens in new.items()}
        copies = self.tables.grow({name: len(self.texts[name]) for name in new})
        for name, length in before.items():
            if len(self.texts[name]) // self.tables.block_size > length // self.tables.block_size:
                self._do("remember", name, tuple(self.texts[name]))
                self.tables.remember(name, self.texts[name])
        return tuple(copies)

    def _release(self, name: str) -> None:
        self._do("release", name)
        self.tables.release(name)
        self.texts.pop(name, None)

    def _do(self, *act: Any) -> None:
        self._acts.append(act)

    def _is_idle(self, block: int) -> bool:
        index = self.tables.prefix
        return not self.tables.references[block] and index is not None and block in index

    def _note(self, words: str, *, copies=(), kept=frozenset(), found=None) -> None:
        t, size = self.tables, self.tables.block_size
        idle = frozenset(block for block in range(t.num_blocks) if self._is_idle(block))
        fill = [size if block in idle else 0 for block in range(t.num_blocks)]
        for name, table in t.tables.items():
            for at, block in enumerate(table):
                fill[block] = max(fill[block], min(size, t.lengths[name] - at * size))
        evicted = tuple(b for b in sorted(self._idle - idle - set(kept)) if t.references[b])
        if evicted:
            words += f" Nothing free was left: {_named(evicted)}, idle for the longest, {_was(evicted)} evicted."
        tables = {str(name): tuple(table) for name, table in t.tables.items()}
        self.steps.append(
            Step(
                words,
                tuple(self._acts),
                tables,
                {str(name): length for name, length in t.lengths.items()},
                tuple(t.references),
                idle,
                tuple(fill),
                tuple(copies),
                evicted,
                t.evictions,
                found or {},
            )
        )
        self._acts, self._idle = [], idle


def _blocks(count: int) -> str:
    return f"{count} block{'s' * (count != 1)}"


def _named(blocks: Sequence[int]) -> str:
    return f"block{'s' * (len(blocks) > 1)} {', '.join(map(str, blocks))}"


def _was(blocks: Sequence[int]) -> str:
    return "was" if len(blocks) == 1 else "were"


@lru_cache(maxsize=32)
def scene(
    *,
    vocab_size: int,
    block_size: int,
    num_blocks: int,
    prefix: str,
    prompt_tokens: int,
    samples: int,
    new_tokens: int,
    common_tokens: int,
    other_tokens: int,
    seed: int,
) -> tuple[Step, ...]:
    """All steps, by bookkeeping alone: no model runs.

    A 1 … A n are samples of one prompt. B begins with the first `common_tokens` of it. C has nothing in common with
    them. D goes on where A 1 ended, as the next turn of a conversation would. Tokens are drawn, not chosen by a model.
    """

    def tokens(name: str, count: int) -> list[int]:
        return text_ids(name, count, vocab_size, seed=seed, reserved=1)

    prompt, common = tokens("prompt", prompt_tokens), min(common_tokens, prompt_tokens)
    names = [f"A {number + 1}" for number in range(samples)]
    writes = {name: tokens(f"{name} writes", new_tokens) for name in (*names, "B")}
    play = _Player(num_blocks, block_size, prefix)
    play.arrive("A 1", prompt)
    play.fork("A 1", names[1:])
    for at in range(new_tokens):
        if at == (new_tokens + 1) // 2:
            play.arrive("B", [*prompt[:common], *tokens("B", prompt_tokens - common + 1)])
        play.write({name: token[at] for name, token in writes.items()})
    for name in (*names[::-1], "B"):
        play.finish(name)
    play.arrive("C", tokens("C", other_tokens))
    play.finish("C")
    play.arrive("D", [*prompt, *writes["A 1"], *tokens("D", NEXT_TURN)])
    play.finish("D")
    return tuple(play.steps)
