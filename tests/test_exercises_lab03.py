"""Lab 03's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as meant."""

from __future__ import annotations

import ast
import json
import random
import re

import pytest
import torch
from exercise_claims import ROOT, ExerciseClaims, Lab, failures

from workbench import checks
from workbench.checks import lab03_attention, lab03_cache, lab03_counting
from workbench.checks.lab03_caches import Chunks, Slots
from workbench.checks.probes_lab03 import vectors
from workbench.errors import WorkbenchError
from workbench.grading.check import Verdict, evaluate
from workbench.instruments import costs
from workbench.kv import KV, Contiguous, Recompute
from workbench.models.attention import eager_attention
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.shapes import public_shape

LAB = Lab("03_kv_cache")
IDS = ["kv-append", "kv-chunks", "kv-bytes", "kv-truncate", "kv-bug", "kv-savings"]


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 42

    @pytest.fixture
    def lab_cells(self, tiny_model, monkeypatch):
        monkeypatch.setattr("workbench.load", lambda name: tiny_model, raising=False)

    def test_the_starter_holds_no_line_of_an_answer(self, grade_id):
        """Answers here are methods of a class, too."""
        whole, cut = self.lab.sources()[grade_id], self.lab.sources(starter=True)[grade_id]
        assert "SOLUTION" not in cut
        given = {ast.unparse(n) for n in ast.walk(ast.parse(cut)) if isinstance(n, ast.stmt)}
        functions = [n for n in ast.walk(ast.parse(whole)) if isinstance(n, ast.FunctionDef)]
        last_lines = {ast.unparse(function.body[-1]) for function in functions}
        assert last_lines and not last_lines & given

    def printed(self, lines):
        assert lines.count("the same tokens as without a cache: True") == 2
        assert "as if the first try had never been: True" in lines
        assert "64 users × 4,096 tokens on a 70B: 80.0 GiB = 85.9 GB" in lines
        assert "512 after 4,096: 2,227,968 rows against 4,607, 484 times as many;" in lines
        assert "4,854,207,744 pairs against 10,614,528, 457 times as many" in lines
        for kind in ("recompute", "contiguous"):
            counted = next(line for line in lines if line.strip().startswith(f"{kind}: the model"))
            assert counted.split()[4] == counted.split()[-1]  # the rows that ran are the rows predicted
        told = {line.split(":")[0]: line.split(":")[1] for line in lines if "[" in line and ":" in line}
        broken, right = (json.loads(told[name]) for name in ("SuspectCache", "without a cache"))
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
        assert lab03_counting.exact_work(prompt, new, True) == (sum(steps), with_cache)
        assert lab03_counting.exact_work(prompt, new, False)[1] == without


def test_the_published_sizes_follow_the_formula():
    """The 64 users of a 70B take 80 GiB: 86 GB, more than a card of 80 GB."""
    gib = {"llama-2-7b": 2.0, "llama-2-70b": 1.25, "llama-3-8b": 0.5}
    for name, size in gib.items():
        assert lab03_counting.exact_bytes(public_shape(name), 4096, 2) == size * 2**30
    users = lab03_counting.exact_bytes(public_shape("llama-2-70b"), 4096, 2, batch=64)
    assert users == 80 * 2**30 > 80 * 10**9


# --- Diagnoses ---

DIAGNOSES = [
    ("kv-append", "one position late", ("one position too late", "the token at position 0 was written to 1")),
    ("kv-append", "one position early", ("one position too early", "the token at position 4 was written over the one at 3")),
    ("kv-append", "behind the new tokens", ("stored at position 5, behind", "first = 5 − 5 = 0")),
    ("kv-append", "own key not seen", ("one position too tight", "does not see its own key")),
    ("kv-append", "next key seen", ("one position too wide", "sees the key at 1, which is its future")),
    ("kv-append", "mask from zero", ("sees only positions 0 … 0", "stands at position first + i")),
    ("kv-append", "no mask in later chunks", ("sees all 6 keys", "needs a causal mask")),
    ("kv-append", "newest key not read", ("sees only positions 0 … 2, although its key is stored at 3",)),
    ("kv-append", "nothing remembered", ("the 4 remembered ones belong to it too",)),
    ("kv-append", "whole slot in decode", ("the whole slot", "e⁰ = 1")),
    ("kv-append", "masked scores are zero", ("hide them with -inf",)),
    ("kv-append", "heads in turns", ("H_q = 4 and H_kv = 2", "repeat_interleave, not repeat")),
    ("kv-append", "no scale", ("not divided by √D",)),
    ("kv-chunks", "remainder dropped", ("called with [4, 4] tokens, expected [4, 4, 1]", "the last chunk is missing")),
    ("kv-chunks", "in one piece", ("the prompt went through in one piece",)),
    ("kv-chunks", "logits of the first chunk", ("those after position 3, and the prompt ends at position 9",)),
    ("kv-chunks", "positions by calls", ("starts it at position 1", "behind what was remembered before")),
    ("kv-bytes", "query heads", ("gave 10,737,418,240, expected 1,342,177,280", "H_kv heads")),
    ("kv-bytes", "keys only", ("keys *and* values are kept",)),
    ("kv-bytes", "GB for GiB", ("10⁹ bytes are 1 GB",)),
    ("kv-bytes", "card in GiB", ("gave 5, expected 4", "card_gb is in GB, 10⁹ bytes")),
    ("kv-truncate", "one token too few", ("the token at position 7 is gone too", "keeps positions 0 … 7")),
    ("kv-truncate", "one token too many", ("the token at position 8 is still there",)),
    ("kv-truncate", "lengths only", ("still sees the keys of the tokens that were to be forgotten",)),
    ("kv-truncate", "zeroed", ("set to zero but are still attended to",)),
    ("kv-truncate", "refused too late", ("a refused truncate changes nothing",)),
    ("kv-truncate", "quietly clamped", ("no error was raised", "7 is outside")),
    ("kv-bug", "write position only", ("as if the step were the whole text", "is_causal=True")),
    ("kv-bug", "mask only", ("one position too early",)),
    ("kv-bug", "mask of floats", ("a float mask is added to the scores",)),
    ("kv-bug", "mask upside down", ("the wrong way round",)),
    ("kv-savings", "last token sent", ("gave 12 rows, expected 7", "chosen but never sent")),
    ("kv-savings", "the whole rectangle", ("gave 25 pairs, expected 16", "queries × keys")),
    ("kv-savings", "decode only", ("gave 511 rows, expected 4,607", "the prompt's rows go through the model once")),
]  # fmt: skip


@pytest.mark.parametrize(("grade_id", "name", "said"), DIAGNOSES, ids=[f"{g}-{n}" for g, n, _ in DIAGNOSES])
def test_a_diagnosis_says_what_was_seen_and_where_to_look(grade_id, name, said):
    message = LAB.message_of(grade_id, name)
    for words in said:
        assert words in message, message


def test_a_method_that_gives_nothing_back_is_told_what_it_owes():
    class Empty(Slots):
        def append_and_attend(self, layer, sequence, q, k, v):
            self.keys[sequence][layer][: len(k)] = k

    with pytest.raises(
        checks.CheckFailed, match=r"gave back NoneType; it returns a tensor of the shape of q"
    ):
        checks.check("kv-append", Empty)


# --- The judges' own reference ---


def as_seen(case: dict, cache: lab03_attention.Simulated) -> dict:
    """What a probe would see of a simulated cache: every step's outputs [L][N][H_q][D] and lengths."""
    steps = []
    for step in case["steps"]:
        now: dict = {}
        if "send" in step:
            now["out"] = [[row for part in layer for row in part] for layer in cache.send(step["send"])]
        elif "truncate" in step:
            cache.truncate(*step["truncate"])
        else:
            cache.release(step["release"])
        now["lengths"] = sorted(map(list, cache.lengths.items()))
        now["bytes_in_use"] = 0
        steps.append(now)
    return {"steps": steps}


@pytest.mark.parametrize("sizes", [{}, {"heads": 4, "kv_heads": 2, "layers": 2}, {"heads": 3, "kv_heads": 1}])
def test_the_reference_in_loops_is_attention_as_it_is_defined(sizes):
    case = lab03_cache.scripted(random.Random(7), 4, 1, 3, **sizes)
    config = ModelConfig.from_dict(case["config"])
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    cache, text = lab03_attention.Simulated(case["config"], case["salt"]), []
    for step in case["steps"]:
        text += step["send"][0][2]
        loops, new = cache.send(step["send"]), len(step["send"][0][2])
        for layer in range(config.num_layers):
            q, k, v = (
                vectors(case["salt"], kind, layer, text, 0, count, config.head_dim)
                for kind, count in heads.items()
            )
            defined = eager_attention(q[-new:], k, v, scale=config.head_dim**-0.5)
            torch.testing.assert_close(torch.tensor(loops[layer][0]), defined, atol=1e-5, rtol=0)


FAULTS = [*lab03_attention.STORING, *lab03_attention.SEEING, *lab03_attention.REST]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_every_fault_that_can_be_told_is_seen_and_told_by_name(fault):
    """Layers, groups, several sequences; single tokens come first, or a chunk does. In one of the two it is told."""
    words = ".*".join(map(re.escape, re.split(r"{.*?}", fault.told)))
    messages = []
    for early in (1, 3):
        script = lab03_cache.Script(random.Random(3), heads=6, kv_heads=3, layers=2)
        case = script.send(a=4).send(a=early).send(a=3, b=3).send(b=1).send(a=2).case()
        broken = lab03_attention.Simulated(case["config"], case["salt"], fault)
        messages.append(lab03_cache.judge_cache(case, as_seen(case, broken)))
    assert None not in messages
    assert any(re.search(words, message) for message in messages), messages


def test_a_right_cache_has_no_fault():
    for cases in (lab03_cache.ragged_cases, lab03_cache.rewound_cases, lab03_cache.draft_cases):
        for case in cases(random.Random(5)):
            right = lab03_attention.Simulated(case["config"], case["salt"])
            assert lab03_cache.judge_cache(case, as_seen(case, right)) is None


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


def test_the_exercises_send_the_reader_to_sections_that_the_lecture_has():
    text = (ROOT / "solutions" / f"{LAB.name}.py").read_text(encoding="utf-8")
    lecture = (ROOT / "notebooks" / "source" / f"{LAB.name}.py").read_text(encoding="utf-8")
    headings = set(re.findall(r"^# #+ (.+)$", lecture, flags=re.MULTILINE))
    named = [
        name for told in re.findall(r"\*Lab 03, ([^*]+)\.\*", text) for name in re.findall(r'"([^"]+)"', told)
    ]
    assert len(named) >= len(IDS) and set(named) <= headings, set(named) - headings
