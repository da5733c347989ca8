"""Find what was handed in: notebooks, folders of one folder a student, zips, and what nbgrader and Gradescope export.

    submitted/ann/03_kv_cache.ipynb                 a folder a student; also submitted/ann/03_kv_cache/….ipynb,
                                                    nbgrader's
    submitted/ann.zip, submitted/ann/work.zip       a student's zip
    class.zip                                       one of the above, packed
    assignment_1_export/submission_metadata.yml     Gradescope's export: who handed in submission_123/

Everything in them comes from strangers. Nothing is unpacked: a zip's notebooks are read into memory, each and all
together up to a limit, whatever the zip says of their sizes; entries that lead out of the archive, links and encrypted
entries are refused. What cannot be read is a submission with an error, under the name of its student.
"""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from workbench.errors import WorkbenchError
from workbench.files import resolved
from workbench.grading.notebooks import MAX_NOTEBOOK_BYTES, cells_of, read_cells

MAX_ARCHIVE_BYTES = 1_000_000_000  # of the zip itself
MAX_DIRECTORY_BYTES = 4_000_000  # of its table of contents
MAX_UNPACKED_BYTES = 500_000_000  # of all notebooks that are read from one zip
MAX_METADATA_BYTES = 20_000_000
OTHER_ARCHIVES = (".rar", ".7z", ".tar", ".gz", ".tgz", ".bz2", ".xz")
GRADESCOPE_METADATA = "submission_metadata.yml"
_UNREAD = (OSError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError)


@dataclass(frozen=True)
class Submission:
    """One notebook of one student. `trusted_root`: the folder that it must not lead out of through a link.

    member: its name inside the zip at `path`. timestamp: when it was handed in, UTC, "" for when the file was changed.
    error: why there is nothing to read.
    """

    student_id: str
    path: Path
    trusted_root: Path | None = None
    member: str | None = None
    timestamp: str = ""
    first_name: str = ""
    last_name: str = ""
    email: str = ""
    error: str | None = None

    @property
    def name(self) -> str:
        """The notebook's file name."""
        return PurePosixPath(self.member).name if self.member else self.path.name

    @property
    def told_as(self) -> Path:
        """A path whose file and folder names identify the exercise set."""
        return self.path.parent / self.member if self.member else self.path

    def when(self) -> str:
        """When it was handed in, as YYYY-MM-DD HH:MM:SS in UTC; "" where this is not known."""
        try:
            return self.timestamp or _utc(datetime.fromtimestamp(self.path.stat().st_mtime, UTC))
        except (OSError, ValueError, OverflowError):
            return ""

    def cells(self) -> list[dict]:
        """The notebook's cells; WorkbenchError with the reason where there are none to read."""
        if self.error is not None:
            raise WorkbenchError(self.error)
        if self.member is not None:
            return cells_of(_read_member(self.path, self.member), self.name)
        path, root = self.path, self.trusted_root
        if path.is_dir():
            raise WorkbenchError(
                "the folder holds no notebook (.ipynb)" if path == root else f"{path.name} is a folder"
            )
        if root is not None and not resolved(path).is_relative_to(resolved(root)):
            raise WorkbenchError(f"{path.name} is a link that leads out of the student's folder")
        return read_cells(path)


def find_submissions(paths: Sequence[str | Path], set_names: Sequence[str] = ()) -> list[Submission]:
    """Every submission under `paths`, by student and file, in the same order however the paths are given.

    A notebook given by itself is named after its file, or after its folder where that would not tell students apart. A
    student's folder without a notebook is a submission, too: one that cannot be read.
    """
    loose: list[Path] = []
    found: list[Submission] = []
    for path in map(Path, paths):
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            raise WorkbenchError(f"{path} cannot be read: permission denied")
        if not path.exists():
            raise WorkbenchError(
                f"{path} does not exist; give notebooks, zips, or a folder with one folder for each student"
            )
        if path.is_dir():
            of_folder, more = _in_folder(path)
            found += of_folder
            loose += more
        elif path.suffix == ".zip":
            found += _in_zip(path, path.stem, one_student=False)
        else:
            loose.append(path)
    stems = Counter(path.stem for path in loose)
    for path in loose:
        shared = stems[path.stem] > 1 or path.stem in set_names
        found.append(Submission((resolved(path).parent.name or path.stem) if shared else path.stem, path))
    return sorted(set(found), key=lambda one: (one.student_id, str(one.path), one.member or ""))


def _in_folder(folder: Path) -> tuple[list[Submission], list[Path]]:
    """The submissions of a folder of students, and the notebooks that lie in it by themselves."""
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    people: dict[str, Any] = _gradescope_people(folder)
    found: list[Submission] = []
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            students = [replace(one, **people.get(entry.name, {})) for one in _of_student(entry)]
            found += students
        elif entry.suffix == ".zip" and not entry.is_symlink():
            found += _in_zip(entry, entry.stem, one_student=True)
        elif entry.is_symlink() and entry.suffix != ".ipynb":
            found.append(_unread(entry, entry.stem, "is a link; hand in the files themselves"))
        elif entry.suffix.lower() in OTHER_ARCHIVES:
            found.append(_unread(entry, entry.stem, "is an archive of another kind; hand in a zip"))
    return found, [entry for entry in entries if entry.suffix == ".ipynb" and not entry.is_dir()]


def _unread(path: Path, student: str, why: str) -> Submission:
    return Submission(student, path, error=f"{path.name} {why}")


def _of_student(folder: Path) -> list[Submission]:
    """Notebooks and zips up to one folder down: nbgrader's submitted/<student>/<assignment>/<file>.ipynb."""
    files = sorted(
        file
        for pattern in ("*", "*/*")
        for file in folder.glob(pattern)
        if not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    found: list[Submission] = []
    for file in files:
        if file.suffix == ".ipynb":
            found.append(Submission(folder.name, file, folder, timestamp=_stamp_beside(file)))
        elif file.suffix == ".zip" and file.is_file() and not file.is_symlink():
            found += _in_zip(file, folder.name, one_student=True)
        elif file.suffix.lower() in OTHER_ARCHIVES and file.is_file():
            found.append(_unread(file, folder.name, "is an archive of another kind; hand in a zip"))
    for path in (folder, *folder.glob("[!.]*")):
        if path.is_dir() and not path.is_symlink() and not os.access(path, os.R_OK | os.X_OK):
            found.append(_unread(path, folder.name, "cannot be read: permission denied"))
    return found or [Submission(folder.name, folder, folder)]


# --- When and by whom ---


def _utc(moment: datetime) -> str:
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def parse_time(text: str) -> datetime | None:
    """A moment as people and nbgrader write it (2026-11-30 23:59, with or without a zone; UTC without), or None."""
    words = text.strip().removesuffix(" UTC").strip()
    try:
        moment = datetime.fromisoformat(words)
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


def _stamp_beside(file: Path) -> str:
    """nbgrader's timestamp.txt in the notebook's folder."""
    stamp = file.with_name("timestamp.txt")
    try:
        if stamp.is_symlink() or not stamp.is_file() or stamp.stat().st_size > 200:
            return ""
        moment = parse_time(stamp.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return _utc(moment) if moment else ""


def _gradescope_people(folder: Path) -> dict[str, dict[str, str]]:
    """submission_123 -> who handed it in and when, from a Gradescope export's own table; {} where there is none.

    Raises WorkbenchError for a table that cannot be read: names and times of a whole class would be lost.
    """
    table = folder / GRADESCOPE_METADATA
    if table.is_symlink() or not table.is_file():
        return {}
    import yaml  # comes with Jupyter

    try:
        if (size := table.stat().st_size) > MAX_METADATA_BYTES:
            raise ValueError(f"{size:,} bytes; at most {MAX_METADATA_BYTES:,} are read")
        data = yaml.safe_load(table.read_text(encoding="utf-8", errors="replace"))
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        raise WorkbenchError(
            f"{table} cannot be read ({why}); export it again, or delete it to grade without its names and times"
        ) from error
    people: dict[str, dict[str, str]] = {}
    for name, about in data.items() if isinstance(data, dict) else ():
        submitters = about.get(":submitters") if isinstance(about, dict) else None
        if not isinstance(submitters, list) or not submitters or not isinstance(submitters[0], dict):
            continue
        first = {key: str(value or "") for key, value in submitters[0].items()}
        given, _, family = first.get(":name", "").rpartition(" ")
        made = about.get(":created_at")
        moment = made if isinstance(made, datetime) else parse_time(str(made))
        people[str(name)] = {
            "student_id": first.get(":sid") or first.get(":email") or str(name),
            "first_name": given,
            "last_name": family,
            "email": first.get(":email", ""),
            "timestamp": _utc(moment) if moment else "",
        }
    return people


# --- Zips ---


def _in_zip(path: Path, name: str, *, one_student: bool) -> list[Submission]:
    """The notebooks of a zip: of the student `name`, or of the student whose folder they lie in."""
    try:
        entries = _entries(path)
    except WorkbenchError as error:
        return [Submission(name, path, error=str(error))]
    found, counts = [], Counter(entry.filename for entry in entries)
    for entry in {entry.filename: entry for entry in entries}.values():
        parts = [part for part in entry.filename.replace("\\", "/").split("/") if part not in ("", ".")]
        if entry.is_dir() or not parts or parts[-1].startswith(".") or "__MACOSX" in parts:
            continue
        if any(part.startswith(".") and part != ".." for part in parts):
            continue
        is_notebook = parts[-1].endswith(".ipynb")
        if not is_notebook and ".." not in parts:
            continue
        folders = [part for part in parts[:-1] if part not in (name, "submitted", "submissions", "..")]
        student = name if one_student or not folders else folders[0]
        refusal = _refusal(entry, counts[entry.filename])
        stamp = _utc(datetime(*entry.date_time)) if _is_date(entry.date_time) else ""
        found.append(Submission(student, path, member=entry.filename, timestamp=stamp, error=refusal))
    return found or [_unread(path, name, "holds no notebook (.ipynb)")]


def _is_date(parts: tuple) -> bool:
    try:
        return datetime(*parts).year > 1980  # 1980 is how a zip says that it does not know
    except ValueError:
        return False


def _refusal(entry: zipfile.ZipInfo, copies: int) -> str | None:
    name = entry.filename
    if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/") or ":" in name.split("/")[0]:
        return f"the entry {name!r} leads out of the archive; it was not read"
    if stat.S_ISLNK(entry.external_attr >> 16):
        return f"the entry {name!r} is a link; it was not read"
    if entry.flag_bits & 1:
        return f"the entry {name!r} is encrypted; hand in a zip without a password"
    if copies > 1:
        return f"the archive holds {copies} files named {name!r}; hand in one"
    return None


def _entries(path: Path) -> list[zipfile.ZipInfo]:
    """The table of contents; WorkbenchError for what is not a zip, or is too large to be looked at."""
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise WorkbenchError(f"{path.name} is not a file")
            if status.st_size > MAX_ARCHIVE_BYTES:
                raise WorkbenchError(
                    f"{path.name} has {status.st_size / 1e6:,.0f} MB; at most {MAX_ARCHIVE_BYTES / 1e6:,.0f} MB are"
                    " read"
                )
            if _directory_bytes(file, status.st_size) > MAX_DIRECTORY_BYTES:
                raise WorkbenchError(f"{path.name} lists too many files; hand in the notebook alone")
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
    except WorkbenchError:
        raise
    except _UNREAD as error:
        raise WorkbenchError(f"{path.name} cannot be read as a zip: {error}") from None
    total = sum(entry.file_size for entry in entries if entry.filename.endswith(".ipynb"))
    if total > MAX_UNPACKED_BYTES:
        raise WorkbenchError(
            f"{path.name} unpacks to {total / 1e6:,.0f} MB of notebooks; at most "
            f"{MAX_UNPACKED_BYTES / 1e6:,.0f} MB are read"
        )
    return entries


def _directory_bytes(file, size: int) -> int:
    """How long the table of contents is, as the archive's last record says, before anything is made of it."""
    file.seek(max(0, size - (1 << 16) - 42))
    tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) < at + 22:
        raise zipfile.BadZipFile("it has no end record")
    if at >= 20 and tail[at - 20 : at - 16] == b"PK\x06\x07":  # zip64, for archives beyond all of our limits
        return MAX_DIRECTORY_BYTES + 1
    return struct.unpack("<I", tail[at + 12 : at + 16])[0]


def _read_member(path: Path, member: str) -> bytes:
    """One notebook of a zip, at most 50 MB of it whatever the zip says; WorkbenchError for more, or for none."""
    name = PurePosixPath(member).name
    try:
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            data = file.read(MAX_NOTEBOOK_BYTES + 1)
    except MemoryError:
        raise WorkbenchError(f"{name} in {path.name} does not fit into memory") from None
    except (*_UNREAD, KeyError) as error:
        raise WorkbenchError(f"{name} in {path.name} cannot be read: {error}") from None
    if len(data) > MAX_NOTEBOOK_BYTES:
        raise WorkbenchError(
            f"{name} in {path.name} unpacks to more than {MAX_NOTEBOOK_BYTES / 1e6:.0f} MB. "
            "Clear its outputs and save it again"
        )
    return data


def duplicates(students: Iterable[tuple[str, str, str]]) -> list[str]:
    """A line for each student with several notebooks of one lab, from (student, lab, file)."""
    files: dict[tuple[str, str], list[str]] = {}
    for student, lab, file in students:
        files.setdefault((student, lab), []).append(file)
    return [
        f"{student}: {len(named)} submissions of {lab or 'no known lab'} ({', '.join(named)}); each has its own row"
        for (student, lab), named in files.items()
        if len(named) > 1
    ]
