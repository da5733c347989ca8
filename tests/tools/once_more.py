"""Run the tests; where a few failed beside others, run their files once more, alone.

    python tests/tools/once_more.py PATH … -- COMMAND OF PYTEST …

Three files of tests run at a time, each with models, servers and browsers, and a machine that is busy enough makes any
wait too short once in some ten thousand tests. A defect fails alone too. So up to FILES files that held a failure run
again with nothing beside them, whole (the cells of a notebook need those before them). The run passes if they pass
then, and what failed first is printed all the same: such a test depends on a clock or on an order, and is to be mended.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FILES = 4  # more than that is no accident
FAILED = Path(".pytest_cache/v/cache/lastfailed")
SOME_FAILED = 1  # pytest's exit code; any other is of a run that did not come to its end


def failed_tests() -> list[str]:
    """Node ids, as the run that ended noted them."""
    return sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []


def run(command: list[str], paths: list[str]) -> int:
    FAILED.unlink(missing_ok=True)
    return subprocess.run([*command, *paths], check=False).returncode


def main(arguments: list[str]) -> int:
    cut = arguments.index("--")
    paths, command = arguments[:cut], arguments[cut + 1 :]
    code = run(command, paths)
    first = failed_tests()
    files = sorted({test.partition("::")[0] for test in first})
    if code != SOME_FAILED or not 0 < len(files) <= FILES:
        return code
    print(f"\n== once more, alone: {', '.join(files)}", flush=True)
    code = run([*command, "-n", "0"], files)
    if code == 0:
        print("\nFailed beside others and passed alone, so they depend on how busy the machine is; to be mended:")
        print("\n".join(f"  {test}" for test in first), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
