"""quantize.gptq_steps: GPTQ at work on a few inputs of a real matrix, column by column."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain, shape_of
from workbench.labs.lab05_quantization.inputs import LAYER, LENGTH, SEQUENCES, calibration_for, inputs_of_layer
from workbench.labs.lab05_quantization.weight_row import LINEARS
from workbench.quantization import Inputs, IntegerFormat, fit
from workbench.quantization.gptq import gptq, inverse_factor

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

QuantizeColumns = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
SAME = 1e-6  # of the largest weight; float64 throughout, so that no code hangs on rounding


@dataclass(frozen=True)
class Problem:
    """A few inputs of a linear, those with the largest moments first, and all its outputs."""

    weight: torch.Tensor  # [out, n] float64
    moments: torch.Tensor  # H [n, n] float64
    channels: list[int]  # which inputs these are

    @classmethod
    def of(cls, weight: torch.Tensor, inputs: Inputs, columns: int) -> Problem:
        h = inputs.second_moments.double()
        chosen = h.diagonal().argsort(descending=True, stable=True)[:columns]
        return cls(weight.double()[:, chosen], h[chosen][:, chosen], chosen.tolist())

    def error(self, stands_in: torch.Tensor) -> float:
        """‖X(W − Ŵ)ᵀ‖² / ‖XWᵀ‖² with these inputs alone."""
        return energy(self.weight - stands_in, self.moments) / energy(self.weight, self.moments)


def energy(weight: torch.Tensor, moments: torch.Tensor) -> float:
    return float(((weight @ moments) * weight).sum())


@dataclass(frozen=True)
class State:
    """The matrix after so many columns."""

    done: int
    # [out, n]: columns done are what their codes stand for, the others as they were moved
    weight: torch.Tensor
    without: torch.Tensor  # [out, n]: the same where every column is rounded for itself
    paid: float  # Σ (w_j − q_j)² / [H⁻¹]_jj so far: what theory says the outputs have lost


def states(problem: Problem, format: IntegerFormat, damping: float) -> Iterator[State]:
    """Before the first column, and after each: rounding an error e = (w_j − q_j) / U_jj into column j moves the later
    ones by −e·U_j,j+1… (`workbench.quantization.gptq`), with one scale a row, that of the weights as they were."""
    scale, zero = (part.double() for part in _scale_and_zero(problem, format))
    upper = inverse_factor(problem.moments, damping)
    now, without, paid = problem.weight.clone(), problem.weight.clone(), 0.0

    def nearest(column: torch.Tensor) -> torch.Tensor:
        """[out] -> what its codes stand for."""
        step = scale[:, 0]
        codes = ((column - zero[:, 0]) / step.where(step != 0, 1)).round()
        return codes.clamp(format.lowest, format.highest) * step + zero[:, 0]

    yield State(0, now.clone(), without.clone(), paid)
    for j in range(problem.weight.shape[1]):
        rounded = nearest(now[:, j])
        error = (now[:, j] - rounded) / upper[j, j]
        now[:, j] = rounded
        now[:, j + 1 :] -= error[:, None] * upper[j, j + 1 :]
        without[:, j] = nearest(without[:, j])
        paid += float(error.square().sum())
        yield State(j + 1, now.clone(), without.clone(), paid)


def _scale_and_zero(problem: Problem, format: IntegerFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale and one zero a row, [out, 1] float16."""
    scale, zero = fit(problem.weight.float()[:, None], format, -1)
    assert zero is not None
    return scale[..., 0], zero[..., 0]


def run_gptq_steps(
    bench: Bench,
    *,
    model,
    layer: int,
    linear: str,
    bits: int,
    columns: int,
    rows: int,
    damping: float,
    sequences: int,
    length: int,
    shown_columns: int,
    quantize_columns: QuantizeColumns | None = None,
) -> Iterator[Measurement]:
    """One Measurement before the first column and one after each: samples are the first `rows` rows as they are then
    [rows · columns], counts the error of all outputs so far with the error spread ("error") and without
    ("error_without"). The last is held to `gptq` itself.

    quantize_columns: a learner's own, (weight, factor, scale, zero, highest) -> codes [out, columns]; where it ends
    follows as "yours".
    """
    decoder = bench.model(model)
    calibration = calibration_for(bench, decoder, sequences, length)
    parts, inputs = inputs_of_layer(bench, decoder, calibration, layer)
    problem = _problem(parts, inputs, linear, columns, rows)
    format = IntegerFormat(bits)
    whole = gptq(problem.weight, problem.moments, format, columns, damping=damping).dequantize().double()
    damped = problem.moments + damping * problem.moments.diagonal().mean() * torch.eye(columns).double()
    settings = plain(
        {
            "model": model,
            "layer": layer,
            "linear": linear,
            "bits": bits,
            "columns": columns,
            "rows": rows,
            "damping": damping,
            "sequences": sequences,
            "length": length,
        }
    )
    for state in states(problem, format, damping):
        bench.check_stop()
        bench.report(f"column {state.done} of {columns}")
        check = _check(problem, state, whole, damped)
        yield bench.measurement(
            name="quantize.gptq_steps",
            settings={**settings, "measured": "step", "done": state.done, "channels": problem.channels},
            samples=state.weight[:rows].flatten().tolist(),
            unit="weight",
            counts={
                "error": problem.error(state.weight),
                "error_without": problem.error(state.without),
                "outputs": len(problem.weight),
                "paid": state.paid / energy(problem.weight, damped),
            },
            check=check,
        )
    if quantize_columns is not None:
        yield _yours(bench, problem, format, damping, settings, whole, quantize_columns)


def _yours(
    bench: Bench, problem: Problem, format: IntegerFormat, damping: float, settings: dict, ours: torch.Tensor, make
) -> Measurement:
    """What a learner's codes stand for, beside ours. Raises WorkbenchError for codes that are none."""
    scale, zero = _scale_and_zero(problem, format)
    factor = inverse_factor(problem.moments, damping)
    codes = make(problem.weight.clone(), factor, scale.clone(), zero.clone(), format.highest)
    shape = problem.weight.shape
    if (
        not isinstance(codes, torch.Tensor)
        or codes.shape != shape
        or not 0 <= codes.min() <= codes.max() <= format.highest
    ):
        came = f"{list(codes.shape)}" if isinstance(codes, torch.Tensor) else type(codes).__name__
        raise WorkbenchError(
            f"your quantize_columns must give codes {list(shape)} from 0 to {format.highest}, got {came}"
        )
    found = codes.double() * scale.double() + zero.double()
    differ = int(((found - ours).abs() > SAME * float(problem.weight.abs().max())).sum())
    verdict = (
        "the codes that `gptq` gives"
        if not differ
        else f"{differ:,} of {codes.numel():,} codes are not those of `gptq`"
    )
    return bench.measurement(
        name="quantize.gptq_steps",
        settings={**settings, "measured": "yours", "done": shape[1], "channels": problem.channels},
        samples=found[: settings["rows"]].flatten().tolist(),
        unit="weight",
        counts={"error": problem.error(found), "codes_that_differ": differ},
        check=f"yours: {verdict}",
    )


def _problem(parts, inputs: dict[str, Inputs], linear: str, columns: int, rows: int) -> Problem:
    if linear not in inputs:
        raise WorkbenchError(f"this layer has no {linear}; it has {', '.join(inputs)}")
    weight = parts.linear(linear).weight.detach()
    for what, asked, there in (("columns", columns, weight.shape[1]), ("rows", rows, weight.shape[0])):
        if asked > there:
            raise WorkbenchError(f"{linear} has {there} {what}, not {asked}; choose fewer")
    return Problem.of(weight, inputs[linear], columns)


def _check(problem: Problem, state: State, whole: torch.Tensor, damped: torch.Tensor) -> str:
    """In words. Raises WorkbenchError where the steps are not those of the method."""
    lost = energy(problem.weight - state.weight, damped)
    if abs(lost - state.paid) > SAME * energy(problem.weight, damped):
        raise WorkbenchError(
            f"after {state.done} columns the outputs have lost {lost:.6g} and the steps have paid {state.paid:.6g}: the"
            " steps are wrong, so they were thrown away"
        )
    words = "what the outputs have lost is Σ (w − q)² / [H⁻¹]_jj of the columns done, with H damped"
    if state.done < problem.weight.shape[1]:
        return words
    apart = float((state.weight - whole).abs().max())
    if apart > SAME * float(problem.weight.abs().max()):
        raise WorkbenchError(
            f"the steps end {apart:.3g} from what `gptq` gives for these columns: the steps are wrong, so they were "
            "thrown away"
        )
    return f"{words}; the rows are now those that `gptq` gives"


EXPERIMENT = Experiment(
    name="quantize.gptq_steps",
    lab=5,
    question="Where does the rounding error of a column go?",
    how=(
        "of one linear those inputs that are largest on calibration text, the largest first, in a group of their own."
        " Column by column the weights are rounded and the error is spread over the columns to come (GPTQ); beside it"
        " every column is rounded for itself. Errors are of all outputs of the linear, through these inputs alone; the"
        " rows shown are the first."
    ),
    settings=(
        MODEL,
        LAYER,
        Setting("linear", "mlp.gate", "choice", choices=LINEARS, help="whose weights are rounded"),
        Setting("bits", 2, "choice", choices=(2, 3, 4, 5, 6), help="of the codes; one scale a row"),
        Setting("columns", 24, "choice", choices=(8, 16, 24, 32), help="inputs that are looked at"),
        Setting("rows", 4, "int", 1, 6, help="outputs that are shown"),
        Setting(
            "damping",
            0.01,
            "choice",
            choices=(0.001, 0.01, 0.1, 1.0),
            help="share of the mean second moment that is added to each",
        ),
        SEQUENCES,
        LENGTH,
        Setting("shown_columns", 6, "int", 0, 32, help="the picture shows the rows after so many columns"),
    ),
    run=run_gptq_steps,
    limits=lambda *, model, columns, **_: {"layer": shape_of(model).num_layers - 1, "shown_columns": columns},
    predict=no_times,
    learner=("quantize_columns",),
    record={"cpu": (), "cuda": ()},  # errors are the same everywhere
)
