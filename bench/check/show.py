"""The result of ``parbench check`` as text: a line for each device, then faults with advice."""

from collections.abc import Sequence
from shlex import quote

from parbench.bench.check.cases import QUANTITIES
from parbench.bench.check.health import Device, Fault, Health, Rate
from parbench.bench.exit_codes import ExitCode
from parbench.bench.text import format_duration, format_table

_TERA = 1e12
_GIGA = 1e9


def render(results: Sequence[Health]) -> str:
    """Return the checks of one or more hosts as the text that ``parbench check`` prints.

    The text has the verdict, a table with a line for each device, and the faults with advice. If
    there are several hosts, it also has the names of the bad hosts, which jobs should exclude.
    """
    devices = [device for health in results for device in health.devices]
    has_several_hosts = len(results) > 1
    if has_several_hosts:
        verdicts = [health.verdict for health in results]
        title = f"{len(results)} hosts: {verdicts.count('bad')} bad"
        lines = [f"{title}, {verdicts.count('did not run')} did not run"]
    else:
        [health] = results
        kinds = [f"{len(devices)} x {device.kind}" for device in devices[:1]]
        verdict = f"{health.host}: {health.verdict}"
        lines = [" · ".join((verdict, *kinds, format_duration(health.seconds)))]
    if devices:
        lines += _render_devices(devices, has_several_hosts=has_several_hosts)
    for health in results:
        lines += _list_host_lines(health, f"{health.host}: " if has_several_hosts else "")
    bad_hosts = [health.host for health in results if health.exit_code is ExitCode.BAD]
    if has_several_hosts and bad_hosts:
        lines.append(f"exclude: {','.join(bad_hosts)}")
    return "\n".join(lines)


def _list_host_lines(health: Health, prefix: str) -> list[str]:
    """Return lines about the bus bandwidth of a host, its notes, problems, faults and run.

    ``prefix`` is put before the text of each line: the name of the host with a colon, empty if only
    one host was checked.
    """
    lines = []
    if health.bus_bandwidth is not None:
        bandwidth = f"{health.bus_bandwidth / _GIGA:.3g} GB/s (bus)"
        lines.append(f"{prefix}all devices at once: all_reduce {bandwidth}")
    lines += [f"note: {prefix}{note}" for note in health.notes]
    lines += [f"did not run  {prefix}{problem}" for problem in health.problems]
    lines += [_format_fault(prefix, fault) for fault in health.links]
    for device in health.devices:
        lines += [_format_fault(f"{prefix}{device.name}: ", fault) for fault in device.reasons]
    if health.run:
        lines.append(
            f"{prefix}all rows, from median times: parbench show --all {quote(health.run)}"
        )
    return lines


def _format_fault(prefix: str, fault: Fault) -> str:
    """Return a line with ``bad`` or ``warning``, ``prefix`` and the fault, and a line of advice."""
    return f"{'bad' if fault.is_bad else 'warning'}  {prefix}{fault.text}\n     -> {fault.fix}"


def _render_devices(devices: Sequence[Device], *, has_several_hosts: bool) -> list[str]:
    """Return the lines of a table of devices, the first of which has the titles of the columns.

    The columns are the verdict, the host (of several hosts), the name of the device, and the rate
    in each measured quantity. A rate is followed by its difference from the median of the device's
    peers in per cent, which is negative if the device is slower.
    """
    measured = {name for device in devices for name in device.rates}
    quantities = [quantity for quantity in QUANTITIES if quantity.name in measured]
    flops = (_TERA, "TFLOP/s") if devices[0].is_gpu else (_GIGA, "GFLOP/s")
    scales = {"FLOP/s": flops, "B/s": (_GIGA, "GB/s")}
    titles = [f"{quantity.name} {scales[quantity.unit][1]}" for quantity in quantities]
    columns = ["verdict", "host", "device"] if has_several_hosts else ["verdict", "device"]
    rows = [[*columns, *titles]]
    for device in devices:
        names = [device.host, device.name] if has_several_hosts else [device.name]
        rates = [
            _format_rate(device.rates.get(quantity.name), scales[quantity.unit][0])
            for quantity in quantities
        ]
        rows.append([device.verdict, *names, *rates])
    return format_table(rows, right_aligned=range(len(columns), len(rows[0]))).splitlines()


def _format_rate(rate: Rate | None, scale: float) -> str:
    """Return a rate in units of ``scale`` and its difference from peers, such as ``671 -3 %``.

    ``scale`` is the unit in B/s or FLOP/s, such as 1e9 for GB/s. The difference is left out if it
    is unknown. The text is ``-`` if ``rate`` is None, which means not measured.
    """
    if rate is None:
        return "-"
    value = f"{rate.value / scale:.3g}"
    return value if rate.gap is None else f"{value} {-100 * rate.gap:+.0f} %"
