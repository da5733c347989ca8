"""speculate.batches: several texts at once, and what is left of the gain."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.experiments.cached_steps import parts_at_a_tie
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, plain
from workbench.experiments.texts import PROMPT_TOKENS, prompts_of
from workbench.labs.lab06_speculative_sampling.costs import DRAFT as DRAFTING
from workbench.labs.lab06_speculative_sampling.costs import PLAIN, RoundParts, predicted_pass
from workbench.labs.lab06_speculative_sampling.inputs import (
    DRAFT,
    distribution_for,
    pair_of,
    sequence_of,
    speculator_for,
)
from workbench.speculation import ModelDraft
from workbench.speculation.drafts.contract import Draft

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.models.fast import Model

BATCHES = (1, 2, 4, 8, 16, 32)
TURNS = 8


def predict_batches(
    ceilings: Ceilings, *, model, draft, largest_batch: int, draft_length: int, **_: Any
) -> Sequence[tuple[float, float, str]]:
    """(B, seconds of verifying K drafted tokens of each of B texts, limit)."""
    found = []
    for B in (b for b in BATCHES if b <= largest_batch):
        one = predicted_pass(ceilings, model, rows=draft_length + 1, context=PROMPT_TOKENS, texts=B)
        found.append((B, one.seconds, one.limit))
    return found


def run_batches(
    bench: Bench, *, model, draft, largest_batch: int, draft_length: int, new_tokens: int, repeats: int
) -> Iterator[Measurement]:
    """For each B three Measurements (unit "ratio"): a drafted token of B texts and a verification of B·(K + 1) rows, in
    steps of B texts ("measured": "draft", "verify"); and the speed-up over plain steps ("speed-up")."""
    target, guesses = pair_of(bench, model, draft)
    ceilings, K = bench.ceilings(), draft_length
    settings = plain({"model": model, "draft": draft, "draft_length": K, "new_tokens": new_tokens})
    for B in (b for b in BATCHES if b <= largest_batch):
        bench.report(f"{B} of {largest_batch} texts at once")
        prompts = prompts_of("code", target, B)
        times = _parts(bench, target, guesses, prompts, K)
        steps = times[PLAIN]

        def expected(one: str | Model, rows: int, B: int = B) -> float:
            return predicted_pass(ceilings, one, rows=rows, context=PROMPT_TOKENS, texts=B).seconds

        step = expected(model, 1)
        promised = {"draft": expected(draft, 1) / step, "verify": expected(model, K + 1) / step}
        found = {}
        for measured, part, divisor in (("draft", DRAFTING, K), ("verify", K, 1)):
            samples = [seconds / divisor / plain_s for seconds, plain_s in zip(times[part], steps)]
            found[measured] = statistics.median(samples)
            yield bench.measurement(
                name="speculate.batches",
                settings={**settings, "measured": measured, "batch": B},
                samples=samples,
                unit="ratio",
                counts={"step_s": statistics.median(steps)},
                predicted=promised[measured],
                check=f"in turns with a plain step of the same {B} texts",
            )
        oracle = bench.model(model)
        ratios, tokens, ties = _speedups(bench, oracle, target, guesses, prompts, K, new_tokens, repeats)
        yield bench.measurement(
            name="speculate.batches",
            settings={**settings, "measured": "speed-up", "batch": B},
            samples=ratios,
            unit="ratio",
            counts={"tokens_per_round": tokens},
            predicted=tokens / (found["verify"] + K * found["draft"]),
            check="greedy; as far as both wrote, each text has the tokens of plain decoding"
            + (f"; {ties} went another way at a tie within rounding" if ties else ""),
        )


def _parts(bench: Bench, target: Model, guesses: Model, prompts: Sequence[list[int]], K: int):
    parts = RoundParts(bench, target, guesses, prompts, K)
    times: dict[str | int, list[float]] = {part: [] for part in (PLAIN, DRAFTING, K)}
    for turn in range(-1, TURNS):
        for part, samples in times.items():
            bench.check_stop()
            seconds = parts.run(part)
            if turn >= 0:
                samples.append(seconds)
    return times


def _speedups(
    bench: Bench, oracle: Model, target: Model, guesses: Model, prompts, K: int, new_tokens: int, repeats: int
) -> tuple[list[float], float, int]:
    """(plain time a token over that with a draft, turn by turn; tokens per round and text; texts that part at a
    tie)."""
    draft = ModelDraft(guesses, max_sequences=len(prompts))
    ratios, tokens, ties = [], [], 0
    for _ in range(repeats):
        plain = _written(bench, target, None, prompts, K, new_tokens)
        drafted = _written(bench, target, draft, prompts, K, new_tokens)
        for prompt, mine, wanted in zip(prompts, drafted.texts, plain.texts):
            ties += parts_at_a_tie(oracle, prompt, mine, wanted)
        ratios.append(plain.s_per_token / drafted.s_per_token)
        tokens.append(drafted.tokens_per_round)
    return ratios, statistics.mean(tokens), ties


@dataclass(frozen=True)
class _Written:
    s_per_token: float
    tokens_per_round: float  # of a text
    texts: list[list[int]]  # new tokens


def _written(bench: Bench, target: Model, draft: Draft | None, prompts, K: int, new_tokens: int) -> _Written:
    """new_tokens · B tokens in all. No text ends before, so all rounds have B texts; the prompts are not timed."""
    distribution, room = distribution_for(prompts[0], temperature=0.0), (K + 1) * new_tokens + 1
    speculator = speculator_for(target, draft, texts=len(prompts), tokens=max(map(len, prompts)) + room)
    sequences = [
        sequence_of(i, one, distribution=distribution, lengths=K, max_new_tokens=room) for i, one in enumerate(prompts)
    ]
    speculator.run(sequences)
    seconds, rounds, written = 0.0, 0, 0
    while written < new_tokens * len(prompts):
        bench.check_stop()
        done = speculator.run(sequences)
        seconds += done[0].draft_s + done[0].verify_s
        rounds += 1
        written += sum(len(one.emitted) for one in done)
    for sequence in sequences:
        speculator.release(sequence.id)
    return _Written(seconds / written, written / rounds / len(prompts), [w.generated_ids for w in sequences])


EXPERIMENT = Experiment(
    name="speculate.batches",
    lab=6,
    question="How much of the gain is left when several texts share each step?",
    how="B held-out texts in one flat batch, greedy. A drafted token and a verification of B·(K + 1) rows are timed in "
    "turns with a plain step of the same texts; then B texts are written both ways, in turns, by the same engine. "
    "Predicted: the cost model's ratio of times; for the speed-up, tokens per round over the parts timed apart.",
    settings=(
        MODEL,
        DRAFT,
        Setting("largest_batch", 16, "choice", choices=BATCHES, unit="texts", help="B goes up to here"),
        Setting("draft_length", 4, "int", 1, 16, unit="tokens", help="K"),
        Setting("new_tokens", 24, "int", 4, 128, unit="tokens", brief=8, help="to write in each text"),
        Setting("repeats", 2, "int", 1, 20, brief=1, help="turns of writing with and without a draft"),
    ),
    run=run_batches,
    predict=predict_batches,
    record={"cpu": ({"largest_batch": 32, "repeats": 5},), "cuda": ({"largest_batch": 32, "repeats": 5},)},
)
