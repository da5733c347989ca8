"""Claims about the distribution of what is written, through the real rounds and the real drafts, as equalities of
fractions.

Target and draft are models of a few tokens whose rows of logits say which fractions they stand for; all else is the
code that runs on real models: `Speculator.round`, the drafts with their caches, the rule. `enumerate_outcomes` goes
through all that can happen. A planted bug in any of these parts gives another distribution.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from workbench.decoding.sampling import Sampler
from workbench.decoding.sequence import Sequence
from workbench.decoding.step import Step
from workbench.speculation import Drafting, Fixed, ModelDraft, Proposal, Speculator, Threshold, Verdict, engine, verify
from workbench.speculation import rule as the_rule
from workbench.speculation.drafts import LookaheadDraft, NGramDraft, PhrasesDraft, PromptLookupDraft, StagedDraft
from workbench.speculation.drafts import staged as the_staged
from workbench.speculation.drafts.contract import Draft
from workbench.speculation.drafts.ngram_table import NGramTable
from workbench.speculation.theory import distribution_of_target, enumerate_outcomes, sharpened, table

PROMPT = (0,)


class TextKV:
    """Remembers the tokens themselves. What a row stands for is read from here, so a wrong cache is a wrong
    distribution."""

    def __init__(self, config, trees: bool = True) -> None:
        self.holds_trees = trees
        self.texts: dict[str, list[int]] = {}

    @property
    def lengths(self) -> dict[str, int]:
        return {sequence: len(text) for sequence, text in self.texts.items()}

    def begin(self, batch) -> None:
        tokens = batch.token_ids.tolist()
        for sequence, (start, end) in zip(batch.sequences, pairwise(batch.query_starts)):
            self.texts.setdefault(sequence, []).extend(tokens[start:end])

    def attend(self, *given):
        raise AssertionError("a table attends to nothing")

    def draft_room(self, sequence) -> int:
        return 1000

    def fork(self, sequence, new_sequence) -> None:
        self.texts[new_sequence] = list(self.texts[sequence])

    @property
    def bytes_in_use(self) -> int:
        return sum(map(len, self.texts.values()))

    bytes_reserved = bytes_in_use

    def truncate(self, sequence, length: int) -> None:
        assert length <= len(self.texts[sequence])
        del self.texts[sequence][length:]

    def keep(self, sequence, length: int, places) -> None:
        text = self.texts[sequence]
        self.texts[sequence] = [*text[:length], *(text[place] for place in places)]

    def release(self, sequence) -> None:
        del self.texts[sequence]


ROWS: list[np.ndarray] = []


class TableModel:
    """A model whose logits name a row of fractions: logits[row][0] is its number in ROWS."""

    def __init__(self, distribution: Callable, vocab_size: int, name: str = "target") -> None:
        self.distribution, self.name, self.tokenizer = distribution, name, None
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.config = SimpleNamespace(vocab_size=vocab_size, context_length=64)
        self._numbers: dict[tuple[int, ...], int] = {}

    def __call__(self, batch, kv) -> torch.Tensor:
        rows, tokens = [], batch.token_ids.tolist()
        for index, (sequence, first) in enumerate(zip(batch.sequences, batch.first_positions)):
            before = kv.texts.get(sequence, [])
            assert len(before) == first
            new = tokens[batch.query_starts[index] : batch.query_starts[index + 1]]
            tree = None if batch.parents is None else batch.parents[index]
            texts: list[tuple[int, ...]] = []
            for at, token in enumerate(new):
                parent = at - 1 if tree is None else tree[at]
                texts.append((*(before if parent < 0 else texts[parent]), token))
            rows += [self._number(text) for text in texts]
        kv.begin(batch)
        wanted = rows if batch.logit_rows is None else [rows[i] for i in batch.logit_rows.tolist()]
        logits = torch.zeros(len(wanted), self.config.vocab_size)
        logits[:, 0] = torch.tensor(wanted, dtype=torch.float32)
        return logits

    def _number(self, text: tuple[int, ...]) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(ROWS)
            ROWS.append(self.distribution(text[len(PROMPT) :]))
        return self._numbers[text]


class ExactDistribution:
    """`TokenDistribution` in fractions: the rows that logits name; of real logits (float64, of an n-gram table) their
    softmax."""

    greedy = is_argmax = row_by_row = False

    def __init__(self, power: int = 1) -> None:
        self.power = power

    def probabilities(self, logits: torch.Tensor, text_of) -> list[np.ndarray]:
        return [sharpened(row, self.power) for row in self._rows(logits)]

    confidences = probabilities

    def _rows(self, logits: torch.Tensor) -> list[np.ndarray]:
        if logits.dtype == torch.float64:
            return [table(*(Fraction(p) for p in row)) for row in logits.softmax(dim=-1).tolist()]
        return [ROWS[int(number)] for number in logits[:, 0].tolist()]


def begun(name, distribution, draws, lengths, max_new_tokens: int) -> Sequence:
    """A sequence whose prompt went through the target, so that its next round drafts."""
    drafting, sampler = Drafting(lengths, begun=True), Sampler(distribution, draws)
    return Sequence(name, list(PROMPT), len(PROMPT), max_new_tokens, sampler=sampler, drafting=drafting)


class InFractions(Draft):
    """A draft whose one-hot distributions, tensors, become fractions. It changes nothing else."""

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self.draft, self.name = draft, draft.name
        self.check_fits, self.observe, self.release = draft.check_fits, draft.observe, draft.release

    def propose(self, asks):
        return [replace(one, distributions=tuple(map(exact, one.distributions))) for one in self.draft.propose(asks)]


def exact(row) -> np.ndarray:
    return np.array([Fraction(p) for p in row.tolist()], dtype=object) if isinstance(row, torch.Tensor) else row


def some_distribution(seed: int, vocab_size: int, *, zeros: bool = False) -> Callable:
    """A row for every text, in small whole numbers."""

    @functools.cache
    def distribution(text: tuple[int, ...]) -> np.ndarray:
        draw = random.Random(f"{seed} {text}")
        weights = [draw.randrange(0 if zeros else 1, 6) for _ in range(vocab_size)]
        weights[draw.randrange(vocab_size)] += 1
        return table(*weights)

    return distribution


def written(
    make_draft: Callable[[TableModel], Draft],
    *,
    V: int = 2,
    length: int = 3,
    K: int | None = None,
    lengths=None,
    power: int = 1,
    trees: bool = True,
    speculator: type[Speculator] = Speculator,
    zeros: bool = False,
    origins: set[str] | None = None,
) -> tuple[dict, dict]:
    """(distribution of what rounds write, distribution of the target alone) of texts of `length` tokens. origins: takes
    who wrote any."""
    distribution_of_next = some_distribution(1, V, zeros=zeros)
    target = TableModel(distribution_of_next, V)

    def run(draws) -> tuple[int, ...]:
        rounds = speculator(Step(target, TextKV(None, trees)), make_draft(target))
        distribution = ExactDistribution(power)
        policy = lengths() if lengths else Fixed(K or 2)
        sequence = begun("a", distribution, draws, policy, length)
        while sequence.remaining:
            [done] = rounds.run([sequence])
            if origins is not None:
                origins.update(token.origin for token in done.emitted)
        rounds.release("a")
        return tuple(sequence.token_ids[len(PROMPT) :])

    return enumerate_outcomes(run), distribution_of_target(
        lambda text: sharpened(distribution_of_next(text), power), length
    )


def small(V: int, seed: int = 2, zeros: bool = False) -> TableModel:
    return TableModel(some_distribution(seed, V, zeros=zeros), V, f"small-{seed}")


def chain(target: TableModel, **settings) -> ModelDraft:
    return ModelDraft(small(target.config.vocab_size), kv=TextKV, **settings)


def tree(*branching: int) -> Callable[[TableModel], Draft]:
    return lambda target: chain(target, branching=branching)


def lookup(target: TableModel) -> Draft:
    return InFractions(PromptLookupDraft(target, min_ngram=1))


def staged(inner: Callable[[TableModel], Draft]) -> Callable[[TableModel], Draft]:
    def make(target: TableModel) -> Draft:
        middle = small(target.config.vocab_size)
        return StagedDraft(middle, inner(middle), draft_length=2, kv=TextKV)

    return make


def smaller(model: TableModel) -> ModelDraft:
    return ModelDraft(small(model.config.vocab_size, seed=3), kv=TextKV)


def ngram(**settings) -> Callable[[TableModel], Draft]:
    counted = NGramTable.of([[0, 1, 1, 0, 0, 1, 0, 1]], 2, order=3)
    return lambda target: InFractions(NGramDraft(counted, **settings))


def phrases(target: TableModel) -> Draft:
    return InFractions(PhrasesDraft(target, {(0,): (1, 0), (1, 1): (0,)}))


def lookahead(target: TableModel) -> Draft:
    return InFractions(LookaheadDraft(target, columns=2, gram=2, candidates=2))


LONGER = {"K": 3, "length": 4}  # the inner rounds too have something to draft


def THRESHOLD():
    return Threshold(0.3, max_tokens=3, low=0.05)


CASES: dict[str, tuple[Callable, dict]] = {
    "model, K = 1": (chain, {"K": 1}),
    "model, K = 2": (chain, {"K": 2}),
    "model, K = 3, text of 4": (chain, {"K": 3, "length": 4}),
    "model, three tokens": (chain, {"V": 3, "K": 2}),
    "model, some probabilities 0": (lambda t: ModelDraft(small(3, zeros=True), kv=TextKV), {"V": 3, "zeros": True}),
    "model, temperature 1/2": (chain, {"power": 2}),
    "model, threshold": (chain, {"lengths": lambda: Threshold(0.5, max_tokens=2, low=0.1), "length": 4}),
    "tree (2, 1)": (tree(2, 1), {}),
    "tree (2, 2)": (tree(2, 2), {}),
    "tree (2,), three tokens": (tree(2), {"V": 3, "K": 1, "length": 2}),
    "tree (3,), three tokens": (tree(3), {"V": 3, "K": 1, "length": 2}),
    "tree (2, 1), kv without trees": (tree(2, 1), {"trees": False}),
    "prompt lookup": (lookup, {"K": 3, "length": 4}),
    "prompt lookup, three tokens": (lookup, {"V": 3, "K": 2}),
    "n-grams, picked": (ngram(), {}),
    "n-grams, picked as a tree": (ngram(branching=(2, 1)), {}),
    "n-grams, drawn": (ngram(choose="drawn"), {}),
    "n-grams, drawn as a tree": (ngram(choose="drawn", branching=(2, 1)), {}),
    "phrases": (phrases, {"length": 4}),
    "lookahead": (lookahead, {"length": 4}),
    "staged: lookup, model": (staged(lookup), LONGER),
    "staged: lookup, model, threshold": (staged(lookup), {"lengths": THRESHOLD, "length": 4}),
    "staged: model, model": (staged(smaller), LONGER),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_has_the_distribution_of_the_target_as_fractions(case):
    make, settings = CASES[case]
    found, expected = written(make, **settings, origins=(origins := set()))
    assert sum(found.values()) == 1 and all(isinstance(p, Fraction) for p in found.values())
    assert {text: p for text, p in found.items() if p} == expected
    assert len(origins) == 1 + len(make(TableModel(some_distribution(1, 2), 2)).name.split("+")), (
        "a draft had nothing accepted"
    )


def test_a_staged_proposal_is_drawn_from_the_middle_model_alone():
    """Whatever the cheap draft is: tokens have the middle model's distribution, and so do the rows that are handed
    over."""
    target, asked = TableModel(some_distribution(1, 2), 2), {}

    def run(draws):
        draft = staged(smaller)(target)
        speculator = Speculator(Step(target, TextKV(None)), draft)
        [proposal] = speculator._propose([begun("a", ExactDistribution(), draws, Fixed(3), 9)], [3], False)
        for at, distribution in enumerate(proposal.distributions):
            assert list(distribution) == list(some_distribution(2, 2)(proposal.tokens[:at]))
        asked[proposal.tokens] = proposal.origins
        return proposal.tokens

    assert enumerate_outcomes(run) == distribution_of_target(some_distribution(2, 2), 3)
    assert {origin for origins in asked.values() for origin in origins} == {"small-2", "small-3"}


# -- planted bugs ------------------------------------------------------------------------------------------------------


def distribution_with(monkeypatch, make=chain, *patches, **settings) -> bool:
    """Whether the distribution is right with these attributes replaced."""
    for owner, name, value in patches:
        monkeypatch.setattr(owner, name, value)
    found, expected = written(make, **settings)
    return {text: p for text, p in found.items() if p} == expected


def test_the_bonus_from_another_row_is_another_distribution(monkeypatch):
    def wrong(proposal, p, draws):
        return verify(proposal, [*p[:-1], p[max(0, len(p) - 2)]], draws)

    assert not distribution_with(monkeypatch, chain, (engine, "verify", wrong))


def test_a_correction_from_the_target_itself_is_another_distribution(monkeypatch):
    assert not distribution_with(monkeypatch, chain, (the_rule, "residual", lambda p, q: p))


@pytest.mark.parametrize("make", [chain, tree(2)])
def test_a_residual_that_is_not_renormalized_is_another_distribution(monkeypatch, make):
    assert not distribution_with(
        monkeypatch, make, (the_rule, "residual", lambda p, q: (p - q).clip(min=0)), V=3, K=1, length=2
    )


def test_siblings_that_forget_what_was_drawn_before_them_are_another_distribution(monkeypatch):
    def siblings(q, count, draws):
        return [(token, q) for token, _ in the_rule_draw_children(q, count, draws)]

    the_rule_draw_children = the_rule.draw_children
    assert not distribution_with(monkeypatch, tree(2), (the_rule, "draw_children", siblings), V=3, K=1, length=2)


def test_a_cache_that_keeps_the_first_nodes_of_a_tree_is_another_distribution():
    class Careless(Speculator):
        def _keep_accepted(self, sequence, proposal, verdict):
            self.kv.truncate(sequence.id, len(sequence.token_ids) + len(verdict.path))

    found, expected = written(tree(2, 1), length=4, speculator=Careless)
    assert found != expected


class Reusing(ModelDraft):
    """Proposes once more what was rejected, with the distribution it would have been drawn from."""

    def propose(self, asks):
        [proposal] = super().propose(asks)
        last = getattr(self, "last", None)
        self.last = proposal
        if last is None:
            return [proposal]
        return [
            replace(
                proposal,
                tokens=(last.tokens[0],),
                parents=(-1,),
                distributions=proposal.distributions[:1],
                confidences=(),
            )
        ]


class DrawnSharper(ModelDraft):
    """Draws at half the temperature, and says it did not."""

    def propose(self, asks):
        sharp = [replace(ask, distribution=ExactDistribution(2)) for ask in asks]
        honest = small(2)
        [one] = super().propose(sharp)
        return [
            replace(
                one,
                distributions=tuple(
                    honest.distribution((*asks[0].token_ids[1:], *one.tokens[:i])) for i in range(len(one))
                ),
            )
        ]


class DropsTheUnlikely(ModelDraft):
    """Cuts the proposal before the first token it was not sure of, after it was drawn."""

    def propose(self, asks):
        [one] = super().propose(asks)
        sure = next((i for i, p in enumerate(one.confidences) if p < Fraction(1, 2)), len(one))
        return [one.kept(range(sure))]


@pytest.mark.parametrize("draft", [Reusing, DrawnSharper, DropsTheUnlikely])
def test_a_draft_whose_distributions_are_not_those_of_its_draws_writes_another_distribution(draft):
    found, expected = written(lambda target: draft(small(2), kv=TextKV), length=4 if draft is Reusing else 3)
    assert sum(found.values()) == 1 and found != expected


def test_a_threshold_asked_after_the_draw_and_before_it_is_kept_is_another_distribution():
    """The same threshold as in the cases above, asked in the wrong place: the last token falls out of the proposal."""
    found, expected = written(
        lambda target: DropsTheUnlikely(small(2), kv=TextKV), lengths=lambda: Threshold(0.5, max_tokens=2, low=0.1)
    )
    assert found != expected


def test_a_picked_token_with_another_distribution_than_its_own_is_another_distribution():
    class Believes(InFractions):
        def propose(self, asks):
            return [
                replace(one, distributions=tuple(table(1, 1) for _ in one.distributions))
                for one in self.draft.propose(asks)
            ]

    assert written(lookup, K=2)[0] == written(lookup, K=2)[1]
    found, expected = written(lambda target: Believes(PromptLookupDraft(target, min_ngram=1)), K=2)
    assert found != expected


def test_cheap_tokens_that_no_inner_round_verified_are_another_distribution(monkeypatch):
    """A staged draft that takes the cheap draft's word and hands it over under the middle model's name."""

    def believing(proposal, p, draws):
        return Verdict(tuple(range(len(proposal))), draws.choose(p[len(proposal)]), bonus=True)

    class Believing(Speculator):
        def _decide(self, sequence, proposal, rows, best):
            distributions = sequence.sampler.distribution.probabilities(rows, None)
            return believing(proposal, distributions, sequence.sampler.draws), distributions

    assert not distribution_with(monkeypatch, staged(lookup), (the_staged, "Speculator", Believing), **LONGER)


def test_a_staged_draft_that_drops_the_unlikely_among_what_a_round_gave_is_another_distribution(monkeypatch):
    class Dropping(the_staged._Drafted):
        def proposal(self, *, greedy):
            one = super().proposal(greedy=greedy)
            sure = next((i for i, p in enumerate(one.confidences) if p < Fraction(1, 2)), len(one))
            return one.kept(range(sure)) if sure else Proposal()

    assert not distribution_with(monkeypatch, staged(lookup), (the_staged, "_Drafted", Dropping), **LONGER)
