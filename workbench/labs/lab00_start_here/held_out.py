"""zoo.held_out: how well a shipped model predicts text that it was not trained on."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.instruments.bench import Bench
from workbench.instruments.records import Measurement


def held_out(bench: Bench, *, model: str) -> Iterator[Measurement]:
    """Mean negative log-likelihood on the held-out modules of this Python's standard library."""
    from workbench.models.training import held_out_loss

    decoder = bench.model(model)
    found = held_out_loss(decoder, decoder.tokenizer, check_stop=bench.check_stop)
    yield bench.measurement(
        name="zoo.held_out",
        settings={"model": decoder.name},
        samples=[found["nats_per_token"]],
        unit="nats/token",
        counts={"tokens": found["tokens"], "bytes": found["bytes"], "bits_per_byte": found["bits_per_byte"]},
        check=f"every token of the held-out modules but the first of each {decoder.config.context_length}-token window",
    )


MODEL = Setting("model", "stdlib-10m", "model", help="a model with the standard library's tokenizer")

EXPERIMENT = Experiment(
    name="zoo.held_out",
    lab=0,
    question="How well does the model predict Python it has never seen?",
    how="cross-entropy over the held-out modules, float32",
    settings=(MODEL,),
    run=held_out,
    predict=no_times,
)
