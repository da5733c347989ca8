"""What of a clone a machine needs to run the GPU's tests and to record: less than MAX_BYTES.

Built notebooks, exercises, pictures, other machines' records and models that no recording on a GPU loads stay behind.
"""

from __future__ import annotations

import subprocess
import tarfile
from fnmatch import fnmatch
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.files import replacing

MAX_BYTES = 56 << 20
MODELS = (  # that travel
    "stdlib-10m",
    "stdlib-1m",
    "stdlib-1m-pruned",
    "stdlib-10m-eagle",
    "stdlib-10m-medusa",
    "stdlib-3m-mamba2",
    "stdlib-3m-block-diffusion",
    "stdlib-tokenizer",
)
LEFT_OUT = (
    "*.ipynb",
    "docs/pictures/*",
    "exercises/*",
    "solutions/*",
    "notebooks/*",
    "tests/tools/behaviour_before.json",
    "workbench/records/*.json",
)
ZOO = "workbench/models/zoo/"


def packed_files(root: Path) -> list[str]:
    """Paths below the clone's root, sorted. Raises WorkbenchError where it is no clone, or where they are too large."""
    asked = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True)
    if asked.returncode:
        raise WorkbenchError(f"{root} is no clone of the course (git says: {asked.stderr.strip()}); run this in one")
    tracked = [name for name in asked.stdout.split("\0") if name and (root / name).is_file()]
    names = sorted(name for name in tracked if travels(name))
    size = sum((root / name).stat().st_size for name in names)
    if size > MAX_BYTES:
        raise WorkbenchError(f"what must travel has {size:,} bytes; {MAX_BYTES:,} may: see LEFT_OUT in {__file__}")
    return names


def travels(name: str) -> bool:
    """Whether a tracked file is needed there."""
    folder, slash, _ = name.removeprefix(ZOO).partition("/")
    if name.startswith(ZOO) and slash:
        return folder in MODELS
    return not any(fnmatch(name, pattern) for pattern in LEFT_OUT)


def pack(root: Path, archive: Path) -> tuple[int, int]:
    """Write them as a tar; (files, bytes of the tar). Whole or not at all."""
    names = packed_files(root)
    zipped = archive.name.endswith("gz")
    with replacing(archive) as fresh, tarfile.open(fresh, "w:gz" if zipped else "w") as tar:
        for name in names:
            tar.add(root / name, arcname=f"inference-workbench/{name}")
    return len(names), archive.stat().st_size
