"""The probabilities a token is drawn from, as one object: filters, penalties and a grammar, for target and draft alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from workbench.decoding.sampling import FILTERS, REMOVED, SamplingSettings, check_logits, filter_stages

TextOf = Callable[[int], list[int]]


class Allows(Protocol):
    """A grammar's state: which tokens may follow."""

    def allowed(self, generated_ids: Sequence[int]) -> torch.Tensor: ...


class SamplingLaw:
    """`speculation.drafts.contract.Law` of one request: SamplingSettings, replaced filters, and a grammar.

    The grammar comes first: what it forbids has −inf before any filter sees it, so top-p measures its mass among legal
    tokens. After a text that is not legal nothing is masked: no such text is ever kept.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        prompt_ids: Sequence[int],
        *,
        replace: Mapping[str, Callable[..., torch.Tensor]] | None = None,
        guide: Allows | None = None,
    ) -> None:
        self.settings, self.greedy = settings, settings.greedy
        self._prompt, self._replace, self._guide = list(prompt_ids), dict(replace or {}), guide
        active = settings.active()
        self._reads_text = any(name.endswith("penalty") for name in active)
        self._row_by_row = self._reads_text or bool(self._replace)
        self._at_one = dataclasses.replace(settings, temperature=1.0) if settings.greedy else settings
        self._plainly_best = active == ["temperature"] and settings.greedy and not self._replace
        self.is_argmax = self._plainly_best and guide is None

    def rows(self, logits: torch.Tensor, text_of: TextOf) -> torch.Tensor:
        """[n, V] float64 on the CPU: what `choose` draws from. Greedy: the best token has 1."""
        return self._filtered(self.settings, logits, text_of).double().cpu().softmax(dim=-1)

    def beliefs(self, logits: torch.Tensor, text_of: TextOf) -> torch.Tensor:
        """`rows`, at temperature 1 where the law is greedy."""
        return self._filtered(self._at_one, logits, text_of).double().cpu().softmax(dim=-1)

    def best(self, logits: torch.Tensor, text_of: TextOf) -> list[int]:
        """[n] the best token of each row."""
        if self._plainly_best:
            logits = self._masked(logits, text_of)
            if len(logits) == 1:  # a plain step, and it counts
                row = logits[0]
                check_logits(row, "the model")
                return [int(row.argmax())]
            check_logits(logits, "the model")
            return logits.argmax(dim=-1).tolist()
        return self._filtered(self.settings, logits, text_of).argmax(dim=-1).tolist()

    def _filtered(self, settings: SamplingSettings, logits: torch.Tensor, text_of: TextOf) -> torch.Tensor:
        logits = self._masked(logits, text_of)
        if self._row_by_row:
            return torch.stack([self._one(settings, row, text_of(i)) for i, row in enumerate(logits)])
        check_logits(logits[0] if len(logits) == 1 else logits, "the model")
        for name in settings.active():
            logits = FILTERS[name](logits, getattr(settings, name))
        return logits

    def _one(self, settings: SamplingSettings, row: torch.Tensor, text: list[int]) -> torch.Tensor:
        generated = text[len(self._prompt) :]
        stages = filter_stages(settings, row, self._prompt, generated, self._replace)
        return stages[-1][1]

    def _masked(self, logits: torch.Tensor, text_of: TextOf) -> torch.Tensor:
        if self._guide is None:
            return logits
        allowed = torch.stack([self._allowed(text_of(i)) for i in range(len(logits))]).to(logits.device)
        return logits.masked_fill(~allowed, REMOVED)

    def _allowed(self, text: list[int]) -> torch.Tensor:
        allowed = self._guide.allowed(text[len(self._prompt) :])
        return allowed if allowed.any() else torch.ones_like(allowed)
