"""The shipped draft heads as data: shape, data order, optimizer and schedule of each. `head_training` runs a recipe."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from workbench.models.config import ModelConfig
from workbench.models.heads import MedusaConfig
from workbench.models.recipes import Recipe


@dataclass(frozen=True)
class HeadRecipe(Recipe):
    """A training run of heads. `config` is theirs; `sequence_length` is that of the target's rows."""

    config: Any  # ModelConfig or MedusaConfig
    kind: str = "medusa"
    target: str = "stdlib-10m"
    text_share: float = 0.0  # of the token that came in the distribution that is learned; the rest is the target's
    unrolled: int = 1  # EAGLE: steps from its own guesses, each with a loss
    hidden_state_loss: float = 0.0  # EAGLE: weight of the smooth L1 of the hidden state itself
    hidden_state_noise: float = 0.0  # EAGLE: uniform noise, ±, on the hidden states it reads (arXiv 2401.15077)
    cycles: tuple[int, ...] = ()  # steps of each, where the schedule is gone through more than once

    def __post_init__(self) -> None:
        assert sum(self.cycles) == self.steps or not self.cycles, f"{self.cycles} are not {self.steps} steps"

    def learning_rate(self, step: int) -> float:
        """As a recipe's; the next cycle begins anew from the weights of the last (warm restart, arXiv 1608.03983)."""
        for steps in self.cycles:
            if step < steps:
                return dataclasses.replace(self, steps=steps, cycles=()).learning_rate(step)
            step -= steps
        return super().learning_rate(step)


_EAGLE_LAYER = ModelConfig(
    family="llama",
    vocab_size=4096,
    hidden_size=384,
    num_layers=1,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=704,
    context_length=1024,
    tie_embeddings=True,
    bos_token_id=0,
    eos_token_ids=(0,),
)

HEAD_RECIPES: dict[str, HeadRecipe] = {
    recipe.name: recipe
    for recipe in (
        HeadRecipe(
            "stdlib-10m-medusa",
            "heads",
            MedusaConfig(hidden_size=384, vocab_size=4096, num_heads=4),
            steps=750,
            sequences_per_step=2,
            peak_learning_rate=6e-3,
            warmup_steps=15,
            kind="medusa",
        ),
        HeadRecipe(
            "stdlib-10m-eagle",
            "heads",
            _EAGLE_LAYER,
            steps=1300,
            cycles=(750, 550),
            sequences_per_step=2,
            peak_learning_rate=1e-2,
            warmup_steps=15,
            kind="eagle",
            unrolled=2,
            hidden_state_loss=1.0,
            hidden_state_noise=0.1,
        ),
    )
}
