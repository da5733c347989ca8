"""Weights in three tiers: some stay on the device, the others come into one of two staging buffers before their layer.

    layer      0        1        2        3            a layer's matrices in the host or on disk are copied into a
    staging    A        B        A        B            staging buffer; while layer 1 computes out of B, the loader
    loader  load 0 │ load 1 │ load 2 │ load 3          thread copies layer 2's into A
    compute        │ 0      │ 1      │ 2

What computes is the project's own `Decoder`: its parameters are views of what is kept and of the staging buffers. Bytes
on disk are read into the host first, then copied like the host's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from workbench.errors import WorkbenchError
from workbench.models.assembly import fill, hollow_decoder
from workbench.models.decoder import Decoder
from workbench.offload.budget import DeviceBudget
from workbench.offload.disk import Matrices, Memory, write_matrices
from workbench.offload.placement import DEVICE, DISK, HOST, Placement, matrices
from workbench.offload.traffic import READ, UP, Traffic

SLOTS = 2


class Staged(NamedTuple):
    """A matrix that is brought: where it goes in each buffer, and from where it comes (None: from disk)."""

    name: str
    parameter: nn.Parameter
    views: tuple[torch.Tensor, ...]
    in_host: torch.Tensor | None


def store(model: Decoder, names: Collection[str], folder: Path, direct: bool | None = None) -> Matrices:
    """These parameters in a file of the folder, which loses its name as soon as it is open. Close it. Raises
    WorkbenchError where there is no room, or what was written is not what is read."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".offload.") as inside:
        path = Path(inside) / "matrices.safetensors"
        write_matrices(path, {name: value for name, value in model.named_parameters() if name in names})
        return Matrices(path, direct)


class TieredWeights:
    """`model` computes with them, layer by layer, each within `layer(index)`.

    source: its matrices in the host are shared, what the device keeps is copied. What lies on disk is in `stored`,
    which stays open then, or is written to the folder. Raises WorkbenchError where the budget or the disk has no room,
    or `stored` is of another model, and leaves nothing behind then.
    """

    def __init__(
        self,
        source: Decoder,
        placement: Placement,
        budget: DeviceBudget,
        traffic: Traffic,
        folder: Path | None,
        direct: bool | None = None,
        stored: Matrices | None = None,
    ) -> None:
        self._traffic = traffic
        tiers = placement.tiers
        on_disk = [name for name, tier in tiers.items() if tier == DISK]
        if stored is not None:
            _check_stored(source, on_disk, stored)
        kept = {n: p for n, p in source.named_parameters() if tiers.get(n, DEVICE) == DEVICE}
        budget.take("weights", sum(value.nbytes for value in kept.values()))
        budget.take("staging", SLOTS * placement.staged_bytes)
        values = {name: value.detach().clone() for name, value in kept.items()}
        buffers = [torch.empty(placement.staged_bytes, dtype=torch.uint8) for _ in range(SLOTS)]
        self._disk, self._owns_disk = stored, False
        if on_disk and stored is None:
            assert folder is not None, "checked by the executor"
            self._disk, self._owns_disk = store(source, on_disk, folder, direct), True
        rooms = [sum(self._disk.room(n) for n, _ in layer if n in on_disk) for layer in matrices(source) if self._disk]
        self._memory = Memory(max(rooms, default=0))  # of the host, for what one layer has on disk
        places: list[list[tuple[str, tuple[torch.Tensor, ...], torch.Tensor | None]]] = []
        for layer in matrices(source):
            begin, of_layer = 0, []
            for name, value in layer:
                if tiers[name] == DEVICE:
                    continue
                views = tuple(
                    buffer[begin : begin + value.nbytes].view(value.dtype).view(value.shape) for buffer in buffers
                )
                of_layer.append((name, views, value.detach() if tiers[name] == HOST else None))
                values[name] = views[0]
                begin += value.nbytes
            places.append(of_layer)
        self.model = fill(
            hollow_decoder(source.config, name=source.name, tokenizer=source.tokenizer), values.items(), source.device
        )
        self._staged = [[Staged(n, self.model.get_parameter(n), v, h) for n, v, h in layer] for layer in places]
        self._loader = ThreadPoolExecutor(1, "offload weights")
        self._order: Iterator[int] = iter(())
        self._coming: tuple[int, int, Future[None]] | None = None  # layer, buffer, its load
        self._loads = 0
        self.waited_s = 0.0

    @property
    def how(self) -> str:
        """How what is on disk is read; "" where nothing is."""
        return "" if self._disk is None else self._disk.how

    def drop(self) -> None:
        """Wait for the load that an interrupted run left under way, if any, and forget it."""
        if self._coming is not None:
            wait([self._coming[2]])
        self._coming = None

    def begin(self, steps: int) -> None:
        """A run of so many passes over all layers; the first load begins."""
        assert self._coming is None, "dropped"
        self.waited_s = 0.0
        layers = [index for index, staged in enumerate(self._staged) if staged]
        self._order = iter(layers * steps)
        self._submit()

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Within the block the weights of this layer are on the device; the next one's are on their way."""
        if self._staged[index]:
            assert self._coming is not None and self._coming[0] == index, "layers come in their order"
            _, slot, load = self._coming
            began = time.perf_counter()
            load.result()
            self.waited_s += time.perf_counter() - began
            for staged in self._staged[index]:
                staged.parameter.data = staged.views[slot]
            self._submit()  # the other buffer's layer has been computed
        yield

    def _submit(self) -> None:
        following = next(self._order, None)
        if following is None:
            self._coming = None
            return
        slot = self._loads % SLOTS
        self._loads += 1
        self._coming = (following, slot, self._loader.submit(self._load, self._staged[following], slot))

    @torch.no_grad()
    def _load(self, layer: Sequence[Staged], slot: int) -> None:
        """On the loader's thread."""
        at = 0
        for one in layer:
            brought, view = one.in_host, one.views[slot]
            if brought is None:
                assert self._disk is not None
                with self._traffic.over(READ, view.nbytes):
                    brought, at = self._disk.tensor(one.name, self._memory, at)
            with self._traffic.over(UP, view.nbytes):
                view.copy_(brought)

    def close(self) -> None:
        """Waits for a load under way; the file on disk is gone then."""
        self._loader.shutdown(wait=True, cancel_futures=True)
        if self._disk is not None and self._owns_disk:
            self._disk.close()
        self._disk = None


def _check_stored(source: Decoder, names: Collection[str], stored: Matrices) -> None:
    for name in names:
        value, there = source.get_parameter(name), stored.stored.get(name)
        if there is None or (there.dtype, there.shape) != (value.dtype, tuple(value.shape)):
            what = "no such tensor" if there is None else f"{there.dtype} {list(there.shape)}"
            raise WorkbenchError(
                f"{name} of {source.name} is {value.dtype} {list(value.shape)}, and the stored matrices have {what};"
                " store those of this model"
            )
