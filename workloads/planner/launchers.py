"""A planned step as commands: what would check it by parbench, and the flags of torchtitan and Megatron-LM. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.model.shapes import SHAPES, Shape
from parbench.workloads.planner.dry_run import DryRun

_TITAN_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble",
    "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
_MEGATRON_CP = {"ring": "p2p", "zigzag": "p2p", "ulysses": "a2a", "allgather_kv": "allgather"}
_TITAN_CP = {"zigzag": "alltoall", "allgather_kv": "allgather"}
_MOST_AXES, _MOST_WAITED, _SMALL = 2, 0.02, 4


def commands_of(run: DryRun) -> list[tuple[str, str]]:
    """Return what to measure the plan by: small and here, whole on its machines, and as a sweep over them."""
    spec = run.spec
    here, whole, ranks = settings_of(small(run), run), settings_of(spec, run), small(run).world
    nodes = -(-spec.world // run.hardware.gpus_per_node)
    tasks = min(spec.world, run.hardware.gpus_per_node)
    started = "parbench run --launches 2 --only hybrid"
    by_slurm = f"salloc -N{nodes} parbench run --launcher srun --ntasks-per-node {tasks}"
    settings = ", ".join(f'{name} = "{value}"' for name, value in whole.items())
    lines = (
        'name = "plan"',
        f"nodes = [{nodes}]",
        f"ntasks_per_node = {tasks}",
        "launches = 3",
        "[[case]]",
        'name = "workload.hybrid"',
        f"set = {{ {settings} }}",
    )
    written = " ".join(f"'{line}'" for line in lines)
    return [
        ("here, its costliest axes, two ranks each", f"{started} --nproc {ranks} {_set(here)} --timeout 3m"),
        ("on its own machines", f"{by_slurm} --launches 3 --only hybrid {_set(whole)}"),
        ("as a sweep", f"printf '%s\\n' {written} > plan.toml && parbench slurm submit plan.toml --dry-run"),
        ("then, prediction beside measurement", "parbench plan --validate latest"),
    ]


def unmeasured(spec: StepSpec) -> list[str]:
    """Return what of a plan the measured step does otherwise."""
    told = (
        (spec.zero in (1, 2), f"ZeRO {spec.zero}: it replicates state by dp, or shards all of it by fsdp"),
        (spec.every > 1, f"{spec.checkpointing_text}: it computes every layer again"),
        (spec.moe, "experts: their inner size is its own, in every layer"),
        (spec.shape.latent or spec.shape.head_dim, "attention: its heads divide the hidden size"),
    )
    return [f"The measured step takes otherwise {words}." for holds, words in told if holds]


def _set(settings: Mapping[str, str]) -> str:
    return " ".join(
        f"--mesh {value}" if name == "mesh" else f"--set {name}={value}" for name, value in settings.items()
    )


def small(run: DryRun) -> StepSpec:
    """Return a small model on two ranks of each of the axes that cost most, with the plan's schedule and methods."""
    spec = run.spec
    costs = {axis.name: axis.exposed_seconds for axis in run.axes} | {"pp": run.bubble_seconds}
    axes = [name for name in spec.mesh if spec.size(name) > 1 and name not in ("ep", "etp")]
    most = sorted(axes, key=lambda name: -costs.get(name, 0.0))[:_MOST_AXES] or ["dp"]
    mesh = {name: 2 for name in axes or ["dp"] if name in most}
    layers = max(_SMALL, mesh.get("pp", 1) * spec.stages_per_rank)
    shape = replace(SHAPES["small-llama" if spec.shape.recipe == "llama" else "small"], layers=layers)
    if spec.size("ep") > 1 and {"dp", "fsdp", "cp"} & mesh.keys():
        mesh["ep"] = 2
    batch = _SMALL if "pp" in mesh else min(_SMALL, spec.microbatches)
    moe = spec.moe and replace(spec.moe, experts=8, top_k=2, dense_layers=0)
    return replace(spec, shape=shape, mesh=mesh, microbatch=1, microbatches=batch, split="", moe=moe)


def settings_of(spec: StepSpec, run: DryRun) -> dict[str, str]:
    """Return the parameters of ``workload.hybrid`` that mean a step, its compute waited for as ``run`` predicts it."""
    waited = run.compute_seconds / run.spec.microbatches / 3
    if spec.world < run.spec.world:
        waited = min(waited, _MOST_WAITED)
    found = {"mesh": spec.mesh_text, **_shape_settings(spec.shape)}
    found |= {"microbatch": str(spec.microbatch), "microbatches": str(spec.microbatches)}
    found |= {"checkpointing": spec.checkpointing, "compute": f"timed:{waited * 1e3:.3g}ms"}
    if spec.mixed and spec == run.spec:
        found["precision"] = "bfloat16"
    if spec.size("pp") > 1:
        found |= {"schedule": spec.schedule} | ({"chunks": str(spec.chunks)} if spec.chunks else {})
        found |= {"split": spec.split} if spec.split else {}
    if spec.size("cp") > 1:
        found["cp_method"] = spec.cp_method
    if spec.moe:
        found |= {"experts": str(spec.moe.experts), "top_k": str(spec.moe.top_k), "routing": "balanced"}
    return found


def _shape_settings(shape: Shape) -> dict[str, str]:
    """Return the name of a shape with what of it is otherwise, or all sizes where no shape has its width."""
    lengths, widths = ("layers", "sequence", "vocabulary"), ("hidden", "heads", "kv_heads", "ffn")
    alike = [name for name, known in SHAPES.items() if known.recipe == shape.recipe]
    told = {name: {size: getattr(known, size) for size in (*lengths, *widths)} for name, known in SHAPES.items()}
    own = {size: getattr(shape, size) for size in (*lengths, *widths)}
    nearest = min(alike, key=lambda name: sum(own[size] != told[name][size] for size in own))
    is_as_wide = all(own[size] == told[nearest][size] for size in widths)
    others = {size: str(own[size]) for size in own if not is_as_wide or own[size] != told[nearest][size]}
    return {"shape": nearest, **others}


Told = tuple[object, str, str]
"""Whether something holds, the flag that says so, and what is lacking where there is none."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags that mean a step to a trainer, and what of it they cannot say."""

    trainer: str
    flags: tuple[str, ...]
    lacks: tuple[str, ...]


def _chosen(trainer: str, *told: Told) -> Flags:
    """Keep what holds: its flag, or what is lacking."""
    held = [one for one in told if one[0]]
    return Flags(
        trainer=trainer,
        flags=tuple(flag for _, flag, _ in held if flag),
        lacks=tuple(lack for _, _, lack in held if lack),
    )


def _is_outside(spec: StepSpec) -> bool:
    """Say whether copies of a pipeline are further apart than its stages."""
    axes = [name for name in spec.mesh if spec.size(name) > 1]
    return {"dp", "pp"} <= {*axes} and axes.index("dp") < axes.index("pp")


def torchtitan(spec: StepSpec) -> Flags:
    dp, fsdp, pp, cp, tp, ep = (spec.size(axis) for axis in ("dp", "fsdp", "pp", "cp", "tp", "ep"))
    local = spec.num_sequences if pp > 1 else spec.microbatch
    schedule, rotate = _TITAN_SCHEDULES.get(spec.schedule, ""), _TITAN_CP.get(spec.cp_method, "")
    p, outer = "--parallelism.", _is_outside(spec)
    return _chosen(
        "torchtitan",
        (True, f"--training.seq_len {spec.shape.sequence}", ""),
        (True, f"--training.local_batch_size {local} --training.global_batch_size {spec.global_batch}", ""),
        (True, f"{p}data_parallel_replicate_degree {dp} {p}data_parallel_shard_degree {fsdp}", ""),
        (spec.zero1, "", "ZeRO-1: it shards parameters too, or nothing"),
        (fsdp > 1, f"{p}fsdp_reshard_after_forward {'always' if spec.reshard else 'never'}", ""),
        (tp > 1, f"{p}tensor_parallel_degree {tp}", ""),
        (pp > 1, f"{p}pipeline_parallel_degree {pp}", ""),
        (pp > 1, f"{p}pipeline_parallel_microbatch_size {spec.microbatch}", ""),
        (pp > 1 and schedule, f"{p}pipeline_parallel_schedule {schedule}", ""),
        (pp > 1 and not schedule, "", f"{spec.schedule}: pipeline_parallel_schedule_csv takes torch's CSV of it"),
        (spec.split, "", f"layers of stages {spec.split}: its configuration names modules"),
        (cp > 1, f"{p}context_parallel_degree {cp}", ""),
        (cp > 1 and rotate, f"{p}context_parallel_rotate_method {rotate}", ""),
        (cp > 1 and not rotate, "", f"{spec.cp_method}: it has torch's balanced ring and all_gather"),
        (ep > 1, f"{p}expert_parallel_degree {ep} {p}expert_tensor_parallel_degree {spec.size('etp')}", ""),
        (outer, "", "dp outside pp: its pipelines are outermost"),
        (True, f"--activation_checkpoint.mode {'selective' if spec.every > 1 else spec.checkpointing}", ""),
        (spec.checkpointing == "selective", "--activation_checkpoint.selective_ac_option op", ""),
        (spec.every > 1, f"--activation_checkpoint.selective_ac_option {spec.every}", ""),
    )


def _attention_flags(shape: Shape) -> list[Told]:
    latent = shape.latent
    if latent is not None:
        heads = f"--qk-head-dim {latent.qk_nope_head_dim} --qk-pos-emb-head-dim {latent.qk_rope_head_dim}"
        ranks = f"--kv-lora-rank {latent.kv_lora_rank} {heads} --v-head-dim {latent.v_head_dim}"
        return [
            (True, f"--multi-latent-attention {ranks}", ""),
            (latent.q_lora_rank, f"--q-lora-rank {latent.q_lora_rank}", ""),
        ]
    return [
        (shape.kv_heads < shape.heads, f"--group-query-attention --num-query-groups {shape.kv_heads}", ""),
        (shape.heads * shape.head_size != shape.hidden, f"--kv-channels {shape.head_size}", ""),
        (shape.qk_norm, "--qk-layernorm", ""),
    ]


def _expert_flags(spec: StepSpec, moe: Moe) -> list[Told]:
    dense = moe.dense_layers
    return [
        (True, f"--num-experts {moe.experts} --moe-router-topk {moe.top_k} --moe-ffn-hidden-size {moe.expert_ffn}", ""),
        (moe.shared, f"--moe-shared-expert-intermediate-size {moe.shared * moe.expert_ffn}", ""),
        (dense, f"--moe-layer-freq '([0]*{dense}+[1]*{spec.shape.layers - dense})'", ""),
        (True, f"--expert-model-parallel-size {spec.size('ep')}", ""),
        (True, f"--expert-tensor-parallel-size {spec.size('etp')}", ""),
    ]


def megatron(spec: StepSpec) -> Flags:
    """Return the flags of Megatron-LM's ``pretrain_gpt.py``."""
    shape, moe = spec.shape, spec.moe
    dp, fsdp, pp, cp, tp = (spec.size(axis) for axis in ("dp", "fsdp", "pp", "cp", "tp"))
    sharding = "optim_grads_params" if spec.reshard else "optim_grads"
    kind, layers = _MEGATRON_CP.get(spec.cp_method, ""), spec.split.split("+")
    last = pp * spec.stages_per_rank - 1
    layout = "|".join(f"{'E' * (i == 0)}t*{count}{'L' * (i == last)}" for i, count in enumerate(layers))
    again = max(1, round(spec.at(0).layers_by_stage[0] / spec.every))
    how = f"block --recompute-num-layers {again}" if spec.every > 1 else "uniform --recompute-num-layers 1"
    full = f"--recompute-granularity full --recompute-method {how}"
    return _chosen(
        "Megatron-LM",
        (True, f"--num-layers {shape.layers} --hidden-size {shape.hidden} --ffn-hidden-size {shape.ffn}", ""),
        (True, f"--num-attention-heads {shape.heads}", ""),
        *_attention_flags(shape),
        *(_expert_flags(spec, moe) if moe else ()),
        (True, f"--seq-length {shape.sequence} --max-position-embeddings {shape.sequence}", ""),
        (True, f"--micro-batch-size {spec.microbatch} --global-batch-size {spec.global_batch}", ""),
        (spec.mixed, "--bf16", ""),
        (tp > 1, f"--tensor-model-parallel-size {tp} --sequence-parallel", ""),
        (pp > 1, f"--pipeline-model-parallel-size {pp}", ""),
        (
            pp > 1 and spec.schedule == "interleaved" and not spec.split,
            f"--num-virtual-stages-per-pipeline-rank {spec.stages_per_rank}",
            "",
        ),
        (pp > 1 and spec.schedule not in ("1f1b", "interleaved"), "", f"{spec.schedule}: it has 1f1b and interleaved"),
        (pp > 1 and spec.split, f"--pipeline-model-parallel-layout '{layout}'", ""),
        (_is_outside(spec), "--use-tp-pp-dp-mapping", ""),
        (cp > 1, f"--context-parallel-size {cp}", ""),
        (cp > 1 and kind, f"--cp-comm-type {kind}", ""),
        (cp > 1 and not kind, "", f"{spec.cp_method}: its rings are balanced as zigzag is"),
        (spec.zero1, "--use-distributed-optimizer", ""),
        (fsdp > 1, f"--use-megatron-fsdp --data-parallel-sharding-strategy {sharding}", ""),
        (fsdp > 1 and dp > 1, f"--num-distributed-optimizer-instances {dp}", ""),
        (spec.checkpointing == "full", full, ""),
        (
            spec.checkpointing == "selective",
            "--recompute-granularity selective",
            "selective: it computes attention again, the plan all but products and attention",
        ),
    )
