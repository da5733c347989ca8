"""The drafts on the page of lab 07 (a moving threshold, Medusa, EAGLE, lookahead) leave the target's greedy text as it
is, and give as many tokens in each round as the engine's."""

from __future__ import annotations

import ast
import itertools
import math
from pathlib import Path

import pytest
import torch

from workbench.experiments.texts import prompts_of
from workbench.generation import generate
from workbench.kv import make_kv
from workbench.models import load, prepare
from workbench.models.batch import Batch
from workbench.models.heads import load_heads
from workbench.speculation import LengthPolicy, ModelDraft

PAGE = Path(__file__).parents[3] / "notebooks" / "source" / "07_better_drafts.py"
DEFINED = ("Moving", "write_with", "medusa_branches", "eagle_draft", "lookahead")
ASSIGNED = ("(medusa, RANKS)", "every", "right", "shape", "eagle")
NEW = 24


@pytest.fixture(scope="module")
def page():
    """The names of those parts of the lecture, run with the shipped models."""
    names = {
        "nodes": {},
        "itertools": itertools,
        "math": math,
        "torch": torch,
        "make_kv": make_kv,
        "Batch": Batch,
        "NEW": NEW,
    }
    names |= {"load_heads": load_heads, "LengthPolicy": LengthPolicy, "target": prepare(load("stdlib-10m"))}
    text = PAGE.read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        assigned = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
        if getattr(node, "name", "") in DEFINED or assigned in ASSIGNED:
            names["nodes"][getattr(node, "name", assigned)] = node
            exec(compile(ast.Module([node], []), str(PAGE), "exec"), names)
    assert set(DEFINED) <= set(names)
    return names


def written(page, kind, **how):
    prompt = prompts_of(kind, page["target"], 1)[-1]
    return generate(page["target"], prompt, stop_token_ids=(), kv="contiguous", max_new_tokens=NEW, **how)


@pytest.mark.parametrize("kind", ["code", "copying"])
@pytest.mark.parametrize("name", ["medusa", "eagle", "lookahead"])
def test_a_draft_of_the_page_is_that_of_the_engine(page, name, kind):
    draft = {"medusa": page["medusa_branches"], "eagle": page["eagle_draft"](), "lookahead": page["lookahead"]()}[name]
    tokens, rounds = page["write_with"](draft, prompts_of(kind, page["target"], 1)[-1], NEW)
    engine = written(page, kind, draft=name, draft_length=8 if name == "lookahead" else 4)
    theirs = list(engine.speculation.tokens_per_round)
    assert tokens == engine.tokens == written(page, kind).tokens
    assert rounds[: len(theirs) - 2] == theirs[:-2]  # near its end the engine drafts no more than is wanted


@pytest.mark.parametrize(
    ("old", "new", "same_text"),
    [
        ("best[n] for node", "best[max(0, n - 1)] for node", False),  # what was said one row before
        ("= states[kept],", "= states[: len(kept)],", True),  # hidden states of rejected branches: fewer are accepted
    ],
)
def test_a_wrong_round_is_seen(page, old, new, same_text):
    source = ast.get_source_segment(PAGE.read_text(encoding="utf-8"), page["nodes"]["write_with"])
    assert source.count(old) == 1
    wrong, prompt = dict(page), prompts_of("code", page["target"], 1)[-1]
    exec(source.replace(old, new), wrong)
    right_tokens, right_rounds = page["write_with"](page["medusa_branches"], prompt, NEW)
    tokens, rounds = torch.inference_mode()(wrong["write_with"])(page["medusa_branches"], prompt, NEW)
    assert (tokens == right_tokens) == same_text and rounds != right_rounds


def test_the_threshold_of_the_page_moves_as_the_engines(page):
    small = prepare(load("stdlib-1m-pruned"))
    mine, theirs = (
        written(page, "code", draft=ModelDraft(small), draft_length=one) for one in (page["Moving"](), "threshold")
    )
    assert mine.tokens == theirs.tokens == written(page, "code").tokens
    assert mine.speculation.tokens_per_round == theirs.speculation.tokens_per_round
