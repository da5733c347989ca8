"""Markdown, code and printed text as the HTML of slides, and about how much room each takes. Formulas are MathML."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape, unescape
from typing import Any, Literal

Kind = Literal["text", "list", "table", "code", "printed", "picture", "panel", "question"]

# Of a slide of 1920 × 1080, in pixels; all of it is scaled with the window.
ROOM = 850  # the height under the heading
TEXT_LINE, TEXT_COLUMNS = 54, 84  # prose: 40 px
CODE_LINE, CODE_COLUMNS = 34, 116  # code and what it prints: 25 px
ROW = 50  # of a table
GAP = 26  # between blocks
LONG = 330  # characters of a paragraph; a longer one is parted between sentences
LOCAL_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)[^)]*\)")
SENTENCE = re.compile(r"(?<=[.!?])(?=(?:\s+)(?:[A-Z\"“*`(\[]))")
TAG = re.compile(r"<[^>]+>")


@dataclass(frozen=True)
class Block:
    """A piece of a slide. height: about what it takes, in pixels of 1920 × 1080."""

    kind: Kind
    html: str
    height: int


@dataclass(frozen=True)
class Heading:
    """A heading in Markdown: its level, 1 for a part of the lecture."""

    level: int
    html: str


def blocks_of(markdown: str) -> list[Block | Heading]:
    """A cell of Markdown, in order: its headings, paragraphs, lists, tables and fenced texts. Links to files of the
    course are only text on a slide."""
    text = LOCAL_LINK.sub(r"\1", markdown)
    lines = text.split("\n")
    made: list[Block | Heading] = []
    parser = _parser()
    tokens = parser.parse(text)
    for token in tokens:
        if token.level or token.map is None or token.nesting < 0:
            continue
        source = "\n".join(lines[token.map[0] : token.map[1]]).strip()
        if token.type == "heading_open":
            made.append(Heading(int(token.tag[1]), parser.renderInline(source.lstrip("# "))))
        elif token.type == "paragraph_open":
            made += [_text(parser, part) for part in sentences(source)]
        elif token.type == "fence":
            made += printed(token.content)
        elif token.type == "table_open":
            made.append(_html("table", parser.render(source)))
        elif token.type in ("bullet_list_open", "ordered_list_open"):
            html = parser.render(source)
            items = [_plain(item) for item in html.split("<li>")[1:]]
            made.append(Block("list", html, sum(_lines(item) * TEXT_LINE + 12 for item in items) + GAP))
        else:  # a formula or a quotation
            made.append(Block("text", parser.render(source), 3 * TEXT_LINE))
    return made


def sentences(paragraph: str) -> list[str]:
    """A paragraph as one or more of at most about LONG characters, parted between sentences. What has a formula stays
    whole."""
    joined = " ".join(paragraph.split())
    if len(joined) <= LONG or "$" in joined:
        return [paragraph]
    parts = [""]
    for sentence in SENTENCE.split(joined):
        if parts[-1] and len(parts[-1]) + len(sentence) > LONG:
            parts.append("")
        parts[-1] = f"{parts[-1]} {sentence.strip()}".strip()
    return parts if all(part.count("`") % 2 == 0 and part.count("**") % 2 == 0 for part in parts) else [paragraph]


def markdown_output(text: str) -> list[Block]:
    """What a cell wrote in Markdown; a heading there is a paragraph."""
    return [Block("text", f"<p>{one.html}</p>", TEXT_LINE) if isinstance(one, Heading) else one for one in
            blocks_of(text)]  # fmt: skip


def html_output(html: str) -> Block:
    """What a cell wrote in HTML: mostly a table or a sentence."""
    return _html("table" if "<table" in html else "text", html)


def printed(text: str) -> list[Block]:
    """Printed text and diagrams, in parts that fit on a slide."""
    lines = text.rstrip("\n").split("\n")
    return [
        Block("printed", f'<pre class="printed">{escape(chr(10).join(part))}</pre>', _code_height(part))
        for part in _parts(lines)
        if any(line.strip() for line in part)
    ]


def code(source: str) -> list[Block]:
    """Python in colours, in parts that fit on a slide: parted between statements where there is such a place."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    made = []
    for part in _parts(source.strip("\n").split("\n")):
        html = highlight("\n".join(part), PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).rstrip("\n")
        made.append(Block("code", f'<pre class="code">{html}</pre>', _code_height(part)))
    return made


def colours_of_code() -> str:
    """The style sheet of `code`, light and dark."""
    from pygments.formatters import HtmlFormatter

    made = []
    for scheme, style in (("light", "xcode"), ("dark", "github-dark")):
        rules = HtmlFormatter(style=style).get_style_defs(f':root[data-scheme="{scheme}"] .code').split("\n")
        made += [rule for rule in rules if ".code ." in rule]
    return "\n".join(made)


def _html(kind: Kind, html: str) -> Block:
    if kind == "table":
        rows = html.count("<tr") + html.count("<caption")
        long = max((len(_plain(row)) for row in html.split("<tr")[1:]), default=0)
        return Block(kind, html, rows * ROW * (1 + long // 130) + GAP)
    return Block(kind, html, _lines(_plain(html)) * TEXT_LINE + GAP + 60 * html.count("<svg"))


def _text(parser: Any, source: str) -> Block:
    html = parser.render(source)
    return Block("text", html, _lines(_plain(TAG.sub("", html))) * TEXT_LINE + GAP)


def _parts(lines: list[str]) -> list[list[str]]:
    """At most as many lines as a slide has; the cut is before a line that begins at the left."""
    longest = (ROOM - GAP) // CODE_LINE
    parts: list[list[str]] = []
    rest = lines
    while len(rest) > longest:
        good = [at for at in range(longest // 2, longest) if rest[at][:1].strip() and not rest[at - 1].startswith("@")]
        cut = (good or [longest])[-1]
        parts.append(rest[:cut])
        rest = rest[cut:]
    return [*parts, rest]


def _code_height(lines: Sequence[str]) -> int:
    return sum(1 + max(0, len(line) - 1) // CODE_COLUMNS for line in lines) * CODE_LINE + GAP + 20


def _lines(text: str) -> int:
    return sum(1 + len(line) // TEXT_COLUMNS for line in text.strip().split("\n")) if text.strip() else 0


def _plain(html: str) -> str:
    return " ".join(unescape(TAG.sub(" ", html)).split())


@functools.cache
def _parser() -> Any:
    from latex2mathml.converter import convert
    from markdown_it import MarkdownIt
    from mdit_py_plugins.dollarmath import dollarmath_plugin

    def formula(tex: str, how: dict[str, Any]) -> str:
        return convert(tex, display="block" if how["display_mode"] else "inline")

    return MarkdownIt("commonmark", {"html": False}).enable("table").use(dollarmath_plugin, renderer=formula)
