"""SqueezeLLM: the clusters against the optimum, the sparse part, the gradients against autograd, what is kept in
files."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import random_decoder, tiny_config
from test_parity import relative_difference

from workbench.errors import WorkbenchError
from workbench.kv import Recompute
from workbench.models import Batch, load
from workbench.models.config import LatentAttentionShape
from workbench.models.evaluation import held_out_passages, loss_through
from workbench.models.training import TrainingAttention, rows_batch
from workbench.quantization import (
    Calibration,
    Grouped,
    Inputs,
    IntegerFormat,
    QuantizationRecipe,
    QuantizedLinear,
    load_quantized,
    quantize,
    save_quantized,
)
from workbench.quantization import squeezellm as module
from workbench.quantization.calibration import squared_gradients
from workbench.quantization.pipeline import copy_of
from workbench.quantization.squeezellm import CodebookWeight, kept_apart, nearest_level, squeeze, weighted_kmeans

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
BIASED = tiny_config(**SMALL, qkv_bias=True, attention_output_bias=True, mlp_bias=True)
LATENT = LatentAttentionShape(16, kv_rank=8, rotary_head_dim=8, content_head_dim=8, value_head_dim=8)
SHAPES = {
    "llama GQA with biases": BIASED,
    "latent": tiny_config(**SMALL | {"head_dim": 16}, family="deepseek_v3", num_kv_heads=4, latent_attention=LATENT),
    "shared layers": tiny_config(**SMALL, kv_sources=(0, 0), num_kv_heads=4),
}
CALIBRATION = Calibration(torch.randint(0, 64, (3, 16), generator=torch.Generator().manual_seed(9)))
WHOLE = Batch.of([list(range(20))], logits="all")


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model(WHOLE, Recompute(model.config))


def rows_of(rows: int, n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, and weights of which few are large, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, n, generator=generator), torch.rand(rows, n, generator=generator) ** 4


def weighted_error(values: torch.Tensor, weights: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    found = levels.double().gather(1, nearest_level(values, levels))
    return ((values.double() - found).square() * weights).sum(1)


def optimum(values: torch.Tensor, weights: torch.Tensor, levels: int) -> float:
    """Of one row, over all cuts into intervals: dynamic programming in plain Python."""
    pairs = sorted(zip(values.tolist(), weights.tolist()))

    def costs(end: int) -> list[float]:
        """Of one level for values start … end − 1, for each start."""
        found, s0, s1, s2 = [0.0] * end, 0.0, 0.0, 0.0
        for start in range(end - 1, -1, -1):
            x, w = pairs[start]
            s0, s1, s2 = s0 + w, s1 + w * x, s2 + w * x * x
            found[start] = max(0.0, s2 - s1 * s1 / s0)
        return found

    cost = [costs(end) for end in range(len(pairs) + 1)]
    best = [0.0] + [float("inf")] * len(pairs)
    for _ in range(levels):
        best = [min((best[a] + c for a, c in enumerate(cost[end])), default=0.0) for end in range(len(best))]
    return best[-1]


# -- the clusters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "levels"), [(5, 4), (16, 8), (30, 4), (60, 8)])
def test_short_rows_get_the_best_of_all_codebooks(n, levels):
    values, weights = rows_of(6, n)
    errors = weighted_error(values, weights, weighted_kmeans(values, weights, levels))
    for row in range(6):
        assert float(errors[row]) == pytest.approx(optimum(values[row], weights[row], levels), rel=1e-9)


def test_the_dynamic_programme_is_right_by_brute_force():
    """The oracle's own oracle: all 3-part cuts of 8 values."""
    values, weights = rows_of(1, 8)
    x, order = values[0].double().sort()
    w = weights[0].double()[order]

    def cost(a: int, b: int) -> float:
        mean = (w[a:b] * x[a:b]).sum() / w[a:b].sum()
        return float((w[a:b] * (x[a:b] - mean).square()).sum())

    best = min(cost(0, a) + cost(a, b) + cost(b, 8) for a, b in itertools.combinations(range(1, 8), 2))
    assert optimum(values[0], weights[0], 3) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("levels", [4, 8])
def test_long_rows_come_within_two_percent_of_the_best(levels):
    values, weights = rows_of(6, 160, seed=levels)
    errors = weighted_error(values, weights, weighted_kmeans(values, weights, levels))
    ratios = [float(errors[i]) / optimum(values[i], weights[i], levels) for i in range(6)]
    assert min(ratios) > 1 - 1e-9 and sum(ratios) / 6 < 1.01 and max(ratios) < 1.03, ratios


def test_rows_in_parts_are_rows_at_once(monkeypatch):
    values, weights = rows_of(9, 40)
    whole = weighted_kmeans(values, weights, 4)
    monkeypatch.setattr(module, "CHUNK", 2 * 32**2)
    assert torch.equal(weighted_kmeans(values, weights, 4), whole)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_weighted_error_is_never_above_that_of_evenly_spaced_levels(bits):
    values, weights = rows_of(40, 128, seed=bits)
    even = Grouped.rounded(values, IntegerFormat(bits), None).dequantize().double()
    theirs = ((values.double() - even).square() * weights).sum(1)
    stored = squeeze(values, weights, bits).dequantize().double()
    ours = ((values.double() - stored).square() * weights).sum(1)
    assert bool((ours < 0.9 * theirs).all())


def test_levels_go_where_the_weights_are():
    values = torch.tensor([[-1.0, -0.9, -0.8, -0.7, -0.6, 0.6, 1.0, 5.0]])
    matters = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1e-9, 1e-9, 1e-9, 1e-9]])
    levels = weighted_kmeans(values, matters, 4)
    assert weighted_error(values[:, :4], matters[:, :4], levels).item() < 1e-2 * 0.01
    without = weighted_kmeans(values, torch.ones(1, 8), 4)
    assert without.max() == 5.0 and weighted_error(values[:, :4], matters[:, :4], without).item() > 1e-3


@pytest.mark.parametrize("n", [16, 256])
def test_rows_of_few_values_and_of_zeros_come_back_exactly(n):
    kinds = torch.tensor([[0.0] * 4, [0.25] * 4, [-1.5, 0.0, 0.5, 3.0], [0.0, 0.0, 0.0, 1.0]])
    weight = kinds.repeat(1, n // 4)
    for sensitivity in (torch.ones_like(weight), torch.zeros_like(weight), rows_of(4, n)[1]):
        assert torch.equal(squeeze(weight, sensitivity, 2).dequantize(), weight)


# -- dense and sparse ------------------------------------------------------------------------------------------------


def test_the_most_sensitive_and_then_the_largest_are_kept_apart():
    weight, sensitivity = rows_of(20, 50)
    sensitivity[3, 4] = 9.0
    weight[3, 4], weight[7, 8], weight[0, 1] = 1e-3, 60.0, -50.0
    apart = kept_apart(weight, sensitivity, 0.002, 0.001)
    assert apart.nonzero().tolist() == [[0, 1], [3, 4], [7, 8]]
    assert kept_apart(weight, sensitivity, 0.004, 0.0005).sum() == 4  # of 0.5 rounded to even: none


def test_what_is_kept_apart_comes_back_and_pulls_no_level():
    weight, sensitivity = rows_of(24, 64)
    weight[::5, 3], weight[11, 60:] = 80.0, -90.0
    plain, apart = squeeze(weight, sensitivity, 3), squeeze(weight, sensitivity, 3, outliers=9 / (24 * 64))
    exact = weight.abs() > 50
    assert exact.sum() == 9 == len(apart.values)
    assert (apart.dequantize() - weight)[exact].abs().max() < 90 * 2**-11
    assert apart.levels.abs().max() < 5 < plain.levels.abs().max()
    of_others, rows = sensitivity.masked_fill(exact, 0.0), exact.any(1)
    error = [((w.dequantize() - weight).square() * of_others)[rows].sum() for w in (plain, apart)]
    assert error[1] < 0.8 * error[0]


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_bytes_are_counted_and_rows_and_products_are_those_of_the_whole(bits, sparse, monkeypatch):
    weight, sensitivity = rows_of(37, 48)
    stored = squeeze(weight, sensitivity, bits, *((0.01, 0.005) if sparse else ()))
    number = round(0.01 * 37 * 48) + round(0.005 * 37 * 48) if sparse else 0
    parts = 37 * 48 * bits // 8 + 37 * 2**bits * 2 + (number * (2 + 2) + 38 * 4 if sparse else 0)
    assert stored.nbytes == parts == sum(t.nbytes for t in stored.tensors().values())
    whole = stored.dequantize()
    assert torch.equal(stored.dequantize_rows(5, 21), whole[5:21])
    x = torch.randn(4, 48)
    monkeypatch.setattr("workbench.quantization.stored.ROW_BLOCK_BYTES", 4 * 48 * 10)
    assert relative_difference(stored.multiply(x), x @ whole.T) < 1e-6
    back = CodebookWeight.from_parts(stored.tensors(), stored.settings())
    assert torch.equal(back.dequantize(), whole)


def test_many_inputs_have_wider_columns():
    weight = torch.zeros(2, 2**15 + 8)
    weight[0, 5], weight[1, -1] = 3.0, -4.0
    stored = squeeze(weight, torch.ones_like(weight), 2, outliers=2 / weight.numel())
    assert stored.columns.dtype is torch.int32 and stored.columns.tolist() == [5, 2**15 + 7]
    assert torch.equal(stored.dequantize(), weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, s: t.pop("levels"), "needs its levels"),
        (lambda t, s: t.pop("columns"), "needs its columns"),
        (lambda t, s: s.update(sparse=False), "has no values, columns, row_starts"),
        (lambda t, s: s.update(sparse=1), "true or false"),
        (lambda t, s: s.update(bits=3), "3 bits do not fill 16 bytes"),
        (lambda t, s: s.update(bits=2), r"levels must be \[6, 4\]"),
        (lambda t, s: s.update(bits=5), "2, 3 or 4 bits"),
        (lambda t, s: s.update(bit=4), "did you mean 'bits'"),
        (lambda t, s: t.update(codes=t["codes"].short()), "codes must be"),
        (lambda t, s: t["levels"].fill_(float("inf")), "only finite"),
        (lambda t, s: t["values"].fill_(float("nan")), "only finite"),
        (lambda t, s: t["columns"].fill_(-1), "columns must rise within each row, from 0 to 31"),
        (lambda t, s: t["columns"].fill_(32), "columns must rise"),
        (lambda t, s: t["columns"].fill_(3), "columns must rise"),
        (lambda t, s: t.update(columns=t["columns"].int()), "columns must be"),
        (lambda t, s: t["row_starts"][-1].add_(1), "row_starts must rise from 0"),
        (lambda t, s: t["row_starts"][2].fill_(99), "row_starts must rise from 0"),
        (lambda t, s: t.update(row_starts=t["row_starts"][1:]), "row_starts must be"),
    ],
)
def test_parts_that_are_not_right_are_refused(change, message):
    weight, sensitivity = rows_of(6, 32)
    weight[2, :3] = 40.0
    stored = squeeze(weight, sensitivity, 4, outliers=3 / weight.numel())
    tensors, settings = {n: t.clone() for n, t in stored.tensors().items()}, stored.settings()
    change(tensors, settings)
    with pytest.raises(WorkbenchError, match=message):
        CodebookWeight.from_parts(tensors, settings)


# -- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_squared_gradients_are_those_of_the_loss_of_each_sequence(shape):
    model = random_decoder(SHAPES[shape])
    names = [n for n, m in model.layers.named_modules(prefix="layers") if isinstance(m, torch.nn.Linear)]
    found = squared_gradients(model, CALIBRATION, names)
    assert list(found) == names
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    twin = random_decoder(SHAPES[shape]).requires_grad_(True)
    wanted = dict.fromkeys(names, 0.0)
    for row in CALIBRATION.rows:
        twin.zero_grad()
        logits = twin(rows_batch(row[None]), TrainingAttention(twin.config))
        losses = [F.cross_entropy(logits[i], row[i + 1]) for i in range(len(row) - 1)]
        torch.stack(losses).mean().backward()
        for name in names:
            wanted[name] = wanted[name] + twin.get_submodule(name).weight.grad ** 2 / 3
    for name in names:
        assert relative_difference(found[name], wanted[name]) < 1e-5, name


def test_the_squared_gradient_says_what_a_step_of_one_weight_does_to_the_loss():
    """Finite differences in float64, of one weight and one sequence."""
    model, one = random_decoder(BIASED).double(), Calibration(CALIBRATION.rows[:1])
    found = squared_gradients(model, one, ["layers.0.mlp.up"])["layers.0.mlp.up"]
    at = divmod(int(found.argmax()), found.shape[1])

    def loss(step: float) -> float:
        moved = copy_of(model)
        weight = moved.layers[0].mlp.up.weight.detach().clone()
        weight[at] += step
        moved.layers[0].mlp.up.weight = torch.nn.Parameter(weight, requires_grad=False)
        logits = moved(rows_batch(one.rows), TrainingAttention(moved.config))
        return float(F.cross_entropy(logits[:-1], one.rows[0, 1:]))

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    assert float(found[at]) == pytest.approx(slope**2, rel=1e-5)


@pytest.mark.parametrize("weights", ["gradients", "inputs"])
def test_every_linear_is_clustered_by_its_own_weights(weights):
    model = random_decoder(BIASED)
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    said: list[str] = []
    asked = QuantizationRecipe("squeezellm", 3, options={"weights": weights})
    new = quantize(model, asked, CALIBRATION, report=said.append)
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())
    assert (said[0] == "gradients of the loss on 3 sequences") == (weights == "gradients")
    if weights == "gradients":
        names = [one.name for one in new.quantization.linears]
        for name, squares in squared_gradients(model, CALIBRATION, names).items():
            alone = squeeze(model.get_submodule(name).weight, squares, 3, 0.004, 0.0005)
            assert torch.equal(alone.dequantize(), new.get_submodule(name).dequantized_weight()), name
    else:
        x = []
        hook = model.layers[0].attention.q.register_forward_pre_hook(lambda _, args: x.append(args[0]))
        with torch.no_grad():
            model(rows_batch(CALIBRATION.rows), TrainingAttention(model.config))
        hook.remove()
        weight = model.layers[0].attention.q.weight
        seen = x[0].square().sum(0).expand_as(weight)
        alone = squeeze(weight, seen, 3, 0.004, 0.0005).dequantize()
        assert relative_difference(new.layers[0].attention.q.dequantized_weight(), alone) < 1e-3


def test_stopping_between_sequences_leaves_the_model_as_it_was():
    model = random_decoder(BIASED)
    before, calls = logits_of(model), itertools.count()

    def stop():
        if next(calls) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(model, QuantizationRecipe("squeezellm"), CALIBRATION, check_stop=stop)
    assert torch.equal(logits_of(model), before) and all(p.grad is None for p in model.parameters())


# -- whole models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_computes_with_the_dequantized_weights_and_comes_back_from_its_folder(tmp_path, shape, bits):
    new = quantize(
        random_decoder(SHAPES[shape]), QuantizationRecipe("squeezellm", bits, options={"outliers": 0.01}), CALIBRATION
    )
    plain = copy_of(new)
    for path, module_ in list(plain.named_modules()):
        if isinstance(module_, QuantizedLinear):
            linear = torch.nn.Linear(module_.in_features, module_.out_features, bias=module_.bias is not None)
            linear.weight.data = module_.dequantized_weight()
            if module_.bias is not None:
                linear.bias.data = module_.bias
            owner, _, leaf = path.rpartition(".")
            setattr(plain.get_submodule(owner), leaf, linear)
    assert relative_difference(logits_of(new), logits_of(plain)) < 1e-5
    save_quantized(new, tmp_path / "q")
    assert torch.equal(logits_of(load_quantized(tmp_path / "q")), logits_of(new))
    counted = new.quantization.nbytes + sum(p.nbytes for p in new.parameters())
    file = tmp_path / "q/model.safetensors"
    assert file.stat().st_size == counted + 8 + int.from_bytes(file.read_bytes()[:8], "little")


def test_on_a_shipped_model_codebooks_by_gradients_beat_evenly_spaced_levels():
    model = load("stdlib-1m", dtype="float32")
    passages = held_out_passages(model.tokenizer, 128, 16)
    calibration = Calibration.of(model.tokenizer, sequences=8, length=128)

    def loss(one) -> float:
        return loss_through(one, Recompute(one.config), passages, chunk=128).nats_per_token

    dense = {"outliers": 0, "sensitive": 0}
    plain = loss(model)
    even, clustered, apart = (
        loss(quantize(model, asked, calibration)) - plain
        for asked in (
            QuantizationRecipe("rtn", 3, options={"whole_rows": True}),
            QuantizationRecipe("squeezellm", 3, options=dense),
            QuantizationRecipe("squeezellm", 3),
        )
    )
    assert 0 < apart < clustered < 0.5 * even, (apart, clustered, even)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: QuantizationRecipe("squeezellm", 5), "2, 3 or 4 bits"),
        (lambda m: QuantizationRecipe("squeezellm", 4, 64), "has no group"),
        (lambda m: QuantizationRecipe("squeezellm", options={"outlier": 0.1}), "did you mean 'outliers'"),
        (lambda m: QuantizationRecipe("squeezellm", options={"outliers": -0.1}), "the share of outliers must"),
        (
            lambda m: QuantizationRecipe("squeezellm", options={"sensitive": True}),
            "the share of sensitive weights must",
        ),
        (lambda m: QuantizationRecipe("squeezellm", options={"weights": "hessian"}), '"gradients" or "inputs"'),
        (lambda m: quantize(m, QuantizationRecipe("squeezellm")), "needs calibration text"),
        (
            lambda m: quantize(m, QuantizationRecipe("squeezellm"), Calibration(CALIBRATION.rows[:, :1])),
            "at least 2 tokens",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(call, message):
    with pytest.raises(WorkbenchError, match=message):
        call(random_decoder(BIASED))


def test_inputs_that_fill_no_whole_bytes_are_refused():
    asked = QuantizationRecipe("squeezellm", 3, options={"weights": "inputs"}).make()
    inputs = Inputs(torch.eye(12), torch.ones(12), torch.ones(12), 12)
    with pytest.raises(WorkbenchError, match=r"12 codes of 3 bits .* come in 8s"):
        asked.store(torch.randn(4, 12), inputs)


@pytest.mark.parametrize("weights", ["gradients", "inputs"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(weights, bad):
    model = random_decoder(BIASED)
    model.layers[1].mlp.up.weight.data[3, 5] = bad
    with pytest.raises(WorkbenchError, match=r"layers.1.mlp.up: .* at \[3, 5\]"):
        quantize(model, QuantizationRecipe("squeezellm", options={"weights": weights}), CALIBRATION)


def test_weights_beyond_float16_are_refused():
    inputs = Inputs(torch.eye(8), torch.ones(8), torch.ones(8), 8)
    asked = dataclasses.replace(QuantizationRecipe("squeezellm"), options={"weights": "inputs"}).make()
    with pytest.raises(WorkbenchError, match="float16"):
        asked.store(torch.full((2, 8), 1e6), inputs)
