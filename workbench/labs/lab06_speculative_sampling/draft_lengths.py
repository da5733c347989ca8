"""speculate.draft_lengths: how many tokens to draft. Speed-up by K, predicted from acceptance and costs, and
measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.experiments.cached_steps import parts_at_a_tie
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, plain
from workbench.experiments.texts import PROMPT_SETS, prompts_of
from workbench.labs.lab06_speculative_sampling.costs import DRAFT as DRAFTING
from workbench.labs.lab06_speculative_sampling.costs import PLAIN, RoundParts, predicted_pass
from workbench.labs.lab06_speculative_sampling.inputs import DRAFT, pair_of
from workbench.labs.lab06_speculative_sampling.round_costs import written_in_step
from workbench.speculation import Dynamic, ModelDraft
from workbench.speculation.runner import SpeculationStats
from workbench.speculation.theory import expected_tokens_by_position, speedup

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
DYNAMIC = "dynamic"  # the length of the most expected tokens per time, or none
COST_TURNS = 12
CONTEXT = 128  # tokens a text has where the parts of a round are timed


def lengths_up_to(longest: int) -> list[int]:
    return [K for K in LENGTHS if longest >= K]


# -- predicted ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartCosts:
    """In steps of the target."""

    step_s: float
    c: float  # of a drafted token
    verify: dict[int, float]  # of a pass over K + 1 rows, by K


def predicted_costs(ceilings: Ceilings, model, draft, lengths: Sequence[int]) -> PartCosts:
    """From the shapes and the machine's ceilings alone."""
    step = predicted_pass(ceilings, model, rows=1, context=CONTEXT).seconds
    drafted = predicted_pass(ceilings, draft, rows=1, context=CONTEXT).seconds
    verify = {K: predicted_pass(ceilings, model, rows=K + 1, context=CONTEXT).seconds / step for K in lengths}
    return PartCosts(step, drafted / step, verify)


def predict_lengths(ceilings: Ceilings, *, model, draft, longest: int, **_: Any) -> Sequence[tuple[float, float, str]]:
    """(K, seconds of verifying K drafted tokens, limit)."""
    passes = []
    for K in lengths_up_to(longest):
        one = predicted_pass(ceilings, model, rows=K + 1, context=CONTEXT)
        passes.append((K, one.seconds, one.limit))
    return passes


# -- measured ----------------------------------------------------------------------------------------------------


def run_lengths(
    bench: Bench,
    *,
    model,
    draft,
    prompts: str,
    texts: int,
    new_tokens: int,
    temperature: float,
    longest: int,
    repeats: int,
) -> Iterator[Measurement]:
    """The costs of a drafted token and of each verification in steps (unit "ratio", "measured": "draft" or "verify"),
    the parts in turns; then for each K the speed-up over plain decoding (unit "ratio", "measured": "speed-up"), a
    sample each turn, with the acceptance by position among the counts."""
    target, guesses = pair_of(bench, model, draft)
    asked = prompts_of(prompts, target, texts)
    lengths = lengths_up_to(longest)
    settings = plain(
        {
            "model": model,
            "draft": draft,
            "prompts": prompts,
            "texts": texts,
            "new_tokens": new_tokens,
            "temperature": temperature,
            "longest": longest,
        }
    )
    promised = predicted_costs(bench.ceilings(), model, draft, lengths)
    measured = yield from _cost_measurements(bench, target, guesses, promised, settings, lengths)
    runs = _Requests(bench, bench.model(model), target, guesses, asked, new_tokens, temperature)
    ways: list[int | str] = [*lengths, DYNAMIC]
    for turn in range(repeats):
        for at, K in enumerate(ways):
            bench.check_stop()
            bench.report(f"{turn * len(ways) + at} of {repeats * len(ways)} runs: K = {K}, turn {turn + 1}")
            runs.turn(K)
    for length in lengths:
        yield runs.measurement(length, settings, *_expected(runs, length, promised, measured))
    yield runs.measurement(DYNAMIC, settings)


def _cost_measurements(bench: Bench, target, guesses, promised: PartCosts, settings, lengths: list[int]):
    """Yields the Measurements; returns the PartCosts that they say."""
    bench.report("timing the parts of a round")
    tokens = prompts_of("code", target, 4)
    text = [token for one in tokens for token in one][: CONTEXT + max(lengths)]
    parts = RoundParts(bench, target, guesses, [text], max(lengths))
    times: dict[str | int, list[float]] = {DRAFTING: []} | {K: [] for K in lengths}
    steps: dict[str | int, list[float]] = {part: [] for part in times}
    for turn in range(-2, COST_TURNS):
        for K in lengths:
            # as they follow one another when a text is written: a step a step, a verification a draft
            bench.check_stop()
            parts.run(PLAIN)
            step = parts.run(PLAIN)
            for part in (DRAFTING, K):
                seconds = parts.run(part)
                if turn >= 0:
                    times[part].append(seconds)
                    steps[part].append(step)

    def ratio(part, divisor: int, measured: str, predicted: float, **more) -> Measurement:
        return bench.measurement(
            name="speculate.draft_lengths",
            settings={**settings, "measured": measured, **more},
            samples=[seconds / divisor / step for seconds, step in zip(times[part], steps[part])],
            unit="ratio",
            counts={"step_s": statistics.median(steps[part])},
            predicted=predicted,
            check=f"each beside a plain step, after the same {CONTEXT} tokens",
        )

    drafted = ratio(DRAFTING, max(lengths), "draft", promised.c)
    yield drafted
    verify = {}
    for K in lengths:
        found = ratio(K, 1, "verify", promised.verify[K], K=K)
        verify[K] = found.median
        yield found
    return PartCosts(statistics.median(steps[DRAFTING]), drafted.median, verify)


def _expected(runs: _Requests, K: int, promised: PartCosts, measured: PartCosts) -> tuple[float, dict[str, float]]:
    """The speed-up by acceptance at each position and the parts timed apart; and other ways to predict it."""
    counts = runs.counts(K)
    cost = measured.verify[K] + K * measured.c
    return counts["expected_tokens"] / cost, {
        "from_one_alpha": speedup(counts["alpha"], K, measured.c, measured.verify[K]),
        "free_verification": speedup(counts["alpha"], K, measured.c),
        "from_shapes": counts["expected_tokens"] / (promised.verify[K] + K * promised.c),
    }


class _Requests:
    """The same prompts with every K, each in step with one that has no draft. K may be DYNAMIC."""

    def __init__(self, bench, oracle, target, guesses, prompts, new_tokens: int, temperature: float) -> None:
        self._bench, self._oracle, self._target = bench, oracle, target
        self._prompts, self._policy = prompts, Dynamic()
        self._draft = ModelDraft(guesses)
        self._how: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": temperature}
        self._ratios: dict[int | str, list[float]] = {}  # of all prompts of a turn
        self._stats: dict[int | str, list[SpeculationStats]] = {}
        self._ties = 0

    def turn(self, K: int | str) -> None:
        """All prompts once."""
        turn = len(self._ratios.setdefault(K, []))
        alone_s = drafted_s = 0.0
        for prompt in self._prompts:
            both = written_in_step(
                self._bench,
                self._target,
                prompt,
                draft=self._draft,
                draft_length=self._policy if K == DYNAMIC else K,
                seed=turn,
                **self._how,
            )
            alone_s, drafted_s = alone_s + sum(both.alone_s[1:]), drafted_s + sum(both.drafted_s[1:])
            self._stats.setdefault(K, []).append(both.drafted.speculation)
            if not self._how["temperature"]:
                self._ties += parts_at_a_tie(self._oracle, prompt, both.drafted.tokens, both.alone.tokens)
        self._ratios[K].append(alone_s / drafted_s)

    def counts(self, K: int | str) -> dict[str, float]:
        """What all requests with this K say together."""
        stats = self._stats[K]
        accepted, reached = (_summed([getattr(s, name) for s in stats]) for name in ("accepted", "reached"))
        rates = [a / r for a, r in zip(accepted, reached) if r]
        rounds = sum(s.rounds for s in stats)
        return {
            "alpha": sum(accepted) / max(1, sum(reached)),
            "tokens_per_round": sum(sum(s.tokens_per_round) for s in stats) / max(1, rounds),
            "expected_tokens": expected_tokens_by_position(rates),
            "rounds": rounds,
            "plain_rounds": sum(s.plain_rounds for s in stats),
            **{f"kept_{i + 1}": rate for i, rate in enumerate(rates)},
        }

    def measurement(
        self, K: int | str, settings: dict, predicted: float | None = None, others: dict | None = None
    ) -> Measurement:
        words = (
            "the tokens are those of plain decoding" if not self._how["temperature"] else "as many tokens as without"
        )
        if self._ties:
            words += f"; {self._ties} requests went another way at a tie within rounding"
        return self._bench.measurement(
            name="speculate.draft_lengths",
            settings={**settings, "measured": "speed-up", "K": K},
            samples=self._ratios[K],
            unit="ratio",
            counts={**self.counts(K), **(others or {})},
            predicted=predicted,
            check=words,
        )


def _summed(lists: Sequence[Sequence[int]]) -> list[int]:
    longest = max(map(len, lists), default=0)
    return [sum(one[i] for one in lists if i < len(one)) for i in range(longest)]


EXPERIMENT = Experiment(
    name="speculate.draft_lengths",
    lab=6,
    question="How many tokens should the draft guess before the target looks?",
    how=(
        "first a drafted token and the verification of K + 1 rows, each timed beside a plain step of the same engine."
        " Then the same requests with every K and with the dynamic length, each in step with one without a draft, token"
        " by token; greedy, every token is held to plain decoding. Predicted: tokens per round by the acceptance at "
        "each position, over the round's cost in steps, by the parts timed apart."
    ),
    settings=(
        MODEL,
        DRAFT,
        Setting("prompts", "code", "choice", choices=tuple(PROMPT_SETS), help="held-out text to go on from"),
        Setting("texts", 2, "int", 1, 16, brief=1, help="requests, one after the other"),
        Setting("new_tokens", 64, "int", 8, 256, unit="tokens", brief=32, help="to write in each"),
        Setting("temperature", 0.0, "float", 0.0, 2.0, step=0.1, help="0: greedy, and every token is compared"),
        Setting("longest", 8, "choice", choices=LENGTHS[2:], unit="tokens", help="K goes up to here"),
        Setting("repeats", 3, "int", 1, 20, brief=1, help="turns of all requests with every K"),
    ),
    run=run_lengths,
    predict=predict_lengths,
    record={
        "cpu": tuple({"prompts": name, "texts": 6, "longest": 12} for name in PROMPT_SETS),
        "cuda": ({"texts": 6},),
    },
)
