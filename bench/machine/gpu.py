"""What NVIDIA's driver tells of this host's GPUs, by its own ``nvidia-smi``: without CUDA, torch or another package."""

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from parbench.bench.text import UserError

_QUERY_SECONDS = 10
# Without persistence mode the first query initializes each GPU, which takes up to 3 s for each.
_FIRST_QUERY_SECONDS = 60
_ROWS = "remapped-rows"
_FORMERLY = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}  # before driver 535
_LOST = "[GPU is lost]"  # in the row of a GPU that has fallen off the bus
_FLAGS = {"Enabled": True, "Disabled": False, "Yes": True, "No": False, "1": True, "0": False}
IDLE = "idle"
# nvml.h's nvmlClocksEventReason..., from the lowest bit on
_REASONS = (
    *(IDLE, "applications clocks setting", "software power cap", "hardware slowdown", "sync boost"),
    *("software thermal slowdown", "hardware thermal slowdown", "hardware power brake", "display clock setting"),
)
_LINKS = {"PIX": "PCIe", "PXB": "PCIe", "PHB": "PCIe", "NODE": "PCIe", "SYS": "other NUMA node"}

_Properties = Mapping[str, tuple[str, Callable[[str], Any]]]  # the driver's name of a value -> ours, and how it is read
_PROCESS: _Properties = {"gpu_uuid": ("uuid", str), "pid": ("pid", int), "process_name": ("name", str)}
Links = Mapping[frozenset[str], str]  # how two GPUs are joined, by their UUIDs


def _mebibytes(word: str) -> int:
    return int(word) << 20


def _reasons(word: str) -> tuple[str, ...]:
    mask = int(word, 16)
    return tuple(reason for bit, reason in enumerate(_REASONS) if mask >> bit & 1)


def format_pci_address(text: str) -> str:
    """Return ``00000000:3B:00.0`` as the kernel writes it: ``0000:3b:00.0``."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _told(name: str, read: Callable[[str], Any] = int, *, of: str = "gpu", varies: bool = False) -> Any:
    return field(default=None, metadata={"property": name, "read": read, "of": of, "varies": varies})


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as its driver tells; None is unknown.

    Clocks in MHz, a link's rate in GB/s (0 where it is inactive), errors counted since the driver was loaded, rows over
    the GPU's life.
    """

    name: str = _told("name", str)
    index: int | None = _told("index")
    uuid: str | None = _told("uuid", str)
    pci_address: str | None = _told("pci.bus_id", format_pci_address)
    driver: str | None = _told("driver_version", str)
    compute_capability: str | None = _told("compute_cap", str)
    memory_bytes: int | None = _told("memory.total", _mebibytes)
    persistence: bool | None = _told("persistence_mode", _FLAGS.get)
    mig: bool | None = _told("mig.mode.current", _FLAGS.get)
    ecc: bool | None = _told("ecc.mode.current", _FLAGS.get)
    power_limit_watts: float | None = _told("enforced.power.limit", float)
    power_default_watts: float | None = _told("power.default_limit", float)
    sm_clock_max: int | None = _told("clocks.max.sm")
    memory_clock_max: int | None = _told("clocks.max.memory")
    sm_clock_applications: int | None = _told("clocks.applications.graphics")
    memory_clock_applications: int | None = _told("clocks.applications.memory")
    pcie_generation_max: int | None = _told("pcie.link.gen.max")
    pcie_width_max: int | None = _told("pcie.link.width.max")
    nvlinks: tuple[float | None, ...] | None = None
    sm_clock: int | None = _told("clocks.current.sm", varies=True)
    memory_clock: int | None = _told("clocks.current.memory", varies=True)
    slowed_by: tuple[str, ...] | None = _told("clocks_event_reasons.active", _reasons, varies=True)
    utilization_percent: int | None = _told("utilization.gpu", varies=True)
    temperature_celsius: int | None = _told("temperature.gpu", varies=True)
    memory_used_bytes: int | None = _told("memory.used", _mebibytes, varies=True)
    pcie_generation: int | None = _told("pcie.link.gen.current", varies=True)
    pcie_width: int | None = _told("pcie.link.width.current", varies=True)
    errors_corrected: int | None = _told("ecc.errors.corrected.volatile.total", varies=True)
    errors_uncorrected: int | None = _told("ecc.errors.uncorrected.volatile.total", varies=True)
    rows_remapped: int | None = _told("remapped_rows.uncorrectable", of=_ROWS, varies=True)
    remap_pending: bool | None = _told("remapped_rows.pending", _FLAGS.get, of=_ROWS, varies=True)
    remap_failed: bool | None = _told("remapped_rows.failure", _FLAGS.get, of=_ROWS, varies=True)
    processes: tuple[str, ...] | None = field(default=None, metadata={"varies": True})  # but for this one

    def facts(self, *, varying: bool) -> dict[str, Any]:
        """Return the fields that vary while a GPU works, or those that do not, as a run's environment keeps them."""
        kept = (one for one in fields(self) if one.name not in ("name", "index", "pci_address"))
        return {one.name: getattr(self, one.name) for one in kept if one.metadata.get("varies", False) == varying}


@dataclass(frozen=True, kw_only=True)
class SmiReply:
    """What ``nvidia-smi`` printed (stdout and stderr), and how it ended."""

    end: Literal["exited", "absent", "hung", "not started"]
    text: str = ""  # what the system reports where the tool is not started
    exit_code: int | None = None
    seconds: float = 0.0  # the time that it was given

    def describe(self) -> str:
        """Return a clause that says how the tool ended, for a message about GPUs that it does not list."""
        if self.end == "absent":
            return "nvidia-smi is not in the PATH"
        if self.end == "hung":
            return f"nvidia-smi did not end within {self.seconds:g} s"
        if self.end == "not started":
            return f"nvidia-smi cannot be started: {self.text}"
        if not self.text:
            return f"nvidia-smi reports no reason (exit code {self.exit_code})"
        return f"nvidia-smi reported {self.text!r} (exit code {self.exit_code})"


def ask_nvidia_smi(environ: Mapping[str, str], *words: str, seconds: float | None = None) -> SmiReply:
    """Run ``nvidia-smi`` with these arguments, for at most ``seconds``."""
    seconds = _QUERY_SECONDS if seconds is None else seconds
    command = ["nvidia-smi", *words]
    try:
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except FileNotFoundError:
        return SmiReply(end="absent")
    except OSError as error:
        return SmiReply(end="not started", text=error.strerror or str(error))
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        # A process that waits inside a hung driver does not end even when it is killed.
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        if process.stdout is not None:
            process.stdout.close()
        return SmiReply(end="hung", seconds=seconds)
    return SmiReply(end="exited", text=output.decode(errors="replace"), exit_code=process.returncode)


def nvidia_smi(environ: Mapping[str, str], *words: str) -> str | None:
    """Return what ``nvidia-smi`` prints; None where it is absent, fails or does not answer."""
    reply = ask_nvidia_smi(environ, *words)
    return reply.text if reply.exit_code == 0 else None


def driver_cuda_version(environ: Mapping[str, str]) -> str | None:
    """Return the CUDA version of the driver, from the header of ``nvidia-smi``; None where it prints none.

    The tool asks the libcuda that programs load, so NVIDIA's cuda-compat package counts where it is in use.
    """
    reply = ask_nvidia_smi(environ, seconds=_FIRST_QUERY_SECONDS)
    # Since driver 610 it is "CUDA UMD Version": that of the user-mode driver.
    header = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", reply.text)
    return header[1] if header else None


def list_gpus(
    environ: Mapping[str, str], *which: str, seconds: float | None = None
) -> tuple[tuple[Gpu, ...], SmiReply]:
    """Return the host's GPUs that answer, or ``-i`` one of them, and what else the tool printed."""
    rows, reply = _query(environ, "gpu", _properties("gpu"), *which, seconds=seconds)
    return tuple(Gpu(**row) for row in rows or ()), reply


def list_gpus_first(environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], SmiReply]:
    """Return the same of all GPUs, with the time that a driver needs that is not initialized."""
    return list_gpus(environ, seconds=_FIRST_QUERY_SECONDS)


def gpus_of(environ: Mapping[str, str], *which: str) -> tuple[Gpu, ...]:
    """Return the host's GPUs, or ``-i`` one of them."""
    return list_gpus(environ, *which)[0]


def in_detail(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return GPUs with what takes questions of its own: remapped rows, NVLinks and the processes on each."""
    if not gpus:
        return ()
    rows, _ = _query(environ, _ROWS, {"gpu_uuid": ("uuid", str), **_properties(_ROWS)})
    remapped = {row.pop("uuid"): row for row in rows or ()}
    running, _ = _query(environ, "compute-apps", _PROCESS)
    blocks = by_uuid(nvidia_smi(environ, "nvlink", "--status"))
    links = {uuid: _link_rates(block) for uuid, block in blocks.items()}
    found = []
    for gpu in gpus:
        on_it = [row for row in running or () if row["uuid"] == gpu.uuid and row["pid"] != os.getpid()]
        named = tuple(f"{Path(row['name'] or '?').name} (pid {row['pid']})" for row in on_it)
        known = replace(gpu, processes=None if running is None else named, nvlinks=links.get(gpu.uuid or ""))
        found.append(replace(known, **remapped.get(gpu.uuid, {})))
    return tuple(found)


def visible_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs ``nvidia-smi`` lists and ``CUDA_VISIBLE_DEVICES`` leaves."""
    return select_visible(list_gpus_first(environ)[0], environ)


def select_visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return those of the host's GPUs that ``CUDA_VISIBLE_DEVICES`` leaves."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not gpus:
        return tuple(gpus)
    left = []
    for entry in (word.strip() for word in visible.split(",")):
        is_uuid = entry.startswith("GPU-")
        named = [gpu for gpu in gpus if (str(gpu.uuid).startswith(entry) if is_uuid else str(gpu.index) == entry)]
        if entry.startswith("MIG-"):
            named = [Gpu(name=entry, mig=True)]  # a slice, whose size is not told
        if not named:
            break  # CUDA hides an entry it does not know, and all that follow it
        left.append(named[0])
    return tuple(left)


def gpu_links(environ: Mapping[str, str]) -> Links:
    """Return how this host's GPUs are joined, as nvidia-smi tells; empty where it does not."""
    # by UUIDs, as torch writes them: ranks count only the GPUs that are visible to them, and nvidia-smi counts all
    uuids = {gpu.index: gpu.uuid for gpu in gpus_of(environ)}
    # in nvidia-smi's matrix NV# is NVLink, SYS crosses NUMA nodes, the rest is PCIe
    matrix = nvidia_smi(environ, "topo", "-m") or ""
    found = {}
    for index, words in re.findall(r"^\s*GPU(\d+)(.*\bX\b.*)$", matrix, re.MULTILINE):
        for column, word in enumerate(words.split()):  # the GPUs' columns are the first
            link = "NVLink" if re.fullmatch(r"NV\d+", word) else _LINKS.get(word)
            one, other = uuids.get(int(index)), uuids.get(column)
            if link and one and other and int(index) < column:
                found[frozenset((one, other))] = link
    return found


def local_gpu_index(environ: Mapping[str, str], count: int) -> int:
    """Return which of ``count`` GPUs this rank uses: ranks beyond the number of GPUs share them."""
    if count == 0:
        raise UserError(
            "torch finds no GPU in this rank (torch.cuda.device_count() is 0): see nvidia-smi, CUDA_VISIBLE_DEVICES "
            "and parbench doctor on this host; --device cpu measures the cores"
        )
    return int(environ.get("LOCAL_RANK", "0")) % count


def _unknown_property(said: str) -> str | None:
    told = re.search(r'^Field "(.+)" is not a valid field', said, re.MULTILINE)
    return told[1] if told else None


def _properties(of: str) -> _Properties:
    told = (one for one in fields(Gpu) if one.metadata.get("of") == of)
    return {one.metadata["property"]: (one.name, one.metadata["read"]) for one in told}


def _query(
    environ: Mapping[str, str], of: str, wanted: _Properties, *which: str, seconds: float | None = None
) -> tuple[list[dict[str, Any]] | None, SmiReply]:
    """Return a row of named values for each GPU or process, None where the driver does not answer, and the reply.

    A property that this driver does not know is asked for by its former name, or not at all. A tool that fails
    because of one GPU may list the others nevertheless. The reply's text is what is not a row.
    """
    asked = dict(wanted)
    while True:
        words = (f"--query-{of}={','.join(asked)}", "--format=csv,noheader,nounits", *which)
        reply = ask_nvidia_smi(environ, *words, seconds=seconds)
        unknown = _unknown_property(reply.text)
        if unknown is None or unknown not in asked:
            break
        named = asked.pop(unknown)
        if former := _FORMERLY.get(unknown):
            asked[former] = named
    if reply.end != "exited":
        return None, reply
    rows, other_lines = [], []
    for line in reply.text.splitlines():
        cells = line.split(", ", len(asked) - 1)
        if len(cells) != len(asked):  # a warning, or that there is nothing
            other_lines.append(line.strip())
        elif _LOST not in cells:
            named_cells = zip(asked.values(), cells, strict=True)
            rows.append({name: _word(read, cell) for (name, read), cell in named_cells})
    reply = replace(reply, text=" ".join(filter(None, other_lines)))
    return (rows if rows or reply.exit_code == 0 else None), reply


def _word(read: Callable[[str], Any], word: str) -> Any:
    """Return what a word says; None for ``[N/A]``, ``[Not Supported]``, ``[GPU requires reset]`` and the like."""
    word = word.strip()
    try:
        return None if word in ("", "N/A") or word.startswith("[") else read(word)
    except ValueError:
        return None


def by_uuid(told: str | None) -> dict[str, str]:
    """Return what ``nvidia-smi nvlink`` tells of each GPU, by its UUID."""
    blocks = re.split("(?m)^(?=GPU )", told or "")
    return {uuid[1]: block for block in blocks if (uuid := re.search(r"\(UUID: (\S+?)\)", block))}


def _link_rates(block: str) -> tuple[float | None, ...]:
    """Return the rate of each link of a GPU; none where all are inactive, which only a sentence tells."""
    rates = re.findall(r"Link \d+: (\S+)", block)
    return tuple(0.0 if rate == "<inactive>" else _word(float, rate) for rate in rates)
