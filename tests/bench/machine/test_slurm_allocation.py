"""An allocation, its nodes' machine and the driver's addresses are found."""

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from parbench.bench.machine import slurm_allocation
from parbench.bench.machine.gpu import Gpu
from parbench.bench.machine.machine import Machine
from parbench.bench.machine.slurm_allocation import (
    Allocation,
    NodeLayout,
    choose_layout,
    inspect_rank_machine,
    list_host_addresses,
    main,
    parse_nodes,
)
from tests.support.nvidia import H100, gpus, install
from tests.support.paths import environment
from tests.support.refusals import usage_error
from tests.support.slurm.clusters import run_in_cluster
from tests.support.trees import write_tool

VARIABLES = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "n[1-4]",
}
JOB = Allocation(job="17", nodes=4, nodelist="n[1-4]")


def test_allocation_is_read_from_variables() -> None:
    assert Allocation.find(VARIABLES) == JOB


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("2", 2),
        ("2(x4)", 2),
        ("2(x3),1", None),
        ("", None),
    ],
)
def test_tasks_per_node_are_read(text: str, tasks: int | None) -> None:
    variables = {**VARIABLES, "SLURM_NTASKS_PER_NODE": text}
    assert Allocation.find(variables).ntasks_per_node == tasks


def test_missing_allocation_is_refused() -> None:
    message = usage_error(Allocation.find, {"SLURM_JOB_ID": "17"})
    assert "--launcher srun" in message
    assert "salloc" in message


def lay_out(nodes: int | None, tasks: int, distribution: str | None = None) -> NodeLayout:
    return choose_layout(JOB, nodes=nodes, ntasks_per_node=tasks, distribution=distribution)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("4", (4, None)),
        ("n1,n[3-4]", (3, "n1,n[3-4]")),
        ("a[1-2,7]b[0-1]", (6, "a[1-2,7]b[0-1]")),
    ],
)
def test_nodes_are_a_number_or_a_list(text: str, nodes: tuple[int, str | None]) -> None:
    assert parse_nodes(text) == nodes
    assert "'x'" in usage_error(parse_nodes, "n[x]")


def test_layout_uses_all_nodes_in_blocks() -> None:
    assert lay_out(None, 2) == NodeLayout(nodes=4, ntasks_per_node=2, distribution="block")
    layout = lay_out(2, 2, "cyclic")
    assert layout == NodeLayout(nodes=2, ntasks_per_node=2, distribution="cyclic")
    assert layout.num_ranks == 4


@pytest.mark.parametrize(
    ("nodes", "distribution", "facts"),
    [
        (8, None, ["--nodes 8", "17", "4"]),
        (0, None, ["--nodes 0"]),
        (1, None, ["at least 2 are needed"]),
    ],
)
def test_impossible_layout_is_refused(
    nodes: int, distribution: str | None, facts: list[str]
) -> None:
    message = usage_error(lay_out, nodes, 1, distribution)
    for fact in facts:
        assert fact in message


LOGIN = Machine(
    cores=4,
    memory_bytes=16 << 30,
    torch_version="2.13.0",
    torch_has_cuda=True,
)
NODE = Machine(
    cores=128,
    memory_bytes=1 << 40,
    gpus=(Gpu(name="H100", memory_bytes=80 << 30),),
    torch_version="2.13.0",
    torch_has_cuda=True,
)


class FakeSrun:
    """An ``srun`` in a folder, which records its arguments and environment."""

    def __init__(self, folder: Path) -> None:
        self.environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        self._folder = folder
        (folder / "node.json").write_bytes(msgspec.json.encode(NODE))
        self.write("echo a module is loaded; echo; ANSWER; echo")

    def write(self, script: str) -> None:
        """Replace the script; ``ANSWER`` prints a node's machine."""
        record = f'echo "$@" >>{self._folder}/calls\nenv >{self._folder}/env\n'
        script = script.replace("ANSWER", f"cat {self._folder}/node.json")
        write_tool(self._folder, "srun", record + script)

    def list_calls(self) -> list[str]:
        file = self._folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def list_variables(self) -> list[str]:
        return (self._folder / "env").read_text().splitlines()


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSrun:
    monkeypatch.setattr(slurm_allocation, "inspect_machine", lambda environ: LOGIN)
    fake = FakeSrun(tmp_path)
    monkeypatch.setenv("PATH", fake.environ["PATH"])
    return fake


def test_login_node_asks_a_node_of_the_job(srun: FakeSrun) -> None:
    assert inspect_rank_machine({**srun.environ, "SLURMD_NODENAME": "n1"}, JOB) == LOGIN
    assert inspect_rank_machine(srun.environ, None) == LOGIN
    assert srun.list_calls() == []
    assert inspect_rank_machine(srun.environ, JOB) == NODE
    assert len(srun.list_calls()) == 1


def test_node_is_asked_with_options_of_the_site_and_without_limits(srun: FakeSrun) -> None:
    shares = {"SLURM_GPUS": "32", "SLURM_TRES_PER_TASK": "gres/gpu:1", "SLURM_JOB_ID": "17"}
    options = "--container-image=x\n--mem=0"
    inspect_rank_machine({**srun.environ, **shares, "PARBENCH_SRUN_OPTIONS": options}, JOB)
    variables = srun.list_variables()
    assert [f"{name}={value}" in variables for name, value in shares.items()] == [0, 0, 1]
    [call] = srun.list_calls()
    args = call.split()
    assert {"--nodes=1", "--ntasks=1", "--cpu-bind=none", "--overlap"} <= set(args)
    assert args[-5:-2] == ["--container-image=x", "--mem=0", sys.executable]


@pytest.mark.parametrize(
    ("script", "fact"),
    [
        ("ANSWER; exit 7", "exit status 7"),
        ('echo "{}"', "`cores`"),
        ("exec sleep 60", "0.2 s"),
    ],
)
def test_failed_answer_is_refused_with_reason(
    srun: FakeSrun, monkeypatch: pytest.MonkeyPatch, script: str, fact: str
) -> None:
    if "sleep" in script:
        monkeypatch.setattr(slurm_allocation, "_NODE_TIMEOUT_SECONDS", 0.2)
    srun.write(script)
    message = usage_error(inspect_rank_machine, srun.environ, JOB)
    assert "job 17" in message
    assert fact in message


def test_node_prints_its_machine(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert msgspec.json.decode(last_line, type=Machine).cores > 0


PRINT_MACHINE = """
import msgspec, os, sys
from parbench.bench.machine.slurm_allocation import Allocation, inspect_rank_machine
assert "SLURMD_NODENAME" not in os.environ
sys.executable = os.environ["NODE_PYTHON"]
machine = inspect_rank_machine(os.environ, Allocation.find(os.environ))
print(msgspec.json.encode(machine).decode())
"""


@pytest.mark.full
def test_real_slurm_answers_for_its_node(tmp_path: Path) -> None:
    """Only nodes have GPUs, and a node has both CPUs, though the step has one task."""
    library = install(tmp_path / "library", gpus(H100, 2))["LD_LIBRARY_PATH"]
    on_node = f'test "$SLURMD_NODENAME" && export LD_LIBRARY_PATH={library}'
    script = f'{on_node}\nexec {sys.executable} "$@"'
    python = write_tool(tmp_path, "python", script)
    (tmp_path / "print_machine.py").write_text(PRINT_MACHINE)
    variables = {**environment(), "NODE_PYTHON": str(python)}
    command = ["salloc", "-Q", "-N2", "--ntasks-per-node=1", sys.executable, "print_machine.py"]
    process = run_in_cluster(command, nodes=2, cwd=tmp_path, variables=variables)
    assert process.returncode == 0, process.stdout + process.stderr
    machine = msgspec.json.decode(process.stdout.strip().splitlines()[-1], type=Machine)
    assert [gpu.name for gpu in machine.gpus] == [H100["name"], H100["name"]]
    assert machine.cores == min(2, os.cpu_count() or 1)


INTERFACES = {
    "lo": ["127.0.0.1"],
    "eth0": ["10.0.0.5"],
    "ib0": ["192.168.7.5", "192.168.7.6"],
}


@pytest.mark.parametrize(
    ("host_address", "chosen_interface", "addresses"),
    [
        ("192.168.7.5", "", ("192.168.7.5", "10.0.0.5", "192.168.7.6")),
        # Addresses of the loopback are not offered.
        ("127.0.1.1", "", ("10.0.0.5", "192.168.7.5", "192.168.7.6")),
        ("192.168.7.6", "eth0", ("10.0.0.5", "192.168.7.6", "192.168.7.5")),
        (None, "ib0", ("192.168.7.5", "192.168.7.6", "10.0.0.5")),
    ],
)
def test_driver_offers_likely_addresses_first(
    monkeypatch: pytest.MonkeyPatch,
    host_address: str | None,
    chosen_interface: str,
    addresses: tuple[str, ...],
) -> None:
    entries = {}
    for name, texts in INTERFACES.items():
        ipv4 = [SimpleNamespace(family=socket.AF_INET, address=text) for text in texts]
        ipv6 = SimpleNamespace(family=socket.AF_INET6, address="fe80::1")
        entries[name] = [*ipv4, ipv6]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    monkeypatch.setattr(slurm_allocation, "find_host_address", lambda: host_address)
    assert list_host_addresses({"GLOO_SOCKET_IFNAME": chosen_interface}) == addresses
