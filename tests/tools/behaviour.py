"""Record what the engine does under several hundred settings, and compare another version of it with the record.

    python tests/tools/behaviour.py list                    the names of all settings
    python tests/tools/behaviour.py record FILE [PART …]    run all, or those whose name holds a PART; write FILE
    python tests/tools/behaviour.py compare FILE [PART …]   run them again and print what differs; exit status 1 then

A setting is a model, a way to remember, a draft, a way to sample and the switches of the engine. Recorded are its
tokens and its exact counts: model calls, tokens through the model, steps, preemptions, cached tokens, accepted drafts,
bytes. Whole numbers, words and tokens must be equal; sums of log-probabilities may differ by 1e-3.
`behaviour_before.json` beside this file is the record of commit 30e28af; static batching was recorded again when its
padding came to end at the group's longest request and `n` to be served.

Another version is one whose package comes first on the path: `PYTHONPATH=OTHER_TREE python tests/tools/behaviour.py
compare FILE`. Public names that differ between versions are looked up in `HOMES` and `ALIASES`, and nowhere else.
Random models compute in float64, so that rounding flips no token. The trained models compute in float32, and drafts
that count the training text depend on the standard library of the Python that runs: settings with `local` in their
name are only comparable on the same kind of machine with the same Python.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import math
import os
import platform
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

BEFORE = Path(__file__).with_name("behaviour_before.json")
V = 64  # vocabulary of the random models
TOLERANCE = 1e-3  # of sums of log-probabilities

# -- public names that may differ between versions --------------------------------------------------

# what is used here -> where it may be found, "module:name", the newest first
HOMES: dict[str, tuple[str, ...]] = {
    "generate": ("workbench.generation:generate", "workbench.decoding:generate"),
    "stream": ("workbench.generation:stream", "workbench.decoding:stream"),
    "generate_beam": ("workbench.decoding:generate_beam", "workbench.decoding.beam:generate_beam"),
    "Guide": ("workbench.decoding:Guide", "workbench.decoding.guide:Guide"),
    "SamplingSettings": ("workbench.decoding:SamplingSettings", "workbench.decoding.sampling:SamplingSettings"),
    "Engine": ("workbench.serving:Engine", "workbench.serving.engine:Engine"),
    "Request": ("workbench.serving:Request", "workbench.serving.request:Request"),
    "SchedulerSettings": ("workbench.serving:SchedulerSettings", "workbench.serving.scheduler:SchedulerSettings"),
    "LengthPolicy": ("workbench.speculation:LengthPolicy", "workbench.speculation.lengths:LengthPolicy"),
    "Twin": ("workbench.serving.simulate:Twin",),
}
# name of a field or an argument as it is used here -> other names it may have
ALIASES: dict[str, tuple[str, ...]] = {
    "rows_processed": ("tokens_processed", "num_tokens_processed"),
    "scheduled_rows": ("scheduled_tokens", "num_scheduled_tokens"),
    "padding_rows": ("padding_tokens", "num_padding_tokens"),
    "rows": ("tokens_processed", "num_tokens"),
    "rows_per_round": ("tokens_processed_per_round",),
    "draft_rows": ("draft_tokens_processed",),
    "hit_tokens": ("cached_tokens", "num_cached_tokens"),
    "useful_tokens": ("stored_tokens",),
    "token_ids": ("tokens",),
    "most": ("max_ngram", "max_tokens", "longest"),
    "least": ("min_ngram", "min_tokens", "shortest"),
    "least_count": ("min_count",),
    "remember": ("prefix_caching", "keep_blocks"),
}


def find(name: str) -> Any:
    """What the package calls by this name, wherever it lies in this version."""
    for home in HOMES[name]:
        module, _, attribute = home.partition(":")
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), attribute)
    raise LookupError(f"{name} is in none of {', '.join(HOMES[name])}; add its new home to HOMES")


def read(thing: object, name: str) -> Any:
    """A public field, by this name or one of its aliases."""
    for known in (name, *ALIASES.get(name, ())):
        if hasattr(thing, known):
            return getattr(thing, known)
    raise LookupError(f"{type(thing).__name__} has no {name}; add its new name to ALIASES")


def make(function: Callable, *args: object, **given: object) -> Any:
    """Call it, with arguments by the names that this version has for them."""
    known = inspect.signature(function).parameters
    renamed = {}
    for name, value in given.items():
        names = [name, *ALIASES.get(name, ())]
        renamed[next((one for one in names if one in known), name)] = value
    return function(*args, **renamed)


# -- models -----------------------------------------------------------------------------------------


def tiny_config(**changes: object):
    """Llama's block at d = 32, two layers, two query heads to a key-value head."""
    from workbench.models.config import ModelConfig

    shape: dict = {
        "family": "llama",
        "vocab_size": V,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "context_length": 256,
        "tie_embeddings": True,
        "bos_token_id": 0,
        "eos_token_ids": (),
    }
    return ModelConfig(**(shape | changes))


def random_decoder(seed: int = 0, *, dtype: torch.dtype = torch.float64, **changes: object):
    """Every weight random, norms and biases too."""
    from workbench.models.decoder import Decoder

    model = Decoder(tiny_config(**changes), tokenizer=None, name="random")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + is_norm)
    return model.eval().requires_grad_(False).to(dtype)


def _latent(query_rank: int | None) -> dict:
    from workbench.models.config import LatentAttentionShape

    shape = LatentAttentionShape(query_rank, kv_rank=16, rotary_head_dim=4, content_head_dim=8, value_head_dim=6)
    return {"family": "deepseek_v3", "num_kv_heads": 4, "head_dim": 12, "latent_attention": shape}


def _scaled(kind: str) -> dict:
    from workbench.models import config

    if kind == "yarn":
        return {"rope_scaling": config.YarnScaling(4.0, 64)}
    return {"rope_scaling": config.RotaryScaling(8.0, 1.0, 4.0, 64)}


FAMILIES: dict[str, Callable[[], dict]] = {
    "llama": dict,
    "llama MHA": lambda: {"num_kv_heads": 4},
    "llama MQA": lambda: {"num_kv_heads": 1},
    "llama scaled rotary": lambda: _scaled("llama3"),
    "llama YaRN": lambda: _scaled("yarn"),
    "qwen2": lambda: {"family": "qwen2", "qkv_bias": True},
    "qwen3": lambda: {"family": "qwen3", "qk_norm": True},
    "gpt2": lambda: {
        "family": "gpt2",
        "num_kv_heads": 4,
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    },
    "mistral window": lambda: {"family": "mistral", "sliding_window": 6},
    "window, global layer": lambda: {"num_layers": 3, "sliding_window": 6, "global_layers": (1,)},
    "window, sinks": lambda: {"sliding_window": 6, "attention_sinks": 2},
    "gemma3": lambda: {
        "family": "gemma3_text",
        "num_layers": 3,
        "sliding_window": 8,
        "global_layers": (2,),
        "qk_norm": True,
        "post_norms": True,
        "zero_centered_norms": True,
        "activation": "gelu_tanh",
        "local_rope_theta": 1000.0,
        "query_pre_attn_scalar": 12.0,
        "embedding_scale": 5.65,
    },
    "shared layers": lambda: {"num_layers": 4, "kv_sources": (0, 0, 2, 2)},
    "MLA": lambda: _latent(None),
    "MLA query rank": lambda: _latent(24),
}


@functools.cache
def model_of(family: str):
    return random_decoder(seed=3, **FAMILIES[family]())


@functools.cache
def small():
    """A draft for the random Llama: one layer of its own."""
    return random_decoder(seed=1, num_layers=1)


@functools.cache
def near(family: str = "llama"):
    """The model with a little noise on its weights: a draft that is often right."""
    model = random_decoder(seed=3, **FAMILIES[family]())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


@functools.cache
def prepared(family: str, **settings: object):
    from workbench.models.fast import prepare

    return prepare(model_of(family), **settings)


@functools.cache
def trained(name: str):
    from workbench.models import load

    return load(name)


@functools.cache
def trained_prepared(name: str, **settings: object):
    if "weights" in settings:
        from workbench.quantization.prepared import prepare
    else:
        from workbench.models.fast import prepare

    return prepare(trained(name), **settings)


def tokens(count: int, seed: int, below: int = V) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(below) for _ in range(count)]


PROMPT = tokens(11, 42)
REPEATING = tokens(6, 7) * 4
TEXT = "def read_lines(path):\n    with open(path) as file:\n        return"
REPEATING_TEXT = "class Node:\n    def __init__(self, value):\n        self.value = value\n\nclass Tree:\n    def"

SAMPLING: dict[str, dict] = {
    "greedy": {},
    "temperature": {"temperature": 0.9, "seed": 1},
    "top-k": {"temperature": 1.0, "top_k": 5, "seed": 2},
    "top-p": {"temperature": 1.1, "top_p": 0.8, "seed": 3},
    "min-p": {"temperature": 1.3, "min_p": 0.1, "seed": 4},
    "top-k, top-p, min-p": {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "seed": 5},
    "greedy, penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "drawn, penalties": {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 6},
}

# -- ways to remember -------------------------------------------------------------------------------

KVS: dict[str, tuple[str, dict]] = {
    "recompute": ("recompute", {}),
    "contiguous": ("contiguous", {}),
    "contiguous, eager": ("contiguous", {"attention": "eager"}),
    "window": ("window", {}),
    "shared_layers": ("shared_layers", {}),
    "latent": ("latent", {}),
    "latent, absorbed": ("latent", {"form": "absorbed"}),
    "latent, expanded": ("latent", {"form": "expanded"}),
    "paged": ("paged", {"block_size": 4}),
    "paged, blocks of 16": ("paged", {}),
    "paged int8": ("paged", {"block_size": 4, "format": "int8"}),
    "paged fp8": ("paged", {"block_size": 4, "format": "fp8"}),
    "paged int4": ("paged", {"block_size": 4, "format": "int4"}),
    "quantized int8": ("quantized", {"format": "int8", "group": 4}),
    "quantized fp8": ("quantized", {"format": "fp8", "group": 4}),
    "quantized int4": ("quantized", {"format": "int4", "group": 4}),
}


def kv_of(name: str, model: object, **room: int):
    from workbench.kv import kv_for

    kind, settings = KVS[name]
    return kv_for(kind, model, **({"max_tokens": 160} | room), **settings)


class Begins:
    """Batches that went through any kv, and their tokens: every call of a model, whichever it was."""

    def __init__(self) -> None:
        self.calls = self.tokens = 0
        self._inside = threading.local()

    def count(self, begin: Callable) -> Callable:
        @functools.wraps(begin)
        def counted(kv: object, batch: Any, *others: object, **named: object) -> object:
            outermost = not getattr(self._inside, "begin", False)
            self._inside.begin = True
            try:
                result = begin(kv, batch, *others, **named)
            finally:
                if outermost:
                    self._inside.begin = False
            if outermost:
                self.calls += 1
                self.tokens += batch.num_tokens
            return result

        return counted


@contextlib.contextmanager
def counted_begins() -> Iterator[Begins]:
    from workbench.kv import KINDS
    from workbench.kv.paged_static import StaticPaged

    begins, changed = Begins(), []
    classes = {owner for kind in (*KINDS.values(), StaticPaged) for owner in kind.__mro__ if "begin" in vars(owner)}
    for owner in classes:
        if getattr(owner, "_is_protocol", False):
            continue
        changed.append((owner, vars(owner)["begin"]))
        owner.begin = begins.count(vars(owner)["begin"])
    try:
        yield begins
    finally:
        for owner, begin in changed:
            owner.begin = begin


# -- what is recorded of one run --------------------------------------------------------------------

STATS = (
    "rounds",
    "plain_rounds",
    "drafted",
    "accepted",
    "reached",
    "tokens_per_round",
    "lengths",
    "rows_per_round",
    "calls_saved",
    "draft_calls",
    "draft_rows",
)


def told(generation: Any) -> dict:
    """What came of one request."""
    log_probs = [p for p in generation.log_probs if p is not None]
    result = {
        "tokens": list(generation.tokens),
        "finish": generation.finish_reason,
        "prompt_tokens": generation.prompt_tokens,
        "model_calls": generation.model_calls,
        "rows": read(generation, "rows_processed"),
        "log_probs": [len(log_probs), sum(log_probs)],
        "text": generation.text,
    }
    if generation.speculation is not None:
        result["kinds"] = " ".join(generation.kinds)
        result["origins"] = sorted(set(generation.origins))
        result["speculation"] = [as_plain(read(generation.speculation, name)) for name in STATS]
    if generation.score is not None:
        result["score"] = generation.score
    return result


def as_plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def run_generate(
    model: Any, prompt: Any = None, *, kv: str | None = "contiguous", count: int = 20, **given: Any
) -> dict:
    """`stream`, read to its end: tokens, counts, and bytes of the kv at every token."""
    given.setdefault("max_new_tokens", count)
    if prompt is None:
        prompt = PROMPT if model.tokenizer is None else TEXT
    if isinstance(given.get("guide"), Callable):  # type: ignore[arg-type]
        given["guide"] = given["guide"](model)
    if callable(given.get("draft")):
        given["draft"] = given["draft"](model)
    cache = kv if kv is None else kv_of(kv, model)
    cut = given.pop("cut", None)
    with counted_begins() as begins:
        stream = find("stream")(model, prompt, **({} if cache is None else {"kv": cache}), **given)
        in_use = 0
        for number, _ in enumerate(stream, 1):
            in_use += 0 if cache is None else cache.bytes_in_use
            if number == cut:
                stream.close()
        result = told(stream.result())
    result["begins"] = [begins.calls, begins.tokens]
    if cache is not None:
        result["bytes"] = [cache.bytes_reserved, in_use, cache.bytes_in_use, len(cache.lengths)]
    return result


def run_beam(model: Any, *, kv: str = "contiguous", **given: Any) -> dict:
    cache = kv_of(kv, model, max_sequences=2 * given["num_beams"])
    prompt = PROMPT if model.tokenizer is None else TEXT
    with counted_begins() as begins:
        found = find("generate_beam")(model, prompt, kv=cache, **given)
    return {"found": [told(one) for one in found], "begins": [begins.calls, begins.tokens], "live": len(cache.lengths)}


class Clock:
    """Seconds that pass when told: one a step."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


SCHEDULER = (
    "max_running",
    "token_budget",
    "chunk",
    "policy",
    "aging_s",
    "preemption",
    "watermark",
    "batching",
    "draft_tokens",
    "remember",
)
SUMMED = ("running", "waiting", "padding_rows", "blocks_idle", "useful_tokens", "drafted", "accepted")  # of steps


def requests(count: int, shape: int = 0, *, below: int = V, longest: int = 24, **given: Any) -> list:
    """Unequal lengths; half begin with the same 20 tokens; what is given may be a function of the request's number."""
    drawn, shared = random.Random(shape), tokens(20, 99, below)
    result = []
    for i in range(count):
        prompt = (shared if i % 2 else []) + tokens(drawn.randint(1, 30), 1000 * shape + i, below)
        own = {name: value(i) if callable(value) else value for name, value in given.items()}
        result.append(find("Request")(i, tuple(prompt), drawn.randint(1, longest), **own))
    return result


def run_engine(
    model: Any,
    wanted: Callable[[], list] = lambda: requests(10),
    *,
    every: int = 0,
    abort: tuple[int, object] | None = None,
    **given: Any,
) -> dict:
    """An engine, step by step on a clock that counts steps.

    every: steps between two arrivals; 0: all come at once. abort: (after this step, this request).
    """
    if callable(given.get("draft")):
        given["draft"] = given["draft"](model)
    scheduling = {name: given.pop(name) for name in SCHEDULER if name in given}
    settings = make(find("SchedulerSettings"), **({"max_running": 6, "token_budget": 64} | scheduling))
    clock = Clock()
    own = {"num_blocks": 30, "block_size": 4, "clock": clock} | given
    coming, finished, steps = list(wanted()), [], []
    with counted_begins() as begins:
        engine = find("Engine")(model, settings, **own)
        number = 0
        while coming or not engine.idle:
            while coming and (not every or number % every == 0):
                engine.add(coming.pop(0))
                if every:
                    break
            report = engine.step()
            steps.append(report)
            finished += report.finished
            number, clock.now_s = number + 1, clock.now_s + 1.0
            if abort is not None and number == abort[0]:
                finished += engine.abort(abort[1])
            assert number < 5000, "the engine does not come to an end"
    scheduler = engine.scheduler
    return {
        "texts": [
            [
                str(one.request_id),
                one.sample,
                list(read(one, "token_ids")),
                one.finish_reason,
                one.prompt_tokens,
                one.preemptions,
                read(one, "hit_tokens"),
                one.arrival_s,
                one.first_scheduled_s,
                one.first_token_s,
                one.finished_s,
                sum(one.token_times_s),
            ]
            for one in finished
        ],
        "steps": [
            read(scheduler, name)
            for name in ("steps", "preemptions", "scheduled_rows", "padding_rows", "prompt_tokens", "hit_tokens")
        ],
        "by_step": [[read(step, name) for step in steps] for name in ("rows", "blocks_used")],
        "sums": [sum(read(step, name) for step in steps) for name in SUMMED],
        "begins": [begins.calls, begins.tokens],
        "bytes": [engine.kv.bytes_reserved, engine.kv.bytes_in_use, len(engine.kv.lengths)],
    }


def run_twin(wanted: Callable[[], list], **given: Any) -> dict:
    """The simulation without a model."""
    scheduling = {name: given.pop(name) for name in SCHEDULER if name in given}
    settings = make(find("SchedulerSettings"), **({"max_running": 6, "token_budget": 64} | scheduling))
    twin = find("Twin")(
        settings, step_s=lambda shape: 4.0 + read(shape, "rows"), **({"num_blocks": 30, "block_size": 4} | given)
    )
    for request in wanted():
        twin.add(request)
    finished, rows = [], []
    while not twin.idle:
        report = twin.step()
        rows.append(read(report, "rows"))
        finished += report.finished
    return {
        "texts": [
            [str(f.request_id), f.sample, len(read(f, "token_ids")), f.finish_reason, f.preemptions, f.finished_s]
            for f in finished
        ],
        "rows": rows,
        "steps": [read(twin.scheduler, name) for name in ("steps", "preemptions", "scheduled_rows", "hit_tokens")],
    }


# -- drafts -----------------------------------------------------------------------------------------


def _draft(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"workbench.speculation.drafts.{module}"), name)


def model_draft(model: Any, **given: object):
    return _draft("model", "ModelDraft")(model, max_tokens=200, **given)


def medusa(target: Any, tree: object = "sparse"):
    from workbench.models.heads import RANKS, MedusaConfig, MedusaHeads

    heads = MedusaHeads(MedusaConfig(target.config.hidden_size, V, 3), target=target.name, name="random-medusa")
    heads.shares = [[round(0.4 / (rank + 1) ** 2, 4) for rank in range(RANKS)]] * 3
    return _draft("medusa", "MedusaDraft")(target, _randomized(heads, 3), tree=tree, nodes=6)


def eagle(target: Any, **given: object):
    import dataclasses

    from workbench.models.heads import EagleHead

    head = EagleHead(dataclasses.replace(target.config, num_layers=1), target=target.name, name="random-eagle")
    return _draft("eagle", "EagleDraft")(target, _randomized(head, 4), max_tokens=200, **given)


def _randomized(heads: Any, seed: int):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("norm.weight")
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + is_norm)
    return heads.eval().requires_grad_(False).double()


def lookup(target: Any, **given: object):
    return make(_draft("lookup", "PromptLookupDraft"), target, **({"least": 1} | given))


def phrases(target: Any):
    return _draft("phrases", "PhrasesDraft")(target, {(a,): tuple(tokens(3, a)) for a in range(0, V, 3)})


def ngram(target: Any, **given: object):
    texts = [tokens(300, 8), tokens(300, 9)]
    return make(_draft("ngram", "NGramDraft").of, texts, target, least_count=1, **given)


def self_int4(target: Any):
    from workbench.quantization.methods import QuantizationRecipe

    recipe = QuantizationRecipe("rtn", 4, 32)
    return _draft("quantized_self", "quantized_self")(target, recipe, fast=False, max_tokens=200)


DRAFTS: dict[str, Callable[[Any], Any]] = {
    "small model": lambda _: model_draft(small()),
    "near model": lambda _: model_draft(near()),
    "itself": lambda target: model_draft(target),
    "model tree": lambda _: model_draft(near(), branching=(2, 2, 1)),
    "prompt lookup": lookup,
    "prompt lookup, first": lambda target: lookup(target, least=2, occurrence="first"),
    "lookahead": lambda target: _draft("lookahead", "LookaheadDraft")(target, columns=3, gram=3, candidates=2),
    "ngram": ngram,
    "ngram drawn": lambda target: ngram(target, choose="drawn"),
    "ngram tree": lambda target: ngram(target, branching=(2, 1)),
    "phrases": phrases,
    "medusa sparse": medusa,
    "medusa confident": lambda target: medusa(target, "confident"),
    "medusa chain": lambda target: medusa(target, "chain"),
    "eagle": eagle,
    "eagle tree": lambda target: eagle(target, branching=(2, 2)),
    "self-int4": self_int4,
    "staged": lambda target: _draft("staged", "StagedDraft")(near(), lookup(near()), max_tokens=200),
    "first of": lambda target: _draft("first_of", "FirstOf")(lookup(target, least=2), model_draft(near())),
}
TRAINED_DRAFTS = {
    "stdlib-1m": lambda _: model_draft(trained("stdlib-1m")),
    "eagle": lambda _: "eagle",
    "medusa": lambda _: "medusa",
    "lookahead": lambda _: "lookahead",
    "prompt_lookup": lambda _: "prompt_lookup",
    "self-int4": lambda _: "self-int4",
    "ngram of the corpus": lambda _: "ngram",
    "phrases of the corpus": lambda _: "phrases",
}

# -- quantization -----------------------------------------------------------------------------------

RECIPES: dict[str, tuple[str, dict]] = {
    "rtn int8": ("rtn", {"bits": 8, "group": 32}),
    "rtn int4": ("rtn", {"bits": 4, "group": 32}),
    "rtn int4 symmetric": ("rtn", {"bits": 4, "group": 32, "options": {"symmetric": True}}),
    "gptq": ("gptq", {"bits": 4, "group": 32}),
    "awq": ("awq", {"bits": 4, "group": 32}),
    "nf4": ("nf4", {}),
    "kquant": ("kquant", {"bits": 4}),
    "squeezellm": ("squeezellm", {"bits": 4}),
    "quip": ("quip", {"bits": 4}),
    "int8": ("int8", {}),
    "llm_int8": ("llm_int8", {}),
    "smoothquant": ("smoothquant", {}),
}


@functools.cache
def quantized(name: str):
    """A random Llama wide enough for every method, quantized on random calibration tokens; float32, as methods need."""
    from workbench.quantization import Calibration, QuantizationRecipe, quantize

    wide = random_decoder(
        seed=6,
        dtype=torch.float32,
        hidden_size=256,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=256,
        num_layers=1,
    )
    method, settings = RECIPES[name]
    rows = torch.tensor([tokens(24, seed) for seed in range(4)])
    return quantize(wide, QuantizationRecipe(method, **settings), Calibration(rows))


def run_quantized(name: str) -> dict:
    """What the quantized model writes, and the bytes of its tensors."""
    model = quantized(name)
    held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    return run_generate(model, count=12) | {"weights": held}


# -- guides -----------------------------------------------------------------------------------------

GUIDES: dict[str, Callable[[Any], Any]] = {
    "regex": lambda model: find("Guide").regex(r'\{"name": "[a-z]{1,8}", "size": [0-9]{1,3}\}', model.tokenizer),
    "schema": lambda model: find("Guide").json_schema(
        {
            "type": "object",
            "properties": {"kind": {"enum": ["class", "function"]}, "lines": {"type": "integer"}},
            "required": ["kind", "lines"],
        },
        model.tokenizer,
    ),
    "grammar": lambda model: find("Guide").grammar('start: "call(" /[a-z]+/ ("," /[a-z]+/)* ")"', model.tokenizer),
}


# -- the settings -----------------------------------------------------------------------------------

Setting = Callable[[], dict]


def settings() -> dict[str, Setting]:
    """All of them, by name."""
    named: dict[str, Setting] = {}

    def put(name: str, function: Callable[[], dict]) -> None:
        assert name not in named, name
        named[name] = function

    for part in (_remembering, _sampling, _drafting, _faster, _searching, _guided, _engine, _trained, _simulated):
        part(put)
    return named


def _kinds_for(family: str) -> list[str]:
    kinds = ["recompute", "contiguous", "paged"]
    if "MLA" in family:
        return ["recompute", "latent", "latent, absorbed", "latent, expanded", "paged", "contiguous"]
    if family in ("mistral window", "window, global layer", "window, sinks", "gemma3"):
        kinds += ["window", "quantized int8"]
    if family == "shared layers":
        kinds += ["shared_layers", "quantized int8"]
    if family == "llama":
        kinds = [kind for kind in KVS if kind.split(",")[0] not in ("latent", "window", "shared_layers")]
    return kinds


def _remembering(put: Callable) -> None:
    for family in FAMILIES:
        for kind in _kinds_for(family):
            put(f"generate | {family} | {kind} | greedy", lambda f=family, k=kind: run_generate(model_of(f), kv=k))
    for kind in ("recompute", "contiguous", "window", "paged"):
        put(
            f"generate | window, sinks | {kind} | long prompt",
            lambda k=kind: run_generate(model_of("window, sinks"), tokens(60, 2), kv=k, count=40),
        )


def _sampling(put: Callable) -> None:
    for family in ("llama", "gpt2", "gemma3", "MLA"):
        for name, given in SAMPLING.items():
            if (family, name) == ("llama", "greedy"):
                continue
            kind = "paged" if family == "MLA" else "contiguous"
            put(
                f"generate | {family} | {kind} | sampling {name}",
                lambda f=family, g=given, k=kind: run_generate(model_of(f), kv=k, **g),
            )
    for seed in range(3):
        given = {"temperature": 1.0, "seed": 100 + seed}
        put(
            f"generate | llama | default kv | seed {seed}",
            lambda g=given: run_generate(model_of("llama"), kv=None, **g),
        )
    stops = tuple(range(0, V, 5))
    put(
        "generate | stop tokens", lambda: run_generate(model_of("llama"), stop_token_ids=stops, temperature=1.0, seed=3)
    )
    put(
        "generate | stop tokens, draft",
        lambda: run_generate(
            model_of("llama"), stop_token_ids=stops, temperature=1.0, seed=3, draft=DRAFTS["near model"]
        ),
    )
    put("generate | closed after 5", lambda: run_generate(model_of("llama"), cut=5))
    put("generate | closed after 5, draft", lambda: run_generate(model_of("llama"), cut=5, draft=DRAFTS["near model"]))
    put("generate | one token", lambda: run_generate(model_of("llama"), count=1))
    put(
        "generate | own filter",
        lambda: run_generate(model_of("llama"), temperature=1.0, top_k=4, seed=1, filters={"top_k": _own_top_k}),
    )
    put(
        "generate | own filter, draft",
        lambda: run_generate(
            model_of("llama"),
            temperature=1.0,
            top_k=4,
            seed=1,
            filters={"top_k": _own_top_k},
            draft=DRAFTS["near model"],
        ),
    )
    put("generate | own loop", lambda: run_generate(model_of("llama"), loop=_own_loop))


def _own_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    return logits.masked_fill(logits < logits.sort(descending=True).values[k - 1], -math.inf)


def _own_loop(
    forward: Callable, prompt_ids: Sequence[int], choose: Callable, max_new_tokens: int, stop: Sequence[int] = ()
):
    text = list(prompt_ids)
    for _ in range(max_new_tokens):
        text.append(choose(forward(text)[-1], text))
        yield text[-1]
        if text[-1] in stop:
            return


def _drafting(put: Callable) -> None:
    drawn, penalized = SAMPLING["top-p"], SAMPLING["drawn, penalties"]
    for name, draft in DRAFTS.items():
        prompt = REPEATING if "lookup" in name or "look" in name or "first" in name else PROMPT
        for how, given in (("greedy", {}), ("top-p", drawn), ("penalties", penalized)):
            put(
                f"draft | {name} | {how}",
                lambda d=draft, g=given, p=prompt: run_generate(model_of("llama"), p, draft=d, count=24, **g),
            )
    for kind in ("recompute", "paged", "paged int8", "quantized int8", "quantized int4", "contiguous, eager"):
        for name in ("near model", "model tree"):
            if name == "model tree" and kind.startswith("recompute"):
                continue
            put(
                f"draft | {name} | {kind} | greedy",
                lambda k=kind, d=DRAFTS[name]: run_generate(model_of("llama"), kv=k, draft=d),
            )
            put(
                f"draft | {name} | {kind} | drawn",
                lambda k=kind, d=DRAFTS[name]: run_generate(model_of("llama"), kv=k, draft=d, **drawn),
            )
    for family, kind in (
        ("window, sinks", "window"),
        ("gemma3", "window"),
        ("shared layers", "shared_layers"),
        ("MLA", "latent"),
        ("MLA", "paged"),
        ("gpt2", "contiguous"),
        ("qwen3", "paged"),
    ):
        for how, given in (("greedy", {}), ("drawn", drawn)):
            put(
                f"draft | {family} | {kind} | {how}",
                lambda f=family, k=kind, g=given: run_generate(
                    model_of(f), kv=k, draft=lambda _: model_draft(near(f)), **g
                ),
            )
    for length in (1, 2, 8, "threshold"):
        for how, given in (("greedy", {}), ("drawn", drawn)):
            put(
                f"draft | near model | length {length} | {how}",
                lambda n=length, g=given: run_generate(
                    model_of("llama"), draft=DRAFTS["near model"], draft_length=n, count=30, **g
                ),
            )
    put(
        "draft | own length policy",
        lambda: run_generate(model_of("llama"), draft=DRAFTS["near model"], draft_length=_own_lengths(), count=30),
    )


def _own_lengths():
    class InTurn(find("LengthPolicy")):
        """3, 0, 1, 5, 3, 0, …"""

        def __init__(self) -> None:
            self.round = -1

        def limit(self) -> int:
            self.round += 1
            return (3, 0, 1, 5)[self.round % 4]

        def copy(self) -> InTurn:
            return InTurn()

    return InTurn()


def _faster(put: Callable) -> None:
    from workbench.models.fast import prepare

    for family in FAMILIES:
        kind = "paged" if "MLA" in family else "contiguous"
        put(f"prepared | {family} | {kind} | greedy", lambda f=family, k=kind: run_generate(prepared(f), kv=k))
    put("prepared | llama | near model | greedy", lambda: run_generate(prepared("llama"), draft=DRAFTS["near model"]))
    put("prepared | llama | medusa | greedy", lambda: run_generate(prepared("llama"), draft=medusa))
    put("prepared | llama | eagle | drawn", lambda: run_generate(prepared("llama"), draft=eagle, **SAMPLING["top-p"]))
    put("compiled | llama | contiguous | greedy", lambda: run_generate(prepared("llama", compile=True), count=6))
    for name in RECIPES:
        put(f"quantized | {name} | as it is | local", lambda n=name: run_quantized(n))
        put(f"quantized | {name} | prepared | local", lambda n=name: run_generate(prepare(quantized(n)), count=12))


def _searching(put: Callable) -> None:
    cases: dict[str, dict] = {
        "2 beams": {"num_beams": 2},
        "4 beams": {"num_beams": 4, "num_return": 3},
        "4 beams, penalty 0": {
            "num_beams": 4,
            "length_penalty": 0.0,
            "stop_token_ids": tuple(range(0, V, 4)),
            "num_return": 4,
        },
        "4 beams, early": {"num_beams": 4, "early_stopping": True, "stop_token_ids": tuple(range(0, V, 4))},
        "4 beams, never": {
            "num_beams": 4,
            "early_stopping": "never",
            "stop_token_ids": tuple(range(0, V, 4)),
            "length_penalty": 2.0,
        },
    }
    for name, given in cases.items():
        for kind in ("recompute", "contiguous", "paged"):
            put(
                f"beam | {name} | {kind}",
                lambda g=given, k=kind: run_beam(model_of("llama"), kv=k, max_new_tokens=10, **g),
            )
    put(
        "beam | window | 3 beams",
        lambda: run_beam(model_of("window, sinks"), kv="window", num_beams=3, max_new_tokens=12),
    )
    put("beam | MLA | 3 beams", lambda: run_beam(model_of("MLA"), kv="latent", num_beams=3, max_new_tokens=12))


def _guided(put: Callable) -> None:
    for name, guide in GUIDES.items():
        for jump in ("tokens", "text", "never"):
            put(
                f"guide | {name} | jump {jump} | local",
                lambda g=guide, j=jump: run_generate(trained("stdlib-1m"), "value = ", guide=g, jump=j, count=32),
            )
        put(
            f"guide | {name} | drawn | local",
            lambda g=guide: run_generate(trained("stdlib-1m"), "value = ", guide=g, temperature=1.0, seed=2, count=32),
        )
        for draft in ("prompt_lookup", "lookahead"):
            put(
                f"guide | {name} | {draft} | local",
                lambda g=guide, d=draft: run_generate(
                    trained("stdlib-1m"), REPEATING_TEXT, guide=g, draft=lambda _: d, count=32
                ),
            )
    put(
        "guide | schema | model draft | local",
        lambda: run_generate(
            trained("stdlib-3m-gqa"),
            "value = ",
            guide=GUIDES["schema"],
            draft=lambda _: model_draft(trained("stdlib-1m")),
            jump="text",
            count=32,
        ),
    )


def sampled(**given: object):
    return find("SamplingSettings")(**given)


SWITCHES: dict[str, dict] = {
    "as it comes": {},
    "no prefix cache": {"prefix": None},
    "radix prefix cache": {"prefix": "radix"},
    "not remembered": {"remember": False},
    "swap": {"preemption": "swap"},
    "tight": {"num_blocks": 16},
    "tight, swap": {"num_blocks": 16, "preemption": "swap"},
    "no watermark": {"watermark": 0.0, "num_blocks": 16},
    "large watermark": {"watermark": 0.4},
    "shortest first": {"policy": "shortest_remaining"},
    "shortest first, aged": {"policy": "shortest_remaining", "aging_s": 2.0},
    "chunks of 5": {"chunk": 5},
    "budget of 9": {"token_budget": 9},
    "budget of 9, chunks of 4": {"token_budget": 9, "chunk": 4},
    "blocks of 1": {"block_size": 1, "num_blocks": 100},
    "blocks of 16": {"block_size": 16, "num_blocks": 10},
    "one at a time": {"max_running": 1},
    "static": {"batching": "static", "num_blocks": 130},
    "static, small groups": {"batching": "static", "num_blocks": 130, "max_running": 3},
}
ENGINE_DRAFTS: dict[str, dict] = {
    "small model": {"draft_tokens": 4, "draft": lambda _: model_draft(small(), max_sequences=20)},
    "near model": {"draft_tokens": 4, "draft": lambda _: model_draft(near(), max_sequences=20)},
    "near model, length 2": {
        "draft_tokens": 4,
        "draft_length": 2,
        "draft": lambda _: model_draft(near(), max_sequences=20),
    },
    "near model, threshold": {
        "draft_tokens": 4,
        "draft_length": "threshold",
        "draft": lambda _: model_draft(near(), max_sequences=20),
    },
    "near model, chunks of 5": {
        "draft_tokens": 4,
        "chunk": 5,
        "draft": lambda _: model_draft(near(), max_sequences=20),
    },
    "near model, budget of 12": {
        "draft_tokens": 3,
        "token_budget": 12,
        "draft": lambda _: model_draft(near(), max_sequences=20),
    },
    "near model, no prefix cache": {
        "draft_tokens": 4,
        "prefix": None,
        "draft": lambda _: model_draft(near(), max_sequences=20),
    },
    "prompt lookup, swap": {"draft_tokens": 3, "draft": lookup, "preemption": "swap"},
    "tree": {"draft_tokens": 6, "draft": lambda _: model_draft(near(), branching=(2, 2), max_sequences=20)},
    "medusa": {"draft_tokens": 6, "draft": medusa, "prefix": None},
    "medusa, prefix cache": {"draft_tokens": 6, "draft": medusa},
    "eagle": {"draft_tokens": 4, "draft": lambda target: eagle(target, max_sequences=20), "prefix": None},
    "lookahead": {"draft_tokens": 8, "draft": DRAFTS["lookahead"], "num_blocks": 60},
    "ngram": {"draft_tokens": 3, "draft": ngram},
    "first of": {
        "draft_tokens": 4,
        "draft": lambda target: _draft("first_of", "FirstOf")(
            lookup(target, least=2), model_draft(near(), max_sequences=20)
        ),
    },
}


def _engine(put: Callable) -> None:
    def warm(count: int = 10):
        return lambda: requests(count, sampling=sampled(temperature=1.0, top_p=0.9), seed=lambda i: i)

    def mixed():
        given = list(SAMPLING.values())

        def sampling(i: int):
            own = {name: value for name, value in given[i % len(given)].items() if name != "seed"}
            return sampled(**own)

        return [
            find("Request")(
                r.id,
                r.prompt_ids,
                r.max_new_tokens,
                sampling=sampling(r.id),
                seed=r.id,
                n=1 + (r.id % 4 == 3),
                stop_token_ids=tuple(tokens(5, r.id)) if r.id % 3 == 0 else (),
                priority=r.id % 3,
                deadline_s=20.0 + 7 * (r.id % 5),
                tenant="ab"[r.id % 2] if r.id > 6 else "",
            )
            for r in requests(12, shape=4)
        ]

    for name, given in SWITCHES.items():
        put(f"engine | {name} | greedy", lambda g=given: run_engine(model_of("llama"), **g))
        put(f"engine | {name} | drawn", lambda g=given: run_engine(model_of("llama"), warm(), **g))
        if given.get("max_running") != 1:
            put(
                f"engine | {name} | mixed, one every 2 steps",
                lambda g=given: run_engine(model_of("llama"), mixed, every=2, **g),
            )
    for name, given in ENGINE_DRAFTS.items():
        put(f"engine | draft {name} | greedy", lambda g=given: run_engine(model_of("llama"), **g))
        put(f"engine | draft {name} | drawn", lambda g=given: run_engine(model_of("llama"), warm(), **g))
        put(f"engine | draft {name} | mixed", lambda g=given: run_engine(model_of("llama"), mixed, every=2, **g))
    for policy in ("first_come", "priority", "deadline", "shortest_remaining"):
        for aging in (None, 3.0):
            put(
                f"engine | policy {policy}, aging {aging}",
                lambda p=policy, a=aging: run_engine(
                    model_of("llama"), mixed, every=1, policy=p, aging_s=a, num_blocks=20
                ),
            )
    for family in FAMILIES:
        put(f"engine | {family} | greedy", lambda f=family: run_engine(model_of(f), lambda: requests(8)))
    for family in ("llama", "gpt2", "MLA", "gemma3"):
        put(f"engine | prepared {family} | greedy", lambda f=family: run_engine(prepared(f), lambda: requests(8)))
    for format in ("int8", "fp8", "int4"):
        put(f"engine | blocks in {format} | greedy", lambda f=format: run_engine(model_of("llama"), format=f))
        put(
            f"engine | blocks in {format} | swap, chunks",
            lambda f=format: run_engine(model_of("llama"), format=f, preemption="swap", chunk=6, num_blocks=16),
        )
    tight = {"num_blocks": 18, "max_running": 4, "token_budget": 24}
    ahead = {
        "as it comes": {},
        "chunks of 3": {"chunk": 3},
        "swap": {"preemption": "swap"},
        "no prefix cache": {"prefix": None},
        "shortest first": {"policy": "shortest_remaining"},
        "one at a time": {"max_running": 2},
    }
    for name, given in ahead.items():
        put(
            f"engine | asynchronous, {name} | greedy",
            lambda g=given: run_engine(model_of("llama"), asynchronous=True, **(tight | g)),
        )
        put(
            f"engine | asynchronous, {name} | mixed",
            lambda g=given: run_engine(model_of("llama"), mixed, every=2, asynchronous=True, **(tight | g)),
        )
    put(
        "engine | asynchronous, draft",
        lambda: run_engine(model_of("llama"), mixed, asynchronous=True, **ENGINE_DRAFTS["near model"]),
    )
    put(
        "engine | recorded graphs | greedy",
        lambda: run_engine(prepared("llama"), lambda: requests(5), graphs=True, max_running=2, num_blocks=24),
    )
    put(
        "engine | recorded graphs, asynchronous",
        lambda: run_engine(
            prepared("llama"), lambda: requests(5), graphs=True, max_running=2, num_blocks=24, asynchronous=True
        ),
    )
    for after, whom in ((1, 0), (4, 3), (9, 8)):
        put(
            f"engine | abort after {after}",
            lambda a=after, w=whom: run_engine(model_of("llama"), mixed, every=1, abort=(a, w)),
        )
        put(
            f"engine | abort after {after}, draft",
            lambda a=after, w=whom: run_engine(
                model_of("llama"), mixed, every=1, abort=(a, w), **ENGINE_DRAFTS["near model"]
            ),
        )
        put(
            f"engine | abort after {after}, asynchronous",
            lambda a=after, w=whom: run_engine(model_of("llama"), mixed, every=1, abort=(a, w), asynchronous=True),
        )
    for n in (2, 4):
        several = lambda n=n: requests(5, n=n, sampling=sampled(temperature=1.0), seed=lambda i: i)  # noqa: E731
        put(f"engine | n={n}", lambda s=several: run_engine(model_of("llama"), s, num_blocks=40))
        put(
            f"engine | n={n}, draft",
            lambda s=several: run_engine(model_of("llama"), s, **(ENGINE_DRAFTS["near model"] | {"num_blocks": 40})),
        )
        put(
            f"engine | n={n}, swap, tight",
            lambda s=several: run_engine(model_of("llama"), s, num_blocks=24, preemption="swap"),
        )
    tenants = lambda: requests(10, tenant=lambda i: "ab"[i // 2 % 2])  # noqa: E731
    put("engine | tenants", lambda: run_engine(model_of("llama"), tenants, every=3))
    put("engine | tenants, radix", lambda: run_engine(model_of("llama"), tenants, every=3, prefix="radix"))


TRAINED = (
    "stdlib-1m",
    "stdlib-3m-mha",
    "stdlib-3m-gqa",
    "stdlib-3m-mqa",
    "stdlib-3m-mla",
    "stdlib-3m-hybrid",
    "stdlib-3m-shared",
    "stdlib-10m",
)


def _trained(put: Callable) -> None:
    for name in TRAINED:
        kind = {"stdlib-3m-mla": "latent", "stdlib-3m-hybrid": "window", "stdlib-3m-shared": "shared_layers"}.get(
            name, "contiguous"
        )
        put(f"trained | {name} | {kind} | greedy | local", lambda n=name, k=kind: run_generate(trained(n), kv=k))
        put(
            f"trained | {name} | {kind} | drawn | local",
            lambda n=name, k=kind: run_generate(trained(n), kv=k, **SAMPLING["top-p"]),
        )
        put(
            f"trained | {name} | prepared, paged | greedy | local",
            lambda n=name: run_generate(trained_prepared(n), kv="paged, blocks of 16"),
        )
        put(
            f"trained | {name} | engine | local",
            lambda n=name: run_engine(
                trained_prepared(n), lambda: requests(5, below=4096, longest=16), num_blocks=60, block_size=8
            ),
        )
    put(
        "trained | stdlib-1m | stop string | local",
        lambda: run_generate(trained("stdlib-1m"), stop=["\n", "return x"], count=40),
    )
    put(
        "trained | stdlib-1m | stop string, draft | local",
        lambda: run_generate(trained("stdlib-1m"), stop="(", count=40, draft=lambda _: "prompt_lookup"),
    )
    put(
        "trained | stdlib-1m | beams | local",
        lambda: run_beam(trained("stdlib-1m"), num_beams=3, max_new_tokens=16, num_return=2),
    )
    for weights in ("int8", "int4"):
        put(
            f"trained | stdlib-1m | weights {weights} | local",
            lambda w=weights: run_generate(trained_prepared("stdlib-1m", weights=w)),
        )
    for draft, given in TRAINED_DRAFTS.items():
        prompt = REPEATING_TEXT if "look" in draft else TEXT
        for how, sampling in (("greedy", {}), ("drawn", {"temperature": 0.8, "top_p": 0.95, "seed": 11})):
            if (draft, how) == ("phrases of the corpus", "drawn"):
                continue  # five seconds to learn the phrases again
            put(
                f"trained | stdlib-10m | draft {draft} | {how} | local",
                lambda d=given, s=sampling, p=prompt: run_generate(trained("stdlib-10m"), p, draft=d, count=28, **s),
            )
    for draft in ("eagle", "medusa"):
        size = {
            "draft_tokens": 12,
            "draft": lambda _, d=draft: d,
            "max_running": 1,
            "num_blocks": 60,
            "block_size": 8,
            "prefix": None,
        }
        put(
            f"trained | stdlib-10m | engine, draft {draft} | local",
            lambda g=size: run_engine(trained("stdlib-10m"), lambda: requests(3, below=4096, longest=12), **g),
        )


def _simulated(put: Callable) -> None:
    def wanted(most: int) -> list:
        return requests(16, shape=5, n=lambda i: min(most, 1 + (i % 5 == 4)))

    for name, switches in SWITCHES.items():
        given = switches | {"num_blocks": max(20, switches.get("num_blocks", 30))}
        most = switches.get("max_running", 2)
        put(f"simulated | {name}", lambda g=given, n=most: run_twin(lambda: wanted(n), **g))


# -- recording and comparing ------------------------------------------------------------------------


def chosen(parts: Sequence[str]) -> dict[str, Setting]:
    """Settings whose name holds one of the parts; all of them without parts."""
    return {name: run for name, run in settings().items() if not parts or any(part in name for part in parts)}


def outcome(run: Setting) -> dict:
    """What a setting gives; an error of the package, by its type, where it refuses."""
    from workbench.errors import WorkbenchError

    torch.manual_seed(0)
    try:
        return run()
    except WorkbenchError as error:
        return {"refused": type(error).__name__}


def differences(before: object, now: object, path: str = "") -> list[str]:
    """Paths at which two records differ; floats may by the tolerance."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [*before, *(key for key in now if key not in before)]
        return [line for key in keys for line in differences(before.get(key), now.get(key), f"{path}.{key}")]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [line for i, (a, b) in enumerate(zip(before, now)) for line in differences(a, b, f"{path}[{i}]")]
    is_float = isinstance(before, float) and isinstance(now, float)
    if before == now or (is_float and math.isclose(before, now, abs_tol=TOLERANCE, rel_tol=1e-6)):
        return []
    return [f"{path or 'record'}: {before!r:.120} before, {now!r:.120} now"]


def record(file: Path, parts: Sequence[str]) -> None:
    started, records, seconds = time.perf_counter(), {}, {}
    for name, run in chosen(parts).items():
        began = time.perf_counter()
        records[name] = outcome(run)
        seconds[name] = time.perf_counter() - began
        refused = records[name].get("refused")
        if refused:
            print(f"{name}: {refused}", file=sys.stderr)
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    lines = [f"{json.dumps(name)}: {json.dumps(rounded(one), separators=(',', ':'))}" for name, one in records.items()]
    body = ",\n".join(lines)
    file.write_text(f'{{"machine": {json.dumps(machine)},\n"records": {{\n{body}\n}}}}\n', encoding="utf-8")
    slowest = sorted(seconds, key=lambda name: -seconds[name])[:12]
    print("slowest:", *(f"{seconds[name]:6.1f} s  {name}" for name in slowest), sep="\n  ")
    print(f"{len(records)} settings in {time.perf_counter() - started:.0f} s, {file.stat().st_size:,} bytes: {file}")


def rounded(value: Any) -> Any:
    """Floats to six digits, for a smaller file."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return round(value, 6) if isinstance(value, float) else value


def compare(file: Path, parts: Sequence[str]) -> int:
    """How many settings differ. Prints each, with the first places where it does."""
    started, before = time.perf_counter(), json.loads(file.read_text(encoding="utf-8"))["records"]
    ours, different = chosen(parts), 0
    for name in [*ours, *(name for name in before if name not in ours and not parts)]:
        if name not in ours or name not in before:
            print(f"{name}: only in {'the record' if name in before else 'this file'}")
            different += 1
            continue
        try:
            found = differences(before[name], rounded(outcome(ours[name])))
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        if found:
            different += 1
            print(f"{name}: {len(found)} differences")
            for line in found[:4]:
                print(f"    {line}")
    print(f"{len(ours)} settings compared in {time.perf_counter() - started:.0f} s, {different} differ")
    return different


def main(arguments: Sequence[str]) -> int:
    torch.set_num_threads(1)
    if arguments[:1] == ["list"]:
        print("\n".join(settings()))
    elif arguments[:1] == ["record"] and len(arguments) > 1:
        record(Path(arguments[1]), arguments[2:])
    elif arguments[:1] == ["compare"] and len(arguments) > 1:
        return 1 if compare(Path(arguments[1]), arguments[2:]) else 0
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
