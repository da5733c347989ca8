"""Compiled steps (`workbench.models.one_call`) that are kept for the next process, in the user's folder for caches.

    steps/KEY.json            what it depends on, and the SHA-256 of the library
    steps/KEY-DIGEST.so       the library

KEY stands for everything that the code depends on: the model's shape and types, the cache's type, the number of rows
and of threads, the processor, the compiler, the versions of torch and Python, and our own source. So what is stale has
another name and is never asked for.

A library is code that runs as the user. It is taken only from a folder and a file that belong to this user and that
nobody else may write to, and only as it was written. Anything else is said, and compiled again. Manifests are JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from workbench.errors import WorkbenchError
from workbench.files import cache_folder, read_json_object, replacing, write_text
from workbench.models import one_call, parts
from workbench.models.config import ModelConfig
from workbench.models.one_call import OneCall, StepParts
from workbench.native import compiler as compilers
from workbench.native.private import make_private, why_not_ours

Say = Callable[[str], None]
LARGEST_BYTES = 128 << 20  # of all libraries together; a library has some megabytes
LEFT_S = 3600  # a library without a manifest is being written for so long at most


def folder() -> Path:
    return cache_folder() / "steps"


def ready_step(
    given: StepParts, config: ModelConfig, stored: torch.dtype, rows: int, name: str, say: Say
) -> tuple[OneCall, str]:
    """The step of these parts for so many rows, loaded or compiled, and in words where it comes from.

    stored: type of the cached keys and values. name: of the model, for what is said. Raises WorkbenchError, with the
    reason alone, where there is no step to be had.
    """
    compiler = compilers.compiler()
    if reason := compilers.why_no_compiler():
        raise WorkbenchError(reason)
    assert compiler is not None, "there is one"
    depends = [*one_call.described(given, config, stored, rows), *_surroundings(given, compiler)]
    key = hashlib.sha256("\n".join(depends).encode()).hexdigest()[:24]
    home = folder()
    place: Path | None = home
    try:
        make_private(home)
        kept_step, trouble = _kept(home, key, depends, given, rows)
    except WorkbenchError as error:
        place, kept_step, trouble = None, None, str(error)
    if kept_step is not None:
        return kept_step, f"loaded from {home / key}.json"
    _announce(rows, name, say, trouble, place)
    return _compiled(given, config, stored, rows, compiler, place, key, depends)


def _announce(rows: int, name: str, say: Say, trouble: str, place: Path | None) -> None:
    kept = f"kept in {place} for the next process" if place is not None else "for this process alone"
    before, what = f"{trouble}; " if trouble else "", "decode step" if rows == 1 else f"step of {rows} rows"
    say(f"{before}compiling the {what} of {name}, half a minute or more, {kept}")


def _compiled(
    given: StepParts,
    config: ModelConfig,
    stored: torch.dtype,
    rows: int,
    compiler: str,
    place: Path | None,
    key: str,
    depends: list[str],
) -> tuple[OneCall, str]:
    """Compile in a folder of our own; keep it where there is a place."""
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="step-", dir=place) as work, _one_voice():
            library = one_call.build(given, config, stored, rows, compiler, Path(work))
            took = f"compiled in {time.perf_counter() - started:.0f} s"
            if place is None:
                return OneCall(library, given, rows), f"{took}, not kept"
            try:
                library = _keep(place, key, depends, library.read_bytes())
            except (OSError, WorkbenchError) as error:
                return OneCall(library, given, rows), f"{took}, not kept: {error}"
            return OneCall(library, given, rows), f"{took}, kept in {library}"
    except Exception as error:  # torch's tracer and compiler raise many kinds
        raise WorkbenchError(f"the step could not be compiled with {compiler}: {telling_line(error)}") from error


@contextlib.contextmanager
def _one_voice() -> Iterator[None]:
    """torch does not say beside us where it left its files when a compiler fails: they are gone then."""
    logger = logging.getLogger("torch._inductor.utils")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def telling_line(error: Exception) -> str:
    """The line of a compiler's long message that says most, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    telling = next((line for line in lines if re.search(r"(^|\s)error:", line)), f"{type(error).__name__}: {lines[0]}")
    return telling[:300]


def _surroundings(given: StepParts, compiler: str) -> list[str]:
    """What the code depends on beside the model."""
    ours = sorted({*parts.sources(given), Path(one_call.__file__), Path(parts.__file__)})
    source = hashlib.sha256(b"\0".join(file.read_bytes() for file in ours)).hexdigest()
    return [
        f"torch {torch.__version__} {torch.version.git_version}",
        f"python {sys.version}",
        f"compiler {compiler} {compilers.version(compiler).decode(errors='replace')}",
        f"processor {hashlib.sha256(compilers.processor().encode()).hexdigest()}",
        f"instructions {torch.backends.cpu.get_cpu_capability()}",
        f"source {source}",
    ]


# -- the folder ------------------------------------------------------------------------------------------------------


def _kept(place: Path, key: str, depends: list[str], given: StepParts, rows: int) -> tuple[OneCall | None, str]:
    """(the step of that name, "") or (None, what is wrong with it, "" where there is none)."""
    manifest = place / f"{key}.json"
    if not os.path.lexists(manifest):
        return None, ""
    try:
        if trouble := why_not_ours(manifest):
            raise WorkbenchError(trouble)
        about = read_json_object(manifest, "its manifest")
        library, digest = about.get("library"), about.get("sha256")
        if about.get("depends_on") != depends or not isinstance(library, str) or Path(library).name != library:
            raise WorkbenchError("is of something else")
        if trouble := why_not_ours(place / library):
            raise WorkbenchError(f"has a library that {trouble}")
        if hashlib.sha256((place / library).read_bytes()).hexdigest() != digest:
            raise WorkbenchError("has a library that is damaged")
        step = OneCall(place / library, given, rows)
        os.utime(manifest)
    except (OSError, RuntimeError, WorkbenchError) as error:
        return None, f"the compiled step {manifest} cannot be used ({error})"
    return step, ""


def _keep(place: Path, key: str, depends: list[str], code: bytes) -> Path:
    """The library first, under a name of its content; the manifest, which makes it count, at last."""
    digest = hashlib.sha256(code).hexdigest()
    library = place / f"{key}-{digest[:16]}.so"
    with replacing(library, mode=0o700) as fresh:
        fresh.write_bytes(code)
    about = {"library": library.name, "sha256": digest, "depends_on": depends}
    write_text(place / f"{key}.json", json.dumps(about, indent=1) + "\n", mode=0o600)
    _trim(place, library)
    return library


def _trim(place: Path, newest: Path) -> None:
    """Remove those that were not used for longest, until LARGEST_BYTES hold all, and what killed processes left."""
    manifests = sorted(place.glob("*.json"), key=_used, reverse=True)
    total = 0
    for manifest in manifests:
        libraries = list(place.glob(f"{manifest.stem}-*.so"))
        total += sum(one.stat().st_size for one in libraries)
        if total > LARGEST_BYTES and newest not in libraries:
            for one in (manifest, *libraries):
                one.unlink(missing_ok=True)
    for left in (*place.glob("*.so"), *place.glob("step-*")):
        if left != newest and time.time() - _used(left) > LEFT_S and not _named(place, left):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def _used(path: Path) -> float:
    return path.stat().st_mtime


def _named(place: Path, library: Path) -> bool:
    manifest = place / f"{library.name.rpartition('-')[0]}.json"
    return manifest.is_file() and library.name in manifest.read_text(encoding="utf-8", errors="replace")
