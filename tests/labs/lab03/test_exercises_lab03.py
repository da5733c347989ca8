"""Lab 03's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as
meant."""

from __future__ import annotations

import json
import random

import pytest
import torch
from exercise_claims import ExerciseClaims, Lab, failures

from workbench import checks
from workbench.errors import WorkbenchError
from workbench.grading.check import Verdict, evaluate
from workbench.instruments import costs
from workbench.kv import KV, Contiguous, Recompute
from workbench.labs.lab03_kv_cache.checks import cache as cache_module
from workbench.labs.lab03_kv_cache.checks import counting
from workbench.labs.lab03_kv_cache.checks.parts import Chunks, Slots
from workbench.labs.lab03_kv_cache.checks.probes import vectors
from workbench.models.attention import eager_attention
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.shapes import public_shape

LAB = Lab("03_kv_cache")
IDS = ["kv-append", "kv-chunks", "kv-bytes", "kv-truncate", "kv-bug", "kv-savings"]


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 48

    @pytest.fixture
    def lab_cells(self, tiny_model, monkeypatch):
        monkeypatch.setattr("workbench.load", lambda name: tiny_model, raising=False)

    def printed(self, lines):
        assert lines.count("the same tokens as without a cache: True") == 2
        assert "as if the first try had never been: True" in lines
        assert "64 users × 4,096 tokens on a 70B: 80.0 GiB = 85.9 GB" in lines
        assert "512 after 4,096: 2,227,968 rows against 4,607, 484 times as many;" in lines
        assert "4,854,207,744 pairs against 10,614,528, 457 times as many" in lines
        for kind in ("recompute", "contiguous"):
            counted = next(line for line in lines if line.strip().startswith(f"{kind}: the model"))
            assert counted.split()[4] == counted.split()[-1]  # the rows that ran are the rows predicted
        lists = {line.split(":")[0]: line.split(":")[1] for line in lines if "[" in line and ":" in line}
        broken, right = (json.loads(lists[name]) for name in ("SuspectCache", "without a cache"))
        assert broken[0] == right[0] and broken != right  # the prompt is right, what follows is not


def test_the_exercises_are_the_six_of_the_lab():
    assert (LAB.visible.lab, LAB.ids) == (3, IDS)


# --- The real parts stand where the answers stand ---


def test_the_real_cache_passes_the_checks_of_the_three_caches():
    for grade_id in ("kv-append", "kv-truncate", "kv-bug"):
        result = evaluate(LAB.whole[grade_id], lambda config: Contiguous(config, max_sequences=3))
        assert result.verdict == Verdict.PASSED, f"{grade_id}: {failures(result)}"


def test_the_cost_model_passes_the_checks_of_the_calculator():
    real = {
        "kv_bytes": lambda config, tokens, bytes_per_element, batch: (
            batch * costs.kv_bytes(config, tokens, bytes_per_element)
        ),
        "to_gib": lambda number_of_bytes: number_of_bytes / 2**30,
        "largest_batch": lambda config, card_gb, **given: costs.largest_batch(
            config, memory_bytes=card_gb * 10**9, **given
        ),
    }
    result = evaluate(LAB.whole["kv-bytes"], real)
    assert result.verdict == Verdict.PASSED, failures(result)


def test_the_cost_models_pairs_are_those_counted_step_by_step():
    for prompt, new in ((3, 2), (10, 1), (40, 17)):
        steps = [prompt, *[1] * (new - 1)]
        with_cache = sum(costs.causal_pairs(n, prompt + i - 1 if i else 0) for i, n in enumerate(steps))
        without = sum(costs.causal_pairs(prompt + i, 0) for i in range(new))
        assert counting.exact_work(prompt, new, True) == (sum(steps), with_cache)
        assert counting.exact_work(prompt, new, False)[1] == without


def test_the_published_sizes_follow_the_formula():
    """The 64 users of a 70B take 80 GiB: 86 GB, more than a card of 80 GB."""
    gib = {"llama-2-7b": 2.0, "llama-2-70b": 1.25, "llama-3-8b": 0.5}
    for name, size in gib.items():
        assert counting.exact_bytes(public_shape(name), 4096, 2) == size * 2**30
    users = counting.exact_bytes(public_shape("llama-2-70b"), 4096, 2, batch=64)
    assert users == 80 * 2**30 > 80 * 10**9


def test_a_method_that_gives_nothing_back_is_told_what_it_owes():
    class Empty(Slots):
        def append_and_attend(self, layer, sequence, q, k, v):
            self.keys[sequence][layer][: len(k)] = k

    with pytest.raises(checks.CheckFailed, match=r"returned NoneType; it returns a tensor of the shape of q"):
        checks.check("kv-append", Empty)


# --- The judges' own reference ---


@pytest.mark.parametrize("sizes", [{}, {"heads": 4, "kv_heads": 2, "layers": 2}, {"heads": 3, "kv_heads": 1}])
def test_what_the_judge_expects_of_a_step_is_the_engines_eager_attention(sizes):
    case = cache_module.scripted(random.Random(7), 4, 1, 3, **sizes)
    config = ModelConfig.from_dict(case["config"])
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    text = []
    for step in case["steps"]:
        text += step["send"][0][2]
        new = len(step["send"][0][2])
        for layer in range(config.num_layers):
            q, k, v = (
                vectors(case["salt"], kind, layer, text, 0, count, config.head_dim) for kind, count in heads.items()
            )
            eager = eager_attention(q[-new:], k, v, scale=config.head_dim**-0.5)
            torch.testing.assert_close(cache_module.attended(case, layer, text, new).float(), eager, atol=1e-5, rtol=0)


# --- The plumbing that is given ---


class Attending(Slots):
    """Slots with the heart given: nothing is stored, each row's own value comes back."""

    def append_and_attend(self, layer, sequence, q, k, v):
        return v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


@pytest.mark.parametrize("kind", [Attending, Chunks])
def test_the_given_caches_have_the_whole_contract_and_refuse_what_they_cannot_hold(kind, tiny_model):
    kv = kind(tiny_model.config)
    assert isinstance(kv, KV)
    tiny_model(Batch.of([[1, 2, 3]], sequences=["a"]), kv)
    before = (dict(kv.lengths), kv.bytes_in_use, kv.bytes_reserved)
    assert before[0] == {"a": 3} and 0 < before[1] <= before[2]
    for batch, message in (
        (Batch.of([[4]], first_positions=[2], sequences=["a"]), "3 tokens of sequence 'a' are remembered"),
        (Batch.of([[4]] * 2, first_positions=[3, 1], sequences=["a", "b"]), "0 tokens of sequence 'b'"),
        (Batch.of([[1] * 254], first_positions=[3], sequences=["a"]), "would grow to 257 tokens"),
    ):
        with pytest.raises(WorkbenchError, match=message):
            kv.begin(batch)
        assert (dict(kv.lengths), kv.bytes_in_use, kv.bytes_reserved) == before
    kv.fork("a", "b")
    with pytest.raises(WorkbenchError, match="'b' already exists"):
        kv.fork("a", "b")
    kv.release("a")
    assert dict(kv.lengths) == {"b": 3} and kv.bytes_in_use == before[1]
    with pytest.raises(WorkbenchError, match="'a' is not live"):
        kv.release("a")


def test_a_given_slot_is_cut_by_its_length_alone(tiny_model):
    kv = Attending(tiny_model.config)
    tiny_model(Batch.of([[1, 2, 3]]), kv)
    for length in (-1, 4):
        with pytest.raises(WorkbenchError, match=f"cannot be cut to {length}"):
            kv.truncate(0, length)
    kv.truncate(0, 2)
    assert kv.lengths == {0: 2}


def test_a_forked_list_of_chunks_goes_its_own_way(tiny_model):
    kv = Chunks(tiny_model.config)
    tiny_model(Batch.of([[5, 6, 7]]), kv)
    kv.fork(0, 1)
    logits = tiny_model(Batch.of([[8], [9]], first_positions=[3, 3]), kv)
    for text, row in (([5, 6, 7, 8], 0), ([5, 6, 7, 9], 1)):
        alone = tiny_model(Batch.of([text]), Recompute(tiny_model.config))
        torch.testing.assert_close(logits[row], alone[0], atol=1e-4, rtol=1e-4)


def test_a_window_is_refused_where_none_is_known():
    config = public_shape("mistral-7b")
    if config.sliding_window is None:
        config = ModelConfig.from_dict(config.to_dict() | {"sliding_window": 4096})
    with pytest.raises(WorkbenchError, match="no sliding window"):
        Slots(config)
