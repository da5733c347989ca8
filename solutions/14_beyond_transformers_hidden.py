"""Hidden checks of lab 14: other inputs and the edges. They never travel with the exercises."""

from __future__ import annotations

from workbench.grading.check import Check
from workbench.labs.lab14_beyond_transformers.checks import passes, probes, unmask


def hidden(name, probe, judge, cases, points=1) -> Check:
    return Check(name=name, points=points, cases=cases, probe=probe, judge=judge, hidden=True)


HIDDEN: dict[str, tuple[Check, ...]] = {
    "beyond-unmask": (
        hidden("blocks", probes.run_unmask_block, unmask.judge_block, unmask.block_cases),
        hidden("other-canvases", probes.run_unmask, unmask.judge_pass, unmask.other_cases),
    ),
    "beyond-passes": (
        hidden("other-texts", probes.run_passes_of, passes.judge_passes, passes.other_texts),
        hidden("other-cards", probes.run_speedup, passes.judge_speedup, passes.other_cards),
    ),
}
