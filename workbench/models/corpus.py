"""The text our small models learn from: the source of the Python standard library, which every learner has.

Nothing is copied into the repository. The split into training and held-out modules is a fixed list, so that
held-out numbers mean the same thing everywhere; the text itself is that of the Python at hand, so its
version belongs beside every number.
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from workbench.errors import WorkbenchError
from workbench.models.tokenizer import Tokenizer

# Never trained on; chosen over many styles: parsing, data structures, numbers, text, threads, files, network.
HELD_OUT = (
    "asyncio/queues.py",
    "bisect.py",
    "calendar.py",
    "csv.py",
    "email/generator.py",
    "fileinput.py",
    "fractions.py",
    "http/cookies.py",
    "importlib/metadata/__init__.py",
    "json/encoder.py",
    "logging/handlers.py",
    "queue.py",
    "sched.py",
    "shelve.py",
    "statistics.py",
    "tempfile.py",
    "textwrap.py",
    "unittest/suite.py",
    "urllib/robotparser.py",
    "zipapp.py",
)

# Tests are not installed everywhere; tables of numbers and generated text teach nothing about code.
_SKIPPED_FOLDERS = frozenset(
    ["site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data", "config"]
)
_SKIPPED_FILES = ("_sysconfigdata", "html/entities.py", "keyword.py", "pydoc_data")


@dataclass(frozen=True)
class SourceFile:
    path: str  # relative to the standard library's folder, with forward slashes
    text: str


def _is_table(path: Path) -> bool:
    """encodings/cp037.py and its like: a 256-entry table each."""
    return path.parts[0] == "encodings" and path.stem not in ("__init__", "aliases", "idna", "punycode", "utf_8_sig")


def standard_library(root: Path | None = None) -> list[SourceFile]:
    """Every source file of the installed standard library that is text worth learning, sorted by path. Read once."""
    root = root or _library_folder()
    files = list(_whole_library(root))
    if not files:
        raise WorkbenchError(
            f"no standard library source found under {root}: this Python ships without its .py files; "
            "use a Python from python.org, Debian, conda or pyenv"
        )
    return files


@functools.cache
def _whole_library(root: Path) -> tuple[SourceFile, ...]:
    return tuple(_read(root, sorted(root.rglob("*.py"))))


def _library_folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _read(root: Path, paths: Iterable[Path]) -> list[SourceFile]:
    """Those of the paths that are text worth learning."""
    files = []
    for path in paths:
        relative = path.relative_to(root)
        name = relative.as_posix()
        if _SKIPPED_FOLDERS.intersection(relative.parts) or name.startswith(_SKIPPED_FILES) or _is_table(relative):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            files.append(SourceFile(name, text))
    return files


def training_files(root: Path | None = None) -> list[SourceFile]:
    return [f for f in standard_library(root) if f.path not in HELD_OUT]


def held_out_files(root: Path | None = None) -> list[SourceFile]:
    """The held-out modules that this Python has (all of them, from 3.11 on). No other file is read."""
    root = root or _library_folder()
    files = _read(root, sorted(root / name for name in HELD_OUT))
    if not files:
        standard_library(root)  # raises where there is no source at all
    return files


def token_stream(files: Sequence[SourceFile], tokenizer: Tokenizer, order: list[int] | None = None) -> torch.Tensor:
    """[T] int64: the files' tokens one after the other, each file closed by the end-of-text token."""
    assert tokenizer.end_of_text is not None, "a tokenizer without the token that closes a file"
    ids: list[int] = []
    for index in order if order is not None else range(len(files)):
        ids.extend(tokenizer.encode(files[index].text))
        ids.append(tokenizer.end_of_text)
    return torch.tensor(ids, dtype=torch.int64)
