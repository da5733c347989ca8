"""Serving: many requests at a time. Policy (scheduler), bookkeeping (kv.blocks) and tensors (kv.paged) apart."""

from workbench.serving.engine import Engine, Finished, StepReport, requests_of
from workbench.serving.policies import POLICIES
from workbench.serving.request import Request, Status, Track
from workbench.serving.scheduler import Memory, Plan, Scheduler, SchedulerSettings, Work, Written

__all__ = [
    "POLICIES",
    "Engine",
    "Finished",
    "Memory",
    "Plan",
    "Request",
    "Scheduler",
    "SchedulerSettings",
    "Status",
    "StepReport",
    "Track",
    "Work",
    "Written",
    "requests_of",
]
