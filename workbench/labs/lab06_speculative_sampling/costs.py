"""What a round is made of: a plain step, a drafted token, a verification of K + 1 rows. Predicted, and timed apart.

The parts are timed without the whole, so that a speed-up can be predicted from them and then be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from workbench.errors import WorkbenchError
from workbench.experiments.inputs import dtype_of, shape_of
from workbench.experiments.steps import kv_element_bytes
from workbench.instruments.costs import predict, prepared_on, step_costs
from workbench.kv import Contiguous
from workbench.labs.lab06_speculative_sampling.inputs import distribution_for, sequence_of, speculator_for
from workbench.models.fast import Model
from workbench.speculation import Ask, Draft, ModelDraft, Proposal

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction
    from workbench.instruments.device import Ceilings

PLAIN, DRAFT = "step", "draft"  # the parts; the others are numbers: K of a verification


def predicted_pass(ceilings: Ceilings, model: str | Model, *, rows: int, context: int, texts: int = 1) -> Prediction:
    """One pass over `rows` new tokens of each of `texts` texts that have `context` tokens each, logits for every row,
    in the type that the model is loaded in."""
    dtype = dtype_of(model)
    costs = step_costs(
        shape_of(model),
        new_tokens=[rows] * texts,
        contexts=[context] * texts,
        logit_rows=rows * texts,
        weight_bytes_per_element=dtype.itemsize,
        kv_bytes_per_element=kv_element_bytes(ceilings, str(dtype).removeprefix("torch.")),
        kv="contiguous",
        arrangement=prepared_on(ceilings, shape_of(model)),
    )
    return predict(costs, ceilings, dtype)


class GivenDraft(Draft):
    """Knows what to propose and takes no time for it: what is left of a round is the verification."""

    name = "given"

    def __init__(self) -> None:
        super().__init__()
        self.chains: dict[object, Sequence[int]] = {}

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [Proposal.chain(self.chains[ask.sequence][: ask.limit]) for ask in asks]


class RoundParts:
    """Some texts at one place, from which each part of a round can be run again and again.

    tokens: for each text all its tokens and, behind them, at least `longest` that are drafted for it. Decoding is
    greedy.
    """

    def __init__(
        self, bench: Bench, target: Model, draft: Model, tokens: Sequence[Sequence[int]], longest: int
    ) -> None:
        if longest >= min(map(len, tokens)):
            raise WorkbenchError(f"texts of {min(map(len, tokens))} tokens have none left to draft {longest}")
        self.bench, self.longest = bench, longest
        self._texts = [list(one[: len(one) - longest]) for one in tokens]
        self._room = max(map(len, tokens))
        self._given = GivenDraft()
        self._given.chains = {i: list(one[len(one) - longest :]) for i, one in enumerate(tokens)}
        distribution = distribution_for(self._texts[0], temperature=0.0)
        self._sequences = [
            sequence_of(i, text, distribution=distribution, lengths=longest, max_new_tokens=self._room)
            for i, text in enumerate(self._texts)
        ]
        self._plain = speculator_for(target, None, texts=len(tokens), tokens=self._room)
        self._verify = speculator_for(target, self._given, texts=len(tokens), tokens=self._room)
        memory = self._plain.kv
        assert isinstance(memory, Contiguous)
        self._draft = ModelDraft(draft, max_sequences=len(tokens), max_tokens=memory.max_tokens)
        for speculator in (self._plain, self._verify):
            speculator.run(self._sequences)
            self._rewind(speculator, begun=speculator is self._plain)
        for sequence in self._sequences:
            sequence.drafting.begun = True
        self.run(DRAFT)  # its cache gets the texts

    def run(self, part: str | int) -> float:
        """Seconds: of one plain step, of `longest` drafted tokens for each text, or of verifying so many."""
        if part == DRAFT:
            return self._timed(lambda: self._draft.propose(self._asks(self.longest)))
        speculator = self._plain if part == PLAIN else self._verify
        if part != PLAIN:
            for sequence in self._sequences:
                sequence.drafting.lengths.K = part
        seconds = self._timed(lambda: speculator.run(self._sequences))
        self._rewind(speculator)
        return seconds

    def _timed(self, function: Callable[[], object]) -> float:
        return self.bench.measure(function, repeats=1, warmup=0)[0]

    def _asks(self, limit: int) -> list[Ask]:
        return [
            Ask(w.id, w.token_ids, limit, limit, w.sampler.distribution, w.sampler.draws, lambda confidence: True)
            for w in self._sequences
        ]

    def _rewind(self, speculator, *, begun: bool = False) -> None:
        """As if nothing had been written; outside the clock. begun: the prompt is to go in once more, elsewhere."""
        for sequence, text in zip(self._sequences, self._texts):
            sequence.token_ids[:] = text
            if begun:
                sequence.drafting.begun = False
            speculator.kv.truncate(sequence.id, len(text) - 1)
