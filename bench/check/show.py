"""A check as text: a line for each device with its verdict first, then the reasons and fixes."""

from collections.abc import Sequence

from parbench.bench.check.cases import QUANTITIES
from parbench.bench.check.health import Device, Fault, Health, Rate
from parbench.bench.text import format_duration, format_list, format_table, pluralize

_TERA = 1e12
_GIGA = 1e9


def render(health: Health) -> str:
    """Return the check of a host as text."""
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
    """Return lines about the faults that belong to no device.

    ``host`` is the name of the host if there are several.
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
    """Return the reasons of devices that are not ok, bad devices last.

    A reason of several devices, such as a driver that does not answer, is printed once.
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
    """Return the verdict with the fault, and a second line with the fix."""
    return f"{'bad' if is_bad else 'watch'}  {text}\n     -> {fix}"


def render_devices(devices: Sequence[Device], *, with_host: bool = False) -> list[str]:
    """Return a line for each device with its rates and their gap to the peers in per cent."""
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
    """Return the scaled rate and its gap in per cent, ``-`` for None."""
    if rate is None:
        return "-"
    value = f"{rate.value / scale:.3g}"
    return value if rate.gap is None else f"{value} {-100 * rate.gap:+.0f} %"
