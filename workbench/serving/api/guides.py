"""From response_format and structured_outputs to a grammar (`decoding.guide.Guide`), made once and kept."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from workbench.decoding.guide import Guide
from workbench.errors import WorkbenchError
from workbench.models.tokenizer import Tokenizer
from workbench.serving.api.errors import ApiError
from workbench.serving.api.fields import read_text, unknown_field, wrong

KEPT = 64  # grammars
MAX_CHOICES, MAX_CHARACTERS = 256, 16_384
ANY_OBJECT = '{"type": "object"}'
META = frozenset("\\.+*?()|[]{}^$#&-~/")  # of a regular expression


class Grammar(NamedTuple):
    """What a text must satisfy. kind: "json_schema" or "regex". field: who asked."""

    kind: str
    source: str
    field: str


def read_grammar(fields: Mapping[str, Any]) -> Grammar | None:
    """Of the two fields, at most one may ask for a grammar."""
    asked = [_response_format(fields["response_format"]), _structured_outputs(fields["structured_outputs"])]
    grammars = [grammar for grammar in asked if grammar is not None]
    if len(grammars) > 1:
        raise ApiError(
            "response_format and structured_outputs both ask for a grammar; give one", param=grammars[1].field
        )
    return grammars[0] if grammars else None


def _response_format(given: dict[str, Any] | None) -> Grammar | None:
    name, known = "response_format", ("text", "json_object", "json_schema")
    if given is None:
        return None
    kind = given.get("type")
    if kind not in known:
        raise wrong(f"{name}.type", f"one of {', '.join(known)}", kind)
    _only(name, given, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", ANY_OBJECT, name)
    inner = given.get("json_schema")
    if not isinstance(inner, dict):
        raise wrong(f"{name}.json_schema", "an object with name and schema", inner)
    _only(f"{name}.json_schema", inner, ("name", "schema", "strict", "description"))
    if inner.get("name") is not None:
        read_text(f"{name}.json_schema.name", inner["name"], 64, min_length=1)
    return Grammar("json_schema", _schema(f"{name}.json_schema.schema", inner.get("schema")), name)


def _structured_outputs(given: dict[str, Any] | None) -> Grammar | None:
    name = "structured_outputs"
    if given is None:
        return None
    asked = {key: value for key, value in given.items() if value is not None}
    _only(name, asked, ("json", "regex", "choice"))
    if len(asked) != 1:
        raise ApiError(f"{name} takes exactly one of json, regex and choice, got {len(asked)}", param=name)
    [(key, value)] = asked.items()
    if key == "json":
        return Grammar("json_schema", _schema(f"{name}.json", value), name)
    if key == "regex":
        return Grammar("regex", read_text(f"{name}.regex", value, MAX_CHARACTERS, min_length=1), name)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise wrong(f"{name}.choice", f"a list of 1 to {MAX_CHOICES} texts", value)
    texts = [read_text(f"{name}.choice[{at}]", one, 1_024, min_length=1) for at, one in enumerate(value)]
    return Grammar("regex", "|".join(f"({_literal(one)})" for one in texts), name)


def _only(name: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise unknown_field(f"{name}.{key}", dict.fromkeys(known), prefix=f"{name}.")


def _schema(name: str, given: Any) -> str:
    if isinstance(given, str):
        return read_text(name, given, 2**20)
    if not isinstance(given, dict):
        raise wrong(name, "a JSON schema, an object", given)
    return json.dumps(given)


def _literal(text: str) -> str:
    return "".join(f"\\{c}" if c in META else f"\\x{ord(c):02x}" if ord(c) < 32 else c for c in text)


class Guides:
    """The grammars of one tokenizer. `make` takes up to a second for a new one; any thread may call it."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._kept: OrderedDict[tuple[str, str], Guide] = OrderedDict()
        self._lock = threading.Lock()

    def make(self, grammar: Grammar) -> Guide:
        """Raises ApiError for what cannot be enforced."""
        key = (grammar.kind, grammar.source)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        if self._tokenizer is None or self._tokenizer.end_of_text is None:
            raise ApiError(
                "a grammar is about text and its end, and this model has no tokenizer with an end of text",
                param=grammar.field,
            )
        make = Guide.json_schema if grammar.kind == "json_schema" else Guide.regex
        try:
            guide = make(grammar.source, self._tokenizer, vocab_size=self._vocab_size)
        except WorkbenchError as error:
            raise ApiError(f"{grammar.field}: {error}", param=grammar.field, code="unsupported_grammar") from error
        with self._lock:
            self._kept[key] = guide
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return guide
