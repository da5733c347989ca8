"""What the judges of lab 10 share: a tensor beside the right one, the first fault that gives what came, and the counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from workbench.checks.lab05_tensors import numbers, read

TOLERANCE = {"float32": 2e-5, "float16": 4e-3}  # of sums in float32, and of their rounding to float16


def judge_tensor(
    seen: dict,
    key: str,
    right: torch.Tensor,
    dtype: str,
    *,
    where: str,
    legend: str,
    faults: Iterable[tuple[str, Callable[[], torch.Tensor]]] = (),
    row_of: Callable[[tuple[int, ...]], str] = lambda at: f"row {at[0]}",
    not_finite: str = "",
    tolerance: float | None = None,
) -> str | None:
    """None where the tensor `seen[key]` is `right` (float64), else shape, dtype, or the first wrong row and its fault.

    faults: (words, what that mistake gives); the first that gives just what came in that row is told. not_finite: what to
    say of NaN or an infinity where none belongs.
    """
    came = read(seen[key], "what came back" if key == "out" else key, right.shape, dtype, legend)
    if isinstance(came, str):
        return where + came
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    far = ~near(came, right, tolerance)
    if not far.any():
        return None
    at = tuple(far.nonzero()[0].tolist())
    row = at[:-1]
    where += f"{row_of(at)}: "
    if not came[row].isfinite().all() and right[row].isfinite().all():
        found, hint = "an infinity", not_finite
        if came[row].isnan().any():
            found, hint = (
                "nan",
                f"{not_finite}{'; ' if not_finite else ''}what was not written at all is nan here, too",
            )
        return f"{where}{found} came back, expected {numbers(right[row])}{': ' if hint else ''}{hint}"
    told = _fault(came[row], right[row], ((words, wrong()[row]) for words, wrong in faults), tolerance)
    if told is None:
        return (
            f"{where}element {at[-1]} is {came[at].item():.5g}, expected {right[at].item():.5g}; the row begins "
            f"{numbers(came[row])}, expected {numbers(right[row])}"
        )
    return f"{where}{numbers(came[row])} came back, expected {numbers(right[row])}: {told}"


def near(came: torch.Tensor, right: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Element by element: within `tolerance`, relative to what is right where that is above 1; infinities must be equal."""
    close = (came - right).abs() <= tolerance * right.abs().clamp(min=1.0)
    return (close & right.isfinite()) | (came == right)


def _fault(
    came: torch.Tensor, right: torch.Tensor, faulty: Iterable[tuple[str, torch.Tensor]], tolerance: float
) -> str | None:
    """The words of the first fault that gives just what came, and not what is right."""
    for words, wrong in faulty:
        if near(came, wrong, tolerance).all() and not near(wrong, right, tolerance).all():
            return words
    return None


def told_pair(seen: dict, wanted: str) -> str | None:
    if "pair" in seen:
        return f"a pair {wanted} was expected, a {seen['pair']} came back"
    return None


def told_inputs(seen: dict, where: str) -> str | None:
    """The inputs are whole, and there was one launch."""
    if seen["changed"]:
        return f"{where}{seen['changed'][0]} was changed; inputs belong to the caller"
    if seen["launches"] != 1:
        return (
            f"{where}{seen['launches']} launches were counted, expected 1: the function below the kernel launches it "
            "once, by launch(…)"
        )
    return None


def told_loads(seen: dict, name: str, expected: int, where: str, told: Callable[[int], str]) -> str | None:
    """At most `expected` elements of that input were loaded; None too where loads are not counted (compiled kernels)."""
    if seen["loaded"] is None:
        return None
    loaded = seen["loaded"][name]
    if 0 < loaded <= expected:
        return None
    if not loaded:
        return f"{where}no element of {name} was loaded by the kernel: hand {name} itself to launch"
    return f"{where}{loaded:,} elements of {name} were loaded, expected {expected:,} at most: {told(loaded)}"
