"""SqueezeLLM: levels where the weights that matter are, and the few that fit no level kept as they are.

    Ŵ = D + S      D: every row has a codebook of 2ᵇ levels, a code a weight      S: sparse, float16

    the levels of a row     weighted k-means:  min Σ over inputs of F_ij·(w_ij − level)²
    the weights F           the diagonal of the empirical Fisher information, F = E[(∂loss/∂w)²] over calibration text:
                            what an error in this one weight costs the loss (to second order, others left alone)
    in S                    outliers, the largest |w| (0.4 %), which would pull levels away from all others, and the
                            most sensitive weights (0.05 %); S holds w − D there

K-means in one dimension: with the row sorted, a cluster is an interval, and prefix sums of F, F·w and F·w² give its
mean and its cost at once. The best intervals are found by dynamic programming, in long rows over some of the places
where they may end, as dense there as the best levels are when there are many, (density·F)^⅓; Lloyd's steps then move
their ends.

Source: SqueezeLLM, Kim et al., arXiv 2306.07629 §4.1 (k-means, equation 4) and §4.2 (dense-and-sparse). The density of
levels: Panter and Dite, "Quantization distortion in pulse-count modulation", 1951.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from workbench.errors import WorkbenchError, check_between, check_settings, is_whole
from workbench.quantization.calibration import Inputs
from workbench.quantization.formats import IntegerFormat, pack, unpack
from workbench.quantization.methods import Method, method
from workbench.quantization.stored import StoredWeight, check_finite, expect, register, take

CUTS = 8  # places a level at which an interval may begin
LLOYD_STEPS = 30
CHUNK = 1 << 18  # costs of intervals that are computed at a time: they stay in the CPU's cache


# -- k-means in one dimension --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """Sorted rows with the prefix sums of weight, weight·value and weight·value²: [3, rows, n + 1] float64."""

    values: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor, weights: torch.Tensor) -> _Rows:
        values, order = values.double().sort(dim=1)
        weights = weights.double().gather(1, order)
        powers = torch.stack((weights, weights * values, weights * values.square()))
        return cls(values, torch.nn.functional.pad(powers.cumsum(-1), (1, 0)))

    def edges(self, centers: torch.Tensor) -> torch.Tensor:
        """Where each center's interval begins, and the end: [rows, k + 1]. A value belongs to the nearest center."""
        middle = ((centers[:, 1:] + centers[:, :-1]) / 2).contiguous()
        inner = torch.searchsorted(self.values, middle)
        first = inner.new_zeros(len(inner), 1)
        return torch.cat((first, inner, first + self.values.shape[1]), dim=1)

    def between(self, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """[3, rows, k] sums over intervals."""
        three = (3, *starts.shape)
        return self.sums.gather(2, ends.expand(three)) - self.sums.gather(2, starts.expand(three))


def _mean(sums: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    return torch.where(sums[0] > 0, sums[1] / sums[0].where(sums[0] > 0, 1), otherwise)


def _cost(sums: torch.Tensor) -> torch.Tensor:
    """Σ F·(w − mean)² of intervals."""
    return (sums[2] - sums[1].square() / sums[0].where(sums[0] > 0, 1)).clamp(min=0)


def weighted_kmeans(values: torch.Tensor, weights: torch.Tensor, levels: int) -> torch.Tensor:
    """values, weights [rows, n] -> `levels` centers of each row, in order, [rows, levels] float64.

    Weights are not negative; a row of zeros counts all its values alike. The optimum where n is at most CUTS a level,
    otherwise the optimum over that many cuts and from there on a local one.
    """
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, 1.0)
    step = max(1, CHUNK // min(values.shape[1], CUTS * levels) ** 2)
    parts = zip(values.split(step), weights.split(step))
    return torch.cat([_cluster(_Rows.of(v, w), levels) for v, w in parts])


def _cluster(rows: _Rows, levels: int) -> torch.Tensor:
    edges = _best_edges(rows, _cuts(rows, CUTS * levels), levels)
    low = rows.values.gather(1, edges[:, :-1].clamp(max=rows.values.shape[1] - 1))
    centers = _mean(rows.between(edges[:, :-1], edges[:, 1:]), low).sort(dim=1).values
    for _ in range(LLOYD_STEPS):  # each center to the mean of the values nearest to it; an empty one stays
        edges = rows.edges(centers)
        moved = _mean(rows.between(edges[:, :-1], edges[:, 1:]), centers)
        if torch.equal(moved, centers):
            break
        centers = moved
    return centers


def _cuts(rows: _Rows, number: int) -> torch.Tensor:
    """Where intervals may begin or end: [rows, number + 1], 0 and n among them; everywhere if n is no larger.

    As dense as (density·F)^⅓: the share of two neighbours, a gap apart, is F^⅓·gap^⅔."""
    values, n = rows.values, rows.values.shape[1]
    if n <= number:
        return torch.arange(n + 1, device=values.device).expand(len(values), -1)
    weights = rows.sums[0].diff(dim=1)
    both = (weights[:, 1:] * weights[:, :-1]).sqrt()
    reached = torch.nn.functional.pad((both * values.diff(dim=1).square()).pow(1 / 3).cumsum(1), (1, 0))
    shares = torch.arange(number + 1, dtype=torch.float64, device=values.device) / number
    cuts = torch.searchsorted(reached, reached[:, -1:] * shares)
    cuts[:, 0], cuts[:, -1] = 0, n
    return cuts


def _best_edges(rows: _Rows, cuts: torch.Tensor, levels: int) -> torch.Tensor:
    """The intervals between cuts that together cost least: [rows, levels + 1] of the cuts. Dynamic programming:

    cost of values up to cut b with one level more = least over a of: cost up to a, and of one level from a to b."""
    at_cuts = rows.sums.gather(2, cuts.expand(3, *cuts.shape))
    between = _cost(at_cuts[:, :, None, :] - at_cuts[:, :, :, None])  # [rows, a, b]
    places = torch.arange(cuts.shape[1], device=cuts.device)
    between = between.masked_fill(places[:, None] > places[None, :], torch.inf)
    least, came_from = between[:, 0], []
    for _ in range(levels - 1):
        least, a = (least[:, :, None] + between).min(1)
        came_from.append(a)
    at = torch.full_like(cuts[:, :1], len(places) - 1)
    chosen = [at]
    for a in reversed(came_from):
        at = a.gather(1, at)
        chosen.append(at)
    chosen.append(torch.zeros_like(at))
    return cuts.gather(1, torch.cat(chosen[::-1], dim=1))


def nearest_level(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """values [rows, n], levels [rows, k] in order -> the index of the nearest [rows, n] int64."""
    levels = levels.double()
    return torch.searchsorted(((levels[:, 1:] + levels[:, :-1]) / 2).contiguous(), values.double().contiguous())


# -- what is kept ----------------------------------------------------------------------------------------------------


@register
class CodebookWeight(StoredWeight):
    """Codes into a codebook of each row, and what a sparse matrix (CSR) adds.

    codes [out, in·bits/8] uint8, levels [out, 2ᵇ] float16; with a sparse part: values [nnz] float16, columns [nnz]
    int16 (int32 from 32,768 inputs on) and row_starts [out + 1] int32, where a row's values begin.
    """

    kind = "codebook"

    codes: torch.Tensor
    levels: torch.Tensor
    values: torch.Tensor | None
    columns: torch.Tensor
    row_starts: torch.Tensor

    def __init__(
        self,
        bits: int,
        codes: torch.Tensor,
        levels: torch.Tensor,
        sparse: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(codes.shape[0], codes.shape[1] * 8 // bits)
        self.bits = bits
        self.register_buffer("codes", codes)
        self.register_buffer("levels", levels)
        values, columns, row_starts = sparse or (None, None, None)
        self.register_buffer("values", values)
        self.register_buffer("columns", columns)
        self.register_buffer("row_starts", row_starts)

    def dequantize_rows(self, start: int, end: int) -> torch.Tensor:
        codes = unpack(self.codes[start:end], -1, self.bits).long()
        wide = self.levels[start:end].float().gather(1, codes)
        if self.values is not None:
            starts = self.row_starts[start : end + 1].long()
            here = slice(int(starts[0]), int(starts[-1]))
            rows = torch.arange(end - start, device=wide.device).repeat_interleave(starts.diff())
            wide[rows, self.columns[here].long()] += self.values[here].float()
        return wide

    def settings(self) -> dict[str, int | str | bool | None]:
        return {"bits": self.bits, "sparse": self.values is not None}

    @classmethod
    def from_parts(cls, tensors: dict[str, torch.Tensor], settings: dict) -> CodebookWeight:
        check_settings("a codebook weight", settings, ("bits", "sparse"))
        bits: Any = settings.get("bits")
        sparse = settings.get("sparse")
        format = _format(bits)
        if not isinstance(sparse, bool):
            raise WorkbenchError(f"a codebook weight is sparse: true or false, got {sparse!r}")
        named = ("codes", "levels", *(("values", "columns", "row_starts") if sparse else ()))
        codes, levels, *rest = take(tensors, cls.kind, named)
        expect(codes, "codes", (None, None), (torch.uint8,))
        if codes.shape[1] % format.code_bytes(format.multiple):
            raise WorkbenchError(f"codes of {bits} bits do not fill {codes.shape[1]} bytes per row")
        expect(levels, "levels", (codes.shape[0], 2**bits), (torch.float16,))
        check_finite(levels, "levels of a codebook weight")
        if sparse:
            _check_csr(*rest, shape=(codes.shape[0], codes.shape[1] * 8 // bits))
        values: Any = tuple(rest) if sparse else None
        return cls(bits, codes, levels, values)


def _check_csr(
    values: torch.Tensor, columns: torch.Tensor, row_starts: torch.Tensor, *, shape: tuple[int, int]
) -> None:
    expect(values, "values", (None,), (torch.float16,))
    check_finite(values, "values of a codebook weight")
    expect(columns, "columns", (len(values),), (column_dtype(shape[1]),))
    expect(row_starts, "row_starts", (shape[0] + 1,), (torch.int32,))
    if int(row_starts[0]) != 0 or int(row_starts[-1]) != len(values) or bool((row_starts.diff() < 0).any()):
        raise WorkbenchError(f"row_starts must rise from 0 to the {len(values)} values")
    rows = torch.arange(shape[0], device=columns.device).repeat_interleave(row_starts.diff())
    within = bool(((columns >= 0) & (columns < shape[1])).all())
    if not within or bool((columns.long() + rows * shape[1]).diff().le(0).any()):
        raise WorkbenchError(f"columns must rise within each row, from 0 to {shape[1] - 1}")


def _format(bits: object) -> IntegerFormat:
    """Of the codes; its packing is all that is used of it."""
    if not is_whole(bits) or bits not in (2, 3, 4):
        raise WorkbenchError(f"squeezellm has 2, 3 or 4 bits, got {bits!r}")
    return IntegerFormat(bits)


def column_dtype(in_features: int) -> torch.dtype:
    return torch.int16 if in_features <= 2**15 else torch.int32


# -- the method --------------------------------------------------------------------------------------------------------


@method(
    "squeezellm",
    "a codebook a row by k-means, weighted by what an error costs the loss; outliers apart in a sparse matrix",
    numbers=("bits",),
    options=("outliers", "sensitive", "weights"),
)
class SqueezeLLM(Method):
    """bits 2, 3 or 4. outliers, sensitive: shares of a matrix kept in float16; both 0: none are. weights of the
    k-means: "gradients" (Fisher information, the paper's) or "inputs" (second moments of each input, no gradients
    needed)."""

    needs_inputs = True

    def __init__(
        self, bits: int = 4, outliers: float = 0.004, sensitive: float = 0.0005, weights: str = "gradients"
    ) -> None:
        self.bits, self.multiple = bits, _format(bits).multiple
        if weights not in ("gradients", "inputs"):
            raise WorkbenchError(f'weights must be "gradients" or "inputs", got {weights!r}')
        self.outliers = check_between("the share of outliers", outliers, 0, 0.5)
        self.sensitive = check_between("the share of sensitive weights", sensitive, 0, 0.5)
        self.needs_gradients = weights == "gradients"

    def store(self, weight: torch.Tensor, inputs: Inputs | None) -> CodebookWeight:
        assert inputs is not None
        check_finite(weight)
        if weight.shape[1] % self.multiple:
            raise WorkbenchError(
                f"{weight.shape[1]} codes of {self.bits} bits fill no whole bytes; they come in {self.multiple}s"
            )
        if self.needs_gradients:
            assert inputs.squared_gradients is not None
            sensitivity = inputs.squared_gradients
        else:
            sensitivity = inputs.second_moments.diagonal().expand_as(weight)
        check_finite(sensitivity, "the sensitivity of the loss")
        return squeeze(weight, sensitivity, self.bits, self.outliers, self.sensitive)


def squeeze(
    weight: torch.Tensor, sensitivity: torch.Tensor, bits: int, outliers: float = 0.0, sensitive: float = 0.0
) -> CodebookWeight:
    """weight [out, in], F [out, in] not negative -> codes, codebooks, and the sparse part with these shares of it."""
    weight = weight.detach().float()
    apart = kept_apart(weight, sensitivity, outliers, sensitive)
    counted = sensitivity.masked_fill(apart, 0.0)
    counted = torch.where(counted.sum(1, keepdim=True) > 0, counted, (~apart).to(counted.dtype))
    levels = weighted_kmeans(weight, counted, 2**bits).to(torch.float16)
    check_finite(levels, "a level, in float16,")
    codes = nearest_level(weight, levels)
    packed = pack(codes.to(torch.uint8), -1, bits)
    if not apart.any():
        return CodebookWeight(bits, packed, levels)
    columns = apart.nonzero(as_tuple=True)[1]  # row by row, in order
    values = (weight - levels.float().gather(1, codes))[apart].to(torch.float16)
    check_finite(values, "what a level leaves of an outlier, in float16,")
    row_starts = torch.nn.functional.pad(apart.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    return CodebookWeight(bits, packed, levels, (values, columns.to(column_dtype(weight.shape[1])), row_starts))


def kept_apart(weight: torch.Tensor, sensitivity: torch.Tensor, outliers: float, sensitive: float) -> torch.Tensor:
    """The most sensitive, and of the others the largest |w|: so large a share of the matrix each. [out, in] bool."""
    apart = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
    apart[sensitivity.flatten().topk(round(sensitive * weight.numel())).indices] = True
    size = weight.abs().flatten().masked_fill(apart, -1.0)
    apart[size.topk(round(outliers * weight.numel())).indices] = True
    return apart.view_as(weight)
