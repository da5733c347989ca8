"""The paged cache: what lies in its blocks, shared, copied, moved to the host and found again.

What every kind of kv promises is in test_kv.py, trees in test_kv_trees.py, the bookkeeping alone in test_blocks.py.
"""

from __future__ import annotations

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_kv_contiguous import relative_difference, text
from test_kv_smaller import LATENT

from workbench.errors import WorkbenchError
from workbench.kv import Contiguous, Paged, Recompute, kv_for, make_kv
from workbench.kv.blocks import NoRoom
from workbench.models import Batch, prepare
from workbench.models.latent import absorbing_pays

EXACT = 1e-9
SHAPES = {
    "mha": {"num_kv_heads": 4},
    "gqa": {},
    "mqa": {"num_kv_heads": 1},
    "windows": {"num_layers": 3, "sliding_window": 6, "global_layers": (1,)},
    "sinks": {"sliding_window": 6, "attention_sinks": 2},
    "latent": {"num_kv_heads": 4, "head_dim": 12, "family": "deepseek_v3", "latent_attention": LATENT},
    "shared": {"num_layers": 4, "kv_sources": (0, 0, 2, 2)},
}


@pytest.fixture(params=SHAPES)
def model(request):
    return random_decoder(tiny_config(vocab_size=64, **SHAPES[request.param])).double()


@pytest.fixture
def gqa():
    return random_decoder(tiny_config(vocab_size=64)).double()


def paged(model, **given) -> Paged:
    room = {"max_sequences": 6, "max_tokens": 64, "block_size": 4, "dtype": torch.float64}
    return Paged(model.config, **{**room, **given})


@torch.no_grad()
def send(model, kv, **new: list[int]) -> torch.Tensor:
    """[sequences, V] logits after the new tokens of each."""
    first = [kv.lengths.get(name, 0) for name in new]
    return model(Batch.of(list(new.values()), first_positions=first, sequences=list(new)), kv)


@torch.no_grad()
def alone(model, *texts: list[int]) -> torch.Tensor:
    return model(Batch.of(list(texts)), Recompute(model.config, attention="eager"))


# -- ragged batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_texts_of_every_length_side_by_side_are_each_as_alone(model, block_size, attention):
    """Decodes of ragged texts, attended over together, beside a chunk and a new prompt."""
    arranged = prepare(model)
    kv = paged(model, block_size=block_size, attention=attention)
    texts = {name: text(n, seed=n) for name, n in zip("abcde", (3, 4, 17, 33, 9))}
    send(arranged, kv, **texts)
    for turn in range(3):
        new = {name: [turn + at] for at, name in enumerate("abcd")}
        new["e"] = text(5, seed=turn)
        if turn == 2:
            new["f"] = texts["f"] = []
            new["f"] = text(7, seed=99)
        logits = send(arranged, kv, **new)
        for name, tokens in new.items():
            texts[name] = texts[name] + tokens
        expected = alone(model, *(texts[name] for name in new))
        assert relative_difference(logits, expected) < EXACT
    kv.tables.check()


def test_what_a_block_held_before_is_never_seen_even_when_it_was_no_number(gqa):
    kv = paged(gqa, num_blocks=6, max_sequences=3)
    for stored in kv.store.tensors:
        stored.fill_(float("nan"))
    logits = send(gqa, kv, a=text(5), b=text(9))
    logits = send(gqa, kv, a=[1], b=[2])
    assert relative_difference(logits, alone(gqa, [*text(5), 1], [*text(9), 2])) < EXACT


def test_latents_are_absorbed_for_few_new_tokens_and_expanded_for_many():
    model = random_decoder(tiny_config(vocab_size=64, **SHAPES["latent"])).double()
    kv = paged(model, max_tokens=200, num_blocks=120)
    many = next(n for n in range(1, 150) if not absorbing_pays(LATENT, n))
    texts = [text(many, seed=1), text(3, seed=2)]
    assert relative_difference(send(model, kv, a=texts[0], b=texts[1]), alone(model, *texts)) < EXACT
    assert [group.absorbed for group in kv._step.groups] == [False, True]
    assert (
        kv.bytes_per_token == model.config.kv_values_per_token() * 8 < model.config.expanded_kv_values_per_token() * 8
    )


# -- sharing -----------------------------------------------------------------------------------------------------------


def test_a_fork_copies_nothing_until_one_of_the_two_writes(model):
    kv = paged(model)
    start = text(10)
    send(model, kv, a=start)
    before = kv.bytes_in_use
    kv.fork("a", "b")
    assert kv.bytes_in_use == before and kv.tables.tables["a"] == kv.tables.tables["b"]
    logits = send(model, kv, a=[1], b=[2])
    assert relative_difference(logits, alone(model, [*start, 1], [*start, 2])) < EXACT
    a, b = (kv.tables.tables[name] for name in "ab")
    assert a[:2] == b[:2] and a[2] != b[2] and kv.tables.copies == 1
    assert kv.bytes_in_use == (8 + 3 + 3) * kv.bytes_per_token
    kv.release("a")
    logits = send(model, kv, b=[3])
    assert relative_difference(logits, alone(model, [*start, 2, 3])) < EXACT
    kv.tables.check()


def test_equal_beginnings_are_found_and_only_the_rest_is_sent(model):
    for prefix in ("hash", "radix"):
        kv = paged(model, prefix=prefix)
        start = text(13)
        assert kv.open("a", start) == 0
        send(model, kv, a=start)
        kv.remember("a", start)
        kv.release("a")
        found = kv.open("b", [*start, 5, 6])
        assert found == 12 == kv.lengths["b"]
        logits = send(model, kv, b=[start[12], 5, 6])
        assert relative_difference(logits, alone(model, [*start, 5, 6])) < EXACT
        assert kv.open("c", start, "another tenant") == 0
        assert kv.open("d", start[:12]) == 8, "the last token is wanted"
        kv.tables.check()


def test_a_block_that_was_found_is_not_written_by_who_found_it(gqa):
    """A text cut back into a shared block and gone on from there leaves the others as they were."""
    kv = paged(gqa, prefix="hash")
    start = text(12)
    kv.open("a", start)
    send(gqa, kv, a=start)
    kv.remember("a", start)
    kv.open("b", [*start, 1])
    kv.truncate("b", 6)
    logits = send(gqa, kv, a=[3], b=[9, 9])
    assert relative_difference(logits, alone(gqa, [*start, 3], [*start[:6], 9, 9])) < EXACT
    assert kv.open("c", [*start, 4]) == 12
    logits = send(gqa, kv, c=[4])
    assert relative_difference(logits, alone(gqa, [*start, 4])) < EXACT
    kv.tables.check()


def test_a_remembered_block_that_is_written_again_is_not_found_any_more(gqa):
    kv = paged(gqa, prefix="hash")
    start = text(12)
    kv.open("a", start)
    send(gqa, kv, a=start)
    kv.remember("a", start)
    kv.truncate("a", 10)
    send(gqa, kv, a=[7, 7, 7])
    assert kv.open("b", [*start, 1]) == 8


# -- to the host and back ----------------------------------------------------------------------------------------------


def test_swapped_out_and_in_again_it_goes_on_in_other_blocks(model):
    kv = paged(model, num_blocks=12)
    texts = {"a": text(11, seed=1), "b": text(6, seed=2)}
    send(model, kv, **texts)
    table, used = list(kv.tables.tables["a"]), kv.bytes_in_use
    moved = kv.swap_out("a")
    assert moved == 11 * kv.bytes_per_token and kv.bytes_in_use == used - moved and "a" not in kv.lengths
    send(model, kv, c=text(9, seed=3))
    assert kv.swap_in("a") == moved and kv.lengths["a"] == 11 and kv.tables.tables["a"] != table
    logits = send(model, kv, a=[1], b=[2])
    assert relative_difference(logits, alone(model, [*texts["a"], 1], [*texts["b"], 2])) < EXACT
    kv.swap_out("b")
    kv.release("b")
    assert not kv._swapped and "b" not in kv.tables.swapped
    kv.tables.check()


def test_what_does_not_fit_does_not_come_back_and_nothing_changes(gqa):
    kv = paged(gqa, num_blocks=4, max_sequences=3)
    send(gqa, kv, a=text(9))
    kv.swap_out("a")
    send(gqa, kv, b=text(8))
    before = dict(kv.lengths), kv.tables.num_available, dict(kv.tables.swapped)
    with pytest.raises(NoRoom, match=r"needs 3 more blocks, and 2 are free"):
        kv.swap_in("a")
    assert (dict(kv.lengths), kv.tables.num_available, dict(kv.tables.swapped)) == before
    kv.release("b")
    kv.swap_in("a")
    assert relative_difference(send(gqa, kv, a=[5]), alone(gqa, [*text(9), 5])) < EXACT


# -- fewer bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "bits"), [("int8", 8), ("fp8", 8), ("int4", 4)])
def test_in_few_bits_the_bytes_are_as_counted_and_the_error_within_its_bound(gqa, format, bits):
    kv, whole = paged(gqa, format=format), paged(gqa)
    c = gqa.config
    # a scale of 2 bytes, and for integers a zero, of key and of value
    scales = 2 * (1 + ("int" in format)) * 2
    assert kv.bytes_per_token == c.num_layers * c.num_kv_heads * (2 * c.head_dim * bits // 8 + scales)
    assert kv.bytes_reserved == kv.num_blocks * kv.block_size * kv.bytes_per_token
    start = text(14)
    for each in (kv, whole):
        send(gqa, each, a=start)
    at = kv._places_of("a", 14)
    for got, exact in zip(kv.store.read(0, at), whole.store.read(0, whole._places_of("a", 14))):
        scale = (exact.amax(-1) - exact.amin(-1)).clamp(min=0) / (2**bits - 1)
        loose = scale * 0.51 + 2e-3 * exact.abs().amax(-1) if "int" in format else exact.abs().amax(-1) / 15
        assert ((got - exact).abs().amax(-1) <= loose).all()


def test_latents_take_no_format():
    config = tiny_config(**SHAPES["latent"])
    with pytest.raises(WorkbenchError, match="keeps latents as they came"):
        Paged(config, format="int8")
    with pytest.raises(WorkbenchError, match="format of kv 'paged'"):
        Paged(tiny_config(), format="int3")


# -- room --------------------------------------------------------------------------------------------------------------


def test_a_batch_that_does_not_fit_is_refused_whole(gqa):
    kv = paged(gqa, num_blocks=5, max_sequences=4)
    send(gqa, kv, a=text(7), b=text(3))
    before = dict(kv.lengths), {k: list(v) for k, v in kv.tables.tables.items()}
    with pytest.raises(NoRoom, match=r"this batch of 10 tokens needs 3 more blocks, and 2 are free"):
        send(gqa, kv, a=[1, 2], c=text(8))
    assert (dict(kv.lengths), {k: list(v) for k, v in kv.tables.tables.items()}) == before
    logits = send(gqa, kv, a=[1, 2], b=[3])
    assert relative_difference(logits, alone(gqa, [*text(7), 1, 2], [*text(3), 3])) < EXACT


def test_drafts_have_the_room_that_the_blocks_leave(gqa):
    kv = paged(gqa, num_blocks=4, max_sequences=2)
    send(gqa, kv, a=text(6))
    assert kv.draft_room("a") == 16 - 6 - 1 and kv.draft_room("new") == 8 - 1
    send(gqa, kv, b=text(3))
    assert kv.draft_room("a") == 12 - 6 - 1


def test_a_block_as_long_as_a_text_is_a_contiguous_reservation(gqa):
    kv = paged(gqa, block_size=64, max_sequences=3)
    contiguous = Contiguous(gqa.config, max_sequences=3, max_tokens=64, dtype=torch.float64)
    assert kv.num_blocks == 3 and kv.bytes_reserved == contiguous.bytes_reserved
    send(gqa, kv, a=text(5), b=text(40))
    assert kv.tables.num_available == 1
    assert kv.bytes_in_use == 45 * kv.bytes_per_token


def test_room_is_for_what_was_asked_and_settings_are_checked(gqa, monkeypatch):
    kv = kv_for("paged", gqa, max_sequences=3, max_tokens=10)
    assert (kv.num_blocks, kv.block_size, kv.dtype) == (3, 16, torch.float64)
    assert make_kv("paged", gqa.config, num_blocks=7).max_tokens == 112
    reserved = Paged.reserved_bytes_for(gqa.config, max_sequences=3, max_tokens=10, dtype=torch.float64)
    assert reserved == kv.bytes_reserved
    for given, message in (
        ({"num_blocks": 0}, "num_blocks"),
        ({"block_size": 0}, "block_size"),
        ({"prefix": "x"}, "prefix"),
    ):
        with pytest.raises(WorkbenchError, match=message):
            Paged(gqa.config, **given)
    monkeypatch.setattr("workbench.instruments.memory.available_bytes", lambda device: 1000)
    with pytest.raises(WorkbenchError, match="paged KV cache"):
        Paged(gqa.config, num_blocks=100)


def test_a_place_for_every_sequence_is_needed_too(gqa):
    kv = paged(gqa, max_sequences=1, num_blocks=10)
    send(gqa, kv, a=text(3))
    for refused in (lambda: kv.open("b", [1, 2]), lambda: kv.fork("a", "b"), lambda: send(gqa, kv, b=[1])):
        with pytest.raises(WorkbenchError, match=r"places for sequences|slots"):
            refused()
    kv.swap_out("a")
    send(gqa, kv, b=[1])
    with pytest.raises(WorkbenchError, match="places for sequences"):
        kv.swap_in("a")
    kv.tables.check()
