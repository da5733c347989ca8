"""A model for an engine of this process and for engines of others, which read it for themselves."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from workbench.errors import WorkbenchError
from workbench.models.checkpoints import load, save_checkpoint
from workbench.models.fast import prepare

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.models.decoder import Decoder
    from workbench.models.fast import FastDecoder


@contextmanager
def for_processes(bench: Bench, model: str | Decoder) -> Iterator[tuple[str, FastDecoder]]:
    """(what another process loads it by: its name, or a folder; the model here, prepared). A model in memory is written
    to a folder that is gone afterwards. Raises WorkbenchError for one that cannot be written, and for another device
    than the CPU: its processes would need one each."""
    if bench.device != "cpu":
        raise WorkbenchError(f'these processes share the CPU of one machine, got {bench.device!r}; use device "cpu"')
    if isinstance(model, str):
        yield model, prepare(bench.model(model))
        return
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        place = Path(folder) / "model"
        save_checkpoint(model, place)
        yield str(place), prepare(load(place))


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes on one core meanwhile: as many as each of the processes beside this one has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
