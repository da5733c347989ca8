"""The panels alone, as pages without notebooks around them: `workbench demo`.

`workbench/demo/pages.py` writes a small notebook for each lab, and `workbench/demo/voila.py` has Voilà serve them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from workbench.demo.pages import INDEX, write_pages
from workbench.demo.voila import HOST, check_packages, serve

__all__ = ["demo"]


def demo(names: Sequence[str], *, port: int | None = None, host: str = HOST, browser: bool = True) -> int:
    """Serve the pages of these labs until it is stopped. The pages lie in a temporary folder, which goes with it.

    names: of pages, as in `page_names`; the page of one alone is opened at once, the index of several.
    Raises WorkbenchError as `serve` does.
    """
    check_packages()
    with tempfile.TemporaryDirectory(prefix="workbench-demo-") as folder:
        write_pages(Path(folder), names)
        opened = names[0] if len(names) == 1 else INDEX
        return serve(Path(folder), page=f"{opened}.ipynb", port=port, host=host, open_browser=browser)
