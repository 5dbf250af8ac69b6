"""A check of several hosts at once over ssh, followed by a comparison of their devices."""

import re
import shlex
import statistics
import subprocess
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from parbench.bench.check.health import Device, Health, compare_with_peers
from parbench.bench.check.rule import MIN_REPETITIONS
from parbench.bench.check.show import format_faults, format_reasons, render_devices
from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.files import convert_read_errors, decode_json, read_text
from parbench.bench.launch.processes import PARBENCH
from parbench.bench.machine.slurm_allocation import expand_nodes
from parbench.bench.text import UserError, format_list, get_last_line, pluralize

OVERHEAD_SECONDS = 120.0  # of a check, in addition to its time budget
_NUM_RANKS = re.compile(r"^([^:]+):\d+$")
_HOST = re.compile(r"(?:[\w.-]+@)?[\w.:%-]+")


def parse_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts in a list such as ``a,b``, or in a file with one host on each line.

    A list may be compressed as in Slurm: ``n[01-03,7]``. A number of ranks may follow, as in MPI
    libraries: ``n1 slots=8`` of Open MPI, ``n1:8`` of MPICH. A user may precede: ``me@n1``.
    """
    # A long list is too long for the name of a file.
    if "," not in text and Path(text).is_file():
        lines = read_text(text, f"--hosts {text}").splitlines()
        names = [line.partition("#")[0].split() for line in lines]
        entries = ",".join(words[0] for words in names if words)
    else:
        entries = text
    hosts: dict[str, None] = {}
    for entry in expand_nodes(entries, f"--hosts {text}"):
        host = _NUM_RANKS.sub(r"\1", entry)
        if host.startswith("-") or not _HOST.fullmatch(host):
            hint = "write a host as n1, me@n1, n1:8 or n[01-03]"
            raise UserError(f"--hosts {text!r}: {host!r} is not a host", hint=hint)
        hosts[host] = None
    if not hosts:
        raise UserError(f"--hosts {text!r} names no hosts: write a,b,c, or a file with one a line")
    return tuple(hosts)


def check_hosts(
    hosts: Sequence[str], arguments: Sequence[str], *, agent: str, seconds: float
) -> tuple[Health, ...]:
    """Run ``parbench check`` on all hosts at the same time, with this Python in this folder.

    ``arguments`` are options of ``parbench check``. ``agent`` is the remote shell with its options,
    such as ``ssh``. ``seconds`` is the time budget of a check. The results are in the order of the
    hosts.
    """
    with convert_read_errors(f"--ssh {agent!r}", "is not a command"):
        program, *options = shlex.split(agent)
    check = shlex.join([*PARBENCH, "check", *arguments, "--format=json"])
    command = f"cd {shlex.quote(str(Path.cwd()))} && {check}"
    check_one = partial(
        _check_host,
        agent=[program, *options],
        command=command,
        timeout_seconds=seconds + OVERHEAD_SECONDS,
    )
    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        return tuple(pool.map(check_one, hosts))


def _check_host(host: str, *, agent: Sequence[str], command: str, timeout_seconds: float) -> Health:
    """Run the command on a host by the remote shell ``agent`` and return the result."""
    try:
        completed = subprocess.run(
            [*agent, host, command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return make_failed_check(host, f"no answer within {timeout_seconds:.0f} s")
    except OSError as error:
        return make_failed_check(host, f"{agent[0]} cannot be started: {error.strerror}")
    return parse_result(host, completed.stdout, completed.stderr, completed.returncode)


def parse_result(host: str, output: bytes, errors: bytes, exit_code: int) -> Health:
    """Return the check that a host printed, or its last line of errors as the problem."""
    try:
        health = decode_json(output.strip().rpartition(b"\n")[2], Health)
    except ValueError:
        problem = get_last_line(errors.decode(errors="replace")) or f"it ended with {exit_code}"
        return make_failed_check(host, problem)
    # The name by which a host was reached is unique. Its own name may be another's too.
    devices = tuple(replace(device, host=host) for device in health.devices)
    return replace(health, host=host, devices=devices)


def make_failed_check(host: str, problem: str) -> Health:
    """Return the check of a host that gave no result."""
    return Health(host=host, started="", device="", problems=(problem,))


def compare_hosts(results: Sequence[Health]) -> tuple[Health, ...]:
    """Compare each device with its peers on all hosts and return the updated results.

    Emulated hosts share one machine and are not compared. A rate without peers is reported, because
    a device is not known to be fine without them.
    """
    devices = _list_devices([health for health in results if not health.emulated])
    by_host: dict[str, list[Device]] = {}
    for device in compare_with_peers(devices):
        if len(results) > 1:
            device = replace(device, uncompared=_list_uncompared(device, devices))
        by_host.setdefault(device.host, []).append(device)
    for own_devices in by_host.values():
        kind = own_devices[0].kind
        counts = [len(others) for others in by_host.values() if others[0].kind == kind]
        num_missing = statistics.mode(counts) - len(own_devices)
        if own_devices[0].is_gpu and num_missing > 0:
            text = f"most hosts have {num_missing} more of {kind}"
            fix = "see lspci -d 10de:, dmesg (Xid) and parbench doctor there"
            host = own_devices[0].host
            missing = Device.make_absent(host, "missing GPU", text, fix, kind=kind)
            own_devices.append(missing)
    return tuple(
        replace(health, devices=tuple(by_host.get(health.host, health.devices)))
        for health in results
    )


def _list_devices(results: Sequence[Health]) -> list[Device]:
    return [device for health in results for device in health.devices]


def _list_uncompared(device: Device, devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the names of the device's rates that cannot be compared with rates of other hosts.

    A rate has no peer, or no peer on another host has enough repetitions. All devices of one host
    may be slow, which only other hosts show.
    """
    names = []
    for name, rate in device.rates.items():
        counts = [
            len(peer.rates[name].repetitions)
            for peer in devices
            if peer.host != device.host and peer.kind == device.kind and name in peer.rates
        ]
        if rate.gap is None or (counts and max(counts) < MIN_REPETITIONS):
            names.append(name)
    return tuple(names)


def compute_exit_code(results: Sequence[Health]) -> ExitCode:
    """Return the exit code of a check of several hosts.

    It is not OK if some hosts checked GPUs and others cores, because the latter may have GPUs that
    were not checked.
    """
    codes = [health.exit_code for health in results]
    if len(_group_by_device(results)) > 1:
        codes.append(ExitCode.DID_NOT_RUN)
    return combine_exit_codes(codes)


def _group_by_device(results: Sequence[Health]) -> dict[str, list[str]]:
    """Return the names of the hosts by checked device, ``cuda`` or ``cpu``."""
    hosts: dict[str, list[str]] = {}
    for health in results:
        if health.device:
            hosts.setdefault(health.device, []).append(health.host)
    return hosts


def render(results: Sequence[Health]) -> str:
    """Return a table of all devices, then the reasons why hosts and devices are not ok."""
    devices = _list_devices(results)
    bad_hosts = [health.host for health in results if health.exit_code is ExitCode.BAD]
    counts = Counter(health.verdict for health in results)
    title = f"{pluralize(len(results), 'host')}: {counts['bad']} bad"
    title += f", {counts['did not run']} did not run"
    if counts["not compared"]:
        title += f", {counts['not compared']} not compared"
    lines = [title]
    if devices:
        lines += render_devices(devices, with_host=True)
    by_device = _group_by_device(results)
    if len(by_device) > 1:
        parts = [f"{device} on {','.join(hosts)}" for device, hosts in by_device.items()]
        lines.append(f"hosts differ in what was checked: {format_list(parts, 'and')}")
        fix = "see parbench doctor there; --device cuda or --device cpu checks the same on all"
        lines.append(f"     -> {fix}")
    for health in results:
        lines += format_faults(health, health.host)
    lines += _format_uncompared(devices)
    lines += format_reasons(devices, with_host=True)
    if bad_hosts:
        lines.append(f"leave out: {','.join(bad_hosts)}")
    return "\n".join(lines)


def _format_uncompared(devices: Sequence[Device]) -> list[str]:
    """Return a line for each device with rates that could not be compared, and then the fix."""
    lines = []
    for device in devices:
        if device.uncompared:
            names = ", ".join(device.uncompared)
            lines.append(f"not compared  {device.host} {device.name}: {names}")
    if lines:
        needs = f"{MIN_REPETITIONS} repetitions of the device and of another one of its kind"
        lines.append(f"     -> a comparison needs {needs}: allow more time (--budget 2m)")
    return lines
