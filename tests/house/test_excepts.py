"""No `except` drops an error unseen: each raises, or uses what it caught, or stands here with the reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[2]
SHOWN_BY = ("traceback.format_exc", "traceback.print_exc", "sys.exc_info")


def drops(handler: ast.ExceptHandler) -> bool:
    """It neither raises, whatever happens, nor uses what it caught: to ask of which type it is tells nobody."""
    if raises(handler.body):
        return False
    nodes = [*ast.walk(ast.Module(handler.body, []))]
    asked = {
        id(node.args[0]) for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
    }
    for node in nodes:
        if isinstance(node, ast.Name) and node.id == handler.name and id(node) not in asked:
            return False
        if isinstance(node, ast.Attribute) and ast.unparse(node) in SHOWN_BY:
            return False
    return True


def raises(body: list[ast.stmt]) -> bool:
    """Whichever way is taken through these statements, it ends with a raise."""
    for statement in body:
        if isinstance(statement, ast.Raise):
            return True
        if isinstance(statement, ast.If) and raises(statement.body) and raises(statement.orelse):
            return True
        if isinstance(statement, ast.With) and raises(statement.body):
            return True
        if isinstance(statement, ast.Try) and (
            raises(statement.finalbody) or (statement.handlers == [] and raises(statement.body))
        ):
            return True
    return False


FUTURES = ("submit", "create_task", "ensure_future", "run_in_executor", "apply_async", "map_async")
PROCESSES = ("subprocess.run", "subprocess.call", "os.system")


def quiet(node: ast.AST) -> Iterator[str]:
    """What drops an error without an `except`."""
    if isinstance(node, ast.Try):
        leaves = (ast.Return, ast.Break, ast.Continue)
        if any(isinstance(part, leaves) for one in node.finalbody for part in ast.walk(one)):
            yield "finally that leaves"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in ("__exit__", "__aexit__"):
        returned = (part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value is not None)
        if any(ast.unparse(value) not in ("None", "False") for value in returned):
            yield "__exit__ that returns a value"
    if isinstance(node, ast.Call):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        texts = [*given.values(), *map(ast.unparse, node.args)]
        if given.get("return_exceptions", "False") != "False":
            yield "return_exceptions"
        if ast.unparse(node.func) in ("os.walk", "os.fwalk") and "onerror" not in given:
            yield "folders that cannot be read"
        if given.get("ignore_errors", "False") != "False":
            yield "ignore_errors"
        quieted = ("simplefilter", "filterwarnings", "catch_warnings", "errstate")
        if "'ignore'" in texts and ast.unparse(node.func).split(".")[-1] not in quieted:
            yield "errors='ignore'"
        if ast.unparse(node.func).split(".")[-1] in ("Thread", "Timer"):
            yield f"Thread {given.get('target', '')}".strip()
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = ast.unparse(node.value.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.value.keywords}
        if called.split(".")[-1] in FUTURES:
            yield "a future that nobody reads"
        if called in PROCESSES and given.get("check") != "True":
            yield "an exit code that nobody reads"


def dropped(source: str) -> Iterator[tuple[str, str]]:
    """(function, exceptions) of each handler, and each `suppress`, that says nothing of what it caught, and the rest
    that drops an error (see `quiet`). Not seen: a future that is kept and never read, an exit code in a variable."""

    def within(node: ast.AST, where: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"{where}.{node.name}".lstrip(".")
        if isinstance(node, ast.ExceptHandler) and drops(node):
            yield where, ast.unparse(node.type).strip("()") if node.type else "BaseException"
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "suppress":
            yield where, ", ".join(map(ast.unparse, node.args))
        for how in quiet(node):
            yield where, how
        for child in ast.iter_child_nodes(node):
            yield from within(child, where)

    yield from within(ast.parse(source), "")


def all_dropped() -> set[tuple[str, str, str]]:
    files = [*(CLONE / "workbench").rglob("*.py"), *(CLONE / "kernels").rglob("*.py")]
    return {(str(f.relative_to(CLONE)), *one) for f in files for one in dropped(f.read_text(encoding="utf-8"))}


REASONS = {
    "a person ended it, and the command says so or simply ends": (
        "workbench/cli.py _run: KeyboardInterrupt",
        "workbench/lab_server.py run_server: KeyboardInterrupt",
    ),
    "our own signal that ends a loop, and no error": (
        "workbench/serving/api/http.py _let_send: TimeoutError",
        "workbench/lab_server.py run_server: subprocess.TimeoutExpired",  # the moment to look at other things
        "workbench/decoding/beam.py generate_beam: _Cancelled",
        "workbench/parallel/disaggregated/over_collectives.py CollectiveLink._poll: queue.Empty",
        "workbench/parallel/disaggregated/connector.py Receiver.reserve: NoRoom",  # asked for again later
        "workbench/serving/simulate.py Twin.reserve: NoRoom",
        "workbench/parallel/disaggregated/tcp.py TcpLink._get: BlockingIOError",
        "workbench/parallel/disaggregated/tcp.py TcpLink._put: BlockingIOError",
        "workbench/serving/api/front.py Front.drain: TimeoutError",
        "workbench/capstone/judge.py Judging.run: _Failed",  # the gate is among the results
        "workbench/capstone/worker.py Worker.do_time: queue.Empty",
        "workbench/grading/session.py Session._read_output: BlockingIOError",
        "workbench/grading/session.py Session._read_results: BlockingIOError",
        "workbench/panels/base.py Panel._paint_quietly: Stopped",
        "workbench/processes.py _read: BlockingIOError, OSError",
        "workbench/quantization/calibration.py Reading.inputs: _Enough",
    ),
    "the error is the answer to the question that was asked: it is no number, no date, not free, not Python": (
        "workbench/grading/answer_source.py clean: NOT_PYTHON",
        "workbench/grading/answer_source.py with_helpers: NOT_PYTHON",
        "workbench/grading/answer_source.py _statements: NOT_PYTHON",
        "workbench/grading/likeness.py _code_in: SyntaxError, ValueError, RecursionError, MemoryError",
        "workbench/checks/tensors.py kind_of: TypeError, ValueError, RuntimeError",
        "workbench/checks/progress.py _attempt: ValueError, TypeError, KeyError, OverflowError, RecursionError",
        "workbench/cli_serving.py on_loopback: ValueError",
        "workbench/grading/collect.py _is_date: ValueError",
        "workbench/grading/reference.py _object: ImportError, AttributeError",
        "workbench/grading/handed.py _source: ImportError, AttributeError, ValueError",
        "workbench/grading/reference.py looks_inside: SyntaxError, ValueError, RecursionError, MemoryError",
        "workbench/grading/reference.py reaches_around: SyntaxError, ValueError, RecursionError, MemoryError",
        "workbench/grading/reference.py uses: SyntaxError, ValueError, RecursionError, MemoryError",
        "workbench/kv/allocators.py PagedBlocks._grow: NoRoom",
        "workbench/kv/ledger.py Ledger.refuse: WorkbenchError",
        "workbench/lab_server.py _free: OSError",
        "workbench/labs/lab11_serving/probes.py Asking.object: ValueError",
        "workbench/labs/lab11_serving/probes.py Asking.running: OSError, http.client.HTTPException",
        "workbench/labs/lab11_serving/probes.py wrong_value: ValueError, KeyError, TypeError",
        "workbench/labs/lab11_serving/servers.py Peer.wait_until_ready: OSError, http.client.HTTPException",
        "workbench/labs/lab05_quantization/panels/numbers.py _value_in: WorkbenchError",
        "workbench/labs/lab04_smaller_caches/larger_batch.py limits_of_larger_batch.takes: WorkbenchError",
        "workbench/models/evaluation.py parses: SyntaxError, ValueError, OverflowError",
        "workbench/presenting/deck.py parted: SyntaxError",
        "workbench/presenting/needs.py _statements: SyntaxError",
        "workbench/processes.py _event: ValueError",
        "workbench/records/__init__.py _is_date: ValueError",
        "workbench/serving/soak.py Run._abort: WorkbenchError",
        "workbench/speculation/drafts/contract.py cut_back: WorkbenchError",
        "workbench/serving/soak.py Run._refused: WorkbenchError",
    ),
    "what is not there, or cannot be read, is 'not known' to the caller, as the docstring or the type says": (
        "workbench/parallel/shared_memory.py free_shared_memory: OSError",
        "workbench/files.py _mode: FileNotFoundError",
        "workbench/files.py _taken: BlockingIOError",
        "workbench/files.py alone_in: OSError",
        "workbench/models/form_times.py _read: FileNotFoundError",
        "workbench/files.py home: RuntimeError",
        "workbench/grading/child.py _resident_bytes: OSError",
        "workbench/grading/confine.py without: OSError",
        "workbench/grading/confine.py _memory_now: OSError, KeyError",
        "workbench/grading/gradescope.py _student: OSError, ValueError, KeyError, IndexError, TypeError,"
        " RecursionError",
        "workbench/instruments/device.py _nvidia_smi: OSError, subprocess.SubprocessError",
        "workbench/grading/notebooks.py _place_of: OSError",
        "workbench/instruments/device.py cpu_features: OSError",
        "workbench/instruments/device.py package_version: importlib.metadata.PackageNotFoundError",
        "workbench/instruments/doctor.py _version: importlib.metadata.PackageNotFoundError",
        "workbench/instruments/memory.py available_bytes: OSError, ValueError",
        "workbench/instruments/records.py git_commit: OSError, IndexError, UnicodeDecodeError",
        "workbench/labs/lab10_kernels/checks/parts.py _refuse_what_is_no_kernel: OSError",
        "workbench/models/assembly.py _cgroup_bytes: OSError, ValueError",
        "workbench/models/catalogue.py _card: OSError, ValueError",
        "workbench/models/corpus.py _read: UnicodeDecodeError, OSError",
        "workbench/native/large_pages.py in_large_pages: OSError",
        "workbench/recorder/surroundings.py _output: OSError, subprocess.TimeoutExpired",
        "workbench/serving/bench/client.py _retry_after_s: ValueError, TypeError",
    ),
    "a kept result that cannot be read is computed again": (
        "kernels/tuning.py Table.read: OSError, ValueError",
        "workbench/build.py load: Exception",
        "workbench/grading/batch.py _kept: OSError, ValueError, KeyError, TypeError",
        "workbench/grading/gradescope.py _watch: OSError, ValueError, KeyError",
        "workbench/instruments/device.py _read_cache: OSError, ValueError, TypeError, AttributeError, KeyError",
        "workbench/instruments/product_rates.py _read: OSError, ValueError, TypeError, AttributeError, KeyError, "
        "RecursionError",
    ),
    "what was to be ended, closed or deleted is gone already, or goes with its folder": (
        "workbench/serving/api/link.py EngineThread._ended_now: WorkbenchError",
        "workbench/labs/lab11_serving/servers.py started: ProcessLookupError",
        "workbench/grading/child.py serve: OSError",
        "workbench/grading/confine.py _threads_of_user: OSError",
        "workbench/grading/confine.py end_children: ChildProcessError",
        "workbench/grading/confine.py end_children: ProcessLookupError, PermissionError",
        "workbench/grading/desk.py run_task: ProcessLookupError",
        "workbench/grading/server.py _opened: OSError",
        "workbench/grading/server.py _opened: PermissionError",
        "workbench/grading/server.py _unlink_files: OSError",
        "workbench/grading/server.py remove_tree: OSError",
        "workbench/grading/session.py Session._kill: ProcessLookupError, PermissionError",
        "workbench/grading/session.py Session._look: OSError",
        "workbench/grading/session.py Session._signal: ProcessLookupError, PermissionError",
        "workbench/grading/session.py Session.end: OSError, EOFError",
        "workbench/grading/judging.py JudgeProcess.close: ProcessLookupError",
        "workbench/grading/session.py family_of: psutil.Error",
        "workbench/grading/session.py held_bytes: FileNotFoundError, ProcessLookupError",
        "workbench/grading/session.py held_bytes: OSError",
        "workbench/grading/session.py grown_bytes: psutil.Error",
        "workbench/grading/session.py processor_seconds: OSError",
        "workbench/grading/warm.py Forked.send_signal: ProcessLookupError",
        "workbench/grading/warm.py _end: ProcessLookupError",
        "workbench/grading/warm.py serve: ChildProcessError",
        "workbench/grading/warm.py serve: OSError",
        "workbench/capstone/own_parts.py OwnParts.close: ProcessLookupError, PermissionError",
        "workbench/capstone/own_parts.py OwnParts.close: subprocess.TimeoutExpired",
        "workbench/processes.py Child._read_output: OSError",
        "workbench/processes.py Child.answer: OSError",
        "workbench/processes.py Child.close: OSError",
        "workbench/processes.py Child.kill: ProcessLookupError, PermissionError",
        "workbench/processes.py Child.kill: subprocess.TimeoutExpired",
    ),
    "the other side has ended or does not end in time; what follows ends it and says how it ended": (
        "workbench/capstone/own_parts.py OwnParts._ended: subprocess.TimeoutExpired",
        "workbench/serving/api/process.py EngineProcess.stop: subprocess.TimeoutExpired",
        "workbench/serving/api/soak.py Soak._nonsense: ConnectionError, WireError",
        "workbench/serving/api/soak.py Soak.good: ConnectionError, WireError",
        "workbench/grading/server.py Server._stop: subprocess.TimeoutExpired",
        "workbench/grading/warm.py Warm.close: subprocess.TimeoutExpired",
        "workbench/lab_server.py _ended: subprocess.TimeoutExpired",
        "workbench/lab_server.py _wait_until_up: urllib.error.URLError, ConnectionError, TimeoutError",
    ),
    "what an answer did wrong: it stands in the message that its student reads, or in its exit code": (
        "workbench/decoding/guide_trial.py try_out: subprocess.TimeoutExpired",
        "workbench/grading/check.py describe_error: Exception",
        "workbench/grading/check.py _judged: Exception",
        "workbench/grading/judging.py JudgeProcess._ask: BrokenPipeError, BlockingIOError",
        "workbench/labs/lab10_kernels/checks/probes.py _idle: Exception",
        # a refusal, judged as one
        "workbench/labs/lab12_pruning_and_distillation/checks/probes.py run_prune: ValueError",
        "workbench/labs/lab13_parallelism_and_experts/checks/probes.py run_split: ValueError",
        "workbench/labs/lab13_parallelism_and_experts/checks/probes.py run_counts: ValueError",
        "workbench/labs/lab15_capstone/checks/probes.py run_pairs: ValueError",
        "workbench/grading/session.py Session._hear: BrokenPipeError",
        "workbench/grading/session.py Session._heard_exit: OSError, EOFError",
        "workbench/grading/session.py Session._reply: ValueError, RecursionError",
        "workbench/grading/session.py plain: NotEncodable, RecursionError, TypeError, KeyError",
    ),
    "what is known of the failure is said by other means in the same branch": (
        # in `link.why_lost`, and the other end computes what was under way
        "workbench/parallel/disaggregated/prefill.py PrefillEngine._hear: LinkLost",
        "workbench/parallel/disaggregated/prefill.py PrefillEngine._unless_lost: LinkLost",
        "workbench/parallel/disaggregated/over_collectives.py CollectiveLink._close: WorkbenchError",
        # a stranger, who is counted
        "workbench/parallel/shared_memory.py free_shared_memory: OSError",  # no /dev/shm: mapping says what is wrong
        "workbench/parallel/disaggregated/tcp.py _proved: OSError, Ended",
        "workbench/serving/api/http.py Guard.__call__: ConnectionError",  # counted as status 499
        "workbench/grading/desk.py run_task: BaseException",
        "workbench/grading/warm.py fork_bare: ImportError",  # by the server, which imports it again
        "workbench/grading/desk.py _read_outcome: OSError, ValueError, ElementTree.ParseError",
        "workbench/grading/server.py Server._start: OSError, EOFError",
        "workbench/instruments/doctor.py _packages: importlib.metadata.PackageNotFoundError",
        "workbench/labs/lab05_quantization/awq_search.py _yours: TypeError, ValueError",
        "workbench/panels/base.py Panel._work: Stopped",
    ),
    "the slower way, which is right as well, is taken instead": (
        "workbench/grading/batch.py seed_in: FileExistsError",
        "workbench/grading/child.py _become_session: OSError",
        "workbench/files.py _lock: OSError",
        "workbench/grading/desk.py _start_pytest: OSError",
        "workbench/grading/gradescope.py run: OSError",
        "workbench/grading/server.py Server._forked: OSError",
        "workbench/grading/warm.py Warm.start: OSError",
        "workbench/instruments/device.py ceilings: WorkbenchError",
        "workbench/instruments/product_rates.py KeptRates._kept: WorkbenchError",
        "workbench/native/build.py _compiled: WorkbenchError",  # compiled for this process alone
        "workbench/models/form_times.py Once._measure_alone: OSError",  # `put` says why
        "workbench/instruments/device.py cpu_name: OSError, StopIteration",
        "workbench/instruments/memory.py _system_bytes: OSError, StopIteration",
        "workbench/labs/lab10_kernels/cases.py held_to_float64: torch.cuda.OutOfMemoryError",
        "workbench/models/assembly.py _machine_bytes: ImportError",
        "workbench/models/assembly.py _machine_bytes: OSError",
        "workbench/models/training.py _cpu_name: OSError, StopIteration",
        "workbench/processes.py Child.ending: ValueError",
    ),
    "nothing is left to say it to: the output itself is gone or full": (
        "workbench/cli.py _now: OSError",
        "workbench/printing.py Printed._stop: OSError, ValueError, AttributeError",
        "workbench/grading/child.py session.send: Exception",
    ),
    "a thread whose work says itself how it failed, or whose caller sees that its result is missing": (
        "workbench/capstone/worker.py Worker.__init__: Thread self._read",  # the judge sees no answer in time
        "workbench/capstone/worker.py Worker.do_serve: Thread stop",
        "workbench/grading/gradescope.py run: Thread _watch",
        "workbench/labs/lab08_continuous_batching/peer_llama_cpp_slots.py serve: Thread ask",
        "workbench/parallel/disaggregated/over_collectives.py CollectiveLink.__init__: Thread self._receive",
        "workbench/parallel/disaggregated/tcp.py accept: Thread hear",
        "workbench/parallel/ranks.py Ranks.__init__: Thread self._watch",
        "workbench/parallel/disaggregated/tcp.py accept: Thread hear",  # one that proves nothing is closed and counted
        "workbench/parallel/ranks.py _end_with_parent: Thread watch",
        "workbench/parallel/ranks.py _watch_run: Thread watch",
        "workbench/labs/lab11_serving/loopback.py loopback: Thread lambda: asyncio.run(server.serve([at]))",
        "workbench/panels/base.py Panel.refresh: Thread self._paint_all",
        "workbench/panels/base.py Panel.start: Thread self._work",
        "workbench/serving/api/link.py EngineThread.start: Thread self._run",
        "workbench/serving/api/process.py EngineProcess.start: Thread self._read",
        "workbench/serving/api/soak.py _all: a future that nobody reads",  # a TaskGroup reads it
        "workbench/serving/soak.py Run._beside.start: Thread guarded",
    ),
    "a draft, or what is no longer needed, is deleted as far as it can be; the next write or run removes the rest": (
        "workbench/files.py _draft: ignore_errors",
        "workbench/files.py _remove_abandoned: ignore_errors",
        "workbench/models/kept.py _trim: ignore_errors",
        "workbench/models/head_training.py train_heads: ignore_errors",
        "workbench/models/training.py remove_state: ignore_errors",
        "workbench/models/training.py save_state: ignore_errors",
    ),
}
KNOWN = {entry: reason for reason, entries in REASONS.items() for entry in entries}


def test_no_except_drops_an_error_without_a_reason():
    found = {f"{file} {function}: {exceptions}" for file, function, exceptions in all_dropped()}
    assert found - set(KNOWN) == set(), "raise it, use what was caught, or say here why it may be dropped"
    assert set(KNOWN) - found == set(), "these are no more: take them out"


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ("try: f()\nexcept ValueError: pass", [("", "ValueError")]),
        ("try: f()\nexcept: pass", [("", "BaseException")]),
        ("try: f()\nexcept (OSError, ValueError) as error: log = 1", [("", "OSError, ValueError")]),
        ("def g():\n with contextlib.suppress(Exception): f()", [("g", "Exception")]),
        ("class C:\n def g(self):\n  try: f()\n  except Exception: return 3", [("C.g", "Exception")]),
        ("try: f()\nexcept BaseException: pass", [("", "BaseException")]),
        ("def g():\n try: f()\n finally: return 1", [("g", "finally that leaves")]),
        ("for a in b:\n try: f()\n finally: continue", [("", "finally that leaves")]),
        ("class C:\n def __exit__(self, *error): return True", [("C.__exit__", "__exit__ that returns a value")]),
        ("class C:\n def __exit__(self, *error): return None", []),
        ("await asyncio.gather(f(), return_exceptions=True)", [("", "return_exceptions")]),
        ("data.decode('utf-8', 'ignore')", [("", "errors='ignore'")]),
        ("open(path, errors='ignore')", [("", "errors='ignore'")]),
        ("warnings.simplefilter('ignore')", []),
        ("shutil.rmtree(folder, ignore_errors=True)", [("", "ignore_errors")]),
        ("threading.Thread(target=work).start()", [("", "Thread work")]),
        ("pool.submit(f)", [("", "a future that nobody reads")]),
        ("future = pool.submit(f)", []),
        ("subprocess.run(['a'], check=False)", [("", "an exit code that nobody reads")]),
        ("subprocess.run(['a'], check=True)", []),
        ("try: f()\nexcept ValueError as error: print(error)", []),
        ("try: f()\nexcept ValueError: raise", []),
        ("try: f()\nexcept ValueError:\n if a: raise", [("", "ValueError")]),
        ("try: f()\nexcept ValueError:\n if a: raise\n else: raise b", []),
        ("try: f()\nexcept ValueError as error:\n if isinstance(error, A): raise", [("", "ValueError")]),
        ("try: f()\nexcept ValueError as error:\n if not isinstance(error, A): raise\n log(error)", []),
        ("for a in os.walk(b): f()", [("", "folders that cannot be read")]),
        ("for a in os.walk(b, onerror=f): f()", []),
        ("try: f()\nexcept Exception: traceback.print_exc()", []),
    ],
)
def test_what_drops_an_error_is_seen(body, seen):
    assert list(dropped(body)) == seen
