"""Every loop in C++ compiles, for this processor and for one that has nothing, and whoever calls it finds it. What
tests a loop is left out where there is none, so that a loop that no longer compiles would be tested by nobody."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from workbench.kernels.cpu import coded_attention, codes, floats, step
from workbench.kv import paged_blocks
from workbench.native.build import FLAGS, library
from workbench.native.compiler import compiler, why_no_compiler

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("kernels", "workbench") for path in (ROOT / folder).rglob("*.cpp"))
CALLERS = (coded_attention, codes, floats, step, paged_blocks)
pytestmark = pytest.mark.skipif(bool(why_no_compiler()), reason=why_no_compiler() or "there is a compiler")


def test_every_source_has_a_caller_that_finds_its_loop():
    assert sorted(Path(one.SOURCE).name for one in CALLERS) == [
        path.name for path in sorted(SOURCES, key=lambda p: p.name)
    ]
    for one in CALLERS:
        assert not isinstance(library(Path(one.SOURCE)), str), library(Path(one.SOURCE))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
@pytest.mark.parametrize("processor", ["this one", "any"])
def test_it_compiles(source, processor):
    flags = [flag for flag in FLAGS if processor == "this one" or flag != "-march=native"]
    flags = ["-fsyntax-only" if flag == "-O3" else flag for flag in flags]
    done = subprocess.run([compiler(), *flags, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
