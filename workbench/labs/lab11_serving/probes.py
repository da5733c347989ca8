"""What a server can do, by asking it and not by reading about it: one row of the table of abilities for each.

A probe says "yes", "no", what came instead, or "not visible" where the server gives nothing to see it by.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

from workbench.labs.lab11_serving.servers import Peer

PROMPT, LONG = "import os\n", "class Reader:\n    pass\n" * 12
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
YES, NO, HIDDEN = "yes", "no", "not visible"
RUNNING = ("vllm:num_requests_running", "llamacpp:requests_processing")
WAIT_S = 30


class Asking:
    """Requests to one server. Errors of the connection are answers, too: status 0."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def post(self, **changes: Any) -> tuple[int, str, bytes]:
        """(status, content type, body)"""
        connection = self.start(**changes)
        try:
            answer = connection.getresponse()
            return answer.status, answer.getheader("content-type") or "", answer.read()
        except (OSError, http.client.HTTPException) as error:
            return 0, type(error).__name__, b""
        finally:
            connection.close()

    def start(self, **changes: Any) -> http.client.HTTPConnection:
        """A request that was sent and whose answer is not read yet."""
        body = {"model": self.peer.model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0} | changes
        connection = http.client.HTTPConnection("127.0.0.1", self.peer.port, timeout=WAIT_S)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        return connection

    def object(self, **changes: Any) -> dict[str, Any]:
        """The answer as JSON; {} where it is none."""
        status, _, data = self.post(**changes)
        try:
            answer = json.loads(data)
        except ValueError:
            return {}
        return answer if status == 200 and isinstance(answer, dict) else {}

    def running(self) -> float | None:
        """Requests that run, by its metrics; None where there are none."""
        try:
            status, data = self.peer.get("/metrics")
        except (OSError, http.client.HTTPException):
            return None
        for line in data.decode("utf-8", "replace").splitlines() if status == 200 else ():
            if line.startswith(RUNNING):
                return float(line.rpartition(" ")[2])
        return None


def refused(status: int) -> str:
    """In words; "" for an answer."""
    return "" if status == 200 else f"refused with {status}" if status else "no answer"


def streams(ask: Asking) -> str:
    status, kind, data = ask.post(stream=True)
    if status != 200 or not kind.startswith("text/event-stream"):
        return f"status {status}, {kind}"
    return YES if b"data: [DONE]" in data else "without [DONE]"


def whole(ask: Asking) -> str:
    status, kind, _ = ask.post(stream=False)
    return YES if status == 200 and kind.startswith("application/json") else f"status {status}, {kind}"


def samples(ask: Asking) -> str:
    status, _, data = ask.post(n=2, temperature=1.0)
    count = len(json.loads(data).get("choices", ())) if status == 200 else 0
    return YES if count == 2 else refused(status) or f"{count} choice"


def log_probs(ask: Asking) -> str:
    status, _, _ = ask.post(logprobs=2)
    choices = ask.object(logprobs=2).get("choices") or [{}]
    return YES if choices[0].get("logprobs") else refused(status) or "ignored"


def schema(ask: Asking) -> str:
    if not ask.peer.texts:
        return "not asked: its tokens are numbers here"
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    status, _, _ = ask.post(response_format=wanted, max_tokens=40)
    choices = ask.object(response_format=wanted, max_tokens=40).get("choices") or [{}]
    text = choices[0].get("text", "")
    return YES if re.match(r'\s*\{\s*"a"\s*:', text) else refused(status) or "ignored"


def unknown_field(ask: Asking) -> str:
    status, _, _ = ask.post(temprature=0.5)
    return refused(status) or "ignored"


def prefix_cache(ask: Asking) -> str:
    ask.post(prompt=LONG)
    details = (ask.object(prompt=LONG).get("usage") or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return HIDDEN if cached is None else f"yes, {cached} tokens" if cached else NO


def cancels(ask: Asking) -> str:
    if ask.running() is None:
        return HIDDEN
    connection = ask.start(max_tokens=800, stream=True)
    time.sleep(0.2)
    connection.close()
    started = time.monotonic()
    while ask.running():
        if time.monotonic() - started > WAIT_S:
            return NO
        time.sleep(0.01)
    return f"yes, within {time.monotonic() - started:.1f} s"


def wrong_value(ask: Asking) -> str:
    status, _, data = ask.post(temperature=-1)
    try:
        shape = set(json.loads(data)["error"]) >= {"message", "type", "param", "code"}
    except (ValueError, KeyError, TypeError):
        shape = False
    return "accepted" if status == 200 else f"{status}, {'an error object' if shape else 'another form'}"


def metrics(ask: Asking) -> str:
    status, data = ask.peer.get("/metrics")
    names = {
        line.split("{")[0].split(" ")[0] for line in data.decode("utf-8", "replace").splitlines() if line[:1] != "#"
    }
    return f"yes, {len(names)} names" if status == 200 and len(names) > 1 else NO


def drains(ask: Asking) -> str:
    """The last probe: it ends the server in the middle of an answer."""
    if not ask.object().get("choices", [{}])[0].get("text"):
        return "not asked: it answers no more"
    connection = ask.start(max_tokens=300, stream=True)
    try:
        answer = connection.getresponse()
        answer.read(1)
        os.killpg(ask.peer.process.pid, signal.SIGTERM)
        data = answer.read()
    except (OSError, http.client.HTTPException) as error:
        return f"no: {type(error).__name__}"
    finally:
        connection.close()
    return YES if b"data: [DONE]" in data else "no: the answer was cut"


PROBES: dict[str, Callable[[Asking], str]] = {
    "streamed": streams,
    "whole": whole,
    "logprobs": log_probs,
    "JSON schema": schema,
    "an unknown field": unknown_field,
    "temperature -1": wrong_value,
    "prefix cache": prefix_cache,
    "a client that leaves": cancels,
    "metrics": metrics,
    "n = 2": samples,  # late: one of the servers answers nothing after it
    "SIGTERM drains": drains,
}


def probe(peer: Peer) -> dict[str, str]:
    ask = Asking(peer)
    return {name: one(ask) for name, one in PROBES.items()}
