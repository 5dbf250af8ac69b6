"""What each device reached in earlier checks: a line for each check of a device, in a file for each host."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from parbench.bench.check.health import Device, Health, Reason
from parbench.bench.files import decode_json, read_lines
from parbench.bench.results.stats import median
from parbench.bench.text import reading, writing

_LEAST, _MOST = 5, 50  # earlier checks of a device to say how it was
_MADS, _FLOOR = 5.0, 0.05


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A device in a check: when, where, which, its verdict and its rates by quantity."""

    at: str
    host: str
    uuid: str
    name: str
    kind: str
    verdict: str
    rates: dict[str, float]


def read(folder: Path) -> list[Line]:
    """Return all lines of all hosts in the order of time; those cut short or of another version are passed over."""
    found = []
    for file in sorted(folder.glob("*.jsonl")):
        with reading(file):
            for _, line in read_lines(file):
                with suppress(ValueError):
                    found.append(decode_json(line, Line))
    return sorted(found, key=lambda line: line.at)


def keep(folder: Path, health: Health) -> None:
    """Append a check's devices to their host's file: a host has one writer, so that checks of many do not collide."""
    lines = [
        Line(
            at=health.started,
            host=device.host,
            uuid=device.uuid,
            name=device.name,
            kind=device.kind,
            verdict=device.verdict,
            rates={name: rate.value for name, rate in device.rates.items()},
        )
        for device in health.devices
        if device.ran
    ]
    path = folder / f"{health.host}.jsonl"
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        is_torn = path.exists() and not path.read_bytes().endswith(b"\n")  # by a check that was killed
        with path.open("ab") as file:
            file.write(b"\n" * is_torn + b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def compared_with_history(device: Device, lines: Sequence[Line]) -> Device:
    """Return the device with what is slower than in its own earlier checks, wherever it was then; to be watched."""
    own = [line for line in lines if line.uuid == device.uuid and line.kind == device.kind and line.verdict != "bad"]
    reasons = device.reasons
    for name, rate in device.rates.items():
        before = [line.rates[name] for line in own[-_MOST:] if name in line.rates]
        if len(before) < _LEAST:
            continue
        usual = median(before)
        scatter = 1.4826 * median([abs(value - usual) for value in before])
        if usual - rate.value > max(_FLOOR * usual, _MADS * scatter):
            words = f"{100 * (1 - rate.value / usual):.0f} % under its own {len(before)} checks before in {name}"
            reasons += (
                Reason(text=words, remedy="see what changed: driver, power, cooling, neighbours", is_bad=False),
            )
    return msgspec.structs.replace(device, reasons=reasons)
