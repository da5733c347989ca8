"""Passages that answers share: with our solutions and other right answers, with the engine's own parts, in the class.

By winnowing (Schleimer, Wilkerson and Aiken, Winnowing: Local Algorithms for Document Fingerprinting, SIGMOD 2003): of
all runs of `RUN` tokens a few are chosen by their hash, so that two texts with `RUN + WINDOW - 1` tokens in common have
one of them in common. Tokens are Python's: names of the answer's own count as one name, so that renaming hides nothing;
attributes, keywords and numbers count as they are; comments, spaces and what strings say do not count, but code in a
string does. What all were given (setup cell, stubs, the notebook's other cells) does not count, and in the class
neither does what many have.

The report is to be read by a person. Two right answers to a small exercise are alike, and nothing here is a mark.
"""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import keyword
import runpy
import textwrap
import tokenize
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import cast

from workbench.errors import WorkbenchError
from workbench.files import write_text
from workbench.grading.check import ExerciseSet
from workbench.grading.collect import find_submissions
from workbench.grading.desk import load_instructors
from workbench.grading.notebooks import read_cells, set_of
from workbench.grading.reference import resolve
from workbench.grading.reports import for_terminal, page, table, text_in_html

RUN, WINDOW = 10, 6  # tokens: shorter runs are the language's, not an author's
MIN_TOKENS, MIN_SHARE = 40, 0.5  # of an answer, for a pair to be shown
MIN_WHOLE = 0.8  # of the other one, where it stands in an answer with more around it
MAX_TOKENS = 5_000  # of an answer, that are compared: no right one has a fifth of that
MAX_PLACES = 5  # of one fingerprint in a text: what is written more often is a pattern, and no passage
MAX_SOURCE = 100_000  # characters of an answer, in the report
COMMON, COMMON_SHARE = 4, 0.25  # what more answers of the class have than that is everybody's
MAX_SHOWN = 300  # pairs, in the report
_QUIET = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@dataclass(frozen=True)
class Token:
    """kind: what is compared; start, end: where it stands in the text."""

    kind: str
    start: int
    end: int


def tokens_of(source: str) -> list[Token]:
    """As far as it is Python, `MAX_TOKENS` at most. A string that holds code, for exec, is the tokens of that code."""
    starts = [0]
    for line in source.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    tokens: list[Token] = []
    before = ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in _QUIET:
                continue
            if len(tokens) >= MAX_TOKENS:
                break
            text = token.string
            (row, column), (last_row, last_column) = token.start, token.end
            start, end = starts[row - 1] + column, starts[last_row - 1] + last_column
            if token.type == tokenize.STRING:
                kinds = [inner.kind for inner in tokens_of(_code_in(text))] or ["text"]
            elif token.type == tokenize.NAME and not keyword.iskeyword(text) and before != ".":
                kinds = ["name"]
            else:
                kinds = [text]
            before = text
            tokens += [Token(kind, start, end) for kind in kinds]
    except (tokenize.TokenError, SyntaxError, ValueError, IndexError) as error:
        tokens.append(Token(f"no Python: {error}", len(source), len(source)))
    return tokens[:MAX_TOKENS]


def _code_in(literal: str) -> str:
    """The code that a string of a program holds; "" where it holds text, or too little to compare."""
    try:
        text = ast.literal_eval(literal)
        text = text.decode() if isinstance(text, bytes) else text
        few = not isinstance(text, str) or len(text) < 2 * RUN
        body = [] if few else ast.parse(text).body
        calls = any(isinstance(node, ast.Call) for one in body for node in ast.walk(one))
        return text if calls or not all(isinstance(one, ast.Expr) for one in body) else ""
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""


def run_hashes(tokens: Sequence[Token]) -> list[int]:
    """Of each run of `RUN` tokens, by its first; the same in every process."""
    kinds = [token.kind for token in tokens]
    return [zlib.crc32("\0".join(kinds[i : i + RUN]).encode()) for i in range(len(kinds) - RUN + 1)]


def winnowed(hashes: Sequence[int]) -> dict[int, list[int]]:
    """hash -> where it was chosen: the smallest of each window, the last one of equals."""
    chosen: dict[int, list[int]] = defaultdict(list)
    last = -1
    for start in range(max(1, len(hashes) - WINDOW + 1) if hashes else 0):
        window = range(start, min(start + WINDOW, len(hashes)))
        at = min(window, key=lambda i: (hashes[i], -i))
        if at != last:
            chosen[hashes[at]].append(at)
            last = at
    return dict(chosen)


class Text:
    """An answer to one exercise. who: its author, or what it is; of_class: whether it was handed in here. cut: only a
    part of it was compared."""

    def __init__(self, who: str, source: str, given: frozenset[int], of_class: bool = True) -> None:
        self.who, self.source, self.of_class = who, source, of_class
        self.tokens = tokens_of(source)
        self.cut = len(self.tokens) >= MAX_TOKENS
        self.kinds = [token.kind for token in self.tokens]
        hashes = run_hashes(self.tokens)
        self.prints = {h: places[:MAX_PLACES] for h, places in winnowed(hashes).items() if h not in given}
        of_given = {at + offset for at, h in enumerate(hashes) if h in given for offset in range(RUN)}
        self.own = frozenset(range(len(self.tokens))) - of_given


@dataclass(frozen=True)
class Passage:
    """`length` tokens from `first` on in one text and from `second` on in the other."""

    first: int
    second: int
    length: int


@dataclass(frozen=True)
class Pair:
    """share: of the first one's own tokens that stand in the passages; of the second one's where these are nearly all
    of it: what is added to a copy hides nothing."""

    grade_id: str
    first: Text
    second: Text
    passages: tuple[Passage, ...]
    shared: int
    share: float


def passages_of(one: Text, other: Text, prints: Iterable[int]) -> tuple[Passage, ...]:
    """What the two have in common around these fingerprints, as far as it goes; the longest first, none twice."""
    a, b = one.kinds, other.kinds
    runs: set[Passage] = set()
    known: dict[int, list[Passage]] = defaultdict(list)  # by how far it is from the place in one to that in the other
    for print_ in prints:
        for i in one.prints[print_]:
            for j in other.prints[print_]:
                if any(run.first <= i < run.first + run.length for run in known[j - i]):
                    continue
                if a[i : i + RUN] != b[j : j + RUN]:
                    continue
                back = 0
                while i > back and j > back and a[i - back - 1] == b[j - back - 1]:
                    back += 1
                length = RUN
                while i + length < len(a) and j + length < len(b) and a[i + length] == b[j + length]:
                    length += 1
                run = Passage(i - back, j - back, length + back)
                runs.add(run)
                known[j - i].append(run)
    taken_a, taken_b, kept = set[int](), set[int](), []
    for run in sorted(runs, key=lambda run: (-run.length, run.first, run.second)):
        of_a, of_b = range(run.first, run.first + run.length), range(run.second, run.second + run.length)
        if taken_a.isdisjoint(of_a) and taken_b.isdisjoint(of_b):
            taken_a.update(of_a)
            taken_b.update(of_b)
            kept.append(run)
    return tuple(kept)


def pairs_of(grade_id: str, texts: Sequence[Text]) -> Iterator[Pair]:
    """Each answer of the class with what is like it."""
    holders: dict[int, list[int]] = defaultdict(list)
    for number, text in enumerate(texts):
        for print_ in text.prints:
            holders[print_].append(number)
    size = sum(text.of_class for text in texts)
    limit = max(COMMON, COMMON_SHARE * size)
    common = {h for h, of in holders.items() if sum(texts[n].of_class for n in of) > limit}
    shared: dict[tuple[int, int], list[int]] = defaultdict(list)
    for print_, of in holders.items():
        theirs, ours = [n for n in of if texts[n].of_class], [n for n in of if not texts[n].of_class]
        pairs = [] if print_ in common else itertools.combinations(theirs, 2)
        for pair in itertools.chain(pairs, itertools.product(theirs, ours)):
            shared[pair].append(print_)
    for (n, m), prints in shared.items():
        one, other = texts[n], texts[m]
        if one.who == other.who:
            continue
        passages = passages_of(one, other, prints)
        share, count = _shared(one, passages, "first")
        of_other, count_of_other = _shared(other, passages, "second")
        if count >= MIN_TOKENS and share >= MIN_SHARE:
            yield Pair(grade_id, one, other, passages, count, share)
        elif count_of_other >= MIN_TOKENS and of_other >= MIN_WHOLE:
            yield Pair(grade_id, one, other, passages, count_of_other, of_other)


def _shared(text: Text, passages: Sequence[Passage], side: str) -> tuple[float, int]:
    """The share of a text's own tokens that stand in the passages, and how many these are."""
    starts = [(getattr(run, side), run.length) for run in passages]
    count = sum(i in text.own for start, length in starts for i in range(start, start + length))
    return count / max(1, len(text.own)), count


@dataclass(frozen=True)
class Likeness:
    """pairs: what is alike, most of it first. answers: how many were compared. notes: what was not."""

    pairs: tuple[Pair, ...]
    answers: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        ours = sum(not pair.second.of_class for pair in self.pairs)
        lines = [
            f"{self.answers} answers: {ours} are like an answer of the repository or of another year, "
            f"{len(self.pairs) - ours} pairs of the class are alike. Read them; likeness proves nothing."
        ]
        for one in self.pairs[:20]:
            lines.append(for_terminal(f"{one.first.who}, {one.grade_id}: {one.share:.0%} also in {one.second.who}"))
        lines += [f"and {len(self.pairs) - 20} more, in the report"] if len(self.pairs) > 20 else []
        return "\n".join([*lines, *map(for_terminal, self.notes)])

    def write(self, file: Path) -> None:
        """The report, with passages side by side; it names students."""
        write_text(file, report_html(self), errors="backslashreplace", mode=0o600)


def compare(
    paths: Sequence[str | Path], sets: Mapping[str, ExerciseSet], solutions: Path, also: Sequence[str | Path] = ()
) -> Likeness:
    """Every answer under `paths` with those in `solutions`, those under `also`, and with each other."""
    notes = [] if solutions.is_dir() else [f"{solutions} is not there: answers were not compared with our own"]
    texts: dict[str, list[Text]] = defaultdict(list)
    given = {name: _given(exercises, solutions) for name, exercises in sets.items()}
    for name, exercises in sets.items():
        for who, sources in (*_ours(solutions, name), *_engines(solutions, exercises)):
            for exercise in exercises.exercises:
                if exercise.grade_id in sources:
                    texts[exercise.grade_id].append(Text(who, sources[exercise.grade_id], given[name], False))
    count, homes = 0, dict[str, list[str]]()
    for of_class, places in ((True, paths), (False, also)):
        for one in find_submissions(places, list(sets)):
            try:
                exercises, answers = set_of(one.told_as, sets, one.cells())
            except (WorkbenchError, OSError, ValueError, RecursionError, MemoryError) as error:
                notes.append(f"{one.student_id}: not compared: {error}")
                continue
            who = one.student_id if of_class else f"{one.student_id} ({one.path.parent.name})"
            same = homes.setdefault(who, [])  # another student of the same name is another one
            same += [] if one.home in same else [one.home]
            who += f"-{same.index(one.home) + 1}" if same[0] != one.home else ""
            for grade_id, source in answers.sources.items():
                if source.strip() != exercises.starters.get(grade_id, "").strip():
                    text = Text(who, source, given[exercises.name], of_class)
                    texts[grade_id].append(text)
                    count += of_class
                    if text.cut:
                        notes.append(f"{who}, {grade_id}: only the first {MAX_TOKENS:,} tokens of it were compared")
    pairs = [pair for grade_id, those in texts.items() for pair in pairs_of(grade_id, those)]
    pairs.sort(key=lambda pair: (-pair.share, -pair.shared, pair.grade_id, pair.first.who, pair.second.who))
    return Likeness(tuple(pairs), count, tuple(notes))


def _ours(solutions: Path, name: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    """(what it is, grade_id -> source) of the right answers of the repository."""
    if not (solutions / f"{name}.ipynb").is_file():
        return
    cells = read_cells(solutions / f"{name}.ipynb")
    yield "our solution", dict(_answer_cells(cells))
    if (solutions / f"{name}_wrong.py").is_file():
        yield "our other right answer", runpy.run_path(str(solutions / f"{name}_wrong.py")).get("ALTERNATIVE", {})


def _engines(solutions: Path, exercises: ExerciseSet) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The parts of the workbench that an exercise is to write, as FORBIDDEN names them."""
    if not (solutions / "forbidden.py").is_file():
        return
    forbidden = load_instructors([solutions / "forbidden.py"])[1]
    for exercise in exercises.exercises:
        for name in forbidden.get(exercise.grade_id, ()):
            if ":" in name:
                source = textwrap.dedent(inspect.getsource(cast(FunctionType, resolve(name))))
                yield name.replace(":", "."), {exercise.grade_id: source}


def _answer_cells(cells: Iterable[dict]) -> Iterator[tuple[str, str]]:
    for cell in cells:
        about = cell.get("metadata", {}).get("nbgrader", {})
        if about.get("solution"):
            yield about["grade_id"], "".join(cell["source"])


def _given(exercises: ExerciseSet, solutions: Path) -> frozenset[int]:
    """Hashes of every run of tokens that all students were given: no answer cell of the solved notebook, all others."""
    sources = [exercises.prelude, *exercises.starters.values()]
    notebook = solutions / f"{exercises.name}.ipynb"
    if notebook.is_file():
        cells = read_cells(notebook)
        answers = dict(_answer_cells(cells)).values()
        sources += [source for cell in cells if (source := "".join(cell["source"])) not in answers]
    return frozenset(h for source in sources for h in run_hashes(tokens_of(source)))


# --- The report ---

WARNING = (
    "Likeness proves nothing: a small exercise has few right answers, and two students may have read the same book."
    " Read the passages, and talk with the students before you decide anything. No mark depends on this page."
)


def report_html(likeness: Likeness) -> str:
    body = ["<h1>Likeness of answers</h1>", f"<p>{WARNING}</p>"]
    body.append(f"<p>{likeness.answers} answers were compared; {len(likeness.pairs)} pairs are alike.</p>")
    body += [f"<p>{text_in_html(note)}</p>" for note in likeness.notes]
    counts = Counter(pair.first.who for pair in likeness.pairs if not pair.second.of_class)
    counts.update(who for pair in likeness.pairs if pair.second.of_class for who in (pair.first.who, pair.second.who))
    if counts:
        by_count = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        body.append(table(("Student", "Pairs"), by_count, numbers=(1,)))
    body += [_pair_html(pair) for pair in likeness.pairs[:MAX_SHOWN]]
    if len(likeness.pairs) > MAX_SHOWN:
        body.append(f"<p>{len(likeness.pairs) - MAX_SHOWN} more pairs, less alike than these, are not shown.</p>")
    return page("Likeness of answers", body, wide=True)


def _pair_html(pair: Pair) -> str:
    head = (
        f"<header><h2>{text_in_html(pair.grade_id)}: <bdi>{text_in_html(pair.first.who)}</bdi> and "
        f"<bdi>{text_in_html(pair.second.who)}</bdi></h2><span>{pair.share:.0%}, {pair.shared} tokens</span></header>"
    )
    sides = []
    for text, which in ((pair.first, "first"), (pair.second, "second")):
        spans = [(getattr(run, which), run.length, n) for n, run in enumerate(pair.passages, 1)]
        sides.append(f"<div><p><bdi>{text_in_html(text.who)}</bdi></p><pre>{_marked(text, spans)}</pre></div>")
    return f'<section>{head}<div class="beside">{"".join(sides)}</div></section>'


def _marked(text: Text, spans: Sequence[tuple[int, int, int]]) -> str:
    """The source with its passages marked, each with its number, the same on both sides."""
    source, parts, at = text.source[:MAX_SOURCE], [], 0
    for first, length, number in sorted(spans):
        start, end = text.tokens[first].start, text.tokens[first + length - 1].end
        start = max(start, at)  # of several passages in one string the first has it
        inside = text_in_html(source[start:end])
        parts += [text_in_html(source[at:start]), f"<mark><sup>{number}</sup>{inside}</mark>"]
        at = max(at, end)
    cut = len(text.source) - len(source)
    return "".join([*parts, text_in_html(source[at:]), f"\n… ({cut:,} more characters)" if cut else ""])
