"""``parbench run``: from a plan to a finished run folder."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from bench.launch.driver import Driver, StartRanks, remaining
from bench.launch.launchers import Launcher, SrunLauncher, TorchrunLauncher, loopback_variables
from bench.launch.monitor import START_SECONDS
from bench.launch.processes import terminated_as_interrupted
from bench.launch.progress_display import Display
from bench.machine.machine import Machine
from bench.machine.slurm_allocation import Allocation, check_srun, choose_layout, machine_of_ranks, reachable
from bench.machine.world_spec import Joined
from bench.plan.options import Options, plan_run
from bench.plan.plan import Plan
from bench.results.runs import Run, create_run, load_run, open_writer
from bench.text import UserError


def run_options(
    options: Options, modules: Sequence[str], *, out: Path, resume_path: Path | None, as_json: bool
) -> Path | None:
    """Do what ``parbench run`` was asked and return the run's folder, None on a rank that only joins."""
    joined = Joined.find(os.environ)
    if joined is not None and joined.rank != 0:
        from bench.rank.entries import join  # imports torch, which only a rank needs

        join(START_SECONDS)
        return None
    if resume_path is not None:
        _refuse_with_resume(replace(options, nodelist=None), joined)
        return resume(resume_path, as_json=as_json, nodelist=options.nodelist)
    plan = plan_run(options, modules, joined)
    return measure(plan, out, joined, as_json=as_json, nodelist=options.nodelist)


def _refuse_with_resume(options: Options, joined: Joined | None) -> None:
    if joined is not None:
        raise UserError("--resume starts its own ranks, and this one is there already (RANK): start it by itself")
    options_of = {"settings": "--set, --sizes and --dtype", "plan_file": "--plan"}
    given = [f.name for f in fields(Options) if getattr(options, f.name) != f.default and getattr(options, f.name)]
    if given:
        option = options_of.get(given[0], f"--{given[0].replace('_', '-')}")
        raise UserError(f"--resume goes on with the run's own plan; leave out {option}")


def measure(plan: Plan, out: Path, joined: Joined | None, *, as_json: bool, nodelist: str | None = None) -> Path:
    """Measure a new run under ``out`` and return its folder."""
    path, info = create_run(out, plan, version("parbench"))
    run = Run(path=path, info=info, records=())
    return _drive(run, joined, as_json=as_json, nodelist=nodelist)


def resume(path: Path, *, as_json: bool, nodelist: str | None = None) -> Path:
    """Measure what a run has no record of yet, on these nodes if they are said; nothing is done twice."""
    run = load_run(path)
    if run.info.plan.spread is not None:
        check_srun()
        choose_layout(Allocation.find(os.environ), **msgspec.structs.asdict(run.info.plan.spread))
    elif nodelist is not None:
        raise UserError(f"--nodelist {nodelist}: {path} was not measured by srun, but on one node")
    return _drive(run, None, as_json=as_json, nodelist=nodelist)


def _drive(run: Run, joined: Joined | None, *, as_json: bool, nodelist: str | None) -> Path:
    pending = remaining(run)
    to_skip = () if run.records else run.info.plan.skipped
    with ExitStack() as stack:
        writer = stack.enter_context(open_writer(run.path))
        display = stack.enter_context(Display(total=len(pending) + len(to_skip), as_json=as_json))
        start = _starter(run, joined, nodelist)
        hosts, facts = _hosts(run.info.plan, joined), _facts(run.info.plan)
        driver = Driver(run, writer, start, display, hosts=hosts, facts=facts)
        stack.enter_context(terminated_as_interrupted())
        try:
            if to_skip:
                driver.write_skipped()
            driver.drive(pending)
        except KeyboardInterrupt:
            display.stopped("interrupted", run.path)
        except UserError as error:
            display.stopped(str(error), run.path)
    return run.path


def _hosts(plan: Plan, joined: Joined | None) -> tuple[str, ...]:
    """Return the addresses of this host under which the ranks find the driver."""
    if plan.spread is not None:
        return reachable(os.environ)
    return ("127.0.0.1",) if joined is None or joined.one_node else (os.environ["MASTER_ADDR"],)


def _facts(plan: Plan) -> dict[str, Any]:
    """Return what the driver alone knows of the environment."""
    if plan.spread is None:
        return {}
    allocation = Allocation.find(os.environ)
    return {"slurm": {"job": allocation.job, "nodelist": allocation.nodelist, "placement": plan.spread.placement}}


def _starter(run: Run, joined: Joined | None, nodelist: str | None) -> StartRanks:
    if joined is not None:
        from bench.rank.entries import starter  # imports torch, which only a joined driver needs

        return starter(START_SECONDS)
    plan = run.info.plan
    logs, spread = run.path / "logs", plan.spread
    machine = machine_of_ranks(os.environ, None if spread is None else Allocation.find(os.environ))

    def start(number: int, variables: Mapping[str, str]) -> Launcher:
        if spread is not None:
            threads = _threads(machine, spread.ntasks_per_node)
            return SrunLauncher(spread, logs, number, {**threads, **variables}, nodelist)
        return TorchrunLauncher(plan.nproc, logs, number, {**_node_variables(plan, machine), **variables})

    return start


def _threads(machine: Machine, ranks: int) -> dict[str, str]:
    """Return the number of threads that fits so many ranks on a node, unless the user has set it."""
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, machine.cores // ranks))}


def _node_variables(plan: Plan, machine: Machine) -> dict[str, str]:
    """Return what ranks on one node need and the user has not set: threads that fit, and the loopback interface."""
    wanted = {**_threads(machine, plan.nproc), **loopback_variables()}
    return {name: value for name, value in wanted.items() if name not in os.environ}
