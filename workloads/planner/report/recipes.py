"""The meshes with which published models were trained, as a table. Pure."""

from dataclasses import asdict, dataclass

from parbench.bench.results.tables import Document, Row, Section, Table
from parbench.workloads.costs.parameter_table import count_parameters
from parbench.workloads.planner.models import MODELS
from parbench.workloads.planner.report.columns import make_column


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The mesh with which a published model was trained, as its authors describe it."""

    model: str
    """The name of the model in ``MODELS``."""
    devices: str
    """The number and type of devices, "-" if not published."""
    strategy: str
    """The parallelism strategies of the training, such as "FSDP (ZeRO-1), TP in the node"."""
    source: str
    """The publication and its section."""
    mesh: str = ""
    """The mesh in the syntax of --mesh, such as dp=16,pp=12,tp=8. Empty if not published."""
    sequence: int = 0
    """The tokens of a sequence. 0 means the value of the model in ``MODELS``."""


_LLAMA = "arXiv 2407.21783, table 4"
RECIPES = (
    Recipe(
        model="olmo-7b",
        devices="216 A100 (40 GB), or MI250X",
        strategy="FSDP",
        source="arXiv 2402.00838, sections 3.1 and 3.4",
        mesh="fsdp=216",
    ),
    Recipe(
        model="gemma2-27b",
        devices="6144 TPUv5p",
        strategy="ZeRO-3, TP",
        source="arXiv 2408.00118, section 3.3",
        mesh="fsdp=768,tp=8",
    ),
    Recipe(
        model="yi-34b",
        devices="-",
        strategy="ZeRO-1, TP and PP in the node",
        source="arXiv 2403.04652, section 4",
    ),
    Recipe(
        model="deepseek-67b",
        devices="-",
        strategy="ZeRO-1, TP with SP, PP with 1F1B",
        source="arXiv 2401.02954, section 2.4",
    ),
    Recipe(
        model="gpt-175b",
        devices="1536 A100",
        strategy="DP, TP in the node, PP",
        source="arXiv 2104.04473, table 2",
        mesh="dp=16,pp=12,tp=8",
    ),
    Recipe(
        model="llama3-405b",
        devices="8192 H100",
        strategy="FSDP (ZeRO-1), TP in the node, PP interleaved",
        source=_LLAMA,
        mesh="dp=64,pp=16,tp=8",
    ),
    Recipe(
        model="llama3-405b",
        devices="16384 H100",
        strategy="FSDP (ZeRO-1), TP in the node, CP, PP interleaved",
        source=_LLAMA,
        mesh="dp=8,pp=16,cp=16,tp=8",
        sequence=131072,
    ),
    Recipe(
        model="deepseek-v3",
        devices="2048 H800",
        strategy="ZeRO-1, PP (DualPipe), EP over 8 nodes, no TP",
        source="arXiv 2412.19437, section 3.2",
        mesh="pp=16,dp=128,ep=64",
    ),
    Recipe(
        model="gpt-1t",
        devices="3072 A100",
        strategy="DP, TP in the node, PP",
        source="arXiv 2104.04473, table 1",
        mesh="dp=6,pp=64,tp=8",
    ),
)
"""The published meshes, the smallest model first."""


def make_recipe_document() -> Document:
    """Return the document of ``parbench plan recipes``: published meshes, smallest model first."""
    table = Table(
        "recipes",
        "Recipes",
        caption="as published, in the syntax of --mesh",
        columns=[
            make_column("model"),
            make_column("parameters"),
            make_column("devices"),
            make_column("strategy"),
            make_column("mesh", description="in the syntax of --mesh, if sizes are published"),
            make_column("sequence", description="tokens"),
            make_column("source"),
        ],
        rows=[_make_row(recipe) for recipe in RECIPES],
    )
    return Document(
        name="recipes",
        heading="Meshes with which large models were trained",
        sections=[Section("recipes", "Recipes", tables=[table])],
        status="PUBLISHED",
    )


def _make_row(recipe: Recipe) -> Row:
    """Return the table row of a recipe, the mesh with which a published model was trained.

    The number of parameters of the model is added.
    """
    step = MODELS[recipe.model]
    return {
        **asdict(recipe),
        "parameters": f"{count_parameters(step.shape, step.moe) / 1e9:,.4g} B",
        "mesh": recipe.mesh or "-",
        "sequence": f"{recipe.sequence or step.shape.sequence:,}",
    }
