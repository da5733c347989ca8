"""The KV cache against its oracle: the same model without a cache, with attention as it is defined, one sequence
at a time. Whatever was chunked, batched, cut, forked, released or refused, the logits are those."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import every_pair, random_decoder, tiny_config
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_parity import PROMPT, SHAPE, TOLERANCE, relative_difference, their_logits
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.instruments import memory
from workbench.instruments.memory import peak_memory
from workbench.kv import Contiguous, Recompute, kv_for, make_kv
from workbench.models import Batch, Decoder, load
from workbench.models.attention import eager_attention
from workbench.models.config import ModelConfig

SMALL = {"vocab_size": 64}
SHAPES = {
    "GQA": tiny_config(**SMALL),
    "MQA": tiny_config(**SMALL, num_kv_heads=1),
    "MHA": tiny_config(**SMALL, num_kv_heads=4),
    "window 8": tiny_config(**SMALL, family="mistral", sliding_window=8),
    "GPT-2": tiny_config(**SMALL, family="gpt2", num_kv_heads=4, qkv_bias=True, mlp_bias=True),
}
ATTENTION = ["sdpa", "eager"]


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Driver:
    """Feeds tokens through a cache and holds every row of logits to the oracle of that sequence alone."""

    def __init__(self, model: Decoder, **settings) -> None:
        self.model = model
        self.kv = Contiguous(model.config, **{"max_sequences": 4, "max_tokens": 128, **settings})
        self.texts: dict = {}
        self.tolerance = TOLERANCE

    @torch.no_grad()
    def feed(self, **new: list[int]) -> None:
        """One batch: the new tokens of each sequence, in this order."""
        starts = [self.kv.lengths.get(name, 0) for name in new]
        batch = Batch.of(list(new.values()), first_positions=starts, sequences=list(new), logits="all")
        logits = self.model(batch, self.kv)
        for name, tokens in new.items():
            ours, logits = logits[: len(tokens)], logits[len(tokens) :]
            self.texts[name] = self.texts.get(name, []) + tokens
            assert relative_difference(ours, oracle(self.model, self.texts[name])[-len(tokens) :]) < self.tolerance
        self.check_counts()

    def step(self, *names: str, seed: int = 99) -> None:
        """One new token for each."""
        self.feed(**{name: text(1, seed + i) for i, name in enumerate(names)})

    def truncate(self, name: str, length: int) -> None:
        self.kv.truncate(name, length)
        self.texts[name] = self.texts[name][:length]
        self.check_counts()

    def fork(self, name: str, new: str) -> None:
        self.kv.fork(name, new)
        self.texts[new] = list(self.texts[name])
        self.check_counts()

    def release(self, name: str) -> None:
        self.kv.release(name)
        del self.texts[name]
        self.check_counts()

    def check_counts(self) -> None:
        assert dict(self.kv.lengths) == {name: len(ids) for name, ids in self.texts.items()}
        tokens = sum(map(len, self.texts.values()))
        per_token = self.model.config.kv_values_per_token() * self.kv.dtype.itemsize
        assert self.kv.bytes_in_use == tokens * per_token
        assert self.kv.bytes_reserved == self.kv.max_sequences * self.kv.max_tokens * per_token


@torch.no_grad()
def oracle(model: Decoder, ids: list[int]) -> torch.Tensor:
    return model(Batch.of([ids], logits="all"), Recompute(model.config, attention="eager"))


@torch.no_grad()
def greedy(model, kv, prompt: list[int], steps: int, chunk: int | None = None) -> list[int]:
    """Greedy tokens, the prompt sent in chunks; each batch holds what the kv does not remember."""
    ids = list(prompt)
    while len(ids) < len(prompt) + steps:
        start = kv.lengths.get("s", 0)
        piece = ids[start:][:chunk]
        row = model(Batch.of([piece], first_positions=[start], sequences=["s"]), kv)[-1]
        if start + len(piece) == len(ids):
            ids.append(int(row.argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module", params=SHAPES)
def model(request) -> Decoder:
    return random_decoder(SHAPES[request.param])


@pytest.fixture(scope="module")
def gqa() -> Decoder:
    return random_decoder(SHAPES["GQA"])


# -- the same tokens -------------------------------------------------------------------------------------------


@every_pair(model=SHAPES, chunk=[1, 3, 7, None], attention=ATTENTION, indirect=("model",))
def test_greedy_tokens_are_the_same_with_and_without_the_cache_however_the_prompt_is_cut(model, chunk, attention):
    """In float64, where rounding cannot exchange two tokens."""
    wide = random_decoder(model.config, seed=3).double()
    without = greedy(wide, Recompute(wide.config, attention="eager"), text(20), 24)
    kv = Contiguous(wide.config, dtype=torch.float64, attention=attention)
    assert greedy(wide, kv, text(20), 24, chunk) == without
    assert dict(kv.lengths) == {"s": 43}  # the last token was never sent
    assert len(set(without)) > 5


@every_pair(model=SHAPES, chunk=[1, 3, 7, 40], attention=ATTENTION, indirect=("model",))
def test_logits_of_a_prompt_in_chunks_are_those_of_the_whole(model, chunk, attention):
    driver = Driver(model, attention=attention)
    ids = text(40)
    for at in range(0, 40, chunk):
        driver.feed(a=ids[at : at + chunk])


def test_the_shipped_model_writes_the_same_with_the_cache():
    shipped = load("stdlib-10m")
    without, cached = (
        generate(shipped, "import os\n\n\ndef read_lines(path):\n", max_new_tokens=16, temperature=0.0, kv=kind)
        for kind in ("recompute", "contiguous")
    )
    assert cached.tokens == without.tokens and len(cached.tokens) == 16
    assert cached.rows_processed == cached.prompt_tokens + 15  # each token is sent once
    assert without.rows_processed == sum(range(without.prompt_tokens, without.prompt_tokens + 16))


THEIRS = {
    "llama GQA": lambda: transformers.LlamaConfig(**SHAPE),
    "llama MQA": lambda: transformers.LlamaConfig(**SHAPE | {"num_key_value_heads": 1}),
    "llama MHA": lambda: transformers.LlamaConfig(**SHAPE | {"num_key_value_heads": 4}),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=None
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=16),
    "mistral window 8": lambda: transformers.MistralConfig(**SHAPE, sliding_window=8),
}


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("case", THEIRS)
def test_64_greedy_tokens_through_the_cache_are_those_of_transformers(case, attention, tmp_path):
    """One pass of theirs over our text: at every place it would have chosen the token that we chose."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(THEIRS[case](), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(0.25 * torch.randn(parameter.shape) + is_norm)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    tokens = greedy(ours, Contiguous(ours.config, attention=attention), PROMPT, 64, chunk=7)
    logits = their_logits(theirs, PROMPT + tokens)
    assert logits.argmax(-1)[len(PROMPT) - 1 : -1].tolist() == tokens
    assert len(set(tokens)) > 5
    kv = Contiguous(ours.config, attention=attention)
    with torch.no_grad():
        rows = [
            ours(Batch.of([[token]], first_positions=[at], sequences=["s"]), kv)[-1]
            for at, token in enumerate(PROMPT + tokens)
        ]
    assert relative_difference(torch.stack(rows), logits) < TOLERANCE


# -- several sequences -----------------------------------------------------------------------------------------

LENGTHS = {
    "equal": (12, 12, 12, 12),
    "mildly ragged": (12, 14, 11, 13),
    "very ragged": (1, 90, 3, 40),
    "around the window": (7, 8, 9, 10),
}


@every_pair(model=SHAPES, lengths=LENGTHS, attention=ATTENTION, indirect=("model",))
def test_sequences_in_a_batch_are_each_as_alone(model, lengths, attention):
    """Prompts together, then steps of one token for all, for some, and in another order."""
    lengths = LENGTHS[lengths]
    driver = Driver(model, attention=attention)
    driver.feed(**{name: text(n, seed) for seed, (name, n) in enumerate(zip("abcd", lengths))})
    for seed in range(5):
        driver.step("a", "b", "c", "d", seed=seed)
    driver.step("b", "c")
    driver.step("a", "d")
    driver.step("d", "b", "a")
    driver.step("a", "b", "c", "d")


@pytest.mark.parametrize("attention", ATTENTION)
def test_prompts_beside_decodes_and_chunks_of_every_size_are_each_as_alone(model, attention):
    driver = Driver(model, attention=attention)
    driver.feed(a=text(9, 1))
    driver.feed(a=text(1, 2), b=text(13, 3))  # a whole prompt beside a decode
    driver.feed(b=text(1, 4), a=text(1, 5), c=text(5, 6))
    driver.feed(a=text(3, 7), c=text(7, 8), b=text(1, 9), d=text(1, 10))  # drafts beside chunks
    driver.feed(a=text(2, 11), b=text(2, 12))
    driver.step("a", "b", "c", "d")


def test_both_attentions_give_the_same_in_the_cache(model):
    fast, exact = (Driver(model, attention=attention) for attention in ATTENTION)
    for lengths in ((12, 30, 5), (1, 1, 1), (1, 7, 3), (1, 1, 1)):
        new = {name: text(n, n) for name, n in zip("abc", lengths)}
        starts = [fast.kv.lengths.get(name, 0) for name in new]
        batch = Batch.of(list(new.values()), first_positions=starts, sequences=list(new), logits="all")
        with torch.no_grad():
            a, b = (driver.model(batch, driver.kv) for driver in (fast, exact))
        assert relative_difference(a, b) < TOLERANCE


# -- cutting, forking, releasing -------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 5, 19, 20])
def test_after_a_cut_it_goes_on_as_if_the_rest_had_never_been(model, length):
    driver = Driver(model)
    driver.feed(a=text(20, 1), b=text(18, 2))
    driver.truncate("a", length)
    driver.feed(a=text(4, 3))
    driver.step("a", "b")
    driver.truncate("b", 0)
    driver.feed(b=text(30, 4), a=text(1, 5))
    driver.step("a", "b")


def test_a_fork_goes_on_from_what_its_parent_knew_and_then_they_are_apart(model):
    driver = Driver(model)
    driver.feed(parent=text(11, 1))
    driver.fork("parent", "child")
    driver.feed(parent=text(3, 2))
    driver.feed(child=text(5, 3))
    for seed in range(3):
        driver.feed(parent=text(1, seed), child=text(1, seed + 10))
    driver.fork("child", "grandchild")
    driver.truncate("child", 4)
    driver.feed(child=text(9, 4), grandchild=text(2, 5))
    driver.release("parent")
    driver.feed(child=text(1, 6), grandchild=text(1, 7))


def test_a_fork_of_nothing_is_a_sequence_of_nothing(gqa):
    driver = Driver(gqa)
    driver.feed(a=text(4))
    driver.truncate("a", 0)
    driver.fork("a", "b")
    driver.feed(a=text(5, 1), b=text(3, 2))


def test_what_a_slot_held_before_is_never_seen(model):
    """Every slot is filled to its end, then given back; shorter sequences of unequal length take them over."""
    driver = Driver(model, max_tokens=48)
    driver.feed(**{name: text(48, seed) for seed, name in enumerate("wxyz")})
    for name in "xwzy":
        driver.release(name)
    driver.feed(**{name: text(n, n) for name, n in zip("abcd", (5, 6, 4, 7))})
    for seed in range(4):
        driver.step("a", "b", "c", "d", seed=seed)


def overflow(driver: Driver, name: str, count: int) -> None:
    """What a model whose activations overflow leaves behind: keys and values that are no numbers."""
    c, first = driver.model.config, driver.kv.lengths.get(name, 0)
    batch = Batch.of([[0] * count], first_positions=[first], sequences=[name])
    driver.kv.begin(batch)
    for layer in range(c.num_layers):
        broken = torch.full((count, c.num_kv_heads, c.head_dim), float("nan"))
        driver.kv.attend(layer, torch.ones(count, c.num_heads, c.head_dim), broken, broken, batch)


def test_what_a_slot_held_before_is_never_seen_even_when_it_was_no_number(gqa):
    """A masked key has weight 0, and 0 × NaN is NaN: it must not be there at all."""
    driver = Driver(gqa, max_tokens=32)
    overflow(driver, "released", 32)
    driver.kv.release("released")
    driver.feed(a=text(5, 1), b=text(7, 2))
    overflow(driver, "a", 4)
    driver.kv.truncate("a", 5)
    driver.step("a", "b")
    driver.step("a", "b")


def test_a_slot_in_the_middle_can_be_given_back_and_taken_again(model):
    driver = Driver(model)
    driver.feed(a=text(8, 1), b=text(9, 2), c=text(10, 3))
    driver.release("b")
    driver.step("a", "c")
    driver.feed(d=text(6, 4), a=text(1, 5))
    driver.step("a", "d", "c")
    driver.feed(e=text(9, 6))
    driver.step("a", "e", "d", "c")


# -- the contract ----------------------------------------------------------------------------------------------


def test_lengths_are_for_reading_only(gqa):
    driver = Driver(gqa)
    driver.feed(a=text(3))
    with pytest.raises(TypeError):
        driver.kv.lengths["a"] = 1
    with pytest.raises((TypeError, AttributeError)):
        driver.kv.lengths = {}
    driver.step("a")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_what_is_reserved_is_what_was_allocated_and_nothing_large_comes_after(dtype):
    """What a step takes beside may have a fixed part (a kernel's scratch, which differs by CPU and type); what grows
    with the cache is less than an eighth of its growth, where a copy of one layer's keys would be a quarter."""
    model = random_decoder(tiny_config(**SMALL)).to(dtype)
    names, held, peaks = list("abcd"), [], {True: [], False: []}
    for length, room in ((20, 25), (200, 250)):
        with peak_memory() as made:
            kv = Contiguous(model.config, max_sequences=4, max_tokens=room, dtype=dtype)
        assert made.bytes == kv.bytes_reserved == 4 * room * 64 * dtype.itemsize
        with torch.no_grad():
            model(Batch.of([text(length, seed) for seed in range(4)], sequences=names), kv)
            assert kv.bytes_in_use == 4 * length * 64 * dtype.itemsize
            held.append(kv.bytes_in_use)
            for first in (True, False):
                at = length if first else length + 1
                step = Batch.of([[1]] * 4, first_positions=[at] * 4, sequences=names)
                with peak_memory() as taken:
                    model(step, kv)
                peaks[first].append(taken.bytes)
    for small, large in peaks.values():
        assert large - small < (held[1] - held[0]) / 8


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize("shape", [{}, {"sliding_window": 6, "attention_sinks": 2}])
def test_a_step_copies_the_new_keys_and_values_and_nothing_that_is_kept(shape, texts, new):
    """What torch does with our views, inside its attention too; and no layer makes a mask of its own."""
    c = tiny_config(num_heads=4, num_kv_heads=2, **shape)
    kv = Contiguous(c, max_sequences=3, max_tokens=64)
    names = list(range(texts))
    with torch.inference_mode():
        for count, first in ((30, 0), (new, 30)):
            batch = Batch.of([[0] * count] * texts, sequences=names, first_positions=[first] * texts)
            rows = [torch.randn(texts * count, heads, 8) for heads in (4, c.num_kv_heads, c.num_kv_heads)]
            kv.begin(batch)
            kv.attend(0, *rows, batch)
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                kv.attend(1, *rows, batch)
    done = Counter(event.name for event in seen.events())
    alone = texts if new > 1 else 1  # calls of attention: single tokens share one
    assert done["aten::copy_"] == 2 * alone and done["aten::scaled_dot_product_attention"] == alone
    copying = ("clone", "contiguous", "where", "repeat_interleave", "index_select", "masked_fill")
    assert not [name for name in done if name.removeprefix("aten::").rstrip("_") in copying]


def test_keys_of_a_bfloat16_model_are_kept_as_float32_on_a_cpu(gqa):
    rounded = random_decoder(gqa.config).to(torch.bfloat16)
    driver = Driver(rounded, dtype=torch.bfloat16)
    assert driver.kv.dtype == torch.float32
    driver.tolerance = 0.03  # the oracle attends over rounded keys
    driver.feed(a=text(12, 1), b=text(9, 2))
    driver.step("a", "b")


def test_a_smaller_type_of_keys_than_the_models_halves_the_bytes_and_costs_little(gqa):
    driver = Driver(gqa, dtype=torch.float16)
    assert driver.kv.bytes_reserved * 2 == Driver(gqa).kv.bytes_reserved
    driver.tolerance = 0.01
    driver.feed(a=text(12, 1), b=text(9, 2))
    driver.step("a", "b")
    driver.feed(a=text(3, 3), b=text(1, 4))


def test_two_caches_share_nothing():
    models = [random_decoder(SHAPES["GQA"], seed=seed) for seed in (1, 2)]
    first, second = (Driver(model, max_sequences=2) for model in models)
    for seed in range(3):
        first.feed(a=text(5, seed), b=text(1, seed + 50))
        second.feed(a=text(4, seed + 20))
    first.release("a")
    second.step("a")
    first.step("b")
    assert dict(second.kv.lengths) == {"a": 13}


def test_by_default_there_is_room_for_one_sequence_as_long_as_the_context(gqa):
    kv = make_kv("contiguous", gqa.config)
    assert (kv.max_sequences, kv.max_tokens, kv.dtype) == (1, 256, torch.float32)
    assert kv.bytes_reserved == 256 * 64 * 4 and kv.bytes_in_use == 0 and dict(kv.lengths) == {}


def test_a_cache_for_a_model_has_its_type_and_the_room_asked_for(gqa):
    kv = kv_for("contiguous", random_decoder(gqa.config).double(), max_sequences=3, max_tokens=10)
    assert (kv.dtype, kv.max_sequences, kv.max_tokens) == (torch.float64, 3, 10)


@pytest.mark.parametrize("lengths", [(9,), (5, 8, 2)])
def test_keys_put_without_attention_are_those_that_attention_would_have_stored(model, lengths):
    c = model.config
    random = torch.Generator().manual_seed(0)
    rows = lambda n, heads: torch.randn(n, heads, c.head_dim, generator=random)  # noqa: E731
    names = list(range(len(lengths)))
    prompts = Batch.of([[0] * n for n in lengths], sequences=names)
    step = Batch.of([[0]] * len(lengths), first_positions=lengths, sequences=names)
    put, attended = (Contiguous(c, max_sequences=3, max_tokens=16) for _ in range(2))
    for kv in (put, attended):
        kv.begin(prompts)
    for layer in range(c.num_layers):
        q, k, v = (rows(sum(lengths), heads) for heads in (c.num_heads, c.num_kv_heads, c.num_kv_heads))
        put.put(layer, k, v, prompts)
        attended.attend(layer, q, k, v, prompts)
    assert put.lengths == attended.lengths
    for kv in (put, attended):
        kv.begin(step)
    for layer in range(c.num_layers):
        new = [rows(len(lengths), heads) for heads in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
        assert torch.equal(put.attend(layer, *new, step), attended.attend(layer, *new, step))


# -- refusals change nothing -----------------------------------------------------------------------------------


@pytest.fixture
def full(gqa) -> Driver:
    """Two of three slots taken: "a" with 10 tokens, "b" with 15 of the 16 that fit."""
    driver = Driver(gqa, max_sequences=3, max_tokens=16)
    driver.feed(a=text(10, 1), b=text(15, 2))
    driver.feed(gone=text(5, 3))
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


def other(**changes) -> Decoder:
    return random_decoder(replace(SHAPES["GQA"], **changes))


REFUSED = {
    "a text longer than its slot": (lambda d: send(d, a=(10, 1), b=(15, 2)), "'b' would grow to 17 .* holds 16"),
    "a new text longer than a slot": (lambda d: send(d, a=(10, 1), new=(0, 17)), "'new' would grow to 17"),
    "more sequences than slots": (lambda d: send(d, n=(0, 2), m=(0, 2), a=(10, 1)), "3 slots, 1 of them free.* 2 new"),
    "a text that starts too late": (lambda d: send(d, b=(15, 1), a=(11, 1)), "'a' stands at position 10 .*position 11"),
    "a text that starts too early": (lambda d: send(d, b=(15, 1), a=(9, 1)), "'a' stands at position 10 .*position 9"),
    "a text that is sent again": (lambda d: send(d, a=(0, 10)), "'a' stands at position 10 .*position 0"),
    "a new text that starts late": (lambda d: send(d, a=(10, 1), new=(3, 1)), "'new' stands at position 0"),
    "a text that was released": (lambda d: send(d, gone=(5, 1)), "'gone' stands at position 0"),
    "a model of more layers": (lambda d: send(d, other(num_layers=3), a=(10, 1), b=(15, 1)), "of 2 layers.*layer 2"),
    "a new text of a model of more layers": (lambda d: send(d, other(num_layers=3), n=(0, 4), a=(10, 2)), "2 layers"),
    "a model of more kv heads": (lambda d: send(d, other(num_kv_heads=4), a=(10, 1)), "another model's config"),
    "a model of fewer kv heads": (lambda d: send(d, other(num_kv_heads=1), a=(10, 2)), "another model's config"),
    "a model of more heads": (lambda d: send(d, other(num_heads=8), a=(10, 1), n=(0, 1)), "another model's config"),
    "a model of larger heads": (lambda d: send(d, other(head_dim=16), a=(10, 1)), "another model's config"),
    "a cut beyond the end": (lambda d: d.kv.truncate("a", 11), "'a' has 10 tokens.*got 11"),
    "a cut to less than nothing": (lambda d: d.kv.truncate("a", -1), "got -1"),
    "a cut to a float": (lambda d: d.kv.truncate("a", 5.0), "got 5.0"),
    "a cut to a flag": (lambda d: d.kv.truncate("a", True), "got True"),
    "a cut to a text": (lambda d: d.kv.truncate("a", "5"), "got '5'"),
    "a cut to none": (lambda d: d.kv.truncate("a", None), "got None"),
    "a cut after release": (lambda d: d.kv.truncate("gone", 0), "'gone' is not live here; live: .*'a'"),
    "a fork after release": (lambda d: d.kv.fork("gone", "new"), "'gone' is not live"),
    "a second release": (lambda d: d.kv.release("gone"), "'gone' is not live"),
    "a fork onto another": (lambda d: d.kv.fork("a", "b"), "'b' already exists"),
    "a fork onto itself": (lambda d: d.kv.fork("a", "a"), "'a' already exists"),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_what_is_refused_changes_nothing(full, refused):
    misuse, message = REFUSED[refused]
    with pytest.raises(WorkbenchError, match=message):
        misuse(full)
    full.check_counts()
    full.step("a", "b")  # every live key and value is as it was
    full.feed(new=text(16, 5))  # and the free slot is still free
    full.truncate("b", 7)
    full.step("a", "b")


def test_a_fork_without_a_free_slot_changes_nothing(full):
    full.feed(c=text(2))
    with pytest.raises(WorkbenchError, match="all 3 slots of the KV cache are taken"):
        full.kv.fork("a", "new")
    full.check_counts()
    full.step("a", "b", "c")
    full.release("c")
    full.fork("a", "new")
    full.step("a", "new")


def test_room_is_found_again_after_a_refusal(full):
    """A refused batch must not keep the slots of its new sequences."""
    for _ in range(5):
        with pytest.raises(WorkbenchError):
            send(full, other(num_layers=3), n=(0, 4))
        with pytest.raises(WorkbenchError):
            send(full, n=(0, 4), a=(3, 1))
    full.feed(n=text(4))


def test_a_cache_too_large_for_memory_is_refused_with_both_numbers_before_it_is_allocated(gqa, monkeypatch):
    needed = 4 * 100 * 64 * 4
    room = {"max_sequences": 4, "max_tokens": 100}
    monkeypatch.setattr(memory, "available_bytes", lambda device="cpu": needed - 1)
    with (
        peak_memory() as taken,
        pytest.raises(WorkbenchError, match=r"4 sequences × 100 tokens.*102 kB.*102 kB are free"),
    ):
        Contiguous(gqa.config, **room)
    assert taken.bytes == 0
    monkeypatch.setattr(memory, "available_bytes", lambda device="cpu": needed)
    assert Contiguous(gqa.config, **room).bytes_reserved == needed
    long = replace(gqa.config, context_length=256_000_000)
    with pytest.raises(WorkbenchError, match=r"needs 16\.4 TB, and 102 kB are free"):
        Contiguous(long, max_sequences=250)


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"max_sequences": 0}, "max_sequences must be a whole number of at least 1, got 0"),
        ({"max_sequences": -1}, "max_sequences must be"),
        ({"max_sequences": 1.0}, "got 1.0"),
        ({"max_sequences": True}, "got True"),
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1 to the model's context of 256, got 0"),
        ({"max_tokens": 257}, "got 257"),
        ({"max_tokens": "9"}, "got '9'"),
        ({"attention": "egaer"}, "did you mean 'eager'"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(gqa, setting, message):
    with pytest.raises(WorkbenchError, match=message):
        Contiguous(gqa.config, **setting)


# -- everything at random --------------------------------------------------------------------------------------

NAMES = st.sampled_from("abcd")
SLOTS, TOKENS = 3, 9


class Remembering(RuleBasedStateMachine):
    """The cache beside a model of it: a list of keys and values a sequence and layer, attention as defined."""

    window: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.config: ModelConfig = tiny_config(num_heads=4, num_kv_heads=2, head_dim=4, sliding_window=self.window)
        self.kv = Contiguous(self.config, max_sequences=SLOTS, max_tokens=TOKENS)
        self.lists: dict[str, list[list[tuple]]] = {}  # [layers][tokens] (k, v)
        self.random = torch.Generator().manual_seed(0)

    def rows(self, count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, self.config.head_dim, generator=self.random)

    @rule(counts=st.dictionaries(NAMES, st.sampled_from([1, 1, 1, 2, 5]), min_size=1), late=st.booleans())
    def send(self, counts: dict[str, int], late: bool) -> None:
        """A batch of any shape. What does not fit must be refused, and nothing else."""
        known = {name: len(self.lists[name][0]) if name in self.lists else 0 for name in counts}
        starts = list(known.values())
        starts[-1] += late and len(counts) > 2
        batch = Batch.of([[0] * n for n in counts.values()], first_positions=starts, sequences=list(counts))
        fits = all(known[name] + n <= TOKENS for name, n in counts.items())
        enough = len(self.lists.keys() | counts.keys()) <= SLOTS
        if not (fits and enough and starts == list(known.values())):
            with pytest.raises(WorkbenchError):
                self.kv.begin(batch)
            return
        self.kv.begin(batch)
        for layer in range(self.config.num_layers):
            n = batch.num_tokens
            q, k, v = self.rows(n, 4), self.rows(n, 2), self.rows(n, 2)
            got = self.kv.attend(layer, q, k, v, batch)
            for name, a, b in zip(counts, batch.query_starts, batch.query_starts[1:]):
                kept = self.lists.setdefault(name, [[] for _ in range(self.config.num_layers)])[layer]
                kept += zip(k[a:b], v[a:b])
                keys, values = (torch.stack(one) for one in zip(*kept))
                scale = self.config.head_dim**-0.5
                expected = eager_attention(q[a:b], keys, values, scale=scale, window=self.window)
                torch.testing.assert_close(got[a:b], expected, rtol=1e-4, atol=1e-5)

    @rule(name=NAMES, length=st.integers(-1, TOKENS))
    def truncate(self, name: str, length: int) -> None:
        if name not in self.lists or not 0 <= length <= len(self.lists[name][0]):
            with pytest.raises(WorkbenchError):
                self.kv.truncate(name, length)
            return
        self.kv.truncate(name, length)
        self.lists[name] = [layer[:length] for layer in self.lists[name]]

    @precondition(lambda self: self.lists)
    @rule(name=NAMES, new=NAMES)
    def fork(self, name: str, new: str) -> None:
        if name not in self.lists or new in self.lists or len(self.lists) == SLOTS:
            with pytest.raises(WorkbenchError):
                self.kv.fork(name, new)
            return
        self.kv.fork(name, new)
        self.lists[new] = [list(layer) for layer in self.lists[name]]

    @rule(name=NAMES)
    def release(self, name: str) -> None:
        if name not in self.lists:
            with pytest.raises(WorkbenchError):
                self.kv.release(name)
            return
        self.kv.release(name)
        del self.lists[name]

    @invariant()
    def counts_are_those_of_the_lists(self) -> None:
        lengths = {name: len(layers[0]) for name, layers in self.lists.items()}
        assert dict(self.kv.lengths) == lengths
        token = self.config.kv_values_per_token() * 4
        assert self.kv.bytes_in_use == sum(lengths.values()) * token
        assert self.kv.bytes_reserved == SLOTS * TOKENS * token


class RememberingWindow(Remembering):
    window = 3


SHORT = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True, database=None)
TestAnyOrder = Remembering.TestCase
TestAnyOrderWithWindow = RememberingWindow.TestCase
TestAnyOrder.settings = TestAnyOrderWithWindow.settings = SHORT
