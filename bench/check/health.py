"""The health of a host: verdicts on its devices, from a run and the driver's facts."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from parbench.bench.check.cases import (
    ALONE_SUFFIX,
    LINK_FIX,
    QUANTITY_BY_NAME,
    Rates,
    find_fix,
    read_rates,
)
from parbench.bench.check.rule import MIN_REPETITIONS, Gap, compute_gaps
from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.plan.groups import Ranks
from parbench.bench.results.records import SkipReason
from parbench.bench.results.runs import Run
from parbench.bench.results.stats import median
from parbench.bench.text import pluralize

# The share that a slow device lacks, of GPUs and of cores.
THRESHOLDS = {True: 0.05, False: 0.1}
_CORRUPT_FIX = "drain the host: it computes or copies wrongly without an error; run it again, then replace the device"
_IN_ALL_REPETITIONS = f"in {MIN_REPETITIONS} of {MIN_REPETITIONS} repetitions"
_VERDICTS = {ExitCode.OK: "ok", ExitCode.BAD: "bad", ExitCode.DID_NOT_RUN: "did not run"}
_MORE_TIME = " -> stop other work here, or allow more time (--budget 2m)"


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """The rate of a device in a quantity, such as the bandwidth of a copy."""

    unit: str
    """The unit, B/s or FLOP/s."""
    value: float
    """The median rate of the repetitions."""
    repetitions: dict[int, float]
    """The rate in each repetition, by the number of the repetition."""
    gap: float | None = None
    """The share of the peers' rate that the device lacks, negative if the device is faster.

    None if the device has no peers or too few repetitions.
    """


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of a device or link with its fix. A fault that is not bad needs attention only."""

    text: str
    fix: str
    """Advice to remove the fault."""
    is_bad: bool = True
    is_comparison: bool = False
    """True if the fault comes from a comparison with peers."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU or a group of cores with its rates and faults."""

    host: str
    name: str
    uuid: str = ""
    """The UUID of a GPU, empty for cores."""
    kind: str
    """The model of a GPU or the number of cores. Devices of the same kind are peers."""
    is_gpu: bool = True
    rank: int
    """The rank that measures the device."""
    rates: dict[str, Rate] = {}
    """The rates by the name of the quantity."""
    facts: dict[str, str] = {}
    """The facts of the driver as text, by topic."""
    reasons: tuple[Fault, ...] = ()
    """The faults that decide the verdict, empty if the device is fine."""
    ran: bool = True
    """True if the device was measured."""
    uncompared: tuple[str, ...] = ()
    """The names of rates that could not be compared with rates of other hosts."""

    @staticmethod
    def make_absent(
        host: str, name: str, text: str, fix: str, *, kind: str = "GPU", uuid: str = ""
    ) -> "Device":
        """Return a bad device that could not be measured, for the reason ``text``."""
        fault = Fault(text=text, fix=fix)
        return Device(
            host=host, name=name, uuid=uuid, kind=kind, rank=-1, reasons=(fault,), ran=False
        )

    @property
    def verdict(self) -> str:
        if any(reason.is_bad for reason in self.reasons):
            return "bad"
        if not self.ran:
            return "did not run"
        if self.uncompared:
            return "not compared"
        return "watch" if self.reasons else "ok"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checking the devices and ports of a host."""

    host: str
    started: str
    """The UTC time at which the check began."""
    seconds: float = 0.0
    """The duration of the check."""
    device: str
    """``cuda`` or ``cpu``."""
    devices: tuple[Device, ...] = ()
    links: tuple[Fault, ...] = ()
    """The slow pairs of devices that are not slow themselves."""
    num_ports: int = 0
    """The number of InfiniBand ports."""
    ports: tuple[Fault, ...] = ()
    """The faults of InfiniBand ports."""
    bus_bandwidth: float | None = None
    """The bus bandwidth in B/s of all devices together, None if there is only one device."""
    problems: tuple[str, ...] = ()
    """Sentences about cases without a result."""
    notes: tuple[str, ...] = ()
    """The disturbances of this host."""
    run: str = ""
    """The folder of the run, empty without a run."""
    emulated: bool = False
    """True if the hosts are emulated on one machine."""

    @property
    def bad_names(self) -> list[str]:
        """The names of the bad devices, links and ports."""
        devices = [device.name for device in self.devices if device.verdict == "bad"]
        faults = [fault for fault in (*self.links, *self.ports) if fault.is_bad]
        return [*devices, *(fault.text.partition(":")[0] for fault in faults)]

    @property
    def exit_code(self) -> ExitCode:
        codes = [ExitCode.BAD] if self.bad_names else []
        if self._is_incomplete or any(device.uncompared for device in self.devices):
            codes.append(ExitCode.DID_NOT_RUN)
        return combine_exit_codes(codes)

    @property
    def verdict(self) -> str:
        if self.exit_code is ExitCode.DID_NOT_RUN and not self._is_incomplete:
            return "not compared"
        return _VERDICTS[self.exit_code]

    @property
    def _is_incomplete(self) -> bool:
        """Return True if a case has no result or a device was not measured."""
        return bool(self.problems) or not all(device.ran for device in self.devices)


def add_run(health: Health, devices: Sequence[Device], run: Run) -> Health:
    """Add devices to the health of a host, with their rates and wrong results in a run."""
    rates = read_rates(run)
    [by_repetition] = rates.pop("all ranks", {(): {}}).values()
    wrong_results = _count_wrong_records(run)
    measured_devices = []
    for device in devices:
        device_rates = _collect_rates(rates, device.rank)
        reasons = device.reasons
        wrong = wrong_results.get(device.rank)
        if wrong is not None:
            text = f"wrong results in {', '.join(wrong)} ({pluralize(wrong.total(), 'time')})"
            reasons = (*reasons, Fault(text=text, fix=_CORRUPT_FIX))
        ran = bool(device_rates) or wrong is not None
        measured_devices.append(replace(device, rates=device_rates, reasons=reasons, ran=ran))
    links: tuple[Fault, ...] = ()
    if not health.emulated:
        measured_devices = compare_with_peers(measured_devices)
        links = _find_slow_links(devices, rates.get("pairs", {}), run)
    return replace(
        health,
        devices=(*measured_devices, *health.devices),
        links=links,
        bus_bandwidth=median(list(by_repetition.values())) if by_repetition else None,
        problems=_list_problems(run),
        notes=(*health.notes, *run.info.plan.limitations),
        run=str(run.path),
    )


def _collect_rates(rates: Rates, rank: int) -> dict[str, Rate]:
    """Return the rates of a rank by quantity.

    The rate of the quantity ``pairs`` is the median over the pairs of the rank.
    """
    device_rates = {}
    for name, by_ranks in rates.items():
        values = defaultdict(list)
        for ranks, by_repetition in by_ranks.items():
            if rank in ranks:
                for repetition, rate in by_repetition.items():
                    values[repetition].append(rate)
        if values:
            medians = {repetition: median(values[repetition]) for repetition in sorted(values)}
            device_rates[name] = Rate(
                unit=QUANTITY_BY_NAME[name.removesuffix(ALONE_SUFFIX)].unit,
                value=median(list(medians.values())),
                repetitions=medians,
            )
    return device_rates


def _count_wrong_records(run: Run) -> dict[int, Counter[str]]:
    """Return by rank and case name the number of records with wrong results of the rank.

    A wrong result of a communication counts only if a single rank has it, because it can spread.
    """
    counts: dict[int, Counter[str]] = {}
    for record in run.records:
        is_local = record.case.name.startswith(("compute.", "memory."))
        if len(record.wrong_by_rank) == 1 or is_local:
            for rank in record.wrong_by_rank:
                counts.setdefault(rank, Counter())[record.case.name] += 1
    return counts


def _list_problems(run: Run) -> tuple[str, ...]:
    """Return the reasons why cases have no result, without wrong results of a device."""
    wrong_cases = set()
    if _count_wrong_records(run):
        wrong_cases = {record.case.id for record in run.records if record.status == "wrong"}
    has_injection = run.info.plan.injection is not None
    cases_by_reason: dict[str, dict[str, None]] = {}
    for record in run.records:
        # A case that was wrong is skipped in later repetitions.
        is_wrong = record.status == "wrong" or record.skip_reason is SkipReason.EARLIER_FAILURE
        if record.status == "ok" or (is_wrong and record.case.id in wrong_cases):
            continue
        if has_injection and record.skip_reason is SkipReason.IMPOSSIBLE:
            continue  # The fault would have no effect, for example on another core.
        reason = record.reason + (_MORE_TIME if record.is_out_of_budget else "")
        cases_by_reason.setdefault(reason, {})[record.case.name] = None
    problems = [f"{', '.join(names)}: {reason}" for reason, names in cases_by_reason.items()]
    plan = run.info.plan
    num_missing = plan.repetitions * len(plan.cases) - len(run.records)
    if num_missing > 0:
        problems.append(f"not reached: {pluralize(num_missing, 'measurement')}")
    return tuple(problems)


def compare_with_peers(devices: Sequence[Device]) -> list[Device]:
    """Return the devices in the same order, compared with all others of their kind.

    This replaces an earlier comparison.
    """
    compared = []
    for device in devices:
        reasons = tuple(reason for reason in device.reasons if not reason.is_comparison)
        compared.append(replace(device, reasons=reasons))
    for kind, is_gpu in {(device.kind, device.is_gpu) for device in devices}:
        # Devices are identified by their position. Hosts may have equal names, and GPUs of several
        # hosts equal indices.
        rates: dict[str, dict[int, Mapping[int, float]]] = {}
        for position, device in enumerate(compared):
            if device.kind == kind and device.ran:
                for name, rate in device.rates.items():
                    rates.setdefault(name, {})[position] = rate.repetitions
        gaps: dict[int, dict[str, Gap]] = {}
        for (name, position), gap in compute_gaps(rates, THRESHOLDS[is_gpu]).items():
            gaps.setdefault(position, {})[name] = gap
        for position, own_gaps in gaps.items():
            compared[position] = _add_gaps(compared[position], own_gaps)
    return compared


def _add_gaps(device: Device, gaps: Mapping[str, Gap]) -> Device:
    """Add the gaps to the rates, and a fault for each fix that lists the slow quantities.

    A rate that was measured alone counts only if the rate during work of the other devices is not
    slow too.
    """
    rates = dict(device.rates)
    texts_by_fix: dict[str, list[str]] = {}
    for name, gap in gaps.items():
        rates[name] = replace(rates[name], gap=gap.share)
        gap_of_all = gaps.get(name.removesuffix(ALONE_SUFFIX))
        is_slow_anyway = (
            name.endswith(ALONE_SUFFIX) and gap_of_all is not None and gap_of_all.is_under
        )
        if gap.is_under and not is_slow_anyway:
            texts = texts_by_fix.setdefault(find_fix(name, is_gpu=device.is_gpu), [])
            peers = "" if texts else " under its peers"
            texts.append(f"{100 * gap.share:.0f} %{peers} in {name} ({gap.mads:.1f} MADs)")
    reasons = [
        Fault(text=f"{', '.join(texts)}, {_IN_ALL_REPETITIONS}", fix=fix, is_comparison=True)
        for fix, texts in texts_by_fix.items()
    ]
    return replace(device, rates=rates, reasons=(*device.reasons, *reasons))


def _find_slow_links(
    devices: Sequence[Device], pairs: Mapping[Ranks, Mapping[int, float]], run: Run
) -> tuple[Fault, ...]:
    """Return the pairs of devices that are slower than others with the same connection.

    A device all of whose pairs are slow is slow itself, which its own rate shows. Its pairs are not
    returned.
    """
    connections = (run.info.environment or {}).get("locality") or {}
    by_connection: dict[str, dict[Ranks, Mapping[int, float]]] = {}
    for pair, by_repetition in pairs.items():
        connection = connections.get("{}-{}".format(*pair)) or ""
        by_connection.setdefault(connection, {})[pair] = by_repetition
    gaps = compute_gaps(by_connection, THRESHOLDS[devices[0].is_gpu])
    slow = {key: gap for key, gap in gaps.items() if gap.is_under}
    num_peers = len(devices) - 1
    counts = Counter(rank for _, pair in slow for rank in pair)
    name_by_rank = {device.rank: device.name for device in devices}
    reasons = []
    for (connection, pair), gap in slow.items():
        if num_peers < 2 or all(counts[rank] < num_peers for rank in pair):
            link = " - ".join(name_by_rank[rank] for rank in pair)
            peers = f"its peers with {connection}" if connection else "its peers"
            share = f"{100 * gap.share:.0f} % under {peers}"
            text = f"link {link}: {share}, {gap.mads:.1f} MADs, {_IN_ALL_REPETITIONS}"
            reasons.append(Fault(text=text, fix=LINK_FIX))
    return tuple(reasons)
