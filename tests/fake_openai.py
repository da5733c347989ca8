"""A fake OpenAI server whose times are known: for tests, and for measuring how well a client measures. No dependency.

    python tests/fake_openai.py [--port N] [--ttft-ms A] [--gap-ms B] [--max-running K] [--stamps] …

A request waits until fewer than `max_running` are running (the first to come is the first to run), then its first token
comes after `ttft_s` and each further one after `gap_s`, times that are kept from the start of the request, so that they
do not drift. With more than `max_queued` waiting it is refused with 429. `script` (of `answer`) replaces all that for
one request: bytes are written as they are, a number is slept, ABORT resets the connection.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

ABORT = object()
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"
Script = Sequence[Any]


def piece(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def token(text: str, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more})


def delta(part: dict, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": part, "finish_reason": finish}], **more})


def usage(prompt: int, completion: int) -> dict:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def stream(*events: bytes, last: bytes = LAST) -> bytes:
    """A whole answer, all at once."""
    return OK + b"".join(map(piece, events)) + last


def plain(status: str, body: bytes, *headers: str, kind: str = "application/json") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class FakeServer:
    """script: what to answer to the n-th completion, from its number and its JSON; None: as the times say."""

    ttft_s: float = 0.25
    gap_s: float = 0.125
    max_running: int | None = None
    max_queued: int | None = None
    refuses: tuple[str, ...] = ()  # fields that are answered with 400
    stamps: bool = False  # a token's text is "START:NOW", on the loop's clock, which all processes of a machine share
    model: str = "fake"
    max_model_len: int | None = None
    script: Callable[[int, dict], Script | None] = lambda number, body: None
    asked: list[dict] = field(default_factory=list)  # every completion's JSON
    heads: list[str] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)  # when each began to run, on the loop's clock
    waiting: int = 0
    _places: asyncio.Semaphore | None = None

    async def handle(self, reader: Any, outgoing: Any) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        size = next(
            (int(line.split(":")[1]) for line in head.lower().split("\r\n") if line.startswith("content-length")), 0
        )
        body = json.loads(await reader.readexactly(size)) if size else {}
        if head.startswith("GET"):
            listed = {"id": self.model, **({"max_model_len": self.max_model_len} if self.max_model_len else {})}
            outgoing.write(plain("200 OK", json.dumps({"object": "list", "data": [listed]}).encode()))
            await outgoing.drain()
            return
        number = len(self.asked)
        self.asked.append(body)
        script = self.script(number, body)
        refused = [name for name in self.refuses if name in json.dumps(body)]
        if refused:
            error = {"error": {"message": f"unknown field {refused[0]}", "type": "invalid_request_error"}}
            script = [plain("400 Bad Request", json.dumps(error).encode())]
        if script is not None:
            await self._play(script, outgoing)
        else:
            await self._answer(body, "/chat/" in head.partition("\r\n")[0], outgoing)

    async def _play(self, script: Script, outgoing: Any) -> None:
        for part in script:
            if part is ABORT:
                (outgoing.abort if hasattr(outgoing, "abort") else outgoing.transport.abort)()
                return
            if isinstance(part, bytes):
                outgoing.write(part)
                await outgoing.drain()
            else:
                await asyncio.sleep(part)

    async def _answer(self, body: dict, chat: bool, outgoing: Any) -> None:
        if self.max_queued is not None and self.waiting >= self.max_queued:
            error = {"error": {"message": "too many requests wait", "type": "overloaded", "code": "overloaded"}}
            outgoing.write(plain("429 Too Many Requests", json.dumps(error).encode(), "Retry-After: 2"))
            await outgoing.drain()
            return
        if self._places is None:
            self._places = asyncio.Semaphore(self.max_running or 10**9)
        self.waiting += 1
        async with self._places:
            self.waiting -= 1
            await self._tokens(body, chat, outgoing)

    async def _tokens(self, body: dict, chat: bool, outgoing: Any) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        self.starts_s.append(start)
        prompt = body.get("prompt") or ["chat"]
        count = body.get("max_tokens") or body["max_completion_tokens"]
        options = body.get("stream_options", {})
        outgoing.write(OK)
        for number in range(1, count + 1):
            due = start + self.ttft_s + (number - 1) * self.gap_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            finish = "length" if number == count else None
            more = {"usage": usage(len(prompt), number)} if options.get("continuous_usage_stats") else {}
            text = f" {start:.6f}:{loop.time():.6f}" if self.stamps else f" {number}"
            made = delta({"content": text}, finish, **more) if chat else token(text, finish, **more)
            outgoing.write(piece(made))
            await outgoing.drain()
        if options.get("include_usage"):
            outgoing.write(piece(event({"choices": [], "usage": usage(len(prompt), count)})))
        outgoing.write(piece(DONE) + LAST)
        await outgoing.drain()

    async def serve(self, port: int = 0, host: str = "127.0.0.1") -> asyncio.Server:
        async def handle(reader: Any, outgoing: Any) -> None:
            try:
                await self.handle(reader, outgoing)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass  # the client has gone
            finally:
                outgoing.close()

        return await asyncio.start_server(handle, host, port)


async def main() -> None:
    parser = argparse.ArgumentParser(description="A fake OpenAI server with known times.")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    parser.add_argument("--gap-ms", type=float, default=10.0)
    parser.add_argument("--max-running", type=int)
    parser.add_argument("--max-queued", type=int)
    parser.add_argument("--stamps", action="store_true")
    args = parser.parse_args()
    times = (args.ttft_ms / 1000, args.gap_ms / 1000, args.max_running, args.max_queued)
    fake = FakeServer(*times, stamps=args.stamps)
    server = await fake.serve(args.port)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
