"""Lab 01: what its experiments and panels claim; what is special to each is held in tests/kits."""

from __future__ import annotations

import pytest
from experiment_claims import ExperimentClaims, brief_runs
from panel_claims import PanelClaims

from workbench.experiments import list_experiments

SMALL = {
    "naive.decoder": {"text": "import os\n"},
    "naive.step_time": {"max_length": 32, "points": 2, "repeats": 1},
    "naive.request": {"max_new_tokens": 4},
    "naive.strategies": {"new_tokens": 3, "continuations": 1},
}
MOVED = {
    "decoder": {"head": 2},
    "step_time": {"max_length": 64},
    "request": {"max_new_tokens": 8},
    "strategies": {"shown_tokens": 5},
}


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model


@pytest.fixture(scope="module")
def runs(model):
    return brief_runs(SMALL, model)


class TestExperiments(ExperimentClaims):
    lab, small = 1, SMALL

    def test_these_are_all(self):
        assert set(SMALL) == {e.name for e in list_experiments(lab=1)}


class TestPanels(PanelClaims):
    small, moved = SMALL, MOVED
