"""A measured step as it was asked for, and what it should send and hold. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from bench.plan.params import Value
from workloads.costs.communication_pattern import StateBytes
from workloads.model.shapes import Shape, shape_of
from workloads.pipeline_parallel.pp_bytes import message_bytes
from workloads.planner.link_time import Call
from workloads.planner.placement import Place


@dataclass(frozen=True, kw_only=True)
class Step:
    """A measured step as it was asked for, on ``ranks`` ranks of a kind of device."""

    name: str
    params: Mapping[str, Value]
    ranks: int
    on_node: int
    device: str = "cpu"

    @property
    def shape(self) -> Shape:
        """The model's sizes."""
        return shape_of(self.params)

    @property
    def element_bytes(self) -> int:
        """Of weights, gradients and activations."""
        return 2 if self.params["precision"] == "bfloat16" else 4

    @property
    def microbatches(self) -> int:
        """Of one data rank: accumulated, or of a pipeline."""
        return int(self.params.get("microbatches", self.params.get("accumulation", 1)))

    @property
    def activation_bytes(self) -> int:
        """One microbatch between layers: b s h e."""
        return message_bytes(self.shape, int(self.params["microbatch"]), self.element_bytes)

    def place(self, ranks: int) -> Place:
        """Return where a group of so many ranks sits; all alike, as the run's own collectives were measured."""
        return Place(ranks=ranks, on_node=min(ranks, self.on_node))


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The calls of the busiest rank in a step, and the state that it holds."""

    calls: tuple[Call, ...]
    state: StateBytes


def call_of(step: Step, axis: str, op: str, num_bytes: float, count: float, ranks: int) -> Call:
    """Return ``count`` calls that are alike, on so many of the step's ranks."""
    return Call(axis=axis, op=op, num_bytes=num_bytes, count=count, place=step.place(ranks), why=step.name)
