"""Files on the disk tier: matrices of layers, and keys and values, read around the page cache.

A file that was just written, or read once, lies in the system's memory: reading it again measures a copy. So it is
opened with O_DIRECT, where blocks go from the disk to where they are wanted; on a filesystem that has none, its pages
are dropped after every read (posix_fadvise, POSIX_FADV_DONTNEED). `how` says which. What a virtual disk's host caches
is not seen from here.

O_DIRECT asks for whole blocks, in the file and in memory: a read begins at the block in which the wanted bytes begin.

The matrices are a .safetensors file with a CRC-32 of each tensor in its metadata, written whole and checked when it is
opened. Both kinds of file have no name any more once they are open, so that whatever ends the process leaves none.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from workbench.errors import WorkbenchError
from workbench.files import write_tensors, writing

BLOCK = 4096
SPARE_BYTES = 16 << 20  # that stay free on the disk
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAX_HEADER = 100 << 20  # as the format says


def whole_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK) * BLOCK


def check_room(folder: Path, num_bytes: int) -> None:
    """Raises WorkbenchError where a folder is none or its disk has no room for so much, before anything is written."""
    if not folder.is_dir():
        raise WorkbenchError(f"{str(folder)!r} is no folder; name one on the disk that is to hold what is offloaded")
    free = shutil.disk_usage(folder).free
    if num_bytes + SPARE_BYTES > free:
        raise WorkbenchError(
            f"{num_bytes:,} bytes are to lie on disk and {free:,} are free in {folder} (of which {SPARE_BYTES:,} stay"
            " free); name another folder, or put less on disk"
        )


class Memory:
    """Bytes in whole blocks, for O_DIRECT. `at` gives tensors that are views of it."""

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, max(BLOCK, whole_blocks(num_bytes)))
        self.view = memoryview(self._map)

    def at(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        values = math.prod(shape)
        return torch.frombuffer(self._map, dtype=dtype, count=values, offset=offset).view(shape)


class DiskFile:
    """An open file without the page cache. direct: None is O_DIRECT where the filesystem has it."""

    def __init__(self, handle: int, name: str, direct: bool | None = None) -> None:
        self._handle, self._name = handle, name
        self.direct = direct is not False
        if self.direct:
            try:
                self._reopen(os.O_DIRECT)
            except OSError as error:
                if direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    os.close(handle)
                    raise WorkbenchError(f"cannot open {name} with O_DIRECT: {error.strerror}") from error
                self.direct = False
        if not self.direct:
            os.fsync(self._handle)  # pages that are not on disk yet are not dropped

    def _reopen(self, flags: int) -> None:
        """The same file with other flags: it may have no name any more."""
        access = fcntl.fcntl(self._handle, fcntl.F_GETFL) & os.O_ACCMODE
        opened = os.open(f"/proc/self/fd/{self._handle}", access | flags)
        os.close(self._handle)
        self._handle = opened

    @property
    def how(self) -> str:
        return "O_DIRECT" if self.direct else "posix_fadvise"

    @property
    def size(self) -> int:
        return os.fstat(self._handle).st_size

    def read(self, begin: int, end: int, memory: Memory, at: int) -> int:
        """Bytes begin … end of the file, into memory from its block `at` on; returns where they begin there. Raises
        WorkbenchError for a file that ends before."""
        first = begin - begin % BLOCK
        done, wanted = first, whole_blocks(end)
        while done < end:
            into = memory.view[at + done - first : at + wanted - first]
            count = os.preadv(self._handle, [into], done)
            if count == 0:
                raise WorkbenchError(f"{self._name} ends after {done:,} bytes, and {end:,} were to be read: it was cut")
            done += count
        if not self.direct:
            os.posix_fadvise(self._handle, first, wanted - first, os.POSIX_FADV_DONTNEED)
        return at + begin - first

    def write(self, memory: Memory, num_bytes: int, offset: int) -> None:
        """Whole blocks of memory, to whole blocks of the file. Raises WorkbenchError where the disk takes no more."""
        done = 0
        with writing(self._name):
            while done < num_bytes:
                done += os.pwritev(self._handle, [memory.view[done:num_bytes]], offset + done)
            if not self.direct:
                os.fdatasync(self._handle)
                os.posix_fadvise(self._handle, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._handle)


def nameless(folder: Path, num_bytes: int, direct: bool | None = None) -> DiskFile:
    """A new file of so many bytes that no folder names. Raises WorkbenchError where there is no room."""
    check_room(folder, num_bytes)
    with writing(folder), tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, max(BLOCK, num_bytes))
        return DiskFile(os.dup(file.fileno()), f"the cache's file in {folder}", direct)


# -- matrices ---------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """Where a tensor lies in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def write_matrices(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A .safetensors file with checksums, whole or not at all. Raises WorkbenchError where there is no room for it."""
    check_room(path.parent, sum(tensor.nbytes for tensor in tensors.values()))
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    write_tensors(path, whole, {name: checksum(tensor) for name, tensor in whole.items()})


def checksum(tensor: torch.Tensor) -> str:
    """CRC-32 of the bytes, 8 hex digits."""
    return f"{zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()):08x}"


class Matrices:
    """Tensors of such a file, read one by one. Opening checks the header, the length and every checksum.

    Raises WorkbenchError for a file that is not what was written: what was expected, what came.
    """

    def __init__(self, path: Path, direct: bool | None = None) -> None:
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise WorkbenchError(f"cannot open the matrices on disk, {path}: {error.strerror}") from error
        self._file = DiskFile(handle, str(path), direct)
        try:
            self.stored, sums = _header(header_bytes(path), path)
            needed = max((one.end for one in self.stored.values()), default=0)
            if self._file.size != needed:
                raise WorkbenchError(
                    f"{path} has {self._file.size:,} bytes, and its header says {needed:,}: it was cut or added to;"
                    " write it again"
                )
            largest = max((one.end - one.begin for one in self.stored.values()), default=0)
            memory = Memory(largest + 2 * BLOCK)
            for name in self.stored:
                actual = checksum(self.tensor(name, memory, 0)[0])
                if actual != sums.get(name):
                    raise WorkbenchError(
                        f"{path}: the bytes of {name} have the checksum {actual}, and {sums.get(name)} was written with"
                        " them: the file was changed, or the disk is not to be trusted; write it again"
                    )
        except BaseException:
            self._file.close()
            raise

    @property
    def how(self) -> str:
        return self._file.how

    @property
    def direct(self) -> bool:
        return self._file.direct

    def room(self, name: str) -> int:
        """Bytes of memory that reading this tensor takes."""
        return whole_blocks(self.stored[name].end - self.stored[name].begin) + BLOCK

    def tensor(self, name: str, memory: Memory, at: int) -> tuple[torch.Tensor, int]:
        """(the tensor, a view of `memory` from its block `at` on; the first block after it)."""
        one = self.stored[name]
        offset = self._file.read(one.begin, one.end, memory, at)
        return memory.at(offset, one.shape, one.dtype), at + self.room(name)

    def close(self) -> None:
        self._file.close()


def header_bytes(path: Path) -> bytes:
    """The header of a .safetensors file: its length in 8 bytes, then JSON."""
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > MAX_HEADER:
            raise WorkbenchError(f"{path} is no .safetensors file: a header of {length:,} bytes")
        return file.read(length)


def _header(text: bytes, path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    try:
        values: Any = json.loads(text)
        sums = dict(values.pop("__metadata__", {}))
        begin = 8 + len(text)
        stored = {}
        for name, one in values.items():
            first, last = one["data_offsets"]
            dtype, shape = TYPES[one["dtype"]], tuple(map(int, one["shape"]))
            if min((0, first, *shape)) < 0 or last - first != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} of shape {shape} has {last - first} bytes")
            stored[name] = Stored(dtype, shape, begin + first, begin + last)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WorkbenchError(f"{path} is no .safetensors file of numbers: {error}; write it again") from error
    return stored, sums
