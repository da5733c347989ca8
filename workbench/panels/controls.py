"""Settings as widgets: one control a setting, each with a description, in the order they are declared."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets

from workbench.experiments import Setting
from workbench.experiments.contract import Limit

DESCRIPTION = {"description_width": "initial"}  # as wide as its words: no label is cut
WIDTH = "auto"
LARGEST = 2**31 - 1  # of a number without bounds
IN_WORDS = {"s": "seconds"}  # a unit that a name may spell out
IN_CAPITALS = {"ttft", "tpot", "itl", "slo"}


def row() -> widgets.Layout:
    """Controls beside each other, in as many lines as it takes."""
    return widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="0 1.5em")


def control(setting: Setting, value: Any, models: tuple[str, ...] = ()) -> widgets.Widget:
    """The widget for a setting, showing `value`. A number without two bounds is a box, with them a slider."""
    words = " ".join(one.upper() if one in IN_CAPITALS else one for one in setting.name.split("_"))
    said = {setting.unit, IN_WORDS.get(setting.unit, setting.unit)} & {*words.split()}
    words += f" ({setting.unit})" if setting.unit and not said else ""
    common = {"description": words, "tooltip": setting.help or words, "style": DESCRIPTION}
    if setting.kind != "text":
        common["layout"] = widgets.Layout(width=WIDTH)
    low, high = setting.low, setting.high
    if setting.kind == "flag":
        return widgets.Checkbox(value=value, indent=False, **common)
    if setting.kind == "choice":
        kind = widgets.SelectionSlider if _ordered(setting) else widgets.Dropdown
        return kind(options=choice_options(setting), value=value, **common)
    if setting.kind == "model":
        return widgets.Dropdown(options=model_options(value, setting.choices or models), value=value, **common)
    if setting.kind == "text":
        wide = widgets.Layout(width="98%", height="5.2em")
        return widgets.Textarea(value=value, layout=wide, continuous_update=True, **common)
    if setting.kind == "int":
        if low is None or high is None:
            return widgets.BoundedIntText(value=value, min=int(low or 0), max=LARGEST, **common)
        step = int(setting.step or 1)
        return widgets.IntSlider(value=value, min=int(low), max=int(high), step=step, **common)
    assert low is not None and high is not None, f"{setting.name}: a float control needs bounds"
    fine = setting.step or (high - low) / 100
    return widgets.FloatSlider(value=value, min=low, max=high, step=fine, readout_format=".2f", **common)


def _ordered(setting: Setting) -> bool:
    return all(isinstance(c, int | float) for c in setting.choices)


def choice_options(setting: Setting) -> list[tuple[str, Any]]:
    """(label, choice) pairs."""
    return [(f"{c:,}" if _ordered(setting) else c, c) for c in setting.choices]


def model_options(value: Any, models: tuple[str, ...]) -> list[tuple[str, Any]]:
    """(label, model) pairs: the known names, and `value` in front when it is another name or a Decoder."""
    known = [(name, name) for name in models]
    if isinstance(value, str):
        return known if value in models else [(value, value), *known]
    return [(str(getattr(value, "name", "your model")), value), *known]


def put(widget: widgets.Widget, setting: Setting, value: Any, models: tuple[str, ...] = ()) -> None:
    """Let the control show a checked value."""
    if setting.kind == "model" and value not in [v for _, v in widget.options]:
        widget.options = model_options(value, setting.choices or models)
    widget.value = value


def goes_with(limit: Limit | None, value: Any) -> bool:
    """Whether a value is within a limit."""
    return limit is None or (limit(value) if callable(limit) else value <= limit)


def narrow(widget: widgets.Widget, setting: Setting, limit: Limit | None, models: tuple[str, ...] = ()) -> None:
    """Let the control offer what goes with the other settings, and all where the limit is None. A value that does not
    goes to the next smaller one."""
    if setting.kind in ("text", "flag"):
        return
    if setting.kind in ("int", "float"):
        assert not callable(limit), setting.name
        high = LARGEST if setting.high is None else setting.high
        high = type(widget.value)(high if limit is None else max(setting.low or 0, min(high, limit)))
        if widget.max != high:
            widget.max = high
        return
    is_model, models = setting.kind == "model", setting.choices or models
    every = model_options(widget.value, models) if is_model else choice_options(setting)
    options = tuple(option for option in every if goes_with(limit, option[1])) or tuple(every)
    values, old = [value for _, value in options], widget.value
    if tuple(widget.options) != options:
        smaller = [v for v in values if isinstance(v, int | float) and v <= old] if old not in values else [old]
        widget.options = options
        widget.value = smaller[-1] if smaller else values[0]


def every_widget(root: widgets.Widget) -> set[widgets.Widget]:
    """`root` and all widgets it holds, layouts and styles too: each has a comm of its own."""
    found: set[widgets.Widget] = set()
    left = [root]
    while left:
        one = left.pop()
        if one in found:
            continue
        found.add(one)
        for name in one.keys:
            value = getattr(one, name)
            held = value if isinstance(value, list | tuple) else (value,)
            left.extend(w for w in held if isinstance(w, widgets.Widget))
    return found


def let_the_page_choose(root: widgets.Widget) -> None:
    """Messages for these widgets are handled by the kernel's thread to which the page sent them.

    From ipykernel 7.4 on they go to the shell from which the widget was last changed: to the main one for what a cell
    made, where a click on Stop waits for the running cell. JupyterLab asks for a thread beside it.
    """
    for widget in every_widget(root):
        if hasattr(widget.comm, "_reply_subshell_for"):
            widget.comm._reply_subshell_for = _as_the_page_asked


def _as_the_page_asked(_data: Any, asked: str | None) -> str | None:
    return asked
