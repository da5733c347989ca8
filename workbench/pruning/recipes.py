"""The pruned models of the course as data: what is cut out of which parent, and how it is healed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from workbench.errors import WorkbenchError, check_above, check_between, check_whole, is_number, unknown
from workbench.models.config import ModelConfig
from workbench.models.recipes import RECIPES, Recipe
from workbench.pruning.losses import OBJECTIVES

PARENT = "stdlib-10m"
SCORES = ("importance", "magnitude", "random")


@dataclass(frozen=True)
class HealingRecipe(Recipe):
    """A cut and the training after it. `config` is the smaller shape; which parts stay is decided by `scores`.

    scores None: the same shape from nothing, the baseline. objective: see `losses`; its teacher is the parent.
    """

    parent: str = PARENT
    scores: str | None = "importance"
    objective: str = "kl"
    temperature: float = 1.0
    top_k: int | None = None
    hidden_weight: float = 0.0  # of matching the last hidden states, beside the objective
    held_out_every: int = 100  # steps between two points of the curve

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise unknown("objective", self.objective, OBJECTIVES)
        if self.scores is not None and self.scores not in SCORES:
            raise unknown("scores", self.scores, SCORES)
        check_above("temperature", self.temperature, 0)
        if not is_number(self.hidden_weight) or self.hidden_weight < 0:
            raise WorkbenchError(f"hidden_weight must be a number of at least 0, got {self.hidden_weight!r}")
        if self.hidden_weight and self.scores is None:
            raise WorkbenchError("hidden_weight goes with a model that was cut from its teacher")
        if self.top_k is not None:
            check_whole("top_k", self.top_k, 1)
            check_between("top_k", self.top_k, 1, self.config.vocab_size)
        check_whole("held_out_every", self.held_out_every, 1)

    @property
    def needs_teacher(self) -> bool:
        return self.objective != "cross_entropy" or self.hidden_weight > 0


def smaller(
    layers: int | None = None, channels: int | None = None, neurons: int | None = None, parent: str = PARENT
) -> ModelConfig:
    """The parent's shape with so many of each."""
    config = RECIPES[parent].config
    return dataclasses.replace(
        config,
        num_layers=layers or config.num_layers,
        hidden_size=channels or config.hidden_size,
        intermediate_size=neurons or config.intermediate_size,
    )


_WIDTH = smaller(channels=288, neurons=480)  # 5,441,184 parameters, half of the parent's
_DEPTH = smaller(layers=3, neurons=768)  # 5,409,408
_DRAFT = smaller(layers=2, channels=192, neurons=256)  # 1,475,520


def _healed(
    name: str, config: ModelConfig, steps: int, role: str = "pruned", *, peak_learning_rate: float = 1.5e-3, **how: Any
) -> HealingRecipe:
    """Steps of two rows, and a lower rate than from nothing: what the weights know is to be kept."""
    how |= {"sequences_per_step": 2, "peak_learning_rate": peak_learning_rate, "warmup_steps": 20}
    return HealingRecipe(name, role, config, steps, **how)


HEALING_RECIPES: dict[str, HealingRecipe] = {
    recipe.name: recipe
    for recipe in (
        _healed("stdlib-5m-width", _WIDTH, 600),
        _healed("stdlib-5m-depth", _DEPTH, 600),
        _healed("stdlib-1m-pruned", _DRAFT, 6000, "pruned draft", peak_learning_rate=2.5e-3),
        _healed("stdlib-5m-width-text", _WIDTH, 600, objective="cross_entropy"),
        _healed("stdlib-5m-width-random", _WIDTH, 600, scores="random"),
        # the same teacher and tokens without a cut: what the cut brings, and what the teacher
        _healed("stdlib-5m-nothing-taught", _WIDTH, 600, "from nothing", scores=None, peak_learning_rate=2.5e-3),
        _healed("stdlib-1m-nothing-taught", _DRAFT, 6000, "from nothing", scores=None, peak_learning_rate=2.5e-3),
        HealingRecipe(
            "stdlib-5m-nothing",
            "from nothing",
            _WIDTH,
            steps=3000,
            sequences_per_step=2,
            peak_learning_rate=2.5e-3,
            scores=None,
            objective="cross_entropy",
        ),
    )
}
_BESIDE = ("5m-width-text", "5m-width-random", "5m-nothing", "5m-nothing-taught", "1m-nothing-taught")
NOT_SHIPPED = frozenset(f"stdlib-{name}" for name in _BESIDE)
