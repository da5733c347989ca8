"""Claims about healing: what is learned, what it costs, and that an interruption changes nothing."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.models import training
from workbench.models.checkpoints import load
from workbench.models.decoder import Decoder
from workbench.models.training import TrainingAttention, initialize, rows_batch
from workbench.pruning import healing
from workbench.pruning.healing import flops_at, forward_flops, heal
from workbench.pruning.losses import distillation_loss, hidden_state_loss, objective_loss
from workbench.pruning.recipes import HEALING_RECIPES, HealingRecipe, smaller
from workbench.quantization.calibration import Calibration


def rows_of(seed: int, *shape: int) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestLosses:
    def test_a_token_that_the_teacher_never_predicts_and_no_rows_count_nothing(self):
        """As exercise 3 of lab 12 asks; it was nan."""
        student = torch.zeros(1, 3, requires_grad=True)
        loss = distillation_loss(student, torch.tensor([[0.0, 0.0, -torch.inf]]))
        assert float(loss.detach()) == pytest.approx(math.log(3 / 2), rel=1e-6)
        loss.backward()
        torch.testing.assert_close(student.grad, torch.tensor([[-1 / 6, -1 / 6, 1 / 3]]))
        assert float(distillation_loss(torch.zeros(0, 3), torch.zeros(0, 3))) == 0

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
    def test_kl_is_its_formula_and_so_is_its_gradient(self, temperature):
        student, teacher = rows_of(0, 5, 9).requires_grad_(True), rows_of(1, 5, 9)
        loss = distillation_loss(student, teacher, temperature=temperature)
        by_hand = 0.0
        p, q = (logits.detach().div(temperature).softmax(-1) for logits in (teacher, student))
        for row_p, row_q in zip(p.tolist(), q.tolist()):
            by_hand += sum(a * (math.log(a) - math.log(b)) for a, b in zip(row_p, row_q)) / 5
        assert float(loss) == pytest.approx(temperature**2 * by_hand, rel=1e-12)
        [gradient] = torch.autograd.grad(loss, student)
        torch.testing.assert_close(gradient, temperature * (q - p) / 5)

    def test_the_likeliest_tokens_alone_give_a_lower_bound_that_grows_to_the_whole(self):
        student, teacher = rows_of(0, 7, 12), rows_of(1, 7, 12)
        bounds = [float(distillation_loss(student, teacher, top_k=k)) for k in range(1, 13)]
        assert all(a <= b + 1e-12 for a, b in itertools.pairwise(bounds))
        assert bounds[-1] == pytest.approx(float(distillation_loss(student, teacher)), rel=1e-12)
        assert bounds[-1] > bounds[0] > 0

    def test_large_logits_stay_finite_and_equal_ones_cost_nothing(self):
        large = torch.tensor([[500.0, -500.0, 0.0]])
        assert float(distillation_loss(large, large)) == pytest.approx(0, abs=1e-6)
        assert float(distillation_loss(large, -large)) == pytest.approx(1000, rel=1e-6)

    def test_hidden_states_are_compared_in_the_channels_that_stayed(self):
        teacher, channels = rows_of(0, 6, 10), torch.tensor([1, 4, 7])
        assert float(hidden_state_loss(teacher[:, channels], teacher, channels)) == 0
        assert float(hidden_state_loss(torch.zeros(6, 3), teacher, channels)) == pytest.approx(1)

    def test_both_is_the_mean(self):
        student, teacher, tokens = rows_of(0, 5, 9), rows_of(1, 5, 9), torch.arange(5)
        kl, text, both = (
            float(objective_loss(one, student, teacher, tokens)) for one in ("kl", "cross_entropy", "both")
        )
        assert both == pytest.approx((kl + text) / 2)

    def test_what_makes_no_sense_is_refused(self):
        logits = rows_of(0, 2, 4)
        for change, words in (
            ({"temperature": 0}, "temperature"),
            ({"top_k": 0}, "top_k must be a whole number from 1 to 4"),
            ({"top_k": 5}, "from 1 to 4"),
        ):
            with pytest.raises(WorkbenchError, match=words):
                distillation_loss(logits, logits, **change)
        with pytest.raises(WorkbenchError, match=r"must both be \[N, V\]"):
            distillation_loss(logits, logits[:, :3])


# -- runs ------------------------------------------------------------------------------------------------------------

TINY = HealingRecipe(
    "tiny",
    "pruned",
    smaller(layers=1, channels=64, neurons=96, parent="stdlib-1m"),
    steps=6,
    sequences_per_step=2,
    sequence_length=32,
    warmup_steps=2,
    checkpoint_every=2,
    held_out_every=3,
    parent="stdlib-1m",
)


@pytest.fixture(scope="module")
def parent() -> Decoder:
    return load("stdlib-1m")


@pytest.fixture(autouse=True)
def little_text(monkeypatch, parent):
    """A corpus of three modules, and little of it held out."""
    few = training.training_files()[:3]
    monkeypatch.setattr(training, "training_files", lambda: few)
    held_out = training.held_out_files()[:1]
    monkeypatch.setattr(training, "held_out_files", lambda: held_out)
    monkeypatch.setattr(healing, "PASSAGES", 2)
    monkeypatch.setattr(healing, "PASSAGE", 32)


def run(out, parent, recipe: HealingRecipe = TINY, **settings) -> Decoder:
    calibration = Calibration.of(parent.tokenizer, sequences=2, length=32)
    return heal(
        recipe.name, out, recipe=recipe, parent=parent, calibration=calibration, report=lambda *_: None, **settings
    )


class TestRuns:
    @pytest.mark.parametrize("change", [{}, {"objective": "both", "hidden_weight": 0.1, "top_k": 50}])
    def test_an_interruption_changes_nothing(self, tmp_path, parent, change):
        recipe = dataclasses.replace(TINY, **change)
        before = {name: tensor.clone() for name, tensor in parent.state_dict().items()}
        whole = run(tmp_path / "whole", parent, recipe)
        run(tmp_path / "parts", parent, recipe, stop_at_step=3)
        assert not (tmp_path / "parts" / "model.safetensors").exists()
        parts = run(tmp_path / "parts", parent, recipe)
        for name, tensor in whole.state_dict().items():
            assert torch.equal(tensor, parts.state_dict()[name]), name
        assert all(torch.equal(before[name], tensor) for name, tensor in parent.state_dict().items())
        cards = [json.loads((tmp_path / f / "card.json").read_text()) for f in ("whole", "parts")]
        assert cards[0]["held_out_by_step"] == cards[1]["held_out_by_step"]
        steps, losses, flops = zip(*cards[0]["held_out_by_step"])
        assert steps == (0, 3, 6) and losses[-1] < losses[0] and flops[-1] == cards[0]["flops"]
        assert cards[0]["teacher"] == cards[0]["parent"] == "stdlib-1m" and len(cards[0]["kept_layers"]) == 1
        again = load(str(tmp_path / "whole"))
        assert again.config.num_parameters() == recipe.config.num_parameters()
        assert "trained on from a part of stdlib-1m" in (tmp_path / "whole" / "README.md").read_text()

    def test_the_baseline_begins_with_weights_of_its_own_and_asks_no_teacher(self, tmp_path, parent):
        recipe = dataclasses.replace(TINY, scores=None, objective="cross_entropy", steps=1)
        model = run(tmp_path, parent, recipe, stop_at_step=0)
        fresh = Decoder(recipe.config)
        initialize(fresh, recipe.seed)
        assert not (tmp_path / "plan.json").exists()
        run(tmp_path, parent, recipe)
        card = json.loads((tmp_path / "card.json").read_text())
        assert card["teacher"] is card["parent"] is card["kept_layers"] is None
        assert card["flops"] == 3 * forward_flops(recipe.config, 2, 32)
        assert all(torch.equal(tensor, fresh.state_dict()[name]) for name, tensor in model.state_dict().items())

    def test_what_does_not_fit_is_refused(self, tmp_path, parent):
        with pytest.raises(WorkbenchError, match="stdlib-6m-width"):
            heal("stdlib-6m-width", tmp_path)
        run(tmp_path / "one", parent, stop_at_step=2)
        with pytest.raises(WorkbenchError, match="run of another recipe"):
            run(tmp_path / "one", parent, dataclasses.replace(TINY, temperature=2.0))
        other = dataclasses.replace(TINY, config=dataclasses.replace(TINY.config, vocab_size=64))
        with pytest.raises(WorkbenchError, match="4,096 tokens and tiny 64"):
            run(tmp_path / "two", parent, other)
        assert not (tmp_path / "two").exists(), "what is refused leaves nothing"
        for change, words in (
            ({"objective": "mse"}, "mse"),
            ({"scores": "guess"}, "guess"),
            ({"temperature": 0.0}, "temperature"),
            ({"scores": None, "hidden_weight": 1.0}, "goes with a model that was cut"),
            ({"hidden_weight": math.nan}, "hidden_weight must be a number of at least 0, got nan"),
            ({"hidden_weight": -1.0}, "hidden_weight must be a number of at least 0"),
            ({"top_k": 0}, "top_k"),
            ({"top_k": 5000}, "top_k must be a number from 1 to 4096"),
            ({"held_out_every": 0}, "held_out_every"),
        ):
            with pytest.raises(WorkbenchError, match=words):
                dataclasses.replace(TINY, **change)

    def test_a_plan_of_another_run_is_not_taken_and_a_finished_model_not_overwritten(self, tmp_path, parent):
        """Plans were taken whoever had made them: a second seed then healed the first seed's cut."""
        run(tmp_path / "one", parent, stop_at_step=2)
        file = tmp_path / "one" / "plan.json"
        mine = file.read_text()
        for text, words in (
            ('{"layers": [9]', "plan.json is no plan"),
            ("[" * 100_000, "plan.json is no plan"),
            (mine.replace('"recipe": "', '"recipe": "0'), "made for another recipe"),
        ):
            file.write_text(text)
            with pytest.raises(WorkbenchError, match=words):
                run(tmp_path / "one", parent)
        file.write_text(mine)
        other = load("stdlib-1m")
        with torch.no_grad():
            other.norm.weight.mul_(1.01)
        with pytest.raises(WorkbenchError, match="made for another parent"):
            run(tmp_path / "one", other)
        (tmp_path / "two").mkdir()
        (tmp_path / "two" / "plan.json").write_text('{"left": "by a run that was killed before its first checkpoint"}')
        for folder in ("one", "two"):
            run(tmp_path / folder, parent)
        weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("one", "two")]
        assert weights[0] == weights[1]
        with pytest.raises(WorkbenchError, match=r"holds a finished model \(card.json, model.safetensors\)"):
            run(tmp_path / "one", parent, seed=1)
        assert (tmp_path / "one" / "model.safetensors").read_bytes() == weights[0]

    def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_checkpoint(self, tmp_path, parent, monkeypatch):
        run(tmp_path, parent, stop_at_step=2)
        monkeypatch.setattr(healing, "objective_loss", lambda *_, **__: torch.tensor(torch.nan, requires_grad=True))
        with pytest.raises(WorkbenchError, match="the loss became nan at step 2; the last checkpoint is in"):
            run(tmp_path, parent)
        assert (tmp_path / "state" / "progress.json").exists()

    def test_the_command_knows_the_recipes(self, tmp_path, capsys):
        assert main(["train", "stdlib-5m-widht"]) == 2
        assert "stdlib-5m-width" in capsys.readouterr().err
        assert main(["train", "stdlib-5m-width", "--compile", "--out", str(tmp_path)]) == 2
        assert "without torch.compile" in capsys.readouterr().err


class TestCosts:
    def test_a_forward_costs_what_torch_counts(self, parent):
        given = torch.zeros(2, 32, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            parent(rows_batch(given), TrainingAttention(parent.config))
        matrices = counter.get_total_flops()  # torch counts products alone, and attention as a whole rectangle
        assert matrices == pytest.approx(forward_flops(parent.config, 2, 32), rel=0.06)

    def test_teacher_and_scores_are_counted(self, parent):
        shape = 2, 32
        student, teacher = forward_flops(TINY.config, *shape), forward_flops(parent.config, *shape)
        assert flops_at(TINY, parent.config, 0) > 0  # the scores
        of_a_step = flops_at(TINY, parent.config, 1) - flops_at(TINY, parent.config, 0)
        assert of_a_step == pytest.approx(3 * student + teacher)
        alone = dataclasses.replace(TINY, objective="cross_entropy", scores="random")
        assert flops_at(alone, parent.config, 1) == 3 * student


def test_shapes_of_the_recipes():
    sizes = {name: recipe.config.num_parameters() for name, recipe in HEALING_RECIPES.items()}
    whole = load("stdlib-10m").config.num_parameters()
    assert 0.49 < sizes["stdlib-5m-width"] / whole < 0.5 and 0.49 < sizes["stdlib-5m-depth"] / whole < 0.5
    assert sizes["stdlib-1m-pruned"] <= 1_500_000
