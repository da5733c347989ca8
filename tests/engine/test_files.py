"""Claims about files: a write that fails says what to do, leaves the old file whole, and nothing beside it."""

from __future__ import annotations

import errno
import os
import resource
import stat
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import random_decoder
from safetensors.torch import load_file

from workbench.errors import WorkbenchError
from workbench.files import new_folder, replacing, write_bytes, write_tensors, write_text
from workbench.grading.batch import seed_in
from workbench.models.checkpoints import save_checkpoint, shipped_tokenizer
from workbench.models.config import ModelConfig
from workbench.models.training import save_state
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
