"""Claims about the static site: it holds the course and no answers, its links lead somewhere, and it needs no other
machine. It is built once, as `workbench site` builds it; nothing is executed for it."""

import functools
import importlib.util
import json
import re
import shutil
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from harness import ROOT

from workbench import cli
from workbench.errors import WorkbenchError
from workbench.site.pages import for_reading

pytest_plugins = ["lab_fixtures"]
LECTURES = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXERCISES = sorted((ROOT / "exercises").glob("*.ipynb"))
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Links(HTMLParser):
    """What a page points to and loads, the names that can be pointed to, and its text without markup."""

    def __init__(self, file: Path):
        super().__init__()
        self.pointed, self.loaded, self.ids, self.text, self.pictures = [], [], set(), "", []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and "href" in given:
            self.pointed.append(given["href"])
        if LOADED.get(tag) in given:
            self.loaded.append(given[LOADED[tag]])
        if tag == "img":
            self.pictures.append(given)

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The site's folder and what the command printed there."""
    folder = tmp_path_factory.mktemp("site") / "pages"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert cli.main(["site", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def pages(built) -> dict[str, Links]:
    return {file.relative_to(built).as_posix(): Links(file) for file in sorted(built.rglob("*.html"))}


def dead(built: Path, pages: dict[str, Links]) -> list[str]:
    """Links and loads of the pages that lead to no file, no anchor or, for loads, to another machine."""
    wrong = []
    for name, page in pages.items():
        for target in [*page.pointed, *page.loaded]:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in page.loaded and parts.scheme != "data":
                    wrong.append(f"{name} loads {target}")
                continue
            file = (built / name).parent.joinpath(unquote(parts.path)).resolve() if parts.path else built / name
            to = file.relative_to(built).as_posix() if file.is_relative_to(built) else ""
            if not file.is_file():
                wrong.append(f"{name}: {target}")
            elif parts.fragment and to in pages and unquote(parts.fragment) not in pages[to].ids:
                wrong.append(f"{name}: no anchor {target}")
    return wrong


def test_every_lecture_exercise_and_document_has_a_page(pages):
    files = [*LECTURES, *EXERCISES, *(ROOT / "docs").glob("*.md")]
    expected = {f"{file.parent.name}/{file.stem}.html" for file in files} | {"index.html", "search.html"}
    assert len(LECTURES) >= 15 and len(EXERCISES) >= 14
    assert expected <= pages.keys()


def test_every_link_and_anchor_leads_somewhere_and_nothing_is_loaded_from_elsewhere(built, pages):
    assert sum(len(page.pointed) for page in pages.values()) > 1000
    assert dead(built, pages) == []
    styles = "".join(file.read_text(encoding="utf-8") for file in built.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)]*", styles) == []


def test_a_dead_link_a_dead_anchor_and_a_load_from_elsewhere_are_seen(tmp_path):
    page = tmp_path / "a.html"
    page.write_text('<a href="b.html"></a><a href="#x"></a><script src="https://cdn.example/x.js"></script><p id="y">')
    assert len(dead(tmp_path, {"a.html": Links(page)})) == 3


@pytest.mark.parametrize("file", LECTURES, ids=lambda file: file.stem)
def test_a_lecture_has_its_pictures_with_their_words(file, pages):
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    drawn = sum("image/png" in output.get("data", {}) for cell in cells for output in cell.get("outputs", ()))
    shown = [given for given in pages[f"notebooks/{file.stem}.html"].pictures if "_images" in given["src"]]
    assert len(shown) == drawn > 0
    assert all(given["alt"] and not given["alt"].startswith(("<", "../")) for given in shown)


@pytest.mark.parametrize("file", EXERCISES, ids=lambda file: file.stem)
def test_an_exercise_has_its_statement_and_no_answer(file, pages):
    text = pages[f"exercises/{file.stem}.html"].text
    starter = json.loads(file.read_text(encoding="utf-8"))["cells"]
    given = "\n".join("".join(cell["source"]) for cell in starter)
    source = (ROOT / "solutions" / f"{file.stem}.py").read_text(encoding="utf-8")
    answers = "".join(re.findall(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", source, flags=re.S))
    lines = {line.strip() for line in answers.splitlines() if len(line.strip()) > 25}
    assert len(lines) > 5 and "SOLUTION" not in text
    assert [line for line in lines if line in text and line not in given] == []
    assert all(line in text for line in re.findall(r"^def \w+", given, flags=re.M))


def test_formulas_are_mathml_and_hidden_sources_are_folded(built):
    page = (built / "notebooks" / "01_naive_generation.html").read_text(encoding="utf-8")
    assert page.count("<math") >= 3 and "MathJax" not in page
    assert page.count("<details") >= 5


def test_tables_that_a_cell_wrote_in_markdown_are_tables(built):
    page = (built / "notebooks" / "90_reading_list_checked.html").read_text(encoding="utf-8")
    assert page.count("<tr") > 100 and "| ---" not in page and "| wrong |" not in page


# -- wrong courses and wrong folders --------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A course of one lecture, in which we stand."""
    for name, text in {"README.md": "# Course\n", "docs/glossary.md": "# Glossary\n\n## Words\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    cell = {"cell_type": "markdown", "id": "a", "metadata": {}, "source": "# One\n\n[w](../docs/glossary.md#words)"}
    book = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "00_start_here.ipynb").write_text(json.dumps(book))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_sittings_are_parts_and_what_is_deeper_is_set_apart(small):
    file = small / "notebooks" / "00_start_here.ipynb"
    book = json.loads(file.read_text())
    for n, heading in enumerate(("# Sitting 1: One", "## Core", "## Deeper: x", "### Within", "# The next question")):
        cell = {"cell_type": "markdown", "id": f"b{n}", "metadata": {}, "source": f"{heading}\n\nWords."}
        book["cells"].append(
            cell | ({"metadata": {"jp-MarkdownHeadingCollapsed": True}} if "Deeper" in heading else {})
        )
    file.write_text(json.dumps(book))
    assert cli.main(["site", "--out", "site"]) == 0
    html = (small / "site" / "notebooks" / "00_start_here.html").read_text("utf-8")
    levels = [2, 3, 3, 4, 2]
    assert [int(level) for level in re.findall(r"<h([2-4])>", html)] == levels
    assert re.search(r'<section id="deeper-x">\s*<h3>Deeper: x', html)
    assert 'section[id^="deeper-"]' in (small / "site" / "_static" / "course.css").read_text("utf-8")


def test_a_link_that_leads_nowhere_is_reported_and_is_exit_code_1(small, capsys):
    assert cli.main(["site", "--out", "good"]) == 0
    (small / "docs" / "glossary.md").write_text("# Glossary\n\n## Other words\n")
    capsys.readouterr()
    assert cli.main(["site", "--out", "bad"]) == 1
    out, err = capsys.readouterr()
    assert "words" in err and "00_start_here" in err and out.startswith("3 pages")


def test_a_folder_in_use_and_a_course_without_documents_are_refused(small, capsys):
    (small / "mine").mkdir()
    (small / "mine" / "thesis.txt").write_text("kept")
    assert cli.main(["site", "--out", "mine"]) == 2
    assert [file.name for file in (small / "mine").iterdir()] == ["thesis.txt"]
    shutil.rmtree(small / "docs")
    assert cli.main(["site", "--out", "new"]) == 2
    assert "run this in a clone" in capsys.readouterr().err and not (small / "new").exists()


def test_missing_packages_are_said_with_what_to_install(small, capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *at: None if name == "furo" else find_spec(name, *at))
    assert cli.main(["site", "--out", "new"]) == 2
    err = capsys.readouterr().err
    assert "not here: furo" in err and ".[site]" in err and not (small / "new").exists()


def test_an_output_with_a_script_and_a_broken_notebook_are_refused():
    output = {"output_type": "display_data", "metadata": {}, "data": {"text/html": ["<p>", "<SCRIPT>x()</SCRIPT>"]}}
    cell = {"cell_type": "code", "metadata": {}, "source": "", "outputs": [output], "execution_count": 1}
    with pytest.raises(WorkbenchError, match="script"):
        for_reading({"cells": [cell]}, "x.ipynb")
    for broken in ({}, {"cells": [1]}, {"cells": [{"cell_type": "code"}]}):
        with pytest.raises(WorkbenchError, match="no notebook"):
            for_reading(broken, "x.ipynb")


# -- in the browser -------------------------------------------------------------------------------------------------


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Nothing for each request."""


@pytest.fixture(scope="module")
def address(built):
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=built)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


BROKEN_PICTURES = (
    "[...document.images].filter(i => i.checkVisibility() && i.complete && !i.naturalWidth).map(i => i.src)"
)
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
LOOKED_AT = ("index", "notebooks/01_naive_generation", "notebooks/08_continuous_batching", "docs/glossary", "docs/map")


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_are_shown_whole_at_every_width_and_in_the_dark(browser, address, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    for name in LOOKED_AT:
        page.goto(f"{address}{name}.html", wait_until="load")
        assert page.evaluate(BROKEN_PICTURES) == [] and page.evaluate(TOO_WIDE) <= 0, name
        red, green, blue = re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]
        assert (int(red) + int(green) + int(blue) < 200) == (scheme == "dark"), name
    page.goto(f"{address}search.html?q=speculative")
    page.locator("#search-results li a", has_text="Lab 06").first.click()
    page.wait_for_url("**/06_speculative_sampling.html*")
    assert said == []
    assert len(asked) > 20 and [url for url in asked if not url.startswith((address, "data:"))] == []
    page.close()
