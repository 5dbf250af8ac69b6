"""A check of several hosts at once over ssh, followed by a comparison of their devices."""

import re
import shlex
import statistics
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec.structs import replace

from parbench.bench.check.health import MISSING_GPU_FIX, Device, Health, compare_with_peers
from parbench.bench.files import convert_read_errors, decode_json
from parbench.bench.launch.processes import PARBENCH
from parbench.bench.machine.slurm_allocation import expand_nodes
from parbench.bench.text import UserError, get_last_line

OVERHEAD_SECONDS = 120.0
"""The seconds that the check of a host may take in addition to its time budget."""
_NO_GPU = (
    "no GPU was found on this host, so only its cores were checked, while other hosts have GPUs; "
    "run parbench doctor there"
)
# An option of ssh begins with a hyphen. A single colon precedes slots or a port.
_HOST = re.compile(r"(?![^:]*:[^:]*$)[\w.][\w.@:%-]*")


def parse_hosts(text: str) -> tuple[str, ...]:
    """Return the host names in the value of ``--hosts``, each once and in the order of the value.

    ``text`` is a list such as ``a,me@b`` or, as in Slurm, ``n[01-03,7]``. Raises ``UserError`` if a
    host is not valid or there are none.
    """
    hosts = tuple(dict.fromkeys(expand_nodes(text, f"--hosts {text}")))
    if not hosts or not all(map(_HOST.fullmatch, hosts)):
        hint = "write hosts as n1,me@n2,n[03-05], without slots or ports (--ssh 'ssh -p 2222')"
        raise UserError(f"--hosts {text!r} is not a list of hosts", hint=hint)
    return hosts


def check_hosts(
    hosts: Sequence[str], arguments: Sequence[str], *, agent: str, seconds: float
) -> tuple[Health, ...]:
    """Run ``parbench check`` on all hosts at the same time and return the result of each host.

    Each host needs this Python and the current folder at the same paths as this host. ``arguments``
    are options of ``parbench check``. ``agent`` is the command of the remote shell with its
    options, such as ``ssh -p 2222``. ``seconds`` is the time budget of the check of one host. The
    results are in the order of ``hosts``. If a host does not answer within the budget and two more
    minutes, its result has no devices, and a sentence about it in ``problems``.
    """
    with convert_read_errors(f"--ssh {agent!r}", "is not a command"):
        program, *options = shlex.split(agent)
    check = shlex.join([*PARBENCH, "check", *arguments, "--format=json"])
    command = f"cd {shlex.quote(str(Path.cwd()))} && {check}"
    limit = seconds + OVERHEAD_SECONDS

    def check_host(host: str) -> Health:
        """Run the check on a host through the remote shell and return the result."""
        try:
            completed = subprocess.run(
                [program, *options, host, command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return make_failed_check(host, f"no answer within {limit:.0f} s")
        except OSError as error:
            return make_failed_check(host, f"{program} cannot be started: {error.strerror}")
        return parse_result(host, completed.stdout, completed.stderr, completed.returncode)

    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        return tuple(pool.map(check_host, hosts))


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
    return Health(host=host, device="", problems=(problem,))


def compare_hosts(results: Sequence[Health]) -> tuple[Health, ...]:
    """Compare the rates of each device with those of devices of its kind on all hosts.

    ``results`` are the checks of the hosts. The returned checks have the same order. In these, each
    rate has its ``gap`` to the devices of all hosts, and slow devices have a fault. Both replace
    those of the comparison within the host. A host with fewer GPUs than most hosts with GPUs of its
    model gets one more device, a missing GPU with the verdict ``bad``. A host that checked its
    cores, although other hosts checked GPUs, gets a problem, because its GPUs may not work.
    Emulated hosts are not compared, because they share one machine.
    """
    devices = [device for health in results if not health.emulated for device in health.devices]
    by_host: dict[str, list[Device]] = {}
    for device in compare_with_peers(devices):
        by_host.setdefault(device.host, []).append(device)
    for host, own_devices in by_host.items():
        kind = own_devices[0].kind
        counts = [len(peers) for peers in by_host.values() if peers[0].kind == kind]
        num_missing = statistics.mode(counts) - len(own_devices)
        if own_devices[0].is_gpu and num_missing > 0:
            text = f"has {num_missing} {kind} fewer than most hosts"
            missing_gpu = Device.make_absent(host, "missing GPU", text, MISSING_GPU_FIX, kind=kind)
            own_devices.append(missing_gpu)
    has_gpus = any(health.device == "cuda" for health in results)
    compared_results = []
    for health in results:
        problems = health.problems
        if has_gpus and health.device == "cpu":
            problems = (*problems, _NO_GPU)
        own_devices = by_host.get(health.host, list(health.devices))
        compared_results.append(replace(health, devices=tuple(own_devices), problems=problems))
    return tuple(compared_results)
