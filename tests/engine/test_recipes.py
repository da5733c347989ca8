"""Training runs: resumable to the bit, never on held-out text, and they end in a model that loads."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import random_decoder, tiny_config
from safetensors.torch import save_file

from workbench.errors import WorkbenchError
from workbench.kv import Recompute
from workbench.models import Batch, corpus, load, recipes, training
from workbench.models.corpus import HELD_OUT, SourceFile, held_out_files, token_stream, training_files
from workbench.models.decoder import Decoder
from workbench.models.recipes import RECIPES, Recipe
from workbench.models.state_shape import StateShape
from workbench.models.training import EpochSampler, TrainingAttention, train

TINY = Recipe(
    "tiny",
    "target",
    tiny_config(hidden_size=16, intermediate_size=32, head_dim=4, context_length=64),
    steps=6,
    sequences_per_step=2,
    sequence_length=32,
    warmup_steps=2,
    checkpoint_every=2,
)


@pytest.fixture
def small_corpus(monkeypatch) -> None:
    """Three small modules to learn from and one to be judged by."""
    files = {f.path: f for f in training_files()}
    learned = [files[name] for name in ("this.py", "struct.py", "types.py")]
    monkeypatch.setattr(training, "training_files", lambda: learned)
    monkeypatch.setattr(training, "held_out_files", lambda: [f for f in held_out_files() if f.path == "bisect.py"])


def run(out: Path, recipe: Recipe = TINY, **options) -> list[str]:
    said: list[str] = []
    train(recipe.name, out, recipe=recipe, report=said.append, **options)
    return said


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("stop_at", [[1], [2], [3, 5]])
def test_a_run_stopped_and_resumed_ends_bit_for_bit_like_one_that_was_not(small_corpus, tmp_path, stop_at):
    run(tmp_path / "whole")
    for step in stop_at:
        run(tmp_path / "parts", stop_at_step=step)
        assert not (tmp_path / "parts" / "model.safetensors").exists()
    said = run(tmp_path / "parts")
    assert said[0] == f"tiny: going on from step {stop_at[-1]} of 6"
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_ctrl_c_saves_the_step_it_interrupted(small_corpus, tmp_path, monkeypatch):
    run(tmp_path / "whole")
    true_loss, calls = training.next_token_loss, []

    def loss(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return true_loss(*arguments)

    monkeypatch.setattr(training, "next_token_loss", loss)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts")
    assert json.loads((tmp_path / "parts/state/progress.json").read_text())["step"] == 3
    run(tmp_path / "parts")
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_a_crash_while_the_checkpoint_is_swapped_costs_nothing(small_corpus, tmp_path):
    """state was renamed to state.old and the new one not yet in its place."""
    run(tmp_path, stop_at_step=3)
    (tmp_path / "state").rename(tmp_path / "state.old")
    assert run(tmp_path)[0] == "tiny: going on from step 3 of 6"


def test_the_model_and_its_card_are_what_a_run_leaves(small_corpus, tmp_path):
    run(tmp_path)
    assert not (tmp_path / "state").exists()
    model, card = load(tmp_path), json.loads((tmp_path / "card.json").read_text())
    assert model.config == TINY.config
    assert model.dtype == torch.bfloat16
    assert model(Batch.of([model.tokenizer.encode("import")]), Recompute(model.config)).isfinite().all()
    assert card["parameters"] == model.num_parameters()
    assert card["tokens_seen"] == 6 * 2 * 32
    assert [step for step, _ in card["training_loss_by_step"]] == [2, 4, 6]
    assert all(4 < loss < 10 for _, loss in card["training_loss_by_step"])
    assert math.isclose(card["passes"], 6 * 64 / card["corpus_tokens"], abs_tol=0.01)
    for key in ("corpus", "optimizer", "schedule", "seed", "hardware", "hours", "torch", "precision"):
        assert card[key] not in (None, "")
    page = (tmp_path / "README.md").read_text()
    assert page.startswith("---\nlicense: mit\n")
    assert f"{card['held_out']['nats_per_token']:.4f} nats per token" in page


def test_the_card_judges_the_weights_that_ship(small_corpus, tmp_path):
    """Rounded to bfloat16, loaded from the file, and not the float32 ones the run ended with."""
    run(tmp_path)
    shipped = load(tmp_path, dtype="float32")
    judged = training.held_out_loss(shipped, shipped.tokenizer)
    card = json.loads((tmp_path / "card.json").read_text())
    assert judged["nats_per_token"] == pytest.approx(card["held_out"]["nats_per_token"], abs=1e-6)


def test_training_lowers_the_held_out_loss(small_corpus, tmp_path):
    tokenizer = training.shipped_tokenizer()
    longer = dataclasses.replace(TINY, steps=30, peak_learning_rate=2e-2)
    run(tmp_path, longer)
    trained = json.loads((tmp_path / "card.json").read_text())["held_out"]["nats_per_token"]
    untrained = training.Decoder(TINY.config)
    training.initialize(untrained, 0)
    assert trained < training.held_out_loss(untrained, tokenizer)["nats_per_token"] - 0.5


def test_a_draft_learns_its_teachers_whole_distribution(small_corpus, tmp_path):
    run(tmp_path / "teacher")
    pupil = dataclasses.replace(TINY, name="pupil", role="draft", teacher=str(tmp_path / "teacher"))
    run(tmp_path / "pupil", pupil)
    assert json.loads((tmp_path / "pupil/card.json").read_text())["teacher"] == str(tmp_path / "teacher")
    assert weights(tmp_path / "pupil") != weights(tmp_path / "teacher")


def test_the_loss_against_a_teacher_is_its_entropy_when_the_two_are_equal(tiny_model):
    rows = torch.arange(1, 17).view(2, 8)
    loss = training.next_token_loss(tiny_model, rows, TrainingAttention(tiny_model.config), tiny_model)
    log_p = tiny_model(training.rows_batch(rows), TrainingAttention(tiny_model.config)).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1).view(2, 8)[:, :-1].mean()
    assert loss.item() == pytest.approx(entropy.item(), rel=0.02)  # the loss is taken in bfloat16


@pytest.mark.parametrize("name", recipes.CACHE_VARIANTS)
def test_training_attention_is_the_attention_of_every_other_kv(name):
    """Of the shapes that are trained, with a window that a short text reaches."""
    config = recipes.CACHE_VARIANTS[name]
    config = dataclasses.replace(config, sliding_window=config.sliding_window and 5, vocab_size=64)
    model = random_decoder(config)
    rows = torch.randint(0, 64, (3, 16), generator=torch.Generator().manual_seed(0))
    whole = model(training.rows_batch(rows), TrainingAttention(config))
    usual = model(Batch.of(rows.tolist(), logits="all"), Recompute(config, attention="eager"))
    assert (whole - usual).abs().max() <= 1e-5 * usual.abs().max()


def test_the_cache_variants_differ_in_what_they_remember_and_hardly_in_size():
    sizes = {name: config.num_parameters() for name, config in recipes.CACHE_VARIANTS.items()}
    assert max(sizes.values()) < 1.01 * min(sizes.values())
    remembered = {
        name.removeprefix("stdlib-3m-"): config.kv_values_per_token() / config.num_layers
        for name, config in recipes.CACHE_VARIANTS.items()
    }
    assert remembered == {"mha": 384, "gqa": 128, "mqa": 64, "mla": 64, "hybrid": 384, "shared": 192}


def test_the_state_variants_differ_in_how_they_mix_tokens_and_hardly_in_size():
    """One attention in 8 and one in 4 are exact, so all have eight layers, their twin with attention alone too."""
    variants = {name.removeprefix("stdlib-3m-"): config for name, config in recipes.STATE_VARIANTS.items()}
    sizes = [config.num_parameters() for config in variants.values()]
    assert max(sizes) < 1.02 * min(sizes)
    assert {config.num_layers for config in variants.values()} == {8}
    attending = {name: len(config.attention_layers) for name, config in variants.items()}
    assert attending == dict.fromkeys(variants, 0) | {"attention8": 8, "jamba8": 1, "jamba4": 2}
    states = {name: config.state_values() for name, config in variants.items()}
    assert states["rwkv7"] < states["delta"] < states["jamba4"] < states["jamba8"] < states["mamba2"]


def test_muon_trains_the_matrices_and_nothing_else_of_a_mixer():
    """A decay is no matrix, though Mamba keeps one for each channel and state."""
    config = recipes.STATE_VARIANTS["stdlib-3m-attention8"]
    shape = StateShape(inner_size=32, state_size=4, rank=3)
    config = dataclasses.replace(config, mixers=("mamba",) * 8, state_shape=shape)
    model = Decoder(config)
    muon, adam = training.make_optimizers(model, recipes.RECIPES["stdlib-3m-mamba2"])
    by_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    names = {n.removeprefix("layers.0.") for n, p in model.named_parameters() if id(p) in by_muon and "layers.0" in n}
    assert names == {f"mixer.{n}.weight" for n in ("proj", "select", "step_up", "out")} | {
        f"mlp.{n}.weight" for n in ("gate", "up", "down")
    }
    every = by_muon | {id(p) for group in adam.param_groups for p in group["params"]}
    assert every == {id(p) for p in model.parameters()}


def test_another_seed_is_another_run(small_corpus, tmp_path):
    run(tmp_path / "a", stop_at_step=1)
    run(tmp_path / "b", stop_at_step=1, seed=5)
    first, second = ((tmp_path / x / "state/tensors.safetensors").read_bytes() for x in "ab")
    assert first != second


def test_a_run_of_more_or_fewer_steps_is_a_whole_run_whose_card_says_how_to_make_it_again(
    small_corpus, tmp_path, monkeypatch
):
    monkeypatch.setitem(RECIPES, "tiny", TINY)
    quiet = {"report": lambda line: None}
    for folder, steps in (("own", None), ("fewer", 3), ("more", 8)):
        train("tiny", tmp_path / folder, seed=1 if folder == "fewer" else None, steps=steps, **quiet)
    cards = {name: json.loads((tmp_path / name / "card.json").read_text()) for name in ("own", "fewer", "more")}
    assert {name: (card["steps"], card["tokens_seen"]) for name, card in cards.items()} == {
        "own": (6, 6 * 64),
        "fewer": (3, 3 * 64),
        "more": (8, 8 * 64),
    }
    assert [step for step, _ in cards["more"]["training_loss_by_step"]] == [2, 4, 6, 8]
    again = {
        name: next(line for line in (tmp_path / name / "README.md").read_text().splitlines() if "again" in line)
        for name in cards
    }
    assert again == {
        "own": "Make it again: `workbench train tiny`.",
        "fewer": "Make it again: `workbench train tiny --seed 1 --steps 3`.",
        "more": "Make it again: `workbench train tiny --steps 8`.",
    }


def test_fewer_steps_are_no_run_that_was_stopped(small_corpus, tmp_path):
    """The rate falls to 0 at their own end, so the weights after as many steps are others."""
    run(tmp_path / "whole", steps=4)
    run(tmp_path / "stopped", stop_at_step=4)
    stopped = training.load_file(tmp_path / "stopped/state/tensors.safetensors")
    ended = training.load_file(tmp_path / "whole/model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    own = next(tensor for key, tensor in stopped.items() if key.startswith("model.") and key.endswith("mlp.up.weight"))
    assert ended[name].shape == own.shape and not torch.equal(ended[name], own.bfloat16())


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("begun", "resumed"), [(None, 7), (7, None), (7, 5)])
def test_a_run_of_other_steps_is_refused_and_left_alone_and_one_of_the_same_goes_on(
    small_corpus, tmp_path, begun, resumed
):
    run(tmp_path, steps=begun, stop_at_step=2)
    before = (tmp_path / "state/tensors.safetensors").read_bytes()
    with pytest.raises(WorkbenchError, match=r"holds a run of another recipe.*choose another --out"):
        run(tmp_path, steps=resumed)
    assert (tmp_path / "state/tensors.safetensors").read_bytes() == before
    assert run(tmp_path, steps=begun, stop_at_step=3) == [f"tiny: going on from step 2 of {begun or 6}"]


def test_the_folder_of_another_recipe_is_refused_and_left_alone(small_corpus, tmp_path):
    run(tmp_path, stop_at_step=2)
    before = (tmp_path / "state/tensors.safetensors").read_bytes()
    with pytest.raises(WorkbenchError, match=r"holds a run of another recipe.*choose another --out"):
        run(tmp_path, dataclasses.replace(TINY, seed=1))
    assert (tmp_path / "state/tensors.safetensors").read_bytes() == before


@pytest.mark.parametrize("name", ["tensors.safetensors", "progress.json"])
def test_a_damaged_state_is_refused_with_advice(small_corpus, tmp_path, name):
    run(tmp_path, stop_at_step=2)
    file = tmp_path / "state" / name
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(WorkbenchError, match=r"cannot be read.*delete the folder to start again"):
        run(tmp_path)


@pytest.mark.parametrize(
    "progress", ["[]", "{}", '{"recipe": 5, "step": 2, "seconds": 0, "losses": []}'], ids=["list", "empty", "other"]
)
def test_a_state_that_makes_no_sense_is_refused(small_corpus, tmp_path, progress):
    run(tmp_path, stop_at_step=2)
    (tmp_path / "state/progress.json").write_text(progress)
    with pytest.raises(WorkbenchError, match=r"delete"):
        run(tmp_path)


def test_a_state_that_lacks_a_tensor_is_refused(small_corpus, tmp_path):
    run(tmp_path, stop_at_step=2)
    file = tmp_path / "state/tensors.safetensors"
    tensors = training.load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    with pytest.raises(WorkbenchError, match=r"model\.norm\.weight.*delete"):
        run(tmp_path)


def test_an_unknown_recipe_names_the_nearest(tmp_path):
    with pytest.raises(WorkbenchError, match=r"unknown recipe 'stdlib-10'; did you mean 'stdlib-10m'"):
        train("stdlib-10", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_a_number_ends_the_run_and_keeps_the_last_checkpoint(small_corpus, tmp_path, monkeypatch):
    true_loss, calls = training.next_token_loss, []

    def loss(*arguments):
        calls.append(1)
        return true_loss(*arguments) * (math.nan if len(calls) == 4 else 1.0)

    monkeypatch.setattr(training, "next_token_loss", loss)
    with pytest.raises(WorkbenchError, match=r"the loss became nan at step 3; the last checkpoint"):
        run(tmp_path)
    assert json.loads((tmp_path / "state/progress.json").read_text())["step"] == 2


# -- schedule and data -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [*RECIPES.values(), TINY], ids=lambda r: r.name)
def test_the_rate_rises_holds_and_falls_to_almost_nothing(recipe):
    rates = [recipe.learning_rate(step) for step in range(recipe.steps)]
    peak, decay_from = recipe.peak_learning_rate, math.ceil(recipe.steps * (1 - recipe.decay_share))
    assert rates[0] == pytest.approx(peak / recipe.warmup_steps)
    assert rates[recipe.warmup_steps - 1] == peak == max(rates)
    assert all(rate == peak for rate in rates[recipe.warmup_steps - 1 : decay_from])
    assert all(a > b for a, b in zip(rates[decay_from:], rates[decay_from + 1 :]))
    assert 0 < rates[-1] < peak / (0.3 * recipe.steps)


def test_a_step_of_a_seed_is_always_the_same_rows(small_corpus):
    tokenizer = training.shipped_tokenizer()
    forward, backward = EpochSampler(TINY, tokenizer), EpochSampler(TINY, tokenizer)
    steps = range(2 * forward.steps_per_pass)
    rows = {step: forward.rows(step) for step in steps}
    assert all(torch.equal(backward.rows(step), rows[step]) for step in reversed(steps))
    assert all(r.shape == (2, 32) for r in rows.values())
    other = EpochSampler(dataclasses.replace(TINY, seed=1), tokenizer)
    assert not torch.equal(other.rows(0), rows[0])


def test_a_pass_shows_every_row_at_most_once_and_passes_differ(small_corpus):
    sampler = EpochSampler(TINY, training.shipped_tokenizer())
    first, second = (
        [tuple(r) for s in range(sampler.steps_per_pass) for r in sampler.rows(p * sampler.steps_per_pass + s).tolist()]
        for p in (0, 1)
    )
    assert len(first) * 32 > 0.9 * sampler.tokens_per_pass
    assert len(set(first)) == len(first)
    assert first != second


def test_a_corpus_shorter_than_a_step_is_refused(monkeypatch):
    monkeypatch.setattr(training, "training_files", lambda: [SourceFile("a.py", "x = 1\n")])
    with pytest.raises(WorkbenchError, match=r"less than one step of tiny"):
        EpochSampler(TINY, training.shipped_tokenizer())


def test_held_out_files_are_there_and_never_trained_on():
    trained, held_out = training_files(), held_out_files()
    assert [f.path for f in held_out] == sorted(HELD_OUT)
    assert not {f.path for f in trained} & set(HELD_OUT)
    assert not {f.text for f in trained} & {f.text for f in held_out}
    assert len(trained) > 400


def test_held_out_files_are_those_of_the_whole_library_and_no_other_is_read(monkeypatch, tmp_path):
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "encoder.py").write_text("x = 1\n")
    (tmp_path / "bisect.py").write_text("x = 2\n")
    (tmp_path / "csv.py").write_text(" \n")
    (tmp_path / "queue.py").write_bytes(b"# caf\xe9")
    (tmp_path / "other.py").write_text("x = 3\n")
    read, read_text = [], Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **kw: (read.append(path), read_text(path, **kw))[1])
    for root in (None, tmp_path):
        whole = corpus.standard_library(root)
        read.clear()
        assert corpus.held_out_files(root) == [f for f in whole if f.path in HELD_OUT]
        assert not {path.name for path in read} - {Path(name).name for name in HELD_OUT}
    assert [f.path for f in corpus.held_out_files(tmp_path)] == ["bisect.py", "json/encoder.py"]
    for name in ("json/encoder.py", "bisect.py"):
        (tmp_path / name).unlink()
    assert corpus.held_out_files(tmp_path) == []


def test_tests_tables_and_installed_packages_are_no_corpus():
    for file in training_files():
        assert not {"test", "tests", "site-packages", "idle_test"} & set(file.path.split("/"))
    assert "encodings/cp037.py" not in {f.path for f in training_files()}


def test_files_are_closed_by_the_end_of_text_token():
    tokenizer = training.shipped_tokenizer()
    files = [SourceFile("a.py", "x = 1\n"), SourceFile("b.py", "<|endoftext|>\n")]
    stream = token_stream(files, tokenizer).tolist()
    assert stream.count(tokenizer.end_of_text) == 2
    assert tokenizer.decode(stream) == "x = 1\n<|endoftext|><|endoftext|>\n<|endoftext|>"
    assert token_stream(files, tokenizer, order=[1]).tolist() == stream[stream.index(tokenizer.end_of_text) + 1 :]


def test_a_python_without_its_source_is_told_so(tmp_path):
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9")
    (tmp_path / "empty.py").write_text(" \n")
    with pytest.raises(WorkbenchError, match=r"ships without its .py files"):
        corpus.standard_library(tmp_path)
    with pytest.raises(WorkbenchError, match=r"ships without its .py files"):
        corpus.held_out_files(tmp_path)


def test_the_held_out_loss_is_the_mean_over_scored_tokens(small_corpus):
    """Against a loop that scores one token after the other."""
    model = random_decoder(TINY.config, tokenizer=training.shipped_tokenizer())
    judged = training.held_out_loss(model, model.tokenizer, context=16)
    stream = token_stream(training.held_out_files(), model.tokenizer)
    windows = stream[: len(stream) // 16 * 16].view(-1, 16)
    total = 0.0
    for window in windows:
        log_p = model(Batch.of([window.tolist()], logits="all"), Recompute(model.config)).log_softmax(-1)
        total -= log_p[:-1].gather(1, window[1:, None]).sum().item()
    assert judged["tokens"] == windows.numel() - len(windows)
    assert judged["nats_per_token"] == pytest.approx(total / judged["tokens"], rel=1e-5)
    assert judged["bits_per_byte"] == pytest.approx(total / math.log(2) / judged["bytes"], rel=1e-5)
