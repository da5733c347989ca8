"""Claims about generate and stream: tokens, counts, times, text, endings, and a learner's own parts."""

from __future__ import annotations

import inspect
import threading
import time
import weakref

import pytest
import torch
from conftest import random_decoder, shipped_tokenizer, tiny_config

from workbench.decoding import Generation, token_loop
from workbench.decoding.text import Detokenizer, StopStrings
from workbench.errors import WorkbenchError
from workbench.generation import generate, stream
from workbench.kv import Recompute
from workbench.models.batch import Batch
from workbench.models.tokenizer import END_OF_TEXT

PROMPT = [77, 300, 12, 950, 41]
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 7, "max_new_tokens": 16, "stop_token_ids": ()}


def scripted(token_ids):
    """A loop that runs the model and yields given tokens, whatever the model says."""

    def loop(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
        text = list(prompt_ids)
        for token_id in token_ids:
            forward(text)
            text.append(token_id)
            yield token_id

    return loop


def write(model, text, *, prompt="x = ", **settings):
    """Generate with the tokens of `text` as if the model had chosen them; the stream's pieces and its result."""
    tokens = model.tokenizer.encode(text) if isinstance(text, str) else text
    settings.setdefault("max_new_tokens", len(tokens))
    events = stream(model, prompt, loop=scripted(tokens), **settings)
    pieces = [token.text for token in events]
    return pieces, events.result()


# -- the loop ---------------------------------------------------------------------------------------------


def test_the_loop_hands_over_the_whole_text_and_takes_the_last_row():
    texts = []

    def forward(token_ids):
        texts.append(list(token_ids))
        return torch.tensor([[9.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, float(len(token_ids))]])

    found = token_loop(forward, (2, 2), lambda logits, token_ids: int(logits.argmax()), 3)
    assert list(found) == [2, 3, 3]
    assert texts == [[2, 2], [2, 2, 2], [2, 2, 2, 3]]


def test_the_loop_yields_the_stop_token_and_ends():
    choices = iter([4, 5, 6, 7])
    calls = []
    loop = token_loop(lambda ids: calls.append(1) or torch.zeros(1, 8), [1], lambda *_: next(choices), 9, (6,))
    assert list(loop) == [4, 5, 6] and len(calls) == 3


def test_greedy_generation_is_the_argmax_of_the_model_step_by_step(tiny_model):
    result = generate(tiny_model, PROMPT, max_new_tokens=12, stop_token_ids=())
    text = list(PROMPT)
    for token_id, log_prob in zip(result.tokens, result.log_probs, strict=True):
        logits = tiny_model(Batch.of([text]), Recompute(tiny_model.config))[0]
        assert token_id == int(logits.argmax())
        assert log_prob == pytest.approx(logits.log_softmax(-1)[token_id].item(), abs=1e-5)
        text.append(token_id)
    assert (result.finish_reason, result.prompt_tokens) == ("length", 5)


# -- counting and time --------------------------------------------------------------------------------------


def test_a_hundred_tokens_after_ten_cost_5950_rows():
    model = random_decoder(tiny_config(context_length=128, vocab_size=64))
    result = generate(model, list(range(1, 11)), max_new_tokens=100, stop_token_ids=(), kv="recompute")
    assert (result.rows_processed, result.model_calls) == (sum(range(10, 110)), 100) == (5950, 100)


def test_rows_are_counted_where_the_model_runs_even_when_a_learners_loop_wastes_some(tiny_model):
    def twice(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
        text = list(prompt_ids)
        for _ in range(max_new_tokens):
            forward(text)
            text.append(choose(forward(text)[-1], text))
            yield text[-1]

    result = generate(tiny_model, PROMPT, max_new_tokens=3, stop_token_ids=(), loop=twice)
    assert (result.rows_processed, result.model_calls) == (2 * (5 + 6 + 7), 6)


def test_log_probs_are_of_the_step_that_chose_the_token_even_if_the_loop_runs_on(tiny_model):
    def one_step_more(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
        text = list(prompt_ids)
        for _ in range(max_new_tokens):
            text.append(choose(forward(text)[-1], text))
            yield text[-1]
        forward(text)

    right = generate(tiny_model, PROMPT, max_new_tokens=2, stop_token_ids=())
    result = generate(tiny_model, PROMPT, max_new_tokens=2, stop_token_ids=(), loop=one_step_more)
    assert result.log_probs == right.log_probs and result.model_calls == 3


def test_only_what_the_kv_does_not_remember_is_sent(tiny_model):
    """A kv that claims to keep everything gets the prompt once and then one row a step."""

    class Keeps(Recompute):
        def begin(self, batch):
            for name, length in zip(batch.sequences, batch.lengths_after()):
                self._live[name] = length

    result = generate(tiny_model, PROMPT, max_new_tokens=10, stop_token_ids=(), kv=Keeps)
    assert (result.rows_processed, result.model_calls) == (5 + 9, 10)


def test_times_are_measured_from_the_request_to_each_token(tiny_model):
    class Slow(Recompute):
        def begin(self, batch):
            time.sleep(0.05 if batch.num_tokens == len(PROMPT) else 0.02)
            super().begin(batch)

    before = time.perf_counter()
    result = generate(tiny_model, PROMPT, max_new_tokens=4, stop_token_ids=(), kv=Slow)
    total = time.perf_counter() - before
    assert result.token_times_s == sorted(result.token_times_s) and len(result.token_times_s) == 4
    assert 0.05 <= result.ttft_s == result.token_times_s[0]
    assert result.tpot_s == pytest.approx((result.token_times_s[-1] - result.ttft_s) / 3)
    assert result.tpot_s >= 0.02 and result.token_times_s[-1] <= total
    assert generate(tiny_model, PROMPT, max_new_tokens=1).tpot_s is None


# -- chance ----------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(tiny_model):
    first = generate(tiny_model, PROMPT, **SAMPLED)
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    assert generate(tiny_model, PROMPT, **SAMPLED).tokens == first.tokens
    assert generate(tiny_model, PROMPT, **SAMPLED | {"seed": 8}).tokens != first.tokens
    unseeded = [generate(tiny_model, PROMPT, **SAMPLED | {"seed": None}).tokens for _ in range(2)]
    assert unseeded[0] != unseeded[1]
    assert torch.equal(torch.random.get_rng_state(), state)  # torch's global numbers were never touched


def test_log_probs_are_the_models_own_before_any_filter(tiny_model):
    result = generate(tiny_model, PROMPT, **SAMPLED | {"temperature": 3.0, "top_k": 5, "max_new_tokens": 5})
    batch = Batch.of([PROMPT + result.tokens], logits="all")
    whole = tiny_model(batch, Recompute(tiny_model.config)).log_softmax(-1)
    expected = [whole[len(PROMPT) - 1 + i, t].item() for i, t in enumerate(result.tokens)]
    assert result.log_probs == pytest.approx(expected, abs=1e-4)


def test_penalties_see_the_prompt_or_the_generated_tokens_as_defined(tiny_model):
    seen = []

    def repetition(logits, token_ids, penalty):
        seen.append(("repetition", token_ids))
        return logits

    def presence(logits, generated_ids, penalty):
        seen.append(("presence", generated_ids))
        return logits

    result = generate(
        tiny_model,
        PROMPT,
        max_new_tokens=3,
        stop_token_ids=(),
        repetition_penalty=1.1,
        presence_penalty=0.1,
        filters={"repetition_penalty": repetition, "presence_penalty": presence},
    )
    for step in range(3):
        assert seen[2 * step] == ("repetition", PROMPT + result.tokens[:step])
        assert seen[2 * step + 1] == ("presence", result.tokens[:step])


# -- text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [SAMPLED, SAMPLED | {"seed": 11}, {"max_new_tokens": 20}])
def test_streamed_and_unstreamed_are_the_same_request(tiny_model, settings):
    events = stream(tiny_model, "def f(", **settings)
    tokens = list(events)
    streamed, whole = events.result(), generate(tiny_model, "def f(", **settings)
    assert "".join(token.text for token in tokens) == streamed.text == whole.text
    assert [token.token_id for token in tokens] == streamed.tokens == whole.tokens
    assert [token.log_prob for token in tokens] == streamed.log_probs == whole.log_probs
    if whole.finish_reason == "length":
        assert whole.text == tiny_model.tokenizer.decode(whole.tokens)


def test_pieces_are_never_half_a_character(tiny_model):
    text = "naïve → 你好 🙂🙃 ok ﷺ\n"
    assert len(tiny_model.tokenizer.encode("🙂")) > 1  # or this test would claim nothing
    pieces, result = write(tiny_model, text)
    assert result.text == "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 5  # and it does come in pieces


def test_text_comes_as_soon_as_it_is_certain(tiny_model):
    pieces, _ = write(tiny_model, "return value", stop=["\n\n", "#"])
    tokens = [tiny_model.tokenizer.token_text(t) for t in tiny_model.tokenizer.encode("return value")]
    assert pieces == tokens


def test_bytes_that_never_become_a_character_show_as_replacement_characters(tiny_model):
    ids = tiny_model.tokenizer.encode("a🙂b")
    for cut in ([*ids[:2], *ids[-1:]], ids[:3], ids[1:]):  # broken inside, cut off at the end, whole
        pieces, result = write(tiny_model, cut)
        assert result.text == "".join(pieces) == tiny_model.tokenizer.decode(cut)


def test_a_character_split_between_prompt_and_generation_is_decoded_as_far_as_it_goes(tiny_model):
    ids = tiny_model.tokenizer.encode("a🙂b")
    _, result = write(tiny_model, ids[2:], prompt=ids[:2])
    assert result.text == tiny_model.tokenizer.decode(ids[2:])


def test_a_tokenizer_that_strips_the_first_space_of_a_text_keeps_it_within():
    """As Llama 2's does: the piece after the prompt must keep the space that a text of its own would lose."""

    class Strips:
        def decode(self, ids):
            return "".join([" def", " read", " lines"][i] for i in ids).removeprefix(" ")

    detokenizer = Detokenizer(Strips(), [0])
    assert [detokenizer.add(i) for i in (1, 2, 0)] == [" read", " lines", " def"]


@pytest.mark.parametrize(
    "stop, expected",
    [
        ("return", "    x = 1\n    "),
        ("\n    return y\n\n", "    x = 1"),  # spans many tokens
        (["y\n\nclass", "x = 2", "n y"], "    x = 1\n    retur"),  # several: the first to appear
        ("= 1", "    x "),
        ("never", "    x = 1\n    return y\n\nclass A"),
    ],
)
def test_a_stop_string_ends_the_text_before_it_and_no_part_is_shown(tiny_model, stop, expected):
    text = "    x = 1\n    return y\n\nclass A"
    pieces, result = write(tiny_model, text, stop=stop)
    assert "".join(pieces) == result.text == expected
    found = expected != text
    assert result.finish_reason == ("stop_string" if found else "length")
    spoken = tiny_model.tokenizer.decode(result.tokens)
    stops = [stop] if isinstance(stop, str) else stop
    assert any(s in spoken for s in stops) == found  # the tokens go as far as the one that completed it
    assert not any(s in tiny_model.tokenizer.decode(result.tokens[:-1]) for s in stops)
    shown = ""
    for piece in pieces:  # what was shown was always a part of the final text
        shown += piece
        assert expected.startswith(shown)


def test_stop_strings_hold_back_the_longest_possible_beginning_only():
    stops = StopStrings(["aab", "bc"])
    assert [stops.add(c) for c in "xaaab"] == ["x", "", "", "a", ""] and stops.found
    stops = StopStrings(["aab", "bc"])
    assert [stops.add(c) for c in "abd"] == ["", "a", "bd"]
    assert stops.add("za") == "z" and stops.finish() == "a"
    stops = StopStrings(["bc", "aab"])
    assert stops.add("x aab bc") == "x " and stops.found  # the first in the text, not in the list


@pytest.mark.parametrize("pieces", ["abcd", ["abcd"], ["ab", "cd"], ["a", "bcd"]])
def test_the_stop_string_that_is_complete_first_ends_the_text_however_it_is_cut(pieces):
    """As one piece the text began with the longer one, and was cut there."""
    stops, shown = StopStrings(["bcd", "c"]), ""
    for piece in pieces:
        shown += stops.add(piece)
        if stops.found:
            break
    assert shown == "ab"


def test_a_stop_string_in_the_prompt_does_not_count(tiny_model):
    _, result = write(tiny_model, "y = 1", prompt="stop here: stop", stop="stop")
    assert (result.text, result.finish_reason) == ("y = 1", "length")


def test_the_stop_token_is_a_token_but_not_text():
    tokenizer = shipped_tokenizer()
    end = tokenizer.end_of_text
    tiny_model = random_decoder(tiny_config(eos_token_ids=(end,)), tokenizer=tokenizer)
    ids = [*tokenizer.encode("pass\n"), end]
    pieces, result = write(tiny_model, ids, max_new_tokens=40)  # the model's own end-of-text token
    assert (result.text, result.finish_reason, result.tokens) == ("pass\n", "stop_token", ids)
    assert len(pieces) == len(result.log_probs) == len(ids)
    assert write(tiny_model, ids, stop_token_ids=())[1].text == "pass\n" + END_OF_TEXT
    held_back, result = write(tiny_model, ids, max_new_tokens=40, stop="s\nX")
    assert "".join(held_back) == result.text == "pass\n"  # what waited for a stop string comes with the end


def test_a_model_without_tokenizer_works_on_token_ids_alone():
    model = random_decoder(tiny_config(vocab_size=64), name="bare")
    result = generate(model, [1, 2, 3], max_new_tokens=4, stop_token_ids=())
    assert (result.text, len(result.tokens)) == ("", 4)
    with pytest.raises(WorkbenchError, match="model 'bare' has no tokenizer; give the prompt as a list"):
        generate(model, "text")
    with pytest.raises(WorkbenchError, match="no tokenizer, so stop strings"):
        generate(model, [1], stop="x")


# -- endings: however it ends, the kv is as it was ----------------------------------------------------------


def test_a_cancel_event_ends_it_within_one_step(tiny_model):
    cancel, kv = threading.Event(), Recompute(tiny_model.config)
    events = stream(tiny_model, PROMPT, **SAMPLED, cancel=cancel, kv=kv)
    tokens = []
    for token in events:
        tokens.append(token)
        if len(tokens) == 3:
            cancel.set()
    result = events.result()
    assert (len(tokens), result.finish_reason, result.model_calls) == (3, "cancelled", 3)
    assert "".join(token.text for token in tokens) == result.text
    assert not kv.lengths
    nothing = generate(tiny_model, PROMPT, cancel=cancel)
    assert (nothing.tokens, nothing.ttft_s, nothing.finish_reason, nothing.model_calls) == ([], None, "cancelled", 0)


def test_a_kv_handed_in_is_released_in_every_ending_and_can_be_used_again(tiny_model):
    kv = Recompute(tiny_model.config)
    first = generate(tiny_model, PROMPT, max_new_tokens=3, kv=kv)
    assert not kv.lengths

    events = stream(tiny_model, PROMPT, max_new_tokens=9, kv=kv)
    next(events)
    assert len(kv.lengths) == 1
    events.close()
    assert not kv.lengths and events.result().finish_reason == "cancelled"
    assert list(events) == []

    events = stream(tiny_model, PROMPT, max_new_tokens=9, kv=kv)
    next(events)
    forgotten = weakref.ref(events)
    del events
    assert forgotten() is None and not kv.lengths

    def fails(logits, k):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        generate(tiny_model, PROMPT, temperature=1.0, top_k=3, filters={"top_k": fails}, kv=kv)
    assert not kv.lengths
    assert generate(tiny_model, PROMPT, max_new_tokens=3, kv=kv).tokens == first.tokens


def test_the_kv_is_free_as_soon_as_the_last_token_is_there(tiny_model):
    kv = Recompute(tiny_model.config)
    events = stream(tiny_model, PROMPT, max_new_tokens=2, stop_token_ids=(), kv=kv)
    next(events), next(events)
    assert not kv.lengths and events.result().finish_reason == "length"


def test_two_streams_share_one_kv_without_meeting(tiny_model):
    kv = Recompute(tiny_model.config)
    alone = [generate(tiny_model, prompt, max_new_tokens=5, stop_token_ids=()).tokens for prompt in ([5, 6], [9])]
    both = [stream(tiny_model, p, max_new_tokens=5, stop_token_ids=(), kv=kv) for p in ([5, 6], [9])]
    tokens = [(next(both[0]), next(both[1]))]
    assert len(kv.lengths) == 2
    tokens += zip(*both)
    assert [[token.token_id for token in one] for one in zip(*tokens)] == alone
    assert not kv.lengths


def test_a_result_before_the_end_or_after_an_error_is_refused(tiny_model):
    events = stream(tiny_model, PROMPT, max_new_tokens=3)
    with pytest.raises(WorkbenchError, match="not at its end"):
        events.result()
    broken = stream(tiny_model, PROMPT, max_new_tokens=3, loop=scripted([1.5]))
    with pytest.raises(WorkbenchError, match="float"):
        next(broken)
    assert list(broken) == []
    broken.close()
    with pytest.raises(WorkbenchError, match="an error ended it"):
        broken.result()


# -- a learner's own parts --------------------------------------------------------------------------------------


def test_a_learners_loop_gets_the_arguments_of_token_loop_and_gives_the_same_result(tiny_model):
    got = {}

    def mine(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
        got.update(prompt=list(prompt_ids), most=max_new_tokens, stop=tuple(stop_token_ids))
        while max_new_tokens > 0:
            prompt_ids.append(choose(forward(prompt_ids)[-1], prompt_ids))
            yield prompt_ids[-1]
            max_new_tokens = 0 if prompt_ids[-1] in stop_token_ids else max_new_tokens - 1

    ours = generate(tiny_model, PROMPT, **SAMPLED)
    theirs = generate(tiny_model, PROMPT, **SAMPLED, loop=mine)
    assert theirs.tokens == ours.tokens and theirs.rows_processed == ours.rows_processed
    assert got == {"prompt": PROMPT, "most": 16, "stop": ()}
    assert list(inspect.signature(mine).parameters) == list(inspect.signature(token_loop).parameters)


def one_too_many(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
    yield from token_loop(forward, prompt_ids, choose, max_new_tokens + 1, stop_token_ids)


def one_too_few(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
    yield from token_loop(forward, prompt_ids, choose, max_new_tokens - 1, stop_token_ids)


def no_yield(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
    return [choose(forward(prompt_ids)[-1], prompt_ids)]


def no_forward(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
    yield 1


def yields_tensor(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
    yield forward(prompt_ids)[-1].argmax()


def forgets_the_last_row(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
    yield choose(forward(prompt_ids), prompt_ids)


@pytest.mark.parametrize(
    "loop, message",
    [
        (one_too_many, "yielded one more token after 4 tokens, max_new_tokens"),
        (one_too_few, "ended before token 4 of at most 4"),
        (no_yield, "must return an iterator of token ids, got list; write it with yield"),
        (no_forward, "yielded token 1 of at most 4 before it called forward"),
        (yields_tensor, "token 1 of at most 4 is of type Tensor"),
        (forgets_the_last_row, r"use the last row, logits\[-1\]"),
        (scripted([4096]), r"token id 4096 as token 1 of at most 4; ids lie in 0 … 4095"),
        (scripted([True]), "of type bool"),
        (scripted([7, 0, 7]), "one more token after a stop token: 7"),
    ],
)
def test_a_loop_that_breaks_its_promise_is_told_how(tiny_model, loop, message):
    kv = Recompute(tiny_model.config)
    with pytest.raises(WorkbenchError, match=message):
        generate(tiny_model, PROMPT, max_new_tokens=4, loop=loop, kv=kv, stop_token_ids=(0,))
    assert not kv.lengths


def test_a_learners_filter_decides_what_is_generated(tiny_model):
    def only_42(logits, p):
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([42]), 0.0)

    result = generate(tiny_model, PROMPT, temperature=1.0, top_p=0.9, max_new_tokens=3, filters={"top_p": only_42})
    assert result.tokens == [42, 42, 42]


def test_filters_that_would_never_run_are_refused(tiny_model):
    mine = {"top_p": lambda logits, p: logits}
    for settings in ({}, {"temperature": 1.0}, {"temperature": 0.0, "top_p": 0.5}):
        with pytest.raises(WorkbenchError, match="filters replaces top_p, but"):
            generate(tiny_model, PROMPT, filters=mine, **settings)
    with pytest.raises(WorkbenchError, match="unknown filter 'topp'; did you mean 'top_p'"):
        generate(tiny_model, PROMPT, filters={"topp": mine["top_p"]})


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, settings, message",
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        (None, {}, "must be text or a list of token ids, got None"),
        ("\ud800", {}, "no valid Unicode"),
        ([1, 4096], {}, r"lie in 0 … 4095, the prompt\[1\] is 4096"),
        ([-1], {}, r"prompt\[0\] is -1"),
        ([1, 2.0], {}, r"whole numbers of at least 0, the prompt\[1\] is 2.0"),
        ([True], {}, r"whole numbers of at least 0, the prompt\[0\] is True"),
        ([1] * 300, {}, "the prompt of 300 tokens and max_new_tokens=64 make 364, and .* 256; shorten the prompt"),
        ([1] * 250, {"max_new_tokens": 7}, "ask for at most 6 new tokens, or shorten the prompt"),
        ("x", {"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0"),
        ("x", {"max_new_tokens": -3}, "got -3"),
        ("x", {"max_new_tokens": 5.0}, "got 5.0"),
        ("x", {"max_new_tokens": True}, "got True"),
        ("x", {"temperature": float("nan")}, "temperature"),
        ("x", {"top_p": 0.0}, "top_p"),
        ("x", {"top_k": 1.5}, "top_k"),
        ("x", {"temprature": 1.0}, "unknown generate setting 'temprature'; did you mean 'temperature'"),
        ("x", {"seed": -1}, "seed"),
        ("x", {"seed": 1.0}, "seed"),
        ("x", {"seed": 2**64}, "seed"),
        ("x", {"stop": ""}, "at least one character, got ''"),
        ("x", {"stop": ["a", ""]}, "at least one character"),
        ("x", {"stop": 3}, "stop takes a text or a list of texts, got 3"),
        ("x", {"stop_token_ids": 3}, "stop_token_ids must be a list of token ids, got 3"),
        ("x", {"stop_token_ids": [9999]}, r"lie in 0 … 4095, stop_token_ids\[0\] is 9999"),
        ("x", {"kv": "recompte"}, "did you mean 'recompute'"),
        ("x", {"kv": 3}, "int has no lengths"),
    ],
)
def test_bad_requests_are_refused_before_the_model_runs(tiny_model, prompt, settings, message):
    for ask in (generate, stream):
        with pytest.raises(WorkbenchError, match=message):
            ask(tiny_model, prompt, **settings)


def test_the_context_may_be_filled_to_its_last_token(tiny_model):
    assert len(generate(tiny_model, [1] * 250, max_new_tokens=6, stop_token_ids=()).tokens) == 6


def test_a_model_that_gives_nan_is_named():
    model = random_decoder(tiny_config(vocab_size=64))
    model.norm.weight.fill_(torch.nan)
    with pytest.raises(WorkbenchError, match="the model gave NaN"):
        generate(model, [1, 2])


def test_generate_shows_the_settings_of_stream_to_help_and_tab_completion():
    shown, real = inspect.signature(generate), inspect.signature(stream)
    assert list(shown.parameters) == list(real.parameters)
    assert Generation.__name__ in str(shown.return_annotation)


def test_float16_and_bfloat16_models_are_sampled_in_float32():
    model = random_decoder(tiny_config(vocab_size=64)).to(torch.bfloat16)
    seen = []

    def mine(logits, temperature):
        seen.append(logits.dtype)
        return logits / temperature

    generate(model, [1], max_new_tokens=2, temperature=0.5, stop_token_ids=(), filters={"temperature": mine})
    assert seen == [torch.float32] * 2
