"""Claims about files: a write that fails says what to do, leaves the old file whole, and nothing beside it."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import resource
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import random_decoder
from safetensors.torch import load_file

from workbench.errors import WorkbenchError
from workbench.files import new_folder, replacing, write_bytes, write_tensors, write_text
from workbench.grading.batch import seed_in
from workbench.models.checkpoints import load, save_checkpoint, shipped_tokenizer
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.heads import MedusaConfig, MedusaHeads, load_heads, save_heads
from workbench.models.tokenizer import Tokenizer
from workbench.models.training import load_state, remove_state, save_state
from workbench.quantization import QuantizationRecipe, quantize
from workbench.quantization.files import save_quantized
from workbench.speculation.drafts.ngram_table import NGramTable

SHAPE = ModelConfig("llama", 64, 32, 1, 2, 1, 16, 64, 64)


@contextmanager
def full_disk(room: int = 4096):
    """Every write beyond the first `room` bytes of a file fails half way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


WRITERS = {
    "write_text": lambda path: write_text(path, "x" * 100_000),
    "write_bytes": lambda path: write_bytes(path, bytes(100_000)),
    "write_tensors": lambda path: write_tensors(path, {"a": torch.zeros(100_000)}),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_disk_that_is_full_in_the_middle_of_a_write_leaves_the_old_file_whole(tmp_path, write):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with full_disk(), pytest.raises(WorkbenchError, match=r"^cannot write .*/a: File too large; .*ulimit"):
        write(path)
    assert contents(tmp_path) == {"a": b"old"}
    write(path)
    assert list(contents(tmp_path)) == ["a"] and path.stat().st_size >= 100_000


def test_no_space_left_says_to_make_room(tmp_path):
    (tmp_path / "a").write_text("old")
    full = pytest.raises(WorkbenchError, match=r"cannot write .*/a: No space left on device; make room")
    with full, replacing(tmp_path / "a") as fresh:
        fresh.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert contents(tmp_path) == {"a": b"old"}


def test_an_interruption_leaves_the_old_file_and_is_passed_on(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a") as fresh:
        fresh.write_text("half")
        raise KeyboardInterrupt
    assert contents(tmp_path) == {"a": b"old"}


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("file/below", "Not a directory; a file is in the way"),
        ("file/far/below", "a file is in the way"),
        ("folder", "Is a directory; a folder is in the way"),
        ("pipe", "a device or a pipe"),
        ("x" * 300, "File name too long; name a shorter one"),
    ],
)
def test_a_place_that_cannot_be_written_is_an_error_and_nothing_changes(tmp_path, place, why):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for write in WRITERS.values():
        with pytest.raises(WorkbenchError, match=f"cannot write .*{why}"):
            write(tmp_path / place)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder", "pipe"]
    assert contents(tmp_path) == {"file": b"old"} and not list((tmp_path / "folder").iterdir())


def test_devices_are_never_replaced():
    with pytest.raises(WorkbenchError, match="cannot write /dev/null: it is a device or a pipe"):
        write_text("/dev/null", "a")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_the_mode_of_a_file_stays_and_a_new_one_is_readable_by_all(tmp_path):
    (tmp_path / "secret").touch(mode=0o600)
    write_tensors(tmp_path / "secret", {"a": torch.ones(2)})
    write_tensors(tmp_path / "new", {"a": torch.ones(2)})
    write_text(tmp_path / "given", "a", mode=0o600)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    assert modes == {"secret": 0o600, "new": 0o644, "given": 0o600}
    assert load_file(tmp_path / "new")["a"].tolist() == [1.0, 1.0]


def test_line_ends_and_characters_are_written_as_they_are(tmp_path):
    write_text(tmp_path / "a", "é\r\n\n")
    assert (tmp_path / "a").read_bytes() == "é\r\n\n".encode()
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "a", "\ud800")
    assert contents(tmp_path) == {"a": "é\r\n\n".encode()}
    write_text(tmp_path / "a", "\ud800", errors="backslashreplace")
    assert (tmp_path / "a").read_bytes() == rb"\ud800"


def test_a_new_folder_is_there_whole_or_not_at_all(tmp_path):
    full = pytest.raises(WorkbenchError, match=r"^cannot write \S*/new: File too large")
    with full_disk(), full, new_folder(tmp_path / "new") as fresh:
        write_text(fresh / "a", "a")
        write_text(fresh / "b", "b" * 10_000)
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "new") as fresh:
        write_text(fresh / "a", "a")
    assert contents(tmp_path) == {"new/a": b"a"}
    with pytest.raises(WorkbenchError, match="is there already and not empty"), new_folder(tmp_path / "new"):
        pytest.fail("nothing is to be made")
    assert contents(tmp_path) == {"new/a": b"a"}


# -- the package's own writers ---------------------------------------------------------------------------------------


class Saved:
    """Something to save, and the same with other numbers."""

    @staticmethod
    def checkpoint(folder: Path, seed: int) -> None:
        save_checkpoint(random_decoder(SHAPE, seed=seed), folder)

    @staticmethod
    def table(folder: Path, seed: int) -> None:
        NGramTable.of([[(seed * i * i) % 997 for i in range(3000)]], 1000, order=4, min_count=1).save(folder / "a.npz")

    @staticmethod
    def tokenizer(folder: Path, seed: int) -> None:
        shipped_tokenizer().save(folder)

    @staticmethod
    def state(folder: Path, seed: int) -> None:
        save_state(folder, random_decoder(SHAPE, seed=seed), [], {"step": seed})


@pytest.mark.parametrize("save", [Saved.checkpoint, Saved.table, Saved.tokenizer, Saved.state])
def test_what_is_saved_over_an_old_one_on_a_full_disk_leaves_it_whole(tmp_path, save):
    folder = tmp_path / "saved"
    folder.mkdir()
    save(folder, 1)
    before = contents(tmp_path)
    with full_disk(2000), pytest.raises(WorkbenchError, match=rf"^cannot write {folder}\S*: File too large"):
        save(folder, 2)
    assert contents(tmp_path) == before and before


# -- a process that is killed ----------------------------------------------------------------------------------------

STEPS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "open"}


def killed_at(step: int, work: Callable[[], None]) -> bool:
    """Do `work` in a process that is killed before its step number `step` on files; whether it came that far."""
    child = os.fork()
    if child == 0:
        left = [step]

        def count(event: str, arguments: tuple) -> None:
            if event in STEPS:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status != 0


OTHER = ModelConfig("llama", 64, 16, 2, 2, 1, 8, 64, 64)


a_tokenizer = functools.cache(shipped_tokenizer)


def a_checkpoint(shape: ModelConfig) -> Decoder:
    model = random_decoder(shape)
    model.tokenizer = a_tokenizer() if shape is SHAPE else None
    return model


def heads_of(num_heads: int) -> MedusaHeads:
    heads = MedusaHeads(MedusaConfig(8, 64, num_heads), target="a")
    return heads.eval().requires_grad_(False)


def a_state(size: int) -> tuple[torch.nn.Linear, dict]:
    progress = {"recipe": "a", "step": 0, "seconds": 0.0, "losses": [], "size": size}
    return torch.nn.Linear(2, 2).requires_grad_(False), progress


def the_state(folder: Path) -> int:
    return load_state(folder, SimpleNamespace(digest=lambda: "a"), a_state(1)[0], [])["size"]


OLD_AND_NEW = {
    "checkpoint": (
        lambda folder, new: save_checkpoint(a_checkpoint(OTHER if new else SHAPE), folder),
        lambda folder: ((model := load(folder)).config == OTHER, model.tokenizer is None),
    ),
    "heads": (
        lambda folder, new: save_heads(heads_of(3 if new else 2), folder),
        lambda folder: ((heads := load_heads(folder)).config.num_heads == 3, len(heads.heads) == 3),
    ),
    "tokenizer": (
        lambda folder, new: Tokenizer(a_tokenizer().backend, end_of_text=None if new else 0).save(folder),
        lambda folder: (
            Tokenizer.from_folder(folder) is not None
            and json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] is None,
        ),
    ),
    "state": (
        lambda folder, new: save_state(folder, a_state(1)[0], [], a_state(1 + new)[1]),
        lambda folder: (the_state(folder) == 2,),
    ),
    "file": (
        lambda folder, new: write_text(folder / "a", "new" if new else "old"),
        lambda folder: ({"old": False, "new": True}[(folder / "a").read_text()],),
    ),
}


@pytest.mark.parametrize(("save", "is_new"), OLD_AND_NEW.values(), ids=OLD_AND_NEW)
def test_a_save_killed_at_any_step_leaves_the_old_or_the_new_whole_and_the_next_save_tidies(tmp_path, save, is_new):
    folder, seen = tmp_path / "saved", set()
    for step in itertools.count():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "README").write_text("mine")
        save(folder, False)
        assert not any(is_new(folder))
        killed = killed_at(step, lambda: save(folder, True))
        came = set(is_new(folder))
        assert len(came) == 1, f"a mixture, killed at step {step}"
        seen |= came
        save(folder, True)
        assert all(is_new(folder)) and (folder / "README").read_text() == "mine"
        left = {path.name for path in tmp_path.rglob("*") if path.name.startswith(".") or ".new" in path.name}
        assert left == set(), f"killed at step {step}"
        if not killed:
            break
    assert step > 3 and seen == {False, True}


def test_a_draft_of_a_process_that_lives_is_left_alone(tmp_path):
    with replacing(tmp_path / "a") as fresh:
        fresh.write_text("first")
        write_text(tmp_path / "a", "second")
        assert fresh.read_text() == "first"
    assert contents(tmp_path) == {"a": b"first"}


def test_a_run_that_has_ended_leaves_no_older_state_to_go_on_from(tmp_path):
    save_state(tmp_path, a_state(1)[0], [], a_state(1)[1])
    shutil.copytree(tmp_path / "state", tmp_path / "state.old")
    remove_state(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_save_that_cannot_be_finished_says_where_its_files_lie(tmp_path):
    (tmp_path / "secret").write_text("mine")
    folder = tmp_path / "saved"
    save_checkpoint(random_decoder(SHAPE), folder)
    (folder / ".saved").mkdir()
    (folder / ".saved" / ".removed").write_text('["../secret"]')
    with pytest.raises(WorkbenchError, match=r"was interrupted, and its files, which lie in \S*/\.saved.*no list of"):
        load(folder)
    assert (tmp_path / "secret").exists()
    shutil.rmtree(folder / ".saved")
    (folder / ".saved").symlink_to(tmp_path)
    assert load(folder).config == SHAPE and (tmp_path / "secret").exists()


def test_a_quantized_model_is_saved_whole_or_not_at_all(tmp_path):
    model = quantize(random_decoder(SHAPE), QuantizationRecipe("rtn", 4, 16))
    with full_disk(), pytest.raises(WorkbenchError, match=r"^cannot write \S*/q: File too large"):
        save_quantized(model, tmp_path / "q")
    assert list(tmp_path.iterdir()) == []


def test_a_seed_that_cannot_be_written_is_not_left_half(tmp_path):
    with full_disk(8), pytest.raises(WorkbenchError, match="cannot be made: File too large"):
        seed_in(tmp_path / "seed")
    assert list(tmp_path.iterdir()) == []
    assert len(seed_in(tmp_path / "seed")) == 32
