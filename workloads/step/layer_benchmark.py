"""The benchmark of one layer without a model, compared with the same layer in one process."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from parbench.bench.world.benchmark import Benchmark
from parbench.bench.world.world import World
from parbench.workloads.model.transformer import make_generator
from parbench.workloads.parallel.mesh import get_full_tensor
from parbench.workloads.step.verify import compare, norm_of_all


class LayerBenchmark(Benchmark):
    """Forward and backward pass of a layer, without reduction or update of gradients."""

    layer: nn.Module
    x: Tensor
    """The input of this rank, a leaf with a gradient."""
    output_gradient: Tensor

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self._world = world
        self._dtype = dtype
        self._differences: tuple[str, ...] = ()
        self._step_number = 0

    @abstractmethod
    def _draw(self) -> None:
        """Draw ``x`` and ``output_gradient`` of the next step."""

    @abstractmethod
    def _run_reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return output and gradients of one process, by the names of ``collect_tensors``."""

    def step(self) -> None:
        self.layer.zero_grad()
        self._run_forward_backward()

    def _run_forward_backward(self) -> None:
        self.x.grad = None
        self.output = self.layer(self.x)
        self.output.backward(self.output_gradient)

    def reset(self) -> None:
        self._step_number += 1
        self._draw()

    def _draw_tensor(self, purpose: object, *size: int) -> Tensor:
        """Return normal numbers, a function of seed, step and purpose."""
        generator = make_generator(self._world.seed, f"{purpose} {self._step_number}")
        tensor = torch.randn(size, generator=generator)
        return tensor.to(self._world.device, self._dtype)

    def check(self) -> int:
        """Return the number of elements of output and gradients that differ from one process."""
        actual = collect_tensors(self.layer, self.x, self.output)
        reference = self._run_reference(torch.float32)
        low_precision = None
        if self._dtype != torch.float32:
            low_precision = self._run_reference(self._dtype)
        gradients = [reference[name] for name in reference if name != "output"]
        wrong = list(compare(actual, reference, low_precision, norm_of_all(gradients)))
        self._differences = tuple(map(str, wrong))
        return sum(tensor.num_elements for tensor in wrong)

    def differences(self) -> Sequence[str]:
        """Return a phrase for each wrong tensor of the last check."""
        return self._differences


def collect_tensors(layer: nn.Module, x: Tensor, output: Tensor) -> dict[str, Tensor]:
    """Return the output, and the full gradients of the input and of a layer's parameters."""
    gradients = {"input gradient": x.grad}
    for name, parameter in layer.named_parameters():
        gradients[f"gradient of {name}"] = parameter.grad
    tensors = {"output": output.detach()}
    for name, gradient in gradients.items():
        if gradient is not None:
            tensors[name] = get_full_tensor(gradient)
    return tensors
