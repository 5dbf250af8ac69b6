"""The parity gate of a step beside which one process's does not fit: the loss, and gradients of ends and some layers.

One process's forward and backward pass is taken with one layer at a time whole, in the way of full checkpointing: what
goes into each layer is kept, and its pass is taken again for the backward pass. Each data rank takes its own part of
the batch; their parts of gradients are summed on the host, apart from what is measured.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from parbench.bench.world.world import World
from parbench.workloads.costs.check_memory import LOGITS, SCORES
from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.transformer import Attention, Transformer, attend, draw_weights, plain_name
from parbench.workloads.step.layout import Layout, whole
from parbench.workloads.step.parity import Microbatches, Parity, compare, moved


def sampled_layers(layers: int, seed: int) -> tuple[int, ...]:
    """Return the layers whose gradients are compared: the first, and another by chance, of a seed."""
    return (0,) if layers == 1 else (0, 1 + zlib.crc32(f"{seed} layer".encode()) % (layers - 1))


class SampledParity(Parity):
    """Compares the loss and some gradients with one process's, of which a layer at a time is whole on every rank."""

    def __init__(self, world: World, layout: Layout, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__(world, layout, shape, dtype)
        self.layers = sampled_layers(shape.layers, world.seed)
        layers = f"layer{'s' if len(self.layers) > 1 else ''} {' and '.join(map(str, self.layers))}"
        self.notes = (
            f"checked on a small shape of the recipe, and at size on its loss, {layers}, embeddings and head",
        )
        ranks = world.gather(layout.data_rank)
        self._tells_part = ranks.index(layout.data_rank) == world.rank  # one rank of those that share their tokens

    def count_wrong(
        self, batch: Microbatches, gradients_of: Callable[[], Tensor | None], step: Callable[[], None]
    ) -> int:
        """Return how many elements are wrong: of weights, unlike their replicas'; of the loss and sampled gradients."""
        self.differences = []
        self._held = {plain_name(name): p for name, p in self._layout.model.named_parameters()}
        told = self._world.gather(list(self._held))
        self._owners = {name: rank for rank in reversed(range(len(told))) for name in told[rank]}
        wrong = self._count_unlike(whole(p).detach() for p in self._held.values())
        loss_of_all, expected = self._alone_in_parts(batch, torch.float32, 0)
        for name, gradient in expected.items():
            if name not in self._owners:
                wrong += self._count(gradient.numel(), f"{name} is held by no rank")
        alone = lru_cache(maxsize=1)(partial(self._alone_in_parts, batch))
        loss_alone = loss_of_all if self._narrow is None else alone(self._narrow, 0)[0]
        loss = gradients_of()
        self._layout.gather_gradients()
        gradients = {name: p.grad for name, p in self._held.items() if name in expected}
        found = self._shown({n: whole(g).detach().cpu() for n, g in gradients.items() if g is not None})
        mine = self._shown({name: expected[name] for name in gradients})
        compared = compare(
            found,
            mine,
            lambda *of: self._shown({name: alone(*of)[1][name] for name in gradients}),
            self._narrow,
            lambda wrong: any(self._world.gather(wrong)),
        )
        return wrong + self._judged(self._compare_loss(loss, loss_of_all, lambda: loss_alone), compared)

    def _alone_in_parts(self, batch: Microbatches, summed: torch.dtype, draw: int) -> tuple[float, dict[str, Tensor]]:
        """Return one process's mean loss and sampled gradients, on the host.

        They are summed over ranks in a type, and taken in it if ranks' own are; ``draw`` is of its rounding.
        """
        dtype = self._dtype if summed == self._layout.reduced_dtype else summed
        each = len(batch) // self._layout.data_size
        first = self._layout.data_rank * each
        model = self._outline(dtype)
        assert isinstance(model, Transformer)
        for module in model.modules():
            if isinstance(module, Attention) and module.core is attend and dtype in (torch.float32, torch.float64):
                module.core = attend_by_keys
        taken = _Pass(model, partial(self._weights_of, draw), self.layers, self._layout, 1 / len(batch))
        for number in range(first, first + each):
            taken.take(batch[number], number)
        parts = {"loss": torch.tensor(taken.loss, dtype=torch.float64), **taken.gradients}
        total = {name: self._summed(part, summed if part.dim() else part.dtype) for name, part in parts.items()}
        return float(total.pop("loss")), total

    def _summed(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        if self._layout.data_size == 1:
            return part.to("cpu", dtype)
        on_host = (part if self._tells_part else torch.zeros_like(part)).to("cpu", dtype)
        dist.all_reduce(on_host, group=self._world.control)
        return on_host

    def _shown(self, on_host: Mapping[str, Tensor]) -> "_OnDevice":
        return _OnDevice(on_host, self._world.device)

    def _weights_of(self, draw: int, module: nn.Module, name: str, wanted: bool) -> dict[str, Tensor]:
        """Return a part's weights, whole, for one pass; ``wanted`` are their gradients."""

        def taken(name: str, outline: Tensor) -> Tensor:
            weight = self._whole_weight(name, outline).to(outline.dtype).detach()
            return moved(weight, name, draw).requires_grad_(wanted)

        return {inner: taken(f"{name}.{inner}", outline) for inner, outline in module.named_parameters()}

    def _whole_weight(self, name: str, outline: Tensor) -> Tensor:
        world = self._world
        if name not in self._owners:
            return draw_weights(name, outline.shape, world.seed, world.device)
        mine = whole(self._held[name]).detach() if name in self._held else None
        if not self._layout.holds_stage_only:
            assert mine is not None, "ranks without stages hold every parameter"
            return mine
        owner = self._owners[name]
        told = mine if mine is not None and owner == world.rank else None
        if told is None:
            told = torch.empty(outline.shape, dtype=self._dtype, device=world.device)
        told = told.contiguous()
        dist.broadcast(told, group=world.group, group_src=owner)
        return told


class _OnDevice(Mapping[str, Tensor]):
    """Tensors of the host, each on the device when it is asked for."""

    def __init__(self, on_host: Mapping[str, Tensor], device: torch.device) -> None:
        self._on_host, self._device = on_host, device

    def __getitem__(self, name: str) -> Tensor:
        return self._on_host[name].to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._on_host)

    def __len__(self) -> int:
        return len(self._on_host)


@dataclass
class _Pass:
    """One process's forward and backward passes of microbatches, which keep the layers' inputs and some gradients."""

    model: Transformer
    weights_of: Callable[[nn.Module, str, bool], dict[str, Tensor]]
    layers: tuple[int, ...]
    layout: Layout
    share: float
    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def take(self, tokens: Tensor, number: int) -> None:
        model, layout = self.model, self.layout
        if layout.reference_begin is not None:
            layout.reference_begin(model, number)
        x = self._embedded(tokens[:, :-1])
        given: list[Tensor] = []
        for i, layer in enumerate(model.layers):
            given.append(x)
            with torch.no_grad():
                x = functional_call(layer, self.weights_of(layer, f"layers.{i}", False), (x,))
            self.loss += float(self._aux(layer) or 0.0)
        gradient = self._head(x, tokens[:, 1:])
        for i in reversed(range(len(model.layers))):
            layer, wanted = model.layers[i], i in self.layers
            weights = self.weights_of(layer, f"layers.{i}", wanted)
            x = given.pop().requires_grad_()
            roots: list[Any] = [functional_call(layer, weights, (x,))]
            if isinstance(aux := self._aux(layer), Tensor):
                roots.append(aux)
            leaves = {"": x, **({f"layers.{i}.{name}": weight for name, weight in weights.items()} if wanted else {})}
            taken = torch.autograd.grad(roots, list(leaves.values()), [gradient, None][: len(roots)])
            gradient = taken[0]
            self._add(dict(zip(list(leaves)[1:], taken[1:], strict=True)))
        self._embedded(tokens[:, :-1], gradient)

    def _aux(self, layer: nn.Module) -> Tensor | float:
        """Return this layer's share of what its layers add to the loss."""
        aux = self.layout.reference_aux
        return 0.0 if aux is None else aux(layer) * self.share / len(self.model.layers)

    def _embedded(self, tokens: Tensor, gradient: Tensor | None = None) -> Tensor:
        """Return the first layer's input; where its ``gradient`` is given, add those of the embeddings."""
        model, leaves = self.model, dict[str, Tensor]()

        def of(name: str, module: nn.Module, places: Tensor) -> Tensor:
            weights = self.weights_of(module, name, gradient is not None)
            leaves.update({f"{name}.{inner}": weight for inner, weight in weights.items()})
            out: Tensor = functional_call(module, weights, (places,))
            return out

        x = of("tokens", model.tokens, tokens)
        if model.positions is not None:
            places = torch.arange(tokens.shape[1], device=tokens.device) if model.places is None else model.places
            x = x + of("positions", model.positions, places)
        if gradient is not None:
            self._add(dict(zip(leaves, torch.autograd.grad(x, list(leaves.values()), gradient), strict=True)))
        return x.detach()

    def _head(self, x: Tensor, targets: Tensor) -> Tensor:
        """Add the loss and gradients of norm and head, some tokens at a time; return the gradient of their input."""
        model, rows, wanted = self.model, x.flatten(0, 1), targets.flatten()
        weights = {name: self.weights_of(getattr(model, name), name, True) for name in ("norm", "head")}
        leaves = {f"{part}.{inner}": weight for part, of in weights.items() for inner, weight in of.items()}
        sums: dict[str, Tensor] = {}
        gradients = []
        most = max(1, LOGITS // model.head.out_features)
        for some, right in zip(torch.split(rows, most), torch.split(wanted, most), strict=True):
            leaf = some.detach().requires_grad_()
            logits = functional_call(model.head, weights["head"], functional_call(model.norm, weights["norm"], leaf))
            loss = F.cross_entropy(logits, right) * (len(right) / len(wanted) * self.share)
            self.loss += float(loss.detach())
            first, *rest = torch.autograd.grad(loss, [leaf, *leaves.values()])
            gradients.append(first)
            for name, gradient in zip(leaves, rest, strict=True):  # as precise as one part
                part = gradient.to(torch.promote_types(torch.float32, gradient.dtype))
                sums[name] = sums[name] + part if name in sums else part
        self._add({name: total.to(x.dtype) for name, total in sums.items()})
        return torch.cat(gradients).view_as(x)

    def _add(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient


def attend_by_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend as ``attend`` does, with the scores of one head of keys at a time where those of all would be large.

    Neither float64 nor grouped heads in float32 have a fused kernel on CUDA: theirs are scores of all queries and keys.
    """
    groups = k.shape[1]
    if q.element_size() * q.shape[:-1].numel() * k.shape[2] <= SCORES:
        return attend(q, k, v)
    parts = zip(q.chunk(groups, 1), k.chunk(groups, 1), v.chunk(groups, 1), strict=True)

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k.expand(-1, q.shape[1], -1, -1), v.expand(-1, q.shape[1], -1, -1))

    return torch.cat([checkpoint(alone, *part, use_reentrant=False) for part in parts], 1)
