"""A comparison that several files of this folder render."""

import pytest

from parbench.reports.compare.compare import RunComparison
from tests.support.reports.compare_fixtures import (
    OTHER_CASE,
    compare_with_rule,
    make_curve,
    make_repetitions,
    run_from_records,
)
from tests.support.reports.reports_fixtures import HOSTILE_TEXT, collective_case, failed_record


@pytest.fixture(scope="session")
def mixed() -> RunComparison:
    """A comparison with seven verdicts, hostile text and a changed environment."""
    wrong = collective_case("all_gather")
    lost = collective_case("all_to_all")
    added = collective_case("reduce")
    base = make_curve(1, 1, 1)
    base += [*make_repetitions(OTHER_CASE), *make_repetitions(wrong), *make_repetitions(lost)]
    new = make_curve(1.2, 1.0, 1.03)
    new += [*make_repetitions(OTHER_CASE, 0.8), *make_repetitions(added)]
    new += [failed_record(wrong, 0, "wrong", HOSTILE_TEXT)]
    older = run_from_records(base, {"host": {"address": "a"}})
    newer = run_from_records(new, {"host": {"address": "b|c"}})
    return compare_with_rule(older, newer)
