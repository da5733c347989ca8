"""kernels.graphs: a whole decode step, its weights in 16, 8 and 4 bits, with and without a graph, beside
transformers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import next_logits, plain, shape_of, text_ids, within_context
from workbench.experiments.steps import CONTEXTS, agrees, fits_context
from workbench.instruments.costs import StepCosts, decode_costs, predict, prepared_on
from workbench.instruments.device import PUBLISHED
from workbench.instruments.memory import require_bytes
from workbench.kv.paged_static import StaticPaged
from workbench.kv.slots import stored_dtype
from workbench.labs.lab05_quantization.stored_formats import FORMATS, linear_bytes, linear_shapes
from workbench.labs.lab10_kernels.crossover import BATCHES, EAGER_LAUNCH_US
from workbench.models import prepare
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.graphs import GraphedSteps
from workbench.models.layout import config_to_hf
from workbench.quantization import quantize

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.models.decoder import Decoder

STORED = ("bfloat16", "int8", "int4")
ALL = "all"
SHAPES = ("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b")  # predicted
STARTS = ("eager", "graph")
GROUP = 128  # inputs that share a scale, in int4, where it divides
STEPS = 16  # in one timed run, one after the other, as a text is written
CHUNK = 256  # tokens of the prompt at a time
PEER = "transformers, static cache, compiled"
NO_TIME = (
    "CUDA graphs are of CUDA: here the step was recorded as torch.fx keeps it, and replayed; its time means nothing"
)


# -- predicted -----------------------------------------------------------------------------------------------------


def group_for(config: ModelConfig) -> int:
    """The largest group up to GROUP that divides the inputs of every linear."""
    inputs = {inside for _, inside in linear_shapes(config)}
    return next(g for g in (GROUP, 64, 32, 16) if not any(inside % g for inside in inputs))


def predicted_step(
    ceilings: Ceilings,
    config: ModelConfig,
    format: str,
    *,
    batch: int,
    context: int,
    launch_s: float | None = None,
    dtype: str = "bfloat16",
) -> tuple[StepCosts, Prediction]:
    """One new token for each of `batch` texts; the linears of the layers in the format, all else in dtype. launch_s: of
    one operation; default the ceilings'."""
    size, bits = getattr(torch, dtype).itemsize, FORMATS[format].bits
    weights = sum(out * inside for out, inside in linear_shapes(config))
    costs = decode_costs(
        config,
        batch=batch,
        context=context,
        weight_bytes_per_element=size,
        linear_bytes_per_element=size if bits is None else linear_bytes(config, format, group_for(config)) / weights,
        kv_bytes_per_element=2 if ceilings.of_gpu else stored_dtype(getattr(torch, dtype), "cpu").itemsize,
        kv="paged",
        arrangement=prepared_on(ceilings, config),
        recorded=ceilings.of_gpu,
    )
    if launch_s is not None:
        ceilings = dataclasses.replace(ceilings, launch_s=launch_s, dispatch=())
    return costs, predict(costs, ceilings, dtype)


def on_card(
    card: str, shape: str, format: str, *, context: int, eager_launch_us: float
) -> dict[str, list[tuple[int, float, str]]]:
    """{"eager", "graph": [(texts, seconds of a step, what binds), …]} of a public shape on a card."""
    config, launches = shape_of(shape), {"eager": eager_launch_us / 1e6, "graph": PUBLISHED[card].launch_s}
    found: dict[str, list[tuple[int, float, str]]] = {}
    for start, launch_s in launches.items():
        for batch in BATCHES:
            _, expected = predicted_step(
                PUBLISHED[card], config, format, batch=batch, context=context, launch_s=launch_s
            )
            found.setdefault(start, []).append((batch, expected.seconds, expected.limit))
    return found


def predict_decode(
    ceilings: Ceilings, *, model, formats: str, context: int, batch: int, **_: Any
) -> Sequence[tuple[float, float, str]]:
    """(bits of a weight, seconds of a step, what binds) at these ceilings' launch cost, by format."""
    found = []
    for name in formats_of(formats):
        _costs, expected = predicted_step(ceilings, shape_of(model), name, batch=batch, context=context)
        found.append((FORMATS[name].bits or 16, expected.seconds, expected.limit))
    return found


def formats_of(formats: str) -> tuple[str, ...]:
    return STORED if formats == ALL else (formats,)


# -- measured ------------------------------------------------------------------------------------------------------


class _Work:
    """One format at work: texts that all remember the same tokens, and the next step of them again and again."""

    def __init__(self, bench: Bench, decoder: Decoder, text: Sequence[int], batch: int) -> None:
        self.bench, self.decoder, self.text = bench, decoder, list(text)
        self.fast = prepare(decoder)
        self.kv = StaticPaged(
            decoder.config,
            max_sequences=batch,
            max_tokens=len(text) + STEPS + 1,
            dtype=stored_dtype(decoder.dtype, bench.device),
            device=bench.device,
            prefix=None,
        )
        self.names = list(range(batch))
        with torch.inference_mode():
            for at in range(0, len(text) - 1, CHUNK):
                bench.check_stop()
                chunk = self.text[at : min(at + CHUNK, len(text) - 1)]
                self.fast(Batch.of([chunk], sequences=[0], first_positions=[at], device=bench.device), self.kv)
            for name in self.names[1:]:
                self.kv.fork(0, name)
        self.graphs = GraphedSteps(self.fast, self.kv, largest=batch)

    def batch_at(self, step: int, device: str) -> Batch:
        """One token for each text, `step` after the last one that is remembered."""
        token, at = self.text[-1], len(self.text) - 1 + step
        return Batch.of(
            [[token]] * len(self.names), sequences=self.names, first_positions=[at] * len(self.names), device=device
        )

    def logits(self, start: str) -> torch.Tensor:
        """[B, V] after the whole text; everything as before when it returns."""
        with torch.inference_mode(start == "eager"), torch.no_grad():
            one = self.batch_at(0, self._batches_on(start))
            found = self.fast(one, self.kv) if start == "eager" else self._replayed(one)
            found = found.float().clone()
        self.forget()
        return found

    def _replayed(self, one: Batch) -> torch.Tensor:
        reason = self.graphs.why_eager(one)
        if reason:
            raise WorkbenchError(f"the step is not replayed: {reason}")
        return self.graphs.decode(one).logits

    def run(self, start: str) -> None:
        """STEPS steps, one after the other, and nothing that waits for the device between them."""
        with torch.inference_mode(start == "eager"), torch.no_grad():
            for step in range(STEPS):
                one = self.batch_at(step, self._batches_on(start))
                if start == "eager":
                    self.fast(one, self.kv)
                else:
                    self.graphs.decode(one)
        self.forget()

    def _batches_on(self, start: str) -> str:
        return self.bench.device if start == "eager" else "cpu"

    def forget(self) -> None:
        for name in self.names:
            self.kv.truncate(name, len(self.text) - 1)


def has_graphs(device: str) -> bool:
    """Whether a recorded step can be timed there."""
    return device.startswith("cuda")


def _made(bench: Bench, decoder: Decoder, format: str) -> Decoder:
    bench.check_stop()
    recipe = FORMATS[format].recipe(group_for(decoder.config))
    if recipe is None:
        return decoder
    bench.report(f"{decoder.name}: linears to {format}")
    return quantize(decoder, recipe, check_stop=bench.check_stop)


def run_decode(
    bench: Bench,
    *,
    model,
    formats: str,
    context: int,
    batch: int,
    card: str,
    eager_launch_us: float,
    peer: bool,
    repeats: int,
) -> Iterator[Measurement]:
    """For each format: on a GPU seconds of a step, eager and replayed in turns (unit "s"), and eager over replayed
    (unit "ratio"); elsewhere the operations that one replay starts (unit "operations") and no time. With `peer`, on a
    GPU, transformers' `generate` on the same shape. card and eager_launch_us are for the panel."""
    fits_context(shape_of(model), context + STEPS + 1)
    gpu = has_graphs(bench.device)
    decoder = bench.model(model, dtype="bfloat16") if gpu and isinstance(model, str) else bench.model(model)
    config, dtype = decoder.config, str(decoder.dtype).removeprefix("torch.")
    # beside the model that is loaded: joined matrices, or codes as stored and as arranged, or the peer's copy
    beside = 2 * config.num_parameters() * decoder.dtype.itemsize
    require_bytes(beside, bench.device, f"{decoder.name} in one more format at a time")
    text = text_ids(decoder, context + 1)
    shared = {**plain({"model": model}), "context": context, "batch": batch, "dtype": dtype}
    baseline: list[float] = []
    for name in formats_of(formats):
        bench.report(f"{decoder.name}, {name}: arranging, and reading {context} tokens")
        made = _made(bench, decoder, name)
        work = _Work(bench, made, text, batch)
        check = _checked(work, made, text)
        costs, expected = predicted_step(bench.ceilings(), config, name, batch=batch, context=context, dtype=dtype)
        counts = {**costs.counts(), "weight_bytes": costs.bytes_by_part["weights"]}
        settings = {**shared, "format": name if FORMATS[name].bits else dtype}
        if not gpu:
            recorded = work.graphs.recorded[work.graphs.sizes[-1]]
            assert recorded is not None, "the recorder without a GPU counts operations"
            yield bench.measurement(
                name="kernels.graphs",
                settings={**settings, "start": "graph"},
                samples=[recorded],
                unit="operations",
                counts=counts,
                check=f"{check}; {NO_TIME}",
            )
            continue
        pair = bench.measure_pair(
            functools.partial(work.run, "eager"), functools.partial(work.run, "graph"), repeats=repeats, warmup=2
        )
        for start, seconds in zip(STARTS, (pair.a_s, pair.b_s)):
            samples = [s / STEPS for s in seconds]
            yield bench.measurement(
                name="kernels.graphs",
                settings={**settings, "start": start},
                samples=samples,
                unit="s",
                counts=counts,
                predicted=expected.seconds,
                limit=expected.limit,
                check=check,
            )
        yield bench.measurement(
            name="kernels.graphs",
            settings={**settings, "start": "eager ÷ graph"},
            samples=[a / b for a, b in zip(pair.a_s, pair.b_s)],
            unit="ratio",
            check=f"both timed in alternation, {STEPS} steps a run",
        )
        baseline = baseline or [s / STEPS for s in pair.b_s]
        del work, made
    if peer:
        yield from _peer(bench, decoder, shared, baseline, repeats)


def _checked(work: _Work, decoder: Decoder, text: Sequence[int]) -> str:
    """In words, that the step, eager and replayed, gives what the plain model with these weights gives without a
    cache."""
    eager, replayed = work.logits("eager"), work.logits("graph")
    apart = float((eager - replayed).abs().max() / eager.abs().max())
    allowed = 1e-3 if decoder.dtype == torch.float32 else 5e-2
    if not apart <= allowed:
        raise WorkbenchError(f"a replayed step differs from an eager one by {apart:.2g} of the largest logit")
    how = agrees(
        replayed[-1], next_logits(decoder, text), "the plain model without a cache", torch.finfo(decoder.dtype).eps
    )
    return f"{how}; replayed and eager logits within {apart:.1g} of the largest"


# -- beside transformers -----------------------------------------------------------------------------------------------


def hf_model(config: ModelConfig, dtype: torch.dtype, device: str) -> Any:
    """transformers' model of that shape, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = config_to_hf(config, dtype)
    kind = values.pop("model_type")
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values), dtype=dtype)
    return made.eval()


def generating(model: Any, prompt: Sequence[int], batch: int, *, compiled: bool) -> Callable[[int], torch.Tensor]:
    """generate(n) -> [B, prompt + n] tokens, greedy, over a static cache."""
    from transformers import GenerationConfig

    ids = torch.tensor([list(prompt)] * batch, device=model.device)

    def generate(new_tokens: int) -> torch.Tensor:
        asked = GenerationConfig(
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
            eos_token_id=None,
            cache_implementation="static",
            disable_compile=not compiled,
        )
        with torch.no_grad():
            return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=asked)

    return generate


def _peer(
    bench: Bench, decoder: Decoder, shared: dict[str, Any], ours: Sequence[float], repeats: int
) -> Iterator[Measurement]:
    """Seconds a token of `generate`, the prompt taken out: what 4·STEPS tokens take more than STEPS. On a GPU it
    compiles its steps and records them as graphs; elsewhere this only shows that the call goes through, and gives no
    Measurement."""
    gpu = has_graphs(bench.device)
    bench.report("transformers: a model of the same shape")
    model = hf_model(decoder.config, decoder.dtype, bench.device)
    generate = generating(model, text_ids(decoder, shared["context"]), shared["batch"], compiled=gpu)
    few, many = (STEPS, 4 * STEPS) if gpu else (1, 2)
    found = generate(few)
    if found.shape != (shared["batch"], shared["context"] + few):
        raise WorkbenchError(f"transformers gave tokens of shape {list(found.shape)} where {few} a text were asked for")
    if not gpu:
        return
    bench.report("transformers: compiling")
    pair = bench.measure_pair(
        functools.partial(generate, many), functools.partial(generate, few), repeats=max(3, repeats // 4), warmup=2
    )
    samples = [(a - b) / (many - few) for a, b in zip(pair.a_s, pair.b_s)]
    counts = (
        {"times_as_long_as_our_graph": sorted(samples)[len(samples) // 2] / sorted(ours)[len(ours) // 2]}
        if ours
        else {}
    )
    yield bench.measurement(
        name="kernels.graphs",
        settings={**shared, "format": shared["dtype"], "start": PEER},
        samples=samples,
        unit="s",
        counts=counts,
        check=f"{many} tokens a text were written; weights are random, so which tokens says nothing",
    )


EXPERIMENT = Experiment(
    name="kernels.graphs",
    lab=10,
    question="What is left of a decode step when nothing waits for Python?",
    how=(
        "a step of texts over a paged cache, prepared, 16 steps a run, eager and as a CUDA graph in alternation,"
        " linears in 16, 8 and 4 bits; logits held to the plain model with the same weights. transformers: generate"
        " over a static cache, compiled, by the difference of two lengths. Without a GPU the step is recorded and"
        " replayed with torch.fx: operations are counted, results compared, and no time is taken. Predicted:"
        " operation by operation, the longer of its start and its bytes."
    ),
    settings=(
        Setting("model", "stdlib-1m", "model", help="random weights will do for times"),
        Setting("formats", ALL, "choice", choices=(ALL, *STORED), help="of the linears' weights"),
        Setting("context", 128, "choice", choices=CONTEXTS, unit="tokens", help="S, remembered by each text"),
        Setting("batch", 1, "choice", choices=BATCHES, unit="texts", help="B, that step together"),
        Setting("card", "h200", "choice", choices=tuple(PUBLISHED), help="of the prediction"),
        Setting(
            "eager_launch_us",
            EAGER_LAUNCH_US,
            "float",
            1.0,
            40.0,
            step=1.0,
            unit="µs",
            help="what a Python program takes to start one operation on the card; published for an A100's host: 28",
        ),
        Setting("peer", False, "flag", help="transformers' generate beside it, on a GPU"),
        Setting("repeats", 10, "int", 1, 100, brief=1, help="timed pairs of runs, on a GPU"),
    ),
    run=run_decode,
    limits=within_context("context", more=STEPS + 1),
    predict=predict_decode,
    record={
        "cpu": (),
        "cuda": (
            {"model": "llama-3.2-1b", "context": 512, "peer": True},
            {"model": "llama-3.1-8b", "context": 512, "peer": True},
            {"model": "llama-3.1-8b", "context": 1024, "batch": 32, "formats": "bfloat16"},
        ),
    },
)
