"""Files, written whole or not at all: what the package writes is written beside its place, then renamed into it.

A reader sees the old content or the new; a full disk or an interruption leaves the old, and nothing beside it. What is
not guarded: a machine that loses its power in the seconds after a write.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from torch import Tensor

TO_DO = {
    errno.ENOSPC: "make room on the disk",
    errno.EDQUOT: "make room in your quota",
    errno.EFBIG: "the file is larger than may be written here; raise the limit (ulimit -f)",
    errno.EACCES: "name a place that you may write to",
    errno.EPERM: "name a place that you may write to",
    errno.EROFS: "name a place that you may write to",
    errno.ENOTDIR: "a file is in the way; name another place",
    errno.EEXIST: "something is in the way; name another place",
    errno.EISDIR: "a folder is in the way; name another place",
    errno.ENOTEMPTY: "name a new folder, or one that is empty",
    errno.ENAMETOOLONG: "name a shorter one",
}


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """An OSError within the block becomes a WorkbenchError: `path` could not be written, why, and what to do.

    One that a block within it has made of an OSError is said of `path` too, and not of a draft beside it.
    """
    try:
        yield
    except OSError as error:
        raise _cannot_write(path, error) from error
    except WorkbenchError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise _cannot_write(path, error.__cause__) from error.__cause__


def _cannot_write(path: Path | str, error: OSError) -> WorkbenchError:
    to_do = TO_DO.get(error.errno or 0)
    return WorkbenchError(f"cannot write {path}: {error.strerror or error}{f'; {to_do}' if to_do else ''}")


@contextlib.contextmanager
def replacing(path: Path | str, *, mode: int | None = None) -> Iterator[Path]:
    """Gives a path beside `path` to write to, which becomes `path` when the block ends well.

    Makes the folder; a link is replaced, not followed. mode: of the file; default: as it was, 0o644 for a new one.
    An error within the block leaves `path` as it was and nothing beside it. Only files are replaced: no folder, no
    device, no pipe. Raises WorkbenchError for what cannot be written, as `writing` says it.
    """
    path = Path(path)
    with writing(path):
        there = _mode(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:200]}.", suffix=".new")
        os.close(handle)
        fresh = Path(name)
        try:
            yield fresh
            os.chmod(fresh, there if mode is None else mode)
            os.replace(fresh, path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise


def _mode(path: Path) -> int:
    """Of the file that is there, 0o644 of none; OSError where something else is there."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return 0o644
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError("it is a device or a pipe, which cannot be replaced; name a file")
    return stat.S_IMODE(mode)


def write_bytes(path: Path | str, data: bytes, *, mode: int | None = None) -> None:
    """Write a file whole or not at all; see `replacing`."""
    with replacing(path, mode=mode) as fresh:
        fresh.write_bytes(data)


def write_text(path: Path | str, text: str, *, errors: str = "strict", mode: int | None = None) -> None:
    """Write a file whole or not at all, in UTF-8, its line ends as they are in `text`; see `replacing`.

    errors: what becomes of characters that UTF-8 does not have, as in `str.encode`.
    """
    write_bytes(path, text.encode("utf-8", errors), mode=mode)


def write_tensors(path: Path | str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a .safetensors file whole or not at all; see `replacing`. tensors: contiguous, sharing no memory."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with replacing(path) as fresh:
        try:
            save_file(dict(tensors), fresh, metadata=dict(metadata) if metadata else None)
        except SafetensorError as error:  # says an OSError in words
            number = next((n for n in TO_DO if f"(os error {n})" in str(error)), None)
            raise (OSError(number, os.strerror(number)) if number else OSError(str(error))) from error


@contextlib.contextmanager
def new_folder(folder: Path | str) -> Iterator[Path]:
    """Gives a folder beside `folder` to fill, which becomes `folder` when the block ends well.

    `folder` must not be there, or be an empty folder: nothing is overwritten. Errors as in `replacing`.
    """
    folder = Path(folder)
    with writing(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise WorkbenchError(f"{folder} is there already and not empty; nothing is overwritten. Name a new folder")
        place = folder.resolve()
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name[:200]}.", suffix=".new"))
        try:
            os.chmod(fresh, 0o755)
            yield fresh
            os.replace(fresh, place)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
