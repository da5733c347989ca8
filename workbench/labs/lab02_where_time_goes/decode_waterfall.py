"""time.decode_waterfall: from transformers' decode step to reading the weights once, cause after cause taken away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Limits, Setting
from workbench.experiments.greedy import ROUNDING, check_greedy
from workbench.experiments.inputs import plain, shape_of, text_ids
from workbench.experiments.loops import Loops
from workbench.experiments.steps import CONTEXTS, DTYPES, WEIGHTS, decode_step, fits_context, kv_element_bytes, loaded
from workbench.instruments import passing
from workbench.instruments.costs import decode_costs, predict
from workbench.instruments.timing import exclusive
from workbench.labs.lab02_where_time_goes.ways import (
    DECODER,
    LOOPED,
    NATIVE,
    ONE_CALL,
    PACKED,
    PREPARED,
    WAYS,
    Tokens,
    Way,
    operations_of,
    python_calls_of,
    ways_of,
)
from workbench.models.linear import Packed, Plain
from workbench.models.measured_linear import maker_of
from workbench.models.native_steps import why_not_shape

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction, StepCosts
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.models.decoder import Decoder

UNTIMED, TIMED = 1, 3  # steps of a way in a round: the first brings its weights back into the processor's cache
BEFORE = 3  # steps before the first round: one to make everything ready, two that are counted
CAUSES = {  # what is taken away on the way to it
    DECODER: "general code",
    PREPARED: "small operations",
    PACKED: "layout of weights",
    LOOPED: "small kernels",
    ONE_CALL: "Python and dispatch",
    NATIVE: "generated loops",
}
AS_PREPARED: dict[Any, str] = {Plain: PREPARED, Packed: PACKED}  # the way whose form `prepare` may choose by itself
LARGE_MODEL_BYTES = 1 << 30
LEFT = "left unexplained"
CEILING = "reading once"


class Fall(NamedTuple):
    """From one level to the next: seconds, below 0 where the next one is slower. causes: those of the ways in between,
    which were left out, and of the one that it goes to."""

    to: str
    causes: tuple[str, ...]
    seconds: float

    @property
    def cause(self) -> str:
        return " and ".join(self.causes)


def falls(levels: Mapping[str, float], ceiling_s: float) -> list[Fall]:
    """{way: seconds of its step}, in the order of WAYS -> what lies between neighbours, and at the end between the last
    and the ceiling. They and the ceiling add up to the first level."""
    between = [Fall(b, causes_between(a, b), levels[a] - levels[b]) for a, b in pairwise(levels)]
    last = [Fall(CEILING, (LEFT,), levels[name] - ceiling_s) for name in list(levels)[-1:]]
    return between + last


def causes_between(a: str, b: str) -> tuple[str, ...]:
    """What is taken away from one of WAYS to a later one."""
    return tuple(CAUSES[way] for way in WAYS[WAYS.index(a) + 1 : WAYS.index(b) + 1])


# -- what is counted and predicted -------------------------------------------------------------------------------


def new_tokens(repeats: int) -> int:
    """Tokens that each way generates: that of the prompt, and one a step."""
    return 1 + BEFORE + repeats * (UNTIMED + TIMED)


def cached_tokens(context: int, repeats: int) -> int:
    """Tokens in the cache before a timed step, the mean over all of them: the text grows by one in every step."""
    each_round = range(BEFORE + UNTIMED, new_tokens(repeats) - 1, UNTIMED + TIMED)
    steps = [first + step for first in each_round for step in range(TIMED)]
    return context + sum(steps) // len(steps)


def ceiling_of(ceilings: Ceilings, costs: StepCosts) -> tuple[float, float]:
    """(bytes, seconds): weights and cache of a step, read once at the measured bandwidth, and nothing else."""
    read = costs.bytes_by_part["weights"] + costs.bytes_by_part["kv"]
    return read, read / ceilings.read_bytes_per_s


def expected(
    ceilings: Ceilings, *, model: str | Decoder, weights: str, context: int, repeats: int
) -> tuple[StepCosts, dict[str, Prediction]]:
    """(what a prepared step costs, {way: prediction} of those ways that can be predicted).

    The speed of products was measured in the form that `prepare` chooses here, so it predicts the way in that form. One
    function starts nothing, and its products take their bytes or the arithmetic of its own loop.
    """
    cached = cached_tokens(context, repeats)
    costs, prepared = decode_step(ceilings, model, batch=1, context=cached, weights=weights)
    as_written = decode_costs(
        shape_of(model),
        batch=1,
        context=cached,
        weight_bytes_per_element=DTYPES[weights].itemsize,
        kv_bytes_per_element=kv_element_bytes(ceilings, weights),
        arrangement="plain",
    )
    by_way = {DECODER: predict(as_written, ceilings, weights)}
    form = maker_of(passing.MATRIX, DTYPES[weights], "cpu", LARGE_MODEL_BYTES)
    if form in AS_PREPARED:
        by_way[AS_PREPARED[form]] = prepared
    shape, dtype = shape_of(model), DTYPES[weights]
    if not why_not_shape(shape):
        of_loops = {NATIVE: "native"} if shape.is_gpt2 else {LOOPED: "looped", NATIVE: "native"}
        for way, steps in of_loops.items():
            by_way[way] = predict(Loops(steps, dtype).counted(costs), ceilings, weights)
    return costs, by_way


def predict_decode_waterfall(ceilings: Ceilings, **settings: Any) -> Sequence[tuple[float, float, str]]:
    """(number of the way, seconds of its step, what binds)."""
    _costs, by_way = expected(ceilings, **settings)
    return [(1 + WAYS.index(name), one.seconds, one.limit) for name, one in by_way.items()]


# -- measured ----------------------------------------------------------------------------------------------------


class _Steps:
    """A way that generates: its tokens, what its step was counted to do, and the seconds of a step in each round."""

    def __init__(self, way: Way, prompt: Tokens, count: int) -> None:
        self.way, self.tokens, self.samples = way, Tokens(), list[float]()
        self._coming = way.begin(prompt, count)
        self.take()
        self.take()
        self.why_not = way.why_not()
        self.operations = operations_of(self.take)
        self.python_calls = python_calls_of(partial(self.tokens.extend, islice(self._coming, 1)))

    def take(self, count: int = 1) -> None:
        self.tokens.extend(islice(self._coming, count))


def run_decode_waterfall(bench: Bench, *, model, weights: str, context: int, repeats: int) -> Iterator[Measurement]:
    """All in seconds: the ceiling, computed; its settings say what was left out and why. A plain read of as many bytes;
    a step of each way, a sample a round; what lies between neighbours, round by round; what is left above the ceiling.

    Raises WorkbenchError on a GPU, where other ways exist, and where a way's tokens are not greedy.
    """
    if not bench.device.startswith("cpu"):
        raise WorkbenchError(
            f"the ways of this waterfall are those of a CPU, and the bench is on {bench.device}; run kernels.graphs"
            ' there, or time.decode_waterfall on "cpu"'
        )
    count = new_tokens(repeats)
    fits_context(shape_of(model), context + count)
    ceilings = bench.ceilings()
    settings = {"model": model, "weights": weights, "context": context}
    costs, predicted = expected(ceilings, **settings, repeats=repeats)
    decoder = loaded(bench, model, weights)
    prompt = text_ids(decoder, context)
    taken, left_out = _ready(bench, decoder, prompt, count)
    read, ceiling_s = ceiling_of(ceilings, costs)
    as_many, reads = torch.ones(int(read) // 4), list[float]()
    for number in range(repeats):
        bench.report(f"round {number + 1} of {repeats}")
        with exclusive(bench.check_stop):
            reads.append(bench.measure(as_many.sum, repeats=1)[0])
            for one in taken:
                one.take(UNTIMED)
                one.samples.append(bench.measure(partial(one.take, TIMED), repeats=1, warmup=0)[0] / TIMED)
    checks = _verified(bench, decoder, prompt, taken, count)
    shared = {**plain(settings), "cached_tokens": cached_tokens(context, repeats)}
    yield bench.measurement(
        name="time.decode_waterfall",
        settings={**shared, "part": "ceiling", "left_out": left_out},
        samples=[ceiling_s],
        unit="s",
        counts={"bytes": read},
        check="computed: the bytes of weights and cache over the measured read bandwidth",
    )
    yield bench.measurement(
        name="time.decode_waterfall",
        settings={**shared, "part": "read"},
        samples=reads,
        unit="s",
        counts={"bytes": read},
        check="a sum over as many bytes, once a round, right after one that is thrown away",
    )
    for one, check in zip(taken, checks):
        prediction = predicted.get(one.way.name)
        yield bench.measurement(
            name="time.decode_waterfall",
            settings={**shared, "part": "step", "way": one.way.name},
            samples=one.samples,
            unit="s",
            counts=costs.counts() | _counts(one, costs, kv_element_bytes(ceilings, weights)),
            predicted=prediction.seconds if prediction else None,
            limit=prediction.limit if prediction else None,
            check=check,
        )
    yield from _differences(bench, shared, taken, ceiling_s)


def _ready(bench: Bench, decoder: Decoder, prompt: Tokens, count: int) -> tuple[list[_Steps], dict[str, str]]:
    """Every way with its prompt processed and its step counted, and {name: why it is left out} of the others."""
    taken: list[_Steps] = []
    left_out: dict[str, str] = {}
    for way in ways_of(bench, decoder):
        if not isinstance(way, Way):
            left_out[way[0]] = way[1]
            continue
        with exclusive(bench.check_stop):
            one = _Steps(way, prompt, count)
        if one.why_not:
            left_out[way.name] = one.why_not
        else:
            taken.append(one)
    return taken, left_out


def _verified(bench: Bench, decoder: Decoder, prompt: Tokens, taken: Sequence[_Steps], count: int) -> list[str]:
    """In words, that each way's tokens are greedy. Raises WorkbenchError, naming the way, where they are not."""
    oracle = next(one.tokens for one in taken if one.way.name == DECODER)
    known: dict[tuple[int, ...], str] = {}
    said = []
    for one in taken:
        bench.check_stop()
        key = tuple(one.tokens)
        try:
            known[key] = known.get(key) or check_greedy(decoder, prompt, one.tokens, count, ROUNDING[decoder.dtype])
        except WorkbenchError as error:
            raise WorkbenchError(f"{one.way.name}: {error}") from error
        same = sum(a == b for a, b in zip(one.tokens, oracle))
        text = "the tokens of our Decoder" if same == count else f"{same} of {count} tokens are those of our Decoder"
        said.append("; ".join(filter(None, [text, known[key], one.way.said()])))
    return said


def _counts(one: _Steps, costs: StepCosts, counted_in: int) -> dict[str, float]:
    """counted_in: bytes of a cached number in `costs`."""
    return {
        "operations": one.operations,
        "python_calls": one.python_calls,
        "weight_bytes": costs.bytes_by_part["weights"],
        "kv_bytes": costs.bytes_by_part["kv"] * one.way.kept.itemsize / counted_in,
    }


def _differences(
    bench: Bench, shared: Mapping[str, Any], taken: Sequence[_Steps], ceiling_s: float
) -> Iterator[Measurement]:
    for a, b in pairwise(taken):
        cause = " and ".join(causes_between(a.way.name, b.way.name))
        yield bench.measurement(
            name="time.decode_waterfall",
            settings={**shared, "part": "cause", "from": a.way.name, "to": b.way.name, "cause": cause},
            samples=[before - after for before, after in zip(a.samples, b.samples)],
            unit="s",
            check="both steps of the same round, on the same tokens",
        )
    last = taken[-1]
    yield bench.measurement(
        name="time.decode_waterfall",
        settings={**shared, "part": "cause", "from": last.way.name, "to": CEILING, "cause": LEFT},
        samples=[seconds - ceiling_s for seconds in last.samples],
        unit="s",
        check=f"steps of {last.way.name} without the ceiling; below 0 where bytes came from a cache",
    )


def _limits(*, model: str | Decoder, repeats: int, **_: Any) -> Limits:
    return {"context": shape_of(model).context_length - new_tokens(repeats)}


EXPERIMENT = Experiment(
    name="time.decode_waterfall",
    lab=2,
    question="From transformers' step to reading the weights once: what does each cause take?",
    how=f"one text, continued greedily by each way with a cache of its own; in a round each takes {UNTIMED} untimed and"
    f" {TIMED} timed steps, one way after the other, after a plain read of as many bytes. A bar is the difference of"
    " two medians, its spread that of the differences within a round. Every token is held to the plain Decoder without"
    " a cache. transformers' step is its model and an argmax; the others go through `generate`, which also keeps"
    " log-probabilities and text. Operations and Python calls are counted in steps of their own. On a CPU.",
    settings=(
        Setting(
            "model",
            "stdlib-10m",
            "model",
            choices=("stdlib-1m", "stdlib-10m", "random-110m"),
            help="random-110m has weights far beyond the processor's cache",
        ),
        WEIGHTS,
        Setting("context", 256, "choice", choices=CONTEXTS[:7], unit="tokens", help="cached when the steps begin"),
        Setting("repeats", 15, "int", 1, 50, brief=2, help="rounds; in each, each way once"),
    ),
    run=run_decode_waterfall,
    limits=_limits,
    predict=predict_decode_waterfall,
    record={"cuda": ()},
)
