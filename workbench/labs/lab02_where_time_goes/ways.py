"""Ways to take a greedy decode step of one sequence, from transformers' model to one function in C++; and what a step
of each does, counted without a clock.

    transformers     their model of the same checkpoint, called token by token with its own cache
    our Decoder      `generate` with the contiguous kv; so are those below
    prepared         fewer, larger operations (`prepare`), weights as they are
    packed weights   the same, weights in the layout that the processor's products read
    C++ kernels      norms, gates and attention too in loops written by hand, a call each (`workbench.models.looped`)
    one call         the whole step compiled (`workbench.models.one_call`)
    one function     the whole step written by hand in C++ (`workbench.models.native_steps`)
"""

from __future__ import annotations

import functools
import gc
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.errors import WorkbenchError
from workbench.experiments.cached_steps import said_of_steps
from workbench.experiments.contract import brief_mode
from workbench.experiments.in_transformers import in_transformers, why_not_in_transformers
from workbench.generation import stream
from workbench.kv import stored_dtype
from workbench.models import prepare
from workbench.models.checkpoints import save_checkpoint
from workbench.models.compiled import why_not_at_all, why_not_whole
from workbench.models.linear import why_not_packed
from workbench.models.looped import why_not_loops
from workbench.models.native_steps import why_not_native

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.models.decoder import Decoder
    from workbench.models.fast import Model

THEIRS, DECODER, PREPARED, PACKED, LOOPED, ONE_CALL, NATIVE = WAYS = (
    "transformers",
    "our Decoder",
    "prepared",
    "packed weights",
    "C++ kernels",
    "one call",
    "one function",
)
Tokens = list[int]
Begin = Callable[[Tokens, int], Iterator[int]]


@dataclass(frozen=True)
class Way:
    """begin(prompt, new_tokens) yields so many greedy tokens; each but the first is one step. kept: type of the cached
    keys and values. said: of the step, after one was taken. why_not: why its steps turned out to be others than it
    says; "" where they are right."""

    name: str
    begin: Begin
    kept: torch.dtype
    said: Callable[[], str] = str
    why_not: Callable[[], str] = str


def ways_of(bench: Bench, decoder: Decoder) -> Iterator[Way | tuple[str, str]]:
    """Every way, in the order of WAYS, made when it is asked for; (name, why it is left out) in place of what cannot be
    had here."""
    makers: dict[str, tuple[Callable[[], str], Callable[[], Way]]] = {
        THEIRS: (lambda: why_not_in_transformers(decoder.config), lambda: _theirs(decoder)),
        DECODER: (str, lambda: _ours(DECODER, decoder)),
        PREPARED: (str, lambda: _ours(PREPARED, prepare(decoder, linear="plain"))),
        PACKED: (
            lambda: why_not_packed(decoder.dtype, decoder.device),
            lambda: _ours(PACKED, prepare(decoder, linear="packed")),
        ),
        LOOPED: (lambda: why_not_loops(decoder), lambda: _ours(LOOPED, prepare(decoder, kernels="c++"))),
        ONE_CALL: (lambda: why_not_one_call(decoder), lambda: _one_call(bench, decoder)),
        NATIVE: (lambda: why_not_native(decoder), lambda: _native(bench, decoder)),
    }
    for name, (why_not, make) in makers.items():
        bench.check_stop()
        if reason := why_not():
            yield name, reason
        else:
            bench.report(f"making ready: {name}")
            yield make()


def why_not_one_call(decoder: Decoder) -> str:
    """Why a step of this model is not compiled as one call; "" where that is tried."""
    if brief_mode():
        return "brief mode: compiling takes half a minute"
    if decoder.config.experts is not None:
        return "which experts run is known only when a row is there"
    return why_not_at_all(decoder.device) or why_not_whole(decoder.config)


def _ours(name: str, model: Model) -> Way:
    def begin(prompt: Tokens, new_tokens: int) -> Iterator[int]:
        for token in stream(model, prompt, max_new_tokens=new_tokens, stop_token_ids=(), kv="contiguous"):
            yield token.token_id

    return Way(name, begin, stored_dtype(model.dtype, "cpu"))


def _one_call(bench: Bench, decoder: Decoder) -> Way:
    made = prepare(decoder, linear="plain", compile=True, say=bench.report)
    begin = _ours(ONE_CALL, made).begin
    kept = stored_dtype(made.dtype, "cpu")
    return Way(ONE_CALL, begin, kept, functools.partial(said_of_steps, made), lambda: made.why_not_compiled)


def _native(bench: Bench, decoder: Decoder) -> Way:
    made = prepare(decoder, linear="plain", native=True, say=bench.report)
    said = functools.partial(said_of_steps, made)
    return Way(NATIVE, _ours(NATIVE, made).begin, stored_dtype(made.dtype, "cpu"), said, lambda: made.why_not_native)


def _theirs(decoder: Decoder) -> Way:
    with tempfile.TemporaryDirectory(prefix="waterfall-") as folder:
        save_checkpoint(decoder, Path(folder))
        model = in_transformers(Path(folder), decoder.dtype)
    return Way(THEIRS, functools.partial(_their_tokens, model), decoder.dtype)


def _their_tokens(model: Any, prompt: Tokens, new_tokens: int) -> Iterator[int]:
    """What their documentation shows for generating step by step."""
    given, cache = prompt, None
    for _ in range(new_tokens):
        with torch.inference_mode():
            out = model(input_ids=torch.tensor([given]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        given = [int(out.logits[0, -1].argmax())]
        yield given[0]


# -- counted ---------------------------------------------------------------------------------------------------


class _Operations(TorchDispatchMode):
    """Counts what torch dispatches, views among them, and does it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations_of(step: Callable[[], object]) -> int:
    """How many operations torch dispatches in a step, views among them. What compiled code does inside is none."""
    with _Operations() as operations:
        step()
    return operations.count


def python_calls_of(step: Callable[[], object]) -> int:
    """How many functions written in Python a step calls on this thread, generators that go on among them.

    Raises WorkbenchError where a profiler of this thread is at work already, which would miss the step.
    """
    if sys.getprofile() is not None:
        raise WorkbenchError("Python calls are counted by a profiler, and one is at work already; end it first")
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    collects = gc.isenabled()
    gc.disable()  # what is collected may call functions of its own
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return count
