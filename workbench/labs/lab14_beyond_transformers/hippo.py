"""beyond.hippo: how well N numbers remember a signal, as HiPPO-LegS's state, beside the best N numbers of that kind.

The state after the whole signal is read back as a polynomial of the past (Gu et al., arXiv 2008.07669). No polynomial
of N coefficients can be nearer than the least-squares one, which is the bound; and N numbers may also be the last N
samples. Every signal has mean 0 and root mean square 1, so an error of 1 is that of remembering nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from workbench.errors import unknown
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.models.corpus import held_out_files
from workbench.models.mixers.hippo import reconstructed, remembered

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

NAME = "beyond.hippo"
SIZES = (4, 8, 16, 32, 64, 128)  # N, numbers that are kept
SIGNALS = ("chirp", "steps", "sines", "code")
METHODS = ("state", "last samples")
LEVELS = (0.2, 0.9, -0.5, 0.1, 0.7, -0.9, 0.4, -0.2)  # of the steps, an eighth of the signal each
UNIT = "of the signal's rms"


@functools.lru_cache(maxsize=16)
def signal_of(name: str, samples: int) -> torch.Tensor:
    """[T] float64 with mean 0 and root mean square 1. chirp: 2 turns at first, faster and faster, 12 in all; sines:
    three waves; steps: eight levels; code: bytes of Python source held out from training, one after the other.

    Raises WorkbenchError for a name that is none of SIGNALS.
    """
    if name not in SIGNALS:
        raise unknown("signal", name, SIGNALS)
    at = points_of(samples)
    match name:
        case "chirp":
            values = torch.sin(2 * math.pi * (2 * at + 10 * at**2))
        case "steps":
            values = torch.tensor(LEVELS, dtype=torch.float64)[(at * len(LEVELS)).long()]
        case "sines":
            values = torch.stack([torch.sin(2 * math.pi * turns * at + turns) / turns for turns in (1, 3, 7)]).sum(0)
        case _:
            text = next(file.text for file in held_out_files() if file.path == "textwrap.py").encode()
            values = torch.tensor(list((text * (samples // len(text) + 1))[:samples]), dtype=torch.float64)
    values = values - values.mean()
    return values / values.square().mean().sqrt()


def points_of(samples: int) -> torch.Tensor:
    """[T] the middle of each sample, as a share of the whole."""
    return (torch.arange(samples, dtype=torch.float64) + 0.5) / samples


def error_of(guess: torch.Tensor, signal: torch.Tensor) -> float:
    """Root mean square of the difference, of a signal whose own is 1."""
    return (guess - signal).square().mean().sqrt().item()


@functools.lru_cache(maxsize=64)
def from_state(name: str, samples: int, size: int) -> torch.Tensor:
    """[T] what HiPPO-LegS's state of N numbers says of the past, when all of the signal has been read."""
    return reconstructed(remembered(signal_of(name, samples), size)[-1], points_of(samples))


def from_last_samples(name: str, samples: int, size: int) -> torch.Tensor:
    """[T] the last N samples as they were, and of older ones the mean, 0."""
    kept = signal_of(name, samples).clone()
    kept[: max(0, samples - size)] = 0
    return kept


@functools.lru_cache(maxsize=64)
def projected(name: str, samples: int, size: int) -> torch.Tensor:
    """[T] the polynomial of N coefficients that is nearest to the signal (least squares)."""
    signal, basis = signal_of(name, samples), _basis(samples, max(size, max(SIZES)))[:, :size]
    return basis @ (basis.T @ signal)


@functools.lru_cache(maxsize=4)
def _basis(samples: int, size: int) -> torch.Tensor:
    """[T, N] orthonormal; its first n columns span the polynomials of n coefficients, for every n."""
    at, unit = points_of(samples), torch.eye(size, dtype=torch.float64)
    legendre = torch.stack([reconstructed(row, at) for row in unit], dim=1)
    return torch.linalg.qr(legendre).Q


def bound(name: str, samples: int, size: int) -> float:
    """The error of `projected`: no state that is read as a polynomial of N coefficients has less."""
    return error_of(projected(name, samples, size), signal_of(name, samples))


def run_hippo(bench: Bench, *, signal: str, samples: int, size: int) -> Iterator[Measurement]:
    """For every N two Measurements: the error of the state, beside that of the best polynomial, and the error of the
    last N samples, beside √(share of the signal that is older). `size` only chooses what the picture shows."""
    values = signal_of(signal, samples)
    for count in SIZES:
        bench.check_stop()
        bench.report(f"{count} of {SIZES[-1]} numbers")
        guesses = {
            "state": (from_state(signal, samples, count), bound(signal, samples, count)),
            "last samples": (from_last_samples(signal, samples, count), forgotten(signal, samples, count)),
        }
        for method, (guess, expected) in guesses.items():
            yield bench.measurement(
                name=NAME,
                settings={"signal": signal, "samples": samples, "measured": method, "numbers": count},
                samples=[error_of(guess, values)],
                unit=UNIT,
                counts={"numbers": count, "samples": samples},
                predicted=expected,
                check="the bound is the least-squares polynomial of as many coefficients"
                if method == "state"
                else "the last samples are kept exactly",
            )


def forgotten(name: str, samples: int, size: int) -> float:
    """Root of the older samples' share of the signal's energy: the error of keeping the last N alone."""
    energy = signal_of(name, samples).square()
    return math.sqrt((energy[: max(0, samples - size)].sum() / energy.sum()).item())


EXPERIMENT = Experiment(
    name=NAME,
    lab=14,
    question="How much of a long past do N numbers remember?",
    how=(
        "the signal goes through HiPPO-LegS's recurrence in float64, sample by sample; its last state is read back as a"
        " polynomial and compared with the signal"
    ),
    settings=(
        Setting("signal", "chirp", "choice", choices=SIGNALS, help="code: bytes of Python source, one after the other"),
        Setting(
            "samples", 1024, "choice", choices=(256, 512, 1024, 2048), unit="samples", brief=256, help="of the signal"
        ),
        Setting("size", 32, "choice", choices=SIZES, unit="numbers", help="N, that the picture of the signal shows"),
    ),
    run=run_hippo,
    predict=no_times,
    record={"cpu": (), "cuda": ()},  # the same everywhere
)
