"""The environment is captured without secrets, split by rank and compared."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from parbench.bench.machine import environment
from parbench.bench.machine.environment import (
    RankPlace,
    capture_environment,
    describe_relation,
    describe_relations,
    find_differing_values,
    find_host_address,
    find_interface,
    format_cpus,
    group_cores,
    parse_cpus,
    select_recorded_variables,
)
from parbench.bench.machine.machine import find_package_version, get_affinity
from tests.support.trees import write_tree

RECORDED = ["CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "OMP_NUM_THREADS", "SLURM_JOB_ID"]
RECORDED += ["TORCH_DISTRIBUTED_USE_TORCHCOMMS", "UCX_TLS"]
IGNORED = ["HOME", "PATH", "MY_NCCL_DEBUG", "nccl_debug", "SLURM_JOB_USER", "OMP_X"]
SECRET = ["NCCL_AUTH_TOKEN", "UCX_KEY", "FI_SECRET_FILE", "GLOO_PASSWORD", "NCCL_api_key"]


def test_recorded_variables_are_sorted_and_without_secrets() -> None:
    names = [*IGNORED, *reversed(RECORDED), *SECRET]
    assert list(select_recorded_variables(dict.fromkeys(names, "1"))) == RECORDED


@pytest.mark.parametrize(
    "value", ["tcp://a,redis://user:p/w@host", "https://host/path?a=1&api_key=hunter2"]
)
def test_captured_variables_omit_credentials(value: str) -> None:
    assert capture_environment({"GLOO_X": value, "NCCL_DEBUG": "1"})["variables"] == {
        "NCCL_DEBUG": "1"
    }


@pytest.mark.parametrize("value", ["https://host:80/path?a=1", "=mlx5_0:1", "a@b"])
def test_captured_variables_keep_harmless_values(value: str) -> None:
    assert capture_environment({"NCCL_X": value})["variables"] == {"NCCL_X": value}


def test_variables_in_files_of_nccl_are_recorded(tmp_path: Path) -> None:
    """The environment precedes the user's file, and that precedes the file of the host."""
    own = "NCCL_ALGO=Ring\nNCCL_DEBUG=WARN\nNCCL_UCX_KEY=1\n# none\n"
    host = "NCCL_ALGO=Tree\nNCCL_PROTO=Simple\n"
    write_tree(tmp_path, {"etc/nccl.conf": host, "own": own})
    environ = {"NCCL_CONF_FILE": str(tmp_path / "own"), "NCCL_DEBUG": "INFO"}
    assert capture_environment(environ, root=tmp_path)["variables"] == {
        "NCCL_ALGO": "Ring",
        "NCCL_CONF_FILE": str(tmp_path / "own"),
        "NCCL_DEBUG": "INFO",
        "NCCL_PROTO": "Simple",
    }


def test_capture_describes_this_machine() -> None:
    captured = capture_environment(os.environ)
    assert captured["host"]["name"] == socket.gethostname()
    assert parse_cpus(captured["process"]["affinity"]) == get_affinity()
    assert captured["versions"]["torch"] == find_package_version("torch")
    assert msgspec.json.decode(msgspec.json.encode(captured)) == captured


def test_capture_reads_files_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "get_affinity", lambda: frozenset({0, 2, 5}))
    host = capture_environment({}, root=tmp_path)["host"]
    for name in ("boot_id", "cpu_model", "governor"):
        assert host[name] is None
    files = {
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "ondemand\n",
        "sys/devices/system/cpu/cpu2/cpufreq/scaling_governor": "performance\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 9654\nflags\t\t: fpu\n",
    }
    host = capture_environment({}, root=write_tree(tmp_path, files))["host"]
    assert host["governor"] == "performance,powersave"
    assert host["cpu_model"] == "AMD EPYC 9654"


INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.1", "fe80::1%eth0"],
    "eth1": ["00:11", "10.0.0.2"],
}


@pytest.fixture
def _interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three interfaces, and a host name that resolves to two addresses."""
    addresses = {}
    for name, texts in INTERFACES.items():
        addresses[name] = [SimpleNamespace(address=text) for text in texts]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    resolved = [(0, 0, 0, "", ("10.0.0.2", 0)), (0, 0, 0, "", ("10.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: resolved)


@pytest.mark.usefixtures("_interfaces")
def test_interface_is_set_or_has_host_address() -> None:
    assert capture_environment({"GLOO_SOCKET_IFNAME": "ib0"})["process"]["interface"] == "ib0"
    captured = capture_environment({"GLOO_SOCKET_IFNAME": ""})
    assert captured["process"]["interface"] == "eth1"


@pytest.mark.usefixtures("_interfaces")
@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("127.0.1.1", "lo"),
        ("fe80::1", "eth0"),
        ("10.0.0.9", None),
        (None, None),
    ],
)
def test_interface_of_address(address: str | None, interface: str | None) -> None:
    assert find_interface(address) == interface


def test_unresolvable_host_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(-2, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", raise_error)
    assert find_host_address() is None


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("0-3,8,10-11", {0, 1, 2, 3, 8, 10, 11})]
)
def test_cpus_are_written_as_ranges(text: str, cpus: set[int]) -> None:
    assert format_cpus(cpus) == text
    assert parse_cpus(text) == cpus


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """A system of two NUMA nodes with four cores of two threads each."""
    system = "sys/devices/system"
    files = {
        f"{system}/node/node0/cpulist": "0-3,8-11",
        f"{system}/node/node1/cpulist": "4-7,12-15",
    }
    for cpu in range(16):
        files[f"{system}/cpu/cpu{cpu}/topology/core_id"] = str(cpu % 8)
    return write_tree(tmp_path, files)


def test_cores_are_grouped_by_numa_node(two_sockets: Path) -> None:
    first_node, second_node = group_cores(2, range(16), two_sockets)
    assert first_node == (0, 1, 2, 3, 8, 9, 10, 11)
    assert second_node == (4, 5, 6, 7, 12, 13, 14, 15)
    assert group_cores(8, range(16), two_sockets)[:2] == ((0, 8), (1, 9))
    assert group_cores(2, {1, 2, 5}, two_sockets) == ((1,), (2, 5))


PLACE = RankPlace(
    host="a",
    boot_id="1",
    cpus=(3,),
    numa_nodes=(0,),
    gpu="a",
    switches="s.1.a",
)
CPU_PLACE = replace(PLACE, gpu=None)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (CPU_PLACE, "same NUMA node"),
        (replace(CPU_PLACE, cpus=(8,), numa_nodes=(1,)), "other NUMA node"),
        (replace(CPU_PLACE, cpus=(3, 8), numa_nodes=(0, 1)), None),
        (PLACE, "same GPU"),
        (replace(PLACE, gpu="c"), "NVLink"),
        (replace(PLACE, host="b", switches=None), "other node"),
        (replace(PLACE, host="b", switches="s.1.b"), "same switch"),
        (replace(PLACE, boot_id="2", switches=None), "other node"),
    ],
)
def test_relation_of_two_ranks(place: RankPlace, expected: str | None) -> None:
    links = {frozenset(("a", "c")): "NVLink"}
    assert describe_relation(PLACE, place, links) == expected
    assert describe_relation(place, PLACE, links) == expected


def test_relations_name_pairs_of_up_to_64_ranks() -> None:
    places = [PLACE, PLACE, replace(PLACE, host="b", switches=None)]
    assert describe_relations(places, {}) == {
        "0-1": "same GPU",
        "0-2": "other node",
        "1-2": "other node",
    }
    assert len(describe_relations([PLACE] * 64, {})) == 64 * 63 / 2
    assert describe_relations([PLACE] * 65, {}) == {}


def test_difference_names_values_by_path() -> None:
    base = {"host": {"kernel": "6.1", "gpu": None}, "variables": {"NCCL_ALGO": "Ring"}}
    changed = {"host": {"kernel": "6.2"}, "variables": {"NCCL_PROTO": "LL"}}
    assert find_differing_values(base, changed) == {
        "host.kernel": ["6.1", "6.2"],
        "variables.NCCL_ALGO": ["Ring", None],
        "variables.NCCL_PROTO": [None, "LL"],
    }
