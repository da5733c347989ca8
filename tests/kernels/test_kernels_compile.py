"""Claims about what the compiler makes of the kernels for an H200: all of them compile, fit, keep their numbers in
registers, and multiply on tensor cores. No GPU is needed for that; how fast they are is not said by it."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from functools import cache

import growing_texts
import pytest
import torch
from kernel_claims import on_each_device

from workbench.errors import WorkbenchError
from workbench.kernels import KERNELS, compiling, launch, ranges, tuning
from workbench.kernels import flash_decoding as fd

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")
BRIEF = [case for case in compiling.cases() if case.brief]
NAMES = [case.name for case in BRIEF]
REGISTERS = 65_536  # of a multiprocessor
SPILLED = 8  # bytes a thread that a kernel of 16-bit types may go through memory with; 0 but for those listed here
SPILLS = {"_latent_decode_tiles", "_paged_quantized_tiles"}  # 64 heads of 512 sums; scales of 8-bit codes
WHOLE_LOADS_NOT_NEEDED = {  # what they read is small, or a row of another length
    "_best_part",
    "_tally",
    "_merge_online",
    "_merge_blocks",
    "_sum_blocks",
}


@cache
def table() -> dict:
    """Compiled once, in a process in which Triton does not interpret."""
    return compiling.table(brief=True)


def made(name: str) -> list[dict]:
    found = table()[name]
    assert isinstance(found, list), f"{name}: {found}"
    return found


def test_every_operation_is_compiled():
    operations = {"sampling": {"argmax", "sample"}, "flash_decoding": {"flash_decode"}}
    wanted = set().union(*(operations.get(name, {name}) for name in KERNELS))
    assert wanted == {case.operation for case in compiling.cases()} == {case.operation for case in BRIEF}


def test_every_kernel_of_every_module_is_compiled():
    """One that somebody adds belongs into a case. Functions that ask for no program_id are parts of kernels."""
    kernels = {
        found.fn.__name__
        for module in KERNELS.values()
        for found in vars(module).values()
        if type(found).__name__ in ("InterpretedFunction", "JITFunction")
        and "tl.program_id" in inspect.getsource(found.fn)
    }
    assert len(kernels) > 30
    # parts that ask for one all the same
    kernels -= {"store_outputs", "store_product", "store_gated", "store_part", "all_parts", "weight_rows"}
    kernels -= {"end_product", "end_few_rows"}
    assert kernels - {one["kernel"] for name in NAMES for one in made(name)} == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_call_compiles_and_what_it_launches_fits_the_device(name):
    kernels = made(name)
    assert kernels
    for one in kernels:
        assert one["shared"] <= compiling.DEVICES["9.0"].shared_memory_per_block_optin, one
        assert 0 < one["registers"] <= 255 and one["registers"] * 32 * one["warps"] <= REGISTERS, one


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("float32")])
def test_numbers_stay_in_registers(name):
    for one in made(name):
        assert one["spilled"] <= (SPILLED if one["kernel"] in SPILLS else 0), one


def test_sixty_four_rows_or_more_are_multiplied_by_hoppers_tensor_cores():
    wanted = {
        "_flash_kernel",
        "_flash_all_keys_kernel",
        "_paged_prefill_kernel",
        "_latent_decode_tiles",
        "_latent_decode_transposed",
        "matvec_many_rows",
        "matvec_int4_many_rows",
        "matvec_int8_many_rows",
        "matvec_int8_interleaved",
        "_tiles_of_each",
        "_tiles_there_are",
    }
    of_many_rows = {
        one["kernel"]: one
        for name in NAMES
        for one in made(name)
        if one["tensor_cores"]
        and max(one["constants"].get(at, 0) for at in ("ROWS", "HEADS", "BLOCK_OUT", "TOKENS")) >= 64
        and not (one["kernel"] == "_latent_decode_tiles" and one["constants"]["HEADS"] < 64)
        and not (one["kernel"] == "_paged_quantized_tiles" and one["constants"]["ROWS"] < 64)
    }
    assert set(of_many_rows) == wanted
    assert {kernel for kernel, one in of_many_rows.items() if one["tensor_cores"] != "wgmma"} == set()


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n.startswith(("flash_decode v3", "paged_decode v3", "paged_quantized v3"))]
)
def test_the_heads_of_a_group_are_multiplied_on_tensor_cores(name):
    assert {one["tensor_cores"] for one in made(name) if not one["kernel"].startswith("_merge")} == {"mma"}


def test_float32_is_never_rounded_to_ten_bits():
    of_float32 = [one for name in NAMES if name.endswith("float32") for one in made(name)]
    assert len(of_float32) >= 4
    assert [one["kernel"] for one in of_float32 if one["rounded"]] == []


@pytest.mark.parametrize(
    "name",
    [n for n in NAMES if n.startswith(("flash_", "paged_", "latent_")) and " v1 " not in n and n.endswith("bfloat16")],
)
def test_the_next_keys_are_under_way_while_these_are_multiplied(name):
    assert all(one["asynchronous"] for one in made(name) if not one["kernel"].startswith("_merge"))


def test_what_is_long_is_read_sixteen_bytes_at_a_time():
    narrow = {one["kernel"] for name in NAMES for one in made(name) if one["load"] < 16}
    assert narrow <= WHOLE_LOADS_NOT_NEEDED


def test_an_error_of_the_compiler_is_told_and_the_others_are_compiled(monkeypatch):
    def compiled(case, capability):
        if case is BRIEF[0]:
            raise ValueError("no such layout")
        return []

    monkeypatch.setattr(compiling, "compiled", compiled)
    assert [found for _, found in compiling.rows(BRIEF[:2])] == ["ValueError: no such layout", []]


def test_other_names_and_capabilities_are_refused():
    with pytest.raises(WorkbenchError, match=r"sofmax.*softmax"):
        compiling.main(["sofmax"])
    with pytest.raises(WorkbenchError, match=r"7\.5"), compiling.described("7.5"):
        pass


def test_dependents_wait_and_let_their_own_begin_and_all_others_do_neither():
    """griddepcontrol, of compute capability 9.0: one that is launched as a dependent and does not wait reads what is
    not yet written."""
    dependents = made("matvec v3 dependent launches bfloat16")
    assert {one["kernel"] for one in dependents} == {
        "matvec_few_rows",
        "matvec_many_rows",
        "sum_of_splits",
        "gated_sum_of_splits",
        "_norm_one_pass",
        "_turn",
        "_gated",
        "_paged_decode_kernel",
        "_decode_kernel",
        "_merge_blocks",
    }
    able = [one["dependent"] for one in dependents if one["kernel"] != "_merge_blocks"]
    assert set(able) == {"launched, waits, lets begin"}
    others = [one for name in NAMES if "dependent" not in name for one in made(name)]
    assert {one["dependent"] for one in others} == {""}


@pytest.mark.parametrize(
    ("kept", "wanted"),
    [  # one with a single split and one with several; of prompts, times four sizes of a tile
        ("keys and values", {"_paged_decode_kernel": 2, "_merge_blocks": 2, "_paged_prefill_kernel": 8}),
        ("latents", {"_latent_decode_transposed": 2, "_merge_blocks": 2}),
        ("int8", {"_paged_quantized_tiles": 2, "_merge_blocks": 2}),
    ],
)
def test_a_server_of_growing_texts_has_few_variants_compiled(kept, wanted):
    """With splits as a constant they were 18, 10 and 62; of latents and int8 6 and 10."""
    command = [sys.executable, growing_texts.__file__, kept]
    environment = {**os.environ, launch.INTERPRET: "0"}
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout) == wanted


@pytest.mark.skipif(not launch.INTERPRETED, reason="kernels are compiled here")
def test_where_kernels_are_interpreted_nothing_is_compiled():
    code = "from workbench.kernels.compiling import cases, compiled; compiled(cases()[0])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert answer.returncode and "start Python with TRITON_INTERPRET=0" in answer.stderr


@on_each_device
def test_inside_instead_nothing_is_launched(device):
    from workbench.kernels import swiglu

    asked = []
    x = torch.full((2, 8), 3.0, device=device)
    out = torch.full((2, 4), -1.0, device=device)
    with launch.instead(lambda kernel, grid, arguments, options: asked.append((grid, options["BLOCK"]))):
        swiglu.swiglu(x, out=out)
    assert [grid for grid, _ in asked] == [(2, 1)] and bool((out == -1.0).all())
    swiglu.swiglu(x, out=out)
    assert len(asked) == 1 and not bool((out == -1.0).any())


@pytest.mark.parametrize("rows", (1, 32))
@pytest.mark.parametrize(("name", "most"), [("matvec_int4 v3", 6), ("matvec_int8 v4", 6)])
def test_a_step_has_barriers_for_its_codes_and_x_alone(name, most, rows):
    """Reduced among threads the inputs of a group took two of six in each step of 128 inputs of int4, three of six of
    int8's. Scale and zero apart, in two bytes each, took two of four: nothing of two bytes is asked for ahead."""
    assert made(f"{name} N={rows} bfloat16")[0]["barriers"] <= most


def test_as_many_programs_are_resident_as_the_choice_of_splits_believes():
    """It counts registers and shared memory before anything is compiled."""
    cpu, in_16_bits = torch.device("cpu"), torch.bfloat16
    decode = tuning.Config.of(num_warps=4, num_stages=3, KEYS=64)
    prefill = tuning.Config.of(num_warps=8, num_stages=5, KEYS=64)
    believed = {
        "flash_decode v3 D=128 bfloat16": fd.resident(decode, 128, in_16_bits, cpu, 16, 2),
        "paged_decode v3 D=128 bfloat16": fd.resident(decode, 128, in_16_bits, cpu, 16, 2),
        "paged_prefill v3 D=128 n=1024 bfloat16": fd.resident(prefill, 128, in_16_bits, cpu, 128, 2),
    }
    compiled = {}
    for name in believed:
        one = made(name)[0]
        held = {"warps": one["warps"], "registers": one["registers"], "shared": one["shared"]}
        compiled[name] = ranges.resident_programs(cpu, **held)
    assert compiled == believed and set(believed.values()) == {1, 3}


def test_an_older_gpu_takes_its_own_instructions_and_has_less_shared_memory():
    found = [one for kernels in compiling.table("matvec", brief=True, capability="8.0").values() for one in kernels]
    # 16 bits, 32 bits
    assert {one["tensor_cores"] for one in found if one["kernel"] == "matvec_many_rows"} == {"mma", ""}
    assert max(one["shared"] for one in found) <= compiling.DEVICES["8.0"].shared_memory_per_block_optin
