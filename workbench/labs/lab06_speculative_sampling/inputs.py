"""What the experiments of speculation share: a pair of models, sets of held-out prompts, and a text that is written."""

from __future__ import annotations

from collections import abc
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from workbench.decoding.draws import BestDraws, RandomDraws
from workbench.decoding.sampling import Sampler, SamplingSettings, TokenDistribution
from workbench.decoding.sequence import Sequence
from workbench.decoding.step import Step
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Setting
from workbench.kv import kv_for
from workbench.models.fast import Model
from workbench.speculation import Drafting, Fixed, LengthPolicy, Speculator
from workbench.speculation.drafts.contract import check_vocabulary

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench


DRAFT = Setting(
    "draft", "stdlib-1m-pruned", "model", help="the smaller model that guesses; it needs the target's vocabulary"
)


def pair_of(bench: Bench, model: str | Model, draft: str | Model) -> tuple[Model, Model]:
    """(target, draft), arranged for inference. Raises WorkbenchError where token ids mean different things to them."""
    target, guesses = (bench.model(one, arrangement="fast") for one in (model, draft))
    check_vocabulary(target, guesses.name, guesses.config.vocab_size, guesses.tokenizer)
    return target, guesses


def distribution_for(
    prompt_ids: abc.Sequence[int], *, temperature: float, top_k: int | None = None, top_p: float = 1.0
) -> TokenDistribution:
    """One for target and draft: the same filters for both."""
    return TokenDistribution(SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p), prompt_ids)


def sequence_of(
    sequence_id: Hashable,
    prompt_ids: abc.Sequence[int],
    *,
    distribution: TokenDistribution,
    lengths: LengthPolicy | int,
    max_new_tokens: int,
    seed: int = 0,
) -> Sequence:
    """For `Speculator.run`, with random numbers of its own."""
    draws = BestDraws() if distribution.greedy else RandomDraws(torch.Generator().manual_seed(seed))
    return Sequence(
        sequence_id,
        list(prompt_ids),
        prompt_tokens=len(prompt_ids),
        max_new_tokens=max_new_tokens,
        sampler=Sampler(distribution, draws),
        drafting=Drafting(Fixed(lengths) if isinstance(lengths, int) else lengths),
    )


def speculator_for(target: Model, draft, *, texts: int, tokens: int, **how) -> Speculator:
    """With a contiguous cache that has room for so many texts of so many tokens, and K more for a proposal."""
    room = min(tokens + 32, target.config.context_length)
    if tokens > room:
        raise WorkbenchError(f"prompt and new tokens are {tokens:,} and {target.name} reads {room:,}; ask for fewer")
    step = Step(target, kv_for("contiguous", target, max_sequences=texts, max_tokens=room))
    return Speculator(step, draft, **how)
