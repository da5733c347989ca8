"""JSON schemas from outside, checked before the grammar library sees them.

The library refuses the keywords that it knows and cannot enforce; a keyword that it does not know, a misspelt one
too, it ignores as the standard allows (JSON Schema 2020-12, core, section 6.5). Here that is an error: what is
written in the schema holds for the text, or the schema is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from workbench.errors import WorkbenchError, nearest

DIALECT = "https://json-schema.org/draft/2020-12/schema"
MAX_CHARACTERS = 65_536
MAX_DEPTH = 60  # levels of lists and objects in the schema's own text
MAX_LOOKS = 200_000  # at parts of a schema, to find out whether its recursion can end

_ONE = ("additionalProperties", "items")  # keywords that hold a schema,
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems")  # a list of them,
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # or an object of them
_PLAIN = (
    "$ref",
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "pattern",
    "required",
    "type",
)
_NOTES = ("$comment", "$schema", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly")
ENFORCED = (*_ONE, *_MANY, *_NAMED, *_PLAIN)
# in the standard, and neither enforced by the library nor safe to ignore
_UNSUPPORTED = (
    "$anchor",
    "$dynamicAnchor",
    "$dynamicRef",
    "$id",
    "$vocabulary",
    "contains",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
)


def checked_schema(schema: dict[str, Any] | bool | str) -> dict[str, Any]:
    """The schema as a dict of JSON values of its own. Raises WorkbenchError for what cannot be enforced in full."""
    text = schema if isinstance(schema, str) else _dumped(schema)
    if len(text) > MAX_CHARACTERS:
        raise WorkbenchError(
            f"a JSON schema may have {MAX_CHARACTERS:,} characters, this one has {len(text):,}; a list of very many "
            "values is better a string, and checked afterwards"
        )
    try:
        root = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise WorkbenchError(f"a JSON schema was expected, and the text is not JSON: {error}") from None
    if not isinstance(root, dict):
        raise WorkbenchError(f"a JSON schema is an object such as {{'type': 'object', …}}, got {root!r:.60}")
    if root.get("$schema", DIALECT) != DIALECT:
        raise WorkbenchError(f"the JSON schema names the dialect {root['$schema']!r:.80}; only {DIALECT} is read here")
    _check_depth(root)
    targets: dict[str, object] = {}
    _check_parts(root, targets)
    if not _can_end(root, targets):
        raise WorkbenchError(
            "no text can satisfy this schema: its recursion never ends, for what it requires contains itself; make "
            "one of the properties optional, or allow another value beside the reference"
        )
    return root


def _dumped(schema: Any) -> str:
    try:
        return json.dumps(schema, allow_nan=False, ensure_ascii=False)
    except RecursionError:
        raise _too_deep() from None
    except (TypeError, ValueError) as error:
        raise WorkbenchError(f"a JSON schema was expected, and this has no JSON: {error}") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise WorkbenchError(f"the JSON schema has {twice!r:.60} twice in one object; which of them counts?")
    return found


def _no_constant(name: str) -> None:
    raise WorkbenchError(f"the JSON schema contains {name}, which is not JSON")


def _too_deep() -> WorkbenchError:
    return WorkbenchError(
        f"a JSON schema may nest {MAX_DEPTH} levels of lists and objects, this one nests more; name its parts in "
        "$defs and refer to them with $ref"
    )


def _check_depth(root: Any) -> None:
    level = [root]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
    if any(isinstance(node, dict | list) for node in level):
        raise _too_deep()


def _inner(node: dict[str, Any]) -> Iterator[Any]:
    """The schemas directly inside a schema."""
    for name in _ONE:
        if name in node:
            yield node[name]
    for name in _MANY:
        yield from _of_type(node, name, list, [])
    for name in _NAMED:
        yield from _of_type(node, name, dict, {}).values()


def _of_type(node: dict[str, Any], name: str, kind: type, absent: Any) -> Any:
    value = node.get(name, absent)
    if not isinstance(value, kind):
        expected = "a list" if kind is list else "an object"
        raise WorkbenchError(f"in a JSON schema {name!r} is {expected}, got {value!r:.60}")
    return value


def _check_parts(root: dict[str, Any], targets: dict[str, object]) -> None:
    """Every keyword of every schema in it is known; what is referred to is put into targets."""
    waiting: list[object] = [root]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, bool) or id(node) in seen:
            continue
        seen.add(id(node))
        if not isinstance(node, dict):
            raise WorkbenchError(f"a JSON schema was expected inside the JSON schema, got {node!r:.60}")
        for name in node:
            _check_keyword(name)
        if "$ref" in node:
            reference = node["$ref"]
            target = _target(root, reference)
            targets[reference] = target
            waiting.append(target)
        waiting.extend(_inner(node))


def _check_keyword(name: str) -> None:
    if name in ENFORCED or name in _NOTES:
        return
    if name == "$id":
        raise WorkbenchError("the JSON schema has an $id; nothing is fetched or looked up by name here: take it out")
    if name in _UNSUPPORTED:
        raise WorkbenchError(
            f"the JSON schema uses {name!r}, which the grammar library cannot enforce; take it out, and check the "
            "finished text for it"
        )
    guess = nearest(name, ENFORCED)
    hint = f"; did you mean {guess!r}?" if guess else ""
    raise WorkbenchError(f"the JSON schema has an unknown keyword {name!r:.60}, which would be ignored{hint}")


def _target(root: dict[str, Any], reference: Any) -> object:
    """What a reference within the schema points at: "#" or a JSON pointer such as "#/$defs/node" (RFC 6901)."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise WorkbenchError(
            f"$ref {reference!r:.80} points out of the schema or to a name; only '#' and pointers such as "
            "'#/$defs/item' are followed, and nothing is fetched"
        )
    at: Any = root
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(at, list) and key.isdecimal() and len(key) < 7 and int(key) < len(at):
            at = at[int(key)]
        elif isinstance(at, dict) and key in at:
            at = at[key]
        else:
            raise WorkbenchError(f"$ref {reference!r:.80} points to nothing: there is no {key!r:.40}")
    return at


def _can_end(root: dict[str, Any], targets: dict[str, object]) -> bool:
    """Whether some finite value can satisfy the schema's structure: the least fixed point over its references.

    Only what recursion needs is looked at; contradictions between numbers, lengths and patterns are the library's.
    """
    ending: set[str] = set()
    looks = 0

    def ends(node: Any) -> bool:
        nonlocal looks
        looks += 1
        if looks > MAX_LOOKS:
            raise WorkbenchError("the references in this JSON schema are too entangled; make it smaller")
        if isinstance(node, bool):
            return True
        if "$ref" in node and node["$ref"] not in ending:
            return False
        if not all(map(ends, node.get("allOf", ()))):
            return False
        if any(node.get(name) and not any(map(ends, node[name])) for name in ("anyOf", "oneOf")):
            return False
        if "const" in node or "enum" in node or "type" not in node:
            return True
        types = node["type"] if isinstance(node["type"], list) else [node["type"]]
        return not types or any(_ends_as(node, kind, ends) for kind in types)

    while new := {name for name, node in targets.items() if name not in ending and ends(node)}:
        ending |= new
    return ends(root)


def _ends_as(node: dict[str, Any], kind: Any, ends: Callable[[Any], bool]) -> bool:
    if kind == "object":
        required, properties = node.get("required", ()), node.get("properties", {})
        if not isinstance(required, list | tuple) or "patternProperties" in node:
            return True  # the library's to refuse, or not to be seen from here
        others = node.get("additionalProperties", True)
        return all(ends(properties.get(name, others)) for name in required if isinstance(name, str))
    if kind == "array":
        least = node.get("minItems", 0)
        first = node.get("prefixItems", [])
        if not isinstance(least, int):
            return True
        return all(map(ends, first[: max(0, least)])) and (least <= len(first) or ends(node.get("items", True)))
    return True
