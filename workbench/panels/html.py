"""HTML for panels. Every text that a user or a model made goes through `visible` or `escape`: it shows, it
never acts."""

from __future__ import annotations

import base64
import html
import unicodedata
from collections.abc import Sequence

LONGEST_SHOWN = 4_000  # characters of one text


def visible(text: str, *, keep: str = "") -> str:
    """The text with every control, format (bidi, zero-width) and unassigned character spelled out.

    Characters in `keep` (line ends in a running text) stay. Not HTML-escaped yet.

    >>> visible("a\\x1b[31m\\u202eb")
    'a\\\\x1b[31m\\\\u202eb'
    """
    return "".join(
        c if c in keep or unicodedata.category(c)[0] != "C" else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text
    )


def token(text: str) -> str:
    """A token's text on one line, its spaces and line ends visible: ' def\\n' -> '␣def⏎'. Not escaped yet."""
    return visible(text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")) or "(empty)"


def escape(text: object) -> str:
    """Inert HTML that shows the text, cut at LONGEST_SHOWN characters."""
    text = str(text)
    cut = text[:LONGEST_SHOWN] + (f" … ({len(text):,} characters)" if len(text) > LONGEST_SHOWN else "")
    return html.escape(visible(cut, keep="\n"), quote=True)


def paragraph(text: str, *, role: str = "", style: str = "") -> str:
    extra = f' role="{role}" aria-live="polite"' if role else ""
    look = f"font-size:16px;line-height:1.45;max-width:62em;white-space:pre-line;{style}"
    return f'<div{extra} class="workbench-text" style="{look}">{escape(text)}</div>'


def running_text(parts: Sequence[tuple[str, str]], caption: str) -> str:
    """Model text as it was written, in a fixed-width box: [(text, css), …] one after the other."""
    spans = "".join(f'<span style="{css}">{escape(text)}</span>' for text, css in parts)
    return (
        f'<div style="line-height:1.45">{escape(caption)}</div>'
        '<pre style="white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;max-height:16em;'
        "overflow-y:auto;border:1px solid rgba(128,128,128,.45);border-radius:4px;padding:.5em .7em;"
        f'margin:.3em 0;font-size:16px;line-height:1.4;color:inherit;background:none">{spans}</pre>'
    )


def table(header: Sequence[str], rows: Sequence[Sequence[object]], caption: str) -> str:
    """A table that a screen reader can walk: caption, column heads, a head for each row."""
    cell = "padding:.15em .8em .15em 0;text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap"
    line = "border-bottom:1px solid rgba(128,128,128,.35)"
    # long heads make no wide table
    wraps = cell.replace("nowrap", "normal") + ";vertical-align:bottom;max-width:9em"
    head = "".join(f'<th scope="col" style="{wraps};{line};font-weight:600">{escape(h)}</th>' for h in header)
    body = "".join(
        f'<tr><th scope="row" style="{cell};font-weight:400">{escape(row[0])}</th>'
        + "".join(f'<td style="{cell}">{escape(value)}</td>' for value in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;font-size:16px;line-height:1.5;'
        f'color:inherit;background:none"><caption style="text-align:left;padding:.2em 0;color:inherit">'
        f"{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def image(svg: bytes, alt: str) -> str:
    """The picture, as wide as the page, with its alternative text."""
    return f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}">'
