"""``parbench run``: from what was asked to a finished run folder."""

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType

import msgspec

from bench.cases import Setting, load_catalogue
from bench.ceiling import parse_link
from bench.custom import define
from bench.display import Display, JsonLines
from bench.driver import Driver, StartGang, remaining
from bench.errors import UserError
from bench.gang import Gang, TorchrunGang, loopback_interface
from bench.groups import mesh_group, parse_mesh
from bench.injection import parse_injection
from bench.machine import Machine, look
from bench.plan import Plan
from bench.planfile import PlanFile, read_plan_file
from bench.planning import Request, make_plan
from bench.presets import PRESETS
from bench.runs import Run, create_run, load_run, open_writer
from bench.setting import choose_setting
from bench.units import parse_duration
from bench.watch import START_SECONDS
from bench.words import did_you_mean, listed


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line's options, as text where they need parsing; None is what was not given."""

    preset: str | None = None
    only: tuple[str, ...] = ()
    target: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    nproc: int | None = None
    backend: str | None = None
    device: str | None = None
    launches: int | None = None
    budget: str | None = None
    timeout: str | None = None
    allow_single: bool = False
    mesh: str | None = None
    group: str | None = None
    inject: str | None = None
    link: str | None = None
    plan_file: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The ranks that another launcher started: this one, how many there are, and how many are on this node.

    ``one_node`` is whether they are known to share a node; without LOCAL_WORLD_SIZE they may not.
    """

    rank: int
    size: int
    local_size: int
    one_node: bool

    def setting(self, local: Setting) -> Setting:
        """Return the setting of all ranks from that of this node's."""
        return replace(local, nproc=self.size, nodes=-(-self.size // self.local_size))

    @staticmethod
    def find(environ: Mapping[str, str]) -> "Joined | None":
        """Return where this process stands among ranks that are there already, None if it was started alone."""
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return None
        if not {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
            raise UserError(
                "RANK and WORLD_SIZE are set, so ranks are there already; set MASTER_ADDR and MASTER_PORT too"
            )
        try:
            rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
            local_size = int(environ.get("LOCAL_WORLD_SIZE", size))
        except ValueError:
            raise UserError("RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are whole numbers where they are set") from None
        one_node = "LOCAL_WORLD_SIZE" in environ and local_size == size
        return Joined(rank=rank, size=size, local_size=local_size, one_node=one_node)


def run_options(
    options: Options, modules: Sequence[str], *, out: Path, resume_path: Path | None, as_json: bool
) -> Path | None:
    """Do what ``parbench run`` was asked and return the run's folder, None on a rank that only joins."""
    joined = Joined.find(os.environ)
    if joined is not None and joined.rank != 0:
        from bench.joined import join  # imports torch, which only a rank needs

        join(START_SECONDS)
        return None
    if resume_path is not None:
        _refuse_with_resume(options, joined)
        return resume(resume_path, as_json=as_json)
    return measure(plan_run(options, modules, joined), out, joined, as_json=as_json)


def _refuse_with_resume(options: Options, joined: Joined | None) -> None:
    if joined is not None:
        raise UserError("--resume starts its own ranks, and this one is there already (RANK): start it by itself")
    options_of = {"settings": "--set, --sizes and --dtype", "plan_file": "--plan"}
    given = [f.name for f in fields(Options) if getattr(options, f.name) != f.default and getattr(options, f.name)]
    if given:
        option = options_of.get(given[0], f"--{given[0].replace('_', '-')}")
        raise UserError(f"--resume goes on with the run's own plan; leave out {option}")


def plan_run(options: Options, modules: Sequence[str], joined: Joined | None) -> Plan:
    """Return the plan for the options; ``UserError`` if anything asked for cannot be had."""
    file = read_plan_file(options.plan_file) if options.plan_file else PlanFile()
    options = _with_file(options, file)
    machine = look(os.environ)
    chosen = choose_setting(
        machine,
        nproc=_ranks(options.nproc, joined),
        backend=options.backend,
        device=options.device,
        allow_single=options.allow_single or (joined is not None and joined.size > 1),
    )
    setting = chosen.setting if joined is None else joined.setting(chosen.setting)
    folder = Path.cwd()
    request = Request(
        preset=_preset(options.preset),
        only=options.only,
        entries=tuple(case.entry() for case in file.case),
        settings=_with_group(options),
        launches=_launches(options.launches, joined),
        budget_seconds=None if options.budget is None else parse_duration(options.budget),
        timeout_seconds=None if options.timeout is None else parse_duration(options.timeout),
    )
    catalogue = load_catalogue(modules) if options.target is None else (define(options.target, folder),)
    plan = make_plan(request, catalogue, setting)
    injection = None if options.inject is None else parse_injection(options.inject, setting.nproc)
    injected = (f"injected: {injection.text}",) if injection else ()
    return msgspec.structs.replace(
        plan,
        notes=(*chosen.notes, *injected),
        path=str(folder) if options.target else None,
        injection=injection,
        link_bytes_per_second=None if options.link is None else parse_link(options.link),
    )


def _with_group(options: Options) -> Mapping[str, str]:
    """Return the settings with the group that ``--mesh`` and ``--group`` mean together."""
    if options.mesh is None and options.group is None:
        return options.settings
    if options.group is None:
        raise UserError(
            f"--mesh {options.mesh} needs --group, one of its axes: {listed(parse_mesh(options.mesh or ''))}"
        )
    group = options.group if options.mesh is None else mesh_group(options.mesh, options.group)
    return {**options.settings, "group": group}


def _with_file(options: Options, file: PlanFile) -> Options:
    """Return the options with the plan file's values where the command line gave none."""
    names = ("preset", "nproc", "backend", "device", "launches", "budget", "timeout")
    given = {name: getattr(file, name) for name in names if getattr(options, name) is None}
    texts = {name: str(given[name]) for name in ("budget", "timeout") if given.get(name) is not None}
    return replace(options, **{**given, **texts})


def _preset(name: str | None) -> str:
    if name is not None and name not in PRESETS:
        raise UserError(f"no preset is named {name!r}: there are {listed(PRESETS)}{did_you_mean(name, PRESETS)}")
    return name or "node"


def _ranks(nproc: int | None, joined: Joined | None) -> int | None:
    if joined is None:
        return nproc
    if nproc not in (None, joined.size):
        raise UserError(f"--nproc {nproc}: {joined.size} ranks are there already (WORLD_SIZE); leave it out")
    return joined.local_size


def _launches(launches: int | None, joined: Joined | None) -> int | None:
    if launches is not None and launches < 1:
        raise UserError(f"--launches {launches}: at least 1 is needed")
    if joined is None:
        return launches
    if launches not in (None, 1):
        raise UserError(f"--launches {launches}: ranks that are there already make one launch; leave it out")
    return 1


def measure(plan: Plan, out: Path, joined: Joined | None, *, as_json: bool) -> Path:
    """Measure a new run under ``out`` and return its folder."""
    path, info = create_run(out, plan, version("parbench"))
    run = Run(path=path, info=info, records=())
    return _drive(run, joined, as_json=as_json)


def resume(path: Path, *, as_json: bool) -> Path:
    """Measure what a run has no record of yet; nothing is done twice."""
    run = load_run(path)
    return _drive(run, None, as_json=as_json)


def _drive(run: Run, joined: Joined | None, *, as_json: bool) -> Path:
    pending = remaining(run)
    to_skip = () if run.records else run.info.plan.skipped
    with ExitStack() as stack:
        writer = stack.enter_context(open_writer(run.path))
        display = stack.enter_context(Display(total=len(pending) + len(to_skip)))
        audience = JsonLines(display) if as_json else display
        start = _starter(run, joined)
        host = "127.0.0.1" if joined is None or joined.one_node else os.environ["MASTER_ADDR"]
        driver = Driver(run, writer, start, audience, host=host)
        stack.enter_context(_terminated_as_interrupted())
        try:
            if to_skip:
                driver.write_skipped()
            driver.drive(pending)
        except KeyboardInterrupt:
            display.stopped("interrupted", run.path)
        except UserError as error:
            display.stopped(str(error), run.path)
    return run.path


def _starter(run: Run, joined: Joined | None) -> StartGang:
    if joined is not None:
        from bench.joined import starter  # imports torch, which only a joined driver needs

        return starter(START_SECONDS)
    plan, machine = run.info.plan, look(os.environ)

    def start(number: int, variables: Mapping[str, str]) -> Gang:
        return TorchrunGang(plan.nproc, run.path / "logs", number, {**_node_variables(plan, machine), **variables})

    return start


def _node_variables(plan: Plan, machine: Machine) -> dict[str, str]:
    """Return what ranks on one node need and the user has not set: threads that fit, and the loopback interface."""
    loopback = loopback_interface()
    wanted = {"OMP_NUM_THREADS": str(max(1, machine.cores // plan.nproc))}
    if plan.backend == "gloo" and loopback is not None:
        wanted["GLOO_SOCKET_IFNAME"] = loopback  # by host name gloo may pick an interface that is not even up
    return {name: value for name, value in wanted.items() if name not in os.environ}


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM stop a run as Ctrl-C does; only a main thread can hear signals."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
