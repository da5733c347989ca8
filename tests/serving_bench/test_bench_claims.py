"""Claims about claims: intervals and percentiles against scipy, exact sums and MLPerf's numbers."""

from __future__ import annotations

from math import comb

import pytest
from scipy import stats

from workbench.errors import WorkbenchError
from workbench.serving.bench.claims import at_most, claimable_share, requests_needed, wilson


@pytest.mark.parametrize(("good", "of"), [(0, 1), (1, 1), (9, 10), (90, 100), (0, 50), (50, 50), (1234, 5000)])
def test_wilsons_interval_is_scipys(good, of):
    expected = stats.binomtest(good, of).proportion_ci(method="wilson")
    assert wilson(good, of) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize(("missed", "of", "chance"), [(0, 459, 0.01), (3, 20, 0.25), (19, 20, 0.5), (2, 2, 0.3)])
def test_chances_are_the_sums_of_the_binomial_distribution(missed, of, chance):
    by_hand = sum(comb(of, k) * chance**k * (1 - chance) ** (of - k) for k in range(missed + 1))
    assert at_most(missed, of, chance) == pytest.approx(by_hand, rel=1e-9)


def test_chances_hold_for_long_runs():
    assert at_most(900, 100_000, 0.01) == pytest.approx(stats.binom.cdf(900, 100_000, 0.01), rel=1e-6)


def test_mlperf_needs_459_requests_to_claim_p99():
    """And 662 with one that missed the limit."""
    assert [requests_needed(percent) for percent in (90, 99, 99.9)] == [44, 459, 4603]
    assert claimable_share(0, 459) >= 0.99 > claimable_share(0, 458)
    assert claimable_share(1, 662) >= 0.99 > claimable_share(1, 661)
    assert claimable_share(5, 5) == 0.0


@pytest.mark.parametrize("wrong", [lambda: wilson(2, 1), lambda: wilson(0, 0), lambda: claimable_share(0, 5, 1.5)])
def test_what_cannot_be_counted_is_refused(wrong):
    with pytest.raises(WorkbenchError):
        wrong()
