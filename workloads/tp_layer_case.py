"""Tensor-parallel layers without a model: styles, with their communication and memory. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from parbench.bench.plan.params import Value, choice
from parbench.bench.text import UserError
from parbench.workloads.costs.communication_pattern import sent_bytes
from parbench.workloads.costs.equation import Equation
from parbench.workloads.model.shapes import PRECISIONS, Shape, num_ffn_matrices, shape_of


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """Equal calls of a layer. ``elements`` is the text of an equation, ``times`` the calls."""

    op: str
    elements: str
    times: str = "1"


@dataclass(frozen=True, kw_only=True)
class TpStyle:
    """A way to split the matrices of a layer over ranks."""

    name: str
    label: str
    forward: tuple[LayerCall, ...]
    backward: tuple[LayerCall, ...]
    saved_elements: str
    """The elements that a rank saves for backward."""
    has_sharded_input: bool = False
    has_sharded_output: bool = False


HIDDEN, WIDE = "tokens * hidden", "tokens * ffn"
SUM_OF_HIDDEN = LayerCall(op="all_reduce", elements=HIDDEN)
COLUMN = TpStyle(
    name="column",
    label="output features split",
    forward=(),
    backward=(SUM_OF_HIDDEN,),
    saved_elements=HIDDEN,
    has_sharded_output=True,
)
ROW = TpStyle(
    name="row",
    label="input features split",
    forward=(SUM_OF_HIDDEN,),
    backward=(),
    saved_elements=f"{WIDE} / tp",
    has_sharded_input=True,
)
MEGATRON = TpStyle(
    name="megatron",
    label="columns, then rows (arXiv 1909.08053)",
    forward=(SUM_OF_HIDDEN,),
    backward=(SUM_OF_HIDDEN,),
    saved_elements=f"{HIDDEN} + 2 * first_matrices * {WIDE} / tp",
)
NAIVE = TpStyle(
    name="naive",
    label="columns, gathered after every matrix",
    forward=(
        LayerCall(op="all_gather", elements=WIDE, times="first_matrices"),
        LayerCall(op="all_gather", elements=HIDDEN),
    ),
    backward=(LayerCall(op="all_reduce", elements=WIDE), SUM_OF_HIDDEN),
    saved_elements=f"{HIDDEN} + 2 * first_matrices * {WIDE}",
)
STYLES: Mapping[str, TpStyle] = {style.name: style for style in (COLUMN, ROW, MEGATRON, NAIVE)}
LINEAR_STYLE = choice("style", "split of the matrix by columns or by rows", "column", "row")
FFN_STYLE = choice(
    "style",
    "megatron: columns, then rows; naive: columns, and an all_gather after every matrix",
    "megatron",
    "naive",
)


@dataclass(frozen=True, kw_only=True)
class TpLayerCase:
    """One layer on ``tp`` ranks, which have the same tokens."""

    style: TpStyle
    shape: Shape
    microbatch: int
    bytes_per_element: int
    tp: int

    @property
    def tokens(self) -> int:
        return self.microbatch * self.shape.sequence

    @cached_property
    def symbols(self) -> dict[str, float]:
        return {
            "tokens": self.tokens,
            "hidden": self.shape.hidden,
            "ffn": self.shape.ffn,
            # The matrices before the activation function: up, and the gate of llama.
            "first_matrices": num_ffn_matrices(self.shape) - 1,
            "tp": self.tp,
        }

    def compute_sent_bytes(self) -> float:
        """Return the bytes that a rank sends in a step, as nccl-tests count them."""
        total = 0.0
        for call in (*self.style.forward, *self.style.backward):
            num_bytes = self._evaluate(call.elements) * self.bytes_per_element
            total += self._evaluate(call.times) * sent_bytes(call.op, num_bytes, self.tp)
        return total

    def compute_saved_bytes(self) -> float:
        """Return the bytes of activations that a rank saves for backward."""
        return self._evaluate(self.style.saved_elements) * self.bytes_per_element

    def _evaluate(self, text: str) -> float:
        return Equation(text=text, symbols=self.symbols).value


def make_tp_layer(params: Mapping[str, Value], ranks: int) -> TpLayerCase:
    """Return the case of parameters. Raises ``UserError`` if ranks do not divide the matrices."""
    shape = shape_of(params)
    for name, size in (("ffn", shape.ffn), ("hidden", shape.hidden)):
        if size % ranks:
            raise UserError(f"{name}({size}) % tp({ranks}) != 0")
    return TpLayerCase(
        style=STYLES[str(params["style"])],
        shape=shape,
        microbatch=int(params["microbatch"]),
        bytes_per_element=PRECISIONS[str(params["precision"])],
        tp=ranks,
    )
