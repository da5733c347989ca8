"""One step ahead, the engine writes the same tokens, whatever arrives, ends, is preempted or cannot be sent ahead."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import random_decoder, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_claims import GPU_ALONE
from sampled_requests import SAMPLING, V, tokens

from workbench.decoding import SamplingSettings
from workbench.decoding.sampling import Sampler, TokenDistribution, draws_for
from workbench.models import prepare
from workbench.models.graphs import Decoded
from workbench.serving import Engine, Request, SchedulerSettings
from workbench.serving.ahead import PENDING, Answer, InOrder, Launcher, chosen, why_not_ahead
from workbench.speculation import ModelDraft

MODEL = prepare(random_decoder(tiny_config(vocab_size=V), seed=0).double())
MOSTLY = ("greedy", "drawn", "nucleus", "few") * 4 + ("penalized", "greedy, penalized")
TIGHT = {"num_blocks": 16, "max_running": 4, "token_budget": 24}
SCHEDULES = {
    "as it comes": TIGHT,
    "chunks of 3": TIGHT | {"chunk": 3},
    "swapped": TIGHT | {"preemption": "swap"},
    "nothing kept": TIGHT | {"prefix": None},
    "shortest first": TIGHT | {"policy": "shortest_remaining"},
    "one at a time": TIGHT | {"max_running": 1},
    "recorded": TIGHT | {"max_running": 2, "num_blocks": 11, "graphs": True},
    "static": {"num_blocks": 60, "max_running": 3, "batching": "static"},
}


def engine(*, asynchronous: bool = True, model=MODEL, **given) -> Engine:
    own = {name: given.pop(name) for name in ("prefix", "draft", "graphs", "format") if name in given}
    blocks = given.pop("num_blocks", 60)
    scheduler = SchedulerSettings(**{"max_running": 4} | given)
    return Engine(model, scheduler, num_blocks=blocks, block_size=4, asynchronous=asynchronous, **own)


def mixed(count: int, seed: int, kinds=MOSTLY, stops: bool = True) -> list[Request]:
    """Prompts of all lengths, half with the same beginning; some for two sequences; settings in turn; several stop
    tokens."""
    rng, shared = random.Random(seed), tokens(9, 99)
    return [
        Request(
            i,
            tuple((shared if rng.random() < 0.5 else []) + tokens(rng.randint(1, 14), rng.randrange(10**6))),
            rng.randint(1, 14),
            sampling=SAMPLING[rng.choice(kinds)],
            seed=i,
            n=1 + (rng.random() < 0.15),
            stop_token_ids=tuple(tokens(6, i)) if stops and rng.random() < 0.6 else (),
        )
        for i in range(count)
    ]


def wide(request: Request, most: int) -> Request:
    return (
        request
        if request.n <= most
        else Request(
            request.id,
            request.prompt_ids,
            request.max_new_tokens,
            request.sampling,
            request.seed,
            request.stop_token_ids,
        )
    )


def texts(found) -> dict:
    return {(f.request_id, f.sample): (f.token_ids, f.finish_reason) for f in found}


def check_empty(it: Engine) -> None:
    tables = it.kv.tables
    tables.check()
    assert it.idle and tables.num_available == tables.num_blocks and not tables.tables and not tables.swapped
    assert not it.kv.lengths and not it.scheduler.alive() and not it.scheduler.running
    assert not getattr(it.scheduler, "_leaving", ())


# -- the same tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ahead_or_not_the_tokens_and_their_ends_are_the_same(schedule):
    requests = [wide(r, SCHEDULES[schedule]["max_running"]) for r in mixed(24, seed=3)]
    now, ahead = engine(asynchronous=False, **SCHEDULES[schedule]), engine(**SCHEDULES[schedule])
    expected, found = texts(now.run(requests)), texts(ahead.run(requests))
    assert found == expected and {reason for _, reason in found.values()} == {"stop", "length"}
    assert PENDING not in {token for text, _ in found.values() for token in text}
    if schedule == "static":
        assert ahead.ahead.ran_ahead == 0 and ahead.ahead.waited.keys() == {"a group padded together"}
    else:
        assert ahead.ahead.ran_ahead > 20 and ahead.ahead.waited["penalties read the tokens"] > 0
        assert schedule == "one at a time" or ahead.scheduler.preemptions > 0
    check_empty(ahead)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.integers(10, 30),
    max_running=st.integers(2, 6),
    chunk=st.sampled_from([None, 1, 5]),
    preemption=st.sampled_from(["recompute", "swap"]),
    prefix=st.sampled_from([None, "hash", "radix"]),
    kinds=st.sampled_from([("greedy",), ("greedy", "nucleus"), MOSTLY]),
)
def test_with_arrivals_and_aborts_at_any_moment(seed, num_blocks, max_running, chunk, preemption, prefix, kinds):
    """Whatever ends by itself is the text of an engine that goes step by step; what was aborted is its beginning."""
    rng, requests = random.Random(seed), mixed(12, seed, kinds)
    expected = texts(engine(asynchronous=False, num_blocks=200).run(requests))
    it = engine(num_blocks=num_blocks, max_running=max_running, chunk=chunk, preemption=preemption, prefix=prefix)
    waiting, found = list(requests), []
    while waiting or not it.idle:
        for _ in range(rng.randint(0, 2)):
            if waiting:
                it.add(waiting.pop(0))
        found += it.step().finished
        it.kv.tables.check()
        alive = [sequence.request.id for sequence in it.scheduler.alive()]
        if alive and rng.random() < 0.06:
            found += it.abort(rng.choice(alive))
    for key, (text, reason) in texts(found).items():
        if reason == "abort":
            # one that is aborted before its prompt was computed has not been split into its texts yet
            assert text == expected[key][0][: len(text)]
        else:
            assert (text, reason) == expected[key]
    it.step()  # a step that was sent for texts that were aborted lands
    check_empty(it)


def test_a_stop_token_is_seen_one_step_late_and_leaves_nothing():
    """The text's row in the step after it is computed for nothing: no token, no block, nothing to be found of it."""
    [whole] = engine(asynchronous=False).run([Request("x", tuple(tokens(5, 1)), 12)])
    # tokens before one that is new
    count = max(whole.token_ids.index(token) for token in whole.token_ids[:-1])
    stop = whole.token_ids[count]
    assert count >= 4
    request = Request("x", tuple(tokens(5, 1)), 12, stop_token_ids=(stop,))
    now, ahead = engine(asynchronous=False), engine()
    rows = {}
    for it in (now, ahead):
        reports = []
        [found] = it.run([request], watch=reports.append)
        assert found.token_ids == whole.token_ids[: count + 1] and found.finish_reason == "stop"
        assert sum(len(text) for report in reports for text in report.tokens.values()) == count + 1
        rows[it] = sum(report.rows for report in reports)
        check_empty(it)
    assert rows[ahead] == rows[now] + 1
    again = Request("again", (*request.prompt_ids, *whole.token_ids[: count + 1], 3, 4, 5), 8)
    assert ahead.run([again])[0].token_ids == now.run([again])[0].token_ids
    assert ahead.scheduler.hit_tokens == now.scheduler.hit_tokens > 0


def test_the_last_token_by_count_is_foreseen():
    """No row is computed for nothing, and the blocks serve others while that token is under way."""
    rows = {}
    for asynchronous in (False, True):
        it, reports = engine(asynchronous=asynchronous), []
        it.run([Request(i, tuple(tokens(5, i)), 7) for i in range(4)], watch=reports.append)
        rows[asynchronous] = sum(report.rows for report in reports)
    assert rows[True] == rows[False]
    it, reports = engine(num_blocks=3, max_running=2, prefix=None), []
    it.run([Request(i, tuple(tokens(7, i)), 5) for i in range(4)], watch=reports.append)
    assert len(reports) == 4 * 5 + 1, "each takes the whole pool, and the next is sent right behind its last step"


def test_a_text_without_a_distribution_fails_alone():
    class Spoiled:
        """Gives NaN for the rows of one token."""

        def __getattr__(self, name):
            return getattr(MODEL, name)

        def __call__(self, batch, kv):
            logits = MODEL(batch, kv)
            rows = range(batch.num_tokens) if batch.logit_rows is None else batch.logit_rows
            for at, row in enumerate(rows):
                if int(batch.token_ids[row]) == spoils:
                    logits[at] = float("nan")
            return logits

    requests = mixed(10, seed=5, kinds=("greedy", "nucleus"), stops=False)
    texts_now = texts(engine(asynchronous=False).run(requests))
    spoils = texts_now[3, 0][0][2]  # the third token of request 3
    now, ahead = (engine(asynchronous=which, model=Spoiled()) for which in (False, True))
    expected = {(f.request_id, f.sample): f for f in now.run(requests)}
    found = {(f.request_id, f.sample): f for f in ahead.run(requests)}
    assert texts(found.values()) == texts(expected.values())
    failed = [f for f in found.values() if f.finish_reason == "error"]
    assert failed and len(failed) < len(found)
    for one in failed:
        assert str(one.error) == str(expected[one.request_id, one.sample].error) and "NaN" in str(one.error)
    check_empty(ahead)


# -- what cannot go ahead --------------------------------------------------------------------------------------------


def test_what_needs_the_text_waits_for_it_and_is_counted():
    plain = [Request(i, tuple(tokens(6, i)), 8) for i in range(3)]
    it = engine()
    it.run(plain)
    assert not it.ahead.waited and it.ahead.ran_ahead == 7  # the first has no step before it
    it = engine()
    reports = []
    it.run([*plain, Request("p", (1, 2, 3), 5, sampling=SAMPLING["penalized"])], watch=reports.append)
    assert it.ahead.waited == {"penalties read the tokens": 5}
    small = random_decoder(tiny_config(vocab_size=V, num_layers=1), seed=1).double()
    it = engine(draft=ModelDraft(small, max_sequences=8), draft_tokens=3)
    expected = texts(engine(asynchronous=False).run(plain))
    assert texts(it.run(plain)) == expected and it.ahead.ran_ahead == 0 and it.ahead.waited.keys() == {"a draft"}

    class Own(SamplingSettings):
        """Settings that nobody here knows."""

    it = engine()
    it.run([Request("own", (1, 2, 3), 4, sampling=Own(temperature=1.0), seed=1)])
    assert it.ahead.waited == {"a token distribution of its own": 4}


def test_an_abort_takes_back_the_place_that_was_kept():
    it = engine()
    it.add(Request("x", tuple(tokens(6, 1)), 9))
    it.add(Request("y", tuple(tokens(7, 2)), 9))
    for _ in range(4):
        it.step()
    [ended] = it.abort("x")
    [whole] = engine(asynchronous=False).run([Request("x", tuple(tokens(6, 1)), 9)])
    assert ended.token_ids == whole.token_ids[:3] and len(ended.token_times_s) == 3
    assert len(it.run()[0].token_ids) == 9
    check_empty(it)


# -- choosing on the device ------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    rows=st.lists(
        st.builds(
            SamplingSettings,
            temperature=st.sampled_from([0.0, 1e-40, 0.3, 1.0, 2.5]),
            top_k=st.sampled_from([None, 1, 3, 100]),
            top_p=st.sampled_from([1.0, 0.9, 0.1]),
            min_p=st.sampled_from([0.0, 0.05, 1.0]),
        ),
        min_size=1,
        max_size=6,
    ),
    ties=st.booleans(),
)
def test_a_token_chosen_without_a_look_is_the_one_of_settings_and_draws(seed, dtype, rows, ties):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 40, generator=generator, dtype=dtype) * 4
    logits = logits.round() if ties else logits
    expected, uniforms = [], []
    for row, setting in enumerate(rows):
        sampler = Sampler(TokenDistribution(setting, (1,)), draws_for(setting, row))
        assert not why_not_ahead(sampler)
        expected.append(sampler.choose(logits[row], [1]))
        uniforms.append(None if setting.greedy else draws_for(setting, row).uniform())
    decoded = Decoded(logits, logits.argmax(dim=-1), logits.amax(dim=-1))
    tokens, tops = chosen(decoded, rows, uniforms)
    assert tokens.tolist() == expected and tops.isfinite().all()


# -- the host goes on while the device computes -----------------------------------------------------------------------


class SlowDevice:
    """A thread that begins a step's work only when somebody waits for its answer: as slow as a device can be."""

    def __init__(self, log: list) -> None:
        self._thread, self._log = ThreadPoolExecutor(1), log
        self._gates: list[threading.Event] = []

    def run(self, work) -> Answer:
        gate, number = threading.Event(), len(self._gates)
        self._gates.append(gate)
        self._log.append(("sent", number))

        def slowly():
            gate.wait()
            self._log.append(("computed", number))
            return work()

        future = self._thread.submit(slowly)

        class Late:
            def tolist(self):
                return future.result().tolist()

        return Answer(Late(), lambda: self._open(number))

    def finish(self) -> None:
        self._open(len(self._gates) - 1)
        self._thread.submit(lambda: None).result()

    def _open(self, last: int) -> None:
        for gate in self._gates[: last + 1]:
            gate.set()

    def close(self) -> None:
        self.finish()
        self._thread.shutdown()


def logged(it: Engine, log: list) -> None:
    schedule = it.scheduler.schedule

    def logging(now_s):
        log.append(("scheduled", sum(what == "scheduled" for what, _ in log)))
        return schedule(now_s)

    it.scheduler.schedule = logging


def test_the_next_step_is_scheduled_and_sent_before_this_one_is_computed():
    """With replayed steps, whose device half touches buffers alone; the books are the host's."""
    requests = [
        Request(i, tuple(tokens(4 + i, i)), 20, SAMPLING["nucleus" if i % 2 else "greedy"], seed=i, stop_token_ids=())
        for i in range(2)
    ]
    expected = texts(engine(asynchronous=False).run(requests))
    it, log = engine(graphs=True, max_running=2), []
    it.ahead.launcher.device = device = SlowDevice(log)
    logged(it, log)
    found = it.run(requests)
    device.close()
    assert texts(found) == expected and it.graphs.replayed[2] == 19
    at = {event: place for place, event in enumerate(log)}
    steps = [number for what, number in log if what == "computed"]
    assert steps == list(range(20))
    for number in steps[:-1]:
        assert at["scheduled", number + 1] < at["sent", number + 1] < at["computed", number]
    check_empty(it)


def test_a_slow_device_with_prompts_between_and_a_tight_pool():
    requests = [Request(i, tuple(tokens(2 + i % 5, i)), 3 + 5 * i % 17, stop_token_ids=(i, 9)) for i in range(14)]
    expected = texts(engine(asynchronous=False).run(requests))
    it, log = engine(graphs=True, max_running=2, num_blocks=8), []
    it.ahead.launcher.device = device = SlowDevice(log)
    found = it.run(requests)
    device.close()
    assert texts(found) == expected and it.graphs.replayed.total() > 30 and it.graphs.eager.total() > 5
    check_empty(it)


# -- seen to fail ----------------------------------------------------------------------------------------------------


def test_planted_a_step_that_does_not_read_the_tokens_under_way(monkeypatch):
    requests = mixed(6, seed=1, kinds=("greedy",))
    expected = texts(engine(asynchronous=False).run(requests))
    batch = Launcher._batch
    monkeypatch.setattr(
        Launcher, "_batch", lambda *given: (lambda made, sources: (made, [-1] * len(sources)))(*batch(*given))
    )
    assert texts(engine().run(requests)) != expected


def test_planted_a_step_that_reads_the_tokens_of_other_rows(monkeypatch):
    requests = mixed(6, seed=1, kinds=("greedy",))
    expected = texts(engine(asynchronous=False).run(requests))
    batch = Launcher._batch

    def shifted(self, works, decodes, before):
        made, sources = batch(self, works, decodes, before)
        # as if nobody ever left
        return made, [at if source >= 0 else -1 for at, source in enumerate(sources)]

    monkeypatch.setattr(Launcher, "_batch", shifted)
    assert texts(engine().run(requests)) != expected


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [GPU_ALONE])
@pytest.mark.parametrize("graphs", [False, True])
def test_on_a_gpu_the_tokens_are_the_same(device, graphs):
    """In float64, where the order of a sum does not decide about a token."""
    model = prepare(random_decoder(tiny_config(vocab_size=V), seed=0).double().to(device))
    requests = mixed(24, seed=3)
    expected = texts(engine(asynchronous=False, model=model, graphs=False, **TIGHT).run(requests))
    it = engine(model=model, graphs=graphs, **TIGHT)
    assert isinstance(it.ahead.launcher.device, InOrder) and it.ahead.launcher.device._queues
    assert texts(it.run(requests)) == expected and it.ahead.ran_ahead > 20
    assert (it.graphs is not None) == graphs and (not graphs or it.graphs.replayed.total() > 20)
    check_empty(it)
