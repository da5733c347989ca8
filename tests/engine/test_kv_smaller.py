"""Smaller caches against their oracle: the same model without a cache, with attention as it is defined.

A window keeps O(W) places, a latent one row for all heads, shared layers one set of keys for several: none of it
changes a token. "Quantized", which does change them, has its own claims in test_kv_quantized.py."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from conftest import every_pair, random_decoder, tiny_config
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_kv_contiguous import LENGTHS, greedy, oracle, text
from test_parity import TOLERANCE, relative_difference

from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.instruments import memory
from workbench.instruments.memory import peak_memory
from workbench.kv import KINDS, KV, Contiguous, Latent, Recompute, SharedLayers, Window, kv_for, make_kv
from workbench.kv.state import REWIND
from workbench.models import Batch, Decoder, prepare, public_shape
from workbench.models.attention import eager_attention
from workbench.models.config import LatentAttentionShape, ModelConfig
from workbench.models.latent import UpProjections, absorbing_pays
from workbench.models.recipes import RECIPES
from workbench.models.state_shape import StateShape

ATTENTION = ["sdpa", "eager"]
FORMS = ["auto", "absorbed", "expanded"]
CHUNKS = [1, 3, 16, 17, None]
EXACT = 1e-9  # of the largest logit, float64

W, SINKS = 8, 3
LATENT = LatentAttentionShape(query_rank=None, kv_rank=16, rotary_head_dim=4, content_head_dim=8, value_head_dim=6)
SMALL = {"vocab_size": 64}
HEADS = {
    "MHA": {"num_kv_heads": 4},
    "MQA": {"num_kv_heads": 1},
    "GQA": {"num_kv_heads": 2},
    "MLA": {"num_kv_heads": 4, "head_dim": 12, "family": "deepseek_v3", "latent_attention": LATENT},
}
WINDOWS = {
    "everywhere": {"sliding_window": W},
    "and a global layer": {"num_layers": 3, "sliding_window": W, "global_layers": (1,)},
    "with sinks": {"sliding_window": W, "attention_sinks": SINKS},
    "of shared layers": {"num_layers": 4, "sliding_window": W, "global_layers": (2, 3), "kv_sources": (0, 0, 2, 2)},
    "of layers that share across others": {"num_layers": 4, "sliding_window": W, "kv_sources": (0, 1, 0, 1)},
    "of one token": {"sliding_window": 1},
    "of one token with sinks": {"sliding_window": 1, "attention_sinks": 2},
}
SHARING = {"num_layers": 4, "kv_sources": (0, 0, 2, 2)}


def decoder(*parts: dict, **changes) -> Decoder:
    shape: dict = dict(SMALL)
    for part in (*parts, changes):
        shape |= part
    return random_decoder(tiny_config(**shape))


def tensors_of(kv: object) -> list[torch.Tensor]:
    """Every tensor the object holds, one a storage: what it really takes."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    waiting: list[object] = [kv]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found[one.untyped_storage().data_ptr()] = one
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one
        elif type(one).__module__.startswith("workbench.kv"):
            waiting += vars(one).values()
    return list(found.values())


def stored_bytes(kv: object) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors_of(kv))


class Places:
    """What a rolling buffer must still know, kept as a dict of place -> position, a layer of a window each."""

    def __init__(self, window: int | None, sinks: int, rewind: int, max_tokens: int) -> None:
        self.window, self.sinks = window, sinks
        places = max_tokens if window is None else min(max_tokens, sinks + window - 1 + rewind)
        self.size, self.turns = places, max(1, places - sinks)
        self.held: dict[int, int] = {}

    def grow(self, first: int, count: int) -> None:
        for p in range(first, first + count):
            self.held[p if p < self.sinks else self.sinks + (p - self.sinks) % self.turns] = p

    def needed(self, length: int) -> set[int]:
        """Positions that the next token sees, besides itself."""
        oldest = 0 if self.window is None else max(0, length - self.window + 1)
        return set(range(min(length, self.sinks))) | set(range(oldest, length))

    def can_cut(self, length: int) -> bool:
        return self.needed(length) <= set(self.held.values())

    def cut(self, length: int) -> None:
        self.held = {place: p for place, p in self.held.items() if p < length}


class Driver:
    """Feeds tokens through a kv and holds every row of logits to the same text without a cache, in float64.

    dtype: given, the model stays as it is.
    """

    def __init__(self, model: Decoder, kind: str, **given) -> None:
        self.tolerance = EXACT
        if "dtype" not in given:
            model, given = deepcopy(model).double(), {**given, "dtype": torch.float64}
        self.model = model
        self.kv = make_kv(kind, model.config, **{"max_sequences": 4, "max_tokens": 128, **given})
        self.texts: dict[str, list[int]] = {}
        self.rewind = given.get("rewind", 16)
        self.places: dict[str, list[Places]] = {}

    @torch.no_grad()
    def feed(self, **new: list[int]) -> None:
        """One batch: the new tokens of each sequence, in this order."""
        starts = [self.kv.lengths.get(name, 0) for name in new]
        batch = Batch.of(list(new.values()), first_positions=starts, sequences=list(new), logits="all")
        logits = self.model(batch, self.kv)
        for name, tokens in new.items():
            self.texts[name] = self.texts.get(name, []) + tokens
            for places in self.places.setdefault(name, self.empty()):
                places.grow(len(self.texts[name]) - len(tokens), len(tokens))
        whole = Batch.of([self.texts[name] for name in new], logits="all")
        expected = self.model(whole, Recompute(self.model.config, attention="eager"))
        for tokens, end in zip(new.values(), whole.query_starts[1:]):
            ours, logits = logits[: len(tokens)], logits[len(tokens) :]
            assert relative_difference(ours, expected[end - len(tokens) : end]) < self.tolerance
        self.check_counts()

    def step(self, *names: str, seed: int = 99) -> None:
        """One new token for each."""
        self.feed(**{name: text(1, seed + i) for i, name in enumerate(names)})

    def truncate(self, name: str, length: int) -> None:
        self.kv.truncate(name, length)
        self.texts[name] = self.texts[name][:length]
        for places in self.places[name]:
            places.cut(length)
        self.check_counts()

    def fork(self, name: str, new: str) -> None:
        self.kv.fork(name, new)
        self.texts[new] = list(self.texts[name])
        self.places[new] = self.empty()
        for mine, theirs in zip(self.places[new], self.places[name]):
            mine.held = dict(theirs.held)
        self.check_counts()

    def release(self, name: str) -> None:
        self.kv.release(name)
        del self.texts[name], self.places[name]
        self.check_counts()

    def empty(self) -> list[Places]:
        c = self.model.config
        return [
            Places(
                c.window_of(layer) if isinstance(self.kv, Window) else None,
                c.attention_sinks if isinstance(self.kv, Window) and c.window_of(layer) else 0,
                self.rewind,
                self.kv.max_tokens,
            )
            for layer in c.kv_layers
        ]

    def check_counts(self) -> None:
        assert dict(self.kv.lengths) == {name: len(ids) for name, ids in self.texts.items()}
        c = self.model.config
        a_layer = (
            c.latent_attention.cached_dim
            if isinstance(self.kv, Latent)
            else c.num_kv_heads * (c.head_dim + c.value_head_dim)
        )
        held = sum(len(places.held) for of_layers in self.places.values() for places in of_layers)
        assert self.kv.bytes_in_use == held * a_layer * self.kv.dtype.itemsize
        rooms = sum(places.size for places in self.empty())
        assert self.kv.bytes_reserved == self.kv.max_sequences * rooms * a_layer * self.kv.dtype.itemsize


@pytest.fixture(scope="module", params=WINDOWS)
def windowed(request) -> Decoder:
    return decoder(WINDOWS[request.param])


@pytest.fixture(scope="module")
def everywhere() -> Decoder:
    return decoder(WINDOWS["everywhere"])


@pytest.fixture(scope="module")
def with_sinks() -> Decoder:
    return decoder(WINDOWS["with sinks"])


@pytest.fixture(scope="module")
def mla() -> Decoder:
    return decoder(HEADS["MLA"])


# -- the matrix ----------------------------------------------------------------------------------------------


class Bounded:
    """A quantized kv that holds every attention to the bound that workbench/kv/quantized.py states."""

    def __init__(self, kv) -> None:
        self.kv, self.config, self.lengths = kv, kv.config, kv.lengths
        self.exact: list[tuple] = [() for _ in range(kv.config.num_layers)]
        self.largest = 0.0  # of a difference, over its bound

    def begin(self, batch: Batch) -> None:
        known = batch.first_positions[0] > 0
        self.read = [self.kv.remembered("s", i)[1:] if known else () for i in range(len(self.exact))]
        self.kv.begin(batch)

    def attend(self, layer: int, q, k, v, batch: Batch, up=None):
        out = self.kv.attend(layer, q, k, v, batch, up=up)
        new = (k, v) if up is None else up.expand(k)
        past = self.exact[layer]
        self.exact[layer] = [torch.cat(pair) for pair in zip(past, new)] if past else list(new)
        keys, values = self.exact[layer]
        error = [(now - was).abs().max() if past else torch.zeros(()) for now, was in zip(self.read[layer], past)]
        k_error, v_error = error or [torch.zeros(())] * 2
        moved = self.config.attention_scale * q.abs().sum(-1) * k_error  # [N, H], δ
        bound = (torch.expm1(2 * moved) * values.abs().max() + v_error)[..., None]
        exact = eager_attention(q, keys, values, scale=self.config.attention_scale)
        self.largest = max(self.largest, float(((out - exact).abs() / (bound + 1e-5)).max()))
        return out


def model_for(kind: str, heads: str) -> Decoder:
    """The model of these heads that the kind is made for."""
    if kind == "window":
        return decoder(HEADS[heads], WINDOWS["and a global layer"])
    if kind == "shared_layers" and heads != "MLA":
        return decoder(HEADS[heads], SHARING)
    return decoder(HEADS[heads])


NO_SENSE = {
    ("latent", "MHA"): "keeps the latents of latent attention, and this model .* use kv 'contiguous'",
    ("latent", "MQA"): "keeps the latents of latent attention",
    ("latent", "GQA"): "keeps the latents of latent attention",
    ("shared_layers", "MLA"): r"whose layers share keys \(kv_sources\).* use kv 'contiguous'",
}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", ["recompute", "contiguous", "window", "latent", "shared_layers", "quantized"])
def test_every_kind_with_every_kind_of_heads(kind, heads):
    """Lossless: logits within 1e-5 of the largest, whatever the chunks, and 24 equal greedy tokens (in float64, where
    rounding cannot exchange two tokens). Lossy: within the bound that is stated. No sense: refused with the reason."""
    model = model_for(kind, heads)
    if (kind, heads) in NO_SENSE:
        with pytest.raises(WorkbenchError, match=NO_SENSE[kind, heads]):
            kv_for(kind, model)
        return
    ids, prompt, wide = text(64), text(20), model_for(kind, heads).double()
    expected, tokens = oracle(model, ids), greedy(wide, Recompute(wide.config, attention="eager"), prompt, 24)
    assert len(set(tokens)) > 5
    # 44 tokens are two groups: none of them quantized yet
    whole = {"group": 22} if kind == "quantized" else {}
    chunk = None if kind == "recompute" else 7
    assert greedy(wide, kv_for(kind, wide, **whole), prompt, 24, chunk) == tokens
    for chunk in [None] if kind == "recompute" else CHUNKS:
        if kind == "quantized":
            kv = Bounded(kv_for(kind, model, group=8, format="int8"))
            logits_in_chunks(model, kv, ids, chunk)
            assert 0 < kv.largest <= 1
        else:
            difference = relative_difference(logits_in_chunks(model, kv_for(kind, model), ids, chunk), expected)
            assert difference < TOLERANCE


@torch.no_grad()
def logits_in_chunks(model: Decoder, kv, ids: list[int], chunk: int | None) -> torch.Tensor:
    chunk = chunk or len(ids)
    return torch.cat(
        [
            model(Batch.of([ids[at : at + chunk]], first_positions=[at], sequences=["s"], logits="all"), kv)
            for at in range(0, len(ids), chunk)
        ]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_generate_takes_every_kind_by_name(kind, tiny_model):
    changes = {"window": {"sliding_window": 8}, "latent": HEADS["MLA"], "shared_layers": {"kv_sources": (0, 0)}}
    changes["state"] = {"mixers": ("linear_attention", "attention"), "state_shape": StateShape(16, 4, 2)}
    model = random_decoder(tiny_config(**changes.get(kind, {})), tokenizer=tiny_model.tokenizer)
    asked = {"max_new_tokens": 24, "temperature": 0.0}
    expected = generate(model, "import os\n", **asked)
    assert generate(model, "import os\n", **asked, kv=kind).tokens == expected.tokens


# -- windows: the same as attention with a mask --------------------------------------------------------------


@every_pair(windowed=WINDOWS, chunk=CHUNKS, attention=ATTENTION, indirect=("windowed",))
def test_a_rolling_buffer_gives_the_logits_of_masked_attention(windowed, chunk, attention):
    wide = deepcopy(windowed).double()
    kv = kv_for("window", wide, attention=attention)
    assert relative_difference(logits_in_chunks(wide, kv, text(80), chunk), oracle(wide, text(80))) < EXACT


@pytest.mark.parametrize("rewind", [1, 2, 9, 100])
def test_it_does_so_with_any_rewind(windowed, rewind):
    driver = Driver(windowed, "window", rewind=rewind)
    for seed, count in enumerate((3, 1, 1, 5, 1, 13, 1, 1, 1, 40, 1, 2, 1, 1)):
        driver.feed(a=text(count, seed))


def test_it_equals_the_whole_cache_with_the_same_mask(windowed):
    kept, whole = (make_kv(kind, windowed.config, max_tokens=128) for kind in ("window", "contiguous"))
    for chunk in (1, 16, None):
        kept, whole = (make_kv(kind, windowed.config, max_tokens=128) for kind in ("window", "contiguous"))
        a, b = (logits_in_chunks(windowed, kv, text(100), chunk) for kv in (kept, whole))
        assert relative_difference(a, b) < TOLERANCE
        assert kept.bytes_reserved < whole.bytes_reserved


@pytest.mark.slow
@every_pair(windowed=WINDOWS, lengths=LENGTHS, attention=ATTENTION, indirect=("windowed",))
def test_sequences_in_a_batch_are_each_as_alone(windowed, lengths, attention):
    lengths = LENGTHS[lengths]
    driver = Driver(windowed, "window", attention=attention, rewind=3)
    driver.feed(**{name: text(n, seed) for seed, (name, n) in enumerate(zip("abcd", lengths))})
    for seed in range(W):
        driver.step("a", "b", "c", "d", seed=seed)
    driver.step("b", "c")
    driver.step("a", "d")
    driver.step("d", "b", "a")
    driver.feed(a=text(7, 1), b=text(1, 2), c=text(20, 3))  # chunks beside a step
    driver.step("a", "b", "c", "d")


def test_drafts_are_rejected_again_and_again(windowed):
    """K tokens come, up to `rewind` of them go: every text there is goes on as if they had never been."""
    driver = Driver(windowed, "window", rewind=4)
    driver.feed(a=text(5, 1), b=text(30, 2))
    for round_ in range(12):
        driver.feed(a=text(5, round_), b=text(4, round_ + 50))
        driver.truncate("a", len(driver.texts["a"]) - round_ % 5)
        driver.truncate("b", len(driver.texts["b"]) - (round_ + 2) % 5)
        driver.step("a", "b", seed=round_)


@pytest.mark.parametrize("cut", [1, 2, 5, 16])
def test_the_last_tokens_can_be_cut_one_by_one_or_at_once(windowed, cut):
    driver = Driver(windowed, "window")
    driver.feed(a=text(60, 1))
    for _ in range(16 // cut):
        driver.truncate("a", len(driver.texts["a"]) - cut)
    driver.step("a")
    driver.feed(a=text(30, 2))


def test_a_fork_of_a_window_and_its_parent_are_apart(windowed):
    driver = Driver(windowed, "window", rewind=5)
    driver.feed(parent=text(31, 1))
    driver.fork("parent", "child")
    driver.truncate("child", 27)
    driver.feed(parent=text(3, 2))
    driver.feed(child=text(5, 3))
    for seed in range(3):
        driver.feed(parent=text(1, seed), child=text(1, seed + 10))
    driver.fork("child", "grandchild")
    driver.release("parent")
    driver.feed(child=text(9, 4), grandchild=text(2, 5))
    driver.step("child", "grandchild")


def test_what_a_slot_held_before_is_never_seen(windowed):
    driver = Driver(windowed, "window", rewind=2)
    driver.feed(**{name: text(48 + seed, seed) for seed, name in enumerate("wxyz")})
    for name in "xwzy":
        driver.release(name)
    assert not any(t.any() for ring in driver.kv._rings for t in (ring.keys, ring.values))
    driver.feed(**{name: text(n, n) for name, n in zip("abcd", (5, 6, 4, 7))})
    for seed in range(14):
        driver.step("a", "b", "c", "d", seed=seed)


def overflow(driver: Driver, name: str, count: int) -> None:
    """What a model whose activations overflow leaves behind: keys and values that are no numbers."""
    c, first = driver.model.config, driver.kv.lengths.get(name, 0)
    batch = Batch.of([[0] * count], first_positions=[first], sequences=[name])
    q, up = torch.ones(count, c.num_heads, c.head_dim), None
    k = v = torch.full((count, c.num_kv_heads, c.head_dim), float("nan"))
    if c.latent_attention is not None:
        k, v, up = torch.full((count, 1, LATENT.cached_dim), float("nan")), None, up_projections(c)
    driver.kv.begin(batch)
    for layer in range(c.num_layers):
        owns = c.kv_source(layer) == layer
        driver.kv.attend(layer, q, k if owns else None, v if owns else None, batch, up=up)
    driver.texts[name] = driver.texts.get(name, []) + [0] * count
    for places in driver.places.setdefault(name, driver.empty()):
        places.grow(first, count)


def up_projections(config: ModelConfig, seed: int = 0) -> UpProjections:
    shape, random = config.latent_attention, torch.Generator().manual_seed(seed)
    k_up, v_up = (
        torch.randn(config.num_heads * size, shape.kv_rank, generator=random) / shape.kv_rank**0.5
        for size in (shape.content_head_dim, shape.value_head_dim)
    )
    return UpProjections(shape, k_up, v_up)


@pytest.mark.parametrize("kind", ["window", "latent", "shared_layers"])
def test_what_was_no_number_is_never_seen_once_it_is_released_or_cut(kind, windowed):
    """A masked key has weight 0, and 0 × NaN is NaN: it must not be there at all."""
    changes = {"latent": HEADS["MLA"], "shared_layers": SHARING}
    driver = Driver(decoder(changes[kind]) if kind in changes else windowed, kind)
    overflow(driver, "released", 32)
    driver.release("released")
    driver.feed(a=text(5, 1), b=text(7, 2))
    overflow(driver, "a", 4)
    driver.truncate("a", 5)
    for seed in range(15):
        driver.step("a", "b", seed=seed)
    driver.feed(b=text(30, 3))
    overflow(driver, "b", 12)
    driver.truncate("b", 52)
    driver.step("a", "b")


def test_a_window_wider_than_the_room_is_the_whole_cache():
    wide = decoder(sliding_window=50)
    driver = Driver(wide, "window", max_tokens=40)
    driver.feed(a=text(40, 1), b=text(7, 2))
    whole = Contiguous(wide.config, max_sequences=4, max_tokens=40, dtype=torch.float64)
    assert driver.kv.bytes_reserved == whole.bytes_reserved
    driver.truncate("a", 3)
    driver.step("a", "b")


def test_more_sinks_than_room_are_all_the_room():
    model = decoder(sliding_window=4, attention_sinks=50)
    driver = Driver(model, "window", max_tokens=20)
    driver.feed(a=text(15, 1))
    driver.truncate("a", 2)
    driver.feed(a=text(17, 2))
    driver.step("b")


@pytest.mark.parametrize(
    "kind, changes", [("window", WINDOWS["with sinks"]), ("latent", HEADS["MLA"]), ("shared_layers", SHARING)]
)
def test_a_prepared_model_is_served_as_well(kind, changes):
    model = decoder(changes)
    fast = prepare(model)
    for chunk in (1, 16):
        logits = logits_in_chunks(fast, kv_for(kind, fast), text(50), chunk)
        assert relative_difference(logits, oracle(model, text(50))) < TOLERANCE


# -- windows: how far back -----------------------------------------------------------------------------------


def test_a_cut_further_back_than_the_ring_remembers_is_refused_with_what_can_be_had(everywhere):
    driver = Driver(everywhere, "window", rewind=6)
    driver.feed(a=text(40))
    before = snapshot(driver.kv)
    with pytest.raises(
        WorkbenchError,
        match=r"'a' has 40 tokens, .* a window of 8, remembers them from position 27 on: it can be cut to 34 … 40 "
        r"tokens, or to 0, got 33\. Cut it to 0 and send .* larger rewind",
    ):
        driver.kv.truncate("a", 33)
    assert same(before, snapshot(driver.kv))
    driver.truncate("a", 34)
    with pytest.raises(WorkbenchError, match="cut to 34 … 34 tokens, or to 0, got 33"):
        driver.kv.truncate("a", 33)
    driver.step("a")
    with pytest.raises(WorkbenchError, match="cut to 34 … 35 tokens, or to 0, got 20"):
        driver.kv.truncate("a", 20)
    driver.truncate("a", 0)
    driver.feed(a=text(13, 1))
    driver.truncate("a", 2)  # 13 tokens are as many as there are places: nothing was overwritten
    driver.feed(a=text(12, 1))
    with pytest.raises(WorkbenchError, match="cut to 8 … 14 tokens, or to 0, got 7"):
        driver.kv.truncate("a", 7)
    driver.truncate("a", 8)
    driver.feed(a=text(20, 2))


def test_a_cut_into_the_sinks_needs_nothing_of_the_ring(with_sinks):
    driver = Driver(with_sinks, "window", rewind=2)
    driver.feed(a=text(40))
    with pytest.raises(WorkbenchError, match="cut to 38 … 40 tokens, or to 0 … 3, got 4"):
        driver.kv.truncate("a", 4)
    driver.truncate("a", 3)
    driver.feed(a=text(6, 1))
    driver.truncate("a", 4)  # since the ring began anew
    driver.feed(a=text(20, 1))
    driver.truncate("a", 1)
    driver.step("a")


def test_of_two_windows_the_narrower_memory_decides():
    """A given window for the global layer: 5 + 3 − 1 places, beside 8 + 3 − 1 of the model's own."""
    model = decoder(WINDOWS["and a global layer"])
    kv = Window(model.config, max_tokens=100, window=5, sinks=2, rewind=3)
    logits_in_chunks(model, kv, text(60), 7)
    with pytest.raises(WorkbenchError, match=r"can be cut to 57 … 60 tokens, or to 0, got 56"):
        kv.truncate("s", 56)
    kv.truncate("s", 57)


# -- windows: as few bytes as they say -----------------------------------------------------------------------


def test_a_window_takes_the_same_bytes_however_long_the_text_may_grow():
    config = tiny_config(sliding_window=W, context_length=100_000)
    short, long = (Window(config, max_tokens=n).bytes_reserved for n in (100, 100_000))
    assert short == long == (W - 1 + 16) * config.kv_values_per_token() * 4


def test_steps_and_chunks_take_no_more_than_a_window(everywhere):
    """What is allocated on the way does not grow with the text."""
    taken = {}
    for length in (60, 240):
        kv = Window(everywhere.config, rewind=4)
        logits_in_chunks(everywhere, kv, text(length), 4)
        for count in (1, 4):
            batch = Batch.of([text(count)], first_positions=[length], sequences=["s"])
            inputs = attention_inputs(everywhere.config, count)
            with peak_memory() as peak:
                kv.begin(batch)
                for layer in range(everywhere.config.num_layers):
                    kv.attend(layer, *inputs, batch)
            taken[length, count] = peak.bytes
            kv.truncate("s", length)
    # 180 more of them would be seen; what the last step left is less
    a_token = everywhere.config.kv_values_per_token() * 4
    assert all(abs(taken[60, count] - taken[240, count]) < a_token for count in (1, 4))
    assert taken[60, 1] < kv.bytes_reserved


def attention_inputs(config: ModelConfig, count: int, seed: int = 0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    return [torch.randn(count, h, config.head_dim, generator=random) for h in heads]


def test_no_mask_is_made_where_every_place_is_seen(everywhere):
    kv = Window(everywhere.config, rewind=1, max_sequences=2)
    for count, masked in ((1, False), (6, None), (1, False), (1, False), (1, False), (1, False)):
        length = kv.lengths.get("s", 0)
        with torch.no_grad():
            everywhere(Batch.of([text(count)], first_positions=[length], sequences=["s"]), kv)
        if masked is not None:
            assert kv._parts[0][0]._mask is None


# -- windows: given to a model that has none -----------------------------------------------------------------


@every_pair(heads=HEADS, sinks=[None, 0, 1, 4], attention=ATTENTION)
def test_a_given_window_is_attention_with_that_mask(heads, sinks, attention):
    """Lossy by design: other logits than the model's own, and exactly those of the mask."""
    model = decoder(HEADS[heads]).double()
    seen = Decoder(replace(model.config, sliding_window=6, attention_sinks=sinks or 0)).double()
    seen.load_state_dict(model.state_dict())
    given = {"window": 6} if sinks is None else {"window": 6, "sinks": sinks}
    for chunk in (1, 5, 50):
        logits = logits_in_chunks(model, kv_for("window", model, attention=attention, **given), text(50), chunk)
        assert relative_difference(logits, oracle(seen, text(50))) < EXACT
    own = oracle(model, text(50))
    assert relative_difference(oracle(seen, text(50))[:6], own[:6]) < TOLERANCE  # nothing is hidden yet
    assert relative_difference(oracle(seen, text(50)), own) > 0.01


def test_a_given_window_leaves_layers_that_have_one_alone():
    """Own window 8 in layers 0 and 2, given 5 with 2 sinks in layer 1; a mask a layer, from the definition."""
    config = tiny_config(**SMALL, **WINDOWS["and a global layer"])
    kv = Window(config, max_tokens=64, window=5, sinks=2, rewind=1)
    looks = [(8, 0), (5, 2), (8, 0)]
    keys: list[list] = [[], [], []]
    for seed, count in enumerate((4, 1, 9, 1, 1, 20, 1, 3)):
        first = kv.lengths.get("s", 0)
        batch = Batch.of([[0] * count], first_positions=[first], sequences=["s"])
        kv.begin(batch)
        for layer, (window, sinks) in enumerate(looks):
            q, k, v = attention_inputs(config, count, 10 * seed + layer)
            keys[layer].append((k, v))
            got = kv.attend(layer, q, k, v, batch)
            everything = [torch.cat(one) for one in zip(*keys[layer])]
            expected = eager_attention(q, *everything, scale=config.attention_scale, window=window, sinks=sinks)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert kv.bytes_reserved == (2 * 8 + 2 + 5) * config.num_kv_heads * 2 * config.head_dim * 4


REFUSED_SETTINGS = {
    "no window anywhere": ({}, {}, "every layer sees the whole text; use kv 'contiguous', or give a window="),
    "a window of nothing": ({}, {"window": 0}, "window must be a whole number of at least 1, got 0"),
    "a window less than nothing": ({}, {"window": -3}, "got -3"),
    "half a window": ({}, {"window": 2.5}, "got 2.5"),
    "a flag": ({}, {"window": True}, "got True"),
    "sinks less than nothing": ({}, {"window": 4, "sinks": -1}, "sinks must be a whole number of at least 0, got -1"),
    "sinks without a window": ({}, {"sinks": 4}, r"sinks=4 goes with window="),
    "sinks beside own windows": (WINDOWS["everywhere"], {"sinks": 4}, r"its attention_sinks, 0"),
    "a window beside own windows": (WINDOWS["everywhere"], {"window": 4}, "has its window of 8 tokens already"),
    "no rewind": (WINDOWS["everywhere"], {"rewind": 0}, "rewind must be a whole number of at least 1, got 0"),
    "an unknown attention": (WINDOWS["everywhere"], {"attention": "egaer"}, "did you mean 'eager'"),
    "too many tokens": (WINDOWS["everywhere"], {"max_tokens": 257}, "context of 256, got 257"),
}


@pytest.mark.parametrize("case", REFUSED_SETTINGS)
def test_a_window_that_makes_no_sense_is_refused(case):
    changes, given, message = REFUSED_SETTINGS[case]
    with pytest.raises(WorkbenchError, match=message):
        Window(tiny_config(**changes), **given)
    if not {"attention", "max_tokens"} & given.keys():  # the formula knows as well
        with pytest.raises(WorkbenchError, match=message):
            Window.reserved_bytes_for(
                tiny_config(**changes), max_sequences=1, max_tokens=9, dtype=torch.float32, **given
            )


# -- latents -------------------------------------------------------------------------------------------------


@every_pair(chunk=CHUNKS, form=FORMS, attention=ATTENTION)
def test_both_forms_give_the_logits_of_the_whole_text(mla, chunk, form, attention):
    wide = deepcopy(mla).double()
    kv = kv_for("latent", wide, form=form, attention=attention)
    assert relative_difference(logits_in_chunks(wide, kv, text(60), chunk), oracle(wide, text(60))) < EXACT


@pytest.mark.parametrize("shape", [LATENT, replace(LATENT, query_rank=20), LatentAttentionShape(None, 4, 2, 8, 12)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_sequences_of_latents_in_a_batch_are_each_as_alone(shape, lengths):
    model = decoder(HEADS["MLA"], latent_attention=shape, head_dim=shape.key_head_dim)
    for form, attention in (("auto", "sdpa"), ("absorbed", "eager"), ("expanded", "sdpa")):
        driver = Driver(model, "latent", form=form, attention=attention)
        driver.feed(**{name: text(n, seed) for seed, (name, n) in enumerate(zip("abcd", lengths))})
        for seed in range(3):
            driver.step("a", "b", "c", "d", seed=seed)
        driver.step("b", "c")
        driver.step("a", "d")
        driver.step("d", "b", "a")
        driver.feed(a=text(7, 1), b=text(1, 2), c=text(20, 3))
        driver.truncate("c", 10 if lengths[2] > 10 else 1)
        driver.release("d")
        driver.fork("c", "e")
        driver.step("a", "b", "c", "e")


@pytest.mark.parametrize("window", [{"sliding_window": W}, {"sliding_window": W, "attention_sinks": 2}])
def test_latents_keep_to_the_windows_of_the_model(window):
    model = decoder(HEADS["MLA"], window, num_layers=3, global_layers=(1,))
    for form in FORMS:
        driver = Driver(model, "latent", form=form)
        driver.feed(a=text(5, 1), b=text(20, 2))
        driver.feed(a=text(9, 3), b=text(3, 4))
        driver.step("a", "b")
        driver.feed(a=text(9, 5))
        driver.step("a", "b")
        driver.step("b")


def test_a_step_over_latents_is_one_rectangle_only_where_lengths_are_near(mla):
    kv = Latent(mla.config, max_sequences=3)
    mla(Batch.of([text(9), text(12), text(60)], sequences=["a", "b", "c"]), kv)
    for names, together in ((["a", "b"], True), (["a", "b", "c"], False), (["b", "a"], False)):
        starts = [kv.lengths[name] for name in names]
        mla(Batch.of([[1]] * len(names), first_positions=starts, sequences=names), kv)
        assert kv._step.rectangle == together


def test_auto_absorbs_steps_and_expands_prompts_each_sequence_for_itself():
    config = tiny_config(**SMALL, **HEADS["MLA"])
    few = max(n for n in range(1, 100) if absorbing_pays(LATENT, n))
    assert few == 12
    kv = Latent(config, max_sequences=3)
    kv.begin(Batch.of([[0] * few, [0] * (few + 1), [0]], sequences=["a", "b", "c"]))
    assert kv._step.absorbed == [True, False, True]
    for form in ("absorbed", "expanded"):
        kv = Latent(config, max_sequences=2, form=form)
        kv.begin(Batch.of([[0] * 40, [0]], sequences=["a", "b"]))
        assert kv._step.absorbed == [form == "absorbed"] * 2


@pytest.mark.parametrize("new_tokens", [1, 4, 200])
def test_absorbed_equals_expanded_in_the_shape_of_deepseek(new_tokens):
    """128 heads over a latent of 512 + 64, one layer: within 1e-4, as promised, and in truth within 1e-5."""
    public = public_shape("deepseek-v3")
    config = replace(public, num_layers=1, experts=None, num_heads=16, num_kv_heads=16, hidden_size=64)
    up, random = up_projections(config), torch.Generator().manual_seed(1)
    q = torch.randn(300 + new_tokens, 16, config.head_dim, generator=random)
    latents = torch.randn(300 + new_tokens, 1, 576, generator=random)
    outs = []
    for form in FORMS:
        kv = Latent(config, max_tokens=512, form=form)
        for a, b in ((0, 300), (300, 300 + new_tokens)):
            batch = Batch.of([[0] * (b - a)], first_positions=[a])
            kv.begin(batch)
            out = kv.attend(0, q[a:b], latents[a:b], None, batch, up=up)
        outs.append(out)
    k, v = up.expand(latents)
    outs.append(eager_attention(q[300:], k, v, scale=config.attention_scale))
    for one in outs[:-1]:
        assert relative_difference(one, outs[-1]) < 1e-5


def test_a_token_of_deepseek_leaves_576_values_a_layer():
    for name, layers in (("deepseek-v2", 60), ("deepseek-v3", 61)):
        shape = public_shape(name)
        room = {"max_sequences": 1, "max_tokens": 1000, "dtype": torch.bfloat16}
        assert Latent.reserved_bytes_for(shape, **room) == 1000 * (512 + 64) * layers * 2
        whole = Contiguous.reserved_bytes_for(shape, **room)
        assert whole == 1000 * 128 * (128 + 64 + 128) * layers * 2  # every head its own key and value


def test_latents_of_a_bfloat16_model_are_kept_as_float32_on_a_cpu():
    for kind, changes in (("latent", HEADS["MLA"]), ("window", WINDOWS["everywhere"])):
        model = decoder(changes).to(torch.bfloat16)
        driver = Driver(model, kind, dtype=torch.bfloat16)
        assert driver.kv.dtype == torch.float32
        driver.tolerance = 0.05  # the oracle attends over rounded keys
        driver.feed(a=text(30), b=text(20, 1))
        driver.step("a", "b")


def test_what_is_no_latent_is_refused(mla):
    kv = Latent(mla.config, max_sequences=2)
    up = up_projections(mla.config)
    for q, k, v, given, message in (
        (torch.ones(3, 4, 12), torch.ones(3, 1, 20), None, None, "together with their up-projections .* none came"),
        (
            torch.ones(3, 4, 12),
            torch.ones(3, 4, 12),
            torch.ones(3, 4, 6),
            None,
            r"takes q \[3, 4, 12\], k \[3, 1, 20\]",
        ),
        (torch.ones(3, 4, 8), torch.ones(3, 1, 20), None, up, "another model's config"),
        (
            torch.ones(3, 4, 12),
            torch.ones(3, 1, 20),
            None,
            replace(up, shape=replace(LATENT, kv_rank=12)),
            "up-projections .* those of",
        ),
    ):
        batch = Batch.of([[0] * 3])
        kv.begin(batch)
        with pytest.raises(WorkbenchError, match=message):
            kv.attend(0, q, k, v, batch, up=given)
        assert dict(kv.lengths) == {} and kv.bytes_in_use == 0
    with pytest.raises(WorkbenchError, match="unknown form of latent attention 'absorb'; did you mean 'absorbed'"):
        Latent(mla.config, form="absorb")
    with pytest.raises(WorkbenchError, match="keeps the latents"):
        Latent.reserved_bytes_for(tiny_config(), max_sequences=1, max_tokens=9, dtype=torch.float32)


# -- shared layers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sources, part", [((0, 0, 2, 2), 0.5), ((0, 0, 0, 0), 0.25), ((0, 1, 0, 1), 0.5), ((0, 0, 2, 3), 0.75)]
)
def test_shared_layers_take_the_bytes_of_the_layers_that_have_keys(sources, part):
    model = decoder(num_layers=4, kv_sources=sources)
    room = {"max_sequences": 3, "max_tokens": 50}
    kv = SharedLayers(model.config, **room)
    own = Contiguous(replace(model.config, kv_sources=None), **room)
    assert kv.bytes_reserved == part * own.bytes_reserved
    driver = Driver(model, "shared_layers")
    driver.feed(a=text(20, 1), b=text(9, 2))
    driver.step("a", "b")
    driver.truncate("a", 11)
    driver.fork("a", "c")
    driver.feed(a=text(5, 3), b=text(1, 4), c=text(2, 5))
    driver.step("a", "b", "c")


def test_a_model_that_shares_nothing_is_sent_to_the_other_cache():
    for sources in (None, (0, 1)):
        with pytest.raises(WorkbenchError, match="each of the 2 layers has its own; use kv 'contiguous'"):
            SharedLayers(tiny_config(kv_sources=sources))


@pytest.mark.parametrize("kind", ["shared_layers", "window"])
def test_keys_of_a_layer_that_shares_and_none_of_one_that_does_not_are_refused(kind):
    """A model of the same shape whose layers share otherwise must not write over the keys of another layer."""
    config = tiny_config(**SMALL, num_layers=4, sliding_window=W, kv_sources=(0, 0, 2, 2))
    kv = make_kv(kind, config, max_sequences=2)
    logits_in_chunks(random_decoder(config), kv, text(40), 8)
    for sources, message in ((None, "layer 1.* keys"), ((0, 0, 0, 0), "layer 2.* keys")):
        model = random_decoder(replace(config, kv_sources=sources))
        before = snapshot(kv)
        with pytest.raises(WorkbenchError, match=message):
            model(Batch.of([text(3), text(2)], first_positions=[40, 0], sequences=["s", "new"]), kv)
        assert same(before, snapshot(kv))


# -- bytes: the formula is what is allocated -----------------------------------------------------------------

ALLOCATED = {
    "contiguous": ({}, "contiguous", {}),
    "contiguous, shared layers": (SHARING, "contiguous", {}),
    "contiguous, MLA": (HEADS["MLA"], "contiguous", {}),
    "latent": (HEADS["MLA"], "latent", {}),
    "shared_layers": (SHARING, "shared_layers", {}),
    "window, given": ({}, "window", {"window": 9, "sinks": 2, "rewind": 3}),
    "window, MLA": (HEADS["MLA"] | WINDOWS["everywhere"], "window", {}),
    "quantized": ({}, "quantized", {}),
} | {f"window {name}": (changes, "window", {}) for name, changes in WINDOWS.items()}


@pytest.mark.parametrize("case", ALLOCATED)
def test_the_formula_is_what_was_allocated(case):
    changes, kind, given = ALLOCATED[case]
    config = tiny_config(**changes)
    for sequences, tokens, dtype in ((3, 200, torch.float32), (1, 7, torch.float16)):
        room = {"max_sequences": sequences, "max_tokens": tokens, "dtype": dtype, **given}
        with peak_memory() as made:
            kv = make_kv(kind, config, **room)
        formula = KINDS[kind].reserved_bytes_for(config, **room)
        assert made.bytes == stored_bytes(kv) == kv.bytes_reserved == formula
        assert kv.bytes_in_use == 0


@pytest.mark.parametrize("kind, changes", [("latent", HEADS["MLA"]), ("window", WINDOWS["everywhere"])])
def test_a_cache_too_large_for_memory_is_refused_before_it_is_allocated(kind, changes, monkeypatch):
    config = tiny_config(**changes)
    room = {"max_sequences": 4, "max_tokens": 100}
    needed = KINDS[kind].reserved_bytes_for(config, **room, dtype=torch.float32)
    monkeypatch.setattr(memory, "available_bytes", lambda device="cpu": needed - 1)
    with peak_memory() as taken, pytest.raises(WorkbenchError, match=r"4 sequences × 100 tokens in float32 needs"):
        make_kv(kind, config, **room)
    assert taken.bytes == 0
    monkeypatch.setattr(memory, "available_bytes", lambda device="cpu": needed)
    assert make_kv(kind, config, **room).bytes_reserved == needed


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("stdlib-3m")])
def test_every_trained_variant_has_a_kind_that_keeps_no_more_than_it_must(name):
    config = RECIPES[name].config
    if config.state_layers:  # states: the empty one, the current one, one to write and REWIND to go back to
        keys_and_values = config.kv_values_per_token() * 1024
        assert kv_bytes("state", config) == (keys_and_values + (REWIND + 3) * config.state_values()) * 4
        return
    kind = next(
        kind
        for kind, has in (
            ("latent", config.latent_attention),
            ("shared_layers", config.kv_sources),
            ("window", config.sliding_window),
            ("contiguous", True),
        )
        if has is not None
    )
    places = {
        layer: 1024 if config.window_of(layer) is None else config.window_of(layer) - 1 + 16
        for layer in config.kv_layers
    }
    a_layer = config.kv_values_per_token() // len(config.kv_layers)
    assert kv_bytes(kind, config) == sum(places.values()) * a_layer * 4


def kv_bytes(kind: str, config: ModelConfig) -> int:
    return KINDS[kind].reserved_bytes_for(config, max_sequences=1, max_tokens=1024, dtype=torch.float32)


# -- refusals and interruptions change nothing ---------------------------------------------------------------


def snapshot(kv) -> tuple:
    return (
        dict(kv.lengths),
        kv.bytes_in_use,
        kv.bytes_reserved,
        list(kv._free),
        dict(kv._slots),
        [list(ring.since) for ring in getattr(kv, "_rings", [])],
        [t.clone() for t in storage(kv)],
    )


def storage(kv) -> list[torch.Tensor]:
    if isinstance(kv, Window):
        return [t for ring in kv._rings for t in (ring.keys, ring.values)]
    return [kv._latents] if isinstance(kv, Latent) else [kv._keys, kv._values]


def same(a: tuple, b: tuple) -> bool:
    return a[:-1] == b[:-1] and all(torch.equal(x, y) for x, y in zip(a[-1], b[-1]))


KEPT = {
    "window": (WINDOWS["everywhere"], "window", {"rewind": 2}),
    "window and global": (WINDOWS["and a global layer"], "window", {"rewind": 2}),
    "window with sinks": (WINDOWS["with sinks"], "window", {"rewind": 2}),
    "window of shared layers": (WINDOWS["of shared layers"], "window", {"rewind": 2}),
    "latent": (HEADS["MLA"], "latent", {}),
    "shared_layers": (SHARING, "shared_layers", {}),
}


@pytest.fixture(params=KEPT)
def full(request) -> Driver:
    """Three of four slots taken: "a" and "c" have come round, "b" has not; "gone" was there."""
    changes, kind, given = KEPT[request.param]
    driver = Driver(decoder(changes), kind, max_tokens=48, **given)
    driver.feed(a=text(40, 1), b=text(5, 2), c=text(40, 4))
    driver.feed(gone=text(30, 3))
    driver.release("gone")
    return driver


def send(driver: Driver, model: Decoder | None = None, **starts: tuple[int, int]) -> None:
    """A batch of `count` tokens from position `first` for each name=(first, count)."""
    batch = Batch.of(
        [text(count) for _, count in starts.values()],
        first_positions=[first for first, _ in starts.values()],
        sequences=list(starts),
    )
    with torch.no_grad():
        (model or driver.model)(batch, driver.kv)


def other(driver: Driver, **changes) -> Decoder:
    return random_decoder(replace(driver.model.config, **changes))


def more_layers(driver: Driver) -> Decoder:
    c = driver.model.config
    sources = None if c.kv_sources is None else (*c.kv_sources, c.num_layers)
    return other(driver, num_layers=c.num_layers + 1, kv_sources=sources)


REFUSED = {
    "a text longer than its slot": (lambda d: send(d, b=(5, 1), a=(40, 9)), "'a' would grow to 49 .* holds 48"),
    "more sequences than slots": (lambda d: send(d, n=(0, 2), m=(0, 2), a=(40, 1)), "4 slots, 1 of them free.* 2 new"),
    "a text that starts too late": (lambda d: send(d, a=(40, 1), b=(6, 1)), "'b' stands at position 5 .*position 6"),
    "a text that is sent again": (lambda d: send(d, b=(5, 1), a=(0, 40)), "'a' stands at position 40 .*position 0"),
    "a text that was released": (lambda d: send(d, gone=(30, 1)), "'gone' stands at position 0"),
    "steps of a model of more layers": (
        lambda d: send(d, more_layers(d), a=(40, 1), b=(5, 1), c=(40, 1)),
        "for a model of",
    ),
    "chunks of a model of more layers": (
        lambda d: send(d, more_layers(d), a=(40, 3), n=(0, 30), b=(5, 2)),
        "for a model of",
    ),
    "a model of more heads": (
        lambda d: send(d, other(d, num_heads=8, num_kv_heads=8), a=(40, 1), n=(0, 1)),
        "another model's config",
    ),
    "a cut beyond the end": (lambda d: d.kv.truncate("a", 41), "'a' has 40 tokens.*got 41"),
    "a cut to less than nothing": (lambda d: d.kv.truncate("a", -1), "got -1"),
    "a cut to a flag": (lambda d: d.kv.truncate("a", True), "got True"),
    "a cut after release": (lambda d: d.kv.truncate("gone", 0), "'gone' is not live here; live: .*'a'"),
    "a fork after release": (lambda d: d.kv.fork("gone", "new"), "'gone' is not live"),
    "a second release": (lambda d: d.kv.release("gone"), "'gone' is not live"),
    "a fork onto another": (lambda d: d.kv.fork("a", "b"), "'b' already exists"),
}


@pytest.mark.slow
@pytest.mark.parametrize("refused", REFUSED)
def test_what_is_refused_changes_nothing(full, refused):
    misuse, message = REFUSED[refused]
    before = snapshot(full.kv)
    with pytest.raises(WorkbenchError, match=message):
        misuse(full)
    assert same(before, snapshot(full.kv))
    full.step("a", "b", "c")  # every live key and value is as it was
    full.feed(new=text(40, 5))  # and the free slot is still free
    full.truncate("a", 39)
    full.step("a", "b")


class Interrupted(Exception):
    pass


INTERRUPTED = {
    "steps": {"a": 1, "b": 1, "c": 1},
    "steps apart": {"c": 1, "a": 1},
    "a chunk that overwrites the window whole": {"a": 8},
    "chunks and a new text": {"a": 2, "n": 20, "b": 30, "c": 1},
}


@pytest.mark.slow
@every_pair(full=KEPT, counts=INTERRUPTED, then=["begin", "truncate", "fork", "release"], indirect=("full",))
def test_a_batch_that_was_interrupted_never_came(full, counts, then):
    """The layers before wrote over places of the ring: all of it is as it was, whatever is called next."""
    counts = INTERRUPTED[counts]
    before = snapshot(full.kv)
    reach = full.kv.attend

    def attend(layer, *given, **more):
        if layer == full.model.config.num_layers - 1:
            raise Interrupted
        return reach(layer, *given, **more)

    full.kv.attend = attend
    with pytest.raises(Interrupted):
        send(full, **{name: (full.kv.lengths.get(name, 0), n) for name, n in counts.items()})
    del full.kv.attend
    assert full.kv.lengths["a"] + full.kv.lengths["c"] > 80  # half of it is there still
    if then == "begin":
        with pytest.raises(WorkbenchError, match=r"reached \d of the \d layers .* was undone"):
            send(full, a=(full.kv.lengths["a"], 1))
        assert same(before, snapshot(full.kv))
    elif then == "truncate":
        full.truncate("a", 40)
        assert same(before, snapshot(full.kv))
        full.truncate("a", 38)
    elif then == "fork":
        full.fork("a", "twin")
        full.release("twin")
        assert same(before, snapshot(full.kv))
    else:
        if "n" in full.kv.lengths:
            full.kv.release("n")
            assert same(before, snapshot(full.kv))
        full.release("c")
        full.feed(c=text(30, 6))
    full.step("a", "b", "c")
    full.feed(a=text(5, 8), b=text(9, 9))
    full.truncate("a", len(full.texts["a"]) - 2)
    full.step("b", "a")


def test_what_was_overwritten_is_kept_until_the_next_batch_and_is_no_more_than_the_ring(everywhere):
    """A model of too many layers shows only after the last layer: until then the batch may have to be undone."""
    kv = Window(everywhere.config, rewind=2)
    for count, kept in ((30, 0), (1, 1 / 9), (7, 7 / 9), (25, 1), (1, 1 / 9)):
        first = kv.lengths.get("s", 0)
        everywhere(Batch.of([text(count)], first_positions=[first], sequences=["s"]), kv)
        overwritten = sum(t.nbytes for _, _, *pair in kv._overwritten for t in pair)
        assert overwritten == kept * kv.bytes_reserved


# -- everything at random ------------------------------------------------------------------------------------

NAMES = st.sampled_from("abcd")
SLOTS, TOKENS = 3, 24
COUNTS = st.dictionaries(NAMES, st.sampled_from([1, 1, 1, 2, 5, 9]), min_size=1)


class Remembering(RuleBasedStateMachine):
    """A kv beside a model of it: a list of keys and values a sequence and layer, attention as defined."""

    config = tiny_config(num_heads=4, num_kv_heads=2, head_dim=4)
    kind: str = "contiguous"
    given: ClassVar[dict] = {}
    rewind = 0

    def __init__(self) -> None:
        super().__init__()
        self.kv: KV = make_kv(self.kind, self.config, max_sequences=SLOTS, max_tokens=TOKENS, **self.given)
        self.lists: dict[str, list[list[tuple]]] = {}  # [layers with keys][tokens] (k, v)
        self.places: dict[str, list[Places]] = {}
        self.random = torch.Generator().manual_seed(0)
        self.up = None if self.config.latent_attention is None else up_projections(self.config)

    def rows(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def inputs(self, layer: int, n: int) -> tuple:
        c = self.config
        q = self.rows(n, c.num_heads, c.head_dim)
        if c.latent_attention is not None:
            return q, self.rows(n, 1, c.latent_attention.cached_dim), None
        if c.kv_source(layer) != layer:
            return q, None, None
        return q, self.rows(n, c.num_kv_heads, c.head_dim), self.rows(n, c.num_kv_heads, c.head_dim)

    def length(self, name: str) -> int:
        return len(self.lists[name][0]) if name in self.lists else 0

    def empty_places(self) -> list[Places]:
        c = self.config
        if self.kind != "window":
            return [Places(None, 0, 0, TOKENS) for _ in c.kv_layers]
        return [
            Places(c.window_of(i), c.attention_sinks if c.window_of(i) else 0, self.rewind, TOKENS) for i in c.kv_layers
        ]

    def batch(self, counts: dict[str, int], late: bool = False) -> Batch | None:
        """What was sent; None where it had to be refused, and was."""
        starts = [self.length(name) for name in counts]
        starts[-1] += late
        batch = Batch.of([[0] * n for n in counts.values()], first_positions=starts, sequences=list(counts))
        fits = all(self.length(name) + n <= TOKENS for name, n in counts.items())
        enough = len(self.lists.keys() | counts.keys()) <= SLOTS
        if not (fits and enough and not late):
            with pytest.raises(WorkbenchError):
                self.kv.begin(batch)
            return None
        self.kv.begin(batch)
        return batch

    @rule(counts=COUNTS, late=st.booleans())
    def send(self, counts: dict[str, int], late: bool) -> None:
        """A batch of any shape. What does not fit must be refused, and nothing else."""
        batch = self.batch(counts, late and len(counts) > 2)
        if batch is None:
            return
        c = self.config
        for name in counts:
            self.lists.setdefault(name, [[] for _ in c.kv_layers])
            for places in self.places.setdefault(name, self.empty_places()):
                places.grow(self.length(name), counts[name])
        for layer in range(c.num_layers):
            q, k, v = self.inputs(layer, batch.num_tokens)
            got = self.kv.attend(layer, q, k, v, batch, up=self.up)
            if self.up is not None:
                k, v = self.up.expand(k)
            for name, (a, b) in zip(counts, pairwise(batch.query_starts)):
                kept = self.lists[name][c.kv_layers.index(c.kv_source(layer))]
                if k is not None:
                    kept += zip(k[a:b], v[a:b])
                keys, values = (torch.stack(one) for one in zip(*kept))
                expected = eager_attention(
                    q[a:b], keys, values, scale=c.attention_scale, window=c.window_of(layer), sinks=c.attention_sinks
                )
                torch.testing.assert_close(got[a:b], expected, rtol=1e-4, atol=1e-5)

    @rule(counts=COUNTS, layers=st.integers(0, 3))
    def interrupt(self, counts: dict[str, int], layers: int) -> None:
        """A batch that reached some layers; the next call undoes it, and `begin` says so where any was reached."""
        batch = self.batch(counts)
        if batch is None:
            return
        for layer in range(min(layers, self.config.num_layers - 1)):
            self.kv.attend(layer, *self.inputs(layer, batch.num_tokens), batch, up=self.up)
        with pytest.raises(WorkbenchError):
            self.kv.begin(Batch.of([[0]], first_positions=[TOKENS - 1], sequences=["nobody"]))

    @rule(name=NAMES, length=st.integers(-1, TOKENS))
    def truncate(self, name: str, length: int) -> None:
        sensible = name in self.lists and 0 <= length <= self.length(name)
        if not sensible or not all(places.can_cut(length) for places in self.places[name]):
            with pytest.raises(WorkbenchError):
                self.kv.truncate(name, length)
            return
        self.cut(name, length)

    @rule(name=NAMES, back=st.integers(0, 4))
    def rewind_some(self, name: str, back: int) -> None:
        """What `rewind` promises: so many of the newest tokens can go, after any history that left them there."""
        if name in self.lists and back <= self.newest(name):
            self.cut(name, self.length(name) - back)

    def newest(self, name: str) -> int:
        """How many tokens can be cut by the model of the ring, at least."""
        length = self.length(name)
        return next(
            b
            for b in range(length, -1, -1)
            if all(p.can_cut(length - i) for p in self.places[name] for i in range(b + 1))
        )

    def cut(self, name: str, length: int) -> None:
        self.kv.truncate(name, length)
        self.lists[name] = [layer[:length] for layer in self.lists[name]]
        for places in self.places[name]:
            places.cut(length)

    @precondition(lambda self: self.lists)
    @rule(name=NAMES, new=NAMES)
    def fork(self, name: str, new: str) -> None:
        if name not in self.lists or new in self.lists or len(self.lists) == SLOTS:
            with pytest.raises(WorkbenchError):
                self.kv.fork(name, new)
            return
        self.kv.fork(name, new)
        self.lists[new] = [list(layer) for layer in self.lists[name]]
        self.places[new] = self.empty_places()
        for mine, theirs in zip(self.places[new], self.places[name]):
            mine.held = dict(theirs.held)

    @rule(name=NAMES)
    def release(self, name: str) -> None:
        if name not in self.lists:
            with pytest.raises(WorkbenchError):
                self.kv.release(name)
            return
        self.kv.release(name)
        del self.lists[name], self.places[name]

    @invariant()
    def counts_are_those_of_the_lists(self) -> None:
        assert dict(self.kv.lengths) == {name: self.length(name) for name in self.lists}
        per_place = self.config.kv_values_per_token() // len(self.config.kv_layers) * 4
        held = sum(len(places.held) for of_layers in self.places.values() for places in of_layers)
        assert self.kv.bytes_in_use == held * per_place
        assert self.kv.bytes_reserved == SLOTS * sum(p.size for p in self.empty_places()) * per_place


class RememberingWindow(Remembering):
    kind, given, rewind = "window", {"rewind": 2}, 2
    config = replace(Remembering.config, sliding_window=3, num_layers=2)


class RememberingSinksAndGlobal(Remembering):
    kind, given, rewind = "window", {"rewind": 4}, 4
    config = replace(Remembering.config, sliding_window=4, attention_sinks=2, num_layers=3, global_layers=(1,))


class RememberingSharedWindow(Remembering):
    kind, given, rewind = "window", {"rewind": 1}, 1
    config = replace(Remembering.config, sliding_window=4, num_layers=4, kv_sources=(0, 1, 0, 1))


class RememberingWindowAsDefined(RememberingSinksAndGlobal):
    given: ClassVar[dict] = {"rewind": 4, "attention": "eager"}


class RememberingLatent(Remembering):
    kind = "latent"
    config = replace(
        Remembering.config, num_kv_heads=4, head_dim=6, latent_attention=LatentAttentionShape(None, 8, 2, 4, 4)
    )


class RememberingAbsorbed(RememberingLatent):
    given: ClassVar[dict] = {"form": "absorbed"}


class RememberingShared(Remembering):
    kind = "shared_layers"
    config = replace(Remembering.config, num_layers=3, kv_sources=(0, 0, 2))


SHORT = settings(max_examples=25, stateful_step_count=30, deadline=None, derandomize=True, database=None)
TestAnyOrderWindow = RememberingWindow.TestCase
TestAnyOrderSinksAndGlobal = RememberingSinksAndGlobal.TestCase
TestAnyOrderSharedWindow = RememberingSharedWindow.TestCase
TestAnyOrderWindowAsDefined = RememberingWindowAsDefined.TestCase
TestAnyOrderLatent = RememberingLatent.TestCase
TestAnyOrderAbsorbed = RememberingAbsorbed.TestCase
TestAnyOrderShared = RememberingShared.TestCase
for case in (
    TestAnyOrderWindow,
    TestAnyOrderSinksAndGlobal,
    TestAnyOrderSharedWindow,
    TestAnyOrderWindowAsDefined,
    TestAnyOrderLatent,
    TestAnyOrderAbsorbed,
    TestAnyOrderShared,
):
    case.settings = SHORT
del case
