"""The checked reading list as rows, as a page in Markdown, and as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from workbench.reading.claim import MEANING, Claim, NotChecked, Verdict

HEADER = ("verdict", "claim", "published", "computed", "by", "source")


def row(claim: Claim) -> tuple[str, ...]:
    """What HEADER names."""
    published = f"{claim.published} {claim.unit}".strip()
    return (claim.verdict().value, claim.says, published, claim.computed(), claim.how, claim.source)


def by_verdict(claims: Iterable[Claim]) -> dict[Verdict, int]:
    """How many there are of each, in the order of Verdict."""
    counted = Counter(claim.verdict() for claim in claims)
    return {verdict: counted[verdict] for verdict in Verdict}


def markdown(claims: Iterable[Claim], unchecked: Iterable[NotChecked]) -> str:
    """A page: what the verdicts mean, a table for each lab, and what was not checked."""
    every = list(claims)
    counted = by_verdict(every)
    lines = ["# The reading list, checked", "", f"{len(every)} published numbers, each computed again.", ""]
    lines += [f"- **{one.value}** ({counted[one]}): {MEANING[one]}" for one in Verdict]
    for lab in sorted({claim.lab for claim in every}):
        lines += ["", f"## Lab {lab:02}", "", table(claim for claim in every if claim.lab == lab)]
    return "\n".join([*lines, "", "## Not checked", "", table_of_unchecked(unchecked)]) + "\n"


def table(claims: Iterable[Claim], *, labs: bool = False) -> str:
    """In Markdown, a line for each. labs: with a first column for the number of the lab."""
    header = ("lab", *HEADER) if labs else HEADER
    rows = ((f"{claim.lab:02}", *row(claim)) if labs else row(claim) for claim in claims)
    return "\n".join(map(_line, (header, ["---"] * len(header), *rows)))


def table_of_unchecked(unchecked: Iterable[NotChecked]) -> str:
    rows = ((f"{one.lab:02}", one.says, one.source, one.why) for one in unchecked)
    return "\n".join(map(_line, (("lab", "number", "source", "why"), ["---"] * 4, *rows)))


def plain(claim: Claim) -> dict[str, object]:
    """For JSON."""
    return {
        "name": claim.name,
        "lab": claim.lab,
        "says": claim.says,
        "source": claim.source,
        "published": claim.published,
        "unit": claim.unit,
        "how": claim.how,
        "values": claim.values(),
        "verdict": claim.verdict().value,
    }


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
