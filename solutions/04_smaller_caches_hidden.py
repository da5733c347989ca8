"""Hidden checks of lab 04: other shapes and the edges. They never travel with the exercises."""

from __future__ import annotations

from workbench.grading.check import Check
from workbench.labs.lab04_smaller_caches.checks import attention, budget, convert, int8, latent, probes, window


def hidden(name, probe, judge, cases, points=1, constant_passes=False) -> Check:
    return Check(name, points, cases, probe, judge, hidden=True, constant_passes=constant_passes)


HIDDEN: dict[str, tuple[Check, ...]] = {
    "smaller-gqa": (
        hidden(
            "later-chunks",
            probes.run_attention,
            attention.judge_attention,
            attention.attention_cases((3, 8, 4, 2), (2, 11, 6, 1), (4, 5, 3, 3)),
        ),
        hidden(
            "size-of-values",
            probes.run_attention,
            attention.judge_no_repeats,
            attention.attention_cases((2, 9, 4, 2, 8, 5), (1, 200, 16, 1, 8, 12)),
        ),
    ),
    "smaller-window": (
        hidden("rewind", probes.run_ring, window.judge_ring, window.rewind_cases),
        hidden("twice", probes.run_ring, window.judge_ring, window.twice_cases),
        hidden("to-nothing", probes.run_ring, window.judge_ring, window.to_nothing_cases),
        hidden("widths", probes.run_ring, window.judge_ring, window.narrow_cases),
        hidden("real-model", probes.run_windowed_model, window.judge_windowed_model, window.model_cases),
    ),
    "smaller-latent": (
        hidden(
            "chunks",
            probes.run_latent,
            latent.judge_latent,
            latent.latent_cases(latent.FORMS, (3, 8, 2, 4, 2, 6, 5), (5, 5, 4, 4, 8, 6, 3), (1, 1, 1, 2, 2, 2, 9)),
        ),
        hidden(
            "each-at-its-cost",
            probes.run_latent,
            latent.judge_cost,
            latent.latent_cases(("expanded",), (160, 160, 4, 8, 8, 8, 64)),
        ),
        hidden(
            "absorbed-chunk-cost",
            probes.run_latent,
            latent.judge_cost,
            latent.latent_cases(("absorbed",), (4, 300, 8, 24, 8, 24, 32)),
        ),
    ),
    "smaller-int8": (
        hidden("tiny-and-negative", probes.run_int8, int8.judge_int8, int8.tensor_cases("tiny range", "negative only")),
        hidden("outlier-tokens", probes.run_int8, int8.judge_int8, int8.kv_cases("outlier token", "constant channel")),
    ),
    "smaller-convert": (
        hidden(
            "from-grouped",
            probes.run_conversion,
            convert.judge_conversion,
            convert.conversion_cases((8, 4, 2), (6, 2, 1), (4, 4, 4), qkv_bias=True),
        ),
        hidden(
            "head-norms",
            probes.run_conversion,
            convert.judge_conversion,
            convert.conversion_cases((4, 4, 2), qk_norm=True),
        ),
        hidden(
            "refused", probes.run_refused_conversion, convert.judge_refused, convert.refused_cases, constant_passes=True
        ),
    ),
    "smaller-budget": (
        hidden("sharing", probes.run_budget, budget.judge_budget, budget.sharing_cases),
        hidden("precision", probes.run_budget, budget.judge_budget, budget.precision_cases),
        hidden("tight", probes.run_budget, budget.judge_budget, budget.tight_cases),
        hidden("nothing-fits", probes.run_budget, budget.judge_budget, budget.nothing_fits_cases),
    ),
}
