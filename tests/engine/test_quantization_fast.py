"""Quantized weights arranged for inference: every fast form gives what the dequantized weights give, models prepared
with them write the same text, and what has no fast form keeps working."""

from __future__ import annotations

import copy
import math
import re
import shutil

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_parity import TOLERANCE, relative_difference

from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kernels.cpu import codes
from workbench.kv import Contiguous, Recompute
from workbench.models import Batch, load, prepare
from workbench.models.compiled import OPTIONS
from workbench.models.config import LatentAttentionShape
from workbench.quantization import Grouped, IntegerFormat, QuantizationRecipe, QuantizedLinear, cpu_forms, quantize
from workbench.quantization import inference as forms
from workbench.quantization.cpu_forms import MAX_ROWS_OF_Q8, CodeKernel
from workbench.quantization.formats import FP8_E4M3
from workbench.quantization.inference import AsStored, CodeMatvec, NibbleKernel, ScaledRows, product_for
from workbench.quantization.prepared import recipe_for
from workbench.quantization.stored import StoredWeight
from workbench.serving import Engine, Request

NO_LOOPS = codes.why_not_here()
needs_loops = pytest.mark.skipif(bool(NO_LOOPS), reason=f"the loops over codes: {NO_LOOPS}")
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler, none is here"
)
# A prepared model and the one it is made from round at other places: in bfloat16 a few of its 2^-8 over a product.
BFLOAT16 = 3 * 2.0**-7
FORMATS = [IntegerFormat(bits, symmetric) for bits in range(2, 9) for symmetric in (False, True)]
GROUPS = [None, 64, 32, 16]
OUT, INSIDE = 80, 192
ROWS = (1, 2, 5, 40, 60)


def weight(format, group, *, out=OUT, seed=0) -> Grouped:
    generator = torch.Generator().manual_seed(seed)
    return Grouped.rounded(0.02 * torch.randn(out, INSIDE, generator=generator) + 0.003, format, group)


def inputs(rows: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(rows, INSIDE, generator=torch.Generator().manual_seed(rows)).to(dtype)


def product(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return x.double() @ numbers.double().T


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(codes, "why_not_here", lambda: "no C++ compiler was found")


# -- forms of a weight -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_every_form_gives_the_product_with_the_dequantized_weight(format, group):
    check_form(weight(format, group))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("format", [one for one in FORMATS if one.bits in (4, 6, 8)], ids=lambda f: f.name)
def test_without_a_compiler_too(format, group, without_compiler):
    assert not isinstance(product_for(weight(format, group), torch.float32), CodeKernel)
    check_form(weight(format, group))


def check_form(stored: Grouped) -> None:
    for dtype, tolerance in ((torch.float32, TOLERANCE), (torch.bfloat16, BFLOAT16)):
        fast = product_for(stored, dtype)
        for rows in ROWS:
            x = inputs(rows, dtype)
            before = x.clone()
            y = fast(x)
            assert y.dtype == dtype and y.shape == (rows, OUT)
            assert relative_difference(y.double(), product(x, stored.dequantize())) < tolerance, (fast.form, rows)
            assert torch.equal(x, before)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("out", [OUT, 7, 17])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_sums_of_codes_are_the_product_of_a_few_rows(format, out, group):
    """Also for outputs that do not fill the lanes of a vector."""
    stored = weight(format, group, out=out)
    for dtype, tolerance in ((torch.float32, TOLERANCE), (torch.bfloat16, 2.0**-7)):
        for rows in (1, 3):
            x = inputs(rows, dtype)
            y = CodeMatvec(stored, dtype)(x)
            assert y.dtype == dtype and y.shape == (rows, out)
            assert relative_difference(y.double(), product(x, stored.dequantize())) < tolerance


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_the_kernel_for_4_bits_moves_a_number_no_further_than_it_says(format):
    """Its scales are bfloat16. What comes out is the product with the numbers that it says it takes the weight for."""
    for group in (None, 32):
        stored = weight(format, group)
        kernel = NibbleKernel(stored)
        moved = (kernel.dequantize() - stored.dequantize()).abs()
        assert (moved <= kernel.error_bound()).all()
        rounded = (stored.dequantize().bfloat16().float() - stored.dequantize()).abs()
        assert moved.mean() < 3 * rounded.mean()  # about what rounding the numbers themselves does
        for rows in (1, 5):
            x = inputs(rows, torch.bfloat16)
            assert relative_difference(kernel(x).double(), product(x, kernel.dequantize())) < 2.0**-6


@pytest.mark.parametrize("bits, bytes_a_weight", [(8, 1.0), (6, 1.0), (4, 0.5), (3, 0.5), (2, 0.5)])
def test_a_form_reads_a_byte_or_half_a_byte_a_weight_and_its_scales(bits, bytes_a_weight):
    stored = weight(IntegerFormat(bits), 64)
    codes, scales = OUT * INSIDE * bytes_a_weight, 2 * 2 * OUT * INSIDE / 64
    for made in (CodeMatvec(stored), NibbleKernel(stored)):
        twice = 1 + (bits > 4 and isinstance(made, NibbleKernel))  # each product has scales of its own
        assert made.weight_bytes == codes + twice * scales
    rows = ScaledRows(weight(IntegerFormat(8, symmetric=True), None))
    assert rows.weight_bytes == OUT * INSIDE + 4 * OUT
    assert AsStored(stored).weight_bytes == stored.nbytes


@needs_loops
@pytest.mark.parametrize("group", GROUPS[:3])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_inputs_in_8_bits_stay_within_their_bound(format, group):
    """|error| ≤ Σ over blocks of (max|x| / 254) · Σ|ŵ|, and what float32 adds; many rows go the exact way."""
    stored = weight(format, group)
    q8, numbers = product_for(stored, torch.float32, "q8"), stored.dequantize().double()
    assert q8.form.endswith("inputs rounded to 8")
    for rows in (*ROWS, MAX_ROWS_OF_Q8 + 1):
        x = inputs(rows)
        block = min(group or INSIDE, 256)
        step = x.view(rows, -1, block).abs().amax(2).double().repeat_interleave(block, 1) / 254
        bound = step @ numbers.abs().T + 1e-6 * (x.double().abs() @ numbers.abs().T).max()
        apart = (q8(x) - product(x, numbers)).abs()
        assert (apart <= bound).all() and ((apart > 1e-4 * bound).any() or rows > MAX_ROWS_OF_Q8)


@needs_loops
def test_codes_of_8_and_4_bits_are_read_where_they_are_stored():
    for format in (IntegerFormat(8), IntegerFormat(8, True), IntegerFormat(4), IntegerFormat(4, True)):
        stored = weight(format, 64)
        made = product_for(stored, torch.float32)
        assert made._product.codes.data_ptr() == stored.codes.data_ptr()
        assert made.weight_bytes == stored.nbytes


@needs_loops
def test_which_form_a_weight_has_with_a_compiler():
    for stored in (weight(IntegerFormat(8), 64), weight(IntegerFormat(8), None), weight(IntegerFormat(3), 32, out=7)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert isinstance(product_for(stored, dtype), CodeKernel)
        assert not isinstance(product_for(stored, torch.float64), CodeKernel)
    for stored in (weight(IntegerFormat(4), 16), weight(FP8_E4M3, 64)):
        assert isinstance(product_for(stored, torch.float32), AsStored)
        with pytest.raises(WorkbenchError, match=r'no form for inputs="q8" here: .*leave inputs="exact"'):
            product_for(stored, torch.float32, "q8")


def test_which_form_a_weight_has(without_compiler):
    fine, whole = weight(IntegerFormat(8), 64), weight(IntegerFormat(8), None)
    assert isinstance(product_for(fine, torch.bfloat16), NibbleKernel)
    assert isinstance(product_for(whole, torch.float32), ScaledRows)
    for stored, dtype in (
        (fine, torch.float32),  # torch has no fast kernel for groups and float32
        (weight(IntegerFormat(4), 16), torch.bfloat16),  # nor for groups so small
        (weight(FP8_E4M3, 64), torch.bfloat16),
        (weight(IntegerFormat(4), 64, out=40), torch.bfloat16),  # nor for outputs that are no multiple of 16
    ):
        assert isinstance(product_for(stored, dtype), AsStored)
        assert (
            relative_difference(
                product_for(stored, dtype)(inputs(3, dtype)).double(), product(inputs(3, dtype), stored.dequantize())
            )
            < BFLOAT16
        )


# -- the open list -----------------------------------------------------------------------------------------------


def test_a_maker_that_is_registered_is_asked_first_and_may_pass(monkeypatch):
    """The slot for a kernel of one's own."""
    monkeypatch.setattr(forms, "FORMS", {key: list(makers) for key, makers in forms.FORMS.items()})

    class Mine(AsStored):
        form = "mine"

    @forms.fast_form("grouped", "cpu")
    def mine(stored, dtype):
        return Mine(stored) if stored.group == 32 else None

    assert product_for(weight(IntegerFormat(4), 32), torch.bfloat16).form == "mine"
    assert product_for(weight(IntegerFormat(4), 64), torch.bfloat16).form != "mine"


class Halves(StoredWeight):
    """A kind without a fast form: numbers in float16."""

    kind = "halves, for this test"

    def __init__(self, numbers: torch.Tensor) -> None:
        super().__init__(*numbers.shape)
        self.register_buffer("numbers", numbers.half())

    def dequantize_rows(self, start, end):
        return self.numbers[start:end].float()

    def settings(self):
        return {}

    @classmethod
    def from_parts(cls, tensors, settings):
        return cls(tensors["numbers"])


# -- models ------------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
LATENT = LatentAttentionShape(32, kv_rank=32, rotary_head_dim=16, content_head_dim=16, value_head_dim=16)
SHAPES = {
    "GQA": tiny_config(**SMALL),
    "biases": tiny_config(**SMALL, qkv_bias=True, attention_output_bias=True, mlp_bias=True),
    "shared layers": tiny_config(**SMALL, kv_sources=(0, 0)),
    "latent": tiny_config(**SMALL | {"head_dim": 32}, family="deepseek_v3", num_kv_heads=4, latent_attention=LATENT),
    "gpt2": tiny_config(
        **SMALL, family="gpt2", num_kv_heads=4, qkv_bias=True, attention_output_bias=True, mlp_bias=True
    ),
}
RECIPES = {
    "int8": QuantizationRecipe("rtn", 8, options={"symmetric": True, "whole_rows": True}),
    "int8 in groups": QuantizationRecipe("rtn", 8, 32),
    "int4": QuantizationRecipe("rtn", 4, 32),
    "int3 but for o": QuantizationRecipe("rtn", 3, 32, skip=("attention.o",)),
}
PROMPT = [5, 17, 3, 60, 22, 9, 41]


def quantized(shape: str, recipe: str, dtype=torch.float32):
    return quantize(random_decoder(SHAPES[shape]).to(dtype), RECIPES[recipe])


@torch.no_grad()
def logits_of(model, kv=None) -> torch.Tensor:
    """A prompt and three steps of one row."""
    kv = Contiguous(model.config) if kv is None else kv
    batches = [Batch.of([PROMPT], logits="all")]
    batches += [Batch.of([[7 + at]], first_positions=[len(PROMPT) + at]) for at in range(3)]
    return torch.cat([model(batch, kv) for batch in batches]).float()


def with_divisors(model):
    """Every linear scales its inputs first, as AWQ has it where the scale cannot be folded away."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.divisor = torch.linspace(0.8, 1.25, module.in_features)
    return model


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prepared_quantized_model_gives_the_logits_of_the_unprepared_one(shape, recipe):
    model = quantized(shape, recipe)
    assert relative_difference(logits_of(prepare(model)), logits_of(model)) < TOLERANCE
    with_divisors(model)
    assert relative_difference(logits_of(prepare(model)), logits_of(model)) < TOLERANCE


@pytest.mark.parametrize("recipe", RECIPES)
def test_in_bfloat16_a_linear_and_a_model_round_little_more_than_unprepared(recipe):
    """Both are held to float32 with the same weights, in the mean: one step of rounding is as good as another."""
    linear = quantized("biases", recipe, torch.bfloat16).layers[0].mlp.down
    x = torch.randn(40, linear.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = product(x, linear.dequantized_weight()) + linear.bias.double()
    fast = linear.for_inference(torch.bfloat16)
    off = [(linear(x).double() - exact).norm(), (torch.cat([fast(row[None]) for row in x]) - exact).norm()]
    assert off[1] < 1.6 * off[0]
    squares = torch.zeros(2)
    for seed in range(3):
        narrow = quantize(random_decoder(SHAPES["biases"], seed=seed).bfloat16(), RECIPES[recipe])
        logits = [logits_of(m) for m in (narrow, prepare(narrow), copy.deepcopy(narrow).float())]
        squares += torch.stack([(one - logits[2]).norm() ** 2 for one in logits[:2]])
    assert squares[1] < 4 * squares[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_greedy_tokens_are_those_of_the_unprepared_model(recipe):
    model = quantized("GQA", recipe)
    expected = generate(model, PROMPT, max_new_tokens=32, temperature=0.0, stop_token_ids=())
    got = generate(prepare(model), PROMPT, max_new_tokens=32, temperature=0.0, kv="contiguous", stop_token_ids=())
    assert got.tokens == expected.tokens and len(got.tokens) == 32


def test_linears_that_lie_alike_become_one_and_others_stay_side_by_side():
    model = quantized("biases", "int4")
    attention = model.layers[0].attention
    whole = attention.q.joined_with(attention.k, attention.v)
    each = [attention.q, attention.k, attention.v]
    assert torch.equal(whole.dequantized_weight(), torch.cat([one.dequantized_weight() for one in each]))
    assert torch.equal(whole.bias, torch.cat([one.bias for one in each]))
    x = torch.randn(3, 64)
    assert relative_difference(whole(x), torch.cat([one(x) for one in each], -1)) < TOLERANCE
    coarse = quantized("biases", "int8 in groups").layers[0].attention
    assert attention.q.joined_with(coarse.k) is None  # other codes
    assert attention.q.joined_with(torch.nn.Linear(64, 32)) is None
    attention.k.divisor = torch.full((64,), 2.0)
    assert attention.q.joined_with(attention.k) is None  # other inputs
    attention.k.divisor, attention.k.bias = None, None
    assert attention.q.joined_with(attention.k) is None  # a bias is missing
    assert relative_difference(logits_of(prepare(model)), logits_of(model)) < TOLERANCE


def test_the_prepared_model_says_which_linear_has_which_form():
    model = quantized("GQA", "int3 but for o", torch.bfloat16)
    said = prepare(model).forms
    assert list(said) == [f"layers.{i}.{name}" for i in (0, 1) for name in ("qkv", "o", "up", "down")] + ["head"]
    assert {said[f"layers.0.{name}"] for name in ("qkv", "up", "down")} == {
        "kernel for 4 bits" if NO_LOOPS else "C++ kernel for 4 bits"
    }
    assert said["layers.0.o"] == said["head"] == prepare(random_decoder(SHAPES["GQA"]).bfloat16()).forms["head"]


def test_weight_bytes_are_those_of_the_forms():
    model = quantized("biases", "int8")
    linears = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    scale = 4 if NO_LOOPS else 2
    held = sum(m.in_features * m.out_features + scale * m.out_features + m.bias.nbytes for m in linears)
    assert prepare(model).weight_bytes == held + model.head.weight.nbytes


def test_the_prepared_model_says_why_its_codes_are_read_as_they_are(without_compiler):
    """One sentence a reason, behind the one of the plain matrices."""
    plain = prepare(random_decoder(SHAPES["GQA"])).linear_reason
    said = prepare(quantized("GQA", "int4")).linear_reason
    assert said == f"{plain}; {AsStored.form}: no C++ compiler was found"


@needs_loops
def test_a_model_that_reads_its_codes_once_says_so():
    said = prepare(quantized("GQA", "int4")).linear_reason
    assert said.endswith(f"; C++ kernel for 4 bits: each code is read once ({codes.instructions()})")


@needs_loops
def test_inputs_are_rounded_by_name_only():
    model = quantized("GQA", "int8")
    exact, q8 = prepare(model), prepare(model, inputs="q8")
    apart = (logits_of(q8) - logits_of(model)).norm() / logits_of(model).norm()
    assert 1e-3 < apart < 0.1 and relative_difference(logits_of(exact), logits_of(model)) < TOLERANCE
    assert {form for name, form in q8.forms.items() if name != "head"} == {"C++ kernel for 8 bits, inputs rounded to 8"}
    assert len({exact.digest, q8.digest}) == 2  # a cache of one is none of the other


@pytest.mark.parametrize(
    ("shape", "settings", "said"),
    [
        ("quantized", {"inputs": "q9"}, "inputs.*'q9'.*q8"),
        ("quantized", {"inputs": None}, "inputs"),
        ("plain", {"inputs": "q8"}, r'is for quantized weights.*weights="int8"'),
        ("quantized", {"inputs": "q8", "compile": True}, "does not go with compile=True"),
    ],
)
def test_inputs_that_a_model_cannot_have(shape, settings, said):
    model = random_decoder(SHAPES["GQA"]) if shape == "plain" else quantized("GQA", "int8")
    with pytest.raises(WorkbenchError, match=said):
        prepare(model, **settings)


@needs_loops
@pytest.mark.parametrize("weights", ["int8", "int4", "int8_symmetric"])
def test_greedy_tokens_of_a_real_model_are_those_of_its_dequantized_weights(weights):
    """Through the engine, whose steps are of one row, of several, and of a prompt."""
    model = load("stdlib-10m")
    few_bits = quantize(model, recipe_for(model, weights))
    plain = copy.deepcopy(few_bits)
    for parent in list(plain.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, QuantizedLinear):
                whole = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
                whole.weight.data = module.dequantized_weight()
                if module.bias is not None:
                    whole.bias.data = module.bias
                setattr(parent, name, whole)
    said = []
    for one in (few_bits, plain):
        fast = prepare(one)
        prompts = ("def read(path):", "import ", "class Node:\n    def")
        requests = [Request(text, tuple(model.tokenizer.encode(text)), 24, stop_token_ids=()) for text in prompts]
        said.append({done.request_id: done.token_ids for done in Engine(fast).run(requests)})
    assert said[0] == said[1]
    assert {form.startswith("C++") for name, form in prepare(few_bits).forms.items() if name != "head"} == {True}


def test_a_kind_without_a_fast_form_keeps_working_and_is_not_compiled():
    model = random_decoder(SHAPES["biases"])
    for layer in model.layers:
        for owner, name in ((layer.attention, "q"), (layer.mlp, "down")):
            old = getattr(owner, name)
            setattr(owner, name, QuantizedLinear(Halves(old.weight.detach()), old.bias))
    fast = prepare(model)
    assert relative_difference(logits_of(fast), logits_of(model)) < TOLERANCE
    assert fast.forms["layers.0.qkv"].startswith(AsStored.form) and fast.forms["layers.1.down"] == AsStored.form
    with pytest.raises(WorkbenchError, match=r"halves, for this test.*no form.*without compile=True"):
        prepare(model, compile=True)


# -- compiled ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_compiler
def test_compiled_steps_of_a_quantized_model_give_the_same():
    """The whole step in one graph, with joined int4, and in pieces, with int8 and inputs that are scaled."""
    for shape, recipe, change in (("biases", "int4", lambda m: m), ("shared layers", "int8", with_divisors)):
        model = change(quantized(shape, recipe))
        fast = prepare(model, compile=True)
        assert relative_difference(logits_of(fast), logits_of(model)) < TOLERANCE
        alone = Batch.of([PROMPT[:1]])
        with torch.no_grad():  # a kv that shows nothing at once
            assert (
                relative_difference(fast(alone, Recompute(model.config)), model(alone, Recompute(model.config))) < 1e-5
            )


@needs_compiler
@pytest.mark.parametrize("format", [IntegerFormat(4), IntegerFormat(8), IntegerFormat(8, symmetric=True)], ids=str)
def test_compiled_no_number_is_written_down(format):
    """Codes become numbers in registers: nothing in the compiled code is as large as the weight."""
    from torch._inductor.utils import run_and_get_code

    stored = weight(format, 32, out=64)
    linear = CodeMatvec(stored)
    compiled = torch.compile(lambda x: linear(x * 0.5 + 1.0), options=OPTIONS)
    y, (code,) = run_and_get_code(compiled, inputs(1))
    assert relative_difference(y, linear(inputs(1) * 0.5 + 1.0)) < TOLERANCE
    found = re.findall(r"empty_strided_cpu\(\(([\d, ]+)\)", code)
    sizes = [math.prod(int(n) for n in re.findall(r"\d+", shape)) for shape in found]
    assert sizes and max(sizes) <= 64 * INSIDE // 32  # the sums of the groups
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        masked = code.count("at::vec::Vectorized<int32_t>(")  # one mask a part
        assert masked >= linear.parts, "codes are not read in vectors"
        assert "Vectorized<int32_t>::loadu(in_ptr" not in code, "words are loaded by way of memory"


@needs_loops
@pytest.mark.parametrize("inputs_as", ["exact", "q8"])
def test_types_that_the_processor_does_not_multiply_go_through_the_loop_whatever_the_rows(inputs_as, monkeypatch):
    made = product_for(weight(IntegerFormat(8), 64), torch.bfloat16, inputs_as)
    others = []
    monkeypatch.setattr(made, "others", lambda x: others.append(len(x)) or x.new_zeros(len(x), OUT))
    for has in (False, True):
        monkeypatch.setattr(cpu_forms, "torch_multiplies", lambda dtype, has=has: has)
        made(inputs(cpu_forms.MAX_ROWS_OF_Q8 + 1, torch.bfloat16))
        assert others == [cpu_forms.MAX_ROWS_OF_Q8 + 1] * has
