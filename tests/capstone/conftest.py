"""Fixtures of the capstone's tests."""

from capstone_kit import engines, judge  # noqa: F401
