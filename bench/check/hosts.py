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

OVERHEAD_SECONDS = 120.0
"""The seconds that the check of a host may take in addition to its time budget."""
_NUM_RANKS = re.compile(r"^([^:]+):\d+$")
_HOST = re.compile(r"(?:[\w.-]+@)?[\w.:%-]+")


def parse_hosts(text: str) -> tuple[str, ...]:
    """Return the host names in the value of ``--hosts``, each once and in the order of the value.

    ``text`` is a list such as ``a,b``, or the path of a file with one host on each line. A list may
    be compressed as in Slurm: ``n[01-03,7]``. A user may precede a host, as in ``me@n1``, and is
    kept. A number of ranks may follow a host, as in the host files of MPI (``n1:8`` of MPICH,
    ``n1 slots=8`` of Open MPI), and is dropped. Raises ``UserError`` if a host is not valid or
    there are none.
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
    """Run ``parbench check`` on all hosts at the same time and return the result of each host.

    Each host needs this Python and the current folder at the same paths. ``arguments`` are options
    of ``parbench check``. ``agent`` is the command of the remote shell with its options, such as
    ``ssh -p 2222``. ``seconds`` is the time budget of one check. The results are in the order of
    ``hosts``. A host that does not answer within the budget and two more minutes has a result with
    a problem.
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
    """Run ``parbench check`` on a host through a remote shell and return the result.

    ``agent`` is the remote shell with its options, such as ``ssh``. ``command`` is the shell
    command that runs the check on the host. If the command cannot be started or exceeds
    ``timeout_seconds``, the result has a problem.
    """
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
    """Parse the JSON that ``parbench check`` printed on a host.

    ``host`` is the name by which the host was reached, and replaces the host's own name in the
    result. ``output``, ``errors`` and ``exit_code`` are the standard output, standard error and
    exit code of the remote shell. If the last line of ``output`` is not the JSON of a check, the
    result has no devices, and its problem is the last line of ``errors`` or the exit code.
    """
    try:
        health = decode_json(output.strip().rpartition(b"\n")[2], Health)
    except ValueError:
        problem = get_last_line(errors.decode(errors="replace")) or f"it ended with {exit_code}"
        return make_failed_check(host, problem)
    # The name by which a host was reached is unique. Its own name may be another's too.
    devices = tuple(replace(device, host=host) for device in health.devices)
    return replace(health, host=host, devices=devices)


def make_failed_check(host: str, problem: str) -> Health:
    """Return a result without devices for a host whose check failed for the reason ``problem``."""
    return Health(host=host, started="", device="", problems=(problem,))


def compare_hosts(results: Sequence[Health]) -> tuple[Health, ...]:
    """Compare the rates of each device with devices of its kind on all hosts.

    ``results`` are the checks of the hosts, and the returned checks have the same order. The gaps
    and the faults for slow rates of all devices are replaced by those of this comparison. If there
    are several hosts, ``uncompared`` of a device lists the rates that could not be compared with
    other hosts. A host with fewer GPUs than most hosts with GPUs of its model gets one more device,
    a missing GPU with the verdict ``bad``. Emulated hosts are not compared, because they share one
    machine.
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
    """Return the devices of all hosts in one list, in the order of ``results``."""
    return [device for health in results for device in health.devices]


def _list_uncompared(device: Device, devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the names of the quantities in which a device cannot be compared with other hosts.

    ``devices`` are the devices of all hosts. A quantity such as ``copy`` is returned if the device
    has no gap, or if all devices of its kind on other hosts have fewer than three repetitions.
    Other hosts are needed because all devices of one host may be slow.
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
    """Return the exit code of a check of several hosts, the first of these that applies.

    1. ``BAD``: any host is bad.
    2. ``DID_NOT_RUN``: a host has no complete result, or could not be compared with other hosts. It
       also applies if some hosts checked GPUs and others cores, because the latter may have GPUs
       that do not work.
    3. ``OK``.
    """
    codes = [health.exit_code for health in results]
    if len(_group_by_device(results)) > 1:
        codes.append(ExitCode.DID_NOT_RUN)
    return combine_exit_codes(codes)


def _group_by_device(results: Sequence[Health]) -> dict[str, list[str]]:
    """Return the names of the hosts by the type of devices that they checked, ``cuda`` or ``cpu``.

    Hosts without a result are left out.
    """
    hosts: dict[str, list[str]] = {}
    for health in results:
        if health.device:
            hosts.setdefault(health.device, []).append(health.host)
    return hosts


def render(results: Sequence[Health]) -> str:
    """Return the checks of several hosts as the text that the command prints.

    It has the number of bad hosts, a table with a line for each device, the reasons why hosts and
    devices are not ok with advice, and the names of bad hosts to leave out of jobs.
    """
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
    """Return a line for each device with quantities that could not be compared, then the advice.

    Empty if all could be compared.
    """
    lines = []
    for device in devices:
        if device.uncompared:
            names = ", ".join(device.uncompared)
            lines.append(f"not compared  {device.host} {device.name}: {names}")
    if lines:
        needs = f"{MIN_REPETITIONS} repetitions of the device and of another one of its kind"
        lines.append(f"     -> a comparison needs {needs}: allow more time (--budget 2m)")
    return lines
