"""One server for all tests that do not break it."""

from __future__ import annotations

import pytest
from serving_claims import engine_of, serving

from workbench.models import load
from workbench.models.fast import prepare


@pytest.fixture(scope="session")
def small_model():
    """The smallest shipped model, prepared: it writes text that ends, and knows its characters."""
    return prepare(load("stdlib-1m"))


@pytest.fixture(scope="module")
def server(small_model):
    with serving(engine_of(small_model), name="stdlib-1m") as running:
        yield running
        running.wait_until_empty()  # whatever a test did, nothing is left
