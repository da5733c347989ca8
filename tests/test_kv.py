"""The contract of `Recompute`, the kv that remembers nothing and refuses to pretend otherwise."""

from __future__ import annotations

import pytest
import torch
from conftest import random_decoder, tiny_config

from workbench.errors import WorkbenchError
from workbench.kv import KINDS, KV, Recompute, make_kv
from workbench.models.batch import Batch


@pytest.fixture
def kv() -> Recompute:
    return Recompute(tiny_config())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_the_whole_contract(kind):
    assert isinstance(make_kv(kind, tiny_config()), KV)


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
