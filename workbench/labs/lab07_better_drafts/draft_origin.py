"""drafts.draft_origin: one text, and who wrote each of its tokens: a draft, the target where it corrected, the
bonus."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from workbench.decoding.loop import Generation
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain, token_text
from workbench.experiments.texts import prompts_of
from workbench.labs.lab06_speculative_sampling.inputs import DRAFT
from workbench.labs.lab06_speculative_sampling.round_costs import predicted_speed, round_costs, written_in_step
from workbench.labs.lab07_better_drafts.inputs import DRAFTER, KIND, LENGTHS, length_of, make_draft

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement


def run_origin(
    bench: Bench,
    *,
    model,
    draft,
    drafter: str,
    texts: str,
    prompt: int,
    lengths: str,
    temperature: float,
    new_tokens: int,
    repeats: int,
    seed: int,
    shown_round: int,
) -> Iterator[Measurement]:
    """One Measurement (unit "ratio", times as fast as plain decoding, a sample each turn). Its settings hold the text
    as "pieces", [text, who, kind, round] each: round 0 is the prompt's own, and kind is that of `Generation.kinds`."""
    target = bench.model(model, arrangement="fast")
    asked = prompts_of(texts, target, prompt)[-1]
    if len(asked) + new_tokens > target.config.context_length:
        raise WorkbenchError(
            f"the prompt has {len(asked)} tokens and {target.name} reads {target.config.context_length}; ask for fewer"
            " new ones"
        )
    bench.report("making the draft")
    made = make_draft(bench, drafter, model, draft)
    how: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": temperature, "seed": seed}
    bench.report("what a round of so many rows takes")
    cost = round_costs(bench, target, asked, temperature=temperature)
    predicted, results = [], []
    for turn in range(-1, repeats):  # one turn warms up
        bench.check_stop()
        bench.report(f"turn {turn + 1} of {repeats}")
        both = written_in_step(bench, target, asked, draft=made, draft_length=length_of(lengths), **how)
        got = both.drafted
        check = _compared(both.alone, got, temperature, made.name)
        if turn >= 0:
            results.append(both)
            predicted.append(predicted_speed(both, cost))
    stats = got.speculation
    drafted = sum(stats.drafted)
    yield bench.measurement(
        name="drafts.draft_origin",
        settings={
            **plain({"model": model, "draft": draft}),
            "drafter": drafter,
            "texts": texts,
            "prompt": prompt,
            "lengths": lengths,
            "temperature": temperature,
            "new_tokens": new_tokens,
            "seed": seed,
            "prompt_text": "".join(token_text(target, token) for token in asked),
            "pieces": pieces_of(target, got),
            "drafted": list(stats.lengths),
            "emitted": list(stats.tokens_per_round),
        },
        samples=[both.ratio for both in results],
        unit="ratio",
        counts={
            "rounds": stats.rounds,
            "plain_rounds": stats.plain_rounds,
            "calls_saved": stats.calls_saved,
            "drafted": drafted,
            "kept": stats.kinds.get("draft", 0),
            "tokens_per_round": sum(stats.tokens_per_round) / max(1, stats.rounds),
            "draft_calls": stats.draft_calls,
            "draft_s_per_round": stats.draft_s / max(1, stats.rounds),
            "plain_step_s": statistics.median(both.alone_s[1:]),
        },
        predicted=statistics.median(predicted),
        check=check,
    )


def pieces_of(target, got: Generation) -> list[list]:
    """[text, who, kind, round] of each token. The prompt's round is 0."""
    counts = got.speculation.tokens_per_round
    first = len(got.tokens) - sum(counts)
    rounds = [0] * first + [number for number, count in enumerate(counts, start=1) for _ in range(count)]
    return [
        [token_text(target, token), who, kind, number]
        for token, who, kind, number in zip(got.tokens, got.origins, got.kinds, rounds)
    ]


def _compared(alone: Generation, got: Generation, temperature: float, name: str) -> str:
    if temperature:
        return "drawn from the target's distribution; another text than without a draft, and as likely"
    if alone.tokens != got.tokens:
        at = next(i for i, (a, b) in enumerate(zip(alone.tokens, got.tokens)) if a != b)
        raise WorkbenchError(
            f"with draft {name} the greedy text differs from token {at + 1} on; its time was thrown away"
        )
    return f"all {len(got.tokens)} tokens are those of plain greedy decoding"


EXPERIMENT = Experiment(
    name="drafts.draft_origin",
    lab=7,
    question="Who wrote which token of this text, and how many calls of the target did that save?",
    how=(
        "the same request without a draft and with it in step, token by token; the time a token after the first."
        " Predicted: the counted rounds, each at the time of a round of so many rows (timed with a draft that costs"
        " nothing), and the draft's own time."
    ),
    settings=(
        MODEL,
        DRAFT,
        KIND,
        Setting("prompt", 1, "int", 1, 8, help="which of the held-out prompts of this kind"),
        DRAFTER,
        Setting(
            "lengths", "4", "choice", choices=LENGTHS, help="tokens to draft: a fixed K, a moving threshold, dynamic"
        ),
        Setting("temperature", 0.0, "float", 0.0, 2.0, step=0.1, help="0: greedy, and every token is compared"),
        Setting("new_tokens", 80, "int", 8, 256, unit="tokens", brief=24, help="to write"),
        Setting("repeats", 3, "int", 1, 20, brief=1, help="turns, without the draft and with it"),
        Setting("seed", 0, "int", 0, 10_000, help="of the draws, where temperature is above 0"),
        Setting("shown_round", 256, "int", 0, 256, help="the text is shown up to this round"),
    ),
    run=run_origin,
    predict=no_times,
    record={
        "cpu": tuple(
            {"texts": kind, "drafter": who}
            for kind, who in (("code", "model"), ("code", "prompt_lookup"), ("copying", "prompt_lookup"))
        ),
        "cuda": (),
    },
)
