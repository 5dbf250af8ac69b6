"""The driver: launches of gangs, cases in turn, a record for each. Without torch."""

import itertools
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from msgspec.structs import replace

from parbench.bench.files import convert_write_errors
from parbench.bench.launch.budget import Prices, Spent, budget_of_all, by_launch, prices_of
from parbench.bench.launch.control_channel import DEVICE_VARIABLE, OUT_OF_BUDGET, DriverServer, Hello, Job, Outcome
from parbench.bench.launch.launchers import Launcher
from parbench.bench.launch.monitor import START_SECONDS, RankMonitor
from parbench.bench.launch.visits import order_of_visits, spread_over_visits
from parbench.bench.machine.environment import difference, format_cpus, hoist, relations
from parbench.bench.machine.gpu import GpuReport, inspect_gpus, sample_gpus
from parbench.bench.machine.gpu_inventory import REPORT_VARIABLE, GpuInventory
from parbench.bench.machine.host_load import LoadMeter
from parbench.bench.machine.slurm_allocation import NodeLayout
from parbench.bench.plan.cases import Case
from parbench.bench.plan.plan import Skipped, case_weight, sampling_seconds
from parbench.bench.results.metrics import MetricValue, find_metric, make_value, make_values
from parbench.bench.results.records import Record, Samples, SkipReason, WorldInfo, compute_noise
from parbench.bench.results.runs import (
    LaunchInfo,
    RecordWriter,
    Run,
    add_launch,
    load_run,
    make_trace_path,
    utc_now,
    write_run_info,
)
from parbench.bench.results.samples import make_samples_path
from parbench.bench.results.stats import (
    MIN_ITERATIONS_FOR_P99,
    MIN_ITERATIONS_FOR_Q10,
    estimate_median,
    quantile,
)
from parbench.bench.text import format_duration

_FAREWELL_SECONDS = 10.0
_GONE_SECONDS = 30.0  # a driver may take this long to free what a killed process held on a GPU
_SLACK_BYTES = 256 << 20  # of a GPU's memory in use, which changes by itself
# enough for ranks on a host that was only busy; a dead one is not waited for as long as at first
_RETRY_SECONDS = 30.0
# what was seen of cases that have visits to come is on disk this long after a launch began, then after twice as long
_KEPT_SECONDS = 60.0
_MOST_NAMED = 3
_NOT_AGAIN = ("failed", "hang", "wrong")

# starts the gang of a number, its ranks told by these variables where the server is
StartRanks = Callable[[int, Mapping[str, str]], Launcher]


class Audience(Protocol):
    """Who is told how the run goes: a launch begins with so many cases, a share of all is done, a case has ended."""

    def launch(self, number: int, of: int, cases: int) -> None: ...
    def visit(self, case: Case, done: float) -> None: ...
    def tell(self, sentence: str) -> None: ...
    def record(self, record: Record) -> None: ...


def remaining(run: Run, *, fills: bool = False) -> tuple[tuple[int, Case], ...]:
    """Return what has no record yet, launch by launch; with ``fills`` also what the budget left out."""
    done = {(record.launch, record.case.id) for record in run.records if not (fills and record.is_out_of_budget)}
    whole = itertools.product(range(run.info.plan.launches), run.info.plan.cases)
    return tuple((launch, case) for launch, case in whole if (launch, case.id) not in done)


class Driver:
    """Measures what is pending of one run and writes a record for each case."""

    def __init__(
        self,
        run: Run,
        writer: RecordWriter,
        start_gang: StartRanks,
        audience: Audience,
        *,
        hosts: Sequence[str],
        facts: Mapping[str, Mapping[str, Any]],
        began: float,
    ) -> None:
        self._noted = began
        self._path, self._info, self._plan = run.path, run.info, run.info.plan
        self._writer, self._start_gang, self._audience = writer, start_gang, audience
        self._hosts, self._facts = hosts, facts
        on_cuda = self._plan.device == "cuda"
        self._gpus = GpuInventory(inspect_gpus(os.environ) if on_cuda else GpuReport())
        self._needs_gpu_reports = on_cuda and tuple(hosts) != ("127.0.0.1",)  # of other hosts
        self._silent: set[str] = set()
        self._doubts: tuple[str, ...] = ()
        self._leftovers: tuple[str, ...] = ()
        self._bad = {record.case.id: record for record in run.records if record.status in _NOT_AGAIN}
        self._gangs = len(list((run.path / "logs").glob("gang-*")))
        self._may_retry = True
        self._prices, self._made = prices_of(run), list[Spent]()
        self._told = False
        self._began = self._deadline = 0.0
        self._progress = 0, 1
        self._left_out: dict[str, Case] = {}
        self._widths: dict[str, float | None] = {}
        self._begun: dict[str, tuple[Case, Outcome]] = {}
        self._environment: dict[str, Any] = {}
        self._world = WorldInfo(size=self._plan.nproc, nodes=1, backend=self._plan.backend, device=self._plan.device)

    def drive(self, pending: Sequence[tuple[int, Case]], skipped: Sequence[Skipped] = ()) -> None:
        """Record what the plan skips, and measure what is pending within its budget, each launch in new ranks.

        What a launch costs is known after the first: then as many are made as there is time for, in which all cases
        have their turn. A later launch spends its time where intervals are still wide.
        """
        for each in skipped:
            self._write(0, each.case, Outcome(status="skipped", reason=each.reason, skip_reason=SkipReason.IMPOSSIBLE))
        # rather than be left out after all others, the last cases may take longer
        self._overtime = min(0.1 * self._plan.budget_seconds, 5.0)
        self._end = time.monotonic() + self._plan.budget_seconds
        launches = by_launch(pending)
        numbers, self._rest = [*launches], [*launches.values()]
        held = len(numbers)
        for made, launch in enumerate(numbers):
            if not held:
                break
            self._progress = made, made + held
            self._audience.launch(launch + 1, self._plan.launches, len(self._rest[0]))
            self._leave(launch, [case for case in self._rest[0] if case.id in self._bad])
            self._launch(launch, [case for case in self._rest[0] if case.id not in self._bad])
            del self._rest[0]
            left, before = self._end + self._overtime - time.monotonic(), made + held
            held = self._prices.held(left, self._rest) if left > 0 else 0
            if self._prices.cases and self._rest and 1 + made + held < before:
                took = format_duration(self._prices.launch(self._rest[0]))
                holds = f"holds {1 + made + held} of {len(numbers)} launches"
                self._tell_short(f"a launch takes about {took}", holds, prices_of(load_run(self._path)))
        for launch, cases in zip(numbers[len(numbers) - len(self._rest) :], self._rest, strict=True):
            self._leave(launch, cases)
        never = [case for case in self._left_out.values() if case.id not in self._prices.cases]
        if never and self._prices.cases:
            told = [f"{case.label} (about {format_duration(self._prices.case(case))})" for case in never[:_MOST_NAMED]]
            told += [f"{len(never) - len(told)} more"] if len(never) > len(told) else []
            self._audience.tell(f"no time for {', '.join(told)}; go on with: parbench run --resume {self._path}")

    def _leave(self, launch: int, cases: Sequence[Case]) -> None:
        """Record that these are not measured: they broke before, or there is no time."""
        for case in cases:
            bad = self._bad.get(case.id)
            outcome = OUT_OF_BUDGET
            if bad is not None:
                reason = f"not tried again: {bad.status} in launch {bad.launch + 1} ({bad.reason})"
                outcome = Outcome(status="skipped", reason=reason, skip_reason=SkipReason.EARLIER_FAILURE)
            self._write(launch, case, outcome)

    def _launch(self, launch: int, cases: list[Case]) -> None:
        """Measure the cases; a gang that breaks ends its case, and a new one goes on with the rest.

        What was seen of cases whose visits were not all made is recorded at last, and now and then before, for a kill
        of the driver must lose little.
        """
        self._begun.clear()
        self._made.clear()
        self._keep_seconds, self._kept = _KEPT_SECONDS, time.monotonic()
        self._began = self._deadline = 0.0
        try:
            self._gangs_of(launch, cases)
        finally:
            for case, seen in list(self._begun.values()):
                self._write(launch, case, replace(seen, stop="budget"))
        if self._began and any(one.least is not None for one in self._made):
            self._prices = self._prices.after(time.monotonic() - self._began, self._made)

    def _gangs_of(self, launch: int, cases: list[Case]) -> None:
        while cases:
            with ExitStack() as stack:
                monitor, began = self._start(stack), time.monotonic()
                trouble = monitor.assemble(_RETRY_SECONDS if self._silent else START_SECONDS)
                if trouble is None:
                    self._may_retry = True
                    self._learn(sorted(monitor.hellos.values(), key=lambda hello: hello.rank))
                    if not self._deadline:
                        self._began = began
                        sampling_end = time.monotonic() + sampling_seconds(cases, self._plan.measure)
                        self._deadline = min(self._share_of(began), sampling_end)
                    job = self._job(launch, cases, self._deadline, monitor.hellos)
                    load = LoadMeter()
                    monitor.send(job)
                    try:
                        ended = self._visits(monitor, launch, job)
                    finally:
                        self._note(launch, monitor, load)
                    cases = [case for case in cases if case.id not in ended]
                elif self._may_retry and monitor.can_restart and not self._silent:
                    self._may_retry = False
                else:
                    if self._silent:
                        told = f"{', '.join(sorted(self._silent))} did not answer when the last gang hung"
                        trouble = replace(trouble, reason=f"{trouble.reason}; {told}")
                    for case in cases:
                        if case.id not in self._begun:
                            self._write(launch, case, trouble)
                    return
                if not monitor.can_restart:
                    return

    def _share_of(self, began: float) -> float:
        """Return when a launch that began then is to end: those that there is time for share it."""
        prices = self._prices
        if prices.start is None:
            prices = Prices(start=time.monotonic() - began)
        return began + (self._end - began) / max(prices.held(self._end - began, self._rest), 1)

    def _note(self, launch: int, monitor: RankMonitor, meter: LoadMeter) -> None:
        """Keep how long the launch took, and its host's load where all ranks share the driver's."""
        here = {hello.host for hello in monitor.hellos.values()} == {socket.gethostname()}
        load, now = meter.read(monitor.cpu_seconds()) if here else None, time.monotonic()
        add_launch(self._path, LaunchInfo(launch=launch, seconds=round(now - self._noted, 3), load=load))
        self._noted = now

    def _start(self, stack: ExitStack) -> RankMonitor:
        server, held = stack.enter_context(DriverServer(*self._hosts)), self._held()
        variables = {DEVICE_VARIABLE: self._plan.device, REPORT_VARIABLE: "1" if self._needs_gpu_reports else "0"}
        gang = self._start_gang(self._gangs, {**server.variables(), **variables})
        if not gang.can_restart:
            stack.pop_all()  # hung up by this process's end: a launcher ends it too, with the first rank to end
        self._gangs += 1
        monitor = RankMonitor(server, gang, self._plan.nproc)
        stack.callback(self._clear, gang, monitor, held)
        return monitor

    def _clear(self, gang: Launcher, monitor: RankMonitor, held: Mapping[str, int]) -> None:
        """End the ranks, and return when they and what they held on GPUs are gone: the next would meet it."""
        gang.end(monitor.hellos.values())
        if not gang.can_restart:
            return
        deadline = time.monotonic() + _GONE_SECONDS
        left = monitor.leftovers(_GONE_SECONDS)
        own = {hello.place.gpu for hello in monitor.hellos.values() if hello.place} & held.keys()
        while more := {gpu: held_now - held[gpu] for gpu, held_now in self._held().items() if gpu in own}:
            more = {gpu: size for gpu, size in more.items() if size > _SLACK_BYTES}
            if not more or time.monotonic() > deadline:
                left += [f"{size / 2**30:.1f} GiB on {gpu}" for gpu, size in more.items()]
                break
            time.sleep(0.5)
        told = f"{_GONE_SECONDS:.0f} s after the ranks before these were ended, there were still {', '.join(left)}"
        self._leftovers = (told,) if left else ()

    def _held(self) -> dict[str, int]:
        """Return the memory (bytes) in use on this host's GPUs, by UUID; nothing on the CPU or where it is not told."""
        gpus = sample_gpus(os.environ) if self._plan.device == "cuda" else ()
        return {gpu.uuid: gpu.memory_used_bytes for gpu in gpus if gpu.uuid and gpu.memory_used_bytes is not None}

    def _job(self, launch: int, cases: list[Case], deadline: float, hellos: Mapping[int, Hello]) -> Job:
        measure = self._plan.measure
        visits, more = order_of_visits(cases, measure.seed, launch, measure.more_visits)
        return Job(
            plan=replace(self._plan, cases=tuple(cases), skipped=()),
            visits=[*visits, *more],
            more=len(more),
            weights=[self._weight(case) for case in cases],
            prices=[self._prices.case(case) for case in cases],
            budget_seconds=max(deadline - time.monotonic(), 0.0),
            run_seconds=max(self._end + self._overtime - time.monotonic(), 0.0),
            hosts=tuple(hellos[rank].host for rank in sorted(hellos)),
            meeting=hellos[0].meeting,
        )

    def _weight(self, case: Case) -> float:
        """Return a case's share of time: more for steps than for collectives, and for what is not yet precise."""
        usual, width = case_weight(case), self._widths.get(case.id)
        return usual if width is None else usual * min(max(width / self._plan.measure.precision, 0.2), 5.0)

    def _visits(self, monitor: RankMonitor, launch: int, job: Job) -> set[str]:
        """Record each case with its last visit; return those that have a record when the gang is done or broken."""
        ended, weights, passed = set[str](), spread_over_visits(job, job.weights), 0.0
        for number, index in enumerate(job.visits):
            case, done = job.plan.cases[index], passed / sum(weights)
            passed += weights[number]
            if case.id in ended:
                continue
            made, of = self._progress
            self._audience.visit(case, (made + done) / of)
            began = time.monotonic()
            result = monitor.outcome(number, self._plan.timeout_seconds)
            if result.more:
                self._begun[case.id] = case, result
                if began > self._kept + self._keep_seconds:
                    self._keep_seconds *= 2
                    for one, seen in self._begun.values():
                        self._writer.write(self._record(launch, one, replace(seen, stop="budget")))
                continue
            ended.add(case.id)
            if result.ranks:
                self._write(launch, case, replace(result, wall_seconds=time.monotonic() - began))
                self._silent = monitor.silent_hosts() if result.status == "hang" else set()
                return ended
            self._write(launch, case, result)
            if not self._told and self._prices.start is None:
                known = ended | self._begun.keys()
                self._look_ahead(case, [one for one in job.plan.cases if one.id not in known])
        monitor.farewell(_FAREWELL_SECONDS)
        return ended

    def _look_ahead(self, case: Case, to_come: Sequence[Case]) -> None:
        """Tell, once it is known in the first launch, that there is no time for all that is to come in it."""
        left = self._end + self._overtime - time.monotonic()
        prices = Prices().after(time.monotonic() - self._began, self._made)
        if prices.cases and sum(map(prices.case, to_come)) > left:
            self._told = True
            took = format_duration(self._made[-1].seconds)
            holds = f"hardly holds one launch of {len(self._rest[0])} cases"
            self._tell_short(f"{case.label} took {took}", holds, prices)

    def _tell_short(self, why: str, what: str, prices: Prices) -> None:
        budget, needed = format_duration(self._plan.budget_seconds), budget_of_all(self._plan, prices)
        self._audience.tell(f"{why}: the budget of {budget} {what}; --budget {needed} holds all")

    def _learn(self, hellos: list[Hello]) -> None:
        """Keep what all ranks share in run.json, and what is different from it for the records to come."""
        common, rest = hoist(self._gpus.add_facts([hello.environment for hello in hellos]))
        self._needs_gpu_reports = False
        common |= {name: {**common.get(name, {}), **of} for name, of in self._facts.items()}
        places = [hello.place for hello in hellos if hello.place is not None]
        if len(places) == len(hellos):
            common |= {"locality": relations(places, self._gpus.links), **rank_placement(hellos)}
        if self._info.environment is None:
            self._info = replace(self._info, environment=common)
            with convert_write_errors(self._path / "run.json"):
                write_run_info(self._path, self._info)
        changed = difference(self._info.environment or {}, common)
        self._environment = {"changed": changed} if changed else {}
        self._environment |= {f"rank {hello.rank}": odd for hello, odd in zip(hellos, rest, strict=True) if odd}
        self._world = replace(self._world, nodes=len({hello.host for hello in hellos}))
        self._doubts = placement_warnings(self._plan.spread, hellos) if self._plan.spread else ()

    def _record(self, launch: int, case: Case, result: Outcome) -> Record:
        told = ["status", "reason", "skip_reason", "wrong_by_rank", "culprits", "stop", "check"]
        told += ["arrival", "injected", "details", "ranks"]
        seen = {name: getattr(result, name) for name in told} | {"environment": self._environment, "started": utc_now()}
        samples = Samples(values=result.seconds, visits=result.visits)
        seen |= {"samples": samples, "noise": compute_noise(samples)}
        seen["notes"] = [*self._plan.notes, *self._doubts, *self._leftovers, *result.notes]
        seen["metrics"] = metrics_of(result)
        seen["seconds"] = round(result.wall_seconds, 6)
        seen["emulation"] = self._plan.emulation
        return Record(case=case, world=self._world, launch=launch, **seen)

    def _write(self, launch: int, case: Case, result: Outcome) -> None:
        record = self._record(launch, case, result)
        self._begun.pop(case.id, None)
        self._made.append(Spent.on(record))
        if record.is_out_of_budget:
            self._left_out[case.id] = case
        if record.status in _NOT_AGAIN:
            self._bad[case.id] = record
        self._writer.write(record)
        self._audience.record(record)
        if result.seconds:
            self._widths[case.id] = estimate_median(result.seconds, result.visits).half_width
        for name, content in ((make_samples_path(record), result.raw), (make_trace_path(record), result.timeline)):
            if content:
                self._writer.write_file(name, content)


def metrics_of(outcome: Outcome) -> dict[str, MetricValue]:
    """Return the duration with its percentiles, the rates, and who waited; nothing without samples."""
    if not outcome.seconds:
        return {}
    time, n = estimate_median(outcome.seconds, outcome.visits), len(outcome.seconds)
    found = {outcome.headline: make_value("time", time)}  # a user's own benchmark may call its duration as it likes
    for name, part, least in (("q10", 0.1, MIN_ITERATIONS_FOR_Q10), ("p99", 0.99, MIN_ITERATIONS_FOR_P99)):
        if n >= least:
            told = f"{100 * part:.0f}th percentile of {n} iterations"
            found[f"{outcome.headline}_{name}"] = make_value(f"time_{name}", quantile(outcome.seconds, part), told)
    for work in outcome.work:  # an amount over the time; unknown where nothing is moved, or in no time
        times = (time.value, time.high, time.low)
        rate, low, high = (work.amount / seconds if seconds and work.amount else None for seconds in times)
        known, method = find_metric(work.name), f"{work.amount:.12g} over the {time.method}"
        unit, better = (known.unit, known.better) if known else (work.unit, "higher")
        found[work.name] = MetricValue(value=rate, unit=unit, better=better, low=low, high=high, method=method)
    medians = {"skew": outcome.skew_seconds, "transfer": outcome.transfer_seconds}
    medians |= {"last_arriver": outcome.last_arriver_seconds}
    if outcome.issue_seconds:
        waits = [whole - issue for whole, issue in zip(outcome.seconds, outcome.issue_seconds, strict=True)]
        medians = {"issue_time": outcome.issue_seconds, "wait_time": waits, **medians}
    found |= make_values(
        {name: estimate_median(seconds, outcome.visits) for name, seconds in medians.items() if seconds}
    )
    return found | outcome.explained


def rank_placement(hellos: Sequence[Hello]) -> dict[str, Any]:
    """Return each rank's host and switch path in rank order; nothing where all share one host."""
    hosts = [hello.host for hello in hellos]
    switches = {hello.host: hello.place.switches for hello in hellos if hello.place and hello.place.switches}
    return {"hosts": hosts, **({"switches": switches} if switches else {})} if len(set(hosts)) > 1 else {}


def placement_warnings(layout: NodeLayout, hellos: Sequence[Hello]) -> tuple[str, ...]:
    """Return in words where ranks sit otherwise than was asked: nodes, ranks on each, their order, their CPUs."""
    hosts = [hello.host for hello in hellos]
    counts = Counter(hosts)
    found, each = [], layout.ntasks_per_node
    asked = {"block": [name for name in counts for _ in range(each)], "cyclic": [*counts] * each}[layout.distribution]
    if len(counts) != layout.nodes or set(counts.values()) != {each}:
        told = ", ".join(f"{count} on {host}" for host, count in counts.items())
        found.append(f"{layout.nodes} nodes with {each} ranks each were asked for; there are {told}")
    elif hosts != asked:
        found.append(f"distribution {layout.distribution} was asked for; ranks are on {', '.join(hosts)}")
    placed = [(hello, hello.place) for hello in hellos if hello.place]
    for hello, place in placed:
        promised = str(hello.environment.get("variables", {}).get("SLURM_CPUS_PER_TASK", ""))
        if promised.isdecimal() and len(place.cpus) < int(promised):
            cpus = format_cpus(place.cpus)
            found.append(f"rank {hello.rank} on {hello.host} may use CPUs {cpus}; SLURM_CPUS_PER_TASK is {promised}")
    alone = Counter((hello.host, place.cpus[0]) for hello, place in placed if len(place.cpus) == 1)
    return (*found, *(f"{n} ranks share CPU {cpu} of {host}" for (host, cpu), n in alone.items() if n > 1))
