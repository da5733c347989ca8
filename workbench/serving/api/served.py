"""What a server serves: the model, its name for clients, its chat template, grammars and step-time model."""

from __future__ import annotations

import functools
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import workbench
from workbench.errors import WorkbenchError
from workbench.models.fast import Model
from workbench.models.tokenizer import Tokenizer
from workbench.serving.api.errors import ApiError
from workbench.serving.api.guides import Guides
from workbench.serving.api.settings import ServerSettings
from workbench.serving.api.template import ChatTemplate
from workbench.serving.step_time import StepShape

MAX_NAME_CHARACTERS = 200


@dataclass(frozen=True)
class Served:
    """What a request is read by. name: of the model, for clients. context: tokens that a text holds at most."""

    name: str
    tokenizer: Tokenizer | None
    vocab_size: int
    context: int
    eos_token_ids: tuple[int, ...]
    template: ChatTemplate
    guides: Guides
    settings: ServerSettings
    max_running: int
    fingerprint: str = ""
    counted_s: Callable[[StepShape], float] | None = None  # seconds of a step by the cost model
    created: int = field(default_factory=lambda: int(time.time()))

    @functools.cached_property
    def longest_token(self) -> float:
        """Characters that one token of a text can stand for; infinity where the tokenizer changes a text before."""
        tokenizer = self.text_tokens()
        backend = tokenizer.backend
        added = backend.get_added_tokens_decoder().values()
        if backend.normalizer is not None or any(one.lstrip or one.rstrip for one in added):
            return math.inf
        return max(map(len, backend.get_vocab()), default=1)

    def text_tokens(self) -> Tokenizer:
        """The tokenizer, for what cannot go without one."""
        if self.tokenizer is None:
            raise ApiError(f"model {self.name!r} has no tokenizer: send token ids, and take none of its text")
        return self.tokenizer

    def check_name(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise ApiError(
                f"the model {name[:80]!r} does not exist; this server has {self.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )


@dataclass(frozen=True)
class ModelFacts:
    """What a server knows of a model that may be loaded in another process. made_of: all that its answers depend on."""

    name: str
    vocab_size: int
    context: int
    eos_token_ids: tuple[int, ...]
    made_of: str

    @classmethod
    def of(cls, model: Model) -> ModelFacts:
        config = model.config
        made_of = f"{model.name} {config} {model.dtype}"
        return cls(model.name, config.vocab_size, config.context_length, config.eos_token_ids, made_of)


def serve_model(
    facts: ModelFacts,
    tokenizer: Tokenizer | None,
    settings: ServerSettings,
    max_running: int,
    *,
    name: str | None = None,
    template: ChatTemplate | None = None,
    counted_s: Callable[[StepShape], float] | None = None,
) -> Served:
    """name: for clients, default the model's own. Raises WorkbenchError for a name that no client could send."""
    name = facts.name if name is None else name
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise WorkbenchError(f"the name of a served model must be 1 to {MAX_NAME_CHARACTERS} letters, got {name!r:.80}")
    made_of = f"{workbench.__version__} {facts.made_of} {max_running}"
    return Served(
        name=name,
        tokenizer=tokenizer,
        vocab_size=facts.vocab_size,
        context=facts.context,
        eos_token_ids=facts.eos_token_ids,
        template=template or ChatTemplate(),
        guides=Guides(tokenizer, facts.vocab_size),
        settings=settings,
        max_running=max_running,
        fingerprint="fp_" + hashlib.sha256(made_of.encode()).hexdigest()[:12],
        counted_s=counted_s,
    )
