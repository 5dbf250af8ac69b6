"""The verdicts of comparisons: what each one means, its exit code, and its element in JUnit XML."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.files import encode_json

TimeVerdict = Literal["SLOWER", "FASTER", "SAME", "AMBIGUOUS"]
VerdictName = Literal[
    "WRONG",
    "CHANGED",
    "SLOWER",
    "FAILED",
    "MISSING",
    "ENV-CHANGED",
    "INSUFFICIENT",
    "AMBIGUOUS",
    "NEW",
    "FASTER",
    "SAME",
]
SCHEMA_VERSION = 2  # of the JSON that compare and history print


@dataclass(frozen=True, kw_only=True)
class VerdictDefinition:
    """The exit code of a verdict, its element in JUnit XML and its meaning."""

    exit_code: ExitCode
    junit_tag: Literal["error", "failure", "skipped", ""]
    """The element that marks the test case. A test case without one passes."""
    meaning: str
    """A sentence."""


def _define(
    exit_code: ExitCode, junit_tag: Literal["error", "failure", "skipped", ""], meaning: str
) -> VerdictDefinition:
    return VerdictDefinition(exit_code=exit_code, junit_tag=junit_tag, meaning=meaning)


VERDICTS: Mapping[VerdictName, VerdictDefinition] = {
    "WRONG": _define(
        ExitCode.BAD, "error", "The result differs from the reference, so its time does not count."
    ),
    "CHANGED": _define(
        ExitCode.BAD,
        "failure",
        "An exact count changed, and the change was not declared intentional (--across).",
    ),
    "SLOWER": _define(
        ExitCode.BAD,
        "failure",
        "The time increased by more than the threshold. "
        "This is significant after correction for multiple comparisons.",
    ),
    "FAILED": _define(ExitCode.DID_NOT_RUN, "error", "The case failed or hung in NEW."),
    "MISSING": _define(ExitCode.DID_NOT_RUN, "error", "BASE has this case and NEW does not."),
    "ENV-CHANGED": _define(
        ExitCode.UNDECIDED,
        "skipped",
        "The environments differ, so a time difference cannot be attributed to the code.",
    ),
    "INSUFFICIENT": _define(
        ExitCode.UNDECIDED, "skipped", "There are too few repetitions to compare."
    ),
    "AMBIGUOUS": _define(
        ExitCode.UNDECIDED,
        "skipped",
        "Inconclusive: a change beyond the threshold is neither shown nor excluded.",
    ),
    "NEW": _define(ExitCode.OK, "skipped", "NEW has this case and BASE does not."),
    "FASTER": _define(ExitCode.OK, "", "Same criterion as SLOWER, for a decrease."),
    "SAME": _define(ExitCode.OK, "", "The 95 % interval of the change lies within the threshold."),
}
"""The definitions of all verdicts, the worst first."""

WORST_FIRST: tuple[VerdictName, ...] = tuple(VERDICTS)


def count_verdicts(verdicts: Iterable[VerdictName]) -> dict[VerdictName, int]:
    """Return the count of each verdict, the worst first."""
    counts = Counter(verdicts)
    return {verdict: counts[verdict] for verdict in WORST_FIRST if counts[verdict]}


def get_verdicts_exit_code(
    verdicts: Iterable[VerdictName], *, fail_on_unknown: bool = False
) -> ExitCode:
    """Return the exit code of several verdicts. Undecided ones count with ``fail_on_unknown``."""
    codes = [VERDICTS[verdict].exit_code for verdict in verdicts]
    if not fail_on_unknown:
        codes = [code for code in codes if code != ExitCode.UNDECIDED]
    return combine_exit_codes(codes)


def encode_report(content: Mapping[str, object]) -> str:
    """Return JSON with its schema version."""
    return encode_json({"schema_version": SCHEMA_VERSION, **content}).decode()
