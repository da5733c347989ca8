"""Samplers: which masked tokens get their token in a pass, and which written ones are masked again.

One contract, `Sampler`, over n blocks of L positions at once: n = 1 while a canvas is written, many where a text is
scored (`scoring`). A sampler sees the model's distributions through two numbers a position, its confidence (the highest
probability) and its entropy, and never the tokens that will be drawn. So which tokens come together in a pass depends
on the tokens before alone, and the probability of a text under a sampler can be multiplied up exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from workbench.errors import WorkbenchError, check_between, check_whole, is_number, shown, unknown


@dataclass(frozen=True)
class View:
    """What a sampler sees of n blocks of L positions before the tokens of a pass are drawn."""

    number: int  # of this pass in its block, from 0
    masked: torch.Tensor  # [n, L] bool
    confidence: torch.Tensor  # [n, L] float: highest probability of each masked position; 0 elsewhere
    entropy: torch.Tensor  # [n, L] float: nats of each masked position; 0 elsewhere
    to_write: torch.Tensor  # [n] int64: positions that were masked when the block was begun
    # [n, L] float: probability that a token written in an earlier pass had when it was drawn; 2 where none was
    written: torch.Tensor
    generator: torch.Generator


class Sampler(ABC):
    """Chooses positions, pass by pass, until no position of a block is masked."""

    remasks = False  # whether `remask` ever chooses anything

    @abstractmethod
    def reveal(self, view: View) -> torch.Tensor:
        """[n, L] bool, of masked positions alone and at least one in each block that has any: they get a token now."""

    def remask(self, view: View) -> torch.Tensor:
        """[n, L] bool, of tokens written in earlier passes: they are masked again after this pass."""
        return torch.zeros_like(view.masked)

    @property
    @abstractmethod
    def words(self) -> str:
        """Its name and settings, for tables."""


def due(view: View, passes: int) -> torch.Tensor:
    """[n] how many tokens are to be written once this pass is done: evenly, all of them after `passes`.

    With fewer positions than passes there is one a pass, and the block is done sooner.
    """
    needed = view.to_write.clamp(min=1, max=min(passes, view.masked.shape[1]))
    number = needed.clamp(max=view.number + 1)
    return view.to_write * number // needed


def highest(score: torch.Tensor, allowed: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """[n, L] bool: of the allowed positions the `count` [n] of the highest score, the first of equal ones."""
    order = score.masked_fill(~allowed, float("-inf")).argsort(dim=1, descending=True, stable=True)
    chosen = torch.arange(score.shape[1], device=score.device) < count[:, None]
    return torch.zeros_like(allowed).scatter(1, order, chosen) & allowed


class Scheduled(Sampler):
    """A fixed number of passes a block, the same number of tokens in each (±1)."""

    def __init__(self, passes: int) -> None:
        check_whole("passes", passes, 1)
        self.passes = passes

    def reveal(self, view: View) -> torch.Tensor:
        missing = due(view, self.passes) - (view.to_write - view.masked.sum(dim=1))
        return highest(self.score(view), view.masked, missing)

    @abstractmethod
    def score(self, view: View) -> torch.Tensor:
        """[n, L]: the positions with the highest come first."""


class Uniform(Scheduled):
    """Positions by chance: the order that the objective trains (MDLM, arXiv 2406.07524)."""

    def score(self, view: View) -> torch.Tensor:
        return torch.rand(view.masked.shape, generator=view.generator).to(view.masked.device)

    @property
    def words(self) -> str:
        return f"uniform, {self.passes} passes"


class Confidence(Scheduled):
    """The positions that the model is surest of (MaskGIT, arXiv 2202.04200; LLaDA's low-confidence remasking,
    arXiv 2502.09992 §2.4).

    Surest is the highest probability of a position, whatever is drawn there. LLaDA draws first and compares what was
    drawn; at temperature 0 both are the same.
    """

    def score(self, view: View) -> torch.Tensor:
        return view.confidence

    @property
    def words(self) -> str:
        return f"confidence, {self.passes} passes"


class EntropyBound(Sampler):
    """As many as are almost independent (EB-Sampler, Ben-Hamu et al., arXiv 2505.24857, equation 8).

    Tokens of one pass are drawn each by itself. What that loses is their joint mutual information, and this is at most
    Σ H − max H. In the order of rising entropy the longest run of positions is taken that keeps this at most `bound`
    nats; one alone always does. So easy places are written many at once, and hard ones one by one.
    """

    def __init__(self, bound: float) -> None:
        if not is_number(bound) or bound < 0:
            raise WorkbenchError(f"the bound on entropy must be a number of nats from 0, got {shown(bound)}")
        self.bound = float(bound)

    def reveal(self, view: View) -> torch.Tensor:
        entropy = view.entropy.double().masked_fill(~view.masked, float("inf"))
        ordered, order = entropy.sort(dim=1, stable=True)
        finite = ordered.masked_fill(ordered.isinf(), 0)
        lost = finite.cumsum(dim=1) - finite  # ascending: the last of a run is its highest
        fits = (lost <= self.bound) & ~ordered.isinf()
        return torch.zeros_like(view.masked).scatter(1, order, fits.cumprod(dim=1).bool())

    @property
    def words(self) -> str:
        return f"entropy bound, {self.bound:g} nats"


class Remasking(Confidence):
    """Confidence, and second thoughts: after each pass but the last, the written tokens that were least likely when
    they were drawn are masked again, `share` of them, and as many more are revealed in their place (ReMDM, Wang et al.,
    arXiv 2503.00307 §4.1, remasking by confidence). The number of passes stays what it was."""

    remasks = True

    def __init__(self, passes: int, share: float = 0.25) -> None:
        super().__init__(passes)
        self.share = check_between("share", share, 0, 1)

    def reveal(self, view: View) -> torch.Tensor:
        missing = due(view, self.passes) - (view.to_write - view.masked.sum(dim=1)) + self._number(view)
        return highest(self.score(view), view.masked, missing)

    def remask(self, view: View) -> torch.Tensor:
        return highest(-view.written, view.written <= 1, self._number(view))

    def _number(self, view: View) -> torch.Tensor:
        """[n] tokens that are masked again in this pass: no more than can be revealed in their place."""
        goal = due(view, self.passes)
        written = view.to_write - view.masked.sum(dim=1)
        again = (written * self.share).long()
        spare = view.masked.sum(dim=1) - (goal - written)
        return torch.minimum(again, spare).masked_fill(goal == view.to_write, 0)

    @property
    def words(self) -> str:
        return f"remasking {self.share:.0%}, {self.passes} passes"


SAMPLERS = ("uniform", "confidence", "entropy-bound", "remasking")


def make_sampler(name: str, *, passes: int = 2, bound: float = 1.0, share: float = 0.25) -> Sampler:
    """A sampler by its name. passes: of each block (of the whole canvas where there is one block)."""
    makes = {
        "uniform": lambda: Uniform(passes),
        "confidence": lambda: Confidence(passes),
        "entropy-bound": lambda: EntropyBound(bound),
        "remasking": lambda: Remasking(passes, share),
    }
    if name not in makes:
        raise unknown("sampler", name, makes)
    return makes[name]()


def check_choice(sampler: Sampler, view: View, revealed: torch.Tensor, remasked: torch.Tensor) -> None:
    """Raises WorkbenchError where a sampler of one's own breaks the contract: it would never end, or lose text."""
    for name, chosen in (("reveal", revealed), ("remask", remasked)):
        if not isinstance(chosen, torch.Tensor) or chosen.shape != view.masked.shape or chosen.dtype != torch.bool:
            raise WorkbenchError(f"{type(sampler).__name__}.{name} must give a bool tensor {list(view.masked.shape)}")
    if bool((revealed & ~view.masked).any()):
        raise WorkbenchError(f"{type(sampler).__name__}.reveal chose a position that is not masked")
    if bool((remasked & (view.written > 1)).any()):
        raise WorkbenchError(
            f"{type(sampler).__name__}.remask chose a position that was not written in an earlier pass"
        )
    net = revealed.sum(dim=1) - remasked.sum(dim=1)
    if bool(((net < 1) & view.masked.any(dim=1)).any()):
        raise WorkbenchError(
            f"{type(sampler).__name__} must reveal more positions of an unfinished block than it masks again, "
            "or the block never ends"
        )
