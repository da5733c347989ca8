"""parallel.experts: a mixture of experts beside its dense twin: which experts a batch reads, and how long its step"
" takes.

The same decode step for 1 to 64 sequences of held-out text, each at another place. N rows choose k of E experts each;
were all chosen alike, E·(1 − (1 − k/E)^N) of them would be read. What is read is counted, layer by layer, and the step
is timed in turns with that of a dense model that has as many active parameters.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Limits, Setting
from workbench.experiments.inputs import plain, shape_of
from workbench.experiments.steps import BATCHES, agrees, decode_step, kv_element_bytes, loaded
from workbench.instruments.costs import decode_costs, predict, weights_read
from workbench.kv import kv_for
from workbench.models import prepare
from workbench.models.batch import Batch
from workbench.models.checkpoints import shipped_tokenizer
from workbench.models.corpus import held_out_files, token_stream
from workbench.models.experts import expected_different, tokens_per_expert, watching

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.models.config import ModelConfig
    from workbench.models.decoder import Decoder

NAME = "parallel.experts"
MODEL, TWIN = "stdlib-1m-experts", "stdlib-1m-dense"
WEIGHTS = "float32"
COUNTED = BATCHES[:7]  # 1 to 64


@dataclass
class Side:
    """A model with the same sequences cached: the mixture, or its twin."""

    decoder: Decoder
    rows: torch.Tensor  # [batch, cached + 1]
    cached: int
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fast = prepare(self.decoder)
        batch = len(self.rows)
        self.kv = kv_for("contiguous", self.decoder, max_sequences=batch, max_tokens=self.cached + 1)
        with torch.inference_mode():
            for name, row in enumerate(self.rows[:, : self.cached].tolist()):
                self.fast(Batch.of([row], sequences=[name]), self.kv)
        tokens = [[token] for token in self.rows[:, self.cached].tolist()]
        self.step = Batch.of(tokens, first_positions=[self.cached] * batch)

    def run(self, bench: Bench, model: Any) -> tuple[float, torch.Tensor]:
        made: list[torch.Tensor] = []
        with torch.inference_mode():
            seconds = bench.measure(lambda: made.append(model(self.step, self.kv)), repeats=1, warmup=0)[0]
        for name in range(len(self.rows)):
            self.kv.truncate(name, self.cached)
        return seconds, made[0]


def rows_for(config: ModelConfig, batch: int, length: int) -> torch.Tensor:
    """[batch, length] held-out tokens, each row from another place of the text; a model with another vocabulary reads
    them modulo its own."""
    stream = token_stream(held_out_files()[:12], shipped_tokenizer()) % config.vocab_size
    apart = max(1, (len(stream) - length) // batch)
    if apart * (batch - 1) + length > len(stream):
        raise WorkbenchError(f"{batch} sequences of {length} tokens are more held-out text than is read here")
    return torch.stack([stream[i * apart : i * apart + length] for i in range(batch)])


def run_experts(
    bench: Bench, *, model: str | Decoder, twin: str | Decoder, largest: int, cached: int, repeats: int
) -> Iterator[Measurement]:
    """For each `batch`: `measured` "different" (unit "experts", of each layer; predicted for experts chosen alike), and
    "step" of the mixture and of its `twin` (seconds); at last "load" (unit "share", of the experts of each layer)."""
    decoder, dense = loaded(bench, model, WEIGHTS), loaded(bench, twin, WEIGHTS)
    config = decoder.config
    if config.experts is None:
        raise WorkbenchError(f"{decoder.name} has no experts; take a model that has, such as {MODEL}")
    e = config.experts
    settings = plain({"model": model, "twin": twin}) | {"cached": cached}
    seen: dict[int, list[torch.Tensor]] = {}
    for batch in (n for n in COUNTED if n <= largest):
        bench.check_stop()
        bench.report(f"{batch} sequence(s)")
        rows = rows_for(config, batch, cached + 1)
        sides = [Side(one, rows % one.config.vocab_size, cached) for one in (decoder, dense)]
        with watching(decoder) as chosen:
            oracle = sides[0].run(bench, decoder)[1]
        per_layer = [int((tokens_per_expert(of[0], e.num_experts) > 0).sum()) for of in chosen.values()]
        for layer, of in chosen.items():
            seen.setdefault(layer, []).append(of[0])
        counted = statistics.mean(per_layer)
        logits = oracle
        for turn in range(-1, repeats):
            bench.check_stop()
            for side in sides if turn % 2 else sides[::-1]:
                seconds, made = side.run(bench, side.fast)
                if turn >= 0:
                    side.seconds.append(seconds)
                if side is sides[0]:
                    logits = made
        check = agrees(logits[-1], oracle[-1], "the model as it was loaded", torch.finfo(torch.float32).eps)
        read = [weights_read(config, batch, batch, different_experts=d) for d in (counted, None)]
        yield bench.measurement(
            name=NAME,
            settings={**settings, "measured": "different", "batch": batch},
            samples=[float(count) for count in per_layer],
            unit="experts",
            counts={"mean": counted, "experts": e.num_experts, "weights_read": read[0], "weights_by_formula": read[1]},
            predicted=expected_different(e.num_experts, e.experts_per_token, batch),
            check="counted in each layer of one step",
        )
        for side, which in zip(sides, ("mixture", "dense")):
            costs, expected = _expected(
                bench.ceilings(), side.decoder, batch, cached, counted if which == "mixture" else None
            )
            yield bench.measurement(
                name=NAME,
                settings={**settings, "measured": "step", "which": which, "batch": batch},
                samples=side.seconds,
                unit="s",
                counts={"launches": costs.launches, "bytes": costs.bytes, "weights": costs.bytes_by_part["weights"]},
                predicted=expected.seconds,
                limit=expected.limit,
                check=check if which == "mixture" else "the same text in its own cache",
            )
    for layer, every in seen.items():
        shares = tokens_per_expert(torch.cat(every), e.num_experts) / sum(one.numel() for one in every)
        yield bench.measurement(
            name=NAME,
            settings={**settings, "measured": "load", "layer": layer},
            samples=[float(share) for share in shares],
            unit="share",
            counts={"even": 1 / e.num_experts, "highest": float(shares.max())},
            check="of the places that the rows of all steps above gave to experts",
        )


def _expected(
    ceilings: Ceilings, decoder: Decoder, batch: int, cached: int, different: float | None
) -> tuple[Any, Any]:
    if different is None:
        return decode_step(ceilings, decoder, batch=batch, context=cached, weights=WEIGHTS)
    costs = decode_costs(
        decoder.config,
        batch=batch,
        context=cached,
        weight_bytes_per_element=4,
        kv_bytes_per_element=kv_element_bytes(ceilings, WEIGHTS),
        different_experts=different,
    )
    return costs, predict(costs, ceilings, WEIGHTS)


def predict_experts(
    ceilings: Ceilings, *, model: str | Decoder, largest: int, cached: int, **_: Any
) -> list[tuple[float, float, str]]:
    """(batch, seconds, limit) of the mixture, its experts chosen alike."""
    points = []
    for batch in (n for n in COUNTED if n <= largest):
        expected = decode_step(ceilings, model, batch=batch, context=cached, weights=WEIGHTS)[1]
        points.append((float(batch), expected.seconds, expected.limit))
    return points


def limits(*, model: str | Decoder, twin: str | Decoder, **_: Any) -> Limits:
    room = min(shape_of(model).context_length, shape_of(twin).context_length)
    return {"cached": lambda tokens: tokens < room}


EXPERIMENT = Experiment(
    name=NAME,
    lab=13,
    question="Two of eight experts for each token: what does a batch read, and how long does it take?",
    how=(
        "a decode step of sequences of held-out text, each at another place; experts are counted layer by layer, and"
        " the"
        " step is timed in turns with that of a dense model of as many active parameters. Times are predicted with the"
        " counted experts"
    ),
    settings=(
        Setting("model", MODEL, "model", choices=(MODEL,), help="a mixture of experts"),
        Setting("twin", TWIN, "model", help="a dense model beside it"),
        Setting("largest", 64, "choice", choices=COUNTED, brief=4, help="batch"),
        Setting("cached", 64, "choice", choices=(16, 32, 64, 128, 256), unit="tokens", help="of each sequence"),
        Setting("repeats", 15, "int", 1, 200, brief=1, help="timed steps of each model and batch"),
    ),
    run=run_experts,
    predict=predict_experts,
    limits=limits,
    record={"cpu": ({},), "cuda": ()},
)
