"""Log-probabilities under the model itself, for those who ask: of generated tokens and of a prompt's.

They are log softmax of the model's logits, before any filter, bias or grammar (vLLM's `raw_logprobs`).

    prompt              a b c d e        a batch has logits of the rows that choose a token, here of e;
    row of              a b c d e        a `PromptBatch` has those of a … d behind them, each of which
    speaks of           b c d e first    speaks of the prompt token after it

A prompt's rows are those of the chunk that is computed: [rows of the chunk, V] at a time, never of the whole prompt.
What was noted once is not asked again, so a prompt that is recomputed costs what others cost.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace
from typing import Any

import torch

from workbench.decoding.sequence import LogProb, Sequence
from workbench.models.batch import Batch
from workbench.models.transfers import sent


def log_probs_of(logits: torch.Tensor, token_ids: abc.Sequence[int], top: int) -> list[LogProb]:
    """Of each token, by its row of logits [n, V], with the `top` most probable tokens of that row, the best first."""
    log_probs = logits.log_softmax(dim=-1)
    chosen = log_probs[range(len(token_ids)), list(token_ids)].tolist()
    if not top:
        return [LogProb(*one) for one in zip(token_ids, chosen)]
    values, ids = log_probs.topk(min(top, logits.shape[-1]), dim=-1)
    best = [tuple(zip(*row)) for row in zip(ids.tolist(), values.tolist())]
    return [LogProb(*one) for one in zip(token_ids, chosen, best)]


@dataclass(frozen=True)
class PromptBatch(Batch):
    """A batch with further rows of logits behind the others: those that speak of prompt tokens."""

    others: int = 0  # rows of logits before them
    prompts: tuple[tuple[Sequence, int, int], ...] = ()  # whose: the place of the first token, how many tokens

    def take(self, logits: torch.Tensor) -> torch.Tensor:
        """The others' rows; what the further ones say is noted in `Sequence.prompt_log_probs`."""
        at = self.others
        for sequence, first, count in self.prompts:
            ids, top = sequence.token_ids[first : first + count], sequence.request.prompt_log_probs or 0
            sequence.prompt_log_probs[first : first + count] = log_probs_of(logits[at : at + count], ids, top)
            at += count
        return logits[: self.others]


def with_prompt_rows(batch: Batch, sequences: abc.Sequence[Sequence | None], choosing: int) -> Batch:
    """The batch, with the rows of those prompt tokens whose log-probabilities are wanted and not known yet.

    sequences: whose tokens these are, None for padding. choosing: for so many of them a next token is chosen; where
    there are none the batch's own row of logits is one that nobody reads, and is left out.
    """
    rows, prompts = list[int](), list[tuple[Sequence, int, int]]()
    for sequence, begins, ends, first in zip(
        sequences, batch.query_starts, batch.query_starts[1:], batch.first_positions
    ):
        if sequence is None:
            continue
        noted = sequence.prompt_log_probs[first + 1 : first + 1 + ends - begins]  # one token further than the rows
        if count := noted.count(None):
            at = len(noted) - count
            rows += range(begins + at, begins + at + count)
            prompts.append((sequence, first + 1 + at, count))
    if not rows:
        return batch
    device = batch.token_ids.device
    [further] = sent([rows], dtype=torch.int64, device=device)
    others: Any = batch.logit_rows if batch.logit_rows is not None else torch.arange(batch.num_tokens, device=device)
    logit_rows: torch.Tensor | None = torch.cat((others, further)) if choosing else further
    if not choosing and len(rows) == batch.num_tokens:
        logit_rows = None
    given = vars(replace(batch, logit_rows=logit_rows))
    return PromptBatch(**given, others=len(others) if choosing else 0, prompts=tuple(prompts))
