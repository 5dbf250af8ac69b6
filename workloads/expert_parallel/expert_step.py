"""A training step with a mixture of experts in every layer: experts over ``ep`` ranks inside data parallelism.

Each rank takes its own microbatches, or its own positions of those that ``tp`` neighbours share, who split attention.
What is neither an expert's nor split is under DDP or FSDP2; experts are shared by blocks of ``ep`` neighbouring ranks.
They and what is split are averaged over their copies after the last microbatch. Routes are a generator's or the
router's; capacity and balance count what one rank takes of one microbatch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.plan.params import Value
from bench.results.metrics import MetricValue, values
from bench.world.subject import Description, Explanation
from bench.world.world import World
from workloads.costs.communication_pattern import sent_bytes, state_bytes
from workloads.expert_parallel.attention_axis import (
    BYTES_FORMULA,
    NOTE,
    attention_sent_bytes,
    fill_sums,
    make_attention_axis,
    split_attention,
)
from workloads.expert_parallel.expert_axis import make_axis
from workloads.expert_parallel.expert_probe import Seen, explain_experts
from workloads.expert_parallel.moe_case import (
    moe_flops_per_token,
    moe_of,
    num_moe_parameters,
    num_routed_parameters,
    num_split_parameters,
)
from workloads.expert_parallel.moe_layer import aux_loss, exchange_ffns, let_experts_wait, mixtures, take_routes
from workloads.expert_parallel.non_expert_params import Around, shard_around, wrap_around
from workloads.expert_parallel.route_check import count_misrouted_in
from workloads.expert_parallel.routes import Chosen, Drawn
from workloads.expert_parallel.routing import BALANCED, Generator
from workloads.model.optimizer import make_optimizer
from workloads.model.transformer import Transformer, build, loss_of
from workloads.step.layout import Layout, local
from workloads.step.training_step import Options, TrainingStep

CLAIM = "ep_step: the whole training step; what its all-to-alls cost is claimed for this model and batch alone"
NORMALISED = "scores are not normalised over a token's experts, nor where pairs drop: residual and shared experts stay"


def prepare(world: World, **params: Value) -> "EpStep":
    """Return the step."""
    return EpStep(world, params)


class EpStep(TrainingStep):
    """A training step whose routes are drawn with its batch."""

    def __init__(self, world: World, params: Mapping[str, Value]) -> None:
        options = Options.of(params)
        self.moe = moe_of(params, options.shape, world.size)
        whole = options.microbatch * options.shape.sequence
        self._num_tokens = whole // self.moe.tp
        self._generator = self._generator_of(world, options, None)
        self._routes = Drawn(self._generator, whole, world.device, sequences=options.microbatch, parts=self.moe.tp)
        self._attention = make_attention_axis(world, self.moe.tp)
        self._axis = make_axis(world, self.moe.ep, self.moe.etp)
        self._fsdp = bool(params["fsdp"])
        self._routes_compared = False
        super().__init__(world, params, self._lay_out)

    def check(self) -> int:
        """Return how many elements fail the parity gate, and how many routes the router of one process would not take.

        Roundings can turn a router's choice between near scores, so that both sides compute with the ranks' routes.
        """
        if self._generator is not None or self._options.timed:
            return super().check()
        self._routes.frozen = self._chosen_by_all()
        try:
            return self._count_misrouted() + super().check()
        finally:
            self._routes.frozen = None

    def describe(self) -> Description:
        """Return what every step tells, with the sizes of the mixture."""
        found = super().describe()
        shape, moe = self._options.shape, self.moe
        details = {
            "parameters": num_moe_parameters(shape, moe),
            "routed_parameters": num_routed_parameters(shape, moe),
            "flops_convention": "PaLM: 6 N + 12 L H Q T a token, N of the k experts and shared ones that it meets",
            "expert_ffn": moe.expert_ffn,
            "slots": moe.slots(self._num_tokens),
        }
        return replace(found, details={**found.details, **details})

    def explain(self, begin: Callable[[], None], budget_seconds: float) -> Explanation:
        """Say what routes and all-to-alls cost, then where the step's time, bytes and memory go."""
        experts = explain_experts(self.seen(), self.step, begin, 0.3 * budget_seconds, self._balanced)
        found = super().explain(begin, 0.7 * budget_seconds)
        metrics = {name: metric for name, metric in found.metrics.items() if name != "memory_formula.activations"}
        return Explanation(
            metrics={**metrics, **self._state_formula(), **experts.metrics},
            details={**found.details, **experts.details},
            notes=(*found.notes, *experts.notes, "memory: no closed form of a mixture's activations"),
        )

    def seen(self) -> Seen:
        """Return what of this step is looked at to tell what its routes cost."""
        return Seen(
            world=self._world,
            axis=self._axis,
            moe=self.moe,
            mixtures=tuple(mixtures(self.layout.model)),
            sizes=(self._options.shape.hidden, self._options.dtype.itemsize, self._num_tokens),
            recomputes=self._options.checkpointing == "full",
            generator=self._generator,
            step_number=lambda: self._step_number,
        )

    def _state_formula(self) -> dict[str, MetricValue]:
        """Return the closed form of model state: experts are divided by ``ep`` and ``etp``, attention by ``tp``.

        The rest is divided by FSDP alone.
        """
        shape, moe = self._options.shape, self.moe
        routed = num_routed_parameters(shape, moe)
        split = num_split_parameters(shape) if moe.tp > 1 else 0
        rest = num_moe_parameters(shape, moe) - routed - split
        held = rest // (self._world.size if self._fsdp else 1) + split // moe.tp + routed // (moe.ep * moe.etp)
        state = state_bytes("ddp", held, 1, mixed=self._options.dtype.itemsize < 4)
        parts = {"parameters": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer}
        return values({f"memory_formula.{name}": num_bytes for name, num_bytes in parts.items()})

    def _flops_per_rank(self) -> float:
        return self._tokens_per_step() * moe_flops_per_token(self._options.shape, self.moe) / self._world.size

    def _draw(self) -> None:
        super()._draw()
        self._routes.begin(self._step_number, self._numbers)

    @property
    def _numbers(self) -> range:
        """The numbers of this rank's parts of microbatches, of all that a global batch has."""
        tp, accumulation = self.moe.tp, self._options.accumulation
        first = self._world.rank // tp * accumulation * tp + self._world.rank % tp
        return range(first, first + accumulation * tp, tp)

    def _generator_of(self, world: World, options: Options, routing: str | None) -> Generator | None:
        return self.moe.generator(world.seed, world.size, self._num_tokens * options.accumulation, routing)

    def _balanced(self, now: bool) -> None:
        """From the next step on, take balanced routes in place of the case's, or the case's again."""
        balanced = self._generator_of(self._world, self._options, BALANCED)
        self._routes.generator = balanced if now else self._generator

    def _make_timed(self, model: Transformer, seconds: float) -> None:
        """Wait for nothing yet: what waits are the experts, which are not there before the model is laid out."""

    def _fill_distinct_gradients(self) -> None:
        super()._fill_distinct_gradients()
        fill_sums(self.layout.model, self._attention)

    def _lay_out(self, model: Transformer, world: World, options: Options, params: Mapping[str, Value]) -> Layout:
        """Exchange FFNs for mixtures, wrap what is not an expert's, and say what a step is."""
        exchange_ffns(model, options.shape, self.moe, world.seed, held=self._axis.held)
        if options.timed_seconds is not None:
            let_experts_wait(model, options.timed_seconds, self._num_tokens, self._waiter)
        split = split_attention(model, self._attention, world.device)
        routed = [p for name, p in model.named_parameters() if ".ffn.experts." in name]
        around = (shard_around if self._fsdp else wrap_around)(model, world, options, [*split, *routed])
        self._copies = {"adp": (split, self._attention.replicas), "edp": (routed, self._axis.replicas)}
        expected = {
            "dp": around.expected_bytes,
            **({} if self._attention.group is None else {"tp": attention_sent_bytes(options, self.moe.tp)}),
            **{name: _averaged_bytes(*copies) for name, copies in self._copies.items() if copies[1] is not None},
        }
        return Layout(
            module=around.module,
            model=model,
            optimizer=make_optimizer(model.parameters(), options.dtype, timed=options.timed),
            axes={"dp": around.group, **self._attention.groups, **self._axis.groups},
            data_rank=world.rank // self.moe.tp,
            data_size=world.size // self.moe.tp,
            expected_bytes=expected,
            loss=lambda tokens: self._loss(around.module, self._numbers[0], tokens),
            forward_backward=lambda microbatches: self._train(around, microbatches),
            reference_model=self._alone,
            reference_loss=self._reference_loss,
            made_groups=(*around.made_groups, *self._attention.groups.values(), *self._axis.groups.values()),
            details={"bytes_formula": BYTES_FORMULA} if split else {},
            notes=(CLAIM, NORMALISED, *([NOTE] if split else []), *around.notes, *_timed_note(options)),
        )

    def _loss(self, module: nn.Module, number: int, tokens: Tensor) -> Tensor:
        """Return the loss of this rank's part of a microbatch (b, s + 1)."""
        take_routes(module, number, self._routes.of(number))
        return loss_of(module, self._attention.part_of(tokens)) + aux_loss(module)

    def _loss_of_all(self, module: nn.Module, microbatch: int, tokens: Tensor) -> Tensor:
        """Return the loss of a whole microbatch."""
        take_routes(module, microbatch, self._routes.of_all(microbatch))
        return loss_of(module, tokens) + aux_loss(module)

    def _train(self, around: Around, microbatches: Sequence[Tensor]) -> Tensor:
        """Return the mean loss of this rank's microbatches; gradients are of the mean over all ranks."""
        total = torch.zeros((), device=self._world.device)
        for i, tokens in enumerate(microbatches):
            with around.gradient_sync(i == len(microbatches) - 1):
                loss = self._loss(around.module, self._numbers[i], tokens) / len(microbatches)
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        for parameters, replicas in self._copies.values():
            self._average(parameters, replicas)
        return total

    def _average(self, parameters: Sequence[nn.Parameter], replicas: dist.ProcessGroup | None) -> None:
        """Make of gradients, each the sum over the ranks of one copy, the mean over all ranks."""
        for parameter in parameters:
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                if replicas is not None:
                    dist.all_reduce(gradient, group=replicas)
                gradient /= self._world.size

    def _alone(self, dtype: torch.dtype) -> nn.Module:
        shape = self._options.shape
        model = build(shape, self._world.seed, self._world.device, dtype)
        exchange_ffns(model, shape, replace(self.moe, ep=1, etp=1), self._world.seed, dense=True)
        return model

    def _reference_loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean over all microbatches, each by itself: capacity and balance are counted in each.

        Where ranks share a microbatch, the mixtures cut it into the ranks' positions and count in each of these parts.
        """
        microbatches = torch.split(batch, self._options.microbatch)
        return torch.stack([self._loss_of_all(model, i, tokens) for i, tokens in enumerate(microbatches)]).mean()

    def _chosen_by_all(self) -> Chosen:
        """Return the routes of the last step, of all ranks."""
        mine = {
            number: {n: mixture.chosen[number].cpu() for n, mixture in enumerate(mixtures(self.layout.model))}
            for number in mixtures(self.layout.model)[0].chosen
        }
        told = self._world.gather(mine)
        return {
            number: {n: routes.to(self._world.device) for n, routes in by_layer.items()}
            for of in told
            for number, by_layer in of.items()
        }

    def _count_misrouted(self) -> int:
        """Return how many tokens took other experts in the first step than one process's router takes for them.

        It is told the weights of the seed alone, so that later steps are not compared.
        """
        if self._routes_compared:
            return 0
        self._routes_compared = True
        alone = self._alone(self._options.dtype)
        wrong = 0
        for i, tokens in enumerate(torch.split(self._batch, self._options.microbatch)):
            chosen = self._routes.of_all(i)
            assert isinstance(chosen, Mapping), "routes are frozen by layer"
            wrong += count_misrouted_in(
                alone, partial(self._loss_of_all, alone, i, tokens), chosen, self._options.dtype
            )
        return wrong


def _averaged_bytes(parameters: Sequence[nn.Parameter], replicas: dist.ProcessGroup | None) -> float:
    """Return what the mean over copies sends: an all_reduce of this rank's part of each gradient."""
    assert replicas is not None, "a copy alone averages nothing"
    mine = sum(local(parameter).numel() * parameter.element_size() for parameter in parameters)
    return sent_bytes("all_reduce", mine, replicas.size())


def _timed_note(options: Options) -> tuple[str, ...]:
    if not options.timed:
        return ()
    return ("timed experts: T is their forward at the mean load of ranks; attention and shared experts cost nothing",)
