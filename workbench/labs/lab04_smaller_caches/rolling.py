"""smaller.rolling: a rolling buffer at work, token by token: which positions it holds, where, and in how many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.cached_steps import check_room, rounding
from workbench.experiments.contract import Experiment, Limits, Setting, no_times
from workbench.experiments.inputs import MODEL, plain, shape_of, text_ids
from workbench.kv import Window, make_kv
from workbench.models.batch import Batch

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.config import ModelConfig


@dataclass(frozen=True)
class Buffer:
    """The places of one windowed layer: `sinks` that stay, then a ring of `turns` that is written round and round."""

    window: int
    sinks: int
    rewind: int

    @property
    def turns(self) -> int:
        return self.window - 1 + self.rewind

    @property
    def places(self) -> int:
        return self.sinks + self.turns

    def place_of(self, position: int) -> int:
        return position if position < self.sinks else self.sinks + (position - self.sinks) % self.turns

    def held(self, tokens: int) -> list[int | None]:
        """[places] the position that each place holds when the text has so many tokens; None where it is free."""
        found: list[int | None] = [None] * self.places
        for position in range(tokens):  # later ones overwrite
            found[self.place_of(position)] = position
        return found

    def seen(self, tokens: int) -> set[int]:
        """Positions that the newest of so many tokens attends to."""
        return {p for p in range(tokens) if p < self.sinks or p >= tokens - self.window}


def rolling_config(shape: ModelConfig, *, window: int, sinks: int, global_every: int) -> ModelConfig:
    """The shape with this window in all layers, or in all but every nth. global_every 0: in all."""
    every = tuple(range(global_every - 1, shape.num_layers, global_every)) if global_every else ()
    if len(every) == shape.num_layers:
        raise WorkbenchError("global_every=1 leaves no layer with a window; choose 0 (none global), 2, 3, …")
    if shape.latent_attention is not None or shape.kv_sources is not None:
        raise WorkbenchError(
            "the rolling buffer is shown for plain keys and values; choose a model without MLA or sharing"
        )
    return replace(shape, sliding_window=window, attention_sinks=sinks, global_layers=every)


def bytes_by_layer(config: ModelConfig, element_bytes: int) -> int:
    """Of one token in one layer."""
    return config.num_kv_heads * (config.head_dim + config.value_head_dim) * element_bytes


def buffer_bytes(config: ModelConfig, buffer: Buffer, tokens: int, element_bytes: int) -> int:
    """In use after so many tokens: min(S, places) in each layer with a window, S in each global one."""
    wide = len(config.global_layers)
    kept = (config.num_layers - wide) * min(tokens, buffer.places) + wide * tokens
    return kept * bytes_by_layer(config, element_bytes)


def full_bytes(config: ModelConfig, tokens: int, element_bytes: int) -> int:
    """The same where every layer keeps everything."""
    return config.num_layers * tokens * bytes_by_layer(config, element_bytes)


@torch.inference_mode()
def run_rolling(
    bench: Bench, *, model, window: int, sinks: int, global_every: int, rewind: int, tokens: int, shown_tokens: int
) -> Iterator[Measurement]:
    """One Measurement a token: bytes in use, read from the kv itself. The logits of every token are held to those of
    one pass without a cache, in which a mask hides what lies outside the window."""
    check_room(shape_of(model), tokens, 0)
    decoder = bench.model(model)
    config = rolling_config(decoder.config, window=window, sinks=sinks, global_every=global_every)
    buffer = Buffer(window, sinks, rewind)
    room = {"max_tokens": tokens, "dtype": decoder.dtype, "device": bench.device}
    kv = cast(Window, make_kv("window", config, rewind=rewind, **room))
    ids = text_ids(decoder, tokens)
    masked = decoder(Batch.of([ids], logits="all", device=bench.device), make_kv("recompute", config)).float()
    allowed = rounding(masked, decoder.dtype)
    settings = plain({"model": model, "window": window, "sinks": sinks, "global_every": global_every, "rewind": rewind})
    for position, token in enumerate(ids):
        bench.check_stop()
        bench.report(f"token {position + 1} of {tokens}")
        batch = Batch.of([[token]], first_positions=[position], device=bench.device)
        apart = float((decoder(batch, kv)[-1].float() - masked[position]).abs().max())
        if apart > allowed:
            raise WorkbenchError(
                f"after {position + 1:,} tokens the logits differ by {apart:.3g} from those of full attention with "
                f"that mask, more than rounding ({allowed:.2g}): the buffer holds something else than it should"
            )
        formula = buffer_bytes(config, buffer, position + 1, kv.dtype.itemsize)
        yield bench.measurement(
            name="smaller.rolling",
            settings={**settings, "tokens": position + 1},
            samples=[float(kv.bytes_in_use)],
            unit="bytes",
            counts={
                "bytes_in_use": kv.bytes_in_use,
                "bytes_reserved": kv.bytes_reserved,
                "bytes_full": full_bytes(config, position + 1, kv.dtype.itemsize),
                "largest_difference": apart / float(masked[position].abs().max()),
            },
            predicted=float(formula),
            check="the logits equal those of full attention with a mask of that window",
        )


def rolling_limits(*, tokens: int, **_: Any) -> Limits:
    """A model with plain keys and values; and what is shown of a text lies in it."""

    def is_plain(model: Any) -> bool:
        shape = shape_of(model)
        return shape.latent_attention is None and shape.kv_sources is None

    return {"model": is_plain, "shown_tokens": tokens}


EXPERIMENT = Experiment(
    name="smaller.rolling",
    lab=4,
    question="What does a rolling buffer hold, token by token?",
    how="a real model writes nothing and reads held-out text token by token, with this window in its attention; the "
    "kv is asked for its bytes after every token, and every token's logits are held to one pass with a mask and no "
    "cache.",
    settings=(
        MODEL,
        Setting("window", 12, "int", 1, 64, unit="tokens", help="a token sees so many of the last, itself included"),
        Setting("sinks", 2, "int", 0, 8, unit="tokens", help="first tokens of the text that are kept and seen as well"),
        Setting("global_every", 3, "choice", choices=(0, 2, 3, 6), help="every so manyth layer sees the whole text"),
        Setting("rewind", 1, "int", 1, 16, unit="tokens", help="places beyond W − 1: so many tokens can be taken back"),
        Setting("tokens", 40, "int", 2, 64, help="length of the text"),
        Setting("shown_tokens", 21, "int", 1, 64, help="the picture shows the buffer after so many tokens"),
    ),
    run=run_rolling,
    limits=rolling_limits,
    predict=no_times,
    record={"cpu": (), "cuda": ()},  # bytes are the same everywhere
)
