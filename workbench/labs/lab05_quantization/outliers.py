"""quantize.outliers: what a few outlier channels do to each way to round, in a model that computes the same with
them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.held_out import loss_without_kv, mean_and_error, passages_for
from workbench.experiments.inputs import MODEL, plain
from workbench.labs.lab05_quantization.inputs import calibration_for, quantized_linears_of
from workbench.quantization import Calibration, QuantizationRecipe, quantize
from workbench.quantization.int8_product import INT8, Int8Product
from workbench.quantization.llm_int8 import KeptOutliers
from workbench.quantization.outliers import CHANNELS, FACTOR, channel_sizes, largest_to_median, plant_outliers

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.decoder import Decoder
    from workbench.models.evaluation import HeldOutLoss

REFERENCE = "float32"
ORIGINAL, PLANTED, SMOOTHED = "original", "planted", "planted, smoothed"
EIGHT = {
    "int8": "int8, inputs too",
    "llm_int8": "LLM.int8()",
    "llm_int8 live": "LLM.int8(), live",
    "smoothquant": "SmoothQuant",
    "rtn 8": "RTN 8 bits, weights only",
}
FOUR = {"rtn 4": "RTN 4 bits", "gptq 4": "GPTQ 4 bits", "awq 4": "AWQ 4 bits"}
TITLES = EIGHT | FOUR
SELECTIONS = {"all": tuple(TITLES), "8 bits": tuple(EIGHT), "4 bits": tuple(FOUR)}
GRID = 10  # α of AWQ: enough here, and half the time of its default
SAME = 1e-3  # nats per token by which the planted model's loss may differ: rounding


def recipe_of(name: str, *, group: int, threshold: float, alpha: float) -> QuantizationRecipe:
    """The recipe behind a name of TITLES."""
    method, _, more = name.partition(" ")
    options: dict[str, Any] = {}
    if method == "llm_int8":
        options = {"threshold": threshold, "columns": more or "calibrated"}
    elif method == "smoothquant":
        options = {"alpha": alpha}
    elif method == "awq":
        options = {"grid": GRID}
    bits, group_of = (int(more), group) if more.isdigit() else (None, None)
    return QuantizationRecipe(method, bits, group_of, options=options)


def run_outliers(
    bench: Bench,
    *,
    model,
    channels: int,
    factor: float,
    methods: str,
    group: int,
    threshold: float,
    alpha: float,
    sequences: int,
    length: int,
    context: int,
    passages: int,
) -> Iterator[Measurement]:
    """`measured` "channels": the largest input of each channel before q, k, v of the middle layer, of the original, the
    planted and the planted and smoothed model; then "loss": held-out nats per token of either model in float32 and by
    every method. counts["excess"] is against the same model in float32, passage by passage."""
    decoder = bench.model(model)
    rows = passages_for(decoder, context, passages)
    calibration = calibration_for(bench, decoder, sequences, length)
    planted = plant_outliers(decoder, channels=channels, factor=factor)
    settings = plain(
        {
            "model": model,
            "channels": channels,
            "factor": factor,
            "group": group,
            "threshold": threshold,
            "alpha": alpha,
            "context": context,
            "passages": passages,
        }
    )
    models = {ORIGINAL: decoder, PLANTED: planted}
    recipes = {name: recipe_of(name, group=group, threshold=threshold, alpha=alpha) for name in SELECTIONS[methods]}
    smoothed = _quantized(
        bench, planted, recipe_of("smoothquant", group=group, threshold=threshold, alpha=alpha), calibration, SMOOTHED
    )
    for weights, one in {**models, SMOOTHED: smoothed}.items():
        bench.check_stop()
        bench.report(f"{weights}: inputs of every channel")
        yield _channels(bench, one, calibration, {**settings, "weights": weights, "measured": "channels"})
    full: dict[str, HeldOutLoss] = {}
    for weights, one in models.items():
        full[weights] = loss_without_kv(bench, one, rows, f"{weights}, {REFERENCE}")
        check = "the model as it is" if weights == ORIGINAL else check_same_function(full[ORIGINAL], full[PLANTED])
        about = {**settings, "weights": weights, "measured": "loss", "method": REFERENCE}
        yield _loss(bench, full[weights], full[weights], about, {}, check)
    for number, (name, recipe) in enumerate(recipes.items()):
        for weights, one in models.items():
            what = f"method {number + 1} of {len(recipes)}, {TITLES[name]}, {weights}"
            is_there = name == "smoothquant" and weights == PLANTED
            new = smoothed if is_there else _quantized(bench, one, recipe, calibration, what)
            found = loss_without_kv(bench, new, rows, what)
            about = {**settings, "weights": weights, "measured": "loss", "method": name}
            yield _loss(bench, found, full[weights], about, _bytes(new), check_products(new))


def _quantized(
    bench: Bench, model: Decoder, recipe: QuantizationRecipe, calibration: Calibration, what: str
) -> Decoder:
    return quantize(
        model,
        recipe,
        calibration if recipe.make().needs_inputs else None,
        report=lambda stage: bench.report(f"{what} ({stage.replace(' of ', '/')})"),
        check_stop=bench.check_stop,
    )


def _channels(bench: Bench, model: Decoder, calibration: Calibration, settings: dict[str, Any]) -> Measurement:
    sizes = channel_sizes(model, calibration)
    behind_norms = {name: x for name, x in sizes.items() if not name.endswith(("attention.o", "mlp.down", "q_up"))}
    middle = f"layers.{model.config.num_layers // 2}."
    shown = next(name for name in behind_norms if name.startswith(middle))
    every, others = list(behind_norms.values()), [x for name, x in sizes.items() if name not in behind_norms]
    return bench.measurement(
        name="quantize.outliers",
        settings={**settings, "linear": shown},
        samples=sizes[shown].tolist(),
        unit="largest |x|",
        counts={
            "largest_to_median": largest_to_median(sizes[shown]),
            "largest_to_median_behind_norms": max(map(largest_to_median, every)),
            "largest_to_median_elsewhere": max(map(largest_to_median, others)),
            "channels_above_threshold": int((sizes[shown] > settings["threshold"]).sum()),
            "share_above_threshold_behind_norms": _share_above(every, settings["threshold"]),
            "share_above_threshold_elsewhere": _share_above(others, settings["threshold"]),
            "tokens": calibration.num_tokens,
        },
        check="over the calibration text; one sample a channel, in their order",
    )


def _share_above(sizes: list[torch.Tensor], threshold: float) -> float:
    return float((torch.cat(sizes) > threshold).float().mean())


def check_same_function(original: HeldOutLoss, planted: HeldOutLoss) -> str:
    """In words, how far the losses of a token are apart. Raises WorkbenchError where that is no rounding."""
    apart = float((original.losses - planted.losses).abs().max())
    if not apart <= SAME:
        raise WorkbenchError(
            f"the planted model's loss of a token differs by {apart:.3g} nats from the original's, so it computes "
            "something else: everything was thrown away"
        )
    return f"computes the same as the original: token by token their losses differ by at most {apart:.1g} nats"


def _bytes(model: Decoder) -> dict[str, float]:
    linears = list(quantized_linears_of(model).values())
    weights = sum(one.in_features * one.out_features for one in linears)
    nbytes = sum(one.nbytes for one in linears)
    kept = [one.stored for one in linears if isinstance(one.stored, KeptOutliers)]
    counts = {"linear_bytes": nbytes, "bits_per_weight": 8 * nbytes / weights}
    if kept:
        counts["share_in_16_bits"] = sum(s.num_outliers * s.out_features for s in kept) / weights
    return counts


def check_products(model: Decoder) -> str:
    """What was verified of every linear, on random inputs: it is off the product with its dequantized weight by no more
    than rounding its inputs can do, half a step of each times its weight. Raises WorkbenchError where one is."""
    largest = 0.0
    for name, linear in quantized_linears_of(model).items():
        stored = linear.stored
        x = torch.randn(3, stored.in_features, generator=torch.Generator().manual_seed(0)).to(model.device)
        weight = stored.dequantize().double()
        off = (stored.multiply(x).double() - x.double() @ weight.T).abs()
        rounds = isinstance(stored, Int8Product | KeptOutliers)
        step = x.double().abs().amax(1, keepdim=True) / INT8.highest if rounds else torch.zeros(1)
        bound = (0.5 * step.to(weight.device) + 1e-5 * x.double().abs().amax()) * weight.abs().sum(1)
        share = float((off / bound.clamp(min=1e-12)).max())
        if not share <= 1:
            raise WorkbenchError(f"{name}: a product is off by {share:.3g} times its bound; the loss was thrown away")
        largest = max(largest, share)
    return (
        "every product is within its bound of that with the dequantized weight; the nearest to it reaches"
        f" {largest:.1%}"
    )


def _loss(
    bench: Bench, found: HeldOutLoss, full: HeldOutLoss, settings: dict[str, Any], counts: dict[str, float], check: str
) -> Measurement:
    end = settings["context"]
    excess, error = mean_and_error(found.between(1, end) - full.between(1, end))
    return bench.measurement(
        name="quantize.outliers",
        settings=settings,
        samples=[found.nats_per_token],
        unit="nats/token",
        counts={
            "tokens": found.tokens,
            "perplexity": found.perplexity,
            "excess": excess,
            "excess_standard_error": error,
            **counts,
        },
        check=check,
    )


EXPERIMENT = Experiment(
    name="quantize.outliers",
    lab=5,
    question="What do a few outlier channels do to each way to round, and what rescues it?",
    how=(
        "outlier channels are planted behind every norm of the trained model: scaled up there, their consumers' columns"
        " scaled down, so that it computes the same. Both models are quantized with the same calibration text of"
        " training modules; the loss is over the same passages of held-out modules, its excess over the same model in"
        " float32, ± the standard error over the passages."
    ),
    settings=(
        MODEL,
        Setting(
            "channels",
            CHANNELS,
            "int",
            1,
            64,
            help="how many are planted, the same in all layers (large models have about 6)",
        ),
        Setting(
            "factor",
            FACTOR,
            "choice",
            choices=(2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0),
            help="how many times larger they become",
        ),
        Setting("methods", "all", "choice", choices=tuple(SELECTIONS), help="which are compared"),
        Setting(
            "group", 64, "choice", choices=(8, 16, 32, 64, 128), help="inputs that share a scale, in RTN, GPTQ, AWQ"
        ),
        Setting(
            "threshold", 6.0, "float", 0.5, 1000, step=0.5, help="of LLM.int8(): a larger input makes an outlier column"
        ),
        Setting("alpha", 0.5, "float", 0.0, 1.0, step=0.05, help="of SmoothQuant: how much goes into the weights"),
        Setting("sequences", 4, "int", 1, 64, help="pieces of calibration text, from training modules"),
        Setting("length", 128, "choice", choices=(16, 32, 64, 128, 256, 512), unit="tokens", help="of each of them"),
        Setting(
            "context", 256, "choice", choices=(32, 64, 128, 256, 512, 1024), unit="tokens", help="tokens of a passage"
        ),
        Setting("passages", 6, "int", 2, 100, brief=2, help="passages of the held-out modules, the same for all"),
    ),
    run=run_outliers,
    predict=no_times,
    record={"cpu": ({"sequences": 16, "passages": 24},), "cuda": ()},
)
