"""serving.peers: ragged requests served one by one, in static groups and continuously, by us, transformers and
llama.cpp.

All have the same weights, prompts and lengths, in one run and in turns: A B C … A B C …, so that a machine that slows
down slows all. What is reported of a pair is the median of the ratios within a turn. Every engine writes exactly as
many tokens as were asked for, greedy and without stop tokens, and its texts are held against ours, written one by one:

    equal        token for token; or else
    greedy       each token the oracle's best one after the text before it (the plain Decoder without a cache), up to
                 1e-4 of the largest logit: float32 sums in another order, and two tokens so close may change places
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.greedy import ROUNDING, check_greedy
from workbench.experiments.inputs import MODEL, plain
from workbench.instruments.timing import exclusive
from workbench.labs.lab08_continuous_batching.contenders import (
    OURS,
    OURS_ALONE,
    OURS_STATIC,
    THEIR_STATIC,
    Asked,
    Contender,
    Tokens,
    contenders,
)
from workbench.models.evaluation import held_out_passages
from workbench.serving.bounds import greedy_steps, min_steps, static_batches
from workbench.serving.lengths import HeavyTail
from workbench.serving.load import prompt_ids, workload

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.decoder import Decoder

MIN_OUTPUT, TAIL = 8, 0.5  # tokens; the exponent of the outputs' heavy tail


def requests_for(decoder: Decoder, count: int, most_new_tokens: int, seed: int) -> Asked:
    """[count] requests: held-out text, prompts of 16 to 64 tokens, outputs of 8 to most_new_tokens, a few of them long.

    A model without a tokenizer gets random token ids. Raises WorkbenchError for what is beyond the model's context.
    """
    ragged = replace(workload("ragged"), outputs=HeavyTail(MIN_OUTPUT, most_new_tokens, TAIL))
    arrivals = ragged.draw(count, seed=seed, context=decoder.config.context_length)
    if decoder.tokenizer is None:
        return Asked(arrivals, [prompt_ids(one, decoder.config.vocab_size, seed=seed) for one in arrivals])
    passages = held_out_passages(decoder.tokenizer, ragged.prompts.high, count).tolist()
    return Asked(arrivals, [text[: one.prompt_tokens] for text, one in zip(passages, arrivals)])


def run_serve_peers(
    bench: Bench,
    *,
    model,
    peers: str,
    arrangement: str,
    requests: int,
    slots: int,
    most_new_tokens: int,
    seed: int,
    repeats: int,
) -> Iterator[Measurement]:
    """A Measurement a contender: seconds of all requests, one sample a turn, with its ratios in the counts."""
    if bench.device != "cpu":
        raise WorkbenchError('serving.peers compares engines on a CPU; run it with device "cpu"')
    decoder = bench.model(model)
    if decoder.dtype != torch.float32:
        raise WorkbenchError(f"serving.peers compares engines in float32, and the model is in {decoder.dtype}")
    asked = requests_for(decoder, requests, most_new_tokens, seed)
    settings = {
        **plain({"model": model}),
        **{
            "arrangement": arrangement,
            "requests": requests,
            "slots": slots,
            "most_new_tokens": most_new_tokens,
            "seed": seed,
        },
    }
    with contextlib.ExitStack() as stack:
        all_of_them = list(contenders(bench, stack, model, asked, slots, peers, arrangement))
        for turn in range(-1, repeats):  # before the first, a few requests to warm up
            for one in all_of_them:
                bench.report(f"turn {turn + 1} of {repeats}: {one.name}" if turn >= 0 else "warming up")
                bench.check_stop()
                with exclusive(bench.check_stop):
                    seconds, texts = one.run(asked if turn >= 0 else asked.first(4))
                if turn >= 0:
                    one.samples.append(seconds)
                    one.texts = texts
    by_name = {one.name: one for one in all_of_them}
    alone = by_name[OURS_ALONE].texts
    for one in all_of_them:
        bench.check_stop()
        bench.report(f"checking the texts of {one.name}")
        held_against = None if one.name == OURS_ALONE else alone
        try:
            equal, check = check_texts(decoder, asked, one.texts, held_against, exact=one.exact)
        except WorkbenchError as error:
            raise WorkbenchError(f"{one.name}: {error}") from error
        yield bench.measurement(
            name="serving.peers",
            settings={**settings, "engine": one.name},
            samples=one.samples,
            unit="s",
            counts={
                "tokens": sum(asked.new_tokens),
                "tokens_per_s": sum(asked.new_tokens) / statistics.median(one.samples),
                "texts_equal": equal,
                **ratios(one, by_name),
                **of_lengths(one.name, asked, slots, one.samples, by_name[OURS_STATIC].samples),
            },
            check=check,
        )


def check_texts(
    decoder: Decoder, asked: Asked, texts: Sequence[Tokens], alone: Sequence[Tokens] | None, *, exact: bool
) -> tuple[int, str]:
    """(texts equal to those written one by one, what was found in words). alone: None where `texts` are those.

    exact: False for an engine whose arithmetic is not float32; then only the lengths must be right.
    Raises WorkbenchError for a text of another length than asked for, and for one that is not greedy.
    """
    equal = 0
    for number, (prompt, wanted) in enumerate(zip(asked.prompts, asked.new_tokens, strict=True)):
        text = texts[number]
        if len(text) != wanted:
            raise WorkbenchError(f"an engine gave {len(text)} tokens where {wanted} were asked for")
        if alone is not None and text == alone[number]:
            equal += 1
        elif exact:
            check_greedy(decoder, prompt, text, wanted, ROUNDING[torch.float32])
    count = len(asked.prompts)
    if alone is None:
        return (count, f"all {count} texts are the oracle's, each token the best up to 1e-4 of the largest logit")
    said = f"{equal} of {count} texts are ours one by one, token for token"
    if exact and equal < count:
        said += "; the others are greedy up to 1e-4 of the largest logit"
    return equal, said if exact else f"{said}; its cache and attention are not float32"


def ratios(one: Contender, by_name: dict[str, Contender]) -> dict[str, float]:
    """How many times as fast as some others, each the median over the turns."""
    named = {
        "times_as_fast_as_our_one_by_one": OURS_ALONE,
        "times_as_fast_as_our_static": OURS_STATIC,
        "times_as_fast_as_transformers_static": THEIR_STATIC,
        "times_as_fast_as_transformers_continuous": "transformers, continuous",
    }
    return {
        key: statistics.median(a / b for a, b in zip(by_name[other].samples, one.samples, strict=True))
        for key, other in named.items()
        if other in by_name
    }


def of_lengths(
    name: str, asked: Asked, slots: int, samples: Sequence[float], static_samples: Sequence[float]
) -> dict[str, float]:
    """Steps, computed rows and padding, from the lengths alone; of our continuous batching its share of the bound.

    The bound: where a step of k rows takes a + b k seconds, a, b ≥ 0, no batching gains more over static batching than
    the larger of the two ratios, of the steps to the fewest possible and of the rows to the useful ones.
    """
    static = static_batches(asked.arrivals, slots)
    useful = static.useful_prompt_rows + static.useful_decode_rows
    if "static" in name:
        return {"steps": static.steps, "rows": static.rows, "padding_share": static.padding_share}
    if "one by one" in name:
        return {"steps": sum(asked.new_tokens), "rows": useful, "padding_share": 0.0}
    if name != OURS:
        return {"rows": useful, "padding_share": 0.0}
    bound = max(static.steps / min_steps(asked.arrivals, slots), static.rows / useful)
    gain = statistics.median(a / b for a, b in zip(static_samples, samples, strict=True))
    steps = greedy_steps(asked.arrivals, slots)
    return {"steps": steps, "rows": useful, "padding_share": 0.0, "bound": bound, "share_of_bound": gain / bound}


EXPERIMENT = Experiment(
    name="serving.peers",
    lab=8,
    question="How fast are ragged requests served one by one, in static groups, continuously; by us and by others?",
    how=(
        "the same greedy float32 requests, weights and threads in turns; ratios are medians over the turns; all "
        "texts are held against ours one by one, and those against the plain decoder without a cache; no engine's "
        "threads run while another is timed."
    ),
    settings=(
        MODEL,
        Setting("peers", "all", "choice", choices=("all", "transformers", "ours"), help="who else runs"),
        Setting(
            "arrangement",
            "fast",
            "choice",
            choices=("fast", "looped", "native"),
            help="of our model: as prepared; norms, gates and attention in C++, a call each; or steps of a few rows"
            " one function in C++",
        ),
        Setting("requests", 64, "int", low=1, high=256, help="all there from the start"),
        Setting("slots", 16, "int", low=1, high=64, help="requests in work at a time"),
        Setting("most_new_tokens", 256, "int", low=8, high=900, help="the longest output; most are short"),
        Setting("seed", 0, "int", low=0, high=1_000_000, help="of the lengths"),
        Setting("repeats", 3, "int", low=1, high=50, brief=1, help="timed turns"),
    ),
    run=run_serve_peers,
    predict=lambda ceilings, **settings: [],
    record={"cpu": ({},), "cuda": ()},
)
