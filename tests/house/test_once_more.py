"""Claims about the second run of what failed: an accident passes and is named, a defect fails, an avalanche is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "once_more.py"
ACCIDENT = """
from pathlib import Path

def test_first_time_unlucky():
    mark = Path("mark")
    first, _ = not mark.exists(), mark.touch()
    assert not first

def test_beside_it():
    pass
"""


@pytest.fixture
def run(tmp_path):
    def run(*options: str, **files: str) -> subprocess.CompletedProcess[str]:
        for name, text in files.items():
            (tmp_path / f"test_{name}.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "--rootdir", ".", *options]
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COVERAGE_"))}
        tool = [sys.executable, str(TOOL), ".", "--", *command]
        return subprocess.run(tool, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=120)

    return run


def test_what_fails_beside_others_and_passes_alone_passes_and_is_named(run):
    done = run(accident=ACCIDENT, other="def test_good():\n    pass\n")
    assert done.returncode == 0, done.stdout
    assert "== once more, alone: test_accident.py\n" in done.stdout
    assert done.stdout.rstrip().endswith("to be mended:\n  test_accident.py::test_first_time_unlucky")


def test_what_fails_alone_too_fails(run):
    done = run(defect="def test_it():\n    assert not 'right'\n", accident=ACCIDENT)
    assert done.returncode == 1
    assert "once more" in done.stdout and "to be mended" not in done.stdout


def test_what_is_skipped_alone_has_not_passed(run):
    beside = "import os, pytest\n\ndef test_it():\n    assert Path('mark').exists() or Path('mark').touch()\n"
    skipping = beside.replace("    assert", "    Path('mark').exists() and pytest.skip('alone')\n    assert")
    done = run(skips="from pathlib import Path\n" + skipping)
    assert done.returncode == 1
    assert "did not run alone: test_skips::test_it" in done.stdout and "to be mended" not in done.stdout


def test_a_crash_is_no_accident(run):
    """xdist starts another process, in which the test passes."""
    crash = (
        "import ctypes\nfrom pathlib import Path\n\n"
        "def test_crash():\n    if not Path('gone').exists():\n"
        "        Path('gone').touch()\n        ctypes.string_at(0)\n"
    )
    done = run("-n", "2", "--dist", "loadfile", crash=crash, accident=ACCIDENT)
    assert done.returncode == 1 and "crashed" in done.stdout and "once more" not in done.stdout


def test_many_failures_are_no_accident(run):
    done = run(**{f"number{n}": "def test_it():\n    assert not 'right'\n" for n in range(5)})
    assert done.returncode == 1 and "once more" not in done.stdout


def test_a_run_that_does_not_come_to_its_end_fails(run):
    done = run(broken="import nothing_of_that_name\n")
    assert done.returncode not in (0, None) and "to be mended" not in done.stdout
    assert run(broken="def no_test():\n    pass\n").returncode == 5  # pytest found none
