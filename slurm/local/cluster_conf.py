"""What a cluster on one machine is, in plain data, and what SLURM is told of it; pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.text import UserError, counted

CONTROLLER = "ctl"
CONTROLLER_PORT = 6817
PARTITION = "lab"
_NETWORK = "10.77.0"
_CONTROLLER_ADDRESS = f"{_NETWORK}.254"
_LEAF_NODES = 4
"""From so many nodes on, two leaf switches share them."""
_RATE = re.compile(r"(\d{1,9})(kbit|mbit|gbit)", re.ASCII)
_RATE_FACTORS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_LEAST_BITS_PER_SECOND, _MOST_BITS_PER_SECOND = 10**5, 10**11
_DELAY = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)(us|ms)", re.ASCII)
_DELAY_FACTORS = {"us": 1e-6, "ms": 1e-3}
_MOST_DELAY_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster on one machine.

    ``link`` and ``delay`` are as written, "" if links are left alone; ``slow`` has the nodes whose links are slower.
    """

    nodes: int
    cpus: int = 2
    link: str = ""
    delay: str = ""
    slow: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes' host names, n1 and on."""
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    @property
    def delay_seconds(self) -> float:
        """The one-way latency between two nodes, beyond the machine's own."""
        return parse_delay(self.delay) if self.delay else 0.0

    def rate(self, name: str) -> str:
        """Return the rate of a node's link, "" for one that is left alone."""
        return dict(self.slow).get(name, self.link)


def cluster_spec(
    *, nodes: int, cpus: int, link: str | None = None, delay: str | None = None, slow: Sequence[str] = ()
) -> ClusterSpec:
    """Return the cluster that a command line asks for; ``UserError`` names what cannot be."""
    spec = ClusterSpec(
        nodes=nodes,
        cpus=cpus,
        link=checked_rate(link, "--link") if link is not None else "",
        delay=delay or "",
        slow=tuple(_slow_node(text, nodes) for text in slow),
    )
    if delay is not None:
        parse_delay(delay)
    twice = {name for name, _ in spec.slow if [other for other, _ in spec.slow].count(name) > 1}
    if twice:
        raise UserError(f"--slow names {', '.join(sorted(twice))} more than once; a node has one link")
    return spec


def checked_rate(text: str, option: str) -> str:
    """Return a rate as it is written; ``UserError`` if it is none that a link can have."""
    match = _RATE.fullmatch(text)
    bits_per_second = int(match[1]) * _RATE_FACTORS[match[2]] if match else 0
    if not _LEAST_BITS_PER_SECOND <= bits_per_second <= _MOST_BITS_PER_SECOND:
        raise UserError(
            f"{option} {text!r} is no rate: write a whole number with kbit, mbit or gbit, from 100kbit to 100gbit, "
            "such as 200mbit"
        )
    return text


def parse_delay(text: str) -> float:
    """Return the seconds of a delay such as 500us; ``UserError`` if it is none."""
    match = _DELAY.fullmatch(text)
    seconds = float(match[1]) * _DELAY_FACTORS[match[2]] if match else 0.0
    if not 0 < seconds <= _MOST_DELAY_SECONDS:
        raise UserError(
            f"--delay {text!r} is no delay: write a number above 0 with us or ms, up to 1000ms, such as 500us"
        )
    return seconds


def _slow_node(text: str, nodes: int) -> tuple[str, str]:
    name, colon, rate = text.partition(":")
    if not colon:
        raise UserError(f"--slow {text!r} is not understood: write NODE:RATE, such as n3:50mbit")
    names = ClusterSpec(nodes=nodes).names
    if name not in names:
        raise UserError(f"--slow {text!r}: {name!r} is none of the nodes {names[0]} to {names[-1]}")
    return name, checked_rate(rate, "--slow")


def address(name: str) -> str:
    """Return the IP address of a node, or of the controller."""
    return _CONTROLLER_ADDRESS if name == CONTROLLER else f"{_NETWORK}.{name.removeprefix('n')}"


def emulated(spec: ClusterSpec, cores: int) -> str:
    """Return, in words, what stands in for a cluster: it marks every record that is measured there."""
    words = [f"{counted(spec.nodes, 'node')} on one machine of {counted(cores, 'core')}"]
    if spec.link:
        words.append(f"links of {spec.link}")
    words += [f"{name} of {rate}" for name, rate in spec.slow]
    if spec.delay:
        words.append(f"delay {spec.delay}")
    return ", ".join(words)


def hosts(spec: ClusterSpec) -> str:
    """Return ``/etc/hosts``: every name has its own address, as gloo needs."""
    lines = ["127.0.0.1 localhost", *(f"{address(name)} {name}" for name in (CONTROLLER, *spec.names))]
    return "\n".join(lines) + "\n"


def topology_conf(spec: ClusterSpec) -> str:
    """Return ``topology.conf``: one switch, or two leaves under a spine from four nodes on."""
    if spec.nodes < _LEAF_NODES:
        return f"SwitchName=leaf1 Nodes={_range(1, spec.nodes)}\n"
    half = spec.nodes // 2
    return (
        f"SwitchName=leaf1 Nodes={_range(1, half)}\n"
        f"SwitchName=leaf2 Nodes={_range(half + 1, spec.nodes)}\n"
        "SwitchName=spine Switches=leaf[1-2]\n"
    )


def _range(first: int, last: int) -> str:
    return f"n{first}" if first == last else f"n[{first}-{last}]"


def slurm_conf(spec: ClusterSpec, folder: Path, user: str) -> str:
    """Return ``slurm.conf`` for daemons of ``user`` that keep all they write in ``folder``."""
    settings = {
        "ClusterName": "parbench",
        "SlurmctldHost": f"{CONTROLLER}({address(CONTROLLER)})",
        "SlurmctldPort": str(CONTROLLER_PORT),
        "SlurmUser": user,
        "SlurmdUser": user,
        "AuthInfo": f"socket={folder}/run/munge.sock",
        "MailProg": "/bin/true",
        **_places(folder),
        **_plugins(),
        **_manners(),
    }
    nodes = [
        f"NodeName={name} NodeAddr={address(name)} CPUs={spec.cpus} SocketsPerBoard=1 CoresPerSocket={spec.cpus} "
        "ThreadsPerCore=1 RealMemory=2000"
        for name in spec.names
    ]
    partition = f"PartitionName={PARTITION} Nodes=ALL Default=YES MaxTime=60 State=UP"
    return "\n".join([*(f"{name}={value}" for name, value in settings.items()), *nodes, partition]) + "\n"


def _places(folder: Path) -> dict[str, str]:
    return {
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool/%n",
        "TmpFS": f"{folder}/tmp",
        "SlurmctldPidFile": f"{folder}/run/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/run/slurmd.%n.pid",
        "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
        "SlurmdLogFile": f"{folder}/log/slurmd.%n.log",
        "JobCompLoc": f"{folder}/log/jobcomp.log",
    }


def _plugins() -> dict[str, str]:
    return {
        "ProctrackType": "proctrack/linuxproc",  # cgroups would need systemd, or more rights than a user has
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MpiDefault": "none",
        "JobCompType": "jobcomp/filetxt",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SlurmdParameters": "config_overrides",  # a node has the CPUs it claims, not the machine's
        "TopologyPlugin": "topology/tree",
    }


def _manners() -> dict[str, str]:
    return {
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=2,bf_interval=2",
        "ReturnToService": "2",
        "JobRequeue": "1",
        "MaxArraySize": "10001",
        "KillWait": "2",
        "SlurmdTimeout": "15",
        "SlurmctldTimeout": "15",
        "PropagateResourceLimits": "NONE",
    }
