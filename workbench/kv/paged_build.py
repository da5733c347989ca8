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
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from workbench.errors import WorkbenchError
from workbench.files import replacing
from workbench.instruments.device import cache_folder

SOURCE = Path(__file__).with_name("paged_blocks.cpp")
COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
COMPILE_S = 120  # longer, and the compiler hangs
OFF = "WORKBENCH_NO_COMPILER"  # environment: compile nothing, as on a machine without a compiler


@functools.cache
def library() -> ctypes.CDLL | str:
    """The compiled loop, or why there is none; asked once in a process."""
    if os.environ.get(OFF):
        return f"{OFF} is set"
    chosen = os.environ.get("CXX")
    compiler = next(filter(None, map(shutil.which, (chosen,) if chosen else COMPILERS)), None)
    if compiler is None:
        return f"no C++ compiler was found ({chosen or ', '.join(COMPILERS)}); Debian, Ubuntu: apt install g++"
    try:
        built = cache_folder() / f"paged_blocks-{_key(compiler)}.so"
        if not built.exists():
            _compile(compiler, built)
        return ctypes.CDLL(str(built))
    except (OSError, WorkbenchError, subprocess.SubprocessError) as error:
        return f"the C++ loop over blocks could not be compiled: {error}"


def _key(compiler: str) -> str:
    """What the library depends on, in 16 digits."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=COMPILE_S, check=True).stdout
    parts = (SOURCE.read_bytes(), " ".join(FLAGS).encode(), version, _processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on: the processor's name and instructions, as far as the system tells."""
    known = [platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability()]
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        known += sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return "\n".join(known)


def _compile(compiler: str, built: Path) -> None:
    with replacing(built, mode=0o755) as fresh:
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, errors="replace")
        if done.returncode:
            raise WorkbenchError(f"{compiler} says: {done.stderr.strip()[:500] or f'exit code {done.returncode}'}")
