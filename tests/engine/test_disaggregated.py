"""Claims about disaggregated prefill and decode: the tokens of one engine, whatever breaks, and blocks back on both
sides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import random_decoder, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kv_state import model_of

from workbench.decoding.sampling import SamplingSettings
from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.kv.blocks import BlockTables
from workbench.models.config import LatentAttentionShape
from workbench.models.digest import model_digest
from workbench.parallel.disaggregated import DecodeEngine, InProcess, Message, PrefillEngine, Sender
from workbench.parallel.disaggregated.connector import prompt_digest, tenant_name
from workbench.serving.engine import Engine
from workbench.serving.scheduler import Scheduler
from workbench.serving.settings import SchedulerSettings

SETTINGS = SchedulerSettings(max_running=4, token_budget=24, chunk=10)
POOL = {"num_blocks": 64, "block_size": 4}


@pytest.fixture(scope="module")
def model():
    return random_decoder(tiny_config(vocab_size=64)).double()


def prompts(count: int = 7, *, shared: int = 9) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(count)
    first = torch.randint(0, 64, (shared,), generator=drawn).tolist()
    made = []
    for i in range(count):
        own = torch.randint(0, 64, (1 + 5 * i,), generator=drawn).tolist()
        made.append([*(first if i % 2 else []), *own])
    return made


def requests(count: int = 7, **settings) -> list[Request]:
    return [Request(i, tuple(p), 6 + i, stop_token_ids=(), **settings) for i, p in enumerate(prompts(count))]


def tokens(finished) -> dict:
    return {(one.request_id, one.sample): one.token_ids for one in finished}


def alone(model, asked, settings=SETTINGS, **more):
    return tokens(Engine(model, settings, **POOL | more).run(asked))


class Pair:
    """Both engines in one process, in turns."""

    def __init__(self, model, settings=SETTINGS, *, links=None, prefills=None, prefill=None, **more):
        ours, theirs = links or InProcess.pair()
        self.prefill = PrefillEngine(prefills or model, SETTINGS, link=theirs, **POOL | (prefill or {}))
        self.decode = DecodeEngine(model, settings, link=ours, **POOL | more)

    def run(self, asked, turn=lambda pair: None, max_turns: int = 5000):
        for request in asked:
            self.decode.add(request)
        finished = []
        for _ in range(max_turns):
            if self.decode.idle:
                break
            turn(self)
            self.prefill.step()
            finished += self.decode.step().finished
        assert self.decode.idle
        self.prefill.step()
        return tokens(finished)

    def check_blocks_are_back(self):
        for engine in (self.prefill, self.decode):
            engine.kv.tables.check()
            assert not engine.kv.lengths and engine.kv.num_available == engine.kv.num_blocks, engine
        assert self.prefill.idle and not self.prefill.sender.outgoing and not self.decode.receiver.incoming


@pytest.mark.parametrize("layerwise", [True, False])
def test_the_tokens_are_those_of_one_engine(model, layerwise):
    pair = Pair(model, prefill={"layerwise": layerwise})
    assert pair.run(requests()) == alone(model, requests())
    assert {one.request_id for one in pair.decode.transfers} == {1, 2, 3, 4, 5, 6}, "one token alone needs no prefill"
    assert not pair.decode.problems and not pair.decode.why_alone
    pair.check_blocks_are_back()


def test_bytes_are_those_of_the_formula(model):
    """2 · L · H_kv · D · S · b, S without the last token and without those in the prefix cache here."""
    pair = Pair(model)
    pair.run(requests())
    pair.run([Request("again", tuple(prompts()[6] + [1, 2, 3, 4, 5]), 3, stop_token_ids=())])
    config, itemsize = model.config, 8
    a_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    assert all(one.bytes == a_token * (one.tokens - one.found) for one in pair.decode.transfers)
    assert pair.decode.transfers[-1].found == len(prompts()[6]) // 4 * 4
    assert pair.decode.link.received.bytes == sum(one.bytes for one in pair.decode.transfers)
    assert pair.prefill.link.sent.bytes == pair.decode.link.received.bytes


SMALL = {"num_blocks": 16}
KINDS = [
    ("a small pool: sequences are preempted and recomputed", {}, SMALL, {}),
    ("a small pool: sequences are swapped to the host", {"preemption": "swap"}, SMALL, {}),
    ("a small pool of the prefill engine", {}, {}, {"num_blocks": 14}),
    ("no prefix cache", {"remember": False}, {}, {"prefix": None}),
    ("a radix tree", {}, {"prefix": "radix"}, {"prefix": "radix"}),
    ("blocks of other sizes", {}, {"block_size": 3}, {"block_size": 5}),
    ("one step ahead", {}, {"asynchronous": True}, {}),
    ("drafts from the text", {"draft_tokens": 3}, {"draft": "prompt_lookup", "draft_length": 3}, {}),
    ("another order", {"policy": "shortest_remaining"}, {}, {}),
    ("two run at a time", {"max_running": 2}, {}, {}),
]


@pytest.mark.parametrize(("switches", "pool", "prefill"), [kind[1:] for kind in KINDS], ids=[k[0] for k in KINDS])
def test_the_tokens_are_those_of_one_engine_with_every_switch(model, switches, pool, prefill):
    chosen = replace(SETTINGS, **switches)
    pair = Pair(model, chosen, prefill=prefill, **pool)
    assert pair.run(requests()) == alone(model, requests(), chosen, **pool)
    assert len(pair.decode.transfers) == 6 and not pair.decode.problems
    pair.check_blocks_are_back()
    assert pair.run([replace(one, id=-one.id - 1) for one in requests()]) == {
        (-name - 1, sample): ids for (name, sample), ids in alone(model, requests()).items()
    }, "a second time, now with prefix hits"
    pair.check_blocks_are_back()


@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_quantized_rows_are_sent_as_their_codes(model, format):
    whole = [replace(one, id=one.id) for one in requests()]
    settings = replace(SETTINGS, chunk=None, token_budget=64, max_running=1)
    pair = Pair(model, settings, format=format, prefill={"format": format})
    pair.run(whole)
    assert all(one.bytes == pair.decode.kv.bytes_per_token * (one.tokens - one.found) for one in pair.decode.transfers)
    assert len(pair.decode.transfers) == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"latent_attention": LatentAttentionShape(None, 16, 4, 8, 8), "num_kv_heads": 4, "head_dim": 12},
        {"num_layers": 4, "kv_sources": (0, 0, 2, 2)},
        {"num_layers": 4, "sliding_window": 6, "global_layers": (2, 3)},
    ],
    ids=["latents", "layers that share keys", "a window"],
)
def test_whatever_a_layer_keeps_is_sent(changes):
    other = random_decoder(tiny_config(vocab_size=64, **changes)).double()
    pair = Pair(other)
    assert pair.run(requests()) == alone(other, requests())
    assert all(one.bytes == pair.decode.kv.bytes_per_token * (one.tokens - one.found) for one in pair.decode.transfers)
    pair.check_blocks_are_back()


def test_sampled_tokens_samples_and_log_probabilities_are_those_of_one_engine(model):
    asked = requests(sampling=SamplingSettings(temperature=1.0, top_p=0.9), seed=7, n=2, log_probs=2)
    asked.append(Request("read", tuple(prompts()[6]), 4, stop_token_ids=(), prompt_log_probs=1))
    pair, engine = Pair(model), Engine(model, SETTINGS, **POOL)
    assert pair.run(asked) == tokens(engine.run(asked))
    assert "read" not in {one.request_id for one in pair.decode.transfers}, (
        "all of its logits are wanted: computed here"
    )
    pair.check_blocks_are_back()


def test_a_prompt_that_is_known_here_is_not_asked_for(model):
    pair = Pair(model)
    pair.run(requests())
    before = pair.decode.link.sent
    pair.run([Request("same", tuple(prompts()[6][:29]), 3, stop_token_ids=())])
    assert pair.decode.link.sent == before
    pair.decode.min_tokens = 10
    pair.run([Request("a little more", (*prompts()[6][:29], *range(9)), 3, stop_token_ids=())])
    assert pair.decode.link.sent == before


def test_a_prompt_that_is_known_when_its_offer_comes_needs_no_rows_and_is_not_prefilled_to_its_end(model):
    """Two equal prompts: the second is asked for before the first is there, and then found whole."""
    pair = Pair(model, replace(SETTINGS, max_running=4), prefill={"prefix": None})
    asked = [Request(name, tuple(prompts()[6][:29]), 3, stop_token_ids=(), tenant="t" * 5000) for name in range(6)]
    assert pair.run(asked) == alone(model, asked)
    for _ in range(30):
        pair.prefill.step()
        pair.decode.step()
    assert sorted(one.found for one in pair.decode.transfers)[-1] == 28 and not pair.decode.problems
    assert min(one.bytes for one in pair.decode.transfers) == 0
    pair.check_blocks_are_back()


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_whatever_is_asked_and_aborted_the_tokens_are_those_of_one_engine_and_no_block_is_lost(model, data):
    pool = {"num_blocks": data.draw(st.integers(14, 40))}
    chosen = replace(
        SETTINGS,
        preemption=data.draw(st.sampled_from(["recompute", "swap"])),
        max_running=data.draw(st.integers(2, 5)),
        policy=data.draw(st.sampled_from(["first_come", "shortest_remaining", "priority"])),
    )
    asked = [
        Request(
            name,
            tuple(prompts()[data.draw(st.integers(0, 6))][: data.draw(st.integers(1, 30))]),
            data.draw(st.integers(1, 12)),
            stop_token_ids=(),
            n=data.draw(st.sampled_from([1, 1, 2])),
            sampling=SamplingSettings(temperature=1.0),
            seed=name,
            priority=data.draw(st.integers(0, 1)),
        )
        for name in range(data.draw(st.integers(1, 8)))
    ]
    pair = Pair(model, chosen, prefill={"num_blocks": data.draw(st.integers(8, 40))}, **pool)
    ends, cut = data.draw(st.lists(st.integers(0, 7), max_size=3)), data.draw(st.integers(0, 200))
    aborted, turns = set(), [0]

    def disturb(pair):
        turns[0] += 1
        if turns[0] % 3 == 0 and ends and ends[0] < len(asked):
            name = ends.pop(0)
            if name in pair.decode._coming or any(one.request.id == name for one in pair.decode.scheduler.alive()):
                aborted.update(one.request_id for one in pair.decode.abort(name))
        if turns[0] == cut:
            pair.prefill.link.close()

    got = pair.run(asked, disturb)
    for _ in range(30):
        pair.prefill.step()
        pair.decode.step()
    want = alone(model, asked)
    assert {name: ids for name, ids in got.items() if name[0] not in aborted} == {
        name: ids for name, ids in want.items() if name[0] not in aborted
    }
    pair.check_blocks_are_back()


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(0, 36, 3))
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_link_that_breaks_at_any_message_costs_no_request_and_no_block(model, at, side):
    pair = Pair(model)
    link = getattr(pair, side).link

    def cut(pair):
        if link.sent.calls + link.received.calls >= at:
            link.close()

    assert pair.run(requests(), cut) == alone(model, requests())
    assert len(pair.decode.transfers) + sum(pair.decode.problems.values()) <= 6
    assert len(pair.decode.problems) <= 1 and pair.decode.why_alone, "said once"
    pair.check_blocks_are_back()
    assert pair.run([replace(one, id=f"later {one.id}") for one in requests(3)]), "alone it goes on"


def test_a_prefill_engine_of_other_weights_is_found_out_before_a_row_is_stored(model):
    pair = Pair(model, prefills=random_decoder(tiny_config(vocab_size=64), seed=1).double())
    assert pair.run(requests()) == alone(model, requests())
    [(why, count)] = pair.decode.problems.items()
    assert "other weights" in why and count == 6 and not pair.decode.transfers
    pair.check_blocks_are_back()


def test_a_cache_of_another_format_or_type_is_another_model(model):
    for other in ({"prefills": random_decoder(tiny_config(vocab_size=64))}, {"prefill": {"format": "int8"}}):
        pair = Pair(model, **other)
        assert pair.run(requests()) == alone(model, requests())
        assert sum(pair.decode.problems.values()) == 6


def test_a_prompt_that_the_prefill_engine_cannot_take_is_computed_here(model):
    pair = Pair(model, prefill={"num_blocks": 5})
    assert pair.run(requests()) == alone(model, requests())
    assert all("not prefilled: request" in why and "can never fit" in why for why in pair.decode.problems)
    assert pair.decode.problems and pair.decode.transfers
    pair.check_blocks_are_back()


def test_a_prefill_engine_whose_model_raises_loses_its_prompts_and_goes_on(model):
    pair = Pair(model)
    honest, left = pair.prefill._step.run, iter([0, 1, 0, 1, 1])

    def fails(*arguments, **settings):
        if next(left, 0):
            raise RuntimeError("out of memory")
        return honest(*arguments, **settings)

    pair.prefill._step.run = fails
    step = pair.prefill.step

    def tolerant():
        try:
            return step()
        except RuntimeError:
            return None

    pair.prefill.step = tolerant
    assert pair.run(requests()) == alone(model, requests())
    assert list(pair.decode.problems) == ["the prefill engine's step failed: RuntimeError: out of memory"]
    pair.check_blocks_are_back()


def test_who_waits_too_long_is_computed_here_and_what_comes_late_is_ignored(model):
    now = [0.0]
    pair = Pair(model, clock=lambda: now[0])

    def slow(pair):
        now[0] += 1.0 if len(pair.decode.transfers) == 2 else 0.0
        pair.decode.patience_s = 10.0

    assert pair.run(requests(), slow) == alone(model, requests())
    for _ in range(100):
        pair.prefill.step()
        pair.decode.step()
    pair.check_blocks_are_back()
    assert not pair.decode.why_alone


@pytest.mark.parametrize("turns", range(1, 12, 2))
def test_a_request_that_is_aborted_on_its_way_frees_its_blocks_on_both_sides(model, turns):
    pair = Pair(model)
    ended = []

    def abort(pair):
        abort.turn += 1
        if abort.turn == turns:
            ended.extend(pair.decode.abort(6))
            ended.extend(pair.decode.abort(5))

    abort.turn = 0
    got = pair.run(requests(), abort)
    whole = alone(model, requests())
    assert got == {name: ids for name, ids in whole.items() if name[0] < 5}
    assert [one.finish_reason for one in ended] == ["abort", "abort"]
    for _ in range(20):
        pair.prefill.step()
        pair.decode.step()
    pair.check_blocks_are_back()


# -- messages that are none ------------------------------------------------------------------------------------------


def layer(**changes) -> Message:
    return Message("layer", {"transfer": 0, "layer": 0, "start": 0, "tokens": 1} | changes, b"\0" * 256)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (layer(transfer=99), "did not ask for it"),
        (Message("reserved", {"transfer": 0, "start": 0}), "takes no message 'reserved'"),
    ],
)
def test_a_message_of_an_unknown_transfer_or_direction_ends_the_link(model, message, words):
    pair = Pair(model)
    forged = iter([0, 0, 1])
    assert pair.run(requests(), lambda p: next(forged, 0) and p.prefill.link.post(message)) == alone(model, requests())
    assert words in pair.decode.why_alone
    pair.check_blocks_are_back()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (layer(start=3), "rows 3 … 3 of layer 0 came"),
        (layer(tokens=500), "are expected"),
        (layer(layer=7), "no blocks for rows of layer 7"),
        (layer(tokens=0), "are expected"),
        (layer(tokens=2), "256 came"),
        (Message("offer", {"transfer": 0, "tokens": 1, "model": "", "prompt": ""}), "was offered before"),
    ],
)
def test_rows_that_do_not_fit_change_nothing_and_their_request_is_computed_here(model, message, words):
    ours, theirs = InProcess.pair()
    engine = DecodeEngine(model, SETTINGS, link=ours, **POOL)
    engine.add(Request("a", tuple(range(10)), 3, stop_token_ids=()))
    sender = Sender(theirs, Engine(model, SETTINGS, **POOL).kv, model_digest(model))
    asked = theirs.poll()
    sender.offer(0, ("a", 0), 9, prompt_digest(range(9), tenant_name("")))
    engine.step()
    assert asked.kind == "prefill" and theirs.poll().kind == "reserved"
    before = [one.clone() for one in engine.kv.store.tensors]
    theirs.post(message)
    engine._take()
    assert all(torch.equal(a, b) for a, b in zip(before, engine.kv.store.tensors))
    [why] = engine.problems
    assert words in why and theirs.poll().kind == "drop"
    assert tokens(engine.run())["a", 0] == alone(model, [Request("a", tuple(range(10)), 3, stop_token_ids=())])["a", 0]


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"draft": "ngram", "settings": replace(SETTINGS, draft_tokens=2)}, "draft='ngram' is not for this engine"),
        ({"asynchronous": True}, "asynchronous=True is not for this engine"),
        ({"settings": replace(SETTINGS, batching="static", chunk=None)}, "static batching"),
    ],
)
def test_what_a_prefill_engine_cannot_do_is_refused(model, given_, words):
    with pytest.raises(WorkbenchError, match=words):
        PrefillEngine(model, link=InProcess.pair()[0], **given_)


def test_a_model_with_states_is_refused():
    states = model_of("linear_attention")
    for kind in (PrefillEngine, DecodeEngine):
        with pytest.raises(WorkbenchError, match="keeps states"):
            kind(states, link=InProcess.pair()[0])


def test_who_has_its_blocks_is_admitted_before_one_that_waits_for_them():
    """Else both would wait for ever: the first for blocks, the second for its turn."""
    tables = BlockTables(10, 4)
    scheduler = Scheduler(tables, SchedulerSettings(max_running=4, token_budget=64))
    scheduler.add(Request("large", tuple(range(32)), 4, stop_token_ids=()))
    tables.open(("received", 0), ())
    tables.grow({("received", 0): 12})
    scheduler.add(Request("received", tuple(range(13)), 4, stop_token_ids=()))
    plan = scheduler.schedule(0.0)
    assert [(work.sequence.id, work.start, work.count) for work in plan.work] == [(("received", 0), 12, 1)]
    assert [one.id for one in scheduler.waiting] == [("large", 0)] and ("large", 0) not in tables.lengths


def test_a_received_sequence_that_cannot_get_its_next_block_waits_for_the_running_and_is_recomputed_where_none_runs():
    tables = BlockTables(3, 4)
    scheduler = Scheduler(tables, SchedulerSettings(max_running=4, token_budget=64))
    tables.open(("received", 0), ())
    tables.grow({("received", 0): 8})
    tables.open("another's", ())
    tables.grow({"another's": 4})  # rows on their way
    scheduler.add(Request("received", tuple(range(9)), 2, stop_token_ids=()))
    assert not scheduler.schedule(0.0).work and ("received", 0) not in tables.lengths
    tables.release("another's")
    [work] = scheduler.schedule(0.0).work
    assert (work.start, work.count) == (0, 9)
