"""pruning.masks: single weights set to zero: by how much the loss rises, by method, and what it brings in time.

Half of the weights of every linear layer become zero, by magnitude, Wanda or SparseGPT (`pruning.masks`), anywhere in
a row or two in every four. A matrix with zeros takes the bytes of one without, so a product with it takes as long.
What is faster has to leave the zeros out: compressed rows (CSR) keep each other weight with its column, in float32
4 + 4 bytes, so by bytes they win from half zeros on. Sparse tensor cores read two of four. In which order to mask and
to round is measured as well: what is published (Harma et al., arXiv 2405.20935) is to mask first.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Limits, Setting, no_times
from workbench.experiments.held_out import CONTEXT, PASSAGES, mean_and_error, passages_for
from workbench.experiments.inputs import MODEL, plain, shape_of
from workbench.labs.lab05_quantization.inputs import (
    LENGTH,
    SEQUENCES,
    calibration_for,
    linears_of,
    quantized_linears_of,
)
from workbench.labs.lab05_quantization.stored_formats import linear_shapes
from workbench.models.decoder import Decoder
from workbench.pruning import Cut, losses_without
from workbench.pruning.importance import check_plain
from workbench.pruning.masks import METHODS, Pattern, masked_model
from workbench.quantization import QuantizationRecipe, quantize
from workbench.quantization.pipeline import copy_of

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

NAME = "pruning.masks"
PATTERNS = ("0.5", "2:4", "0.25", "0.75")
ROUNDED, MASK_FIRST, ROUND_FIRST = "rounded alone", "masked, then rounded", "rounded, then masked"
ORDERS = (ROUNDED, MASK_FIRST, ROUND_FIRST)
BETWEEN = (("wanda", "magnitude"), ("sparsegpt", "wanda"), (MASK_FIRST, ROUND_FIRST))  # differences of losses
WHOLE = "whole"
BITS, ORDER_METHOD = 4, "wanda"
SHARES = (0.5, 0.75, 0.9, 0.95, 0.99)  # of zeros in a timed matrix
DENSE, COMPRESSED, TENSOR_CORES = "dense, with zeros", "compressed rows", "2:4, sparse tensor cores"
APART = {torch.float32: 1e-4, torch.float16: 2e-2}  # of the largest output, by the order of additions


# -- quality
# -------------------------------------------------------------------------------------------------------------


def rounded_copy(model: Decoder, group: int) -> Decoder:
    """A new model whose linear layers have values of 4 bits, symmetric, so that 0 stays 0; stored as plain floats."""
    stored = quantized_linears_of(quantize(model, QuantizationRecipe("rtn", BITS, group, options={"symmetric": True})))
    new = copy_of(model)
    for name, linear in linears_of(new).items():
        assert isinstance(linear, torch.nn.Linear)
        linear.weight = torch.nn.Parameter(stored[name].dequantized_weight(), requires_grad=False)
    return new


def zero_share(model: Decoder) -> float:
    """Of the weights of the linear layers."""
    weights = [cast(torch.Tensor, linear.weight) for linear in linears_of(model).values()]
    return sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)


def run_masks(
    bench: Bench,
    *,
    model: str | Decoder,
    pattern: str,
    group: int,
    sequences: int,
    length: int,
    context: int,
    passages: int,
    size: int,
    rows: int,
    repeats: int,
) -> Iterator[Measurement]:
    """Measurements in the setting `measured`: "whole", "masked" with its `method` and "order" with its `order`
    (nats/token); "between": by how much the loss of `one` is below that of `other`, passage by passage; "time"
    (unit "x", times as fast as the dense product) with `stored` and the share of `zeros`."""
    decoder = bench.model(model)
    check_plain(decoder)
    check_group(decoder, group)
    zeros = Pattern.parse(pattern)
    passages_ = passages_for(decoder, context, passages)
    text = calibration_for(bench, decoder, sequences, length)
    settings = plain({"model": model}) | {"pattern": pattern, "group": group, "sequences": sequences}
    settings |= {"length": length, "context": context, "passages": passages}

    @functools.cache
    def whole() -> torch.Tensor:
        return losses_without(decoder, passages_, Cut(), check_stop=bench.check_stop)

    def with_zeros(of: Decoder, method: str) -> Decoder:
        return masked_model(of, zeros, method, calibration=text, check_stop=bench.check_stop)[0]

    by_passage: dict[str, torch.Tensor] = {}

    def loss(made: Decoder, **what: Any) -> Measurement:
        nats = losses_without(made, passages_, Cut(), check_stop=bench.check_stop)
        by_passage[what.get("method", what.get("order", WHOLE))] = nats
        increase, error = mean_and_error(nats - whole())
        return bench.measurement(
            name=NAME,
            settings={**settings, **what},
            samples=[float(nats.mean())],
            unit="nats/token",
            counts={"increase": increase, "standard_error": error, "zeros": zero_share(made)},
            check="the same held-out passages; masks from the same calibration text",
        )

    bench.report("the whole model")
    yield loss(decoder, measured=WHOLE)
    for method in METHODS:
        bench.report(f"masked by {method}")
        yield loss(with_zeros(decoder, method), measured="masked", method=method)
    for order in ORDERS:
        bench.report(order)
        if order == MASK_FIRST:
            made = rounded_copy(with_zeros(decoder, ORDER_METHOD), group)
        else:
            made = rounded_copy(decoder, group)
            if order == ROUND_FIRST:
                made = with_zeros(made, ORDER_METHOD)
        yield loss(made, measured="order", order=order)
    for one, other in BETWEEN:
        lower, error = mean_and_error(by_passage[other] - by_passage[one])
        yield bench.measurement(
            name=NAME,
            settings={**settings, "measured": "between", "one": one, "other": other},
            samples=[lower],
            unit="nats/token",
            counts={"standard_error": error},
            check="the mean over the passages of the difference of the two losses",
        )
    yield from _timed(bench, size, rows, repeats)


def check_group(model: Decoder, group: int) -> None:
    if any(linear.in_features % group for linear in linears_of(model).values()):
        raise WorkbenchError(f"groups of {group} do not divide the inputs of every linear layer of {model.name}")


# -- time
# ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A matrix with zeros in some form: its product with x, and the bytes that a product reads of it."""

    multiply: Callable[[torch.Tensor], torch.Tensor]
    bytes: int


def compressed_rows(weight: torch.Tensor) -> torch.Tensor:
    """The same matrix as CSR with 32-bit columns: 8 bytes for each weight that is not 0 (float32)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support")
        csr = weight.to_sparse_csr()
        parts = csr.crow_indices().int(), csr.col_indices().int(), csr.values()
        return torch.sparse_csr_tensor(*parts, csr.shape, check_invariants=True)


def on_a_card(weight: torch.Tensor) -> bool:
    """Where sparse tensor cores are."""
    return weight.is_cuda


def stored_forms(weight: torch.Tensor, zeros: float) -> dict[str, Stored]:
    """The forms that this machine has, of a matrix of which a share is 0."""
    item = weight.element_size()
    csr = compressed_rows(weight)
    sparse_bytes = csr.values().numel() * (item + 4) + 4 * csr.crow_indices().numel()
    forms = {
        DENSE: Stored(lambda x: x @ weight.T, weight.numel() * item),
        COMPRESSED: Stored(lambda x: (csr @ x.T).T, sparse_bytes),
    }
    if on_a_card(weight) and zeros == 0.5:
        two_of_four = torch.sparse.to_sparse_semi_structured(weight)
        read = weight.numel() * item // 2 + weight.numel() // 8  # half of the values, and 2 bits for each of them
        forms[TENSOR_CORES] = Stored(lambda x: (two_of_four @ x.T).T, read)
    return forms


def _timed(bench: Bench, size: int, rows: int, repeats: int) -> Iterator[Measurement]:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float16 if bench.device.startswith("cuda") else torch.float32
    full = torch.randn(size, size, generator=generator).to(bench.device, dtype)
    x = torch.randn(rows, size, generator=generator).to(bench.device, dtype)
    for share in SHARES:
        pattern = Pattern.parse("2:4") if share == 0.5 else Pattern(share)
        weight = full.masked_fill(pattern.zeroed(full.abs().double().cpu()).to(full.device), 0)
        oracle = x.double() @ weight.double().T
        for name, form in stored_forms(weight, share).items():
            bench.check_stop()
            bench.report(f"{name}, {share:.0%} zeros")
            apart = float((form.multiply(x).double() - oracle).abs().max() / oracle.abs().max())
            if apart > APART[dtype]:
                raise WorkbenchError(
                    f"{name}: the product is {apart:.2g} of its largest value off; its time was thrown away"
                )
            dense, sparse = functools.partial(torch.matmul, x, full.T), functools.partial(form.multiply, x)
            paired = bench.measure_pair(dense, sparse, repeats=repeats)
            yield bench.measurement(
                name=NAME,
                settings={"measured": "time", "stored": name, "zeros": share, "size": size, "rows": rows},
                samples=paired.ratios,
                unit="x",
                counts={"bytes": form.bytes, "dense_bytes": full.numel() * full.element_size()},
                predicted=full.numel() * full.element_size() / form.bytes,
                limit="bandwidth",
                check=f"the product equals that in float64 within {apart:.1g} of its largest value",
            )


def limits(*, model: str | Decoder, **settings: Any) -> Limits:
    config = shape_of(model)
    inside = {shape[1] for shape in linear_shapes(config)}
    return {
        "group": lambda group: all(width % group == 0 for width in inside),
        "pattern": lambda pattern: pattern != "2:4" or all(width % 4 == 0 for width in inside),
        "context": lambda tokens: tokens <= config.context_length,
        "length": lambda tokens: tokens <= config.context_length,
    }


EXPERIMENT = Experiment(
    name=NAME,
    lab=12,
    question="Half of the weights are zero: by how much does the loss rise, and is anything faster?",
    how=(
        "weights of all linear layers are masked layer by layer, each with the inputs that it has behind the"
        " masked ones,"
        " and the model is scored on held-out passages. A square matrix with zeros is multiplied in each form that this"
        " machine has, in turns with the full matrix; by bytes is what each form would take if only reading cost time"
    ),
    settings=(
        MODEL,
        Setting("pattern", "0.5", "choice", choices=PATTERNS, help="zeros: a share of each row, or two of every four"),
        Setting(
            "group", 64, "choice", choices=(16, 32, 64, 128), help="weights that share a scale of the 4-bit values"
        ),
        SEQUENCES,
        LENGTH,
        replace(CONTEXT, default=256, brief=64),
        PASSAGES,
        Setting("size", 2048, "int", 64, 8192, unit="rows", step=64, help="of the square matrix that is timed"),
        Setting("rows", 1, "int", 1, 512, help="of x in the timed product: the batch"),
        Setting("repeats", 30, "int", 1, 500, brief=2, help="timed products of each form"),
    ),
    run=run_masks,
    predict=no_times,
    limits=limits,
    record={"cpu": ({}, {"pattern": "2:4"}), "cuda": ({}, {"rows": 256})},
)
