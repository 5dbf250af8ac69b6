"""The cores of a host in groups, one for each rank: those of a NUMA node, and of a physical core, side by side."""

from pathlib import Path

from bench.machine.environment import parse_cpus
from bench.machine.machine import affinity, contents, whole_number


def core_groups(count: int, root: Path = Path("/")) -> tuple[tuple[int, ...], ...]:
    """Return the CPUs that this process may use in so many groups of as equal a size as can be, at most one each."""
    system = root / "sys/devices/system"
    near = dict[int, int]()
    for folder in (system / "node").glob("node[0-9]*"):
        number = int(folder.name.removeprefix("node"))
        near |= dict.fromkeys(parse_cpus(contents(folder / "cpulist") or ""), number)

    def place(cpu: int) -> tuple[int, ...]:
        told = [contents(system / f"cpu/cpu{cpu}/topology/{name}") for name in ("physical_package_id", "core_id")]
        return near.get(cpu, 0), *(whole_number(word) or 0 for word in told), cpu

    cpus = sorted(affinity(), key=place)
    count = min(count, len(cpus))
    return tuple(tuple(sorted(cpus[len(cpus) * i // count : len(cpus) * (i + 1) // count])) for i in range(count))
