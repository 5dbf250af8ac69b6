"""Sweep files: defaults, options for sbatch, and the place of every error."""

from pathlib import Path

import pytest

from parbench.slurm.sweep.sweepfile import SweepFile, read_sweep_file
from tests.support.paths import ROOT
from tests.support.refusals import usage_error


def read_text(folder: Path, text: str) -> SweepFile:
    file = folder / "sweep.toml"
    file.write_text(f"nodes = 2\n{text}")
    return read_sweep_file(file)


def test_smallest_file_has_defaults(tmp_path: Path) -> None:
    file = read_text(tmp_path, "")
    assert file.out == "sweeps"
    assert file.mode == "one"
    assert file.slurm.requeue
    assert file.slurm.on_dead_node == "fail"


def test_options_become_text(tmp_path: Path) -> None:
    text = """
    slurm.options = { account = "me", mem = 0, exclusive = true, spread-job = false }
    """
    file = read_text(tmp_path, text)
    assert file.slurm.format_options() == {"account": "me", "mem": "0", "exclusive": True}


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("repeat = 0", "$.repeat", ">= 1"),
        ("node = 3", "`node`", "allowed are name, out, mode, nodes, "),
        (
            "slurm.x = 3",
            "$.slurm",
            "allowed are partition, time, options, requeue, on_dead_node",
        ),
        ("mode = 'arrays'", "$.mode", "'arrays'"),
        ("distribution = 'cycle'", "$.distribution", "allowed are block, cyclic"),
        ("slurm.time = '30 years'", "$.slurm.time", "with ms, s, m or h"),
        ("backend = 'ncll'", "$.backend", "'ncll'"),
        ("environment = { 'A-B' = 1 }", "$.environment", "'A-B'"),
        (
            "slurm.options.nodes = 4",
            "$.slurm.options",
            "set nodes and ntasks_per_node at the top",
        ),
    ],
)
def test_error_names_the_file_and_the_place(
    text: str, place: str, message: str, tmp_path: Path
) -> None:
    error = usage_error(read_text, tmp_path, text)
    assert error.startswith(f"sweep file {tmp_path}/sweep.toml")
    assert place in error
    assert message in error
    assert "\n" not in error


def test_example_is_valid() -> None:
    example = ROOT / "slurm" / "example.toml"
    assert read_sweep_file(example).nodes == [2, 4]
