"""time.launch: half the bytes for models of growing size, and where a step only waits for its launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from workbench.experiments.cards import CARDS
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import shape_of
from workbench.experiments.steps import CONTEXTS, DTYPES, Sequences, decode_step

if TYPE_CHECKING:
    import torch

    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement


# -- time.launch: the third regime --------------------------------------------------------------------------------

LADDER = ("stdlib-1m", "stdlib-10m", "random-110m")
NO_GAIN = 1.2  # float32 over bfloat16 below this: halving the bytes gains nothing to speak of


def rungs(largest: str) -> tuple[str, ...]:
    return LADDER[: LADDER.index(largest) + 1]


def predict_launch(ceilings: Ceilings, *, largest: str, context: int, **_: Any) -> Sequence[tuple[float, float, str]]:
    """(parameters, seconds per step, limit): every model in float32, then every model in bfloat16."""
    found = []
    for weights in DTYPES:
        for name in rungs(largest):
            _costs, expected = decode_step(ceilings, name, batch=1, context=context, weights=weights)
            found.append((shape_of(name).num_parameters(), expected.seconds, expected.limit))
    return found


def run_launch(bench: Bench, *, largest: str, context: int, repeats: int, card: str = "h200") -> Iterator[Measurement]:
    """Three Measurements a model: a step in float32 and in bfloat16 (unit "s"), timed in alternation, and their
    ratios pair by pair (unit "ratio"): 2 where bytes bind, 1 where they do not. The card is for the panel."""
    ceilings, names = bench.ceilings(), rungs(largest)
    for number, name in enumerate(names, 1):
        bench.report(f"model {number} of {len(names)}: {name}")
        pair = {w: Sequences(bench, name, w, context=context, max_sequences=1) for w in DTYPES}
        samples: dict[str, list[float]] = {w: [] for w in DTYPES}
        last: dict[str, torch.Tensor] = {}
        for run in range(-1, repeats):
            for weights, one in pair.items():
                seconds, logits = one.run(one.fast, one.step(1, run, last=run == repeats - 1))
                if run >= 0:
                    samples[weights].append(seconds)
                    last[weights] = logits[-1]
        shared = {"model": name, "context": context, "parameters": shape_of(name).num_parameters()}
        found = {w: decode_step(ceilings, name, batch=1, context=context, weights=w) for w in DTYPES}
        for weights, (costs, expected) in found.items():
            yield bench.measurement(
                name="time.launch",
                settings={**shared, "weights": weights},
                samples=samples[weights],
                unit="s",
                counts={**costs.counts(), "launch_s": expected.terms["launch"], "model_calls": 1},
                predicted=expected.seconds,
                limit=expected.limit,
                check=pair[weights].check(last[weights]),
            )
        yield bench.measurement(
            name="time.launch",
            settings={**shared, "weights": "float32 ÷ bfloat16"},
            samples=[a / b for a, b in zip(samples["float32"], samples["bfloat16"])],
            unit="ratio",
            predicted=found["float32"][1].seconds / found["bfloat16"][1].seconds,
            limit=found["bfloat16"][1].limit,
            check="steps of both timed in alternation",
        )


EXPERIMENT = Experiment(
    name="time.launch",
    lab=2,
    question="Halve the bytes of the weights: does the step get faster?",
    how="one decode step of one sequence, with the weights in float32 and in bfloat16, A B A B after one of each is "
    "thrown away; the ratio is taken pair by pair. random-110m has random weights, which changes no time.",
    settings=(
        Setting("largest", LADDER[-1], "choice", choices=LADDER, help="the models up to this one"),
        Setting("context", 64, "choice", choices=CONTEXTS[:6], unit="tokens", help="S, remembered by the sequence"),
        Setting("card", "h200", "choice", choices=CARDS[1:], help="predicted beside this machine"),
        Setting("repeats", 15, "int", 1, 200, brief=2, help="timed pairs of steps for each model"),
    ),
    run=run_launch,
    predict=predict_launch,
)
