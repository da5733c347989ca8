"""Building the site: one run of Sphinx over the pages of `workbench.site.pages`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.files import new_folder
from workbench.site.pages import write_pages

SETTINGS: dict[str, Any] = {
    "project": "Inference Workbench",
    "extensions": ["myst_nb", "workbench.site.mathml"],
    "html_theme": "furo",
    "html_title": "Inference Workbench",
    "html_static_path": [str(Path(__file__).parent / "static")],
    "html_css_files": ["course.css"],
    "html_favicon": str(Path(__file__).parent / "static" / "favicon.svg"),
    "html_math_renderer": "mathml",
    "html_copy_source": False,
    "html_show_sourcelink": False,
    "html_use_index": False,
    "html_baseurl": "",
    "language": "en",
    "myst_enable_extensions": ["dollarmath"],
    "myst_heading_anchors": 4,  # links to headings, by the names that GitHub gives them
    "nb_execution_mode": "off",
    "nb_ipywidgets_js": {},  # its default asks two other machines for scripts
    "nb_merge_streams": True,
    "nb_render_markdown_format": "gfm",  # of outputs: with tables
}
PACKAGES = ("sphinx", "myst_nb", "furo", "latex2mathml")


def check_packages() -> None:
    """Raise WorkbenchError where the packages of the extra `site` are missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise WorkbenchError(
            f"the site is built with packages that are not here: {', '.join(missing)}; "
            "pip install -e '.[site]' -c constraints.txt"
        )


def make_site(course: Path, out: Path) -> tuple[int, list[str]]:
    """Build the site of `course` into `out`, a new or empty folder: the count of its pages, and Sphinx's warnings.

    A warning is a link or an anchor that leads nowhere, or a page that cannot be read as it was meant. Raises
    WorkbenchError where the packages of the extra `site` are missing, the course lacks its files, Sphinx fails, or
    `out` is not empty; `out` is then as it was.
    """
    check_packages()
    with tempfile.TemporaryDirectory() as scratch, new_folder(out) as fresh:
        source = Path(scratch, "pages")
        source.mkdir()
        pages = write_pages(course, source)
        (source / "conf.py").write_text("".join(f"{name} = {value!r}\n" for name, value in SETTINGS.items()))
        warnings = _run_sphinx(source, fresh, Path(scratch))
        (fresh / ".buildinfo").unlink(missing_ok=True)
    return len(pages), warnings


def _run_sphinx(source: Path, out: Path, scratch: Path) -> list[str]:
    """Sphinx in a process of its own, as it keeps what it registers: its warnings, without the folder's name."""
    log = scratch / "warnings"
    command = [sys.executable, "-m", "sphinx", "-q", "--no-color", "-b", "html", "-w", str(log)]
    ran = subprocess.run(
        [*command, "-d", str(scratch / "doctrees"), str(source), str(out)], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise WorkbenchError(f"Sphinx ended with exit code {ran.returncode}: {ran.stderr.strip()[-2000:]}")
    said = log.read_text(encoding="utf-8").replace(f"{source}/", "")
    return [line for line in said.splitlines() if line.strip()]
