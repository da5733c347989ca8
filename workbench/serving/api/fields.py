"""The fields of a request body: each is read here, or is harmless, or is refused by name. Nothing is ignored silently.

A `Field` says how a value is read, what stands for "not given", and its JSON schema; `serving.api.openapi` describes
the server from the same tables. null means "not given", as in OpenAI's API.

OpenAI's reference: https://platform.openai.com/docs/api-reference. Our extensions (EXTENSIONS) are vLLM's names where
it has one, and are sent with the client's `extra_body`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import nearest, shown
from workbench.serving.api.errors import ApiError

MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MAX_BIASES = 1_024
MAX_LOG_PROBS = 20
MAX_NAME_CHARACTERS = 256
Read = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Field:
    """read: checks a value that is there. default: of one that is not. words: for the description."""

    read: Read
    schema: Mapping[str, Any]
    default: Any = None
    words: str = ""
    required: bool = False


# -- how values are read -----------------------------------------------------------------------------------------------


def wrong(name: str, expected: str, value: object) -> ApiError:
    return ApiError(f"{name} must be {expected}, got {shown(value)}", param=name, code="invalid_type")


def number(low: float, high: float, default: float | None = None, words: str = "", *, above: bool = False) -> Field:
    """above: low itself is not allowed."""
    expected = f"a number above {low:g}, at most {high:g}" if above else f"a number from {low:g} to {high:g}"

    def read(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high or (above and value == low):
            raise wrong(name, expected, value)  # NaN is in no range
        return float(value)

    return Field(
        read, {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}, default, words
    )


def whole(low: int, high: int, default: int | None = None, words: str = "") -> Field:
    def read(name: str, value: Any) -> int:
        if type(value) is float and value.is_integer():  # 1.0 is a whole number of JSON
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise wrong(name, f"a whole number from {low:,} to {high:,}", value)
        return value

    return Field(read, {"type": "integer", "minimum": low, "maximum": high}, default, words)


def flag(default: bool = False, words: str = "") -> Field:
    def read(name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise wrong(name, "true or false", value)
        return value

    return Field(read, {"type": "boolean"}, default, words)


def text(max_length: int = MAX_NAME_CHARACTERS, words: str = "", required: bool = False, min_length: int = 0) -> Field:
    def read(name: str, value: Any) -> str:
        return read_text(name, value, max_length, min_length)

    return Field(read, {"type": "string", "minLength": min_length, "maxLength": max_length}, None, words, required)


def read_text(name: str, value: Any, max_length: int, min_length: int = 0) -> str:
    """A text that UTF-8 can write, of at most so many characters."""
    if not isinstance(value, str):
        raise wrong(name, "a text", value)
    if not min_length <= len(value) <= max_length:
        raise ApiError(
            f"{name} must have {min_length} to {max_length:,} characters, and has {len(value):,}", param=name
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ApiError(
            f"{name} has half of a surrogate pair at character {error.start}, which UTF-8 cannot write; send the whole"
            " character",
            param=name,
        ) from error
    return value


def object_of(words: str, description: str = "") -> Field:
    def read(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong(name, words, value)
        return value

    return Field(read, {"type": "object"}, None, description)


def read_stops(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise wrong(name, "a text or a list of texts", value)
    if len(stops) > MAX_STOPS:
        raise ApiError(f"{name} must be at most {MAX_STOPS} texts, got {len(stops):,}", param=name)
    for at, stop in enumerate(stops):
        read_text(f"{name}[{at}]", stop, MAX_STOP_CHARACTERS, min_length=1)
    return tuple(stops)


def read_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise wrong(name, "an object of token ids and numbers", value)
    if len(value) > MAX_BIASES:
        raise ApiError(f"{name} must be of at most {MAX_BIASES:,} tokens, got {len(value):,}", param=name)
    biases = {}
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 9):
            raise wrong(name, "an object whose names are token ids", token)
        biases[int(token)] = number(-100, 100).read(f"{name}[{token!r}]", bias)
    return tuple(sorted(biases.items()))


def read_stop_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_STOPS:
        raise wrong(name, f"a list of at most {MAX_STOPS} token ids", value)
    return tuple(whole(0, 2**31 - 1).read(f"{name}[{at}]", token) for at, token in enumerate(value))


def read_stream_options(name: str, value: Any) -> dict[str, bool]:
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    known = {"include_usage": flag(), "continuous_usage_stats": flag(), "include_obfuscation": flag()}
    for key in value:
        if key not in known:
            raise unknown_field(f"{name}.{key}", known, prefix=f"{name}.")
    given = {key: known[key].read(f"{name}.{key}", one) for key, one in value.items() if one is not None}
    if given.get("include_obfuscation"):
        raise refused(f"{name}.include_obfuscation", "chunks are sent as they are; leave it out")
    return given


def only(values: tuple[Any, ...], why: str) -> Read:
    """Of a field that this server does not have: the values that ask for nothing are fine."""

    def read(name: str, value: Any) -> None:
        if not any(type(value) is type(one) and value == one for one in values):
            raise refused(name, why)

    return read


def refused(name: str, why: str) -> ApiError:
    return ApiError(f"{name} is not supported: {why}", param=name, code="unsupported_parameter")


def unknown_field(name: str, known: Mapping[str, Any], prefix: str = "") -> ApiError:
    guess = nearest(name.removeprefix(prefix), known)
    hint = f"; did you mean {prefix}{guess}?" if guess else ""
    return ApiError(f"unknown field {shown(name)}{hint}", param=name[:MAX_NAME_CHARACTERS], code="unknown_parameter")


# -- the tables --------------------------------------------------------------------------------------------------------

_STOPS = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
            "maxItems": MAX_STOPS,
        },
    ]
}

SAMPLING = {
    "model": text(words="Its name, as /v1/models lists it.", required=True, min_length=1),
    "temperature": number(0, 2, 1.0, "0 takes the best token."),
    "top_p": number(0, 1, 1.0, above=True),
    "frequency_penalty": number(-2, 2, 0.0),
    "presence_penalty": number(-2, 2, 0.0),
    "logit_bias": Field(
        read_bias,
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_BIASES,
        },
        (),
    ),
    "n": whole(1, 128, 1, "Samples of each prompt; they share its blocks."),
    "seed": whole(0, 2**63 - 129, None, "Sample i has the seed plus i."),
    "stop": Field(read_stops, _STOPS, (), "The text ends before the first of them."),
    "stream": flag(),
    "stream_options": Field(
        read_stream_options,
        {
            "type": "object",
            "properties": {
                "include_usage": {"type": "boolean"},
                "continuous_usage_stats": {"type": "boolean"},
                "include_obfuscation": {"enum": [False]},
            },
            "additionalProperties": False,
        },
    ),
    "response_format": object_of("an object with a type", "text, json_object or json_schema."),
}

EXTENSIONS = {
    "top_k": whole(0, 2**31 - 1, 0, "0: all tokens."),
    "min_p": number(0, 1, 0.0),
    "repetition_penalty": number(0.01, 100, 1.0),
    "stop_token_ids": Field(
        read_stop_ids,
        {"type": "array", "maxItems": MAX_STOPS, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}},
        (),
        "Tokens that end it beside the model's own end of text.",
    ),
    "ignore_eos": flag(words="Go on after the model's end of text."),
    "priority": number(-1e9, 1e9, 0.0, "Smaller is more urgent, where the server runs the policy 'priority'."),
    "deadline_ms": number(0, 1e9, None, "To the first token; refused at once where it cannot be kept.", above=True),
    "structured_outputs": object_of("an object with one of json, regex, choice", "A grammar that the text keeps to."),
}

HARMLESS = {  # they change nothing of an answer, wherever it is computed
    name: Field(lambda name, value: None, {}, words="Accepted; changes nothing.")
    for name in ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id")
}


def refused_field(*harmless: Any, why: str) -> Field:
    return Field(only(harmless, why), {"enum": [None, *harmless]}, None, f"Not supported: {why}.")


COMPLETION: dict[str, Field] = {
    **SAMPLING,
    "prompt": Field(lambda name, value: value, {}, required=True, words="Text, texts, token ids, or lists of them."),
    "max_tokens": whole(0, 2**31 - 1, 16, "0 only with echo."),
    "logprobs": whole(0, MAX_LOG_PROBS, None, "So many of the most probable tokens at each place."),
    "echo": flag(words="The prompt comes before the text, with its logprobs where they are asked for."),
    **EXTENSIONS,
    **HARMLESS,
    "best_of": Field(lambda name, value: value, {"type": "integer"}, None, "As n, or left out."),
    "suffix": refused_field("", why="the models here write from left to right"),
}

CHAT: dict[str, Field] = {
    **SAMPLING,
    "messages": Field(lambda name, value: value, {}, required=True),
    "max_tokens": whole(1, 2**31 - 1, None, "max_completion_tokens' older name."),
    "max_completion_tokens": whole(1, 2**31 - 1, None, "Default: what the context leaves, at most the server's limit."),
    "logprobs": flag(),
    "top_logprobs": whole(0, MAX_LOG_PROBS, None),
    **EXTENSIONS,
    **HARMLESS,
    "store": refused_field(False, why="nothing is stored"),
    "tools": refused_field([], why="the models here call no tools"),
    "tool_choice": refused_field("none", "auto", why="the models here call no tools"),
    "parallel_tool_calls": refused_field(False, True, why="the models here call no tools"),
    "functions": refused_field([], why="the models here call no functions"),
    "function_call": refused_field("none", "auto", why="the models here call no functions"),
    "modalities": refused_field(["text"], why="the models here write text"),
    "audio": refused_field(why="the models here write text"),
    "prediction": refused_field(why="drafts are the server's setting, workbench serve --draft"),
    "reasoning_effort": refused_field("none", why="the models here do not reason in a channel of its own"),
    "verbosity": refused_field("medium", why="the models here know no verbosity"),
    "service_tier": refused_field("auto", "default", why="all requests are served alike; see priority"),
    "web_search_options": refused_field(why="nothing is searched"),
}

TOKENIZE = {
    "model": text(min_length=1),
    "prompt": Field(lambda name, value: value, {}, words="A text."),
    "messages": Field(lambda name, value: value, {}, words="Instead of a prompt: a chat."),
    "add_special_tokens": flag(True, "As a prompt that begins a request."),
    "return_token_strs": flag(),
}
DETOKENIZE = {
    "model": text(min_length=1),
    "tokens": Field(lambda name, value: value, {"type": "array", "items": {"type": "integer"}}, required=True),
}


def read_fields(body: Any, table: Mapping[str, Field]) -> dict[str, Any]:
    """Every field of a table, read or by default. Raises ApiError for the first that is wrong, unknown or missing."""
    if not isinstance(body, dict):
        raise ApiError(f"the body must be a JSON object, got {shown(body)}", code="invalid_body")
    for name in body:
        if name not in table:
            raise unknown_field(name, table)
    values = {}
    for name, field in table.items():
        value = body.get(name)
        if value is None:
            if field.required:
                raise ApiError(f"{name} is missing", param=name, code="missing_required_parameter")
            values[name] = field.default
        else:
            values[name] = field.read(name, value)
    return values
