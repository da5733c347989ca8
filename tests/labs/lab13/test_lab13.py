"""Lab 13: what each experiment says follows from shapes, counts and times; panels show every state."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import random_decoder, tiny_config
from experiment_claims import DataSheetBench, ExperimentClaims, brief_runs, on_model
from panel_claims import PanelClaims

from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.labs.lab13_parallelism_and_experts import bubbles, messages, tensor_step
from workbench.labs.lab13_parallelism_and_experts.panels import messages as messages_panel
from workbench.models.checkpoints import shipped_tokenizer
from workbench.panels.plots import matching
from workbench.parallel import Layout, bubble
from workbench.parallel.alpha_beta import AlphaBeta
from workbench.parallel.costs import step_seconds

SMALL = {
    "parallel.messages": {"repeats": 2},
    "parallel.tensor_step": {"cached": 16, "steps": 2, "blocks": 2},
    "parallel.bubbles": {"sequences": 4, "repeats": 2, "kind": "decode"},
}
MOVED = {"messages": {"operation": "send"}, "tensor_step": {"until": 50}, "bubbles": {"groups": 7}}


@pytest.fixture(scope="module")
def model():
    config = tiny_config(vocab_size=4096, hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8)
    return {"model": random_decoder(config, seed=3, tokenizer=shipped_tokenizer())}


@pytest.fixture(scope="module")
def runs(model):
    return brief_runs(SMALL, model)


class TestExperiments(ExperimentClaims):
    lab, small = 13, SMALL


class TestPanels(PanelClaims):
    small, moved = SMALL, MOVED


def run(name: str, model: dict, **changes):
    return run_experiment(name, {**on_model(name, SMALL[name], model), **changes}, DataSheetBench())


def test_messages_are_predicted_by_the_line_of_their_own_means(runs):
    made = runs["parallel.messages"]
    assert len(made) == 2 * 2 * len(messages.SIZES)
    for m in made:
        link = AlphaBeta(
            m.counts["alpha_s"], m.counts["beta_s_per_byte"], "direct" if m.settings["backend"] == "shm" else "ring"
        )
        assert m.predicted == pytest.approx(link.predict(m.settings["operation"], m.settings["bytes"], 2))
        assert m.counts["mean_s"] == pytest.approx(sum(m.samples) / len(m.samples))


def test_a_slope_that_is_lost_in_the_spread_is_said_and_not_shown_as_infinite(runs):
    flat = [dataclasses.replace(m, counts={**m.counts, "beta_s_per_byte": 0.0}) for m in runs["parallel.messages"]]
    words = messages_panel._words(flat, flat)
    assert "β is lost in the spread" in words and "inf" not in words


def test_a_sum_that_is_wrong_is_not_timed():
    class Wrong:
        backend, index = "shm", 0

        def all_reduce(self, x):
            return x

    with pytest.raises(WorkbenchError, match=r"an all-reduce of 1 and 2 gave 1.0; nothing was timed"):
        messages.verify(Wrong())


def test_a_step_of_two_ranks_is_predicted_as_one_and_the_exchange(model, runs):
    made = runs["parallel.tensor_step"]
    layout = Layout.checked(model["model"].config, 2, 1)
    one = next(iter(matching(made, measured="step", way=tensor_step.ONE)))
    for backend in tensor_step.BACKENDS:
        [two] = matching(made, measured="step", way=backend)
        [trace] = matching(made, measured="trace", way=backend)
        assert two.predicted == pytest.approx(one.predicted + trace.predicted)
        assert trace.counts["all_reduce"] == 2 * layout.config.num_layers and trace.counts["gather"] == 1
        assert "8 all-reduces of 128 bytes per step, as the formula says" in two.check
    typical = tensor_step.predict_tensor_step(DataSheetBench().ceilings(), model=model["model"], cached=16)
    assert typical[1][1] - typical[0][1] == pytest.approx(step_seconds(layout, [(1, 1)], tensor_step.TYPICAL["shm"]))


def test_a_trace_has_both_ranks_of_one_step_and_nothing_beyond_it(runs):
    for trace in matching(runs["parallel.tensor_step"], measured="trace"):
        spans = trace.settings["spans"]
        [whole] = [end for _, operation, _, end in spans if operation == "step"]
        for rank in (0, 1):
            sums = [span for span in spans if span[0] == rank and span[1] == "all_reduce"]
            assert len(sums) == 8 and all(0 <= begin <= end <= whole * 1.5 for _, _, begin, end in sums)
        assert trace.median <= whole


def test_outputs_that_differ_are_not_timed(model, monkeypatch):
    monkeypatch.setattr(tensor_step, "APART", -1.0)
    with pytest.raises(WorkbenchError, match="of the largest off those of one process; nothing is said of its time"):
        run("parallel.tensor_step", model)
    threads = torch.get_num_threads()
    monkeypatch.setattr(bubbles, "APART", -1.0)
    with pytest.raises(WorkbenchError, match="logits of the pipeline are"):
        run("parallel.bubbles", model)
    assert torch.get_num_threads() == threads


def test_the_bubble_is_counted_as_the_formula_says(runs):
    made = runs["parallel.bubbles"]
    for m in matching(made, measured="idle"):
        assert m.median == pytest.approx(bubble(2, m.settings["groups"])) == m.predicted
    for m in matching(made, measured="step"):
        assert m.predicted == pytest.approx((m.settings["groups"] + 1) * m.counts["group_alone_s"] / 2)
    assert bubbles.groups_for(8) == [1, 2, 4, 8] and bubbles.groups_for(1) == [1]


def test_a_model_that_cannot_be_divided_is_refused_before_anything_starts(model):
    config = tiny_config(vocab_size=4096, num_layers=1, num_heads=3, num_kv_heads=3, head_dim=8)
    odd = {"model": random_decoder(config, tokenizer=shipped_tokenizer())}
    with pytest.raises(WorkbenchError, match="3 query heads, which 2 ranks cannot share equally"):
        run("parallel.tensor_step", odd)
    with pytest.raises(WorkbenchError, match="1 layers, too few for 2 stages"):
        run("parallel.bubbles", odd)
