"""Panels: experiments with controls, live in a notebook. Each is `panels.NAME(**settings)`.

>>> panel = step_time(max_length=256)   # the last line of a cell shows it
>>> panel.run()                         # or without a click: the Measurements
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.panels.base import Panel


def step_time(**settings: Any) -> Panel:
    """Lab 01: step time against text length, without a cache. rows=your count_rows is compared with the count."""
    from workbench.panels.naive_step_time import StepTimePanel

    return StepTimePanel(**settings)


def strategies(**settings: Any) -> Panel:
    """Lab 01: the next token's distribution before and after each filter. filters=, loop=: yours beside ours."""
    from workbench.panels.naive_strategies import StrategiesPanel

    return StrategiesPanel(**settings)


def request(**settings: Any) -> Panel:
    """Lab 01: one request from outside: TTFT, TPOT, tokens a second. loop=, filters=: yours beside ours."""
    from workbench.panels.naive_request import RequestPanel

    return RequestPanel(**settings)


__all__ = ["step_time", "strategies", "request"]
