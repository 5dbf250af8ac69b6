"""The health of a host: verdicts on its devices, from a run and the driver's facts."""

from collections.abc import Iterator, Mapping, Sequence, Set

import msgspec

from parbench.bench.check.cases import (
    ALONE_SUFFIX,
    QUANTITIES,
    QUANTITY_BY_NAME,
    MeasuredRates,
    find_fix,
    read_rates,
)
from parbench.bench.check.infiniband import Port
from parbench.bench.check.rule import MIN_REPETITIONS, Gap, compute_gaps
from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.results.records import Record, SkipReason
from parbench.bench.results.runs import Run
from parbench.bench.results.stats import median
from parbench.bench.text import pluralize

THRESHOLDS = {"cuda": 0.05, "cpu": 0.1}  # the share that a slow device of this kind lacks
CORRUPT_FIX = "drain the host: it computes or copies wrongly without an error; run it again, then replace the device"
_IN_ALL_REPETITIONS = f"in {MIN_REPETITIONS} of {MIN_REPETITIONS} launches"
_VERDICTS = {ExitCode.OK: "ok", ExitCode.BAD: "bad", ExitCode.DID_NOT_RUN: "did not run"}
_MORE_TIME = " -> stop other work here, or allow more time (--budget 2m)"


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """The rate of a device in a quantity, in B/s or FLOP/s.

    The gap to its peers is None if it has no peers or too few repetitions.
    """

    name: str
    unit: str
    value: float  # the median of the repetitions
    launches: dict[int, float]  # by repetition
    # The share of its peers' rate that it lacks, negative if it is faster.
    under: float | None = None
    mads: float | None = None  # the same in units of the variation
    least: float | None = None  # the smallest share that would be called slower


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """A fault and its fix. It makes a device bad, or should only be watched."""

    text: str
    remedy: str
    is_bad: bool = True
    is_beside_peers: bool = False  # whether it comes from a comparison with peers


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU or a group of cores."""

    host: str
    name: str
    uuid: str  # of cores the host and their numbers
    kind: str  # devices of the same kind are peers
    rank: int
    rates: dict[str, Rate] = {}
    facts: dict[str, str] = {}  # of the driver, by topic
    reasons: tuple[Reason, ...] = ()
    ran: bool = True

    @property
    def verdict(self) -> str:
        if any(reason.is_bad for reason in self.reasons):
            return "bad"
        if not self.ran:
            return "did not run"
        return "watch" if self.reasons else "ok"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The devices and ports of a host."""

    host: str
    started: str
    seconds: float
    device: str  # cuda or cpu
    driver: str = "-"
    devices: tuple[Device, ...] = ()
    links: tuple[Reason, ...] = ()  # pairs of devices that are slow although their devices are not
    ports: tuple[Port, ...] = ()
    together: float | None = None  # bus bandwidth of all devices, None if there is only one
    problems: tuple[str, ...] = ()  # cases without a result
    notes: tuple[str, ...] = ()  # disturbances of this host
    run: str = ""
    emulated: bool = False

    @property
    def bad_names(self) -> list[str]:
        devices = [device.name for device in self.devices if device.verdict == "bad"]
        links = [link.text.partition(":")[0] for link in self.links]
        ports = [f"port {port.name}" for port in self.ports if port.is_bad]
        return [*devices, *links, *ports]

    @property
    def code(self) -> ExitCode:
        codes = [ExitCode.BAD] if self.bad_names else []
        if self.problems or not self.devices or not all(device.ran for device in self.devices):
            codes.append(ExitCode.DID_NOT_RUN)
        return combine_exit_codes(codes)

    @property
    def verdict(self) -> str:
        return _VERDICTS[self.code]


def add_measurements(
    devices: Sequence[Device], run: Run
) -> tuple[tuple[Device, ...], tuple[Reason, ...], float | None]:
    """Return the devices with rates and wrong results, slow links, and the rate of all devices."""
    rates = read_rates(run)
    wrong_texts = _describe_wrong_results(run)
    measured_devices = []
    for device in devices:
        device_rates = _collect_rates(rates, device.rank)
        wrong = [Reason(text=text, remedy=CORRUPT_FIX) for text in wrong_texts.get(device.rank, ())]
        measured_devices.append(
            msgspec.structs.replace(
                device,
                rates=device_rates,
                reasons=(*device.reasons, *wrong),
                ran=bool(device_rates) or bool(wrong),
            )
        )
    together = median(list(rates.together.values())) if rates.together else None
    return tuple(measured_devices), _find_slow_links(devices, rates, run), together


def _collect_rates(rates: MeasuredRates, rank: int) -> dict[str, Rate]:
    by_name = {name: by_rank[rank] for name, by_rank in rates.by_rank.items() if rank in by_rank}
    pairs = [by_repetition for ranks, by_repetition in rates.by_pair.items() if rank in ranks]
    if pairs:
        by_name["pairs"] = _compute_medians(pairs)
    return {name: _make_rate(name, by_repetition) for name, by_repetition in by_name.items()}


def _compute_medians(pairs: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the median rate in each repetition, of the pairs that were measured in it."""
    repetitions = sorted({repetition for pair in pairs for repetition in pair})
    return {
        repetition: median([pair[repetition] for pair in pairs if repetition in pair]) for repetition in repetitions
    }


def _make_rate(name: str, by_repetition: Mapping[int, float]) -> Rate:
    unit = QUANTITY_BY_NAME[name.removesuffix(ALONE_SUFFIX)].unit
    value = median(list(by_repetition.values()))
    return Rate(name=name, unit=unit, value=value, launches=dict(by_repetition))


def _describe_wrong_results(run: Run) -> dict[int, list[str]]:
    """Describe the wrong results of each rank.

    A wrong result of an operation of several ranks counts only if a single rank has it, because it
    can spread.
    """
    counts: dict[int, dict[str, int]] = {}
    for record in run.records:
        if record.status == "wrong":
            ranks = sorted(record.wrong_by_rank)
            is_local = record.case.name.startswith(("compute.", "memory."))
            if len(ranks) == 1 or is_local:
                for rank in ranks:
                    by_case = counts.setdefault(rank, {})
                    by_case[record.case.name] = by_case.get(record.case.name, 0) + 1
    return {
        rank: [f"wrong results in {', '.join(by_case)} ({pluralize(sum(by_case.values()), 'time')})"]
        for rank, by_case in counts.items()
    }


def list_problems(run: Run) -> tuple[str, ...]:
    """Return the reasons why cases have no result, without wrong results of a device."""
    has_wrong_device = bool(_describe_wrong_results(run))
    wrong_cases = {record.case.id for record in run.records if record.status == "wrong"}
    out_of_budget_reasons = {record.reason for record in run.records if record.is_out_of_budget}
    cases_by_reason: dict[str, list[str]] = {}
    for record in run.records:
        if record.status != "ok" and not (has_wrong_device and _is_wrong(record, wrong_cases)):
            cases_by_reason.setdefault(record.reason, []).append(record.case.name)
    problems = []
    for reason, names in cases_by_reason.items():
        fix = _MORE_TIME if reason in out_of_budget_reasons else ""
        problems.append(f"{', '.join(dict.fromkeys(names))}: {reason}{fix}")
    plan = run.info.plan
    num_missing = plan.launches * len(plan.cases) - len(run.records)
    if num_missing > 0:
        problems.append(f"not reached: {pluralize(num_missing, 'measurement')}")
    return tuple(problems)


def _is_wrong(record: Record, wrong_cases: Set[str]) -> bool:
    """Return whether a case was wrong, or is skipped because it was wrong before."""
    is_repeated = record.skip_reason is SkipReason.EARLIER_FAILURE
    return record.status == "wrong" or (is_repeated and record.case.id in wrong_cases)


def compare_with_peers(devices: Sequence[Device], threshold: float) -> tuple[Device, ...]:
    """Compare each device with all others of its kind. The order of devices stays."""
    # Devices are identified by their position. Hosts may have equal names, and GPUs of several
    # hosts equal indices.
    compared = {position: _without_comparison(device) for position, device in enumerate(devices)}
    for kind in {device.kind for device in devices}:
        peers = {key: device for key, device in compared.items() if device.kind == kind and device.ran}
        rates = {
            name: {key: device.rates[name].launches for key, device in peers.items() if name in device.rates}
            for name in _list_rate_names()
        }
        gaps = compute_gaps(rates, threshold)
        for key, device in peers.items():
            own_gaps = {name: gaps[name, key] for name in rates if (name, key) in gaps}
            compared[key] = _with_gaps(device, own_gaps)
    return tuple(compared.values())


def _list_rate_names() -> Iterator[str]:
    for quantity in QUANTITIES:
        yield quantity.name
        yield quantity.name + ALONE_SUFFIX


def _without_comparison(device: Device) -> Device:
    reasons = tuple(reason for reason in device.reasons if not reason.is_beside_peers)
    return msgspec.structs.replace(device, reasons=reasons)


def _with_gaps(device: Device, gaps: Mapping[str, Gap]) -> Device:
    rates = dict(device.rates)
    for name, gap in gaps.items():
        rates[name] = msgspec.structs.replace(rates[name], under=gap.share, mads=gap.mads, least=gap.least)
    slow = {name: gap for name, gap in gaps.items() if gap.is_under}
    reasons = (*device.reasons, *_explain_slow_rates(slow, device))
    return msgspec.structs.replace(device, rates=rates, reasons=reasons)


def _explain_slow_rates(gaps: Mapping[str, Gap], device: Device) -> tuple[Reason, ...]:
    """Return one reason for each fix, with the quantities that it is for.

    A rate that was measured alone counts only if the rate next to the other devices is not slow
    too.
    """
    kind = "cpu" if device.kind.startswith("cores") else "cuda"
    texts_by_fix: dict[str, list[str]] = {}
    for name, gap in gaps.items():
        if name.endswith(ALONE_SUFFIX) and name.removesuffix(ALONE_SUFFIX) in gaps:
            continue
        texts = texts_by_fix.setdefault(find_fix(name, kind), [])
        peers = "" if texts else " under its peers"
        texts.append(f"{100 * gap.share:.0f} %{peers} in {name} ({gap.mads:.1f} MADs)")
    return tuple(
        Reason(text=f"{', '.join(texts)}, {_IN_ALL_REPETITIONS}", remedy=fix, is_beside_peers=True)
        for fix, texts in texts_by_fix.items()
    )


def _find_slow_links(devices: Sequence[Device], rates: MeasuredRates, run: Run) -> tuple[Reason, ...]:
    """Find pairs that are slower than others with the same connection, unlike their devices.

    A device all of whose pairs are slow is slow itself, which its own rate shows.
    """
    slow = _compare_pairs(rates, run)
    num_peers = len(devices) - 1
    counts = {rank: sum(rank in pair for pair in slow) for pair in slow for rank in pair}
    name_by_rank = {device.rank: device.name for device in devices}
    reasons = []
    for pair, text in slow.items():
        if num_peers < 2 or all(counts[rank] < num_peers for rank in pair):
            first, second = (name_by_rank[rank] for rank in pair)
            fix = find_fix("pairs", "cuda")
            reasons.append(Reason(text=f"{first} - {second}: {text}", remedy=fix))
    return tuple(reasons)


def _compare_pairs(rates: MeasuredRates, run: Run) -> dict[tuple[int, int], str]:
    """Return the slow pairs of ranks, each with the text of its reason."""
    connections = (run.info.environment or {}).get("locality") or {}
    by_connection: dict[str, dict[tuple[int, int], Mapping[int, float]]] = {}
    for (first, second), by_repetition in rates.by_pair.items():
        connection = connections.get(f"{first}-{second}") or ""
        by_connection.setdefault(connection, {})[first, second] = by_repetition
    slow = {}
    for connection, pairs in by_connection.items():
        gaps = compute_gaps({"pairs": pairs}, THRESHOLDS[run.info.plan.device])
        for (_, pair), gap in gaps.items():
            if gap.is_under:
                peers = f"its peers with {connection}" if connection else "its peers"
                share = f"{100 * gap.share:.0f} % under {peers}"
                slow[pair] = f"{share}, {gap.mads:.1f} MADs, {_IN_ALL_REPETITIONS}"
    return slow
