"""What is chosen among: how the weights and the cache are stored, how a model lies on devices, how requests are served.

engine     tensor · pipeline devices                           one scheduler, one pool of blocks
group      an engine, or P that prefill for D that decode      serves requests by itself
replicas   as many equal groups as the devices make            each gets an equal share of the requests

serving            a step                                                           baseline of
"chunked"          next tokens first, then prompts in chunks, up to the budget      Sarathi-Serve
"prefill first"    whole prompts, or next tokens; nobody's token beside a prompt    vLLM in 2023
"1P1D", "2P1D" …   whole prompts on P engines, next tokens on D                     DistServe
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from workbench.errors import WorkbenchError, check_whole, unknown
from workbench.kv.paged_store import SCALE_DTYPE, Codes
from workbench.models.config import ModelConfig
from workbench.quantization.formats import FORMATS, IntegerFormat
from workbench.quantization.prepared import GROUPS
from workbench.serving.settings import SchedulerSettings

WEIGHTS = ("bf16", "int8", "int4")
KV = ("bf16", "int8")
CHUNKED, PREFILL_FIRST = "chunked", "prefill first"
WHOLE_PROMPTS = 4096  # rows of a step of whole prompts
NODE = 8  # devices that the link joins
WIDE = 2  # bytes of an element in bf16


def weight_bytes_per_element(weights: str) -> float:
    """Of the layers' matrices, a scale and a zero for each 128 inputs included; all else is bf16."""
    if weights not in WEIGHTS:
        raise unknown("weights", weights, WEIGHTS)
    if weights == "bf16":
        return WIDE
    format = FORMATS[weights]
    assert isinstance(format, IntegerFormat)
    return format.bits / 8 + (1 + format.has_zero) * SCALE_DTYPE.itemsize / GROUPS[0]


def kv_bytes_per_element(kv: str, config: ModelConfig) -> float:
    """As blocks hold it, a scale and a zero for each token and head included (`kv.paged_store.Codes`)."""
    if kv not in KV:
        raise unknown("kv", kv, KV)
    if kv == "bf16":
        return WIDE
    if config.latent_attention is not None:
        raise WorkbenchError("latents are kept in 16 bits here; choose kv 'bf16' for a shape with latent attention")
    return Codes.bytes_per_token(config, torch.bfloat16, kv) / config.expanded_kv_values_per_token()


@dataclass(frozen=True)
class Plan:
    """A configuration. prefill, decode: engines of a group; 0 and 1: one engine does both."""

    weights: str = "bf16"
    kv: str = "bf16"
    tensor: int = 1
    pipeline: int = 1
    serving: str = CHUNKED
    max_running: int = 128
    token_budget: int = 512
    prefill: int = 0
    decode: int = 1
    replicas: int = 1

    @property
    def engine_devices(self) -> int:
        return self.tensor * self.pipeline

    @property
    def group_devices(self) -> int:
        return (self.prefill + self.decode) * self.engine_devices

    @property
    def devices(self) -> int:
        return self.replicas * self.group_devices

    @property
    def lossless(self) -> bool:
        """Nothing is rounded to few bits."""
        return self.weights == self.kv == "bf16"

    @property
    def arrangement(self) -> tuple[str, str, int, int, str]:
        """All but `max_running` and the token budget."""
        return self.weights, self.kv, self.tensor, self.pipeline, self.serving

    def scheduling(self, *, remember: bool) -> SchedulerSettings:
        """Of each engine. remember: blocks are kept for equal beginnings."""
        batching = "prefill_first" if self.serving == PREFILL_FIRST else "continuous"
        return SchedulerSettings(self.max_running, self.token_budget, batching=batching, remember=remember)

    def __str__(self) -> str:
        ways = (("tensor", self.tensor), ("pipeline", self.pipeline))
        engine = " × ".join(f"{size} devices by {way}" for way, size in ways if size > 1) or "1 device"
        many = f"{self.replicas} × " if self.replicas > 1 else ""
        each = " an engine" if self.prefill else ""
        budget = f", budget {self.token_budget}" if self.serving == CHUNKED else ""
        return (
            f"{many}{self.serving} on {engine}{each}, weights {self.weights}, kv {self.kv}, {self.max_running} running"
            f"{budget}"
        )


@dataclass(frozen=True)
class Space:
    """The values that each switch may take. ratios: of engines that prefill to engines that decode."""

    weights: tuple[str, ...] = WEIGHTS
    kv: tuple[str, ...] = KV
    tensor: tuple[int, ...] = (1, 2, 4, 8)
    pipeline: tuple[int, ...] = (1, 2, 4)
    serving: tuple[str, ...] = (CHUNKED, PREFILL_FIRST)
    ratios: tuple[tuple[int, int], ...] = ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3))
    max_running: tuple[int, ...] = (32, 128, 512)
    token_budgets: tuple[int, ...] = (128, 512, 2048)

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.name != "ratios" and not getattr(self, one.name) and not (one.name == "serving" and self.ratios):
                raise WorkbenchError(f"{one.name} names nothing to choose from; give at least one value")
        for name, known in (("weights", WEIGHTS), ("kv", KV), ("serving", (CHUNKED, PREFILL_FIRST))):
            for value in getattr(self, name):
                if value not in known:
                    raise unknown(name, value, known)
        for name in ("tensor", "pipeline", "max_running", "token_budgets"):
            for value in getattr(self, name):
                check_whole(name, value, 1)
        for prefill, decode in self.ratios:
            check_whole("engines that prefill", prefill, 1)
            check_whole("engines that decode", decode, 1)

    def engines(self, devices: int) -> list[tuple[int, int]]:
        """(tensor, pipeline) of the engines that so many devices, and one link, have room for."""
        room = min(devices, NODE)
        return [(t, p) for p, t in itertools.product(self.pipeline, self.tensor) if t * p <= room]

    def plans(self, tensor: int, pipeline: int, weights: str, kv: str, devices: int) -> Iterator[Plan]:
        """All plans with engines of this kind, as many replicas as there is room for."""
        for serving, prefill, decode, running, budget in self._switches():
            plan = Plan(weights, kv, tensor, pipeline, serving, running, budget, prefill, decode)
            if plan.group_devices <= min(devices, NODE):
                replicas = devices // plan.group_devices
                yield Plan(weights, kv, tensor, pipeline, serving, running, budget, prefill, decode, replicas)

    def _switches(self) -> Iterator[tuple[str, int, int, int, int]]:
        for running in self.max_running:
            for serving in self.serving:
                budgets: Sequence[int] = self.token_budgets if serving == CHUNKED else (WHOLE_PROMPTS,)
                yield from ((serving, 0, 1, running, budget) for budget in budgets if budget >= running)
            if running <= WHOLE_PROMPTS:
                yield from ((f"{p}P{d}D", p, d, running, WHOLE_PROMPTS) for p, d in self.ratios)
