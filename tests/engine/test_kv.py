"""The contract: what every kind of kv keeps, and `Recompute`, which remembers nothing and refuses to pretend
otherwise. The KV cache has its own claims in test_kv_contiguous.py."""

from __future__ import annotations

import pytest
import torch
from conftest import random_decoder, tiny_config

from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kv import KINDS, KV, Contiguous, Recompute, kv_for, make_kv
from workbench.models.batch import Batch
from workbench.models.config import LatentAttentionShape
from workbench.models.decoder import Decoder
from workbench.models.state_shape import StateShape


@pytest.fixture
def kv() -> Recompute:
    return Recompute(tiny_config())


# -- every kind ------------------------------------------------------------------------------------------------


CONFIGS = {  # of the kinds that are for some models only
    "window": tiny_config(sliding_window=4, global_layers=(1,)),
    "latent": tiny_config(num_kv_heads=4, head_dim=12, latent_attention=LatentAttentionShape(None, 16, 4, 8, 8)),
    "shared_layers": tiny_config(kv_sources=(0, 0)),
    "state": tiny_config(mixers=("linear_attention", "attention"), state_shape=StateShape(16, 4, 2)),
}


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def model(kind, tiny_model) -> Decoder:
    if kind not in CONFIGS:
        return tiny_model
    return random_decoder(CONFIGS[kind], tokenizer=tiny_model.tokenizer)


@pytest.fixture
def any_kv(kind, model) -> KV:
    """Of each kind, with room for three; two sequences have been through the model."""
    kv = kv_for(kind, model, max_sequences=3, max_tokens=32)
    model(Batch.of([[1, 2, 3], [4, 5]], sequences=["a", "b"]), kv)
    return kv


def state(kv: KV) -> tuple:
    return dict(kv.lengths), kv.bytes_in_use, kv.bytes_reserved


def test_every_kind_has_the_whole_contract(kind, model):
    kv = make_kv(kind, model.config)
    assert isinstance(kv, KV)
    assert dict(kv.lengths) == {} and kv.bytes_in_use == 0


def test_a_sequence_lives_from_its_first_batch_to_its_release(any_kv, model):
    assert set(any_kv.lengths) == {"a", "b"}
    any_kv.release("a")
    assert set(any_kv.lengths) == {"b"}
    model(Batch.of([[9]], sequences=["a"]), any_kv)  # the name may be used again
    assert set(any_kv.lengths) == {"a", "b"}


def test_no_more_bytes_are_in_use_than_are_reserved(any_kv):
    for name in ("a", "b"):
        assert 0 <= any_kv.bytes_in_use <= any_kv.bytes_reserved
        any_kv.release(name)
    assert any_kv.bytes_in_use == 0


@pytest.mark.parametrize(
    "misuse",
    [
        lambda kv: kv.release("ghost"),
        lambda kv: kv.truncate("ghost", 0),
        lambda kv: kv.fork("ghost", "c"),
        lambda kv: kv.fork("a", "b"),
        lambda kv: kv.truncate("a", 99),
        lambda kv: kv.truncate("a", -1),
        lambda kv: kv.begin(Batch.of([[1], [2]], first_positions=[0, 7], sequences=["new", "a"])),
        lambda kv: kv.begin(Batch.of([[1], [2]], first_positions=[0, 1], sequences=["b", "new"])),
    ],
)
def test_every_kind_refuses_misuse_and_stays_as_it_was(any_kv, misuse):
    before = state(any_kv)
    with pytest.raises(WorkbenchError):
        misuse(any_kv)
    assert state(any_kv) == before


def test_in_every_kind_a_fork_outlives_its_parent_and_both_are_apart(any_kv, model):
    any_kv.fork("a", "child")
    any_kv.release("a")
    alone = model(Batch.of([[1, 2, 3, 7]]), Recompute(model.config))
    known = any_kv.lengths["child"]
    batch = Batch.of([[1, 2, 3, 7][known:]], first_positions=[known], sequences=["child"])
    assert torch.allclose(model(batch, any_kv), alone, rtol=1e-5, atol=1e-4)


def test_in_every_kind_all_can_be_forgotten_and_sent_again(any_kv, model):
    any_kv.truncate("a", 0)
    assert any_kv.lengths["a"] == 0
    alone = model(Batch.of([[8, 9]]), Recompute(model.config))
    assert torch.allclose(model(Batch.of([[8, 9]], sequences=["a"]), any_kv), alone, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "kind", [*KINDS, Contiguous, Recompute, lambda config: Contiguous(config, attention="eager")], indirect=True
)
def test_generate_writes_the_same_with_every_kind_and_with_any_class(model, kind):
    asked = {"max_new_tokens": 12, "temperature": 0.0}
    assert generate(model, "def f(x):", **asked, kv=kind).tokens == generate(model, "def f(x):", **asked).tokens


def test_generate_leaves_a_kv_that_was_handed_in_empty_and_the_others_in_it_alone(any_kv, model):
    before = state(any_kv)
    result = generate(model, [5, 6, 7], max_new_tokens=6, temperature=0.0, kv=any_kv)
    assert result.tokens == generate(model, [5, 6, 7], max_new_tokens=6, temperature=0.0).tokens
    assert state(any_kv) == before


def test_a_class_of_your_own_is_called_with_the_config_alone(tiny_model):
    seen = []
    kv_for(lambda *given: seen.append(given), tiny_model, max_sequences=4, max_tokens=5)
    assert seen == [(tiny_model.config,)]


# -- recompute -------------------------------------------------------------------------------------------------


def test_it_remembers_nothing_and_so_asks_for_the_whole_text_every_step(kv):
    kv.begin(Batch.of([[1, 2, 3]], sequences=["a"]))
    assert dict(kv.lengths) == {"a": 0}
    assert kv.bytes_in_use == 0
    assert kv.bytes_reserved == 0


def test_a_batch_that_starts_later_is_refused_and_nothing_changes(kv):
    kv.begin(Batch.of([[1]], sequences=["a"]))
    with pytest.raises(WorkbenchError, match=r"'late' must be sent whole.*starts it at position 3"):
        kv.begin(Batch.of([[5], [1, 2]], first_positions=[0, 3], sequences=["new", "late"]))
    assert dict(kv.lengths) == {"a": 0}


def test_a_refused_forward_leaves_the_kv_as_it_was(tiny_model, kv):
    with pytest.raises(WorkbenchError):
        tiny_model(Batch.of([[1, 2]], first_positions=[4]), kv)
    assert dict(kv.lengths) == {}


def test_lengths_are_for_reading_only(kv):
    kv.begin(Batch.of([[1]], sequences=["a"]))
    with pytest.raises(TypeError):
        kv.lengths["a"] = 3


def test_a_fork_lives_on_when_its_parent_is_released(kv):
    kv.begin(Batch.of([[1]], sequences=["parent"]))
    kv.fork("parent", "child")
    kv.release("parent")
    assert dict(kv.lengths) == {"child": 0}


@pytest.mark.parametrize(
    "misuse, message",
    [
        (lambda kv: kv.fork("ghost", "b"), "'ghost' is not live"),
        (lambda kv: kv.fork("a", "a"), "'a' already exists"),
        (lambda kv: kv.release("ghost"), "'ghost' is not live here; live: .*'a'"),
        (lambda kv: kv.truncate("ghost", 0), "'ghost' is not live"),
        (lambda kv: kv.truncate("a", 1), "remembers 0 tokens"),
        (lambda kv: kv.truncate("a", -1), "remembers 0 tokens"),
    ],
)
def test_misuse_is_refused_by_name_and_changes_nothing(kv, misuse, message):
    kv.begin(Batch.of([[1, 2]], sequences=["a"]))
    with pytest.raises(WorkbenchError, match=message):
        misuse(kv)
    assert dict(kv.lengths) == {"a": 0}
    kv.truncate("a", 0)  # forgetting nothing is no misuse


def test_a_released_sequence_is_gone(kv):
    kv.begin(Batch.of([[1]], sequences=["a"]))
    kv.release("a")
    with pytest.raises(WorkbenchError, match=r"not live"):
        kv.release("a")


def test_kinds_and_settings_are_checked_by_name():
    with pytest.raises(WorkbenchError, match=r"'recompte'; did you mean 'recompute'"):
        make_kv("recompte", tiny_config())
    with pytest.raises(WorkbenchError, match=r"attention 'egaer'; did you mean 'eager'"):
        make_kv("recompute", tiny_config(), attention="egaer")


def test_any_class_that_takes_a_config_is_a_kind():
    class Mine(Recompute):
        pass

    assert type(make_kv(Mine, tiny_config())) is Mine


def test_two_models_side_by_side_share_nothing():
    batch = Batch.of([[5, 6, 7]], sequences=["a"])
    models = [random_decoder(tiny_config(), seed=seed) for seed in (1, 2)]
    alone = [m(batch, Recompute(m.config)) for m in models]
    kvs = [Recompute(m.config) for m in models]
    for _ in range(2):
        beside = [m(batch, kv) for m, kv in zip(models, kvs)]
    assert all(torch.equal(a, b) for a, b in zip(alone, beside))
    kvs[0].release("a")
    assert dict(kvs[1].lengths) == {"a": 0}


@pytest.mark.parametrize(
    "given", [{"max_sequences": 0}, {"max_sequences": True}, {"max_tokens": 10**6}, {"max_tokens": 1.5}]
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_looks_at_the_sizes_that_it_is_given(kind, given, tiny_model):
    """`recompute`, which has room for any, took whatever came."""
    with pytest.raises(WorkbenchError):
        kv_for(kind, tiny_model, **given)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", ["contiguous", "paged", "quantized", "window"])
@pytest.mark.parametrize(
    "shapes",
    [
        ((1, 4, 8), (0, 2, 8), (0, 2, 8)),
        ((1, 4, 4), (1, 2, 8), (1, 2, 8)),
        ((1, 4, 8), (1, 1, 8), (1, 1, 8)),
        ((0, 4, 8), (0, 2, 8), (0, 2, 8)),
        ((1, 4, 8), (1, 2, 8), None),
    ],
)
def test_what_does_not_fit_is_refused_in_every_layer_before_a_loop_reads_it(kind, layer, shapes):
    """Loops in C++ are handed where q, k, v lie, and would read beyond what is too small."""
    config = tiny_config(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, sliding_window=16)
    kv = make_kv(kind, config)
    right = [torch.ones(1, heads, 8) for heads in (4, 2, 2)]
    kv.begin(batch := Batch.of([[0]]))
    for before in range(layer):
        kv.attend(before, *right, batch)
    with pytest.raises(WorkbenchError, match="this KV cache takes q"):
        kv.attend(layer, *(None if shape is None else torch.ones(shape) for shape in shapes), batch)
    assert kv.lengths.get(0, 0) == 0
    kv.begin(batch := Batch.of([[0]]))
    assert all(kv.attend(index, *right, batch).isfinite().all() for index in range(2))
