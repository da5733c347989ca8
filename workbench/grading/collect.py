"""Find what was handed in: notebooks, folders of one folder a student, zips, and what nbgrader and Gradescope export.

    submitted/ann/03_kv_cache.ipynb                 a folder a student; also submitted/ann/03_kv_cache/….ipynb,
                                                    nbgrader's
    submitted/ann.zip, submitted/ann/work.zip       a student's zip
    class.zip                                       one of the above, packed
    assignment_1_export/submission_metadata.yml     Gradescope's export: who handed in submission_123/, and when

A folder or file whose name begins with a dot is read where nothing else of its student is a notebook, and named in a
note otherwise. Passed over without a word are those that programs make by themselves (`MADE_BY_PROGRAMS`).

Everything in them comes from strangers. Nothing is unpacked: a zip's notebooks are read into memory, each and all
together up to a limit, whatever the zip says of their sizes; entries that lead out of the archive, links and encrypted
entries are refused. What cannot be read is a submission with an error, under the name of its student.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, tzinfo
from pathlib import Path, PurePosixPath
from typing import Any

from workbench.errors import WorkbenchError
from workbench.files import resolved
from workbench.grading.handed_in import in_zone, moment_of, utc_text
from workbench.grading.notebooks import MAX_NOTEBOOK_BYTES, cells_of, read_notebook
from workbench.grading.reports import inert, some_of

MAX_ARCHIVE_BYTES = 1_000_000_000  # of the zip itself
MAX_DIRECTORY_BYTES = 4_000_000  # of its table of contents
MAX_UNPACKED_BYTES = 500_000_000  # of all notebooks that are read from one zip
MAX_METADATA_BYTES = 20_000_000
OTHER_ARCHIVES = (".rar", ".7z", ".tar", ".gz", ".tgz", ".bz2", ".xz")
GRADESCOPE_METADATA = "submission_metadata.yml"
GRADESCOPE_EXPORT = re.compile(r"assignment_\d+_export")  # how Gradescope names the folder of an export
MADE_BY_PROGRAMS = (".ipynb_checkpoints", ".virtual_documents", ".git", ".earlier", ".grading", "__MACOSX")
_UNREAD = (OSError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError)


@dataclass(frozen=True)
class Submission:
    """One notebook of one student. `trusted_root`: the folder that it must not lead out of through a link.

    member: its name inside the zip at `path`. home: where its student's things lie; a student of the same name in
    another home is another one. timestamp: when it was handed in, UTC, "" where no source that students cannot write
    says so; source: which one did. claims: times that stand where students can write, to be shown and not used. notes:
    what its teacher should know. error: why there is nothing to read.
    """

    student_id: str
    path: Path
    trusted_root: Path | None = None
    member: str | None = None
    home: str = ""
    timestamp: str = ""
    source: str = ""
    claims: tuple[str, ...] = ()
    first_name: str = ""
    last_name: str = ""
    email: str = ""
    notes: tuple[str, ...] = ()
    error: str | None = None

    @property
    def name(self) -> str:
        """The notebook's file name."""
        return PurePosixPath(self.member).name if self.member else self.path.name

    @property
    def told_as(self) -> Path:
        """A path whose file and folder names identify the exercise set."""
        return self.path.parent / self.member if self.member else self.path

    def cells(self) -> list[dict]:
        """The notebook's cells; WorkbenchError with the reason where there are none to read."""
        return cells_of(self.data(), self.name)

    def data(self) -> bytes:
        """The notebook as it was handed in; WorkbenchError with the reason where there is none to read."""
        if self.error is not None:
            raise WorkbenchError(self.error)
        if self.member is not None:
            return _read_member(self.path, self.member)
        path, root = self.path, self.trusted_root
        if path.is_dir():
            raise WorkbenchError(
                "the folder holds no notebook (.ipynb)" if path == root else f"{path.name} is a folder"
            )
        if root is not None and not resolved(path).is_relative_to(resolved(root)):
            raise WorkbenchError(f"{path.name} is a link that leads out of the student's folder")
        return read_notebook(path, within=root)


def find_submissions(
    paths: Sequence[str | Path], set_names: Sequence[str] = (), zone: tzinfo | None = None
) -> list[Submission]:
    """Every submission under `paths`, by student and file, in the same order however the paths are given.

    A notebook given by itself is named after its file, or after its folder where that would not tell students apart. A
    student's folder without a notebook is a submission, too: one that cannot be read. zone: of times that name none.
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
            of_folder, more = _in_folder(path, zone)
            found += of_folder
            loose += more
        elif path.suffix == ".zip":
            found += _in_zip(path, path.stem, one_student=False)
        else:
            loose.append(path)
    stems = Counter(path.stem for path in loose)
    for path in loose:
        shared = stems[path.stem] > 1 or path.stem in set_names
        student = (resolved(path).parent.name or path.stem) if shared else path.stem
        found.append(Submission(student, path, home=str(resolved(path)), claims=_file_time(path)))
    found = [replace(one, notes=(*one.notes, *_about_name(one.student_id))) for one in found]
    return sorted(set(found), key=lambda one: (one.student_id, str(one.path), one.member or ""))


def _about_name(student: str) -> tuple[str, ...]:
    if inert(student) != student:
        return (f"the name holds characters that do not show: {inert(student)}",)
    return ("the name begins with a dot",) if student.startswith(".") else ()


def _made_by_programs(name: str) -> bool:
    return name in MADE_BY_PROGRAMS or name.startswith("._")


def _in_folder(folder: Path, zone: tzinfo | None) -> tuple[list[Submission], list[Path]]:
    """The submissions of a folder of students, and the notebooks that lie in it by themselves."""
    entries = sorted(entry for entry in folder.iterdir() if not _made_by_programs(entry.name))
    people, note = _gradescope_people(folder, zone)
    home = str(resolved(folder))
    submissions: list[Submission] = []
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            of_student = _of_student(entry)
            if entry.name.startswith(".") and of_student[0].path == entry:
                continue  # without a notebook it is a program's
            submissions += [replace(one, **people.get(entry.name, {}), notes=(*one.notes, *note)) for one in of_student]
        elif entry.suffix == ".zip" and not entry.is_symlink():
            submissions += _in_zip(entry, entry.stem, one_student=True)
        elif entry.is_symlink():
            submissions.append(_unread(entry, entry.stem, "is a link; hand in the files themselves"))
        elif entry.suffix.lower() in OTHER_ARCHIVES:
            submissions.append(_unread(entry, entry.stem, "is an archive of another kind; hand in a zip"))
    loose = [entry for entry in entries if entry.suffix == ".ipynb" and not entry.is_dir() and not entry.is_symlink()]
    return [replace(one, home=home) for one in submissions], loose


def _unread(path: Path, student: str, why: str) -> Submission:
    return Submission(student, path, error=f"{path.name} {why}")


def _of_student(folder: Path) -> list[Submission]:
    """Notebooks and zips up to one folder down: nbgrader's submitted/<student>/<assignment>/<file>.ipynb."""
    files = sorted(file for pattern in ("*", "*/*") for file in folder.glob(pattern))
    shown: list[Submission] = []
    hidden: list[Submission] = []
    for file in files:
        parts = file.relative_to(folder).parts
        if any(_made_by_programs(part) for part in parts):
            continue
        of = hidden if any(part.startswith(".") for part in parts) else shown
        if file.suffix == ".ipynb":
            of.append(Submission(folder.name, file, folder, claims=(*_stamp_beside(file), *_file_time(file))))
        elif file.suffix == ".zip" and file.is_file() and resolved(file) == resolved(folder) / file.relative_to(folder):
            of += _in_zip(file, folder.name, one_student=True)
        elif file.suffix.lower() in OTHER_ARCHIVES and file.is_file():
            of.append(_unread(file, folder.name, "is an archive of another kind; hand in a zip"))
    for path in (folder, *folder.glob("[!.]*")):
        if path.is_dir() and not path.is_symlink() and not os.access(path, os.R_OK | os.X_OK):
            shown.append(_unread(path, folder.name, "cannot be read: permission denied"))
    return _with_hidden(shown, hidden) or [Submission(folder.name, folder, folder)]


def _with_hidden(shown: list[Submission], hidden: list[Submission]) -> list[Submission]:
    """A student's submissions; those under a name that begins with a dot where there are no others."""
    if not hidden:
        return shown
    names = some_of(sorted(one.name for one in hidden))
    if not shown:
        return [replace(one, notes=(*one.notes, "it lay under a name that begins with a dot")) for one in hidden]
    note = f"not read, as a name that begins with a dot led to it: {names}"
    return [replace(shown[0], notes=(*shown[0].notes, note)), *shown[1:]]


# --- When and by whom ---


def _file_time(file: Path) -> tuple[str, ...]:
    try:
        return (f"the file was changed {utc_text(datetime.fromtimestamp(file.lstat().st_mtime, UTC))} UTC",)
    except (OSError, ValueError, OverflowError) as error:
        return (f"the file's date cannot be read: {error}",)


def _stamp_beside(file: Path) -> tuple[str, ...]:
    """nbgrader's timestamp.txt in the notebook's folder, which students can write."""
    stamp = file.with_name("timestamp.txt")
    try:
        if stamp.is_symlink() or not stamp.is_file() or stamp.stat().st_size > 200:
            return ()
        return (f"timestamp.txt says {' '.join(stamp.read_text(encoding='utf-8', errors='replace').split())[:60]}",)
    except OSError as error:
        return (f"timestamp.txt cannot be read: {error.strerror}",)


def _gradescope_people(folder: Path, zone: tzinfo | None) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """submission_123 -> who handed it in and when, from a Gradescope export's own table; {} where there is none.

    A table in a folder that is not named as Gradescope names an export is not used, as a student may have written it,
    and a note says so. Raises WorkbenchError for a table that cannot be read: names and times of a whole class would be
    lost.
    """
    table = folder / GRADESCOPE_METADATA
    if table.is_symlink() or not table.is_file():
        return {}, ()
    if not GRADESCOPE_EXPORT.fullmatch(resolved(folder).name):
        return {}, (
            f"{GRADESCOPE_METADATA} was not used: it counts in a folder named as Gradescope names an export, "
            "assignment_123_export",
        )
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
    people: dict[str, dict[str, Any]] = {}
    for name, about in data.items() if isinstance(data, dict) else ():
        submitters = about.get(":submitters") if isinstance(about, dict) else None
        if not isinstance(submitters, list) or not submitters or not isinstance(submitters[0], dict):
            continue
        first = {key: str(value or "") for key, value in submitters[0].items()}
        given, _, family = first.get(":name", "").rpartition(" ")
        made, what = about.get(":created_at"), f"{table}, {name}"
        if made is None:
            when = ""
        elif isinstance(made, datetime):
            when = utc_text(in_zone(made, zone, what))
        else:
            when = utc_text(moment_of(str(made), zone, what))
        people[str(name)] = {
            "student_id": first.get(":sid") or first.get(":email") or str(name),
            "first_name": given,
            "last_name": family,
            "email": first.get(":email", ""),
            "timestamp": when,
            "source": "Gradescope" if when else "",
        }
    return people, ()


# --- Zips ---


def _in_zip(path: Path, name: str, *, one_student: bool) -> list[Submission]:
    """The notebooks of a zip: of the student `name`, or of the student whose folder they lie in."""
    try:
        entries = _entries(path)
    except WorkbenchError as error:
        return [Submission(name, path, error=str(error))]
    counts = Counter(entry.filename for entry in entries)
    shown: dict[str, list[Submission]] = {}
    hidden: dict[str, list[Submission]] = {}
    for entry in {entry.filename: entry for entry in entries}.values():
        parts = [part for part in entry.filename.replace("\\", "/").split("/") if part not in ("", ".")]
        if entry.is_dir() or not parts or any(_made_by_programs(part) for part in parts):
            continue
        is_notebook = parts[-1].endswith(".ipynb")
        if not is_notebook and ".." not in parts:
            continue
        folders = [part for part in parts[:-1] if part not in (name, "submitted", "submissions", "..")]
        student = name if one_student or not folders else folders[0]
        claims = (f"the zip says {datetime(*entry.date_time)}, in no zone",) if _is_date(entry.date_time) else ()
        refusal = _refusal(entry, counts[entry.filename])
        below = parts if one_student or not folders else parts[parts.index(student) + 1 :]
        under_dot = any(part.startswith(".") and part != ".." for part in below)
        (hidden if under_dot else shown).setdefault(student, []).append(
            Submission(student, path, member=entry.filename, claims=claims, error=refusal)
        )
    made: list[Submission] = []
    for student in sorted({*shown, *hidden}):
        made += _with_hidden(shown.get(student, []), hidden.get(student, []))
    return [replace(one, home=str(resolved(path))) for one in made] or [
        _unread(path, name, "holds no notebook (.ipynb)")
    ]


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
