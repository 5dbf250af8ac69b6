"""The child that measures one point: its command, its environment, its messages."""

from pathlib import Path
from typing import Any

from click.testing import CliRunner

from parbench.cli import main
from parbench.slurm.job.child import Child, Command, PointRequest, build_command
from tests.support.slurm.sweeps import make_folder, make_point, make_sweep

POINT = make_point()


def make_request(parent: Path, **fields: Any) -> PointRequest:
    sweep = make_sweep([POINT])
    defaults = {
        "folder": make_folder(parent, sweep),
        "sweep": sweep,
        "point": POINT,
        "nodes": ("n1", "n3"),
        "run": None,
    }
    return PointRequest(**{**defaults, **fields})


def run_child(request: PointRequest, command: Command) -> Child:
    child = Child(request, command)
    while child.exit_code is None:
        pass
    return child


def test_build_command_is_valid(tmp_path: Path) -> None:
    sweep = make_sweep([POINT], link="400Gbit", repetitions=2, device="cpu", budget="6s")
    args = build_command(make_request(tmp_path, sweep=sweep))
    line = " ".join(args)
    assert "--launcher srun --nodes n1,n3 --nproc 1" in line
    assert f"--cases {tmp_path}/sweep/points/{POINT.id}.json" in line
    assert f"--out {tmp_path}/sweep/runs/{POINT.id} " in line
    assert line.endswith("--repetitions 2 --budget 6s --device cpu --link 400Gbit")
    result = CliRunner().invoke(main, args[3:])
    assert result.exit_code == 2  # outside of an allocation
    assert "srun" in result.output


def test_build_command_resumes_a_run(tmp_path: Path) -> None:
    args = build_command(make_request(tmp_path, run=tmp_path / "r"))
    assert args[4:] == ["--format=json", "--nodes", "n1,n3", "--resume", str(tmp_path / "r")]


def test_child_gets_variables_and_srun_options(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("REMOVED", "1")
    request = make_request(
        tmp_path,
        point=make_point(variables={"A": "7", "REMOVED": ""}),
        sweep=make_sweep([POINT], container="a"),
    )
    script = 'echo "$A" ${REMOVED-none} $PARBENCH_SRUN_OPTIONS >&2'
    child = run_child(request, lambda _: ["sh", "-c", script])
    assert child.read_last_message() == "7 none --container-image=a"
