"""smaller.windows: the loss by position with the whole text, with windows a model was trained for, and with windows
it was not, with attention sinks and without."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Limits, Setting, no_times
from workbench.experiments.held_out import (
    CHUNK,
    CUT_CONTEXT,
    PASSAGES,
    check_lossless,
    loss_of_kind,
    loss_of_yours,
    mean_and_error,
    passages_for,
)
from workbench.experiments.inputs import plain, shape_of
from workbench.kv.recompute import Recompute
from workbench.labs.lab04_smaller_caches.inputs import allocated, kind_for, needed_values, trained
from workbench.models.checkpoints import zoo_config
from workbench.models.decoder import Decoder
from workbench.models.recipes import CACHE_VARIANTS
from workbench.models.training import rows_batch

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.kv import KV
    from workbench.models.config import ModelConfig
    from workbench.models.evaluation import HeldOutLoss

HYBRID = "stdlib-3m-hybrid"
FIRST_RANGE = 16  # tokens of the first range of positions; the next are twice as far each
SINK_PASSAGES = 2  # whose attention weights are looked at


def ranges_up_to(context: int) -> list[tuple[int, int]]:
    """(first, end) positions, end doubling: [(1, 16), (16, 32), …, (512, 1024)]. Position 0 predicts from nothing."""
    edges = [1]
    end = FIRST_RANGE
    while end < context:
        edges.append(end)
        end *= 2
    return list(pairwise([*edges, context]))


def without_window(name: str) -> str:
    """The variant that is like this one but sees the whole text in every layer."""
    shape = dataclasses.replace(zoo_config(name), sliding_window=None, global_layers=(), attention_sinks=0)
    found = [other for other in CACHE_VARIANTS if zoo_config(other) == shape]
    assert found, f"no variant is {name} without its window"
    return found[0]


def check_window(window: int, sinks: int, context: int) -> None:
    """Raise WorkbenchError for a window that has no room for its sinks, or that nothing slides out of."""
    if sinks >= window:
        raise WorkbenchError(
            f"{sinks} sinks take the whole window of {window} tokens; choose fewer sinks, or a larger window"
        )
    if window >= context:
        raise WorkbenchError(
            f"a window of {window:,} tokens sees all of a passage of {context:,}; choose a longer context, or a "
            "smaller window"
        )


def run_windows(
    bench: Bench,
    *,
    model,
    window: int,
    sinks: int,
    variants: bool,
    context: int,
    passages: int,
    chunk: int,
    kv: Callable[[ModelConfig], KV] | None = None,
) -> Iterator[Measurement]:
    """For every `way` to remember: its bytes (`measured` "bytes"), then its loss in every range of positions
    ("loss", nats/token; `first_position` … `end_position` − 1).

    Ways: "full"; "window", no sinks; "window and sinks", sinks + a window that is smaller by as many, so that both
    remember `window` tokens; "yours"; then the variant trained with windows and its twin trained without.
    First of all ("attention") the share of attention that the model gives to its first `sinks` tokens.
    """
    check_window(window, sinks, context)
    decoder = bench.model(model)
    rows = passages_for(decoder, context, passages)
    if decoder.config.sliding_window is not None:
        raise WorkbenchError(
            f"{decoder.name} has windows of its own; choose a model that was trained to see its whole text"
        )
    others = trained(bench, [without_window(HYBRID), HYBRID] if variants else [])
    settings = plain({"model": model, "window": window, "sinks": sinks, "context": context, "passages": passages})
    settings["chunk"] = chunk
    if sinks:
        yield _attention(bench, decoder, rows[:SINK_PASSAGES], window, sinks, settings)
    full: HeldOutLoss | None = None  # of the first way, whose text is whole
    for way, given in ways(window, sinks).items():
        kind = "window" if given else kind_for(decoder.config)
        shape = decoder.config
        if given:
            shape = dataclasses.replace(shape, sliding_window=given["window"], attention_sinks=given["sinks"])
        yield _bytes(bench, decoder, kind, shape, {**settings, "way": way}, **given)
        found = loss_of_kind(bench, decoder, kind, rows, chunk, way, **given)
        check = _masked_check(bench, decoder, shape, found, rows, way)
        full = full or found
        yield from _by_position(bench, found, full, {**settings, "way": way}, check)
    if kv is not None:
        assert full is not None
        found = loss_of_yours(bench, decoder, kv, rows, chunk, "yours")
        check = f"not held to an oracle; {_against(found, full)}"
        yield from _by_position(bench, found, full, {**settings, "way": "yours"}, check)
    yield from _trained_variants(bench, others, settings, passages, chunk)


def ways(window: int, sinks: int) -> dict[str, dict[str, int]]:
    """{way: settings of kv "window", or none for the whole text}; all windows remember as many tokens."""
    found: dict[str, dict[str, int]] = {"full": {}, "window": {"window": window, "sinks": 0}}
    if sinks:
        found["window and sinks"] = {"window": window - sinks, "sinks": sinks}
    return found


def _trained_variants(
    bench: Bench, others: list[Decoder], settings: dict[str, Any], passages: int, chunk: int
) -> Iterator[Measurement]:
    twin: HeldOutLoss | None = None
    for other in others:
        kind, way = kind_for(other.config), "trained full" if twin is None else "trained with windows"
        own = {**settings, "model": other.name, "way": way, "window": other.config.sliding_window or 0, "sinks": 0}
        rows = passages_for(other, settings["context"], passages)
        yield _bytes(bench, other, kind, other.config, own)
        found = loss_of_kind(bench, other, kind, rows, chunk, way)
        check = check_lossless(bench, other, found, rows, kind)
        twin = twin or found
        yield from _by_position(bench, found, twin, own, check)


def _bytes(
    bench: Bench, decoder: Decoder, kind: str, shape: ModelConfig, settings: dict[str, Any], **given: int
) -> Measurement:
    tokens = settings["context"]
    reserved, formula = allocated(decoder, kind, tokens, **given)
    needed = needed_values(shape, tokens) * decoder.dtype.itemsize
    return bench.measurement(
        name="smaller.windows",
        settings={**settings, "measured": "bytes"},
        samples=[float(reserved)],
        unit="bytes",
        counts={"bytes_needed": needed, "bytes_beyond_need": reserved - needed},
        predicted=float(formula),
        check=f"a cache for {tokens:,} tokens was allocated: {reserved:,} bytes, as its formula says",
    )


def _by_position(
    bench: Bench, found: HeldOutLoss, full: HeldOutLoss, settings: dict[str, Any], check: str
) -> Iterator[Measurement]:
    for first, end in ranges_up_to(settings["context"]):
        a_passage = found.between(first, end)
        loss, error = mean_and_error(a_passage)
        above, above_error = mean_and_error(a_passage - full.between(first, end))
        yield bench.measurement(
            name="smaller.windows",
            settings={**settings, "measured": "loss", "first_position": first, "end_position": end},
            samples=[loss],
            unit="nats/token",
            counts={
                "tokens": len(a_passage) * (end - first),
                "standard_error": error,
                "above_full": above,
                "above_full_standard_error": above_error,
            },
            check=check,
        )


def _masked_check(
    bench: Bench, decoder: Decoder, shape: ModelConfig, found: HeldOutLoss, rows: torch.Tensor, way: str
) -> str:
    """A rolling buffer against a masked attention over the whole text, which remembers everything."""
    masked = with_shape(decoder, shape)
    return check_lossless(bench, masked, found, rows, way) + (
        ", in which a mask hides what the window forgets" if shape.sliding_window else ""
    )


def with_shape(decoder: Decoder, shape: ModelConfig) -> Decoder:
    """The same weights (shared, not copied) under a config that differs in its windows only."""
    if shape == decoder.config:
        return decoder
    with torch.device("meta"):
        masked = Decoder(shape, tokenizer=decoder.tokenizer, name=decoder.name)
    masked.load_state_dict(decoder.state_dict(), assign=True)
    masked.rotary = decoder.rotary
    return masked.eval()


def _against(found: HeldOutLoss, full: HeldOutLoss) -> str:
    return f"largest difference from full attention {float((found.losses - full.losses).abs().max()):.3g} nats"


# -- do the first tokens draw attention? -----------------------------------------------------------------------


class _Watched(Recompute):
    """Attention over whole passages that notes how much of it goes to the first tokens, layer by layer."""

    def __init__(self, config: ModelConfig, first_query: int, sinks: int) -> None:
        super().__init__(config)
        self._from, self._sinks = first_query, sinks
        self.shares: list[list[float]] = [[] for _ in range(config.num_layers)]

    def attend(self, layer: int, q: torch.Tensor, k, v, batch, up=None) -> torch.Tensor:
        out = super().attend(layer, q, k, v, batch, up)
        if up is not None:
            k, v = up.expand(k)
        if k is None:
            return out  # of a layer that attends over another's keys
        for a, b in pairwise(batch.query_starts):
            keys = k[a:b].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            late = q[a + self._from : b]
            scores = torch.einsum("nhd,shd->hns", late.float(), keys.float()) * self.scale
            at = torch.arange(self._from, b - a, device=q.device)
            scores = scores.masked_fill(torch.arange(b - a, device=q.device) > at[:, None], float("-inf"))
            self.shares[layer].append(float(scores.softmax(-1)[..., : self._sinks].sum(-1).mean()))
        return out


@torch.inference_mode()
def _attention(
    bench: Bench, decoder: Decoder, rows: torch.Tensor, window: int, sinks: int, settings: dict[str, Any]
) -> Measurement:
    """The share of attention on the first tokens, from queries that a window would let forget them."""
    bench.check_stop()
    bench.report("attention on the first tokens")
    watched = _Watched(decoder.config, window, sinks)
    decoder(rows_batch(rows.to(decoder.device)), watched)
    shares = [sum(layer) / len(layer) for layer in watched.shares if layer]
    context = rows.shape[1]
    even = sum(sinks / (i + 1) for i in range(window, context)) / (context - window)
    return bench.measurement(
        name="smaller.windows",
        settings={**settings, "measured": "attention"},
        samples=shares,
        unit="share",
        counts={"even_share": even, "mean_share": sum(shares) / len(shares), "passages_looked_at": len(rows)},
        check=f"one sample a layer, the mean over heads and the queries from position {window} on; were attention "
        f"spread evenly, {even:.2%} would fall on the first {sinks} tokens",
    )


def window_limits(*, window: int, context: int, **_: Any) -> Limits:
    """What `check_window` takes, and a model without windows of its own."""
    return {"window": context - 1, "sinks": window - 1, "model": lambda model: shape_of(model).sliding_window is None}


EXPERIMENT = Experiment(
    name="smaller.windows",
    lab=4,
    question="What is lost with what slides out of the window, and do the first tokens matter?",
    how="loss by position, over the same passages: the model with its whole text, then through a rolling buffer it was "
    "not trained for, without and with its first tokens kept (attention sinks, Xiao et al., arXiv 2309.17453), both "
    "of as many tokens; then the variant trained with windows beside its twin without. Positions are those of the "
    "text. Where the first tokens draw no more attention than others, keeping them cannot help.",
    settings=(
        Setting("model", "stdlib-10m", "model", help="a model trained to see its whole text"),
        Setting(
            "window",
            128,
            "choice",
            choices=(8, 16, 32, 64, 128, 256, 512),
            unit="tokens",
            help="tokens that are remembered, sinks included",
        ),
        Setting("sinks", 4, "int", 0, 64, unit="tokens", help="first tokens that stay"),
        Setting("variants", True, "flag", help="also the variant trained with windows, and its twin without"),
        CUT_CONTEXT,
        PASSAGES,
        CHUNK,
    ),
    run=run_windows,
    limits=window_limits,
    predict=no_times,
    learner=("kv",),
    record={"cpu": ({"passages": 64}, {"passages": 64, "window": 32, "variants": False}), "cuda": ()},
)
