"""What the judges of lab 10 share: a tensor beside the right one, and the counts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workbench.checks.tensors import numbers, read
from workbench.grading.check import evaded

TOLERANCE = {"float32": 2e-5, "float16": 4e-3}  # of sums in float32, and of their rounding to float16


def judge_tensor(
    seen: dict,
    key: str,
    right: torch.Tensor,
    dtype: str,
    *,
    where: str,
    legend: str,
    row_of: Callable[[tuple[int, ...]], str] = lambda at: f"row {at[0]}",
    tolerance: float | None = None,
) -> str | None:
    """None where the tensor `seen[key]` is `right` (float64), else shape, dtype, or the first wrong element."""
    came = read(seen[key], "what came back" if key == "out" else key, right.shape, dtype, legend)
    if isinstance(came, str):
        return where + came
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    far = ~near(came, right, tolerance)
    if not far.any():
        return None
    at = tuple(far.nonzero()[0].tolist())
    row = at[:-1]
    told = (
        f"{where}{row_of(at)}: element {at[-1]} is {came[at].item():.5g}, expected {right[at].item():.5g}; the row"
        f" begins {numbers(came[row])}, expected {numbers(right[row])}"
    )
    return told + "; what was not written at all is nan here, too" * bool(came[row].isnan().any())


def near(came: torch.Tensor, right: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Element by element: within `tolerance`, relative to what is right where that is above 1; infinities must be
    equal."""
    close = (came - right).abs() <= tolerance * right.abs().clamp(min=1.0)
    return (close & right.isfinite()) | (came == right)


def told_pair(seen: dict, wanted: str) -> str | None:
    if "pair" in seen:
        return f"a pair {wanted} was expected, a {seen['pair']} came back"
    return None


def told_inputs(seen: dict, where: str) -> str | None:
    """The inputs are whole, there was one launch, and what came back came out of it."""
    if seen["without_kernel"]:
        return where + evaded("the same came back where the kernel was launched and did nothing; it is to do the work")
    if seen["beside"]:
        names = ", ".join(seen["beside"])
        return where + evaded(f"torch computed outside of the kernel, which is to do the work ({names})")
    if seen["made_elsewhere"]:
        return where + evaded("numbers came back that no kernel had stored; what it stores is the result")
    if seen["changed"]:
        return f"{where}{seen['changed'][0]} was changed; inputs belong to the caller"
    if seen["launches"] != 1:
        return (
            f"{where}{seen['launches']} launches were counted, expected 1: the function below the kernel launches it "
            "once, by launch(…)"
        )
    return None


def told_loads(seen: dict, name: str, expected: int, where: str) -> str | None:
    """At most `expected` elements of that input were loaded, and no fewer than half of them, which is what it has or
    less; None too where loads are not counted (compiled kernels)."""
    if seen["loaded"] is None:
        return None
    loaded = seen["loaded"][name]
    if 0 < expected // 2 <= loaded <= expected:
        return None
    if 0 < loaded < expected // 2:
        return where + evaded(f"{loaded:,} elements of {name} were loaded, fewer than it takes to see all of it")
    if not loaded:
        return f"{where}no element of {name} was loaded by the kernel: hand {name} itself to launch"
    return f"{where}{loaded:,} elements of {name} were loaded, expected {expected:,} at most"
