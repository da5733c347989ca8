"""Whether steps are native (`native_steps`) or eager, measured: native="auto" of `prepare`.

    rows         1   4   16   64
    native       the first that is not 5 % faster, and what lies beyond, is eager
    eager        the same model's operations through torch, its matrices in the forms that `prepare` gave them

A native step was 1.1 to 5 times as fast with one row wherever it was measured, and with many rows a product of torch's
is ahead; where they meet differs between processors, shapes and types. So it is measured, once a machine, for each
shape, type, form of the weights and of their inputs, and number of threads, and kept (`form_times`); later processes
only read. Where native steps are ahead of all of these, they are taken up to as many rows as the rule takes
(`native_steps.rows_limit`); more rows than that are not measured, and eager.

It is chosen between these two alone. compile=True takes 13 to 28 s for each model and is behind native steps in every
format in which both were measured, so it is asked for, and never chosen. Native steps ask for a C++ compiler once a
machine, which takes some seconds, and for none after that, whatever the model.

Where other programs keep the cores busy, or ALLOWED_S are over before all is measured, as with large models, nothing is
kept, and in this process the rule decides: native steps, of as many rows as `rows_limit` says. With
$WORKBENCH_MEASURE=off steps are eager, whatever the rule says: tests and graded answers run so, and must neither
compile something nor depend on whether there is a compiler. native=True is native there too.

What is measured, and what is left out. Each row is a sequence of its own, after CACHED tokens, in a cache as simple as
can be; what a kv adds to an eager step is not in it, nor how attention grows with the text. The limit is one of ROWS,
or the rule's.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from workbench.files import cache_folder
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Attends
from workbench.models.form_times import (
    LEAST_GAIN,
    SETTING,
    WAIT_S,
    Clock,
    Kind,
    Once,
    Run,
    Seconds,
    Times,
    TimesTable,
    in_turns,
    measuring_is_off,
    table_in,
    threads,
    undisturbed,
)
from workbench.models.latent import UpProjections
from workbench.models.native_steps import NativeSteps, Tables
from workbench.models.placed import Placed, slots_of

FILE = "steps.json"
EAGER, NATIVE = "eager", "native"
ROWS = (1, 4, 16, 64)
CACHED = 15  # tokens of each sequence before the one that is measured
ROUNDS = 5  # runs of each form with so many rows
ALLOWED_S = 3.0  # for a model; the shipped ones take half a second in float32, and two in 16 bits without instructions

Eager = Callable[[Batch, Attends], torch.Tensor]


def _fits(seconds: Seconds) -> bool:
    """The same rows of both, from one on."""
    both = seconds.keys() == {EAGER, NATIVE} and seconds[EAGER].keys() == seconds[NATIVE].keys()
    return both and seconds[EAGER] != {} and tuple(sorted(seconds[EAGER])) == ROWS[: len(seconds[EAGER])]


def _loop() -> dict[str, str]:
    from workbench.kernels.cpu.step import SOURCE
    from workbench.native.build import depends_on

    return {"version of native steps": depends_on(SOURCE)}


STEPS = Kind(_fits, _loop)


def why_not_measured() -> str:
    """Why native="auto" is eager here without measuring; "" where it is measured. Raises WorkbenchError for another
    setting than "on" and "off"."""
    return f"{SETTING} is off: steps are native only where native=True asks for them" if measuring_is_off() else ""


@dataclass(frozen=True)
class Choice:
    """rows: up to how many native steps are taken; None: any number; 0: none. reason: why, in words."""

    rows: int | None
    reason: str


def choose(
    native: NativeSteps,
    eager: Eager,
    tables: Tables,
    held: Iterable[str],
    inputs: str,
    *,
    clock: Clock = undisturbed,
    table: TimesTable | None = None,
    wait_s: float = WAIT_S,
) -> Choice:
    """For the steps of a model, and its eager arrangement. tables: of its turns, for so many positions. held: the forms
    of its matrices. inputs: what quantized ones are multiplied with. Measured where nobody has."""
    table = table_in(cache_folder() / FILE, STEPS) if table is None else table
    measure = functools.partial(_measured, native, eager, tables, clock)
    times = Once(table, wait_s).times(name_of(native, held, inputs), measure)
    if isinstance(times, str):
        return Choice(native.max_rows, f"by rule: {_up_to(native.max_rows)}, since {times}")
    rows = rows_ahead(times, native.max_rows)
    measured = f"{times.day}, {threads()}, {table.where}"
    if rows == 0:
        return Choice(0, f"measured: eager is faster here, native {_gain(times, 1)} ({measured})")
    return Choice(rows, f"measured: {_up_to(rows)}, {_gains(times, rows)} ({measured})")


def rows_ahead(times: Times, limit: int | None) -> int | None:
    """Up to how many rows native steps are ahead, of those that the rule takes; None: of any number."""
    ahead = 0
    for rows in ROWS:
        if limit is not None and rows > limit:
            break
        if rows not in times.seconds[NATIVE] or times.gain(NATIVE, EAGER, rows) < LEAST_GAIN:
            return ahead
        ahead = rows
    return limit


def _up_to(rows: int | None) -> str:
    return "any number of rows" if rows is None else f"up to {rows} row{'s' * (rows > 1)}"


def _gain(times: Times, rows: int) -> str:
    with_rows = "one row" if rows == 1 else f"{rows} rows"
    return f"{times.gain(NATIVE, EAGER, rows):.2f} times as fast with {with_rows}"


def _gains(times: Times, rows: int | None) -> str:
    """With one row, and with the most that were measured and are native."""
    many = max(one for one in times.seconds[NATIVE] if rows is None or one <= rows)
    with_many = "" if many == 1 else f", {times.gain(NATIVE, EAGER, many):.2f} times with {many}"
    return f"{times.gain(NATIVE, EAGER, 1):.2f} times as fast as eager with one row{with_many}"


def name_of(native: NativeSteps, held: Iterable[str], inputs: str) -> str:
    """Of an entry: whatever a time depends on besides the machine, the numbers of the weights left out."""
    config, parts = native.config, native.parts
    matrices = parts.matrices
    kinds = [(one.arguments.kind, one.shape, one.nbytes) for one in matrices]
    every = (config, parts.embedding.dtype, kinds, tuple(held), inputs, native.max_rows)
    digest = hashlib.sha256(repr(every).encode()).hexdigest()[:16]
    size = f"{config.num_layers} layers of {config.hidden_size}, {parts.nbytes / 1e6:.1f} MB"
    return f"{size}, inputs {inputs}, {digest}, {threads()}"


def kept_choices() -> str:
    """What this machine has measured so far for as many threads as there are now, in a few words."""
    table = TimesTable(cache_folder() / FILE, STEPS)
    table.read()
    here = [rows_ahead(times, None) for name, times in table.entries.items() if name.endswith(f", {threads()}")]
    native = len(here) - here.count(0)
    kept = f"native steps faster for {native} of {len(here)} models" if here else "no model measured yet"
    asked = why_not_measured()
    return f"{kept}, with {threads()}{asked and f'; not in use: {asked}'}"


# -- measuring ---------------------------------------------------------------------------------------------------------


def _measured(native: NativeSteps, eager: Eager, tables: Tables, clock: Clock) -> Seconds | str:
    """Median seconds by form and rows, up to the first rows with which native steps are not ahead; or why there are
    none."""
    until, said = time.monotonic() + ALLOWED_S, native.reason
    seconds: Seconds = {EAGER: {}, NATIVE: {}}
    try:
        for rows in ROWS:
            if native.max_rows is not None and rows > native.max_rows:
                break
            medians = _one_size(native, eager, tables, clock, rows, until)
            if isinstance(medians, str):
                return medians
            for form, median in medians.items():
                seconds[form][rows] = median
            if medians[EAGER] / medians[NATIVE] < LEAST_GAIN:
                break
    finally:
        native.reason = said
    return seconds


@torch.no_grad()
def _one_size(
    native: NativeSteps, eager: Eager, tables: Tables, clock: Clock, rows: int, until: float
) -> dict[str, float] | str:
    config = native.config
    windows = (config.window_of(layer) or config.context_length for layer in range(config.num_layers))
    at = min(CACHED, config.context_length - 1, min(windows) - 1)
    batch = Batch.of([[index % config.vocab_size] for index in range(rows)], first_positions=[at] * rows)
    keys = _Rectangle(config, rows, at + 1)
    runs: dict[str, Run] = {
        EAGER: functools.partial(eager, batch, keys),
        NATIVE: functools.partial(native.rows, batch, keys, tables),
    }
    return in_turns({form: _always(run) for form, run in runs.items()}, clock, until, rounds=ROUNDS)


def _always(run: Run) -> Callable[[int], Run]:
    return lambda turn: run


class _Rectangle:
    """Keys and values of sequences of the same length, in float32, no longer than a window, whose last token is the one
    of the step: what of a kv a step needs. The kvs themselves stand on a higher floor."""

    dtype = torch.float32

    def __init__(self, config: ModelConfig, sequences: int, length: int) -> None:
        self.config, self._sequences = config, sequences
        self._place = {layer: place for place, layer in enumerate(config.kv_layers)}
        shape = (len(self._place), sequences, config.num_kv_heads, length, config.head_dim)
        self._keys, self._values = (torch.full(shape, 0.01, dtype=self.dtype, device="cpu") for _ in "kv")

    def begin(self, batch: Batch) -> None:
        """It is this one every time."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: Batch,
        up: UpProjections | None = None,
    ) -> torch.Tensor:
        place = self._place[self.config.kv_source(layer)]
        keys, values = self._keys[place], self._values[place]
        if k is not None and v is not None:
            keys[:, :, -1], values[:, :, -1] = k, v
        queries = q.to(self.dtype).view(self._sequences, self.config.num_kv_heads, -1, self.config.head_dim)
        out = F.scaled_dot_product_attention(queries, keys, values, scale=self.config.attention_scale)
        return out.reshape(*q.shape).to(q.dtype)

    def place_batch(self, batch: Batch) -> Placed:
        return Placed(slots_of(self._keys, self._values), [[slot] for slot in range(self._sequences)])

    def note_batch(self, batch: Batch) -> None:
        """The same token is written again."""
