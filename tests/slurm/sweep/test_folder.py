"""The folder of a submitted sweep: created once, written completely, read back unchanged."""

from collections.abc import Callable
from pathlib import Path

import pytest

from parbench.bench.plan.plan import Entry, read_cases_file
from parbench.slurm.sweep.folder import (
    create_folder,
    load_jobs,
    load_sweep,
    write_sweep,
)
from tests.support.refusals import usage_error
from tests.support.slurm.sweeps import make_point, make_sweep


def test_sweep_is_read_back_unchanged(tmp_path: Path) -> None:
    folder = create_folder(tmp_path, "s")
    options = {"mem": "0", "exclusive": True}
    cases = (Entry(name="all_reduce", set={"dtype": "float32,int8"}),)
    points = [make_point(0), make_point(1, cases=cases)]
    sweep = make_sweep(points, slurm={"options": options}, link="200mbit")
    write_sweep(folder, sweep)
    assert load_sweep(folder) == sweep
    for point in points:
        assert read_cases_file(folder / "points" / f"{point.id}.json") == point.cases


@pytest.mark.parametrize(
    ("name", "content", "message", "load"),
    [
        ("sweep.json", b'{"name"', "is damaged or was not written by parbench", load_sweep),
        ("jobs/0000/sweep.json", b"{}", "is damaged or was not written by parbench", load_jobs),
    ],
)
def test_damaged_file_is_refused_by_name(
    name: str,
    content: bytes,
    message: str,
    load: Callable[[Path], object],
    tmp_path: Path,
) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(content)
    error = usage_error(load, tmp_path)
    assert name in error
    assert message in error
