"""What the panels of lab 07 draw alike: a legend of who wrote what, and words for drafts and ratios."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from matplotlib.axes import Axes

from workbench.instruments.records import Measurement
from workbench.labs.lab06_speculative_sampling.panels.plots import CHARACTER, COLOURS, KINDS, LINE, behind, mono

TITLES = {
    "model": "draft model",
    "eagle": "EAGLE",
    "medusa": "Medusa",
    "lookahead": "lookahead",
    "ngram": "n-gram table",
    "phrases": "phrases",
    "prompt_lookup": "prompt lookup",
    "self-int4": "itself in 4 bits",
    "staged": "staged",
    "lookup, else model": "lookup, else model",
}

DYNAMIC = ", dynamic"


def title_of(name: str) -> str:
    """A draft as people call it, "…, dynamic" too; a model by its own name."""
    plain = name.removesuffix(DYNAMIC)
    return TITLES.get(plain, plain) + name[len(plain) :]


def who_legend(axes: Axes, counts: dict[str, int], names: dict[str, str] | None = None) -> None:
    """A line over a text drawn by `draw_text`: each kind on its colour, and how many tokens are of it. names: for kinds
    that are called something else here."""
    texts = {kind: f"{(names or KINDS).get(kind, KINDS[kind])}: {count}" for kind, count in counts.items()}
    spare = axes.get_xlim()[1] - 0.04 - CHARACTER * sum(map(len, texts.values()))
    x, gap = 0.04, min(0.24, spare / max(1, len(texts)))
    for kind, text in texts.items():
        behind(axes, x, text, COLOURS[kind])
        mono(axes, x, -0.68 * LINE, text)
        x += len(text) * CHARACTER + gap


def times(m: Measurement) -> str:
    """'1.42 × (1.38 to 1.5)'; one sample has no spread."""
    low, high = m.spread
    return f"{m.median:.2f} ×" + (f" ({low:.2f} to {high:.2f})" if len(m.samples) > 1 else "")


def counted(words: Sequence[str]) -> dict[str, int]:
    """{word: how often}, in the order of their first appearance."""
    return dict(Counter(words))
