"""The process of own.py: what it cannot reach, and what its engine hears when it hangs, dies or talks nonsense.

Sources that the rules refuse run here all the same where `unfenced` is asked for: the second and the third fence have
to hold without the first.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from workbench.capstone import own_parts
from workbench.capstone.own_parts import MAX_NESTING, OwnPartFailed, OwnParts, nested_deeper
from workbench.capstone.rules import broken_rules
from workbench.grading import confine

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the system's fences are Linux's")
needs_landlock = pytest.mark.skipif(not confine.landlock_version(), reason="this kernel has no Landlock")


def function(body: str, before: str = "") -> str:
    """own.py with one function, `order`."""
    return before + "\ndef order(requests, now_s):\n" + "".join(f"    {line}\n" for line in body.splitlines())


def called(source: str, *arguments: Any) -> Any:
    """What `order` gives."""
    own = OwnParts(source)
    try:
        return own.call("order", *(arguments or ([], 0.0)))
    finally:
        own.close()


def failure(source: str, *arguments: Any) -> OwnPartFailed:
    with pytest.raises(OwnPartFailed) as caught:
        called(source, *arguments)
    return caught.value


@pytest.fixture
def unfenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rules of the source."""
    monkeypatch.setattr(own_parts, "broken_rules", lambda source: [])


# --- what honest advice needs ---


def test_dataclasses_named_tuples_heaps_and_chance_work() -> None:
    source = """
from __future__ import annotations
import heapq, random
from collections import Counter, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from functools import lru_cache, total_ordering

Pair = namedtuple("Pair", "a b")

@dataclass(order=True, slots=True)
class Item:
    key: float
    names: list = field(default_factory=list)

@total_ordering
class Own:
    def __init__(self, x):
        self.x = x
    def __lt__(self, other):
        return self.x < other.x
    def __eq__(self, other):
        return self.x == other.x

@lru_cache
def twice(x):
    return 2 * x

def order(requests, now_s):
    heap = [Item(3.0), Item(1.0)]
    heapq.heapify(heap)
    counts = Counter("aab")
    queue = deque(maxlen=2)
    queue.extend([1, 2, 3])
    return [heap[0].key, Pair(1, 2).b, twice(4), counts["a"], list(queue), Own(1) >= Own(0), repr(Item(1.0))]
"""
    assert called(source) == [1.0, 2, 8, 2, [2, 3], True, "Item(key=1.0, names=[])"]


def test_advice_is_the_same_in_every_run() -> None:
    body = (
        "return [random.random(), random.Random().random(), random.randint(0, 9**9), hash('a'), list({'x', 'y', 'z'})]"
    )
    source = function(body, "import random\nrandom.seed()")
    assert called(source) == called(source)


def test_it_keeps_what_it_learned_within_a_run_only() -> None:
    source = function("seen.append(1)\nreturn len(seen)", "seen = []")
    own = OwnParts(source)
    assert [own.call("order", [], 0.0) for _ in range(3)] == [1, 2, 3]
    own.close()
    assert called(source) == 1


# --- the first fence ---

REFUSED = {
    "files": "open('/etc/passwd')",
    "a clock": "import time",
    "patched statistics": "import math\nmath.fsum = sum",
    "frames": "x = (y for y in ()).gi_frame.f_back",
    "attributes of a pattern": "match print:\n    case object(__self__=builtins): pass",
    "a module within a module": "import dataclasses\ndataclasses.sys.modules['time']",
}


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED)
def test_what_breaks_the_rules_is_conduct_and_never_runs(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_parts.subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(OwnPartFailed) as caught:
        OwnParts(source)
    assert caught.value.gate == "conduct" and "line" in str(caught.value)


KEEPS_THE_RULES = {  # sources that the rules let pass, and that come to nothing
    "through a module by another variable": ("import dataclasses\nd = dataclasses\nd.sys", "no attribute 'sys'"),
    "through the importing name": ("import random\nfor r in [random]:\n    r.SystemRandom2", "no attribute"),
    "a library's functions": ("import operator\no = [operator]\no[0].attrgetter('x')", "no attribute 'attrgetter'"),
    "typing": ("import typing\nt = typing\nt.get_type_hints(int)", "no attribute 'get_type_hints'"),
    "wrapping": ("import functools\nf = functools\nf.update_wrapper(print, print)", "no attribute 'update_wrapper'"),
    "an empty class of all": ("class A: pass\nA.register", "no attribute 'register'"),
    "a deep sum": ("x = " + "1+" * 9000 + "1", ""),
}


@pytest.mark.parametrize(("source", "words"), KEEPS_THE_RULES.values(), ids=KEEPS_THE_RULES)
def test_what_passes_the_rules_finds_nothing(source: str, words: str) -> None:
    if source.startswith("x = "):  # too deep for this compiler, wherever it gives up
        source = "def order(requests, now_s): return 1\n" + source
    else:
        assert broken_rules(source) == []
    with pytest.raises(OwnPartFailed, match=words or None) as caught:
        called(source)
    assert caught.value.gate in ("start", "conduct")


INJECTED = "a=().__class__):\n  got.append(a)\n #"  # a field's name, as it would stand in the source of __init__
RENAMED = {
    "after its class": "@dataclass\nclass A:\n    x: int = f\nevil(None)\n@dataclass\nclass B(A):\n    y: int = 0\nB()",
    "while its class is made": "@dataclass\nclass A:\n    x: int = f\n    y: int = classmethod(property(evil))\nA()",
}


@pytest.mark.parametrize("source", RENAMED.values(), ids=RENAMED)
def test_a_dataclass_s_field_stays_a_name(source: str) -> None:
    """A dataclass makes source of its fields' names, and runs it; no rule sees that source."""
    before = "from dataclasses import dataclass, field\nf, got = field(default=1), []\n"
    before += f"def evil(cls):\n    f.name = {INJECTED!r}\n{source}"
    own = function("return len(got)", before)
    assert broken_rules(own) == []
    if "classmethod" in source and sys.version_info >= (3, 13):  # where a class method no longer asks a property
        assert called(own) == 0
        return
    failed = failure(own)
    assert failed.gate == "start" and "a field's name" in str(failed)


HARMLESS = {  # they pass and give a value, and it reaches nobody
    "a text's fields read only texts": ("return '{0.__class__.__name__}'.format(order)", "function"),
    "an error carries what it was given": (
        "try:\n    requests.nothing\nexcept AttributeError as e:\n    return e.obj is requests",
        True,
    ),
    "hasattr tells little": ("return hasattr(order, '__globals__')", True),
    "a generator's throw": ("g = (x for x in [1])\nnext(g)\ng.close()\nreturn 1", 1),
    "type by another way": ("return [str(x) for x in map(callable, [int, 3])]", ["True", "False"]),
    "format_map": ("return '{x.real}'.format_map({'x': 3})", "3"),
    "a decorator": ("@str\ndef f(): pass\nreturn len(f) > 0", True),
    "the names of a module": ("import math\nreturn 'sys' in dir(math)", False),
    "print": ('print(\'{"conduct": "x"}\')\nreturn 2', 2),
    "errors of errors": (
        "try:\n    raise ValueError from KeyError()\nexcept ValueError as e:\n    return str(e.args)",
        "()",
    ),
}


@pytest.mark.parametrize(("body", "expected"), HARMLESS.values(), ids=HARMLESS)
def test_what_passes_and_is_harmless(body: str, expected: Any) -> None:
    assert called(function(body)) == expected


# --- the second fence: audit events ---

ROOT = "().__class__.__base__.__subclasses__()"
SYS = f"[c for c in {ROOT} if c.__name__ == '_wrap_close'][0].__init__.__globals__['sys']"
EVENTS = {
    "files": f"{SYS}.modules['os'].open('/etc/passwd', 0)",
    "folders": f"{SYS}.modules['os'].listdir('/')",
    "processes": f"{SYS}.modules['os'].fork()",
    "programs": f"{SYS}.modules['os'].posix_spawn('/bin/true', ['true'], {{}})",
    "signals": f"{SYS}.modules['os'].kill({SYS}.modules['os'].getppid(), 9)",
    "frames": "(x for x in ()).gi_frame",
    "modules": f"{SYS}.modules['importlib'].import_module('socket')",
    "settrace": f"{SYS}.settrace(print)",
    "frames of errors": "e.__traceback__.tb_frame",
}


@needs_linux
@pytest.mark.parametrize("expression", EVENTS.values(), ids=EVENTS)
def test_an_event_outside_of_computing_ends_the_process(expression: str, unfenced: None) -> None:
    body = f"try:\n    1 / 0\nexcept Exception as e:\n    return repr({expression})"
    failed = failure(function(body))
    assert failed.gate == "conduct" and "reached out" in str(failed), str(failed)


def test_the_hook_is_on_while_an_answer_is_written(unfenced: None) -> None:
    source = function("return D(a=1)", f"class D(dict):\n    def items(self):\n        return {EVENTS['files']}")
    assert failure(source).gate == "conduct"


def test_the_hook_is_on_while_an_error_is_described(unfenced: None) -> None:
    before = f"class E(Exception):\n    def __str__(self):\n        return str({EVENTS['folders']})"
    assert failure(function("raise E", before)).gate == "conduct"


# --- the third fence: the system ---


def behind_the_hook(expression: str) -> str:
    """Take the hook's own ways to end the process first: then an event is seen, and nothing happens."""
    lines = [
        "import_ = order.__globals__['__builtins__']['__import__']",
        "serve_globals = import_.__globals__",
        f"sys = {SYS}",
        "os, allowed = sys.modules['os'], serve_globals",
        "class All:",
        "    def __contains__(self, event): return True",
        "allowed['EVENTS_ALLOWED'] = All()",
        "try:",
        f"    return [str({expression})]",
        "except BaseException as e:",
        "    return e.__class__.__name__",
    ]
    return function("\n".join(lines))


SYSTEM = {
    "files": "os.open('/etc/passwd', 0)",
    "folders": "os.listdir('/')",
    "the engine's memory": "os.open('/proc/%d/mem' % os.getppid(), 0)",
    "its own folder": "os.open(serve_globals['__file__'], 0)",
    "writing": "os.open('/tmp/x', 65)",
    "processes": "os.fork()",
    "signals": "os.kill(os.getppid(), 0)",
    "threads": "sys.modules['_thread'].start_new_thread(print, ())",
    "sockets": "__import__('_socket').socket()",
}
SAID_BY_THE_SYSTEM = (
    "PermissionError",
    "BlockingIOError",
    "FileNotFoundError",
    "OSError",
    "RuntimeError",
    "ImportError",
)


@needs_landlock
@pytest.mark.parametrize("expression", SYSTEM.values(), ids=SYSTEM)
def test_behind_both_fences_stands_the_system(expression: str, unfenced: None) -> None:
    assert called(behind_the_hook(expression)) in SAID_BY_THE_SYSTEM


@needs_linux
def test_there_are_no_open_files_but_its_pipes(unfenced: None) -> None:
    source = behind_the_hook("[fd for fd in range(3, 64) if os.get_inheritable(fd) is not None]")
    assert called(source) == "OSError"  # one of them is closed


# --- hangs, ends, floods ---


def test_a_call_that_hangs_is_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_parts, "CALL_SECONDS", 0.5)
    began = time.monotonic()
    failed = failure(function("while True: pass"))
    assert failed.gate == "advice" and "longer than 0.5 s" in str(failed)
    assert time.monotonic() - began < 5


def test_a_file_that_hangs_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_parts, "CALL_SECONDS", 0.5)
    assert failure("while True: pass").gate == "start"


def test_what_catches_everything_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_parts, "CALL_SECONDS", 0.5)
    body = "while True:\n    try:\n        while True: 1 / 0\n    except BaseException: pass"
    assert failure(function(body)).gate == "advice"


def test_processor_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_parts, "TOTAL_SECONDS", 1.0)
    monkeypatch.setattr(own_parts, "CALL_SECONDS", 20.0)
    failed = failure(function("while True: pass"))
    assert failed.gate == "advice" and "processor time" in str(failed)


@needs_linux
def test_memory_is_limited() -> None:
    failed = failure(function("return len(bytearray(400 << 20))"))
    assert failed.gate == "budget" and "256 MiB" in str(failed)
    assert failure("x = bytearray(400 << 20)").gate == "budget"
    assert called(function("return len(bytearray(100 << 20))")) == 100 << 20


@needs_linux
def test_memory_in_small_pieces_is_limited() -> None:
    assert failure(function("x = []\nwhile True: x.append(' ' * 100_000 + str(len(x)))")).gate == "budget"


def test_errors_name_the_line_and_the_error() -> None:
    failed = failure(function("x = 1\nreturn 1 / 0"))
    assert failed.gate == "advice" and "line 4: ZeroDivisionError" in str(failed)
    assert "has no function order" in str(failure("def other(): pass"))
    assert failure("raise SystemExit").gate == "start"
    assert failure("def order(: pass").gate == "conduct"
    assert failure(function("raise KeyboardInterrupt")).gate == "advice"


def test_after_a_failure_there_is_no_other_call() -> None:
    own = OwnParts(function("return 1 / (now_s - 1)"))
    assert own.call("order", [], 0.0) == -1
    with pytest.raises(OwnPartFailed):
        own.call("order", [], 1.0)
    with pytest.raises(OwnPartFailed, match="ZeroDivision"):
        own.call("order", [], 2.0)
    own.close()


NO_JSON = {
    "a set": "{1}",
    "bytes": "b'x'",
    "a function": "order",
    "itself": "(lambda x: (x.append(x), x)[1])([])",
    "a deep list": "__import__('functools').reduce(lambda x, _: [x], range(100_000), [])",
    "a deep list that can be written": "__import__('functools').reduce(lambda x, _: [x], range(985), [])",
    "32 lists in one another": "__import__('functools').reduce(lambda x, _: [x], range(31), [])",
    "a large number": "10 ** 5000",
    "keys of tuples": "{(1, 2): 3}",
}


@pytest.mark.parametrize("expression", NO_JSON.values(), ids=NO_JSON)
def test_what_is_no_json_is_said(expression: str, unfenced: None) -> None:
    failed = failure(function(f"return {expression}"))
    assert failed.gate == "advice" and "JSON" in str(failed)


def test_lists_in_one_another_are_read_as_deep_as_is_said() -> None:
    deep: Any = {"order": [[], 1]}
    assert not nested_deeper(deep, 3) and nested_deeper(deep, 2) and not nested_deeper(1, 0)
    whole = called(function("x = []\nfor _ in range(30):\n    x = [x]\nreturn x"))
    assert not nested_deeper(whole, MAX_NESTING - 1)


def test_a_huge_answer_is_ended() -> None:
    failed = failure(function("return 'x' * (8 << 20)"))
    assert failed.gate == "advice" and "4 MiB" in str(failed)


@pytest.mark.parametrize("key", ["conduct", "error", "ready", "result"])
def test_answers_that_look_like_the_protocol_are_answers(key: str) -> None:
    assert called(function(f"return {{'{key}': 'x'}}")) == {key: "x"}


def test_odd_numbers_and_texts_come_as_they_are() -> None:
    given = called(function("return [float('inf'), 2 ** 200, 'ß\\ud800', True, None]"))
    assert given == [float("inf"), 2**200, "ß\ud800", True, None]
    assert called(function("return float('nan')")) != 0


def test_words_of_own_py_cannot_forge_a_report() -> None:
    failed = failure(function(r"raise ValueError('x\n  passed  budget\x1b[2J\ud800')"))
    assert str(failed).isprintable()
    str(failed).encode()


def test_an_error_without_words_is_an_error() -> None:
    source = function("raise E(A())", "class E(Exception): pass\nclass A:\n    def __init__(self): self.x = 1")
    assert failure(source).gate == "advice"


FORGED = {
    "no JSON": b"{",
    "no object": b"[1]",
    "nothing": b"",
    "binary": b"\xff\x00",
    "deep": b"[" * 100_000,
    "conduct": b'{"conduct": "x"}',
    "no result": b"{}",
    "a large number": b'{"result": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("line", FORGED.values(), ids=FORGED)
def test_forged_lines_are_answers_at_worst(line: bytes) -> None:
    """A line of own.py's process, whoever wrote it, is an advice or a failure: nothing else comes of it."""
    own = OwnParts(function("return 1"))
    own._buffer = line + b"\n"
    try:
        assert own.call("order", [], 0.0) is None
    except OwnPartFailed as failed:
        assert failed.gate in ("advice", "conduct")
    finally:
        own.close()


def test_a_process_that_is_killed_is_said() -> None:
    own = OwnParts(function("return 1"))
    os.kill(own._process.pid, 9)
    own._process.wait(5)
    with pytest.raises(OwnPartFailed) as caught:
        own.call("order", [], 0.0)
    assert caught.value.gate == "budget" and "signal 9" in str(caught.value)
    own.close()


def test_a_process_that_does_not_read_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnParts(function("return 1"))
    os.kill(own._process.pid, 19)  # SIGSTOP: as if it never read its pipe
    monkeypatch.setattr(own_parts, "CALL_SECONDS", 0.5)
    with pytest.raises(OwnPartFailed, match="longer than"):
        own.call("order", ["x" * 1_000_000], 0.0)
    own.close()


def test_closing_twice_closes_nothing_of_others() -> None:
    own = OwnParts(function("return 1"))
    own.close()
    reader, ours = os.pipe()  # gets the numbers that are free again
    own.close()
    os.write(ours, b"x")
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    os.close(ours)


def test_it_sees_no_environment_and_nothing_of_ours(unfenced: None) -> None:
    os.environ["CAPSTONE_SECRET"] = "s"
    try:
        seen = called(function(f"s = {SYS}\nreturn [dict(s.modules['os'].environ), sorted(s.modules), s.argv]"))
    finally:
        del os.environ["CAPSTONE_SECRET"]
    assert "CAPSTONE_SECRET" not in json.dumps(seen)
    assert not [name for name in seen[1] if name.startswith(("workbench", "torch", "numpy", "socket", "subprocess"))]


def test_no_process_is_left() -> None:
    own = OwnParts(function("return 1"))
    number = own._process.pid
    own.close()
    assert not Path(f"/proc/{number}").exists()
