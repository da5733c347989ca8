"""A token's bytes, and its text beside log-probabilities: "bytes:\\xe2\\x80" for a part of a character, as OpenAI's."""

from __future__ import annotations

import functools
import re

from workbench.decoding.text import BROKEN
from workbench.models.tokenizer import Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # of tokenizers that fall back to bytes, as Llama 2's


@functools.cache
def _byte_of() -> dict[str, int]:
    """Of byte-level tokenizers: which byte each character of a token's name stands for (Radford et al., GPT-2)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes that a token stands for; those of its text, where that is whole."""
    text = tokenizer.token_text(token_id)
    if BROKEN not in text:
        return text.encode()
    name = tokenizer.backend.id_to_token(token_id) or ""
    if match := BYTE_TOKEN.fullmatch(name):
        return bytes([int(match[1], 16)])
    table = _byte_of()
    return bytes(table[c] for c in name) if all(c in table for c in name) else text.encode()


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    text = tokenizer.token_text(token_id)
    if BROKEN not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes(tokenizer, token_id))
