"""An ``nvidia-smi`` that answers as that of a machine with these GPUs, in the driver's own words."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.trees import write_tool


def _properties(text: str) -> dict[str, str]:
    pairs = (
        pair.partition(": ") for line in text.strip().splitlines() for pair in line.split("; ")
    )
    return {name.strip(): value for name, _, value in pairs}


# one idle GPU of a DGX H100
H100 = _properties("""
    name: NVIDIA H100 80GB HBM3; driver_version: 580.95.05; compute_cap: 9.0; memory.total: 81559; memory.used: 0
    persistence_mode: Enabled; mig.mode.current: Disabled; ecc.mode.current: Enabled; utilization.gpu: 0
    enforced.power.limit: 700.00; power.default_limit: 700.00; temperature.gpu: 28
    clocks.max.sm: 1980; clocks.max.memory: 2619; clocks.current.sm: 345; clocks.current.memory: 2619
    clocks.applications.graphics: 1980; clocks.applications.memory: 2619
    clocks_event_reasons.active: 0x0000000000000001
    pcie.link.gen.max: 5; pcie.link.gen.current: 5; pcie.link.width.max: 16; pcie.link.width.current: 16
    ecc.errors.corrected.volatile.total: 0; ecc.errors.uncorrected.volatile.total: 0
    remapped_rows.uncorrectable: 0; remapped_rows.pending: No; remapped_rows.failure: No
""")
# one of a box without NVLink, whose GPUs have no MIG
L40S = H100 | _properties("""
    name: NVIDIA L40S; compute_cap: 8.9; memory.total: 46068; mig.mode.current: [N/A]; persistence_mode: Disabled
    enforced.power.limit: 350.00; power.default_limit: 350.00
    clocks.max.sm: 2520; clocks.max.memory: 9001; clocks.current.sm: 210; clocks.current.memory: 405
    clocks.applications.graphics: [N/A]; clocks.applications.memory: [Requested functionality has been deprecated]
    pcie.link.gen.max: 4; pcie.link.gen.current: 1
""")
# a driver that knows no compute_cap and calls event reasons throttle reasons
A100 = {
    name: value
    for name, value in H100.items()
    if name not in ("clocks_event_reasons.active", "compute_cap")
}
A100 |= _properties("""
    name: NVIDIA A100-SXM4-40GB; driver_version: 470.256.02; memory.total: 40960; temperature.gpu: 41
    enforced.power.limit: 400.00; power.default_limit: 400.00
    clocks.max.sm: 1410; clocks.max.memory: 1215; clocks.current.sm: 1095; clocks.current.memory: 1215
    clocks.applications.graphics: 1095; clocks.applications.memory: 1215
    clocks_throttle_reasons.active: 0x0000000000000000; pcie.link.gen.max: 4; pcie.link.gen.current: 4
""")
UNKNOWN_WORDS = ("[N/A]", "[Not Supported]", "[Unknown Error]", "[GPU requires reset]", "N/A", "")

_ANSWER = """\
import json, sys
told = json.loads(open({path!r}).read())
words = sys.argv[1:]
gpus = told["gpus"]
if "-i" in words:
    which = words.pop()
    words.remove("-i")
    gpus = [gpu for gpu in gpus if gpu["uuid"] == which]
    if not gpus:
        sys.exit("No devices were found")
kind, _, names = words[0].removeprefix("--query-").partition("=")
if kind in ("gpu", "remapped-rows", "compute-apps"):
    assert words[1:] == ["--format=csv,noheader,nounits"], words
    rows = told["processes"] if kind == "compute-apps" else gpus
    names = names.split(",")
    for name in names:
        if any(name not in row for row in gpus) and kind != "compute-apps":
            print(f'Field "{{name}}" is not a valid field to query.\\n')
            sys.exit(2)
    for row in rows:
        print(", ".join(row[name] for name in names))
elif words == ["nvlink", "--status"]:
    print(told["nvlink"])
elif words == ["topo", "-m"]:
    print(told["topology"])
else:
    sys.exit(f"Invalid combination of input arguments: {{words}}")
"""


def gpus(kind: Mapping[str, str], count: int, **of_one: Mapping[str, str]) -> list[dict[str, str]]:
    """Return so many GPUs of a kind; ``gpu3`` and the like hold what is different of one."""
    uuids = [f"GPU-{index:08d}-0000-0000-0000-000000000000" for index in range(count)]
    own = [
        {"index": str(index), "uuid": uuid, "gpu_uuid": uuid} for index, uuid in enumerate(uuids)
    ]
    return [{**kind, **one, **of_one.get(f"gpu{index}", {})} for index, one in enumerate(own)]


def install(
    folder: Path,
    listed: Sequence[Mapping[str, str]],
    *,
    processes: Sequence[tuple[int, int, str]] = (),
    links: Callable[[int], Sequence[str]] | None = None,
    topology: str = "",
) -> dict[str, str]:
    """Write the tool for these GPUs, and return an environment in which no other is found.

    A process is the GPU's index, its number and its name; ``links`` gives what is told of each link of a GPU.
    """
    running = [
        {"gpu_uuid": listed[index]["uuid"], "pid": str(pid), "process_name": name}
        for index, pid, name in processes
    ]
    told: dict[str, Any] = {"gpus": listed, "processes": running, "topology": topology}
    told["nvlink"] = (
        "" if links is None else "\n".join(_status(gpu, links(i)) for i, gpu in enumerate(listed))
    )
    path = folder / "gpus.json"
    path.write_text(json.dumps(told), encoding="utf-8")
    script = folder / "answer.py"
    script.write_text(_ANSWER.format(path=str(path)), encoding="utf-8")
    write_tool(folder, "nvidia-smi", f'exec {sys.executable} -IS {script} "$@"')
    return {"PATH": str(folder)}


def _status(gpu: Mapping[str, str], links: Sequence[str]) -> str:
    none = ["NVML: Unable to retrieve NVLink information as all links are inActive"]
    lines = [f"\t Link {number}: {word}" for number, word in enumerate(links)] or none
    return "\n".join([f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})", *lines])


def topology(
    link: Callable[[int, int], str],
    cpus: Sequence[str],
    *,
    nics: Sequence[str] = (),
    has_numa_id: bool = True,
) -> str:
    """Return the matrix of GPUs by ``nvidia-smi topo -m``: half of them near each of the sockets' CPUs."""
    count = 8
    columns = [*(f"GPU{index}" for index in range(count)), *nics, "CPU Affinity", "NUMA Affinity"]
    lines = ["\t\x1b[4m" + "\t".join([*columns, *["GPU NUMA ID"] * has_numa_id]) + "\x1b[0m"]
    for one in range(count):
        near = 2 * one // count
        words = [" X " if one == other else link(one, other) for other in range(count)]
        words += ["PIX" if nic == one % max(len(nics), 1) else "SYS" for nic in range(len(nics))]
        lines.append(
            "\t".join([f"GPU{one}", *words, cpus[near], str(near), *["", "N/A"] * has_numa_id])
        )
    for number, name in enumerate(nics):
        words = ["PIX" if one % len(nics) == number else "SYS" for one in range(count)]
        lines.append(
            "\t".join([name, *words, *(" X " if name == other else "SYS" for other in nics)])
        )
    lines += [
        "",
        "Legend:",
        "",
        "  X    = Self",
        "  NV#  = Connection traversing a bonded set of # NVLinks",
        "",
    ]
    return "\n".join(
        [*lines, "NIC Legend:", "", *(f"  {name}: mlx5_{n}" for n, name in enumerate(nics))]
    )
