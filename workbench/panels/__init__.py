"""Panels: experiments with controls, live in a notebook. Each is `panels.NAME(**settings)`.

>>> panel = panels.step_time(max_length=256)   # the last line of a cell shows it
>>> panel.run()                                # or without a click: the Measurements

`dir(panels)` lists them. This is the kit that panels are made with; they themselves stand in their labs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench import registry
from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.panels.base import Panel


def __getattr__(name: str) -> type[Panel]:
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return registry.labs().panel(name)
    except WorkbenchError as error:  # what Python asks of a name that is not there
        raise AttributeError(str(error)) from None


def __dir__() -> list[str]:
    return registry.labs().panel_names()
