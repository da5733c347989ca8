"""Claims about guided generation: masks against brute force, the masked distribution, jump-forward, and what is
refused."""

from __future__ import annotations

import functools
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from hashlib import sha256

import jsonschema
import llguidance
import pytest
import tokenizers
import torch

from workbench.decoding import guide_trial
from workbench.decoding.guide import MAX_FORCED, Guide
from workbench.decoding.guide_schema import ENFORCED
from workbench.errors import WorkbenchError
from workbench.models.checkpoints import shipped_tokenizer
from workbench.models.tokenizer import END_OF_TEXT, Tokenizer, train_tokenizer

RECORD = {
    "type": "object",
    "properties": {
        "module": {"type": "string", "pattern": "^[a-z_]{1,12}$"},
        "function": {"type": "string", "pattern": "^[a-z_]{1,12}$"},
        "line_number": {"type": "integer", "minimum": 1, "maximum": 9999},
        "severity": {"enum": ["information", "warning", "error"]},
        "deprecated": {"type": "boolean"},
    },
    "required": ["module", "function", "line_number", "severity", "deprecated"],
    "additionalProperties": False,
}
RECORD_TEXT = '{"module": "os", "function": "walk", "line_number": 281, "severity": "warning", "deprecated": false}'


IN_ANOTHER_PROCESS = guide_trial.try_out


@pytest.fixture
def limited(monkeypatch):
    """The trial as it is; for hostile sources."""
    monkeypatch.undo()
    assert guide_trial.try_out is IN_ANOTHER_PROCESS


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    """The trial without its process, and so without limits: the same answers, quicker."""

    def try_out(tokenizer_json: str, ends: Sequence[int], plain: str, forcing: str) -> str | None:
        request = {"tokenizer": tokenizer_json, "ends": list(ends), "plain": plain, "forcing": forcing}
        return guide_trial.trouble(llguidance, json.loads(json.dumps(request)), time.process_time)

    monkeypatch.setattr(guide_trial, "limit_this_process", lambda: None)
    monkeypatch.setattr(guide_trial, "try_out", try_out)


@pytest.fixture(scope="module")
def shipped() -> Tokenizer:
    return shipped_tokenizer()


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    """All 256 bytes, the end, and a few merges among a, b, c and the bytes of é."""
    return train_tokenizer(["abab abc ab bc cab é é éa"] * 40, vocab_size=268)


def only(tokens: Sequence[str], *special: str) -> Tokenizer:
    """A vocabulary of these tokens alone, single bytes and pairs of them; most texts cannot be written with it."""
    names = [END_OF_TEXT, *special, *tokens]
    merges = [tuple(token) for token in tokens if len(token) == 2]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({name: i for i, name in enumerate(names)}, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in (END_OF_TEXT, *special)])
    return Tokenizer(backend, end_of_text=0)


# -- brute force --------------------------------------------------------------------------------------------------


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Token id -> its bytes, special tokens left out: GPT-2's alphabet of printable characters read back."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
    special = tokenizer.backend.get_added_tokens_decoder()
    return {
        token: bytes(letters[letter] for letter in name)
        for name, token in tokenizer.backend.get_vocab().items()
        if token not in special
    }


class Language:
    """A finite language as a list of texts: what may follow, by looking at every token and every text."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        self.texts = [text.encode() for text in texts]
        self.tokens, self.end = token_bytes(tokenizer), tokenizer.end_of_text
        self.after = functools.cache(self._after)

    def allowed(self, ids: Sequence[int]) -> set[int]:
        return self.after(b"".join(self.tokens[token] for token in ids))

    def after_text(self, ids: Sequence[int]) -> list[bytes]:
        """The texts that begin with these tokens' bytes."""
        so_far = b"".join(self.tokens[token] for token in ids)
        return [text for text in self.texts if text.startswith(so_far)]

    def _after(self, so_far: bytes) -> set[int]:
        rests = [text[len(so_far) :] for text in self.texts if text.startswith(so_far)]
        found = {t for t, own in self.tokens.items() if any(rest.startswith(own) for rest in rests)}
        return found | ({self.end} if b"" in rests else set())

    def places(self, ids: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
        """Every list of tokens that begins some text, the empty one first."""
        yield ids
        for token in sorted(self.allowed(ids) - {self.end}):
            yield from self.places((*ids, token))


def as_set(mask: torch.Tensor) -> set[int]:
    return set(mask.nonzero().flatten().tolist())


LANGUAGES = {
    "abc|abd": ["abc", "abd"],
    "(ab){0,3}c?": [a + c for a in ("", "ab", "abab", "ababab") for c in ("", "c")],
    "a?b?c?": ["".join(p) for p in itertools.product(("", "a"), ("", "b"), ("", "c"))],
    "é|ê|éa|日": ["é", "ê", "éa", "日"],
    "^(?i:if)$": ["if", "If", "iF", "IF"],
    '/\\*[#"]\\\\\\n\n': ["/*#\\\n\n", '/*"\\\n\n'],
    "": [""],
}


@pytest.mark.parametrize("pattern", LANGUAGES)
@pytest.mark.parametrize("vocabulary", ["shipped", "tiny"])
def test_the_mask_is_what_brute_force_over_the_vocabulary_finds(pattern, vocabulary, request):
    """At every place of every text in every tokenization. The library's own mask, with forcing, is smaller."""
    tokenizer = request.getfixturevalue(vocabulary)
    language = Language(LANGUAGES[pattern], tokenizer)
    state = Guide.regex(pattern, tokenizer).begin()
    places = list(language.places())
    assert len(places) >= max(map(len, language.texts))
    for place in places:
        assert as_set(state.allowed(place)) == language.allowed(place), place
        forced = b"".join(language.tokens[t] for t in (*place, *state.forced(place, exact=False)))
        assert all(text.startswith(forced) for text in language.after_text(place)), "and a forced text is forced"


def test_the_mask_of_a_schema_is_what_brute_force_finds(shipped):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, None, "é"]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    values = [{"ok": ok, "n": n} for ok in (True, False) for n in (1, None, "é")]
    values += [{"n": n} for n in (1, None, "é")]
    language = Language([json.dumps(v, ensure_ascii=False) for v in values], shipped)
    state = Guide.json_schema(schema, shipped).begin()
    chance = random.Random(3)
    for _ in range(12):
        ids: tuple[int, ...] = ()
        while (expected := language.allowed(ids)) != {shipped.end_of_text}:
            # é may be written as an escape too, which the list of texts does not know
            seen = as_set(state.allowed(ids))
            assert expected <= seen and all(b"\\" in language.tokens[t] for t in seen - expected)
            ids = (*ids, chance.choice(sorted(expected - {shipped.end_of_text})))
        assert state.finished(ids) and as_set(state.allowed(ids)) == {shipped.end_of_text}


def test_a_character_may_be_split_over_tokens(shipped):
    ids = shipped.encode("日本語")
    assert len(ids) > 3, "characters of three bytes that the tokenizer writes in pieces"
    state = Guide.regex("日本語!?", shipped).begin()
    for n in range(len(ids)):
        assert state.allowed(ids[:n])[ids[n]] and not state.allowed(ids[:n])[shipped.end_of_text]
    assert as_set(state.allowed(ids)) == {shipped.end_of_text, shipped.encode("!")[0]}


# -- states -------------------------------------------------------------------------------------------------------


def test_answers_do_not_depend_on_the_order_of_the_questions(shipped):
    """Forward, back, across branches, illegal texts between: each answer is a fresh state's."""
    guide = Guide.json_schema(RECORD, shipped)
    one = shipped.encode(RECORD_TEXT)
    other = shipped.encode(RECORD_TEXT.replace("os", "io").replace("warning", "error"))
    wrong = [*one[:9], 4000, *one[10:]]
    questions = [(*ids[:n],) for ids in (one, other, wrong) for n in range(0, len(ids) + 1, 3)]
    questions += [(*one, 0), (*one, 0, 0), (0,), (-1,), (4096,), (*one[:4], -5)]
    fresh = {ids: guide.begin() for ids in questions}
    expected = {
        ids: (s.allowed(ids), s.forced(ids, True), s.forced(ids, False), s.finished(ids)) for ids, s in fresh.items()
    }
    assert len({tuple(map(str, e[1:])) for e in expected.values()}) > 5
    state, chance = guide.begin(), random.Random(0)
    for ids in chance.choices(questions, k=6 * len(questions)):
        mask, exact, text, finished = expected[ids]
        match chance.randrange(3):
            case 0:
                assert torch.equal(state.allowed(ids), mask)
            case 1:
                assert state.forced(list(ids), exact=True) == exact and state.finished(ids) == finished
            case 2:
                assert state.forced(ids, exact=False) == text


@pytest.mark.parametrize("wrong", [(4000,), (-1,), (4096,), (0,), (67, 0), (65, 66, 67, 0, 0)])
def test_after_an_illegal_text_nothing_is_allowed(wrong, shipped):
    assert shipped.encode("abc") != list(wrong[:3])
    state = Guide.regex("abc|abd", shipped).begin()
    assert not state.allowed(wrong).any() and not state.finished(wrong)
    assert state.forced(wrong, exact=True) == state.forced(wrong, exact=False) == []
    assert state.allowed([]).any()


def test_what_is_handed_out_is_the_callers(shipped):
    state = Guide.regex("abc|abd", shipped).begin()
    state.allowed([]).fill_(True)
    state.forced([], exact=False).append(1)
    assert 0 < int(state.allowed([]).sum()) < 5


def test_requests_do_not_disturb_one_another(shipped):
    guide = Guide.regex("abc|xyz", shipped)
    one, other = guide.begin(), guide.begin()
    a, x = shipped.encode("a"), shipped.encode("x")
    assert one.allowed(a).any() and other.allowed(x).any()
    assert not one.allowed([*a, *x]).any() and one.allowed(a).any()
    with pytest.raises(AttributeError):
        guide.source = "other"


def test_no_special_token_but_the_end_is_ever_allowed():
    tokenizer = only(["a", "b", "ab"], "<|pad|>", "<|tool|>")
    for guide in (
        Guide.regex("(?s:.*)", tokenizer),
        Guide.grammar("start: A*\nA: /[^c]/", tokenizer),
        Guide.grammar('start: "a" | <|pad|> "b" | /b*/', tokenizer),
    ):
        assert as_set(guide.begin().allowed([])) == {0, 3, 4, 5} - ({5} if "pad" in guide.source else set())


def test_several_end_tokens_and_a_wider_model(shipped):
    tokenizer = only(["a", "b"], "<|turn|>")
    state = Guide.regex("a?", tokenizer, end_token_ids=[1, 0], vocab_size=64).begin()
    assert len(state.allowed([])) == 64 and as_set(state.allowed([])) == {0, 1, 2}
    assert as_set(state.allowed([2])) == {0, 1} and state.finished([2])
    assert not state.allowed([2, 1]).any() and not state.allowed([9]).any()


# -- the distribution of guided text ---------------------------------------------------------------------------------

Distribution = Callable[[tuple[int, ...]], dict[int, Fraction]]


def random_distribution(size: int, seed: int) -> Distribution:
    """A distribution of the next token that depends on all before it, tokens as such, not just their text."""

    def distribution(ids: tuple[int, ...]) -> dict[int, Fraction]:
        chance = random.Random(sha256(repr((seed, ids)).encode()).digest())
        weights = [chance.randint(1, 99) ** 2 for _ in range(size)]
        return {token: Fraction(weight, sum(weights)) for token, weight in enumerate(weights)}

    return distribution


def masked_distribution(
    distribution: Distribution, allowed: Callable, end: int, forced: Callable = lambda ids: []
) -> dict[tuple[int, ...], Fraction]:
    """Of every token list: the distribution of sampling step by step under a mask, and jumping over what is forced."""
    found: dict[tuple[int, ...], Fraction] = {}
    waiting = [((), Fraction(1))]
    while waiting:
        ids, share = waiting.pop()
        ids = (*ids, *forced(ids))
        may = allowed(ids)
        p = distribution(ids)
        total = sum(p[token] for token in may)
        for token in may:
            if token == end:
                found[ids] = found.get(ids, Fraction(0)) + share * p[token] / total
            else:
                waiting.append(((*ids, token), share * p[token] / total))
    return found


TEXTS = ["abc", "abab", "abé", "cab"]


@pytest.fixture(scope="module")
def small(tiny):
    return Guide.regex("|".join(TEXTS), tiny), Language(TEXTS, tiny), random_distribution(tiny.vocab_size, 1)


def test_guided_sampling_has_the_masked_distribution_and_not_the_models_distribution_given_the_grammar(small):
    guide, language, distribution = small
    state, end = guide.begin(), language.end
    guided = masked_distribution(distribution, lambda ids: as_set(state.allowed(ids)), end)
    assert sum(guided.values()) == 1
    expected, unmasked = {}, {}
    for ids in language.places():  # each place by itself: the product of the allowed tokens' shares
        if end not in language.allowed(ids):
            continue
        expected[ids] = unmasked[ids] = Fraction(1)
        for n, token in enumerate((*ids, end)):
            p = distribution(ids[:n])
            unmasked[ids] *= p[token]
            expected[ids] *= p[token] / sum(p[t] for t in language.allowed(ids[:n]))
    assert guided == expected and len(guided) > 8
    given_the_grammar = {ids: p / sum(unmasked.values()) for ids, p in unmasked.items()}
    assert guided != given_the_grammar
    assert max(abs(guided[ids] - given_the_grammar[ids]) for ids in guided) > Fraction(1, 20)


def test_an_exact_jump_changes_no_distribution(small):
    guide, language, distribution = small
    state, asked = guide.begin(), []
    plain = masked_distribution(distribution, lambda ids: as_set(state.allowed(ids)), language.end)
    jumped = masked_distribution(
        lambda ids: asked.append(ids) or distribution(ids),
        lambda ids: as_set(state.allowed(ids)),
        language.end,
        lambda ids: state.forced(ids, exact=True),
    )
    assert jumped == plain
    assert len(asked) < len(set(language.places())), "and some places need no model"


def test_a_jump_by_text_changes_the_distribution_but_no_text_becomes_illegal(tiny):
    """ab; is forced, and may be written `ab` `;` or `a` `b` `;`: the model goes on differently after the two."""
    language = Language(["ab;a", "ab;b", "ab;é"], tiny)
    distribution, state = random_distribution(tiny.vocab_size, 2), Guide.regex("ab;[abé]", tiny).begin()
    assert state.forced([], exact=False) == tiny.encode("ab;") and state.forced([], exact=True) == []
    plain = masked_distribution(distribution, lambda ids: as_set(state.allowed(ids)), language.end)
    jumped = masked_distribution(
        distribution, lambda ids: as_set(state.allowed(ids)), language.end, lambda ids: state.forced(ids, exact=False)
    )

    def of_texts(of_tokens: dict) -> dict[bytes, Fraction]:
        found: dict[bytes, Fraction] = {}
        for ids, p in of_tokens.items():
            text = b"".join(language.tokens[token] for token in ids)
            found[text] = found.get(text, Fraction(0)) + p
        return found

    assert set(of_texts(jumped)) == set(of_texts(plain)) == set(language.texts)
    assert sum(jumped.values()) == 1 and of_texts(jumped) != of_texts(plain)


# -- jump-forward -------------------------------------------------------------------------------------------------


def test_exactly_forced_tokens_are_each_the_only_allowed_one(shipped):
    guide = Guide.json_schema(RECORD, shipped)
    state, fresh = guide.begin(), guide.begin()
    ids, seen = [], 0
    for token in shipped.encode(RECORD_TEXT):
        forced = state.forced(ids, exact=True)
        for n, one in enumerate(forced):
            assert as_set(fresh.allowed([*ids, *forced[:n]])) == {one} and one != shipped.end_of_text
        after = as_set(fresh.allowed([*ids, *forced]))
        assert len(after) > 1 or after == {shipped.end_of_text}, "it goes on as far as there is no choice"
        seen += len(forced)
        ids.append(token)
    assert seen > 4 and state.finished(ids) and state.forced(ids, exact=True) == []


def test_text_level_tokens_are_the_tokenizers_own_and_their_text_is_forced(shipped):
    state = Guide.json_schema(RECORD, shipped).begin()
    ids: list[int] = []
    whole = shipped.encode(RECORD_TEXT)
    while not state.finished(ids):
        forced = state.forced(ids, exact=False)
        assert whole[len(ids) : len(ids) + len(forced)] == forced
        ids = whole[: len(ids) + len(forced)]
        if not state.finished(ids):
            ids.append(whole[len(ids)])
    assert ids == whole


def model_calls(state, whole: Sequence[int], exact: bool) -> int:
    """How many of a text's tokens the model must be asked for, when all that is forced is skipped."""
    ids, calls = [], 0
    while not state.finished(ids):
        forced = state.forced(ids, exact)
        if whole[len(ids) : len(ids) + len(forced)] == forced:
            ids += forced
        if not forced and not state.finished(ids):
            ids.append(whole[len(ids)])
            calls += 1
    assert ids == list(whole)
    return calls


def test_of_a_json_object_few_tokens_need_the_model(shipped):
    whole = shipped.encode(RECORD_TEXT)
    state = Guide.json_schema(RECORD, shipped).begin()
    by_text, exact = model_calls(state, whole, exact=False), model_calls(state, whole, exact=True)
    assert (len(whole), exact, by_text) == (37, 33, 13)


def test_forcing_is_bounded(shipped):
    state = Guide.regex(f"ab(~{{{MAX_FORCED + 40}}})!?", shipped).begin()
    start = shipped.encode("ab")
    assert 0 < len(state.forced(start, exact=False)) <= MAX_FORCED
    lone = Guide.regex(f"a{{{MAX_FORCED + 40}}}b", only(["a", "b"])).begin()
    first = lone.forced([], exact=True)
    assert len(first) == MAX_FORCED and len(lone.forced(first, exact=True)) == 41


# -- JSON ---------------------------------------------------------------------------------------------------------

SCHEMAS = [
    RECORD,
    {
        "type": "array",
        "items": {"type": "number", "minimum": -2, "exclusiveMaximum": 7.5},
        "minItems": 1,
        "maxItems": 4,
    },
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer", "multipleOf": 3, "maximum": 90},
                    "left": {"$ref": "#/$defs/tree"},
                },
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    {"anyOf": [{"const": {"a": [1, None]}}, {"type": "string", "format": "date"}, {"type": "boolean"}]},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 5}, {"pattern": '^[a-cé"]*$'}]},
    {"type": "array", "prefixItems": [{"enum": ["x", 5]}, {"type": "null"}], "items": False, "minItems": 2},
    {
        "type": "object",
        "patternProperties": {"^k[0-9]$": {"type": "integer", "minimum": 0, "maximum": 9}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    },
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: str(next(iter(schema))))
def test_whatever_is_written_under_a_schema_satisfies_it(schema, shipped):
    """Tokens drawn evenly from the mask, by an independent judge of schemas."""
    guide, chance = Guide.json_schema(schema, shipped), random.Random(5)
    for _ in range(15):
        state, ids = guide.begin(), []
        while (token := chance.choice(sorted(as_set(state.allowed(ids))))) != shipped.end_of_text:
            ids.append(token)
        value = json.loads(shipped.decode(ids))
        jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())


def test_separators_are_those_of_json_dumps(shipped):
    value = {"a": 1, "b": [2, 3]}
    for separators in ((", ", ": "), (",", ":")):
        text = json.dumps(value, separators=separators)
        state = Guide.json_schema({"const": value}, shipped, separators=separators).begin()
        assert state.finished(shipped.encode(text))


def test_a_context_free_grammar(shipped):
    state = Guide.grammar('start: "(" start ")" | "x"', shipped).begin()
    for text, fits in {"((x))": True, "x": True, "((x)": False, "(x))": False}.items():
        assert state.finished(shipped.encode(text)) == fits


# -- what is refused ----------------------------------------------------------------------------------------------


def nested(levels: int) -> str:
    return '{"items":' * levels + "true" + "}" * levels


def endless(**more) -> dict:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
    return {"$defs": {"node": node | more}, "$ref": "#/$defs/node"}


BAD_SCHEMAS = {
    "not JSON": ('{"type":', "not JSON"),
    "not an object": ("[1]", "is an object"),
    "NaN": ('{"const": NaN}', "NaN"),
    "a set": ({"enum": {1, 2}}, "no JSON"),
    "one key twice": ('{"type": "string", "type": "integer"}', "'type' twice"),
    "deep": (nested(500), "nest 60 levels"),
    "very deep": (nested(6000), "nest 60 levels"),
    "a huge enum": ({"enum": [f"value {i}" for i in range(300_000)]}, "65,536 characters"),
    "misspelt": ({"type": "string", "minimumLength": 3}, "did you mean 'minLength'"),
    "not supported": ({"not": {"type": "string"}}, "cannot enforce"),
    "not supported within": ({"properties": {"a": {"uniqueItems": True}}}, "'uniqueItems'"),
    "library options": ({"x-guidance": {"lenient": True}}, "unknown keyword"),
    "unknown format": ({"type": "string", "format": "regex"}, "Unknown format"),
    "remote": ({"$ref": "https://example.org/schema.json"}, "nothing is fetched"),
    "remote file": ({"$ref": "file:///etc/passwd"}, "nothing is fetched"),
    "id": ({"$id": "https://example.org/schema.json"}, "take it out"),
    "old dialect": ({"$schema": "http://json-schema.org/draft-04/schema#"}, "dialect"),
    "dangling": ({"$ref": "#/$defs/none"}, "points to nothing"),
    "reference of another kind": ({"$ref": ["#"]}, "points out of"),
    "hidden behind a reference": ({"const": {"foo": 1}, "allOf": [{"$ref": "#/const"}]}, "unknown keyword 'foo'"),
    "itself": ({"$ref": "#"}, "recursion never ends"),
    "in a circle": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "never ends",
    ),
    "endless": (endless(), "never ends"),
    "endless in a list": (
        {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}}, "$ref": "#/$defs/n"},
        "never ends",
    ),
    "contradiction": ({"type": "integer", "minimum": 5, "maximum": 3}, "greater than maximum"),
    "nothing to choose": ({"enum": []}, "Unsatisfiable"),
    "required and forbidden": ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "Unsatisfiable"),
    "wrong type of keyword": ({"type": "object", "properties": [1]}, "is an object"),
    "wrong type": ({"type": "strin"}, "Invalid type"),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
}


@pytest.mark.parametrize("name", BAD_SCHEMAS)
def test_a_schema_that_cannot_be_kept_is_refused_with_the_reason(name, shipped):
    schema, reason = BAD_SCHEMAS[name]
    with pytest.raises(WorkbenchError, match=reason):
        Guide.json_schema(schema, shipped)


def doubled(times: int) -> dict:
    """Each part asks for the next one twice, once inside an object."""
    parts = {
        f"d{i}": {
            "allOf": [
                {"$ref": f"#/$defs/d{i + 1}"},
                {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}},
            ]
        }
        for i in range(times)
    }
    return {"$defs": parts | {f"d{times}": {"type": "object"}}, "$ref": "#/$defs/d0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(5, 300)]},
        {"type": "string", "pattern": "^a{100000000}$"},
        doubled(200),
    ],
    ids=["many patterns at once", "a long forced text", "doubled"],
)
def test_a_schema_that_asks_for_too_much_work_is_refused(schema, shipped, limited):
    """By the time it takes, or by the library's own limits, whichever is reached first on this machine."""
    with pytest.raises(WorkbenchError, match=r"more work than a grammar may|cannot guide a text: .*exceeded"):
        Guide.json_schema(schema, shipped)


BAD_PATTERNS = {
    "(a": "unclosed group",
    "(?=a)b": "look-around",
    r"(a)\1": "backreferences",
    "a$b": "look",
    "[^\\x00-\\x{10FFFF}]": "no text satisfies it",
    "a\\": "backslash that escapes nothing",
    "(?x) a # b\n c": "without",
    "a\0": "U\\+0000",
    "x" * 20_000: "16,384 characters",
    "(" * 500 + "a" + ")" * 500: "nested parentheses",
}


@pytest.mark.parametrize("pattern", BAD_PATTERNS, ids=lambda p: ascii(p[:20]))
def test_a_pattern_that_cannot_be_kept_is_refused_with_the_reason(pattern, shipped):
    with pytest.raises(WorkbenchError, match=BAD_PATTERNS[pattern]):
        Guide.regex(pattern, shipped)


HOSTILE = ["a{100000000}", "((((((a{10}){10}){10}){10}){10}){10}){10}", "a?" * 8000, "((a{1,1000}){1,1000}){1,1000}"]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", HOSTILE, ids=lambda p: p[:20])
def test_a_pattern_that_asks_for_too_much_work_is_refused(pattern, shipped, limited):
    with pytest.raises(WorkbenchError, match=r"more work than a grammar may|too many expressions"):
        Guide.regex(pattern, shipped)


def test_on_a_busy_machine_the_first_text_is_still_tried_to_its_end(shipped, monkeypatch):
    """What the pattern asks for comes 30 tokens into a text, by when a busy machine has used up the time of all."""
    slow = itertools.count(step=guide_trial.WALKING_SECONDS / 20)

    def try_out(tokenizer_json: str, ends: Sequence[int], plain: str, forcing: str) -> str | None:
        request = {"tokenizer": tokenizer_json, "ends": list(ends), "plain": plain, "forcing": forcing}
        return guide_trial.trouble(llguidance, request, lambda: next(slow))

    monkeypatch.setattr(guide_trial, "try_out", try_out)
    with pytest.raises(WorkbenchError, match="too many expressions"):
        Guide.regex(HOSTILE[-1], shipped)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(a{1,1000}){1,1000}", "(.*a){20}.{20}", "a{0,100000}"])
def test_patterns_that_are_catastrophes_elsewhere_are_none_here(pattern, shipped):
    assert Guide.regex(pattern, shipped).begin().allowed(shipped.encode("aaa")).any()


@pytest.mark.parametrize(
    ("lark", "reason"),
    [
        ("start: foo", "unknown name"),
        ('start: "a" b\nb[max_tokens=3]: /.*/', "max_tokens"),
        ("start: %json {}", "Guide.json_schema"),
        ('%llguidance {"no_forcing": false}\nstart: "a"', "%llguidance"),
        ('start: <|endoftext|> "a"', "no token"),
        ("", "no start rule"),
    ],
)
def test_a_grammar_that_cannot_be_kept_is_refused(lark, reason, shipped):
    with pytest.raises(WorkbenchError, match=reason):
        Guide.grammar(lark, shipped)


def test_settings_are_checked(shipped):
    for wrong in [(",",), (";", ":"), ", :", (",\n", ":"), (".*,", ":")]:
        with pytest.raises(WorkbenchError, match="separators"):
            Guide.json_schema({}, shipped, separators=wrong)
    for ends, reason in {(): "needs an end token", (4096,): "outside 0 … 4095", (True,): "whole number"}.items():
        with pytest.raises(WorkbenchError, match=reason):
            Guide.regex("a", shipped, end_token_ids=ends)
    for given, reason in {None: "Tokenizer", "stdlib-10m": "Tokenizer"}.items():
        with pytest.raises(WorkbenchError, match=reason):
            Guide.regex("a", given)
    with pytest.raises(WorkbenchError, match="is a string"):
        Guide.regex(3, shipped)


def test_a_vocabulary_that_cannot_write_the_text_is_refused():
    tokenizer = only(["a", "b", "ab"])
    for pattern in ("c", "ac", "bbc|bac"):
        with pytest.raises(WorkbenchError, match=r"no text satisfies it|no token of the vocabulary"):
            Guide.regex(pattern, tokenizer)
    assert as_set(Guide.regex("ab|c", tokenizer).begin().allowed([])) == {1, 3}


def test_a_tokenizer_of_another_kind_is_refused():
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(WorkbenchError, match="cannot be guided"):
        Guide.regex("a", Tokenizer(words, end_of_text=1))


def test_a_grammar_too_complex_at_a_later_place_raises_there_and_only_there(shipped, monkeypatch):
    """What the trial does not meet."""
    monkeypatch.setattr(guide_trial, "try_out", lambda *request: None)
    deep = "(" * 100 + "a" + "){1,2}" * 100
    state = Guide.regex(f"xy?|b{deep}", shipped).begin()
    (b,), (x,), (a,) = map(shipped.encode, "bxa")
    with pytest.raises(WorkbenchError, match="too complex"):
        for n in range(12):
            state.allowed([b] + [a] * n)
    assert state.allowed([x]).any() and state.allowed([]).any() and not state.allowed([a]).any()


def test_the_trial_runs_in_another_process_that_the_system_ends(shipped, limited):
    """The hostile grammar is never compiled here: this process's own library is not asked before the trial passed."""
    request = (shipped.backend.to_str(), [0])
    assert guide_trial.try_out(*request, "start: /a{100000000}/", "start: /a{100000000}/").startswith("it takes more")
    assert guide_trial.try_out(*request, "start: /a+/", "start: /a+/") is None
    assert Guide.regex("a+", shipped).begin().allowed([]).any()


def test_without_the_library_the_error_says_what_to_install(shipped, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for make in (Guide.regex, Guide.grammar):
        with pytest.raises(WorkbenchError, match="pip install llguidance"):
            make('start: "a"', shipped)
    with pytest.raises(WorkbenchError, match="pip install llguidance"):
        Guide.json_schema({}, shipped)


WRONG_VALUES = dict.fromkeys(("maximum", "minimum", "exclusiveMaximum", "exclusiveMinimum", "multipleOf"), "x")


@pytest.mark.parametrize("keyword", sorted({*ENFORCED} - {"const"}))
def test_no_keyword_that_is_let_through_is_ignored_by_the_library(keyword, shipped):
    """With a value of a wrong type each is complained of."""
    schema = {"type": ["object", "array", "string", "number"], keyword: WRONG_VALUES.get(keyword, 3.5)}
    with pytest.raises(WorkbenchError):
        Guide.json_schema(schema, shipped)
