"""Who sees whom in diffusion: objects that take the place of a kv, so that the model has no branch for it.

A block is L positions side by side. Attention is causal between blocks and bidirectional inside one (Arriola et al.,
BD3-LM, arXiv 2503.09573 §3): position p sees every position before the end of its own block. One block as long as the
text is masked diffusion, everything sees everything (MDLM, arXiv 2406.07524); a block of one token is the usual causal
attention.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import pairwise
from types import MappingProxyType

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError, check_whole
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.latent import UpProjections

ROWS_AT_ONCE = 128  # queries of one attention call in training: what lies right of them is never computed


def check_diffusion_config(config: ModelConfig) -> None:
    """Raises WorkbenchError for a shape whose attention cannot be made to look both ways here."""
    special = {
        "layers that keep a state, which read from left to right alone": bool(config.state_layers),
        "latent attention": config.latent_attention is not None,
        "layers that share keys": config.kv_sources is not None,
        "a sliding window": config.sliding_window is not None,
    }
    if found := [name for name, there in special.items() if there]:
        raise WorkbenchError(
            f"diffusion attends over plain keys and values of every layer; this shape has {' and '.join(found)}. Use a "
            "shape without, such as stdlib-3m-mha's"
        )


def sees(query_at: torch.Tensor, key_at: torch.Tensor, block_size: int) -> torch.Tensor:
    """[queries, keys] bool: a position sees what stands before the end of its own block."""
    return key_at[None, :] // block_size <= query_at[:, None] // block_size


class TrainingCanvas:
    """The attention of the objective, over whole texts of S tokens whose masks are drawn (`objective.paired_batch`).

    With blocks shorter than the text a sequence has 2·S rows: its S noisy ones, some of them masked, then the S clean
    ones, at the same positions. A noisy row sees the noisy rows of its own block and the clean rows of the blocks
    before it; a clean row sees the clean rows up to the end of its block (BD3-LM §3.2, the vectorized form). So one
    forward has every block denoised with the true text before it. With one block (L = S) there are only noisy rows.
    """

    def __init__(self, config: ModelConfig, block_size: int, length: int) -> None:
        check_diffusion_config(config)
        check_block_size(block_size, length)
        self.config, self.scale, self.block_size, self.length = config, config.attention_scale, block_size, length
        self.paired = block_size < length
        self._masks: dict[tuple[int, torch.device], torch.Tensor] = {}

    def begin(self, batch: Batch) -> None:
        rows = self.length * (2 if self.paired else 1)
        sizes = {b - a for a, b in pairwise(batch.query_starts)}
        assert sizes == {rows} and not any(batch.first_positions), f"every sequence brings {rows} rows"

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: Batch,
        up: UpProjections | None = None,
    ) -> torch.Tensor:
        assert k is not None and v is not None and up is None, "plain keys and values"
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        count = len(batch.sequences)
        q, k, v = (t.unflatten(0, (count, -1)).transpose(1, 2) for t in (q, k, v))  # [B, H, S or 2S, D]
        if not self.paired:
            out = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
            return out.transpose(1, 2).flatten(0, 1)
        noisy, clean = (slice(0, self.length), slice(self.length, 2 * self.length))
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for a, b in self._pieces():
            queries = torch.cat((q[:, :, noisy][:, :, a:b], q[:, :, clean][:, :, a:b]), dim=2)
            keys, values = (torch.cat((t[:, :, clean][:, :, :b], t[:, :, noisy][:, :, a:b]), dim=2) for t in (k, v))
            mask = self._mask(a, b, q.device)
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self.scale)
            parts.append((out[:, :, : b - a], out[:, :, b - a :]))
        whole = torch.cat([part[0] for part in parts] + [part[1] for part in parts], dim=2)
        return whole.transpose(1, 2).flatten(0, 1)

    def _pieces(self) -> list[tuple[int, int]]:
        """Whole blocks, about ROWS_AT_ONCE rows each."""
        step = max(1, ROWS_AT_ONCE // self.block_size) * self.block_size
        return [(a, min(a + step, self.length)) for a in range(0, self.length, step)]

    def _mask(self, a: int, b: int, device: torch.device) -> torch.Tensor:
        """[2·(b − a), b + (b − a)] bool: noisy rows a … b − 1, then clean ones, over clean keys up to b, then noisy."""
        if (a, device) not in self._masks:
            block = torch.arange(b, device=device) // self.block_size
            mine = block[a:b, None]
            noisy = torch.cat((block[None] < mine, block[None, a:b] == mine), dim=1)
            clean = torch.cat((block[None] <= mine, torch.zeros_like(noisy[:, b:])), dim=1)
            self._masks[a, device] = torch.cat((noisy, clean))
        return self._masks[a, device]


def check_block_size(block_size: int, length: int) -> None:
    """Raises WorkbenchError unless whole blocks make up the length."""
    check_whole("block_size", block_size, 1)
    if length % block_size:
        raise WorkbenchError(
            f"blocks of {block_size} tokens do not make up {length}: choose a block size that divides it"
        )


class CanvasKV:
    """Keys and values of one canvas while it is written: those of the finished blocks, and of the rows at hand.

    The rows of a batch are put behind the `length` cached ones, and each sees everything before the end of its own
    block. What a pass wrote for rows that still change (masked, or seen by none yet) the caller takes away again with
    `truncate`. So a finished block is sent once, and its keys stay; see `denoise.Canvas`.
    """

    def __init__(
        self,
        config: ModelConfig,
        block_size: int,
        max_tokens: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_diffusion_config(config)
        check_whole("block_size", block_size, 1)
        check_whole("max_tokens", max_tokens, 1)
        self.config, self.block_size, self.max_tokens = config, block_size, max_tokens
        shape = (2, config.num_layers, config.num_kv_heads, max_tokens, config.head_dim)
        self._stored = torch.zeros(shape, device=device, dtype=dtype)
        self._name: Hashable = None
        self._length = self._end = 0
        self._mask: torch.Tensor | None = None

    @property
    def lengths(self) -> Mapping[Hashable, int]:
        return MappingProxyType({} if self._name is None else {self._name: self._length})

    def begin(self, batch: Batch) -> None:
        """Raises WorkbenchError, and changes nothing, for another sequence, a gap, or more rows than there is room."""
        if len(batch.sequences) != 1 or self._name not in (None, batch.sequences[0]) or batch.parents is not None:
            raise WorkbenchError(
                f"this cache is of one canvas ({self._name!r}), without trees; a batch brought {batch.sequences}"
            )
        if batch.first_positions[0] != self._length:
            raise WorkbenchError(
                f"{self._length} rows are cached, so the next ones start at position {self._length}; this batch starts "
                f"at {batch.first_positions[0]}"
            )
        end = self._length + batch.num_tokens
        if end > self.max_tokens:
            raise WorkbenchError(f"this cache has room for {self.max_tokens} tokens, not for {end}")
        self._name = batch.sequences[0]
        first, self._length, self._end = self._length, end, end
        queries, keys = (torch.arange(a, end, device=self._stored.device) for a in (first, 0))
        mask = sees(queries, keys, self.block_size)
        self._mask = None if bool(mask.all()) else mask

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: Batch,
        up: UpProjections | None = None,
    ) -> torch.Tensor:
        assert k is not None and v is not None and up is None, "plain keys and values"
        first = self._end - batch.num_tokens
        for stored, new in zip(self._stored[:, layer], (k, v)):
            stored[:, first : self._end] = new.transpose(0, 1)
        keys, values = self._stored[:, layer, :, : self._end].unsqueeze(1)  # [1, H_kv, S, D] each
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=self._mask,
            scale=self.config.attention_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.squeeze(0).transpose(0, 1)

    def truncate(self, sequence: Hashable, length: int) -> None:
        """Forget the rows from `length` on. Raises for another sequence, and beyond the present length."""
        self._check_live(sequence)
        if not 0 <= length <= self._length:
            raise WorkbenchError(f"{self._length} rows are cached; they cannot be cut to {length}")
        self._length = length

    def release(self, sequence: Hashable) -> None:
        self._check_live(sequence)
        self._name, self._length = None, 0

    def _check_live(self, sequence: Hashable) -> None:
        if self._name is None or sequence != self._name:
            raise WorkbenchError(f"sequence {sequence!r} is not live here; live: {self._name!r}")

    @property
    def bytes_in_use(self) -> int:
        return self._stored[:, :, :, : self._length].numel() * self._stored.element_size()

    @property
    def bytes_reserved(self) -> int:
        return self._stored.numel() * self._stored.element_size()
