"""How good are the models that ship? Held-out loss, what the pair agrees on, whether they write Python."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.experiments.contract import Experiment, Setting
from workbench.instruments.bench import Bench
from workbench.instruments.records import Measurement


def held_out(bench: Bench, *, model: str) -> Iterator[Measurement]:
    """Mean negative log-likelihood on the held-out modules of this Python's standard library."""
    from workbench.models.recipes import held_out_loss

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


def parsing(
    bench: Bench, *, model: str, samples: int, max_new_tokens: int, temperature: float, top_p: float
) -> Iterator[Measurement]:
    """Share of continuations of held-out function headers that are the beginning of a Python program."""
    from workbench.decoding import generate
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


def _no_prediction(ceilings, **settings) -> list[tuple[float, float, str]]:
    return []


_MODEL = Setting("model", "stdlib-10m", "model", help="a model with the standard library's tokenizer")

EXPERIMENTS = (
    Experiment(
        name="zoo.held_out",
        lab=0,
        question="How well does the model predict Python it has never seen?",
        how="cross-entropy over the held-out modules, float32",
        settings=(_MODEL,),
        run=held_out,
        predict=_no_prediction,
    ),
    Experiment(
        name="zoo.acceptance",
        lab=0,
        question="How often would the target accept what the draft proposes?",
        how="Σ min(p, q) over the whole vocabulary, averaged over the positions of the held-out text",
        settings=(
            Setting("target", "stdlib-10m", "model"),
            Setting("draft", "stdlib-1m", "model"),
            Setting("context", 512, "int", low=16, high=1024, unit="tokens"),
        ),
        run=acceptance,
        predict=_no_prediction,
    ),
    Experiment(
        name="zoo.parsing",
        lab=0,
        question="Is what the model writes Python?",
        how="continuations of held-out function headers, compiled",
        settings=(
            _MODEL,
            Setting("samples", 20, "int", low=1, high=100),
            Setting("max_new_tokens", 120, "int", low=8, high=512, unit="tokens"),
            Setting("temperature", 0.8, "float", low=0.0, high=2.0),
            Setting("top_p", 0.95, "float", low=0.01, high=1.0),
        ),
        run=parsing,
        predict=_no_prediction,
    ),
)
