"""A check as text: one line for each device, the verdict first, then why and what to do."""

from collections.abc import Sequence

from bench.check.cases import QUANTITIES
from bench.check.gpus import COLUMNS
from bench.check.health import Device, Health, Reason
from bench.text import counted, format_duration, format_table

_FACTS = {title: topic.removeprefix("gpu ") for title, topic in COLUMNS.items()}


def render(health: Health) -> str:
    """Return a host's page."""
    kind = health.devices[0].kind if health.devices else health.device
    what = f"{len(health.devices)} x {kind}"
    driver = "" if health.driver == "-" else f" · driver {health.driver}"
    head = f"{health.host}: {health.verdict} · {what}{driver} · {format_duration(health.seconds)}"
    lines = [head, *devices_table(health.devices)]
    if health.together is not None:
        lines.append(f"all devices at once: all_reduce {health.together / 1e9:.3g} GB/s (bus)")
    shown = [port for port in health.ports if port.complaint]
    if health.ports:
        lines.append(
            f"{counted(len(health.ports), 'InfiniBand port')}: {len(health.ports) - len(shown)} as they should be"
        )
    lines += [
        _line(f"{'bad' if port.is_bad else 'watch'}  port {port.name}", port.complaint, port.remedy) for port in shown
    ]
    lines += [f"did not run: {problem}" for problem in health.problems]
    lines += [f"note: {note}" for note in health.notes]
    lines += [_line("bad  link", link.text, link.remedy) for link in health.links]
    lines += reasons_of(health.devices)
    if health.run:
        lines.append(f"all rows: parbench show --all {health.run}")
    return "\n".join(lines)


def _line(subject: str, words: str, remedy: str) -> str:
    return f"{subject}: {words}\n     -> {remedy}"


def reasons_of(devices: Sequence[Device], *, with_host: bool = False) -> list[str]:
    """Return why devices are not fine, the bad ones last, where a terminal's reader looks."""

    def of(device: Device, reason: Reason) -> str:
        name = f"{device.host} {device.name}" if with_host else device.name
        return _line(f"{'bad' if reason.is_bad else 'watch'}  {name}", reason.text, reason.remedy)

    told = [(reason.is_bad, of(device, reason)) for device in devices for reason in device.reasons]
    return [text for _, text in sorted(told, key=lambda one: one[0])]


def devices_table(devices: Sequence[Device], *, with_host: bool = False) -> list[str]:
    """Return a line for each device: what it reached, each rate beside its peers' by how many per cent."""
    rated = [one for one in QUANTITIES if any(one.name in device.rates for device in devices)]
    scales = {
        "FLOP/s": (1e12, "TFLOP/s") if any(_most(devices, one.name) > 1e12 for one in rated) else (1e9, "GFLOP/s")
    }
    scales["B/s"] = (1e9, "GB/s")
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


def _most(devices: Sequence[Device], name: str) -> float:
    return max((device.rates[name].value for device in devices if name in device.rates), default=0.0)
