"""smaller.latent: the two equal forms of latent attention over the same latents. What each reads and computes, where
they change places, and their times."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import shape_of
from workbench.instruments.costs import StepCosts, attention_costs, predict
from workbench.instruments.memory import require_bytes
from workbench.kv import make_kv
from workbench.models.batch import Batch
from workbench.models.config import LatentAttentionShape, ModelConfig
from workbench.models.latent import UpProjections

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement

FORMS = ("absorbed", "expanded")
SHAPES = ("deepseek-v3", "deepseek-v2-lite", "stdlib-3m-mla")
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NEW_TOKENS = (1, 4, 16, 64, 96, 128, 192, 256, 512)  # that are measured
DRAWN = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 256, 384, 512)  # that are predicted
# largest difference of the two forms, of the largest value
EQUAL = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
CHUNK = 64
LONGEST_RUN_S = 300  # a run that would take longer is refused
LONGEST = 1 << 18  # tokens


@functools.lru_cache(maxsize=8)
def layer_config(shape: str) -> ModelConfig:
    """One layer of that shape, without experts; its context is long enough for every setting."""
    return replace(shape_of(shape), num_layers=1, experts=None, context_length=LONGEST)


# -- counted ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FormCosts:
    """What `kv.attend` of one layer does in one form, for some new tokens after others."""

    costs: StepCosts  # its operations alone

    @property
    def flops(self) -> int:
        return self.costs.flops

    @property
    def cache_bytes(self) -> float:
        """The latents, read and written."""
        return self.costs.bytes_by_part["kv"]

    @property
    def weight_bytes(self) -> float:
        """The two up-projections."""
        return self.costs.bytes_by_part["weights"]

    @property
    def other_bytes(self) -> float:
        """Queries, results, and in the expanded form every head's keys and values: written, and read again."""
        return self.costs.bytes - self.cache_bytes - self.weight_bytes

    @property
    def bytes(self) -> float:
        return self.costs.bytes


@functools.lru_cache(maxsize=1024)
def form_costs(shape: str, form: str, new_tokens: int, context: int, element_bytes: int) -> FormCosts:
    """Counted, operation by operation, by the cost model."""
    return FormCosts(
        attention_costs(
            layer_config(shape),
            new_tokens=[new_tokens],
            contexts=[context],
            weight_bytes_per_element=element_bytes,
            activation_bytes_per_element=element_bytes,
            kv="latent",
            kv_bytes_per_element=element_bytes,
            latent_form=form,
        )
    )


def crossover(latent: LatentAttentionShape) -> float:
    """New tokens at which both forms take the same FLOPs, after far more remembered tokens than new ones:
    kv_rank·(content + value) / (2·kv_rank − content − value). Infinite where absorbing never costs more."""
    ups = latent.content_head_dim + latent.value_head_dim
    more = 2 * latent.kv_rank - ups
    return latent.kv_rank * ups / more if more > 0 else math.inf


def counted_crossover(shape: str, context: int) -> int | None:
    """The fewest new tokens for which the absorbed form takes at least the FLOPs of the expanded one; None beyond
    LONGEST. Somewhat below `crossover`, because new tokens also attend to each other."""

    def dearer(new: int) -> bool:
        absorbed, expanded = (form_costs(shape, form, new, context, 4).flops for form in FORMS)
        return absorbed >= expanded

    low, high = 0, 1
    while not dearer(high):
        low, high = high, 2 * high
        if high > LONGEST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if dearer(middle) else (middle, high)
    return high


def crossing(absorbed: Sequence[tuple[float, float]], expanded: Sequence[tuple[float, float]]) -> float | None:
    """Where the line through (new tokens, seconds) of the absorbed form first rises above that of the other, on log
    axes; None where it does not."""
    ratios = [(math.log(n), math.log(a / e)) for (n, a), (_, e) in zip(absorbed, expanded)]
    for (x0, y0), (x1, y1) in itertools.pairwise(ratios):
        if y0 < 0 <= y1:
            return math.exp(x0 + (x1 - x0) * -y0 / (y1 - y0))
    return None


# -- predicted -------------------------------------------------------------------------------------------------


def predicted_form(
    ceilings: Ceilings, shape: str, form: str, new_tokens: int, context: int, precision: str
) -> tuple[FormCosts, Prediction]:
    found = form_costs(shape, form, new_tokens, context, PRECISIONS[precision].itemsize)
    return found, predict(found.costs, ceilings, precision)


def predict_both(
    ceilings: Ceilings, *, shape: str, context: int, precision: str, **_: Any
) -> dict[str, list[tuple[int, float, str]]]:
    """{form: [(new tokens, seconds of one layer's attention, limit), …]}"""
    found = {}
    for form in FORMS:
        steps = [(n, predicted_form(ceilings, shape, form, n, context, precision)[1]) for n in DRAWN]
        found[form] = [(n, p.seconds, p.limit) for n, p in steps]
    return found


def predict_forms(ceilings: Ceilings, **settings: Any) -> list[tuple[int, float, str]]:
    return predict_both(ceilings, **settings)["absorbed"]


# -- measured --------------------------------------------------------------------------------------------------


class _Layer:
    """One layer's kv in each form, over the same random latents. A time does not depend on the values."""

    def __init__(self, bench: Bench, shape: str, context: int, dtype: torch.dtype) -> None:
        self.bench, self.context, self.dtype = bench, context, dtype
        self.config = layer_config(shape)
        self.latent, heads = self.config.latent_shape, self.config.num_heads
        self.draw = torch.Generator(bench.device).manual_seed(0)
        rank = self.latent.kv_rank
        ups = (heads * self.latent.content_head_dim, heads * self.latent.value_head_dim)
        self.up = UpProjections(self.latent, *(self._random(rows, rank) / rank**0.5 for rows in ups))
        room = {"max_tokens": context + max(NEW_TOKENS), "dtype": dtype, "device": bench.device}
        self.kvs = {form: make_kv("latent", self.config, form=form, **room) for form in FORMS}
        for at in range(0, context, CHUNK):
            bench.check_stop()
            bench.report(f"remembering {at:,} of {context:,} latents")
            self._remember(min(CHUNK, context - at), at)

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.draw, dtype=self.dtype, device=self.bench.device)

    def _batch(self, new: int, at: int) -> Batch:
        return Batch.of([[0] * new], first_positions=[at], device=self.bench.device)

    def inputs(self, new: int, at: int) -> tuple[torch.Tensor, torch.Tensor, Batch]:
        """Queries [n, H, content + rotary] and latents [n, 1, kv_rank + rotary] of `new` tokens at `at`."""
        q = self._random(new, self.config.num_heads, self.config.head_dim)
        return q, self._random(new, 1, self.latent.cached_dim), self._batch(new, at)

    @torch.inference_mode()
    def _remember(self, new: int, at: int) -> None:
        q, latent, batch = self.inputs(new, at)
        for kv in self.kvs.values():
            kv.begin(batch)
            kv.attend(0, q, latent, None, batch, up=self.up)

    @torch.inference_mode()
    def pair(self, new: int, repeats: int) -> tuple[Any, dict[str, torch.Tensor]]:
        """(times of both in alternation, the outputs of the last run of each)."""
        q, latent, batch = self.inputs(new, self.context)
        outputs: dict[str, torch.Tensor] = {}

        def attend(form: str) -> Callable[[], None]:
            kv = self.kvs[form]

            def run() -> None:
                kv.truncate(0, self.context) if kv.lengths[0] > self.context else None
                kv.begin(batch)
                outputs[form] = kv.attend(0, q, latent, None, batch, up=self.up)

            return run

        taken = self.bench.measure_pair(*(attend(form) for form in FORMS), repeats=repeats)
        for kv in self.kvs.values():
            kv.truncate(0, self.context)
        return taken, outputs


def run_forms(
    bench: Bench, *, shape: str, context: int, new_tokens: int, precision: str, repeats: int
) -> Iterator[Measurement]:
    """For 1 … 512 new tokens two Measurements, one a form: samples are seconds of one layer's `kv.attend`. The forms
    take turns, and their outputs are held to each other. `new_tokens` only chooses what the picture shows."""
    ceilings, dtype = bench.ceilings(), PRECISIONS[precision]
    _check_work(bench, ceilings, shape, context, precision, repeats)
    layer = _Layer(bench, shape, context, dtype)
    for new in NEW_TOKENS:
        bench.check_stop()
        bench.report(f"{new} of {NEW_TOKENS[-1]} new tokens")
        taken, outputs = layer.pair(new, repeats)
        difference = float((outputs["absorbed"] - outputs["expanded"]).abs().max() / outputs["expanded"].abs().max())
        if difference > EQUAL[dtype]:
            raise WorkbenchError(
                f"for {new} new tokens the two forms differ by {difference:.2g} of the largest value, more than "
                f"{EQUAL[dtype]:g}: they are not the same attention, so their times were thrown away"
            )
        for form, samples in zip(FORMS, (taken.a_s, taken.b_s)):
            costs, expected = predicted_form(ceilings, shape, form, new, context, precision)
            yield bench.measurement(
                name="smaller.latent",
                settings={"shape": shape, "context": context, "precision": precision, "form": form, "new_tokens": new},
                samples=samples,
                unit="s",
                counts={
                    "flops": costs.flops,
                    "cache_bytes": costs.cache_bytes,
                    "weight_bytes": costs.weight_bytes,
                    "other_bytes": costs.other_bytes,
                    "ratio": taken.median_ratio,
                    "largest_difference": difference,
                    "bytes_in_use": layer.kvs[form].bytes_in_use,
                },
                predicted=expected.seconds,
                limit=expected.limit,
                check=f"both forms give the same within {difference:.1g} of the largest value",
            )


def _check_work(bench: Bench, ceilings: Ceilings, shape: str, context: int, precision: str, repeats: int) -> None:
    """Refuse what would take minutes, or more memory than there is: the expanded form writes every key and value."""
    runs = {n: [predicted_form(ceilings, shape, form, n, context, precision) for form in FORMS] for n in NEW_TOKENS}
    seconds = (repeats + 1) * sum(p.seconds for both in runs.values() for _, p in both)
    if seconds > LONGEST_RUN_S:
        raise WorkbenchError(
            f"{shape} after {context:,} tokens would take about {seconds / 60:.0f} minutes here; its counts are in the "
            "picture without a run. Choose a smaller context, fewer repeats or another shape"
        )
    largest = max(costs.other_bytes for costs, _ in runs[NEW_TOKENS[-1]])
    require_bytes(int(largest), bench.device, f"one layer of {shape} after {context:,} tokens")


def summary(measurements: Sequence[Measurement]) -> Mapping[str, list[tuple[float, float]]]:
    """{form: [(new tokens, median seconds), …]} of a run."""
    return {
        form: [(m.settings["new_tokens"], m.median) for m in measurements if m.settings["form"] == form]
        for form in FORMS
    }


EXPERIMENT = Experiment(
    name="smaller.latent",
    lab=4,
    question="Expand the cached latents, or absorb the expansion? When does each form of MLA win?",
    how="one layer's attention, random weights and latents; both forms over the same cache, in alternation, for 1 to "
    "512 new tokens; their outputs are compared. FLOPs and bytes are counted from the shape; the predicted time comes "
    "from them and this machine's ceilings.",
    settings=(
        Setting(
            "shape",
            "deepseek-v2-lite",
            "choice",
            choices=SHAPES,
            help="whose attention; V2-Lite has the sizes of V3 in 16 heads in place of 128",
        ),
        Setting(
            "context",
            1024,
            "choice",
            choices=tuple(2**i for i in range(6, 18)),
            unit="tokens",
            help="latents that are remembered",
        ),
        Setting(
            "new_tokens",
            1,
            "choice",
            choices=tuple(2**i for i in range(10)),
            unit="tokens",
            help="new tokens in the step that the picture shows",
        ),
        Setting("precision", "float32", "choice", choices=tuple(PRECISIONS), help="of weights, latents and arithmetic"),
        Setting("repeats", 5, "int", 1, 50, brief=1, help="timed pairs for each number of new tokens"),
    ),
    run=run_forms,
    predict=predict_forms,
    record={
        "cpu": ({}, {"shape": "deepseek-v3", "repeats": 2}),
        "cuda": ({"shape": "deepseek-v3", "precision": "bfloat16", "context": 16_384},),
    },
)
