"""The time left of a job, from what scontrol tells, and what fits into it."""

import math
from datetime import datetime

import pytest

from slurm.system import parse_pairs
from slurm.timeleft import end_time, scale, too_long

JOB = (
    "JobId=1 JobName=j.sh JobState=RUNNING Reason=None Requeue=1 Restarts=0 RunTime=00:00:03 TimeLimit=01:00:00 "
    "TimeMin=N/A StartTime=2026-11-21T20:38:33 EndTime=2026-11-21T21:38:33 Deadline=N/A NodeList=n[1-2,4]"
)


def test_scontrols_end_is_local_time() -> None:
    assert end_time(parse_pairs(JOB), {}) == datetime(2026, 11, 21, 21, 38, 33).timestamp()


def test_scontrol_goes_before_the_environment_for_a_limit_may_be_moved() -> None:
    assert end_time(parse_pairs(JOB), {"SLURM_JOB_END_TIME": "12"}) > 12


@pytest.mark.parametrize(
    ("job", "environ", "end"),
    [
        ({"TimeLimit": "UNLIMITED", "EndTime": "2027-11-21T21:38:33"}, {}, math.inf),
        ({"TimeLimit": "01:00:00", "EndTime": "Unknown"}, {}, math.inf),
        ({}, {"SLURM_JOB_END_TIME": "1700000000"}, 1.7e9),
        ({"EndTime": "N/A"}, {"SLURM_JOB_END_TIME": "1700000000"}, 1.7e9),
        ({}, {"SLURM_JOB_END_TIME": "0"}, math.inf),
        ({}, {"SLURM_JOB_END_TIME": "soon"}, math.inf),
        ({}, {}, math.inf),
    ],
)
def test_other_words(job: dict[str, str], environ: dict[str, str], end: float) -> None:
    assert end_time(job, environ) == end


def test_the_words_of_what_does_not_fit() -> None:
    assert too_long(94.2, 60.9) == "needs about 95 s, 60 s are left"
    assert too_long(5.0, -3.0) == "needs about 5 s, 0 s are left"
    assert too_long(60.0, 60.0) == ""
    assert too_long(1e9, math.inf) == ""


@pytest.mark.parametrize(
    ("pairs", "factor"),
    [([], 1.0), ([(20.0, 10.0)], 2.0), ([(20.0, 10.0), (10.0, 20.0)], 1.0), ([(1.0, 100.0)], 0.2), ([(900, 1)], 5.0)],
)
def test_the_scale_is_of_sums_and_bounded(pairs: list[tuple[float, float]], factor: float) -> None:
    assert scale(pairs) == pytest.approx(factor)
