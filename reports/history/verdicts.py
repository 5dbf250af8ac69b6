"""The verdicts of history checks: what each one means, and its exit code."""

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum

from parbench.bench.exit_codes import ExitCode, combine_exit_codes


class HistoryVerdict(StrEnum):
    """The result of a series in a check, the worst first."""

    WRONG = "WRONG"
    COUNT_CHANGED = "COUNT CHANGED"
    SLOWER = "SLOWER"
    FAILED = "FAILED"
    MISSING = "MISSING"
    UNCONFIRMED = "UNCONFIRMED"
    DRIFT = "DRIFT"
    ENVIRONMENT_CHANGED = "ENVIRONMENT CHANGED"
    TOO_FEW_RUNS = "TOO FEW RUNS"
    FASTER = "FASTER"
    NO_CHANGE = "NO CHANGE"


FAILURES: Mapping[HistoryVerdict, ExitCode] = {
    HistoryVerdict.WRONG: ExitCode.BAD,
    HistoryVerdict.COUNT_CHANGED: ExitCode.BAD,
    HistoryVerdict.SLOWER: ExitCode.BAD,
    HistoryVerdict.FAILED: ExitCode.DID_NOT_RUN,
    HistoryVerdict.MISSING: ExitCode.DID_NOT_RUN,
}
UNDECIDED = (
    HistoryVerdict.UNCONFIRMED,
    HistoryVerdict.DRIFT,
    HistoryVerdict.ENVIRONMENT_CHANGED,
    HistoryVerdict.TOO_FEW_RUNS,
)
NOT_COMPARED = (
    HistoryVerdict.MISSING,
    HistoryVerdict.ENVIRONMENT_CHANGED,
    HistoryVerdict.TOO_FEW_RUNS,
)
MEANINGS: Mapping[HistoryVerdict, str] = {
    HistoryVerdict.COUNT_CHANGED: "An exact count differs from earlier runs.",
    HistoryVerdict.UNCONFIRMED: "The time increased, but more runs are needed to confirm it.",
    HistoryVerdict.DRIFT: "The time increases gradually, without a single change point.",
    HistoryVerdict.ENVIRONMENT_CHANGED: (
        "The environment differs from that of the run before, so times were not compared."
    ),
    HistoryVerdict.TOO_FEW_RUNS: "There are too few earlier runs, so times were not compared.",
    HistoryVerdict.MISSING: "A recent similar run measured this case, and this run did not.",
}


def rank_verdict(verdict: HistoryVerdict) -> int:
    """Return the place of a verdict, 0 for the worst."""
    return list(HistoryVerdict).index(verdict)


def count_verdicts(verdicts: Iterable[HistoryVerdict]) -> dict[HistoryVerdict, int]:
    """Return the number of times that each verdict occurs, the worst first."""
    counts = Counter(verdicts)
    return {verdict: counts[verdict] for verdict in HistoryVerdict if counts[verdict]}


def combine_verdicts(
    verdicts: Iterable[HistoryVerdict], *, fail_on_unknown: bool = False
) -> ExitCode:
    """Return the exit code of a check. Undecided verdicts count only with ``fail_on_unknown``."""
    codes = []
    for verdict in verdicts:
        if verdict in FAILURES:
            codes.append(FAILURES[verdict])
        elif verdict in UNDECIDED and fail_on_unknown:
            codes.append(ExitCode.UNDECIDED)
    return combine_exit_codes(codes)
