"""zoo.parsing: whether what a model writes is Python."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.instruments.bench import Bench
from workbench.instruments.records import Measurement


def parsing(
    bench: Bench, *, model: str, samples: int, max_new_tokens: int, temperature: float, top_p: float
) -> Iterator[Measurement]:
    """Share of continuations of held-out function headers that are the beginning of a Python program."""
    from workbench.generation import generate
    from workbench.models.evaluation import held_out_headers, parses

    decoder = bench.model(model)
    outcomes = []
    for seed, header in enumerate(held_out_headers(samples)):
        bench.check_stop()
        result = generate(
            decoder,
            header,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            cancel=bench.stop,
        )
        bench.check_stop()
        outcomes.append(float(parses(header + result.text)))
    yield bench.measurement(
        name="zoo.parsing",
        settings={
            "model": decoder.name,
            "samples": len(outcomes),
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
        },
        samples=[sum(outcomes) / len(outcomes)],
        unit="share",
        counts={"parsed": int(sum(outcomes)), "sampled": len(outcomes)},
        check="compiled, never run; a last line cut short and open blocks or brackets are no fault",
    )


MODEL = Setting("model", "stdlib-10m", "model", help="a model with the standard library's tokenizer")

EXPERIMENT = Experiment(
    name="zoo.parsing",
    lab=0,
    question="Is what the model writes Python?",
    how="continuations of held-out function headers, compiled",
    settings=(
        MODEL,
        Setting("samples", 20, "int", low=1, high=100),
        Setting("max_new_tokens", 120, "int", low=8, high=512, unit="tokens"),
        Setting("temperature", 0.8, "float", low=0.0, high=2.0),
        Setting("top_p", 0.95, "float", low=0.01, high=1.0),
    ),
    run=parsing,
    predict=no_times,
)
