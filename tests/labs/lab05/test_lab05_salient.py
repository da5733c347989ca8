"""Lab 05, salient channels: exactly so many columns are kept, they are the right ones, their bytes are counted, and the
planted model computes the same."""

from __future__ import annotations

import pytest
import torch
from conftest import random_decoder, tiny_config
from experiment_claims import ExperimentClaims, brief_runs
from panel_claims import PanelClaims

from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.labs.lab05_quantization.inputs import linears_of
from workbench.labs.lab05_quantization.outliers import ORIGINAL, PLANTED
from workbench.labs.lab05_quantization.salient import (
    ACTIVATION,
    RANDOM,
    SHARES,
    WAYS,
    WEIGHT,
    Salient,
    kept_bytes,
    mean_inputs,
    num_kept,
)
from workbench.models import corpus
from workbench.models.checkpoints import shipped_tokenizer
from workbench.models.corpus import held_out_files
from workbench.panels.plots import matching
from workbench.quantization import Calibration

NAME = "quantize.salient"
SMALL = {
    NAME: {
        "group": 8,
        "channels": 1,  # of 32, of which 3 % are one
        "factor": 64.0,
        "seeds": 2,
        "sequences": 2,
        "length": 16,
        "context": 32,
        "passages": 2,
    }
}


@pytest.fixture(scope="module", autouse=True)
def small_library():
    """Two training modules, so that nothing is tokenized for seconds; the held-out ones stay."""
    held_out = held_out_files()
    some = [corpus.SourceFile(f"{n}.py", f"def f{n}(x):\n    return x + {n}\n" * 60) for n in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "standard_library", lambda root=None: [*held_out, *some])
        yield


@pytest.fixture(scope="module")
def model():
    return random_decoder(tiny_config(), tokenizer=shipped_tokenizer())


@pytest.fixture(scope="module")
def runs(model):
    return brief_runs(SMALL, model)


@pytest.fixture(scope="module")
def salient(model):
    means = mean_inputs(model, Calibration.of(model.tokenizer, sequences=2, length=16))
    return Salient(model, means, bits=3, group=8)


class TestExperiments(ExperimentClaims):
    lab, small = 5, SMALL


class TestPanels(PanelClaims):
    small, moved = SMALL, {"salient": {"factor": 8.0}}


@pytest.mark.parametrize(
    ("channels", "share", "kept"), [(384, 0.001, 1), (384, 0.01, 4), (1024, 0.01, 10), (50, 1, 50)]
)
def test_the_nearest_number_of_channels_is_kept_and_at_least_one(channels, share, kept):
    assert num_kept(channels, share) == kept


@pytest.mark.parametrize("way", WAYS)
def test_kept_columns_are_whole_and_all_others_are_rounded(model, salient, way):
    chosen = salient.chosen(way, 0.03)
    new, rounded = linears_of(salient.keeping(chosen)), linears_of(salient.keeping({}))
    for name, linear in linears_of(model).items():
        at = chosen[name]
        assert len(at) == len(set(at.tolist())) == num_kept(linear.in_features, 0.03)
        others = [c for c in range(linear.in_features) if c not in at.tolist()]
        assert torch.equal(new[name].weight[:, at], linear.weight[:, at].half().float())
        assert torch.equal(new[name].weight[:, others], rounded[name].weight[:, others])
        assert not torch.equal(rounded[name].weight, linear.weight)


def test_the_largest_inputs_and_the_largest_columns_are_chosen(salient):
    for way, score in (
        (ACTIVATION, lambda name: salient.means[name]),
        (WEIGHT, lambda n: salient.weights[n].norm(dim=0)),
    ):
        for name, at in salient.chosen(way, 0.1).items():
            others = torch.ones(len(score(name)), dtype=torch.bool)
            others[at] = False
            assert score(name)[at].min() >= score(name)[others].max()


def test_random_channels_are_those_of_their_seed(salient):
    one, again, other = (salient.chosen(RANDOM, 0.1, seed) for seed in (0, 0, 1))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_the_mean_inputs_are_those_of_the_calibration(model):
    """Of the first linear: what the embedding becomes behind the first norm."""
    text = Calibration.of(model.tokenizer, sequences=2, length=16)
    x = model.layers[0].attention_norm(model.embed(text.rows.flatten()))
    assert torch.allclose(mean_inputs(model, text)["0.attention.q"], x.abs().mean(0), rtol=1e-4)


def test_bytes_are_the_codes_and_two_for_each_kept_weight_and_four_for_its_channel(salient):
    name, rounded = next(iter(salient.rounded.items()))
    assert kept_bytes(rounded, 3) == rounded.nbytes + 3 * (2 * rounded.out_features + 4)
    weights = sum(w.numel() for w in salient.weights.values())
    codes = salient.counts({})
    assert codes["kept_channels"] == 0 and codes["bits_per_weight"] == 3 + 32 / 8  # a scale and a zero for 8 weights
    chosen = salient.chosen(ACTIVATION, 0.03)
    more = sum(len(at) * (2 * salient.rounded[n].out_features + 4) for n, at in chosen.items())
    assert salient.counts(chosen)["linear_bytes"] == codes["linear_bytes"] + more
    assert salient.counts(chosen)["bits_per_weight"] == 8 * (codes["linear_bytes"] + more) / weights
    assert name in chosen


def test_both_models_are_measured_with_every_choice_and_random_ones_with_every_seed(runs):
    kept = matching(runs[NAME], measured="kept")
    assert len(kept) == 2 * len(WAYS) * len(SHARES)
    assert all(len(m.samples) == (2 if m.settings["way"] == RANDOM else 1) for m in kept)
    assert {m.settings["weights"] for m in kept} == {ORIGINAL, PLANTED}


def test_planted_channels_are_found_by_activation_and_not_by_weight(runs):
    """Inputs 64 times larger, columns as many times smaller: the first to be chosen by one, the last by the other."""
    kept = {
        (m.settings["weights"], m.settings["way"], m.settings["share"]): m for m in runs[NAME] if "way" in m.settings
    }
    assert kept[PLANTED, ACTIVATION, 0.03].counts["planted_kept"] == 1
    assert kept[PLANTED, WEIGHT, 0.03].counts["planted_kept"] == 0


def test_the_planted_model_computes_the_same_before_it_is_rounded(runs):
    one, other = matching(runs[NAME], measured="float32")
    assert one.median == pytest.approx(other.median, abs=1e-5) and "computes the same" in other.check


def test_more_planted_channels_than_there_are_is_refused(model):
    with pytest.raises(WorkbenchError, match="at most the 32"):
        run_experiment(NAME, {"model": model, **SMALL[NAME], "channels": 40})
