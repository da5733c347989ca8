"""Claims about the baseline that computes prompts first: what its steps hold, and that its tokens are the same."""

from __future__ import annotations

import pytest
import torch
from conftest import random_decoder, tiny_config

from workbench.decoding.sampling import SamplingSettings
from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.serving.engine import Engine
from workbench.serving.settings import SchedulerSettings

FIRST = SchedulerSettings(max_running=4, token_budget=32, batching="prefill_first")


@pytest.fixture(scope="module")
def model():
    return random_decoder(tiny_config(vocab_size=64)).double()


def requests() -> list[Request]:
    drawn = torch.Generator().manual_seed(0)
    lengths = (20, 9, 70, 1, 12, 30, 5)
    prompts = [tuple(torch.randint(0, 64, (n,), generator=drawn).tolist()) for n in lengths]
    sampled = {"n": 2, "sampling": SamplingSettings(temperature=1.0), "seed": 1}
    return [Request(i, p, 5 + i, stop_token_ids=(), **(sampled if i == 4 else {})) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 24}, {"asynchronous": True}], ids=str)
def test_a_step_holds_whole_prompts_or_next_tokens_and_the_tokens_are_the_same(model, settings):
    steps = []

    def watch(report):
        new = {work.sequence.id: work.count for work in report.plan.work}
        steps.append((report, new))

    pool = {"block_size": 4, "num_blocks": 128, "prefix": None} | settings
    got = Engine(model, FIRST, **pool).run(requests(), watch=watch)
    want = Engine(model, SchedulerSettings(max_running=4), block_size=4).run(requests())
    assert {(o.request_id, o.sample): o.token_ids for o in got} == {(o.request_id, o.sample): o.token_ids for o in want}
    prefills = [set(new) for report, new in steps if report.plan.admitted]
    assert next(names for names in prefills if (0, 0) in names) == {(0, 0), (1, 0)}, "29 of 32 rows; 70 do not fit"
    assert {(2, 0)} in prefills, "longer than the budget: a step of its own"
    for report, new in steps:
        admitted = {sequence.id for sequence in report.plan.admitted}
        assert set(new) <= admitted or not admitted, "prompts alone, or next tokens alone"
        assert all(count == 1 for name, count in new.items() if name not in admitted) or not admitted


@pytest.mark.parametrize("setting", [{"chunk": 8}, {"preemption": "swap"}, {"draft_tokens": 2}])
def test_what_belongs_to_other_batching_is_refused(setting):
    with pytest.raises(WorkbenchError, match="goes with batching='continuous'"):
        SchedulerSettings(batching="prefill_first", **setting)
