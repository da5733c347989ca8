"""A soak of the engine: random requests, half of them wrong, on an engine with random settings.

    good request    its tokens are those that it gets alone; aborted, it has the first of them; log-probabilities that
                    it asks for are those of one plain forward
    wrong request   refused with a WorkbenchError, and nothing has changed
    late failure    sampling settings that raise after some tokens, or a token that makes NaN, end their own request
    draft           drafts without an error to the end; a wrong one changes no text, and its error is seen
    at the end      no block is held, no text is in a cache, and every request has its results once

Tiny random models in float64, so that the order of a sum decides no token. A run follows from its seed alone, but for
free threads: in some runs other threads add and abort beside the steps of `Engine.run`, and the seed says what they do
and not when. `workbench soak engine` goes on as long as one likes; the tests run a few.
"""

from __future__ import annotations

import dataclasses
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch

from workbench.decoding.sampling import SamplingSettings
from workbench.decoding.sequence import Finished, Request
from workbench.errors import WorkbenchError, check_above, check_whole
from workbench.generation import generate
from workbench.kv import State, make_kv
from workbench.models.batch import Batch
from workbench.serving.engine import Engine
from workbench.serving.policies import POLICIES
from workbench.serving.results import StepReport
from workbench.serving.scheduler import Scheduler
from workbench.serving.settings import PREEMPTION, SchedulerSettings, TierSettings
from workbench.serving.soak_kinds import (
    CONTEXT,
    DRAFTS,
    SPOILED,
    STATES,
    VOCABULARY,
    WRONG_WAYS,
    Models,
    WrongDraft,
    texts_of,
)
from workbench.serving.soak_malformed import NoRequest, Wrong, wrong_request
from workbench.speculation.drafts import Draft

MAX_STEPS = 3000  # of a run; one that needs more does not get on
FORMATS = (None, None, None, None, "int8", "fp8", "int4")
NAMED = ("prefix", "format", "asynchronous", "attention", "graphs")  # settings that are counted by their values
Key = tuple[Hashable, int]  # request, sample


class Raises(SamplingSettings):
    """Settings that raise when they are asked for the `last`-th time."""

    def prepared(self, last: int) -> Raises:
        object.__setattr__(self, "calls", count())
        object.__setattr__(self, "last", last)
        return self

    def active(self) -> list[str]:
        calls: Any = getattr(self, "calls", None)
        if calls is not None and next(calls) >= vars(self)["last"]:
            raise RuntimeError("settings that raise")
        return super().active()


class Failed(Exception):
    """What should not have happened."""


class Run:
    """One random history of an engine."""

    def __init__(self, seed: int, models: Models) -> None:
        self.seed, self.random, self.models = seed, random.Random(seed), models
        self.counts: Counter[str] = Counter()
        self._draft: Draft | None = None
        self._kind = self.random.choice(("plain",) * 4 + ("window", "latent", "spoiled", "state", "hybrid"))
        self._names = count()
        self._asked: dict[Hashable, Request] = {}
        self._late: set[Hashable] = set()  # their settings raise
        self._aborted: set[Hashable] = set()
        self._results: dict[Key, Finished] = {}
        self._alone: dict[Request, tuple[int, ...]] = {}
        self._errors: list[BaseException] = []  # of threads
        self._noting = threading.Lock()
        self._beginnings = [self._tokens(1, 14) for _ in range(3)]
        self._running = self.random.randint(1, 6)
        # in the other runs nothing of it, since a step with any of it is not sent ahead
        self._asks = self.random.random() < 0.4  # for grammars and log-probabilities
        self._coming = [self._good() for _ in range(self.random.randint(2, 8))]
        self.settings, self.engine = self._made()

    def __str__(self) -> str:
        draft = self._draft and (self._drafted_by, self._draft.name)
        return f"{self._kind}, {type(self._model).__name__}, {self.settings}, {self._made_with}, draft {draft}"

    # -- what is drawn -----------------------------------------------------------------------------------------------

    def _tokens(self, least: int, most: int) -> list[int]:
        return [self.random.randrange(SPOILED) for _ in range(self.random.randint(least, most))]

    def _drawn_draft(self) -> Draft:
        """Every third one answers wrong after some rounds."""
        self._drafted_by = self.random.choice([*DRAFTS, *["the target itself"] * 6])  # whose tokens are accepted
        draft = DRAFTS[self._drafted_by](self.models, self.models.targets[self._kind])
        if self.random.random() < 0.33:
            return WrongDraft(draft, self.random.choice(WRONG_WAYS), self.random.randint(0, 6))
        return draft

    def _made(self) -> tuple[SchedulerSettings, Engine]:
        """An engine in which the longest request fits, and often little more."""
        chance, pick = self.random.random, self.random.choice
        static = chance() < 0.12
        draft = self._draft = self._drawn_draft() if not static and chance() < 0.45 else None
        running = self._running
        chunk = None if static else pick((None, None, 1, 3, 8))
        preemption = PREEMPTION[0] if static else pick(PREEMPTION)
        settings = SchedulerSettings(
            max_running=running,
            token_budget=running + pick((0, 1, 5, 30, 500)),
            chunk=chunk,
            policy=pick(list(POLICIES)),
            aging_s=pick((None, None, 0.05, 3.0)),
            preemption=preemption,
            watermark=pick((0, 0.01, 0.3)),
            batching="static" if static else "continuous",
            draft_tokens=0 if draft is None else self.random.randint(1, 6),
            remember=chance() < 0.9,
        )
        block_size = pick((1, 2, 3, 4, 8, 16))
        least = max(-(-request.longest // block_size) for request in self._coming)
        ticks = count()
        self._made_with: dict[str, Any] = {
            "num_blocks": least * (running if static else 1) + pick((0, 1, 3, least)),
            "block_size": block_size,
            "prefix": None if self._kind == "spoiled" else pick((None, "hash", "hash", "radix")),
            "format": None if self._kind in ("latent", "state") else pick(FORMATS),
            "draft_length": pick((1, 3, 4, 8, "threshold", "dynamic")),
            "asynchronous": chance() < 0.35,
            "attention": pick(("auto", "sdpa", "eager")),
            "graphs": pick((None, None, False, True)),
        }
        with_states = self._kind in STATES
        if self._made_with["attention"] == "eager" or with_states or (draft is not None and draft.wants_hidden_states):
            self._made_with["graphs"] = None
        if not static and chance() < 0.1:
            self._made_with["scheduler"] = Scheduler  # by the contract, each step checked
        self.counts["by the contract"] += "scheduler" in self._made_with
        with_clock = self._made_with | {"clock": lambda: 0.01 * next(ticks)}
        if draft is None:
            del with_clock["draft_length"]
        if not settings.remember:
            del with_clock["prefix"]
        models = self.models.prepared if chance() < 0.3 and not with_states else self.models.targets
        self._model = models[self._kind]
        self.counts.update({f"model {self._kind}": 1, f"policy {settings.policy}": 1, "static": static})
        self.counts["prepared"] += models is self.models.prepared
        self.counts.update({f"{name} {value}": 1 for name, value in self._made_with.items() if name in NAMED})
        with_clock["tiers"] = self._made_with["tiers"] = self._drawn_tiers(settings)
        return settings, Engine(self._model, settings, draft=draft, **with_clock)

    def _drawn_tiers(self, settings: SchedulerSettings) -> TierSettings | None:
        """Host memory for some blocks, in most engines that can have it."""
        drawn, made = random.Random(f"tiers {self.seed}"), self._made_with
        can = settings.remember and settings.batching != "static" and made["prefix"] is not None
        if not can or "scheduler" in made or self._kind in STATES or drawn.random() < 0.2:
            return None
        block_bytes = 8 * made["block_size"] * self._model.config.expanded_kv_values_per_token() + 1024
        return TierSettings(host_bytes=drawn.randint(1, 40) * block_bytes, load="always")

    def _sampling(self) -> SamplingSettings | None:
        pick = self.random.choice
        kind = pick(("none", "greedy", "near zero", "warm", "warm", "filtered", "late"))
        if kind == "none":
            return None
        penalties: dict[str, Any] = {
            "logit_bias": pick(((), (), {0: -100}, {token: pick((-100, -2.5, 4)) for token in self._tokens(1, 5)})),
            "repetition_penalty": pick((1.0, 1.0, 1.3, 0.8)),
            "presence_penalty": pick((0.0, 0.0, 0.5)),
            "frequency_penalty": pick((0.0, 0.0, -0.2)),
        }
        if kind == "greedy":
            return SamplingSettings(**penalties)
        if kind == "near zero":
            warmth = pick((5e-324, 1e-300, 1e-45, 1e-38, 1e-20))
            return SamplingSettings(warmth, pick((None, 5)), pick((1.0, 0.5)), logit_bias=pick(((), {3: 5.0, 7: -1})))
        if kind == "late":
            return Raises(1.0).prepared(self.random.randint(1, 8))
        filters: dict[str, Any] = (
            {} if kind == "warm" else {"top_k": pick((None, 1, 5)), "top_p": pick((1.0, 0.8)), "min_p": 0.02}
        )
        return SamplingSettings(pick((0.3, 1.0, 3.0)), **filters, **penalties)

    def _good(self) -> Request:
        prompt = self.random.choice(self._beginnings)[: self.random.randint(1, 14)] + self._tokens(0, 10)
        if self._kind == "spoiled" and self.random.random() < 0.3:
            prompt[self.random.randrange(len(prompt))] = SPOILED
        sampling = self._sampling()
        n = self.random.randint(1, min(4, self._running)) if self.random.random() < 0.3 else 1
        name = self.random.choice((str, int, lambda name: (name, "text")))(next(self._names))
        if isinstance(sampling, Raises):
            n = 1  # its calls are counted
        asks, pick = self._asks, self.random.choice
        guide = pick(self.models.guides) if asks and self.random.random() < 0.4 else None
        return Request(
            name,
            tuple(prompt),
            self.random.randint(1, min(16, CONTEXT - len(prompt))),
            sampling,
            seed=self.random.choice((0, None, self.random.randrange(2**63 - 8))),
            stop_token_ids=self.random.choice((None, (), tuple(self._tokens(1, 3)), tuple(self._tokens(4, 8)))),
            n=n,
            priority=self.random.choice((0, 0, -3, 2, 0.5)),
            deadline_s=self.random.choice((None, 0.5, 9.0)),
            tenant=self.random.choice(("", "", "a", b"a")),
            arrival_s=self.random.choice((0.0, 0.0, -1, 0.05, 0.2)),
            log_probs=pick((None, 0, 3, 20)) if asks else None,
            prompt_log_probs=pick((None, None, 0, 2)) if asks else None,
            guide=guide,
            jump=None if guide is None else pick((None, "tokens", "text", "never")),
        )

    # -- what is done ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises Failed, or whatever the engine raised, where something was wrong."""
        requests = self._coming
        if self.random.random() < 0.25:
            self._beside(requests)
        else:
            self._step_by_step(requests)
        self._check_empty()
        self._check_results()
        self.counts["runs"] += 1

    def _step_by_step(self, coming: list[Request]) -> None:
        for _ in range(MAX_STEPS):
            chance = self.random.random()
            if coming and chance < 0.6:
                self._add(coming.pop(0))
            if chance > 0.7 and (coming or chance > 0.9):
                self._refused(self._wrong(list(self._asked)))
            if 0.5 < chance < 0.54:
                self._abort(self._any_name())
            if not coming and self.engine.idle:
                return
            self._seen(self.engine.step())
        raise Failed(f"not idle after {MAX_STEPS} steps")

    def _beside(self, requests: list[Request]) -> None:
        """`Engine.run`, while other threads add and abort: between its steps, or, free, whenever they come to it."""
        half, steps, free = len(requests) // 2, count(), self.random.random() < 0.6
        known = [request.id for request in requests[:half]]  # `run` takes their names before its first step
        threads: list[threading.Thread] = []
        later = requests[half:]
        abort_at = self.random.choice((None, self.random.randrange(12)))

        def start(work: Callable[[], None]) -> None:
            def guarded() -> None:
                try:
                    work()
                except BaseException as error:  # reported by the run
                    self._errors.append(error)

            threads.append(threading.Thread(target=guarded, daemon=True))
            threads[-1].start()
            if not free:
                threads[-1].join()

        def watch(report: StepReport) -> None:
            self._seen(report, results=False)
            at = next(steps)
            if later:
                start(partial(self._add, later.pop()))
            if at == abort_at:
                start(partial(self._abort, self._any_name()))
            if at % 5 == 1:
                start(partial(self._refused, self._wrong(known)))
            if at > MAX_STEPS:
                raise Failed(f"not idle after {MAX_STEPS} steps")

        self._asked |= {request.id: request for request in requests[:half]}
        with self._noting:
            self.counts["good"] += half
        self._note(self.engine.run(requests[:half], watch=watch))
        while later or any(thread.is_alive() for thread in threads) or not self.engine.idle:
            if later:
                self._add(later.pop())
            for thread in threads:
                thread.join(30)
            self._note(self.engine.run(watch=watch))
        self.counts["threads"] += len(threads)
        self.counts["free threads"] += len(threads) * free
        if self._errors:
            raise self._errors[0]

    def _add(self, request: Request) -> None:
        self._asked[request.id] = request
        if isinstance(request.sampling, Raises):
            self._late.add(request.id)
        self.engine.add(request)
        with self._noting:
            self.counts["good"] += 1

    def _wrong(self, known: list[Hashable]) -> Wrong | NoRequest:
        good = self._good()
        given = {name: getattr(good, name) for name in _names(Request)}
        names = [name for name in known if self.random.random() < 0.5]
        return wrong_request(self.random, given, names, VOCABULARY, CONTEXT, self._running)

    def _refused(self, wrong: Wrong | NoRequest) -> None:
        quiet = threading.current_thread() is threading.main_thread()
        before = self._state() if quiet else None
        try:
            wrong(self.engine)
        except WorkbenchError:
            with self._noting:
                self.counts["bad"] += 1
        else:
            raise Failed(f"not refused: {wrong}")
        if before != (self._state() if quiet else None):
            raise Failed(f"refused, and yet something changed: {wrong}")

    def _state(self) -> tuple[Any, ...]:
        scheduler, tables = self.engine.scheduler, self.engine.kv.tables
        alive = [(s.id, len(s.token_ids), s.status) for s in scheduler.alive()]
        return alive, len(scheduler.waiting), len(scheduler.running), tables.num_free, tables.num_available

    def _any_name(self) -> Hashable:
        """Of one that may wait, run, be swapped out, be done already, or was never there."""
        return self.random.choice([*self._asked, "nobody"])

    def _abort(self, name: Hashable) -> None:
        quiet = threading.current_thread() is threading.main_thread()
        known = {sequence.request.id for sequence in self.engine.scheduler.alive()} if quiet else set()
        self._aborted.add(name)
        try:
            ended = self.engine.abort(name)
        except WorkbenchError:
            if name in known:
                raise
            return
        with self._noting:
            self.counts["aborts"] += 1
        self._note(ended)

    def _seen(self, report: StepReport, *, results: bool = True) -> None:
        self.counts.update(
            steps=1,
            drafted=report.drafted,
            **{f"drafted by {self._drafted_by}": report.drafted} if self._draft is not None else {},
            accepted=report.accepted,
            preemptions=len(report.plan.preempted),
            swaps=len(report.plan.swapped_out),
            forks=len(report.plan.forked),
            jumps=sum(new.kind == "jump" for emitted in report.emitted.values() for new in emitted),
        )
        if results:
            self._note(report.finished)

    def _note(self, results: Any) -> None:
        with self._noting:
            for one in results:
                key = (one.request_id, one.sample)
                if key in self._results:
                    raise Failed(f"{key} ended twice")
                self._results[key] = one

    # -- what must be so ---------------------------------------------------------------------------------------------

    def _check_empty(self) -> None:
        engine, tables = self.engine, self.engine.kv.tables
        tables.check()
        if isinstance(engine.kv, State):
            engine.kv.cells.check(engine.kv.lengths)
        if engine.offloading is not None:
            engine.offloading.tiers.below.check()
            self.counts["tokens from tiers"] += engine.offloading.hit_tokens
        left = {
            "sequences of the scheduler": engine.scheduler.alive(),
            "tables": tables.tables,
            "swapped out": tables.swapped,
            "lengths of the kv": engine.kv.lengths,
            "bytes in use": engine.kv.bytes_in_use,
            "blocks that are not available": tables.num_blocks - tables.num_available,
            "texts of drafts": [] if isinstance(self._draft, WrongDraft) else texts_of(self._draft),
        }
        if self._draft is not None:
            was_wrong = isinstance(self._draft, WrongDraft) and self._draft.was_wrong
            self.counts["wrong drafts"] += was_wrong
            if bool(engine.why_no_drafts) != was_wrong or (was_wrong and not engine.draft_errors):
                raise Failed(f"drafts are off: {engine.why_no_drafts!r}, and the draft was wrong: {was_wrong}")
        for what, value in left.items():
            if value:
                raise Failed(f"left at the end, {what}: {value!r:.200}")

    def _check_results(self) -> None:
        expected = {(request.id, sample) for request in self._asked.values() for sample in range(request.n)}
        if set(self._results) - expected or any(key[0] not in self._aborted for key in expected - set(self._results)):
            raise Failed(f"results of {sorted(self._results, key=str)}, expected {sorted(expected, key=str)}")
        for key, one in self._results.items():
            self._check_result(self._asked[key[0]], one)

    def _check_result(self, request: Request, one: Finished) -> None:
        where = f"{request} sample {one.sample}"
        late = isinstance(request.sampling, Raises) or (
            self._kind == "spoiled" and SPOILED in request.prompt_ids + one.token_ids
        )
        if (one.error is not None) != (one.finish_reason == "error") or (one.finish_reason == "error" and not late):
            raise Failed(f"{where}: ended with {one.finish_reason}, {one.error!r}")
        self.counts["late failures"] += one.finish_reason == "error"
        if one.hit_tokens > self._longest_hit(request, one):
            raise Failed(f"{where}: {one.hit_tokens} tokens come from the prefix cache, of no text of its tenant")
        self._check_log_probs(request, one)
        if not _certain(request.sampling) and (self.settings.draft_tokens or request.seed is None):
            self.counts["not compared"] += 1  # a draft draws from the same random numbers
            return
        alone = self._tokens_alone(request, one.sample)
        if one.finish_reason in ("abort", "error"):
            alone = alone[: len(one.token_ids)]
        if one.token_ids != alone:
            raise Failed(f"{where}: {one.finish_reason}, {one.token_ids}, and alone {alone}")
        self.counts.update({"texts": 1, "tokens": len(alone)})

    def _check_log_probs(self, request: Request, one: Finished) -> None:
        """They are those of one plain forward over prompt and text."""
        asked = [known for known in (one.prompt_log_probs, one.log_probs) if known is not None]
        if len(asked) != 2 - (request.log_probs, request.prompt_log_probs).count(None):
            raise Failed(
                f"{request} sample {one.sample}: log-probabilities are there for {len(asked)} of what was asked"
            )
        if self._made_with["format"] is not None or self._kind == "spoiled" or not asked:
            return
        text, prompt = request.prompt_ids + one.token_ids, len(request.prompt_ids)
        target = self.models.targets[self._kind]
        with torch.inference_mode():
            rows = target(Batch.of([text], logits="all"), make_kv("recompute", target.config)).log_softmax(dim=-1)
        for first, known, top in (
            (0, one.prompt_log_probs, request.prompt_log_probs),
            (prompt, one.log_probs, request.log_probs),
        ):
            for place, said in enumerate(known or (), first):
                if said is None or said.log_prob is None:
                    continue
                right = [rows[place - 1, token].item() for token in (text[place], *(token for token, _ in said.top))]
                best = rows[place - 1].topk(top or 1).values.tolist()[: top or 0]
                given = [said.log_prob, *(value for _, value in said.top)]
                if said.token_id != text[place] or not _close(given, right) or not _close(given[1:], best):
                    raise Failed(
                        f"{request} sample {one.sample}: at {place} {said}, and in a plain forward {right}, {best}"
                    )
                self.counts["log-probabilities"] += 1

    def _longest_hit(self, request: Request, one: Finished) -> int:
        """Tokens that its prompt, or after a preemption its text, has in common with another one of its tenant."""
        if one.preemptions or request.n > 1:
            return CONTEXT
        others = [r for r in self._asked.values() if r.tenant == request.tenant and r is not request]
        texts = [r.prompt_ids + e.token_ids for r in others for e in self._results.values() if e.request_id == r.id]
        return max((_in_common(request.prompt_ids, text) for text in texts), default=0)

    def _tokens_alone(self, request: Request, sample: int) -> tuple[int, ...]:
        seed = None if request.seed is None else request.seed + sample
        sampling = request.sampling or SamplingSettings()
        values: dict[str, Any] = {name: getattr(sampling, name) for name in _names(SamplingSettings)}
        target, format = self.models.targets[self._kind], self._made_with["format"]
        if request.guide is not None:
            values |= {"guide": request.guide, "jump": request.jump}
        if format is None and self._kind != "spoiled":
            oracle = "recompute" if self._kind in STATES else "contiguous"
            how: dict[str, Any] = {"stop_token_ids": request.stop_token_ids, "kv": oracle, "seed": seed}
            return tuple(
                generate(target, request.prompt_ids, max_new_tokens=request.max_new_tokens, **how, **values).tokens
            )
        quiet = SchedulerSettings(max_running=1, remember=False)
        alone = Engine(target, quiet, num_blocks=CONTEXT, block_size=1, format=format)
        sampling = SamplingSettings(**{name: getattr(sampling, name) for name in _names(SamplingSettings)})
        plain = dataclasses.replace(request, sampling=sampling, seed=seed, n=1, arrival_s=0)
        return alone.run([plain])[0].token_ids


def _names(kind: Any) -> list[str]:
    """Of the fields of a dataclass."""
    return [field.name for field in dataclasses.fields(kind)]


def _close(values: list[float], others: list[float]) -> bool:
    return len(values) == len(others) and all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(values, others))


def _in_common(text: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((at for at, (a, b) in enumerate(zip(text, other)) if a != b), min(len(text), len(other)))


def _certain(sampling: SamplingSettings | None) -> bool:
    """Whether no random number decides a token."""
    return sampling is None or sampling.greedy or sampling.top_k == 1 or sampling.temperature < 1e-10


# -- many runs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Soaked:
    """What a soak did, and the seed and message of the run that failed, if one did."""

    counts: Counter[str]
    failed_seed: int | None = None
    message: str = ""


def soak(runs: int, seed: int = 0, seconds: float | None = None, report: Callable[[int], None] | None = None) -> Soaked:
    """Runs with the seeds from `seed` on, until one fails.

    seconds: no run begins later. report: is called with the number of runs after each. Raises WorkbenchError for
    numbers that make no sense.
    """
    check_whole("runs", runs, 1)
    check_whole("seed", seed, 0)
    until = None if seconds is None else time.monotonic() + check_above("seconds", seconds, 0)
    models, counts = Models(), Counter[str]()
    for number in range(runs):
        if until is not None and time.monotonic() > until:
            break
        one: Run | None = None
        try:
            one = Run(seed + number, models)
            one.run()
        except Exception as error:  # whatever the engine raises is what we look for
            return Soaked(counts, seed + number, f"{type(error).__name__}: {error}\n{one}")
        counts.update(one.counts)
        if report is not None:
            report(number + 1)
    return Soaked(counts)
