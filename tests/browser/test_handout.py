"""Claims about the pages to print: a lab on two pages of A4 at most, with what its lecture says and nothing from
elsewhere."""

import json
import re

import pytest
from harness import ROOT

from workbench import checks, cli
from workbench.errors import WorkbenchError
from workbench.site.handout import LONGEST, first_sentences, handout, lectures_of, lines_of, page, sections

pytest_plugins = ["lab_fixtures"]
LABS = list(lectures_of(ROOT))


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("handouts")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert cli.main(["summary", "--out", str(folder)]) == 0
    return folder


@pytest.mark.browser
def test_each_fits_on_two_pages_of_a4_and_nothing_is_cut(printed, browser):
    shown = browser.new_page(viewport={"width": 794, "height": 1123})
    asked = []
    shown.on("request", lambda request: asked.append(request.url))
    for name in LABS:
        shown.goto((printed / f"{name}.html").as_uri())
        pages = len(re.findall(rb"/Type\s*/Page\b(?!s)", shown.pdf(prefer_css_page_size=True)))
        assert 1 <= pages <= 2, name
        assert shown.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0, name
        cut = "[...document.querySelectorAll('.formula')].filter(f => f.scrollWidth > f.clientWidth + 1).length"
        assert shown.evaluate(cut) == 0, name
    assert len(asked) == len(LABS)
    shown.close()


@pytest.mark.parametrize("name", LABS)
def test_a_page_says_what_the_lecture_says(name):
    made = handout(ROOT, name)
    cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    text = " ".join(" ".join("".join(cell["source"]).split()) for cell in cells if cell["cell_type"] == "markdown")
    assert made.title in text and made.question in text and len(made.sections) >= 3
    for one in made.sections:
        assert one.heading in text and one.says.rstrip(".") in text
        assert all(formula in text for formula in one.formulas) and all(point in text for point in one.points)
    assert len(made.exercises) == len(checks.exercise_sets()[name].exercises)
    assert all(meaning for _, meaning in made.words)
    assert len(re.findall("<math", page(made))) >= sum(len(one.formulas) for one in made.sections)


def test_a_section_is_its_first_sentences_its_list_and_its_formulas():
    listed = "| a |\n|---|\n\nTwo facts:\n\n- the first,\n  of two lines\n- the second"
    text = f"## One\n\n{listed}\n\n$$x =\n1$$\n\nMore.\n\n## Predict\n\nGuess."
    (one,) = sections(text)
    assert (one.heading, one.says, one.points, one.formulas) == (
        "One",
        "Two facts.",
        ["the first, of two lines", "the second"],
        ["x = 1"],
    )
    assert sections("no heading at all") == []


def test_takeaways_stand_first_and_what_is_deeper_or_recalls_is_left_out(tmp_path):
    for part in ("notebooks", "exercises", "docs"):
        (tmp_path / part).mkdir()
    (tmp_path / "docs" / "glossary.md").write_text("")
    said = (
        *("# Lab 01 · A\n\nThe question.", "# Sitting 1: One\n\nRecalled.", "## Part\n\nPlain."),
        *("## Deeper: x\n\nHidden.", "### Within\n\nHidden, too.", "## Next\n\nOpen.\n\n$$y$$"),
        "# When to use it, and when not\n\n| a | b |\n|---|---|",
        "# Five things to take along\n\n1. First of all,\n   in two lines.\n2. Second.",
        "# The next question\n\nWhy?",
    )
    for folder, texts in (("notebooks", said), ("exercises", ("# Exercises",))):
        cells = [{"cell_type": "markdown", "source": text} for text in texts]
        (tmp_path / folder / "01_a.ipynb").write_text(json.dumps({"cells": cells}))
    made = handout(tmp_path, "01_a")
    assert made.takeaways == ["First of all, in two lines.", "Second."]
    assert [(one.heading, one.says) for one in made.sections] == [
        *(("Sitting 1: One", ""), ("Part", "Plain."), ("Next", "Open."))
    ]
    html = page(made)
    assert html.index("First of all") < html.index("Sitting 1") < html.index("Plain.")
    assert not any(word in html for word in ("Hidden", "Recalled", "Why?", "When to use it"))


def test_formulas_that_stand_side_by_side_come_one_below_the_other():
    assert lines_of(r"a = 1, \qquad b = 2 \quad c") == ["a = 1", "b = 2", "c"]
    assert lines_of(r"\begin{cases} a \quad b \end{cases}") == [r"\begin{cases} a \quad b \end{cases}"]


def test_sentences_are_whole():
    assert first_sentences("One. Two! " + "x" * LONGEST + ".") == "One. Two!"
    assert first_sentences("y" * LONGEST + " z. Next.") == "y" * LONGEST + " z."
    assert first_sentences("version 1.5 of it: so") == "version 1.5 of it."
    assert first_sentences("no end") == "no end"
    assert 200 < len(first_sentences("Ten chars. " * 100)) <= 230


def test_words_are_spelled_as_in_the_lecture_and_mean_what_the_glossary_says():
    words = dict(handout(ROOT, "11_serving").words)
    assert words["TTFT"].startswith("Time to first token") and words["connector"].startswith("How they are sent")
    assert all(len(meaning) > 15 and meaning[0].isalnum() for meaning in words.values())


def test_a_page_runs_nothing_and_shows_markup_as_text(tmp_path):
    made = handout(ROOT, "03_kv_cache")
    made.sections[0].says = "<script>alert(1)</script> <img src=x onerror=alert(2)> [a](javascript:alert(3))"
    text = page(made)
    assert "<script" not in text and "<img" not in text and "href" not in text.split("Further reading")[0]


@pytest.mark.parametrize(("lab", "words"), [("03_kvcache", "did you mean '03_kv_cache'"), ("99", "unknown lab '99'")])
def test_an_unknown_lab_is_answered_with_those_there_are(lab, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(["summary", lab, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert cli.main(["summary", "03", "--out", str(tmp_path)]) == 0
    assert cli.main(["summary", "3", "--out", str(tmp_path)]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["03_kv_cache.html"]


def test_a_notebook_that_is_no_lecture_is_refused(tmp_path):
    for part in ("notebooks", "exercises", "docs"):
        (tmp_path / part).mkdir()
    (tmp_path / "exercises" / "01_a.ipynb").write_text('{"cells": []}')
    for broken, words in (
        ('{"cells": 3}', "has no cells"),
        ('{"cells": []}', "has no text"),
        ('{"cells": [{"cell_type": "markdown", "source": ["no heading"]}]}', "does not begin with a heading"),
    ):
        (tmp_path / "notebooks" / "01_a.ipynb").write_text(broken)
        with pytest.raises(WorkbenchError, match=words):
            handout(tmp_path, "01_a")
