"""A lecture's notebook as slides: which cell begins one, what it shows, and what is the speaker's.

    a heading                       begins a slide; the first, and that of a sitting, is set large
    `Deeper: …`                     as its part: its slides are marked, and `next` leaves them out
    a cell of text                  begins a slide: one thought; what its code shows follows it
    text of more than half a slide  goes on on a next one
    a picture, a panel, a question  each has a slide
    hidden source, `assert`         are the speaker's notes, as are the words for a picture
    an example guess, `answer()`    is left out, as is the table of guesses: the hall guesses

All text stays on the slides.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape, unescape
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.files import read_json_object
from workbench.presenting import markup
from workbench.presenting.markup import Block, Heading
from workbench.presenting.needs import asked, live_cells, panel_of

STANDS_IN = "An example guess stands in"
LEFT_OUT = re.compile(r"^\s*\w+\.answer\(\)\s*$", re.M)
SUMMARY = re.compile(r"^summary\(\)", re.M)
COMPARES = re.compile(r"^\w+\.compare\(", re.M)  # the hall sees the result, the speaker the code
SNAPSHOT = re.compile(r"\b(\w+)\.snapshot\(\)")
EXAMPLE = re.compile(r"The example guess: .*?\. (?=[A-Z][^:<]*: )", re.S)
VERDICT = re.compile(
    r" The guess is too (?:high|low) by a factor of \S+?\.(?=\s|<)| That is (?:right|close|not what was guessed)\."
)
EXAMPLE_ROW = re.compile(r"<tr[^>]*><th[^>]*>example guess</th>.*?</tr>", re.S)
GUESSES = "Your guesses"  # a section about the reader's own
SITTING = re.compile(r"Sitting \d+: ")
DEEPER = re.compile(r"Deeper: ")
TEXT_ROOM = 0.72  # of a slide that has only text: more is not read


@dataclass
class Slide:
    """heading: as HTML. notes: the speaker's, plain text. panel: the number of the panel that lives here, from 0.
    sitting: its heading, plain; "" where the lecture has one only. deeper: the number of the
    part that can be left out, from 1; 0 for what cannot."""

    heading: str
    blocks: list[Block] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kind: str = "plain"  # or "title", "picture", "panel", "question"
    panel: int | None = None
    sitting: str = ""
    deeper: int = 0

    @property
    def height(self) -> int:
        return sum(block.height for block in self.blocks)


@dataclass(frozen=True)
class Deck:
    """title: of the lecture, plain. panels: the code of each, in order."""

    title: str
    slides: list[Slide]
    panels: list[str]


class _Making:
    """The slides so far."""

    def __init__(self) -> None:
        self.slides: list[Slide] = []
        self.heading = self.sitting = ""
        self.deeper = 0  # the level of the heading that began a part that can be left out,
        self.parts = 0  # and how many there were
        self.notes: list[str] = []  # of cells that show nothing; they go to the next slide

    def begin(self, kind: str = "plain", panel: int | None = None) -> Slide:
        last = self.slides[-1] if self.slides else None
        if last is not None and last.kind == "plain" and not last.blocks:  # only a heading so far
            last.kind, last.panel = kind, panel
        else:
            self._add(kind, panel)
        now = self.slides[-1]
        now.notes += self.notes
        self.notes = []
        return now

    def head(self, heading: Heading) -> None:
        is_sitting = SITTING.match(heading.html) is not None
        if is_sitting:
            self.sitting = unescape(re.sub(r"<[^>]+>", "", heading.html))
        if heading.level <= (self.deeper or 9):
            self.deeper = heading.level if DEEPER.match(heading.html) else 0
            self.parts += self.deeper > 0
        self.heading = heading.html
        if self.deeper == heading.level:  # the slide has a mark in place of the word
            name = DEEPER.sub("", heading.html, count=1)
            self.heading = name[:1].upper() + name[1:]
        self._add("title" if heading.level == 1 or is_sitting else "plain")

    def _add(self, kind: str, panel: int | None = None) -> None:
        deeper = self.parts if self.deeper else 0
        self.slides.append(Slide(self.heading, kind=kind, panel=panel, sitting=self.sitting, deeper=deeper))

    def text(self, parts: Iterable[Block | Heading]) -> None:
        """A cell of Markdown."""
        fresh = True
        for part in parts:
            if isinstance(part, Heading):
                self.head(part)
                fresh = False
                continue
            if fresh:
                self.begin()
                fresh = False
            only_text = all(block.kind in ("text", "list") for block in (*self.slides[-1].blocks, part))
            self.add(part, markup.ROOM * (TEXT_ROOM if only_text else 1))

    def add(self, block: Block, room: float = markup.ROOM) -> None:
        """To the slide in progress if it has the room, else to a next one."""
        now = self.slides[-1] if self.slides else self.begin()
        full = now.blocks and now.height + block.height > room
        if full or now.kind not in ("plain", "title") or (now.kind == "title" and block.kind != "text"):
            now = self.begin()
        now.blocks.append(block)

    def own(self, kind: str, block: Block, notes: Iterable[str] = (), panel: int | None = None) -> Slide:
        now = self.begin(kind, panel)
        now.blocks.append(block)
        now.notes += [note for note in notes if note]
        return now

    def note(self, text: str) -> None:
        """For the slide that this cell shows something on, else for the next."""
        if text.strip():
            self.notes.append(text.strip())


def deck_of(notebook: Path) -> Deck:
    """Raises WorkbenchError for a file that is no notebook, an output with a script, and a notebook without text."""
    from workbench.site.pages import for_reading

    read = for_reading(read_json_object(notebook, "notebook"), notebook.name)
    cells = read["cells"]
    sources = [_joined(cell["source"]) for cell in cells]
    live = live_cells([s if cell["cell_type"] == "code" else "" for s, cell in zip(sources, cells)])
    taken: set[int] = set()
    making, left_out = _Making(), False
    for at, (cell, source) in enumerate(zip(cells, sources)):
        if cell["cell_type"] == "markdown":
            left_out = re.match(rf"#+ {GUESSES}$", source.partition("\n")[0]) is not None
            making.text([] if left_out else markup.blocks_of(source))
        elif left_out:
            continue
        elif cell["cell_type"] == "code" and at not in taken:
            if at in live:
                _panel(making, cells, sources, at, sorted(live).index(at), taken)
            else:
                _code(making, cell, source)
    if making.slides and making.notes:
        making.slides[-1].notes += making.notes
    slides = [one for one in making.slides if one.blocks or one.kind == "title"]
    if not slides:
        raise WorkbenchError(f"{notebook} has nothing to show")
    title = unescape(re.sub(r"<[^>]+>", "", slides[0].heading))
    return Deck(title, slides, [live[at] for at in sorted(live)])


def _panel(making: _Making, cells: list[dict], sources: list[str], at: int, number: int, taken: set[int]) -> None:
    """A panel's slide, with the picture that was recorded of it; the cell that recorded it is used up."""
    panel = panel_of(sources[at])
    assert panel is not None
    still = next(iter(_pictures(cells[at])), None)
    for later in range(at + 1, len(cells)):
        if cells[later]["cell_type"] == "markdown" or panel_of(sources[later]):
            break
        if panel.name in SNAPSHOT.findall(sources[later]):
            still = next(iter(_pictures(cells[later])), still)
            taken.add(later)
            making.note(sources[later])
            break
    html, words = still if still else ('<p class="none">No result was recorded.</p>', "")
    making.own("panel", Block("panel", html, markup.ROOM), [f"In words: {words}" if words else "", panel.code], number)


def _code(making: _Making, cell: dict[str, Any], source: str) -> None:
    """A cell of code: its source unless it is hidden, and what it showed."""
    if SUMMARY.search(source):
        return
    question = asked(source)
    if question is not None:
        _question(making, cell, question)
        return
    hidden = cell["metadata"].get("jupyter", {}).get("source_hidden", False) or COMPARES.search(source)
    shown, notes = ("", source) if hidden else parted(source)
    making.note(notes)
    before = len(making.slides)
    outputs = _outputs(cell)
    fresh = [] if not shown.strip() else markup.code(shown)
    whole = sum(block.height for block in (*fresh, *(b for b, _ in outputs if b.kind != "picture")))
    now = making.slides[-1] if making.slides else None
    if now is not None and now.blocks and now.height + whole > markup.ROOM >= whole:
        making.begin()  # code and what it shows stay together
    for block in fresh:
        making.add(block)
    for block, words in outputs:
        if block.kind == "picture":
            making.own("picture", block, [f"In words: {words}"])
        else:
            making.add(block)
    if (fresh or outputs) and making.notes:
        making.slides[max(before - 1, 0) if len(making.slides) == before else -1].notes += making.notes
        making.notes = []


def _question(making: _Making, cell: dict[str, Any], given: dict[str, Any]) -> None:
    words = next((_joined(o["data"].get("text/plain", "")) for o in cell["outputs"] if "data" in o), "")
    parts = [f"<p>{escape(words)}</p>"]
    if given.get("choices"):
        parts.append("<ul>" + "".join(f"<li>{escape(str(one))}</li>" for one in given["choices"]) + "</ul>")
    elif given.get("unit"):
        parts.append(f'<p class="unit">… {escape(str(given["unit"]))}</p>')
    making.own("question", Block("question", "".join(parts), 400))


def parted(source: str) -> tuple[str, str]:
    """(what is shown of a visible cell, what is noted): asserts are noted, and calls that wait for a guess are left
    out."""
    source = LEFT_OUT.sub("", source)
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return source, ""
    lines = source.split("\n")
    noted: list[str] = []
    for statement in reversed(statements):
        if isinstance(statement, ast.Assert):
            first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
            noted[:0] = lines[first:last]
            del lines[first:last]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n"), "\n".join(noted)


def _outputs(cell: dict[str, Any]) -> list[tuple[Block, str]]:
    """What a cell showed, each with its words where it is a picture."""
    made: list[tuple[Block, str]] = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        if output.get("output_type") == "stream" and output.get("name") == "stdout":
            made += [(block, "") for block in markup.printed(_joined(output["text"]))]
        elif "image/png" in data:
            made += [(Block("picture", html, markup.ROOM), words) for html, words in _pictures({"outputs": [output]})]
        elif "text/markdown" in data:
            made += [(block, "") for block in markup.markdown_output(_joined(data["text/markdown"]))]
        elif "text/html" in data:
            html = _without_example(_joined(data["text/html"]))
            made += [(markup.html_output(html), "")] if STANDS_IN not in html else []
        elif "text/plain" in data:
            made += [(block, "") for block in markup.printed(_joined(data["text/plain"]))]
    return made


def _without_example(html: str) -> str:
    """A comparison as the hall sees it: what was predicted and measured. The notebook's own guess is an example."""
    if "The example guess" not in html:
        return html
    html = EXAMPLE_ROW.sub("", EXAMPLE.sub("", html))
    return VERDICT.sub("", html)


def _pictures(cell: dict[str, Any]) -> list[tuple[str, str]]:
    """(HTML, words) of the pictures that a cell stored."""
    made = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            words = output.get("metadata", {}).get("image/png", {}).get("alt") or _joined(data.get("text/plain", ""))
            png = "".join(_joined(data["image/png"]).split())
            made.append((f'<img alt="{escape(words)}" src="data:image/png;base64,{png}">', words))
    return made


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)
