"""Tensor-parallel layers without a model: styles, with their communication and memory. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from parbench.bench.plan.params import Value, choice
from parbench.bench.text import UserError
from parbench.workloads.costs.communication_pattern import sent_bytes
from parbench.workloads.model.shapes import PRECISIONS, Shape, num_ffn_matrices, shape_of


@dataclass(frozen=True, kw_only=True)
class TpStyle:
    """A way to split the matrices of a layer over the ranks of tensor parallelism."""

    name: str
    """The name that users write as ``style``, such as ``column``."""
    label: str
    """A phrase that describes the split in reports."""
    sums: int
    """The number of all_reduces of activations of size hidden, or of their gradients, in a step.

    A step is one forward and one backward pass.
    """
    has_gathers: bool = False
    """True if the output of each matrix is all-gathered before the next matrix."""
    has_sharded_input: bool = False
    """True if each rank has only a part of the features of the layer's input."""
    has_sharded_output: bool = False
    """True if each rank has only a part of the features of the layer's output."""


# A Linear has the first two styles, an FFN the last two.
COLUMN = TpStyle(name="column", label="output features split", sums=1, has_sharded_output=True)
ROW = TpStyle(name="row", label="input features split", sums=1, has_sharded_input=True)
MEGATRON = TpStyle(name="megatron", label="columns, then rows (arXiv 1909.08053)", sums=2)
NAIVE = TpStyle(name="naive", label="columns, gathered after each matrix", sums=1, has_gathers=True)
STYLES: Mapping[str, TpStyle] = {style.name: style for style in (COLUMN, ROW, MEGATRON, NAIVE)}
LINEAR_STYLE = choice("style", "split of the matrix by columns or by rows", "column", "row")
FFN_STYLE = choice(
    "style",
    "megatron: columns, then rows; naive: columns, and an all_gather after each matrix",
    "megatron",
    "naive",
)


@dataclass(frozen=True, kw_only=True)
class TpLayerCase:
    """The sizes of the benchmark of one Linear or FFN, split over ``tp`` ranks.

    All ranks have the same tokens.
    """

    style: TpStyle
    """The split of the layer's matrices over ranks."""
    shape: Shape
    """The sizes of the layer and of a sequence."""
    microbatch: int
    """The number of sequences in a step."""
    bytes_per_element: int
    """The bytes of an element of weights and activations."""
    tp: int
    """The number of ranks that split the layer."""

    @property
    def tokens(self) -> int:
        """The number of tokens in a step, the same on each rank."""
        return self.microbatch * self.shape.sequence

    @property
    def input_features(self) -> int:
        """The number of features of the layer's full input, over all ranks.

        It is the FFN's inner size for a matrix that is split by rows, otherwise the hidden size.
        """
        return self.shape.ffn if self.style is ROW else self.shape.hidden

    @property
    def output_features(self) -> int:
        """The number of features of the layer's full output, over all ranks.

        It is the FFN's inner size for a matrix that is split by columns, otherwise the hidden size.
        """
        return self.shape.ffn if self.style is COLUMN else self.shape.hidden

    @property
    def first_matrices(self) -> int:
        """The number of an FFN's matrices before its activation: up, and for llama also gate."""
        return num_ffn_matrices(self.shape) - 1

    def compute_sent_bytes(self) -> float:
        """Return the bytes that a rank sends in one forward and one backward pass.

        Collectives are counted with the bytes that optimal ring algorithms send.
        """
        token_bytes = self.tokens * self.bytes_per_element
        hidden_bytes = token_bytes * self.shape.hidden
        total = self.style.sums * sent_bytes("all_reduce", hidden_bytes, self.tp)
        if self.style.has_gathers:
            ffn_bytes = token_bytes * self.shape.ffn
            total += self.first_matrices * sent_bytes("all_gather", ffn_bytes, self.tp)
            total += sent_bytes("all_gather", hidden_bytes, self.tp)
            # Backward sums the gradient of the second matrix's input, which every rank has.
            total += sent_bytes("all_reduce", ffn_bytes, self.tp)
        return total

    def compute_saved_bytes(self) -> float:
        """Return the bytes of activations that a rank saves in one forward pass for backward.

        A Linear saves its input. An FFN saves its input and the tensors of its inner size: for gpt
        the output of ``up`` and its GELU, for llama the outputs of ``up`` and ``gate``, the SiLU of
        the latter, and the input of ``down``.
        """
        features = self.input_features / (self.tp if self.style.has_sharded_input else 1)
        if self.style in (MEGATRON, NAIVE):
            parts = 1 if self.style.has_gathers else self.tp
            features += 2 * self.first_matrices * self.shape.ffn / parts
        return self.tokens * features * self.bytes_per_element


def make_tp_layer(params: Mapping[str, Value], ranks: int) -> TpLayerCase:
    """Return the layer that parameters describe, split over ``ranks`` ranks.

    ``params`` has values by parameter name. Raises ``UserError`` if ``ranks`` do not divide the
    sizes of the matrices.
    """
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
