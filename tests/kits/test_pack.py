"""Claims about what of a clone travels to a machine with a GPU."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from workbench import gpu_tests, recorder
from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.recorder import pack

ROOT = Path(__file__).parents[2]


def test_what_travels_is_small_and_whole(capsys):
    names = pack.packed_files(ROOT)
    assert sum((ROOT / name).stat().st_size for name in names) < pack.MAX_BYTES <= 56 << 20
    there = set(names)
    assert {str(file.relative_to(ROOT)) for file in gpu_tests.found_in(ROOT)} <= there
    assert {"pyproject.toml", "tests/conftest.py", "tests/kernel_claims.py", "tests/gpu_report.py"} <= there
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    sources = {
        name for name in listed.stdout.split() if name.endswith(".py") and name.startswith(("workbench/", "kernels/"))
    }
    assert len(sources) > 300 and {name for name in sources if (ROOT / name).is_file()} <= there
    assert not [name for name in names if name.endswith(".ipynb") or "stdlib-3m-gqa" in name]
    assert main(["record", "--pack", "-"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == names


def test_every_shipped_model_that_a_gpu_records_travels():
    asked = set()
    for runs in recorder.all_runs("cuda").values():
        for run in runs:
            values = run.experiment.complete(run.settings).values()
            asked |= {value for value in values if isinstance(value, str) and value.startswith("stdlib-")}
    assert asked and asked <= set(pack.MODELS)


def test_one_tar_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pack, "packed_files", lambda root: ["README.md", "kernels/norm.py"])
    assert main(["record", "--pack", str(tmp_path / "lean.tar.gz")]) == 0
    with tarfile.open(tmp_path / "lean.tar.gz") as tar:
        assert tar.getnames() == ["inference-workbench/README.md", "inference-workbench/kernels/norm.py"]
    assert "2 files" in capsys.readouterr().out
    monkeypatch.setattr(pack, "packed_files", lambda root: ["README.md", "is/gone"])
    with pytest.raises(WorkbenchError, match="cannot write"):
        pack.pack(ROOT, tmp_path / "other.tar")
    assert [file.name for file in tmp_path.iterdir()] == ["lean.tar.gz"]


def test_a_clone_that_grew_too_large_and_what_is_no_clone_are_refused(tmp_path, monkeypatch):
    with pytest.raises(WorkbenchError, match="is no clone of the course"):
        pack.packed_files(tmp_path)
    monkeypatch.setattr(pack, "MAX_BYTES", 1 << 20)
    with pytest.raises(WorkbenchError, match=r"what must travel has [\d,]+ bytes; 1,048,576 may"):
        pack.packed_files(ROOT)
    assert main(["record"]) == 2
