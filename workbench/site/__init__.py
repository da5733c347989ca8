"""The course as a static site: lectures with their pictures, statements of exercises, documents, and a search.

`workbench site --out FOLDER` builds it with Sphinx. Nothing is executed: the pages show what the notebooks hold. No
page asks anything of another machine, so a site can be opened from a disk or served by any web server. `handout` makes
a page to print of each lab (`workbench summary`).
"""

from __future__ import annotations

from workbench.site.build import check_packages, make_site

__all__ = ["check_packages", "make_site"]
