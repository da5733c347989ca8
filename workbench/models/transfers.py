"""From the host to the device without waiting: pinned memory, and copies that are only queued.

`torch.tensor(numbers, device="cuda")` copies from ordinary memory, and the host waits until the device has come to it:
until everything that was queued before has run. From pinned memory the copy is queued as a kernel is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def on_host(*shape: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Zeros on the host, pinned where a copy to this device is then only queued.

    torch keeps the memory until the device has read it, so the host may go on at once and prepare the next step in
    another.
    """
    return torch.zeros(shape, dtype=dtype, pin_memory=torch.device(device).type == "cuda")


def sent(numbers: Sequence[Sequence[float]], *, dtype: torch.dtype, device: torch.device | str) -> list[torch.Tensor]:
    """Each list as a tensor there, all in one copy that the host does not wait for."""
    sizes = [len(some) for some in numbers]
    if torch.device(device).type == "cpu":
        return [torch.tensor(some, dtype=dtype) for some in numbers]
    host = on_host(sum(sizes), dtype=dtype, device=device)
    host.copy_(torch.tensor([number for some in numbers for number in some], dtype=dtype))
    return list(host.to(device, non_blocking=True).split(sizes))


def moved(tensors: Sequence[torch.Tensor], device: torch.device | str) -> list[torch.Tensor]:
    """These tensors of one type there, in one copy that the host does not wait for. Those that are there stay."""
    if tensors[0].device.type == torch.device(device).type:
        return list(tensors)
    sizes = [len(one) for one in tensors]
    host = on_host(sum(sizes), dtype=tensors[0].dtype, device=device)
    torch.cat(list(tensors), out=host)
    return list(host.to(device, non_blocking=True).split(sizes))
