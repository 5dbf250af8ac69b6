"""The conversion of the options of ``parbench run`` to a plan of cases and ranks."""

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from parbench.bench.machine.environment import EMULATED_VARIABLE
from parbench.bench.machine.machine import count_available_cores, try_call
from parbench.bench.machine.slurm_allocation import (
    Allocation,
    NodeLayout,
    check_srun,
    choose_layout,
    inspect_rank_machine,
)
from parbench.bench.machine.world_spec import (
    Joined,
    WorldSpec,
    choose_world,
    make_launcher_error,
)
from parbench.bench.plan.cases import (
    BenchmarkDefinition,
    Case,
    Params,
    group_by_variables,
    load_catalogue,
    matches,
    select_definitions,
)
from parbench.bench.plan.catalogue import DTYPES
from parbench.bench.plan.custom_step import define_custom_step
from parbench.bench.plan.groups import count_mesh_ranks, parse_mesh
from parbench.bench.plan.params import Param, Value, is_variable, refuse_unknown
from parbench.bench.plan.plan import (
    PRESETS,
    Entry,
    Measure,
    Plan,
    Preset,
    SkippedCase,
    compute_sampling_seconds,
    get_case_weight,
    parse_fault,
)
from parbench.bench.text import UserError, parse_duration, parse_link

MIN_RANKS_OF_GROUPS = 4
"""The least number of ranks with which a preset measures process groups of some ranks only."""
BEYOND_CACHE = (256 << 20, 1 << 30)
"""The sizes (bytes) that a run on GPUs adds to a preset's list of sizes that reaches 16 MiB.

They are larger than the last level of a GPU's cache.
"""
SHORT_REPETITIONS = 3
"""The number of repetitions of a run of named cases, the least for a confidence interval."""
SHORT_SECONDS_PER_CASE = 0.3
"""The sampling time in seconds, per repetition, of a case of weight 1 in a run of named cases."""
SHORT_SECONDS = 1.9
"""The least sampling time in seconds of all named cases in one repetition.

A run of few cases has time for more samples. Without them its median is too large, because the
first samples of a start of ranks are slower than later ones.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command-line options of ``parbench run``, before they are checked.

    None means that the user did not give the option. Durations, faults and link speeds are
    texts that are parsed later.
    """

    preset: str | None = None
    """The name of a preset: ``smoke``, ``node`` or ``full``."""
    names: tuple[str, ...] = ()
    """The names and globs of the benchmarks to run, empty if the preset selects them."""
    targets: tuple[str, ...] = ()
    """The functions of custom steps, as ``package.module:function``."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The values of parameters and environment variables as texts of ``--set``, by name."""
    entries: tuple[Entry, ...] = ()
    """The cases of the file of ``--cases``, which replace the cases of the preset."""
    nproc: int | None = None
    """The number of ranks on each node, or of all ranks if another launcher has started them."""
    backend: str | None = None
    """``gloo`` or ``nccl``."""
    device: str | None = None
    """``cpu`` or ``cuda``."""
    repetitions: int | None = None
    """The number of times that all ranks are started and measure all cases."""
    budget: str | float | None = None
    """The time budget of the whole run, as text such as ``90s`` or a number of seconds."""
    timeout: str | float | None = None
    """The time without a new step after which a case counts as hung, as text or in seconds."""
    inject: str | None = None
    """A fault that disturbs one rank on purpose, such as ``late:1:3ms``."""
    link: str | None = None
    """The nominal speed of the links in one direction, such as ``400Gbit``."""
    launcher: str = "local"
    """``local`` starts the ranks on this machine, ``srun`` in a Slurm allocation."""
    nodes: int | None = None
    """The number of nodes that srun uses, None for all nodes of the allocation."""
    distribution: str | None = None
    """The order of ranks on the nodes of srun: ``block`` or ``cyclic``."""
    nodelist: str | None = None
    """The names of the nodes that srun uses, in Slurm's notation, such as ``n1,n[3-4]``."""

    @property
    def has_named_cases(self) -> bool:
        """True if the user names benchmarks, or gives a file of cases.

        Otherwise the preset selects the cases.
        """
        return bool(self.names or self.entries)


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
    spec, layout = _choose_ranks(options, joined)
    fault = None if options.inject is None else parse_fault(options.inject, spec.nproc)
    notes = [*spec.notes, "" if fault is None else f"injected: {fault.text}"]
    if spec.device == "cuda" and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        notes.append("CUDA_LAUNCH_BLOCKING is set: the host waits for each kernel")
    return msgspec.structs.replace(
        make_plan(options, catalogue, spec),
        emulation=os.environ.get(EMULATED_VARIABLE, ""),
        notes=tuple(note for note in notes if note),
        path=str(folder) if options.targets else None,
        injection=fault,
        link_bytes_per_second=None if options.link is None else parse_link(options.link),
        spread=layout,
    )


def make_plan(options: Options, catalogue: Sequence[BenchmarkDefinition], spec: WorldSpec) -> Plan:
    """Return the plan of the cases that the options select, for the ranks of ``spec``.

    ``catalogue`` holds the definitions of all benchmarks. The plan lists selected cases that cannot
    run here as skipped. Raises ``UserError`` if the options name a benchmark that does not exist,
    or if no case can run.
    """
    name = options.preset or "node"
    preset = PRESETS[name]
    cases: dict[str, Case] = {}
    skipped: dict[str, SkippedCase] = {}
    for definition in _select_definitions(options, catalogue, name):
        for params in _list_params(definition, options, preset, spec):
            expanded_params = [params]
            expansion_error = ""
            if definition.expand is not None:
                try:
                    expanded_params = list(definition.expand(params, spec))
                except UserError as error:
                    expansion_error = str(error)
            for case_params in expanded_params:
                case = definition.build_case(case_params)
                reason = expansion_error or definition.refuse(case.all_params, spec)
                if reason:
                    skipped[case.id] = SkippedCase(case=case, reason=reason)
                else:
                    cases[case.id] = case
    if not cases:
        first = next(iter(skipped.values()))
        raise UserError(f"no case can run here; {first.case.label}: {first.reason}")
    planned_cases = tuple(cases.values())
    repetitions, budget_seconds, measure = _choose_duration(options, preset, planned_cases)
    timeout = options.timeout
    return Plan(
        preset=name,
        cases=planned_cases,
        skipped=tuple(skipped.values()),
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
    that the user sets. A budget that the user sets is used for samples of all imprecise cases.
    """
    repetitions = options.repetitions or preset.repetitions
    if options.budget is not None:
        measure = msgspec.structs.replace(
            preset.measure, seconds_per_case=None, max_iterations=2000
        )
        return repetitions, parse_duration(options.budget), measure
    if options.preset is not None or not options.has_named_cases:
        return repetitions, preset.budget_seconds, preset.measure
    repetitions = options.repetitions or SHORT_REPETITIONS
    weight = sum(map(get_case_weight, cases))
    seconds_per_case = max(SHORT_SECONDS_PER_CASE, SHORT_SECONDS / weight)
    measure = msgspec.structs.replace(preset.measure, seconds_per_case=seconds_per_case)
    # Only a slow or busy machine reaches this budget: it has three times the sampling time.
    import_seconds, start_seconds = 30.0, 10.0
    startup_seconds = start_seconds * len(group_by_variables(cases))
    repetition_seconds = startup_seconds + 3 * compute_sampling_seconds(cases, measure)
    return repetitions, import_seconds + repetitions * repetition_seconds, measure


def _select_definitions(
    options: Options, catalogue: Sequence[BenchmarkDefinition], preset_name: str
) -> list[BenchmarkDefinition]:
    """Return the definitions that the file of cases, the command line or the preset selects.

    Environment variables of ``--env`` become parameters of each definition. Raises ``UserError`` if
    a name matches no definition, or if a parameter is set that none of them has.
    """
    patterns = [entry.name for entry in options.entries] or options.names
    definitions: Sequence[BenchmarkDefinition] = select_definitions(catalogue, patterns)
    if not patterns and preset_name != "full":
        definitions = [entry for entry in definitions if preset_name in entry.tags]
    # An empty value, the default, removes the variable.
    variables = [
        Param(name, "str", "", "environment variable of all ranks")
        for name in options.settings
        if is_variable(name)
    ]
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

    ``settings`` holds the values of parameters by name. The values are not checked.
    """
    declared = {param.name for definition in definitions for param in definition.params}
    is_single = len(definitions) == 1
    owner = definitions[0].name if is_single else f"the {len(definitions)} chosen cases"
    refuse_unknown(settings, declared, owner)


def _list_params(
    definition: BenchmarkDefinition, options: Options, preset: Preset, spec: WorldSpec
) -> Iterator[Params]:
    """Yield the parameter values, by name, of each case to measure of one benchmark.

    There is a case for each combination of the selected values. The values of the user replace
    those of a file of cases, and both replace the values of the preset. Parameters without a selected
    value are left out and have their default.
    """
    entries = options.entries or preset.entries
    if not options.has_named_cases:
        has_groups = spec.nproc >= MIN_RANKS_OF_GROUPS
        entries += tuple(
            entry for entry in preset.unnamed_entries if has_groups or "group" not in entry.set
        )
    has_preset_sizes = not options.entries and "size_bytes" not in options.settings
    params_by_name = {param.name: param for param in definition.params}
    matching = [entry for entry in entries if matches(definition.name, entry.name)]
    for entry in matching or [Entry(name=definition.name)]:
        # The parameters vary in the order in which they are written.
        settings = {**entry.set, **options.settings}
        values_by_name = {
            name: params_by_name[name].parse_many(setting)
            for name, setting in settings.items()
            if name in params_by_name
        }
        if has_preset_sizes and "size_bytes" in values_by_name:
            values_by_name["size_bytes"] = _adapt_sizes(values_by_name["size_bytes"], spec)
        for combination in itertools.product(*values_by_name.values()):
            yield dict(zip(values_by_name, combination, strict=True))


def _adapt_sizes(sizes: Sequence[Value], spec: WorldSpec) -> tuple[Value, ...]:
    """Return the sizes (bytes) of a preset, rounded up so that every rank gets whole elements.

    The rounding is for the largest element type. On GPUs, 256 MiB and 1 GiB are appended if the
    largest size is at least 16 MiB.
    """
    num_bytes = [int(size) for size in sizes]
    if spec.device == "cuda" and max(num_bytes) >= 16 << 20:
        num_bytes += BEYOND_CACHE
    step = spec.nproc * max(dtype.itemsize for dtype in DTYPES.values())
    return tuple(math.ceil(size / step) * step for size in num_bytes)


def _choose_ranks(options: Options, joined: Joined | None) -> tuple[WorldSpec, NodeLayout | None]:
    """Return the description of the run's ranks, and their layout on the nodes of a Slurm job.

    ``joined`` describes ranks that another launcher has started. Ranks that parbench starts on this
    machine are as many as the meshes have, unless the user sets their number. The layout is None if
    srun does not start the ranks. Raises ``UserError`` if the options do not fit these ranks or this machine.
    """
    if options.launcher == "srun":
        if joined is not None:
            raise make_launcher_error("--launcher srun")
        return _choose_srun_ranks(options)
    nodes = options.nodelist or options.nodes
    for option, value in (("--nodes", nodes), ("--distribution", options.distribution)):
        if value is not None:
            raise UserError(f"{option} {value} requires srun", hint="add --launcher srun")
    machine = inspect_rank_machine(os.environ, None)
    nproc, mesh = options.nproc, options.settings.get("mesh")
    if nproc is None and joined is None and mesh:
        sizes = {count_mesh_ranks(parse_mesh(text)) for text in mesh.split(";")}
        nproc = sizes.pop() if len(sizes) == 1 else None
    allow_single = nproc == 1
    if joined is not None:
        if nproc not in (None, joined.size):
            problem = f"the launcher has started {joined.size} ranks (WORLD_SIZE)"
            raise UserError(f"--nproc {nproc}: {problem}", hint="leave out --nproc")
        nproc, allow_single = joined.local_size, allow_single or joined.size > 1
        # A launcher that binds each rank to cores leaves this rank only its own.
        cores_of_launcher = try_call(lambda: count_available_cores(pid=os.getppid())) or 1
        machine = replace(machine, cores=max(machine.cores, cores_of_launcher))
    spec = choose_world(
        machine,
        nproc=nproc,
        backend=options.backend,
        device=options.device,
        allow_single=allow_single,
    )
    if joined is not None:
        nodes = math.ceil(joined.size / joined.local_size)
        spec = replace(spec, nproc=joined.size, nodes=nodes)
    return spec, None


def _choose_srun_ranks(options: Options) -> tuple[WorldSpec, NodeLayout]:
    """Return the description of the ranks that srun is to start, and their layout on the nodes.

    Raises ``UserError`` without srun, outside of an allocation, or if the nodes do not suffice.
    """
    check_srun()
    allocation = Allocation.find(os.environ)
    spec = choose_world(
        inspect_rank_machine(os.environ, allocation),
        nproc=allocation.ntasks_per_node if options.nproc is None else options.nproc,
        backend=options.backend,
        device=options.device,
        allow_single=options.nproc == 1 or allocation.nodes > 1,
    )
    layout = choose_layout(
        allocation,
        nodes=options.nodes,
        ntasks_per_node=spec.nproc,
        distribution=options.distribution,
    )
    spec = replace(
        spec, nproc=layout.num_ranks, nodes=layout.nodes, distribution=layout.distribution
    )
    return spec, layout
