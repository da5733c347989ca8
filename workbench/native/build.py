"""Compiling a C++ file: once per machine, with the C++ compiler that is there, or a reason why not.

A library lies in a folder of the user's caches where this user alone may write. Its name holds a digest of everything
it depends on (source, flags, compiler, processor) and one of its own bytes: a damaged file is not the one that its name
says, and is compiled again. So is a file that another user could have changed. Two processes that compile at once each
write one of their own, and the last one stays; where nothing can be written the library is compiled for this process
alone.

It is opened with ctypes, which needs neither headers of torch nor a build system; its OpenMP is the one that torch has
loaded, and so its threads are torch's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.files import cache_folder, write_bytes
from workbench.native import compiler as compilers
from workbench.native.private import make_private, why_not_ours

FLAGS = ("-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
COMPILE_S = 120  # longer, and the compiler hangs


@functools.cache
def library(source: Path) -> ctypes.CDLL | str:
    """The compiled file, or why there is none; asked once in a process."""
    missing, compiler = compilers.why_no_compiler(), compilers.compiler()
    if missing or compiler is None:
        return missing
    try:
        folder, name = cache_folder() / "native", f"{source.stem}-{_key(source, compiler)}"
        kept = next((file for file in sorted(folder.glob(f"{name}-*.so")) if _is_ours(file)), None)
        return _compiled(source, compiler, folder, name) if kept is None else ctypes.CDLL(str(kept))
    except (OSError, WorkbenchError, subprocess.SubprocessError) as error:
        return f"the C++ loop in {source.name} could not be compiled: {error}"


def why_no_library(source: Path) -> str:
    """Why there is none of this file; "" where there is."""
    made = library(source)
    return made if isinstance(made, str) else ""


@functools.cache
def functions(source: Path, opened: Callable[[ctypes.CDLL], ctypes.CDLL]) -> ctypes.CDLL:
    """The library of a file of which `why_no_library` gave no reason. opened: gives its functions their types."""
    made = library(source)
    assert not isinstance(made, str), "why_no_library was asked"
    return opened(made)


@functools.cache
def depends_on(source: Path) -> str:
    """In 16 digits what a library of this file depends on; "" where there is no compiler."""
    compiler = compilers.compiler()
    return "" if compiler is None else _key(source, compiler)


def _key(source: Path, compiler: str) -> str:
    """What the library depends on, headers beside the source included, in 16 digits."""
    sources = [source, *sorted(source.parent.glob("*.h"))]
    parts = (*(file.read_bytes() for file in sources), " ".join(FLAGS).encode(), compilers.version(compiler))
    parts += (compilers.processor().encode(),)
    return _digest(b"\0".join(parts))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _is_ours(file: Path) -> bool:
    """Whether it holds what its name says, and nobody but this user could have written it or put it there."""
    if why_not_ours(file.parent, stat.S_ISDIR) or why_not_ours(file):
        return False
    return file.stem.rpartition("-")[2] == _digest(file.read_bytes())


def _compiled(source: Path, compiler: str, folder: Path, name: str) -> ctypes.CDLL:
    """Compiled in a folder of its own, kept if that can be, and opened."""
    with tempfile.TemporaryDirectory(prefix="workbench-") as room:
        fresh = Path(room) / f"{name}.so"
        command = [compiler, *FLAGS, str(source), "-o", str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, errors="replace")
        if done.returncode:
            raise WorkbenchError(f"{compiler} says: {done.stderr.strip()[:500] or f'exit code {done.returncode}'}")
        data = fresh.read_bytes()
        kept = folder / f"{name}-{_digest(data)}.so"
        try:
            make_private(folder)
            write_bytes(kept, data, mode=0o700)
        except WorkbenchError:  # the next process compiles again, and this one has what it needs
            return ctypes.CDLL(str(fresh))
        return ctypes.CDLL(str(kept if _is_ours(kept) else fresh))
