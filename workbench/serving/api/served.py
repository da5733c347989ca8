"""What a server serves: the model, its name for clients, its chat template, grammars and step-time model."""

from __future__ import annotations

import hashlib
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
    """The model that is served, under its name, and what turns texts into its tokens and back."""

    model: Model
    name: str
    template: ChatTemplate
    guides: Guides
    settings: ServerSettings
    max_running: int
    fingerprint: str = ""
    counted_s: Callable[[StepShape], float] | None = None  # seconds of a step by the cost model
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.model.tokenizer

    @property
    def context(self) -> int:
        return self.model.config.context_length

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


def serve_model(
    model: Model,
    name: str | None,
    settings: ServerSettings,
    max_running: int,
    *,
    template: ChatTemplate | None = None,
    counted_s: Callable[[StepShape], float] | None = None,
) -> Served:
    """name: default the model's own. Raises WorkbenchError for a name that no client could send."""
    name = model.name if name is None else name
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise WorkbenchError(f"the name of a served model must be 1 to {MAX_NAME_CHARACTERS} letters, got {name!r:.80}")
    made_of = f"{workbench.__version__} {model.name} {model.config} {model.dtype} {max_running}"
    return Served(
        model,
        name,
        template or ChatTemplate(),
        Guides(model.tokenizer, model.config.vocab_size),
        settings,
        max_running,
        "fp_" + hashlib.sha256(made_of.encode()).hexdigest()[:12],
        counted_s,
    )
