"""The server's description of itself (OpenAPI 3.1), from the same tables by which it reads requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.serving.api.fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, Field
from workbench.serving.api.template import HONEST, ROLES

TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "minItems": 1}
PROMPT = {
    "anyOf": [
        {"type": "string"},
        TOKENS,
        {"type": "array", "items": {"anyOf": [{"type": "string"}, TOKENS]}, "minItems": 1},
    ]
}
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


def describe(version: str) -> dict[str, Any]:
    """The whole document."""
    body = {
        "/v1/completions": (_schema(COMPLETION, prompt=PROMPT), "Go on with a text."),
        "/v1/chat/completions": (_schema(CHAT, messages=MESSAGES), f"Answer a chat. Without a template: {HONEST}."),
        "/tokenize": (
            _schema(TOKENIZE, prompt={"type": "string"}, messages=MESSAGES),
            "Token ids of a text or a chat.",
        ),
        "/detokenize": (_schema(DETOKENIZE), "The text of token ids."),
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
        "get": _operation("One model.") | {"parameters": [_parameter("model", "path", {"type": "string"})]}
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "workbench serve", "version": version, "description": "OpenAI-compatible, on the engine."},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


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
