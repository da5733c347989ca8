"""Lab 10, what is counted without a GPU: traffic by the memory on the chip, sectors of a warp, occupancy, compiled
tiles; and which of torch's backends is taken."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from experiment_claims import DataSheetBench, ExperimentClaims, brief_runs
from panel_claims import PanelClaims

from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.kernels import traffic as counted
from workbench.labs.lab10_kernels import coalescing, sdpa_backends, tile_sweep
from workbench.labs.lab10_kernels.attention_traffic import order_of_traffic, shape_at, tiles_for, traffic_with
from workbench.labs.lab10_kernels.coalescing import CPU_LINE, LINE, SECTOR, moved_over_wanted, touched, warp_addresses
from workbench.labs.lab10_kernels.occupancy import PROCESSORS, occupancy
from workbench.labs.lab10_kernels.tile_sweep import SWEEPS, Tile, moved
from workbench.panels.plots import matching

SMALL = {
    "kernels.coalescing": {"numbers": 16_384, "turns": 1, "repeats": 2},
    "kernels.sdpa_backends": {"tokens": 64, "heads": 2, "head_dim": 16, "repeats": 2},
    "kernels.tile_sweep": {"sweep": "few", "tokens": 512},
}
linux = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")


@pytest.fixture(scope="module")
def model():
    return None


@pytest.fixture(scope="module")
def runs(model):
    return brief_runs(SMALL, model)


@linux
class TestExperiments(ExperimentClaims):
    lab, small = 10, SMALL


class TestPanels(PanelClaims):
    small, moved = {"kernels.coalescing": SMALL["kernels.coalescing"]}, {"coalescing": {"numbers": 131_072}}


# -- Θ(S²d²/M) -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sram", [8 << 10, 32 << 10, 128 << 10])
def test_traffic_is_eight_times_the_order_and_the_inputs_once(sram):
    """q and out once, 2·S·D each; k and v for each of the S / (M/4D) tiles of queries: 8·S²D²/M."""
    s = shape_at(8192, 4, 4, 64, "float16")
    assert traffic_with(sram, s) == 2 * s.queries + 8 * order_of_traffic(sram, s)


def test_twice_the_memory_halves_what_is_read_again():
    s = shape_at(16_384, 1, 1, 128, "bfloat16")
    again = [traffic_with(m << 10, s) - 2 * s.queries for m in (16, 32, 64, 128)]
    assert [a / b for a, b in itertools.pairwise(again)] == [2, 2, 2]


def test_a_tile_fills_the_memory_and_no_more():
    s = shape_at(4096, 8, 8, 128, "bfloat16")
    queries, keys = tiles_for(128 << 10, s)
    assert (queries, keys) == (128, 128) and 4 * queries * 128 * 2 == 128 << 10
    assert tiles_for(1 << 30, s) == (4096, 128)
    with pytest.raises(WorkbenchError, match="hold no tile"):
        tiles_for(512, s)


# -- coalescing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stride", "width", "sectors", "lines"),
    [(1, 4, 4, 1), (2, 4, 8, 2), (8, 4, 32, 8), (32, 4, 32, 32), (1, 2, 2, 1), (1, 16, 16, 4), (0, 4, 1, 1)],
)
def test_a_warp_touches_so_many_sectors_and_lines(stride, width, sectors, lines):
    addresses = warp_addresses(stride, width)
    assert (touched(addresses, width, SECTOR), touched(addresses, width, LINE)) == (sectors, lines)


def test_a_row_that_begins_off_a_border_touches_one_sector_more():
    assert touched(warp_addresses(1, 4, start=1), 4, SECTOR) == 5


def test_order_does_not_matter_and_a_number_over_a_border_needs_both_sides():
    assert touched(reversed(warp_addresses(1, 4)), 4, SECTOR) == 4
    assert touched([30], 4, SECTOR) == 2


def test_at_worst_a_number_brings_seven_others():
    assert [moved_over_wanted(s) for s in (1, 2, 4, 8, 16, 32)] == [1, 2, 4, 8, 8, 8]
    assert moved_over_wanted(32, width=16) == 2  # wide numbers fill half a sector


@pytest.mark.parametrize("wrong", [(-1, 4, 0), (1, 0, 0), (1, 4, -1), (1.5, 4, 0)])
def test_addresses_that_make_no_sense_are_refused(wrong):
    with pytest.raises(WorkbenchError, match="must be a whole number"):
        warp_addresses(*wrong)


def test_the_prediction_here_is_the_lines_of_this_processor(runs):
    here = {m.settings["stride"]: m for m in matching(runs["kernels.coalescing"], measured="here")}
    assert [here[s].predicted for s in coalescing.STRIDES] == [1, 2, 4, 8, 16, 16]
    assert CPU_LINE == 64


# -- occupancy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("warps", "registers", "shared", "card", "programs", "limits"),
    [
        (4, 32, 0, "h100", 16, ("warps", "registers")),  # 64 / 4; 65,536 / (32 · 128)
        (1, 16, 0, "h100", 32, ("programs",)),  # half of the warps' places stay empty
        (8, 194, 131_072, "h100", 1, ("registers", "shared memory")),  # 200 a thread, and 129 of 228 KB
        (4, 86, 71_680, "h100", 3, ("shared memory",)),  # 71 of 228 KB
        (4, 86, 71_680, "a100", 2, ("shared memory",)),  # 71 of 164 KB
        (4, 128, 0, "a100", 4, ("registers",)),
        (8, 255, 0, "h100", 1, ("registers",)),
        (1, 255, 0, "h100", 8, ("registers",)),  # two warps for each quarter of the file
        (16, 168, 0, "h100", 0, ("registers",)),  # three for each quarter are twelve
        (4, 32, 228 << 10, "h100", 0, ("shared memory",)),  # CUDA takes 1 KB
        (4, 32, 227 << 10, "h100", 1, ("shared memory",)),
    ],
)
def test_occupancy_by_hand(warps, registers, shared, card, programs, limits):
    held = occupancy(warps=warps, registers=registers, shared=shared, card=card)
    assert (held.programs, held.limits) == (programs, limits)
    assert held.warps == programs * warps and held.share == held.warps / 64


def test_one_register_more_can_cost_a_program():
    """Registers come in units of 8 a thread."""
    assert (
        occupancy(warps=4, registers=64, shared=0).programs == occupancy(warps=4, registers=57, shared=0).programs == 8
    )
    assert occupancy(warps=4, registers=65, shared=0).programs == 7


def test_more_of_anything_never_holds_more_programs():
    for card in PROCESSORS:
        by_registers = [occupancy(warps=4, registers=r, shared=0, card=card).programs for r in range(1, 256)]
        by_shared = [occupancy(warps=4, registers=32, shared=b, card=card).programs for b in range(0, 230_000, 1000)]
        assert by_registers == sorted(by_registers, reverse=True) and by_shared == sorted(by_shared, reverse=True)


@pytest.mark.parametrize("wrong", [{"warps": 0}, {"warps": 33}, {"registers": 256}, {"shared": -1}, {"card": "h1000"}])
def test_what_no_card_starts_is_refused(wrong):
    with pytest.raises(WorkbenchError):
        occupancy(**{"warps": 4, "registers": 32, "shared": 0, **wrong})


# -- tiles and warps -----------------------------------------------------------------------------------------------


def test_programs_and_tiles_are_those_of_the_loop():
    """128 rows are 32 tokens of 4 heads: 16 tiles for 512 tokens; tile t ends at key 32(t + 1), in tiles of 64 keys."""
    programs, nbytes, loads = moved(512, Tile(128, 64, 8, 3))
    assert programs == 8 * 16 and loads == 8 * sum(-(-32 * (t + 1) // 64) for t in range(16))
    once = 2 * 512 * 32 * 128 * 2  # q and out
    assert nbytes == once + loads * 2 * 64 * 128 * 2


def test_warps_and_stages_change_no_byte_and_half_the_rows_read_keys_twice():
    assert len({moved(4096, tile) for tile in (*SWEEPS["warps"], *SWEEPS["stages"])}) == 1
    small, large = (moved(4096, Tile(rows, 16, 4, 3))[1] for rows in (64, 128))
    once = 2 * 4096 * 32 * 128 * 2
    assert 1.98 < (small - once) / (large - once) < 2


def test_bytes_are_those_of_the_kernels_traffic():
    shape = counted.Shape(1, 512, 512, 32, 8, 128)
    assert moved(512, Tile(64, 64, 4, 3))[1] == counted.tiled(shape, query_tile=16, key_tile=64, heads_together=4).bytes


@linux
def test_the_compiler_says_registers_and_occupancy_follows_from_them(runs):
    made = runs["kernels.tile_sweep"]
    assert [(m.settings["rows"], m.settings["warps"]) for m in made] == [(64, 4), (128, 8)]
    for m in made:
        c, s = m.counts, m.settings
        held = occupancy(warps=s["warps"], registers=int(c["registers"]), shared=int(c["shared"]))
        assert m.median == held.share > 0 and c["programs_at_once"] == held.programs
        assert c["spilled"] == 0 and s["tensor_cores"] == "wgmma" and c["load"] == 16


@linux
def test_a_tile_that_does_not_fit_is_measured_as_none_with_the_reason(monkeypatch):
    monkeypatch.setitem(SWEEPS, "few", (Tile(128, 64, 8, 9),))
    [m] = run_experiment("kernels.tile_sweep", SMALL["kernels.tile_sweep"], DataSheetBench())
    assert m.median == 0 and m.settings["limits"] == "shared memory" and "fits none" in m.check
    assert m.counts["shared"] > PROCESSORS["h100"].shared


@linux
def test_a_tile_that_does_not_compile_is_measured_as_none_with_the_compilers_words(monkeypatch):
    monkeypatch.setitem(SWEEPS, "few", (Tile(48, 64, 4, 3),))  # no power of two
    [m] = run_experiment("kernels.tile_sweep", SMALL["kernels.tile_sweep"], DataSheetBench())
    assert m.median == 0 and "registers" not in m.counts and "power of 2" in m.check


def test_a_compiler_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(tile_sweep.sys, "executable", "/bin/false")
    with pytest.raises(WorkbenchError, match="compiles no kernels here"):
        run_experiment("kernels.tile_sweep", SMALL["kernels.tile_sweep"], DataSheetBench())


# -- torch's backends ----------------------------------------------------------------------------------------------


def test_each_case_says_which_backend_is_taken_and_flash_says_why_not(runs):
    by_case = {m.settings["case"]: m for m in matching(runs["kernels.sdpa_backends"], measured="chosen")}
    assert set(by_case) == set(sdpa_backends.CASES)
    for m in by_case.values():
        fused = m.settings["backend"] != sdpa_backends.MATH
        assert m.median == fused
        if not torch.cuda.is_available():
            assert ("refuses" in m.check) == (not fused)


def test_what_runs_gives_the_same_and_what_does_not_gives_its_reason(runs):
    made = runs["kernels.sdpa_backends"]
    ran, refused = matching(made, measured="peak"), matching(made, measured="refused")
    assert {m.settings["backend"] for m in (*ran, *refused)} == set(sdpa_backends.BACKENDS)
    assert "MATH" in {m.settings["backend"] for m in ran} and all("float64" in m.check for m in ran)
    assert all(len(m.check) > 20 for m in refused)


def test_only_math_holds_all_scores(runs):
    peaks = {m.settings["backend"]: m for m in matching(runs["kernels.sdpa_backends"], measured="peak")}
    scores = peaks["MATH"].counts["bytes_of_scores"]
    assert scores == 2 * 64 * 64 * 4 and peaks["MATH"].median >= scores


def test_a_backend_that_computes_something_else_is_not_timed(monkeypatch):
    monkeypatch.setattr(sdpa_backends, "ROUNDING", -1.0)
    with pytest.raises(WorkbenchError, match="differs from attention"):
        run_experiment("kernels.sdpa_backends", SMALL["kernels.sdpa_backends"], DataSheetBench())
