"""Beam search: instead of one text, keep the num_beams most probable ones, and choose among them at the end.

It looks for the most probable continuation, which is not the most interesting one: in open-ended writing it
turns bland and repeats itself, in translation and other tasks with one right answer it still wins. Rules and
results are those of transformers' beam search.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workbench.decoding.filters import check_logits, finite_number, whole_number
from workbench.decoding.loop import Generation, check_cancel
from workbench.decoding.runner import ModelRunner, prompt_token_ids, ready_kv, stop_ids
from workbench.decoding.text import GeneratedText
from workbench.errors import WorkbenchError, shown
from workbench.kv import KV, make_kv
from workbench.models.batch import Batch
from workbench.models.fast import Model

ForwardMany = Callable[[list[list[int]]], torch.Tensor]


@dataclass(frozen=True)
class Hypothesis:
    """A continuation: new tokens (an end token included), and their total log-probability / length ** penalty."""

    tokens: list[int]
    score: float
    log_probs: list[float]  # of each token, under the model


@dataclass(frozen=True)
class Beam:
    """A continuation that is still growing. The log-probability of a text is the sum of its tokens'."""

    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()

    def extended(self, token_id: int, log_prob: float) -> Beam:
        return Beam((*self.tokens, token_id), (*self.log_probs, log_prob))

    def finished(self, length_penalty: float) -> Hypothesis:
        score = sum(self.log_probs) / len(self.tokens) ** length_penalty
        return Hypothesis(list(self.tokens), score, list(self.log_probs))


def beam_search(
    forward_many: ForwardMany,
    prompt_ids: Sequence[int],
    *,
    num_beams: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    eos_token_ids: Sequence[int] = (),
    num_return: int = 1,
) -> list[Hypothesis]:
    """The num_return best continuations found, best first.

    forward_many(texts) -> logits [B, V]: what comes next after each of B whole texts.
    length_penalty: scores are divided by length ** length_penalty. Log-probabilities are negative, so above 0
        longer texts gain, below 0 shorter ones; 0 compares plain probabilities.
    early_stopping: True ends as soon as num_beams texts have ended. False goes on while the best growing text,
        scored at its present length, beats the worst ended one. "never" scores it at the length that favours it.
    Raises WorkbenchError for settings out of range and for logits that are no distribution.
    """
    _check(num_beams, max_new_tokens, length_penalty, early_stopping, num_return)
    prompt_ids = list(prompt_ids)
    growing, ended = [Beam()], []
    for length in range(1, max_new_tokens + 1):
        logits = forward_many([prompt_ids + list(beam.tokens) for beam in growing])
        candidates = _best_extensions(growing, logits, count=max(2, 1 + len(eos_token_ids)) * num_beams)

        growing = []
        for rank, beam in enumerate(candidates):
            if beam.tokens[-1] in eos_token_ids or length == max_new_tokens:
                if rank < num_beams:  # a text that ends must be among the best, like one that grows on
                    ended.append(beam.finished(length_penalty))
            elif len(growing) < num_beams:
                growing.append(beam)
        ended = sorted(ended, key=lambda hypothesis: -hypothesis.score)[:num_beams]

        if not growing or (len(ended) == num_beams and early_stopping is True):
            break
        if len(ended) == num_beams:
            best_length = max_new_tokens if early_stopping == "never" and length_penalty > 0 else length
            if sum(growing[0].log_probs) / best_length**length_penalty <= ended[-1].score:
                break
    return ended[:num_return]


def _best_extensions(beams: Sequence[Beam], logits: torch.Tensor, count: int) -> list[Beam]:
    """The `count` most probable among all beams with one token more, best first.

    With E end tokens, (1 + E)·num_beams candidates leave num_beams that grow on, however many of them end.
    """
    check_logits(logits, "the model")
    log_probs = logits.double().log_softmax(dim=-1)  # [B, V]
    so_far = torch.tensor([sum(beam.log_probs) for beam in beams], dtype=torch.float64)
    totals = (so_far.to(log_probs.device)[:, None] + log_probs).flatten()  # [B · V]
    vocabulary = logits.shape[-1]
    places = totals.topk(min(count, totals.numel())).indices
    chosen = log_probs.flatten()[places].tolist()
    return [
        beams[place // vocabulary].extended(place % vocabulary, log_prob)
        for place, log_prob in zip(places.tolist(), chosen)
        if log_prob > -math.inf
    ]


def generate_beam(
    model: Model,
    prompt: str | Sequence[int],
    *,
    num_beams: int = 4,
    max_new_tokens: int = 64,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    stop_token_ids: Sequence[int] | None = None,
    num_return: int = 1,
    kv: str | Callable[..., KV] | KV = "recompute",
    search: Callable[..., list[Any]] = beam_search,
    cancel: threading.Event | None = None,
) -> list[Generation]:
    """Beam search on a model: the num_return best continuations as Generations with a `score`, best first.

    All beams go through the model as the sequences of one flat batch; rows, calls and times are those of the
    whole search. Nothing is certain before its end, so every token has the same time and tpot_s is None.
    search: your own beam_search, which may give (tokens, score) pairs; the model tells their log-probabilities.
    stop_token_ids: None means the model's own end-of-text tokens. Once `cancel` is set the search ends before
    its next step, with an empty list.
    """
    started = time.perf_counter()
    _check(num_beams, max_new_tokens, length_penalty, early_stopping, num_return)
    check_cancel(cancel)
    prompt_ids = prompt_token_ids(model, prompt, max_new_tokens)
    eos_token_ids = stop_ids(model, stop_token_ids)
    runner = ModelRunner(model, ready_kv(kv, model, 2 * num_beams, len(prompt_ids) + max_new_tokens))

    def forward_many(texts: list[list[int]]) -> torch.Tensor:
        if cancel is not None and cancel.is_set():
            raise _Cancelled
        return runner.forward_many(texts)

    settings: dict[str, Any] = {
        "num_beams": num_beams,
        "max_new_tokens": max_new_tokens,
        "length_penalty": length_penalty,
    }
    if search is beam_search:
        settings |= {"early_stopping": early_stopping, "num_return": num_return}
    elif early_stopping is not False:
        raise WorkbenchError("early_stopping is a setting of our own search; leave it out together with search=")
    try:
        found = search(forward_many, list(prompt_ids), eos_token_ids=eos_token_ids, **settings)
        seconds = runner.clock() - started
        if search is not beam_search:
            if not isinstance(found, list | tuple) or not found:
                raise WorkbenchError(
                    f"search must give a list of (tokens, score) pairs, best first; got {shown(found)}"
                )
            found = [_as_hypothesis(model, prompt_ids, item, max_new_tokens) for item in found[:num_return]]
    except _Cancelled:
        return []
    finally:
        runner.release()
    return [
        Generation(
            text=_text(model, prompt_ids, hypothesis.tokens, eos_token_ids),
            tokens=hypothesis.tokens,
            log_probs=hypothesis.log_probs,
            finish_reason="stop_token" if hypothesis.tokens[-1] in eos_token_ids else "length",
            prompt_tokens=len(prompt_ids),
            ttft_s=seconds,
            tpot_s=None,
            token_times_s=[seconds] * len(hypothesis.tokens),
            rows_processed=runner.rows_processed,
            model_calls=runner.model_calls,
            score=hypothesis.score,
        )
        for hypothesis in found
    ]


class _Cancelled(Exception):
    pass


@torch.no_grad()
def _as_hypothesis(model: Model, prompt_ids: list[int], item: Any, max_new_tokens: int) -> Hypothesis:
    """What a learner's search found, checked: a Hypothesis, or a (tokens, score) pair."""
    tokens, score = (item.tokens, item.score) if hasattr(item, "score") else _pair(item)
    if not 1 <= len(tokens) <= max_new_tokens:
        raise WorkbenchError(f"search gave a text of {len(tokens)} new tokens; expected 1 to {max_new_tokens}")
    for token_id in tokens:
        whole_number("each token that search gives", token_id, at_least=0)
        if token_id >= model.config.vocab_size:
            raise WorkbenchError(f"search gave token id {token_id}; ids lie in 0 … {model.config.vocab_size - 1}")
    batch = Batch.of([[*prompt_ids, *tokens[:-1]]], logits="all", device=model.device)
    rows = model(batch, make_kv("recompute", model.config))[len(prompt_ids) - 1 :].double().log_softmax(dim=-1)
    return Hypothesis(list(tokens), float(score), [rows[at, t].item() for at, t in enumerate(tokens)])


def _pair(item: Any) -> tuple[list[int], float]:
    try:
        tokens, score = item
        return list(tokens), float(score)
    except (TypeError, ValueError):
        raise WorkbenchError(f"search must give (tokens, score) pairs, best first; got {shown(item)}") from None


def _text(model: Model, prompt_ids: list[int], tokens: list[int], eos_token_ids: Sequence[int]) -> str:
    text = GeneratedText(model.tokenizer, prompt_ids, stop=())
    return "".join(text.add(t) for t in tokens if t not in eos_token_ids) + text.finish()


def _check(
    num_beams: int, max_new_tokens: int, length_penalty: float, early_stopping: bool | str, num_return: int
) -> None:
    whole_number("num_beams", num_beams, at_least=1)
    whole_number("max_new_tokens", max_new_tokens, at_least=1)
    whole_number("num_return", num_return, at_least=1)
    if num_return > num_beams:
        raise WorkbenchError(f"num_return {num_return} must be at most num_beams {num_beams}")
    finite_number("length_penalty", length_penalty, "a number from -10 to 10", lambda x: abs(x) <= 10)
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise WorkbenchError(f'early_stopping must be True, False or "never", got {early_stopping!r}')
