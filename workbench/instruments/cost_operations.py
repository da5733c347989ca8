"""A step as a list of counted operations, and the sums over it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from workbench.errors import unknown

PARTS = ("projections", "attention", "mlp", "head")
BYTE_PARTS = ("weights", "kv", "activations", "elementwise")


@dataclass(frozen=True)
class OperationCosts:
    """One kind of operation in a step, all of its `count` occurrences together (usually one a layer)."""

    name: str  # "qkv", "attention", "down", …; all of them in cost_layers.ORDER
    part: str  # one of PARTS, or "other"
    count: int
    launches: int = 0
    kernels: int = 0  # of the launches those that are a matrix product or an attention
    heads: int = 0  # of the attentions: key-value heads of all sequences together
    flops: int = 0
    weight_bytes: float = 0
    kv_bytes: float = 0
    activation_bytes: float = 0  # into and out of matrix products and attention
    elementwise_bytes: float = 0
    bytes_written: float = 0
    rows: int = 0  # of a matrix product: rows that each weight is multiplied with
    kv_element_bytes: float = 0  # of a remembered key; of codes those of float32, see `queries`
    loop: str = ""  # of a matrix product: the loop that computes it (`product_rates.LOOPS`); "": torch's product

    @property
    def macs(self) -> int:
        """Multiply-accumulates of a matrix product: each weight once for each of its rows. 0 of all else."""
        return self.flops // 2 if self.rows else 0

    @property
    def queries(self) -> float:
        """Queries that each remembered key meets in an attention, in the mean; 0 where none is remembered. 4 FLOPs a
        pair and value: two for the key, two for the value, which are two values that are kept. Of codes it is as many
        queries as would do the same arithmetic for every four bytes in float32: in that its speed was measured."""
        return self.flops * self.kv_element_bytes / (2 * self.kv_bytes) if self.kv_bytes else 0.0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes + self.elementwise_bytes

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOPs per byte; 0 for an operation that computes no product."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Company:
    """What passes between an operation and the same one of the next step: all weights; of the next layer: its part."""

    weight_bytes: float
    layers: int

    @property
    def layer_bytes(self) -> float:
        return self.weight_bytes / self.layers


@dataclass(frozen=True)
class StepCosts:
    """One forward pass, counted. All counts are exact for the formulas above."""

    operations: tuple[OperationCosts, ...]
    attention_rectangle_flops: int  # in place of "attention", for attention that masks instead of skipping
    rows: int  # N

    def in_one_call(self) -> StepCosts:
        """The same work by compiled code that starts nothing: no launches, and no kernels."""
        return replace(self, operations=tuple(replace(o, launches=0, kernels=0) for o in self.operations))

    def in_calls(self, *, attention: bool) -> StepCosts:
        """The same work where a norm is one call, which adds to the residual stream what came before, and a gate one;
        attention: it as well, with the norms and turns of q and k and the write of the new keys and values."""
        taken_in = ("residual", *(("qk norm", "rotary table", "rotary") if attention else ()))
        a_call = ("norm", "activation")

        def called(o: OperationCosts) -> OperationCosts:
            if o.name in taken_in:
                return replace(o, launches=0)
            if o.name == "attention" and attention:
                return replace(o, launches=o.count, kernels=o.count)
            return replace(o, launches=o.count) if o.name in a_call else o

        return replace(self, operations=tuple(map(called, self.operations)))

    def in_loops(self, layers: str, head: str, max_rows: float = math.inf) -> StepCosts:
        """The same work where loops of C++ compute the matrix products of the layers and of the head that have at most
        max_rows rows. layers, head: of `product_rates.LOOPS`; "" leaves those to torch. The choice of experts, and
        theirs, are left to it too."""
        by_part = {"projections": layers, "mlp": layers, "head": head}

        def loop(o: OperationCosts) -> str:
            of_experts = o.name == "router" or o.name.startswith("expert ")
            return by_part.get(o.part, "") if 0 < o.rows <= max_rows and not of_experts else o.loop

        return replace(self, operations=tuple(replace(o, loop=loop(o)) for o in self.operations))

    @property
    def flops_by_part(self) -> dict[str, int]:
        """ "projections" (q, k, v, o, and to and from latents), "attention", "mlp", "head"."""
        return {part: sum(o.flops for o in self.operations if o.part == part) for part in PARTS}

    @property
    def bytes_by_part(self) -> dict[str, float]:
        """ "weights", "kv", "activations" (of products and attention), "elementwise" (of all else)."""
        return {
            "weights": self._sum("weight_bytes"),
            "kv": self._sum("kv_bytes"),
            "activations": self._sum("activation_bytes"),
            "elementwise": self._sum("elementwise_bytes"),
        }

    @property
    def flops(self) -> int:
        return self._sum("flops")

    @property
    def bytes(self) -> float:
        return self._sum("bytes")

    @property
    def bytes_written(self) -> float:
        return self._sum("bytes_written")

    @property
    def bytes_read(self) -> float:
        return self.bytes - self.bytes_written

    @property
    def launches(self) -> int:
        """Operations that make or change a tensor: one kernel each on a GPU, one call each on a CPU."""
        return self._sum("launches")

    @property
    def company(self) -> Company:
        """What passes besides each of its operations."""
        layers = max((o.count for o in self.operations if o.rows), default=1)
        return Company(self._sum("weight_bytes"), layers)

    @property
    def rectangle_flops(self) -> int:
        """FLOPs in all when attention computes the whole rectangle, as `eager` does."""
        return self.flops - self.flops_by_part["attention"] + self.attention_rectangle_flops

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOPs per byte."""
        return self.flops / self.bytes

    def operation(self, name: str) -> OperationCosts:
        """The operation of that name. Raises WorkbenchError naming the nearest."""
        for one in self.operations:
            if one.name == name:
                return one
        raise unknown("operation of this step", name, [o.name for o in self.operations])

    def counts(self) -> dict[str, float]:
        """As a Measurement's counts."""
        return {
            "flops": self.flops,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "launches": self.launches,
            "rows": self.rows,
        }

    def _sum(self, field: str):
        return sum(getattr(o, field) for o in self.operations)


def with_rectangle(costs: StepCosts) -> StepCosts:
    """The same step with attention that computes the masked half as well, as `eager` does."""
    whole = costs.attention_rectangle_flops
    operations = (replace(o, flops=whole) if o.name == "attention" else o for o in costs.operations)
    return replace(costs, operations=tuple(operations))


def times(o: OperationCosts, occurrences: int) -> OperationCosts:
    """The operation with its count and all amounts multiplied."""
    return replace(o, **{name: occurrences * getattr(o, name) for name in _AMOUNTS})


def together(operations: Iterable[OperationCosts]) -> OperationCosts:
    """Operations with the same name merged into one: all amounts added."""
    first, *others = operations
    assert all((o.name, o.part) == (first.name, first.part) for o in others)
    return replace(first, **{name: sum(getattr(o, name) for o in (first, *others)) for name in _AMOUNTS})


_EACH = ("name", "part", "rows", "kv_element_bytes", "loop")  # the same for every occurrence
_AMOUNTS = tuple(f.name for f in fields(OperationCosts) if f.name not in _EACH)
