"""Context parallelism: each rank holds the full model and a part of every sequence.

DDP averages the gradients over the same ranks on a group of its own, so that their bytes are counted
apart from those of attention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from parbench.bench.plan.params import Value
from parbench.bench.world.world import World
from parbench.workloads.context_parallel.attention import (
    build_attention,
    install_attention,
    make_full_mask_model,
)
from parbench.workloads.context_parallel.attention_kernel import (
    Kernel,
    choose_kernel,
    make_simulated_attention,
)
from parbench.workloads.context_parallel.context_probe import (
    AttentionProbe,
    compute_expected_bytes,
    make_attention_details,
)
from parbench.workloads.context_parallel.sequence_split import SequenceSplit, split_sequence
from parbench.workloads.costs import strategies
from parbench.workloads.costs.communication_pattern import attention_bytes
from parbench.workloads.costs.compute_shares import ComputeShares, compute_shares
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.data_parallel.ddp import wrap
from parbench.workloads.model.shapes import BUCKET
from parbench.workloads.model.simulated_compute import (
    SimulatedCompute,
    set_distinct_gradients,
)
from parbench.workloads.model.transformer import Transformer, cross_entropy
from parbench.workloads.step.gate import behind_gate
from parbench.workloads.step.layout import Layout, dtype_of, group_of_mine
from parbench.workloads.step.probe import Probe
from parbench.workloads.step.training_step import TrainingStep


class ContextStep(TrainingStep):
    """A training step on parts of sequences, with a probe of the bytes of its attention."""

    def __init__(self, world: World, params: Mapping[str, Value]) -> None:
        # Other simulated compute that takes too long must not shorten a block of attention.
        self._attention_compute = SimulatedCompute(world.device)
        self._mask = str(params["mask"])
        super().__init__(world, params, self._lay_out, strategies.cp)

    def reset(self) -> None:
        self._attention_compute.reset_debt()
        super().reset()

    def probes(self) -> Sequence[Probe[Any]]:
        expected = compute_expected_bytes(
            attention_bytes(self.spec.at(self._world.rank)),
            layers=self.spec.shape.layers,
            recomputations=self.spec.forwards - 1,
        )
        probe = AttentionProbe(
            groups=self.layout.axes,
            split=self._split,
            expected=expected,
            zero_grad=self.layout.optimizer.zero_grad,
            forward=self._forward,
        )
        return probe, *super().probes()

    @property
    def _shares(self) -> ComputeShares:
        keys_per_query = self._split.num_pairs / self._split.sequence
        return compute_shares(self.spec.shape, None, keys_per_query=keys_per_query)

    @property
    def _split(self) -> SequenceSplit:
        return split_sequence(
            self.spec.cp_method,
            self.spec.shape,
            ranks=self._world.size,
            ulysses=self.spec.ulysses,
            mask=self._mask,
        )

    def _make_timed(self, model: Transformer, seconds: float) -> None:
        super()._make_timed(model, seconds * self._shares.linear)

    def _fill_distinct_gradients(self) -> None:
        """Set gradients by rank. All ranks have the same sequences, and the mean is over all."""
        set_distinct_gradients(
            self.layout.model, self._world.rank, self._world.size, self._world.size
        )

    def _lay_out(
        self, model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]
    ) -> Layout:
        split = self._split
        groups = make_groups(world, split)
        kernel = self._make_kernel(spec, split)
        self._attention = build_attention(split, world.rank, world.device, groups, kernel)
        model.places = torch.tensor(split.list_tokens(world.rank), device=world.device)
        install_attention(model, self._attention, model.places)
        ddp, places = wrap(model, world, float(BUCKET.default)), model.places
        layer_bytes = attention_bytes(spec.at(world.rank))
        return replace(
            Layout.of(spec, world, model, {**groups, "dp": world.group}, module=ddp),
            loss=lambda tokens: cross_entropy(
                ddp(tokens[:, :-1][:, places]), tokens[:, 1:][:, places]
            ),
            reference_model=(
                partial(make_full_mask_model, spec.shape) if split.mask == "full" else None
            ),
            made_groups=tuple(groups.values()),
            details=make_attention_details(split, spec.shape, layer_bytes, kernel).as_details,
        )

    def _make_kernel(self, spec: StepSpec, split: SequenceSplit) -> Kernel:
        if spec.timed_seconds is None:
            return choose_kernel(self._world.device, dtype_of(spec), spec.shape.head_size)
        return make_simulated_attention(
            self._attention_compute,
            spec.timed_seconds / spec.shape.layers * self._shares.attention,
            split,
            microbatch=spec.microbatch,
            heads=spec.shape.heads,
        )


def make_groups(world: World, split: SequenceSplit) -> dict[str, dist.ProcessGroup]:
    """Return new groups of a rank for each axis of attention. All ranks take part."""
    ranks = dist.get_process_group_ranks(world.group)
    partitions = split.method.list_axis_groups(ranks, split.ulysses)
    return {axis: group_of_mine(world, partition) for axis, partition in partitions.items()}


prepare = behind_gate(ContextStep, strategies.cp)
