"""The command checks this machine and exits with the verdict's code."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from parbench.bench.check import check as check_module
from parbench.bench.check import show
from parbench.bench.check.check import check
from parbench.bench.check.health import Device, Fault, Health, Rate
from parbench.bench.check.infiniband import read_ports
from parbench.bench.machine.gpu import Gpu
from parbench.bench.machine.machine import Machine
from parbench.bench.results.runs import load_run
from parbench.cli import main
from tests.bench.check.test_health import NUM_RANKS, WRONG_ON_ONE, build_run
from tests.bench.check.test_infiniband import write_port
from tests.support.fake_runs import MACHINE
from tests.support.nvidia import H100, LOST, gpus, install
from tests.support.paths import Command
from tests.support.refusals import usage_error
from tests.support.slurm.clusters import PARBENCH, run_in_cluster

RATE = Rate(unit="FLOP/s", value=1e12, repetitions={0: 1e12})
DEVICE = Device(
    host="n1",
    name="GPU 0",
    kind="H100",
    rank=0,
    rates={"float32": RATE},
)
SLOW_LINK = Fault(text="GPU 0 - GPU 1: slow", fix="see")


@pytest.mark.parametrize(
    ("code", "verdict", "fields"),
    [
        (0, "ok", {}),
        (1, "bad", {"links": (SLOW_LINK,), "problems": ("no result",)}),
        (4, "did not run", {"problems": ("no result",)}),
    ],
)
def test_command_exits_with_code_of_verdict(
    code: int, verdict: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Health(host="n1", seconds=41.0, devices=(DEVICE,), device="cuda")
    monkeypatch.setattr(check_module, "check", lambda *args, **kwargs: replace(good, **fields))
    text = CliRunner().invoke(main, ["check"])
    assert text.exit_code == code
    assert f"n1: {verdict}" in text.stdout
    document = CliRunner().invoke(main, ["check", "--format=json"])
    assert document.exit_code == code
    assert json.loads(document.stdout)["code"] == code


def test_fault_that_is_not_bad_is_a_warning() -> None:
    fault = Fault(text="memory in use: 4 GiB", fix="see", is_bad=False)
    device = replace(DEVICE, reasons=(fault,))
    health = Health(host="n1", seconds=1.0, devices=(device,), device="cuda")
    assert (device.verdict, health.exit_code) == ("warning", 0)
    assert f"warning  {device.name}: memory in use" in show.render([health])


TOO_MANY_RANKS: dict[str, Any] = {
    "device": "cpu",
    "nproc": 1 << 20,
    "budget": "9s",
    "out": Path(),
    "inject": None,
}


def test_check_refuses_more_groups_than_cores() -> None:
    message = usage_error(check, (), {}, **TOO_MANY_RANKS)
    assert f"--nproc {1 << 20}" in message


def test_check_refuses_to_start_in_a_rank() -> None:
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "1",
    }
    assert "RANK" in usage_error(check, (), variables, **TOO_MANY_RANKS)


ALL_LOST = dataclasses.replace(
    MACHINE,
    silent_gpus=("0000:19:00.0",),
    gpu_failure="NVML reported 'GPU is lost (GPU 0)'",
)


def check_machine(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, device: str | None = None
) -> Health:
    monkeypatch.setattr(check_module, "inspect_machine", lambda environ: machine)
    return check((), {}, **{**TOO_MANY_RANKS, "nproc": None, "device": device})


@pytest.mark.parametrize("device", [None, "cuda"])
def test_host_whose_gpus_do_not_answer_is_bad(
    monkeypatch: pytest.MonkeyPatch, device: str | None
) -> None:
    health = check_machine(ALL_LOST, monkeypatch, device)
    assert health.exit_code == 1
    assert health.bad_names == ["GPU 0000:19:00.0"]
    text = show.render([health])
    assert "bad  GPU 0000:19:00.0: does not answer" in text
    assert "'GPU is lost (GPU 0)'" in text
    assert "dmesg" in text
    assert "nothing was measured" in text


@pytest.mark.parametrize(
    ("state", "exit_code", "verdicts", "reason"),
    [
        ("healthy", 0, "ok ok ok ok", "4 x NVIDIA H100 80GB HBM3"),
        ("slow", 1, "ok ok bad ok", "bad  GPU 2: slower than its peers: bfloat16 by 20 %"),
        ("wrong", 1, "ok bad ok ok", "bad  GPU 1: wrong results in compute.gemm"),
        ("silent", 1, "ok ok ok ok bad", "bad  GPU 4: does not answer"),
        ("missing", 1, "ok ok ok ok bad", "missing GPU: 4 of 5 GPUs (--nproc) are present"),
        ("port", 1, "ok ok ok ok", "bad  port mlx5_1/1: DOWN"),
    ],
)
def test_command_names_what_is_not_healthy(
    state: str,
    exit_code: int,
    verdicts: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = [LOST] if state == "silent" else []
    driver = install(tmp_path / "driver", [*gpus(H100, NUM_RANKS), *lost])
    failures = {"float32": WRONG_ON_ONE["float32"]} if state == "wrong" else {}
    run = build_run(tmp_path, {2: 1.25} if state == "slow" else {}, failures=failures)
    monkeypatch.setattr(check_module, "run_options", lambda *args, **kwargs: run.path)
    monkeypatch.setattr(check_module, "load_run", lambda path: run)
    if state == "port":
        write_port(tmp_path, "mlx5_0")
        write_port(tmp_path, "mlx5_1", state="1: DOWN", phys_state="2: Polling")
        monkeypatch.setattr(check_module, "read_ports", partial(read_ports, tmp_path))
    result = CliRunner().invoke(
        main,
        ["check", *(["--nproc=5"] if state == "missing" else [])],
        env={"LD_LIBRARY_PATH": driver["LD_LIBRARY_PATH"]},
    )
    assert result.exit_code == exit_code, result.output
    devices = result.stdout.splitlines()[2 : 2 + len(verdicts.split())]
    assert [line.split()[0] for line in devices] == verdicts.split()
    assert reason in result.stdout


@pytest.mark.parametrize(
    ("nproc", "variables", "has_note"),
    [(None, {}, True), (1, {}, False), (None, {"CUDA_VISIBLE_DEVICES": "0"}, False)],
)
def test_gpu_that_nvml_does_not_count_is_noted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nproc: int | None,
    variables: dict[str, str],
    has_note: bool,
) -> None:
    run = build_run(tmp_path)
    machine = dataclasses.replace(MACHINE, gpus=(Gpu(index=0),))
    monkeypatch.setattr(check_module, "inspect_machine", lambda environ: machine)
    monkeypatch.setattr(check_module, "list_gpu_addresses", lambda: ("19:00.0", "2a:00.0"))
    monkeypatch.setattr(check_module, "run_options", lambda *args, **kwargs: run.path)
    monkeypatch.setattr(check_module, "load_run", lambda path: run)
    options = {**TOO_MANY_RANKS, "nproc": nproc, "device": None}
    notes = check((), variables, **options).notes
    note = "NVML lists 1 of 2 NVIDIA GPUs of this host; if none is hidden on purpose: --nproc 2"
    assert (note in notes) == has_note


def list_bad(document: dict[str, Any]) -> list[bool]:
    return [device["verdict"] == "bad" for device in document["devices"]]


@pytest.mark.full
@pytest.mark.measures
def test_good_machine_is_ok(parbench: Command, tmp_path: Path) -> None:
    process = parbench("check", "--format=json")
    assert process.returncode == 0, process.stderr
    document = json.loads(process.stdout)
    assert document["seconds"] < 60
    ranks = load_run(tmp_path / document["run"]).records[0].environment
    for device in document["devices"]:
        cores = ranks[f"rank {device['rank']}"]["process"]["affinity"]
        assert device["name"] == f"CPU {cores}"


@pytest.mark.full
@pytest.mark.measures
def test_injected_fault_of_device_is_found(parbench: Command) -> None:
    options = "--inject slow:1:20% --budget 20s"
    process = parbench("check", "--format=json", *options.split())
    assert process.returncode == 1, process.stderr
    document = json.loads(process.stdout)
    assert list_bad(document)[:2] == [False, True]
    assert "slower than its peers:" in document["devices"][1]["reasons"][0]["text"]


STEP = "srun --overlap --mpi=none --cpu-bind=none -N1 -n1"
SRUN_AGENT = f"""#!/bin/sh
host=$1
shift
[ $host = n2 ] && fault="--inject corrupt:1"
exec {STEP} -w $host sh -c "$* $fault"
"""


@pytest.mark.full
@pytest.mark.measures
def test_hosts_of_a_cluster_are_checked_and_screened(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text(SRUN_AGENT)
    agent.chmod(0o755)
    options = "--budget 12s --format=json >hosts.json"
    check_hosts = f"{PARBENCH} check --hosts n1,n2 --ssh {agent} {options}"
    screen = f"{PARBENCH} slurm screen --size 64K --rounds 3 >screen.txt"
    command = ["salloc", "-Q", "-N3", "-n3", "sh", "-c", f"{check_hosts}; {screen}"]
    process = run_in_cluster(command, nodes=3, cwd=tmp_path, timeout=400)
    document = json.loads((tmp_path / "hosts.json").read_text())
    assert document["code"] == 1
    bad = {host["host"]: list_bad(host) for host in document["hosts"]}
    assert bad == {"n1": [False, False], "n2": [False, True]}, process.stderr
    text = (tmp_path / "screen.txt").read_text()
    assert "3 hosts: 0 bad" in text, process.stderr
    assert "nothing to exclude" in text
    assert "bad device" not in text
