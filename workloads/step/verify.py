"""The numerical check of a step against a single-process reference.

Each gradient is compared with the float32 gradient of one process, by the L2 norm of the
difference. Float32 gradients have a fixed relative tolerance. Low-precision gradients may have a
small multiple of the error of one process in the same precision. Both limits have a part that is
relative to the norm of all gradients together, because after many steps on random tokens the
gradients of queries and keys are mostly rounding errors.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbench.bench.world.world import World
from parbench.workloads.mesh.mesh import get_full_tensor, get_local_tensor
from parbench.workloads.model.optimizer import LEARNING_RATE, make_optimizer
from parbench.workloads.model.simulated_compute import SimulatedLinear
from parbench.workloads.model.transformer import strip_wrappers

RELATIVE_TOLERANCE = 1e-4
"""The limit of a float32 gradient's L2 distance from its reference, relative to its norm.

Sums in another order differ by up to 1e-5 at 256 sequences per rank. A reduction in bfloat16
differs by 5e-4 or more.
"""
NOISE_FLOOR = 1e-8
"""A second limit of this distance, relative to the norm of all gradients, which is added.

It allows rounding errors of gradients near zero. Over 150 steps of two models on random tokens, a
right gradient needed at most 6e-10. The smallest gradient of any parameter was 4e-8, so that a
missing gradient is still beyond the limit.
"""
LOW_PRECISION_FACTOR = 3
"""The limit of a low-precision gradient's L2 distance from the float32 reference.

It is relative to the distance of a single-process gradient in the same precision. The two limits
below are added. Two right gradients have independent errors of about the same size, but errors of
queries and keys vary. Over 150 steps of two models in bfloat16, the errors beyond the two added
limits differed by up to a factor of 2.7.
"""
LOW_PRECISION_EPSILONS = 2
"""The first added limit of this distance, in machine epsilons times the gradient's norm.

It allows for gradients of few elements, whose error is chance.
"""
LOW_PRECISION_NOISE_FLOOR = 5e-6
"""The second added limit of this distance, relative to the norm of all gradients.

A right gradient needs at most 2.2e-6.
"""
ALL_GRADIENTS_FACTOR = 1.5
"""The limit of the L2 distance of all low-precision gradients together from the reference.

It is relative to the distance of a single process in the same precision. Errors of single tensors
average out, so this limit finds a wrong common factor, such as one rank of 64 that is missing in
the mean.
"""
_UPDATE_TOLERANCE = 0.05
"""The limit of a float32 weight's difference from the reference after two steps.

It is relative to the learning rate.
"""
_MOVEMENT_TOLERANCE = 0.3
"""The limit of the L2 distance of all low-precision weights from the reference after two steps.

It is relative to the distance that the reference's weights moved. A right run was measured at 0.01,
a run without one of the steps at 0.5.
"""
_MIN_RELATIVE_GRADIENT = 1e-3
"""The smallest gradient element whose weight update is compared, relative to the largest element.

AdamW's first steps follow the sign of a gradient, which is chance if the gradient is smaller.
"""

Tensors = Mapping[str, Tensor]
"""Full weights or gradients, keyed by the parameter's name in the full model."""


@dataclass
class Verifier:
    """Compares a training step's loss, gradients and weights with a single-process reference.

    Every rank builds its own reference, and all ranks take part in each check.
    """

    world: World
    """All ranks of the step."""
    model: nn.Module
    """The module with this rank's parameters (plain or DTensors), named as in the full model."""
    _: KW_ONLY
    build_reference: Callable[[torch.dtype], nn.Module]
    """Returns the full model in a dtype, with its initial weights."""
    reference_loss: Callable[[nn.Module, Tensor, int], Tensor]
    """Returns the mean loss of a reference model on one microbatch, as a tensor with a graph.

    The arguments are the model, the microbatch's tokens (b, s + 1), and its index in the global
    batch.
    """
    dtype: torch.dtype
    """The type of the step's weights and activations."""
    reduce_dtype: torch.dtype
    """The type in which gradients are summed over data ranks."""
    data_size: int
    """The number of ranks that train different sequences."""
    replicas: Sequence[tuple[dist.ProcessGroup, Sequence[Tensor]]]
    """Pairs of a process group and the parameters whose local values are equal on its ranks."""
    exact_order: Sequence[int] = ()
    """The indices of microbatches in the order in which the step accumulates their gradients.

    It is empty if several ranks sum gradients. Otherwise the reference accumulates in this order,
    and its float32 gradients on a CPU must equal the step's in every bit.
    """
    holds_stage_only: bool = False
    """True if ``model`` has only this rank's pipeline stages, False if it has all layers."""
    gather_gradients: Callable[[], None] = lambda: None
    """Makes the gradients of all parameters of ``model`` available on every rank."""
    differences: list[str] = field(default_factory=list, init=False)
    """A phrase for each difference that the last check found on this rank."""
    _has_compared_updates: bool = field(default=False, init=False)
    """True once ``count_wrong`` has compared the weights after two optimizer steps."""

    @property
    def is_float32(self) -> bool:
        """True if the step computes and reduces gradients in float32."""
        return self.dtype == self.reduce_dtype == torch.float32

    def count_wrong(
        self,
        microbatches: Sequence[Tensor],
        compute_gradients: Callable[[], Tensor | None],
        step: Callable[[], None],
    ) -> int:
        """Return the number of wrong elements of weights, gradients and the loss on this rank.

        ``microbatches`` holds the tokens (b, s + 1) of each microbatch of the global batch, ordered
        by data rank. ``compute_gradients`` computes the step's gradients and returns its loss, None
        on a rank without the loss. ``step`` takes one optimizer step.

        Weights must be equal on replicas. On the first call, they must also equal the reference's
        after two optimizer steps on this batch, of which the caller has taken the first.
        """
        self.differences = []
        wrong = 0
        if not self._has_compared_updates:
            self._has_compared_updates = True
            step()
            wrong += self._record(
                self._count_wrong_updates(microbatches),
                "weights after two steps differ from the reference's",
            )
        wrong += self._count_replica_mismatches()
        own_weights = collect_weights(self.model)
        weights = self._gather_stages(own_weights) if self.holds_stage_only else own_weights
        expected_loss, expected = self._run(
            self._load_reference(weights, torch.float32), microbatches, torch.float32
        )
        low_loss, low_precision = None, None
        if not self.is_float32:
            low_loss, low_precision = self._run(
                self._load_reference(weights, self.dtype), microbatches, self.reduce_dtype
            )
        for name in sorted(expected.keys() - weights.keys()):
            wrong += self._record(expected[name].numel(), f"{name} is on no rank")
        loss = compute_gradients()
        self.gather_gradients()
        actual = collect_gradients(self.model)
        own_expected = {name: expected[name] for name in own_weights}
        # A GPU may add in another order each time, so only a CPU has equal bits.
        if self.exact_order and self.is_float32 and self.world.device.type == "cpu":
            wrong_tensors = find_unequal_tensors(actual, own_expected)
        else:
            norm = compute_norm(expected.values())
            wrong_tensors = compare(actual, own_expected, low_precision, norm)
        for tensor in wrong_tensors:
            wrong += self._record(tensor.num_elements, f"gradient of {tensor}")
        return wrong + self._count_wrong_loss(loss, expected_loss, low_loss)

    def check_without_reference(self, compute_gradients: Callable[[], Tensor | None]) -> int:
        """Return the number of wrong elements that are found without a single-process reference.

        They are weights that differ between replicas, and infinite or NaN elements of the loss and
        of gradients. ``compute_gradients`` is as in ``count_wrong``.
        """
        self.differences = []
        wrong = self._count_replica_mismatches()
        loss = compute_gradients()
        if loss is not None:
            wrong += self._record(int(not loss.isfinite()), "loss is not finite")
        for tensor in find_not_finite(self.model):
            wrong += self._record(tensor.num_elements, f"gradient of {tensor}")
        return wrong

    def _record(self, wrong: int, difference: str) -> int:
        """Append the phrase ``difference`` to ``differences`` if ``wrong`` elements are wrong.

        With ``wrong`` 0, nothing is appended. Returns ``wrong``, so that callers can add it up.
        """
        if wrong:
            self.differences.append(difference)
        return wrong

    def _gather_stages(self, own_weights: Tensors) -> Tensors:
        """Gather the full weights of all pipeline stages on every rank, keyed by parameter name.

        All ranks call it. ``own_weights`` are the full weights of this rank's stages. Of the ranks
        that have the same stages, the first sends them to all.
        """
        names = tuple(own_weights)
        first_rank = self.world.gather(names).index(names)
        sent = {}
        if self.world.global_rank == first_rank:
            sent = {name: weight.cpu() for name, weight in own_weights.items()}
        per_rank = self.world.gather(sent)
        gathered = {name: weight for weights in per_rank for name, weight in weights.items()}
        return {**gathered, **own_weights}

    def _count_replica_mismatches(self) -> int:
        """Return the number of this rank's parameter elements that differ from another replica.

        Each group in ``replicas`` has ranks whose parameters must be equal. The first rank of the
        group broadcasts its parameters, and all ranks compare the bits of theirs with them. Of a
        DTensor, the local part is compared.
        """
        wrong = 0
        for group, parameters in self.replicas:
            for parameter in parameters:
                local = get_local_tensor(parameter.detach())
                first = local.clone()
                dist.broadcast(first, group=group, group_src=0)
                differs = local.flatten().view(torch.uint8) != first.flatten().view(torch.uint8)
                wrong += int(differs.view(-1, local.element_size()).any(dim=1).sum())
        return self._record(wrong, "weights differ from those of the first replica")

    def _count_wrong_loss(
        self, loss: Tensor | None, expected: float, low_precision: float | None
    ) -> int:
        """Return 1 if the mean of all ranks' losses differs from ``expected``, otherwise 0.

        ``loss`` is this rank's loss, None if it has none. ``expected`` is the float32 loss of the
        reference, and ``low_precision`` its loss in the step's precision, None for a float32 step.
        """
        per_rank = self.world.gather(None if loss is None else float(loss))
        losses = [value for value in per_rank if value is not None]
        mean = sum(losses) / len(losses)
        limit = RELATIVE_TOLERANCE * abs(expected)
        if self.dtype != torch.float32 and low_precision is not None:
            error = abs(low_precision - expected)
            limit = torch.finfo(self.dtype).eps * abs(expected) + LOW_PRECISION_FACTOR * error
        is_right = abs(mean - expected) <= limit  # false for NaN
        text = f"loss is {mean:.6g}, the reference's {expected:.6g} (tolerance {limit:.2g})"
        return self._record(int(not is_right), text)

    def _count_wrong_updates(self, microbatches: Sequence[Tensor]) -> int:
        """Return the number of this rank's weights that are wrong after two optimizer steps.

        A single-process reference takes the same two steps on ``microbatches``. Elements whose
        gradient is small in one of the steps are not compared. For float32, each wrong element
        counts. For other types, the L2 distance of all elements together is compared, and all of
        them count as wrong if it is too large.
        """
        start = self.build_reference(self.dtype)
        reference = self.build_reference(self.dtype)
        optimizer = make_optimizer(reference.parameters(), self.dtype)
        masks: dict[str, Tensor] = {}
        for _ in range(2):
            _, gradients = self._run(reference, microbatches, self.reduce_dtype)
            for name, gradient in gradients.items():
                parameter = reference.get_parameter(name)
                parameter.grad = gradient.to(parameter.dtype)
                is_large = gradient.abs() > _MIN_RELATIVE_GRADIENT * gradient.abs().max()
                masks[name] = is_large & masks.get(name, is_large)
            optimizer.step()
            optimizer.zero_grad()
        distances = []
        movements = []
        for name, weight in collect_weights(self.model).items():
            if name in masks:
                expected = reference.get_parameter(name).detach()
                first = start.get_parameter(name).detach()
                distances.append((weight.float() - expected.float())[masks[name]])
                movements.append((first.float() - expected.float())[masks[name]])
        if self.is_float32:
            limit = _UPDATE_TOLERANCE * LEARNING_RATE
            return sum(int((~(distance.abs() <= limit)).sum()) for distance in distances)
        if compute_norm(distances) <= _MOVEMENT_TOLERANCE * compute_norm(movements):
            return 0
        return sum(map(len, distances))

    def _load_reference(self, weights: Tensors, dtype: torch.dtype) -> nn.Module:
        """Return the reference model in ``dtype`` with full weights, which are keyed by name."""
        model = self.build_reference(dtype)
        load_weights(model, weights)
        return model

    def _run(
        self, model: nn.Module, microbatches: Sequence[Tensor], reduce_dtype: torch.dtype
    ) -> tuple[float, dict[str, Tensor]]:
        """Run a reference model on the global batch and return its mean loss and its gradients.

        The gradients are those of the mean loss, keyed by parameter name, in the dtype of the
        model. If ``reduce_dtype`` is another type, rounding follows that of the ranks: the
        gradients of each data rank's microbatches accumulate in the model's dtype, and are then
        averaged over data ranks in ``reduce_dtype``. Nothing is communicated.
        """
        dtype = next(model.parameters()).dtype
        ranks = 1 if dtype == reduce_dtype else self.data_size
        per_rank = len(microbatches) // ranks
        mean_loss = 0.0
        sums: dict[str, Tensor] = {}
        for rank in range(ranks):
            for number in self.exact_order or range(per_rank):
                microbatch = rank * per_rank + number
                loss = self.reference_loss(model, microbatches[microbatch], microbatch) / per_rank
                loss.backward()  # type: ignore[no-untyped-call]
                mean_loss += float(loss.detach()) / ranks
            for name, gradient in _list_gradients(model):
                part = gradient.to(reduce_dtype) / ranks
                sums[name] = sums[name] + part if name in sums else part
            model.zero_grad()
        if dtype != torch.float32:
            sums = {name: gradient.to(dtype) for name, gradient in sums.items()}
        return mean_loss, sums


def _list_gradients(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the gradient of each parameter with its name, without parameters that have none."""
    parameters = model.named_parameters()
    return [(name, parameter.grad) for name, parameter in parameters if parameter.grad is not None]


def collect_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the full weights of a model on every rank, keyed by plain parameter name.

    All ranks call it, because DTensors are gathered. Plain names lack the prefixes of wrappers.
    """
    parameters = model.named_parameters()
    return {
        strip_wrappers(name): get_full_tensor(parameter.detach()) for name, parameter in parameters
    }


def collect_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the full gradients of a model on every rank, keyed by plain parameter name.

    All ranks call it, because DTensors are gathered. Parameters without a gradient are left out.
    """
    return {strip_wrappers(name): get_full_tensor(grad) for name, grad in _list_gradients(model)}


def load_weights(model: nn.Module, weights: Tensors) -> None:
    """Copy full weights, which are keyed by plain parameter name, into the parameters of a model.

    Parameters without a weight keep their values.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if strip_wrappers(name) in weights:
                parameter.copy_(weights[strip_wrappers(name)])


@dataclass(frozen=True)
class WrongTensor:
    """A gradient or output that differs from its reference, as text."""

    name: str
    """The name of the parameter or of the tensor."""
    num_elements: int
    """The number of elements that count as wrong. It may be all elements of the tensor."""
    difference: str
    """A phrase that follows the name, such as ``is missing`` or ``is 0.5 of the reference``."""

    def __str__(self) -> str:
        """Return the name and the difference, such as ``head.weight is missing``."""
        return f"{self.name} {self.difference}"


def compute_norm(tensors: Iterable[Tensor]) -> float:
    """Return the L2 norm of the concatenation of all tensors."""
    return math.hypot(*(float(tensor.float().norm()) for tensor in tensors))


def find_not_finite(model: nn.Module) -> Iterator[WrongTensor]:
    """Yield the gradients of a model that have infinite or NaN elements on this rank."""
    for name, gradient in _list_gradients(model):
        num_elements = int((~get_local_tensor(gradient).isfinite()).sum())
        if num_elements:
            yield WrongTensor(strip_wrappers(name), num_elements, "is not finite")


def compare(
    actual: Tensors,
    expected: Tensors,
    low_precision: Tensors | None,
    norm: float,
    tolerance: float = RELATIVE_TOLERANCE,
) -> Iterator[WrongTensor]:
    """Yield the gradients and outputs in ``actual`` that are too far from their references.

    ``actual`` and the references in ``expected`` are keyed by name. They are gradients, and in a
    benchmark of one layer also the layer's output. This function does not compare weights. The
    distance of a tensor is the L2 norm of its difference from the reference. ``norm`` is the L2
    norm of all reference gradients together, without an output. A small multiple of ``norm`` is
    added to each allowed distance.

    If ``low_precision`` is None, ``tolerance`` is the allowed distance relative to the norm of the
    reference. Otherwise ``low_precision`` has the tensors that a single process computes in the
    type of ``actual``, such as bfloat16. The allowed distance is then a multiple of the distance
    that these tensors have, plus a few roundings.

    An absent tensor is wrong unless its reference is zero. A tensor of zeros is wrong if
    ``low_precision`` is not zero. If no tensor is wrong and
    ``low_precision`` is known, the L2 distance of all tensors together must not be too large
    either. If it is, a ``WrongTensor`` for all of them is yielded.
    """
    distances: list[float] = []
    errors: list[float] = []
    all_right = True
    for name, reference in expected.items():
        size = float(reference.norm())
        limit = tolerance * size + NOISE_FLOOR * norm
        if low_precision is not None:
            error = float((low_precision[name].float() - reference).norm())
            errors.append(error)
            epsilon = torch.finfo(low_precision[name].dtype).eps
            limit = LOW_PRECISION_FACTOR * error + LOW_PRECISION_EPSILONS * epsilon * size
            limit += LOW_PRECISION_NOISE_FLOOR * norm
        tensor = actual.get(name)
        is_right = size == 0
        if tensor is not None:
            distance = float((tensor.float() - reference).norm())
            distances.append(distance)
            is_right = distance <= limit < math.inf  # false for NaN
            if low_precision is not None and low_precision[name].any() and not tensor.any():
                is_right = False
        if not is_right:
            all_right = False
            yield WrongTensor(name, reference.numel(), _describe(tensor, reference))
    distance = math.hypot(*distances)
    error = math.hypot(*errors)
    if low_precision is not None and all_right and distance > ALL_GRADIENTS_FACTOR * error:
        num_elements = sum(reference.numel() for reference in expected.values())
        ratio = distance / max(error, sys.float_info.min)
        text = f"are {ratio:.2g} times as far from the reference as those of a single process"
        yield WrongTensor("all parameters together", num_elements, text)


def find_unequal_tensors(actual: Tensors, expected: Tensors) -> Iterator[WrongTensor]:
    """Yield each expected tensor that differs from the actual one in any element.

    An absent actual tensor counts as zero.
    """
    for name, reference in expected.items():
        tensor = actual.get(name)
        wrong = int((reference != (0 if tensor is None else tensor)).sum())
        if wrong:
            yield WrongTensor(name, wrong, _describe(tensor, reference))


def _describe(tensor: Tensor | None, reference: Tensor) -> str:
    """Return a phrase on the difference of a wrong tensor from its reference.

    It says that the tensor is missing, is a multiple of the reference, or its relative distance.
    """
    if not reference.any():
        return "is not zero, but the reference is"
    if tensor is None:
        return "is missing"
    size = reference.norm()
    factor = float((tensor.float() * reference).sum() / size.square())
    remainder = float((tensor.float() - factor * reference).norm() / size)
    if abs(factor - 1) > 2 * remainder:
        return f"is {factor:.3g} times the reference"
    distance = float((tensor.float() - reference).norm() / size)
    return f"differs from the reference by {distance:.2g} of its norm"


def count_wrong_fills(model: nn.Module, microbatches: int, num_ranks: int) -> int:
    """Return the number of wrong elements in the weight gradients of simulated Linears.

    A simulated Linear fills its weight gradient with one value. The right value of every element is
    known: ``microbatches`` (of a rank in a step) times the mean over data ranks of the simulated
    gradient value. ``num_ranks`` is the world size, from which the tolerance for rounding errors
    follows. All ranks call it, because DTensors are gathered.
    """
    wrong = 0
    for module in model.modules():
        if isinstance(module, SimulatedLinear):
            gradient = module.weight.grad
            full = None if gradient is None else get_full_tensor(gradient)
            wrong += count_unfilled(full, microbatches * module.mean_gradient_value, num_ranks)
    return wrong


def count_unfilled(gradient: Tensor | None, expected: float, num_ranks: int) -> int:
    """Return the number of elements of a simulated gradient that are too far from ``expected``.

    ``expected`` is the right value of all elements, a mean over ranks. ``num_ranks`` is the world
    size. A gradient of None counts as one wrong element.

    The tolerance is relative to ``expected``. In float32 it is ``RELATIVE_TOLERANCE``. In other
    types it is 1 / (2 num_ranks), or for many ranks a bound that grows with ``num_ranks``, because
    each rank may round once. If one rank is missing in the mean, the value changes by at least
    2 / (3 num_ranks) of ``expected``. In bfloat16 this exceeds the tolerance for up to 26 ranks.
    With more ranks, a missing rank may not be found.
    """
    if gradient is None:
        return 1
    tolerance = RELATIVE_TOLERANCE
    if gradient.dtype != torch.float32:
        # A quarter of the bound of num_ranks roundings; those of a ring were an eighth of it.
        roundings = num_ranks * torch.finfo(gradient.dtype).eps / 8
        tolerance = max(1 / (2 * num_ranks), roundings)
    is_right = (gradient.float() - expected).abs() <= tolerance * abs(expected)  # not for NaN
    return int((~is_right).sum())
