"""The plumbing of lab 08's exercises: what a scheduler keeps, and a real model that does what it says."""

from __future__ import annotations

import dataclasses
from collections import abc, deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from workbench.decoding.sequence import Request, Sequence
from workbench.errors import WorkbenchError, check_whole
from workbench.kv import Contiguous
from workbench.kv.blocks import BlockTables
from workbench.models.batch import Batch
from workbench.models.decoder import Decoder
from workbench.serving.scheduler import Work


def sequence_of(request: Request, number: int = 0, written: abc.Sequence[int] = (), computed: int = 0) -> Sequence:
    """The one text of a request, its stop tokens named, as a scheduler knows it. number: in the order of arrival."""
    request = dataclasses.replace(request, stop_token_ids=request.stop_token_ids or ())
    sequence = Sequence.of(request, 0, number, [*request.prompt_ids, *written])
    sequence.computed = computed
    return sequence


class SchedulerState:
    """A scheduler whose `add`, `abort`, `schedule` and `postprocess` are to be written. It has these attributes, and no
    others.

    tables: the pool, `BlockTables`. max_running: texts at work at a time. token_budget: rows of a step at most, at
    least one for each text at work. watermark: blocks that stay free when one more text is admitted beside others.
    waiting: the first of them is the next. running: in the order in which they were admitted. names: of all requests
    that were accepted so far.
    """

    def __init__(
        self, tables: BlockTables, *, max_running: int = 8, token_budget: int = 64, watermark: int = 0
    ) -> None:
        self.tables = tables
        self.max_running = check_whole("max_running", max_running, 1)
        self.token_budget = check_whole("token_budget", token_budget, max_running)
        self.watermark = check_whole("watermark", watermark, 0)
        if watermark >= tables.num_blocks:
            raise WorkbenchError(
                f"watermark={watermark} leaves nothing of a pool of {tables.num_blocks} blocks; choose fewer"
            )
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.names: set[Hashable] = set()
        self._numbers = 0

    def sequence(self, request: Request) -> Sequence:
        """What is to be known of a new request: nothing of it is computed."""
        self._numbers += 1
        return sequence_of(request, self._numbers)

    def step(self, run: Callable[[abc.Sequence[Work]], Mapping[Hashable, int]]) -> list[Sequence]:
        """Schedule, run, postprocess. Returns the finished sequences.

        `run(work)` gives, by `sequence.id`, the token after the last row of each piece of work."""
        answer: Any = self  # with the methods that are to be written
        work = answer.schedule()
        return answer.postprocess(work, run(work) if work else {})


class ModelRunner:
    """What `step(run)` takes: computes the work in one batch of a real model, and chooses the best token after each.

    Every text has a slot of its own in a contiguous cache. It is given up where a text begins again, or is done.
    """

    def __init__(self, model: Decoder, *, max_sequences: int, max_tokens: int) -> None:
        self.model = model
        self.kv = Contiguous(model.config, max_sequences=max_sequences, max_tokens=max_tokens)
        self.steps = self.rows = 0

    def __call__(self, work: abc.Sequence[Work]) -> dict[Hashable, int]:
        for piece in work:
            if piece.start == 0:
                self.forget(piece.sequence)
        batch = Batch.of(
            [piece.sequence.token_ids[piece.start : piece.start + piece.count] for piece in work],
            first_positions=[piece.start for piece in work],
            sequences=[piece.sequence.id for piece in work],
        )
        with torch.inference_mode():
            logits = self.model(batch, self.kv)
        self.steps, self.rows = self.steps + 1, self.rows + batch.num_tokens
        return {piece.sequence.id: int(row.argmax()) for piece, row in zip(work, logits)}

    def forget(self, sequence: Sequence) -> None:
        """The slot of this text is free again."""
        if sequence.id in self.kv.lengths:
            self.kv.release(sequence.id)
