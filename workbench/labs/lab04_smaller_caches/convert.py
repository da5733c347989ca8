"""smaller.convert: from many key-value heads to few by mean-pooling, and a short training on that mends it."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.held_out import CUT_CONTEXT, PASSAGES, loss_without_kv, mean_and_error, passages_for
from workbench.experiments.inputs import plain
from workbench.labs.lab04_smaller_caches.inputs import VARIANTS, allocated, trained
from workbench.models.checkpoints import zoo_config
from workbench.models.conversion import Progress, mean_pool_heads, uptrain
from workbench.models.recipes import RECIPES

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.config import ModelConfig
    from workbench.models.decoder import Decoder

SOURCE = "Ainslie et al., arXiv 2305.13245"


def trained_so(config: ModelConfig) -> str | None:
    """The shipped variant that had these heads from the start, or None. Its feed-forward may be wider: the variants
    spend on it what they save on keys and values, so that all have about as many parameters."""
    for name in VARIANTS:
        if dataclasses.replace(zoo_config(name), intermediate_size=config.intermediate_size) == config:
            return name
    return None


def run_convert(
    bench: Bench,
    *,
    model,
    num_kv_heads: int,
    steps: int,
    sequences_per_step: int,
    sequence_length: int,
    peak_learning_rate: float,
    context: int,
    passages: int,
    evaluations: int,
    seed: int,
) -> Iterator[Measurement]:
    """Held-out loss (`measured` "held out", nats/token) at every `stage`: "before", "pooled", "uptraining" a few
    times and at the end "uptrained", then "trained so", a variant that had these heads from the start. Between them
    the losses of every training step (`measured` "training"), after them their times ("time", s). Counts say how many
    tokens were read by then: with one seed and device they and the losses are the same, whatever the times."""
    decoder = bench.model(model)
    rows = passages_for(decoder, context, passages)
    pooled = mean_pool_heads(decoder, num_kv_heads)
    counterpart = trained_so(pooled.config)
    others = trained(bench, [counterpart] if counterpart else [])
    if sequence_length > decoder.config.context_length:
        raise WorkbenchError(
            f"sequences of {sequence_length:,} tokens are beyond the {decoder.config.context_length:,} that "
            f"{decoder.name} reads; choose a shorter sequence_length"
        )
    settings = plain({"model": model, "num_kv_heads": num_kv_heads, "context": context, "passages": passages})
    settings |= {
        "sequences_per_step": sequences_per_step,
        "sequence_length": sequence_length,
        "peak_learning_rate": peak_learning_rate,
        "seed": seed,
    }
    before_bytes, _ = allocated(decoder, "contiguous", context)
    after_bytes, _ = allocated(pooled, "contiguous", context)

    def held_out(stage: str, of: Decoder, check: str, **counts: float) -> Measurement:
        bench.check_stop()
        found = loss_without_kv(bench, of, rows, stage)
        loss, error = mean_and_error(found.between(1, context))
        size = before_bytes if of is decoder else after_bytes
        return bench.measurement(
            name="smaller.convert",
            settings={**settings, "stage": stage, "measured": "held out", "trained": of.name},
            samples=[loss],
            unit="nats/token",
            counts={
                "tokens": found.tokens,
                "standard_error": error,
                "perplexity": found.perplexity,
                "bytes_per_token": size / context,
                "kv_heads": of.config.num_kv_heads,
                "tokens_trained": _tokens_trained(decoder.name),
                "tokens_uptrained": 0,
                **counts,
            },
            check=check,
        )

    yield held_out("before", decoder, f"a cache of {context:,} tokens was allocated: {before_bytes:,} bytes")
    of_before = f"{num_kv_heads} of {decoder.config.num_kv_heads} key-value heads"
    yield held_out("pooled", pooled, f"{of_before}; a cache of {context:,} tokens was allocated: {after_bytes:,} bytes")
    bench.report("uptraining: reading the training modules")
    training = uptrain(
        pooled,
        steps=steps,
        sequences_per_step=sequences_per_step,
        sequence_length=sequence_length,
        peak_learning_rate=peak_learning_rate,
        seed=seed,
        check_stop=bench.check_stop,
    )
    times: list[float] = []  # seconds of each step
    done: list[Progress] = []  # the steps since the last evaluation
    evaluated = 0
    with closing(cast(Generator[Progress, None, None], training)):
        for progress in training:
            done.append(progress)
            times.append(progress.seconds - sum(times))
            bench.report(
                f"uptraining: step {progress.step:,}, {progress.tokens:,} tokens, loss {progress.loss:.3f} nats per "
                "token"
            )
            share = progress.step / steps
            if share < 1 and int(share * evaluations) <= evaluated:
                continue
            evaluated = int(share * evaluations)
            yield _training(bench, settings, done)
            stage, counts = "uptraining" if share < 1 else "uptrained", _counts(progress, decoder.name)
            check = f"{of_before}; after {progress.tokens:,} tokens of the training modules, none of them held out"
            if share >= 1 and not others:
                check += "; no shipped variant was trained with these heads from the start"
            yield held_out(stage, pooled, check, **counts)
            done = []
    yield _times(bench, settings, times)
    for other in others:
        yield held_out(
            "trained so",
            other,
            f"the same heads; its feed-forward is {other.config.intermediate_size} wide, the converted model's "
            f"{pooled.config.intermediate_size}: {other.num_parameters():,} and {pooled.num_parameters():,} parameters",
            tokens_trained=_tokens_trained(other.name),
        )


def _training(bench: Bench, settings: dict[str, Any], done: list[Progress]) -> Measurement:
    """The loss of every step since the last evaluation, on the rows of that step."""
    return bench.measurement(
        name="smaller.convert",
        settings={**settings, "stage": "uptraining", "measured": "training", "first_step": done[0].step},
        samples=[p.loss for p in done],
        unit="nats/token",
        counts={"tokens_uptrained": done[-1].tokens, "learning_rate": done[-1].learning_rate},
        check="loss of the training rows before each step",
    )


def _times(bench: Bench, settings: dict[str, Any], times: list[float]) -> Measurement:
    """Seconds of every step. Evaluating between two of them is not in it."""
    tokens = settings["sequences_per_step"] * settings["sequence_length"]
    return bench.measurement(
        name="smaller.convert",
        settings={**settings, "stage": "uptrained", "measured": "time"},
        samples=times,
        unit="s",
        counts={"steps": len(times), "tokens_a_step": tokens, "tokens_uptrained": tokens * len(times)},
        check=f"{len(times):,} steps of {tokens:,} tokens; how many does not depend on the time",
    )


def _tokens_trained(name: str) -> float:
    """Tokens of the first training; 0 where no recipe says it."""
    return RECIPES[name].tokens if name in RECIPES else 0


def _counts(progress: Progress, name: str) -> dict[str, float]:
    counts: dict[str, float] = {"tokens_uptrained": progress.tokens, "steps": progress.step}
    if first := _tokens_trained(name):
        counts["share_of_first_training"] = progress.tokens / first
    return counts


EXPERIMENT = Experiment(
    name="smaller.convert",
    lab=4,
    question="Can a trained model be given fewer key-value heads, and what does it take to mend it?",
    how=f"the heads of a group are averaged ({SOURCE}, §2.1), then the model is trained on for so many steps on "
    "the training modules, at a rate that falls to 0. Held-out loss is over the same passages every time. Beside it "
    "the variant that was trained with these heads from the start.",
    settings=(
        Setting("model", "stdlib-3m-mha", "model", help="the model to convert, with float32 weights"),
        Setting("num_kv_heads", 2, "int", 1, 64, help="key-value heads afterwards: 1 is MQA, more is GQA"),
        Setting("steps", 240, "int", 1, 10_000, brief=10, unit="steps", help="of training, whatever time they take"),
        Setting("sequences_per_step", 4, "int", 1, 64, unit="sequences", help="sequences of a training step"),
        Setting(
            "sequence_length",
            256,
            "choice",
            choices=(32, 64, 128, 256, 512, 1024),
            unit="tokens",
            help="tokens of each",
        ),
        Setting("peak_learning_rate", 2e-3, "float", 1e-6, 0.1, help="the rate before it falls"),
        CUT_CONTEXT,
        PASSAGES,
        Setting("evaluations", 6, "int", 1, 100, brief=2, help="how often the held-out loss is taken on the way"),
        Setting("seed", 1, "int", 0, 10_000, help="of the order in which the modules are read"),
    ),
    run=run_convert,
    predict=no_times,
    record={"cpu": ({"num_kv_heads": 2}, {"num_kv_heads": 1}), "cuda": ()},
)
