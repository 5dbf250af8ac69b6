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

from bench import environment
from bench.environment import (
    VOLATILE,
    capture,
    difference,
    format_cpus,
    hoist,
    host_address,
    interface_of,
    load_average,
    parse_cpus,
    recorded_variables,
)
from bench.machine import affinity, available_cores, package_version

HOME = Path(environment.__file__).parents[1]
CPUINFO = """processor\t: 0
model name\t: AMD EPYC 9654 96-Core Processor
flags\t\t: fpu vme {flags}

processor\t: 1
model name\t: Another
flags\t\t: fpu hypervisor
"""


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def pretend_addresses(monkeypatch: pytest.MonkeyPatch, **addresses: list[str]) -> None:
    class Entry:
        def __init__(self, address: str) -> None:
            self.address = address

    listing = {name: [Entry(address) for address in found] for name, found in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: listing)


def pretend_host_resolves(monkeypatch: pytest.MonkeyPatch, *addresses: str, error: Exception | None = None) -> None:
    def getaddrinfo(host: str, port: None, **_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        assert (host, port) == (socket.gethostname(), None)
        if error is not None:
            raise error
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


# --- variables ---


@pytest.mark.parametrize(
    "name",
    [
        "NCCL_DEBUG",
        "TORCH_NCCL_BLOCKING_WAIT",
        "GLOO_SOCKET_IFNAME",
        "UCX_TLS",
        "FI_PROVIDER",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "SLURM_JOB_ID",
        "SLURM_NNODES",
        "SLURM_NTASKS",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_JOB_PARTITION",
        "SLURM_TOPOLOGY_ADDR",
        "SLURM_JOB_NODELIST",
        "SLURM_CPUS_PER_TASK",
        "SLURM_CLUSTER_NAME",
        "SLURM_CPU_BIND",
        "SLURM_DISTRIBUTION",
        "SLURM_GPUS_ON_NODE",
        "SLURM_JOB_NUM_NODES",
        "SLURM_RESTART_COUNT",
        "SLURM_TASKS_PER_NODE",
        "SLURM_TOPOLOGY_ADDR_PATTERN",
    ],
)
def test_variables_that_bear_on_communication_are_recorded(name: str) -> None:
    assert recorded_variables({name: "1"}) == {name: "1"}


@pytest.mark.parametrize(
    "name",
    ["HOME", "PATH", "USER", "MY_NCCL_DEBUG", "nccl_debug", "SLURM_JOB_USER", "SLURM_CONF", "PYTORCH_TEST", "OMP_X"],
)
def test_other_variables_are_not_recorded(name: str) -> None:
    assert recorded_variables({name: "1"}) == {}


@pytest.mark.parametrize(
    "name",
    ["NCCL_AUTH_TOKEN", "UCX_KEY", "FI_SECRET_FILE", "GLOO_PASSWORD", "NCCL_api_key", "TORCH_NCCL_Passphrase"],
)
def test_variables_named_like_secrets_are_not_recorded(name: str) -> None:
    assert recorded_variables({name: "hunter2"}) == {}


@pytest.mark.parametrize(
    "value",
    [
        "https://user:pw@host",
        "https://user:p/w@host/path",
        "http://hunter2@host:80",
        "tcp://a,redis://user:pw@host",
        "HTTPS://USER:PW@HOST",
        "https://host/path?access_token=hunter2",
        "https://host/path?a=1&api_key=hunter2",
    ],
)
def test_addresses_with_credentials_are_not_recorded(value: str) -> None:
    assert recorded_variables({"GLOO_X": value}) == {}


@pytest.mark.parametrize("value", ["https://host:80/path?a=1", "eth0,eth1", "=mlx5_0:1", "a@b", "^docker", ""])
def test_values_without_credentials_are_recorded(value: str) -> None:
    assert recorded_variables({"NCCL_X": value}) == {"NCCL_X": value}


def test_no_secret_appears_anywhere_in_a_capture() -> None:
    environ = {
        "NCCL_AUTH_TOKEN": "hunter2",
        "GLOO_X": "https://user:hunter2@host",
        "GLOO_SOCKET_IFNAME": "https://user:hunter2@host",
        "HOME_PAGE": "hunter2",
        "NCCL_DEBUG": "INFO",
    }
    captured = capture(environ)
    assert captured["variables"] == {"NCCL_DEBUG": "INFO"}
    assert b"hunter2" not in msgspec.json.encode(captured)


def test_variables_are_in_the_order_of_their_names() -> None:
    assert list(recorded_variables({"UCX_TLS": "1", "FI_X": "2", "NCCL_X": "3"})) == ["FI_X", "NCCL_X", "UCX_TLS"]


def test_a_value_that_is_no_text_is_still_written() -> None:
    value = os.fsdecode(b"eth\xff")
    assert msgspec.json.encode(recorded_variables({"NCCL_X": value})) == b'{"NCCL_X":"eth\\\\udcff"}'


# --- capture, here ---


def test_a_capture_has_these_groups_and_values() -> None:
    captured = capture({})
    assert {group: list(values) for group, values in captured.items()} == {
        "host": [
            "name",
            "address",
            "os",
            "kernel",
            "boot_id",
            "cpu_model",
            "memory_bytes",
            "clock_source",
            "governor",
            "virtualised",
        ],
        "versions": ["python", "torch", "numpy", "parbench"],
        "variables": [],
        "process": ["cores", "affinity", "interface"],
        "load": ["one_minute"],
    }


def test_a_capture_is_what_this_machine_says() -> None:
    captured = capture({})
    host, process = captured["host"], captured["process"]
    assert host["name"] == socket.gethostname()
    assert host["kernel"] == platform.release()
    assert host["memory_bytes"] == psutil.virtual_memory().total
    assert host["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    assert process["cores"] == available_cores()
    assert parse_cpus(process["affinity"]) == affinity()
    assert captured["versions"]["python"] == platform.python_version()
    assert captured["versions"]["torch"] == package_version("torch")
    assert captured["versions"]["numpy"] == package_version("numpy")


def test_a_capture_survives_json() -> None:
    captured = capture(os.environ)
    assert msgspec.json.decode(msgspec.json.encode(captured)) == captured


def test_a_capture_imports_nothing_heavy() -> None:
    program = (
        "import os, sys; from bench.environment import capture; print(len(capture(os.environ))); "
        "print(sorted({'torch', 'numpy', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=HOME, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["5", "[]", ""]


# --- capture, from fakes ---


@pytest.mark.parametrize(("flags", "virtualised"), [("hypervisor avx", True), ("hypervisors avx", False), ("", False)])
def test_the_processor_is_described_by_its_first_core(flags: str, virtualised: bool, tmp_path: Path) -> None:
    host = capture({}, root=write_tree(tmp_path, {"proc/cpuinfo": CPUINFO.format(flags=flags)}))["host"]
    assert host["cpu_model"] == "AMD EPYC 9654 96-Core Processor"
    assert host["virtualised"] is virtualised


def test_what_an_arm_processor_does_not_tell_is_unknown(tmp_path: Path) -> None:
    cpuinfo = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n"
    host = capture({}, root=write_tree(tmp_path, {"proc/cpuinfo": cpuinfo}))["host"]
    assert host["cpu_model"] is None
    assert host["virtualised"] is None


def test_where_the_kernel_shows_nothing_all_is_unknown(tmp_path: Path) -> None:
    host = capture({}, root=tmp_path)["host"]
    unknown = ("boot_id", "cpu_model", "clock_source", "governor", "virtualised")
    assert {name: host[name] for name in unknown} == dict.fromkeys(unknown)


def test_clock_source_and_governors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "affinity", lambda: frozenset({0, 2, 5}))
    governors = {0: "powersave", 1: "ondemand", 2: "performance"}  # cpu1 is not ours, cpu5 has none
    files = {
        f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor": f"{name}\n" for cpu, name in governors.items()
    }
    clock = {"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet\n"}
    host = capture({}, root=write_tree(tmp_path, {**files, **clock}))["host"]
    assert host["governor"] == "performance,powersave"
    assert host["clock_source"] == "hpet"


def test_the_quota_of_the_same_root_limits_the_cores(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000"}
    assert capture({}, root=write_tree(tmp_path, files))["process"]["cores"] == 1


def test_a_system_without_a_release_file_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> dict[str, str]:
        raise OSError("no os-release")

    assert capture({})["host"]["os"] == platform.freedesktop_os_release()["PRETTY_NAME"]
    monkeypatch.setattr(platform, "freedesktop_os_release", missing)
    assert capture({})["host"]["os"] == platform.system()


def test_the_load_average_is_rounded_and_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.23456, 2.0, 3.0))
    assert load_average() == 1.23
    assert capture({})["load"] == {"one_minute": 1.23}

    def unobtainable() -> tuple[float, float, float]:
        raise OSError("no load average")

    monkeypatch.setattr(os, "getloadavg", unobtainable)
    assert load_average() is None


# --- interface ---


def test_the_interface_is_the_one_that_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_host_resolves(monkeypatch, "10.0.0.1")
    pretend_addresses(monkeypatch, eth0=["10.0.0.1"])
    assert capture({"GLOO_SOCKET_IFNAME": "ib0"})["process"]["interface"] == "ib0"
    assert capture({"GLOO_SOCKET_IFNAME": ""})["process"]["interface"] == "eth0"


def test_else_the_one_that_bears_the_address_of_the_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_host_resolves(monkeypatch, "10.0.0.2", "10.0.0.1")
    pretend_addresses(monkeypatch, lo=["127.0.0.1"], eth0=["10.0.0.1"], eth1=["00:11", "10.0.0.2"])
    captured = capture({})
    assert captured["host"]["address"] == "10.0.0.2"
    assert captured["process"]["interface"] == "eth1"


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("127.0.0.1", "lo"),
        ("127.0.1.1", "lo"),
        ("::1", "lo"),
        ("fe80::1", "eth0"),
        ("10.0.0.9", None),
        ("12.0.0.1", None),
        (None, None),
    ],
)
def test_the_interface_of_an_address(
    address: str | None, interface: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_addresses(monkeypatch, lo=["127.0.0.1", "::1"], eth0=["10.0.0.1", "fe80::1%eth0"])
    assert interface_of(address) == interface


@pytest.mark.parametrize("error", [socket.gaierror(-2, "unknown"), UnicodeError("label too long")])
def test_a_host_name_that_resolves_to_nothing_has_no_interface(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_host_resolves(monkeypatch, error=error)
    assert host_address() is None
    captured = capture({})
    assert captured["host"]["address"] is None
    assert captured["process"]["interface"] is None


def test_every_address_of_this_host_is_found_on_an_interface() -> None:
    listing = psutil.net_if_addrs()
    addresses = {entry.address for entries in listing.values() for entry in entries if entry.family == socket.AF_INET}
    assert addresses
    for address in addresses:
        name = interface_of(address)
        assert name is not None
        assert address in [entry.address for entry in listing[name]]


# --- lists of CPUs ---


@pytest.mark.parametrize(
    ("cpus", "text"),
    [({0}, "0"), ({0, 1, 2, 3, 8}, "0-3,8"), ({4, 2, 5}, "2,4-5"), (range(256), "0-255"), (set(), "")],
)
def test_cpus_are_written_as_linux_does(cpus: set[int], text: str) -> None:
    assert format_cpus(cpus) == text


@settings(deadline=None)
@given(st.frozensets(st.integers(0, 300)))
def test_written_cpus_read_back(cpus: frozenset[int]) -> None:
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
        {"host": {"name": "n1", "os": "Debian"}, "process": {"affinity": "0"}, "variables": {"NCCL_X": "1"}},
        {"host": {"name": "n2", "os": "Debian"}, "process": {"affinity": "1"}, "variables": {"NCCL_X": "1"}},
        {"host": {"name": "n2", "os": "Debian"}, "process": {"affinity": "1"}, "variables": {"NCCL_X": "1"}},
    ]
    common, rests = hoist(ranks)
    assert common == {"host": {"os": "Debian"}, "process": {}, "variables": {"NCCL_X": "1"}}
    assert rests == [
        {"host": {"name": "n1"}, "process": {"affinity": "0"}},
        {"host": {"name": "n2"}, "process": {"affinity": "1"}},
        {"host": {"name": "n2"}, "process": {"affinity": "1"}},
    ]


def test_what_one_rank_lacks_is_not_shared() -> None:
    common, rests = hoist([{"a": 1, "b": 2}, {"a": 1}])
    assert (common, rests) == ({"a": 1}, [{"b": 2}, {}])


def test_unknown_on_one_rank_is_not_missing() -> None:
    common, rests = hoist([{"a": None}, {"a": None}, {}])
    assert (common, rests) == ({}, [{"a": None}, {"a": None}, {}])
    assert hoist([{"a": None}, {"a": None}]) == ({"a": None}, [{}, {}])


def test_a_group_on_one_rank_and_a_value_on_another_stay_apart() -> None:
    ranks: list[dict[str, Any]] = [{"a": {"b": 1}}, {"a": 1}]
    assert hoist(ranks) == ({}, ranks)


def test_one_rank_shares_everything_with_itself() -> None:
    captured = capture({})
    assert hoist([captured]) == (captured, [{}])


def test_no_ranks_share_nothing() -> None:
    assert hoist([]) == ({}, [])


@settings(deadline=None)
@given(st.lists(ENVIRONMENTS, min_size=1, max_size=3))
def test_hoisting_loses_nothing_and_leaves_nothing_shared(ranks: list[dict[str, Any]]) -> None:
    common, rests = hoist(ranks)
    assert [merged(common, rest) for rest in rests] == ranks
    again, _ = hoist(rests)
    assert len(ranks) == 1 or list(shared_leaves(again)) == []


# --- differences ---


def test_the_same_environment_does_not_differ() -> None:
    assert difference(capture({}), capture({})) == {}


def test_leaves_that_differ_are_named_by_their_path() -> None:
    base = {"host": {"kernel": "6.1", "os": "Debian"}, "variables": {"NCCL_ALGO": "Ring", "NCCL_X": "1"}}
    other = {"host": {"kernel": "6.2", "os": "Debian"}, "variables": {"NCCL_PROTO": "LL", "NCCL_X": "1"}}
    found = difference(base, other)
    assert found == {
        "host.kernel": ["6.1", "6.2"],
        "variables.NCCL_ALGO": ["Ring", None],
        "variables.NCCL_PROTO": [None, "LL"],
    }
    assert list(found) == sorted(found)


def test_the_load_is_no_difference_but_its_namesakes_are() -> None:
    base = {VOLATILE: {"one_minute": 0.1}, "loads": {"a": 1}, "host": {"load": 1}}
    other = {VOLATILE: {"one_minute": 0.9}, "loads": {"a": 2}, "host": {"load": 2}}
    assert difference(base, other) == {"host.load": [1, 2], "loads.a": [1, 2]}


def test_unknown_and_absent_are_the_same_to_a_reader() -> None:
    assert difference({"a": {"b": None}}, {"a": {}}) == {}
    assert difference({"a": {"b": None}}, {"a": {"b": 0}}) == {"a.b": [None, 0]}


def test_a_group_that_became_a_value_differs() -> None:
    assert difference({"a": {"b": 1}}, {"a": 2}) == {"a": [None, 2], "a.b": [1, None]}


@settings(deadline=None)
@given(ENVIRONMENTS, ENVIRONMENTS)
def test_a_difference_is_mirrored_by_its_reverse(base: dict[str, Any], other: dict[str, Any]) -> None:
    mirrored = {path: [after, before] for path, (before, after) in difference(base, other).items()}
    assert difference(other, base) == mirrored
    assert difference(base, base) == {}


def test_a_capture_holds_no_number_that_json_cannot() -> None:
    numbers = [value for value in shared_leaves(capture(os.environ)) if isinstance(value, float)]
    assert numbers
    assert all(math.isfinite(number) for number in numbers)
