"""Slides as HTML: the parts of a page, and the whole of one that needs no other file and no server."""

from __future__ import annotations

import functools
import json
from html import escape
from pathlib import Path

from workbench.presenting.deck import Deck, Slide
from workbench.presenting.markup import colours_of_code

STATIC = Path(__file__).parent / "static"


def body_of(deck: Deck, *, live: bool) -> str:
    """All slides, one `<section>` each, with their notes. live: a panel's slide has a place for the panel, too."""
    return "\n".join(_section(slide, live) for slide in deck.slides)


def head_of(deck: Deck) -> str:
    """Title and style sheet."""
    return f'<meta charset="utf-8"><title>{escape(deck.title)}</title><style>{style()}</style>'


def page(deck: Deck) -> str:
    """One self-contained page: pictures within, panels as recorded, no request to anywhere."""
    slides = f'<main id="slides">{body_of(deck, live=False)}</main><script>{script()}</script>'
    return f'<!doctype html><html lang="en"><head>{head_of(deck)}</head><body>{slides}</body></html>\n'


@functools.cache
def style() -> str:
    return f"{(STATIC / 'slides.css').read_text(encoding='utf-8')}\n{colours_of_code()}"


@functools.cache
def script() -> str:
    return (STATIC / "slides.js").read_text(encoding="utf-8")


def _section(slide: Slide, live: bool) -> str:
    shown = "".join(f'<div class="block {block.kind}">{block.html}</div>' for block in slide.blocks)
    if slide.kind == "panel" and live:
        assert slide.panel is not None
        # the server puts what the cell shows into the element with the cell's number
        place = f'<div class="live" cell-index="{slide.panel + 1}"><div></div></div>'
        shown = f'<div class="recorded">{shown}</div>{place}'
    notes = json.dumps(slide.notes, ensure_ascii=False).replace("<", "\\u003c")
    tag = "h1" if slide.kind == "title" else "h2"
    deeper = ' <span class="mark">deeper</span>' if slide.deeper else ""
    part = f'data-sitting="{escape(slide.sitting)}" data-deeper="{slide.deeper}"'
    return (
        f'<section class="slide {slide.kind}{" deeper" * bool(slide.deeper)}" {part}>'
        f"<header><{tag}>{slide.heading}</{tag}>{deeper}</header>"
        f'<div class="body">{shown}</div><script type="application/json" class="notes">{notes}</script></section>'
    )
