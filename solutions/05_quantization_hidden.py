"""Hidden checks of lab 05: other shapes and the edges. They never travel with the exercises."""

from __future__ import annotations

from workbench.grading.check import Check
from workbench.labs.lab05_quantization.checks import awq, codebook, gptq, int8, pack, probes, recipe


def hidden(name, probe, judge, cases, points=1) -> Check:
    return Check(name=name, points=points, cases=cases, probe=probe, judge=judge, hidden=True)


HIDDEN: dict[str, tuple[Check, ...]] = {
    "quant-pack": (
        hidden(
            "other-widths",
            probes.run_groups,
            pack.judge_groups,
            pack.group_cases(("normal", 2, 4, 5), ("all negative", 3, 16, 1), ("a large weight a row", 5, 10)),
        ),
        hidden("many-axes", probes.run_packing, pack.judge_packing, pack.packing_cases((2, 3, 8), (10,), (1, 2))),
        hidden("refused", probes.run_refused, pack.judge_refused, pack.refused_cases),
    ),
    "quant-llm-int8": (
        hidden(
            "one-token",
            probes.run_outlier_columns,
            int8.judge_columns,
            int8.column_cases((6, 2, 12, 3, "one token"), (5, 3, 8, 0)),
        ),
        hidden("no-outliers", probes.run_product, int8.judge_product, int8.product_cases((3, 4, 16, 0), (1, 5, 40, 0))),
        hidden("zeros", probes.run_product, int8.judge_product, int8.product_cases((3, 4, 16, 1, "zeros"))),
    ),
    "quant-awq": (
        hidden(
            "shared-inputs",
            probes.run_search,
            awq.judge_search,
            awq.search_cases((80, [10, 4, 4], 16, 3, 8, 4), (80, [6, 9], 24, 4, 24, 3, "mixed")),
        ),
        hidden("unreached", probes.run_scale, awq.judge_scale, awq.scale_cases((30, 8, "dead"))),
        hidden(
            "few-bits",
            probes.run_search,
            awq.judge_search,
            awq.search_cases((60, [8], 8, 2, 4, 10), (60, [5], 16, 8, 16, 3, "dead")),
        ),
    ),
    "quant-gptq": (
        hidden(
            "no-inverse", probes.run_factor, gptq.judge_factor, gptq.factor_cases((8, "few", 0.01), (10, "few", 0.5))
        ),
        hidden(
            "groups",
            probes.run_columns,
            gptq.judge_columns,
            gptq.column_cases((4, 24, 8, 4, 1.0), (3, 12, 4, 2, 1.0), (2, 6, 1, 3, 1.0)),
        ),
        hidden(
            "last-codes",
            probes.run_columns,
            gptq.judge_columns,
            gptq.column_cases((5, 16, 16, 8, 0.4), (4, 12, 6, 3, 0.4)),
        ),
    ),
    "quant-codebook": (
        hidden(
            "empty-levels",
            probes.run_levels,
            codebook.judge_levels,
            codebook.level_cases((3, 24, 4, "empty", 2), (1, 9, 8, "normal", 3)),
        ),
        hidden(
            "unreached",
            probes.run_levels,
            codebook.judge_levels,
            codebook.level_cases((3, 24, 4, "unreached", 2), (2, 16, 3, "normal", 0)),
        ),
    ),
    "quant-recipe": (
        hidden("tied-head", probes.run_recipe, recipe.judge_recipe, recipe.tied_cases),
        hidden("ties", probes.run_recipe, recipe.judge_recipe, recipe.tie_cases),
        hidden(
            "nothing-fits",
            probes.run_recipe,
            recipe.judge_recipe,
            lambda draw: recipe.odd_cases(draw) + recipe.nothing_fits_cases(draw),
        ),
    ),
}
