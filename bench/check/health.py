"""The result of ``parbench check`` on one host: verdicts on its devices and links.

A device is a GPU or a group of cores. Verdicts follow from measured rates and driver facts.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from parbench.bench.check.cases import (
    LINK_FIX,
    QUANTITY_BY_NAME,
    Rates,
    find_fix,
    read_rates,
)
from parbench.bench.check.rule import Gap, compute_gaps
from parbench.bench.exit_codes import ExitCode
from parbench.bench.plan.groups import Ranks
from parbench.bench.results.runs import Run
from parbench.bench.results.stats import median
from parbench.bench.text import pluralize

THRESHOLDS = {True: 0.05, False: 0.1}
"""The fraction of its peers' rate that a slow device lacks, for GPUs (True) and cores (False)."""
_CORRUPT_FIX = "drain the host: it computes or copies wrongly without an error; run it again, then replace the device"
MISSING_GPU_FIX = "run lspci -d 10de:, dmesg (Xid) and parbench doctor there"
"""Advice to the user about GPUs that a host should have and that are not there."""
_EXIT_CODES = {"ok": ExitCode.OK, "bad": ExitCode.BAD, "did not run": ExitCode.DID_NOT_RUN}


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """The rate of a device in one measured quantity, such as its copy bandwidth."""

    unit: str
    """The unit of all rates in this object, B/s or FLOP/s."""
    value: float
    """The median over the repetitions."""
    repetitions: dict[int, float]
    """The rate in each repetition, by the number of the repetition."""
    gap: float | None = None
    """The fraction of the peers' median rate that the device lacks.

    Peers are the other devices of its kind. 0.1 means that the device is 10 % slower. The gap is
    negative if the device is faster, and None if it has no peers or fewer than three repetitions.
    """


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of a device or of a link between two devices, with advice to the user."""

    text: str
    """The observation, such as ``memory: ECC on, 3 uncorrected errors``."""
    fix: str
    """Advice to the user to remove the fault."""
    is_bad: bool = True
    """True if the verdict on the device or link is ``bad``. Otherwise it is ``warning``."""
    is_comparison: bool = False
    """True if the fault is that rates are lower than those of other devices of the same kind."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU or a group of cores of a host, with its measured rates and its faults."""

    host: str
    """The name of the host."""
    name: str
    """The name on the host, such as ``GPU 0`` or ``CPU 0-3``."""
    uuid: str = ""
    """The UUID of a GPU, empty for cores."""
    kind: str
    """The model of a GPU, or ``cores (N)`` for a group of N cores.

    Devices of the same kind are peers, whose rates are compared.
    """
    is_gpu: bool = True
    """True for a GPU, False for a group of cores."""
    rank: int
    """The rank that measures the device, -1 if the device could not be measured."""
    rates: dict[str, Rate] = {}
    """The measured rates, by the name of the quantity such as ``copy``."""
    reasons: tuple[Fault, ...] = ()
    """The faults that decide the verdict, empty if the device has no fault."""

    @staticmethod
    def make_absent(host: str, name: str, text: str, fix: str, *, kind: str = "GPU") -> "Device":
        """Return a device with the verdict ``bad`` that could not be measured.

        Its only fault has ``text`` as the observation and ``fix`` as the advice. The other
        arguments are fields of ``Device``. Use it for a GPU that does not answer or is missing.
        """
        fault = Fault(text=text, fix=fix)
        return Device(host=host, name=name, kind=kind, rank=-1, reasons=(fault,))

    @property
    def verdict(self) -> str:
        """The verdict on the device: the first of four that applies.

        ``bad``: it has a bad fault. ``did not run``: it was not measured. ``warning``: it has other
        faults. ``ok``: none of these.
        """
        if any(reason.is_bad for reason in self.reasons):
            return "bad"
        if not self.rates:
            return "did not run"
        return "warning" if self.reasons else "ok"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The result of ``parbench check`` on one host."""

    host: str
    """The name of the host."""
    seconds: float = 0.0
    """The duration of the check in seconds."""
    device: str
    """The type of the checked devices, ``cuda`` or ``cpu``. Empty if the host gave no result."""
    devices: tuple[Device, ...] = ()
    """The checked GPUs or groups of cores, including GPUs that are missing or do not answer."""
    links: tuple[Fault, ...] = ()
    """The faults of links: slow pairs of devices, and InfiniBand ports that are down or have errors."""
    bus_bandwidth: float | None = None
    """The bus bandwidth in B/s of an all-reduce of all devices, as nccl-tests defines it.

    It is the median over the repetitions, and None if it was not measured.
    """
    problems: tuple[str, ...] = ()
    """Sentences about benchmark cases without a result, or the reason why nothing was measured."""
    notes: tuple[str, ...] = ()
    """Sentences about limitations of the run, and about GPUs that may be missing."""
    run: str = ""
    """The path of the run's folder, empty if nothing was measured."""
    emulated: bool = False
    """True if the host is one of several that are emulated on one machine.

    Emulated hosts share cores, so their devices are not compared.
    """

    @property
    def bad_names(self) -> list[str]:
        """The names of all devices and links with a bad fault, empty if there are none.

        A name has the form ``GPU 0``, ``link GPU 0 - GPU 1`` or ``port mlx5_0/1``.
        """
        devices = [device.name for device in self.devices if device.verdict == "bad"]
        faults = [fault for fault in self.links if fault.is_bad]
        return [*devices, *(fault.text.partition(":")[0] for fault in faults)]

    @property
    def verdict(self) -> str:
        """The verdict on the host: the first of three that applies.

        ``bad``: a device or link is bad. ``did not run``: a benchmark case has no result, or
        a device was not measured. ``ok``: none of these.
        """
        if self.bad_names:
            return "bad"
        has_gap = any(device.verdict == "did not run" for device in self.devices)
        return "did not run" if self.problems or has_gap else "ok"

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the verdict: ``BAD``, ``DID_NOT_RUN`` or ``OK``."""
        return _EXIT_CODES[self.verdict]


def add_run(health: Health, devices: Sequence[Device], run: Run) -> Health:
    """Return the check of a host with the results of the run that measured its devices.

    ``health`` is the check without these results, which may already have GPUs that do not answer.
    ``devices`` are the measured devices, whose ``rates`` are still empty. In the result, they come
    before the devices of ``health``. Each measured device gets its rates, and faults for wrong
    results and for rates below those of its peers. Slow links, benchmark cases without a result,
    the bus bandwidth and the notes of the run are added too. Rates of emulated hosts are not
    compared.
    """
    rates = read_rates(run)
    [by_repetition] = rates.pop("all ranks", {(): {}}).values()
    wrong_cases = _list_wrong_cases(run)
    measured_devices = []
    for device in devices:
        reasons = device.reasons
        if device.rank in wrong_cases:
            text = f"wrong results in {', '.join(wrong_cases[device.rank])}"
            reasons = (*reasons, Fault(text=text, fix=_CORRUPT_FIX))
        device_rates = _collect_rates(rates, device.rank)
        measured_devices.append(replace(device, rates=device_rates, reasons=reasons))
    links: tuple[Fault, ...] = ()
    if not health.emulated:
        measured_devices = compare_with_peers(measured_devices)
        links = _find_slow_links(measured_devices, rates.get("pairs", {}), run)
    return replace(
        health,
        devices=(*measured_devices, *health.devices),
        links=links,
        bus_bandwidth=median(list(by_repetition.values())) if by_repetition else None,
        problems=_list_problems(run, has_bad_device=bool(wrong_cases)),
        notes=(*health.notes, *run.info.plan.limitations),
        run=str(run.path),
    )


def _collect_rates(rates: Rates, rank: int) -> dict[str, Rate]:
    """Return the rates of the device that ``rank`` measures, by the name of the quantity.

    ``rates`` holds the rates of all groups of ranks. In a repetition, the rate of the quantity
    ``pairs`` is the median over all pairs of ranks that contain the rank.
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
                unit=QUANTITY_BY_NAME[name].unit,
                value=median(list(medians.values())),
                repetitions=medians,
            )
    return device_rates


def _list_wrong_cases(run: Run) -> dict[int, list[str]]:
    """Return the names of the cases in which a rank had wrong results, each once, by rank.

    Ranks without wrong results are left out. Wrong results of a communication count only if a
    single rank has them. If several ranks have them, the rank that caused them is unknown.
    """
    names: dict[int, list[str]] = {}
    for record in run.records:
        is_local = record.case.name.startswith(("compute.", "memory."))
        if len(record.wrong_by_rank) == 1 or is_local:
            for rank in record.wrong_by_rank:
                rank_names = names.setdefault(rank, [])
                if record.case.name not in rank_names:
                    rank_names.append(record.case.name)
    return names


def _list_problems(run: Run, *, has_bad_device: bool) -> tuple[str, ...]:
    """Return sentences about the benchmark cases of a run that have no result, with the reasons.

    If ``has_bad_device``, cases with wrong results are left out, because a device has a fault for
    them. If the run ended early, the last sentence has the number of measurements that were not
    made.
    """
    wrong_cases = {record.case.id for record in run.records if record.status == "wrong"}
    plan = run.info.plan
    longer_check = f" -> parbench check --budget {2 * plan.budget_seconds:.0f}s"
    problems: dict[str, None] = {}
    for record in run.records:
        is_explained = has_bad_device and record.case.id in wrong_cases
        if record.status != "ok" and not is_explained:
            advice = longer_check if record.is_out_of_budget else ""
            problems[f"{record.case.name}: {record.reason}{advice}"] = None
    num_missing = plan.repetitions * len(plan.cases) - len(run.records)
    if num_missing > 0:
        missing = pluralize(num_missing, "measurement")
        problems[f"{missing}: the check ended early -> run it again"] = None
    return tuple(problems)


def compare_with_peers(devices: Sequence[Device]) -> list[Device]:
    """Compare the rates of each device with those of its peers, and return the updated devices.

    The peers of a device are all other devices of the same kind, such as GPUs of the same model.
    The order of the devices stays the same. In the result, each rate has its ``gap``, the fraction
    of the peers' rate that it lacks. A device that is slower than its peers has a fault. Faults
    from an earlier comparison are removed.
    """
    compared_devices = []
    for device in devices:
        reasons = tuple(reason for reason in device.reasons if not reason.is_comparison)
        compared_devices.append(replace(device, reasons=reasons))
    for kind, is_gpu in {(device.kind, device.is_gpu) for device in devices}:
        # Devices are identified by their position. Hosts may have equal names, and GPUs of several
        # hosts equal indices.
        rates: dict[str, dict[int, Mapping[int, float]]] = {}
        for position, device in enumerate(compared_devices):
            if device.kind == kind:
                for name, rate in device.rates.items():
                    rates.setdefault(name, {})[position] = rate.repetitions
        gaps = compute_gaps(rates, THRESHOLDS[is_gpu])
        for position, device in enumerate(compared_devices):
            if device.kind == kind:
                own_gaps = {
                    name: gaps[name, position] for name in rates if (name, position) in gaps
                }
                compared_devices[position] = _add_gaps(device, own_gaps)
    return compared_devices


def _add_gaps(device: Device, gaps: Mapping[str, Gap]) -> Device:
    """Return the device with the gaps to its peers in its rates, and with a fault if it is slow.

    A gap is the fraction of the peers' rate that the device lacks. ``gaps`` holds the gap in each
    quantity, by the name of the quantity. The fault lists all quantities in which the device is
    slow, and has the advice of the first.
    """
    rates = dict(device.rates)
    for name, gap in gaps.items():
        rates[name] = replace(rates[name], gap=gap.share)
    slow_gaps = {name: gap for name, gap in gaps.items() if gap.is_under}
    if not slow_gaps:
        return replace(device, rates=rates)
    texts = [
        f"{name} by {100 * gap.share:.0f} % ({gap.sigmas:.1f} sigma)"
        for name, gap in slow_gaps.items()
    ]
    fault = Fault(
        text=f"slower than its peers: {', '.join(texts)}",
        fix=find_fix(next(iter(slow_gaps)), is_gpu=device.is_gpu),
        is_comparison=True,
    )
    return replace(device, rates=rates, reasons=(*device.reasons, fault))


def _find_slow_links(
    devices: Sequence[Device], pairs: Mapping[Ranks, Mapping[int, float]], run: Run
) -> tuple[Fault, ...]:
    """Return a fault for each pair of devices between which data moves slower than in other pairs.

    A pair is compared with the other pairs that have the same connection, such as NVLink. Pairs
    with a device that has a fault for slow rates are left out.

    ``pairs`` holds the rates in B/s by pair of ranks and then by number of the repetition. ``run``
    is the run in which they were measured. Its environment has the connections.
    """
    connections = (run.info.environment or {}).get("locality") or {}
    by_connection: dict[str, dict[Ranks, Mapping[int, float]]] = {}
    for pair, by_repetition in pairs.items():
        connection = connections.get("{}-{}".format(*pair)) or "unknown connection"
        by_connection.setdefault(connection, {})[pair] = by_repetition
    names = {
        device.rank: device.name
        for device in devices
        if not any(reason.is_comparison for reason in device.reasons)
    }
    faults = []
    gaps = compute_gaps(by_connection, THRESHOLDS[devices[0].is_gpu])
    for (connection, (first, second)), gap in gaps.items():
        if gap.is_under and first in names and second in names:
            text = (
                f"link {names[first]} - {names[second]}: {100 * gap.share:.0f} % slower than other "
                f"links of this kind ({connection}), {gap.sigmas:.1f} sigma"
            )
            faults.append(Fault(text=text, fix=LINK_FIX))
    return tuple(faults)
