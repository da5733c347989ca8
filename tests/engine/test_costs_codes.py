"""Claims about the cost of a cache that is read as codes: what is counted is what the loop over codes does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import every_pair, random_decoder, tiny_config
from test_costs_smaller import SHAPES, STEPS, Begun, NoEmpty, counted

from workbench.errors import WorkbenchError
from workbench.instruments import cost_codes
from workbench.instruments.cost_codes import CodedLayer
from workbench.instruments.cost_quantized import CODE_FORMATS, Groups
from workbench.instruments.costs import decode_costs, kv_bytes, step_costs
from workbench.kernels.cpu import coded_attention
from workbench.kv import Quantized, kv_for
from workbench.kv.quantized_codes import FEW_TOKENS
from workbench.models import Batch, prepare

MISSING = coded_attention.why_not_here()
needs_compiler = pytest.mark.skipif(bool(MISSING), reason=f"the loop over a cache in codes: {MISSING}")
FORMATS = coded_attention.FORMATS
CODES = {"attention": "codes", "group": 6}


def read_by_loop(config, costs, new, past, group) -> float:
    """Of the counted bytes of the cache those that the loop reads: without what is stored."""
    a_token = config.num_kv_heads * (config.head_dim + config.value_head_dim) * 4
    groups = Groups(group, None, 0)
    kept = sum(n for n, c in zip(new, past) if groups.count(c) == groups.count(c + n))
    return costs.operation("attention").kv_bytes - config.num_layers * kept * a_token


# -- held to the loop --------------------------------------------------------------------------------------------------


@needs_compiler
@every_pair(format=FORMATS, group=[2, 6, 32], shape=["plain", "shared layers", "windows, a global layer, sinks"])
def test_the_bytes_that_are_counted_are_those_that_the_loop_reads(format, group, shape):
    """Of texts of any length: none, less than a group, whole groups and not, the last ones of a window cut anywhere."""
    config, settings = SHAPES[shape], {"format": format, "group": group, "attention": "codes"}
    if config.sliding_window:
        config = replace(config, sliding_window=9, attention_sinks=3)
    model = random_decoder(config)
    for new, past in [
        *(([1 + length % 3], [length]) for length in sorted({0, 1, group, 2 * group, 2 * group + 1, 50, 64, 131, 200})),
        ([2, 1, 8], [77, 128, 33]),
    ]:
        kv = Quantized(config, max_sequences=3, max_tokens=210, **settings)
        with torch.inference_mode():
            if any(past):
                model(Batch.of([[1] * n for n in past]), kv)
            held, before = kv.bytes_in_use, kv.bytes_read
            model(Batch.of([[1] * n for n in new], first_positions=past), kv)
        found, costs = kv.bytes_read - before, counted(config, "quantized", settings, new, past)
        assert found == read_by_loop(config, costs, new, past, group), (new, past)
        if shape == "plain":
            assert found == held == sum(kv_bytes(config, n, 4, kv="quantized", kv_settings=settings) for n in past)


@pytest.fixture
def calls(monkeypatch):
    """How often the loop was called."""
    made, attend = [], coded_attention.Kept.attend

    def counting(self, *args, **kwargs):
        made.append(self)
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(coded_attention.Kept, "attend", counting)
    return made


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "format"),
    [
        ("plain", "int8"),
        ("windows, a global layer, sinks", "int4"),
        ("shared layers with windows", "fp8"),
        ("latents, windows, sinks", "int8"),
        ("gemma", "int4"),
    ],
)
def test_launches_are_one_call_of_the_loop_in_a_layer_and_what_torch_is_seen_to_do(shape, format, dtype, calls):
    """Texts with many new tokens are dequantized beside it, and groups that leave the recent part are rounded."""
    plain, settings = random_decoder(SHAPES[shape]).to(dtype), {**CODES, "format": format}
    arranged = [("plain", plain, STEPS), ("fast", prepare(plain, linear="plain"), [STEPS[0], STEPS[3]])]
    for arrangement, model, steps in arranged:
        for new, past in steps if dtype == torch.float32 else steps[::3]:
            kv = kv_for("quantized", model, max_sequences=3, max_tokens=48, **settings)
            with torch.inference_mode():
                if any(past):
                    model(Batch.of([[1] * n for n in past]), kv)
                batch = Batch.of([[1] * n for n in new], first_positions=past)
                begun = Begun(kv, batch)
                calls.clear()
                with NoEmpty() as watch:
                    model(batch, begun)
            how = {"arrangement": arrangement}
            costs = counted(model.config, "quantized", settings, new, past, dtype.itemsize, **how)
            assert costs.launches == watch.launches + len(calls), (arrangement, new, past)
            assert len(calls) == model.config.num_layers * (min(new) <= FEW_TOKENS)


def test_the_numbers_of_the_loop_are_its_own():
    assert cost_codes.FEW_TOKENS == FEW_TOKENS
    source = coded_attention.SOURCE.with_name("coded_keys.h").read_text(encoding="utf-8")
    assert f"TOGETHER = {cost_codes.TOGETHER};" in source
    assert set(CODE_FORMATS) == set(FORMATS)


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_a_step_over_codes_by_hand():
    """H 4, H_kv 2, D 8, 100 tokens in groups of 8: 11 groups and 12 recent ones; the new token makes no group."""
    config, settings = tiny_config(num_layers=3), {"format": "int4", "group": 8}
    step = {"batch": 1, "context": 100, "weight_bytes_per_element": 4, "kv": "quantized"}
    costs = decode_costs(config, **step, kv_settings={**settings, "attention": "codes"})
    assert [o.name for o in costs.operations if o.name in ("dequantize", "attention", "store")] == ["attention"]
    attention = costs.operation("attention")
    a_group = 2 * (8 * 16 // 2 + 2 * 2 * (8 + 8))  # of both heads: two codes a byte; scales and zeros
    assert attention.kv_bytes == 3 * (11 * a_group + (12 + 1) * 2 * 16 * 4)
    making = 2 * (8 * 16 + 2 * (8 + 8) * 3)  # every code once for two queries; these with scales and zeros
    assert attention.flops == 3 * (4 * 4 * 8 * 101 + 11 * making)
    assert attention.activation_bytes == 3 * 4 * (32 + 32 + 32)  # queries, the new key and value, the result
    assert attention.queries == 4 * attention.flops / 2 / attention.kv_bytes  # multiply-adds for every four bytes
    assert attention.elementwise_bytes == 0 and attention.bytes_written == 3 * 4 * (32 + 32)
    assert (attention.count, attention.launches, attention.kernels, attention.heads) == (3, 3, 3, 6)
    assert costs.flops_by_part["attention"] == costs.attention_rectangle_flops  # one query sees all

    asked, numbers = (decode_costs(config, **step, kv_settings={**settings, **s}) for s in ({"attention": "sdpa"}, {}))
    assert asked == numbers  # the default
    assert {o.name for o in numbers.operations} - {o.name for o in costs.operations} == {"dequantize", "store"}
    assert costs.bytes < numbers.bytes and costs.launches < numbers.launches
    same = [[o for o in c.operations if o.name not in ("dequantize", "attention", "store")] for c in (costs, numbers)]
    assert same[0] == same[1]


def test_new_groups_are_rounded_as_for_the_dequantizing_way():
    config, step = tiny_config(), {"batch": 1, "context": 96, "weight_bytes_per_element": 4, "kv": "quantized"}
    codes, numbers = (
        decode_costs(config, **step, kv_settings={"group": 8, "attention": how}) for how in ("codes", "sdpa")
    )
    assert codes.operation("store") == numbers.operation("store")
    assert codes.operation("attention").kv_bytes == kv_bytes(
        config, 96, 4, kv="quantized", kv_settings={"group": 8}
    )  # nothing is stored by the loop


@pytest.mark.parametrize("format", FORMATS)
def test_a_piece_of_a_group_has_its_own_rows_and_scales(format):
    """W 7, 3 sinks, groups of 4, after 21 tokens: 15 … 20 are seen, 4 groups are codes. 0, 1, 2 and 15 are read."""
    layer = CodedLayer(Groups(4, 7, 3), CODE_FORMATS[format], 1, 2, 8, 8)
    of_scales = 2 * (1 if format == "fp8" else 2)
    rows = {1: 1, 3: 2 if format == "int4" else 3}  # of int4 tokens 0 and 2 lie in one byte
    of_codes = sum(rows[t] * 16 + of_scales * (8 + t) for t in (3, 1))
    assert layer.bytes_read(21) == of_codes + 5 * 16 * 4
    scaled = 1 if format == "fp8" else 3
    assert layer.flops(1, 21) == sum(t * 16 + 2 * (8 + t) * scaled for t in (3, 1))
    assert layer.flops(3, 21) == sum(t * 16 * 2 + 6 * (8 + t) * scaled for t in (3, 1))  # six queries: four and two
    assert layer.seen(1, 21) == 3 + 6 + 1


def test_more_new_tokens_than_the_loop_takes_cost_what_dequantizing_costs():
    config = SHAPES["plain"]
    for new, past in (([FEW_TOKENS + 1], [40]), ([30, 12], [0, 7])):
        codes, numbers = (
            counted(config, "quantized", {"group": 6, "attention": how}, new, past) for how in ("codes", "sdpa")
        )
        assert codes == numbers
    few, both = (counted(config, "quantized", CODES, new, [40] * len(new)) for new in ([3], [3, 20]))
    alone = counted(config, "quantized", CODES, [20], [40])
    for part in ("kv_bytes", "flops", "heads", "launches"):
        bytes_of = [getattr(c.operation("attention"), part) for c in (few, alone, both)]
        assert bytes_of[0] + bytes_of[1] == bytes_of[2], part
    assert both.operation("attention").count == config.num_layers


@pytest.mark.parametrize(
    ("settings", "stored", "words"),
    [
        ({"attention": "code"}, 4, "did you mean 'codes'"),
        ({"attention": "auto"}, 4, "'codes' or 'sdpa', not 'auto': .* decides where it is made"),
        ({"attention": "eager"}, 4, "'codes' or 'sdpa', not 'eager'"),
        ({"attention": "codes"}, 2, "needs kv_bytes_per_element=4, got 2"),
    ],
)
def test_what_is_not_counted_is_refused(settings, stored, words):
    step = {"new_tokens": [1], "contexts": [9], "logit_rows": 1, "weight_bytes_per_element": 2}
    with pytest.raises(WorkbenchError, match=words):
        step_costs(SHAPES["plain"], **step, kv="quantized", kv_bytes_per_element=stored, kv_settings=settings)


def test_other_kinds_take_no_attention():
    with pytest.raises(WorkbenchError, match="unknown kv 'contiguous' setting 'attention'"):
        counted(SHAPES["plain"], "contiguous", {"attention": "codes"}, [1], [9])
