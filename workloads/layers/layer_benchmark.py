"""The benchmark of one layer without a model, compared with the same layer in one process."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from parbench.bench.world.benchmark import Benchmark
from parbench.bench.world.world import World
from parbench.workloads.mesh.mesh import get_full_tensor
from parbench.workloads.model.transformer import make_generator
from parbench.workloads.step.verify import compare, compute_norm


class LayerBenchmark(Benchmark):
    """The benchmark of one layer's forward and backward pass, with its numerical check.

    Gradients are neither reduced over ranks nor used for an update. Subclasses set ``layer`` and
    draw the inputs.
    """

    layer: nn.Module
    """The layer that is timed, or this rank's part of it."""
    x: Tensor
    """The input of the layer on this rank, a leaf tensor whose gradient is computed."""
    output_gradient: Tensor
    """The gradient of the layer's output on this rank, from which backward starts."""

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        """Set up the benchmark for a layer whose weights and inputs have type ``dtype``."""
        self._world = world
        self._dtype = dtype
        self._differences: tuple[str, ...] = ()
        self._step_number = 0

    @abstractmethod
    def _draw(self) -> None:
        """Draw the input ``x`` and the ``output_gradient`` of the next step, before it is timed."""

    @abstractmethod
    def _run_reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Run the full layer in this process only, and return its output and gradients.

        They are in ``dtype``, with the names and shapes that ``collect_tensors`` returns for the
        distributed layer. ``check`` compares the two.
        """

    def step(self) -> None:
        """Zero the gradients, and run forward and backward of the layer."""
        self.layer.zero_grad()
        self._run_forward_backward()

    def _run_forward_backward(self) -> None:
        """Run forward and backward of the layer, and keep its output and gradients."""
        self.x.grad = None
        self.output = self.layer(self.x)
        self.output.backward(self.output_gradient)

    def reset(self) -> None:
        """Draw the input and the output gradient of the next step, before it is timed."""
        self._step_number += 1
        self._draw()

    def _draw_tensor(self, purpose: object, *size: int) -> Tensor:
        """Return standard normal numbers of shape ``size`` on this rank's device.

        They depend on the seed, the step number and ``purpose``. ``purpose`` is a text such as
        "tokens 3" that distinguishes the tensors of one step.
        """
        generator = make_generator(self._world.seed, f"{purpose} {self._step_number}")
        tensor = torch.randn(size, generator=generator)
        return tensor.to(self._world.device, self._dtype)

    def check(self) -> int:
        """Return the number of elements of wrong tensors in the last step, on this rank.

        The layer's output and each gradient are compared with those of a single process. If a
        tensor is too far from its reference, all of its elements count as wrong.
        """
        actual = collect_tensors(self.layer, self.x, self.output)
        reference = self._run_reference(torch.float32)
        low_precision = None
        if self._dtype != torch.float32:
            low_precision = self._run_reference(self._dtype)
        gradients = [reference[name] for name in reference if name != "output"]
        wrong = list(compare(actual, reference, low_precision, compute_norm(gradients)))
        self._differences = tuple(map(str, wrong))
        return sum(tensor.num_elements for tensor in wrong)

    def differences(self) -> Sequence[str]:
        """Return a phrase for each wrong tensor of the last check."""
        return self._differences


def collect_tensors(layer: nn.Module, x: Tensor, output: Tensor) -> dict[str, Tensor]:
    """Return the output of a layer, its input gradient and its parameter gradients, by name.

    They have no autograd graph. Names are ``output``, ``input gradient`` and
    ``gradient of PARAMETER``. Gradients of DTensors are gathered, so that all ranks must call
    this function. Missing gradients are left out.
    """
    gradients = {"input gradient": x.grad}
    for name, parameter in layer.named_parameters():
        gradients[f"gradient of {name}"] = parameter.grad
    tensors = {"output": output.detach()}
    for name, gradient in gradients.items():
        if gradient is not None:
            tensors[name] = get_full_tensor(gradient)
    return tensors
