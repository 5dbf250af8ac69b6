"""The verdicts of comparisons and history checks: what each one means, and its exit code."""

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum

from parbench.bench.exit_codes import ExitCode, combine_exit_codes


class Verdict(StrEnum):
    """The verdict on a case or on a changed count, in order from the worst to the best.

    ``MEANINGS`` defines each verdict.
    """

    WRONG = "WRONG"
    COUNT_CHANGED = "COUNT CHANGED"
    SLOWER = "SLOWER"
    FAILED = "FAILED"
    MISSING = "MISSING"
    UNDECIDED = "UNDECIDED"
    DRIFT = "DRIFT"
    ENVIRONMENT_CHANGED = "ENVIRONMENT CHANGED"
    NOT_ENOUGH_DATA = "NOT ENOUGH DATA"
    NEW = "NEW"
    FASTER = "FASTER"
    NO_CHANGE = "NO CHANGE"


EXIT_CODES: Mapping[Verdict, ExitCode] = {
    Verdict.WRONG: ExitCode.BAD,
    Verdict.COUNT_CHANGED: ExitCode.BAD,
    Verdict.SLOWER: ExitCode.BAD,
    Verdict.FAILED: ExitCode.DID_NOT_RUN,
    Verdict.MISSING: ExitCode.DID_NOT_RUN,
    Verdict.UNDECIDED: ExitCode.UNDECIDED,
    Verdict.DRIFT: ExitCode.UNDECIDED,
    Verdict.ENVIRONMENT_CHANGED: ExitCode.UNDECIDED,
    Verdict.NOT_ENOUGH_DATA: ExitCode.UNDECIDED,
    Verdict.NEW: ExitCode.OK,
    Verdict.FASTER: ExitCode.OK,
    Verdict.NO_CHANGE: ExitCode.OK,
}
"""The exit code that each verdict causes."""
FAILURES = (
    Verdict.WRONG,
    Verdict.COUNT_CHANGED,
    Verdict.SLOWER,
    Verdict.FAILED,
    Verdict.MISSING,
)
"""The verdicts with which a comparison or check fails."""
MEANINGS: Mapping[Verdict, str] = {
    Verdict.WRONG: "The result differs from the reference, so its time does not count.",
    Verdict.COUNT_CHANGED: "An exact count changed, and the change was not declared intentional.",
    Verdict.SLOWER: "The time increased significantly by more than the threshold "
    "(t-test on logarithms of times, Benjamini-Hochberg correction over series).",
    Verdict.FAILED: "The case failed or hung in the new run.",
    Verdict.MISSING: "An earlier run has this case, and the new run does not.",
    Verdict.UNDECIDED: "A change beyond the threshold is neither shown nor excluded. "
    "More repetitions or runs are needed.",
    Verdict.DRIFT: "The time increases gradually, without a single change point.",
    Verdict.ENVIRONMENT_CHANGED: "The environments differ, so a time difference cannot be "
    "attributed to the code. Times were not compared.",
    Verdict.NOT_ENOUGH_DATA: "The time was not judged, because repetitions (compare, ab) or "
    "earlier runs (history check) are missing.",
    Verdict.NEW: "Only the new run has this case.",
    Verdict.FASTER: "Same criterion as SLOWER, for a decrease.",
    Verdict.NO_CHANGE: "The 95 % interval of the change lies within the threshold.",
}
"""The definition of each verdict for reports."""


def rank_verdict(verdict: Verdict) -> int:
    """Return the position of a verdict in the order from the worst, which is 0, to the best."""
    return list(Verdict).index(verdict)


def count_verdicts(verdicts: Iterable[Verdict]) -> dict[Verdict, int]:
    """Return the number of times that each verdict occurs, keyed by verdict, the worst first."""
    counts = Counter(verdicts)
    return {verdict: counts[verdict] for verdict in Verdict if counts[verdict]}


def format_verdicts(verdicts: Mapping[Verdict, int]) -> str:
    """Return the number of times that each verdict occurs as text: ``1 SLOWER, 3 NO CHANGE``."""
    return ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())


def combine_verdicts(verdicts: Iterable[Verdict], *, fail_on_undecided: bool = False) -> ExitCode:
    """Return the worst exit code that one of the verdicts causes (``EXIT_CODES``).

    Verdicts with exit code 3, such as UNDECIDED, count only if ``fail_on_undecided`` is True. The
    exit code is 0 without verdicts that count.
    """
    codes = [EXIT_CODES[verdict] for verdict in verdicts]
    if not fail_on_undecided:
        codes = [code for code in codes if code != ExitCode.UNDECIDED]
    return combine_exit_codes(codes)
