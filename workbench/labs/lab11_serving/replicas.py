"""server.replicas: two engines of one thread behind a router, or one engine of two threads; prefix hits and tokens/s.

Questions about documents come in turns. A prefix cache belongs to an engine, so a router decides how often a document
is computed: on every engine that is asked about it, or once. Of n questions about D documents of S tokens at most

    (n − D)·S    tokens are found, where each document is computed once: one engine, or a router that knows prefixes
    (n − 2·D)·S  where each of two engines computes each of them: in turns, with an odd number of documents

The engines are processes that stay up. Every run of a turn has a tenant of its own, so that no run finds what another
one left in a cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain, shape_of
from workbench.instruments.timing import exclusive
from workbench.labs.lab11_serving.processes import for_processes
from workbench.parallel.replicas import ProcessReplica, Replica, Replicas
from workbench.serving.routing import ROUTING
from workbench.serving.settings import SchedulerSettings

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

NAME = "server.replicas"
WIDE = "one wide"
CONTENDERS = (*ROUTING, WIDE)
REPLICAS = 2
BLOCK = 16
QUESTION, NEW_TOKENS = 12, 16  # tokens
EACH = SchedulerSettings(max_running=4, token_budget=256)
WIDER = SchedulerSettings(max_running=REPLICAS * 4, token_budget=REPLICAS * 256)


def questions(documents: int, asked: int, document_tokens: int, vocab_size: int, tenant: str) -> list[Request]:
    """Round the documents, in turns; a question's name is its number. The same for every tenant but for him."""
    random = Random(0)
    begins = [tuple(random.choices(range(vocab_size), k=document_tokens)) for _ in range(documents)]
    ends = [tuple(random.choices(range(vocab_size), k=QUESTION)) for _ in range(documents * asked)]
    return [
        Request((tenant, i), begins[i % documents] + end, NEW_TOKENS, stop_token_ids=(), tenant=tenant)
        for i, end in enumerate(ends)
    ]


def max_hits(contender: str, documents: int, asked: int, document_tokens: int) -> int:
    """Tokens that can be found in a cache, as the formulas say; whole blocks of a document."""
    times = REPLICAS if contender == "round_robin" and documents % REPLICAS else 1
    return max(0, documents * (asked - times)) * (document_tokens // BLOCK * BLOCK)


@dataclass
class Served:
    """Of one contender: seconds of all requests, a sample a turn; the rest is of the last turn."""

    seconds: list[float] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    requests: tuple[int, ...] = ()  # of each replica
    texts: dict[int, tuple[int, ...]] = field(default_factory=dict)


def serve(bench: Bench, group: Sequence[Replica], policy: str, asked: Sequence[Request], served: Served) -> None:
    """One run. Raises WorkbenchError for a request that ended with an error."""
    router = Replicas(group, policy)
    with exclusive(bench.check_stop):
        finished = router.run(asked)
        served.seconds.append(router.now_s)
    for one in finished:
        if one.error is not None:
            raise WorkbenchError(f"question {one.request_id} ended with an error: {one.error}")
    served.hits.append(sum(one.hit_tokens for one in finished))
    served.requests = tuple(router.router.requests)
    served.texts = {one.request_id[1]: one.token_ids for one in finished}  # type: ignore[index]  # (tenant, number)


def run_replicas(
    bench: Bench, *, model: Any, documents: int, asked: int, document_tokens: int, repeats: int
) -> Iterator[Measurement]:
    """A Measurement for each routing policy on two engines and for one engine twice as wide ("measured"): seconds of
    all requests, a sample a turn; tokens/s and hits in the counts."""
    bench.check_stop()
    every = {name: Served() for name in CONTENDERS}
    blocks = 2 * (documents * -(-document_tokens // BLOCK) + EACH.max_running * 4)
    with for_processes(bench, model) as (name, decoder), ExitStack() as closing:
        made: list[Replica] = []
        for at in range(REPLICAS + 1):
            bench.check_stop()
            bench.report(f"starting engine {at + 1} of {REPLICAS + 1}")
            settings, threads = (EACH, 1) if at < REPLICAS else (WIDER, REPLICAS)
            made.append(
                ProcessReplica(name, settings, threads=threads, prepare=True, num_blocks=blocks, block_size=BLOCK)
            )
            closing.callback(made[-1].close)
        for turn in range(-1, repeats):
            for contender, served in every.items():
                bench.check_stop()
                bench.report(f"{contender}: turn {turn + 1} of {repeats}" if turn >= 0 else f"{contender}: warming up")
                vocab_size = decoder.config.vocab_size
                those = questions(documents, asked, document_tokens, vocab_size, f"{contender} {turn}")
                if contender == WIDE:
                    serve(bench, made[REPLICAS:], "round_robin", those, served)
                else:
                    serve(bench, made[:REPLICAS], contender, those, served)
                if turn < 0:
                    served.seconds.clear()
                    served.hits.clear()
                if served.texts != every[CONTENDERS[0]].texts:
                    raise WorkbenchError(f"{contender} wrote other tokens than {CONTENDERS[0]}")
    count = documents * asked
    for contender, served in every.items():
        ratios = [a / b for a, b in zip(every[CONTENDERS[0]].seconds, served.seconds, strict=True)]
        counts: dict[str, float] = {
            "tokens_per_s": count * NEW_TOKENS / statistics.median(served.seconds),
            "hit_tokens": statistics.median(served.hits),
            "max_hit_tokens": max_hits(contender, documents, asked, document_tokens),
            "prompt_tokens": count * (document_tokens + QUESTION),
            "as_fast_as_in_turns": statistics.median(ratios),
        }
        counts |= {f"on_replica_{i}": n for i, n in enumerate(served.requests)}
        yield bench.measurement(
            name=NAME,
            settings={
                **plain({"model": model, "documents": documents, "asked": asked}),
                **{"document_tokens": document_tokens, "measured": contender},
            },
            samples=served.seconds,
            unit="s",
            counts=counts,
            check=f"the same {count} answers, whoever gave them",
        )


EXPERIMENT = Experiment(
    name=NAME,
    lab=11,
    question="Two engines behind a router, or one engine twice as wide?",
    how=(
        "two engines in processes of one thread each, and one with two threads and as many times the blocks and running"
        " sequences; the same questions about the same documents, all there at once, in turns. Every run starts with"
        " nothing of it in a cache."
    ),
    settings=(
        MODEL,
        Setting("documents", 5, "int", 1, 32, help="that are asked about, in turns"),
        Setting("asked", 6, "int", 2, 32, help="questions about each"),
        Setting("document_tokens", 192, "int", 16, 4096, unit="tokens", step=16, brief=32, help="of a document"),
        Setting("repeats", 3, "int", 1, 50, brief=1, help="timed turns"),
    ),
    run=run_replicas,
    predict=no_times,
    limits=lambda *, model, **_: {"document_tokens": shape_of(model).context_length - QUESTION - NEW_TOKENS},
    record={"cuda": ()},
)
