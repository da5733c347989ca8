"""quantize.stored_formats: a decode step with weights in fewer bits, predicted by bytes and arithmetic, measured, and
held to its oracle."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.cached_steps import rounding, same_token
from workbench.experiments.contract import Experiment, Limits, Setting
from workbench.experiments.inputs import MODEL, next_logits, plain, shape_of, text_ids
from workbench.experiments.loops import Loops
from workbench.experiments.steps import CONTEXTS, fits_context, kv_element_bytes, loaded
from workbench.instruments.bench import steps_of
from workbench.instruments.costs import decode_costs, predict, prepared_on
from workbench.instruments.memory import require_bytes
from workbench.kv import kv_for
from workbench.labs.lab02_where_time_goes.compile_step import why_no_compiler
from workbench.labs.lab05_quantization.inputs import linears_of
from workbench.models import prepare
from workbench.models.assembly import hollow_decoder
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.fast_layers import joined
from workbench.models.linear import linear_class
from workbench.models.native_steps import why_not_shape
from workbench.quantization import QuantizationRecipe, quantize

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction, StepCosts
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.models.decoder import Decoder

IN_ONE_CALL = ("compiled", "native")  # a step starts nothing
LOOPS_OF = {"fast": "eager", "compiled": "compiled", "native": "native"}  # arrangement -> kind of steps
ARRANGEMENTS = tuple(LOOPS_OF)
BESIDE = ("random-110m", "nothing")
CALLS = 20  # of one product in a row, so that its weights are in the cache
SCALE_BYTES = 2  # of a scale, and of a zero


@dataclass(frozen=True)
class StoredFormat:
    """What the linears of the layers are stored in; head, embedding and norms stay in the model's type."""

    name: str
    dtype: str  # of all else, and of the arithmetic around the codes
    bits: int | None = None  # None: as the model's type has it
    whole_rows: bool = False  # symmetric, one scale an output; else affine groups

    def recipe(self, group: int) -> QuantizationRecipe | None:
        if self.bits is None:
            return None
        if self.whole_rows:
            return QuantizationRecipe("rtn", self.bits, options={"symmetric": True, "whole_rows": True})
        return QuantizationRecipe("rtn", self.bits, group)

    def linear_bytes(self, out: int, inside: int, group: int) -> float:
        """Of one matrix: codes, scales and zeros."""
        if self.bits is None:
            return out * inside * getattr(torch, self.dtype).itemsize
        scales = out if self.whole_rows else 2 * out * inside // group
        return out * inside * self.bits / 8 + scales * SCALE_BYTES


FORMATS = {
    one.name: one
    for one in (
        StoredFormat("float32", "float32"),
        StoredFormat("bfloat16", "bfloat16"),
        StoredFormat("int8, float32 inputs", "float32", 8, whole_rows=True),
        StoredFormat("int8", "bfloat16", 8, whole_rows=True),
        StoredFormat("int4", "bfloat16", 4),
    )
}
PAIRS = (("int8", "bfloat16"), ("int4", "bfloat16"), ("int8", "float32"), ("int8, float32 inputs", "float32"))


# -- predicted -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def linear_shapes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """[out, in] of every linear of the layers, without loading a model."""
    found = linears_of(hollow_decoder(config, name="")).values()
    return tuple((linear.out_features, linear.in_features) for linear in found)


def linear_bytes(config: ModelConfig, format: str, group: int) -> float:
    """What the linears of the layers take in a format: all of it is read in a step."""
    return sum(FORMATS[format].linear_bytes(*shape, group) for shape in linear_shapes(config))


def predicted_step(
    ceilings: Ceilings, config: ModelConfig, format: str, *, context: int, group: int, arrangement: str
) -> tuple[StepCosts, Prediction]:
    """(StepCosts, Prediction) of one new token. In one call nothing is started, so no launch is counted. On a CPU each
    product is counted in the loop that computes it."""
    dtype = FORMATS[format].dtype
    weights = sum(out * inside for out, inside in linear_shapes(config))
    costs = decode_costs(
        config,
        batch=1,
        context=context,
        weight_bytes_per_element=getattr(torch, dtype).itemsize,
        linear_bytes_per_element=linear_bytes(config, format, group) / weights,
        kv_bytes_per_element=kv_element_bytes(ceilings, dtype),
        arrangement="fast" if arrangement in IN_ONE_CALL else prepared_on(ceilings, config),
    )
    if ceilings.of_gpu:
        costs = costs.in_one_call() if arrangement in IN_ONE_CALL else costs
    else:
        costs = Loops(LOOPS_OF[arrangement], getattr(torch, dtype), FORMATS[format].bits).counted(costs)
    return costs, predict(costs, ceilings, dtype)


def models_of(model: str | Decoder, beside: str) -> list[str | Decoder]:
    return [model] if beside == "nothing" else [model, beside]


def predict_formats(
    ceilings: Ceilings, *, model, beside: str, context: int, group: int, arrangement: str, **_: Any
) -> dict[str, list[tuple[str, float, str]]]:
    """{model: [(format, seconds of a step, limit), …]}."""
    found = {}
    for one in models_of(model, beside):
        config = shape_of(one)
        steps = [
            (f, predicted_step(ceilings, config, f, context=context, group=group, arrangement=arrangement)[1])
            for f in FORMATS
        ]
        found[plain({"model": one})["model"]] = [(f, p.seconds, p.limit) for f, p in steps]
    return found


def predict_decode(ceilings: Ceilings, **settings: Any) -> Sequence[tuple[float, float, str]]:
    """(megabytes of weights in the layers, seconds of a step, limit): formats of the model, then of the one beside
    it."""
    models, group = models_of(settings["model"], settings["beside"]), settings["group"]
    steps = predict_formats(ceilings, **settings)
    return [
        (linear_bytes(shape_of(one), f, group) / 1e6, seconds, limit)
        for one, points in zip(models, steps.values())
        for f, seconds, limit in points
    ]


# -- measured --------------------------------------------------------------------------------------------------


class _Steps:
    """One format at work: a cache that remembers the text, and the next token again and again."""

    def __init__(self, bench: Bench, format: str, model: Decoder, text: Sequence[int], arrangement: str) -> None:
        self.bench, self.format, self.model, self.text = bench, format, model, text
        self.fast = prepare(model, **steps_of(arrangement))
        if self.fast.why_not_native and arrangement == "native":
            raise WorkbenchError(f"{format} has no native steps: {self.fast.why_not_native}")
        self.kv = kv_for("contiguous", self.fast, max_tokens=len(text))
        self.samples: list[float] = []
        self.logits = torch.empty(0)  # [V] of the last step
        with torch.inference_mode():
            self._send(0, len(text) - 1)

    @torch.inference_mode()
    def step(self) -> float:
        """Seconds of the last token of the text; the cache forgets it again, outside the clock."""
        seconds = self.bench.measure(self._next, repeats=1, warmup=0)[0]
        self.kv.truncate(0, len(self.text) - 1)
        return seconds

    def _next(self) -> None:
        self.logits = self._send(len(self.text) - 1, len(self.text))[-1]

    def _send(self, start: int, end: int) -> torch.Tensor:
        batch = Batch.of([self.text[start:end]], first_positions=[start], device=self.fast.device)
        return self.fast(batch, self.kv)

    @torch.inference_mode()
    def weights_per_s_in_cache(self) -> float:
        """Through one matrix that has just been read: what its arithmetic allows, whatever the memory's speed."""
        module = self.model.layers[0].attention.o
        linear = joined(linear_class("auto", self.model.dtype, self.model.device), self.model.dtype, module)
        row = torch.ones(1, linear.in_features, dtype=self.model.dtype, device=self.model.device)

        def calls() -> None:
            for _ in range(CALLS):
                linear(row)

        seconds = min(self.bench.measure(calls, repeats=5))
        return CALLS * linear.in_features * linear.out_features / seconds


def run_decode(
    bench: Bench, *, model, beside: str, context: int, group: int, arrangement: str, repeats: int
) -> Iterator[Measurement]:
    """For each model a Measurement a format (unit "s"), the formats in turns, then their ratios turn by turn (unit
    "ratio")."""
    models = models_of(model, beside)
    for one in models:
        fits_context(shape_of(one), context + 1)
        _check_groups(shape_of(one), group)
    missing = why_no_compiler(bench.device) if arrangement in IN_ONE_CALL else ""
    if missing:
        raise WorkbenchError(missing)
    ceilings = bench.ceilings()
    for one in models:
        settings = {**plain({"model": one}), "context": context, "group": group, "arrangement": arrangement}
        yield from _formats_of(bench, ceilings, one, settings, repeats)


def _check_groups(config: ModelConfig, group: int) -> None:
    odd = {inside for _, inside in linear_shapes(config) if inside % group}
    if odd:
        raise WorkbenchError(
            f"groups of {group} do not divide the {min(odd)} inputs of a linear of this model; choose another group"
        )


def _formats_of(
    bench: Bench, ceilings: Ceilings, model: str | Decoder, settings: dict[str, Any], repeats: int
) -> Iterator[Measurement]:
    config = shape_of(model)
    require_bytes(4 * 4 * config.num_parameters(), bench.device, "the model in all formats, each twice")
    steps, oracles = {}, {}
    text: list[int] = []
    for name in FORMATS:
        made = _made(bench, model, name, settings["group"])
        text = text or text_ids(made, settings["context"] + 1)
        bench.report(f"{settings['model']}, {name}: arranging, and reading {settings['context']} tokens")
        steps[name] = _Steps(bench, name, made, text, settings["arrangement"])
        bench.check_stop()
        oracles[name] = next_logits(made, text)
    for turn in range(-1, repeats):
        for name, one in steps.items():
            bench.check_stop()
            if turn < 1:
                bench.report(f"{settings['model']}, {name}: " + ("warming up" if turn < 0 else "steps in turns"))
            seconds = one.step()
            if turn >= 0:
                one.samples.append(seconds)
    predicted = {}
    for name, one in steps.items():
        found = _measurement(bench, ceilings, config, one, oracles[name], settings)
        assert found.predicted is not None
        predicted[name] = found.predicted
        yield found
    for a, b in PAIRS:
        yield bench.measurement(
            name="quantize.stored_formats",
            settings={**settings, "format": f"{a} ÷ {b}"},
            samples=[x / y for x, y in zip(steps[a].samples, steps[b].samples)],
            unit="ratio",
            predicted=predicted[a] / predicted[b],
            check="steps of both timed in turns, on the same tokens",
        )


def _made(bench: Bench, model: str | Decoder, name: str, group: int) -> Decoder:
    """The model in that type, its linears in that format."""
    bench.check_stop()
    full, recipe = loaded(bench, model, FORMATS[name].dtype), FORMATS[name].recipe(group)
    if recipe is None:
        return full
    bench.report(f"{full.name}: linears to {name}")
    made = quantize(full, recipe, check_stop=bench.check_stop)
    assert made.quantization.nbytes == round(_quantized_bytes(made, name, group)), name
    return made


def _quantized_bytes(model: Decoder, name: str, group: int) -> float:
    """By formula, with the biases, which are kept beside the codes."""
    biases = sum(0 if one.bias is None else one.bias.nbytes for one in linears_of(model).values())
    return linear_bytes(model.config, name, group) + biases


def _measurement(
    bench: Bench, ceilings: Ceilings, config: ModelConfig, one: _Steps, oracle: torch.Tensor, settings: dict
) -> Measurement:
    shared = {key: settings[key] for key in ("context", "group", "arrangement")}
    costs, expected = predicted_step(ceilings, config, one.format, **shared)
    counts = {
        **costs.counts(),
        "weight_bytes": costs.bytes_by_part["weights"],
        "linear_bytes": linear_bytes(config, one.format, settings["group"]),
        "weight_bytes_held": one.fast.weight_bytes,
    }
    if settings["arrangement"] == "fast":
        counts["weights_per_s_in_cache"] = one.weights_per_s_in_cache()
    return bench.measurement(
        name="quantize.stored_formats",
        settings={**settings, "format": one.format},
        samples=one.samples,
        unit="s",
        counts=counts,
        predicted=expected.seconds,
        limit=expected.limit,
        check=_checked(one, oracle),
    )


def _checked(one: _Steps, oracle: torch.Tensor) -> str:
    """In words, that the timed step gives what the plain model with these weights gives without a cache.

    Raises WorkbenchError where it does not: a time is worth nothing when the output is wrong.
    """
    logits, dtype = one.logits.float(), one.model.dtype
    apart = float((logits - oracle).abs().max())
    if apart > rounding(oracle, dtype):
        raise WorkbenchError(
            f"{one.format}: logits differ by {apart / float(oracle.abs().max()):.2g} of the largest from those of the "
            "dequantized weights, more than rounding: the output is wrong, so its time was thrown away"
        )
    same = same_token(logits, int(oracle.argmax()), dtype, f"{one.format}: the next token")
    forms = ", ".join(dict.fromkeys(form for name, form in one.fast.forms.items() if name != "head"))
    if one.fast.steps == "native":  # which reads them as they are stored, and not in those forms
        bits = FORMATS[one.format].bits
        forms = "plain" if bits is None else f"codes of {bits} bits"
    token = "the same next token" if same else "another next token, within rounding,"
    return (
        f"{token} as the plain model with these weights, logits apart by {apart / float(oracle.abs().max()):.1g} of the"
        f" largest; linears held as: {forms}"
    )


GROUPS = (16, 32, 64, 128)


def group_limits(*, model: str | Decoder, beside: str, **_: Any) -> Limits:
    """Groups that divide the inputs of every linear, models that have such a group, and arrangements that these models
    have steps for."""

    def divides(group: int, *models: str | Decoder) -> bool:
        return not any(wide % group for one in models for _, wide in linear_shapes(shape_of(one)))

    return {
        "model": lambda one: any(divides(group, one) for group in GROUPS),
        "group": lambda group: divides(group, *models_of(model, beside)),
        "arrangement": lambda name: not any(_no_steps(name, shape_of(one)) for one in models_of(model, beside)),
    }


def _no_steps(arrangement: str, config: ModelConfig) -> bool:
    """Whether a model of this shape has no steps of that kind anywhere."""
    if arrangement == "native":
        return bool(why_not_shape(config))
    return arrangement == "compiled" and config.experts is not None


EXPERIMENT = Experiment(
    name="quantize.stored_formats",
    lab=5,
    question="Weights in fewer bits are fewer bytes to read: how much sooner is the next token there?",
    how=(
        "one new token after the same text, again and again, the formats in turns after a warm-up; logits are held to"
        " those of the plain model with the dequantized weights, bytes to the formula. A prediction is of the shape and"
        " this machine's ceilings: each product takes the longer of its bytes and, of codes and in native steps, its"
        " multiply-accumulates at the rate that was measured of its loop; run eagerly, the launches come on top."
        " Products of codes in compiled steps, whose rate nobody measured, count at that of our loop, which is faster."
    ),
    settings=(
        MODEL,
        Setting(
            "beside",
            BESIDE[0],
            "choice",
            choices=BESIDE,
            help="a larger shape with random weights, far beyond the cache of a CPU, or nothing",
        ),
        Setting("context", 64, "choice", choices=CONTEXTS[:6], unit="tokens", help="S, remembered by the sequence"),
        Setting("group", 64, "choice", choices=GROUPS, help="inputs that share a scale, in int4"),
        Setting(
            "arrangement",
            "fast",
            "choice",
            choices=ARRANGEMENTS,
            help="arranged for inference; its steps through torch.compile too (minutes for the larger shape); or each "
            "step one function in C++",
        ),
        Setting("repeats", 15, "int", 1, 200, brief=1, help="timed steps of each format"),
    ),
    run=run_decode,
    limits=group_limits,
    predict=predict_decode,
    record={
        "cpu": ({}, {"arrangement": "compiled", "beside": BESIDE[-1]}),
        "cuda": (),
    },  # a GPU has no kernel for codes here until lab 10
)
