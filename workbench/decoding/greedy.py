"""Greedy decoding by a model whose step is one compiled call: what Python does for a token is that call.

    token_loop        forward: a batch, its room in the kv, the model's operations one by one;  choose: checks, argmax
    GreedyRunner      one call, which embeds, attends, writes to the cache and chooses;  one token and its
                      log-probability are read from it

`token_loop` is the oracle, and takes over for every token that is not one call: the first, which follows a prompt, and
whatever the model or the kv refuses (`FastDecoder.step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from workbench.decoding.runner import ModelRunner
from workbench.kv import KV
from workbench.models.fast import FastDecoder


class GreedyRunner(ModelRunner):
    """One request that takes the highest logit, nothing else having a say, by a model that may take steps with
    its kv (`FastDecoder.may_step`)."""

    def __init__(self, model: FastDecoder, kv: KV) -> None:
        super().__init__(model, kv)
        self._fast = model
        self._said: tuple[int, float] | None = None  # of the last step: its token, and the log of its probability

    def tokens(
        self,
        prompt_ids: Sequence[int],
        choose: Callable[[torch.Tensor, list[int]], int],
        max_new_tokens: int,
        stop_token_ids: Sequence[int] = (),
    ) -> Iterator[int]:
        """The tokens of `token_loop(self.forward, prompt_ids, choose, …)`."""
        token_ids = list(prompt_ids)
        for index in range(max_new_tokens):
            token_id = self._next(token_ids, choose) if index else None
            if token_id is None:
                self._said = None
                token_id = choose(self.forward(token_ids)[-1], token_ids)
            token_ids.append(token_id)
            yield token_id
            if token_id in stop_token_ids:
                return

    def log_prob(self, token_id: int) -> float:
        if self._said is not None and self._said[0] == token_id:
            return self._said[1]
        return super().log_prob(token_id)

    def _next(self, token_ids: list[int], choose: Callable[[torch.Tensor, list[int]], int]) -> int | None:
        """The next token by one call; None where it has to go through `forward`."""
        stepped = self._fast.step(token_ids[-1], len(token_ids) - 1, self._name, self._kv)
        if stepped is None:
            return None
        logits, said = stepped
        self.rows_processed += 1
        self.model_calls += 1
        self._last_row = logits[0].to(torch.promote_types(logits.dtype, torch.float32))
        self._said = None
        if said is not None:
            token, log_prob, top = said.tolist()
            if math.isfinite(top):
                self._said = int(token), log_prob
                return int(token)
        return choose(self._last_row, token_ids)  # which says what is wrong where the row is no distribution
