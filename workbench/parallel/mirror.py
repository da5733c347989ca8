"""One kv in several processes: what rank 0's does, those of the other ranks do after it.

Each rank keeps the keys and values of its own heads and layers; which sequence is where is the same on all. So the
scheduler, the block manager and the prefix cache are those of rank 0. A mirrored kv notes every call that changes
something and was not refused, and the notes travel with the next batch. The others make the same calls in the same
order, and since nothing in a kv is left to chance, blocks and slots come out the same.

A sequence has a number in the notes, so that names of any kind need not be written down.
SGLang's ranks likewise each keep the books for themselves; vLLM sends block tables instead.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.kv import KINDS, KV
from workbench.kv.paged_static import StaticPaged
from workbench.models.batch import Batch

# calls that change something, and how many names of sequences they begin with
CALLS = {
    "open": 1,
    "remember": 1,
    "forget_prefix": 0,
    "truncate": 1,
    "keep": 1,
    "fork": 2,
    "release": 1,
    "swap_out": 1,
    "swap_in": 1,
}
NAMES: dict[str, Callable[..., KV]] = {**KINDS, "static_paged": StaticPaged}
Note = list[Any]


class Notes:
    """What rank 0's kvs did since the last batch."""

    def __init__(self) -> None:
        self._waiting: list[Note] = []
        self._made = 0

    def made(self, kind: str, settings: dict[str, Any]) -> int:
        """A kv was made; its number."""
        self._made += 1
        self._waiting.append([self._made, "make", kind, settings])
        return self._made

    def add(self, note: Note) -> None:
        self._waiting.append(note)

    def take(self) -> list[Note]:
        waiting, self._waiting = self._waiting, []
        return waiting


def mirrored(kind: Callable[..., KV], notes: Notes) -> Callable[..., KV]:
    """A kv of this kind whose changes are noted. Raises WorkbenchError for a kind that the other ranks do not know."""
    name = next((name for name, known in NAMES.items() if known is kind), None)
    if name is None:
        known = ", ".join(KINDS)
        raise WorkbenchError(
            f"a model in several processes takes a kv by the name of its kind ({known}), which every rank knows; got "
            f"{getattr(kind, '__name__', type(kind).__name__)}"
        )

    def make(config: Any, **settings: Any) -> KV:
        kv: Any = _class_of(kind)(config, **settings)
        kv.mirror = Mirror(notes, notes.made(name, _plain(settings)))
        weakref.finalize(kv, notes.add, [kv.mirror.number, "drop"])
        return kv

    return make


class Mirror:
    """The notes of one kv, and the numbers of its sequences."""

    def __init__(self, notes: Notes, number: int) -> None:
        self.notes, self.number = notes, number
        self._numbers: dict[Hashable, int] = {}
        self._last = 0
        self.quiet = 0  # inside a call, what it calls in turn is not noted

    def number_of(self, sequence: Hashable) -> int:
        if sequence not in self._numbers:
            self._last += 1
            self._numbers[sequence] = self._last
        return self._numbers[sequence]

    def note(self, call: str, args: tuple[Any, ...]) -> None:
        names = CALLS[call]
        self.notes.add([self.number, call, *map(self.number_of, args[:names]), *map(_plain_argument, args[names:])])
        if call == "release":
            self._numbers.pop(args[0], None)


@functools.cache
def _class_of(kind: Any) -> Any:
    """A subclass that notes; it has only the calls that `kind` has."""

    def noting(call: str) -> Callable[..., Any]:
        method = getattr(kind, call)

        @functools.wraps(method)
        def noted(self: Any, *args: Any) -> Any:
            mirror: Mirror = self.mirror
            mirror.quiet += 1
            try:
                answer = method(self, *args)
            finally:
                mirror.quiet -= 1
            if not mirror.quiet:
                mirror.note(call, args)
            return answer

        return noted

    def begin(self: Any, batch: Batch) -> None:
        self.mirror.quiet += 1  # a batch that was never finished is undone by the other ranks' `begin` as well
        try:
            kind.begin(self, batch)
        finally:
            self.mirror.quiet -= 1

    calls = {call: noting(call) for call in CALLS if hasattr(kind, call)}
    return type(f"Mirrored{kind.__name__}", (kind,), {**calls, "begin": begin})


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as JSON has them; each rank puts its kv on its own device."""
    return {
        key: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for key, value in settings.items()
        if key != "device"
    }


def _plain_argument(value: Any) -> Any:
    """Token ids, lengths, places, and the name of a tenant, for which text and bytes are not the same."""
    if isinstance(value, bytes):
        return f"bytes {value.hex()}"
    if isinstance(value, str):
        return f"text {value}"
    return list(value) if not isinstance(value, int) else value


# -- the other ranks -----------------------------------------------------------------------------------------


class Followers:
    """The kvs of a rank that follows."""

    def __init__(self, config: Any, device: torch.device) -> None:
        self._config, self._device = config, device
        self.kvs: dict[int, Any] = {}

    def repeat(self, notes: list[Note]) -> None:
        for number, call, *args in notes:
            if call == "make":
                kind, settings = args
                if "dtype" in settings:
                    settings["dtype"] = getattr(torch, settings["dtype"])
                if kind != "recompute":
                    settings["device"] = self._device
                self.kvs[number] = NAMES[kind](self._config, **settings)
            elif call == "drop":
                self.kvs.pop(number, None)
            else:
                assert call in CALLS, "rank 0 notes the calls that it knows"
                getattr(self.kvs[number], call)(*args)


def batch_message(batch: Batch, mirror: Mirror) -> dict[str, Any]:
    """A batch as JSON has it."""
    return {
        "token_ids": batch.token_ids.tolist(),
        "positions": batch.positions.tolist(),
        "sequences": [mirror.number_of(name) for name in batch.sequences],
        "query_starts": batch.query_starts,
        "first_positions": batch.first_positions,
        "logit_rows": None if batch.logit_rows is None else batch.logit_rows.tolist(),
        "parents": batch.parents,
    }


def batch_of(message: dict[str, Any], device: torch.device) -> Batch:
    """The same batch, on another rank."""
    rows, parents = message["logit_rows"], message["parents"]
    return Batch(
        torch.tensor(message["token_ids"], device=device),
        torch.tensor(message["positions"], device=device),
        tuple(message["sequences"]),
        tuple(message["query_starts"]),
        tuple(message["first_positions"]),
        None if rows is None else torch.tensor(rows, dtype=torch.int64, device=device),
        None if parents is None else tuple(None if tree is None else tuple(tree) for tree in parents),
    )
