"""What a pipeline sends: b s h e bytes per microbatch, boundary and direction. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from workloads.model.shapes import Shape
from workloads.pipeline_parallel.pipeline_case import Pipeline

Link = tuple[int, int]
"""The rank that sends and the one that receives."""


def message_bytes(shape: Shape, microbatch: int, element_bytes: int) -> int:
    """Return the bytes of one microbatch's activations, or of their gradients, at a boundary: b s h e."""
    return microbatch * shape.sequence * shape.hidden * element_bytes


def bytes_by_link(pipeline: Pipeline, shape: Shape, microbatch: int, element_bytes: int) -> dict[Link, int]:
    """Return the bytes that pass each link in a step; stages that follow one another on one rank send nothing."""
    schedule = pipeline.schedule
    each = message_bytes(shape, microbatch, element_bytes) * schedule.microbatches
    sent: defaultdict[Link, int] = defaultdict(int)
    for stage in range(schedule.num_stages - 1):
        here, there = schedule.rank_of(stage), schedule.rank_of(stage + 1)
        if here != there:
            sent[here, there] += each
            sent[there, here] += each
    return dict(sent)


def bytes_by_rank(pipeline: Pipeline, shape: Shape, microbatch: int, element_bytes: int) -> list[float]:
    """Return the bytes that each rank sends in a step."""
    links = bytes_by_link(pipeline, shape, microbatch, element_bytes)
    return [float(sum(links[link] for link in _from(links, rank))) for rank in range(pipeline.schedule.ranks)]


def _from(links: Mapping[Link, int], rank: int) -> Iterable[Link]:
    return (link for link in links if link[0] == rank)
