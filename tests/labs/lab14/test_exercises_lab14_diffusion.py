"""The answers to lab 14's exercises on diffusion agree with the parts of the engine that they stand for."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import tiny_config
from exercise_claims import Lab

from workbench.diffusion.costs import pass_costs
from workbench.diffusion.denoise import confidence_and_entropy, diffuse
from workbench.diffusion.model import DiffusionModel, new_diffusion
from workbench.diffusion.objective import without_mask
from workbench.diffusion.samplers import Confidence, EntropyBound, highest
from workbench.grading.check import evaluate
from workbench.grading.constants import GIVEN, VALUES
from workbench.instruments.device import PUBLISHED
from workbench.labs.lab14_beyond_transformers.checks import passes as passes_module
from workbench.labs.lab14_beyond_transformers.checks import unmask as unmask_module
from workbench.labs.lab14_beyond_transformers.checks.probes import PARTS
from workbench.labs.lab14_beyond_transformers.few_passes import few_passes_by_roofline

LAB = Lab("14_beyond_transformers")


# --- The real parts stand where the answers stand ---


def blocks_model() -> DiffusionModel:
    torch.manual_seed(0)
    return new_diffusion(tiny_config(vocab_size=20, context_length=48), kind="block", block_sizes=(4, 5), mask_token=19)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("prompt", "tokens", "size"), [(6, 9, 4), (8, 8, 4), (3, 11, 5), (1, 2, 4)])
def test_the_answer_counts_the_passes_that_a_canvas_is_written_in(prompt, tokens, size, cached):
    """Rows and keys of every pass of a real model, and the FLOPs but for those of the logits."""
    model, part = blocks_model(), LAB.solution("beyond-passes")
    for sampler in (Confidence(3), EntropyBound(2.0)):
        real = diffuse(
            model, list(range(2, 2 + prompt)), max_tokens=tokens, block_size=size, sampler=sampler, cached=cached
        )
        assert real.tokens == tokens
        if isinstance(sampler, Confidence):
            asked = 3
        else:  # as it decided
            blocks = [step.block for step in real.history]
            asked = [blocks.count(block) for block in dict.fromkeys(blocks)]
        made = part["passes_of"](prompt, tokens, size, asked, cached)
        assert made == [(step.rows, step.cached + step.rows) for step in real.history]
        # per row: the matrices of the layers, which is what is left without keys and logits
        one = pass_costs(model.config, rows=1, logit_rows=0)
        pair = one.flops_by_part["attention"]
        cost = part["totals"](made, tokens, (one.flops - pair) // 2, pair)
        head = pass_costs(model.config, rows=1).flops - one.flops
        assert cost["flops"] == real.flops - head * sum(step.logit_rows for step in real.history)
        assert (cost["passes"], cost["rows"]) == (real.passes, real.rows)
        assert cost["tokens_per_pass"] == real.tokens_per_pass


def test_the_answer_writes_where_the_engines_sampler_does():
    """At temperature 0, where both compare the same probabilities, for the same number of places."""
    answer, generator = LAB.solution("beyond-unmask"), torch.Generator().manual_seed(1)
    for passes in (1, 2, 3, 5):
        logits = 2 * torch.randn(9, 12, generator=generator)
        tokens = [3, 7, 11, 11, 2, 11, 11, 11, 11]
        places, ids = answer(tokens, logits, passes, 11)
        masked = torch.tensor([[token == 11 for token in tokens]])
        log_p = without_mask(logits, 11).log_softmax(dim=-1)
        chosen = highest(confidence_and_entropy(log_p)[0][None], masked, torch.tensor([len(places)]))
        assert sorted(places) == chosen[0].nonzero()[:, 0].tolist() and len(places) == -(-6 // passes)
        assert ids == log_p[places].argmax(dim=-1).tolist()


@pytest.mark.parametrize("card", ["a100-80gb", "h100-sxm", "h200"])
def test_the_answers_speedup_is_that_of_the_roofline(card):
    answer, ceilings = LAB.solution("beyond-passes")["speedup"], PUBLISHED[card]
    rates = ceilings.flop_per_s["bfloat16"], ceilings.read_bytes_per_s
    for batch in (1, 4, 64, 1000):
        real = few_passes_by_roofline(ceilings, tokens=1000, passes=20, batch=batch)
        assert answer([(1000, 1000)] * 20, 1000, batch, *rates) == pytest.approx(real, rel=1e-12)


# --- The judges' own references ---


def test_ten_places_in_four_passes_are_dealt_out_as_the_statement_says():
    assert unmask_module.exact_counts(10, 4) == [3, 3, 2, 2]
    assert unmask_module.exact_counts(3, 5) == [1, 1, 1, 0, 0]
    draw = random.Random(2)
    for _ in range(50):
        masked, passes = draw.randint(0, 40), draw.randint(1, 12)
        counts = unmask_module.exact_counts(masked, passes)
        assert sum(counts) == masked and max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)


def test_the_passes_of_the_statements_drawing_are_counted_as_drawn():
    case = passes_module.text_case(6, 4, 4, 2)
    assert passes_module.exact_passes(case) == [[8, 8], [4, 8], [6, 10], [2, 10]]
    assert passes_module.exact_passes(case | {"cached": False}) == [[8, 8], [8, 8], [10, 10], [10, 10]]


def test_no_functions_that_return_one_value_pass_a_check_of_the_three():
    """The answer is a dict, so what `--prove` tries of functions is tried here."""
    values = (*VALUES, *GIVEN, "[(8, 8), (4, 8), (8, 12), (4, 12)]", "{'passes': 4, 'rows': 24, 'flops': 9}", "14.76")
    for value in values:
        constant = eval(f"lambda *args, **kwargs: {value}")
        result = evaluate(LAB.whole["beyond-passes"], dict.fromkeys(PARTS, constant))
        assert result.points == 0, value
