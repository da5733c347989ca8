"""Which kv a step has, with what settings, and how many bytes it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import WorkbenchError, check_settings, unknown
from workbench.instruments.cost_codes import ATTENTIONS, STORED
from workbench.instruments.cost_quantized import CODE_FORMATS, GROUP, Groups, check_format
from workbench.models.config import ModelConfig

COUNTED_KVS = ("recompute", "contiguous", "window", "latent", "shared_layers", "quantized", "paged", "state")
FORMS = ("auto", "absorbed", "expanded")


SETTINGS = {  # that matter to the costs, named as where the kv is made
    "latent": ("form",),
    "window": ("window", "sinks", "rewind"),
    "quantized": ("format", "group", "attention"),
}
REWIND = 16  # of kv.window, unless asked otherwise


@dataclass(frozen=True)
class Memory:
    """The kind of kv and its settings, as far as the costs depend on them. Made by `Memory.of`, which checks them."""

    kind: str  # of workbench.kv.KINDS
    stored: float  # bytes of an element that is kept
    form: str = "auto"  # of latent attention, one of FORMS
    window: int | None = None  # for layers that have none of their own
    sinks: int = 0  # of those
    rewind: int = REWIND
    format: str = "int8"  # of what is quantized; `stored` is of the tokens that are kept as they came
    group: int = GROUP
    attention: str = "sdpa"  # over what is quantized: over numbers made of it, or "codes", the loop

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        kind: str,
        stored: float,
        *,
        kv_settings: Mapping[str, Any] | None = None,
        latent_form: str = "auto",
    ) -> Memory:
        """kv_settings: what the kv is made with, as for `kv_for`: form=, window=, sinks=, rewind=, format=, group=,
        attention=.

        latent_form: the form alone, one of FORMS. "paged" is counted as what lies in its blocks, like "latent" or
        "contiguous", read once where it lies: neither the gathering where neither kernels nor the loop over blocks
        run, nor the part of the last block that is empty. "quantized" is counted as dequantized (attention="sdpa")
        unless attention="codes" asks for the loop over codes, which a CPU runs over a recent part in float32. Raises
        WorkbenchError for what does not go with the kind or the shape.
        """
        if kind not in COUNTED_KVS:
            raise unknown("kv kind to count", kind, COUNTED_KVS)
        if not stored > 0:
            raise WorkbenchError(f"kv_bytes_per_element must be above 0, got {stored}")
        settings = dict(kv_settings or {})
        check_settings(f"kv {kind!r}", settings, SETTINGS.get(kind, ()))
        if kind == "paged":
            kind = "contiguous" if config.latent_attention is None else "latent"
        given = settings.pop("form", "auto")
        form = given if latent_form == "auto" else latent_form
        for one in (given, form):
            if one not in FORMS:
                raise unknown("latent_form", one, FORMS)
        if given not in ("auto", form):
            raise WorkbenchError(f"latent_form {form!r} and kv_settings['form'] {given!r} differ; give one of them")
        if kind == "latent" and config.latent_attention is None:
            raise WorkbenchError(
                f"kv 'latent' keeps the latents of latent attention, and this shape ({config.family}) has none; "
                "count another kv"
            )
        if kind != "latent" and form == "absorbed":
            raise WorkbenchError(
                f"kv {kind!r} expands latents at once, there is nothing to absorb: latent_form 'absorbed' goes with "
                "kv 'latent'"
            )
        if (kind == "state") != bool(config.state_layers) and kind != "recompute":
            having = "has none" if kind == "state" else f"has some ({', '.join(dict.fromkeys(config.mixers))})"
            raise WorkbenchError(
                f"kv 'state' is for shapes with layers that keep a state, and this one {having}; count kv "
                + ("'paged'" if kind == "state" else "'state'")
            )
        if kind == "shared_layers" and len(config.kv_layers) == config.num_layers:
            raise WorkbenchError(
                "kv 'shared_layers' is for shapes whose layers share keys (kv_sources), and in this one each of the "
                f"{config.num_layers} layers has its own; count kv 'contiguous'"
            )
        if kind == "window":
            _check_window(config, **settings)
        if kind == "quantized":
            check_format(settings.get("format", "int8"), settings.get("group", GROUP))
            _check_attention(settings.get("attention", "sdpa"), stored)
        return cls(kind, stored, form, **{**settings, "sinks": settings.get("sinks") or 0})

    def check_contexts(self, contexts: Sequence[int]) -> None:
        """Raise WorkbenchError for contexts above 0 with a kv that caches nothing."""
        if self.kind == "recompute" and any(contexts):
            raise WorkbenchError(
                "kv 'recompute' remembers nothing and is sent every text whole: contexts must be 0, got "
                f"{list(contexts)}"
            )

    def bytes_kept(self, config: ModelConfig, tokens: int) -> float:
        """Bytes kept for one sequence of so many tokens, over all layers; of states, the newest."""
        if self.kind == "recompute":
            return 0
        if self.kind == "latent":
            return config.kv_values_per_token() * tokens * self.stored
        heads, values = config.num_kv_heads, config.head_dim + config.value_head_dim
        if self.kind == "quantized":
            layers = [Groups(self.group, *self.look(config, layer)) for layer in config.kv_layers]
            codes = CODE_FORMATS[self.format]
            a_group = codes.group_bytes(self.group, config.head_dim, config.value_head_dim)
            groups, recent = sum(g.held(tokens) for g in layers), sum(g.recent(tokens) for g in layers)
            return heads * (groups * a_group + recent * values * self.stored)
        states = config.state_bytes() if self.kind == "state" else 0
        kept = sum(min(tokens, self.places(*self.look(config, layer))) for layer in config.kv_layers)
        return kept * heads * values * self.stored + states

    def look(self, config: ModelConfig, layer: int) -> tuple[int | None, int]:
        """The window and the number of sinks of a layer."""
        own = config.window_of(layer)
        return (self.window, self.sinks) if own is None else (own, config.attention_sinks)

    def places(self, window: int | None, sinks: int) -> float:
        """Tokens for which there is room: in a rolling buffer the window, what may be cut again, and the sinks."""
        return math.inf if self.kind != "window" or window is None else sinks + window - 1 + self.rewind


def _check_attention(attention: Any, stored: float) -> None:
    if attention in ("auto", "eager"):
        why = {
            "auto": "which of them that is the kv decides where it is made (its `attention` says it)",
            "eager": "eager attention is the definition, for proofs, and no formula here counts it",
        }
        raise WorkbenchError(
            f"a quantized kv is counted with attention 'codes' or 'sdpa', not {attention!r}: {why[attention]}"
        )
    if attention not in ATTENTIONS:
        raise unknown("attention over a quantized kv", attention, ATTENTIONS)
    if attention == "codes" and stored != STORED:
        raise WorkbenchError(
            f"the loop over codes reads a recent part in float32: attention='codes' needs kv_bytes_per_element="
            f"{STORED}, got {stored:g}. Give that, or count attention 'sdpa'"
        )


def _check_window(config: ModelConfig, window=None, sinks=None, rewind=REWIND) -> None:
    for name, value, least in (("window", window, 1), ("sinks", sinks, 0), ("rewind", rewind, 1)):
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not whole and not (value is None and name != "rewind"):
            raise WorkbenchError(f"{name} must be a whole number of at least {least}, got {value!r}")
    wide = [layer for layer in range(config.num_layers) if config.window_of(layer) is None]
    if window is None and len(wide) == config.num_layers:
        raise WorkbenchError(
            "kv 'window' keeps the last tokens of layers with a window, and this shape has none; count kv "
            "'contiguous', or give kv_settings={'window': …}"
        )
    if window is not None and not wide:
        raise WorkbenchError(
            f"window={window} is for layers that see the whole text, and every layer of this shape has its window of "
            f"{config.sliding_window} tokens already"
        )
    if window is None and sinks is not None:
        raise WorkbenchError(f"sinks={sinks} goes with a window: both are for layers without one of their own")
