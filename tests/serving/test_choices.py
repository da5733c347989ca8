"""The text of a choice: however its tokens come, joined pieces are the whole text, cut where the first stop begins."""

from __future__ import annotations

import random

import pytest

from workbench.decoding.sequence import NewToken
from workbench.decoding.text import BROKEN
from workbench.models.checkpoints import shipped_tokenizer
from workbench.serving.api.choices import Choice

CASES = 10_000
TOKENIZER = shipped_tokenizer()
PARTS = ("def f(x):\n", "    return", "é", "😀", "日本", "\n\n", "): ", "aab", "ab", "end", " ", '"', "x")


def tokens_of(ids: list[int]) -> list[NewToken]:
    return [NewToken(token, -float(at), "target", "plain") for at, token in enumerate(ids)]


def drawn(rng: random.Random) -> tuple[list[int], list[int], list[str]]:
    """A prompt, generated tokens, and stop strings, some of which are in the text."""
    text = "".join(rng.choice(PARTS) for _ in range(rng.randrange(1, 9)))
    ids = TOKENIZER.encode(text)
    if rng.random() < 0.3:  # anything at all: parts of characters, too
        ids = [rng.randrange(1, TOKENIZER.vocab_size) for _ in range(rng.randrange(1, 12))]
    elif rng.random() < 0.2:
        ids = ids[: rng.randrange(1, len(ids) + 1)]
    whole = TOKENIZER.decode(ids)
    stops = []
    for _ in range(rng.randrange(4)):
        start = rng.randrange(len(whole) or 1)
        stops.append(whole[start : start + rng.randrange(1, 6)] if rng.random() < 0.6 else rng.choice(PARTS))
    prompt = TOKENIZER.encode(rng.choice(PARTS))
    return prompt, ids, [stop for stop in stops if stop]


def expected(prompt: list[int], ids: list[int], stops: list[str]) -> tuple[str, str, int]:
    """By looking at the whole text after every token: (text, finish_reason, tokens)."""
    before = TOKENIZER.decode(prompt[-1:])
    if before.endswith(BROKEN):
        prompt, before = [], ""
    for count in range(1, len(ids) + 1):
        text = TOKENIZER.decode(prompt[-1:] + ids[:count])[len(before) :]
        whole = text if count == len(ids) else text.rstrip(BROKEN)
        ends = [(at + len(stop), at) for stop in stops if (at := whole.find(stop)) >= 0]
        if ends:  # the first that is complete
            return whole[: min(ends)[1]], "stop", count
    return text, "length", len(ids)


def fed(prompt: list[int], ids: list[int], stops: list[str], sizes: list[int]) -> tuple[str, str | None, int, list]:
    choice = Choice(0, "r", 0, TOKENIZER, prompt, stops, (), log_probs=True)
    tokens, text, rows, at = tokens_of(ids), "", [], 0
    for size in sizes:
        last = at + size >= len(tokens)
        piece = choice.add(tokens[at : at + size], "length" if last else None)
        at += size
        if piece is not None:
            text += piece.text
            rows += piece.log_probs
            if not choice.done or choice.stopped:
                assert all(row.offset < len(text) for row in rows), "a token before its text"
            assert not any(stop in text for stop in stops), "a stop string was shown"
        if choice.done:
            break
    return text, choice.finish_reason, choice.tokens, rows


def split(rng: random.Random, count: int) -> list[int]:
    sizes = []
    while count > 0:
        sizes.append(min(count, rng.choice((1, 1, 2, 3, 7))))
        count -= sizes[-1]
    return sizes


def test_joined_pieces_are_the_whole_text_for_any_stops_and_any_chunking():
    rng = random.Random(0)
    stopped = broken = 0
    for _ in range(CASES):
        prompt, ids, stops = drawn(rng)
        whole = expected(prompt, ids, stops)
        one = fed(prompt, ids, stops, [1] * len(ids))
        other = fed(prompt, ids, stops, split(rng, len(ids)))
        assert one[:3] == whole and other == one, (prompt, ids, stops)
        stopped += whole[1] == "stop"
        broken += BROKEN in whole[0]
    assert stopped > CASES / 20 and broken > CASES / 50  # the cases are not all plain


def test_offsets_count_characters_and_tokens_after_a_stop_are_left_out():
    ids = TOKENIZER.encode("abc\n def end more")
    text, reason, count, rows = fed([0], ids, ["end"], [1] * len(ids))
    assert text == "abc\n def " and reason == "stop"
    assert all(row.offset < len(text) for row in rows) and len(rows) <= count
    assert [row.offset for row in rows] == sorted(row.offset for row in rows)


@pytest.mark.parametrize("end", [True, False])
def test_an_end_token_is_counted_and_not_shown(end):
    ids = [*TOKENIZER.encode("return"), TOKENIZER.end_of_text]
    choice = Choice(0, "r", 0, TOKENIZER, [0], (), (TOKENIZER.end_of_text,) if end else (), log_probs=True)
    piece = choice.add(tokens_of(ids), "stop")
    assert piece.text == ("return" if end else "return<|endoftext|>")
    assert choice.tokens == len(ids) and len(piece.log_probs) == len(ids) - end
