"""speculate.exactness: what speculation writes with the real pair, held to the target's distribution by chi-square."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from workbench.decoding.draws import RandomDraws
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain
from workbench.kv import kv_for
from workbench.labs.lab06_speculative_sampling.inputs import DRAFT, distribution_for, pair_of
from workbench.labs.lab06_speculative_sampling.rules import MISTAKES, UNEQUAL, told_another_q
from workbench.models.batch import Batch
from workbench.models.evaluation import held_out_passages
from workbench.models.fast import Model
from workbench.speculation import verify
from workbench.speculation.theory import Verify, acceptance_rate, distribution_of_target, write_round

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

Path = tuple[int, ...]  # tokens after the text, by their places in `Distributions.alphabet`
RULE = "the rule"
RULES = (RULE, *MISTAKES, UNEQUAL)
TEXT_TOKENS = 64
CANDIDATES = 8  # texts that are looked at for each that is taken
MIN_EXPECTED = 5  # of a cell: below it the statistic has no chi-square distribution
MAX_PATHS = 40_000
STOP_EVERY = 500  # texts
BLOCK = 65_536  # uniform numbers drawn at once


# -- the pair's distributions after one text
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distributions:
    """Every distribution that writing `length` tokens after one text can need, on the tokens that have any
    probability."""

    alphabet: list[int]  # [A] token ids
    p: Mapping[Path, torch.Tensor]  # [A] float64 each: the target's, filtered
    q: Mapping[Path, torch.Tensor]  # the draft's, by the same filters
    raw: Mapping[Path, torch.Tensor]  # the draft's before the filters; sums to less than 1 here
    length: int

    @property
    def alpha(self) -> float:
        """Σ min(p, q) of the first token."""
        return float(acceptance_rate(self.p[()], self.q[()]))


def distributions_after(
    target: Model, draft: Model, text: list[int], *, length: int, temperature: float, top_k: int
) -> Distributions:
    """Level by level: all paths that either model can go get their rows in one flat batch of branches."""
    distribution = distribution_for(text, temperature=temperature, top_k=top_k)
    unfiltered = distribution_for(text, temperature=1.0)
    kvs = [kv_for("contiguous", m, max_tokens=m.config.context_length) for m in (target, draft)]
    paths: list[Path] = [()]
    raw: dict[Any, Any]
    q: dict[Any, Any]
    p: dict[Any, Any]
    p, q, raw = {}, {}, {}
    for level in range(length):
        logits = [_rows(m, kv, text, paths) for m, kv in zip((target, draft), kvs)]
        texts = [[*text, *path] for path in paths]
        ours, theirs = (distribution.probabilities(rows, texts.__getitem__) for rows in logits)
        p.update(zip(paths, ours))
        q.update(zip(paths, theirs))
        raw.update(zip(paths, unfiltered.probabilities(logits[1], texts.__getitem__)))
        if level + 1 < length:
            paths = [
                (*path, token)
                for path, a, b in zip(paths, ours, theirs)
                for token in ((a > 0) | (b > 0)).nonzero().flatten().tolist()
            ]
        if len(paths) > MAX_PATHS:
            raise WorkbenchError(
                f"more than {MAX_PATHS:,} texts can be written here; take a smaller top_k or draft length"
            )
    alphabet = torch.stack([row > 0 for row in (*p.values(), *q.values())]).any(0).nonzero().flatten()
    place = {token: i for i, token in enumerate(alphabet.tolist())}

    def compact(rows: dict[Path, torch.Tensor]) -> dict[Path, torch.Tensor]:
        return {tuple(place[t] for t in path): row[alphabet] for path, row in rows.items()}

    return Distributions(alphabet.tolist(), compact(p), compact(q), compact(raw), length)


@torch.inference_mode()
def _rows(model: Model, kv, text: list[int], paths: list[Path]) -> torch.Tensor:
    """[paths, V] logits after the text and each path. The text is remembered once."""
    if paths == [()]:
        return model(Batch.of([text], device=model.device), kv)
    nodes: dict[Path, int] = {}
    parents = []
    for end in range(1, len(paths[0]) + 1):
        for path in paths:
            if path[:end] not in nodes:
                nodes[path[:end]] = len(nodes)
                parents.append(nodes.get(path[: end - 1], -1))
    batch = Batch.of(
        [[node[-1] for node in nodes]],
        first_positions=[len(text)],
        parents=[parents],
        logits="all",
        device=model.device,
    )
    logits = model(batch, kv)
    kv.truncate(0, len(text))
    return logits[[nodes[path] for path in paths]]


# -- many texts --------------------------------------------------------------------------------------------------


class BlockDraws(RandomDraws):
    """The same draws; their uniform numbers are made many at a time."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(generator)
        self._numbers = self._stream(generator)

    @staticmethod
    def _stream(generator: torch.Generator) -> Iterator[float]:
        while True:
            yield from torch.rand(BLOCK, generator=generator, dtype=torch.float64).tolist()

    def uniform(self) -> float:
        return next(self._numbers)


def write_texts(
    bench: Bench, distributions: Distributions, draft_length: int, draws: RandomDraws, count: int, verify: Verify
) -> Counter[Path]:
    """How often each text of `length` tokens came, by the code that the engine runs: `rule.grow`, then verify."""
    found: Counter[Path] = Counter()
    for number in range(count):
        if number % STOP_EVERY == 0:
            bench.check_stop()
        text: Path = ()
        while (left := distributions.length - len(text)) > 1:
            branching = (1,) * min(draft_length, left - 1)  # as the engine: the last token needs no draft
            text += write_round(
                text, distributions.p.__getitem__, distributions.q.__getitem__, branching, draws, verify=verify
            )
        found[text if not left else (*text, draws.choose(distributions.p[text]))] += 1
    return found


@dataclass(frozen=True)
class ChiSquare:
    statistic: float
    cells: int
    p_value: float


def chi_square(seen: Mapping[Path, int], distribution: Mapping[Path, float]) -> ChiSquare:
    """Pearson's test of counts against a distribution. Cells that expect less than MIN_EXPECTED are one cell together.

    A text that the distribution cannot give settles it: the statistic is then that of a cell that expects one in a
    thousand.
    """
    count = sum(seen.values())
    expected = {text: count * share for text, share in distribution.items()}
    large = [text for text, number in expected.items() if number >= MIN_EXPECTED]
    cells = [(seen.get(text, 0), expected[text]) for text in large]
    rest = (count - sum(n for n, _ in cells), sum(expected.values()) - sum(e for _, e in cells))
    if rest[1] >= MIN_EXPECTED or not cells:
        cells.append(rest)
    else:
        last = min(range(len(cells)), key=lambda i: cells[i][1])
        cells[last] = (cells[last][0] + rest[0], cells[last][1] + rest[1])
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    impossible = sum(number for text, number in seen.items() if text not in distribution)
    statistic += 1000.0 * impossible**2
    freedom = max(len(cells) - 1, 1)
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return ChiSquare(statistic, len(cells), float(torch.special.gammaincc(halves[0], halves[1])))


# -- the experiment ----------------------------------------------------------------------------------------------


def run_exactness(
    bench: Bench,
    *,
    model,
    draft,
    rules: str,
    positions: int,
    draws: int,
    draft_length: int,
    temperature: float,
    top_k: int,
    false_alarm: float,
    seed: int,
    verify_chain: Verify | None = None,
) -> Iterator[Measurement]:
    """A Measurement for each rule at each text (unit "p-value"), with the counts and the verdict.

    verify_chain: a learner's own `verify`; it is tested in the rule's place and named "yours".
    """
    target, guesses = pair_of(bench, model, draft)
    settings = plain(
        {
            "model": model,
            "draft": draft,
            "draws": draws,
            "draft_length": draft_length,
            "temperature": temperature,
            "top_k": top_k,
            "false_alarm": false_alarm,
            "seed": seed,
        }
    )
    how: dict[str, Any] = {"length": draft_length + 1, "temperature": temperature, "top_k": top_k}
    places = undecided(bench, target, guesses, positions, temperature=temperature, top_k=top_k)
    for number, text in enumerate(places):
        bench.check_stop()
        bench.report(f"distributions after text {number + 1} of {len(places)}")
        distributions = distributions_after(target, guesses, text, **how)
        lists = {path: row.tolist() for path, row in distributions.p.items()}
        distribution = distribution_of_target(lists.__getitem__, distributions.length)
        total = math.fsum(distribution.values())
        assert abs(total - 1) < 1e-9, f"the target's distribution sums to {total}"
        tested = _tested(rules, distributions, verify_chain)
        for name, rule in tested.items():
            bench.report(f"{name}, text {number + 1} of {len(places)}")
            chance = BlockDraws(torch.Generator().manual_seed(seed + 1000 * number))
            found = chi_square(write_texts(bench, distributions, draft_length, chance, draws, rule), distribution)
            limit = false_alarm / len(places)
            yield bench.measurement(
                name="speculate.exactness",
                settings={**settings, "rule": name, "text": number, "alphabet": len(distributions.alphabet)},
                samples=[found.p_value],
                unit="p-value",
                counts={
                    "chi_square": found.statistic,
                    "cells": found.cells,
                    "draws": draws,
                    "texts": len(distribution),
                    "alpha": distributions.alpha,
                    "alarm_below": limit,
                    "alarm": int(found.p_value < limit),
                },
                check=(
                    f"texts of {distributions.length} tokens against the target's own distribution of them, "
                    f"{found.cells} cells of at least {MIN_EXPECTED} expected; an exact rule is called wrong in "
                    f"{false_alarm:.1%} of all runs"
                ),
            )


def undecided(
    bench: Bench, target: Model, draft: Model, count: int, *, temperature: float, top_k: int
) -> list[list[int]]:
    """Held-out texts after which a drafted token is kept about every other time: where every branch of the rule is
    taken."""
    bench.report("looking for texts where the models disagree half the time")
    found = []
    for text in held_out_passages(target.tokenizer, TEXT_TOKENS, CANDIDATES * count).tolist():
        bench.check_stop()
        distributions = distributions_after(target, draft, text, length=1, temperature=temperature, top_k=top_k)
        found.append((abs(distributions.alpha - 0.5), text))
    return [text for _, text in sorted(found)[:count]]


def _tested(rules: str, distributions: Distributions, yours: Verify | None) -> dict[str, Verify]:
    every = {RULE: verify, **MISTAKES, UNEQUAL: told_another_q(distributions.raw.__getitem__)}
    found = every if rules == "all" else {RULE: verify} | {rules: every[rules]}
    return {"yours": yours, **found} if yours is not None else found


EXPERIMENT = Experiment(
    name="speculate.exactness",
    lab=6,
    question="Does speculation write what the target would have written, with the same probabilities?",
    how=(
        "at held-out texts where a drafted token is kept about every other time, all distributions that K + 1 tokens "
        "can need"
        " are computed once; then texts of K + 1 tokens are written with the real rule, round by round, and counted."
        " Pearson's chi-square holds the counts to the target's exact distribution; texts expected fewer than five "
        "times are one"
        " cell. The false-alarm rate is shared by the positions (Bonferroni). Beside the rule, rules with one mistake"
        " each, on the same random numbers."
    ),
    settings=(
        MODEL,
        DRAFT,
        Setting("rules", "all", "choice", choices=("all", *RULES), help="which rules are tested"),
        Setting("positions", 4, "int", 1, 12, help="held-out texts"),
        Setting("draws", 4000, "int", 200, 200_000, brief=1000, help="texts written after each, by each rule"),
        Setting("draft_length", 2, "int", 1, 3, unit="tokens", help="K"),
        Setting("temperature", 1.0, "float", 0.1, 2.0, help="of target and draft alike"),
        Setting("top_k", 8, "int", 2, 50, unit="tokens", help="kept of each distribution, of target and draft alike"),
        Setting(
            "false_alarm",
            0.001,
            "choice",
            choices=(0.05, 0.01, 0.001, 0.0001),
            help="how often a right rule may be called wrong, over all positions together",
        ),
        Setting("seed", 0, "int", 0, 10_000),
    ),
    run=run_exactness,
    predict=no_times,
    learner=("verify_chain",),
    record={
        "cpu": ({"draws": 50_000},),
        "cuda": (),
    },  # 200,000 texts by each rule; a distribution is the same everywhere
)
