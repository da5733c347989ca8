"""The reference solutions' records: what a board looks like, and what can be reached."""

from __future__ import annotations

from pathlib import Path

REFERENCE_BOARD = Path(__file__).parent / "board"
