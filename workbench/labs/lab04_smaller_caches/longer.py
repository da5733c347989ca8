"""Whether the order of the variants, and how far they are apart, hold when they are trained longer, as
`workbench/models/zoo/seeds.json` has it: runs with one seed of several lengths, beside the spread from seed to seed."""

from __future__ import annotations

from workbench.labs.lab04_smaller_caches.inputs import VARIANTS
from workbench.labs.lab04_smaller_caches.variants import VARIANTS as TITLES
from workbench.models.seeds import (
    Longer,
    above,
    lengths,
    losses_by_length,
    losses_by_seed,
    pooled,
    tokens_seen,
    trained_longer,
)
from workbench.panels.words import listed

SEED = 0
MHA = VARIANTS[0]
FAR = 2  # spreads; a difference that moved by less has not clearly moved


def title(model: str) -> str:
    return TITLES[model.rpartition("-")[2]]


def spread() -> float:
    """Standard deviation of a difference from MHA, from seed to seed: nats per token."""
    return pooled(above(MHA, losses_by_seed())).standard_deviation


def moved_far(longer: Longer) -> dict[str, tuple[float, float]]:
    """{model: loss above MHA's after fewer and after more tokens} where it moved by more than `FAR` spreads."""
    moved, least = longer.moved(MHA), FAR * spread()
    return {model: both for model, both in longer.above(MHA).items() if abs(moved[model]) > least}


def as_table() -> tuple[list[str], list[list[str]], str]:
    """(header, rows, caption): MHA's own loss and every other variant's above it, a column for each length."""
    by_length, longer, unit = losses_by_length(SEED), trained_longer(SEED), spread()
    header = ["", *(f"{seen:,} tokens" for seen in by_length)]
    rows = [["MHA's own loss", *(f"{losses[MHA]:.4f}" for losses in by_length.values())]]
    rows += [
        [title(model), *(f"{losses[model] - losses[MHA]:+.4f}" for losses in by_length.values())]
        for model in VARIANTS[1:]
    ]
    if longer is not None:
        header += ["moved by", "in spreads"]
        moved = longer.moved(MHA)
        rows[0] += [f"{longer.losses[MHA][1] - longer.losses[MHA][0]:+.4f}", ""]
        for row, model in zip(rows[1:], VARIANTS[1:]):
            row += [f"{moved[model]:+.4f}", f"{moved[model] / unit:+.1f}"]
    return header, rows, f"held-out loss above MHA's, nats per token, all with seed {SEED}"


def in_words() -> str:
    """What the table shows, as Markdown; of runs of one length, that they are."""
    if (longer := trained_longer(SEED)) is None:
        [seen] = losses_by_length(SEED)
        return (
            f"All runs with seed {SEED} that are on file are of one length, {seen:,} tokens, so whether the order of "
            "the variants holds when they are trained longer is not known here."
        )
    (few, many), (before, after) = longer.tokens_seen, longer.losses[MHA]
    sizes = sorted(abs(one) for one in longer.moved(MHA).values())
    far, single = _changes(longer), [f"{seen:,}" for seen in longer.tokens_seen if lengths()[seen] == [SEED]]
    return " ".join(
        [
            f"From {few:,} to {many:,} tokens MHA's loss goes from {before:.3f} to {after:.3f}.",
            _order_in_words(longer),
            f"The differences from MHA moved by {sizes[0]:.3f} to {sizes[-1]:.3f} nats; the spread of one from seed to",
            f"seed is {spread():.3f} (standard deviation, runs of {tokens_seen():,} tokens).",
            f"{f'Those of {far}' if far else 'None'} moved by more than {FAR} spreads.",
            *(
                f"At {seen} tokens there is one run of each variant, with one seed; the spread there was not measured."
                for seen in single
            ),
            "Where two runs differ in their seed alone, a difference already moves by √2 spreads between them.",
        ]
    )


def in_a_sentence() -> str:
    """The same for a panel that has just said the spread; empty where all runs are of one length."""
    if (longer := trained_longer(SEED)) is None:
        return ""
    few, many = (f"{seen / 1e6:.1f}" for seen in longer.tokens_seen)
    swapped = [f"{title(a)} with {title(b)}" for a, b in longer.swapped()]
    far = f"more than {FAR} of those standard deviations"
    changes = _changes(longer)
    return (
        f"Trained on {many} million tokens in place of {few} (seed {SEED}, one run each), "
        + (f"{listed(swapped)} change places" if swapped else "the variants keep their order")
        + (f", and the differences of {changes} moved by {far}." if changes else f", and no difference moved by {far}.")
    )


def _order_in_words(longer: Longer) -> str:
    ordered = sorted(longer.losses, key=lambda model: longer.losses[model][0])
    if not (swapped := longer.swapped()):
        return f"**The order held**: {listed([title(model) for model in ordered])}, the lowest loss first."
    lines, clear, least = [], 0, FAR * spread()
    for a, b in swapped:
        ahead, behind = (later - earlier for earlier, later in zip(longer.losses[a], longer.losses[b]))
        lines.append(f"{title(a)} was ahead of {title(b)} by {ahead:.3f} and is behind by {-behind:.3f}")
        clear += ahead > least
    pairs = len(ordered) * (len(ordered) - 1) // 2
    return (
        f"**The order did not hold** for {len(swapped)} of {pairs} pairs: {'; '.join(lines)}. Before, "
        f"{clear or 'none'} of these {'were' if clear > 1 else 'was'} more than {FAR} spreads apart."
    )


def _changes(longer: Longer) -> str:
    """The differences that moved far; empty where none did."""
    far = [f"{title(model)} ({first:+.3f} to {last:+.3f})" for model, (first, last) in moved_far(longer).items()]
    return listed(far) if far else ""
