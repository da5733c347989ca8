"""What a step exchanges, by formula: calls and bytes of every collective, for each rank. Counted, it is the same.

N tokens, M rows of logits, d wide, V tokens of vocabulary, t ranks of tensor parallelism in each of p stages, b bytes:

    all_reduce   2 a layer of the stage, each N·d·b                        t > 1; 1 where attention is whole
    experts      in a layer with them 1 all_reduce less, 2 all_gathers (counts; N/t rows), 3 all_to_alls (rows, their
                 experts, rows back): of the N·k/t places of a rank (t−1)/t leave it where experts are chosen alike
    gather       1, ⌈V/t⌉·M·b on each rank of the last stage               t > 1; best: 16·M; draw: 8·M twice
    send         1 to the next stage, N·d·b; from the last to rank 0 M·V·b  p > 1; best and draw: 8·M
    tell         1 message with the batch, from rank 0 to all              any ranks but one

each as often as the step has groups. A decode step of Llama-3.1-8B at t = 8 in 16 bits: 64 all-reduces of 8 KiB a row.
Megatron-LM, arXiv 1909.08053 §3; its training has four all-reduces a layer, two of them in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.errors import WorkbenchError, unknown
from workbench.parallel.alpha_beta import AlphaBeta
from workbench.parallel.collectives import OPERATIONS, Count
from workbench.parallel.shard import WANTED, Layout


def step_counts(
    layout: Layout, rank: int, groups: Sequence[tuple[int, int]], *, element_bytes: int = 4, wanted: str = "logits"
) -> dict[str, Count]:
    """Calls and bytes of one rank in one step. groups: (N, M) of each, as `pipeline.groups_of` divides the batch.

    The bytes of `tell` and `hear` are not here (0): a message is text, as long as its batch.
    """
    if wanted not in WANTED:
        raise unknown("what a step is to give", wanted, WANTED)
    if not 0 <= rank < layout.ranks:
        raise WorkbenchError(f"this layout has ranks 0 … {layout.ranks - 1}, got {rank}")
    counts = dict.fromkeys(OPERATIONS, Count())
    for tokens, rows in groups:
        for operation, calls, nbytes in _of_group(layout, rank, tokens, rows, element_bytes, wanted):
            counts[operation] += Count(calls, calls * nbytes)
    return counts


def _of_group(
    layout: Layout, rank: int, tokens: int, rows: int, element_bytes: int, wanted: str
) -> list[tuple[str, int, int]]:
    """(operation, how often, bytes of each)"""
    config, (stage, part) = layout.config, layout.place(rank)
    last = stage == layout.pipeline - 1
    hidden = tokens * config.hidden_size * element_bytes
    calls = []
    if layout.ranks > 1:
        calls.append(("tell" if rank == 0 else "hear", 1, 0))
    if stage > 0:
        calls.append(("receive", 1, hidden))
    if layout.tensor > 1:
        layers = layout.layers(stage)
        mixtures = sum(config.has_experts(layer) for layer in layers)
        by_heads = len(layers) if layout.attention == "heads" else 0
        calls.append(("all_reduce", by_heads + len(layers) - mixtures, hidden))
        if mixtures:
            calls += _of_experts(layout, part, tokens, element_bytes, mixtures)
    if not last:
        calls.append(("send", 1, hidden))
    asked = wanted == "hidden" or rows > 0
    if last and layout.tensor > 1 and rows:
        own = layout.part(rank).vocabulary_rows
        calls += {
            "logits": [("gather", 1, rows * own * element_bytes)],
            "best": [("gather", 1, 16 * rows)],
            "draw": [("all_gather", 1, 8 * rows), ("gather", 1, 8 * rows)],
            "hidden": [],
        }[wanted]
    if layout.pipeline > 1 and asked:
        widths = {"logits": config.vocab_size * element_bytes, "best": 8, "draw": 8}
        answer = hidden if wanted == "hidden" else rows * widths[wanted]
        if last and part == 0:
            calls.append(("send", 1, answer))
        if rank == 0:
            calls.append(("receive", 1, answer))
    return calls


def _of_experts(
    layout: Layout, part: int, tokens: int, element_bytes: int, mixtures: int
) -> list[tuple[str, int, int]]:
    """Of layers with experts: how many rows go where, the sums, and the rows themselves, to their experts with their
    numbers and back. Which rows leave a rank depends on the text; the bytes are those of experts chosen alike."""
    config, ranks = layout.config, layout.tensor
    each = -(-tokens // ranks)
    own = max(0, min(each, tokens - part * each))
    leave = own * config.experts_shape.experts_per_token * (ranks - 1) / ranks
    width = config.hidden_size * element_bytes
    return [
        ("all_gather", mixtures, 8 * ranks),
        ("all_gather", mixtures, each * width),
        ("all_to_all", mixtures, round(leave * width)),
        ("all_to_all", mixtures, round(leave * 8)),
        ("all_to_all", mixtures, round(_expected_back(layout, part, tokens) * width)),
    ]


def _expected_back(layout: Layout, part: int, tokens: int) -> float:
    """Rows of other ranks that came to this rank's experts."""
    each = -(-tokens // layout.tensor)
    others = tokens - max(0, min(each, tokens - part * each))
    return others * layout.config.experts_shape.experts_per_token / layout.tensor


def step_seconds(
    layout: Layout,
    groups: Sequence[tuple[int, int]],
    link: AlphaBeta,
    *,
    element_bytes: int = 4,
    wanted: str = "logits",
) -> float:
    """Seconds that the exchange of one step takes, every rank waiting for it: the all-reduces and gathers of each stage
    and the sends between stages, one after the other. The batch's message and the computing are not in it."""
    total = 0.0
    for stage in range(layout.pipeline):
        counts = step_counts(layout, layout.members(stage)[0], groups, element_bytes=element_bytes, wanted=wanted)
        sends = {"send": counts.pop("send")}
        total += link.predict_counts(counts, layout.tensor) + link.predict_counts(sends, 2)
    return total
