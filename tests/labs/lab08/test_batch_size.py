"""Claims about serving.batch_size: all sequences decode in each timed step, in two ways that give the same tokens."""

from __future__ import annotations

import pytest
from conftest import random_decoder, tiny_config
from experiment_claims import DataSheetBench, ExperimentClaims, brief_runs

from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.labs.lab08_continuous_batching import batch_size
from workbench.models import prepare

SMALL = {"serving.batch_size": {"context": 8, "max_batch": 4, "repeats": 2}}


@pytest.fixture(scope="module")
def model():
    return prepare(random_decoder(tiny_config(context_length=128), name="tiny"))


@pytest.fixture(scope="module")
def runs(model):
    return brief_runs(SMALL, model)


class TestExperiments(ExperimentClaims):
    lab, small = 8, SMALL


def test_each_number_of_sequences_is_measured_in_both_ways_beside_its_prediction(runs):
    made = runs["serving.batch_size"]
    assert [m.settings["sequences"] for m in made] == [1, 1, 4, 4]
    assert [m.settings["attention"] for m in made][1::2] == ["sdpa", "sdpa"]
    for m in made:
        assert len(m.samples) == 2 and m.predicted > 0
        assert m.counts["tokens_per_s"] == pytest.approx(m.settings["sequences"] / m.median)
    assert batch_size.sizes(256) == [1, 4, 16, 32, 64, 128, 256]


def test_a_way_that_gives_other_tokens_is_refused(model, monkeypatch):
    decode = batch_size._decode

    def spoiled(engine, n):
        taken = decode(engine, n)
        if engine.kv.attention != "sdpa":
            engine.scheduler.running[0].token_ids[-1] += 1
        return taken

    monkeypatch.setattr(batch_size, "_decode", spoiled)
    monkeypatch.setattr(batch_size, "WAYS", ("eager", "sdpa"))
    with pytest.raises(WorkbenchError, match="1 of 1 sequences got other tokens by attention='eager'"):
        run_experiment("serving.batch_size", {"model": model, **SMALL["serving.batch_size"]}, DataSheetBench())
