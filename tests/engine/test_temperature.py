"""A temperature near zero is greedy on every path, whatever the numbers' type; logits are checked after filters too."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import every_pair, random_decoder, tiny_config

from workbench.decoding import SamplingSettings
from workbench.decoding.draws import choose
from workbench.decoding.filters import apply_temperature, check_logits, filter_stages
from workbench.decoding.sampling import Sampler, TokenDistribution, draws_for
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kernels import sampling as kernels
from workbench.models.graphs import Decoded
from workbench.serving import Engine, Request, SchedulerSettings
from workbench.serving.ahead import chosen
from workbench.speculation import ModelDraft

SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
GREEDY_BELOW = [5e-324, 1e-300, 1e-45, 1e-38]
DIVIDED = [SMALLEST_NORMAL, 1e-30, 1e-6]  # so small that with these logits the best token has it all
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROWS = {
    "mixed": [-3.0, 2.0, 1.5, -40.0, 0.0],
    "all below zero": [-900.0, -800.0, -850.0, -810.0, -60000.0],
    "all above zero": [900.0, 800.0, 850.0, 810.0, 60000.0],
    "some removed": [-math.inf, 0.0, -1.0, -math.inf, -2.0],
    "the best is zero": [-1.0, -2.0, -3.0, 0.0, -0.5],
    "all removed but one": [-math.inf, -math.inf, -5.0, -math.inf, -math.inf],
}
V = 32
MODEL = random_decoder(tiny_config(vocab_size=V), seed=0).double()
SMALL = random_decoder(tiny_config(vocab_size=V, num_layers=1), seed=1).double()
PROMPT = [1, 5, 9, 5, 9]
PATHS = {
    "naive loop": {},
    "contiguous": {"kv": "contiguous"},
    "model draft": {"draft": lambda: ModelDraft(SMALL)},
    "draft tree": {"draft": lambda: ModelDraft(SMALL, branching=(2, 2))},
    "lookup": {"draft": lambda: "prompt_lookup"},
}
ENGINES = {
    "engine": {},
    "asynchronous": {"asynchronous": True},
    "engine with a draft": {"settings": SchedulerSettings(draft_tokens=3), "draft": lambda: ModelDraft(SMALL)},
    "static": {"settings": SchedulerSettings(batching="static")},
}


@every_pair(temperature=[*GREEDY_BELOW, *DIVIDED], dtype=DTYPES, row=ROWS)
def test_the_best_token_has_all_the_probability(temperature, dtype, row):
    logits = torch.tensor([ROWS[row], ROWS["mixed"]], dtype=dtype)
    before = logits.clone()
    for left in (apply_temperature(logits, temperature), apply_temperature(logits[0], temperature)[None]):
        check_logits(left, "the temperature")
        best = logits[: len(left)].argmax(-1)
        assert (left.double().softmax(-1).gather(-1, best[:, None]) == 1).all()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_best_tokens_share_above_the_smallest_temperature_and_the_first_has_all_below(dtype):
    logits = torch.tensor([-7.0, 3.0, 3.0, 1.0], dtype=dtype)
    assert apply_temperature(logits, SMALLEST_NORMAL).double().softmax(-1).tolist() == [0, 0.5, 0.5, 0]
    for temperature in (0.0, *GREEDY_BELOW):
        assert apply_temperature(logits, temperature).double().softmax(-1).tolist() == [0, 1, 0, 0]
        assert SamplingSettings(temperature=temperature).greedy
        assert SamplingSettings(temperature=temperature, top_p=0.5).active() == ["temperature"]
    assert not SamplingSettings(temperature=SMALLEST_NORMAL).greedy


def test_a_small_temperature_is_the_softmax_of_exact_differences():
    """As the temperature falls the best token's share rises to 1, and never falls."""
    logits, shares = torch.tensor([0.3, 0.1, -0.2], dtype=torch.float64), []
    for exponent in range(0, 330, 3):
        shares.append(apply_temperature(logits, 10.0**-exponent).softmax(-1)[0].item())
    assert shares == sorted(shares) and shares[-1] == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [3.5e38, 1e39, 1e300, 10**39, 10**300])
def test_a_temperature_beyond_float32_leaves_all_tokens_equally_probable_and_those_removed_stay_so(temperature, dtype):
    """A removed token's −inf / inf was NaN; a whole number of that size could not be divided by at all."""
    left = apply_temperature(torch.tensor([-math.inf, 3.0, 2.0, -4.0], dtype=dtype), temperature)
    assert left.double().softmax(-1).tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    settings = SamplingSettings(temperature=temperature, top_p=0.9)
    logits = torch.tensor([[-math.inf, 3.0, 2.0, -4.0]], dtype=dtype)
    tokens, tops = chosen(Decoded(logits, logits.argmax(-1), logits.amax(-1)), [settings], [0.99])
    assert tokens.item() and tops.isfinite().all()
    assert Sampler(TokenDistribution(settings, [0]), draws_for(settings, 0)).choose(logits[0], [0])


@pytest.mark.parametrize("penalty", [1e6, 1e-6, 10**6])
@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_the_largest_penalties_leave_a_distribution(name, penalty):
    """Larger ones are refused: 0 · inf was NaN, of every token that had not been generated."""
    settings = SamplingSettings(1.0, **{name: penalty})
    row = torch.tensor([-math.inf, -30.0, 0.0, 30.0, -30.0, 0.0, 30.0])
    check_logits(filter_stages(settings, row, [], [1, 2, 3, 3])[-1][1], "penalties")


def greedy_settings(temperature: float) -> dict:
    return {"temperature": temperature, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3}


@every_pair(path=PATHS, temperature=[*GREEDY_BELOW, *DIVIDED])
def test_generate_is_greedy_near_zero(path, temperature):
    given = {name: value() if name == "draft" else value for name, value in PATHS[path].items()}
    how = {"max_new_tokens": 8, "stop_token_ids": ()}
    assert generate(MODEL, PROMPT, **how, **given, **greedy_settings(temperature)).tokens == BEST


BEST = generate(MODEL, PROMPT, max_new_tokens=8, stop_token_ids=()).tokens


@every_pair(path=ENGINES, temperature=[*GREEDY_BELOW, *DIVIDED])
def test_the_engine_is_greedy_near_zero(path, temperature):
    given = {name: value() if name == "draft" else value for name, value in ENGINES[path].items()}
    sampling = SamplingSettings(temperature=temperature, top_k=5, top_p=0.9, min_p=0.1)
    it = Engine(MODEL, given.pop("settings", None), num_blocks=40, **given)
    asked = [Request(i, PROMPT, 8, sampling, seed=i, stop_token_ids=()) for i in range(3)]
    assert [f.token_ids for f in it.run(asked)] == [tuple(BEST)] * 3


@every_pair(temperature=[*GREEDY_BELOW, *DIVIDED], dtype=DTYPES, row=ROWS)
def test_everything_that_chooses_takes_the_best(temperature, dtype, row):
    logits = torch.tensor(ROWS[row], dtype=dtype)
    best, settings = int(logits.argmax()), SamplingSettings(temperature=temperature, top_p=0.5)
    assert Sampler(TokenDistribution(settings, [0]), draws_for(settings, 0)).choose(logits, [0]) == best
    assert choose(filter_stages(settings, logits, [0], [])[-1][1], torch.Generator().manual_seed(0)) == best
    one = logits[None]
    tokens, tops = chosen(Decoded(one, one.argmax(-1), one.amax(-1)), [settings], [0.5])
    assert tokens.tolist() == [best] and tops.isfinite().all()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of what is −inf then
@every_pair(temperature=[0.0, *GREEDY_BELOW, *DIVIDED], dtype=DTYPES[:3], version=[1, 2], filters=[False, True])
def test_the_kernel_and_its_twin_take_the_best(temperature, dtype, version, filters):
    logits = torch.tensor(list(ROWS.values()), dtype=dtype)
    heat = torch.full((len(logits),), temperature, dtype=torch.float64).float()
    uniform = torch.linspace(0, 0.99, len(logits))
    given = (torch.full((len(logits),), 2, dtype=torch.int32), torch.full((len(logits),), 0.9)) if filters else ()
    expected = logits.argmax(-1).tolist()
    assert kernels.sample_reference(logits, uniform, heat, *given).tolist() == expected
    assert kernels.sample(logits, uniform, heat, *given, version=version).tolist() == expected


# -- logits are checked after the filters ------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [math.nan, -math.inf, math.inf])
def test_what_filters_leave_is_checked(left, monkeypatch):
    monkeypatch.setitem(filters_of(), "top_p", lambda logits, p: torch.full_like(logits, left))
    settings = SamplingSettings(temperature=1.0, top_p=0.5)
    sampler = Sampler(TokenDistribution(settings, [0]), draws_for(settings, 0))
    with pytest.raises(WorkbenchError, match=r"the filters \(top_p\) (gave|removed)"):
        sampler.choose(torch.zeros(5), [0])
    decoded = Decoded(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), torch.zeros(2))
    _, tops = chosen(decoded, [settings, SamplingSettings(temperature=1.0)], [0.5, 0.5])
    assert not tops[0].isfinite() and tops[1].isfinite()


def filters_of():
    from workbench.decoding import filters

    return filters.FILTERS


@pytest.mark.parametrize("path", ENGINES)
@pytest.mark.parametrize("left", [math.nan, -math.inf])
def test_a_filter_that_leaves_nothing_ends_its_own_sequence(path, left, monkeypatch):
    right = filters_of()["min_p"]
    wrong = lambda logits, p: torch.full_like(logits, left) if p == 0.25 else right(logits, p)  # noqa: E731
    asked = [
        Request(i, PROMPT, 6, SamplingSettings(1.0, min_p=p), seed=i, stop_token_ids=())
        for i, p in enumerate([0.1, 0.25, 0.1])
    ]
    alone = {
        r.id: tuple(
            generate(MODEL, PROMPT, max_new_tokens=6, temperature=1.0, min_p=0.1, seed=r.id, stop_token_ids=()).tokens
        )
        for r in asked
    }
    monkeypatch.setitem(filters_of(), "min_p", wrong)
    given = {name: value() if name == "draft" else value for name, value in ENGINES[path].items()}
    it = Engine(MODEL, given.pop("settings", None), num_blocks=40, **given)
    ended = {f.request_id: f for f in it.run(asked)}
    assert ended[1].finish_reason == "error" and isinstance(ended[1].error, WorkbenchError)
    assert ended[1].token_ids == () and not it.kv.tables.tables
    for name in (0, 2):
        assert ended[name].finish_reason == "length"
        if path != "engine with a draft":  # drafts take random numbers of the same generator
            assert ended[name].token_ids == alone[name]
