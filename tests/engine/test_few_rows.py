"""The verification of drafted tokens as one compiled call against the plain decoder: the same logits, the same cache,
and nothing beyond it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_fast import SHAPES, needs_compiler
from test_parity import TOLERANCE, relative_difference

from workbench.decoding.log_probs import with_prompt_rows
from workbench.decoding.sequence import Sequence
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kv import KV, Contiguous, Paged, Recompute
from workbench.models import Batch, Decoder, one_call, prepare
from workbench.models.compiled import ROWS
from workbench.models.fast import FastDecoder
from workbench.models.linear import Matvec
from workbench.models.one_call import OneCall
from workbench.native.compiler import OFF
from workbench.serving import Request
from workbench.speculation import ModelDraft
from workbench.speculation.drafts import NGramDraft
from workbench.speculation.drafts.ngram_table import NGramTable

SMALL, LARGE = ROWS
ROOM, CACHED = 40, 20
CONFIG = tiny_config(vocab_size=64, context_length=4096)
CASES = {  # shape, type of the weights
    "GQA, float32": (CONFIG, torch.float32),
    "window 8, float32": (SHAPES["mistral window 8"], torch.float32),
    "norm on q and k, bfloat16": (SHAPES["qwen3, norm on q, k"], torch.bfloat16),
    "positions embedded, biases": (SHAPES["gpt2"], torch.float32),
}
FIRST = next(iter(CASES))
COMPILED = [  # half a minute each where nothing is kept yet
    (FIRST, SMALL),
    pytest.param(FIRST, LARGE, marks=pytest.mark.slow),
    pytest.param("window 8, float32", LARGE, marks=pytest.mark.slow),
    pytest.param("norm on q and k, bfloat16", SMALL, marks=pytest.mark.slow),
]


@functools.cache
def case(name: str) -> tuple[Decoder, FastDecoder]:
    """Made once: what is compiled serves all tests of this file."""
    config, dtype = CASES[name]
    model = random_decoder(config).to(dtype)
    return model, prepare(model, compile=True, say=lambda line: None)


def text(count: int, vocab_size: int = 64, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=draw).tolist()


def rows_of(ids: list[int], name: str = "a", first: int = CACHED, **settings) -> Batch:
    return Batch.of([ids], first_positions=[first], sequences=[name], **{"logits": "all", **settings})


def cached(model: Decoder, ids: list[int], slots: int = 1, room: int = ROOM) -> Contiguous:
    """A cache with these tokens, in the second slot where there are several."""
    kv = Contiguous(model.config, max_sequences=slots, max_tokens=room, dtype=model.dtype)
    with torch.inference_mode():
        if slots > 1:
            model(Batch.of([ids[:3]], sequences=["other"]), kv)
        model(Batch.of([ids], sequences=["a"]), kv)
    return kv


Take = Callable[[Batch, Contiguous], torch.Tensor]


def same_as_the_decoder(name: str, length: int, rows: int, take: Take, slots: int = 1, room: int = ROOM) -> None:
    """`take` gives the logits of a verification of so many rows behind so many tokens, and fills the cache."""
    model, _ = case(name)
    ids = text(length + rows, model.config.vocab_size, rows)
    kv, plain = (cached(model, ids[:length], slots, room) for _ in "ab")
    batch, near = rows_of(ids[length:], first=length), TOLERANCE if model.dtype == torch.float32 else 0.05
    with torch.inference_mode():
        got, expected = take(batch, kv).double(), model(batch, plain).double()
        if model.dtype == torch.bfloat16:  # as far from the same weights in float64 as the decoder's, or twice that
            exact = copy.deepcopy(model).double()(Batch.of([ids], logits="all"), Recompute(model.config))[length:]
            assert relative_difference(got, exact) < 2 * relative_difference(expected, exact)
    assert got.shape == expected.shape and relative_difference(got, expected) < near
    new = (slice(None), kv._slots["a"], slice(None), slice(length, length + rows))
    for mine, theirs in ((kv._keys, plain._keys), (kv._values, plain._values)):
        assert relative_difference(mine[new], theirs[new]) < near
        mine[new] = theirs[new]
        assert torch.equal(mine, theirs), "padding leaves no trace, and nothing else was written"


@needs_compiler
@pytest.mark.parametrize("size", (1, *ROWS))
@pytest.mark.parametrize("name", CASES)
def test_the_step_that_is_compiled_is_the_decoders_and_padding_leaves_no_trace(name, size):
    """As torch runs it: every number of rows, near the beginning of a text and far beyond a window."""
    _, fast = case(name)
    step = OneCall.__new__(OneCall)
    step.rows, step._runner = size, AsItIs(one_call._Step(fast._steps.given, size, fast.config.sliding_window))

    def run(batch: Batch, kv: Contiguous) -> torch.Tensor:
        storage, ids = kv.step_storage("a", batch.num_tokens), batch.token_ids.tolist()
        logits, _ = step(ids, storage, fast._tables_for(storage.length + len(ids)))
        kv.note_step("a", len(ids))
        return logits

    for rows in range(1, size + 1):
        for length in (2, 5, 7, CACHED):
            same_as_the_decoder(name, length, rows, run, room=length + rows)


class AsItIs:
    """A step in the place of its library."""

    def __init__(self, step: torch.nn.Module) -> None:
        self._step = step

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(self._step(*inputs))


@needs_compiler
@pytest.mark.parametrize(("name", "size"), COMPILED)
def test_compiled_it_is_the_same_in_any_slot_and_up_to_the_caches_end(name, size):
    _, fast = case(name)

    def take(batch: Batch, kv: Contiguous) -> torch.Tensor:
        logits = fast(batch, kv)
        assert f"{batch.num_tokens} rows are one call of {size}, " in fast.compiled_reason
        assert kv.lengths["a"] == batch.first_positions[0] + batch.num_tokens
        return logits

    for rows in range(2 if size == SMALL else SMALL + 1, size + 1):
        same_as_the_decoder(name, CACHED, rows, take, slots=3)
        same_as_the_decoder(name, CACHED, rows, take, room=CACHED + rows)
        same_as_the_decoder(name, 2, rows, take, room=64)


@needs_compiler
def test_compiled_one_loop_reads_the_weight_for_all_rows():
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    weight, x = torch.randn(56, 32), torch.randn(LARGE, 32)
    linear = Matvec(weight)
    compiled = torch.compile(lambda x: linear(x * 0.5), options=one_call.OPTIONS)
    y, (code,) = run_and_get_code(compiled, x)
    assert relative_difference(y, x * 0.5 @ weight.T) < TOLERANCE
    assert code.count("<static_cast<int64_t>(56L)") == 1


@needs_compiler
def test_rejected_rows_are_cut_and_the_text_goes_on():
    model, fast = case(FIRST)
    ids = text(CACHED + 30)
    kv, plain = cached(model, ids[:CACHED]), cached(model, ids[:CACHED])
    with torch.inference_mode():
        for rows, stay in ((SMALL, 1), (SMALL, SMALL), (2, 1), (3, 3)):
            length = kv.lengths["a"]
            wrong = [*ids[length : length + stay], *text(rows - stay, seed=7)]
            for which, one in ((fast, kv), (model, plain)):
                which(rows_of(wrong, first=length), one)
                one.truncate("a", length + stay)
        length = kv.lengths["a"]
        step, expected = (
            fast.step(ids[length], length, "a", kv),
            model(rows_of(ids[length : length + 1], first=length), plain),
        )
    assert relative_difference(step[0], expected) < TOLERANCE
    assert relative_difference(kv._keys, plain._keys) < TOLERANCE and dict(kv.lengths) == dict(plain.lengths)


class Counted:
    """How many batches of a model went the ordinary way, by their rows."""

    def __init__(self, model: FastDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        hidden = model.hidden
        monkeypatch.setattr(model, "hidden", lambda batch, kv: self.rows.append(batch.num_tokens) or hidden(batch, kv))


@needs_compiler
@pytest.mark.parametrize("length", (1, 4, pytest.param(8, marks=pytest.mark.slow)))
@pytest.mark.parametrize("draft", ("prompt_lookup", "ngram", "the same model", "another model"))
def test_speculation_gives_the_tokens_of_plain_greedy_decoding(draft, length, monkeypatch):
    model, fast = case(FIRST)
    prompt, small = text(6, seed=3) * 3, fast
    if "model" in draft:  # of the same weights: all of its tokens are accepted; of others: hardly any
        if draft == "another model":
            small = prepare(random_decoder(CONFIG, seed=1), compile=True, say=lambda line: None)
        draft = ModelDraft(small)
    elif draft == "ngram":
        draft = NGramDraft(NGramTable.of([prompt * 3], CONFIG.vocab_size, order=3))
    elsewhere = {Counted(one, monkeypatch) for one in {fast, small}}
    got = generate(fast, prompt, max_new_tokens=50, kv="contiguous", draft=draft, draft_length=length)
    expected = generate(model, prompt, max_new_tokens=50, kv="contiguous")
    assert got.tokens == expected.tokens and "are one call of" in fast.compiled_reason
    assert got.speculation.calls_saved or small is not fast
    assert all(set(one.rows) <= {len(prompt), len(prompt) + 1} for one in elsewhere), "prompts alone are no calls"


@needs_compiler
def test_what_is_no_verification_goes_the_ordinary_way_by_name():
    model, fast = case(FIRST)
    ids = text(CACHED + LARGE + 1)

    def holding(kv) -> KV:
        model(Batch.of([ids[:CACHED]], sequences=["a"]), kv)
        return kv

    def taken(batch: Batch, make: Callable[[], KV]) -> str:
        assert relative_difference(fast(batch, make()), model(batch, make())) < TOLERANCE
        return fast.compiled_reason.partition("; ")[2]

    def usual() -> KV:
        return cached(model, ids[:CACHED])

    with torch.inference_mode():
        tree = rows_of(ids[CACHED : CACHED + 3], parents=[[-1, 0, 0]])
        assert taken(tree, usual) == "a tree runs as it is"
        two = Batch.of([[5, 6], [7]], first_positions=[CACHED, 3], sequences=["a", "other"], logits="all")
        assert taken(two, lambda: cached(model, ids[:CACHED], 2)) == "2 sequences together run as they are"
        assert f"{LARGE + 1} rows run as they are: up to {LARGE}" in taken(rows_of(ids[CACHED:]), usual)
        other = taken(rows_of([5, 6]), lambda: holding(Paged(CONFIG, max_sequences=1, attention="sdpa")))
        assert other == "2 rows run as they are: Paged shows no storage for one call"
        on_top = taken(rows_of([5, 6]), lambda: holding(Rounds(CONFIG, max_tokens=ROOM)))
        assert on_top == "2 rows run as they are: the kv takes these tokens in a batch alone"


class Rounds(Contiguous):
    """One that attends in a way of its own."""


@needs_compiler
def test_prompts_and_forced_tokens_are_neither_compiled_nor_spoken_of(monkeypatch):
    model, _ = case(FIRST)
    fast = prepare(model, compile=True, say=lambda line: None)
    monkeypatch.setattr(one_call, "build", lambda *given: pytest.fail("something was compiled"))
    kv = Contiguous(CONFIG)
    with torch.inference_mode():
        fast(Batch.of([[5, 6, 7]], sequences=["a"], logits="all"), kv)  # a prompt that is scored
        fast(rows_of([1, 2, 3], first=3, logits="last"), kv)  # a chunk of one, or what a grammar forces
        request = Request("a", tuple(range(12)), 1, prompt_log_probs=0)
        scored = Sequence("a", list(request.prompt_ids), 12, 1, request=request, prompt_log_probs=[None] * 12)
        chunk = with_prompt_rows(rows_of([6, 7, 8], first=6, logits="last"), [scored], 0)
        assert chunk.logit_rows is None and len(fast(chunk, kv)) == 3, "a chunk of few tokens, all scored"
    assert fast.compiled_reason == "no step was taken yet"


@needs_compiler
def test_without_room_or_tokens_to_look_up_the_error_is_the_ordinary_one_and_nothing_changes():
    model, fast = case(FIRST)
    kv = cached(model, text(CACHED), room=CACHED + 2)
    before = kv._keys.clone()
    with torch.inference_mode():
        with pytest.raises(WorkbenchError, match=f"would grow to {CACHED + 3} tokens"):
            fast(rows_of([1, 2, 3]), kv)
        with pytest.raises(WorkbenchError, match="stands at position"):
            fast(rows_of([1, 2], first=CACHED - 1), kv)
        with pytest.raises(IndexError):
            fast(rows_of([1, 64]), kv)
        kv.truncate("a", CACHED)
        assert torch.equal(kv._keys, before) and kv.lengths["a"] == CACHED
        assert (
            relative_difference(fast(rows_of([1, 2]), kv), model(rows_of([1, 2]), cached(model, text(CACHED))))
            < TOLERANCE
        )


@needs_compiler
def test_where_a_token_sees_itself_alone_steps_run_as_they_are():
    config = tiny_config(vocab_size=64, context_length=64, family="mistral", sliding_window=1)
    model = random_decoder(config)
    fast, ids = prepare(model, compile=True, say=lambda line: None), text(8)
    kv = cached(model, ids[:4])
    with torch.inference_mode():
        got = torch.cat([fast(rows_of(ids[4:5], first=4), kv), fast(rows_of(ids[5:], first=5), kv)])
        expected = model(Batch.of([ids], logits="all"), Recompute(config))[4:]
    assert relative_difference(got, expected) < TOLERANCE


@needs_compiler
def test_rows_that_cannot_be_compiled_run_as_they_are_and_steps_of_one_row_stay_calls(monkeypatch):
    from workbench.models import kept

    model, said = case(FIRST)[0], []
    fast, ready = prepare(model, compile=True, say=said.append), kept.ready_step

    def failing(given, config, stored, rows, *others):
        if rows > 1:
            raise WorkbenchError("no room on the disk")
        return ready(given, config, stored, rows, *others)

    monkeypatch.setattr(kept, "ready_step", failing)
    asked = {"max_new_tokens": 30, "kv": "contiguous"}
    for _ in range(2):
        got = generate(fast, [5, 6] * 4, draft="prompt_lookup", **asked)
        assert got.tokens == generate(model, [5, 6] * 4, **asked).tokens
    assert "a step is one call" in fast.compiled_reason and "as they are: no room on the disk" in fast.compiled_reason
    assert [line for line in said if "no room" in line] == [
        f"steps of {SMALL} rows of tiny are not compiled and run as they are: no room on the disk"
    ]


def test_without_a_compiler_rows_run_as_they_are(monkeypatch):
    monkeypatch.setenv(OFF, "1")
    model = random_decoder(CONFIG)
    fast = prepare(model, compile=True, say=lambda line: None)
    asked = {"max_new_tokens": 20, "kv": "contiguous"}
    got = generate(fast, [5, 6] * 4, draft="prompt_lookup", **asked)
    assert got.tokens == generate(model, [5, 6] * 4, **asked).tokens and fast.compiled_reason == f"{OFF} is set"
