"""The check of devices on all nodes."""

import json
import sys
from pathlib import Path

import pytest

from parbench.bench.check.check import to_document
from parbench.bench.check.health import Device, Health, Rate
from parbench.slurm.screen.devices import check_nodes, estimate_check_seconds
from tests.support.trees import write_tool

FAKE_SRUN = """
for arg; do
    case $arg in --output=*) out=${arg#--output=};; --error=*) err=${arg#--error=};; esac
done
echo "$@" > args
cat answer.json > $(echo $out | sed s/%N/n1/)
echo no module named torch > $(echo $err | sed s/%N/n2/)
echo srun: error: n3: task 2: Exited with exit code 1 >&2
"""


def test_check_nodes_runs_one_task_per_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first node answers, the second prints an error, and srun reports the third."""
    monkeypatch.chdir(tmp_path)
    rate = Rate(unit="B/s", value=1.0, repetitions={})
    device = Device(
        host="n1",
        name="GPU 5",
        kind="H100",
        rank=0,
        rates={"copy": rate},
    )
    health = Health(host="n1", seconds=41.0, device="cuda", devices=(device,))
    Path("answer.json").write_text(json.dumps(to_document(health)))
    write_tool(tmp_path, "srun", FAKE_SRUN)
    path = f"{tmp_path}:/usr/bin:/bin"
    monkeypatch.setenv("PATH", path)
    environ = {"PATH": path, "PARBENCH_SRUN_OPTIONS": "--container-image=x"}
    n1, n2, n3 = check_nodes(("n1", "n2", "n3"), 50.0, tmp_path / "check", environ)
    assert n1 == health
    assert n2.host == "n2"
    assert n2.problems == ("no module named torch",)
    assert n3.problems == ("srun: error: n3: task 2: Exited with exit code 1",)
    args = Path("args").read_text()
    assert "--nodes=3 --ntasks=3 --ntasks-per-node=1 --nodelist=n1,n2,n3" in args
    assert f"--container-image=x {sys.executable} -m parbench check --format=json" in args
    assert "--budget 50s" in args


def test_check_of_more_devices_takes_longer() -> None:
    seconds = [estimate_check_seconds("cuda", number) for number in (1, 2, 8)]
    assert seconds == sorted(seconds)
    assert seconds[2] > 60
    assert estimate_check_seconds("cpu", 2) < 40
