"""pruning.cheaper: what a pruned and distilled model costs beside one trained from nothing, in tokens and in FLOPs.

Training costs 6 FLOPs per parameter and token, a forward 2 (Kaplan et al., arXiv 2001.08361). A token of distillation
is a token of the student's training and a forward of the teacher, so with N_s and N_t parameters

    FLOPs ratio = token ratio · 6·N_s / (6·N_s + 2·N_t)

and the parent has to exist: its own training is shared by all models that are made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from workbench.experiments.contract import Experiment, Setting, no_times

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

NAME = "pruning.cheaper"
TRAINED, FORWARD = 6, 2  # FLOPs per parameter and token
BILLION, TRILLION = 1e9, 1e12
WAYS = ("tokens", "FLOPs, teacher included", "FLOPs, parent included")


@dataclass(frozen=True)
class Family:
    """A parent, and a child that is pruned from it and distilled by it. Parameters and tokens are plain numbers."""

    parent: float
    child: float
    from_nothing_tokens: float  # of the child's size, trained from nothing
    distilled_tokens: float
    parent_tokens: float
    children: int = 1  # that share the parent's training

    def token_ratio(self) -> float:
        return self.from_nothing_tokens / self.distilled_tokens

    def distilled_flops(self) -> float:
        """Of the child's healing: its own training and the teacher's forwards."""
        return (TRAINED * self.child + FORWARD * self.parent) * self.distilled_tokens

    def from_nothing_flops(self) -> float:
        return TRAINED * self.child * self.from_nothing_tokens

    def flops_ratio(self) -> float:
        return self.from_nothing_flops() / self.distilled_flops()

    def ratio_with_parent(self) -> float:
        """Each child carries its part of the parent's training. Below 1 the parent took more than it saved."""
        share = TRAINED * self.parent * self.parent_tokens / self.children
        return self.from_nothing_flops() / (self.distilled_flops() + share)

    def ratio(self, way: str) -> float:
        return {WAYS[0]: self.token_ratio, WAYS[1]: self.flops_ratio, WAYS[2]: self.ratio_with_parent}[way]()


def family_ratio(parent: float, children: tuple[float, ...], tokens: float, distilled_tokens: float) -> float:
    """FLOPs of training all of a family from nothing, over those of training the parent and distilling the children."""
    alone = TRAINED * (parent + sum(children)) * tokens
    distilled = sum((TRAINED * child + FORWARD * parent) * distilled_tokens for child in children)
    return alone / (TRAINED * parent * tokens + distilled)


# -- what was published (Minitron, arXiv 2407.14679) -------------------------------------------------------------------

NEMOTRON = {"parent": 15 * BILLION, "distilled_tokens": 94 * BILLION, "parent_tokens": 8 * TRILLION}
PUBLISHED_TOKENS = 3.8 * TRILLION  # of a model of 8 B from nothing


@dataclass(frozen=True)
class Claim:
    """A published factor, what it is of, and the same computed here."""

    words: str
    published: str
    computed: float
    verdict: str


def claims() -> list[Claim]:
    """The published factors, each computed: in tokens right, in FLOPs something else."""
    eight, four = (
        Family(child=size * BILLION, from_nothing_tokens=PUBLISHED_TOKENS, children=2, **NEMOTRON) for size in (8, 4)
    )
    sizes = (8 * BILLION, 4 * BILLION)
    family = family_ratio(15 * BILLION, sizes, 8 * TRILLION, 94 * BILLION)
    return [
        Claim("up to 40 × fewer training tokens (3.8 T, 94 B)", "40 ×", eight.token_ratio(), "right, in tokens"),
        Claim(
            "8 B: the same in FLOPs, teacher's forwards included (24.6 from a rounded 40)",
            "40 × (as it is quoted)",
            eight.flops_ratio(),
            "wrong",
        ),
        Claim(
            "4 B: the same in FLOPs, teacher's forwards included (17.8 from a rounded 40)",
            "40 × (as it is quoted)",
            four.flops_ratio(),
            "wrong",
        ),
        *(
            Claim(
                f"8 B, with half of the parent's training, beside {tokens / TRILLION:g} T tokens from nothing",
                "not stated",
                ratio := replace(eight, from_nothing_tokens=tokens).ratio_with_parent(),
                "more FLOPs than the child alone" if ratio < 1 else "fewer FLOPs than the child alone",
            )
            for tokens in (PUBLISHED_TOKENS, NEMOTRON["parent_tokens"])
        ),
        Claim("training of 15, 8 and 4 B in all, 8 T tokens each", "1.8 ×", family, "right, rounded"),
    ]


def family_of(
    *,
    parent_billions: float,
    child_billions: float,
    from_nothing_billions: float,
    distilled_billions: float,
    parent_billions_of_tokens: float,
    children: int,
) -> Family:
    """Of the settings, which are in billions."""
    return Family(
        parent_billions * BILLION,
        child_billions * BILLION,
        from_nothing_billions * BILLION,
        distilled_billions * BILLION,
        parent_billions_of_tokens * BILLION,
        children,
    )


def run_cheaper(
    bench: Bench,
    *,
    parent_billions: float,
    child_billions: float,
    from_nothing_billions: float,
    distilled_billions: float,
    parent_billions_of_tokens: float,
    children: int,
) -> Iterator[Measurement]:
    """A Measurement (unit "x") for each way of counting, and one for each published factor."""
    settings: dict[str, Any] = {
        "parent_billions": parent_billions,
        "child_billions": child_billions,
        "from_nothing_billions": from_nothing_billions,
        "distilled_billions": distilled_billions,
        "parent_billions_of_tokens": parent_billions_of_tokens,
        "children": children,
    }
    family = family_of(**settings)
    for way in WAYS:
        bench.check_stop()
        yield bench.measurement(
            name=NAME,
            settings={**settings, "measured": way},
            samples=[family.ratio(way)],
            unit="x",
            counts={"from_nothing_flops": family.from_nothing_flops(), "distilled_flops": family.distilled_flops()},
            check="6 FLOPs per parameter and token trained, 2 per parameter and token of a forward",
        )
    for claim in claims():
        yield bench.measurement(
            name=NAME,
            settings={"measured": "claim", "claim": claim.words, "published": claim.published},
            samples=[claim.computed],
            unit="x",
            check=f"arXiv 2407.14679: {claim.verdict}",
        )


EXPERIMENT = Experiment(
    name=NAME,
    lab=12,
    question="Forty times fewer tokens: how many times cheaper is that?",
    how="by arithmetic: 6 FLOPs per parameter and token trained, 2 for the teacher's forward; nothing is timed",
    settings=(
        Setting("parent_billions", 15.0, "float", 0.5, 2000, unit="B", step=0.5, help="parameters of the parent"),
        Setting("child_billions", 8.0, "float", 0.5, 2000, unit="B", step=0.5, help="parameters of the child"),
        Setting(
            "from_nothing_billions",
            3800.0,
            "float",
            100,
            100_000,
            unit="B tokens",
            step=100,
            help="that a model of the child's size is trained on from nothing",
        ),
        Setting("distilled_billions", 94.0, "float", 1, 100_000, unit="B tokens", step=1, help="of healing"),
        Setting(
            "parent_billions_of_tokens", 8000.0, "float", 100, 100_000, unit="B tokens", step=100, help="of the parent"
        ),
        Setting("children", 2, "int", 1, 100, help="models made of the parent, which share its training"),
    ),
    run=run_cheaper,
    predict=no_times,
    record={"cpu": (), "cuda": ()},  # the same everywhere
)
