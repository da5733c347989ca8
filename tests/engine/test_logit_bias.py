"""A bias is added to the model's logits before all other filters, for target and draft, here and on the device."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_engine import check_empty
from test_log_probs import SETTINGS, TARGET, engine

from workbench.decoding.device_sampling import why_not_kernel
from workbench.decoding.filters import add_bias, filter_stages
from workbench.decoding.sampling import SamplingSettings, TokenDistribution
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.serving import Request
from workbench.serving.soak_kinds import VOCABULARY as V
from workbench.speculation import ModelDraft

BIAS = {3: 2.5, 0: -100, 17: 1.25, 8: -3}
OTHERS = {
    "warm": {"temperature": 0.7},
    "nucleus": {"temperature": 1.5, "top_p": 0.6},
    "few": {"temperature": 1.0, "top_k": 5, "min_p": 0.1},
    "penalized": {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
    "greedy": {},
    "greedy, penalized": {"presence_penalty": 1.0},
}


class Odd:
    """A grammar of odd tokens."""

    def allowed(self, generated_ids) -> torch.Tensor:
        return torch.arange(V) % 2 == 1

    def forced(self, generated_ids) -> list[int]:
        return []

    def again(self) -> Odd:
        return self


@pytest.mark.parametrize("guide", [None, Odd()], ids=["free", "a grammar"])
@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_the_distribution_is_that_of_logits_to_which_it_was_added(others, guide):
    """Within rounding of float64: first the grammar's mask, then the bias, then the others."""
    logits = 3 * torch.randn(4, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    prompt, text = [3, 8, 8], [3, 8, 8, 17, 3]
    biased = TokenDistribution(SamplingSettings(**others, logit_bias=BIAS), prompt, guide=guide)
    for row, got in zip(logits, biased.probabilities(logits, lambda _: text)):
        plain = [value + BIAS.get(token, 0) for token, value in enumerate(row.tolist())]
        if guide is not None:
            plain = [value if token % 2 else -torch.inf for token, value in enumerate(plain)]
        expected = filter_stages(
            SamplingSettings(**others), torch.tensor(plain, dtype=torch.float64), prompt, text[3:]
        )[-1][1]
        torch.testing.assert_close(got, expected.softmax(dim=-1), rtol=1e-12, atol=0)
    assert biased.best(logits, lambda _: text) == biased.probabilities(logits, lambda _: text).argmax(-1).tolist()


def requests() -> list[Request]:
    return [
        Request(
            i,
            tuple(range(1, 5 + i)),
            10,
            SamplingSettings(**others, logit_bias={**BIAS, 5 + i: 4.0} if i != 2 else ()),
            seed=i,
            n=1 + (i == 1),
            stop_token_ids=(),
        )
        for i, others in enumerate([*OTHERS.values(), OTHERS["greedy"]])
    ]


def alone(request: Request, sample: int) -> list[int]:
    values = dataclasses.asdict(request.sampling)
    how = {"seed": request.seed + sample, "stop_token_ids": (), "kv": "contiguous"}
    return generate(TARGET, request.prompt_ids, max_new_tokens=10, **how, **values).tokens


ALONE = {(request.id, sample): alone(request, sample) for request in requests() for sample in range(request.n)}


@pytest.mark.parametrize(
    ("settings", "asynchronous"),
    [(name, ahead) for name in SETTINGS for ahead in (False, True) if ahead or name != "recorded"],
)
def test_the_engine_writes_what_generate_writes(settings, asynchronous):
    it = engine(asynchronous=asynchronous, **SETTINGS[settings])
    asked = {request.id: request for request in requests()}
    for one in it.run(asked.values()):
        sampling = asked[one.request_id].sampling
        assert one.error is None and (0 not in one.token_ids or not sampling.logit_bias)
        if "draft" not in SETTINGS[settings] or sampling.greedy:
            assert list(one.token_ids) == ALONE[one.request_id, one.sample]
    check_empty(it)


@pytest.mark.parametrize("others", ["warm", "few", "greedy"])
def test_a_bias_needs_no_token_on_the_host(others):
    """So a step with it is sent ahead of the tokens before it."""
    request = Request("a", (1, 2, 3), 10, SamplingSettings(**OTHERS[others], logit_bias=BIAS), 7, ())
    it = engine(asynchronous=True)
    [one] = it.run([request])
    assert list(one.token_ids) == alone(request, 0) and it.ahead.ran_ahead == 9 and not it.ahead.waited


@pytest.mark.parametrize("others", OTHERS)
def test_target_and_draft_are_biased_alike(others):
    """All that a draft proposes that is the target itself is accepted, and its text has no token that was ruled out."""
    sampling = SamplingSettings(**OTHERS[others], logit_bias=dict.fromkeys(range(0, V, 2), -100))
    it = engine(draft=ModelDraft(TARGET))
    [one] = it.run([Request("a", (1, 2, 3), 20, sampling, 7, ())])
    assert one.drafted == one.accepted > 5 and all(token % 2 for token in one.token_ids)


def test_it_is_kept_as_pairs_in_order_whatever_it_was_given_as():
    given = dict(BIAS)
    settings = SamplingSettings(logit_bias=given)
    given[3] = 9.0
    assert settings.logit_bias == ((0, -100.0), (3, 2.5), (8, -3.0), (17, 1.25))
    assert settings == SamplingSettings(logit_bias=list(BIAS.items())) == dataclasses.replace(settings)
    assert hash(settings) == hash(SamplingSettings(logit_bias=settings.logit_bias))
    assert SamplingSettings(logit_bias=None) == SamplingSettings(logit_bias={}) == SamplingSettings()
    assert "logit_bias" not in SamplingSettings(logit_bias={}).active()
    assert "no logit_bias" in why_not_kernel(SamplingSettings(1.0, logit_bias={1: 1}), torch.zeros(1, V))


@pytest.mark.parametrize(
    "given",
    [
        *({3: value} for value in (-100.1, 101, float("nan"), float("inf"), "0", None, True, 10**400)),
        *({value: 1.0} for value in (-1, 1.0, True, "3", None)),
        *(5, "text", b"text", {1, 2}, [3], [(3,)], [(3, 1), (3, 2)], object()),
    ],
    ids=lambda given: f"{given!r:.30}".partition(" at 0x")[0],
)
def test_what_is_no_bias_is_refused(given):
    for call in (
        lambda: SamplingSettings(logit_bias=given),
        lambda: add_bias(torch.zeros(V), given),
        lambda: generate(TARGET, [1], max_new_tokens=1, logit_bias=given),
    ):
        with pytest.raises(WorkbenchError, match="logit_bias must be"):
            call()


def test_a_token_that_the_model_does_not_have_is_refused():
    for call in (
        lambda: engine().add(Request("a", (1,), 1, SamplingSettings(logit_bias={V: 1}))),
        lambda: generate(TARGET, [1], max_new_tokens=1, logit_bias={V: 1}),
        lambda: add_bias(torch.zeros(V), {V: 1}),
    ):
        with pytest.raises(WorkbenchError, match=f"lie in 0 … {V - 1}"):
            call()
