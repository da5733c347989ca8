"""Every endpoint and field, asked by the real `openai` client: what comes back is what the engine says."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from serving_claims import engine_of, events, is_error, serving

from workbench.generation import generate
from workbench.serving.api.settings import ServerSettings
from workbench.serving.api.template import plain

MODEL = "stdlib-1m"
PROMPT = "def read_lines(path):\n    "
USER = [{"role": "user", "content": "How do I open a file?"}]


REASONS = {"length": "length", "stop_token": "stop", "stop_string": "stop"}  # generate's words, OpenAI's


def alone(model, prompt=PROMPT, *, max_tokens=24, **options):
    """(text, finish_reason, tokens) of what generate writes for it."""
    done = generate(model, prompt, max_new_tokens=max_tokens, **({"temperature": 0} | options))
    return done.text, REASONS[done.finish_reason], done


def complete(server, prompt=PROMPT, **options):
    body = {"model": MODEL, "max_tokens": 24, "temperature": 0} | options
    return server.openai.completions.create(prompt=prompt, **body)


def joined(stream) -> tuple[str, str | None]:
    """Text and finish_reason of one choice's stream."""
    text, reason = "", None
    for chunk in stream:
        for choice in chunk.choices:
            new = choice.text if isinstance(chunk, Completion) else choice.delta.content or ""
            assert reason is None, "text after the end"
            assert new or choice.finish_reason or getattr(getattr(choice, "delta", None), "role", None)
            text, reason = text + new, choice.finish_reason or reason
    return text, reason


# -- the same text as the engine's ---------------------------------------------------------------------------------

SAMPLED = [
    {},
    {"max_tokens": 1},
    {"stop": "\n"},
    {"stop": ["return", "\n\n"]},
    {"stop": [":"], "max_tokens": 60},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.5, "seed": 4, "top_p": 0.9},
    {"temperature": 0.7, "seed": 2**62},
    {"frequency_penalty": 1.5},
    {"presence_penalty": -1.0, "temperature": 0.5, "seed": 1},
    {"extra_body": {"repetition_penalty": 1.3}},
    {"temperature": 1, "seed": 5, "extra_body": {"top_k": 5}},
    {"temperature": 1, "seed": 6, "extra_body": {"min_p": 0.1}},
    {"extra_body": {"ignore_eos": True}},
    {"extra_body": {"stop_token_ids": [198, 10, 11]}},
    {"logit_bias": {"100": -100, "7": 30}},
]
NAMES = {"frequency_penalty", "presence_penalty", "temperature", "seed", "top_p", "stop", "max_tokens", "logit_bias"}


def as_generate(options: dict, model) -> dict:
    given = {key: value for key, value in options.items() if key in NAMES} | options.get("extra_body", {})
    if given.pop("ignore_eos", False):
        given["stop_token_ids"] = ()
    elif ids := given.get("stop_token_ids"):
        given["stop_token_ids"] = (*model.config.eos_token_ids, *ids)
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    return given


@pytest.mark.parametrize("options", SAMPLED, ids=str)
def test_a_completion_is_the_text_of_generate_whole_and_streamed(server, small_model, options):
    text, reason, done = alone(small_model, **as_generate(options, small_model))
    whole = complete(server, **options)
    [choice] = whole.choices
    assert (choice.text, choice.finish_reason) == (text, reason)
    assert whole.usage.completion_tokens == len(done.tokens)
    assert whole.usage.prompt_tokens == len(small_model.tokenizer.encode_prompt(PROMPT))
    assert joined(complete(server, stream=True, **options)) == (text, reason)


@pytest.mark.parametrize(
    "options",
    [{}, {"stop": "."}, {"temperature": 0.9, "seed": 1}, {"max_completion_tokens": 5}, {"stop": ["e"]}],
    ids=str,
)
def test_a_chat_is_the_text_of_generate_after_its_template(server, small_model, options):
    options = {"max_tokens": 24, "temperature": 0} | options
    if "max_completion_tokens" in options:
        options.pop("max_tokens")
    count = options.get("max_completion_tokens", options.get("max_tokens"))
    stop = [options["stop"]] if isinstance(options.get("stop"), str) else options.get("stop", [])
    text, reason, _ = alone(
        small_model,
        plain(USER),
        max_tokens=count,
        stop=[*stop, "\n# user:", "\n# system:"],
        temperature=options["temperature"],
        seed=options.get("seed"),
    )
    whole = server.client().chat.completions.create(model=MODEL, messages=USER, **options)
    [choice] = whole.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", text, reason)
    stream = server.client().chat.completions.create(model=MODEL, messages=USER, stream=True, **options)
    assert joined(stream) == (text, reason)


def test_samples_share_the_prompt_and_each_has_its_own_seed(server, small_model):
    whole = complete(server, n=3, seed=7, temperature=0.9)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    for at, choice in enumerate(whole.choices):
        assert choice.text == alone(small_model, temperature=0.9, seed=7 + at)[0]
    assert whole.usage.completion_tokens <= 3 * 24
    texts = dict.fromkeys(range(3), "")
    for chunk in complete(server, n=3, seed=7, temperature=0.9, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [*texts.values()] == [choice.text for choice in whole.choices]


def test_a_stop_string_ends_its_own_sample_alone(server, small_model):
    whole = complete(server, n=4, seed=11, temperature=1.2, stop=["a"], max_tokens=40)
    for at, choice in enumerate(whole.choices):
        expected = alone(small_model, temperature=1.2, seed=11 + at, stop=["a"], max_tokens=40)
        assert (choice.text, choice.finish_reason) == expected[:2]
    server.wait_until_empty()


def test_prompts_come_as_text_ids_or_lists_of_either(server, small_model):
    ids = small_model.tokenizer.encode_prompt(PROMPT)
    one = complete(server).choices[0].text
    assert complete(server, ids).choices[0].text == one
    both = complete(server, [PROMPT, "import "])
    assert [choice.index for choice in both.choices] == [0, 1]
    assert [choice.text for choice in both.choices] == [one, complete(server, "import ").choices[0].text]
    assert [choice.text for choice in complete(server, [ids, ids]).choices] == [one, one]
    four = complete(server, [PROMPT, "import "], n=2, temperature=0.5, seed=1)
    assert [choice.index for choice in four.choices] == [0, 1, 2, 3]


def test_an_empty_prompt_begins_as_the_training_texts_do(server, small_model):
    end = small_model.tokenizer.end_of_text
    assert complete(server, "").choices[0].text == complete(server, [end]).choices[0].text


def test_an_equal_prefix_is_found_and_said(server):
    prompt = "class Reader:\n" * 20
    complete(server, prompt)
    again = complete(server, prompt).usage
    assert again.prompt_tokens_details.cached_tokens >= 16
    assert again.prompt_tokens_details.cached_tokens < again.prompt_tokens


# -- log-probabilities ---------------------------------------------------------------------------------


def test_logprobs_of_a_completion_are_those_of_generate(server, small_model):
    _, _, expected = alone(small_model)
    shown = complete(server, logprobs=3).choices[0].logprobs
    assert shown.tokens == [small_model.tokenizer.token_text(token) for token in expected.tokens]
    assert shown.token_logprobs == pytest.approx(expected.log_probs, abs=1e-4)
    assert all(3 <= len(top) <= 4 for top in shown.top_logprobs)
    assert shown.text_offset[0] == 0 and shown.text_offset == sorted(shown.text_offset)


def test_echo_gives_the_prompt_and_what_the_model_thought_of_it(server, small_model):
    whole = complete(server, echo=True, logprobs=1, max_tokens=1).choices[0]
    ids = small_model.tokenizer.encode_prompt(PROMPT)
    assert whole.text.startswith(PROMPT)
    assert whole.logprobs.token_logprobs[0] is None and whole.logprobs.top_logprobs[0] is None
    from workbench.kv import Recompute
    from workbench.models.batch import Batch

    logits = small_model(Batch.of([ids], logits="all"), Recompute(small_model.config))
    rows = logits.log_softmax(dim=-1)
    plain_log_probs = [rows[at, token].item() for at, token in enumerate(ids[1:])]
    assert whole.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(plain_log_probs, abs=1e-4)
    assert whole.text[: whole.logprobs.text_offset[len(ids)]] == PROMPT
    again = complete(server, echo=True, logprobs=1, max_tokens=1).choices[0]  # a prefix hit hides nothing
    assert again.logprobs.token_logprobs[1:] == pytest.approx(whole.logprobs.token_logprobs[1:], abs=1e-5)


def test_echo_alone_computes_no_text(server):
    whole = complete(server, echo=True, max_tokens=0)
    assert whole.choices[0].text == PROMPT and whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 0


def test_an_echo_streams_before_the_text(server):
    whole = complete(server, echo=True, logprobs=0).choices[0]
    chunks = [*complete(server, echo=True, logprobs=0, stream=True)]
    first = chunks[0].choices[0]
    assert first.text == PROMPT and first.logprobs.token_logprobs[0] is None
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    tokens = [token for chunk in chunks if (shown := chunk.choices[0].logprobs) for token in shown.tokens]
    assert tokens == whole.logprobs.tokens


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat_have_bytes_and_the_top_tokens(server, small_model, stream):
    options = {"logprobs": True, "top_logprobs": 2, "max_tokens": 8, "temperature": 0, "stream": stream}
    answer = server.client().chat.completions.create(model=MODEL, messages=USER, **options)
    if stream:
        content = [one for chunk in answer for c in chunk.choices if c.logprobs for one in c.logprobs.content]
    else:
        content = answer.choices[0].logprobs.content
    assert len(content) == 8
    for one in content:
        assert bytes(one.bytes).decode("utf-8", "replace") and one.logprob <= 0
        assert [top.logprob for top in one.top_logprobs] == sorted((t.logprob for t in one.top_logprobs), reverse=True)
        assert one.top_logprobs[0].token == one.token  # greedy


# -- grammars ---------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
GRAMMARS = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, r"\{\"a\": -?\d+\}"),
    ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, r"\{\"a\": -?\d+\}"),
    ({"extra_body": {"structured_outputs": {"regex": "[ab]{3}c"}}}, "[ab]{3}c"),
    ({"extra_body": {"structured_outputs": {"choice": ["yes (1)", "no"]}}}, r"yes \(1\)|no"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options, pattern", GRAMMARS)
def test_a_grammar_is_kept(server, options, pattern, stream):
    answer = server.client().chat.completions.create(
        model=MODEL, messages=USER, max_tokens=200, temperature=1, seed=3, stream=stream, **options
    )
    text, reason = joined(answer) if stream else (answer.choices[0].message.content, answer.choices[0].finish_reason)
    assert reason == "stop" and re.fullmatch(pattern, text), text


# -- the form of a stream ---------------------------------------------------------------------------------


def test_a_stream_of_a_chat_has_the_exact_form(server):
    body = {"model": MODEL, "messages": USER, "max_tokens": 4, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    response = server.post("/v1/chat/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert chunks[-1]["choices"][0]["delta"] == {} and chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == len({chunk["created"] for chunk in chunks}) == 1
    assert all(chunk["usage"] is None for chunk in chunks)
    assert response.text.endswith("data: [DONE]\n\n")
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_each_chunk_has_the_usage_until_then_where_it_is_asked_for(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 6,
        "temperature": 0,
        "stream": True,
        "stream_options": options,
    }
    *chunks, usage, _ = events(server.post("/v1/completions", body).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == usage["usage"]["completion_tokens"] == 6


def test_every_answer_has_all_the_fields_of_the_clients_types(server):
    whole = server.post("/v1/completions", {"model": MODEL, "prompt": PROMPT, "logprobs": 2, "max_tokens": 3}).json()
    Completion.model_validate(whole, strict=True)
    body = {"model": MODEL, "messages": USER, "logprobs": True, "top_logprobs": 1, "max_tokens": 3}
    ChatCompletion.model_validate(server.post("/v1/chat/completions", body).json(), strict=True)


def test_a_comment_keeps_a_silent_stream_open(small_model):
    engine = engine_of(small_model)
    with serving(engine, ServerSettings(ping_seconds=0.05), name=MODEL) as running:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "stream": True}
        ask = httpx.stream("POST", f"{running.url}/v1/completions", json=body)
        with engine._turn, ask as response:  # no step is begun: the request waits
            assert next(response.iter_lines()) == ": ping"
        running.wait_until_empty()


# -- models, tokens, health ---------------------------------------------------------------------------------


def test_models_tokens_and_health(server, small_model):
    client = server.client()
    [card] = client.models.list().data
    assert card.id == MODEL and client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    tokens = server.post("/tokenize", {"prompt": "def é", "return_token_strs": True}).json()
    assert tokens["tokens"] == small_model.tokenizer.encode("def é") and tokens["count"] == len(tokens["token_strs"])
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "def é"}
    chat = server.post("/tokenize", {"messages": USER}).json()
    assert chat["tokens"] == small_model.tokenizer.encode(plain(USER))
    for path in ("/health", "/ready", "/version", "/metrics", "/openapi.json"):
        assert httpx.get(server.url + path).status_code == 200


def test_an_async_client_is_answered_alike(server):
    async def ask():
        async with server.async_client() as client:
            options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
            whole = await client.completions.create(**options)
            stream = await client.completions.create(stream=True, **options)
            text = "".join([choice.text async for chunk in stream for choice in chunk.choices])
            chat = await client.chat.completions.create(model=MODEL, messages=USER, max_tokens=4)
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(**(options | {"temperature": -1}))
            return whole.choices[0].text, text, chat.choices[0].finish_reason

    whole, text, reason = asyncio.run(ask())
    assert whole == text == complete(server).choices[0].text and reason == "length"


def test_many_at_a_time_get_each_its_own_text(server, small_model):
    prompts = [f"def f{at}(x):\n    " for at in range(24)]

    async def ask():
        async with server.async_client() as client:

            async def one(at, prompt):
                options = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0}
                if at % 2:
                    return (await client.completions.create(**options)).choices[0].text
                stream = await client.completions.create(stream=True, **options)
                return "".join([choice.text async for chunk in stream for choice in chunk.choices])

            return await asyncio.gather(*(one(at, prompt) for at, prompt in enumerate(prompts)))

    texts = asyncio.run(ask())
    assert texts == [alone(small_model, prompt, max_tokens=16)[0] for prompt in prompts]


# -- what is wrong ---------------------------------------------------------------------------------

BAD, MISSING = openai.BadRequestError, openai.NotFoundError
WRONG_SAMPLING = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": [0.5]}, "top_p"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 17}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": "2"}, "n"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 1e300}, "max_tokens"),
    ({"max_tokens": 5_000}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"presence_penalty": -2.01}, "presence_penalty"),
    ({"presence_penalty": {}}, "presence_penalty"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a", 3]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["x"] * 1_000_000}, "stop"),
    ({"stop": "x" * 257}, "stop[0]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": 7}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias['1']"),
    ({"logit_bias": {"1": None}}, "logit_bias['1']"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {str(at): 1 for at in range(2_000)}}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        "response_format",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choices": ["a"]}}, "structured_outputs.choices"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
    ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"top_k": -1}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": 3}, "stop_token_ids"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"priority": "high"}, "priority"),
    ({"deadline_ms": 0}, "deadline_ms"),
    ({"deadline_ms": -3}, "deadline_ms"),
    ({"foo": 1}, "foo"),
    ({"maxtokens": 1}, "maxtokens"),
    ({"temprature": 1}, "temprature"),
    ({"x" * 5_000: 1}, "x" * 256),
]
WRONG_COMPLETIONS = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": ["a", [1]], "max_tokens": 1}, "ok"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [4096]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": "word " * 3_000}, "prompt"),
    ({"prompt": [5] * 1_024}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"echo": "yes"}, "echo"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"messages": []}, "messages"),
]
WRONG_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    ({"messages": [{"role": "user", "content": "x", "name": {}}]}, "messages[0].name"),
    ({"messages": USER * 2_000}, "messages"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [1]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"store": True}, "store"),
    ({"prediction": {"type": "content"}}, "prediction"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"prompt": "x"}, "prompt"),
    ({"echo": True}, "echo"),
]


def wrong_id(value) -> str:
    return str(value)[:60]


@pytest.mark.parametrize("changes, param", WRONG_SAMPLING + WRONG_COMPLETIONS, ids=wrong_id)
def test_a_wrong_completion_is_refused_and_names_the_field(server, changes, param):
    refused(server, "/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2} | changes, param)


@pytest.mark.parametrize("changes, param", WRONG_SAMPLING + WRONG_CHATS, ids=wrong_id)
def test_a_wrong_chat_is_refused_and_names_the_field(server, changes, param):
    refused(server, "/chat/completions", {"model": MODEL, "messages": USER} | changes, param)


def refused(server, path, body, param) -> None:
    """By the client's own exception class."""
    ask = server.openai.post
    if param == "ok":
        ask(path, body=body, cast_to=object)
        return
    with pytest.raises(BAD) as error:
        ask(path, body=body, cast_to=object)
    assert error.value.param == param, error.value
    assert error.value.type == "invalid_request_error" and len(str(error.value)) < 1_000


@pytest.mark.parametrize(
    "path, changes, param",
    [
        ("/v1/completions", {"prompt": "\ud800"}, "prompt"),
        ("/v1/completions", {"prompt": "a", "stop": ["\udc00"]}, "stop[0]"),
        ("/v1/completions", {"prompt": "a", "\ud800": 1}, "?"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\udc00"}]}, "messages[0].content"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "\ud800"}}, "structured_outputs.regex"),
    ],
)
def test_half_a_surrogate_pair_is_refused(server, path, changes, param):
    """JSON can write one, and the client cannot."""
    headers = {"content-type": "application/json"}
    answer = httpx.post(server.url + path, content=json.dumps({"model": MODEL} | changes), headers=headers)
    assert is_error(answer, 400)["param"] == param


@pytest.mark.parametrize("name", ["user", "metadata", "safety_identifier", "prompt_cache_key"])
def test_a_harmless_field_is_accepted_and_changes_nothing(server, name):
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    plain_text = server.post("/v1/completions", body).json()["choices"][0]["text"]
    value = {"a": "b"} if name == "metadata" else "x"
    assert server.post("/v1/completions", body | {name: value}).json()["choices"][0]["text"] == plain_text


def test_another_model_is_not_found(server):
    for ask in (server.client().completions.create, server.client().chat.completions.create):
        what = {"prompt": "a"} if "chat" not in repr(ask) else {"messages": USER}
        with pytest.raises(MISSING) as error:
            ask(model="gpt-4", **what)
        assert error.value.code == "model_not_found" and MODEL in str(error.value)


@pytest.mark.parametrize(
    "body, status",
    [
        (b"", 400),
        (b"{", 400),
        (b"[1]", 400),
        (b"null", 400),
        (b'"text"', 400),
        (b'{"a": NaN}', 400),
        (b'{"a": Infinity}', 400),
        (b'{"n": ' + b"9" * 5_000 + b"}", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 50_000, 400),
        (b'{"model": "stdlib-1m", "prompt": "' + b"x" * (5 * 2**20) + b'"}', 413),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_body_that_is_no_json_object_is_refused(server, body, status):
    headers = {"content-type": "application/json"}
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        is_error(httpx.post(server.url + path, content=body, headers=headers, timeout=60), status)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_body_of_another_kind_is_refused(server, path):
    is_error(httpx.post(server.url + path, data={"a": 1}), 415)
    is_error(httpx.post(server.url + path, content=b"{}", headers={"content-type": "text/plain"}), 415)


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/v1/completions/", 404),
    ],
)
def test_other_routes_and_methods_have_the_same_error(server, method, path, status):
    is_error(httpx.request(method, server.url + path), status)


@pytest.mark.parametrize(
    "path, body",
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 3}),
        ("/tokenize", {"prompt": "a", "messages": USER}),
        ("/tokenize", {"prompt": "\ud800"}),
        ("/tokenize", {"prompt": "a", "model": "other"}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": "abc"}),
        ("/detokenize", {"tokens": [5_000]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [1.5]}),
        ("/detokenize", {"tokens": [1], "foo": 1}),
    ],
)
def test_wrong_tokens_are_refused(server, path, body):
    headers = {"content-type": "application/json"}
    answer = httpx.post(server.url + path, content=json.dumps(body).encode(), headers=headers)
    is_error(answer, 404 if body.get("model") == "other" else 400)
