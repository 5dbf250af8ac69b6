"""The description of a cluster on one machine, and the configuration files of its Slurm."""

from dataclasses import dataclass
from pathlib import Path

from parbench.bench.text import pluralize

CONTROLLER = "ctl"
CONTROLLER_PORT = 6817


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster on one machine. Its nodes are n1, n2, and so on.

    Attributes:
        link: the rate of every link as ``tc`` reads it; empty for no limit.
        slow: pairs of a node and the rate of its slower link.
    """

    nodes: int
    link: str = ""
    slow: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    def rate(self, name: str) -> str:
        """Return the rate of a node's link."""
        return dict(self.slow).get(name, self.link)


def address(name: str) -> str:
    """Return the address of a node or of the controller."""
    return f"10.77.0.{254 if name == CONTROLLER else name.removeprefix('n')}"


def describe_emulation(spec: ClusterSpec, cores: int) -> str:
    """Describe the emulated cluster; every record that is measured in it contains this text."""
    parts = [f"{pluralize(spec.nodes, 'node')} on one machine of {pluralize(cores, 'core')}"]
    if spec.link:
        parts.append(f"links of {spec.link}")
    parts += [f"{name} of {rate}" for name, rate in spec.slow]
    return ", ".join(parts)


def config_files(spec: ClusterSpec, folder: Path, user: str) -> dict[str, str]:
    """Return the configuration files by name; daemons run as ``user`` and write into ``folder``."""
    addresses = [f"{address(name)} {name}" for name in (CONTROLLER, *spec.names)]
    files = {
        "slurm.conf": _slurm_lines(spec, folder, user),
        "topology.conf": _topology_lines(spec.nodes),
        # No cgroup is used, but the search for a plugin may fail.
        "cgroup.conf": ["CgroupPlugin=cgroup/v1"],
        "hosts": ["127.0.0.1 localhost", *addresses],
    }
    return {name: "\n".join(lines) + "\n" for name, lines in files.items()}


def _slurm_lines(spec: ClusterSpec, folder: Path, user: str) -> list[str]:
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
        # Cgroups need systemd, or more rights than a user has.
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        # A node has the CPUs that it reports, not those of the machine.
        "SlurmdParameters": "config_overrides",
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
    cpus = "CPUs=2 SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1"
    return [
        *(f"{name}={value}" for name, value in settings.items()),
        *(f"NodeName={n} NodeAddr={address(n)} {cpus} RealMemory=2000" for n in spec.names),
        "PartitionName=lab Nodes=ALL Default=YES MaxTime=60 State=UP",
    ]


def _topology_lines(num_nodes: int) -> list[str]:
    """Return one switch, or from four nodes on two leaf switches below a spine."""
    if num_nodes < 4:
        return [f"SwitchName=leaf1 Nodes=n[1-{num_nodes}]"]
    half = num_nodes // 2
    return [
        f"SwitchName=leaf1 Nodes=n[1-{half}]",
        f"SwitchName=leaf2 Nodes=n[{half + 1}-{num_nodes}]",
        "SwitchName=spine Switches=leaf[1-2]",
    ]
