"""The bytes of a stream: pieces of text as server-sent events, in OpenAI's chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from workbench.serving.api.answers import Answers
from workbench.serving.api.choices import Piece
from workbench.serving.api.errors import as_json

DONE, PING = b"data: [DONE]\n\n", b": ping\n\n"


class EventWriter(Protocol):
    """What the server asks of what writes its streams. Each call gives whole events."""

    def pieces(self, pieces: Sequence[Piece]) -> bytes:
        """What can be shown now; [] where nothing came for a while, which is a comment."""
        ...

    def end(self, usage: dict[str, Any]) -> bytes:
        """After the last piece of every choice."""
        ...

    def error(self, body: dict[str, Any]) -> bytes:
        """In place of the end, once something was sent. body: {"error": …}"""
        ...


class Events:
    """The `EventWriter` of one request. echo: the prompt before a choice's text, where it was asked for. usage: until
    now, for each chunk."""

    def __init__(
        self,
        answers: Answers,
        *,
        include_usage: bool = False,
        echo: Callable[[int], Piece] | None = None,
        usage: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._answers, self._include_usage, self._echo, self._usage = answers, include_usage, echo, usage
        self._begun: set[int] = set()

    def pieces(self, pieces: Sequence[Piece]) -> bytes:
        chunks = [chunk for piece in pieces for chunk in self._chunks(piece)]
        if self._usage is not None:
            usage = self._usage()
            chunks = [{**chunk, "usage": usage} for chunk in chunks]
        return b"".join(map(event, chunks)) if pieces else PING

    def _chunks(self, piece: Piece) -> list[dict[str, Any]]:
        chunks, answers = [], self._answers
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            if (first := answers.first(piece.index)) is not None:
                chunks.append(first)
            if self._echo is not None:
                chunks.append(answers.text(self._echo(piece.index)))
        if piece.text or piece.log_probs:
            chunks.append(answers.text(piece))
        if piece.finish_reason is not None:
            chunks.append(answers.end(piece.index, piece.finish_reason))
        return chunks

    def end(self, usage: dict[str, Any]) -> bytes:
        return (event(self._answers.usage(usage)) if self._include_usage else b"") + DONE

    def error(self, body: dict[str, Any]) -> bytes:
        return event(body)


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + as_json(value) + b"\n\n"
