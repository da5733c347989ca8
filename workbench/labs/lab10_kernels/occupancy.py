"""Occupancy: how many programs of a kernel a processor of an NVIDIA card holds at once, and what limits it.

A processor (SM) has room for a number of warps of 32 threads, for a number of programs (thread blocks), and has
registers and shared memory. A program is started only where all of it fits, and stays until it ends. Occupancy is the
share of the warps' places that are taken. While one warp waits for memory another one computes, so that a low
occupancy hides less waiting; what a warp has under way itself hides the rest.

The limits are those of NVIDIA's tuning guides, section "Occupancy":
https://docs.nvidia.com/cuda/ampere-tuning-guide/ and https://docs.nvidia.com/cuda/hopper-tuning-guide/ (64 warps, 32
programs, 65,536 registers, 255 a thread; 164 and 228 KB of shared memory, of which each program takes 1 KB more than it
asks for). How they are dealt out is that of CUDA's cuda_occupancy.h: registers to warps in units of 256, from one of
four equal parts of the file; shared memory in units of 128 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.errors import WorkbenchError, is_whole, unknown

WARP = 32  # threads
PARTS = 4  # of a processor, each with its share of warps and registers
REGISTER_UNIT = 256  # registers of a warp are a multiple
SHARED_UNIT = 128  # bytes of a program are a multiple
RESERVED = 1024  # bytes of shared memory that CUDA takes for each program
LARGEST_PROGRAM = 32  # warps: 1,024 threads
MAX_REGISTERS = 255  # of a thread


@dataclass(frozen=True)
class Processor:
    """What one processor (SM) of a card has."""

    card: str
    capability: str
    processors: int  # of the card
    shared: int  # bytes of shared memory
    warps: int = 64
    programs: int = 32
    registers: int = 65_536


PROCESSORS = {"a100": Processor("A100", "8.0", 108, 164 << 10), "h100": Processor("H100, H200", "9.0", 132, 228 << 10)}


@dataclass(frozen=True)
class Occupancy:
    """programs: at once on a processor; 0: it does not fit. allowed: how many each limit alone would let in."""

    programs: int
    warps: int  # at once on a processor
    share: float  # of the warps that there is room for
    allowed: dict[str, int]

    @property
    def limits(self) -> tuple[str, ...]:
        """What limits it, by name; several where they are equally tight."""
        return tuple(name for name, programs in self.allowed.items() if programs == self.programs)


def occupancy(*, warps: int, registers: int, shared: int, card: str = "h100") -> Occupancy:
    """Of a kernel with so many warps a program, registers a thread and bytes of shared memory a program.

    Raises WorkbenchError for an unknown card and for what no card starts: more than 32 warps a program, more than 255
    registers a thread, negative numbers.
    """
    if card not in PROCESSORS:
        raise unknown("card", card, PROCESSORS)
    for name, value, low, high in (
        ("warps", warps, 1, LARGEST_PROGRAM),
        ("registers", registers, 1, MAX_REGISTERS),
        ("shared", shared, 0, 1 << 30),
    ):
        if not is_whole(value) or not low <= value <= high:
            raise WorkbenchError(f"{name} must be a whole number from {low} to {high:,}, got {value!r}")
    has = PROCESSORS[card]
    of_warp = _up(registers * WARP, REGISTER_UNIT)
    allowed = {
        "warps": has.warps // warps,
        "programs": has.programs,
        "registers": has.registers // PARTS // of_warp * PARTS // warps,
        "shared memory": has.shared // _up(shared + RESERVED, SHARED_UNIT),
    }
    programs = min(allowed.values())
    return Occupancy(programs, programs * warps, programs * warps / has.warps, allowed)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
