"""Claims about products in loops of C++: what is counted is what the loops read and compute, their rates are measured
and kept, and a step takes the longer of bytes and arithmetic."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
from conftest import every_pair, random_decoder, tiny_config

from workbench.errors import WorkbenchError
from workbench.experiments.loops import Loops, steps_taken
from workbench.instruments import product_rates
from workbench.instruments.costs import StepCosts, decode_costs, predict, step_costs
from workbench.instruments.device import Ceilings
from workbench.instruments.passing import Passing
from workbench.instruments.product_rates import CODES, LOOPS, ROWS, KeptRates, Rates, measure_rates, why_no_loop
from workbench.instruments.records import now
from workbench.instruments.timing import Stopped
from workbench.kernels.cpu.codes import CodeProduct
from workbench.kernels.cpu.step import TYPES, Matrix
from workbench.models import native_steps, prepare
from workbench.models.checkpoints import zoo_config
from workbench.models.native_steps import NativeSteps, rows_limit
from workbench.quantization import QuantizationRecipe, QuantizedLinear, cpu_forms, quantize

MISSING = why_no_loop("float32") or why_no_loop("8 bits")
needs_compiler = pytest.mark.skipif(bool(MISSING), reason=f"the loops of C++: {MISSING}")
SHAPES = {
    "llama": tiny_config(vocab_size=96, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96),
    "biases, a tied head": tiny_config(hidden_size=64, intermediate_size=96, qkv_bias=True, tie_embeddings=True),
}


def in_bits(model, bits: int):
    return quantize(model, QuantizationRecipe("rtn", bits, 32, {"symmetric": True}, head_bits=8))


# -- held to the loops -------------------------------------------------------------------------------------------------


def loop_of(matrix: Matrix) -> str:
    """The name of the loop that computes a matrix of a native step."""
    if not isinstance(matrix.weight, CodeProduct):
        return str(TYPES[matrix.arguments.kind]).removeprefix("torch.")
    bits = 4 if matrix.weight.codes.numel() * 2 <= matrix.shape[0] * matrix.shape[1] else 8
    return f"{bits} bits" + ", q8" * matrix.weight.q8


def by_loop(costs: StepCosts) -> dict[str, tuple[int, float]]:
    """{loop: (multiply-accumulates, bytes of weights)} as counted."""
    products = [o for o in costs.operations if o.rows]
    return {
        loop: (sum(o.macs for o in products if o.loop == loop), sum(o.weight_bytes for o in products if o.loop == loop))
        for loop in {o.loop for o in products}
    }


@needs_compiler
@every_pair(shape=list(SHAPES), bits=[None, 4, 8], inputs=["exact", "q8"], rows=[1, 5], dtype=TYPES[:2])
def test_macs_and_bytes_that_are_counted_are_those_of_the_matrices_of_a_native_step(shape, bits, inputs, rows, dtype):
    config, inputs = SHAPES[shape], "exact" if bits is None else inputs
    decoder = random_decoder(config).to(dtype)
    model = decoder if bits is None else in_bits(decoder, bits)
    parts = NativeSteps.of(model, inputs).parts
    matrices = [(one, rows) for layer in parts.layers for one in layer.matrices.values()] + [(parts.head, 1)]
    expected: dict[str, tuple[int, float]] = {}
    for one, times in matrices:
        macs, size = expected.get(loop_of(one), (0, 0))
        biases = 0 if one.bias is None else one.bias.nbytes * dtype.itemsize // 4  # the loop holds them in float32
        read = one.weight.nbytes + biases
        expected[loop_of(one)] = macs + times * one.shape[0] * one.shape[1], size + read
    linears = [one for one in model.get_submodule("layers").modules() if isinstance(one, QuantizedLinear)]
    size = {}
    if linears:
        weights = sum(one.in_features * one.out_features for one in linears)
        head = model.head
        size = {
            "linear_bytes_per_element": sum(one.stored.nbytes for one in linears) / weights,
            "head_bytes_per_element": head.stored.nbytes / (head.in_features * head.out_features),
        }
    counted = step_costs(
        config,
        new_tokens=[rows],
        contexts=[7],
        logit_rows=1,
        weight_bytes_per_element=dtype.itemsize,
        kv="contiguous",
        arrangement="fast",
        **size,
    )
    in_all = by_loop(Loops("native", dtype, bits, None if bits is None else 8, inputs).counted(counted))
    assert {loop: macs for loop, (macs, _) in in_all.items()} == {loop: macs for loop, (macs, _) in expected.items()}
    for loop, (_, read) in expected.items():
        assert in_all[loop][1] == pytest.approx(read, rel=1e-12)


@needs_compiler
@pytest.mark.parametrize("loop", CODES)
@pytest.mark.parametrize("rows", ROWS)
def test_a_loop_over_codes_multiplies_as_often_as_is_counted(loop, rows):
    """With codes, scales and inputs of 1 each product is 1: a sum of outputs is the number of multiply-accumulates."""
    product = product_rates.code_matrix(24, *CODES[loop])
    bits, precision = CODES[loop]
    ones = torch.ones(24, product_rates.INSIDE // 32, 32, dtype=torch.int8)
    if bits == 4:
        ones = torch.full((24, product_rates.INSIDE // 32, 16), 9 | 9 << 4, dtype=torch.uint8)
    scale = torch.ones(24, product_rates.INSIDE // 32, dtype=torch.float16)
    kind, centre = ("signed", 0) if bits == 8 else ("nibbles", 8)
    ones = CodeProduct(
        ones, scale, None, kind=kind, inputs=product.in_features, group=32, centre=centre, precision=precision
    )
    assert ones.nbytes == product.nbytes == 24 * product.in_features * bits // 8 + scale.nbytes
    y = ones.multiply(torch.ones(rows, product.in_features))
    assert float(y.sum()) == pytest.approx(rows * 24 * product.in_features, rel=1e-5)


# -- predicted ---------------------------------------------------------------------------------------------------------


def ceilings(products=None, **change) -> Ceilings:
    table = Passing((1,), (1.0,), ((2e9,),))
    values = {"read_bytes_per_s": 1e9, "flop_per_s": {"float32": 1e18}, "launch_s": 1e-15, "copy_bytes_per_s": 1.0}
    values |= {"weight_passing": {"float32": table}, "launch_overlaps": False}
    return Ceilings(**{**values, **change}, measured=False, source="a test", products=products)


def a_step(rows: int = 1) -> StepCosts:
    step = decode_costs(tiny_config(), batch=rows, context=0, weight_bytes_per_element=4, linear_bytes_per_element=0.5)
    return step.in_one_call()


@pytest.mark.parametrize(("rate", "limit"), [(1e3, "compute"), (1e15, "bandwidth")])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_product_in_a_loop_takes_the_longer_of_bytes_and_arithmetic(rate, limit, rows):
    rates = {"4 bits": Rates((1, 4), (rate, 2 * rate)), "float32": Rates((1, 4), (1e16, 1e16))}
    costs = a_step(rows).in_loops("4 bits", "float32")
    prediction = predict(costs, ceilings(rates.__getitem__), "float32")
    seconds = {name: (s, what) for name, s, what in prediction.operations}
    for o in costs.operations:
        if o.rows and o.part != "head":
            assert o.macs * 2 == o.flops and seconds[o.name][1] == limit
            by_hand = max(o.weight_bytes / 2e9, o.macs / (rate if rows == 1 else 2 * rate))
            assert seconds[o.name][0] == pytest.approx(by_hand)
    head = costs.operation("head")
    assert seconds["head"] == (pytest.approx(head.weight_bytes / 2e9), "bandwidth")


def test_memory_s_plain_speed_counts_where_torch_s_products_are_slower():
    """A loop fetches what comes next while it computes, and is not held to what torch makes of memory."""
    slow = {"float32": Passing((1,), (1.0,), ((5e8,),))}
    costs = a_step().in_loops("4 bits", "4 bits")
    prediction = predict(costs, ceilings(lambda loop: Rates((1,), (1e16,)), weight_passing=slow), "float32")
    for name, seconds, _ in prediction.operations:
        o = costs.operation(name)
        assert not o.rows or seconds == pytest.approx(o.weight_bytes / 1e9)


def test_where_no_rates_are_known_a_loop_is_counted_as_torch_s_product():
    costs = a_step(3)
    for products in (None, lambda loop: None):
        prediction = predict(costs.in_loops("4 bits", "float32"), ceilings(products), "float32")
        assert prediction == predict(costs, ceilings(), "float32")


def test_many_rows_of_codes_take_torch_as_long_as_the_numbers_that_they_become():
    """However few bytes they are read from."""
    slow = Passing((1, 64), (1.0,), ((2e9, 1e9),))
    bound = ceilings(flop_per_s={"float32": 1e6}, weight_passing={"float32": slow})
    whole, coded = (
        step_costs(
            tiny_config(),
            new_tokens=[64],
            contexts=[0],
            logit_rows=64,
            weight_bytes_per_element=4,
            linear_bytes_per_element=each,
        )
        for each in (4, 0.5)
    )
    seconds, of_codes = (
        {name: s for name, s, _ in predict(costs, bound, "float32").operations} for costs in (whole, coded)
    )
    for o in coded.operations:
        if o.rows:
            assert of_codes[o.name] == pytest.approx(seconds[o.name])


def test_no_rate_is_asked_for_that_no_product_needs():
    asked = []
    predict(a_step(), ceilings(asked.append), "float32")
    assert not asked
    predict(a_step().in_loops("8 bits", ""), ceilings(asked.append), "float32")
    assert set(asked) == {"8 bits"}


def test_more_rows_than_a_loop_takes_and_experts_are_left_to_torch():
    whole = step_costs(tiny_config(), new_tokens=[9], contexts=[0], logit_rows=1, weight_bytes_per_element=4)
    some = whole.in_loops("8 bits", "8 bits", max_rows=8)
    assert {o.name for o in some.operations if o.loop} == {"head"}
    assert some.in_loops("", "").operations == whole.operations
    config = zoo_config("stdlib-1m-experts")
    mixture = decode_costs(config, batch=1, context=0, weight_bytes_per_element=4).in_loops("8 bits", "8 bits")
    assert {o.name for o in mixture.operations if o.loop} >= {"qkv", "o", "head"}
    assert not [o.name for o in mixture.operations if o.loop and ("expert" in o.name or o.name == "router")]


# -- by how a model is prepared ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("bits", [None, 8])
def test_rows_up_to_which_a_step_is_one_function_are_those_of_the_model(dtype, bits):
    model = random_decoder(SHAPES["llama"]).to(dtype)
    model = model if bits is None else in_bits(model, bits)
    assert Loops("native", dtype, bits, bits).native_limit == rows_limit(model)


def loops_in(how: Loops, rows: int) -> tuple[set[str], int]:
    costs = how.counted(a_prompt(rows))
    return {o.loop for o in costs.operations if o.rows}, costs.launches


def a_prompt(rows: int) -> StepCosts:
    return step_costs(tiny_config(), new_tokens=[rows], contexts=[0], logit_rows=rows, weight_bytes_per_element=4)


def test_each_way_of_a_step_has_its_loops():
    started = a_prompt(1).launches
    assert loops_in(Loops("eager", torch.float32), 1) == ({""}, started)
    assert loops_in(Loops("eager", torch.float32, 4, 8, "q8"), 1) == ({"4 bits, q8", "8 bits, q8"}, started)
    more = cpu_forms.MAX_ROWS + 1
    assert loops_in(Loops("eager", torch.float32, 4, 8), more) == ({""}, a_prompt(more).launches)
    assert loops_in(Loops("eager", torch.bfloat16, 6), 17) == ({"8 bits", ""}, a_prompt(17).launches)
    assert loops_in(Loops("compiled", torch.float32), 1) == ({""}, 0)
    assert loops_in(Loops("compiled", torch.float32, 3), 1) == ({"4 bits", ""}, 0)
    assert loops_in(Loops("compiled", torch.float32), 2) == ({""}, a_prompt(2).launches)
    assert loops_in(Loops("compiled", torch.float32, chain=9), 9) == ({""}, 0)
    assert loops_in(Loops("native", torch.float32, 4), 64) == ({"4 bits", "float32"}, 0)
    more = native_steps.MAX_ROWS + 1
    assert loops_in(Loops("native", torch.float32), more) == ({""}, a_prompt(more).launches)
    assert loops_in(Loops("native", torch.float32, 4, 4, "q8"), more) == ({"4 bits, q8"}, 0)
    with pytest.raises(WorkbenchError, match="unknown kind of step 'nativ'; did you mean 'native'"):
        Loops("nativ", torch.float32)


def test_steps_that_a_model_has_no_form_for_are_counted_as_the_eager_ones_that_it_takes():
    model = random_decoder(tiny_config(vocab_size=64, head_dim=12))
    asked = prepare(model, native=True, say=lambda line: None)
    assert asked.why_not_native and asked.steps == "native", "what was asked for"
    assert steps_taken(model) == steps_taken(prepare(model)) == steps_taken(asked) == "eager"


# -- measured and kept -------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("loop", LOOPS)
def test_a_real_measurement_is_of_this_world(loop, monkeypatch):
    monkeypatch.setattr(product_rates, "LEAST", 2)
    monkeypatch.setattr(product_rates, "BUDGET_S", 0.0)
    rates = measure_rates(loop)
    assert rates.rows == ROWS and all(1e6 < rate < 1e14 for rate in rates.macs_per_s)
    assert all(p10 <= median <= p90 == rate for (p10, median, p90), rate in zip(rates.spread, rates.macs_per_s))
    assert Rates.from_dict(json.loads(json.dumps(asdict(rates)))) == rates


@needs_compiler
def test_measuring_can_be_stopped_and_wants_a_loop_that_is_there():
    def stop():
        raise Stopped

    with pytest.raises(Stopped):
        measure_rates("8 bits", stop)
    with pytest.raises(WorkbenchError, match="unknown loop of products '8 bit'; did you mean '8 bits'"):
        measure_rates("8 bit")


def test_rates_between_two_measured_numbers_of_rows_lie_between_them():
    rates = Rates((1, 4), (1e9, 4e9))
    assert [rates.at(rows) for rows in (1, 2, 4, 99)] == pytest.approx([1e9, 2e9, 4e9, 4e9])
    for broken in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(WorkbenchError, match="a number above 0"):
            Rates((1, 4), (1e9, broken))


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """(new `KeptRates` of one machine, the loops that were measured, what a measurement gives)"""
    made: list[str] = []
    steady = ((1e9, 1e9, 1e9),) * len(ROWS)
    result = [Rates(ROWS, (1e9,) * len(ROWS), steady, now())]

    def fake(loop, stop=None):
        made.append(loop)
        return result[0]

    monkeypatch.setattr(product_rates, "measure_rates", fake)
    monkeypatch.setattr(product_rates, "why_no_loop", lambda loop: "no compiler" * (loop == "float16"))
    return lambda **how: KeptRates(tmp_path / "machine.json", **how), made, result


def test_rates_are_measured_once_a_machine_and_where_there_is_no_loop_there_are_none(kept):
    of_machine, made, result = kept
    assert of_machine()("8 bits") == of_machine()("8 bits") == result[0]
    assert of_machine()("4 bits, q8") == result[0] and made == ["8 bits", "4 bits, q8"]
    assert of_machine()("float16") is None and len(made) == 2
    of_machine(refresh=True)("8 bits")
    assert len(made) == 3


def test_rates_of_another_loop_and_those_of_a_busy_machine_are_measured_again(kept, monkeypatch):
    of_machine, made, result = kept
    result[0] = replace(result[0], spread=((1e8, 1e8, 1e9),) * len(ROWS))
    assert not result[0].steady
    for _ in range(2):
        of_machine()("8 bits")
    assert len(made) == 1, "believed for ten minutes"
    monkeypatch.setattr(product_rates, "UNSTEADY_FOR_S", -1)
    of_machine()("8 bits")
    assert len(made) == 2
    file = of_machine().file_of("8 bits")
    assert file.exists() and file != of_machine().file_of("4 bits") != of_machine().file_of("float32")


DAMAGES = {
    "empty": lambda text: "",
    "a list": lambda text: "[]",
    "another name": lambda text: text.replace("rows", "row"),
    "a spread too short": lambda text: json.dumps({**json.loads(text), "spread": [[1e9, 1e9]]}),
    "a spread of words": lambda text: json.dumps({**json.loads(text), "spread": [[1e9, "1e9", 1e9]]}),
    "brackets without end": lambda text: "[" * 200_000,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_measured_again_and_mended(kept, damage):
    of_machine, made, _ = kept
    of_machine()("8 bits")
    file = of_machine().file_of("8 bits")
    file.write_text(damage(file.read_text()))
    of_machine()("8 bits")
    of_machine()("8 bits")
    assert len(made) == 2
