"""Which form a weight is held in on a CPU, measured: plain, packed in one of two ways, or read by a loop of our own.

    form       one row                            a few rows
    packed     as MIN_ROWS rows, where large      as they are     the default, by the rule of `linear.chosen_linear`
    unpadded   as one row                         as packed       large matrices only
    plain      F.linear                           F.linear
    looped     our loop                           our loop        where there is a C++ compiler

None is the fastest everywhere. On an AMD EPYC with AVX2 `unpadded` took two thirds of the time of `packed` with one
row; with several, `plain` took twice that of `packed` for some shapes, and less for others; `looped` was ahead of all
on the shapes of a model of 10 million weights. So it is measured, once a machine, for each type, shape and number of
threads, and kept (`form_times`); later processes only read. A shape is measured with 1, 4 and 16 rows: what a form
gains or loses with one row counts as much as what it does with a few, and what gains less than 5 % in all is not
chosen.

All forms give the same product but for the order of additions. So the last bits of logits, and of two tokens that are
nearly as likely the one chosen, may differ from machine to machine; they do so already, since libraries choose their
loops by processor. On one machine the choice stays, once it is kept. With $WORKBENCH_MEASURE=off nothing is measured,
nothing is read, and the rule alone decides: tests and graded answers run so.

What is measured, and what is left out. A matrix beyond 4 MiB has its inputs, but only so many outputs as make 4 MiB,
since each more is read the same way; so all larger ones with these inputs are one entry. As many matrices are passed
one after another as the model has bytes, up to 24 MiB for each form, so that those of a large model come from memory
and those of a small one from a cache. A cache beyond 48 MiB keeps them nevertheless: more would take too long to fill.
Where other programs keep the cores busy, or ALLOWED_S are over, nothing is kept, and for the rest of the process the
rule decides. Types of 16 bits that the processor does not multiply need no measuring: torch converts their weights in
every product, and the loop as it reads them, in a fraction of the time whatever the rows.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from workbench.files import cache_folder
from workbench.models.form_times import (
    LEAST_GAIN,
    ROUNDS,
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
from workbench.models.linear import (
    Linear,
    Looped,
    Packed,
    Plain,
    chosen_linear,
    torch_multiplies,
    why_not_looped,
    why_not_packed,
)

FILE = "linear.json"
DEFAULT = "packed"
MAKERS: dict[str, Callable[..., Linear]] = {
    "packed": Packed,
    "unpadded": functools.partial(Packed, min_rows=1),
    "plain": Plain,
    "looped": Looped,
}
WORDS = {
    "packed": "packed",
    "unpadded": "packed with rows unpadded",
    "plain": "plain",
    "looped": "through the C++ loop",
}
FEW_ROWS = (4, 16)
# Of each form; with more than one row "unpadded" is "packed", and only large matrices have it.
ROWS = {"unpadded": (1,)} | dict.fromkeys(("plain", "packed", "looped"), (1, *FEW_ROWS))
LEAST_FORMS = {"plain", "packed"}
PASSED_BYTES = 24 << 20  # of each form, before the first matrix comes again
LEAST_PASSED_BYTES = 1 << 20
ALLOWED_S = 0.8  # for all shapes of a model; undisturbed they take a third of it
EVERY = "every matrix"  # what is not measured any more where one cannot be


def _fits(seconds: Seconds) -> bool:
    right = all(tuple(sorted(by_rows)) == ROWS.get(form) for form, by_rows in seconds.items())
    return right and seconds.keys() >= LEAST_FORMS


def _loop() -> dict[str, str]:
    from workbench.kernels.cpu.floats import SOURCE
    from workbench.native.build import depends_on

    return {"version of the C++ loop": depends_on(SOURCE)}


LINEARS = Kind(_fits, _loop)


def why_not_measured(dtype: torch.dtype, device: torch.device | str) -> str:
    """Why the rule decides for weights of this type there; "" where it is measured. Raises WorkbenchError for a setting
    that is neither "on" nor "off"."""
    return f"{SETTING} is off" if measuring_is_off() else why_not_packed(dtype, device)


@dataclass(frozen=True)
class Shape:
    """What is measured in the place of a matrix: `count` of [out, in], in this type."""

    out_features: int
    in_features: int
    dtype: torch.dtype
    count: int
    threads: str

    @classmethod
    def of(cls, out_features: int, in_features: int, dtype: torch.dtype, model_bytes: int) -> Shape:
        row = max(1, in_features * dtype.itemsize)
        large = -(-Packed.LARGE_BYTES // row)
        out_features = max(1, min(out_features, -(-large // 16) * 16))
        passed = min(PASSED_BYTES, max(LEAST_PASSED_BYTES, 1 << max(0, model_bytes - 1).bit_length()))
        return cls(out_features, in_features, dtype, max(1, passed // (out_features * row)), threads())

    @property
    def name(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{kind} {self.in_features} to {self.out_features}, {self.count} matrices, {self.threads}"

    def forms(self) -> dict[str, list[Linear]]:
        """Written, because of pages never written Linux keeps one copy for all."""
        weights = torch.full((self.count, self.out_features, self.in_features), 0.01, dtype=self.dtype, device="cpu")
        packed = [Packed(weight) for weight in weights]
        forms: dict[str, list[Linear]] = {"packed": [*packed], "plain": [Plain(weight) for weight in weights]}
        if weights[0].nbytes >= Packed.LARGE_BYTES:
            forms["unpadded"] = [one.with_least(1) for one in packed]
        if not why_not_looped(self.dtype, "cpu"):
            forms["looped"] = [Looped(weight) for weight in weights]
        return forms


def measured_times(shape: Shape, clock: Clock, until: float) -> Seconds | str:
    """Median seconds by form and rows, or why there are none. until: on time.monotonic."""
    forms = shape.forms()
    seconds: Seconds = {name: {} for name in forms}

    def run(many: list[Linear], x: torch.Tensor, turn: int) -> Run:
        return functools.partial(many[turn % shape.count], x)

    for rows in (1, *FEW_ROWS):
        x = torch.full((rows, shape.in_features), 0.01, dtype=shape.dtype, device="cpu")
        takes = {name: functools.partial(run, many, x) for name, many in forms.items() if rows in ROWS[name]}
        medians = in_turns(takes, clock, until, rounds=ROUNDS)
        if isinstance(medians, str):
            return medians
        for name, median in medians.items():
            seconds[name][rows] = median
    return seconds


@dataclass(frozen=True)
class Gains:
    """How many times as fast as the default a form is: with one row, and with a few."""

    one_row: float
    few_rows: float

    @property
    def in_all(self) -> float:
        return self.one_row * self.few_rows

    def __str__(self) -> str:
        return f"{self.one_row:.2f} times as fast as {DEFAULT} with one row, {self.few_rows:.2f} times with a few"


def gains(times: Times) -> dict[str, Gains]:
    """Of every form that was measured."""
    default = times.seconds[DEFAULT]
    by_form = {}
    for form, own in times.seconds.items():
        few = [default[rows] / own[rows] if rows in own else 1.0 for rows in FEW_ROWS]
        by_form[form] = Gains(default[1] / own[1], statistics.geometric_mean(few))
    return by_form


def chosen_form(times: Times) -> str:
    """The form that gains most in all, where that is 5 % or more; else the default."""
    by_form = gains(times)
    best = max(by_form, key=lambda form: by_form[form].in_all)
    return best if by_form[best].in_all >= LEAST_GAIN else DEFAULT


class MeasuredLinear:
    """Makes linears as `Plain`, `Packed` and `Looped` do, each in the form that is fastest for its shape; `reason` says
    which were chosen, and why. model_bytes: of all weights that a step reads."""

    def __init__(
        self, model_bytes: int, *, clock: Clock = undisturbed, table: TimesTable | None = None, wait_s: float = WAIT_S
    ) -> None:
        self._model_bytes, self._clock = model_bytes, clock
        self._table = table_in(cache_folder() / FILE, LINEARS) if table is None else table
        self._once = Once(self._table, wait_s)
        self._left_s = ALLOWED_S
        self._shapes: dict[Shape, dict[tuple[int, int], None]] = {}  # with the matrices it stands for
        self._rule = ""  # why the rule decided for some

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        out_features, in_features = weight.shape
        return MAKERS[self.form_for((out_features, in_features), weight.dtype)](weight, bias)

    def form_for(self, matrix: tuple[int, int], dtype: torch.dtype) -> str:
        """Of a matrix [out, in]; measured where nobody has."""
        out_features, in_features = matrix
        shape = Shape.of(out_features, in_features, dtype, self._model_bytes)
        times = self._once.times(shape.name, functools.partial(self._measure, shape), about=EVERY)
        if isinstance(times, str):
            self._rule = times
            return DEFAULT
        self._shapes.setdefault(shape, {})[matrix] = None
        return chosen_form(times)

    def _measure(self, shape: Shape) -> Seconds | str:
        why_not_looped(shape.dtype, "cpu")  # compiles the loop where that was never done, which is not measuring
        began = time.monotonic()
        with torch.no_grad():
            seconds = measured_times(shape, self._clock, began + self._left_s)
        self._left_s -= time.monotonic() - began
        return seconds

    @property
    def reason(self) -> str:
        """Which forms were chosen, how much faster they were, when that was measured, and where it is kept; "" before
        a linear was made."""
        said = [self._words(shape, matrices) for shape, matrices in self._shapes.items()]
        if said:
            said.append(self._where())
        if self._rule:
            said.append(f"{DEFAULT} for {'the others' if said else 'all'}, by rule: {self._rule}")
        return "; ".join(said)

    def _words(self, shape: Shape, matrices: dict[tuple[int, int], None]) -> str:
        times = self._table.entries[shape.name]
        form, by_form = chosen_form(times), gains(times)
        sizes = ", ".join(f"{inside} to {out}" for out, inside in matrices)
        if form != DEFAULT:
            return f"{WORDS[form]} for {sizes}: {by_form[form]}"
        other = max((one for one in by_form if one != DEFAULT), key=lambda one: by_form[one].in_all)
        return f"{WORDS[form]} for {sizes}: nothing gains 5 % in all ({WORDS[other]} is {by_form[other]})"

    def _where(self) -> str:
        days = sorted({self._table.entries[shape.name].day for shape in self._shapes})
        return f"measured {' and '.join(days)} with {next(iter(self._shapes)).threads}, {self._table.where}"


def maker_by_time(
    dtype: torch.dtype, device: torch.device | str, model_bytes: int
) -> tuple[Callable[..., Linear], str]:
    """What makes the linears of linear="auto" there, and why; a `MeasuredLinear` says why itself, after it has made
    them. model_bytes: of all weights that a step reads."""
    if not why_not_measured(dtype, device):
        return MeasuredLinear(model_bytes), ""
    if not measuring_is_off() and not torch_multiplies(dtype) and not why_not_looped(dtype, device):
        name = str(dtype).removeprefix("torch.")
        return Looped, f"{WORDS['looped']}: torch has no instructions of this processor for {name}"
    return chosen_linear(dtype, device)


def maker_of(
    matrix: tuple[int, int], dtype: torch.dtype, device: torch.device | str, model_bytes: int
) -> Callable[..., Linear]:
    """What holds a matrix [out, in] of such a model, for others of its kind too."""
    make, _ = maker_by_time(dtype, device, model_bytes)
    return MAKERS[make.form_for(matrix, dtype)] if isinstance(make, MeasuredLinear) else make


def for_many_rows(dtype: torch.dtype, device: torch.device | str) -> Callable[..., Linear]:
    """What multiplies many rows as the linears of linear="auto" do there: with those that are measured all forms are
    about as fast, so the plain one stands for them."""
    make, _ = maker_by_time(dtype, device, 0)
    return make if make is Looped else Plain


def kept_forms() -> str:
    """What this machine has measured so far for as many threads as there are now, in a few words."""
    table = TimesTable(cache_folder() / FILE, LINEARS)
    table.read()
    here = [chosen_form(times) for name, times in table.entries.items() if name.endswith(f", {threads()}")]
    forms = ", ".join(f"{here.count(form)} {WORDS[form]}" for form in MAKERS if form in here)
    asked = why_not_measured(torch.float32, "cpu")
    return f"{forms or 'no shape measured yet'}, with {threads()}{asked and f'; not in use: {asked}'}"
