"""Files, written whole or not at all, and read as what they should be. What the package writes is written beside its
place, then renamed into it.

A reader sees the old content or the new; a full disk or an interruption leaves the old, and nothing beside it. A
process that is killed leaves the old, and a draft beside it (`.NAME.….new`). The next write to that place removes the
draft, which is locked for as long as the process lives. What is not guarded: a machine that loses its power in the
seconds after a write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


LOCK_POLL_S = 0.02


def resolved(path: Path | str) -> Path:
    """The absolute path, all links followed. Raises WorkbenchError where they lead round in a circle."""
    try:
        return Path(path).resolve()
    except (RuntimeError, ValueError) as error:
        raise WorkbenchError(f"cannot tell where {str(path)!r} is: {error}; name another place") from error


def from_home(path: Path | str) -> Path:
    """The absolute path, `~` and `~user` being homes. Raises WorkbenchError where there is no such home."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise WorkbenchError(f"cannot tell where {str(path)!r} is: {error}; name another place") from error


def home() -> Path:
    """The home of this user. Of one who has none, a place where nothing is and nothing can be written."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/nonexistent")


def user_folder(kind: str) -> Path:
    """Where the platform keeps this user's "cache" or "data", ours within it. It may not exist."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home() / "Library" / {"cache": "Caches", "data": "Application Support"}[kind]
    else:
        unset = {"cache": Path(".cache"), "data": Path(".local", "share")}[kind]
        base = Path(os.environ.get(f"XDG_{kind.upper()}_HOME") or home() / unset)
    return base / "inference-workbench"


def cache_folder() -> Path:
    """Where ceilings and forms that were measured and code that was compiled here are kept: $WORKBENCH_CACHE, else the
    platform's folder for a user's caches."""
    if os.environ.get("WORKBENCH_CACHE"):
        return from_home(os.environ["WORKBENCH_CACHE"])
    return user_folder("cache")


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
        with _draft(path) as draft:
            fresh = draft / "file.new"
            fresh.touch()
            yield fresh
            os.chmod(fresh, there if mode is None else mode)
            os.replace(fresh, path)


@contextlib.contextmanager
def _draft(place: Path) -> Iterator[Path]:
    """A folder beside `place`, locked until the block ends and then removed; those of killed processes are removed."""
    place.parent.mkdir(parents=True, exist_ok=True)
    prefix, suffix = f".{place.name[:200]}.", ".new"
    if os.access(place.parent, os.R_OK):
        for found in sorted(place.parent.iterdir()):
            if found.name.startswith(prefix) and found.name.endswith(suffix):
                _remove_abandoned(found)
    draft, lock = _locked_folder(place.parent, prefix, suffix)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        _unlock(lock)


def _locked_folder(parent: Path, prefix: str, suffix: str) -> tuple[Path, int | None]:
    while True:
        draft = Path(tempfile.mkdtemp(dir=parent, prefix=prefix, suffix=suffix))
        lock = _lock(draft)
        if draft.is_dir():
            return draft, lock
        # another process found it before it was locked, and removed it
        _unlock(lock)


def _remove_abandoned(draft: Path) -> None:
    """Remove a draft unless the process that holds its lock lives."""
    with alone_in(draft, 0.0) as alone:
        if alone:
            shutil.rmtree(draft, ignore_errors=True)


def _lock(folder: Path) -> int | None:
    """A lock that ends with the process at the latest, waited for; None on a filesystem without locks."""
    opened = None
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(opened, fcntl.LOCK_EX)
    except OSError:
        _unlock(opened)
        return None
    return opened


@contextlib.contextmanager
def alone_in(folder: Path, wait_s: float) -> Iterator[bool]:
    """Hold the lock of a folder, which processes take in turn: whether it is held. It ends with the process at the
    latest. False where another one kept it for wait_s seconds, where there is no such folder (a link is none), and on
    a filesystem without locks."""
    opened, until = None, time.monotonic() + wait_s
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        while not _taken(opened):
            if time.monotonic() >= until:
                raise BlockingIOError
            time.sleep(LOCK_POLL_S)
        held = True
    except OSError:
        held = False
    try:
        yield held
    finally:
        _unlock(opened)


def _taken(opened: int) -> bool:
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


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
        place = resolved(folder)
        with _draft(place) as draft:
            fresh = draft / "folder"
            fresh.mkdir()
            os.chmod(fresh, 0o755)
            yield fresh
            os.replace(fresh, place)


# -- several files that belong together ----------------------------------------------------------------------------

SAVED, REMOVED = ".saved", ".removed"


@contextlib.contextmanager
def replacing_files(folder: Path | str, remove: Iterable[str] = ()) -> Iterator[Path]:
    """Gives a folder to fill; when the block ends well, its files take the place of those in `folder`, all or none.

    remove: patterns of files in `folder` that go with the old ones. Other files there stay. The new files are moved
    to `folder`/.saved by one rename, which decides: before it the old files are whole, after it the new ones count, and
    `finish_saving`, which every reader of such a folder calls first, moves what a killed process did not.
    """
    folder = Path(folder)
    if not folder.is_dir():
        with new_folder(folder) as fresh:
            yield fresh
        return
    finish_saving(folder)
    with writing(folder), _draft(resolved(folder) / "files") as draft:
        fresh = draft / "files"
        fresh.mkdir()
        yield fresh
        names = {file.name for file in fresh.iterdir()}
        old = {file.name for pattern in remove for file in folder.glob(pattern)} - names
        for name in sorted(names | old):
            if (folder / name).is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        (fresh / REMOVED).write_text(json.dumps(sorted(old)), encoding="utf-8")
        lock = _lock(fresh)
        try:
            os.replace(fresh, folder / SAVED)
            _move_in(folder)
        finally:
            _unlock(lock)


def finish_saving(folder: Path | str) -> None:
    """Move the files of an interrupted save into `folder`, if any; a process that still saves is waited for.

    Raises WorkbenchError where that cannot be done, with where the files lie.
    """
    folder = Path(folder)
    saved = folder / SAVED
    if saved.is_symlink() or not saved.is_dir():
        return
    lock = _lock(saved)
    try:
        _move_in(folder)
    except (OSError, ValueError) as error:
        raise WorkbenchError(
            f"a save into {folder} was interrupted, and its files, which lie in {saved}, cannot be moved to their "
            f"place: {error}. Load it as a user who may write there; to have the old files back, delete {saved}"
        ) from error
    finally:
        _unlock(lock)


def _move_in(folder: Path) -> None:
    """What may be done again from any point on: the list of files to remove goes last."""
    saved = folder / SAVED
    if (saved / REMOVED).exists():
        old = json.loads((saved / REMOVED).read_text(encoding="utf-8"))
        if not isinstance(old, list) or not all(isinstance(name, str) and Path(name).name == name for name in old):
            raise ValueError(f"{saved / REMOVED} is no list of file names")
        for name in old:
            (folder / name).unlink(missing_ok=True)
        for file in sorted(saved.iterdir()):
            if file.name != REMOVED:
                os.replace(file, folder / file.name)
        (saved / REMOVED).unlink()
    if saved.is_dir():
        saved.rmdir()


def read_json_object(file: Path, called: str | None = None) -> dict[str, Any]:
    """The JSON object in a file that may come from anywhere. called: what errors call the file; default its path.

    Raises WorkbenchError for a file that cannot be read, is no JSON, or holds something else than an object.
    """
    called = str(file) if called is None else called
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WorkbenchError(f"{called} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise WorkbenchError(f"{called} must hold a JSON object, got {type(values).__name__}")
    return values
