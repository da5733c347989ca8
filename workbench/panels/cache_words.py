"""What the panels of lab 03 share: limits in words, and an axis of times."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from workbench.panels import style

LIMIT_WORDS = {
    "launch": "launch-bound (starting the operations takes longer than what they do, so fewer bytes or rows would "
    "not help)",
    "bandwidth": "bandwidth-bound (reading weights and cache takes longer than the arithmetic)",
    "compute": "compute-bound (the arithmetic of the rows takes longest)",
}


def limits_in_words(points: Sequence[tuple[float, float, str]], unit: str) -> str:
    """'compute-bound (…)', or 'bandwidth-bound (…), from token 65 on compute-bound (…)'."""
    runs: list[tuple[float, str]] = []
    for x, _, limit in points:
        if not runs or runs[-1][1] != limit:
            runs.append((x, limit))
    first, *others = runs
    return ", ".join(
        [LIMIT_WORDS[first[1]], *(f"from {unit} {x:,} on {LIMIT_WORDS[limit]}" for x, limit in others)]
    )


def time_axis(axes: Axes, seconds: Sequence[float], *, axis: str = "y", above: float = 2.2) -> None:
    """A log axis in milliseconds around these times, its ticks written out in the unit that suits."""
    low, high = min(seconds) * 1e3 / 1.8, max(seconds) * 1e3 * above
    for bases in ((1, 2, 5), (1, 3), (1,)):  # of those, the most that leave the axis readable
        inside = [t for e in range(-4, 7) for t in (base * 10.0**e for base in bases) if low <= t <= high]
        if len(inside) <= 6:
            break
    style.log_ticks(axes, axis, inside, text=lambda ms: style.milliseconds(ms / 1e3))
    getattr(axes, f"set_{axis}lim")(low, high)
