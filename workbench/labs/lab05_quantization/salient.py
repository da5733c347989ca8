"""quantize.salient: a few input channels kept in 16 bits beside rounded weights, chosen by activation, by weight or at
random.

It is the measurement with which AWQ persuades (Lin et al., arXiv 2306.00978 §3.1 and table 1): OPT-6.7B in 3 bits has a
perplexity of 23.54; with 1 % of the channels in FP16, 11.39 if those with the largest inputs are kept, 22.37 if those
with the largest weights are, 24.23 at random. Here the same is measured on a small model twice: as it is, and with
planted outlier channels (`workbench.quantization.outliers`), which compute the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.held_out import loss_without_kv, mean_and_error, passages_for
from workbench.experiments.inputs import MODEL, plain
from workbench.labs.lab05_quantization.inputs import LENGTH, SEQUENCES, calibration_for, linears_of
from workbench.labs.lab05_quantization.outliers import ORIGINAL, PLANTED, check_same_function
from workbench.quantization import Calibration, IntegerFormat
from workbench.quantization.calibration import Reading
from workbench.quantization.outliers import BEHIND_NORMS, plant_outliers
from workbench.quantization.pipeline import copy_of
from workbench.quantization.stored import Grouped

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.decoder import Decoder

NAME = "quantize.salient"
ACTIVATION, WEIGHT, RANDOM = "by activation", "by weight", "at random"
WAYS = (ACTIVATION, WEIGHT, RANDOM)
SHARES = (0.001, 0.01, 0.03)  # of a linear's input channels, as in the paper's table 1
READ_NORMS = (*BEHIND_NORMS, "attention.k", "attention.v")  # linears behind a norm, whose channels are planted
INDEX_BYTES = 4  # which channel a kept column belongs to
PLANTED_CHANNELS, PLANTED_FACTOR = 3, 32.0


def num_kept(channels: int, share: float) -> int:
    """How many of a linear's input channels are kept: the nearest number, and at least one."""
    return max(1, round(share * channels))


def scores_of(way: str, weight: torch.Tensor, mean_abs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """[in]: the channels with the largest are kept. weight [out, in]; mean_abs [in]: mean |x| of each channel."""
    if way == ACTIVATION:
        return mean_abs
    if way == WEIGHT:
        return weight.norm(dim=0)
    return torch.rand(weight.shape[1], generator=generator)


def kept_bytes(rounded: Grouped, kept: int) -> int:
    """Codes, scales and zeros of all columns (a group keeps its shape), and beside them the kept columns in 16 bits,
    with the number of each."""
    return rounded.nbytes + kept * (2 * rounded.out_features + INDEX_BYTES)


@torch.no_grad()
def mean_inputs(model: Decoder, calibration: Calibration) -> dict[str, torch.Tensor]:
    """{"0.attention.q": mean |x| of each input channel [in], …} of all linears over the calibration text."""
    reading, means = Reading(model, calibration), {}
    for index, layer in enumerate(model.layers):
        names = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
        for name, inputs in reading.inputs(names).items():
            means[f"{index}.{name}"] = inputs.mean_abs
        reading.step()
    return means


def _linears(model: Decoder) -> dict[str, nn.Linear]:
    """Those of a model that is not quantized. Raises WorkbenchError for another."""
    linears = {name: one for name, one in linears_of(model).items() if isinstance(one, nn.Linear)}
    if len(linears) < len(linears_of(model)):
        raise WorkbenchError(f"{model.name} is quantized; channels are kept of a model in float32")
    return linears


class Salient:
    """A model whose linears were rounded once; `keeping` puts some columns back."""

    def __init__(self, model: Decoder, means: Mapping[str, torch.Tensor], bits: int, group: int) -> None:
        self.model, self.means = model, means
        self.weights = {name: linear.weight.detach().float() for name, linear in _linears(model).items()}
        self.rounded = {name: Grouped.rounded(w, IntegerFormat(bits), group) for name, w in self.weights.items()}

    def chosen(self, way: str, share: float, seed: int = 0) -> dict[str, torch.Tensor]:
        """{linear: the channels that are kept, ascending}."""
        generator = torch.Generator().manual_seed(seed)
        channels = {}
        for name, weight in self.weights.items():
            scores = scores_of(way, weight, self.means[name], generator)
            channels[name] = scores.topk(num_kept(weight.shape[1], share)).indices.sort().values
        return channels

    @torch.no_grad()
    def keeping(self, chosen: Mapping[str, torch.Tensor]) -> Decoder:
        """A copy with rounded weights, but for these columns, which are in float16. {}: all are rounded (RTN)."""
        new = copy_of(self.model)
        for name, linear in _linears(new).items():
            weight = self.rounded[name].dequantize()
            if name in chosen:
                at = chosen[name]
                weight[:, at] = self.weights[name][:, at].to(torch.float16).float()
            linear.weight = nn.Parameter(weight.to(linear.weight.dtype), requires_grad=False)
        return new

    def counts(self, chosen: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Channels, kept channels, and bytes, of all linears."""
        none = torch.empty(0)
        nbytes = sum(kept_bytes(one, len(chosen.get(name, none))) for name, one in self.rounded.items())
        return {
            "channels": sum(one.in_features for one in self.rounded.values()),
            "kept_channels": sum(map(len, chosen.values())),
            "linear_bytes": nbytes,
            "bits_per_weight": 8 * nbytes / sum(w.numel() for w in self.weights.values()),
        }


def run_salient(
    bench: Bench,
    *,
    model,
    bits: int,
    group: int,
    channels: int,
    factor: float,
    seeds: int,
    sequences: int,
    length: int,
    context: int,
    passages: int,
) -> Iterator[Measurement]:
    """For the model as it is and the planted one: `measured` "float32", "rtn", and "kept" for each way and share (at
    random: a sample for each seed). counts["excess"]: nats per token above float32; counts["recovered"]: the share of
    RTN's excess that is gone, its error passage by passage; counts["planted_kept"]: of the planted channels, over all
    linears that read them."""
    decoder = bench.model(model)
    rows = passages_for(decoder, context, passages)
    calibration = calibration_for(bench, decoder, sequences, length)
    width = decoder.config.hidden_size
    if channels > width:
        raise WorkbenchError(f"channels must be at most the {width} of {decoder.name}, got {channels}")
    at = torch.randperm(width, generator=torch.Generator().manual_seed(0))[:channels].sort().values.tolist()
    models = {ORIGINAL: decoder, PLANTED: plant_outliers(decoder, channels=at, factor=factor)}
    settings: dict[str, Any] = plain({"model": model, "bits": bits, "group": group, "channels": channels})
    settings |= {"factor": factor, "context": context, "passages": passages}
    full = {name: loss_without_kv(bench, one, rows, f"{name}, float32") for name, one in models.items()}
    same = check_same_function(full[ORIGINAL], full[PLANTED])

    for weights, one in models.items():
        bench.check_stop()
        bench.report(f"{weights}: inputs of every channel")
        salient = Salient(one, mean_inputs(one, calibration), bits, group)
        end, kind = context, weights

        def above(chosen: Mapping[str, torch.Tensor], what: str, kind=kind, salient=salient, end=end) -> torch.Tensor:
            """[P] nats per token above float32 of each passage."""
            losses = loss_without_kv(bench, salient.keeping(chosen), rows, f"{kind}: {what}")
            return losses.between(1, end) - full[kind].between(1, end)

        def measurement(samples: list[float], counts: dict[str, float], check: str, kind=kind, **what: Any):
            about = {**settings, "weights": kind, **what}
            return bench.measurement(
                name=NAME, settings=about, samples=samples, unit="nats/token", counts=counts, check=check
            )

        whole = full[weights].nats_per_token
        yield measurement(
            [whole], {"excess": 0.0}, "the model as it is" if weights == ORIGINAL else same, measured="float32"
        )
        rtn = above({}, "RTN")
        mean, error = mean_and_error(rtn)
        counts = {**salient.counts({}), "excess": mean, "excess_standard_error": error}
        yield measurement([whole + mean], counts, "every column is rounded", measured="rtn")
        for way in WAYS:
            for share in SHARES:
                runs, planted_kept = [], []
                for seed in range(seeds if way == RANDOM else 1):
                    chosen = salient.chosen(way, share, seed)
                    runs.append(above(chosen, f"{share:.1%} {way}"))
                    planted_kept.append(_share_of_planted(chosen, at))
                together = torch.stack(runs).mean(0)
                excess, error = mean_and_error(together)
                recovered, recovered_error = mean_and_error((rtn - together) / mean if mean else 0 * rtn)
                counts = {
                    **salient.counts(chosen),
                    "excess": excess,
                    "excess_standard_error": error,
                    "recovered": recovered,
                    "recovered_standard_error": recovered_error,
                    "planted_kept": sum(planted_kept) / len(planted_kept),
                }
                samples = [whole + float(run.mean()) for run in runs]
                words = f"the same passages as RTN; {len(runs)} drawing{'s' * (len(runs) > 1)} of channels"
                yield measurement(samples, counts, words, measured="kept", way=way, share=share)


def _share_of_planted(chosen: Mapping[str, torch.Tensor], planted: list[int]) -> float:
    """Of the columns that read a planted channel, in the linears behind norms, the share that is kept."""
    reads = [kept for name, kept in chosen.items() if name.split(".", 1)[1] in READ_NORMS]
    return sum(len(set(kept.tolist()) & set(planted)) for kept in reads) / (len(reads) * len(planted))


EXPERIMENT = Experiment(
    name=NAME,
    lab=5,
    question="Is it enough to keep 1 % of the channels in 16 bits, and which 1 %?",
    how=(
        "all linears of the layers are rounded to nearest in groups; then some input channels of each get their columns"
        " back in float16: those with the largest mean |x| on calibration text, with the largest column norm, or drawn"
        " at random. The loss is over the same held-out passages for all. The second model has planted outlier channels"
        " and computes the same."
    ),
    settings=(
        MODEL,
        Setting("bits", 3, "choice", choices=(2, 3, 4), help="of a weight"),
        Setting("group", 128, "choice", choices=(8, 16, 32, 64, 128), help="inputs that share a scale and a zero"),
        Setting("channels", PLANTED_CHANNELS, "int", 1, 64, help="how many outliers are planted, the same everywhere"),
        Setting(
            "factor",
            PLANTED_FACTOR,
            "choice",
            choices=(2.0, 4.0, 8.0, 16.0, 32.0, 64.0),
            help="how many times larger they become",
        ),
        Setting("seeds", 2, "int", 1, 10, brief=1, help="drawings of random channels"),
        SEQUENCES,
        replace(LENGTH, default=128),
        Setting("context", 256, "choice", choices=(32, 64, 128, 256, 512, 1024), unit="tokens", help="of a passage"),
        Setting("passages", 6, "int", 2, 100, brief=2, help="passages of the held-out modules, the same for all"),
    ),
    run=run_salient,
    predict=no_times,
    record={"cpu": (), "cuda": ()},
)
