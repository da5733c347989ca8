"""Lab 15: ratios of switches follow from counts of real runs; the panel shows every state."""

from __future__ import annotations

import pytest
from experiment_claims import ExperimentClaims, brief_runs
from panel_claims import PanelClaims

from workbench.capstone import TRACKS
from workbench.capstone.submission import SWITCHES as KEYS
from workbench.labs.lab15_capstone.panels import switches as switches_panel
from workbench.labs.lab15_capstone.switches import ALL, BASELINE, SWITCHES, variants
from workbench.panels.plots import matching

SMALL = {"capstone.switches": {"track": "memory", "requests": 8}}
MOVED = {"switches": {"track": "open"}}


@pytest.fixture(scope="module")
def model():
    return {}


@pytest.fixture(scope="module")
def runs(model):
    return brief_runs(SMALL, model)


class TestExperiments(ExperimentClaims):
    lab, small = 15, SMALL


class TestPanels(PanelClaims):
    small, moved = SMALL, MOVED


@pytest.mark.parametrize("name", TRACKS)
def test_each_switch_changes_the_baseline_and_all_together_are_all_of_them(name):
    made = variants(TRACKS[name])
    assert list(made) == [BASELINE, *SWITCHES[name], ALL]
    for one, changed in SWITCHES[name].items():
        assert made[one] != made[BASELINE] and set(changed) <= set(KEYS)
        assert {key: getattr(made[one], key) for key in changed} == changed
        assert all(getattr(made[ALL], key) == value for key, value in changed.items())


def test_the_prediction_of_all_together_is_the_product_of_the_single_ratios(runs):
    made = runs["capstone.switches"]
    for count in TRACKS["memory"].counts:
        product = 1.0
        for name in SWITCHES["memory"]:
            [one] = matching(made, variant=name, count=count)
            product *= one.median
            assert one.predicted is None
        [together] = matching(made, variant=ALL, count=count)
        assert together.predicted == pytest.approx(product)
        [base] = matching(made, variant=BASELINE, count=count)
        assert base.median == 1 and base.counts["served"] == 8


def test_the_words_name_the_switch_that_brings_the_highest_ratio_and_say_when_texts_are_missing(runs):
    made = runs["capstone.switches"]
    words = switches_panel._words(TRACKS["memory"], made)
    count = "tokens_per_s"
    best = max((m for m in made if m.settings["count"] == count and m.predicted is None), key=lambda m: m.median)
    assert f"most by “{best.settings['variant']}”, {best.median:.2f} ×" in words and "Served" not in words
    made[-1].counts["served"] -= 1
    try:
        assert "Served: 8 by baseline" in switches_panel._words(TRACKS["memory"], made)
    finally:
        made[-1].counts["served"] += 1
