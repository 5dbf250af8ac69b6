"""Append a byte to a file for each Python process that starts or forks.

Python imports this module at start because its folder is on ``PYTHONPATH``.
"""

import os

FILE_VARIABLE = "PARBENCH_TEST_WORK"


def record_process() -> None:
    path = os.environ.get(FILE_VARIABLE)
    if path:
        with open(path, "a") as file:  # noqa: PTH123  # pathlib would slow down every start
            file.write(".")


record_process()
os.register_at_fork(after_in_child=record_process)
