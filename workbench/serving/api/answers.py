"""The shapes of OpenAI's answers, whole and in chunks, from pieces of text.

completions   text_completion, in chunks and whole      logprobs: tokens, token_logprobs, top_logprobs, text_offset
chat          chat.completion.chunk, chat.completion    logprobs: content: token, logprob, bytes, top_logprobs
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from workbench.models.tokenizer import Tokenizer
from workbench.serving.api.choices import Piece, TokenLogProb
from workbench.serving.api.tokens import token_bytes, token_text

NEVER = -9999.0


class Answers:
    """The answers to one request: one id and one time of creation for all its chunks. null_usage: chunks have
    "usage": null, because one with the usage comes last."""

    def __init__(
        self,
        chat: bool,
        model: str,
        fingerprint: str,
        tokenizer: Tokenizer | None,
        *,
        log_probs: bool = False,
        null_usage: bool = False,
    ) -> None:
        self.chat, self._tokenizer, self._log_probs = chat, tokenizer, log_probs
        self.id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        self.head = {"id": self.id, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self._null_usage = {"usage": None} if null_usage else {}

    # -- a stream ------------------------------------------------------------------------------------------------------

    def first(self, index: int) -> dict[str, Any] | None:
        """Before a choice's first text: in a chat the role."""
        return self._chunk(index, {"role": "assistant", "content": "", "refusal": None}) if self.chat else None

    def text(self, piece: Piece) -> dict[str, Any]:
        """A piece of text, without its end."""
        return self._chunk(piece.index, {"content": piece.text} if self.chat else piece.text, piece.log_probs)

    def end(self, index: int, finish_reason: str) -> dict[str, Any]:
        return self._chunk(index, {} if self.chat else "", finish_reason=finish_reason)

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._kind(True), **self.head, "choices": [], "usage": usage}

    def _chunk(
        self,
        index: int,
        new: dict[str, Any] | str,
        log_probs: Sequence[TokenLogProb] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        shown = self._shown(log_probs) if self._log_probs and log_probs else None
        choice: dict[str, Any] = {"index": index, "delta" if self.chat else "text": new}
        choice |= {"logprobs": shown, "finish_reason": finish_reason}
        return {**self._kind(True), **self.head, "choices": [choice], **self._null_usage}

    # -- whole ---------------------------------------------------------------------------------------------------------

    def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        """pieces: one for each choice, with all its text."""
        choices = []
        for piece in pieces:
            choice: dict[str, Any] = {"index": piece.index}
            if self.chat:
                choice["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
            else:
                choice["text"] = piece.text
            choice["logprobs"] = self._shown(piece.log_probs) if self._log_probs else None
            choice["finish_reason"] = piece.finish_reason
            choices.append(choice)
        return {**self._kind(False), **self.head, "choices": choices, "usage": usage}

    def _kind(self, chunk: bool) -> dict[str, Any]:
        if not self.chat:
            return {"object": "text_completion"}
        return {"object": "chat.completion.chunk" if chunk else "chat.completion"}

    # -- log-probabilities ---------------------------------------------------------------------------------------------

    def _shown(self, log_probs: Sequence[TokenLogProb]) -> dict[str, Any]:
        if self.chat:
            content = []
            for one in log_probs:
                top = [self._one(token, log_prob) for token, log_prob in one.top]
                content.append({**self._one(one.token_id, one.log_prob or 0.0), "top_logprobs": top})
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._text(one.token_id) for one in log_probs],
            "token_logprobs": [None if one.log_prob is None else _finite(one.log_prob) for one in log_probs],
            "top_logprobs": [self._top(one) for one in log_probs],
            "text_offset": [one.offset for one in log_probs],
        }

    def _one(self, token_id: int, log_prob: float) -> dict[str, Any]:
        data = None if self._tokenizer is None else list(token_bytes(self._tokenizer, token_id))
        return {"token": self._text(token_id), "logprob": _finite(log_prob), "bytes": data}

    def _top(self, one: TokenLogProb) -> dict[str, float] | None:
        """The chosen token and the most probable ones, by their text. Two tokens of one text: the more probable."""
        if one.log_prob is None:
            return None
        by_text: dict[str, float] = {}
        for token, log_prob in (*one.top, (one.token_id, one.log_prob)):
            by_text.setdefault(self._text(token), _finite(log_prob))
        return by_text

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else token_text(self._tokenizer, token_id)


def _finite(log_prob: float) -> float:
    """JSON has no infinity; OpenAI writes −9999 for a token that cannot come."""
    return log_prob if log_prob > NEVER else NEVER  # NaN, too


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
