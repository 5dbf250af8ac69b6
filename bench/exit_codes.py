"""The exit codes of all commands, and the choice of one of them for several results."""

import enum
from collections.abc import Iterable


class ExitCode(enum.IntEnum):
    """The exit code of a command."""

    OK = 0
    """Everything was measured and is fine."""
    BAD = 1
    """A regression, a wrong result, a bad device or an exceeded limit."""
    BAD_INPUT = 2
    """The arguments or files of the user are not valid."""
    UNDECIDED = 3
    """A measurement does not decide, with ``--fail-on-undecided``, or a limit's metric is unknown."""
    DID_NOT_RUN = 4
    """A measurement, check or comparison did not run, so its result is missing."""


PRECEDENCE = (ExitCode.BAD, ExitCode.BAD_INPUT, ExitCode.DID_NOT_RUN, ExitCode.UNDECIDED)
"""The codes other than ``OK``, from the most important one to the least.

A bad result comes first, because it is certain whatever else is missing.
"""


def combine_exit_codes(codes: Iterable[int]) -> ExitCode:
    """Return the most important of several exit codes, in the order of ``PRECEDENCE``.

    The result is ``OK`` if there are no codes, or if all are ``OK``.
    """
    present = set(codes)
    for code in PRECEDENCE:
        if code in present:
            return code
    return ExitCode.OK
