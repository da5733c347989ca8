"""The process with the engine: it sets the course's engine up as a submission says, serves what the judge sends, and
counts. Nothing of a submission runs here but its numbers; own.py has a process of its own.

A line of JSON in, lines of JSON out (`workbench.processes.report`):

    {"do": "make", "submission": …, "budget": …}      {"made": facts} or {"refused": words, "gate": …}
    {"do": "count", "trace": […], "rates": …}           {"counted": …}: all tokens, times on the course's clock, counts
    {"do": "time"}                                    {"listening": …}
    {"do": "add", "requests": […]}, {"do": "last"}    {"tokens": {id: […]}} after every step, {"timed": …} at the end
    {"do": "serve"}                                   {"port": …}, a server for OpenAI clients until {"do": "stop"}
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import sys
import threading
import time
from typing import Any

from workbench.capstone.advised import AdvisedDraft, AdvisedPolicy, AdvisedScheduler
from workbench.capstone.course_clock import ClockRates, StepCounts
from workbench.capstone.own_parts import OwnPartFailed, OwnParts
from workbench.capstone.submission import Submission
from workbench.capstone.traces import Asked
from workbench.decoding.sequence import Finished
from workbench.errors import WorkbenchError
from workbench.grading import confine
from workbench.models import load
from workbench.models.fast import FastDecoder, Model
from workbench.processes import report
from workbench.quantization.prepared import prepare
from workbench.serving.engine import Engine
from workbench.serving.results import StepReport
from workbench.serving.settings import TierSettings

MEMORY_BYTES = 1536 << 20  # beyond what torch maps: weights, their arranged copies, pool, activations


class Served:
    """One engine with everything around it, for one run: a fresh engine, a fresh own.py, empty caches."""

    def __init__(self, submission: Submission, models: Models, blocks: int, clock: Any) -> None:
        self.own = own = OwnParts(submission.own_source) if submission.wants_own else None
        try:
            self._set_up(submission, models, blocks, clock)
        except BaseException:
            if own is not None:
                own.close()
            raise

    def _set_up(self, submission: Submission, models: Models, blocks: int, clock: Any) -> None:
        own = self.own
        policy = AdvisedPolicy(own) if own is not None and submission.policy == "own" else None
        scheduler: Any = None
        if own is not None and submission.scheduler == "own":
            scheduler = lambda memory, settings: AdvisedScheduler(own, memory, settings)  # noqa: E731
        self.draft = models.draft(submission, own)
        tiers = TierSettings(host_bytes=submission.host_cache_bytes) if submission.host_cache_bytes else None
        self.engine = Engine(
            models.model,
            submission.settings(policy),
            num_blocks=blocks,
            block_size=submission.block_size,
            prefix=None if submission.prefix == "none" else submission.prefix,
            format=submission.kv,
            draft=self.draft,
            draft_length=submission.draft_length,
            attention=submission.attention,
            asynchronous=submission.asynchronous,
            scheduler=scheduler,
            tiers=tiers,
            clock=clock,
        )
        if policy is not None:
            policy.sequences = self.engine.scheduler.alive
        self.models, self.failure = models, None
        self._draft_before, self._own_before = (0, 0), 0

    @property
    def pool_bytes(self) -> int:
        """Keys and values, the draft's own among them, and tiers below the pool."""
        tiers = 0 if self.engine.offloading is None else self.engine.offloading.settings.host_bytes
        return self.engine.kv.bytes_reserved + tiers + draft_kv_bytes(self.draft)

    def step(self) -> StepReport:
        """A step of the engine. Raises OwnPartFailed as soon as own.py has failed, whatever the engine made of it, and
        for a plan of its own that breaks the engine's contract."""
        try:
            done = self.engine.step()
        except WorkbenchError as error:
            if self.own is None or isinstance(error, OwnPartFailed):
                raise
            raise self.own.failure or OwnPartFailed("advice", str(error)) from error
        if self.own is not None and self.own.failure is not None:
            raise self.own.failure
        return done

    def counts_of(self, done: StepReport) -> StepCounts:
        """What this step did."""
        calls, rows = (self.draft.model_calls, self.draft.rows_processed) if self.draft is not None else (0, 0)
        draft_calls, draft_rows = calls - self._draft_before[0], rows - self._draft_before[1]
        own_calls = 0 if self.own is None else self.own.calls - self._own_before
        self._draft_before, self._own_before = (calls, rows), own_calls + self._own_before
        models, kv = self.models, self.engine.kv
        draft_bytes, draft_flops = models.draft_costs(self.draft)
        passes = int(done.rows > 0)
        return StepCounts(
            passes=passes,
            rows=done.rows,
            sequences=len(done.plan.work),
            weight_bytes=passes * models.weight_bytes,
            kv_bytes=sum(work.start + work.count for work in done.plan.work) * kv.bytes_per_token
            + len(done.plan.work) * getattr(kv, "bytes_per_state", 0),
            flops=done.rows * models.flops_per_row,
            draft_passes=draft_calls,
            draft_rows=draft_rows,
            draft_weight_bytes=draft_calls * draft_bytes,
            draft_flops=draft_rows * draft_flops,
            own_calls=own_calls,
        )

    def close(self) -> None:
        self.engine.close()
        if self.own is not None:
            self.own.close()


class Models:
    """The loaded model and the draft's, shared by the runs of a process; neither keeps anything of a run."""

    def __init__(self, submission: Submission) -> None:
        loaded = load(submission.weights_folder or submission.model)
        self._loaded = loaded
        as_loaded = bool(loaded.config.state_layers) and submission.weights is None
        self.model: Model = loaded if as_loaded else prepare(loaded, weights=submission.weights)
        self.weight_bytes, self.flops_per_row = costs_of(self.model)
        self._draft_model = self._load_draft(submission)

    def _load_draft(self, submission: Submission) -> Model | None:
        from workbench.models.checkpoints import zoo_names
        from workbench.speculation.drafts.quantized_self import quantized_self

        if submission.draft == "self-int4":
            return quantized_self(self._loaded).model
        return prepare(load(submission.draft)) if submission.draft in zoo_names() else None

    def draft(self, submission: Submission, own: OwnParts | None) -> Any:
        """A fresh draft, or None."""
        from workbench.speculation.drafts import draft_for
        from workbench.speculation.drafts.model import ModelDraft

        if submission.draft == "own":
            assert own is not None
            return AdvisedDraft(own, self.model)
        if self._draft_model is not None:
            return ModelDraft(self._draft_model, name=submission.draft)
        return None if submission.draft is None else draft_for(submission.draft, self.model)

    def draft_costs(self, draft: Any) -> tuple[int, int]:
        """Weight bytes of a pass and FLOPs of a row of the draft's own model; zeros where it has none."""
        return (0, 0) if self._draft_model is None else costs_of(self._draft_model)


def own_model(submission: Submission) -> Model:
    """A submission's own model, without drafts or caches: what its answers are judged by in the open track."""
    return Models(dataclasses.replace(submission, draft=None, draft_length=None)).model


def costs_of(model: Model) -> tuple[int, int]:
    """(weight bytes of a pass, FLOPs of a row: twice the parameters)."""
    parameters = model.num_parameters()
    if isinstance(model, FastDecoder):
        return model.weight_bytes, 2 * parameters
    return sum(tensor.nbytes for tensor in model.parameters()), 2 * parameters


def by_request(done: StepReport) -> dict[str, list[int]]:
    """New tokens of a step. Every request has one text."""
    return {str(name[0]): list(new) for name, new in done.tokens.items() if isinstance(name, tuple)}


EVICTED_TOKENS = 16  # blocks of any size are counted in these


def given_up(submission: Submission, evictions: int, finished: list[Finished]) -> int:
    """Blocks of EVICTED_TOKENS that were computed and not kept: evicted ones, and those that the prefix cache never
    took, because there is none, or because a block of its size was not full. So no setting makes evictions vanish by
    keeping nothing."""
    evicted = -(-evictions * submission.block_size // EVICTED_TOKENS)
    never = 0
    for one in finished:
        computed = one.prompt_tokens + max(0, len(one.token_ids) - 1)
        never += (computed if submission.prefix == "none" else computed % submission.block_size) // EVICTED_TOKENS
    return evicted + never


def draft_kv_bytes(draft: Any) -> int:
    """Of the cache that a draft's model has for itself."""
    kv = getattr(draft, "_kv", None)
    return 0 if kv is None else int(kv.bytes_reserved)


def blocks_in(submission: Submission, models: Models, budget: int) -> int:
    """The pool's blocks: the submission's own number, or as many as the budget has room for beside tiers, states and
    the draft's cache, at most what max_running whole contexts need. Raises OwnPartFailed for more than the budget,
    before any of it is reserved."""
    from workbench.kv.paged import Paged

    config, size = models.model.config, submission.block_size
    block = Paged.reserved_bytes_for(
        config, max_sequences=1, max_tokens=size, dtype=models.model.dtype, block_size=size, format=submission.kv
    )
    draft = models.draft(submission, None) if submission.draft != "own" else None
    if draft is not None:
        try:
            draft.make_room(submission.max_running)
        except WorkbenchError as error:
            raise OwnPartFailed("budget", f"the draft's cache: {error}") from error
    beside = submission.host_cache_bytes + draft_kv_bytes(draft) + _state_bytes(submission, models, block)
    whole = submission.max_running * -(-config.context_length // size)
    room = max(0, budget - beside) // block if block else whole
    blocks = min(whole, room) if submission.blocks is None else submission.blocks
    if beside > budget or not blocks >= 1 or (block and blocks > room):
        needed = (
            f"{max(1, blocks):,} blocks of {block:,} bytes and {beside:,} bytes of tiers, states and the draft's cache"
        )
        raise OwnPartFailed("budget", f"{needed} are more than the {budget:,} bytes allowed for keys and values")
    return blocks


def _state_bytes(submission: Submission, models: Models, block: int) -> int:
    """Of a model's states beside keys and values: what the engine reserves for a pool of one context, less its
    blocks."""
    config = models.model.config
    if not config.state_layers:
        return 0
    blocks = -(-config.context_length // submission.block_size)
    alone = dataclasses.replace(
        submission, blocks=blocks, draft=None, draft_length=None, policy="first_come", scheduler="course"
    )
    served = Served(alone, models, blocks, time.perf_counter)
    try:
        return served.engine.kv.bytes_reserved - blocks * block
    finally:
        served.close()


class Worker:
    """What the judge's lines are done with."""

    def __init__(self) -> None:
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._lines.put(json.loads(line))
        os._exit(0)  # the judge is gone

    def serve(self) -> None:
        while True:
            message = self._lines.get()
            try:
                getattr(self, f"do_{message.pop('do')}")(**message)
            except OwnPartFailed as failed:
                report(refused=str(failed), gate=failed.gate)
            except WorkbenchError as error:
                report(refused=str(error), gate="start")
            except MemoryError as error:
                report(refused=f"out of memory: {error}"[:400], gate="budget")
            except RuntimeError as error:  # torch's own word for no memory
                gate = "budget" if "alloc" in str(error).lower() or "memory" in str(error).lower() else "start"
                report(refused=f"{type(error).__name__}: {error}"[:400], gate=gate)

    def do_make(self, submission: dict[str, Any], budget: int, memory_bytes: int = MEMORY_BYTES) -> None:
        import torch

        torch.nn.functional.linear(torch.zeros(64, 64), torch.zeros(64, 64))  # its threads are there
        confine.limit_memory(memory_bytes)
        self.submission = Submission(**submission)
        self.models = Models(self.submission)
        self.blocks = blocks_in(self.submission, self.models, budget)
        served = Served(self.submission, self.models, self.blocks, time.perf_counter)
        config = self.models.model.config
        facts = {
            "blocks": self.blocks,
            "pool_bytes": served.pool_bytes,
            "weight_bytes": self.models.weight_bytes,
            "vocab_size": config.vocab_size,
            "context": config.context_length,
            "own": None if served.own is None else served.own.held,
        }
        served.close()
        report(made=facts)

    def do_count(self, trace: list[dict[str, Any]], rates: dict[str, float]) -> None:
        """Serve a trace on the course's clock: every token is computed, the clock is what the rates make of a step."""
        seconds, now = ClockRates(**rates), [0.0]
        served = Served(self.submission, self.models, self.blocks, lambda: now[0])
        coming = [Asked.of(one) for one in trace]
        finished: list[Finished] = []
        times: dict[str, list[float]] = {}
        steps: list[tuple[StepCounts, float]] = []
        failed: OwnPartFailed | None = None
        pool = served.pool_bytes
        try:
            while coming or not served.engine.idle:
                if served.engine.idle and coming:
                    now[0] = max(now[0], coming[0].arrival_s)
                while coming and coming[0].arrival_s <= now[0]:
                    served.engine.add(coming.pop(0).request())
                began = time.perf_counter()
                done = served.step()
                measured = time.perf_counter() - began
                counts = served.counts_of(done)
                now[0] += seconds(counts)
                for name, new in by_request(done).items():
                    times.setdefault(name, []).extend([now[0]] * len(new))
                finished += done.finished
                steps.append((counts, measured))
                pool = max(pool, served.pool_bytes)
        except OwnPartFailed as error:
            if error.gate != "advice":
                raise
            failed = error
        finally:
            served.close()
        tables = served.engine.kv.tables
        report(
            counted={
                "texts": {
                    str(one.request_id): list(one.token_ids) for one in finished if one.finish_reason == "length"
                },
                "errors": {str(one.request_id): str(one.error) for one in finished if one.error is not None},
                "times_s": times,
                "ended_s": now[0],
                "pool_bytes": pool,
                "evictions": given_up(self.submission, tables.evictions, finished),
                "preemptions": served.engine.scheduler.preemptions,
                "hit_tokens": tables.hit_tokens,
                "drafted": sum(one.drafted for one in finished),
                "accepted": sum(one.accepted for one in finished),
                "draft_error": served.engine.why_no_drafts if served.draft is not None else "",
                "steps": [[dataclasses.astuple(counts), measured] for counts, measured in steps],
                "failed": None if failed is None else {"gate": failed.gate, "words": str(failed)},
            }
        )

    def do_time(self) -> None:
        """Serve what the judge sends, as it sends it; what was generated goes out after every step."""
        served = Served(self.submission, self.models, self.blocks, time.perf_counter)
        last = False
        report(listening=True)
        try:
            while not last or not served.engine.idle:
                while True:
                    try:
                        message = self._lines.get(block=served.engine.idle and not last)
                    except queue.Empty:
                        break
                    if message["do"] == "last":
                        last = True
                        break
                    for one in message["requests"]:
                        served.engine.add(Asked.of(one).request())
                    if not self._lines.qsize():
                        break
                if not served.engine.idle:
                    done = served.step()
                    report(tokens=by_request(done))
            report(timed={"failed": None})
        except OwnPartFailed as failed:
            report(timed={"failed": {"gate": failed.gate, "words": str(failed)}})
        finally:
            served.close()

    def do_add(self, requests: list[dict[str, Any]]) -> None:
        """Of a timed run that has failed: the judge had sent it before it heard of that."""

    def do_last(self) -> None:
        """As `do_add`."""

    def do_serve(self) -> None:
        """A server for OpenAI clients with this very engine, until the judge says stop."""
        import asyncio

        from workbench.serving.api.app import build_app
        from workbench.serving.api.serve import Serving, listening
        from workbench.serving.api.settings import ServerSettings

        served = Served(self.submission, self.models, self.blocks, time.perf_counter)
        settings = ServerSettings(early_rejection=False, drain_seconds=1.0)
        at = listening("127.0.0.1", 0)
        app = build_app(served.engine, name=self.submission.model, settings=settings)
        server = Serving(app, settings)

        def stop() -> None:
            while self._lines.get()["do"] != "stop":
                pass
            server.should_exit = True

        threading.Thread(target=stop, daemon=True).start()
        report(port=at.getsockname()[1])
        try:
            asyncio.run(server.serve([at]))
        finally:
            served.close()
        report(stopped=True)

    def do_end(self) -> None:
        os._exit(0)


if __name__ == "__main__":
    Worker().serve()
