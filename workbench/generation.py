"""The public `generate` and `stream`: settings checked, then the naive loop, or rounds of speculation, or a grammar."""

from __future__ import annotations

import inspect
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from workbench.decoding.device_sampling import SAMPLERS
from workbench.decoding.filters import check_filter_names, checked_bias, whole_number
from workbench.decoding.greedy import GreedyRunner
from workbench.decoding.guide import Guide, GuidedSequence
from workbench.decoding.loop import Generation, Runner, Stream, check_cancel, token_loop
from workbench.decoding.request_checks import (
    check_callable,
    check_model,
    check_of_draft,
    check_of_guide,
    check_seed,
    check_vocabulary,
)
from workbench.decoding.runner import ModelRunner, prompt_token_ids, ready_kv, stop_ids, stop_strings
from workbench.decoding.sampling import SamplingSettings, TokenDistribution, draws_for
from workbench.decoding.sequence import Sequence as DecodedSequence
from workbench.decoding.step import Step
from workbench.decoding.text import GeneratedText
from workbench.errors import WorkbenchError, check_settings, shown
from workbench.kv import KV, caching_kind
from workbench.models.fast import FastDecoder, Model
from workbench.speculation.drafts import Draft, draft_for
from workbench.speculation.engine import MAX_NODES, Drafting, Speculator
from workbench.speculation.lengths import LengthPolicy, check_fits_context, length_policy
from workbench.speculation.runner import SpeculativeRunner


def stream(
    model: Model,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = (),
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] | None = None,
    seed: int | None = None,
    kv: str | Callable[..., KV] | KV | None = None,
    draft: str | Draft | Model | None = None,
    draft_length: int | str | LengthPolicy | None = None,
    guide: Guide | None = None,
    jump: str | None = None,
    filters: Mapping[str, Callable[..., torch.Tensor]] | None = None,
    loop: Callable[..., Iterator[int]] = token_loop,
    cancel: threading.Event | None = None,
    **others,
) -> Stream:
    """Continue a prompt, token by token. The settings are checked here; the model runs as the stream is read.

    prompt: text (the model must have a tokenizer) or token ids.
    temperature 0 is greedy; see SamplingSettings for it and the seven filters after it.
    stop: one string or several; generation ends when one appears in the new text, and the text ends before it.
    stop_token_ids: tokens that end it; None means the model's own end-of-text tokens, () none.
    seed: of this request's own random numbers (torch's global ones are never touched); None draws a fresh one.
    kv: a kind ("recompute", "contiguous", …), a class or function that takes the ModelConfig, or a ready kv. None is
    "recompute", the naive way; with a draft or a grammar "contiguous", or "state" for a model with state layers.
    draft: who guesses ahead: a smaller model, a Draft, or the name of one (`workbench.speculation.DRAFTS`). The
    distribution of what is generated stays the model's. draft_length: how many tokens, K (default 4), "threshold",
    "dynamic" (by counted acceptance and measured costs; switched off where it would lose) or a LengthPolicy.
    guide: a grammar that the text keeps to (`workbench.decoding.Guide`). jump: where it leaves one continuation only,
    that is appended without asking the model: "tokens" (default) where just one token is legal, "text" where just one
    text is (another distribution, see Guide), "never".
    filters: your own functions for named filters (see filter_stages). loop: your own token_loop.
    cancel: once set, no further token is begun.
    Raises WorkbenchError for settings out of range or without effect (draft_length without a draft), and for prompt +
    max_new_tokens beyond the context length.
    """
    started = time.perf_counter()
    check_settings("generate", others, SETTINGS)
    check_model("generate", model)
    check_of_draft(draft, draft_length)
    check_of_guide(guide, jump)
    check_callable("loop", loop)
    check_cancel(cancel)
    filters = {} if filters is None else filters
    settings = SamplingSettings(
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        checked_bias(logit_bias),
    )
    check_vocabulary("logit_bias", dict(settings.logit_bias), model)
    whole_number("max_new_tokens", max_new_tokens, at_least=1)
    prompt_ids = prompt_token_ids(model, prompt, max_new_tokens)
    stop_token_ids = stop_ids(model, stop_token_ids)
    text = GeneratedText(model.tokenizer, prompt_ids, stop_strings(model, stop))
    check_seed(seed)
    _check_replacements(filters, settings)
    make_sampler = SAMPLERS[getattr(model, "kernels", "torch")]
    runner: Runner
    if draft is None and guide is None:
        distribution = TokenDistribution(settings, prompt_ids, replace=filters)
        sampler = make_sampler(distribution, draws_for(settings, seed))
        ready = ready_kv("recompute" if kv is None else kv, model, 1, len(prompt_ids) + max_new_tokens)
        greedily = loop is token_loop and distribution.is_argmax
        if greedily and isinstance(model, FastDecoder) and model.may_step(ready):
            runner = greedy = GreedyRunner(model, ready)
            tokens = greedy.tokens(prompt_ids, sampler.choose, max_new_tokens, stop_token_ids)
        else:
            runner = plain = ModelRunner(model, ready)
            tokens = loop(plain.forward, list(prompt_ids), sampler.choose, max_new_tokens, stop_token_ids)
        if not isinstance(tokens, Iterator):
            runner.release()  # it may have run to its end already
            raise WorkbenchError(
                f"loop must return an iterator of token ids, got {type(tokens).__name__}; write it with yield, "
                "so that each token can be shown and timed when it comes"
            )
    else:
        if loop is not token_loop:
            raise WorkbenchError("loop is your own token_loop, and a draft or a guide has another; give one of them")
        state = None
        if guide is not None:
            state = GuidedSequence(guide, model, jump)
            stop_token_ids = (*stop_token_ids, *state.end_token_ids)
        chosen_draft = None if draft is None else draft_for(draft, model)
        lengths = length_policy(4 if draft_length is None else draft_length)
        if chosen_draft is not None:
            check_fits_context(lengths, model.config.context_length, model.name)
        sequence = DecodedSequence(
            id=f"request-{secrets.token_hex(4)}",  # one draft may serve several requests and caches
            token_ids=list(prompt_ids),
            prompt_tokens=len(prompt_ids),
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
            sampler=make_sampler(
                TokenDistribution(settings, prompt_ids, replace=filters, guide=state), draws_for(settings, seed)
            ),
            guide=state,
            drafting=Drafting(lengths),
        )
        room = min(model.config.context_length, len(prompt_ids) + max_new_tokens + MAX_NODES)
        step = Step(model, ready_kv(caching_kind(model.config) if kv is None else kv, model, 1, room))
        runner = rounds = SpeculativeRunner(Speculator(step, chosen_draft), sequence)
        tokens = rounds.tokens()
    return Stream(
        runner,
        tokens,
        text,
        prompt_tokens=len(prompt_ids),
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        cancel=cancel,
        started=started,
    )


SETTINGS = [name for name in inspect.signature(stream).parameters if name not in ("model", "prompt", "others")]


def generate(model: Model, prompt: str | Sequence[int], **settings) -> Generation:
    """Continue a prompt to its end, with the settings of `stream`, and give the whole result.

    >>> generate(model, "def read_lines(path):", max_new_tokens=64, temperature=0.8, top_p=0.95, seed=0).text
    """
    tokens = stream(model, prompt, **settings)
    for _ in tokens:
        pass
    return tokens.result()


vars(generate)["__signature__"] = inspect.signature(stream).replace(return_annotation="Generation")  # for help and tab


def _check_replacements(replace: Mapping[str, object], settings: SamplingSettings) -> None:
    """Raise for a name that is no filter, and when the settings would call none of the replacements."""
    if not isinstance(replace, Mapping) or not all(callable(function) for function in replace.values()):
        raise WorkbenchError(f"filters takes functions by the name of the filter to replace, got {shown(replace)}")
    check_filter_names(replace)
    called = [name for name in settings.active() if not (name == "temperature" and settings.greedy)]
    if replace and not set(replace) & set(called):
        raise WorkbenchError(
            f"filters replaces {', '.join(replace)}, but with these settings none of them would be called; "
            f"active: {', '.join(called) or 'none (temperature 0 is greedy)'}. Set values at which they act"
        )
