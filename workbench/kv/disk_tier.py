"""The tier on disk: blocks in the slots of a memory-mapped file, which outlives its engine.

    header     magic, format version, length and SHA-256 of: model, layout of a block, number of slots     one page
    entries    of each slot: key, SHA-256 of key and content, number of the write, listed or not           80 bytes
    slots      the bytes of one block each                                                    from a page's edge on

A write takes the entry back, writes the content, then the entry: a killed process leaves a slot that is listed and
whole, or not listed. A machine that loses power may leave anything; the checksum finds it when the block is read. All
bytes are taken from the disk when the file is made, so a full disk is an error then, and not a signal later.

The file is private (mode 0600), belongs to one engine at a time (a lock that ends with its process) and to one model,
shape and block size. What is not guarded: another program that changes or cuts the file while it is mapped, and a user
who may write to it and gives it other content with the right checksum.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import shutil
import stat
import struct
import weakref
from pathlib import Path
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.files import from_home, writing
from workbench.kv.offload import Key

MAGIC, VERSION = b"WBKVTIER", 1
HEADER = struct.Struct("<8sII32s")  # magic, version, length of the JSON behind it, its SHA-256
ENTRY = struct.Struct("<32s32sQQ")  # key, SHA-256 of key and content, number of the write, listed
PAGE = 4096
LISTED, MAX_WRITES = 1, 2**63


class DiskTier:
    """The file at `path`, made if there is none. model: what it is of, a digest; layout: what a block consists of, in
    plain values. Both must equal those of a file that is there, and so must its number of slots.

    listed: key -> slot of what an earlier engine left, the oldest write first. `read` says what is corrupt.
    Raises WorkbenchError for a file that is another's, damaged, in use, or open to others, and for a full disk.
    """

    name = "disk"

    def __init__(
        self, path: Path | str, capacity: int, block_bytes: int, *, model: str, layout: dict[str, Any]
    ) -> None:
        self.path, self.capacity, self.block_bytes = from_home(path), capacity, block_bytes
        about = {"model": model, "layout": layout, "slots": capacity, "block_bytes": block_bytes}
        self._header = json.dumps(about, sort_keys=True).encode()
        if HEADER.size + len(self._header) > PAGE:
            raise WorkbenchError(f"the layout of a block takes {len(self._header):,} bytes, more than a header holds")
        self._data_at = -(-(PAGE + capacity * ENTRY.size) // PAGE) * PAGE
        self.file_bytes = self._data_at + capacity * block_bytes
        self._file = _opened(self.path)
        try:
            if os.fstat(self._file).st_size:
                self._check(about)
            else:
                self._make()
            self._map = mmap.mmap(self._file, self.file_bytes)
        except BaseException:
            os.close(self._file)
            raise
        self._open = weakref.finalize(self, _close, self._file)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._writes = 0
        self.listed = self._read_entries()

    def close(self) -> None:
        """Free the file for another engine; nothing is read or written after it. May be called twice."""
        self._open()

    # -- blocks ------------------------------------------------------------------------------------------------------

    def write(self, slot: int, key: Key, content: torch.Tensor) -> None:
        """content: [block_bytes] uint8 on the host, contiguous."""
        assert self._open.alive and content.nbytes == self.block_bytes
        self.unlist(slot)
        self._slot(slot).copy_(content)
        self._writes += 1
        ENTRY.pack_into(self._map, self._entry_at(slot), key, checksum(key, content), self._writes, LISTED)

    def read(self, slot: int, key: Key, into: torch.Tensor) -> bool:
        """Copy the content of a slot; False where it is not what was written under this key. Any thread may read while
        another writes to other slots."""
        assert self._open.alive and into.nbytes == self.block_bytes
        known, digest, _, listed = ENTRY.unpack_from(self._map, self._entry_at(slot))
        into.copy_(self._slot(slot))
        return bool(listed == LISTED and known == key and digest == checksum(key, into))

    def unlist(self, slot: int) -> None:
        """What is in the slot is not found again."""
        at = self._entry_at(slot)
        self._map[at : at + ENTRY.size] = bytes(ENTRY.size)

    def _slot(self, slot: int) -> torch.Tensor:
        assert 0 <= slot < self.capacity
        at = self._data_at + slot * self.block_bytes
        return self._bytes[at : at + self.block_bytes]

    def _entry_at(self, slot: int) -> int:
        return PAGE + slot * ENTRY.size

    # -- the file ------------------------------------------------------------------------------------------------------

    def _make(self) -> None:
        """All bytes first, the header last: a file without it is not taken for one."""
        try:
            self._check_room()
            with writing(self.path):
                os.posix_fallocate(self._file, 0, self.file_bytes)
                digest = hashlib.sha256(self._header).digest()
                head = HEADER.pack(MAGIC, VERSION, len(self._header), digest) + self._header
                os.pwrite(self._file, head, 0)
        except BaseException:
            self.path.unlink(missing_ok=True)
            raise

    def _check_room(self) -> None:
        """Before anything is taken: who takes a disk's last bytes and fails then has others fail meanwhile."""
        free = shutil.disk_usage(self.path.parent).free
        if self.file_bytes > free:
            raise WorkbenchError(
                f"a disk tier of {self.file_bytes:,} bytes does not fit: {free:,} are free in {self.path.parent}; give"
                " it fewer, or name another place"
            )

    def _check(self, about: dict[str, Any]) -> None:
        """The header of a file that is there is ours, and says what we would say."""
        head = os.pread(self._file, PAGE, 0)
        if len(head) < HEADER.size or head[: len(MAGIC)] != MAGIC:
            raise WorkbenchError(f"{self.path} is no file of a disk tier, and is left alone; name another place")
        _, version, length, digest = HEADER.unpack_from(head)
        if version != VERSION:
            raise WorkbenchError(
                f"{self.path} has format version {version}, and this is {VERSION}; delete it, or name another place"
            )
        text = head[HEADER.size : HEADER.size + length]
        there = json.loads(text) if hashlib.sha256(text).digest() == digest else None
        if not isinstance(there, dict):
            raise WorkbenchError(f"the header of {self.path} is damaged; delete the file, it is made again")
        if there != about:
            raise WorkbenchError(self._why_another(there, about))
        if (size := os.fstat(self._file).st_size) != self.file_bytes:
            raise WorkbenchError(
                f"{self.path} has {size:,} bytes, and its header says {self.file_bytes:,}; delete it, it is made again"
            )

    def _why_another(self, there: dict[str, Any], about: dict[str, Any]) -> str:
        if there.get("model") != about["model"]:
            what = f"of another model ({str(there.get('model'))[:12]}…, this is {about['model'][:12]}…)"
        elif there.get("layout") != about["layout"]:
            what = f"of blocks of another layout ({there.get('layout')}, these are {about['layout']})"
        else:
            what = f"of {there.get('slots')} blocks, and {about['slots']} were asked for"
        return f"{self.path} is a disk tier {what}; name another file, or delete this one"

    def _read_entries(self) -> dict[Key, int]:
        """Of a key that is listed twice, the last write; the others are taken back, or a prefix that is forgotten would
        be found again by the engine after the next."""
        entries = []
        for slot in range(self.capacity):
            key, _, number, listed = ENTRY.unpack_from(self._map, self._entry_at(slot))
            if listed == LISTED and number < MAX_WRITES:
                entries.append((number, key, slot))
        entries.sort()
        self._writes = entries[-1][0] if entries else 0
        listed = {key: slot for _, key, slot in entries}
        for _, key, slot in entries:
            if listed[key] != slot:
                self.unlist(slot)
        return listed


def checksum(key: Key, content: torch.Tensor) -> bytes:
    digest = hashlib.sha256(key)
    digest.update(content.numpy().data)
    return digest.digest()


def _close(file: int) -> None:
    """The map has the file open, too, so the lock does not end with this one."""
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _opened(path: Path) -> int:
    """The file, ours alone and locked."""
    with writing(path):
        if path.is_symlink():
            raise WorkbenchError(f"{path} is a link, which is not followed; name the file itself")
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        about = os.fstat(opened)
        if not stat.S_ISREG(about.st_mode):
            raise WorkbenchError(f"{path} is no plain file; name another place for the disk tier")
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
            raise WorkbenchError(
                f"{path} can be read or written by others (mode {stat.S_IMODE(about.st_mode):o}), and holds what users"
                f" have sent; chmod 600 {path}, or name another place"
            )
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise WorkbenchError(
                f"{path} is in use by another engine, and two must not share a disk tier; `close` that one, or give"
                " each a file of its own"
            ) from error
    except BaseException:
        os.close(opened)
        raise
    return opened
