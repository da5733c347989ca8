"""A plugin of pytest for `workbench gpu-tests`: it reports each test as it begins and ends (`workbench.processes`)."""

from __future__ import annotations

import time

import pytest

from workbench.processes import report

LONGEST = 4_000  # characters of a failure
_began: dict[str, float] = {}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """After what is deselected is gone. alone: the test has no twin in the interpreter."""
    for item in items:
        mark = item.get_closest_marker("gpu")
        report(collected=item.nodeid, alone=bool(mark and mark.kwargs.get("alone")))


def pytest_collectreport(report):
    if report.failed:
        _say(broken=report.nodeid, text=report.longreprtext[-LONGEST:])


def pytest_runtest_logstart(nodeid):
    _began[nodeid] = time.monotonic()
    _say(begun=nodeid)


def pytest_runtest_logreport(report):
    if report.when == "call" or not report.passed:
        text = report.longreprtext if report.failed else str(report.longrepr[2]) if report.skipped else ""
        _say(outcome=report.outcome, when=report.when, test=report.nodeid, text=text[-LONGEST:])


def pytest_runtest_logfinish(nodeid):
    _say(ended=nodeid, seconds=time.monotonic() - _began.pop(nodeid, time.monotonic()))


_say = report  # hooks call their own argument so
