"""Benchmarks of one tensor-parallel layer without a model: a Linear or an FFN."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from parbench.bench.plan.params import Value
from parbench.bench.world.benchmark import Description, Explanation, Work
from parbench.bench.world.world import World, make_group
from parbench.workloads.layers.layer_benchmark import LayerBenchmark, collect_tensors
from parbench.workloads.layers.tp_layer_case import STYLES, TpLayerCase, make_tp_layer
from parbench.workloads.mesh.mesh import destroy_groups
from parbench.workloads.model.transformer import DTYPES, Ffn, set_weights
from parbench.workloads.probes.memory_probe import MemoryProbe, count_saved_bytes
from parbench.workloads.probes.overlap import OverlapProbe
from parbench.workloads.probes.probe import Probe, run_probes
from parbench.workloads.probes.sent_bytes import CommBytesProbe
from parbench.workloads.torch_internals import forget_meshes

CLAIM = "one layer, forward and backward, without a model or an optimizer"
"""The note on results of this benchmark, which states its extent."""


class TpLayerBenchmark(LayerBenchmark):
    """The benchmark of one tensor-parallel layer's forward and backward pass, without a model.

    All ranks have the same tokens, which are new in each step.
    """

    def __init__(self, world: World, **params: Value) -> None:
        """Make the layer on all ranks of ``world``.

        ``params`` are values of the benchmark's parameters by name. Their ``style`` decides if the
        layer is a Linear or an FFN.
        """
        self.case = make_tp_layer(params, world.size)
        super().__init__(world, DTYPES[self.case.bytes_per_element])
        forget_meshes()  # A custom step may have used DTensors on another group of these ranks.
        self._group = make_group(world, [range(world.size)])
        # A group that one rank closes while another rank still connects would break.
        world.barrier()
        self.layer = self._initialize_layer()
        mesh = DeviceMesh.from_group(self._group, world.device.type, mesh_dim_names=("tp",))
        split_layer(self.layer, mesh, self.case)
        self._draw()

    def _initialize_layer(self) -> nn.Module:
        """Return the full layer on the device, with the weights that belong to the seed."""
        case = self.case
        with torch.device(self._world.device):
            layer: nn.Module = Ffn(case.shape)
            if case.is_linear:
                layer = nn.Linear(case.input_features, case.output_features, bias=False)
        layer = layer.to(self._dtype)
        set_weights(layer, self._world.seed)
        return layer

    def _draw(self) -> None:
        """Draw the layer's input and output gradient for the next step, before it is timed.

        All ranks draw the same full tensors. Each keeps its part of the features in ``x`` and
        ``output_gradient`` where the split of the layer requires it.
        """
        case = self.case
        tokens = (case.microbatch, case.shape.sequence)
        self._full_x = self._draw_tensor("tokens", *tokens, case.input_features)
        self._full_gradient = self._draw_tensor("gradients", *tokens, case.output_features)
        self.x = self._take_part(self._full_x, case.style == "row").requires_grad_()
        self.output_gradient = self._take_part(self._full_gradient, case.style == "column")

    def _take_part(self, full: Tensor, is_sharded: bool) -> Tensor:
        """Return a copy of this rank's part of the features of ``full``, the last dimension.

        If ``is_sharded`` is False, it is a copy of all features.
        """
        if not is_sharded:
            return full.clone()
        return full.chunk(self._world.size, dim=-1)[self._world.rank].contiguous()

    def _run_reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the output and gradients of the full layer on one process, by tensor name.

        The names are those of ``collect_tensors``, and all tensors are in ``dtype``. The output and
        the input gradient have only this rank's part if they are sharded over ranks.
        """
        layer = self._initialize_layer().to(dtype)
        x = self._full_x.detach().to(dtype).requires_grad_()
        output = layer(x)
        output.backward(self._full_gradient.to(dtype))
        tensors = collect_tensors(layer, x, output)
        style = self.case.style
        tensors["output"] = self._take_part(tensors["output"], style == "column")
        tensors["input gradient"] = self._take_part(tensors["input gradient"], style == "row")
        return tensors

    def describe(self) -> Description:
        """Return the tokens of a step, and facts for its record.

        The tokens divided by the step's seconds give the metric ``tokens_per_second``. All ranks
        have the same tokens, which count once. The facts include the analytical bytes that a rank
        sends in a step and the FLOPs of a rank in a step.
        """
        case = self.case
        weights = sum(parameter.numel() for parameter in self.layer.parameters())
        details = {
            "style": STYLES[case.style],
            "bytes_formula": {"tp": case.compute_sent_bytes()},
            "flops_per_rank": 6.0 * weights / case.tp * case.tokens,
            "axes": {"tp": {"ranks": case.tp}},
        }
        return Description(
            headline="step_time",
            work=(Work(name="tokens_per_second", amount=case.tokens),),
            details=details,
            notes=(CLAIM,),
        )

    def explain_step(self, reset: Callable[[], None], budget_seconds: float) -> Explanation:
        """Return metrics of sent bytes, overlap and memory of the layer.

        They are measured in further steps, which take about ``budget_seconds``. ``reset`` is called
        before each step. All ranks take part.
        """
        groups = {"tp": self._group}
        probes: list[Probe[Any]] = [
            CommBytesProbe(groups, lambda: {"tp": self.case.compute_sent_bytes()}),
            OverlapProbe(self._world, groups),
            MemoryProbe(
                world=self._world,
                model=self.layer,
                optimizer=torch.optim.SGD(self.layer.parameters()),  # It has no state.
                forward_backward=self._run_forward_backward,
                count_activations=partial(
                    count_saved_bytes, self.layer, lambda: self.layer(self.x)
                ),
                formula={"activations": self.case.compute_saved_bytes()},
            ),
        ]
        return run_probes(self._world, probes, self.step, reset, budget_seconds)

    def close(self) -> None:
        """Destroy the process group. All ranks must call this method."""
        destroy_groups([self._group])


def split_layer(layer: nn.Module, mesh: DeviceMesh, case: TpLayerCase) -> None:
    """Split the matrices of a Linear or an FFN over the mesh in the style of the case.

    In an FFN, the matrices before the activation function (``up`` and for llama also ``gate``) have
    the same input. Backward sums the input's gradient over ranks by one all_reduce for both.
    """
    if case.is_linear:
        style = ColwiseParallel() if case.style == "column" else RowwiseParallel()
        parallelize_module(layer, mesh, style)
        return
    styles: dict[str, ParallelStyle] = {"down": RowwiseParallel()}
    first_style = ColwiseParallel()
    if case.style == "naive":
        first_style = ColwiseParallel(output_layouts=Replicate())
        styles["down"] = first_style
    for name in ("gate", "up"):
        if getattr(layer, name) is not None:
            styles[name] = first_style
    replicated_input = PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
    )
    parallelize_module(layer, mesh, replicated_input)
    parallelize_module(layer, mesh, styles)
