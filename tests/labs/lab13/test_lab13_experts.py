"""Lab 13, experts: what a batch reads is counted, and a step is timed beside its dense twin."""

from __future__ import annotations

import dataclasses

import pytest
from conftest import random_decoder, tiny_config
from experiment_claims import DataSheetBench, ExperimentClaims, brief_runs
from panel_claims import PanelClaims

from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.instruments.costs import decode_costs, weights_read
from workbench.labs.lab13_parallelism_and_experts import experts
from workbench.models.checkpoints import shipped_tokenizer
from workbench.models.config import ExpertsShape
from workbench.models.experts import expected_different
from workbench.panels.plots import matching

SMALL = {"parallel.experts": {"largest": 4, "cached": 16, "repeats": 1}}


@pytest.fixture(scope="module")
def model():
    dense = tiny_config(vocab_size=4096, hidden_size=32, num_layers=3, intermediate_size=32)
    mixture = dataclasses.replace(dense, experts=ExpertsShape(8, 2, 0, 16, 0))
    made = [random_decoder(one, seed=3, tokenizer=shipped_tokenizer()) for one in (mixture, dense)]
    return {"model": made[0], "twin": made[1]}


@pytest.fixture(scope="module")
def runs(model):
    return brief_runs(SMALL, model)


class TestExperiments(ExperimentClaims):
    lab, small = 13, SMALL


class TestPanels(PanelClaims):
    small, moved = SMALL, {"experts": {"cached": 32}}


def test_experts_are_counted_in_each_layer_and_bytes_follow_from_them(model, runs):
    made, config = runs["parallel.experts"], model["model"].config
    for m in matching(made, measured="different"):
        batch = m.settings["batch"]
        assert len(m.samples) == 3 and all(2 <= count <= min(8, 2 * batch) for count in m.samples)
        assert m.counts["mean"] == pytest.approx(sum(m.samples) / 3)
        assert m.predicted == pytest.approx(expected_different(8, 2, batch))
        assert m.counts["weights_read"] == weights_read(config, batch, batch, different_experts=m.counts["mean"])
        [step] = matching(made, measured="step", which="mixture", batch=batch)
        costs = decode_costs(
            config,
            batch=batch,
            context=16,
            weight_bytes_per_element=4,
            kv_bytes_per_element=4,
            different_experts=m.counts["mean"],
        )
        assert step.counts["launches"] == costs.launches and step.counts["weights"] == costs.bytes_by_part["weights"]
    for m in matching(made, measured="load"):
        assert sum(m.samples) == pytest.approx(1) and m.counts["highest"] == max(m.samples)


def test_rows_come_from_different_places_of_the_text(model):
    rows = experts.rows_for(model["model"].config, 8, 17)
    assert rows.shape == (8, 17) and len({tuple(row) for row in rows.tolist()}) == 8


def test_a_dense_model_in_the_mixtures_place_is_refused(model):
    with pytest.raises(WorkbenchError, match="has no experts; take a model that has"):
        run_experiment("parallel.experts", {"model": model["twin"], "twin": model["twin"]}, DataSheetBench())
