"""Lab 06: the rule stands the test that its mistakes fail, rounds are told as they were, speed-ups are held to plain
decoding, and the panels show what was measured."""

from __future__ import annotations

import pytest
import torch
from conftest import random_decoder, tiny_config
from experiment_claims import DataSheetBench, ExperimentClaims, brief_runs
from panel_claims import PanelClaims, shown
from scipy import stats

from workbench.errors import WorkbenchError
from workbench.experiments import list_experiments, run_experiment, texts
from workbench.experiments.inputs import next_logits
from workbench.instruments.device import PUBLISHED
from workbench.instruments.records import Measurement
from workbench.labs.lab06_speculative_sampling import batches as batching
from workbench.labs.lab06_speculative_sampling import draft_lengths as lengths
from workbench.labs.lab06_speculative_sampling import exactness, inputs
from workbench.labs.lab06_speculative_sampling import stepper as stepping
from workbench.labs.lab06_speculative_sampling.costs import DRAFT, PLAIN, RoundParts
from workbench.labs.lab06_speculative_sampling.panels import plots
from workbench.labs.lab06_speculative_sampling.rules import MISTAKES, UNEQUAL, told_another_q
from workbench.models.checkpoints import shipped_tokenizer
from workbench.panels.base import Panel
from workbench.panels.plots import matching
from workbench.speculation import theory
from workbench.speculation.theory import table

SMALL = {
    "speculate.stepper": {"prompt": "def f(x):\n", "max_new_tokens": 8, "draft_length": 3, "temperature": 1.5},
    "speculate.exactness": {"positions": 2, "draws": 300, "draft_length": 1, "top_k": 4},
    "speculate.draft_lengths": {"texts": 1, "new_tokens": 8, "longest": 3, "repeats": 1},
    "speculate.batches": {"largest_batch": 2, "draft_length": 2, "new_tokens": 4, "repeats": 1},
}
MINE = {"stepper": "speculate.stepper", "draft_lengths": "speculate.draft_lengths"}


MOVED = {"stepper": {"shown_round": 3}, "draft_lengths": {"alpha": 0.9, "K": 6}}


def near(decoder, share: float, seed: int = 1):
    """A draft: the same model, its weights moved by a share of their size."""
    made = random_decoder(decoder.config, tokenizer=decoder.tokenizer, name="near")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight, given in zip(made.parameters(), decoder.parameters()):
            weight.copy_(given + share * given.std() * torch.randn(given.shape, generator=generator))
    return made


@pytest.fixture(scope="module")
def pair():
    target = random_decoder(tiny_config(), tokenizer=shipped_tokenizer())
    return {"model": target, "draft": near(target, 0.15)}


def few_turns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lengths, "COST_TURNS", 2)
    patch.setattr(batching, "TURNS", 2)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    few_turns(monkeypatch)


@pytest.fixture(scope="module")
def model(pair):
    return pair


@pytest.fixture(scope="module")
def runs(pair):
    with pytest.MonkeyPatch.context() as patch:
        few_turns(patch)
        return brief_runs(SMALL, pair)


def run(name: str, pair, **given) -> list[Measurement]:
    return run_experiment(name, {**pair, **SMALL[name], **given}, DataSheetBench())


@pytest.fixture
def make(pair):
    def made(name: str, **given) -> Panel:
        return shown(name, **{**pair, **SMALL[MINE[name]], **given})

    return made


class TestExperiments(ExperimentClaims):
    lab, small = 6, SMALL


class TestPanels(PanelClaims):
    small, moved = SMALL, MOVED


# -- all of them -------------------------------------------------------------------------------------------------


def test_the_lab_has_these_experiments_and_their_records_ask_for_settings_they_have():
    every = {e.name: e for e in list_experiments(lab=6)}
    assert set(SMALL) <= set(every)
    asked = [
        every[name].complete(run) for name in SMALL for d in ("cpu", "cuda") for run in every[name].record_settings(d)
    ]
    assert {one["prompts"] for one in asked if "prompts" in one} == set(texts.PROMPT_SETS)
    assert any(one.get("draws", 0) * one.get("positions", 0) == 200_000 for one in asked)


@pytest.mark.parametrize("name", SMALL)
def test_a_draft_of_another_vocabulary_is_refused(pair, name):
    other = random_decoder(tiny_config(vocab_size=64))
    with pytest.raises(WorkbenchError, match="a draft needs the target's vocabulary"):
        run(name, pair, draft=other)


def test_prompts_are_held_out_text_and_digits_are_those_of_pi(pair):
    assert texts.pi_digits(20) == "31415926535897932384"
    for name in texts.PROMPT_SETS:
        two, one = (texts.prompts_of(name, pair["model"], count) for count in (2, 1))
        assert len(two) == 2 and len(one) == 1 and all(len(ids) > 20 for ids in two)
        assert two == texts.prompts_of(name, pair["model"], 2)
    with pytest.raises(WorkbenchError, match="need a tokenizer"):
        texts.prompts_of("code", random_decoder(tiny_config()), 1)


# -- speculate.stepper -------------------------------------------------------------------------------------------


def test_a_round_is_told_as_it_was(runs):
    rounds = runs["speculate.stepper"]
    assert rounds[0].settings["drafted"] == [] and sum(m.counts["emitted"] for m in rounds) == 8
    for m in rounds[1:]:
        s, kept = m.settings, int(m.counts["accepted"])
        assert m.samples == s["accept"] or not s["drafted"]
        assert s["accept"] == pytest.approx([min(1, p / q) for p, q in zip(s["p"], s["q"])])
        assert [text for text, kind in s["emitted"][:kept]] == s["drafted"][:kept]
        kinds = [kind for _, kind in s["emitted"]]
        assert kinds[:kept] == ["draft"] * kept
        if s["drafted"] and len(kinds) > kept:
            assert kinds[kept:] == ["bonus" if kept == len(s["drafted"]) else "correction"]
        assert all(0 <= value <= 1 + 1e-9 for row in s["last"] for value in row[1:])
    assert {"draft", "correction"} <= {kind for m in rounds for _, kind in m.settings["emitted"]}


def test_a_round_decided_by_other_distributions_is_thrown_away(pair, monkeypatch):
    forward = stepping.distribution_for

    class Sharper:
        def __init__(self, distribution):
            self.distribution, self.settings, self.greedy, self.calls = (
                distribution,
                distribution.settings,
                distribution.greedy,
                0,
            )
            self.is_argmax = self.row_by_row = False

        def confidences(self, *given):
            return self.distribution.confidences(*given)

        def probabilities(self, *given):
            self.calls += 1  # the engine asks first, then the check
            rows = self.distribution.probabilities(*given)
            return (rows**2 / (rows**2).sum(-1, keepdim=True)) if self.calls % 2 else rows

    monkeypatch.setattr(stepping, "distribution_for", lambda *a, **k: Sharper(forward(*a, **k)))
    with pytest.raises(WorkbenchError, match="from those of the model without a cache"):
        run("speculate.stepper", pair)


# -- speculate.exactness -----------------------------------------------------------------------------------------


def test_the_distribution_of_the_pair_is_whole_and_every_text_has_its_rows(pair):
    text = texts.prompts_of("code", pair["model"], 1)[0][:20]
    distributions = exactness.distributions_after(
        pair["model"], pair["draft"], text, length=3, temperature=1.0, top_k=3
    )
    distribution = theory.distribution_of_target(lambda path: distributions.p[path].tolist(), 3)
    assert sum(distribution.values()) == pytest.approx(1) and len(distribution) == 27
    oracle = inputs.distribution_for(text, temperature=1.0, top_k=3)
    path = max(distribution, key=distribution.get)[:2]
    tokens = [*text, *(distributions.alphabet[i] for i in path)]
    logits = next_logits(pair["model"], tokens)[None]
    assert torch.allclose(
        oracle.probabilities(logits, lambda i: tokens)[0][distributions.alphabet], distributions.p[path], atol=1e-5
    )


def test_chi_square_is_pearsons():
    distribution = {(0,): 0.5, (1,): 0.3, (2,): 0.19, (3,): 0.01}
    seen = {(0,): 45, (1,): 35, (2,): 19, (3,): 1}
    found = exactness.chi_square(seen, distribution)  # the last expects 1: it joins the smallest cell
    wanted = stats.chisquare([45, 35, 20], [50, 30, 20])
    assert (found.statistic, found.p_value) == (pytest.approx(wanted.statistic), pytest.approx(wanted.pvalue))
    assert exactness.chi_square({**seen, (9,): 1}, distribution).p_value < 1e-9  # a text that cannot be


def test_the_rule_passes_and_every_mistake_is_found_on_the_real_pair():
    """18,000 texts by the rule; the record has 200,000. A right rule fails here once in 10,000 runs."""
    given = {
        "positions": 3,
        "draws": 6000,
        "draft_length": 1,
        "false_alarm": 0.0001,
        "seed": 7,
        "rules": exactness.RULE,
    }
    found = run_experiment("speculate.exactness", given, DataSheetBench())
    assert len(found) == 3 and not any(m.counts["alarm"] for m in found), [m.median for m in found]
    assert all(0.2 < m.counts["alpha"] < 0.8 and m.counts["cells"] > 5 for m in found)
    few = {**given, "rules": "all", "positions": 2, "draws": 2000, "draft_length": 2}
    alarms = {
        m.settings["rule"] for m in run_experiment("speculate.exactness", few, DataSheetBench()) if m.counts["alarm"]
    }
    assert {UNEQUAL, "residual not renormalized", "bonus from the wrong row"} <= alarms and exactness.RULE not in alarms


def test_a_learners_rule_is_tested_beside_ours(pair):
    def mine(proposal, p, draws):
        return MISTAKES["residual not renormalized"](proposal, p, draws)

    given = {**pair, **SMALL["speculate.exactness"], "draws": 1500, "rules": exactness.RULE}
    made = run_experiment("speculate.exactness", given, DataSheetBench(), learner={"verify_chain": mine})
    assert {m.settings["rule"] for m in made} == {"yours", exactness.RULE}
    assert any(m.counts["alarm"] for m in matching(made, rule="yours"))


# -- the mistakes ------------------------------------------------------------------------------------------------


def p_of(text):
    return table(*(1 + (5 * sum(text) + 3 * t + len(text)) % 7 for t in range(3)))


def q_of(text):
    return table(*(1 + (2 * sum(text) + 4 * t + 2 * len(text)) % 5 for t in range(3)))


def test_every_mistake_gives_another_distribution_and_the_rule_the_targets():
    wanted = theory.distribution_of_target(p_of, 3)
    assert theory.distribution_of_texts(p_of, q_of, 3, (1, 1)) == wanted
    for name, rule in MISTAKES.items():
        distribution = theory.distribution_of_texts(p_of, q_of, 3, (1, 1), verify=rule)
        assert sum(distribution.values()) == 1 and distribution != wanted, name


def test_a_rule_told_the_true_q_is_exact_and_one_told_another_is_not():
    def first(claimed):
        def one(draws):
            return theory.write_round((), p_of, q_of, (1, 1), draws, verify=told_another_q(claimed))[0]

        return theory.enumerate_outcomes(one)

    assert first(q_of) == dict(enumerate(p_of(())))
    assert first(lambda path: theory.sharpened(q_of(path), 2)) != dict(enumerate(p_of(())))


def test_greedy_mistake_is_none_where_p_is_one_token():
    def certain(text):
        return table(*(int(t == len(text) % 3) for t in range(3)))

    distribution = theory.distribution_of_texts(certain, q_of, 3, (1, 1), verify=MISTAKES["accept the best token only"])
    assert distribution == theory.distribution_of_target(certain, 3)


# -- speculate.lengths and speculate.batches -----------------------------------------------------------------------


def test_speed_ups_are_predicted_from_parts_and_held_to_plain_decoding(runs):
    made = runs["speculate.draft_lengths"]
    [drafted] = matching(made, measured="draft")
    for K in (1, 2, 3):
        [m], [v] = matching(made, measured="speed-up", K=K), matching(made, measured="verify", K=K)
        rates = [m.counts[key] for key in sorted(k for k in m.counts if k.startswith("kept_"))]
        assert m.predicted == pytest.approx(theory.expected_tokens_by_position(rates) / (v.median + K * drafted.median))
        assert "the tokens are those of plain decoding" in m.check and len(rates) <= K
    [dynamic] = matching(made, measured="speed-up", K=lengths.DYNAMIC)
    assert dynamic.predicted is None and dynamic.counts["plain_rounds"] >= 1


def test_other_tokens_than_plain_decodings_are_not_timed(pair, monkeypatch):
    real = lengths.written_in_step

    def wrong(*given, **how):
        both = real(*given, **how)
        both.drafted.tokens[3] = (both.drafted.tokens[3] + 1) % 4096
        return both

    monkeypatch.setattr(lengths, "written_in_step", wrong)
    with pytest.raises(WorkbenchError, match="token 3, with a draft"):
        run("speculate.draft_lengths", pair)


def test_the_parts_of_a_round_leave_the_texts_where_they_were(pair):
    tokens = texts.prompts_of("code", pair["model"], 2)
    parts = RoundParts(DataSheetBench(), pair["model"], pair["draft"], tokens, 3)
    for part in (PLAIN, 3, DRAFT, 1, PLAIN):
        assert parts.run(part) > 0
        assert [w.token_ids for w in parts._sequences] == [one[:-3] for one in tokens]
    assert set(parts._verify.kv.lengths.values()) == {len(tokens[0]) - 4}
    calls = parts._verify.model_calls
    parts.run(3)
    assert parts._verify.model_calls == calls + 1 and parts._verify.rows_processed % 2 == 0


def test_several_texts_are_written_as_each_alone_would_be(runs, pair):
    made = runs["speculate.batches"]
    assert [(m.settings["measured"], m.settings["batch"]) for m in made] == [
        (what, B) for B in (1, 2) for what in ("draft", "verify", "speed-up")
    ]
    assert all(1 <= m.counts["tokens_per_round"] <= 3 for m in matching(made, measured="speed-up"))


def test_verification_costs_more_with_more_texts_by_the_cost_model():
    steps = {
        B: s
        for B, s, _ in batching.predict_batches(
            PUBLISHED["h100-sxm"], model="stdlib-10m", draft="stdlib-1m", largest_batch=32, draft_length=4
        )
    }
    assert list(steps) == list(batching.BATCHES) and sorted(steps.values()) == list(steps.values())


# -- the panels --------------------------------------------------------------------------------------------------


def test_hostile_text_is_shown_inert(make):
    panel = make("stepper", prompt="<img src=x onerror=alert(1)>$\\frac$\u202e\n")
    panel.run()
    shown = panel.said + panel.extra.value + panel.table.value + panel.status.value
    assert "<img" not in shown and "error:" not in panel.status.value and "\u202e" not in shown


def test_the_stepper_colours_every_token_by_its_kind(make, runs):
    panel = make("stepper")
    panel.measurements = runs["speculate.stepper"]
    last = len(panel.measurements) - 1
    panel.configure(shown_round=last)
    assert panel.wait(30)
    for kind in {kind for m in panel.measurements for _, kind in m.settings["emitted"]}:
        assert f"background:{plots.COLOURS[kind]}" in panel.extra.value
    spans = panel.extra.value.count("<span")
    assert spans == 1 + 8  # the prompt, and every token


def test_long_text_is_broken_into_lines_and_its_end_is_shown():
    parts = [("ab\ncd", ""), ("x" * 25, "draft"), ("\n", "bonus"), ("end", "correction")]
    laid = plots._laid_out(parts, 11, 3)
    assert [(line, text) for line, _, text, _ in laid] == [(0, "x" * 10), (1, "x" * 7), (1, "⏎"), (2, "end")]


def test_the_curve_of_the_sliders_is_the_theorys(make):
    panel = make("draft_lengths", alpha=0.8, c=0.1, row_cost=0.0, K=4)
    rows = panel.view(panel.settings).rows
    [four] = [row for row in rows if row[0] == "4"]
    assert four[1] == f"{theory.expected_tokens(0.8, 4):.2f}" == "3.36"
    assert four[2] == f"{theory.speedup(0.8, 4, 0.1):.2f} ×"
    panel.configure(alpha=0.05, c=0.5)
    assert panel.wait(30) and "Every K loses" in panel.said


def test_the_best_length_of_all_is_told_also_where_it_is_not_drawn(make):
    panel = make("draft_lengths", alpha=0.95, c=0.01, row_cost=0.0, K=4)
    view = panel.view(panel.settings)
    assert "Best of all is K = 40, 12.54 ×" in view.words and "best K = 10 of those drawn" in view.alt
    panel.configure(c=0.0)
    assert panel.wait(30) and "a longer draft is always better" in panel.said


def test_the_panel_tells_what_dispatch_makes_of_a_predicted_verification(make, runs):
    """Predicted 1.45 steps beside 1.03: the plain step is longer than predicted, by what every pass has."""
    panel = make("draft_lengths")
    panel.measurements = runs["speculate.draft_lengths"]
    words = panel.view(panel.settings).words
    last = max(matching(panel.measurements, measured="verify"), key=lambda m: m.settings["K"])
    assert f"{last.median:.2f} steps, {last.predicted:.2f} by the cost model" in words and "mostly dispatch" in words


def test_a_record_is_drawn_hollow_and_named(make, runs):
    elsewhere = [
        Measurement.from_dict({**m.to_dict(), "device": {"name": "A far machine"}, "date": "2030-01-02T00:00:00"})
        for m in runs["speculate.draft_lengths"]
    ]
    panel = make("draft_lengths", record=elsewhere)
    axes = panel.view(panel.settings).figure.axes[0]
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "none" and line.get_linestyle() == ":"]
    assert len(hollow) == 1 and len(hollow[0].get_xdata()) == 3
    assert "recorded on A far machine, 2030-01-02" in panel.said


def test_a_residual_is_what_the_stepper_shows(runs):
    """Of the tokens in the picture, what they were drawn from is max(0, p − q), all scaled alike."""
    checked = 0
    for m in runs["speculate.stepper"]:
        if m.settings["emitted"][-1][1] != "correction":
            continue
        scale = {round(drawn / (p - q), 5) for _, p, q, drawn in m.settings["last"] if p - q > 1e-6}
        assert len(scale) <= 1 and all(drawn == 0 for _, p, q, drawn in m.settings["last"] if p <= q)
        checked += 1
    assert checked
