"""The C++ compiler of this machine: which it is, and what its output depends on. Nothing is compiled here (`build`, and
`workbench.models.kept`)."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from workbench.errors import WorkbenchError

COMPILERS = ("g++", "clang++", "c++")
OFF = "WORKBENCH_NO_COMPILER"  # environment: compile nothing, as on a machine without a compiler
ASK_S = 120  # longer, and the compiler hangs


def why_no_compiler() -> str:
    """Why nothing can be compiled here, and what to install; "" where there is a compiler."""
    if os.environ.get(OFF):
        return f"{OFF} is set"
    if compiler() is None:
        asked = os.environ.get("CXX") or ", ".join(COMPILERS)
        return f"no C++ compiler was found ({asked}); Debian, Ubuntu: apt install g++"
    return ""


def compiler() -> str | None:
    """Path of $CXX, or else of the first known compiler on the path; None where there is none."""
    chosen = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, (chosen,) if chosen else COMPILERS)), None)


def version(compiler: str) -> bytes:
    """What it says of itself. Raises WorkbenchError where it cannot be asked."""
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, timeout=ASK_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise WorkbenchError(f"the C++ compiler {compiler} cannot be asked for its version: {error}") from error


@functools.cache
def processor() -> str:
    """What -march=native depends on: the processor's name and instructions, as far as the system tells."""
    known = [platform.machine(), platform.processor()]
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        known += sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return "\n".join(known)
