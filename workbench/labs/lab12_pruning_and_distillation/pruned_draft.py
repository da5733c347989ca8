"""pruning.pruned_draft: drafts of one target: how often they are accepted, what a step of theirs costs, what the two
predict, and what is measured on running code.

With acceptance rate α, K drafted tokens per round and a draft step of c target steps, a round gives
(1 − α^(K+1)) / (1 − α) tokens and takes 1 + K·c steps of the target (Leviathan et al., arXiv 2211.17192, theorem 3.8).
α is that of temperature 1 over held-out text; a greedy text is accepted more or less often.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Limits, Setting, no_times
from workbench.experiments.inputs import MODEL, plain, shape_of
from workbench.experiments.steps import CONTEXTS, Sequences
from workbench.experiments.texts import prompts_of
from workbench.labs.lab06_speculative_sampling.round_costs import InStep, written_in_step
from workbench.models import prepare
from workbench.models.checkpoints import shipped_names
from workbench.models.evaluation import acceptance_rate
from workbench.speculation import ModelDraft
from workbench.speculation.theory import expected_tokens, speedup

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.decoder import Decoder

NAME = "pruning.pruned_draft"
FROM_NOTHING, PRUNED = "stdlib-1m", "stdlib-1m-pruned"
LENGTHS = tuple(range(1, 9))  # drafted tokens per round
GOAL_ALPHA, GOAL_SPEED = 0.60, 1.1
BOTH = "both"


def drafts_here() -> list[str]:
    """The drafts whose weights are here, the one trained from nothing first."""
    here = shipped_names()
    return [name for name in (FROM_NOTHING, PRUNED) if name in here]


def run_pruned_draft(
    bench: Bench,
    *,
    model: str | Decoder,
    drafts: str | Decoder,
    tokens: int,
    cached: int,
    draft_length: int,
    prompts: int,
    new_tokens: int,
    temperature: float,
    repeats: int,
) -> Iterator[Measurement]:
    """For each draft, in the setting `measured`: "alpha" (unit "share", with its step's cost and what follows by
    length in its counts), then "speed" (unit "ratio", times as fast as plain decoding of held-out code, a sample a
    text).

    Raises WorkbenchError for a draft with another vocabulary, and where a greedy text differs from the plain one.
    """
    target = bench.model(model)
    small = [bench.model(name) for name in (drafts_here() if drafts == BOTH else [drafts])]
    settings = plain({"model": model}) | {"tokens": tokens, "cached": cached, "temperature": temperature}
    settings |= {"draft_length": draft_length, "prompts": prompts, "new_tokens": new_tokens}
    costs = _steps(bench, [target, *small], cached, repeats)
    for number, draft in enumerate(small, 1):
        bench.report(f"{draft.name}: acceptance on held-out text")
        accepted = acceptance_rate(target, draft, max_tokens=tokens, check_stop=bench.check_stop)
        ratios = [mine / its for mine, its in zip(costs[number], costs[0])]
        yield _alpha(bench, draft, accepted, ratios, settings)
    for draft in small:
        yield from _speed(bench, target, draft, settings, repeats)


def _steps(bench: Bench, models: list[Decoder], cached: int, repeats: int) -> list[list[float]]:
    """Seconds of decode steps of each, in turns."""
    every = [Sequences(bench, one, "float32", context=cached, max_sequences=1) for one in models]
    seconds: list[list[float]] = [[] for _ in every]
    for turn in range(-1, repeats):
        bench.check_stop()
        bench.report(f"decode steps, turn {max(0, turn) + 1} of {repeats}")
        for one, taken in zip(every, seconds):
            last = turn == repeats - 1
            took, logits = one.run(one.fast, one.step(1, turn, last=last))
            if turn >= 0:
                taken.append(took)
            if last:
                one.check(logits[-1])
    return seconds


def _alpha(bench: Bench, draft: Decoder, accepted: dict[str, Any], ratios: list[float], settings: dict) -> Measurement:
    alpha, cost = accepted["alpha"], statistics.median(ratios)
    counts = {
        "agreement": accepted["agreement"],
        "positions": accepted["positions"],
        "parameters": draft.num_parameters(),
        "step_cost": cost,
        "lowest_step_cost": min(ratios),
        "highest_step_cost": max(ratios),
    }
    for length in LENGTHS:
        counts[f"tokens_per_round_{length}"] = float(expected_tokens(alpha, length))
        counts[f"speedup_{length}"] = float(speedup(alpha, length, cost))
    return bench.measurement(
        name=NAME,
        settings={**settings, "measured": "alpha", "draft": draft.name},
        samples=[alpha],
        unit="share",
        counts=counts,
        check="Σ min(p, q) at every position of the same held-out text",
    )


def _speed(bench: Bench, target: Decoder, draft: Decoder, settings: dict, repeats: int) -> Iterator[Measurement]:
    fast, small = prepare(target), prepare(draft)
    length, count = settings["draft_length"], settings["prompts"]
    how = {"max_new_tokens": settings["new_tokens"], "temperature": settings["temperature"]}
    made: list[InStep] = []
    for number, prompt in enumerate(prompts_of("code", fast, count)):
        for turn in range(-1 if not number else 0, 1):  # the first one warms up
            bench.check_stop()
            bench.report(f"{draft.name}: text {number + 1} of {count}")
            both = written_in_step(
                bench, fast, prompt, draft=ModelDraft(small), draft_length=length, seed=number, **how
            )
            if not settings["temperature"] and both.alone.tokens != both.drafted.tokens:
                raise WorkbenchError(f"with {draft.name} the greedy text differs from the plain one; nothing is timed")
            if turn == 0:
                made.append(both)
    stats = [both.drafted.speculation for both in made]
    rounds = sum(s.rounds for s in stats)
    yield bench.measurement(
        name=NAME,
        settings={**settings, "measured": "speed", "draft": draft.name},
        samples=[both.ratio for both in made],
        unit="ratio",
        counts={
            "ratio_of_all_texts": sum(sum(b.alone_s[1:]) for b in made) / sum(sum(b.drafted_s[1:]) for b in made),
            "tokens_per_round": sum(sum(s.tokens_per_round) for s in stats) / rounds,
            "rounds": rounds,
        },
        check="greedy texts are those of plain decoding" if not settings["temperature"] else "drawn by the target",
    )


def limits(*, model: str | Decoder, **settings: Any) -> Limits:
    room = shape_of(model).context_length
    return {"cached": lambda tokens: tokens < room}


EXPERIMENT = Experiment(
    name=NAME,
    lab=12,
    question="A draft cut from its target and healed by it: is it accepted more often, and is decoding faster?",
    how=(
        "acceptance is Σ min(p, q) at every position of held-out text, temperature 1. Steps of target and drafts"
        " are timed in"
        " turns. Then held-out code is written on, plainly and with a draft in step, token by token; ratios are"
        " those of"
        " the time after the first token"
    ),
    settings=(
        MODEL,
        Setting("drafts", BOTH, "choice", choices=(BOTH, FROM_NOTHING, PRUNED), help="that are compared"),
        Setting(
            "tokens", 32_768, "int", 512, 110_000, unit="tokens", step=512, brief=512, help="of held-out text, for α"
        ),
        Setting("cached", 128, "choice", choices=CONTEXTS, unit="tokens", help="of a timed step"),
        Setting("draft_length", 4, "int", 1, 16, unit="tokens", help="drafted per round"),
        Setting("prompts", 8, "int", 1, 16, brief=1, help="pieces of held-out code that are written on"),
        Setting("new_tokens", 96, "int", 8, 512, unit="tokens", brief=8, help="written after each"),
        Setting("temperature", 0.0, "float", 0, 2, step=0.1, help="0: greedy, texts compared; above: drawn"),
        Setting("repeats", 15, "int", 1, 200, brief=1, help="timed steps of each model"),
    ),
    run=run_pruned_draft,
    predict=no_times,
    limits=limits,
    record={"cpu": ({}, {"temperature": 1.0}), "cuda": ({},)},
)
