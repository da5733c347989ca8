"""What text by diffusion does and costs, as generators of Measurements: quality by tokens a pass, the canvas step by
step, the time of a pass by its rows, and what few passes are worth on a machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from workbench.diffusion.bound import held_out_bound
from workbench.diffusion.costs import pass_costs
from workbench.diffusion.denoise import CanvasStep, Diffusion, diffuse
from workbench.diffusion.model import DiffusionModel, load_diffusion
from workbench.diffusion.samplers import Sampler, make_sampler
from workbench.diffusion.scoring import score
from workbench.errors import WorkbenchError, check_whole
from workbench.instruments.costs import decode_costs, predict
from workbench.instruments.device import PUBLISHED, Ceilings
from workbench.models.batch import Batch
from workbench.models.evaluation import held_out_headers, held_out_passages, parses
from workbench.models.shapes import public_shape
from workbench.models.training import TrainingAttention, rows_batch

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.config import ModelConfig
    from workbench.models.decoder import Decoder

BLOCK, MASKED, TWIN = "stdlib-3m-block-diffusion", "stdlib-3m-masked-diffusion", "stdlib-3m-mha"


def diffusion_model(bench: Bench, model: str | DiffusionModel) -> DiffusionModel:
    if isinstance(model, DiffusionModel):
        return model
    bench.report(f"loading {model}")
    return load_diffusion(model, device=bench.device)


# -- quality by tokens a pass ------------------------------------------------------------------------------------


@torch.inference_mode()
def twin_nats(twin: Decoder, rows: torch.Tensor) -> float:
    """The autoregressive loss of rows [B, S], nats per token; the first token of a row is not scored."""
    total, kv = 0.0, TrainingAttention(twin.config)
    for some in rows.split(4):
        logits = twin(rows_batch(some.to(twin.device)), kv).view(*some.shape, -1)[:, :-1].flatten(0, 1)
        wanted = some[:, 1:].flatten().to(twin.device)
        total += torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="sum").item()
    return total / (rows.numel() - len(rows))


def run_bound(
    bench: Bench,
    *,
    model: str | DiffusionModel = BLOCK,
    twin: str | Decoder = TWIN,
    block_sizes: Sequence[int] = (4, 8, 16),
    context: int = 512,
    passages: int = 32,
    draws: int = 2,
) -> Iterator[Measurement]:
    """The bound of a model for each block size, in nats per token, beside the loss of its autoregressive twin on the
    same passages."""
    diffusion, loaded = diffusion_model(bench, model), bench.model(twin)
    baseline = twin_nats(loaded, held_out_passages(diffusion.tokenizer, context, passages))
    for size in block_sizes:
        bench.check_stop()
        bench.report(f"blocks of {size}")
        of_size = held_out_bound(
            diffusion, size, context=context, passages=passages, draws=draws, check_stop=bench.check_stop
        )
        yield bench.measurement(
            name="diffusion.bound",
            settings={"model": diffusion.name, "twin": loaded.name, "block_size": size, "context": context},
            samples=[of_size.nats_per_token],
            unit="nats/token",
            counts={
                "standard_error": of_size.standard_error,
                "twin_nats": baseline,
                "tokens": of_size.tokens,
                "draws": draws,
            },
            check="a bound from above, by Monte Carlo; the twin's loss is exact",
        )


SAMPLERS_SHOWN: tuple[tuple[str, dict[str, Any]], ...] = tuple(
    [(name, {"passes": passes}) for passes in (1, 2, 4, 8) for name in ("uniform", "confidence")]
    + [("entropy-bound", {"bound": bound}) for bound in (0.1, 0.5, 1.0, 2.0)]
)


def run_nats(
    bench: Bench,
    *,
    model: str | DiffusionModel = BLOCK,
    block_size: int = 8,
    samplers: Sequence[tuple[str, dict[str, Any]]] = SAMPLERS_SHOWN,
    context: int = 512,
    passages: int = 16,
) -> Iterator[Measurement]:
    """Nats per token of held-out text under each sampler, and the tokens a pass it took: see `diffusion.scoring`."""
    diffusion = diffusion_model(bench, model)
    rows = held_out_passages(diffusion.tokenizer, context, passages)
    size = context if diffusion.kind == "masked" else block_size
    for name, settings in samplers:
        sampler = make_sampler(name, **settings)
        bench.report(sampler.words)
        one = score(diffusion, rows, size, sampler, check_stop=bench.check_stop)
        yield bench.measurement(
            name="diffusion.nats",
            settings={"model": diffusion.name, "sampler": name, **settings, "block_size": size, "context": context},
            samples=[one.nats_per_token],
            unit="nats/token",
            counts={
                "tokens_per_pass": one.tokens_per_pass,
                "standard_error": one.standard_error,
                "passes": one.passes,
                "tokens": one.tokens,
            },
            check="a bound for uniform, exact for the others: the true tokens are put in, pass by pass",
        )


def written(
    model: DiffusionModel,
    headers: Sequence[str],
    *,
    sampler: Sampler,
    max_tokens: int,
    block_size: int | None,
    temperature: float,
    seed: int = 0,
    check_stop: Any = None,
) -> list[tuple[Diffusion, bool]]:
    """For every header what was written, and whether header and text parse."""
    outcomes = []
    for number, header in enumerate(headers):
        one = diffuse(
            model,
            header,
            max_tokens=max_tokens,
            block_size=block_size,
            sampler=sampler,
            temperature=temperature,
            seed=seed + number,
            check_stop=check_stop,
        )
        outcomes.append((one, parses(header + one.text)))
    return outcomes


def run_parsing(
    bench: Bench,
    *,
    model: str | DiffusionModel = BLOCK,
    block_size: int = 8,
    samplers: Sequence[tuple[str, dict[str, Any]]] = SAMPLERS_SHOWN,
    samples: int = 40,
    max_tokens: int = 64,
    temperature: float = 1.0,
) -> Iterator[Measurement]:
    """Share of continuations of held-out function headers that parse, by sampler: same headers and seeds for all."""
    diffusion = diffusion_model(bench, model)
    headers = held_out_headers(samples)
    size = None if diffusion.kind == "masked" else block_size
    for name, settings in samplers:
        sampler = make_sampler(name, **settings)
        bench.report(sampler.words)
        outcomes = written(
            diffusion,
            headers,
            sampler=sampler,
            max_tokens=max_tokens,
            block_size=size,
            temperature=temperature,
            check_stop=bench.check_stop,
        )
        passes, tokens = sum(one.passes for one, _ in outcomes), sum(one.tokens for one, _ in outcomes)
        yield bench.measurement(
            name="diffusion.parsing",
            settings={
                "model": diffusion.name,
                "sampler": name,
                **settings,
                "block_size": size or 0,
                "max_tokens": max_tokens,
                "temperature": temperature,
            },
            samples=[sum(ok for _, ok in outcomes) / len(outcomes)],
            unit="share",
            counts={
                "parsed": sum(ok for _, ok in outcomes),
                "sampled": len(outcomes),
                "passes": passes,
                "rows": sum(one.rows for one, _ in outcomes),
                "tokens": tokens,
                "tokens_per_pass": tokens / passes,
            },
            check="compiled, never run; a last line cut short and open blocks or brackets are no fault",
        )


# -- the canvas, step by step ------------------------------------------------------------------------------------


def canvas_texts(model: DiffusionModel, step: CanvasStep, hidden: str = "▒") -> list[str]:
    """The canvas after a pass as texts, one a token; `hidden` for a masked one."""
    decode = (lambda t: str(t)) if model.tokenizer is None else model.tokenizer.token_text
    return [hidden if token == model.mask_token else decode(token) for token in step.token_ids]


def run_canvas(
    bench: Bench,
    *,
    model: str | DiffusionModel = BLOCK,
    prompt: str = "def read_lines(path):\n",
    max_tokens: int = 32,
    block_size: int | None = 8,
    sampler: str = "confidence",
    passes: int = 4,
    bound: float = 1.0,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[Measurement]:
    """One Measurement a pass, in seconds: which positions got a token, how sure the model was, and the canvas then."""
    diffusion = diffusion_model(bench, model)
    size = None if diffusion.kind == "masked" else block_size
    one = diffuse(
        diffusion,
        prompt,
        max_tokens=max_tokens,
        block_size=size,
        sampler=make_sampler(sampler, passes=passes, bound=bound),
        temperature=temperature,
        seed=seed,
        check_stop=bench.check_stop,
    )
    for step in one.history:
        yield bench.measurement(
            name="diffusion.canvas",
            settings={
                "model": diffusion.name,
                "sampler": one.sampler,
                "step": step.number,
                "block": list(step.block),
                "canvas": canvas_texts(diffusion, step),
                "revealed": list(step.revealed),
                "probability": [round(p, 4) for p in step.probability],
                "remasked": list(step.remasked),
            },
            samples=[step.seconds],
            unit="s",
            counts={
                "rows": step.rows,
                "cached": step.cached,
                "logit_rows": step.logit_rows,
                "tokens": len(step.revealed) - len(step.remasked),
            },
        )


# -- the time of a pass by its rows --------------------------------------------------------------------------------


def run_pass_time(
    bench: Bench,
    *,
    model: str | DiffusionModel = MASKED,
    rows: Sequence[int] = (16, 32, 64, 128, 256, 512),
    cached: int = 0,
    repeats: int = 20,
) -> Iterator[Measurement]:
    """Seconds of a pass by its rows, beside what the cost model predicts from this machine's ceilings."""
    from workbench.diffusion.attention import CanvasKV

    diffusion = diffusion_model(bench, model)
    ceilings, dtype = bench.ceilings(), diffusion.decoder.dtype
    for count in rows:
        bench.check_stop()
        if cached + count > diffusion.config.context_length:
            raise WorkbenchError(f"{cached + count} positions are more than {diffusion.config.context_length:,}")
        costs = pass_costs(diffusion.config, rows=count, cached=cached, weight_bytes_per_element=dtype.itemsize)
        expected = predict(costs, ceilings, dtype)
        kv = CanvasKV(diffusion.config, cached + count, cached + count, device=bench.device, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, diffusion.config.vocab_size, (cached + count,), generator=generator).tolist()
        if cached:
            diffusion.decoder.hidden(Batch.of([ids[:cached]], device=bench.device), kv)
        batch = Batch.of([ids[cached:]], first_positions=[cached], logits="all", device=bench.device)

        def one_pass(kv=kv, batch=batch) -> None:
            with torch.inference_mode():
                diffusion.decoder(batch, kv)
            kv.truncate(0, cached)

        yield bench.measurement(
            name="diffusion.pass_time",
            settings={"model": diffusion.name, "rows": count, "cached": cached},
            samples=bench.measure(one_pass, repeats=repeats, warmup=2),
            unit="s",
            counts={"rows": count, "flops": costs.flops, "bytes": costs.bytes},
            predicted=expected.seconds,
            limit=expected.limit,
        )


# -- few passes against many -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FewPasses:
    """A text of n tokens written token by token with a cache, and in a few passes over all n rows."""

    batch: int
    one_by_one_s: float
    few_passes_s: float
    flops_ratio: float  # few passes / one by one

    @property
    def speedup(self) -> float:
        return self.one_by_one_s / self.few_passes_s


def few_passes(
    config: ModelConfig, ceilings: Ceilings, *, tokens: int = 1000, passes: int = 20, batch: int = 1
) -> FewPasses:
    """By the whole cost model in bfloat16: attention, caches, norms and launches counted.

    The 16-bit weights are read once a pass either way. Raises WorkbenchError for no pass, and for more than tokens.
    """
    _check_few(tokens, passes, batch)

    def seconds(costs) -> float:
        return predict(costs, ceilings, "bfloat16").seconds

    # a step's time and FLOPs are linear in its context, so the mean over a text is that at its middle
    step = decode_costs(
        config, batch=batch, context=tokens // 2, weight_bytes_per_element=2, kv="contiguous", arrangement="plain"
    )
    canvas = pass_costs(config, rows=tokens, batch=batch)
    return FewPasses(
        batch, tokens * seconds(step), passes * seconds(canvas), passes * canvas.flops / (tokens * step.flops)
    )


def few_passes_by_roofline(ceilings: Ceilings, *, tokens: int = 1000, passes: int = 20, batch: int = 1) -> float:
    """The speedup where only the weights count: W bytes read and W FLOPs per row (2 bytes and 2 FLOPs per weight).

    A pass takes max(1 / bandwidth, rows / FLOP rate), so that no size of a model is left in the ratio. At batch 1 on a
    card whose FLOP rate is R times its bandwidth, n steps take n reads, and a pass over n > R rows takes n/R reads: the
    speedup is R / passes, 295 / 20 = 14.8 on an H100.
    """
    _check_few(tokens, passes, batch)

    def reads(rows: int) -> float:
        return max(1 / ceilings.read_bytes_per_s, rows / ceilings.flop_per_s["bfloat16"])

    return tokens * reads(batch) / (passes * reads(batch * tokens))


def _check_few(tokens: int, passes: int, batch: int) -> None:
    check_whole("tokens", tokens, 1)
    check_whole("passes", passes, 1)
    check_whole("batch", batch, 1)
    if passes > tokens:
        raise WorkbenchError(f"{passes} passes for {tokens} tokens: at least one token is written in each")


def run_few_passes(
    bench: Bench,
    *,
    shape: str = "llama-3.1-8b",
    card: str = "h100-sxm",
    tokens: int = 1000,
    passes: int = 20,
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
) -> Iterator[Measurement]:
    """How many times faster a few passes over a whole canvas are than a token a pass, by batch: predictions from a data
    sheet, no measurement."""
    config, ceilings = public_shape(shape), PUBLISHED[card]
    for batch in batches:
        bench.check_stop()
        one = few_passes(config, ceilings, tokens=tokens, passes=passes, batch=batch)
        yield bench.measurement(
            name="diffusion.few_passes",
            settings={"shape": shape, "card": card, "tokens": tokens, "passes": passes, "batch": batch},
            samples=[one.speedup],
            unit="x",
            counts={
                "roofline": few_passes_by_roofline(ceilings, tokens=tokens, passes=passes, batch=batch),
                "flops_ratio": one.flops_ratio,
                "one_by_one_s": one.one_by_one_s,
                "few_passes_s": one.few_passes_s,
            },
            predicted=one.speedup,
            check="computed from a data sheet, not measured",
        )


__all__ = [
    "BLOCK",
    "MASKED",
    "TWIN",
    "FewPasses",
    "canvas_texts",
    "few_passes",
    "few_passes_by_roofline",
    "run_bound",
    "run_canvas",
    "run_few_passes",
    "run_nats",
    "run_parsing",
    "run_pass_time",
    "twin_nats",
    "written",
]
