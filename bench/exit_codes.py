"""The exit codes of all commands and the one that a command with several results ends with."""

import enum
from collections.abc import Iterable


class ExitCode(enum.IntEnum):
    """The exit code of a command."""

    OK = 0
    BAD = 1
    """A regression, a wrong result, a bad device or an exceeded limit."""
    BAD_INPUT = 2
    UNDECIDED = 3
    """The measurements do not decide the question, and the user asked to fail in this case."""
    DID_NOT_RUN = 4


PRECEDENCE = (ExitCode.BAD, ExitCode.BAD_INPUT, ExitCode.DID_NOT_RUN, ExitCode.UNDECIDED)
"""The codes from the most important to the least: a bad result is certain in any case."""


def combine_exit_codes(codes: Iterable[int]) -> ExitCode:
    """Return the exit code for several results, ``OK`` if there are none."""
    present = set(codes)
    for code in PRECEDENCE:
        if code in present:
            return code
    return ExitCode.OK
