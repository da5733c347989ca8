"""A token drawn by our kernel is the one that torch draws, but for a share of random numbers that is counted."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import random_decoder, tiny_config
from kernel_claims import HERE, where_kernels_run

import workbench as wb
from workbench.decoding import SamplingSettings
from workbench.decoding.device_sampling import KernelSampler, drawn
from workbench.decoding.draws import BestDraws, RandomDraws
from workbench.decoding.filters import filter_rows
from workbench.decoding.sampling import TokenDistribution, draws_for
from workbench.kernels import launch
from workbench.models import prepare
from workbench.models.graphs import Decoded
from workbench.serving import Engine, Request, SchedulerSettings
from workbench.serving.ahead import chosen

pytestmark = where_kernels_run
V = 64
SETTINGS = {
    "warm": SamplingSettings(temperature=1.3),
    "cool": SamplingSettings(temperature=0.4),
    "the five best": SamplingSettings(temperature=1.0, top_k=5),
    "a nucleus": SamplingSettings(temperature=0.8, top_p=0.7),
    "all alike": SamplingSettings(temperature=1e300),
    "a nucleus of the ten best": SamplingSettings(temperature=1.5, top_k=10, top_p=0.9),
}
IN_TORCH = {
    "min-p": SamplingSettings(temperature=1.0, min_p=0.05),
    "penalized": SamplingSettings(temperature=0.9, repetition_penalty=1.3),
    "biased": SamplingSettings(temperature=0.9, logit_bias={3: 5.0, 9: -100}),
}


@pytest.fixture(scope="module")
def model():
    made = prepare(random_decoder(tiny_config(vocab_size=V, num_layers=1), seed=0).to(HERE))
    made.kernels = "triton"  # of its samplers; its layers stay as they are, which takes a tenth of the time here
    return made


def sampler(settings: SamplingSettings, seed: int = 0) -> KernelSampler:
    distribution = TokenDistribution(settings, (1, 2))
    return KernelSampler(distribution, draws_for(distribution, seed))


# -- the distribution ------------------------------------------------------------------------------------------------


def whole_shares(scaled: torch.Tensor) -> torch.Tensor:
    """[V] int64, as the kernel has them."""
    kept = scaled.isfinite()
    return torch.where(kept, ((scaled - scaled.amax()).exp() * 2.0**40 + 0.5).long(), 0)


@pytest.mark.parametrize("vocabulary", [300, 128_256])
@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
def test_the_shares_are_within_the_stated_distance_and_few_random_numbers_give_another_token(vocabulary, spread):
    logits = spread * torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    p = logits.double().softmax(-1)
    shares = whole_shares(logits)
    q = shares.double() / shares.sum().double()
    entropy = -(p * p.clamp(min=1e-300).log()).sum().item()
    distance = (p - q).abs().sum().item() / 2
    assert distance <= (4 + 2 * entropy) * 2**-24 + vocabulary * 2**-41
    # both take the first token whose cumulative probability exceeds the number: all numbers between two ends differ
    ours, theirs = q.cumsum(-1), p.cumsum(-1)
    points = torch.cat((torch.zeros(1).double(), ours, theirs)).sort().values.clamp(max=1)
    middles, lengths = (points[1:] + points[:-1]) / 2, points.diff()
    another = torch.searchsorted(ours, middles, right=True) != torch.searchsorted(theirs, middles, right=True)
    assert lengths[another].sum().item() < vocabulary * distance + 1e-12
    assert lengths[another].sum().item() < 2e-4 if vocabulary > 1000 else 1e-6


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_kernel_draws_what_torch_draws_with_the_same_number(settings):
    logits = 2 * torch.randn(3, V, generator=torch.Generator().manual_seed(1)).to(HERE)
    logits[:, ::7] = -math.inf
    ends = filter_rows(logits, settings).double().softmax(-1).cumsum(-1).cpu()
    uniforms = torch.rand(3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert (ends - uniforms[:, None]).abs().min() > 1e-6  # none lies where the two may differ
    at, tokens = drawn(logits, [settings] * 3, uniforms.tolist(), range(3))
    assert at.tolist() == [0, 1, 2]
    assert tokens.tolist() == torch.searchsorted(ends, uniforms[:, None], right=True)[:, 0].tolist()


def test_what_shares_a_call_changes_no_token():
    logits = 2 * torch.randn(3, V, generator=torch.Generator().manual_seed(3)).to(HERE)
    uniforms = [0.35, 0.85, 1 - 2**-53]  # the last rounds to 1 in float32
    settings = [SETTINGS[name] for name in ("the five best", "a nucleus", "warm")]
    _, together = drawn(logits, settings, uniforms, range(3))
    _, backwards = drawn(logits, settings[::-1], uniforms[::-1], [2, 1, 0])
    alone = [drawn(logits, [settings[i]], [uniforms[i]], [i])[1].item() for i in range(3)]
    assert together.tolist() == backwards.tolist()[::-1] == alone


# -- who draws -------------------------------------------------------------------------------------------------------


def test_what_the_kernel_lacks_is_drawn_in_torch_and_says_why():
    logits = torch.zeros(1, V, device=HERE)

    class Own(TokenDistribution):
        """Nobody here knows what it does."""

    plain = TokenDistribution(SETTINGS["warm"], ())
    own = Own(SETTINGS["warm"], ())
    replaced = TokenDistribution(SETTINGS["warm"], (), replace={"temperature": lambda x, t: x})
    draws = RandomDraws(torch.Generator())
    assert sampler(SETTINGS["a nucleus of the ten best"]).why_in_torch(logits) == ""
    assert "chance comes from elsewhere" in KernelSampler(plain, BestDraws()).why_in_torch(logits)
    assert KernelSampler(own, draws).why_in_torch(logits) == "a token distribution of its own"
    assert "a function" in KernelSampler(replaced, draws).why_in_torch(logits)
    assert sampler(IN_TORCH["min-p"]).why_in_torch(logits) == "the kernel has no min_p"
    assert sampler(IN_TORCH["penalized"]).why_in_torch(logits) == "the kernel has no repetition_penalty"
    assert sampler(SETTINGS["warm"]).why_in_torch(logits.double()) == "the kernel has float32, the logits are float64"


def test_a_step_draws_all_its_rows_in_one_call_and_a_row_without_a_distribution_is_left_out():
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(4)).to(HERE)
    logits[2, 5] = math.nan
    rows = [sampler(SETTINGS["warm"], 0), sampler(IN_TORCH["min-p"], 1), sampler(SETTINGS["warm"], 2)]
    rows.append(sampler(SETTINGS["the five best"], 3))
    with launch.launches() as counted:
        tokens_of = KernelSampler.choose_together(rows, logits)
    assert tokens_of.keys() == {0, 3} and counted.total() == 3 + 9  # the best, the sums, the draw; and one search
    with launch.launches() as counted:
        decoded = Decoded(logits, logits.argmax(-1), logits.amax(-1))
        tokens, tops = chosen(decoded, [one.distribution.settings for one in rows], [0.5, None, 0.5, 0.5], True)
    assert counted.total() == 12 and [math.isfinite(top) for top in tops.tolist()] == [True, True, False, True]
    assert tokens[1] == logits[1].argmax()


def requests() -> list[Request]:
    every = [SETTINGS["warm"], SETTINGS["the five best"], IN_TORCH["min-p"], None]
    return [
        Request(i, tuple(range(3 + i, 6 + i)), 2, sampling=settings, seed=i, n=1 + (i == 0), stop_token_ids=())
        for i, settings in enumerate(every)
    ]


def test_a_request_has_the_same_tokens_alone_in_the_engine_and_one_step_ahead(model):
    def texts(asynchronous: bool) -> tuple[dict, int]:
        it = Engine(model, SchedulerSettings(max_running=4), num_blocks=64, block_size=4, asynchronous=asynchronous)
        with launch.launches() as counted:
            done = {(one.request_id, one.sample): one.token_ids for one in it.run(requests())}
        return done, counted["_draw"]

    together, draws = texts(False)
    ahead, draws_ahead = texts(True)
    assert together == ahead and draws and draws_ahead
    for one in requests():
        chosen_by = {} if one.sampling is None else vars(one.sampling)
        alone = wb.generate(model, one.prompt_ids, max_new_tokens=2, seed=one.seed, stop_token_ids=(), **chosen_by)
        assert tuple(alone.tokens) == tuple(together[one.id, 0]), one.id
    assert draws == draws_ahead < 6  # 6 drawn tokens in fewer calls
