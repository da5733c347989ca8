"""A cache of latents: what multi-head latent attention leaves behind a token, however many heads there are.

    latents [L, slots, S_max, kv_rank + rotary]     a token's row   | c, the latent  | k_r, rotated |
                                                    as the key      |<------- all of it --------->|
                                                    as the value    |<- kv_rank ---->|   a view, stored once

L·(kv_rank + rotary)·b bytes per token, (512 + 64)·L·b for DeepSeek's shape (DeepSeek-V2, arXiv 2405.04434 §2.1). The
two equal forms of attention over it are in `workbench.models.latent`:

    expanded   keys and values of every head are made from the latents anew, each step, then attended over
    absorbed   the maps to keys and values go into the query and the result; all heads attend over the latents
    auto       absorbed for a sequence whose new tokens are few enough that it takes fewer FLOPs (`absorbing_pays`):
               steps and drafts; else expanded: prompts
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from workbench.errors import WorkbenchError, unknown
from workbench.kv.contiguous import RECTANGLE_WASTE
from workbench.kv.slots import Places, Slots, dtype_name, misfit, require_room
from workbench.models.attention import causal_mask, eager_attention, fused_mask, sdpa_attention
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.latent import UpProjections, absorbing_pays

FORMS = ("auto", "absorbed", "expanded")


class Latent(Slots):
    """A KV cache of latents, `max_sequences` slots of `max_tokens` tokens, all allocated here and now.

    form: see the module. max_tokens, dtype: as in `Contiguous`. attention: "sdpa" attends by matrix products in the
    absorbed form and by the fused kernel in the expanded one, "eager" by the definition in both.
    Windows of the model are kept to, but every token stays stored.
    Raises WorkbenchError for a model without latent attention, and for more bytes than the device has free.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_sequences: int = 1,
        max_tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: str = "sdpa",
        form: str = "auto",
    ) -> None:
        _require_latents(config)
        _check_form(form)
        super().__init__(
            config, max_sequences=max_sequences, max_tokens=max_tokens, dtype=dtype, device=device, attention=attention
        )
        self.shape, self.form = config.latent_shape, form
        needed = self.reserved_bytes_for(
            config, max_sequences=max_sequences, max_tokens=self.max_tokens, dtype=self.dtype
        )
        stored = dtype_name(self.dtype)
        require_room("KV cache of latents", needed, max_sequences, self.max_tokens, stored, device)
        room = (config.num_layers, max_sequences, self.max_tokens, self.shape.cached_dim)
        self._latents = torch.zeros(room, dtype=self.dtype, device=device)
        self._step: Any = None  # the _Step of the batch that `begin` accepted

    @staticmethod
    def reserved_bytes_for(
        config: ModelConfig, *, max_sequences: int, max_tokens: int, dtype: torch.dtype, form: str = "auto"
    ) -> int:
        """L·(kv_rank + rotary)·S·B·b, in every form. dtype: as stored."""
        _require_latents(config)
        _check_form(form)
        return max_sequences * max_tokens * config.kv_values_per_token() * dtype.itemsize

    @property
    def bytes_in_use(self) -> int:
        return sum(self._lengths.values()) * self.config.kv_values_per_token() * self.dtype.itemsize

    @property
    def bytes_reserved(self) -> int:
        return self._latents.nbytes

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: Batch,
        up: UpProjections | None = None,
    ) -> torch.Tensor:
        self._enter(layer, batch, self._misfit_latents(q, k, v, up) if layer == 0 or up is None else "")
        step, window = self._step, self.config.window_of(layer)
        assert k is not None and up is not None, "latents, and the maps from them"
        step.write(self._latents[layer], k[:, 0])
        folded = up.absorb(q).to(self.dtype) if any(step.absorbed) else None  # [N, H, kv_rank + rotary]
        if step.rectangle:
            first, mask = step.seen[window]
            seen = self._latents[layer, step.side, first : max(step.lengths)]
            assert folded is not None, "a rectangle is absorbed"
            mixed = self._mix(folded[:, None], seen, mask).flatten(0, 1)  # [B, H, kv_rank]
            return up.restore(mixed.to(up.v_up.dtype)).to(q.dtype)
        return self._attend_one_by_one(layer, q, folded, up, window)

    # -- what a slot holds ---------------------------------------------------------------------------------

    def _open(self, batch: Batch, places: Places) -> None:
        sizes = [b - a for a, b in pairwise(batch.query_starts)]
        if self.form == "auto":
            absorbed = [absorbing_pays(self.shape, n) for n in sizes]
        else:
            absorbed = [self.form == "absorbed"] * len(sizes)
        self._step = _Step(batch, places, self.config, sizes, absorbed, self._latents, together=not self._eager)

    def _forget(self, slot: int, start: int, end: int) -> None:
        """Zero these positions: in a ragged batch they are multiplied by a weight of 0, and 0 · NaN is NaN."""
        self._latents[:, slot, start:end] = 0

    def _copy(self, source: int, target: int, length: int) -> None:
        self._latents[:, target, :length] = self._latents[:, source, :length]

    def _move(self, slot: int, to: int, places: list[int]) -> None:
        self._latents[:, slot, to : to + len(places)] = self._latents[:, slot, places]

    def _misfit_latents(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, up: UpProjections | None
    ) -> str:
        c, rows = self.config, len(q)
        problem = misfit(q, k, v, (rows, c.num_heads, c.head_dim), (rows, 1, self.shape.cached_dim), None)
        if not problem and (up is None or up.shape != self.shape):
            came = "none came" if up is None else f"those of {up.shape} came"
            problem = f"this KV cache takes latents together with their up-projections (of {self.shape}), and {came}"
        return problem

    # -- attention over what is stored -----------------------------------------------------------------------

    def _attend_one_by_one(
        self, layer: int, q: torch.Tensor, folded: torch.Tensor | None, up: UpProjections, window: int | None
    ) -> torch.Tensor:
        step, parts = self._step, []
        look: dict[str, Any] = {"scale": self.scale, "window": window, "sinks": self.config.attention_sinks}
        for i, (slot, length, tree, mask, (a, b)) in enumerate(
            zip(step.slots, step.lengths, step.trees, step.masks[window], pairwise(step.query_starts))
        ):
            latents = self._latents[layer, slot, :length, None]  # [S, 1, kv_rank + rotary]
            if not step.absorbed[i]:
                keys = [t.to(self.dtype) for t in up.expand(latents)]
                new = q[a:b].to(self.dtype)
                if self._eager:
                    out = eager_attention(new, *keys, **look, parents=tree)
                else:
                    out = sdpa_attention(new, *keys, **look, mask=mask)
                parts.append(out.to(q.dtype))
                continue
            assert folded is not None, "an absorbed sequence"
            if self._eager:
                values = latents[..., : self.shape.kv_rank]
                mixed = eager_attention(folded[a:b], latents, values, **look, parents=tree)
            else:
                mixed = self._mix(folded[None, a:b], latents[None, :, 0], mask)[0]
            parts.append(up.restore(mixed.to(up.v_up.dtype)).to(q.dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _mix(self, folded: torch.Tensor, latents: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return mix(folded, latents, mask, scale=self.scale, kv_rank=self.shape.kv_rank)


def mix(
    folded: torch.Tensor, latents: torch.Tensor, mask: torch.Tensor | None, *, scale: float, kv_rank: int
) -> torch.Tensor:
    """Attention with one key-value head whose value is a view of its key; the softmax in float32.

    folded [B, n, H, kv_rank + rotary], latents [B, S, kv_rank + rotary], mask [B, n, 1, S] float or None
    -> [B, n, H, kv_rank]. The n·H·S scores of a sequence are written to memory.
    """
    count, heads = folded.shape[1:3]
    if len(latents) == 1:
        latents = latents[0]  # one plain matrix product instead of a batch of one
    scores = torch.matmul(folded.flatten(1, 2), latents.transpose(-2, -1))  # [B, n·H, S]
    scores = scores.to(torch.promote_types(latents.dtype, torch.float32)).mul_(scale)
    if mask is not None:
        scores = scores.unflatten(1, (count, heads)).add_(mask).flatten(1, 2)
    weights = scores.softmax(dim=-1).to(latents.dtype)
    return torch.matmul(weights, latents[..., :kv_rank]).unflatten(1, (count, heads))


class _Step:
    """What all layers share while one batch is processed: who is absorbed, where rows are written, who sees what.

    When every sequence brings one token, is absorbed and lies beside the others, what they see is one rectangle
    of the cache, from position `first`: then `seen[window]` = (first, mask). Otherwise `masks[window]`, a sequence
    each, boolean for the fused kernel or float [1, n, 1, S] for `_mix`.
    """

    def __init__(
        self,
        batch: Batch,
        places: Places,
        config: ModelConfig,
        sizes: Sequence[int],
        absorbed: Sequence[bool],
        latents: torch.Tensor,
        *,
        together: bool,
    ) -> None:
        self.slots, self.lengths, self.query_starts = places.slots, places.lengths, batch.query_starts
        self.absorbed = absorbed
        count, device, dtype = len(self.slots), latents.device, latents.dtype
        windows, sinks = {config.window_of(i) for i in range(config.num_layers)}, config.attention_sinks
        self.side = slice(self.slots[0], self.slots[0] + count)
        side_by_side = self.slots == list(range(self.side.start, self.side.stop))
        longest, same = max(self.lengths), min(self.lengths) == max(self.lengths)
        self._at = None  # of the rows, in a layer; None: rows are written a sequence at a time
        if batch.num_tokens == count and side_by_side:
            ends = torch.tensor(self.lengths, device=device)
            slots = torch.arange(self.side.start, self.side.stop, device=device)
            self._at = (self.side, longest - 1) if same else (slots, ends - 1)
        self.rectangle = (
            together
            and self._at is not None
            and all(absorbed)
            and count * longest <= RECTANGLE_WASTE * sum(self.lengths)
        )
        if self.rectangle:
            self.seen = {w: _rectangle(self.lengths, w, sinks, ends, dtype) for w in windows}
            return
        self.trees = batch.parents or (None,) * count
        self.masks: dict[int | None, list[torch.Tensor | None]] = {w: [] for w in windows}
        for window, masks in self.masks.items():
            for n, length, is_absorbed, tree in zip(sizes, self.lengths, absorbed, self.trees):
                mask = fused_mask(n, length, window, device, sinks, tree) if together else None
                if together and is_absorbed:
                    if mask is None and n > 1:  # nothing hides the future by itself here
                        mask = causal_mask(n, length, window, device, sinks)
                    mask = None if mask is None else hiding(~mask, dtype)[None, :, None, :]
                masks.append(mask)

    def write(self, latents: torch.Tensor, new: torch.Tensor) -> None:
        """new [N, kv_rank + rotary] into the slots of one layer [slots, S_max, kv_rank + rotary]."""
        if self._at is not None:
            latents[self._at] = new.to(latents.dtype)
            return
        for slot, length, (a, b) in zip(self.slots, self.lengths, pairwise(self.query_starts)):
            latents[slot, length - (b - a) : length] = new[a:b]


def _rectangle(
    lengths: Sequence[int], window: int | None, sinks: int, ends: torch.Tensor, dtype: torch.dtype
) -> tuple[int, torch.Tensor | None]:
    """(first position that is read, mask [B, 1, 1, longest − first] float or None where all is seen)."""
    shortest, longest = min(lengths), max(lengths)
    first = 0 if window is None or sinks else max(0, shortest - window)
    if shortest == longest and longest - first <= (window or longest):
        return first, None
    at = torch.arange(first, longest, device=ends.device)[None, :]
    hidden = at >= ends[:, None]
    if window is not None:
        hidden |= (at < ends[:, None] - window) & (at >= sinks)
    return first, hiding(hidden, dtype)[:, None, None, :]


def hiding(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where something may be seen, −∞ where it is hidden: to be added to scores."""
    wide = torch.promote_types(dtype, torch.float32)
    return torch.zeros(hidden.shape, dtype=wide, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _check_form(form: str) -> None:
    if form not in FORMS:
        raise unknown("form of latent attention", form, FORMS)


def _require_latents(config: ModelConfig) -> None:
    if config.latent_attention is None:
        raise WorkbenchError(
            f"kv 'latent' keeps the latents of latent attention, and this model ({config.family}) has keys and "
            "values of their own; use kv 'contiguous', or 'window', 'shared_layers', 'quantized' for fewer bytes"
        )
