"""Machines by data sheet: cards, how many, and what joins them. None of them need be here.

A data sheet's peak is not reached by any program, so each rate is taken times a share that published programs reach:

    bandwidth   0.7    a whole decode step of gpt-fast: 1,397 of 2,039 GB/s (A100, Llama 2 7B, its README)
    compute     0.7    large bf16 products on an H100: 69 % of the peak (torchao, `roofline_utils`)
    memory      0.9    of a card, for weights and blocks; the rest is for what a step computes (vLLM's default)

All-reduces and sends take a base time for a call, a time for each hop, and bytes / bandwidth, by the α–β model of
`parallel.alpha_beta`. Base and hop are those of NCCL's own tuning table (`src/graph/tuning.cc`: ring, protocol LL).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from workbench.errors import WorkbenchError, check_above, check_between, check_whole, unknown
from workbench.instruments.device import CARD_MEMORY_BYTES, PUBLISHED, Ceilings
from workbench.parallel.alpha_beta import AlphaBeta
from workbench.parallel.collectives import Count

BANDWIDTH_SHARE, COMPUTE_SHARE, MEMORY_SHARE = 0.7, 0.7, 0.9
MAX_DEVICES = 4096
ALIASES = {"a100": "a100-80gb", "h100": "h100-sxm"}


@dataclass(frozen=True)
class Link:
    """Between the devices of a machine. bytes_per_s: of one device, one way. call_s: of a collective at all; hop_s: of
    each message in it."""

    name: str
    bytes_per_s: float
    call_s: float
    hop_s: float

    def __post_init__(self) -> None:
        check_above("bytes_per_s", self.bytes_per_s, 0)
        check_between("call_s", self.call_s, 0, 1)
        check_between("hop_s", self.hop_s, 0, 1)

    def seconds(self, counts: Mapping[str, Count], size: int) -> float:
        """Of all counted calls over `size` devices, one after the other."""
        calls = sum(count.calls for operation, count in counts.items() if operation not in ("tell", "hear", "receive"))
        line = AlphaBeta(self.hop_s, 1 / self.bytes_per_s)
        return (calls * self.call_s if size > 1 else 0.0) + line.predict_counts(counts, size)


CALL_S = 6.6e-6
# one way: NVIDIA's data sheets name the sum of both (600 and 900 GB/s; 64 and 128 GB/s of PCIe)
NVLINK_BYTES_PER_S = {"a100-80gb": 300e9, "h100-sxm": 450e9, "h200": 450e9}
PCIE_BYTES_PER_S = {"a100-80gb": 32e9, "h100-sxm": 64e9, "h200": 64e9}
HOPS_S = {"nvlink": 0.6e-6, "pcie": 1.0e-6}
LINKS = tuple(HOPS_S)


def link_of(card: str, name: str) -> Link:
    """How cards of this kind are joined: "nvlink" or "pcie"."""
    if name not in LINKS:
        raise unknown("link", name, LINKS)
    rates = NVLINK_BYTES_PER_S if name == "nvlink" else PCIE_BYTES_PER_S
    return Link(name, rates[card], CALL_S, HOPS_S[name])


@dataclass(frozen=True)
class Machine:
    """So many equal devices. ceilings: of one, the shares of its peak already taken; memory_bytes: that weights and
    blocks may take on one."""

    name: str
    ceilings: Ceilings
    memory_bytes: float
    devices: int
    link: Link

    def __post_init__(self) -> None:
        if check_whole("devices", self.devices, 1) > MAX_DEVICES:
            raise WorkbenchError(f"at most {MAX_DEVICES:,} devices, got {self.devices:,}; choose for a part of them")
        check_above("memory_bytes", self.memory_bytes, 0)

    def with_bandwidth(self, factor: float) -> Machine:
        """The same with another memory bandwidth."""
        check_above("factor", factor, 0)
        read, copy = factor * self.ceilings.read_bytes_per_s, factor * self.ceilings.copy_bytes_per_s
        return replace(self, ceilings=replace(self.ceilings, read_bytes_per_s=read, copy_bytes_per_s=copy))

    def with_compute(self, factor: float) -> Machine:
        """The same with other FLOP rates."""
        check_above("factor", factor, 0)
        rates = {dtype: factor * rate for dtype, rate in self.ceilings.flop_per_s.items()}
        return replace(self, ceilings=replace(self.ceilings, flop_per_s=rates))


def machine(
    card: str,
    devices: int = 1,
    link: str = "nvlink",
    *,
    bandwidth_share: float = BANDWIDTH_SHARE,
    compute_share: float = COMPUTE_SHARE,
    memory_share: float = MEMORY_SHARE,
) -> Machine:
    """A machine of published cards: "a100-80gb" ("a100"), "h100-sxm" ("h100"), "h200".

    Shares: of the data sheet's peak, above 0 and at most 1. Raises WorkbenchError for a card or a link that is not
    known here, and for numbers that make no sense.
    """
    name = ALIASES.get(card.strip().lower(), card.strip().lower()) if isinstance(card, str) else card
    if not isinstance(name, str) or name not in PUBLISHED:
        raise unknown("machine", card, [*PUBLISHED, *ALIASES])
    shares = {"bandwidth_share": bandwidth_share, "compute_share": compute_share, "memory_share": memory_share}
    for what, share in shares.items():
        if not check_between(what, share, 0, 1):
            raise WorkbenchError(f"{what} must be above 0: a machine of which nothing can be used serves nobody")
    sheet = Machine(name, PUBLISHED[name], memory_share * CARD_MEMORY_BYTES[name], devices, link_of(name, link))
    return sheet.with_bandwidth(bandwidth_share).with_compute(compute_share)
