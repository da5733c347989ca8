"""Guided generation: a grammar says which tokens may come next, and where there is no choice no model is asked.

The grammar work is done by llguidance (https://github.com/guidance-ai/llguidance), imported when a guide is made.

**The distribution of guided text.** At each step the model's probabilities of the tokens that the grammar forbids are
set to zero and the rest divided by their sum, so a text t₁ … tₙ has the probability Π p(tᵢ | before) / Z(before), where
Z is the share of allowed tokens there. This is *not* the model's own distribution given that the text fits the grammar:
that would be Π p(tᵢ | before) / (probability that the model writes some fitting text). They differ because the mask
cannot see ahead: a first token that the model likes stays likely, however badly the grammar forces it to go on. To draw
from the other distribution one must weigh whole texts (Park et al., arXiv 2405.21047; Lipkin et al., arXiv 2504.05410).
What speculation keeps exactly is the masked distribution.

**Jump-forward.** Two kinds, see `GuideState.forced`.
- exact: only one *token* is allowed, so it has probability 1 under the mask. Nothing changes but the model calls.
- text: only one *text* can follow, say `{"name": "`, and the tokenizer's own tokens for it are taken. Under the mask a
  text can be written in several ways, {"name" as `{` `"` `name` or `{` `"` `n` `ame`, and the model would have chosen
  among them by their probabilities. Skipping that choice leaves the forced characters as they are, but the model then
  goes on after other tokens, so the distribution of what follows may differ. It is much more often possible, and the
  tokens are the ones that the model saw in training.

llguidance by itself mixes the two: while its text is forced its mask allows the tokenizer's own token alone. Here
`allowed` never does that (the option no_forcing), and text-level forcing is asked for by name.
"""

from __future__ import annotations

import copy
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from workbench.decoding import guide_trial
from workbench.decoding.guide_schema import checked_schema
from workbench.errors import WorkbenchError, check_whole, unknown
from workbench.models.fast import Model
from workbench.models.tokenizer import Tokenizer

NO_FORCING = '%llguidance {"no_forcing": true}\n'
MAX_REGEX_CHARACTERS = 16_384
MAX_LARK_CHARACTERS = 65_536
MAX_FORCED = 256  # tokens that one call of `forced` returns
_KEPT_MASKS = 128  # of a state: more than the nodes of a draft tree


@dataclass(frozen=True, eq=False)
class Guide:
    """A grammar over the tokens of one tokenizer. It never changes; `begin` gives each request a state of its own.

    Make one with `json_schema`, `regex` or `grammar`. A source that cannot be enforced in full, that no text satisfies
    or that asks for too much work is refused with a WorkbenchError, within a second on an idle machine for the shipped
    tokenizer (a large one takes longer to read, and is read twice): sizes are bounded first, then the grammar is tried
    out in a process of its own that is ended when it takes too long (`guide_trial`). What only a later step of some
    text reaches is bounded by the library's limits, and raises there.
    """

    kind: str  # "json_schema", "regex" or "grammar"
    source: str
    vocab_size: int  # V of the masks
    end_token_ids: tuple[int, ...]
    _lark: str = field(repr=False)  # what the library reads,
    _tokens: Any = field(repr=False)  # and its own form of the tokenizer
    _never: frozenset[int] = field(repr=False)  # in no text: special tokens, the end tokens among them

    @classmethod
    def json_schema(
        cls,
        schema: dict[str, Any] | str,
        tokenizer: Tokenizer,
        *,
        separators: tuple[str, str] = (", ", ": "),
        end_token_ids: Sequence[int] | None = None,
        vocab_size: int | None = None,
    ) -> Guide:
        """JSON that satisfies a schema (of JSON Schema 2020-12, what guide_schema.ENFORCED lists).

        Properties come in the schema's order, on one line, with the separators of json.dumps: (",", ":") is the
        compact form. Free white space would be a choice at every comma, and small models get lost in it.
        A key that only additionalProperties describes may come twice; everything else holds.
        """
        root = checked_schema(schema)
        item, key = _separators(separators)
        options = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
        lark = "start: %json " + json.dumps(root | {"x-guidance": options})
        source = json.dumps(root, ensure_ascii=False)
        return cls._made("json_schema", source, lark, tokenizer, end_token_ids, vocab_size)

    @classmethod
    def regex(
        cls,
        pattern: str,
        tokenizer: Tokenizer,
        *,
        end_token_ids: Sequence[int] | None = None,
        vocab_size: int | None = None,
    ) -> Guide:
        """A text that the pattern matches from its first to its last character.

        The syntax is Rust's regex crate's: no look-around, no back-references; matching time is linear, always.
        """
        _check_source("regex", pattern, MAX_REGEX_CHARACTERS)
        _check_what_the_library_would_drop(pattern)
        lark = "start: /" + _library().regex_to_lark(pattern, use_ascii="") + "/" if pattern else 'start: ""'
        return cls._made("regex", pattern, lark, tokenizer, end_token_ids, vocab_size)

    @classmethod
    def grammar(
        cls,
        lark: str,
        tokenizer: Tokenizer,
        *,
        end_token_ids: Sequence[int] | None = None,
        vocab_size: int | None = None,
    ) -> Guide:
        """A context-free grammar in llguidance's variant of Lark; the rule `start` is the whole text.

        Not taken: rule options in brackets, %json, %llguidance, special tokens. Not noticed: recursion that never ends,
        such as `start: "a" start`, under which a text grows until its limit.
        """
        _check_source("grammar", lark, MAX_LARK_CHARACTERS)
        found = re.search(r"%(json|llguidance|regex|lark)\b|^[ \t]*[?!]?[\w-]+[ \t]*\[.*", lark, re.MULTILINE)
        if found:
            raise WorkbenchError(
                f"a grammar here is rules, terminals and %ignore; {found.group().strip()!r:.60} is not taken: leave it "
                "out, and use Guide.json_schema for JSON"
            )
        return cls._made("grammar", lark, lark, tokenizer, end_token_ids, vocab_size)

    @classmethod
    def _made(
        cls,
        kind: str,
        source: str,
        lark: str,
        tokenizer: Tokenizer,
        end_token_ids: Sequence[int] | None,
        vocab_size: int | None,
    ) -> Guide:
        if not isinstance(tokenizer, Tokenizer):
            raise WorkbenchError(
                f"a guide needs the model's Tokenizer, got {type(tokenizer).__name__}: a model without one writes no"
                " text"
            )
        size = tokenizer.vocab_size if vocab_size is None else check_whole("vocab_size", vocab_size, 1)
        ends = _end_tokens(tokenizer, end_token_ids, size)
        library, tokenizer_json = _library(), tokenizer.backend.to_str()
        try:
            tokens = guide_trial.make_tokenizer(library, tokenizer_json, ends)
        except Exception as error:  # the library raises that, too, for kinds that it does not know
            raise WorkbenchError(f"this tokenizer cannot be guided, the grammar library says: {error}") from error
        if wrong := guide_trial.try_out(tokenizer_json, ends, NO_FORCING + lark, lark):
            raise _refused(kind, wrong)
        known = min(tokens.vocab_size, tokenizer.vocab_size, size)
        never = {*ends, *range(known, size), *filter(tokens.is_special_token, range(known))}
        made = cls(kind, source, size, ends, lark, tokens, frozenset(never))
        if not made.begin().allowed(()).any():
            raise _refused(kind, "no token of the vocabulary can begin such a text")
        return made

    def begin(self) -> GuideState:
        """A state at the start of a text, for one request. The grammar is compiled for it: most take milliseconds.

        The library's copies of a matcher share its lexer, and one that gives up takes the others with it.
        """
        return GuideState(self)


class GuideState:
    """Where one request's text stands in its guide. Every question names the tokens generated so far, all of them.

    Questions may come in any order: along a text, back to an earlier place, across the branches of a draft tree. The
    state walks back to where the last text and this one part, and on from there; the latest masks are kept. Not for
    several threads at once.

    Raises WorkbenchError where the library gives up on a grammar that is too complex at this place; the state goes on
    working for other texts.
    """

    def __init__(self, guide: Guide) -> None:
        self.guide = guide
        self._plain = _Place(lambda: _matcher(guide, NO_FORCING))
        self._forcing = _Place(lambda: _matcher(guide, ""))
        self._masks: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()

    def allowed(self, generated_ids: Sequence[int]) -> torch.Tensor:
        """bool [V]: tokens that may follow; the caller's to keep. An end token may exactly where the text may end.

        No special token but the end is ever allowed. All False after a text that was not allowed itself, and after an
        end token; also where a vocabulary without single bytes has no token to go on.
        """
        return self._mask(tuple(generated_ids)).clone()

    def forced(self, generated_ids: Sequence[int], exact: bool) -> list[int]:
        """Tokens that follow without a choice, at most MAX_FORCED; never an end token, for that ask `finished`.

        exact=True: each is the only allowed one after those before it. Under the mask it has probability 1, so that
        the distribution of tokens is unchanged, whatever the model.
        exact=False: the only text that can follow, in the tokenizer's own tokens; its last characters are left out
        while what comes later could change their tokens. The distribution of texts may change, see the head of this
        file.
        """
        ids = tuple(generated_ids)
        if not exact:
            if not self._mask(ids).any():
                return []
            legal = self._forcing.move_to(ids)
            assert legal, "what the plain matcher allows the forcing one allows too"
            return self._forcing.ask("compute_ff_tokens")[:MAX_FORCED]
        found: list[int] = []
        while len(found) < MAX_FORCED:
            mask = self._mask((*ids, *found))
            token = int(mask.byte().argmax())
            if int(mask.sum()) != 1 or token in self.guide.end_token_ids:
                break
            found.append(token)
        return found

    def finished(self, generated_ids: Sequence[int]) -> bool:
        """Whether nothing but an end token may follow."""
        mask = self._mask(tuple(generated_ids)).clone()
        may_end = bool(mask.any())
        mask[list(self.guide.end_token_ids)] = False
        return may_end and not bool(mask.any())

    def _mask(self, ids: tuple[int, ...]) -> torch.Tensor:
        if ids in self._masks:
            self._masks.move_to_end(ids)
        else:
            self._masks[ids] = self._fresh_mask(ids)
            if len(self._masks) > _KEPT_MASKS:
                self._masks.popitem(last=False)
        return self._masks[ids]

    def _fresh_mask(self, ids: tuple[int, ...]) -> torch.Tensor:
        guide = self.guide
        mask = torch.zeros(guide.vocab_size, dtype=torch.bool)
        if ids and not (min(ids) >= 0 and max(ids) < guide.vocab_size and guide._never.isdisjoint(ids)):
            return mask  # such a text is not allowed, or it has ended
        if not self._plain.move_to(ids):
            return mask
        bits = _bits(self._plain.ask("compute_bitmask"))[: len(mask)]
        mask[: len(bits)] = bits
        mask[list(guide._never)] = False
        mask[list(guide.end_token_ids)] = self._plain.ask("is_accepting")
        return mask


class _Place:
    """A matcher, made when it is first asked, and the tokens that it has read."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._matcher = make, None
        self._read: tuple[int, ...] = ()

    def move_to(self, ids: tuple[int, ...]) -> bool:
        """Read ids instead of what was read: back to where they part, then forward. False where they are illegal."""
        if ids[: len(self._read)] != self._read:
            pairs = enumerate(zip(self._read, ids))
            same = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(self._read)))
            self.ask("rollback", len(self._read) - same)
            self._read = self._read[:same]
        rest = list(ids[len(self._read) :])
        count = self.ask("try_consume_tokens", rest) if rest else 0
        self._read = ids[: len(self._read) + count]
        if count < len(rest) and _bits(self.ask("compute_bitmask"))[rest[count]]:
            self._give_up("it met a limit while it read")  # all that shows is that it refuses what it allows
        return count == len(rest)

    def ask(self, question: str, *what: Any) -> Any:
        """A method of the matcher. Raises WorkbenchError when the library gives up."""
        if self._matcher is None:
            self._matcher, self._read = self._make(), ()
        matcher: Any = self._matcher
        answer = getattr(matcher, question)(*what)
        if matcher.is_error():
            self._give_up(_reason(matcher.get_error()))
        return answer

    def _give_up(self, why: str) -> None:
        self._matcher, self._read = None, ()  # no error ever leaves a matcher: another is made
        raise WorkbenchError(f"the grammar became too complex for the grammar library at this place: {why}")


def _matcher(guide: Guide, options: str) -> Any:
    return guide_trial.make_matcher(_library(), guide._tokens, options + guide._lark)


def _bits(packed: bytes) -> torch.Tensor:
    """bool [8·bytes], the lowest bit of each byte first."""
    numbers = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    return (numbers[:, None] >> torch.arange(8, dtype=torch.uint8)).bitwise_and_(1).flatten().bool()


def _library() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise WorkbenchError(
            "guided generation needs the package llguidance, which is not installed: pip install llguidance"
        ) from None
    return llguidance


def _check_source(kind: str, text: object, max_characters: int) -> None:
    if not isinstance(text, str):
        raise WorkbenchError(f"a {kind} is a string, got {type(text).__name__}")
    if len(text) > max_characters:
        raise WorkbenchError(
            f"a {kind} may have {max_characters:,} characters, this one has {len(text):,}; make it shorter"
        )
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise WorkbenchError(f"the {kind} contains U+0000 or half of a surrogate pair, which no tokenizer writes")


def _check_what_the_library_would_drop(pattern: str) -> None:
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise WorkbenchError(f"the regex ends with a backslash that escapes nothing: {pattern[-40:]!r}")
    if "\n" in pattern and re.search(r"\(\?[A-Za-z]*x", pattern):
        raise WorkbenchError("a regex of several lines with the flag x is not read here; write it without (?x)")


def _separators(given: Any) -> tuple[str, str]:
    """As regexes: they are spaces around the comma and the colon, which mean themselves."""
    good = (
        isinstance(given, tuple | list)
        and len(given) == 2
        and all(isinstance(text, str) and len(text) <= 8 for text in given)
        and (given[0].strip(" "), given[1].strip(" ")) == (",", ":")
    )
    if not good:
        raise WorkbenchError(f"separators are a comma and a colon with spaces around, (', ', ': '); got {given!r:.60}")
    return given[0], given[1]


def _end_tokens(tokenizer: Tokenizer, given: Sequence[int] | None, size: int) -> tuple[int, ...]:
    if given is None:
        given = () if tokenizer.end_of_text is None else (tokenizer.end_of_text,)
    ends = tuple(dict.fromkeys(check_whole("each of end_token_ids", token, 0) for token in given))
    if not ends:
        raise WorkbenchError("a guide needs an end token, and this tokenizer names none; give end_token_ids")
    if max(ends) >= min(size, tokenizer.vocab_size):
        raise WorkbenchError(f"end token id {max(ends)} is outside 0 … {min(size, tokenizer.vocab_size) - 1}")
    return ends


def _refused(kind: str, wrong: str) -> WorkbenchError:
    name = {"json_schema": "JSON schema", "regex": "regex", "grammar": "grammar"}[kind]
    return WorkbenchError(f"this {name} cannot guide a text: {_reason(wrong)}")


_STOPS = {
    "NoExtensionBias": "no text satisfies it",
    "NoExtension": "no text satisfies it",
    "ParserTooComplex": "it is too complex",
    "LexerTooComplex": "it is too complex",
}


def _reason(message: str) -> str:
    """The library's own words, without its listings of grammar and state."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    chosen = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    chosen = re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", chosen)
    return _STOPS.get(chosen, chosen if len(chosen) <= 300 else chosen[:120] + " … " + chosen[-160:])


# -- a grammar and one sequence -----------------------------------------------------------------------------


JUMPS = ("tokens", "text", "never")


def check_guide(guide: object, jump: object) -> None:
    """Raise WorkbenchError for what is no guide, and for an unknown jump."""
    if isinstance(guide, type) or not callable(getattr(guide, "begin", None)):
        raise WorkbenchError(f"guide takes a workbench.decoding.Guide, got {type(guide).__name__}")
    if jump is not None and not (isinstance(jump, str) and jump in JUMPS):
        raise unknown("jump", jump, JUMPS)


def end_tokens_of(guide: Guide, model: Model) -> tuple[int, ...]:
    """The tokens that end a guided text. Raises WorkbenchError for a model without a tokenizer."""
    end = None if model.tokenizer is None else model.tokenizer.end_of_text
    if end is None:
        raise WorkbenchError(
            f"a grammar is about text and its end, and model {model.name!r} has no tokenizer with an end of text"
        )
    return tuple(dict.fromkeys((end, *getattr(guide, "end_token_ids", ()))))


class GuidedSequence:
    """A grammar's state of one sequence, and how far it may jump. See `generate`'s guide and jump (None: "tokens")."""

    def __init__(self, guide: Guide, model: Model, jump: str | None = None) -> None:
        check_guide(guide, jump)
        self.end_token_ids = end_tokens_of(guide, model)
        self._guide, self._jump = guide, jump or "tokens"
        self._state: GuideState | None = guide.begin()
        if (count := len(self._state.allowed([]))) != model.config.vocab_size:
            raise WorkbenchError(
                f"the guide speaks of {count:,} tokens, model {model.name!r} has {model.config.vocab_size:,}; make it"
                " with the model's tokenizer"
            )

    def again(self) -> GuidedSequence:
        """For another sequence: with a state of its own, which begins when it is first asked."""
        other = copy.copy(self)
        other._state = None
        return other

    def allowed(self, generated_ids: Sequence[int]) -> torch.Tensor:
        return self._begun().allowed(generated_ids)

    def forced(self, generated_ids: Sequence[int]) -> list[int]:
        if self._jump == "never":
            return []
        return self._begun().forced(generated_ids, exact=self._jump == "tokens")

    def _begun(self) -> GuideState:
        if self._state is None:
            self._state = self._guide.begin()
        return self._state
