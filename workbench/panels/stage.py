"""The picture on the page: as wide as the panel, sharp at any zoom, with the name of what is under the pointer, and a
switch that fills the screen with the panel, for a hall."""

from __future__ import annotations

from typing import Any, NamedTuple

import anywidget
import numpy as np
import traitlets
from matplotlib.artist import Artist
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

NAMES = "_workbench_names"  # of an artist; its id in the SVG would be seen by the page
TAIL = 64  # letters of a still in base64: a checksum of the picture is among them
MAX_STILLS = 50  # of one panel on a page
NEAR = 0.012  # half the side of what a point answers to, as a share of the picture's width

JAVASCRIPT = """
function render({ model, el }) {
  el.classList.add("workbench-stage");
  const picture = document.createElement("div"), note = document.createElement("div");
  picture.className = "workbench-picture";
  note.className = "workbench-note"; note.hidden = true;
  const draw = () => { picture.innerHTML = model.get("value"); note.hidden = true; };
  const under = (event) => {
    const box = picture.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width, y = (event.clientY - box.top) / box.height;
    const areas = model.get("areas").filter(([l, t, r, b]) => l <= x && x <= r && t <= y && y <= b);
    areas.sort((a, b) => (a[2] - a[0]) * (a[3] - a[1]) - (b[2] - b[0]) * (b[3] - b[1]));
    note.hidden = !areas.length;
    if (!areas.length) return;
    note.textContent = areas[0][4];
    note.style.left = Math.min(100 * x, 70) + "%"; note.style.top = 100 * y + "%";
  };
  picture.addEventListener("pointermove", under);
  picture.addEventListener("pointerleave", () => { note.hidden = true; });
  // a still of this panel, stored for pages without it, is no second plot beside it
  const hidden = document.createElement("style");
  const hide = () => {
    hidden.textContent = model.get("stills").map((tail) =>
      `.jp-OutputArea-child:has(img[src$="${CSS.escape(tail)}"]) { display: none !important; }`).join("");
  };
  model.on("change:value", draw);
  model.on("change:stills", hide);
  draw();
  hide();
  document.head.append(hidden);
  el.append(picture, note);
  return () => {
    model.off("change:value", draw);
    model.off("change:stills", hide);
    hidden.remove();
  };
}
export default { render };
"""

# The panel around the switch goes to full screen, so that its controls are there too.
SWITCH = """
function render({ el }) {
  const screen = document.createElement("button");
  screen.className = "workbench-projector"; screen.type = "button"; screen.textContent = "Projector";
  screen.title = "fill the screen with this panel, in larger letters; Esc ends it";
  screen.addEventListener("click", () => {
    if (document.fullscreenElement) document.exitFullscreen();
    else el.closest(".workbench-panel").requestFullscreen();
  });
  el.append(screen);
}
export default { render };
"""

STYLE = """
.workbench-panel { --jp-widgets-font-size: 16px; --jp-widgets-inline-height: 34px; font-size: 16px; }
.workbench-panel .widget-label, .workbench-panel .widget-readout { font-size: 16px; text-overflow: clip; }
.workbench-panel .slider-container { min-width: 8em; }
.workbench-panel .jp-Collapse-header { font-size: 16px; }
.workbench-stage { position: relative; width: 100%; }
.workbench-picture img { display: block; width: 100%; height: auto; border-radius: 4px; }
.workbench-note { position: absolute; z-index: 5; transform: translate(14px, 14px); pointer-events: none;
  max-width: 28em; padding: 4px 9px; border-radius: 4px; font-size: 16px; background: #22272E; color: #FBFBF9; }
.workbench-projector { font-size: inherit; padding: 4px 12px; border: 1px solid #6B7280; border-radius: 4px;
  background: none; color: inherit; cursor: pointer; }
.workbench-panel:fullscreen { --jp-widgets-font-size: 24px; --jp-widgets-inline-height: 44px; font-size: 24px;
  background: var(--jp-layout-color0, white); color: var(--jp-content-font-color1, black); padding: 12px 20px;
  overflow: auto; height: 100vh; width: 100vw; }
.workbench-panel:fullscreen > * { flex-shrink: 0; }
.workbench-panel:fullscreen .workbench-stage { max-width: max(1240px, 125vh); margin: 0 auto; }
.workbench-panel:fullscreen .widget-label, .workbench-panel:fullscreen .widget-readout,
.workbench-panel:fullscreen .jp-Collapse-header, .workbench-panel:fullscreen .workbench-note,
.workbench-panel:fullscreen .workbench-text, .workbench-panel:fullscreen pre,
.workbench-panel:fullscreen table { font-size: 24px !important; }
.workbench-panel:fullscreen > .workbench-run { position: sticky; bottom: 0; z-index: 4; padding: 6px 0;
  background: var(--jp-layout-color0, white); }
"""


class Area(NamedTuple):
    """A rectangle of a picture, in shares of its width and height from the upper left corner, and what is there."""

    left: float
    top: float
    right: float
    bottom: float
    text: str


class Stage(anywidget.AnyWidget):
    """value: the picture as HTML. areas: names under the pointer, the smallest area under it first. stills: how the
    base64 text of each still of this panel ends; while the panel is on the page, they are hidden."""

    _esm = JAVASCRIPT
    _css = STYLE
    value = traitlets.Unicode("").tag(sync=True)
    areas: Any = traitlets.List().tag(sync=True)
    stills = traitlets.List(traitlets.Unicode()).tag(sync=True)

    def show(self, value: str, areas: list[Area]) -> None:
        """The areas first: those of a picture that is gone name nothing in the new one."""
        self.areas = [list(area) for area in areas]
        self.value = value

    def hide_still(self, png: str) -> None:
        """png: the still in base64."""
        self.stills = [*self.stills, png[-TAIL:]][-MAX_STILLS:]


class ProjectorSwitch(anywidget.AnyWidget):
    """A button that fills the screen with the panel around it."""

    _esm = SWITCH


def tell(artist: Artist, *texts: str) -> None:
    """Give this artist a name under the pointer: one, or one for each point of a line or part of a
    collection."""
    vars(artist)[NAMES] = [" ".join(text.split()) for text in texts]


def areas_of(figure: Figure) -> list[Area]:
    """What the artists of a drawn figure tell, and where."""
    width, height = (float(side) for side in figure.bbox.size)
    areas: list[Area] = []

    def add(x0: float, y0: float, x1: float, y1: float, text: str) -> None:
        shares = (x0 / width, 1 - y1 / height, x1 / width, 1 - y0 / height)
        left, top, right, bottom = (round(float(share), 4) for share in shares)
        areas.append(Area(left, top, right, bottom, text))

    hover: Any = figure.findobj(lambda artist: bool(vars(artist).get(NAMES)))
    for artist in hover:
        texts = vars(artist)[NAMES]
        if isinstance(artist, Line2D):
            near = NEAR * width
            for (x, y), text in zip(artist.get_transform().transform(artist.get_xydata()), texts):
                add(x - near, y - near, x + near, y + near, text)
        elif isinstance(artist, Collection):
            thick = 0.5 * float(np.atleast_1d(artist.get_linewidth())[0]) * figure.dpi / 72
            for path, text in zip(artist.get_paths(), texts):
                box = path.get_extents(artist.get_transform())
                add(box.x0 - thick, box.y0 - thick, box.x1 + thick, box.y1 + thick, text)
        else:
            box = artist.get_window_extent()
            add(box.x0, box.y0, box.x1, box.y1, texts[0])
    return areas
