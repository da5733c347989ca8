"""A lecture presented: the notebook that Voilà executes, which is only what the panels need; and the file of slides."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from workbench.demo import voila
from workbench.errors import WorkbenchError
from workbench.files import write_text
from workbench.presenting.deck import Deck, deck_of
from workbench.presenting.page import body_of, head_of, page, script

PACKAGES = ("latex2mathml", "markdown_it", "mdit_py_plugins", "pygments")
TEMPLATES = Path(__file__).parent / "jupyter"
EXTENSIONS = ("@voila-dashboards/widgets-manager8", "@jupyter-widgets/jupyterlab-manager", "anywidget")
OPTIONS = (  # of Voilà
    "--VoilaConfiguration.template=workbench",
    "--VoilaConfiguration.allow_template_override=NO",
    "--VoilaConfiguration.allow_theme_override=NO",
    "--VoilaConfiguration.progressive_rendering=True",  # the page first, then cell after cell
    "--VoilaConfiguration.show_tracebacks=True",  # the page says what a panel failed on
    # another kernel in place of one that died would have no panels: the page shows recorded results, and says so
    "--KernelRestarter.restart_limit=0",
    *(f"--VoilaConfiguration.extension_allowlist={name}" for name in EXTENSIONS),
)


def lectures_in(course: Path) -> dict[str, Path]:
    """Every lecture of a course, by the stem of its notebook."""
    return {file.stem: file for file in sorted((course / "notebooks").glob("*.ipynb"))}


def check_packages() -> None:
    """Raise WorkbenchError where the packages that write slides are missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise WorkbenchError(
            f"slides are made with packages that are not here: {', '.join(missing)}; "
            "pip install -e '.[voila]' -c constraints.txt"
        )


def export(notebook: Path, out: Path) -> int:
    """Write one self-contained page of slides: how many the notebook gives. A browser parts those that are too full."""
    check_packages()
    deck = deck_of(notebook)
    write_text(out, page(deck))
    return len(deck.slides)


def present(notebook: Path, *, port: int | None = None, browser: bool = True) -> int:
    """Serve the slides with live panels, until Ctrl-C or SIGTERM."""
    voila.check_packages("or write the slides with their recorded results: workbench present LAB --out FILE.html")
    check_packages()
    deck = deck_of(notebook)
    with tempfile.TemporaryDirectory(prefix="workbench-present-") as folder:
        served, templates = Path(folder) / "served", Path(folder) / "templates"
        served.mkdir()
        shutil.copytree(TEMPLATES, templates)
        made = served / f"{notebook.stem}.ipynb"
        made.write_text(json.dumps(live_notebook(deck)), encoding="utf-8")
        (templates / "voila" / "templates" / "workbench" / "error.html").write_text(error_page(deck), encoding="utf-8")
        return voila.serve(
            served, page=made.name, port=port, open_browser=browser, options=OPTIONS, templates=templates
        )


def error_page(deck: Deck) -> str:
    """A template of Jinja for what the server cannot show, most of all a kernel that does not start: the slides with
    their recorded results, and what went wrong."""
    slides = page(deck).replace("endraw", "endra&#119;")  # which would end what Jinja leaves alone
    return (
        "{% if status_code < 500 %}<!doctype html><title>{{ status_code }}</title>{{ status_code }}: "
        "{{ status_message | e }}{% else %}{% raw %}" + slides + "{% endraw %}<script>present.end("
        "{{ ('the kernel did not start (' ~ (exception | string | truncate(80)) ~ ')') | tojson }})</script>{% endif %}"
    )


def live_notebook(deck: Deck) -> dict[str, Any]:
    """One cell for each panel; the slides are in the metadata, from where the template takes them."""
    cells: list[dict[str, Any]] = [
        {
            "cell_type": "code",
            "id": f"panel-{n}",
            "metadata": {},
            "source": code,
            "outputs": [],
            "execution_count": None,
        }
        for n, code in enumerate(deck.panels)
    ]
    shown = {"head": head_of(deck), "body": body_of(deck, live=True), "script": script()}
    return {
        "cells": cells,
        "metadata": {
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python"},
            "workbench": shown,
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
