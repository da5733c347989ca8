"""One streamed request to an OpenAI endpoint: what came when, and how it ended. No torch.

`Client.ask` never raises for what a server or a network does: every ending is an outcome with a reason
(`recording.OUTCOMES`). Nothing is retried and no redirect is followed; a Retry-After is recorded. Each request opens a
connection of its own, as a new user would; `connected_s` says how long that took, so it can be subtracted.

The clock is the event loop's (CLOCK_MONOTONIC); a time is taken right after the bytes were read, and kept in whole
microseconds.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from workbench.errors import WorkbenchError, check_above, is_whole, shown
from workbench.serving.bench.recording import Chunk, Planned, Result
from workbench.serving.bench.wire import EventStream, HttpAnswer, WireError

READ_BYTES = 2**20
BUFFER_BYTES = 4 * 2**20  # of the stream: reading pauses beyond twice that
MAX_ANSWER_BYTES = 64 * 2**20
MAX_ERROR_BYTES = 65_536
SHOWN_CHARACTERS = 200
REFUSALS = (429, 503)

Connect = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@dataclass(frozen=True)
class Target:
    """Where requests go. prefix: the path before /v1."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @classmethod
    def of(cls, url: str) -> Target:
        """Of http(s)://HOST[:PORT][/PATH], with or without /v1 at its end."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise WorkbenchError(f"URL must be http(s)://HOST[:PORT][/PATH], got {shown(url)} ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WorkbenchError(f"URL must be http(s)://HOST[:PORT][/PATH], got {shown(url)}")
        if parts.username is not None or parts.query or parts.fragment:
            raise WorkbenchError(f"URL takes no user, query or fragment, got {shown(url)}; a key: --api-key-file")
        if any(character.isspace() or not character.isprintable() for character in url):
            raise WorkbenchError(f"URL must be without blanks, got {shown(url)}")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        if not prefix.isascii():
            raise WorkbenchError(f"write the path of the URL in ASCII, with %XX for other characters, got {shown(url)}")
        target = cls(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), prefix)
        try:
            _ = target.authority
        except UnicodeError as error:
            raise WorkbenchError(f"{shown(parts.hostname)} can be no name of a host ({error})") from error
        return target

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host.encode("idna").decode("ascii")
        return f"{host}:{self.port}"


@dataclass
class _Progress:
    """What is known of a request so far; in the end it becomes a Result."""

    planned: Planned
    send_s: float
    waited_s: float
    connected_s: float | None = None
    headers_s: float | None = None
    status: int | None = None
    retry_after_s: float | None = None
    finish_reason: str | None = None
    done: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    chunks: list[Chunk] = field(default_factory=list)

    def result(self, outcome: str, reason: str, end_s: float) -> Result:
        return Result(
            index=self.planned.index,
            outcome=outcome,
            send_s=self.send_s,
            end_s=end_s,
            reason=reason,
            scheduled_s=self.planned.at_s,
            waited_s=self.waited_s,
            connected_s=self.connected_s,
            headers_s=self.headers_s,
            status=self.status,
            retry_after_s=self.retry_after_s,
            finish_reason=self.finish_reason,
            done=self.done,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            chunks=tuple(self.chunks),
        )


class _Ended(Exception):
    """The request has ended otherwise than well: an outcome and a reason."""


class Client:
    """Requests to one endpoint. connect: like `asyncio.open_connection`. zero_s: on the loop's clock, set by who runs
    a schedule; all times of results are from there."""

    def __init__(
        self,
        target: Target,
        *,
        chat: bool = False,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 10.0,
        connect: Connect = asyncio.open_connection,
    ) -> None:
        self.target, self.chat, self.zero_s = target, chat, 0.0
        self.timeout_s = check_above("timeout_s", timeout_s, 0)
        self.connect_timeout_s = check_above("connect_timeout_s", connect_timeout_s, 0)
        if api_key is not None and (not api_key.isascii() or not api_key.isprintable() or " " in api_key):
            raise WorkbenchError("an API key is one word of printable ASCII characters; look at the file of the key")
        self._api_key, self._connect = api_key, connect
        self._address: str | None = None  # of the first connection: the name is looked up once, not for each request
        self._ssl = ssl.create_default_context() if target.scheme == "https" else None

    @property
    def endpoint(self) -> str:
        return "chat" if self.chat else "completions"

    def now_s(self) -> float:
        return max(0.0, round(asyncio.get_running_loop().time() - self.zero_s, 6))

    async def ask(
        self, planned: Planned, body: bytes, *, waited_s: float = 0.0, keep: Callable[[Result], None] | None = None
    ) -> Result:
        """Send it now and read the answer to its end. keep: gets the result also where this task is cancelled."""
        progress = _Progress(planned, self.now_s(), waited_s)
        try:
            try:
                async with asyncio.timeout(self.timeout_s):
                    outcome, reason = await self._exchange(progress, body)
            except _Ended as ended:
                outcome, reason = ended.args
            except WireError as error:
                outcome, reason = "broken", str(error)
            except TimeoutError as error:
                outcome = "timeout"
                reason = str(error) or f"no end after {self.timeout_s:g} s; {len(progress.chunks)} chunks had come"
            except OSError as error:
                outcome = "connection" if progress.headers_s is None else "broken"
                reason = f"{type(error).__name__}: {error.strerror or error}"
        except asyncio.CancelledError:
            if keep is not None:
                keep(progress.result("cancelled", "", self.now_s()))
            raise
        result = progress.result(outcome, reason, self.now_s())
        if keep is not None:
            keep(result)
        return result

    async def get_json(self, path: str) -> Any:
        """The JSON at a path, such as /v1/models. Raises WorkbenchError where there is none."""
        progress = _Progress(Planned(0, None, 1, 1), self.now_s(), 0.0)
        where = f"{self.target.url}{path}"
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                answer = HttpAnswer()
                body = bytearray()
                async with aclosing(self._answer(progress, "GET", path, b"", answer)) as pieces:
                    async for _, data in pieces:
                        body += data
                        if len(body) > MAX_ANSWER_BYTES:
                            raise WireError("it does not end")
        except (OSError, WireError) as error:
            raise WorkbenchError(f"{where} gives no answer: {str(error) or type(error).__name__}") from error
        if answer.status != 200:
            raise WorkbenchError(f"{where} answers with status {answer.status}: {_in_words(bytes(body))}")
        try:
            return json.loads(body)
        except ValueError as error:
            raise WorkbenchError(f"{where} answers with what is not JSON: {_in_words(bytes(body))}") from error

    async def _exchange(self, progress: _Progress, body: bytes) -> tuple[str, str]:
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        answer, events, size, error_body = HttpAnswer(), EventStream(), 0, bytearray()
        async with aclosing(self._answer(progress, "POST", path, body, answer)) as pieces:
            async for at_s, data in pieces:
                if not _is_stream(answer):
                    error_body += data
                    if len(error_body) > MAX_ERROR_BYTES:
                        break
                    continue
                size += len(data)
                if size > MAX_ANSWER_BYTES:
                    raise WireError(f"the answer is longer than {MAX_ANSWER_BYTES:,} bytes")
                for event in events.feed(data):
                    _note_event(progress, event, at_s, self.chat)
                    if progress.done:
                        return _ending(progress, b"")
        if not _is_stream(answer):
            raise _Ended(*_no_stream(answer, bytes(error_body)))
        return _ending(progress, events.rest)

    async def _answer(
        self, progress: _Progress, verb: str, path: str, body: bytes, answer: HttpAnswer
    ) -> AsyncGenerator[tuple[float, bytes], None]:
        """Yields (when, bytes of the answer's body) as they come; (when, b"") once the head is there."""
        outgoing = None
        try:
            try:
                async with asyncio.timeout(self.connect_timeout_s):
                    reader, outgoing = await self._connect(
                        self._address or self.target.host,
                        self.target.port,
                        ssl=self._ssl,
                        server_hostname=self.target.host if self._ssl else None,
                        limit=BUFFER_BYTES,
                    )
            except TimeoutError as error:
                raise TimeoutError(str(error) or f"no connection after {self.connect_timeout_s:g} s") from error
            progress.connected_s = self.now_s()
            if (peer := outgoing.get_extra_info("peername")) is not None:
                self._address = peer[0]
            outgoing.write(self._head(verb, path, len(body)) + body)
            await outgoing.drain()
            while not answer.finished:
                data = await reader.read(READ_BYTES)
                at_s = self.now_s()
                if not data:
                    answer.feed_end()
                    return
                data = answer.feed(data)
                if answer.status is not None and progress.headers_s is None:
                    progress.headers_s, progress.status = at_s, answer.status
                    progress.retry_after_s = _retry_after_s(answer.headers)
                    yield at_s, b""
                if data:
                    yield at_s, data
        finally:
            if outgoing is not None:
                outgoing.close()

    def _head(self, verb: str, path: str, size: int) -> bytes:
        lines = [f"{verb} {self.target.prefix}{path} HTTP/1.1", f"Host: {self.target.authority}"]
        lines += ["Connection: close", "Accept: text/event-stream, application/json"]
        if self._api_key is not None:
            lines.append(f"Authorization: Bearer {self._api_key}")
        if verb == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {size}"]
        return "\r\n".join([*lines, "", ""]).encode("ascii")


def _is_stream(answer: HttpAnswer) -> bool:
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    return answer.status == 200 and kind == "text/event-stream"


def _no_stream(answer: HttpAnswer, body: bytes) -> tuple[str, str]:
    """(outcome, reason) of an answer that is no stream of events."""
    status = answer.status
    assert status is not None
    if status in REFUSALS:
        return "refused", f"status {status}: {_in_words(body)}"
    if 300 <= status < 400:
        return "redirect", f"status {status} to {answer.headers.get('location', 'nowhere')[:SHOWN_CHARACTERS]}"
    if status != 200:
        return "http_error", f"status {status}: {_in_words(body)}"
    kind = answer.headers.get("content-type", "none")
    return "wrong_type", f"content-type {kind[:80]}, expected text/event-stream: {_in_words(body)}"


def _in_words(body: bytes) -> str:
    """The message of an OpenAI error object, or the beginning of what came."""
    text = body.decode("utf-8", "replace")
    try:
        error = json.loads(text)
    except ValueError as not_json:
        return " ".join(text.split())[:SHOWN_CHARACTERS] or f"an empty body ({type(not_json).__name__})"
    if isinstance(error, dict) and "error" in error:
        error = error["error"]
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])[:SHOWN_CHARACTERS]
    return " ".join(text.split())[:SHOWN_CHARACTERS]


def _retry_after_s(headers: dict[str, str]) -> float | None:
    """Seconds, or a date against the answer's own Date; None where it is neither."""
    text = headers.get("retry-after", "")
    if text.isdecimal() and len(text) < 10:
        return float(text)
    try:
        later = parsedate_to_datetime(text) - parsedate_to_datetime(headers.get("date", ""))
    except (ValueError, TypeError):
        return None
    return max(0.0, later.total_seconds())


def _note_event(progress: _Progress, event: str, at_s: float, chat: bool) -> None:
    """Raises WireError for what no OpenAI server sends, and _Ended for an error within the stream."""
    if event.strip() == "[DONE]":
        progress.done = True
        return
    try:
        data = json.loads(event)
    except ValueError as error:
        raise WireError(f"an event is not JSON: {shown(event)} ({error})") from error
    if not isinstance(data, dict):
        raise WireError(f"an event is not a JSON object: {shown(event)}")
    if data.get("error") is not None:
        raise _Ended("error_event", _in_words(event.encode("utf-8", "replace")))
    before = progress.completion_tokens
    usage = data.get("usage")
    if usage is not None:
        counts = [
            usage.get(name) if isinstance(usage, dict) else None for name in ("prompt_tokens", "completion_tokens")
        ]
        if not all(is_whole(count) and count >= 0 for count in counts):
            raise WireError(f"usage must have prompt_tokens and completion_tokens, got {shown(usage)}")
        progress.prompt_tokens, progress.completion_tokens = counts
    choices = data.get("choices")
    if not choices:
        return
    if not isinstance(choices, list) or not isinstance(choices[0], dict):
        raise WireError(f"choices must be a list of objects, got {shown(choices)}")
    choice = choices[0]
    text, tokens = _text_and_tokens(choice, chat)
    if usage is not None:
        # The sum so far comes with every chunk (vLLM's continuous_usage_stats): what it grew by is this chunk's.
        tokens = max(0, (progress.completion_tokens or 0) - (before or 0))
    if isinstance(choice.get("finish_reason"), str):
        progress.finish_reason = choice["finish_reason"]
    progress.chunks.append(Chunk(at_s, text, tokens))


def _text_and_tokens(choice: dict[str, Any], chat: bool) -> tuple[str, int | None]:
    """A chat's first chunk often has a role and no content: it carries no token."""
    part: Any = choice.get("delta") if chat else choice
    if part is None:
        part = {}
    if not isinstance(part, dict):
        raise WireError(f"a delta must be an object, got {shown(part)}")
    names = ("reasoning_content", "reasoning", "content") if chat else ("text",)
    texts = [part.get(name) for name in names]
    if any(text is not None and not isinstance(text, str) for text in texts):
        raise WireError(f"the text of a chunk must be a text, got {shown(texts)}")
    text = "".join(text for text in texts if text)
    if isinstance(choice.get("token_ids"), list):
        return text, len(choice["token_ids"])
    logprobs = choice.get("logprobs")
    listed = (logprobs.get("tokens") or logprobs.get("content")) if isinstance(logprobs, dict) else None
    if isinstance(listed, list):
        return text, len(listed)
    only_role = chat and "role" in part and not text and choice.get("finish_reason") is None
    return text, 0 if only_role else None


def _ending(progress: _Progress, rest: bytes) -> tuple[str, str]:
    """(outcome, reason) of a stream that has ended in good order."""
    if rest and not progress.done:
        return "broken", f"the stream ends within an event: {shown(rest)}"
    if progress.finish_reason is None and not progress.done:
        return "incomplete", f"no finish reason and no [DONE] after {len(progress.chunks)} chunks"
    if not progress.chunks and not progress.completion_tokens:
        return "empty", "no chunk before [DONE]"
    missing = [
        name for name, there in (("finish reason", progress.finish_reason), ("[DONE]", progress.done)) if not there
    ]
    return "ok", f"without {missing[0]}" if missing else ""


# -- what the server accepts -------------------------------------------------------------------------------------

EVERY_CHUNK = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}  # vLLM and its likes
AT_THE_END = {"stream_options": {"include_usage": True}}
WHOLE = {"ignore_eos": True}  # vLLM, SGLang: generate max_tokens tokens whatever comes
NEWER_LIMIT = "max_completion_tokens"  # OpenAI's newer models: in place of max_tokens, and no temperature
TRIED: tuple[dict[str, Any], ...] = (
    {**EVERY_CHUNK, **WHOLE},
    {**AT_THE_END, **WHOLE},
    AT_THE_END,
    {},
    {**AT_THE_END, NEWER_LIMIT: True},
)


def body_of(model: str, prompt: str | list[int], max_tokens: int, *, chat: bool, fields: dict[str, Any]) -> bytes:
    """The JSON of a streamed request. fields: one of TRIED."""
    body = {"model": model, "stream": True, "temperature": 0.0, "max_tokens": max_tokens, **fields}
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    if NEWER_LIMIT in fields:
        body[NEWER_LIMIT] = body.pop("max_tokens")
        del body["temperature"]
    return json.dumps(body, ensure_ascii=False).encode()


async def accepted_fields(client: Client, body: Callable[[dict[str, Any]], bytes]) -> dict[str, Any]:
    """The largest set of extra fields that the server does not refuse, asked with requests of one token each that are
    in no recording. Raises WorkbenchError where even a plain request is refused, or nothing answers."""
    for fields in TRIED:
        result = await client.ask(Planned(0, None, 1, 1), body(fields))
        if result.outcome == "connection":
            raise WorkbenchError(f"{client.target.url}: no connection: {result.reason}; is the server running?")
        if not fields:
            plain = result
        if result.outcome != "http_error" or result.status not in (400, 422):
            break
    else:
        result = plain  # of all that were refused, the one that asked for nothing special says why
    if result.outcome in ("http_error", "redirect", "wrong_type"):
        raise WorkbenchError(f"{client.target.url} refuses a request of one token: {result.reason}")
    return fields


async def served_models(client: Client) -> dict[str, int | None]:
    """Names of the models at /v1/models, each with its longest sequence in tokens where the server says it (vLLM's
    max_model_len)."""
    listed = await client.get_json("/v1/models")
    data = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(data, list) or not all(isinstance(one, dict) and isinstance(one.get("id"), str) for one in data):
        raise WorkbenchError(f"{client.target.url}/v1/models lists no models; name one (--model)")
    return {one["id"]: one.get("max_model_len") if is_whole(one.get("max_model_len")) else None for one in data}
