"""From the options of ``parbench run`` to a plan: where to measure, and what."""

import inspect
import itertools
import math
import os
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import msgspec

from parbench.bench.limits import MAX_LAUNCHES
from parbench.bench.machine.environment import emulation
from parbench.bench.machine.machine import available_cores, try_call
from parbench.bench.machine.slurm_allocation import Allocation, NodeLayout, check_srun, choose_layout, machine_of_ranks
from parbench.bench.machine.world_spec import Joined, WorldSpec, choose_world, describe_sharing
from parbench.bench.plan.cases import Case, Definition, load_catalogue, matches, select
from parbench.bench.plan.catalogue import DTYPES, MODE, OF_THE_RUNNER
from parbench.bench.plan.groups import INSIDE, mesh_group, parse_mesh
from parbench.bench.plan.params import Kind, Param, Value, refuse_unknown
from parbench.bench.plan.plan import (
    BEYOND_CACHE,
    LARGE_BYTES,
    PRESETS,
    SHORT_LAUNCHES,
    Entry,
    Plan,
    PlanFile,
    Preset,
    Skipped,
    parse_fault,
    read_plan_file,
    short_budget,
    short_measure,
)
from parbench.bench.text import UserError, listed, one_of, parse_duration, parse_link, parse_sizes, reading

_KINDS: dict[type, Kind] = {bool: "bool", int: "int", float: "float", str: "str"}
_LARGEST_ITEMSIZE = max(dtype.itemsize for dtype in DTYPES.values())
Candidate = tuple[Case, str | None]  # with the reason why it cannot run here, None if it can


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line and the plan file ask for, as text where it needs parsing; None is what was not given.

    ``settings`` holds the text of ``--set`` by parameter; ``entries`` replace the preset's when there are any. What
    ``usual`` says of a parameter goes before the preset, where a case has it and the user says nothing of it.
    """

    preset: str | None = None
    only: tuple[str, ...] = ()
    target: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    usual: Mapping[str, str] = field(default_factory=dict)
    entries: tuple[Entry, ...] = ()
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
    launcher: str = "local"
    nodes: int | None = None
    ntasks_per_node: int | None = None
    distribution: str | None = None
    nodelist: str | None = None


def plan_run(options: Options, modules: Sequence[str], joined: Joined | None) -> Plan:
    """Return the plan for the options; ``UserError`` if anything asked for cannot be had."""
    folder, fills = Path.cwd(), options.budget is not None
    catalogue = load_catalogue(modules) if options.target is None else (define(options.target, folder),)
    options = _with_mesh(_with_file(options, catalogue), catalogue, joined)
    if joined is not None:
        if options.launches not in (None, 1):
            told = f"--launches {options.launches}: ranks that are there already make one launch; leave it out"
            raise UserError(told)
        options = replace(options, launches=1)
    spec, spread = _where(options, joined)
    plan = make_plan(options, catalogue, spec)
    fault = None if options.inject is None else parse_fault(options.inject, plan.nproc)
    graphs = [case.label for case in plan.cases if case.whole.get("mode") == "graph"]
    if fault is not None and fault.kind == "slow" and graphs:  # the host takes no part in their steps
        raise UserError(f"--inject {fault.text}: {graphs[0]} is replayed by the device; slow knows no mode graph")
    return msgspec.structs.replace(
        plan,
        emulation=emulation(os.environ),
        notes=tuple(filter(None, (*spec.notes, spec.sharing, f"injected: {fault.text}" if fault else ""))),
        path=str(folder) if options.target else None,
        injection=fault,
        measure=plan.measure.to_fill() if fills and plan.launches > 1 else plan.measure,
        link_bytes_per_second=None if options.link is None else parse_link(options.link),
        spread=spread,
    )


def make_plan(options: Options, catalogue: Sequence[Definition], spec: WorldSpec) -> Plan:
    """Return the plan; ``UserError`` if it names what does not exist, or asks for what cannot run here."""
    name = options.preset or "node"
    if name not in PRESETS:
        raise UserError(f"no preset is named {name!r}: there are {one_of(PRESETS, name)}")
    if options.launches is not None and not 1 <= options.launches <= MAX_LAUNCHES:
        raise UserError(f"--launches {options.launches}: it is a number from 1 to {MAX_LAUNCHES}")
    preset = PRESETS[name]
    chosen = _named(options, catalogue)
    if not options.only and not options.entries:
        chosen = [definition for definition in chosen if name == "full" or name in definition.tags]
    if not chosen:
        raise UserError(f"--only {' '.join(options.only)} leaves nothing of the plan's cases")
    _check_settings(options.settings, chosen, "--set: what was chosen")
    for entry in options.entries:
        _check_settings(entry.set, select(catalogue, [entry.name]), f"case {entry.name!r}")
    candidates = [pair for definition in chosen for pair in _candidates(definition, options, preset, spec)]
    _check_possible(candidates, {*options.settings, *(name for entry in options.entries for name in entry.set)})
    skipped = {case.id: Skipped(case=case, reason=reason) for case, reason in candidates if reason is not None}
    with reading("what is asked for", "is more than a run's files hold"):
        cases = tuple({case.id: case for case, reason in candidates if reason is None}.values())
        launches, budget_seconds, measure = preset.launches, preset.budget_seconds, preset.measure
        if _is_short(options):
            launches, measure = options.launches or SHORT_LAUNCHES, short_measure(preset.measure)
            budget_seconds = short_budget(cases, measure, launches)
        plan = Plan(
            preset=name,
            cases=cases,
            skipped=tuple(skipped.values()),
            nproc=spec.nproc,
            backend=spec.backend,
            device=spec.device,
            launches=options.launches or launches,
            budget_seconds=budget_seconds if options.budget is None else parse_duration(options.budget),
            timeout_seconds=preset.timeout_seconds if options.timeout is None else parse_duration(options.timeout),
            measure=measure,
        )
        return msgspec.convert(msgspec.to_builtins(plan), Plan)


def _is_short(options: Options) -> bool:
    """Return True if the duration of the run follows from the number of its cases."""
    has_named_cases = bool(options.only or options.entries or options.target)
    return has_named_cases and options.preset is None and options.budget is None


def _named(options: Options, catalogue: Sequence[Definition]) -> list[Definition]:
    named = select(catalogue, [entry.name for entry in options.entries])
    wanted = select(catalogue, options.only)
    return [definition for definition in named if definition in wanted]


def _check_settings(settings: Mapping[str, str], chosen: Sequence[Definition], source: str) -> None:
    known = {param.name for definition in chosen for param in definition.params}
    refuse_unknown(settings, known, chosen[0].name if len(chosen) == 1 else f"{source} ({len(chosen)} cases)")


def _candidates(definition: Definition, options: Options, preset: Preset, spec: WorldSpec) -> list[Candidate]:
    """Return the product of all values given for the definition's parameters; the user's replace the preset's."""
    entries = options.entries or preset.entries
    name = definition.name
    matching_entries = [entry for entry in entries if matches(name, entry.name)] or [Entry(name=name)]
    params = {param.name: param for param in definition.params}
    # a preset means a size about so large; what a user asks for is measured as asked, or refused
    meant = not options.entries and "size_bytes" not in options.settings
    step = spec.nproc * _LARGEST_ITEMSIZE if meant else 1
    candidates: list[Candidate] = []
    for entry in matching_entries:
        from_file = entry.set if options.entries else {}
        texts = {**entry.set, **options.usual, **from_file, **options.settings}
        texts = {key: text for key, text in texts.items() if key in params}
        if meant and spec.device == "cuda" and max(parse_sizes(texts.get("size_bytes", "0"))) >= LARGE_BYTES:
            texts["size_bytes"] = ",".join((texts["size_bytes"], *BEYOND_CACHE))
        for values in itertools.product(*(params[key].parse_many(text) for key, text in texts.items())):
            given = dict(zip(texts, values, strict=True))
            if "size_bytes" in given:
                given["size_bytes"] = -(-int(given["size_bytes"]) // step) * step
            try:
                cases = [definition.case(one) for one in definition.expand(given, spec)]
            except UserError as error:
                candidates.append((definition.case(given), str(error)))
            else:
                candidates += [(case, definition.refuse(case.whole, spec)) for case in cases]
    return candidates


def _check_possible(candidates: Sequence[Candidate], asked: Iterable[str]) -> None:
    """Refuse a value of a parameter asked for by name under which no case can run; a preset's is only skipped."""
    for name in asked:
        by_value: dict[Value, list[str | None]] = {}
        for case, reason in candidates:
            if name in case.params:
                by_value.setdefault(case.params[name], []).append(reason)
        for value, reasons in by_value.items():
            if None not in reasons:
                reason = str(reasons[0])
                raise UserError(reason if f"{name} = " in reason else f"{name} = {value}: {reason}")
    if all(reason is not None for _, reason in candidates):
        case, reason = candidates[0]
        raise UserError(f"none of the {len(candidates)} cases asked for can run here; {case.label}: {reason}")


def _where(options: Options, joined: Joined | None) -> tuple[WorldSpec, NodeLayout | None]:
    """Return the spec of all ranks, and how srun is to spread them if it starts them."""
    allocation = _allocation(options, joined)
    machine = machine_of_ranks(os.environ, allocation)
    asked = options.nproc
    if joined is not None:
        if asked not in (None, joined.size):
            raise UserError(f"--nproc {asked}: {joined.size} ranks are there already (WORLD_SIZE); leave it out")
        asked = joined.local_size
        # a launcher that binds each rank to cores leaves this one its own
        launchers = try_call(lambda: available_cores(pid=os.getppid())) or 1
        machine = replace(machine, cores=max(machine.cores, launchers))
    many = (joined is not None and joined.size > 1) or (allocation is not None and allocation.nodes > 1)
    single = options.allow_single or many
    how = {}
    if allocation is not None:
        asked = options.ntasks_per_node or allocation.ntasks_per_node
        has_one_gpu = machine.torch_has_cuda and len(machine.gpus) == 1
        if asked is None and many and has_one_gpu and options.device != "cpu":
            asked = 1
        how = {"one_gpu_options": "--ntasks-per-node 1"}
    chosen = choose_world(
        machine, nproc=asked, backend=options.backend, device=options.device, allow_single=single, **how
    )
    if joined is not None:
        return replace(chosen, nproc=joined.size, nodes=-(-joined.size // joined.local_size)), None
    if allocation is None:
        return chosen, None
    spread = choose_layout(
        allocation, nodes=options.nodes, ntasks_per_node=chosen.nproc, distribution=options.distribution
    )
    sharing = chosen.sharing
    if emulation(os.environ):  # all nodes share the cores of this machine
        sharing = describe_sharing(machine, spread.ranks, chosen.device)
    chosen = replace(chosen, nproc=spread.ranks, nodes=spread.nodes, distribution=spread.distribution)
    return replace(chosen, sharing=sharing), spread


def _allocation(options: Options, joined: Joined | None) -> Allocation | None:
    """Return the allocation that srun is to start ranks in, None if it is not to."""
    if options.launcher != "srun":
        for name in ("nodes", "ntasks_per_node", "distribution", "nodelist"):
            if (value := getattr(options, name)) is not None:
                option = name.replace("_", "-")
                raise UserError(f"--{option} {value} is for --launcher srun, which starts ranks on nodes")
        return None
    if joined is not None:
        raise UserError("--launcher srun starts ranks, and RANK is set: this one is there already")
    if options.nproc is not None:
        raise UserError(f"--nproc {options.nproc}: with --launcher srun say --ntasks-per-node, and --nodes")
    if options.ntasks_per_node is not None and options.ntasks_per_node < 1:
        raise UserError(f"--ntasks-per-node {options.ntasks_per_node}: at least 1 is needed")
    check_srun()
    return Allocation.find(os.environ)


def _with_file(options: Options, catalogue: Sequence[Definition]) -> Options:
    """Return the options with the plan file's values where the command line gave none."""
    if options.plan_file is None:
        return options
    file = read_plan_file(options.plan_file)
    *names, _ = PlanFile.__struct_fields__  # the last are its cases
    given = {name: getattr(file, name) for name in names if getattr(options, name) is None}
    texts = {name: str(given[name]) for name in ("budget", "timeout") if given.get(name) is not None}
    return replace(options, **{**given, **texts}, entries=tuple(case.entry(catalogue) for case in file.case))


def _with_mesh(options: Options, catalogue: Sequence[Definition], joined: Joined | None) -> Options:
    """Return the options with ``--mesh`` and ``--group`` as settings; a mesh alone is that of the steps named."""
    mesh, group, settings = options.mesh, options.group, options.settings
    if group is not None:
        return replace(options, settings={**settings, "group": group if mesh is None else mesh_group(mesh, group)})
    if mesh is None:
        return options
    meshes = [parse_mesh(text) for text in mesh.split(";")]
    named = _named(options, catalogue) if options.only or options.entries or options.target else []
    if not any(param.kind == "mesh" for definition in named for param in definition.params):
        raise UserError(f"--mesh {mesh} needs --group, one of its axes: {listed(parse_mesh(mesh))}")
    if "mesh" in settings:
        raise UserError(f"--mesh {mesh} and --set mesh={settings['mesh']} say the same: leave out one")
    ranks = {math.prod(size for axis, size in axes.items() if axis not in INSIDE) for axes in meshes}
    here = joined is None and options.launcher == "local" and options.nproc is None
    several = len(ranks) == 1 and (max(ranks) > 1 or options.allow_single)
    nproc = max(ranks) if here and several else options.nproc
    return replace(options, settings={**settings, "mesh": mesh}, nproc=nproc)


def define(target: str, folder: Path) -> Definition:
    """Import the function ``package.module:function`` and return the definition of its cases.

    Modules in ``folder`` can be imported too. Raises ``UserError`` if the import fails or a parameter cannot be set.
    """
    if ":" not in target:
        raise UserError(f"--target {target!r} names no function: write package.module:function")
    from parbench.bench.rank.runner import load_target  # imports torch, which other runs start without

    if str(folder) not in sys.path:
        # At the end, so that no module of the folder shadows one of Python's.
        sys.path.append(str(folder))
    environment = dict(os.environ)
    try:
        # The output of a module must not mix with what `--json` prints.
        with redirect_stdout(sys.stderr):
            params = params_of(load_target(target))
    except UserError as error:
        raise UserError(f"--target {target!r} cannot be used: {error}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"--target {target!r} cannot be used: {type(error).__name__}: {error}") from error
    finally:
        # What the module sets at import is for the ranks, which import it themselves.
        os.environ.clear()
        os.environ.update(environment)
    module = target.partition(":")[0].rpartition(".")[2]
    return Definition(
        name=f"custom.{module}",
        target=target,
        help="a step of your own",
        params=(MODE, *params),
        tags=("smoke", "node"),
    )


def params_of(prepare: Callable[..., object]) -> tuple[Param, ...]:
    """Return the parameters that follow ``world``; ``UserError`` if one has no default that a record can hold."""
    own, found = dict(list(inspect.signature(prepare).parameters.items())[1:]), []
    # the world's type may be imported for a type checker alone
    annotations = {name: one.annotation for name, one in own.items() if one.annotation is not one.empty}
    hints = typing.get_type_hints(SimpleNamespace(__annotations__=annotations), getattr(prepare, "__globals__", {}))
    for name, parameter in own.items():
        hint, default, wrong = hints.get(name), parameter.default, ""
        kind = _KINDS.get(type(default))
        if name in OF_THE_RUNNER:
            wrong = f"is parbench's own, as are {listed(OF_THE_RUNNER)}: give it another name"
        elif default is inspect.Parameter.empty:
            wrong = "has no default: give it one, --set changes it"
        elif kind == "float" and not math.isfinite(default):
            wrong = f"has the default {default}: give it a finite one"
        if wrong or kind is None:
            raise UserError(f"parameter {name!r} {wrong or 'is no bool, int, float or str'}")
        kind = "size" if kind == "int" and name.endswith("_bytes") else kind
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        found.append(Param(name=name, kind=kind, default=default, help="", choices=choices))
        found[-1].parse(default)
    return tuple(found)
