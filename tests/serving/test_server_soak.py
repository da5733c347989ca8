"""A short soak: what `workbench soak server` does for as long as one likes."""

from __future__ import annotations

import pytest

from workbench.serving.api.soak import soak_server


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--engine-process",)], ids=["thread", "process"])
def test_clients_of_all_kinds_leave_nothing_behind(options):
    soaked = soak_server(120, 1, options=options)
    assert not soaked.failure, soaked.failure
    for kind in ("left", "streams", "whole answers", "nonsense, refused", "ended with code 0"):
        assert soaked.counts[kind], soaked.counts
