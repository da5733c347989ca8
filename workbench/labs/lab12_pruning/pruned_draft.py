"""pruning.pruned_draft: drafts of one target: how often they are accepted, what a step of theirs costs, and what follows.

With acceptance rate α, K drafted tokens per round and a draft step of c target steps, a round gives
(1 − α^(K+1)) / (1 − α) tokens and takes 1 + K·c steps of the target (Leviathan et al., arXiv 2211.17192, theorem 3.8).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL
from workbench.experiments.steps import Sequences, decode_step
from workbench.models.checkpoints import shipped_names
from workbench.models.evaluation import acceptance_rate
from workbench.speculation.theory import expected_speedup, tokens_per_round

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

NAME = "pruning.pruned_draft"
FROM_NOTHING, PRUNED = "stdlib-1m", "stdlib-1m-pruned"
STEP_CONTEXT = 256  # cached tokens of a timed step


def drafts_here() -> list[str]:
    """The drafts whose weights are here, the one trained from nothing first."""
    here = shipped_names()
    return [name for name in (FROM_NOTHING, PRUNED) if name in here]
