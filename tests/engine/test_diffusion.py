"""Claims about diffusion: the objective is the bound that it says, a canvas is written as counted, bad input refused.

One tiny model of 4 tokens and a mask, so that all texts of a block can be enumerated.
"""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

from workbench.diffusion.attention import CanvasKV, TrainingCanvas
from workbench.diffusion.bound import bound_of
from workbench.diffusion.continuous import DiffusionLM, ToyShape, balanced, bracket_words, train_toy
from workbench.diffusion.costs import pass_costs
from workbench.diffusion.denoise import diffuse
from workbench.diffusion.model import DiffusionModel, load_diffusion, new_diffusion, save_diffusion
from workbench.diffusion.objective import by_count, by_rate, diffusion_loss, masked_nats, without_mask
from workbench.diffusion.recipes import DIFFUSION_RECIPES, DiffusionRecipe
from workbench.diffusion.samplers import Confidence, EntropyBound, Remasking, Sampler, Uniform, View, make_sampler
from workbench.diffusion.scoring import score
from workbench.diffusion.training import train_diffusion
from workbench.errors import WorkbenchError
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.corpus import held_out_files
from workbench.models.state_shape import StateShape

MASK = 4  # of tokens 0 … 3


def tiny(kind: str = "block", **other) -> DiffusionModel:
    config = ModelConfig(
        family="llama",
        vocab_size=5,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=24,
        context_length=other.pop("context_length", 24),
        tie_embeddings=True,
        **other,
    )
    model = new_diffusion(config, kind=kind, block_sizes=(2, 3, 4, 8), mask_token=MASK)
    with torch.no_grad():
        for parameter in model.decoder.parameters():  # far from uniform, so that a wrong row shows
            if parameter.dim() > 1:
                parameter.mul_(25)
    return model


MODEL = tiny()
TEXTS = torch.tensor(list(itertools.product(range(4), repeat=3)))  # [64, 3]: every block of 3 tokens
ROWS = torch.randint(0, 4, (2, 12), generator=torch.Generator().manual_seed(3))


def nats_of(model: DiffusionModel, text: torch.Tensor, masked: list[int]) -> torch.Tensor:
    """−log p of each masked token of a text [L] that is one block."""
    hidden = torch.zeros(1, len(text), dtype=torch.bool)
    hidden[0, masked] = True
    canvas = TrainingCanvas(model.config, len(text), len(text))
    return masked_nats(model.decoder, text[None], hidden, canvas, model.mask_token)


def nats_by_order(model: DiffusionModel, text: torch.Tensor) -> list[float]:
    """Nats of writing a text one token a pass, in each of its orders."""
    places = range(len(text))
    subsets = {
        s: dict(zip(s, nats_of(model, text, list(s)).tolist()))
        for n in range(1, len(text) + 1)
        for s in itertools.combinations(places, n)
    }
    orders = itertools.permutations(places)
    return [sum(subsets[tuple(sorted(order[i:]))][order[i]] for i in places) for order in orders]


def mean_over_orders(model: DiffusionModel, text: torch.Tensor) -> float:
    orders = nats_by_order(model, text)
    return sum(orders) / len(orders)


# -- the objective ---------------------------------------------------------------------------------------------


def subset_weights(draw, size: int) -> dict[tuple[int, ...], float]:
    """Mean weight of each set of masked places, exactly: probability × weight, from the formulas of the two draws."""
    weights = {}
    for n in range(1, size + 1):
        for chosen in itertools.combinations(range(size), n):
            if draw is by_count:
                weights[chosen] = 1 / size / math.comb(size, n) * (size / n)
            else:  # ∫ t^n (1−t)^(L−n) / t dt
                weights[chosen] = math.gamma(n) * math.gamma(size - n + 1) / math.gamma(size + 1)
    return weights


@pytest.mark.parametrize("draw", [by_count, by_rate])
def test_the_objective_is_the_mean_over_all_orders_of_writing_a_token_a_pass(draw):
    text = TEXTS[27]
    exact = sum(
        weight * float(nats_of(MODEL, text, list(chosen)).sum()) for chosen, weight in subset_weights(draw, 3).items()
    )
    assert exact == pytest.approx(mean_over_orders(MODEL, text), abs=1e-5)


@pytest.mark.parametrize("draw", [by_count, by_rate])
def test_what_is_drawn_has_the_weights_of_the_formula(draw):
    blocks = 200_000
    masked, weight = draw(blocks, 3, torch.Generator().manual_seed(1))
    for chosen, expected in subset_weights(draw, 3).items():
        wanted = torch.zeros(3, dtype=torch.bool)
        wanted[list(chosen)] = True
        mean = float(weight[(masked == wanted).all(dim=1)].sum()) / blocks
        assert mean == pytest.approx(expected, rel=0.08), chosen


def test_the_bound_is_above_the_nats_of_the_model_and_those_sum_to_one():
    """The model that writes in an order by chance gives every text a probability; NELBO is above its logarithm."""
    probability = 0.0
    for text in TEXTS:
        orders = nats_by_order(MODEL, text)
        exact = -math.log(sum(math.exp(-nats) for nats in orders) / len(orders))
        assert sum(orders) / len(orders) >= exact - 1e-6
        probability += math.exp(-exact)
    assert probability == pytest.approx(1, abs=1e-5)


def test_a_bound_by_monte_carlo_lies_within_its_own_error():
    rows = TEXTS[[5, 27, 40, 62]]
    exact = sum(mean_over_orders(MODEL, text) for text in rows) / rows.numel()
    bound = bound_of(MODEL, rows, 3, draws=200)
    assert abs(bound.nats_per_token - exact) < 4 * bound.standard_error < 0.3
    assert (bound.tokens, bound.draws) == (12, 200)


def test_in_blocks_of_one_the_bound_is_the_autoregressive_loss_exactly():
    total = 0.0
    for text in ROWS:
        for at in range(len(text)):
            kv = CanvasKV(MODEL.config, 1, len(text))
            tokens = [*text[:at].tolist(), MASK]
            logits = without_mask(MODEL.decoder(Batch.of([tokens]), kv), MASK)
            total -= float(logits.log_softmax(dim=-1)[0, text[at]])
    bound = bound_of(MODEL, ROWS, 1, draws=1)
    assert bound.nats_per_token == pytest.approx(total / ROWS.numel(), abs=1e-5)
    assert bound_of(MODEL, ROWS, 1, draws=1, seed=9).nats_per_token == pytest.approx(bound.nats_per_token, abs=1e-6)


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_all_blocks_in_one_forward_are_each_block_behind_its_own_text(size):
    masked = torch.rand(ROWS.shape, generator=torch.Generator().manual_seed(size)) < 0.5
    together = masked_nats(MODEL.decoder, ROWS, masked, TrainingCanvas(MODEL.config, size, 12), MASK)
    apart = []
    for text, hidden in zip(ROWS, masked):
        for first in range(0, 12, size):
            tokens = text[: first + size].clone()
            mine = hidden[first : first + size]
            tokens[first:][mine] = MASK
            kv = CanvasKV(MODEL.config, size, 12)
            logits = without_mask(MODEL.decoder(Batch.of([tokens.tolist()], logits="all"), kv)[first:], MASK)
            wanted = text[first : first + size]
            apart.extend(-logits.log_softmax(dim=-1)[torch.arange(size), wanted][mine])
    assert torch.allclose(together, torch.stack(apart), atol=1e-5)


def test_the_mask_is_never_a_token_that_can_come():
    logits = torch.zeros(2, 5)
    assert without_mask(logits, MASK).softmax(dim=-1)[:, MASK].tolist() == [0, 0]
    assert not logits[:, MASK].isinf().any(), "the model's own logits stay"


def test_the_loss_has_a_gradient_in_every_parameter():
    model = tiny()
    model.decoder.requires_grad_(True)
    canvas = TrainingCanvas(model.config, 4, 12)
    diffusion_loss(model.decoder, ROWS, canvas, MASK, torch.Generator().manual_seed(0)).backward()
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in model.decoder.parameters())


# -- samplers --------------------------------------------------------------------------------------------------

EXACT = [Confidence(1), Confidence(2), Confidence(3), EntropyBound(0), EntropyBound(0.7), EntropyBound(99)]


@pytest.mark.parametrize("sampler", EXACT, ids=lambda s: s.words)
def test_the_probabilities_of_all_texts_under_a_sampler_sum_to_one(sampler):
    nats = [score(MODEL, text[None], 3, sampler).nats_per_token * 3 for text in TEXTS]
    assert sum(math.exp(-n) for n in nats) == pytest.approx(1, abs=1e-4)


def test_what_a_sampler_writes_has_the_probability_of_its_score():
    sampler = Confidence(2)
    likely = max(TEXTS.tolist(), key=lambda t: -score(MODEL, torch.tensor([t]), 3, sampler).nats_per_token)
    expected = math.exp(-3 * score(MODEL, torch.tensor([likely]), 3, sampler).nats_per_token)
    runs = 150
    hits = sum(
        list(diffuse(MODEL, [], max_tokens=3, block_size=3, sampler=sampler, seed=seed).token_ids) == likely
        for seed in range(runs)
    )
    assert abs(hits / runs - expected) < 4 * math.sqrt(expected * (1 - expected) / runs)


def test_a_pass_for_each_token_by_chance_scores_the_bound():
    scored = score(MODEL, TEXTS[[5, 27, 40]].repeat(300, 1), 3, Uniform(3), side_by_side=900)
    exact = sum(mean_over_orders(MODEL, TEXTS[i]) for i in (5, 27, 40)) / 9
    assert abs(scored.nats_per_token - exact) < 4 * scored.standard_error
    assert scored.tokens_per_pass == 1


@pytest.mark.parametrize(
    "sampler", [Uniform(3), Confidence(3), EntropyBound(0.4), Remasking(3, 0.5), Remasking(3, 1)], ids=lambda s: s.words
)
@pytest.mark.parametrize("kind", ["block", "masked"])
def test_every_position_is_written_and_what_was_done_adds_up(kind, sampler):
    model = tiny(kind)
    result = diffuse(model, [1, 2, 3], max_tokens=11, block_size=8 if kind == "block" else None, sampler=sampler)
    assert len(result.token_ids) == result.tokens == 11 and MASK not in result.token_ids
    revealed = sum(len(step.revealed) for step in result.history)
    assert revealed - sum(len(step.remasked) for step in result.history) == 11
    assert [step.number for step in result.history] == list(range(result.passes))
    assert result.tokens_per_pass == 11 / result.passes
    masked = 11
    for step in result.history:
        masked -= len(step.revealed) - len(step.remasked)
        assert step.token_ids.count(MASK) == masked and step.token_ids[:3] == (1, 2, 3)
        assert not set(step.revealed) & set(step.remasked)
    if not isinstance(sampler, EntropyBound):
        assert result.passes == (3 if kind == "masked" else 6)  # blocks of 5 and 6 positions to write


def test_remasking_masks_again_what_was_least_likely_when_it_was_drawn():
    result = diffuse(tiny("masked"), [1], max_tokens=16, sampler=Remasking(4, 0.25), seed=2)
    again = [step.remasked for step in result.history]
    assert any(again) and not again[0] and not again[-1]
    sure = {}
    for step in result.history:
        if step.remasked:
            kept = [p for at, p in sure.items() if at not in step.remasked]
            assert max(sure[at] for at in step.remasked) <= min(kept)
        for at in step.remasked:
            del sure[at]
        sure.update(zip(step.revealed, step.probability))


def view_of(entropy: list[float], masked: list[bool]) -> View:
    hidden = torch.tensor([masked])
    stat = torch.tensor([entropy])
    return View(0, hidden, -stat, stat, hidden.sum(dim=1), torch.full_like(stat, 2.0), torch.Generator())


def test_an_entropy_bound_takes_the_longest_run_of_low_entropies_that_loses_no_more():
    entropy, masked = [0.5, 3.0, 0.2, 0.9, 0.1], [True, True, False, True, True]
    # ascending 0.1, 0.5, 0.9, 3.0: what is lost by taking 1, 2, 3, 4 of them is 0, 0.1, 0.6, 1.5 nats
    for bound, expected in ((0, [4]), (0.1001, [0, 4]), (0.59, [0, 4]), (0.6001, [0, 3, 4]), (1.5001, [0, 1, 3, 4])):
        chosen = EntropyBound(bound).reveal(view_of(entropy, masked))
        assert chosen[0].nonzero()[:, 0].tolist() == expected, bound


def test_confidence_takes_the_surest_and_by_chance_does_not():
    view = view_of([0.5, 3.0, 0.2, 0.9], [True] * 4)
    assert Confidence(2).reveal(view)[0].tolist() == [True, False, True, False]
    chosen = {tuple(Uniform(2).reveal(view)[0].tolist()) for _ in range(60)}
    assert len(chosen) == 6, "every pair comes"


def test_a_sampler_that_would_never_end_is_refused():
    class Idle(Sampler):
        words = "idle"

        def reveal(self, view):
            return torch.zeros_like(view.masked)

    class Wide(Idle):
        def reveal(self, view):
            return torch.ones_like(view.masked)

    with pytest.raises(WorkbenchError, match="never ends"):
        diffuse(MODEL, [1], max_tokens=4, sampler=Idle())
    with pytest.raises(WorkbenchError, match="not masked"):
        diffuse(MODEL, [1], max_tokens=4, sampler=Wide())


# -- the canvas and its cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [Confidence(2), EntropyBound(0.5), Remasking(3, 0.5)], ids=lambda s: s.words)
@pytest.mark.parametrize("prompt", [[], [1, 2, 3, 0, 1]])
def test_a_cache_of_finished_blocks_changes_no_token(prompt, sampler):
    same = {"max_tokens": 14, "block_size": 4, "sampler": sampler, "seed": 5}
    with_cache, without = (diffuse(MODEL, prompt, cached=c, **same) for c in (True, False))
    assert with_cache.token_ids == without.token_ids and with_cache.passes == without.passes
    for a, b in zip(with_cache.history, without.history):
        assert a.revealed == b.revealed and a.probability == pytest.approx(b.probability, abs=1e-5)
        assert (a.cached + a.rows, b.cached) == (b.rows, 0)
    assert with_cache.rows < without.rows and with_cache.flops < without.flops


def test_a_finished_block_is_sent_once_more_in_front_of_the_next():
    result = diffuse(MODEL, [1] * 9, max_tokens=11, block_size=4, sampler=Confidence(2))
    # prompt 0 … 8; blocks end at 12, 16 and 20, with 3, 4 and 4 positions to write
    assert [(s.cached, s.rows, s.logit_rows) for s in result.history] == [
        (0, 12, 3),
        (8, 4, 2),
        (8, 8, 4),
        (12, 4, 2),
        (12, 8, 4),
        (16, 4, 2),
    ]
    assert result.rows == 40


def test_flops_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    model = tiny("masked", context_length=64)
    with FlopCounterMode(display=False) as counter:
        result = diffuse(model, [1, 2], max_tokens=10, sampler=Confidence(3))
    # torch counts no fused attention on a CPU: 2 products of 12 × 12 pairs, 2 layers, 2 heads of 8, 3 passes
    attention = 3 * 2 * 2 * (2 * 2 * 8 * 12 * 12)
    assert result.flops == counter.get_total_flops() + attention
    assert result.flops == sum(pass_costs(model.config, rows=12, logit_rows=s.logit_rows).flops for s in result.history)


def test_a_text_ends_with_the_block_that_has_the_token_for_it():
    model = tiny(eos_token_ids=(2,))
    results = [diffuse(model, [1], max_tokens=15, block_size=4, sampler=Confidence(4), seed=s) for s in range(20)]
    stopped = [f for f in results if f.finish_reason == "stop"]
    assert stopped and any(f.passes < 15 for f in stopped)
    for f in results:
        assert 2 not in f.token_ids
        assert f.finish_reason == "stop" or len(f.token_ids) == 15


def test_temperature_0_takes_the_likeliest_whatever_the_seed():
    texts = {diffuse(MODEL, [1], max_tokens=8, temperature=0, seed=s).token_ids for s in range(4)}
    assert len(texts) == 1
    assert len({diffuse(MODEL, [1], max_tokens=8, seed=s).token_ids for s in range(8)}) > 1


def test_a_cache_refuses_what_is_not_its_canvas_and_stays_as_it_was():
    kv = CanvasKV(MODEL.config, 4, 6)
    MODEL.decoder(Batch.of([[1, 2, 3]]), kv)
    for batch, message in (
        (Batch.of([[1]], first_positions=[2]), "starts at 2"),
        (Batch.of([[1]], first_positions=[3], sequences=["other"]), "of one canvas"),
        (Batch.of([[1] * 4], first_positions=[3]), "room for 6"),
    ):
        with pytest.raises(WorkbenchError, match=message):
            kv.begin(batch)
        assert kv.lengths == {0: 3}
    with pytest.raises(WorkbenchError, match="cannot be cut to 4"):
        kv.truncate(0, 4)
    assert kv.bytes_in_use == 2 * 2 * 8 * 3 * 4 and kv.bytes_reserved == 2 * kv.bytes_in_use
    kv.release(0)
    assert kv.lengths == {}


# -- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1"),
        ({"max_tokens": 24, "block_size": 4}, r"\(7 blocks of 4\) are more than the context of 24.*23 at most"),
        ({"prompt": [1] * 24}, "the prompt has 24 tokens"),
        ({"block_size": 9}, "trained on blocks of 2, 3, 4, 8 tokens; blocks of 9"),
        ({"block_size": 0}, "block_size must be a whole number of at least 1"),
        ({"temperature": -1}, "temperature must be a number from 0"),
        ({"temperature": float("nan")}, "temperature must be a number from 0"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 2**64}, r"seed must be below 2\*\*63"),
        ({"cached": 1}, "cached must be True or False"),
        ({"sampler": "confidence"}, "make_sampler"),
        ({"prompt": [1, MASK]}, "not the mask"),
        ({"prompt": [1, 99]}, "whole numbers from 0 to 4"),
        ({"prompt": "text"}, "no tokenizer"),
        ({"prompt": 7}, "a text or a list"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_computed(settings, message):
    seen = []
    with pytest.raises(WorkbenchError, match=message):
        diffuse(MODEL, **{"prompt": [1], "max_tokens": 4, "watch": seen.append, **settings})
    assert not seen


@pytest.mark.parametrize(("temperature", "like"), [(1e-40, 0.0), (5e-324, 0.0), (1e-30, 0.0), (1e308, 1e30)])
def test_extreme_temperatures_are_their_limits(temperature, like):
    texts = [diffuse(MODEL, [1, 2], max_tokens=9, temperature=t, seed=3).token_ids for t in (temperature, like)]
    assert texts[0] == texts[1]


def test_more_passes_than_any_number_can_count_are_one_a_token():
    assert diffuse(MODEL, [1], max_tokens=7, sampler=Confidence(10**20)).passes == 7


@pytest.mark.parametrize("sampler", [Uniform(2), Confidence(2), EntropyBound(1.0), Remasking(2)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_gives_no_numbers_is_named_and_not_its_sampler(sampler, temperature):
    broken = tiny()
    with torch.no_grad():
        next(broken.decoder.parameters()).fill_(float("nan"))
    with pytest.raises(WorkbenchError, match="gave NaN logits"):
        diffuse(broken, [1], max_tokens=4, sampler=sampler, temperature=temperature)
    if not sampler.remasks:
        with pytest.raises(WorkbenchError, match="gave NaN logits"):
            score(broken, ROWS, 4, sampler)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(0), "passes must be a whole number of at least 1"),
        (lambda: Confidence(1.5), "passes must be"),
        (lambda: EntropyBound(-0.1), "nats from 0"),
        (lambda: EntropyBound(float("inf")), "nats from 0"),
        (lambda: Remasking(2, 1.5), "share must be"),
        (lambda: make_sampler("confident"), "did you mean 'confidence'"),
        (lambda: diffuse(MODEL.decoder, [1]), "needs a diffusion model"),
        (lambda: diffuse(tiny("masked"), [1], max_tokens=4, block_size=4), "leave block_size out"),
        (lambda: score(MODEL, ROWS, 4, Remasking(2)), "masks tokens again"),
        (lambda: score(MODEL, ROWS, 5, Uniform(2)), "do not make up 12"),
        (lambda: score(MODEL, ROWS, 4, Uniform(2), seed=2**64), "seed must be below"),
        (lambda: bound_of(MODEL, ROWS, 4, draws=0), "draws must be"),
        (lambda: bound_of(MODEL, ROWS, 4, seed=2**64), "seed must be below"),
        (lambda: bound_of(MODEL, ROWS.repeat(1, 3), 4), "longer than the context"),
        (lambda: train_toy(bracket_words(8), seed=2**64), "seed must be below"),
        (lambda: tiny(sliding_window=4), "this shape has a sliding window"),
        (
            lambda: tiny(mixers=("mamba2", "attention"), state_shape=StateShape(inner_size=16)),
            "has layers that keep a state",
        ),
        (lambda: DiffusionModel(MODEL.decoder, "blocks", MASK, (4,)), "did you mean 'block'"),
        (lambda: DiffusionModel(MODEL.decoder, "block", 5, (4,)), "mask_token must be"),
        (lambda: DiffusionModel(MODEL.decoder, "block", MASK, (25,)), "block_sizes must be"),
        (lambda: pass_costs(MODEL.config, rows=4, logit_rows=5), "logit_rows must be"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(WorkbenchError, match=message):
        make()


# -- files -----------------------------------------------------------------------------------------------------


def test_a_saved_model_comes_back_and_a_damaged_one_is_named(tmp_path):
    save_diffusion(MODEL, tmp_path / "m", dtype=torch.float32)
    loaded = load_diffusion(tmp_path / "m")
    assert (loaded.kind, loaded.mask_token, loaded.block_sizes) == ("block", MASK, (2, 3, 4, 8))
    same = {"max_tokens": 6, "seed": 1}
    assert diffuse(loaded, [1], **same).token_ids == diffuse(MODEL, [1], **same).token_ids
    file = tmp_path / "m" / "diffusion.json"
    whole = json.loads(file.read_text())
    for key, value in (("kind", "blocky"), ("mask_token", "4"), ("block_sizes", 4), ("version", 2), ("extra", 1)):
        file.write_text(json.dumps({**whole, key: value}))
        with pytest.raises(WorkbenchError, match=key):
            load_diffusion(tmp_path / "m")
    file.write_text(json.dumps(whole))
    (tmp_path / "m" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(WorkbenchError, match="damaged"):
        load_diffusion(tmp_path / "m")
    with pytest.raises(WorkbenchError, match="unknown diffusion model"):
        load_diffusion("stdlib-3m-block-difusion")


# -- training ----------------------------------------------------------------------------------------------------


def small_recipe(**other) -> DiffusionRecipe:
    config = ModelConfig(
        family="llama",
        vocab_size=4096,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=16,
        context_length=32,
        tie_embeddings=True,
    )
    sizes = {"steps": 4, "sequences_per_step": 2, "sequence_length": 32, "text_length": 16, "checkpoint_every": 2}
    return DiffusionRecipe("small", "diffusion", config, **{**sizes, "block_sizes": (4, 8), **other})


@pytest.mark.parametrize("kind", ["block", "masked"])
def test_an_interrupted_run_ends_as_one_that_was_not(tmp_path, kind, monkeypatch):
    some = held_out_files()[:1]
    monkeypatch.setattr("workbench.models.training.training_files", lambda: some)
    monkeypatch.setattr("workbench.models.evaluation.held_out_files", lambda: some)
    recipe, quiet = small_recipe(kind=kind), {"report": lambda line: None}
    whole = train_diffusion("small", tmp_path / "whole", recipe=recipe, **quiet)
    train_diffusion("small", tmp_path / "two", recipe=recipe, stop_at_step=2, **quiet)
    resumed = train_diffusion("small", tmp_path / "two", recipe=recipe, **quiet)
    for a, b in zip(whole.decoder.parameters(), resumed.decoder.parameters()):
        assert torch.equal(a, b)
    card = json.loads((tmp_path / "two" / "card.json").read_text())
    assert card["steps"] == 4 and card["kind"] == kind and not (tmp_path / "two" / "state").exists()
    bound = next(iter(card["held_out"].values()))
    assert 7 < bound["nats_per_token"] < 10 and bound["standard_error"] > 0
    assert load_diffusion(tmp_path / "two").block_sizes == (4, 8)


def test_the_twin_and_the_shipped_recipes_share_their_shape():
    from workbench.models.recipes import RECIPES

    for recipe in DIFFUSION_RECIPES.values():
        assert recipe.start is not None and recipe.config == RECIPES[recipe.start].config
        length = recipe.text_length if recipe.kind == "block" else recipe.sequence_length
        assert all(length % size == 0 for size in recipe.block_sizes)
    with pytest.raises(WorkbenchError, match="unknown recipe of diffusion"):
        train_diffusion("stdlib-3m-blocks", None)


# -- Diffusion-LM ------------------------------------------------------------------------------------------------


def test_a_small_diffusion_lm_writes_balanced_brackets():
    words = bracket_words(8)
    assert len(words) == 14 and all(map(balanced, words)) and not balanced("())(()()")
    model = train_toy(words, steps=300)
    seen: list[int] = []
    written = model.write(300, watch=lambda step, texts: seen.append(step))
    share = sum(map(balanced, written)) / 300
    assert share > 0.5, f"{share:.0%} of what it writes; by chance {14 / 256:.0%}"
    assert len(set(written) & set(words)) >= 12, "and it is not one word again and again"
    assert seen == list(range(40, 0, -1))


def test_rounding_gives_back_what_was_embedded_and_a_guess_of_noise_is_no_word_yet():
    model = DiffusionLM(ToyShape())
    with torch.no_grad():
        model.embed.weight.copy_(torch.eye(2, 4))
    ids = torch.randint(0, 2, (5, 8), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.round(model.embed(ids)), ids)
    noisy = model.noised(model.embed(ids), torch.full((5,), model.shape.steps), torch.Generator().manual_seed(1))
    assert (model.round(noisy) == ids).float().mean() < 0.8
    for word, message in (("(()", "8 letters"), ("[[[[]]]]", "letters of")):
        with pytest.raises(WorkbenchError, match=message):
            train_toy([word])
    with pytest.raises(WorkbenchError, match="even length"):
        bracket_words(7)
