"""Counters and histograms in Prometheus' format, under vLLM's names, so that its dashboards and scrapers work here.
What vLLM has no name for is under `workbench:`.

Names: vLLM, docs/design/metrics.md. Times in seconds. prometheus_client adds _total to counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from workbench.serving.api.link import StepNews
from workbench.serving.offloading import OffloadTotals

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
SIZES = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CONTENT_TYPE = CONTENT_TYPE_LATEST


class TextTimes(NamedTuple):
    """Of one text, on the engine's clock, in seconds: its request came, its first step began, tokens came."""

    arrival_s: float
    begun_s: float
    first_s: float
    last_s: float


class Metrics:
    """Of one server. All of it is written on the event loop."""

    def __init__(self, model_name: str, num_blocks: int, block_size: int) -> None:
        self.registry = CollectorRegistry()
        self._labels, self._values = ("model_name",), (model_name,)
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self.running = gauge("vllm:num_requests_running", "Sequences that run")
        self.waiting = gauge("vllm:num_requests_waiting", "Requests that wait for their first step")
        self.open = gauge("workbench:open_requests", "HTTP requests whose answer is under way")
        self.usage = gauge("vllm:kv_cache_usage_perc", "Share of the blocks in use, 0 to 1")
        self.prefix_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.prefix_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.tier_queries = counter(
            "vllm:external_prefix_cache_queries", "Prompt tokens not in the pool, looked up in the tiers below it"
        )
        self.tier_hits = counter("vllm:external_prefix_cache_hits", "Prompt tokens loaded from the tiers")
        self.offload_bytes = counter(
            "vllm:kv_offload_total_bytes", "Copied between the pool and the tiers", "transfer_type"
        )
        self.offload_time = counter("vllm:kv_offload_total_time", "Seconds of these copies", "transfer_type")
        self.tier_bytes = {
            way: counter(f"vllm:kv_offload_tiering_{way}_bytes", f"Of the disk tier, {way}", "tier")
            for way in ("read", "write")
        }
        self.tier_time = {
            way: counter(f"vllm:kv_offload_tiering_{way}_time", f"Seconds of the disk tier, {way}", "tier")
            for way in ("read", "write")
        }
        self.tier_blocks = self._labelled_gauge("workbench:tier_blocks", "Blocks that a tier has", "tier")
        self.tier_evicted = counter("workbench:tier_evicted_blocks", "Blocks that a tier evicted", "tier")
        self.tier_corrupt = counter(
            "workbench:tier_corrupt_blocks", "Blocks that did not hold what was written; computed again", "tier"
        )
        self.tier_failed = counter(
            "workbench:tier_failed_reads", "Reads ahead that ended in an error; read again when needed", "tier"
        )
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that were accepted")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens that clients got")
        self.preemptions = counter("vllm:num_preemptions", "Preemptions")
        self.success = counter("vllm:request_success", "Texts by how they ended", "finished_reason")
        self.step_tokens = histogram("vllm:iteration_tokens_total", "Rows of a step", STEP_TOKENS)
        self.request_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", SIZES)
        self.request_generation = histogram("vllm:request_generation_tokens", "Tokens of a text", SIZES)
        self.params_n = histogram("vllm:request_params_n", "n of a request", (1, 2, 5, 10, 20, 50, 100))
        self.params_max_tokens = histogram("vllm:request_params_max_tokens", "max_tokens of a request", SIZES)
        self.ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token", SECONDS)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Between two steps that gave a text tokens", GAPS)
        self.tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Of a text: decode time ÷ (tokens − 1)", GAPS
        )
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token", SECONDS)
        self.queue = histogram("vllm:request_queue_time_seconds", "From arrival to the first step", SECONDS)
        self.prefill = histogram("vllm:request_prefill_time_seconds", "From the first step to the first token", SECONDS)
        self.decode = histogram("vllm:request_decode_time_seconds", "From the first token to the last", SECONDS)
        self.inference = histogram("vllm:request_inference_time_seconds", "From the first step to the last", SECONDS)
        self.drafts = counter("vllm:spec_decode_num_drafts", "Rounds of drafting")
        self.draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens")
        self.accepted_tokens = counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted")
        self.accepted_at = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted, by place in the draft", "position"
        )
        cache = Gauge(
            "vllm:cache_config_info",
            "The KV cache",
            ("model_name", "block_size", "num_gpu_blocks"),
            registry=self.registry,
        )
        cache.labels(model_name, str(block_size), str(num_blocks)).set(1)
        self.refusals = counter("workbench:requests_refused", "Refused at the door", "reason")
        self.requests = counter("workbench:http_requests", "Answered, by status", "status")
        self.step_seconds = histogram("workbench:step_seconds", "Of a step, measured", GAPS)
        self.step_ratio = histogram(
            "workbench:step_measured_over_predicted",
            "Measured ÷ predicted time of a step",
            (0.25, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4),
        )
        self.step_failures = counter("workbench:step_failures", "Steps that an error stopped; they were planned again")
        self.schedule_seconds = counter("workbench:schedule_seconds", "In the scheduler, of all steps")
        self._blocks, self._seen = num_blocks, (0, 0)
        self._offloaded = dict[tuple[str, ...], float]()  # what the engine counted until the last step

    def _named(self, extra: str | None) -> tuple[str, ...]:
        return self._labels if extra is None else (*self._labels, extra)

    def _gauge(self, name: str, words: str) -> Gauge:
        return Gauge(name, words, self._labels, registry=self.registry).labels(*self._values)

    def _labelled_gauge(self, name: str, words: str, extra: str) -> Gauge:
        return Gauge(name, words, self._named(extra), registry=self.registry)

    def _counter(self, name: str, words: str, extra: str | None = None) -> Counter:
        made = Counter(name, words, self._named(extra), registry=self.registry)
        return made.labels(*self._values) if extra is None else made

    def _histogram(self, name: str, words: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, words, self._labels, registry=self.registry, buckets=buckets).labels(*self._values)

    # -- what happened -------------------------------------------------------------------------------------------------

    def step(self, news: StepNews, predicted_s: float | None) -> None:
        self.running.set(len(news.running))
        self.usage.set(news.blocks_used / self._blocks)
        queries, hits = news.prefix_queries, news.prefix_hits
        self.prefix_queries.inc(queries - self._seen[0])
        self.prefix_hits.inc(hits - self._seen[1])
        self._seen = queries, hits
        self.preemptions.inc(news.preempted)
        self.step_failures.inc(len(news.failures))
        if news.offload is not None:
            self._note_offload(news.offload)
        if not news.new_tokens:
            return
        self.step_tokens.observe(news.rows)
        self.step_seconds.observe(news.seconds)
        self.schedule_seconds.inc(news.schedule_s)
        if predicted_s:
            self.step_ratio.observe((news.seconds - news.load_s) / predicted_s)
        for drafted, accepted in news.drafts:
            self.drafts.inc()
            self.draft_tokens.inc(drafted)
            self.accepted_tokens.inc(accepted)
            for position in range(accepted):
                self.accepted_at.labels(*self._values, str(position)).inc()

    def _note_offload(self, totals: OffloadTotals) -> None:
        """Totals become counters: what is more than at the step before is added."""

        def add(counter: Counter, total: float, *names: str) -> None:
            key = (counter._name, *names)
            (counter.labels(*self._values, *names) if names else counter).inc(total - self._offloaded.get(key, 0))
            self._offloaded[key] = total

        add(self.tier_queries, totals.query_tokens)
        add(self.tier_hits, totals.hit_tokens)
        for tier in totals.tiers:
            self.tier_blocks.labels(*self._values, tier.tier).set(tier.blocks)
            add(self.tier_evicted, tier.evicted, tier.tier)
            add(self.tier_corrupt, tier.corrupt, tier.tier)
            add(self.tier_failed, tier.failed, tier.tier)
        for transfer, pool_is in (("GPU_to_CPU", "source"), ("CPU_to_GPU", "target")):
            of_pool = [one for one in totals.moves if getattr(one, pool_is) == "pool"]
            add(self.offload_bytes, sum(one.bytes for one in of_pool), transfer)
            add(self.offload_time, sum(one.seconds for one in of_pool), transfer)
        for way, disk_is in (("read", "source"), ("write", "target")):
            of_disk = [one for one in totals.moves if getattr(one, disk_is) == "disk"]
            if of_disk:
                add(self.tier_bytes[way], sum(one.bytes for one in of_disk), "1:disk")
                add(self.tier_time[way], sum(one.seconds for one in of_disk), "1:disk")

    def asked(self, n: int, max_tokens: int, prompt_tokens: int) -> None:
        """A request was accepted."""
        self.params_n.observe(n)
        self.params_max_tokens.observe(max_tokens)
        self.request_prompt.observe(prompt_tokens)
        self.prompt_tokens.inc(prompt_tokens)

    def ended(self, reason: str, tokens: int, times: TextTimes) -> None:
        """A text ended for its client, after so many tokens."""
        self.success.labels(*self._values, reason).inc()
        self.request_generation.observe(tokens)
        self.e2e.observe(times.last_s - times.arrival_s)
        self.queue.observe(max(0.0, times.begun_s - times.arrival_s))
        self.prefill.observe(max(0.0, times.first_s - times.begun_s))
        self.decode.observe(times.last_s - times.first_s)
        self.inference.observe(max(0.0, times.last_s - times.begun_s))
        if tokens > 1:
            self.tpot.observe((times.last_s - times.first_s) / (tokens - 1))

    def emitted(self, tokens: int, since_s: float, first: bool) -> None:
        """A text got tokens. since_s: seconds since the request's arrival for the first, else since the last ones."""
        self.generation_tokens.inc(tokens)
        (self.ttft if first else self.itl).observe(max(0.0, since_s))

    def refused(self, reason: str) -> None:
        self.refusals.labels(*self._values, reason).inc()

    def answered(self, status: int) -> None:
        self.requests.labels(*self._values, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)
