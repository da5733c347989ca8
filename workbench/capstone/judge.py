"""Judging a submission: gates, then counts, then pairs. One record comes of it, whatever happened.

    1  read it, start its engine and the baseline's                        start, conduct, budget
    2  a fresh trace, counted on the course's clock by both                answers, budget
    3  texts drawn at a temperature; (open) held-out nats; an OpenAI client  drawn, nats, api
    4  pairs: fresh traces, both engines in turns, the judge's own clock   answers, bound
    5  levels from the counts, a ratio from the pairs, the prediction's score

Where a gate fails, the steps after it are left out, and the points are 0. Where own.py fails to advise in the middle of
a run, what was served before counts by its share of the requests. Seeds are drawn after the submission was read.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from workbench.capstone import gates
from workbench.capstone.api_gate import api
from workbench.capstone.board import VERSION
from workbench.capstone.course_clock import COURSE_RATES
from workbench.capstone.gates import GateResult
from workbench.capstone.own_parts import OwnPartFailed, OwnParts
from workbench.capstone.score import (
    MIN_PAIRS,
    POINTS,
    PREDICTION_POINTS,
    counted,
    good,
    points,
    prediction_score,
    ratios_of,
)
from workbench.capstone.served import Engine, Refused, Run
from workbench.capstone.submission import Submission, baseline, read_submission
from workbench.capstone.traces import Asked, draw_trace, stretched
from workbench.capstone.tracks import Track, track_named
from workbench.capstone.worker import own_model
from workbench.errors import WorkbenchError, check_whole, in_one_line
from workbench.instruments import device as devices
from workbench.models import load
from workbench.models.fast import Model

Report = Callable[[str], None]


class _Failed(Exception):
    """A gate was not passed; it is among the results already."""


class Judging:
    """One submission on its way through the gates. `record` is what is known of it at any time."""

    def __init__(self, track: Track, submission: Submission, name: str, seed: str, pairs: int, report: Report) -> None:
        self.track, self.submission, self.name, self.seed, self.num_pairs = track, submission, name, seed, pairs
        self.results: list[GateResult] = []
        self.report = report
        self.scored: dict[str, Any] = {}
        self.seed_drawn = False
        self.reference: Model = load(track.model)

    def gate(self, result: GateResult) -> None:
        """Note it, and stop where it was not passed."""
        self.results.append(result)
        self.report(f"{'passed' if result.passed else 'FAILED':7} {result.gate:8} {result.words}")
        if not result.passed:
            raise _Failed

    def run(self) -> None:
        """All of it. Engines are closed whatever happens."""
        engines: list[Engine] = []
        try:
            self.report(f"the engine of {self.name}, and the baseline's")
            self._try_own()
            engines.append(Engine(self.submission, self.track.pool_bytes))
            self.gate(GateResult("start", True, f"{engines[0].facts['blocks']} blocks"))
            self.gate(GateResult("conduct", True, self._conduct_words(engines[0])))
            self.gate(gates.budget(self.track, engines[0].facts))
            if engines[0].facts["vocab_size"] != self.reference.config.vocab_size:
                self.gate(gates.other_vocabulary(engines[0].facts["vocab_size"], self.reference))
            engines.append(Engine(baseline(self.track), self.track.pool_bytes))
            self._judge(*engines)
        except Refused as error:
            self.results.append(gates.refused(error))
            self.report(f"FAILED  {error.gate:8} {self.results[-1].words}")
        except _Failed:
            pass  # it is in the results, with its words
        finally:
            for engine in engines:
                engine.close()

    def _try_own(self) -> None:
        """own.py alone, before anything is loaded: whether it keeps its rules and starts."""
        if self.submission.wants_own:
            try:
                OwnParts(self.submission.own_source).close()
            except OwnPartFailed as failed:
                raise Refused(failed.gate, str(failed)) from failed

    def _conduct_words(self, engine: Engine) -> str:
        held = engine.facts["own"]
        if held is None:
            return "no own.py"
        missing = [name for name, there in held.items() if not there]
        return "own.py keeps its rules" + (f"; this system gives no limits of: {', '.join(missing)}" if missing else "")

    def _judge(self, ours: Engine, theirs: Engine) -> None:
        trace = draw_trace(self.track.shape, f"{self.seed}/count")
        run, base = ours.count(trace, COURSE_RATES), theirs.count(trace, COURSE_RATES)
        self.gate(gates.budget(self.track, ours.facts, run))
        share = len(run.texts) / len(trace)
        if run.failed is not None:
            words = f"{run.failed[1]}; {len(run.texts)} of {len(trace)} requests were served before, and count"
            self.results.append(GateResult("advice", False, words))
            self.report(f"FAILED  advice   {words}")
        judged_by = own_model(self.submission) if self.track.max_nats else self.reference
        self.gate(gates.answers(self.track, judged_by, trace, run))
        if self.track.max_nats:
            self.gate(gates.nats(self.track, judged_by, self.reference, f"{self.seed}/nats"))
        amounts = counted(self.track, trace, run, base)
        self.scored["counts"] = [asdict(one) for one in amounts]
        self.scored["share_served"] = share
        if run.failed is None:
            self._behave(ours, trace, judged_by)
            self._time(ours, theirs, trace, run, base, judged_by)
        self.scored["points"] = points(amounts, share)

    def _behave(self, ours: Engine, trace: tuple[Asked, ...], judged_by: Model) -> None:
        """Sampled texts, and clients."""
        prompts = [one.prompt_ids[:48] for one in trace[:2]]
        drawn = gates.drawn_trace(prompts, secrets.randbelow(2**31))
        self.gate(gates.drawn(judged_by, drawn, ours.count(drawn, COURSE_RATES)))
        port = ours.serve()
        try:
            self.gate(api(port, self.submission.model, drafts_learn=self.submission.draft == "own"))
        finally:
            ours.stop_serving()

    def _time(
        self, ours: Engine, theirs: Engine, trace: tuple[Asked, ...], run: Run, base: Run, judged_by: Model
    ) -> None:
        """Pairs of timed runs, each pair on a trace of its own, first one engine first and then the other."""
        slowdown = sum(seconds for _, seconds in base.steps) / sum(COURSE_RATES(counts) for counts, _ in base.steps)
        rates: tuple[list[float], list[float]] = ([], [])
        timed: list[gates.Timed] = []
        for pair in range(self.num_pairs):
            asked = stretched(draw_trace(self.track.shape, f"{self.seed}/pair{pair}"), slowdown)
            done: dict[int, Run] = {}
            for which in (0, 1) if pair % 2 == 0 else (1, 0):
                done[which] = (ours, theirs)[which].time(asked)
            if done[0].failed is not None:
                raise Refused("advice", f"in a timed run: {done[0].failed[1]}")
            answer = gates.answers(self.track, judged_by, asked, done[0])
            if not answer.passed:
                self.gate(replace(answer, words=f"in timed run {pair}: {answer.words}"))
            for which in (0, 1):
                rates[which].append(self.rate(done[which], asked, slowdown))
            timed.append((asked, done[0]))
            self.report(f"pair {pair + 1}: {rates[0][-1]:.0f} against {rates[1][-1]:.0f} tokens/s")
        if not timed:
            return
        peak = max(devices.ceilings("cpu").flop_per_s.values())
        self.gate(gates.bound(trace, run, timed, judged_by, peak))
        ratios = ratios_of(*rates)
        self.scored["timed"] = {
            "tokens_per_s": rates[0],
            "baseline_tokens_per_s": rates[1],
            "slowdown": slowdown,
            **asdict(ratios),
        }
        measured = sorted(rates[0])[len(rates[0]) // 2]
        predicted = self.submission.predicted_tokens_per_s
        self.scored["prediction"] = {
            "predicted": predicted,
            "measured": measured,
            "score": prediction_score(predicted, measured),
        }

    def rate(self, run: Run, asked: tuple[Asked, ...], slowdown: float) -> float:
        """Goodput: tokens of requests within the objectives, per second of the judge's clock."""
        names = good(run, asked, self.track.objectives, slowdown)
        return sum(len(run.texts[name]) for name in names) / run.ended_s if run.ended_s else 0.0

    @property
    def record(self) -> dict[str, Any]:
        failed = [one.gate for one in self.results if not one.passed and one.gate != "advice"]
        scored = 0.0 if failed else float(self.scored.get("points", 0.0))
        prediction = 0.0 if failed else float(self.scored.get("prediction", {}).get("score", 0.0))
        return {
            "version": VERSION,
            "name": self.name,
            "track": self.track.name,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "digest": self.submission.digest,
            "seed": self.seed,
            "seed_drawn": self.seed_drawn,
            "device": devices.fingerprint("cpu"),
            "versions": devices.versions(),
            "gates": [asdict(one) for one in self.results],
            **{name: self.scored.get(name) for name in ("counts", "share_served", "timed", "prediction")},
            "points": scored,
            "total": POINTS / 100 * scored + PREDICTION_POINTS * prediction,
        }


def judge(
    folder: Path,
    *,
    name: str | None = None,
    seed: int | None = None,
    pairs: int = MIN_PAIRS,
    track: Track | None = None,
    report: Report = lambda words: None,
) -> dict[str, Any]:
    """The record of a submission. Never raises for what is wrong with it: that is in the record. Its switches are not:
    a board is for all to see, and they are the solution; `digest` says which folder it was.

    name: of who hands in, default the folder's. seed: of the traces; None draws one, which nobody could
    know: only then has the record a rank. pairs: of
    timed runs, 0 for counts alone. track: in place of the submission's own, for tests. Raises WorkbenchError for a
    folder that is not there.
    """
    check_whole("pairs", pairs, 0)
    folder = Path(folder)
    if not folder.is_dir():
        raise WorkbenchError(f"there is no folder {folder}; a submission is a folder with submission.json")
    name = in_one_line(folder.resolve().name if name is None else name)
    if 0 < pairs < MIN_PAIRS:
        report(f"{pairs} pairs are fewer than the {MIN_PAIRS} that a record for the board needs")
    try:
        submission = read_submission(folder)
    except WorkbenchError as error:
        report(f"FAILED  start    {in_one_line(str(error))}")
        return _not_read(name, str(error))
    seed_text = str(secrets.randbits(64) if seed is None else seed)
    judging = Judging(track or track_named(submission.track), submission, name, seed_text, pairs, report)
    judging.seed_drawn = seed is None
    judging.run()
    return judging.record


def _not_read(name: str, words: str) -> dict[str, Any]:
    return {
        "version": VERSION,
        "name": name,
        "track": None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "digest": "",
        "seed": "",
        "seed_drawn": False,
        "device": devices.fingerprint("cpu"),
        "versions": devices.versions(),
        "gates": [asdict(GateResult("start", False, words))],
        "counts": None,
        "share_served": None,
        "timed": None,
        "prediction": None,
        "points": 0.0,
        "total": 0.0,
    }


__all__ = ["Judging", "judge", "stretched"]
