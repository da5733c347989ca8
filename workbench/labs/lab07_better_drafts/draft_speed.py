"""drafts.draft_speed: every draft on every kind of text, against plain decoding of the same engine, predicted and
measured.

Each prompt is written plainly and with a draft in step, token by token. What is compared is the time a token after the
first one, the draft's own reading of the prompt included. The prediction is made of parts: how many tokens per round
gave (counted), what a round of so many rows takes against a plain step (timed apart, with a draft that costs nothing),
and what the draft took.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workbench.errors import WorkbenchError, unknown
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, plain
from workbench.experiments.texts import PROMPT_SETS, prompts_of
from workbench.labs.lab06_speculative_sampling.inputs import DRAFT
from workbench.labs.lab06_speculative_sampling.round_costs import InStep, predicted_speed, round_costs, written_in_step
from workbench.models.fast import Model
from workbench.speculation import DRAFTS, Draft, Dynamic, FirstOf, LengthPolicy, ModelDraft, draft_for

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

SMALL_MODEL = "model"  # the one that the setting `draft` names
WARMUP_LENGTH = 4


@dataclass
class Contender:
    """One draft with one length policy, and what came of its requests."""

    name: str
    draft: Draft
    length: int | LengthPolicy
    results: list[InStep] = field(default_factory=list)  # turn by turn
    predicted: list[float] = field(default_factory=list)


def contenders_of(names: str, length: str, target: Model, small: Model, whole: Model) -> list[Contender]:
    """whole: the target before it was arranged for inference, for drafts that are made of its weights. names: "all" or
    draft names with commas between; a+b asks b where a has nothing to say. length: "fixed" (4; copies and phrases 8),
    "dynamic" or "both"."""
    chosen = [SMALL_MODEL, *DRAFTS, *COMBINED] if names == "all" else [name.strip() for name in names.split(",")]
    if length not in ("fixed", "dynamic", "both"):
        raise unknown("draft length", length, ("fixed", "dynamic", "both"))

    def made(name: str) -> Draft:
        if "+" in name:
            return FirstOf(*(made(part) for part in name.split("+")))
        if name == SMALL_MODEL:
            return ModelDraft(small)
        if name not in DRAFTS:
            raise unknown("draft", name, [SMALL_MODEL, *DRAFTS])
        return draft_for(name, whole if name in OF_WEIGHTS else target)

    found = []
    for name in chosen:
        draft, label = made(name), name.replace(SMALL_MODEL, small.name)
        if length in ("fixed", "both"):
            found.append(Contender(label, draft, fixed_length(name)))
        if length in ("dynamic", "both"):
            found.append(Contender(f"{label}, dynamic", draft, Dynamic()))
    return found


def kinds_of(texts: str) -> list[str]:
    """Kinds of text: "all", or names with commas between."""
    kinds = list(PROMPT_SETS) if texts == "all" else [kind.strip() for kind in texts.split(",")]
    for kind in kinds:
        if kind not in PROMPT_SETS:
            raise unknown("kind of text", kind, [*PROMPT_SETS, "all"])
    return kinds


def fixed_length(name: str) -> int:
    """Drafts whose tokens cost nothing may be longer."""
    return 8 if name in FREE else 4


DRAWN = "model,prompt_lookup,ngram,eagle,prompt_lookup+model"
COMBINED = ("prompt_lookup+model", "prompt_lookup+eagle")  # the second where the first has nothing to say
OF_WEIGHTS = ("self-int4",)
FREE = ("prompt_lookup", "ngram", "phrases", "lookahead")


# -- the turns ---------------------------------------------------------------------------------------------------


def run_speed(
    bench: Bench,
    *,
    model,
    draft,
    drafts: str,
    texts: str,
    lengths: str,
    prompts: int,
    new_tokens: int,
    temperature: float,
    repeats: int,
) -> Iterator[Measurement]:
    """A Measurement (unit "ratio", times as fast as plain decoding) for each kind of text and each draft."""
    target, small = bench.model(model, arrangement="fast"), bench.model(draft, arrangement="fast")
    kinds = kinds_of(texts)
    settings = {**plain({"model": model, "draft": draft}), "new_tokens": new_tokens, "temperature": temperature}
    bench.report("making the drafts")
    contenders = contenders_of(drafts, lengths, target, small, bench.model(model))
    longest = max((prompt for kind in kinds for prompt in prompts_of(kind, target, prompts)), key=len)
    _check_room(target, longest, new_tokens)
    bench.report("what a round of so many rows takes")
    cost = round_costs(bench, target, longest, temperature=temperature)
    for kind in kinds:
        for one in contenders:
            one.results, one.predicted = [], []
        yield from _of_kind(bench, target, contenders, cost, kind, prompts, repeats, settings)


def _check_room(target: Model, prompt: list[int], new_tokens: int) -> None:
    room = target.config.context_length - new_tokens
    if len(prompt) > room:
        raise WorkbenchError(f"{new_tokens} new tokens leave room for a prompt of {room}; ask for fewer")


def _of_kind(bench, target, contenders, cost, kind, count, repeats, settings) -> Iterator[Measurement]:
    texts = prompts_of(kind, target, count)
    new_tokens, temperature = settings["new_tokens"], settings["temperature"]
    for turn in range(-1, repeats):
        for number, prompt in enumerate(texts):
            if turn < 0 and number:
                break  # one prompt warms up
            bench.check_stop()
            bench.report(f"{kind}: turn {max(turn, 0) + 1} of {repeats}, prompt {number + 1} of {count}")
            how = {"max_new_tokens": new_tokens, "temperature": temperature, "seed": max(turn, 0)}
            for one in contenders:
                if turn < 0 and not isinstance(one.length, int):  # every size once
                    written_in_step(bench, target, prompt, draft=one.draft, draft_length=WARMUP_LENGTH, **how)
                both = written_in_step(bench, target, prompt, draft=one.draft, draft_length=one.length, **how)
                if not temperature:
                    _check_same(both, one.name)
                if turn >= 0:
                    one.results.append(both)
                    one.predicted.append(predicted_speed(both, cost))
    same = (
        "those of plain greedy decoding, token for token" if not temperature else "drawn by the target's distribution"
    )
    for one in contenders:
        yield bench.measurement(
            name="drafts.draft_speed",
            settings={**settings, "texts": kind, "drafter": one.name},
            samples=[both.ratio for both in one.results],
            unit="ratio",
            counts=_counts(one),
            predicted=statistics.median(one.predicted),
            check=f"all {len(one.results)} texts are {same}",
        )


def _check_same(both: InStep, name: str) -> None:
    alone, got = both.alone.tokens, both.drafted.tokens
    if got != alone:
        at = next(i for i, (a, b) in enumerate(zip(alone, got)) if a != b)
        raise WorkbenchError(
            f"with draft {name} the greedy text differs from token {at + 1} on; its time was thrown away"
        )


def _counts(one: Contender) -> dict[str, float]:
    stats = [both.drafted.speculation for both in one.results]
    reached, rounds = sum(sum(s.reached) for s in stats), sum(s.rounds for s in stats)
    tokens = sum(sum(s.tokens_per_round) for s in stats)
    alone_s, drafted_s = (
        sum(sum(getattr(both, whose)[1:]) for both in one.results) for whose in ("alone_s", "drafted_s")
    )
    plain_steps = rounds * alone_s / tokens  # seconds that so many plain steps took
    counts = {
        "ratio_of_all_texts": alone_s / drafted_s,
        "tokens_per_round": tokens / rounds,
        "calls_saved_share": sum(s.calls_saved for s in stats) / tokens,
        "plain_rounds_share": sum(s.plain_rounds for s in stats) / rounds,
        "draft_s_per_plain_step": sum(s.draft_s for s in stats) / plain_steps,
        "verify_s_per_plain_step": sum(s.verify_s for s in stats) / plain_steps,
        "measured_to_predicted": statistics.median(
            both.ratio / predicted for both, predicted in zip(one.results, one.predicted)
        ),
        "slowest_ratio": min(both.ratio for both in one.results),
    }
    if reached:
        counts["acceptance_rate"] = sum(sum(s.accepted) for s in stats) / reached
    for position in range(min(4, max(len(s.reached) for s in stats))):
        came = sum(s.reached[position] for s in stats if position < len(s.reached))
        kept = sum(s.accepted[position] for s in stats if position < len(s.accepted))
        if came:
            counts[f"acceptance_at_{position + 1}"] = kept / came
    return counts


EXPERIMENT = Experiment(
    name="drafts.draft_speed",
    lab=7,
    question="Which draft makes which text faster, by how much, and does the count of its parts predict it?",
    how="Each text plainly and with a draft in step, token by token; ratios of the time a token after the first.",
    settings=(
        MODEL,
        DRAFT,
        Setting("drafts", "model,prompt_lookup", "text", help="names with commas between, or all"),
        Setting("texts", "all", "text", help=f"{', '.join(PROMPT_SETS)}; several with commas between, or all"),
        Setting("lengths", "both", "text", help="fixed, dynamic (measured; off where it would lose), or both"),
        Setting("prompts", 3, "int", low=1, high=16, brief=1, help="of each kind of text"),
        Setting("new_tokens", 96, "int", low=8, high=512, brief=16, help="written after each prompt"),
        Setting("temperature", 0.0, "float", low=0, high=2, step=0.1, help="0: greedy, texts compared; above: drawn"),
        Setting("repeats", 2, "int", low=1, high=50, brief=1, help="turns over all prompts"),
    ),
    run=run_speed,
    predict=lambda ceilings, **settings: [],
    record={
        "cpu": (
            {"drafts": "all", "prompts": 4, "repeats": 1},
            {"drafts": DRAWN, "prompts": 4, "repeats": 1, "temperature": 0.8, "lengths": "dynamic"},
        ),
        "cuda": ({"drafts": "all"},),
    },
)
