"""Token ids in, logits out: runs the model on tokens that are not in the kv yet, and counts them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set

import torch

from workbench.decoding.request_checks import check_fits_context, check_token_ids, check_vocabulary
from workbench.errors import WorkbenchError, shown
from workbench.kv import KV, kv_for
from workbench.models.batch import Batch
from workbench.models.fast import Model

_KV_MEMBERS = ("lengths", "begin", "attend", "truncate", "fork", "release", "bytes_in_use", "bytes_reserved")


class ModelRunner:
    """One request's use of a model and a kv. Owns the sequences it begins in the kv, until `release`.

    rows_processed and model_calls count exactly what went through the model.
    """

    def __init__(self, model: Model, kv: KV) -> None:
        self._model, self._kv = model, kv
        self._owned: set[int] = set()  # names of sequences to release
        self._by_text: dict[tuple[int, ...], int] = {}  # of forward_many: text -> name
        self._name: int | None = None  # of forward
        self._last_row: torch.Tensor | None = None
        self.vocab_size = model.config.vocab_size
        self.rows_processed = 0
        self.model_calls = 0

    def forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[1, V] logits of the token after these, which begin with those of the last call."""
        if self._name is None:
            [self._name] = self._new_names(1)
        logits = self._run([token_ids], [self._name])
        self._last_row = logits[-1]
        return logits

    def forward_many(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """[B, V] logits after each of B different sequences, in one flat batch.

        Each is one of the last call plus a token, or new; the kv forks what they share.
        Those of the last call that none of these continues are released.
        """
        keys = [tuple(text) for text in texts]
        children = dict(zip(keys, self._new_names(len(keys))))
        for key, name in children.items():
            if key[:-1] in self._by_text:
                self._kv.fork(self._by_text[key[:-1]], name)
        for name in self._by_text.values():
            self._kv.release(name)
            self._owned.discard(name)
        self._by_text = children
        return self._run(keys, list(children.values()))

    def log_prob(self, token_id: int) -> float:
        """Natural log of the token's probability by the last `forward`, under the model alone."""
        assert self._last_row is not None
        return self._last_row.log_softmax(dim=-1)[token_id].item()

    def origin(self) -> tuple[str, str]:
        """(origin, kind) of the last token: here always the model, one token per step."""
        return "target", "plain"

    def release(self) -> None:
        """Release every sequence that was begun here. May be called twice."""
        for name in self._owned & set(self._kv.lengths):
            self._kv.release(name)
        self._owned.clear()

    def stats(self) -> None:
        """None: statistics are of speculation."""
        return None

    def clock(self) -> float:
        """Seconds, when all work handed to the device so far is done."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()

    def _run(self, texts: Sequence[Sequence[int]], names: Sequence[Hashable]) -> torch.Tensor:
        known = [self._kv.lengths.get(name, 0) for name in names]
        for text, length in zip(texts, known):
            if len(text) <= length:
                raise WorkbenchError(
                    f"forward takes the whole text so far, with at least one new token: got {len(text)} tokens, "
                    f"of which the kv already remembers {length}"
                )
        batch = Batch.of(
            [text[length:] for text, length in zip(texts, known)],
            first_positions=known,
            sequences=names,
            device=self._model.device,
        )
        with torch.inference_mode():
            logits = self._model(batch, self._kv)
        self.rows_processed += batch.num_tokens
        self.model_calls += 1
        wide = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(wide, copy=True)  # a copy outside inference mode is an ordinary tensor, which may be changed

    def _new_names(self, count: int) -> list[int]:
        """Unused sequence names in the kv, which other requests may share; owned from now on."""
        taken = self._owned | set(self._kv.lengths)
        names = list(itertools.islice((n for n in itertools.count() if n not in taken), count))
        self._owned.update(names)
        return names


def ready_kv(kv: str | Callable[..., KV] | KV, model: Model, max_sequences: int, max_tokens: int) -> KV:
    """A kv to use: the ready one that was given, or a fresh one by kind, class or function."""
    room = {"max_sequences": max_sequences, "max_tokens": max_tokens}
    made = kv_for(kv, model, **room) if isinstance(kv, str) or callable(kv) else kv
    missing = [name for name in _KV_MEMBERS if not hasattr(made, name)]
    if missing:
        raise WorkbenchError(
            f"kv must be the name of a kind, a class or function that makes one, or a ready kv; "
            f"{type(made).__name__} has no {', '.join(missing)} (see workbench.kv.contract.KV)"
        )
    return made


def prompt_token_ids(model: Model, prompt: str | Sequence[int], max_new_tokens: int) -> list[int]:
    """The prompt as token ids, once it is certain that it and max_new_tokens fit in the model's context."""
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise WorkbenchError(f"model {model.name!r} has no tokenizer; give the prompt as a list of token ids")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise WorkbenchError(f"the prompt is no valid Unicode text: {error}") from error
        ids = model.tokenizer.encode_prompt(prompt)
    else:
        ids = prompt
    ids = check_token_ids("the prompt", ids, empty=False, expected="text or a list of token ids")
    check_vocabulary("the prompt", ids, model)
    check_fits_context("the prompt", len(ids), max_new_tokens, model.config.context_length, model.name)
    return list(ids)


def stop_strings(model: Model, stop: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(stop, Iterable) or isinstance(stop, bytes | Mapping | Set):
        raise WorkbenchError(f"stop takes a text or a list of texts, got {shown(stop)}")
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in stop:
        if not isinstance(string, str) or not string or any("\ud800" <= c <= "\udfff" for c in string):
            raise WorkbenchError(f"stop takes strings of valid Unicode, of at least one character, got {string!r}")
    if stop and model.tokenizer is None:
        raise WorkbenchError(
            f"model {model.name!r} has no tokenizer, so stop strings cannot be seen; use stop_token_ids"
        )
    return stop


def stop_ids(model: Model, stop_token_ids: Sequence[int] | None) -> tuple[int, ...]:
    if stop_token_ids is None:
        return model.config.eos_token_ids
    ids = check_token_ids("stop_token_ids", stop_token_ids)
    check_vocabulary("stop_token_ids", ids, model)
    return ids
