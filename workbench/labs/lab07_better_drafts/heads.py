"""drafts.heads: how far draft heads and a draft model guess right, position by position, and what a tree adds to a
chain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from workbench.decoding.draws import BestDraws
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain
from workbench.generation import generate
from workbench.kv import make_kv
from workbench.labs.lab06_speculative_sampling.inputs import DRAFT, distribution_for
from workbench.labs.lab07_better_drafts.inputs import make_draft
from workbench.models.batch import Batch
from workbench.models.evaluation import held_out_passages
from workbench.models.fast import Model
from workbench.speculation import Ask, Draft, Proposal
from workbench.speculation.theory import expected_tokens_by_position

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

HEADS = ("model", "eagle", "medusa")
NODES = 12  # rows of a tree, and of the chain beside it; Medusa's chain ends where its heads do
BRANCHING = (3, 1, 1, 1)  # of those that take one: 3 + 3 + 3 + 3 = NODES
OWN, HELD_OUT = "the target's own", "held-out"


@dataclass(frozen=True)
class Text:
    """A text, and the target's hidden states of all its tokens."""

    tokens: list[int]
    hidden_states: torch.Tensor  # [n, d]


def ways(drafter: str) -> dict[str, dict]:
    """{name: how to make it} of a draft as a chain and as a tree of NODES."""
    if drafter == "medusa":
        return {"chain": {"tree": "chain"}, "tree": {"tree": "sparse", "nodes": NODES}}
    return {"chain": {}, "tree": {"branching": BRANCHING}}


def run_heads(bench: Bench, *, model, draft, drafters: str, passages: int, length: int) -> Iterator[Measurement]:
    """For each draft, as a chain and as a tree, and each kind of text a Measurement (unit "tokens", a sample a text):
    tokens per round gives, where a round begins at every token of its second half. Counts: kept_1 … of those that came
    to a position.
    """
    target = bench.model(model, arrangement="fast")
    oracle = bench.model(model)
    kinds = {
        HELD_OUT: held_out_passages(target.tokenizer, length, passages).tolist(),
        OWN: _own_texts(bench, target, passages, length),
    }
    texts = {kind: [_read(bench, oracle, tokens) for tokens in rows] for kind, rows in kinds.items()}
    settings = {**plain({"model": model, "draft": draft}), "passages": passages, "length": length}
    for drafter in drafters_of(drafters):
        for shape, how in ways(drafter).items():
            made = make_draft(bench, drafter, model, draft, **how)
            for kind, all_texts in texts.items():
                found = []
                for number, text in enumerate(all_texts, start=1):
                    bench.report(f"{drafter}, {shape}, {kind} text {number} of {passages}")
                    found.append(_matches(bench, made, text))
                yield _measurement(bench, {**settings, "drafter": drafter, "shape": shape, "texts": kind}, found)


def drafters_of(given: str) -> list[str]:
    names = list(HEADS) if given == "all" else [name.strip() for name in given.split(",")]
    for name in names:
        if name not in HEADS:
            raise WorkbenchError(f"drafts.heads compares {', '.join(HEADS)}, not {name!r}")
    return names


def _own_texts(bench: Bench, target: Model, passages: int, length: int) -> list[list[int]]:
    """What the target writes greedily after the first half of each passage, `length` tokens with it."""
    found = []
    for prompt in held_out_passages(target.tokenizer, length, passages)[:, : length // 2].tolist():
        bench.check_stop()
        how = {"max_new_tokens": length - len(prompt), "stop_token_ids": (), "kv": "contiguous"}
        found.append([*prompt, *generate(target, prompt, **how).tokens])
    return found


def _read(bench: Bench, oracle: Model, tokens: list[int]) -> Text:
    bench.check_stop()
    with torch.inference_mode():
        rows = oracle.hidden(Batch.of([tokens], device=oracle.device), make_kv("recompute", oracle.config))
    return Text(tokens, rows)


def _matches(bench: Bench, draft: Draft, text: Text) -> list[tuple[Proposal, int]]:
    """(proposal, how far the text goes along it) where a round begins after each token of its second half."""
    distribution, found, seen = distribution_for(text.tokens, temperature=0.0), [], 0
    places = range(len(text.tokens) // 2, len(text.tokens) - NODES)
    try:
        for at in places:
            bench.check_stop()
            # the target has read all but the last token of text[:at]; from there on the draft guesses
            hidden_states = text.hidden_states[seen : at - 1] if draft.wants_hidden_states else None
            seen = at - 1
            ask = Ask(
                "text",
                text.tokens[:at],
                NODES,
                NODES,
                distribution,
                BestDraws(),
                lambda confidence: True,
                hidden_states,
            )
            [proposal] = draft.propose([ask])
            found.append((proposal, _along(proposal, text.tokens[at : at + NODES])))
    finally:
        draft.release("text")
    return found


def _along(proposal: Proposal, following: Sequence[int]) -> int:
    """How many tokens deep these tokens lie in the tree."""
    at = -1
    for depth, token in enumerate(following):
        child = next((node for node in proposal.children(at) if proposal.tokens[node] == token), None)
        if child is None:
            return depth
        at = child
    return len(following)


def _measurement(bench: Bench, settings: dict, found: list[list[tuple[Proposal, int]]]) -> Measurement:
    depths = [depth for of_text in found for _, depth in of_text]
    deepest = max((proposal.depth for of_text in found for proposal, _ in of_text), default=0)
    counts: dict[str, float] = {"places": len(depths), "nodes": sum(len(p) for t in found for p, _ in t) / len(depths)}
    rates = []
    for position in range(1, deepest + 1):
        came = sum(depth >= position - 1 for depth in depths)
        if came:
            rates.append(sum(depth >= position for depth in depths) / came)
            counts[f"kept_{position}"] = rates[-1]
    per_text = [1 + sum(depth for _, depth in of_text) / len(of_text) for of_text in found]
    counts["tokens_per_round"] = 1 + sum(depths) / len(depths)
    assert abs(expected_tokens_by_position(rates) - counts["tokens_per_round"]) < 1e-9
    return bench.measurement(
        name="drafts.heads",
        settings=settings,
        samples=per_text,
        unit="tokens",
        counts=counts,
        check=f"{len(depths):,} places, each guess held to the text that follows",
    )


EXPERIMENT = Experiment(
    name="drafts.heads",
    lab=7,
    question="How far do draft heads see, and what does a tree add?",
    how=(
        "at every token of a text's second half each draft guesses twelve tokens, as a chain and as a tree; counted"
        " is how far the text goes along. The target's own greedy text is what a greedy request verifies; the"
        " held-out text was written by people."
    ),
    settings=(
        MODEL,
        DRAFT,
        Setting("drafters", "all", "text", help=f"{', '.join(HEADS)} with commas between, or all"),
        Setting("passages", 4, "int", 1, 32, brief=2, help="texts of each kind"),
        Setting("length", 112, "int", 32, 256, unit="tokens", brief=64, help="of each text"),
    ),
    run=run_heads,
    predict=no_times,
    record={"cpu": ({"passages": 12, "length": 128},), "cuda": ()},
)
