"""Claims about a kernel's file that is run by itself: every version is held to its oracle, and on a GPU it is timed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_claims import HERE, where_kernels_run

from workbench.kernels import KERNELS, alone
from workbench.kernels.launch import Work

ROOT = Path(__file__).parents[2]


@where_kernels_run
@pytest.mark.parametrize("name", KERNELS)
def test_every_version_of_a_file_agrees_with_its_oracle_and_is_timed_beside_the_bound(name):
    """With a clock that is not one: what a GPU would print."""
    module, said = KERNELS[name], []
    examples = module.examples(alone.Make(HERE, torch.float32, full=False))
    assert {v for e in examples for v in e.versions} == set(module.VERSIONS), "every version of the file is run"
    for example in examples:
        assert alone.checked(example, torch.float32, said.append), said
        lines = len(said)
        alone.timed(example, (1e9, 1e12), lambda call: (call(), 1e-3)[1], said.append)
        timed = said[lines:]
        assert timed[0].startswith("bound: ") and len(timed) == 1 + len(example.versions)
        gb_per_s = example.work.bytes / 1e-3 / 1e9
        assert all(f"1,000.0 µs {gb_per_s:8,.0f} GB/s" in line for line in timed[1:])


@pytest.mark.parametrize("name", KERNELS)
def test_a_file_can_be_run_and_draws_its_tiles(name):
    source = (ROOT / "kernels" / f"{name}.py").read_text(encoding="utf-8")
    assert source.rstrip().endswith('if __name__ == "__main__":\n    alone.main(examples)'), "the shared helper runs it"
    assert re.search(r"^Tiles(?:[^\n]+\n)+\n(?: {4,}[^\n]*\n|\n)*? {4,}[^\n]*program", KERNELS[name].__doc__, re.M), (
        f"{name}: the docstring has no section that begins with 'Tiles' and draws which program reads and writes what"
    )


@where_kernels_run
def test_softmax_run_by_itself_says_where_it_ran():
    ran = subprocess.run([sys.executable, "-m", "workbench.kernels.softmax"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "three passes" in ran.stdout and "agrees with its oracle" in ran.stdout
    assert ("where times mean nothing" in ran.stdout) == (HERE == "cpu") != ("GB/s" in ran.stdout)


def test_a_version_that_differs_from_its_oracle_is_named():
    truth, said = torch.ones(3), []
    outputs = {1: torch.ones(3), 2: torch.tensor([1.0, 2.0, 1.0]), 3: torch.tensor([1.0, float("nan"), 1.0])}
    example = alone.Example("toy", {1: "a", 2: "b", 3: "c"}, outputs.__getitem__, lambda: truth, Work(12, 12, 0))
    assert not alone.checked(example, torch.float32, said.append)
    assert ["DIFFERS" in line for line in said] == [False, True, True] and "inf" in said[2]


def test_what_binds_is_said():
    said = []
    for work in (Work(10**9, 0, 1), Work(8, 0, 10**12)):
        alone.timed(
            alone.Example("toy", {}, lambda v: torch.ones(1), lambda: torch.ones(1), work),
            (1e9, 1e9),
            lambda call: 1.0,
            said.append,
        )
    assert "(bandwidth:" in said[0] and "(compute:" in said[1] and "1,000,000.0 µs" in said[0]


def test_what_a_reader_must_hold_of_a_launch_is_eight_arguments():
    """A kernel takes what belongs together as one named tuple. Files in `LONG` have not been gone through yet."""
    long = {
        name: [kernel for kernel, arguments in kernels_of(KERNELS[name]).items() if len(arguments) > 8]
        for name in KERNELS
    }
    assert {name for name, kernels in long.items() if kernels} == LONG


LONG = {
    "flash_decoding",
    "latent_decode",
    "matvec",
    "matvec_int4",
    "matvec_int8",
    "merge",
    "norm",
    "paged_decode",
    "paged_prefill",
    "paged_quantized",
    "rotary",
}


def kernels_of(module) -> dict[str, list[str]]:
    """Name -> its arguments, of what has a program's number: the others are parts of kernels."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    return {
        node.name: [one.arg for one in node.args.args]
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(one) for one in node.decorator_list)
        and "tl.program_id(0)" in ast.unparse(node)
    }
