"""Diffusion-LM in small (Li et al., arXiv 2205.14217): Gaussian noise on embeddings instead of masks on tokens.

    words w → embed → x₀ → noise → x_t            training: guess x₀ from x_t and t
    words w ← round ← x₀ ← denoise ← x_T          sampling: from pure noise, T passes over all positions

**Embed** (§4.1): x₀ ~ N(EMB(w), σ₀² I). The embeddings are learned together with the denoiser; what keeps them from
falling together, so that guessing x₀ would be easy and useless, is that words must be read back: the loss has
−log p(w | x₀), a softmax over words at every position.
**Noise**: x_t = √ᾱ_t x₀ + √(1 − ᾱ_t) ε, with ᾱ_t = 1 − √(t/T + s) (appendix A): it rises fast at first, since a
little noise around an embedding changes no word.
**Denoise**: f(x_t, t) guesses x₀ itself and not the noise, so that every guess is close to a word (§4.2).
**Round** (§4.2): the guess is moved to the nearest embedding in each step, the *clamping trick*, which commits to words
early and keeps later steps from averaging two of them. At the end the nearest word is what is written.

A discrete token has no "slightly noisy" state: the embedding space is there to make one, and rounding is the price.
Masked diffusion (`objective`) does without either, and predicts better at equal size; this file is here to see how the
older way works. Its language is balanced brackets: by chance 1 string of 18 is a word, of what it writes about 7 in
10 are (5 to 6 in 10 without the clamping trick), every word among them. The denoiser limits that: with the true mean
of x₀ given x_t in its place, all are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from workbench.decoding.request_checks import check_seed
from workbench.errors import WorkbenchError, check_flag, check_whole

FIRST_NOISE = 1e-4  # s of the schedule, and σ₀²


def balanced(word: str) -> bool:
    """Whether brackets open before they close, and all close."""
    depth = 0
    for letter in word:
        depth += 1 if letter == "(" else -1
        if depth < 0:
            return False
    return depth == 0


def bracket_words(length: int) -> list[str]:
    """All balanced words of so many brackets: 14 of length 8 (the Catalan numbers), of 256 strings."""
    check_whole("length", length, 2)
    if length % 2 or length > 16:
        raise WorkbenchError(f"balanced brackets have an even length, here of at most 16; got {length}")
    return [word for letters in itertools.product("()", repeat=length) if balanced(word := "".join(letters))]


@dataclass(frozen=True)
class ToyShape:
    """Sizes of the toy."""

    length: int = 8  # positions of a word
    letters: str = "()"
    embedding_size: int = 4
    hidden_size: int = 128
    steps: int = 40  # T


class DiffusionLM(nn.Module):
    """Embeddings, and a denoiser that is two hidden layers over all positions at once."""

    kept: torch.Tensor  # [T+1] ᾱ_t, the share of the signal that is left

    def __init__(self, shape: ToyShape) -> None:
        super().__init__()
        self.shape = shape
        wide = shape.length * shape.embedding_size
        self.embed = nn.Embedding(len(shape.letters), shape.embedding_size)
        self.denoiser = nn.Sequential(
            nn.Linear(wide + 16, shape.hidden_size),
            nn.SiLU(),
            nn.Linear(shape.hidden_size, shape.hidden_size),
            nn.SiLU(),
            nn.Linear(shape.hidden_size, wide),
        )
        at = torch.arange(shape.steps + 1) / shape.steps
        self.register_buffer("kept", (1 - (at + FIRST_NOISE).sqrt()).clamp(min=0))

    def guess(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """f(x_t, t): [B, L, d] noisy, [B] steps -> [B, L, d], the x₀ that it came from."""
        angle = (step / self.shape.steps)[:, None] * math.pi * torch.arange(1, 9)  # t as 16 waves
        inputs = torch.cat((x.flatten(1), angle.sin(), angle.cos()), dim=1)
        return self.denoiser(inputs).view_as(x)

    def word_logits(self, x: torch.Tensor) -> torch.Tensor:
        """[B, L, d] -> [B, L, V]: −½ of the squared distance to each embedding, up to what all words share."""
        table = self.embed.weight
        return x @ table.T - table.square().sum(dim=-1) / 2

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """[B, L] ids of the nearest embeddings."""
        return self.word_logits(x).argmax(dim=-1)

    def noised(self, start: torch.Tensor, step: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """x_t of x₀ [B, L, d] at steps [B]."""
        kept = self.kept[step][:, None, None]
        return kept.sqrt() * start + (1 - kept).sqrt() * torch.randn(start.shape, generator=generator)

    def loss(self, words: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Of words [B, L]: |f(x_t, t) − x₀|², and the nats of reading the words back (equation 2, simplified)."""
        clean = self.embed(words)
        start = clean + FIRST_NOISE**0.5 * torch.randn(clean.shape, generator=generator)
        step = torch.randint(1, self.shape.steps + 1, (len(words),), generator=generator)
        guess = self.guess(self.noised(start, step, generator), step)
        # at t = 1 the aim is the embedding itself
        aim = torch.where((step == 1)[:, None, None], clean, start)
        denoising = (guess - aim).square().sum(dim=-1).mean()
        reading = F.cross_entropy(self.word_logits(start).flatten(0, 1), words.flatten())
        return denoising + reading

    @torch.no_grad()
    def write(
        self, count: int, *, seed: int = 0, clamp: bool = True, watch: Callable[[int, list[str]], None] | None = None
    ) -> list[str]:
        """`count` words from noise, T passes. clamp: the clamping trick.

        watch: called after each pass with t, T … 1, and what the guess at hand reads as.
        Each pass draws x_{t−1} from the Gaussian between x_t and the guess of x₀ (DDPM, arXiv 2006.11239, equation 7).
        """
        check_whole("count", count, 1)
        check_flag("clamp", clamp)
        check_seed(check_whole("seed", seed, 0))
        generator = torch.Generator().manual_seed(seed)
        shape = self.shape
        x = torch.randn(count, shape.length, shape.embedding_size, generator=generator)
        for number in range(shape.steps, 0, -1):
            start = self.guess(x, torch.full((count,), number))
            if clamp:
                # the nearest word's embedding
                start = self.embed(self.round(start))
            if watch is not None:
                watch(number, self.read(start))
            now, before = self.kept[number], self.kept[number - 1]
            step_kept = now / before  # α_t
            mean = before.sqrt() * (1 - step_kept) * start + step_kept.sqrt() * (1 - before) * x
            spread = ((1 - step_kept) * (1 - before) / (1 - now)).sqrt()
            x = mean / (1 - now) + spread * torch.randn(x.shape, generator=generator)
        return self.read(x)

    def read(self, x: torch.Tensor) -> list[str]:
        """The words [B] that [B, L, d] is rounded to."""
        return ["".join(self.shape.letters[i] for i in row) for row in self.round(x).tolist()]


def train_toy(
    words: list[str], shape: ToyShape | None = None, *, steps: int = 800, batch: int = 64, seed: int = 0
) -> DiffusionLM:
    """A DiffusionLM of these words of one length: a second or two on a CPU."""
    shape = shape or ToyShape()
    for word in words:
        if len(word) != shape.length or not set(word) <= set(shape.letters):
            raise WorkbenchError(f"a word has {shape.length} letters of {shape.letters!r}; got {word!r}")
    check_whole("steps", steps, 1)
    check_seed(check_whole("seed", seed, 0))
    data = torch.tensor([[shape.letters.index(letter) for letter in word] for word in words])
    generator = torch.Generator().manual_seed(seed)
    model = DiffusionLM(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            bound = 1.0 if parameter is model.embed.weight else parameter.shape[-1] ** -0.5
            parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / steps)
        some = data[torch.randint(len(data), (batch,), generator=generator)]
        optimizer.zero_grad(set_to_none=True)
        model.loss(some, generator).backward()
        optimizer.step()
    return model.eval().requires_grad_(False)
