"""Claims about cache.peers: the same weights everywhere, tokens held against the oracle, ratios within rounds."""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import types

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_experiments import KnownBench

from workbench.errors import WorkbenchError
from workbench.experiments import experiment, run_experiment
from workbench.experiments.greedy import check_greedy
from workbench.generation import generate
from workbench.instruments.costs import prefill_costs
from workbench.instruments.device import PUBLISHED
from workbench.kv import make_kv
from workbench.labs.lab03_kv_cache.gguf_file import bytes_of_a_step, decoder_of, write_gguf
from workbench.labs.lab03_kv_cache.peer_engines import BASELINE, Engine, LlamaCpp, engines, recipe
from workbench.labs.lab03_kv_cache.peer_oracles import Oracle, dequantized
from workbench.labs.lab03_kv_cache.peers import Asked, _in_rounds
from workbench.models import prepare
from workbench.models.batch import Batch
from workbench.models.checkpoints import load, save_checkpoint
from workbench.quantization import quantize

PROMPT = [5, 9, 33, 2, 17, 40]


def has_llama_cpp() -> bool:
    return bool(importlib.util.find_spec("xllamacpp") and importlib.util.find_spec("gguf"))


needs_llama_cpp = pytest.mark.skipif(
    not has_llama_cpp(), reason="llama.cpp is not installed (pip install 'inference-workbench[peers]')"
)


def llama(**changes):
    """A small plain Llama: llama.cpp wants heads of 32 values or more."""
    shape = {"vocab_size": 96, "hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    return random_decoder(tiny_config(**{**shape, "intermediate_size": 192, "context_length": 256, **changes}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights that bfloat16 holds exactly, so that both formats of an engine are the same model."""
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    target = tmp_path_factory.mktemp("peers") / "tiny"
    save_checkpoint(model, target)
    return target


def greedy(model, count):
    return generate(model, PROMPT, max_new_tokens=count, stop_token_ids=()).tokens


def test_greedy_tokens_pass_and_a_wrong_one_is_refused():
    model = llama()
    tokens = greedy(model, 12)
    assert check_greedy(model, PROMPT, tokens, 12, 1e-4).startswith("12 of 12 tokens")
    wrong = [*tokens[:5], (tokens[5] + 1) % 96, *tokens[6:]]
    with pytest.raises(WorkbenchError, match="not greedy"):
        check_greedy(model, PROMPT, wrong, 12, 1e-4)
    with pytest.raises(WorkbenchError, match="11 tokens where 12"):
        check_greedy(model, PROMPT, tokens[:11], 12, 1e-4)


def test_an_engine_that_is_said_not_to_be_exact_is_reported_not_refused():
    model = llama()
    tokens = greedy(model, 6)
    wrong = [(tokens[0] + 1) % 96, *tokens[1:]]
    assert " of 6 tokens" in check_greedy(model, PROMPT, wrong, 6, 1e-4, {"exact": False})


@needs_llama_cpp
@pytest.mark.parametrize("tied", [True, False])
def test_llama_cpp_writes_the_same_greedy_tokens_from_our_file(tmp_path, tied):
    model = llama(tie_embeddings=tied)
    file = write_gguf(model, tmp_path / "model.gguf", torch.float32)
    with LlamaCpp(file, 64, exact=True) as peer:
        assert peer.run(PROMPT, 32) == greedy(model, 32)
        assert peer.seconds > 0
        assert peer.run(PROMPT[:3], 4) == generate(model, PROMPT[:3], max_new_tokens=4, stop_token_ids=()).tokens


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"family": "qwen2", "qkv_bias": True}, "family, qkv_bias"),
        ({"kv_sources": (0, 0)}, "kv_sources"),
        ({"sliding_window": 8}, "sliding_window"),
    ],
)
def test_other_shapes_are_not_written_for_llama_cpp(tmp_path, changes, named):
    model = random_decoder(tiny_config(**changes))
    with pytest.raises(WorkbenchError, match=f"plain Llama.* has its own {named}"):
        write_gguf(model, tmp_path / "model.gguf", torch.float32)
    assert not list(tmp_path.iterdir())


def test_every_engine_runs_on_the_same_weights_and_its_counts_are_those_of_a_step(folder):
    found = run_experiment(
        "cache.peers",
        {"model": str(folder), "compiled": False, "prompt_tokens": 6, "new_tokens": 8, "rounds": 2},
        bench(),
    )
    read, *engines = found
    assert read.unit == "GB/s" and len(read.samples) >= 2
    names = [m.settings["engine"] for m in engines]
    assert names[:2] == ["ours, float32", "ours, bfloat16"]
    assert {n for n in names if n.startswith("transformers")} == {
        f"transformers, {cache} cache, {dtype}" for cache in ("dynamic", "static") for dtype in ("float32", "bfloat16")
    }
    if has_llama_cpp():
        assert sum(n.startswith("llama.cpp") for n in names) == 4
    model = load(folder)
    for m in engines:
        assert len(m.samples) == 2 and m.unit == "s" and "of 8 tokens" in m.check
        size = 2 if "bfloat16" in m.settings["engine"] else 4
        weights = model.num_parameters() - model.embed.weight.numel() + 128 + model.head.weight.numel()
        norms = 128 * (2 * model.config.num_layers + 1)  # which stay float32 in a file of llama.cpp
        wider = norms * (4 - size) if m.settings["engine"].startswith("llama.cpp") else 0
        assert m.counts["weight_bytes"] == weights * size + wider
        assert (m.predicted is not None) == m.settings["engine"].startswith("ours")
    baseline = next(m for m in engines if m.settings["engine"] == BASELINE)
    assert baseline.counts["times_as_fast_as_transformers"] == 1.0
    assert engines[0].counts["times_as_fast_as_ours_in_float32"] == 1.0


def test_what_cannot_be_compared_is_refused_before_anything_is_loaded(folder):
    with pytest.raises(WorkbenchError, match="beyond the model's context"):
        run_experiment("cache.peers", {"model": str(folder), "prompt_tokens": 250, "new_tokens": 20})
    with pytest.raises(WorkbenchError, match=r"257 tokens.*beyond the model's context of 256"):
        run_experiment("cache.peers", {"model": str(folder), "first_token_prompt": 256})
    with pytest.raises(WorkbenchError, match=r"cache\.peers loads.*give its name or folder"):
        run_experiment("cache.peers", {"model": load(folder), "peers": "ours"})


# -- few bits and the first token --------------------------------------------------------------------------------


def bench(said: list[str] | None = None) -> KnownBench:
    return KnownBench(report=None if said is None else lambda *stage: said.append(" ".join(map(str, stage))))


def contenders(folder, said: list[str], **changes) -> list[Engine]:
    """Made, and not run: nothing is compiled yet, and no process is left behind."""
    settings = {"weights": "few bits", "peers": "ours", "compiled": True, "context": 64, **changes}
    made = bench(said)
    with contextlib.ExitStack() as stack:
        return list(engines(made, stack, str(folder), made.model(str(folder), dtype="float32"), **settings))


@pytest.fixture(scope="module")
def few_bits(folder):
    """(Measurements, what was reported) of everything in few bits that is installed, with a first token."""
    said: list[str] = []
    given = {"model": str(folder), "weights": "few bits", "compiled": False, "prompt_tokens": 6, "new_tokens": 8}
    return run_experiment("cache.peers", {**given, "first_token_prompt": 40, "rounds": 2}, bench(said)), said


def of(measurements, measured: str) -> dict:
    return {m.settings["engine"]: m for m in measurements if m.settings.get("measured") == measured}


def best_of(count: int, name: str) -> str:
    """What the check of an engine says at least: of exact inputs in float32 that all are the oracle's best."""
    rounds = any(word in name for word in ("inputs in 8 bits", "bfloat16", "llama.cpp"))
    return f" of {count} tokens" if rounds else f"{count} of {count} tokens"


def test_few_bits_run_beside_the_two_that_ratios_are_to_and_every_token_is_the_oracles(few_bits):
    measured = of(few_bits[0], "token")
    ours = [
        f"ours, {bits} bits{inputs}, {dtype}"
        for dtype in ("float32", "bfloat16")
        for bits in (8, 4)
        for inputs in ("", ", inputs in 8 bits")
    ]
    theirs = [
        f"llama.cpp, {cache}, {name}"
        for name in ("q8_0", "q4_0")
        for cache in ("float32 cache, no flash attention", "its defaults")
    ]
    assert list(measured) == ["ours, float32", BASELINE, *ours, *(theirs if has_llama_cpp() else [])]
    for name, m in measured.items():
        assert best_of(8, name) in m.check and len(m.samples) == 2
        assert ("is granted" in m.check) == ("inputs in 8 bits" in name or "llama.cpp" in name)
        assert ("C++ kernel for" in m.check) == (name in ours)
        assert m.counts["times_as_fast_as_transformers"] > 0 and (m.predicted is not None) == name.startswith("ours")
    if has_llama_cpp():
        for bits, name in ((8, "q8_0"), (4, "q4_0")):
            mine = measured[f"ours, {bits} bits, float32"]
            other = measured[f"llama.cpp, float32 cache, no flash attention, {name}"]
            ratios = [b / a for a, b in zip(mine.samples, other.samples)]
            assert mine.counts["times_as_fast_as_llama_cpp"] == statistics.median(ratios)
        assert "times_as_fast_as_llama_cpp" not in measured[BASELINE].counts  # none in float32 ran beside it


def test_weight_bytes_are_those_of_the_codes_and_of_the_file(few_bits, folder):
    model, measured = load(folder), of(few_bits[0], "token")
    linears = sum(one.weight.numel() for one in model.layers.modules() if isinstance(one, torch.nn.Linear))
    head, row, norms = model.head.weight.numel(), 128, 128 * (2 * model.config.num_layers + 1)
    for name, m in measured.items():
        size, format = 2 if "bfloat16" in name else 4, m.settings.get("format")
        per_code = size if format is None else 8.5 / 8 if "8" in format else 4.5 / 8
        of_head = size if format is None else 8.5 / 8
        wanted = linears * per_code + head * of_head + (row + norms) * size
        if name.startswith("llama.cpp"):  # the head in q8_0, norms in float32, and a row of the embedding
            tied = model.config.tie_embeddings
            wanted = linears * per_code + head * 8.5 / 8 + row * (8.5 / 8 if tied else per_code) + norms * 4
        assert m.counts["weight_bytes"] == wanted, name
        assert m.counts["bits_per_weight"] == pytest.approx(8 * wanted / (linears + head + row + norms))


def test_the_first_token_is_timed_counted_and_held_to_the_oracle(few_bits, folder):
    measured, shape = of(few_bits[0], "first token"), load(folder).config
    assert list(measured) == list(of(few_bits[0], "token"))
    flops = prefill_costs(shape, batch=1, prompt=40, weight_bytes_per_element=4).flops
    for name, m in measured.items():
        assert (m.settings["prompt_tokens"], m.settings["new_tokens"], m.unit) == (40, 1, "s")
        assert best_of(1, name) in m.check and len(m.samples) == 2
        assert m.counts["flops"] == flops and m.counts["rows"] == 40
        assert ("share_of_matmul_rate" in m.counts) == name.startswith("ours") == (m.predicted is not None)
    assert measured[BASELINE].counts["times_as_fast_as_transformers"] == 1.0


def test_what_cannot_run_is_left_out_by_name_with_the_reason(folder, tmp_path, monkeypatch):
    said: list[str] = []
    names = [one.name for one in contenders(folder, said)]
    assert {"ours, compiled, 8 bits, float32", "ours, compiled, 4 bits, bfloat16"} <= set(names)
    assert {"ours, native, 4 bits, inputs in 8 bits, float32", "ours, native, 8 bits, bfloat16"} <= set(names)
    assert {"ours, C++ kernels, 8 bits, float32", "ours, C++ kernels, 4 bits, inputs in 8 bits, bfloat16"} <= set(names)
    for name in [f"ours, compiled, {b} bits, inputs in 8 bits, {d}" for b in (8, 4) for d in ("float32", "bfloat16")]:
        assert name not in names
        assert any(line.startswith(f'{name} is left out: inputs="q8" does not go with compile=True') for line in said)
    save_checkpoint(llama(intermediate_size=200), tmp_path / "odd")
    names = [one.name for one in contenders(tmp_path / "odd", said, peers="llama.cpp", compiled=False)]
    assert names == ["ours, float32"]
    assert any(line.startswith("ours, 4 bits, float32 is left out: ") and "200" in line for line in said)
    if has_llama_cpp():
        assert any(line.startswith("llama.cpp, q4_0 is left out: ") and "rows of 200" in line for line in said)
    monkeypatch.setenv("WORKBENCH_NO_COMPILER", "1")
    words = ("compiled", "native", "C++")
    assert not [one for one in contenders(folder, said) if any(word in one.name for word in words)]
    assert "contenders in C++ are left out: WORKBENCH_NO_COMPILER is set" in said


def test_an_engine_that_is_not_compiled_after_all_is_not_measured_as_if_it_were():
    asked = [Asked("token", PROMPT, 2)]
    plain, fallen = (Engine(name, "float32", torch.float32, lambda *_: [1, 2], llama, {}) for name in ("a", "b"))
    fallen.stepping = types.SimpleNamespace(why_not_steps="no compiler was found")
    said: list[str] = []
    left, reads, _ = _in_rounds(bench(said), [plain, fallen], asked, 2)
    assert left == [plain] and len(plain.samples["token"]) == 2 and "token" not in fallen.samples and reads
    assert "b is left out: no compiler was found" in said


@needs_llama_cpp
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weights", ["q8_0", "q4_0", torch.float32, torch.bfloat16])
def test_a_file_holds_what_gguf_makes_of_each_matrix_and_counts_its_bytes(tmp_path, weights, tied):
    import gguf

    model = llama(tie_embeddings=tied)
    file = write_gguf(model, tmp_path / "model.gguf", weights)
    read = decoder_of(file, model)
    kind = {torch.float32: "F32", torch.bfloat16: "BF16"}.get(weights) or str(weights).upper()
    few = isinstance(weights, str)

    def stored(weight: torch.Tensor, kind: str) -> torch.Tensor:
        kind = gguf.GGMLQuantizationType[kind]
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))

    expected = dict(model.named_parameters())
    for name, parameter in read.named_parameters():
        of_output = name == "head.weight" or (name == "embed.weight" and tied)
        own = "F32" if parameter.dim() == 1 else "Q8_0" if few and of_output else kind
        assert torch.equal(parameter, stored(expected[name].detach(), own)), name
    assert torch.equal(read.embed.weight, read.head.weight) == tied and model.embed.weight is expected["embed.weight"]
    tensors = {one.name: one for one in gguf.GGUFReader(str(file)).tensors}
    whole = sum(int(one.n_bytes) for one in tensors.values())
    embedding = int(tensors["token_embd.weight"].n_bytes)
    assert bytes_of_a_step(file) == whole + embedding // 96 - (0 if tied else embedding)


@needs_llama_cpp
def test_other_weights_are_not_written(tmp_path):
    with pytest.raises(WorkbenchError, match=r"unknown weights of a GGUF file 'q4_k'; did you mean 'q4_0'"):
        write_gguf(llama(), tmp_path / "model.gguf", "q4_k")
    with pytest.raises(WorkbenchError, match=r"q8_0 stores rows in blocks of 32.*rows of 200"):
        write_gguf(llama(intermediate_size=200), tmp_path / "model.gguf", "q8_0")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_inputs_move_logits_no_further_than_is_granted_and_a_wrong_token_is_caught(bits):
    model = llama()
    quantized = quantize(model, recipe(bits))
    oracle = Oracle(dequantized(quantized, model))
    text = [*PROMPT, 7, 8]
    plain, exact, rounded = (
        one(Batch.of([text], logits="all"), make_kv("recompute", model.config))
        for one in (oracle.decoder, prepare(quantized), prepare(quantized, inputs="q8"))
    )
    largest = plain.abs().amax(-1, keepdim=True)
    moved = oracle.moved(text, [0], "layers")
    assert ((exact - plain) / largest).abs().max() < 1e-5 < ((rounded - plain) / largest).abs().max() <= 2 * moved
    assert 0 < oracle.moved(text, [0], "all") != moved  # the head's too

    best = int(plain[-1].argmax())
    assert f"; {1e-4 + 4 * moved:.1g} is granted" in oracle.check(text, [best], 1, torch.float32, "layers", {})
    assert "granted" not in oracle.check(text, [best], 1, torch.float32, "", {})
    with pytest.raises(WorkbenchError, match="not greedy"):
        oracle.check(text, [int(plain[-1].argmin())], 1, torch.float32, "layers", {})
    near = torch.topk(plain[-1], 2).indices.tolist()[1]  # would pass where inputs are rounded much more coarsely
    with pytest.raises(WorkbenchError, match="not greedy"):
        oracle.check(text, [near], 1, torch.float32, "", {})


def test_dequantized_weights_are_in_a_model_of_their_own():
    model = llama(qkv_bias=True, family="qwen2")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    quantized = quantize(model, recipe(4))
    plain = dequantized(quantized, model)
    assert torch.equal(plain.layers[1].mlp.up.weight, quantized.layers[1].mlp.up.dequantized_weight())
    assert torch.equal(plain.layers[0].attention.q.bias, model.layers[0].attention.q.bias)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    batch, kv = Batch.of([PROMPT], logits="all"), lambda: make_kv("recompute", model.config)
    assert torch.allclose(plain(batch, kv()), quantized(batch, kv()), atol=1e-4)


def test_the_weights_of_a_compiled_step_are_counted_as_they_lie_there(folder):
    measured = {one.name: one for one in contenders(folder, [])}
    for bits in (8, 4):  # beside bfloat16 a compiled step holds its scales in float32
        assert measured[f"ours, {bits} bits, bfloat16"].element_bytes["linear_bytes_per_element"] == (bits + 0.5) / 8
        compiled = measured[f"ours, compiled, {bits} bits, bfloat16"]
        assert compiled.element_bytes["linear_bytes_per_element"] == (bits + 1) / 8
        assert compiled.counted(asked_step(compiled, load(folder).config)).launches == 0


def asked_step(engine: Engine, shape):
    return Asked("token", PROMPT, 2).costs(shape, engine.element_bytes)


def test_predictions_are_of_every_format_that_is_asked_for():
    one = experiment("cache.peers")
    for weights, count in (("as trained", 2), ("few bits", 4), ("all", 6)):
        points = one.predict(PUBLISHED["h100-sxm"], **one.complete({"weights": weights}))
        sizes = [per_weight for per_weight, _, _ in points]
        assert len(points) == count and sizes == sorted(sizes, reverse=True) and 0.5 < min(sizes) <= max(sizes) <= 4
