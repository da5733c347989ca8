"""Choosing a configuration for a machine that need not be here: a shape, a card's data sheet, a workload, an objective.

In reading order: `machines`, what a card can do; `plans`, what is chosen among; `limits`, what fits; `steps`, how long
a step takes on several devices; `estimate`, the steady rate by formula; `predict`, what the twin says; `choose`, the
search; `report`, the answer in words.
"""

from __future__ import annotations

from workbench.choosing import report
from workbench.choosing.choose import Choice, Effort, choose
from workbench.choosing.machines import Machine, machine
from workbench.choosing.plans import Plan, Space
from workbench.choosing.predict import LIMITED, OBJECTIVES, Asked, Predicted
from workbench.serving.metrics import Objectives

__all__ = [
    "LIMITED",
    "OBJECTIVES",
    "Asked",
    "Choice",
    "Effort",
    "Machine",
    "Objectives",
    "Plan",
    "Predicted",
    "Space",
    "choose",
    "machine",
    "report",
]
