"""Benchmarks of one tensor-parallel layer without a model: a Linear or an FFN."""

from collections.abc import Callable, Sequence
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

from parbench.bench.launch.messages import Work
from parbench.bench.plan.params import Value
from parbench.bench.results.details import MeshDetails
from parbench.bench.world.benchmark import Benchmark, Description, Explanation
from parbench.bench.world.world import World, make_group
from parbench.workloads.model.transformer import DTYPES, Ffn, make_generator, set_weights
from parbench.workloads.parallel.mesh import destroy_groups, get_full_tensor
from parbench.workloads.step.memory import MemoryProbe, count_saved_bytes
from parbench.workloads.step.overlap import OverlapProbe
from parbench.workloads.step.probe import Probe, ProbedStep, run_probes
from parbench.workloads.step.sent_bytes import CommBytesProbe
from parbench.workloads.step.verify import compare, norm_of_all
from parbench.workloads.tp_layer_case import (
    COLUMN,
    MEGATRON,
    TpLayerCase,
    make_tp_layer,
)

CLAIM = "one layer, forward and backward, without a model or an optimizer"


class TpLayerBenchmark(Benchmark):
    """Forward and backward pass of one layer, whose inputs are the same tokens on all ranks."""

    def __init__(
        self,
        make_layer: Callable[[TpLayerCase], nn.Module],
        split_layer: Callable[[nn.Module, DeviceMesh, TpLayerCase], None],
        world: World,
        **params: Value,
    ) -> None:
        self._world = world
        self.case = make_tp_layer(params, world.size)
        self._make_layer = make_layer
        self._group = make_group(world, [range(world.size)])
        # A group that one rank closes while another rank still connects would break.
        world.barrier()
        self._dtype = DTYPES[self.case.bytes_per_element]
        self.layer = self._initialize_layer(self._dtype)
        mesh = DeviceMesh.from_group(self._group, world.device.type, mesh_dim_names=("tp",))
        split_layer(self.layer, mesh, self.case)
        self._differences: tuple[str, ...] = ()
        self._step_number = 0
        self._draw()

    def _initialize_layer(self, dtype: torch.dtype) -> nn.Module:
        """Return the full layer with the weights of the seed."""
        with torch.device(self._world.device):
            layer = self._make_layer(self.case).to(dtype)
        set_weights(layer, self._world.seed)
        return layer

    def step(self) -> None:
        self.layer.zero_grad()
        self._run_forward_backward()

    def reset(self) -> None:
        self._step_number += 1
        self._draw()

    def _run_forward_backward(self) -> None:
        self.x.grad = None
        self._output = self.layer(self.x)
        self._output.backward(self._output_gradient)

    def _draw(self) -> None:
        style = self.case.style
        self._full_x = self._draw_tensor("tokens", self._input_features)
        self._full_gradient = self._draw_tensor("gradients", self._output_features)
        self.x = self._take_part(self._full_x, style.has_sharded_input).requires_grad_()
        self._output_gradient = self._take_part(self._full_gradient, style.has_sharded_output)

    @property
    def _input_features(self) -> int:
        shape = self.case.shape
        return shape.ffn if self.case.style.has_sharded_input else shape.hidden

    @property
    def _output_features(self) -> int:
        shape = self.case.shape
        return shape.ffn if self.case.style.has_sharded_output else shape.hidden

    def _draw_tensor(self, name: str, features: int) -> Tensor:
        """Return normal numbers (b, s, features), a function of the seed and the step."""
        generator = make_generator(self._world.seed, f"{name} {self._step_number}")
        size = (self.case.microbatch, self.case.shape.sequence, features)
        tensor = torch.randn(size, generator=generator)
        return tensor.to(self._world.device, self._dtype)

    def _take_part(self, full: Tensor, is_sharded: bool) -> Tensor:
        """Return this rank's features of a tensor, all if it is not sharded."""
        if not is_sharded:
            return full.clone()
        return full.chunk(self._world.size, dim=-1)[self._world.rank].contiguous()

    def check(self) -> int:
        """Return the elements of output and gradients that differ from those of one process."""
        assert self.x.grad is not None
        actual = {"output": self._output.detach(), "input": self.x.grad}
        actual |= collect_gradients(self.layer)
        reference = self._run_reference(torch.float32)
        low_precision = None
        if self._dtype != torch.float32:
            low_precision = self._run_reference(self._dtype)
        gradients = [reference[name] for name in reference if name != "output"]
        wrong = list(compare(actual, reference, low_precision, norm_of_all(gradients)))
        self._differences = tuple(map(str, wrong))
        return sum(tensor.num_elements for tensor in wrong)

    def _run_reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return this rank's part of output and input gradient, and all weight gradients."""
        layer = self._initialize_layer(self._dtype).to(dtype)
        x = self._full_x.detach().to(dtype).requires_grad_()
        output = layer(x)
        output.backward(self._full_gradient.to(dtype))
        assert x.grad is not None
        style = self.case.style
        return {
            "output": self._take_part(output.detach(), style.has_sharded_output),
            "input": self._take_part(x.grad, style.has_sharded_input),
            **collect_gradients(layer),
        }

    def differences(self) -> Sequence[str]:
        return self._differences

    def describe(self) -> Description:
        case = self.case
        weights = sum(parameter.numel() for parameter in self.layer.parameters())
        details = {
            "style": case.style.label,
            "bytes_formula": {"tp": case.compute_sent_bytes()},
            "flops_per_rank": 6.0 * weights / case.tp * case.tokens,
            **MeshDetails(axes={"tp": {"ranks": case.tp}}).as_details,
        }
        return Description(
            headline="step_time",
            work=(Work(name="tokens_per_second", amount=case.tokens),),
            details=details,
            notes=(CLAIM,),
        )

    def explain(self, begin: Callable[[], None], budget_seconds: float) -> Explanation:
        groups = {"tp": self._group}
        probed = ProbedStep(
            world=self._world,
            axes=groups,
            model=self.layer,
            optimizer=torch.optim.SGD(self.layer.parameters()),  # It has no state.
            forward_backward=self._run_forward_backward,
        )
        probes: list[Probe[Any]] = [
            CommBytesProbe(groups, lambda: {"tp": self.case.compute_sent_bytes()}),
            OverlapProbe(self._world, groups),
            MemoryProbe(
                step=probed,
                count_activations=partial(
                    count_saved_bytes, self.layer, lambda: self.layer(self.x)
                ),
                formula={"activations": self.case.compute_saved_bytes()},
            ),
        ]
        return run_probes(self._world, probes, self.step, begin, budget_seconds)

    def close(self) -> None:
        destroy_groups([self._group])


def collect_gradients(layer: nn.Module) -> dict[str, Tensor]:
    """Return the full gradients of a layer by name."""
    return {
        f"gradient of {name}": get_full_tensor(parameter.grad)
        for name, parameter in layer.named_parameters()
        if parameter.grad is not None
    }


def make_linear(case: TpLayerCase) -> nn.Module:
    """Return the Linear from hidden to ffn for columns, from ffn to hidden for rows."""
    hidden, ffn = case.shape.hidden, case.shape.ffn
    sizes = (hidden, ffn) if case.style is COLUMN else (ffn, hidden)
    return nn.Linear(*sizes, bias=False)


def split_linear(layer: nn.Module, mesh: DeviceMesh, case: TpLayerCase) -> None:
    style = ColwiseParallel() if case.style is COLUMN else RowwiseParallel()
    parallelize_module(layer, mesh, style)


def make_ffn(case: TpLayerCase) -> nn.Module:
    return Ffn(case.shape)


def split_ffn(layer: nn.Module, mesh: DeviceMesh, case: TpLayerCase) -> None:
    """Split the matrices, and let both first matrices share one sum of input gradients."""
    is_megatron = case.style is MEGATRON
    first_style = ColwiseParallel(output_layouts=None if is_megatron else Replicate())
    styles: dict[str, ParallelStyle] = {
        name: first_style for name in ("gate", "up") if getattr(layer, name) is not None
    }
    styles["down"] = (
        RowwiseParallel() if is_megatron else ColwiseParallel(output_layouts=Replicate())
    )
    replicated_input = PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
    )
    parallelize_module(layer, mesh, replicated_input)
    parallelize_module(layer, mesh, styles)


tp_linear = partial(TpLayerBenchmark, make_linear, split_linear)
tp_ffn = partial(TpLayerBenchmark, make_ffn, split_ffn)
