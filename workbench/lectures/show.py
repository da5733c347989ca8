"""A figure, a table and a sentence, as the last line of a lecture's cell."""

from __future__ import annotations

from collections.abc import Sequence

from IPython.display import HTML, Image, Markdown
from matplotlib.figure import Figure

from workbench.panels import html, style


def picture(figure: Figure, alt: str) -> Image:
    """A figure as a picture, with the words for those who cannot see it."""
    figure.tight_layout()
    return Image(style.png(figure), width=style.WIDTH, alt=alt)


def table(header: Sequence[str], rows: Sequence[Sequence[object]], caption: str) -> HTML:
    """A table with its caption; the first column heads the rows."""
    return HTML(html.table(header, rows, caption))


def say(text: str) -> Markdown:
    """A sentence that a cell computed, as Markdown."""
    return Markdown(text)
