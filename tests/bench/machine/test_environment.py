"""The environment: captured without secrets, split by rank and compared."""

import math
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbench.bench.machine import environment
from parbench.bench.machine.environment import (
    EMULATED_VARIABLE,
    VOLATILE,
    capture,
    difference,
    emulation,
    format_cpus,
    hoist,
    host_address,
    interface_of,
    parse_cpus,
    recorded_variables,
)
from parbench.bench.machine.machine import affinity, available_cores, package_version
from tests.support.paths import ROOT
from tests.support.trees import write_tree

RECORDED = """
CUDA_DEVICE_MAX_CONNECTIONS CUDA_VISIBLE_DEVICES FI_PROVIDER GLOO_SOCKET_IFNAME MKL_NUM_THREADS
NCCL_DEBUG OMP_NUM_THREADS PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF SLURM_CLUSTER_NAME
SLURM_CPUS_PER_TASK SLURM_CPU_BIND SLURM_DISTRIBUTION SLURM_GPUS_ON_NODE SLURM_JOB_ID
SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_JOB_PARTITION SLURM_NNODES SLURM_NTASKS
SLURM_NTASKS_PER_NODE SLURM_RESTART_COUNT SLURM_TASKS_PER_NODE SLURM_TOPOLOGY_ADDR
SLURM_TOPOLOGY_ADDR_PATTERN TORCH_NCCL_BLOCKING_WAIT UCX_TLS
"""
IGNORED = "HOME PATH MY_NCCL_DEBUG nccl_debug SLURM_JOB_USER SLURM_CONF PYTORCH_TEST OMP_X"
SECRET_NAMES = "NCCL_AUTH_TOKEN UCX_KEY FI_SECRET_FILE GLOO_PASSWORD NCCL_api_key"
CPUINFO = """processor\t: 0
model name\t: AMD EPYC 9654 96-Core Processor
flags\t\t: fpu vme {flags}

processor\t: 1
model name\t: Another
flags\t\t: fpu hypervisor
"""


def fake_network(
    monkeypatch: pytest.MonkeyPatch,
    *resolved: str,
    error: Exception | None = None,
    **interfaces: list[str],
) -> None:
    """Let the host's name resolve to these addresses and its interfaces have those."""

    class Entry:
        def __init__(self, address: str) -> None:
            self.address = address

    def getaddrinfo(
        host: str, port: None, **_: object
    ) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        assert (host, port) == (socket.gethostname(), None)
        if error is not None:
            raise error
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in resolved]

    entries = {name: [Entry(address) for address in ips] for name, ips in interfaces.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


# --- variables ---


def test_recorded_variables_are_sorted_and_without_secrets() -> None:
    expected = RECORDED.split()
    names = [*IGNORED.split(), *reversed(expected), *SECRET_NAMES.split()]
    recorded = recorded_variables(dict.fromkeys(names, "1"))
    assert list(recorded.items()) == [(name, "1") for name in expected]


@pytest.mark.parametrize(
    "value",
    [
        "https://user:pw@host",
        "https://user:p/w@host/path",
        "http://hunter2@host:80",
        "tcp://a,redis://user:pw@host",
        "HTTPS://USER:PW@HOST",
        "https://host/path?a=1&api_key=hunter2",
    ],
)
def test_recorded_variables_omit_credentials(value: str) -> None:
    assert recorded_variables({"GLOO_X": value}) == {}


@pytest.mark.parametrize("value", ["https://host:80/path?a=1", "=mlx5_0:1", "a@b", "^docker", ""])
def test_recorded_variables_keep_harmless_values(value: str) -> None:
    assert recorded_variables({"NCCL_X": value}) == {"NCCL_X": value}


def test_capture_contains_no_secret() -> None:
    secret = "https://user:hunter2@host"
    environ = {"NCCL_AUTH_TOKEN": "hunter2", "GLOO_SOCKET_IFNAME": secret, "NCCL_DEBUG": "INFO"}
    captured = capture(environ)
    assert captured["variables"] == {"NCCL_DEBUG": "INFO"}
    assert b"hunter2" not in msgspec.json.encode(captured)


def test_recorded_variables_encode_invalid_text() -> None:
    value = os.fsdecode(b"eth\xff")
    encoded = msgspec.json.encode(recorded_variables({"NCCL_X": value}))
    assert encoded == b'{"NCCL_X":"eth\\\\udcff"}'


# --- capture ---


def test_capture_describes_this_machine() -> None:
    captured = capture(os.environ)
    host, process = captured["host"], captured["process"]
    assert host["name"] == socket.gethostname()
    assert host["kernel"] == platform.release()
    assert host["os"] == platform.freedesktop_os_release()["PRETTY_NAME"]
    assert host["memory_bytes"] == psutil.virtual_memory().total
    assert host["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert process["cores"] == available_cores()
    assert parse_cpus(process["affinity"]) == affinity()
    packages = {name: package_version(name) for name in ("torch", "numpy", "parbench")}
    assert captured["versions"] == {"python": platform.python_version(), **packages}
    assert msgspec.json.decode(msgspec.json.encode(captured)) == captured
    assert all(math.isfinite(leaf) for leaf in leaves(captured) if isinstance(leaf, float))


def test_capture_imports_no_heavy_package() -> None:
    program = (
        "import os, sys; "
        "from parbench.bench.machine.environment import capture; "
        "from parbench.bench.machine.machine import inspect_machine; "
        "print(len(capture(os.environ)), inspect_machine(os.environ).torch_version is not None); "
        "print(sorted({'torch', 'numpy', 'pandas'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout.split("\n") == ["5 True", "[]", ""]


@pytest.mark.parametrize(
    ("flags", "virtualised"), [("hypervisor avx", True), ("hypervisors avx", False), ("", False)]
)
def test_capture_describes_the_first_core(tmp_path: Path, flags: str, virtualised: bool) -> None:
    root = write_tree(tmp_path, {"proc/cpuinfo": CPUINFO.format(flags=flags)})
    host = capture({}, root=root)["host"]
    assert host["cpu_model"] == "AMD EPYC 9654 96-Core Processor"
    assert host["virtualised"] is virtualised


def test_capture_without_proc_is_unknown(tmp_path: Path) -> None:
    host = capture({}, root=tmp_path)["host"]
    names = ("boot_id", "cpu_model", "clock_source", "governor", "virtualised")
    assert [host[name] for name in names] == [None] * 5
    arm = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n"
    host = capture({}, root=write_tree(tmp_path, {"proc/cpuinfo": arm}))["host"]
    assert (host["cpu_model"], host["virtualised"]) == (None, None)


def test_capture_reads_clock_governors_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "affinity", lambda: frozenset({0, 2, 5}))
    governors = {0: "powersave", 1: "ondemand", 2: "performance"}  # cpu5 has none
    files = {
        f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor": f"{name}\n"
        for cpu, name in governors.items()
    }
    files["sys/devices/system/clocksource/clocksource0/current_clocksource"] = "hpet\n"
    files["proc/self/cgroup"] = "0::/\n"
    files["sys/fs/cgroup/cpu.max"] = "100000 100000"
    captured = capture({}, root=write_tree(tmp_path, files))
    assert captured["host"]["governor"] == "performance,powersave"
    assert captured["host"]["clock_source"] == "hpet"
    assert captured["process"]["cores"] == 1


def test_capture_survives_missing_system_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error() -> Any:
        raise OSError("unobtainable")

    monkeypatch.setattr(os, "getloadavg", lambda: (1.23456, 2.0, 3.0))
    assert capture({})["load"] == {"one_minute": 1.23}
    monkeypatch.setattr(os, "getloadavg", raise_error)
    monkeypatch.setattr(platform, "freedesktop_os_release", raise_error)
    captured = capture({})
    assert captured["load"] == {"one_minute": None}
    assert captured["host"]["os"] == platform.system()


def test_emulation_is_noted() -> None:
    assert emulation({}) == emulation({EMULATED_VARIABLE: ""}) == ()
    [note] = emulation({EMULATED_VARIABLE: "4 nodes"})
    assert "4 nodes" in note


# --- interface ---


def test_interface_is_set_or_has_the_host_address(monkeypatch: pytest.MonkeyPatch) -> None:
    eth1 = ["00:11", "10.0.0.2"]
    fake_network(
        monkeypatch, "10.0.0.2", "10.0.0.1", lo=["127.0.0.1"], eth0=["10.0.0.1"], eth1=eth1
    )
    assert capture({"GLOO_SOCKET_IFNAME": "ib0"})["process"]["interface"] == "ib0"
    captured = capture({"GLOO_SOCKET_IFNAME": ""})
    assert captured["host"]["address"] == "10.0.0.2"
    assert captured["process"]["interface"] == "eth1"


def test_interface_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_network(monkeypatch, lo=["127.0.0.1", "::1"], eth0=["10.0.0.1", "fe80::1%eth0"])
    interfaces = {
        "127.0.1.1": "lo",
        "::1": "lo",
        "10.0.0.1": "eth0",
        "fe80::1": "eth0",
        "10.0.0.9": None,
        None: None,
    }
    assert {address: interface_of(address) for address in interfaces} == interfaces


@pytest.mark.parametrize("error", [socket.gaierror(-2, "unknown"), UnicodeError("too long")])
def test_unresolvable_host_has_no_interface(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fake_network(monkeypatch, error=error, lo=["127.0.0.1"])
    assert host_address() is None
    captured = capture({})
    assert (captured["host"]["address"], captured["process"]["interface"]) == (None, None)


# --- lists of CPUs ---


def test_format_cpus_writes_ranges() -> None:
    texts = {"": set[int](), "0": {0}, "0-3,8": {0, 1, 2, 3, 8}, "2,4-5": {4, 2, 5}}
    assert {text: format_cpus(cpus) for text, cpus in texts.items()} == {t: t for t in texts}


@settings(deadline=None, max_examples=50)
@given(st.frozensets(st.integers(0, 300)))
def test_parse_cpus_round_trip(cpus: frozenset[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == cpus


# --- hoisting ---

LEAVES = st.one_of(st.none(), st.integers(0, 2), st.sampled_from(["x", "y"]))
NAMES = st.sampled_from("abc")
ENVIRONMENTS = st.dictionaries(
    NAMES,
    st.recursive(LEAVES, lambda inner: st.dictionaries(NAMES, inner, max_size=3)),
    max_size=3,
)


def merge(common: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(common)
    for key, value in rest.items():
        is_group = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if is_group else value
    return merged


def leaves(group: Mapping[str, Any]) -> Iterator[Any]:
    for value in group.values():
        if isinstance(value, Mapping):
            yield from leaves(value)
        else:
            yield value


def test_hoist_separates_common_leaves() -> None:
    ranks = [
        {"host": {"name": name, "os": "Debian"}, "process": {"affinity": cpu}}
        for name, cpu in (("n1", "0"), ("n2", "1"))
    ]
    common, rests = hoist(ranks)
    assert common == {"host": {"os": "Debian"}, "process": {}}
    assert rests == [
        {"host": {"name": "n1"}, "process": {"affinity": "0"}},
        {"host": {"name": "n2"}, "process": {"affinity": "1"}},
    ]


@settings(deadline=None, max_examples=50)
@given(st.lists(ENVIRONMENTS, min_size=1, max_size=3))
def test_hoist_is_complete_and_lossless(ranks: list[dict[str, Any]]) -> None:
    common, rests = hoist(ranks)
    assert [merge(common, rest) for rest in rests] == ranks
    still_common, _ = hoist(rests)
    assert len(ranks) == 1 or list(leaves(still_common)) == []


# --- differences ---


def test_difference_names_leaves_by_path() -> None:
    base = {"host": {"kernel": "6.1", "os": "Debian"}, "variables": {"NCCL_ALGO": "Ring"}}
    other = {"host": {"kernel": "6.2", "os": "Debian"}, "variables": {"NCCL_PROTO": "LL"}}
    assert list(difference(base, other).items()) == [
        ("host.kernel", ["6.1", "6.2"]),
        ("variables.NCCL_ALGO", ["Ring", None]),
        ("variables.NCCL_PROTO", [None, "LL"]),
    ]
    assert difference(base, base) == {}
    assert difference({"a": {"b": 1}}, {"a": 2}) == {"a": [None, 2], "a.b": [1, None]}


def test_difference_ignores_load_and_unknown() -> None:
    base = {VOLATILE: {"one_minute": 0.1}, "loads": {"a": 1}, "host": {"load": 1, "x": None}}
    other = {VOLATILE: {"one_minute": 0.9}, "loads": {"a": 2}, "host": {"load": 2}}
    assert difference(base, other) == {"host.load": [1, 2], "loads.a": [1, 2]}
    assert difference({"a": {"b": None}}, {"a": {"b": 0}}) == {"a.b": [None, 0]}
