"""The HTTP that all endpoints share, as plain ASGI: bodies with limits, answers, keys, who has left.

Pure ASGI on purpose: Starlette's BaseHTTPMiddleware puts itself between an endpoint and the client's disconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

from starlette.exceptions import HTTPException

from workbench.errors import WorkbenchError
from workbench.serving.api.errors import ApiError, as_json
from workbench.serving.api.settings import ServerSettings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

T = TypeVar("T")
LONG_BODY = 32 * 1024  # bytes that are parsed in less than a millisecond, whatever they are
LET_SEND_S = 1.0  # what a body that is too long is read on, before its refusal
CLOSE = {"connection": "close"}  # what is left of the body is not read
OPEN_PATHS = ("/health", "/ready")
CLIENT_GONE = 499  # counted among the statuses, as nginx does
MAX_HEADER_BYTES = 32 * 1024  # of all headers, and the path
LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "::1")


def header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


async def read_json(
    scope: Scope, receive: Receive, settings: ServerSettings, read: Callable[[Any], T] = lambda value: value
) -> T:
    """What `read` makes of the JSON in a request's body. A long body is parsed and read beside the event loop. Raises
    ApiError for one that is too long, too slow or no JSON, and ConnectionError when the client leaves."""
    kind = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        # asking for it keeps web pages of others away from a server on loopback: browsers ask before they send this
        raise ApiError(
            f"the body must be JSON, with the header content-type: application/json, got {kind[:80]!r}", status=415
        )
    body = await read_body(scope, receive, settings)
    return await beside_loop(len(body) > LONG_BODY, lambda: read(_parsed(body)))


async def beside_loop(long: bool, work: Callable[[], T]) -> T:
    """What work returns. long: it may take more than a few milliseconds, and other requests go on meanwhile."""
    return await asyncio.to_thread(work) if long else work()


def _parsed(body: bytes) -> Any:
    # a million small lists are made in 0.2 s, and in 2 s with the collector looking for garbage among them
    collects = len(body) > LONG_BODY and gc.isenabled()
    try:
        if collects:
            gc.disable()
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        why = str(error)[:200] or type(error).__name__
        raise ApiError(f"the body is no JSON: {why}", code="invalid_json") from error
    finally:
        if collects:
            gc.enable()


async def read_body(scope: Scope, receive: Receive, settings: ServerSettings) -> bytes:
    limit, body = settings.max_body_bytes, bytearray()
    announced = header(scope, b"content-length") or "0"
    too_long = ApiError(
        f"the body is longer than {limit:,} bytes, the server's limit", status=413, code="body_too_large", headers=CLOSE
    )
    if announced.isdigit() and int(announced[:20]) > limit:
        if header(scope, b"expect") is None:  # who asks first sends nothing
            await _let_send(receive)
        raise too_long
    try:
        async with asyncio.timeout(settings.body_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionError("the client left before its request was complete")
                body += message.get("body", b"")
                if len(body) > limit:
                    await _let_send(receive)
                    raise too_long
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError as error:
        raise ApiError(
            f"the body was not complete after {settings.body_seconds:g} s", status=408, headers=CLOSE
        ) from error


async def _let_send(receive: Receive) -> None:
    """Read on for a moment and keep nothing: a connection that is closed with bytes unread is reset, and the client may
    never see why."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LET_SEND_S):
            while (await receive()).get("more_body", False):
                pass


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


async def answer(
    send: Send,
    body: bytes,
    *,
    status: int = 200,
    kind: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> None:
    """A whole response."""
    lines = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    lines += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


async def answer_error(send: Send, error: ApiError) -> None:
    await answer(send, as_json(error.body()), status=error.status, headers=error.headers)


async def until_gone(receive: Receive, gone: Callable[[], None]) -> None:
    """Calls gone when the client has left. The body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    gone()


def no_route(scope: Scope, error: HTTPException) -> ApiError:
    """No such path, or not by this method."""
    path, method = scope["path"][:200], scope["method"]
    words = f"{method} is not for {path}" if error.status_code == 405 else f"there is no {path} here"
    return ApiError(f"{words}; see /openapi.json", status=error.status_code, headers=error.headers)


def in_origin_form(scope: Scope) -> Scope:
    """A target may name the server, as it does for proxies, and then counts before the header (RFC 9112 §3.2.2)."""
    scheme, found, rest = scope["path"].partition("://")
    if not found or scheme.lower() not in ("http", "https"):
        return scope
    host, _, path = rest.partition("/")
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    return {**scope, "path": f"/{path}", "headers": [*headers, (b"host", host.encode("utf-8", "replace"))]}


class Keys:
    """API keys, compared in constant time, all of them, whichever fits. None: everybody may ask."""

    def __init__(self, keys: Iterable[str] | None) -> None:
        self._keys = None if keys is None else [key.encode() for key in keys]
        if self._keys is not None and (not self._keys or any(len(key) < 8 for key in self._keys)):
            raise WorkbenchError("API keys must be at least one, each of at least 8 characters")

    def __bool__(self) -> bool:
        return self._keys is not None

    def fits(self, scope: Scope) -> bool:
        if self._keys is None:
            return True
        scheme, _, given = (header(scope, b"authorization") or "").partition(" ")
        fits = [hmac.compare_digest(given.strip().encode("latin-1", "replace"), key) for key in self._keys]
        return scheme.lower() == "bearer" and any(fits)


class Guard:
    """Around all endpoints: keys, the Host that is asked for, errors in OpenAI's shape, an id for each request.

    hosts: names that a request may be sent to; None: any. A server on loopback without keys takes loopback's names
    only, so that no web page reaches it under a name of its own (DNS rebinding). note: called with each status.
    """

    def __init__(
        self,
        app: App,
        keys: Keys,
        hosts: Sequence[str] | None,
        note: Callable[[str, int], None],
        new_id: Callable[[], str],
    ) -> None:
        self._app, self._keys, self._hosts, self._note, self._new_id = app, keys, hosts, note, new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = in_origin_form(scope)
        request_id = (header(scope, b"x-request-id") or "")[:128].strip() or self._new_id()
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._note(scope["path"], message["status"])
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode("latin-1", "replace")),
                ]
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, noted)
        except ApiError as error:
            if not started:
                await answer_error(noted, error)
        except HTTPException as error:  # of the router
            await answer_error(noted, no_route(scope, error))
        except ConnectionError:  # nobody is there to hear of it
            if not started:
                self._note(scope["path"], CLIENT_GONE)
        except Exception as error:
            if not started:
                shown = f"an error of the server ({type(error).__name__}); it is in the server's log"
                await answer_error(noted, ApiError(shown, status=500, code="internal_error"))
            raise

    def _check(self, scope: Scope) -> None:
        if len(scope["path"]) + sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            raise ApiError(f"path and headers are longer than {MAX_HEADER_BYTES:,} bytes", status=431)
        if self._hosts is not None:
            host = header(scope, b"host") or ""
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name.lower() not in self._hosts:
                raise ApiError(
                    f"this server answers to {', '.join(self._hosts)}, not to {host[:80]!r}; start it with a key for"
                    " other names",
                    status=403,
                    code="wrong_host",
                )
        if scope["path"] not in OPEN_PATHS and not self._keys.fits(scope):
            raise ApiError(
                "no key, or a wrong one: send the header authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
