"""``parbench run``: from a plan to a finished run folder, with its progress on stderr."""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from parbench.bench.launch.budget import RESERVE, by_launch, prices_of
from parbench.bench.launch.driver import Driver, StartRanks, remaining
from parbench.bench.launch.launchers import ForkServer, SrunLauncher, loopback_variables
from parbench.bench.launch.monitor import START_SECONDS
from parbench.bench.launch.processes import terminated_as_interrupted
from parbench.bench.machine.doctor import examine_here
from parbench.bench.machine.environment import DISTURBANCES, VOLATILE
from parbench.bench.machine.machine import find_package_version
from parbench.bench.machine.mpi import variables_of_mpi
from parbench.bench.machine.slurm_allocation import (
    Allocation,
    check_srun,
    choose_layout,
    inspect_rank_machine,
    list_host_addresses,
)
from parbench.bench.machine.world_spec import Joined
from parbench.bench.plan.cases import EXPLAINER, Case
from parbench.bench.plan.options import Options, plan_run
from parbench.bench.plan.plan import Plan, sampling_seconds
from parbench.bench.results.budgets import read_budgets
from parbench.bench.results.records import Record, encode_record
from parbench.bench.results.runs import Run, create_run, load_run, open_writer
from parbench.bench.text import UserError, counted, format_duration, parse_duration

_STARTUP_SECONDS = 4.0  # for imports and the report


class Display(ExitStack):
    """Shows progress, whose end is expected within the budget; what went badly is a line of its own at once.

    With ``as_json`` every record is on stdout, too.
    """

    def __init__(
        self, total: int, budget_seconds: float, console: Console | None = None, *, as_json: bool = False
    ) -> None:
        super().__init__()
        self._as_json = as_json
        self._console = console or Console(stderr=True, soft_wrap=True, highlight=False)
        self._total, self._done, self._budget_seconds = total, 0, budget_seconds
        self._began = self._said = time.monotonic()
        self._prefix = ""
        done = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        left = TextColumn("{task.fields[left]}")
        bar = Progress(*done, left, console=self._console, disable=not self._console.is_terminal)
        self._bar = self.enter_context(bar)
        self._task = self._bar.add_task("starting ranks", total=1.0, left="")

    def launch(self, number: int, of: int, cases: int) -> None:
        self._prefix = f"launch {number}/{of}"
        self._bar.update(self._task, description=f"{self._prefix}: starting ranks")
        self._plain(f"{self._prefix}: {counted(cases, 'case')}")

    def visit(self, case: Case, done: float) -> None:
        spent = time.monotonic() - self._began
        left = max(min(spent * (1 / done - 1), self._budget_seconds - spent), 0.0) if done else self._budget_seconds
        told = f"about {format_duration(left)} left" if left >= 1 else "about to end"
        self._bar.update(self._task, description=f"{self._prefix}: {case.name}", completed=done, left=told)
        if done and time.monotonic() - self._said > 5.0:
            self._plain(f"{self._prefix}: {done:.0%} of the run, {told}")

    def tell(self, sentence: str) -> None:
        self._console.print(sentence, markup=False)

    def record(self, record: Record) -> None:
        if self._as_json:
            sys.stdout.buffer.write(encode_record(record))
            sys.stdout.buffer.flush()
        self._done += 1
        if record.status in ("failed", "hang", "wrong"):
            self._console.print(f"{record.status}: {record.case.label}: {record.reason}", markup=False)

    def stopped(self, why: str, path: Path) -> None:
        self.close()
        told = f"{why}: {self._done} of {self._total} cases measured; go on with: parbench run --resume {path}"
        self._console.print(told, markup=False)

    def _plain(self, line: str) -> None:
        self._said = time.monotonic()
        if not self._console.is_terminal:
            self._console.print(line, markup=False)


def run_options(
    options: Options,
    modules: Sequence[str],
    *,
    out: Path,
    resume_path: Path | None,
    as_json: bool,
    cpus: Sequence[Sequence[int]] = (),
    budgets: Path | None = None,
) -> Path | None:
    """Do what ``parbench run`` was asked and return the run's folder, None on a rank that only joins.

    ``cpus`` are those that each rank of this host is bound to, none if ranks are not. A bad file of ``budgets`` is
    refused before any rank starts; whether they are kept is told afterwards.
    """
    os.environ.update(variables_of_mpi(os.environ))
    joined = Joined.find(os.environ)
    if joined is not None and joined.rank != 0:
        from parbench.bench.rank.worker import join  # imports torch, which only a rank needs

        join(START_SECONDS)
        return None
    if resume_path is None:
        plan = plan_run(options, modules, joined)
        if budgets is not None:
            read_budgets(budgets, plan.cases, plan.skipped)
        path, info = create_run(out, plan, find_package_version("parbench") or "-")
        return _drive(
            Run(path=path, info=info, records=()), joined, as_json=as_json, nodelist=options.nodelist, cpus=cpus
        )
    if joined is not None:
        raise UserError("--resume starts its own ranks, and this one is there already (RANK): start it by itself")
    for f in fields(Options):
        given = getattr(options, f.name)
        if given and given != f.default and f.name not in ("nodelist", "budget", "preset_overrides"):
            words = {"settings": "--set, --sizes and --dtype", "plan_file": "--plan"}
            option = words.get(f.name, f"--{f.name.replace('_', '-')}")
            raise UserError(f"--resume goes on with the run's own plan; leave out {option}")
    if budgets is not None:
        plan = load_run(resume_path).info.plan
        read_budgets(budgets, plan.cases, plan.skipped)
    return resume(resume_path, as_json=as_json, nodelist=options.nodelist, budget=options.budget)


def resume(path: Path, *, as_json: bool, nodelist: str | None = None, budget: str | None = None) -> Path:
    """Measure what a run has no record of yet and what its budget left out; nothing is done twice.

    It is done on these nodes if they are said, and within this budget, or else the plan's, or what it needs if known.
    """
    run = load_run(path)
    if run.info.plan.spread is not None:
        check_srun()
        choose_layout(Allocation.find(os.environ), **msgspec.structs.asdict(run.info.plan.spread))
    elif nodelist is not None:
        raise UserError(f"--nodelist {nodelist}: {path} was not measured by srun, but on one node")
    plan = run.info.plan
    launches, prices = by_launch(remaining(run, fills=True)).values(), prices_of(run)
    needed = RESERVE * sum(map(prices.launch, launches))
    seconds = max(plan.budget_seconds, needed) if budget is None else parse_duration(budget)
    told = f"{counted(sum(map(len, launches)), 'measurement')} of {plan.launches * len(plan.cases)} to make"
    told += f", about {format_duration(needed)}" if needed else ""
    run = replace(run, info=replace(run.info, plan=replace(plan, budget_seconds=seconds)))
    return _drive(run, None, as_json=as_json, nodelist=nodelist, told=told)


def describe_duration(plan: Plan) -> str:
    """Return the extent of a run whose duration follows from the number of its cases."""
    extent = f"{counted(len(plan.cases), 'case')}, {counted(plan.launches, 'repetition')}"
    return f"{extent}, about {format_duration(_expected_seconds(plan))} (--launches and --budget change it)"


def _expected_seconds(plan: Plan) -> float:
    per_repetition = 1.0 + sampling_seconds(plan.cases, plan.measure)
    return min(_STARTUP_SECONDS + plan.launches * per_repetition, plan.budget_seconds)


def _drive(
    run: Run,
    joined: Joined | None,
    *,
    as_json: bool,
    nodelist: str | None,
    told: str = "",
    cpus: Sequence[Sequence[int]] = (),
) -> Path:
    began, pending = time.monotonic(), remaining(run, fills=True)
    skipped = () if run.records else run.info.plan.skipped
    with ExitStack() as stack:
        writer = stack.enter_context(open_writer(run.path))
        stack.enter_context(terminated_as_interrupted())
        total = len(pending) + len(skipped)
        display = stack.enter_context(Display(total, _expected_seconds(run.info.plan), as_json=as_json))
        if told:
            display.tell(told)
        elif run.info.plan.measure.seconds_per_case is not None:
            display.tell(describe_duration(run.info.plan))
        start = _starter(run, joined, nodelist, stack, cpus)
        # The statistics of records need it. Imported while ranks start, it takes no core from a measurement.
        import scipy.stats  # type: ignore[import-untyped]  # noqa: F401

        hosts, facts = _whereabouts(run.info.plan, joined)
        findings = examine_here(os.environ, gpus=run.info.plan.device == "cuda")
        nodes_apart = run.info.plan.spread is not None  # only between them an interface counts
        disturbing = {f.topic: f.facts for f in findings if f.disturbs and (nodes_apart or f.topic != "interface")}
        facts |= {VOLATILE: {DISTURBANCES: disturbing}}
        driver = Driver(run, writer, start, display, hosts=hosts, facts=facts, began=began)
        try:
            driver.drive(pending, skipped)
        except (KeyboardInterrupt, UserError) as error:
            display.stopped(str(error) or "interrupted", run.path)
    return run.path


def _whereabouts(plan: Plan, joined: Joined | None) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return this host's addresses under which ranks find the driver, and what it alone knows of the environment."""
    if plan.spread is None:
        return ("127.0.0.1" if joined is None or joined.one_node else os.environ["MASTER_ADDR"],), {}
    allocation = Allocation.find(os.environ)
    slurm = {"job": allocation.job, "nodelist": allocation.nodelist, "distribution": plan.spread.distribution}
    return list_host_addresses(os.environ), {"slurm": slurm}


def _starter(
    run: Run, joined: Joined | None, nodelist: str | None, stack: ExitStack, cpus: Sequence[Sequence[int]]
) -> StartRanks:
    if joined is not None:
        from parbench.bench.rank.worker import starter  # imports torch, which only a joined driver needs

        return starter(START_SECONDS)
    logs, plan = run.path / "logs", run.info.plan
    machine = inspect_rank_machine(os.environ, None if plan.spread is None else Allocation.find(os.environ))
    threads = machine.cores // (plan.nproc if plan.spread is None else plan.spread.ntasks_per_node)
    wanted = {"OMP_NUM_THREADS": str(max(1, threads)), **(loopback_variables() if plan.spread is None else {})}
    own = {name: value for name, value in wanted.items() if name not in os.environ}
    if plan.spread is not None:
        spread = plan.spread
        return lambda number, variables: SrunLauncher(spread, logs, number, {**own, **variables}, nodelist)
    # a user's own step may do anything when it is imported
    targets = {EXPLAINER if case.is_own else case.target for case in plan.cases}
    modules = sorted({target.partition(":")[0] for target in targets})
    server = stack.enter_context(ForkServer(modules, own, logs / "fork-server.log", START_SECONDS))
    return lambda number, variables: server.launch(plan.nproc, logs / f"gang-{number}", variables, cpus)
