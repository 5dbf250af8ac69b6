"""The Python of a test's batch script: ``slurm work`` whose children are stand-ins.

Usage: python -m tests.support.slurm.standin_job CASES PACE -m parbench slurm work FOLDER [--array]

PACE is a file with the seconds per record. Each child reads it when it starts.
"""

import sys
from pathlib import Path

from parbench.slurm.job.child import PointRequest
from parbench.slurm.job.work import work
from tests.support.slurm.standin import stand_in


def main(args: list[str]) -> int:
    """Measure the points of a sweep in this allocation and return the exit code."""
    num_cases, pace_file, *work_args = args
    folder = work_args[work_args.index("work") + 1]
    is_array = "--array" in work_args

    def command(request: PointRequest) -> list[str]:
        seconds = float(Path(pace_file).read_text())
        start = stand_in(num_cases=int(num_cases), seconds_per_case=seconds)
        return start(request)

    return work(Path(folder), array=is_array, command=command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
