"""What a submission has to pass before anything is scored. Each gate says what it saw and what was allowed.

    start     it can be read, and its engine starts
    conduct   own.py keeps its rules and stays in its process
    budget    keys and values within the track's bytes; the processes within their memory
    answers   every generated token is the reference's own choice, or within the track's regret of it
    drawn     sampled texts have the reference's distribution: chi-square at a false-alarm rate of 10^-4
    nats      (open) the model predicts held-out text at most so much worse
    api       OpenAI clients are answered as they should be
    bound     no run was faster than the arithmetic allows, and no token came before its request
    advice    own.py advised to the end; if not, what was served before counts in part

The reference is the shipped model as `load` gives it, in the judge's process, without a cache: rows of a text go
through it once, teacher-forced. Two floating-point orders of one sum differ in their last bits, so a tie may fall
either way; a regret below TIE_NATS is one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from workbench.capstone.served import Refused, Run
from workbench.capstone.traces import Asked, held_out_passages
from workbench.capstone.tracks import Track
from workbench.errors import in_one_line
from workbench.kv import Recompute
from workbench.models.batch import Batch
from workbench.models.fast import Model
from workbench.speculation.drafts.lookup import shared_length

GATES = ("start", "conduct", "budget", "answers", "drawn", "nats", "api", "bound", "time", "advice")
TIE_NATS = 1e-3
FALSE_ALARM = 1e-4  # of the gate "drawn", over all its tests together
DRAWN_TEXTS, DRAWN_TOKENS, TEMPERATURE = 192, 3, 1.0
ROWS_AT_ONCE = 4096  # of the reference
PASSAGES, PASSAGE_TOKENS = 24, 256
MIN_EXPECTED = 5.0  # of a cell of the chi-square test
EXACT_REGRET = 1e-4  # in the mean: float32 in another order


@dataclass(frozen=True)
class GateResult:
    """One gate: whether it was passed, what was seen, beside what was allowed. words: one line, whatever a submission
    put into it."""

    gate: str
    passed: bool
    words: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", in_one_line(self.words))


def log_probs(model: Model, texts: list[list[int]], counts: list[int]) -> list[torch.Tensor]:
    """For each text the log-probabilities [count, V] after its last `count` tokens but the last one: row i is the
    distribution of token len − count + i."""
    rows_of_texts: list[torch.Tensor] = []
    group: list[int] = []

    def run() -> None:
        if not group:
            return
        batch = Batch.of([texts[i][:-1] for i in group], logits=[counts[i] for i in group])
        with torch.inference_mode():
            logits = model(batch, Recompute(model.config))
        rows = torch.log_softmax(logits.double(), dim=-1)
        rows_of_texts.extend(rows.split([counts[i] for i in group]))
        group.clear()

    rows = 0
    for index, text in enumerate(texts):
        if group and rows + len(text) > ROWS_AT_ONCE:
            run()
            rows = 0
        group.append(index)
        rows += len(text)
    run()
    return rows_of_texts


def regrets(model: Model, trace: Iterable[Asked], run: Run) -> tuple[list[float], tuple[str, int, float]]:
    """Of each greedy token, log p(best) − log p(it) under the reference, and the worst: (request, token, nats)."""
    asked = {one.id: one for one in trace}
    names = [name for name in run.texts if not asked[name].temperature]
    texts = [[*asked[name].prompt_ids, *run.texts[name]] for name in names]
    counts = [len(run.texts[name]) for name in names]
    every: list[float] = []
    worst = ("", 0, 0.0)
    for name, count, rows in zip(names, counts, log_probs(model, texts, counts)):
        chosen = rows.gather(1, torch.tensor(run.texts[name])[:, None])[:, 0]
        regret = (rows.max(dim=1).values - chosen).tolist()
        place = max(range(count), key=regret.__getitem__)
        if regret[place] > worst[2]:
            worst = (name, place, regret[place])
        every += regret
    return every, worst


def answers(track: Track, model: Model, trace: tuple[Asked, ...], run: Run) -> GateResult:
    """Greedy tokens against the reference's own."""
    if run.facts.get("errors"):
        name, words = next(iter(run.facts["errors"].items()))
        return GateResult("answers", False, f"request {name} ended with an error: {words}")
    served, every = len(run.texts), 0
    if not served:
        return GateResult("answers", False, "no request was served")
    nats, (name, place, worst) = regrets(model, trace, run)
    every, mean = len(nats), sum(nats) / len(nats)
    near = track.max_regret_nats > EXACT_REGRET
    others = sum(one > TIE_NATS for one in nats)
    words = (
        f"{every:,} tokens of {served} requests: {others} are not the reference's choice, mean regret {mean:.1e} nats"
    )
    if near:
        passed = mean <= track.max_regret_nats
        return GateResult("answers", passed, f"{words} (allowed {track.max_regret_nats:g})")
    if others:
        words += f"; the first to look at is token {place} of request {name}, {worst:.3g} nats"
    return GateResult("answers", not others, f"{words} (allowed: ties of {TIE_NATS:g})")


def drawn_trace(prompts: list[tuple[int, ...]], seed: int) -> tuple[Asked, ...]:
    """Texts to be drawn: each prompt as often as any other, each text with a seed of its own."""
    return tuple(
        Asked(f"d{i}", prompts[i % len(prompts)], DRAWN_TOKENS, 0.0, TEMPERATURE, seed + i) for i in range(DRAWN_TEXTS)
    )


def drawn(model: Model, trace: tuple[Asked, ...], run: Run) -> GateResult:
    """The chi-square test of drawn tokens against the reference, for each prompt and each place in the texts.

    Places after the first depend on what was drawn before; the expected counts are then the sum of the reference's
    distributions after each of these beginnings. The counts vary no more than independent ones would, so that the
    false-alarm rate is at most the stated one.
    """
    from scipy.stats import chi2

    if len(run.texts) != len(trace):
        return GateResult("drawn", False, f"{len(trace) - len(run.texts)} of {len(trace)} texts were not drawn")
    texts = [[*one.prompt_ids, *run.texts[one.id]] for one in trace]
    rows = log_probs(model, texts, [DRAWN_TOKENS] * len(trace))
    tests: list[tuple[float, str]] = []
    for prompt in dict.fromkeys(one.prompt_ids for one in trace):
        members = [i for i, one in enumerate(trace) if one.prompt_ids == prompt]
        for place in range(DRAWN_TOKENS):
            expected = torch.stack([rows[i][place].div(TEMPERATURE).softmax(0) for i in members]).sum(0)
            seen = Counter(run.texts[trace[i].id][place] for i in members)
            statistic, freedom = chi_square(expected, seen)
            if freedom:
                tests.append((float(chi2.sf(statistic, freedom)), f"token {place}: χ² = {statistic:.1f} at {freedom}"))
    if not tests:
        return GateResult("drawn", False, "no test could be made: the texts hardly vary")
    least, words = min(tests)
    limit = FALSE_ALARM / len(tests)
    said = (
        f"{len(trace)} texts, {len(tests)} tests, the least likely p = {least:.2g} ({words}), refused below {limit:.1e}"
    )
    return GateResult("drawn", least >= limit, said)


def chi_square(expected: torch.Tensor, seen: Counter[int]) -> tuple[float, int]:
    """(statistic, degrees of freedom) of these counts. Tokens that are expected fewer than MIN_EXPECTED times are one
    cell together."""
    total = float(expected.sum())
    large = [int(token) for token in (expected >= MIN_EXPECTED).nonzero()[:, 0]]
    cells = [(float(expected[token]), seen.get(token, 0)) for token in large]
    rest = total - sum(count for count, _ in cells)
    others = sum(seen.values()) - sum(count for _, count in cells)
    if rest >= MIN_EXPECTED:
        cells.append((rest, others))
    elif cells:
        count, seen_here = cells.pop()
        cells.append((count + rest, seen_here + others))
    if len(cells) < 2:
        return 0.0, 0
    return sum((seen_here - count) ** 2 / count for count, seen_here in cells), len(cells) - 1


def nats_per_token(model: Model, seed: str) -> float:
    """Mean −log p of the second half of held-out passages."""
    texts = [list(ids) for ids in held_out_passages(PASSAGES, PASSAGE_TOKENS, seed)]
    half = PASSAGE_TOKENS // 2
    total = 0.0
    for text, rows in zip(texts, log_probs(model, texts, [half] * len(texts))):
        total -= float(rows.gather(1, torch.tensor(text[-half:])[:, None]).sum())
    return total / (half * len(texts))


def nats(track: Track, model: Model, reference: Model, seed: str) -> GateResult:
    """How much worse a model predicts held-out text than the course's."""
    if model.config.vocab_size != reference.config.vocab_size:
        return other_vocabulary(model.config.vocab_size, reference)
    ours, theirs = nats_per_token(reference, seed), nats_per_token(model, seed)
    worse = theirs - ours
    words = f"{theirs:.3f} nats per token, the course's model {ours:.3f}: {worse:+.3f} (allowed {track.max_nats:+.2f})"
    return GateResult("nats", math.isfinite(theirs) and worse <= track.max_nats, words)


def other_vocabulary(size: int, reference: Model) -> GateResult:
    """Of a model whose tokens are not the course's: nothing of it can be compared."""
    return GateResult(
        "nats", False, f"a vocabulary of {size:,} tokens, the course's has {reference.config.vocab_size:,}"
    )


def budget(track: Track, facts: dict[str, Any], *runs: Run) -> GateResult:
    """Bytes of keys and values: the pool, tiers below it, a draft's own cache; as reserved, in every run. facts: of an
    engine that started."""
    reserved = max([facts["pool_bytes"], *(run.facts.get("pool_bytes", 0) for run in runs)])
    words = f"{reserved:,} bytes of keys and values (pool, tiers, a draft's cache), {track.pool_bytes:,} allowed"
    return GateResult("budget", reserved <= track.pool_bytes, words)


def least_rows(trace: tuple[Asked, ...], run: Run) -> int:
    """Rows that any engine must compute for these texts: each different beginning once, but for the last token."""
    asked = {one.id: one for one in trace}
    # in sorted order a text has its longest known beginning in common with the one before it
    sent = sorted([*asked[name].prompt_ids, *new][:-1] for name, new in run.texts.items())
    return sum(len(text) - shared_length(before, text) for before, text in pairwise([[], *sent]))


def least_flops(model: Model, trace: tuple[Asked, ...], run: Run) -> int:
    """What any engine has to compute for these texts: each row through the parameters that a token passes, without the
    embedding, which is looked up; the output head once for each new token; attention for nothing."""
    config = model.config
    head = config.vocab_size * config.hidden_size
    tables = head * (1 if config.tie_embeddings else 2) + (config.context_length * config.hidden_size)
    row = max(0, config.num_active_parameters() - tables)
    return 2 * (least_rows(trace, run) * row + sum(map(len, run.texts.values())) * head)


Timed = tuple[tuple[Asked, ...], Run]


def bound(
    trace: tuple[Asked, ...], counted: Run, timed: Sequence[Timed], model: Model, peak_flops: float
) -> GateResult:
    """What no engine can do. timed: each run with the requests that it was sent. peak_flops: a second, of this machine,
    by its fastest type of number."""
    least = least_rows(trace, counted)
    if counted.totals.rows < least:
        return GateResult(
            "bound", False, f"{counted.totals.rows:,} rows were counted, and {least:,} is the least: void"
        )
    for asked, run in ((trace, counted), *timed):
        early = [one.id for one in asked if run.times_s.get(one.id) and run.times_s[one.id][0] < one.arrival_s]
        if early:
            return GateResult("bound", False, f"request {early[0]} has a token before it arrived: void")
    words = f"{counted.totals.rows:,} rows, at least {least:,}"
    for number, (asked, run) in enumerate(timed):
        seconds = least_flops(model, asked, run) / peak_flops
        said = f"{words}; timed run {number} took {run.ended_s:.2f} s, at least {seconds:.2f} s"
        if run.ended_s < seconds:
            return GateResult("bound", False, f"{said}: void")
        words = said if number == 0 else words
    return GateResult("bound", True, words)


def refused(error: Refused) -> GateResult:
    """The gate that an error stands for."""
    return GateResult(error.gate, False, str(error))
