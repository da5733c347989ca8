"""Run the tests; where a few failed beside others, run their files once more, alone.

    python tests/tools/once_more.py PATH … -- COMMAND OF PYTEST …

Three files of tests run at a time, each with models, servers and browsers, and a machine that is busy enough makes any
wait too short once in some ten thousand tests. So up to FILES files that held a failure run again with nothing beside
them, whole (the cells of a notebook need those before them). The run passes if every test that failed passes then, and
they are named all the same: such a test depends on a clock or on an order, and is to be mended. There is no second run
after a process that crashed, a file that could not be collected, or a run that did not come to its end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

FILES = 4  # more than that is no accident
FAILED = Path(".pytest_cache/v/cache/lastfailed")
SOME_FAILED = 1  # pytest's exit code; any other is of a run that did not come to its end
Test = tuple[str, str]  # class and name, as a junit file has them


class Run:
    """One run of pytest: its exit code, node ids that it noted as failed, and from its junit file the tests that
    passed, and those that failed with what they said."""

    def __init__(self, command: list[str], paths: list[str]) -> None:
        FAILED.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(prefix="once-more-") as folder:
            junit = Path(folder) / "junit.xml"
            self.code = subprocess.run([*command, f"--junitxml={junit}", *paths], check=False).returncode
            cases = list(ET.parse(junit).iter("testcase")) if junit.exists() else []
        self.noted = sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []
        self.failed: dict[Test, str] = {}
        self.passed = set[Test]()
        for case in cases:
            test = case.get("classname", ""), case.get("name", "")
            said = [part.get("message", "") for part in case if part.tag in ("failure", "error")]
            if said:
                self.failed[test] = said[0]
            elif case.find("skipped") is None:
                self.passed.add(test)

    @property
    def crashed(self) -> bool:
        return any(said.startswith("worker ") and " crashed " in said for said in self.failed.values())


def main(arguments: list[str]) -> int:
    cut = arguments.index("--")
    paths, command = arguments[:cut], arguments[cut + 1 :]
    first = Run(command, paths)
    files = sorted({test.partition("::")[0] for test in first.noted})
    is_accident = len(first.noted) == len(first.failed) and not first.crashed and 0 < len(files) <= FILES
    if first.code != SOME_FAILED or not is_accident:
        return first.code
    print(f"\n== once more, alone: {', '.join(files)}", flush=True)
    second = Run([*command, "-n", "0"], files)
    if second.code != 0:
        return second.code
    if not_passed := first.failed.keys() - second.passed:
        print(
            f"\nFailed beside others and did not run alone: {', '.join('::'.join(one) for one in sorted(not_passed))}"
        )
        return first.code
    print("\nFailed beside others and passed alone, so they depend on how busy the machine is; to be mended:")
    print("\n".join(f"  {test}" for test in first.noted), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
