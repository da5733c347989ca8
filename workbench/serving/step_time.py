"""How long a step takes, from its shape: the cost model of `instruments.costs`, and what the engine adds on this
machine.

    shape of a step     new tokens and context of each text, rows of logits
    counted             Σ over operations, max(bytes / bandwidth, FLOPs / FLOP rate), launches: exactly
                        `predict(step_costs(…))`
    calibrated          factor · counted + a + b · rows + c · texts + d · tokens of context: the engine's own Python,
                        blocks gathered by table, a machine that is not at its ceilings; fitted to measured steps

All operations but attention depend on the numbers of rows alone. Attention depends on the contexts through two sums,
the (query, key) pairs and the keys that are read, and its FLOPs and bytes are linear in them: so what was counted once
serves every step with as many rows and texts, without an approximation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Any

import numpy as np

from workbench.errors import WorkbenchError, check_above, check_between, check_whole
from workbench.instruments.cost_attention import causal_pairs, keys_seen
from workbench.instruments.cost_memory import Memory
from workbench.instruments.cost_operations import Company, OperationCosts, StepCosts
from workbench.instruments.cost_prediction import predict
from workbench.instruments.costs import kv_bytes, prepared_on, step_costs
from workbench.instruments.device import Ceilings
from workbench.models.config import ModelConfig
from workbench.serving.results import StepReport
from workbench.serving.scheduler import Plan


@dataclass(frozen=True)
class StepShape:
    """What the time of a step depends on. new_tokens, contexts: [B], padding included; contexts: before the step.

    moved_tokens: whose keys and values go to the host or come back.
    """

    new_tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    logit_rows: int
    moved_tokens: int = 0

    @classmethod
    def of(cls, plan: Plan, lengths: Mapping[Hashable, int], logit_rows: int) -> StepShape:
        """Of a plan that was not run yet. lengths: of the sequences in the kv."""
        new, contexts = [work.count for work in plan.work], [work.start for work in plan.work]
        for name, rows in plan.padding:
            new.append(rows)
            contexts.append(lengths.get(name, 0))
        moved = sum(sequence.computed for sequence in (*plan.swapped_out, *plan.swapped_in))
        return cls(tuple(new), tuple(contexts), logit_rows, moved)

    @classmethod
    def of_report(cls, report: StepReport) -> StepShape:
        """Of a step that was run. Raises WorkbenchError for padding and swaps, whose lengths a report does not keep."""
        plan = report.plan
        if plan.padding or plan.swapped_out or plan.swapped_in or report.drafted:
            raise WorkbenchError(
                f"step {report.step} has padding, texts on the host or drafted tokens, and its shape is not known"
                " from the report; calibrate with continuous batching, enough blocks and without a draft"
            )
        return cls(tuple(work.count for work in plan.work), tuple(work.start for work in plan.work), len(report.tokens))

    @property
    def rows(self) -> int:
        """N"""
        return sum(self.new_tokens)

    @property
    def texts(self) -> int:
        """B"""
        return len(self.new_tokens)

    @property
    def context_tokens(self) -> int:
        """ΣS: keys and values that lie in the kv after the step, of all its texts."""
        return sum(self.contexts) + sum(self.new_tokens)


@dataclass(frozen=True)
class Calibration:
    """seconds = factor · counted + what the cost model does not count: once a step, for each row, for each text, and
    for each token that the texts have in the kv. The default takes the cost model at its word."""

    factor: float = 1.0
    step_s: float = 0.0
    row_s: float = 0.0
    text_s: float = 0.0
    context_s: float = 0.0

    def __post_init__(self) -> None:
        for one in fields(self):
            check_between(one.name, getattr(self, one.name), 0, float("inf"))

    def __call__(self, counted_s: float, shape: StepShape) -> float:
        return (
            self.factor * counted_s
            + self.step_s
            + self.row_s * shape.rows
            + self.text_s * shape.texts
            + self.context_s * shape.context_tokens
        )

    @classmethod
    def fit(cls, steps: Sequence[tuple[StepShape, float]], counted_s: Callable[[StepShape], float]) -> Calibration:
        """The five numbers, none below 0, with the least Σ (measured − calibrated)².

        steps: (shape, measured seconds). The best with none below 0 is the best of some subset, the others 0: all
        subsets are tried. Where `step_s` is above 0 the sum over all steps is as measured.
        """
        if len(steps) < 8:
            raise WorkbenchError(
                f"five numbers are fitted to measured steps, and {len(steps)} are too few; run at least 8"
            )
        terms = np.array([(counted_s(s), 1, s.rows, s.texts, s.context_tokens) for s, _ in steps])
        measured = np.array([seconds for _, seconds in steps])
        best, least = np.zeros(5), float("inf")
        for chosen in (list(c) for size in range(1, 6) for c in combinations(range(5), size)):
            scale = np.maximum(terms[:, chosen].max(axis=0), np.finfo(float).tiny)  # a term may be 0 in all steps
            found = np.linalg.lstsq(terms[:, chosen] / scale, measured, rcond=None)[0] / scale
            error = float(((measured - terms[:, chosen] @ found) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(5), error
                best[chosen] = found
        return cls(*map(float, best))


class StepSeconds:
    """StepShape -> seconds, of a model's shape on a machine. Made by `step_seconds`; `counted_s` is before the
    calibration."""

    def __init__(
        self,
        config: ModelConfig,
        ceilings: Ceilings,
        dtype: str,
        calibration: Calibration,
        host_bytes_per_s: float | None,
        counted: dict[str, Any],
    ) -> None:
        self.config, self.ceilings, self.dtype, self.calibration = config, ceilings, dtype, calibration
        self.host_bytes_per_s, self._counted = host_bytes_per_s, counted
        wide = counted.get("activation_bytes_per_element") or max(2.0, counted["weight_bytes_per_element"])
        self._stored = counted.get("kv_bytes_per_element") or wide
        memory = Memory.of(config, "contiguous", self._stored)
        self._looks = Counter(memory.look(config, layer) for layer in range(config.num_layers))
        self._a_pair = 2 * config.num_heads * (config.head_dim + config.value_head_dim)
        self._a_key = config.num_kv_heads * (config.head_dim + config.value_head_dim) * self._stored
        self._rest: dict[tuple[int, int], tuple[float, Company]] = {}  # by (rows, logit rows)
        self._attention: dict[tuple[int, int], OperationCosts] = {}  # by (rows, texts), of no pair and no key

    def __call__(self, shape: StepShape) -> float:
        return self.calibration(self.counted_s(shape), shape) + self._moved_s(shape.moved_tokens)

    def counted_s(self, shape: StepShape) -> float:
        """`predict(step_costs(…)).seconds` of this step."""
        rows = shape.rows
        key = (rows, shape.logit_rows)
        if key not in self._rest:
            whole = self._step([rows], shape.logit_rows)
            operations = predict(whole, self.ceilings, self.dtype).operations
            seconds = sum(seconds for name, seconds, _ in operations if name != "attention")
            self._rest[key] = seconds, whole.company
        rest, company = self._rest[key]
        key = (rows, shape.texts)
        if key not in self._attention:
            sizes = [rows - shape.texts + 1, *[1] * (shape.texts - 1)]
            one = self._step(sizes, 0).operation("attention")
            self._attention[key] = self._with(one, sizes, [0] * shape.texts, -1)
        attention = self._with(self._attention[key], shape.new_tokens, shape.contexts, 1)
        predicted = predict(StepCosts((attention,), 0, rows), self.ceilings, self.dtype, company=company)
        return rest + predicted.seconds

    def _step(self, sizes: list[int], logit_rows: int) -> StepCosts:
        return step_costs(
            self.config, new_tokens=sizes, contexts=[0] * len(sizes), logit_rows=logit_rows, kv="paged", **self._counted
        )

    def _with(
        self, attention: OperationCosts, new_tokens: Sequence[int], contexts: Sequence[int], sign: int
    ) -> OperationCosts:
        """Attention with what the contexts add to it (sign 1), or without it (−1)."""
        pairs = keys = 0
        for (window, sinks), layers in self._looks.items():
            if window is None:
                keys += layers * (sum(contexts) + sum(new_tokens))
                pairs += layers * sum(n * past + n * (n + 1) // 2 for n, past in zip(new_tokens, contexts))
            else:
                read = None if sinks else window
                keys += layers * sum(keys_seen(n, past, read) for n, past in zip(new_tokens, contexts))
                pairs += layers * sum(causal_pairs(n, p, window, sinks) for n, p in zip(new_tokens, contexts))
        return replace(
            attention,
            flops=attention.flops + sign * self._a_pair * pairs,
            kv_bytes=attention.kv_bytes + sign * self._a_key * keys,
        )

    def _moved_s(self, tokens: int) -> float:
        if not tokens:
            return 0.0
        if self.host_bytes_per_s is None:
            raise WorkbenchError(
                "texts are swapped to the host, and how fast is not known; give step_seconds host_bytes_per_s, or use "
                "preemption='recompute'"
            )
        return kv_bytes(self.config, tokens, self._stored) / self.host_bytes_per_s


def step_seconds(
    config: ModelConfig,
    ceilings: Ceilings,
    dtype: str,
    *,
    weight_bytes_per_element: float,
    linear_bytes_per_element: float | None = None,
    kv_bytes_per_element: float | None = None,
    arrangement: str | None = None,
    calibration: Calibration | None = None,
    host_bytes_per_s: float | None = None,
) -> StepSeconds:
    """The step time of a model of this shape on this machine, for `simulate.Twin`.

    dtype and …_bytes_per_element, arrangement: as for `predict` and `step_costs`; default as a prepared model is
    arranged on this machine. Keys and values are counted as kv "paged" does; that they lie in blocks costs nothing
    where they are read through the table (by kernels, on a CPU by the loop over blocks), and is in the calibration
    where they are gathered first. calibration: default none. host_bytes_per_s: between device and host, for swapped
    texts. Raises WorkbenchError for experts and latent attention, which are not linear in this way.
    """
    if config.latent_attention is not None:
        raise WorkbenchError(
            "the step time of latent attention changes its form with the length of a chunk and is not counted here; "
            "simulate a shape with keys and values"
        )
    if config.experts is not None:
        raise WorkbenchError(
            "the step time of experts bends with the rows of a step, as they choose other experts, and is not counted"
            " here; simulate a dense shape"
        )
    if host_bytes_per_s is not None:
        check_above("host_bytes_per_s", host_bytes_per_s, 0)
    counted = {
        "weight_bytes_per_element": weight_bytes_per_element,
        "linear_bytes_per_element": linear_bytes_per_element,
        "kv_bytes_per_element": kv_bytes_per_element,
        "arrangement": prepared_on(ceilings, config) if arrangement is None else arrangement,
    }
    made = StepSeconds(config, ceilings, dtype, calibration or Calibration(), host_bytes_per_s, counted)
    made.counted_s(StepShape((1,), (0,), 1))  # what does not fit together is refused here
    return made


def free_beside_weights(
    config: ModelConfig, memory_bytes: float, *, weight_bytes_per_element: float = 2, share: float = 0.9
) -> float:
    """Bytes that the weights leave of this share of a device's memory; below 0 where they do not fit."""
    return share * memory_bytes - config.num_parameters() * weight_bytes_per_element


def blocks_that_fit(
    config: ModelConfig,
    *,
    memory_bytes: float,
    block_size: int = 16,
    weight_bytes_per_element: float = 2,
    kv_bytes_per_element: float = 2,
    share: float = 0.9,
) -> int:
    """Blocks beside the weights in this share of a device's memory. Raises WorkbenchError where not one fits."""
    check_between("share", share, 0, 1)
    weights: dict[str, float] = {"weight_bytes_per_element": weight_bytes_per_element, "share": share}
    free = free_beside_weights(config, memory_bytes, **weights)
    blocks = int(free // kv_bytes(config, check_whole("block_size", block_size, 1), kv_bytes_per_element))
    if blocks < 1:
        raise WorkbenchError(
            f"{share * memory_bytes / 1e9:,.1f} GB leave {free / 1e9:,.1f} GB beside the weights, not a block of "
            f"{block_size} tokens; use more memory or fewer bits"
        )
    return blocks
