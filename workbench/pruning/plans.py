"""What of a model stays, as data: layers, channels of the residual stream, neurons, groups of heads.

A plan names what is kept, in ascending order. It is made from scores (`importance`), for counts, for shares or for a
number of parameters, and it is checked against the shape it is for before anything is cut.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workbench.errors import WorkbenchError, check_between, unknown
from workbench.models.config import ModelConfig
from workbench.pruning.importance import Importance

PARTS = ("layers", "channels", "neurons", "kv_groups")
KINDS = ("width", "depth", "both")
MULTIPLE = 8  # of neurons that `plan_by_parameters` keeps, and of channels: products run best on such sizes


@dataclass(frozen=True)
class Plan:
    """Indices that stay, each tuple ascending.

    layers: of the model. channels: of the residual stream, the same ones in every layer, in the embedding and in the
    head. neurons and kv_groups: of each kept layer, as many in each. A group is a key-value head with the query heads
    that read it; it stays or goes as a whole.
    """

    layers: tuple[int, ...]
    channels: tuple[int, ...]
    neurons: tuple[tuple[int, ...], ...]
    kv_groups: tuple[tuple[int, ...], ...]

    @classmethod
    def whole(cls, config: ModelConfig) -> Plan:
        """Everything stays."""
        every = tuple(range(config.num_layers))
        return cls(
            every,
            tuple(range(config.hidden_size)),
            tuple(tuple(range(config.intermediate_size)) for _ in every),
            tuple(tuple(range(config.num_kv_heads)) for _ in every),
        )

    def check(self, config: ModelConfig) -> None:
        """Raise WorkbenchError for what cannot be cut out of this shape, or would leave nothing."""
        _check_indices("layers", self.layers, config.num_layers)
        _check_indices("channels", self.channels, config.hidden_size)
        for part, kept, of in (
            ("neurons", self.neurons, config.intermediate_size),
            ("kv_groups", self.kv_groups, config.num_kv_heads),
        ):
            if len(kept) != len(self.layers):
                raise WorkbenchError(
                    f"{part} must be given for each of the {len(self.layers)} kept layers, got {len(kept)}"
                )
            for layer, indices in zip(self.layers, kept):
                if of:
                    _check_indices(f"{part} of layer {layer}", indices, of)
            if len({len(indices) for indices in kept}) > 1:
                raise WorkbenchError(
                    f"{part}: all layers of a model have as many, and this plan keeps {sorted(map(len, kept))}; keep"
                    " equally many in each"
                )
        self._check_sources(config)
        self._check_kind(config)

    def _check_sources(self, config: ModelConfig) -> None:
        """Layers that attend over the keys of another one."""
        for layer, groups in zip(self.layers, self.kv_groups):
            source = config.kv_source(layer)
            if source not in self.layers:
                raise WorkbenchError(
                    f"layer {layer} attends over the keys of layer {source}, which this plan drops; keep layer"
                    f" {source}, or drop layer {layer} as well"
                )
            if groups != self.kv_groups[self.layers.index(source)]:
                raise WorkbenchError(
                    f"layers {layer} and {source} share their keys and must keep the same kv_groups, got {groups} and"
                    f" {self.kv_groups[self.layers.index(source)]}"
                )

    def _check_kind(self, config: ModelConfig) -> None:
        """Families in which a part cannot be cut."""
        narrower = len(self.channels) < config.hidden_size
        fewer = any(len(groups) < config.num_kv_heads for groups in self.kv_groups)
        if config.is_gpt2 and (narrower or fewer):
            raise WorkbenchError(
                "a head of GPT-2 has hidden_size / num_heads values, and its norms subtract the mean of all channels;"
                " channels and heads cannot be cut here. Cut layers or neurons"
            )
        heads = config.num_heads // config.num_kv_heads * len(self.kv_groups[0])
        if (narrower or fewer) and config.family == "llama" and len(self.channels) % heads:
            raise WorkbenchError(
                f"transformers reads a Llama whose hidden_size is a multiple of its {heads} heads, and this plan keeps"
                f" {len(self.channels)} channels. Keep {max(1, len(self.channels) // heads) * heads}"
            )
        if narrower and config.embedding_scale != 1:
            raise WorkbenchError(
                f"embeddings of {config.family} are multiplied with √hidden_size, which would change with the channels;"
                " cut layers, neurons or kv_groups"
            )
        if config.state_layers and (narrower or fewer):
            raise WorkbenchError(
                "layers that keep a state are cut as a whole, or in their neurons; this plan cuts channels or kv_groups"
            )
        if config.experts is not None:
            raise WorkbenchError("a mixture of experts cannot be pruned here; take a dense model")

    def config_of(self, config: ModelConfig) -> ModelConfig:
        """The smaller shape. Raises WorkbenchError as `check` does."""
        self.check(config)
        place = {layer: new for new, layer in enumerate(self.layers)}
        groups, old_groups = len(self.kv_groups[0]), config.num_kv_heads
        changes: dict[str, Any] = {
            "num_layers": len(self.layers),
            "hidden_size": len(self.channels),
            "intermediate_size": len(self.neurons[0]),
            "num_kv_heads": groups,
            "num_heads": config.num_heads // old_groups * groups,
            "global_layers": tuple(place[layer] for layer in config.global_layers if layer in place),
        }
        if config.kv_sources is not None:
            changes["kv_sources"] = tuple(place[config.kv_sources[layer]] for layer in self.layers)
        if config.mixers:
            changes["mixers"] = tuple(config.mixers[layer] for layer in self.layers)
            if not any(config.mixer_of(layer) != "attention" for layer in self.layers):
                changes["state_shape"] = None
        return dataclasses.replace(config, **changes)

    def as_dict(self) -> dict[str, Any]:
        """What `from_dict` reads."""
        return {part: _lists(getattr(self, part)) for part in PARTS}

    @classmethod
    def from_dict(cls, data: object, config: ModelConfig) -> Plan:
        """Of JSON that anyone may have written. Raises WorkbenchError for unknown parts, for what are no indices, and
        as `check` does."""
        if not isinstance(data, Mapping):
            raise WorkbenchError(f"a plan is an object with {', '.join(PARTS)}; got {type(data).__name__}")
        for part in data:
            if part not in PARTS:
                raise unknown("part of a model", part, PARTS)
        if lacks := [part for part in PARTS if part not in data]:
            raise WorkbenchError(f"this plan does not say which {', '.join(lacks)} stay")
        flat = {part: _indices(part, data[part]) for part in PARTS[:2]}
        rows = {}
        for part in PARTS[2:]:
            if not isinstance(data[part], Sequence) or isinstance(data[part], str):
                raise WorkbenchError(f"{part} must be a list with one list for each kept layer; got {data[part]!r:.60}")
            rows[part] = tuple(_indices(part, row) for row in data[part])
        plan = cls(flat["layers"], flat["channels"], rows["neurons"], rows["kv_groups"])
        plan.check(config)
        return plan


def _lists(value: Any) -> Any:
    return [_lists(one) for one in value] if isinstance(value, tuple) else value


def _indices(part: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or any(type(i) is not int for i in value):
        raise WorkbenchError(f"{part} must be a list of whole numbers; got {value!r:.60}")
    return tuple(value)


def _check_indices(part: str, kept: tuple[int, ...], count: int) -> None:
    if not kept:
        raise WorkbenchError(f"{part}: this plan keeps none of {count}; at least one must stay")
    if any(type(i) is not int or not 0 <= i < count for i in kept):
        wrong = next(i for i in kept if type(i) is not int or not 0 <= i < count)
        raise WorkbenchError(f"{part} must be whole numbers from 0 to {count - 1}, got {wrong!r}")
    if any(a >= b for a, b in itertools.pairwise(kept)):
        raise WorkbenchError(f"{part} must be different and ascending, got {kept!s:.60}")


# -- from scores ---------------------------------------------------------------------------------------------------


def plan_by_counts(
    scores: Importance,
    config: ModelConfig,
    *,
    layers: int | None = None,
    channels: int | None = None,
    neurons: int | None = None,
    kv_groups: int | None = None,
) -> Plan:
    """The highest scores stay, so many of each part (None: all); of equal scores the lower index.

    Layers that share their keys keep the groups of the layer that has them, which goes after them. Raises
    WorkbenchError for counts that leave nothing or are more than there are.
    """
    scores.check_fits(config)
    kept = _layers_kept(scores.layers, config, layers)
    of_layers = [config.kv_source(layer) for layer in kept]
    plan = Plan(
        kept,
        _highest("channels", scores.channels, channels),
        tuple(_highest("neurons", scores.neurons[layer], neurons) for layer in kept),
        tuple(_highest("kv_groups", scores.kv_groups[layer], kv_groups) for layer in of_layers),
    )
    plan.check(config)
    return plan


def _layers_kept(scores: torch.Tensor, config: ModelConfig, count: int | None) -> tuple[int, ...]:
    """The lowest score goes first, of those whose keys no other layer that is left attends over."""
    if config.kv_sources is None or count is None:
        return _highest("layers", scores, count)
    _check_count("layers", len(scores), count)
    left = list(range(len(scores)))
    while len(left) > count:
        needed = {config.kv_source(layer) for layer in left if config.kv_source(layer) != layer}
        left.remove(min((n for n in left if n not in needed), key=lambda n: (float(scores[n]), -n)))
    return tuple(left)


def _check_count(part: str, there: int, count: object) -> None:
    if type(count) is not int or not 1 <= count <= there:
        raise WorkbenchError(f"{part}: a plan keeps from 1 to {there}, got {count!r}")


def _highest(part: str, scores: torch.Tensor, count: int | None) -> tuple[int, ...]:
    if count is None:
        return tuple(range(len(scores)))
    _check_count(part, len(scores), count)
    order = scores.argsort(descending=True, stable=True)
    return tuple(sorted(order[:count].tolist()))


def plan_by_share(scores: Importance, config: ModelConfig, **shares: float) -> Plan:
    """Shares of `layers`, `channels`, `neurons` or `kv_groups` that stay, each above 0 and at most 1, rounded to the
    nearest whole number and at least 1. Raises WorkbenchError for unknown parts."""
    for part in shares:
        if part not in PARTS:
            raise unknown("part of a model", part, PARTS)
    counts = {}
    for part, share in shares.items():
        check_between(part, share, 0, 1)
        there = {
            "layers": config.num_layers,
            "channels": config.hidden_size,
            "neurons": config.intermediate_size,
            "kv_groups": config.num_kv_heads,
        }[part]
        counts[part] = max(1, round(share * there))
    return plan_by_counts(scores, config, **counts)


def plan_by_parameters(scores: Importance, config: ModelConfig, target: int, kind: str = "width") -> Plan:
    """A plan that keeps at most `target` parameters, and about so many.

    width: about the same share of channels and of neurons. depth: as many layers as leave no less than the target, and
    what is still too much from the neurons. both: layers to about the root of the share, then width.
    Raises WorkbenchError for a target that is no smaller than the model, or that nothing reaches.
    """
    if kind not in KINDS:
        raise unknown("kind of plan", kind, KINDS)
    if type(target) is not int or not 0 < target < config.num_parameters():
        raise WorkbenchError(
            f"the target must be a whole number of parameters below the model's {config.num_parameters():,}, got"
            f" {target!r}"
        )
    layers, sizes = config.num_layers, [_size(scores, config, layers=n) for n in range(1, config.num_layers + 1)]
    if kind == "depth":
        layers = next(n for n, size in enumerate(sizes, 1) if size >= target)
    elif kind == "both":
        middle = (target * config.num_parameters()) ** 0.5
        layers = min(range(1, config.num_layers + 1), key=lambda n: abs(sizes[n - 1] - middle))
    step = math.lcm(MULTIPLE, config.num_heads)
    widths = [config.hidden_size] if kind == "depth" else range(step, config.hidden_size + 1, step)
    candidates = []
    for channels in widths:
        neurons = _neurons_within(scores, config, target, layers=layers, channels=channels)
        if neurons >= 1:
            uneven = abs(channels / config.hidden_size - neurons / config.intermediate_size)
            candidates.append((uneven, channels, neurons))
    if candidates:
        _, channels, neurons = min(candidates)
        return plan_by_counts(scores, config, layers=layers, channels=channels, neurons=neurons)
    raise WorkbenchError(
        f"no plan by {kind} leaves {target:,} parameters: the embedding alone has"
        f" {config.vocab_size * config.hidden_size:,}; choose a larger target or another kind"
    )


def _neurons_within(scores: Importance, config: ModelConfig, target: int, *, layers: int, channels: int) -> int:
    """The most neurons that leave at most `target` parameters, by MULTIPLE; below 1 where none do."""
    one, two = (_size(scores, config, layers=layers, channels=channels, neurons=n) for n in (1, 2))
    limit = min(config.intermediate_size, 1 + (target - one) // (two - one))
    return limit // MULTIPLE * MULTIPLE if limit > MULTIPLE else limit


def _size(
    scores: Importance, config: ModelConfig, *, layers: int, channels: int | None = None, neurons: int | None = None
) -> int:
    """Parameters of a shape with so many. Which ones stay makes no difference but for shared keys."""
    kept = _layers_kept(scores.layers, config, layers)
    plan = Plan(
        kept,
        tuple(range(channels or config.hidden_size)),
        tuple(tuple(range(neurons or config.intermediate_size)) for _ in kept),
        tuple(tuple(range(config.num_kv_heads)) for _ in kept),
    )
    return plan.config_of(config).num_parameters()
