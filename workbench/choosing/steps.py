"""How long a step takes of an engine that lies on several devices: the cost model's time of each device's part, and
what the devices exchange.

    tensor      a device computes the layers with its heads and neurons; two all-reduces a layer (`parallel.costs`)
    pipeline    the step's texts go through the stages in as many groups as there are stages; a stage begins a group
                when it has ended the one before and when the stage before it has sent this one
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from workbench.choosing.machines import Machine
from workbench.choosing.plans import WIDE, kv_bytes_per_element, weight_bytes_per_element
from workbench.instruments.cost_prediction import predict
from workbench.instruments.costs import prepared_on, step_costs
from workbench.models.config import ModelConfig
from workbench.parallel.costs import step_counts
from workbench.parallel.shard import Layout
from workbench.serving.step_time import StepSeconds, StepShape, step_seconds

EXCHANGE = "exchange"


class EngineStep:
    """StepShape -> seconds, of a model's shape on tensor · pipeline devices of a machine.

    Not counted: the message with the batch from the first device to the others, and Python, as all steps are replayed.
    """

    def __init__(self, layout: Layout, weights: str, kv: str, machine: Machine) -> None:
        self.layout, self.machine = layout, machine
        self._formats: dict[str, Any] = {
            "weight_bytes_per_element": WIDE,
            "linear_bytes_per_element": weight_bytes_per_element(weights),
            "kv_bytes_per_element": kv_bytes_per_element(kv, layout.config),
        }
        alike: dict[ModelConfig, StepSeconds] = {}
        self._stages: list[StepSeconds] = []
        for stage in range(layout.pipeline):
            config = self._stage_config(stage)
            if config not in alike:
                alike[config] = step_seconds(config, machine.ceilings, "bfloat16", **self._formats)
            self._stages.append(alike[config])
        self._exchanged: dict[tuple[int, int, int], tuple[float, float]] = {}

    def _stage_config(self, stage: int) -> ModelConfig:
        """What a device of this stage computes: of the head its own rows."""
        rows = self.layout.part(self.layout.members(stage)[0]).vocabulary_rows
        return dataclasses.replace(self.layout.config_of(stage), vocab_size=rows)

    def __call__(self, shape: StepShape) -> float:
        if self.layout.ranks == 1:
            return self._stages[0](shape)
        groups = groups_of(shape, self.layout.pipeline)
        ends = [0.0] * len(groups)  # of each group in the stage before
        for stage in range(self.layout.pipeline):
            free = 0.0
            for at, group in enumerate(groups):
                computed, sent = self._group_seconds(stage, group)
                free = max(free, ends[at]) + computed
                ends[at] = free + sent
        return ends[-1]

    def _group_seconds(self, stage: int, group: StepShape) -> tuple[float, float]:
        """(computing with the stage's collectives, sending what comes out)"""
        last = stage == self.layout.pipeline - 1
        own = group if last else dataclasses.replace(group, logit_rows=0)
        collectives, sent = self._exchange(stage, group.rows, group.logit_rows)
        return self._stages[stage](own) + collectives, sent

    def _exchange(self, stage: int, rows: int, logit_rows: int) -> tuple[float, float]:
        key = (stage, rows, logit_rows)
        if key not in self._exchanged:
            rank = self.layout.members(stage)[0]
            counts = step_counts(self.layout, rank, [(rows, logit_rows)], element_bytes=WIDE, wanted="best")
            sends = {"send": counts.pop("send")}
            link = self.machine.link
            self._exchanged[key] = link.seconds(counts, self.layout.tensor), link.seconds(sends, 2)
        return self._exchanged[key]

    def spent(self, shape: StepShape) -> dict[str, float]:
        """Seconds of all stages together by what binds: "launch", "bandwidth", "compute", and "exchange"."""
        total = {"launch": 0.0, "bandwidth": 0.0, "compute": 0.0, EXCHANGE: 0.0}
        for stage in range(self.layout.pipeline):
            config, last = self._stage_config(stage), stage == self.layout.pipeline - 1
            costs = step_costs(
                config,
                new_tokens=shape.new_tokens,
                contexts=shape.contexts,
                logit_rows=shape.logit_rows if last else 0,
                kv="paged",
                arrangement=prepared_on(self.machine.ceilings, config),
                **self._formats,
            )
            for limit, seconds in predict(costs, self.machine.ceilings, "bfloat16").spent.items():
                total[limit] += seconds
            total[EXCHANGE] += sum(self._exchange(stage, shape.rows, shape.logit_rows))
        return total


def groups_of(shape: StepShape, groups: int) -> list[StepShape]:
    """The step in at most so many steps of whole texts, in order, of about equal rows (as `parallel.pipeline`).

    Which texts want logits is not in a shape: those of one row are taken to, and then the first of the others.
    """
    count = min(groups, shape.texts)
    if count <= 1:
        return [shape]
    texts, at, start = shape.texts, 0, 0
    made: list[StepShape] = []
    wanting = _wanting(shape)
    for group in range(1, count + 1):
        wanted, latest = shape.rows * group / count, texts - (count - group)
        end, rows = at + 1, start + shape.new_tokens[at]
        while end < latest and (group == count or abs(rows + shape.new_tokens[end] - wanted) < abs(rows - wanted)):
            rows += shape.new_tokens[end]
            end += 1
        made.append(StepShape(shape.new_tokens[at:end], shape.contexts[at:end], sum(wanting[at:end])))
        at, start = end, rows
    return made


def _wanting(shape: StepShape) -> Sequence[bool]:
    order = sorted(range(shape.texts), key=lambda text: (shape.new_tokens[text] > 1, text))
    chosen = set(order[: shape.logit_rows])
    return [text in chosen for text in range(shape.texts)]


def decode_step(texts: int, context: float) -> StepShape:
    """One new token for each of so many texts of this mean context."""
    return StepShape((1,) * texts, (round(context),) * texts, texts)


def mixed_step(texts: int, context: float, rows: int) -> StepShape:
    """The same beside a chunk of so many rows, which ends its prompt."""
    return StepShape((1,) * texts + (rows,), (round(context),) * texts + (0,), texts + 1)
