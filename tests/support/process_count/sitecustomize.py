"""Append a line to a file for each Python process that starts or forks.

Python imports this module at start because its folder is on ``PYTHONPATH``. A line holds the time
budget that the command line of a new process requests, in parbench's notation, or nothing.
"""

import os
import sys

FILE_VARIABLE = "PARBENCH_TEST_WORK"


def requested_budget(args: list[str]) -> str:
    """Return the value of the last ``--budget`` among command line arguments."""
    budget = ""
    for option, value in zip(args, [*args[1:], ""]):  # noqa: B905  # runs at every start
        if option == "--budget":
            budget = value
        elif option.startswith("--budget="):
            budget = option.partition("=")[2]
    return budget


def record_process(budget: str = "") -> None:
    path = os.environ.get(FILE_VARIABLE)
    if path:
        with open(path, "a") as file:  # noqa: PTH123  # pathlib would slow down every start
            file.write(f"{budget}\n")


record_process(requested_budget(sys.orig_argv))
os.register_at_fork(after_in_child=record_process)
