"""Claims about simulated pools: replicas are independent twins, rows take the time of their bytes, nothing is lost; and
what disaggregation gains against which baseline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.instruments.device import PUBLISHED
from workbench.models.shapes import public_shape
from workbench.serving.gaps import Poisson
from workbench.serving.lengths import Uniform
from workbench.serving.load import SystemPrompts, Workload, workload
from workbench.serving.metrics import Objectives
from workbench.serving.pool_goodput import arrangements, compare_arrangements, highest_rate
from workbench.serving.settings import SchedulerSettings
from workbench.serving.simulate import StepShape, Twin
from workbench.serving.simulate_pools import Pools, RowsLink
from workbench.serving.step_time import step_seconds

SETTINGS = SchedulerSettings(max_running=4, token_budget=64)
POOL = {"num_blocks": 64, "block_size": 4}
TICK = 2.0**-10


def by_rows(shape: StepShape) -> float:
    return (4 + shape.rows) * TICK


# -- one request, by hand --------------------------------------------------------------------------------------------


def test_a_request_takes_its_prefill_its_rows_and_its_decodes():
    """33 tokens: 32 are prefilled (36 ticks) and sent, the last is computed by the decode worker, with two more."""
    link = RowsLink(bytes_per_token=10, bytes_per_s=32 * 10 / (8 * TICK), latency_s=TICK)
    pools = Pools(prefill=1, decode=1, step_s=by_rows, settings=SETTINGS, prefill_settings=SETTINGS, link=link, **POOL)
    [one] = pools.run([Request("a", tuple(range(33)), 3)])
    assert one.first_scheduled_s == (36 + 8 + 1) * TICK
    assert one.token_times_s == tuple((45 + 5 * i) * TICK for i in (1, 2, 3))
    assert pools.sent_bytes == 320


def test_two_prompts_share_the_link_one_after_the_other():
    """Both are prefilled in one step of 68 ticks; the rows of each take 8."""
    link = RowsLink(bytes_per_token=10, bytes_per_s=32 * 10 / (8 * TICK))
    pools = Pools(prefill=1, decode=1, step_s=by_rows, settings=SETTINGS, prefill_settings=SETTINGS, link=link, **POOL)
    ended = pools.run([Request(name, (name, *range(32)), 1) for name in (40, 50)])
    assert [one.first_scheduled_s for one in ended] == [(68 + 8) * TICK, (68 + 16) * TICK]


def test_rows_sent_layer_by_layer_hide_behind_the_prefill_but_for_the_last_layer():
    """T = 8 ticks of rows in L pieces beside 36 ticks of prefill; a link slower than the model hides the prefill."""
    for layers, waits in ((1, 8.0), (4, 2.0), (8, 1.0)):
        link = RowsLink(10, 32 * 10 / (8 * TICK), layers=layers)
        assert link.sent_s(0.0, 36 * TICK, 0.0, 32) == pytest.approx((36 + waits) * TICK)
    slow = RowsLink(10, 32 * 10 / (80 * TICK), layers=4)
    assert slow.sent_s(0.0, 36 * TICK, 0.0, 32) == pytest.approx((36 / 4 + 80) * TICK)
    assert slow.sent_s(0.0, 36 * TICK, 50 * TICK, 32) == pytest.approx((50 + 80) * TICK), "behind what came before"


def test_tokens_in_the_decode_workers_prefix_cache_are_not_sent():
    link = RowsLink(10, 1e9)
    pools = Pools(prefill=1, decode=1, step_s=by_rows, settings=SETTINGS, link=link, **POOL)
    pools.run([Request("a", tuple(range(33)), 3), Request("b", (*range(33), 7, 7, 7), 3, arrival_s=1.0)])
    assert pools.sent_bytes == 10 * (32 + 35 - 32)


# -- replicas ----------------------------------------------------------------------------------------------------------


def drawn(count: int = 24, rate: float = 60.0):
    return Workload(Uniform(1, 40), Uniform(1, 12), Poisson(rate)).draw(count, seed=1)


def test_one_replica_is_the_twin():
    twin = Twin(SETTINGS, step_s=by_rows, **POOL)
    assert Pools(step_s=by_rows, settings=SETTINGS, **POOL).run(drawn()) == twin.run(drawn())


def test_replicas_in_turns_are_twins_that_each_got_every_second_request():
    arrivals = drawn()
    pools = Pools(decode=2, step_s=by_rows, settings=SETTINGS, policy="round_robin", **POOL)
    both = sorted(pools.run(arrivals), key=lambda one: one.request_id)
    each = [Twin(SETTINGS, step_s=by_rows, **POOL).run(arrivals[i::2]) for i in (0, 1)]
    assert both == sorted([*each[0], *each[1]], key=lambda one: one.request_id)


def test_a_router_that_knows_prefixes_computes_fewer_prompt_tokens():
    """Five system prompts, three replicas: counts of prompt tokens that were found in a cache."""
    shared = Workload(Uniform(4, 12), Uniform(2, 4), Poisson(20.0), system=SystemPrompts((40, 44, 48, 52, 56)))
    hits = {}
    for policy in ("round_robin", "least_loaded", "prefix"):
        pools = Pools(decode=3, step_s=by_rows, settings=SETTINGS, policy=policy, num_blocks=256, block_size=4)
        pools.run(shared.draw(120, seed=2))
        hits[policy] = pools.hit_tokens / pools.prompt_tokens
    assert hits["prefix"] > max(hits["round_robin"], hits["least_loaded"]) + 0.02
    assert hits["prefix"] > 0.75


# -- conservation --------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    prefill=st.integers(0, 3),
    decode=st.integers(1, 3),
    num_blocks=st.integers(24, 64),
    preemption=st.sampled_from(["recompute", "swap"]),
    bytes_per_s=st.sampled_from([1e3, 1e5, 1e9]),
    seed=st.integers(0, 99),
)
def test_no_request_is_lost_and_all_blocks_are_back(prefill, decode, num_blocks, preemption, bytes_per_s, seed):
    link = RowsLink(10, bytes_per_s, TICK, layers=3) if prefill else None
    chosen = replace(SETTINGS, preemption=preemption)
    pools = Pools(
        prefill=prefill, decode=decode, step_s=by_rows, settings=chosen, link=link, num_blocks=num_blocks, block_size=4
    )
    arrivals = Workload(Uniform(1, 40), Uniform(1, 40), Poisson(100.0)).draw(24, seed=seed)
    finished = pools.run(arrivals)
    assert {one.request_id: len(one.token_ids) for one in finished} == {a.name: a.new_tokens for a in arrivals}
    for one in finished:
        times = [one.arrival_s, one.first_scheduled_s, *one.token_times_s, one.finished_s]
        assert times == sorted(times)
    for twin in (*pools.prefill, *pools.decode):
        twin.tables.check()
        assert not twin.tables.lengths and twin.tables.num_available == num_blocks
    assert set(pools.router.loads) == set(pools.decode_router.loads) == {0}
    if prefill:
        assert pools.sent_bytes <= 10 * sum(a.prompt_tokens - 1 for a in arrivals)


@pytest.mark.parametrize(
    ("pools", "words"),
    [
        ({"prefill": 1}, "rows go over a link"),
        ({"link": RowsLink(1, 1)}, "rows go over a link"),
        ({"decode": 0}, "decode must be a whole number"),
        ({"policy": "random"}, "unknown routing policy"),
    ],
)
def test_pools_that_make_no_sense_are_refused(pools, words):
    with pytest.raises(WorkbenchError, match=words):
        Pools(step_s=by_rows, **POOL | pools)
    with pytest.raises(WorkbenchError, match="bytes_per_s"):
        RowsLink(1, 0)


# -- goodput -----------------------------------------------------------------------------------------------------------


def test_the_highest_rate_is_found_within_its_share():
    one = Request("a", (1,), 1)
    for limit in (0.3, 7.0, 100.0):

        def serve(rate, limit=limit):
            late = 1.0 if rate > limit else 0.0
            twin = Twin(step_s=lambda shape: 0.5 + late, num_blocks=8)
            return twin.run([one])

        best = highest_rate(serve, Objectives(ttft_s=1.0), within=0.01)
        assert limit / 1.011 <= best.rate_per_s <= limit and best.attainment == 1.0
        halved = highest_rate(serve, Objectives(ttft_s=1.0), low_per_s=16.0, within=0.01)
        assert limit / 1.011 <= halved.rate_per_s <= limit, "from above, too"
        capped = highest_rate(serve, Objectives(ttft_s=1.0), high_per_s=2.5, within=0.01)
        assert capped.rate_per_s <= 4, "the first doubled rate that is not tried is taken to miss"
    assert highest_rate(lambda rate: serve(1e9), Objectives(ttft_s=1.0)).rate_per_s == 0.0


def test_disaggregation_gains_against_prefill_first_and_not_against_chunked_prefill():
    """DistServe's direction: at a tight TPOT at least twice the goodput of its baseline; and what it was not compared
    with. Llama 3.1 8B on the H200 of the data sheet, prompts of code, 3 devices."""
    config = public_shape("llama-3.1-8b")
    step_s = step_seconds(config, PUBLISHED["h200"], "bfloat16", weight_bytes_per_element=2)
    chosen = arrangements(chunks=(256,), ratios=((2, 1),))
    code = workload("code")
    rows = compare_arrangements(
        chosen,
        code,
        Objectives(ttft_s=0.4, tpot_s=0.006),
        devices=3,
        num_requests=90,
        step_s=step_s,
        link=RowsLink(131_072, 50e9, 20e-6, layers=config.num_layers),
        within=0.2,
        num_blocks=50_000,
    )
    per_device = {row.name: row.per_device for row in rows}
    assert per_device["2P1D"] >= 2 * per_device["prefill first"] > 0
    assert per_device["2P1D"] <= 1.5 * per_device["chunked 256"]
    with pytest.raises(WorkbenchError, match="2P1D takes devices in groups of 3, and there are 4"):
        compare_arrangements(
            chosen,
            code,
            Objectives(tpot_s=1),
            devices=4,
            num_requests=1,
            step_s=step_s,
            link=RowsLink(1, 1),
            num_blocks=50_000,
        )
