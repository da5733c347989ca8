"""The picture on the page: the names under the pointer, and where; an SVG that is the same each time and does nothing;
words of which none is lost."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle
from picture_claims import picture_problems

from workbench.panels import html, plots, style
from workbench.panels.stage import areas_of, tell
from workbench.panels.words import first_lines

HOSTILE = "a\x00\x1b]0;title\x07\n\ud800 <script>alert(1)</script> & \u202e"


def drawn(height: float = 4.0):
    figure, (axes,) = style.new_figure(height=height)
    axes.set(xlim=(0, 10), ylim=(0, 10))
    return figure, axes


def hover_at(figure, axes, x: float, y: float) -> str:
    """What the page shows of the areas under a place given in data: the smallest one's text."""
    areas = areas_of(figure)
    px, py = axes.transData.transform((x, y))
    px, py = px / figure.bbox.width, 1 - py / figure.bbox.height
    under = [a for a in areas if a.left <= px <= a.right and a.top <= py <= a.bottom]
    under.sort(key=lambda a: (a.right - a.left) * (a.bottom - a.top))
    return under[0].text if under else ""


def test_what_is_under_the_pointer_is_named_is_under_it_the_smallest_first():
    figure, axes = drawn()
    plots.cell(axes, 1, 1, 8, 8, style.CACHE, hover="the pool")
    plots.cell(axes, 2, 2, 1, 1, style.CACHE, hover="block 3:\n  held by A")
    [line] = axes.plot([5, 6], [5, 7])
    tell(line, "first point", "second point")
    style.svg(figure)
    assert hover_at(figure, axes, 2.5, 2.5) == "block 3: held by A"
    assert hover_at(figure, axes, 8, 8) == "the pool"
    assert hover_at(figure, axes, 5, 5) == "first point" and hover_at(figure, axes, 6, 7) == "second point"
    assert hover_at(figure, axes, 9.5, 9.5) == ""


def test_every_part_of_a_collection_is_named():
    figure, axes = drawn()
    stems = axes.vlines([1, 3], 0, [4, 8], linewidth=6)
    tell(stems, "position 0", "position 1")
    boxes = PatchCollection([Rectangle((5, 5), 1, 1), Rectangle((7, 5), 1, 1)])
    tell(boxes, "place 0", "place 1")
    axes.add_collection(boxes)
    style.svg(figure)
    assert [hover_at(figure, axes, *at) for at in ((1, 2), (3, 7), (5.5, 5.5), (7.5, 5.5))] == [
        "position 0",
        "position 1",
        "place 0",
        "place 1",
    ]
    assert hover_at(figure, axes, 1, 7) == ""


def test_areas_lie_in_the_picture_as_shares_of_it():
    figure, axes = drawn()
    plots.cell(axes, 0, 0, 10, 10, style.CACHE, hover="all of the axes")
    [area] = areas_of(figure)
    box = axes.get_position()
    assert (area.left, area.right) == (pytest.approx(box.x0, abs=1e-3), pytest.approx(box.x1, abs=1e-3))
    assert (area.top, area.bottom) == (pytest.approx(1 - box.y1, abs=1e-3), pytest.approx(1 - box.y0, abs=1e-3))


def test_the_same_figure_gives_the_same_svg_and_it_holds_nothing_that_acts():
    def picture() -> bytes:
        figure, axes = drawn()
        plots.cell(axes, 1, 1, 2, 2, style.CACHE, "7", hover=html.token(HOSTILE))
        axes.plot([1, 2], [3, 4], marker="o", label="a line")
        axes.fill_between([1, 2], [3, 4])
        style.legend(axes)
        style.write(axes, 1, 5, html.token(HOSTILE))
        return style.svg(figure)

    text = picture().decode()
    assert text.encode() == picture()
    names = set(re.findall(r"<([A-Za-z][\w:-]*)", text))
    acting = {"script", "foreignObject", "a", "iframe", "image", "animate", "set", "handler"}
    assert names and not names & acting
    assert not re.search(r"\son\w+=|javascript:|<!ENTITY", text, re.IGNORECASE)
    assert not [link for link in re.findall(r'xlink:href="([^"]*)"', text) if not link.startswith("#")]


def test_a_name_under_the_pointer_is_no_part_of_the_svg():
    figure, axes = drawn()
    plots.cell(axes, 1, 1, 2, 2, style.CACHE, hover="a text <b> of a model")
    assert b"of a model" not in style.svg(figure)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=1200), st.integers(1, 6))
def test_words_that_are_folded_lose_none_and_the_first_part_is_never_empty(text, lines):
    first, rest = first_lines(text, lines)
    assert f"{first} {rest}".split() == text.split()
    assert bool(first) == bool(text.strip())


def test_the_first_words_are_whole_sentences_of_so_many_lines():
    sentence = "A block that two texts share is copied before one of them writes into it."
    first, rest = first_lines("\n".join([sentence] * 3 + [f"{sentence} {sentence}"]), lines=2)
    assert first == f"{sentence}\n{sentence}"
    assert rest == f"{sentence}\n{sentence} {sentence}"


@pytest.mark.parametrize(
    ("draw", "problem"),
    [
        (lambda axes: style.label(axes, title="a title that is far too long for the plot under it " * 3), "is cut"),
        (lambda axes: style.write(axes, 1, 1, "small", fontsize=7), "is small"),
        (lambda axes: [style.write(axes, 3, 3, text) for text in ("one label", "another")], "overlap"),
        (lambda axes: (axes.plot([1, 2], [9.6, 9.6], label="a curve"), style.legend(axes, loc="upper left")), "covers"),
        (lambda axes: (axes.plot([3.2], [3.1], "o"), style.write(axes, 3, 3, "a name")), "is written over points"),
        (lambda axes: axes.figure.add_axes((0.02, 0.2, 0.2, 0.5)), "lies in another plot"),
    ],
)
def test_a_picture_that_cannot_be_read_in_a_hall_is_found(draw, problem):
    figure, axes = drawn()
    assert picture_problems(figure) == []
    draw(axes)
    wanted = "points, below" if problem == "is small" else problem
    assert any(wanted in areas for areas in picture_problems(figure))
