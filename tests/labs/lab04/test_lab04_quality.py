"""Lab 04: held-out loss through a kv is the loss without one where nothing is lost, bytes are those allocated, and
the experiments on quality report both for every variant."""

from __future__ import annotations

import dataclasses
import json
import math
import time as clock

import pytest
import torch
from conftest import random_decoder, tiny_config

from workbench.errors import WorkbenchError
from workbench.experiments import experiment, run_experiment
from workbench.experiments.held_out import loss_without_kv
from workbench.instruments.bench import Bench
from workbench.instruments.timing import Stopped
from workbench.kv import Contiguous, Quantized, Recompute, make_kv
from workbench.labs.lab04_smaller_caches import convert as converting
from workbench.labs.lab04_smaller_caches import kv_formats as formats
from workbench.labs.lab04_smaller_caches import quality, windows
from workbench.labs.lab04_smaller_caches import twins as pairing
from workbench.labs.lab04_smaller_caches.inputs import TARGET, VARIANTS, kind_for, needed_values, trained
from workbench.models import corpus, evaluation, recipes, training
from workbench.models.checkpoints import ZOO, shipped_tokenizer
from workbench.models.config import LatentAttentionShape
from workbench.models.corpus import held_out_files
from workbench.models.decoder import Decoder
from workbench.models.evaluation import held_out_passages, loss_through
from workbench.models.recipes import CACHE_VARIANTS
from workbench.models.training import initialize, rows_batch

NAMES = ["smaller.quality", "smaller.kv_formats", "smaller.windows", "smaller.convert"]


class VariantBench(Bench):
    """A bench whose variants have random weights, so that no trained ones are needed. `asked` names each load."""

    def __init__(self, *missing: str) -> None:
        super().__init__()
        self.missing, self.made, self.asked = missing, {}, []

    def model(self, name, **settings):
        if not isinstance(name, str):
            return name
        self.asked.append(name)
        if name in self.missing:
            raise WorkbenchError(f"the trained weights of {name!r} are not here; `workbench train {name}` makes them")
        if name not in self.made:
            config = CACHE_VARIANTS.get(name) or tiny_config(context_length=1024)
            self.made[name] = Decoder(config, tokenizer=shipped_tokenizer(), name=name)
            initialize(self.made[name], 0)
            self.made[name].eval().requires_grad_(False)
        return self.made[name]


@pytest.fixture
def bench() -> VariantBench:
    return VariantBench()


@pytest.fixture
def model(tiny_model):
    return tiny_model


def loss(model, kv="contiguous", *, count=3, context=48, chunk=16, side_by_side=2, **settings):
    kv = make_kv(kv, model.config, **({} if kv == "recompute" else {"max_sequences": side_by_side}), **settings)
    rows = held_out_passages(model.tokenizer, context, count)
    return loss_through(model, kv, rows, chunk=chunk, side_by_side=side_by_side)


# -- the loss through a kv -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 16, 47, 48, 500])
def test_a_cache_that_loses_nothing_gives_the_loss_without_one_in_chunks_of_any_size(model, chunk):
    found, oracle = loss(model, chunk=chunk), loss(model, "recompute", chunk=48)
    assert found.losses.shape == (3, 47) and found.tokens == 141
    assert torch.allclose(found.losses, oracle.losses, atol=1e-4)


def test_it_is_the_held_out_loss_of_the_cards(model, monkeypatch):
    few = [dataclasses.replace(f, text=f.text[:600]) for f in held_out_files()[:4]]
    for module, name in ((training, "held_out_files"), (evaluation, "held_out_files")):
        monkeypatch.setattr(module, name, lambda: few)
    card = training.held_out_loss(model, model.tokenizer, context=64)
    found = loss(model, context=64, count=None)
    assert found.tokens == card["tokens"] and int(found.token_bytes.sum()) == card["bytes"]
    assert found.nats_per_token == pytest.approx(card["nats_per_token"], rel=1e-5)
    assert found.bits_per_byte == pytest.approx(card["bits_per_byte"], rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(card["nats_per_token"]), rel=1e-4)


class LosesKeys(Contiguous):
    """A cache with a mistake: every key but those of the first chunk is lost."""

    def attend(self, layer, q, k, v, batch, up=None):
        return super().attend(layer, q, 0 * k if batch.first_positions[0] else k, v, batch, up)


def test_keys_really_come_back_from_the_kv(model):
    right = loss(model).losses
    wrong = loss(model, LosesKeys).losses
    assert torch.allclose(wrong[:, :16], right[:, :16], atol=1e-4)
    assert (wrong[:, 16:] - right[:, 16:]).abs().mean() > 0.01
    whole = loss(model, LosesKeys, chunk=48).losses
    assert torch.allclose(whole, right, atol=1e-4)  # in one chunk nothing comes back


def test_losses_stand_at_the_positions_they_predict(model):
    rows = held_out_passages(model.tokenizer, 48, 2)
    changed = rows.clone()
    changed[0, 30] = (changed[0, 30] + 1) % 4096
    kv = Contiguous(model.config, max_sequences=2)
    before, after = (loss_through(model, kv, r, chunk=8) for r in (rows, changed))
    moved = ((before.losses - after.losses).abs() > 1e-6).nonzero()
    assert moved[0].tolist() == [0, 29] and set(moved[:, 0].tolist()) == {0}
    assert torch.equal(before.between(1, 30), after.between(1, 30))
    assert not torch.equal(before.between(30, 31), after.between(30, 31))
    assert torch.allclose(before.between(1, 48), before.losses.double().mean(1))


def test_the_kv_is_left_as_it_was_also_when_told_to_stop(model):
    kv = Contiguous(model.config, max_sequences=3)
    rows = held_out_passages(model.tokenizer, 32, 4)
    loss_through(model, kv, rows, chunk=8, side_by_side=3)
    assert dict(kv.lengths) == {}
    calls = iter(range(100))

    def stop():
        if next(calls) == 2:
            raise Stopped

    with pytest.raises(Stopped):
        loss_through(model, kv, rows, chunk=8, side_by_side=3, check_stop=stop)
    assert dict(kv.lengths) == {} and kv.bytes_in_use == 0


def test_passages_are_the_same_for_every_model_and_spread_over_the_held_out_modules(model):
    all_of_them = held_out_passages(shipped_tokenizer(), 256)
    few = held_out_passages(model.tokenizer, 256, 4)
    there = len(all_of_them)
    assert torch.equal(few, all_of_them[[0, there // 4, 2 * there // 4, 3 * there // 4]])
    text = "".join(f.text for f in held_out_files())
    assert model.tokenizer.decode(few[1].tolist()) in text.replace("\r", "")


@pytest.mark.parametrize(("context", "count"), [(1024, 10_000), (256, 0)])
def test_more_passages_than_there_are_are_refused(context, count):
    with pytest.raises(WorkbenchError, match=f"passages of {context:,} tokens, not {count:,}"):
        held_out_passages(shipped_tokenizer(), context, count)


def test_a_model_without_a_tokenizer_or_a_chunk_of_nothing_is_refused(model):
    with pytest.raises(WorkbenchError, match="needs a tokenizer"):
        held_out_passages(None, 64, 2)
    with pytest.raises(WorkbenchError, match="chunk and side_by_side must be at least 1, got 0"):
        loss(model, chunk=0)


# -- bytes by formula ------------------------------------------------------------------------------------------


def test_needed_values_are_those_of_the_papers():
    shape = CACHE_VARIANTS
    assert needed_values(shape["stdlib-3m-mha"], 1000) == 2 * 6 * 6 * 32 * 1000
    assert needed_values(shape["stdlib-3m-gqa"], 1000) == 2 * 6 * 2 * 32 * 1000
    assert needed_values(shape["stdlib-3m-mqa"], 1000) == 2 * 6 * 1 * 32 * 1000
    assert needed_values(shape["stdlib-3m-mla"], 1000) == 6 * (48 + 16) * 1000
    assert needed_values(shape["stdlib-3m-shared"], 1000) == 2 * 3 * 6 * 32 * 1000
    assert needed_values(shape["stdlib-3m-hybrid"], 1000) == 2 * 6 * 32 * (2 * 1000 + 4 * 128)
    assert needed_values(shape["stdlib-3m-hybrid"], 100) == needed_values(shape["stdlib-3m-mha"], 100)
    sinks = dataclasses.replace(shape["stdlib-3m-hybrid"], attention_sinks=4)
    assert needed_values(sinks, 1000) == 2 * 6 * 32 * (2 * 1000 + 4 * 132)
    latent = LatentAttentionShape(1536, kv_rank=512, rotary_head_dim=64, content_head_dim=128, value_head_dim=128)
    deepseek = tiny_config(family="deepseek_v3", num_heads=4, num_kv_heads=4, head_dim=192, latent_attention=latent)
    assert needed_values(deepseek, 1) == (512 + 64) * deepseek.num_layers


def test_every_variant_is_measured_through_the_kind_it_is_made_for():
    kinds = [kind_for(CACHE_VARIANTS[name]) for name in VARIANTS]
    assert kinds == ["contiguous", "contiguous", "contiguous", "latent", "window", "shared_layers"]


# -- all experiments -------------------------------------------------------------------------------------------

LIBRARY = {"sequences_per_step": 1, "sequence_length": 32, "steps": 2, "evaluations": 2}
SMALL = {
    "smaller.quality": {"context": 64, "passages": 2, "chunk": 32, "models": "stdlib-3m-gqa"},
    "smaller.kv_formats": {"context": 128, "passages": 2, "chunk": 32, "layer": 1},
    "smaller.windows": {"context": 64, "passages": 2, "chunk": 16, "window": 16, "variants": False},
    "smaller.convert": {"context": 32, "passages": 2, "num_kv_heads": 1, **LIBRARY},
}


@pytest.fixture(scope="module")
def held_out():
    """Reading the library takes a while, so it is read once."""
    return held_out_files()


@pytest.fixture(autouse=True)
def small_library(held_out, monkeypatch):
    """Two training modules, so that nothing is tokenized for seconds; the held-out ones stay."""
    some = [corpus.SourceFile(f"{n}.py", f"def f{n}(x):\n    return x + {n}\n" * 60) for n in range(2)]
    monkeypatch.setattr(corpus, "standard_library", lambda root=None: [*held_out, *some])


def settings_of(name: str, model) -> dict:
    return {**({} if name == "smaller.quality" else {"model": model}), **SMALL[name]}


@pytest.mark.parametrize("name", NAMES[1:])
def test_passages_beyond_the_context_are_refused_with_numbers(model, bench, name):
    with pytest.raises(WorkbenchError, match="passages of 512 tokens are beyond the 256"):
        run_experiment(name, {**settings_of(name, model), "context": 512}, bench)


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_model_without_held_out_text_is_refused(bench, name):
    bare = random_decoder(tiny_config(vocab_size=300), tokenizer=shipped_tokenizer())
    with pytest.raises(WorkbenchError, match="held-out text needs a tokenizer"):
        run_experiment(name, settings_of(name, bare), bench)


# -- smaller.quality -------------------------------------------------------------------------------------------


def test_every_variant_and_the_target_have_bytes_as_allocated_and_a_loss_through_that_kind(bench):
    asked = {"context": 256, "passages": 2, "chunk": 64}
    found = run_experiment("smaller.quality", asked, bench)
    names = [*VARIANTS, TARGET]
    assert list(dict.fromkeys(m.settings["model"] for m in found)) == names
    for name in names:
        mine = [m for m in found if m.settings["model"] == name]
        sizes = [m for m in mine if m.settings["measured"] == "bytes"]
        losses = [m for m in mine if m.settings["measured"] == "loss"]
        assert [m.settings["context"] for m in sizes] == [m.settings["context"] for m in losses] == [128, 256]
        for m in sizes:
            assert m.samples == [m.predicted] and m.unit == "bytes/token"
            needed = needed_values(bench.model(name).config, m.settings["context"]) * 4
            assert m.counts["bytes_reserved"] == needed + m.counts["bytes_beyond_need"]
            assert (m.counts["bytes_beyond_need"] > 0) == (name.endswith("hybrid") and m.settings["context"] > 128)
        for m in losses:
            assert m.unit == "nats/token" and 7 < m.median < 9 and "equal those without a cache" in m.check
    # the last: 256 tokens
    by_name = {m.settings["model"]: m for m in found if m.settings["measured"] == "bytes"}
    assert by_name["stdlib-3m-mha"].median == 2 * 6 * 6 * 32 * 4
    assert by_name["stdlib-3m-mqa"].median == by_name["stdlib-3m-mla"].median == by_name["stdlib-3m-mha"].median / 6
    assert by_name["stdlib-3m-shared"].median == by_name["stdlib-3m-mha"].median / 2


def test_the_loss_at_a_shorter_context_is_that_of_shorter_passages(bench):
    found = run_experiment("smaller.quality", {**SMALL["smaller.quality"], "context": 256}, bench)
    short = next(m for m in found if m.settings["measured"] == "loss" and m.settings["context"] == 128)
    decoder = bench.model("stdlib-3m-gqa")
    rows = held_out_passages(decoder.tokenizer, 256, 2)[:, :128]
    again = loss_through(decoder, make_kv("recompute", decoder.config), rows, chunk=128)
    assert short.median == pytest.approx(again.nats_per_token, abs=1e-4)
    assert short.counts["tokens"] == again.tokens == 254


def test_variants_that_are_not_trained_yet_are_named_with_the_command_that_makes_them():
    with pytest.raises(WorkbenchError, match="`workbench train stdlib-3m-mla` makes them"):
        run_experiment("smaller.quality", {"models": "stdlib-3m-mla"}, VariantBench("stdlib-3m-mla"))
    bench = VariantBench("stdlib-3m-gqa", "stdlib-3m-mla")
    with pytest.raises(WorkbenchError, match=r"(?s)^2 of the 7 models.*train stdlib-3m-gqa.*train stdlib-3m-mla"):
        run_experiment("smaller.quality", {"passages": 2}, bench)
    assert set(bench.asked) == {*VARIANTS, TARGET}
    assert [m.name for m in trained(VariantBench(), ["stdlib-3m-mqa"])] == ["stdlib-3m-mqa"]


def test_a_cache_of_ours_that_were_wrong_would_give_no_loss(bench, monkeypatch):
    monkeypatch.setattr("workbench.kv.KINDS", {"recompute": Recompute, "contiguous": LosesKeys})
    with pytest.raises(WorkbenchError, match=r"differs by .* nats from the one without a cache: .*thrown away"):
        run_experiment("smaller.quality", SMALL["smaller.quality"], bench)


def test_contexts_are_halved_down_to_128():
    assert quality.contexts_up_to(1024) == [128, 256, 512, 1024]
    assert quality.contexts_up_to(64) == [64]


# -- smaller.kv_formats ----------------------------------------------------------------------------------------


def measured(found, what):
    return [m for m in found if m.settings["measured"] == what]


def outlier_model(factor: float) -> Decoder:
    """One pair of channels of every key (rotary turns pairs) `factor` times as large."""
    decoder = random_decoder(tiny_config(num_kv_heads=1, num_heads=2, head_dim=16), tokenizer=shipped_tokenizer())
    for layer in decoder.layers:
        for channel in (3, 11):
            layer.attention.k.weight[channel] *= factor
    return decoder


def test_every_format_reports_perplexity_bytes_as_allocated_and_errors_within_their_bound(model, bench):
    found = measured(run_experiment("smaller.kv_formats", settings_of("smaller.kv_formats", model), bench), "kv")
    assert [m.settings["format"] for m in found] == ["full precision", "int8", "fp8", "int4"]
    full, *others = found
    assert full.counts["excess"] == 0 and full.counts["bits_per_value"] == 32 and full.unit == "perplexity"
    assert full.counts["bytes_reserved"] == 128 * model.config.kv_values_per_token() * 4
    for m in others:
        assert m.counts["bytes_reserved"] == m.counts["bytes_by_formula"] < full.counts["bytes_reserved"]
        assert 0.9 < m.counts["largest_share_of_bound"] <= 1
        # of 128 in groups of 32, two groups are in codes
        assert "the newest 64 tokens as they came" in m.check
        nats = math.log(m.median / full.median)
        assert m.counts["excess"] == pytest.approx(math.expm1(nats), abs=1e-6)
    int8, _, int4 = others
    assert int4.counts["largest_key_error"] > 10 * int8.counts["largest_key_error"]
    assert int4.counts["bits_per_value"] < int8.counts["bits_per_value"] < 32


def test_int8_is_within_two_thousandths_of_full_precision_on_a_trained_model(bench):
    from workbench.models import load

    target = load("stdlib-10m")
    rows = held_out_passages(target.tokenizer, 512, 3)
    room = {"max_sequences": 3, "max_tokens": 512}
    full, int8, int4 = (
        loss_through(target, kv, rows, chunk=16, side_by_side=3)
        for kv in (
            Contiguous(target.config, **room),
            Quantized(target.config, **room, format="int8"),
            Quantized(target.config, **room, format="int4"),
        )
    )
    assert abs(int8.perplexity / full.perplexity - 1) < 0.002
    assert abs(int4.perplexity / full.perplexity - 1) < 0.02
    assert not torch.allclose(int8.losses, full.losses, atol=1e-6)  # it was really quantized


def test_large_channels_are_found_and_spoil_the_others_where_they_share_a_scale(bench):
    asked = {**SMALL["smaller.kv_formats"], "model": outlier_model(20.0), "format": "int4"}
    found = run_experiment("smaller.kv_formats", asked, bench)
    keys = [m for m in found if m.settings.get("tensor") == "keys"]
    size = torch.tensor(next(m for m in keys if m.settings["measured"] == "magnitude").samples)
    assert size.topk(2).indices.sort().values.tolist() == [3, 11] and len(size) == 16
    errors = {m.settings["scheme"]: torch.tensor(m.samples) for m in keys if m.settings["measured"] == "error"}
    small = [c for c in range(16) if c not in (3, 11)]
    assert float((errors["per token"] / errors["per channel"])[small].median()) > 3
    outliers = measured(found, "outliers")[0]
    assert len(outliers.samples) == 2 and min(outliers.samples) > 10
    even = measured(run_experiment("smaller.kv_formats", {**asked, "model": outlier_model(1.0)}, bench), "outliers")[0]
    assert max(even.samples) < 5


def test_the_schemes_are_compared_on_perplexity_and_the_larger_error_costs_more(bench):
    asked = {**SMALL["smaller.kv_formats"], "model": outlier_model(20.0), "passages": 3}
    found = measured(run_experiment("smaller.kv_formats", asked, bench), "scheme")
    assert [(m.settings["format"], m.settings["keys"]) for m in found] == [
        (f, s) for f in ("int4", "int3") for s in ("per channel", "per token")
    ]
    assert {m.settings["chunk"] for m in found} == {32}
    assert len({m.median for m in found}) == 4


@pytest.mark.parametrize("scheme", formats.SCHEMES)
def test_keys_that_are_rounded_come_back_as_their_codes_say_in_chunks_of_any_length(model, scheme):
    """Guards against a last piece that is no whole number of groups and would be lost or padded."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((40, 2, 8), generator=generator)
    kv = formats._Rounded(model.config, max_sequences=1)
    kv.scheme, kv.format, kv.group = scheme, "int4", 16
    rounded = kv._round(x)
    assert rounded.shape == x.shape
    assert torch.equal(rounded[:32], formats.rounded(x[:32], scheme, "int4", 16).dequantize())
    spans = x[32:].amax(0) - x[32:].amin(0) if scheme == "per channel" else x[32:].amax(2) - x[32:].amin(2)
    allowed = spans[None] if scheme == "per channel" else spans[..., None]
    assert ((rounded[32:] - x[32:]).abs() <= 0.51 / 15 * allowed + 1e-3).all()


def test_codes_that_were_wrong_would_not_be_reported(model, bench, monkeypatch):
    honest = Quantized.remembered

    def off(self, sequence, layer):
        positions, k, v = honest(self, sequence, layer)
        return positions, k + 0.5, v

    monkeypatch.setattr(Quantized, "remembered", off)
    with pytest.raises(WorkbenchError, match="times its bound: the codes are wrong"):
        run_experiment("smaller.kv_formats", settings_of("smaller.kv_formats", model), bench)


def test_a_learners_quantized_kv_stands_beside_ours(model, bench):
    asked = settings_of("smaller.kv_formats", model)
    found = run_experiment("smaller.kv_formats", asked, bench, {"kv": lambda c: Quantized(c, format="int8")})
    yours, int8 = (
        next(m for m in found if m.settings.get("format") == f and m.unit == "perplexity") for f in ("yours", "int8")
    )
    assert yours.median == pytest.approx(int8.median, rel=1e-4)


@pytest.mark.parametrize("name", ["stdlib-3m-mla", "stdlib-3m-hybrid", "stdlib-3m-shared"])
def test_every_kind_of_model_can_be_asked(bench, name):
    asked = {**SMALL["smaller.kv_formats"], "model": name, "layer": 2, "context": 256, "chunk": 64}
    found = run_experiment("smaller.kv_formats", asked, bench)
    layers = measured(found, "outliers")[0].settings["layers"]
    assert layers == list(CACHE_VARIANTS[name].kv_layers)
    assert all(m.counts["largest_share_of_bound"] <= 1 for m in measured(found, "kv")[1:])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layer": 2}, "layer 2 of tiny has no keys of its own; layers with keys: 0, 1"),
        ({"group": 64}, "of a text of 128 tokens nothing would be quantized: .* at least 192"),
        ({"format": "int5"}, "did you mean 'int"),
        ({"chunk": 3}, "chunk"),
        ({"passages": 1}, "whole number from 2"),
    ],
)
def test_a_question_about_formats_that_cannot_be_answered_is_refused(model, bench, given, message):
    with pytest.raises(WorkbenchError, match=message):
        run_experiment("smaller.kv_formats", {**settings_of("smaller.kv_formats", model), **given}, bench)


# -- smaller.windows -------------------------------------------------------------------------------------------


def test_ranges_of_positions_hold_every_scored_token_once():
    for context in (32, 48, 64, 1024):
        ranges = windows.ranges_up_to(context)
        assert [p for a, b in ranges for p in range(a, b)] == list(range(1, context))
    assert windows.ranges_up_to(64) == [(1, 16), (16, 32), (32, 64)]


def by_way(found, measured):
    ways: dict[str, list] = {}
    for m in found:
        if m.settings["measured"] == measured:
            ways.setdefault(m.settings["way"], []).append(m)
    return ways


def test_windows_lose_nothing_before_they_slide_and_something_after(model, bench):
    found = run_experiment("smaller.windows", settings_of("smaller.windows", model), bench)
    losses = by_way(found, "loss")
    assert list(losses) == ["full", "window", "window and sinks"]
    for way in ("window", "window and sinks"):
        first, *later = losses[way]
        assert first.counts["above_full"] == pytest.approx(0, abs=1e-5)
        assert all(abs(m.counts["above_full"]) > 1e-4 for m in later)
    assert all("a mask hides what the window forgets" in m.check for m in losses["window and sinks"])
    assert sum(m.counts["tokens"] for m in losses["full"]) == 2 * 63


def test_windows_with_and_without_sinks_take_equal_bytes_and_fewer_than_the_whole(model, bench):
    sizes = by_way(run_experiment("smaller.windows", settings_of("smaller.windows", model), bench), "bytes")
    a_token = model.config.kv_values_per_token() * 4
    assert [m.samples for m in sizes["full"]] == [[64 * a_token]]
    assert sizes["window"][0].samples == sizes["window and sinks"][0].samples
    assert (
        sizes["window"][0].counts["bytes_needed"] == sizes["window and sinks"][0].counts["bytes_needed"] == 16 * a_token
    )
    assert sizes["window"][0].predicted == sizes["window"][0].median


def test_attention_on_the_first_tokens_is_counted_from_the_weights(model, bench):
    """With a query and a key of zeros attention is even, so the share is that of the even one, exactly."""
    even = random_decoder(model.config, tokenizer=model.tokenizer)
    for layer in even.layers:
        layer.attention.q.weight.zero_()
    for decoder, is_even in ((even, True), (model, False)):
        first = run_experiment("smaller.windows", settings_of("smaller.windows", decoder), bench)[0]
        assert first.settings["measured"] == "attention" and len(first.samples) == 2
        off = abs(first.counts["mean_share"] - first.counts["even_share"])
        assert (off < 1e-6) == is_even


def test_the_variant_trained_with_windows_stands_beside_its_twin_without(model, bench):
    asked = {**settings_of("smaller.windows", model), "variants": True, "context": 256, "chunk": 64}
    found = run_experiment("smaller.windows", asked, bench)
    twin, hybrid = (by_way(found, "loss")[way][-1] for way in ("trained full", "trained with windows"))
    assert (twin.settings["model"], hybrid.settings["model"]) == ("stdlib-3m-mha", "stdlib-3m-hybrid")
    assert "equal those without a cache" in hybrid.check
    sizes = by_way(found, "bytes")
    assert sizes["trained with windows"][0].median < sizes["trained full"][0].median


def test_a_learners_kv_is_measured_beside_ours(model, bench):
    asked = settings_of("smaller.windows", model)
    found = run_experiment("smaller.windows", asked, bench, {"kv": lambda config: Contiguous(config)})
    yours = by_way(found, "loss")["yours"]
    assert all(m.counts["above_full"] == pytest.approx(0, abs=1e-5) for m in yours)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window": 8, "sinks": 8}, "8 sinks take the whole window of 8"),
        ({"window": 64}, "sees all of a passage of 64"),
        ({"window": 0}, "window"),
        ({"sinks": -1}, "sinks must be a whole number from 0 to 64"),
    ],
)
def test_a_window_that_cannot_be_is_refused(model, bench, given, message):
    with pytest.raises(WorkbenchError, match=message):
        run_experiment("smaller.windows", {**settings_of("smaller.windows", model), **given}, bench)


def test_a_model_with_windows_of_its_own_is_not_given_others(bench):
    own = random_decoder(tiny_config(sliding_window=8), tokenizer=shipped_tokenizer())
    with pytest.raises(WorkbenchError, match="has windows of its own"):
        run_experiment("smaller.windows", settings_of("smaller.windows", own), bench)


# -- the twins with and without windows ------------------------------------------------------------------------


def test_the_twins_began_with_the_same_weights_and_agree_where_no_mask_hides_anything():
    pair = pairing.twins()
    assert (pair.full, pair.windowed) == ("stdlib-3m-mha", "stdlib-3m-hybrid")
    assert (pair.window, pair.windowed_layers) == (128, (0, 1, 3, 4))
    logits = []
    for name in (pair.full, pair.windowed):
        decoder = Decoder(CACHE_VARIANTS[name], tokenizer=shipped_tokenizer(), name=name)
        initialize(decoder, recipes.RECIPES[name].seed)
        rows = held_out_passages(decoder.tokenizer, 160, 1)
        with torch.inference_mode():
            logits.append(decoder(rows_batch(rows), Recompute(decoder.config)))
    assert torch.allclose(logits[0][:128], logits[1][:128], atol=1e-5)
    assert not torch.allclose(logits[0][128:], logits[1][128:], atol=1e-5)


def test_twins_that_were_trained_otherwise_are_no_twins(monkeypatch):
    name = "stdlib-3m-hybrid"
    monkeypatch.setitem(recipes.RECIPES, name, dataclasses.replace(recipes.RECIPES[name], steps=7))
    with pytest.raises(WorkbenchError, match="were not trained alike"):
        pairing.twins()


def test_under_each_others_masks_only_what_is_beyond_the_window_changes(bench):
    losses = pairing.swapped_losses(bench, context=256, passages=2)
    assert list(losses) == [(f"stdlib-3m-{name}", masked) for name in ("mha", "hybrid") for masked in (False, True)]
    for name in ("stdlib-3m-mha", "stdlib-3m-hybrid"):
        without, masked = losses[name, False].losses, losses[name, True].losses
        assert torch.allclose(without[:, :127], masked[:, :127], atol=1e-4)
        assert not torch.allclose(without[:, 127:], masked[:, 127:], atol=1e-4)
        own = loss_without_kv(bench, bench.model(name), held_out_passages(shipped_tokenizer(), 256, 2), "")
        assert torch.equal(losses[name, name.endswith("hybrid")].losses, own.losses)


def test_a_mask_that_hid_something_too_early_would_be_found_out(bench, monkeypatch):
    narrow = dataclasses.replace(CACHE_VARIANTS["stdlib-3m-hybrid"], sliding_window=8)
    real = windows.with_shape
    monkeypatch.setattr(
        pairing, "with_shape", lambda decoder, shape: real(decoder, narrow if shape.sliding_window else shape)
    )
    with pytest.raises(WorkbenchError, match="stdlib-3m-mha: a mask that hides nothing changed a loss"):
        pairing.swapped_losses(bench, context=128, passages=2)


def test_the_gap_in_training_is_that_of_the_cards():
    gaps = pairing.gap_in_training(pairing.twins())
    cards = [json.loads((ZOO / f"stdlib-3m-{n}" / "card.json").read_text()) for n in ("mha", "hybrid")]
    assert [step for step, _ in gaps][-1] == cards[0]["steps"] == cards[1]["steps"]
    assert gaps[-1][1] == cards[1]["training_loss_by_step"][-1][1] - cards[0]["training_loss_by_step"][-1][1]


def test_gradients_agree_as_their_definition_says_and_a_window_that_hides_nothing_changes_nothing(bench):
    alike = pairing.gradient_agreement(bench, (None, 64, 8), batches=2, sequence_length=64)
    assert list(alike) == [None, 64, 8] and all(list(one) == ["q", "k", "v", "o"] for one in alike.values())
    for name in pairing.PROJECTIONS:
        assert alike[None][name] == pytest.approx(alike[64][name], abs=1e-4)
        assert len(alike[8][name]) == 6 and all(-1 <= value <= 1 for one in alike.values() for value in one[name])
    assert alike[8]["v"] != pytest.approx(alike[None]["v"], abs=1e-4)
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    assert pairing._agreement([a, b]) == pytest.approx(0.5**0.5) and pairing._agreement([a, -a]) == -1


# -- smaller.convert -------------------------------------------------------------------------------------------


def test_a_conversion_reports_every_stage_and_the_tokens_it_took(bench):
    asked = {"model": "stdlib-3m-mha", "num_kv_heads": 2, "context": 32, "passages": 2, **LIBRARY}
    said = []
    bench.report = said.append
    found = run_experiment("smaller.convert", asked, bench)
    held_out = [m for m in found if m.settings["measured"] == "held out"]
    assert [m.settings["stage"] for m in held_out] == ["before", "pooled", "uptraining", "uptrained", "trained so"]
    assert [m.counts["tokens_uptrained"] for m in held_out] == [0, 0, 32, 64, 0]
    assert [m.counts["kv_heads"] for m in held_out] == [6, 2, 2, 2, 2]
    assert held_out[1].counts["bytes_per_token"] == held_out[0].counts["bytes_per_token"] / 3 == 2 * 6 * 2 * 32 * 4
    assert held_out[-1].settings["trained"] == "stdlib-3m-gqa" and "parameters" in held_out[-1].check
    trained_before = recipes.RECIPES["stdlib-3m-mha"].tokens
    assert held_out[3].counts["share_of_first_training"] == 64 / trained_before
    steps = [m for m in found if m.settings["measured"] == "training"]
    assert [len(m.samples) for m in steps] == [1, 1] and [m.settings["first_step"] for m in steps] == [1, 2]
    assert any("step 2, 64 tokens, loss" in line for line in said)


def test_a_conversion_leaves_the_model_it_began_with_as_it_was(model, bench):
    before = [p.clone() for p in model.parameters()]
    found = run_experiment("smaller.convert", settings_of("smaller.convert", model), bench)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    last = [m for m in found if m.settings["measured"] == "held out"][-1]
    assert last.settings["stage"] == "uptrained" and "no shipped variant was trained with these heads" in last.check


def test_a_conversion_counts_and_learns_the_same_twice_and_otherwise_with_another_seed(model, bench, monkeypatch):
    def run(**given) -> list[tuple]:
        made = run_experiment("smaller.convert", {**settings_of("smaller.convert", model), **given}, bench)
        [time] = [m for m in made if m.settings["measured"] == "time"]
        assert len(time.samples) == time.counts["steps"] == 2 and min(time.samples) > 0
        assert (
            time.counts["tokens_uptrained"] == 2 * time.counts["tokens_a_step"] == made[-2].counts["tokens_uptrained"]
        )
        return [(m.settings["stage"], m.samples, m.counts) for m in made if m is not time]

    first = run()
    real = clock.perf_counter
    monkeypatch.setattr(clock, "perf_counter", lambda: 1000 * real())  # a machine that is slower
    assert run() == first
    assert run(seed=2)[-1][1:] != first[-1][1:]


def test_a_conversion_that_is_stopped_leaves_what_came(model, bench):
    kept, run = [], experiment("smaller.convert")
    bench.report = lambda stage: bench.stop.set() if "step 1" in stage else None
    with pytest.raises(Stopped):
        for m in run.run(bench, **run.complete({**settings_of("smaller.convert", model), "steps": 50})):
            kept.append(m)
    assert [m.settings["stage"] for m in kept][:2] == ["before", "pooled"]


def test_the_variant_trained_so_has_the_same_attention_whatever_its_feed_forward():
    mha = CACHE_VARIANTS["stdlib-3m-mha"]
    for heads, name in ((6, "stdlib-3m-mha"), (2, "stdlib-3m-gqa"), (1, "stdlib-3m-mqa"), (3, None)):
        assert converting.trained_so(dataclasses.replace(mha, num_kv_heads=heads)) == name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_kv_heads": 4}, "pooling cannot make 4"),
        ({"sequence_length": 512}, "sequences of 512 tokens are beyond the 256"),
        ({"steps": 0}, "steps must be a whole number from 1"),
    ],
)
def test_a_conversion_that_cannot_be_is_refused_before_anything_is_measured(model, bench, given, message):
    run = experiment("smaller.convert")
    with pytest.raises(WorkbenchError, match=message):
        next(run.run(bench, **run.complete({**settings_of("smaller.convert", model), **given})))


def test_a_conversion_whose_counterpart_is_not_trained_yet_says_how_to_make_it():
    asked = {"model": "stdlib-3m-mha", "num_kv_heads": 1, "context": 32, "passages": 2, **LIBRARY}
    with pytest.raises(WorkbenchError, match="workbench train stdlib-3m-mqa"):
        run_experiment("smaller.convert", asked, VariantBench("stdlib-3m-mqa"))
