"""Lab 07: every draft's tokens are told apart, policies, trees, heads and jumps are measured as they are, and the
panels show it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import random_decoder, tiny_config
from experiment_claims import DataSheetBench, ExperimentClaims, brief_runs, on_model
from panel_claims import PanelClaims
from picture_claims import picture_problems

from workbench import panels
from workbench.errors import WorkbenchError
from workbench.experiments import experiment, run_experiment
from workbench.experiments.texts import prompts_of
from workbench.instruments.bench import Bench
from workbench.instruments.records import Measurement
from workbench.kv import make_kv
from workbench.labs.lab06_speculative_sampling.panels.plots import COLOURS, KINDS
from workbench.labs.lab07_better_drafts import draft_threshold, draft_tree, inputs
from workbench.labs.lab07_better_drafts import heads as heads_module
from workbench.labs.lab07_better_drafts.inputs import NAMES, make_draft
from workbench.labs.lab07_better_drafts.panels.draft_tree import KEPT, LOOKED, UNSEEN, Tree, mask_of
from workbench.labs.lab07_better_drafts.panels.plots import who_legend
from workbench.models.batch import Batch
from workbench.models.checkpoints import shipped_tokenizer
from workbench.models.heads import EagleHead, MedusaConfig, MedusaHeads
from workbench.panels import style
from workbench.panels.plots import empty
from workbench.records import records_of
from workbench.speculation import Proposal
from workbench.speculation.drafts import EagleDraft, MedusaDraft
from workbench.speculation.theory import expected_tokens_by_position

SMALL = {
    "drafts.draft_origin": {"new_tokens": 12, "repeats": 1, "drafter": "prompt_lookup", "texts": "digits"},
    "drafts.draft_threshold": {"new_tokens": 12, "repeats": 1, "prompts": 1, "texts": "digits"},
    "drafts.draft_tree": {"new_tokens": 6, "texts": "digits", "temperature": 1.0},
    "drafts.draft_speed": {
        "new_tokens": 8,
        "repeats": 1,
        "prompts": 1,
        "texts": "code,digits",
        "drafts": "model,prompt_lookup",
        "lengths": "fixed",
    },
    "drafts.heads": {"passages": 1, "length": 32, "drafters": "model"},
    "drafts.draft_grammar": {"repeats": 1, "grammar": "regex", "source": "(ab|cd)-[0-9]{2}", "max_new_tokens": 16},
}


MOVED = {
    "draft_origin": {"shown_round": 2},
    "draft_speed": {"texts": "digits"},
    "draft_threshold": {"texts": "code"},
    "draft_tree": {"shown_step": 1},
    "draft_grammar": {"grammar": "JSON schema"},
}


@pytest.fixture(scope="module")
def target():
    return random_decoder(tiny_config(), tokenizer=shipped_tokenizer(), name="tiny")


@pytest.fixture(scope="module")
def model(target):
    return target


@pytest.fixture(scope="module")
def small():
    return random_decoder(tiny_config(num_layers=1), seed=1, tokenizer=shipped_tokenizer(), name="tinier")


def time_once(patch: pytest.MonkeyPatch) -> None:
    """A pass over rows is timed once."""
    for name, value in {"TURNS": 1, "CHAINS": (2, 5), "TREES": (5,)}.items():
        patch.setattr(f"workbench.labs.lab06_speculative_sampling.round_costs.{name}", value)


@pytest.fixture(autouse=True)
def cheap_costs(monkeypatch):
    time_once(monkeypatch)


@pytest.fixture(scope="module")
def models(target, small):
    return {"model": target, "draft": small}


@pytest.fixture(scope="module")
def runs(models):
    with pytest.MonkeyPatch.context() as patch:
        time_once(patch)
        return brief_runs(SMALL, models)


@pytest.fixture
def heads(model, monkeypatch):
    """Untrained heads under the names of the trained ones."""
    eagle = EagleHead(dataclasses.replace(model.config, num_layers=1), target="tiny")
    medusa = MedusaHeads(MedusaConfig(model.config.hidden_size, model.config.vocab_size, 3), target="tiny")
    medusa.shares = [[0.1 - 0.01 * rank for rank in range(10)]] * 3
    for one in (eagle, medusa):
        one.initialize(model, 0)
        one.eval().requires_grad_(False)
    real_eagle, real_medusa = EagleDraft, MedusaDraft
    made = {
        "EagleDraft": lambda target, **how: real_eagle(target, eagle, **how),
        "MedusaDraft": lambda target, **how: real_medusa(target, medusa, **how),
    }
    for name, maker in made.items():
        monkeypatch.setattr(inputs, name, maker)
    monkeypatch.setattr(
        inputs, "draft_for", lambda name, target: made["EagleDraft" if name == "eagle" else "MedusaDraft"](target)
    )


def run(name: str, model, small, bench=None, **given) -> list[Measurement]:
    settings = {"model": model, **SMALL[name], **given}
    if "draft" in [s.name for s in experiment(name).settings]:
        settings["draft"] = small
    return run_experiment(name, settings, bench or Bench())


# -- all of them -----------------------------------------------------------------------------------------------


# -- who wrote what --------------------------------------------------------------------------------------------


class OnPair:
    """The claims' settings hold a draft, too."""

    @pytest.fixture(scope="class")
    def model(self, models):
        return models


class TestExperiments(OnPair, ExperimentClaims):
    lab, small = 7, SMALL


class TestPanels(OnPair, PanelClaims):
    small, moved = SMALL, MOVED


def test_every_kind_of_token_has_a_colour_and_a_name():
    assert set(COLOURS) == set(KINDS) >= {"draft", "correction", "bonus", "plain", "jump", "other"}


@pytest.mark.parametrize("name, share", [("draft_speed", "acceptance_rate"), ("draft_threshold", "kept_share")])
def test_where_nothing_was_drafted_there_is_no_share_of_it(models, runs, name, share):
    """In the archive, in a run, and as a dash in the table."""
    archive = [m for record in records_of(f"drafts.{name}") for m in record.of(f"drafts.{name}")]
    assert archive and all((share in m.counts) == (m.counts["plain_rounds_share"] < 1) for m in archive)
    made = runs[f"drafts.{name}"]
    assert all((share in m.counts) == (m.counts["plain_rounds_share"] < 1) for m in made)
    without = {key: value for key, value in made[0].counts.items() if key != share}
    panel = getattr(panels, name)(**on_model(f"drafts.{name}", SMALL[f"drafts.{name}"], models), bench=DataSheetBench())
    panel.measurements = [dataclasses.replace(made[0], counts=without), *made[1:]]
    view = panel.view(panel.settings)
    assert dict(zip(view.header, view.rows[0]))["accepted"] == "–"


def test_a_request_that_was_never_drafted_for_counts_no_share():
    plain = [SimpleNamespace(proposal=SimpleNamespace(depth=0), accepted=0, emitted=[1]) for _ in range(3)]
    written = SimpleNamespace(rounds=plain, policy=None)
    settings = {"temperature": 0.0, "policy": "dynamic", "texts": "code"}
    m = draft_threshold._measurement(Bench(), settings, [(1.0, written)])
    assert "kept_share" not in m.counts and m.counts["plain_rounds_share"] == 1


def test_the_pieces_of_an_origin_are_its_text_and_its_rounds_add_up(model, small):
    [m] = run("drafts.draft_origin", model, small, drafter="model")
    pieces, emitted = m.settings["pieces"], m.settings["emitted"]
    assert len(pieces) == 12 == 1 + sum(emitted)
    assert [sum(n == number for *_, n in pieces) for number in range(1, len(emitted) + 1)] == emitted
    kinds = [kind for _, _, kind, _ in pieces]
    assert m.counts["kept"] == kinds.count("draft") and m.counts["calls_saved"] == 11 - m.counts["rounds"]
    # one token of the target's own ends a round, but where the text ended
    for number in range(1, len(emitted) + 1):
        assert [k for *_, k, n in pieces if n == number][:-1] == ["draft"] * (emitted[number - 1] - 1)


def test_two_drafts_in_turn_are_told_apart(model, small):
    panel = panels.draft_origin(
        model=model,
        draft=small,
        drafter="lookup, else model",
        **{k: v for k, v in SMALL["drafts.draft_origin"].items() if k != "drafter"} | {"new_tokens": 24},
    )
    [m] = panel.run()
    writers = {who for _, who, kind, _ in m.settings["pieces"] if kind == "draft"}
    assert writers <= {"prompt_lookup", "tinier"}
    who = [row[0] for row in panel.view(panel.settings).rows]
    assert len(who) == len(panel.view(panel.settings).rows) >= len(writers)


def test_a_greedy_text_that_differs_is_thrown_away(model, small, monkeypatch):
    from workbench.labs.lab07_better_drafts import draft_origin

    honest = draft_origin.written_in_step

    def spoiled(*args, **how):
        both = honest(*args, **how)
        tokens = both.drafted.tokens
        return both._replace(drafted=dataclasses.replace(both.drafted, tokens=[*tokens[:-1], tokens[-1] ^ 1]))

    monkeypatch.setattr(draft_origin, "written_in_step", spoiled)
    with pytest.raises(WorkbenchError, match="differs from token 12 on"):
        run("drafts.draft_origin", model, small)


def test_an_unknown_draft_is_answered_with_the_nearest(model, small):
    with pytest.raises(WorkbenchError, match="prompt_lookup"):
        make_draft(Bench(), "prompt_lokup", model, small)
    with pytest.raises(WorkbenchError):
        make_draft(Bench(), "phrases", model, small, branching=(2, 1))
    assert len(set(NAMES)) == len(NAMES)


# -- policies --------------------------------------------------------------------------------------------------


def test_each_policy_is_measured_and_a_fixed_k_drafts_k(model, small):
    found = {m.settings["policy"]: m for m in run("drafts.draft_threshold", model, small, new_tokens=24)}
    assert list(found) == ["2", "4", "8", "threshold", "dynamic"]
    for name in ("2", "4", "8"):
        depths = found[name].settings["drafted"]
        assert depths[0] == int(name) and max(depths) == int(name)
    for m in found.values():
        s = m.settings
        assert 1 + sum(s["emitted"]) == 24 and all(k <= d for k, d in zip(s["kept"], s["drafted"]))
    moving = found["threshold"].settings["threshold"]
    assert moving and all(isinstance(value, float) and 0 <= value <= 1 for value in moving)
    assert found["dynamic"].settings["drafted"][0] == 0  # what a plain step takes comes first


# -- trees -----------------------------------------------------------------------------------------------------


def test_the_mask_of_a_tree_is_what_its_nodes_see():
    tree = Tree(["a", "b", "c", "d"], [-1, -1, 0, 2], [0, 2])
    sees = mask_of(tree)
    assert sees[:, :2].all() and not sees[0, 2:].any()
    assert [list(np.flatnonzero(row[2:])) for row in sees[1:]] == [[0], [1], [0, 2], [0, 2, 3]]


def test_a_node_behind_the_one_that_was_kept_was_not_looked_at():
    tree = Tree(list("abcdef"), [-1, -1, -1, 1, 1, 0], [1, 4])
    assert [tree.fate(node) for node in range(6)] == [LOOKED, KEPT, UNSEEN, LOOKED, KEPT, UNSEEN]


def test_a_branch_read_alone_is_read_without_the_others(model):
    distribution = draft_tree.distribution_for([5, 6, 7], temperature=1.0)
    tree = Proposal((1, 2, 3), (-1, -1, 0))
    rows = draft_tree.distributions_read_alone(model, distribution, [5, 6, 7], tree)
    batch = Batch.of([[5, 6, 7, 1, 3]])
    with torch.inference_mode():
        alone = model(batch, make_kv("recompute", model.config))[-1].double().softmax(-1)
    assert torch.allclose(rows[3], alone, atol=1e-6)


def test_a_wrong_tree_mask_is_found_out(model, small, monkeypatch):
    honest = draft_tree.distributions_read_alone

    def of_a_chain(oracle, distribution, text, proposal):
        return honest(oracle, distribution, text, Proposal.chain(proposal.tokens))

    monkeypatch.setattr(draft_tree, "distributions_read_alone", of_a_chain)
    with pytest.raises(WorkbenchError, match="tree mask is wrong"):
        run("drafts.draft_tree", model, small)


def test_siblings_drafted_by_the_target_itself_stand_in_the_order_of_its_probabilities(model):
    found = run("drafts.draft_tree", model, model, temperature=0.0, new_tokens=10)
    for m in found:
        shares, parents = m.samples, m.settings["parents"]
        for parent in set(parents):
            siblings = [share for share, p in zip(shares, parents) if p == parent]
            assert siblings == sorted(siblings, reverse=True) and sum(siblings) <= 1
        assert m.counts["first_branch_kept"] == m.counts["kept"] == m.counts["depth"]


def test_play_goes_through_three_steps_a_round(model, small):
    panel = panels.draft_tree(model=model, draft=small, **SMALL["drafts.draft_tree"])
    panel.run()
    seen = []
    for step in range(4):
        panel.configure(shown_step=step)
        assert panel.wait(60)
        seen.append((panel.snapshot().data, panel.said))
    assert len(set(seen)) == 4


# -- heads -----------------------------------------------------------------------------------------------------


def test_heads_are_compared_as_chain_and_as_tree_on_both_kinds_of_text(model, small, heads):
    found = run("drafts.heads", model, small, drafters="all")
    settings = [(m.settings["drafter"], m.settings["shape"], m.settings["texts"]) for m in found]
    assert len(settings) == len(set(settings)) == 3 * 2 * 2
    for m in found:
        rates = [m.counts[f"kept_{i}"] for i in range(1, 13) if f"kept_{i}" in m.counts]
        assert m.counts["tokens_per_round"] == pytest.approx(expected_tokens_by_position(rates))
        assert m.counts["nodes"] <= heads_module.NODES


def test_the_target_as_its_own_draft_is_always_right_on_its_own_text(model):
    found = run("drafts.heads", model, model)
    chain = next(m for m in found if m.settings["texts"] == heads_module.OWN and m.settings["shape"] == "chain")
    assert [chain.counts[f"kept_{i}"] for i in range(1, 13)] == [1.0] * 12 and chain.median == 13


def test_a_draft_that_is_no_head_is_refused(model, small):
    with pytest.raises(WorkbenchError, match="compares model, eagle, medusa"):
        run("drafts.heads", model, small, drafters="phrases")


# -- grammars --------------------------------------------------------------------------------------------------


def test_jumping_where_one_token_is_legal_writes_the_same_and_asks_less(model):
    never, exact, text = run("drafts.draft_grammar", model, None)
    assert [m.settings["jump"] for m in (never, exact, text)] == ["never", "tokens", "text"]
    assert [one[0] for one in never.settings["pieces"]] == [one[0] for one in exact.settings["pieces"]]
    assert exact.counts["calls"] + exact.counts["jumped"] == exact.counts["tokens"]
    assert text.counts["calls"] <= exact.counts["calls"] < never.counts["calls"] == never.counts["tokens"]


def test_prompts_are_the_same_every_time(model):
    assert prompts_of("digits", model, 2) == prompts_of("digits", model, 2)


# -- the bars --------------------------------------------------------------------------------------------------


def test_bars_of_every_draft_and_kind_with_the_loser_named(model, small, monkeypatch):
    given = {"drafts": "model,prompt_lookup", "texts": "digits", "prompts": 1, "new_tokens": 10, "repeats": 1}
    panel = panels.draft_speed(model=model, draft=small, **given)
    found = panel.run()
    view = panel.view(panel.settings)
    assert len(view.rows) == len(found) == 4 and all(len(row) == len(view.header) for row in view.rows)
    assert "digits: " in view.words
    losing = dataclasses.replace(found[0], samples=[0.5])
    panel.measurements = [losing, dataclasses.replace(found[1], samples=[1.5])]
    assert "tinier loses" in panel.view(panel.settings).words


def test_the_names_of_all_who_wrote_fit_the_picture():
    """With two drafts and a plain step the last name reached over the edge."""
    figure, (axes,) = style.new_figure(height=2)
    axes.set_position((0.03, 0.1, 0.955, 0.7))
    empty(axes)
    axes.set(xlim=(0, 0.955 * figure.get_figwidth()), ylim=(1.4, 0))
    counts = dict.fromkeys(("draft", "other", "correction", "bonus", "plain"), 24)
    who_legend(axes, counts, {"draft": "stdlib-1m", "other": "prompt lookup"})
    assert picture_problems(figure) == []
