"""The hardware, software and settings of a rank as plain data, and where ranks run.

The module compares the data of several ranks or runs. It does not import torch.
"""

import platform
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import msgspec
import psutil

from parbench.bench.machine.gpu import OTHER_NUMA_NODE, SAME_NUMA_NODE, Links
from parbench.bench.machine.machine import (
    count_available_cores,
    find_package_version,
    get_affinity,
    parse_count,
    read_text,
    try_call,
)

EMULATED_VARIABLE = "PARBENCH_EMULATED"
"""The environment variable that describes emulated nodes or links, set by a test cluster."""

_RECORDED_VARIABLES = re.compile(
    r"(TORCH_)?NCCL_.*|TORCH_DISTRIBUTED_USE_TORCHCOMMS|(GLOO|UCX|FI)_.*|PYTORCH_.*ALLOC_CONF"
    r"|CUDA_(VISIBLE_DEVICES|DEVICE_MAX_CONNECTIONS|DEVICE_ORDER|LAUNCH_BLOCKING|MODULE_LOADING)"
    r"|CUBLAS_WORKSPACE_CONFIG|NVIDIA_TF32_OVERRIDE|(OMP|MKL)_NUM_THREADS"
    r"|SLURM_(CLUSTER_NAME|JOB_(ID|NODELIST|NUM_NODES|PARTITION)|NNODES|NTASKS(_PER_NODE)?"
    r"|TASKS_PER_NODE|CPUS_PER_TASK|CPU_BIND|DISTRIBUTION|GPUS_ON_NODE|RESTART_COUNT"
    r"|TOPOLOGY_ADDR(_PATTERN)?)"
)
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS", re.IGNORECASE)
_SECRET_URL = re.compile(r"://\S*(@|[?&;][^=\s]*(token|key|secret|pass)[^=\s]*=)", re.IGNORECASE)
_BOOT_ID = "proc/sys/kernel/random/boot_id"
_SYSTEM = "sys/devices/system"
_MAX_RELATED_RANKS = 64  # The table of all pairs of more ranks is too long to read.


def capture_environment(environ: Mapping[str, str], *, root: Path = Path("/")) -> dict[str, Any]:
    """Return facts about the host, software and settings of this process as nested mappings.

    The keys are ``host``, ``versions`` (of Python and packages), ``variables`` (environment
    variables and those in NCCL's files, without secrets) and ``process``. Under ``host`` are
    ``name``, ``os``, ``kernel``, ``boot_id``, ``cpu_model``, ``memory_bytes`` and ``governor``.
    Under ``process`` are ``cores`` (their number), ``affinity`` (CPU numbers such as ``0-3``) and
    ``interface`` (the network interface of gloo). Unknown values are None.

    ``environ`` holds the environment variables. ``root`` is the folder that contains ``proc`` and
    ``sys``, ``/`` except in tests.
    """
    variables = select_recorded_variables({**read_nccl_files(environ, root), **environ})
    versions = {name: find_package_version(name) for name in ("torch", "numpy", "parbench")}
    cpu_model = re.search(r"model name\s*: (.*)", read_text(root / "proc/cpuinfo") or "")
    release = try_call(platform.freedesktop_os_release) or {}
    return {
        "host": {
            "name": socket.gethostname(),
            "os": release.get("PRETTY_NAME") or platform.system(),
            "kernel": platform.release(),
            "boot_id": read_text(root / _BOOT_ID),
            "cpu_model": cpu_model and cpu_model[1],
            "memory_bytes": psutil.virtual_memory().total,
            "governor": read_governors(root),
        },
        "versions": {"python": platform.python_version(), **versions},
        "variables": variables,
        "process": {
            "cores": count_available_cores(root),
            "affinity": format_cpus(get_affinity()),
            "interface": variables.get("GLOO_SOCKET_IFNAME") or find_interface(find_host_address()),
        },
    }


def read_nccl_files(environ: Mapping[str, str], root: Path) -> dict[str, str]:
    """Return the variables that NCCL reads from its configuration files, as values by name.

    The files are ``NCCL_CONF_FILE`` in ``environ``, by default ``~/.nccl.conf``, and
    ``/etc/nccl.conf``. The first one takes precedence. ``root`` is the folder that contains
    ``etc``, ``/`` except in tests.
    """
    own_file = environ.get("NCCL_CONF_FILE") or f"{environ.get('HOME', '')}/.nccl.conf"
    texts = [read_text(path) or "" for path in (root / "etc/nccl.conf", Path(own_file))]
    return dict(re.findall(r"^(\w+)=(.*)$", "\n".join(texts), re.MULTILINE))


def read_governors(root: Path = Path("/")) -> str | None:
    """Return the distinct cpufreq governors of the CPUs that this process may use.

    They are in alphabetical order and joined by commas, such as ``performance,powersave``. The
    result is None if all are unknown. ``root`` is the folder that contains ``sys``, ``/`` except in
    tests.
    """
    folder = root / _SYSTEM / "cpu"
    governors = {read_text(folder / f"cpu{cpu}/cpufreq/scaling_governor") for cpu in get_affinity()}
    return ",".join(sorted(governor for governor in governors if governor)) or None


def select_recorded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a run stores in its results, as values by name.

    They are variables of NCCL, gloo, CUDA, Slurm and threading, sorted by name. A variable is left
    out if its name or a URL in its value may contain a secret.
    """
    variables = {}
    for name, value in sorted(environ.items()):
        is_secret = _SECRET_NAME.search(name) or _SECRET_URL.search(value)
        if _RECORDED_VARIABLES.fullmatch(name) and not is_secret:
            # JSON cannot hold bytes that are not text.
            variables[name] = value.encode("utf-8", "backslashreplace").decode()
    return variables


def find_host_address() -> str | None:
    """Return the IP address to which this host's name resolves, None if it does not resolve.

    Gloo looks up its own address in the same way.
    """
    try:
        addresses = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        # Linux allows a label of 64 characters in a host name, and DNS does not.
        return None
    return str(addresses[0][4][0])


def find_interface(address: str | None) -> str | None:
    """Return the name of this host's network interface with this IP address, such as ``eth0``.

    None if no interface has the address, or if ``address`` is None.
    """
    # All of 127/8 belongs to the loopback interface, though only 127.0.0.1 is listed.
    listed_address = "127.0.0.1" if address and address.startswith("127.") else address
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == listed_address for entry in entries):
            return name
    return None


def format_cpus(cpus: Iterable[int]) -> str:
    """Return CPU numbers as text in Linux's list format, such as ``0-3,8``."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][-1] + 1:
            ranges[-1].append(cpu)
        else:
            ranges.append([cpu])
    return ",".join(f"{cpus[0]}-{cpus[-1]}" if len(cpus) > 1 else str(cpus[0]) for cpus in ranges)


def parse_cpus(text: str) -> frozenset[int]:
    """Return the CPU numbers in a text in Linux's list format, such as ``0-3,8``."""
    cpus: set[int] = set()
    for part in text.split(","):
        if part:
            first_cpu, _, last_cpu = part.partition("-")
            cpus |= set(range(int(first_cpu), int(last_cpu or first_cpu) + 1))
    return frozenset(cpus)


def flatten(environment: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the innermost values of nested mappings as one dict, keyed by path.

    A path joins the keys of all levels by dots, such as ``host.os``. ``prefix`` is put before each
    path. An empty mapping counts as an innermost value.
    """
    leaves: dict[str, Any] = {}
    for name, value in environment.items():
        if isinstance(value, Mapping) and value:
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def _nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings from ``leaves``, values that are keyed by a path such as ``host.os``.

    This is the inverse of ``flatten``.
    """
    groups: dict[str, Any] = {}
    for path, value in leaves.items():
        *group_names, leaf_name = path.split(".")
        group = groups
        for name in group_names:
            group = group.setdefault(name, {})
        group[leaf_name] = value
    return groups


def split_environments(
    environments: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Split the environments of ranks into values that all ranks share and values of single ranks.

    ``environments`` are nested mappings from ``capture_environment``, in rank order. The first
    element of the result is a nested mapping of the values that are equal on all ranks. The second
    element is a list with a nested mapping for each rank, which holds all other values of the rank.
    """
    flat = [flatten(environment) for environment in environments]
    common = {
        path: value
        for path, value in flat[0].items()
        if all((path, value) in leaves.items() for leaves in flat)
    }
    return _nest(common), [
        _nest({path: leaves[path] for path in leaves if path not in common}) for leaves in flat
    ]


def find_differing_values(
    base: Mapping[str, Any], changed: Mapping[str, Any]
) -> dict[str, list[Any]]:
    """Return the values that differ between the environments of two ranks or runs.

    ``base`` and ``changed`` are nested mappings from ``capture_environment``. The result maps the
    path of a value, such as ``host.os``, to a list of two: the value in ``base`` and the value in
    ``changed``. None stands for a missing value.
    """
    base_leaves = flatten(base)
    changed_leaves = flatten(changed)
    differences = {}
    for path in sorted({*base_leaves, *changed_leaves}):
        pair = [base_leaves.get(path), changed_leaves.get(path)]
        if pair[0] != pair[1]:
            differences[path] = pair
    return differences


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The host, CPUs, NUMA nodes and GPU on which a rank runs."""

    host: str
    """The host name."""
    boot_id: str | None = None
    """The boot id of the host's kernel, None if unknown.

    It distinguishes hosts that have equal names.
    """
    cpus: tuple[int, ...]
    """The numbers of the logical CPUs that the rank may use (CPU affinity), in ascending order."""
    numa_nodes: tuple[int, ...]
    """The numbers of the NUMA nodes of ``cpus``, in ascending order. Empty if they are unknown."""
    gpu: str | None = None
    """The UUID of the rank's GPU, None if the rank runs on the CPU."""
    gpu_numa_node: int | None = None
    """The number of the NUMA node of the GPU, None if it is unknown or there is no GPU."""
    switches: str | None = None
    """Slurm's path of network switches to the node, such as ``spine.leaf1.n1``.

    It is the variable SLURM_TOPOLOGY_ADDR, and None if that is not set.
    """

    @property
    def host_key(self) -> tuple[str, str | None]:
        """The name and boot id of the host, because hosts may have equal names.

        As in NCCL: containers of one host with several names count as several hosts.
        """
        return self.host, self.boot_id


def locate_rank(
    host: str,
    environ: Mapping[str, str],
    gpu: str | None = None,
    gpu_numa_node: int | None = None,
) -> RankPlace:
    """Return the host, CPUs, NUMA nodes and GPU on which this process, a rank, runs.

    ``host`` is the host name. ``gpu`` is the UUID of the rank's GPU, None on a CPU, and
    ``gpu_numa_node`` the number of its NUMA node, None if unknown.
    """
    root = Path("/")
    cpus = get_affinity()
    nodes = [node for node, node_cpus in _read_numa_nodes(root).items() if cpus & node_cpus]
    return RankPlace(
        host=host,
        boot_id=read_text(root / _BOOT_ID),
        cpus=tuple(sorted(cpus)),
        numa_nodes=tuple(sorted(nodes)),
        gpu=gpu,
        gpu_numa_node=gpu_numa_node,
        switches=environ.get("SLURM_TOPOLOGY_ADDR"),
    )


def _read_numa_nodes(root: Path) -> dict[int, frozenset[int]]:
    """Return the numbers of the CPUs of each NUMA node of this host, by the number of the node.

    Empty if the kernel does not list NUMA nodes. ``root`` is the folder that contains ``sys``,
    ``/`` except in tests.
    """
    return {
        int(folder.name.removeprefix("node")): parse_cpus(read_text(folder / "cpulist") or "")
        for folder in (root / _SYSTEM / "node").glob("node[0-9]*")
    }


def group_cores(
    count: int, cpus: Iterable[int], root: Path = Path("/")
) -> tuple[tuple[int, ...], ...]:
    """Divide the CPU numbers ``cpus`` into ``count`` groups, whose sizes differ by at most one.

    If there are fewer CPUs than ``count``, each CPU is a group. CPUs of one NUMA node or one
    physical core are in the same group or in adjacent groups. CPUs in a group are in ascending
    order. ``root`` is the folder that contains ``sys``, ``/`` except in tests.
    """
    node_by_cpu = {cpu: node for node, cpus in _read_numa_nodes(root).items() for cpu in cpus}

    def get_position(cpu: int) -> tuple[int, ...]:
        """Return the sort key of a CPU: the numbers of its NUMA node, physical core and itself."""
        topology = root / _SYSTEM / f"cpu/cpu{cpu}/topology"
        core = parse_count(read_text(topology / "core_id")) or 0
        return node_by_cpu.get(cpu, 0), core, cpu

    ordered_cpus = sorted(cpus, key=get_position)
    count = min(count, len(ordered_cpus))
    bounds = [len(ordered_cpus) * number // count for number in range(count + 1)]
    return tuple(tuple(sorted(ordered_cpus[start:stop])) for start, stop in pairwise(bounds))


def describe_relations(places: Sequence[RankPlace], links: Links) -> dict[str, str | None]:
    """Return the connection of each pair of ranks as text, such as ``same NUMA node``.

    The keys of the result are pairs of ranks such as ``0-1``. The values are those of
    ``describe_relation``, None if a connection is unknown. The result is empty for more than 64
    ranks. ``places`` holds the host, CPUs and GPU of each rank, in rank order. ``links`` holds the
    connection of two GPUs, such as ``NVLink``, by the pair of their UUIDs.
    """
    if len(places) > _MAX_RELATED_RANKS:
        return {}
    return {
        f"{a}-{b}": describe_relation(places[a], places[b], links)
        for a, b in combinations(range(len(places)), 2)
    }


def describe_relation(a: RankPlace, b: RankPlace, links: Links) -> str | None:
    """Return the nearest hardware that two ranks have in common, or the connection of their GPUs.

    ``a`` and ``b`` hold the host, CPUs and GPU of each of the two ranks. ``links`` holds the
    connection of two GPUs by the pair of their UUIDs. The result is:

    - for ranks on CPUs of one host, ``same NUMA node`` or ``other NUMA node``,
    - for ranks on GPUs of one host, ``same GPU`` or the connection in ``links``,
    - for ranks on two hosts, ``same switch`` or ``other node``,
    - None if it is unknown.
    """
    if a.host_key != b.host_key:
        # The last part of a path is the node itself.
        switches = [(place.switches or "").rpartition(".")[0] for place in (a, b)]
        return "same switch" if switches[0] and switches[0] == switches[1] else "other node"
    if a.gpu is not None and b.gpu is not None:
        return "same GPU" if a.gpu == b.gpu else links.get(frozenset((a.gpu, b.gpu)))
    if len(a.numa_nodes) != 1 or len(b.numa_nodes) != 1:
        return None  # A rank may move between NUMA nodes, or the system shows none.
    return SAME_NUMA_NODE if a.numa_nodes == b.numa_nodes else OTHER_NUMA_NODE
