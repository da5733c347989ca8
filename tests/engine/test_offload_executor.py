"""Claims about a model larger than its device: the plain model's tokens, bytes by formula, nothing above the limit."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading

import pytest
import torch
from conftest import random_decoder, tiny_config

from workbench.errors import WorkbenchError
from workbench.instruments.memory import peak_memory
from workbench.kv import kv_for
from workbench.models.batch import Batch
from workbench.offload import Decoding, Meter, Offloaded, Shape, Shares, plan_within, solve
from workbench.offload import disk as disks
from workbench.offload.budget import DeviceBudget
from workbench.offload.cost_model import two_threads
from workbench.offload.disk import Matrices, check_room, write_matrices
from workbench.offload.executor import computed_bytes
from workbench.offload.machine import at_one_rate
from workbench.offload.placement import DEVICE, DISK, HOST, place, spread
from workbench.offload.traffic import LINKS, READ
from workbench.offload.weights import store

ALL, IN_HOST, ON_DISK = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)
WORK, ROOM = Decoding(prompt_tokens=6, new_tokens=5), 10**8
GPT2 = {"family": "gpt2", "num_kv_heads": 4, "qkv_bias": True, "attention_output_bias": True, "mlp_bias": True}
GROUPED, WINDOW = {}, {"family": "mistral", "sliding_window": 4}


@pytest.fixture(scope="module")
def model():
    return random_decoder(tiny_config(num_layers=3), name="three layers")


def prompts(count: int, length: int = WORK.prompt_tokens) -> list[list[int]]:
    return [[(7 * i + 3 * j + i * j) % 4096 for j in range(length)] for i in range(count)]


@torch.no_grad()
def plain_tokens(model, texts: list[list[int]], count: int) -> list[list[int]]:
    """Each sequence alone, with the whole model in memory."""
    written = []
    for text in texts:
        kv, ids, new = kv_for("contiguous", model), text, []
        for _ in range(count):
            ids = [int(model(Batch.of([ids], first_positions=[kv.lengths.get(0, 0)]), kv)[-1].argmax())]
            new += ids
        written.append(new)
    return written


def offloaded(model, shares: Shares, folder, work=WORK, batch=3, batches=2, limit_bytes=ROOM, **more) -> Offloaded:
    return Offloaded(model, shares, work, batch=batch, batches=batches, limit_bytes=limit_bytes, folder=folder, **more)


# -- the plain model's tokens, and bytes by formula --------------------------------------------------------------

SPLIT = (0.3, 0.3, 0.4)
EVERY = [
    Shares(weights, cache, hidden)
    for weights, cache, hidden in itertools.product(
        (ALL, IN_HOST, ON_DISK, SPLIT), (ALL, IN_HOST, ON_DISK, SPLIT), (ALL, (0.5, 0.5, 0.0))
    )
]


def test_tokens_are_those_of_the_plain_model_and_bytes_those_of_the_formula_wherever_what_lies(model, tmp_path):
    texts = prompts(6)
    expected = plain_tokens(model, texts, 5)
    for shares in EVERY:
        with offloaded(model, shares, tmp_path) as one:
            for _ in range(1 + (shares.cache == SPLIT)):  # the second run finds nothing of the first
                made = one.generate(texts)
                assert made.tokens == expected, shares
                assert made.moved == one.formula(), shares
                assert made.peak_bytes == one.needs.peak <= ROOM
        assert not any(tmp_path.iterdir())


def test_the_formula_by_hand(model, tmp_path):
    """Two layers of 32 · (32 + 16 + 16 + 32 + 3 · 64) values, all matrices on disk, one sequence of 4 + 3 tokens whose
    cache lies on disk too: 16 numbers of each key, in float32."""
    small = random_decoder(tiny_config())
    with offloaded(small, Shares(ON_DISK, ON_DISK, IN_HOST), tmp_path, Decoding(4, 3), 1, 1) as one:
        moved = one.generate(prompts(1, 4)).moved
    layer, row = 4 * 32 * (32 + 16 + 16 + 32 + 3 * 64), 4 * 32
    assert moved == {
        "host → device": 3 * 2 * layer + 3 * 6 * row + 2 * 2 * row,
        "device → host": 3 * 6 * row + 2 * 6 * row + 2 * 2 * row,
        "disk → host": 3 * 2 * layer + 2 * (4 + 5) * row,
        "host → disk": 2 * 6 * row,
    }


@pytest.mark.parametrize("shape", [GPT2, GROUPED, WINDOW], ids=["gpt2", "grouped heads", "window"])
@pytest.mark.parametrize(("batch", "batches", "layers"), [(1, 1, 1), (2, 1, 2), (1, 3, 1), (2, 3, 3)])
def test_other_shapes_and_blocks(shape, batch, batches, layers, tmp_path):
    """One layer and one batch: the only visit of a step must see the token that it wrote in the last one."""
    other = random_decoder(tiny_config(**shape, num_layers=layers))
    texts = prompts(batch * batches)
    expected = plain_tokens(other, texts, 5)
    for shares in (Shares(ON_DISK, ON_DISK, IN_HOST), Shares(SPLIT, SPLIT)):
        with offloaded(other, shares, tmp_path, batch=batch, batches=batches) as one:
            made = one.generate(texts)
            assert made.tokens == expected and made.moved == one.formula()


def test_bfloat16_weights_are_moved_as_such(model, tmp_path):
    half = random_decoder(tiny_config(num_layers=3)).to(torch.bfloat16)
    texts = prompts(6)
    with offloaded(half, Shares(ON_DISK, IN_HOST), tmp_path) as one, offloaded(half, Shares(ALL, ALL), None) as whole:
        made = one.generate(texts)
        assert made.tokens == whole.generate(texts).tokens and made.moved == one.formula()
        assert made.moved[READ] == 5 * sum(p.nbytes for layer in half.layers for p in layer.parameters() if p.dim() > 1)


def test_both_ways_to_read_a_disk_give_the_same(model, tmp_path):
    texts = prompts(6)
    expected = plain_tokens(model, texts, 5)
    for direct in (None, False):
        with offloaded(model, Shares(ON_DISK, ON_DISK), tmp_path, direct=direct) as one:
            assert one.how_disk == "posix_fadvise" or direct is None
            assert one.generate(texts).tokens == expected


def test_a_filesystem_without_o_direct_is_read_in_the_other_way(model, tmp_path, monkeypatch):
    real = os.open

    def without(path, flags, *more, **other):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more, **other)

    monkeypatch.setattr(disks.os, "open", without)
    with offloaded(model, Shares(ON_DISK, ON_DISK), tmp_path) as one:
        assert one.how_disk == "posix_fadvise"
        assert one.generate(prompts(6)).tokens == plain_tokens(model, prompts(6), 5)
    with pytest.raises(WorkbenchError, match=r"cannot open .* with O_DIRECT"):
        offloaded(model, Shares(ON_DISK, ALL), tmp_path, direct=True)
    assert not any(tmp_path.iterdir())


def test_the_next_layer_comes_while_one_is_computed(model):
    """While a layer computes, the load of the next has been asked for, and of no other."""
    with offloaded(model, Shares(IN_HOST, ALL), None) as one:
        weights, seen = one._weights, []
        real = one.model.run_layer
        one.model.run_layer = lambda index, *rest: (seen.append((index, weights._coming)), real(index, *rest))[1]
        one.generate(prompts(6))
    ahead = [(index, coming and coming[0]) for index, coming in seen[::2]]
    assert ahead == [(0, 1), (1, 2), (2, 0)] * 4 + [(0, 1), (1, 2), (2, None)]
    slots = [coming[1] for _, coming in seen[::2] if coming]
    assert all(a != b for a, b in itertools.pairwise(slots))


def test_weights_of_a_layer_are_brought_once_for_a_whole_block(model):
    with offloaded(model, Shares(IN_HOST, ALL), None, batch=1, batches=6) as six:
        many = six.generate(prompts(6)).moved
    with offloaded(model, Shares(IN_HOST, ALL), None, batch=1, batches=1) as one:
        assert one.generate(prompts(1)).moved == many


# -- the device's limit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [GPT2, GROUPED, {"num_heads": 8, "num_kv_heads": 8, "intermediate_size": 32}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [ALL, IN_HOST])
def test_the_budget_sees_all_that_torch_allocates(shape, dtype, hidden, tmp_path):
    """torch's own count of allocations is the oracle: while everything is made, it is what the budget holds (all
    that was put into the host or on disk is shared with the model, or memory of the operating system); while a block
    is computed, no more than was entered for hidden states and for what is computed."""
    made = random_decoder(tiny_config(**shape, num_layers=4)).to(dtype)
    texts = prompts(4, 48)
    with peak_memory() as making:
        one = offloaded(made, Shares((0.5, 0.25, 0.25), (0.5, 0.0, 0.5), hidden), tmp_path, Decoding(48, 3), 2, 2)
    with one:
        held = one.budget.bytes_held
        assert held <= making.bytes <= held + 16 * 1024  # rotary frequencies, and views' small change
        with peak_memory() as running:
            result = one.generate(texts)
        in_host = 0 if hidden == ALL else 2 * 2 * 48 * one.needs.row
        cache_of_prompts = 2 * 48 * 2 * 4 * made.config.num_kv_heads * made.config.head_dim  # on its way to disk
        entered = result.peak_bytes - held
        assert 0.15 * entered < running.bytes <= entered + in_host + cache_of_prompts
        assert result.peak_bytes == one.needs.peak


def test_a_kept_tensor_that_is_not_entered_is_seen(model, monkeypatch):
    """The claim above can fail: a budget in which half of the weights are entered holds less than torch allocates."""
    real = DeviceBudget.take
    monkeypatch.setattr(DeviceBudget, "take", lambda self, name, size: real(self, name, size // 2))
    with peak_memory() as making:
        one = offloaded(model, Shares(ALL, ALL), None)
    one.close()
    assert making.bytes > one.budget.bytes_held + 16 * 1024


def test_what_is_computed_grows_with_the_rows():
    config = tiny_config()
    assert computed_bytes(config, 512, 1, 4) == 2 * computed_bytes(config, 256, 1, 4) > computed_bytes(config, 1, 1, 4)


def test_a_budget_refuses_what_goes_beyond_its_limit_and_enters_nothing():
    budget = DeviceBudget(100)
    budget.take("weights", 60)
    with budget.holding("hidden", 40):
        assert budget.bytes_held == budget.peak == 100
        with pytest.raises(WorkbenchError, match="has 100 bytes and would hold 101: weights 60, hidden 40, more 1"):
            budget.take("more", 1)
    assert budget.held == {"weights": 60} and budget.peak == 100


def test_the_least_limit_is_enough_and_one_byte_less_is_refused_with_the_numbers(model, tmp_path):
    shares = Shares(IN_HOST, IN_HOST)
    with offloaded(model, shares, tmp_path) as one:
        needs = one.needs
    with offloaded(model, shares, tmp_path, limit_bytes=needs.peak) as one:
        assert one.generate(prompts(6)).tokens == plain_tokens(model, prompts(6), 5)
        assert one.budget.peak == needs.peak
    with pytest.raises(WorkbenchError, match=f"{needs.computed:,} it would hold {needs.peak:,}; put less"):
        offloaded(model, shares, tmp_path, limit_bytes=needs.peak - 1)
    layer = needs.staging // 2
    with pytest.raises(
        WorkbenchError, match=rf"two staging buffers take {2 * layer:,} \({layer:,} .* give at least {needs.peak:,}"
    ):
        offloaded(model, shares, tmp_path, limit_bytes=needs.weights + needs.staging - 1)


# -- whole tensors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shares", [ALL, IN_HOST, ON_DISK, SPLIT, (0.5, 0.0, 0.5), (0.05, 0.95, 0.0), (0.0, 1 / 3, 2 / 3)]
)
def test_shares_of_the_model_are_right_to_a_matrix_and_the_device_never_gets_more(shares):
    deep = random_decoder(tiny_config(num_layers=8))
    placed = place(deep, Shares(shares, shares, ALL), batch=5, batches=4)
    whole = sum(map(placed.weight_bytes, (DEVICE, HOST, DISK)))
    largest = 32 * 64 * 4
    for tier, share in zip((DEVICE, HOST, DISK), shares):
        assert abs(placed.weight_bytes(tier) - share * whole) <= largest
        assert share or not placed.weight_bytes(tier)
    assert placed.weight_bytes(DEVICE) <= shares[0] * whole + 1e-6
    for count, share in zip(placed.sequences(), shares):
        assert abs(count - 20 * share) <= 1 and all(min(split) >= 0 and sum(split) == 5 for split in placed.cache)
    came = placed.shares()
    assert Shares.checked(*came) == came and came.hidden == ALL


def test_what_is_spread_goes_to_who_is_furthest_behind():
    assert spread([1] * 4, (0.5, 0.5, 0.0)) == [HOST, DEVICE, HOST, DEVICE]
    assert spread([3, 1], (0.25, 0.75, 0.0)) == [HOST, DEVICE]


# -- this machine's constants, and a plan that fits -----------------------------------------------------------------


@pytest.fixture(scope="module")
def square():
    """As many key heads as query heads, as the cost model counts."""
    return random_decoder(tiny_config(num_layers=8, num_kv_heads=4, intermediate_size=128))


def names(model) -> list[str]:
    return [name for name, value in model.named_parameters() if value.dim() > 1]


def measured(square, folder, device_bytes: float, **room: float):
    sizes = {"host_bytes": room.get("host", ROOM), "disk_bytes": room.get("disk", ROOM)}
    with contextlib.closing(store(square, names(square), folder)) as stored:
        return Meter(square, stored, folder, budget_s=0.0).machine(WORK, batch=2, device_bytes=device_bytes, **sizes)


def test_constants_are_measured_without_a_file_left_and_one_rate_is_that_of_many_rows(square, tmp_path):
    machine = measured(square, tmp_path, ROOM)
    assert not any(tmp_path.iterdir()) and machine.usable == machine.decode_weights == 1
    one, read = (at_one_rate(machine, with_bandwidth=given) for given in (False, True))
    assert one.decode_flops == read.decode_flops == machine.prompt_flops
    assert one.device_read is None and read.device_read == machine.device_read


def test_a_measured_rate_is_bytes_or_flops_over_the_seconds_of_the_operation(square, tmp_path, monkeypatch):
    """Every operation takes 2 s: 32 · (4 · 32 + 3 · 128) values of a layer, 2 sequences of 6 + 5 / 2 tokens."""
    monkeypatch.setattr(Meter, "_seconds", lambda self, run, beside=None: (run(), 2.0)[1])
    monkeypatch.setattr(Meter, "_attention", lambda self, batch, work: (3.0, 5.0))
    machine, values = measured(square, tmp_path, ROOM), 32 * (4 * 32 + 3 * 128)
    assert machine.host_to_device == machine.disk_to_host == machine.device_read == 4 * values / 2
    assert machine.prompt_flops == 12 * 2 * values / 2 and machine.decode_flops == 2 * 2 * values / 2
    assert machine.cache_to_host == machine.prompt_cache_to_disk == 2 * machine.hidden_to_host == 12 * 2 * 4 * 32 / 2
    assert machine.decode_to_disk == 2 * 2 * 4 * 32 / 2
    assert machine.outside_s == 2 / 2
    assert machine.prompt_attention_flops == pytest.approx(4 * 2 * 36 * 32 / 3)
    assert machine.decode_attention_flops == pytest.approx(4 * 2 * 8.5 * 32 / 5)
    assert machine.host_attention_flops == pytest.approx(4 * 2 * 8.5 * 32 / (5 + 2))


def test_a_plan_made_to_fit_runs_within_the_limit(square, tmp_path):
    """The program's own plan of the same limit does not: the cost model knows no embedding, and no whole tensors."""
    whole = sum(p.nbytes for p in square.parameters())
    limit, texts = whole - 150_000, prompts(4)
    machine = measured(square, tmp_path, limit, host=100_000)
    plan = plan_within(square, machine, WORK, batch=2, batches=2)
    assert 0 < plan.shares.weights[0] < 1 and plan.shares.weights[2] > 0
    with offloaded(square, plan.shares, tmp_path, batch=2, batches=2, limit_bytes=limit) as one:
        made = one.generate(texts)
        assert made.tokens == plain_tokens(square, texts, 5) and made.peak_bytes <= limit
    unaware = solve(machine, Shape.of(square.config, 4), WORK, batch=2, batches=2, schedule=two_threads(machine))
    with pytest.raises(WorkbenchError, match="is too small"):
        offloaded(square, unaware.shares, tmp_path, batch=2, batches=2, limit_bytes=limit)


def test_where_no_plan_fits_the_numbers_are_said(square, tmp_path):
    with pytest.raises(
        WorkbenchError, match=r"does not fit: the device has 700,000 .* last plan takes .* on the device"
    ):
        plan_within(square, measured(square, tmp_path, 700_000), WORK, batch=2, batches=2)
    with pytest.raises(WorkbenchError, match=r"does not fit: .* the host 1,000, the disk 1,000; take a smaller"):
        plan_within(square, measured(square, tmp_path, 100_000, host=1000, disk=1000), WORK, batch=2, batches=2)


# -- what goes wrong --------------------------------------------------------------------------------------------


@pytest.fixture
def stored(model, tmp_path):
    tensors = {name: value for name, value in model.named_parameters() if value.dim() > 1}
    write_matrices(tmp_path / "matrices.safetensors", tensors)
    return tmp_path / "matrices.safetensors", tensors


def test_matrices_come_back_bit_for_bit(stored):
    path, tensors = stored
    for direct in (None, False):
        disk = Matrices(path, direct)
        for name, tensor in tensors.items():
            memory = disks.Memory(disk.room(name))
            assert torch.equal(disk.tensor(name, memory, 0)[0], tensor)
        disk.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:-1], "has .* bytes, and its header says .* cut or added to"),
        (lambda data: data + b"x", "cut or added to"),
        (lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:], "checksum .* was written with them"),
        (lambda data: data[:4], "no .safetensors file: a header of"),
        (lambda data: b"\xff" * 8 + data[8:], "no .safetensors file: a header of"),
        (lambda data: data[:8] + b"[" + data[9:], "no .safetensors file of numbers"),
        (lambda data: data.replace(b'"F32"', b'"F16"', 1), "no .safetensors file of numbers"),
        (lambda data: data.replace(b'"F32"', b'"I09"', 1), "no .safetensors file of numbers"),
    ],
)
def test_a_file_that_was_cut_or_changed_is_refused_when_it_is_opened(stored, change, said):
    path, _ = stored
    path.write_bytes(change(path.read_bytes()))
    open_files = set(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkbenchError, match=said):
        Matrices(path)
    assert set(os.listdir("/proc/self/fd")) == open_files
    with pytest.raises(WorkbenchError, match="cannot open the matrices"):
        Matrices(path.with_name("none"))


@pytest.mark.parametrize(("batch", "batches"), [(10**12, 1), (1, 10**12), (1001, 1000)])
def test_a_block_of_absurdly_many_sequences_is_refused_at_once(model, batch, batches):
    with pytest.raises(WorkbenchError, match=r"is more than 1,000,000 sequences; take fewer"):
        offloaded(model, Shares(ALL, ALL, ALL), None, batch=batch, batches=batches)


def test_matrices_that_are_stored_once_serve_many_runs_and_those_of_another_model_none(model, tmp_path):
    texts = prompts(6)
    with contextlib.closing(store(model, names(model), tmp_path)) as stored:
        assert not any(tmp_path.iterdir())
        for shares in (Shares(ON_DISK, ALL), Shares(SPLIT, ALL)):
            with offloaded(model, shares, None, stored=stored) as one:
                assert one.generate(texts).tokens == plain_tokens(model, texts, 5)
        deeper, half = random_decoder(tiny_config(num_layers=4)), random_decoder(model.config).to(torch.bfloat16)
        with pytest.raises(WorkbenchError, match=r"layers\.3\..* the stored matrices have no such tensor"):
            offloaded(deeper, Shares(ON_DISK, ALL), None, stored=stored)
        with pytest.raises(WorkbenchError, match=r"is torch\.bfloat16 .* the stored matrices have torch\.float32"):
            offloaded(half, Shares(ON_DISK, ALL), None, stored=stored)


def test_a_file_that_is_cut_while_it_is_read_ends_the_run_with_its_name(model, tmp_path):
    with offloaded(model, Shares(ON_DISK, ALL), tmp_path) as one:
        os.ftruncate(os.open(f"/proc/self/fd/{one._weights._disk._file._handle}", os.O_RDWR), 5000)
        with pytest.raises(WorkbenchError, match=r"matrices\.safetensors ends after .* it was cut"):
            one.generate(prompts(6))


def test_a_disk_without_room_is_refused_before_anything_is_written(model, tmp_path, monkeypatch):
    monkeypatch.setattr(disks.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 16 << 20}))
    for shares in (Shares(ON_DISK, ALL), Shares(ALL, ON_DISK)):
        with pytest.raises(WorkbenchError, match=r"bytes are to lie on disk and 16,777,216 are free in"):
            offloaded(model, shares, tmp_path)
    assert not any(tmp_path.iterdir())
    with offloaded(model, Shares(IN_HOST, IN_HOST), tmp_path):
        pass
    with pytest.raises(WorkbenchError, match="is no folder"):
        check_room(tmp_path / "none", 1)


class Interrupted(BaseException):
    """As KeyboardInterrupt is."""


def test_an_interrupted_run_leaves_no_file_and_no_thread_and_the_next_is_right(model, tmp_path):
    before = set(threading.enumerate())
    texts, expected = prompts(6), plain_tokens(model, prompts(6), 5)
    with offloaded(model, Shares(ON_DISK, SPLIT, (0.5, 0.5, 0.0)), tmp_path) as one:
        for calls in (1, 4, 9, 20):
            left, real = [calls], type(one.model).run_layer

            def interrupted(*given, left=left, real=real):
                left[0] -= 1
                if not left[0]:
                    raise Interrupted
                return real(one.model, *given)

            one.model.run_layer = interrupted
            with pytest.raises(Interrupted):
                one.generate(texts)
            del one.model.run_layer
            assert set(one.budget.held) == {"weights", "staging", "keys and values"}
            made = one.generate(texts)
            assert made.tokens == expected and made.moved == one.formula()
    one.close()
    assert not any(tmp_path.iterdir()) and set(threading.enumerate()) == before


def test_who_is_closed_or_busy_in_another_thread_says_so(model):
    one = offloaded(model, Shares(IN_HOST, ALL), None)
    run_layer, said = one.model.run_layer, []

    def other(*given):
        if not said:
            with pytest.raises(WorkbenchError, match="another thread generates") as refused:
                one.generate(prompts(6))
            said.append(refused.value)
        return run_layer(*given)

    one.model.run_layer = other
    assert one.generate(prompts(6)).tokens == plain_tokens(model, prompts(6), 5) and said
    one.close()
    one.close()
    with pytest.raises(WorkbenchError, match="was closed"):
        one.generate(prompts(6))


def test_what_fails_while_it_is_made_leaves_nothing(model, tmp_path, monkeypatch):
    before, open_files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))

    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disks.os, "posix_fallocate", fails)
    with pytest.raises(WorkbenchError, match=r"cannot write .*make room on the disk"):
        offloaded(model, Shares(ON_DISK, ON_DISK), tmp_path)
    assert not any(tmp_path.iterdir()) and set(threading.enumerate()) == before
    assert set(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda m: offloaded(m, Shares((0.5, 0.6, 0.0), ALL), None), "weights lie on device, host and disk in three"),
        (lambda m: offloaded(m, Shares(ALL, ALL, ON_DISK), None), "hidden states lie on the device or in the host"),
        (lambda m: offloaded(m, Shares(ON_DISK, ALL), None), "name a folder"),
        (lambda m: offloaded(m, Shares(ALL, ALL), None, batch=0), "batch must be"),
        (lambda m: offloaded(m, Shares(ALL, ALL), None, limit_bytes=0), "limit_bytes must be"),
        (lambda m: offloaded(m, Shares(ALL, ALL), None, Decoding(250, 7)), "more than the 256"),
        (lambda m: offloaded("stdlib-10m", Shares(ALL, ALL), None), "takes a Decoder"),
        (lambda m: offloaded(m, Shares(ALL, ALL), None).generate(prompts(5)), "got 5 prompts of 6 tokens"),
        (lambda m: offloaded(m, Shares(ALL, ALL), None).generate(prompts(6, 7)), "got 6 prompts of 7 tokens"),
        (lambda m: offloaded(m, Shares(ALL, ALL), None).generate([[4096] * 6] * 6), "from 0 to 4095"),
        (lambda m: offloaded(m, Shares(ALL, ALL), None).generate([None] * 6), "prompts are lists of token ids"),
        (
            lambda m: offloaded(random_decoder(tiny_config(kv_sources=(0, 0))), Shares(ALL, ALL), None),
            "has layers that attend over another's keys",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(model, make, said):
    with pytest.raises(WorkbenchError, match=said):
        make(model)


def test_links_are_named_alike_everywhere():
    assert LINKS == ("host → device", "device → host", "disk → host", "host → disk")
