"""Lab 09: the drawn blocks are those of a real cache, accounts add up and agree with their predictions, hits are held
to an optimum that is computed another way, and the panels show it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import random_decoder, tiny_config
from experiment_claims import DataSheetBench, ExperimentClaims, brief_runs, on_model
from panel_claims import PanelClaims, shown

from workbench.errors import WorkbenchError
from workbench.experiments import experiment, run_experiment
from workbench.instruments.device import PUBLISHED
from workbench.instruments.records import Measurement
from workbench.kv.allocators import Demand
from workbench.kv.blocks import BlockTables
from workbench.kv.paged import Paged
from workbench.labs.lab09_paged_attention import allocators, prefix_hits
from workbench.labs.lab09_paged_attention.allocators import BUDDY, CONTIGUOUS, NAMES, PARTS, paged_name
from workbench.labs.lab09_paged_attention.panels.block_pool import FREE, IDLE, ONCE, SHARED, state_of
from workbench.labs.lab09_paged_attention.prefix_hits import AMPLE, optimum, order_of
from workbench.labs.lab09_paged_attention.scene import scene
from workbench.models.checkpoints import shipped_tokenizer
from workbench.panels.base import Panel
from workbench.panels.plots import matching

SMALL = {
    "paging.block_pool": {},
    "paging.allocators": {"requests": 20, "capacity": 16_384, "load": "uniform", "rate": 0.5},
    "paging.prefix_hits": {"requests": 24, "running": 3, "tenants": 2, "repeats": 3},
}


MOVED = {"block_pool": {"shown_step": 9}, "allocators": {"block_size": 64}, "prefix_hits": {"tenants": 1}}
MINE = {"block_pool": "paging.block_pool", "allocators": "paging.allocators", "prefix_hits": "paging.prefix_hits"}
SCENE = {
    "vocab_size": 4096,
    "block_size": 4,
    "num_blocks": 16,
    "prefix": "hash",
    "prompt_tokens": 10,
    "samples": 3,
    "new_tokens": 6,
    "common_tokens": 8,
    "other_tokens": 40,
    "seed": 0,
}


@pytest.fixture(scope="module")
def model():
    return random_decoder(tiny_config(), tokenizer=shipped_tokenizer())


@pytest.fixture(scope="module")
def runs(model):
    return brief_runs(SMALL, model)


def run(name: str, model, bench=None, **more) -> list[Measurement]:
    return run_experiment(name, on_model(name, {**SMALL[name], **more}, model), bench or DataSheetBench())


@pytest.fixture
def make(model):
    def made(name: str, **more) -> Panel:
        return shown(name, **on_model(MINE[name], {**SMALL[MINE[name]], **more}, model))

    return made


class TestExperiments(ExperimentClaims):
    lab, small = 9, SMALL


class TestPanels(PanelClaims):
    small = SMALL
    moved = MOVED


# -- all of them -------------------------------------------------------------------------------------------------


# -- paging.blocks -----------------------------------------------------------------------------------------------


def test_the_scene_shares_copies_finds_and_evicts():
    steps = scene(**SCENE)
    # of three holders of a half full block the last may keep it
    assert sum(len(step.copies) for step in steps) == 2
    assert any(step.shared == 2 and step.found == {"B": 8} for step in steps)
    assert sum(len(step.evicted) for step in steps) >= 3
    last = next(step for step in steps if "D" in step.found)
    assert last.found["D"] == 16  # A 1's prompt and answer, in whole blocks
    for step in steps:
        states = [state_of(step, block) for block in range(16)]
        assert states.count(SHARED) == step.shared and states.count(SHARED) + states.count(ONCE) == step.held
        assert states.count(IDLE) == len(step.idle) and states.count(FREE) == step.free
        assert step.unshared == sum(-(-n // 4) for n in step.lengths.values()) >= step.held
        tokens = {
            block: max(
                min(4, step.lengths[name] - 4 * at)
                for name, table in step.tables.items()
                for at, one in enumerate(table)
                if one == block
            )
            for block in range(16)
            if step.references[block]
        }
        assert all(step.fill[block] == count for block, count in tokens.items())
        assert all(step.fill[block] == 4 for block in step.idle)


def test_without_an_index_nothing_is_found_and_nothing_stays():
    steps = scene(**{**SCENE, "prefix": "none"})
    assert not any(sum(step.found.values()) for step in steps) and not any(step.idle for step in steps)
    assert sum(len(step.copies) for step in steps) == 2  # forks share without an index


def test_in_a_small_pool_who_does_not_fit_waits_and_the_youngest_gives_way():
    steps = scene(**{**SCENE, "num_blocks": 6, "samples": 4})
    words = " ".join(step.words for step in steps)
    assert "It has to wait." in words and "was preempted" in words
    assert all(step.held <= 6 for step in steps)


@pytest.mark.parametrize(
    "knobs",
    [
        {"prefix": "radix", "block_size": 1, "num_blocks": 32},
        {"prefix": "none", "samples": 1},
        {"num_blocks": 7, "samples": 4},
        {"block_size": 3, "common_tokens": 24, "prompt_tokens": 24, "num_blocks": 32},
        {"prompt_tokens": 2, "new_tokens": 2},
    ],
)
def test_a_real_cache_goes_through_the_scene_as_drawn_whatever_the_knobs(model, knobs):
    made = run("paging.block_pool", model, **knobs)
    assert len(made) > 5 and all(m.median == m.predicted for m in made)
    assert any("logits of" in m.check for m in made)


def test_bytes_saved_are_exactly_those_of_the_blocks_that_tables_name_twice(runs, model):
    for m in runs["paging.block_pool"]:
        named = [block for table in m.settings["tables"].values() for block in table]
        per_block = 4 * model.config.kv_values_per_token() * 4
        assert m.counts["bytes_saved"] == (len(named) - len(set(named))) * per_block
        assert m.counts["bytes_in_use"] <= m.counts["bytes_held"] == len(set(named)) * per_block


def test_a_block_that_is_shared_and_not_copied_is_found_out(model, monkeypatch):
    """Planted: copy-on-write keeps its books and forgets to move the keys."""
    real = BlockTables.grow
    monkeypatch.setattr(BlockTables, "grow", lambda self, lengths: real(self, lengths) and [])
    with pytest.raises(WorkbenchError, match="holds something else than its table says"):
        run("paging.block_pool", model)


def test_a_cache_with_other_tables_than_those_drawn_is_found_out(model, monkeypatch):
    real = Paged.open
    monkeypatch.setattr(Paged, "open", lambda self, name, text, tenant="": real(self, name, text, "another"))
    with pytest.raises(WorkbenchError, match="those drawn"):
        run("paging.block_pool", model)


# -- paging.allocators -------------------------------------------------------------------------------------------


def test_shares_are_predicted_from_lengths_alone():
    """A request of 3 tokens that writes 2 holds 4, then 5."""
    shares = allocators.expected_shares([Demand(0, 3, 2)], 20)
    assert shares[CONTIGUOUS] == 9 / 40 and shares[BUDDY] == 9 / 12
    assert shares[paged_name(1)] == 1 and shares[paged_name(4)] == 9 / (9 + 2 * 1.5)


def test_every_allocator_serves_the_same_requests_and_its_parts_are_the_whole(runs):
    made = runs["paging.allocators"]
    assert [m.settings["allocator"] for m in made] == list(NAMES)
    assert len({m.counts["used_token_steps"] for m in made}) == 1
    for m in made:
        assert sum(m.counts[part] for part in PARTS) == pytest.approx(1)
        assert m.median == pytest.approx(m.counts["used"] / (1 - m.counts["free"]))
        courses = m.settings["over_time"]
        assert all(sum(at) == pytest.approx(1, abs=1e-5) for at in zip(*courses.values(), strict=True))
    [one] = matching(made, allocator=paged_name(1))
    assert one.median == one.predicted == 1


def test_on_the_azure_like_conversations_blocks_of_16_are_useful_to_at_least_96_percent(model):
    made = run("paging.allocators", model, load="conversation", requests=60, rate=0.3, capacity=65_536)
    [paged], [contiguous] = matching(made, allocator=paged_name(16)), matching(made, allocator=CONTIGUOUS)
    assert paged.median >= 0.96 and paged.median == pytest.approx(paged.predicted, abs=0.002)
    assert contiguous.median < 0.2 and contiguous.median <= contiguous.predicted
    fits = [allocators.sequences_that_fit(65_536, m.counts) for m in (paged, contiguous)]
    assert fits[0] > 5 * fits[1] and paged.counts["steps"] < contiguous.counts["steps"] / 2


def test_an_account_that_loses_a_place_is_not_believed(model, monkeypatch):
    real = allocators.serve

    def leaky(allocator, demands):
        served = real(allocator, demands)
        first = served.accounts[0]
        return dataclasses.replace(
            served, accounts=(dataclasses.replace(first, free=first.free - 1), *served.accounts[1:])
        )

    monkeypatch.setattr(allocators, "serve", leaky)
    with pytest.raises(WorkbenchError, match="does not add up"):
        run("paging.allocators", model)


def test_the_smallest_memory_has_room_for_the_longest_request_of_each_workload():
    [capacity] = [s for s in experiment("paging.allocators").settings if s.name == "capacity"]
    for load in allocators.WORKLOADS:
        _, longest = allocators.demands_of(load, 10, 0.3, 0)
        assert longest <= min(capacity.choices)
        assert all(make().largest >= longest for make in allocators.makers(min(capacity.choices), longest).values())


# -- paging.prefixes ---------------------------------------------------------------------------------------------


def optimum_by_comparison(order, block_size: int, isolated: bool) -> int:
    """Every prompt with everything that was computed before, token by token."""
    known, total = [], 0
    for what, at in order.events:
        text = order.texts[at]
        if what == "open":
            best = 0
            for tenant, before in known:
                if tenant == text.tenant or not isolated:
                    same = next(
                        (i for i, (a, b) in enumerate(zip(text.prompt, before)) if a != b),
                        min(len(text.prompt), len(before)),
                    )
                    whole = len(before) // block_size * block_size
                    best = max(best, min(same, whole, len(text.prompt) - 1) // block_size * block_size)
            total += best
        known.append((text.tenant, text.prompt if what == "open" else text.computed))
    return total


@pytest.mark.parametrize("load", ["multi_turn", "shared_prefix"])
def test_the_optimum_is_the_longest_beginning_that_any_earlier_text_had(load):
    order = order_of(load, 20, 4.0, 3, 2, 16, 0)
    for isolated in (True, False):
        assert optimum(order, 16, isolated) == optimum_by_comparison(order, 16, isolated) > 0


@pytest.mark.parametrize(("length", "best"), [(7, 4), (8, 4), (9, 8)])
def test_the_last_token_of_a_prompt_is_never_found_by_the_optimum_and_no_more_by_a_pool(length, best):
    text = prefix_hits.Text("", tuple(range(length)), tuple(range(length + 2)))
    order = prefix_hits.Order((text, text), (("open", 0), ("close", 0), ("open", 1), ("close", 1)), 3, 6)
    assert optimum(order, 4, True) == best == prefix_hits.replay(order, 6, 4, "hash", True).hit_tokens


def test_an_ample_pool_finds_at_least_95_percent_of_the_optimum_and_no_pool_more_than_all(runs):
    made = matching(runs["paging.prefix_hits"], measured="hits")
    assert len(made) == 2 * 2 * 7
    for m in made:
        assert m.median <= m.predicted and m.counts["evictions"] >= 0
    for m in matching(made, pool=AMPLE):
        assert m.counts["of_optimum"] >= 0.95 and m.counts["evictions"] == 0
    together, apart = matching(made, pool=AMPLE, isolated=False), matching(made, pool=AMPLE, isolated=True)
    assert together[0].predicted > apart[0].predicted  # others' system prompts are found too


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_the_smallest_pool_makes_nobody_wait_and_evicts_what_an_ample_one_finds(index):
    order = order_of("shared_prefix", 60, 4.0, 4, 4, 16, 0)
    tight, ample = (prefix_hits.replay(order, n, 16, index, True) for n in (order.peak, order.all_blocks))
    assert tight.prompt_tokens == ample.prompt_tokens == order.prompt_tokens and not tight.lengths
    assert tight.hit_tokens < ample.hit_tokens == optimum(order, 16, True)
    assert tight.evictions > ample.evictions == 0
    tight.check()


def test_a_block_of_another_tenant_that_is_found_is_found_out(monkeypatch):
    """Planted: the index forgets to ask whose block it is."""
    real = BlockTables.open
    monkeypatch.setattr(BlockTables, "open", lambda self, name, ids, tenant: real(self, name, ids, ""))
    keep = BlockTables.remember
    monkeypatch.setattr(BlockTables, "remember", lambda self, name, ids, tenant: keep(self, name, ids, ""))
    order = order_of("multi_turn", 24, 4.0, 3, 2, 16, 0)
    with pytest.raises(WorkbenchError, match="holds something else"):
        prefix_hits.replay(order, order.all_blocks, 16, "hash", True)


def test_the_engine_computes_less_and_answers_the_same(runs):
    [m] = matching(runs["paging.prefix_hits"], measured="ttft")
    assert len(m.samples) == 3 and m.settings["hits"][0] == 0 and min(m.settings["hits"][1:]) >= 112
    assert "all 3 answers are the same" in m.check and m.settings["promised"][0] == 1
    assert m.counts["hit_tokens"] == sum(m.settings["hits"]) and m.predicted >= 1


def test_what_is_found_need_not_be_computed_by_the_cost_model_either():
    whole, rest = (
        prefix_hits._prefill_s(PUBLISHED["h100-sxm"], "llama-3.1-8b", 4096 - known, known) for known in (0, 3072)
    )
    assert 3.5 < whole / rest < 4.5  # a quarter of the rows is left, and attention looks back as far


def test_another_answer_with_the_index_than_without_is_not_timed(model, monkeypatch):
    real = prefix_hits._send

    def wrong(bench, engine, request):
        done = real(bench, engine, request)
        first = torch.tensor(done.token_ids[0])
        spoiled = (int(first) ^ 1, *done.token_ids[1:])
        return dataclasses.replace(done, token_ids=spoiled) if engine.kv.tables.prefix is None else done

    monkeypatch.setattr(prefix_hits, "_send", wrong)
    with pytest.raises(WorkbenchError, match="token 0"):
        run("paging.prefix_hits", model, requests=4, repeats=1)


# -- the panels --------------------------------------------------------------------------------------------------


def test_the_table_of_blocks_has_the_numbers_of_the_picture(make, runs):
    panel = make("block_pool", shown_step=5)
    rows = {row[0]: row for row in panel.view(panel.settings).rows}
    step = scene(**SCENE)[5]
    assert {name: row[2] for name, row in rows.items() if name in step.tables} == {
        name: " ".join(map(str, table)) for name, table in step.tables.items()
    }
    assert rows["B"][1] == "11" and rows["pool: shared"][2] == "0 1" and rows["B"][4] == "4 4 3"
    panel.measurements = runs["paging.block_pool"]
    assert "With the model: every table is the one drawn" in panel.view(panel.settings).words
    panel.configure(seed=1)
    assert "With the model" not in panel.view(panel.settings).words


def test_play_goes_through_the_scene(make):
    panel = make("block_pool")
    seen = []
    for step in (2, 5, 13):
        panel.play.value = step
        assert panel.wait(30)
        seen.append(panel.snapshot().data)
    assert len(set(seen)) == 3 and panel.settings["shown_step"] == 13


def test_every_line_of_a_table_ends_at_its_block(make):
    panel = make("block_pool", shown_step=6)
    [axes] = panel.view(panel.settings).figure.axes
    step = scene(**SCENE)[6]
    heads = [line for line in axes.lines if line.get_marker() == "^"]
    assert sorted(round((head.get_xdata()[0] - 0.47) / 1.02) for head in heads) == sorted(
        block for table in step.tables.values() for block in table
    )


def test_shares_in_the_table_are_those_counted(make, runs):
    panel = make("allocators")
    assert panel.view(panel.settings).rows[0][1] and not panel.view(panel.settings).rows[0][2]
    panel.measurements = runs["paging.allocators"]
    rows = {row[0]: row for row in panel.view(panel.settings).rows}
    for m in runs["paging.allocators"]:
        assert rows[m.settings["allocator"]][2] == f"{m.median:.1%}"
