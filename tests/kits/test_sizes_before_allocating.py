"""Sizes of KV caches and pools are counted and compared with the free memory before anything is allocated."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
import torch
from conftest import random_decoder, tiny_config

from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.instruments import memory
from workbench.kv import make_kv
from workbench.serving import Engine, Request, SchedulerSettings
from workbench.speculation import ModelDraft

FREE = 2 * 10**9
MODEL = random_decoder(tiny_config(vocab_size=64), seed=0)
CONFIG = MODEL.config
SHARED = tiny_config(vocab_size=64, num_layers=4, kv_sources=(0, 0, 2, 2))
MANY = 10**8
BYTES = "and 2.00 GB are free"
SIZE = "must be a whole number of at least 1"


def engine(running: int = 2, **given) -> Engine:
    return Engine(MODEL, SchedulerSettings(max_running=running, token_budget=max(512, running)), **given)


def tiny_kv(kind: str, config=CONFIG, **given):
    return make_kv(kind, config, **given)


WRONG = {
    "blocks of an engine": (lambda: engine(num_blocks=MANY), BYTES),
    "of one token each, in few bits": (lambda: engine(num_blocks=MANY, block_size=1, format="int4"), BYTES),
    "large blocks": (lambda: engine(num_blocks=2, block_size=MANY), BYTES),
    "sequences of an engine": (lambda: engine(MANY), BYTES),
    "sequences of an engine with a small pool": (lambda: engine(MANY, num_blocks=4), BYTES),
    "a recorded pool": (lambda: engine(num_blocks=MANY, graphs=True), BYTES),
    "an asynchronous engine": (lambda: engine(num_blocks=MANY, asynchronous=True), BYTES),
    "no blocks": (lambda: engine(num_blocks=0), SIZE),
    "fewer than none": (lambda: engine(num_blocks=-1), SIZE),
    "half a block": (lambda: engine(num_blocks=1.5), SIZE),
    "a truth": (lambda: engine(num_blocks=True), SIZE),
    "blocks of nothing": (lambda: engine(block_size=0), SIZE),
    "blocks of less": (lambda: engine(block_size=-16), SIZE),
    "blocks of a text": (lambda: engine(block_size="16"), SIZE),
    "blocks of nothing, counted": (lambda: engine(num_blocks=4, block_size=0), SIZE),
    "more than a machine word": (lambda: engine(num_blocks=10**400), "2**50"),
    "more digits than Python prints": (lambda: engine(block_size=10**5000), "2**50"),
    "a draft of many": (lambda: ModelDraft(MODEL, max_sequences=MANY), BYTES),
    "a draft of none": (lambda: ModelDraft(MODEL, max_sequences=0), SIZE),
    "a draft of -1 tokens": (lambda: ModelDraft(MODEL, max_tokens=-1), "max_tokens must be a whole number"),
    "paged, blocks": (lambda: tiny_kv("paged", num_blocks=MANY), BYTES),
    "paged, no block": (lambda: tiny_kv("paged", block_size=0), SIZE),
    "paged, no tokens": (lambda: tiny_kv("paged", max_tokens=0), "max_tokens must be a whole number"),
    "window": (lambda: tiny_kv("window", window=10**12, max_sequences=MANY), BYTES),
    "window of nothing": (lambda: tiny_kv("window", window=0), SIZE),
    "window, rewind": (lambda: tiny_kv("window", window=4, rewind=-1), SIZE),
    "quantized group of 1": (lambda: tiny_kv("quantized", group=1), "at least 2"),
}
for _kind in ("contiguous", "window", "quantized", "paged", "shared_layers"):
    _config = SHARED if _kind == "shared_layers" else replace(CONFIG, sliding_window=8)
    for _count, _words in ((MANY, BYTES), (10**400, "2**50"), (0, SIZE), (-2, SIZE), (2.0, SIZE)):
        WRONG[f"{_kind}, {str(_count)[:9]} sequences"] = (
            lambda kind=_kind, config=_config, count=_count: tiny_kv(kind, config, max_sequences=count),
            _words,
        )


@pytest.mark.parametrize("case", WRONG)
def test_a_size_that_makes_no_sense_is_refused_before_anything_is_allocated(case, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device="cpu": FREE)
    made, words = WRONG[case]
    allocated: list[object] = []
    for name in ("zeros", "empty", "full"):
        right = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *size, right=right, **given: allocated.append(size) or right(*size))
    tracemalloc.start()
    try:
        with pytest.raises(WorkbenchError) as refused:
            made()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert words in str(refused.value)
    assert peak < 2 * 10**6 and not allocated


def test_there_is_one_account_for_engine_and_generate(monkeypatch):
    """Too little memory for the smallest pool: an engine and a call say so, and work once there is room."""
    for kv in ("contiguous", "quantized", "paged"):
        monkeypatch.setattr(memory, "available_bytes", lambda device="cpu": 100)
        with pytest.raises(WorkbenchError, match="100 B are free"):
            generate(MODEL, [1, 2], max_new_tokens=2, kv=kv)
        with pytest.raises(WorkbenchError, match="100 B are free"):
            engine(num_blocks=1)
        monkeypatch.undo()
        assert len(generate(MODEL, [1, 2], max_new_tokens=2, stop_token_ids=(), kv=kv).tokens) == 2
    assert len(engine(num_blocks=1).run([Request("a", (1, 2), 3)])[0].token_ids) == 3
