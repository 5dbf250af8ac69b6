"""A check as text: one line for each device, the verdict first, then why and what to do."""

from collections.abc import Sequence

from parbench.bench.check.cases import QUANTITIES
from parbench.bench.check.health import Device, Health, Reason
from parbench.bench.check.infiniband import Port
from parbench.bench.text import counted, format_duration, format_table, listed

_FACTS = {"clocks": "clocks", "memory": "memory", "PCIe": "pcie", "NVLink": "nvlink"}  # a column's title and its topic


def render(health: Health) -> str:
    """Return a host's page."""
    kind = health.devices[0].kind if health.devices else health.device
    what = f"{len(health.devices)} x {kind}"
    driver = "" if health.driver == "-" else f" · driver {health.driver}"
    head = f"{health.host}: {health.verdict} · {what}{driver} · {format_duration(health.seconds)}"
    lines = [head, *devices_table(health.devices)]
    if health.together is not None:
        lines.append(f"all devices at once: all_reduce {health.together / 1e9:.3g} GB/s (bus)")
    port_lines = complaints_of(health.ports)
    if health.ports:
        fine = len(health.ports) - len(port_lines)
        lines.append(f"{counted(len(health.ports), 'InfiniBand port')}: {fine} as they should be")
    lines += port_lines
    lines += [f"did not run: {problem}" for problem in health.problems]
    lines += [f"note: {note}" for note in health.notes]
    lines += [_line(True, "link", link.text, link.remedy) for link in health.links]
    lines += reasons_of(health.devices)
    if health.run:
        lines.append(f"all rows: parbench show --all {health.run}")
    return "\n".join(lines)


def _line(is_bad: bool, name: str, words: str, remedy: str) -> str:
    return f"{'bad' if is_bad else 'watch'}  {name}: {words}\n     -> {remedy}"


def complaints_of(ports: Sequence[Port], prefix: str = "") -> list[str]:
    """Return why ports are not fine; ``prefix`` names their host where there are several."""
    shown = [port for port in ports if port.complaint]
    return [_line(port.is_bad, f"{prefix}port {port.name}", port.complaint, port.remedy) for port in shown]


def reasons_of(devices: Sequence[Device], *, with_host: bool = False) -> list[str]:
    """Return the reasons of devices that are not ok, bad devices last.

    A reason of several devices, such as a driver that does not answer, is printed once.
    """
    names: dict[Reason, list[str]] = {}
    for device in devices:
        name = f"{device.host} {device.name}" if with_host else device.name
        for reason in device.reasons:
            names.setdefault(reason, []).append(name)
    reasons = sorted(names, key=lambda reason: reason.is_bad)
    return [_line(reason.is_bad, listed(names[reason], "and"), reason.text, reason.remedy) for reason in reasons]


def devices_table(devices: Sequence[Device], *, with_host: bool = False) -> list[str]:
    """Return a line for each device: what it reached, each rate beside its peers' by how many per cent."""
    rated = [one for one in QUANTITIES if any(one.name in device.rates for device in devices)]
    known = [device.rates[one.name].value for one in rated for device in devices if one.name in device.rates]
    flops = (1e12, "TFLOP/s") if max(known, default=0.0) > 1e12 else (1e9, "GFLOP/s")
    scales = {"FLOP/s": flops, "B/s": (1e9, "GB/s")}
    told = [title for title, topic in _FACTS.items() if any(device.facts.get(topic, "-") != "-" for device in devices)]
    hosts = ("host",) if with_host else ()
    rows = [("verdict", *hosts, "device", *(f"{one.name} {scales[one.unit][1]}" for one in rated), *told)]
    for device in devices:
        cells = []
        for one in rated:
            rate = device.rates.get(one.name)
            if rate is None:
                cells.append("-")
                continue
            beside = "" if rate.under is None else f" {-100 * rate.under:+.0f} %"
            cells.append(f"{rate.value / scales[one.unit][0]:.3g}{beside}")
        where = (device.host,) if with_host else ()
        rows.append(
            (device.verdict, *where, device.name, *cells, *(device.facts.get(_FACTS[title], "-") for title in told))
        )
    first = 2 + len(hosts)
    return format_table(rows, right=range(first, first + len(rated))).splitlines()
