"""What `drafts.peers` predicts of our ways: what a round takes, given what it gained.

    seconds per token = (prompt + Σ over rounds (pass over its rows + calls of the draft · its step)) / new tokens

After the first token it is the rounds alone, and the draft's own pass over the prompt, for one token fewer.
How many tokens a draft gets right no shape tells. So rounds, their rows and the calls of the draft are those that the
same run counted, and only what each of them takes is predicted: by bytes, by the arithmetic of the loops that compute
them (`experiments.loops`) and by calls. Not in it: the search of prompt lookup, acceptance, the cut of the cache, and
that a pass of several rows says a distribution of each.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.experiments.loops import Loops, steps_taken
from workbench.instruments.costs import predict, step_costs
from workbench.kv import stored_dtype

if TYPE_CHECKING:
    from workbench.instruments.costs import StepCosts
    from workbench.instruments.device import Ceilings
    from workbench.models.fast import Model
    from workbench.quantization import QuantizationRecipe
    from workbench.speculation.runner import SpeculationStats

SCALE_BYTES = 2  # of a group, float16
COMPILED_ROWS = 9  # of the largest verification that is one compiled call


@dataclass(frozen=True)
class Passes:
    """Seconds of a model's passes on this machine. recipe: of its codes, symmetric, head included; None: as trained."""

    ceilings: Ceilings
    model: Model
    recipe: QuantizationRecipe | None = None
    inputs: str = "exact"  # as `prepare` was given it
    _known: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def __call__(self, rows: int, context: int, logit_rows: int) -> float:
        """Of one over `rows` new tokens of a text with `context` others."""
        key = rows, context, logit_rows
        if key not in self._known:
            self._known[key] = predict(self.costs(*key), self.ceilings, self.model.dtype).seconds
        return self._known[key]

    def costs(self, rows: int, context: int, logit_rows: int) -> StepCosts:
        size: dict[str, Any] = {}
        if self.recipe is not None:
            assert self.recipe.group is not None, "of a draft that `drafts.peers` rounds, in groups"
            codes = {"linear": self.recipe.bits, "head": self.recipe.head_bits}
            share = SCALE_BYTES / self.recipe.group
            size = {f"{part}_bytes_per_element": bits / 8 + share for part, bits in codes.items() if bits is not None}
        whole = step_costs(
            self.model.config,
            new_tokens=[rows],
            contexts=[context],
            logit_rows=logit_rows,
            weight_bytes_per_element=self.model.dtype.itemsize,
            kv_bytes_per_element=stored_dtype(self.model.dtype, "cpu").itemsize,
            kv="contiguous",
            arrangement="fast",
            **size,
        )
        return self._loops.counted(whole)

    @functools.cached_property
    def _loops(self) -> Loops:
        bits, head_bits = (None, None) if self.recipe is None else (self.recipe.bits, self.recipe.head_bits)
        return Loops(steps_taken(self.model), self.model.dtype, bits, head_bits, self.inputs, COMPILED_ROWS)


def seconds_per_token(
    target: Passes,
    draft: Passes | None,
    prompt: int,
    new_tokens: int,
    counted: SpeculationStats | None,
    *,
    whole: bool = True,
) -> float:
    """counted: what speculation did in this request; None: it was written token by token. draft: None where drafts are
    no model's. whole: of the request; else of its tokens after the first, whose pass the prompt is."""
    middle = prompt + new_tokens // 2
    rounds = [1] * (new_tokens - 1) if counted is None else counted.rows_per_round
    seconds = sum(target(rows, middle, rows) for rows in rounds) + (target(prompt, 0, 1) if whole else 0.0)
    if draft is not None and counted is not None and counted.draft_calls:
        seconds += draft(prompt, 0, 1) + (counted.draft_calls - 1) * draft(1, middle, 1)
    return seconds / (new_tokens if whole else new_tokens - 1)
