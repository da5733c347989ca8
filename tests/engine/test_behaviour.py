"""What the engine did before the rebuild it does today: tokens and exact counts of some of the recorded settings.

All of them: `python tests/tools/behaviour.py compare tests/tools/behaviour_before.json`.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "tools" / "behaviour.py"
_spec = importlib.util.spec_from_file_location("behaviour", FILE)
behaviour = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(behaviour)

RECORDS = json.loads(behaviour.BEFORE.read_text(encoding="utf-8"))["records"]
SETTINGS = behaviour.settings()
PORTABLE = [name for name in SETTINGS if "local" not in name and not name.startswith("compiled")]


def test_every_setting_is_recorded():
    assert list(SETTINGS) == list(RECORDS)
    assert len(RECORDS) >= 250


@pytest.mark.parametrize("name", PORTABLE[::9])
def test_a_setting_gives_the_tokens_and_counts_that_were_recorded(name: str):
    assert not behaviour.differences(RECORDS[name], behaviour.rounded(behaviour.outcome(SETTINGS[name])))


def test_a_changed_token_and_a_changed_count_are_differences():
    name = "generate | llama | contiguous | greedy"
    changed = json.loads(json.dumps(RECORDS[name]))
    changed["tokens"][3] += 1
    changed["model_calls"] += 1
    changed["log_probs"][1] += behaviour.TOLERANCE / 2
    assert [line.split(":")[0] for line in behaviour.differences(RECORDS[name], changed)] == [
        ".tokens[3]",
        ".model_calls",
    ]
