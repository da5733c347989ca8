"""speculate.stepper: one request by draft and verify, round by round, with every probability that decided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from workbench.decoding.sampling import TokenDistribution
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, PROMPT, plain, token_text, tokens_of
from workbench.kv import make_kv
from workbench.labs.lab06_speculative_sampling.inputs import (
    DRAFT,
    distribution_for,
    pair_of,
    sequence_of,
    speculator_for,
)
from workbench.models.batch import Batch
from workbench.models.fast import Model
from workbench.speculation import ModelDraft, Round, acceptance, residual
from workbench.speculation.theory import acceptance_rate

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

SHOWN = 6  # best tokens of the row that gave the last token
APART = 2e-3  # how far a distribution may lie, by rounding, from that of the model without a cache, in total variation
APART_CUT = 0.2  # … where top-p cuts it: rounding may move the cut past a token


def run_stepper(
    bench: Bench,
    *,
    model,
    draft,
    prompt: str,
    max_new_tokens: int,
    draft_length: int,
    temperature: float,
    top_p: float,
    seed: int,
    shown_round: int,
) -> Iterator[Measurement]:
    """A Measurement each round: samples are min(1, p / q) of the drafted tokens (of a round without a draft: p of its
    one token); settings say what was drafted and what came of it, in words."""
    target, guesses = pair_of(bench, model, draft)
    prompt_ids = tokens_of(model, prompt)
    distribution = distribution_for(prompt_ids, temperature=temperature, top_p=top_p)
    room = len(prompt_ids) + max_new_tokens
    speculator = speculator_for(target, ModelDraft(guesses), texts=1, tokens=room, keep_distributions=True)
    sequence = sequence_of(
        "text", prompt_ids, distribution=distribution, lengths=draft_length, max_new_tokens=max_new_tokens, seed=seed
    )
    settings = plain(
        {
            "model": model,
            "draft": draft,
            "prompt": prompt,
            "draft_length": draft_length,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
        }
    )
    oracle, number = bench.model(model), 0
    while sequence.remaining:
        bench.check_stop()
        bench.report(f"{max_new_tokens - sequence.remaining} of {max_new_tokens} tokens")
        text = list(sequence.token_ids)
        [done] = speculator.run([sequence])
        assert done.p is not None
        described = _description(target, done)
        yield bench.measurement(
            name="speculate.stepper",
            settings={**settings, "round": number, **described},
            samples=described["accept"] or [float(done.p[0][done.emitted[0].token_id])],
            unit="probability",
            counts={
                "drafted": len(done.proposal),
                "accepted": done.accepted,
                "emitted": len(done.emitted),
                "rows": done.rows,
            },
            check=_check(oracle, distribution, text, done),
        )
        number += 1
    speculator.release("text")


def _description(model: Model, done: Round) -> dict[str, Any]:
    """What the round did, in numbers and texts that a file can hold."""
    proposal, rows = done.proposal, done.p
    assert rows is not None
    looked = [(rows[n], q, token) for n, (q, token) in enumerate(zip(proposal.distributions, proposal.tokens))]
    return {
        "drafted": [token_text(model, token) for token in proposal.tokens],
        "p": [float(p[token]) for p, _, token in looked],
        "q": [float(q[token]) for _, q, token in looked],
        "accept": [float(acceptance(p, q, token)) for p, q, token in looked],
        "alpha": [float(acceptance_rate(p, q)) for p, q, _ in looked],
        "emitted": [(token_text(model, one.token_id), one.kind) for one in done.emitted],
        "last": _last_row(model, done),
    }


def _last_row(model: Model, done: Round) -> list[tuple[str, float, float, float]]:
    """(token, p, q, what it was drawn from) of the best tokens of the row that gave the round's last one. q is 0 where
    nothing was drafted: a bonus, or a plain step."""
    assert done.verdict is not None and done.p is not None
    at = len(done.verdict.path)
    p = done.p[at]
    q = torch.zeros_like(p) if done.verdict.bonus else done.proposal.distributions[at]
    drawn = p if done.verdict.bonus else residual(p, q)
    chosen = done.verdict.token
    best = torch.maximum(torch.maximum(p, q), drawn).topk(min(SHOWN, len(p))).indices.tolist()
    if chosen not in best:
        best[-1] = chosen
    return [(token_text(model, t), float(p[t]), float(q[t]), float(drawn[t])) for t in best]


def _check(oracle: Model, distribution: TokenDistribution, text: list[int], done: Round) -> str:
    """In words, that the round was decided by the distributions that the plain model gives without a cache, and that
    what it wrote follows from them. Raises WorkbenchError where not: such a round explains nothing."""
    tokens = [*text, *done.proposal.tokens]
    batch = Batch.of([tokens], logits=[len(done.proposal) + 1], device=oracle.device)
    with torch.inference_mode():
        logits = oracle(batch, make_kv("recompute", oracle.config)).float()
    rows = distribution.probabilities(logits, lambda row: tokens[: len(text) + row])
    assert done.verdict is not None and done.p is not None
    apart = float((rows - done.p).abs().sum(dim=1).max()) / 2
    if apart > (APART if distribution.settings.top_p == 1 else APART_CUT):
        raise WorkbenchError(
            f"the distributions of this round are {apart:.2g} in total variation from those of the model without a "
            "cache: the round is wrong, so it was thrown away"
        )
    emitted = [one.token_id for one in done.emitted]
    if emitted != [*done.proposal.tokens[: done.accepted], done.verdict.token][: len(emitted)]:
        raise WorkbenchError("the round wrote other tokens than it decided on, so it was thrown away")
    return f"distributions within {apart:.1g} (total variation) of the plain model's without a cache"


EXPERIMENT = Experiment(
    name="speculate.stepper",
    lab=6,
    question="What does the draft guess, and what does the target accept of it?",
    how="one request, round by round, by the engine itself: the draft draws K tokens from q, the target gives its "
    "p for each of them in one pass, the rule decides. Every p is held to the plain model without a cache.",
    settings=(
        MODEL,
        DRAFT,
        Setting("prompt", PROMPT, "text", help="what the models go on from"),
        Setting("max_new_tokens", 40, "int", 1, 60, unit="tokens", help="tokens to write"),
        Setting("draft_length", 4, "int", 1, 12, unit="tokens", help="K, drafted each round"),
        Setting("temperature", 1.0, "float", 0.1, 2.0, step=0.1, help="of target and draft alike"),
        Setting("top_p", 1.0, "float", 0.1, 1.0, step=0.05, help="of target and draft alike"),
        Setting("seed", 0, "int", 0, 10_000),
        Setting("shown_round", 1, "int", 0, 60, help="the picture shows this round; 0 is the prompt's own"),
    ),
    run=run_stepper,
    predict=no_times,
    record={"cpu": (), "cuda": ()},  # probabilities are the same everywhere
)
