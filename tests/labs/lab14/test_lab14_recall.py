"""Lab 14, recall: slices are those of the definition and have all tokens and nats once; the recall task is what it
says, can be learned, and the same seed trains the same model."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from conftest import random_decoder, tiny_config
from experiment_claims import DataSheetBench, ExperimentClaims
from panel_claims import PanelClaims

from workbench.errors import WorkbenchError
from workbench.experiments import experiment, run_experiment
from workbench.kv import kv_for
from workbench.labs.lab14_beyond_transformers import associative, recall
from workbench.models.checkpoints import shipped_tokenizer
from workbench.models.corpus import SourceFile, held_out_files
from workbench.models.decoder import Decoder
from workbench.models.evaluation import held_out_passages, loss_through
from workbench.models.mixers.contract import StateMixer
from workbench.models.recipes import STATE_VARIANTS
from workbench.models.state_shape import ATTENTION, StateShape
from workbench.models.training import held_out_loss, rows_batch

SMALL = {
    "beyond.recall": {"context": 64, "passages": 3, "counted": 1000},
    "beyond.associative": {"steps": 2, "sequences": 2, "fresh": 8},
}
MOVED = {"recall": {"hits_by": "frequency"}, "associative": {"mixers": "mamba2"}}
HERE = ["stdlib-3m-mamba2", "stdlib-3m-jamba4"]


class StandInBench(DataSheetBench):
    """Its state variants are tiny and random, with the mixers of the trained ones. `asked` names each load."""

    def __init__(self, *args, **others):
        super().__init__(*args, **others)
        self.asked = []

    def model(self, name, **settings):
        if not isinstance(name, str):
            return name
        self.asked.append(name)
        return stand_in(name)


def stand_in(name: str) -> Decoder:
    kinds = STATE_VARIANTS[name].mixers[2:4]  # of the hybrid: one of each
    sizes = {"inner_size": 32, "state_size": 8, "num_heads": 2}
    states = {"mixers": kinds, "family": "qwen3", "state_shape": StateShape(**sizes)} if kinds else {}
    return random_decoder(tiny_config(**states), seed=len(name), tokenizer=shipped_tokenizer(), name=name)


@pytest.fixture(autouse=True)
def small_library(monkeypatch):
    """Two training modules, and two trained models that are here."""
    some = [SourceFile(f"{n}.py", f"def f{n}(x):\n    return x + {n}\n" * 60) for n in range(2)]
    monkeypatch.setattr(recall, "training_files", lambda: some)
    monkeypatch.setattr(recall, "shipped_names", lambda: ["stdlib-10m", *HERE])


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model


@pytest.fixture(scope="module")
def runs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recall, "training_files", lambda: [SourceFile("a.py", "def f(x):\n    return x + 1\n" * 60)])
        patch.setattr(recall, "shipped_names", lambda: HERE)
        return {name: run_experiment(name, settings, StandInBench()) for name, settings in SMALL.items()}


class TestExperiments(ExperimentClaims):
    lab, small, bench = 14, SMALL, StandInBench


class TestPanels(PanelClaims):
    small, moved, bench = SMALL, MOVED, StandInBench


# -- slices ----------------------------------------------------------------------------------------------------


def slow_since(row: list[int]) -> list[int]:
    """By the definition: how many tokens ago this bigram ended last, 0 where it never did."""
    since = []
    for t in range(1, len(row)):
        earlier = [s for s in range(1, t) if row[s - 1 : s + 1] == row[t - 1 : t + 1]]
        since.append(t - earlier[-1] if earlier else 0)
    return since


def test_distances_are_those_of_the_definition_where_occurrences_overlap_too():
    rows = torch.tensor([[5, 5, 5, 5, 1, 2, 1, 2], [1, 2, 3, 1, 2, 9, 9, 9]])
    assert recall.tokens_since(rows).tolist() == [[0, 1, 1, 0, 0, 0, 2], [0, 0, 0, 3, 0, 0, 1]]
    drawn = torch.randint(4, (6, 80), generator=torch.Generator().manual_seed(3))
    assert recall.tokens_since(drawn).tolist() == [slow_since(row) for row in drawn.tolist()]


def test_a_bigram_of_another_passage_is_no_hit():
    rows = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    assert not recall.tokens_since(rows).any()


def test_bigrams_are_counted_in_the_training_text():
    rows, stream = torch.tensor([[1, 2, 1], [2, 1, 1]]), torch.tensor([1, 2, 1, 2, 3, 1])
    assert recall.bigram_counts(rows, stream, 10).tolist() == [[2, 1], [1, 0]]
    assert recall.bigram_counts(rows, stream[:1], 10).tolist() == [[0, 0], [0, 0]]
    # 0 followed by 4 and 1 followed by 1 are two bigrams of a vocabulary of 5
    assert recall.bigram_counts(torch.tensor([[0, 4, 1]]), torch.tensor([1, 1, 4, 1]), 5).tolist() == [[0, 1]]


def slow_name(kind: str, since: int, frequency: int) -> str | None:
    """The slice of a kind that a token is in."""
    if kind == "hit":
        return "hits" if since else "rest"
    number = frequency if kind == "frequency" else since
    names = {
        "frequency": [(0, 0, "0"), (1, 9, "1 to 9"), (10, 99, "10 to 99"), (100, math.inf, "100 or more")],
        "distance": [
            (1, 7, "1 to 7"),
            *((2**n, 2 ** (n + 1) - 1, f"{2**n} to {2 ** (n + 1) - 1}") for n in range(3, 9)),
            (512, math.inf, "512 or more"),
        ],
    }[kind]
    return next(name for low, high, name in names if low <= number <= high) if since else None


def test_slices_are_those_of_the_definition_and_the_sums_of_each_kind_are_the_whole():
    draw = torch.Generator().manual_seed(5)
    rows = torch.randint(30, (2, 1500), generator=draw)
    since, frequency = recall.tokens_since(rows), torch.randint(200, (2, 1499), generator=draw)
    frequency[:, ::3] = 0
    losses, base = (torch.rand((2, 1499), generator=draw) for _ in range(2))
    every = recall.slices_of(since, frequency)
    assert {one.kind for one in every} == {"all", "hit", "frequency", "distance"} and len(every) == 15
    for one in every[1:]:
        wanted = [
            [slow_name(one.kind, s, f) == one.name for s, f in zip(*row)]
            for row in zip(since.tolist(), frequency.tolist())
        ]
        assert one.mask.tolist() == wanted, (one.kind, one.name)
    counts = {(one.kind, one.name): recall.slice_counts(one, losses, base) for one in every}
    whole, hits = counts["all", "all"], counts["hit", "hits"]
    assert whole["tokens"] == 2 * 1499 and whole["nats"] == pytest.approx(math.fsum(losses.flatten().tolist()))
    for kind, of in (("hit", whole), ("frequency", hits), ("distance", hits)):
        mine = [c for (name, _), c in counts.items() if name == kind]
        assert sum(c["tokens"] for c in mine) == of["tokens"]
        for summed in ("nats", "gap_nats"):
            assert math.fsum(c[summed] for c in mine) == pytest.approx(of[summed], rel=1e-12, abs=1e-9)


def test_the_share_of_the_gap_is_summed_nats_over_summed_nats_and_left_out_where_no_gap_is_clear():
    hit = torch.zeros((3, 4), dtype=torch.bool)
    hit[:, 0] = True
    part = recall.Slice("hit", "hits", 0, hit)
    base = torch.ones((3, 4))
    worse = base + torch.tensor([3.0, 1.0, 0.0, 0.0]) * torch.tensor([[1.0], [1.1], [0.9]])
    counts = recall.slice_counts(part, worse, base)
    assert counts["gap"] == pytest.approx(3.0) and counts["gap_share"] == pytest.approx(0.75)
    assert counts["gap_share_standard_error"] == pytest.approx(0, abs=1e-6)  # the same in every passage
    assert counts["gap_standard_error"] == pytest.approx(0.3 / math.sqrt(3), rel=1e-4)
    noise = base + torch.tensor([[1.0], [-1.0], [0.1]])
    assert "gap_share" not in recall.slice_counts(part, noise, base)
    assert "gap_share" not in recall.slice_counts(part, base - 1, base)
    assert "gap" not in recall.slice_counts(part, base, None)


def test_the_jackknife_of_a_mean_is_its_standard_error_and_of_what_one_passage_alone_has_none():
    values = torch.tensor([1.0, 4.0, 2.0, 9.0], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    assert recall.jackknife(torch.div, values, ones) == pytest.approx(float(values.std()) / 2)
    alone = torch.tensor([0.0, 0.0, 3.0, 0.0], dtype=torch.float64)
    assert recall.jackknife(torch.div, alone, alone) == math.inf


# -- nats ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [recall.REFERENCE, "stdlib-3m-jamba4"])
def test_nats_of_the_parallel_form_are_those_of_reading_token_by_token(name):
    model, rows = stand_in(name), held_out_passages(shipped_tokenizer(), 32, 5)
    losses = recall.token_losses(StandInBench(), model, rows)
    kind = "state" if model.config.state_layers else "contiguous"
    kv = kv_for(kind, model, max_sequences=4, max_tokens=32)
    assert torch.allclose(losses, loss_through(model, kv, rows, chunk=1).losses, atol=2e-3)


def test_over_all_passages_it_is_the_held_out_loss_of_the_cards(monkeypatch, model):
    few = [dataclasses.replace(f, text=f.text[:600]) for f in held_out_files()[:4]]
    for module in ("training", "evaluation"):
        monkeypatch.setattr(f"workbench.models.{module}.held_out_files", lambda: few)
    rows = held_out_passages(model.tokenizer, 64)
    losses = recall.token_losses(StandInBench(), model, rows)
    card = held_out_loss(model, model.tokenizer, context=64)
    assert losses.numel() == card["tokens"]
    assert float(losses.double().mean()) == pytest.approx(card["nats_per_token"], rel=1e-6)


def test_each_model_that_is_here_has_all_slices_and_the_reference_comes_first(runs):
    made = runs["beyond.recall"]
    assert list(dict.fromkeys(m.settings["model"] for m in made)) == [recall.REFERENCE, *HERE]
    for name in (recall.REFERENCE, *HERE):
        mine = {(m.settings["slicing"], m.settings["slice"]): m for m in made if m.settings["model"] == name}
        whole = mine["all", "all"]
        assert whole.counts["tokens"] == 3 * 63
        assert whole.median == pytest.approx(whole.counts["nats"] / whole.counts["tokens"])
        for kind, of in (("hit", whole), ("frequency", mine["hit", "hits"]), ("distance", mine["hit", "hits"])):
            parts = [m.counts for (slicing, _), m in mine.items() if slicing == kind]
            assert sum(c["tokens"] for c in parts) == of.counts["tokens"]
            assert math.fsum(c["nats"] for c in parts) == pytest.approx(of.counts["nats"], rel=1e-12)
        assert ("gap" in whole.counts) == (name != recall.REFERENCE)


def test_every_gap_is_to_the_reference_and_to_no_other_model(runs):
    nats = {(m.settings["model"], m.settings["slice"]): m.median for m in runs["beyond.recall"]}
    gaps = {
        key: m.counts["gap"]
        for m in runs["beyond.recall"]
        if "gap" in m.counts
        for key in [(m.settings["model"], m.settings["slice"])]
    }
    assert {model for model, _ in gaps} == set(HERE)
    for (model, part), gap in gaps.items():
        assert gap == pytest.approx(nats[model, part] - nats[recall.REFERENCE, part], abs=1e-9)


def test_a_model_that_is_not_here_is_no_choice_and_refused_with_the_command_that_makes_it():
    limit = experiment("beyond.recall").limits(**experiment("beyond.recall").complete())["models"]
    assert [name for name in ("all", *recall.COMPARED) if limit(name)] == ["all", "stdlib-3m-mamba2", HERE[1]]
    bench = StandInBench()
    run_experiment("beyond.recall", {**SMALL["beyond.recall"], "models": "stdlib-3m-mamba2"}, bench)
    assert set(bench.asked) == {recall.REFERENCE, "stdlib-3m-mamba2"}


def test_models_of_other_tokens_are_refused(monkeypatch):
    bare = stand_in("stdlib-3m-mamba2")
    bare.tokenizer = None
    monkeypatch.setattr(StandInBench, "model", lambda self, name: bare if name in HERE else stand_in(name))
    with pytest.raises(WorkbenchError, match="different tokenizers"):
        run_experiment("beyond.recall", SMALL["beyond.recall"], StandInBench())


# -- associative recall ----------------------------------------------------------------------------------------


def test_a_row_shows_every_pair_once_and_asks_for_each_once_in_another_order():
    rows = associative.recall_rows(50, 8, torch.Generator().manual_seed(0))
    assert rows.shape == (50, 32)
    orders = set()
    for row in rows.tolist():
        shown = list(zip(row[:16:2], row[1:16:2]))
        asked = list(zip(row[16::2], row[17::2]))
        assert sorted(shown) == sorted(asked) and len({key for key, _ in shown}) == 8
        assert all(key < associative.KEYS <= value < associative.KEYS + associative.VALUES for key, value in shown)
        orders.add(tuple(shown.index(pair) for pair in asked))
    assert len(orders) > 40
    assert not torch.equal(rows, associative.recall_rows(50, 8, torch.Generator().manual_seed(1)))


def test_logits_are_asked_for_at_the_queries_and_the_answers_stand_behind_them():
    rows = associative.recall_rows(3, 2, torch.Generator().manual_seed(0))
    batch, answers = associative.queries(rows)
    assert batch.logit_rows.tolist() == [4, 6, 12, 14, 20, 22]
    assert answers.tolist() == rows[:, [5, 7]].flatten().tolist()
    assert torch.equal(batch.token_ids, rows_batch(rows).token_ids)


@pytest.mark.parametrize("mixer", associative.MIXERS)
def test_every_mixer_is_what_it_is_called_with_a_key_of_the_asked_size(mixer):
    config = associative.shape_of(mixer, 4, 32, 2, 8)
    kinds = ["mamba2", ATTENTION] if mixer == associative.HYBRID else [mixer] * 2
    assert [config.mixer_of(layer) for layer in range(2)] == kinds and config.context_length == 32
    model = Decoder(config)
    mixers = [part for part in model.modules() if isinstance(part, StateMixer)]
    assert len(mixers) == len(config.state_layers) and model.num_parameters() == config.num_parameters()
    if mixer in ("mamba2", "gated_delta", "linear_attention"):
        assert any(shape == (1, 4, 32) for shape in config.state_shapes(0).values())
        assert associative.capacity(mixer, 4, 8) == 0.5 and associative.capacity(mixer, 16, 8) == 1
    else:
        assert associative.capacity(mixer, 4, 8) is None


@pytest.mark.parametrize("pairs", [2, 8, 16])
def test_a_guess_is_what_the_values_alone_give_away(pairs):
    rows = associative.recall_rows(20_000, pairs, torch.Generator().manual_seed(0))
    shown, answers = rows[:, 1 : 2 * pairs : 2], rows[:, 2 * pairs + 1 :: 2]
    right = (shown.mode(1).values[:, None] == answers).double().mean()
    assert associative.guess(pairs) == pytest.approx(right.item(), abs=0.005)
    assert associative.guess(2) == (1 + 1 / 16) / 2  # both alike, or one of two


def run_of(mixer: str, **changes) -> associative.Run:
    size = 0 if mixer == ATTENTION else 8
    pairs = changes.get("pairs", 2)
    given = {"rate": 1e-2, "pairs": pairs, "steps": 2, "sequences": 4, "seed": 0} | changes
    return associative.Run(mixer, size, config=associative.shape_of(mixer, size, 16, 1, pairs), **given)


def test_a_state_learns_two_pairs_with_one_layer_and_not_at_a_rate_far_too_low():
    """Guards against a task that cannot be answered and against a sweep in which the rate does nothing."""
    bench, shares = StandInBench(), {}
    for rate in (1e-5, 2e-2):
        model, steps, _ = associative.train(bench, run_of("linear_attention", steps=150, sequences=32, rate=rate))
        shares[rate] = associative.accuracy(bench, model, 2, 200, seed=0)
        assert steps == 150
    assert shares[1e-5] < 0.6 and shares[2e-2] > 0.9


def test_the_same_seed_trains_the_same_model_on_other_rows_than_it_is_judged_by():
    bench = StandInBench()
    first, again, other = (associative.train(bench, run_of("mamba2", seed=seed))[0] for seed in (0, 0, 1))
    assert torch.equal(first.head.weight, again.head.weight) and not torch.equal(first.head.weight, other.head.weight)
    trained_on = associative.recall_rows(50, 8, torch.Generator().manual_seed(0)).tolist()
    fresh = associative.recall_rows(50, 8, torch.Generator().manual_seed(associative.FRESH_SEED)).tolist()
    assert not [row for row in fresh if row in trained_on]


def test_a_loss_that_is_no_number_ends_the_run_and_its_answers_are_wrong(monkeypatch):
    monkeypatch.setattr(associative, "learning_rate", lambda peak, step, steps: math.inf if step == 2 else 1e-3)
    bench = StandInBench()
    model, steps, loss = associative.train(bench, run_of(ATTENTION, steps=9))
    assert steps == 3 and math.isfinite(loss)
    assert associative.accuracy(bench, model, 2, 8, seed=0) == 0


def test_every_mixer_size_and_rate_is_trained_and_what_it_took_is_counted(runs):
    made = runs["beyond.associative"]
    asked = [(m.settings["mixer"], m.settings["state_size"], m.settings["rate"]) for m in made]
    sizes = {mixer: associative.sizes_of(mixer) for mixer in associative.MIXERS}
    assert asked == [(mixer, n, rate) for mixer in sizes for n in sizes[mixer] for rate in associative.RATES]
    for m in made:
        assert 0 <= m.median <= 1 and m.unit == "share"
        assert m.counts["tokens_trained"] == 2 * 2 * 32 and m.counts["answers"] == 64
        config = associative.shape_of(m.settings["mixer"], m.settings["state_size"] or 4, 32, 2, 8)
        assert m.counts["parameters"] == config.num_parameters() and m.counts["state_values"] == config.state_values()
        # 2 FLOPs for each weight and token, three times; embeddings are looked up, and attention and scans come on top
        least = 3 * 2 * 128 * (config.num_parameters() - 2 * 32 * 32)
        assert 0.8 * least < m.counts["flops"] < 2 * least


def test_the_rate_rises_stays_and_falls_to_nothing():
    rates = [associative.learning_rate(1.0, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == 1 == rates[9] == rates[60]
    assert rates[99] == pytest.approx(1 / 40) and rates[61:] == sorted(rates[61:], reverse=True)
