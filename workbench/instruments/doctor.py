"""Is this machine ready for the course? Each finding says what was looked at, what is there, and what to do.

Imports nothing that may be missing before it has looked: a doctor must work where the patient does not.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import WorkbenchError

DISTRIBUTION = "inference-workbench"
OLDEST_PYTHON = (3, 11)
KERNEL_NAME = "workbench"
SHIPPED = {  # folder under models/zoo -> the file that must be in it
    "stdlib-10m": "model.safetensors",
    "stdlib-1m": "model.safetensors",
    "stdlib-tokenizer": "tokenizer.json",
}
LITTLE_DISK_BYTES, NO_DISK_BYTES = 2e9, 2e8
LITTLE_MEMORY_BYTES = 2e9
SETUP = "run `make setup` in the course's folder"


@dataclass(frozen=True)
class Finding:
    """ok: True, False (something the course needs is not right), or None (a warning: parts of it are less)."""

    name: str
    ok: bool | None
    found: str
    fix: str = ""  # what to do; empty where there is nothing to do


def examine() -> list[Finding]:
    """Look at everything. Never raises: an examination that fails is itself a finding."""
    findings: list[Finding] = []
    for look in (
        _python,
        _packages,
        _torch,
        _cpu,
        _linear,
        _native,
        _memory,
        _triton,
        _kernel,
        _lab,
        _widgets,
        _disk,
        _hub,
        _models,
        _course,
    ):
        findings += _safely(look)
    return findings


def _safely(look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(look())
    except Exception as error:  # whatever is broken here is what we are looking for
        name = look.__name__.strip("_")
        return [Finding(name, False, f"{type(error).__name__}: {error}"[:300], SETUP)]


# -- Python and its packages ---------------------------------------------------------------------------------


def _python() -> Iterator[Finding]:
    wanted = ".".join(map(str, OLDEST_PYTHON))
    new_enough = sys.version_info >= OLDEST_PYTHON
    fix = "" if new_enough else f"install Python {wanted} or newer, then `make setup PYTHON=python{wanted}`"
    yield Finding("python", new_enough, f"{platform.python_version()} at {sys.executable}", fix)


def _packages() -> Iterator[Finding]:
    """One finding for all that are as pyproject.toml asks, and one for each that is not."""
    from packaging.requirements import Requirement

    try:
        asked = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or []]
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", False, f"{DISTRIBUTION} itself is not installed", SETUP)
        return
    asked = [r for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})]
    wrong = 0
    for requirement in asked:
        there = _version(requirement.name)
        if there is None or not requirement.specifier.contains(there, prereleases=True):
            wrong += 1
            found = f"{there or 'not installed'}, {requirement.specifier} is needed"
            plain = f"{requirement.name}{requirement.specifier}"
            yield Finding(requirement.name, False, found, f"python -m pip install '{plain}'")
    if not wrong:
        yield Finding("packages", True, f"all {len(asked)} as pyproject.toml asks")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- the machine -----------------------------------------------------------------------------------------------


def _torch() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding("torch", True, f"{torch.__version__}, CUDA {torch.version.cuda}: {', '.join(names)}")
    elif shutil.which("nvidia-smi"):
        fix = "install a CUDA build of torch, or a newer driver (see `nvidia-smi`); the labs run on the CPU meanwhile"
        yield Finding("torch", None, f"{torch.__version__} sees no GPU, though nvidia-smi is installed", fix)
    else:
        yield Finding("torch", True, f"{torch.__version__}, CPU only, {torch.get_num_threads()} threads")


def _cpu() -> Iterator[Finding]:
    from workbench.instruments.device import cpu_features, cpu_name

    features = ", ".join(cpu_features()) or "no vector instructions known here"
    yield Finding("cpu", True, f"{cpu_name()}, {os.cpu_count()} cores; {features}")


def _linear() -> Iterator[Finding]:
    from workbench.models.measured_linear import kept_forms

    yield Finding("linear", True, kept_forms())


def _native() -> Iterator[Finding]:
    """Whether steps can be functions in C++; nothing is compiled to find out."""
    from workbench.models.measured_steps import kept_choices
    from workbench.native.compiler import OFF, compiler, why_no_compiler

    if reason := why_no_compiler():
        fix = f"unset {OFF}" if os.environ.get(OFF) else "install one; until then steps are eager, and slower"
        yield Finding("native", None, reason, fix)
    else:
        yield Finding("native", True, f"steps in C++ through {compiler()}: {kept_choices()}")


def _memory() -> Iterator[Finding]:
    from workbench.instruments.memory import available_bytes, readable_bytes

    free = available_bytes()
    fix = "close other programs: the labs need about 2 GB" if free < LITTLE_MEMORY_BYTES else ""
    yield Finding("memory", None if fix else True, f"{readable_bytes(free)} free", fix)


def _triton() -> Iterator[Finding]:
    version = _version("triton")
    if version is None:
        fix = SETUP if sys.platform == "linux" else "the kernel labs need Linux; all others run here"
        yield Finding("triton", None, "not installed", fix)
        return
    try:
        launch = importlib.import_module("workbench.kernels.launch")
    except WorkbenchError as error:
        yield Finding("triton", False, f"{version}: {error}", "unset TRITON_INTERPRET, or set it to 0 or 1")
        return
    if misfit := launch.INTERPRETED and launch.why_not("cpu"):
        yield Finding("triton", False, f"{version}: {misfit}", 'pip install "numpy<2.4"')
        return
    how = "interpreted, on the CPU" if launch.INTERPRETED else "compiled, for CUDA devices"
    yield Finding("triton", True, f"{version}, kernels are {how}: {launch.WHY}")


# -- Jupyter ---------------------------------------------------------------------------------------------------


def _kernel() -> Iterator[Finding]:
    from jupyter_core.paths import jupyter_path

    fix = "run `python -m workbench.jupyter`"
    for folder in jupyter_path("kernels"):
        file = Path(folder) / KERNEL_NAME / "kernel.json"
        if not file.is_file():
            continue
        python = json.loads(file.read_text(encoding="utf-8"))["argv"][0]
        if shutil.which(python) is None:
            yield Finding("kernel", False, f"{file} starts {python}, which is not there", fix)
        elif os.path.isabs(python) and os.path.dirname(python) != os.path.dirname(sys.executable):
            yield Finding("kernel", None, f"{file} starts another Python: {python}", fix)
        else:
            yield Finding("kernel", True, f'"{KERNEL_NAME}" in {file.parent}')
        return
    yield Finding("kernel", False, f'no Jupyter kernel "{KERNEL_NAME}" is registered', fix)


def _lab() -> Iterator[Finding]:
    version = _version("jupyterlab")
    fix = "" if version else SETUP
    yield Finding("jupyterlab", bool(version), version or "not installed", fix)


def _widgets() -> Iterator[Finding]:
    from jupyter_core.paths import jupyter_path

    version = _version("ipywidgets")
    folders = [Path(p) / "@jupyter-widgets" / "jupyterlab-manager" for p in jupyter_path("labextensions")]
    there = next((str(f) for f in folders if (f / "package.json").is_file()), None)
    if version and there:
        yield Finding("widgets", True, f"ipywidgets {version}, JupyterLab extension in {there}")
    else:
        missing = "ipywidgets is not installed" if not version else "the JupyterLab extension is not installed"
        fix = "python -m pip install --force-reinstall ipywidgets jupyterlab_widgets"
        yield Finding("widgets", False, missing, fix)


# -- files -----------------------------------------------------------------------------------------------------


def _disk() -> Iterator[Finding]:
    from workbench.instruments.memory import readable_bytes

    free = shutil.disk_usage(Path.cwd()).free
    ok = False if free < NO_DISK_BYTES else None if free < LITTLE_DISK_BYTES else True
    yield Finding(
        "disk", ok, f"{readable_bytes(free)} free in {Path.cwd()}", "" if ok else "make room: 2 GB are enough"
    )


def _hub() -> Iterator[Finding]:
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    yield Finding("hub", True, "offline (HF_HUB_OFFLINE is set)" if offline else "asked for hub ids, and only then")


def _models() -> Iterator[Finding]:
    from workbench.instruments.memory import readable_bytes

    zoo = package_folder() / "models" / "zoo"
    missing = [name for name, file in SHIPPED.items() if not (zoo / name / file).is_file()]
    if missing:
        fix = f"clone again, or `workbench train {missing[0]} --out {zoo / missing[0]}`"
        yield Finding("models", False, f"{', '.join(missing)} not in {zoo}", fix)
        return
    size = sum(file.stat().st_size for file in zoo.rglob("*") if file.is_file())
    yield Finding("models", True, f"{', '.join(SHIPPED)} ({readable_bytes(size)})")


def _course() -> Iterator[Finding]:
    folder = find_course()
    if folder is None:
        fix = "change to the clone, or to a folder made by `workbench copy`"
        yield Finding("course", False, f"no notebooks/ in {Path.cwd()}, nor beside the package", fix)
    else:
        count = len(list((folder / "notebooks").glob("*.ipynb")))
        yield Finding("course", count > 0, f"{count} notebooks in {folder}", "" if count else "run `make build`")


def package_folder() -> Path:
    return Path(__file__).resolve().parents[1]


def find_course(start: Path | None = None) -> Path | None:
    """The course's folder: the one we stand in (`start`) if it is a copy or the clone, else the clone we run from."""
    here = Path.cwd() if start is None else Path(start)
    for folder in (here, *here.parents):
        if (folder / "notebooks" / "00_start_here.ipynb").is_file():
            return folder.resolve()
    beside = package_folder().parent
    return beside if (beside / "notebooks").is_dir() else None
