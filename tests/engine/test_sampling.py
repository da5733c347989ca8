"""Claims about the sampling filters: exact distributions, agreement with transformers, and fair draws."""

from __future__ import annotations

import math
from fractions import Fraction as F

import pytest
import scipy.stats
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from workbench.decoding import filters
from workbench.decoding.draws import choose
from workbench.decoding.filters import filter_stages
from workbench.decoding.sampling import SamplingSettings
from workbench.errors import WorkbenchError

# One distribution for all tables by hand. Sums from the best on: 32/64, 48/64, 56/64, 60/64, 62/64, 64/64.
PROBABILITIES = [F(8, 64), F(32, 64), F(2, 64), F(16, 64), F(4, 64), F(2, 64)]


def as_logits(probabilities: list[F]) -> torch.Tensor:
    """Log-probabilities plus a constant: logits know their distribution only up to one."""
    return torch.tensor([math.log(p) for p in probabilities], dtype=torch.float64) + 3.0


def assert_distribution(logits: torch.Tensor, expected: list[F]) -> None:
    assert sum(expected) == 1
    torch.testing.assert_close(
        logits.softmax(dim=-1), torch.tensor([float(p) for p in expected], dtype=torch.float64), rtol=0, atol=1e-12
    )
    assert [x == -math.inf for x in logits.tolist()] == [p == 0 for p in expected]


def random_logits(rows: int = 64, vocabulary: int = 500, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)


# -- tables by hand ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("temperature", 0.5, [F(64, 1368), F(1024, 1368), F(4, 1368), F(256, 1368), F(16, 1368), F(4, 1368)]),
        ("temperature", 1.0, PROBABILITIES),
        ("temperature", 0.0, [F(0), F(1), F(0), F(0), F(0), F(0)]),
        ("top_k", 1, [F(0), F(1), F(0), F(0), F(0), F(0)]),
        ("top_k", 2, [F(0), F(2, 3), F(0), F(1, 3), F(0), F(0)]),
        ("top_k", 5, PROBABILITIES),  # the fifth and the sixth are equal, so both stay
        ("top_k", 99, PROBABILITIES),
        ("top_p", 0.001, [F(0), F(1), F(0), F(0), F(0), F(0)]),  # never less than the best
        ("top_p", 0.49, [F(0), F(1), F(0), F(0), F(0), F(0)]),
        ("top_p", 0.51, [F(0), F(2, 3), F(0), F(1, 3), F(0), F(0)]),
        ("top_p", 0.8, [F(8, 56), F(32, 56), F(0), F(16, 56), F(0), F(0)]),
        # of two equals the first
        ("top_p", 0.95, [F(8, 62), F(32, 62), F(2, 62), F(16, 62), F(4, 62), F(0)]),
        ("top_p", 1.0, PROBABILITIES),
        ("min_p", 0.0, PROBABILITIES),
        ("min_p", 0.1, [F(8, 60), F(32, 60), F(0), F(16, 60), F(4, 60), F(0)]),  # threshold 3.2/64
        ("min_p", 0.3, [F(0), F(2, 3), F(0), F(1, 3), F(0), F(0)]),  # threshold 9.6/64
        ("min_p", 1.0, [F(0), F(1), F(0), F(0), F(0), F(0)]),
    ],
)
def test_each_filter_gives_the_distribution_worked_out_by_hand(name, value, expected):
    assert_distribution(filters.FILTERS[name](as_logits(PROBABILITIES), value), expected)


def test_penalties_give_the_logits_worked_out_by_hand():
    logits = torch.tensor([2.0, -1.0, 0.5, -3.0, 0.0], dtype=torch.float64)
    said = [0, 1, 1, 1, 4]
    table = {  # token 0 once, token 1 three times, token 4 once
        filters.penalize_repetition: [2.0 / 1.6, -1.0 * 1.6, 0.5, -3.0, 0.0],
        filters.penalize_presence: [2.0 - 1.6, -1.0 - 1.6, 0.5, -3.0, -1.6],
        filters.penalize_frequency: [2.0 - 1.6, -1.0 - 4.8, 0.5, -3.0, -1.6],
    }
    for penalize, expected in table.items():
        torch.testing.assert_close(penalize(logits, said, 1.6), torch.tensor(expected, dtype=torch.float64))
        assert torch.equal(penalize(logits, [], 1.6), logits)


def test_top_k_before_top_p_measures_the_mass_within_the_k():
    settings = SamplingSettings(temperature=1.0, top_k=2, top_p=0.6)
    stages = dict(filter_stages(settings, as_logits(PROBABILITIES), [0], []))
    assert list(stages) == ["model", "top_k", "top_p"]
    # after top-k the best holds 2/3, which already reaches 0.6; of the whole it held only 1/2
    assert_distribution(stages["top_p"], [F(0), F(1), F(0), F(0), F(0), F(0)])
    whole = filters.keep_top_p(as_logits(PROBABILITIES), 0.6)
    assert_distribution(whole, [F(0), F(2, 3), F(0), F(1, 3), F(0), F(0)])


# -- agreement with transformers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, theirs, values",
    [
        ("temperature", TemperatureLogitsWarper, [0.1, 0.7, 1.0, 3.0]),
        ("top_k", TopKLogitsWarper, [1, 7, 499, 500, 1000]),
        ("top_p", TopPLogitsWarper, [0.01, 0.3, 0.9, 0.999]),
        ("min_p", MinPLogitsWarper, [0.001, 0.05, 0.5, 1.0]),
    ],
)
def test_filters_agree_with_transformers(name, theirs, values):
    logits = random_logits()
    logits[:, 3] = -math.inf  # a token that something before has removed
    for value in values:
        expected = theirs(value)(None, logits.clone())
        torch.testing.assert_close(filters.FILTERS[name](logits, value), expected, rtol=1e-12, atol=0)


def test_repetition_penalty_agrees_with_transformers():
    generator = torch.Generator().manual_seed(1)
    for row, penalty in zip(random_logits(rows=8), [0.5, 0.9, 1.0, 1.1, 1.3, 2.0, 5.0, 10.0]):
        seen = torch.randint(0, 500, (1, 40), generator=generator)
        expected = RepetitionPenaltyLogitsProcessor(penalty)(seen, row[None])[0]
        torch.testing.assert_close(filters.penalize_repetition(row, seen[0].tolist(), penalty), expected)


def test_all_filters_together_agree_with_transformers():
    prompt_ids, generated_ids = [1, 2, 3, 3], [4, 5, 4]
    settings = SamplingSettings(temperature=0.7, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.3)
    for row in random_logits(rows=16):
        expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt_ids + generated_ids]), row[None])
        for warper in (
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ):
            expected = warper(None, expected)
        ours = filter_stages(settings, row, prompt_ids, generated_ids)[-1][1]
        torch.testing.assert_close(ours, expected[0])


# -- properties -------------------------------------------------------------------------------------------


def test_no_filter_changes_its_input():
    values = {"top_k": 3, "temperature": 0.5} | dict.fromkeys(["top_p", "min_p"], 0.5)
    neutral = {"top_k": 500, "temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
    for chosen in (values, neutral, {"temperature": 0.0}):
        for name, value in chosen.items():
            logits = random_logits(rows=2)
            before = logits.clone()
            filters.FILTERS[name](logits, value).fill_(7.0)
            assert torch.equal(logits, before), name
    logits = random_logits(rows=1)[0]
    before = logits.clone()
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        for value in (1.0, 0.5):
            filters.FILTERS[name](logits, [1, 2], value).fill_(7.0)
            assert torch.equal(logits, before), name


@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 0.3, 1.0, 50.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temperature_never_changes_the_order_of_tokens(temperature, dtype):
    logits = random_logits().to(dtype)
    scaled = filters.apply_temperature(logits, temperature)
    order = logits.argsort(dim=-1)
    assert (scaled.gather(-1, order).diff(dim=-1).nan_to_num(0) >= 0).all()
    assert torch.equal(scaled.argmax(-1), logits.argmax(-1))
    assert not scaled.isnan().any() and (scaled < math.inf).all()


def test_temperature_towards_zero_is_greedy():
    logits = random_logits()
    greedy = filters.apply_temperature(logits, 0.0).softmax(-1)
    assert torch.equal(greedy, torch.nn.functional.one_hot(logits.argmax(-1), 500).double())
    torch.testing.assert_close(filters.apply_temperature(logits, 1e-5).softmax(-1), greedy)


def test_greedy_takes_the_first_of_equals_and_ignores_all_filters_but_penalties():
    logits = torch.tensor([1.0, 5.0, 5.0, 2.0])
    assert choose(logits) == 1
    settings = SamplingSettings(temperature=0.0, top_k=1, top_p=0.1, min_p=1.0, presence_penalty=1.0)
    stages = filter_stages(settings, logits, [0], [1])
    assert [name for name, _ in stages] == ["model", "presence_penalty", "temperature"]
    assert choose(stages[-1][1], torch.Generator().manual_seed(0)) == choose(stages[-1][1]) == 2


def test_filters_work_on_bfloat16_and_keep_its_dtype():
    logits = random_logits().bfloat16()
    for name, value in {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.1}.items():
        assert filters.FILTERS[name](logits, value).dtype == torch.bfloat16
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert filters.FILTERS[name](logits[0], [3, 3], 0.5).dtype == torch.bfloat16


# -- draws --------------------------------------------------------------------------------------------------

FALSE_ALARM_RATE = 1e-4  # of 10,000 seeds, one would fail a right sampler; the seed is fixed


def chi_square_p(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """The chance of counts at least this far from the expected ones. A token that cannot come must not."""
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    expected = probabilities[possible] * counts.sum()
    return scipy.stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue


def draw(logits: torch.Tensor, number: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.tensor([choose(logits, generator) for _ in range(number)])
    return torch.bincount(drawn, minlength=logits.shape[0])


@pytest.mark.parametrize(
    "number, settings",
    [
        (200_000, {"temperature": 1.3, "top_k": 9, "top_p": 0.95, "min_p": 0.02}),
        (40_000, {"temperature": 1.0}),
        (40_000, {"temperature": 2.0, "top_k": 5}),
        (40_000, {"temperature": 0.7, "top_p": 0.9}),
        (40_000, {"temperature": 1.0, "min_p": 0.05}),
    ],
)
def test_draws_follow_the_filtered_distribution(number, settings):
    logits = random_logits(rows=1, vocabulary=16, seed=5)[0]
    expected = expected_probabilities(logits, **settings)
    final = filter_stages(SamplingSettings(**settings), logits, [0], [])[-1][1]
    p = chi_square_p(draw(final, number), expected)
    assert p > FALSE_ALARM_RATE, f"p = {p}"


def expected_probabilities(logits, temperature, top_k=16, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """The same filters once more, in plain Python on a list of weights."""
    weight = {token: math.exp(x / temperature) for token, x in enumerate(logits.tolist())}
    ranked = sorted(weight, key=lambda token: -weight[token])[:top_k]
    total, mass, kept = sum(weight[t] for t in ranked), 0.0, []
    for token in ranked:
        if mass < top_p * total and weight[token] >= min_p * weight[ranked[0]]:
            kept.append(token)
        mass += weight[token]
    total = sum(weight[t] for t in kept)
    return torch.tensor([weight[t] / total if t in kept else 0.0 for t in range(len(weight))], dtype=torch.float64)


def test_a_biased_sampler_is_found_out():
    """The chi-square test is no empty promise: samplers with plausible mistakes fail it at the same size."""
    logits = random_logits(rows=1, vocabulary=16, seed=5)[0]
    settings = {"temperature": 1.3, "top_k": 9, "top_p": 0.95, "min_p": 0.02}
    expected = expected_probabilities(logits, **settings)
    slips = {
        "temperature a little off": expected ** (1 / 1.03),
        "one part in fifty from the best to all": 0.98 * expected + 0.02 / 16,
        "top-p forgotten": expected_probabilities(logits, **settings | {"top_p": 1.0}),
    }
    generator = torch.Generator().manual_seed(0)
    for name, probabilities in slips.items():
        drawn = probabilities.multinomial(200_000, replacement=True, generator=generator)
        assert chi_square_p(torch.bincount(drawn, minlength=16), expected) < FALSE_ALARM_RATE, name


def test_a_removed_token_is_never_drawn_even_at_the_edges_of_the_uniform_number(monkeypatch):
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    for uniform, expected in ((0.0, 1), (0.4999, 1), (0.5, 3), (1 - 2**-53, 3)):
        monkeypatch.setattr(torch, "rand", lambda *_, u=uniform, **__: torch.tensor(u, dtype=torch.float64))
        assert choose(logits, torch.Generator()) == expected


# -- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, bad",
    [
        ("temperature", [math.nan, math.inf, -0.1, True, "1", None]),
        ("top_k", [0, -1, 2.0, True, "3"]),
        ("top_p", [0.0, -0.5, 1.0001, math.nan, True, None]),
        ("min_p", [-0.1, 1.1, math.nan, None]),
        ("repetition_penalty", [0.0, -1.0, math.nan, math.inf]),
        ("presence_penalty", [math.nan, math.inf, None]),
        ("frequency_penalty", [math.nan, -math.inf, "0"]),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name, bad):
    for value in bad:
        with pytest.raises(WorkbenchError, match=name) as refused:
            SamplingSettings(**{name: value})
        assert repr(value) in str(refused.value)


def test_logits_that_are_no_distribution_are_refused_with_their_source():
    for bad, message in ((math.nan, "NaN"), (math.inf, r"\+inf"), (None, "removed every token")):
        logits = torch.full((4,), -math.inf) if bad is None else torch.tensor([0.0, bad, 1.0, 2.0])
        for generator in (None, torch.Generator()):
            with pytest.raises(WorkbenchError, match=message):
                choose(logits, generator)
        with pytest.raises(WorkbenchError, match=r"the model (gave|removed)"):
            filter_stages(SamplingSettings(), logits, [0], [])
    with pytest.raises(WorkbenchError, match=r"logits\[-1\]"):
        filter_stages(SamplingSettings(), torch.zeros(2, 4), [0], [])


def test_penalties_refuse_token_ids_outside_the_vocabulary():
    for bad in ([4], [-1]):
        with pytest.raises(WorkbenchError, match="0 … 3"):
            filters.penalize_frequency(torch.zeros(4), bad, 0.5)


# -- replacing a filter ------------------------------------------------------------------------------------


def test_a_replaced_filter_is_called_in_its_place_and_may_change_its_own_copy():
    def only_the_worst(logits: torch.Tensor, k: int) -> torch.Tensor:
        logits[logits > logits.min()] = -math.inf
        return logits

    logits = as_logits(PROBABILITIES[:5])
    settings = SamplingSettings(temperature=1.0, top_k=3)
    stages = dict(filter_stages(settings, logits, [0], [], {"top_k": only_the_worst}))
    assert_distribution(stages["top_k"], [F(0), F(0), F(1), F(0), F(0)])
    assert torch.equal(stages["model"], as_logits(PROBABILITIES[:5]))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda logits, p: None, "filter 'top_p' must return logits of shape .6., got NoneType"),
        (lambda logits, p: logits[:2], "got .2."),
        (lambda logits, p: logits * math.nan, "filter 'top_p' gave NaN"),
        (lambda logits, p: logits - math.inf, "filter 'top_p' removed every token"),
    ],
)
def test_a_replacement_that_returns_nonsense_is_named(wrong, message):
    settings = SamplingSettings(temperature=1.0, top_p=0.5)
    with pytest.raises(WorkbenchError, match=message):
        filter_stages(settings, as_logits(PROBABILITIES), [0], [], {"top_p": wrong})


def test_an_unknown_filter_name_is_answered_with_the_nearest():
    with pytest.raises(WorkbenchError, match="unknown filter 'topp'; did you mean 'top_p'"):
        filter_stages(SamplingSettings(), torch.zeros(4), [0], [], {"topp": filters.keep_top_p})


@pytest.mark.parametrize("p", [5e-324, 1e-300, 1e-46])
def test_top_p_keeps_the_best_token_however_small_p_is(p):
    """In float32 such a p is 0, and every token was removed."""
    kept = filters.keep_top_p(torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 1.0]]), p)
    assert kept.isfinite().tolist() == [[False, True, False], [True, False, False]]
