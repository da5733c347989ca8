"""Weights in large pages: moved in place, counted by what the system says, left alone where it does not move them."""

from __future__ import annotations

import sys

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_fast import needs_compiler
from test_native_steps import rounded

from workbench.models import prepare
from workbench.native import large_pages
from workbench.native.large_pages import LEAST_BYTES, PAGE, PIECE, move_to_large_pages


@pytest.fixture
def asked(monkeypatch):
    """(first byte, bytes) of each question, and the system is not asked."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(large_pages, "_collapse", lambda *given: seen.append(given))
    return seen


@pytest.mark.skipif(sys.platform != "linux", reason="large pages are asked for on Linux")
def test_weights_stay_where_they_are_and_what_they_are():
    weight = torch.arange(LEAST_BYTES // 4 + 1000, dtype=torch.int32)
    address, before = weight.data_ptr(), large_pages.in_large_pages()
    said = move_to_large_pages([weight])
    moved = large_pages.in_large_pages() - before
    assert weight.data_ptr() == address and torch.equal(weight, torch.arange(len(weight), dtype=torch.int32))
    assert moved <= weight.nbytes + 2 * PAGE
    number, words = said.split(" ", 1)
    assert words == f"MB for weights of {weight.nbytes / 1e6:,.0f} were moved to pages of 2 MiB"
    assert abs(int(number.replace(",", "")) - moved / 1e6) < 10, "other memory of this process comes and goes"


def test_every_page_that_holds_a_weight_is_asked_for_once_and_no_other(asked):
    weights = [torch.zeros(LEAST_BYTES // 2 + 300, dtype=torch.uint8) for _ in range(2)] + [torch.zeros(10)]
    move_to_large_pages([*weights, weights[0][5:100]])
    pages = [page for at, size in asked for page in range(at // PAGE, (at + size) // PAGE)]
    held = {byte // PAGE for one in weights for byte in (*range(one.data_ptr(), one.data_ptr() + one.nbytes, 4096),)}
    held |= {(one.data_ptr() + one.nbytes - 1) // PAGE for one in weights}
    assert sorted(pages) == sorted(held) and all(at % PAGE == size % PAGE == 0 for at, size in asked)
    assert max(size for _, size in asked) <= PIECE * PAGE


def test_few_bytes_other_devices_and_other_systems_are_left_alone(asked, monkeypatch):
    large = torch.zeros(LEAST_BYTES, dtype=torch.uint8)
    assert move_to_large_pages([large[:-1]]) == move_to_large_pages([]) == ""
    assert move_to_large_pages([torch.empty(LEAST_BYTES, dtype=torch.uint8, device="meta")]) == ""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert move_to_large_pages([large]) == "" and not asked


def test_a_weight_that_comes_twice_counts_once_and_no_page_is_asked_for_without_a_byte(asked):
    weight = torch.zeros(LEAST_BYTES, dtype=torch.uint8)
    assert move_to_large_pages([weight[: LEAST_BYTES // 2]] * 2) == "" and not asked
    said = move_to_large_pages([weight, weight, torch.zeros(8)[4:4], torch.empty(0)])
    assert said.endswith(f"MB for weights of {LEAST_BYTES / 1e6:,.0f} were moved to pages of 2 MiB")
    assert sum(size for _, size in asked) <= LEAST_BYTES + PAGE


def test_a_c_library_without_such_a_call_is_left_alone(asked, monkeypatch):
    monkeypatch.setattr(large_pages.ctypes, "CDLL", lambda name: object())
    assert move_to_large_pages([torch.zeros(LEAST_BYTES, dtype=torch.uint8)]) == "" and not asked


def test_it_stops_when_its_time_is_up(asked, monkeypatch):
    monkeypatch.setattr(large_pages, "BUDGET_S", -1.0)
    said = move_to_large_pages([torch.zeros(LEAST_BYTES, dtype=torch.uint8)])
    assert not asked and said.startswith("0 MB for weights of ")


@needs_compiler
@pytest.mark.parametrize("settings", [{"native": True}, {"kernels": "c++"}, {"compile": True}], ids=str)
def test_steps_in_cpp_have_all_their_weights_moved_and_others_none(settings, monkeypatch):
    moved: list[torch.Tensor] = []
    monkeypatch.setattr("workbench.models.fast.move_to_large_pages", lambda given: moved.extend(given) or "so many")
    model = random_decoder(tiny_config(vocab_size=64))
    made = prepare(model, say=lambda _: None, **settings)
    assert sum(one.nbytes for one in moved) == made.step_weight_bytes
    assert made.pages == "so many" and made.steps_reason.endswith("so many")
    moved.clear()
    prepare(model)
    assert not moved


@needs_compiler
@pytest.mark.parametrize("group", [32, None])
def test_codes_are_moved_too(group, monkeypatch):
    moved: list[torch.Tensor] = []
    monkeypatch.setattr("workbench.models.fast.move_to_large_pages", lambda given: moved.extend(given) or "")
    made = prepare(rounded("rtn", 8, group, True), kernels="c++")
    assert len({one.data_ptr() for one in moved}) > len(made.forms)  # codes and scales of each
    assert sum(one.nbytes for one in moved) <= made.step_weight_bytes
