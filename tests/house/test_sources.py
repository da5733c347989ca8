"""Claims about papers that texts name: who proved what."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEVIATHAN, CHEN = "2211.17192", "2302.01318"


def texts() -> dict[Path, str]:
    """Sources that name papers, each on one line."""
    folders = ("workbench", "notebooks/source", "solutions", "docs", "kernels")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*") if f.suffix in (".py", ".md")]
    return {f: re.sub(r"\s+#?\s*", " ", f.read_text(encoding="utf-8")) for f in files}


def test_the_rules_proof_is_theorem_1_of_chen_and_appendix_a_1_of_leviathan():
    """Leviathan and others have no theorem 1: theirs are 3.5, 3.8 and 3.11, and the proof is in appendix A.1."""
    named = {}
    for file, text in texts().items():
        for paper, where in re.findall(r"(2211\.17192|2302\.01318)((?:(?!2211\.17192|2302\.01318).){0,120})", text):
            assert paper == CHEN or not re.search(r"theorem 1\b", where), f"{file}: theorem 1 is Chen's, not of {paper}"
            named.setdefault(paper, set()).update(re.findall(r"theorem 1\b|appendix A\.1", where))
    assert named[LEVIATHAN] == {"appendix A.1"} and named[CHEN] == {"theorem 1"}
