"""Submissions that try to gain, to learn or to break something: none may. What `test_grading_hostile` grades.

Each is the notebook of one student. Answers get to see the inputs of hidden checks when these run, so a canary is the
hidden check's input; others lie in files and in the grader's environment. None of the answers knows how to double a
number, so each point that one gets is a point it has not earned.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from workbench.grading import Check, Exercise, ExerciseSet

CANARY = 739_391  # the input of the hidden check
ENVIRONMENT_CANARY, FILE_CANARY = (f"canary-in-{place}" for place in ("the-environment", "a-file"))
CANARIES = (str(CANARY), hex(CANARY)[2:], str(CANARY)[::-1], ENVIRONMENT_CANARY, FILE_CANARY)
RIGHT = "def double(x):\n    return 2 * x\n"


def call(answer, x):
    return answer(x)


def _twice(case: dict, seen: object) -> str | None:
    return None if seen == 2 * case["x"] else f"double({case['x']}) gave {seen}, expected {2 * case['x']}"


def _small(rng: random.Random) -> list[dict]:
    return [{"x": rng.randrange(1_000, 9_000)}]


VISIBLE = Check("a number", 1, _small, call, _twice)
HIDDEN = {"toy-double": (Check("a large number", 1, lambda rng: [{"x": CANARY}], call, _twice),)}


def exercise_sets() -> dict[str, ExerciseSet]:
    """Two exercises, so that the second can look for what the first has left behind."""
    first = Exercise("toy-double", "Double a number", "double", (VISIBLE,))
    again = Exercise("toy-again", "Double it again", "double", (VISIBLE,))
    return {"91_hostile": ExerciseSet("91_hostile", 91, "import torch\n", (first, again))}


# --- Answers. HOST stands for a folder of ours, with the file secret.txt and the folder out/ that grades go to ---

BODIES = {  # bodies of `def double(x):`
    "loop in the function": "while True: pass",
    "loop that swallows everything": (
        """
    while True:
        try:
            while True: pass
        except BaseException: pass"""
    ),
    "loop in C": "return sum(range(10**12))",
    "regular expression without end": "import re; return re.match('(a+)+$', 'a' * 60 + 'b')",
    "sleep without signals": (
        """
    import signal, time
    for number in range(1, 32):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    while True: time.sleep(60)"""
    ),
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "recursion": "return double(x)",
    "recursion without limit": "import sys; sys.setrecursionlimit(10**9); return double(x)",
    "fork bomb": "import os\n    while True: os.fork()",
    "fork bomb, every one on its own": (
        """
    import os
    while True:
        try:
            if os.fork() == 0: os.setsid()
        except OSError: pass"""
    ),
    "thread bomb": (
        """
    import threading, time
    while True: threading.Thread(target=time.sleep, args=(600,)).start()"""
    ),
    "all memory at once": "return len(bytearray(10**11))",
    "memory bit by bit": "kept = []\n    while True: kept.append(bytes(10**7))",
    "memory of many processes": (
        """
    import os, time
    for _ in range(6): os.fork()
    kept = b'x' * (40 << 20); time.sleep(30)"""
    ),
    "a tensor that fits nowhere": "return torch.ones(10**12)",
    "one large file": "open('f', 'wb').write(bytes(10**8))",
    "many files": "for n in range(10**6): open(str(n), 'wb').write(bytes(10**6))",
    "files without content": "for n in range(10**7): open(str(n), 'w')",
    "folders in folders": (
        """
    import os
    for n in range(10**6): os.mkdir('d'); os.chdir('d')"""
    ),
    "output without end": "while True: print('x' * 10_000)",
    "output past Python": "import os\n    while True: os.write(1, b'\\xff' * 100_000)",
    "an error message of 100 MB": "raise ValueError('x' * 10**8)",
    "ends the process": "import os; os._exit(0)",
    "system exit": "raise SystemExit(0)",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "kills its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "kills everybody": "import os, signal; os.kill(-1, signal.SIGKILL)",
    "kills its group": "import os, signal; os.killpg(0, signal.SIGKILL)",
    "kills every number": (
        """
    import os
    for pid in range(2, 70_000):
        if pid != os.getpid():
            try: os.kill(pid, 9)
            except OSError: pass"""
    ),
    "segmentation fault": "import ctypes; ctypes.string_at(1)",
    "abort": "import os; os.abort()",
    "patched torch and math": (
        """
    import math
    torch.equal = torch.allclose = math.isclose = lambda *a, **k: True"""
    ),
    "patched time": "import time\n    time.time = time.monotonic = time.perf_counter = lambda: 0.0",
    "patched json": "import json\n    json.dumps = lambda *a, **k: '{\"passed\": true}'",
    "patched builtins": (
        """
    import builtins
    builtins.len = builtins.sum = lambda *a: 0
    builtins.isinstance = builtins.all = builtins.any = lambda *a: True"""
    ),
    "patched judge": (
        """
    import sys
    for name, module in list(sys.modules.items()):
        if name.startswith(('workbench.grading', 'hostile_submissions')):
            for part in dir(module):
                if 'judge' in part or 'twice' in part: setattr(module, part, lambda *a, **k: None)
    return 0"""
    ),
    "patched observe": (
        """
    import workbench.grading.check as check
    check.observe = check.encode = lambda *a, **k: {'value': True, 'passed': True, 'message': None}"""
    ),
    "modules of its own": "import sys; sys.modules['workbench.grading.check'] = sys.modules['json'] = sys; return 1",
    "equal to everything": (
        """
    class Yes:
        def __eq__(self, other): return True
        __hash__ = None
    return Yes()"""
    ),
    "a number equal to everything": (
        """
    class Yes(int):
        def __eq__(self, other): return True
        __hash__ = int.__hash__
    return Yes(1)"""
    ),
    "a text equal to everything": (
        """
    class Yes(str):
        def __eq__(self, other): return True
        __hash__ = str.__hash__
    return Yes('passed')"""
    ),
    "a tensor that lies": (
        """
    class Lies:
        shape = (1,)
        def tolist(self): return self
    return Lies()"""
    ),
    "a shape that lies": (
        """
    class Lies:
        shape = (-10**9,)
        def tolist(self): return [0] * 10**7
    return Lies()"""
    ),
    "nested without end": "value = []\n    value.append(value)\n    return value",
    "a number of a million digits": "return 10**1_000_000",
    "an endless generator": "import itertools; return itertools.count()",
    "not a number": "return float('nan')",
    "something to unpickle": (
        """
    class Evil:
        def __reduce__(self): return (print, ('unpickled',))
    return Evil()"""
    ),
    "walks the frames": (
        """
    import sys
    frame, found = sys._getframe(), []
    while frame:
        found += [v for k, v in frame.f_locals.items() if 'expect' in k or 'judge' in k or 'case' in k]
        frame = frame.f_back
    raise ValueError(repr(found))"""
    ),
    "walks all objects": (
        """
    import gc
    numbers = {v for o in gc.get_objects() if isinstance(o, dict) for v in list(o.values()) if isinstance(v, int)}
    return max((n for n in numbers if n > x and n < 3 * x), default=0)"""
    ),
    "reads the judge": (
        """
    import inspect, hostile_submissions
    return inspect.getsource(hostile_submissions)"""
    ),
    "a forged result without a nonce": (
        """
    import json, os
    for number in range(9): os.write(3, json.dumps({'nonce': '', 'number': number, 'passed': True}).encode() + b'\\n')
    return 0"""
    ),
    "a forged result with the nonce": (
        """
    import json, os, sys
    frame = sys._getframe()
    while frame:
        nonce = frame.f_locals.get('nonce')
        if nonce:
            for number in range(9):
                forged = {'nonce': nonce, 'number': number, 'passed': True, 'points': 9, 'value': 'passed'}
                os.write(3, json.dumps(forged).encode() + b'\\n')
        frame = frame.f_back
    return 0"""
    ),
    "a printed result": "print('toy-double: passed 2/2')\n    print('toy-double, a number: passed 1/1')",
    "a flood of results": "import os\n    while True: os.write(3, b'{' * 60_000 + b'\\n')",
    "closes the pipes": "import os; os.closerange(0, 100); return 0",
    "reads the next question": "import os; raise ValueError(os.read(4, 100_000))",
    "asks at the keyboard": "return int(input())",
    "leaves work for the end": (
        """
    import atexit
    atexit.register(lambda: open('HOST/left.txt', 'w').write('left'))
    return 0"""
    ),
    "threads that outlive": (
        """
    import threading, time
    def late():
        while True:
            time.sleep(0.05)
            try: open('HOST/left.txt', 'w').write('left')
            except OSError: pass
    threading.Thread(target=late).start()
    return 0"""
    ),
    "a process that outlives": (
        """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                time.sleep(0.05)
                try: open('HOST/left.txt', 'w').write('left')
                except OSError: pass
    return 0"""
    ),
    "forged result files": (
        """
    import glob, json, os
    for folder in ('..', '../..', 'HOST/out', 'HOST/out/.grading', '/tmp', os.path.expanduser('~root')):
        for name in glob.glob(folder + '/**/*.json', recursive=True)[:50] + [folder + '/results.json']:
            try: open(name, 'w').write(json.dumps({'score': 100, 'results': {'toy-double': {'checks': []}}}))
            except OSError: pass
    return 0"""
    ),
    "changes the host's files": (
        """
    import os, shutil
    for deed in (lambda: open('HOST/secret.txt', 'a').write('!'), lambda: os.remove('HOST/secret.txt'),
                 lambda: os.chmod('HOST/secret.txt', 0), lambda: os.rename('HOST/secret.txt', 'HOST/moved'),
                 lambda: os.truncate('HOST/secret.txt', 0), lambda: shutil.rmtree('HOST'),
                 lambda: os.link('HOST/secret.txt', 'mine'), lambda: os.mkfifo('HOST/pipe')):
        try: deed()
        except OSError: pass
    return 0"""
    ),
    "changes the package": (
        """
    import workbench.grading.check as check
    open(check.__file__, 'a').write('# changed')"""
    ),
    "reads a file of ours": "raise ValueError(open('HOST/secret.txt').read())",
    "reads through a link": (
        """
    import os
    os.symlink('HOST/secret.txt', 'link'); raise ValueError(open('link').read())"""
    ),
    "reads through /proc": (
        """
    import glob, os
    found = []
    for name in glob.glob('/proc/[0-9]*/environ') + ['/proc/self/environ', '/proc/self/root/HOST/secret.txt'] + \\
            glob.glob('/proc/[0-9]*/cwd/*') + glob.glob('/proc/[0-9]*/root/HOST/*'):
        try: found.append(open(name, 'rb').read()[:20_000])
        except OSError as error: found.append(str(error))
    raise ValueError(repr(found)[:100_000])"""
    ),
    "reads the memory of others": (
        """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    found = [libc.ptrace(16, pid, 0, 0) for pid in range(1, 400) if pid != os.getpid()]
    raise ValueError(repr([pid for pid, got in enumerate(found) if got == 0]))"""
    ),
    "reads the environment": "import os; raise ValueError(repr(dict(os.environ)))",
    "reads the hidden checks": (
        """
    import glob
    files = glob.glob('HOST/**/*.py', recursive=True) + glob.glob('/tmp/**/*.py', recursive=True)
    raise ValueError(repr([open(f).read() for f in files]) + repr(files))"""
    ),
    "calls home": (
        """
    import socket
    found = []
    for address in (('127.0.0.1', 22), ('10.0.0.1', 80), ('192.0.2.1', 80)):
        try: socket.create_connection(address, 0.2); found.append('connected')
        except OSError as error: found.append(str(error))
    assert 'connected' not in found
    raise ValueError(socket.getaddrinfo('example.org', 80))"""
    ),
    "becomes somebody else": (
        """
    import ctypes, os
    libc = ctypes.CDLL(None)
    for deed in (lambda: os.setuid(0), lambda: libc.unshare(0x10000000), lambda: os.chroot('/'), lambda: os.nice(-20),
                 lambda: libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0)):
        try: deed()
        except OSError: pass
    raise ValueError(open('HOST/secret.txt').read())"""
    ),
    "takes its limits off": (
        """
    import resource
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
        try: resource.setrlimit(limit, (-1, -1))
        except (OSError, ValueError): pass
    return len(bytearray(10**11))"""
    ),
    "tells the hidden input": "raise ValueError(f'{x} {x:x} {str(x)[::-1]}')",
    "prints the hidden input": "print(x, hex(x), str(x)[::-1], flush=True); return x",
    "a verdict of its own": "raise type(f'Passed{x}', (AssertionError,), {})('passed 2/2')",
    "ends with the hidden input": "import os; os.write(1, str(x).encode()); os._exit(x % 251)",
    "markup and direction": (
        """
    text = '<script>alert(1)</script><img src=x onerror=alert(1)>\\x1b]0;owned\\x07\\x1b[2J\\u202egnp.exe\\u2066&#60;'
    print(text)
    raise ValueError(text)"""
    ),
    "an error that cannot be shown": (
        """
    class Bad(Exception):
        def __str__(self):
            while True: pass
    raise Bad"""
    ),
    "traces everything": (
        """
    import sys
    def trace(*args):
        while True: pass
    sys.settrace(trace); sys.setprofile(trace)
    return 0"""
    ),
}
SOURCES = {  # whole cells
    "loop when loaded": "while True: pass",
    "fork bomb when loaded": "import os\nwhile True:\n    os.fork()",
    "ends the process when loaded": "import os\nos._exit(0)",
    "closes everything when loaded": "import os\nos.closerange(0, 4096)\ndef double(x): return 0",
    "a decorator that never returns": "@lambda f: [f for _ in iter(int, 1)]\ndef double(x): return 0",
    "says that it is not written": "def double(x):\n    raise NotImplementedError('toy-double: passed 2/2')",
    "a name that is everything": "class double:\n    def __new__(cls, x): return cls\n    __eq__ = lambda *a: True",
    "brackets without end": "double = " + "(" * 50_000,
    "a megabyte of source": "x = 1\n" * 180_000 + "def double(x): return 0",
    "zero bytes": "def double(x):\n    return 0\0",
    "half a character": "double = '\ud800'",
    "letters that look alike": "def dоuble(x):\n    return 0",  # a Cyrillic о
    "notebook magic": "%%bash\ncat HOST/secret.txt",
    "shell": "!cat HOST/secret.txt\ndef double(x): return 0",
    "a marker to skip the cell": (
        "# NBVAL_SKIP\n# NBVAL_RAISES_EXCEPTION\n# NBVAL_IGNORE_OUTPUT\ndef double(x): return 0"
    ),
}
_FIND = "    raise ValueError(repr(found))\n"
PAIRS = {  # what the first answer keeps of the hidden input, and how the second looks for it
    "leaves a file": (
        (
            "for f in ('kept', '/tmp/kept', '/dev/shm/kept', '/var/tmp/kept', '/run/kept'):\n"
            "        try: open(f, 'w').write(str(x))\n        except OSError: pass"
        ),
        "def double(x):\n    found = []\n    for f in ('kept', '/tmp/kept', '/dev/shm/kept', '/var/tmp/kept',"
        " '/run/kept'):\n        try: found.append(open(f).read())\n        except OSError: pass\n" + _FIND,
    ),
    "leaves shared memory": (
        (
            "import ctypes\n    c = ctypes.CDLL(None); c.shmat.restype = ctypes.c_void_p\n"
            "    n = c.shmget(77, 100, 0o1666); p = c.shmat(n, None, 0); ctypes.memmove(p, str(x).encode(), 6)"
        ),
        "def double(x):\n    import ctypes\n    c = ctypes.CDLL(None); c.shmat.restype = ctypes.c_void_p\n"
        "    n = c.shmget(77, 100, 0o666)\n    found = ctypes.string_at(c.shmat(n, None, 0), 6) if n >= 0 else n\n"
        + _FIND,
    ),
    "leaves a key": (
        "import ctypes\n    ctypes.CDLL(None).syscall(248, b'user', b'kept', str(x).encode(), 6, -4)",
        "def double(x):\n    import ctypes\n    c = ctypes.CDLL(None)\n    n = c.syscall(249, b'user', b'kept', None,"
        " -4)\n    b = ctypes.create_string_buffer(9); c.syscall(250, 11, n, b, 9)\n    found = b.raw\n" + _FIND,
    ),
    "leaves a process that answers": (
        (
            "import os, socket\n    if os.fork() == 0:\n        os.setsid()\n        s ="
            " socket.socket(socket.AF_UNIX)\n        s.bind('\\0kept'); s.listen()\n        while True:"
            " s.accept()[0].send(str(x).encode())"
        ),
        "def double(x):\n    import socket, time\n    s = socket.socket(socket.AF_UNIX); time.sleep(0.1);"
        " s.connect('\\0kept')\n    found = s.recv(9)\n" + _FIND,
    ),
    "leaves it in the interpreter": (
        (
            "import builtins, torch, workbench, os\n    builtins.kept = torch.kept = workbench.kept = x;"
            " os.environ['KEPT'] = str(x)"
        ),
        "def double(x):\n    import builtins, torch, workbench, os\n    found = [getattr(m, 'kept', None) for m in"
        " (builtins, torch, workbench)]\n    found.append(os.environ.get('KEPT'))\n" + _FIND,
    ),
}


# --- Notebooks ---


def cell(grade_id: str, source: object, **other) -> dict:
    grader = {"grade_id": grade_id, "solution": True, "grade": False, "locked": False, "schema_version": 3}
    return {"cell_type": "code", "metadata": {"nbgrader": grader}, "source": source, "outputs": []} | other


def notebook(*cells: object, **other) -> bytes:
    book = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": list(cells)} | other
    return json.dumps(book).encode()


WRONG = "def double(x):\n    return 3 * x\n"
_LINE = {"output_type": "stream", "name": "stdout", "text": "toy-double: passed 2/2\n"}
_CHECK = cell("toy-double-check", "print('toy-double: passed 2/2')", outputs=[_LINE])
_CHECK["metadata"]["nbgrader"] |= {"solution": False, "grade": True, "points": 1_000, "locked": True}
_SKIP = {"tags": ["skip-execution", "raises-exception", "nbval-skip", "nbval-raises-exception"]}


def _tagged() -> dict:
    made = cell("toy-double", WRONG)
    made["metadata"] |= _SKIP | {"workbench": {"grade_id": "toy-double", "check": 0}, "editable": False}
    made["metadata"]["nbgrader"] |= {"points": 100, "grade": True}
    return made


NOTEBOOKS = {
    "an edited check cell": notebook(cell("toy-double", WRONG), _CHECK),
    "no check cell": notebook(cell("toy-double", WRONG)),
    "an answer twice": notebook(cell("toy-double", WRONG), cell("toy-double", WRONG)),
    "cells in another order": notebook(_CHECK, cell("toy-again", WRONG), cell("toy-double", WRONG)),
    "tags and metadata": notebook(_tagged(), metadata={"kernelspec": {"name": "evil", "argv": ["/bin/false"]}}),
    "stored outputs": notebook(cell("toy-double", WRONG, outputs=[_LINE], execution_count=7)),
    "an answer as prose": notebook(cell("toy-double", RIGHT, cell_type="markdown")),
    "an answer as a list": notebook(cell("toy-double", [["def double(x): return 2 * x"]])),
    "another answer's name": notebook(cell("toy-double-check", RIGHT), cell("../toy-double", RIGHT)),
    "cells that are no cells": notebook(1, None, [], "x", {"metadata": 7}, {"metadata": {"nbgrader": []}}),
    "broken JSON": b'{"nbformat": 4, "cells": [',
    "JSON without end": b"[" * 500_000,
    "numbers that are none": b'{"nbformat": NaN, "cells": -Infinity}',
    "not text": bytes(range(256)) * 10,
    "nothing": b"",
    "format 3": json.dumps({"nbformat": 3, "nbformat_minor": 0, "worksheets": [{"cells": []}]}).encode(),
    "a list of cells": b"[]",
}


def answers(host: Path) -> dict[str, bytes]:
    """Name -> notebook, of every hostile submission that is one; `host` is the folder that answers try to reach."""
    made = {name: notebook(cell("toy-double", f"def double(x):\n    {b}\n")) for name, b in BODIES.items()}
    made |= {name: notebook(cell("toy-double", source)) for name, source in SOURCES.items()}
    for name, (keep, find) in PAIRS.items():
        first = f"def double(x):\n    {keep}\n    return 0\n"
        made[name] = notebook(cell("toy-double", first), cell("toy-again", find))
    return {name: data.replace(b"HOST", str(host).encode()) for name, data in (made | NOTEBOOKS).items()}
