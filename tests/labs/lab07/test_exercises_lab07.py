"""Lab 07's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as
meant."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import random_decoder, tiny_config
from exercise_claims import ExerciseClaims, Lab, failures

from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.grading.check import Verdict, evaluate
from workbench.kv import Contiguous
from workbench.labs.lab07_better_drafts.checks import medusa, parts, tree
from workbench.labs.lab07_better_drafts.checks.parts import Grammar
from workbench.models.batch import Batch
from workbench.speculation import Outcome, Proposal, Threshold, verify_greedy
from workbench.speculation.drafts.lookup import NGramIndex

LAB = Lab("07_better_drafts")
IDS = ["drafts-lookup", "drafts-threshold", "drafts-tree-mask", "drafts-medusa", "drafts-jump"]


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 50
    used_again = ("drafts-lookup",)

    def printed(self, lines):
        text = "\n".join(lines)
        assert "the cat sat on the mat and the cat sat on | the mat and the" in lines
        assert "the engine's positions: [3, 4, 4, 5, 5, 5]" in lines
        assert "accepted: dog sat and then down" in lines
        assert "33 tokens, the model was asked 2 times" in text and "same tokens: True" in text
        calls = [int(line.split()[-2]) for line in lines if "jump '" in line]
        assert len(calls) == 2 and calls[1] < calls[0]


def test_the_exercises_are_the_five_of_the_lab():
    assert (LAB.visible.lab, LAB.ids) == (7, IDS)


# --- The real parts stand where the answers stand, and the answers where the real parts stand ---


def test_the_packages_index_passes_the_checks_of_lookup():
    def real(token_ids, K, min_ngram, max_ngram):
        index = NGramIndex(min_ngram, max_ngram)
        index.follow(token_ids)
        found = index.find("latest")
        return index.after(found[0], K) if found else []

    result = evaluate(LAB.whole["drafts-lookup"], real)
    assert result.verdict == Verdict.PASSED, failures(result)


def test_the_packages_threshold_passes_the_checks_and_the_answer_moves_with_it():
    result = evaluate(LAB.whole["drafts-threshold"], Threshold)
    assert result.verdict == Verdict.PASSED, failures(result)
    draw, mine, real = random.Random(1), LAB.solution("drafts-threshold")(0.3), Threshold(0.3)
    for _ in range(60):
        assert mine.limit() == real.limit()
        drafted = []
        while len(drafted) < mine.max_tokens:
            drafted.append(draw.uniform(0.4, 1.0))
            go_on = mine.go_on(drafted[-1])
            assert go_on == real.go_on(drafted[-1])
            if not go_on:
                break
        outcome = Outcome(len(drafted), draw.randint(0, len(drafted)), tuple(drafted), 0.0, 0.0, 0, False)
        mine.learn(outcome)
        real.learn(outcome)
        assert mine.threshold == pytest.approx(real.threshold)


def test_the_answers_tree_is_what_the_engines_batch_attends_to():
    """Each node's logits are those of its branch alone, and by the answer's mask it sees just that branch."""
    model = random_decoder(tiny_config(), seed=3)
    text, parents = [3, 1, 4], tree.random_tree(random.Random(5), 7)
    positions, mask = LAB.solution("drafts-tree-mask")(parents, len(text))
    tokens = [5, 9, 2, 6, 5, 3, 5]
    kv = Contiguous(model.config)
    with torch.inference_mode():
        model(Batch.of([text]), kv)
        batch = Batch.of([tokens], first_positions=[3], parents=[parents], logits="all")
        logits = model(batch, kv)
    assert torch.equal(torch.as_tensor(batch.positions), positions)
    for node in range(len(parents)):
        path = (mask[node, 3:].nonzero()[:, 0]).tolist()
        assert path == tree.ancestors(parents, node)
        with torch.inference_mode():
            alone = model(Batch.of([[*text, *(tokens[n] for n in path)]]), Contiguous(model.config))[-1]
        torch.testing.assert_close(logits[node], alone, atol=2e-4, rtol=1e-4)


def test_the_answers_acceptance_is_the_packages():
    accept = LAB.solution("drafts-medusa")["accept"]
    draw = random.Random(8)
    for _ in range(40):
        case = medusa.grown(draw, 10, draw.randrange(10))
        proposal = Proposal(tuple(case["tokens"]), tuple(case["parents"]))
        verdict = verify_greedy(proposal, case["best"])
        assert accept(**case) == (list(verdict.path), verdict.token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_lookup_drafts_and_the_controller_stops_in_generate(temperature):
    """Greedy decoding writes the same tokens with it; at temperature 1 it runs, and something is accepted or not."""
    model = random_decoder(tiny_config(vocab_size=12), seed=4)
    prompt = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    draft = parts.LookupDraft(LAB.solution("drafts-lookup"), model, min_ngram=1)
    asked = {"max_new_tokens": 20, "temperature": temperature, "seed": 3, "stop_token_ids": ()}
    mine = generate(model, prompt, draft=draft, draft_length=5, **asked)
    assert len(mine.tokens) == 20 and sum(mine.speculation.drafted) > 0
    policy = LAB.solution("drafts-threshold")(0.5, max_tokens=3)
    own = generate(model, prompt, draft=model, draft_length=policy, **asked)
    assert max(own.speculation.lengths) <= 3
    if not temperature:
        plain = generate(model, prompt, kv="contiguous", **asked)
        assert mine.tokens == plain.tokens == own.tokens


# --- The plumbing ---


def test_a_grammar_of_pieces_is_the_texts_and_nothing_else():
    grammar = Grammar.of("a", ["bc", "bd", "e"], "f")
    assert [grammar.after(0, text) in grammar.ends for text in ("abcf", "abdf", "aef")] == [True] * 3
    for text in ("", "a", "abf", "abcef", "abcfa", "x"):
        assert grammar.after(0, text) not in grammar.ends


def test_the_controller_checks_its_settings():
    answer = LAB.solution("drafts-threshold")
    with pytest.raises(WorkbenchError, match="threshold"):
        answer(2.0)
