"""``parbench run``: from a plan to a finished run folder."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from bench.launch.driver import Driver, StartRanks, remaining
from bench.launch.launchers import Launcher, SrunLauncher, TorchrunLauncher, loopback_variables
from bench.launch.monitor import START_SECONDS
from bench.launch.processes import terminated_as_interrupted
from bench.launch.progress_display import Display
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
    if resume_path is None:
        path, info = create_run(out, plan_run(options, modules, joined), version("parbench"))
        return _drive(Run(path=path, info=info, records=()), joined, as_json=as_json, nodelist=options.nodelist)
    if joined is not None:
        raise UserError("--resume starts its own ranks, and this one is there already (RANK): start it by itself")
    for f in fields(Options):
        given = getattr(options, f.name)
        if given and given != f.default and f.name != "nodelist":
            words = {"settings": "--set, --sizes and --dtype", "plan_file": "--plan"}
            option = words.get(f.name, f"--{f.name.replace('_', '-')}")
            raise UserError(f"--resume goes on with the run's own plan; leave out {option}")
    return resume(resume_path, as_json=as_json, nodelist=options.nodelist)


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
    skipped = () if run.records else run.info.plan.skipped
    with ExitStack() as stack:
        writer = stack.enter_context(open_writer(run.path))
        display = stack.enter_context(Display(total=len(pending) + len(skipped), as_json=as_json))
        start = _starter(run, joined, nodelist)
        hosts, facts = _whereabouts(run.info.plan, joined)
        driver = Driver(run, writer, start, display, hosts=hosts, facts=facts)
        stack.enter_context(terminated_as_interrupted())
        try:
            driver.drive(pending, skipped)
        except KeyboardInterrupt:
            display.stopped("interrupted", run.path)
        except UserError as error:
            display.stopped(str(error), run.path)
    return run.path


def _whereabouts(plan: Plan, joined: Joined | None) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return this host's addresses under which ranks find the driver, and what it alone knows of the environment."""
    if plan.spread is None:
        return ("127.0.0.1" if joined is None or joined.one_node else os.environ["MASTER_ADDR"],), {}
    allocation = Allocation.find(os.environ)
    slurm = {"job": allocation.job, "nodelist": allocation.nodelist, "placement": plan.spread.placement}
    return reachable(os.environ), {"slurm": slurm}


def _starter(run: Run, joined: Joined | None, nodelist: str | None) -> StartRanks:
    if joined is not None:
        from bench.rank.entries import starter  # imports torch, which only a joined driver needs

        return starter(START_SECONDS)
    logs, nproc, spread = run.path / "logs", run.info.plan.nproc, run.info.plan.spread
    machine = machine_of_ranks(os.environ, None if spread is None else Allocation.find(os.environ))
    threads = machine.cores // (nproc if spread is None else spread.ntasks_per_node)
    wanted = {"OMP_NUM_THREADS": str(max(1, threads)), **(loopback_variables() if spread is None else {})}
    own = {name: value for name, value in wanted.items() if name not in os.environ}

    def start(number: int, variables: Mapping[str, str]) -> Launcher:
        if spread is not None:
            return SrunLauncher(spread, logs, number, {**own, **variables}, nodelist)
        return TorchrunLauncher(nproc, logs, number, {**own, **variables})

    return start
