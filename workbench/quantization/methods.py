"""What a method of quantization is, and the list of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from workbench.errors import WorkbenchError, check_settings, is_whole, unknown
from workbench.quantization.calibration import Inputs
from workbench.quantization.folding import LayerParts
from workbench.quantization.stored import StoredWeight

HEAD_GROUP = 32  # inputs of the head that share a scale


class Method(ABC):
    """A quantization method with its settings. Made for one recipe; holds no state between layers."""

    needs_inputs: bool = False  # whether it needs calibration
    needs_gradients: bool = False  # beside: whether `Inputs.squared_gradients` are wanted when it stores
    scales_layers: bool = False  # whether it has a `prepare_layer`

    def prepare_layer(self, layer: LayerParts, inputs: dict[str, Inputs]) -> dict[str, torch.Tensor]:
        """Before the linears of a layer are quantized: scale what may be scaled, in the layer itself.

        Returns divisors [in] of the inputs of linears (by name) that could not be folded into what comes before.
        """
        return {}

    @abstractmethod
    def store(self, weight: torch.Tensor, inputs: Inputs | None) -> StoredWeight:
        """weight [out, in] float32, after `prepare_layer`; inputs: its inputs after `prepare_layer`."""


@dataclass(frozen=True)
class QuantizationRecipe:
    """A method and its settings, as plain data: what is saved beside the weights.

    bits, group: of methods with groups; None: the method's own. options: settings of the method alone.
    skip: linears left as they are, by the end of their name. head_bits: of the output head, whose weights are rounded
    to the nearest code (RTN, symmetric) in groups of HEAD_GROUP inputs, whatever the method; None: it stays as it is.
    What latent attention folds into its queries is never quantized. Raises WorkbenchError for an unknown method or
    option (naming the nearest), and for numbers that make no sense.
    """

    method: str
    bits: int | None = None
    group: int | None = None
    options: dict[str, int | float | bool | str | None] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    head_bits: int | None = None

    def __post_init__(self) -> None:
        if self.head_bits is not None and (not is_whole(self.head_bits) or not 2 <= self.head_bits <= 8):
            raise WorkbenchError(f"head_bits must be a whole number from 2 to 8, or None, got {self.head_bits!r:.80}")
        self.make()

    def make(self) -> Method:
        """The method with these settings."""
        if not isinstance(self.method, str) or self.method not in METHODS:
            raise unknown("method of quantization", self.method, METHODS)
        made = METHODS[self.method]
        if not isinstance(self.options, dict):
            raise WorkbenchError(f"options of a recipe must be a dict, got {self.options!r:.80}")
        if not isinstance(self.skip, tuple) or not all(isinstance(name, str) and name for name in self.skip):
            raise WorkbenchError(f"skip must be a tuple of names of linears, got {self.skip!r:.80}")
        for name in self.options:
            takers = [one for one, registered in METHODS.items() if name in registered.options]
            if takers and name not in made.options:
                raise WorkbenchError(
                    f"method {self.method} has no {name}, which is an option of {', '.join(takers)}; leave it out"
                )
        check_settings(f"method {self.method}", self.options, made.options)
        given = {name: value for name, value in (("bits", self.bits), ("group", self.group)) if value is not None}
        unused = [name for name in given if name not in made.numbers]
        if unused:
            takers = [name for name, one in METHODS.items() if set(unused) <= set(one.numbers)]
            raise WorkbenchError(
                f"method {self.method!r} has no {' and no '.join(unused)}: {made.summary}; leave it out, or use one of "
                f"{', '.join(takers)}"
            )
        for name, value in given.items():
            if not is_whole(value) or value < 1:
                raise WorkbenchError(f"{name} must be a whole number of at least 1, got {value!r}")
        return made.make(**given, **self.options)

    def to_dict(self) -> dict:
        return {
            "method": self.method,
            "bits": self.bits,
            "group": self.group,
            "options": dict(self.options),
            "skip": list(self.skip),
        } | ({} if self.head_bits is None else {"head_bits": self.head_bits})

    @classmethod
    def from_dict(cls, values: dict) -> QuantizationRecipe:
        if not isinstance(values, dict):
            raise WorkbenchError(f"a recipe must be a dict, got {type(values).__name__}")
        check_settings("a recipe", values, ("method", "bits", "group", "options", "skip", "head_bits"))
        if not isinstance(values.get("method"), str):
            raise WorkbenchError(f"a recipe names its method, got {values.get('method')!r}")
        options, skip = values.get("options") or {}, values.get("skip") or ()
        if not isinstance(options, dict) or not isinstance(skip, list | tuple):
            raise WorkbenchError("a recipe's options are a dict and its skip is a list of names")
        numbers = values.get("bits"), values.get("group")
        return cls(values["method"], *numbers, options, tuple(skip), values.get("head_bits"))


@dataclass(frozen=True)
class Registered:
    """A method in the list: how to make it, and what it takes."""

    make: Callable[..., Method]
    summary: str
    numbers: tuple[str, ...]  # of "bits", "group"
    options: tuple[str, ...]


METHODS: dict[str, Registered] = {}


def method(name: str, summary: str, *, numbers: tuple[str, ...] = (), options: tuple[str, ...] = ()):
    """Decorator: puts a class (or function that makes one) into the list."""

    def put(make: Callable[..., Method]) -> Callable[..., Method]:
        METHODS[name] = Registered(make, summary, numbers, options)
        return make

    return put
