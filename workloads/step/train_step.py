"""A training step on any mesh: forward, backward, reduction of gradients, and the optimizer.

A rank takes its positions of its sequences through its layers. Gradients are those of the mean loss
over all tokens of the global batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from parbench.bench.plan.params import Value
from parbench.bench.results.details import (
    Action,
    AttentionDetails,
)
from parbench.bench.world.benchmark import Benchmark, Description, Explanation, Work
from parbench.bench.world.world import World
from parbench.workloads.costs.communication_pattern import (
    bytes_by_axis,
    list_calls,
    sum_calls,
)
from parbench.workloads.costs.flops import count_flops_per_token
from parbench.workloads.costs.memory import (
    compute_state_memory,
    make_activations_equation,
)
from parbench.workloads.costs.parameter_table import count_parameters
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_layer import (
    MoeLayer,
)
from parbench.workloads.mesh.mesh import build_mesh
from parbench.workloads.model.optimizer import freeze, make_optimizer
from parbench.workloads.model.simulated_compute import (
    SimulatedCompute,
    SimulatedLinear,
    calibrate,
    set_distinct_gradients,
    simulate_linears,
)
from parbench.workloads.model.transformer import (
    DTYPES,
    Transformer,
    compute_loss,
    draw_tokens,
    get_inputs,
    initialize,
    make_meta_model,
    merge_parts,
)
from parbench.workloads.parallel import tensor_parallel
from parbench.workloads.parallel.parallelize import (
    ParallelPart,
    build_parts,
    parallelize,
    split_experts,
)
from parbench.workloads.parallel.positions import TokenPositions
from parbench.workloads.parallel.zero1 import (
    DistributedOptimizer,
    make_zero_redundancy_optimizer,
)
from parbench.workloads.pipeline_parallel.order import find_peak_held
from parbench.workloads.presets import PRESETS, Preset
from parbench.workloads.probes.memory_probe import MemoryProbe, count_saved_bytes
from parbench.workloads.probes.overlap import OverlapProbe
from parbench.workloads.probes.peaks import find_peak
from parbench.workloads.probes.probe import Probe, ResetFn, run_probes
from parbench.workloads.probes.sent_bytes import CommBytesProbe
from parbench.workloads.step import pipeline_stages
from parbench.workloads.step.expert_probe import ExpertProbe
from parbench.workloads.step.expert_traffic import compute_expert_bytes
from parbench.workloads.step.pipeline_probe import BubbleProbe
from parbench.workloads.step.reference_choice import does_reference_fit, shrink_model
from parbench.workloads.step.step_routing import StepRouting
from parbench.workloads.step.token_count import (
    compute_loss_weight,
    count_targets,
    pad_sequences,
)
from parbench.workloads.step.verify import Verifier, count_wrong_fills

SMALL_MODEL_NOTE = (
    "verified on a small model of the same recipe: at this size only replicas are compared, and "
    "the loss and gradients are checked to be finite"
)
"""The note on results whose single-process reference does not fit in memory."""
SIMULATED_NOTE = (
    "simulated compute: ranks wait instead of computing, and weights do not change. Overlap is "
    "real, results are not"
)
"""The note on results with simulated compute."""


class Microbatch(NamedTuple):
    """One microbatch of this rank."""

    tokens: Tensor
    """The token ids of this rank's positions (b, s), with token 0 in place of padding."""
    targets: Tensor
    """The token after each of ``tokens`` (b, s), ``NO_TARGET`` for padding."""


class TrainStep(Benchmark):
    """The benchmark of one training step: zero gradients, forward, backward, reduction, optimizer.

    It runs on any mesh. All ranks of the world construct it together.
    """

    def __init__(self, world: World, spec: StepSpec) -> None:
        """Build the model, optimizer and process groups of the step that ``spec`` describes."""
        self._world = world
        self.spec = spec
        self._view = spec.make_rank_view(world.rank)
        """This rank's part of the step: position on the mesh, pipeline stages, number of layers."""
        self._compute = SimulatedCompute(world.device)
        self._positions = TokenPositions.make(spec, world.rank)
        self.mesh = build_mesh(
            world,
            spec.dims,
            has_experts=spec.moe is not None,
            context_groups=self._positions.list_context_groups(spec.dims),
        )
        self._routing: StepRouting | None = None
        """Decides the experts of this rank's tokens, by routers or by a random generator."""
        if spec.moe is not None:
            self._routing = StepRouting(
                world, spec, self._positions.between_blocks, self._positions.by_source
            )
        self._cross_entropy = tensor_parallel.make_loss(
            self.mesh.tensor, spec.shape.vocabulary, is_sum=spec.padding > 0
        )
        self._loss_weight: Tensor | float = 1.0
        """The factor of each microbatch's summed loss in a padded batch, otherwise 1."""
        if spec.simulated_seconds is not None and spec.moe is None:
            calibrate_linears(spec, world, self._compute, spec.simulated_seconds)
        self.parts = self._build_parts()
        """The model parts of this rank after parallelization, keyed by pipeline stage."""
        self.model: nn.Module = merge_parts([part.part for part in self.parts.values()])
        """All model parts of this rank as one module, for its parameters."""
        self.optimizer = self._make_optimizer()
        if spec.is_simulated:
            freeze(self.optimizer)
        self._recorder = pipeline_stages.ActionRecorder(world.device, self._prepare_action)
        """Records the times of the pipeline's forward and backward passes."""
        self._run_pipeline = self._make_pipeline()
        self._verifier = self._make_verifier()
        self.small_model_wrong = 0
        """The number of wrong elements that the check of a small model of the same preset found.

        ``build`` sets it. It is 0 if the single-process reference of the full model fits in memory.
        Then the full model itself is checked, and no small model.
        """
        self.small_model_differences: tuple[str, ...] = ()
        """A phrase for each wrong tensor of this small model, empty without one."""
        self._step_number = 0
        self._draw()

    def step(self) -> None:
        """Run one training step on this rank: zero gradients, forward, backward, optimizer.

        The step trains on this rank's microbatches of the batch that ``reset`` drew. All ranks
        take part, because they reduce gradients.
        """
        self.optimizer.zero_grad()
        self.forward_backward()
        with record_function("parbench:optimizer"):
            self.optimizer.step()

    def reset(self) -> None:
        """Draw the batch of the next step and clear the recorded pipeline actions, untimed.

        Simulated compute also forgets by how much its last wait was too long.
        """
        self._compute.reset_debt()
        self._recorder.forget()
        self._step_number += 1
        self._draw()

    def forward_backward(self) -> Tensor | None:
        """Run forward and backward of all microbatches, and reduce the gradients over ranks.

        Returns the mean loss over this rank's microbatches, as a scalar. The result is None on a
        rank without the last pipeline stage. Gradients must be zero at the start.
        """
        if self.spec.padding:
            all_targets = [microbatch.targets for microbatch in self.microbatches]
            self._loss_weight = compute_loss_weight(self.spec, all_targets, self.mesh.groups)
        with tensor_parallel.use_loss(self.mesh.tensor):
            if self._run_pipeline is not None:
                tokens = torch.cat([microbatch.tokens for microbatch in self.microbatches])
                targets = torch.cat([microbatch.targets for microbatch in self.microbatches])
                loss = self._run_pipeline(tokens, targets)
            else:
                loss = self._accumulate_gradients()
        for part in self.parts.values():
            part.finish_gradients()
        return loss

    def _accumulate_gradients(self) -> Tensor:
        """Run forward and backward of each microbatch without a pipeline, and add up the gradients.

        Returns the mean loss over this rank's microbatches.
        """
        [part] = self.parts.values()
        total = torch.zeros((), device=self._world.device)
        for index, microbatch in enumerate(self.microbatches):
            is_last = index == len(self.microbatches) - 1
            with part.sync_gradients(is_synced=is_last or not self.spec.no_sync):
                with record_function("parbench:forward"):
                    self._assign_experts(part, index)
                    loss = self._compute_loss(part.module(microbatch.tokens), microbatch.targets)
                    loss = loss / len(self.microbatches)
                with record_function("parbench:backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
            if not is_last and not self.spec.no_sync:
                part.finish_gradients(is_last=False)
            total += loss.detach()
        return total

    def _compute_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of one microbatch, a scalar, from its logits (b, s, vocabulary).

        The step trains the mean of these losses over microbatches and data ranks. With padding, the
        loss is the sum over tokens times ``_loss_weight``, otherwise the mean over tokens.
        """
        return self._cross_entropy(logits, targets) * self._loss_weight

    def _assign_experts(self, part: ParallelPart, index: int) -> None:
        """Set the expert ids of tokens in the MoE layers of ``part``, for one microbatch.

        ``index`` is the index of the microbatch on this rank, and ``part`` is the model part of one
        pipeline stage. Random ids were drawn before the step. With the routing ``router``, the
        learned router of each layer chooses the experts in forward, so that no ids are set, except
        while the check repeats the choice of the last step. For a dense model, nothing is set.
        """
        if self._routing is not None:
            self._routing.assign(part.moe_layers, self._microbatch_numbers[index])

    def _prepare_action(self, action: Action) -> None:
        """Prepare one pipeline action, a pass of one stage and microbatch, before it is timed.

        Simulated compute makes a pass shorter after one that took too long. It does not shorten
        this pass because of passes before it. For forward (F) and full backward passes (B), the
        expert ids of the microbatch are set in the stage's MoE layers.
        """
        # The next action does not make up for one that took too long, which would move a bubble.
        self._compute.reset_debt()
        if action.kind in ("F", "B"):
            self._assign_experts(self.parts[action.stage], action.microbatch)

    @property
    def moe_layers(self) -> dict[int, MoeLayer]:
        """The MoE layers on this rank over all of its stages, keyed by number in the model."""
        layers: dict[int, MoeLayer] = {}
        for part in self.parts.values():
            layers.update(part.moe_layers)
        return layers

    # Construction

    def _build_parts(self) -> dict[int, ParallelPart]:
        """Return the distributed model part of each of this rank's stages, keyed by stage index.

        Without a pipeline, the only stage is 0, which is the full model.
        """
        parts = build_parts(self._view, self.mesh)
        attention = self._positions.make_attention(self.spec, self._world, self.mesh.groups)
        built = {}
        for stage, part in parts.items():
            if self.spec.is_simulated:
                self._simulate_part(part)
            built[stage] = parallelize(
                part, self._world, self.mesh, self.spec, self._positions, attention
            )
            if self.spec.is_simulated:
                self._set_distinct_gradients(built[stage])
        return built

    def _simulate_part(self, part: Transformer) -> None:
        """Let the Linears of a stage's model part wait in place of multiplying matrices.

        ``spec.simulated_seconds`` is the forward time of one microbatch on a rank that has
        layers / pp layers. The part gets a share of this time by its number of layers.
        """
        spec = self.spec
        assert spec.simulated_seconds is not None
        layers = spec.shape.layers / spec.dims.pp
        seconds = spec.simulated_seconds * len(part.layers) / layers
        simulate_linears(part, seconds, self._compute)

    def _set_distinct_gradients(self, parallel_part: ParallelPart) -> None:
        """Set simulated gradients that differ between data ranks in the model part of one stage.

        Data ranks are those with different tokens. If the reduction leaves out the gradient of one
        rank, the mean over ranks changes, and the check finds it.
        """
        dims = self.spec.dims
        index = dims.index(self._world.rank, "dp", "fsdp", "cp")
        set_distinct_gradients(parallel_part.part, index, dims.data_ranks)
        summed_over_tp = set(parallel_part.partial_parameters)
        for module in parallel_part.part.modules():
            if isinstance(module, SimulatedLinear) and module.weight in summed_over_tp:
                module.mean_gradient_value *= dims.tp

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of this rank's parameters: AdamW, or ZeRO-1 around AdamW.

        Parbench's ZeRO-1 (``DistributedOptimizer``) also reduce-scatters the gradients. It is
        therefore added to the model part's reducers, which start communication in backward.
        """
        spec = self.spec
        dtype = DTYPES[spec.bytes_per_element]
        group = self.mesh.groups.get("dp")
        if not spec.zero1 or group is None:
            return make_optimizer(self.model.parameters(), dtype)
        if spec.zero1 == "zero_redundancy":
            return make_zero_redundancy_optimizer(self.model, group, dtype)
        optimizer = DistributedOptimizer(
            self.model,
            group,
            bucket_bytes=spec.bucket_bytes,
            reduce_dtype=DTYPES[spec.reduce_bytes],
        )
        [part] = self.parts.values()
        part.reducers.append(optimizer)
        return optimizer

    def _make_pipeline(self) -> Callable[[Tensor, Tensor], Tensor | None] | None:
        """Return ``train(tokens, targets)``, which runs all passes of the pipeline's schedule.

        ``train`` takes the tokens and targets of all of this rank's microbatches (sequences, s). It
        returns their mean loss, or None on a rank without the last stage. If the step has no
        pipeline, there is no such function and the result is None.
        """
        spec = self.spec
        if spec.pipeline is None:
            return None
        stages = pipeline_stages.make_stages(
            self.parts, spec, self._recorder, self._world, self.mesh.groups["pp"]
        )

        def compute_part_of_loss(logits: Tensor, targets: Tensor) -> Tensor:
            """Return a microbatch's part of the mean loss over this rank's microbatches."""
            return self._compute_loss(logits, targets) / spec.microbatches

        return pipeline_stages.make_train(
            spec.pipeline.order, stages, self._recorder, compute_part_of_loss
        )

    def _make_verifier(self) -> Verifier:
        """Return the verifier, which compares the step with a single-process reference."""
        spec = self.spec
        order: Sequence[int] = ()
        if spec.pipeline is not None and spec.ranks == spec.dims.pp:
            order = pipeline_stages.list_gradient_order(spec.pipeline.order, self._world.rank)
        return Verifier(
            world=self._world,
            model=self.model,
            build_reference=self._build_reference,
            reference_loss=self._compute_reference_loss,
            dtype=DTYPES[spec.bytes_per_element],
            reduce_dtype=DTYPES[spec.reduce_bytes],
            data_size=spec.dims.dp * spec.dims.fsdp,
            exact_order=order,
            replicas=self._list_replicas(),
            holds_stage_only=spec.pipeline is not None,
            gather_gradients=self._gather_gradients,
        )

    def _gather_gradients(self) -> None:
        """Make the gradients of all parameters available on this rank, for the check.

        With parbench's ZeRO-1, each rank has only the reduced gradients of the parameters that it
        updates, so that all ranks all-gather them here. With other optimizers, nothing happens.
        """
        if isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer.gather_gradients()

    def _list_replicas(self) -> list[tuple[Any, list[nn.Parameter]]]:
        """Return pairs: a process group, and the parameters that are equal on all of its ranks.

        The check compares the local values of these parameters on this rank with those on the first
        rank of the group.
        """
        groups = self.mesh.groups
        dense, experts = split_experts(self.model)
        partial_parameters = []
        for part in self.parts.values():
            partial_parameters += part.partial_parameters
        replicas = []
        if "dp" in groups:
            sharded_experts = experts if self.spec.dims.is_sharded else []
            replicas.append((groups["dp"], dense + sharded_experts))
        if "tp" in groups:
            replicas.append((groups["tp"], partial_parameters))
        if "edp" in groups:
            replicas.append((groups["edp"], experts))
        return replicas

    def _build_reference(self, dtype: torch.dtype) -> nn.Module:
        """Return the full model on this device in ``dtype``, with its initial weights."""
        shape = self.spec.shape
        if self._routing is not None:
            model: nn.Module = self._routing.make_reference_model(dtype)
        else:
            model = make_meta_model(shape, dtype)
        initialize(model, self._world.seed, self._world.device)
        return model

    def _compute_reference_loss(self, model: nn.Module, tokens: Tensor, number: int) -> Tensor:
        """Return the loss of one microbatch in the single-process reference ``model``.

        ``tokens`` (b, s + 1) are the inputs and targets of the microbatch, and ``number`` is its
        index in the global batch. With padding, microbatches have different numbers of targets. The
        loss is then weighted so that the mean of the losses of all microbatches equals the mean
        over all tokens with a target.
        """
        weight = 1.0
        if self.spec.padding:
            num_microbatches = len(self._batch) / self.spec.microbatch
            all_targets = float(count_targets(self._batch[:, 1:]))
            weight = float(count_targets(tokens[:, 1:])) * num_microbatches / all_targets
        if self._routing is not None:
            return self._routing.compute_reference_loss(model, tokens, number, weight)
        return weight * compute_loss(model, tokens)

    # Batch

    @property
    def _microbatch_numbers(self) -> range:
        """The indices of this rank's microbatches among all microbatches of the global batch."""
        data_index = self.spec.dims.index(self._world.rank, "dp", "fsdp")
        first = data_index * self.spec.microbatches
        return range(first, first + self.spec.microbatches)

    def _draw(self) -> None:
        """Draw the global batch of this step, and from it this rank's microbatches.

        With routing by a generator, the expert ids of these microbatches are drawn too.
        """
        spec = self.spec
        device = self._world.device
        seed = self._world.seed
        batch = draw_tokens(spec.shape, spec.global_batch, seed, self._step_number)
        self._batch = pad_sequences(batch, spec.padding, seed, self._step_number).to(device)
        first = self._microbatch_numbers.start * spec.microbatch
        sequences = self._batch[first : first + spec.microbatches * spec.microbatch]
        positions = torch.tensor(self._positions.attended, device=device)
        tokens = torch.split(get_inputs(sequences.index_select(1, positions)), spec.microbatch)
        targets = torch.split(sequences.index_select(1, positions + 1), spec.microbatch)
        self.microbatches = [Microbatch(*pair) for pair in zip(tokens, targets, strict=True)]
        if self._routing is not None:
            self._routing.draw(self._step_number, self._microbatch_numbers)

    # Verification

    def check(self) -> int:
        """Return the number of wrong elements of weights, gradients, loss and optimizer updates.

        They are compared with a single-process reference. If the reference does not fit in memory,
        the result includes the wrong elements of a small model of the same preset, which ``build``
        has compared with its own reference. With simulated compute, only the known gradient values
        are checked.
        """
        if self.spec.is_simulated:
            self._gather_gradients()
            return count_wrong_fills(self.model, self.spec.microbatches, self._world.size)
        if self._routing is None:
            return self._verify()
        return self._routing.count_wrong(self.moe_layers, self._batch, self._verify)

    def _verify(self) -> int:
        """Return the number of wrong elements of this rank's weights, gradients and loss.

        They are compared with a single-process reference. If the reference does not fit in memory,
        an element is wrong if a weight differs between the ranks that replicate it, or if the loss
        or a gradient is infinite or NaN. ``small_model_wrong`` is then added, the wrong elements of
        a small model of the same preset that ``build`` compared with a reference.
        """
        if not self.spec.reference_fits:
            wrong = self._verifier.check_without_reference(self._compute_gradients)
            return self.small_model_wrong + wrong
        batch = torch.split(self._batch, self.spec.microbatch)
        return self._verifier.count_wrong(batch, self._compute_gradients, self.step)

    def _compute_gradients(self) -> Tensor | None:
        """Zero the gradients, compute those of the current batch, and return the loss.

        The loss is that of ``forward_backward``, None without the last pipeline stage.
        """
        self.optimizer.zero_grad()
        return self.forward_backward()

    def differences(self) -> Sequence[str]:
        """Return a phrase for each wrong tensor of the last check.

        If the step's reference does not fit in memory, the phrases on the small model come first,
        which ``build`` checked in its place. Each of them begins with "on a small model".
        """
        return (*self.small_model_differences, *self._verifier.differences)

    # Description and explanation

    def describe(self) -> Description:
        """Return the step's amounts of work, facts for its record, and notes on limits.

        The work of a step is its tokens over all ranks and its model FLOPs per rank relative to the
        device's peak FLOP/s. Divided by the step's seconds, they give tokens per second and MFU.
        The facts (``details``) include the number of parameters, the ranks of each axis and the
        equations of sent bytes.
        """
        spec = self.spec
        flops = spec.tokens * count_flops_per_token(spec.shape, spec.moe) / self._world.size
        work = [Work(name="tokens_per_second", amount=spec.tokens)]
        peak = (
            None
            if spec.is_simulated
            else find_peak(self._world.device, DTYPES[spec.bytes_per_element])
        )
        if peak is not None:
            work.append(Work(name="mfu", amount=flops / peak.flops_per_second))
        axes = {name: {"ranks": group.size()} for name, group in self.mesh.groups.items()}
        details: dict[str, Any] = {
            "parameters": count_parameters(spec.shape, spec.moe),
            "flops_per_rank": flops,
            "peak": None if peak is None else asdict(peak),
            "axes": axes,
            **self._make_bytes_formula(),
            **self._make_attention_details(),
        }
        notes: list[str] = []
        if spec.is_simulated:
            notes.append(SIMULATED_NOTE)
        elif not spec.reference_fits:
            notes.append(SMALL_MODEL_NOTE)
        return Description(
            headline="step_time", work=tuple(work), details=details, notes=tuple(notes)
        )

    def explain_step(self, reset: ResetFn, budget_seconds: float) -> Explanation:
        """Run all probes on further steps, and return their merged metrics, facts and notes.

        A probe measures one aspect, such as memory or sent bytes. ``reset`` draws the next batch,
        and probes call it before each step. All steps together should take ``budget_seconds``. The
        weights are arbitrary afterwards, because some steps run without communication.
        """
        return run_probes(self._world, self.list_probes(), self.step, reset, budget_seconds)

    def list_probes(self) -> list[Probe[Any]]:
        """Return the probes for this step, in the order in which they must run.

        A probe runs further steps and measures one aspect: sent bytes, experts, the pipeline's
        bubble, memory, or overlap of communication. The probe of overlap is last, because its steps
        without communication leave arbitrary weights.
        """
        spec = self.spec
        probes: list[Probe[Any]] = [CommBytesProbe(self.mesh.groups, self.compute_expected_bytes)]
        if self._routing is not None:
            experts = ExpertProbe(
                world=self._world,
                spec=spec,
                layers=self.moe_layers,
                ep_group=self.mesh.groups.get("ep"),
            )
            probes.append(experts)
        if spec.pipeline is not None:
            bubbles = BubbleProbe(
                world=self._world,
                pipeline=spec.pipeline,
                pipeline_ranks=spec.dims.groups("pp"),
                recorder=self._recorder,
                simulated_seconds=spec.simulated_seconds,
            )
            probes.append(bubbles)
        overlap = OverlapProbe(self._world, self.mesh.groups)
        return [*probes, self.make_memory_probe(), overlap]

    def make_memory_probe(self) -> MemoryProbe:
        """Return the probe that measures this rank's memory and reports it next to formulas.

        The formulas give the bytes of parameters, gradients, optimizer state and activations on
        this rank. With simulated compute, activations have no formula.
        """
        formula: dict[str, float] = asdict(compute_state_memory(self._view))
        if not self.spec.is_simulated:
            formula["activations"] = make_activations_equation(self._view).value
        return MemoryProbe(
            world=self._world,
            model=self.model,
            optimizer=self.optimizer,
            forward_backward=self.forward_backward,
            count_activations=self._count_activations,
            formula=formula,
        )

    def _count_activations(self) -> float:
        """Return the peak of the bytes of activations that this rank saves for backward in a step.

        One forward pass of each of the rank's stages is run, to count the bytes of one microbatch.
        Without a pipeline, these bytes are the result. With a pipeline, several microbatches are in
        flight, and the result is the maximum over the actions of the rank's schedule.
        """
        saved = {stage: self._count_saved_bytes(stage) for stage in self.parts}
        if self.spec.pipeline is None:
            return float(sum(saved.values()))
        actions = self.spec.order.actions_by_rank[self._view.pp_rank]
        return find_peak_held(actions, saved.__getitem__)

    def _count_saved_bytes(self, stage: int) -> int:
        """Run forward of one microbatch in a pipeline stage, and return the bytes that it saves.

        They are the bytes that autograd keeps for backward on this rank. ``stage`` is the index of
        one of the rank's stages. Except in the first stage, the input is a tensor of zeros.
        """
        part = self.parts[stage]
        microbatch = self.microbatches[0]
        x = microbatch.tokens
        if stage > 0:
            size = (len(x), len(self._positions.between_blocks), self.spec.shape.hidden)
            x = torch.zeros(
                size, device=x.device, dtype=DTYPES[self.spec.bytes_per_element], requires_grad=True
            )

        def run_forward() -> None:
            """Run the stage's forward pass and, on the last stage, the loss."""
            output = part.module(x)
            if part.part.head is not None:
                self._compute_loss(output, microbatch.targets)

        self._assign_experts(part, 0)
        with tensor_parallel.use_loss(self.mesh.tensor):
            return count_saved_bytes(part.part, run_forward)

    def compute_expected_bytes(self) -> dict[str, float]:
        """Return the analytical bytes that this rank sends in a step, keyed by mesh axis.

        The bytes over ``ep`` and ``etp`` follow from the experts that tokens took in the last step.
        All ranks must call this method, because they exchange the numbers of tokens per expert.
        """
        expected = bytes_by_axis(list_calls(self._view), self.mesh.groups)
        if self.spec.moe is not None:
            expected |= compute_expert_bytes(self._world, self.spec, self.moe_layers)
        return expected

    def _make_bytes_formula(self) -> dict[str, object]:
        """Return {"bytes_formula": {axis: equation}}, with the equations of sent bytes as text.

        An equation gives the bytes that rank 0 sends over a mesh axis in a step. All ranks return
        those of rank 0, so that their records agree. The result is empty without communication.
        """
        calls = list_calls(self.spec.make_rank_view(0))
        texts = {
            axis: sum_calls(call for call in calls if call.axis == axis).text
            for axis in dict.fromkeys(call.axis for call in calls)
        }
        return {"bytes_formula": texts} if texts else {}

    def _make_attention_details(self) -> dict[str, object]:
        """Return the facts on context parallelism for the record, keyed by name.

        They are the method, the sequence length, and the tokens per rank. The result is empty with
        one ``cp`` rank.
        """
        split = self._positions.split
        if split is None:
            return {}
        details = AttentionDetails(
            method=split.method.name,
            sequence=split.sequence,
            tokens_per_rank=split.sequence // split.ranks,
        )
        return details.as_details

    def close(self) -> None:
        """Remove the hooks of gradients and destroy the process groups."""
        for part in self.parts.values():
            part.close()
        self.mesh.close()


def calibrate_linears(
    spec: StepSpec, world: World, compute: SimulatedCompute, seconds: float
) -> None:
    """Make the waits of simulated Linears shorter, by the time that the host needs to run them.

    Without this, a forward pass would take ``seconds`` and the host's time in addition. ``seconds``
    is the simulated forward time of one microbatch on a rank that has layers / pp layers. The
    host's time is measured here on a model with layers / pp layers, which is not distributed. The
    results are the factors ``forward_scale`` and ``backward_scale`` of ``compute``.
    """
    layers = max(1, spec.shape.layers // spec.dims.pp)
    is_full = spec.dims.pp == 1
    model = make_meta_model(
        spec.shape, DTYPES[spec.bytes_per_element], range(layers), has_head=is_full
    )
    share_seconds = seconds * layers * spec.dims.pp / spec.shape.layers
    simulate_linears(model, share_seconds, compute)
    initialize(model, world.seed, world.device)
    tokens = draw_tokens(spec.shape, spec.microbatch, world.seed, 0).to(world.device)

    def run_forward() -> Tensor:
        """Return a scalar to start backward from: the loss or, without the head, a sum."""
        return compute_loss(model, tokens) if is_full else model(tokens[:, :-1]).sum()

    calibrate(compute, share_seconds, run_forward)


def build(preset: Preset, world: World, **params: Value) -> TrainStep:
    """Return the training step of a preset, such as ``fsdp``, with the parameters ``params``.

    All ranks call it. If the step's single-process reference does not fit in memory, a small model
    of the same preset is checked first, with the sizes that ``shrink_model`` returns. The number of
    its wrong elements is kept in the returned step, whose own check adds it.
    """
    spec = preset(params, world.size)
    if spec.is_simulated or does_reference_fit(world, spec):
        return TrainStep(world, spec)
    small_params = {**params, **shrink_model(spec, params)}
    small = TrainStep(world, preset(small_params, world.size))
    small.reset()
    small.step()
    wrong = small.check()
    differences = [f"on a small model: {text}" for text in small.differences()]
    small.close()
    step = TrainStep(world, replace(spec, reference_fits=False))
    step.small_model_wrong = wrong
    step.small_model_differences = tuple(differences)
    return step


# The factories of the benchmarks ``workload.<name>``, as `catalogue` names them.
ddp = partial(build, PRESETS["ddp"])
zero1 = partial(build, PRESETS["zero1"])
fsdp = partial(build, PRESETS["fsdp"])
hsdp = partial(build, PRESETS["hsdp"])
tp = partial(build, PRESETS["tp"])
tp_sp = partial(build, PRESETS["tp_sp"])
tp_fsdp = partial(build, PRESETS["tp_fsdp"])
pp = partial(build, PRESETS["pp"])
cp = partial(build, PRESETS["cp"])
ep_step = partial(build, PRESETS["ep_step"])
hybrid = partial(build, PRESETS["hybrid"])
