"""server.tiers: a prompt that comes again after its blocks were evicted: computed, or loaded from a tier.

The same prompt is asked for twice in each engine, and everything that the pool could evict is evicted in between. The
engines differ in where evicted blocks go: nowhere (the prompt is computed again), to host memory, to a memory-mapped
file, or to host memory at the far end of a link, which waits as long as its bandwidth and latency say.

Predicted from other prompts of other lengths: what a prefill takes (a parabola through three lengths), what a step
takes whose prompt is still in the pool, and what a load takes (seconds once, and per token).
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain, shape_of
from workbench.instruments.timing import exclusive
from workbench.labs.lab11_serving.loads import BLOCK
from workbench.serving.engine import Engine
from workbench.serving.load_costs import break_even_bandwidth, load_seconds
from workbench.serving.settings import SchedulerSettings, TierSettings
from workbench.serving.times import RequestTimes

if TYPE_CHECKING:
    from workbench.decoding.sequence import Sequence as Text
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.fast import Model

SOURCES = ("computed", "host", "disk", "link")
NEW_TOKENS = 4  # of an answer; the first is timed, all are compared
CALIBRATED = (0.03, 0.4, 1.0)  # shares of the longest prompt
Curve = Callable[[float], float]


class Answer(NamedTuple):
    """tokens: of the answer; found: of the prompt, in the pool and in the tiers."""

    tokens: tuple[int, ...]
    ttft_s: float
    load_s: float
    found: int


class Asked:
    """One engine, with one kind of tier below its pool."""

    def __init__(
        self, model: Model, source: str, longest: int, prompts: int, folder: Path, link: tuple[float, float]
    ) -> None:
        self._names = 0
        self.known: set[tuple[int, ...]] = set()  # prompts that were asked for
        blocks = -(-(longest + 1 + NEW_TOKENS) // BLOCK)
        settings = SchedulerSettings(max_running=1, token_budget=longest + 1)
        per_block = model.config.expanded_kv_values_per_token() * model.dtype.itemsize * BLOCK
        room = (prompts + 1) * blocks * (per_block + 64)  # what a tier may add to align one
        tiers = None
        if source == "disk":
            tiers = TierSettings(disk_path=folder / "blocks", disk_bytes=room, load="always")
        elif source != "computed":
            tiers = TierSettings(host_bytes=room, load="always")
        self.engine = Engine(model, settings, num_blocks=blocks, block_size=BLOCK, tiers=tiers)
        self.bytes_per_token = self.engine.kv.bytes_per_token
        self.load_s = 0.0  # of the last load
        if (inside := self.engine.scheduler.load) is not None:
            self.engine.scheduler.load = self._timed(inside, link if source == "link" else None)

    def _timed(self, inside: Callable[[Text], int], link: tuple[float, float] | None) -> Callable[[Text], int]:
        """A load, timed. It takes no less than the link would, where there is one."""

        def load(sequence: Text) -> int:
            began_s = time.perf_counter()
            tokens = inside(sequence)
            if link is not None and tokens:
                until_s = began_s + load_seconds(tokens, self.bytes_per_token, *link)
                time.sleep(max(0.0, until_s - time.perf_counter()))
            self.load_s = time.perf_counter() - began_s
            return tokens

        return load

    def ask(self, prompt: Sequence[int]) -> Answer:
        self._names, self.load_s = self._names + 1, 0.0
        request = Request(self._names, tuple(prompt), NEW_TOKENS, stop_token_ids=(), arrival_s=self.engine.now_s)
        [done] = self.engine.run([request])
        ttft = RequestTimes.of(done).ttft_s
        assert ttft is not None
        return Answer(done.token_ids, float(ttft), self.load_s, done.hit_tokens)

    def evict(self) -> None:
        """All that nobody holds leaves the pool."""
        tables = self.engine.kv.tables
        tables.grow({"in the way": tables.num_available * BLOCK})
        tables.release("in the way")


@dataclass(frozen=True)
class Predicted:
    """Seconds to the first token of a prompt of so many tokens that come again, by where they come from."""

    prefill_s: Curve
    in_pool_s: Curve
    load_s: dict[str, Curve]

    def ttft_s(self, source: str, tokens: float) -> float:
        if source == "computed":
            return self.prefill_s(tokens)
        return self.in_pool_s(tokens) + self.load_s[source](tokens)

    def break_even(self, source: str, longest: int) -> int | None:
        """Tokens of the first whole block from which on loading is the faster; None within the longest prompt."""
        lengths = range(BLOCK, longest + 1, BLOCK)
        slower = [n for n in lengths if self.ttft_s(source, n) >= self.ttft_s("computed", n)]
        first = (slower[-1] if slower else 0) + BLOCK
        return first if first <= longest else None


def prompt_of(tokens: int, vocab_size: int, kind: str) -> list[int]:
    """So many tokens that come again, and one more, whose logits give the first token."""
    drawn = random.Random(f"{kind} {tokens}")
    return [drawn.randrange(vocab_size) for _ in range(tokens + 1)]


def lengths_of(longest: int, points: int) -> list[int]:
    """Whole blocks, from two on, each length so many times the one before."""
    blocks = np.geomspace(2, longest // BLOCK, points)
    return sorted({round(count) * BLOCK for count in blocks.tolist()})


def run_tiers(
    bench: Bench, *, model, longest: int, points: int, link_mb_per_s: float, link_ms: float, repeats: int
) -> Iterator[Measurement]:
    """A Measurement for each source ("measured") and length ("tokens"): seconds to the first token of the prompt that
    came again, a sample a repeat."""
    decoder = bench.model(model, arrangement="fast")
    longest = longest // BLOCK * BLOCK
    if longest + 1 + NEW_TOKENS > decoder.config.context_length:
        raise WorkbenchError(
            f"a prompt of {longest:,} tokens, one more and an answer of {NEW_TOKENS} do not fit into the context of"
            f" {decoder.config.context_length:,}; shorten the longest prompt"
        )
    lengths, link = lengths_of(longest, points), (link_mb_per_s * 1e6, link_ms / 1e3)
    with tempfile.TemporaryDirectory(prefix="workbench-tiers-") as folder:
        asked: dict[str, Asked] = {}
        try:
            for source in SOURCES:
                prompts = len(lengths) + len(CALIBRATED)
                asked[source] = Asked(decoder, source, longest, prompts, Path(folder), link)
            seen = Seen(bench, asked, decoder.config.vocab_size)
            for turn in range(-1, repeats):
                bench.report(f"turn {turn + 1} of {repeats}" if turn >= 0 else "warming up")
                seen.turn(lengths, _calibration_lengths(longest), counts=turn >= 0)
            predicted = seen.predicted()
            for tokens in lengths:
                computed_s = seen.median_s("computed", tokens)
                for source in SOURCES:
                    answers = seen.answers[source, tokens]
                    ttft_s = [one.ttft_s for one in answers]
                    yield bench.measurement(
                        name="server.tiers",
                        settings={
                            **plain({"model": model, "longest": longest, "points": points}),
                            **{"link_mb_per_s": link_mb_per_s, "link_ms": link_ms},
                            **{"measured": source, "tokens": tokens},
                        },
                        samples=ttft_s,
                        unit="s",
                        counts={
                            "tokens": tokens,
                            "found": answers[-1].found,
                            "bytes": answers[-1].found * asked[source].bytes_per_token,
                            "load_s": statistics.median(one.load_s for one in answers),
                            "saved_s": computed_s - statistics.median(ttft_s),
                            "predicted_saved_s": predicted.prefill_s(tokens) - predicted.ttft_s(source, tokens),
                            **_break_even(predicted, source, longest, asked[source].bytes_per_token),
                        },
                        predicted=predicted.ttft_s(source, tokens),
                        check=f"all {len(SOURCES) * repeats} answers have the same {NEW_TOKENS} tokens",
                    )
        finally:
            for one in asked.values():
                one.engine.close()


def _break_even(predicted: Predicted, source: str, longest: int, bytes_per_token: float) -> dict[str, float]:
    """Where the rule changes its answer, by length and by bandwidth. No length where it does not."""
    prefill_s = (predicted.prefill_s(longest) - predicted.in_pool_s(longest)) / longest
    counts = {"least_bytes_per_s": break_even_bandwidth(bytes_per_token, max(prefill_s, 1e-9))}
    if source != "computed":
        load_s = predicted.load_s[source]
        counts["bytes_per_s"] = (longest - BLOCK) * bytes_per_token / max(load_s(longest) - load_s(BLOCK), 1e-9)
        if (tokens := predicted.break_even(source, longest)) is not None:
            counts["break_even_tokens"] = tokens
    return counts


def _calibration_lengths(longest: int) -> list[int]:
    return sorted({max(1, round(longest * share / BLOCK)) * BLOCK for share in CALIBRATED})


class Seen:
    """What was measured, and what it is predicted with, in turns: a machine that slows down slows both down."""

    def __init__(self, bench: Bench, asked: dict[str, Asked], vocab_size: int) -> None:
        self._bench, self._asked, self._vocab_size = bench, asked, vocab_size
        self.answers: dict[tuple[str, int], list[Answer]] = {}
        self._calibration: dict[str, list[tuple[int, float]]] = {}

    def turn(self, lengths: Sequence[int], calibration: Sequence[int], *, counts: bool) -> None:
        """Every prompt once from every source. counts: False for a turn that only warms up."""
        for tokens in calibration:
            prompt = prompt_of(tokens, self._vocab_size, "calibration")
            again = self._come_again(prompt)
            in_pool = self._asked["computed"].ask(prompt)
            if counts:
                points = {source: one.ttft_s if source == "computed" else one.load_s for source, one in again.items()}
                for name, seconds in {**points, "in pool": in_pool.ttft_s}.items():
                    self._calibration.setdefault(name, []).append((tokens, seconds))
        for tokens in lengths:
            for source, answer in self._come_again(prompt_of(tokens, self._vocab_size, "measured")).items():
                if counts:
                    self.answers.setdefault((source, tokens), []).append(answer)

    def median_s(self, source: str, tokens: int) -> float:
        return statistics.median(one.ttft_s for one in self.answers[source, tokens])

    def predicted(self) -> Predicted:
        fits = {name: _fit(points, 2 if name == "computed" else 1) for name, points in self._calibration.items()}
        return Predicted(fits.pop("computed"), fits.pop("in pool"), fits)

    def _come_again(self, prompt: Sequence[int]) -> dict[str, Answer]:
        """Each source in turn; what was there before is evicted. In the first turn the prompt is computed first."""
        again = {}
        for source, one in self._asked.items():
            self._bench.check_stop()
            if tuple(prompt) not in one.known:
                one.evict()
                one.ask(prompt)
                one.known.add(tuple(prompt))
            one.evict()
            with exclusive(self._bench.check_stop):
                answer = again[source] = one.ask(prompt)
            expected = 0 if source == "computed" else len(prompt) - 1
            if answer.found != expected:
                raise WorkbenchError(f"{answer.found} tokens came from {source}, and {expected} should have")
        if len({one.tokens for one in again.values()}) > 1:
            raise WorkbenchError(
                f"the answer to a prompt of {len(prompt)} tokens depends on where its blocks came from"
            )
        return again


def _fit(points: Sequence[tuple[int, float]], degree: int) -> Curve:
    """A polynomial through the median of each length, of a lower degree where there are fewer lengths."""
    lengths = sorted({tokens for tokens, _ in points})
    medians = [statistics.median(s for tokens, s in points if tokens == length) for length in lengths]
    fitted = np.polynomial.Polynomial.fit(lengths, medians, min(degree, len(lengths) - 1))
    least = min(medians) / 10
    return lambda tokens: max(least, float(fitted(tokens)))


EXPERIMENT = Experiment(
    name="server.tiers",
    lab=11,
    question="When is loading an evicted prefix faster than computing it again?",
    how=(
        "a prompt is asked for, all blocks are evicted, and it is asked for again, in engines whose evicted blocks go"
        " nowhere, to host memory, to a memory-mapped file, and behind a link that waits as its bandwidth and latency"
        " say. The file is in the page cache of the system. Predicted from other prompts of other lengths."
    ),
    settings=(
        MODEL,
        Setting("longest", 960, "int", 2 * BLOCK, 8192, unit="tokens", step=BLOCK, brief=192, help="that come again"),
        Setting("points", 6, "int", 2, 12, brief=3, help="lengths of prompts"),
        Setting("link_mb_per_s", 100.0, "float", 1.0, 100_000.0, unit="MB/s", step=1.0, help="of the link"),
        Setting("link_ms", 50.0, "float", 0.0, 1000.0, unit="ms", step=1.0, help="before its first byte"),
        Setting("repeats", 3, "int", 1, 50, brief=1, help="timed turns"),
    ),
    run=run_tiers,
    predict=no_times,
    limits=lambda *, model, **_: {"longest": (shape_of(model).context_length - NEW_TOKENS - 1) // BLOCK * BLOCK},
    record={"cuda": ()},
)
