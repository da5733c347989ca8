"""naive.strategies: from logits to a token. The distribution before and after each filter, and what it writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from workbench.decoding.filters import filter_stages
from workbench.decoding.loop import token_loop
from workbench.decoding.sampling import SamplingSettings
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, PROMPT, gaps, next_logits, plain, text_of, token_text, tokens_of
from workbench.generation import stream

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.decoder import Decoder


@dataclass(frozen=True)
class Stage:
    """The next token's distribution after one filter. probabilities [V] float64; kept: tokens that can be drawn."""

    name: str
    probabilities: torch.Tensor
    kept: int
    entropy_bits: float


def stage_of(name: str, logits: torch.Tensor) -> Stage:
    p = logits.double().softmax(dim=-1)
    entropy = float(torch.special.entr(p).sum() / torch.log(torch.tensor(2.0, dtype=torch.float64)))
    return Stage(name, p, int(torch.isfinite(logits).sum()), abs(entropy))


def stages(
    sampling: SamplingSettings,
    logits: torch.Tensor,
    prompt_ids: Sequence[int],
    written_ids: Sequence[int] = (),
    filters: Mapping[str, Callable] | None = None,
) -> list[Stage]:
    """The model's own distribution first, then the one after each active filter, in order. No model is run."""
    found = filter_stages(sampling, logits, prompt_ids, written_ids, replace=filters)
    return [stage_of(name, after) for name, after in found]


def sampling_of(settings: Mapping[str, Any]) -> SamplingSettings:
    """The filters' settings among an experiment's; top_k 0 stands for none."""
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return SamplingSettings(top_k=settings.get("top_k") or None, **{n: settings[n] for n in names if n in settings})


def after(written_ids: Sequence[int], loop: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
    """The loop, going on from tokens that were written before: they count as generated, so penalties see them."""

    def going_on(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
        return loop(forward, [*prompt_ids, *written_ids], choose, max_new_tokens, stop_token_ids)

    return going_on


def prompt_and_written(model: str | Decoder, prompt: str, written: str) -> tuple[list[int], list[int]]:
    return tokens_of(model, prompt), tokens_of(model, written) if written else []


def run_strategies(
    bench: Bench, *, filters: Mapping[str, Callable] | None = None, loop: Callable | None = None, **settings: Any
) -> Iterator[Measurement]:
    """One Measurement a filter stage (samples: probabilities of the model's top tokens), then one for each
    continuation drawn (samples: seconds per token; its text in settings["text"])."""
    decoder, sampling = bench.model(settings["model"]), sampling_of(settings)
    prompt_ids, written_ids = prompt_and_written(decoder, settings["prompt"], settings["written"])
    room = decoder.config.context_length - len(prompt_ids) - len(written_ids)
    if settings["new_tokens"] > room:
        raise WorkbenchError(
            f"only {room} of the model's {decoder.config.context_length} tokens are left to write in, "
            f"asked for {settings['new_tokens']}"
        )
    logits = next_logits(decoder, [*prompt_ids, *written_ids])
    asked = plain(settings)
    ours = stages(sampling, logits, prompt_ids, written_ids)
    for by, found in (("ours", ours), *_with_yours(sampling, logits, prompt_ids, written_ids, filters)):
        yield from _stage_measurements(bench, asked, decoder, found, ours, by, settings["shown_tokens"])
    yours = {"filters": filters, "loop": after(written_ids, loop or token_loop)}
    makers = {"ours": {"loop": after(written_ids, token_loop)}} | ({"yours": yours} if filters or loop else {})
    for number in range(settings["continuations"]):
        for by, parts in makers.items():
            bench.report(f"{by}: continuation {number + 1} of {settings['continuations']}")
            yield _draw_one(
                bench, {**asked, "by": by, "seed": asked["seed"] + number}, decoder, prompt_ids, sampling, parts
            )


def _with_yours(sampling, logits, prompt_ids, written_ids, filters) -> list[tuple[str, list[Stage]]]:
    return [("yours", stages(sampling, logits, prompt_ids, written_ids, filters))] if filters else []


def _stage_measurements(bench, asked, decoder, found, ours, by, top) -> Iterator[Measurement]:
    shown = ours[0].probabilities.topk(min(top, ours[0].probabilities.numel())).indices.tolist()
    for stage, reference in zip(found, ours):
        total = float(stage.probabilities.sum())
        check = f"all {stage.probabilities.numel():,} probabilities sum to {total:.9f}"
        if by == "yours":
            largest = float((stage.probabilities - reference.probabilities).abs().max())
            check += f"; largest difference from ours {largest:.2g}"
        yield bench.measurement(
            name="naive.strategies",
            settings={**asked, "stage": stage.name, "by": by, "tokens": [token_text(decoder, t) for t in shown]},
            samples=[float(stage.probabilities[t]) for t in shown],
            unit="probability",
            counts={"kept_tokens": stage.kept, "entropy_bits": stage.entropy_bits, "model_calls": 1},
            check=check,
        )


def _draw_one(bench, asked, decoder, prompt_ids, sampling, parts) -> Measurement:
    drawn = stream(
        decoder,
        prompt_ids,
        **dataclasses.asdict(sampling),
        max_new_tokens=asked["new_tokens"],
        seed=asked["seed"],
        cancel=bench.stop,
        **parts,
    )
    for _ in drawn:
        pass
    result = drawn.result()
    bench.check_stop()
    return bench.measurement(
        name="naive.strategies",
        settings={**asked, "text": text_of(decoder, result)},
        samples=gaps(result),
        unit="s",
        counts={"new_tokens": len(result.tokens), "rows": result.rows_processed, "model_calls": result.model_calls},
        check=f"{len(result.tokens)} tokens drawn with seed {asked['seed']}, ended by {result.finish_reason}",
    )


SAMPLING = (
    Setting("temperature", 0.8, "float", 0.0, 2.0, step=0.05, help="below 1 sharper, above 1 flatter; 0 is greedy"),
    Setting("top_k", 0, "int", 0, 200, help="keep the k best tokens; 0 keeps all"),
    Setting("top_p", 0.95, "float", 0.01, 1.0, step=0.01, help="keep the best tokens that hold p together"),
    Setting("min_p", 0.0, "float", 0.0, 1.0, step=0.01, help="keep tokens at least p times the best one's"),
    Setting("repetition_penalty", 1.0, "float", 0.5, 2.0, step=0.05, help="of prompt and written tokens; 1 is off"),
    Setting("presence_penalty", 0.0, "float", -2.0, 2.0, step=0.1, help="once for each token written; 0 is off"),
    Setting("frequency_penalty", 0.0, "float", -2.0, 2.0, step=0.1, help="for each time it was written; 0 is off"),
)
EXPERIMENT = Experiment(
    name="naive.strategies",
    lab=1,
    question="From logits to a token: what does each filter do to the distribution?",
    how="the model runs once over the prompt; every bar is computed from those logits, before and after each "
    "filter in its order. Run draws continuations, seeded, one model pass a token.",
    settings=(
        Setting("prompt", PROMPT, "text", help="the text so far that the user gave"),
        Setting(
            "written",
            "    with open(path) as file:\n        return",
            "text",
            help="the text so far that counts as generated: presence and frequency penalties see only this",
        ),
        MODEL,
        *SAMPLING,
        Setting("shown_tokens", 12, "int", 3, 20, help="tokens shown, the model's best first"),
        Setting("continuations", 3, "int", 0, 8, help="texts to draw on Run"),
        Setting("new_tokens", 24, "int", 1, 200, help="tokens of each"),
        Setting("seed", 0, "int", 0, 9999, help="continuation i draws with seed + i"),
    ),
    run=run_strategies,
    predict=lambda ceilings, **settings: [],
    learner=("filters", "loop"),
)
