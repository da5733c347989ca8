"""paging.prefix_hits: how much of the prompts a pool finds again, against the best that could be found, and what it
saves."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from workbench.decoding.sequence import Finished, Request
from workbench.errors import WorkbenchError
from workbench.experiments.cached_steps import parts_at_a_tie
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, dtype_of, plain, shape_of
from workbench.instruments.cost_prediction import predict
from workbench.instruments.costs import prepared_on, step_costs
from workbench.kv.blocks import BlockTables
from workbench.kv.prefix import PREFIX_INDEXES, prefix_index
from workbench.models.decoder import Decoder
from workbench.models.fast import Model
from workbench.serving.engine import Engine
from workbench.serving.gaps import Poisson
from workbench.serving.lengths import Uniform
from workbench.serving.load import Arrival, SystemPrompts, Turns, Workload, prompt_ids, text_ids, workload
from workbench.serving.settings import SchedulerSettings

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement

NAME = "paging.prefix_hits"
WORKLOADS = ("multi_turn", "shared_prefix", "conversation")
VOCABULARY = 4096  # of the invented tokens, where no model reads them
POOLS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)  # times the blocks that the texts in work need at most
AMPLE = "ample"  # a pool in which everything has room for ever
FOUND = "hash"  # the index of the engine that finds beginnings again
WARM_UP = 4  # tokens that a request writes before the clock starts


@dataclass(frozen=True)
class Text:
    """What one request leaves in the pool: its prompt, and at its end all but the last token of its answer."""

    tenant: str
    prompt: tuple[int, ...]
    computed: tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """Requests in the order in which they begin and end: ("open" or "close", index). The same for every pool.

    peak: blocks that the texts in work need at most, if nobody shares. A pool of `peak` blocks makes nobody wait.
    """

    texts: tuple[Text, ...]
    events: tuple[tuple[str, int], ...]
    peak: int
    all_blocks: int

    @property
    def prompt_tokens(self) -> int:
        return sum(len(text.prompt) for text in self.texts)


@lru_cache(maxsize=8)
def order_of(load: str, requests: int, rate: float, running: int, tenants: int, block_size: int, seed: int) -> Order:
    """The requests of a workload as they arrive, `running` of them in work at a time: where one more comes the oldest
    ends."""
    chosen = replace(workload(load), tenants=tuple(f"tenant {n + 1}" for n in range(tenants))).at_rate(rate)
    texts = [_text(arrival, seed) for arrival in chosen.draw(requests, seed=seed)]
    events: list[tuple[str, int]] = []
    for at in range(requests):
        if at >= running:
            events.append(("close", at - running))
        events.append(("open", at))
    events += [("close", at) for at in range(max(0, requests - running), requests)]
    blocks = [-(-len(text.computed) // block_size) for text in texts]
    peak = max(sum(blocks[at : at + running]) for at in range(max(1, requests - running + 1)))
    return Order(tuple(texts), tuple(events), peak, sum(blocks))


def _text(arrival: Arrival, seed: int) -> Text:
    prompt = prompt_ids(arrival, VOCABULARY, seed=seed)
    answer = text_ids(arrival.answer, arrival.new_tokens, VOCABULARY, seed=seed)
    return Text(arrival.tenant, tuple(prompt), (*prompt, *answer[:-1]))


@lru_cache(maxsize=32)
def optimum(order: Order, block_size: int, isolated: bool) -> int:
    """Prompt tokens that could be found at best: by a cache of whole blocks that never forgets one.

    When a request begins its prompt is compared with everything that was computed before, in this order: prompts of all
    that began earlier, answers of those that had ended (their last token is written and never computed). The longest
    equal beginning counts, in whole blocks, and never the prompt's last token, whose logits are wanted. isolated: only
    texts of the same tenant. No pool, no index: a tree of all texts, forgotten at the end.
    """
    roots: dict[str, dict] = {}

    def chunks(text: Sequence[int]) -> Iterator[tuple[int, ...]]:
        return (tuple(text[a : a + block_size]) for a in range(0, len(text) - block_size + 1, block_size))

    found = 0
    for what, at in order.events:
        text = order.texts[at]
        root = roots.setdefault(text.tenant if isolated else "", {})
        if what == "open":
            node: Any = root
            for chunk in chunks(text.prompt[:-1]):
                node = node.get(chunk)
                if node is None:
                    break
                found += block_size
        node = root
        for chunk in chunks(text.prompt if what == "open" else text.computed):
            node = node.setdefault(chunk, {})
    return found


def replay(order: Order, num_blocks: int, block_size: int, index: str, isolated: bool, check_stop=None) -> BlockTables:
    """The same order through a pool. Each block that is found is compared with what was computed into it."""
    tables = BlockTables(num_blocks, block_size, prefix_index(index, block_size))
    content: dict[int, tuple] = {}  # block -> what was computed into it, and where in its text
    for what, at in order.events:
        if check_stop is not None:
            check_stop()
        text = order.texts[at]
        tenant = text.tenant if isolated else ""
        ids = text.prompt if what == "open" else text.computed
        first = tables.open(at, ids, tenant) if what == "open" else tables.lengths[at]
        if what == "open":
            _check_found(content, tables.tables[at], text, tenant, block_size)
        tables.grow({at: len(ids)})
        for place in range(first // block_size, len(ids) // block_size):
            chunk = ids[place * block_size : (place + 1) * block_size]
            content[tables.tables[at][place]] = (tenant, place, chunk)
        tables.remember(at, ids, tenant)
        if what == "close":
            tables.release(at)
    return tables


def _check_found(content: dict[int, tuple], found: Sequence[int], text: Text, tenant: str, block_size: int) -> None:
    for place, block in enumerate(found):
        chunk = text.prompt[place * block_size : (place + 1) * block_size]
        if content.get(block) != (tenant, place, chunk):
            raise WorkbenchError(
                f"block {block} was found for tokens {place * block_size} … of a prompt of {tenant or 'all tenants'!r}"
                " and holds something else"
            )


def run_prefixes(
    bench: Bench,
    *,
    model,
    load: str,
    requests: int,
    rate: float,
    running: int,
    tenants: int,
    block_size: int,
    repeats: int,
    seed: int,
) -> Iterator[Measurement]:
    """For each index, with tenants apart and together, and each size of the pool the share of prompt tokens that was
    found ("measured": "hits", predicted: the optimum); then, on the engine, TTFT without over TTFT with prefix caching
    ("measured": "ttft", a sample a request)."""
    knobs = {
        "load": load,
        "requests": requests,
        "rate": rate,
        "running": running,
        "tenants": tenants,
        "block_size": block_size,
        "seed": seed,
    }
    order = order_of(**knobs)
    sizes = pools(order)
    cases = [(index, isolated, pool) for index in PREFIX_INDEXES for isolated in (True, False) for pool in sizes]
    for number, (index, isolated, pool) in enumerate(cases):
        bench.check_stop()
        bench.report(f"{number + 1} of {len(cases)} pools")
        tables = replay(order, sizes[pool], block_size, index, isolated, bench.check_stop)
        best = optimum(order, block_size, isolated)
        if tables.hit_tokens > best or tables.prompt_tokens != order.prompt_tokens:
            raise WorkbenchError(
                f"{tables.hit_tokens:,} of {tables.prompt_tokens:,} tokens were found where {best:,} of "
                f"{order.prompt_tokens:,} are all that could be"
            )
        yield bench.measurement(
            name=NAME,
            settings={**knobs, "measured": "hits", "index": index, "isolated": isolated, "pool": pool},
            samples=[tables.hit_tokens / tables.prompt_tokens],
            unit="share",
            counts={
                "hit_tokens": tables.hit_tokens,
                "prompt_tokens": tables.prompt_tokens,
                "optimum_tokens": best,
                "of_optimum": tables.hit_tokens / best if best else 1.0,
                "evictions": tables.evictions,
                "num_blocks": sizes[pool],
                "peak_blocks": order.peak,
            },
            predicted=best / tables.prompt_tokens,
            check=(
                "every block that was found holds the tokens that it was found for; no more was found than the optimum"
            ),
        )
    if repeats:
        yield _timed(bench, model, knobs, repeats)


def pools(order: Order) -> dict[str, int]:
    """{name: blocks}: from what the texts in work need alone to one in which everything has room."""
    named = {f"{share:g}": round(share * order.peak) for share in POOLS}
    return {**named, AMPLE: max(order.all_blocks, *named.values())}


# -- time on the engine ------------------------------------------------------------------------------------------


def timed_requests_of(context: int, requests: int, seed: int) -> tuple[Arrival, ...]:
    """Conversations that begin with one system prompt of half the model's context. Answers are short: TTFT is timed."""
    turns = Turns(Uniform(2, 6), 10.0, context)
    few: dict[str, Any] = {"prompts": Uniform(4, max(4, context // 32)), "outputs": Uniform(2, max(2, context // 128))}
    chosen = Workload(**few, gaps=Poisson(1.0), system=SystemPrompts((context // 2,)), turns=turns)
    return chosen.draw(requests, seed=seed)


def _timed(bench: Bench, model: str | Decoder, knobs: dict[str, Any], requests: int) -> Measurement:
    """One request after the other through two engines in turns, one of which finds beginnings again. Later turns of a
    conversation contain what was really written."""
    oracle, target = bench.model(model), bench.model(model, arrangement="fast")
    context, ceilings = target.config.context_length, bench.ceilings()
    blocks = 4 + (requests + 1) * -(-context // knobs["block_size"])  # ample
    engines = {
        prefix: Engine(
            target,
            SchedulerSettings(max_running=2, token_budget=context),
            num_blocks=blocks,
            block_size=knobs["block_size"],
            prefix=prefix,
        )
        for prefix in (FOUND, None)
    }
    for engine in engines.values():
        _send(
            bench,
            engine,
            Request("warm-up", tuple(text_ids("warm-up", context // 2, 2)), WARM_UP, tenant="nobody else"),
        )
    written: dict[str, Sequence[int]] = {}
    times: dict[str | None, list[float]] = {prefix: [] for prefix in engines}
    rows, hits, promised, ties = [], [], [], 0
    for number, arrival in enumerate(timed_requests_of(context, requests, knobs["seed"])):
        bench.report(f"{number + 1} of {requests} requests on the engine")
        prompt = prompt_ids(arrival, target.config.vocab_size, seed=knobs["seed"], reserved=1, written=written)
        done = {}
        for prefix in list(engines)[:: 1 if number % 2 else -1]:
            now_s, new_tokens = engines[prefix].now_s, arrival.new_tokens
            request = Request(number, tuple(prompt), new_tokens, stop_token_ids=(), arrival_s=now_s)
            done[prefix] = _send(bench, engines[prefix], request)
            first_token_s = done[prefix].first_token_s
            assert first_token_s is not None, "it has ended"
            times[prefix].append(first_token_s - done[prefix].arrival_s)
        ties += parts_at_a_tie(oracle, prompt, list(done[FOUND].token_ids), list(done[None].token_ids))
        written[arrival.answer] = done[None].token_ids
        rows.append(len(prompt))
        hits.append(done[FOUND].hit_tokens)
        whole, rest = (_prefill_s(ceilings, model, rows[-1] - known, known) for known in (0, hits[-1]))
        promised.append(whole / rest)
    return bench.measurement(
        name=NAME,
        settings={
            **plain({"model": model}),
            **knobs,
            "measured": "ttft",
            "repeats": requests,
            "rows": rows,
            "hits": hits,
            "ttft_s": times[None],
            "ttft_found_s": times[FOUND],
            "promised": promised,
        },
        samples=[without / found for without, found in zip(times[None], times[FOUND])],
        unit="ratio",
        counts={
            "prompt_tokens": sum(rows),
            "hit_tokens": sum(hits),
            "ttft_s": statistics.median(times[None]),
            "ttft_found_s": statistics.median(times[FOUND]),
        },
        predicted=statistics.median(promised),
        check=f"greedy; all {requests} answers are the same with and without"
        + (f", but for {ties} that part at a tie within rounding" if ties else ""),
    )


def _prefill_s(ceilings: Ceilings, model: str | Model, rows: int, known: int) -> float:
    """By the cost model: one pass over `rows` tokens behind `known` ones, logits of the last."""
    dtype = dtype_of(model)
    costs = step_costs(
        shape_of(model),
        new_tokens=[rows],
        contexts=[known],
        logit_rows=1,
        weight_bytes_per_element=dtype.itemsize,
        kv="paged",
        arrangement=prepared_on(ceilings, shape_of(model)),
    )
    return predict(costs, ceilings, dtype).seconds


def _send(bench: Bench, engine: Engine, request: Request) -> Finished:
    [done] = engine.run([request], watch=lambda _: bench.check_stop())
    if done.error is not None:
        raise done.error
    return done


EXPERIMENT = Experiment(
    name=NAME,
    lab=9,
    question="How much of the prompts was computed before, and how much of that does a pool find again?",
    how=(
        "requests in a fixed order, so many in work at a time, through real block tables with each index; no model."
        " The optimum: a cache of whole blocks that never forgets, on the same order. Then conversations with one"
        " system prompt, request after request through two engines in turns, with an index and without: TTFT, and"
        " equal answers."
    ),
    settings=(
        MODEL,
        Setting("load", "multi_turn", "choice", choices=WORKLOADS, help="whose requests"),
        Setting("requests", 150, "int", 4, 400, unit="requests", help="of the workload"),
        Setting(
            "rate",
            4.0,
            "float",
            0.1,
            32.0,
            step=0.1,
            unit="a second",
            help="requests or conversations that begin: the more, the further the turns of one lie apart",
        ),
        Setting("running", 8, "int", 1, 32, unit="texts", help="in work at a time"),
        Setting("tenants", 3, "int", 1, 8, help="who send the requests"),
        Setting("block_size", 16, "choice", choices=(4, 8, 16, 32, 64, 128), unit="tokens", help="tokens of a block"),
        Setting(
            "repeats",
            16,
            "int",
            0,
            100,
            unit="requests",
            brief=4,
            help="sent to the engine, with an index and without; 0: none",
        ),
        Setting("seed", 0, "int", 0, 10_000, help="of the requests"),
    ),
    run=run_prefixes,
    predict=no_times,
    record={"cpu": ({"repeats": 32},), "cuda": ({"repeats": 32},)},
)
