"""quantize.weight_row: one row of a weight matrix in few bits: its codes, what they stand for, the error of every
element."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from workbench.errors import WorkbenchError, unknown
from workbench.experiments.contract import Experiment, Limits, Setting, no_times
from workbench.experiments.inputs import MODEL, plain, shape_of
from workbench.models.assembly import hollow_decoder
from workbench.models.checkpoints import WEIGHTS, ZOO, load, zoo_config
from workbench.models.decoder import Decoder
from workbench.models.tensor_layout import full_name, stored_tensors
from workbench.quantization.formats import FORMATS, Format, IntegerFormat, fit, quantize_tensor, unpack
from workbench.quantization.nf4 import NF4_LEVELS, NormalFloat

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

LINEARS = ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.gate", "mlp.up", "mlp.down")
WHOLE = ("affine", "symmetric")  # whole numbers of as many bits as one likes
KINDS = (*WHOLE, "fp8_e4m3", "fp8_e5m2", "nf4")
GROUPS = (0, 16, 32, 64, 128)  # 0: the whole row
BITS = tuple(range(2, 9))


# -- the row ---------------------------------------------------------------------------------------------------


def weight_row(model: str | Decoder, layer: int, linear: str, row: int) -> torch.Tensor:
    """The inputs' weights of one output, float32 [in]. Of a shipped model one matrix is read, not the model.

    Raises WorkbenchError for a layer, a linear or a row that is not there, with those that are.
    """
    weight = _weight_of(model, f"layers.{layer}.{linear}.weight")
    if row >= len(weight):
        raise WorkbenchError(
            f"row must be one of the {len(weight)} outputs of {linear}, 0 to {len(weight) - 1}, got {row}"
        )
    return weight[row].float()


def _weight_of(model: str | Decoder, name: str) -> torch.Tensor:
    if isinstance(model, str):
        return _read_weight(model, name)
    parameters = dict(model.named_parameters())
    if name not in parameters:
        raise _not_there(name, parameters)
    return parameters[name].detach()


@functools.lru_cache(maxsize=16)
def _read_weight(model: str, name: str) -> torch.Tensor:
    if not (ZOO / model / WEIGHTS).is_file():
        return _weight_of(load(model), name).clone()
    config = zoo_config(model)
    shapes = {n: tuple(p.shape) for n, p in hollow_decoder(config, name=model).named_parameters()}
    if name not in shapes:
        raise _not_there(name, shapes)
    stored = next(t for t in stored_tensors(config, shapes) if name in t.parts)
    with safe_open(ZOO / model / WEIGHTS, framework="pt") as file:
        return dict(stored.split(file.get_tensor(full_name(config, stored.name))))[name].clone()


def _not_there(name: str, parameters) -> WorkbenchError:
    linears = [n.removesuffix(".weight") for n in parameters if n.startswith("layers.") and "norm" not in n]
    return unknown("linear", name.removesuffix(".weight"), linears)


def with_outlier(row: torch.Tensor, outlier: float, at: int) -> torch.Tensor:
    """A copy in which element `at` is `outlier` × the row's root mean square, with its own sign. 0: as it is."""
    if not outlier:
        return row
    if at >= len(row):
        raise WorkbenchError(f"outlier_at must be one of the {len(row)} elements of this row, got {at}")
    planted = row.clone()
    planted[at] = math.copysign(outlier * float(row.square().mean().sqrt()), float(row[at]))
    return planted


# -- the same in few bits --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundedRow:
    """A row and what became of it: rounded = scale · level + zero. Tensors are float32 (bound: float64)."""

    name: str  # of the format
    bits: int  # of a code
    group: int  # elements that share a scale
    unit_levels: torch.Tensor  # all numbers of the format before the scale, ascending
    row: torch.Tensor  # [in]
    codes: torch.Tensor  # [in] the unit level of each: a whole number, a float of 8 bits, a level of NF4
    rounded: torch.Tensor  # [in]
    bound: torch.Tensor  # [in] of |row − rounded|
    scale: torch.Tensor  # [groups]
    zero: torch.Tensor | None  # [groups]
    code_bytes: int
    scale_bytes: int
    zero_bytes: int

    @property
    def error(self) -> torch.Tensor:
        return (self.row - self.rounded).abs()

    @property
    def rms_error(self) -> float:
        return rms(self.error)

    @property
    def nbytes(self) -> int:
        return self.code_bytes + self.scale_bytes + self.zero_bytes

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / len(self.row)

    @property
    def scale_bits(self) -> int:
        """Of one scale; a zero has as many."""
        return 8 * self.scale_bytes // len(self.scale)

    @property
    def steps(self) -> torch.Tensor:
        """How wide the stretch of numbers is that rounds to each element's level, [in]."""
        widths = unit_widths(self.unit_levels)
        return widths[torch.searchsorted(self.unit_levels, self.codes)] * self.scale.repeat_interleave(self.group)

    @property
    def predicted_rms_error(self) -> float:
        """√(mean of step² / 12): of errors that are as likely anywhere within half a step."""
        return rms(self.steps) / math.sqrt(12)

    def of_group(self, index: int) -> slice:
        return slice(index * self.group, (index + 1) * self.group)

    def levels(self, index: int) -> torch.Tensor:
        """All numbers that this group can hold, ascending."""
        return self.unit_levels * self.scale[index] + (0.0 if self.zero is None else self.zero[index])

    def codes_used(self, index: int) -> int:
        """Different codes among the elements of a group."""
        return len(self.codes[self.of_group(index)].unique())


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def unit_widths(levels: torch.Tensor) -> torch.Tensor:
    """For each level, half the way to either neighbour; an outermost one counts its only neighbour twice."""
    gaps = levels.diff()
    return (torch.cat((gaps[:1], gaps)) + torch.cat((gaps, gaps[-1:]))) / 2


def round_row(row: torch.Tensor, kind: str, bits: int, group: int) -> RoundedRow:
    """row [in] with a scale for each `group` elements (0: one for all). bits: of a whole number; fp8 has 8 and NF4 4.

    Scales and zeros are float16, of NF4 float32 (as published, before double quantization).
    Raises WorkbenchError for a group that does not divide the row, or whose codes do not fill whole bytes.
    """
    row = row.float()
    if kind == "nf4":
        return _round_nf4(row, group or len(row))
    format = format_of(kind, bits)
    found = quantize_tensor(row[None], format, over=1, group=group or None)
    codes = found.codes.float()
    if isinstance(format, IntegerFormat) and format.is_packed:
        codes = unpack(found.codes, found.packed, format.bits).float() + format.lowest
    return RoundedRow(
        name=format.name,
        bits=format.bits,
        group=group or len(row),
        unit_levels=unit_levels(format),
        row=row,
        codes=codes.flatten(),
        rounded=found.dequantize().flatten(),
        bound=found.error_bound().flatten(),
        scale=found.scale.float().flatten(),
        zero=None if found.zero is None else found.zero.float().flatten(),
        code_bytes=found.codes.nbytes,
        scale_bytes=found.scale.nbytes,
        zero_bytes=0 if found.zero is None else found.zero.nbytes,
    )


def _round_nf4(row: torch.Tensor, block: int) -> RoundedRow:
    found = NormalFloat.rounded(row[None], block, double=False)
    levels = torch.tensor(NF4_LEVELS)
    which = unpack(found.codes).flatten().long()
    gaps = torch.cat((torch.zeros(1), levels.diff(), torch.zeros(1)))
    widest = torch.maximum(gaps[which], gaps[which + 1]).double() / 2  # half the way to the farther neighbour
    scale = found.scales(0, 1).flatten()
    return RoundedRow(
        name="nf4",
        bits=4,
        group=block,
        unit_levels=levels,
        row=row,
        codes=levels[which],
        rounded=found.dequantize().flatten(),
        bound=(widest + 2.0**-21) * scale.double().repeat_interleave(block),  # and float32 roundings of numbers up to 1
        scale=scale,
        zero=None,
        code_bytes=found.codes.nbytes,
        scale_bytes=found.scale.nbytes,
        zero_bytes=0,
    )


def format_of(kind: str, bits: int) -> Format:
    """The format behind the two settings."""
    return FORMATS[kind] if kind in FORMATS else IntegerFormat(bits, symmetric=kind == "symmetric")


@functools.cache
def unit_levels(format: Format) -> torch.Tensor:
    """Every number of a format, ascending, 0 once; float32. Do not change it."""
    if isinstance(format, IntegerFormat):
        return torch.arange(format.lowest, format.highest + 1, dtype=torch.float32)
    values = torch.arange(256, dtype=torch.uint8).view(format.code_dtype).float()
    return values[values.isfinite()].unique()


def choices(row: torch.Tensor, kind: str) -> list[tuple[int, int]]:
    """(bits, group) of all ways to round this row in a kind of format: the groups that divide it."""
    if kind not in WHOLE:
        bits, multiple = (4, 2) if kind == "nf4" else (8, 1)
        return [(bits, g) for g in GROUPS if len(row) % (g or multiple) == 0]
    return [
        (bits, group)
        for group, bits in product(GROUPS, BITS)
        if len(row) % (group or format_of(kind, bits).multiple) == 0
    ]


def promised(row: torch.Tensor, kind: str, bits: int, group: int) -> tuple[float, float]:
    """(bits per weight, √(mean of step² / 12)) without a code being chosen, where all steps of a group are equal."""
    if kind not in WHOLE:
        found = round_row(row, kind, bits, group)
        return found.bits_per_weight, found.predicted_rms_error
    scale, zero = fit(row.view(-1, group or len(row)), format_of(kind, bits), 1)
    numbers = len(scale) * (1 if zero is None else 2)
    return bits + 16 * numbers / len(row), rms(scale) / math.sqrt(12)


# -- the run ---------------------------------------------------------------------------------------------------


def run_row(
    bench: Bench,
    *,
    model,
    layer: int,
    linear: str,
    row: int,
    format: str,
    bits: int,
    group: int,
    outlier: float,
    outlier_at: int,
    shown_group: int,
) -> Iterator[Measurement]:
    """What was `measured`: "weights", "codes", "rounded" and "errors" (a sample each element), "scales" and "zeros"
    (each group), then "rms" at every number of bits and every group, beside √(mean of step² / 12)."""
    bench.check_stop()
    weights = with_outlier(weight_row(model, layer, linear, row), outlier, outlier_at)
    about = plain(
        {
            "model": model,
            "layer": layer,
            "linear": linear,
            "row": row,
            "format": format,
            "outlier": outlier,
            "outlier_at": outlier_at,
        }
    )
    chosen = round_row(weights, format, bits, group)
    settings = {**about, "bits": chosen.bits, "group": group}
    check = check_row(chosen)
    counts = {
        "bytes": chosen.nbytes,
        "code_bytes": chosen.code_bytes,
        "scale_bytes": chosen.scale_bytes,
        "zero_bytes": chosen.zero_bytes,
        "bits_per_weight": chosen.bits_per_weight,
    }
    parts = {
        "weights": chosen.row,
        "codes": chosen.codes,
        "rounded": chosen.rounded,
        "errors": chosen.error,
        "scales": chosen.scale,
        "zeros": chosen.zero,
    }
    for measured, values in parts.items():
        if values is not None:
            yield bench.measurement(
                name="quantize.weight_row",
                settings={**settings, "measured": measured},
                samples=values.tolist(),
                unit="code" if measured == "codes" else "weight",
                counts=counts if measured == "rounded" else {},
                check=check,
            )
    for many, size in choices(weights, format):
        bench.check_stop()
        bench.report(f"{many} bits, groups of {size or len(weights)}")
        found = round_row(weights, format, many, size)
        yield bench.measurement(
            name="quantize.weight_row",
            settings={**about, "bits": many, "group": size, "measured": "rms"},
            samples=[found.rms_error],
            unit="weight",
            counts={"bytes": found.nbytes, "bits_per_weight": found.bits_per_weight},
            predicted=found.predicted_rms_error,
            check=check_row(found),
        )


def check_row(found: RoundedRow) -> str:
    """Every element within its bound, and as many bytes as the formula says: what was verified, in words."""
    over = found.error.double() > found.bound
    if over.any():
        at = int(over.nonzero()[0])
        raise WorkbenchError(
            f"element {at} is off by {float(found.error[at]):.3g}, more than its bound {float(found.bound[at]):.3g}"
        )
    numbers = len(found.scale) * (1 if found.zero is None else 2)
    formula = len(found.row) * found.bits // 8 + numbers * (4 if found.name == "nf4" else 2)
    if found.nbytes != formula:
        raise WorkbenchError(f"{found.nbytes} bytes are stored, and the formula says {formula}")
    return "every element is within its bound, and the bytes are those of the formula"


def row_limits(*, model: str | Decoder, layer: int, linear: str, **_: Any) -> Limits:
    """Layers, matrices and places that the model has."""
    shapes = _shapes_of(model)
    high, wide = shapes.get(f"layers.{layer}.{linear}.weight", (1, 1))
    return {
        "layer": shape_of(model).num_layers - 1,
        "linear": lambda name: f"layers.{layer}.{name}.weight" in shapes,
        "row": high - 1,
        "outlier_at": wide - 1,
    }


def _shapes_of(model: str | Decoder) -> dict[str, tuple[int, ...]]:
    """Of the parameters. Of a name without loading the model."""
    return _shapes_by_name(model) if isinstance(model, str) else _shapes(model)


@functools.lru_cache(maxsize=16)
def _shapes_by_name(model: str) -> dict[str, tuple[int, ...]]:
    return _shapes(hollow_decoder(shape_of(model), name=model))


def _shapes(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}


EXPERIMENT = Experiment(
    name="quantize.weight_row",
    lab=5,
    question="What becomes of one row of weights in few bits?",
    how="the weights of one output are rounded with a scale (and zero) for each group, packed, unpacked and "
    "compared element by element with what they were; every error is held to its bound. Run does the same at every "
    "number of bits and every group that divides the row.",
    settings=(
        MODEL,
        Setting("layer", 0, "int", 0, 31, help="the layer of the model"),
        Setting("linear", "mlp.gate", "choice", choices=LINEARS, help="the matrix of the layer"),
        Setting("row", 0, "int", 0, 1023, help="its row: the weights of one output"),
        Setting(
            "format",
            "affine",
            "choice",
            choices=KINDS,
            help="whole numbers from the least to the greatest of a group (affine) or around 0 (symmetric), fp8, NF4",
        ),
        Setting("bits", 4, "int", 2, 8, help="of a whole number; fp8 has 8, NF4 has 4"),
        Setting("group", 64, "choice", choices=GROUPS, unit="weights", help="so many share a scale; 0: the whole row"),
        Setting(
            "outlier",
            0.0,
            "float",
            0,
            64,
            step=1,
            unit="× rms",
            help="one weight is made so large, in root mean squares of the row; 0: the row as it is",
        ),
        Setting("outlier_at", 100, "int", 0, 1023, help="which weight of the row it is"),
        Setting("shown_group", 1, "int", 0, 63, help="the group whose levels are shown"),
    ),
    run=run_row,
    limits=row_limits,
    predict=no_times,
    record={"cpu": (), "cuda": ()},  # the same everywhere
)
