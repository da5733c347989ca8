"""Serving: many requests at a time. Policy (scheduler), bookkeeping (kv.blocks) and tensors (kv.paged) apart."""

from workbench.decoding.sequence import Finished, Request, Sequence, Status
from workbench.serving.adapted import adapted
from workbench.serving.batching import StaticScheduler, scheduler_for
from workbench.serving.contract import OwnScheduler
from workbench.serving.engine import Engine
from workbench.serving.load import requests_of
from workbench.serving.policies import POLICIES
from workbench.serving.results import StepReport
from workbench.serving.scheduler import Plan, Scheduler, Work, Written
from workbench.serving.settings import SchedulerSettings, TierSettings

__all__ = [
    "POLICIES",
    "Engine",
    "Finished",
    "Plan",
    "Request",
    "Scheduler",
    "StaticScheduler",
    "scheduler_for",
    "OwnScheduler",
    "adapted",
    "SchedulerSettings",
    "Status",
    "StepReport",
    "TierSettings",
    "Sequence",
    "Work",
    "Written",
    "requests_of",
]
