"""The decoder arranged for inference against the decoder it was made from: the same numbers, whatever the shape,
the linear, the batch and the kv; and a model that stays as it was."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import random_decoder, tiny_config
from test_parity import TOLERANCE, relative_difference

from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kv import Contiguous, Quantized, Recompute
from workbench.models import Batch, Decoder, load, prepare
from workbench.models.attention import eager_attention
from workbench.models.compiled import attend_rows, why_not_whole
from workbench.models.config import LatentAttentionShape, LinearScaling, ModelConfig, RotaryScaling, YarnScaling
from workbench.models.corpus import held_out_files, token_stream
from workbench.models.fast import FastDecoder
from workbench.models.linear import (
    LINEARS,
    Matvec,
    Packed,
    Plain,
    chosen_linear,
    linear_class,
    why_not_looped,
    why_not_packed,
)


def shape(**changes) -> ModelConfig:
    return tiny_config(**{"vocab_size": 64, "context_length": 4096, **changes})


def latent(query_rank: int | None) -> ModelConfig:
    sizes = LatentAttentionShape(query_rank, kv_rank=10, rotary_head_dim=4, content_head_dim=6, value_head_dim=8)
    return shape(family="deepseek_v3", num_kv_heads=4, head_dim=10, latent_attention=sizes)


SHAPES = {
    "llama GQA, tied": shape(),
    "llama MHA, untied": shape(num_kv_heads=4, tie_embeddings=False),
    "llama MQA": shape(num_kv_heads=1),
    "llama 3.1 scaling": shape(rope_theta=100.0, rope_scaling=RotaryScaling(8.0, 1.0, 4.0, 32)),
    "llama with biases": shape(qkv_bias=True, attention_output_bias=True, mlp_bias=True),
    "qwen2, bias on q, k, v": shape(family="qwen2", qkv_bias=True, tie_embeddings=False),
    "qwen3, norm on q, k": shape(family="qwen3", qk_norm=True, head_dim=16),
    "mistral window 8": shape(family="mistral", sliding_window=8, tie_embeddings=False),
    "gpt2": shape(
        family="gpt2", num_kv_heads=4, qkv_bias=True, attention_output_bias=True, mlp_bias=True, norm_eps=1e-3
    ),
    "a norm that matters little": shape(norm_eps=3.0),
    "windows on some layers, one sink": shape(sliding_window=8, global_layers=(1,), attention_sinks=1),
    "layers that share keys": shape(num_layers=4, kv_sources=(0, 0, 2, 2), qkv_bias=True),
    "sharing layers, norm on q, k": shape(family="qwen3", num_layers=3, kv_sources=(0, 0, 2), qk_norm=True),
    "gemma 3": shape(
        family="gemma3_text",
        num_layers=3,
        sliding_window=8,
        global_layers=(1,),
        rope_theta=1000.0,
        local_rope_theta=100.0,
        rope_scaling=LinearScaling(4.0),
        qk_norm=True,
        post_norms=True,
        zero_centered_norms=True,
        activation="gelu_tanh",
        embedding_scale=5.5,
        query_pre_attn_scalar=12.0,
    ),
    "yarn": shape(rope_scaling=YarnScaling(8.0, 32, mscale=0.7, mscale_all_dim=0.5)),
    "latent attention": latent(query_rank=12),
    "latent attention, q at once": latent(query_rank=None),
}
LINEAR = [
    "plain",
    *(["packed"] if not why_not_packed(torch.float32, "cpu") else []),
    *(["looped"] if not why_not_looped(torch.float32, "cpu") else []),
]
PACKS_BFLOAT16 = [t for t in (torch.float32, torch.bfloat16) if not why_not_packed(t, "cpu")]


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=SHAPES)
def model(request) -> Decoder:
    return random_decoder(SHAPES[request.param])


@pytest.fixture(scope="module")
def small() -> Decoder:
    return random_decoder(shape())


@torch.no_grad()
def logits_of(model: Decoder | FastDecoder, kv, *batches: Batch) -> torch.Tensor:
    return torch.cat([model(batch, kv) for batch in batches])


def batches() -> list[Batch]:
    """A prompt, prompts beside a decode, steps of one row, a chunk, drafts: rows for "all" and for "last"."""
    return [
        Batch.of([text(20)], sequences=["a"], logits="all"),
        Batch.of([text(1, 1), text(9, 2)], first_positions=[20, 0], sequences=["a", "b"]),
        Batch.of([text(1, 3)], first_positions=[21], sequences=["a"]),
        Batch.of([text(1, 4), text(1, 5)], first_positions=[22, 9], sequences=["a", "b"], logits="all"),
        Batch.of([text(7, 6), text(3, 7)], first_positions=[10, 23], sequences=["b", "a"]),
        Batch.of([text(4, 8)], first_positions=[26], sequences=["a"], logits="all"),
    ]


# -- the same numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("linear", LINEAR)
def test_a_prepared_model_gives_the_logits_of_the_model(model, linear):
    expected = logits_of(model, Contiguous(model.config, max_sequences=2), *batches())
    got = logits_of(prepare(model, linear=linear), Contiguous(model.config, max_sequences=2), *batches())
    assert relative_difference(got, expected) < TOLERANCE


@pytest.mark.parametrize("linear", LINEAR)
def test_it_does_so_without_a_cache_too(model, linear):
    whole = Batch.of([text(30), text(12, 1)], logits="all")
    expected = logits_of(model, Recompute(model.config, attention="eager"), whole)
    fast = prepare(model, linear=linear)
    assert relative_difference(logits_of(fast, Recompute(model.config), whole), expected) < TOLERANCE
    with torch.no_grad():
        a, b = (m.hidden(whole, Recompute(model.config)) for m in (fast, model))
    assert relative_difference(a, b) < TOLERANCE


@pytest.mark.parametrize("linear", LINEAR)
@pytest.mark.parametrize("kv", ["recompute", "contiguous"])
def test_greedy_tokens_are_those_of_the_model(model, linear, kv):
    expected = generate(model, text(20), max_new_tokens=32, temperature=0.0, stop_token_ids=())
    got = generate(
        prepare(model, linear=linear), text(20), max_new_tokens=32, temperature=0.0, kv=kv, stop_token_ids=()
    )
    assert got.tokens == expected.tokens and len(got.tokens) == 32


def test_in_float64_it_is_the_same_to_fifteen_digits():
    """What float32 hides: another eps, a norm or an angle that is computed in less."""
    for name, config in SHAPES.items():
        wide = random_decoder(config).double()
        expected = logits_of(wide, Recompute(config), Batch.of([text(30)], logits="all"))
        got = logits_of(prepare(wide), Recompute(config), Batch.of([text(30)], logits="all"))
        assert relative_difference(got, expected) < 1e-12, name


def test_the_shipped_model_writes_the_same_prepared():
    shipped = load("stdlib-10m")
    prompt = "import os\n\n\ndef read_lines(path):\n"
    asked = {"max_new_tokens": 24, "temperature": 0.0, "kv": "contiguous"}
    assert generate(prepare(shipped), prompt, **asked).text == generate(shipped, prompt, **asked).text


@torch.no_grad()
def held_out_loss(model: Decoder | FastDecoder, windows: torch.Tensor) -> float:
    """Nats a token."""
    batch = Batch.of(windows[:, :-1].tolist(), logits="all")
    logits = model(batch, Recompute(model.config)).float()
    return F.cross_entropy(logits, windows[:, 1:].flatten()).item()


@pytest.mark.slow
def test_in_bfloat16_the_held_out_loss_is_that_of_the_unprepared_model():
    shipped = load("stdlib-10m", dtype="bfloat16")
    windows = token_stream(held_out_files(), shipped.tokenizer)[: 8 * 129].view(8, 129)
    loss = held_out_loss(shipped, windows)
    assert 1.0 < loss < 4.0
    for linear in ("plain", "auto"):
        fast = prepare(shipped, linear=linear)
        assert fast.dtype == torch.bfloat16
        assert abs(held_out_loss(fast, windows) - loss) < 0.01


@pytest.mark.parametrize("linear", LINEAR)
def test_texts_go_on_past_the_first_rotary_table(linear):
    """A prompt over the edge at once, and steps that cross it one by one."""
    model = random_decoder(shape(rope_theta=1e6, context_length=4096, num_layers=1))
    fast, ids = prepare(model, linear=linear), text(2100)
    whole = Batch.of([ids], logits="all")
    expected = logits_of(model, Recompute(model.config), whole)
    assert relative_difference(logits_of(fast, Recompute(model.config), whole), expected) < TOLERANCE
    again, kv = prepare(model, linear=linear), Contiguous(model.config)
    start = logits_of(again, kv, Batch.of([ids[:2040]], logits="all"))
    steps = [Batch.of([[ids[at]]], first_positions=[at]) for at in range(2040, 2060)]
    assert relative_difference(torch.cat((start, logits_of(again, kv, *steps))), expected[:2060]) < TOLERANCE


def test_the_last_position_of_the_context_has_its_place_in_the_table():
    model = random_decoder(shape(context_length=40))
    whole = Batch.of([text(40)], logits="all")
    expected = logits_of(model, Recompute(model.config), whole)
    assert relative_difference(logits_of(prepare(model), Recompute(model.config), whole), expected) < TOLERANCE


# -- in the place of a Decoder ---------------------------------------------------------------------------------


def test_it_has_what_a_decoder_has(tiny_model):
    fast = prepare(tiny_model)
    for name in ("config", "tokenizer", "name", "dtype", "device"):
        assert getattr(fast, name) == getattr(tiny_model, name)
    assert fast.num_parameters() == tiny_model.num_parameters()


def test_the_given_model_stays_as_it_was(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    whole = Batch.of([text(30)], logits="all")
    logits = logits_of(model, Recompute(model.config), whole)
    fast = prepare(model)
    logits_of(fast, Contiguous(model.config, max_sequences=2), *batches())
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits_of(model, Recompute(model.config), whole), logits)


def test_a_model_in_training_is_prepared_without_its_gradients():
    fast = prepare(Decoder(shape()))
    assert not fast(Batch.of([text(5)]), Recompute(fast.config)).requires_grad


def test_keys_and_values_handed_to_a_kv_are_never_written_again(small):
    """A kv may keep them as they are, without a copy."""

    class Keeps(Recompute):
        def __init__(self, config):
            super().__init__(config)
            self.kept = []

        def attend(self, layer, q, k, v, batch, up=None):
            mixed = super().attend(layer, q, k, v, batch)
            self.kept += [(t, t.clone()) for t in (k, v, mixed)]
            return mixed

    kv = Keeps(small.config)
    logits_of(prepare(small), kv, Batch.of([text(9)]), Batch.of([text(1)]))
    assert len(kv.kept) == 2 * 2 * 3 and all(torch.equal(t, copy) for t, copy in kv.kept)


def test_a_batch_that_the_kv_refuses_is_refused_whole(small):
    kv = Contiguous(small.config, max_tokens=8)
    fast = prepare(small)
    logits_of(fast, kv, Batch.of([text(6)]))
    with pytest.raises(WorkbenchError, match="would grow to 9"):
        fast(Batch.of([text(3)], first_positions=[6]), kv)
    expected = logits_of(small, Recompute(small.config), Batch.of([[*text(6), 5]]))
    got = logits_of(fast, kv, Batch.of([[5]], first_positions=[6]))
    assert relative_difference(got, expected) < TOLERANCE


@pytest.mark.parametrize("linear", LINEAR)
def test_weight_bytes_are_those_of_the_matrices_a_step_reads(model, linear):
    """Every matrix with its bias, the head once, tied or not; the embedding is looked up, not read."""
    parts = ("q", "k", "v", "o", "gate", "up", "down", "q_down", "q_up", "kv_down", "k_up", "v_up")
    matrices = [
        value for name, value in model.named_parameters() if name.split(".")[-2] in parts and "norm" not in name
    ]
    expected = sum(value.nbytes for value in matrices) + model.head.weight.nbytes
    assert prepare(model, linear=linear).weight_bytes == expected
    half = random_decoder(model.config).to(torch.bfloat16)
    assert prepare(half, linear="plain").weight_bytes == expected / 2


# -- refusals and choices --------------------------------------------------------------------------------------


def test_a_prepared_model_is_not_prepared_again(small):
    with pytest.raises(WorkbenchError, match=r"tiny is prepared already.*`load`"):
        prepare(prepare(small))


def test_an_unknown_linear_names_the_nearest(small):
    with pytest.raises(
        WorkbenchError, match=r"linear 'pakced'; did you mean 'packed'\? Known: auto, looped, packed, plain"
    ):
        prepare(small, linear="pakced")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_packing_where_it_cannot_be_is_refused_and_auto_does_without(dtype):
    model = random_decoder(shape()).to(dtype)
    with pytest.raises(WorkbenchError, match=f"cannot be packed: .*{str(dtype).removeprefix('torch.')}.*plain linear"):
        prepare(model, linear="packed")
    assert linear_class("auto", dtype, "cpu") is Plain
    assert prepare(model).dtype == dtype


def test_auto_packs_what_can_be_packed_and_says_why():
    model = random_decoder(SHAPES["latent attention"])
    for dtype in (torch.float32, torch.bfloat16):
        assert linear_class("auto", dtype, "cpu") is (Plain if why_not_packed(dtype, "cpu") else Packed)
    if not torch.cuda.is_available():
        assert chosen_linear(torch.float32, "cuda") == (Plain, "plain: this machine has no CUDA device")
    assert prepare(model).linear_reason == chosen_linear(model.dtype, "cpu")[1] != ""
    assert prepare(model, linear="plain").linear_reason == "as asked"
    assert "is for CPUs" in why_not_packed(torch.float32, "cuda")


# -- linears ---------------------------------------------------------------------------------------------------

SIZES = [(48, 32), (1, 16), (1100, 1024)]  # out, in; the last is beyond 4 MiB


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out, inside", SIZES)
def test_every_linear_gives_the_product_for_any_number_of_rows_and_changes_nothing(out, inside, bias):
    torch.manual_seed(0)
    weight, shift = torch.randn(out, inside), torch.randn(out) if bias else None
    kept = weight.clone()
    for name in LINEAR:
        linear = LINEARS[name](weight, shift)
        assert (linear.in_features, linear.out_features) == (inside, out)
        assert linear.weight_bytes == 4 * (out * inside + (out if bias else 0))
        for rows in (1, 2, 3, 4, 5, 8, 9, 33):
            wide = torch.randn(rows, 2 * inside)
            for x in (wide[:, :inside].contiguous(), wide[:, inside:]):  # whole, and rows of something wider
                before = x.clone()
                expected = (x.double() @ weight.double().T) + (0.0 if shift is None else shift.double())
                assert relative_difference(linear(x).double(), expected) < TOLERANCE, (name, rows)
                assert torch.equal(x, before)
    assert torch.equal(weight, kept)


@pytest.mark.parametrize("out, inside", SIZES)
def test_packed_bfloat16_rounds_no_more_than_torch_does(out, inside):
    torch.manual_seed(0)
    weight = torch.randn(out, inside)
    for dtype in PACKS_BFLOAT16:
        rounded = weight.to(dtype)
        linear = Packed(rounded)
        assert linear.weight_bytes == weight.numel() * dtype.itemsize
        for rows in (1, 3, 9):
            x = torch.randn(rows, inside).to(dtype)
            expected = x.double() @ rounded.double().T
            assert relative_difference(linear(x).double(), expected) < torch.finfo(dtype).eps + TOLERANCE


@pytest.mark.parametrize("rows", (1, 5))
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_of_a_few_rows_as_sums_is_the_product(bias, rows):
    torch.manual_seed(0)
    weight, shift, x = torch.randn(48, 32), torch.randn(48) if bias else None, torch.randn(rows, 32)
    assert relative_difference(Matvec(weight, shift)(x), F.linear(x, weight, shift)) < TOLERANCE


# -- compiled --------------------------------------------------------------------------------------------------


needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler, none is here"
)
COMPILED = {
    "whole": (shape(num_layers=2, qkv_bias=True), ""),
    "whole, one window": (shape(num_layers=2, family="mistral", sliding_window=8), ""),
    "in pieces, shared layers": (SHAPES["layers that share keys"], "shared layers"),
    "in pieces, latent attention": (SHAPES["latent attention"], "latent attention"),
    "in pieces, global layers": (SHAPES["gemma 3"], "differ in what they see"),
}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_steps_of_one_row_give_the_same(name):
    config, reason = COMPILED[name]
    assert reason in why_not_whole(config) and bool(reason) == bool(why_not_whole(config))
    model = random_decoder(config)
    fast = prepare(model, compile=True)
    assert fast.compiled and not prepare(model).compiled
    steps = [Batch.of([text(1, at)], first_positions=[at], sequences=["a"]) for at in range(30, 36)]
    expected = logits_of(model, Contiguous(config, max_sequences=2), *batches(), *steps)
    got = logits_of(fast, Contiguous(config, max_sequences=2), *batches(), *steps)
    assert relative_difference(got, expected) < TOLERANCE


@needs_compiler
def test_a_compiled_whole_step_keeps_the_contract_of_the_kv():
    """From an empty cache, after truncate and fork, and beside another kv that shows nothing at once."""
    config, _ = COMPILED["whole"]
    model = random_decoder(config)
    fast, kv = prepare(model, compile=True), Contiguous(config, max_sequences=2)
    ids, expected = text(12), []
    with torch.no_grad():
        whole = model(Batch.of([ids], logits="all"), Recompute(config))
        for at, token in enumerate(ids):
            got = fast(Batch.of([[token]], first_positions=[at], sequences=["a"]), kv)
            assert relative_difference(got, whole[at : at + 1]) < TOLERANCE
            expected.append(kv.bytes_in_use)
        assert expected == sorted(expected) and kv.lengths["a"] == 12
        kv.truncate("a", 7)
        kv.fork("a", "b")
        for name in ("a", "b"):
            got = fast(Batch.of([[ids[7]]], first_positions=[7], sequences=[name]), kv)
            assert relative_difference(got, whole[7:8]) < TOLERANCE
        with pytest.raises(WorkbenchError, match="stands at position 8"):
            fast(Batch.of([[1]], first_positions=[9], sequences=["a"]), kv)
        assert relative_difference(fast(Batch.of([ids[:1]]), Recompute(config)), whole[:1]) < TOLERANCE
        other = Quantized(config, format="int8", group=8)  # one that has no whole step to show
        for at, token in enumerate(ids):  # its newest tokens are as they came
            got = fast(Batch.of([[token]], first_positions=[at]), other)
            assert relative_difference(got, whole[at : at + 1]) < TOLERANCE
        # its cache has no place for the last layer's keys
        shallow = dataclasses.replace(config, num_layers=1)
        cache = Contiguous(shallow)
        random_decoder(shallow)(Batch.of([ids[:4]]), cache)
        with pytest.raises(WorkbenchError, match="layer 1"):
            fast(Batch.of([[ids[4]]], first_positions=[4]), cache)


# size: of the new token's key; its score is far above all others, or below
@pytest.mark.parametrize("size", (1, 1e-6, 300, -300))
def test_one_query_as_sums_is_attention(size):
    torch.manual_seed(0)
    q, k, v = torch.randn(6, 8), size * torch.randn(2, 8), torch.randn(2, 8)
    keys, values = torch.randn(2, 9, 8), torch.randn(2, 9, 8)
    joined = [torch.cat((old, new[:, None]), dim=1).transpose(0, 1) for old, new in ((keys, k), (values, v))]
    expected = eager_attention(q[None], *joined, scale=0.3)[0]
    assert relative_difference(attend_rows(q[None], k[None], v[None], keys, values, 0.3)[0], expected) < TOLERANCE


def test_a_deep_model_is_not_compiled_at_once():
    assert "17 layers" in why_not_whole(shape(num_layers=17))
