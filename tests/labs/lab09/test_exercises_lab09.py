"""Lab 09's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as
meant."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from conftest import random_decoder, tiny_config
from exercise_claims import ExerciseClaims, Lab, failures

from workbench.decoding import generate_beam
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.grading.check import Verdict, evaluate
from workbench.kv import allocators
from workbench.kv.blocks import BlockTables, NoRoom
from workbench.kv.prefix import PREFIX_INDEXES
from workbench.labs.lab09_paged_attention.checks import attention as attention_module
from workbench.labs.lab09_paged_attention.checks import cow, parts, prefix, waste
from workbench.labs.lab09_paged_attention.checks.probes import paged_memory, run_pool, run_tables
from workbench.models.attention import eager_attention
from workbench.models.batch import Batch

LAB = Lab("09_paged_attention")
IDS = ["paged-pool", "paged-cow", "paged-attention", "paged-prefix", "paged-waste"]


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 50
    used_again = ("paged-cow", "paged-prefix")

    def printed(self, lines):
        text = "\n".join(lines)
        assert "references [0, 1, 0, 0] free [0, 2, 3]" in lines  # twice: what was refused changed nothing
        assert lines.count("references [0, 1, 0, 0] free [0, 2, 3]") == 2
        assert "given up: 4 None 7" in lines
        # figure 3: 2 + 1 reserved, 2,038 + 507 internal
        assert "contiguous: used 12, reserved 3, internal 2,545, external 4,096, free 0; useful 0.2%" in text
        assert "paged: used 12, reserved 3, internal 17, external 0, free 4,096; useful 37.5%" in text
        assert "same tokens: True" in text and "same text: True; blocks left over: 0" in text
        assert "as in one piece: True" in lines and "prompt tokens need not be computed" in text


def test_the_exercises_are_the_five_of_the_lab():
    assert (LAB.visible.lab, LAB.ids) == (9, IDS)


# --- The real parts stand where the answers stand, and the answers where the real parts stand ---


def test_the_packages_tables_pass_the_checks_of_copy_on_write():
    result = evaluate(LAB.whole["paged-cow"], BlockTables)
    assert result.verdict == Verdict.PASSED, failures(result)


def test_the_pool_of_the_plumbing_does_what_the_answer_does():
    """On everything that is not refused; it looks for no mistakes."""
    steps = [["take", 3], ["share", [[0, 0], [0, 2]]], ["give_back", [[0, 0], [0, 1]]], ["take", 2], ["take", 9]]
    mine, given = run_pool(LAB.solution("paged-pool"), 5, steps), run_pool(parts.Pool, 5, steps)
    for a, b in zip(mine["steps"], given["steps"], strict=True):
        assert a["num_free"] == b["num_free"] and ("refused" in a) == ("refused" in b)
        assert sorted(a["references"]) == sorted(b["references"])


def test_the_answers_tables_and_the_packages_do_the_same_with_the_answers_pool_too():
    """Step by step: lengths, free blocks, what each text reads, how many copies, what is refused and with which
    numbers."""
    tables, pool = LAB.solution("paged-cow"), LAB.solution("paged-pool")

    def over_my_pool(num_blocks, block_size):
        return tables(num_blocks, block_size, pool=pool(num_blocks))

    for case in cow.churn_cases(random.Random(5)):
        real, mine = run_tables(BlockTables, **case), run_tables(over_my_pool, **case)
        for a, b in zip(real["steps"], mine["steps"], strict=True):
            assert (a["lengths"], a["texts"], a["num_free"]) == (b["lengths"], b["texts"], b["num_free"])
            assert len(a.get("copies", ())) == len(b.get("copies", ()))
            assert a.get("refused", {}).get("numbers") == b.get("refused", {}).get("numbers")


@pytest.mark.parametrize("kind", PREFIX_INDEXES)
def test_the_answers_cache_finds_what_the_packages_indexes_find(kind):
    """Without evictions, whose order is another's affair there (`BlockTables`): lookups and inserts of a random
    script."""
    for case in prefix.churn_cases(random.Random(9)):
        size = case["block_size"]
        mine, real = LAB.solution("paged-prefix")(size), PREFIX_INDEXES[kind](size)
        found = 0
        for verb, *given in case["steps"]:
            if verb == "insert":
                tokens, blocks, tenant = given
                mine.insert(tokens, blocks, tenant)
                real.insert(tokens[: len(blocks) * size], blocks, tenant)
            elif verb == "lookup":
                tokens, tenant = given
                most = max(len(tokens) - 1, 0) // size * size
                hits = mine.lookup(tokens, tenant)
                assert hits == real.match(tokens[:most], tenant)
                found += len(hits)
        assert found


@pytest.mark.parametrize("attention", ["solution", "alternative"])
def test_a_real_model_over_the_answers_writes_what_it_writes_over_a_contiguous_cache(attention):
    """Greedy tokens and beams are equal, nothing is read that was not written (it is NaN), and the pool is empty
    after."""
    model = random_decoder(tiny_config(vocab_size=40), seed=4)
    tables, pool = LAB.solution("paged-cow"), LAB.solution("paged-pool")
    attend = LAB.solution("paged-attention")
    if attention == "alternative":
        attend = LAB.defined("paged-attention", LAB.alternative["paged-attention"])
    prompt = [3, 1, 4, 1, 5, 9, 2]
    memory = parts.PagedOf(model.config, tables(24, 3, pool=pool(24)), attend)
    asked = {"max_new_tokens": 9, "stop_token_ids": ()}
    plain = generate(model, prompt, kv="contiguous", temperature=0, **asked)
    assert generate(model, prompt, kv=memory, temperature=0, **asked).tokens == plain.tokens
    assert memory.blocks_in_use == 0 == memory.bytes_in_use and memory.bytes_reserved > 0
    assert memory.most_blocks == 5  # 15 tokens were sent: 7, and 8 of the 9
    beams = generate_beam(model, prompt, num_beams=3, kv=memory, **asked)
    assert beams[0].tokens == generate_beam(model, prompt, num_beams=3, kv="contiguous", **asked)[0].tokens
    assert memory.blocks_in_use == 0 and memory.books.references == [0] * 24


def test_the_kv_of_the_answers_refuses_whole_and_cuts():
    model = random_decoder(tiny_config(vocab_size=40), seed=4)
    memory = parts.PagedOf(model.config, LAB.solution("paged-cow")(4, 2), LAB.solution("paged-attention"))
    with torch.inference_mode():
        model(Batch.of([[1, 2, 3]], sequences=["a"]), memory)
        with pytest.raises(NoRoom):
            model(Batch.of([[4], [5] * 6], first_positions=[3, 0], sequences=["a", "b"]), memory)
        assert memory.lengths == {"a": 3} and memory.blocks_in_use == 2
        with pytest.raises(WorkbenchError, match="starts it at position 0"):
            model(Batch.of([[4]], sequences=["a"]), memory)
        memory.truncate("a", 1)
        assert memory.blocks_in_use == 1
        with pytest.raises(WorkbenchError, match="cannot be cut"):
            memory.truncate("a", 2)
        with pytest.raises(WorkbenchError, match="plain keys and values"):
            parts.PagedOf(tiny_config(sliding_window=4), LAB.solution("paged-cow")(4, 2), None)


def test_the_answer_counts_what_the_packages_allocators_count():
    """Each of them with sequences that come, grow and leave; then the account of its state, while somebody waits and
    not."""
    answer = LAB.solution("paged-waste")
    draw, external = random.Random(3), 0
    kinds = {
        "contiguous": lambda: allocators.ContiguousMaximum(256, 32),
        "buddy": lambda: allocators.Buddy(256),
        "paged": lambda: allocators.PagedBlocks(256, 8),
    }
    for kind, make in kinds.items():
        for _ in range(40):
            real, requests = make(), {}
            for name in range(draw.randint(2, 30)):
                prompt, output = draw.randint(1, 20), draw.randint(1, 12)
                if real.arrive(name, prompt):
                    wanted = draw.randint(0, output)
                    while real.lengths[name] < prompt + wanted and real.grow(name):
                        pass
                    requests[name] = parts.Request(prompt, real.lengths[name] - prompt, output, 32)
            for name in draw.sample(sorted(requests), len(requests) // draw.randint(2, 4)):
                real.leave(name)
                del requests[name]
            gaps = [32] * (real.free // 32) if kind == "contiguous" else [8] * (real.free // 8)
            if kind == "buddy":
                gaps = [size for _, size in real.free_ranges]
            assert sum(gaps) == real.free
            for name, request in requests.items():
                assert answer["slots_held"](request, kind, 8) == real.places(name)
            ends = {name: request.prompt + request.output for name, request in requests.items()}
            for waits in (None, parts.Request(draw.randint(9, 32), 0, 1, 32)):
                mine = answer["account"](list(requests.values()), gaps, waits, kind, 8)
                found = allocators.account(real, ends, None if waits is None else waits.prompt)
                assert {part: mine[part] for part in waste.PARTS} == dataclasses.asdict(found)
                external += found.external
    assert external  # it happened


# --- The judges' own references ---


def test_the_judges_attention_is_attention_as_it_is_defined():
    for case in attention_module.several_cases(random.Random(2)):
        q, keys, values, _tables, lengths = (t.double() for t in paged_memory(**case))
        right = attention_module.exact(case)
        for row, table, length in zip(range(len(q)), case["tables"], lengths.int().tolist()):
            k, v = keys[table].flatten(0, 1)[:length], values[table].flatten(0, 1)[:length]
            defined = eager_attention(q[row][None], k, v, scale=q.shape[-1] ** -0.5)[0]
            torch.testing.assert_close(right[row], defined)


def test_figure_3_of_the_paper_is_counted_as_printed():
    """Two requests of at most 2,048 and 512 tokens: 2 + 1 slots reserved, 2,038 + 507 never used (arXiv 2309.06180)."""
    case = waste.account_case(waste.FIGURE_3, [], None, "contiguous")
    found = waste.exact_account(case)
    assert (found["used"], found["reserved"], found["internal"]) == (7 + 1 + 3 + 1, 2 + 1, 2038 + 507)
