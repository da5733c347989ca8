"""smaller.kv_formats: perplexity through a quantized kv, and why keys are quantized per channel and values per
token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, cast

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Limits, Setting, no_times
from workbench.experiments.held_out import (
    CONTEXT,
    SIDE_BY_SIDE,
    check_lossless,
    loss_of_kind,
    loss_of_yours,
    loss_through_kv,
    mean_and_error,
    passages_for,
)
from workbench.experiments.inputs import MODEL, plain, shape_of
from workbench.kv import Contiguous, Quantized, kv_for
from workbench.kv.quantized import GROUP, KV_FORMATS
from workbench.kv.recompute import Recompute
from workbench.labs.lab04_smaller_caches.inputs import allocated
from workbench.models.batch import Batch
from workbench.models.decoder import Decoder
from workbench.models.evaluation import HeldOutLoss
from workbench.models.training import rows_batch
from workbench.quantization.formats import FORMATS, QuantizedTensor, quantize_tensor

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.kv import KV
    from workbench.models.config import ModelConfig

REFERENCE = "full precision"
# what shares a scale: a channel over a group of tokens, or a token's channels
SCHEMES = ("per channel", "per token")
SHOWN_FORMATS = ("int8", "fp8", "int4", "int3", "int2")  # the last two in no kv
# in which the two schemes are held against each other: where they begin to differ
SCHEME_FORMATS = ("int4", "int3")


def run_kv_formats(
    bench: Bench,
    *,
    model,
    group: int,
    layer: int,
    format: str,
    context: int,
    passages: int,
    chunk: int,
    kv: Callable[[ModelConfig], KV] | None = None,
) -> Iterator[Measurement]:
    """What was `measured`, in this order:

    "magnitude"  of every channel of the layer's keys, then values: the root mean square over a passage's tokens;
    "error"      the same of x − x', in `format`, for either scheme: which channels suffer;
    "outliers"   for every layer, how far the largest channel of its keys is above the median one;
    "bytes"      of a kv really made for one sequence, in full precision and in every format, and by its formula;
    "kv"         perplexity through it, and through "yours";
    "scheme"     perplexity with every key rounded to 4 and 3 bits, per channel and per token, the values left alone.
    """
    decoder = bench.model(model)
    rows = passages_for(decoder, context, passages)
    _check_layer(decoder, layer)
    _check_group(group, context)
    settings = plain({"model": model, "context": context, "passages": passages, "chunk": chunk, "group": group})
    bench.check_stop()
    bench.report("keys and values of passage 1")
    seen = keys_and_values(decoder, rows[:1])
    yield from _channels(bench, decoder, seen, settings, layer, format)
    yield _outliers(bench, seen, settings)

    full = loss_of_kind(bench, decoder, "contiguous", rows, chunk, REFERENCE)
    check = check_lossless(bench, decoder, full, rows, "contiguous")
    counts = _bytes(decoder, "contiguous", context)
    yield _size(bench, {**settings, "format": REFERENCE}, counts)
    yield _perplexity(bench, full, full, {**settings, "measured": "kv", "format": REFERENCE}, counts, check)
    for name in KV_FORMATS:
        given: dict[str, Any] = {"format": name, "group": group}
        element, check = stored_errors(bench, decoder, seen, context, **given)
        found = loss_of_kind(bench, decoder, "quantized", rows, chunk, name, **given)
        counts = _bytes(decoder, "quantized", context, **given) | element
        counts["bits_per_value"] = Quantized.bits_per_value(decoder.config, context, dtype=_stored(decoder), **given)
        yield _size(bench, {**settings, "format": name}, counts)
        yield _perplexity(bench, found, full, {**settings, "measured": "kv", "format": name}, counts, check)
    if kv is not None:
        found = loss_of_yours(bench, decoder, kv, rows, chunk, "yours")
        check = f"largest difference from full precision {float((found.losses - full.losses).abs().max()):.3g} nats"
        yield _perplexity(bench, found, full, {**settings, "measured": "kv", "format": "yours"}, {}, check)
    for name, scheme in product(SCHEME_FORMATS, SCHEMES):
        found = _loss_of_scheme(bench, decoder, rows, max(chunk, group), scheme, name, group)
        about = {"measured": "scheme", "format": name, "keys": scheme, "chunk": max(chunk, group)}
        check = "every key rounded as it came, values left as they are: what comes of the keys alone"
        yield _perplexity(bench, found, full, {**settings, **about}, {}, check)


def _check_layer(decoder: Decoder, layer: int) -> None:
    if layer not in decoder.config.kv_layers:
        there = ", ".join(map(str, decoder.config.kv_layers))
        raise WorkbenchError(f"layer {layer} of {decoder.name} has no keys of its own; layers with keys: {there}")


def _check_group(group: int, context: int) -> None:
    """Two groups stay in full precision, so a shorter text is not quantized at all."""
    if context < 3 * group:
        raise WorkbenchError(
            f"of a text of {context:,} tokens nothing would be quantized: up to two groups of {group} stay as they"
            f" came. Choose a context of at least {3 * group}, or a smaller group"
        )


def _stored(decoder: Decoder) -> torch.dtype:
    return cast(Contiguous, kv_for("contiguous", decoder, max_tokens=1)).dtype


# -- keys and values, and their error by channel ---------------------------------------------------------------


class _Collected(Recompute):
    """Attention over a whole passage that keeps every layer's keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, layer: int, q: torch.Tensor, k, v, batch, up=None) -> torch.Tensor:
        if up is not None:
            k, v = up.expand(k)
        if k is not None:
            self.seen[layer] = (k, v)
        return super().attend(layer, q, k, v, batch)


@torch.no_grad()
def keys_and_values(decoder: Decoder, passage: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """{layer: (keys [S, H_kv, D], values [S, H_kv, D_v])} of one passage [1, S], as a kv is handed them."""
    collected = _Collected(decoder.config)
    decoder(rows_batch(passage.to(decoder.device)), collected)
    return collected.seen


def rounded(x: torch.Tensor, scheme: str, format: str, group: int) -> QuantizedTensor:
    """x [tokens, H_kv, D] in codes. "per channel": a scale for each channel over `group` tokens; "per token": one for
    each token over `group` channels of a head (over the whole head where groups do not divide it)."""
    name = "fp8_e4m3" if format == "fp8" else format
    if scheme == "per channel":
        return quantize_tensor(x, FORMATS[name], over=0, group=group)
    divides = x.shape[2] % group == 0
    return quantize_tensor(x, FORMATS[name], over=2, group=group if divides else None)


def _channels(
    bench: Bench, decoder: Decoder, seen: dict, settings: dict[str, Any], layer: int, format: str
) -> Iterator[Measurement]:
    group = settings["group"]
    for tensor, x in zip(("keys", "values"), seen[layer]):
        x = x[: len(x) // group * group].float()
        size = _rms(x)
        about = {**settings, "tensor": tensor, "layer": layer}
        yield bench.measurement(
            name="smaller.kv_formats",
            settings={**about, "measured": "magnitude"},
            samples=size.tolist(),
            unit="rms",
            counts={"channels": len(size), "tokens": len(x), "largest_to_median": float(size.max() / size.median())},
            check="as the model hands them to its kv, keys rotated by their position",
        )
        for scheme in SCHEMES:
            codes = rounded(x, scheme, format, group)
            error = (codes.dequantize() - x).abs()
            share = _largest_share(error, codes.error_bound())
            yield bench.measurement(
                name="smaller.kv_formats",
                settings={**about, "measured": "error", "scheme": scheme, "format": format},
                samples=_rms(error).tolist(),
                unit="rms error",
                counts={
                    "error_to_size": float(error.square().mean().sqrt() / x.square().mean().sqrt()),
                    "worst_channel_error_to_size": float((_rms(error) / size).max()),
                    "largest_error": float(error.max()),
                    "largest_share_of_bound": share,
                    "bits_per_value": codes.bits_per_value,
                },
                check=f"no element is further off than its bound; the nearest to it reaches {share:.1%}",
            )


def _rms(x: torch.Tensor) -> torch.Tensor:
    """[H_kv · D] of x [tokens, H_kv, D]: over the tokens."""
    return x.double().square().mean(0).sqrt().flatten()


def _largest_share(error: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest error as a share of its bound. Raises WorkbenchError where one is beyond it."""
    share = float((error.double() / bound.clamp(min=torch.finfo(torch.float64).tiny)).max())
    if not share <= 1:
        raise WorkbenchError(
            f"an element is off by {share:.3g} times its bound: the codes are wrong, so their error was thrown away"
        )
    return share


def _outliers(bench: Bench, seen: dict, settings: dict[str, Any]) -> Measurement:
    sizes = [_rms(k) for k, _ in seen.values()]
    values = [_rms(v) for _, v in seen.values()]
    of_values = max(float(s.max() / s.median()) for s in values)
    return bench.measurement(
        name="smaller.kv_formats",
        settings={**settings, "measured": "outliers", "layers": list(seen)},
        samples=[float(s.max() / s.median()) for s in sizes],
        unit="largest channel/median",
        counts={"largest_of_keys": max(float(s.max() / s.median()) for s in sizes), "largest_of_values": of_values},
        check="one sample a layer, of its keys; passage 1",
    )


def stored_errors(
    bench: Bench, decoder: Decoder, seen: dict, context: int, *, format: str, group: int
) -> tuple[dict[str, float], str]:
    """(counts, words): a passage's own keys and values put into kv "quantized", and what it remembers of them."""
    bench.check_stop()
    bench.report(f"{format}: what is remembered of passage 1")
    made = kv_for("quantized", decoder, max_sequences=1, max_tokens=context, format=format, group=group)
    kv = cast(Quantized, made)
    batch = Batch.of([[0] * context], device=decoder.device)
    kv.begin(batch)
    for layer, (k, v) in seen.items():
        kv.put(layer, k, v, batch)
    largest = {"keys": 0.0, "values": 0.0}
    share, exact = 0.0, 0
    for layer, given in seen.items():
        positions, *kept = kv.remembered(0, layer)
        whole = context // group * group
        for (name, axis), x, x_kept in zip((("keys", "per channel"), ("values", "values")), given, kept):
            x, x_kept = x.float(), x_kept.float()
            bound = torch.zeros_like(x, dtype=torch.float64)  # the recent part: as it came
            bound[:whole] = _bound(x[:whole], axis, format, group)
            error = (x[positions] - x_kept).abs()
            exact = int((error.amax(dim=(1, 2)) == 0).sum())
            largest[name] = max(largest[name], float(error.max()))
            share = max(share, _largest_share(error[error > 0], bound[positions][error > 0]) if error.any() else 0.0)
    counts = {
        "largest_key_error": largest["keys"],
        "largest_value_error": largest["values"],
        "largest_share_of_bound": share,
    }
    return (
        counts,
        (
            f"all that is remembered of passage 1 is within its bound (the nearest to it reaches {share:.1%}), the"
            f" newest {exact} tokens as they came"
        ),
    )


def _bound(x: torch.Tensor, axis: str, format: str, group: int) -> torch.Tensor:
    """At least the error of every element: keys per channel, values with one scale a token and head."""
    if axis == "per channel":
        return rounded(x, axis, format, group).error_bound()
    return quantize_tensor(x, KV_FORMATS[format], over=2).error_bound()


# -- perplexity ------------------------------------------------------------------------------------------------


class _Rounded(Contiguous):
    """A cache that keeps every key as it comes back from its codes, values as they are. For the loss; it saves no
    bytes."""

    scheme, format, group = "per channel", "int4", GROUP

    def attend(self, layer: int, q: torch.Tensor, k, v, batch: Batch, up=None) -> torch.Tensor:
        if up is not None:
            k, v = up.expand(k)
        if k is not None:
            spans = list(pairwise(batch.query_starts))
            k = torch.cat([self._round(k[a:b]) for a, b in spans])
        return super().attend(layer, q, k, v, batch)

    def _round(self, x: torch.Tensor) -> torch.Tensor:
        """The last chunk of a passage may be no whole number of groups; its rest is a smaller group."""
        whole = len(x) // self.group * self.group
        parts = [] if not whole else [rounded(x[:whole], self.scheme, self.format, self.group).dequantize()]
        if rest := len(x) - whole:
            padded = torch.cat((x[whole:], x[-1:].expand(self.group - rest, -1, -1)))  # widens no scale
            parts.append(rounded(padded, self.scheme, self.format, self.group).dequantize()[:rest])
        return torch.cat(parts)


def _loss_of_scheme(
    bench: Bench, decoder: Decoder, rows: torch.Tensor, chunk: int, scheme: str, format: str, group: int
) -> HeldOutLoss:
    kv = _Rounded(
        decoder.config, max_sequences=SIDE_BY_SIDE, max_tokens=rows.shape[1], dtype=decoder.dtype, device=decoder.device
    )
    kv.scheme, kv.format, kv.group = scheme, format, group
    return loss_through_kv(bench, decoder, kv, rows, chunk, f"keys {scheme}, {format}")


def _bytes(decoder: Decoder, kind: str, context: int, **given) -> dict[str, float]:
    reserved, formula = allocated(decoder, kind, context, **given)
    values = context * decoder.config.expanded_kv_values_per_token()
    return {
        "bytes_reserved": reserved,
        "bytes_by_formula": formula,
        "bytes_per_token": reserved / context,
        "bits_per_value": 8 * reserved / values,
    }


def _size(bench: Bench, settings: dict[str, Any], counts: dict[str, float]) -> Measurement:
    reserved = counts["bytes_reserved"]
    return bench.measurement(
        name="smaller.kv_formats",
        settings={**settings, "measured": "bytes"},
        samples=[float(reserved)],
        unit="bytes",
        counts={"bits_per_value": counts["bits_per_value"], "bytes_per_token": counts["bytes_per_token"]},
        predicted=float(counts["bytes_by_formula"]),
        check=f"a cache of {settings['context']:,} tokens was allocated: {reserved:,} bytes, as its formula says",
    )


def _perplexity(
    bench: Bench, found: HeldOutLoss, full: HeldOutLoss, settings: dict[str, Any], counts: dict, check: str
) -> Measurement:
    end = settings["context"]
    # nats per token, passage by passage
    above, error = mean_and_error(found.between(1, end) - full.between(1, end))
    return bench.measurement(
        name="smaller.kv_formats",
        settings=settings,
        samples=[found.perplexity],
        unit="perplexity",
        counts={
            "tokens": found.tokens,
            "nats_per_token": found.nats_per_token,
            "excess": math.expm1(above),
            "excess_standard_error": math.exp(above) * error,
            **counts,
        },
        check=check,
    )


def format_limits(*, model: str | Decoder, context: int, **_: Any) -> Limits:
    """What `_check_group` takes, and layers that there are."""
    return {"layer": max(shape_of(model).kv_layers), "group": context // 3}


EXPERIMENT = Experiment(
    name="smaller.kv_formats",
    lab=4,
    question="What do keys and values in 8 and 4 bits cost in perplexity, and which of them share a scale?",
    how=(
        "passages of the held-out modules go through the kv in chunks, so that all but a chunk's own tokens come back"
        " from the codes; excess is over the perplexity in full precision, compared passage by passage. Codes of keys"
        " have a scale a channel over a group of tokens, those of values one a token; the newest tokens stay as they"
        " came (KIVI, Liu et al., arXiv 2402.02750). What a key's scale serves is compared with every key rounded and"
        " equal bits."
    ),
    settings=(
        MODEL,
        Setting(
            "group",
            GROUP,
            "choice",
            choices=(16, 32, 64, 128),
            unit="tokens",
            help="tokens that share the scale of a channel",
        ),
        Setting("layer", 2, "int", 0, 200, help="whose channels are shown"),
        Setting("format", "int4", "choice", choices=SHOWN_FORMATS, help="in which the error of every channel is shown"),
        Setting(
            "context",
            CONTEXT.default,
            "choice",
            choices=(128, 256, 512, 1024),
            unit="tokens",
            brief=256,
            help=CONTEXT.help,
        ),
        Setting(
            "passages", 8, "int", 2, 100, brief=2, help="passages of the held-out modules, the same for every format"
        ),
        Setting(
            "chunk",
            16,
            "choice",
            choices=(1, 2, 4, 8, 16, 32, 64),
            unit="tokens",
            help="the text goes through the kv in pieces of so many tokens; all before them is read from it",
        ),
    ),
    run=run_kv_formats,
    limits=format_limits,
    predict=no_times,
    learner=("kv",),
    record={"cpu": ({"passages": 32}, {"model": "stdlib-3m-mha", "passages": 32}), "cuda": ()},
)
