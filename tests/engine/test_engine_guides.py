"""A grammar per request in the engine: each text is the one that `generate` writes under it, however it is served."""

from __future__ import annotations

import dataclasses
import re

import pytest
from conftest import random_decoder, tiny_config
from sampled_requests import SAMPLING
from test_engine import check_empty
from test_log_probs import SETTINGS, TARGET, check, engine, forward

from workbench.decoding import Guide
from workbench.decoding.guide import GuideState
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.serving import Request, StepReport
from workbench.serving.soak_kinds import PATTERNS, Models, tiny_tokenizer

GUIDES = Models().guides
JUMPS = (None, "text", "never")
SAMPLED = ("greedy", "drawn", "few", "penalized")


def requests() -> list[Request]:
    """A grammar with each kind of jump, one without, some for two sequences, all with limits that cut some texts."""
    return [
        Request(
            i,
            tuple(range(1, 4 + i)),
            26 if i == 6 else (12, 5, 17)[i % 3],
            sampling=SAMPLING[SAMPLED[i % 4]],
            seed=i,
            n=1 + (i in (3, 5)),
            guide=None if i == 6 else GUIDES[(1, 0, 2, 1, 1, 3, 0, 2, 1)[i]],
            jump=None if i == 6 else JUMPS[i % 3],
            stop_token_ids=() if i == 6 else None,
            log_probs=2 if i % 2 else None,
            prompt_log_probs=1 if i == 2 else None,
        )
        for i in range(9)
    ]


def alone(request: Request, sample: int = 0):
    how = {} if request.guide is None else {"guide": request.guide, "jump": request.jump}
    values = {} if request.sampling is None else dataclasses.asdict(request.sampling)
    return generate(
        TARGET,
        request.prompt_ids,
        max_new_tokens=request.max_new_tokens,
        seed=request.seed + sample,
        stop_token_ids=request.stop_token_ids,
        kv="contiguous",
        **how,
        **values,
    )


ALONE = {(request.id, sample): alone(request, sample) for request in requests() for sample in range(request.n)}


def legal(request: Request, tokens: tuple[int, ...]) -> bool:
    text = tiny_tokenizer().decode([token for token in tokens if token])
    return request.guide is None or tokens[-1] != 0 or re.fullmatch(request.guide.source, text) is not None


@pytest.mark.parametrize(
    ("settings", "asynchronous"), [(name, ahead) for name in SETTINGS if name != "recorded" for ahead in (False, True)]
)
def test_a_text_under_a_grammar_is_the_one_that_generate_writes(settings, asynchronous):
    it = engine(asynchronous=asynchronous, **SETTINGS[settings])
    asked, reports = {request.id: request for request in requests()}, list[StepReport]()
    ended = it.run(asked.values(), watch=reports.append)
    assert len(ended) == 11 and all(one.error is None for one in ended)
    for one in ended:
        request, expected = asked[one.request_id], ALONE[one.request_id, one.sample]
        assert legal(request, one.token_ids)
        if "draft" not in SETTINGS[settings] or request.sampling is None:
            assert list(one.token_ids) == expected.tokens
            assert one.finish_reason == {"stop_token": "stop"}.get(expected.finish_reason, "length")
        assert len(one.token_times_s) == len(one.token_ids) <= request.max_new_tokens
        emitted = [new for report in reports for new in report.emitted.get((one.request_id, one.sample), ())]
        assert tuple(new.token_id for new in emitted) == one.token_ids
        if request.log_probs is not None:
            rows = forward(request.prompt_ids + one.token_ids)[len(request.prompt_ids) - 1 : -1]
            own = [place for place, new in enumerate(emitted) if new.kind != "jump"]
            check([one.log_probs[at] for at in own], rows[own], [one.token_ids[at] for at in own], 2)
            assert all(one.log_probs[at].log_prob is None for at in range(len(emitted)) if at not in own)
    kinds = [new.kind for report in reports for new in sum(report.emitted.values(), ())]
    assert kinds.count("jump") > 10 and ("draft" in kinds or "draft" not in SETTINGS[settings])
    longest = max(len(new) for report in reports for new in report.emitted.values())
    assert longest >= 5, "some jump is of several tokens"
    if asynchronous and "draft" not in SETTINGS[settings] and settings != "static":
        assert it.ahead.waited["a grammar reads the tokens"] and it.ahead.ran_ahead
    check_empty(it)


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_after_a_jump_the_scheduler_sends_its_tokens_in_one_step(batching):
    """And the budget counts each of them."""
    it = engine(batching=batching)
    it.add(Request("a", (1, 2, 3), 20, guide=GUIDES[1], stop_token_ids=()))
    sent = []
    while not it.idle:
        report = it.step()
        sent.append((report.plan.rows, len(report.tokens.get(("a", 0), ()))))
    jump = next(new for _, new in sent if new > 1)
    assert jump >= 6 and sent[[new for _, new in sent].index(jump) + 1][0] == jump
    [rows, new] = map(sum, zip(*sent))
    assert rows == 3 + new - 1, "all but the last token were sent, each once"


class Broken:
    """A grammar that raises after some tokens, in `allowed`, in `forced` or when a second state begins."""

    def __init__(self, where: str, after: int) -> None:
        self.where, self.after, self.begun = where, after, 0
        self.end_token_ids = (7,)

    def begin(self):
        self.begun += 1
        if self.where == "begin" and self.begun > 1:
            raise ZeroDivisionError("a grammar that does not begin")
        outer = self

        class State:
            def allowed(self, generated_ids):
                return self._checked("allowed", generated_ids, GUIDES[3].begin().allowed(()))

            def forced(self, generated_ids, exact):
                return self._checked("forced", generated_ids, [])

            def _checked(self, where, generated_ids, answer):
                if where == outer.where and len(generated_ids) >= outer.after:
                    raise ZeroDivisionError("a grammar that raises")
                return answer

        return State()


@pytest.mark.parametrize("settings", ["as it comes", "drafts", "static"])
@pytest.mark.parametrize(("where", "after"), [("allowed", 3), ("forced", 3), ("begin", 0)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_grammar_that_raises_ends_its_request_alone(where, after, settings, asynchronous):
    it = engine(asynchronous=asynchronous, **SETTINGS[settings])
    wrong = Request("wrong", (1, 2, 3), 12, n=2, guide=Broken(where, after), stop_token_ids=())
    [_, _, _, _, good, *_] = requests()
    ended = {(one.request_id, one.sample): one for one in it.run([wrong, good])}
    at_end = where == "forced" and settings == "drafts"  # asked at the end of a round alone, which may end the text
    assert list(ended[good.id, 0].token_ids) == ALONE[good.id, 0].tokens
    for sample in range(2):
        one = ended["wrong", sample]
        if (where == "begin" and not sample) or (at_end and one.error is None):
            assert one.error is None and one.finish_reason in ("stop", "length")
        else:
            assert one.finish_reason == "error" and isinstance(one.error, ZeroDivisionError)
            assert len(one.token_ids) <= after
    check_empty(it)


def test_each_sequence_of_a_request_has_a_state_of_its_own(monkeypatch):
    """One that walks to and fro between two texts would be slow, and a limit that one text meets is its own."""
    asked: dict[int, set[tuple[int, ...]]] = {}
    right = GuideState.allowed

    def allowed(self, generated_ids):
        asked.setdefault(id(self), set()).add(tuple(generated_ids))
        return right(self, generated_ids)

    monkeypatch.setattr(GuideState, "allowed", allowed)
    warm = SAMPLING["drawn"]
    ended = engine().run([Request("a", (1, 2), 8, sampling=warm, seed=4, n=3, guide=GUIDES[0])])
    assert len({one.token_ids for one in ended}) > 1 and len(asked) == 3


@pytest.mark.parametrize("call", ["engine", "generate"])
def test_the_end_tokens_of_a_guide_end_the_text(call):
    """Also those that are not the tokenizer's own end of text: they ended nothing, and after them all was allowed."""
    guide = Guide.regex("(ab|cd){2}", tiny_tokenizer(), end_token_ids=(23,))
    if call == "generate":
        got = generate(TARGET, [1, 2, 3], max_new_tokens=9, guide=guide, stop_token_ids=()).tokens
    else:
        [one] = engine().run([Request("a", (1, 2, 3), 9, guide=guide, stop_token_ids=())])
        got = list(one.token_ids)
    assert got[-1] == 23 and re.fullmatch("(ab|cd){2}", tiny_tokenizer().decode(got[:-1]))


def test_a_guide_that_cannot_be_used_is_refused_when_it_is_added():
    it = engine()
    for guide, jump, message in (
        (Models, None, "guide takes a workbench.decoding.Guide, got type"),
        ("json", None, "guide takes a workbench.decoding.Guide, got str"),
        (GUIDES[0], "far", "unknown jump 'far'"),
        (None, "tokens", "is for a grammar, and none is given"),
        (Broken("begin", -1), None, ""),
    ):
        if guide and isinstance(guide, Broken):
            guide.begun = 1
            message = "the guide of request 'a' raised ZeroDivisionError"
        with pytest.raises(WorkbenchError, match=message):
            it.add(Request("a", (1, 2), 3, guide=guide, jump=jump))
    other = Guide.regex("a+", tiny_tokenizer(), vocab_size=40)
    with pytest.raises(WorkbenchError, match="speaks of 40 tokens, model 'tiny' has 24"):
        it.add(Request("a", (1, 2), 3, guide=other))
    without = engine(random_decoder(tiny_config(vocab_size=24)))
    with pytest.raises(WorkbenchError, match="has no tokenizer with an end of text"):
        without.add(Request("a", (1, 2), 3, guide=GUIDES[0]))
    assert it.idle and without.idle and len(PATTERNS) == len(GUIDES)
