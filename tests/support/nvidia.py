"""A fake ``nvidia-smi`` that answers as the tool of a machine with given GPUs."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.support.trees import write_tool, write_tree

NUM_GPUS_IN_TOPOLOGY = 8
# An idle GPU of a DGX H100.
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "driver_version": "580.95.05",
    "compute_cap": "9.0",
    "memory.total": "81559",
    "memory.used": "0",
    "persistence_mode": "Enabled",
    "mig.mode.current": "Disabled",
    "ecc.mode.current": "Enabled",
    "utilization.gpu": "0",
    "enforced.power.limit": "700.00",
    "power.default_limit": "700.00",
    "temperature.gpu": "28",
    "clocks.max.sm": "1980",
    "clocks.max.memory": "2619",
    "clocks.current.sm": "345",
    "clocks.current.memory": "2619",
    "clocks.applications.graphics": "1980",
    "clocks.applications.memory": "2619",
    "clocks_event_reasons.active": "0x0000000000000001",
    "pcie.link.gen.max": "5",
    "pcie.link.gen.current": "5",
    "pcie.link.width.max": "16",
    "pcie.link.width.current": "16",
    "ecc.errors.corrected.volatile.total": "0",
    "ecc.errors.uncorrected.volatile.total": "0",
    "remapped_rows.uncorrectable": "0",
    "remapped_rows.pending": "No",
    "remapped_rows.failure": "No",
}
# A GPU without NVLink and MIG.
L40S = {
    **H100,
    "name": "NVIDIA L40S",
    "persistence_mode": "Disabled",
    "compute_cap": "8.9",
    "memory.total": "46068",
    "mig.mode.current": "[N/A]",
    "clocks.applications.graphics": "[N/A]",
    "clocks.applications.memory": "[Requested functionality has been deprecated]",
    "pcie.link.gen.max": "4",
    "pcie.link.gen.current": "1",
}
# A GPU with a driver that has no compute_cap, and calls event reasons throttle reasons.
A100 = {
    **H100,
    "name": "NVIDIA A100-SXM4-40GB",
    "driver_version": "470.256.02",
    "memory.total": "40960",
    "clocks_throttle_reasons.active": "0x0000000000000000",
    "pcie.link.gen.max": "4",
    "pcie.link.gen.current": "4",
}
del A100["clocks_event_reasons.active"], A100["compute_cap"]

# What ``nvidia-smi`` prints where it fails, and its exit code.
LOST_GPU = (
    "Unable to determine the device handle for GPU0000:19:00.0: Unknown Error",
    15,
)
NO_DEVICES = ("No devices were found", 6)
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure "
    "that the latest NVIDIA driver is installed and running.\n",
    9,
)
VERSION_MISMATCH = (
    "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95",
    18,
)
# The names of the counters of ``nvidia-smi nvlink --errorcounters``.
HOPPER_COUNTERS = ("Replay Errors", "Recovery Errors", "CRC Errors")
# Driver 595 on a B300. Bin 0 of FEC counts codewords without errors. The last two are rates.
BLACKWELL_COUNTERS = (
    "Malformed packet Errors",
    "Buffer overrun Errors",
    "Rx Errors",
    "Rx remote Errors",
    "Rx General Errors",
    "Local link integrity Errors",
    "Tx discards",
    "Link recovery successful events",
    "Link recovery failed events",
    "Total link recovery events",
    "Effective Errors",
    "Effective BER",
    "Symbol Errors",
    "Symbol BER",
    *(f"FEC Errors - {number}" for number in range(16)),
    *(f"Raw Errors Lane {number}" for number in range(2)),
)
_HEADER = """\
Thu Nov 26 10:00:00 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI {driver:<21}  {kernel} Version: {driver:<14} {name} Version: {cuda:<9} |
|-----------------------------------------+------------------------+----------------------+
"""

_SCRIPT = """\
import json, os, sys
answers = json.loads(open({path!r}).read())
args = sys.argv[1:]
gpus = answers["gpus"]
failure, code = answers["failure"]
if failure:
    print(failure, file=sys.stderr, flush=True)
    if not gpus or not args or not args[0].startswith("--query-gpu"):
        sys.exit(code)
if not args:
    print(answers["header"])
    sys.exit()
if "-i" in args:
    uuid = args.pop()
    args.remove("-i")
    gpus = [gpu for gpu in gpus if gpu["uuid"] == uuid]
    if not gpus:
        sys.exit("No devices were found")
kind, _, names = args[0].removeprefix("--query-").partition("=")
if kind in ("gpu", "remapped-rows", "compute-apps"):
    assert args[1:] == ["--format=csv,noheader,nounits"], args
    rows = answers["processes"] if kind == "compute-apps" else gpus
    names = names.split(",")
    for name in names:
        if any(name not in row for row in gpus) and kind != "compute-apps":
            print(f'Field "{{name}}" is not a valid field to query.\\n')
            sys.exit(2)
    for row in rows:
        print(", ".join(row[name] for name in names))
    sys.exit(code)
elif args == ["nvlink", "--errorcounters"]:
    counters = answers["counters"]
    asked_before = os.path.exists({path!r} + ".asked")
    open({path!r} + ".asked", "w").close()
    print(counters[-1 if asked_before else 0])
elif args == ["nvlink", "--status"]:
    print(answers["nvlink"])
elif args == ["topo", "-m"]:
    print(answers["topology"])
else:
    sys.exit(f"Invalid combination of input arguments: {{args}}")
"""


def format_bus_id(index: int) -> str:
    """Return the PCI address of a GPU of this index, as ``nvidia-smi`` writes it."""
    return f"00000000:{0x19 + 0x11 * index:02X}:00.0"


def format_address(index: int) -> str:
    """Return the same, as the kernel writes it."""
    return f"0000:{0x19 + 0x11 * index:02x}:00.0"


def gpus(
    kind: Mapping[str, str], count: int, **changes: Mapping[str, str]
) -> list[dict[str, str]]:
    """Return GPUs of a kind; ``gpu3`` and the like are changes of a single GPU."""
    listed = []
    for index in range(count):
        uuid = f"GPU-{index:08d}-0000-0000-0000-000000000000"
        names = {"index": str(index), "uuid": uuid, "gpu_uuid": uuid}
        names["pci.bus_id"] = format_bus_id(index)
        listed.append({**kind, **names, **changes.get(f"gpu{index}", {})})
    return listed


def install(
    folder: Path,
    listed: Sequence[Mapping[str, str]],
    *,
    processes: Sequence[tuple[int, int, str]] = (),
    links: Callable[[int], Sequence[str]] | None = None,
    topology: str = "",
    cuda: str = "13.0",
    counters: Sequence[str] = ("",),
    failure: tuple[str, int] = ("", 0),
) -> dict[str, str]:
    """Write the tool for these GPUs, and return an environment that contains no other tool.

    A process has the GPU's index, a process id and a name. ``links`` returns the state of each
    link of a GPU. ``cuda`` is the version that the driver supports. ``counters`` is what the tool
    prints of NVLink's errors, at first and later. It fails with the text and exit code of
    ``failure``, and then lists the GPUs that there are.
    """
    running = []
    for index, pid, name in processes:
        uuid = listed[index]["uuid"]
        running.append({"gpu_uuid": uuid, "pid": str(pid), "process_name": name})
    states = []
    if links is not None:
        states = [_format_links(gpu, links(index)) for index, gpu in enumerate(listed)]
    driver = listed[0]["driver_version"] if listed else "580.95.05"
    answers = {
        "gpus": listed,
        "processes": running,
        "topology": topology,
        "header": _format_header(driver, cuda),
        "counters": counters,
        "failure": failure,
        "nvlink": "\n".join(states),
    }
    path = folder / "gpus.json"
    path.write_text(json.dumps(answers), encoding="utf-8")
    script = folder / "answer.py"
    script.write_text(_SCRIPT.format(path=str(path)), encoding="utf-8")
    write_tool(folder, "nvidia-smi", f'exec {sys.executable} -IS {script} "$@"')
    return {"PATH": str(folder)}


def _format_header(driver: str, cuda: str) -> str:
    """Return the head of the tool's page, whose words are others since driver 610."""
    number = driver.partition(".")[0]
    is_new = number.isdecimal() and int(number) >= 610
    kernel, name = ("KMD", "CUDA UMD") if is_new else ("Driver", "CUDA")
    return _HEADER.format(driver=driver, kernel=kernel, name=name, cuda=cuda)


def _format_links(gpu: Mapping[str, str], links: Sequence[str]) -> str:
    lines = [f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})"]
    for number, state in enumerate(links):
        lines.append(f"\t Link {number}: {state}")
    if not links:
        lines.append("NVML: Unable to retrieve NVLink information as all links are inActive")
    return "\n".join(lines)


def format_counters(
    listed: Sequence[Mapping[str, str]], names: Sequence[str], counts: Mapping[str, int]
) -> str:
    """Return the errors of two links of each GPU, 0 where ``counts`` has none of this name."""
    lines = []
    for gpu in listed:
        lines.append(f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})")
        for link in range(2):
            for name in names:
                text = "15e-255" if name.endswith("BER") else str(counts.get(name, 0))
                lines.append(f"\t Link {link}: {name}: {text}")
    return "\n".join(lines)


def write_evidence(
    root: Path, count: int, *, nodes: int | None = None, has_driver: bool = True
) -> Path:
    """Write the ``dev``, ``proc`` and ``sys`` of a host with GPUs.

    ``nodes`` of them have a device node, all by default. ``has_driver`` says whether the kernel
    has loaded NVIDIA's driver.
    """
    for index in range(count):
        address = format_address(index)
        device = root / "sys/bus/pci/devices" / address
        files = {"vendor": "0x10de\n", "class": "0x030200\n"}
        write_tree(device, files)
        if has_driver:
            (root / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
            (device / "driver").mkdir()
    for index in range(count if nodes is None else nodes):
        write_tree(root, {f"dev/nvidia{index}": "", "dev/nvidiactl": ""})
    return root


def topology(
    link: Callable[[int, int], str],
    cpus: Sequence[str],
    *,
    nics: Sequence[str] = (),
    has_numa_id: bool = True,
) -> str:
    """Return the matrix of ``nvidia-smi topo -m`` for eight GPUs, half of them at each socket."""
    names = [f"GPU{index}" for index in range(NUM_GPUS_IN_TOPOLOGY)]
    titles = [*names, *nics, "CPU Affinity", "NUMA Affinity"]
    if has_numa_id:
        titles.append("GPU NUMA ID")
    lines = ["\t\x1b[4m" + "\t".join(titles) + "\x1b[0m"]
    for row, name in enumerate(names):
        cells = [" X " if row == column else link(row, column) for column in range(len(names))]
        cells += ["SYS" for _ in nics]
        socket = 2 * row // len(names)
        cells += [cpus[socket], str(socket)]
        if has_numa_id:
            cells += ["", "N/A"]
        lines.append("\t".join([name, *cells]))
    for row, name in enumerate(nics):
        cells = ["PIX" for _ in names]
        cells += [" X " if row == column else "SYS" for column in range(len(nics))]
        lines.append("\t".join([name, *cells]))
    legend = ["", "Legend:", "", "  X    = Self", "  NV#  = Connection of # NVLinks", ""]
    return "\n".join([*lines, *legend])
