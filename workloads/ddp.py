"""One training step under torch's DistributedDataParallel: gradients are summed in buckets under the backward pass."""

import copy

import torch
from torch.nn.parallel import DistributedDataParallel

from bench.messages import Work
from bench.subject import Description
from bench.world import World
from workloads.model import Shape, build, draw_tokens, loss_of
from workloads.parity import count_apart, count_unlike_rank_0


def prepare(
    world: World,
    *,
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    vocabulary: int,
    microbatch: int,
    bucket_mb: float,
) -> "DdpStep":
    """Return the step; every rank takes ``microbatch`` sequences of a global batch of n times as many."""
    shape = Shape(layers=layers, hidden=hidden, heads=heads, sequence=sequence, vocabulary=vocabulary)
    return DdpStep(world, shape, microbatch, bucket_mb)


class DdpStep:
    """Forward, backward with bucketed all_reduce, AdamW; in float32."""

    def __init__(self, world: World, shape: Shape, microbatch: int, bucket_mb: float) -> None:
        self._world, self._shape, self._microbatch, self._bucket_mb = world, shape, microbatch, bucket_mb
        self._model = build(shape, world.seed, world.device)
        self._ddp = DistributedDataParallel(
            self._model,
            process_group=world.group,
            bucket_cap_mb=bucket_mb,
            device_ids=[world.device] if world.device.type == "cuda" else None,
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._step_number = 0
        self._draw()

    def step(self) -> None:
        """Train on this rank's part of the present batch."""
        self._optimizer.zero_grad()
        loss_of(self._ddp, self._mine).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def reset(self) -> None:
        """Draw the next batch."""
        self._step_number += 1
        self._draw()

    def check(self) -> int:
        """Compare weights, bit for bit, with rank 0's, and gradients with a single process's on the whole batch."""
        wrong = count_unlike_rank_0(self._model.parameters(), self._world.group)
        alone = copy.deepcopy(self._model)
        alone.zero_grad()
        loss_of(alone, self._batch).backward()  # type: ignore[no-untyped-call]
        self._optimizer.zero_grad()
        loss_of(self._ddp, self._mine).backward()  # type: ignore[no-untyped-call]
        return wrong + count_apart(
            (parameter.grad for parameter in self._model.parameters()),
            (parameter.grad for parameter in alone.parameters()),
        )

    def describe(self) -> Description:
        """Return tokens, parameters and bytes: DDP sums every gradient once, 2 Psi e (n-1)/n bytes sent per rank."""
        n = self._world.size
        num_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        tokens = n * self._microbatch * self._shape.sequence
        return Description(
            headline="step_time",
            work=(Work(name="tokens_per_second", amount=tokens, unit="tokens/s"),),
            details={
                "parameters": num_parameters,
                "tokens_per_step": tokens,
                "gradient_bytes": 4 * num_parameters,
                "send_bytes_formula": 2 * 4 * num_parameters * (n - 1) // n,
                "bucket_mb": self._bucket_mb,
                "dtype": "float32",
                "optimizer": "AdamW",
            },
        )

    def close(self) -> None:
        """Nothing to give back: the model goes with the subject."""

    def _draw(self) -> None:
        sequences = self._world.size * self._microbatch
        tokens = draw_tokens(self._shape, sequences, self._world.seed, self._step_number)
        self._batch = tokens.to(self._world.device)
        mine = slice(self._world.rank * self._microbatch, (self._world.rank + 1) * self._microbatch)
        self._mine = self._batch[mine]
