"""How one sample is taken: one step, several back to back, coalesced, as a CUDA graph, or issued and then waited for.

They answer different questions and are never one series.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from bench.errors import UserError
from bench.world.subject import Subject
from bench.world.torch_compat import coalescing
from bench.world.world import World

MANY = ("pipelined", "coalesced", "graph")
"""The modes in which a sample is several steps."""

Sample = Callable[[], int | None]
"""Takes one sample; returns the host's time, in ns, at which an asynchronous one was issued."""


@runtime_checkable
class Issuable(Protocol):
    """A subject whose step can be started and waited for apart."""

    def issue(self) -> Sequence[dist.Work]:
        """Start a step and return what to wait for."""


def sampler(mode: str, subject: Subject, world: World, steps: int) -> Sample:
    """Return what takes a sample of ``steps`` steps; ``UserError`` if the subject cannot be measured so."""
    if mode == "async":
        return _issued(subject)
    if mode == "coalesced":
        return _coalesced(subject, world, steps)
    if mode == "graph":
        return _graph(subject, steps)
    return lambda: _repeat(subject, steps)


def _repeat(subject: Subject, steps: int) -> None:
    for _ in range(steps):
        subject.step()


def _issued(subject: Subject) -> Sample:
    if not isinstance(subject, Issuable):
        raise UserError("mode async: this subject cannot be issued and waited for apart")

    def sample() -> int:
        works = subject.issue()
        issued = time.perf_counter_ns()
        for work in works:
            work.wait()
        return issued

    return sample


def _coalesced(subject: Subject, world: World, steps: int) -> Sample:
    def sample() -> None:
        with coalescing(world.group, None if world.backend == "gloo" else world.device):
            _repeat(subject, steps)

    return sample


def _graph(subject: Subject, steps: int) -> Sample:
    """Capture the steps once, after a warm-up on a side stream as CUDA graphs need it, and replay them."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        subject.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _repeat(subject, steps)
    return graph.replay
