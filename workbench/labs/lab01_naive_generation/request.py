"""naive.request: one request seen from outside, TTFT and the time of each further token."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, PROMPT, dtype_of, gaps, next_logits, plain, shape_of, text_of, tokens_of
from workbench.generation import stream
from workbench.instruments.costs import predict, step_costs
from workbench.kv import stored_dtype

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.models.decoder import Decoder
from workbench.labs.lab01_naive_generation.step_time import predicted_step

# -- naive.request: one request seen from outside --------------------------------------------------------------


def predicted_token(ceilings: Ceilings, model: str | Decoder, prompt_tokens: int, number: int, kv: str) -> Prediction:
    """The step that gives new token `number` (from 1): with a cache every one but the first sends one token."""
    if kv == "recompute" or number == 1:
        return predicted_step(ceilings, model, prompt_tokens + number - 1)[1]
    shape, dtype = shape_of(model), dtype_of(model)
    costs = step_costs(
        shape,
        new_tokens=[1],
        contexts=[prompt_tokens + number - 2],
        logit_rows=1,
        weight_bytes_per_element=dtype.itemsize,
        kv=kv,
        kv_bytes_per_element=stored_dtype(dtype, "cpu").itemsize,
    )
    return predict(costs, ceilings, dtype)


def predict_request(
    ceilings: Ceilings, *, model, prompt: str, max_new_tokens: int, kv: str, **_: Any
) -> Sequence[tuple]:
    """(number of the new token, seconds until it follows the one before, limit), for at most 65 of the tokens."""
    start, stride = len(tokens_of(model, prompt)), max(1, max_new_tokens // 64)
    numbers = sorted({*range(1, max_new_tokens, stride), max_new_tokens})
    steps = [(i, predicted_token(ceilings, model, start, i, kv)) for i in numbers]
    return [(i, p.seconds, p.limit) for i, p in steps]


def run_request(
    bench: Bench, *, filters: Mapping[str, Callable] | None = None, loop: Callable | None = None, **settings: Any
) -> Iterator[Measurement]:
    """Two Measurements a request: "first token" (TTFT, one sample) and "each further token" (in order).

    Ours first; with a learner's loop or filters the same request again through them. The text is in
    settings["text"]; counts are of the whole request; predicted is a step over the text at half way. Stopped
    in the middle, the tokens that came are still measured.
    """
    decoder = bench.model(settings["model"])
    ids = tokens_of(decoder, settings["prompt"])
    bench.ceilings()
    bench.report("warming up")
    next_logits(decoder, ids)
    bench.check_stop()
    ours = yield from _one_request(bench, decoder, ids, settings, "ours", {}, None)
    if filters or loop:
        yours = {k: v for k, v in {"filters": filters, "loop": loop}.items() if v is not None}
        yield from _one_request(bench, decoder, ids, settings, "yours", yours, ours)


def _one_request(bench, decoder, ids, settings, by, parts, reference) -> Generator[Measurement, None, list[int]]:
    """Yields the request's Measurements and returns its tokens."""
    asked = {k: settings[k] for k in ("max_new_tokens", "temperature", "top_p", "seed", "kv")}
    events = stream(decoder, ids, **asked, **parts, cancel=bench.stop)
    text = ""
    for number, event in enumerate(events, 1):
        text += event.text
        bench.report(f"{by}: token {number} of at most {settings['max_new_tokens']}\n{text}")
    result = events.result()
    check = f"{len(result.tokens)} tokens, ended by {result.finish_reason}"
    if reference is not None:
        check += _compared(result.tokens, reference)
    times, last = gaps(result), len(result.tokens)
    for phase, part, middle in (("first token", slice(0, 1), 0), ("each further token", slice(1, None), last // 2)):
        if not times[part]:
            continue
        expected = predicted_token(bench.ceilings(), decoder, result.prompt_tokens, middle + 1, settings["kv"])
        yield bench.measurement(
            name="naive.request",
            settings={**plain(settings), "phase": phase, "by": by, "text": text_of(decoder, result)},
            samples=times[part],
            unit="s",
            counts={
                "prompt_tokens": result.prompt_tokens,
                "new_tokens": last,
                "rows": result.rows_processed,
                "model_calls": result.model_calls,
            },
            predicted=expected.seconds,
            limit=expected.limit,
            check=check,
        )
    bench.check_stop()
    return list(result.tokens)


def _compared(tokens: Sequence[int], ours: Sequence[int]) -> str:
    """In words: whether a learner's request wrote what ours wrote."""
    if list(tokens) == list(ours):
        return "; the same tokens as ours"
    at = next((i for i, (a, b) in enumerate(zip(tokens, ours)) if a != b), min(len(tokens), len(ours)))
    return f"; not the tokens of ours, from new token {at + 1} on"


EXPERIMENT = Experiment(
    name="naive.request",
    lab=1,
    question="One request, from outside: when does the first token come, and how fast the others?",
    how="one request after a warm-up pass; every token is timed when it can be shown. TTFT is the time to the "
    "first token, TPOT the mean time of each further one. The prediction is that of a step over the text so far.",
    settings=(
        Setting("prompt", PROMPT, "text", help="the text to go on from"),
        MODEL,
        Setting("max_new_tokens", 64, "int", 2, 1000, help="tokens to write at most"),
        Setting("temperature", 0.8, "float", 0.0, 2.0, step=0.05, help="0 is greedy"),
        Setting("top_p", 0.95, "float", 0.01, 1.0, step=0.01, help="keep the best tokens that hold p together"),
        Setting("seed", 0, "int", 0, 9999, help="the same seed writes the same text"),
        Setting(
            "kv", "recompute", "choice", choices=("recompute", "contiguous"), help="what is remembered between steps"
        ),
    ),
    run=run_request,
    predict=predict_request,
    learner=("loop", "filters"),
)
