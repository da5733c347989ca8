"""drafts.draft_threshold: policies of draft length on each kind of text, round by round, beside plain decoding."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain
from workbench.experiments.texts import PROMPT_SETS, prompts_of
from workbench.instruments.timing import exclusive
from workbench.labs.lab06_speculative_sampling.inputs import DRAFT, distribution_for, sequence_of, speculator_for
from workbench.labs.lab07_better_drafts.inputs import DRAFTER, LENGTHS, length_of, make_draft
from workbench.models.fast import Model
from workbench.speculation import Draft, Fixed, LengthPolicy, Round, length_policy

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

TWO, ALL = "code, digits", "all"


class Written:
    """One text, written round by round by the engine itself. draft None: plain decoding by the same code."""

    def __init__(
        self,
        target: Model,
        draft: Draft | None,
        prompt: list[int],
        policy: LengthPolicy,
        new_tokens: int,
        temperature: float,
        seed: int,
    ) -> None:
        distribution = distribution_for(prompt, temperature=temperature)
        self._speculator = speculator_for(target, draft, texts=1, tokens=len(prompt) + new_tokens)
        self.policy = policy
        self._sequence = sequence_of(
            "text", prompt, distribution=distribution, lengths=policy, max_new_tokens=new_tokens, seed=seed
        )
        self.rounds: list[Round] = []  # the first is the prompt's own

    def round(self) -> None:
        self.rounds += self._speculator.run([self._sequence])

    @property
    def tokens(self) -> list[int]:
        return self._sequence.generated_ids

    @property
    def done(self) -> bool:
        return not self._sequence.remaining

    @property
    def seconds(self) -> float:
        """Of the rounds after the prompt's own."""
        return sum(one.draft_s + one.verify_s for one in self.rounds[1:])

    def release(self) -> None:
        self._speculator.release("text")


def written_beside_plain(bench: Bench, target: Model, draft: Draft, prompt: list[int], policy: LengthPolicy, *how):
    """(plain, drafted): two texts in step, so that both see the same machine at every token."""
    alone, drafted = (Written(target, None, prompt, Fixed(1), *how), Written(target, draft, prompt, policy, *how))
    with exclusive(bench.check_stop):
        try:
            while not drafted.done:
                bench.check_stop()
                drafted.round()
                while len(alone.tokens) < len(drafted.tokens):
                    alone.round()
        finally:
            alone.release()
            drafted.release()
    return alone, drafted


def run_threshold(
    bench: Bench,
    *,
    model,
    draft,
    drafter: str,
    texts: str,
    prompts: int,
    new_tokens: int,
    temperature: float,
    repeats: int,
) -> Iterator[Measurement]:
    """A Measurement (unit "ratio", times as fast as plain decoding) for each kind of text and each policy. Its settings
    hold the last prompt's rounds: "drafted" and "emitted" tokens of each, and the "threshold" where there is one."""
    target = bench.model(model, arrangement="fast")
    guesses = make_draft(bench, drafter, model, draft)
    settings = {
        **plain({"model": model, "draft": draft}),
        "drafter": drafter,
        "prompts": prompts,
        "new_tokens": new_tokens,
        "temperature": temperature,
    }
    for kind in kinds_of(texts):
        asked = prompts_of(kind, target, prompts)
        policies = {name: length_policy(length_of(name)) for name in LENGTHS}
        found: dict[str, list[tuple[float, Written]]] = {name: [] for name in LENGTHS}
        for turn in range(-1, repeats):
            for number, prompt in enumerate(asked if turn >= 0 else asked[:1]):
                bench.check_stop()
                bench.report(f"{kind}: turn {max(turn, 0) + 1} of {repeats}, prompt {number + 1} of {prompts}")
                for name, policy in policies.items():
                    alone, got = written_beside_plain(
                        bench, target, guesses, prompt, policy.copy(), new_tokens, temperature, turn + 1
                    )
                    _check(alone, got, name, temperature)
                    if turn >= 0:
                        found[name].append((alone.seconds / got.seconds, got))
        for name, runs in found.items():
            yield _measurement(bench, {**settings, "texts": kind, "policy": name}, runs)


def kinds_of(texts: str) -> list[str]:
    return list(PROMPT_SETS) if texts == ALL else [name.strip() for name in texts.split(",")]


def _check(alone: Written, got: Written, name: str, temperature: float) -> None:
    if not temperature and alone.tokens != got.tokens:
        at = next(i for i, (a, b) in enumerate(zip(alone.tokens, got.tokens)) if a != b)
        raise WorkbenchError(
            f"with draft length {name} the greedy text differs from token {at + 1} on; its time was thrown away"
        )


def _measurement(bench: Bench, settings: dict, runs: list[tuple[float, Written]]) -> Measurement:
    every = [one for _, got in runs for one in got.rounds[1:]]
    last = runs[-1][1]
    trace = {
        "drafted": [one.proposal.depth for one in last.rounds[1:]],
        "kept": [one.accepted for one in last.rounds[1:]],
        "emitted": [len(one.emitted) for one in last.rounds[1:]],
        "threshold": [float(value) for value in getattr(last.policy, "history", ())],
    }
    drafted = sum(one.proposal.depth for one in every)
    same = (
        "all texts are those of plain greedy decoding"
        if not settings["temperature"]
        else "drawn from the target's distribution"
    )
    return bench.measurement(
        name="drafts.draft_threshold",
        settings={**settings, **trace},
        samples=[ratio for ratio, _ in runs],
        unit="ratio",
        counts={
            "tokens_per_round": sum(len(one.emitted) for one in every) / len(every),
            "drafted_per_round": drafted / len(every),
            **({"kept_share": sum(one.accepted for one in every) / drafted} if drafted else {}),
            "plain_rounds_share": statistics.mean(not one.proposal.depth for one in every),
        },
        check=same,
    )


EXPERIMENT = Experiment(
    name="drafts.draft_threshold",
    lab=7,
    question="How many tokens should be drafted, on text that is easy to guess and on text that is not?",
    how=(
        "the same requests with every policy of draft length, and each in step with one that has no draft; a text's"
        " time is that of its rounds after the prompt's own."
    ),
    settings=(
        MODEL,
        DRAFT,
        DRAFTER,
        Setting("texts", TWO, "choice", choices=(TWO, ALL, *PROMPT_SETS), help="kinds of held-out text"),
        Setting("prompts", 2, "int", 1, 8, brief=1, help="of each kind of text"),
        Setting("new_tokens", 80, "int", 8, 256, unit="tokens", brief=16, help="written after each prompt"),
        Setting("temperature", 0.0, "float", 0.0, 2.0, step=0.1, help="0: greedy, and every token is compared"),
        Setting("repeats", 2, "int", 1, 20, brief=1, help="turns over all prompts"),
    ),
    run=run_threshold,
    predict=no_times,
    record={"cpu": ({"texts": ALL, "prompts": 3},), "cuda": ({"texts": ALL},)},
)
