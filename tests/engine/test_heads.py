"""Draft heads: they learn the target's distribution, come back from files as they were, and draft without changing that
distribution."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math

import pytest
import torch
from conftest import random_decoder, tiny_config
from safetensors.torch import load_file, save_file

from workbench.cli import main
from workbench.decoding import SamplingSettings
from workbench.decoding.draws import BestDraws, RandomDraws
from workbench.decoding.sampling import TokenDistribution
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kv import Contiguous
from workbench.models import Batch, head_losses, head_training, load, prepare, training
from workbench.models.checkpoints import ZOO
from workbench.models.corpus import held_out_files, training_files
from workbench.models.fast_heads import FastEagle, FastMedusa
from workbench.models.head_losses import (
    LOSSES,
    acceptance_by_depth,
    distribution_loss,
    eagle_guesses,
    eagle_loss,
    guesses_by_depth,
    medusa_loss,
    rank_shares,
    unrolled_mask,
)
from workbench.models.head_recipes import HEAD_RECIPES, HeadRecipe
from workbench.models.head_training import HiddenStateStore, held_out_rows, make_optimizers, train_heads
from workbench.models.heads import RANKS, EagleHead, MedusaConfig, MedusaHeads, heads_names, load_heads, save_heads
from workbench.models.training import EpochSampler, TrainingAttention, rows_batch
from workbench.speculation import Ask
from workbench.speculation.drafts.eagle import EagleDraft
from workbench.speculation.drafts.first_of import FirstOf
from workbench.speculation.drafts.lookup import PromptLookupDraft
from workbench.speculation.drafts.medusa import MedusaDraft, best_paths, check_paths
from workbench.speculation.rule import verify
from workbench.speculation.theory import enumerate_outcomes

V, D = 50, 32
SHARES = [[round(0.4 / (rank + 1) ** 2, 4) for rank in range(RANKS)]] * 3


def tiny_target(**changes):
    return random_decoder(tiny_config(vocab_size=V, **changes), name="tiny")


def randomized(heads, seed: int):
    """Every weight random, so that all of them matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("norm.weight")
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + is_norm)
    return heads.eval().requires_grad_(False)


def tiny_medusa(target, count: int = 3, seed: int = 3) -> MedusaHeads:
    config = MedusaConfig(target.config.hidden_size, target.config.vocab_size, count)
    heads = randomized(MedusaHeads(config, target=target.name, name="tiny-medusa"), seed)
    heads.shares = SHARES[:count]
    return heads


def tiny_eagle(target, seed: int = 4) -> EagleHead:
    config = dataclasses.replace(target.config, num_layers=1)
    return randomized(EagleHead(config, target=target.name, name="tiny-eagle"), seed)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def text():
    """[2, 20] tokens."""
    return torch.randint(0, V, (2, 20), generator=torch.Generator().manual_seed(0))


def hidden_states_of(target, rows: torch.Tensor) -> torch.Tensor:
    return target.hidden(rows_batch(rows), TrainingAttention(target.config)).unflatten(0, rows.shape)


# -- what is learned -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text_share", [0.0, 0.25])
def test_the_loss_and_its_gradient_are_those_of_the_plain_cross_entropy(monkeypatch, text_share):
    monkeypatch.setattr(head_losses, "CHUNK", 3)  # several chunks, the last one short
    torch.manual_seed(0)
    guesses, hidden_states = torch.randn(2, 7, 8, requires_grad=True), torch.randn(7, 8)
    head, tokens = 0.5 * torch.randn(11, 8), torch.randint(0, 11, (7,))
    weights = torch.tensor([1.0, 2.0])
    (distribution_loss(guesses, hidden_states, head, tokens, text_share) * weights).sum().backward()
    found, guesses.grad = guesses.grad, None
    came = torch.nn.functional.one_hot(tokens, 11).float()
    wanted = (1 - text_share) * (hidden_states @ head.T).softmax(-1) + text_share * came
    plain = torch.stack([-(wanted * (g @ head.T).log_softmax(-1)).sum(-1).mean() for g in guesses])
    (plain * weights).sum().backward()
    assert torch.allclose(distribution_loss(guesses, hidden_states, head, tokens, text_share), plain, rtol=0.02)
    assert torch.allclose(found, guesses.grad, atol=0.02 * float(guesses.grad.abs().max()))


def captured(monkeypatch) -> list:
    """What the losses hand to distribution_loss."""
    asked = []

    def loss(guesses, hidden_states, head, tokens, text_share=0.0):
        asked.append((guesses, hidden_states, tokens))
        return guesses.sum(dim=(1, 2))

    monkeypatch.setattr(head_losses, "distribution_loss", loss)
    return asked


def test_each_medusa_head_learns_the_hidden_state_that_many_steps_on(target, text, monkeypatch):
    asked = captured(monkeypatch)
    heads = MedusaHeads(MedusaConfig(D, V, 3), target="tiny")
    heads.initialize(target, 0)
    hidden_states = torch.randn(2, 20, D).bfloat16().float()
    medusa_loss(heads, text, hidden_states, target, HEAD_RECIPES["stdlib-10m-medusa"])
    [(guesses, wanted, came)] = asked
    places = [(row, j) for row in range(2) for j in range(3, 19)]
    assert torch.equal(wanted, torch.stack([hidden_states[row, j] for row, j in places]))
    assert came.tolist() == [int(text[row, j + 1]) for row, j in places]
    for k in range(3):  # as they begin, a guess is 0.3 times the hidden state it was made from
        made_from = torch.stack([hidden_states[row, j - 1 - k] for row, j in places])
        assert torch.allclose(guesses[k].float(), 0.3 * made_from, rtol=0.02, atol=1e-3)
    judged, true = guesses_by_depth(heads, text, hidden_states, target, 3)
    assert torch.equal(true, hidden_states[:, 3:])
    assert torch.allclose(judged[2], 0.3 * hidden_states[:, :-3], atol=1e-6)


def test_rows_guessed_from_guesses_see_what_a_draft_would_have():
    sees = unrolled_mask(5, 3)
    assert sees.shape == (5, 15)
    for row, true, second, own in ((4, [0, 1, 2], [3], [4]), (2, [0], [1], [2]), (0, [], [], [0])):
        assert sees[row].nonzero().flatten().tolist() == [*true, *(5 + c for c in second), *(10 + c for c in own)]


def test_unrolled_training_guesses_what_the_draft_guesses_step_by_step(target, text):
    head = tiny_eagle(target)
    hidden_states = hidden_states_of(target, text)
    trained = eagle_guesses(head, text, hidden_states, target, 3)
    fast = FastEagle(head, target)
    for first in (4, 9):  # row 0 of the text; hidden states 0 … first are true, the rest guessed
        kv = Contiguous(head.config)
        tokens = text[0, 1:].tolist()
        hidden_state = fast(Batch.of([tokens[: first + 1]]), hidden_states[0, : first + 1], kv)[-1]
        assert torch.allclose(hidden_state, trained[0, 0, first], atol=1e-5)
        for step in (1, 2):
            at = first + step
            hidden_state = fast(Batch.of([[tokens[at]]], first_positions=[at]), hidden_state[None], kv)[0]
            assert torch.allclose(hidden_state, trained[step, 0, at], atol=1e-5)


def test_an_eagle_head_learns_the_next_hidden_state_and_the_token_after_it(target, text, monkeypatch):
    asked = captured(monkeypatch)
    recipe = dataclasses.replace(
        HEAD_RECIPES["stdlib-10m-eagle"], unrolled=2, hidden_state_loss=0.0, hidden_state_noise=0.0
    )
    head, hidden_states = tiny_eagle(target), hidden_states_of(target, text)
    eagle_loss(head, text, hidden_states, target, recipe)
    [(guesses, wanted, came)] = asked
    assert torch.equal(wanted, hidden_states[:, 2:19].flatten(0, 1)) and torch.equal(came, text[:, 3:].flatten())
    exact = eagle_guesses(head, text, hidden_states, target, 2)[:, :, 1:18].flatten(1, 2)
    assert torch.allclose(guesses, exact, atol=0.1)  # bfloat16 products
    noisy = dataclasses.replace(recipe, hidden_state_loss=1.0)
    plain = eagle_loss(head, text, hidden_states, target, recipe).item()
    extra = torch.nn.functional.smooth_l1_loss(guesses, wanted.expand_as(guesses)).item()
    assert eagle_loss(head, text, hidden_states, target, noisy).item() == pytest.approx(plain + extra, rel=1e-4)


def test_acceptance_of_heads_that_copy_the_hidden_state_is_that_of_the_hidden_state_before(target, text):
    heads = MedusaHeads(MedusaConfig(D, V, 2), target="tiny")
    heads.initialize(target, 0)
    with torch.no_grad():
        for head in heads.heads:
            head.out.weight.div_(0.3)
    found = acceptance_by_depth(heads, target, text, 2)
    p = target.head(hidden_states_of(target, text)).softmax(-1)
    for depth in (1, 2):
        overlap = torch.minimum(p[:, 2:], p[:, 2 - depth : 20 - depth]).sum(-1).mean()
        agree = (p[:, 2:].argmax(-1) == p[:, 2 - depth : 20 - depth].argmax(-1)).float().mean()
        assert found["overlap"][depth - 1] == pytest.approx(float(overlap), rel=1e-5)
        assert found["agreement"][depth - 1] == pytest.approx(float(agree))
    shares = rank_shares(heads, target, text)
    assert [row[0] for row in shares] == pytest.approx(found["agreement"])
    assert found["positions"] == 2 * 18 and all(sum(row) <= 1 for row in shares)


# -- a run ---------------------------------------------------------------------------------------------------------

TINY = {
    "medusa": HeadRecipe(
        "tiny-medusa",
        "heads",
        MedusaConfig(16, 4096, 2),
        steps=6,
        sequences_per_step=2,
        sequence_length=32,
        warmup_steps=2,
        checkpoint_every=2,
        kind="medusa",
        target="tiny",
    ),
    "eagle": HeadRecipe(
        "tiny-eagle",
        "heads",
        tiny_config(hidden_size=16, intermediate_size=32, head_dim=4, num_layers=1),
        steps=6,
        sequences_per_step=2,
        sequence_length=32,
        warmup_steps=2,
        checkpoint_every=2,
        kind="eagle",
        target="tiny",
        unrolled=2,
        hidden_state_loss=1.0,
        hidden_state_noise=0.1,
    ),
}


@functools.cache
def some_files() -> tuple[list, list]:
    """Two modules to learn from and one to be judged by. Reading the library takes a while."""
    learned = [f for f in training_files() if f.path in ("this.py", "struct.py")]
    return learned, [f for f in held_out_files() if f.path == "bisect.py"]


@pytest.fixture
def small_corpus(monkeypatch) -> None:
    monkeypatch.setattr(training, "training_files", lambda: some_files()[0])
    monkeypatch.setattr(head_training, "held_out_files", lambda: some_files()[1])


@pytest.fixture(scope="module")
def narrow_target():
    config = tiny_config(hidden_size=16, intermediate_size=32, head_dim=4)
    return random_decoder(config, tokenizer=training.shipped_tokenizer())


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_run_stopped_and_resumed_ends_bit_for_bit_like_one_that_was_not(small_corpus, tmp_path, narrow_target, kind):
    narrow_target.name, recipe, said = "tiny", TINY[kind], []
    settings = {"recipe": recipe, "target": narrow_target, "report": said.append}
    train_heads(recipe.name, tmp_path / "whole", hidden_states=tmp_path / "features", **settings)
    train_heads(recipe.name, tmp_path / "parts", stop_at_step=3, **settings)
    assert not (tmp_path / "parts/heads.json").exists()
    trained = train_heads(recipe.name, tmp_path / "parts", **settings)
    assert said[1] == f"{recipe.name}: going on from step 3 of 6"
    whole, parts = (tmp_path / f"{name}/heads.safetensors" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()
    names = ["README.md", "card.json", "heads.json", "heads.safetensors"]
    assert sorted(f.name for f in (tmp_path / "parts").iterdir()) == names
    card = json.loads((tmp_path / "parts/card.json").read_text())
    assert card["held_out"] == acceptance_by_depth(
        load_heads(tmp_path / "parts"),
        narrow_target,
        held_out_rows(narrow_target, 32),
        len(card["held_out"]["overlap"]),
    )
    assert card["parameters"] == trained.num_parameters()
    other = settings | {"recipe": dataclasses.replace(recipe, seed=5)}
    with pytest.raises(WorkbenchError, match="finished model"):
        train_heads(recipe.name, tmp_path / "parts", **other)
    train_heads(recipe.name, tmp_path / "begun", stop_at_step=1, **settings)
    with pytest.raises(WorkbenchError, match="another recipe"):
        train_heads(recipe.name, tmp_path / "begun", **other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_learn_a_text_that_they_read_again_and_again(target, text, kind):
    """What they lose beyond the entropy of the target's own distributions goes down to a third of it."""
    recipe, hidden_states = dataclasses.replace(TINY[kind], hidden_state_loss=0.0), hidden_states_of(target, text)
    heads = tiny_medusa(target) if kind == "medusa" else tiny_eagle(target)
    heads.initialize(target, 0)
    heads.train().requires_grad_(True)
    optimizers, losses = make_optimizers(heads), []
    for _ in range(80):
        loss = LOSSES[kind](heads, text, hidden_states, target, recipe)
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 2e-2
            optimizer.step()
            optimizer.zero_grad()
    first = 3 if kind == "medusa" else 2  # of the hidden states that are guessed
    p = target.head(hidden_states[:, first:19]).softmax(-1)
    entropy = float(-(p * p.log()).sum(-1).mean())
    assert 0 <= losses[-1] - entropy < (losses[0] - entropy) / 3


def test_hidden_states_are_computed_once_and_never_of_other_text(small_corpus, tmp_path, narrow_target, monkeypatch):
    sampler = EpochSampler(TINY["eagle"], narrow_target.tokenizer)
    store, calls = HiddenStateStore(tmp_path, narrow_target, sampler), []
    true_hidden = narrow_target.hidden
    monkeypatch.setattr(narrow_target, "hidden", lambda *args: calls.append(1) or true_hidden(*args))
    rows, first = store.step(1)
    again_rows, again = store.step(1 + sampler.steps_per_pass)  # the next pass
    assert len(calls) == 1 and torch.equal(first, again) and torch.equal(rows, again_rows)
    exact = true_hidden(rows_batch(rows), TrainingAttention(narrow_target.config)).unflatten(0, rows.shape)
    assert torch.allclose(first, exact, atol=0.1)
    other = EpochSampler(dataclasses.replace(TINY["eagle"], seed=1), narrow_target.tokenizer)
    with pytest.raises(WorkbenchError, match="other text"):
        HiddenStateStore(tmp_path, narrow_target, other).step(1)
    (tmp_path / "000001.safetensors").write_bytes(b"short")
    with pytest.raises(WorkbenchError, match="delete it"):
        store.step(1)


def test_the_command_line_trains_heads(monkeypatch, tmp_path, capsys):
    asked = []
    monkeypatch.setattr(head_training, "train_heads", lambda name, out, **more: asked.append((name, more["seed"])))
    assert main(["train", "stdlib-10m-eagle", "--out", str(tmp_path), "--seed", "2"]) == 0
    assert asked == [("stdlib-10m-eagle", 2)]
    assert main(["train", "stdlib-10m-eagel"]) != 0 and "stdlib-10m-eagle" in capsys.readouterr().err
    for given in (["--compile"], ["--steps", "3"]):
        assert main(["train", "stdlib-10m-medusa", *given]) != 0 and given[0] in capsys.readouterr().err
    assert len(asked) == 1


# -- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny_medusa, tiny_eagle])
def test_heads_come_back_as_they_were(target, tmp_path, make):
    heads = make(target)
    save_heads(heads, tmp_path / "there", dtype=torch.float32)
    back = load_heads(tmp_path / "there")
    assert back.config == heads.config and back.target == "tiny" and type(back) is type(heads)
    assert getattr(back, "shares", None) == getattr(heads, "shares", None)
    assert all(torch.equal(a, b) for a, b in zip(heads.parameters(), back.parameters(), strict=True))
    assert not any(parameter.requires_grad for parameter in back.parameters())


def damaged(folder, description: dict | None = None, tensors: dict | None = None):
    """Write a change of heads.json, or of the tensors (None takes one out)."""
    if description:
        values = json.loads((folder / "heads.json").read_text()) | description
        (folder / "heads.json").write_text(json.dumps(values))
    if tensors:
        there = load_file(folder / "heads.safetensors") | tensors
        save_file({n: t for n, t in there.items() if t is not None}, folder / "heads.safetensors")


WIDE = "heads.0.block.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensors": {WIDE: None}}, f"tensor '{WIDE}' is missing; expected shape [32, 32]"),
        ({"tensors": {WIDE: torch.zeros(32, 31).bfloat16()}}, "[32, 31]"),
        ({"tensors": {WIDE: torch.zeros(32, 32)}}, "torch.float32"),
        ({"tensors": {WIDE: torch.full((32, 32), math.nan).bfloat16()}}, "not finite"),
        ({"tensors": {"heads.7.out.weight": torch.zeros(1)}}, "'heads.7.out.weight' has no place"),
        ({"description": {"version": 2}}, "version 2"),
        ({"description": {"kind": "hydra"}}, "unknown kind of heads 'hydra'"),
        ({"description": {"kind": "eagle"}}, "needs family"),
        ({"description": {"target": 7}}, "target must be a str"),
        ({"description": {"config": {"hidden_size": 32, "vocab_size": 50, "num_heads": 10**9}}}, "at most 16"),
        ({"description": {"config": {"hidden_size": "wide", "vocab_size": 50, "num_heads": 1}}}, "'wide'"),
        ({"description": {"shares": [[2.0] * 10] * 3}}, "numbers from 0 to 1"),
        ({"description": {"code": "import os"}}, "'code'"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_refused_by_name(target, tmp_path, change, words):
    save_heads(tiny_medusa(target), tmp_path)
    damaged(tmp_path, **change)
    with pytest.raises(WorkbenchError) as refused:
        load_heads(tmp_path)
    assert words in str(refused.value) and str(tmp_path) in str(refused.value)


def test_missing_and_broken_files_are_refused(target, tmp_path):
    with pytest.raises(WorkbenchError, match="unknown heads 'stdlib-10m-medua'; did you mean 'stdlib-10m-medusa'"):
        load_heads("stdlib-10m-medua")
    with pytest.raises(WorkbenchError, match=r"heads\.json cannot be read"):
        load_heads(tmp_path)
    save_heads(tiny_medusa(target), tmp_path)
    (tmp_path / "heads.safetensors").write_bytes((tmp_path / "heads.safetensors").read_bytes()[:-9])
    with pytest.raises(WorkbenchError, match="cut short"):
        load_heads(tmp_path)
    (tmp_path / "heads.safetensors").unlink()
    with pytest.raises(WorkbenchError, match="incomplete"):
        load_heads(tmp_path)
    (tmp_path / "heads.json").write_text("[" * 100_000)
    with pytest.raises(WorkbenchError, match="cannot be read"):
        load_heads(tmp_path)


@pytest.mark.parametrize("make", [tiny_medusa, tiny_eagle])
def test_heads_of_another_target_are_refused(target, make):
    heads = make(target)
    for other, words in (
        (tiny_target(hidden_size=16, head_dim=4), "hidden_size 32; tiny has 16"),
        (random_decoder(tiny_config(vocab_size=51), name="tiny"), "vocab_size 50; tiny has 51"),
        (random_decoder(tiny_config(vocab_size=V), name="other"), "hidden states of tiny"),
    ):
        for draft in (MedusaDraft, EagleDraft):
            with pytest.raises(WorkbenchError):
                draft(other, heads)
        with pytest.raises(WorkbenchError, match=words):
            heads.check_target(other)
    wrong = EagleDraft if isinstance(heads, MedusaHeads) else MedusaDraft
    with pytest.raises(WorkbenchError, match=f"got {heads.kind}"):
        wrong(target, heads)
    with pytest.raises(WorkbenchError, match="unknown heads 'tiny-"):
        wrong(target)


# -- arranged for inference ----------------------------------------------------------------------------------------


def test_medusa_heads_arranged_for_inference_are_the_same(target):
    heads, hidden_states = tiny_medusa(target), torch.randn(5, D)
    for depth in (1, 3):
        assert torch.allclose(FastMedusa(heads, target)(hidden_states, depth), heads(hidden_states)[:depth], atol=1e-5)


def test_an_eagle_head_arranged_for_inference_is_the_same_in_pieces_and_in_trees(target, text):
    head = tiny_eagle(target)
    hidden_states = hidden_states_of(target, text)[0, :12]
    tokens = text[0, 1:13].tolist()
    whole = head(target.embed(text[0, 1:13]), hidden_states, Batch.of([tokens]), Contiguous(head.config))
    for model in (target, prepare(target)):
        fast, kv, found = FastEagle(head, model), Contiguous(head.config), []
        for a, b in ((0, 5), (5, 6), (6, 12)):
            batch = Batch.of([tokens[a:b]], first_positions=[a])
            found.append(fast(batch, hidden_states[a:b], kv))
        assert torch.allclose(torch.cat(found), whole, atol=1e-5)
    kv.truncate(0, 10)
    pair = Batch.of([[tokens[10], 9, tokens[11]]], first_positions=[10], parents=[[-1, -1, 0]])
    rows = fast(pair, hidden_states[[10, 10, 11]], kv)
    assert torch.allclose(rows[[0, 2]], whole[10:], atol=1e-5) and not torch.allclose(rows[1], whole[10])


# -- trees of ranks ------------------------------------------------------------------------------------------------


def test_the_chosen_paths_are_the_most_probable_tree_there_is():
    shares = [[0.5, 0.3, 0.1], [0.6, 0.2, 0.1], [0.4, 0.1, 0.0]]
    product = {
        ranks: math.prod(shares[k][r] for k, r in enumerate(ranks))
        for depth in (1, 2, 3)
        for ranks in itertools.product(range(3), repeat=depth)
    }
    for nodes in (1, 2, 5, 9, 14):
        paths = best_paths(shares, nodes)
        best = sorted(product.values(), reverse=True)[:nodes]
        assert sorted((product[path] for path in paths), reverse=True) == pytest.approx(best)
        assert len(check_paths(paths, 3)) == nodes


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([], "a tree is"),
        ([()], "a tree is"),
        ([(0,), (10,)], "a tree is"),
        ([(0,), (True,)], "a tree is"),
        ([(0, 0, 0, 0)], "3 heads"),
        ([(0, 0)], r"not \(0,\)"),
        ([(0,), (0, 1)], r"not \(0, 0\)"),
    ],
)
def test_paths_that_are_no_tree_are_refused(target, paths, words):
    with pytest.raises(WorkbenchError, match=words):
        MedusaDraft(target, tiny_medusa(target), tree=paths)


def test_settings_of_drafts_are_refused(target):
    heads = tiny_medusa(target)
    with pytest.raises(WorkbenchError, match="did you mean 'sparse'"):
        MedusaDraft(target, heads, tree="sparce")
    with pytest.raises(WorkbenchError, match="nodes"):
        MedusaDraft(target, heads, nodes=0)
    heads.shares = None
    with pytest.raises(WorkbenchError, match="without measured shares"):
        MedusaDraft(target, heads)
    for branching in ((), (2, 0)):
        with pytest.raises(WorkbenchError, match="branching"):
            EagleDraft(target, tiny_eagle(target), branching=branching)


# -- drafting ------------------------------------------------------------------------------------------------------


def all_drafts(target, *, branching=(3, 2, 1), **sizes) -> list:
    """Heads in the target's dtype, as all that is certain is compared to the bit."""
    medusa, eagle = (make(target).to(target.dtype) for make in (tiny_medusa, tiny_eagle))
    return [
        MedusaDraft(target, medusa),
        MedusaDraft(target, medusa, tree="confident", nodes=7),
        MedusaDraft(target, medusa, tree="chain"),
        MedusaDraft(target, medusa, tree=[(0,), (1,), (0, 0), (1, 0), (1, 1)]),
        EagleDraft(target, eagle, **sizes),
        EagleDraft(target, eagle, branching=branching, **sizes),
    ]


@pytest.mark.parametrize("index", range(6))
def test_greedy_tokens_are_those_of_plain_decoding(index):
    target = tiny_target().double()
    draft, prompt = all_drafts(target)[index], list(range(1, 12))
    settings = {"max_new_tokens": 30, "temperature": 0.0, "stop_token_ids": ()}
    plain = generate(target, prompt, **settings).tokens
    for K in (1, 2, 5):
        found = generate(target, prompt, draft=draft, draft_length=K, **settings)
        assert found.tokens == plain and sum(found.speculation.drafted) > 0


class _Floats:
    """Enumerated draws, told plain numbers."""

    def __init__(self, draws) -> None:
        self._draws = draws

    def accept(self, probability) -> bool:
        return self._draws.accept(float(probability))

    def choose(self, row) -> int:
        return self._draws.choose(row.tolist())


class _Distribution:
    """Temperature 1, no filter."""

    greedy = False

    def probabilities(self, logits, text_of):
        return logits.double().softmax(-1)

    confidences = probabilities


@pytest.mark.parametrize("index", range(6))
def test_what_is_written_has_the_distribution_of_the_target_by_enumeration(index):
    """One round from two levels of drafts, every draw of draft and rule enumerated; what it leaves open, the target
    writes."""
    config = tiny_config(vocab_size=4, hidden_size=8, head_dim=4, num_heads=2)
    target, distribution, text = random_decoder(config, name="tiny").double(), _Distribution(), [1, 2, 0, 3]
    draft = all_drafts(target, branching=(2, 1))[index]
    hidden_states = hidden_states_of(target, torch.tensor([text]))[0, :-1]

    def p_after(written: tuple[int, ...]) -> torch.Tensor:
        rows = target(Batch.of([[*text, *written]]), TrainingAttention(config))
        return rows[-1].double().softmax(-1)

    p = {t: p_after(t) for length in range(3) for t in itertools.product(range(4), repeat=length)}

    def run(draws) -> tuple[int, ...]:
        draws = _Floats(draws)
        [proposal] = draft.propose([Ask("s", text, 2, 8, distribution, draws, lambda confidence: True, hidden_states)])
        draft.release("s")
        nodes = [(), *(tuple(proposal.tokens[n] for n in proposal.path_to(i)) for i in range(len(proposal)))]
        verdict = verify(proposal, [p[node] for node in nodes], draws)
        return (*(proposal.tokens[n] for n in verdict.path), verdict.token)

    outcomes = enumerate_outcomes(run)
    assert max(map(len, outcomes)) == 3  # both drafted tokens accepted, and a bonus
    for written in itertools.product(range(4), repeat=3):
        shares = [float(p[written[:i]][token]) for i, token in enumerate(written)]
        found = sum(float(outcomes.get(written[:n], 0)) * math.prod(shares[n:]) for n in (1, 2, 3))
        assert found == pytest.approx(math.prod(shares), rel=1e-9)


@pytest.mark.parametrize("index", range(6))
def test_texts_drafted_for_together_get_what_each_gets_alone(index):
    target = tiny_target().double()
    texts = {"a": [3, 1, 4, 1, 5, 9, 2, 6], "b": [2, 7, 1, 8]}

    def asks(names):
        return [
            Ask(
                name,
                text := texts[name],
                3,
                12,
                _Distribution(),
                RandomDraws(torch.Generator().manual_seed(len(text))),
                lambda confidence: True,
                hidden_states_of(target, torch.tensor([text]))[0, :-1],
            )
            for name in names
        ]

    together = all_drafts(target, max_sequences=2)[index]
    for proposal, name in zip(together.propose(asks("ab")), "ab"):
        [alone] = all_drafts(target)[index].propose(asks(name))
        assert proposal.tokens == alone.tokens and proposal.parents == alone.parents and len(proposal) > 2
        assert all(
            torch.allclose(a, b, atol=1e-6) for a, b in zip(proposal.distributions, alone.distributions, strict=True)
        )


@pytest.mark.parametrize("branching", [None, (2, 2, 1)])
def test_an_eagle_draft_draws_by_the_hidden_state_guessed_along_the_branch(branching):
    target = tiny_target().double()
    head, text = tiny_eagle(target).double(), [3, 1, 4, 1, 5, 9, 2, 6]
    hidden_states = hidden_states_of(target, torch.tensor([text]))[0, :-1]
    draws = RandomDraws(torch.Generator().manual_seed(0))
    ask = Ask("s", text, 3, 12, _Distribution(), draws, lambda confidence: True, hidden_states)
    [proposal] = EagleDraft(target, head, branching=branching).propose([ask])
    assert len(proposal) == (3 if branching is None else 10)
    for node, parent in enumerate(proposal.parents):
        if node != proposal.children(parent)[0]:
            continue  # drawn without its siblings: `rule.without`
        rows, tokens = hidden_states, text[1:]
        for drafted in (*proposal.path_to(parent), None):
            embeddings = target.embed(torch.tensor(tokens))
            guess = head(embeddings, rows, Batch.of([tokens]), Contiguous(head.config, dtype=torch.float64))[-1:]
            if drafted is not None:
                rows, tokens = torch.cat((rows, guess)), [*tokens, proposal.tokens[drafted]]
        assert torch.allclose(proposal.distributions[node], target.head(guess)[0].softmax(-1), atol=1e-9)


def test_an_eagle_draft_reads_each_committed_token_once_and_forgets_what_it_drafted():
    target = tiny_target()
    draft = EagleDraft(target, tiny_eagle(target))
    text = torch.randint(0, V, (1, 20), generator=torch.Generator().manual_seed(1))
    hidden_states = hidden_states_of(target, text)[0]

    def ask(known: int, length: int, **other) -> Ask:
        settings = {"limit": 3, "nodes": 8} | other
        return Ask(
            "s",
            text[0, :length].tolist(),
            distribution=_Distribution(),
            draws=RandomDraws(torch.Generator().manual_seed(length)),
            go_on=lambda confidence: True,
            hidden_states=hidden_states[known : length - 1],
            **settings,
        )

    draft.propose([ask(0, 8)])
    assert (draft.model_calls, draft.rows_processed) == (3, 7 + 2)
    [proposal] = draft.propose([ask(7, 11)])
    assert (draft.model_calls, draft.rows_processed) == (6, 9 + 3 + 2)
    assert draft._kv.lengths == {"s": 10}
    fresh = EagleDraft(target, draft.head)
    [same] = fresh.propose([ask(0, 11)])
    assert proposal.tokens == same.tokens
    assert len(draft.propose([ask(10, 12, limit=9, nodes=2)])[0]) == 2
    draft.release("s")
    assert not draft._kv.lengths and not draft._guesses
    draft.release("never seen")
    full = EagleDraft(target, draft.head, max_tokens=12)
    assert [len(full.propose([ask(0, 11)])[0]), len(full.propose([ask(10, 12)])[0])] == [1, 0]


def test_heads_say_which_tokens_they_would_have_guessed():
    """Each as a proposal of one token from the text up to there, and drafting goes on as if nobody had asked."""
    target = tiny_target()
    text = torch.randint(0, V, (1, 30), generator=torch.Generator().manual_seed(1))
    hidden_states = hidden_states_of(target, text)[0]

    def ask(known: int, length: int) -> Ask:
        tokens = text[0, :length].tolist()
        distribution = TokenDistribution(SamplingSettings(temperature=0.0), tokens)
        return Ask(
            "s", tokens, 1, 8, distribution, BestDraws(), lambda confidence: True, hidden_states[known : length - 1]
        )

    for make in (
        lambda: EagleDraft(target, tiny_eagle(target)),
        lambda: MedusaDraft(target, tiny_medusa(target), tree="chain"),
    ):
        draft = make()
        heard = draft.listen(ask(0, 24), 9)
        for at, right in zip(range(15, 24), heard, strict=True):
            [proposal] = make().propose([ask(0, at)])
            assert right == (proposal.tokens[0] == text[0, at])
        assert draft.propose([ask(23, 27)])[0].tokens == make().propose([ask(0, 27)])[0].tokens
        draft.release("s")
        assert draft.listen(ask(0, 2), 9) == []


def test_of_two_drafts_the_last_is_heard_and_neither_misses_a_hidden_state():
    target = tiny_target()
    text = torch.randint(0, V, (1, 30), generator=torch.Generator().manual_seed(1))
    hidden_states = hidden_states_of(target, text)[0]
    eagle = tiny_eagle(target)

    def ask(known: int, length: int) -> Ask:
        tokens = text[0, :length].tolist()
        distribution = TokenDistribution(SamplingSettings(temperature=0.0), tokens)
        return Ask(
            "s", tokens, 1, 8, distribution, BestDraws(), lambda confidence: True, hidden_states[known : length - 1]
        )

    both = FirstOf(PromptLookupDraft(target, min_ngram=40, max_ngram=40), EagleDraft(target, eagle))
    assert both.listen(ask(0, 24), 9) == EagleDraft(target, eagle).listen(ask(0, 24), 9)
    assert both.model_calls == 1
    assert both.propose([ask(23, 27)])[0].tokens == EagleDraft(target, eagle).propose([ask(0, 27)])[0].tokens
    silent = FirstOf(EagleDraft(target, eagle), PromptLookupDraft(target, min_ngram=1))
    silent.listen(ask(0, 24), 9)  # the lookup answers, and EAGLE reads the hidden states when it is asked
    assert silent.propose([ask(23, 27)])[0].tokens == EagleDraft(target, eagle).propose([ask(0, 27)])[0].tokens
    both.release("s")
    assert not both._hidden_states and not both._authors


def test_picked_tokens_are_kept_as_often_as_the_target_writes_them(target):
    draft = MedusaDraft(target, tiny_medusa(target), tree=[(0,), (1,), (2,)])
    draws = RandomDraws(torch.Generator().manual_seed(0))
    ask = Ask("s", [1, 2, 3], 1, 8, _Distribution(), draws, lambda confidence: True, torch.randn(2, D))
    [proposal] = draft.propose([ask])
    p = torch.rand(V, dtype=torch.float64).softmax(-1)
    distribution = enumerate_outcomes(lambda draws: verify(proposal, [p] * 4, _Floats(draws)).path)
    for node, token in enumerate(proposal.tokens):
        assert float(distribution[(node,)]) == pytest.approx(float(p[token]))


# -- the heads that ship -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_shipped_heads_are_small_and_as_good_as_their_cards_say():
    assert heads_names() == sorted(HEAD_RECIPES)
    target, size = load("stdlib-10m"), 0
    for name, recipe in HEAD_RECIPES.items():
        heads, card = load_heads(name), json.loads((ZOO / name / "card.json").read_text())
        size += sum(f.stat().st_size for f in (ZOO / name).iterdir())
        assert heads.config == recipe.config and card["steps"] == recipe.steps and card["seed"] == recipe.seed
        rows = held_out_rows(target, 256, 6)
        found = acceptance_by_depth(heads, target, rows)
        for kind in ("overlap", "agreement"):
            assert found[kind] == pytest.approx(card["held_out"][kind], abs=0.06)
    assert size < 5.5e6
