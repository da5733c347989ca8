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
from workbench.grading.likeness import MIN_TOKENS, RUN, WINDOW, Text, compare, pairs_of, run_hashes, tokens_of, winnowed

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
    half = COPIED + "\n" + SOURCES["kv-bytes"] * 3
    assert not list(pairs_of("e", [ours, Text("cem", half, frozenset())])), "less than half of it"


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
