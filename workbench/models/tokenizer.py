"""Text to token ids and back, on top of the `tokenizers` library; our own 4,096-token BPE is made here."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from workbench.errors import WorkbenchError, check_path
from workbench.files import finish_saving, replacing_files, write_text

END_OF_TEXT = "<|endoftext|>"

# Words with the character before them ( .name, _name, (name ), digits one to three at a time, punctuation
# with the line ends behind it, indentation as one piece. The pattern of Llama 3's tokenizer, less English
# contractions.
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Tokenizer:
    """encode and decode. `end_of_text` is the id that stands between documents, or None."""

    def __init__(self, backend: tokenizers.Tokenizer, *, end_of_text: int | None) -> None:
        self.backend = backend
        self.backend.encode_special_tokens = True  # a prompt that spells a special token means its letters
        self.end_of_text = end_of_text

    @classmethod
    def from_folder(cls, folder: Path, *, end_of_text: int | None = None) -> Tokenizer | None:
        """The folder's tokenizer.json, or None when it has none. Raises WorkbenchError for an unreadable one."""
        file = check_path("folder", folder) / "tokenizer.json"
        finish_saving(folder)
        if not file.exists():
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for every kind of bad file
            raise WorkbenchError(f"{file} is not a tokenizer file: {error}") from error
        if end_of_text is None:
            end_of_text = backend.token_to_id(END_OF_TEXT)
        return cls(backend, end_of_text=end_of_text)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def same_as(self, other: Tokenizer) -> bool:
        """Whether token ids mean the same to both: every token, by its bytes."""
        return self is other or self._vocabulary == other._vocabulary

    @functools.cached_property
    def _vocabulary(self) -> dict[str, int]:
        return self.backend.get_vocab()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, no special tokens added. Special tokens' names in the text stay plain text.

        Raises WorkbenchError for what is no text that UTF-8 can write.
        """
        _check_text(text)
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a text that begins a request: with the special tokens this tokenizer's own file puts
        around a text, such as Llama's begin-of-text. Ours puts none. Raises as `encode`."""
        _check_text(text)
        return self.backend.encode(text, add_special_tokens=True).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids. Bytes that do not make up a whole character yet show as U+FFFD.

        Raises WorkbenchError for what is no list of ids."""
        if isinstance(ids, str | bytes | dict):
            raise WorkbenchError(f"token ids must be a list of whole numbers, got {ids!r:.80}")
        try:
            return self.backend.decode(list(ids), skip_special_tokens=False)
        except (TypeError, OverflowError) as error:
            raise WorkbenchError(
                f"token ids must be a list of whole numbers from 0, got {ids!r:.80}: {error}"
            ) from error

    def token_text(self, token_id: int) -> str:
        """One token as text, for tables and hovers: what `decode` gives for it alone."""
        return self.decode([token_id])

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and the tokenizer_config.json that transformers wants beside it."""
        end = self.backend.id_to_token(self.end_of_text) if self.end_of_text is not None else None
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False}
        with replacing_files(folder) as fresh:
            write_text(fresh / "tokenizer.json", self.backend.to_str(pretty=True))
            write_text(fresh / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise WorkbenchError(f"a text to encode must be a str, got {type(text).__name__}: {text!r:.80}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WorkbenchError(
            f"the text has half of a surrogate pair at character {error.start}, which no tokenizer reads; "
            "decode it with errors='replace'"
        ) from error


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """A byte-level BPE (Sennrich et al., arXiv 1508.07909; bytes as in GPT-2) with one special token."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(_SPLIT), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, end_of_text=backend.token_to_id(END_OF_TEXT))
