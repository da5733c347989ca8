"""The loop on the page of lab 06 has the target's distribution, and the enumeration that says so sees what is wrong."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from workbench.speculation import theory

PAGE = Path(__file__).parents[3] / "notebooks" / "source" / "06_speculative_sampling.py"


@functools.cache
def parts_of_the_page() -> dict[str, str]:
    """{name: source} of the functions and classes that the lecture defines."""
    text = PAGE.read_text(encoding="utf-8")
    defined = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: ast.get_source_segment(text, node) or "" for node in defined}


def is_exact(old: str = "", new: str = "", *, K: int = 2, length: int = 3) -> bool:
    """Whether the loop, with `old` replaced by `new`, writes texts of three tokens as the target does, in fractions."""
    page, names = parts_of_the_page(), {"functools": functools, "theory": theory}
    assert old in page["speculate"]
    for source in (page["made_up"], page["Tabled"], page["speculate"].replace(old, new)):
        exec(source, names)
    made_up, tabled, speculate = names["made_up"], names["Tabled"], names["speculate"]
    p, q = made_up(1, 3), made_up(5, 3)
    outcomes = theory.enumerate_outcomes(
        lambda draws: tuple(speculate(tabled(p), tabled(q), [], length, K, draws)[0][:length])
    )
    return outcomes == theory.distribution_of_target(p, length)


@pytest.mark.parametrize("K", [1, 2])
def test_the_loop_of_the_page_writes_what_the_target_writes(K):
    assert is_exact(K=K)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(p[n] - q[n]).clip(min=0)", "p[n]"),
        ("p[n] if n == K", "p[n - 1] if n == K"),
        ("draws.accept(p[n][drafted[n]] / q[n][drafted[n]])", "p[n][drafted[n]] >= q[n][drafted[n]]"),
        ("p[n][drafted[n]] / q", "p[0][drafted[n]] / q"),
        ("*drafted[:n], draws", "*drafted[:n], *drafted[n : n + 1], draws"),
    ],
)
def test_what_is_wrong_with_it_is_seen(old, new):
    assert not is_exact(old, new)
