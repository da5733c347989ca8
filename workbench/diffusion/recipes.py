"""The diffusion models of the course as data. `training` runs a recipe: `workbench train stdlib-3m-block-diffusion`.

Both go on from `stdlib-3m-mha`, their autoregressive twin, over the text that it would have seen next, in its order:
what a transformer knows of the text serves any order of writing it (DiffuLLaMA, Gong et al., arXiv 2410.17891; SDAR,
arXiv 2510.06303). One model has all block sizes: a step of blocks costs 2·S rows whatever their size, so three models
would cost three times the training, and what differs between sizes is one mask of attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.models.recipes import CACHE_VARIANTS, Recipe

TWIN = "stdlib-3m-mha"


@dataclass(frozen=True)
class DiffusionRecipe(Recipe):
    """A training run of a diffusion model. Step i has the text of step `first_step` + i of its sampler.

    The rows of a step are cut into texts of `text_length` tokens ("masked": of the block size), so that attention costs
    less; what `first_step` and the rows are stays as for the other models.
    """

    kind: str = "block"
    block_sizes: tuple[int, ...] = (4, 8, 16)  # step i trains on the (i mod n)-th of them; "masked": length of canvas
    text_length: int = 512
    start: str | None = None  # the autoregressive model whose weights it begins with; None: from nothing
    first_step: int = 0


DIFFUSION_RECIPES: dict[str, DiffusionRecipe] = {
    recipe.name: recipe
    for recipe in (
        DiffusionRecipe(
            "stdlib-3m-block-diffusion",
            "diffusion",
            CACHE_VARIANTS[TWIN],
            steps=1800,
            sequences_per_step=2,
            peak_learning_rate=2.5e-3,
            start=TWIN,
            first_step=900,
        ),
        DiffusionRecipe(
            "stdlib-3m-masked-diffusion",
            "diffusion",
            CACHE_VARIANTS[TWIN],
            steps=300,
            sequences_per_step=2,
            peak_learning_rate=2.5e-3,
            kind="masked",
            block_sizes=(1024, 512, 256, 128),
            start=TWIN,
            first_step=900,
        ),
    )
}
