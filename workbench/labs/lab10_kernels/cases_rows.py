"""Cases of the kernels that go over rows: memory itself, softmax, norms, turns, choices; and a few rows times a
matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from workbench.labs.lab10_kernels.case import FULL, HERE, TINY, Case, Inputs, Maker, Sizes, bounded, module

MATVEC_SIZES = {
    TINY: {"rows": 3, "out": 96, "in": 128},
    HERE: {"rows": 1, "out": 4096, "in": 4096},
    FULL: {"rows": 1, "out": 65_536, "in": 4096},
}
COUNTERS = 1024  # as `kernels.arrivals` has them
GROUP = 128  # inputs that share a scale, as `prepare(model, weights=…)` has them


def _read_sum() -> Case:
    m = module("ceilings")
    return Case(
        "read_sum",
        lambda t, s: {"x": t.normal(s["n"]).abs_() if not t.blank else t.normal(s["n"])},
        lambda i: m.read_sum(i["x"]),
        lambda i: i["x"].sum(),
        lambda i: m.read_sum_work(i["x"]),
        lambda i: i["x"].sum(dtype=torch.float32),
        "sum",
        {TINY: {"n": 40_000}, HERE: {"n": 1 << 24}, FULL: {"n": 1 << 29}},
        lambda s: f"{s['n']:,} numbers",
        tune=lambda i: bounded(m.tune_read_sum)(i["x"]),
    )


def _copy() -> Case:
    m = module("ceilings")
    return Case(
        "copy",
        lambda t, s: {"x": t.normal(s["n"]), "out": t.normal(s["n"])},
        lambda i: m.copy(i["x"], i["out"]),
        lambda i: i["x"],
        lambda i: m.copy_work(i["x"]),
        lambda i: i["out"].copy_(i["x"]),
        "copy_",
        {TINY: {"n": 40_000}, HERE: {"n": 1 << 23}, FULL: {"n": 1 << 28}},
        lambda s: f"{s['n']:,} numbers",
        tune=lambda i: bounded(m.tune_copy)(i["x"]),
    )


def _softmax() -> Case:
    m = module("softmax")
    return Case(
        "softmax",
        lambda t, s: {"x": t.normal(s["rows"], s["n"])},
        lambda i: m.softmax(i["x"]),
        lambda i: i["x"].softmax(-1),
        lambda i: m.softmax_work(i["x"]),
        lambda i: i["x"].softmax(-1),
        "softmax",
        {TINY: {"rows": 5, "n": 300}, HERE: {"rows": 1024, "n": 8192}, FULL: {"rows": 16_384, "n": 16_384}},
        lambda s: f"{s['rows']:,} rows of {s['n']:,}",
        tune=lambda i: bounded(m.tune_softmax)(i["x"]),
    )


def _rms_norm() -> Case:
    m = module("norm")

    def make(t: Maker, s: Sizes) -> Inputs:
        return {"x": t.normal(s["rows"], s["d"]), "weight": t.normal(s["d"]), "residual": t.normal(s["rows"], s["d"])}

    def by_torch(i: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        added = i["x"] + i["residual"]
        return F.rms_norm(added, (added.shape[-1],), i["weight"], 1e-5), added

    return Case(
        "rms_norm",
        make,
        lambda i: m.rms_norm(i["x"], i["weight"], 1e-5, i["residual"]),
        by_torch,
        lambda i: m.rms_norm_work(i["x"], i["weight"], i["residual"]),
        by_torch,
        "add, then rms_norm",
        {TINY: {"rows": 6, "d": 200}, HERE: {"rows": 1024, "d": 4096}, FULL: {"rows": 32_768, "d": 4096}},
        lambda s: f"{s['rows']:,} rows of {s['d']:,}, and a residual",
        tune=lambda i: bounded(m.tune_rms_norm)(i["x"], i["weight"]),
    )


def _rotate() -> Case:
    m = module("rotary")

    def make(t: Maker, s: Sizes) -> Inputs:
        return {
            "x": t.normal(s["rows"], s["heads"], s["d"]),
            "table": t.normal(s["places"], 2, s["d"], dtype=torch.float32),
            "positions": t.whole(0, s["places"], s["rows"], dtype=torch.int64),
        }

    return Case(
        "rotate_rows",
        make,
        lambda i: m.rotate_rows(i["x"], i["positions"], i["table"]),
        lambda i: m.rotate_rows_reference(i["x"], i["positions"], i["table"]),
        lambda i: m.rotate_rows_work(i["x"], i["table"]),
        lambda i: m.rotate_rows_reference(i["x"], i["positions"], i["table"]),
        "its twin in PyTorch",
        {
            TINY: {"rows": 7, "heads": 3, "d": 64, "places": 32},
            HERE: {"rows": 512, "heads": 40, "d": 128, "places": 4096},
            FULL: {"rows": 32_768, "heads": 40, "d": 128, "places": 8192},
        },
        lambda s: f"{s['rows']:,} rows of {s['heads']} heads of {s['d']}",
    )


def _swiglu() -> Case:
    m = module("swiglu")

    def by_torch(i: Inputs) -> torch.Tensor:
        gate, up = i["gate_up"].chunk(2, -1)
        return F.silu(gate) * up

    return Case(
        "swiglu",
        lambda t, s: {"gate_up": t.normal(s["rows"], 2 * s["f"])},
        lambda i: m.swiglu(i["gate_up"]),
        by_torch,
        lambda i: m.swiglu_work(i["gate_up"]),
        by_torch,
        "silu, then product",
        {TINY: {"rows": 4, "f": 300}, HERE: {"rows": 512, "f": 14_336}, FULL: {"rows": 8192, "f": 14_336}},
        lambda s: f"{s['rows']:,} rows, F = {s['f']:,}",
        tune=lambda i: bounded(m.tune_swiglu)(i["gate_up"]),
    )


def _argmax() -> Case:
    m = module("sampling")
    return Case(
        "argmax",
        lambda t, s: {"logits": t.normal(s["rows"], s["v"], dtype=torch.float32)},
        lambda i: m.argmax(i["logits"]),
        lambda i: i["logits"].argmax(-1),
        lambda i: m.argmax_work(i["logits"]),
        lambda i: i["logits"].argmax(-1),
        "argmax",
        {TINY: {"rows": 3, "v": 5000}, HERE: {"rows": 64, "v": 128_256}, FULL: {"rows": 1024, "v": 128_256}},
        lambda s: f"{s['rows']:,} rows of {s['v']:,} logits",
        chosen=True,
    )


def _sample() -> Case:
    m = module("sampling")

    def make(t: Maker, s: Sizes) -> Inputs:
        rows = s["rows"]
        return {
            "logits": t.normal(rows, s["v"], dtype=torch.float32),
            "uniform": t.uniform(rows),
            "temperature": torch.full((rows,), 0.8, device=t.device),
        }

    def by_torch(i: Inputs) -> object:
        return torch.multinomial((i["logits"] / i["temperature"][:, None]).softmax(-1), 1)

    return Case(
        "sample",
        make,
        lambda i: m.sample(i["logits"], i["uniform"], i["temperature"]),
        lambda i: m.sample_reference(i["logits"], i["uniform"], i["temperature"]),
        lambda i: m.sample_work(i["logits"]),
        by_torch,
        "softmax, then multinomial",
        {TINY: {"rows": 3, "v": 3000}, HERE: {"rows": 8, "v": 128_256}, FULL: {"rows": 1024, "v": 128_256}},
        lambda s: f"{s['rows']:,} rows of {s['v']:,} logits",
        chosen=True,
    )


# -- a few rows times a matrix -----------------------------------------------------------------------------------


def _of_matrix(s: Sizes) -> str:
    return f"{s['rows']} row{'s' * (s['rows'] > 1)}, [{s['out']:,}, {s['in']:,}]"


def _matvec() -> Case:
    m = module("matvec")

    def make(t: Maker, s: Sizes) -> Inputs:
        weight = t.normal(s["out"], s["in"], scale=s["in"] ** -0.5)
        return {"x": t.normal(s["rows"], s["in"]), "weight": weight, "arrivals": t.counters(COUNTERS)}

    return Case(
        "matvec",
        make,
        lambda i: m.matvec(i["x"], i["weight"], arrivals=i["arrivals"]),
        lambda i: F.linear(i["x"], i["weight"]),
        lambda i: m.matvec_work(i["x"], i["weight"], merges=True),
        lambda i: F.linear(i["x"], i["weight"]),
        "linear (cuBLAS on a GPU)",
        MATVEC_SIZES,
        _of_matrix,
        tune=lambda i: bounded(m.tune_matvec)(i["x"], i["weight"]),
    )


def _steps(t: Maker, out: int, groups: int, scale: float, zero: float) -> torch.Tensor:
    """[out, groups] words of a scale and a zero, laid out as the kernels read them: all outputs of a group side by
    side."""
    codes = module("matvec_codes")
    return codes.packed(*(t.normal(out, groups, dtype=torch.float16, scale=size) for size in (scale, zero)))


def _matvec_int8() -> Case:
    m = module("matvec_int8")

    def make(t: Maker, s: Sizes) -> Inputs:
        groups = s["in"] // GROUP
        scale = _steps(t, s["out"], groups, 0.01 * s["in"] ** -0.5, s["in"] ** -0.5)
        # every word is four codes, interleaved as the engine's are
        return {
            "x": t.normal(s["rows"], s["in"]),
            "words": t.whole(-(2**31), 2**31, s["out"], s["in"] // 4, dtype=torch.int32),
            "scale": scale,
            "dense": t.normal(s["out"], s["in"]),
            "arrivals": t.counters(COUNTERS),
        }

    def call(function: Callable, i: Inputs, **more: Any) -> Any:
        return function(i["x"], i["words"], i["scale"], group=GROUP, added=128, **more)

    return Case(
        "matvec_int8",
        make,
        lambda i: call(m.matvec_int8, i, arrivals=i["arrivals"]),
        lambda i: call(m.matvec_int8_reference, i),
        lambda i: m.matvec_int8_work(i["x"], i["words"], i["scale"], group=GROUP, merges=True),
        lambda i: F.linear(i["x"], i["dense"]),
        "linear, not quantized",
        MATVEC_SIZES,
        _of_matrix,
        tune=lambda i: call(bounded(m.tune_matvec_int8), i),
    )


def _matvec_int4() -> Case:
    m = module("matvec_int4")

    def make(t: Maker, s: Sizes) -> Inputs:
        groups = s["in"] // GROUP
        scale = _steps(t, s["out"], groups, 0.2 * s["in"] ** -0.5, s["in"] ** -0.5)
        # every word is eight codes
        words = t.whole(-(2**31), 2**31, s["out"], 16 * groups, dtype=torch.int32)
        return {
            "x": t.normal(s["rows"], s["in"]),
            "words": words,
            "scale": scale,
            "dense": t.normal(s["out"], s["in"]),
            "arrivals": t.counters(COUNTERS),
        }

    def call(function: Callable, i: Inputs, **more: Any) -> Any:
        return function(i["x"], i["words"], i["scale"], group=GROUP, **more)

    return Case(
        "matvec_int4",
        make,
        lambda i: call(m.matvec_int4, i, arrivals=i["arrivals"]),
        lambda i: call(m.matvec_int4_reference, i),
        lambda i: call(m.matvec_int4_work, i, merges=True),
        lambda i: F.linear(i["x"], i["dense"]),
        "linear, not quantized",
        {**MATVEC_SIZES, TINY: {"rows": 3, "out": 40, "in": 256}, FULL: {"rows": 1, "out": 131_072, "in": 4096}},
        _of_matrix,
        tune=lambda i: call(bounded(m.tune_matvec_int4), i),
    )


MAKERS: dict[str, Callable[[], Case]] = {
    "read_sum": _read_sum,
    "copy": _copy,
    "softmax": _softmax,
    "rms_norm": _rms_norm,
    "rotate_rows": _rotate,
    "swiglu": _swiglu,
    "argmax": _argmax,
    "sample": _sample,
    "matvec": _matvec,
    "matvec_int8": _matvec_int8,
    "matvec_int4": _matvec_int4,
}
