"""Recurrent memory: attention within a segment, and a few memory vectors from segment to segment.

Bulatov, Kuratov and Burtsev, "Recurrent Memory Transformer" (arXiv 2207.06881): a text is read in segments of S tokens;
M memory vectors stand before each, and what the model makes of them at its end stands before the next. There memory
passes through all layers; here each layer has its own, as in the Block-Recurrent Transformer (Hutchins et al., arXiv
2203.07852), so that it is a state like the others and is served by the same engine:

    within a segment    y_t = attention of q_t over M memory vectors and the segment's tokens up to t
    at its end          memory ← memory + attention of the memory's own queries over memory and segment

Nothing else crosses the border, so decode reads at most M + S rows however long the text is. Two equal forms: token
by token, and all segments' tokens at once within each segment. The state is the memory, the rows of the segment
so far and how many those are. Sizes: E, H, N (M, memory vectors), chunk_size (S, tokens of a segment).
"""

from __future__ import annotations

import torch
from torch import nn

from workbench.models.config import ModelConfig
from workbench.models.mixers.contract import State, StateMixer, in_full_precision, state_dtype, wide


class RecurrentMemory(StateMixer):
    """One layer's memory. Keys are not turned: the only order within a segment is that of its mask."""

    kind = "recurrent_memory"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        s, d = self.shape, config.hidden_size
        self.start = nn.Parameter(torch.zeros(s.state_size * d))  # the memory before a text, [M, d]
        self.q, self.k, self.v = (nn.Linear(d, s.inner_size, bias=False) for _ in range(3))
        self.write = nn.Linear(d, s.inner_size, bias=False)  # the memory's queries
        self.back = nn.Linear(s.inner_size, d, bias=False)  # into the memory
        self.out = nn.Linear(s.inner_size, d, bias=False)

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor | None:
        return torch.randn(shape, generator=generator, device=generator.device) * 0.02 if name == "start" else None

    def initial_state(self, x: torch.Tensor, sequences: int | None = None) -> State:
        state = super().initial_state(x, sequences)
        start = self.start.to(state_dtype(x.dtype)).view(self.shape.state_size, -1)
        return state | {"memory": start.expand_as(state["memory"])}

    def _attention(self, q: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """q [B, T, E] over the keys and values of rows [B, R, d], where allowed [B or 1, T, R] -> [B, T, E]."""
        heads, size = self.shape.num_heads, self.shape.head_dim
        q, k, v = (t.unflatten(-1, (heads, size)).transpose(1, 2) for t in (q, self.k(rows), self.v(rows)))
        with in_full_precision(q):
            scores = wide(q) @ wide(k).mT * size**-0.5
            weights = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
            return (weights @ wide(v)).transpose(1, 2).flatten(-2).to(q.dtype)

    def _segment(self, x: torch.Tensor, memory: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """x [B, T, d], tokens of one segment after those `before` [B, P, d] -> y [B, T, d]."""
        rows = torch.cat((memory, before, wide(x)), dim=1).to(x.dtype)
        old, length = memory.shape[1] + before.shape[1], x.shape[1]
        allowed = torch.ones(1, length, old + length, dtype=torch.bool, device=x.device).tril(old)
        return self.out(self._attention(self.q(x), rows, allowed))

    def _remembered(self, memory: torch.Tensor, segment: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The memory after a whole segment [B, S, d]."""
        rows = torch.cat((memory, segment), dim=1).to(dtype)
        everything = torch.ones(1, 1, rows.shape[1], dtype=torch.bool, device=rows.device)
        news = self._attention(self.write(memory.to(dtype)), rows, everything)
        return memory + wide(self.back(news))

    def _run(
        self, x: torch.Tensor, memory: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [B, T, d] from memory [B, M, d] and the segment's rows before it [B, P, d]: y, memory, rows."""
        outputs, size = [], self.shape.chunk_size
        while x.shape[1]:
            part = x[:, : size - before.shape[1]]
            outputs.append(self._segment(part, memory, before))
            before, x = torch.cat((before, wide(part)), dim=1), x[:, part.shape[1] :]
            if before.shape[1] == size:
                memory, before = self._remembered(memory, before, x.dtype), before[:, :0]
        return torch.cat(outputs, dim=1), memory, before

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        state = self.initial_state(x, len(x))
        return self._run(x, state["memory"], state["segment"][:, :0])[0]

    def chunk(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        filled = int(state["filled"])
        y, memory, rows = self._run(x[None], state["memory"][None], state["segment"][None, :filled])
        segment = torch.zeros_like(state["segment"])
        segment[: rows.shape[1]] = rows[0]
        filled_now = torch.full_like(state["filled"], rows.shape[1])
        return y[0], {"memory": memory[0], "segment": segment, "filled": filled_now}

    def step(self, x: torch.Tensor, states: State) -> tuple[torch.Tensor, State]:
        """The B sequences stand at different places of their segments: places beyond are masked."""
        size, filled = self.shape.chunk_size, states["filled"].long()
        places = torch.arange(size, device=x.device)
        here = places == filled  # [B, S]
        segment = torch.where(here[..., None], wide(x)[:, None], states["segment"])
        rows = torch.cat((states["memory"], segment), dim=1).to(x.dtype)
        seen = torch.cat((torch.ones_like(here[:, :1]).expand(-1, self.shape.state_size), places <= filled), dim=1)
        y = self.out(self._attention(self.q(x)[:, None], rows, seen[:, None]))[:, 0]
        full = filled == size - 1  # [B, 1]
        memory = self._remembered(states["memory"], segment, x.dtype) if full.any() else states["memory"]
        memory = torch.where(full[..., None], memory, states["memory"])
        return y, {
            "memory": memory,
            "segment": torch.where(full[..., None], 0.0, segment),
            "filled": torch.where(full, 0.0, states["filled"] + 1),
        }
