"""Nothing that the course and the engine had before the rebuild is lost."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

FILE = Path(__file__).parents[1] / "tools" / "counts.py"


def test_there_is_as_much_of_everything_as_before_or_more():
    spec = importlib.util.spec_from_file_location("counts", FILE)
    counts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(counts)
    before, now = json.loads(counts.BEFORE.read_text(encoding="utf-8")), counts.counts()
    assert set(before) <= set(now)
    assert {name: (n, now[name]) for name, n in before.items() if now[name] < n} == {}
    assert before["wrong answers"] == 1238 and before["exercises"] == 54
