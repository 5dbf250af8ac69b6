"""What a check says of a host: a verdict for each device, why, and what to do. From a run and what the driver told."""

from collections.abc import Mapping, Sequence

import msgspec

from parbench.bench.check.cases import BY_NAME, QUANTITIES, Reached, reached, remedy_of
from parbench.bench.check.infiniband import Port
from parbench.bench.check.rule import MIN_REPETITIONS, Gap, compute_gaps
from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.results.records import SkipReason
from parbench.bench.results.runs import Run
from parbench.bench.results.stats import median
from parbench.bench.text import counted

FLOORS = {"cuda": 0.05, "cpu": 0.1}
CORRUPT = "drain the host: it computes or copies wrongly, and says nothing; run it again, then replace the device"
_VERDICTS = {ExitCode.OK: "ok", ExitCode.BAD: "bad", ExitCode.DID_NOT_RUN: "did not run"}
_IN_ALL = f"in {MIN_REPETITIONS} of {MIN_REPETITIONS} launches"


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """What a device reached in a quantity, in B/s or FLOP/s, in each launch and in the middle.

    ``under`` is the share that it lacks of what its peers reached (negative above), in ``mads`` of scatter; it would
    have been named from ``least`` on. None is unknown: without peers, or with too few launches.
    """

    name: str
    unit: str
    value: float
    launches: dict[int, float]
    under: float | None = None
    mads: float | None = None
    least: float | None = None


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not as it should be, and what to do; it makes a device bad, or is only to be watched."""

    text: str
    remedy: str
    is_bad: bool = True
    is_beside_peers: bool = False


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, or a group of cores, known by its UUID or by its host and cores; ``facts`` are the driver's words."""

    host: str
    name: str
    uuid: str
    kind: str
    rank: int
    rates: dict[str, Rate] = {}
    facts: dict[str, str] = {}
    reasons: tuple[Reason, ...] = ()
    ran: bool = True

    @property
    def verdict(self) -> str:
        if any(reason.is_bad for reason in self.reasons):
            return "bad"
        return "did not run" if not self.ran else "watch" if self.reasons else "ok"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """A host's devices and ports; ``together`` is the bus bandwidth of all devices, None where there is one.

    ``links`` are pairs of devices that are slow though their devices are not, ``problems`` what did not run, ``notes``
    what would disturb on this host.
    """

    host: str
    started: str
    seconds: float
    device: str
    driver: str = "-"
    devices: tuple[Device, ...] = ()
    links: tuple[Reason, ...] = ()
    ports: tuple[Port, ...] = ()
    together: float | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    run: str = ""
    emulated: bool = False

    @property
    def bad(self) -> list[str]:
        named = [device.name for device in self.devices if device.verdict == "bad"]
        ports = [f"port {port.name}" for port in self.ports if port.is_bad]
        return [*named, *(link.text.partition(":")[0] for link in self.links), *ports]

    @property
    def code(self) -> ExitCode:
        codes = [ExitCode.BAD] if self.bad else []
        if self.problems or not self.devices or not all(device.ran for device in self.devices):
            codes.append(ExitCode.DID_NOT_RUN)
        return combine_exit_codes(codes)

    @property
    def verdict(self) -> str:
        return _VERDICTS[self.code]


def measured(devices: Sequence[Device], run: Run) -> tuple[tuple[Device, ...], tuple[Reason, ...], float | None]:
    """Return the devices with what they reached and what was wrong, slow links, and what all reached together."""
    found = reached(run)
    wrong = _wrong(run)
    told = []
    for device in devices:
        own = {name: of[device.rank] for name, of in found.by_rank.items() if device.rank in of}
        if pairs := [rates for ranks, rates in found.by_pair.items() if device.rank in ranks]:
            launches = sorted({launch for rates in pairs for launch in rates})
            own["pairs"] = {
                launch: median([rates[launch] for rates in pairs if launch in rates]) for launch in launches
            }
        rates = {name: _rate(name, launches) for name, launches in own.items() if launches}
        reasons = [Reason(text=words, remedy=CORRUPT) for words in wrong.get(device.rank, ())]
        ran = bool(rates) or bool(reasons)
        told.append(msgspec.structs.replace(device, rates=rates, reasons=(*device.reasons, *reasons), ran=ran))
    together = median(list(found.together.values())) if found.together else None
    return tuple(told), _slow_links(devices, found, run), together


def _rate(name: str, launches: Mapping[int, float]) -> Rate:
    unit = BY_NAME[name.removesuffix(" alone")].unit
    return Rate(name=name, unit=unit, value=median(list(launches.values())), launches=dict(launches))


def _wrong(run: Run) -> dict[int, list[str]]:
    """Return what each rank had wrong; of what ranks do together only what a single one had wrong is its own."""
    found: dict[int, dict[str, int]] = {}
    for record in run.records:
        if record.status == "wrong":
            ranks = sorted(record.wrong_by_rank)
            if len(ranks) == 1 or record.case.name.startswith(("compute.", "memory.")):
                for rank in ranks:
                    of = found.setdefault(rank, {})
                    of[record.case.name] = of.get(record.case.name, 0) + 1
    return {
        rank: [f"wrong results in {', '.join(cases)} ({counted(sum(cases.values()), 'time')})"]
        for rank, cases in found.items()
    }


def problems_of(run: Run) -> tuple[str, ...]:
    """Return why cases have no result, each reason once; what follows from a device's wrong result is that device's."""
    told, found = _wrong(run), dict[str, list[str]]()
    wrong_cases = {record.case.id for record in run.records if record.status == "wrong"}
    reasons_of_budget = {record.reason for record in run.records if record.is_out_of_budget}
    for record in run.records:
        is_repeated = record.skip_reason is SkipReason.EARLIER_FAILURE and record.case.id in wrong_cases
        follows = told and (record.status == "wrong" or is_repeated)
        if record.status != "ok" and not follows:
            found.setdefault(record.reason, []).append(record.case.name)
    told_more = dict.fromkeys(reasons_of_budget, " -> stop other work here, or allow more time (--budget 2m)")
    problems = [
        f"{', '.join(dict.fromkeys(names))}: {reason}{told_more.get(reason, '')}" for reason, names in found.items()
    ]
    if (left := run.info.plan.launches * len(run.info.plan.cases) - len(run.records)) > 0:
        problems.append(f"not reached: {counted(left, 'measurement')}")
    return tuple(problems)


def compared(devices: Sequence[Device], floor: float) -> tuple[Device, ...]:
    """Compare each device with all others of its kind, on all hosts, and return them in the same order."""
    # Devices are identified by their position. Hosts may have equal names, and GPUs of several hosts equal indices.
    kept = {
        position: msgspec.structs.replace(
            device, reasons=tuple(reason for reason in device.reasons if not reason.is_beside_peers)
        )
        for position, device in enumerate(devices)
    }
    names = [f"{one.name}{more}" for one in QUANTITIES for more in ("", " alone")]
    for kind in {device.kind for device in devices}:
        alike = {key: device for key, device in kept.items() if device.kind == kind and device.ran}
        of = {
            name: {key: one.rates[name].launches for key, one in alike.items() if name in one.rates} for name in names
        }
        found = compute_gaps(of, floor)
        for key, device in alike.items():
            own = {name: found[name, key] for name in names if (name, key) in found}
            rates = {
                name: msgspec.structs.replace(device.rates[name], under=gap.share, mads=gap.mads, least=gap.least)
                for name, gap in own.items()
            }
            slow = _slower({name: gap for name, gap in own.items() if gap.is_under}, device)
            kept[key] = msgspec.structs.replace(
                device, rates={**device.rates, **rates}, reasons=(*device.reasons, *slow)
            )
    return tuple(kept.values())


def _slower(slow: Mapping[str, Gap], device: Device) -> tuple[Reason, ...]:
    """Return a reason for each remedy, which names the quantities that it is for; what is slow alone, if only alone."""
    on = "cpu" if device.kind.startswith("cores") else "cuda"
    told: dict[str, list[str]] = {}
    for name, gap in slow.items():
        if name.endswith(" alone") and name.removesuffix(" alone") in slow:
            continue
        peers = "" if told.get(remedy_of(name, on)) else " under its peers"
        words = f"{100 * gap.share:.0f} %{peers} in {name} ({gap.mads:.1f} MADs)"
        told.setdefault(remedy_of(name, on), []).append(words)
    return tuple(
        Reason(text=f"{', '.join(words)}, {_IN_ALL}", remedy=remedy, is_beside_peers=True)
        for remedy, words in told.items()
    )


def _slow_links(devices: Sequence[Device], found: Reached, run: Run) -> tuple[Reason, ...]:
    """Return pairs that are under those that are joined alike, of devices that are not under their peers themselves."""
    relations = (run.info.environment or {}).get("locality") or {}
    by_kind: dict[str, dict[str, Mapping[int, float]]] = {}
    for (one, other), rates in found.by_pair.items():
        by_kind.setdefault(str(relations.get(f"{one}-{other}")), {})[f"{one}-{other}"] = rates
    names = {device.rank: device.name for device in devices}
    slow = []
    for joined_by, alike in by_kind.items():
        beside = compute_gaps({"pairs": alike}, FLOORS[run.info.plan.device])
        for (_, pair), gap in beside.items():
            if gap.is_under:
                first, second = (names[int(end)] for end in pair.split("-"))
                joined = "" if joined_by == "None" else f" of those by {joined_by}"
                words = f"{100 * gap.share:.0f} % under its peers{joined}, {gap.mads:.1f} MADs, {_IN_ALL}"
                reason = Reason(text=f"{first} - {second}: {words}", remedy=remedy_of("pairs", "cuda"))
                slow.append(((first, second), reason))
    # a device of which every pair is slow is slow itself, and named by its own rate
    met = [name for ends, _ in slow for name in ends]
    most = len(devices) - 1
    return tuple(reason for ends, reason in slow if most < 2 or all(met.count(name) < most for name in ends))
