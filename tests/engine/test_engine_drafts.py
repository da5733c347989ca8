"""Every kind of draft drafts for many sequences at a time as it does for one, and an error of a draft is seen."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_drafts import DRAFT_KINDS, SMALL, TABLE, V, tiny
from test_engine import check_empty, tokens
from test_heads import tiny_eagle, tiny_medusa

from workbench.decoding import SamplingSettings
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.models import load, prepare
from workbench.serving import Engine, Finished, Request, SchedulerSettings, StepReport
from workbench.serving.soak_kinds import DRAFTS, ROWS, WRONG_WAYS, Models, WrongDraft
from workbench.speculation import Fixed, ModelDraft
from workbench.speculation.drafts import EagleDraft, FirstOf, MedusaDraft, NGramDraft, PromptLookupDraft
from workbench.speculation.proposal import Proposal

WARM = SamplingSettings(temperature=1.0, top_p=0.9)
TARGET = tiny()
REPEATED = [3, 1, 4, 1, 5, 9, 2, 6] * 3  # what copies can be made of
REQUESTS = [Request(i, (*REPEATED, *tokens(i, i)), 12 + i, stop_token_ids=()) for i in range(6)]

KINDS = {
    **DRAFT_KINDS,
    "eagle": lambda target: EagleDraft(target, tiny_eagle(target).double()),
    "eagle, tree": lambda target: EagleDraft(target, tiny_eagle(target).double(), branching=(2, 2)),
    "medusa": lambda target: MedusaDraft(target, tiny_medusa(target).double()),
    "first of": lambda target: FirstOf(PromptLookupDraft(target, min_ngram=5), ModelDraft(target)),
    "first of, with hidden states": lambda target: FirstOf(
        NGramDraft(TABLE), EagleDraft(target, tiny_eagle(target).double())
    ),
}
LOW = (
    "random model",
    "n-grams",
    "n-grams, tree",
    "phrases",
    "eagle",
    "eagle, tree",
    "medusa",
    "staged on a random model",
)


def engine(draft: object, model=TARGET, **more) -> Engine:
    settings = SchedulerSettings(**{"max_running": 6, "draft_tokens": 8} | more)
    return Engine(model, settings, num_blocks=150, block_size=4, prefix=None, draft=draft)


def served(it: Engine, requests) -> tuple[dict[object, Finished], list[StepReport]]:
    reports: list[StepReport] = []
    ended = {f.request_id: f for f in it.run(requests, watch=reports.append)}
    check_empty(it)
    return ended, reports


def counts(ended: dict[object, Finished]) -> dict[object, tuple[int, int]]:
    return {name: (one.drafted, one.accepted) for name, one in ended.items()}


@pytest.mark.parametrize("sampling", [None, WARM], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_draft_drafts_for_six_sequences_as_for_one(kind, sampling):
    """Made as for one sequence: the engine gives it the room. The same tokens, drafted and accepted as often."""
    requests = [dataclasses.replace(r, sampling=sampling, seed=r.id) for r in REQUESTS]
    target = tiny()
    it = engine(KINDS[kind](target), target)
    ended, reports = served(it, requests)
    alone, _ = served(engine(KINDS[kind](target), target, max_running=1), requests)
    assert {i: f.token_ids for i, f in ended.items()} == {i: f.token_ids for i, f in alone.items()}
    assert counts(ended) == counts(alone)
    together = [report for report in reports if len(report.drafts) >= 4]
    if not (kind == "prompt lookup" and sampling):  # drawn texts of a random model hardly repeat themselves
        assert together and all(drafted for r in together for drafted, _ in r.drafts.values())
    assert not it.why_no_drafts and not any(r.draft_errors for r in reports)
    assert sum(r.drafted for r in reports) == sum(f.drafted for f in ended.values())
    assert sum(r.accepted for r in reports) == sum(f.accepted for f in ended.values())
    if kind not in LOW and not sampling:
        assert sum(r.accepted for r in together) > 0


@pytest.mark.parametrize("name", ["eagle", "medusa", "self-int4"])
def test_drafts_by_name_are_made_for_all_that_run(name):
    """Of the trained model, with `generate` beside it: the same tokens, and as many of them drafted."""
    raw = load("stdlib-10m")
    model = raw if name == "self-int4" else prepare(raw)
    prompts = [
        "import os\nimport sys\n\ndef read(path):",
        "class Node:\n    def __init__(self",
        "for i in range(",
        "try:",
    ]
    ids = [tuple(model.tokenizer.encode_prompt(prompt)) for prompt in prompts]
    it = Engine(model, SchedulerSettings(max_running=4, draft_tokens=12), num_blocks=64, draft=name)
    ended, reports = served(it, [Request(i, one, 12) for i, one in enumerate(ids)])
    for i, one in enumerate(ids):
        alone = generate(model, list(one), max_new_tokens=12, draft=name, stop_token_ids=())
        assert ended[i].token_ids == tuple(alone.tokens)
        assert ended[i].accepted == sum(alone.speculation.accepted) or name == "medusa", "a tree"
    assert any(len(report.drafts) == 4 for report in reports) and sum(f.accepted for f in ended.values())


def test_a_model_by_itself_is_a_draft_for_all_that_run():
    ended, reports = served(engine(SMALL), REQUESTS)
    assert max(len(r.drafts) for r in reports) == 6 and sum(f.drafted for f in ended.values()) > 6


def test_a_draft_that_cannot_be_given_room_is_refused():
    busy = ModelDraft(SMALL)
    other = engine(busy, max_running=1)
    other.add(REQUESTS[0])
    for _ in range(3):
        other.step()
    with pytest.raises(WorkbenchError, match=r"drafts for 1 sequence.*a draft of its own"):
        engine(busy)
    other.run()
    own = ModelDraft(SMALL, kv=lambda config: __import__("workbench.kv", fromlist=["x"]).Contiguous(config))
    with pytest.raises(WorkbenchError, match="room for 1 sequence"):
        engine(own)


# -- errors --------------------------------------------------------------------------------------------------------


class Failing(PromptLookupDraft):
    """A draft with a bug, in one of its calls, from the third on."""

    where = "propose"

    def fail(self, name: str) -> None:
        self.__dict__["calls"] = self.__dict__.get("calls", 0) + (name == self.where)
        if name == self.where and self.calls >= 3:
            raise ZeroDivisionError(f"in {name}")

    def propose(self, asks):
        self.fail("propose")
        proposals = super().propose(asks)
        if self.where == "too few" and len(proposals) > 1:
            return proposals[1:]
        if self.where == "no tokens of the model":
            return [Proposal.chain([V + 5] * len(p)) for p in proposals]
        return proposals

    def observe(self, sequence, proposal, logits):
        self.fail("observe")

    def release(self, sequence):
        self.fail("release")
        super().release(sequence)


def plain(requests, model=TARGET, **more) -> dict[object, tuple[int, ...]]:
    settings = SchedulerSettings(**{"max_running": 6} | more)
    ended = Engine(model, settings, num_blocks=150, block_size=4).run(requests)
    return {f.request_id: f.token_ids for f in ended}


@pytest.mark.parametrize("where", ["propose", "observe", "release", "too few", "no tokens of the model"])
def test_a_draft_that_fails_is_turned_off_with_a_reason_and_nobody_ends(where):
    draft = Failing(TARGET, min_ngram=1)
    draft.where = where
    it = engine(draft)
    ended, reports = served(it, REQUESTS)
    assert {i: f.token_ids for i, f in ended.items()} == plain(REQUESTS)
    said = [error for report in reports for error in report.draft_errors]
    assert len(said) == it.draft_errors == 1 and said[0] == it.why_no_drafts
    expected = {"too few": "5 proposals for 6", "no tokens of the model": f"{V + 5}"}
    assert "prompt_lookup" in it.why_no_drafts and expected.get(where, f"in {where}") in it.why_no_drafts
    after = next(i for i, report in enumerate(reports) if report.draft_errors)
    assert not any(report.drafted for report in reports[after + 1 :])
    assert all(f.draft_error is None and f.finish_reason == "length" for f in ended.values())


class OwnLengths(Fixed):
    def copy(self):
        return OwnLengths(self.K)

    def limit(self):
        raise ZeroDivisionError("in limit")


def test_a_length_policy_that_fails_turns_drafts_off():
    settings = SchedulerSettings(max_running=6, draft_tokens=8)
    it = Engine(TARGET, settings, num_blocks=150, block_size=4, draft="prompt_lookup", draft_length=OwnLengths(4))
    ended, _ = served(it, REQUESTS)
    assert {i: f.token_ids for i, f in ended.items()} == plain(REQUESTS) and "in limit" in it.why_no_drafts


def test_in_generate_a_draft_that_fails_raises():
    with pytest.raises(ZeroDivisionError, match="in propose"):
        generate(TARGET, REPEATED, max_new_tokens=30, draft=Failing(TARGET, min_ngram=1))


def broken(token: int, **changes):
    """A model that gives NaN after this token, which it never chooses."""
    model = random_decoder(tiny_config(vocab_size=V, tie_embeddings=False, **changes), seed=3).double()
    with torch.no_grad():
        model.embed.weight[token] = float("nan")
        model.head.weight[token] = 0
    return model


def test_nan_of_the_draft_ends_nobody_and_its_sequence_goes_on_without():
    others = REQUESTS[:4]
    seen = {t for r in others for t in (*r.prompt_ids, *plain(others)[r.id])}
    token = next(t for t in range(V) if t not in seen)
    bad = Request("bad", (5, token, 7), 12, WARM, seed=3)
    it = engine(broken(token, num_layers=1))
    ended, reports = served(it, [*others, bad])
    assert {i: ended[i].token_ids for i in range(4)} == plain(others) and ended["bad"].finish_reason == "length"
    assert "NaN" in str(ended["bad"].draft_error) and not it.why_no_drafts
    assert it.draft_errors == 1 == sum(len(report.draft_errors) for report in reports)
    assert any("'bad'" in error for report in reports for error in report.draft_errors)
    assert all(ended[i].drafted and ended[i].draft_error is None for i in range(4))


class Guess(PromptLookupDraft):
    """Guesses the token whose embedding is broken, always."""

    def propose(self, asks):
        self.model_calls += len(asks)
        return [Proposal.chain((63,), tuple(one_hot_rows(1))) for ask in asks]


def one_hot_rows(count: int) -> torch.Tensor:
    rows = torch.zeros(count, V, dtype=torch.float64)
    rows[:, 63] = 1
    return rows


@pytest.mark.parametrize("sampling", [None, WARM, SamplingSettings(temperature=0.0, repetition_penalty=1.2)])
def test_nan_in_the_row_of_a_rejected_token_has_no_influence(sampling):
    """After token 63 the model gives NaN, and it is never chosen; the plain engine never meets it."""
    model = broken(63)
    requests = [
        Request(i, tuple(t % 60 for t in r.prompt_ids), 9, sampling, seed=i, stop_token_ids=())
        for i, r in enumerate(REQUESTS)
    ]
    expected = plain(requests, model)
    assert not any(63 in text for text in expected.values())
    guess = Guess(model)
    ended, reports = served(it := engine(guess, model), requests)
    assert {f.finish_reason for f in ended.values()} == {"length"} and guess.model_calls >= 6 * 7
    assert sum(report.rows for report in reports) == it._step.rows_processed
    if sampling is None or sampling.greedy:
        assert {i: f.token_ids for i, f in ended.items()} == expected


class Raises(SamplingSettings):
    """Settings that raise when they are asked for the k-th time."""

    def active(self):
        self.__dict__["asked"] = self.__dict__.get("asked", 0) + 1
        if self.__dict__["asked"] > self.__dict__.get("after", 0):
            raise ZeroDivisionError("in active")
        return super().active()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("after", range(8))
@pytest.mark.parametrize("draft", [None, "small"])
def test_settings_that_raise_at_any_moment_are_refused_or_end_their_request_alone(after, draft, n):
    given = {"draft": ModelDraft(SMALL), "max_running": 8} if draft else {"draft": None, "draft_tokens": 0}
    it = engine(given.pop("draft"), **given)
    sampling = Raises(temperature=1.0)
    sampling.__dict__["after"] = after
    spoiled = Request("spoiled", tuple(tokens(9, 1)), 20, sampling, seed=0, n=n)
    for request in REQUESTS[:3]:
        it.add(request)
    try:
        it.add(spoiled)
        refused = False
    except WorkbenchError as error:
        refused = True
        assert "in active" in str(error) and len(it.scheduler.waiting) == 3
    ended = it.run()
    check_empty(it)
    assert refused == (after == 0)
    for f in ended:
        if f.request_id == "spoiled":
            assert f.finish_reason == "error" and "in active" in str(f.error)
    assert sum(f.request_id == "spoiled" for f in ended) == (0 if refused else n)
    good = {f.request_id: f.token_ids for f in ended if f.request_id != "spoiled"}
    assert good == plain(REQUESTS[:3])


@pytest.mark.parametrize("wrong", WRONG_WAYS)
@pytest.mark.parametrize("sampling", [None, WARM], ids=["greedy", "drawn"])
def test_a_draft_that_answers_wrong_ends_no_request_and_is_seen(wrong, sampling):
    """Rows that are no distributions ended the request; ids that are no whole numbers stopped the step."""
    draft = WrongDraft(ModelDraft(TARGET), wrong, 2)
    it = engine(draft, max_running=3)
    ended, reports = served(
        it, [dataclasses.replace(r, max_new_tokens=12, sampling=sampling, seed=r.id) for r in REQUESTS]
    )
    assert all(one.error is None and len(one.token_ids) == 12 for one in ended.values())
    if not sampling:
        alone = Engine(TARGET, SchedulerSettings(max_running=1), num_blocks=150, block_size=4)
        assert [ended[r.id].token_ids for r in REQUESTS] == [
            alone.run([dataclasses.replace(r, max_new_tokens=12)])[0].token_ids for r in REQUESTS
        ]
    assert draft.was_wrong == bool(it.why_no_drafts) == any(report.draft_errors for report in reports)
    assert draft.was_wrong or (wrong in ROWS and not sampling), "greedy decoding reads no rows, and nothing else"


@pytest.mark.parametrize("kind", ["model", "eagle", "medusa", "first of, with eagle"])
def test_every_sample_of_a_request_is_drafted_for(kind):
    """Those after the first had no hidden states of their prompt, and nothing was drafted for them."""
    models = Models()
    target = models.targets["plain"]
    it = Engine(target, SchedulerSettings(max_running=4, draft_tokens=4), draft=DRAFTS[kind](models, target))
    ended = it.run([Request("a", [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], 12, n=3, stop_token_ids=())])
    assert len({(one.token_ids, one.drafted, one.accepted) for one in ended}) == 1 and ended[0].drafted > 0


WITH_HIDDEN = ("eagle", "eagle, tree", "medusa", "first of, with hidden states")


@pytest.mark.parametrize("prefix", ["hash", "radix"])
@pytest.mark.parametrize("kind", WITH_HIDDEN)
def test_heads_draft_after_a_prefix_hit_from_where_hidden_states_begin(kind, prefix):
    """The second request had no draft, and nothing said why."""
    target = tiny()
    settings = SchedulerSettings(max_running=2, draft_tokens=8)
    it = Engine(target, settings, num_blocks=150, block_size=4, prefix=prefix, draft=KINDS[kind](target))
    prompt = (*REPEATED, 7, 7)
    for name, ids in enumerate((prompt, prompt, (*prompt[:-1], 8, 9, 10))):
        [one] = it.run([Request(name, ids, 24, stop_token_ids=())])
        alone = generate(target, list(ids), max_new_tokens=24, stop_token_ids=(), kv="contiguous")
        assert one.token_ids == tuple(alone.tokens) and one.drafted > 0 and one.draft_error is None
        assert (one.hit_tokens > 0) == (name > 0)
    check_empty(it)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("kind", WITH_HIDDEN)
def test_heads_draft_on_after_a_preemption(kind, preemption):
    target = tiny()
    settings = SchedulerSettings(max_running=3, draft_tokens=8, preemption=preemption)
    it = Engine(target, settings, num_blocks=30, block_size=4, prefix=None, draft=KINDS[kind](target))
    requests = [Request(i, (*REPEATED, i), 40, stop_token_ids=()) for i in range(3)]
    drafted_since: dict[object, int] = {}

    def watch(report: StepReport) -> None:
        for name in [s.id for s in (*report.plan.preempted, *report.plan.swapped_out)]:
            drafted_since[name] = 0
        for name, (drafted, _) in report.drafts.items():
            if name in drafted_since:
                drafted_since[name] += drafted

    ended = {one.request_id: one for one in it.run(requests, watch=watch)}
    check_empty(it)
    for request in requests:
        alone = generate(target, list(request.prompt_ids), max_new_tokens=40, stop_token_ids=(), kv="contiguous")
        assert ended[request.id].token_ids == tuple(alone.tokens)
    assert drafted_since and all(drafted_since.values()), drafted_since
