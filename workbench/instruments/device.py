"""What this machine is, and the most it can do: bandwidth, FLOP/s, launch cost, measured once and kept.

A ceiling is measured with the plainest operation that asks for one thing only. It is what the best code could
reach here; a step is judged by it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from workbench.errors import WorkbenchError, check_settings
from workbench.files import cache_folder, write_text
from workbench.instruments.dispatch import Dispatch, measure_dispatch
from workbench.instruments.memory import available_bytes
from workbench.instruments.passing import Passing, measure_keys, measure_weights
from workbench.instruments.product_rates import KeptRates, Rates
from workbench.instruments.records import now, quantile
from workbench.instruments.timing import CheckStop, exclusive, measure
from workbench.models.linear import Linear
from workbench.models.measured_linear import for_many_rows, maker_of, why_not_measured

PACKAGES = ("torch", "triton", "transformers", "numpy")
BUDGET_S = 0.6  # for each of the quantities that are measured
LAUNCHES_A_RUN = 1000
LAUNCH_HOW = "small operations, on a CPU between matrix products, as a layer calls them"
PLAIN_LAUNCH_S = 10e-6  # from Python on a GPU, of a kernel with many arguments; not measured, and not too little
LAUNCHES_A_READ = 20  # so many launches, at least, one read of a ceiling takes on a GPU: the launch is no part of it
UNSTEADY_FOR_S = 600
_FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


# -- what it is --------------------------------------------------------------------------------------------


def fingerprint(device: str = "cpu") -> dict[str, Any]:
    """What a time depends on: processor or GPU, threads, memory, driver and the clocks seen just now. JSON-able.

    Raises WorkbenchError for a device that is not there.
    """
    device = str(check_device(device))
    common = {"device": device, "system": f"{platform.system()} {platform.machine()}"}
    if not device.startswith("cuda"):
        return common | {
            "name": cpu_name(),
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "features": cpu_features(),
            "last_cache_bytes": last_cache_bytes(),
        }
    properties = torch.cuda.get_device_properties(device)
    return common | {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "processors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "last_cache_bytes": last_cache_bytes(device),
        **_nvidia_smi(torch.device(device).index or 0),
    }


def check_device(device: str) -> torch.device:
    """The torch device, or WorkbenchError where there is none of that name."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise WorkbenchError(f'device must be "cpu" or "cuda" (or "cuda:1", …), got {device!r}') from None
    if found.type not in ("cpu", "cuda"):
        raise WorkbenchError(f'device must be "cpu" or "cuda", got {device!r}')
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise WorkbenchError(
            f'device {device!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices; use "cpu"'
        )
    return found


def versions() -> dict[str, str | None]:
    """Versions of what can change a time or a result; None for what is not installed. Imports nothing."""
    return {"python": platform.python_version(), **{name: package_version(name) for name in PACKAGES}}


@functools.cache
def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """Those instruction sets, of the ones that matter to matrix products, that this processor has (Linux)."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    present = set(flags.group(1).split()) if flags else set()
    return [name for name in _FEATURES if name in present]


def last_cache_bytes(device: str = "cpu") -> int:
    """Size of the last cache before memory; 32 MiB where the system does not say."""
    if str(device).startswith("cuda"):
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = []
    for entry in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        number, unit = re.findall(r"^(\d+)([KMG]?)$", entry.read_text().strip())[0]
        sizes.append(int(number) << {"": 0, "K": 10, "M": 20, "G": 30}[unit])
    return max(sizes, default=32 << 20)


def _nvidia_smi(index: int) -> dict[str, Any]:
    """Driver and clocks as the driver reports them now; empty where nvidia-smi is not at hand."""
    fields = ("driver_version", "clocks.sm", "clocks.mem", "power.limit")
    command = ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    names = ("driver", "clock_mhz", "memory_clock_mhz", "power_limit_w")
    return dict(zip(names, (part.strip() for part in answer.split(","))))


# -- the most it can do ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ceilings:
    """The limits of one device. All positive."""

    read_bytes_per_s: float
    copy_bytes_per_s: float  # bytes read and bytes written, together
    flop_per_s: dict[str, float]  # by dtype: "float32", "bfloat16", on a GPU also "float16"
    # from one small operation to the next: on a CPU as a step calls them; on a GPU as Python starts them; of a data
    # sheet's card as a captured graph replays them
    launch_s: float
    measured: bool  # False: from a data sheet
    source: str  # how it was measured, or where it was published
    date: str = ""
    name: str = "this machine"
    spread: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # of each: (p10, median, p90)
    # by dtype: weights passing through a product with one row; absent where only a data sheet is known
    weight_bytes_per_s: dict[str, float] = field(default_factory=dict)
    kv_bytes_per_s: float | None = None  # keys and values passing through the attention of one query a sequence

    # of a CPU that was measured, see `dispatch` and `passing`; empty elsewhere
    dispatch: tuple[Dispatch, ...] = ()
    weight_passing: dict[str, Passing] = field(default_factory=dict)
    kv_passing: Passing | None = None
    eager_launch_s: float | None = None  # one operation started from Python; None: as `launch_s`
    launch_overlaps: bool = True  # False where the cores that start an operation are those that do it
    # of this CPU: rates of the loops of C++, each measured when it is asked for first; None of another machine
    products: Callable[[str], Rates | None] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        every = (*self.flop_per_s.values(), *self.weight_bytes_per_s.values())
        every += tuple(value for value in (self.kv_bytes_per_s, self.eager_launch_s) if value is not None)
        for value in (self.read_bytes_per_s, self.copy_bytes_per_s, self.launch_s, *every):
            if not (isinstance(value, int | float) and 0 < value < float("inf")):
                raise WorkbenchError(f"ceilings of {self.name} must be above 0, got {value!r}")

    @property
    def of_gpu(self) -> bool:
        """Only a GPU's ceilings have float16."""
        return "float16" in self.flop_per_s

    @property
    def steady(self) -> bool:
        """False when the runs differed so much that something else was using the machine meanwhile."""
        return all(median >= 0.75 * p90 for _, median, p90 in self.spread.values())

    def to_dict(self) -> dict:
        """Without `products`, which are kept by themselves."""
        whole = dataclasses.asdict(dataclasses.replace(self, products=None))
        del whole["products"]
        return whole

    @classmethod
    def from_dict(cls, values: dict) -> Ceilings:
        """The inverse of `to_dict`. Raises WorkbenchError for keys too many or missing, or values not positive."""
        known = [f.name for f in dataclasses.fields(cls) if f.name != "products"]
        check_settings("Ceilings", values, known)
        missing = [name for name in known if name not in values]
        if missing:
            raise WorkbenchError(f"ceilings lack {', '.join(missing)}")
        keys = values["kv_passing"]
        made = {
            "spread": {key: tuple(pair) for key, pair in values["spread"].items()},
            "dispatch": tuple(Dispatch(**one) for one in values["dispatch"]),
            "weight_passing": {key: Passing.from_dict(one) for key, one in values["weight_passing"].items()},
            "kv_passing": None if keys is None else Passing.from_dict(keys),
        }
        return cls(**{**values, **made})


# Of every card: a launch is the host's and the driver's affair, and hardly differs between these.
CAPTURED_LAUNCH_S = 1.3e-6
CAPTURED_HOW = 'launch: 1.3 µs a kernel in a captured graph on an H100 (Hazy Research, "Look Ma, No Bubbles!", 2025)'
EAGER_STEP_S, EAGER_OPERATIONS = 1 / 25.5, 1424  # the operations of a plain Llama 2 7B, as `cost_layers` counts them
EAGER_LAUNCH_S = EAGER_STEP_S / EAGER_OPERATIONS
EAGER_HOW = (
    "started from Python: 28 µs an operation on an A100, from 25.5 tokens/s of Llama 7B before any optimization, which"
    ' its trace shows bound by the host (PyTorch blog, "Accelerating Generative AI with PyTorch II: GPT, Fast", 2023),'
    " over the 1,424 operations counted here"
)


def _published(name: str, bf16_tera: float, float32_tera: float, terabytes: float, source: str) -> Ceilings:
    half = bf16_tera * 1e12
    return Ceilings(
        read_bytes_per_s=terabytes * 1e12,
        copy_bytes_per_s=terabytes * 1e12,
        flop_per_s={"float32": float32_tera * 1e12, "bfloat16": half, "float16": half},
        launch_s=CAPTURED_LAUNCH_S,
        eager_launch_s=EAGER_LAUNCH_S,
        measured=False,
        name=name,
        source=f"{source}, dense; {CAPTURED_HOW}; {EAGER_HOW}",
    )


# Never mixed with what was measured here: a data sheet's peak is not reached by any program.
PUBLISHED: dict[str, Ceilings] = {
    "a100-80gb": _published("A100 80GB SXM", 312, 19.5, 2.039, "NVIDIA A100 data sheet"),
    "h100-sxm": _published("H100 SXM", 989, 67, 3.35, "NVIDIA H100 data sheet"),
    "h200": _published("H200 SXM", 989, 67, 4.8, "NVIDIA H200 data sheet"),
}
CARD_MEMORY_BYTES = {"a100-80gb": 80e9, "h100-sxm": 80e9, "h200": 141e9}  # of these, in GB of 10⁹ as sold


def measure_ceilings(device: str = "cpu", stop: CheckStop | None = None) -> Ceilings:
    """Measure them now: about ten seconds on a CPU. `stop` is polled between runs and may end it by raising.

    Each ceiling is the rate that one run in ten surpasses. Whatever else the machine does only ever slows a run
    down, so the median would measure the neighbours too; median and p10 are kept in `spread`. Memory, which programs
    share, is measured before and after all else, and what passed through a product in between was read as well: a busy
    half second does not become the ceiling.
    """
    check_device(device)
    with exclusive(stop), torch.inference_mode():
        first, how = _bandwidth_rates(device, stop, share=0.5)
        dtypes = [torch.float32, torch.bfloat16] + ([torch.float16] if device.startswith("cuda") else [])
        besides: dict[str, Any] = {}
        names = {str(dtype).removeprefix("torch."): dtype for dtype in dtypes}
        flops = {name: _matmul_rates(dtype, device, stop) for name, dtype in names.items()}
        if device.startswith("cuda"):
            weights = {name: _weight_rates(dtype, device, stop) for name, dtype in names.items()}
            attention, launches = _attention_rates(device, stop), _launch_rates(device, stop)
            launch_s = 1 / quantile(launches, 0.9)
        else:
            passing = {name: measure_weights(dtype, last_cache_bytes(), stop) for name, dtype in names.items()}
            weights = {name: samples for name, (_, samples) in passing.items()}
            kv_passing, attention = measure_keys(last_cache_bytes(), stop)
            dispatch = measure_dispatch(last_cache_bytes(), stop)
            launch_s, launches = dispatch[-1].elementwise_s, []
            besides = {
                "dispatch": dispatch,
                "weight_passing": {name: table for name, (table, _) in passing.items()},
                "kv_passing": kv_passing,
            }
        last, _ = _bandwidth_rates(device, stop, share=0.5)
    rates = {name: first[name] + last[name] for name in first}
    weight_rates = {name: quantile(values, 0.9) for name, values in weights.items()}
    return Ceilings(
        read_bytes_per_s=max(quantile(rates["read"], 0.9), *weight_rates.values()),
        copy_bytes_per_s=quantile(rates["copy"], 0.9),
        flop_per_s={name: quantile(values, 0.9) for name, values in flops.items()},
        weight_bytes_per_s=weight_rates,
        kv_bytes_per_s=quantile(attention, 0.9),
        launch_s=launch_s,
        **besides,
        launch_overlaps=device.startswith("cuda"),
        measured=True,
        source=f"{how}, before and after the rest; square matrix products; one row through matrices, and one query "
        f"through attention, beyond the cache; {LAUNCH_HOW}",
        date=now(),
        name=fingerprint(device)["name"],
        spread={
            name: (quantile(values, 0.1), statistics.median(values), quantile(values, 0.9))
            for name, values in {
                **rates,
                **flops,
                **{f"weights in {name}": values for name, values in weights.items()},
                "keys and values": attention,
                **({"launches a second": launches} if launches else {}),
            }.items()
        },
    )


def _bandwidth_rates(device: str, stop: CheckStop | None, share: float = 1.0) -> tuple[dict[str, list[float]], str]:
    """Bytes a second of reading and of copying, in this share of the time budget, and in words how they were measured.

    Reading is a sum, of float32 or of int64: which of the two keeps up with memory differs between processors.
    Buffers are at least 256 MiB and four times the last cache, but within an eighth of free memory.
    """
    size = max(256 << 20, 4 * last_cache_bytes(device))
    size = min(size, available_bytes(device) // 8) // 32 * 32
    # written: of a page never written Linux keeps one copy for all
    source = torch.ones(size // 4, device=device)
    target, whole = torch.ones_like(source), source.view(torch.int64)
    sums = {"float32": _timed(source.sum, device, stop, share), "int64": _timed(whole.sum, device, stop, share)}
    best = min(sums, key=lambda name: quantile(sums[name], 0.1))
    copies = _timed(lambda: target.copy_(source), device, stop, share)
    rates = {"read": [size / s for s in sums[best]], "copy": [2 * size / s for s in copies]}
    return rates, f"sum of {best} and copy, {size >> 20} MiB"


def _matmul_rates(dtype: torch.dtype, device: str, stop: CheckStop | None) -> list[float]:
    """FLOP/s of n × n products, with n as large as the time budget allows: large ones run fastest.

    As layers multiply, by rows of the second matrix: in 16 bits, on a processor without such products, torch is ten
    times slower by its columns, and layers go through a loop in C++.
    """
    largest = 8192 if device.startswith("cuda") else 2048
    n = 256
    while True:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        product = functools.partial(for_many_rows(dtype, device)(b), a)
        once = min(measure(product, repeats=2, warmup=1, device=device, check_stop=stop))
        if n >= largest or 8 * once > BUDGET_S / 2:  # doubling n takes eight times as long
            return [2 * n**3 / s for s in _timed(product, device, stop)]
        n *= 2


def _weight_rates(dtype: torch.dtype, device: str, stop: CheckStop | None) -> list[float]:
    """Bytes a second of weights while one row passes through matrices, together larger than the last cache.

    As `models.linear` holds them. On a CPU a matrix product with one row is slower than a plain read: it has to
    multiply as well, and a thread waits for the others after every matrix.
    """
    matrices = _matrices(dtype, device, max(128 << 20, 4 * last_cache_bytes(device)))
    row = torch.ones(1, matrices[0].in_features, device=device, dtype=dtype)

    def through_all() -> None:
        for matrix in matrices:
            matrix(row)

    size = sum(matrix.weight_bytes for matrix in matrices)
    return [size / s for s in _timed(through_all, device, stop)]


def _matrices(dtype: torch.dtype, device: str, size: int) -> list[Linear]:
    """Matrices of one size, so many bytes in all but within an eighth of free memory; two on a GPU, where each is
    beyond the cache."""
    room = available_bytes(device) // 8
    shape = matrix_shape(device, room, dtype.itemsize)
    one = math.prod(shape) * dtype.itemsize
    wanted = max(size, 2 * one) if device.startswith("cuda") else size
    count = max(1, min(wanted, room) // one)
    hold = maker_of(shape, dtype, device, one * count)
    return [hold(torch.ones(shape, device=device, dtype=dtype)) for _ in range(count)]


def matrix_shape(device: str, room: float = math.inf, element_bytes: int = 2) -> tuple[int, int]:
    """[out, in] of the matrices that weights are read from. On a CPU a small model's. On a GPU that of an output head
    of 128K tokens, a gigabyte in 16 bits: a layer's own matrix is read in fewer microseconds than Python takes for a
    launch, and its time would be the launch's. Smaller, down to a sixteenth, where it has no room."""
    if not str(device).startswith("cuda"):
        return 3 * 768, 768
    out, inside = 131_072, 4096
    while out > 131_072 // 16 and out * inside * element_bytes > room:
        out //= 2
    return out, inside


def attention_shape(device: str) -> tuple[int, int, int]:
    """Heads, keys and head size of a sequence over which one query passes: a large model's on a GPU, else a small
    one's."""
    return (32, 4096, 128) if str(device).startswith("cuda") else (12, 512, 64)


def attention_bytes(device: str, cache_bytes: int) -> float:
    """Keys and values that one call reads: beyond the cache, and on a GPU long enough beside the launch."""
    if not str(device).startswith("cuda"):
        return 2 * cache_bytes
    fastest = max(one.read_bytes_per_s for one in PUBLISHED.values())
    return max(2 * cache_bytes, LAUNCHES_A_READ * PLAIN_LAUNCH_S * fastest)


def _attention_rates(device: str, stop: CheckStop | None) -> list[float]:
    """Bytes a second of keys and values while one query a sequence passes over them, more than the cache holds."""
    heads, keys, head_dim = attention_shape(device)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    one = 2 * heads * keys * head_dim * dtype.itemsize
    size = min(attention_bytes(device, last_cache_bytes(device)), available_bytes(device) // 8)
    sequences = max(1, math.ceil(size / one) if device.startswith("cuda") else int(size) // one)
    q = torch.ones(sequences, heads, 1, head_dim, device=device, dtype=dtype)
    k = torch.ones(sequences, heads, keys, head_dim, device=device, dtype=dtype)
    v = torch.ones_like(k)
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v)
    return [2 * k.nbytes / s for s in _timed(attend, device, stop)]


def _launch_rates(device: str, stop: CheckStop | None) -> list[float]:
    """Operations a second that Python starts on a GPU, each doing next to nothing."""
    one = torch.ones(1, device=device)

    def many() -> None:
        for _ in range(LAUNCHES_A_RUN):
            torch.add(one, one)

    return [LAUNCHES_A_RUN / s for s in _timed(many, device, stop)]


def _timed(function: Callable[[], object], device: str, stop: CheckStop | None, share: float = 1.0) -> list[float]:
    """Samples for about this share of BUDGET_S seconds, five at least and fifty at most."""
    once = measure(function, repeats=1, warmup=1, device=device, check_stop=stop)[0]
    repeats = min(50, max(5, int(share * BUDGET_S / max(once, 1e-6))))
    return measure(function, repeats=repeats, warmup=0, device=device, check_stop=stop)


# -- kept once a machine -----------------------------------------------------------------------------------


def ceilings(device: str = "cpu", refresh: bool = False, stop: CheckStop | None = None) -> Ceilings:
    """The ceilings of this machine, measured on the first call and read from the cache ever after.

    Measured again with refresh=True, for another number of threads or version of torch, where the cached file
    cannot be read, and ten minutes after a measurement that was not `steady`. A cache that cannot be written
    costs the time of measuring again, nothing else. A CPU's have `products`, which are kept the same way.
    """
    path = _cache_path(device)
    with exclusive(stop):
        found = None if refresh else _read_cache(path)
        if found is None:
            found = measure_ceilings(device, stop)
            with contextlib.suppress(WorkbenchError):
                write_text(path, json.dumps(found.to_dict(), indent=1) + "\n")
        return found if found.of_gpu else dataclasses.replace(found, products=KeptRates(path, refresh, stop))


def _read_cache(path: Path) -> Ceilings | None:
    try:
        found = Ceilings.from_dict(json.loads(path.read_text(encoding="utf-8")))
        age_s = (datetime.now(UTC) - datetime.fromisoformat(found.date)).total_seconds()
    except (OSError, ValueError, TypeError, AttributeError, KeyError):  # WorkbenchError is a ValueError
        return None
    return found if found.measured and (found.steady or 0 <= age_s < UNSTEADY_FOR_S) else None


# Changed where ceilings are measured in another way: older ones are measured again.
HOW = "products and weights in the forms of prepare"


def _linears() -> str:
    """How the form of weights was chosen that the products of a CPU's ceilings were measured in."""
    return "by rule" if why_not_measured(torch.float32, "cpu") else "measured"


def _cache_path(device: str) -> Path:
    check_device(device)
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name()
    threads = "" if device.startswith("cuda") else f" {torch.get_num_threads()} threads, linears {_linears()}"
    key = f"{name}{threads} torch {torch.__version__}"
    digest = hashlib.sha256(f"{key} {HOW}".encode()).hexdigest()[:8]
    slug = re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")[:60]
    return cache_folder() / "ceilings" / f"{slug}-{digest}.json"
