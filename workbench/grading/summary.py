"""The class at a glance: one page for the instructor, of plots, all students and every failing check. It names
students; it is not to be handed out.

The plots are SVG that is written here, bars with their numbers beside them in a table: no script, nothing loaded, the
same bytes for the same marks (but for the times, which are measured).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from workbench.grading.check import COUNTS_FIRST, Verdict
from workbench.grading.reports import Graded, Link, page, table, text_in_html

BAR_WIDTH, ROW_HEIGHT, SCORE_BINS, TIME_BINS, MOST = 320, 18, 10, 8, 10


def _student(one: Graded) -> Link:
    return Link(one.student_id, f"{one.folder}/feedback.html" if one.folder else "")


def summary_html(graded: Sequence[Graded]) -> str:
    """Scores, points by exercise, what has to be looked at, every student, every failing check, hand-in times and
    adjustments."""
    body = ["<h1>Class summary</h1>"]
    wrong = [(_student(one), one.error) for one in graded if one.error]
    wrong += [(_student(one), note) for one in graded for note in one.notes]
    if wrong:
        body.append("<h2>To be looked at</h2>" + table(("Student", "What"), wrong, numbers=()))
    if asked := [(_student(one), c.exercise, c.request) for one in graded for c in one.adjustments if c.open]:
        body.append("<h2>Open requests</h2>" + table(("Student", "Exercise", "Request"), asked, numbers=()))
    for lab in sorted({one.assignment for one in graded}):
        body += _lab(lab, [one for one in graded if one.assignment == lab])
    body.append("<h2>Students</h2>" + _students(graded))
    if changes := [(one, c) for one in graded for c in one.adjustments if not c.open]:
        rows = [(_student(one), c.exercise or "(whole)", f"{c.change:+g}", c.comment, c.request) for one, c in changes]
        head = ("Student", "Exercise", "Points", "Comment", "Request")
        body.append("<h2>Changed by hand</h2>" + table(head, rows, numbers=(2,)))
    if late := [one for one in graded if one.days_late and not one.error]:
        days = [(_student(one), one.assignment, one.days_late, f"{one.penalty:g}") for one in late]
        columns = ("Student", "Lab", "Days begun", "Points taken off")
        body.append("<h2>Handed in late</h2>" + table(columns, days, numbers=(2, 3)))
    if claims := [(_student(one), "; ".join(one.claims)) for one in graded if one.claims]:
        words = "<p>Students can write these themselves. They are shown, and were not used.</p>"
        body.append(
            "<h2>Times that do not count</h2>" + words + table(("Student", "What they say"), claims, numbers=())
        )
    return page("Class summary", body, wide=True)


def _students(graded: Sequence[Graded]) -> str:
    """Every submission with its points and where they come from. by hand, late: points that came, or were taken."""
    rows = []
    for one in sorted(graded, key=lambda one: (one.student_id, one.assignment)):
        failed = sum(not check.passed for result in one.results for check in result.checks)
        handed_in = f"{one.timestamp} ({one.source})" if one.timestamp else "not known"
        by_hand, penalty = f"{one.by_hand:+g}" if one.by_hand else "", f"-{one.penalty:g}" if one.penalty else ""
        score = "could not be graded" if one.error and not one.by_hand else f"{one.score:g} of {one.max_score}"
        rows.append((_student(one), one.assignment, handed_in, one.from_checks, by_hand, penalty, score, failed or ""))
    head = ("Student", "Lab", "Handed in (UTC)", "From checks", "By hand", "Late", "Points", "Failing checks")
    return table(head, rows, numbers=range(3, 8))


def _lab(lab: str, graded: Sequence[Graded]) -> list[str]:
    marked = [one for one in graded if not one.error]
    head = f"<h2>{text_in_html(lab or 'Unknown lab')}</h2><p>{len(graded)} submissions, {len(marked)} graded"
    if not marked:
        return [head + ".</p>"]
    scores = sorted(one.score for one in marked)
    full = max(one.max_score for one in marked)
    median = scores[(len(scores) - 1) // 2]
    seconds = [one.seconds for one in marked if one.seconds]
    parts = [
        f"{head}; of {full} points: lowest {scores[0]:g}, median {median:g}, highest {scores[-1]:g}.</p>",
        "<h3>Submissions by score</h3>",
        _bars(_binned(scores, full, SCORE_BINS), "submissions"),
        "<h3>Points by exercise, mean share of what it is worth</h3>",
        _bars(list(_shares(marked)), "% of its points"),
        "<h3>Verdicts</h3>",
        table(("Exercise", *(v.replace("_", " ") for v in Verdict)), list(_verdicts(marked)), numbers=range(1, 5)),
    ]
    if failing := _failing(marked):
        bars = [(name, len(who)) for name, who in failing[:MOST]]
        rows = [(name, len(who), ", ".join(who)) for name, who in failing]
        parts += ["<h3>Checks that fail most, where the exercise was attempted</h3>", _bars(bars, "submissions")]
        parts += ["<h3>Every failing check</h3>", table(("Check", "Submissions", "Whose"), rows, numbers=(1,))]
    if seconds:
        answers = sum(one.checks_seconds for one in marked) / max(1e-9, sum(seconds))
        parts += [
            "<h3>Time to grade one submission, seconds</h3>",
            _bars(_binned(seconds, max(seconds), TIME_BINS), "submissions"),
            f"<p>Answers ran for {answers:.0%} of it.</p>",
        ]
    return parts


def _binned(values: Sequence[float], top: float, bins: int) -> list[tuple[str, float]]:
    """Counts of values from 0 to `top` in equal parts; the last one has its upper end, too."""
    width = top / bins or 1.0
    counts = Counter(min(bins - 1, int(value / width)) for value in values)
    return [(f"{i * width:.3g} to {(i + 1) * width:.3g}", counts[i]) for i in range(bins)]


def _shares(marked: Sequence[Graded]) -> Iterable[tuple[str, float]]:
    for number, (_, title) in enumerate(marked[0].titles):
        results = [one.results[number] for one in marked]
        shares = [result.points / result.max_points for result in results if result.max_points]
        yield title, 100 * sum(shares) / max(1, len(shares))


def _verdicts(marked: Sequence[Graded]) -> Iterable[tuple]:
    for number, (_, title) in enumerate(marked[0].titles):
        counts = Counter(one.results[number].verdict for one in marked)
        yield (title, *(counts[verdict] for verdict in Verdict))


def _failing(marked: Sequence[Graded]) -> list[tuple[str, list[str]]]:
    """Every check that somebody failed who attempted its exercise, and who did; what most fail comes first."""
    failed: dict[str, list[str]] = {}
    for one in marked:
        for result in one.results:
            if result.verdict != Verdict.NOT_ATTEMPTED:
                for check in result.checks:
                    if not check.passed and check.message != COUNTS_FIRST:
                        failed.setdefault(f"{result.grade_id}: {check.name}", []).append(one.student_id)
    return sorted(failed.items(), key=lambda item: (-len(item[1]), item[0]))


def _bars(rows: Sequence[tuple[str, float]], unit: str) -> str:
    """Horizontal bars with their labels and numbers, and what they say in words for those who do not see them."""
    longest = max([value for _, value in rows] + [1e-9])
    height = ROW_HEIGHT * len(rows) + 4
    words = "; ".join(f"{label}: {value:.3g} {unit}" for label, value in rows)
    parts = [f'<svg viewBox="0 0 760 {height}" width="100%" role="img" aria-label="{text_in_html(words)}">']
    for number, (label, value) in enumerate(rows):
        y = ROW_HEIGHT * number + 2
        width = BAR_WIDTH * value / longest
        shown = label if len(label) <= 48 else label[:47] + "…"
        parts.append(
            f'<text x="350" y="{y + 13}" text-anchor="end" font-size="12"'
            f' fill="currentColor">{text_in_html(shown)}</text><rect x="358" y="{y + 2}" width="{width:.1f}"'
            f' height="{ROW_HEIGHT - 5}" fill="#4878a8"/><text x="{364 + width:.1f}" y="{y + 13}" font-size="12"'
            f' fill="currentColor">{value:.3g}</text>'
        )
    return "".join(parts) + "</svg>"
