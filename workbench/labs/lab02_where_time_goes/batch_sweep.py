"""time.batch_sweep: what a step costs as more sequences share it, and where a larger batch stops to pay."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.experiments.cards import CARDS, HERE, card_ceilings
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, plain, shape_of, within_context
from workbench.experiments.steps import (
    BATCHES,
    CONTEXTS,
    DTYPES,
    WEIGHTS,
    Sequences,
    decode_step,
    fits_context,
    kv_element_bytes,
    powers_of_two,
)
from workbench.instruments.costs import decode_costs, kv_bytes, largest_batch, predict, prepared_on, step_costs
from workbench.instruments.memory import available_bytes
from workbench.labs.lab02_where_time_goes.roofline import MULTIPLYING

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.models.config import ModelConfig
    from workbench.models.decoder import Decoder

LARGEST_KNEE = 1 << 20  # rows; beyond any batch there is
LARGEST_MEASURED = 1 << 16  # sequences, that a learner's batch_limits may ask for


@dataclass(frozen=True)
class Knee:
    """Where a larger batch stops to pay. All four are batch sizes.

    step: the smallest at which all FLOPs of the step take at least as long as its bytes, weights and caches; None
        where a sequence's cache takes longer to read than its FLOPs take, so that no batch gets there.
    products: the smallest at which the products with weights spend more time computing than waiting for weights;
        None where rows take as long to move as to multiply, because the matrices are small.
    caches: where the KV caches of all sequences weigh as much as the weights; beyond it L(B) grows like B.
    memory: the largest whose caches, with room for one more token each, fit beside the weights.
    """

    step: int | None
    products: int | None
    caches: float
    memory: int


def products_compute_bound(ceilings: Ceilings, shape: ModelConfig, rows: int, weights: str) -> bool:
    """Whether the products of a step over `rows` rows spend most of their time in arithmetic.

    One sequence of `rows` tokens has the same products as `rows` sequences of one: a product knows rows only.
    """
    costs = step_costs(
        shape,
        new_tokens=[rows],
        contexts=[0],
        logit_rows=rows,
        weight_bytes_per_element=DTYPES[weights].itemsize,
        arrangement=prepared_on(ceilings, shape),
    )
    multiplies = {o.name for o in costs.operations if o.part in MULTIPLYING and o.name != "attention"}
    spent = [(s, limit) for name, s, limit in predict(costs, ceilings, weights).operations if name in multiplies]
    return 2 * sum(s for s, limit in spent if limit == "compute") > sum(s for s, _ in spent)


def knee_of(ceilings: Ceilings, shape: ModelConfig, *, context: int, weights: str, memory_bytes: float) -> Knee:
    """The knee of decode steps at this context on a machine of these ceilings and this memory."""
    wide, stored = DTYPES[weights].itemsize, kv_element_bytes(ceilings, weights)
    elements: dict[str, Any] = {"weight_bytes_per_element": wide, "kv_bytes_per_element": stored}
    one = decode_costs(shape, batch=1, context=context, arrangement=prepared_on(ceilings, shape), **elements)
    matrices = sum(o.weight_bytes for o in one.operations if o.part in MULTIPLYING)
    cache = kv_bytes(shape, context + 1, stored)
    read, rate = ceilings.read_bytes_per_s, ceilings.flop_per_s[weights]
    gained = one.flops / rate - cache / read  # by each sequence more: its arithmetic less its cache
    return Knee(
        step=math.ceil(matrices / read / gained) if gained > 0 else None,
        products=_first_true(lambda rows: products_compute_bound(ceilings, shape, rows, weights)),
        caches=matrices / cache,
        memory=largest_batch(shape, memory_bytes=memory_bytes, tokens=context + 1, **elements),
    )


def _first_true(holds: Callable[[int], bool]) -> int | None:
    """The smallest whole number from 1 on for which it holds, found by doubling and halving; None: for none."""
    low, high = 0, 1
    while high < LARGEST_KNEE and not holds(high):
        low, high = high, 2 * high
    if not holds(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def predict_batch_sweep(
    ceilings: Ceilings, *, model, weights: str, context: int, largest_batch: int, card: str = HERE, **_: Any
) -> Sequence[tuple[float, float, str]]:
    """(batch, seconds per step, limit) on the card."""
    here = card_ceilings(card, ceilings)
    steps = [
        (b, decode_step(here, model, batch=b, context=context, weights=weights)[1])
        for b in powers_of_two(largest_batch)
    ]
    return [(b, p.seconds, p.limit) for b, p in steps]


def your_knee(
    knee: Callable,
    ceilings: Ceilings,
    model: str | Decoder,
    *,
    context: int,
    weights: str,
    memory_bytes: float,
    measured: Mapping[int, Sequence[float]] | None = None,
) -> tuple[int | None, int]:
    """(knee or None, largest batch) as a learner's batch_limits(measure, max_batch) says, on steps of the batches in
    `measured` and, of all others, as they are predicted. Raises WorkbenchError for anything else."""
    room = knee_of(ceilings, shape_of(model), context=context, weights=weights, memory_bytes=memory_bytes).memory

    def measure(batch: int) -> list[float]:
        if batch > room:
            raise MemoryError(f"{batch:,} caches do not fit beside the weights")
        if measured and batch in measured:
            return [max(measured[batch]), *measured[batch]]  # the first one warms up
        return [decode_step(ceilings, model, batch=batch, context=context, weights=weights)[1].seconds] * 2

    yours = knee(measure, LARGEST_MEASURED)
    if not (isinstance(yours, tuple | list) and len(yours) == 2 and _whole(yours[1], 0)):
        raise WorkbenchError(f"knee(…) must return (knee or None, largest batch), got {yours!r:.80}")
    if yours[0] is not None and not _whole(yours[0], 1):
        raise WorkbenchError(f"the knee must be a batch size of at least 1, or None; got {yours[0]!r:.80}")
    return yours[0], yours[1]


def your_tpot(
    tpot: Callable, ceilings: Ceilings, model: str | Decoder, *, batch: int, context: int, weights: str
) -> tuple[str, float]:
    """(limit, seconds) of a step as a learner's predict_tpot(config, batch=, context=, bytes_per_element=,
    launches=, ceilings=, dtype=) says. Raises WorkbenchError for anything else."""
    costs, _ = decode_step(ceilings, model, batch=batch, context=context, weights=weights)
    yours = tpot(
        shape_of(model),
        batch=batch,
        context=context,
        bytes_per_element=DTYPES[weights].itemsize,
        launches=costs.launches,
        ceilings=ceilings,
        dtype=weights,
    )
    seconds: Any = yours[1] if isinstance(yours, tuple | list) and len(yours) == 2 else None
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not (number and 0 < seconds < float("inf")):
        raise WorkbenchError(f"tpot(…) must return (limit, seconds), got {yours!r:.80}")
    return str(yours[0]), float(seconds)


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def run_batch_sweep(
    bench: Bench,
    *,
    model,
    weights: str,
    context: int,
    largest_batch: int,
    repeats: int,
    card: str = HERE,
    knee: Callable | None = None,
    tpot: Callable | None = None,
) -> Iterator[Measurement]:
    """One Measurement a batch size (samples: seconds per step), always of this machine, whatever the card."""
    shape, batches = shape_of(model), powers_of_two(largest_batch)
    fits_context(shape, context + 1)
    ceilings = bench.ceilings()
    at: dict[str, Any] = {"context": context, "weights": weights}
    yours: dict[str, float] = {}
    if knee is not None:
        first, most = your_knee(knee, ceilings, model, memory_bytes=available_bytes(bench.device), **at)
        yours["largest_batch_yours"] = most
        if first is not None:
            yours["knee_yours"] = first
    sequences = Sequences(bench, model, weights, context=context, max_sequences=largest_batch)
    for number, batch in enumerate(batches, 1):
        bench.report(f"batch {number} of {len(batches)}: {batch} sequences of {context:,} tokens")
        costs, expected = decode_step(ceilings, model, batch=batch, context=context, weights=weights)
        timed = sequences.time(batch, repeats)
        median = statistics.median(timed.samples)
        yield bench.measurement(
            name="time.batch_sweep",
            settings={**plain({"model": model, "weights": weights}), "context": context, "batch": batch},
            samples=timed.samples,
            unit="s",
            counts={
                **costs.counts(),
                "model_calls": 1,
                "intensity": costs.intensity,
                "tokens_per_s": batch / median,
                "tokens_per_s_per_user": 1 / median,
                **yours,
                **(_tpot_counts(tpot, ceilings, model, batch, at) if tpot else {}),
            },
            predicted=expected.seconds,
            limit=expected.limit,
            check=timed.check,
        )


def _tpot_counts(tpot: Callable, ceilings: Ceilings, model, batch: int, at: dict) -> dict[str, float]:
    return {"predicted_yours": your_tpot(tpot, ceilings, model, batch=batch, **at)[1]}


EXPERIMENT = Experiment(
    name="time.batch_sweep",
    lab=2,
    question="More users in one step: what does the step cost, and what does each of them get?",
    how="decode steps of B sequences that remember the same number of tokens; one step is thrown away before each "
    "batch size, and what a step wrote is cut off again. The last sequence's greedy token is compared with that of "
    "the plain model over its whole text. Run always measures this machine; the card is for the prediction.",
    settings=(
        MODEL,
        WEIGHTS,
        Setting("card", HERE, "choice", choices=CARDS, help="whose ceilings the dashed line is for"),
        Setting("context", 256, "choice", choices=CONTEXTS, unit="tokens", help="S, remembered by each sequence"),
        Setting("largest_batch", 32, "choice", choices=BATCHES, unit="sequences", help="batches 1, 2, 4, … to this"),
        Setting("repeats", 5, "int", 1, 50, brief=2, help="timed steps at each batch size"),
    ),
    run=run_batch_sweep,
    limits=within_context("context", more=1),
    predict=predict_batch_sweep,
    learner=("knee", "tpot"),
    record={
        "cuda": (
            {"model": "llama-3.1-8b", "weights": "bfloat16", "largest_batch": 256},
            {"model": "llama-3.2-1b", "weights": "bfloat16", "largest_batch": 256},
        )
    },
)
