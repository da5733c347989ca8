"""What a graded class gets: nbgrader's CSV, JUnit's XML, Gradescope's results.json, and a page of feedback for each
student.

Every text in them may come from a student's code. In the page it is inert: HTML is escaped, terminal codes are dropped,
control and direction-changing characters are shown by number. Nothing here that a student gets holds an input, an
output or a message of a hidden check.
"""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import quote
from xml.etree import ElementTree

from workbench.grading.check import CheckResult, Result, Verdict

CSV_COLUMNS = (
    "assignment",
    "duedate",
    "timestamp",
    "student_id",
    "last_name",
    "first_name",
    "email",
    "raw_score",
    "late_submission_penalty",
    "score",
    "max_score",
)

FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # how a cell begins that a spreadsheet computes
HIDDEN_TEXT = "A hidden check: what it runs is not shown."
_ANSI = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")
# Controls, what has no width or no ink, what changes direction, what is no character (nor allowed in XML).
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u2800\u3164\ud800-\udfff\ufdd0-\ufdef\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
    + "".join(f"{chr(plane << 16 | 0xFFFE)}{chr(plane << 16 | 0xFFFF)}" for plane in range(1, 17))
    + "]"
)
_IN_CELL = re.compile(rf"([;|]\s*)(?=[{re.escape(''.join(FORMULA))}])")  # where a spreadsheet may begin another cell


@dataclass(frozen=True)
class Adjustment:
    """What an instructor changed by hand. exercise: "" for the whole notebook; change: in points; request: what the
    student has asked for, open: nobody has answered yet."""

    exercise: str
    change: float
    comment: str = ""
    request: str = ""
    open: bool = False


@dataclass(frozen=True)
class Graded:
    """One submission after grading. `error`: why it could not be read or graded; then there are no results.

    timestamp: when it was handed in, "" where nothing that students cannot write says so; source: what does. claims:
    other times, to be shown and not used. notes: what its teacher should know, such as missing exercises. not_graded:
    names of further notebooks of this student and lab. worth: grade_id -> points of each exercise. penalty: points
    taken off for being late, by `days_late` days, of which one that has begun counts. adjustments: by hand. folder: of
    its files, in the gradebook's. seconds: how long grading took, checks_seconds: how long of it answers ran; in no
    student's report, so that these are the same whenever they are made.
    """

    student_id: str
    assignment: str
    file: str
    timestamp: str
    results: tuple[Result, ...] = ()
    max_score: int = 0
    error: str | None = None
    titles: tuple[tuple[str, str], ...] = ()
    first_name: str = ""
    last_name: str = ""
    email: str = ""
    duedate: str = ""
    penalty: float = 0
    days_late: int = 0
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    checks_seconds: float = 0.0
    source: str = ""
    claims: tuple[str, ...] = ()
    not_graded: tuple[str, ...] = ()
    worth: tuple[tuple[str, int], ...] = ()
    adjustments: tuple[Adjustment, ...] = ()
    folder: str = ""

    @property
    def from_checks(self) -> int:
        return sum(result.points for result in self.results)

    @property
    def by_hand(self) -> float:
        """Points that came by hand, or went."""
        return sum(adjustment.change for adjustment in self.adjustments)

    @property
    def raw_score(self) -> int | float:
        """Before what is taken off for being late; never below 0."""
        return max(0, self.from_checks + self.by_hand) if self.by_hand else self.from_checks

    @property
    def score(self) -> int | float:
        return max(0, self.raw_score - self.penalty) if self.penalty else self.raw_score


def inert(text: str) -> str:
    """`text` as plain characters that all show: no terminal codes, no control, zero-width or bidirectional
    characters."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", _ANSI.sub("", str(text)))


def for_terminal(text: str) -> str:
    """`inert`, and each line after the first indented, so that none of them looks like one of ours."""
    return inert(text).replace("\n", "\n    ")


def some_of(names: Sequence[str], limit: int = 20) -> str:
    """The first of these names, and how many there are beside them."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more:,} more" if more > 0 else "")


def folder_name(name: str) -> str:
    """A student's name as the name of a folder: no separators, nothing hidden, nothing unprintable."""
    name = re.sub(r'[/\\:*?"<>|\s]', "_", inert(name))[:80].strip()
    return "_" + name if not name or name.startswith(".") or name.endswith((".csv", ".xml", ".html", ".")) else name


# --- grades.csv ---


def csv_text(graded: Sequence[Graded]) -> str:
    """nbgrader's columns, a row for every submission; no cell that a spreadsheet would take for a formula."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for one in graded:
        texts = [one.assignment, one.duedate, one.timestamp, one.student_id]
        texts += [one.last_name, one.first_name, one.email]
        writer.writerow(
            [*map(_csv_cell, texts), f"{one.raw_score:g}", f"{one.penalty:g}", f"{one.score:g}", one.max_score]
        )
    return out.getvalue()


def _csv_cell(text: str) -> str:
    text = _IN_CELL.sub(r"\1'", inert(text).replace("\n", " ").replace("\t", " "))
    return "'" + text if text.lstrip()[:1] in FORMULA and text.strip() else text


# --- results.json ---


def gradescope(graded: Graded) -> dict:
    """Gradescope's schema: one test for each check; hidden ones are shown after the grades are published, without
    text."""
    tests = []
    for number, result in enumerate(graded.results, 1):
        for index, check in enumerate(result.checks, 1):
            tests.append(
                {
                    "name": f"{result.grade_id}: {check.name}",
                    "number": f"{number}.{index}",
                    "score": check.points,
                    "max_score": check.max_points,
                    "status": "passed" if check.passed else "failed",
                    "output": shown_message(result, check),
                    "output_format": "text",
                    "visibility": "after_published" if check.hidden else "visible",
                }
            )
    return {
        "score": graded.score,
        "output": inert("\n".join(filter(None, (graded.error, *about_submission(graded))))),
        "output_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
    }


def about_submission(graded: Graded) -> list[str]:
    """Lines for the student about the notebook as a whole: what counted, what was taken off, what was changed by
    hand."""
    lines = []
    if graded.not_graded:
        others = some_of(graded.not_graded)
        lines.append(f"{len(graded.not_graded) + 1} notebooks were handed in; {graded.file} counts, not {others}")
    if graded.by_hand:
        lines.append(f"{graded.from_checks} points from the checks, {graded.by_hand:+g} by hand")
    if graded.penalty:
        lines.append(f"{graded.penalty:g} points less: handed in {graded.timestamp}, due {graded.duedate} (UTC)")
    for one in graded.adjustments:
        change = f"{one.change:+g} by hand" if one.change else ""
        said = ": ".join(filter(None, (one.exercise or "The whole notebook", change, one.comment)))
        lines.append("; ".join(filter(None, (said, f"your request is open: {one.request}" if one.open else ""))))
    return lines


def shown_message(result: Result, check: CheckResult) -> str:
    """What the student may read about a check."""
    if check.hidden:
        return f"{HIDDEN_TEXT} It passed, but has {check.message}." if check.passed and check.message else HIDDEN_TEXT
    if check.passed:
        return f"passed, but {check.message}" if check.message else "passed"
    printed = f"\nIt printed:\n{check.output}" if check.output.strip() else ""
    return inert(check.message + printed)


# --- junit.xml ---


def junit_xml(graded: Sequence[Graded]) -> str:
    """A suite for each submission, a case for each check: for what reads test reports. For the instructor's eyes: it
    names no input and no message of a hidden check, but whose it is."""
    suites = ElementTree.Element("testsuites", name="grades")
    for one in graded:
        suite = ElementTree.SubElement(suites, "testsuite", name=inert(f"{one.student_id}: {one.assignment}"))
        cases = [(result, check) for result in one.results for check in result.checks]
        failed = sum(not check.passed for _, check in cases)
        counts = {"tests": max(1, len(cases)), "failures": failed, "errors": int(bool(one.error)), "skipped": 0}
        suite.attrib |= {key: str(value) for key, value in counts.items()}
        if one.error:
            case = ElementTree.SubElement(suite, "testcase", classname="submission", name="read and graded")
            ElementTree.SubElement(case, "error", message=inert(one.error)[:2_000])
        for result, check in cases:
            case = ElementTree.SubElement(suite, "testcase", classname=result.grade_id, name=inert(check.name))
            properties = ElementTree.SubElement(case, "properties")
            for name in ("points", "max_points"):
                ElementTree.SubElement(properties, "property", name=name, value=str(getattr(check, name)))
            if not check.passed:
                ElementTree.SubElement(case, "failure", message=shown_message(result, check)[:2_000])
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


# --- feedback.html ---

_WORDS = {
    Verdict.PASSED: ("✓", "passed"),
    Verdict.FAILED: ("✗", "not yet right"),
    Verdict.NOT_ATTEMPTED: ("○", "not attempted"),
    Verdict.BLOCKED: ("◇", "blocked"),
}

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --dim: #586274; --page: #fff; --card: #f5f6f8; --line: #d5d9e0;
  --good: #0b6e4f; --bad: #a8321c; --none: #586274; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaf0; --dim: #a3adbd; --page: #14171c; --card: #1e232b;
  --line: #39414e; --good: #5fd0a5; --bad: #ff9d85; --none: #a3adbd; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 3rem; max-width: 52rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 0; } h3 { font-size: 1rem; margin: 1rem 0 .25rem; }
.dim { color: var(--dim); } .score { font-size: 1.25rem; margin: 1rem 0 .35rem; }
meter { width: 100%; height: 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 1.5rem; }
th, td { text-align: left; padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--line); }
th.n, td.n { text-align: right; padding-right: 0; font-variant-numeric: tabular-nums; white-space: nowrap; }
section { border: 1px solid var(--line); border-radius: .5rem; padding: 1rem 1.25rem; margin: 1rem 0;
  break-inside: avoid; }
section header { display: flex; justify-content: space-between; gap: 1rem; flex-wrap: wrap; }
.passed { color: var(--good); } .failed { color: var(--bad); } .not_attempted, .blocked { color: var(--none); }
.verdict { font-weight: 600; white-space: nowrap; }
ul { list-style: none; margin: .75rem 0 0; padding: 0; } li { padding: .3rem 0; }
li .row { display: flex; justify-content: space-between; gap: 1rem; }
pre { background: var(--card); border-radius: .35rem; padding: .6rem .8rem; margin: .35rem 0 .2rem;
  white-space: pre-wrap;
  overflow-wrap: anywhere; font: .875rem/1.45 ui-monospace, monospace; unicode-bidi: plaintext; }
bdi { unicode-bidi: isolate; overflow-wrap: anywhere; }
td bdi { overflow-wrap: break-word; } td { max-width: 40rem; }
th.n:not(:last-child), td.n:not(:last-child) { padding-right: 1.25rem; }
.wide { max-width: 90rem; } .beside { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
.beside > div { min-width: 0; } mark { background: #ffe08a; color: #1d2430; } sup { font-size: .7em; }
@media print { body { padding: 0; max-width: none; font-size: 10.5pt; } }
"""


def text_in_html(text: str) -> str:
    """`text` as HTML that shows it and does nothing."""
    return html.escape(inert(text), quote=True)


def feedback_html(graded: Graded) -> str:
    """One self-contained page: every exercise with its verdict, points, checks, and what to look at."""
    titles = dict(graded.titles)
    by_hand: dict[str, float] = {}
    for one in graded.adjustments:
        by_hand[one.exercise] = by_hand.get(one.exercise, 0) + one.change
    share = f'<meter min="0" max="{max(graded.max_score, 1)}" value="{graded.score}">{graded.score}</meter>'
    body = [
        f"<h1>{text_in_html(graded.assignment or 'Unknown assignment')}</h1>",
        (
            f'<p class="dim">Feedback for <bdi>{text_in_html(graded.student_id)}</bdi>, file'
            f" <bdi>{text_in_html(graded.file)}</bdi></p>"
        ),
        f'<p class="score"><strong>{graded.score:g}</strong> of {graded.max_score} points</p>{share}',
    ]
    if lines := about_submission(graded):
        body.append("<ul>" + "".join(f"<li>{text_in_html(line)}</li>" for line in lines) + "</ul>")
    if graded.error:
        body.append(
            '<section><h2 class="failed">This submission could not be'
            f" graded</h2><pre>{text_in_html(graded.error)}</pre></section>"
        )
    else:
        rows = "".join(
            f"<tr><td>{text_in_html(titles.get(r.grade_id, r.grade_id))}</td><td"
            f' class="{r.verdict}">{" ".join(_WORDS[r.verdict])}</td><td class="n">{r.points} /'
            f" {r.max_points}{_by_hand(by_hand.get(r.grade_id, 0))}</td></tr>"
            for r in graded.results
        )
        body.append(
            "<table><thead><tr><th>Exercise</th><th>Verdict</th><th"
            f' class="n">Points</th></tr></thead><tbody>{rows}</tbody></table>'
        )
    body += [_section(result, titles.get(result.grade_id, result.grade_id)) for result in graded.results]
    return page(f"{graded.assignment}: {graded.student_id}", body)


def _by_hand(change: float) -> str:
    return f", {change:+g} by hand" if change else ""


@dataclass(frozen=True)
class Link:
    """A cell that leads to a file of the gradebook."""

    text: str
    file: str

    def html(self) -> str:
        return f'<a href="{quote(self.file)}">{text_in_html(self.text)}</a>' if self.file else text_in_html(self.text)


def table(head: Sequence[str], rows: Sequence[Sequence], numbers: Iterable[int]) -> str:
    numbers = set(numbers)

    def line(cells: Sequence, tag: str) -> str:
        made = []
        for i, cell in enumerate(cells):
            shown = cell.html() if isinstance(cell, Link) else text_in_html(str(cell))
            made.append(f'<{tag} class="n">{shown}</{tag}>' if i in numbers else f"<{tag}><bdi>{shown}</bdi></{tag}>")
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>"


def page(title: str, body: Sequence[str], *, wide: bool = False) -> str:
    """A page that loads nothing and runs nothing. `body` is HTML; `title` is text."""
    kind = ' class="wide"' if wide else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{text_in_html(title)}</title><style>{_STYLE}</style></head>\n<body{kind}>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _section(result: Result, title: str) -> str:
    sign, word = _WORDS[result.verdict]
    head = (
        f'<header><h2>{text_in_html(title)} <span class="dim">({text_in_html(result.grade_id)})</span></h2>'
        f'<span class="verdict {result.verdict}">{sign} {word}, {result.points} of {result.max_points}</span></header>'
    ) + "".join(f'<p class="dim">{text_in_html(note)}</p>' for note in result.notes)
    if result.verdict == Verdict.NOT_ATTEMPTED:
        return f'<section>{head}<p class="dim">{text_in_html(result.message)}</p></section>'
    items, said = [], set()
    for check in result.checks:
        mark, kind = ("✓", "passed") if check.passed else ("✗", "failed")
        text = "" if check.passed and not (check.hidden or check.message) else shown_message(result, check)
        note = "" if not text or text in said else f"<pre>{text_in_html(text)}</pre>"
        note = f' <span class="dim">{text_in_html(text)}</span>' if check.hidden else note
        said.add(text)
        items.append(
            f'<li><div class="row"><span><span class="{kind}">{mark} {kind}</span> {text_in_html(check.name)}'
            f'{note if check.hidden else ""}</span><span class="n">{check.points} / {check.max_points}</span></div>'
            f"{'' if check.hidden else note}</li>"
        )
    return f"<section>{head}<ul>{''.join(items)}</ul></section>"
