"""Lab 03: what a cache gives at each step of a case, a right one or one with a known fault. Plain loops, in float64.

A right answer is compared with the right cache. One that differs is compared with every fault in turn: the one that
gives just these numbers is the mistake that was made, and its name is what the student is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from workbench.checks.probes_lab03 import vector

Entry = tuple[int, int, int, int] | None  # (layer, token, position, step) of what stands there; None: zeros


@dataclass(frozen=True)
class Fault:
    """One way for a cache to be wrong. The defaults are right.

    first: position of the step's first new token, n: its new tokens, S = first + n: the length afterwards.
    write(first, n): where the first new key goes.
    sees(i, first, n): how many stored entries query i may look at, from the first on, or a range of them.
    cut(entries, length, known): what truncate leaves of a layer's entries; `layers`: of which layers.
    """

    name: str
    told: str
    write: Callable[[int, int], int] = lambda first, n: first
    sees: Callable[[int, int, int], int | range] = lambda i, first, n: first + i + 1
    cut: Callable[[list, int, int], list] = lambda entries, length, known: entries[:length]
    cut_layers: Callable[[int], bool] = lambda layer: True
    head: Callable[[int, int, int], int] = lambda h, group, kv_heads: h // group
    scale: Callable[[int], float] = lambda size: size**-0.5
    hidden: str = "left out"  # keys of the future; else "scored 0" or "not raised", by a float mask of ones
    keys: str = "k"
    values: str = "v"
    shared: str = ""  # what has no storage of its own: "layer" or "sequence"


RIGHT = Fault("right", "")

STORING = (
    Fault("one late", "the new keys and values are stored one position too late: the token at position {first} was written "
          "to {first_plus}; its place is first = length − n, and the slots from first up to length are the new tokens'",
          write=lambda first, n: first + 1),
    Fault("one late after the first step", "in every step after the first, the new keys and values are stored one position "
          "too late: the token at position {first} was written to {first_plus}, and {first} was left empty",
          write=lambda first, n: first + (first > 0)),
    Fault("one early", "the new keys and values are stored one position too early: the token at position {first} was "
          "written over the one at {first_minus}, which is lost; the first new token goes to first = length − n",
          write=lambda first, n: max(first - 1, 0)),
    Fault("behind the new tokens", "the new keys and values are stored at position {length}, behind the place where they "
          "are read: lengths[sequence] is {length} with the {n} new ones counted in already; the first of them goes to "
          "first = {length} − {n} = {first}",
          write=lambda first, n: first + n),
    Fault("at the start", "the new keys and values are stored from position 0 on, over the oldest ones; the token at "
          "position {first} belongs at {first}",
          write=lambda first, n: 0),
)  # fmt: skip
SEEING = (
    Fault("one too few", "the mask is one position too tight: the query at position {at} does not see its own key; it sees "
          "positions 0 … {at}, itself included (≤, not <)",
          sees=lambda i, first, n: first + i),
    Fault("one too many", "the mask is one position too wide: the query at position {at} sees the key at {at_plus}, which is "
          "its future; it sees positions 0 … {at}",
          sees=lambda i, first, n: min(first + i + 2, first + n)),
    Fault("one too many, past the end", "the query at position {at} sees position {at_plus} too, where nothing is stored yet: "
          "zeros, which take e⁰ = 1 in softmax; it sees positions 0 … {at}",
          sees=lambda i, first, n: first + i + 2),
    Fault("no mask", "the query at position {at} sees all {length} keys, those of later tokens too: a step of several new "
          "tokens needs a causal mask",
          sees=lambda i, first, n: first + n),
    Fault("mask from zero", "the query at position {at} sees only positions 0 … {i}: the mask was laid as if the step were "
          "the whole text. Query i of the step stands at position first + i (torch's is_causal=True and tril() count from "
          "the upper left corner)",
          sees=lambda i, first, n: i + 1),
    Fault("one query to the next", "the query at position {at} sees only positions 0 … {at_minus}, although its key is "
          "stored at {at}: read up to length, not length − 1",
          sees=lambda i, first, n: min(first + i + 1, first + n - 1)),
    Fault("only the new ones", "the query at position {at} sees only the keys of its own step, from {first} on; the {first} "
          "remembered ones belong to it too",
          sees=lambda i, first, n: range(first, first + i + 1)),
    Fault("only the new ones, no mask", "the query at position {at} sees the keys of its own step and no others; the {first} "
          "remembered ones belong to it too, and later ones do not",
          sees=lambda i, first, n: range(first, first + n) if first else i + 1),
    Fault("all but the first", "the query at position {at} does not see position 0; it sees 0 … {at}",
          sees=lambda i, first, n: range(1, first + i + 1)),
    Fault("the whole slot", "the query at position {at} sees the whole slot, the empty places behind position {at} too: zero "
          "keys take e⁰ = 1 each in softmax; it sees positions 0 … {at}",
          sees=lambda i, first, n: 10**9),
)  # fmt: skip
REST = (
    Fault("masked with 0", "the scores of later keys were set to 0, which softmax counts as e⁰ = 1; hide them with -inf",
          sees=lambda i, first, n: first + n, hidden="scored 0"),
    Fault("float mask", "a float mask is added to the scores: its ones and zeros raise some and hide none. A bool mask "
          "hides, or a float one with 0 and -inf",
          sees=lambda i, first, n: first + n, hidden="not raised"),
    Fault("mask upside down", "the query at position {at} sees only what comes after it: the mask is the wrong way round (for "
          "attn_mask, True is where a query may look)",
          sees=lambda i, first, n: range(first + i + 1, first + n)),
    Fault("heads in turns", "query head h attends to key-value head h mod H_kv; with H_q = {H_q} and H_kv = {H_kv} the "
          "heads lie in groups of {group}: it is h // {group} (repeat_interleave, not repeat)",
          head=lambda h, group, kv_heads: h % kv_heads),
    Fault("first head only", "every query head attends to key-value head 0; with H_q = {H_q} and H_kv = {H_kv}, head h "
          "attends to head h // {group}",
          head=lambda h, group, kv_heads: 0),
    Fault("no scale", "q·k was not divided by √D: multiply the scores by self.scale",
          scale=lambda size: 1.0),
    Fault("scaled twice", "q·k was divided by √D twice: scaled_dot_product_attention does it by itself",
          scale=lambda size: 1 / size),
    Fault("values for keys", "the values were used as keys", keys="v"),
    Fault("keys for values", "the keys were used as values", values="k"),
    Fault("one store for all layers", "layer {layer} attends to keys that another layer stored: every layer has a place of "
          "its own, self.keys[sequence][layer]",
          shared="layer"),
    Fault("one store for all sequences", "sequence {sequence!r} attends to keys of another sequence: every sequence has a "
          "place of its own",
          shared="sequence"),
)  # fmt: skip
FORGETTING = (
    Fault("nothing forgotten", "attention still sees the keys of the tokens that were to be forgotten: changing lengths is "
          "not enough, their chunks must go", cut=lambda entries, length, known: entries),
    Fault("zeroed", "the forgotten keys were set to zero but are still attended to: a zero key takes e⁰ = 1 in softmax; "
          "remove it", cut=lambda entries, length, known: entries[:length] + [None] * (len(entries) - length)),
    Fault("one too few kept", "the token at position {last} is gone too: truncate to {cut} keeps positions 0 … {last}",
          cut=lambda entries, length, known: entries[: max(length - 1, 0)]),
    Fault("one too many kept", "the token at position {cut} is still there: truncate to {cut} keeps positions 0 … {last}",
          cut=lambda entries, length, known: entries[: length + 1]),
    Fault("so many dropped", "{cut} tokens were dropped; `length` says how many stay",
          cut=lambda entries, length, known: entries[: known - length]),
    Fault("the newest kept", "the last {cut} tokens were kept; the first {cut} stay",
          cut=lambda entries, length, known: entries[len(entries) - length :]),
    Fault("chunks dropped whole", "the chunk that the cut goes through was dropped altogether; its first tokens stay, up to "
          "position {last}",
          cut=lambda entries, length, known: [e for e in entries[:length] if e[3] not in {x[3] for x in entries[length:]}]),
    Fault("chunks kept whole", "the chunk that the cut goes through was kept altogether; its tokens from position {cut} on "
          "are to go",
          cut=lambda entries, length, known: [e for e in entries if e[3] in {x[3] for x in entries[:length]}]),
    Fault("first layer only", "layer {layer} still has the keys that layer 0 has forgotten: cut every layer",
          cut_layers=lambda layer: layer == 0),
    Fault("all forgotten", "everything was forgotten, the first {cut} tokens too",
          cut=lambda entries, length, known: []),
)  # fmt: skip


@dataclass
class Simulated:
    """A cache with one fault, taken through the steps of a case. `chunks`: keys are appended, never placed."""

    config: dict
    salt: str
    fault: Fault = RIGHT
    chunks: bool = False
    entries: dict = field(default_factory=dict)  # (sequence, layer) -> list of Entry
    lengths: dict = field(default_factory=dict)
    cut_to: int = 0  # of the latest truncate
    sent_steps: int = 0

    def send(self, sent: list) -> list[list[list[list[list[float]]]]]:
        """[L][sequence of the step][query][H_q][D], nan where a query sees nothing."""
        self.sent_steps += 1
        for name, first, tokens in sent:
            self.lengths[name] = first + len(tokens)
        return [[self._attend(layer, *part) for part in sent] for layer in range(self.config["num_layers"])]

    def truncate(self, name: str, length: int) -> None:
        known = self.lengths[name]
        for (sequence, layer), entries in self.entries.items():
            if sequence == name and self.fault.cut_layers(layer):
                entries[:] = self.fault.cut(entries, length, known) if self.chunks else entries
        self.lengths[name] = self.cut_to = length

    def release(self, name: str) -> None:
        for kept in [key for key in self.entries if key[0] == name]:
            del self.entries[kept]
        del self.lengths[name]

    def _attend(self, layer: int, name: str, first: int, tokens: list[int]) -> list:
        fault, n = self.fault, len(tokens)
        owner = ("" if fault.shared == "sequence" else name, 0 if fault.shared == "layer" else layer)
        entries = self.entries.setdefault(owner, [])
        at = len(entries) if self.chunks else fault.write(first, n)
        entries += [None] * (at + n - len(entries))
        for i, token in enumerate(tokens):
            entries[at + i] = (layer, token, first + i, self.sent_steps)
        rows = []
        for i, token in enumerate(tokens):
            seen = range(len(entries) - n + i + 1) if self.chunks else fault.sees(i, first, n)
            if isinstance(seen, int):
                seen = range(min(max(seen, 0), self.config["context_length"]))
            rows.append(
                self._row(layer, token, first + i, [entries[j] if j < len(entries) else None for j in seen])
            )
        return rows

    def _row(self, layer: int, token: int, position: int, seen: list[Entry]) -> list[list[float]]:
        c, fault = self.config, self.fault
        heads, kv_heads, size = c["num_heads"], c["num_kv_heads"], c["head_dim"]
        if not seen:
            return [[math.nan] * size for _ in range(heads)]
        q = torch.tensor(vector(self.salt, "q", layer, token, position, heads * size), dtype=torch.float64)
        k, v = (
            torch.tensor(
                [
                    vector(self.salt, kind, *e[:3], kv_heads * size) if e else (0.0,) * (kv_heads * size)
                    for e in seen
                ],
                dtype=torch.float64,
            ).reshape(len(seen), kv_heads, size)
            for kind in (fault.keys, fault.values)
        )
        which = [fault.head(h, heads // kv_heads, kv_heads) for h in range(heads)]
        scores = torch.einsum("hd,shd->hs", q.reshape(heads, size), k[:, which]) * fault.scale(size)
        if fault.hidden != "left out":
            past = torch.arange(len(seen)) <= position
            scores = scores.where(past, 0.0) if fault.hidden == "scored 0" else scores + past
        return torch.einsum("hs,shd->hd", scores.softmax(dim=-1), v[:, which]).tolist()
