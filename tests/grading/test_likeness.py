"""Claims about the report on likeness: copies are shown however they were renamed, other right answers are not, and
what all were given does not count."""

from __future__ import annotations

import re
from pathlib import Path

import hostile_submissions as toy
import pytest
from test_grading_class import write

from workbench.checks import exercise_sets
from workbench.checks.mistakes import answers_in
from workbench.grading.likeness import (
    MAX_SOURCE,
    MAX_TOKENS,
    MIN_TOKENS,
    RUN,
    WINDOW,
    Likeness,
    Text,
    compare,
    pairs_of,
    report_html,
    run_hashes,
    tokens_of,
    winnowed,
)

ROOT = Path(__file__).parents[2]
LAB = "03_kv_cache"
SOURCES = answers_in(ROOT / "solutions" / f"{LAB}.py")
COPIED = SOURCES["kv-append"]


def notebook(**answers: str) -> bytes:
    cells = [toy.cell(grade_id.replace("_", "-"), source) for grade_id, source in answers.items()]
    return toy.notebook(*cells)


def renamed(source: str) -> str:
    """Other names, spaces, comments and quotes; the same program."""
    for name in ("sequence", "length", "first", "scores", "weights", "seen_keys", "seen_values", "keys", "values"):
        source = re.sub(rf"(?<!\.)\b{name}\b", f"my_{name}x", source)
    return re.sub(r"\n\n+", "\n", source.replace('"', "'")).replace("\n", "  # mine\n")


def test_two_texts_with_so_many_tokens_in_common_share_a_fingerprint():
    """The guarantee of winnowing: RUN + WINDOW - 1 tokens in a row, wherever they stand."""
    common = " + ".join(f"f{n}({n})" for n in range(4))
    assert len(tokens_of(common)) >= RUN + WINDOW - 1
    for before in range(12):
        one = winnowed(run_hashes(tokens_of("a.b = 1; " * before + common)))
        other = winnowed(run_hashes(tokens_of(common + "\nwhile x: y()" * before)))
        assert set(one) & set(other)


def test_a_copy_is_shown_however_it_was_renamed_and_an_answer_of_ones_own_is_not():
    ours = Text("our solution", COPIED, frozenset(), of_class=False)
    texts = [ours, Text("ann", renamed(COPIED), frozenset()), Text("bob", SOURCES["kv-chunks"], frozenset())]
    (pair,) = pairs_of("kv-append", texts)
    assert (pair.first.who, pair.second.who) == ("ann", "our solution") and pair.share > 0.95
    half = COPIED[: len(COPIED) // 2] + "\n" + SOURCES["kv-bytes"] * 3
    assert not list(pairs_of("e", [ours, Text("cem", half, frozenset())])), "less than half of it, or of ours"


@pytest.mark.parametrize(
    "hidden",
    [
        COPIED + "\n" + SOURCES["kv-bytes"] * 3,
        SOURCES["kv-bytes"] * 3 + "\n" + renamed(COPIED),
        f"exec({COPIED!r})",
        f"exec({COPIED.encode()!r})",
        f"exec({f'exec({COPIED!r})'!r})",
    ],
    ids=["code after it", "code before it", "in a string", "in bytes", "in a string of a string"],
)
def test_a_whole_copy_is_shown_whatever_is_put_around_it(hidden):
    ours = Text("our solution", COPIED, frozenset(), of_class=False)
    (pair,) = pairs_of("e", [ours, Text("ann", hidden, frozenset())])
    assert pair.share > 0.95
    assert report_html(Likeness((pair,), 1)).count("<mark>") >= 2


def test_long_and_repeated_answers_are_compared_in_bounded_work(monkeypatch):
    """Two students who hand in the same line a hundred thousand times; none of the bounds meets an answer of ours."""
    compared = 0

    class Counted(str):
        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    texts = [Text(who, "x = 1\n" * 100_000, frozenset()) for who in ("ann", "bob")]
    for text in texts:
        text.kinds = list(map(Counted, text.kinds))
    (pair,) = pairs_of("e", texts)
    assert len(texts[0].tokens) == MAX_TOKENS and texts[0].cut and compared < 50 * MAX_TOKENS
    assert len(report_html(Likeness((pair,), 2))) < 3 * MAX_SOURCE and "more characters" in report_html(
        Likeness((pair,), 2)
    )
    assert max(len(tokens_of(source)) for source in SOURCES.values()) < MAX_TOKENS / 5


def test_passages_are_marked_where_they_stand_whatever_parts_the_lines():
    """Python counts lines by newlines alone; other characters part them for `splitlines`."""
    source = f"a = '\x0c\x1c\x85\u2028 {'.'}'\n\x0c\n{COPIED}"
    tokens = tokens_of(source)
    assert [source[t.start : t.end] for t in tokens if t.kind == "class"] == ["class"] * COPIED.count("class ")


def test_students_of_one_name_are_two_and_deep_cells_stop_nobody(tmp_path):
    deep = "SIZE = " + "+".join(["1"] * 2_000)
    for home in ("monday", "friday"):
        write(tmp_path / home / "ann" / f"{LAB}.ipynb", notebook(kv_append=COPIED))
    cells = [toy.cell("", deep, metadata={}), toy.cell("kv-bytes", "kv_calculator = SIZE")]
    write(tmp_path / "monday" / "cem" / f"{LAB}.ipynb", toy.notebook(*cells))
    report = compare([tmp_path / "monday", tmp_path / "friday"], {LAB: exercise_sets()[LAB]}, tmp_path / "nowhere")
    assert {(pair.first.who, pair.second.who) for pair in report.pairs} == {("ann", "ann-2")} and report.answers == 3


def test_what_all_were_given_and_what_much_of_the_class_has_does_not_count():
    given = frozenset(run_hashes(tokens_of(COPIED)))
    ours = Text("our solution", COPIED, given, of_class=False)
    assert not list(pairs_of("e", [ours, Text("ann", COPIED, given)]))
    class_ = [Text(f"s{n}", COPIED, frozenset()) for n in range(5)]
    assert not list(pairs_of("e", class_)), "everybody has it from the same place"
    assert len(list(pairs_of("e", [*class_, Text("our solution", COPIED, frozenset(), False)]))) == 5
    assert len(list(pairs_of("e", class_[:2]))) == 1, "a pair once"


def test_sources_that_are_no_python_are_compared_as_far_as_they_are():
    for source in ("", "def f(:\n", "'''", "x = (", "\tif\n  y", "\0", COPIED + "\n'''"):
        tokens_of(source)
    broken = Text("ann", COPIED + "\n'''", frozenset())
    assert len(list(pairs_of("e", [broken, Text("bob", COPIED, frozenset())]))) == 1


def test_the_report_shows_passages_side_by_side_and_says_that_it_proves_nothing(tmp_path):
    """Against our solution, the engine's own part, the class, and another year."""
    import inspect

    from workbench.kv.contiguous import Contiguous

    write(tmp_path / "in" / "a<b>" / f"{LAB}.ipynb", notebook(kv_append=renamed(COPIED)))
    engine = inspect.getsource(Contiguous).replace("Contiguous", "MyCache")
    write(tmp_path / "in" / "bob" / f"{LAB}.ipynb", notebook(kv_append=engine, kv_bytes="def kv_calculator(): pass\n"))
    write(tmp_path / "in" / "cem" / f"{LAB}.ipynb", b"{")
    write(tmp_path / "2025" / "dan" / f"{LAB}.ipynb", notebook(kv_append=COPIED))
    sets = {LAB: exercise_sets()[LAB]}
    report = compare([tmp_path / "in"], sets, ROOT / "solutions", also=[tmp_path / "2025"])
    alike = {(pair.first.who, pair.second.who) for pair in report.pairs}
    assert alike == {("a<b>", "our solution"), ("a<b>", "dan (dan)"), ("bob", "workbench.kv.contiguous.Contiguous")}
    assert "likeness proves nothing" in str(report) and "cem: not compared" in str(report)
    report.write(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text("utf-8")
    assert page.count('class="beside"') == 3 and "<mark><sup>1</sup>" in page and "a&lt;b&gt;" in page
    assert "<script" not in page and (tmp_path / "r.html").stat().st_mode & 0o777 == 0o600
    none = compare([tmp_path / "in"], sets, tmp_path / "nowhere")
    assert "were not compared with our own" in str(none) and not none.pairs


@pytest.mark.parametrize("lab", [LAB, "09_paged_attention"])
def test_other_right_answers_of_the_repository_are_not_like_ours(lab):
    import runpy

    listed = runpy.run_path(str(ROOT / "solutions" / f"{lab}_wrong.py"))["ALTERNATIVE"]
    ours = answers_in(ROOT / "solutions" / f"{lab}.py")
    for grade_id, source in listed.items():
        texts = [Text("ours", ours[grade_id], frozenset(), False), Text("ann", source, frozenset())]
        assert not [p for p in pairs_of(grade_id, texts) if p.shared >= MIN_TOKENS], grade_id
