"""Lab 10's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as
meant."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import json
import os
import random
import subprocess
import sys

import pytest
import torch
from exercise_claims import ROOT, ExerciseClaims, Lab, failures

from workbench.errors import WorkbenchError
from workbench.grading.cell import run_cell
from workbench.grading.check import Result, Verdict, evaluate
from workbench.grading.runner import Runner, preload_of
from workbench.kernels.launch import launches
from workbench.labs.lab10_kernels.checks import int4, merge, norm, paged, probes, softmax
from workbench.labs.lab10_kernels.checks import parts as parts_module
from workbench.models.attention import eager_attention
from workbench.quantization.formats import decode, format_named, unpack

IDS = ["kernels-softmax", "kernels-merge", "kernels-paged", "kernels-int4", "kernels-norm"]


class KernelLab(Lab):
    """Answers are run as the grader runs them: Triton reads a kernel's source."""

    def defined(self, grade_id: str, source: str):
        names: dict = {}
        exec(self.visible.prelude, names)
        run_cell(source, names)
        return names[self.whole[grade_id].entry]

    @functools.cache  # noqa: B019  (one lab, for as long as the tests run)
    def judged_at(self, grade_id: str, name: str, seed: int) -> Result:
        """The result under the check that is meant for it, and the visible one that stands for hidden ones: interpreted
        kernels take their time."""
        wrong = self.wrong_answer(grade_id, name)
        exercise = (self.worded if seed == 0 else self.whole)[grade_id]
        meant = tuple(check for check in exercise.checks if check.name in (wrong.caught_by, "demands"))
        return evaluate(dataclasses.replace(exercise, checks=meant), self.defined(grade_id, wrong.source), seed=seed)

    def run_cells(self, starter: bool):
        names: dict = {}
        for cell in self.cells(starter):
            if cell.cell_type == "code":
                try:
                    run_cell(cell.source, names)
                    yield cell, None
                except Exception as error:
                    yield cell, error


LAB = KernelLab("10_kernels")


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 50
    used_again = ("kernels-norm", "kernels-int4")

    def test_the_starter_holds_no_line_of_an_answer(self, grade_id):
        """The kernel's; the function below it, which launches it, is given."""
        whole, cut = self.lab.sources()[grade_id], self.lab.sources(starter=True)[grade_id]
        assert "SOLUTION" not in cut
        given = {ast.unparse(n) for n in ast.walk(ast.parse(cut)) if isinstance(n, ast.stmt)}
        kernels = [n for n in ast.parse(whole).body if isinstance(n, ast.FunctionDef) and n.decorator_list]
        lines = {ast.unparse(line) for kernel in kernels for line in kernel.body[1:]}
        assert len(kernels) == 1 and len(lines) > 5 and not lines & given

    def printed(self, lines):
        text = "\n".join(lines)
        assert lines.count("as in one piece: True") == 1 and "as in one piece: True True" in lines
        assert "[-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5]" in lines
        assert "by hand: [1.0392, 1.3856, 0.0]" in lines and "1.0392, 1.3856, 0.0000" in text
        assert "same tokens: True" in text and "a stored weight: True" in text


def test_the_exercises_are_the_five_of_the_lab():
    assert (LAB.visible.lab, LAB.ids) == (10, IDS)


# --- The real parts stand where the answers stand ---


def _with_words(real):
    """The engine's takes the codes in an order of its own, laid out once."""
    interleaved = importlib.import_module("workbench.kernels.matvec_int4").interleaved

    def call(x, codes, scale, zero, *, group):
        wide = unpack(codes.view(len(codes), -1, group // 2)).flatten(1)
        return real(x, interleaved(wide), scale, zero, group=group)

    return call


REAL = {  # grade_id -> (module, function), and how it is called like an answer
    "kernels-softmax": ("softmax", "softmax", lambda real: lambda x, tile: real(x)),
    "kernels-merge": ("merge", "merge", lambda real: real),
    "kernels-paged": ("paged_decode", "paged_decode", lambda real: lambda *a, tile, **k: real(*a, **k)),
    "kernels-int4": ("matvec_int4", "matvec_int4", lambda real: _with_words(real)),
    "kernels-norm": ("norm", "rms_norm", lambda real: real),
}


def case_of(grade_id: str) -> tuple:
    """(probe, judge, a case) without counts of loads."""
    draw = random.Random(5)
    return {
        "kernels-softmax": (probes.run_softmax, softmax.right_softmax, softmax.tile_cases(draw)[1]),
        "kernels-merge": (probes.run_merge, lambda case: merge.right_merge(case)[0], merge.empty_cases(draw)[1]),
        "kernels-paged": (probes.run_paged, paged.exact, paged.several_cases(draw)[0] | {"size": 16}),
        "kernels-int4": (probes.run_int4, int4.exact, int4.int4_case(draw, 16, 128, 64, rows=2)),
        "kernels-norm": (probes.run_norm, norm.exact, norm.residual_cases(draw)[1]),
    }[grade_id]


@pytest.mark.parametrize("grade_id", IDS)
def test_the_packages_kernel_gives_what_the_judge_calls_right(grade_id):
    module, name, like_an_answer = REAL[grade_id]
    real = getattr(importlib.import_module(f"workbench.kernels.{module}"), name)
    probe, right, case = case_of(grade_id)
    came = torch.tensor(probe(like_an_answer(real), **case)["out"]["data"].tolist(), dtype=torch.float64)
    torch.testing.assert_close(came, right(case), atol=2e-5, rtol=2e-5)


# --- The plumbing ---


def kernel(body: str, arguments: str = "x, y, n") -> object:
    """A kernel of these lines, with x, y and n, and a block of 8."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    names: dict = {}
    exec(LAB.visible.prelude, names)
    run_cell(f"@triton.jit\ndef made({arguments}):\n    at = tl.arange(0, 8)\n{lines}", names)
    return names["made"]


def test_launch_refuses_addresses_outside_of_the_tensors_and_names_the_element():
    around = torch.arange(24.0)
    x, y = around[8:16], torch.zeros(8)
    for body, said in (
        ("tl.store(y + at, tl.load(x + at + n))", "made loads element 8 of x, which has 0 to 7"),
        ("tl.store(y + at + n, tl.load(x + at))", "made stores element 8 of y, which has 0 to 7"),
        ("tl.store(y + at, tl.load(x + at - n))", "made loads element -1 of x"),
        ("tl.atomic_add(y + at + n, tl.load(x + at))", "made stores element 8 of y"),
    ):
        with pytest.raises(parts_module.OutOfBounds, match=said):
            parts_module.launch(kernel(body), (1,), x, y, 1)
    masked = kernel("tl.store(y + at, tl.load(x + at + n, mask=at + n < 8, other=-1.0))")
    with parts_module.traffic() as seen:
        parts_module.launch(masked, (1,), x, y, 3)
    assert y.tolist() == [11, 12, 13, 14, 15, -1, -1, -1]
    assert (seen.loaded[x.data_ptr()], seen.stored[y.data_ptr()], seen.largest) == (5, 8, 8)


def test_an_interpreter_that_raised_is_left_as_it_was():
    from triton.runtime.interpreter import interpreter_builder

    with pytest.raises(parts_module.OutOfBounds):
        parts_module.launch(kernel("tl.load(x + at + n)"), (1,), torch.zeros(8), torch.zeros(8), 1)
    assert not {"create_masked_load", "create_masked_store", "create_splat"} & vars(interpreter_builder).keys()


def test_launch_raises_what_the_kernel_raised_at_its_line():
    names: dict = {}
    exec(LAB.visible.prelude, names)
    run_cell(
        "@triton.jit\ndef inner(a):\n    return a + tl.arange(0, 4)\n\n\n"
        "@triton.jit\ndef outer(x):\n    tl.store(x, inner(tl.arange(0, 8)))\n\n\n"
        "def answer(x, tile):\n    launch(outer, (1,), x)\n",
        names,
    )
    result = evaluate(LAB.whole["kernels-softmax"], names["answer"])
    assert "ValueError" in result.checks[0].message and "(line 3 of the answer's cell)" in result.checks[0].message


def test_launch_says_what_is_no_kernel_and_counts_what_is():
    with pytest.raises(WorkbenchError, match=r"is the decorator still there\?"):
        parts_module.launch(lambda x: None, (1,), torch.zeros(1))
    with launches() as counted:
        parts_module.launch(kernel("tl.store(y + at, tl.load(x + at))"), (2,), torch.ones(8), torch.zeros(8), 1)
    assert dict(counted) == {"made": 1}


def test_a_comparison_of_one_number_goes_with_a_block():
    """In Triton 3.7.1 alone it becomes a block of float32, and `&` refuses it."""
    both = kernel("tl.store(y + at, tl.load(x + at, mask=(at < 4) & (tl.load(x) > 0.0), other=7.0))")
    x, y = torch.arange(1.0, 9.0), torch.zeros(8)
    parts_module.launch(both, (1,), x, y, 1)
    assert y.tolist() == [1, 2, 3, 4, 7, 7, 7, 7]
    x[0] = -1.0
    parts_module.launch(both, (1,), x, y, 1)
    assert y.tolist() == [7] * 8


def test_memory_that_was_not_written_is_nan_for_an_answer_and_only_for_it():
    x = torch.zeros(5)
    with probes.PoisonedMemory():
        for made in (torch.empty(5), torch.empty_like(x), x.new_empty(5), torch.empty_strided((5,), (1,)).half()):
            assert made.isnan().all()
        assert torch.empty(5, dtype=torch.int32).dtype == torch.int32 and not torch.zeros_like(x).any()
    assert torch.empty(5).fill_(1.0).sum() == 5 and x.sum() == 0


# --- The grader's own process ---


@pytest.fixture(scope="module")
def runner():
    with Runner(preload_of(LAB.visible)) as runner:
        yield runner


@pytest.mark.parametrize("grade_id", ["kernels-softmax", "kernels-paged"])
def test_in_the_graders_limited_process_answers_earn_what_they_earn_here(runner, grade_id):
    exercise = LAB.whole[grade_id]
    right = runner.run(LAB.visible, exercise, LAB.sources()[grade_id])
    assert (right.verdict, right.points) == (Verdict.PASSED, exercise.max_points), failures(right)
    wrong = LAB.wrong[grade_id][0]
    there = runner.run(LAB.visible, exercise, wrong.source)
    here = evaluate(exercise, LAB.defined(grade_id, wrong.source))
    assert [c.message for c in there.checks] == [c.message for c in here.checks]


def test_in_the_graders_process_a_stub_is_not_attempted_and_a_mistake_has_its_line(runner):
    exercise = LAB.whole["kernels-norm"]
    stub = runner.run(LAB.visible, exercise, LAB.sources(starter=True)["kernels-norm"])
    assert (stub.verdict, stub.points) == (Verdict.NOT_ATTEMPTED, 0)
    broken = LAB.sources()["kernels-norm"].replace("mask=inside, other=0.0", "", 1)
    result = runner.run(LAB.visible, exercise, broken)
    line = next(n for n, text in enumerate(broken.splitlines(), 1) if "tl.load(x + at, )" in text)
    assert f"(line {line} of the answer's cell)" in next(c for c in result.checks if not c.passed).message


# --- Compiled ---

COMPILE = """
import json, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from workbench.grading.cell import run_cell

for source, name, signature, constants in json.load(sys.stdin):
    names = {"__name__": "__main__", "triton": triton, "tl": tl}
    run_cell(source, names)
    order = names[name].arg_names
    whole = {one: signature.get(one, "constexpr" if one in constants else "i32") for one in order}
    made = triton.compile(ASTSource(names[name], whole, constexprs=constants), target=GPUTarget("cuda", 90, 32))
    print(name, len(made.asm["cubin"]) > 0)
"""
SIGNATURES = {
    "kernels-softmax": ("softmax_kernel", {"x": "*fp16", "y": "*fp16"}, {"TILE": 1024}),
    "kernels-merge": ("merge_kernel", dict.fromkeys(("parts", "lse", "out", "out_lse"), "*fp32"), {"SIZE": 128}),
    "kernels-paged": (
        "paged_kernel",
        dict.fromkeys(("q", "k", "v", "out"), "*bf16") | {"tables": "*i32", "lengths": "*i32", "scale": "fp32"},
        {"BLOCK": 16, "GROUP": 4, "SIZE": 128, "TILE": 32},
    ),
    "kernels-int4": (
        "int4_kernel",
        {"x": "*bf16", "codes": "*u8", "scale": "*fp16", "zero": "*fp16", "y": "*bf16"},
        {"ROWS": 4, "OUTS": 8, "TILE": 32},
    ),
    "kernels-norm": (
        "norm_kernel",
        dict.fromkeys(("x", "residual", "weight", "y", "total"), "*bf16") | {"eps": "fp32"},
        {"HAS_RESIDUAL": True, "BLOCK": 1024},
    ),
}


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")
def test_the_solutions_compile_for_an_h200(tmp_path):
    """The same source, no interpreter; compiling needs no GPU. Whether it is fast is not said by that."""
    jobs = [[LAB.sources()[grade_id], *SIGNATURES[grade_id]] for grade_id in IDS]
    others = ("kernels-softmax", "kernels-merge", "kernels-paged", "kernels-int4")
    jobs += [[LAB.alternative[grade_id], *SIGNATURES[grade_id]] for grade_id in others]
    jobs = [[source.split("\n\n\ndef ")[0], *rest] for source, *rest in jobs]  # the kernels alone
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [f"{job[1]} True" for job in jobs]


# --- The judges' own references ---


def test_the_judges_attention_is_attention_as_it_is_defined():
    for case in paged.grouped_cases(random.Random(2)) + paged.several_cases(random.Random(3)):
        given = {name: case[name] for name in case if name != "tile"}
        inputs = {name: tensor.double() for name, tensor in probes.paged_pool(**given).items()}
        right = paged.exact(case)
        for b, (table, length) in enumerate(zip(case["tables"], case["lengths"])):
            if not length:
                assert not right[b].any()
                continue
            blocks = [inputs[n].unflatten(0, (-1, case["block_size"]))[table].flatten(0, 1)[:length] for n in "kv"]
            defined = eager_attention(inputs["q"][b][None], *blocks, scale=case["size"] ** -0.5)[0]
            torch.testing.assert_close(right[b], defined)


def test_the_judges_merge_of_splits_is_attention_over_all_keys():
    scores, values = torch.randn(12, dtype=torch.float64), torch.randn(12, 4, dtype=torch.float64)
    pieces = [slice(0, 5), slice(5, 6), slice(6, 12)]
    parts = torch.stack([scores[p].softmax(0) @ values[p] for p in pieces])
    lse = torch.stack([scores[p].logsumexp(0) for p in pieces])
    weights = lse.softmax(0)
    torch.testing.assert_close(weights @ parts, scores.softmax(0) @ values)
    torch.testing.assert_close(lse.logsumexp(0), scores.logsumexp(0))


def test_the_judges_weight_is_the_packages_stored_one():
    for case in int4.group_cases(random.Random(4)) + int4.tail_cases(random.Random(4)):
        made, group = probes.int4_weight(**case), case["group"]
        shape = (case["outs"], case["width"] // group)
        wide = decode(
            made["codes"].view(*shape, group // 2),
            made["scale"][..., None],
            made["zero"][..., None],
            format_named("int4"),
        )
        right = made["x"].double() @ wide.double().reshape(case["outs"], -1).T
        torch.testing.assert_close(int4.exact(case), right, atol=1e-5, rtol=1e-5)
