"""Lab 13's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as
meant."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from conftest import random_decoder, tiny_config
from exercise_claims import ExerciseClaims, Lab

from workbench.kv.paged import Paged
from workbench.kv.paged_rows import row_bytes, stored_layers
from workbench.models import public_shape
from workbench.parallel import Count, Layout, bubble, idle_share
from workbench.parallel.costs import step_counts
from workbench.parallel.disaggregated import InProcess, Message, Receiver
from workbench.parallel.pipeline import Progress
from workbench.parallel.tensor import Part

LAB = Lab("13_parallelism_and_experts")
IDS = ["parallel-split", "parallel-count", "parallel-schedule", "parallel-connector", "parallel-break-even"]


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 40

    def printed(self, lines):
        text = "\n".join(lines)
        assert text.count("equal the whole one: True") == 3 and text.count("attention holds") == 2
        assert text.count(", p = ") == 3 and "all_reduce 64: 524,288" in text
        assert "1.75 s" in text and text.count("idle:") == 4
        assert text.count("arrived False") == 5 and text.count("arrived True") == 1 and "4 free" in text
        assert text.count("a fast disk") == text.count("a slow disk") == 2


def test_the_exercises_are_those_of_the_lab():
    assert (LAB.visible.lab, LAB.ids) == (13, IDS)


# --- The real parts stand where the answers stand ---


@pytest.mark.parametrize(("kv_heads", "size"), [(4, 2), (2, 2), (2, 4), (1, 4), (4, 4)])
def test_the_answers_parts_are_those_of_the_package(kv_heads, size):
    config = tiny_config(num_layers=1, num_heads=4, num_kv_heads=kv_heads, qkv_bias=True)
    layer = random_decoder(config, seed=2).layers[0]
    answer = LAB.solution("parallel-split")
    weights = dict(layer.named_parameters())
    for rank in range(size):
        for module, made in (
            ("attention", lambda given, rank=rank: answer["attention"](given, config.head_dim, rank, size)),
            ("mlp", lambda given, rank=rank: answer["feed_forward"](given, rank, size)),
        ):
            given = {}
            for name, tensor in weights.items():
                if name.startswith(f"{module}.") and name.count(".") == 2:
                    _, matrix, kind = name.split(".")
                    given[matrix if kind == "weight" else f"{matrix}_bias"] = tensor.detach()
            assert set(given) >= ({"q", "k", "v", "o", "q_bias"} if module == "attention" else {"gate", "up", "down"})
            for name, tensor in made(given).items():
                within = f"{module}.{name.removesuffix('_bias')}.{'bias' if name.endswith('_bias') else 'weight'}"
                torch.testing.assert_close(tensor, Part(config, rank, size).cut(within, weights[within].detach()))


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 3), (2, 3), (4, 2), (8, 4)])
def test_the_answers_counts_are_those_of_the_package(tensor, pipeline):
    config = dataclasses.replace(public_shape("llama-3.1-8b"), num_layers=11, vocab_size=1003)
    model = {"layers": 11, "hidden_size": config.hidden_size, "vocabulary": 1003, "element_bytes": 2}
    layout, groups = Layout.checked(config, tensor, pipeline), [(5, 2), (7, 0), (1, 1)]
    for rank in range(layout.ranks):
        mine = LAB.solution("parallel-count")(model, tensor, pipeline, rank, groups)
        theirs = step_counts(layout, rank, groups, element_bytes=2)
        assert {name: Count(*pair) for name, pair in mine.items()} == {name: theirs[name] for name in mine}
        others = {name: count for name, count in theirs.items() if name not in mine and name not in ("tell", "hear")}
        assert not any(count.calls for count in others.values())


@pytest.mark.parametrize(("stages", "groups"), [(1, 3), (2, 1), (3, 4), (5, 9)])
def test_the_answers_schedule_is_that_of_the_package(stages, groups):
    answer = LAB.solution("parallel-schedule")
    made = answer["run"]([[1] * groups for _ in range(stages)])
    assert made["idle_share"] == pytest.approx(bubble(stages, groups))
    progress = [Progress() for _ in range(stages)]
    for _ in range(groups):
        clock = 0
        for one in progress:
            clock = one.compute(clock)
    assert made["total_s"] == progress[-1].last and made["idle_share"] == pytest.approx(idle_share(progress))
    if stages > 1:
        assert answer["min_groups"](stages, bubble(stages, groups) + 1e-9) == groups


@pytest.mark.parametrize("seed", range(4))
def test_the_answers_connector_keeps_the_books_of_the_package(seed):
    """Offers that fit or do not, rows of several prompts in between each other, drops before and after all is there."""
    draw, size, count = random.Random(seed), 4, 9
    kv = Paged(tiny_config(num_layers=2), max_sequences=count, num_blocks=count, block_size=size, prefix=None)
    theirs, mine = Receiver(InProcess.pair()[0], kv, ""), LAB.solution("parallel-connector")(list(range(count)), size)
    layers = stored_layers(kv)
    left: dict[int, list[tuple[int, int]]] = {}  # of each prompt the pieces that did not come yet
    seen = set()
    for turn in range(120):
        if left and draw.random() < 0.75:
            one = draw.choice(list(left))
            if not left[one] or draw.random() < 0.05:
                theirs.drop(one)
                mine.drop(one)
                del left[one]
                assert not mine.arrived(one) and mine.table(one) == []
            else:
                layer = draw.choice(left[one])[0]
                index = min(at for of, at in left[one] if of == layer)  # rows of a layer come to the package in order
                left[one].remove((layer, index))
                tokens = min(size, theirs.incoming[one].tokens - index * size)
                rows = {"transfer": one, "layer": layer, "start": index * size, "tokens": tokens}
                theirs.put(Message("layer", rows, bytes(tokens * row_bytes(kv, layer))))
                mine.receive(one, layer, index)
                assert mine.arrived(one) == theirs.arrived(one) == (not left[one])
                seen.add(("arrived", not left[one]))
        else:
            tokens = draw.randint(1, 5 * size)
            one = theirs.want(turn, [draw.randrange(50) for _ in range(tokens + 1)], "", 0.0).transfer
            fits = theirs.reserve(one)
            assert mine.reserve(one, tokens, layers) == fits
            seen.add(("reserve", fits))
            if fits:
                left[one] = [(layer, index) for layer in range(layers) for index in range(-(-tokens // size))]
            else:
                theirs.drop(one)
        assert mine.num_free() == kv.num_available
    assert seen == {(verb, result) for verb in ("reserve", "arrived") for result in (True, False)}
