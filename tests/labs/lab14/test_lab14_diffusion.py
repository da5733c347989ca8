"""Claims about lab 14's diffusion: the canvas as planned and as written, quality by tokens a pass, what few passes are
worth."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import tokenizers
from conftest import random_decoder, tiny_config
from experiment_claims import DataSheetBench, ExperimentClaims, brief_runs, on_model
from panel_claims import PanelClaims, shown

from workbench.diffusion.bound import bound_of
from workbench.diffusion.costs import pass_costs
from workbench.diffusion.denoise import diffuse
from workbench.diffusion.model import DiffusionModel, new_diffusion
from workbench.diffusion.samplers import SAMPLERS, Confidence, make_sampler
from workbench.diffusion.scoring import score
from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.instruments.device import PUBLISHED
from workbench.instruments.records import Measurement
from workbench.kv import make_kv
from workbench.labs.lab14_beyond_transformers import few_passes as few
from workbench.labs.lab14_beyond_transformers import tokens_per_pass as quality
from workbench.labs.lab14_beyond_transformers.canvas import EXPERIMENT as CANVAS
from workbench.labs.lab14_beyond_transformers.canvas import HIDDEN, left_first, plan
from workbench.labs.lab14_beyond_transformers.diffusion_runs import BLOCK, MASKED, TWIN, is_diffusion
from workbench.labs.lab14_beyond_transformers.panels.canvas import confidence_colour
from workbench.labs.lab14_beyond_transformers.panels.tokens_per_pass import within_goal
from workbench.models.checkpoints import shipped_tokenizer
from workbench.models.evaluation import held_out_headers, held_out_passages, loss_through
from workbench.models.shapes import public_shape
from workbench.models.state_shape import StateShape
from workbench.models.tokenizer import Tokenizer
from workbench.panels.base import Panel
from workbench.panels.plots import matching

SMALL = {
    "beyond.canvas": {
        "max_tokens": 12,
        "sampler": "remasking",
        "passes": 4,
        "temperature": 1.0,
        "prompt": "def f(x):\n",
    },
    "beyond.tokens_per_pass": {"context": 64, "passages": 1, "draws": 1, "samples": 3, "max_tokens": 8, "passes": 2},
    "beyond.few_passes": {"longest": 64, "repeats": 2},
}
PROMPT_TOKENS = len(shipped_tokenizer().encode(SMALL["beyond.canvas"]["prompt"]))
MOVED = {"canvas": {"shown_pass": 1}, "tokens_per_pass": {"block_size": 4}, "few_passes": {"card": "a100-80gb"}}


def toy(kind: str = "block", **changes) -> DiffusionModel:
    made = new_diffusion(tiny_config(**changes), kind=kind, block_sizes=(4, 8), tokenizer=shipped_tokenizer())
    made.decoder.load_state_dict(random_decoder(made.config, tokenizer=made.tokenizer).state_dict())
    return dataclasses.replace(made)


@pytest.fixture(scope="module")
def model():
    return {"model": toy(), "twin": random_decoder(tiny_config(), seed=1, tokenizer=shipped_tokenizer())}


@pytest.fixture(scope="module")
def runs(model):
    return brief_runs(SMALL, model)


def run(name: str, models, **more) -> list[Measurement]:
    return run_experiment(name, on_model(name, {**SMALL[name], **more}, models), DataSheetBench())


@pytest.fixture
def make(model):
    def made(name: str, **more) -> Panel:
        e = f"beyond.{name}"
        return shown(name, **on_model(e, {**SMALL[e], **more}, model))

    return made


class TestExperiments(ExperimentClaims):
    lab, small = 14, SMALL


class TestPanels(PanelClaims):
    small = SMALL
    moved = MOVED


# -- which models ------------------------------------------------------------------------------------------------


def test_only_diffusion_models_can_be_chosen(model):
    assert is_diffusion(model["model"]) and is_diffusion(BLOCK) and is_diffusion("some/folder")
    assert not is_diffusion(model["twin"]) and not is_diffusion(TWIN) and not is_diffusion("stdlib-10m")
    panel = shown("canvas")
    offered = [value for _, value in panel.controls["model"].options]
    assert offered[0] == BLOCK and set(offered) <= {BLOCK, MASKED}


# -- beyond.canvas -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "tokens", "size", "sampler", "kind"),
    [
        (6, 12, 4, "confidence", "block"),
        (8, 11, 8, "remasking", "block"),
        (1, 7, 1, "uniform", "block"),
        (5, 9, 14, "confidence", "masked"),
    ],
)
def test_passes_and_rows_are_as_planned_from_the_settings(prompt, tokens, size, sampler, kind):
    chosen = make_sampler(sampler, passes=3)
    how = {"block_size": None if kind == "masked" else size, "sampler": chosen, "max_tokens": tokens}
    one = diffuse(toy(kind), [7] * prompt, **how)
    planned = plan(prompt, tokens, size, chosen)
    assert [(p.block, p.rows, p.cached, p.masked, p.written) for p in planned] == [
        (s.block, s.rows, s.cached, s.logit_rows, len(s.revealed) - len(s.remasked)) for s in one.history
    ]


def test_a_canvas_is_measured_pass_by_pass_and_its_flops_are_those_of_its_rows(model, runs):
    *steps, whole = runs["beyond.canvas"]
    settings = SMALL["beyond.canvas"]
    sampler = make_sampler("remasking", passes=4, share=0.25)
    how = {"max_tokens": 12, "block_size": 8, "sampler": sampler, "temperature": 1.0}
    one = diffuse(model["model"], settings["prompt"], **how)
    assert [m.settings["revealed"] for m in steps] == [list(step.revealed) for step in one.history]
    assert [m.settings["remasked"] for m in steps] == [list(step.remasked) for step in one.history]
    assert any(m.settings["remasked"] for m in steps) and whole.counts["remasked"] > 0
    assert [m.counts["rows"] for m in steps] == [step.rows for step in one.history]
    # the canvas of a pass has a mask for each token that the passes after it write
    left = [m.settings["canvas"].count(HIDDEN) for m in steps]
    assert left == [sum(int(m.counts["tokens"]) for m in steps[at + 1 :]) for at in range(len(steps))]
    assert "".join(steps[-1].settings["canvas"]) == settings["prompt"] + whole.settings["text"]
    by_hand = sum(
        pass_costs(model["model"].config, rows=s.rows, cached=s.cached, logit_rows=s.logit_rows).flops
        for s in one.history
    )
    assert whole.median == whole.predicted == by_hand
    assert whole.counts["tokens_per_pass"] == 12 / len(steps) and whole.counts["rows"] < one.passes * len(
        steps[0].settings["canvas"]
    )
    assert whole.check.endswith("the same tokens are written")


def test_pairs_are_counted_whose_left_position_was_written_first(model):
    """By chance about half of them, in passes of one token from left to right all."""
    orders = [[(0,), (2, 1), (3,)], [(3,), (2,), (1,), (0,)], [(0, 1, 2, 3)], [(1, 2), (0,), (1,), (3,)]]
    step = diffuse(model["model"], [7], max_tokens=1).history[0]
    counted = []
    for passes in orders:  # the last one writes position 1 again, which counts where it was written last
        steps = [dataclasses.replace(step, number=n, block=(0, 4), revealed=new) for n, new in enumerate(passes)]
        next_block = [dataclasses.replace(one, number=one.number + 9, block=(4, 8), revealed=(4,)) for one in steps[:1]]
        counted.append(left_first([*steps, *next_block]))
    assert counted == [(5, 5), (0, 6), (0, 0), (4, 6)]
    written = {"block_size": 1, "sampler": "uniform", "max_tokens": 8}
    assert run("beyond.canvas", model, **written)[-1].counts["pairs"] == 0
    whole = run("beyond.canvas", model, sampler="uniform", max_tokens=24, passes=8)[-1].counts
    assert 0.2 < whole["left_first"] / whole["pairs"] < 0.8 and whole["pairs"] > 50


def test_of_an_entropy_bound_no_passes_are_planned_and_every_sampler_writes_the_whole_canvas(model):
    for sampler in SAMPLERS:
        *steps, whole = run("beyond.canvas", model, sampler=sampler, bound=2.0)
        assert sum(m.counts["tokens"] for m in steps) == whole.counts["tokens"] == 12
        assert (whole.predicted is None) == (sampler == "entropy-bound")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": "x = 1\n" * 100}, "context of 256"),
        ({"prompt": "x = 1\n" * 40, "max_tokens": 96}, r"blocks of 8\) are more than the\s+context of 256"),
        ({"block_size": 16}, "blocks of 16 are longer"),
        ({"passes": 0}, "passes must be a whole number from 1"),
        ({"bound": -1.0, "sampler": "entropy-bound"}, "bound must be"),
        ({"sampler": "certain"}, "unknown sampler"),
        ({"model": TWIN}, "diffusion model"),
        ({"temperature": -0.5}, "temperature must be"),
    ],
)
def test_a_canvas_that_cannot_be_is_refused_with_what_to_do(model, given, message):
    with pytest.raises(WorkbenchError, match=message):
        run("beyond.canvas", {name: one for name, one in model.items() if name not in given}, **given)


def test_an_autoregressive_model_is_no_canvas(model):
    with pytest.raises(WorkbenchError):
        run("beyond.canvas", {"model": model["twin"]})


def test_the_panel_shows_every_state_of_a_position(make, runs):
    panel = make("canvas", shown_pass=0)
    planned = panel.view(panel.settings)
    assert "Planned: 12 tokens in 8 passes" in planned.words and "nothing is written yet" in planned.alt
    assert [row[3] for row in planned.rows] == [
        f"{p.rows}" for p in plan(PROMPT_TOKENS, 12, 8, make_sampler("remasking", passes=4))
    ]
    panel.measurements = made = runs["beyond.canvas"]
    again = next(m for m in made if m.settings["remasked"])
    panel.configure(shown_pass=again.settings["step"] + 1)
    view = panel.view(panel.settings)
    number, some = len(again.settings["revealed"]), len(again.settings["remasked"])
    assert f"{number} token" in view.words and f"{some} masked again" in view.words
    assert f"{again.settings['canvas'].count(HIDDEN)} masked" in view.alt
    row = view.rows[again.settings["step"]]
    assert row[2] == row[3] == f"{again.counts['rows']:.0f}" and row[7] == f"{some}"
    panel.configure(seed=5)
    assert "Planned" in panel.view(panel.settings).words


def test_a_surer_token_is_drawn_darker():
    grey = [sum(int(confidence_colour(p)[at : at + 2], 16) for at in (1, 3, 5)) for p in (0, 0.25, 0.5, 0.75, 1)]
    assert all(a > b for a, b in itertools.pairwise(grey))


def test_play_goes_through_the_passes_and_ends_with_the_last(make, runs):
    panel = make("canvas", shown_pass=0)
    panel.measurements = runs["beyond.canvas"]
    assert panel.play.max == len(matching(panel.measurements, measured="pass")) == 8
    seen = []
    for number in (1, 4, 8):
        panel.play.value = number
        assert panel.wait(30)
        seen.append(panel.snapshot().data)
    assert len(set(seen)) == 3 and panel.settings["shown_pass"] == 8


# -- beyond.tokens_per_pass --------------------------------------------------------------------------------------


def test_the_twins_loss_and_every_score_are_those_of_the_engine(model, runs):
    made, diffusion, twin = runs["beyond.tokens_per_pass"], model["model"], model["twin"]
    rows = held_out_passages(diffusion.tokenizer, 64, 1)
    [loss] = matching(made, measured="twin")
    through = loss_through(twin, make_kv("contiguous", twin.config, max_sequences=4, max_tokens=64), rows, chunk=64)
    assert loss.median == pytest.approx(through.nats_per_token, rel=1e-5)
    assert [m.settings["block_size"] for m in matching(made, measured="bound")] == [4, 8]
    for m in matching(made, measured="bound"):
        assert m.median == bound_of(diffusion, rows, m.settings["block_size"], draws=1).nats_per_token
    scored = matching(made, measured="nats")
    assert len(scored) == (3 * 2 + 4) + (4 * 2 + 4)
    for m in scored:
        if "passes" in m.settings:
            assert m.counts["tokens_per_pass"] == m.settings["block_size"] / m.settings["passes"]
    for passes in (1, 8):
        [m] = matching(scored, block_size=8, sampler="confidence", passes=passes)
        assert m.median == pytest.approx(score(diffusion, rows, 8, Confidence(passes)).nats_per_token)


def test_shares_are_of_header_and_text_together(model, monkeypatch):
    judged, headers = [], held_out_headers(3)
    monkeypatch.setattr(quality, "parses", lambda text: judged.append(text) or len(judged) % 3 != 0)
    made = run("beyond.tokens_per_pass", model)
    texts = []
    for seed, header in enumerate(headers):
        how = {"max_tokens": 8, "block_size": 8, "sampler": Confidence(2), "seed": seed}
        texts.append(header + diffuse(model["model"], header, **how).text)
    assert judged[3:6] == texts and len(judged) == 3 * 4  # three samplers and the twin
    assert all(text.startswith(header) for text, header in zip(judged[9:], headers))
    for m in matching(made, measured="parsing"):
        assert m.median == pytest.approx(2 / 3) and (m.counts["parsed"], m.counts["sampled"]) == (2, 3)
        assert (m.counts["low"], m.counts["high"]) == pytest.approx((0.2077, 0.9385), abs=1e-4)  # Wilson


def test_every_sampler_writes_in_as_many_passes_and_the_twin_token_by_token(runs):
    made = runs["beyond.tokens_per_pass"]
    assert {m.settings["sampler"] for m in matching(made, measured="parsing")} == {*quality.SAMPLED, "twin"}
    assert len({m.counts["passes"] for m in matching(made, measured="parsing") if m.settings["sampler"] != "twin"}) == 1
    assert matching(made, measured="parsing", sampler="twin")[0].counts["tokens_per_pass"] == 1


def test_a_difference_is_paired_and_has_a_width_even_where_no_text_differs():
    a, b = [True] * 30 + [False] * 70, [True] * 10 + [False] * 90
    difference, low, high = quality.paired_difference(a, b)
    # 20 of 100 with the first alone, none with the second: 20/102 ± 1.96 · √(21 − 20²/102)/102
    assert difference == 0.2 and (low, high) == pytest.approx((0.11667, 0.27549), abs=1e-4)
    assert quality.paired_difference(b, a) == pytest.approx((-0.2, -high, -low))
    same, below, above = quality.paired_difference(a, a)
    assert same == 0 and below == -above and 0.01 < above < 0.03
    # the same shares, other texts: less sure
    _, low_unpaired, _ = quality.paired_difference(a, b[::-1])
    assert low_unpaired < low
    for first, second in (([], []), (a, b[:5])):
        with pytest.raises(WorkbenchError, match="as many texts of both"):
            quality.paired_difference(first, second)


def test_words_name_the_points_within_the_goal_and_the_difference_with_its_interval(make, runs):
    panel = make("tokens_per_pass")
    assert "The goal: 2 tokens per pass" in panel.view(panel.settings).words
    made = runs["beyond.tokens_per_pass"]
    [twin] = matching(made, measured="twin")
    near = [twin.median + 0.25 - 1e-6, twin.median + 0.26]
    scored = matching(made, measured="nats", block_size=8, sampler="confidence")
    moved = {
        id(m): dataclasses.replace(m, samples=[near[m.counts["tokens_per_pass"] != 2]])
        for m in matching(made, measured="nats")
    }
    confident = [moved[id(m)] for m in scored]
    assert [m.counts["tokens_per_pass"] for m in within_goal(confident, twin)] == [2]
    [difference] = matching(made, measured="difference")
    counts = {**difference.counts, "low": 0.05, "high": 0.19, "only_confidence": 40, "only_uniform": 16}
    ahead = dataclasses.replace(difference, samples=[0.12], counts=counts)
    panel.measurements = [ahead if m is difference else moved.get(id(m), m) for m in made]
    words = panel.view(panel.settings).words
    assert "confidence, 4 passes (2.00 tokens per pass, +0.25)" in words and "confidence, 2 passes" not in words
    assert "confidence minus uniform: +12.0 points" in words and "(95 %: +5.0 to +19.0" in words
    assert "40 parse with confidence alone" in words and "leaves 0 out" in words
    panel.measurements = [
        dataclasses.replace(m, samples=[twin.median + 3]) if m.settings["measured"] == "nats" else m for m in made
    ]
    assert "none of the points" in panel.view(panel.settings).words


def test_another_vocabulary_than_the_twins_is_refused(model):
    """One of the same size, too: token 7 is another text there."""
    backend = json.loads(shipped_tokenizer().backend.to_str())
    swapped = dict(zip(backend["model"]["vocab"], [1, 0, *range(2, 4096)]))
    backend["model"]["vocab"] |= swapped
    other = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(backend)), end_of_text=0)
    for twin in (
        random_decoder(tiny_config(vocab_size=4000)),
        random_decoder(tiny_config()),
        random_decoder(tiny_config(), tokenizer=other),
    ):
        with pytest.raises(WorkbenchError, match="where the tokens are the same"):
            run("beyond.tokens_per_pass", {**model, "twin": twin})


def test_a_twin_may_have_states(model):
    shape = StateShape(inner_size=32, num_heads=4, num_groups=4)
    config = tiny_config(mixers=("mamba2", "attention"), state_shape=shape)
    twin = random_decoder(config, seed=1, tokenizer=shipped_tokenizer())
    made = run("beyond.tokens_per_pass", {**model, "twin": twin})
    assert matching(made, measured="parsing", sampler="twin")[0].counts["tokens_per_pass"] == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"context": 512}, "longer than the context of 256"),
        ({"block_size": 16}, "blocks of 16 are longer"),
        ({"passes": 0}, "passes must be"),
        ({"passages": 0}, "passages must be"),
    ],
)
def test_texts_that_cannot_be_scored_are_refused(model, given, message):
    with pytest.raises(WorkbenchError, match=message):
        run("beyond.tokens_per_pass", model, **given)


# -- beyond.few_passes -------------------------------------------------------------------------------------------


def test_twenty_passes_instead_of_a_thousand_are_worth_14_8_at_batch_1_and_nothing_at_64():
    h100, shape = PUBLISHED["h100-sxm"], public_shape("llama-3.1-8b")
    assert few.few_passes_by_roofline(h100) == pytest.approx(989 / 3.35 / 20) == pytest.approx(14.76, abs=0.01)
    assert few.few_passes_by_roofline(h100, batch=64) == pytest.approx(0.2306, abs=1e-3)
    assert few.few_passes_by_roofline(h100, batch=1000) == pytest.approx(1 / 20)  # both are compute-bound
    one, many = (few.few_passes(shape, h100, batch=batch) for batch in (1, 64))
    assert one.speedup == pytest.approx(15.0, abs=0.1) and one.flops_ratio == pytest.approx(20.3, abs=0.1)
    assert many.speedup < 0.3
    with pytest.raises(WorkbenchError, match="at least one token"):
        few.few_passes(shape, h100, tokens=10, passes=20)
    with pytest.raises(WorkbenchError, match="passes must be"):
        few.few_passes(shape, h100, passes=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"passes": 0}, "passes must be"),
        ({"tokens": 16, "passes": 20}, "at least one token is written in each"),
        ({"longest": 512}, "512 positions are more than .* reads: at most 256"),
    ],
)
def test_passes_that_cannot_be_are_refused(model, given, message):
    with pytest.raises(WorkbenchError, match=message):
        run("beyond.few_passes", model, **given)


def test_a_pass_is_timed_beside_what_its_rows_cost(model):
    diffusion = model["model"]
    for cached, rows in ((0, 4), (0, 8), (6, 4)):
        one = few.timed_pass(DataSheetBench(), diffusion, rows=rows, cached=cached, repeats=2)
        costs = pass_costs(diffusion.config, rows=rows, cached=cached, weight_bytes_per_element=4)
        assert len(one.samples) == 2 and (one.costs.flops, one.costs.bytes) == (costs.flops, costs.bytes)
        assert one.expected.seconds > 0 and "as in one forward without a cache" in one.check
    with pytest.raises(WorkbenchError, match="260 positions are more than"):
        few.timed_pass(DataSheetBench(), diffusion, rows=200, cached=60)


def test_a_pass_with_other_logits_than_without_a_cache_is_not_timed(model, monkeypatch):
    """Planted: the cache attends only to the newest half of what it has."""
    real = few.CanvasKV.attend

    def forgets(kv, layer, q, k, v, batch, up=None):
        out = real(kv, layer, q, k, v, batch, up)
        return out if layer else out.flip(0)

    monkeypatch.setattr(few.CanvasKV, "attend", forgets)
    with pytest.raises(WorkbenchError, match="its time was thrown away"):
        few.timed_pass(DataSheetBench(), model["model"], rows=8, repeats=1)


def test_what_few_passes_are_worth_here_is_of_the_times_measured(runs):
    made = runs["beyond.few_passes"]
    passes, [step], [here] = (matching(made, measured=kind) for kind in ("pass", "step", "here"))
    assert [m.settings["rows"] for m in passes] == [16, 32, 64]
    assert (step.settings["rows"], step.settings["cached"]) == (1, 32)
    assert (here.settings["tokens"], here.settings["passes"]) == (64, 1)
    assert here.median == pytest.approx(64 * step.median / passes[-1].median)
    assert here.predicted == pytest.approx(64 * step.predicted / passes[-1].predicted)
    assert [m.settings["batch"] for m in matching(made, measured="card")] == list(few.BATCHES)


def test_the_panel_has_both_forms_before_a_run_and_the_errors_after_it(make, runs):
    panel = make("few_passes")
    view = panel.view(panel.settings)
    assert "14.8 x as fast at batch 1" in view.words and "15.0 x" in view.words and "20.3 x the FLOPs" in view.words
    assert "From batch 16 on nothing is left of it" in view.words
    batch_64 = next(row for row in view.rows if row[:2] == ["batch", "64"])
    assert batch_64[4:7] == ["0.28", "0.23", "20.3"]
    made = runs["beyond.few_passes"]
    panel.measurements = [
        dataclasses.replace(m, samples=[m.predicted * (1.1 if m.settings["rows"] < 64 else 1.3)])
        if m.settings["measured"] == "pass"
        else m
        for m in made
    ]
    view = panel.view(panel.settings)
    assert "2 of 3 passes took what was predicted within 15%; the largest error is 30%" in view.words
    assert [row[-1] for row in view.rows if row[0] == "rows here"] == ["+10%", "+10%", "+30%"]
    assert "Here 64 tokens in 1 pass take" in view.words
    panel.configure(passes=10)
    assert "100 x fewer passes are 29.5 x as fast" in panel.view(panel.settings).words


def test_the_default_canvas_begins_with_a_held_out_header():
    assert CANVAS.setting("prompt").default in held_out_headers(1000)
