"""Claims about `workbench gpu-tests`: no test for a GPU is left out, and a test costs nobody but itself."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from workbench import gpu_tests, processes
from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.gpu_tests import GpuTest

ROOT = Path(__file__).parents[2]
ABSENT = (  # on a machine that has pytest, hypothesis, torch, Triton and transformers, and no more of ours
    "IPython",
    "bitsandbytes",
    "bqplot",
    "dask",
    "gguf",
    "ipykernel",
    "ipywidgets",
    "jupyter_client",
    "jupyter_core",
    "jupyterlab",
    "jupytext",
    "llguidance",
    "nbclient",
    "nbformat",
    "nbval",
    "playwright",
    "torchao",
    "xdist",
    "xllamacpp",
)


def waits_for_a_gpu(item) -> bool:
    """Whether it is skipped on a machine without a CUDA device, and not on one that has it."""
    reasons = [mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif")]
    return any("needs a CUDA device" in reason for reason in reasons)


IMPORTS = """
import importlib, pkgutil, workbench, workbench.kernels
for package in (workbench, workbench.kernels):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if found.name.endswith("__main__"):
            continue  # an entry of Jupyter
        try:
            importlib.import_module(found.name)
        except ImportError as error:
            print(found.name, error.name)
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A folder that makes Python one that has nothing of Jupyter, when it is on its path."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n"  # None: importing it raises ImportError
    )
    return folder


def test_without_jupyter_all_that_is_not_a_panel_can_be_imported(bare):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(bare), str(ROOT)])}
    ran = subprocess.run([sys.executable, "-c", IMPORTS], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    failed = dict(line.split() for line in ran.stdout.splitlines())
    others = {
        name: lacks
        for name, lacks in failed.items()
        if not re.search(r"\.(panels|lectures)\b", name) or lacks != "ipywidgets"
    }
    assert not others and "workbench.panels.base" in failed


@pytest.fixture(scope="module")
def collected(bare):
    """What the command would run, collected as on a machine that has nothing of Jupyter."""
    folder = bare
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(folder))
        environment.delenv(gpu_tests.REHEARSAL, raising=False)
        return gpu_tests.collect(ROOT, folder / "log", gpu_tests.found_in(ROOT), within_s=300)


def test_what_gpu_tests_runs_is_what_waits_for_a_gpu(collected, request):
    """Both ways, over all that this process collected: all tests under `make test`, else these files."""
    tests, broken = collected
    assert not broken and len(tests) > 300, "collection stops on a bare machine"
    ids = {test.id for test in tests}
    assert len(ids) == len(tests)
    here = {item.nodeid: item for item in request.session.items if isinstance(item, pytest.Function)}
    waiting = {name for name, item in here.items() if waits_for_a_gpu(item)}
    marked = {name: item.get_closest_marker("gpu") for name, item in here.items() if item.get_closest_marker("gpu")}
    assert waiting <= marked.keys() <= ids
    assert {name for name, mark in marked.items() if not mark.kwargs.get("here")} == waiting
    files = {item.path.name for item in here.values()}
    whole = not request.config.option.keyword and not request.config.option.markexpr
    if whole and {Path(name.partition("::")[0]).name for name in ids} <= files:
        assert marked.keys() == ids


def test_every_test_that_waits_for_a_gpu_is_in_a_file_that_is_found():
    """Without collecting anything: by what the sources import."""
    names = {file.name for file in gpu_tests.gpu_test_files(ROOT / "tests")}
    naming = {f.name for f in (ROOT / "tests").rglob("test_*.py") if "kernel_claims import" in f.read_text()}
    assert naming == names and {"test_graphs.py", "test_fused.py", "test_engine_async.py"} <= names


def test_a_test_that_runs_where_kernels_run_says_so():
    """One that names HERE, or calls what does, has the mark; and nobody decides the device for himself."""
    for file in (ROOT / "tests" / "kernels").glob("test_*.py"):
        text = file.read_text(encoding="utf-8")
        assert 'INTERPRETED else "cuda"' not in text.replace(NESTED, ""), f"{file.name}: take HERE of kernel_claims"
        functions = {n.name: n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
        uses = {"HERE"}
        while more := {name for name, node in functions.items() if name not in uses and names_in(node) & uses}:
            uses |= more
        for name in uses & functions.keys():
            node = functions[name]
            if name.startswith("test_") and "device" not in [a.arg for a in node.args.args]:
                marks = [ast.unparse(one) for one in node.decorator_list]
                assert "where_kernels_run" in marks, f"{file.name}: {name} runs kernels on a GPU; @where_kernels_run"


NESTED = 'device="cpu" if launch.INTERPRETED else "cuda"))'  # the source of a child process


def names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def test_files_are_found_through_the_modules_they_import(tmp_path):
    for name, text in {
        "test_a.py": "import pytest\n\n@pytest.mark.gpu\ndef test(): ...",
        "test_b.py": "def test(): ...",
        "test_c.py": "from kernel_claims import GPU as device",
        "shared.py": "from kernel_claims import on_each_device",
        "test_d.py": "from shared import on_each_device",
        "test_e.py": "from test_d import on_each_device",
    }.items():
        (tmp_path / name).write_text(text)
    names = [file.name for file in gpu_tests.gpu_test_files(tmp_path)]
    assert names == ["test_a.py", "test_c.py", "test_d.py", "test_e.py"]
    with pytest.raises(WorkbenchError, match=r"no tests for a GPU in .*clone of the course"):
        gpu_tests.found_in(tmp_path / "elsewhere")


def test_the_riskiest_come_first_and_a_file_that_nobody_judged_before_the_others():
    names = [("kernels_small", False), ("kernels_matvec", False), ("new", False), ("fused", True), ("graphs", True)]
    tests = [GpuTest(f"tests/test_{stem}.py::test[{at}]", alone) for stem, alone in names for at in range(14)]
    parts = gpu_tests.parts_of(tests)
    order = list(dict.fromkeys((part[0].stem, part[0].alone) for part in parts))
    assert order == [
        ("graphs", True),
        ("fused", True),
        ("new", False),
        ("kernels_matvec", False),
        ("kernels_small", False),
    ]
    assert [len(part) for part in parts] == [12, 2] * 5 and {t for part in parts for t in part} == set(tests)


# -- processes that hang, die and spoil their device ------------------------------------------------------------------

TOYS = {
    "test_fine.py": """
        import pytest
        pytestmark = pytest.mark.gpu

        @pytest.mark.parametrize("n", range(3))
        def test_passes(n): ...
        def test_fails(): assert 1 == 2
        def test_skips(): pytest.skip("not on this card")
        """,
    "test_graphs.py": """
        import os, signal, time, pytest
        pytestmark = pytest.mark.gpu

        def test_first(): ...
        def test_hangs(): time.sleep(1000)
        def test_between(): ...
        def test_exits(): os._exit(3)
        def test_is_killed(): os.kill(os.getpid(), signal.SIGKILL)
        SPOILED = []
        def test_spoils():
            SPOILED.append(1)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        def test_after(): assert not SPOILED
        """,
    "test_broken.py": """
        import a_module_that_is_not_there
        import pytest
        @pytest.mark.gpu
        def test(): ...
        """,
}


@pytest.fixture
def toys(tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    for name, text in TOYS.items():
        (folder / name).write_text(textwrap.dedent(text))
    (folder / "gpu_report.py").write_text((ROOT / "tests" / "gpu_report.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: a toy\n")
    return tmp_path


def test_a_test_that_hangs_crashes_or_spoils_its_device_costs_itself_alone(toys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    said: list[str] = []
    files = gpu_tests.found_in(toys)
    results = gpu_tests.run_tests(
        toys, toys / "out", files=files, within_s=60, processes=2, say=said.append, test_s=2.5
    )
    short = {name.partition("::")[2] or name: result for name, result in results.of.items()}
    outcomes = {name: outcome for name, (outcome, _, _) in short.items()}
    assert outcomes == {
        "tests/test_broken.py": "not run",
        **{f"test_passes[{n}]": "passed" for n in range(3)},
        "test_fails": "failed",
        "test_skips": "skipped",
        "test_first": "passed",
        "test_hangs": "hung",
        "test_between": "passed",
        "test_exits": "crashed",
        "test_is_killed": "crashed",
        "test_spoils": "failed",
        "test_after": "passed",
    }
    assert "exit code 3" in short["test_exits"][2] and "SIGKILL" in short["test_is_killed"][2]
    assert "a_module_that_is_not_there" in short["tests/test_broken.py"][2]
    lines = [json.loads(line) for line in (toys / "out" / "gpu-tests.jsonl").read_text().splitlines()]
    assert {line["test"]: line["outcome"] for line in lines} == {n: o for n, (o, _, _) in results.of.items()}
    words = gpu_tests.summary(results)
    assert "passed   6" in words and "hung: tests/test_graphs.py::test_hangs: no answer for" in words
    assert any("failed after" in line and "assert 1 == 2" in line for line in said)


def test_what_no_time_was_left_for_is_named(toys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    tests = [GpuTest(f"tests/test_fine.py::test_passes[{n}]") for n in range(3)]
    monkeypatch.setattr(gpu_tests, "collect", lambda *_, **__: (tests, {}))
    results = gpu_tests.run_tests(toys, toys, files=[], within_s=0, processes=1, say=lambda line: None)
    assert {(o, text) for o, _, text in results.of.values()} == {("not run", "no time was left")} and len(
        results.of
    ) == 3
    with pytest.raises(WorkbenchError, match="processes must be a whole number of at least 1, got 0"):
        gpu_tests.run_tests(toys, toys, files=[], within_s=1, processes=0)


def test_results_on_a_full_disk_are_printed(tmp_path, capsys):
    results = gpu_tests.Results(Path("/dev/full"))
    results.add("tests/test_a.py::test", "passed", 1.0)
    assert results.counts == {"passed": 1} and "tests/test_a.py::test" in capsys.readouterr().out


# -- a child process ---------------------------------------------------------------------------------------------------


def child(code: str, tmp_path, **environment) -> processes.Child:
    paths = {"PYTHONPATH": str(ROOT)} | environment
    return processes.Child([sys.executable, "-c", code], folder=tmp_path, log=tmp_path / "log", environment=paths)


def test_a_child_is_killed_with_all_it_started(tmp_path):
    code = (
        "import subprocess, sys, time; from workbench.processes import report\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "report(pid=p.pid); print('said'); time.sleep(1000)"
    )
    heard: list[dict] = []
    it = child(code, tmp_path)
    ending = processes.follow(it, heard.append, 1.5)
    assert ending == "stopped after 2 s, its share of the time" and it.tail == "said\n"
    state, until = Path(f"/proc/{heard[0]['pid']}/stat"), time.monotonic() + 20
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until, "it lives on"
        time.sleep(0.05)


def test_reports_of_a_child_that_died_are_heard_and_its_log_may_be_on_a_full_disk(tmp_path):
    code = (
        "import os; from workbench.processes import report\n"
        "for n in range(500): report(n=n, text='x' * 1000)\n"
        "os._exit(7)"
    )
    heard: list[dict] = []
    it = child(code, tmp_path)
    it.log = Path("/dev/full")
    assert processes.follow(it, heard.append, 60) == "ended with exit code 7"
    assert [event["n"] for event in heard] == list(range(500))


def test_without_a_listener_a_report_goes_nowhere(monkeypatch):
    monkeypatch.delenv(processes.REPORTS, raising=False)
    processes.report(n=1)


def test_shares_of_several_at_a_time():
    now = [0.0]
    budget = processes.Budget(480, 24, lambda: now[0], abreast=8)
    assert budget.share() == 480  # three shares of what eight slots have, and never more than all of it
    budget.more(60)
    now[0] = 240.0
    assert budget.share() == pytest.approx(3 * 8 * 240 / 83) and budget.remaining == 240


def test_wrong_use(capsys):
    assert os.environ.get(gpu_tests.REHEARSAL) is None
    with pytest.raises(SystemExit):
        main(["gpu-tests", "--minutes", "0"])
    capsys.readouterr()
