"""How much each part of a model matters, from forward passes over a few thousand tokens of training text.

    layer     drop-one loss: by how many nats per token the loss rises without the layer (the default), or
              block influence 1 − mean cos(x, x + f(x))           (ShortGPT, Men et al., arXiv 2403.03853)
    neuron    ‖a_j‖ · ‖W_down,j‖ / ‖x‖, a_j the input of the down projection from neuron j over all tokens, W_down,j
              its column, x what comes into the layer
    kv group  ‖o_g‖ / ‖x‖, o_g what the heads of the group add to the residual stream over all tokens
    channel   Σ over the norms of the mean |output|               (Minitron, Muralidharan et al., arXiv 2407.14679 §2.2)

The mean is that of absolute values over all tokens, and the output of a norm is the input of attention, feed-forward or
head. Minitron takes the activation of a neuron alone; with the column that reads it, the score is the size of what the
neuron adds to the stream, and divided by the stream it compares between layers: later ones add more to a larger stream.
Nothing is differentiated, and the model is left as it came.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import nn

from workbench.errors import WorkbenchError, unknown
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder, StateLayer
from workbench.models.layers import GELUMLP, SwiGLU
from workbench.models.layout_values import few
from workbench.models.training import TrainingAttention, rows_batch
from workbench.quantization.calibration import Calibration

SIDE_BY_SIDE = 4  # rows in one forward
LAYER_SCORES = ("drop_one", "block_influence")


@dataclass(frozen=True)
class Importance:
    """Scores, higher is more important. layers [L], channels [d], neurons [L, F], kv_groups [L, H_kv]; float64."""

    layers: torch.Tensor
    channels: torch.Tensor
    neurons: torch.Tensor
    kv_groups: torch.Tensor
    how: str = "importance"

    def check_fits(self, config: ModelConfig) -> None:
        """Raise WorkbenchError for scores of another shape, and for scores that are not finite."""
        wanted = {
            "layers": (config.num_layers,),
            "channels": (config.hidden_size,),
            "neurons": (config.num_layers, config.intermediate_size),
            "kv_groups": (config.num_layers, config.num_kv_heads),
        }
        for part, shape in wanted.items():
            scores = getattr(self, part)
            if tuple(scores.shape) != shape:
                raise WorkbenchError(
                    f"scores of {part} must be {list(shape)}, got {list(scores.shape)}: another model's?"
                )
            if not bool(scores.isfinite().all()):
                raise WorkbenchError(f"scores of {part} are not finite; are the model's weights?")


@dataclass(frozen=True)
class Cut:
    """What is left out of a forward: layers, channels, and of a layer neurons and KV groups."""

    layers: Sequence[int] = ()
    channels: Sequence[int] = ()
    neurons: Mapping[int, Sequence[int]] = field(default_factory=dict)
    kv_groups: Mapping[int, Sequence[int]] = field(default_factory=dict)


def calibration_for(model: Decoder, calibration: Calibration | None, least: int = 2) -> Calibration:
    """The given text, or 32 × 256 tokens of the training modules. Raises WorkbenchError for rows that are too short."""
    calibration = calibration or Calibration.of(model.tokenizer)
    calibration.check_fits(model)
    if calibration.rows.shape[1] < least:
        raise WorkbenchError(f"calibration rows need at least {least} tokens, got {calibration.rows.shape[1]}")
    return calibration


# -- scores ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def importance(
    model: Decoder,
    calibration: Calibration | None = None,
    *,
    layer_score: str = "drop_one",
    check_stop: Callable[[], None] | None = None,
) -> Importance:
    """The scores of all parts. drop_one takes L + 1 forwards more than block_influence.

    Raises WorkbenchError for rows that are too short, and where activations are not finite (the tokens that gave them
    are of no use, and nothing was changed).
    """
    if layer_score not in LAYER_SCORES:
        raise unknown("score of layers", layer_score, LAYER_SCORES)
    check_plain(model)
    rows = calibration_for(model, calibration).rows
    sums = _Sums(model)
    with sums.watching():
        for some in rows.split(SIDE_BY_SIDE):
            if check_stop is not None:
                check_stop()
            some = some.to(model.device)
            model.hidden(rows_batch(some), TrainingAttention(model.config))
    scores = sums.importance()
    for name, part in (("layer", scores.layers), ("neuron", scores.neurons), ("channel", scores.channels)):
        if not bool(part.isfinite().all()):
            raise WorkbenchError(
                f"activations of {model.name} are not finite (seen at a {name}); nothing can be said of what matters."
                " Look at its weights, or at other text"
            )
    if layer_score == "drop_one":
        whole = loss_without(model, rows, Cut(), check_stop=check_stop)
        risen = [
            loss_without(model, rows, Cut(layers=[layer]), check_stop=check_stop) - whole
            for layer in range(model.config.num_layers)
        ]
        scores = dataclasses.replace(scores, layers=torch.tensor(risen, dtype=torch.float64))
    return scores


class _Sums:
    """What hooks add up during the forwards, in float64."""

    def __init__(self, model: Decoder) -> None:
        config = model.config
        self.model, self.config = model, config
        self.tokens = 0
        self.cosines = torch.zeros(config.num_layers, dtype=torch.float64)
        self.streams = torch.zeros(config.num_layers, 1, dtype=torch.float64)  # of what comes in, squared
        self.channels = torch.zeros(config.hidden_size, dtype=torch.float64)
        self.neurons = torch.zeros(config.num_layers, config.intermediate_size, dtype=torch.float64)
        self.groups = torch.zeros(config.num_layers, config.num_kv_heads, dtype=torch.float64)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        handles: list[Any] = []
        try:
            for index, layer in enumerate(self.model.layers):
                handles.append(layer.register_forward_hook(self._layer(index)))
                if config_feeds(layer):
                    handles.append(dense_mlp(layer).down.register_forward_pre_hook(self._neurons(index)))
                    handles.append(layer.mlp_norm.register_forward_hook(self._norm))
                if is_state(layer):
                    handles.append(layer.mixer_norm.register_forward_hook(self._norm))
                else:
                    handles.append(layer.attention_norm.register_forward_hook(self._norm))
                    handles.append(layer.attention.o.register_forward_pre_hook(self._heads(index)))
            handles.append(self.model.norm.register_forward_hook(self._final_norm))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _layer(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple, out: torch.Tensor) -> None:
            self.cosines[index] += F.cosine_similarity(args[0].double(), out.double(), dim=-1).sum().cpu()
            self.streams[index] += args[0].double().square().sum().cpu()

        return hook

    def _norm(self, _: nn.Module, args: tuple, out: torch.Tensor) -> None:
        self.channels += out.double().abs().sum(0).cpu()

    def _final_norm(self, module: nn.Module, args: tuple, out: torch.Tensor) -> None:
        self._norm(module, args, out)
        self.tokens += len(out)

    def _neurons(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple) -> None:
            self.neurons[index] += args[0].double().square().sum(0).cpu()

        return hook

    def _heads(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple) -> None:
            weight = cast("nn.Linear", module).weight.double()  # [d, H_q · D_v]
            for group, of_group in enumerate(torch.arange(weight.shape[1]).chunk(self.config.num_kv_heads)):
                added = args[0][:, of_group].double() @ weight[:, of_group].T
                self.groups[index, group] += added.square().sum().cpu()

        return hook

    def importance(self) -> Importance:
        streams = self.streams.clamp(min=torch.finfo(torch.float64).tiny)
        columns = torch.stack(
            [
                dense_mlp(layer).down.weight.double().norm(dim=0).cpu()
                if config_feeds(layer)
                else torch.zeros(self.config.intermediate_size, dtype=torch.float64)
                for layer in self.model.layers
            ]
        )
        return Importance(
            1 - self.cosines / self.tokens,
            self.channels / self.tokens,
            (self.neurons / streams).sqrt() * columns,
            (self.groups / streams).sqrt(),
        )


def config_feeds(layer: nn.Module) -> bool:
    """Whether a layer has a feed-forward."""
    return hasattr(layer, "mlp")


def dense_mlp(layer: Any) -> SwiGLU | GELUMLP:
    """The feed-forward of a layer without experts."""
    return cast("SwiGLU | GELUMLP", layer.mlp)


def check_plain(model: Decoder) -> None:
    """Raise WorkbenchError for a model whose linear layers are not plain matrices any more."""
    if getattr(model, "quantization", None) is not None:
        raise WorkbenchError(
            f"{model.name} is quantized; prune the model it came from, heal it, and quantize what comes of it"
        )
    if isinstance(model, Decoder) and model.config.experts is not None:
        raise WorkbenchError(f"{model.name} has experts, which are not pruned here; take a dense model")
    if not isinstance(model, Decoder):
        raise WorkbenchError(f"{model!r:.60} is arranged for inference; take the model that `load` gives")


def by_magnitude(model: Decoder) -> Importance:
    """A baseline that reads no text: norms of the weights that belong to each part."""
    check_plain(model)
    config = model.config
    layers = [torch.cat([p.double().flatten() for p in layer.parameters()]).norm() for layer in model.layers]
    channels = model.embed.weight.double().square().sum(0)
    neurons, groups = [], []
    for layer in model.layers:
        wide = config.intermediate_size
        neurons.append(
            dense_mlp(layer).down.weight.double().norm(dim=0) if config_feeds(layer) else torch.zeros(wide).double()
        )
        if is_state(layer):
            groups.append(torch.zeros(config.num_kv_heads).double())
            continue
        of_heads = layer.attention.o.weight.double()
        groups.append(torch.stack([part.norm() for part in of_heads.chunk(config.num_kv_heads, dim=1)]))
    return Importance(
        torch.stack(layers).detach().cpu(),
        channels.sqrt().detach().cpu(),
        torch.stack(neurons).detach().cpu(),
        torch.stack(groups).detach().cpu(),
        "magnitude",
    )


def by_chance(config: ModelConfig, seed: int) -> Importance:
    """A baseline: scores that know nothing."""
    draw = torch.Generator().manual_seed(seed)

    def scores(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=draw, dtype=torch.float64)

    return Importance(
        scores(config.num_layers),
        scores(config.hidden_size),
        scores(config.num_layers, config.intermediate_size),
        scores(config.num_layers, config.num_kv_heads),
        f"random, seed {seed}",
    )


# -- measured --------------------------------------------------------------------------------------------------------


def loss_without(
    model: Decoder, rows: torch.Tensor, cut: Cut, *, check_stop: Callable[[], None] | None = None
) -> float:
    """Mean nats per token over rows [B, T] of the model without these parts: their values are 0 wherever they are
    read."""
    return float(losses_without(model, rows, cut, check_stop=check_stop).mean())


@torch.no_grad()
def losses_without(
    model: Decoder, rows: torch.Tensor, cut: Cut, *, check_stop: Callable[[], None] | None = None
) -> torch.Tensor:
    """[B] float64: the same, row by row. Raises WorkbenchError for a loss that is no number."""
    losses = []
    with without(model, cut):
        for some in rows.split(SIDE_BY_SIDE):
            if check_stop is not None:
                check_stop()
            some = some.to(model.device)
            logits = model(rows_batch(some), TrainingAttention(model.config)).view(*some.shape, -1)[:, :-1]
            nats = F.cross_entropy(logits.flatten(0, 1).float(), some[:, 1:].flatten(), reduction="none")
            losses.append(nats.view(len(some), -1).double().mean(dim=1).cpu())
    nats = torch.cat(losses)
    if not bool(nats.isfinite().all()):
        raise WorkbenchError(f"the loss of {model.name} is {float(nats.sum())}; look at its weights, or at the text")
    return nats


@contextlib.contextmanager
def without(model: Decoder, cut: Cut) -> Iterator[None]:
    """Inside, forwards of the model run as if these parts were zero; its weights are not touched.

    A channel is zero where it is read, at the norms: what a layer adds to it reaches nobody. Raises WorkbenchError for
    parts that this model does not have.
    """
    _check_cut(model, cut)
    handles: list[Any] = []
    try:
        for layer in cut.layers:
            handles.append(model.layers[layer].register_forward_hook(lambda _, args, __: args[0]))
        for layer, neurons in cut.neurons.items():
            handles.append(dense_mlp(model.layers[layer]).down.register_forward_pre_hook(_zeroing(list(neurons))))
        for layer, groups in cut.kv_groups.items():
            projection = model.layers[layer].attention.o
            columns = torch.arange(projection.weight.shape[1]).chunk(model.config.num_kv_heads)
            zeroed = [int(i) for group in groups for i in columns[group]]
            handles.append(projection.register_forward_pre_hook(_zeroing(zeroed)))
        if cut.channels:
            for name, module in model.named_modules():
                if name == "norm" or (name.startswith("layers.") and name.count(".") == 2 and name.endswith("_norm")):
                    handles.append(module.register_forward_pre_hook(_zeroing(list(cut.channels))))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_cut(model: Decoder, cut: Cut) -> None:
    config = model.config
    layers = range(config.num_layers)
    _check_there("layers", cut.layers, layers)
    _check_there("channels", cut.channels, range(config.hidden_size))
    _check_there("layers with neurons", cut.neurons, [n for n in layers if config_feeds(model.layers[n])])
    _check_there("layers with kv_groups", cut.kv_groups, [n for n in layers if not is_state(model.layers[n])])
    for neurons in cut.neurons.values():
        _check_there("neurons", neurons, range(config.intermediate_size))
    for groups in cut.kv_groups.values():
        _check_there("kv_groups", groups, range(config.num_kv_heads))


def _check_there(part: str, asked: Iterable[int], there: Collection[int]) -> None:
    if wrong := [index for index in asked if index not in there]:
        have = f"0 to {len(there) - 1}" if isinstance(there, range) else few(there)
        raise WorkbenchError(f"{part}: this model has {have or 'none'}; there is no {wrong[0]!r}")


def is_state(layer: nn.Module) -> TypeGuard[StateLayer]:
    """Whether a layer keeps a state and has no heads that attend."""
    return isinstance(layer, StateLayer)


def _zeroing(indices: list[int]) -> Callable[..., tuple]:
    def hook(_: nn.Module, args: tuple) -> tuple:
        x = args[0].clone()
        x[..., indices] = 0
        return (x, *args[1:])

    return hook


def rank_correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Spearman's ρ of two lists [n]; equal values share the mean of their ranks. NaN where one list is constant."""
    ranks = torch.stack([_ranks(values) for values in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: torch.Tensor) -> torch.Tensor:
    values = values.double()
    smaller = (values[:, None] > values[None, :]).sum(1)
    equal = (values[:, None] == values[None, :]).sum(1)
    return smaller + (equal - 1) / 2
