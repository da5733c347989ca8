"""A Decoder from its tensors, one at a time, after asking whether they fit. Read-only weights, eval mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from workbench.errors import WorkbenchError
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.layers import ZeroCenteredRMSNorm
from workbench.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from workbench.models.mixers.contract import StateMixer

# matrices that write into the residual stream
BACK = ("attention.o.weight", ".down.weight", "mixer.out.weight")
# cgroup v2, then v1: limit, what is used of it, and the part of that which is page cache to be had back
_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(device: torch.device | str = "cpu") -> int | None:
    """Bytes that can still be allocated on a device without swapping; None where this is not known.

    On the CPU the smaller of what the machine and what the container (cgroup) leave.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return cuda_bytes(device)
    if device.type != "cpu":
        return None
    known = [b for b in (_machine_bytes(), *map(_cgroup_bytes, _CGROUPS)) if b is not None]
    return min(known, default=None)


def cuda_bytes(device: torch.device) -> int:
    """Free memory of the GPU, and what torch keeps of memory that was freed: blocks of its caching allocator, which the
    driver counts as used."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _machine_bytes() -> int | None:
    try:
        import psutil

        return psutil.virtual_memory().available
    except ImportError:
        pass
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_bytes(names: tuple[str, str, str, str]) -> int | None:
    folder, limit, used, cache = names
    try:
        allowed = int((Path(folder) / limit).read_text())  # "max" is no number: no limit
        taken = int((Path(folder) / used).read_text())
        stat = dict(line.split() for line in (Path(folder) / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, allowed - taken + int(stat.get(cache, 0)))


def check_fits(name: str, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise WorkbenchError with both numbers when the weights are more than the device has left."""
    needed, available = config.num_parameters() * dtype.itemsize, available_bytes(device)
    if available is not None and needed > available:
        raise WorkbenchError(
            f"{name} in {str(dtype).removeprefix('torch.')} needs {needed / 1e9:,.1f} GB for its "
            f"{config.num_parameters():,} weights; {device} has {available / 1e9:,.1f} GB available. "
            "Take a smaller model, a narrower dtype, or a device with more memory"
        )


def hollow_decoder(config: ModelConfig, *, name: str, tokenizer: Tokenizer | None = None) -> Decoder:
    """A Decoder whose parameters have shapes and no memory (torch's meta device)."""
    with torch.device("meta"), _NoInitialization():
        return Decoder(config, tokenizer=tokenizer, name=name)


class _NoInitialization(TorchFunctionMode):
    """Skips the functions of torch.nn.init. To draw no values on the meta device torch would import its compiler first,
    for a second and more."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


def fill(model: Decoder, tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> Decoder:
    """Give a hollow decoder its parameters, each named tensor as it comes; the tensors become the model's."""
    for name, tensor in tensors:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
    if model.config.tie_embeddings:
        model.head.weight = model.embed.weight
    for rotary in (model.rotary, model.local_rotary):
        if rotary is not None:
            rotary.put_on(device)
    assert not any(p.is_meta for p in model.parameters()), "a parameter was left without values"
    return model.eval()


def mixer_initial_value(model: Decoder, name: str, generator: torch.Generator) -> torch.Tensor | None:
    """What the state mixer that this parameter belongs to starts it with; None for all other parameters."""
    layer, found, within = name.partition(".mixer.")
    if not found:
        return None
    mixer = cast("StateMixer", model.get_submodule(f"{layer}.mixer"))
    return mixer.initial_value(within, model.get_parameter(name).shape, generator)


def random_tensors(
    model: Decoder, dtype: torch.dtype, device: torch.device, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """GPT-2's initialization, made where and as it will stay. The same for the same seed, device and dtype.

    Matrices are normal with deviation 0.02, those that write into the residual stream 0.02/√(2L); norms multiply
    with one and biases are zero.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        own = mixer_initial_value(model, name, generator)
        tensor = torch.empty(parameter.shape, dtype=dtype, device=device)
        if own is not None:
            tensor.copy_(own)
        elif parameter.dim() >= 2:
            back = name.endswith(BACK)
            tensor.normal_(0.0, 0.02 / math.sqrt(2 * model.config.num_layers) if back else 0.02, generator=generator)
        else:
            owner = model.get_submodule(name.rpartition(".")[0])
            zero = name.endswith("bias") or isinstance(owner, ZeroCenteredRMSNorm)
            tensor.fill_(0.0 if zero else 1.0)
        yield name, tensor
