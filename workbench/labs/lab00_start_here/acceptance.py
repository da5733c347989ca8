"""zoo.acceptance: how often the target would accept what the draft proposes."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.instruments.bench import Bench
from workbench.instruments.records import Measurement


def acceptance(bench: Bench, *, target: str, draft: str, context: int) -> Iterator[Measurement]:
    """α = Σ min(p, q) at temperature 1, averaged over the positions of the held-out text."""
    from workbench.models.evaluation import acceptance_rate

    p, q = bench.model(target), bench.model(draft)
    found = acceptance_rate(p, q, context=context, check_stop=bench.check_stop)
    yield bench.measurement(
        name="zoo.acceptance",
        settings={"target": p.name, "draft": q.name, "context": context},
        samples=[found["alpha"]],
        unit="probability",
        counts={"positions": found["positions"], "agreement": found["agreement"]},
        check="full distributions of both models at every position; agreement: the same most likely token",
    )


EXPERIMENT = Experiment(
    name="zoo.acceptance",
    lab=0,
    question="How often would the target accept what the draft proposes?",
    how="Σ min(p, q) over the whole vocabulary, averaged over the positions of the held-out text",
    settings=(
        Setting("target", "stdlib-10m", "model"),
        Setting("draft", "stdlib-1m-pruned", "model"),
        Setting("context", 512, "int", low=16, high=1024, unit="tokens"),
    ),
    run=acceptance,
    predict=no_times,
)
