"""Which tests take the processor's time: by file, and the longest, from a run that wrote a junit file.

    .venv/bin/python -m pytest tests/engine --junitxml=run.xml
    .venv/bin/python tests/tools/slowest.py run.xml

Seconds are those of the processor (user and system, with child processes that ended), which `tests/conftest.py` notes:
a busy machine makes a test wait, and its time on the clock says little. What a browser or a server computes that
outlives the test is not in it.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

LONGEST = 30


def cpu_seconds(junit: Path) -> dict[tuple[str, str], float]:
    """{(file, test): seconds}; of a run without the property, seconds on the clock."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for case in ET.parse(junit).iter("testcase"):
        noted = case.find("properties/property[@name='cpu_s']")
        seconds = case.get("time", "0") if noted is None else noted.get("value", "0")
        file = case.get("classname", "").partition(".Test")[0]
        found[file, case.get("name", "")] += float(seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("junit", type=Path)
    tests = cpu_seconds(parser.parse_args().junit)
    files: dict[str, list[float]] = defaultdict(list)
    for (file, _), seconds in tests.items():
        files[file].append(seconds)
    print(f"{sum(tests.values()):8.1f} s in {len(tests)} tests")
    for file, of_tests in sorted(files.items(), key=lambda one: -sum(one[1]))[:LONGEST]:
        print(f"{sum(of_tests):8.1f} s {len(of_tests):5d} tests  {file}")
    print()
    for (file, name), seconds in sorted(tests.items(), key=lambda one: -one[1])[:LONGEST]:
        print(f"{seconds:8.1f} s  {file} {name}")


if __name__ == "__main__":
    main()
