"""Code that is kept lies where this user alone may write: a folder of their own, and who a file belongs to."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.files import writing


def make_private(place: Path) -> None:
    """Make the folder, for this user alone. Raises WorkbenchError where it is another's, or others may write to it."""
    with writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        if trouble := why_not_ours(place, stat.S_ISDIR):
            raise WorkbenchError(f"the folder {place} {trouble}, so no code is taken from it or kept there")


def why_not_ours(place: Path, kind: Callable[[int], bool] = stat.S_ISREG) -> str:
    """Why this cannot be trusted; "" where it belongs to this user and nobody else may write to it.

    kind: what it has to be, by its mode: stat.S_ISREG or stat.S_ISDIR; no link is followed. Raises OSError where there
    is nothing.
    """
    state = place.lstat()
    if not kind(state.st_mode):
        return "is a link, or no file or folder of the kind expected"
    if state.st_uid != os.geteuid():
        return f"belongs to the user with number {state.st_uid}"
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "may be written to by others"
    return ""
