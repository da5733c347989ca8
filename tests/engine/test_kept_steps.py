"""Compiled steps that are kept: taken by the next process, and never where they are stale, another's or damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_fast import needs_compiler

from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.models import kept, one_call, prepare
from workbench.native.compiler import OFF

CONFIG = tiny_config(vocab_size=64, context_length=4096)
ASKED = {"max_new_tokens": 12, "kv": "contiguous"}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with one kept step, and how it was said; nothing else compiles in this file."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", str(cache))
        said: list[str] = []
        fast = prepare(random_decoder(CONFIG), compile=True, say=said.append)
        generate(fast, [5, 6], **ASKED)
        assert fast.compiled_reason.startswith("a step is one call, compiled in") and not fast.why_not_compiled
    [line] = said
    assert "compiling the decode step of tiny" in line and f"kept in {cache / 'steps'} for the next process" in line
    manifest, library = sorted((cache / "steps").iterdir(), key=lambda file: file.suffix != ".json")
    assert (cache / "steps").stat().st_mode & 0o777 == 0o700 and library.name.startswith(manifest.stem)
    return cache


@pytest.fixture
def cache(built, tmp_path, monkeypatch) -> Path:
    """A copy of it, in which a step that is compiled again is the same library, counted."""
    shutil.copytree(built, tmp_path / "cache")
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    library = files(built)[1]

    def again(given, config, stored, rows, compiler, folder):
        assert rows == 1
        copy = Path(folder) / "step.so"
        shutil.copy(library, copy)
        return copy

    monkeypatch.setattr(one_call, "build", again)
    return tmp_path / "cache"


def files(cache: Path) -> list[Path]:
    """The manifest and the library."""
    return sorted((cache / "steps").iterdir(), key=lambda file: file.suffix != ".json")


def ran(seed: int = 0) -> tuple[str, list[str]]:
    """(where the step came from, what was said) of a model that has decoded as the plain one does."""
    model, said = random_decoder(CONFIG, seed=seed), []
    fast = prepare(model, compile=True, say=said.append)
    assert generate(fast, [5, 6], **ASKED).tokens == generate(model, [5, 6], **ASKED).tokens
    return fast.compiled_reason, said


@needs_compiler
def test_another_checkpoint_of_the_same_shape_takes_the_kept_step_and_nothing_is_said(cache):
    for seed in (0, 1):
        reason, said = ran(seed)
        assert reason == f"a step is one call, loaded from {files(cache)[0]}" and said == []


@needs_compiler
def test_another_process_takes_it_and_loads_no_compiler(built):
    code = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "sys.path.insert(0, 'tests'); sys.path.insert(0, 'tests/engine')\n"
        "import test_kept_steps as here\n"
        "print(here.ran(), [name for name in sys.modules if name.startswith('torch._inductor.codecache')])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "WORKBENCH_CACHE": str(built), "PYTHONPATH": str(root)},
    )
    assert "loaded from" in done.stdout and done.stdout.rstrip().endswith("[]) []"), done.stderr


def truncated(cache: Path) -> None:
    library = files(cache)[1]
    library.write_bytes(library.read_bytes()[:-100_000])


def one_bit_off(cache: Path) -> None:
    library = files(cache)[1]
    code = bytearray(library.read_bytes())
    code[len(code) // 2] ^= 1
    library.write_bytes(code)


def edited(**changes) -> object:
    def edit(cache: Path) -> None:
        manifest = files(cache)[0]
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changes))

    return edit


def linked(cache: Path) -> None:
    library = files(cache)[1]
    shutil.move(library, cache / "elsewhere.so")
    library.symlink_to(cache / "elsewhere.so")


SPOILT = {  # what happened to it, what is said
    "truncated": (truncated, "has a library that is damaged"),
    "one bit": (one_bit_off, "has a library that is damaged"),
    "no library": (lambda cache: files(cache)[1].unlink(), "No such file"),
    "half a manifest": (lambda cache: files(cache)[0].write_text('{"library":'), "cannot be read as JSON"),
    "of something else": (edited(depends_on=["x"]), "is of something else"),
    "a library elsewhere": (edited(library="../x.so"), "is of something else"),
    "another digest": (edited(sha256=7), "has a library that is damaged"),
    "others may write the library": (lambda cache: files(cache)[1].chmod(0o722), "may be written to by others"),
    "others may write the manifest": (lambda cache: files(cache)[0].chmod(0o620), "may be written to by others"),
    "a link": (linked, "is a link"),
}


@needs_compiler
@pytest.mark.parametrize("name", SPOILT)
def test_what_is_not_as_it_was_written_is_named_and_built_again(cache, name):
    spoil, why = SPOILT[name]
    spoil(cache)
    reason, [line] = ran()
    assert reason.startswith("a step is one call, compiled in") and "kept in" in reason
    assert why in line and str(cache / "steps") in line and "compiling" in line
    assert ran() == (f"a step is one call, loaded from {files(cache)[0]}", [])


@needs_compiler
def test_a_folder_of_others_gives_and_gets_nothing(cache, monkeypatch):
    (cache / "steps").chmod(0o777)
    before = [file.stat() for file in files(cache)]
    reason, [line] = ran()
    assert "not kept" in reason and "may be written to by others" in line and "for this process alone" in line
    (cache / "steps").chmod(0o700)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    reason, [line] = ran()
    assert "not kept" in reason and f"belongs to the user with number {me}" in line
    assert [file.stat().st_mtime_ns for file in files(cache)] == [one.st_mtime_ns for one in before]


@needs_compiler
def test_a_cache_that_cannot_be_written_costs_the_time_alone(cache, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", "/dev/null/cache")
    reason, [line] = ran()
    assert reason.endswith("not kept") and "cannot write /dev/null/cache" in line


@needs_compiler
def test_those_not_used_for_longest_go_and_what_was_left_behind(cache, monkeypatch):
    place = cache / "steps"
    for index in range(3):
        (place / f"old{index}-0123.so").write_bytes(b"x" * 1000)
        (place / f"old{index}.json").write_text(f'{{"library": "old{index}-0123.so"}}')
        for file in place.glob(f"old{index}*"):
            os.utime(file, (10**9 + index, 10**9 + index))
    (place / "orphan-0123.so").write_bytes(b"x")
    (place / "step-killed").mkdir()
    for left in ("orphan-0123.so", "step-killed"):
        os.utime(place / left, (10**9, 10**9))
    library = max(place.glob("*.so"), key=lambda file: file.stat().st_size)
    monkeypatch.setattr(kept, "LARGEST_BYTES", library.stat().st_size + 1500)
    library.unlink()  # so that it is written again
    ran()
    assert sorted(file.stem for file in place.glob("old*")) == ["old2", "old2-0123"] and library.exists()
    assert not (place / "orphan-0123.so").exists() and not (place / "step-killed").exists()


def test_all_that_the_code_depends_on_is_in_its_name():
    def lines(config=CONFIG, stored=torch.float32, dtype=torch.float32, rows=1):
        fast = prepare(random_decoder(config).to(dtype), compile=True, say=lambda line: None)
        return tuple(one_call.described(fast._steps.given, fast.config, stored, rows))

    usual = lines()
    assert usual == lines()
    others = [
        lines(stored=torch.float16),
        lines(rows=5),
        lines(dtype=torch.float64),
        lines(tiny_config(vocab_size=64, context_length=2048)),
        lines(tiny_config(vocab_size=64, context_length=4096, tie_embeddings=False)),
        lines(tiny_config(vocab_size=64, context_length=4096, norm_eps=1e-4)),
    ]
    torch.set_num_threads(2)
    others.append(lines())
    torch.set_num_threads(1)
    assert len({usual, *others}) == 1 + len(others)


# -- without a compiler ------------------------------------------------------------------------------------------


def as_it_is(said: list[str]) -> str:
    """What a model says that is not compiled, once, and decodes all the same."""
    model = random_decoder(CONFIG)
    fast = prepare(model, compile=True, say=said.append)
    for _ in range(2):
        for kv in ("contiguous", "paged"):
            asked = {**ASKED, "kv": kv}
            assert generate(fast, [5, 6], **asked).tokens == generate(model, [5, 6], **asked).tokens
    [line] = said
    assert line.startswith("tiny is not compiled, its steps run as they are: ") and fast.why_not_compiled in line
    return fast.why_not_compiled


def test_without_a_compiler_steps_run_as_they_are(monkeypatch):
    monkeypatch.setenv(OFF, "1")
    assert as_it_is([]) == f"{OFF} is set"
    monkeypatch.delenv(OFF)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "no C++ compiler was found" in as_it_is([])


@needs_compiler
def test_a_compiler_that_fails_is_said_in_one_sentence(monkeypatch, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "g++ 12.2.0" && exit 0\necho "fatal error: no room" >&2; exit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    said: list[str] = []
    model = random_decoder(CONFIG)
    fast = prepare(model, compile=True, say=said.append)
    assert generate(fast, [5, 6], **ASKED).tokens == generate(model, [5, 6], **ASKED).tokens
    assert len(said) == 2 and "compiling" in said[0] and "no room" in said[1] and "no room" in fast.why_not_compiled
    assert not list((tmp_path / "cache" / "steps").iterdir())


def test_say_takes_a_function():
    with pytest.raises(WorkbenchError, match="say takes a function"):
        prepare(random_decoder(CONFIG), say="loud")
