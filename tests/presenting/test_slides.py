"""Claims about slides before a browser has seen them: what begins one, what is shown, what is noted, what a panel
needs; and about wrong calls of `workbench present`."""

import base64
import importlib.util
import json
import re
import socket
import struct
from pathlib import Path

import pytest

from workbench import cli
from workbench.errors import WorkbenchError
from workbench.panels import style
from workbench.presenting import live, markup, needs
from workbench.presenting.deck import deck_of, parted
from workbench.presenting.page import page

ROOT = Path(__file__).parents[2]
LECTURES = live.lectures_in(ROOT)
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def text(source: str) -> dict:
    return {"cell_type": "markdown", "id": "a", "metadata": {}, "source": source}


def code(source: str, *outputs: dict, hidden: bool = False) -> dict:
    metadata = {"jupyter": {"source_hidden": True}} if hidden else {}
    made = [{"output_type": "display_data", "metadata": {}, "data": data} for data in outputs]
    return {"cell_type": "code", "id": "a", "metadata": metadata, "source": source, "outputs": made}


@pytest.fixture
def lecture(tmp_path):
    def make(*cells: dict) -> Path:
        (tmp_path / "notebooks").mkdir(exist_ok=True)
        file = tmp_path / "notebooks" / "03_kv_cache.ipynb"
        file.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
        return file

    return make


def kinds(deck) -> list[tuple[str, list[str]]]:
    return [(slide.kind, [block.kind for block in slide.blocks]) for slide in deck.slides]


def test_headings_and_cells_of_text_begin_slides_and_output_stays_with_its_text(lecture):
    deck = deck_of(
        lecture(
            text("# Lab 03 · KV cache\n\nThe question."),
            text("## One\n\nA thought."),
            code("x = 1\nx", {"text/plain": "1"}),
            text("Another thought."),
            code("picture()", {"image/png": PNG, "text/plain": "a dot"}),
            text("A third."),
        )
    )
    assert kinds(deck) == [
        ("title", ["text"]),
        ("plain", ["text", "code", "printed"]),
        ("plain", ["text", "code"]),
        ("picture", ["picture"]),
        ("plain", ["text"]),
    ]
    assert deck.title == "Lab 03 · KV cache" and [slide.heading for slide in deck.slides[1:]] == ["One"] * 4
    assert any("a dot" in note for note in deck.slides[3].notes)


def test_hidden_source_and_asserts_are_notes_and_the_guess_is_left_out(lecture):
    deck = deck_of(
        lecture(
            text("# A\n"),
            code('g = ask("rows", "How many?", unit="rows", example=3)\ng', {"text/plain": "How many?"}, hidden=True),
            code("g.answer()\ny = 2\nassert y == 2\ny", {"text/plain": "2"}),
            code("secret()", {"text/markdown": "**4** rows"}, hidden=True),
            code(
                "g.compare(5)", {"text/html": "<div>The example guess: 3 rows. Computed: 5 rows. That is close.</div>"}
            ),
        )
    )
    html, notes = page(deck), [note for slide in deck.slides for note in slide.notes]
    assert [slide.kind for slide in deck.slides] == ["title", "question", "plain"]
    assert "How many?" in html and "… rows" in html and "example guess" not in html and "Computed: 5 rows." in html
    assert "secret()" in notes and "assert y == 2" in notes and "g.compare(5)" in notes
    assert all("assert" not in block.html and "answer" not in block.html for block in deck.slides[2].blocks)


def test_a_deeper_part_ends_with_a_heading_of_its_level_and_sittings_name_their_slides(lecture):
    texts = ("# Lab", "# Sitting 1: A & B", "## Core", "## Deeper: x", "### Within", "## Core", "### Deeper: y")
    cells = [text(f"{one}\n\nWords.") for one in texts]
    deck = deck_of(lecture(*cells, code("1", {"text/plain": "1"}), text("# End\n\nWords.")))
    assert [(slide.heading, slide.deeper) for slide in deck.slides] == [
        *(("Lab", 0), ("Sitting 1: A &amp; B", 0), ("Core", 0), ("X", 1), ("Within", 1), ("Core", 0)),
        *(("Y", 2), ("End", 0)),
    ]
    assert [slide.kind for slide in deck.slides][:3] == ["title", "title", "plain"]
    assert {slide.sitting for slide in deck.slides[1:]} == {"Sitting 1: A & B"}


def test_pictures_are_low_enough_for_their_letters_to_be_read_on_a_slide():
    """Live ones are held by tests/picture_claims.py; recorded ones are as tall as they were drawn."""
    tall: dict[str, int] = {}
    for name, notebook in LECTURES.items():
        for slide in deck_of(notebook).slides:
            for png in re.findall(r'src="data:image/png;base64,([^"]+)"', "".join(one.html for one in slide.blocks)):
                wide, high = struct.unpack(">II", base64.b64decode(png[:44])[16:24])
                if high > wide * style.TALLEST / style.sheet()["figure.figsize"][0] + 1:
                    tall[name] = tall.get(name, 0) + 1
    assert tall == {}


def test_a_panel_has_one_slide_with_the_result_that_was_recorded(lecture):
    deck = deck_of(
        lecture(
            text("# A\n"),
            code("import workbench as wb\nN = 3\nunused = 1"),
            code("panel = wb.panels.step_time(repeats=N)\npanel", {"image/png": PNG, "text/plain": "before"}),
            code("measured = panel.run()\npanel.snapshot()", {"image/png": PNG, "text/plain": "after"}),
        )
    )
    [slide] = [slide for slide in deck.slides if slide.kind == "panel"]
    assert 'alt="after"' in slide.blocks[0].html and not any(s.kind == "picture" for s in deck.slides)
    assert deck.panels == ["import workbench as wb\nN = 3\npanel = wb.panels.step_time(repeats=N)\npanel"]
    made = live.live_notebook(deck_of(lecture(text("# A"))))
    assert made["cells"] == []


def test_what_a_panel_needs_is_found_once_and_through_other_names():
    sources = [
        "import workbench as wb",
        "def f():\n    return WIDTH\nWIDTH = 4",
        "a = f()\nb = 2",
        "p = wb.panels.one(x=a)\np",
        "q = wb.panels.two(x=a, y=b)\nq",
        "%magic",
    ]
    made = needs.live_cells(sources)
    assert list(made) == [3, 4]
    assert made[3].startswith("import workbench as wb\ndef f():") and "WIDTH = 4" in made[3] and "b = 2" not in made[3]
    assert made[4] == "b = 2\nq = wb.panels.two(x=a, y=b)\nq"


def test_a_long_text_a_long_table_and_long_code_are_parted():
    sentence = "This sentence has about sixty letters and ends with a stop. "
    assert len(markup.blocks_of(sentence * 12)) > 1
    assert markup.sentences("Short. `a. B` stays.") == ["Short. `a. B` stays."]
    parts = markup.code("\n".join(f"x{n} = {n}" for n in range(60)))
    assert len(parts) >= 3 and all(part.height <= markup.ROOM for part in parts)
    assert parted("x = 1\nassert (\n    x\n)\ny = 2") == ("x = 1\ny = 2", "assert (\n    x\n)")
    assert parted("%time f()") == ("%time f()", "")


def test_text_is_never_markup_and_links_of_the_course_are_text():
    [block] = markup.blocks_of("<script>alert(1)</script> and [a page](../docs/glossary.md#x), $a < b$")
    assert "<script" not in block.html and "glossary.md" not in block.html and "<math" in block.html
    [out] = markup.printed("</pre><script>")
    assert "<script" not in out.html


@pytest.mark.parametrize("name", LECTURES)
def test_every_lecture_becomes_slides_and_each_of_its_panels_can_live(name):
    deck = deck_of(LECTURES[name])
    source = "".join("".join(cell["source"]) for cell in json.loads(LECTURES[name].read_text("utf-8"))["cells"])
    assert len(deck.panels) == source.count(" = wb.panels.") and len(deck.slides) > 15
    assert [slide.panel for slide in deck.slides if slide.kind == "panel"] == list(range(len(deck.panels)))
    assert all("<img" in slide.blocks[0].html for slide in deck.slides if slide.kind == "panel")
    for panel in deck.panels:
        compile(panel, name, "exec")


def test_the_file_asks_nothing_of_another_machine_and_leaves_nothing_when_it_cannot_be_written(
    tmp_path, monkeypatch, capsys
):
    out = tmp_path / "x.html"
    assert live.export(LECTURES["00_start_here"], out) > 20
    html = out.read_text("utf-8")
    assert "http" not in html.partition("<main")[0] and "<script src" not in html and "<link" not in html
    monkeypatch.chdir(ROOT)
    assert cli.main(["present", "0", "--out", str(tmp_path)]) == 2 and "cannot write" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.html"]


# -- wrong calls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["present", "99"], "unknown lab '99'"),
        (["present", "03_kv_cach"], "did you mean '03_kv_cache'"),
        (["present", "3", "--port", "0"], "from 1 to 65535"),
        (["present", "3", "--out", "/dev/null/x.html"], "cannot write"),
        (["present"], "LAB"),
    ],
)
def test_wrong_calls_are_refused_with_what_to_do(arguments, words, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    try:
        code = cli.main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and words in capsys.readouterr().err


def test_outside_of_a_course_with_a_taken_port_and_without_voila(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert cli.main(["present", "3", "--port", str(other.getsockname()[1])]) == 2
    assert "is in use" in capsys.readouterr().err
    find_spec = importlib.util.find_spec
    for missing, words in (("voila", "--out FILE.html"), ("latex2mathml", "not here: latex2mathml")):
        with monkeypatch.context() as patch:
            patch.setattr(importlib.util, "find_spec", lambda n, *at, gone=missing: None if n == gone else find_spec(n))
            assert cli.main(["present", "3"]) == 2
        err = capsys.readouterr().err
        assert words in err and "'.[voila]'" in err
    monkeypatch.chdir(tmp_path)
    assert cli.main(["present", "3"]) == 2


def test_a_notebook_that_is_none_and_an_output_with_a_script_are_refused(lecture, tmp_path):
    with pytest.raises(WorkbenchError, match="nothing to show"):
        deck_of(lecture())
    with pytest.raises(WorkbenchError, match="script"):
        deck_of(lecture(text("# A"), code("x", {"text/html": "<script>x()</script>"})))
