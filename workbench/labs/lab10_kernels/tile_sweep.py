"""kernels.tile_sweep: FlashAttention's tiles and warps by what can be counted without a GPU: programs, bytes,
registers, shared memory, occupancy. No time is predicted from them.

The kernel is compiled for a card that is not there, as `workbench.kernels.compiling` does it: Triton brings NVIDIA's
assembler, which says how many registers a thread gets and how many bytes did not fit. That happens in a process of its
own, in which Triton does not interpret.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.labs.lab10_kernels.occupancy import PROCESSORS, occupancy

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

NAME = "kernels.tile_sweep"
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of an 8B model's layer
ELEMENT = 2  # bytes: bfloat16
TIMEOUT_S = 300


class Tile(NamedTuple):
    """rows: of queries, HEADS / KV_HEADS of them for each token, as version 3 of the kernel has them."""

    rows: int
    keys: int
    warps: int
    stages: int


SWEEPS = {
    "few": (Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    "tiles": tuple(Tile(rows, keys, 8 if rows == 128 else 4, 3) for rows in (16, 64, 128) for keys in (32, 64)),
    "warps": tuple(Tile(128, 64, warps, 3) for warps in (4, 8, 16)),
    "stages": tuple(Tile(128, 64, 8, stages) for stages in (2, 3, 4)),
}
SWEEPS["all"] = tuple(dict.fromkeys([*SWEEPS["tiles"], *SWEEPS["warps"], *SWEEPS["stages"]]))


def moved(tokens: int, tile: Tile) -> tuple[int, int, int]:
    """(programs, bytes read and written, tiles of keys that are loaded), of causal attention over a text, counted."""
    from workbench.kernels import traffic

    group = HEADS // KV_HEADS
    shape = traffic.Shape(1, tokens, tokens, HEADS, KV_HEADS, HEAD_DIM, element=ELEMENT)
    queries = tile.rows // group
    counted = traffic.tiled(shape, query_tile=queries, key_tile=tile.keys, heads_together=group)
    blocks = -(-tokens // queries)
    loads = sum(-(-min((i + 1) * queries, tokens) // tile.keys) for i in range(blocks))
    return KV_HEADS * blocks, counted.bytes, KV_HEADS * loads


def compiled(tiles: Sequence[Tile], capability: str) -> list[dict[str, Any]]:
    """What the compiler makes of the kernel with each: registers and spilled bytes of a thread, shared bytes of a
    program, the bytes of its widest load, its tensor-core instruction; or {"error": why it does not compile}.

    Raises WorkbenchError where Triton cannot compile at all.
    """
    command = [sys.executable, "-m", __name__, capability, json.dumps(tiles)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    try:
        answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise WorkbenchError(f"compiling {len(tiles)} kernels took longer than {TIMEOUT_S} s; sweep fewer") from None
    if answer.returncode:
        raise WorkbenchError(f"Triton compiles no kernels here: {answer.stderr.strip()[-500:]}")
    return json.loads(answer.stdout.splitlines()[-1])


def _compile(tile: Tile, capability: str) -> dict[str, Any]:
    from workbench.kernels import compiling, flash_attention, tuning

    config = tuning.Config.of(num_warps=tile.warps, num_stages=tile.stages, ROWS=tile.rows, KEYS=tile.keys)

    def call() -> None:
        q, k, v = (
            torch.empty(4096, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        starts = torch.empty(3, dtype=torch.int32, device="cuda")
        look: dict[str, Any] = {"max_queries": 4096, "scale": 0.1, "config": config}
        flash_attention.flash_attention(q, k, v, starts, starts, **look)

    try:
        [one] = compiling.compiled(call, capability)
    except Exception as error:  # whatever the compiler raises: too much shared memory, as a rule
        return {"error": f"{type(error).__name__}: {str(error)[-300:]}"}
    kept = ("registers", "spilled", "shared", "load", "tensor_cores", "warps")
    return {name: getattr(one, name) for name in kept}


def run_tile_sweep(bench: Bench, *, sweep: str, tokens: int, card: str) -> Iterator[Measurement]:
    """A Measurement for each tile: the occupancy (unit "of the warps"), with everything counted beside it. A tile that
    does not fit the card has 0, and why as its check."""
    tiles = SWEEPS[sweep]
    bench.check_stop()
    bench.report(f"{len(tiles)} kernels are compiled for {PROCESSORS[card].card}")
    made = compiled(tiles, PROCESSORS[card].capability)
    for tile, one in zip(tiles, made, strict=True):
        bench.check_stop()
        programs, nbytes, loads = moved(tokens, tile)
        counts: dict[str, float] = {"programs": programs, "bytes": nbytes, "tiles_loaded": loads}
        about = {**tile._asdict(), "tokens": tokens, "card": card}
        if "error" in one:
            yield bench.measurement(
                name=NAME, settings=about, samples=[0.0], unit="of the warps", counts=counts, check=one["error"]
            )
            continue
        held = occupancy(warps=one["warps"], registers=one["registers"], shared=one["shared"], card=card)
        counts |= {name: one[name] for name in ("registers", "spilled", "shared", "load")}
        counts["programs_at_once"] = held.programs
        yield bench.measurement(
            name=NAME,
            settings={**about, "tensor_cores": one["tensor_cores"], "limits": " and ".join(held.limits)},
            samples=[held.share],
            unit="of the warps",
            counts=counts,
            check=f"compiled for compute capability {PROCESSORS[card].capability}, not run"
            + ("" if held.programs else "; a processor fits none of them"),
        )


EXPERIMENT = Experiment(
    name=NAME,
    lab=10,
    question="What do larger tiles and more warps cost in registers and shared memory, and save in bytes?",
    how=(
        "bytes, programs and tiles are counted from the kernel's loop, for a layer of an 8B model (32 query heads over"
        " 8 key-value heads of 128, bfloat16); registers, spilled bytes and shared memory are the compiler's, for the"
        " card; occupancy follows from NVIDIA's limits. Nothing is run, and no time is said."
    ),
    settings=(
        Setting("sweep", "all", "choice", choices=tuple(SWEEPS), help="which tiles, warps and stages"),
        Setting("tokens", 4096, "choice", choices=(512, 1024, 4096, 8192), unit="tokens", help="S, of the text"),
        Setting("card", "h100", "choice", choices=tuple(PROCESSORS), help="it is compiled for"),
    ),
    run=run_tile_sweep,
    predict=no_times,
    record={"cpu": (), "cuda": ()},
)


if __name__ == "__main__":
    print(json.dumps([_compile(Tile(*tile), sys.argv[1]) for tile in json.loads(sys.argv[2])]))
