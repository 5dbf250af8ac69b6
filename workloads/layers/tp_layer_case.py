"""Tensor-parallel layers without a model: styles, with their communication and memory. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from parbench.bench.plan.params import Value, choice
from parbench.bench.text import UserError
from parbench.workloads.costs.communication_pattern import sent_bytes
from parbench.workloads.model.shapes import PRECISIONS, Shape, build_shape, count_ffn_matrices

STYLES = {
    "column": "output features split",
    "row": "input features split",
    "megatron": "columns, then rows (arXiv 1909.08053)",
    "naive": "columns, gathered after each matrix",
}
"""The splits of a layer's matrices over ranks, as phrases for reports, keyed by name.

A Linear has the first two, an FFN the last two.
"""
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

    style: str
    """The name of the split of the layer's matrices over ranks, a key of ``STYLES``."""
    shape: Shape
    """The sizes of the layer and of a sequence."""
    microbatch: int
    """The number of sequences in a step."""
    bytes_per_element: int
    """The bytes of an element of weights and activations."""
    tp: int
    """The number of ranks that split the layer."""

    @property
    def is_linear(self) -> bool:
        """True if the layer is a Linear, False if it is an FFN."""
        return self.style in ("column", "row")

    @property
    def tokens(self) -> int:
        """The number of tokens in a step, the same on each rank."""
        return self.microbatch * self.shape.sequence

    @property
    def input_features(self) -> int:
        """The number of features of the layer's full input, over all ranks.

        It is the FFN's inner size for a matrix that is split by rows, otherwise the hidden size.
        """
        return self.shape.ffn if self.style == "row" else self.shape.hidden

    @property
    def output_features(self) -> int:
        """The number of features of the layer's full output, over all ranks.

        It is the FFN's inner size for a matrix that is split by columns, otherwise the hidden size.
        """
        return self.shape.ffn if self.style == "column" else self.shape.hidden

    @property
    def first_matrices(self) -> int:
        """The number of an FFN's matrices before its activation: up, and for llama also gate."""
        return count_ffn_matrices(self.shape) - 1

    def compute_sent_bytes(self) -> float:
        """Return the bytes that a rank sends in one forward and one backward pass.

        Collectives are counted with the bytes that optimal ring algorithms send.
        """
        token_bytes = self.tokens * self.bytes_per_element
        hidden_sum = sent_bytes("all_reduce", token_bytes * self.shape.hidden, self.tp)
        if self.style == "megatron":
            return 2 * hidden_sum
        if self.is_linear:
            return hidden_sum
        # Backward also sums the gradient of the second matrix's input, which every rank has.
        ffn_sum = sent_bytes("all_reduce", token_bytes * self.shape.ffn, self.tp)
        gathered = self.first_matrices * self.shape.ffn + self.shape.hidden
        return hidden_sum + ffn_sum + sent_bytes("all_gather", token_bytes * gathered, self.tp)

    def compute_saved_bytes(self) -> float:
        """Return the bytes of activations that a rank saves in one forward pass for backward.

        A Linear saves its input. An FFN saves its input and the tensors of its inner size: for gpt
        the output of ``up`` and its GELU, for llama the outputs of ``up`` and ``gate``, the SiLU of
        the latter, and the input of ``down``.
        """
        features = self.input_features / (self.tp if self.style == "row" else 1)
        if not self.is_linear:
            parts = 1 if self.style == "naive" else self.tp
            features += 2 * self.first_matrices * self.shape.ffn / parts
        return self.tokens * features * self.bytes_per_element


def make_tp_layer(params: Mapping[str, Value], ranks: int) -> TpLayerCase:
    """Return the layer that parameters describe, split over ``ranks`` ranks.

    ``params`` has values by parameter name. Raises ``UserError`` if ``ranks`` do not divide the
    sizes of the matrices.
    """
    shape = build_shape(params)
    for name, size in (("ffn", shape.ffn), ("hidden", shape.hidden)):
        if size % ranks:
            raise UserError(f"{name}({size}) % tp({ranks}) != 0")
    return TpLayerCase(
        style=str(params["style"]),
        shape=shape,
        microbatch=int(params["microbatch"]),
        bytes_per_element=PRECISIONS[str(params["precision"])],
        tp=ranks,
    )
