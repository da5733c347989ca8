"""What the package writes is written whole or not at all: only `workbench/files.py` writes a file in place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[2]
WRITES = {
    *("write_text", "write_bytes", "savez", "savez_compressed", "savetxt", "savefig", "tofile", "to_csv", "to_json"),
    *("save_file", "serialize_file", "copyfile", "copy", "copy2", "copytree", "move", "make_archive", "mkstemp"),
    *("NamedTemporaryFile", "imsave", "write_image", "write_html", "touch", "truncate", "mkfifo"),
}
SAVES = {"torch.save", "np.save", "numpy.save", "json.dump", "nbformat.write", "shutil.copy", "shutil.move"}
OTHER = {"copy", "move", "truncate", "to_json", "write_text", "write_bytes"}  # names that also mean something else
OPENS = {"open", "fdopen", "ZipFile", "TarFile", "NamedTemporaryFile"}
WHOLE = {"replacing", "new_folder"}


def called(node: ast.Call) -> tuple[str, str]:
    """(the whole name, its last part)"""
    if isinstance(node.func, ast.Attribute):
        return ast.unparse(node.func), node.func.attr
    return (node.func.id, node.func.id) if isinstance(node.func, ast.Name) else ("", "")


def writes(node: ast.Call) -> bool:
    """Whether the call makes or changes a file at a place that it is given."""
    whole, last = called(node)
    if last in OPENS:
        texts = [a.value for a in (*node.args, *(k.value for k in node.keywords)) if isinstance(a, ast.Constant)]
        mode = next((t for t in texts if isinstance(t, str) and set(t.partition(":")[0]) <= set("rwxabt+") and t), "")
        flags = any(
            isinstance(part, ast.Attribute) and part.attr in ("O_WRONLY", "O_RDWR", "O_CREAT")
            for argument in node.args
            for part in ast.walk(argument)
        )
        return bool(set(mode.partition(":")[0]) & set("wxa+")) or flags
    if whole in SAVES:
        return True
    if last in ("write_text", "write_bytes"):  # a method of a path, not the function of workbench/files.py
        return isinstance(node.func, ast.Attribute)
    return last in WRITES - OTHER


def in_place(source: str) -> Iterator[tuple[str, str]]:
    """(function, call) of each call that writes a file, but within `with replacing(...)` or `new_folder(...)`."""

    def within(node: ast.AST, where: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"{where}.{node.name}".lstrip(".")
        if isinstance(node, ast.With):
            made = [i.context_expr for i in node.items if isinstance(i.context_expr, ast.Call)]
            if any(called(one)[1] in WHOLE for one in made):
                return
        if isinstance(node, ast.Call) and writes(node):
            yield where, called(node)[1]
        for child in ast.iter_child_nodes(node):
            yield from within(child, where)

    yield from within(ast.parse(source), "")


REASONS = {
    "a log: lines are added, and what is there is not rewritten": (
        "workbench/gpu_tests.py Results.add: open",
        "workbench/checks/progress.py note: open",
        "workbench/processes.py Child._read_output: open",
        "workbench/recorder/recording.py Recording._note: open",
        "workbench/grading/desk.py run_task: open",
        "workbench/serving/api/trace.py trace_to: open",
        "workbench/labs/lab11_serving/servers.py started: open",
        "workbench/serving/bench/recording.py Recorder.__init__: open",
    ),
    "no file: the output and input of this process, the null device, or a setting of the kernel": (
        "workbench/printing.py Printed.__init__: open",
        "workbench/serving/api/process.py EngineProcess.__init__: open",
        "workbench/printing.py Printed._stop: open",
        "workbench/printing.py keep_standard_descriptors: open",
        "workbench/grading/child.py _become_session: open",
        "workbench/grading/child.py session: fdopen",
        "workbench/grading/confine.py _own_network: write_text",
        "workbench/grading/warm.py run_kernel: open",
        "workbench/grading/warm.py run_pytest: fdopen",
        "workbench/grading/child.py serve_orders: open",
        "workbench/grading/judging.py JudgeProcess._judge_for_ever: open",
        "workbench/labs/lab02_where_time_goes/trace.py silent: open",
        "workbench/labs/lab03_kv_cache/peer_llama_cpp.py main: fdopen",
        "workbench/labs/lab08_continuous_batching/peer_llama_cpp_slots.py main: fdopen",
        "workbench/labs/lab08_continuous_batching/peer_vllm.py main: fdopen",
    ),
    "a lock, empty for ever": (
        "workbench/grading/batch.py _alone_in: open",
        "workbench/grading/receipts.py _alone_in: open",
    ),
    "blocks of a cache: each is listed when it is whole, and a checksum says whether it is": (
        "workbench/kv/disk_tier.py _opened: open",
    ),
    "into a folder of this run alone, which is read when it is whole": (
        "workbench/presenting/live.py present: copytree",
        "workbench/presenting/live.py present: write_text",
        "workbench/site/pages.py _copy: copyfile",
        "workbench/site/pages.py _copy: write_text",
        "workbench/site/pages.py write_pages: write_text",
        "workbench/site/pages.py write_pages: copytree",
    ),
    "made only where there is none, so that two runs have one seed; deleted when it cannot be written": (
        "workbench/grading/batch.py seed_in: open",
    ),
}
KNOWN = {entry: reason for reason, entries in REASONS.items() for entry in entries}


def test_nothing_writes_in_place_without_a_reason():
    files = [*(CLONE / "workbench").rglob("*.py"), *(CLONE / "kernels").rglob("*.py")]
    assert len(files) > 100
    seen = {
        f"{file.relative_to(CLONE)} {function}: {call}"
        for file in files
        if file != CLONE / "workbench" / "files.py"
        for function, call in in_place(file.read_text(encoding="utf-8"))
    }
    assert seen - set(KNOWN) == set(), "use workbench.files, or say here why it may write in place"
    assert set(KNOWN) - seen == set(), "these are no more: take them out"


@pytest.mark.parametrize(
    "line",
    [
        "def f(): open(path, 'w')",
        "def f(): open(path, mode='xb')",
        "def f(): path.open('a', encoding='utf-8')",
        "def f(): open(os.open(path, os.O_WRONLY | os.O_CREAT))",
        "def f(): os.fdopen(handle, 'w')",
        "def f(): path.write_text('a')",
        "def f(): (folder / 'a').write_bytes(b'')",
        "def f(): torch.save(a, path)",
        "def f(): np.savez(path, a=a)",
        "def f(): json.dump(a, file)",
        "def f(): save_file(tensors, path)",
        "def f(): figure.savefig(path)",
        "def f(): tarfile.open(path, 'w:gz')",
        "def f(): zipfile.ZipFile(path, 'w')",
        "def f(): shutil.copyfile(a, b)",
    ],
)
def test_a_write_in_place_is_seen(line):
    assert [where for where, _ in in_place(line)] and {where for where, _ in in_place(line)} == {"f"}


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        "open(path, 'rb')",
        "write_text(path, 'a')",
        "tarfile.open(path)",
        "webbrowser.open(url)",
        "with replacing(path) as fresh, open(fresh, 'wb') as file: file.write(b'')",
        "with new_folder(path) as fresh: shutil.copytree(a, fresh)",
        "config.copy()",
    ],
)
def test_what_writes_nothing_in_place_is_not(line):
    assert list(in_place(line)) == []
