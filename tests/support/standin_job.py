"""What a batch script of a test starts in the place of Python: ``slurm work`` whose children are stand-ins.

Usage: standin_job.py CASES PACE -m parbench slurm work FOLDER [--array]

PACE is a file with the seconds from one record to the next; each child reads it when it starts.
"""

import sys
from pathlib import Path

from parbench.slurm.job.point_run import Attempt
from parbench.slurm.job.work import work
from tests.support.standin import standin


def main(words: list[str]) -> int:
    cases, pace, *rest = words
    folder, *more = rest[rest.index("work") + 1 :]

    def command(attempt: Attempt) -> list[str]:
        return standin(cases=int(cases), each=float(Path(pace).read_text()))(attempt)

    return work(Path(folder), array=more == ["--array"], command=command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
