"""From a request body to what the engine is asked for: a `Call`, then its `Request`s.

`Call.read` checks every field and costs little. `Call.requests` makes tokens and grammars and may take a while: it runs
beside the event loop, after the request has its place in the queue.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from workbench.decoding.sampling import SamplingSettings
from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.serving.api.errors import ApiError
from workbench.serving.api.fields import CHAT, COMPLETION, read_fields, read_text, refused, whole, wrong
from workbench.serving.api.guides import Grammar, read_grammar
from workbench.serving.api.served import Served
from workbench.serving.api.template import read_messages

MAX_PROMPT_CHARACTERS = 2**22
ONE_TOKEN = whole(0, 2**31 - 1)


@dataclass(frozen=True)
class Call:
    """One request of a client, its fields read. prompts: texts or token ids, not yet more than looked at."""

    chat: bool
    fields: dict[str, Any]
    prompts: tuple[str | tuple[int, ...], ...]
    grammar: Grammar | None
    served: Served

    @classmethod
    def read(cls, body: Any, served: Served, *, chat: bool) -> Call:
        """Raises ApiError for what is wrong whatever the tokens are."""
        fields = read_fields(body, CHAT if chat else COMPLETION)
        served.check_name(fields["model"])
        if chat:
            prompts: tuple[Any, ...] = (served.template(read_messages(fields["messages"])),)
            _check_chat(fields)
        else:
            prompts = read_prompts(fields["prompt"], served.settings.max_prompts, served.context)
            _check_completion(fields)
        if fields["stream_options"] is not None and not fields["stream"]:
            raise ApiError("stream_options is for a stream, and stream is not true", param="stream_options")
        if fields["n"] > served.max_running:
            raise ApiError(
                f"n={fields['n']} samples at a time, and this server runs max_running={served.max_running}", param="n"
            )
        return cls(chat, fields, prompts, read_grammar(fields), served)

    # -- what was asked for --------------------------------------------------------------------------------------------

    @property
    def n(self) -> int:
        return int(self.fields["n"])

    @property
    def stop(self) -> tuple[str, ...]:
        return (*self.fields["stop"], *(self.served.template.stop if self.chat else ()))

    @property
    def echo(self) -> bool:
        return bool(self.fields.get("echo"))

    @property
    def log_probs(self) -> int | None:
        """So many most probable tokens beside each of the text; None where nothing was asked."""
        if self.chat:
            return (self.fields["top_logprobs"] or 0) if self.fields["logprobs"] else None
        wanted: int | None = self.fields["logprobs"]
        return wanted

    @property
    def include_usage(self) -> bool:
        return bool((self.fields["stream_options"] or {}).get("include_usage"))

    @property
    def usage_in_chunks(self) -> bool:
        """Each chunk has the usage until then: an extension of vLLM, by which load generators count tokens."""
        return self.include_usage and bool(self.fields["stream_options"].get("continuous_usage_stats"))

    @property
    def max_tokens(self) -> int | None:
        wanted: int | None = self.fields.get("max_completion_tokens")
        return self.fields["max_tokens"] if wanted is None else wanted

    # -- what the engine is asked for ----------------------------------------------------------------------------------

    def requests(self, name: Hashable, arrival_s: float) -> list[Request]:
        """A request for each prompt, (name, 0), (name, 1) …. Raises ApiError."""
        guide = None if self.grammar is None else self.served.guides.make(self.grammar)
        prompts = [self._token_ids(at) for at in range(len(self.prompts))]
        asked = [self._new_tokens(len(prompt)) for prompt in prompts]
        self._check_size(asked)
        self._check_vocabulary("logit_bias", (token for token, _ in self.fields["logit_bias"]))
        stop_ids = self._stop_ids()
        fields, made = self.fields, []
        try:
            sampling = SamplingSettings(
                temperature=fields["temperature"],
                top_p=fields["top_p"],
                top_k=fields["top_k"] or None,
                min_p=fields["min_p"],
                repetition_penalty=fields["repetition_penalty"],
                presence_penalty=fields["presence_penalty"],
                frequency_penalty=fields["frequency_penalty"],
                logit_bias=fields["logit_bias"],
            )
            for at, (prompt, count) in enumerate(zip(prompts, asked)):
                request = Request(
                    (name, at),
                    prompt,
                    max(1, count),
                    sampling=sampling,
                    seed=fields["seed"],
                    n=self.n,
                    stop_token_ids=stop_ids,
                    priority=fields["priority"],
                    deadline_s=None if fields["deadline_ms"] is None else fields["deadline_ms"] / 1e3,
                    arrival_s=arrival_s,
                    guide=guide,
                    log_probs=self.log_probs,
                    prompt_log_probs=self.log_probs if self.echo else None,
                )
                made.append(request)
        except WorkbenchError as error:
            raise ApiError(str(error)) from error
        return made

    def _token_ids(self, at: int) -> tuple[int, ...]:
        given, name = self.prompts[at], "messages" if self.chat else "prompt"
        if isinstance(given, str):
            tokenizer, context = self.served.text_tokens(), self.served.context
            if (least := -(-len(given) // self.served.longest_token)) >= context:
                raise _too_long(context, name, name, f"at least {least:,}")
            ids = tuple(tokenizer.encode_prompt(given))
            if not ids and tokenizer.end_of_text is not None:  # an empty text begins as the model's training texts do
                ids = (tokenizer.end_of_text,)
        else:
            ids = given
        context = self.served.context
        if len(ids) >= context:
            raise _too_long(context, name, name, f"{len(ids):,}")
        vocab = self.served.vocab_size
        for place, token in enumerate(ids):
            if token >= vocab:
                raise ApiError(
                    f"token ids of this model lie in 0 … {vocab - 1}, {name}[{place}] is {token}", param=name
                )
        return ids

    def _new_tokens(self, prompt_tokens: int) -> int:
        """How many this prompt may get. Chat without a number: what the context leaves."""
        room = self.served.context - prompt_tokens
        wanted = self.max_tokens
        if wanted is None:
            return min(room, self.served.settings.max_tokens or room)
        if wanted > room:
            raise ApiError(
                f"this model's context holds {self.served.context:,} tokens; the prompt has {prompt_tokens:,} and"
                f" max_tokens asks for {wanted:,}; ask for at most {room:,}, or shorten the prompt",
                param="messages" if self.chat and self.fields["max_tokens"] is None else "max_tokens",
                code="context_length_exceeded",
            )
        return wanted

    def _check_size(self, asked: list[int]) -> None:
        limits = self.served.settings
        if limits.max_tokens is not None and max(asked) > limits.max_tokens:
            raise ApiError(
                f"this server gives at most {limits.max_tokens:,} tokens to a text, and max_tokens asks for"
                f" {max(asked):,}",
                param="max_tokens",
            )
        if (total := self.n * sum(asked)) > limits.max_total_tokens:
            raise ApiError(
                f"n={self.n} samples of {len(asked)} prompts make {total:,} tokens, and this server gives at most"
                f" {limits.max_total_tokens:,} to a request; ask for fewer",
                param="n" if self.n > 1 else "max_tokens",
            )

    def _stop_ids(self) -> tuple[int, ...]:
        given = self.fields["stop_token_ids"]
        self._check_vocabulary("stop_token_ids", given)
        own = () if self.fields["ignore_eos"] else self.served.eos_token_ids
        return (*own, *(token for token in given if token not in own))

    def _check_vocabulary(self, name: str, token_ids: Iterable[int]) -> None:
        vocab = self.served.vocab_size
        for at, token in enumerate(token_ids):
            if token >= vocab:
                raise ApiError(f"token ids of this model lie in 0 … {vocab - 1}, {name}[{at}] is {token}", param=name)


def read_prompts(given: Any, max_prompts: int, context: int) -> tuple[str | tuple[int, ...], ...]:
    """A text, token ids, or a list of either. More token ids than the context holds are counted, and not looked at."""
    prompts = given if isinstance(given, list) and given and not _whole(given[0]) else [given]
    if len(prompts) > max_prompts:
        raise ApiError(f"prompt must be at most {max_prompts} prompts, got {len(prompts):,}", param="prompt")
    return tuple(
        _prompt("prompt" if len(prompts) == 1 else f"prompt[{at}]", one, context) for at, one in enumerate(prompts)
    )


def _prompt(name: str, given: Any, context: int) -> str | tuple[int, ...]:
    if isinstance(given, str):
        return read_text(name, given, MAX_PROMPT_CHARACTERS)
    if not isinstance(given, list) or not given:
        raise ApiError(
            f"{name} must be a text, token ids, or a list of either, none of them an empty list", param="prompt"
        )
    if len(given) >= context:
        raise _too_long(context, name, "prompt", f"{len(given):,}")
    return tuple(ONE_TOKEN.read(f"{name}[{at}]", token) for at, token in enumerate(given))


def _too_long(context: int, name: str, param: str, tokens: str) -> ApiError:
    return ApiError(
        f"this model's context holds {context:,} tokens, and {name} has {tokens}: at most {context - 1:,} leave room"
        " for one new token; shorten it",
        param=param,
        code="context_length_exceeded",
    )


def _whole(value: Any) -> bool:
    return type(value) is int or type(value) is float


def _check_completion(fields: dict[str, Any]) -> None:
    best_of = fields["best_of"]
    if best_of is not None and (type(best_of) is not int or best_of != fields["n"]):
        raise refused("best_of", f"every sample is given back; ask for n={fields['n']} alone")
    if fields["max_tokens"] == 0 and not fields["echo"]:
        raise wrong("max_tokens", "at least 1, or 0 with echo", 0)


def _check_chat(fields: dict[str, Any]) -> None:
    if fields["top_logprobs"] is not None and not fields["logprobs"]:
        raise ApiError("top_logprobs is for logprobs, and logprobs is not true", param="top_logprobs")
    both = fields["max_tokens"], fields["max_completion_tokens"]
    if None not in both and both[0] != both[1]:
        raise ApiError("max_tokens and max_completion_tokens differ; give one", param="max_tokens")
