"""Log-probabilities of generated tokens and of prompts are those of one plain forward, however a request is served."""

from __future__ import annotations

import math

import pytest
import torch
from sampled_requests import SAMPLING, tokens
from test_engine import check_empty

from workbench.decoding import log_probs
from workbench.decoding.sequence import Finished, LogProb, Request, Sequence
from workbench.kv import make_kv
from workbench.models import prepare
from workbench.models.batch import Batch
from workbench.serving import Engine, SchedulerSettings, StepReport
from workbench.serving.soak_kinds import DRAFTS, Models, tiny_model
from workbench.speculation import ModelDraft

TARGET = tiny_model(0, 2)
SMALL = tiny_model(1, 1)
SETTINGS = {
    "as it comes": {},
    "chunks of 1": {"chunk": 1},
    "chunks of 3": {"chunk": 3},
    "recomputed": {"num_blocks": 18},
    "swapped": {"num_blocks": 18, "preemption": "swap"},
    "static": {"batching": "static"},
    "recorded": {"graphs": True, "chunk": 1},
    "drafts": {"draft": ModelDraft(TARGET)},
    "drafts of a tree": {"draft": ModelDraft(SMALL, branching=(2, 2))},
    "drafts from hidden states": {"draft": DRAFTS["eagle"](Models(), TARGET), "chunk": 5},
}


def engine(model=TARGET, *, asynchronous: bool = False, **given) -> Engine:
    own = {name: given.pop(name) for name in ("draft", "graphs") if name in given}
    blocks = given.pop("num_blocks", 60)
    settings = SchedulerSettings(max_running=4, token_budget=24, draft_tokens=3 * ("draft" in own), **given)
    return Engine(model, settings, num_blocks=blocks, block_size=2, asynchronous=asynchronous, **own)


def requests(**changes) -> list[Request]:
    """Some ask for log-probabilities of both kinds, of one, or of none; all prompts begin with the same tokens."""
    asked = [(3, 2), (0, None), (None, 20), (None, None), (20, 0)]
    sampling = ["greedy", "drawn", "few", "penalized", "greedy, penalized"]
    shared = [t % 23 for t in tokens(6, 7)]
    return [
        Request(
            i,
            (*shared, *(t % 23 for t in tokens(1 + 2 * i, i))),
            9,
            sampling=SAMPLING[how],
            seed=i,
            stop_token_ids=(),
            n=2 if i == 0 else 1,
            log_probs=new,
            prompt_log_probs=old,
            **changes,
        )
        for i, ((new, old), how) in enumerate(zip(asked, sampling))
    ]


def forward(token_ids) -> torch.Tensor:
    """[n, V] log softmax of one plain forward, without a cache."""
    batch = Batch.of([list(token_ids)], logits="all")
    with torch.inference_mode():
        return TARGET(batch, make_kv("recompute", TARGET.config)).log_softmax(dim=-1)


def check(answer, rows: torch.Tensor, token_ids, top: int) -> None:
    assert len(answer) == len(token_ids) == len(rows)
    for one, row, token_id in zip(answer, rows, token_ids):
        values, ids = row.topk(top)
        assert one.token_id == token_id and math.isclose(one.log_prob, row[token_id].item(), rel_tol=1e-9)
        assert [token for token, _ in one.top] == ids.tolist()
        assert torch.tensor([value for _, value in one.top]).allclose(values.float())


def check_against_a_plain_forward(request: Request, one: Finished) -> None:
    rows, prompt = forward(request.prompt_ids + one.token_ids), len(request.prompt_ids)
    if request.log_probs is None:
        assert one.log_probs is None
    else:
        check(one.log_probs, rows[prompt - 1 : -1], one.token_ids, request.log_probs)
    if request.prompt_log_probs is None:
        assert one.prompt_log_probs is None
    else:
        assert one.prompt_log_probs[0] is None
        check(one.prompt_log_probs[1:], rows[: prompt - 1], request.prompt_ids[1:], request.prompt_log_probs)


@pytest.mark.parametrize(
    ("settings", "asynchronous"),
    [(name, ahead) for name in SETTINGS for ahead in (False, True) if ahead or name != "recorded"],
)
def test_they_are_those_of_one_plain_forward(settings, asynchronous):
    it = engine(asynchronous=asynchronous, **SETTINGS[settings])
    reports: list[StepReport] = []
    asked = {request.id: request for request in requests()}
    ended = it.run(asked.values(), watch=reports.append)
    assert len(ended) == 6 and all(one.error is None for one in ended)
    for one in ended:
        check_against_a_plain_forward(asked[one.request_id], one)
        emitted = [new for report in reports for new in report.emitted.get((one.request_id, one.sample), ())]
        assert tuple(new.token_id for new in emitted) == one.token_ids
        if one.log_probs is not None:
            assert [LogProb(new.token_id, new.log_prob, new.top) for new in emitted] == list(one.log_probs)
        else:
            assert {(new.log_prob, new.top) for new in emitted} == {(None, ())}
    assert settings not in ("recomputed", "swapped") or it.scheduler.preemptions
    assert settings != "recorded" or sum(it.graphs.replayed.values())
    assert settings not in ("drafts", "drafts of a tree") or sum(report.accepted for report in reports)
    if asynchronous and "draft" not in SETTINGS[settings] and settings != "static":
        assert {"log-probabilities are read on the host", "log-probabilities of a prompt"} & it.ahead.waited.keys()
    check_empty(it)


def test_a_prompt_with_log_probs_is_computed_whole_and_found_again_by_those_that_do_not_ask():
    [_, _, asks, silent, _] = requests()
    it = engine()
    for request, hits in ((silent, 0), (asks, 0)):
        [one] = it.run([request])
        assert one.hit_tokens == hits
        check_against_a_plain_forward(request, one)
    again = Request("again", asks.prompt_ids, 2, stop_token_ids=())
    assert it.run([again])[0].hit_tokens == len(asks.prompt_ids) // 2 * 2


def test_asking_changes_no_token_and_nothing_is_computed_for_those_that_do_not_ask(monkeypatch):
    plain = [Request(r.id, r.prompt_ids, 9, r.sampling, r.seed, (), r.n) for r in requests()]
    with monkeypatch.context() as context:
        for name in ("workbench.decoding.step", "workbench.speculation.engine"):
            context.setattr(f"{name}.log_probs_of", None)
        context.setattr("workbench.decoding.step.with_prompt_rows", None)
        expected = {(one.request_id, one.sample): one.token_ids for one in engine().run(plain)}
    assert {(one.request_id, one.sample): one.token_ids for one in engine().run(requests())} == expected


def test_rows_of_a_prompt_are_asked_for_a_chunk_at_a_time_and_once(monkeypatch):
    """Also of a request that is preempted in the middle of its answer, whose prompt is computed again."""
    rows = []
    right = log_probs.log_probs_of
    monkeypatch.setattr(
        log_probs, "log_probs_of", lambda logits, ids, top: rows.append(len(logits)) or right(logits, ids, top)
    )
    asks = Request("asks", tuple(range(1, 21)), 8, stop_token_ids=(), prompt_log_probs=1)
    it = engine(chunk=6, num_blocks=18)
    ended = it.run([Request("first", tuple(range(1, 9)), 20, stop_token_ids=()), asks])
    [one] = [one for one in ended if one.request_id == "asks"]
    assert one.preemptions and sum(rows) == 19 and max(rows) <= 6
    check_against_a_plain_forward(asks, one)


def test_a_request_that_ends_early_has_those_that_are_known():
    it = engine(chunk=4)
    it.add(Request("a", tuple(range(1, 12)), 5, stop_token_ids=(), log_probs=0, prompt_log_probs=0))
    it.step()
    [one] = it.abort("a")
    assert [entry is None for entry in one.prompt_log_probs] == [True] + 4 * [False] + 6 * [True]
    assert one.log_probs == ()


def test_a_prepared_model_has_the_same_ones():
    asked = {request.id: request for request in requests()}
    for one in engine(prepare(TARGET)).run(asked.values()):
        check_against_a_plain_forward(asked[one.request_id], one)


def test_a_sequence_of_one_prompt_token_has_nothing_to_read():
    assert not Sequence.of(Request("a", (3,), 1, prompt_log_probs=5), 0, 0, [3]).reads_prompt
    [one] = engine().run([Request("a", (3,), 1, prompt_log_probs=5)])
    assert one.prompt_log_probs == (None,)
