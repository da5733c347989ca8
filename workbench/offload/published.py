"""FlexGen's table, what its authors ran for it, and what the cost model says of it.

OPT, 512 + 32 tokens, one T4 (16 GB) with 208 GB of memory and an SSD of 1.5 TB; tokens per second of generation.
"""

from __future__ import annotations

from typing import NamedTuple

from workbench.offload.cost_model import Decoding, Shares

WORK = Decoding(prompt_tokens=512, new_tokens=32)
T4_READ = 320e9  # bytes/s of the card's memory by its data sheet; what products reach is less
ALL_ON_DEVICE, IN_HOST, ON_DISK = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)


class Line(NamedTuple):
    """A line of the table: placement (benchmark/flexgen/bench_suite.py of their repository) and throughput (arXiv
    2303.06865, table 2)."""

    shares: Shares
    batch: int
    batches: int
    tokens_per_s: float


PUBLISHED = {
    "opt-6.7b": Line(Shares(ALL_ON_DEVICE, ALL_ON_DEVICE), 2, 1, 25.26),
    "opt-30b": Line(Shares((0.2, 0.8, 0.0), IN_HOST, IN_HOST), 48, 3, 7.32),
    "opt-175b": Line(Shares((0.0, 0.5, 0.5), ON_DISK, IN_HOST), 32, 8, 0.69),
}
