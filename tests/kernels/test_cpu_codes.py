"""The C++ loops over codes: the product with the numbers that the codes stand for, in both precisions, for every kind
of codes, on every kind of processor that the source knows."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess

import pytest
import torch

from workbench.errors import WorkbenchError
from workbench.kernels.cpu import codes
from workbench.kernels.cpu.codes import CodeProduct, block_of
from workbench.native import build
from workbench.native import compiler as compilers

needs_compiler = pytest.mark.skipif(bool(codes.why_not_here()), reason=f"the loops over codes: {codes.why_not_here()}")
HALF_STEP = 1 / 254  # of the largest input of a block


class Weight:
    """Random codes of a kind, the loops' view of them, and the numbers that they stand for."""

    def __init__(self, kind: str, out: int, inside: int, group: int, *, zero=True, dtype=torch.float16, seed=0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.kind, self.group, self.inside = kind, group, inside
        low, high = {"signed": (-128, 127), "unsigned": (0, 255), "nibbles": (0, 15)}[kind]
        self.codes = torch.randint(low, high + 1, (out, inside), generator=draw)
        self.codes[0, 0], self.codes[-1, -1] = low, high
        shape = (out, inside // group)
        self.scale = (0.001 + 0.01 * torch.rand(shape, generator=draw)).to(dtype)
        self.zero = (0.1 * torch.randn(shape, generator=draw)).to(dtype) if zero else None
        self.centre, self.shift = 8 * (kind == "nibbles"), {"signed": 0.0, "unsigned": 128.0, "nibbles": 8.0}[kind]

    def numbers(self) -> torch.Tensor:
        """[out, in] float64."""
        scale, zero = (None if one is None else one.double().repeat_interleave(self.group, 1) for one in self.parts)
        added = 0 if self.shift or self.kind == "signed" else {"unsigned": -128, "nibbles": -self.centre}[self.kind]
        return scale * (self.codes + added) + (0 if zero is None else zero)

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.scale, self.zero

    def product(self, precision: str) -> CodeProduct:
        lying = self.codes.to(torch.int8 if self.kind == "signed" else torch.uint8)
        if self.kind == "nibbles":
            block = block_of(self.group, nibbles=True)
            first, second = lying.view(len(lying), -1, block).chunk(2, -1)
            lying = (first | second << 4).contiguous()
        besides = {"kind": self.kind, "inputs": self.inside, "group": self.group, "precision": precision}
        return CodeProduct(lying, self.scale, self.zero, centre=self.centre, shift=self.shift, **besides)


def rounded(x: torch.Tensor, group: int, nibbles: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, the scale of each, half a step of each) [N, in]: what q8 makes of x, written in torch."""
    blocks = []
    for part in x.split(group, 1):
        for block in part.split(block_of(group, nibbles=nibbles), 1):
            top = block.abs().amax(1, keepdim=True)
            scale = top / 127
            blocks.append(
                ((block / scale.where(scale > 0, 1)).round(), *(one.expand_as(block) for one in (scale, top)))
            )
    q, scale, top = (torch.cat(parts, 1) for parts in zip(*blocks))
    return q, scale, top * HALF_STEP


SHAPES = [(1, 32, 32), (5, 64, 32), (7, 96, 96), (83, 192, 64), (9, 768, 128), (6, 544, 544), (3, 1024, 512)]
ODD = [(3, 1, 1), (6, 31, 31), (5, 100, 100), (4, 300, 300)]  # whole rows of bytes only


def weights():
    """Every kind and layout, and some at random."""
    for kind in codes.KINDS:
        for shape in SHAPES + (ODD if kind != "nibbles" else []):
            for zero in (False, True):
                for dtype in (torch.float16, torch.float32):
                    yield Weight(kind, *shape, zero=zero, dtype=dtype, seed=shape[0])
    rng = random.Random(0)
    for seed in range(40):
        group = 32 * rng.randint(1, 20)
        shape = (rng.randint(1, 40), group * rng.randint(1, 4), group)
        yield Weight(rng.choice(codes.KINDS), *shape, zero=rng.random() < 0.5, seed=seed)


def check_products(rows=(1, 2, 3, 4, 7)) -> None:
    for number, weight in enumerate(weights()):
        numbers = weight.numbers()
        exact, q8 = weight.product("exact"), weight.product("q8")
        for n in rows:
            x = torch.randn(n, weight.inside, generator=torch.Generator().manual_seed(n + number))
            terms = (
                x.double().abs() @ (numbers.abs() + weight.scale.double().repeat_interleave(weight.group, 1) * 256).T
            )
            assert ((exact(x) - x.double() @ numbers.T).abs() <= 1e-6 * terms).all(), (weight.kind, weight.group, n)
            q, scale, step = rounded(x, weight.group, weight.kind == "nibbles")
            given = (q.double() * scale.double()) @ numbers.T
            assert ((q8(x) - given).abs() <= 1e-6 * terms).all(), (weight.kind, weight.group, n)
            bound = step.double() @ numbers.abs().T  # Σ over blocks of (max|x| / 254) · Σ|ŵ|
            assert ((q8(x) - x.double() @ numbers.T).abs() <= bound + 1e-6 * terms).all()


def check_whole_numbers() -> None:
    """Inputs and scales for which nothing is rounded: sums of codes are exact, the most extreme ones too."""
    for kind in codes.KINDS:
        low, high = {"signed": (-128, 127), "unsigned": (0, 255), "nibbles": (0, 15)}[kind]
        for group in (32, 256, 1024):
            for seed in range(4):
                weight = Weight(kind, 6, 1024, group, zero=False, dtype=torch.float32, seed=seed)
                weight.scale.fill_(1.0)
                weight.shift = 0.0
                draw = torch.Generator().manual_seed(seed)
                x = torch.randint(-127, 128, (3, 1024), generator=draw)
                if seed < 2:
                    weight.codes[:3], weight.codes[3:] = (low, high)[seed], (high, low)[seed]
                    x[0], x[1] = 127, -127
                x[:, ::32] = 127  # so the scale of each block is 1
                expected = x.double() @ weight.numbers().T
                assert torch.equal(weight.product("q8")(x.float()).double(), expected), (kind, group, seed)


@needs_compiler
def test_products_are_those_of_the_numbers_and_rounded_inputs_stay_within_their_bound():
    check_products()


@needs_compiler
def test_whole_numbers_are_added_up_without_an_error():
    check_whole_numbers()


VNNI = """
#include <immintrin.h>
// what the instruction does, in one that this processor has
static inline __m256i in_plain(__m256i sums, __m256i u, __m256i s) {
  int a[8]; unsigned char b[32]; signed char c[32];
  __builtin_memcpy(a, &sums, 32); __builtin_memcpy(b, &u, 32); __builtin_memcpy(c, &s, 32);
  for (int i = 0; i < 32; i++) a[i / 4] += b[i] * c[i];
  __builtin_memcpy(&sums, a, 32);
  return sums;
}
#define _mm256_dpbusd_avx_epi32 in_plain
#undef __AVX512VNNI__
#define __AVXVNNI__ 1
"""


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("processor", ["plain C++", "AVX2", "AVX-VNNI"])
def test_other_processors_give_the_same(processor, monkeypatch, tmp_path):
    """Each branch of the source, compiled as for such a processor. VNNI's one instruction is written out."""
    if processor != "plain C++" and "avx2" not in compilers.processor():
        pytest.skip("this processor has no AVX2")
    flags = [flag for flag in build.FLAGS if not flag.startswith(("-march", "-O"))] + ["-O1"]
    if processor != "plain C++":
        flags += ["-mavx2", "-mfma", "-mf16c"]
    if processor == "AVX-VNNI":
        (tmp_path / "vnni.h").write_text(VNNI)
        flags += ["-include", str(tmp_path / "vnni.h")]
    made = tmp_path / "codes.so"
    compiler = next(c for c in compilers.COMPILERS if shutil.which(c))
    subprocess.run([compiler, *flags, "-w", str(codes.SOURCE), "-o", str(made)], check=True)
    other = codes.opened(ctypes.CDLL(str(made)))
    monkeypatch.setattr(codes, "_functions", lambda: other)
    assert codes.instructions() == processor
    check_products(rows=(1, 3))
    check_whole_numbers()


@needs_compiler
def test_inputs_may_lie_anywhere_and_outputs_depend_on_their_row_alone():
    for kind in codes.KINDS:
        weight = Weight(kind, 37, 192, 64)
        for precision in codes.PRECISIONS:
            product = weight.product(precision)
            x = torch.randn(9, 400)
            views = [x[:, 5:197], x[::2, :192], torch.randn(192, 6).T, x[:1, 3:195].expand(5, -1)]
            for view in views:
                before = view.clone()
                y = product(view)
                assert torch.equal(y, product(view.contiguous())) and torch.equal(view, before)
                alone = torch.cat([product(row[None]) for row in view])
                assert (y - alone).abs().max() <= 1e-5 * alone.abs().max()
            assert product(x[:0, :192]).shape == (0, 37)


@needs_compiler
@pytest.mark.parametrize("x", [torch.ones(1, 191), torch.ones(192), torch.ones(1, 192).double(), torch.ones(2, 2, 192)])
def test_inputs_that_the_loop_would_misread_are_refused(x):
    with pytest.raises(WorkbenchError, match=r"takes x \[N, 192\] in float32 on the CPU, got \["):
        Weight(codes.KINDS[0], 37, 192, 64).product("exact")(x)


@needs_compiler
def test_threads_change_nothing():
    weight, x, before = Weight("nibbles", 401, 512, 64), torch.randn(3, 512), torch.get_num_threads()
    given = {}
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            given[threads] = [weight.product(precision)(x) for precision in codes.PRECISIONS]
    finally:
        torch.set_num_threads(before)
    for threads in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(given[1], given[threads]))


@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_holds_no_number_has_no_finite_result_and_others_do_not_change(bad):
    for kind in codes.KINDS:
        weight = Weight(kind, 5, 256, 64)
        for precision in codes.PRECISIONS:
            product, x = weight.product(precision), torch.randn(6, 256)
            expected = product(x)
            x[2, 100] = bad
            y = product(x)
            assert not y[2].isfinite().any()
            assert torch.equal(y[[0, 1, 3, 4, 5]], expected[[0, 1, 3, 4, 5]])


@needs_compiler
def test_zeros_and_numbers_at_the_ends_of_float32_are_rounded_as_they_should():
    weight = Weight("signed", 4, 64, 32, zero=False)
    product = weight.product("q8")
    assert torch.equal(product(torch.zeros(1, 64)), torch.zeros(1, 4))
    numbers, least = weight.numbers(), 2.0**-149  # a scale below 2⁻¹²⁶ is a multiple of it
    for size in (1e-44, 1e-40, 1e-30, 1e30):
        x = size * torch.linspace(-1, 1, 64, dtype=torch.float64).float()[None]
        step = x.abs().view(2, 32).amax(1).repeat_interleave(32).double() * HALF_STEP + 127 * least
        apart = (product(x) - x.double() @ numbers.T).abs()
        assert (apart <= step * 1.001 @ numbers.abs().T + 8 * least).all(), size


# -- compiling -----------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_compiled(monkeypatch, tmp_path):
    """A machine where nothing was compiled yet, and a source that takes no time."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    build.library.cache_clear()
    yield source, tmp_path / "cache" / "native"
    build.library.cache_clear()


def compiled_again(monkeypatch, source) -> bool:
    """Whether the next process would compile. What it opens works."""
    calls, compile_it = [], build._compiled
    with monkeypatch.context() as patch:
        patch.setattr(build, "_compiled", lambda *given: calls.append(given) or compile_it(*given))
        build.library.cache_clear()
        assert build.library(source).answer() == 42
    return bool(calls)


@needs_compiler
def test_a_source_is_compiled_once_a_machine_and_again_when_it_changes(nothing_compiled, monkeypatch):
    source, kept = nothing_compiled
    assert compiled_again(monkeypatch, source) and not compiled_again(monkeypatch, source)
    assert len(list(kept.iterdir())) == 1
    source.write_text(source.read_text() + "// another\n")
    assert compiled_again(monkeypatch, source)


@needs_compiler
@pytest.mark.parametrize("how", ["damaged", "writable by all", "a link", "in a folder writable by all"])
def test_a_file_that_may_hold_something_else_is_not_opened(nothing_compiled, monkeypatch, tmp_path, how):
    source, kept = nothing_compiled
    assert compiled_again(monkeypatch, source)
    (file,) = kept.iterdir()
    if how == "damaged":
        other = tmp_path / "damaged"  # not in place: the file is open in this process
        other.write_bytes(file.read_bytes()[:-100] + bytes(100))
        other.chmod(0o755)
        other.rename(file)
    elif how == "writable by all":
        file.chmod(0o777)
    elif how == "a link":
        file.rename(tmp_path / "elsewhere.so")
        file.symlink_to(tmp_path / "elsewhere.so")
    else:
        kept.chmod(0o777)
    assert compiled_again(monkeypatch, source)


@needs_compiler
def test_a_file_of_another_user_is_not_opened(nothing_compiled, monkeypatch):
    source, kept = nothing_compiled
    assert compiled_again(monkeypatch, source)
    (file,) = kept.iterdir()
    assert build._is_ours(file)
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    assert not build._is_ours(file)


@needs_compiler
def test_where_nothing_can_be_kept_this_process_has_it_all_the_same(nothing_compiled, monkeypatch):
    source, kept = nothing_compiled
    kept.parent.mkdir()
    kept.write_text("a file is in the way")
    assert compiled_again(monkeypatch, source) and compiled_again(monkeypatch, source)


def test_without_a_compiler_the_reason_is_told(nothing_compiled, monkeypatch):
    source, _ = nothing_compiled
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "no C++ compiler was found" in build.library(source)
    build.library.cache_clear()
    monkeypatch.setenv(compilers.OFF, "1")
    assert build.library(source) == f"{compilers.OFF} is set"


@needs_compiler
def test_a_compiler_that_fails_is_quoted_and_leaves_no_file(nothing_compiled):
    source, kept = nothing_compiled
    source.write_text("this is no C++\n")
    assert "could not be compiled" in build.library(source) and "this" in build.library(source)
    assert not kept.exists() or not list(kept.iterdir())
