"""Claims about the pages of the panels alone: every panel stands on one, under its question, and what cannot be served
is said before anything starts."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import nbformat
import pytest

from workbench import cli, labs
from workbench.demo import voila
from workbench.demo.pages import INDEX, page_names, write_pages

NAMES = list(page_names())


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, nbformat.NotebookNode]:
    folder = tmp_path_factory.mktemp("pages")
    write_pages(folder, NAMES)
    made = {file.stem: nbformat.read(file, as_version=4) for file in folder.iterdir()}
    for book in made.values():
        nbformat.validate(book)
    return made


def test_every_panel_of_every_lab_is_on_the_page_of_its_lab_under_its_question(pages):
    assert set(pages) == {*NAMES, INDEX}
    for name, lab in page_names().items():
        stems = labs.page(lab).PANELS
        cells = pages[name].cells
        made = [cell.source for cell in cells if cell.cell_type == "code"][1:]
        assert made == [f"wb.panels.{stem}()" for stem in stems]
        for stem, cell in zip(stems, [cell for cell in cells if cell.cell_type == "markdown"][1:]):
            experiment = labs.panel(stem).experiment
            heading, _, how = cell.source.partition("\n\n")
            assert heading.lower() == f"## {experiment.question}".lower() and experiment.how.rstrip(".") in how
    assert sum(len(labs.page(lab).PANELS) for lab in labs.LABS) == len(labs.panel_names()) > 50


def test_the_index_leads_to_every_page_and_each_page_back(pages):
    text = pages[INDEX].cells[0].source
    assert [name for name in NAMES if f"]({name}.ipynb)" not in text] == []
    assert all(f"]({INDEX}.ipynb)" in pages[name].cells[0].source for name in NAMES)
    questions = {labs.panel(stem).experiment.question.lower() for stem in labs.panel_names()}
    assert [question for question in questions if question not in text.lower()] == []


def test_the_page_of_one_lab_has_no_index(tmp_path):
    write_pages(tmp_path, ["03_kv_cache"])
    assert [file.name for file in tmp_path.iterdir()] == ["03_kv_cache.ipynb"]
    assert INDEX not in (tmp_path / "03_kv_cache.ipynb").read_text()


@pytest.fixture
def served(monkeypatch):
    """What would be served: the words of the command, and the files of its folder."""
    seen = {}

    def run(called, command, *, url, alive, browser, environment):
        folder = Path(command[3])
        seen.update(command=command, url=url, folder=folder, files=sorted(file.name for file in folder.iterdir()))
        return 0

    monkeypatch.setattr(voila, "run_server", run)
    return seen


def test_the_command_serves_this_machine_alone_from_a_folder_that_goes_with_it(served):
    assert cli.main(["demo", "9", "--no-browser"]) == 0
    assert served["url"].startswith("http://127.0.0.1:") and served["url"].endswith("/09_paged_attention.ipynb")
    assert "--Voila.ip=127.0.0.1" in served["command"] and "--Voila.auto_token=True" in served["command"]
    assert served["files"] == ["09_paged_attention.ipynb"] and not served["folder"].exists()
    assert cli.main(["demo", "--no-browser"]) == 0
    assert served["url"].endswith("/index.ipynb") and len(served["files"]) == len(NAMES) + 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["03_kvcache"], "did you mean '03_kv_cache'"),
        (["00"], "unknown lab '00'"),
        (["--port", "0"], "from 1 to 65535"),
        (["--host", "192.0.2.1"], "name an address of this machine"),
    ],
)
def test_what_is_wrong_is_said_with_the_nearest(arguments, words, served, capsys):
    assert cli.main(["demo", *arguments]) == 2
    assert words in capsys.readouterr().err and served == {}


def test_a_port_that_is_taken_is_refused_when_asked_for_and_avoided_when_not(served, capsys, monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        assert cli.main(["demo", "09", "--port", str(taken)]) == 2
        assert f"port {taken} is in use" in capsys.readouterr().err and served == {}
        monkeypatch.setattr(voila, "USUAL_PORT", taken)
        assert cli.main(["demo", "09"]) == 0 and f":{taken}/" not in served["url"]


def test_without_voila_it_says_how_to_install_it(served, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *at: None)
    assert cli.main(["demo", "09"]) == 2
    assert ".[voila]" in capsys.readouterr().err and served == {}
