"""The server as one ASGI callable: `build_app(engine)`. The same object runs under uvicorn (`workbench serve`), in a
notebook, in a test without a socket, or in Ray Serve.

>>> app = build_app(Engine(prepare(load("stdlib-10m"))), name="stdlib-10m")
>>> httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route, Router

import workbench
from workbench.serving.api.completing import Complete
from workbench.serving.api.errors import ApiError, as_json
from workbench.serving.api.fields import DETOKENIZE, TOKENIZE, read_fields, read_text, whole, wrong
from workbench.serving.api.front import Front
from workbench.serving.api.http import LOOPBACK, Guard, Keys, Receive, Scope, Send, answer, read_json
from workbench.serving.api.link import EngineThread, Link, StepNews
from workbench.serving.api.metrics import CONTENT_TYPE
from workbench.serving.api.openapi import describe
from workbench.serving.api.own import OwnParts
from workbench.serving.api.process import EngineProcess
from workbench.serving.api.served import ModelFacts, Served, serve_model
from workbench.serving.api.settings import ServerSettings
from workbench.serving.api.template import HONEST, ChatTemplate, read_messages
from workbench.serving.api.trace import Trace
from workbench.serving.engine import Engine

VERSION = str(workbench.__version__)
MAX_TOKENIZED = 2**19  # characters; two seconds of a thread


class Server:
    """An ASGI application. `front` is there once the engine is; `drain` ends it in order."""

    def __init__(
        self,
        make: Callable[[], tuple[Served, Link]],
        settings: ServerSettings,
        keys: Keys,
        hosts: Sequence[str] | None,
        watch: Sequence[Callable[[StepNews], None]],
        trace: Trace | None,
        own: OwnParts | None = None,
        *,
        there: bool,
    ) -> None:
        self._own = own
        self._make, self.settings, self._watch, self._trace = make, settings, watch, trace
        self._there = there  # the engine is, and making is no more than a moment
        self.front: Front | None = None
        self.why_not_loaded: BaseException | None = None
        self._loading: asyncio.Task[None] | None = None
        self.draining = False
        routes = [
            Route("/v1/completions", Complete(self.ready_front, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", Complete(self.ready_front, chat=True), methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{model:path}", self._model, methods=["GET"]),
            Route("/tokenize", _Json(self, self._tokenize), methods=["POST"]),
            Route("/detokenize", _Json(self, self._detokenize), methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/version", self._version, methods=["GET"]),
            Route("/openapi.json", self._openapi, methods=["GET"]),
        ]
        self._app = Guard(Router(routes, redirect_slashes=False), keys, hosts, self._note, lambda: uuid.uuid4().hex)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._loading is None:
            self._loading = asyncio.create_task(self._load())
        if self._there:
            await self._loading
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            scope["app"] = self  # asks Starlette's router to raise for what it has no route for
            await self._app(scope, receive, send)

    async def _load(self) -> None:
        try:
            served, link = await asyncio.to_thread(self._make)
            self.front = Front(served, link, self.settings, self._watch, self._trace, self._own)
        except Exception as error:
            self.why_not_loaded = error

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await self.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def drain(self, seconds: float) -> None:
        """Not ready from now on; what runs is completed, or cut after so many seconds."""
        self.draining = True
        if self.front is not None:
            await self.front.drain(seconds)

    async def close(self) -> None:
        """The engine's thread ends; what still runs is cut."""
        self.draining = True
        if self._loading is not None:
            await asyncio.wait([self._loading])  # what is being made is ended, too
        if self.front is not None:
            self.front.cut()
            await asyncio.to_thread(self.front.link.stop)

    def ready_front(self) -> Front:
        """Raises ApiError, 503, while there is none."""
        if self.front is None:
            if self.why_not_loaded is not None:
                raise ApiError(f"the model could not be loaded: {self.why_not_loaded}", status=503, code="not_loaded")
            raise ApiError("the model is being loaded", status=503, code="loading", retry_s=1)
        return self.front

    def _note(self, path: str, status: int) -> None:
        if self.front is not None and path.startswith("/v1/"):
            self.front.metrics.answered(status)

    # -- endpoints -----------------------------------------------------------------------------------------------------

    async def _models(self, request: HttpRequest) -> Response:
        return _respond({"object": "list", "data": [self._card()]})

    async def _model(self, request: HttpRequest) -> Response:
        self.ready_front().served.check_name(request.path_params["model"])
        return _respond(self._card())

    def _card(self) -> dict[str, Any]:
        served = self.ready_front().served
        card = {"id": served.name, "object": "model", "created": served.created, "owned_by": "workbench"}
        card |= {"root": served.name, "parent": None, "max_model_len": served.context}
        return card if served.template.source is not None else {**card, "note": HONEST}

    async def _health(self, request: HttpRequest) -> Response:
        dead = self.why_not_loaded or (self.front.dead if self.front is not None else None)
        return _respond(
            {"status": "ok"} if dead is None else {"status": "failed", "why": str(dead)}, 503 if dead else 200
        )

    async def _ready(self, request: HttpRequest) -> Response:
        front = self.front
        status = "draining" if self.draining else "loading" if front is None else "ready"
        if self.why_not_loaded is not None or (front is not None and front.dead is not None):
            status = "failed"
        return _respond({"status": status}, 200 if status == "ready" else 503)

    async def _metrics(self, request: HttpRequest) -> Response:
        return Response(self.ready_front().metrics.text(), media_type=CONTENT_TYPE)

    async def _version(self, request: HttpRequest) -> Response:
        return _respond({"version": VERSION})

    async def _openapi(self, request: HttpRequest) -> Response:
        return _respond(describe(VERSION, self.ready_front().served))

    def _tokenize(self, served: Served, body: Any) -> dict[str, Any]:
        fields = read_fields(body, TOKENIZE)
        served.check_name(fields["model"])
        if (fields["prompt"] is None) == (fields["messages"] is None):
            raise ApiError("give one of prompt and messages", param="prompt")
        if fields["prompt"] is not None:
            text = read_text("prompt", fields["prompt"], MAX_TOKENIZED)
        else:
            text = served.template(read_messages(fields["messages"]))
        tokenizer = served.text_tokens()
        ids = tokenizer.encode_prompt(text) if fields["add_special_tokens"] else tokenizer.encode(text)
        strings = [tokenizer.token_text(one) for one in ids] if fields["return_token_strs"] else None
        return {"count": len(ids), "max_model_len": served.context, "tokens": ids, "token_strs": strings}

    def _detokenize(self, served: Served, body: Any) -> dict[str, Any]:
        fields = read_fields(body, DETOKENIZE)
        served.check_name(fields["model"])
        if not isinstance(fields["tokens"], list):
            raise wrong("tokens", "a list of token ids", fields["tokens"])
        token = whole(0, served.vocab_size - 1)
        ids = [token.read(f"tokens[{at}]", one) for at, one in enumerate(fields["tokens"])]
        return {"prompt": served.text_tokens().decode(ids)}


class _Json:
    """An endpoint that makes one JSON object of another, beside the event loop."""

    def __init__(self, server: Server, work: Callable[[Served, Any], dict[str, Any]]) -> None:
        self._server, self._work = server, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        served = self._server.ready_front().served
        body: Any = await read_json(scope, receive, self._server.settings)
        await answer(send, await asyncio.to_thread(lambda: as_json(self._work(served, body))))


def _respond(value: Any, status: int = 200) -> Response:
    return Response(as_json(value), status, media_type="application/json")


def build_app(
    engine: Engine | Callable[[], Engine | EngineProcess],
    *,
    name: str | None = None,
    settings: ServerSettings | None = None,
    template: ChatTemplate | None = None,
    keys: Iterable[str] | None = None,
    hosts: Sequence[str] | None = LOOPBACK,
    watch: Sequence[Callable[[StepNews], None]] = (),
    trace: Trace | None = None,
    own: OwnParts | None = None,
) -> Server:
    """An engine as an OpenAI-compatible server.

    engine: or a function that makes one, called beside the event loop, in this process or in another
    (`process.EngineProcess`); until it is there requests get 503. name: of the model, for clients; default its own.
    template: of chats; default for base models. keys: API keys; None: everybody may ask. hosts: names that requests
    are sent to; None: any. watch: is shown the news of every step, on the event loop. trace: gets steps and texts.
    own: parts of your own in place of the server's. The first request, or the server's startup, starts it. Raises
    WorkbenchError for settings that make no sense.
    """
    settings = settings or ServerSettings()

    def make() -> tuple[Served, Link]:
        made = engine if isinstance(engine, Engine) else engine()
        if isinstance(made, Engine):
            link: Link = EngineThread(made)
            facts, tokenizer = ModelFacts.of(made.model), made.model.tokenizer
        else:
            link, facts, tokenizer = made, made.facts, made.tokenizer
        return serve_model(facts, tokenizer, settings, link.max_running, name=name, template=template), link

    return Server(make, settings, Keys(keys), hosts, watch, trace, own, there=isinstance(engine, Engine))
