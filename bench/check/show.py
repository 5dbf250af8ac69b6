"""The result of ``parbench check`` as text: a line for each device, then faults with advice."""

from collections.abc import Sequence

from parbench.bench.check.cases import QUANTITIES
from parbench.bench.check.health import Device, Fault, Health, Rate
from parbench.bench.text import format_duration, format_list, format_table, pluralize

_TERA = 1e12
_GIGA = 1e9


def render(health: Health) -> str:
    """Return the check of one host as the text that the command prints.

    It has the verdict, a table with a line for each device, and the faults with advice. ``health``
    must have at least one device.
    """
    first = health.devices[0]
    parts = [f"{health.host}: {health.verdict}", f"{len(health.devices)} x {first.kind}"]
    if "driver" in first.facts:
        parts.append(f"driver {first.facts['driver']}")
    parts.append(format_duration(health.seconds))
    lines = [" · ".join(parts), *render_devices(health.devices)]
    if health.bus_bandwidth is not None:
        lines.append(
            f"all devices at once: all_reduce {health.bus_bandwidth / _GIGA:.3g} GB/s (bus)"
        )
    if health.num_ports:
        num_good = health.num_ports - len(health.ports)
        ports = pluralize(health.num_ports, "InfiniBand port")
        lines.append(f"{ports}: {num_good} as they should be")
    lines += [f"note: {note}" for note in health.notes]
    lines += format_faults(health)
    lines += format_reasons(health.devices)
    if health.run:
        lines.append(f"all rows: parbench show --all {health.run}")
    return "\n".join(lines)


def format_faults(health: Health, host: str = "") -> list[str]:
    """Return lines about problems of the check and faults of links and InfiniBand ports.

    Faults of devices are left out. ``host`` is the name of the host, which is put into each line.
    It is empty if only one host was checked.
    """
    prefix = f"{host} " if host else ""
    title = f"did not run  {host}: " if host else "did not run  "
    problems = [title + problem for problem in health.problems]
    faults = [
        _format_fault(fault.is_bad, f"{prefix}{fault.text}", fault.fix)
        for fault in (*health.links, *health.ports)
    ]
    return [*problems, *faults]


def format_reasons(devices: Sequence[Device], *, with_host: bool = False) -> list[str]:
    """Return a text of two lines for each fault of the devices: the fault and the advice.

    A fault that several devices have, such as a driver that does not answer, is listed once with
    the names of the devices. Bad faults are last. With ``with_host`` the names contain the host.
    """
    names: dict[Fault, list[str]] = {}
    for device in devices:
        name = f"{device.host} {device.name}" if with_host else device.name
        for reason in device.reasons:
            names.setdefault(reason, []).append(name)
    return [
        _format_fault(
            reason.is_bad, f"{format_list(names[reason], 'and')}: {reason.text}", reason.fix
        )
        for reason in sorted(names, key=lambda reason: reason.is_bad)
    ]


def _format_fault(is_bad: bool, text: str, fix: str) -> str:
    """Return two lines: ``bad`` or ``watch`` with the fault ``text``, and the advice ``fix``."""
    return f"{'bad' if is_bad else 'watch'}  {text}\n     -> {fix}"


def render_devices(devices: Sequence[Device], *, with_host: bool = False) -> list[str]:
    """Return the lines of a table of devices, the first of which has the titles of the columns.

    The columns are the verdict, the host (with ``with_host``), the name of the device, and the rate
    in each measured quantity. A rate is followed by its difference from the median of the device's
    peers in per cent, which is negative if the device is slower.
    """
    measured = {name for device in devices for name in device.rates}
    quantities = [quantity for quantity in QUANTITIES if quantity.name in measured]
    flops = (_TERA, "TFLOP/s") if devices[0].is_gpu else (_GIGA, "GFLOP/s")
    scales = {"FLOP/s": flops, "B/s": (_GIGA, "GB/s")}
    titles = [f"{quantity.name} {scales[quantity.unit][1]}" for quantity in quantities]
    columns = ["verdict", "host", "device"] if with_host else ["verdict", "device"]
    rows = [[*columns, *titles]]
    for device in devices:
        names = [device.host, device.name] if with_host else [device.name]
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
