"""Lab 05's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as
meant."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch
from conftest import random_decoder, tiny_config
from exercise_claims import ExerciseClaims, Lab, failures

from workbench.errors import WorkbenchError
from workbench.grading.check import Verdict, decode, encode, evaluate
from workbench.labs.lab05_quantization.checks import gptq, parts, probes, recipe
from workbench.labs.lab05_quantization.checks.parts import Machine, Stored, Weights
from workbench.models.shapes import public_shape
from workbench.quantization import Calibration, IntegerFormat, QuantizationRecipe, quantize
from workbench.quantization import awq as real_awq
from workbench.quantization import gptq as real_gptq
from workbench.quantization.formats import encode as real_codes
from workbench.quantization.formats import fit, pack, unpack
from workbench.quantization.gptq import GPTQ
from workbench.quantization.llm_int8 import KeptOutliers
from workbench.quantization.rtn import RTN

LAB = Lab("05_quantization")
IDS = ["quant-pack", "quant-llm-int8", "quant-awq", "quant-gptq", "quant-codebook", "quant-recipe"]


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 51
    used_again = (IDS[0],)

    @pytest.fixture
    def lab_cells(self, monkeypatch):
        """Where a model is quantized, a few passages say enough here."""
        monkeypatch.setattr(parts, "held_out_loss", lambda model: _few_passages(model))

    def printed(self, lines):
        text = "\n".join(lines)
        assert "49,152 codes of 4 bits in 24,576 bytes, and back: True" in lines
        assert re.search(r"llama-3-8b: the head is +7.0% .* a step is 3\.15 times as fast", text)
        shares = _percentages(lines, "channel 7 times 100, threshold")
        assert shares[0] > 5 * shares[1]  # all in int8; outlier columns apart
        for bits in (4, 3, 2):
            alone, spread = _percentages(lines, f"{bits} bits, ", "output error", "of the codes")
            assert spread < 0.6 * alone
        even, means, apart = _percentages(lines, "8 levels a row")
        assert apart < means < even
        mine, ours = (_percentages(lines, f"3 bits, errors spread, {who}")[0] for who in ("yours", " ours"))
        assert mine == ours


def _few_passages(model) -> float:
    from workbench.kv import Recompute
    from workbench.models.evaluation import held_out_passages, loss_through

    text = held_out_passages(model.tokenizer, 32, 2)
    return loss_through(model, Recompute(model.config), text, chunk=32).nats_per_token


def _percentages(lines: list[str], *words: str) -> list[float]:
    """The first percentage of each line that has all of these words."""
    found = [line for line in lines if all(word in line for word in words)]
    return [float(re.search(r"([\d.]+)%", line).group(1)) for line in found]


def test_the_exercises_are_the_six_of_the_lab():
    assert (LAB.visible.lab, LAB.ids) == (5, IDS)


# --- The real parts stand where the answers stand, and the answers where the real parts stand ---


def real_quantize(weight, bits, group):
    if weight.shape[1] % group:
        raise WorkbenchError("groups must divide")
    format = IntegerFormat(bits)
    blocks = weight.unflatten(1, (-1, group))
    scale, zero = fit(blocks, format, -1)
    packed = real_codes(torch.nn.functional.pad(blocks, (0, -group % 8)), scale, zero, format)
    codes = packed if bits == 8 else unpack(packed, -1, bits)
    return codes[..., :group].flatten(1), scale[..., 0], zero[..., 0]


def test_the_packages_groups_and_bytes_pass_the_checks_of_packing():
    real = {"quantize": real_quantize, "dequantize": parts.numbers_of, "pack": pack, "unpack": unpack}
    result = evaluate(LAB.whole["quant-pack"], real)
    assert result.verdict == Verdict.PASSED, failures(result)


def test_the_packages_search_passes_the_checks_of_awq():
    answer = LAB.solution("quant-awq")
    result = evaluate(LAB.whole["quant-awq"], answer | {"scale_for": real_awq.scale_for, "search": real_awq.search})
    assert result.verdict == Verdict.PASSED, failures(result)


def test_the_packages_factor_passes_the_checks_of_gptq():
    answer = LAB.solution("quant-gptq")
    result = evaluate(LAB.whole["quant-gptq"], answer | {"inverse_factor": real_gptq.inverse_factor})
    assert result.verdict == Verdict.PASSED, failures(result)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_answer_gives_the_codes_of_the_packages_gptq(bits):
    weight, h = probes.column_inputs(bits, 6, 24, 24, bits, 1.0)[0], probes.moments(bits, 24)
    real = real_gptq.gptq(weight, h, IntegerFormat(bits), 24, largest_first=False, damping=0.02)
    answer = LAB.solution("quant-gptq")
    codes = answer["quantize_columns"](
        weight, answer["inverse_factor"](h, 0.02), real.scale[..., 0], real.zero[..., 0], 2**bits - 1
    )
    assert torch.equal(codes, unpack(real.codes, -1, bits).flatten(1))


def test_the_product_of_the_answer_is_that_of_kept_outliers_but_for_their_scales_in_float16():
    x, weight = probes.product_inputs(3, 20, 8, 40, [4, 17])
    answer = LAB.solution("quant-llm-int8")
    columns = answer["outlier_columns"](x, 6.0)
    assert columns.tolist() == [4, 17]
    mine = answer["multiply"](x, *answer["store"](weight, columns), columns)
    real = KeptOutliers.rounded(weight, x.abs().amax(0) > 6.0).multiply(x)
    torch.testing.assert_close(mine, real, rtol=2e-3, atol=2e-3 * float(real.abs().max()))
    exact = x @ weight.T
    assert (mine - exact).norm() < 0.02 * exact.norm()


def test_an_answer_stores_a_layer_as_the_package_does():
    """Each as a method: the same numbers as ours where the same is asked."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(16, 64, generator=generator)
    inputs = probes.calibration_inputs(2, 200, 64, "mixed")
    answers = {grade_id: LAB.solution(grade_id) for grade_id in IDS[:5]}
    for bits in (3, 4):
        recipes = {}
        for name, yours, ours in parts.methods_of(answers, bits=bits, group=32):
            recipes[name] = (yours.make(), ours)
        spread, _ = recipes[f"{bits} bits, errors spread"]
        real = GPTQ(bits=bits, group=32).store(weight, inputs).dequantize()
        torch.testing.assert_close(spread.store(weight, inputs).dequantize(), real)
        near, _ = recipes[f"{bits} bits, nearest"]
        mine, real = near.store(weight, inputs), RTN(bits=bits, group=32).store(weight, inputs)
        assert mine.nbytes == real.nbytes and mine.codes.shape == real.codes.shape
        off = (mine.dequantize() - real.dequantize()).abs().view(16, 2, 32) / real.scale.float()
        assert off.max() < 1.1 and (off > 0.1).double().mean() < 0.01  # a scale rounded otherwise turns a tie


def test_an_answer_quantizes_a_whole_model_as_the_package_does():
    calibration = Calibration(torch.randint(4096, (4, 40), generator=torch.Generator().manual_seed(1)))
    model = random_decoder(tiny_config(hidden_size=64, num_kv_heads=4, head_dim=16), seed=2)
    answers = {grade_id: LAB.solution(grade_id) for grade_id in IDS[:5]}
    for name, yours, ours in parts.methods_of(answers, bits=4, group=32):
        mine = quantize(model, yours, calibration)
        errors = {one.name: one.output_error for one in mine.quantization.linears}
        assert len(errors) == 14 and max(errors.values()) < 0.05, name
        if name in ("4 bits, scaled", "4 bits, errors spread"):
            for one in quantize(model, ours, calibration).quantization.linears:
                assert errors[one.name] == pytest.approx(one.output_error, rel=0.02), (name, one.name)
    assert parts.LayerParts(model.layers[0], model.config).names  # the model itself still has its plain linears


def test_spreading_comes_near_the_best_of_all_codes_and_rounding_alone_does_not():
    """All 3⁵ codes of five weights, on inputs that go together, 20 times over."""
    answer = LAB.solution("quant-gptq")
    scale, zero = torch.full((1, 1), 1.5), torch.full((1, 1), -1.5)
    every = torch.tensor(list(itertools.product(range(3), repeat=5)), dtype=torch.uint8)
    above_best = {"spread": 0.0, "alone": 0.0}
    for seed in range(20):
        weight, h = probes.drawn(seed, "tiny", 1, 5), probes.moments(seed, 5).double()
        found = {
            "spread": answer["quantize_columns"](weight, answer["inverse_factor"](h, 1e-6), scale, zero, 2),
            "alone": parts.nearest_codes(weight, scale, zero, 2),
        }

        def lost(codes, weight=weight, h=h):
            off = weight.double() - (codes.double() * 1.5 - 1.5)
            return ((off @ h) * off).sum(1)

        best = float(lost(every).min())
        for name, codes in found.items():
            assert lost(codes) >= best - 1e-9
            above_best[name] += float(lost(codes)) / best - 1
    assert above_best["spread"] < 0.5 * above_best["alone"], above_best


def test_k_means_never_makes_the_weighted_error_larger():
    answer = LAB.solution("quant-codebook")
    weight, sensitivity, levels = probes.codebook_inputs(4, 3, 80, 5, "normal")
    errors = []
    for steps in range(8):
        now = answer["fit_levels"](weight, sensitivity, levels, steps)
        back = now.gather(1, answer["assign"](weight, now).long())
        errors.append(float((sensitivity * (weight - back) ** 2).sum()))
    assert all(b <= a + 1e-4 for a, b in itertools.pairwise(errors)) and errors[-1] < 0.8 * errors[0]


def test_counted_bytes_are_those_of_the_package():
    """At 16 bits, those of all parameters; at 4 bits, what the linears of a quantized model hold."""
    planner = LAB.solution("quant-recipe")
    for name in ("llama-2-7b", "llama-3-8b", "qwen3-0.6b", "gemma-3-1b"):
        config = public_shape(name)
        weights = parts.weights_of(config)
        assert planner["model_bytes"](weights, Stored("", 16)) == 2 * config.num_parameters(), name
    model = random_decoder(tiny_config(hidden_size=64, head_dim=16), seed=2)
    weights = parts.weights_of(model.config)
    assert weights.linears == sum(m.weight.numel() for m in model.layers.modules() if isinstance(m, torch.nn.Linear))
    made = quantize(model, QuantizationRecipe("rtn", bits=4, group=32))
    wide = 2 * (weights.norms + weights.embedding)
    assert planner["model_bytes"](weights, Stored("", 4, 32, 32)) == made.quantization.nbytes + wide


def test_four_bits_are_three_times_as_fast_and_not_four():
    """Llama 3 8B, groups of 128 with a scale and a zero in 16 bits, head in bf16: 3.15 (gpt-fast's format)."""
    weights = parts.weights_of(public_shape("llama-3-8b"))
    speed_up = LAB.solution("quant-recipe")["speed_up"]
    assert speed_up(weights, Stored("", 4, 128, 32)) == pytest.approx(3.154, abs=1e-3)
    linears_alone = Weights(weights.linears, 0, 0, True)
    assert speed_up(linears_alone, Stored("", 4, 128, 32)) == pytest.approx(16 / 4.25)


# --- The judges' own references ---


def crossed(value):
    """As it looks on the judge's side."""
    return decode(encode(value))


def test_the_judges_factor_is_the_packages():
    h = probes.moments(5, 7)
    torch.testing.assert_close(gptq.exact_factor(h, 0.05), real_gptq.inverse_factor(h, 0.05))


def test_a_tie_of_codes_may_go_either_way():
    """The same weights a hair apart: codes that follow from the answer's own earlier codes are right."""
    (case,) = gptq.column_cases((6, 16, 16, 4, 1.0))(random.Random(9))
    right = LAB.solution("quant-gptq")["quantize_columns"]

    def nudged(weight, factor, scale, zero, highest):
        return right(weight + 1e-7 * torch.randn(weight.shape), factor, scale, zero, highest)

    seen = probes.run_columns({"quantize_columns": nudged}, **case)
    assert gptq.judge_columns(case, crossed(seen)) is None


def test_inputs_of_the_int8_cases_lie_far_from_the_middle_of_two_codes():
    """Whoever computes in another order gets the same codes; and outliers pass the threshold, nothing else does."""
    for seed in range(5):
        x, weight = probes.product_inputs(seed, 6, 5, 30, [3, 8, 20])
        for a in (x, weight):
            rest = a.double().clone()
            rest[:, [3, 8, 20]] = 0
            ratio = rest / (rest.abs().amax(1, keepdim=True) / 127)
            assert ((ratio - ratio.round()).abs() < 0.4).all()
        assert (x.abs().amax(0) > 6).nonzero()[:, 0].tolist() == [3, 8, 20]


# --- The plumbing that is given ---


def test_second_moments_are_those_of_the_rows():
    calibration = Calibration(torch.randint(4096, (2, 20), generator=torch.Generator().manual_seed(3)))
    model = random_decoder(tiny_config(), seed=4)
    for layer in (0, 1):
        inputs = parts.inputs_of(model, calibration, layer)["mlp.down"]
        rows = parts.rows_of(model, calibration, "mlp.down", layer)
        assert list(rows.shape) == [40, 64] and inputs.rows == 40
        torch.testing.assert_close(rows.T @ rows, inputs.second_moments)
        torch.testing.assert_close(rows.abs().mean(0), inputs.mean_abs)


def test_weights_are_refused_of_models_that_they_would_be_wrong_for():
    for name in ("gpt2", "deepseek-v2"):
        with pytest.raises(WorkbenchError, match="Llama's kind"):
            parts.weights_of(public_shape(name))


def test_numbers_are_a_stored_weight_that_comes_back_from_its_parts():
    stored = parts.Numbers(torch.randn(4, 6))
    again = parts.Numbers.from_parts(stored.tensors(), stored.settings())
    assert torch.equal(again.dequantize(), stored.dequantize())
    with pytest.raises(WorkbenchError, match="numbers"):
        parts.Numbers.from_parts({}, {})


def test_choices_have_one_answer():
    """No case hangs on a rounding: the best is better than the next by more than that, or exactly equal."""
    draw = random.Random(10)
    for case in recipe.choice_cases(draw) + recipe.tie_cases(draw):
        weights, machine = Weights(**case["weights"]), Machine(**case["machine"])
        times = sorted(recipe.exact_seconds(weights, Stored(**s), case["tokens"], machine) for s in case["recipes"])
        assert all(b == a or b > a * (1 + 1e-9) for a, b in itertools.pairwise(times))
