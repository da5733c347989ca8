"""Chat messages to one prompt.

A model that was trained on chats brings a template in its tokenizer_config.json, a Jinja text; it runs in Jinja's
sandbox, since a checkpoint is untrusted. A base model has none and knows no roles. It gets PLAIN: messages as comment
lines of the language that the shipped models read, so that clients that can only chat get some answer. Its honest
endpoint is /v1/completions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.serving.api.errors import ApiError
from workbench.serving.api.fields import MAX_NAME_CHARACTERS, read_text, unknown_field, wrong

ROLES = ("system", "developer", "user", "assistant")
MAX_MESSAGES, MAX_CHARACTERS = 1_024, 2**22
HONEST = (
    "a base model without a chat template: messages are put before it as comments, and it goes on writing;"
    " /v1/completions is its honest endpoint"
)
Message = Mapping[str, str]  # role, content


def plain(messages: Sequence[Message]) -> str:
    """PLAIN: "# user: …" lines, then the place where the assistant writes."""
    lines = []
    for message in messages:
        content = message["content"].replace("\n", "\n# ")
        lines.append(f"# {message['role']}: {content}\n")
    return "".join(lines) + "# assistant:"


class ChatTemplate:
    """messages -> prompt text. source: a Jinja template; None: PLAIN. special: texts of special tokens by name, such as
    bos_token. stop: texts that end an answer because the template's next turn begins with them."""

    def __init__(self, source: str | None = None, special: Mapping[str, str] | None = None) -> None:
        self.source, self._special = source, dict(special or {})
        self.stop = () if source is not None else ("\n# user:", "\n# system:")
        self._template: Any = None if source is None else _compiled(source)

    @classmethod
    def from_folder(cls, folder: Path | None) -> ChatTemplate:
        """What a checkpoint's tokenizer_config.json or chat_template.jinja says, else PLAIN."""
        if folder is None:
            return cls()
        config: Any = {}
        file = folder / "tokenizer_config.json"
        try:
            config = json.loads(file.read_text("utf-8")) if file.is_file() else {}
            own = folder / "chat_template.jinja"
            source = own.read_text("utf-8") if own.is_file() else config.get("chat_template")
        except (OSError, ValueError, AttributeError) as error:
            raise WorkbenchError(f"the chat template of {folder} cannot be read: {error}") from error
        if isinstance(source, list):  # several, by name
            source = next((one.get("template") for one in source if one.get("name") == "default"), None)
        special = {
            name: value.get("content", "") if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        return cls(source if isinstance(source, str) else None, special)

    def __call__(self, messages: Sequence[Message]) -> str:
        if self._template is None:
            return plain(messages)
        try:
            text = self._template.render(messages=list(messages), add_generation_prompt=True, **self._special)
        except Exception as error:  # of the template: it refuses roles, or their order
            raise ApiError(f"the model's chat template refuses these messages: {error}", param="messages") from error
        return str(text)


def _compiled(source: str) -> Any:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    sandbox.globals["raise_exception"] = raise_exception
    try:
        return sandbox.from_string(source)
    except TemplateError as error:
        raise WorkbenchError(f"the model's chat template is no Jinja template: {error}") from error


def read_messages(given: Any) -> list[dict[str, str]]:
    """Checked: roles that are known, content as text or as a list of text parts."""
    if not isinstance(given, list) or not given:
        raise wrong("messages", "a list of at least one message", given)
    if len(given) > MAX_MESSAGES:
        raise ApiError(f"messages must be at most {MAX_MESSAGES:,}, got {len(given):,}", param="messages")
    return [_message(f"messages[{at}]", message) for at, message in enumerate(given)]


def _message(name: str, given: Any) -> dict[str, str]:
    if not isinstance(given, dict):
        raise wrong(name, "an object with role and content", given)
    for key in given:
        if key not in ("role", "content", "name", "refusal", "annotations") or (
            key in ("refusal", "annotations") and given[key]
        ):
            raise unknown_field(f"{name}.{key}", {"role": 0, "content": 0, "name": 0}, prefix=f"{name}.")
    if given.get("name") is not None:
        read_text(f"{name}.name", given["name"], MAX_NAME_CHARACTERS)
    role = given.get("role")
    if role not in ROLES:
        raise wrong(f"{name}.role", f"one of {', '.join(ROLES)}", role)
    return {"role": role, "content": _content(f"{name}.content", given.get("content"))}


def _content(name: str, given: Any) -> str:
    if isinstance(given, str):
        return read_text(name, given, MAX_CHARACTERS)
    if not isinstance(given, list) or not given:
        raise wrong(name, "a text, or a list of parts of type text", given)
    parts = []
    for at, part in enumerate(given):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise wrong(f"{name}[{at}]", 'an object such as {"type": "text", "text": "…"}', part)
        parts.append(read_text(f"{name}[{at}].text", part.get("text"), MAX_CHARACTERS))
    return "".join(parts)
