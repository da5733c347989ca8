"""What started ranks do in the tests of parallelism. A started process imports this module by its name."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from workbench.parallel import make_collectives

SIZES = (1, 7, 320, 70_001)  # elements; the last takes several pieces


def numbers(size: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[size, count], the same on each rank: what each of them brings."""
    return torch.randn(size, count, generator=torch.Generator().manual_seed(count)).to(dtype)


def wait_for_the_end(rank):
    while True:
        time.sleep(0.01)
        rank.check()


def end_at_once(rank):
    return None


def break_down(rank):
    raise KeyError("a part is missing")


def collect(rank, backend):
    """Every operation, once for each size; assertions stand on each rank."""
    group = make_collectives(rank, backend=backend)
    n, r = rank.size, rank.rank
    for count in SIZES:
        brought = numbers(n, count)
        inorder = brought[0].clone()
        for other in brought[1:]:
            inorder += other
        summed = group.all_reduce(brought[r].clone())
        assert torch.equal(summed, inorder) if backend == "shm" else torch.allclose(summed, inorder, atol=1e-5)
        assert torch.equal(group.all_gather(brought[r]), brought)
        gathered = group.gather(brought[r], root=n - 1)
        assert torch.equal(gathered, brought) if r == n - 1 else gathered is None
        assert torch.equal(group.broadcast(brought[r].clone(), root=1), brought[1])
        for lap in range(3):
            group.clock = 10 * r + lap
            group.send(brought[r] + lap, (r + 1) % n)
        for lap in range(3):
            group.clock = 0
            assert torch.equal(group.receive(torch.empty(count), (r - 1) % n), brought[(r - 1) % n] + lap)
            assert group.clock == 10 * ((r - 1) % n) + lap
        for lap in range(20):
            message = bytes([lap]) * count
            if r == 0:
                group.tell(message)
            else:
                assert group.hear() == message
        group.barrier()
    half = numbers(n, 33, torch.bfloat16)
    assert torch.equal(group.all_gather(half[r]), half)
    sent, heard = group.counts["tell"], group.counts["hear"]
    group.close()
    group.close()
    return group.counts, sent, heard


def twin(rank, seed=0):
    """PyTorch's own tensor parallelism of a feed-forward, beside ours: the largest difference."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from workbench.models.config import ModelConfig
    from workbench.models.layers import SwiGLU
    from workbench.parallel.tensor import Part, RowParallel

    config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 64, 16)
    torch.manual_seed(seed)
    whole, x = SwiGLU(config), torch.randn(5, 32)
    part = Part(config, rank.rank, rank.size)
    group = make_collectives(rank)
    own = SwiGLU(config)
    for name in ("gate", "up", "down"):
        linear = getattr(own, name)
        linear.weight = torch.nn.Parameter(part.cut(f"mlp.{name}.weight", getattr(whole, name).weight.detach()))
    own.down = RowParallel(own.down, group)
    with torch.no_grad():
        ours, single = own(x), whole(x)
    dist.init_process_group("gloo", store=dist.PrefixStore("twin", rank.store), rank=rank.rank, world_size=rank.size)
    try:
        mesh = init_device_mesh("cpu", (rank.size,))
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        theirs = parallelize_module(whole, mesh, plan)
        with torch.no_grad():
            twins = theirs(x)
        shard = theirs.gate.weight.to_local()
        assert torch.equal(shard, own.gate.weight) and torch.equal(theirs.down.weight.to_local(), own.down.weight)
        return (ours - twins).abs().max().item(), (ours - single).abs().max().item()
    finally:
        dist.destroy_process_group()
        group.close()


# -- what is left behind -----------------------------------------------------------------------------------------


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
