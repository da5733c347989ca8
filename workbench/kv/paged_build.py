"""Compiling the C++ loop over blocks: once per machine, with the C++ compiler that is there, or a reason why not.

The library lies in the user's folder for caches, under a name made of everything it depends on: source, flags,
compiler and processor. Two processes that compile at once each write one of their own, and the last one stays.
It is opened with ctypes, which needs neither headers of torch nor a build system; its OpenMP is the one that torch has
loaded, and so its threads are torch's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.files import cache_folder, replacing
from workbench.models import cpp

SOURCE = Path(__file__).with_name("paged_blocks.cpp")
FLAGS = ("-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
COMPILE_S = 120  # longer, and the compiler hangs


@functools.cache
def library() -> ctypes.CDLL | str:
    """The compiled loop, or why there is none; asked once in a process."""
    missing = cpp.why_no_compiler()
    compiler = cpp.compiler()
    if missing or compiler is None:
        return missing
    try:
        built = cache_folder() / f"paged_blocks-{_key(compiler)}.so"
        if not built.exists():
            _compile(compiler, built)
        return ctypes.CDLL(str(built))
    except (OSError, WorkbenchError, subprocess.SubprocessError) as error:
        return f"the C++ loop over blocks could not be compiled: {error}"


def _key(compiler: str) -> str:
    """What the library depends on, in 16 digits."""
    parts = (SOURCE.read_bytes(), " ".join(FLAGS).encode(), cpp.version(compiler), cpp.processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, built: Path) -> None:
    with replacing(built, mode=0o755) as fresh:
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, errors="replace")
        if done.returncode:
            raise WorkbenchError(f"{compiler} says: {done.stderr.strip()[:500] or f'exit code {done.returncode}'}")
