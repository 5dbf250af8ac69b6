"""From the options of ``parbench run`` to a plan: which cases, on which ranks."""

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from parbench.bench.limits import MAX_LAUNCHES
from parbench.bench.machine.environment import emulation
from parbench.bench.machine.machine import Machine, count_available_cores, try_call
from parbench.bench.machine.slurm_allocation import (
    Allocation,
    NodeLayout,
    check_srun,
    choose_layout,
    inspect_rank_machine,
)
from parbench.bench.machine.world_spec import Joined, WorldSpec, choose_world, describe_sharing
from parbench.bench.plan.cases import Case, Definition, load_catalogue, matches, select
from parbench.bench.plan.catalogue import DTYPES
from parbench.bench.plan.custom_step import define
from parbench.bench.plan.groups import INSIDE, mesh_group, parse_mesh
from parbench.bench.plan.params import Value, refuse_unknown
from parbench.bench.plan.plan import (
    BEYOND_CACHE,
    LARGE_BYTES,
    PRESETS,
    SHORT_LAUNCHES,
    Entry,
    FaultSpec,
    Measure,
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

_MAX_ITEMSIZE = max(dtype.itemsize for dtype in DTYPES.values())
Candidate = tuple[Case, str | None]  # The reason why the case cannot run here, None if it can.


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``parbench run``, as text if they need parsing, None if not given."""

    preset: str | None = None
    only: tuple[str, ...] = ()
    target: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)  # the text of ``--set`` by parameter
    # Values that the output format needs. They take precedence over the preset, not over the user.
    preset_overrides: Mapping[str, str] = field(default_factory=dict)
    entries: tuple[Entry, ...] = ()  # the cases of a plan file, instead of the preset's
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

    @property
    def named_entries(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.entries)

    @property
    def is_short(self) -> bool:
        """Whether the duration of the run follows from the number of its cases."""
        has_named_cases = bool(self.only or self.entries or self.target)
        return has_named_cases and self.preset is None and self.budget is None


def plan_run(options: Options, modules: Sequence[str], joined: Joined | None) -> Plan:
    """Return the plan for the options; ``UserError`` if it cannot run here.

    ``joined`` describes ranks that another launcher has started.
    """
    folder = Path.cwd()
    catalogue = load_catalogue(modules) if options.target is None else (define(options.target, folder),)
    has_budget = options.budget is not None
    options = _apply_mesh(_apply_plan_file(options, catalogue), catalogue, joined)
    if joined is not None:
        if options.launches not in (None, 1):
            problem = "ranks that are there already make one launch"
            raise UserError(f"--launches {options.launches}: {problem}; leave it out")
        options = replace(options, launches=1)
    spec, layout = _choose_ranks(options, joined)
    plan = make_plan(options, catalogue, spec)
    fault = _parse_fault_for(plan, options.inject)
    injection_notes = [] if fault is None else [f"injected: {fault.text}"]
    return msgspec.structs.replace(
        plan,
        emulation=emulation(os.environ),
        notes=tuple(filter(None, (*spec.notes, spec.sharing, *injection_notes))),
        path=str(folder) if options.target else None,
        injection=fault,
        measure=plan.measure.to_fill() if has_budget and plan.launches > 1 else plan.measure,
        link_bytes_per_second=None if options.link is None else parse_link(options.link),
        spread=layout,
    )


def _parse_fault_for(plan: Plan, text: str | None) -> FaultSpec | None:
    if text is None:
        return None
    fault = parse_fault(text, plan.nproc)
    if fault.kind == "slow":
        for case in plan.cases:
            if case.whole.get("mode") == "graph":  # The host takes no part in the steps of a graph.
                raise UserError(f"--inject {text}: {case.label} is replayed by the device; slow knows no mode graph")
    return fault


def make_plan(options: Options, catalogue: Sequence[Definition], spec: WorldSpec) -> Plan:
    """Return the plan.

    Raises ``UserError`` if it names a case that does not exist, or one that cannot run here.
    """
    name = options.preset or "node"
    if name not in PRESETS:
        raise UserError(f"no preset is named {name!r}: there are {one_of(PRESETS, name)}")
    if options.launches is not None and not 1 <= options.launches <= MAX_LAUNCHES:
        raise UserError(f"--launches {options.launches}: it is a number from 1 to {MAX_LAUNCHES}")
    preset = PRESETS[name]
    definitions = _select_definitions(options, catalogue, name)
    candidates: list[Candidate] = []
    for definition in definitions:
        candidates += _list_candidates(definition, options, preset, spec)
    names_in_entries = [param for entry in options.entries for param in entry.set]
    _check_possible(candidates, {*options.settings, *names_in_entries})
    cases = {case.id: case for case, reason in candidates if reason is None}
    skipped = {case.id: Skipped(case=case, reason=reason) for case, reason in candidates if reason is not None}
    launches, budget_seconds, measure = _choose_duration(options, preset, list(cases.values()))
    timeout_seconds = preset.timeout_seconds if options.timeout is None else parse_duration(options.timeout)
    plan = Plan(
        preset=name,
        cases=tuple(cases.values()),
        skipped=tuple(skipped.values()),
        nproc=spec.nproc,
        backend=spec.backend,
        device=spec.device,
        launches=launches,
        budget_seconds=budget_seconds,
        timeout_seconds=timeout_seconds,
        measure=measure,
    )
    with reading("what is asked for", "is more than a run's files hold"):
        return msgspec.convert(msgspec.to_builtins(plan), Plan)


def _choose_duration(options: Options, preset: Preset, cases: Sequence[Case]) -> tuple[int, float, Measure]:
    """Return the number of launches, the time budget in seconds, and the stopping rule."""
    if options.is_short:
        launches = options.launches or SHORT_LAUNCHES
        measure = short_measure(preset.measure)
        return launches, short_budget(cases, measure, launches), measure
    budget_seconds = preset.budget_seconds if options.budget is None else parse_duration(options.budget)
    return options.launches or preset.launches, budget_seconds, preset.measure


def _select_definitions(options: Options, catalogue: Sequence[Definition], preset_name: str) -> list[Definition]:
    """Return the definitions to measure.

    Raises ``UserError`` if there are none, or none has a parameter that is set.
    """
    definitions = _select_named(options, catalogue)
    if not options.only and not options.entries and preset_name != "full":
        definitions = [definition for definition in definitions if preset_name in definition.tags]
    if not definitions:
        raise UserError(f"--only {' '.join(options.only)} leaves nothing of the plan's cases")
    _check_settings(options.settings, definitions, "--set: what was chosen")
    for entry in options.entries:
        _check_settings(entry.set, select(catalogue, [entry.name]), f"case {entry.name!r}")
    return definitions


def _select_named(options: Options, catalogue: Sequence[Definition]) -> list[Definition]:
    """Return the definitions that ``--only`` and the plan file name."""
    in_file = select(catalogue, options.named_entries)
    in_only = select(catalogue, options.only)
    return [definition for definition in in_file if definition in in_only]


def _check_settings(settings: Mapping[str, str], definitions: Sequence[Definition], source: str) -> None:
    declared = {param.name for definition in definitions for param in definition.params}
    owner = definitions[0].name if len(definitions) == 1 else f"{source} ({len(definitions)} cases)"
    refuse_unknown(settings, declared, owner)


def _list_candidates(definition: Definition, options: Options, preset: Preset, spec: WorldSpec) -> Iterator[Candidate]:
    """Yield a case for every combination of the values that a parameter has."""
    has_preset_sizes = not options.entries and "size_bytes" not in options.settings
    entries = [entry for entry in options.entries or preset.entries if matches(definition.name, entry.name)]
    for entry in entries or [Entry(name=definition.name)]:
        texts = _merge_settings(entry, options)
        values_by_name = {}
        for param in definition.params:
            if param.name in texts:
                values_by_name[param.name] = param.parse_many(texts[param.name])
        # The parameters vary in the order in which they are written.
        values_by_name = {name: values_by_name[name] for name in texts if name in values_by_name}
        if has_preset_sizes and "size_bytes" in values_by_name:
            values_by_name["size_bytes"] = _adapt_sizes(values_by_name["size_bytes"], spec)
        for combination in itertools.product(*values_by_name.values()):
            params = dict(zip(values_by_name, combination, strict=True))
            yield from _expand(definition, params, spec)


def _merge_settings(entry: Entry, options: Options) -> dict[str, str]:
    """Return the text of each parameter.

    ``--set`` comes first, then a plan file, the output format and the preset.
    """
    texts = dict(entry.set)
    for name, text in options.preset_overrides.items():
        is_in_plan_file = bool(options.entries) and name in entry.set
        if not is_in_plan_file:
            texts[name] = text
    texts.update(options.settings)
    return texts


def _adapt_sizes(sizes: Sequence[Value], spec: WorldSpec) -> tuple[Value, ...]:
    """Return a preset's sizes as multiples of the ranks, on GPUs with sizes beyond their cache."""
    num_bytes = [int(size) for size in sizes]
    if spec.device == "cuda" and max(num_bytes) >= LARGE_BYTES:
        num_bytes += [size for text in BEYOND_CACHE for size in parse_sizes(text)]
    step = spec.nproc * _MAX_ITEMSIZE
    return tuple(math.ceil(size / step) * step for size in num_bytes)


def _expand(definition: Definition, params: Mapping[str, Value], spec: WorldSpec) -> Iterator[Candidate]:
    try:
        cases = [definition.case(expanded) for expanded in definition.expand(params, spec)]
    except UserError as error:
        yield definition.case(params), str(error)
        return
    for case in cases:
        yield case, definition.refuse(case.whole, spec)


def _check_possible(candidates: Sequence[Candidate], names: Iterable[str]) -> None:
    """Raise ``UserError`` if no case can run, or none with a value of one of these parameters."""
    for name in names:
        reasons_by_value: dict[Value, list[str | None]] = {}
        for case, reason in candidates:
            if name in case.params:
                reasons_by_value.setdefault(case.params[name], []).append(reason)
        for value, reasons in reasons_by_value.items():
            if None not in reasons:
                reason = str(reasons[0])
                raise UserError(reason if f"{name} = " in reason else f"{name} = {value}: {reason}")
    if all(reason is not None for _, reason in candidates):
        case, reason = candidates[0]
        raise UserError(f"none of the {len(candidates)} cases asked for can run here; {case.label}: {reason}")


def _choose_ranks(options: Options, joined: Joined | None) -> tuple[WorldSpec, NodeLayout | None]:
    """Return the ranks, and their layout on nodes if srun starts them."""
    allocation = _find_allocation(options, joined)
    if allocation is not None:
        return _choose_srun_ranks(options, allocation)
    machine = inspect_rank_machine(os.environ, None)
    if joined is not None:
        return _choose_joined_ranks(options, joined, machine), None
    spec = choose_world(
        machine,
        nproc=options.nproc,
        backend=options.backend,
        device=options.device,
        allow_single=options.allow_single,
    )
    return spec, None


def _choose_joined_ranks(options: Options, joined: Joined, machine: Machine) -> WorldSpec:
    if options.nproc not in (None, joined.size):
        raise UserError(f"--nproc {options.nproc}: {joined.size} ranks are there already (WORLD_SIZE); leave it out")
    # A launcher that binds each rank to cores leaves this rank only its own.
    cores_of_launcher = try_call(lambda: count_available_cores(pid=os.getppid())) or 1
    spec = choose_world(
        replace(machine, cores=max(machine.cores, cores_of_launcher)),
        nproc=joined.local_size,
        backend=options.backend,
        device=options.device,
        allow_single=options.allow_single or joined.size > 1,
    )
    return replace(spec, nproc=joined.size, nodes=math.ceil(joined.size / joined.local_size))


def _choose_srun_ranks(options: Options, allocation: Allocation) -> tuple[WorldSpec, NodeLayout]:
    machine = inspect_rank_machine(os.environ, allocation)
    has_several_nodes = allocation.nodes > 1
    ntasks_per_node = options.ntasks_per_node or allocation.ntasks_per_node
    has_one_gpu = machine.torch_has_cuda and len(machine.gpus) == 1
    if ntasks_per_node is None and has_one_gpu and has_several_nodes and options.device != "cpu":
        ntasks_per_node = 1
    spec = choose_world(
        machine,
        nproc=ntasks_per_node,
        backend=options.backend,
        device=options.device,
        allow_single=options.allow_single or has_several_nodes,
        one_gpu_options="--ntasks-per-node 1",
    )
    layout = choose_layout(
        allocation, nodes=options.nodes, ntasks_per_node=spec.nproc, distribution=options.distribution
    )
    sharing = spec.sharing
    if emulation(os.environ):  # All nodes share the cores of this machine.
        sharing = describe_sharing(machine, layout.ranks, spec.device)
    spec = replace(spec, nproc=layout.ranks, nodes=layout.nodes, distribution=layout.distribution, sharing=sharing)
    return spec, layout


def _find_allocation(options: Options, joined: Joined | None) -> Allocation | None:
    """Return the allocation in which srun starts the ranks, None with another launcher."""
    if options.launcher != "srun":
        for name in ("nodes", "ntasks_per_node", "distribution", "nodelist"):
            value = getattr(options, name)
            if value is not None:
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


def _apply_plan_file(options: Options, catalogue: Sequence[Definition]) -> Options:
    """Return the options with the values of the plan file where the command line has none."""
    if options.plan_file is None:
        return options
    file = read_plan_file(options.plan_file)
    values: dict[str, Any] = {}
    for name in PlanFile.OPTIONS:
        value = getattr(file, name)
        if value is not None and getattr(options, name) is None:
            values[name] = str(value) if name in ("budget", "timeout") else value
    return replace(options, **values, entries=tuple(case.entry(catalogue) for case in file.case))


def _apply_mesh(options: Options, catalogue: Sequence[Definition], joined: Joined | None) -> Options:
    """Return the options with ``--mesh`` and ``--group`` as settings.

    Without ``--group`` the mesh is that of the training steps. It also sets the number of ranks on this node.
    """
    mesh, settings = options.mesh, options.settings
    if options.group is not None:
        group = options.group if mesh is None else mesh_group(mesh, options.group)
        return replace(options, settings={**settings, "group": group})
    if mesh is None:
        return options
    meshes = [parse_mesh(text) for text in mesh.split(";")]
    has_named_cases = options.only or options.entries or options.target
    named = _select_named(options, catalogue) if has_named_cases else []
    if not any(param.kind == "mesh" for definition in named for param in definition.params):
        raise UserError(f"--mesh {mesh} needs --group, one of its axes: {listed(parse_mesh(mesh))}")
    if "mesh" in settings:
        raise UserError(f"--mesh {mesh} and --set mesh={settings['mesh']} say the same: leave out one")
    nproc = options.nproc
    if nproc is None and joined is None and options.launcher == "local":
        nproc = _ranks_of_meshes(meshes, allow_single=options.allow_single)
    return replace(options, settings={**settings, "mesh": mesh}, nproc=nproc)


def _ranks_of_meshes(meshes: Sequence[Mapping[str, int]], *, allow_single: bool) -> int | None:
    """Return the number of ranks that all meshes have; None if they differ or have one rank."""
    numbers = {math.prod(size for axis, size in mesh.items() if axis not in INSIDE) for mesh in meshes}
    number = numbers.pop()
    if numbers or (number == 1 and not allow_single):
        return None
    return number
