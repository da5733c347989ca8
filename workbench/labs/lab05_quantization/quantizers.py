"""quantize.quantizers: every method of quantization on one model, one calibration text and one held-out text."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.held_out import loss_without_kv, mean_and_error, passages_for
from workbench.experiments.inputs import MODEL, plain, text_ids
from workbench.kv import Contiguous
from workbench.labs.lab05_quantization.inputs import (
    LENGTH,
    SEQUENCES,
    LayerOutputs,
    Saved,
    calibration_for,
    in_half_precision,
    saved,
    saved_in_half,
)
from workbench.labs.lab05_quantization.recipes import (
    HALF,
    REFERENCE,
    SELECTIONS,
    about,
    claim,
    divides,
    recipes_of,
    title,
)
from workbench.models import prepare
from workbench.models.batch import Batch
from workbench.models.decoder import Decoder
from workbench.quantization import QuantizationRecipe, quantize

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.evaluation import HeldOutLoss
    from workbench.models.fast import FastDecoder
    from workbench.quantization import Calibration

LOOKED_AT = 4  # passages on which the outputs of layers are compared, the first tokens of each
LOOKED_AT_TOKENS = 256
CONTEXT_TIMED = 32  # tokens before those that are timed
# of the largest logit, what an arrangement for inference may change
SAME = {torch.float32: 0.02, torch.float16: 0.1}


def run_table(
    bench: Bench, *, model, recipes: str, sequences: int, length: int, context: int, passages: int, repeats: int
) -> Iterator[Measurement]:
    """For the model as it is, in fp16, and by every recipe: `measured` "quality" (perplexity, with bytes, errors and
    seconds in its counts) and, but for the model as it is, "decode" (seconds of a step, in turns with the model as it
    is).

    Passages, calibration text and the text on which layers are compared are the same for all.
    """
    decoder = bench.model(model)
    rows = passages_for(decoder, context, passages)
    all_of_them = recipes_of(recipes)
    chosen = [recipe for recipe in all_of_them if divides(decoder, recipe)]
    calibration = calibration_for(bench, decoder, sequences, length)
    settings = plain(
        {
            "model": model,
            "recipes": recipes,
            "sequences": sequences,
            "length": length,
            "context": context,
            "passages": passages,
        }
    )
    judge = _Judge(bench, decoder, rows, settings, repeats)
    yield judge.original(left_out=len(all_of_them) - len(chosen))
    bench.check_stop()
    yield from judge.judged(_Made(in_half_precision(decoder), {"method": HALF}, saved_in_half(decoder), 0.0))
    for number, recipe in enumerate(chosen):
        bench.check_stop()
        yield from judge.judged(_make(bench, decoder, recipe, calibration, number + 1, len(chosen)))


@dataclass(frozen=True)
class _Made:
    """A model to judge, and what it took to make it."""

    model: Decoder
    about: dict[str, Any]  # method, bits, group, options
    kept: Saved
    seconds: float


def _make(
    bench: Bench, decoder: Decoder, recipe: QuantizationRecipe, calibration: Calibration, number: int, of: int
) -> _Made:
    """Calibration text is read where the method needs it: its seconds are the method's."""
    where = f"recipe {number} of {of}, {title(about(recipe))}"
    start = time.perf_counter()
    new = quantize(
        decoder,
        recipe,
        calibration if recipe.make().needs_inputs else None,
        report=lambda stage: bench.report(f"{where} ({stage.replace(' of ', '/')})"),
        check_stop=bench.check_stop,
    )
    return _Made(new, about(recipe), saved(new), time.perf_counter() - start)


class _Judge:
    """The same passages, the same inputs of layers and the same steps for every model."""

    def __init__(
        self, bench: Bench, decoder: Decoder, rows: torch.Tensor, settings: dict[str, Any], repeats: int
    ) -> None:
        self.bench, self.decoder, self.rows, self.settings = bench, decoder, rows, settings
        self.full = loss_without_kv(bench, decoder, rows, REFERENCE)
        self.outputs = LayerOutputs(decoder, rows[:LOOKED_AT, :LOOKED_AT_TOKENS])
        self.repeats, self.fast = repeats, prepare(decoder)
        self.rtn: dict[tuple[int | None, int | None], torch.Tensor] = {}  # (bits, group): nats above the reference

    def original(self, *, left_out: int) -> Measurement:
        in_half, item = saved_in_half(self.decoder), self.decoder.dtype.itemsize
        counts = self._losses(self.full) | {
            "linear_bytes": item * in_half.linear_weights,
            "saved_bytes": item * self.decoder.num_parameters(),
            "bits_per_weight": 8 * item,
            "layer_output_error": 0.0,
            "seconds_to_quantize": 0.0,
            "recipes_left_out": left_out,
        }
        return self._quality({"method": REFERENCE}, self.full, counts, "the model as it is computed here")

    def judged(self, made: _Made) -> Iterator[Measurement]:
        found = loss_without_kv(self.bench, made.model, self.rows, title(made.about))
        errors = self.outputs.errors(made.model)
        counts = self._losses(found) | {
            "linear_bytes": made.kept.linear_bytes,
            "saved_bytes": made.kept.file_bytes,
            "bits_per_weight": made.kept.bits_per_weight,
            "layer_output_error": sum(errors) / len(errors),
            "largest_layer_output_error": max(errors),
            "seconds_to_quantize": made.seconds,
        }
        compared, words = self._against_rtn(made, found)
        yield self._quality(made.about, found, counts | compared, words + made.kept.words)
        yield self._decode(made)

    def _above(self, found: HeldOutLoss) -> torch.Tensor:
        """[passages] nats per token above the reference."""
        end = self.rows.shape[1]
        return found.between(1, end) - self.full.between(1, end)

    def _losses(self, found: HeldOutLoss) -> dict[str, float]:
        excess, error = mean_and_error(self._above(found))
        return {
            "tokens": found.tokens,
            "nats_per_token": found.nats_per_token,
            "excess_nats": excess,
            "excess_standard_error": error,
        }

    def _against_rtn(self, made: _Made, found: HeldOutLoss) -> tuple[dict[str, float], str]:
        """(counts against RTN in as many bits and groups, passage by passage; what the recipe must show)."""
        at, above = (made.about.get("bits"), made.about.get("group")), self._above(found)
        if made.about["method"] == "rtn":
            self.rtn[at] = above
        rtn = None if made.about["method"] == "rtn" else self.rtn.get(at)
        counts: dict[str, float] = {}
        if rtn is not None:
            below, error = mean_and_error(rtn - above)
            counts = {"below_rtn_nats": below, "below_rtn_standard_error": error}
            if float(rtn.mean()) > 0:
                counts["share_of_rtn_excess"] = float(above.mean() / rtn.mean())
        words, holds = claim(made.about, above, rtn, found.perplexity / self.full.perplexity - 1)
        if holds is not None:
            counts["claim_holds"] = int(holds)
        return counts, f"{words}; " if words else ""

    def _quality(self, what: dict[str, Any], found: HeldOutLoss, counts: dict, check: str) -> Measurement:
        return self.bench.measurement(
            name="quantize.quantizers",
            settings={**self.settings, **what, "measured": "quality"},
            samples=[found.perplexity],
            unit="perplexity",
            counts=counts,
            check=check,
        )

    def _decode(self, made: _Made) -> Measurement:
        """A step of one token, in turns with the model as it is; both arranged for inference."""
        self.bench.check_stop()
        self.bench.report(f"{title(made.about)}: decode steps")
        model = _really_half(self.decoder) if made.about["method"] == HALF else made.model
        steps, reference = _Steps(prepare(model), self.repeats), _Steps(self.fast, self.repeats)
        apart = steps.difference(_Steps(model, 0))
        reference()
        if apart > SAME[model.dtype]:
            raise WorkbenchError(
                f"{title(made.about)}: arranged for inference its logits differ by {apart:.2g} of the largest from"
                " those of the plain form, more than rounding: the time was thrown away"
            )
        paired = self.bench.measure_pair(steps, reference, repeats=self.repeats)
        return self.bench.measurement(
            name="quantize.quantizers",
            settings={**self.settings, **made.about, "measured": "decode"},
            samples=paired.a_s,
            unit="s",
            counts={
                "ratio": paired.median_ratio,
                "ratio_p10": paired.p10,
                "ratio_p90": paired.p90,
                "reference_s": statistics.median(paired.b_s),
                "linear_bytes": made.kept.linear_bytes,
                "context": CONTEXT_TIMED,
                "largest_difference": apart,
            },
            check=f"logits of a step as in the plain form, within {apart:.1g} of the largest",
        )


def _really_half(decoder: Decoder) -> Decoder:
    memo = {} if decoder.tokenizer is None else {id(decoder.tokenizer): decoder.tokenizer}
    return copy.deepcopy(decoder, memo).half()


class _Steps:
    """Decode steps of one text: each call sends its next token."""

    @torch.inference_mode()
    def __init__(self, model: Decoder | FastDecoder, repeats: int) -> None:
        room = CONTEXT_TIMED + repeats + 2  # one to compare, one to warm up
        self._model, self._at = model, CONTEXT_TIMED
        self._ids = text_ids(model, room)
        self._kv = Contiguous(model.config, max_tokens=room, dtype=model.dtype, device=model.device)
        model(Batch.of([self._ids[:CONTEXT_TIMED]], device=model.device), self._kv)

    @torch.inference_mode()
    def __call__(self) -> torch.Tensor:
        token = self._ids[self._at]
        batch = Batch.of([[token]], first_positions=[self._at], device=self._model.device)
        self._at += 1
        return self._model(batch, self._kv)

    def difference(self, other: _Steps) -> float:
        """Of the next step's logits from those of another model, over the largest."""
        mine, others = self().float(), other().float()
        return float((mine - others).abs().max() / others.abs().max())


EXPERIMENT = Experiment(
    name="quantize.quantizers",
    lab=5,
    question="What does each method of quantization cost in bytes, quality and time?",
    how=(
        "every method gets the same model and the same calibration text from training modules; perplexity is over the"
        " same passages of held-out modules, excess in nats per token over float32, its standard error paired over the"
        " passages. Every layer is given what the original gives it, and its output compared. Bytes are those of the"
        " linears with their scales, and of a file really written, in which all else is in bfloat16. Decode steps run"
        " in turns with float32."
    ),
    settings=(
        MODEL,
        Setting(
            "recipes",
            "lab",
            "choice",
            choices=tuple(SELECTIONS),
            help="lab: each method once; all: every method at 4, 3 and 2 bits, in groups of 128 and 64",
        ),
        SEQUENCES,
        LENGTH,
        Setting(
            "context",
            256,
            "choice",
            choices=(32, 64, 128, 256, 512, 1024),
            unit="tokens",
            brief=128,
            help="tokens of a passage",
        ),
        Setting(
            "passages", 12, "int", 2, 100, brief=3, help="passages of the held-out modules, the same for every recipe"
        ),
        Setting("repeats", 8, "int", 1, 100, brief=1, help="timed decode steps of every model"),
    ),
    run=run_table,
    predict=no_times,
    record={"cpu": ({"recipes": "all", "sequences": 32, "context": 512, "passages": 32, "repeats": 20},), "cuda": ()},
)
