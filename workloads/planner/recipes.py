"""The meshes with which models were trained, and their predictions where the mesh is known. Pure."""

from dataclasses import dataclass, replace

from parbench.bench.results.document import (
    Cell,
    Document,
    DocumentColumn,
    DocumentPart,
    DocumentTable,
)
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.parallel.dims import ParallelDims
from parbench.workloads.planner.candidates import balance_layers, place_step
from parbench.workloads.planner.dry_run import GIGA, DryRun, dry_run
from parbench.workloads.planner.hardware import hardware_of
from parbench.workloads.planner.models import MODELS


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run as its authors describe it.

    ``mesh`` is empty if they give no sizes, and ``preset`` if no hardware of the planner has them.
    """

    model: str
    devices: str
    strategy: str
    source: str
    mesh: str = ""
    preset: str = ""
    sequence: int = 0  # 0 = that of the model
    global_batch: int = 0  # sequences
    checkpointing: str = "none"
    schedule: str = "1f1b"

    def predict(self) -> DryRun | None:
        """Return the predicted step, None if the source or the planner lacks sizes."""
        if not self.mesh or not self.preset:
            return None
        spec = place_step(self._build_step(), ParallelDims.parse(self.mesh))
        if spec.dims.size("dp", "cp") > 1:
            spec = replace(spec, zero1="distributed")
        return dry_run(spec.with_batch(self.global_batch), hardware_of(self.preset))

    def _build_step(self) -> StepSpec:
        step = MODELS[self.model].with_checkpointing(self.checkpointing)
        if self.sequence:
            step = replace(step, shape=replace(step.shape, sequence=self.sequence))
        stages_per_rank = 2 if self.schedule == "interleaved" else 1
        split = balance_layers(
            step.shape,
            step.moe,
            ParallelDims.parse(self.mesh).pp,
            stages_per_rank,
            self.schedule,
        )
        return replace(step, cp_method="allgather_kv").with_pipeline(
            schedule=self.schedule, stages_per_rank=stages_per_rank, split=split
        )


_LLAMA = "arXiv 2407.21783, table 4"
RECIPES = (
    Recipe(
        model="olmo-7b",
        devices="216 A100 (40 GB), or MI250X",
        strategy="FSDP",
        source="arXiv 2402.00838, section 3.1",
        mesh="fsdp=216",
    ),
    Recipe(
        model="gemma2-27b",
        devices="6144 TPUv5p",
        strategy="ZeRO-3, TP",
        source="arXiv 2408.00118, section 3.2",
        mesh="fsdp=768,tp=8",
    ),
    Recipe(
        model="yi-34b",
        devices="A800, number not published",
        strategy="ZeRO-1, TP in the node, PP",
        source="arXiv 2403.04652, section 5",
    ),
    Recipe(
        model="deepseek-67b",
        devices="H800, number not published",
        strategy="ZeRO-1, TP with SP, PP with 1F1B",
        source="arXiv 2401.02954, section 2.4",
    ),
    Recipe(
        model="gpt-175b",
        devices="1536 A100",
        strategy="DP, TP in the node, PP",
        source="arXiv 2104.04473, table 2",
        mesh="dp=16,pp=12,tp=8",
        preset="a100",
        global_batch=1536,
        checkpointing="full",
    ),
    Recipe(
        model="llama3-405b",
        devices="8192 H100",
        strategy="FSDP (ZeRO-1), TP in the node, PP interleaved",
        source=_LLAMA,
        mesh="dp=64,pp=16,tp=8",
        preset="h100",
        global_batch=2048,
        schedule="interleaved",
    ),
    Recipe(
        model="llama3-405b",
        devices="16384 H100",
        strategy="FSDP (ZeRO-1), TP in the node, CP, PP interleaved",
        source=_LLAMA,
        mesh="dp=8,pp=16,cp=16,tp=8",
        preset="h100",
        sequence=131072,
        global_batch=128,
        schedule="interleaved",
    ),
    Recipe(
        model="deepseek-v3",
        devices="2048 H800",
        strategy="ZeRO-1, PP (DualPipe), EP over 8 nodes, no TP",
        source="arXiv 2412.19437, section 3.2",
        mesh="pp=16,dp=128,ep=64",
        preset="h800",
        global_batch=15360,
        checkpointing="selective",
    ),
    Recipe(
        model="gpt-1t",
        devices="3072 A100",
        strategy="DP, TP in the node, PP",
        source="arXiv 2104.04473, table 1",
        mesh="dp=6,pp=64,tp=8",
        preset="a100",
        global_batch=3072,
        checkpointing="full",
    ),
)


def recipe_document() -> Document:
    """Return the table of recipes, the smallest model first."""
    table = DocumentTable(
        id="recipes",
        title="Recipes",
        caption="as published, with predictions where mesh and hardware are known",
        columns=[
            DocumentColumn(title="model"),
            DocumentColumn(title="parameters"),
            DocumentColumn(title="devices"),
            DocumentColumn(title="strategy"),
            DocumentColumn(title="mesh", help="in the words of --mesh, if sizes are published"),
            DocumentColumn(title="sequence", help="tokens"),
            DocumentColumn(title="step", help="predicted", unit="s"),
            DocumentColumn(title="MFU", help="predicted", unit="share"),
            DocumentColumn(title="memory", help="predicted for the fullest rank", unit="GB"),
            DocumentColumn(title="source"),
        ],
        rows=[_make_row(recipe) for recipe in RECIPES],
        notes=["DeepSeek-V3 trained in FP8. Its prediction is for bfloat16."],
    )
    part = DocumentPart(id="recipes", title="Recipes", tables=[table])
    heading = "Meshes with which large models were trained"
    return Document(name="recipes", heading=heading, parts=[part])


def _make_row(recipe: Recipe) -> list[Cell]:
    step = MODELS[recipe.model]
    run = recipe.predict()
    prediction: list[Cell] = [None, None, None]
    if run is not None:
        prediction = [run.seconds, run.mfu, run.fullest.memory.total / GIGA]
    return [
        recipe.model,
        f"{num_parameters(step.shape, step.moe) / 1e9:,.4g} B",
        recipe.devices,
        recipe.strategy,
        recipe.mesh or "not published",
        f"{recipe.sequence or step.shape.sequence:,}",
        *prediction,
        recipe.source,
    ]
