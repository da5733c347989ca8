"""What the source of own.py may say: advice passes, whatever reaches beyond it is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.capstone.rules import ALLOWED_IMPORTS, MAX_SOURCE_BYTES, PUBLIC, broken_rules

SOLUTIONS = sorted((Path(__file__).parents[2] / "solutions" / "capstone").glob("*/own.py"))

GOOD = {
    "a dataclass": "from dataclasses import dataclass, field\n@dataclass(order=True)\nclass A:\n    x: int = 0\n"
    "    y: list = field(default_factory=list)\n",
    "a named tuple": "from collections import namedtuple\nPair = namedtuple('Pair', 'a b')\n",
    "a heap": "import heapq\ndef order(requests, now_s):\n    heapq.heapify(requests)\n    return []\n",
    "chance": "import random\nrandom.seed(3)\ndraw = random.Random(4).random\n",
    "types": "from __future__ import annotations\nfrom typing import Any, List\ndef f(x: List[Any]) -> Any: ...\n",
    "another name": "import math as m\nfrom operator import itemgetter as get\nx = m.sqrt(2), get(0)\n",
    "a class": "class A:\n    def __init__(self):\n        self.x = 0\n    def __lt__(self, other):\n        pass\n",
    "a pattern": "def f(x):\n    match x:\n        case {'id': str(name), **rest}:\n            return name, rest\n",
    "a generator": "def f(x):\n    yield from (a for a in x if (b := a))\n",
    "a name of a module as a variable": "def f(random):\n    return random['x']\n",
    "nothing": "",
    "unicode": "größe = 'ß'\n",
}


@pytest.mark.parametrize("source", GOOD.values(), ids=GOOD)
def test_advice_keeps_the_rules(source: str) -> None:
    assert broken_rules(source) == []


@pytest.mark.parametrize("file", SOLUTIONS, ids=lambda file: file.parent.name)
def test_the_solutions_keep_the_rules(file: Path) -> None:
    assert broken_rules(file.read_text(encoding="utf-8")) == []


BAD = {
    # modules
    "imports os": ("import os", "imports os"),
    "imports the clock": ("from time import perf_counter", "imports time"),
    "imports torch": ("import math, torch", "imports torch"),
    "imports from beside": ("from . import x", "imports"),
    "imports a folder's module": ("from .math import x", "imports from a folder"),
    "imports a part": ("import collections.abc", "imports collections.abc"),
    "a private name": ("from random import _os", "takes _os of random"),
    "a module's own module": ("import dataclasses\ndataclasses.sys.modules", "takes sys of dataclasses"),
    "by another name": ("import random as r\nr.SystemRandom()", "SystemRandom"),
    "randomness of the system": ("from random import SystemRandom", "takes SystemRandom"),
    "all of it": ("from math import *", "takes * of math"),
    "attributes by text": ("from operator import attrgetter", "takes attrgetter"),
    "methods by text": ("import operator\noperator.methodcaller('x')", "takes methodcaller"),
    "another's globals": ("from functools import update_wrapper", "takes update_wrapper"),
    "wraps": ("import functools\nfunctools.wraps", "takes wraps"),
    "texts as types": ("from functools import singledispatch", "takes singledispatch"),
    "texts as hints": ("from typing import get_type_hints", "takes get_type_hints"),
    "the class type": ("import typing\ntyping.get_origin(typing.Type[int])", "takes get_origin"),
    "made classes": ("from dataclasses import make_dataclass", "takes make_dataclass"),
    "fields that are renamed": ("from dataclasses import asdict", "takes asdict"),
    "changed statistics": ("import math\nmath.sqrt = abs", "changes math.sqrt"),
    "deleted": ("import random\ndel random.seed", "changes random.seed"),
    # names
    **{name: (f"x = {name}", f"uses {name}") for name in ("open", "eval", "exec", "getattr", "globals", "type")},
    "the imports' import": ("__import__('os')", "__import__"),
    "builtins": ("x = __builtins__", "__builtins__"),
    "its own name": ("x = __name__", "__name__"),
    # attributes
    "classes of classes": ("().__class__.__base__", "reads .__class__"),
    "private": ("x._y", "reads ._y"),
    "set": ("x.__class__ = 3", "reads .__class__"),
    "frames": ("(x for x in ()).gi_frame", "reads .gi_frame"),
    "code": ("(x for x in ()).gi_code", "reads .gi_code"),
    "frames of errors": ("e.tb_frame.f_back", "reads ."),
    "all classes": ("int.mro()", "reads .mro"),
    "in a pattern": ("match f:\n    case int(__globals__=g):\n        pass", "reads .__globals__"),
    "a frame in a pattern": ("match f:\n    case A(gi_frame=g):\n        pass", "reads .gi_frame"),
    "written widely": ("x.__ｃlass__", "reads .__class__"),
    # what is bound
    "a method": ("class A:\n    def __getattribute__(self, n): ...", "defines __getattribute__"),
    "a hook of classes": ("class A:\n    def __init_subclass__(cls): ...", "defines __init_subclass__"),
    "a hook of modules": ("def __getattr__(name): ...", "defines __getattr__"),
    "an alias": ("class A:\n    from math import sqrt as __getattr__", "names something __getattr__"),
    "a captured name": ("match 1:\n    case __builtins__: pass", "names something __builtins__"),
    "a starred name": ("match x:\n    case [*__builtins__]: pass", "names something __builtins__"),
    "the rest of a dict": ("match x:\n    case {**__builtins__}: pass", "names something __builtins__"),
    "a caught name": ("try: pass\nexcept E as __x__: pass", "names something __x__"),
    "global": ("def f():\n    global __builtins__", "names something __builtins__"),
    "an argument": ("lambda __class__: 0", "names something __class__"),
    "by keyword": ("f(__class__=3)", "names something __class__"),
    "walrus": ("(__class__ := 3)", "__class__"),
    "slots": ("class A:\n    __slots__ = ()", "__slots__"),
    "match args": ("class A:\n    __match_args__ = ('x',)", "__match_args__"),
    "a metaclass": ("class A(metaclass=f): ...", "a keyword"),
    "a hidden metaclass": ("class A(**k): ...", "a keyword"),
    # the rest
    "asynchronous": ("async def f(): ...", "asynchronous"),
    "no Python": ("def f(:", "no Python"),
    "a null": ("x = 1\0", "no Python"),
    "deep": ("(" * 5000 + ")" * 5000, "no Python"),
    "long": ("x = 1\n" * (MAX_SOURCE_BYTES // 6 + 1), "bytes"),
}


@pytest.mark.parametrize(("source", "words"), BAD.values(), ids=BAD)
def test_what_reaches_beyond_advice_is_refused(source: str, words: str) -> None:
    broken = broken_rules(source)
    assert broken and words in " ".join(broken)


def test_the_line_is_named() -> None:
    assert broken_rules("x = 1\n\nimport os\n")[0].startswith("line 3: imports os")


def test_every_public_name_is_there_and_none_leads_to_a_module() -> None:
    import importlib
    from types import ModuleType

    for module in ALLOWED_IMPORTS:
        whole = importlib.import_module(module)
        for name in PUBLIC[module]:
            if (module, name) == ("itertools", "batched"):  # of Python 3.12
                continue
            assert not name.startswith("_")
            assert not isinstance(getattr(whole, name), ModuleType), (module, name)
