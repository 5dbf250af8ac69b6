"""What a cluster on one machine is, in plain data, and what SLURM is told of it; pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parbench.bench.text import UserError, counted

CONTROLLER = "ctl"
CONTROLLER_PORT = 6817
_RATE_FACTORS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster on one machine, its nodes n1 and on.

    ``link`` and ``delay`` (one-way, beyond the machine's own) are as written, "" if links are left alone; ``slow`` has
    the nodes whose links are slower.
    """

    nodes: int
    cpus: int = 2
    link: str = ""
    delay: str = ""
    slow: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    @property
    def delay_seconds(self) -> float:
        return parse_delay(self.delay) if self.delay else 0.0

    def rate(self, name: str) -> str:
        return dict(self.slow).get(name, self.link)


def cluster_spec(
    *, nodes: int, cpus: int, link: str | None = None, delay: str | None = None, slow: Sequence[str] = ()
) -> ClusterSpec:
    """Return the cluster that a command line asks for; ``UserError`` names what cannot be."""
    if link is not None:
        checked_rate(link, "--link")
    if delay is not None:
        parse_delay(delay)
    spec = ClusterSpec(nodes=nodes, cpus=cpus, link=link or "", delay=delay or "")
    rates: dict[str, str] = {}
    for text in slow:
        name, colon, rate = text.partition(":")
        if not colon:
            raise UserError(f"--slow {text!r} is not understood: write NODE:RATE, such as n3:50mbit")
        if name not in spec.names:
            raise UserError(f"--slow {text!r}: {name!r} is none of the nodes {spec.names[0]} to {spec.names[-1]}")
        if name in rates:
            raise UserError(f"--slow names {name} more than once; a node has one link")
        rates[name] = checked_rate(rate, "--slow")
    return replace(spec, slow=tuple(rates.items()))


def checked_rate(text: str, option: str) -> str:
    """Return a rate as it is written; ``UserError`` if it is none that a link can have."""
    match = re.fullmatch(r"(\d{1,9})(kbit|mbit|gbit)", text, re.ASCII)
    if not 10**5 <= (int(match[1]) * _RATE_FACTORS[match[2]] if match else 0) <= 10**11:
        raise UserError(
            f"{option} {text!r} is no rate: write a whole number with kbit, mbit or gbit, from 100kbit to 100gbit, "
            "such as 200mbit"
        )
    return text


def parse_delay(text: str) -> float:
    """Return the seconds of a delay such as 500us; ``UserError`` if it is none."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)(us|ms)", text, re.ASCII)
    seconds = float(match[1]) * {"us": 1e-6, "ms": 1e-3}[match[2]] if match else 0.0
    if not 0 < seconds <= 1:
        raise UserError(
            f"--delay {text!r} is no delay: write a number above 0 with us or ms, up to 1000ms, such as 500us"
        )
    return seconds


def address(name: str) -> str:
    return f"10.77.0.{254 if name == CONTROLLER else name.removeprefix('n')}"


def emulated(spec: ClusterSpec, cores: int) -> str:
    """Return, in words, what stands in for a cluster: it marks every record that is measured there."""
    words = [f"{counted(spec.nodes, 'node')} on one machine of {counted(cores, 'core')}"]
    words += [f"links of {spec.link}"] if spec.link else []
    words += [f"{name} of {rate}" for name, rate in spec.slow]
    words += [f"delay {spec.delay}"] if spec.delay else []
    return ", ".join(words)


def config_files(spec: ClusterSpec, folder: Path, user: str) -> dict[str, str]:
    """Return what SLURM's daemons of ``user``, that keep all they write in ``folder``, read there, and ``hosts``."""
    half = spec.nodes // 2
    leaves = [(1, half), (half + 1, spec.nodes)] if spec.nodes >= 4 else [(1, spec.nodes)]
    names = ["n1" if last == 1 else f"n[{first}-{last}]" for first, last in leaves]
    topology = [f"SwitchName=leaf{number} Nodes={nodes}" for number, nodes in enumerate(names, 1)]
    topology += ["SwitchName=spine Switches=leaf[1-2]"] if len(leaves) > 1 else []
    settings = {
        "ClusterName": "parbench",
        "SlurmctldHost": f"{CONTROLLER}({address(CONTROLLER)})",
        "SlurmctldPort": CONTROLLER_PORT,
        "SlurmUser": user,
        "SlurmdUser": user,
        "AuthInfo": f"socket={folder}/run/munge.sock",
        "MailProg": "/bin/true",
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool/%n",
        "TmpFS": f"{folder}/tmp",
        "SlurmctldPidFile": f"{folder}/run/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/run/slurmd.%n.pid",
        "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
        "SlurmdLogFile": f"{folder}/log/slurmd.%n.log",
        "JobCompLoc": f"{folder}/log/jobcomp.log",
        "JobCompType": "jobcomp/filetxt",
        "ProctrackType": "proctrack/linuxproc",  # cgroups would need systemd, or more rights than a user has
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SlurmdParameters": "config_overrides",  # a node has the CPUs it claims, not the machine's
        "TopologyPlugin": "topology/tree",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=2,bf_interval=2",
        "ReturnToService": 2,
        "JobRequeue": 1,
        "MaxArraySize": 10001,
        "KillWait": 2,
        "SlurmdTimeout": 15,
        "SlurmctldTimeout": 15,
        "PropagateResourceLimits": "NONE",
    }
    cpus = f"CPUs={spec.cpus} SocketsPerBoard=1 CoresPerSocket={spec.cpus} ThreadsPerCore=1 RealMemory=2000"
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines += [f"NodeName={name} NodeAddr={address(name)} {cpus}" for name in spec.names]
    addresses = [f"{address(name)} {name}" for name in (CONTROLLER, *spec.names)]  # each has its own, as gloo needs
    files = {
        "slurm.conf": [*lines, "PartitionName=lab Nodes=ALL Default=YES MaxTime=60 State=UP"],
        "topology.conf": topology,
        "cgroup.conf": ["CgroupPlugin=cgroup/v1"],  # none is used; looking for one may fail
        "hosts": ["127.0.0.1 localhost", *addresses],
    }
    return {name: "\n".join(words) + "\n" for name, words in files.items()}
