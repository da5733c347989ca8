"""The gate "api": what an OpenAI client may rely on, asked of the submission's own engine behind the course's server.

Each claim is a function of a `Client`; it returns nothing, or raises Broken with what came and what was expected.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from workbench.capstone.gates import GateResult

SECONDS = 60.0
PROMPT = "def add(a, b):\n    return"


class Broken(Exception):
    """A claim does not hold."""


@dataclass(frozen=True)
class Client:
    """A client of a server on this machine. model: as the server calls it."""

    port: int
    model: str

    def send(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """(status, body)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, content, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def post(self, path: str, expected: int = 200, **fields: Any) -> Any:
        """The JSON that came. Raises Broken for another status, and for what is no JSON."""
        status, content = self.send("POST", path, {"model": self.model, **fields})
        if status != expected:
            raise Broken(f"POST {path} was answered with {status}, expected {expected}: {content[:120]!r}")
        return _json(content)

    def stream(self, path: str, **fields: Any) -> Iterator[Any]:
        """The events of a stream, "[DONE]" as the last."""
        status, content = self.send("POST", path, {"model": self.model, "stream": True, **fields})
        if status != 200:
            raise Broken(f"a stream was answered with {status}: {content[:120]!r}")
        for line in content.decode().split("\n\n"):
            data = line.removeprefix("data: ").strip()
            if data and not line.startswith(":"):
                yield data if data == "[DONE]" else _json(data.encode())


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise Broken(f"the answer is no JSON: {content[:120]!r}") from error


def _equal(what: str, seen: Any, expected: Any) -> None:
    if seen != expected:
        raise Broken(f"{what} is {str(seen)[:120]!r}, expected {str(expected)[:120]!r}")


def names_its_model(client: Client) -> None:
    status, content = client.send("GET", "/v1/models")
    _equal("the status of /v1/models", status, 200)
    _equal("its first model", _json(content)["data"][0]["id"], client.model)


def completes_greedily_twice_alike(client: Client) -> None:
    texts = {_text(client.post("/v1/completions", prompt=PROMPT, max_tokens=16, temperature=0)) for _ in range(2)}
    _equal("the number of different texts of one greedy request", len(texts), 1)


def counts_its_tokens(client: Client) -> None:
    usage = client.post("/v1/completions", prompt=PROMPT, max_tokens=7, temperature=0, ignore_eos=True)["usage"]
    _equal("usage.total_tokens", usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"])
    if not 1 <= usage["completion_tokens"] <= 7:
        raise Broken(f"7 tokens were asked for, and usage says {usage['completion_tokens']}")


def streams_the_same_text(client: Client) -> None:
    fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    events = list(client.stream("/v1/completions", **fields))
    _equal("the last event of a stream", events[-1], "[DONE]")
    streamed = "".join(one["choices"][0]["text"] for one in events[:-1] if one["choices"])
    _equal("a streamed text", streamed, _text(client.post("/v1/completions", **fields)))


def chats(client: Client) -> None:
    answer = client.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x = 1"}], max_tokens=8, temperature=0
    )
    _equal("the role of the answer", answer["choices"][0]["message"]["role"], "assistant")


def stops_at_a_string(client: Client) -> None:
    whole = _text(client.post("/v1/completions", prompt=PROMPT, max_tokens=24, temperature=0))
    if len(whole) > 4:
        mark = whole[2:4]
        cut = _text(client.post("/v1/completions", prompt=PROMPT, max_tokens=24, temperature=0, stop=[mark]))
        _equal("a text that stops at a string", cut, whole.partition(mark)[0])


def draws_the_same_with_the_same_seed(client: Client) -> None:
    fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": 11}
    texts = {_text(client.post("/v1/completions", **fields)) for _ in range(2)}
    _equal("the number of different texts of one seed", len(texts), 1)


def gives_log_probabilities(client: Client) -> None:
    choice = client.post("/v1/completions", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=2)["choices"][0]
    values = choice["logprobs"]["token_logprobs"]
    if not values or any(value > 1e-6 for value in values):
        raise Broken(f"log-probabilities are at most 0, and {values} came")


def refuses_nonsense(client: Client) -> None:
    nonsense: tuple[dict[str, Any], ...] = ({"temperature": -1}, {"max_tokens": 0}, {"n": "two"}, {"prompt": 3.5})
    for fields in nonsense:
        answer = client.post("/v1/completions", 400, **{"prompt": PROMPT, **fields})
        _equal(f"the error of {fields}", sorted(answer["error"]) != [] and "message" in answer["error"], True)
    status, content = client.send("POST", "/v1/completions", b"{not json")
    _equal("the status of what is no JSON", status, 400)
    _json(content)


def refuses_another_model(client: Client) -> None:
    status, _ = client.send("POST", "/v1/completions", {"model": "gpt-none", "prompt": PROMPT})
    _equal("the status of an unknown model", status, 404)


def refuses_what_does_not_fit(client: Client) -> None:
    client.post("/v1/completions", 400, prompt=list(range(5)) * 2000, max_tokens=8)


def serves_several_at_once(client: Client) -> None:
    from concurrent.futures import ThreadPoolExecutor

    alone = _text(client.post("/v1/completions", prompt=PROMPT, max_tokens=12, temperature=0))
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(client.post, "/v1/completions", prompt=PROMPT, max_tokens=12, temperature=0) for _ in range(4)
        ]
        for one in asked:
            _equal("a text beside three others", _text(one.result()), alone)


CLAIMS: tuple[Callable[[Client], None], ...] = (
    names_its_model,
    completes_greedily_twice_alike,
    counts_its_tokens,
    streams_the_same_text,
    chats,
    stops_at_a_string,
    draws_the_same_with_the_same_seed,
    gives_log_probabilities,
    refuses_nonsense,
    refuses_another_model,
    refuses_what_does_not_fit,
    serves_several_at_once,
)


def _text(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


def api(port: int, model: str, *, drafts_learn: bool = False) -> GateResult:
    """All claims, of a server that listens. drafts_learn: drafts depend on other texts, as those of own.py may. Then a
    seed gives a text of the same distribution and not always the same text, as a token is drawn by the rule of
    acceptance where one was drafted and directly where none was: that claim is not asked."""
    client, broken = Client(port, model), []
    asked = [claim for claim in CLAIMS if not (drafts_learn and claim is draws_the_same_with_the_same_seed)]
    for claim in asked:
        try:
            claim(client)
        except (Broken, OSError, http.client.HTTPException, KeyError, IndexError, TypeError) as error:
            broken.append(f"{claim.__name__}: {type(error).__name__}: {error}")
    words = f"{len(asked) - len(broken)} of {len(asked)} claims hold" + (f"; {broken[0]}" if broken else "")
    return GateResult("api", not broken, words)
