"""Lab 04's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as meant."""

from __future__ import annotations

import ast
import random
import re

import pytest
import torch
from conftest import random_decoder, tiny_config
from exercise_claims import ROOT, ExerciseClaims, Lab, failures

from workbench import checks
from workbench.checks import (
    lab04_attention,
    lab04_budget,
    lab04_caches,
    lab04_convert,
    lab04_latent,
    lab04_window,
)
from workbench.checks.probes_lab04 import (
    attention_inputs,
    latent_inputs,
    original,
    ring_inputs,
    run_conversion,
    watched,
)
from workbench.errors import WorkbenchError
from workbench.grading.check import Verdict, evaluate
from workbench.kv import KV, Contiguous, Latent, Recompute, SharedLayers, Window
from workbench.models.attention import eager_attention
from workbench.models.batch import Batch
from workbench.models.config import LatentAttentionShape, ModelConfig
from workbench.models.conversion import mean_pool_heads
from workbench.models.latent import UpProjections
from workbench.models.shapes import public_shape

LAB = Lab("04_smaller_caches")
IDS = ["smaller-gqa", "smaller-window", "smaller-latent", "smaller-int8", "smaller-convert", "smaller-budget"]


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 45

    @pytest.fixture
    def lab_cells(self, tiny_model, monkeypatch):
        latents = LatentAttentionShape(
            None, kv_rank=16, rotary_head_dim=8, content_head_dim=8, value_head_dim=8
        )
        config = tiny_config(
            family="deepseek_v3", num_kv_heads=4, head_dim=16, vocab_size=4096, latent_attention=latents
        )
        latent = random_decoder(config, tokenizer=tiny_model.tokenizer)
        monkeypatch.setattr(
            "workbench.load", lambda name: latent if name.endswith("mla") else tiny_model, raising=False
        )

    def test_the_starter_holds_no_line_of_an_answer(self, grade_id):
        """Answers here are methods of a class, too."""
        whole, cut = self.lab.sources()[grade_id], self.lab.sources(starter=True)[grade_id]
        assert "SOLUTION" not in cut
        given = {ast.unparse(n) for n in ast.walk(ast.parse(cut)) if isinstance(n, ast.stmt)}
        functions = [n for n in ast.walk(ast.parse(whole)) if isinstance(n, ast.FunctionDef)]
        last_lines = {ast.unparse(function.body[-1]) for function in functions}
        assert last_lines and not last_lines & given

    def test_in_the_starter_only_the_check_cells_fail_and_each_says_not_attempted(self, lab_cells, capsys):
        """The last cell uses four answers at once, and says of the first that it is not there."""
        failed = [(c.metadata.get("nbgrader", {}).get("grade_id"), e) for c, e in self.lab.run_cells(True)]
        failed = [(grade_id, error) for grade_id, error in failed if error]
        assert [grade_id for grade_id, _ in failed] == [f"{grade_id}-check" for grade_id in IDS]
        assert {type(error) for _, error in failed} == {checks.NotAttempted}
        said = [line for line in capsys.readouterr().out.splitlines() if "not attempted yet" in line]
        assert [line.split(":")[0] for line in said] == [*IDS, IDS[0]]

    def printed(self, lines):
        text = "\n".join(lines)
        assert len(re.findall("equal: True", text)) == 3
        assert len(re.findall("they agree: True", text)) == 4 and "False" not in text
        repeats = [line for line in lines if "heads share" in line and "largest tensor made" in line]
        assert all("by the definition 512,000" in line for line in repeats) and len(repeats) == 3
        assert "deepseek-v2 with a key and a value for every head would keep 57 times as much" in lines
        for name in ("grouped_attention", "RollingBuffer, W = 64", "latent_attention"):
            line = next(line for line in lines if line.strip().startswith(f"{name}: the first"))
            assert "RollingBuffer" in name or "the first 48 of 48 tokens" in line


def test_the_exercises_are_the_six_of_the_lab():
    assert (LAB.visible.lab, LAB.ids) == (4, IDS)


# --- The real parts stand where the answers stand, and the answers where the real parts stand ---


def test_the_definition_passes_everything_but_the_check_that_counts():
    result = evaluate(LAB.whole["smaller-gqa"], eager_attention)
    assert [check.name for check in result.checks if not check.passed] == ["no-repeats", "size-of-values"]


def up_projections(q, latents, k_up, v_up) -> UpProjections:
    _, content, rank = k_up.shape
    shape = LatentAttentionShape(None, rank, q.shape[-1] - content, content, v_up.shape[1])
    return UpProjections(shape, k_up.flatten(0, 1), v_up.flatten(0, 1))


def real_expanded(q, latents, k_up, v_up):
    k, v = up_projections(q, latents, k_up, v_up).expand(latents[:, None])
    return eager_attention(q, k, v, scale=q.shape[-1] ** -0.5)


def real_absorbed(q, latents, k_up, v_up):
    up, rank = up_projections(q, latents, k_up, v_up), k_up.shape[2]
    grouped = LAB.solution("smaller-gqa")
    mixed = grouped(up.absorb(q), latents[:, None], latents[:, None, :rank], scale=q.shape[-1] ** -0.5)
    return up.restore(mixed)


def test_the_models_own_up_projections_pass_the_checks_of_latent_attention():
    forms = {"expanded": real_expanded, "absorbed": real_absorbed}
    result = evaluate(LAB.whole["smaller-latent"], forms)
    assert result.verdict == Verdict.PASSED, failures(result)


def test_the_answer_pools_heads_as_the_package_does():
    model = random_decoder(tiny_config(num_kv_heads=4, qkv_bias=True, qk_norm=True), seed=3)
    mine = LAB.solution("smaller-convert")(dict(model.state_dict()), model.config, 2)
    real = mean_pool_heads(model, 2).state_dict()
    assert mine.keys() == real.keys()
    for name, tensor in real.items():
        torch.testing.assert_close(mine[name], tensor)


def test_the_formula_of_the_answer_is_what_the_caches_reserve():
    """A window's ring has W − 1 places and those for rewinding: with one of these, W."""
    formula = LAB.solution("smaller-budget")["kv_bytes"]
    room = {"max_sequences": 1, "max_tokens": 200, "dtype": torch.float16}
    mla = LatentAttentionShape(None, 24, 8, 8, 12)
    shapes = [
        (Contiguous, tiny_config(num_kv_heads=1), {}),
        (Latent, tiny_config(num_kv_heads=4, head_dim=16, family="deepseek_v2", latent_attention=mla), {}),
        (SharedLayers, tiny_config(kv_sources=(0, 0)), {}),
        (Window, tiny_config(sliding_window=32, global_layers=(1,), attention_sinks=3), {"rewind": 1}),
    ]
    for kind, config, settings in shapes:
        assert formula(config, 200, 2) == kind.reserved_bytes_for(config, **room, **settings), kind
        assert formula(config, 200, 2) == lab04_budget.exact_bytes(config, 200, 2)


@pytest.mark.parametrize("rewind", [1, 5])
def test_the_rolling_buffer_gives_takes_and_refuses_what_the_real_window_does(rewind):
    model = random_decoder(tiny_config(sliding_window=6, global_layers=(1,)), seed=1)
    yours = lab04_caches.rolling_cache(LAB.solution("smaller-window"), rewind=rewind)(model.config)
    real = Window(model.config, rewind=rewind)
    draw, length, refusals = random.Random(rewind), 0, 0
    for step in range(30):
        tokens = [draw.randrange(4000) for _ in range(draw.choice((1, 1, 2, 7)))]
        batch = Batch.of([tokens], first_positions=[length])
        torch.testing.assert_close(model(batch, yours), model(batch, real), atol=1e-4, rtol=1e-4)
        length += len(tokens)
        cut = 0 if step == 29 else max(0, length - draw.choice((0, 0, 1, 3, 8)))
        outcomes = []
        for kv in (yours, real):
            try:
                kv.truncate(0, cut)
                outcomes.append("cut")
            except WorkbenchError:
                outcomes.append("refused")
            assert kv.lengths[0] == (cut if outcomes[-1] == "cut" else length)
        assert outcomes[0] == outcomes[1], (length, cut, outcomes)
        refusals += outcomes[0] == "refused"
        length = yours.lengths[0]
    assert refusals and length == 0


# --- Diagnoses ---

DIAGNOSES = [
    ("smaller-gqa", "repeat interleave", ("repeat_interleave made a tensor of 51,200 numbers", "every key 8 times")),
    ("smaller-gqa", "expand and reshape", ("expand alone copies nothing, but reshape after it does",)),
    ("smaller-gqa", "a product that stretches", ("A matrix product that has to stretch one side",)),
    ("smaller-gqa", "the fused kernel", ("scaled_dot_product_attention was called",)),
    ("smaller-gqa", "heads in turns", ("h mod H_kv", "H_q = 4 and H_kv = 2")),
    ("smaller-gqa", "output in another order", ("the right numbers, in the wrong order",)),
    ("smaller-gqa", "first head for all", ("every query head reads key-value head 0",)),
    ("smaller-gqa", "no scale", ("not multiplied with scale",)),
    ("smaller-gqa", "scaled twice", ("scaled twice",)),
    ("smaller-gqa", "no mask", ("sees later tokens too", "needs a causal mask")),
    ("smaller-gqa", "hidden by zero", ("hide them with -inf",)),
    ("smaller-gqa", "softmax over the queries", ("softmax runs over the wrong axis",)),
    ("smaller-window", "window too wide", ("sees 5 tokens: a window of W = 4 is the token itself and the 3 before it",)),
    ("smaller-window", "window too narrow", ("sees one token too few",)),
    ("smaller-window", "no window", ("sees all that the ring holds", "for truncate, not for attention")),
    ("smaller-window", "empty places seen", ("places of the ring that hold nothing yet", "e⁰ = 1")),
    ("smaller-window", "order of places", ("place 0 does not hold the oldest token",)),
    ("smaller-window", "off by one around the ring", ("the key of position 1 belongs at place 1 mod 3 = 1; that of position 3",)),
    ("smaller-window", "store first", ("lost keys that the step's own tokens overwrote", "attend first")),
    ("smaller-window", "chunks without a mask", ("sees later tokens of its step",)),
    ("smaller-window", "a list that grows", ("the ring has 1 places afterwards, expected 3 as before: nothing grows",)),
    ("smaller-window", "nothing refused", ("no error was raised", "positions 4 … 7, and the oldest that the ring still has is 5")),
    ("smaller-window", "one too few allowed", ("was refused", "those before it are still there: the oldest is 6")),
    ("smaller-window", "refused too late", ("length is 7 afterwards, expected 12: a refused truncate changes nothing",)),
    ("smaller-latent", "scaled by the latent's size", ("scaled by 1/√(kv_rank) = 1/√5", "content + rotary = 4 + 2")),
    ("smaller-latent", "scaled by the row's size", ("1/√(kv_rank + rotary)", "the score is the same")),
    ("smaller-latent", "rotary part scaled apart", ("the rotary part of the score was scaled twice",)),
    ("smaller-latent", "rotary part left out", ("the rotary part of the score is missing",)),
    ("smaller-latent", "value from the rotary part", ("the value was read from the end of the latents",)),
    ("smaller-latent", "k_up transposed", ("k_up was used transposed",)),
    ("smaller-latent", "v_up transposed", ("v_up was used transposed",)),
    ("smaller-latent", "expanding each step", ("absorbed took 7,641,600 FLOPs, expected 370,176: the latents were expanded",)),
    ("smaller-latent", "keys absorbed, values expanded", ("the latents were expanded, to keys or to values",)),
    ("smaller-latent", "keys expanded by hand", ("absorbed made a tensor of 96,000 numbers", "by mul")),
    ("smaller-int8", "cut off", ("use torch.round before the cast",)),
    ("smaller-int8", "codes wrap around", ("wraps around in int8", "take 128 off before the cast")),
    ("smaller-int8", "zero point off by one", ("1 step too low: the zero point is off by one",)),
    ("smaller-int8", "zero point off by one, the other way", ("1 step too high: the zero point is off by one",)),
    ("smaller-int8", "symmetric", ("that is symmetric, max |x| / 127",)),
    ("smaller-int8", "256 steps", ("256 codes have 255 steps between them",)),
    ("smaller-int8", "divided by nothing", ("a scale is 0", "Take 1 there")),
    ("smaller-int8", "one scale for all", ("the range of the whole tensor; every row has a scale of its own",)),
    ("smaller-int8", "keys per token", ("one for each channel of a head, over the tokens",)),
    ("smaller-int8", "values per channel", ("one for each token and head, over its channels",)),
    ("smaller-convert", "heads in turns", ("taken in turns, h mod 2", "heads 0 … 1 become head 0")),
    ("smaller-convert", "added up", ("added up; their mean keeps the size of a key",)),
    ("smaller-convert", "divided by the new number", ("divided by the wrong number", "= 3 heads")),
    ("smaller-convert", "first head of the group", ("the first head of each group was kept",)),
    ("smaller-convert", "neighbouring rows", ("neighbouring rows, which are channels of one head",)),
    ("smaller-convert", "weights without biases", ("a bias has heads as well as a weight",)),
    ("smaller-convert", "queries too", ("only k and v have key-value heads",)),
    ("smaller-convert", "written into the old dict", ("the weights that were given are changed",)),
    ("smaller-budget", "keys only", ("gave 1,073,741,824, expected 2,147,483,648", "a factor of 2")),
    ("smaller-budget", "query heads", ("the H_kv = 8 key-value heads, not the H_q = 64 query heads",)),
    ("smaller-budget", "window ignored", ("the window was ignored",)),
    ("smaller-budget", "window everywhere", ("those in global_layers keep all tokens",)),
    ("smaller-budget", "sinks forgotten", ("the attention sinks were forgotten",)),
    ("smaller-budget", "latents twice", ("gave 138,240, expected 69,120", "no factor of 2")),
    ("smaller-budget", "rotary key forgotten", ("kv_rank + rotary_head_dim",)),
    ("smaller-budget", "GiB for GB", ("gave 85,899,345,920, expected 80,000,000,000", "1,073,741,824 is 1 GiB")),
    ("smaller-budget", "smallest cache", ("its loss is lower",)),
    ("smaller-budget", "one user", ("does not fit: weights and",)),
]  # fmt: skip
HIDDEN_DIAGNOSES = [
    ("smaller-gqa", "mask from zero", "later-chunks", "laid as if the step were the whole text"),
    ("smaller-window", "oldest from the length", "twice", "what was overwritten does not come back"),
    ("smaller-window", "zero refused", "to-nothing", "sees no token before it, so nothing is missing"),
    ("smaller-window", "one set of keys for all rings", "real-model", "keep its keys, values and books to itself"),
    ("smaller-latent", "absorbed both times", "each-at-its-cost", "that is what the absorbed form takes"),
    ("smaller-convert", "nothing refused", "refused", "Raise WorkbenchError unless the new number"),
    ("smaller-convert", "norms pooled too", "head-norms", "k_norm.weight was changed"),
    ("smaller-budget", "sharing layers counted", "sharing", "layers that attend over another layer's keys were counted"),
    ("smaller-budget", "half bytes dropped", "precision", "round up to whole bytes"),
    ("smaller-budget", "weights ignored", "tight", "the weights lie in the same memory"),
    ("smaller-budget", "rounded up", "tight", "the last sequence does not fit whole"),
    ("smaller-budget", "largest cache among equals", "nothing-fits", "the losses are equal"),
]  # fmt: skip


@pytest.mark.parametrize(("grade_id", "name", "said"), DIAGNOSES, ids=[f"{g}-{n}" for g, n, _ in DIAGNOSES])
def test_a_diagnosis_says_what_was_seen_and_where_to_look(grade_id, name, said):
    message = LAB.message_of(grade_id, name)
    for words in said:
        assert words in message, message


@pytest.mark.parametrize(
    ("grade_id", "name", "check", "said"), HIDDEN_DIAGNOSES, ids=[f"{g}-{n}" for g, n, *_ in HIDDEN_DIAGNOSES]
)
def test_a_hidden_checks_message_to_the_instructor_names_the_mistake(grade_id, name, check, said):
    result = LAB.judged_at(grade_id, name, 0)
    message = next(c.message for c in result.checks if c.name == check)
    assert said in message, message


# --- The judges' own references ---


@pytest.mark.parametrize("sizes", [(1, 6, 4, 2), (4, 9, 6, 3), (5, 5, 3, 1), (2, 9, 4, 2, 8, 5)])
def test_the_reference_attention_is_the_definition(sizes):
    case = lab04_attention.attention_case(random.Random(1), *sizes)
    given = lab04_attention.inputs_of(case)
    right = lab04_attention.attention(*given, case["scale"])
    torch.testing.assert_close(right.float(), eager_attention(*given, scale=case["scale"]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "fault",
    [*lab04_attention.GROUPED, *lab04_attention.SEEING, *lab04_attention.SCALING],
    ids=lambda f: f.told[:40],
)
def test_every_fault_of_attention_that_can_be_told_is_told(fault):
    case = lab04_attention.attention_case(random.Random(2), 3, 8, 6, 3)

    def faulty(q, k, v, *, scale):
        return lab04_attention.attention(q, k, v, scale, fault).float()

    seen = watched(faulty, *lab04_attention.inputs_of(case), scale=case["scale"])
    message = lab04_attention.judge_attention(case, seen | {"out": seen["out"].tolist()})
    words = ".*".join(map(re.escape, re.split(r"{.*?}", fault.told)))
    assert re.search(words, message), message


@pytest.mark.parametrize("fault", lab04_latent.FAULTS, ids=lambda f: f.told[:50])
def test_every_fault_of_latent_attention_that_can_be_told_is_told(fault):
    words, messages = ".*".join(map(re.escape, re.split(r"{.*?}", fault.told))), []
    for shape in ((2, 8, 3, 5, 4, 7, 9), (2, 8, 3, 6, 4, 6, 6)):  # transposed maps fit the second alone
        case = lab04_latent.latent_case(random.Random(4), ("absorbed",), *shape)
        sizes = lab04_latent.sizes_of(case)
        given = latent_inputs(seed=case["seed"], **sizes)
        out = lab04_latent.latent_attention(*given, sizes, fault)
        if out is not None:
            seen = watched(lambda *_, out=out: out, *given)
            messages.append(lab04_latent.judge_latent(case, {"absorbed": seen | {"out": out.tolist()}}))
    assert any(message and re.search(words, message) for message in messages), messages


def test_the_reference_of_latents_and_its_flops_are_those_of_the_models_own_forms():
    sizes = {"n": 3, "tokens": 40, "heads": 4, "content": 6, "rotary": 2, "value": 10, "rank": 16}
    given = latent_inputs(seed=5, **sizes)
    right = lab04_latent.latent_attention(*given, sizes).float()
    for form, real in (("expanded", real_expanded), ("absorbed", real_absorbed)):
        seen = watched(real, *given)
        torch.testing.assert_close(seen["out"], right, atol=1e-5, rtol=1e-5)
        assert seen["flops"] == lab04_latent.form_flops(form, sizes)


def test_the_reference_ring_is_attention_with_a_window():
    case = lab04_window.ring_case(random.Random(6), 4, 6, 5, 1, 7, heads=4, kv_heads=2)
    held = lab04_window.Held(case)
    rows: list[tuple] = []
    for number, step in enumerate(case["steps"]):
        _, k, v = ring_inputs(case["seed"], number, step["send"], 4, 2, 4)
        rows += zip(k, v)
        q = held.send(number, step["send"])
        right, _ = lab04_window.seen_sets(held, len(q))
        keys, values = (torch.stack(part) for part in zip(*rows))
        defined = eager_attention(q, keys, values, scale=0.5, window=4)
        torch.testing.assert_close(held.over(q, right).float(), defined, atol=1e-5, rtol=0)
    assert held.oldest == 13 - 6


def test_the_published_sizes_follow_the_formula():
    """Llama 2: 7B is MHA, 70B has 64 query heads that share 8; DeepSeek caches 576 where 32,768 would be K and V."""
    seven, seventy = public_shape("llama-2-7b"), public_shape("llama-2-70b")
    assert (seven.num_heads, seven.num_kv_heads) == (32, 32)
    assert (seventy.num_heads, seventy.num_kv_heads) == (64, 8)
    deepseek = public_shape("deepseek-v2")
    assert lab04_budget.exact_bytes(deepseek, 1, 1) == deepseek.num_layers * 576
    as_mha = ModelConfig.from_dict(deepseek.to_dict() | {"latent_attention": None, "head_dim": 128})
    assert lab04_budget.exact_bytes(as_mha, 1, 1) == deepseek.num_layers * 32_768


def test_equal_heads_are_equal_and_pooling_them_changes_no_logit():
    case = lab04_convert.equal_cases(random.Random(8))[1]
    model = original(case["config"], case["seed"], case["num_kv_heads"])
    pooled = mean_pool_heads(model, case["num_kv_heads"])
    before, after = (m(Batch.of([case["tokens"]]), Recompute(m.config)) for m in (model, pooled))
    torch.testing.assert_close(before, after, atol=1e-4, rtol=1e-4)
    plain = original(case["config"], case["seed"], None)
    other = mean_pool_heads(plain, case["num_kv_heads"])
    before, after = (m(Batch.of([case["tokens"]]), Recompute(m.config)) for m in (plain, other))
    assert (before - after).abs().max() > 1e-2  # otherwise the case could not tell


def test_a_model_that_pools_rightly_and_scales_elsewhere_is_caught_by_its_function():
    """equal-heads runs the model: a fault in what the tensors' judge does not see shows in the logits."""
    case = lab04_convert.equal_cases(random.Random(9))[0]
    seen = run_conversion(LAB.solution("smaller-convert"), **case)
    plain = seen | {n: {k: t.tolist() for k, t in seen[n].items()} for n in ("pooled",)}
    assert lab04_convert.judge_conversion(case, plain | {"logits": seen["logits"].tolist()}) is None
    message = lab04_convert.judge_conversion(case, plain | {"logits": (seen["logits"] * 1.01).tolist()})
    assert "the model must give the same logits" in message


# --- What is counted ---


def test_the_counter_sees_copies_and_no_views():
    q, k, v = attention_inputs(0, 1, 50, 8, 2, 16, 16)
    views = watched(lambda q, k, v: k[:, :, None].expand(-1, -1, 4, -1).transpose(0, 1), q, k, v)
    assert views["largest"]["elements"] == 0
    copied = watched(lambda q, k, v: k.repeat_interleave(4, dim=1), q, k, v)
    assert copied["largest"]["elements"] == 4 * k.numel() and copied["largest"]["by"] == "repeat_interleave"
    assert watched(lambda q, k, v: v.zero_(), q, k, v)["changed"] == [2]


# --- The plumbing that is given ---


def solved_caches(config: ModelConfig) -> dict:
    """Every answer as a kv."""
    return {
        "grouped": lab04_caches.grouped_cache(LAB.solution("smaller-gqa"))(config),
        "rolling": lab04_caches.rolling_cache(LAB.solution("smaller-window"))(config),
        "int8": lab04_caches.int8_cache(LAB.solution("smaller-int8"), group=4)(config),
    }


@pytest.mark.parametrize("kind", ["grouped", "rolling", "int8"])
def test_the_given_caches_have_the_whole_contract_and_refuse_what_they_cannot_hold(kind, tiny_model):
    kv = solved_caches(tiny_model.config)[kind]
    assert isinstance(kv, KV)
    tiny_model(Batch.of([[1, 2, 3, 4, 5]], sequences=["a"]), kv)
    before = (dict(kv.lengths), kv.bytes_in_use, kv.bytes_reserved)
    assert before[0] == {"a": 5} and 0 < before[1] <= before[2]
    for batch, message in (
        (Batch.of([[4]], first_positions=[2], sequences=["a"]), "5 tokens of sequence 'a' have come"),
        (Batch.of([[1] * 254], first_positions=[5], sequences=["a"]), "would grow to 259 tokens"),
    ):
        with pytest.raises(WorkbenchError, match=message):
            kv.begin(batch)
        assert (dict(kv.lengths), kv.bytes_in_use, kv.bytes_reserved) == before
    for length in (-1, 6):
        with pytest.raises(WorkbenchError, match=f"cannot be cut to {length}"):
            kv.truncate("a", length)
    kv.fork("a", "b")
    with pytest.raises(WorkbenchError, match="'b' already exists"):
        kv.fork("a", "b")
    kv.truncate("a", 3)
    assert dict(kv.lengths) == {"a": 3, "b": 5}
    kv.release("a")
    assert dict(kv.lengths) == {"b": 5} and kv.bytes_in_use == before[1]
    with pytest.raises(WorkbenchError, match="'a' is not live"):
        kv.release("a")


@pytest.mark.parametrize("kind", ["grouped", "rolling"])
def test_the_exact_answers_are_exact_in_the_engine_after_forks_and_cuts(kind, tiny_model):
    kv = solved_caches(tiny_model.config)[kind]
    tiny_model(Batch.of([[5, 6, 7, 8]]), kv)
    kv.fork(0, 1)
    kv.truncate(1, 3)
    logits = tiny_model(Batch.of([[9], [10, 11]], first_positions=[4, 3]), kv)
    for text, row in (([5, 6, 7, 8, 9], 0), ([5, 6, 7, 10, 11], 1)):
        alone = tiny_model(Batch.of([text]), Recompute(tiny_model.config))
        torch.testing.assert_close(logits[row], alone[0], atol=1e-4, rtol=1e-4)


def test_when_one_layer_refuses_a_cut_no_layer_is_cut():
    model = random_decoder(tiny_config(sliding_window=4, global_layers=(0,)), seed=2)
    kv = lab04_caches.rolling_cache(LAB.solution("smaller-window"), rewind=2)(model.config)
    model(Batch.of([list(range(20))]), kv)
    with pytest.raises(WorkbenchError, match="the oldest here is 15"):
        kv.truncate(0, 17)
    assert kv.lengths == {0: 20} and [store.length for store in kv.stores[0].values()] == [20, 20]
    kv.truncate(0, 18)
    assert [store.length for store in kv.stores[0].values()] == [18, 18]


def test_int8_bytes_are_codes_scales_and_the_newest_as_they_came(tiny_model):
    kv = lab04_caches.int8_cache(LAB.solution("smaller-int8"), group=4)(tiny_model.config)
    tiny_model(Batch.of([list(range(10))]), kv)
    c = tiny_model.config
    codes = 8 * 2 * c.num_kv_heads * c.head_dim
    scales = 8 * c.num_kv_heads * (2 * c.head_dim + 8)
    newest = 2 * 2 * c.num_kv_heads * c.head_dim * 4
    assert kv.bytes_in_use == c.num_layers * (codes + scales + newest)


def test_a_cache_refuses_the_models_that_it_is_not_for(tiny_model):
    answers = {name: LAB.solution(name) for name in ("smaller-gqa", "smaller-window", "smaller-latent")}
    windowed, sinks = tiny_config(sliding_window=8), tiny_config(sliding_window=8, attention_sinks=2)
    for make, config, message in (
        (lab04_caches.grouped_cache(answers["smaller-gqa"]), windowed, "no sliding window"),
        (lab04_caches.rolling_cache(answers["smaller-window"]), sinks, "no attention sinks"),
        (
            lab04_caches.latent_cache(answers["smaller-latent"]),
            tiny_model.config,
            "models with latent attention",
        ),
        (
            lab04_caches.grouped_cache(answers["smaller-gqa"]),
            tiny_config(kv_sources=(0, 0)),
            "keys of its own",
        ),
    ):
        with pytest.raises(WorkbenchError, match=message):
            make(config)
    with pytest.raises(WorkbenchError, match="needs at least 3 places, got 2"):
        lab04_caches.Ring(4, 2, torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), 1.0)


def test_an_answer_that_gives_nothing_back_is_told_what_it_owes(tiny_model):
    kv = lab04_caches.grouped_cache(lambda q, k, v, *, scale: None)(tiny_model.config)
    with pytest.raises(WorkbenchError, match=r"gave back NoneType; expected \[2, 4, 8\]"):
        tiny_model(Batch.of([[1, 2]]), kv)


def test_the_exercises_send_the_reader_to_sections_that_the_lecture_has():
    text = (ROOT / "solutions" / f"{LAB.name}.py").read_text(encoding="utf-8")
    lecture = (ROOT / "notebooks" / "source" / f"{LAB.name}.py").read_text(encoding="utf-8")
    headings = set(re.findall(r"^# #+ (.+)$", lecture, flags=re.MULTILINE))
    named = [
        name for told in re.findall(r"\*Lab 04, ([^*]+)\.\*", text) for name in re.findall(r'"([^"]+)"', told)
    ]
    assert len(named) >= len(IDS) and set(named) <= headings, set(named) - headings
