"""The measurement of ``parbench run``: from options and a plan to a run folder with all records.

The progress is shown on standard error. A case is a benchmark with values for its parameters.
"""

import importlib
import os
import resource
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from shlex import quote

import msgspec
from msgspec.structs import replace

from parbench.bench.launch.display import Display
from parbench.bench.launch.driver import Driver, StartRanks
from parbench.bench.launch.launchers import ForkedRanks, ForkServer, SrunRanks
from parbench.bench.launch.recorder import Recorder
from parbench.bench.machine.gpu_host import BIND_VARIABLE
from parbench.bench.machine.machine import find_package_version, get_affinity
from parbench.bench.machine.mpi import find_mpi_variables
from parbench.bench.machine.slurm_allocation import (
    Allocation,
    check_srun,
    choose_layout,
    inspect_rank_machine,
)
from parbench.bench.machine.world_spec import Joined, make_launcher_error
from parbench.bench.plan.cases import EXPLAINER
from parbench.bench.plan.options import Options, plan_run
from parbench.bench.plan.plan import Plan
from parbench.bench.results.limits import read_limits
from parbench.bench.results.runs import Run, create_run, load_run, open_writer
from parbench.bench.text import UserError, parse_duration

_LAZY_GLOO_RANKS = 64
"""The number of ranks from which on gloo connects only ranks that exchange data."""


def run_options(
    options: Options,
    modules: Sequence[str],
    *,
    out: Path,
    resume_path: Path | None = None,
    as_json: bool = False,
    cpus: Sequence[Sequence[int]] = (),
    limits: Path | None = None,
    command: str = "",
    report_modules: Sequence[str] = (),
) -> Path | None:
    """Make or resume a run, and return its folder.

    If a launcher such as torchrun has started this process as a rank other than 0, the process
    serves that rank instead, and the result is None.

    Args:
        options: what to measure and for how long.
        modules: the names of the Python modules that define the benchmarks.
        out: the folder in which a new run gets its own folder.
        resume_path: the folder of a run to continue, None for a new run.
        as_json: True if each record is printed on standard output as a line of JSON.
        cpus: the CPUs to which each rank of this host is bound, by rank. Empty if they are not
            bound.
        limits: a file of limits on metrics, None without limits. It must be valid.
        command: the command to repeat if the run ends early. If empty, the run can be resumed.
        report_modules: the names of the modules that the caller needs after the run. They are
            imported now, because meanwhile the fork server imports torch.
    """
    os.environ.update(find_mpi_variables(os.environ))
    joined = Joined.find(os.environ)
    raise_limit_on_open_files()
    if joined is not None and joined.rank != 0:
        # It imports torch, which other runs start without.
        from parbench.bench.launch.external import serve_rank

        serve_rank()
        return None
    run = None if resume_path is None else load_unfinished_run(resume_path, options, joined)
    plan = plan_run(options, modules, joined) if run is None else run.info.plan
    if limits is not None:
        read_limits(limits, plan.cases)
    if run is None:
        path, info = create_run(out, plan, find_package_version("parbench") or "-")
        run = Run(path=path, info=info, records=())
    with ExitStack() as stack:
        writer = stack.enter_context(open_writer(run.path))
        display = stack.enter_context(Display(as_json=as_json))
        start_ranks = choose_launcher(run, joined, options.nodelist, stack, cpus)
        recorder = Recorder(run, writer)
        for note in plan.notes:
            display.print_message(f"note: {note}")
        try:
            for name in report_modules:
                importlib.import_module(name)
            Driver(run, recorder, start_ranks, display).drive()
        except (KeyboardInterrupt, UserError) as error:
            display.close()
            reason = str(error) or "interrupted"
            resume = f"parbench run --resume {quote(str(run.path))}"
            advice = f"run {command} again" if command else f"continue with: {resume}"
            display.print_message(f"{reason}; {advice}")
    return run.path


def raise_limit_on_open_files() -> None:
    """Let this process and its ranks open up to 65536 files, as far as the system allows it.

    gloo connects each rank to all others.
    """
    limit, max_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = max(limit, min(max_limit, 1 << 16)), max_limit
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def load_unfinished_run(path: Path, options: Options, joined: Joined | None) -> Run:
    """Load a run to resume, with the time budget in ``options`` if there is one.

    A measurement is missing if a case has no record in a repetition, or if the record states that
    the time budget was over. Raises ``UserError`` if these ranks cannot continue the run.

    Args:
        path: the folder of the run.
        options: may have a time budget and nodes. All other options are those of the run.
        joined: the ranks that a launcher such as torchrun has started, None without one. With such
            ranks a run cannot be resumed.
    """
    if joined is not None:
        raise make_launcher_error("--resume")
    run = load_run(path)
    plan = run.info.plan
    if plan.spread is not None:
        check_srun()
        choose_layout(Allocation.find(os.environ), **msgspec.structs.asdict(plan.spread))
    elif options.nodelist is not None:
        message = f"--nodes {options.nodelist}: {path} was not measured by srun, but on one node"
        raise UserError(message)
    if options.budget is None:
        return run
    plan = replace(plan, budget_seconds=parse_duration(options.budget))
    return replace(run, info=replace(run.info, plan=plan))


def choose_launcher(
    run: Run,
    joined: Joined | None,
    nodelist: str | None,
    stack: ExitStack,
    cpus: Sequence[Sequence[int]],
) -> StartRanks:
    """Return the function that starts all ranks once, with the launcher that the run needs.

    The launcher is the one that has started this process as a rank (such as torchrun), or srun, or
    a fork server on this host.

    Args:
        run: the run with its plan.
        joined: the ranks that a launcher such as torchrun has started, None without one.
        nodelist: the nodes for srun as Slurm writes them, None to let Slurm choose.
        stack: ends the launcher when it is closed.
        cpus: the CPUs to which each rank of this host is bound, by rank. Empty if they are not
            bound.
    """
    plan = run.info.plan
    layout = plan.spread
    own = choose_variables(plan)
    if joined is not None:
        # It imports torch, which other runs start without.
        from parbench.bench.launch.external import ExternalLauncher

        launcher = ExternalLauncher(plan.nproc)
        stack.callback(launcher.close)
        own.pop("OMP_NUM_THREADS", None)  # The launcher may set it, and ranks per host may differ.
        if len(get_affinity()) < (os.cpu_count() or 1):
            own.pop(BIND_VARIABLE, None)  # The launcher binds each rank to its own CPUs.
        return lambda folder, variables: launcher.start_ranks(folder, {**own, **variables})
    if layout is not None:
        return lambda folder, variables: SrunRanks(layout, folder, {**own, **variables}, nodelist)
    # A custom step may do anything when it is imported.
    targets = {EXPLAINER if case.is_custom else case.target for case in plan.cases}
    modules = sorted({target.partition(":")[0] for target in targets})
    server = stack.enter_context(ForkServer(modules, own, run.path / "logs"))
    return lambda folder, variables: ForkedRanks(server, plan.nproc, folder, variables, cpus)


def choose_variables(plan: Plan) -> dict[str, str]:
    """Return the environment variables that parbench sets on all ranks, by name.

    Each value is the text to set. The variables set the number of OpenMP threads, gloo's
    connections, the order of GPUs, and whether ranks bind themselves to CPUs. Variables that the
    user has set are left out.
    """
    layout = plan.spread
    allocation = None if layout is None else Allocation.find(os.environ)
    ranks_per_node = plan.nproc if layout is None else layout.ntasks_per_node
    threads = inspect_rank_machine(os.environ, allocation).cores // ranks_per_node
    variables = {"OMP_NUM_THREADS": str(max(1, threads))}
    if plan.device == "cuda":
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order, where models of GPUs differ
        if layout is None or not os.environ.get("SLURM_CPUS_PER_TASK"):
            variables[BIND_VARIABLE] = "1"  # Otherwise Slurm binds each rank to its own CPUs.
    if plan.nproc >= _LAZY_GLOO_RANKS:
        variables["TORCH_GLOO_LAZY_INIT"] = "1"
    return {name: value for name, value in variables.items() if name not in os.environ}
