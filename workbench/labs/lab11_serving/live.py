"""server.live: a running server as it goes: its requests, queue, blocks, tokens a second, and latencies.

Requests come below what the server can answer, then in a burst beyond it, then below it again. What is shown is what
the engine says after every step (`serving.api.link.StepNews`) and when each request was read.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain
from workbench.instruments.records import quantile
from workbench.labs.lab11_serving.loads import TEST, capacity, engine_for, requests_at, send, served_tokens
from workbench.labs.lab11_serving.loopback import Loopback, loopback, note_requests

if TYPE_CHECKING:
    from workbench.decoding.sequence import Request
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.serving.api.link import StepNews
    from workbench.serving.arrivals import Arrival

ROWS = 28  # requests that are shown, the newest
PHASES = (0.6, None, 0.6)  # rates as shares of what the server can answer; None: the burst
NOT_YET = -1.0


@dataclass
class Row:
    """One request: when it came, began, had its first and last token, on the engine's clock in s; NOT_YET until then.
    gap_s: the longest time between two of its tokens."""

    came_s: float
    begun_s: float = NOT_YET
    first_s: float = NOT_YET
    last_s: float = NOT_YET
    gap_s: float = 0.0
    done: bool = False


@dataclass
class Timeline:
    """What the steps said. On the server's event loop but for `snapshot`."""

    rows: dict[Hashable, Row] = field(default_factory=dict)
    tokens: int = 0
    last: StepNews | None = None

    def came(self, request: Request) -> None:
        self.rows[request.id] = Row(request.arrival_s)

    def watch(self, news: StepNews) -> None:
        self.last, now_s = news, news.at_s + news.seconds
        for request_id, _ in news.begun:
            if (row := self.rows.get(request_id)) is not None:
                row.begun_s = news.at_s
        for update in news.updates:
            row = self.rows.get(update.request_id)
            if row is None or not update.tokens:
                continue
            self.tokens += len(update.tokens)
            row.gap_s = max(row.gap_s, now_s - row.last_s if row.last_s > 0 else 0.0)
            row.first_s = now_s if row.first_s < 0 else row.first_s
            row.last_s, row.done = now_s, update.finish_reason is not None


def phases(capacity_per_s: float, seconds: float, burst: float) -> tuple[Arrival, ...]:
    """Below, beyond and below what the server can answer, a third of the time each."""
    arrivals: list[Arrival] = []
    for number, share in enumerate(PHASES):
        rate = capacity_per_s * (burst if share is None else share)
        count = max(2, round(rate * seconds / len(PHASES)))
        start = number * seconds / len(PHASES)
        drawn = requests_at(rate, count, TEST + number)
        arrivals += [
            replace(one, at_s=round(start + one.at_s, 6), texts=((f"{number}/{one.name}", one.prompt_tokens),))
            for one in drawn
        ]
    return tuple(sorted(arrivals, key=lambda one: one.at_s))


def run_live(
    bench: Bench,
    *,
    model,
    seconds: float,
    max_running: int,
    burst: float,
    every: float,
    ttft_slo: float,
    gap_slo: float,
) -> Iterator[Measurement]:
    """A Measurement at each look, the last when all are answered: tokens a second since the look before. "rows" of the
    settings are the newest requests, (came, begun, first token, last token, longest gap, done), in s from the first."""
    decoder = bench.model(model, arrangement="fast")
    settings = {
        **plain({"model": model, "seconds": seconds, "max_running": max_running, "burst": burst}),
        **{"ttft_slo": ttft_slo, "gap_slo": gap_slo},
    }
    seen = Timeline()
    with loopback(
        engine_for(decoder, max_running=max_running), watch=[seen.watch], check_stop=bench.check_stop
    ) as server:
        bench.report("what this machine can serve")
        arrivals = phases(capacity(bench, server, 2 * max_running), seconds, burst)
        note_requests(server, seen.came)
        seen.tokens = 0
        with ThreadPoolExecutor(1, "load") as pool:
            load = pool.submit(send, bench, server, arrivals)
            began, before, ended = time.perf_counter(), 0, False
            while not ended:
                due = time.perf_counter() + every
                while time.perf_counter() < due and not load.done():
                    bench.check_stop()
                    time.sleep(0.01)
                ended = load.done()
                if seen.last is None or not seen.rows:
                    continue
                now, tokens = time.perf_counter(), seen.tokens
                rate = (tokens - before) / (now - began)
                began, before = now, tokens
                check = "in the middle of the run"
                if ended:
                    check = f"all {served_tokens(load.result(), arrivals):,} tokens that were asked for were served"
                yield _look(bench, settings, server, seen, rate, len(arrivals), check)
        load.result()


def _look(bench: Bench, settings: dict, server: Loopback, seen: Timeline, rate: float, requests: int, check: str):
    news, every = seen.last, [replace(row) for row in seen.rows.copy().values()]
    assert news is not None
    zero = every[0].came_s
    ttft = [row.first_s - row.came_s for row in every if row.first_s > 0]
    gaps = [row.gap_s for row in every if row.gap_s > 0]
    counts = {
        "now_s": server.front.link.now_s - zero,
        "requests": requests,
        "came": len(every),
        "done": sum(row.done for row in every),
        "running": len(news.running),
        "waiting": sum(row.begun_s < 0 for row in every),
        "blocks_used": news.blocks_used,
        "blocks": server.front.link.num_blocks,
        "tokens": seen.tokens,
    }
    if ttft:
        counts |= {"ttft_p50_s": quantile(ttft, 0.5), "ttft_p99_s": quantile(ttft, 0.99)}
    if gaps:
        counts["gap_p99_s"] = quantile(gaps, 0.99)
    return bench.measurement(
        name="server.live",
        settings={**settings, "rows": [_plain(row, zero) for row in every[-ROWS:]]},
        samples=[rate],
        unit="tokens/s",
        counts=counts,
        check=check,
    )


def _plain(row: Row, zero_s: float) -> list[float]:
    times = (row.came_s, row.begun_s, row.first_s, row.last_s)
    return [*(NOT_YET if at < 0 else round(at - zero_s, 4) for at in times), round(row.gap_s, 4), int(row.done)]


EXPERIMENT = Experiment(
    name="server.live",
    lab=11,
    question="What does a server do while a burst of requests passes through it?",
    how=(
        "requests come over a loopback socket, below what the server can answer, in a burst beyond it, and below it"
        " again; the engine tells of every step, and the picture is drawn a few times a second."
    ),
    settings=(
        MODEL,
        Setting("seconds", 9.0, "float", 0.6, 60.0, unit="s", step=0.6, brief=2.4, help="that requests come"),
        Setting("max_running", 8, "int", 2, 64, unit="texts", help="in work at a time"),
        Setting("burst", 2.5, "float", 0.5, 10.0, step=0.5, help="arrivals in it, of what the server can answer"),
        Setting("every", 0.3, "float", 0.05, 10.0, unit="s", step=0.05, help="between two looks"),
        Setting("ttft_slo", 0.3, "float", 0.05, 10.0, unit="s", step=0.05, help="to the first token"),
        Setting("gap_slo", 0.06, "float", 0.01, 1.0, unit="s", step=0.01, help="between two tokens"),
    ),
    run=run_live,
    predict=no_times,
    record={"cpu": (), "cuda": ()},  # to be watched
)
