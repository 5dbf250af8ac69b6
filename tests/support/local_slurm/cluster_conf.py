"""The description of a cluster on one machine, and the configuration files of its Slurm."""

from dataclasses import dataclass
from pathlib import Path

from parbench.bench.text import counted

CONTROLLER = "ctl"
CONTROLLER_PORT = 6817


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster on one machine, its nodes n1 and on.

    ``link`` is a rate as ``tc`` reads it and ``delay`` a one-way latency in us or ms; empty leaves links as they are.
    ``slow`` lists the (node, rate) of slower links.
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
        if not self.delay:
            return 0.0
        unit = {"us": 1e-6, "ms": 1e-3}[self.delay[-2:]]
        return float(self.delay[:-2]) * unit

    def rate(self, name: str) -> str:
        return dict(self.slow).get(name, self.link)


def address(name: str) -> str:
    return f"10.77.0.{254 if name == CONTROLLER else name.removeprefix('n')}"


def emulated(spec: ClusterSpec, cores: int) -> str:
    """Describe the machine that stands in for a cluster; the text marks every record that is measured there."""
    words = [f"{counted(spec.nodes, 'node')} on one machine of {counted(cores, 'core')}"]
    words += [f"links of {spec.link}"] if spec.link else []
    words += [f"{name} of {rate}" for name, rate in spec.slow]
    words += [f"delay {spec.delay}"] if spec.delay else []
    return ", ".join(words)


def config_files(spec: ClusterSpec, folder: Path, user: str) -> dict[str, str]:
    """Return configuration files by name; the daemons run as ``user`` and write only into ``folder``."""
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
    addresses = [
        f"{address(name)} {name}" for name in (CONTROLLER, *spec.names)
    ]  # each has its own, as gloo needs
    files = {
        "slurm.conf": [*lines, "PartitionName=lab Nodes=ALL Default=YES MaxTime=60 State=UP"],
        "topology.conf": topology,
        "cgroup.conf": ["CgroupPlugin=cgroup/v1"],  # none is used; looking for one may fail
        "hosts": ["127.0.0.1 localhost", *addresses],
    }
    return {name: "\n".join(words) + "\n" for name, words in files.items()}
