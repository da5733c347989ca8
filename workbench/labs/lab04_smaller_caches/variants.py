"""smaller.variants: a decode step of each attention variant, with the kv that suits it. Time and bytes, both predicted
and both looked at: the time on the clock, the bytes in what was really allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from workbench.decoding.runner import ready_kv
from workbench.errors import WorkbenchError
from workbench.experiments.cached_steps import ARRANGEMENT, rounding, same_token, step_counts
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import shape_of, text_ids, whole_text
from workbench.experiments.loops import Loops
from workbench.instruments.costs import predict, prepared_on, step_costs
from workbench.instruments.memory import require_bytes
from workbench.kv import Quantized, kv_for, make_kv, stored_dtype
from workbench.kv.quantized_codes import why_not_codes
from workbench.labs.lab04_smaller_caches.inputs import StoringKV, reserved_bytes_for
from workbench.models import prepare
from workbench.models.assembly import fill, hollow_decoder, random_tensors
from workbench.models.batch import Batch
from workbench.models.config import LatentAttentionShape, ModelConfig
from workbench.models.fast import FastDecoder
from workbench.models.native_steps import why_not_steps_of
from workbench.models.shapes import public_shape

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction, StepCosts
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.kv import KV
    from workbench.models.decoder import Decoder

VARIANTS = {
    "mha": "MHA",
    "gqa": "GQA",
    "mqa": "MQA",
    "mla": "MLA",
    "hybrid": "hybrid windows",
    "shared": "shared layers",
}
# The trained ones, and two larger shapes with random weights: times do not depend on the values of weights.
SIZES = {"stdlib-3m": "", "random-110m": "random-110m", "random-1b": "llama-3.2-1b"}
LONGEST = 65_536  # tokens, of the shapes with random weights
CHUNK = 128  # tokens that a cache is filled with at a time, so that Stop is heard
GIVEN_UP = 0.5  # a lossy cache whose logits are off by this much of the largest is broken, not lossy


# A cache in few bits: every step makes numbers of all codes and attends over those, or a loop reads the codes.
DEQUANTIZED, AS_CODES = {"attention": "sdpa"}, {"attention": "codes"}


@dataclass(frozen=True)
class Way:
    """A variant, and what remembers it."""

    name: str
    title: str
    variant: str
    kv: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True  # the same numbers as without a cache, but for rounding
    native: bool = False  # its steps are one function in C++, whatever the arrangement of the others

    @property
    def reads_codes(self) -> bool:
        return self.settings.get("attention") == "codes"

    @property
    def restores(self) -> bool:
        """Whether every step makes keys and values of what is kept before it attends to them."""
        return self.settings.get("attention") == "sdpa" or self.settings.get("form") == "expanded"

    def settings_but(self, *names: str) -> dict[str, Any]:
        return {name: value for name, value in self.settings.items() if name not in names}


WAYS = {
    way.name: way
    for way in (
        Way("mha", "MHA", "mha", "contiguous"),
        Way("gqa", "GQA", "gqa", "contiguous"),
        Way("mqa", "MQA", "mqa", "contiguous"),
        Way("mla", "MLA, absorbed", "mla", "latent", {"form": "absorbed"}),
        Way("hybrid", "hybrid windows", "hybrid", "window"),
        Way("shared", "shared layers", "shared", "shared_layers"),
        Way("mla re-expanded", "MLA, expanded every step", "mla", "latent", {"form": "expanded"}),
        Way("mla kept expanded", "MLA, kept expanded", "mla", "contiguous"),
        Way("int8", "MHA in int8", "mha", "quantized", {"format": "int8", **DEQUANTIZED}, exact=False),
        Way("fp8", "MHA in fp8", "mha", "quantized", {"format": "fp8", **DEQUANTIZED}, exact=False),
        Way("int4", "MHA in int4", "mha", "quantized", {"format": "int4", **DEQUANTIZED}, exact=False),
        *(
            Way(
                f"{name} as codes",
                f"MHA in {name} read as codes",
                "mha",
                "quantized",
                {"format": name, **AS_CODES},
                exact=False,
            )
            for name in ("int8", "fp8", "int4")
        ),
        Way("mha native", "MHA, native steps", "mha", "contiguous", native=True),
        *(
            Way(
                f"{name} native",
                f"MHA in {name}, native steps",
                "mha",
                "quantized",
                {"format": name, **AS_CODES},
                exact=False,
                native=True,
            )
            for name in ("int8", "int4")
        ),
    )
}
COMPARISONS = {
    "variants": ("mha", "gqa", "mqa", "mla", "hybrid", "shared"),
    "forms of MLA": ("mha", "mla", "mla re-expanded", "mla kept expanded"),
    "formats": ("mha", "int8", "fp8", "int4", "int8 as codes", "fp8 as codes", "int4 as codes"),
    "native steps": ("mha", "mha native", "int8 as codes", "int8 native", "int4 as codes", "int4 native"),
}


def ways_here(compare: str, size: str, device: str) -> tuple[dict[str, Way], dict[str, str]]:
    """({name: way} of those that run on a device, {name: why} of the others), in the order of the comparison."""
    ways = {name: WAYS[name] for name in COMPARISONS[compare]}
    reasons = {name: _why_not_here(way, size, device) for name, way in ways.items()}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    return {name: way for name, way in ways.items() if name not in left_out}, left_out


def _why_not_here(way: Way, size: str, device: str) -> str:
    if way.reads_codes and (reason := why_not_codes(stored_dtype(dtype_of_size(size), device), device)):
        return reason
    return why_not_steps_of(variant_config(size, way.variant), device) if way.native else ""


def words_left_out(left_out: Mapping[str, str]) -> list[str]:
    """A sentence for each reason, with the ways that it keeps out."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(reason, []).append(WAYS[name].title)
    return [f"Left out here: {'; '.join(titles)}. The reason: {reason}." for reason, titles in by_reason.items()]


# -- shapes ----------------------------------------------------------------------------------------------------


def variant_config(size: str, variant: str) -> ModelConfig:
    """The shape of a variant: the shipped one, or the larger shape's own block with that attention.

    The larger ones follow the shipped in proportion: a third of the key-value heads (or what divides), a latent of
    one and a half heads and half a head for the position, every third layer global, pairs of layers.
    """
    if not SIZES[size]:
        return shape_of(f"{size}-{variant}")
    base = public_shape(SIZES[size])
    heads, head, layers = base.num_heads, base.head_dim, base.num_layers
    base = replace(base, num_kv_heads=heads, context_length=LONGEST)
    if variant == "gqa":
        return replace(base, num_kv_heads=max(n for n in range(1, heads // 3 + 1) if heads % n == 0))
    if variant == "mqa":
        return replace(base, num_kv_heads=1)
    if variant == "mla":
        latent = LatentAttentionShape(None, 3 * head // 2, head // 2, head, head)
        return replace(base, family="deepseek_v3", head_dim=latent.key_head_dim, latent_attention=latent)
    if variant == "hybrid":
        return replace(base, sliding_window=512, global_layers=tuple(range(2, layers, 3)))
    if variant == "shared":
        return replace(base, kv_sources=tuple(i - i % 2 for i in range(layers)))
    assert variant == "mha", variant
    return base


def dtype_of_size(size: str) -> torch.dtype:
    return torch.bfloat16 if SIZES[size] else torch.float32


def model_of(bench: Bench, size: str, variant: str, arrangement: str) -> Decoder | FastDecoder:
    """The shipped model of that variant, or one of the larger shape with random weights. arrangement: one of the
    experiment's, or "native"."""
    if not SIZES[size]:
        return bench.model(f"{size}-{variant}", arrangement=arrangement)
    bench.check_stop()
    bench.report(f"making {size} with {VARIANTS[variant]}")
    config, device = variant_config(size, variant), torch.device(bench.device)
    hollow = hollow_decoder(config, name=f"{size}-{variant}")
    model = fill(hollow, random_tensors(hollow, dtype_of_size(size), device, seed=0), device)
    if arrangement == "native":
        return prepare(model, native=True, say=bench.report)
    return prepare(model) if arrangement == "fast" else model


def contexts_of(largest: int) -> list[int]:
    """An eighth, a quarter, a half of the largest context, and the whole."""
    return sorted({max(1, largest * part // 8) for part in (1, 2, 4, 8)})


# -- predicted -------------------------------------------------------------------------------------------------


def predicted_step(
    ceilings: Ceilings,
    way: Way,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    sequences: int = 1,
    context: int,
    arrangement: str = "fast",
) -> tuple[StepCosts, Prediction]:
    """(StepCosts, Prediction) of one new token for each of `sequences` sequences after `context` others."""
    on_gpu = ceilings.of_gpu and not way.reads_codes  # the loop is a CPU's, whatever its speed is taken from
    costs = step_costs(
        config,
        new_tokens=[1] * sequences,
        contexts=[context] * sequences,
        logit_rows=sequences,
        weight_bytes_per_element=dtype.itemsize,
        kv=way.kv,
        kv_bytes_per_element=stored_dtype(dtype, "cuda" if on_gpu else "cpu").itemsize,
        arrangement="fast" if way.native else prepared_on(ceilings, config) if arrangement == "fast" else arrangement,
        kv_settings=way.settings,
    )
    if way.native:
        costs = Loops("native", dtype).counted(costs)
    return costs, predict(costs, ceilings, dtype)


def predicted_way(
    ceilings: Ceilings, way: Way, size: str, context: int, arrangement: str
) -> tuple[StepCosts, Prediction]:
    """(StepCosts, Prediction) of one new token after `context` others."""
    config = variant_config(size, way.variant)
    return predicted_step(ceilings, way, config, dtype_of_size(size), context=context, arrangement=arrangement)


def predict_ways(
    ceilings: Ceilings,
    *,
    size: str,
    compare: str,
    largest_context: int,
    arrangement: str,
    device: str | None = None,
    **_: Any,
) -> dict[str, list[tuple[int, float, str]]]:
    """{way: [(tokens remembered, seconds of a step, limit), …]}, for the contexts and the ways that a run on this
    device measures. device None: one of the ceilings' kind."""
    _check_room(size, largest_context)
    found = {}
    for name, way in ways_here(compare, size, device or ("cuda" if ceilings.of_gpu else "cpu"))[0].items():
        steps = [(c, predicted_way(ceilings, way, size, c, arrangement)[1]) for c in contexts_of(largest_context)]
        found[name] = [(c, p.seconds, p.limit) for c, p in steps]
    return found


def predict_decode(ceilings: Ceilings, **settings: Any) -> list[tuple[int, float, str]]:
    return predict_ways(ceilings, **settings)["mha"]


def reserved_bytes(
    way: Way, config: ModelConfig, max_tokens: int, dtype: torch.dtype, *, max_sequences: int = 1
) -> int:
    """What the kv of sequences of so many tokens takes from the device, by its own formula. dtype: as stored."""
    stored = way.settings_but("form", "attention")  # they keep nothing
    room = {"max_sequences": max_sequences, "max_tokens": max_tokens, "dtype": dtype}
    return reserved_bytes_for(way.kv, config, **room, **stored)


def _check_room(size: str, largest_context: int) -> None:
    longest = variant_config(size, "mha").context_length
    if largest_context >= longest:
        raise WorkbenchError(
            f"a new token after {largest_context:,} others makes {largest_context + 1:,} tokens, and {size} reads at "
            f"most {longest:,}; choose a smaller largest_context"
        )


# -- measured --------------------------------------------------------------------------------------------------


class _Runner:
    """One way at work: a kv that remembers the first tokens of the text, and steps from there."""

    def __init__(self, bench: Bench, way: Way | None, decoder, kv: KV, text: Sequence[int]) -> None:
        self.bench, self.way, self.decoder, self.kv, self.text = bench, way, decoder, kv, text
        self.held = 0
        self.logits = torch.empty(0)  # [V] of the last step
        self.cache_bytes_read = 0  # in it, by the loop over codes

    @torch.inference_mode()
    def remember(self, tokens: int) -> None:
        """Send the text up to `tokens` tokens, in chunks."""
        while self.held < tokens:
            self.bench.check_stop()
            end = min(self.held + CHUNK, tokens)
            self._send(self.held, end)
            self.held = end

    @torch.inference_mode()
    def step(self) -> float:
        """Seconds of the next token; then the kv goes back to where it was, outside the clock."""
        held, before = self.kv.bytes_in_use, self._read_by_loop()
        seconds = self.bench.measure(self._next, repeats=1, warmup=0)[0]
        self.cache_bytes_read = self._read_by_loop() - before
        if self.way is not None and self.way.reads_codes:
            assert self.cache_bytes_read == held, (self.way.name, self.held, self.cache_bytes_read, held)
        self.kv.truncate(0, self.held)
        return seconds

    def _read_by_loop(self) -> int:
        return self.kv.bytes_read if isinstance(self.kv, Quantized) else 0

    def _next(self) -> None:
        self.logits = self._send(self.held, self.held + 1)[-1]

    def _send(self, start: int, end: int) -> torch.Tensor:
        batch = Batch.of([self.text[start:end]], first_positions=[start], device=self.decoder.device)
        return self.decoder(batch, self.kv)


@torch.inference_mode()
def one_pass(decoder, text: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
    """[len(rows), V] logits after those tokens of the text, from one pass over all of it without a cache."""
    batch = replace(whole_text(decoder, list(text)), logit_rows=torch.tensor(rows, device=decoder.device))
    return decoder(batch, make_kv("recompute", decoder.config)).float()


def run_decode(
    bench: Bench,
    *,
    size: str,
    compare: str,
    largest_context: int,
    repeats: int,
    arrangement: str,
    yours_on: str,
    kv: Callable[[ModelConfig], KV] | None = None,
) -> Iterator[Measurement]:
    """At each context, shortest first, one Measurement a way: samples are seconds of a step. The ways take turns."""
    _check_room(size, largest_context)
    here, left_out = ways_here(compare, size, bench.device)
    ways, ceilings = list(here.values()), bench.ceilings()
    for words in words_left_out(left_out):
        bench.report(words)
    variants = sorted({way.variant for way in ways} | ({yours_on} if kv is not None else set()))
    if SIZES[size]:
        _require_room(bench, size, variants, ways, largest_context)
    models = {v: model_of(bench, size, v, arrangement) for v in variants}
    natives = {v: model_of(bench, size, v, "native") for v in sorted({way.variant for way in ways if way.native})}
    contexts, oracles = contexts_of(largest_context), {}
    texts = {v: text_ids(model, largest_context + 1) for v, model in models.items()}
    for variant, model in models.items():
        bench.check_stop()
        bench.report(f"the oracle: {VARIANTS[variant]}, one pass without a cache")
        oracles[variant] = one_pass(model, texts[variant], contexts)
    runners = [
        _Runner(
            bench,
            way,
            (natives if way.native else models)[way.variant],
            kv_for(way.kv, models[way.variant], max_tokens=largest_context + 1, **way.settings),
            texts[way.variant],
        )
        for way in ways
    ]
    if kv is not None:
        memory = ready_kv(kv, models[yours_on], 1, largest_context + 1)
        runners.append(_Runner(bench, None, models[yours_on], memory, texts[yours_on]))
    settings = {"size": size, "compare": compare, "largest_context": largest_context, "arrangement": arrangement}
    for number, context in enumerate(contexts):
        samples = _timed(bench, runners, context, repeats)
        for runner, seconds in zip(runners, samples):
            expected = oracles[yours_on if runner.way is None else runner.way.variant][number]
            yield _measurement(bench, ceilings, runner, seconds, expected, settings, context, yours_on)


def _require_room(bench: Bench, size: str, variants: list[str], ways: list[Way], largest_context: int) -> None:
    """Refuse before the first model is made what will not fit: all weights, one more copy while they are arranged,
    and all caches."""
    dtype = dtype_of_size(size)
    natives = {way.variant for way in ways if way.native}
    weights = [variant_config(size, v).num_parameters() * dtype.itemsize for v in (*variants, *natives)]
    stored = stored_dtype(dtype, bench.device)
    caches = [reserved_bytes(w, variant_config(size, w.variant), largest_context + 1, stored) for w in ways]
    what = f"comparing {len(variants)} variants of {size} at {largest_context:,} tokens"
    require_bytes(sum(weights) + max(weights) + sum(caches), bench.device, what)


def _timed(bench: Bench, runners: list[_Runner], context: int, repeats: int) -> list[list[float]]:
    """Seconds of each step for each runner, in turns; the first turn warms up."""
    for runner in runners:
        bench.report(f"{_title(runner)}: remembering {context:,} tokens")
        runner.remember(context)
    samples: list[list[float]] = [[] for _ in runners]
    for turn in range(repeats + 1):
        bench.check_stop()
        bench.report(f"after {context:,} tokens: step {turn} of {repeats}")
        for runner, found in zip(runners, samples):
            seconds = runner.step()
            if turn:
                found.append(seconds)
    return samples


def _title(runner: _Runner) -> str:
    return "yours" if runner.way is None else runner.way.title


def _measurement(bench, ceilings, runner: _Runner, samples, oracle, settings, context, yours_on) -> Measurement:
    way, kv, decoder = runner.way, runner.kv, runner.decoder
    about = {**settings, "way": "yours", "variant": yours_on, "kv": "yours", "context": context}
    counts: dict[str, float] = {"bytes_in_use": kv.bytes_in_use, "bytes_reserved": kv.bytes_reserved}
    predicted = limit = None
    if way is not None:
        costs, found = predicted_way(ceilings, way, settings["size"], context, settings["arrangement"])
        predicted, limit = found.seconds, found.limit
        formula = reserved_bytes(way, decoder.config, settings["largest_context"] + 1, cast(StoringKV, kv).dtype)
        assert formula == kv.bytes_reserved, (way.name, formula, kv.bytes_reserved)
        about |= {"way": way.name, "variant": way.variant, "kv": way.kv}
        counts |= {**step_counts(costs), "bytes_reserved_formula": formula, "rows": len(samples)}
        if way.reads_codes:
            counts["cache_bytes_read_a_step"] = runner.cache_bytes_read
    difference = float((runner.logits.float() - oracle).abs().max() / oracle.abs().max())
    return bench.measurement(
        name="smaller.variants",
        settings=about,
        samples=samples,
        unit="s",
        counts={**counts, "largest_difference": difference},
        predicted=predicted,
        limit=limit,
        check=_checked(way, runner.logits.float(), oracle, difference, decoder.dtype) + _steps_taken(way, decoder),
    )


def _steps_taken(way: Way | None, decoder: Decoder | FastDecoder) -> str:
    """Of native ways in words what their steps were. Raises WorkbenchError where they were none."""
    if way is None or not way.native:
        return ""
    assert isinstance(decoder, FastDecoder), "native steps are those of a prepared model"
    if "one function" not in decoder.native_reason:
        raise WorkbenchError(f"{way.title}: no step of this was native: {decoder.native_reason}")
    return f"; {decoder.native_reason}"


def _checked(way: Way | None, logits: torch.Tensor, oracle: torch.Tensor, difference: float, dtype) -> str:
    """What came of comparing with the pass without a cache. An exact way that is wrong is not timed; of a learner's
    it is said what is wrong; of a lossy one how much it loses."""
    expected = int(oracle.argmax())
    off = f"logits differ by {difference:.1g} of the largest"
    right = difference * float(oracle.abs().max()) <= rounding(oracle, dtype)
    same = "the same" if int(logits.argmax()) == expected else "another"
    if way is None:
        verdict = "equal within rounding to" if right else "not those of"
        return f"{verdict} one pass without a cache: {off}, {same} next token"
    if way.exact:
        same_token(logits, expected, dtype, f"{way.title}: the next token")
    if (way.exact and not right) or difference > GIVEN_UP:
        raise WorkbenchError(
            f"{way.title}: {off} from one pass without a cache, which is no rounding: the output is wrong, so its time "
            "was thrown away"
        )
    if way.exact:
        return f"the next token equals that of one pass without a cache; {off}"
    return f"lossy: {off}; {same} next token as without a cache"


EXPERIMENT = Experiment(
    name="smaller.variants",
    lab=4,
    question="What does a decode step cost, variant by variant?",
    how="every kv is filled with the same held-out text (random tokens for random weights) and writes the next token "
    "again and again, the ways in turns, after a warm-up; its output is compared with one pass without a cache, its "
    "reserved bytes with the formula, and what the loop over codes has read with what the cache holds. The prediction "
    "comes from the model's shape and this machine's ceilings.",
    settings=(
        Setting(
            "size",
            "stdlib-3m",
            "choice",
            choices=tuple(SIZES),
            help="the trained variants, or the same attention in a larger shape with random weights",
        ),
        Setting("compare", "variants", "choice", choices=tuple(COMPARISONS), help="which ways beside each other"),
        Setting(
            "largest_context",
            1000,
            "choice",
            unit="tokens",
            choices=(64, 125, 250, 500, 1000, 2000, 4000, 8000, 16_000, 32_000),
            brief=125,
            help="tokens that are remembered; an eighth, a quarter and a half of it are measured as well",
        ),
        Setting("repeats", 9, "int", 1, 100, brief=1, help="timed steps of each way at each context"),
        ARRANGEMENT,
        Setting("yours_on", "mha", "choice", choices=tuple(VARIANTS), help="the variant that your kv= remembers"),
    ),
    run=run_decode,
    limits=lambda *, size, **_: {"largest_context": variant_config(size, "mha").context_length - 1},
    predict=predict_decode,
    learner=("kv",),
    record={
        "cpu": ({}, *({"size": "random-110m", "compare": c, "largest_context": 2000} for c in COMPARISONS)),
        "cuda": tuple({"size": "random-1b", "compare": c, "largest_context": 32_000} for c in COMPARISONS),
    },
)
