"""The functions of ``parbench plan search`` and ``parbench plan mesh``, which return a document."""

from dataclasses import dataclass, replace
from pathlib import Path

from parbench.bench.results.runs import load_run
from parbench.bench.results.tables import Document
from parbench.bench.text import UserError, format_list
from parbench.workloads.context_parallel.context_methods import CONTEXT_METHODS
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.mesh.dims import ParallelDims
from parbench.workloads.model.shapes import PRECISIONS
from parbench.workloads.pipeline_parallel.pipeline_case import PipelineOptions
from parbench.workloads.pipeline_parallel.schedules import DEFAULT_SCHEDULE, find_schedule
from parbench.workloads.planner.candidates import (
    SearchRequest,
    balance_layers,
    place_step,
)
from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.hardware import Hardware, load_hardware
from parbench.workloads.planner.infeasible import require_candidates
from parbench.workloads.planner.link_time import (
    PredictSeconds,
    derive_hardware,
    fit_curves_of_run,
    make_curve_predictor,
)
from parbench.workloads.planner.measured.calibration import calibrate_hardware
from parbench.workloads.planner.models import load_model
from parbench.workloads.planner.report.documents import make_dry_run_document, make_search_document
from parbench.workloads.planner.search import search

DEFAULT_HARDWARE = "h100"  # the preset without --hardware
_AXIS_OF_SETTING = {
    "schedule": "pp",
    "virtual_stages": "pp",
    "layers_per_stage": "pp",
    "cp_method": "cp",
}
"""The axis of the mesh that a setting of ``--set`` needs, by the name of the setting."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The user's options of ``parbench plan`` for the training step.

    An empty text, 0 or None means that the user gave no value.
    """

    model: str
    """The name of a model, or the path of a config.json."""
    sequence: int = 0
    """The tokens of a sequence, by default those of the model."""
    precision: str = "bfloat16"
    """The type of weights and activations: bfloat16 or float32."""
    microbatch: int = 0
    """The sequences of a microbatch on a data rank."""
    global_batch: int = 0
    """The sequences per step on all GPUs."""
    checkpointing: str = ""
    """The activation checkpointing: none, selective, full, or full:K for one layer in K."""
    schedule: str = ""
    """The name of the pipeline schedule."""
    virtual_stages: int = 0
    """The number of pipeline stages per rank."""
    cp_method: str = ""
    """The name of the method of context parallelism."""
    zero: int | None = None
    """The stage of ZeRO, 0 to 3."""
    microbatches: int = 0
    """The microbatches per data rank and step, only for ``plan mesh``."""
    layers_per_stage: str = ""
    """The layers of each pipeline stage, such as 2+1+1+2, only for ``plan mesh``."""


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The user's options of ``parbench plan`` for the hardware."""

    hardware: str = ""
    """The name of a preset or the path of a .toml file. Empty means the default."""
    links: Path | None = None
    """The folder of a run whose measured collectives give the seconds of communication calls.

    With None, these seconds follow from the rates and latencies of the hardware.
    """
    calibrate: tuple[Path, ...] = ()
    """The folders of runs whose training steps give efficiencies, empty for assumed efficiencies.

    Efficiencies are the fraction of the peak FLOP/s that compute reaches, and the fraction of
    communication that compute hides.
    """


@dataclass(frozen=True, kw_only=True)
class PlannedMachine:
    """The hardware for which a step is predicted, and the times of communication calls on it."""

    hardware: Hardware
    """The type of GPU and its links, with declared or measured figures."""
    seconds: PredictSeconds | None = None
    """A function that returns the seconds of one communication call, from fits of measured calls.

    None if no run measured calls. The seconds then follow from ``hardware``.
    """
    notes: tuple[str, ...] = ()
    """Texts about measured and assumed figures of the hardware."""


def answer_search(
    options: StepOptions,
    machine_options: MachineOptions,
    *,
    gpus: int,
    top: int = 10,
    explain: bool = False,
) -> Document:
    """Return the document of ``parbench plan search``: the best meshes for a number of GPUs.

    ``top`` is the number of meshes in the table. ``explain`` adds the equations of the best mesh,
    and its time, communication and memory by component. Raises ``UserError`` if no mesh fits in
    memory.
    """
    for name in ("microbatches", "layers_per_stage"):
        if getattr(options, name):
            raise UserError(f"--set {name} is for one mesh: use parbench plan mesh")
    step = build_step(options)
    machine = load_machine(machine_options)
    request = SearchRequest(
        step=step,
        gpus=gpus,
        global_batch=options.global_batch or gpus,
        microbatch=options.microbatch,
        checkpointing=options.checkpointing,
        schedule=options.schedule,
        cp_method=options.cp_method,
        zero=options.zero,
    )
    result = search(request, machine.hardware, machine.seconds)
    require_candidates(request, machine.hardware, result)
    return make_search_document(request, result, top, machine.notes, explain=explain)


def answer_mesh(
    options: StepOptions,
    machine_options: MachineOptions,
    *,
    mesh: str,
    explain: bool = False,
) -> Document:
    """Return the document of ``parbench plan mesh``: the prediction of a step on one mesh.

    ``mesh`` is a text such as ``dp=2,tp=4``. ``explain`` adds the equations. Raises ``UserError``
    if the mesh breaks a rule.
    """
    spec = build_step_on_mesh(options, mesh)
    machine = load_machine(machine_options)
    run = dry_run(spec, machine.hardware, seconds=machine.seconds)
    return make_dry_run_document(run, machine.notes, explain=explain)


def build_step(options: StepOptions) -> StepSpec:
    """Return the training step that the options describe, on one rank without a mesh.

    Raises ``UserError`` for a value that is not allowed.
    """
    check_options(options)
    model = load_model(options.model, options.sequence)
    pipeline = PipelineOptions(
        schedule=options.schedule or DEFAULT_SCHEDULE, stages_per_rank=options.virtual_stages
    )
    return replace(
        model,
        microbatch=options.microbatch or 1,
        bytes_per_element=PRECISIONS[options.precision],
        pipeline_options=pipeline,
        cp_method=options.cp_method or "zigzag",
    ).with_checkpointing(options.checkpointing or "none")


def build_step_on_mesh(options: StepOptions, mesh: str) -> StepSpec:
    """Return the training step that the options describe on a mesh such as ``dp=2,tp=4``.

    If the options set neither microbatches nor a global batch, a step with a pipeline has four
    microbatches per pipeline rank, and other steps have one. The layers are distributed over the
    stages so that the ranks compute equally long, unless the options set them. Raises ``UserError``
    with the equation that does not hold, such as ``heads(6) % tp(4) != 0``.
    """
    if options.microbatches and options.global_batch:
        raise UserError("--set microbatches and --global-batch exclude each other: leave out one")
    step = build_step(options)
    dims = ParallelDims.parse(mesh)
    for name, axis in _AXIS_OF_SETTING.items():
        if getattr(options, name) and dims.size(axis) == 1:
            raise UserError(f"--set {name} has no effect without {axis}: add {axis}=N to --mesh")
    default = 4 * dims.pp if dims.pp > 1 else 1
    spec = replace(place_step(step, dims), microbatches=options.microbatches or default)
    schedule = spec.pipeline_options.schedule
    layers = options.layers_per_stage
    if not layers and dims.pp > 1 and spec.shape.layers % spec.pipeline_size.num_stages:
        layers = balance_layers(spec.shape, spec.moe, dims.pp, spec.stages_per_rank, schedule)
    spec = spec.with_pipeline(layers_per_stage=layers)
    if options.global_batch:
        spec = spec.with_batch(options.global_batch)
    return apply_zero(spec, options.zero).require_valid()


def apply_zero(spec: StepSpec, stage: int | None) -> StepSpec:
    """Return a copy of a step on a mesh that shards its state by a stage of ZeRO, 0 to 3.

    With ``stage`` None the step is returned unchanged. Stages 0 and 1 are for the axis ``dp``, so
    that they raise ``UserError`` with fsdp > 1. Stages 2 and 3 are for ``fsdp``, so that they raise
    ``UserError`` with fsdp = 1.
    """
    if stage is None:
        return spec
    fsdp = spec.dims.fsdp
    if stage > 1 and fsdp == 1:
        raise UserError(f"--set zero={stage} needs fsdp > 1, such as --mesh fsdp={spec.ranks}")
    if stage <= 1 and fsdp > 1:
        raise UserError(f"--set zero={stage} is not allowed with fsdp > 1: use dp instead")
    return replace(spec, zero1="distributed" if stage == 1 else "", reshard=stage != 2)


def check_options(options: StepOptions) -> None:
    """Raise ``UserError`` for an unknown schedule, context-parallel method or precision."""
    find_schedule(options.schedule or DEFAULT_SCHEDULE)
    for name, text, allowed in (
        ("cp_method", options.cp_method or "zigzag", CONTEXT_METHODS),
        ("precision", options.precision, PRECISIONS),
    ):
        if text not in allowed:
            raise UserError(f"--set {name}={text} is not allowed: choose {format_list(allowed)}")


def load_machine(options: MachineOptions) -> PlannedMachine:
    """Return the hardware of a plan and the times of communication calls, from the user's options.

    Without runs, the hardware is the declared one. The run ``links`` gives the times of calls, the
    number of GPUs per node and, if it measured it, the peak FLOP/s. The training steps of the runs
    ``calibrate`` give the efficiencies.
    """
    hardware = load_hardware(options.hardware or DEFAULT_HARDWARE)
    seconds: PredictSeconds | None = None
    notes: tuple[str, ...] = ()
    if options.links is not None:
        run = load_run(options.links)
        hardware, notes = derive_hardware(run, hardware)
        seconds = make_curve_predictor(fit_curves_of_run(run))
    if options.calibrate:
        runs = [load_run(path) for path in options.calibrate]
        hardware, efficiencies = calibrate_hardware(runs, hardware)
        notes = (*notes, *efficiencies)
    return PlannedMachine(hardware=hardware, seconds=seconds, notes=notes)
