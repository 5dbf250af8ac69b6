"""Short texts about a predicted step: its settings, its bottleneck, its parameters. Pure."""

from collections.abc import Sequence
from itertools import groupby

from parbench.workloads.costs.parameter_table import count_active_parameters, count_parameters
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.planner.dry_run import DryRun


def describe_settings(spec: StepSpec) -> str:
    """Return the settings of a step as text, without its mesh.

    They are the microbatch, checkpointing, and where they apply the stage of ZeRO, the method of
    context parallelism, the pipeline schedule and the layers of its stages.
    """
    settings = [f"microbatch {spec.microbatch}", f"checkpointing {spec.checkpointing_label}"]
    if spec.dims.size("dp", "fsdp", "cp") > 1:
        settings.append(f"ZeRO {spec.zero_stage}")
    if spec.dims.cp > 1:
        settings.append(f"cp {spec.cp_method}")
    if spec.dims.pp > 1:
        schedule = spec.pipeline_options.schedule
        stages = spec.stages_per_rank
        settings.append(
            schedule if stages == 1 else f"{schedule}, {stages} virtual stages per rank"
        )
    if spec.pipeline is not None and spec.pipeline_options.layers_per_stage:
        settings.append(f"layers {format_split(spec.pipeline.layers_by_stage)}")
    return ", ".join(settings)


def format_split(layers_by_stage: Sequence[int]) -> str:
    """Return the numbers of layers of pipeline stages as text, such as ``7+2x8+7``.

    ``2x8`` stands for two successive stages of 8 layers. ``--set layers_per_stage`` accepts it.
    """
    texts: list[str] = []
    for layers, stages in groupby(layers_by_stage):
        count = len(list(stages))
        texts.append(str(layers) if count == 1 else f"{count}x{layers}")
    return "+".join(texts)


def describe_step(spec: StepSpec) -> str:
    """Return the mesh and the other settings of a step as text."""
    return f"{spec.dims.label} with {describe_settings(spec)}"


def label_step(spec: StepSpec) -> str:
    """Return a short name of a step for figures, such as ``pp=4,tp=2 none 1f1b x2``.

    It has the mesh, the checkpointing, the schedule of a pipeline, and the microbatch size.
    """
    schedule = f" {spec.pipeline_options.schedule}" if spec.dims.pp > 1 else ""
    return f"{spec.dims.label} {spec.checkpointing_label}{schedule} x{spec.microbatch}"


def describe_bottleneck(run: DryRun) -> str:
    """Return the bottleneck of a step as text, such as ``bubble (20% of the step)``.

    It is ``compute`` if compute takes at least 85 % of the step, and otherwise the largest other
    component of ``DryRun.parts``, such as ``exposed tp``, ``bubble`` or ``update``.
    """
    parts = run.parts
    compute = parts.pop("compute")
    name, seconds = max(parts.items(), key=lambda item: item[1])
    if compute >= 0.85 * run.seconds:
        name, seconds = "compute", compute
    return f"{name} ({seconds / run.seconds:.0%} of the step)"


def describe_parameters(spec: StepSpec) -> str:
    """Return the number of a model's parameters as text, such as ``8.03 B parameters``.

    For a MoE model, the text includes the number of parameters that a token uses.
    """
    total = count_parameters(spec.shape, spec.moe)
    unit, factor = ("B", 1e9) if total >= 1e9 else ("M", 1e6)
    active = count_active_parameters(spec.shape, spec.moe) / factor
    suffix = f" ({active:.4g} {unit} active)" if spec.moe else ""
    return f"{total / factor:.4g} {unit} parameters{suffix}"


def describe_batch(spec: StepSpec) -> str:
    """Return the global batch of a step in sequences, with its factors, as text."""
    data_ranks = spec.dims.size("dp", "fsdp")
    return (
        f"global batch {spec.global_batch} = {data_ranks} data ranks x {spec.microbatches} "
        f"microbatches x {spec.microbatch}, sequence {spec.shape.sequence}"
    )


def compute_state_bytes(spec: StepSpec) -> float:
    """Return the bytes of parameters, gradients and optimizer state of one full model.

    Nothing is sharded or replicated, as on one GPU that holds all parameters.
    """
    widths = spec.widths
    bytes_per_parameter = widths.parameters + widths.gradients + widths.optimizer
    return bytes_per_parameter * count_parameters(spec.shape, spec.moe)
