"""Lab 15's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as
meant."""

from __future__ import annotations

import random

import pytest
from conftest import prompts_of  # noqa: F401
