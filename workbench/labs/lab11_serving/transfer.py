"""server.transfer: how long a prompt takes to prefill, and how long its keys and values take to another process.

    one engine    prefill ────────────▶ first token
    the pair      prefill ─ rows of all layers ─▶ the last token's row ─▶ first token
                  prefill ─▶ …   rows of layer l while layer l + 1 computes, then those of the last layer

One process beside this one prefills; there is a link of each kind between the two, and they take turns. Sending alone
goes through the connector's verbs too, from `reserve` until all has `arrived`: its medians give α and β of the link,
the copies out of one cache and into the other included. With them the first token of the pair is predicted.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.decoding.sequence import Finished, Request
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain, shape_of, text_ids
from workbench.instruments.costs import kv_bytes
from workbench.instruments.timing import exclusive
from workbench.kv.paged_rows import receive, stored_layers
from workbench.labs.lab11_serving.processes import for_processes, one_thread
from workbench.models.checkpoints import load
from workbench.models.fast import FastDecoder, prepare
from workbench.parallel import Rank, start_ranks
from workbench.parallel.alpha_beta import AlphaBeta, fit
from workbench.parallel.disaggregated import DecodeEngine, Link, LinkLost, Message, PrefillEngine, make_link
from workbench.parallel.disaggregated.connector import prompt_digest
from workbench.parallel.disaggregated.pair import WAIT_S
from workbench.serving.engine import Engine
from workbench.serving.settings import SchedulerSettings
from workbench.serving.simulate_pools import RowsLink

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

NAME = "server.transfer"
LINKS = ("shm", "tcp", "gloo")
AFTER, LAYERWISE = "after the prefill", "layer by layer"
SENDING = (AFTER, LAYERWISE)
NEW_TOKENS = 2  # the second one's time is that of a decode step
BLOCK = 16
IDLE_S = 0.0005
FASTEST = 1e15  # bytes a second, in place of a β that is lost in the spread


def lengths(context: int) -> tuple[int, ...]:
    """Tokens of the prompts: doubled up to the longest."""
    made = [context]
    while made[-1] >= 64:
        made.append(made[-1] // 2)
    return tuple(reversed(made[:4]))


def pool(context: int) -> dict[str, Any]:
    """Of every engine here: room for one prompt, and no prefix cache, so that all of it is computed and sent."""
    return {"num_blocks": -(-(context + NEW_TOKENS) // BLOCK) + 1, "block_size": BLOCK, "prefix": None}


def settings_for(context: int) -> SchedulerSettings:
    return SchedulerSettings(max_running=1, token_budget=context, remember=False)


# -- the process that prefills -----------------------------------------------------------------------------------------


def answer(rank: Rank, model: str, context: int, turns: int) -> None:
    """The work of rank 1: what rank 0 asks for, in the same order."""
    made, links = prepare(load(model)), [make_link(rank, kind) for kind in LINKS]
    try:
        engines = [
            [
                PrefillEngine(made, settings_for(context), link=link, layerwise=s == LAYERWISE, **pool(context))
                for s in SENDING
            ]
            for link in links
        ]
        for _ in range(turns * len(lengths(context))):
            for pair in engines:
                send_rows(pair[0])
                for engine in pair:
                    prefill_one(engine)
        for link in links:
            heard(link, "report")  # until then what was posted may still lie in the outbox
    finally:
        for link in links:
            link.close()


def prefill_one(engine: PrefillEngine) -> None:
    """Serve until one prompt is computed and sent."""
    done = False
    while not done or engine.sender.outgoing:
        if engine.link.why_lost:
            raise LinkLost(engine.link.why_lost)
        done = bool(engine.step().finished) or done
        if engine.idle:
            engine.link.wait(IDLE_S)


def send_rows(engine: PrefillEngine) -> None:
    """Answer one request for a prompt with rows as they happen to lie in the cache: offer, send."""
    asked = heard(engine.link, "prefill")
    ids, sender = array("q", bytes(asked.payload)), engine.sender
    receive(engine.kv, "sent", (*ids, 0))
    sender.offer(asked.transfer, "sent", len(ids), prompt_digest(ids, bytes.fromhex(asked.tenant)))
    sender.reserved(asked.transfer, heard(engine.link, "reserved").start)
    sender.send_all(asked.transfer, len(ids))
    engine.kv.release("sent")


def heard(link: Link, kind: str) -> Message:
    """The next message, of that kind. Raises LinkLost, also where another one comes."""
    while (message := link.poll()) is None:
        link.wait(IDLE_S)
    if message.kind != kind:
        raise link.lose(f"a message {message.kind!r} came in place of {kind!r}")
    return message


# -- this process ------------------------------------------------------------------------------------------------------


def time_sending(engine: DecodeEngine, ids: Sequence[int]) -> tuple[float, int]:
    """Seconds from `reserve` until all rows of a prompt have `arrived`, and their bytes."""
    receiver, link = engine.receiver, engine.link
    transfer = receiver.want("sent", ids, "", 0.0).transfer
    one = receiver.check_offer(heard(link, "offer"))
    began = time.perf_counter()
    if not receiver.reserve(transfer):
        raise WorkbenchError("the decode engine has no room for a prompt that its pool was made for")
    while not receiver.arrived(transfer):
        receiver.put(heard(link, "layer"))
    seconds = time.perf_counter() - began
    receiver.drop(transfer)
    return seconds, one.bytes


@dataclass
class Runs:
    """What the turns gave for one length of prompt: seconds, by what was measured."""

    tokens: int
    ids: tuple[int, ...]
    prefill: list[float]
    decode: list[float]
    sent: dict[str, list[float]]  # by link
    pair: dict[tuple[str, str], list[float]]  # first tokens, by link and sending
    written: tuple[int, ...] = ()
    bytes: int = 0

    @classmethod
    def of(cls, ids: Sequence[int]) -> Runs:
        every = [(link, sending) for link in LINKS for sending in SENDING]
        return cls(len(ids), tuple(ids), [], [], {link: [] for link in LINKS}, {one: [] for one in every})

    def request(self, engine: Engine, name: object) -> Request:
        return Request((name, self.tokens), self.ids, NEW_TOKENS, stop_token_ids=(), arrival_s=engine.now_s)


def first_token_s(one: Finished) -> float:
    return float(one.token_times_s[0] - one.arrival_s)


def take_turn(runs: Runs, turn: int, alone: Engine, pairs: dict[str, DecodeEngine]) -> None:
    """One engine, then each link: sending alone, the pair after the prefill, the pair layer by layer."""
    [one] = alone.run([runs.request(alone, turn)])
    runs.written = one.token_ids
    seconds = [first_token_s(one), float(one.token_times_s[1] - one.token_times_s[0])]
    taken: list[tuple[list[float], float]] = [(runs.prefill, seconds[0]), (runs.decode, seconds[1])]
    for link, engine in pairs.items():
        sent_s, runs.bytes = time_sending(engine, runs.ids)
        taken.append((runs.sent[link], sent_s))
        for sending in SENDING:
            [one] = engine.run([runs.request(engine, (turn, sending))])
            if engine.problems or engine.why_alone:
                raise WorkbenchError(f"a prompt did not come over {link}: {engine.why_alone or dict(engine.problems)}")
            if one.token_ids != runs.written:
                raise WorkbenchError(f"over {link}, {sending}, the pair wrote other tokens than one engine")
            taken.append((runs.pair[link, sending], first_token_s(one)))
    if turn >= 0:
        for samples, value in taken:
            samples.append(value)


def expected_s(runs: Runs, link: AlphaBeta, layers: int, sending: str) -> float:
    """Of the pair's first token: prefill, rows that nothing hides, α, and the step of the prompt's last token."""
    nbytes = runs.bytes / (runs.tokens - 1)
    pieces = layers if sending == LAYERWISE else 1
    rows = RowsLink(nbytes, min(link.bytes_per_s, FASTEST), link.alpha_s, pieces)
    sent_s = rows.sent_s(0.0, statistics.median(runs.prefill), 0.0, runs.tokens - 1)
    return sent_s + rows.latency_s + statistics.median(runs.decode)


def run_transfer(bench: Bench, *, model: Any, context: int, repeats: int) -> Iterator[Measurement]:
    """For each length of prompt in `tokens`: seconds to prefill it on one engine (`measured` "prefill"); to send its
    rows over each `link` ("send"), predicted by α and β; and to the first token of the pair, `sending` after the
    prefill or layer by layer ("pair"). Times of both processes are of one thread."""
    bench.check_stop()
    with for_processes(bench, model) as (name, decoder), one_thread():
        sizes = lengths(context)
        bench.report("starting a process that prefills")
        with start_ranks(2, answer, name, context, repeats + 1, timeout_s=WAIT_S) as ranks:
            links = {kind: make_link(ranks.rank, kind) for kind in LINKS}
            try:
                every = _turns(bench, decoder, links, [Runs.of(text_ids(decoder, n)) for n in sizes], repeats)
            finally:
                for link in links.values():
                    link.close()
        yield from _measurements(bench, decoder, every, {**plain({"model": model}), "context": context})


def _turns(bench: Bench, decoder: FastDecoder, links: dict[str, Link], every: list[Runs], repeats: int) -> list[Runs]:
    context = every[-1].tokens
    settings = settings_for(context)
    alone = Engine(decoder, settings, **pool(context))
    pairs = {kind: DecodeEngine(decoder, settings, link=link, **pool(context)) for kind, link in links.items()}
    for turn in range(-1, repeats):
        for runs in every:
            bench.check_stop()
            bench.report(f"{runs.tokens} tokens: " + (f"turn {turn + 1} of {repeats}" if turn >= 0 else "warming up"))
            with exclusive(bench.check_stop):
                take_turn(runs, turn, alone, pairs)
    for link in links.values():
        link.post(Message("report"))
    for runs in every:
        formula = kv_bytes(decoder.config, runs.tokens - 1, decoder.dtype.itemsize)
        if runs.bytes != formula:
            raise WorkbenchError(
                f"{runs.bytes:,} bytes were sent of {runs.tokens} tokens, the formula says {formula:,.0f}"
            )
    return every


def _measurements(
    bench: Bench, decoder: FastDecoder, every: list[Runs], settings: dict[str, Any]
) -> Iterator[Measurement]:
    layers = stored_layers(Engine(decoder, **pool(1)).kv)
    fitted = {k: fit([(runs.bytes, statistics.median(runs.sent[k])) for runs in every]) for k in LINKS}
    for runs in every:
        own = {**settings, "tokens": runs.tokens}
        check = "the same tokens as one engine"
        yield bench.measurement(
            name=NAME,
            settings={**own, "measured": "prefill"},
            samples=runs.prefill,
            unit="s",
            counts={"decode_s": statistics.median(runs.decode), "bytes": runs.bytes},
            check=check,
        )
        for kind, link in fitted.items():
            counts = {"bytes": runs.bytes, "alpha_s": link.alpha_s, "beta_s_per_byte": link.beta_s_per_byte}
            yield bench.measurement(
                name=NAME,
                settings={**own, "measured": "send", "link": kind},
                samples=runs.sent[kind],
                unit="s",
                counts=counts,
                predicted=link.message_s(runs.bytes),
                limit="launch" if runs.bytes < link.half_bytes else "bandwidth",
                check=f"{runs.bytes:,} bytes, as the formula says",
            )
            for sending in SENDING:
                yield bench.measurement(
                    name=NAME,
                    settings={**own, "measured": "pair", "link": kind, "sending": sending},
                    samples=runs.pair[kind, sending],
                    unit="s",
                    counts=counts,
                    predicted=expected_s(runs, link, layers, sending),
                    check=check,
                )


EXPERIMENT = Experiment(
    name=NAME,
    lab=11,
    question="A prompt is prefilled in one process and decoded in another: how long do its keys and values take?",
    how=(
        "two processes of one thread each; one request at a time, without a prefix cache. A transfer by itself is timed"
        " from reserve to arrived; α and β are fitted to the medians of those, and predict the first token of the pair:"
        " prefill, rows that no computation hides, and the step of the prompt's last token."
    ),
    settings=(
        MODEL,
        Setting("context", 512, "int", 64, 16_384, unit="tokens", step=32, brief=64, help="of the longest prompt"),
        Setting("repeats", 7, "int", 1, 100, brief=1, help="timed turns"),
    ),
    run=run_transfer,
    predict=no_times,
    limits=lambda *, model, **_: {"context": shape_of(model).context_length - NEW_TOKENS},
    record={"cuda": ()},
)
