"""The server's description of itself (OpenAPI 3.1), from the same tables by which it reads requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from workbench.serving.api.fields import CHAT, COMPLETION, DETOKENIZE, MAX_STOPS, TOKENIZE, Field
from workbench.serving.api.served import Served
from workbench.serving.api.template import HONEST, ROLES

PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": [*ROLES]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": PART, "minItems": 1}]},
            "name": {"type": "string"},
        },
        "required": ["role", "content"],
        "additionalProperties": False,
    },
}
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
OBJECT = {"type": "object"}


def describe(version: str, served: Served) -> dict[str, Any]:
    """The whole document, with the limits of this server."""
    model, tokens = {"const": served.name}, {"type": "integer", "minimum": 0, "maximum": served.vocab_size - 1}
    ids = {"type": "array", "items": tokens, "minItems": 1, "maxItems": served.context - 1}
    several = {"type": "array", "items": {"anyOf": [{"type": "string"}, ids]}, "minItems": 1}
    limits = {
        "model": model,
        "n": {"type": "integer", "minimum": 1, "maximum": min(128, served.max_running)},
        "stop_token_ids": {"type": "array", "items": tokens, "maxItems": MAX_STOPS},
    }
    new_tokens = {"type": "integer", "minimum": 1, "maximum": served.settings.max_tokens or served.context - 1}
    prompt = {"anyOf": [{"type": "string"}, ids, several | {"maxItems": served.settings.max_prompts}]}
    chat = {"messages": MESSAGES, "max_tokens": new_tokens, "max_completion_tokens": new_tokens}
    body = {
        "/v1/completions": (_schema(COMPLETION, **limits, prompt=prompt, max_tokens=new_tokens), "Go on with a text."),
        "/v1/chat/completions": (_schema(CHAT, **limits, **chat), f"Answer a chat. Without a template: {HONEST}."),
        "/tokenize": (
            {
                "oneOf": [
                    _schema({**rest, name: replace(field, required=True)}, model=model, **{name: shape})
                    for name, shape, field, rest in _either()
                ]
            },
            "Token ids of a text or a chat.",
        ),
        "/detokenize": (_schema(DETOKENIZE, model=model, tokens={"type": "array", "items": tokens}), "Their text."),
    }
    get = {
        "/v1/models": "The model that is served.",
        "/health": "Whether the process works.",
        "/ready": "Whether new requests are taken: 503 while loading or draining.",
        "/metrics": "Prometheus text.",
        "/version": "Of this software.",
        "/openapi.json": "This description.",
    }
    paths: dict[str, Any] = {path: {"post": _post(schema, words)} for path, (schema, words) in body.items()}
    paths |= {path: {"get": _operation(words, path not in ("/health", "/ready"))} for path, words in get.items()}
    paths["/v1/models/{model}"] = {
        "get": _operation("One model.") | {"parameters": [_parameter("model", "path", model)]}
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "workbench serve", "version": version, "description": "OpenAI-compatible, on the engine."},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _either() -> Iterator[tuple[str, dict[str, Any], Field, dict[str, Field]]]:
    """/tokenize takes a prompt or messages: each, its shape, its field, and the fields beside it."""
    for name, other, shape in (("prompt", "messages", {"type": "string"}), ("messages", "prompt", MESSAGES)):
        yield name, shape, TOKENIZE[name], {key: field for key, field in TOKENIZE.items() if key not in (name, other)}


def _schema(table: Mapping[str, Field], **own: Any) -> dict[str, Any]:
    properties = {}
    for name, field in table.items():
        schema = dict(own.get(name, field.schema))
        if schema and not field.required:
            schema = {"anyOf": [schema, {"type": "null"}]}
        properties[name] = schema | ({"description": field.words} if field.words else {})
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name, field in table.items() if field.required],
        "additionalProperties": False,
    }


def _post(schema: dict[str, Any], words: str) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    return _operation(words) | {"requestBody": {"required": True, "content": content}}


def _operation(words: str, errors: bool = True) -> dict[str, Any]:
    answers: dict[str, Any] = {"200": {"description": "OK"}}
    answers["4XX"] = {"description": "An error", "content": {"application/json": {"schema": ERROR}}}
    answers["5XX"] = {
        "description": "An error",
        "content": {"application/json": {"schema": ERROR if errors else OBJECT}},
    }
    return {"summary": words, "responses": answers}


def _parameter(name: str, where: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": where, "required": True, "schema": schema}
