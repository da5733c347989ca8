"""time.price: from a model's shape, a machine and an hourly price to TTFT, TPOT and dollars for a million tokens."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.experiments.cards import CARDS, HERE, card_ceilings
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, plain, shape_of, text_ids
from workbench.experiments.steps import (
    BATCHES,
    WEIGHTS,
    Sequences,
    decode_step,
    powers_of_two,
    prefill_step,
    time_prefill,
)
from workbench.instruments.costs import (
    decode_costs,
    dollars_per_million_tokens,
    kv_bytes,
    largest_batch,
    predict,
    prefill_costs,
    prepared_on,
)
from workbench.instruments.device import CARD_MEMORY_BYTES
from workbench.instruments.memory import available_bytes
from workbench.models.checkpoints import shipped_names
from workbench.models.shapes import PUBLIC_SHAPES

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.models.config import ModelConfig

SHAPES = (
    *(name for name, shape in PUBLIC_SHAPES.items() if shape.experts is None),
    *shipped_names(states=False, experts=False),
)
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Quote:
    """What a workload takes and costs on a machine that is never idle. Times in seconds, money in dollars."""

    batch: int
    ttft_s: float  # one prompt alone
    ttft_limit: str
    tpot_s: float  # one step of the whole batch, at the context in the middle of an answer
    tpot_limit: str
    tokens_per_s: float  # of all sequences together
    dollars_per_million_prompt: float
    dollars_per_million_output: float
    dollars_per_request: float
    needed_bytes: float  # weights and caches, at the end of the answers
    memory_bytes: float
    largest_batch: int

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.memory_bytes


def memory_of(card: str, device: str = "cpu") -> float:
    """Bytes of memory of a published card, or what is free on the device that is here."""
    return available_bytes(device) if card == HERE else CARD_MEMORY_BYTES[card]


def arithmetic(weight_bytes: float) -> str:
    """In what the products are computed: quantized weights are widened to bfloat16 first."""
    return "float32" if weight_bytes == 4 else "bfloat16"


def quote(
    ceilings: Ceilings,
    shape: ModelConfig,
    *,
    batch: int,
    prompt_tokens: int,
    output_tokens: int,
    weight_bytes: float,
    cache_bytes: float,
    dollars_per_hour: float,
    memory_bytes: float,
) -> Quote:
    """Predicted from the shape alone: prefill one prompt at a time, decode `batch` sequences in each step."""
    elements: dict[str, Any] = {"weight_bytes_per_element": weight_bytes, "kv_bytes_per_element": cache_bytes}
    arranged: dict[str, Any] = {"kv": "contiguous" if shape.latent_attention is None else "latent"}
    arranged["arrangement"] = prepared_on(ceilings, shape)
    middle = prompt_tokens + output_tokens // 2
    first = predict(
        prefill_costs(shape, batch=1, prompt=prompt_tokens, **arranged, **elements), ceilings, arithmetic(weight_bytes)
    )
    step = predict(
        decode_costs(shape, batch=batch, context=middle, **arranged, **elements), ceilings, arithmetic(weight_bytes)
    )
    tokens = prompt_tokens + output_tokens
    prices = priced(first.seconds / prompt_tokens, step.seconds / batch, dollars_per_hour)
    return Quote(
        batch=batch,
        ttft_s=first.seconds,
        ttft_limit=first.limit,
        tpot_s=step.seconds,
        tpot_limit=step.limit,
        tokens_per_s=batch / step.seconds,
        dollars_per_million_prompt=prices[0],
        dollars_per_million_output=prices[1],
        dollars_per_request=(prices[0] * prompt_tokens + prices[1] * output_tokens) / 1e6,
        needed_bytes=shape.num_parameters() * weight_bytes + batch * kv_bytes(shape, tokens, cache_bytes),
        memory_bytes=memory_bytes,
        largest_batch=largest_batch(shape, memory_bytes=memory_bytes, tokens=tokens, **elements),
    )


def priced(
    seconds_per_prompt_token: float, seconds_per_output_token: float, dollars_per_hour: float
) -> tuple[float, float]:
    """Dollars for a million prompt tokens and for a million output tokens, of all sequences together."""
    return (
        dollars_per_million_tokens(1 / seconds_per_prompt_token, dollars_per_hour),
        dollars_per_million_tokens(1 / seconds_per_output_token, dollars_per_hour),
    )


def quotes(ceilings: Ceilings, batches: list[int], device: str = "cpu", **settings: Any) -> list[Quote]:
    """The quote of the experiment's settings at each batch size."""
    card = settings["card"]
    named = ("prompt_tokens", "output_tokens", "weight_bytes", "cache_bytes", "dollars_per_hour")
    asked = {name: settings[name] for name in named}
    here, memory = card_ceilings(card, ceilings), memory_of(card, device)
    shape = shape_of(settings["shape"])
    return [quote(here, shape, batch=b, memory_bytes=memory, **asked) for b in batches]


def predicted_log(q: Quote, prompt_tokens: int, output_tokens: int) -> list[dict[str, Any]]:
    """The passes of one batch as they are predicted: a prompt at a time, then the steps of all together."""
    passes = [("prefill", 1, prompt_tokens, q.ttft_s)] * q.batch + [("decode", q.batch, 0, q.tpot_s)] * (
        output_tokens - 1
    )
    now, log = 0.0, []
    for kind, sequences, tokens, took in passes:
        log.append(
            {
                "kind": kind,
                "sequences": sequences,
                "prompt_tokens": tokens,
                "start_s": now,
                "end_s": (now := now + took),
            }
        )
    return log


def your_price(price: Callable, ceilings: Ceilings, q: Quote, **settings: Any) -> tuple[float, float, float]:
    """Dollars a million prompt, output and all tokens, as a learner's workload_price(steps, parameters=,
    peak_flop_per_s=, dollars_per_hour=) says of the log that is predicted. Raises WorkbenchError for anything else."""
    yours = price(
        predicted_log(q, settings["prompt_tokens"], settings["output_tokens"]),
        parameters=shape_of(settings["shape"]).num_parameters(),
        peak_flop_per_s=card_ceilings(settings["card"], ceilings).flop_per_s[arithmetic(settings["weight_bytes"])],
        dollars_per_hour=settings["dollars_per_hour"],
    )
    numbers = isinstance(yours, tuple | list) and all(
        isinstance(y, int | float) and not isinstance(y, bool) and math.isfinite(y) for y in yours
    )
    if not numbers or len(yours) != 4:
        raise WorkbenchError(
            "price(…) must return dollars a million (prompt, output, all) tokens and the utilization, got "
            f"{yours!r:.80}"
        )
    return yours[0], yours[1], yours[2]


def predict_price(ceilings: Ceilings, **settings: Any) -> Sequence[tuple[float, float, str]]:
    """(batch, TPOT in seconds, limit) at 1, 2, 4, … up to the batch that is set."""
    found = quotes(ceilings, powers_of_two(settings["batch"]), **settings)
    return [(q.batch, q.tpot_s, q.tpot_limit) for q in found]


def run_price(
    bench: Bench,
    *,
    model,
    weights: str,
    batch: int,
    prompt_tokens: int,
    output_tokens: int,
    dollars_per_hour: float,
    repeats: int,
    price: Callable | None = None,
    **_: Any,
) -> Iterator[Measurement]:
    """This machine with `model`, at the same hourly price: TTFT and TPOT (unit "s"), then dollars for a million
    prompt and output tokens (unit "$/M tokens"). A learner's price is for the panel. Lengths that the model cannot read
    are cut, and the check says so.
    """
    shape, ceilings = shape_of(model), bench.ceilings()
    prompt = min(prompt_tokens, shape.context_length // 2)
    output = min(output_tokens, shape.context_length - prompt)
    cut = ""
    if (prompt, output) != (prompt_tokens, output_tokens):
        cut = (
            f"; prompt {prompt:,} of {prompt_tokens:,} and answer {output:,} of {output_tokens:,} tokens, because this "
            f"model reads {shape.context_length:,}"
        )
    middle = min(prompt + output // 2, shape.context_length - 1)
    sequences = Sequences(bench, model, weights, context=middle, max_sequences=batch)
    ids = text_ids(sequences.decoder, prompt + repeats + 1)
    bench.report("part 1 of 2: the prompt")
    texts = [ids[at : at + prompt] for at in range(repeats + 1)]
    first = time_prefill(bench, sequences.decoder, sequences.fast, texts)
    bench.report("part 2 of 2: steps of the batch")
    steps = sequences.time(batch, repeats)
    settings = {
        **plain({"model": model, "weights": weights}),
        "batch": batch,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "dollars_per_hour": dollars_per_hour,
    }
    costs, expected = prefill_step(ceilings, model, prompt=prompt, weights=weights)
    step_costs, step = decode_step(ceilings, model, batch=batch, context=middle, weights=weights)
    predicted = priced(expected.seconds / prompt, step.seconds / batch, dollars_per_hour)
    prompt_price, output_price = (
        [priced(s, s, dollars_per_hour)[0] for s in seconds]
        for seconds in ([s / prompt for s in first.samples], [s / batch for s in steps.samples])
    )
    for what, samples, unit, counts, value, limit, check in (
        ("TTFT", first.samples, "s", costs.counts(), expected.seconds, expected.limit, first.check),
        ("TPOT", steps.samples, "s", step_costs.counts(), step.seconds, step.limit, steps.check),
        ("prompt", prompt_price, "$/M tokens", {}, predicted[0], expected.limit, "from the TTFT"),
        ("output", output_price, "$/M tokens", {}, predicted[1], step.limit, "from the TPOT"),
    ):
        if what == "TPOT":
            counts = {**counts, "tokens_per_s": batch / statistics.median(samples)}
        yield bench.measurement(
            name="time.price",
            settings={**settings, "what": what},
            samples=samples,
            unit=unit,
            counts=counts,
            predicted=value,
            limit=limit,
            check=check + cut,
        )


EXPERIMENT = Experiment(
    name="time.price",
    lab=2,
    question="What does a workload cost: how long until the first token, how fast the others, how many dollars?",
    how=(
        "the prediction is for the shape on the card, from its data sheet. Run measures this machine instead, with "
        "the model named beside it, and puts the same price on its hour: one prompt into an empty KV cache, then steps "
        "of the whole batch at the context in the middle of an answer. Machines are taken to be busy all the time, and "
        "the hourly price is yours to set: 2.00 is an example, no offer."
    ),
    settings=(
        Setting("shape", "llama-3.1-8b", "choice", choices=SHAPES, help="the model that is priced"),
        Setting("card", "h100-sxm", "choice", choices=CARDS, help="the machine that is priced"),
        Setting(
            "dollars_per_hour",
            2.0,
            "float",
            0.05,
            20.0,
            unit="$",
            step=0.05,
            help="price of an hour of the machine; 2.00 is an example",
        ),
        Setting("batch", 16, "choice", choices=BATCHES, unit="sequences", help="B, sequences in a step"),
        Setting("prompt_tokens", 512, "choice", choices=LENGTHS, unit="tokens", help="length of a prompt"),
        Setting("output_tokens", 128, "choice", choices=LENGTHS, unit="tokens", help="length of an answer"),
        Setting("weight_bytes", 2, "choice", choices=(0.5, 1, 2, 4), unit="bytes", help="bytes of a weight"),
        Setting("cache_bytes", 2, "choice", choices=(1, 2, 4), unit="bytes", help="bytes of a stored key's element"),
        dataclasses.replace(MODEL, help="what Run measures on this machine"),
        WEIGHTS,
        Setting("repeats", 3, "int", 1, 50, brief=1, help="timed runs"),
    ),
    run=run_price,
    predict=predict_price,
    learner=("price",),
)
