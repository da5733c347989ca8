"""beyond.recall: held-out loss where the context has shown the answer before, and where it has not.

A scored token is a hit where the bigram of the token before it and itself occurred earlier in its passage: attention
can look the answer up there, and a state has to have kept it (Zoology, arXiv 2312.04927, section 3). The published
hits are rare in training as well; so hits are divided by how often training showed their bigram, and by how many
tokens ago the passage showed it last. Of a slice s with n_s tokens

    share of the gap = Σ_{t in s} (ℓ_t − ℓ'_t) / Σ_t (ℓ_t − ℓ'_t)

ℓ in nats, ℓ' those of the reference on the same tokens. Standard errors are jackknifed over passages.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import tokenizers
import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Limits, Setting, no_times
from workbench.experiments.held_out import CONTEXT, PASSAGES, passages_for
from workbench.models.checkpoints import shipped_names
from workbench.models.corpus import SourceFile, training_files
from workbench.models.recipes import STATE_VARIANTS
from workbench.models.tokenizer import Tokenizer
from workbench.models.training import TrainingAttention, rows_batch

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.decoder import Decoder

REFERENCE = "stdlib-3m-attention8"
COMPARED = tuple(name for name in STATE_VARIANTS if name != REFERENCE)
PUBLISHED_SHARE = 0.82  # of the gap of gated convolutions, 355 M parameters, The Pile (arXiv 2312.04927)
FREQUENCIES = (0, 1, 10, 100)  # occurrences in training at which a slice of hits begins
DISTANCES = (1, 8, 16, 32, 64, 128, 256, 512)  # tokens since the last occurrence at which one begins
SIDE_BY_SIDE = 4  # passages in one forward
CLEAR = 2  # standard errors above 0 from which on a gap is divided


# -- which tokens ----------------------------------------------------------------------------------------------


def tokens_since(rows: torch.Tensor) -> torch.Tensor:
    """[P, S − 1] int64 of rows [P, S]: how many tokens ago the bigram that ends at token i + 1 ended in its row last,
    0 where it had not occurred. Occurrences may overlap."""
    pairs = rows[:, :-1] * (int(rows.max()) + 1) + rows[:, 1:]
    ordered, places = pairs.sort(dim=1, stable=True)  # occurrences of a bigram beside each other, ascending
    again = F.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    since = F.pad(places.diff(dim=1), (1, 0)) * again
    return torch.zeros_like(pairs).scatter(1, places, since)


def bigram_counts(rows: torch.Tensor, stream: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[P, S − 1] int64 of rows [P, S]: how often the bigram that ends at token i + 1 occurs in the stream [T]."""
    wanted, seen = (rows[..., :-1] * vocab_size + rows[..., 1:] for rows in (rows, stream))
    known, counts = seen.unique(return_counts=True)
    if not len(known):
        return torch.zeros_like(wanted)
    at = torch.searchsorted(known, wanted).clamp(max=len(known) - 1)
    return counts[at] * (known[at] == wanted)


@dataclass(frozen=True)
class Slice:
    """Some of the scored tokens. kind: "all", "hit" (hits and the rest), and of the hits "frequency" and "distance"."""

    kind: str
    name: str
    first: int  # of its numbers, by which slices of a kind are ordered
    mask: torch.Tensor  # [P, S − 1] bool


def slices_of(since: torch.Tensor, frequency: torch.Tensor) -> list[Slice]:
    """All slices that have tokens: the whole, hits and the rest, and hits by frequency and by distance. Of each kind
    every token (every hit) is in exactly one."""
    hit = since > 0
    made = [Slice("all", "all", 0, torch.ones_like(hit)), Slice("hit", "hits", 0, hit), Slice("hit", "rest", 1, ~hit)]
    for kind, numbers, edges in (("frequency", frequency, FREQUENCIES), ("distance", since, DISTANCES)):
        for first, end in zip(edges, [*edges[1:], None]):
            within = hit & (numbers >= first) & (numbers < (math.inf if end is None else end))
            made.append(Slice(kind, range_words(first, end), first, within))
    for kind, whole in (("hit", torch.ones_like(hit)), ("frequency", hit), ("distance", hit)):
        times = torch.stack([one.mask for one in made if one.kind == kind]).sum(0)
        assert torch.equal(times, whole.long()), f"a token of {kind} is in no slice, or in two"
    return [one for one in made if one.mask.any()]


def range_words(first: int, end: int | None) -> str:
    """'0', '1 to 9', '512 or more': first ≤ n < end."""
    if end is None:
        return f"{first} or more"
    return f"{first}" if end == first + 1 else f"{first} to {end - 1}"


def training_stream(tokenizer: Tokenizer, tokens: int) -> torch.Tensor:
    """[T] int64: the first `tokens` tokens of the training modules, whole modules, the last of them included. Made once
    a tokenizer (ten seconds for all of it) and shared."""
    return _stream_of(tuple(training_files()), tokenizer.backend.to_str(), tokenizer.end_of_text, tokens)


@functools.lru_cache(maxsize=2)
def _stream_of(files: tuple[SourceFile, ...], backend: str, end_of_text: int, tokens: int) -> torch.Tensor:
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(backend), end_of_text=end_of_text)
    ids: list[int] = []
    for file in files:
        if len(ids) >= tokens:
            break
        ids += [*tokenizer.encode(file.text), end_of_text]
    return torch.tensor(ids, dtype=torch.int64)


# -- nats ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def token_losses(bench: Bench, model: Decoder, rows: torch.Tensor) -> torch.Tensor:
    """[P, S − 1] float32 nats of rows [P, S], each passage whole in the parallel form, as in training."""
    kv, losses = TrainingAttention(model.config), []
    for start in range(0, len(rows), SIDE_BY_SIDE):
        bench.check_stop()
        bench.report(f"{model.name}: passage {start + 1} of {len(rows)}")
        some = rows[start : start + SIDE_BY_SIDE].to(model.device)
        logits = model(rows_batch(some), kv).view(*some.shape, -1)[:, :-1].flatten(0, 1)
        nats = F.cross_entropy(logits.float(), some[:, 1:].flatten(), reduction="none")
        losses.append(nats.view(len(some), -1).cpu())
    return torch.cat(losses)


def jackknife(ratio: Callable[..., torch.Tensor], *columns: torch.Tensor) -> float:
    """Standard error of ratio(sums of the columns [P]) over passages, each left out once; inf where one of these has no
    value."""
    count = len(columns[0])
    without = ratio(*(column.sum() - column for column in columns))
    if not bool(without.isfinite().all()):
        return math.inf
    return float(((without - without.mean()).square().sum() * (count - 1) / count).sqrt())


def slice_counts(part: Slice, losses: torch.Tensor, reference: torch.Tensor | None) -> dict[str, float]:
    """What is counted of a model's losses [P, S − 1] in a slice: tokens, nats, and beside a reference the gap and its
    share of the whole gap. What has no finite value is left out, and the share where the whole gap is not clear."""
    values, inside = losses.double(), part.mask.double()
    nats, tokens = (values * inside).sum(1), inside.sum(1)
    counts = {
        "tokens": int(tokens.sum()),
        "token_share": float(inside.mean()),
        "nats": float(nats.sum()),
        "standard_error": jackknife(torch.div, nats, tokens),
    }
    if reference is not None:
        gaps = values - reference.double()
        gap, whole = (gaps * inside).sum(1), gaps.sum(1)
        counts |= {
            "gap": float(gap.sum() / tokens.sum()),
            "gap_standard_error": jackknife(torch.div, gap, tokens),
            "gap_nats": float(gap.sum()),
        }
        if float(whole.sum()) > CLEAR * jackknife(lambda total: total, whole):
            counts["gap_share"] = float(gap.sum() / whole.sum())
            counts["gap_share_standard_error"] = jackknife(torch.div, gap, whole)
    return {name: value for name, value in counts.items() if math.isfinite(value)}


# -- the run ---------------------------------------------------------------------------------------------------


def trained_here() -> list[str]:
    """The compared models whose weights are here, in the order of `STATE_VARIANTS`."""
    here = shipped_names()
    return [name for name in COMPARED if name in here]


def run_recall(bench: Bench, *, models: str, context: int, passages: int, counted: int) -> Iterator[Measurement]:
    """Of every model a Measurement for each slice (nats/token), the reference first: settings `slicing` and `slice`
    name it; `slice_counts` are its counts.

    Raises WorkbenchError for a model whose weights are not here.
    """
    reference = bench.model(REFERENCE)
    others = trained_here() if models == "all" else [models]
    rows = passages_for(reference, context, passages)
    bench.check_stop()
    bench.report("bigrams of the training modules")
    stream = training_stream(reference.tokenizer, counted)
    frequency = bigram_counts(rows, stream, reference.config.vocab_size)
    every = slices_of(tokens_since(rows), frequency)
    settings = {"reference": reference.name, "context": context, "passages": passages, "counted": counted}
    base: torch.Tensor | None = None
    for name in (REFERENCE, *others):
        model = bench.model(name)
        _check_same_tokens(model, reference)
        losses = token_losses(bench, model, rows)
        for part in every:
            counts = slice_counts(part, losses, base)
            yield bench.measurement(
                name="beyond.recall",
                settings={
                    "model": model.name,
                    "slicing": part.kind,
                    "slice": part.name,
                    "first": part.first,
                    **settings,
                },
                samples=[counts["nats"] / counts["tokens"]],
                unit="nats/token",
                counts=counts | {"training_tokens": len(stream), "parameters": model.num_parameters()},
                check="hits and the rest, and hits by frequency and by distance, have all tokens and all nats once",
            )
        base = losses if base is None else base


def _check_same_tokens(model: Decoder, reference: Decoder) -> None:
    same = model.tokenizer is not None and model.tokenizer.backend.to_str() == reference.tokenizer.backend.to_str()
    if not same:
        raise WorkbenchError(
            f"{model.name} and {reference.name} have different tokenizers: their tokens do not compare"
        )


def limits(**settings: Any) -> Limits:
    """A model whose weights are not here cannot be chosen."""
    return {"models": lambda name: name == "all" or name in trained_here()}


EXPERIMENT = Experiment(
    name="beyond.recall",
    lab=14,
    question="How much of what a state loses against attention is recall of what the context has shown before?",
    how="passages of the held-out modules go whole through every model, in the parallel form, float32. A token is a hit"
    " where the bigram of the token before it and itself occurred earlier in its passage. Gaps are to attention8, token"
    " by token; standard errors are jackknifed over passages.",
    settings=(
        Setting(
            "models",
            "all",
            "choice",
            choices=("all", *COMPARED),
            help="beside attention8: all trained models that are here, or one of them",
        ),
        replace(CONTEXT, brief=128),
        replace(PASSAGES, default=48),
        Setting(
            "counted",
            3_000_000,
            "int",
            1000,
            10_000_000,
            unit="tokens",
            step=1000,
            brief=1000,
            help="of the training modules, in which bigrams are counted; 3 million are all of them",
        ),
    ),
    run=run_recall,
    predict=no_times,
    limits=limits,
    record={"cpu": ({},), "cuda": ()},
)
