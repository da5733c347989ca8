"""Claims about drafts that need no training: what they propose, that nothing of them shows in greedy text, what they
refuse.

Their distributions are in `test_drafts_distribution`. Models are random, of 64 tokens and without a tokenizer, but
where texts are the point: they soon repeat themselves, so that every draft has something to say.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import random_decoder, tiny_config
from test_kv_smaller import LATENT, SHARING

from workbench.decoding import SamplingSettings
from workbench.decoding.draws import RandomDraws
from workbench.decoding.sampling import Sampler, TokenDistribution
from workbench.decoding.sequence import Sequence
from workbench.decoding.step import Step
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kv import Contiguous
from workbench.models import Decoder, prepare
from workbench.models.checkpoints import shipped_tokenizer
from workbench.quantization import QuantizationRecipe
from workbench.speculation import Ask, Drafting, Fixed, ModelDraft, Speculator, Threshold
from workbench.speculation.drafts import (
    DRAFTS,
    LookaheadDraft,
    NGramDraft,
    PhrasesDraft,
    PromptLookupDraft,
    StagedDraft,
    draft_for,
    quantized_self,
)
from workbench.speculation.drafts.contract import Draft
from workbench.speculation.drafts.lookahead import NGramPool, _Window
from workbench.speculation.drafts.lookup import NGramIndex
from workbench.speculation.drafts.ngram_table import NGramTable
from workbench.speculation.drafts.phrases import learned_phrases, phrases_of
from workbench.speculation.drafts.picked import one_hot, picked_tree

V = 64
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5]
NEW = 16


def tiny(seed: int = 0, **changes) -> Decoder:
    return random_decoder(tiny_config(vocab_size=V, **changes), seed=seed, name=f"tiny-{seed}").double()


TARGET, SMALL = tiny(), tiny(1, num_layers=1)
TABLE = NGramTable.of([random.Random(0).choices(range(V), k=400), PROMPT * 3], V, order=4)

DRAFT_KINDS = {
    "random model": lambda target: ModelDraft(SMALL),
    "identical model": lambda target: ModelDraft(target),
    "identical model, tree": lambda target: ModelDraft(target, branching=(2, 1, 1, 2)),
    "prompt lookup": lambda target: PromptLookupDraft(target, min_ngram=1),
    "n-grams": lambda target: NGramDraft(TABLE),
    "n-grams, tree": lambda target: NGramDraft(TABLE, branching=(3, 2, 1, 1)),
    "phrases": lambda target: PhrasesDraft(target, {(t,): (t, t + 1, t) for t in range(V - 1)}),
    "lookahead": lambda target: LookaheadDraft(target),
    "quantized self": lambda target: quantized_self(target, QuantizationRecipe("rtn", 3, 8)),
    "staged": lambda target: StagedDraft(target, PromptLookupDraft(target, min_ngram=1)),
    "staged on a random model": lambda target: StagedDraft(SMALL, LookaheadDraft(SMALL), draft_length=5),
    "staged twice": lambda target: StagedDraft(target, StagedDraft(SMALL, NGramDraft(TABLE)), draft_length=3),
}
MEMORIES = {
    "contiguous": {},
    "recompute": {},
    "window": {"sliding_window": 6},
    "quantized": {},
    "latent": {"num_kv_heads": 4, "head_dim": 12, "family": "deepseek_v3", "latent_attention": LATENT},
    "shared_layers": SHARING,
    "paged": {},
}


def write(target: Decoder, draft: Draft | None, K: int = 4, kv: str = "contiguous", **settings):
    drafted = {} if draft is None else {"draft": draft, "draft_length": K}
    return generate(target, PROMPT, max_new_tokens=NEW, stop_token_ids=(), kv=kv, **drafted, **settings)


@pytest.mark.parametrize("K", [1, 2, 5, 8])
@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_greedy_text_is_the_targets_own_with_every_draft_and_length(kind, K):
    target = tiny()
    found = write(target, DRAFT_KINDS[kind](target), K)
    assert found.tokens == write(TARGET, None).tokens
    assert max(found.speculation.lengths) <= K
    # the prompt's own token, then rounds in which nothing is rejected
    if kind.startswith("identical") and K > 2:
        assert found.speculation.acceptance_rate == 1
    if K >= 5 and "random" not in kind:
        assert found.kinds.count("draft") > 0, "the draft had no token accepted, so nothing was tested"


@pytest.mark.parametrize("memory", [m for m in MEMORIES if m != "contiguous"])
@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_greedy_text_is_the_targets_own_in_every_kind_of_kv(kind, memory):
    target = tiny(**MEMORIES[memory])
    plain = write(target, None, kv=memory).tokens
    assert write(target, DRAFT_KINDS[kind](target), 4, kv=memory).tokens == plain


@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_nothing_is_left_of_a_sequence_after_its_release(kind):
    target = tiny()
    draft = DRAFT_KINDS[kind](target)
    first = write(target, draft, 5)
    again = write(target, draft, 5)
    assert again.speculation.lengths == first.speculation.lengths and again.origins == first.origins
    for owner in with_inner(draft):
        kept = [value for name, value in vars(owner).items() if isinstance(value, dict) and name != "phrases"]
        assert not any(kept), f"{type(owner).__name__} remembers {kept}"
        assert not getattr(owner, "_kv", Contiguous(TARGET.config)).lengths
        draft.release("never asked about")


def with_inner(draft: Draft) -> list[Draft]:
    return [draft, *(with_inner(draft.draft) if isinstance(draft, StagedDraft) else ())]


@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_several_texts_at_once_are_what_each_is_alone(kind):
    target = tiny()
    several = {"max_sequences": 3}
    draft = {
        "random model": lambda: ModelDraft(SMALL, **several),
        "identical model": lambda: ModelDraft(target, **several),
        "identical model, tree": lambda: ModelDraft(target, branching=(2, 1, 1, 2), **several),
        "quantized self": lambda: quantized_self(target, QuantizationRecipe("rtn", 3, 8), **several),
        "staged": lambda: StagedDraft(target, PromptLookupDraft(target, min_ngram=1), **several),
        "staged on a random model": lambda: StagedDraft(SMALL, LookaheadDraft(SMALL), draft_length=5, **several),
        "staged twice": lambda: StagedDraft(
            target, StagedDraft(SMALL, NGramDraft(TABLE), **several), draft_length=3, **several
        ),
    }.get(kind, lambda: DRAFT_KINDS[kind](target))()
    target = tiny()
    prompts = {"a": PROMPT, "b": PROMPT[3:], "c": [7, 8] * 4}
    kv = Contiguous(target.config, max_sequences=3, dtype=torch.float64)
    rounds = Speculator(Step(target, kv), draft)
    sequences = {
        name: sequence_of(name, prompt, greedy(prompt), None, Fixed(3 + i), max_new_tokens=12 + i)
        for i, (name, prompt) in enumerate(prompts.items())
    }
    while open_ := [one for one in sequences.values() if one.remaining]:
        rounds.run(open_)
    for i, (name, prompt) in enumerate(prompts.items()):
        alone = generate(target, prompt, max_new_tokens=12 + i, stop_token_ids=())
        assert sequences[name].generated_ids == alone.tokens
        rounds.release(name)
    assert not kv.lengths


def sequence_of(name, prompt, distribution, draws, lengths, max_new_tokens, guide=None) -> Sequence:
    sampler, drafting = Sampler(distribution, draws), Drafting(lengths)
    return Sequence(name, list(prompt), len(prompt), max_new_tokens, sampler=sampler, guide=guide, drafting=drafting)


def greedy(prompt, **settings) -> TokenDistribution:
    return TokenDistribution(SamplingSettings(temperature=0.0, **settings), prompt)


# -- one ask -----------------------------------------------------------------------------------------------------------


class Judge:
    """`go_on` that says no after the given number of tokens."""

    def __init__(self, after: int = 99) -> None:
        self.after, self.heard = after, []

    def __call__(self, confidence: float) -> bool:
        self.heard.append(confidence)
        return len(self.heard) < self.after


def ask(text, *, limit: int = 5, nodes: int = 64, temperature: float = 1.0, go_on=None, name="a") -> Ask:
    distribution = TokenDistribution(SamplingSettings(temperature=temperature), text)
    draws = RandomDraws(torch.Generator().manual_seed(0))
    return Ask(name, list(text), limit, nodes, distribution, draws, go_on or (lambda confidence: True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_a_proposal_keeps_to_its_limits_and_has_a_distribution_for_every_token(kind, temperature):
    draft = DRAFT_KINDS[kind](tiny())
    for limit, nodes in [(1, 1), (2, 3), (5, 4), (6, 64)]:
        [proposal] = draft.propose([ask(PROMPT, limit=limit, nodes=nodes, temperature=temperature)])
        assert proposal.depth <= limit and len(proposal) <= nodes
        assert all(0 <= token < V for token in proposal.tokens)
        if temperature:
            assert len(proposal.distributions) == len(proposal)
            for token, distribution in zip(proposal.tokens, proposal.distributions):
                assert distribution.dtype == torch.float64 and distribution.shape == (V,)
                assert distribution.sum().item() == pytest.approx(1, abs=1e-9) and distribution[token] > 0


@pytest.mark.parametrize("kind", ["identical model", "n-grams", "staged", "staged twice"])
def test_after_each_token_the_ask_is_told_its_probability_and_may_stop(kind):
    draft, judge = DRAFT_KINDS[kind](tiny()), Judge(after=2)
    [proposal] = draft.propose([ask(PROMPT, go_on=judge)])
    assert len(proposal) == 2 and judge.heard == list(proposal.confidences)
    assert all(0 < float(c) <= 1 for c in judge.heard)


def test_a_one_hot_distribution_is_all_on_its_token():
    assert one_hot(2, 4).tolist() == [0, 0, 1, 0] and one_hot(2, 4).dtype == torch.float64


def test_a_tree_of_picked_paths_shares_their_beginnings_in_their_order():
    tree = picked_tree(ask([1], limit=3, nodes=6), [(5, 6, 7, 8), (5, 9), (4,), (5, 6, 2)], V)
    assert tree.tokens == (5, 6, 7, 9, 4, 2) and tree.parents == (-1, 0, 1, 0, -1, 1)
    assert [int(distribution.argmax()) for distribution in tree.distributions] == list(tree.tokens)
    assert picked_tree(ask([1], nodes=2), [(5, 6, 7), (4,)], V).tokens == (5, 6)


# -- prompt lookup -----------------------------------------------------------------------------------------------------


def test_lookup_copies_what_followed_the_longest_suffix():
    text = [1, 2, 3, 40, 9, 2, 3, 41, 8, 1, 2, 3]
    assert lookup(text, max_ngram=3) == (40, 9, 2)  # of 1 2 3
    assert lookup(text, max_ngram=2) == (41, 8, 1)  # of 2 3, the latest
    assert lookup(text, max_ngram=2, occurrence="first") == (40, 9, 2)
    assert lookup(text, max_ngram=5, min_ngram=4) == ()
    assert lookup([7, 7], max_ngram=3, min_ngram=1) == (7, 7, 7)  # goes on from what it copies
    assert lookup([1, 2, 1, 2, 1], max_ngram=3, min_ngram=1) == (2, 1, 2)
    assert lookup([1], min_ngram=1, max_ngram=1) == () and lookup([1, 2, 3], min_ngram=1, max_ngram=2) == ()


def lookup(text, **settings) -> tuple[int, ...]:
    [proposal] = PromptLookupDraft(TARGET, **({"min_ngram": 2} | settings)).propose([ask(text, limit=3)])
    return proposal.tokens


def test_an_index_that_follows_a_text_is_one_made_for_it():
    """Texts grow, and are cut and changed at their end, as a staged draft's are."""
    rng, index, text = random.Random(1), NGramIndex(1, 4), []
    for _ in range(300):
        text = [*text[: rng.randint(max(0, len(text) - 4), len(text))], *rng.choices(range(3), k=rng.randint(1, 4))]
        index.follow(text)
        fresh = NGramIndex(1, 4)
        fresh.follow(text)
        assert (index._text, index._ends) == (fresh._text, fresh._ends)
        assert index.find("latest") == latest(text, 4)


def latest(text, most):
    """By trying all places."""
    for n in range(min(most, len(text)), 0, -1):
        for place in range(len(text) - 1, n - 1, -1):
            if text[place - n : place] == text[-n:]:
                return place, n
    return None


# -- n-grams -----------------------------------------------------------------------------------------------------------


def test_a_table_counts_every_n_gram_within_its_streams():
    rng = random.Random(2)
    streams = [rng.choices(range(5), k=k) for k in (1, 2, 60, 200)]
    table = NGramTable.of(streams, 5, order=4, min_count=1)
    for n in range(1, 5):
        counts = Counter(tuple(s[i : i + n]) for s in streams for i in range(len(s) - n + 1))
        assert table.sizes[n - 1] == len(counts)
        assert all(table.count(gram) == count for gram, count in counts.items())
        assert dict(table.frequent(n)) == counts
    assert table.count((4, 4, 4, 4, 4)) == 0 and table.count(()) == 263
    rare = NGramTable.of(streams, 5, order=4, min_count=3)
    assert all(count >= 3 for n in (3, 4) for _, count in rare.frequent(n)) and rare.sizes[1] == table.sizes[1]
    assert all(rare.count(gram) == count for gram, count in table.frequent(4) if count >= 3)


def test_a_tables_probabilities_are_witten_and_bells():
    table = NGramTable.of([[0, 1, 0, 1, 0, 2]], 4, order=2)
    # unigrams: 3 different of 6 tokens seen; after 0: once 2, twice 1; 4 tokens alike at the bottom
    unigram = np.array([3 + 3 / 4, 2 + 3 / 4, 1 + 3 / 4, 3 / 4]) / 9
    assert table.probabilities([]) == pytest.approx(unigram)
    assert table.probabilities([1, 0]) == pytest.approx((np.array([0, 2, 1, 0]) + 2 * unigram) / 5)
    assert table.probabilities([3]) == pytest.approx(unigram)  # a context never seen
    for text in ([], [0], [2], [1, 0]):
        assert table.probabilities(text).sum() == pytest.approx(1) and (table.probabilities(text) > 0).all()


def test_left_out_n_grams_leave_their_share_to_shorter_contexts():
    table = NGramTable.of([[0, 1, 2], [0, 1, 3], [0, 1, 2]], 4, order=3, min_count=2)
    shorter = NGramTable.of([[0, 1, 2], [0, 1, 3], [0, 1, 2]], 4, order=2).probabilities([0, 1])
    assert table.probabilities([0, 1]) == pytest.approx((np.array([0, 0, 2, 0]) + 2 * shorter) / 4)


def test_a_table_comes_back_from_its_file(tmp_path):
    TABLE.save(tmp_path / "table.npz")
    again = NGramTable.load(tmp_path / "table.npz")
    assert (again.vocab_size, again.order, again.sizes) == (TABLE.vocab_size, TABLE.order, TABLE.sizes)
    assert (again.probabilities(PROMPT) == TABLE.probabilities(PROMPT)).all()
    (tmp_path / "other.npz").write_bytes(b"no table")
    np.savez(tmp_path / "pickled.npz", vocab_size=np.array([object()]))
    for name in ("other.npz", "pickled.npz", "none.npz"):
        with pytest.raises(WorkbenchError, match="no n-gram table"):
            NGramTable.load(tmp_path / name)


def test_a_texts_own_n_grams_come_before_the_tables():
    draft, alone = NGramDraft(TABLE), NGramDraft(TABLE, own_text=False)
    text = [50, 51, 52, 60, 50, 51]
    assert draft.probabilities(text, "a").argmax() == 52
    assert draft.probabilities(text, "a").sum() == pytest.approx(1)
    assert (alone.probabilities(text, "a") == TABLE.probabilities(text)).all()


def test_an_n_gram_draft_from_texts_reads_them_with_the_targets_tokenizer(tiny_model):
    draft = NGramDraft.of(["for i in range(10):\n    print(i)\n"] * 3, tiny_model, order=4)
    ids = tiny_model.tokenizer.encode("for i in range(10):\n    print(i)\n")
    [proposal] = draft.propose([ask(ids[:3], limit=4, temperature=0.0)])
    assert proposal.tokens == tuple(ids[3:7])
    draft.check_fits(tiny_model)


# -- phrases -----------------------------------------------------------------------------------------------------------


def test_a_given_phrase_continues_its_trigger_token_by_token():
    tokenizer = shipped_tokenizer()
    given = {"if __name__": ' == "__main__":', "def __init": "__(self"}
    found = phrases_of(given, tokenizer)
    for trigger, continuation in given.items():
        for before in ("", "\n    "):
            ids = tokenizer.encode(before + trigger)
            match = next(found[tuple(ids[-n:])] for n in range(len(ids), 0, -1) if tuple(ids[-n:]) in found)
            assert [*ids, *match] == tokenizer.encode(before + trigger + continuation)


def test_a_phrase_that_is_divided_inside_a_token_is_refused():
    with pytest.raises(WorkbenchError, match="inside a token"):
        phrases_of({"def __init__": "(self"}, shipped_tokenizer())
    for bad in ({"": "x"}, {"x": ""}, {"x": 3}):
        with pytest.raises(WorkbenchError, match="at least one character"):
            phrases_of(bad, shipped_tokenizer())


def test_learned_phrases_are_those_that_went_on_alike():
    table = NGramTable.of([[1, 2, 3, 4, 5]] * 9 + [[6, 7, 8]] * 5 + [[6, 7, 9]] * 5, 10, order=3)
    assert learned_phrases(table, trigger=2, share=0.6) == {(1, 2): (3, 4, 5), (2, 3): (4, 5), (3, 4): (5,)}
    assert learned_phrases(table, trigger=2, share=0.5)[6, 7] in ((8,), (9,))
    assert learned_phrases(table, trigger=2, max_tokens=1)[1, 2] == (3,)
    with pytest.raises(WorkbenchError, match="order is 3"):
        learned_phrases(table, trigger=3)


def test_the_longest_trigger_counts():
    draft = PhrasesDraft(TARGET, {(1,): (2,), (0, 1): (3, 4)})
    assert [p.tokens for p in draft.propose([ask([5, 1]), ask([0, 1]), ask([1, 0])])] == [(2,), (3, 4), ()]
    with pytest.raises(WorkbenchError, match="from 0 to 63"):
        PhrasesDraft(TARGET, {(1,): (V,)})


# -- lookahead ---------------------------------------------------------------------------------------------------------


def follow(token: int) -> int:
    """A model in which every token has one that always follows it, around circles of eight."""
    return token // 8 * 8 + (token + 3) % 8


def test_lookahead_finds_the_n_grams_of_a_model_that_repeats_itself():
    """Fed with what `follow` says, the window's columns become its trajectories, and the pool their n-grams."""
    draft, text = LookaheadDraft(TARGET, columns=4, gram=4, candidates=2), [5, 11]  # two circles
    accepted = []
    for _ in range(16):
        [proposal] = draft.propose([ask(text, limit=8, temperature=0.0)])
        said = [follow(token) for token in (text[-1], *proposal.tokens)]
        logits = torch.nn.functional.one_hot(torch.tensor(said), V).double()
        draft.observe("a", proposal, logits)
        at, node = -1, []
        while nexts := [n for n in proposal.children(at) if proposal.tokens[n] == said[at + 1]]:
            at = nexts[0]
            node.append(at)
        accepted.append(len(node))
        text += [*(proposal.tokens[n] for n in node), said[at + 1]]
    assert text == [5, *(follow_times(11, i) for i in range(len(text) - 1))]
    assert accepted[0] == 0 and max(accepted) >= 3
    for first, grams in draft._pools["a"]._after.items():
        for gram in grams:
            assert gram == tuple(follow_times(first, i) for i in (1, 2, 3))


def follow_times(token: int, times: int) -> int:
    for _ in range(times):
        token = follow(token)
    return token


def test_a_guess_of_the_window_sees_the_oldest_row_up_to_its_column_and_its_own_column():
    window = _Window([0], columns=3, gram=4)
    window.rows = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]  # 0: the text's last token
    assert window.paths() == [(1, 2), (3, 6), (1, 4, 7), (1, 2, 5, 8)]
    said = {(3, 6): 20, (1, 4, 7): 21}  # the last column was not sent
    assert window.step(said) == [(0, 3, 6, 20), (1, 4, 7, 21)]
    assert window.rows == [[3, 4, 5], [6, 7, 8], [20, 21, 8]]


def test_a_pool_keeps_the_latest_n_grams_of_each_first_token():
    pool = NGramPool(max_per_token=2)
    for gram in [(1, 2), (1, 3), (1, 2), (1, 4), (5, 6)]:
        pool.add(gram)
    assert pool.after(1) == [(4,), (2,)] and pool.after(5) == [(6,)] and pool.after(9) == [] and len(pool) == 3


def test_lookahead_without_trees_tries_its_best_branch():
    target = tiny(sliding_window=6)
    found = write(target, LookaheadDraft(target), 5, kv="window")
    assert found.tokens == write(target, None, kv="window").tokens


# -- staged and quantized
# ---------------------------------------------------------------------------------------------------


def test_a_staged_draft_proposes_greedily_what_its_model_would_alone():
    """With fewer forwards of it: that is all the cheap draft is for."""
    alone, staged = ModelDraft(SMALL), StagedDraft(SMALL, PromptLookupDraft(SMALL, min_ngram=1))
    a, b = write(TARGET, alone, 6), write(TARGET, staged, 6)
    assert a.tokens == b.tokens and a.speculation.lengths == b.speculation.lengths
    assert a.speculation.accepted == b.speculation.accepted
    assert staged.model_calls < alone.model_calls
    assert {"prompt_lookup", "target"} <= set(
        write(TARGET, StagedDraft(tiny(), PromptLookupDraft(TARGET, min_ngram=1))).origins
    )


def test_a_quantized_self_is_named_by_its_bits_and_agrees_more_with_more_of_them():
    rates = []
    for bits in (8, 2):
        draft = quantized_self(tiny(), QuantizationRecipe("rtn", bits, 8))
        assert draft.name == f"self-int{bits}"
        rates.append(write(TARGET, draft, 5).speculation.acceptance_rate)
    assert rates[0] > rates[1]
    with pytest.raises(WorkbenchError, match="prepared for inference"):
        quantized_self(prepare(tiny().float()))


# -- what the distribution forbids
# -----------------------------------------------------------------------------------------------------


class Even:
    """A grammar: even tokens only."""

    def allowed(self, generated_ids) -> torch.Tensor:
        return torch.arange(V) % 2 == 0

    def forced(self, generated_ids) -> list[int]:
        return []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["prompt lookup", "phrases", "lookahead", "n-grams", "staged"])
def test_what_a_grammar_forbids_is_never_accepted(kind, temperature):
    """Every even token of the prompt is followed by an odd one, and retrieval proposes what it finds there."""
    target, guide = tiny(), Even()
    prompt = [*range(V), 2]
    distribution = TokenDistribution(SamplingSettings(temperature=temperature), prompt, guide=guide)
    draft = DRAFT_KINDS[kind](target)
    target = tiny()
    rounds = Speculator(Step(target, Contiguous(target.config, dtype=torch.float64)), draft)
    draws = RandomDraws(torch.Generator().manual_seed(3))
    sequence = sequence_of("a", prompt, distribution, draws, Fixed(5), 24, guide)
    proposed = []
    while sequence.remaining:
        [done] = rounds.run([sequence])
        proposed += done.proposal.tokens
    assert all(token % 2 == 0 for token in sequence.generated_ids)
    if kind in ("prompt lookup", "phrases"):
        assert any(token % 2 for token in proposed), "nothing illegal was proposed, so nothing was tested"


def test_penalties_are_the_targets_with_every_draft():
    plain = write(TARGET, None, repetition_penalty=1.3, frequency_penalty=0.5).tokens
    for kind in ("prompt lookup", "n-grams", "lookahead", "staged"):
        draft = DRAFT_KINDS[kind](tiny())
        assert write(TARGET, draft, 5, repetition_penalty=1.3, frequency_penalty=0.5).tokens == plain


# -- bad input ---------------------------------------------------------------------------------------------------------


OTHER = random_decoder(tiny_config(vocab_size=V // 2), name="other")


@pytest.mark.parametrize(
    "make",
    [
        lambda: ModelDraft(OTHER),
        lambda: PromptLookupDraft(OTHER),
        lambda: LookaheadDraft(OTHER),
        lambda: NGramDraft(NGramTable.of([[1, 2]], V // 2)),
        lambda: PhrasesDraft(OTHER, {(1,): (2,)}),
        lambda: StagedDraft(OTHER, PromptLookupDraft(OTHER)),
        lambda: StagedDraft(tiny(), PromptLookupDraft(OTHER)),
    ],
)
def test_a_draft_of_another_vocabulary_is_refused_before_anything_is_changed(make):
    kv = Contiguous(TARGET.config, dtype=torch.float64)
    with pytest.raises(WorkbenchError, match="64 tokens"):
        Speculator(Step(TARGET, kv), make())
    assert not kv.lengths


def test_a_vocabulary_of_equal_size_and_other_tokens_is_refused(tiny_model):
    from workbench.models.tokenizer import train_tokenizer

    other = train_tokenizer(["a few words of another text"] * 3, vocab_size=300)
    mine = train_tokenizer(["quite different letters here, 0123456789"] * 3, vocab_size=300)
    size = min(other.vocab_size, mine.vocab_size)
    draft, target = (random_decoder(tiny_config(vocab_size=size), tokenizer=t) for t in (other, mine))
    for one in (PromptLookupDraft(draft), NGramDraft.of(["abc"], draft), StagedDraft(draft, PromptLookupDraft(draft))):
        with pytest.raises(WorkbenchError, match="not the same ones"):
            one.check_fits(target)
        one.check_fits(draft)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: write(TARGET, "prompt_lookup", 0), "K must be a whole number of at least 1"),
        (lambda: write(TARGET, "prompt_lookup", 256), "beyond the context"),
        (lambda: write(TARGET, "promt_lookup", 4), "did you mean 'prompt_lookup'"),
        (
            lambda: ModelDraft(tiny(sliding_window=6), branching=(2,), kv=lambda config: NoTrees()).check_fits(TARGET),
            "holds no trees",
        ),
        (lambda: PromptLookupDraft(TARGET, min_ngram=0), "min_ngram must be"),
        (lambda: PromptLookupDraft(TARGET, min_ngram=4, max_ngram=3), "max_ngram must be a whole number of at least 4"),
        (lambda: PromptLookupDraft(TARGET, occurrence="last"), "occurrence"),
        (lambda: NGramDraft(TABLE, choose="best"), "way to choose"),
        (lambda: NGramDraft(TABLE, branching=()), "at least one level"),
        (lambda: NGramDraft(TABLE, branching=(2, 0)), "branching must be"),
        (lambda: NGramDraft.of(["text"], TARGET), "no tokenizer"),
        (lambda: NGramTable.of([[]], V), "at least one token"),
        (lambda: NGramTable.of([[1, V]], V), "lie in 0 … 63"),
        (lambda: NGramTable.of([[1]], V, order=0), "order must be"),
        (lambda: LookaheadDraft(TARGET, columns=1), "columns must be"),
        (lambda: LookaheadDraft(TARGET, gram=1), "gram must be"),
        (lambda: StagedDraft(SMALL, SMALL), "takes a model and a Draft"),
        (lambda: StagedDraft(SMALL, PromptLookupDraft(SMALL), draft_length=0), "K must be"),
    ],
)
def test_bad_input_is_refused_with_the_reason(call, reason):
    with pytest.raises(WorkbenchError, match=reason):
        call()


class NoTrees:
    holds_trees, lengths = False, {}


def test_every_name_makes_a_draft_for_a_target(tiny_model):
    for name in sorted(set(DRAFTS) - {"eagle", "medusa", "ngram", "phrases"}):  # those need files, or seconds
        draft = draft_for(name, tiny_model)
        assert isinstance(draft, Draft) and draft.name == name
        draft.check_fits(tiny_model)


def test_a_threshold_shortens_what_a_staged_draft_proposes():
    draft = StagedDraft(SMALL, PromptLookupDraft(SMALL, min_ngram=1))
    found = write(TARGET, draft, Threshold(0.3, max_tokens=8))
    assert found.tokens == write(TARGET, None).tokens
    assert min(found.speculation.lengths) < 8


# -- being heard -------------------------------------------------------------------------------------------------------


def test_a_model_says_which_tokens_it_would_have_guessed_and_drafts_on_as_if_never_asked():
    text = [*PROMPT, *write(TARGET, None).tokens]
    draft, fresh = ModelDraft(SMALL), ModelDraft(SMALL)
    draft.propose([ask(text[: len(text) - 13], temperature=0.0)])
    heard = draft.listen(ask(text, temperature=0.0), 12)
    truth = [
        ModelDraft(SMALL).propose([ask(text[:at], limit=1, temperature=0.0)])[0].tokens[0] == text[at]
        for at in range(len(text) - len(heard), len(text))
    ]
    assert len(heard) == 12 and heard == truth
    assert [draft.propose([ask(text, temperature=0.0)])[0].tokens] == [
        fresh.propose([ask(text, temperature=0.0)])[0].tokens
    ]
    assert draft.listen(ask(text, temperature=0.0), 12) == [], "all of it was read"
    assert ModelDraft(TARGET).listen(ask(text, temperature=0.0), len(text))[-10:] == [True] * 10


@pytest.mark.parametrize("kind", ["prompt lookup", "n-grams", "phrases"])
def test_drafts_without_a_model_are_asked_again_after_each_token(kind):
    text = [*PROMPT, *write(TARGET, None).tokens, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    draft = DRAFT_KINDS[kind](TARGET)
    draft.propose([ask(text[:-9], temperature=0.0)])
    truth = []
    for at in range(len(text) - 8, len(text)):
        [proposal] = DRAFT_KINDS[kind](TARGET).propose([ask(text[:at], limit=1, temperature=0.0)])
        truth += [proposal.tokens[0] == text[at]] if len(proposal) else []
    assert draft.listen(ask(text, temperature=0.0), 8) == truth and (kind == "phrases" or any(truth))
    [same] = DRAFT_KINDS[kind](TARGET).propose([ask(text, temperature=0.0)])
    assert draft.propose([ask(text, temperature=0.0)])[0].tokens == same.tokens


def test_a_draft_that_learns_from_rounds_cannot_be_heard():
    assert LookaheadDraft(TARGET).listen(ask([1, 2, 1, 2]), 3) is None
