"""The conversion of the options of ``parbench run`` to a plan of cases and ranks."""

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from parbench.bench.limits import MAX_REPETITIONS
from parbench.bench.machine.environment import get_emulation
from parbench.bench.machine.machine import Machine, count_available_cores, try_call
from parbench.bench.machine.slurm_allocation import (
    Allocation,
    NodeLayout,
    check_srun,
    choose_layout,
    inspect_rank_machine,
)
from parbench.bench.machine.world_spec import Joined, WorldSpec, choose_world, describe_sharing
from parbench.bench.plan.cases import (
    BenchmarkDefinition,
    Case,
    Params,
    load_catalogue,
    matches,
    select_definitions,
)
from parbench.bench.plan.catalogue import DTYPES, estimate_needed_bytes
from parbench.bench.plan.custom_step import define_custom_step, hash_source
from parbench.bench.plan.groups import INSIDE, join_mesh_axes, parse_mesh
from parbench.bench.plan.params import Value, declare_variable, is_variable, refuse_unknown
from parbench.bench.plan.plan import (
    BEYOND_CACHE,
    FEW_OPERATIONS,
    FEW_OPERATIONS_REPETITIONS,
    LARGE_BYTES,
    MIN_RANKS_OF_GROUPS,
    PLATEAU,
    PLATEAU_BYTES,
    PRESETS,
    SHORT_REPETITIONS,
    SHORT_SECONDS_PER_CASE,
    Entry,
    FaultSpec,
    Measure,
    Plan,
    PlanFile,
    Preset,
    SkippedCase,
    compute_short_budget,
    get_case_weight,
    parse_fault,
    read_plan_file,
)
from parbench.bench.text import UserError, format_choices, parse_duration, parse_link

_MAX_ITEMSIZE = max(dtype.itemsize for dtype in DTYPES.values())
Candidate = tuple[Case, str | None]
"""A case, and a sentence with the reason why it cannot run here, None if it can run."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command-line options of ``parbench run``, before they are checked.

    None means that the user did not give the option. Durations, meshes, groups, faults and link
    speeds are texts that are parsed later.
    """

    preset: str | None = None
    """The name of a preset: ``smoke``, ``node`` or ``full``."""
    names: tuple[str, ...] = ()
    """The names and globs of the benchmarks to run, empty if the preset selects them."""
    targets: tuple[str, ...] = ()
    """The functions of custom steps, as ``package.module:function``."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The values of ``--set`` and ``--env`` as texts, by the name of the parameter or variable."""
    preset_overrides: Mapping[str, str] = field(default_factory=dict)
    """The parameter values that the output format requires, as texts by parameter name.

    They take precedence over the preset, but not over ``settings``.
    """
    entries: tuple[Entry, ...] = ()
    """The cases of ``cases_file``, which replace the cases of the preset. Empty without any."""
    nproc: int | None = None
    """The number of ranks on each node, or of all ranks if another launcher has started them."""
    backend: str | None = None
    """``gloo`` or ``nccl``."""
    device: str | None = None
    """``cpu`` or ``cuda``."""
    repetitions: int | None = None
    """The number of times that all ranks are started and measure all cases."""
    budget: str | None = None
    """The time budget of the whole run, such as ``90s``."""
    timeout: str | None = None
    """The time after which a case counts as hung, such as ``60s``."""
    mesh: str | None = None
    """The mesh of training steps, such as ``dp=2,tp=2``, or several meshes separated by ``;``."""
    group: str | None = None
    """The kinds of process groups that are measured, such as ``pairs`` or ``dp=2,tp=4:tp``."""
    inject: str | None = None
    """A fault that disturbs one rank on purpose, such as ``late:1:3ms``."""
    link: str | None = None
    """The nominal speed of the links in one direction, such as ``400Gbit``."""
    cases_file: Path | None = None
    """A plan file, whose cases and options are used."""
    launcher: str = "local"
    """``local`` starts the ranks on this machine, ``srun`` in a Slurm allocation."""
    nodes: int | None = None
    """The number of nodes that srun uses."""
    distribution: str | None = None
    """The order of ranks on the nodes of srun: ``block`` or ``cyclic``."""
    nodelist: str | None = None
    """The names of the nodes that srun uses, in Slurm's notation, such as ``n1,n[3-4]``."""

    @property
    def has_named_cases(self) -> bool:
        """True if the user names benchmarks or custom steps, or gives a file of cases.

        Otherwise the preset selects the cases.
        """
        return bool(self.names or self.entries or self.targets)


def plan_run(options: Options, modules: Sequence[str], joined: Joined | None) -> Plan:
    """Choose the ranks and cases of a run from the options and this machine, and return the plan.

    ``modules`` are the names of the modules that define benchmarks in their ``DEFINITIONS``.
    ``joined`` describes ranks that another launcher, such as torchrun, has started. None if
    parbench starts them. Raises ``UserError`` if the options are not valid, if this machine cannot
    run the ranks, or if no case can run.
    """
    folder = Path.cwd()
    catalogue = load_catalogue(modules)
    if options.targets:
        steps = [define_custom_step(target, folder) for target in options.targets]
        catalogue = (*catalogue, *steps)
        options = replace(options, names=(*options.names, *(step.name for step in steps)))
    has_budget = options.budget is not None  # on the command line
    options = _apply_cases_file(options)
    options = _apply_mesh(options, joined)
    spec, layout = _choose_ranks(options, joined)
    plan = make_plan(options, catalogue, spec)
    fault = _parse_fault_for(plan, options.inject)
    injection_note = "" if fault is None else f"injected: {fault.text}"
    notes = (*spec.notes, spec.sharing, injection_note)
    return msgspec.structs.replace(
        plan,
        emulation=get_emulation(os.environ),
        notes=tuple(note for note in notes if note),
        path=str(folder) if options.targets else None,
        sources={target: hash_source(target, folder) for target in options.targets},
        injection=fault,
        measure=plan.measure.extend_to_budget()
        if has_budget and plan.repetitions > 1
        else plan.measure,
        link_bytes_per_second=None if options.link is None else parse_link(options.link),
        spread=layout,
    )


def _parse_fault_for(plan: Plan, text: str | None) -> FaultSpec | None:
    """Return the fault that the text of ``--inject`` describes, None without the option.

    Raises ``UserError`` if the text is not valid or if a case of the plan cannot run with the
    fault.
    """
    if text is None:
        return None
    fault = parse_fault(text, plan.nproc)
    for case in plan.cases:
        # The host takes no part in the steps of a graph.
        if fault.kind == "slow" and case.all_params.get("mode") == "graph":
            raise UserError(f"--inject {text}: slow does not support mode graph of {case.label}")
    return fault


def make_plan(options: Options, catalogue: Sequence[BenchmarkDefinition], spec: WorldSpec) -> Plan:
    """Return the plan of the cases that the options select, for the ranks of ``spec``.

    ``catalogue`` holds the definitions of all benchmarks. The plan lists selected cases that cannot
    run here as skipped. Raises ``UserError`` if the options name a benchmark or preset that does
    not exist, if no case can run, or if no case can run with one of the user's parameter values.
    """
    name = options.preset or "node"
    if name not in PRESETS:
        raise UserError(f"no preset is named {name!r}: there are {format_choices(PRESETS, name)}")
    if options.repetitions is not None and not 1 <= options.repetitions <= MAX_REPETITIONS:
        raise UserError(
            f"--repetitions {options.repetitions}: it is a number from 1 to {MAX_REPETITIONS}"
        )
    preset = PRESETS[name]
    candidates: dict[str, Candidate] = {}
    for definition in _select_definitions(options, catalogue, name):
        for case, reason in _list_candidates(definition, options, preset, spec):
            candidates[case.id] = case, reason
    _check_possible(list(candidates.values()), options)
    cases, skipped = [], []
    for case, reason in candidates.values():
        if reason is None:
            cases.append(case)
        else:
            skipped.append(SkippedCase(case=case, reason=reason))
    repetitions, budget_seconds, measure = _choose_duration(options, preset, cases)
    timeout = options.timeout
    return Plan(
        preset=name,
        cases=tuple(cases),
        skipped=tuple(skipped),
        nproc=spec.nproc,
        backend=spec.backend,
        device=spec.device,
        repetitions=repetitions,
        budget_seconds=budget_seconds,
        timeout_seconds=preset.timeout_seconds if timeout is None else parse_duration(timeout),
        measure=measure,
    )


def _choose_duration(
    options: Options, preset: Preset, cases: Sequence[Case]
) -> tuple[int, float, Measure]:
    """Return the number of repetitions, the time budget of the run (s), and the sampling settings.

    If the user names cases, but neither a preset nor a budget, the three results follow from the
    number and the kind of the cases. Otherwise they are those of the preset, except for the values
    that the user sets.
    """
    if options.budget is not None:
        repetitions = options.repetitions or preset.repetitions
        return repetitions, parse_duration(options.budget), preset.measure
    if options.preset is not None or not options.has_named_cases:
        repetitions = options.repetitions or preset.repetitions
        measure = preset.measure
        if not options.has_named_cases:
            measure = msgspec.structs.replace(measure, seconds_per_case=preset.seconds_per_case)
        return repetitions, preset.budget_seconds, measure
    # The duration follows from the number of cases.
    has_few_operations = sum(map(get_case_weight, cases)) <= FEW_OPERATIONS
    repetitions = FEW_OPERATIONS_REPETITIONS if has_few_operations else SHORT_REPETITIONS
    repetitions = options.repetitions or repetitions
    measure = msgspec.structs.replace(preset.measure, seconds_per_case=SHORT_SECONDS_PER_CASE)
    return repetitions, compute_short_budget(cases, measure, repetitions), measure


def _select_definitions(
    options: Options, catalogue: Sequence[BenchmarkDefinition], preset_name: str
) -> list[BenchmarkDefinition]:
    """Return the definitions that the command line, the file of cases or the preset selects.

    Environment variables of ``--env`` become parameters of each definition. Raises ``UserError`` if
    no definition is selected, or if a parameter is set that none of them has.
    """
    named = select_definitions(catalogue, options.names)
    in_file = select_definitions(catalogue, [entry.name for entry in options.entries])
    definitions = [definition for definition in in_file if definition in named]
    if not options.names and not options.entries and preset_name != "full":
        definitions = [entry for entry in definitions if preset_name in entry.tags]
    if not definitions:
        names = " ".join(options.names)
        raise UserError(f"{options.cases_file} contains no case that matches {names}")
    variables = [declare_variable(name) for name in options.settings if is_variable(name)]
    definitions = [
        replace(definition, params=(*definition.params, *variables)) for definition in definitions
    ]
    _check_settings(options.settings, definitions)
    for entry in options.entries:
        _check_settings(entry.set, select_definitions(catalogue, [entry.name]))
    return definitions


def _check_settings(
    settings: Mapping[str, object], definitions: Sequence[BenchmarkDefinition]
) -> None:
    """Raise ``UserError`` if a key of ``settings`` is a parameter of none of the definitions.

    ``settings`` holds the values of parameters by name.
    """
    declared = {param.name for definition in definitions for param in definition.params}
    is_single = len(definitions) == 1
    owner = definitions[0].name if is_single else f"the {len(definitions)} chosen cases"
    if "mesh" in settings and "mesh" not in declared:
        problem = f"mesh is not a parameter of {owner}: only training steps have one"
        raise UserError(problem, hint="groups along an axis of a mesh: --group dp=2,tp=2:tp")
    refuse_unknown(settings, declared, owner)


def _list_candidates(
    definition: BenchmarkDefinition, options: Options, preset: Preset, spec: WorldSpec
) -> Iterator[Candidate]:
    """Yield pairs of a case of one benchmark and the reason why it cannot run, None if it can.

    There is at least one case for every combination of the selected parameter values. The values
    of the user replace those of a plan file, and both replace the values of the preset.
    """
    has_preset_sizes = not options.entries and "size_bytes" not in options.settings
    params_by_name = {param.name: param for param in definition.params}
    entries = options.entries or preset.entries
    unnamed_entry = Entry(name=definition.name)
    if not options.has_named_cases:
        unnamed_entry = Entry(name=definition.name, set=preset.other_settings)
        if spec.nproc >= MIN_RANKS_OF_GROUPS:
            entries += preset.entries_of_groups
    matching = [entry for entry in entries if matches(definition.name, entry.name)]
    for entry in matching or [unnamed_entry]:
        # The parameters vary in the order in which they are written.
        settings = {**entry.set, **options.preset_overrides, **options.settings}
        if options.entries:
            settings |= {**entry.set, **options.settings}
        values_by_name = {}
        for name, setting in settings.items():
            if name in params_by_name:
                values_by_name[name] = params_by_name[name].parse_many(setting)
        if has_preset_sizes and "size_bytes" in values_by_name:
            values_by_name["size_bytes"] = _adapt_sizes(values_by_name["size_bytes"], spec)
        for combination in itertools.product(*values_by_name.values()):
            params = dict(zip(values_by_name, combination, strict=True))
            yield from _expand(definition, params, spec)


def _adapt_sizes(sizes: Sequence[Value], spec: WorldSpec) -> tuple[Value, ...]:
    """Return the sizes (bytes) of a preset, rounded up so that every rank gets whole elements.

    On GPUs, larger sizes are appended. If the largest size is at least 16 MiB, these are 256 MiB
    and 1 GiB, which exceed the last level of cache. If it is at least 64 MiB, also 4 and 8 GiB, at
    which the bandwidth is highest, as far as the memory of a rank suffices.
    """
    num_bytes = [int(size) for size in sizes]
    max_bytes = max(num_bytes) if spec.device == "cuda" else 0
    if max_bytes >= LARGE_BYTES:
        num_bytes += BEYOND_CACHE
    if max_bytes >= PLATEAU_BYTES:
        memory = spec.rank_bytes or 0
        num_bytes += [size for size in PLATEAU if estimate_needed_bytes(size) <= memory]
    step = spec.nproc * _MAX_ITEMSIZE
    return tuple(math.ceil(size / step) * step for size in num_bytes)


def _expand(
    definition: BenchmarkDefinition, params: Params, spec: WorldSpec
) -> Iterator[Candidate]:
    """Yield the cases of one combination of parameter values, such as one for each process group.

    Each case comes with the reason why it cannot run here, None if it can run.
    """
    try:
        cases = [definition.build_case(expanded) for expanded in definition.expand(params, spec)]
    except UserError as error:
        yield definition.build_case(params), str(error)
        return
    for case in cases:
        yield case, definition.refuse(case.all_params, spec)


def _check_possible(candidates: Sequence[Candidate], options: Options) -> None:
    """Raise ``UserError`` if no case can run here.

    Also raise it if all cases with one of the user's parameter values cannot run, although cases
    with other values can.
    """
    names = {*options.settings, *(name for entry in options.entries for name in entry.set)}
    possible: set[tuple[str, Value]] = set()
    for case, reason in candidates:
        if reason is None:
            possible.update(case.params.items())
    for case, reason in candidates:
        for name, value in case.params.items():
            if reason is not None and name in names and (name, value) not in possible:
                raise UserError(f"no case can run with {name} = {value}: {reason}")
    if not possible:
        case, reason = candidates[0]
        raise UserError(f"none of {len(candidates)} cases can run here; {case.label}: {reason}")


def _choose_ranks(options: Options, joined: Joined | None) -> tuple[WorldSpec, NodeLayout | None]:
    """Return the description of the run's ranks, and their layout on the nodes of a Slurm job.

    ``joined`` describes ranks that another launcher has started. The layout is None if srun does
    not start the ranks.
    """
    allocation = _find_allocation(options, joined)
    if allocation is not None:
        return _choose_srun_ranks(options, allocation)
    machine = inspect_rank_machine(os.environ, None)
    if joined is not None:
        return _choose_joined_ranks(options, joined, machine), None
    return _choose_world(options, machine, options.nproc), None


def _choose_world(
    options: Options,
    machine: Machine,
    nproc: int | None,
    *,
    has_other_ranks: bool = False,
) -> WorldSpec:
    """Return the description of the ranks on this machine, with defaults for missing options.

    ``nproc`` is their number, None for the default. A single rank is allowed only if the user sets
    ``--nproc 1`` or if ``has_other_ranks``: other machines have ranks of the run too.
    """
    return choose_world(
        machine,
        nproc=nproc,
        backend=options.backend,
        device=options.device,
        allow_single=options.nproc == 1 or has_other_ranks,
    )


def _choose_joined_ranks(options: Options, joined: Joined, machine: Machine) -> WorldSpec:
    """Return the description of the ranks that another launcher, such as torchrun, has started.

    Raises ``UserError`` if the options do not fit these ranks or this machine.
    """
    if options.nproc not in (None, joined.size):
        problem = f"{joined.size} ranks are there already (WORLD_SIZE)"
        raise UserError(f"--nproc {options.nproc}: {problem}", hint="leave out --nproc")
    # A launcher that binds each rank to cores leaves this rank only its own.
    cores_of_launcher = try_call(lambda: count_available_cores(pid=os.getppid())) or 1
    machine = replace(machine, cores=max(machine.cores, cores_of_launcher))
    spec = _choose_world(options, machine, joined.local_size, has_other_ranks=joined.size > 1)
    return replace(spec, nproc=joined.size, nodes=math.ceil(joined.size / joined.local_size))


def _choose_srun_ranks(options: Options, allocation: Allocation) -> tuple[WorldSpec, NodeLayout]:
    """Return the description of the ranks that srun is to start, and their layout on the nodes."""
    machine = inspect_rank_machine(os.environ, allocation)
    has_several_nodes = allocation.nodes > 1
    ntasks_per_node = allocation.ntasks_per_node if options.nproc is None else options.nproc
    has_one_gpu = machine.torch_has_cuda and len(machine.gpus) == 1
    if ntasks_per_node is None and has_one_gpu and has_several_nodes and options.device != "cpu":
        ntasks_per_node = 1
    spec = _choose_world(options, machine, ntasks_per_node, has_other_ranks=has_several_nodes)
    layout = choose_layout(
        allocation,
        nodes=options.nodes,
        ntasks_per_node=spec.nproc,
        distribution=options.distribution,
    )
    sharing = spec.sharing
    if get_emulation(os.environ):  # All nodes share the cores of this machine.
        sharing = describe_sharing(machine, layout.num_ranks, spec.device)
    spec = replace(
        spec,
        nproc=layout.num_ranks,
        nodes=layout.nodes,
        distribution=layout.distribution,
        sharing=sharing,
    )
    return spec, layout


def _find_allocation(options: Options, joined: Joined | None) -> Allocation | None:
    """Return the Slurm allocation in which srun starts the ranks, None without ``--launcher srun``.

    Raises ``UserError`` if options require srun but the launcher is another, if this process is
    itself a rank, or if this process is not in an allocation.
    """
    if options.launcher != "srun":
        values = {
            "--nodes": options.nodelist or options.nodes,
            "--distribution": options.distribution,
        }
        for option, value in values.items():
            if value is not None:
                raise UserError(f"{option} {value} requires srun", hint="add --launcher srun")
        return None
    if joined is not None:
        raise UserError("--launcher srun starts ranks, and RANK is set: this one is there already")
    check_srun()
    return Allocation.find(os.environ)


def _apply_cases_file(options: Options) -> Options:
    """Return the options, completed by the cases and options of the file of ``--cases``.

    Options of the command line take precedence over options of the file.
    """
    if options.cases_file is None:
        return options
    file = read_plan_file(options.cases_file)
    values: dict[str, Any] = {}
    for name in PlanFile.OPTIONS:
        value = getattr(file, name)
        if value is not None and getattr(options, name) is None:
            values[name] = str(value) if name in ("budget", "timeout") else value
    return replace(options, **values, entries=file.case)


def _apply_mesh(options: Options, joined: Joined | None) -> Options:
    """Return the options with ``--mesh`` and ``--group`` as values of parameters in ``settings``.

    ``--mesh`` also sets ``nproc`` if the user did not, if parbench starts the ranks on this
    machine, and if all given meshes have the same number of ranks.
    """
    mesh, settings = options.mesh, options.settings
    if options.group is not None:
        settings = {**settings, "group": join_mesh_axes(options.group)}
        options = replace(options, settings=settings)
    if mesh is None:
        return options
    if "mesh" in settings:
        conflict = f"--mesh {mesh} and --set mesh={settings['mesh']} conflict"
        raise UserError(conflict, hint="leave out one of them")
    options = replace(options, settings={**settings, "mesh": mesh})
    sizes = {_count_mesh_ranks(text) for text in mesh.split(";")}
    is_possible = len(sizes) == 1 and (sizes != {1} or options.nproc == 1)
    if is_possible and options.nproc is None and joined is None and options.launcher == "local":
        return replace(options, nproc=sizes.pop())
    return options


def _count_mesh_ranks(text: str) -> int:
    """Return the product of the axis sizes of a mesh such as ``dp=2,tp=4``.

    The axes ``ep`` and ``etp`` do not count, because they lie inside the other axes.
    """
    axes = parse_mesh(text)
    return math.prod(size for axis, size in axes.items() if axis not in INSIDE)
