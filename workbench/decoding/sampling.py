"""From logits to a token: a request's filters in order, the distribution that they leave, and one draw from it.

`decoding.filters` has the filters and `decoding.draws` the random numbers; here are the settings that choose among the
filters, the `TokenDistribution` of a request, and the `Sampler` that chooses a sequence's next token.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from workbench.decoding.draws import BestDraws, Draws, RandomDraws
from workbench.decoding.filters import (
    FILTERS,
    REMOVED,
    SMALLEST_TEMPERATURE,
    check_logits,
    checked_bias,
    filter_rows,
    filter_stages,
    not_one_row,
)
from workbench.errors import plain_number

TextOf = Callable[[int], Sequence[int]]  # row of logits -> the token ids before the token that this row predicts


# -- a request's filters ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingSettings:
    """How a token is chosen. The default is greedy: temperature 0 takes the best token.

    With temperature 0 the bias and the penalties still count (they change which token is best); top_k, top_p and min_p
    never remove the best token, so they cannot matter. logit_bias: {token id: −100 … 100}, added to the model's logits
    before all other filters; kept as sorted pairs. Raises WorkbenchError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_bias", checked_bias(self.logit_bias))
        row = torch.zeros(1)  # each filter checks its own value: one place for each range
        for name, function in FILTERS.items():
            value = getattr(self, name)
            if name == "logit_bias" or (name == "top_k" and value is None):
                continue
            if type(value) is float and value == _DEFAULTS[name]:
                continue  # as most are; a server makes these settings for every request
            function(row, (), value) if name.endswith("penalty") else function(row, value)
            if name != "top_k":
                object.__setattr__(self, name, float(plain_number(value)))

    @property
    def greedy(self) -> bool:
        return self.temperature < SMALLEST_TEMPERATURE  # 0, or so near that it is the same

    def active(self) -> list[str]:
        """Names of the filters that change anything, in order. Greedy ends with the temperature."""
        names = [name for name in FILTERS if getattr(self, name) != _NEUTRAL[name]]
        return names[: names.index("temperature") + 1] if self.greedy else names


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingSettings)}
_NEUTRAL = _DEFAULTS | {"temperature": 1.0}
GREEDY = SamplingSettings()


# -- the distribution of the next token --------------------------------------------------------------------


class Grammar(Protocol):
    """A grammar's state of one sequence: which tokens may come next, and which have to."""

    def allowed(self, generated_ids: Sequence[int]) -> torch.Tensor: ...
    def forced(self, generated_ids: Sequence[int]) -> list[int]: ...
    def again(self) -> Grammar: ...  # for another sequence


class TokenDistribution:
    """From logits to the probabilities that a request's tokens are drawn from: a grammar's mask, then all filters.

    One object serves target and draft, so that both are filtered alike. The grammar comes first: what it forbids has
    −inf before any filter sees it, so top-p measures its mass among legal tokens. After a text that is not legal
    nothing is masked: no such text is ever kept.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        prompt_ids: Sequence[int],
        *,
        replace: Mapping[str, Callable[..., torch.Tensor]] | None = None,
        guide: Grammar | None = None,
    ) -> None:
        self.settings, self.greedy = settings, settings.greedy
        self._num_prompt_tokens, self._prompt_ids = len(prompt_ids), prompt_ids
        self._replace, self.guide = dict(replace or {}), guide
        self._active = settings.active()
        self.row_by_row = bool(self._replace) or any(name.endswith("penalty") for name in self._active)
        self._at_one: SamplingSettings | None = None
        self._only_argmax = self._active == ["temperature"] and settings.greedy and not self._replace
        self.filters_alone = not self._replace and guide is None
        """The settings say it all: no grammar, and no function of the user's."""
        self.is_argmax = self._only_argmax and guide is None
        """Greedy, and no filter, penalty or grammar has a say: the token of the highest logit."""

    def again(self) -> TokenDistribution:
        """For another sequence of the same request, whose grammar has a state of its own."""
        if self.guide is None:
            return self
        other = copy.copy(self)
        other.guide = self.guide.again()
        return other

    def probabilities(self, logits: torch.Tensor, text_of: TextOf) -> torch.Tensor:
        """[n, V] float64 on the CPU from logits [n, V]. Greedy: the best token has 1."""
        return self._filtered(self.settings, logits, text_of).double().cpu().softmax(dim=-1)

    def confidences(self, logits: torch.Tensor, text_of: TextOf) -> torch.Tensor:
        """`probabilities`, at temperature 1 where decoding is greedy. What a draft drafts by: greedy or not, it can
        say how sure it is of its first, second and third choice."""
        if self._at_one is None:
            self._at_one = dataclasses.replace(self.settings, temperature=1.0) if self.greedy else self.settings
        return self._filtered(self._at_one, logits, text_of).double().cpu().softmax(dim=-1)

    def best(self, logits: torch.Tensor, text_of: TextOf) -> list[int]:
        """[n] the most probable token of each row."""
        if self._only_argmax:
            logits = self._masked(logits, text_of)
            check_logits(logits[0] if len(logits) == 1 else logits, "the model")
            return logits.argmax(dim=-1).tolist()
        return self._filtered(self.settings, logits, text_of).argmax(dim=-1).tolist()

    def _filtered(self, settings: SamplingSettings, logits: torch.Tensor, text_of: TextOf) -> torch.Tensor:
        logits = self._masked(logits, text_of)
        if self.row_by_row:
            rows = [
                filter_stages(settings, row, self._prompt_ids, self._generated(text_of(i)), self._replace)[-1][1]
                for i, row in enumerate(logits)
            ]
            return torch.stack(rows)
        check_logits(logits[0] if len(logits) == 1 else logits, "the model")
        return filter_rows(logits, settings, check=True)

    def _masked(self, logits: torch.Tensor, text_of: TextOf) -> torch.Tensor:
        if self.guide is None:
            return logits
        masks = [self.guide.allowed(self._generated(text_of(i))) for i in range(len(logits))]
        allowed = torch.stack([mask if mask.any() else torch.ones_like(mask) for mask in masks])
        return logits.masked_fill(~allowed.to(logits.device), REMOVED)

    def _generated(self, token_ids: Sequence[int]) -> Sequence[int]:
        return token_ids[self._num_prompt_tokens :]


# -- from a distribution to a token ------------------------------------------------------------------------


def draws_for(settings: SamplingSettings | TokenDistribution, seed: int | None) -> RandomDraws | BestDraws:
    """A request's own random numbers; torch's global ones are never touched. None: a fresh seed."""
    if settings.greedy:
        return BestDraws()
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return RandomDraws(generator)


class Sampler:
    """How one sequence's tokens are chosen: by its distribution and its draws."""

    __slots__ = ("distribution", "draws")

    def __init__(self, distribution: TokenDistribution, draws: Draws) -> None:
        self.distribution, self.draws = distribution, draws

    def choose(self, logits: torch.Tensor, token_ids: Sequence[int]) -> int:
        """The token id after these, from the model's logits [V]. The one place where a next token is chosen."""
        if logits.dim() != 1:
            raise not_one_row(logits)
        if self.distribution.greedy:
            return self.distribution.best(logits[None], lambda _: token_ids)[0]
        return self.draws.choose(self.distribution.probabilities(logits[None], lambda _: token_ids)[0])

    @classmethod
    def choose_together(cls, samplers: Sequence[Sampler], logits: torch.Tensor) -> dict[int, int]:
        """{row: token} of those rows of logits [n, V] that are chosen in one call, each as by `choose`; here none."""
        return {}
