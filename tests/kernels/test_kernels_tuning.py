"""Claims about what all kernels share: a table of block sizes that survives whatever lies in its file, a launch that
only looks, tuning that ends, and checks that say what was expected."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_claims import on_each_device

from workbench.errors import WorkbenchError
from workbench.instruments import doctor
from workbench.kernels import launch, softmax, tuning
from workbench.kernels.launch import Unsupported, Work
from workbench.kernels.tuning import Config, EventClock, HostClock, Table

CONFIG = Config.of(8, 3, BLOCK=256, ROWS=4)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Tables of their own, read anew."""
    monkeypatch.setenv(tuning.FOLDER, str(tmp_path))
    monkeypatch.setattr(tuning, "_TABLES", {})
    return tmp_path


class Clock:
    """Time passes when a config says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(tuning, "time", made)
    return made


class Machine:
    """A host that queues and a device that works, each with its clock; it stands for `torch.cuda` and `time`."""

    def __init__(self, launch_s: float) -> None:
        self.launch_s, self.host, self.device_free = launch_s, 0.0, 0.0

    def queue(self, seconds: float, launch_s: float | None = None) -> None:
        self.host += self.launch_s if launch_s is None else launch_s
        self.device_free = max(self.device_free, self.host) + seconds

    def device(self, which):
        return contextlib.nullcontext()

    def Event(self, enable_timing: bool):
        machine = self

        class Event:
            def record(self) -> None:
                self.at = max(machine.device_free, machine.host)

            def synchronize(self) -> None:
                machine.host = max(machine.host, machine.device_free)

            def elapsed_time(self, other) -> float:
                return 1e3 * (other.at - self.at)

        return Event()

    def clock(self) -> EventClock:
        made = EventClock("cpu", self, lambda: self.host)
        made._flush = lambda: self.queue(made.FLUSH_S, launch_s=5e-6)  # one of torch's own
        return made


# -- a clock of the device ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel_s", [2e-6, 7e-6, 50e-6, 5e-3])
@pytest.mark.parametrize("launch_s", [3e-6, 20e-6, 60e-6])
def test_a_kernel_is_timed_and_not_its_launch(kernel_s, launch_s):
    machine = Machine(launch_s)
    samples = machine.clock().seconds(lambda: machine.queue(kernel_s), repeats=3)
    assert samples == [pytest.approx(kernel_s)] * 3
    assert machine.host < 3 * 33 * (kernel_s + 5 * launch_s) + 0.1


def test_planted_a_device_that_has_nothing_to_do_meanwhile_shows_the_launch():
    machine = Machine(20e-6)
    clock = machine.clock()
    clock._flush = lambda: None
    assert clock.seconds(lambda: machine.queue(7e-6), repeats=1)[0] > 15e-6


def test_the_faster_of_two_small_kernels_is_kept_whatever_a_launch_takes(folder):
    machine = Machine(20e-6)
    slow, fast = Config.of(4, BLOCK=1), Config.of(4, BLOCK=2)
    run = {slow: 9e-6, fast: 7e-6}
    made = tuning.tune("k", "a", [slow, fast], lambda one: machine.queue(run[one]), "cpu", clock=machine.clock())
    assert made == fast and isinstance(tuning.clock_for("cpu"), HostClock)


# -- configs and their file --------------------------------------------------------------------------------------------


def test_a_config_is_the_same_in_any_order_and_gives_what_a_launch_takes():
    assert Config.of(8, 3, ROWS=4, BLOCK=256) == CONFIG and hash(CONFIG) == hash(Config.of(8, 3, ROWS=4, BLOCK=256))
    assert CONFIG["BLOCK"] == 256
    assert CONFIG.options == {"BLOCK": 256, "ROWS": 4, "num_warps": 8, "num_stages": 3}
    with pytest.raises(KeyError):
        CONFIG["WIDTH"]


def test_what_is_written_is_read_again(folder):
    path = folder / "deeper" / "gpu.json"
    table = Table(path, {("softmax", "(64, 2)"): CONFIG, ("copy", "4"): Config.of(2, 1, BLOCK=32)})
    table.write()
    assert Table.read(path) == table
    assert [file.name for file in path.parent.iterdir()] == ["gpu.json"]  # no draft is left


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '"configs"',
        '{"format": 1}',
        '{"format": 1, "configs": {}}',
        '{"format": 2, "configs": []}',
        '{"format": 1, "configs": [null, 1, [], "x"]}',
        "\x00\xff",
        "[" * 10_000 if sys.version_info >= (3, 12) else "[[",
        " " * (tuning.LARGEST_FILE + 1),
    ],
    ids=range(13),
)
def test_a_file_that_is_no_table_is_an_empty_one(folder, content):
    path = folder / "gpu.json"
    path.write_text(content, encoding="latin-1")
    assert Table.read(path).configs == {}


def test_a_folder_in_place_of_the_file_is_an_empty_table(folder):
    assert Table.read(folder).configs == {} and Table.read(folder / "none.json").configs == {}


GOOD = {"kernel": "softmax", "key": "64", "blocks": {"BLOCK": 256}, "num_warps": 4, "num_stages": 2}


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": 3},
        {"key": None},
        {"blocks": []},
        {"blocks": {"BLOCK": 0}},
        {"blocks": {"BLOCK": 1 << 20}},
        {"blocks": {"BLOCK": True}},
        {"blocks": {"BLOCK": "64"}},
        {"num_warps": 3},
        {"num_warps": 64},
        {"num_warps": "4"},
        {"num_stages": 0},
        {"num_stages": 99},
        {"num_stages": 2.0},
    ],
    ids=str,
)
def test_a_row_that_cannot_be_is_passed_over_and_the_others_stay(folder, change):
    path = folder / "gpu.json"
    path.write_text(json.dumps({"format": 1, "configs": [{**GOOD, **change}, GOOD]}))
    assert Table.read(path).configs == {("softmax", "64"): Config.of(4, 2, BLOCK=256)}


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*GOOD, "x"]), inner, max_size=6),
    max_leaves=8,
)


@given(rows=st.lists(JUNK | st.fixed_dictionaries(dict.fromkeys(GOOD, JUNK)), max_size=3))
@settings(max_examples=25, deadline=None)
def test_no_content_is_an_error(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("junk") / "gpu.json"
    path.write_text(json.dumps({"format": 1, "configs": rows}))
    for config in Table.read(path).configs.values():
        assert config.num_warps in (1, 2, 4, 8, 16) and 1 <= config.num_stages <= 8


# -- choosing never measures
# ---------------------------------------------------------------------------------------------


def test_a_choice_on_a_cpu_is_the_default_whatever_the_table_says():
    table = tuning.table_for("cpu")
    table.configs["softmax", "64"] = CONFIG
    assert tuning.choose("softmax", 64, Config(), "cpu") == Config()


def test_a_choice_on_a_gpu_looks_into_the_table_of_its_kind(folder, monkeypatch):
    """Read once, never written, nothing launched: the device is a name here, so a measurement would fail."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    Table(folder / "nvidia-h200.json", {("softmax", "(64, 2)"): CONFIG}).write()
    before = (folder / "nvidia-h200.json").read_bytes()
    with launch.launches() as counted:
        assert tuning.choose("softmax", (64, 2), Config(), "cuda") == CONFIG
        assert tuning.choose("softmax", (64, 4), Config(), "cuda") == Config()
        assert tuning.choose("copy", (64, 2), Config(), "cuda") == Config()
    assert counted.total() == 0 and (folder / "nvidia-h200.json").read_bytes() == before
    (folder / "nvidia-h200.json").unlink()
    assert tuning.choose("softmax", (64, 2), Config(), "cuda") == CONFIG  # not read again


# -- tuning ends -------------------------------------------------------------------------------------------------------


def test_the_fastest_is_kept_and_written(folder, clock):
    took = {1: 3.0, 2: 1.0, 4: 2.0}

    def run(config: Config) -> None:
        clock.now += took[config.num_warps]

    best = tuning.tune("k", (7, 2), [Config.of(n) for n in took], run, "cpu", budget_s=100.0)
    assert best == Config.of(2)
    assert Table.read(folder / "interpreter.json").configs == {("k", "(7, 2)"): best}


def test_tuning_stops_when_its_time_is_up_but_not_before_one_was_timed(clock):
    ran = []

    def run(config: Config) -> None:
        ran.append(config.num_warps)
        clock.now += 1.0

    candidates = [Config.of(n) for n in (1, 2, 4, 8)]
    assert tuning.tune("k", 0, candidates, run, "cpu", budget_s=0.0, repeats=2) == Config.of(1)
    assert ran == [1, 1, 1]
    ran.clear()
    tuning.tune("k", 0, candidates, run, "cpu", budget_s=4.0, repeats=2)
    assert ran == [1, 1, 1, 2, 2, 2]  # 3 s, then 6 s: over


def test_whoever_is_stopped_while_tuning_keeps_the_fastest_so_far(folder, clock):
    def run(config: Config) -> None:
        clock.now += config.num_warps
        if config.num_warps == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuning.tune("k", 0, [Config.of(n) for n in (2, 1, 4)], run, "cpu", budget_s=100.0)
    assert Table.read(folder / "interpreter.json").configs == {("k", "0"): Config.of(1)}


def test_an_error_that_spoils_the_device_is_not_passed_over(folder, clock):
    def run(config: Config) -> None:
        clock.now += 1.0
        if config.num_warps == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        tuning.tune("k", 0, [Config.of(n) for n in (1, 2, 4)], run, "cpu", budget_s=100.0)


def test_a_table_that_cannot_be_written_costs_the_file_and_not_the_config(monkeypatch, clock):
    monkeypatch.setenv(tuning.FOLDER, "/dev/null/tables")
    with pytest.warns(UserWarning, match=r"/dev/null/tables/interpreter.json: Not a directory"):
        assert tuning.tune("k", 0, [Config.of(2)], lambda config: None, "cpu") == Config.of(2)


def test_a_candidate_that_does_not_run_is_passed_over(clock):
    def run(config: Config) -> None:
        clock.now += 1.0
        if config.num_warps == 1:
            raise RuntimeError("out of resource: shared memory")

    assert tuning.tune("k", 0, [Config.of(1), Config.of(2)], run, "cpu") == Config.of(2)
    with pytest.raises(WorkbenchError, match="none of 1 configs of k runs on cpu: out of resource"):
        tuning.tune("k", 0, [Config.of(1)], run, "cpu")
    with pytest.raises(WorkbenchError, match="needs at least one candidate"):
        tuning.tune("k", 0, [], run, "cpu")


@on_each_device
def test_every_kernel_that_tunes_runs_all_its_candidates(device, folder):
    from workbench.kernels import ceilings, norm, softmax, swiglu

    x = torch.randn(4, 512, device=device)
    limits = {"budget_s": 60.0, "repeats": 1}
    for made in (
        ceilings.tune_read_sum(x, **limits),
        ceilings.tune_copy(x, **limits),
        softmax.tune_softmax(x, **limits),
        norm.tune_rms_norm(x, x[0], **limits),
        swiglu.tune_swiglu(x, **limits),
    ):
        assert isinstance(made, Config)
    (file,) = folder.iterdir()
    assert {kernel for kernel, _ in Table.read(file).configs} == {"read_sum", "copy", "softmax", "rms_norm", "swiglu"}
    assert set(softmax.candidates(512)) >= {Config.of(4, ROWS=1)}
    assert norm.candidates(1) == [Config.of(1, ROWS=1)] and len(norm.candidates(16_384)) > 1


# -- what a kernel accepts ---------------------------------------------------------------------------------------------


def test_devices_that_run_no_kernels_say_why(monkeypatch):
    assert "the tensors are on meta" in launch.why_not("meta")
    monkeypatch.setattr(launch, "INTERPRETED", True)
    assert launch.why_not("cpu") == ""
    assert "kernels are interpreted" in launch.why_not("cuda") and "TRITON_INTERPRET=0" in launch.why_not("cuda")
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert "only in its interpreter (TRITON_INTERPRET=1)" in launch.why_not("cpu")
    if not torch.cuda.is_available():
        assert launch.why_not("cuda").startswith("PyTorch has no cuda: ")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    assert launch.why_not("cuda") == "compute capability 8.0 or newer is needed; T4 has 7.5"
    assert launch.why_not("cuda", (7, 5)) == ""


@pytest.mark.skipif(not launch.INTERPRETED, reason="these tensors are on the CPU: kernels are interpreted there")
def test_tensors_that_do_not_fit_are_refused_by_name():
    x = torch.zeros(4, 6)
    launch.check_tensors("op", x=x, y=None)
    launch.check_tensors("op", contiguous=False, x=x[:, 1:4], one=torch.zeros(4, 2)[:, :1], scalar=torch.zeros(()))
    for message, kinds, tensors in (
        ("op: all tensors must be on one device, got cpu and, for y, meta", {}, {"x": x, "y": x.to("meta")}),
        ("op: x must be one of float32, float16, bfloat16; got int64", {}, {"x": x.long()}),
        ("op: x must be one of int8; got float32", {"dtypes": [torch.int8]}, {"x": x}),
        ("interpreter multiplies bfloat16 wrongly", {"multiplies": True}, {"x": x.bfloat16()}),
        (r"op: x must be contiguous; its strides are \(1, 6\) for shape \(6, 4\); call", {}, {"x": x.T}),
        ("op: x must be contiguous in its last axis; its", {"contiguous": False}, {"x": x.T}),
        ("op: Triton kernels are for CUDA devices", {}, {"x": x.to("meta")}),
    ):
        with pytest.raises(Unsupported, match=message):
            launch.check_tensors("op", **kinds, **tensors)
    launch.check_tensors("op", multiplies=True, x=x.half())
    assert issubclass(Unsupported, WorkbenchError)


def test_shapes_and_versions_that_do_not_fit_are_refused():
    launch.check_shape("op", "x", torch.zeros(4, 6), (None, 6))
    for shape, said in (((4, 5), "4, 5"), ((None,), "any"), ((None, 6, 1), "any, 6, 1")):
        with pytest.raises(Unsupported, match=rf"op: x must have shape \[{said}\], got \[4, 6\]"):
            launch.check_shape("op", "x", torch.zeros(4, 6), shape)
    assert launch.check_version("op", 2, {1: "", 2: ""}) == 2
    with pytest.raises(Unsupported, match="op: there are versions 1, 2; got '2'"):
        launch.check_version("op", "2", {1: "", 2: ""})


# -- launches and work -------------------------------------------------------------------------------------------------


@triton.jit
def _fill(out, value, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.zeros([BLOCK], tl.float32) + value, mask=at < size)


@triton.jit
def _three(out, n):
    tl.store(out + tl.arange(0, 1), tl.zeros([1], tl.float32) + tl.cdiv(n, 3))


@triton.jit
def _three_called(out, n):
    _three(out, n)
    _three(out + 1, n)


@pytest.mark.skipif(not launch.INTERPRETED, reason="compiled here: what it claims is of the interpreter")
def test_the_interpreter_patches_the_language_once_a_launch_and_gives_it_back():
    """Whatever the kernel calls, and however many programs there are; Triton's own functions each patch `tl.core`."""
    from triton.runtime import interpreter

    counts = []
    for kernel, programs in ((_three, 1), (_three_called, 1), (_three_called, 6)):
        out = torch.zeros(4)
        with mock.patch.object(interpreter, "_patch_builtin", wraps=interpreter._patch_builtin) as patched:
            launch.launch(kernel, (programs,), out, 7)
        counts.append(patched.call_count)
        assert out.tolist() == [3.0, 3.0 * (kernel is _three_called), 0.0, 0.0]
    assert counts[1] == counts[2] <= counts[0]
    assert tl.core.is_builtin(tl.load)


@on_each_device
def test_launches_are_counted_by_name_and_an_empty_grid_is_none(device):
    out = torch.zeros(10, device=device)
    with launch.launches() as outer:
        launch.launch(_fill, (3,), out, 1.5, 10, BLOCK=4)
        with launch.launches() as inner:
            launch.launch(_fill, (2,), out, 2.5, 8, BLOCK=4)
            launch.launch(_fill, (0,), out, 9.0, 10, BLOCK=4)
        launch.launch(_fill, (1, 0, 2), out, 9.0, 10, BLOCK=4)
    launch.launch(_fill, (1,), out, 3.5, 1, BLOCK=4)  # counted by nobody
    assert outer == {"_fill": 1} and inner == {"_fill": 1}
    assert out.tolist() == [3.5] + [2.5] * 7 + [1.5] * 2


def test_counting_ends_with_its_block_whatever_happens():
    with pytest.raises(ZeroDivisionError), launch.launches():
        raise ZeroDivisionError
    assert launch._COUNTED.get() is None


def test_without_tensors_there_is_nothing_to_refuse():
    launch.check_tensors("norm", residual=None)


def test_the_bound_is_that_of_the_longest_of_moving_computing_and_launching():
    work = Work(300, 100, 800, launches=3)
    assert work.bytes == 400 and work.intensity == 2.0
    assert work.bound_s(100.0, 1e9) == 4.0
    assert work.bound_s(1e9, 100.0) == 8.0
    assert work.bound_s(1e9, 1e9, launch_s=1.0) == 3.0
    assert (launch.cdiv(7, 2), launch.cdiv(8, 2), launch.next_power_of_2(5)) == (4, 4, 8)


@pytest.mark.parametrize(
    ("environment", "cuda", "expected"),
    [
        ({}, True, (False, "was not set, and PyTorch sees a CUDA device")),
        ({"TRITON_INTERPRET": ""}, False, (True, "was not set, and PyTorch sees no CUDA device")),
        ({"TRITON_INTERPRET": "1", "WORKBENCH_INTERPRET": "1"}, True, (False, "was not set")),  # a first guess of ours
        ({"TRITON_INTERPRET": "0", "WORKBENCH_INTERPRET": "1"}, False, (False, "TRITON_INTERPRET=0")),
        ({"TRITON_INTERPRET": "1"}, True, (True, "TRITON_INTERPRET=1")),
        ({"TRITON_INTERPRET": "ON"}, True, (True, "TRITON_INTERPRET=ON")),
    ],
)
def test_one_variable_decides_where_kernels_run_and_the_reason_says_it(environment, cuda, expected):
    interpreted, why = launch.decide(environment, cuda)
    assert interpreted == expected[0] and expected[1] in why


def test_a_value_that_triton_does_not_read_is_refused():
    for value in ("yes", "2", "cpu"):
        with pytest.raises(WorkbenchError, match=rf"TRITON_INTERPRET must be 1 .*or 0 .*got '{value}'"):
            launch.decide({"TRITON_INTERPRET": value}, cuda=False)


def test_an_interpreter_that_does_not_fit_numpy_is_named_with_what_to_install(monkeypatch):
    for of_triton, of_numpy in (("3.6.0", "2.4.0"), ("3.6.0+git1", "2.5.2"), ("3.5.1", "3.0.0rc1")):
        said = launch.interpreter_misfit(of_triton, of_numpy)
        assert (
            f"Triton {of_triton} needs a numpy older than 2.4, and this is {of_numpy}" in said and "pip install" in said
        )
    for fitting in (("3.6.0", "2.3.5"), ("3.6.0", "1.26.4"), ("3.7.1", "2.5.5"), ("4.0.0", "3.0.0")):
        assert not launch.interpreter_misfit(*fitting)
    monkeypatch.setattr(launch, "INTERPRETED", True)
    monkeypatch.setattr(launch.triton, "__version__", "3.6.0")
    monkeypatch.setattr(launch.numpy, "__version__", "2.4.6")
    with pytest.raises(
        launch.Unsupported, match=r"softmax: the interpreter of Triton 3\.6\.0 needs a numpy older than 2\.4"
    ):
        softmax.softmax(torch.zeros(2, 2))
    (found,) = doctor._triton()
    assert found.ok is False and "this is 2.4.6" in found.found and "numpy<2.4" in found.fix


SOFTMAX = "import torch; from workbench.kernels.softmax import softmax; softmax(torch.zeros(2, 2))"
CHANGED = """
import os, torch
import workbench.kernels.launch as launch
os.environ["TRITON_INTERPRET"] = "1" if not launch.INTERPRETED else "0"
from workbench.kernels.softmax import softmax
softmax(torch.zeros(2, 2, device="cpu" if launch.INTERPRETED else "cuda"))
"""


@pytest.mark.parametrize(
    ("value", "code", "said"),
    [
        ("0", "import triton\nimport workbench.kernels.launch as it\nassert not it.INTERPRETED\n", ""),
        ("0", SOFTMAX, "only in its interpreter"),
        (None, "import triton\nimport workbench.kernels.launch", "start Python with TRITON_INTERPRET="),
        (None, CHANGED, "TRITON_INTERPRET was changed after Triton was imported"),
    ],
)
@pytest.mark.skipif(not launch.INTERPRETED, reason="this machine has a GPU: its default is another")
def test_contradictions_about_where_kernels_run_are_refused(value, code, said):
    environment = {name: text for name, text in os.environ.items() if name not in (launch.INTERPRET, launch.BY_DEFAULT)}
    environment |= {} if value is None else {launch.INTERPRET: value}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert (answer.returncode != 0) == bool(said) and said in answer.stderr, answer.stderr[-2000:]


def test_the_listing_of_kernels_loads_neither_torch_nor_triton():
    code = (
        "import sys; from workbench.kernels import KERNELS; print(len(KERNELS), sorted({'torch', 'triton'} &"
        " {*sys.modules}))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    count, _, loaded = answer.stdout.strip().partition(" ")
    assert int(count) >= 6 and loaded == "[]"
