"""Hidden checks of lab 10: the edges, other types, and how often memory is read. They never travel with the
exercises."""

from __future__ import annotations

from workbench.grading.check import Check
from workbench.labs.lab10_kernels.checks import int4, merge, norm, paged, probes, softmax


def hidden(name, probe, judge, cases, points=1) -> Check:
    return Check(name=name, points=points, cases=cases, probe=probe, judge=judge, hidden=True)


HIDDEN: dict[str, tuple[Check, ...]] = {
    "kernels-softmax": (
        hidden("minus-infinity", probes.run_softmax, softmax.judge_softmax, softmax.blank_cases, points=2),
        hidden("edges", probes.run_softmax, softmax.judge_softmax, softmax.edge_cases),
    ),
    "kernels-merge": (
        hidden("nothing", probes.run_merge, merge.judge_merge, merge.nothing_cases),
        hidden("sizes", probes.run_merge, merge.judge_sizes, merge.size_cases),
        hidden("twice", probes.run_merge_twice, merge.judge_merge, merge.twice_cases),
    ),
    "kernels-paged": (
        hidden("several", probes.run_paged, paged.judge_paged, paged.several_cases, points=2),
        hidden("views", probes.run_paged, paged.judge_paged, paged.view_cases),
        hidden("read-once", probes.run_paged, paged.judge_reads, paged.read_cases, points=2),
    ),
    "kernels-int4": (
        hidden("tails", probes.run_int4, int4.judge_int4, int4.tail_cases, points=2),
        hidden("float16", probes.run_int4, int4.judge_int4, int4.float16_cases),
        hidden("read-once", probes.run_int4, int4.judge_reads, int4.read_cases),
    ),
    "kernels-norm": (
        hidden("small", probes.run_norm, norm.judge_norm, norm.small_cases),
        hidden("float16", probes.run_norm, norm.judge_norm, norm.float16_cases),
        hidden("one-pass", probes.run_norm, norm.judge_reads, norm.read_cases),
    ),
}
