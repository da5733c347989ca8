"""What the engines of a soak are made of: tiny models of every kind of attention, and every draft, wrong ones too."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import tokenizers
import torch

from workbench.decoding.guide import Guide
from workbench.models.config import LatentAttentionShape, ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.fast import Model, prepare
from workbench.models.heads import EagleHead, Heads, MedusaConfig, MedusaHeads
from workbench.models.state_shape import StateShape
from workbench.models.tokenizer import END_OF_TEXT, Tokenizer
from workbench.quantization import QuantizationRecipe
from workbench.speculation.drafts import (
    Ask,
    Draft,
    EagleDraft,
    FirstOf,
    LookaheadDraft,
    MedusaDraft,
    ModelDraft,
    NGramDraft,
    PhrasesDraft,
    PromptLookupDraft,
    StagedDraft,
    quantized_self,
)
from workbench.speculation.drafts.ngram_table import NGramTable
from workbench.speculation.proposal import Proposal

VOCABULARY, CONTEXT = 24, 40
SPOILED = VOCABULARY - 1  # of the model "spoiled": a token after which all logits are NaN
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "spoiled": {},
    "window": {"sliding_window": 6, "attention_sinks": 2},
    "latent": {
        "family": "deepseek_v3",
        "num_kv_heads": 4,
        "head_dim": 6,
        "latent_attention": LatentAttentionShape(None, 8, 2, 4, 4),
    },
    "state": {"num_layers": 2, "mixers": ("linear_attention",) * 2, "state_shape": StateShape(16, 4, 2)},
    "hybrid": {"num_layers": 2, "mixers": ("linear_attention", "attention"), "state_shape": StateShape(16, 4, 2)},
}
STATES = ("state", "hybrid")


TOKENS = (*"abcdefgh01,.()", "ab", "cd", "ef", "gh", "01", "a0", "abcd", "efgh", "x")  # of the ids from 1 on
PATTERNS = ("(ab|cd){2,6}e?f", r"[a-d]{1,3}\.\(,\)\.\([01]{2}", r"\([01](,[01]){1,8}\)", "[a-h01,.]*")


def tiny_tokenizer() -> Tokenizer:
    """Its end of text is 0, and the token SPOILED is in no text of the patterns."""
    merges = [(token[: len(token) // 2], token[len(token) // 2 :]) for token in TOKENS if len(token) > 1]
    names = {name: token_id for token_id, name in enumerate((END_OF_TEXT, *TOKENS))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(names, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True)])
    return Tokenizer(backend, end_of_text=0)


def tiny_model(seed: int, layers: int, kind: str = "plain") -> Decoder:
    """Random weights, large enough that the layers matter to the logits."""
    shape: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "intermediate_size": 32}
    shape |= {"family": "llama", "context_length": CONTEXT, "eos_token_ids": (0,)} | ATTENTION[kind]
    config = ModelConfig(**{"vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": layers} | shape)
    model = Decoder(config, name="tiny", tokenizer=tiny_tokenizer())
    _fill(model, seed)
    if kind == "spoiled":
        with torch.no_grad():
            model.embed.weight[SPOILED] = math.nan
    return model.double().eval().requires_grad_(False)


def _fill(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.4 * torch.randn(weight.shape, generator=generator) + (weight.dim() == 1))


@dataclass(frozen=True)
class Models:
    """What all runs share: a target of every kind, as it was loaded and (without states) prepared, and smaller models
    that draft."""

    targets: dict[str, Decoder] = field(default_factory=lambda: {kind: tiny_model(0, 2, kind) for kind in ATTENTION})
    small: Decoder = field(default_factory=lambda: tiny_model(1, 1))
    small_state: Decoder = field(default_factory=lambda: tiny_model(1, 2, "state"))
    table: NGramTable = field(
        default_factory=lambda: NGramTable.of([random.Random(0).choices(range(VOCABULARY), k=300)], VOCABULARY, order=3)
    )
    prepared: dict[str, Model] = field(init=False)

    @functools.cached_property
    def guides(self) -> tuple[Guide, ...]:
        """One for each of PATTERNS."""
        return tuple(Guide.regex(pattern, tiny_tokenizer()) for pattern in PATTERNS)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "prepared", {kind: prepare(target) for kind, target in self.targets.items() if kind not in STATES}
        )


def _heads(heads: Heads, seed: int) -> Any:
    _fill(heads, seed)
    return heads.double().eval().requires_grad_(False)


def _eagle(target: Decoder) -> Any:
    return _heads(EagleHead(dataclasses.replace(tiny_model(0, 1).config), target=target.name), 2)


def _medusa(target: Decoder) -> Any:
    return _heads(MedusaHeads(MedusaConfig(target.config.hidden_size, VOCABULARY, 3), target=target.name), 3)


DRAFTS: dict[str, Callable[[Models, Decoder], Draft]] = {
    "model": lambda models, target: ModelDraft(models.small),
    "state model": lambda models, target: ModelDraft(models.small_state),
    "the target itself": lambda models, target: ModelDraft(target),
    "model, tree": lambda models, target: ModelDraft(models.small, branching=(2, 2)),
    "prompt lookup": lambda models, target: PromptLookupDraft(target, min_ngram=1),
    "first of": lambda models, target: FirstOf(PromptLookupDraft(target), ModelDraft(models.small)),
    "n-grams": lambda models, target: NGramDraft(models.table),
    "n-grams, tree": lambda models, target: NGramDraft(models.table, branching=(2, 2), choose="drawn"),
    "phrases": lambda models, target: PhrasesDraft(target, {(t,): (t, t + 1, t) for t in range(VOCABULARY - 1)}),
    "lookahead": lambda models, target: LookaheadDraft(target, columns=3, gram=3),
    "staged": lambda models, target: StagedDraft(models.small, PromptLookupDraft(models.small, min_ngram=1)),
    "quantized self": lambda models, target: quantized_self(
        target if not target.config.mixers else models.small, QuantizationRecipe("rtn", 4, 8), fast=False
    ),
    "eagle": lambda models, target: EagleDraft(target, _eagle(target)),
    "eagle, tree": lambda models, target: EagleDraft(target, _eagle(target), branching=(2, 2)),
    "medusa": lambda models, target: MedusaDraft(target, _medusa(target), tree=[(0,), (1,), (0, 0), (0, 0, 0)]),
    "first of, with eagle": lambda models, target: FirstOf(
        PromptLookupDraft(target, min_ngram=4), EagleDraft(target, _eagle(target))
    ),
}


def texts_of(draft: Draft | None) -> list[Hashable]:
    """The sequences that a draft has cached, and those within it."""
    within = [*getattr(draft, "drafts", ()), *([draft.draft] if isinstance(draft, StagedDraft) else [])]
    own = list(getattr(getattr(draft, "_kv", None), "lengths", ()))
    return own + [name for one in within for name in texts_of(one)]


# -- wrong drafts ------------------------------------------------------------------------------------------------------


def _spoiled_rows(proposals: list[Proposal], value: float) -> list[Proposal]:
    return [
        dataclasses.replace(one, distributions=[torch.full_like(row, value) for row in one.distributions])
        for one in proposals
    ]


def no_ids(count: int) -> Any:
    return (1.5,) * count


WRONG_ANSWERS: dict[str, Callable[[list[Proposal]], Any]] = {
    "NaN": lambda proposals: _spoiled_rows(proposals, math.nan),
    "infinite": lambda proposals: _spoiled_rows(proposals, math.inf),
    "negative": lambda proposals: _spoiled_rows(proposals, -1.0),
    "of another width": lambda proposals: [
        dataclasses.replace(one, distributions=[torch.ones(3) / 3] * len(one)) for one in proposals
    ],
    "ids too large": lambda proposals: [dataclasses.replace(one, tokens=(10**6,) * len(one)) for one in proposals],
    "ids that are no ids": lambda proposals: [dataclasses.replace(one, tokens=no_ids(len(one))) for one in proposals],
    "one too many": lambda proposals: [*proposals, Proposal()],
    "none": lambda proposals: None,
    "text": lambda proposals: ["text"] * len(proposals),
    "without end": lambda proposals: cycle(proposals),
}


ROWS = ("NaN", "infinite", "negative", "of another width")  # greedy decoding reads none of them


WRONG_WAYS = (*WRONG_ANSWERS, "raises", "observe", "release")


class WrongDraft(Draft):
    """Answers as the draft within it does until it was asked `last` times, then in a wrong way, or raises.

    wrong: one of WRONG_WAYS; "observe" and "release" are methods that raise from then on.
    """

    def __init__(self, within: Draft, wrong: str, last: int) -> None:
        super().__init__()
        self.within, self.wrong, self.name = within, wrong, f"wrong ({wrong})"
        self._left = last
        self.wants_hidden_states = within.wants_hidden_states
        self.drafts = (within,)

    @property
    def was_wrong(self) -> bool:
        return self._left < 0

    def check_fits(self, target: Any) -> None:
        self.within.check_fits(target)

    def make_room(self, sequences: int) -> None:
        self.within.make_room(sequences)

    def propose(self, asks: Sequence[Ask]) -> Any:
        proposals = self.within.propose(asks)
        read = [one for ask, one in zip(asks, proposals) if not (self.wrong in ROWS and ask.distribution.greedy)]
        if self.wrong in ("observe", "release") or not any(map(len, read)):
            return proposals
        self._left -= 1
        if self._left >= 0:
            return proposals
        if self.wrong == "raises":
            raise RuntimeError("a draft that raises")
        return WRONG_ANSWERS[self.wrong](proposals)

    def observe(self, sequence: Hashable, proposal: Proposal, logits: torch.Tensor) -> None:
        self.within.observe(sequence, proposal, logits)
        self._count("observe")

    def release(self, sequence: Hashable) -> None:
        self.within.release(sequence)
        self._count("release")

    def _count(self, call: str) -> None:
        if self.wrong == call:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError(f"a draft that raises in {call}")
