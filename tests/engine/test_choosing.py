"""Claims about a configuration for a machine that is not here: what fits, how long a step takes, what the twin says of
a plan, and that the search finds the best."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest

from workbench.choosing import Asked, Effort, Objectives, Plan, Space, choose, machine, report
from workbench.choosing.choose import _Search
from workbench.choosing.estimate import Demand, at, steady
from workbench.choosing.limits import BLOCK, fit, stage_bytes
from workbench.choosing.machines import CALL_S, Link, link_of
from workbench.choosing.plans import CHUNKED, PREFILL_FIRST, kv_bytes_per_element, weight_bytes_per_element
from workbench.choosing.predict import Group, predict
from workbench.choosing.steps import EngineStep, decode_step, groups_of
from workbench.errors import WorkbenchError
from workbench.instruments.costs import predict as predict_step
from workbench.instruments.costs import step_costs
from workbench.models.checkpoints import zoo_config
from workbench.models.shapes import public_shape
from workbench.parallel.collectives import Count
from workbench.parallel.pipeline import bubble
from workbench.parallel.shard import Layout
from workbench.serving.lengths import Uniform
from workbench.serving.load import Workload, workload
from workbench.serving.step_time import StepShape

LLAMA = public_shape("llama-3.1-8b")
H200 = machine("h200", 4)
LIMITS = Objectives(ttft_s=0.3, tpot_s=0.02)
SHORT = Workload(Uniform(64, 512), Uniform(8, 64))
ALONE = Asked(SHORT, "latency")
SMALL = Effort(requests=48, job=64, within=0.1)


def engine(plan: Plan, on=H200, config=LLAMA) -> EngineStep:
    return EngineStep(Layout.checked(config, plan.tensor, plan.pipeline, "a model"), plan.weights, plan.kv, on)


def group_of(plan: Plan, on=H200, config=LLAMA, longest: int = 1024) -> Group:
    step_s = engine(plan, on, config)
    return Group(plan, step_s, fit(step_s.layout, plan.weights, plan.kv, on, longest=longest), remember=False)


# -- what fits ---------------------------------------------------------------------------------------------------------


def test_weights_and_blocks_of_one_device_are_those_of_the_shape():
    layout = Layout.checked(LLAMA, 1, 1, "llama")
    assert stage_bytes(layout, 0, "bf16") == 2 * LLAMA.num_parameters() == 16_060_522_496
    fits = fit(layout, "bf16", "bf16", H200, longest=8192)
    assert fits.kv_bytes_per_token == 131_072  # 2 · 32 layers · 8 heads · 128 · 2 bytes
    assert fits.blocks == int((0.9 * 141e9 - 16_060_522_496) // (16 * 131_072))


def test_weights_of_several_devices_are_all_of_them_once_but_for_what_each_holds_whole():
    """By hand: embedding and head are 128,256 · 4,096 each, a layer 218,112,000, its two norms 8,192 of them."""
    table, layer, norms = 128_256 * 4096, 218_112_000, 8192
    tensor = Layout.checked(LLAMA, 2, 1, "llama")
    assert stage_bytes(tensor, 0, "bf16") == 2 * (32 * ((layer - norms) / 2 + norms) + table + table / 2 + 4096)
    stages = [stage_bytes(Layout.checked(LLAMA, 1, 2, "llama"), stage, "bf16") for stage in (0, 1)]
    assert stages == [2 * (16 * layer + table), 2 * (16 * layer + table + 4096)]
    int4 = stage_bytes(Layout.checked(LLAMA, 1, 1, "llama"), 0, "int4")
    assert int4 == 32 * layer * (0.5 + 4 / 128) + 2 * (2 * table + 4096)
    tied = public_shape("llama-3.2-1b")
    assert stage_bytes(Layout.checked(tied, 1, 1, "llama"), 0, "bf16") == 2 * tied.num_parameters()


def test_what_does_not_fit_is_refused_with_the_numbers():
    """70.6 G parameters in 16 bits are 141.1 GB; 0.9 of an H200's 141 GB are 126.9."""
    big = Layout.checked(public_shape("llama-3.1-70b"), 1, 1, "llama")
    with pytest.raises(WorkbenchError, match=r"weights take 141\.1 GB per device, more than the 126\.9 GB of h200"):
        fit(big, "bf16", "bf16", H200, longest=1)
    a100 = machine("a100", 1)
    free = 72e9 - stage_bytes(big, 0, "int4")
    tokens = int(free // (16 * 327_680)) * 16
    with pytest.raises(WorkbenchError, match=f"{tokens:,} tokens of 320.0 KiB, and the longest request has 200,000"):
        fit(big, "int4", "bf16", a100, longest=200_000)
    assert fit(big, "int4", "bf16", a100, longest=tokens - BLOCK).tokens == tokens


def test_bytes_of_an_element_in_few_bits_have_their_scales_and_zeros():
    assert [weight_bytes_per_element(w) for w in ("bf16", "int8", "int4")] == [2, 1 + 4 / 128, 0.5 + 4 / 128]
    assert kv_bytes_per_element("int8", LLAMA) == pytest.approx(1 + 4 / 128)  # of each token and head of 128


# -- how long a step takes ---------------------------------------------------------------------------------------------


def test_a_step_of_one_device_is_that_of_the_cost_model():
    shape = StepShape((1, 1, 100), (500, 70, 0), 3)
    for weights, linear in (("bf16", 2), ("int4", 0.5 + 4 / 128)):
        costs = step_costs(
            LLAMA,
            new_tokens=shape.new_tokens,
            contexts=shape.contexts,
            logit_rows=3,
            weight_bytes_per_element=2,
            linear_bytes_per_element=linear,
            kv="paged",
            arrangement="kernels",
        )
        step_s = engine(Plan(weights))
        assert step_s(shape) == pytest.approx(predict_step(costs, H200.ceilings, "bfloat16").seconds)
        assert sum(step_s.spent(shape).values()) == pytest.approx(step_s(shape))


def test_tensor_parallel_adds_two_all_reduces_a_layer_by_the_alpha_beta_model():
    """65 calls: 2 · 32 all-reduces of rows · 8 KiB, and the gather of 16 bytes for each row of logits."""
    shape = decode_step(8, 500)
    part = engine(Plan(tensor=4))
    alone = part._stages[0](shape)
    bytes_per_s, hop = 450e9, 0.6e-6
    all_reduce = CALL_S + 6 * hop + 2 * 3 / 4 * 8 * 8192 / bytes_per_s
    gather = CALL_S + 3 * (hop + 16 * 8 / bytes_per_s)
    assert part(shape) - alone == pytest.approx(64 * all_reduce + gather, rel=1e-6)
    assert part(shape) < engine(Plan())(shape)
    pcie = engine(Plan(tensor=4), machine("h200", 4, "pcie"))
    assert pcie(shape) > part(shape)


def test_a_pipeline_with_equal_stages_and_groups_has_its_bubble():
    """4 stages, 4 groups, all alike but for the head in the last one: m + p − 1 times one stage's group."""
    step_s = engine(Plan(pipeline=4))
    shape = decode_step(8, 500)
    group = StepShape((1, 1), (500, 500), 2)
    each = [step_s._group_seconds(stage, group) for stage in range(4)]
    last = each[3][0]
    assert step_s(shape) == pytest.approx(sum(sum(one) for one in each[:3]) + 4 * last + each[3][1])
    slots = step_s(shape) / each[0][0]
    assert slots == pytest.approx(4 / (1 - bubble(4, 4)), rel=0.3)  # 7 slots; the last stage has the head beside


def test_a_step_is_divided_into_groups_of_whole_texts_in_order():
    shape = StepShape((1, 1, 1, 1, 60), (5, 6, 7, 8, 0), 4)
    groups = groups_of(shape, 2)
    assert [one.new_tokens for one in groups] == [(1, 1, 1, 1), (60,)]
    assert [one.logit_rows for one in groups] == [4, 0]
    for count in (1, 2, 3, 4, 5, 9):
        divided = groups_of(shape, count)
        assert len(divided) == min(count, 5) and sum(one.logit_rows for one in divided) == 4
        assert sum((one.new_tokens for one in divided), ()) == shape.new_tokens
        assert sum((one.contexts for one in divided), ()) == shape.contexts


# -- what the twin says ------------------------------------------------------------------------------------------------


def test_one_request_at_a_time_takes_its_chunks_and_its_steps():
    """A closed form: prompts of 300 in chunks of 128, and 4 more tokens, each in a step alone."""
    plan = Plan(max_running=32, token_budget=128)
    group = group_of(plan)
    alone = Asked(Workload(Uniform(300, 300), Uniform(5, 5)), "latency")
    made = predict(group, alone, requests=3, within=0.1)
    step_s = group.step_s
    chunks = [StepShape((128,), (0,), 0), StepShape((128,), (128,), 0), StepShape((44,), (256,), 1)]
    ttft = sum(map(step_s, chunks))
    decode = [step_s(StepShape((1,), (300 + i,), 1)) for i in range(4)]
    for one in made.run.times:
        assert float(one.ttft_s) == pytest.approx(ttft) and float(one.tpot_s) == pytest.approx(sum(decode) / 4)
    assert made.score == pytest.approx(ttft + sum(decode))


def test_the_formula_of_a_text_alone_is_the_steps_of_the_cost_model():
    plan, demand = Plan(serving=PREFILL_FIRST, token_budget=4096), Demand(300.0, 300, 1.0, 50.0, 325.0)
    step_s = engine(plan)
    made = at(plan, step_s, demand, 1 / 8)
    prompt, decode = step_s(StepShape((300,), (0,), 1)), step_s(decode_step(1, 325))
    rate = 1 / (50 * decode / (1 / 8) + prompt)
    assert made.rate_per_s == pytest.approx(rate) and made.tpot_s == pytest.approx(decode / (1 - rate * prompt))
    assert made.ttft_s >= prompt + decode


@pytest.mark.parametrize("prefill", [1, 2, 4])
def test_engines_that_prefill_share_the_prompts_and_a_long_wait_is_a_queues(prefill):
    """By hand, steps of 50 ms for a prompt and 20 ms for a token: 2 texts of 10 tokens in each of two engines."""
    plan, demand = Plan(serving="disaggregated", prefill=prefill, decode=2), Demand(300.0, 300, 1.0, 10.0, 305.0)
    made = at(plan, lambda shape: 0.05 if max(shape.new_tokens) > 1 else 0.02, demand, 2)
    rate = 2 * 2 / (10 * 0.02)
    share = rate * 0.05 / prefill
    if share > 0.95:
        assert made is None
        return
    wait = 0.05 / (2 * (1 - share)) * math.log(10 * share)  # M/D/1: one in ten waits longer, u · exp(−t/m) = 1/10
    assert (made.rate_per_s, made.tpot_s) == pytest.approx((rate, 0.02))
    assert made.ttft_s == pytest.approx(0.05 + wait + 0.02)


@pytest.mark.parametrize("objective", ["goodput", "cost", "throughput", "latency"])
def test_the_search_finds_the_best_of_all_plans(objective):
    """Against the twin run on every plan of a small space. Goodput is known within 10 %, so as far may the two be."""
    limits = LIMITS if objective in ("goodput", "cost") else None
    asked = Asked(SHORT, objective, limits)
    space = Space(("bf16", "int4"), ("bf16",), (1, 2), (1,), (CHUNKED, PREFILL_FIRST), ((1, 1),), (32,), (128, 512))
    effort = dataclasses.replace(SMALL, plans=100)
    on = machine("h100", 2)
    made = choose(LLAMA, on, asked, space=space, effort=effort)
    search = _Search(LLAMA, "llama", on, asked, space)
    search.estimate(Demand.of(asked.arrivals(1000, 1.0), remember=False))
    every = [search.run(plan, effort, lambda words: None) for plan in search.plans]
    assert len(every) >= 14 and made.by_twin <= made.by_formula and not made.undecided
    best = min(every, key=search.order)
    slack = 0.1 if limits else 0.0
    assert made.best.score == pytest.approx(best.score, rel=slack + 1e-9)
    assert made.runner_up.plan.arrangement != made.best.plan.arrangement
    assert made.lossless.plan.lossless
    again = choose(LLAMA, on, asked, space=space, effort=effort)
    assert [(one.plan, one.score) for one in again.named] == [(one.plan, one.score) for one in made.named]


def test_more_bandwidth_and_looser_limits_serve_no_less():
    plan, demand = Plan(), Demand.of(Asked(SHORT, "goodput", LIMITS).arrivals(200, 1.0), remember=False)
    rates = []
    for factor in (0.25, 0.5, 1.0, 2.0):
        group = group_of(plan, H200.with_bandwidth(factor))
        known = steady(plan, group.step_s, group.fit, demand, LIMITS)
        made = predict(group, Asked(SHORT, "goodput", LIMITS), requests=48, within=0.05, steady=known)
        assert made.rate_per_s <= known.rate_per_s * plan.replicas * (1 + 1e-12)
        rates.append((known.rate_per_s, made.rate_per_s))
    assert rates == sorted(rates) and rates[0] < rates[-1]
    group, looser = group_of(plan), []
    for ms in (8, 12, 20, 50):
        limits = Objectives(ttft_s=0.3, tpot_s=ms / 1e3)
        known = steady(plan, group.step_s, group.fit, demand, limits)
        looser.append(
            predict(group, Asked(SHORT, "goodput", limits), requests=48, within=0.05, steady=known).rate_per_s
        )
    assert all(b >= 0.95 * a for a, b in pairwise(looser)) and looser[-1] > looser[0]


def test_a_rate_is_of_requests_also_where_they_come_in_conversations():
    for name in ("uniform", "multi_turn"):
        arrivals = Asked(workload(name), "goodput", LIMITS).arrivals(2000, 0.5)
        assert 2000 / arrivals[-1].at_s == pytest.approx(0.5, rel=0.1)


def test_a_small_model_is_served_at_the_highest_rate_that_is_tried():
    plan = Plan(max_running=512, token_budget=2048)
    group, asked = group_of(plan, config=zoo_config("stdlib-1m")), Asked(SHORT, "goodput", Objectives(ttft_s=1))
    known = steady(plan, group.step_s, group.fit, Demand(64.0, 64, 1.0, 8.0, 64.0), asked.limits)
    made = predict(group, asked, requests=8, within=0.1, steady=dataclasses.replace(known, rate_per_s=1e6))
    assert made.rate_per_s == 8192 and made.binds == "the rate tried"


def test_limits_that_nothing_meets_are_said_to_be_missed():
    asked = Asked(SHORT, "goodput", Objectives(ttft_s=1e-9))
    made = choose(LLAMA, machine("h200"), asked, space=Space(tensor=(1,), pipeline=(1,), ratios=()), effort=SMALL)
    assert made.best.score == 0 and made.best.attainment == 0 and made.best.run.missed(asked.limits) == {"TTFT": 1.0}
    assert "no rate meets the limits" in report.why(made, made.best)
    cost = choose(LLAMA, machine("h200"), dataclasses.replace(asked, objective="cost"), effort=SMALL)
    assert cost.best.score == math.inf


def test_the_report_names_the_best_its_rivals_and_what_was_refused():
    asked = Asked(workload("conversation"), "goodput", Objectives(ttft_s=1.0, tpot_s=0.1))
    space = Space(kv=("bf16",), pipeline=(1,), ratios=((1, 1),), max_running=(32,), token_budgets=(512,))
    made = choose(public_shape("llama-3.1-70b"), machine("h100", 4), asked, name="the 70B", space=space, effort=SMALL)
    text = "\n".join(report.lines(made, "the 70B", "conversation"))
    assert str(made.best.plan) in text and "runner-up" in text and "requests/s" in text
    assert any("weights take 141.1 GB per device, more than the 72.0 GB" in line for line in report.refused(made))
    assert all(len(row) == len(report.HEADER) for row in report.rows(made))
    assert any("70% of the data sheet" in line for line in report.sure(made))
    assert made.named[0] == made.best and made.best.plan.devices <= 4


# -- shapes and numbers that cannot be ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (public_shape("deepseek-v2-lite"), "has latent attention, whose step changes its form"),
        (zoo_config("stdlib-1m-experts"), "has experts, of which every step reads others"),
        (zoo_config("stdlib-3m-mamba2"), "has layers that keep a state"),
    ],
)
def test_shapes_whose_steps_are_not_simulated_are_refused(config, words):
    with pytest.raises(WorkbenchError, match=f"the model {words}"):
        choose(config, machine("h200"), Asked(SHORT, "latency"))


def test_windows_are_counted_in_the_steps_and_not_in_the_blocks():
    """Mistral 7B v0.1 sees 4,096 tokens, and its blocks keep all."""
    mistral = public_shape("mistral-7b")
    step_s, wide = engine(Plan(), H200, mistral), dataclasses.replace(mistral, sliding_window=None)
    assert step_s(decode_step(4, 16_000)) < engine(Plan(), H200, wide)(decode_step(4, 16_000))
    bytes_per_token = [fit(Layout(one), "bf16", "bf16", H200, longest=1).kv_bytes_per_token for one in (mistral, wide)]
    assert bytes_per_token[0] == bytes_per_token[1]


def test_heads_that_do_not_divide_are_refused_as_an_engine_and_the_others_remain():
    """14 query heads and 2 key-value heads: two ranks share them, four do not."""
    space = Space(("bf16",), ("bf16",), (1, 2, 4), (1,), (CHUNKED,), (), (32,), (128,))
    made = choose(
        public_shape("qwen2.5-0.5b"), machine("h200", 4), Asked(SHORT, "throughput"), space=space, effort=SMALL
    )
    assert {(one.what, one.plans) for one in made.refused} == {("tensor 4, pipeline 1", 1)}
    assert "14 query heads, which 4 ranks cannot share equally" in made.refused[0].why and made.by_formula == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"devices": 0}, "devices must be a whole number of at least 1"),
        ({"devices": 10**9}, "at most 4,096 devices"),
        ({"devices": 2.0}, "devices must be a whole number"),
        ({"card": "h300"}, "unknown machine 'h300'; did you mean 'h200'"),
        ({"card": None}, "unknown machine"),
        ({"link": "infiniband"}, "unknown link"),
        ({"bandwidth_share": 0}, "bandwidth_share must be above 0"),
        ({"bandwidth_share": math.nan}, "bandwidth_share must be a number"),
        ({"compute_share": 1.5}, "compute_share must be a number from 0 to 1"),
    ],
)
def test_machines_that_cannot_be_are_refused(change, words):
    with pytest.raises(WorkbenchError, match=words):
        machine(**{"card": "h200", **change})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Asked(SHORT, "speed"), "unknown objective 'speed'"),
        (lambda: Asked(SHORT, "goodput"), "'goodput' needs limits"),
        (lambda: Asked(SHORT, "throughput", LIMITS), "'throughput' takes no limits"),
        (lambda: Asked(SHORT, "goodput", LIMITS, rate_per_s=1.0), "a rate goes with objective 'latency'"),
        (lambda: Asked(SHORT, "latency", rate_per_s=0.0), "rate_per_s must be a finite number above 0"),
        (lambda: Space(weights=("int3",)), "unknown weights 'int3'"),
        (lambda: Space(kv=()), "kv names nothing to choose from"),
        (lambda: Space(tensor=(0,)), "tensor must be a whole number"),
        (lambda: Space(ratios=((0, 1),)), "engines that prefill"),
        (lambda: Effort(plans=0), "plans must be a whole number"),
        (lambda: Effort(within=math.inf), "within must be a finite number"),
        (lambda: Link("slow", 0, 0, 0), "bytes_per_s must be a finite number above 0"),
        (lambda: link_of("h200", "nvl"), "unknown link 'nvl'"),
        (
            lambda: choose(LLAMA, machine("a100"), Asked(SHORT, "latency"), space=Space(tensor=(8,))),
            "no plan of this space",
        ),
        (
            lambda: choose(public_shape("llama-3.1-405b"), machine("a100"), Asked(SHORT, "latency")),
            "in no way: weights",
        ),
        (lambda: Asked(SHORT, "latency", seed=-1), "seed must be a whole number"),
    ],
)
def test_questions_that_make_no_sense_are_refused(make, words):
    with pytest.raises(WorkbenchError, match=words):
        make()


def test_a_link_takes_its_calls_its_hops_and_its_bytes():
    link = Link("a link", 1e9, 1e-5, 1e-6)
    assert link.seconds({"all_reduce": Count(2, 2000)}, 4) == pytest.approx(2 * (1e-5 + 6e-6 + 1.5e-6))
    assert link.seconds({"all_reduce": Count(2, 2000)}, 1) == 0
