"""One step: what the kv lacks of each sequence goes through the model in one flat batch, and each gets its next token.

    sequence A   … a b c        c is not in the kv            batch   c  x y z  p q
    sequence B   x y z          nothing is, yet               logits  ↑      ↑          a row for A and one for B
    chunk of C   p q            a part of C's prompt

Nothing here knows of drafts: `speculation.engine` wraps a step, and sends drafted tokens beside these.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from workbench.decoding.jump import forced_tokens
from workbench.decoding.log_probs import PromptBatch, log_probs_of, with_prompt_rows
from workbench.decoding.sequence import LogProb, NewToken, Sequence
from workbench.kv.contract import KV
from workbench.models.batch import Batch
from workbench.models.fast import Model, hidden_and_logits
from workbench.models.graphs import GraphedSteps


@dataclass(frozen=True)
class Chunk:
    """Tokens that go through the model in the same batch without logits: a part of a prompt, or padding."""

    id: Hashable  # of a sequence in the kv
    token_ids: abc.Sequence[int]
    sequence: Sequence | None = None  # whose prompt it is


class StepOutput(NamedTuple):
    """What a step did for one sequence. Its tokens are appended already."""

    emitted: tuple[NewToken, ...]  # one, then those that a grammar forces
    rows: int  # tokens of this sequence that the model processed
    error: Exception | None = None  # then nothing was generated


class Step:
    """A model and its kv. Owns no sequences: release them yourself.

    model: a decoder, or what stands for one (`models.graphs.GraphedSteps`).
    rows_processed and model_calls count exactly what went through the model.
    """

    def __init__(self, model: Model | GraphedSteps, kv: KV) -> None:
        self.model, self.kv = model, kv
        self.rows_processed = self.model_calls = 0

    def run(
        self, sequences: abc.Sequence[Sequence], chunks: abc.Sequence[Chunk] = (), *, isolate: bool = False
    ) -> list[StepOutput]:
        """The next token of each sequence. isolate: an error in choosing a sequence's token (its filters, its grammar)
        goes to that sequence's output, and the others go on."""
        starts = [self.start(sequence) for sequence in sequences]
        new = [sequence.token_ids[start:] for sequence, start in zip(sequences, starts)]
        logits = self.forward(self.batch(sequences, new, starts, chunks))
        chosen = self._chosen(sequences, logits)
        outputs = []
        for row, (sequence, sent) in enumerate(zip(sequences, new)):
            length, emitted, failed = len(sequence.token_ids), tuple[NewToken, ...](), None
            try:
                if (token := chosen.get(row)) is None:
                    token = sequence.sampler.choose(logits[row], sequence.token_ids)
                emitted = self.emit(sequence, token, logits[row])
            except Exception as error:  # of a filter, a grammar, a learner's part: it ends the sequence
                if not isolate:
                    raise
                del sequence.token_ids[length:]
                failed = error
            outputs.append(StepOutput(emitted, len(sent), failed))
        return outputs

    def _chosen(self, sequences: abc.Sequence[Sequence], logits: torch.Tensor) -> dict[int, int]:
        """{row: token} of the rows that are chosen together; the others are chosen one by one."""
        best = best_of_all(sequences, logits)
        if best is None:
            samplers = [sequence.sampler for sequence in sequences]
            return samplers[0].choose_together(samplers, logits) if samplers else {}
        if isinstance(self.model, GraphedSteps):
            self.model.note_best(best)
        return dict(enumerate(best))

    def start(self, sequence: Sequence) -> int:
        """Number of its tokens in the kv."""
        return self.kv.lengths.get(sequence.id, 0)

    def batch(
        self,
        sequences: abc.Sequence[Sequence],
        new: abc.Sequence[abc.Sequence[int]],
        starts: abc.Sequence[int],
        chunks: abc.Sequence[Chunk],
        *,
        parents: abc.Sequence[abc.Sequence[int] | None] | None = None,
        logits: abc.Sequence[int] | None = None,
    ) -> Batch:
        """One flat batch: the new tokens of each sequence, then the chunks. logits: for so many last tokens of each
        sequence, default 1. parents: of drafted trees, see `Batch.of`."""
        wanted: str | list[int] = "last"
        if chunks or logits is not None:
            wanted = [*(logits or [1] * len(sequences)), *([0] * len(chunks))]
            if not sequences:
                wanted[0] = 1  # a batch needs a row of logits; this one is not used
        batch = Batch.of(
            [*new, *(chunk.token_ids for chunk in chunks)],
            first_positions=[*starts, *(self.kv.lengths.get(chunk.id, 0) for chunk in chunks)],
            sequences=[*(sequence.id for sequence in sequences), *(chunk.id for chunk in chunks)],
            parents=None if parents is None else [*parents, *([None] * len(chunks))],
            logits=wanted,
            device=self.model.batches_on if isinstance(self.model, GraphedSteps) else self.model.device,
        )
        whose = [*sequences, *(chunk.sequence for chunk in chunks)]
        if not any(sequence is not None and sequence.prompt_log_probs for sequence in whose):
            return batch
        return with_prompt_rows(batch, whose, len(sequences))

    def forward(self, batch: Batch) -> torch.Tensor:
        """[rows asked for, V] logits, at least float32."""
        with torch.inference_mode():
            logits = self.model(batch, self.kv)
        return self._counted(batch, logits)

    def forward_with_hidden(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The logits, and the hidden states [n, d] after the last norm of each sequence's and chunk's tokens."""
        with torch.inference_mode():
            hidden, logits = hidden_and_logits(self.model, batch, self.kv)
        return self._counted(batch, logits), list(hidden.split([b - a for a, b in pairwise(batch.query_starts)]))

    def emit(self, sequence: Sequence, token: int, logits: torch.Tensor, kind: str = "plain") -> tuple[NewToken, ...]:
        """Append the model's own token, then those that a grammar forces. logits [V]: from which it was chosen."""
        said = LogProb(token, None)
        if sequence.log_probs is not None:
            [said] = log_probs_of(logits[None], [token], sequence.log_probs)
        emitted = (NewToken(token, said.log_prob, "target", kind, said.top),)
        ended = sequence.append(token)
        return emitted if ended or sequence.guide is None else emitted + forced_tokens(sequence)

    def release(self, sequence_id: Hashable) -> None:
        """Release a sequence in the kv; does nothing for an unknown one."""
        if sequence_id in self.kv.lengths:
            self.kv.release(sequence_id)

    def _counted(self, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
        self.rows_processed += batch.num_tokens
        self.model_calls += 1
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return batch.take(logits) if isinstance(batch, PromptBatch) else logits


def best_of_all(sequences: abc.Sequence[Sequence], logits: torch.Tensor) -> list[int] | None:
    """The argmax of each row, if every sequence takes its highest logit. None: choose one by one. That includes rows
    that are no distribution, so that the right sequence gets the error."""
    if not sequences or not all(sequence.sampler.distribution.is_argmax for sequence in sequences):
        return None
    if not logits.amax(dim=-1).isfinite().all():
        return None
    return logits.argmax(dim=-1).tolist()
