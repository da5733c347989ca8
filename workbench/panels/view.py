"""What a panel shows, apart from its controls: a View while it lives, a Snapshot for pages without a kernel."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from workbench.panels import style


@dataclass(frozen=True)
class View:
    """What a panel shows of its state: a picture, the same as a sentence and as a table, and what it means."""

    figure: Figure
    alt: str
    header: list[str]
    rows: list[list[str]]
    caption: str
    words: str
    extra: str = ""  # more HTML, already escaped


@dataclass(frozen=True)
class Snapshot:
    """A panel's picture as PNG, and the same in words. Shows itself in a notebook, with a kernel or without."""

    data: bytes
    alt: str

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle = {"image/png": self.base64, "text/plain": self.alt}
        return bundle, {"image/png": {"width": style.WIDTH, "alt": self.alt}}

    @property
    def base64(self) -> str:
        return base64.b64encode(self.data).decode()
