"""Claims about links between two engines: what is refused as a message or a sender, and two real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import random_decoder, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from parallel_work import is_running, shared_memory

from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.instruments.device import PUBLISHED
from workbench.models.checkpoints import load, save_checkpoint
from workbench.parallel.disaggregated import BadMessage, LinkLost, Message, PrefillDecode, tcp
from workbench.parallel.disaggregated.beside_twin import beside_twin
from workbench.parallel.disaggregated.links import InProcess
from workbench.parallel.disaggregated.messages import HEAD, MAGIC, MAX_HEADER, MAX_PAYLOAD, Parser
from workbench.parallel.disaggregated.shared_ring import Ring, SharedMemoryLink
from workbench.parallel.disaggregated.tcp import HANDSHAKE_S, TcpLink, accept, connect, listen
from workbench.serving.engine import Engine
from workbench.serving.gaps import Poisson
from workbench.serving.lengths import Uniform
from workbench.serving.load import Workload
from workbench.serving.settings import SchedulerSettings

TOKEN = "a token of this run, of 32 characters or more"
DROP = Message("drop", {"transfer": 3, "reason": "no room"})
ROWS = Message("layer", {"transfer": 1, "layer": 2, "start": 0, "tokens": 4}, bytes(range(256)) * 40)


# -- messages ----------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([DROP, ROWS]), max_size=6), st.integers(1, 999))
def test_messages_come_out_of_a_stream_as_they_went_in_however_it_is_cut(messages, size):
    stream = b"".join(one.encoded() + bytes(one.payload) for one in messages)
    parser, came = Parser(), []
    for start in range(0, len(stream), size):
        came += parser.feed(stream[start : start + size])
    assert came == messages
    parser.check_end()


def framed(header: bytes, payload: int = 0) -> bytes:
    return HEAD.pack(MAGIC, len(header), payload) + header


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (b"GET / HTTP/1.1\r\n", "does not speak this protocol"),
        (HEAD.pack(MAGIC, MAX_HEADER + 1, 0), r"one of 4,097 and 0 is announced"),
        (HEAD.pack(MAGIC, 2, MAX_PAYLOAD + 1), "is announced"),
        (framed(b"{nonsense"), "no JSON"),
        (framed(b"[" * 4000), "no JSON|an object"),
        (framed(b"[]"), "an object with its kind"),
        (framed(b'{"kind": "run"}'), "a message is one of"),
        (framed(b'{"kind": ["drop"]}'), "a message is one of"),
        (framed(b'{"kind": "drop", "transfer": 1}'), "has the fields transfer, reason"),
        (framed(b'{"kind": "drop", "transfer": -1, "reason": ""}'), "a whole number from 0"),
        (framed(b'{"kind": "drop", "transfer": true, "reason": ""}'), "a whole number from 0"),
        (framed(json.dumps({"kind": "drop", "transfer": 1, "reason": "x" * 2001}).encode()), "at most 2000 characters"),
    ],
)
def test_what_is_no_message_is_refused_by_its_first_bytes(stream, words):
    with pytest.raises(BadMessage, match=words):
        Parser().feed(stream)


def test_a_message_that_is_cut_off_is_said_to_be():
    parser = Parser()
    assert parser.feed(ROWS.encoded() + bytes(100)) == []
    with pytest.raises(BadMessage, match=r"ended in the middle of a message, after \d+ of 10,\d+ bytes"):
        parser.check_end()


# -- links -------------------------------------------------------------------------------------------------------


def tcp_pair() -> tuple[TcpLink, TcpLink]:
    with listen() as listening:
        made: list[TcpLink] = []
        thread = threading.Thread(target=lambda: made.append(connect(listening.getsockname()[1], TOKEN)))
        thread.start()
        ours = accept(listening, TOKEN, timeout_s=30)
        thread.join()
    return ours, made[0]


def ring_pair(capacity: int = 20_000) -> tuple[SharedMemoryLink, SharedMemoryLink]:
    there, back = (memoryview(bytearray(Ring.bytes_for(capacity))) for _ in range(2))
    return SharedMemoryLink(Ring(there), Ring(back)), SharedMemoryLink(Ring(back), Ring(there))


LINKS = {"in process": InProcess.pair, "tcp": tcp_pair, "ring": ring_pair}


def heard(link) -> Message:
    for _ in range(10_000):
        if (message := link.poll()) is not None:
            return message
        link.wait(0.01)
    raise AssertionError("nothing came")


@pytest.mark.parametrize("kind", LINKS)
def test_a_link_carries_messages_in_order_both_ways_and_counts_them(kind):
    ours, theirs = LINKS[kind]()
    large = Message("layer", ROWS.fields, os.urandom(1 << 20))
    sent = [DROP, ROWS, large, ROWS, DROP]
    came = []
    for message in sent:
        ours.post(message)
        theirs.post(DROP)
    while len(came) < len(sent):
        came.append(heard(theirs)) if kind != "ring" else came.extend(filter(None, [theirs.poll(), ours._flush()]))
    assert [bytes(one.payload) for one in came] == [bytes(one.payload) for one in sent]
    assert [one.fields for one in came] == [one.fields for one in sent]
    assert heard(ours) == DROP
    assert (
        ours.sent == theirs.received and ours.sent.calls == 5 and ours.sent.bytes == 2 * len(ROWS.payload) + (1 << 20)
    )
    ours.close()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("kind", LINKS)
def test_a_closed_link_gives_what_came_before_and_then_says_that_it_is_lost(kind):
    ours, theirs = LINKS[kind]()
    ours.post(ROWS)
    ours.close()
    assert heard(theirs).fields == ROWS.fields
    with pytest.raises(LinkLost, match="closed"):
        heard(theirs)
    for call in (theirs.poll, lambda: theirs.post(DROP), lambda: ours.post(DROP)):
        with pytest.raises(LinkLost):
            call()


def test_bytes_that_are_no_message_end_a_link():
    ours, theirs = tcp_pair()
    ours._socket.send(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(LinkLost, match="does not speak this protocol"):
        heard(theirs)
    ours, theirs = tcp_pair()
    ours._socket.send((ROWS.encoded() + bytes(ROWS.payload))[:500])
    ours._socket.close()
    with pytest.raises(LinkLost, match="in the middle of a message, after 500 of"):
        heard(theirs)


# -- who may send ------------------------------------------------------------------------------------------------


def test_who_does_not_know_the_token_is_sent_away_and_the_right_one_still_comes():
    with listen() as listening:
        port = listening.getsockname()[1]
        answers: list = []

        def come():
            for stranger in (b"\0" * 16 + b"\0" * 32, b"short"):
                with socket.create_connection(("127.0.0.1", port)) as one:
                    one.sendall(stranger)
                    one.shutdown(socket.SHUT_WR)
                    while one.recv(100):
                        pass
            with pytest.raises(LinkLost, match="does not know the token"):
                connect(port, "another token")
            answers.append(connect(port, TOKEN))

        thread = threading.Thread(target=come)
        thread.start()
        link = accept(listening, TOKEN, timeout_s=30)
        thread.join()
        link.post(DROP)
        assert heard(answers[0]) == DROP
        link.close()
        answers[0].close()
        with pytest.raises(LinkLost, match="did not connect within"):
            accept(listening, TOKEN, timeout_s=0.01)
    with pytest.raises(LinkLost, match="no engine listens"):
        connect(port, TOKEN)


def test_who_connects_and_stays_silent_keeps_nobody_waiting():
    with listen() as listening, contextlib.ExitStack() as stack:
        port = listening.getsockname()[1]
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(6)]
        silent[0].sendall(b"\0" * 5)
        answers: list = []
        thread = threading.Thread(target=lambda: answers.append(connect(port, TOKEN)))
        thread.start()
        link = accept(listening, TOKEN, timeout_s=HANDSHAKE_S)  # one after the other they would take six times as long
        thread.join()
        link.post(DROP)
        assert heard(answers[0]) == DROP
        link.close()
        answers[0].close()
        silent.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
        with pytest.raises(LinkLost, match=r"did not connect within 0.3 s; 1 came that did not know the token"):
            accept(listening, TOKEN, timeout_s=0.3)


def test_a_handshake_that_comes_byte_by_byte_does_not_take_longer():
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        with here, there:
            over = threading.Event()

            def drip():
                with contextlib.suppress(OSError):
                    while not over.wait(0.05):
                        here.sendall(b"x")

            thread = threading.Thread(target=drip)
            thread.start()
            with pytest.raises(TimeoutError):
                tcp._read(there, 100_000, time.monotonic() + 0.3)
            over.set()
            thread.join()


# -- two processes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("models") / "tiny"
    save_checkpoint(random_decoder(tiny_config(vocab_size=64)), place)
    return place


SETTINGS = SchedulerSettings(max_running=4, token_budget=32)
POOL = {"num_blocks": 128}


def requests(count: int = 6, new_tokens: int = 8) -> list[Request]:
    drawn = torch.Generator().manual_seed(0)
    lengths = range(20, 20 + 15 * count, 15)
    prompts = [tuple(torch.randint(0, 64, (n,), generator=drawn).tolist()) for n in lengths]
    return [Request(i, prompt, new_tokens, stop_token_ids=()) for i, prompt in enumerate(prompts)]


def pair_of(folder, transport: str, **settings) -> PrefillDecode:
    common = {"prefill": SETTINGS, "decode": SETTINGS, "prefill_pool": POOL, "decode_pool": POOL}
    return PrefillDecode(folder, transport=transport, **common | settings)


@pytest.fixture(scope="module")
def expected(folder):
    return {one.request_id: one.token_ids for one in Engine(load(folder), SETTINGS, **POOL).run(requests())}


NIXL = pytest.param(
    "nixl",
    marks=pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed (pip install nixl-cu12 nixl)"),
)
TRANSPORTS = ["shm", "tcp", "gloo", NIXL]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_processes_give_the_tokens_of_one_engine_and_leave_nothing_behind(folder, expected, transport):
    before = shared_memory()
    with pair_of(folder, transport) as pair:
        pid = pair.prefill_pid
        got = {one.request_id: one.token_ids for one in pair.run(requests())}
        again = {one.request_id - 10: one.token_ids for one in pair.run([replaced(one) for one in requests()])}
        assert got == again == expected
        assert len(pair.engine.transfers) >= 6 and not pair.engine.problems
        assert shared_memory() == before, "the memory has no name any more"
        a_token = pair.engine.kv.bytes_per_token
        assert pair.engine.link.received.bytes == sum(a_token * (t.tokens - t.found) for t in pair.engine.transfers)
    assert not is_running(pid) and shared_memory() == before
    pair.close()


def replaced(request: Request) -> Request:
    return Request(request.id + 10, request.prompt_ids, request.max_new_tokens, stop_token_ids=())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_prefill_process_that_is_killed_costs_no_request(folder, expected, transport):
    """It is stopped first, so that some prompts are surely on their way."""
    with pair_of(folder, transport) as pair:
        engine, killed = pair.engine, []

        def kill(report):
            if engine.transfers and not killed:
                os.kill(pair.prefill_pid, signal.SIGSTOP)
                killed.append(len(engine.transfers))
                os.kill(pair.prefill_pid, signal.SIGKILL)

        assert {one.request_id: one.token_ids for one in pair.run(requests(), watch=kill)} == expected
        deadline = time.monotonic() + 15
        while not engine.why_alone and time.monotonic() < deadline:
            engine.step()
        assert "gone" in engine.why_alone or "middle of a message" in engine.why_alone
        assert list(engine.problems) in ([engine.why_alone], [])
        engine.kv.tables.check()
        assert not engine.kv.lengths and engine.kv.num_available == engine.kv.num_blocks
        assert {one.request_id - 10: one.token_ids for one in pair.run([replaced(o) for o in requests()])} == expected


def test_a_prefill_process_of_another_model_serves_nothing_and_is_reported_once(folder, expected):
    with pair_of(folder, "tcp") as pair:
        pair.engine.receiver.digest = "another"
        assert {one.request_id: one.token_ids for one in pair.run(requests())} == expected
        [(why, count)] = pair.engine.problems.items()
        assert "other weights" in why and count == 6


def test_a_prefill_process_that_hangs_is_waited_for_as_long_as_patience_says(folder, expected):
    with pair_of(folder, "tcp", patience_s=0.2) as pair:
        os.kill(pair.prefill_pid, signal.SIGSTOP)
        assert {one.request_id: one.token_ids for one in pair.run(requests())} == expected
        assert dict(pair.engine.problems) == {"not prefilled and sent within 0.2 s": 6}
        os.kill(pair.prefill_pid, signal.SIGCONT)
        for _ in range(200):
            pair.engine.step()
            pair.engine.link.wait(0.002)
        assert not pair.engine.why_alone, "what comes late is ignored"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"transport": "mpi"}, "unknown transport 'mpi'"),
        ({"threads": 0}, "threads must be a whole number"),
        ({"model": "/nowhere"}, "nowhere"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_a_process_starts(folder, settings, words):
    given_ = {"model": folder} | settings
    with pytest.raises(WorkbenchError, match=words):
        PrefillDecode(**given_)


def test_an_error_of_the_prefill_process_at_its_start_is_said_with_its_words(folder):
    pair = pair_of(folder, "shm", prefill_pool={"num_blocks": -1})
    with pair:
        assert len(pair.run(requests())) == 6
        deadline = time.monotonic() + 15
        while not pair._ranks.rank.failed and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "num_blocks" in pair._ranks.rank.failed


def test_the_twin_of_two_processes_serves_the_same_requests_with_their_own_step_times(folder):
    """How far off it is depends on the machine's other work: numbers are reported, not asserted."""
    with pair_of(folder, "shm") as pair:
        asked = Workload(Uniform(20, 60), Uniform(4, 8), Poisson(50.0))
        beside = beside_twin(pair, asked, 12, PUBLISHED["h200"])
        assert len(beside.finished) == 12 and pair.engine.transfers
        assert set(beside.differences()) == {"predicted ttft", "predicted tpot", "replayed ttft", "replayed tpot"}
        assert min(beside.real.ttft_s, beside.predicted.ttft_s, beside.replayed.tpot_s) > 0
        pair.engine.receiver.digest = "another"
        with pytest.raises(WorkbenchError, match="did not serve all"):
            beside_twin(pair, asked, 12, PUBLISHED["h200"], seed=7)


@pytest.mark.skipif(find_spec("nixl") is not None, reason="NIXL is installed")
def test_nixl_is_asked_for_where_it_is_used(folder):
    with pytest.raises(WorkbenchError, match="transport 'nixl' needs NIXL, which is not installed"):
        pair_of(folder, "nixl")
