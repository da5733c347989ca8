"""drafts.draft_tree: the draft tree of each round, what the target says at every node, and the branch that stays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain, token_text
from workbench.experiments.texts import prompts_of
from workbench.kv import make_kv
from workbench.labs.lab06_speculative_sampling.inputs import DRAFT, distribution_for, sequence_of, speculator_for
from workbench.labs.lab07_better_drafts.inputs import KIND, make_draft
from workbench.models.batch import Batch
from workbench.models.fast import Model
from workbench.speculation import Proposal, Round

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

DEEPEST = 12
APART = 2e-3  # total variation by which a node's distribution may differ from that of its branch read alone: rounding
SHAPES = {"3, 2, 1": (3, 2, 1), "2, 2, 2": (2, 2, 2), "4, 1, 1": (4, 1, 1), "1, 1, 1, 1": (1, 1, 1, 1)}
BRANCHED = ("model", "eagle", "ngram")  # take a branching; the others make trees of their own shape
DRAFTERS = ("model", "medusa", "eagle", "ngram", "lookahead")


def run_tree(
    bench: Bench,
    *,
    model,
    draft,
    drafter: str,
    branching: str,
    texts: str,
    prompt: int,
    temperature: float,
    new_tokens: int,
    seed: int,
    shown_step: int,
) -> Iterator[Measurement]:
    """A Measurement a round with a draft (unit "probability"): samples are the target's probability of each node after
    its branch. Settings hold the tree: "tokens", "parents", "path", the token that came "after" it and its "kind"."""
    target = bench.model(model, arrangement="fast")
    asked = prompts_of(texts, target, prompt)[-1]
    how = {"branching": SHAPES[branching]} if drafter in BRANCHED else {}
    guesses = make_draft(bench, drafter, model, draft, **how)
    distribution = distribution_for(asked, temperature=temperature)
    speculator = speculator_for(target, guesses, texts=1, tokens=len(asked) + new_tokens, keep_distributions=True)
    sequence = sequence_of(
        "text", asked, distribution=distribution, lengths=DEEPEST, max_new_tokens=new_tokens, seed=seed
    )
    settings = {
        **plain({"model": model, "draft": draft}),
        "drafter": drafter,
        "branching": branching,
        "texts": texts,
        "prompt": prompt,
        "temperature": temperature,
        "new_tokens": new_tokens,
        "seed": seed,
    }
    oracle, number = bench.model(model), 0
    try:
        while sequence.remaining:
            bench.check_stop()
            bench.report(f"{new_tokens - sequence.remaining} of {new_tokens} tokens")
            text = list(sequence.token_ids)
            [done] = speculator.run([sequence])
            if not len(done.proposal):
                continue
            number += 1
            yield _measurement(bench, oracle, distribution, settings, number, text, done)
    finally:
        speculator.release("text")


def _measurement(
    bench: Bench, oracle: Model, distribution, settings: dict, number: int, text: list[int], done: Round
) -> Measurement:
    proposal, verdict = done.proposal, done.verdict
    assert verdict is not None
    alone = distributions_read_alone(oracle, distribution, text, proposal)
    shares = [float(alone[parent + 1][token]) for parent, token in zip(proposal.parents, proposal.tokens)]
    return bench.measurement(
        name="drafts.draft_tree",
        settings={
            **settings,
            "round": number,
            "known": len(text) - 1,
            "text": "".join(token_text(oracle, token) for token in text[-12:]),
            "tokens": [token_text(oracle, token) for token in proposal.tokens],
            "parents": list(proposal.parents),
            "path": list(verdict.path),
            "after": token_text(oracle, verdict.token),
            "kind": done.emitted[-1].kind,
        },
        samples=shares,
        unit="probability",
        counts={
            "nodes": len(proposal),
            "depth": proposal.depth,
            "kept": done.accepted,
            "rows": done.rows,
            "tokens": len(done.emitted),
            "first_branch_kept": _along_first(proposal, done),
        },
        check=_check(distribution, alone, done),
    )


def _along_first(proposal: Proposal, done: Round) -> int:
    """Tokens that stayed of the first branch: what the chain of first children would have kept."""
    assert done.verdict is not None
    kept, at = 0, -1
    for node in done.verdict.path:
        if node != next(iter(proposal.children(at)), None):
            break
        kept, at = kept + 1, node
    return kept


def distributions_read_alone(oracle: Model, distribution, text: Sequence[int], proposal: Proposal) -> torch.Tensor:
    """[nodes + 1, V] the distribution after the text and after each node, each branch as a text of its own: no tree, no
    cache."""
    leaves = [node for node in range(len(proposal)) if not proposal.children(node)] or [-1]
    paths = [proposal.path_to(leaf) for leaf in leaves]
    rows = torch.empty(len(proposal) + 1, oracle.config.vocab_size, dtype=torch.float64)
    for path in paths:
        tokens = [*text, *(proposal.tokens[node] for node in path)]
        batch = Batch.of([tokens], logits=[len(path) + 1], device=oracle.device)
        with torch.inference_mode():
            logits = oracle(batch, make_kv("recompute", oracle.config)).float()
        found = distribution.confidences(logits, lambda row, all=tokens: all[: len(text) + row])
        for node, row in zip((-1, *path), found):
            rows[node + 1] = row
    return rows


def _check(distribution, alone: torch.Tensor, done: Round) -> str:
    """In words, that the tree's rows are those of its branches read one by one. Raises WorkbenchError where not."""
    assert done.verdict is not None
    if not distribution.greedy:
        assert done.p is not None
        apart = float((alone - done.p).abs().sum(dim=1).max()) / 2
        if apart > APART:
            raise WorkbenchError(
                f"a node's distribution is {apart:.2g} in total variation from that of its branch read alone: the "
                "tree mask is wrong"
            )
        return f"every node's distribution is that of its branch read alone, within {apart:.1g} in total variation"
    for at, token in zip((-1, *done.verdict.path), [one.token_id for one in done.emitted]):
        row = alone[at + 1]
        if float(row.max() - row[token]) > APART:
            raise WorkbenchError(
                f"the tree gave token {token} where its branch read alone has a better one: the tree mask is wrong"
            )
    return "every token that stayed is the best one of its branch read alone"


EXPERIMENT = Experiment(
    name="drafts.draft_tree",
    lab=7,
    question="Which branch of the draft tree does the target go along?",
    how=(
        "one request, round by round, by the engine itself: the whole tree is verified in one pass. Every node's"
        " distribution is held to the plain model that reads its branch alone, without a cache."
    ),
    settings=(
        MODEL,
        DRAFT,
        Setting("drafter", "model", "choice", choices=DRAFTERS, help="who draws the tree"),
        Setting(
            "branching",
            "3, 2, 1",
            "choice",
            choices=tuple(SHAPES),
            help="children of a node, level by level; Medusa and lookahead have shapes of their own",
        ),
        KIND,
        Setting("prompt", 1, "int", 1, 8, help="which of the held-out prompts of this kind"),
        Setting("temperature", 0.0, "float", 0.0, 2.0, step=0.1, help="0: greedy"),
        Setting("new_tokens", 24, "int", 4, 120, unit="tokens", help="to write"),
        Setting("seed", 0, "int", 0, 10_000, help="of the draws, where temperature is above 0"),
        Setting("shown_step", 2, "int", 0, 90, help="three steps a round: drafted, verified, kept"),
    ),
    run=run_tree,
    predict=no_times,
    record={"cpu": (), "cuda": ()},  # probabilities are the same everywhere
)
