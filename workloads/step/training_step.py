"""A training step under any parallelism: forward, backward, optimizer, on microbatches of one global batch.

A parallelism is a function from the model to a ``Layout``; batches, accumulation, the parity gate and the explanation
are the same for all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from bench.launch.control_channel import Work
from bench.plan.params import Value
from bench.results.details import Mesh
from bench.world.subject import Description, Explanation
from bench.world.world import World
from workloads.model.checkpointing import checkpoint
from workloads.model.shapes import COMMON, Shape, flops_per_token, num_parameters, parse_compute, shape_of
from workloads.model.timed_compute import TimedCompute, calibrate, fill_distinct_gradients, make_timed
from workloads.model.transformer import Transformer, build, draw_tokens, loss_of
from workloads.step.layout import Layout
from workloads.step.memory import Batch, Memory, memory_formula, memory_notes
from workloads.step.overlap import Overlap
from workloads.step.parity import Parity
from workloads.step.peaks import Peak, mfu_of, peak_of
from workloads.step.probe import Probe, run_probes
from workloads.step.sent_bytes import SentBytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

LayOut = Callable[[Transformer, World, "Options", Mapping[str, Value]], Layout]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What all parallelisms share: the model's shape, a rank's batch, and how it computes."""

    shape: Shape
    microbatch: int
    accumulation: int
    dtype: torch.dtype
    checkpointing: str
    timed_seconds: float | None

    @staticmethod
    def of(params: Mapping[str, Value]) -> "Options":
        """Return the options that a case's parameters mean; a step of one's own may leave out what all steps share."""
        params = {**{param.name: param.default for param in COMMON}, **params}
        return Options(
            shape=shape_of(params),
            microbatch=int(params["microbatch"]),
            accumulation=int(params["accumulation"]),
            dtype=DTYPES[str(params["precision"])],
            checkpointing=str(params["checkpointing"]),
            timed_seconds=parse_compute(str(params["compute"])),
        )

    @property
    def timed(self) -> bool:
        """Whether arithmetic is replaced by waits."""
        return self.timed_seconds is not None

    @property
    def num_sequences(self) -> int:
        """Sequences that one data rank takes in a step."""
        return self.microbatch * self.accumulation


class TrainingStep:
    """One step of training; every data rank takes ``accumulation`` microbatches of the same global batch."""

    def __init__(self, world: World, params: Mapping[str, Value], lay_out: LayOut) -> None:
        self._world, self._options = world, Options.of(params)
        model = build(self._options.shape, world.seed, world.device, self._options.dtype)
        self._waiter = TimedCompute(world.device)
        if self._options.timed_seconds is not None:
            self._make_timed(model, self._options.timed_seconds)
        checkpoint(model, self._options.checkpointing)
        self.layout = lay_out(model, world, self._options, params)
        if self.layout.made_groups:
            world.barrier()  # a group that one rank gives back while another still connects breaks that one
        self._fill_distinct_gradients()
        self._parity = Parity(world, self.layout, self._options.shape, self._options.dtype)
        self._peak = self._agreed_peak()
        self._step_number = 0
        self._draw()

    def step(self) -> None:
        """Train on this rank's part of the present batch."""
        self.layout.optimizer.zero_grad()
        self._forward_backward()
        with record_function("parbench:update"):
            self.layout.optimizer.step()

    def reset(self) -> None:
        """Draw the next batch."""
        self._waiter.forget()
        self._step_number += 1
        self._draw()

    def check(self) -> int:
        """Return how many elements fail the parity gate; see ``Parity``."""
        if self._options.timed:
            return self._parity.count_wrong_fills(self._options.accumulation)
        microbatches = self._batch.chunk(self.layout.data_size * self._options.accumulation)
        return self._parity.count_wrong(microbatches, self._losses_and_gradients, self.step)

    def describe(self) -> Description:
        """Return tokens, parameters and FLOPs, and what the row cannot claim."""
        tokens, flops, peak = self._tokens_per_step(), self._flops_per_rank(), self._peak
        work = [Work(name="tokens_per_second", amount=tokens)]
        if peak is not None:
            work.append(Work(name="mfu", amount=flops / peak.flops_per_second))
        return Description(
            headline="step_time",
            work=tuple(work),
            details={
                "parameters": num_parameters(self._options.shape),
                "tokens_per_step": tokens,
                "flops_per_rank": flops,
                "flops_convention": "PaLM: 6 N + 12 L H Q T a token, attention counted whole, recomputation not",
                "peak": None if peak is None else {"flops_per_second": peak.flops_per_second, "source": peak.source},
                "optimizer": "AdamW",
                **Mesh(axes={name: {"ranks": group.size()} for name, group in self.layout.axes.items()}).as_details,
                **self.layout.details,
            },
            notes=(*self.layout.notes, *self._notes()),
        )

    def explain(self, begin: Callable[[], None], budget_seconds: float) -> Explanation:
        """Say what the probes find; the model is worth nothing afterwards."""
        return run_probes(self._world, self.probes(), self.step, begin, budget_seconds)

    def probes(self) -> Sequence[Probe[Any]]:
        """Return what looks into the step, in order: memory and bytes before steps without communication spoil it."""
        batch = self._batch_sizes()
        memory = Memory(
            world=self._world,
            layout=self.layout,
            forward=self._forward,
            formula=self.memory_formula(),
            notes=memory_notes(self.layout, batch),
        )
        return memory, SentBytes(self.layout), Overlap(self._world, self.layout, self._doubts_of_peak)

    def memory_formula(self) -> dict[str, float]:
        """Return the closed forms of what this rank holds by component, those that there are."""
        return memory_formula(self.layout, self._options.shape, self._batch_sizes())

    def close(self) -> None:
        """Give back the process groups that the layout made."""
        self.layout.close()

    def _batch_sizes(self) -> Batch:
        return Batch(
            microbatch=self._options.microbatch,
            element_bytes=self._options.dtype.itemsize,
            checkpointing=self._options.checkpointing,
        )

    def _doubts_of_peak(self, step_seconds: float) -> tuple[str, ...]:
        """Return what to say of a measured peak that a step exceeds; of a datasheet's that is a ``ValueError``."""
        if self._peak is None:
            return ()
        rate = self._flops_per_rank() / step_seconds
        if self._peak.measured and rate > self._peak.flops_per_second:
            return (f"mfu above 100 %: the peak of {self._peak.flops_per_second:.3g} FLOP/s was measured too low",)
        mfu_of(rate, self._peak.flops_per_second, peak_name=self._peak.source)
        return ()

    def _flops_per_rank(self) -> float:
        return self._tokens_per_step() * flops_per_token(self._options.shape) / self._world.size

    def _tokens_per_step(self) -> int:
        return self.layout.data_size * self._options.num_sequences * self._options.shape.sequence

    def _make_timed(self, model: Transformer, seconds: float) -> None:
        """Replace arithmetic by waits, and make them exact on a microbatch of the plain model."""
        make_timed(model, seconds, self._waiter)
        tokens = draw_tokens(self._options.shape, self._options.microbatch, self._world.seed, 0)
        calibrate(seconds, self._waiter, lambda: loss_of(model, tokens.to(self._world.device)))
        model.zero_grad()

    def _fill_distinct_gradients(self) -> None:
        """Let data ranks' timed gradients differ, so that their mean can be checked."""
        fill_distinct_gradients(self.layout.model, self.layout.data_rank, self.layout.data_size, self._world.size)

    def _forward_backward(self) -> Tensor | None:
        """Return the mean loss of this rank's microbatches; gradients are of the mean over all data ranks."""
        if self.layout.forward_backward is not None:
            return self.layout.forward_backward(self._mine)
        total = torch.zeros((), device=self._world.device)
        for i, tokens in enumerate(self._mine):
            last = i == len(self._mine) - 1
            with self.layout.gradient_sync(last):
                with record_function("parbench:forward"):
                    loss = self.layout.loss_of(tokens) / len(self._mine)
                with record_function("parbench:backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        self.layout.finalize_gradients()
        return total

    def _forward(self) -> Tensor:
        return self.layout.loss_of(self._mine[0])

    def _losses_and_gradients(self) -> Tensor | None:
        self.layout.optimizer.zero_grad()
        return self._forward_backward()

    def _draw(self) -> None:
        """Draw the global batch, and cut out this rank's microbatches."""
        each = self._options.num_sequences
        tokens = draw_tokens(self._options.shape, self.layout.data_size * each, self._world.seed, self._step_number)
        self._batch = tokens.to(self._world.device)
        mine = self._batch[self.layout.data_rank * each : (self.layout.data_rank + 1) * each]
        self._mine: tuple[Tensor, ...] = torch.split(mine, self._options.microbatch)

    def _agreed_peak(self) -> Peak | None:
        """Return the highest peak of any rank, for what it is measured by scatters; None where waits are timed."""
        if self._options.timed:
            return None
        told = self._world.gather(peak_of(self._world.device, self._options.dtype))
        known = [peak for peak in told if isinstance(peak, Peak)]
        return max(known, key=lambda peak: peak.flops_per_second, default=None)

    def _notes(self) -> tuple[str, ...]:
        if not self._options.timed:
            return ()
        return (
            "timed compute: arithmetic is waited for and no weight updated, so overlap is real and results are not",
        )
