"""Claims about the instruments: what is measured, kept, counted, and how it stops."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import threading
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path

import pytest
import torch

from workbench.errors import WorkbenchError
from workbench.instruments import bench as benches
from workbench.instruments import device as devices
from workbench.instruments import dispatch, doctor, memory, passing, records, timing
from workbench.instruments.bench import Bench
from workbench.instruments.device import PUBLISHED, Ceilings
from workbench.instruments.records import Measurement
from workbench.instruments.timing import MEASUREMENT_LOCK, Stopped, measure, measure_pair


def a_measurement(**changes) -> Measurement:
    values = {"name": "a", "settings": {"length": 3}, "samples": [3.0, 1.0, 2.0], "unit": "s"}
    return Measurement(**{**values, **changes})


# -- records -------------------------------------------------------------------------------------------------


def test_a_measurement_survives_its_file_unchanged(tmp_path):
    kept = [
        a_measurement(counts={"rows": 7}, predicted=0.5, limit="compute", check="seen", commit="c0ffee", date="d"),
        a_measurement(device={"name": "x", "threads": 2}, versions={"triton": None}),
    ]
    file = tmp_path / "new" / "archive.json"
    records.write_measurements(file, kept)
    assert records.read_measurements(file) == kept
    assert [set(entry) for entry in json.loads(file.read_text())] == [set(kept[0].to_dict())] * 2


def test_median_and_spread_interpolate_between_samples():
    m = a_measurement(samples=[float(i) for i in range(11)])
    assert (m.median, m.spread) == (5.0, (1.0, 9.0))
    assert a_measurement(samples=[1.0, 2.0]).spread == (1.1, 1.9)
    assert a_measurement(samples=[4.0]).spread == (4.0, 4.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": []}, "samples"),
        ({"samples": [math.nan]}, "samples"),
        ({"samples": [True]}, "samples"),
        ({"counts": {"rows": math.inf}}, "counts"),
        ({"predicted": math.nan}, "predicted"),
        ({"limit": "bandwith"}, "limit"),
        ({"settings": {"kv": object()}}, "JSON"),
        ({"settings": {"p": math.nan}}, "JSON"),
        ({"unit": None}, "unit"),
    ],
)
def test_a_measurement_that_json_or_a_reader_could_not_trust_is_refused(change, words):
    with pytest.raises(WorkbenchError, match=words):
        a_measurement(**change)


def test_an_entry_with_a_key_too_many_or_too_few_is_refused_with_its_name():
    entry = a_measurement().to_dict()
    with pytest.raises(WorkbenchError, match="did you mean 'samples'"):
        Measurement.from_dict({**entry, "sampels": []})
    del entry["unit"]
    with pytest.raises(WorkbenchError, match="lacks unit"):
        Measurement.from_dict(entry)


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"name": "a"}]', None])
def test_a_broken_archive_is_refused_with_its_file_name(tmp_path, text):
    file = tmp_path / "archive.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(WorkbenchError, match=r"archive\.json"):
        records.read_measurements(file)


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    file = tmp_path / "archive.json"
    records.write_measurements(file, [a_measurement()])

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        records.write_measurements(file, [])
    assert records.read_measurements(file) == [a_measurement()]
    assert list(tmp_path.iterdir()) == [file]


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_the_commit_is_read_from_branches_packed_branches_detached_heads_and_worktrees(tmp_path):
    git = tmp_path / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert records.git_commit(tmp_path) is None  # no commit yet
    (git / "packed-refs").write_text(f"# pack-refs\n{'f' * 40} refs/heads/not-main\n{COMMIT} refs/heads/main\n")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    assert records.git_commit(tmp_path / "deep" / "er") == COMMIT
    (git / "refs" / "heads" / "main").write_text("a" * 40 + "\n")
    assert records.git_commit(tmp_path) == "a" * 40  # a loose ref is newer than a packed one
    (git / "HEAD").write_text("b" * 40 + "\n")
    assert records.git_commit(tmp_path) == "b" * 40

    tree, inner = tmp_path / "tree", git / "worktrees" / "tree"
    inner.mkdir(parents=True)
    tree.mkdir()
    (tree / ".git").write_text(f"gitdir: {inner}\n")
    (inner / "HEAD").write_text("ref: refs/heads/main\n")
    (inner / "commondir").write_text("../..\n")
    assert records.git_commit(tree) == "a" * 40


# -- timing --------------------------------------------------------------------------------------------------


def test_every_repeat_is_timed_and_no_warm_up_is():
    calls = []
    samples = measure(lambda: calls.append(1), repeats=4, warmup=2)
    assert len(calls) == 6 and len(samples) == 4 and all(s >= 0 for s in samples)


def test_a_comparison_alternates_and_takes_the_median_of_paired_ratios():
    order = []
    measure_pair(lambda: order.append("A"), lambda: order.append("B"), repeats=3, warmup=1)
    assert order == ["A", "B"] * 4
    drifting = timing.Paired(a_s=[2.0, 20.0, 200.0, 3.0], b_s=[1.0, 10.0, 100.0, 1.0])
    assert drifting.median_ratio == 2.0 and drifting.p10 == 2.0 and drifting.p90 == pytest.approx(2.7)


@pytest.mark.parametrize("runs", [{"repeats": 0}, {"repeats": 1.5}, {"repeats": True}, {"repeats": 1, "warmup": -1}])
def test_impossible_numbers_of_runs_are_refused_before_anything_runs(runs):
    for clock in (lambda f, **k: measure(f, **k), lambda f, **k: measure_pair(f, f, **k)):
        with pytest.raises(WorkbenchError, match="at least"):
            clock(lambda: pytest.fail("it ran"), **runs)


def test_stop_ends_a_measurement_between_two_runs():
    bench, calls = Bench(), []

    def work():
        calls.append(1)
        if len(calls) == 3:
            bench.stop.set()

    with pytest.raises(Stopped):
        bench.measure(work, repeats=100)
    assert len(calls) == 3
    with pytest.raises(Stopped):
        bench.measure_pair(work, work, repeats=1)
    assert len(calls) == 3 and MEASUREMENT_LOCK.acquire(blocking=False)
    MEASUREMENT_LOCK.release()


def test_two_threads_never_time_at_once():
    inside, seen = [], []

    def work():
        inside.append(1)
        seen.append(len(inside))
        threading.Event().wait(0.01)
        inside.pop()

    threads = [threading.Thread(target=lambda: measure(work, repeats=5)) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert seen == [1] * 18


def test_waiting_for_another_measurement_can_be_stopped():
    bench, ended = Bench(), threading.Event()

    def wait():
        try:
            bench.measure(lambda: pytest.fail("it ran beside another"), repeats=1)
        except Stopped:
            ended.set()

    with timing.exclusive():
        thread = threading.Thread(target=wait)
        thread.start()
        assert not ended.wait(0.2)
        bench.stop.set()
        assert ended.wait(5)
    thread.join()


# -- memory --------------------------------------------------------------------------------------------------


def test_peak_memory_is_the_most_held_at_once_to_the_byte():
    before = torch.ones(1000)
    with memory.peak_memory() as peak:
        a = torch.ones(250)  # 1,000 bytes
        b = a + a  # 2,000 together
        del a
        torch.ones(500).sum()  # 1,000 + 2,000 and the sum's 4
        del b
    assert peak.bytes == 3004
    with memory.peak_memory() as peak:
        before = torch.ones(100)  # made before the old 4,000 bytes are let go
    assert peak.bytes == 400 and len(before) == 100


def test_garbage_from_before_is_not_given_back_in_the_middle():
    """A collection inside would make the peak smaller by what it frees."""
    threshold = gc.get_threshold()
    gc.set_threshold(100_000)  # none before the block begins
    try:
        with memory.peak_memory():  # of blocks from before its first use torch knows no size
            for _ in range(20):
                ring = [torch.ones(1000)]
                ring.append(ring)
        del ring
        with memory.peak_memory() as peak:
            gc.set_threshold(1)
            kept = [torch.ones(100) for _ in range(10)]
        assert gc.isenabled()
    finally:
        gc.set_threshold(*threshold)
    assert peak.bytes == 4000 and len(kept) == 10


def test_what_was_there_before_lowers_nothing():
    """The profiler gives back the size that it once saw at an address, whoever lies there now."""
    with memory.peak_memory():
        old = [torch.empty(250) for _ in range(50)]  # 1,000 bytes each
    known = {one.data_ptr() for one in old}
    del old
    before = [torch.empty(249) for _ in range(50)]
    assert any(one.data_ptr() in known for one in before)
    with memory.peak_memory() as peak:
        before.clear()
        kept = torch.empty(10)
    assert peak.bytes == 40 and len(kept) == 10
    assert memory.highest_level([-1000, 500, -500, -500, 300, 400, -300, 200]) == 700


def test_bytes_are_written_so_that_people_can_read_them_and_say_which_unit():
    shown = {0: "0 B", 999: "999 B", 12_345: "12.3 kB", 999_600: "1.00 MB", 1_342_177_280: "1.34 GB", 2e15: "2000 TB"}
    assert {n: memory.readable_bytes(n) for n in shown} == shown
    assert memory.readable_bytes(1_342_177_280, binary=True) == "1.25 GiB"
    assert memory.readable_bytes(512 << 10, binary=True) == "512 KiB"


def test_free_memory_respects_the_container_and_a_refusal_names_both_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available_bytes() > 1000
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(memory, "_MEMINFO", tmp_path / "not-linux")
        assert memory.available_bytes() > 1000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes() > 1000
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    assert memory.available_bytes() == 1000
    memory.require_bytes(1000, "cpu", "it")
    with pytest.raises(WorkbenchError, match=r"the 70B shape needs 140 GB, and 1.00 kB are free"):
        memory.require_bytes(140_000_000_000, "cpu", "the 70B shape")


# -- the device and its ceilings -----------------------------------------------------------------------------


def ceilings_of(**changes) -> Ceilings:
    values = {
        "read_bytes_per_s": 2e10,
        "copy_bytes_per_s": 2e10,
        "flop_per_s": {"float32": 1e11},
        "launch_s": 1e-6,
        "measured": True,
        "source": "a test",
        "date": records.now(),
        "spread": {"read": (1.9e10, 2e10, 2.1e10)},
    }
    return Ceilings(**{**values, **changes})


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A cache folder of its own, and a list of the measurements that were made."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    made, result = [], [ceilings_of()]

    def fake(device, stop=None):
        made.append(device)
        return result[0]

    monkeypatch.setattr(devices, "measure_ceilings", fake)
    made_and_result = made, result
    return made_and_result


def cache_file(tmp_path) -> Path:
    (file,) = (tmp_path / "cache" / "ceilings").iterdir()
    return file


def test_ceilings_are_measured_once_a_machine(measured, tmp_path):
    made, _ = measured
    assert devices.ceilings() == devices.ceilings() == ceilings_of(date=devices.ceilings().date)
    assert made == ["cpu"]
    devices.ceilings(refresh=True)
    assert len(made) == 2


def test_another_number_of_threads_is_another_machine(measured, monkeypatch):
    made, _ = measured
    devices.ceilings()
    monkeypatch.setattr(devices.torch, "get_num_threads", lambda: 77)
    devices.ceilings()
    assert len(made) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "5",
        lambda text: text.replace('"date": "', '"date": 5, "source": "'),
        lambda text: text.replace('"spread": {', '"spread": [], "name": {'),
        lambda text: text.replace('"launch_s": 1e-06', '"launch_s": 0'),
        lambda text: text.replace('"launch_s": 1e-06', '"launch_s": "fast"'),
        lambda text: text.replace('"launch_s"', '"launch_ms"'),
        lambda text: text.replace('"measured": true', '"measured": false'),
    ],
)
def test_a_damaged_cache_is_measured_again_and_mended(measured, tmp_path, damage):
    made, _ = measured
    devices.ceilings()
    file = cache_file(tmp_path)
    file.write_text(damage(file.read_text()))
    devices.ceilings()
    devices.ceilings()
    assert len(made) == 2


def test_a_measurement_taken_on_a_busy_machine_is_not_believed_for_long(measured):
    made, result = measured
    result[0] = ceilings_of(spread={"read": (1e9, 1e10, 2e10)})
    assert not result[0].steady
    devices.ceilings()
    devices.ceilings()
    assert len(made) == 1
    long_ago = datetime.now(UTC) - timedelta(seconds=devices.UNSTEADY_FOR_S + 1)
    result[0] = ceilings_of(spread={"read": (1e9, 1e10, 2e10)}, date=long_ago.isoformat())
    devices.ceilings(refresh=True)
    devices.ceilings()
    assert len(made) == 3


def test_a_cache_that_cannot_be_written_costs_only_time(measured, tmp_path):
    made, _ = measured
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert devices.ceilings().measured and devices.ceilings().measured
    assert len(made) == 2


def test_a_real_measurement_is_complete_and_of_this_world(monkeypatch):
    monkeypatch.setattr(devices, "BUDGET_S", 0.01)
    monkeypatch.setattr(devices, "last_cache_bytes", lambda device="cpu": 1 << 20)
    monkeypatch.setattr(passing, "ROUNDS", 1)
    monkeypatch.setattr(dispatch, "BUDGET_S", 0.01)
    found = devices.measure_ceilings("cpu")
    assert found.measured and set(found.flop_per_s) == {"float32", "bfloat16"}
    assert 1e8 < found.read_bytes_per_s < 1e13 and 1e8 < found.copy_bytes_per_s < 1e13
    assert 1e-8 < found.launch_s < 1e-3 and all(1e7 < v < 1e15 for v in found.flop_per_s.values())
    passes = {"weights in float32", "weights in bfloat16", "keys and values"}
    assert not found.launch_overlaps and found.launch_s == found.dispatch[-1].elementwise_s
    for level in found.dispatch:
        assert all(1e-9 <= v < 1e-2 for name, v in asdict(level).items() if name != "passed_bytes")
    assert set(found.weight_passing) == {"float32", "bfloat16"} and found.kv_passing is not None
    assert set(found.spread) == {"read", "copy", "float32", "bfloat16", *passes}
    assert set(found.weight_bytes_per_s) == {"float32", "bfloat16"}
    assert all(1e7 < v < 1e13 for v in (*found.weight_bytes_per_s.values(), found.kv_bytes_per_s))
    assert all(p10 <= median <= p90 for p10, median, p90 in found.spread.values())
    assert Ceilings.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_bandwidth_is_measured_in_buffers_that_no_cache_can_hold(monkeypatch):
    sizes = []
    monkeypatch.setattr(devices, "BUDGET_S", 0.0)
    monkeypatch.setattr(devices, "last_cache_bytes", lambda device="cpu": 10 << 20)
    monkeypatch.setattr(devices, "available_bytes", lambda device: 8 * (40 << 20))
    real = torch.ones
    monkeypatch.setattr(devices.torch, "ones", lambda n, **k: sizes.append(4 * n) or real(n, **k))
    rates, how = devices._bandwidth_rates("cpu", None)
    assert sizes == [40 << 20] and "40 MiB" in how and set(rates) == {"read", "copy"}


@pytest.mark.parametrize(
    ("first", "last", "weights", "ceiling"),
    [(4e9, 9e9, 5e9, 9e9), (9e9, 4e9, 5e9, 9e9), (4e9, 4e9, 7e9, 7e9)],
    ids=["busy before", "busy after", "busy before and after"],
)
def test_a_busy_moment_does_not_become_the_ceiling_of_memory(monkeypatch, first, last, weights, ceiling):
    """A read timed while others used the memory was once below what a product with one row had read."""
    order = []

    def bandwidth(device, stop, share=1.0):
        order.append("memory")
        return {"read": [first if len(order) == 1 else last] * 5, "copy": [1e9] * 5}, "a sum"

    monkeypatch.setattr(devices, "_bandwidth_rates", bandwidth)
    table = devices.Passing((1,), (1e6,), ((1e9,),))
    call = devices.Dispatch(*[1e-6] * len(dataclasses.fields(devices.Dispatch)))
    monkeypatch.setattr(devices, "measure_weights", lambda *_: order.append("weights") or (table, [weights] * 5))
    monkeypatch.setattr(devices, "measure_keys", lambda *_: (table, [1e9]))
    monkeypatch.setattr(devices, "measure_dispatch", lambda *_: (call,))
    monkeypatch.setattr(devices, "_matmul_rates", lambda *_: [1e9])
    found = devices.measure_ceilings("cpu")
    assert found.read_bytes_per_s == ceiling and order == ["memory", "weights", "weights", "memory"]
    assert not found.steady or first == last


def test_measuring_the_ceilings_can_be_stopped():
    polls = []

    def stop():
        polls.append(1)
        if len(polls) == 3:
            raise Stopped

    with pytest.raises(Stopped):
        devices.measure_ceilings("cpu", stop)


def test_published_ceilings_are_never_taken_for_measured_ones():
    assert set(PUBLISHED) == {"a100-80gb", "h100-sxm", "h200"}
    for ceilings in PUBLISHED.values():
        assert not ceilings.measured and "data sheet" in ceilings.source
    nominal = {n: (c.flop_per_s["bfloat16"] / 1e12, c.read_bytes_per_s / 1e12) for n, c in PUBLISHED.items()}
    assert nominal["a100-80gb"] == pytest.approx((312, 2.039))
    assert nominal["h100-sxm"] == pytest.approx((989, 3.35))
    assert nominal["h200"] == pytest.approx((989, 4.8))


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "fast"])
def test_a_ceiling_is_a_number_above_zero(value):
    with pytest.raises(WorkbenchError, match="above 0"):
        ceilings_of(read_bytes_per_s=value)


def test_the_fingerprint_is_plain_data_and_a_device_that_is_not_there_is_refused():
    assert json.loads(json.dumps(devices.fingerprint())) == devices.fingerprint()
    assert devices.fingerprint()["threads"] == torch.get_num_threads()
    assert devices.versions()["torch"] == metadata.version("torch")
    for name in ("gpu", "cuda:99", "mps"):
        with pytest.raises(WorkbenchError, match=name):
            devices.fingerprint(name)


# -- the bench -----------------------------------------------------------------------------------------------


def test_a_bench_loads_a_model_once_and_passes_a_decoder_through(monkeypatch, tiny_model):
    loaded = []

    def load(name, **settings):
        loaded.append((name, settings))
        return tiny_model

    monkeypatch.setattr("workbench.models.checkpoints.load", load)
    bench = Bench()
    assert bench.model("stdlib-1m") is bench.model("stdlib-1m") is bench.model(tiny_model) is tiny_model
    bench.model("stdlib-1m", weights="random")
    assert loaded == [("stdlib-1m", {"device": "cpu"}), ("stdlib-1m", {"device": "cpu", "weights": "random"})]


def test_a_bench_signs_what_it_measures(monkeypatch):
    monkeypatch.setattr(benches.records, "git_commit", lambda: COMMIT)
    m = Bench().measurement(name="a", settings={}, samples=[1], unit="s", counts={"rows": 3}, limit="launch")
    assert (m.commit, m.counts, m.limit, m.samples) == (COMMIT, {"rows": 3}, "launch", [1.0])
    assert m.device["name"] and m.versions["python"] and datetime.fromisoformat(m.date).tzinfo is not None


# -- the doctor ----------------------------------------------------------------------------------------------


def findings(look) -> dict:
    return {f.name: f for f in doctor._safely(look)}


def test_a_healthy_machine_has_nothing_to_fix_and_every_failure_names_its_fix():
    found = doctor.examine()
    assert {"python", "torch", "triton", "kernel", "widgets", "disk", "hub", "models", "course"} <= {
        f.name for f in found
    }
    for f in found:
        assert f.found and bool(f.fix) == (f.ok is not True), f


def test_a_package_older_than_pyproject_asks_is_a_failure_with_the_command_that_mends_it(monkeypatch):
    asked = ["torch>=99", "no-such-package>=1", "jupytext>=99; extra == 'dev'", "numpy>=1"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: asked)
    found = findings(doctor._packages)
    assert set(found) == {"torch", "no-such-package"}
    assert found["torch"].ok is False and "pip install 'torch>=99'" in found["torch"].fix
    assert "not installed" in found["no-such-package"].found


def test_a_kernel_that_is_missing_or_starts_what_is_not_there_is_a_failure(monkeypatch, tmp_path):
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda kind: [str(tmp_path)])
    assert findings(doctor._kernel)["kernel"].ok is False
    (tmp_path / "workbench").mkdir()
    kernel = tmp_path / "workbench" / "kernel.json"
    for python, ok in ((doctor.sys.executable, True), ("/nowhere/bin/python", False), ("/bin/sh", None)):
        kernel.write_text(json.dumps({"argv": [python, "-m", "ipykernel"]}))
        assert findings(doctor._kernel)["kernel"].ok is ok
    kernel.write_text("{")
    assert findings(doctor._kernel)["kernel"].ok is False


def test_missing_models_and_widgets_and_a_full_disk_are_failures(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "package_folder", lambda: tmp_path)
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda kind: [str(tmp_path)])
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10_000_000}))
    assert findings(doctor._models)["models"].ok is False
    assert findings(doctor._widgets)["widgets"].ok is False
    assert findings(doctor._disk)["disk"].ok is False
    for name, file in doctor.SHIPPED.items():
        (tmp_path / "models" / "zoo" / name).mkdir(parents=True)
        (tmp_path / "models" / "zoo" / name / file).write_text("x")
    assert findings(doctor._models)["models"].ok is True


def test_an_examination_that_breaks_is_a_finding_and_not_a_traceback():
    def _broken():
        raise ImportError("libtorch.so is gone")
        yield

    assert findings(_broken)["broken"].ok is False


def test_the_course_is_the_copy_we_stand_in_before_the_clone_we_run_from(tmp_path, monkeypatch):
    copy, clone = tmp_path / "copy", tmp_path / "clone"
    for folder in (copy, clone):
        (folder / "notebooks").mkdir(parents=True)
    (copy / "notebooks" / "00_start_here.ipynb").write_text("{}")
    monkeypatch.setattr(doctor, "package_folder", lambda: clone / "workbench")
    assert doctor.find_course(copy) == doctor.find_course(copy / "notebooks") == copy
    assert doctor.find_course(tmp_path) == clone
    monkeypatch.setattr(doctor, "package_folder", lambda: tmp_path / "site-packages" / "workbench")
    assert doctor.find_course(tmp_path) is None


# -- what a ceiling of a GPU reads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("card", devices.PUBLISHED)
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_a_read_of_weights_on_a_gpu_is_many_launches_long_and_beyond_its_cache(card, element_bytes):
    out, inside = devices.matrix_shape("cuda", math.inf, element_bytes)
    size = out * inside * element_bytes
    seconds = size / devices.PUBLISHED[card].read_bytes_per_s
    assert seconds > devices.LAUNCHES_A_READ * devices.PLAIN_LAUNCH_S > 100 * devices.PUBLISHED[card].launch_s
    assert size > 10 * (60 << 20), "an H200's L2 cache has 60 MB, an A100's 40"
    small = 3 * 768 * 768 * 2 / devices.PUBLISHED[card].read_bytes_per_s
    assert small < devices.PLAIN_LAUNCH_S, "a small model's matrix is gone before the next launch"


@pytest.mark.parametrize("card", devices.PUBLISHED)
def test_a_read_of_keys_and_values_on_a_gpu_is_many_launches_long(card):
    size = devices.attention_bytes("cuda", 60 << 20)
    assert size / devices.PUBLISHED[card].read_bytes_per_s >= devices.LAUNCHES_A_READ * devices.PLAIN_LAUNCH_S
    heads, keys, head_dim = devices.attention_shape("cuda")
    a_sequence = 2 * heads * keys * head_dim * 2
    assert heads * size / a_sequence > 132 * 2, "programs enough for every multiprocessor"


def test_a_matrix_is_smaller_where_memory_is_short_and_on_a_cpu_as_it_was():
    assert devices.matrix_shape("cuda:1", 300e6, 2) == (32_768, 4096)
    assert devices.matrix_shape("cuda", 1.0, 2) == (8192, 4096)
    assert devices.matrix_shape("cpu") == (2304, 768) and devices.attention_shape("cpu") == (12, 512, 64)
    assert devices.attention_bytes("cpu", 32 << 20) == 64 << 20


# -- memory of a GPU ---------------------------------------------------------------------------------------------------


def test_blocks_that_torch_keeps_of_freed_tensors_are_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 60 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 16 << 30)
    assert memory.available_bytes("cuda") == (10 + 60 - 16) << 30
    memory.require_bytes(50 << 30, "cuda", "a model")
    with pytest.raises(WorkbenchError, match=r"needs 64.4 GB, and 58.0 GB are free on cuda"):
        memory.require_bytes(60 << 30, "cuda", "a model")


def test_a_model_that_was_loaded_to_be_arranged_is_not_kept_beside_it():
    bench = Bench()
    fast = bench.model("stdlib-1m", arrangement="fast")
    assert [key[1] for key in bench._models] == ["fast"] and bench.model("stdlib-1m", arrangement="fast") is fast
    plain = bench.model("stdlib-1m")
    assert bench.model("stdlib-1m") is plain
    asked = Bench()
    plain = asked.model("stdlib-1m")
    asked.model("stdlib-1m", arrangement="fast")
    assert asked.model("stdlib-1m") is plain, "who asks for both has the weights that are shared once"
