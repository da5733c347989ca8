"""A lab on a page to print: its question, what to take along, what each section says first, its formulas, words,
exercises and reading. Deeper parts are left out.

Everything is taken from the lecture's own notebook, so it says what the lecture says. Two pages of A4 at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError, unknown
from workbench.files import read_json_object

READING = "Further reading"
TAKEAWAYS = "Five things to take along"
# headings whose text a page does not need, or has elsewhere
LEFT_OUT = ("Predict", "Your guesses", "The bridge", "The next question", "Exercises", READING, TAKEAWAYS)
DEEPER = "Deeper: "
SITTING = re.compile(r"Sitting \d+: ")
LONGEST = 230  # characters of what a section says first
LONG_FORMULA = 100  # characters of TeX: what is longer is set smaller, to fit its column
HEADING = re.compile(r"(#{1,4}) (.+)")
FORMULA = re.compile(r"\$\$.+?\$\$", re.S)
WORD = re.compile(r"\[\*\*([^*\]]+)\*\*\]\([^)]*glossary\.md")
ROW = re.compile(r"^\| (.+) \|$", re.M)
STYLE = """
@page { size: A4; margin: 10mm }
body { font: 8.8pt/1.26 sans-serif; color: #111; background: #fff; margin: 0 auto; max-width: 190mm }
main { columns: 2; column-gap: 7mm }
h1 { font-size: 15pt; margin: 0 0 1mm } h2 { font-size: 9.6pt; margin: 2.2mm 0 .3mm; break-after: avoid }
p, ul { margin: 0 0 .8mm } ul { padding-left: 4mm } li { break-inside: avoid }
.question { font-size: 10.4pt; border-bottom: .3mm solid #888; padding-bottom: 1.5mm; margin-bottom: 1.5mm }
.formula { overflow-x: auto; font-size: 8.6pt; margin: .8mm 0; break-inside: avoid }
.wide { font-size: 6.2pt }
.take { border: .3mm solid #888; padding: 1mm 2mm; margin-bottom: 1.5mm } .take ol { margin: 0; padding-left: 5mm }
.take h2 { margin-top: 0 }
.part { border-top: .2mm solid #aaa; margin-top: 2mm } a { color: inherit }
"""


@dataclass
class Section:
    """heading: as Markdown. says: its first sentences, as Markdown; "" of a sitting, whose first recall the one before.
    points: the list that they announce. formulas: TeX without the dollars."""

    heading: str
    says: str = ""
    points: list[str] = field(default_factory=list)
    formulas: list[str] = field(default_factory=list)

    @property
    def begins_a_sitting(self) -> bool:
        return SITTING.match(self.heading) is not None


@dataclass(frozen=True)
class Handout:
    """What a page shows, all texts in Markdown. takeaways: [] of a lecture without them. words: each with its
    definition. exercises: their titles."""

    title: str
    question: str
    takeaways: list[str]
    sections: list[Section]
    words: list[tuple[str, str]]
    exercises: list[str]
    reading: list[str]


def lectures_of(course: Path) -> dict[str, Path]:
    """The labs of a course by the stem of their notebook: those that have exercises."""
    names = sorted(file.stem for file in (course / "exercises").glob("*.ipynb"))
    return {name: course / "notebooks" / f"{name}.ipynb" for name in names}


def handout(course: Path, name: str) -> Handout:
    """Raises WorkbenchError for a lab that the course does not have, and for a notebook that is no lecture."""
    lectures = lectures_of(course)
    if name not in lectures:
        raise unknown("lab", name, lectures)
    title, *cells = _markdown(lectures[name])
    heading, _, rest = title.partition("\n")
    if not (match := HEADING.fullmatch(heading.strip())):
        raise WorkbenchError(f"{lectures[name]} does not begin with a heading, so it is no lecture")
    text = "\n\n".join(cells)
    return Handout(
        title=match[2],
        question=" ".join(rest.strip().split("\n\n")[0].split()),
        takeaways=_items(text.partition(f"# {TAKEAWAYS}\n")[2]),
        sections=[one for one in sections(text) if one.says or one.formulas or one.begins_a_sitting],
        words=_defined(WORD.findall("\n".join((rest, text))), course / "docs" / "glossary.md"),
        exercises=_titles(course / "exercises" / f"{name}.ipynb"),
        reading=_items(text.partition(f"# {READING}\n")[2]),
    )


def sections(text: str) -> list[Section]:
    """Of Markdown, in order: each with its first paragraph of prose, cut at a sentence."""
    made: list[Section] = []
    deeper = 0  # the level of the heading that began what is left out
    for block in re.split(r"^(?=#{1,4} )", text, flags=re.M):
        heading, _, body = block.partition("\n")
        match = HEADING.fullmatch(heading.strip())
        if match is None or (deeper and len(match[1]) > deeper):
            continue
        deeper = len(match[1]) if match[2].startswith(DEEPER) else 0
        if deeper or any(match[2].startswith(word) for word in LEFT_OUT):
            continue
        if SITTING.match(match[2]):
            made.append(Section(match[2]))
            continue
        formulas = [" ".join(found[2:-2].split()) for found in FORMULA.findall(body)]
        parts = [part for part in re.split(r"\n\s*\n", FORMULA.sub("\n\n", body)) if part.strip()]
        first = next((at for at, part in enumerate(parts) if _is_prose(part)), None)
        if first is None:
            made.append(Section(match[2], formulas=formulas))
            continue
        paragraph, behind = " ".join(parts[first].split()), "".join(parts[first + 1 : first + 2])
        points = _items(behind) if paragraph.endswith(":") else []
        made.append(Section(match[2], first_sentences(paragraph), points, formulas))
    return made


def first_sentences(text: str) -> str:
    """As many whole sentences as LONGEST characters allow, one at least."""
    ends = [match.end() for match in re.finditer(r"[.?!:](?=\s|$)", text)] or [len(text)]
    fitting = [end for end in ends if end <= LONGEST]
    said = text[: (fitting or ends)[-1 if fitting else 0]]
    return said[:-1] + "." if said.endswith(":") else said


def lines_of(tex: str) -> list[str]:
    """A formula for a narrow column: what stands side by side, one below the other."""
    if "\\begin" in tex:
        return [tex]
    return [line.strip().rstrip(",") for line in re.split(r"\\q?quad(?![a-z])", tex) if line.strip(" ,.")]


def page(made: Handout) -> str:
    """One self-contained page of HTML; formulas are MathML."""
    from latex2mathml.converter import convert
    from markdown_it import MarkdownIt
    from mdit_py_plugins.dollarmath import dollarmath_plugin

    markdown = MarkdownIt("commonmark", {"html": False}).use(
        dollarmath_plugin, renderer=lambda tex, how: convert(tex, display="block" if how["display_mode"] else "inline")
    )

    def inline(text: str) -> str:
        return markdown.renderInline(_without_local_links(text))

    parts = [f"<h1>{inline(made.title)}</h1>", f'<p class="question">{inline(made.question)}</p>']
    if made.takeaways:
        rows = "".join(f"<li>{inline(one)}</li>" for one in made.takeaways)
        parts.append(f'<div class="take"><h2>{TAKEAWAYS}</h2><ol>{rows}</ol></div>')
    parts.append("<main>")
    for one in made.sections:
        heading = '<h2 class="part">' if one.begins_a_sitting else "<h2>"
        parts.append(f"{heading}{inline(one.heading)}</h2>")
        parts += [f"<p>{inline(one.says)}</p>"] if one.says else []
        parts += [f"<ul>{''.join(f'<li>{inline(point)}</li>' for point in one.points)}</ul>"] if one.points else []
        parts += [
            f'<div class="formula{" wide" * (len(line) > LONG_FORMULA)}">{convert(line, display="block")}</div>'
            for tex in one.formulas
            for line in lines_of(tex)
        ]
    listed = (
        ("Words", [f"**{word}**: {meaning}" for word, meaning in made.words]),
        ("Exercises", made.exercises),
        (READING, made.reading),
    )
    for name, items in listed:
        if items:
            rows = "".join(f"<li>{inline(item)}</li>" for item in items)
            parts.append(f'<h2 class="part">{name}</h2><ul>{rows}</ul>')
    head = f'<meta charset="utf-8"><title>{escape(made.title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</main></body></html>\n'


def _markdown(notebook: Path) -> list[str]:
    """The texts of its Markdown cells."""
    cells: Any = read_json_object(notebook).get("cells")
    if not isinstance(cells, list):
        raise WorkbenchError(f"{notebook} is no notebook: it has no cells")
    texts = ["".join(cell.get("source", "")) for cell in cells if cell.get("cell_type") == "markdown"]
    if not texts:
        raise WorkbenchError(f"{notebook} has no text")
    return texts


def _is_prose(part: str) -> bool:
    """No table, list, code, quote or comment."""
    return bool(part.strip()) and not re.match(r"\s*(\||[-*] |\d+\. |```|>|<|\* )", part) and "```" not in part


def _items(text: str) -> list[str]:
    """Of a list in Markdown, each in one line."""
    blocks = re.split(r"^(?:- |\d+\. )", text.split("\n# ")[0], flags=re.M)[1:]
    return [" ".join(block.split("\n\n")[0].split()) for block in blocks]


def _titles(exercises: Path) -> list[str]:
    return re.findall(r"^## \d+\. (.+)$", "\n".join(_markdown(exercises)), re.M)


def _defined(words: Iterable[str], glossary: Path) -> list[tuple[str, str]]:
    """Those that the glossary has, in the order in which they come, each once."""
    known: dict[str, str] = {}
    for row in ROW.findall(glossary.read_text("utf-8")):
        word, *cells = (cell.strip() for cell in row.split("|"))
        known.setdefault(word.lower(), cells[1 if len(cells) > 2 else 0])  # of four columns the second has the unit
    spelled = {word.lower(): word for word in reversed([" ".join(word.split()) for word in words])}
    return [(spelled[word], known[word]) for word in reversed(spelled) if word in known]


def _without_local_links(text: str) -> str:
    """A page on paper has no notebook beside it."""
    return re.sub(r"\[([^\]]+)\]\((?!https?://)[^)]*\)", r"\1", text)
