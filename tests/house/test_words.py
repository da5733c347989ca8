"""The field's words: docs/glossary.md is about words that the code uses, and words of our own become fewer.

WORDS are no longer used for what stands beside them. Each may still occur as often as its number says, in names,
comments, docstrings, messages and lectures together: lower the number when you have removed some, and never raise it.
"""

from __future__ import annotations

import functools
import keyword
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
ENTRY = re.compile(r"^\| ([^|]+?) \|.*\| `([\w./]+)` \|$", re.M)
CODE = ("workbench", "kernels", "tests", "notebooks/source", "solutions")


class Word(NamedTuple):
    pattern: str
    instead: str
    allowed: int
    its_own_place: str = r"\A\Z"  # in files whose path matches this, it is the field's word


def name(word: str) -> str:
    """A word as a whole part of an identifier or of a sentence: `law` is in `law_for`, `SamplingLaw`, and "the law
    of"."""
    return rf"(?<![A-Za-z]){word}(?![a-z])|(?<=[a-z]){word[0].upper()}{word[1:]}(?![a-z])"


UNITS = "bytes|bits|numbers|nats|FLOPs|rows|reads|launches|operations|seconds|ms|µs|MB|KB|tokens|texts|requests"
WORDS = {
    "track": Word(name("tracks?") + "|Track", "sequence", 5, its_own_place="capstone|lab15"),
    "Writing": Word(r"\bWriting\b|\b_?writings?(?=[._,)\]:=]| =| in )|\bwriting_\w+", "sequence", 6),
    "writer": Word(r"(?<!csv\.)(?<!GGUF)\b[Ww]riters?\b", "decode, sequence", 55),
    "readers": Word(r"\breaders\b", "prefills", 2),
    "settle": Word(name("settled?s?"), "postprocess", 6),
    "gives way": Word(r"\bg[ai]v(?:es?|ing) way\b", "is preempted", 0),
    "features": Word(
        r"(?<!in_)(?<!out_)(?<!in and out )(?<!cpu_)(?<!advanced_)(?<![A-Za-z/])_?features?(?![a-z])",
        "hidden states",
        20,
    ),
    "law": Word(
        r"(?<!ittle's )(?<!ittles_)(?<![A-Za-z])(?:[Ll]aws?|LAWS?)(?![a-z])|(?<!ittles)(?<=[a-z])Laws?(?![a-z])",
        "distribution",
        5,
        its_own_place="capstone",
    ),
    "turned": Word(
        r"\bturned_\w+|\bturned (?:heads?|keys?|part)\b|\bturned by (?:its|their|the|his) position", "rotated", 0
    ),
    "most_, fewest_": Word(r"(?<![A-Za-z])_?(?:most|MOST|fewest|FEWEST)_\w+|\bmost\b(?= ?[=:)])", "max_, min_", 145),
    "_because": Word(r"\w_because\b(?!_)", "*_reason", 0),
    "told": Word(name("told"), "what it holds: message, summary", 375),
    "found": Word(r"\bfound\b(?= =[^=]| \+=|\.append|\.extend|\[)", "what it holds", 799),
    "a token": Word(
        rf"\b(?:{UNITS}) an? (?:token|byte|weight|step|round|layer|row|sequence|head|element)\b", "per token", 13
    ),
    "gives back": Word(r"\bg[ai]v(?:es?|ing) (?:\w+ ){0,2}back\b", "frees, returns", 21),
}


@functools.cache
def texts() -> dict[Path, str]:
    """The sources and documents that are ours, but this file and the glossary."""
    files = [*ROOT.glob("docs/*.md"), ROOT / "README.md"]
    files += [file for folder in CODE for file in sorted((ROOT / folder).rglob("*.py"))]
    return {file: file.read_text(encoding="utf-8") for file in files if file not in (GLOSSARY, Path(__file__))}


def entries() -> list[tuple[str, str]]:
    """(word, file) of each row of the glossary's tables that names a file."""
    return ENTRY.findall(GLOSSARY.read_text(encoding="utf-8"))


def uses(text: str, word: str) -> bool:
    """Whether a text has the word, in a sentence (over line ends, too) or as a name."""
    parts = r"[\s_-]*".join(map(re.escape, re.split(r"[ -]", word)))
    return re.search(parts, text, re.I) is not None


def test_every_word_of_the_glossary_is_used_in_the_file_it_names():
    assert len(entries()) > 80 and not [word for word, _ in entries() if keyword.iskeyword(word)]
    missing = [file for _, file in entries() if not (ROOT / file).is_file()]
    assert missing == []
    assert [(w, f) for w, f in entries() if not uses((ROOT / f).read_text(encoding="utf-8"), w)] == []


def test_no_word_is_explained_twice():
    words = [word for word, _ in entries()]
    assert sorted(set(words)) == sorted(words)


@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_our_own_is_used_no_more_often_than_before(word):
    pattern, instead, allowed, its_own_place = WORDS[word]
    others = {file: text for file, text in texts().items() if not re.search(its_own_place, str(file.relative_to(ROOT)))}
    counted = {file: len(re.findall(pattern, text)) for file, text in others.items()}
    total = sum(counted.values())
    worst = ", ".join(f"{f.relative_to(ROOT)} ({n})" for f, n in sorted(counted.items(), key=lambda c: -c[1])[:5] if n)
    assert total <= allowed, (
        f"{word!r} is used {total} times, {allowed} are allowed: say {instead}. Most often in {worst}"
    )


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("law", "class SamplingLaw:"),
        ("law", "the law of the target"),
        ("law", "law_for(text)"),
        ("told", "told = judge(case)"),
        ("most_, fewest_", "MOST_ROWS = 3"),
        ("_because", "self.kernels_because"),
        ("a token", "bytes a token"),
        ("features", "self.features"),
    ],
)
def test_a_word_is_seen(word, line):
    assert re.search(WORDS[word].pattern, line)


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("law", "Little's law, LittlesLaw, littles_law, lawn"),
        ("features", "in_features, out_features"),
        ("features", "https://docs.vllm.ai/en/latest/features/ and https://docs.sglang.io/advanced_features/"),
        ("told", "mtold"),
    ],
)
def test_a_word_of_the_field_is_let_through(word, line):
    assert not re.search(WORDS[word].pattern, line)
