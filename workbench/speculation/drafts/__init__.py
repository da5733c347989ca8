"""Ways to guess what comes next, one a file, all with the contract in `contract.py`."""

from __future__ import annotations

from collections.abc import Callable

from workbench.errors import WorkbenchError, unknown
from workbench.models.fast import Model
from workbench.speculation.drafts.contract import Ask, Draft
from workbench.speculation.drafts.eagle import EagleDraft
from workbench.speculation.drafts.first_of import FirstOf
from workbench.speculation.drafts.lookahead import LookaheadDraft
from workbench.speculation.drafts.lookup import PromptLookupDraft
from workbench.speculation.drafts.medusa import MedusaDraft
from workbench.speculation.drafts.model import ModelDraft
from workbench.speculation.drafts.ngram import NGramDraft
from workbench.speculation.drafts.phrases import PhrasesDraft
from workbench.speculation.drafts.quantized_self import quantized_self
from workbench.speculation.drafts.staged import StagedDraft

# name -> a fresh draft for this target, with default settings
DRAFTS: dict[str, Callable[[Model], Draft]] = {
    "eagle": EagleDraft,
    "medusa": MedusaDraft,
    "lookahead": LookaheadDraft,
    "ngram": NGramDraft.of_training_modules,
    "phrases": PhrasesDraft.of,
    "prompt_lookup": PromptLookupDraft,
    "self-int4": quantized_self,
}


def draft_for(given: object, target: Model) -> Draft:
    """A draft to use: one that is ready, a model, or one by name made for this target.

    Raises WorkbenchError for an unknown name, and for what is no draft.
    """
    if isinstance(given, Draft):
        return given
    if isinstance(given, Model):
        return ModelDraft(given)
    if isinstance(given, str):
        if given not in DRAFTS:
            raise unknown("draft", given, DRAFTS)
        return DRAFTS[given](target)
    raise WorkbenchError(
        f"draft takes a Draft, a model with the target's vocabulary, or one of {', '.join(map(repr, DRAFTS))}; "
        f"got {type(given).__name__}"
    )


__all__ = [
    "DRAFTS",
    "Ask",
    "Draft",
    "EagleDraft",
    "FirstOf",
    "LookaheadDraft",
    "MedusaDraft",
    "ModelDraft",
    "NGramDraft",
    "PhrasesDraft",
    "PromptLookupDraft",
    "StagedDraft",
    "draft_for",
    "quantized_self",
]
