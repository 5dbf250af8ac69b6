"""A fault planted in a real step is named by a comparison of one launch a side, and runs that are alike say nothing."""

import json
import re

import pytest

from tests.support.paths import Command
from tests.support.planted_steps import PLANTS, VARIABLE


@pytest.mark.full
def test_a_planted_fault_is_named_in_one_launch_a_side_and_two_runs_alike_are(
    parbench: Command,
) -> None:
    name = "an unsharded parameter"
    target, cause = PLANTS[name]
    words = (
        "run",
        "--target",
        f"tests.support.planted_steps:{target}",
        "--nproc",
        "2",
        "--launches",
        "1",
        "--budget",
        "12s",
        "--json",
    )
    folders = []
    for plant in ("", "", name):
        done = parbench(*words, **{VARIABLE: plant})
        assert done.returncode == 0, done.stderr
        folders.append(done.stderr.splitlines()[-1])
    base, alike, planted = folders
    same = parbench("compare", base, alike)
    assert (same.returncode, same.stdout.startswith("Counts: none of ")) == (0, True), same.stdout
    told = parbench("compare", base, planted, "--format", "json")
    causes = [change["told"] for change in json.loads(told.stdout)["counts"]["changes"]]
    assert (told.returncode, any(re.fullmatch(cause, one) for one in causes)) == (1, True), causes
    assert parbench("compare", base, planted, "--across", "counts.*").returncode == 0
