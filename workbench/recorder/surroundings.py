"""What the archive of a recording says of the machine: driver, packages, the environment that decides about kernels."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from typing import Any

KEPT = ("TRITON_", "WORKBENCH_", "CUDA_", "PYTORCH_", "OMP_", "MKL_")  # beginnings of variables that are kept
COMMANDS = (["nvidia-smi"], ["nvidia-smi", "-q"], ["lscpu"])
LONGEST = 40_000  # characters of a command's output


def surroundings() -> dict[str, Any]:
    """As plain data. What cannot be asked here is left out."""
    from workbench.kernels import launch

    packages = sorted({(d.metadata["Name"], d.version) for d in importlib.metadata.distributions()}, key=str)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "kernels": {"interpreted": launch.INTERPRETED, "why": launch.WHY},
        "environment": {name: text for name, text in os.environ.items() if name.startswith(KEPT)},
        "packages": dict(packages),
        "commands": {" ".join(command): text for command in COMMANDS if (text := _output(command))},
    }


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout[:LONGEST]
