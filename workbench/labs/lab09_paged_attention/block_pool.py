"""paging.block_pool: a small scene over a pool of blocks, step by step: who holds which, what is shared, copied,
evicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, dtype_of, plain, shape_of
from workbench.kv import make_kv
from workbench.kv.paged import Paged
from workbench.labs.lab09_paged_attention.scene import Step, scene
from workbench.models.batch import Batch
from workbench.models.decoder import Decoder

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

APART = 1e-4  # by which a row of logits may differ, by rounding, from that of its text alone, of the largest logit
PREFIXES = ("hash", "radix", "none")


def block_bytes(model: str | Decoder, block_size: int) -> int:
    """Bytes of keys and values in one block, of all layers, as the model computes them. Loads no model."""
    room: dict[str, Any] = {"max_sequences": 1, "max_tokens": block_size, "block_size": block_size}
    return Paged.reserved_bytes_for(shape_of(model), dtype=dtype_of(model), **room)


def run_blocks(
    bench: Bench,
    *,
    model,
    block_size: int,
    num_blocks: int,
    prefix: str,
    prompt_tokens: int,
    samples: int,
    new_tokens: int,
    common_tokens: int,
    other_tokens: int,
    seed: int,
    shown_step: int,
) -> Iterator[Measurement]:
    """A Measurement a step (unit "blocks"): blocks that texts hold in the pool of a real `Paged`, predicted by the
    bookkeeping alone. Raises WorkbenchError where a table or a row of logits is another."""
    knobs = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "prefix": prefix,
        "prompt_tokens": prompt_tokens,
        "samples": samples,
        "new_tokens": new_tokens,
        "common_tokens": common_tokens,
        "other_tokens": other_tokens,
        "seed": seed,
    }
    decoder = bench.model(model)
    steps = scene(vocab_size=decoder.config.vocab_size, **knobs)
    kv = Paged(
        decoder.config,
        max_sequences=samples + 2,
        max_tokens=num_blocks * block_size,
        num_blocks=num_blocks,
        block_size=block_size,
        prefix=None if prefix == "none" else prefix,
        dtype=decoder.dtype,
        device=decoder.device,
    )
    texts: dict[str, list[int]] = {}
    per_block, found = block_bytes(decoder, block_size), 0
    for number, step in enumerate(steps):
        bench.check_stop()
        bench.report(f"{number + 1} of {len(steps)} steps")
        rows, apart = _replay(decoder, kv, step, texts)
        _check_tables(kv, step)
        found += sum(step.found.values())
        check = "every table is the one drawn"
        if rows:
            check += f"; logits of {rows} text{'s' * (rows > 1)} as of each alone, within {apart:.1g} of the largest"
        held = sum(count > 0 for count in kv.tables.references)
        yield bench.measurement(
            name="paging.block_pool",
            settings={
                **plain({"model": model}),
                **knobs,
                "step": number,
                "words": step.words,
                "tables": {name: list(table) for name, table in step.tables.items()},
                "copies": [list(copy) for copy in step.copies],
                "evicted": list(step.evicted),
            },
            samples=[held],
            unit="blocks",
            counts={
                "shared": step.shared,
                "idle": len(step.idle),
                "free": step.free,
                "copies": kv.tables.copies,
                "evictions": kv.tables.evictions,
                "hit_tokens": found,
                "unshared": step.unshared,
                "bytes_held": held * per_block,
                "bytes_in_use": kv.bytes_in_use,
                "bytes_saved": (step.unshared - held) * per_block,
            },
            predicted=step.held,
            check=check,
        )


def _replay(decoder: Decoder, kv: Paged, step: Step, texts: dict[str, list[int]]) -> tuple[int, float]:
    """The step on a real cache. Returns how many texts' logits were compared, and how far they are apart."""
    rows, apart = 0, 0.0
    for what, *given in step.acts:
        if what == "open":
            name, text = given
            texts[name] = list(text[: kv.open(name, text)])
        elif what == "fork":
            kv.fork(*given)
            texts[given[1]] = list(texts[given[0]])
        elif what == "remember":
            kv.remember(*given)
        elif what == "release":
            kv.release(*given)
            del texts[given[0]]
        else:
            [new] = given
            batch = Batch.of(
                list(new.values()),
                first_positions=[len(texts[name]) for name in new],
                sequences=list(new),
                device=decoder.device,
            )
            for name, tokens in new.items():
                texts[name] += tokens
            whole = Batch.of([texts[name] for name in new], device=decoder.device)
            with torch.inference_mode():
                paged = decoder(batch, kv).double()
                alone = decoder(whole, make_kv("recompute", decoder.config)).double()
            rows += len(new)
            apart = max(apart, float((paged - alone).abs().max() / alone.abs().max()))
    if apart > APART:
        raise WorkbenchError(
            f"in the step {step.words!r} logits are {apart:.2g} of the largest away from those of the texts alone: a"
            " block holds something else than its table says"
        )
    return rows, apart


def _check_tables(kv: Paged, step: Step) -> None:
    kv.tables.check()
    tables, real = kv.tables, {name: tuple(table) for name, table in kv.tables.tables.items()}
    same = real == step.tables and dict(kv.lengths) == step.lengths and tables.evictions == step.evictions
    if not same or tuple(tables.references) != step.references:
        raise WorkbenchError(f"after {step.words!r} the cache's tables are {real}, and those drawn {step.tables}")


EXPERIMENT = Experiment(
    name="paging.block_pool",
    lab=9,
    question="Who holds which block, and what is copied when?",
    how=(
        "a scene of given texts: samples of one prompt (A), a prompt with the same beginning (B), one with nothing"
        " in common (C), and the next turn of A 1 (D). The picture is the bookkeeping alone. Run sends the same"
        " through the real paged cache with a model, and holds every row of logits to the same text alone, without"
        " a cache."
    ),
    settings=(
        MODEL,
        Setting("block_size", 4, "choice", choices=(1, 2, 3, 4, 6, 8), unit="tokens", help="tokens of a block"),
        Setting("num_blocks", 16, "int", 6, 32, unit="blocks", help="of the pool"),
        Setting("prefix", "hash", "choice", choices=PREFIXES, help="how known beginnings are found again"),
        Setting("prompt_tokens", 10, "int", 2, 24, unit="tokens", help="of A's prompt"),
        Setting("samples", 3, "int", 1, 4, unit="texts", help="written from A's prompt side by side"),
        Setting("new_tokens", 6, "int", 2, 12, unit="tokens", help="that each sample writes"),
        Setting("common_tokens", 8, "int", 0, 24, unit="tokens", help="with which B begins as A does"),
        Setting("other_tokens", 40, "int", 2, 64, unit="tokens", help="of C's prompt"),
        Setting("seed", 0, "int", 0, 10_000, help="of the texts' tokens"),
        Setting("shown_step", 3, "int", 0, 30, help="which step is drawn"),
    ),
    run=run_blocks,
    predict=no_times,
    record={"cpu": (), "cuda": ()},  # counts are the same everywhere
)
