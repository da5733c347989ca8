"""What the experiments of lab 07 share: drafts by name, and a request that is written under the eyes of the bench."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.decoding.loop import Generation
from workbench.errors import unknown
from workbench.experiments.contract import Setting
from workbench.experiments.texts import PROMPT_SETS
from workbench.generation import stream
from workbench.models.fast import Model
from workbench.speculation import DRAFTS, Draft, LengthPolicy, ModelDraft, draft_for
from workbench.speculation.drafts import (
    EagleDraft,
    MedusaDraft,
    NGramDraft,
    PromptLookupDraft,
    StagedDraft,
    quantized_self,
)
from workbench.speculation.drafts.first_of import FirstOf

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench

SMALL_MODEL, STAGED, IN_TURN, SELF = "model", "staged", "lookup, else model", "self-int4"
NAMES = (SMALL_MODEL, *DRAFTS, STAGED, IN_TURN)
LENGTHS = ("2", "4", "8", "threshold", "dynamic")

DRAFTER = Setting("drafter", SMALL_MODEL, "choice", choices=NAMES, help="who guesses; model: the one named by draft")
KIND = Setting("texts", "code", "choice", choices=tuple(PROMPT_SETS), help="kind of held-out text to go on from")


def make_draft(bench: Bench, name: str, model: str | Model, small: str | Model, **how: Any) -> Draft:
    """A fresh draft by one of NAMES. how: of its class, such as branching or nodes."""
    if name not in NAMES:
        raise unknown("draft", name, NAMES)
    if name == SELF:  # made from the weights as they were loaded; a prepared model has packed them
        return quantized_self(bench.model(model, arrangement="plain"), **how)
    target = bench.model(model, arrangement="fast")
    if name == SMALL_MODEL:
        return ModelDraft(bench.model(small, arrangement="fast"), **how)
    if name == STAGED:
        return StagedDraft(bench.model(small, arrangement="fast"), PromptLookupDraft(target), **how)
    if name == IN_TURN:
        return FirstOf(PromptLookupDraft(target), ModelDraft(bench.model(small, arrangement="fast")), **how)
    if not how:
        return draft_for(name, target)
    makers: dict[str, Callable[..., Draft]] = {
        "eagle": EagleDraft,
        "medusa": MedusaDraft,
        "ngram": NGramDraft.of_training_modules,
    }
    if name not in makers:
        raise unknown("draft with a tree of its own", name, makers)
    return makers[name](target, **how)


def length_of(words: str) -> int | str:
    """One of LENGTHS as `generate` takes it."""
    return int(words) if words.isdigit() else words


def write(
    bench: Bench,
    target: Model,
    prompt: list[int],
    *,
    new_tokens: int,
    draft: Draft | None = None,
    draft_length: int | str | LengthPolicy = 4,
    temperature: float = 0.0,
    seed: int = 0,
) -> Generation:
    """`generate` with a contiguous cache and no end but its length, that can be stopped after each token."""
    with_draft: dict[str, Any] = {} if draft is None else {"draft": draft, "draft_length": draft_length}
    tokens = stream(
        target,
        prompt,
        max_new_tokens=new_tokens,
        stop_token_ids=(),
        kv="contiguous",
        temperature=temperature,
        seed=seed if temperature else None,
        **with_draft,
    )
    for _ in tokens:
        bench.check_stop()
    return tokens.result()
