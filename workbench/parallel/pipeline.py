"""Pipeline parallelism: every rank has some layers, a stage, and hidden states go from one stage to the next.

    p = 3 stages, m = 4 groups of sequences    time ─▶  0 1 2 3 4 5
                                           stage 0      A B C D . .
                                           stage 1      . A B C D .
                                           stage 2      . . A B C D        idle: 6 of 18, (p−1)/(m+p−1)

A step's sequences go through in m groups (micro-batches). While the first stage computes group B, the second computes
A. At the start the later stages wait, at the end the earlier ones: the bubble, (p−1)/(m+p−1) of the time. A decode step
of one group leaves p−1 of p stages idle at any time, because its next token depends on this one.

Counted, not clocked: a stage's `Progress` notes the ticks in which it computed, one a group, and what is sent carries
the sender's tick, so that who waited is known whatever the machine was doing (Lamport's clock). Ticks are equal for
all stages; layers that divide unevenly make the slowest stage's longer than the others'.
GPipe, Huang et al., arXiv 1811.06965 §2.3; groups of a step, as vLLM's and SGLang's "virtual engines".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from workbench.errors import WorkbenchError, check_whole
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig


def bubble(stages: int, groups: int) -> float:
    """The share of a step in which a stage is idle, (p−1)/(m+p−1), all stages and groups taking equal time."""
    check_whole("stages", stages, 1)
    check_whole("groups", groups, 1)
    return (stages - 1) / (groups + stages - 1)


@dataclass
class Progress:
    """What a stage did, in ticks: `busy` of `last`."""

    last: int = 0  # the tick in which it last computed
    busy: int = 0  # ticks in which it computed

    def compute(self, clock: int) -> int:
        """It computes a group whose input is there after tick `clock`: in which tick."""
        self.last = max(self.last, clock) + 1
        self.busy += 1
        return self.last


def idle_share(progress: Sequence[Progress]) -> float:
    """The share of all stages' ticks without work, from the first tick to the last of any."""
    ticks = max(one.last for one in progress)
    return 1 - sum(one.busy for one in progress) / (ticks * len(progress)) if ticks else 0.0


# -- stages --------------------------------------------------------------------------------------------------


def stages_of(config: ModelConfig, stages: int, name: str = "the model") -> list[range]:
    """The layers of each stage, as equal as can be, the first stages having one more where they are not.

    Raises WorkbenchError for more stages than layers, for layers that keep a state, and where a layer attends over the
    keys of a layer in another stage.
    """
    check_whole("the number of stages of a pipeline", stages, 1)
    if stages > config.num_layers:
        raise WorkbenchError(
            f"{name} has {config.num_layers} layers, too few for {stages} stages; take at most {config.num_layers}"
        )
    if stages > 1 and config.mixers:
        raise WorkbenchError(
            f"{name} has layers of several kinds (mixers), which are not divided into stages here; take pipeline=1"
        )
    each, more = divmod(config.num_layers, stages)
    ends = [0]
    for stage in range(stages):
        ends.append(ends[-1] + each + (stage < more))
    divided = [range(start, end) for start, end in pairwise(ends)]
    for layers in divided:
        for layer in layers:
            if config.kv_source(layer) not in layers:
                raise WorkbenchError(
                    f"{name}: layer {layer} attends over the keys of layer {config.kv_source(layer)}, which would "
                    f"be in another of {stages} stages; take fewer stages"
                )
    return divided


def stage_config(config: ModelConfig, layers: range) -> ModelConfig:
    """The shape of these layers alone, counted from 0."""
    if len(layers) == config.num_layers:
        return config
    sources = None
    if config.kv_sources is not None:
        sources = tuple(config.kv_sources[layer] - layers.start for layer in layers)
    windows = tuple(layer - layers.start for layer in config.global_layers if layer in layers)
    return dataclasses.replace(config, num_layers=len(layers), kv_sources=sources, global_layers=windows)


# -- groups --------------------------------------------------------------------------------------------------


def groups_of(batch: Batch, groups: int) -> list[Batch]:
    """The batch in at most so many batches of whole sequences, of about equal numbers of tokens, in order."""
    count = min(groups, len(batch.sequences))
    if count <= 1:
        return [batch]
    ends, starts = [0], batch.query_starts
    for group in range(1, count):
        wanted = batch.num_tokens * group / count
        latest = len(batch.sequences) - (count - group)
        nearest = min(range(ends[-1] + 1, latest + 1), key=lambda end: (abs(starts[end] - wanted), end))
        ends.append(nearest)
    ends.append(len(batch.sequences))
    return [_some(batch, first, last) for first, last in pairwise(ends)]


def _some(batch: Batch, first: int, last: int) -> Batch:
    """The sequences from `first` to before `last`."""
    start, end = batch.query_starts[first], batch.query_starts[last]
    rows = batch.logit_rows
    if rows is not None:
        rows = rows[(rows >= start) & (rows < end)] - start
    parents = None if batch.parents is None else batch.parents[first:last]
    return Batch(
        batch.token_ids[start:end],
        batch.positions[start:end],
        batch.sequences[first:last],
        tuple(at - start for at in batch.query_starts[first : last + 1]),
        batch.first_positions[first:last],
        rows,
        None if parents is None or all(tree is None for tree in parents) else parents,
    )


def rows_of_groups(batch: Batch, groups: Sequence[Batch]) -> list[list[int]]:
    """For each group which of the batch's M rows of logits it gives, in its order. Rows may stand in any order: those
    of prompts come after those of all sequences (`decoding.log_probs`)."""
    rows = list(range(batch.num_tokens)) if batch.logit_rows is None else batch.logit_rows.tolist()
    divided, start = [], 0
    for group in groups:
        end = start + group.num_tokens
        divided.append([place for place, row in enumerate(rows) if start <= row < end])
        start = end
    return divided


def rows_wanted(batch: Batch) -> int:
    """M: rows of logits that a batch asks for."""
    return batch.num_tokens if batch.logit_rows is None else len(batch.logit_rows)


def chosen_rows(hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[M, d] of [N, d]: those rows."""
    return hidden if batch.logit_rows is None else hidden[batch.logit_rows]
