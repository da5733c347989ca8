"""A request of a workload, as lengths and names of texts, and the tokens that are made of them. No torch.

A prompt is put together from named texts: a system prompt, what was said before, what is new. The name decides the
tokens, so prompts that begin with the same texts begin with the same tokens, and no others do but by chance.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.errors import WorkbenchError, check_above, check_whole, is_number, is_whole

Text = tuple[str, int]  # a name, and how many of its tokens


@dataclass(frozen=True)
class Arrival:
    """A request of a workload, before its tokens are made.

    at_s: from the beginning of the workload. prompt_tokens, new_tokens: lengths; an output is meant to be exactly that
    long. prefix_tokens: of the prompt's, so many belong to texts that other requests begin with too. priority: smaller
    is more urgent. deadline_s: after arrival. texts: what the prompt is put together from, by name; the last one is the
    request's own, and names it.
    """

    at_s: float
    prompt_tokens: int
    new_tokens: int
    tenant: str = ""
    prefix_tokens: int = 0
    priority: int = 0
    deadline_s: float | None = None
    texts: tuple[Text, ...] = ()

    def __post_init__(self) -> None:
        if not is_number(self.at_s) or self.at_s < 0:
            raise WorkbenchError(f"at_s must be a time in seconds, 0 or later, got {self.at_s!r}")
        check_whole("prompt_tokens", self.prompt_tokens, 1)
        check_whole("new_tokens", self.new_tokens, 1)
        if not isinstance(self.tenant, str):
            raise WorkbenchError(f"tenant must be a text, got {self.tenant!r}")
        if check_whole("prefix_tokens", self.prefix_tokens, 0) > self.prompt_tokens:
            raise WorkbenchError(f"prefix_tokens is {self.prefix_tokens}, the whole prompt {self.prompt_tokens}")
        if not is_whole(self.priority):
            raise WorkbenchError(f"priority must be a whole number, got {self.priority!r}")
        if self.deadline_s is not None:
            check_above("deadline_s", self.deadline_s, 0)
        if self.texts and sum(count for _, count in self.texts) != self.prompt_tokens:
            raise WorkbenchError(f"the texts {self.texts} do not add up to {self.prompt_tokens} prompt tokens")

    @property
    def name(self) -> str:
        """Of the request's own text; empty where an arrival was made without texts."""
        return self.texts[-1][0] if self.texts else ""

    @property
    def answer(self) -> str:
        """The name of what is written to it, as later turns of a conversation have it in their prompts."""
        return f"{self.name} answer"


def text_ids(name: str, count: int, vocab_size: int, *, seed: int = 0, reserved: int = 0) -> list[int]:
    """The first `count` tokens of the text of this name: equal names begin equally, others differ.

    Each token from `reserved` to vocab_size − 1 is as likely as any other: 32 bits of SHAKE-256 a token.
    """
    span = check_whole("vocab_size", vocab_size, 1) - check_whole("reserved", reserved, 0)
    if not 0 < span <= 2**32:
        raise WorkbenchError(f"of {vocab_size} tokens {reserved} are reserved; 1 to 2^32 must be left")
    check_whole("seed", seed, 0)
    words = hashlib.shake_256(f"{seed}/{name}".encode()).digest(4 * check_whole("count", count, 0))
    return [reserved + (word * span >> 32) for word in struct.unpack(f"<{count}I", words)]


def prompt_ids(
    arrival: Arrival,
    vocab_size: int,
    *,
    seed: int = 0,
    reserved: int = 0,
    written: Mapping[str, Sequence[int]] | None = None,
) -> list[int]:
    """The tokens of a request's prompt; those with the same beginning of texts have the same beginning of tokens.

    written: what was really written, by the `answer` of the request it was written to. An earlier answer that is not in
    it is invented like any other text; the pool then finds the prompts of earlier turns again, not the answers.
    """
    if not arrival.texts:
        raise WorkbenchError("this arrival names no texts; give it texts=((a name of its own, prompt_tokens),)")
    ids: list[int] = []
    for name, count in arrival.texts:
        real = (written or {}).get(name)
        if real is not None and len(real) != count:
            raise WorkbenchError(f"{name!r} is {count} tokens of the prompt, and {len(real)} were written")
        ids += text_ids(name, count, vocab_size, seed=seed, reserved=reserved) if real is None else real
    return ids
