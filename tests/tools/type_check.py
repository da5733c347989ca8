"""Check the types of the whole package: mypy with the settings of pyproject.toml.

    python tests/tools/type_check.py [mypy's options]

The files of kernels/ are the package workbench.kernels, which mypy cannot tell from where they lie: so they are named.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from mypy.fscache import FileSystemCache
from mypy.main import process_options, run_build
from mypy.modulefinder import BuildSource

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str]) -> int:
    os.chdir(ROOT)
    started, cache = time.process_time(), FileSystemCache()
    sources, options = process_options(arguments, fscache=cache)
    for file in sorted(Path("kernels").rglob("*.py")):
        module = ".".join(("workbench", *file.with_suffix("").parts)).removesuffix(".__init__")
        sources.append(BuildSource(str(file), module, None))
    _, messages, _ = run_build(sources, options, cache, time.time(), sys.stdout, sys.stderr)
    errors = sum(" error: " in line for line in messages)
    said = f"{errors} errors" if errors else "no errors"
    print(f"mypy: {said} in {len(sources)} files, {time.process_time() - started:.0f} s of processor time")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
