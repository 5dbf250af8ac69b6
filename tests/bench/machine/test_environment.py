"""The environment: captured without secrets, hoisted without loss, compared without what always differs."""

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
from paths import ROOT
from trees import write_tree

from parbench.bench.machine import environment
from parbench.bench.machine.environment import (
    EMULATED,
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

RECORDED = """
NCCL_DEBUG TORCH_NCCL_BLOCKING_WAIT GLOO_SOCKET_IFNAME UCX_TLS FI_PROVIDER CUDA_VISIBLE_DEVICES
CUDA_DEVICE_MAX_CONNECTIONS OMP_NUM_THREADS MKL_NUM_THREADS PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF SLURM_JOB_ID
SLURM_NNODES SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_JOB_PARTITION SLURM_TOPOLOGY_ADDR SLURM_JOB_NODELIST
SLURM_CPUS_PER_TASK SLURM_CLUSTER_NAME SLURM_CPU_BIND SLURM_DISTRIBUTION SLURM_GPUS_ON_NODE SLURM_JOB_NUM_NODES
SLURM_RESTART_COUNT SLURM_TASKS_PER_NODE SLURM_TOPOLOGY_ADDR_PATTERN
"""
PASSED_OVER = "HOME PATH USER MY_NCCL_DEBUG nccl_debug SLURM_JOB_USER SLURM_CONF PYTORCH_TEST OMP_X"
NAMED_LIKE_SECRETS = "NCCL_AUTH_TOKEN UCX_KEY FI_SECRET_FILE GLOO_PASSWORD NCCL_api_key TORCH_NCCL_Passphrase"
WITH_CREDENTIALS = (
    "https://user:pw@host",
    "https://user:p/w@host/path",
    "http://hunter2@host:80",
    "tcp://a,redis://user:pw@host",
    "HTTPS://USER:PW@HOST",
    "https://host/path?access_token=hunter2",
    "https://host/path?a=1&api_key=hunter2",
)
HARMLESS = ("https://host:80/path?a=1", "eth0,eth1", "=mlx5_0:1", "a@b", "^docker", "")
CPUINFO = """processor\t: 0
model name\t: AMD EPYC 9654 96-Core Processor
flags\t\t: fpu vme {flags}

processor\t: 1
model name\t: Another
flags\t\t: fpu hypervisor
"""


def pretend_network(
    monkeypatch: pytest.MonkeyPatch, *resolved: str, error: Exception | None = None, **interfaces: list[str]
) -> None:
    """Let the host's name mean these addresses, and its interfaces bear those."""

    class Entry:
        def __init__(self, address: str) -> None:
            self.address = address

    def getaddrinfo(host: str, port: None, **_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        assert (host, port) == (socket.gethostname(), None)
        if error is not None:
            raise error
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in resolved]

    listing = {name: [Entry(address) for address in found] for name, found in interfaces.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: listing)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


# --- variables ---


def test_variables_that_bear_on_communication_are_recorded_in_order_and_no_others() -> None:
    recorded = RECORDED.split()
    given = [*PASSED_OVER.split(), *reversed(recorded), *NAMED_LIKE_SECRETS.split()]
    found = recorded_variables(dict.fromkeys(given, "1"))
    assert found == dict.fromkeys(recorded, "1")
    assert list(found) == sorted(recorded)


def test_addresses_with_credentials_are_not_recorded_and_harmless_values_are() -> None:
    for value in WITH_CREDENTIALS:
        assert recorded_variables({"GLOO_X": value}) == {}, value
    for value in HARMLESS:
        assert recorded_variables({"NCCL_X": value}) == {"NCCL_X": value}, value


def test_no_secret_appears_anywhere_in_a_capture() -> None:
    secret = "https://user:hunter2@host"
    environ = {"NCCL_AUTH_TOKEN": "hunter2", "GLOO_X": secret, "GLOO_SOCKET_IFNAME": secret, "HOME_PAGE": "hunter2"}
    captured = capture({**environ, "NCCL_DEBUG": "INFO"})
    assert captured["variables"] == {"NCCL_DEBUG": "INFO"}
    assert b"hunter2" not in msgspec.json.encode(captured)


def test_a_value_that_is_no_text_is_still_written() -> None:
    value = os.fsdecode(b"eth\xff")
    assert msgspec.json.encode(recorded_variables({"NCCL_X": value})) == b'{"NCCL_X":"eth\\\\udcff"}'


# --- capture ---


def test_a_capture_is_what_this_machine_says_and_survives_json() -> None:
    captured = capture(os.environ)
    host, process, versions = captured["host"], captured["process"], captured["versions"]
    assert host["name"] == socket.gethostname()
    assert host["kernel"] == platform.release()
    assert host["os"] == platform.freedesktop_os_release()["PRETTY_NAME"]
    assert host["memory_bytes"] == psutil.virtual_memory().total
    assert host["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    assert process["cores"] == available_cores()
    assert parse_cpus(process["affinity"]) == affinity()
    assert versions == {
        "python": platform.python_version(),
        **{name: package_version(name) for name in ("torch", "numpy", "parbench")},
    }
    assert msgspec.json.decode(msgspec.json.encode(captured)) == captured
    numbers = [value for value in shared_leaves(captured) if isinstance(value, float)]
    assert numbers
    assert all(math.isfinite(number) for number in numbers)


def test_neither_a_capture_nor_a_look_at_the_machine_imports_anything_heavy() -> None:
    program = (
        "import os, sys; "
        "from parbench.bench.machine.environment import capture; "
        "from parbench.bench.machine.machine import inspect_machine; "
        "print(len(capture(os.environ)), inspect_machine(os.environ).torch_version is not None); "
        "print(sorted({'torch', 'numpy', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["5 True", "[]", ""]


def test_the_processor_is_described_by_its_first_core(tmp_path: Path) -> None:
    for flags, virtualised in (("hypervisor avx", True), ("hypervisors avx", False), ("", False)):
        host = capture({}, root=write_tree(tmp_path, {"proc/cpuinfo": CPUINFO.format(flags=flags)}))["host"]
        assert host["cpu_model"] == "AMD EPYC 9654 96-Core Processor"
        assert host["virtualised"] is virtualised, flags


def test_what_the_kernel_does_not_tell_is_unknown(tmp_path: Path) -> None:
    host = capture({}, root=tmp_path)["host"]
    unknown = ("boot_id", "cpu_model", "clock_source", "governor", "virtualised")
    assert {name: host[name] for name in unknown} == dict.fromkeys(unknown)
    arm = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n"
    host = capture({}, root=write_tree(tmp_path, {"proc/cpuinfo": arm}))["host"]
    assert (host["cpu_model"], host["virtualised"]) == (None, None)


def test_clock_source_governors_and_quota_are_read_under_the_same_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "affinity", lambda: frozenset({0, 2, 5}))
    governors = {0: "powersave", 1: "ondemand", 2: "performance"}  # cpu1 is not ours, cpu5 has none
    cpus = "sys/devices/system/cpu"
    files = {f"{cpus}/cpu{cpu}/cpufreq/scaling_governor": f"{name}\n" for cpu, name in governors.items()}
    files["sys/devices/system/clocksource/clocksource0/current_clocksource"] = "hpet\n"
    files |= {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000"}
    captured = capture({}, root=write_tree(tmp_path, files))
    assert captured["host"]["governor"] == "performance,powersave"
    assert captured["host"]["clock_source"] == "hpet"
    assert captured["process"]["cores"] == 1


def test_what_the_system_cannot_tell_of_its_release_and_load_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise OSError("unobtainable")

    monkeypatch.setattr(os, "getloadavg", lambda: (1.23456, 2.0, 3.0))
    assert capture({})["load"] == {"one_minute": 1.23}
    monkeypatch.setattr(os, "getloadavg", fails)
    monkeypatch.setattr(platform, "freedesktop_os_release", fails)
    assert capture({})["load"] == {"one_minute": None}
    assert capture({})["host"]["os"] == platform.system()


def test_what_is_only_played_on_one_machine_says_so() -> None:
    for environ in ({}, {EMULATED_VARIABLE: ""}):
        assert emulation(environ) == ()
    told = "4 nodes on one machine of 2 cores"
    assert emulation({EMULATED_VARIABLE: told}) == (f"{EMULATED}: {told}",)


# --- interface ---


def test_the_interface_is_the_one_that_was_set_or_else_bears_the_address_of_the_host_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second = ["00:11", "10.0.0.2"]
    pretend_network(monkeypatch, "10.0.0.2", "10.0.0.1", lo=["127.0.0.1"], eth0=["10.0.0.1"], eth1=second)
    assert capture({"GLOO_SOCKET_IFNAME": "ib0"})["process"]["interface"] == "ib0"
    for environ in ({}, {"GLOO_SOCKET_IFNAME": ""}):
        captured = capture(environ)
        assert (captured["host"]["address"], captured["process"]["interface"]) == ("10.0.0.2", "eth1")


def test_an_address_is_borne_by_an_interface_or_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = psutil.net_if_addrs()
    for address in {e.address for entries in listing.values() for e in entries if e.family == socket.AF_INET}:
        assert address in [entry.address for entry in listing[interface_of(address) or "none"]]
    pretend_network(monkeypatch, lo=["127.0.0.1", "::1"], eth0=["10.0.0.1", "fe80::1%eth0"])
    borne = {"127.0.0.1": "lo", "127.0.1.1": "lo", "::1": "lo", "fe80::1": "eth0", "10.0.0.9": None, "12.0.0.1": None}
    assert {address: interface_of(address) for address in borne} == borne
    assert interface_of(None) is None


def test_a_host_name_that_resolves_to_nothing_has_no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (socket.gaierror(-2, "unknown"), UnicodeError("label too long")):
        pretend_network(monkeypatch, error=error, lo=["127.0.0.1"])
        assert host_address() is None
        captured = capture({})
        assert (captured["host"]["address"], captured["process"]["interface"]) == (None, None)


# --- lists of CPUs ---


@settings(deadline=None, max_examples=50)
@given(st.frozensets(st.integers(0, 300)))
def test_cpus_are_written_as_linux_does_and_read_back(cpus: frozenset[int]) -> None:
    told: list[tuple[set[int], str]] = [({0}, "0"), ({0, 1, 2, 3, 8}, "0-3,8"), ({4, 2, 5}, "2,4-5"), (set(), "")]
    for of, text in told:
        assert format_cpus(of) == text
    assert parse_cpus(format_cpus(cpus)) == cpus


# --- hoisting ---

LEAVES = st.one_of(st.none(), st.integers(0, 2), st.sampled_from(["x", "y"]))
NAMES = st.sampled_from("abc")
ENVIRONMENTS = st.dictionaries(
    NAMES, st.recursive(LEAVES, lambda inner: st.dictionaries(NAMES, inner, max_size=3)), max_size=3
)


def merged(common: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """Put a rank's own values back among the common ones."""
    whole = dict(common)
    for key, value in rest.items():
        both = isinstance(value, Mapping) and isinstance(whole.get(key), Mapping)
        whole[key] = merged(whole[key], value) if both else value
    return whole


def shared_leaves(group: Mapping[str, Any]) -> Iterator[Any]:
    for value in group.values():
        if isinstance(value, Mapping):
            yield from shared_leaves(value)
        else:
            yield value


def test_what_all_ranks_share_is_hoisted_leaf_by_leaf() -> None:
    ranks = [
        {"host": {"name": name, "os": "Debian"}, "process": {"affinity": cpu}, "variables": {"NCCL_X": "1"}}
        for name, cpu in (("n1", "0"), ("n2", "1"), ("n2", "1"))
    ]
    common, rests = hoist(ranks)
    assert common == {"host": {"os": "Debian"}, "process": {}, "variables": {"NCCL_X": "1"}}
    assert rests == [
        {"host": {"name": "n1"}, "process": {"affinity": "0"}},
        {"host": {"name": "n2"}, "process": {"affinity": "1"}},
        {"host": {"name": "n2"}, "process": {"affinity": "1"}},
    ]


@settings(deadline=None, max_examples=50)
@given(st.lists(ENVIRONMENTS, min_size=1, max_size=3))
def test_hoisting_loses_nothing_and_leaves_nothing_shared(ranks: list[dict[str, Any]]) -> None:
    common, rests = hoist(ranks)
    assert [merged(common, rest) for rest in rests] == ranks
    again, _ = hoist(rests)
    assert len(ranks) == 1 or list(shared_leaves(again)) == []


# --- differences ---


def test_leaves_that_differ_are_named_by_their_path() -> None:
    base = {"host": {"kernel": "6.1", "os": "Debian"}, "variables": {"NCCL_ALGO": "Ring", "NCCL_X": "1"}}
    other = {"host": {"kernel": "6.2", "os": "Debian"}, "variables": {"NCCL_PROTO": "LL", "NCCL_X": "1"}}
    changes = {"host.kernel": ["6.1", "6.2"], "variables.NCCL_ALGO": ["Ring", None]}
    found = difference(base, other)
    assert found == {**changes, "variables.NCCL_PROTO": [None, "LL"]}
    assert list(found) == sorted(found)
    assert difference(other, base) == {path: pair[::-1] for path, pair in found.items()}
    assert difference(capture({}), capture({})) == {}
    assert difference({"a": {"b": 1}}, {"a": 2}) == {"a": [None, 2], "a.b": [1, None]}


def test_neither_the_load_nor_unknown_for_absent_is_a_difference() -> None:
    base = {VOLATILE: {"one_minute": 0.1}, "loads": {"a": 1}, "host": {"load": 1, "x": None}}
    other = {VOLATILE: {"one_minute": 0.9}, "loads": {"a": 2}, "host": {"load": 2}}
    assert difference(base, other) == {"host.load": [1, 2], "loads.a": [1, 2]}
    assert difference({"a": {"b": None}}, {"a": {"b": 0}}) == {"a.b": [None, 0]}
