"""Several drafts in order: the first that proposes anything is used, so a free one first, then a model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from workbench.errors import WorkbenchError
from workbench.models.fast import Model
from workbench.speculation.drafts.contract import Ask, Draft
from workbench.speculation.proposal import NOTHING, Proposal


class FirstOf(Draft):
    """Asks each draft in turn about the sequences for which those before it proposed nothing.

    Which draft is used depends on the tokens so far alone, so each proposal keeps its draft's distributions.
    """

    def __init__(self, *drafts: Draft, name: str | None = None) -> None:
        super().__init__()
        if len(drafts) < 2 or not all(isinstance(draft, Draft) for draft in drafts):
            raise WorkbenchError(f"FirstOf takes two drafts or more, got {[type(draft).__name__ for draft in drafts]}")
        self.drafts, self.name = drafts, name or ", else ".join(draft.name for draft in drafts)
        self.wants_hidden_states = any(draft.wants_hidden_states for draft in drafts)
        # since each draft was last asked about a sequence
        self._hidden_states: dict[tuple[int, Hashable], list[torch.Tensor]] = {}
        self._authors: dict[Hashable, Draft] = {}  # of the last proposal

    def check_fits(self, target: Model) -> None:
        for draft in self.drafts:
            draft.check_fits(target)

    def make_room(self, sequences: int) -> None:
        for draft in self.drafts:
            draft.make_room(sequences)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        proposals: dict[int, Proposal] = {}
        for number, draft in enumerate(self.drafts):
            silent = [index for index in range(len(asks)) if index not in proposals]
            for ask in asks:
                self._keep(number, draft, ask)
            if not silent:
                continue
            shown = [self._for(number, draft, asks[index]) for index in silent]
            calls, rows = draft.model_calls, draft.rows_processed
            for index, proposal in zip(silent, draft.propose(shown)):
                if len(proposal):
                    self._authors[asks[index].sequence] = draft
                    proposals[index] = replace(proposal, origins=proposal.origins or (draft.name,) * len(proposal))
            self.model_calls += draft.model_calls - calls
            self.rows_processed += draft.rows_processed - rows
        return [proposals.get(index, NOTHING) for index in range(len(asks))]

    def listen(self, ask: Ask, count: int) -> list[bool] | None:
        """The last draft's answer: it proposes wherever the others do not, so theirs are left out."""
        for number, draft in enumerate(self.drafts):
            self._keep(number, draft, ask)
        last = len(self.drafts) - 1
        draft = self.drafts[last]
        calls, rows = draft.model_calls, draft.rows_processed
        heard = draft.listen(self._for(last, draft, ask), count)
        self.model_calls += draft.model_calls - calls
        self.rows_processed += draft.rows_processed - rows
        return heard

    def observe(self, sequence: Hashable, proposal: Proposal, logits: torch.Tensor) -> None:
        """For the draft whose proposal it was."""
        if sequence in self._authors:
            self._authors[sequence].observe(sequence, proposal, logits)

    def release(self, sequence: Hashable) -> None:
        self._authors.pop(sequence, None)
        for number, draft in enumerate(self.drafts):
            draft.release(sequence)
            self._hidden_states.pop((number, sequence), None)

    def _keep(self, number: int, draft: Draft, ask: Ask) -> None:
        if draft.wants_hidden_states:
            self._hidden_states.setdefault((number, ask.sequence), []).append(ask.hidden)

    def _for(self, number: int, draft: Draft, ask: Ask) -> Ask:
        if not draft.wants_hidden_states:
            return ask
        return replace(ask, hidden_states=torch.cat(self._hidden_states.pop((number, ask.sequence))))
