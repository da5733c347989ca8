"""A choice in words and tables: for a terminal, and row by row for a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from workbench.choosing.choose import Choice, Refused
from workbench.choosing.plans import Plan
from workbench.choosing.predict import FASTEST, UNITS, Predicted
from workbench.instruments.device import PUBLISHED

HEADER = ("", "TTFT p90", "TPOT p90", "binds", "a step's time", "configuration")
EXACT = 0.05  # differences that are smaller are of the search
REASONS = 6  # groups of refused plans that are shown


def rows(choice: Choice) -> list[list[str]]:
    """A row for each named plan under HEADER, the best first; the first column is the score with its unit."""
    return [[score(choice, one), *_latencies(one), one.binds or "-", spent(one), str(one.plan)] for one in choice.named]


def score(choice: Choice, one: Predicted) -> str:
    """With its unit."""
    return f"{one.score:,.4g} {UNITS[choice.asked.objective]}"


def _latencies(one: Predicted) -> list[str]:
    return [f"{1e3 * one.run.at_percentile(of, 90):,.3g} ms" for of in ("ttft_s", "tpot_s")]


def spent(one: Predicted) -> str:
    """What a step's time goes to, the largest part first."""
    total = sum(one.spent.values())
    parts = sorted(one.spent.items(), key=lambda part: -part[1])
    return ", ".join(f"{seconds / total:.0%} {limit}" for limit, seconds in parts if seconds > 0.05 * total)


def why(choice: Choice, one: Predicted) -> str:
    """A sentence: what keeps a plan from more."""
    fit, plan = one.fit, one.plan
    held = (
        f"{fit.weight_bytes / 1e9:,.1f} GB of weights per device leave {fit.blocks:,} blocks of 16 tokens,"
        f" {fit.kv_bytes_per_token / 1024:,.1f} KiB per token"
    )
    time = f"a step's time is {spent(one)}"
    if choice.asked.limits is None:
        return f"{held}; {time}"
    if not one.rate_per_s:
        missed = ", ".join(f"{name} by {share:.0%}" for name, share in one.run.missed(choice.asked.limits).items())
        return f"no rate meets the limits; missed by requests served alone: {missed}"
    named = {
        "TTFT": "TTFT binds: at a higher rate prompts wait too long",
        "TPOT": "TPOT binds: at a higher rate too many share a step",
        "memory": "memory binds: no blocks for more texts at a time",
        "max_running": f"max_running binds: {plan.max_running} texts at a time",
        FASTEST: "no limit binds at the highest rate that is tried for a group",
        "time for prompts": "prompts bind: they take all the time that next tokens leave",
    }
    return f"{named[one.binds]}; {time}; {held}"


def lost(choice: Choice, one: Predicted) -> str:
    """What a plan loses to the best, and in which switches it differs."""
    best = choice.best
    share = abs(one.score - best.score) / max(one.score, best.score) if one.score != best.score else 0.0
    amount = f"{share:.1%} worse" if share else "as good"
    return f"{amount}; differs in {differences(best.plan, one.plan)}"


def differences(a: Plan, b: Plan) -> str:
    names = ("serving", "weights", "kv", "tensor", "pipeline", "max_running", "token_budget", "replicas")
    unlike = [name for name in names if getattr(a, name) != getattr(b, name)]
    return ", ".join(f"{name} ({getattr(b, name)} for {getattr(a, name)})" for name in unlike)


def refused(choice: Choice) -> Iterator[str]:
    """A line for each group of plans that were refused for the same reason."""
    groups: dict[str, list[Refused]] = {}
    for one in choice.refused:
        groups.setdefault(one.why, []).append(one)
    for at, (reason, same) in enumerate(groups.items()):
        if at == REASONS:
            left = list(groups.values())[REASONS:]
            count = sum(one.plans for group in left for one in group)
            yield f"{count:,} plans for {len(left)} more reasons of this kind"
            return
        whats = "; ".join(one.what for one in same[:3]) + ("; …" if len(same) > 3 else "")
        yield f"{sum(one.plans for one in same):,} plans ({whats}): {reason}"


def sure(choice: Choice) -> Iterator[str]:
    """Lines: what was assumed, and whether the best stays the best on a machine that does less."""
    machine, sheet = choice.machine, PUBLISHED[choice.machine.name]
    ceilings, link = machine.ceilings, machine.link
    yield (
        f"assumed per device: {ceilings.read_bytes_per_s / 1e12:.3g} TB/s"
        f" ({ceilings.read_bytes_per_s / sheet.read_bytes_per_s:.0%} of the data sheet),"
        f" {ceilings.flop_per_s['bfloat16'] / 1e12:.3g} TFLOP/s"
        f" ({ceilings.flop_per_s['bfloat16'] / sheet.flop_per_s['bfloat16']:.0%}), {machine.memory_bytes / 1e9:.4g} GB;"
        f" {link.name} {link.bytes_per_s / 1e9:.3g} GB/s one way, {1e6 * link.call_s:.2g} µs a call and"
        f" {1e6 * link.hop_s:.2g} µs a hop"
    )
    for one in choice.sure:
        if not one.behind:
            yield f"with {one.what} it stays the best: {score(choice, one.best)}"
        elif one.behind < EXACT:
            yield f"with {one.what} it is as good as any: {score(choice, one.before)}"
        else:
            yield (
                f"with {one.what} it has {score(choice, one.before)}, {one.behind:.0%} behind the best there,"
                f" {score(choice, one.best)}: {one.best.plan}"
            )
    if choice.undecided:
        yield "not all plans that might be better were run by the twin; raise --plans"
    if choice.asked.workload.turns is not None:
        yield "conversations outlast a run of the twin, which sees their first turns; the formula has all of them"
    yield "not predicted: what weights and kv in few bits do to the text (lab 05 measures it); bursts of requests"


def asked_in_words(choice: Choice, name: str, workload: str) -> str:
    asked, machine = choice.asked, choice.machine
    limits: Sequence[str] = ()
    if asked.limits is not None:
        pairs = (("TTFT", asked.limits.ttft_s), ("TPOT", asked.limits.tpot_s))
        limits = [f"{what} at most {1e3 * limit:,.4g} ms" for what, limit in pairs if limit is not None]
    within = f", 90 % of the requests with {' and '.join(limits)}" if limits else ""
    if asked.objective == "latency":
        within = " of one request at a time" if asked.rate_per_s is None else f" at {asked.rate_per_s:g} requests/s"
    return f"{name} on {machine.devices} × {machine.name}, workload {workload}, for {asked.objective}{within}"


def lines(choice: Choice, name: str, workload: str) -> Iterator[str]:
    """The whole answer, without the table of `rows`."""
    yield asked_in_words(choice, name, workload)
    yield f"{choice.by_formula:,} plans by formula, {choice.by_twin} of them by the twin"
    yield ""
    yield f"best: {choice.best.plan}"
    yield f"  {score(choice, choice.best)}; {why(choice, choice.best)}"
    if choice.runner_up is not None:
        yield f"runner-up: {choice.runner_up.plan}"
        yield f"  {score(choice, choice.runner_up)}, {lost(choice, choice.runner_up)}"
    rounds_nothing = choice.lossless
    if rounds_nothing is not None and rounds_nothing.plan != choice.best.plan:
        yield f"best that rounds nothing to few bits: {rounds_nothing.plan}"
        yield f"  {score(choice, rounds_nothing)}, {lost(choice, rounds_nothing)}"


def print_rows(header: Sequence[str], table: Sequence[Sequence[str]]) -> None:
    """Columns of equal width; the last one is as long as it is."""
    widths = [max(len(row[at]) for row in (header, *table)) for at in range(len(header) - 1)]
    for row in (header, *table):
        cells = [cell.rjust(width) for cell, width in zip(row, widths)]
        print("  ".join([*cells, row[-1]]).rstrip())
