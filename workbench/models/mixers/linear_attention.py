"""Linear attention: attention without its softmax is a matrix that every token is added to.

Katharopoulos et al., "Transformers are RNNs" (arXiv 2006.16236). With φ(x) = elu(x) + 1 in place of the exponential,
equations 16 to 20 there:

    S_t = S_{t−1} + φ(k_t) v_tᵀ        [N, D] a head
    z_t = z_{t−1} + φ(k_t)             [N]
    y_t = φ(q_t)ᵀ S_t / φ(q_t)ᵀ z_t

Three forms of it: `recurrent` (as above, O(T)), `quadratic` (attention's own order, O(T²)) and `chunked` (quadratic
within a chunk, recurrent from chunk to chunk). The paper has no convolution; one of W = 4 before q, k and v stands
for the positions that it adds to the embedding. Sizes: E, N, H, W, chunk_size; D = E / H.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from workbench.models.config import ModelConfig
from workbench.models.mixers.contract import SequenceMixer, State, in_full_precision
from workbench.models.mixers.short_conv import ShortConv, conv_initial_value

Memory = tuple[torch.Tensor, torch.Tensor]  # S [B, H, N, D], z [B, H, N]


def phi(x: torch.Tensor) -> torch.Tensor:
    """φ(x) = elu(x) + 1 (equation 7), above 0: x + 1, and e^x below 0, where elu(x) = e^x − 1 would round to −1 from
    x = −17 on in float32."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def divided(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """y: above / below, and 0 where φ(q)ᵀ z is so small that it is 0."""
    return above / below.clamp(min=torch.finfo(below.dtype).tiny)


def recurrent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, memory: Memory
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k [B, T, H, N] after φ, v [B, T, H, D] -> y [B, T, H, D], S, z; one token after the other."""
    s, z = memory
    outputs = []
    for t in range(q.shape[1]):
        s = s + k[:, t, :, :, None] * v[:, t, :, None]
        z = z + k[:, t]
        above = torch.einsum("bhn,bhnd->bhd", q[:, t], s)
        outputs.append(divided(above, (q[:, t] * z).sum(-1, keepdim=True)))
    return torch.stack(outputs, dim=1), s, z


def quadratic(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, memory: Memory
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same as a masked matrix of all pairs of tokens, and what was remembered before beside it."""
    s, z = memory
    scores = torch.einsum("bthn,bshn->bhts", q, k).tril()
    above = torch.einsum("bhts,bshd->bthd", scores, v) + torch.einsum("bthn,bhnd->bthd", q, s)
    below = scores.sum(-1).transpose(1, 2) + torch.einsum("bthn,bhn->bth", q, z)
    return divided(above, below[..., None]), s + torch.einsum("bthn,bthd->bhnd", k, v), z + k.sum(1)


def chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, memory: Memory, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quadratic` over chunks of so many tokens, each from the memory that the one before left."""
    outputs = []
    for a in range(0, q.shape[1], chunk_size):
        b = a + chunk_size
        y, *left = quadratic(q[:, a:b], k[:, a:b], v[:, a:b], memory)
        memory = (left[0], left[1])
        outputs.append(y)
    return torch.cat(outputs, dim=1), *memory


class LinearAttention(SequenceMixer):
    """q, k, v = conv(proj(x)), then the memory above, then a projection back."""

    kind = "linear_attention"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        s, d = self.shape, config.hidden_size
        channels = 2 * s.num_heads * s.state_size + s.inner_size
        self.qkv = nn.Linear(d, channels, bias=s.bias)
        self.conv = ShortConv(channels, s.conv_width, bias=s.conv_bias)
        self.out = nn.Linear(s.inner_size, d, bias=s.bias)

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor | None:
        return conv_initial_value(name, shape, generator)

    def mix(self, x: torch.Tensor, states: State) -> tuple[torch.Tensor, State]:
        s = self.shape
        projected = self.qkv(x)
        with in_full_precision(x):
            mixed, conv = self.conv(projected, states["conv"])
            keys = s.num_heads * s.state_size
            q, k, v = mixed.split((keys, keys, s.inner_size), dim=-1)
            q, k = (phi(part).unflatten(-1, (s.num_heads, s.state_size)) for part in (q, k))
            v = F.silu(v).unflatten(-1, (s.num_heads, s.head_dim))
            memory = (states["kv"], states["keys"])
            if x.shape[1] == 1:
                y, kv, sums = recurrent(q, k, v, memory)
            else:
                y, kv, sums = chunked(q, k, v, memory, s.chunk_size)
        return self.out(y.flatten(-2).to(x.dtype)), {"conv": conv, "kv": kv, "keys": sums}
