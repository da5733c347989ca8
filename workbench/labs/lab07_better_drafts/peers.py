"""drafts.peers: our speculation beside transformers' assisted generation and prompt lookup, same weights, same prompts.

Contenders take turns, prompt by prompt: an engine's own plain decoding is what its drafts are held against, and all are
held against ours. Every text must be the oracle's greedy one, up to rounding.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError, unknown
from workbench.experiments.cached_steps import said_of_steps
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.greedy import ROUNDING, check_greedy
from workbench.experiments.inputs import MODEL, plain
from workbench.experiments.texts import PROMPT_SETS, prompts_of
from workbench.generation import generate
from workbench.instruments.bench import steps_of
from workbench.instruments.timing import exclusive
from workbench.labs.lab06_speculative_sampling.inputs import DRAFT
from workbench.labs.lab07_better_drafts.draft_speed import kinds_of
from workbench.labs.lab07_better_drafts.peer_predictions import Passes, seconds_per_token
from workbench.models import prepare
from workbench.models.checkpoints import save_checkpoint
from workbench.quantization import QuantizationRecipe, quantize
from workbench.speculation import Draft, ModelDraft, draft_for

if TYPE_CHECKING:
    from workbench.decoding.loop import Generation
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.fast import Model

Tokens = list[int]
MODEL_K, LOOKUP_K, HEADS_K = 4, 8, 4
OUR_DRAFTS = ("model", "prompt_lookup", "eagle", "medusa")
AS_TRAINED, OURS_PLAIN = "as trained", "ours, plain"
LEAST_S = 1e-9
WHOLE, AFTER_FIRST = "of whole requests", "after the first token"
IN_8_BITS = QuantizationRecipe("rtn", 8, 32, {"symmetric": True}, head_bits=8)


@dataclass
class Contender:
    """`run(prompt, new_tokens)` -> its tokens. `beside`: the plain decoding of the same engine. `said`: of its steps,
    after some were taken. `expects(prompt, new_tokens)`: seconds per token that the last run should have taken, by what
    it counted; None where nothing is predicted."""

    name: str
    beside: str
    run: Callable[[Tokens, int], Tokens]
    samples: list[float] = field(default_factory=list)  # seconds per token
    tokens: list[Tokens] = field(default_factory=list)
    said: Callable[[], str] = str
    expects: Callable[..., float] | None = None
    predicted: list[float] = field(default_factory=list)  # of each sample


class Ours:
    """Requests to our `generate`, in full; the last one stays."""

    def __init__(self, target: Model, passes: Passes, of_draft: Passes | None = None, **speculation: Any) -> None:
        self.target, self.passes, self.of_draft, self.speculation = target, passes, of_draft, speculation
        self.last: Generation | None = None

    def __call__(self, prompt: Tokens, new_tokens: int) -> Tokens:
        how = {"max_new_tokens": new_tokens, "stop_token_ids": (), "kv": "contiguous"}
        self.last = generate(self.target, prompt, **how, **self.speculation)
        return self.last.tokens

    def expects(self, prompt: int, new_tokens: int, *, whole: bool) -> float:
        """Seconds per token of the last request, see `peer_predictions`."""
        assert self.last is not None, "asked after a request"
        counted = self.last.speculation
        return seconds_per_token(self.passes, self.of_draft, prompt, new_tokens, counted, whole=whole)


def run_draft_peers(
    bench: Bench,
    *,
    model,
    draft,
    draft_weights: str,
    drafts: str,
    arrangement: str,
    peers: str,
    texts: str,
    prompts: int,
    new_tokens: int,
    time: str,
    repeats: int,
) -> Iterator[Measurement]:
    """For each kind of text a Measurement a contender (unit "s", a token), with its ratios in the counts. Compiled,
    what our models' steps were stands in `check`."""
    if bench.device != "cpu":
        raise WorkbenchError('drafts.peers compares engines on a CPU; run it with device "cpu"')
    kinds, names = kinds_of(texts), _our_drafts(drafts)
    plain_decoder = bench.model(model)
    settings = plain({"model": model, "draft": draft}) | {"draft_weights": draft_weights}
    settings |= {"arrangement": arrangement, "new_tokens": new_tokens, "time": time}
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        contenders = [
            *_ours(bench, names, model, draft, draft_weights, arrangement),
            *(_transformers(bench, model, draft, Path(folder)) if peers == "all" else ()),
        ]
        for kind in kinds:
            yield from _of_kind(bench, plain_decoder, contenders, kind, prompts, repeats, settings)


def _of_kind(bench, decoder: Model, contenders, kind, count, repeats, settings) -> Iterator[Measurement]:
    texts, new_tokens = prompts_of(kind, decoder, count), settings["new_tokens"]
    whole = settings["time"] == WHOLE
    for one in contenders:
        one.samples, one.tokens, one.predicted = [], [], []
    for turn in range(-1, repeats):
        for number, prompt in enumerate(texts[:1] if turn < 0 else texts):
            bench.report(f"{kind}: turn {max(turn, 0) + 1} of {repeats}, prompt {number + 1} of {count}")
            for one in contenders:
                bench.check_stop()
                with exclusive(bench.check_stop):
                    first_s = 0.0 if whole else _timed(one, prompt, 1)[0]
                    seconds, tokens = _timed(one, prompt, new_tokens)
                if turn >= 0:
                    rest_s = max(seconds - first_s, LEAST_S)  # whatever held up the request for one token
                    one.samples.append(rest_s / (new_tokens - (not whole)))
                    one.tokens.append(tokens)
                    if one.expects is not None:
                        one.predicted.append(one.expects(len(prompt), new_tokens, whole=whole))
    samples = {one.name: one.samples for one in contenders}
    ours = contenders[0].name
    for one in contenders:
        bench.check_stop()
        for prompt, tokens in zip(texts, one.tokens):
            check = check_greedy(decoder, prompt, tokens, new_tokens, ROUNDING[torch.float32])
        yield bench.measurement(
            name="drafts.peers",
            settings={**settings, "texts": kind, "engine": one.name},
            samples=one.samples,
            unit="s",
            counts={
                "times_as_fast_as_its_plain_decoding": _ratio(samples[one.beside], one.samples),
                "times_as_fast_as_our_plain_decoding": _ratio(samples[ours], one.samples),
            },
            predicted=statistics.median(one.predicted) if one.predicted else None,
            check="; ".join(filter(None, (f"each of {count} texts, the last: {check}", one.said()))),
        )


def _timed(one: Contender, prompt: Tokens, new_tokens: int) -> tuple[float, Tokens]:
    started = perf_counter()
    tokens = one.run(prompt, new_tokens)
    return perf_counter() - started, tokens


def _ratio(slow: list[float], fast: list[float]) -> float:
    """Median over the turns of slow / fast: how many times as fast the second is."""
    return statistics.median(a / b for a, b in zip(slow, fast))


def _our_drafts(drafts: str) -> list[str]:
    names = list(OUR_DRAFTS) if drafts == "all" else [name.strip() for name in drafts.split(",")]
    for name in names:
        if name not in OUR_DRAFTS:
            raise unknown("draft", name, [*OUR_DRAFTS, "all"])
    return names


def _ours(
    bench: Bench, names: Sequence[str], model, draft, draft_weights: str, arrangement: str
) -> Iterator[Contender]:
    target = bench.model(model, arrangement=arrangement)
    ceilings, steps = bench.ceilings(), partial(said_of_steps, target)
    of_target = Passes(ceilings, target)

    def contender(name: str, *drafted: Passes, predicted: bool = True, **speculation: Any) -> Contender:
        run = Ours(target, of_target, *drafted, **speculation)
        return Contender(name, OURS_PLAIN, run, said=steps, expects=run.expects if predicted else None)

    yield contender(OURS_PLAIN)
    for name in names:
        drafted: list[Passes] = []
        if name == "model":
            small, recipe, inputs = _small(bench, draft, draft_weights, arrangement)
            made: Draft = ModelDraft(small)
            drafted.append(Passes(ceilings, small, recipe, inputs))
        else:
            made = draft_for(name, target)
        said, length = {
            "model": (f"{made.name}, K = {MODEL_K}", MODEL_K),
            "prompt_lookup": (f"prompt lookup, K = {LOOKUP_K}", LOOKUP_K),
            "eagle": (f"EAGLE, K = {HEADS_K}", HEADS_K),
            "medusa": (f"Medusa, a tree {HEADS_K} deep", HEADS_K),
        }[name]
        predicted = name in ("model", "prompt_lookup")  # what a draft head takes is not counted
        yield contender(f"ours, {said}", *drafted, predicted=predicted, draft=made, draft_length=length)


def _small(bench: Bench, draft, draft_weights: str, arrangement: str) -> tuple[Model, QuantizationRecipe | None, str]:
    """(the draft model, how its weights were rounded, what they are multiplied with)"""
    if draft_weights == AS_TRAINED:
        return bench.model(draft, arrangement=arrangement), None, "exact"
    inputs = "q8" if arrangement != "compiled" else "exact"
    in_8_bits = quantize(bench.model(draft), IN_8_BITS)
    return prepare(in_8_bits, **steps_of(arrangement), inputs=inputs), IN_8_BITS, inputs


def _transformers(bench: Bench, model, draft, folder: Path) -> Iterator[Contender]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, GenerationConfig

    loaded = []
    for name in (model, draft):
        decoder = bench.model(name)
        bench.report(f"transformers: {decoder.name}")
        save_checkpoint(decoder, folder / decoder.name)
        loaded.append(AutoModelForCausalLM.from_pretrained(folder / decoder.name, dtype=torch.float32).eval())
    target, small = loaded
    small.generation_config.num_assistant_tokens = MODEL_K
    small.generation_config.num_assistant_tokens_schedule = "constant"
    small.generation_config.assistant_confidence_threshold = 0.0  # K tokens in every round, as ours

    def contender(**how: Any) -> Callable[[Tokens, int], Tokens]:
        def run(prompt: Tokens, new_tokens: int) -> Tokens:
            ids = torch.tensor([prompt])
            asked = GenerationConfig(
                do_sample=False, max_new_tokens=new_tokens, pad_token_id=0, eos_token_id=None, disable_compile=True
            )
            out = target.generate(ids, attention_mask=torch.ones_like(ids), generation_config=asked, **how)
            return out[0, len(prompt) :].tolist()

        return run

    alone = "transformers, plain"
    yield Contender(alone, alone, contender())
    yield Contender(f"transformers, {draft_name(draft)}, K = {MODEL_K}", alone, contender(assistant_model=small))
    yield Contender(f"transformers, prompt lookup, K = {LOOKUP_K}", alone, contender(prompt_lookup_num_tokens=LOOKUP_K))


def draft_name(draft) -> str:
    return draft if isinstance(draft, str) else draft.name


EXPERIMENT = Experiment(
    name="drafts.peers",
    lab=7,
    question="What do transformers' assisted generation and prompt lookup gain on the same weights and texts?",
    how="Greedy requests in turns; each engine against its own plain decoding, and against ours. A"
    " prediction of ours is made after its request: what a round of so many rows and a step of the draft take is"
    " predicted, and how many of them there were is counted. So it says what a round takes, and not what a draft gets"
    " right; what a draft head takes is not counted, so requests with one have no prediction.",
    settings=(
        MODEL,
        DRAFT,
        Setting(
            "draft_weights",
            AS_TRAINED,
            "choice",
            choices=(AS_TRAINED, "8 bits"),
            help="of our draft model: rounded (and the inputs of its products, unless it is compiled) it reads a "
            "quarter of the bytes. What is generated stays the target's",
        ),
        Setting(
            "drafts",
            "model,prompt_lookup",
            "text",
            help=f"of ours: {', '.join(OUR_DRAFTS)}; several with commas between, or all. Heads are trained for one "
            "target, and ship for stdlib-10m",
        ),
        Setting("peers", "all", "choice", choices=("all", "ours"), help="who runs: transformers too, or ours alone"),
        Setting(
            "arrangement",
            "fast",
            "choice",
            choices=("fast", "looped", "compiled", "native"),
            help="of our models: as prepared; norms, gates and attention in C++, a call each; steps and verifications "
            "compiled, a minute or more at the first; or one function in C++",
        ),
        Setting("texts", "all", "text", help=f"{', '.join(PROMPT_SETS)}; several with commas between, or all"),
        Setting("prompts", 3, "int", low=1, high=16, brief=1, help="of each kind of text"),
        Setting("new_tokens", 96, "int", low=8, high=512, brief=16, help="written after each prompt"),
        Setting(
            "time",
            WHOLE,
            "choice",
            choices=(WHOLE, AFTER_FIRST),
            help="per token: a whole request's, prompt and all; or what it takes longer than one for a single token",
        ),
        Setting("repeats", 2, "int", low=1, high=50, brief=1, help="turns over all prompts"),
    ),
    run=run_draft_peers,
    predict=lambda ceilings, **settings: [],
    record={"cpu": ({},), "cuda": ()},
)
