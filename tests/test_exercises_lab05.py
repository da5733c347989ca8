"""Lab 05's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as meant."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch
from conftest import random_decoder, tiny_config
from exercise_claims import ROOT, ExerciseClaims, Lab, failures

from workbench import checks
from workbench.checks import (
    lab05_awq,
    lab05_codebook,
    lab05_gptq,
    lab05_int8,
    lab05_pack,
    lab05_parts,
    lab05_recipe,
)
from workbench.checks import probes_lab05 as probes
from workbench.checks.lab05_parts import Machine, Stored, Weights
from workbench.errors import WorkbenchError
from workbench.grading.check import Verdict, decode, encode, evaluate
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
    all_points = 45

    @pytest.fixture
    def lab_cells(self, monkeypatch):
        """Where a model is quantized, a few passages say enough here."""
        monkeypatch.setattr(lab05_parts, "held_out_loss", lambda model: _few_passages(model))

    def test_in_the_starter_only_the_check_cells_fail_and_each_says_not_attempted(self, lab_cells, capsys):
        """The last cell uses five answers at once, and says of the first that it is not there."""
        failed = [(c.metadata.get("nbgrader", {}).get("grade_id"), e) for c, e in self.lab.run_cells(True)]
        failed = [(grade_id, error) for grade_id, error in failed if error]
        assert [grade_id for grade_id, _ in failed] == [f"{grade_id}-check" for grade_id in IDS]
        assert {type(error) for _, error in failed} == {checks.NotAttempted}
        said = [line for line in capsys.readouterr().out.splitlines() if "not attempted yet" in line]
        assert [line.split(":")[0] for line in said] == [*IDS, IDS[0]]

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
    real = {"quantize": real_quantize, "dequantize": lab05_parts.numbers_of, "pack": pack, "unpack": unpack}
    result = evaluate(LAB.whole["quant-pack"], real)
    assert result.verdict == Verdict.PASSED, failures(result)


def test_the_packages_search_passes_the_checks_of_awq():
    answer = LAB.solution("quant-awq")
    result = evaluate(
        LAB.whole["quant-awq"], answer | {"scale_for": real_awq.scale_for, "search": real_awq.search}
    )
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
        for name, yours, ours in lab05_parts.methods_of(answers, bits=bits, group=32):
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
    for name, yours, ours in lab05_parts.methods_of(answers, bits=4, group=32):
        mine = quantize(model, yours, calibration)
        errors = {one.name: one.output_error for one in mine.quantization.linears}
        assert len(errors) == 14 and max(errors.values()) < 0.05, name
        if name in ("4 bits, scaled", "4 bits, errors spread"):
            for one in quantize(model, ours, calibration).quantization.linears:
                assert errors[one.name] == pytest.approx(one.output_error, rel=0.02), (name, one.name)
    assert lab05_parts.LayerParts(
        model.layers[0], model.config
    ).names  # the model itself still has its plain linears


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
            "alone": lab05_parts.nearest_codes(weight, scale, zero, 2),
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
        weights = lab05_parts.weights_of(config)
        assert planner["model_bytes"](weights, Stored("", 16)) == 2 * config.num_parameters(), name
    model = random_decoder(tiny_config(hidden_size=64, head_dim=16), seed=2)
    weights = lab05_parts.weights_of(model.config)
    assert weights.linears == sum(
        m.weight.numel() for m in model.layers.modules() if isinstance(m, torch.nn.Linear)
    )
    made = quantize(model, QuantizationRecipe("rtn", bits=4, group=32))
    wide = 2 * (weights.norms + weights.embedding)
    assert planner["model_bytes"](weights, Stored("", 4, 32, 32)) == made.quantization.nbytes + wide


def test_four_bits_are_three_times_as_fast_and_not_four():
    """Llama 3 8B, groups of 128 with a scale and a zero in 16 bits, head in bf16: 3.15 (gpt-fast's format)."""
    weights = lab05_parts.weights_of(public_shape("llama-3-8b"))
    speed_up = LAB.solution("quant-recipe")["speed_up"]
    assert speed_up(weights, Stored("", 4, 128, 32)) == pytest.approx(3.154, abs=1e-3)
    linears_alone = Weights(weights.linears, 0, 0, True)
    assert speed_up(linears_alone, Stored("", 4, 128, 32)) == pytest.approx(16 / 4.25)


# --- Diagnoses ---

DIAGNOSES = [
    ("quant-pack", "cut off", ("codes were cut off; round to the nearest",)),
    ("quant-pack", "codes for the unrounded scale", ("before they were rounded to float16; take the stored ones",)),
    ("quant-pack", "one scale a row", ("the range of the whole row; each group has its own",)),
    ("quant-pack", "one scale for the matrix", ("the range of the whole matrix",)),
    ("quant-pack", "symmetric", ("that is symmetric, from −max |w| to max |w|",)),
    ("quant-pack", "2ᵇ steps", ("16 codes have 15 steps between them",)),
    ("quant-pack", "zero forgotten", ("the zero of the group is missing",)),
    ("quant-pack", "scales in float32", ("scale has dtype float32, expected float16",)),
    ("quant-pack", "equal weights become zero", ("weights are all 0.75 came back as 0",)),
    ("quant-pack", "nibbles exchanged", ("the upper and lower four bits are exchanged",)),
    ("quant-pack", "neighbours in a byte", ("neighbours share a byte here",)),
    ("quant-pack", "not shifted", ("the second half is not shifted up by four bits",)),
    ("quant-pack", "unpacked in the other order", ("the lower four bits (& 15) are the first half",)),
    ("quant-llm-int8", "sign kept", ("what counts is |x|",)),
    ("quant-llm-int8", "pairs", ("int64 [3, 1] came back", "nonzero gives [n, 1]")),
    ("quant-llm-int8", "weight's scale with the outliers inside", ("the outlier columns are inside",)),
    ("quant-llm-int8", "outlier codes stay", ("in the sum twice: once in int8 and once in 16 bits",)),
    ("quant-llm-int8", "one scale for the weight", ("one scale for the whole matrix; each output has its own",)),
    ("quant-llm-int8", "/ 128", ("the codes go from −127 to 127",)),
    ("quant-llm-int8", "weight cut off", ("codes were cut off; round to the nearest",)),
    ("quant-llm-int8", "token's scale with the outliers inside", ("taken with its outliers inside",)),
    ("quant-llm-int8", "outlier columns counted twice", ("the outlier columns are in it twice",)),
    ("quant-llm-int8", "outliers forgotten", ("the outlier columns are missing",)),
    ("quant-llm-int8", "one scale for all tokens", ("each token has its own",)),
    ("quant-llm-int8", "inputs cut off", ("the codes of x were cut off",)),
    ("quant-llm-int8", "sums in 8 bits", ("kept in 8 bits and wrapped around",)),
    ("quant-llm-int8", "sums in 16 bits", ("kept in 16 bits and wrapped around",)),
    ("quant-awq", "error of the weights", ("that is the error of the weights",)),
    ("quant-awq", "diagonal only", ("only the diagonal of H was used",)),
    ("quant-awq", "square root", ("that is its square root",)),
    ("quant-awq", "largest in place of mean", ("that is the largest |x| of each channel",)),
    ("quant-awq", "inverse", ("the exponent has the wrong sign",)),
    ("quant-awq", "not normalized", ("divide by √(largest s · smallest s)",)),
    ("quant-awq", "not scaled back", ("divide it by s before it is compared with W",)),
    ("quant-awq", "not scaled", ("s was not used: every α gives what plain rounding gives",)),
    ("quant-awq", "the other way round", ("it is the other way round",)),
    ("quant-awq", "H divided as well", ("H was divided by s as well",)),
    ("quant-awq", "rows scaled", ("s is one number an input channel",)),
    ("quant-awq", "one group a row", ("the whole row had one scale",)),
    ("quant-awq", "α up to 1", ("expected 0, 1/5, … 4/5",)),
    ("quant-awq", "weights only", ("the inputs are divided by s there",)),
    ("quant-gptq", "lower triangle", ("that is the lower factor",)),
    ("quant-gptq", "factor of H", ("that is the factor of H",)),
    ("quant-gptq", "inverse of the factor", ("U·Uᵀ is the inverse here",)),
    ("quant-gptq", "no damping", ("the damping was not added",)),
    ("quant-gptq", "absolute damping", ("it is a share of the mean of H's diagonal",)),
    ("quant-gptq", "each for itself", ("each weight was rounded for itself",)),
    ("quant-gptq", "not divided by the diagonal", ("the error was not divided by U[j, j]",)),
    ("quant-gptq", "divided twice", ("divided by U[j, j] twice",)),
    ("quant-gptq", "wrong sign", ("the error was added",)),
    ("quant-gptq", "row of the inverse", ("columns that are done must be out of it",)),
    ("quant-gptq", "next column alone", ("all columns to come move",)),
    ("quant-gptq", "mean error of the outputs", ("each output by itself",)),
    ("quant-gptq", "codes cut off", ("a cast to uint8 drops the fraction",)),
    ("quant-codebook", "farthest", ("the farthest was taken",)),
    ("quant-codebook", "levels of row 0", ("the levels of row 0 were taken for all rows",)),
    ("quant-codebook", "every weight the same", ("each weight counted the same",)),
    ("quant-codebook", "divided by the number", ("not by the sum of their sensitivities",)),
    ("quant-codebook", "one round", ("only one round was made",)),
    ("quant-codebook", "largest with their sign", ("what counts is |w|, without its sign",)),
    ("quant-codebook", "of each row", ("of the whole matrix, not of each row",)),
    ("quant-codebook", "rows and columns exchanged", ("rows and columns are exchanged",)),
    ("quant-codebook", "still in the rest", ("0 where a weight was taken",)),
    ("quant-recipe", "scales forgotten", ("the scales are stored and read as well",)),
    ("quant-recipe", "head forgotten", ("are both stored, where they are not one matrix",)),
    ("quant-recipe", "step reads the embedding", ("only the head is read whole",)),
    ("quant-recipe", "step without the head", ("the head is missing",)),
    ("quant-recipe", "16 over bits", ("gave 4, expected 3.15401", "the head and the scales are read as well")),
    ("quant-recipe", "of the linears", ("that is for the linears alone",)),
    ("quant-recipe", "times added", ("reading and multiplying go on side by side",)),
    ("quant-recipe", "int8 rate for int8 weights", ("weights that are stored in few bits are multiplied in 16",)),
    ("quant-recipe", "budget ignored", ("takes", "bytes")),
    ("quant-recipe", "fewest bytes", ("its step takes",)),
]  # fmt: skip
HIDDEN_DIAGNOSES = [
    ("quant-pack", "always 4 bits", "other-widths", "that is for 4 bits; here are 2"),
    ("quant-pack", "halves of the whole", "many-axes", "they are those of the last axis"),
    ("quant-pack", "odd ones filled up", "refused", "two codes fill a byte, and one is left"),
    ("quant-llm-int8", "every token", "one-token", "one token is enough"),
    ("quant-llm-int8", "a token of zeros", "zeros", "its codes are 0"),
    ("quant-llm-int8", "an output of zeros", "zeros", "0 / 0 is nan"),
    ("quant-awq", "first linear only", "shared-inputs", "those that share inputs share s"),
    ("quant-awq", "a channel of zeros", "unreached", "take 1e-4 of the largest mean at least"),
    ("quant-gptq", "groups in turns", "groups", "column j is in group j // group"),
    ("quant-gptq", "stays inside its group", "groups", "its own group alone"),
    ("quant-gptq", "not clamped", "last-codes", "codes are 0 …"),
    ("quant-gptq", "clamped too late", "last-codes", "clamp it first"),
    ("quant-codebook", "empty level becomes nan", "empty-levels", "became nan (0 / 0); it stays where it is"),
    ("quant-recipe", "tied head stored twice", "tied-head", "it is stored once"),
    ("quant-recipe", "larger excess among equals", "ties", "its excess is lower"),
    ("quant-recipe", "nothing fits, the smallest", "nothing-fits", "expected None"),
    ("quant-recipe", "part of a byte dropped", "nothing-fits", "a part of a byte counts whole"),
]  # fmt: skip


@pytest.mark.parametrize(("grade_id", "name", "said"), DIAGNOSES, ids=[f"{g}-{n}" for g, n, _ in DIAGNOSES])
def test_a_diagnosis_says_what_was_seen_and_where_to_look(grade_id, name, said):
    message = LAB.message_of(grade_id, name)
    for words in said:
        assert words in message, message


@pytest.mark.parametrize(
    ("grade_id", "name", "check", "said"), HIDDEN_DIAGNOSES, ids=[f"{g}-{n}" for g, n, *_ in HIDDEN_DIAGNOSES]
)
def test_a_hidden_checks_message_to_the_instructor_names_the_mistake(grade_id, name, check, said):
    result = LAB.judged_at(grade_id, name, 0)
    message = next(c.message for c in result.checks if c.name == check)
    assert said in message, message


# --- The judges' own references: every fault that can be told is told ---


def crossed(value):
    """As it looks on the judge's side."""
    return decode(encode(value))


def told(words: str, messages: list[str | None]) -> bool:
    return any(message and words in message for message in messages)


@pytest.mark.parametrize("fault", lab05_int8.FAULTS, ids=lambda f: f.told[:40])
def test_every_fault_of_the_int8_product_is_told(fault):
    case = lab05_int8.product_case(random.Random(3), 6, 5, 40, 3)
    answer = LAB.solution("quant-llm-int8")

    def faulty(x, codes, scale, outliers, columns):
        given = codes.double(), scale.double(), outliers.double()
        return lab05_int8.product_of(x, *given, columns.tolist(), fault).float()

    seen = probes.run_product(answer | {"multiply": faulty}, **case)
    assert told(fault.told, [lab05_int8.judge_product(case, crossed(seen))])


@pytest.mark.parametrize("fault", lab05_awq.SCALE_FAULTS, ids=lambda f: f.told[:40])
def test_every_fault_of_the_scale_is_told(fault):
    messages = []
    for kind in ("channels", "dead"):
        (case,) = lab05_awq.scale_cases((30, 8, kind))(random.Random(1))
        answer = {"scale_for": lambda inputs, alpha: lab05_awq.scale_of(inputs, alpha, fault)}
        messages.append(lab05_awq.judge_scale(case, crossed(probes.run_scale(answer, **case))))
    assert told(fault.told, messages), messages


@pytest.mark.parametrize("fault", lab05_awq.SEARCH_FAULTS, ids=lambda f: f.told[:40])
def test_every_fault_of_the_search_is_told(fault):
    messages = []
    for outs in ([16], [10, 4, 2]):
        (case,) = lab05_awq.search_cases((80, outs, 16, 3, 8, 4))(random.Random(1))

        def search(weights, inputs, format, group, grid, case=case):
            return [
                (i / grid, lab05_awq.search_error(case, inputs, weights, i / grid, fault))
                for i in range(grid)
            ]

        answer = LAB.solution("quant-awq") | {"search": search}
        messages.append(lab05_awq.judge_search(case, crossed(probes.run_search(answer, **case))))
    assert told(fault.told, messages), messages


@pytest.mark.parametrize("fault", lab05_gptq.FAULTS, ids=lambda f: f.told[:50])
def test_every_fault_of_the_columns_is_told_or_one_that_comes_to_the_same(fault):
    messages = []
    for shape in ((6, 16, 16, 4, 1.0), (6, 24, 8, 4, 1.0), (6, 16, 16, 4, 0.4)):
        (case,) = lab05_gptq.column_cases(shape)(random.Random(2))

        def columns(weight, factor, scale, zero, highest):
            return lab05_gptq.codes_by(weight, factor, scale, zero, highest, fault).to(torch.uint8)

        seen = probes.run_columns({"quantize_columns": columns}, **case)
        messages.append(lab05_gptq.judge_columns(case, crossed(seen)))
    alone = lab05_gptq.FAULTS[0].told  # where errors only reach columns that are done
    reaches_nobody = fault.last_first or "column j of U" in fault.told
    assert told(alone if reaches_nobody else fault.told, messages), messages


@pytest.mark.parametrize("fault", lab05_codebook.FAULTS, ids=lambda f: f.told[:50])
def test_every_fault_of_the_levels_is_told(fault):
    messages = []
    for shape in ((3, 30, 4, "normal", 3), (3, 24, 4, "empty", 2)):
        (case,) = lab05_codebook.level_cases(shape)(random.Random(4))

        def levels(weight, sensitivity, levels, steps):
            given = weight.double(), sensitivity.double(), levels.double()
            return lab05_codebook.levels_by(*given, steps, fault).float()

        seen = probes.run_levels({"fit_levels": levels}, **case)
        messages.append(lab05_codebook.judge_levels(case, crossed(seen)))
    assert told(fault.told, messages), messages


def test_every_fault_of_the_factor_is_told():
    (case,) = lab05_gptq.factor_cases((7, "full", 0.05))(random.Random(5))
    h = probes.moments(case["seed"], 7)
    right = lab05_gptq.exact_factor(h, 0.05)
    torch.testing.assert_close(right, real_gptq.inverse_factor(h, 0.05))
    for words, way in lab05_gptq.factor_ways(h, 0.05):
        seen = probes.run_factor({"inverse_factor": lambda *_, way=way: way()}, **case)
        assert words in lab05_gptq.judge_factor(case, crossed(seen))


@pytest.mark.parametrize("fault", lab05_recipe.COUNT_FAULTS, ids=lambda f: f.told[:40])
def test_every_fault_of_counting_is_told(fault):
    draw, messages = random.Random(6), []
    cases = lab05_recipe.bytes_cases(draw) + lab05_recipe.tied_cases(draw) + lab05_recipe.odd_cases(draw)
    for case in cases:
        weights, stored = Weights(**case["weights"]), Stored(**case["stored"])
        count = {"model_bytes": lab05_recipe.exact_model_bytes, "step_bytes": lab05_recipe.exact_step_bytes}
        value = count[case["part"]](weights, stored, fault)
        messages.append(lab05_recipe.judge_recipe(case, {"value": value, "returned": "int"}))
    same = (
        "the embedding and the head are both stored"  # without the embedding, a model has what a step reads
    )
    assert told(fault.told, messages) or (not fault.embedding and told(same, messages)), messages


@pytest.mark.parametrize("fault", lab05_recipe.TIME_FAULTS, ids=lambda f: f.told[:40])
def test_every_fault_of_the_time_is_told(fault):
    messages = []
    for case in lab05_recipe.time_cases(random.Random(7)):
        weights, stored, machine = (
            Weights(**case["weights"]),
            Stored(**case["stored"]),
            Machine(**case["machine"]),
        )
        value = lab05_recipe.exact_seconds(weights, stored, case["tokens"], machine, fault)
        messages.append(lab05_recipe.judge_recipe(case, {"value": value, "returned": "float"}))
    either = {"multiply": "the shorter of the two", "tokens": "or to multiply one token"}
    instead = either["tokens"] if not fault.tokens else either.get(fault.combine, fault.told)
    assert told(fault.told, messages) or told(instead, messages), messages


def test_every_way_to_pack_is_told():
    (case,) = lab05_pack.packing_cases((3, 12))(random.Random(8))
    codes = probes.codes_of(case["seed"], 3, 12).long()
    for words, packed in lab05_pack.packed_ways(codes):
        answer = {"pack": lambda _, packed=packed: packed.to(torch.uint8), "unpack": unpack}
        message = lab05_pack.judge_packing(case, crossed(probes.run_packing(answer, **case)))
        assert words in message if words else message is None


def test_a_tie_of_codes_may_go_either_way():
    """The same weights a hair apart: codes that follow from the answer's own earlier codes are right."""
    (case,) = lab05_gptq.column_cases((6, 16, 16, 4, 1.0))(random.Random(9))
    right = LAB.solution("quant-gptq")["quantize_columns"]

    def nudged(weight, factor, scale, zero, highest):
        return right(weight + 1e-7 * torch.randn(weight.shape), factor, scale, zero, highest)

    seen = probes.run_columns({"quantize_columns": nudged}, **case)
    assert lab05_gptq.judge_columns(case, crossed(seen)) is None


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
        inputs = lab05_parts.inputs_of(model, calibration, layer)["mlp.down"]
        rows = lab05_parts.rows_of(model, calibration, "mlp.down", layer)
        assert list(rows.shape) == [40, 64] and inputs.rows == 40
        torch.testing.assert_close(rows.T @ rows, inputs.second_moments)
        torch.testing.assert_close(rows.abs().mean(0), inputs.mean_abs)


def test_weights_are_refused_of_models_that_they_would_be_wrong_for():
    for name in ("gpt2", "deepseek-v2"):
        with pytest.raises(WorkbenchError, match="Llama's kind"):
            lab05_parts.weights_of(public_shape(name))


def test_numbers_are_a_stored_weight_that_comes_back_from_its_parts():
    stored = lab05_parts.Numbers(torch.randn(4, 6))
    again = lab05_parts.Numbers.from_parts(stored.tensors(), stored.settings())
    assert torch.equal(again.dequantize(), stored.dequantize())
    with pytest.raises(WorkbenchError, match="numbers"):
        lab05_parts.Numbers.from_parts({}, {})


def test_choices_have_one_answer():
    """No case hangs on a rounding: the best is better than the next by more than that, or exactly equal."""
    draw = random.Random(10)
    for case in lab05_recipe.choice_cases(draw) + lab05_recipe.tie_cases(draw):
        weights, machine = Weights(**case["weights"]), Machine(**case["machine"])
        times = sorted(
            lab05_recipe.exact_seconds(weights, Stored(**s), case["tokens"], machine) for s in case["recipes"]
        )
        assert all(b == a or b > a * (1 + 1e-9) for a, b in itertools.pairwise(times))


def test_the_exercises_send_the_reader_to_sections_that_the_lecture_has():
    text = (ROOT / "solutions" / f"{LAB.name}.py").read_text(encoding="utf-8")
    lecture = (ROOT / "notebooks" / "source" / f"{LAB.name}.py").read_text(encoding="utf-8")
    headings = set(re.findall(r"^# #+ (.+)$", lecture, flags=re.MULTILINE))
    named = [
        name
        for given in re.findall(r"\*Lab 05, ([^*]+)\.\*", text)
        for name in re.findall(r'"([^"]+)"', given)
    ]
    assert len(named) >= len(IDS) and set(named) <= headings, set(named) - headings
