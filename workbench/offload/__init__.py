"""A model larger than its device: where weights, cache and hidden states lie, planned as a linear program, and run."""

from workbench.offload.cost_model import T4, Decoding, OffloadMachine, Prediction, Shape, Shares, predict
from workbench.offload.executor import Generated, Offloaded, plan_within
from workbench.offload.machine import Meter
from workbench.offload.program import Plan, best_plan, solve

__all__ = [
    "T4",
    "Decoding",
    "Generated",
    "Meter",
    "OffloadMachine",
    "Offloaded",
    "Plan",
    "Prediction",
    "Shape",
    "Shares",
    "best_plan",
    "plan_within",
    "predict",
    "solve",
]
